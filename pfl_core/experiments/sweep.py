"""Many Experiments -> rows: found, or computed in this process, in others or on a cluster; and the choice of hyper-parameters."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from pfl_core.data import pools
from pfl_core.data.federation import Federation
from pfl_core.experiments import build, committed
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.metrics import ROW_COLUMNS
from pfl_core.experiments.run import run, whose
from pfl_core.experiments.store import Result, load_result
from pfl_core.util import checks, paths
from pfl_core.util.progress import Progress


def sweep(
    experiments: Iterable[Experiment],
    *,
    recompute: bool = True,
    jobs: int = 1,
    on: str | None = None,
    cpus: float = 1,
    gpus: float | None = None,
    store: Path | None = None,
    fed: Federation | None = None,
    **how: Any,
) -> pd.DataFrame:
    """Rows of all experiments, computing what neither the store nor (unless recompute) the committed results/ holds.

    on "local" (default, or $PFL_ON) computes in `jobs` processes, each with a GPU of its own where there are several; "ray" on a cluster,
    see extras/ray.py: each run takes `cpus` and `gpus` of a node. Failed runs leave a message and no rows. `how` goes to `run`.
    """
    if isinstance(experiments, Experiment):
        raise TypeError(
            "sweep takes a list of Experiments, got one; write sweep([experiment]), or run(experiment)"
        )
    on = on or os.environ.get("PFL_ON") or "local"
    checks.known("on", on, ("local", "ray"))
    experiments = [whose(e, fed)[0] for e in experiments]
    if fed is not None:
        return _sweep_own(experiments, fed, store, how)
    store, named = store or paths.store_folder(), [(e.id, e) for e in experiments]
    published = {} if recompute else {i: found for i, e in named if (found := committed.find(e))}
    missing: dict[str, Experiment] = {}
    for i, e in named:
        if i not in published or (store / i).is_dir():
            missing.setdefault(i, e)
    # Read here: no process for them.
    done = {i: r for i, e in missing.items() if (r := load_result(store / i, e, aside=False))}
    todo = [e for i, e in missing.items() if i not in done]
    for name in dict.fromkeys(e.dataset for e in todo):
        pools.load(name)  # what is missing is said before anything is trained
    if todo and on == "ray":  # what is optional lies above this module
        results = importlib.import_module("pfl_core.extras.ray").run_all(
            run, todo, store, how, cpus, gpus
        )
    else:
        results = _run_all(todo, jobs, store, how)
    with Progress(len(todo), "runs", done=0) as bar:
        for count, result in enumerate(results, 1):
            done[result.id] = result
            bar.at(count)
    for i in dict.fromkeys(i for i, _ in named):  # why rows are missing is said each time
        if i in done and not done[i].ok:
            e, status = done[i].experiment, done[i].meta["status"]
            print(f"run {i} ({e.method}, seed {e.seed}) {status}")
    there = [(e, done[i]) if i in done else committed.rows_of(e, published[i]) for i, e in named]
    return _rows(
        r if isinstance(r, pd.DataFrame) else replace(r[1], experiment=r[0]) for r in there
    )


def _sweep_own(
    experiments: list[Experiment], fed: Federation, store: Path | None, how: dict
) -> pd.DataFrame:
    # One after another in this process, which has the data.
    return _rows(run(e, fed=fed, store=store, **how) for e in experiments)


def _rows(found: Iterable[Result | pd.DataFrame]) -> pd.DataFrame:
    # Rows of those that did not fail.
    frames = [
        r if isinstance(r, pd.DataFrame) else r.rows
        for r in found
        if isinstance(r, pd.DataFrame) or r.ok
    ]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=ROW_COLUMNS)


def tune(
    e: Experiment,
    choices: dict[str, list[Any]] | list[dict[str, Any]],
    *,
    split: str = "val",
    when: str = "before",
    **how: Any,
) -> tuple[Experiment, pd.DataFrame]:
    """The best of `choices` by validation accuracy, as an Experiment, and the rows of all of them.

    choices: values for each field, of which all combinations are tried, {"lr": [0.01, 0.1], "method_args": [{"mu": 1}, {"mu": 2}]}, or a
    list of changes to e, as for `but`. Client mean at each choice's best round, read `when` ("before" or "after" local training), one
    seed; of equal ones the first. Rows carry the choice as JSON in `row` (init_from by its id); `how` goes to `sweep`. ValueError,
    before anything is trained, for split "test" or data without a validation part: choosing on test data is what this function is
    there to prevent.
    """
    if split != "val":
        raise ValueError(f"tune(split={split!r}): only 'val' may choose hyper-parameters")
    checks.known("when", when, ("before", "after"))
    combined = _choices(choices)
    labels = [json.dumps(c, sort_keys=True, default=lambda v: v.id) for c in combined]
    cells = [e.but(**c).but(tags={"row": label}) for c, label in zip(combined, labels, strict=True)]
    if when == "after" and any(
        c.eval_after is False or c.eval_after is None and c.participation < 1 for c in cells
    ):
        raise ValueError(
            "tune(when='after') reads models after local training; set eval_after=True in the Experiment"
        )
    empty = f"{e.partition} leaves no validation data; tune with a partition that does (split='70/10/20', for example)"
    with contextlib.suppress(
        pools.DatasetMissing
    ):  # then all of it is published, or the sweep says what is missing
        if e.dataset != "own" and not any(len(i) for c in cells for i in build.split(c).val):
            raise ValueError(empty)
    rows = sweep(cells, **how)
    if rows.empty:
        raise ValueError(
            f"tune: none of {len(cells)} choices ended with finite numbers; try lower values of lr"
        )
    seen = rows[
        (rows.split == split)
        & (rows.when == when)
        & (rows["mean"] == "client")
        & (rows.metric == "acc_pct")
    ]
    if seen.empty:
        raise ValueError(empty)
    best = seen.groupby("row", sort=False).value.max().idxmax()
    return e.but(**combined[labels.index(best)]), rows


def _choices(given: Any) -> list[dict[str, Any]]:
    # The changes to try, from a grid or a list of them.
    allowed = 'allowed is {"lr": [0.01, 0.1], ...}, whose combinations are tried, or a list of changes, [{"lr": 0.01}, ...]'
    if isinstance(given, dict):
        wrong = [n for n, v in given.items() if not isinstance(v, list | tuple) or not v]
        if wrong or not given:
            what = (
                f"{wrong[0]!r} has {given[wrong[0]]!r}, not a list of values"
                if wrong
                else "an empty dict"
            )
            raise ValueError(f"tune(choices): {what}; {allowed}")
        return [
            dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())
        ]
    if (
        not isinstance(given, list | tuple)
        or not given
        or not all(isinstance(c, dict) for c in given)
    ):
        raise ValueError(f"tune(choices={given!r}); {allowed}")
    return list(given)


def _run_all(experiments: list[Experiment], jobs: int, store: Path, how: dict) -> Iterable[Result]:
    jobs = min(jobs, len(experiments))
    if jobs > 1 and any(e.in_main for e in experiments):
        print(
            "a method, model or partition is defined in this notebook or script, where worker processes do not find it: jobs=1"
        )
        jobs = 1
    if jobs <= 1:
        yield from map(functools.partial(run, store=store, **how), experiments)
        return
    how = {"workers": max(1, (os.cpu_count() or 1) // jobs)} | how
    try:
        packed = [(e.plain(), e.tags, sys.path) for e in experiments]
        yield from _pool(jobs).map(functools.partial(_in_worker, store=store, **how), packed)
    except (
        BaseException
    ) as error:  # interrupted, or a worker died: nothing goes on behind the user's back
        _pool(jobs).shutdown(wait=False, cancel_futures=True)
        _pool.cache_clear()
        if isinstance(error, BrokenProcessPool):
            raise RuntimeError(
                f"one of {jobs} worker processes ended (by hand, for want of memory, or because a script calls sweep without "
                "`if __name__ == '__main__':`); run it again, with fewer jobs where memory is short: it goes on from finished "
                "runs and checkpoints"
            ) from error
        raise


@functools.lru_cache(maxsize=1)
def _pool(jobs: int) -> ProcessPoolExecutor:
    # Kept between sweeps: a process that has imported torch costs seconds.
    context, given = multiprocessing.get_context("spawn"), os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    return ProcessPoolExecutor(
        jobs, context, initializer=_begin, initargs=(context.Value("i"), gpus)
    )


def _begin(begun: Any, gpus: list[str]) -> None:
    with begun.get_lock():
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[begun.value % len(gpus)]
        begun.value += 1
    end_with_parent()


def end_with_parent() -> None:
    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a kernel's interrupt reaches idle processes, too
    threading.Thread(target=watch, daemon=True).start()


def _in_worker(packed: tuple[dict, dict, list[str]], **how: Any) -> Result:
    plain, tags, sys.path[:] = (
        packed  # a process that is older than a plugin's folder finds it, too
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run(Experiment.from_plain(plain).but(tags=tags), **how)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def is_there(e: Experiment, recompute: bool = True) -> bool:
    """Whether `sweep` would find the finished run of an Experiment: in the store or, unless recompute, in the committed results/."""
    return (paths.store_folder() / e.id).is_dir() or not recompute and committed.find(e) is not None
