"""Command line: run and look at experiments, plan and publish papers, fetch data; `python -m pfl_core WORD --help` says more."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from pfl_core import checks, compare, data, html_report, models, pages, partition, plan, report, runs, store, study
from pfl_core.experiments import Experiment
from pfl_core.methods.base import list_methods
from pfl_core.papers import PAPERS

LISTS = {
    "methods": list_methods,
    "datasets": data.list_datasets,
    "models": models.list_models,
    "partitions": partition.list_partitions,
    "runs": lambda: {r.id: str(r).partition(": ")[2].rstrip(")") for r in store.finished()},
}
FIELDS = {f.name: f for f in dataclasses.fields(Experiment)}


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
        raise ValueError(f"{len(found)} finished runs begin with {start!r}; `python -m pfl_core list runs` shows all")
    return found[0]


def do_run(args: Namespace) -> None:
    """Run one experiment, or find it in the store: any field of Experiment is an option, --partition_args alpha=0.1,split=70/10/20"""
    e = Experiment(**{n: value(n, text) for n in FIELDS if (text := getattr(args, n)) is not None})
    log = None
    if args.tensorboard:
        from pfl_core.extras import logging

        log = logging.tensorboard(e, args.tensorboard)
    show(runs.run(e, device=args.device, executor=args.executor, on_round=log))


def do_show(args: Namespace) -> None:
    """Show a finished run: its experiment, its accuracies, and what it ran on"""
    show(stored(args.run))


def show(r: store.Result) -> None:
    print(r, repr(r.experiment), "", r.summary().to_string(), "", sep="\n")
    print("\n".join(f"{k:14} {v}" for k, v in r.meta.items() if k != "id"))
    print(f"{'folder':14} {r.folder}")


def do_list(args: Namespace) -> None:
    """List what there is, a line each"""
    for kind in args.kind or LISTS:
        if len(args.kind) != 1:
            print(f"\n{kind}:")
        for name, line in LISTS[kind]().items():
            print(f"{name:20} {line}")


# -- papers --------------------------------------------------------------------------------------------------------------


def do_compare(args: Namespace) -> None:
    """Compare: a paper's table reported beside reproduced (`compare fedaghn table1`), its claims (`compare fedper`), all methods
    (`compare methods`), or finished runs by their ids"""
    what, *rest = args.what
    if what != "methods" and what not in PAPERS:
        if len(what) < 4 or set(what) - set("0123456789abcdef"):
            checks.known("paper or run", what, [*PAPERS, "methods"], "a run is named by its id")
        print(pd.concat({r.id: r.summary().stack() for r in map(stored, args.what)}, axis=1).to_string())
        return
    files = {
        p.name: p
        for home in (store.results_folder(), store.runs_root() / "results")
        for p in home.glob(f"{what}.*.csv")
    }
    if not files:
        raise ValueError(f"no rows of {what!r} in results/ or {store.runs_root() / 'results'}; run its notebook first")
    if rest and what != "methods":
        checks.known(f"table of {what}:", rest[0], sorted(set(report.published(what).table)))
    for path in files.values():
        rows, profile = report.read_rows(path), path.stem.partition(".")[2]
        print(f"{what}, {profile}:")
        if what == "methods":
            shown = compare.table(rows)
        elif rest:
            shown = report.wide(report.compare(rows[rows.artefact == rest[0]], what, rest[0]))
        else:
            shown = report.claims(what, rows, profile.split("-")[0])[["verdict", "says", "measured"]]
        print(shown.to_string(index=what == "methods" or bool(rest)))


def do_plan(args: Namespace) -> None:
    """Say what the notebook of a paper would run, before anything starts: runs, those that are there, hours and memory here"""
    how = dict(
        profile=args.profile, datasets=args.datasets, artefacts=args.artefacts, methods=args.methods, seeds=args.seeds
    )
    table = plan.plan(args.paper, args.device, args.recompute, **how)
    print(table.to_string())
    if table.hours.isna().any():
        print("NaN: data are missing here; `python -m pfl_core list datasets`, `python -m pfl_core fetch NAME`")


def do_methods_table(args: Namespace) -> None:
    """Run every method of the five papers on one data set, side by side"""
    print(compare.run(args.dataset, methods=args.methods, seeds=args.seeds).to_string())


def do_publish(args: Namespace) -> None:
    """Copy rows and figures of a paper from runs/ to results/ and figures/"""
    for paper in args.paper:
        print(f"{paper}: {len(report.publish(paper))} files")


# -- the house -----------------------------------------------------------------------------------------------------------


def do_fetch(args: Namespace) -> None:
    """Download a data set, verify it, keep it as an array cache"""
    for name in args.name:
        pool = data.fetch(name)
        print(f"{name}: {pool.n} samples, {pool.classes} classes, checksum {pool.checksum[:12]}")


def do_pages(args: Namespace) -> None:
    """Write methods/README.md, docs/results.md and the results section of README.md"""
    print(*pages.write(), sep="\n")


def do_report(args: Namespace) -> None:
    """Write figures/report.html: every table, figure and claim on one page that needs no server"""
    print(html_report.build())


def do_prune(args: Namespace) -> None:
    """Delete finished runs of the store that no row in runs/results/ or results/ names"""
    print(f"{len(runs.prune(report.named_runs()))} runs deleted")


def parser() -> argparse.ArgumentParser:
    """The words and their options."""
    top = argparse.ArgumentParser(prog="python -m pfl_core", description=__doc__)
    words = top.add_subparsers(dest="word", required=True, metavar="WORD")

    def word(do: Callable[[Namespace], None]) -> Callable:
        name = do.__name__.removeprefix("do_").replace("_", "-")
        sub = words.add_parser(name, help=do.__doc__, description=do.__doc__, allow_abbrev=False)
        sub.set_defaults(do=do, options=sub)
        return sub.add_argument

    add = word(do_run)
    for f in FIELDS.values():
        add(f"--{f.name}", f"--{f.name.replace('_', '-')}", metavar=f.type.partition(" ")[0].upper().partition("[")[0])
    add("--device", default="auto", help="auto, cpu or cuda"), add("--executor", default="auto")
    add("--tensorboard", type=Path, metavar="FOLDER", help="log each evaluated round there")
    word(do_show)("run", metavar="RUN", help="the id of a run, or its first digits")
    word(do_list)("kind", nargs="*", choices=[[], *LISTS], metavar="KIND", help=f"of {', '.join(LISTS)}")
    word(do_compare)("what", nargs="+", metavar="WHAT", help="PAPER [TABLE], methods, or RUN RUN ...")
    add = word(do_plan)
    add("paper", choices=PAPERS, metavar="PAPER", help=f"of {', '.join(PAPERS)}")
    add("--profile", choices=study.PROFILES, default="quick"), add("--device", default="auto")
    add("--recompute", action="store_true", help="as run_all.sh does: committed rows do not count as there")
    for name, kind in {"datasets": str, "artefacts": str, "methods": str, "seeds": int}.items():
        add(f"--{name}", nargs="+", type=kind, default=[], metavar="NAME")
    add = word(do_methods_table)
    add("dataset", metavar="DATASET"), add("--methods", nargs="+", default=[], metavar="NAME")
    add("--seeds", nargs="+", type=int, default=[0, 1], metavar="N")
    word(do_publish)("paper", nargs="+", metavar="PAPER")
    word(do_fetch)("name", nargs="+", metavar="NAME")
    word(do_pages), word(do_report), word(do_prune)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it worked, 1 with one line on stderr if it did not, 2 for wrong words."""
    args, surplus = parser().parse_known_args(argv)
    try:
        for word in surplus:
            options = [o for o in args.options._option_string_actions if o.startswith("--")]
            checks.known(f"option of {args.word}:", word.partition("=")[0], options)
        args.do(args)
        sys.stdout.flush()
    except BrokenPipeError:  # `... list | head`: the rest is not wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, ImportError) as error:
        print(f"pfl_core {args.word}: {error}", file=sys.stderr)
        return 2 if surplus else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
