"""Command line: run and look at experiments, clear the store, fetch data.

`pfl WORD --help`, or `python -m pfl_core WORD --help`, says more.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfl_core.util import checks, commands, paths
from pfl_core.util.commands import several

if TYPE_CHECKING:
    from pfl_core.experiments.store import Result


def late(name: str) -> Any:
    """A module of ours that takes seconds to import: where a command needs it, not before."""
    return importlib.import_module(f"pfl_core.{name}")


def _methods() -> dict[str, str]:
    # As list_methods, which imports torch; where nothing else did, the files are read as text.
    if "pfl_core.methods" in sys.modules:
        return late("methods.base").list_methods()
    found = {}
    for file in (paths.PACKAGE / "methods").glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef):
                continue
            for line in node.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "name":
                    doc = ast.get_docstring(node) or ""
                    found[ast.literal_eval(line.value)] = doc.partition("\n")[0]
    return dict(sorted(found.items()))


LISTS: dict[str, Callable[[], dict[str, str]]] = {
    "methods": _methods,
    "datasets": lambda: late("data.pools").list_datasets(),
    "models": lambda: late("models").list_models(),
    "partitions": lambda: late("data.partition").list_partitions(),
    "metrics": lambda: late("engine.scoring").list_metrics(),
    "runs": lambda: late("experiments.listing").listed(
        late("experiments.store").finished(), late("experiments.begun").begun()
    ),
}
# What `show` says first of a run's meta; digests and the like stand below.
FIRST = (
    "status", "warned", "rounds", "clients", "parameters", "device", "executor", "wall_s", "cpu_s",
    "date", "version", "commit",
)  # fmt: skip


@functools.cache
def fields() -> dict[str, dataclasses.Field]:
    """{name: field} of Experiment."""
    return {f.name: f for f in dataclasses.fields(late("experiments.experiment").Experiment)}


# -- experiments -----------------------------------------------------------------------------------


def value(name: str, text: str) -> Any:
    """A field's value from a word: text, JSON or a Python literal.

    Also a=1,b=2 for a dict, a,b for a tuple, a run or a file for init_from.
    """
    kind = late("util.fields").kind(fields()[name])
    if kind == "str":
        return text
    if "Experiment" in kind and (Path(text).is_file() or Path(text).suffix):
        return text  # a file of weights
    if "Experiment" in kind:
        return late("experiments.listing").by_id(text).experiment
    if kind.startswith("dict") and not text.startswith(("{", "[")):
        return {k: _literal(v) for k, _, v in (pair.partition("=") for pair in text.split(","))}
    return tuple(text.split(",")) if kind.startswith("tuple") else _literal(text)


def _literal(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):  # true and True, .1
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text  # a field of another type refuses it


def do_run(args: Namespace) -> int:
    """Run one experiment, or find it in the store. Every field of Experiment is an option; fields
    that hold several values take a=1,b=2 (--partition_args alpha=0.1,split=70/10/20) or JSON. A run
    that diverges ends with status 1."""
    given = {n: text for n in fields() if (text := getattr(args, n)) is not None}
    values = {n: value(n, text) for n, text in given.items()}
    experiment = late("experiments.experiment").Experiment(**values)
    log = None
    if args.tensorboard:
        log = late("extras.logging").tensorboard(experiment, args.tensorboard)
    how = dict(device=args.device, executor=args.executor, recompute=args.recompute)
    if args.fed:
        how["fed"] = late("data.federation").Federation.open(args.fed)
    if late("experiments.starts").over_own(experiment):  # --init_from names its run
        how["source"] = late("experiments.listing").by_id(given["init_from"])
    result = late("experiments.run").run(experiment, on_round=log, **how)
    show(result)
    if not result.ok:
        print(f"pfl_core run: run {result.id} {result.meta['status']}", file=sys.stderr)
    return int(not result.ok)


def do_show(args: Namespace) -> None:
    """Show a finished run: its experiment, its accuracies, and what it ran on; or several side by
    side, with the fields in which they differ"""
    listing = late("experiments.listing")
    found = [listing.by_id(start) for start in args.run]
    if len(found) == 1:
        show(found[0])
    else:
        print(listing.side_by_side(found).to_string())


def show(result: Result) -> None:
    """Print a run."""
    accuracies = result.summary()
    shown = accuracies.to_string() if len(accuracies) else "no test accuracy"
    clean = checks.printable
    print(clean(result), repr(result.experiment), "", shown, "", sep="\n")
    meta = {k: result.meta[k] for k in FIRST if k in result.meta}
    meta |= {"folder": result.folder} | {k: v for k, v in result.meta.items() if k != "id"}
    print("\n".join(f"{k:14} {clean(v)}" for k, v in meta.items()))


def do_sweep(args: Namespace) -> int:
    """Run the study of a file, or what is left of it; docs/runs.md has its form. Status 1 if a run
    diverges or fails"""
    study = late("experiments.study").Study.read(args.study)
    if args.status:
        with _aside():
            status = study.status()
        print(status.to_string())
        return 0
    how = dict(jobs=args.jobs, on=args.on, device=args.device)
    shard, tables = late("experiments.study").shard(args.shard), late("analysis.tables")
    study.run(shard, **how)
    found = [result for *_, result in study.found()]
    ended = [result for result in found if result]
    lost = sum(not result.ok for result in ended)
    print(f"{len(ended)} of {len(found)} runs are finished, {lost} of them diverged")
    if len(ended) == len(found) > lost:
        print(tables.table(*ended, **study.table))
    if failed := study.part(found, shard).count(None):
        print(f"pfl_core sweep: {failed} runs ended with an error, said above", file=sys.stderr)
    return int(lost > 0 or failed > 0)


def _aside() -> contextlib.AbstractContextManager:
    # Messages do not stand in what a command prints for other programs.
    return contextlib.redirect_stdout(sys.stderr)


def do_table(args: Namespace) -> None:
    """Show finished runs as a table: those of a study's file, or some by their ids"""
    options = ("against", "metric", "select", "when", "average", "digits", "rows", "columns")
    how = {n: v for n in options if (v := getattr(args, n)) not in ("", None)}
    if len(args.what) == 1 and Path(args.what[0]).suffix:
        study = late("experiments.study").Study.read(args.what[0])
        with _aside():
            every = [result for *_, result in study.found()]
        how, found = study.table | how, [result for result in every if result]
        if len(found) < len(every):
            print(f"{len(found)} of {len(every)} runs are finished", file=sys.stderr)
        if not found:
            raise ValueError(
                f"no run of {study.path} is finished; `pfl sweep {study.path}` runs it"
            )
    else:
        found = [late("experiments.listing").by_id(start) for start in args.what]
    with _aside():
        made = late("analysis.tables").table(*found, **how)
    if args.csv:
        made.csv(args.csv)
    print(made.latex() if args.latex else made)


def do_list(args: Namespace) -> None:
    """List what there is, a line each; of runs, what differs from most of the others stands behind
    method, data, seed and rate, then come means over seeds, and what is not finished"""
    for kind in args.kind:
        checks.known("list", kind, LISTS)
    for kind in args.kind or LISTS:
        if len(args.kind) != 1:
            print(f"\n{kind}:")
        found = LISTS[kind]()
        for name, line in found.items():
            print(f"{name:20} {checks.printable(line)}")
        if args.kind and not found:
            print(f"no finished {kind} in {paths.store_folder()}", file=sys.stderr)


def do_fetch(args: Namespace) -> None:
    """Download a data set, verify it, keep it as an array cache"""
    for name in args.name:
        pool = late("data.pools").fetch(name)
        print(f"{name}: {pool.n} samples, {pool.classes} classes, checksum {pool.checksum[:12]}")


# -- the store -------------------------------------------------------------------------------------


def do_prune(args: Namespace) -> None:
    """List runs of the store that no row in runs/results/ or results/ names, and, if you say yes,
    move them to a trash folder beside the store. Nothing is deleted but by --empty-trash, which
    asks, too"""
    prune = late("experiments.prune")
    filters = {n: getattr(args, n) for n in ("age", "status", "method", "dataset", "paper")}
    if args.empty_trash:
        if args.runs or args.all or any(filters.values()):
            raise ValueError("--empty-trash takes no RUN, filter or --all: it deletes all there is")
        _empty_trash(args)
        return
    found = prune.find(args.runs, **filters)
    chosen = [f for f in found if args.all or not f.named]
    print(*chosen, sep="\n")
    if kept := len(found) - len(chosen):
        where = "in results/ or runs/results/"
        print(f"{kept} more are named by rows {where} and stay; --all lists them, too")
    whole = f"{len(chosen)} ({prune.megabytes(sum(f.size for f in chosen))})"
    if chosen and _agreed(args, f"move these {whole} to {paths.trash_folder()}"):
        away, moved = prune.move(chosen)
        back = "move a folder back to have it again, or free the room: prune --empty-trash"
        print(f"{len(moved)} moved to {away}; {back}")
    elif not chosen:
        of = ", ".join(sorted({f.method for f in prune.find(status=prune.STATUS)}))
        print(f"nothing to move; in {paths.store_folder()} lie runs of {of or 'no method'}")


def _empty_trash(args: Namespace) -> None:
    prune = late("experiments.prune")
    lying = prune.trashed()
    print(*(f"{path}  {prune.megabytes(size)}" for path, size in lying), sep="\n")
    whole = f"{len(lying)} for ever ({prune.megabytes(sum(s for _, s in lying))})"
    if lying and _agreed(args, f"delete these {whole}"):
        prune.empty(lying)
        print(f"{len(lying)} deleted")
    elif not lying:
        print("the trash is empty")


def _agreed(args: Namespace, what: str) -> bool:
    if args.yes:
        return True
    if not sys.stdin.isatty():
        print(f"nothing was done; add --yes to {what}")
        return False
    return input(f"{what}? [y/N] ").strip().lower() in ("y", "yes")


# -- words -----------------------------------------------------------------------------------------


def parser(prog: str, word_given: str = "run") -> commands.Words:
    """The words and their options: those of `run`, which are many, where that is the word given."""
    words = commands.Words(prog, __doc__, "pfl_core")
    add = words.add(do_run)
    if word_given == "run":
        _options_of_run(add)
    add = words.add(do_show)
    add("run", nargs="+", metavar="RUN", help="the id of a run, or its first digits")
    _plugins(add)
    add = words.add(do_list)
    add("kind", nargs="*", metavar="KIND", help=f"of {', '.join(LISTS)}")
    _plugins(add)
    _options_of_studies(words)
    words.add(do_fetch)("name", nargs="+", metavar="NAME", help="of `list datasets`")
    _options_of_prune(words.add(do_prune))
    return words


def _plugins(add: Callable) -> None:
    why = "import these modules first; runs are read without them, too"
    add("--plugins", default="", metavar="A,B", help=why)


def _options_of_run(add: Callable) -> None:
    executors = ", ".join(late("engine.engine").EXECUTORS)
    for f in fields().values():
        metavar = str(f.type).partition(" ")[0].upper().partition("[")[0]
        add(f"--{f.name}", metavar=metavar, help=described(f).replace("%", "%%"))
    add("--device", default="auto", help="auto, cpu or cuda (default: auto, a GPU if there is one)")
    add("--executor", default="auto", help=f"of {executors} (default: auto, by device)")
    own = "data of your own, with dataset own: what Federation.save wrote (default: none)"
    add("--fed", type=Path, metavar="FOLDER", help=own)
    log = "log each evaluated round there (default: nowhere)"
    add("--tensorboard", type=Path, metavar="FOLDER", help=log)
    anew = (
        "compute anew, and keep the stored result aside (default: a stored result is shown again). "
        "Changed code of your own makes another run by itself; a built-in method whose numbers "
        "change raises its `revision`"
    )
    add("--recompute", action="store_true", help=anew)


def described(field: dataclasses.Field) -> str:
    """What a field of Experiment is, what is allowed, and its default."""
    experiments = late("experiments.experiment")
    allowed = late("util.fields").allowed(field) if field.metadata.get("allowed") else ""
    default = experiments._default(field)
    if default in (None, {}, [], (), ""):
        default = "none"
    elif isinstance(default, bool):
        default = str(default).lower()
    start = "the id of a finished run, or its first digits, or a file"
    source = start if field.name == "init_from" else ""
    said = "; ".join(p for p in (field.metadata["doc"], allowed, source) if p)
    return f"{said} (default: {default})"


def _options_of_studies(words: commands.Words) -> None:
    add = words.add(do_sweep)
    add("study", type=Path, metavar="FILE", help="a TOML file")
    add("--jobs", type=int, metavar="N", help="runs at a time (default: by device and network)")
    add("--on", choices=("local", "ray"), help="this machine or a cluster (default: $PFL_ON)")
    add("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    of = "the i-th of n parts, for job arrays over one store (default: 1/1, all)"
    add("--shard", default="1/1", metavar="I/N", help=of)
    add("--status", action="store_true", help="say what is finished, and run nothing")
    add = words.add(do_table)
    add("what", nargs="+", metavar="FILE|RUN", help="a study's file, or ids of runs")
    for name, said in (
        ("against", "a row from which differences are shown"),
        ("metric", "what is shown, such as auc (default: acc_pct)"),
        ("select", "last, last10, best_val or best_test (default: last)"),
        ("when", "before or after local training (default: before)"),
        ("average", "client or pooled (default: client)"),
        ("rows", "the field whose values name rows (default: tags, or what differs)"),
        ("columns", "the field whose values name columns"),
    ):
        add(f"--{name}", default="", help=said)
    add("--digits", type=int, metavar="N", help="decimals (default: 2, of auc and others 3)")
    add("--latex", action="store_true", help="print LaTeX")
    add("--csv", type=Path, metavar="FILE", help="write the numbers there, too")


def _options_of_prune(add: Callable) -> None:
    ids = "ids, or their first four digits or more (default: all)"
    add("runs", nargs="*", metavar="RUN", help=ids)
    add("--age", type=float, default=0, metavar="DAYS", help="at least so old (default: any)")
    kinds = "of done, failed, unfinished, aside (default: all but unfinished)"
    add("--status", nargs="+", default=[], metavar="S", help=kinds)
    for name in ("method", "dataset", "paper"):
        several(add, f"--{name}", "of these only (default: any)")
    add("--all", action="store_true", help="runs that rows in results/ or runs/results/ name, too")
    add("--yes", action="store_true", help="do not ask")
    gone = "delete what earlier calls moved to the trash; takes no filters"
    add("--empty-trash", action="store_true", help=gone)


def _as_fields(argv: Sequence[str]) -> list[str]:
    # --partition-args is --partition_args: one option, shown once.
    if argv[:1] != ["run"]:
        return list(argv)
    names = {f"--{n.replace('_', '-')}": f"--{n}" for n in fields()}
    parts = [word.partition("=") for word in argv]
    return [names.get(name, name) + equals + rest for name, equals, rest in parts]


def _check_belongs(args: Namespace, word: str) -> None:
    # ValueError for an option that is an argument of the method, the partition or the model.
    given = {n: text for n in fields() if (text := getattr(args, n)) is not None}
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    if where := late("experiments.experiment").belongs(name, given):
        raise ValueError(f"run has no option {word}; give it as --{where} {name}=...")


def _check(args: Namespace, surplus: list[str], complain: Callable) -> None:
    if args.word == "run":
        for word in surplus:
            _check_belongs(args, word)
    else:
        read_without(getattr(args, "plugins", ""), complain)


def read_without(plugins: str, complain: Callable) -> None:
    """Import modules that a user names for reading: what is stored can be read without them."""
    for plugin in filter(None, plugins.split(",")):
        try:
            late("experiments.experiment").import_plugin(plugin)
        except Exception as error:  # whatever a user's module raises
            complain(f"{plugin} is not imported, and what is stored is read without it ({error})")


def main(argv: Sequence[str] | None = None, prog: str = "python -m pfl_core") -> int:
    """Run one command; see `Words.call` for what it returns."""
    argv = sys.argv[1:] if argv is None else argv
    return parser(prog, *argv[:1]).call(_as_fields(argv), _check)


def command() -> int:
    """The command `pfl`: as `python -m pfl_core`, which finds plugins in the current folder."""
    if not sys.flags.safe_path:
        sys.path.insert(0, "")
    return main(prog="pfl")


if __name__ == "__main__":
    sys.exit(main())
