"""Experiment -> Result, through a run store in which nothing computed is lost."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock

from pfl_core.data import pools
from pfl_core.data.federation import Federation
from pfl_core.engine.checkpoint import History
from pfl_core.engine.engine import EXECUTORS
from pfl_core.experiments import copies
from pfl_core.experiments.build import own
from pfl_core.experiments.compute import Job, compute
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.store import Result, load_result
from pfl_core.util import checks, paths


def run(
    e: Experiment,
    *,
    device: str = "auto",
    executor: str = "auto",
    workers: int | None = None,
    store: Path | None = None,
    fed: Federation | None = None,
    recompute: bool = False,
    keep_state: bool = False,
    on_round: Callable[[int, History], bool | str | None] | None = None,
) -> Result:
    """The stored result of an Experiment, or its computation, resumed from the last checkpoint if there is one.

    device "auto" | "cpu" | "cuda"; executor and workers as for Engine; `fed` brings data and clients (dataset="own"). recompute=True
    computes anew (but not what it starts from), and keeps what the store had as <id>.before-<time>. keep_state keeps the end, from which
    a run of more rounds goes on; every method does that but those that are `scheduled`. `on_round(round, history)` is told of each
    round: "finish" ends the run there, with the result of an Experiment of so many rounds; True stops it with Interrupted, and the next
    call goes on. Raises DatasetMissing or ValueError before training; Diverged runs are stored as failed and returned. Waits while
    another process computes the same run.
    """
    if not isinstance(e, Experiment):
        raise TypeError(
            f"run takes an Experiment, got {type(e).__name__}; write run(Experiment(method=...))"
        )
    if on_round is not None and not callable(on_round):
        raise TypeError(
            f"on_round={on_round!r}: allowed is a function of (round, history), or None"
        )
    checks.known("executor", executor, EXECUTORS)
    e, fed = whose(e, fed)
    device = pick_device(device)
    store = store or paths.store_folder()
    checks.make_folder(store)
    checksum = fed.checksum if fed is not None else copies.checksum(e.dataset)
    job = Job(
        e,
        e.id_for(checksum),
        e.course_for(checksum),
        checksum,
        store,
        device,
        executor,
        workers,
        fed,
        on_round,
        keep_state,
        recompute,
    )
    found = None if recompute else load_result(job.folder, e, aside=False)
    if found:
        return found
    if fed is None:
        pools.load(
            e.dataset
        )  # a run that others published may be found without its data; computing needs them
    with FileLock(store / f"{job.id}.lock"):
        if recompute:
            _keep_aside(job.folder)
        elif found := load_result(job.folder, e):
            return found
        return compute(job, lambda source: _source(source, job))


def whose(e: Experiment, fed: Federation | None) -> tuple[Experiment, Federation | None]:
    """An Experiment and the user's own Federation (None without one) that it is over; ValueError where they contradict each other."""
    if (e.dataset == "own") != (fed is not None):
        raise ValueError(
            'dataset="own" and a Federation go together: run(Experiment(dataset="own", ...), fed=Federation(...))'
        )
    return (own(e, fed), fed) if fed is not None else (e, None)


def _source(e: Experiment, job: Job) -> Result:
    how = dict(device=job.device, executor=job.executor, workers=job.workers, store=job.store)
    return run(e, fed=job.fed if e.dataset == "own" else None, **how)


def _keep_aside(folder: Path) -> None:
    now = time.strftime("%Y%m%d-%H%M%S")
    for path in (folder, folder.with_suffix(".part")):
        if os.path.lexists(path):
            away = next(
                p
                for i in itertools.count()
                if not os.path.lexists(p := path.parent / f"{path.name}.before-{now}{i or ''}")
            )
            os.replace(path, away)
            print(f"{path.name}: computed anew; what was there is kept as {away.name}")


def pick_device(device: str) -> str:
    """ "cpu" or "cuda": "auto" takes $PFL_DEVICE, else a GPU where there is one; ValueError for a GPU that is not there."""
    if device == "auto":
        device = os.environ.get("PFL_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        checks.known("device", device, ("auto", "cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device cuda was asked for, but torch sees no GPU here; use device='cpu' or 'auto'"
        )
    return device
