"""Command line: plan, compute and publish what papers report, and see it beside ours.

`python -m pfl_papers WORD --help` says more.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from typing import Any

from pfl_core.__main__ import read_without
from pfl_core.util import checks, commands
from pfl_core.util.commands import several
from pfl_papers import places
from pfl_papers.compare import readable

BENCH = "bench"  # what `publish` and `prune` know the benchmark by


def late(name: str) -> Any:
    """A module of ours that takes seconds to import: where a command needs it, not before."""
    return importlib.import_module(f"pfl_papers.{name}")


def do_compare(args: Namespace) -> None:
    """A paper's numbers beside ours: its claims (`compare fedper`), or a table, reported beside
    reproduced (`compare fedaghn table1`, with --latex for a document); or all methods side by side
    (`compare methods`)"""
    what, rest = args.paper, args.table
    _check_compared(what, rest)
    report, committed = late("compare.report"), late("evidence.committed")
    parts = list(committed.parts(what, own=True).values())
    none = f"no rows of {what!r} in results/ or {places.kept_folder()}"
    if not parts and what == "methods":
        raise ValueError(f"{none}; run `python -m pfl_papers methods-table DATASET` first")
    known = {} if what == "methods" else late("papers.base").paper(what).artefacts
    if rest and known:
        printed = set(late("papers.base").reported(what).table)
        checks.known(f"table of {what}:", rest[0], [a for a in known if a in printed])
    if not parts:  # a package without its repository
        print(f"{none}: the paper's own side alone", file=sys.stderr)
    for part in parts or [committed.Part(what, "not", "run", places.results_folder())]:
        print(f"{'% ' * args.latex}{what}, {part.label}:")  # a comment, to LaTeX
        named = what == "methods" or bool(rest)
        for table in _tables(part, *rest):
            print(report.latex(table) if args.latex else table.to_string(index=named))


def _check_compared(what: str, rest: list[str]) -> None:
    known = [*late("papers.base").PAPERS, "methods"]
    if what not in known and len(what) >= 4 and set(what) <= set("0123456789abcdef"):
        runs_named = " ".join([what, *rest])
        raise ValueError(
            f"compare takes PAPER [TABLE], or methods; `python -m pfl_core show {runs_named}` "
            "shows runs, several side by side"
        )
    checks.known("paper", what, known, "a run is shown by `python -m pfl_core show RUN`")
    if len(rest) > 1:
        raise ValueError(f"compare takes one table, got {' '.join(rest)}")


def _tables(part: Any, table: str = "") -> list[Any]:
    # What a part of results/ has to show: data frames.
    report, rows = late("compare.report"), part.rows()
    if part.paper == "methods":
        return list(late("bench.comparison").tables(rows).values())
    if not table:
        judged = report.claims(part.paper, rows)
        return [judged[["verdict", "reason", "says", "why", "status"]]]
    digits = late("papers.base").paper(part.paper).artefacts[table].digits
    compared = report.tables(rows, part.paper, table).values()
    shown = [readable.Table(cells, digits=digits) for cells in compared]
    published = [t.not_run().add_suffix(": published, not run") for t in shown]
    return [frame for frame in (*(t.text() for t in shown), *published) if len(frame)]


def do_plan(args: Namespace) -> None:
    """Say what the notebook of a paper would run, before anything starts: runs, those that are
    there, hours and memory here"""
    table = late("compare.plan").plan(args.paper, args.device, args.train, **_asked(args))
    print(table.to_string())
    if missing := table.attrs["missing"]:
        said = f"NaN: the time cannot be told without {', '.join(missing)}."
        print(said, *missing.values(), sep="\n")


def _asked(args: Namespace) -> dict[str, Any]:
    # A notebook's parameters.
    return {n: getattr(args, n) for n in ("profile", "datasets", "artefacts", "methods", "seeds")}


def do_compute(args: Namespace) -> int:
    """Train what the notebook of a paper asks for, without the notebook, seed by seed; the same
    command resumes. Status 1 if a run diverges or fails"""
    how = dict(device=args.device, jobs=args.jobs, train=args.train)
    table = late("compare.plan").compute(args.paper, **how, **_asked(args))
    failed = table[table.status != "done"]
    counted = f"{table.run.nunique()} runs are there, {failed.run.nunique()} of them diverged"
    print(f"{args.paper}, profile {args.profile}: {counted}")
    print(failed.to_string(index=False) if len(failed) else "", end="\n" * bool(len(failed)))
    if errors := (table.status == "error").sum():
        print(f"pfl_papers compute: {errors} runs ended with an error, said above", file=sys.stderr)
    return int(len(failed) > 0)


def do_keep(args: Namespace) -> None:
    """Keep what is finished of a paper's runs, whole or not, in runs/results/, so that `publish`
    takes it; nothing is trained. With --waiting, put it into results/ itself, where nothing shows
    it yet: another computer goes on from there"""
    how = dict(finished=True, device=args.device)
    study = late("notebook.study").Study(args.paper, **how, **_asked(args))
    for artefact in args.artefacts or study.paper.artefacts:
        study.run(artefact)
    if args.waiting:
        runs = late("evidence.committed").wait(
            study.rows(), args.paper, study.scope.profile, study.scope.label
        )
        print(f"{args.paper}: runs that now wait in results/: {len(runs)}")
    else:
        print(study.finish() if len(study.rows()) else "nothing of it is finished")


def do_publish(args: Namespace) -> None:
    """Copy rows and figures of a paper from runs/ to results/ and figures/"""
    for paper in args.paper:
        _check_paper(paper)
    for paper in args.paper:
        if paper == BENCH:
            done = late("bench.record").publish(args.replace)
        else:
            done = late("evidence.committed").publish(paper, args.replace)
        print(f"{paper}: {len(done)} files")


def _check_paper(name: str) -> None:
    checks.known("paper", name, [*late("papers.base").PAPERS, "methods", BENCH])


def shown(papers: Collection[str] = ()) -> set[str]:
    """Runs that rows in results/ or runs/results/ show, of some papers or of all.

    `prune` asks for them (the entry point "pfl_core.shown" in pyproject.toml).

    Raises
    ------
    ValueError
        For an unknown paper.
    """
    for paper in papers:
        _check_paper(paper)
    of_papers = [paper for paper in papers if paper != BENCH]
    found = late("evidence.committed").named_runs(of_papers) if of_papers or not papers else set()
    return found | (late("bench.record").named_runs() if BENCH in papers or not papers else set())


def do_methods_table(args: Namespace) -> None:
    """Tune and run every method of the five papers on one data set, side by side; --plan says the
    hours, and starts nothing"""
    compare = late("bench.comparison")
    how = {n: getattr(args, n) for n in ("methods", "seeds", "profile", "device")}
    if args.plan:
        print(compare.hours(args.dataset, **how).to_string())
    else:
        print(compare.run(args.dataset, jobs=args.jobs, **how).to_string())


def do_bench(args: Namespace) -> int:
    """The benchmark of all methods in seven settings (docs/bench.md): equal random search on tuning
    seeds, then runs on reported ones; rows that are published are there; --plan says the hours, and
    starts nothing. The same command resumes. Status 1 if a row ended with an error"""
    protocol, planned = late("bench.protocol"), late("bench.planned")
    what = {n: getattr(args, n) for n in ("settings", "methods", "draws", "seeds", "tuning_seeds")}
    plugins = [plugin for plugin in args.plugins.split(",") if plugin]
    asked = protocol.asked(**what, plugins=plugins, digits=args.digits)
    how = dict(device=args.device, jobs=args.jobs, on=args.on)
    protocol.check(asked, **how)
    if args.plan:
        lines = planned.plan(asked, args.device, args.train)
        print(planned.totals(lines).to_string())
        if asked == protocol.asked():  # the whole of it
            print(f"hours are kept in {planned.keep(lines, args.device)}")
        return 0
    failed = 0
    for setting in asked.settings:
        work = protocol.Work(asked, setting, args.train, **how)
        for said in work.steps():
            print(said, flush=True)
        failed += len(work.failed)
        print(late("bench.page").ranked(work.name))
    return int(failed > 0)


def do_report(args: Namespace) -> None:
    """Write figures/report.html: every table, figure and claim on one page that needs no server"""
    print(late("notebook.html_report").build())


# -- words -----------------------------------------------------------------------------------------


def parser(prog: str = "python -m pfl_papers") -> commands.Words:
    """The words and their options."""
    words = commands.Words(prog, __doc__, "pfl_papers")
    add = words.add(do_plan)
    _options_of_paper(add)
    _train(add, "as run_all.sh does: committed rows do not count as there")
    add = words.add(do_compute)
    _options_of_paper(add)
    _jobs(add)
    _train(add, "train what is committed, too")
    add = words.add(do_keep)
    _options_of_paper(add)
    add("--waiting", action="store_true", help="in results/, before the others of their table")
    add = words.add(do_publish)
    add("paper", nargs="+", metavar="PAPER", help="a paper, methods, or bench")
    add("--replace", action="store_true", help="published runs that are not kept here may go")
    add = words.add(do_compare)
    add("paper", metavar="PAPER", help="fedper, pfedhn, pfedla, flayer or fedaghn; or methods")
    add("table", nargs="*", metavar="TABLE", help="table1, ... (default: the paper's claims)")
    add("--plugins", default="", metavar="A,B", help="import these modules first")
    add("--latex", action="store_true", help="the table, or the claims, as LaTeX")
    words.add(do_report)
    _options_of_methods_table(words.add(do_methods_table))
    _options_of_bench(words.add(do_bench))
    return words


def _train(add: Callable, said: str) -> None:
    add("--train", action="store_true", help=said)
    add("--recompute", action=commands.Renamed, dest="train", nargs=0, help=argparse.SUPPRESS)


def _jobs(add: Callable) -> None:
    said = "runs at a time, a process each (default: 1; one a core where a round trains one client)"
    add("--jobs", type=int, metavar="N", help=said)


def _options_of_paper(add: Callable) -> None:
    add("paper", metavar="PAPER", help="fedper, pfedhn, pfedla, flayer or fedaghn")
    sizes = "size of the runs: smoke, quick, medium or paper (default: quick)"
    add("--profile", default="quick", help=sizes)
    add("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    for name, kind in {"datasets": str, "artefacts": str, "methods": str, "seeds": int}.items():
        several(add, f"--{name}", "(default: the notebook's)", kind)


def _options_of_methods_table(add: Callable) -> None:
    add("dataset", metavar="DATASET", help="of `list datasets`")
    several(add, "--methods", "rows of the comparison (default: all)")
    several(add, "--seeds", "(default: 0 1)", int, (0, 1))
    sizes = "medium (default), or smoke, to see that it works"
    add("--profile", default="medium", metavar="NAME", help=sizes)
    add("--plan", action="store_true", help="print runs and hours, and start nothing")
    add("--device", default="auto", metavar="NAME", help="auto (default), cpu or cuda")
    _jobs(add)


def _options_of_bench(add: Callable) -> None:
    several(add, "--settings", "(default: all seven)")
    several(add, "--methods", "rows; FedAvg, the reference, is always one (default: all)")
    own = "modules of methods of your own, tuned like all others"
    add("--plugins", default="", metavar="A,B", help=own)
    add("--draws", type=int, metavar="N", help="random draws a row (default: 16)")
    several(add, "--seeds", "that are reported (default: 10 to 19)", int)
    several(add, "--tuning-seeds", "(default: 100 101 102)", int)
    add("--digits", action="store_true", help="small forms over embedded digits, for a try")
    add("--plan", action="store_true", help="print runs and hours, and start nothing")
    add("--device", default="auto", metavar="NAME", help="auto (default), cpu or cuda")
    add("--on", metavar="WHERE", help="local (default), or ray: on a cluster")
    _jobs(add)
    _train(add, "train what is published, too")


def _check(args: Namespace, surplus: list[str], complain: Callable) -> None:
    if args.word != "bench":  # which runs them
        read_without(getattr(args, "plugins", ""), complain)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; see `Words.call` for what it returns."""
    return parser().call(sys.argv[1:] if argv is None else argv, _check)


if __name__ == "__main__":
    sys.exit(main())
