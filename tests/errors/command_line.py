"""The command lines."""

import itertools
from pathlib import Path

from pfl_core import run
from tests.errors.table import Case, tiny
from tests.made import main
from tools import runner


def command(*words: str) -> None:
    assert main(words) == 1
    raise ValueError  # as the shell sees it: code 1


def run_all(*words: str) -> None:
    runner.parse(words)


def two_begin_so() -> None:
    first = {}
    for e in (tiny(seed=seed) for seed in itertools.count()):
        if first.setdefault(e.id[0], e) is not e:
            break
    run(e), run(first[e.id[0]])
    command("show", e.id[0])


def show_trashed() -> None:
    folder = run(tiny()).folder
    Path("runs/trash/2026-01-31").mkdir(parents=True)
    folder.rename(Path("runs/trash/2026-01-31", folder.name))
    command("show", folder.name[:6])


def empties_by_method() -> None:
    lies = Path("runs/trash/2026-01-31/00112233445566ff")
    lies.mkdir(parents=True)
    try:
        command("prune", "--empty-trash", "--method", "fedper", "--yes")
    finally:
        assert lies.is_dir()


def prunes(*words: str) -> None:
    run(tiny())
    main(["prune", *words])


CASES = [
    # the command line
    Case(
        "python -m pfl_core fetch cifar",
        lambda: command("fetch", "cifar"),
        "^pfl_core fetch: .* did you mean 'cifar10'",
    ),
    Case(
        "python -m pfl_papers publish fedper",
        lambda: command("publish", "fedper"),
        "^pfl_papers publish: nothing of",
    ),
    Case(
        "./run_all.sh --profil quick",
        lambda: run_all("--profil", "quick"),
        "unknown option --profil; did you mean --profile.; known:",
        SystemExit,
    ),
    Case(
        "./run_all.sh --jobs two",
        lambda: run_all("--jobs", "two"),
        "'two' is not a number from 1 to 999",
        SystemExit,
    ),
    # which run
    Case(
        "python -m pfl_core show, of a digit with which two runs begin",
        two_begin_so,
        "2 finished runs begin with '.': .*; give more digits",
    ),
    Case(
        "python -m pfl_core show DIR/runs/store/99c7bb9d43df388e",
        lambda: command("show", str(run(tiny()).folder)),
        "is no id of a run: .* of a run's folder give the last name",
    ),
    Case(
        "python -m pfl_core show, of a run in the trash",
        show_trashed,
        "move DIR/runs/trash/.* back to DIR/runs/store to have it again",
    ),
    Case(
        "python -m pfl_core list runs, where none are",
        lambda: main(["list", "runs"]),
        "no finished runs in DIR/runs/store",
        None,
    ),
    Case(
        "python -m pfl_core prune --empty-trash --method fedper --yes",
        empties_by_method,
        "--empty-trash takes no RUN, filter",
    ),
    Case(
        "python -m pfl_core prune --method fedperr",
        lambda: prunes("--method", "fedperr"),
        "nothing to move; in DIR/runs/store lie runs of fedavg",
        None,
    ),
    Case(
        "python -m pfl_papers publish fedper fedprr",
        lambda: command("publish", "fedper", "fedprr"),
        "paper 'fedprr' is unknown; did you mean 'fedper'",
    ),
    Case(
        "python -m pfl_papers plan fedper --methods flayer",
        lambda: command("plan", "fedper", "--profile", "smoke", "--methods", "flayer"),
        "what is asked of fedper has no run of flayer; it has runs of fedavg, fedper",
    ),
    Case(
        "./run_all.sh fedper",
        lambda: run_all("fedper"),
        "'fedper' is a notebook; write --paper fedper",
        SystemExit,
    ),
]
