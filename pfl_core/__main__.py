"""Command line: run and look at experiments, plan and publish papers, fetch data; `python -m pfl_core WORD --help` says more."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from pfl_core import models
from pfl_core.data import partition
from pfl_core.data import pools as data
from pfl_core.engine.engine import EXECUTORS
from pfl_core.experiments import experiment as experiments
from pfl_core.experiments import run as runs
from pfl_core.experiments import store
from pfl_core.experiments.experiment import Experiment
from pfl_core.methods.base import list_methods
from pfl_core.util import checks, paths

LISTS = {
    "methods": list_methods,
    "datasets": data.list_datasets,
    "models": models.list_models,
    "partitions": partition.list_partitions,
    "runs": lambda: listed(store.finished()),
}
FIELDS = {f.name: f for f in dataclasses.fields(Experiment)}


def late(name: str) -> Any:
    """A module of ours that takes a second to import (scipy, scikit-learn, matplotlib): where a command needs it, not before."""
    return importlib.import_module(f"pfl_core.{name}")


# -- experiments ---------------------------------------------------------------------------------------------------------


def value(name: str, text: str) -> Any:
    """A field's value from a word: text, JSON or a Python literal; a=1,b=2 for a dict, a,b for a tuple, a run for init_from."""
    kind = FIELDS[name].type
    if kind == "str":
        return text
    if "Experiment" in kind:
        return stored(text).experiment
    if kind == "dict" and not text.startswith("{"):
        return {k: _literal(v) for k, _, v in (pair.partition("=") for pair in text.split(","))}
    return tuple(text.split(",")) if kind.startswith("tuple") else _literal(text)


def _literal(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):  # true and True, .1
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text  # a field of another type refuses it


def stored(start: str) -> store.Result:
    """The finished run whose id begins so; ValueError if there is none, or more than one."""
    found = [r for r in store.finished() if r.id.startswith(start)]
    if len(found) != 1:
        raise ValueError(
            f"{len(found)} finished runs begin with {start!r}; `python -m pfl_core list runs` shows all; a run whose method or "
            "model is in a file of your own needs --plugins NAME, as when it was run"
        )
    return found[0]


def do_run(args: Namespace) -> int:
    """Run one experiment, or find it in the store. Every field of Experiment is an option; fields that hold several values take
    a=1,b=2 (--partition_args alpha=0.1,split=70/10/20) or JSON. A run that diverges ends with status 1."""
    e = Experiment(**{n: value(n, text) for n in FIELDS if (text := getattr(args, n)) is not None})
    log = None
    if args.tensorboard:
        from pfl_core.extras import logging

        log = logging.tensorboard(e, args.tensorboard)
    r = runs.run(
        e, device=args.device, executor=args.executor, on_round=log, recompute=args.recompute
    )
    show(r)
    if not r.ok:
        print(f"pfl_core run: run {r.id} {r.meta['status']}", file=sys.stderr)
    return int(not r.ok)


def do_show(args: Namespace) -> None:
    """Show a finished run: its experiment, its accuracies, and what it ran on"""
    show(stored(args.run))


def show(r: store.Result) -> None:
    """Print a run."""
    accuracies = r.summary()
    print(
        clean(r),
        repr(r.experiment),
        "",
        accuracies.to_string() if len(accuracies) else "no test accuracy",
        "",
        sep="\n",
    )
    print("\n".join(f"{k:14} {clean(v)}" for k, v in r.meta.items() if k != "id"))
    print(f"{'folder':14} {r.folder}")


def do_list(args: Namespace) -> None:
    """List what there is, a line each; of runs, what differs from most of the others stands behind method, data, seed and rate"""
    for kind in args.kind or LISTS:
        if len(args.kind) != 1:
            print(f"\n{kind}:")
        for name, line in LISTS[kind]().items():
            print(f"{name:20} {clean(line)}")


def clean(what: Any) -> str:
    """A text of a run's files for a terminal: what would steer it is written out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(what))


HEAD = ("method", "dataset", "seed", "lr")  # said of every run, whether they differ or not


def listed(found: Iterable[store.Result]) -> dict[str, str]:
    """{id: a line} of runs: date, `HEAD`, in which fields each differs from most of the others, accuracy, status."""
    found = list(found)
    out = {}
    for r, more in zip(found, differing([r.experiment for r in found]), strict=True):
        e, (acc, when) = r.experiment, _last(r)
        said = [f"{e.method} on {e.dataset}", f"seed {e.seed}", f"lr {e.lr:g}"]
        said += [f"{name}={v}" for name, v in more.items() if name not in HEAD]
        out[r.id] = f"{date(r)}  {', '.join(said)}: {acc} {when}" + (
            "" if r.ok else f", {r.meta['status']}"
        )
    return out


def _last(r: store.Result) -> tuple[str, str]:
    h = r.history
    acc = h[(h.metric == "acc_pct") & (h["mean"] == "client") & (h.split == "test")]
    return (
        (f"{acc.value.iloc[-1]:.2f} %", f"({acc.when.iloc[-1]})")
        if len(acc)
        else ("no test data", "")
    )


def date(r: store.Result) -> str:
    """When a run was finished, to the minute, in this computer's time."""
    told = r.meta.get("date")
    at = (
        datetime.fromisoformat(told)
        if told
        else datetime.fromtimestamp((r.folder / "experiment.json").stat().st_mtime)
    )
    return f"{at.astimezone():%Y-%m-%d %H:%M}"


def differing(cells: Sequence[Experiment]) -> list[dict[str, Any]]:
    """Of each Experiment the fields (partition_args.alpha, ...) in which it differs from what most of them have; None: not given."""
    flat = [_flat(e) for e in cells]
    usual = {}
    for name in dict.fromkeys(name for f in flat for name in f):
        values = [repr(f.get(name)) for f in flat]
        usual[name] = max(dict.fromkeys(values), key=values.count)
    return [{n: f.get(n) for n, most in usual.items() if repr(f.get(n)) != most} for f in flat]


def _flat(e: Experiment) -> dict[str, Any]:
    out = {}
    for name in FIELDS:
        v = getattr(e, name)
        if name == "tags":  # decide nothing
            continue
        if isinstance(v, Experiment):
            v = f"{v.method} after {v.rounds} rounds"
        out |= {f"{name}.{k}": w for k, w in v.items()} if hasattr(v, "items") else {name: v}
    return out


def side_by_side(found: Sequence[store.Result]) -> pd.DataFrame:
    """A column a run: seed, rate, the fields that are not the same in all of them, when and on what each ran; then its accuracies."""
    flat, columns = [_flat(r.experiment) for r in found], {}
    names = [
        n
        for n in dict.fromkeys(n for f in flat for n in f)
        if len({repr(f.get(n)) for f in flat}) > 1
    ]
    for r, f in zip(found, flat, strict=True):
        about = {n: f.get(n, "") for n in dict.fromkeys([*HEAD, *names])} | {"date": date(r)}
        about |= {
            n: r.meta.get(n, "") for n in ("status", "commit", "processor", "device", "version")
        }
        columns[r.id] = pd.Series(
            {(n, ""): v for n, v in about.items()} | dict(r.summary().stack()), dtype=object
        )
    return pd.concat(columns, axis=1).fillna("")


# -- papers --------------------------------------------------------------------------------------------------------------


def do_compare(args: Namespace) -> None:
    """Compare: a paper's table reported beside reproduced (`compare fedaghn table1`, with --latex for a document), its claims (`compare
    fedper`), all methods (`compare methods`), or finished runs by their ids"""
    what, *rest = args.what
    PAPERS = late("papers.base").PAPERS
    if what != "methods" and what not in PAPERS:
        if len(what) < 4 or set(what) - set("0123456789abcdef"):
            checks.known("paper or run", what, [*PAPERS, "methods"], "a run is named by its id")
        print(side_by_side([stored(start) for start in args.what]).to_string())
        return
    compare, report = late("papers.comparison"), late("papers.report")
    parts = late("experiments.committed").parts(what, own=True)
    if not parts:
        raise ValueError(
            f"no rows of {what!r} in results/ or {paths.runs_root() / 'results'}; run its notebook first"
        )
    known = {} if what == "methods" else late("papers.base").paper(what).artefacts
    if rest and known:
        printed = set(report.published(what).table)
        checks.known(f"table of {what}:", rest[0], [a for a in known if a in printed])
    for part in parts.values():
        rows = part.rows()
        print(f"{'% ' * args.latex}{what}, {part.profile}-{part.data}:")  # a comment, to LaTeX
        if what == "methods":
            shown = [compare.table(rows)]
        elif rest:
            shown = [
                report.wide(t, known[rest[0]].digits)
                for t in report.tables(rows, what, rest[0]).values()
            ]
        else:
            shown = [report.claims(what, rows, part.profile)[["verdict", "says", "measured"]]]
        for table in shown:
            print(
                report.latex(table)
                if args.latex
                else table.to_string(index=what == "methods" or bool(rest))
            )


def do_plan(args: Namespace) -> None:
    """Say what the notebook of a paper would run, before anything starts: runs, those that are there, hours and memory here"""
    how = dict(
        profile=args.profile,
        datasets=args.datasets,
        artefacts=args.artefacts,
        methods=args.methods,
        seeds=args.seeds,
    )
    table = late("papers.plan").plan(args.paper, args.device, args.recompute, **how)
    print(table.to_string())
    if missing := table.attrs["missing"]:
        print(
            f"NaN: the time cannot be told without {', '.join(missing)}.",
            *missing.values(),
            sep="\n",
        )


def do_compute(args: Namespace) -> int:
    """Train what the notebook of a paper asks for, without the notebook, seed by seed; the same command resumes. Status 1 if a run
    diverged"""
    how = {
        n: getattr(args, n)
        for n in ("profile", "device", "jobs", "datasets", "artefacts", "methods", "seeds")
    }
    table = late("papers.plan").compute(args.paper, **how)
    failed = table[table.status != "done"]
    print(
        f"{args.paper}, profile {args.profile}: {table.run.nunique()} runs are there, {failed.run.nunique()} of them diverged"
    )
    print(failed.to_string(index=False) if len(failed) else "", end="\n" * bool(len(failed)))
    return int(len(failed) > 0)


def do_methods_table(args: Namespace) -> None:
    """Tune and run every method of the five papers on one data set, side by side; --plan says the hours, and starts nothing"""
    how, compare = (
        dict(methods=args.methods, seeds=args.seeds, profile=args.profile, device=args.device),
        late("papers.comparison"),
    )
    print(
        (
            compare.hours(args.dataset, **how)
            if args.plan
            else compare.run(args.dataset, jobs=args.jobs, **how)
        ).to_string()
    )


def do_publish(args: Namespace) -> None:
    """Copy rows and figures of a paper from runs/ to results/ and figures/"""
    for paper in args.paper:
        print(f"{paper}: {len(late('experiments.committed').publish(paper))} files")


# -- the house -----------------------------------------------------------------------------------------------------------


def do_fetch(args: Namespace) -> None:
    """Download a data set, verify it, keep it as an array cache"""
    for name in args.name:
        pool = data.fetch(name)
        print(f"{name}: {pool.n} samples, {pool.classes} classes, checksum {pool.checksum[:12]}")


def do_report(args: Namespace) -> None:
    """Write figures/report.html: every table, figure and claim on one page that needs no server"""
    print(late("papers.html_report").build())


def do_prune(args: Namespace) -> None:
    """List runs of the store that no row in runs/results/ or results/ names, and, if you say yes, move them to a trash folder beside
    the store. Nothing is deleted but by --empty-trash, which asks, too"""
    prune = late("experiments.prune")
    if args.empty_trash:
        lying = prune.trashed()
        print(*(f"{path}  {prune.megabytes(size)}" for path, size in lying), sep="\n")
        if lying and _agreed(
            args,
            f"delete these {len(lying)} for ever ({prune.megabytes(sum(s for _, s in lying))})",
        ):
            prune.empty(lying)
            print(f"{len(lying)} deleted")
        elif not lying:
            print("the trash is empty")
        return
    filters = {
        name: getattr(args, name) for name in ("age", "status", "method", "dataset", "paper")
    }
    found = prune.find(args.runs, **filters)
    chosen = [f for f in found if args.all or not f.named]
    print(*chosen, sep="\n")
    if kept := len(found) - len(chosen):
        print(
            f"{kept} more are named by rows in results/ or runs/results/ and stay; --all lists them, too"
        )
    whole = f"{len(chosen)} ({prune.megabytes(sum(f.size for f in chosen))})"
    if chosen and _agreed(args, f"move these {whole} to {paths.runs_root() / 'trash'}"):
        away, moved = prune.move(chosen)
        print(
            f"{len(moved)} moved to {away}; move a folder back to have it again, or free the room: prune --empty-trash"
        )
    elif not chosen:
        print("nothing to move")


def _agreed(args: Namespace, what: str) -> bool:
    if args.yes:
        return True
    if not sys.stdin.isatty():
        print(f"nothing was done; add --yes to {what}")
        return False
    return input(f"{what}? [y/N] ").strip().lower() in ("y", "yes")


# -- words ---------------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The words and their options."""
    top = argparse.ArgumentParser(prog="python -m pfl_core", description=__doc__)
    words = top.add_subparsers(dest="word", required=True, metavar="WORD")

    def word(do: Callable[[Namespace], int | None]) -> Callable:
        name = do.__name__.removeprefix("do_").replace("_", "-")
        sub = words.add_parser(name, help=do.__doc__, description=do.__doc__, allow_abbrev=False)
        sub.set_defaults(do=do, options=sub)
        return sub.add_argument

    _options_of_run(word(do_run))
    add = word(do_show)
    add("run", metavar="RUN", help="the id of a run, or its first digits"), _plugins(add)
    add = word(do_list)
    (
        add("kind", nargs="*", choices=[[], *LISTS], metavar="KIND", help=f"of {', '.join(LISTS)}"),
        _plugins(add),
    )
    add = word(do_compare)
    (
        add("what", nargs="+", metavar="WHAT", help="PAPER [TABLE], methods, or RUN RUN ..."),
        _plugins(add),
    )
    add(
        "--latex",
        action="store_true",
        help="a paper's table or claims, or all methods, as LaTeX (booktabs)",
    )
    add = word(do_plan)
    _options_of_paper(add)
    add(
        "--recompute",
        action="store_true",
        help="as run_all.sh does: committed rows do not count as there",
    )
    add = word(do_compute)
    _options_of_paper(add)
    add(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs at a time, a process each (default: 1)",
    )
    add = word(do_methods_table)
    add("dataset", metavar="DATASET", help="of `list datasets`")
    add(
        "--methods",
        nargs="+",
        default=[],
        metavar="NAME",
        help="rows of the comparison (default: all)",
    )
    add("--seeds", nargs="+", type=int, default=[0, 1], metavar="N", help="(default: 0 1)")
    add(
        "--profile",
        default="medium",
        metavar="NAME",
        help="medium (default), or smoke, to see that it works",
    )
    add("--plan", action="store_true", help="print runs and hours, and start nothing")
    add("--device", default="auto", metavar="NAME", help="auto (default), cpu or cuda")
    add(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs at a time, a process each (default: 1)",
    )
    word(do_publish)("paper", nargs="+", metavar="PAPER", help="a paper, or methods")
    word(do_fetch)("name", nargs="+", metavar="NAME", help="of `list datasets`")
    word(do_report)
    _options_of_prune(word(do_prune))
    return top


def _plugins(add: Callable) -> None:
    add(
        "--plugins",
        default="",
        metavar="A,B",
        help="import these modules first: runs whose method or model is in them can be read",
    )


def _options_of_run(add: Callable) -> None:
    for f in FIELDS.values():
        add(
            f"--{f.name}",
            metavar=f.type.partition(" ")[0].upper().partition("[")[0],
            help=described(f).replace("%", "%%"),
        )
    add(
        "--device",
        default="auto",
        help="auto, cpu or cuda (default: auto, a GPU where there is one)",
    )
    add("--executor", default="auto", help=f"of {', '.join(EXECUTORS)} (default: auto, by device)")
    add(
        "--tensorboard",
        type=Path,
        metavar="FOLDER",
        help="log each evaluated round there (default: nowhere)",
    )
    add(
        "--recompute",
        action="store_true",
        help="compute anew, and keep the stored result aside (default: a stored result is shown again). Changed code of your own "
        "makes another run by itself; a built-in method whose numbers change raises its `revision`",
    )


def described(f: dataclasses.Field) -> str:
    """What a field of Experiment is, what is allowed, and its default."""
    allowed = experiments.RANGES.get(f.name, ("", ""))[1]
    allowed = re.sub(r" \((?:[^()]|\([^()]*\))*\)$", "", allowed)  # the doc says that
    default = experiments._default(f)
    shown = (
        "none"
        if default in (None, {}, (), "")
        else str(default).lower()
        if isinstance(default, bool)
        else default
    )
    source = "the id of a finished run, or its first digits" if f.name == "init_from" else ""
    return "; ".join(p for p in (f.metadata["doc"], allowed, source) if p) + f" (default: {shown})"


def _options_of_paper(add: Callable) -> None:
    add("paper", metavar="PAPER", help="fedper, pfedhn, pfedla, flayer or fedaghn")
    add(
        "--profile",
        default="quick",
        help="size of the runs: smoke, quick, medium or paper (default: quick)",
    )
    add("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    for name, kind in {"datasets": str, "artefacts": str, "methods": str, "seeds": int}.items():
        add(
            f"--{name}",
            nargs="+",
            type=kind,
            default=[],
            metavar="NAME",
            help="(default: the notebook's)",
        )


def _options_of_prune(add: Callable) -> None:
    add(
        "runs",
        nargs="*",
        metavar="RUN",
        help="ids, or their first four digits or more (default: all)",
    )
    add("--age", type=float, default=0, metavar="DAYS", help="at least so old (default: any)")
    add(
        "--status",
        nargs="+",
        default=[],
        metavar="S",
        help="of done, failed, unfinished, aside (default: all but unfinished)",
    )
    for name in ("method", "dataset", "paper"):
        add(f"--{name}", nargs="+", default=[], metavar="NAME", help="of these only (default: any)")
    add("--all", action="store_true", help="runs that rows in results/ or runs/results/ name, too")
    add("--yes", action="store_true", help="do not ask")
    add(
        "--empty-trash",
        action="store_true",
        help="delete what earlier calls moved to the trash; takes no filters",
    )


def _as_fields(argv: Sequence[str]) -> list[str]:
    # --partition-args is --partition_args: one option, shown once.
    if argv[:1] != ["run"]:
        return list(argv)
    names = {f"--{n.replace('_', '-')}": f"--{n}" for n in FIELDS}
    parts = [word.partition("=") for word in argv]
    return [names.get(name, name) + equals + rest for name, equals, rest in parts]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it worked, 1 with one line on stderr if it did not, 2 for wrong words, 130 for Ctrl-C."""
    args, surplus = parser().parse_known_args(_as_fields(sys.argv[1:] if argv is None else argv))
    complain = partial(print, f"pfl_core {args.word}:", file=sys.stderr)
    try:
        for word in surplus:
            options = [o for o in args.options._option_string_actions if o.startswith("--")]
            checks.known(f"option of {args.word}:", word.partition("=")[0], options)
        if args.word != "run":
            for plugin in filter(None, getattr(args, "plugins", "").split(",")):
                experiments._import(plugin)
        code = args.do(args) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `... list | head`: the rest is not wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, ImportError) as error:
        complain(error)
        return 2 if surplus else 1
    except KeyboardInterrupt:
        complain("interrupted; the same command goes on from the last checkpoint")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
