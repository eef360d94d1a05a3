"""The first hour on a GPU, stage by stage: `python -m benchmarks.gpu`.

Each stage is a process of its own with a time limit, and keeps each row as soon as it is found, in
FOLDER/<stage>.json. The same command goes on from there: what is done is not done again, and what
ended its process, or did not end, is tried once more (`--stages N` begins stages anew). What fails
moves the executor down the ladder, and the rest goes on. At the end stand tables, in
FOLDER/tables.md, too; of a GPU they are kept for benchmarks/README.md (results/gpu-cuda.json).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import stages
from benchmarks.common import about, save
from benchmarks.stages import Asked, Row, Task, Tasks, Unusable
from benchmarks.steps import reached
from benchmarks.tables import gpu as tables
from benchmarks.tables import shown
from pfl_core.engine.engine import BELOW
from pfl_core.util.gpu import refused
from tools.notebooks import ROOT

TOP = "graphs:fastest"
UNENDED = "it did not end, or ended its process"
BROKEN = 3  # the status of a process whose device answers no more


class Stage(NamedTuple):
    """What is done, and how long it may take at most (s)."""

    name: str
    limit: float
    tasks: Callable[[Asked], Tasks]


STAGES = (
    Stage("preflight", 90, stages.preflight),
    Stage("parts", 180, stages.parts),
    Stage("agree", 240, stages.agree),
    Stage("life", 120, stages.life),
    Stage("steps", 360, stages.steps),
    Stage("rounds", 540, stages.rounds),
    Stage("papermill", 480, stages.papermill),
    Stage("rest", 1200, stages.rest),
)


# -- what was found --------------------------------------------------------------------------------


def path(folder: Path, stage: int) -> Path:
    """Where the rows of a stage are kept."""
    return folder / f"{stage}-{STAGES[stage].name}.json"


def found(folder: Path, stage: int) -> dict[str, Any]:
    """The rows of a stage so far, and whether it ended."""
    file = path(folder, stage)
    return json.loads(file.read_text()) if file.exists() else {"ended": False, "rows": []}


def keep(folder: Path, stage: int, kept: dict[str, Any]) -> None:
    """Write a stage's file, whole or not at all."""
    part = path(folder, stage).with_suffix(".part")
    part.write_text(json.dumps(kept, indent=1))
    part.replace(path(folder, stage))


def dropped(folder: Path) -> frozenset[str]:
    """The executors that failed in any stage."""
    rows = [row for i in range(len(STAGES)) for row in found(folder, i)["rows"]]
    return frozenset(x for row in rows if "error" in row for x in row.get("drops", ()))


def best(gone: frozenset[str], graphs: bool) -> str:
    """The highest executor of the ladder that has not failed."""
    executor = TOP if graphs else BELOW["graphs"]
    while executor in gone:
        executor = BELOW[executor]
    return executor


# -- a stage, in its own process -------------------------------------------------------------------


def work(stage: int, folder: Path, device: str, smallest: bool) -> int:
    """Do what is left of a stage; 0 at its end, BROKEN if a new process is to go on."""
    with reached(device) as there:
        gone = dropped(folder)
        asked = Asked(there, "", gone, smallest, folder)
        asked = asked._replace(executor=best(gone, asked.captures))
        kept = found(folder, stage)
        for task in STAGES[stage].tasks(asked):
            row = next((r for r in kept["rows"] if r["of"] == task.what), None)
            if row is None:
                row = {"of": task.what, "drops": [*task.drops], "tries": 0}
                kept["rows"].append(row)
            elif row.get("error") != UNENDED or row["tries"] > 1:
                continue
            # This stands there if the process does not outlive it.
            row |= {"tries": row["tries"] + 1, "error": UNENDED}
            keep(folder, stage, kept)
            del row["error"]
            row |= tried(task)
            keep(folder, stage, kept)
            print(*(f"{k} {v}" for k, v in shown(row).items()), sep="  ", flush=True)
            if "stop" in row:
                break
            if "error" in row and not answers(there):
                return BROKEN
        keep(folder, stage, kept | {"ended": True, "executor": asked.executor})
    return 0


def tried(task: Task) -> Row:
    """What a task finds; of one that fails the error."""
    began = time.monotonic()
    try:
        row = task.find()
    except Exception as error:  # the next one goes on
        first = f"{type(error).__name__}: {error}".partition("\n")[0]
        row = {"error": first[:300]} | ({"stop": True} if isinstance(error, Unusable) else {})
    return row | {"took_s": time.monotonic() - began}


def answers(device: Any) -> bool:
    """Whether a device still computes after an error."""
    import torch

    try:
        (torch.ones(1).to(device) + 1).cpu()
    except RuntimeError:
        return False
    return True


# -- all of them -----------------------------------------------------------------------------------


def command(stage: int, folder: Path, device: str, smallest: bool) -> list[str]:
    """What does a stage in a process of its own."""
    words = ["--stage", str(stage), "--device", device, "--folder", str(folder)]
    return [sys.executable, "-m", "benchmarks.gpu", *words, *["--smallest"] * smallest]


def apart(stage: int, folder: Path, device: str, smallest: bool, limit: float) -> int | None:
    """Do a stage in a process of its own; its status, None if it took longer than limit (s)."""
    words = command(stage, folder, device, smallest)
    with subprocess.Popen(words, cwd=ROOT, process_group=0) as running:
        try:
            return running.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:  # what it started ends with it
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)


def go_on(
    chosen: Sequence[int],
    folder: Path,
    device: str,
    smallest: bool,
    start: Callable[..., int | None] = apart,
) -> None:
    """Do the stages that have not ended, each as long as it may take."""
    for stage in chosen:
        name, limit, _ = STAGES[stage]
        ends = time.monotonic() + limit
        while not (before := found(folder, stage))["ended"]:
            print(f"== {stage} {name}", flush=True)
            status = start(stage, folder, device, smallest, max(1.0, ends - time.monotonic()))
            # A process that broke is followed by another, unless it did nothing at all.
            if status is None or (status and found(folder, stage) == before):
                print(f"== {stage} {name}: {'its time is up' if status is None else status}")
                break
        if any("stop" in row for row in found(folder, stage)["rows"]):
            break


def report(folder: Path, device: str) -> str:
    """The tables of all that was found, printed and written; of a GPU also for the README."""
    cases = {
        stage.name: kept for i, stage in enumerate(STAGES) if (kept := found(folder, i))["rows"]
    }
    text = tables(cases)
    (folder / "tables.md").write_text(text + "\n")
    if device == "cuda" and not refused():
        save("gpu-cuda", cases, device, about(device))
    return text


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add, numbers = parser.add_argument, range(len(STAGES))
    named = ", ".join(f"{i} {stage.name}" for i, stage in enumerate(STAGES))
    add("--stages", type=int, nargs="+", choices=numbers, metavar="N", help=f"anew, of {named}")
    add("--device", default="cuda", choices=("cuda", "cpu", "pretend"))
    add("--folder", type=Path, default=Path("runs/gpu"), help="what is found (default: runs/gpu)")
    add("--smallest", action="store_true", help="a trial of this script; its numbers say nothing")
    add("--stage", type=int, choices=numbers, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, start: Callable[..., int | None] = apart) -> int:
    """Do the stages and print the tables; 1 if a row failed."""
    args = options(argv)
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if args.stage is not None:
        return work(args.stage, folder, args.device, args.smallest)
    for stage in args.stages or ():
        path(folder, stage).unlink(missing_ok=True)
    go_on(args.stages or range(len(STAGES)), folder, args.device, args.smallest, start)
    print(report(folder, args.device), flush=True)
    rows = [row for i in range(len(STAGES)) for row in found(folder, i)["rows"]]
    return int(not rows or any("error" in row for row in rows))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a stage ends with this
    raise SystemExit(main())
