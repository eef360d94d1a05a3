"""Experiment -> Result, through a run store in which nothing computed is lost; sweeps over many."""

from __future__ import annotations

import functools
import importlib
import io
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from filelock import FileLock

from pfl_core.data import pools as data
from pfl_core.data.federation import Federation
from pfl_core.engine.checkpoint import History
from pfl_core.engine.engine import EXECUTORS
from pfl_core.experiments.compute import Job, compute
from pfl_core.experiments.build import own
from pfl_core.experiments.experiment import TAGS, Experiment
from pfl_core.experiments.build import split as dealt
from pfl_core.experiments.store import ROW_COLUMNS, Result, committed_arrays, load_result
from pfl_core.util import checks, paths, sums
from pfl_core.util.progress import Progress


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
        raise TypeError(f"run takes an Experiment, got {type(e).__name__}; write run(Experiment(method=...))")
    if on_round is not None and not callable(on_round):
        raise TypeError(f"on_round={on_round!r}: allowed is a function of (round, history), or None")
    checks.known("executor", executor, EXECUTORS)
    e, fed = _whose(e, fed)
    device = pick_device(device)
    store = store or paths.store_folder()
    checks.make_folder(store)
    data_sum = fed.checksum if fed is not None else data.load(e.dataset).checksum
    job = Job(
        e,
        e.id_for(data_sum),
        e.course_for(data_sum),
        data_sum,
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
    with FileLock(store / f"{job.id}.lock"):
        if recompute:
            _keep_aside(job.folder)
        elif found := load_result(job.folder, e):
            return found
        return compute(job, lambda source: _source(source, job))


def _whose(e: Experiment, fed: Federation | None) -> tuple[Experiment, Federation | None]:
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
        raise ValueError("device cuda was asked for, but torch sees no GPU here; use device='cpu' or 'auto'")
    return device


# -- many runs -----------------------------------------------------------------------------------------------------------


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
        raise TypeError("sweep takes a list of Experiments, got one; write sweep([experiment]), or run(experiment)")
    on = on or os.environ.get("PFL_ON") or "local"
    checks.known("on", on, ("local", "ray"))
    experiments = [_whose(e, fed)[0] for e in experiments]
    if not experiments:
        return pd.DataFrame(columns=ROW_COLUMNS)
    if fed is not None:
        return _sweep_own(experiments, fed, store, how)
    store = store or paths.store_folder()
    committed = {} if recompute else _committed()
    missing = {}
    for e in experiments:
        if not _kept(e, committed) or (store / e.id).is_dir():
            missing.setdefault(e.id, e)
    done = {
        i: r for i, e in missing.items() if (r := load_result(store / i, e, aside=False))
    }  # read here: no process for them
    todo = [e for i, e in missing.items() if i not in done]
    if todo and on == "ray":  # what is optional lies above this module
        results = importlib.import_module("pfl_core.extras.ray").run_all(run, todo, store, how, cpus, gpus)
    else:
        results = _run_all(todo, jobs, store, how)
    with Progress(len(todo), "runs", done=0) as bar:
        for count, result in enumerate(results, 1):
            done[result.id] = result
            bar.at(count)
            if not result.ok:
                print(
                    f"run {result.id} ({result.experiment.method}, seed {result.experiment.seed}) {result.meta['status']}"
                )
    frames = []
    for e in experiments:
        if e.id in done:
            r = done[e.id]
            frames.append(replace(r, experiment=e).rows if r.ok else pd.DataFrame(columns=ROW_COLUMNS))
        else:
            tags = {t: e.tags.get(t, "") for t in TAGS}
            frames.append(committed[e.id].assign(**tags)[ROW_COLUMNS])
    return pd.concat([f for f in frames if len(f)] or frames[:1], ignore_index=True)


def _sweep_own(experiments: list[Experiment], fed: Federation, store: Path | None, how: dict) -> pd.DataFrame:
    # One after another in this process, which has the data.
    results = [run(e, fed=fed, store=store, **how) for e in experiments]
    frames = [r.rows for r in results if r.ok]
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
    if when == "after" and any(c.eval_after is False or c.eval_after is None and c.participation < 1 for c in cells):
        raise ValueError("tune(when='after') reads models after local training; set eval_after=True in the Experiment")
    empty = f"{e.partition} leaves no validation data; tune with a partition that does (split='70/10/20', for example)"
    if e.dataset != "own" and not any(len(i) for c in cells for i in dealt(c).val):
        raise ValueError(empty)
    rows = sweep(cells, **how)
    if rows.empty:
        raise ValueError(f"tune: none of {len(cells)} choices ended with finite numbers; try lower values of lr")
    seen = rows[(rows.split == split) & (rows.when == when) & (rows["mean"] == "client") & (rows.metric == "acc_pct")]
    if seen.empty:
        raise ValueError(empty)
    best = seen.groupby("row", sort=False).value.max().idxmax()
    return e.but(**combined[labels.index(best)]), rows


def _choices(given: Any) -> list[dict[str, Any]]:
    # The changes to try, from a grid or a list of them.
    allowed = (
        'allowed is {"lr": [0.01, 0.1], ...}, whose combinations are tried, or a list of changes, [{"lr": 0.01}, ...]'
    )
    if isinstance(given, dict):
        wrong = [n for n, v in given.items() if not isinstance(v, list | tuple) or not v]
        if wrong or not given:
            what = f"{wrong[0]!r} has {given[wrong[0]]!r}, not a list of values" if wrong else "an empty dict"
            raise ValueError(f"tune(choices): {what}; {allowed}")
        return [dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())]
    if not isinstance(given, list | tuple) or not given or not all(isinstance(c, dict) for c in given):
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
    except BaseException as error:  # interrupted, or a worker died: nothing goes on behind the user's back
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
    return ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(context.Value("i"), gpus))


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
    plain, tags, sys.path[:] = packed  # a process that is older than a plugin's folder finds it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run(Experiment.from_plain(plain).but(tags=tags), **how)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@functools.lru_cache(maxsize=1)
def _committed_at(stamp: tuple) -> dict[str, pd.DataFrame]:
    raw = (io.BytesIO(sums.read(Path(path))) for path, _ in stamp)
    frames = [pd.read_csv(file, dtype={"run": str}, keep_default_na=False, low_memory=False) for file in raw]
    if not frames:
        return {}
    rows = pd.concat(frames, ignore_index=True).assign(value=lambda f: pd.to_numeric(f.value))
    rows = rows[rows["mean"] != "derived"]  # what a notebook computed from finished runs
    # A run that several artefacts share is stored once for each; its numbers are the same.
    return {
        i: g[(g.artefact == g.artefact.iloc[0]) & (g.row == g.row.iloc[0]) & (g.column == g.column.iloc[0])]
        for i, g in rows.groupby("run")
    }


def _kept(e: Experiment, committed: dict[str, pd.DataFrame]) -> bool:
    return e.id in committed and (not e.record or e.id in committed_arrays())


def is_there(e: Experiment, recompute: bool = True) -> bool:
    """Whether `sweep` would find the finished run of an Experiment: in the store or, unless recompute, in the committed results/."""
    return (paths.store_folder() / e.id).is_dir() or not recompute and _kept(e, _committed())


def _committed() -> dict[str, pd.DataFrame]:
    return _committed_at(tuple((str(p), p.stat().st_mtime_ns) for p in sorted(paths.results_folder().glob("*.csv"))))
