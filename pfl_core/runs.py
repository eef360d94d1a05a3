"""Experiment -> Result, through a run store in which nothing computed is lost; sweeps over many."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import multiprocessing
import os
import platform
import shutil
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

import numpy as np
import pandas as pd
import torch
from filelock import FileLock, Timeout

from pfl_core import checks, probes
from pfl_core.engine import AUTO, EXECUTORS
from pfl_core.experiments import SCHEMA, TAGS, Experiment, build_method, federation
from pfl_core.experiments import split as dealt
from pfl_core.federation import Federation
from pfl_core.methods.base import Method, State
from pfl_core.progress import Progress
from pfl_core.simulate import Diverged, History, final_models, load_whole, restore, simulate, writing
from pfl_core.store import (
    ROW_COLUMNS,
    Result,
    committed_arrays,
    digests,
    load_result,
    results_folder,
    runs_root,
    set_aside,
)
from pfl_core.version import __version__


def run(
    e: Experiment,
    *,
    device: str = "auto",
    executor: str = "auto",
    workers: int | None = None,
    store: Path | None = None,
    fed: Federation | None = None,
    on_round: Callable[[int, History], bool | None] | None = None,
) -> Result:
    """The stored result of an Experiment, or its computation, resumed from the last checkpoint if there is one.

    device "auto" | "cpu" | "cuda"; executor and workers as for Engine; `fed` replaces the Experiment's own data and clients
    (dataset="own"). Raises DatasetMissing or ValueError before training; Diverged runs are stored as failed and returned.
    Waits while another process computes the same run.
    """
    if not isinstance(e, Experiment):
        raise TypeError(f"run takes an Experiment, got {type(e).__name__}; write run(Experiment(method=...))")
    device = pick_device(device)
    checks.known("executor", executor, EXECUTORS)
    if (e.dataset == "own") != (fed is not None):
        raise ValueError(
            'dataset="own" and a Federation go together: run(Experiment(dataset="own", ...), fed=Federation(...))'
        )
    run_id = e.id_for(fed.hash) if fed is not None else e.id
    store = store or runs_root() / "store"
    checks.make_folder(store)
    folder = store / run_id
    found = load_result(folder, e, aside=False)
    if found:
        return found
    with FileLock(store / f"{run_id}.lock"):
        return load_result(folder, e) or _compute(e, run_id, folder, device, executor, workers, fed, on_round, store)


def _compute(e, run_id, folder, device, executor, workers, fed, on_round, store) -> Result:
    fed = fed or federation(e, device)
    method = build_method(e, fed)
    work = folder.with_suffix(".part")
    checks.make_folder(work)
    checkpoint = work / "checkpoint.pt"
    _drop_damaged(checkpoint)
    used = _recorded_executor(work, executor, device)
    status, wall = "done", time.monotonic()
    try:
        state = _initial_state(e, method, store, device, executor, workers)
        with Progress(e.rounds, f"{e.method} {e.dataset} seed {e.seed}") as bar:
            step = lambda r, h: (bar.update(r - bar.done), on_round and on_round(r, h))[1]  # noqa: E731
            final, history, before, _ = simulate(
                method,
                fed,
                e,
                executor=used,
                workers=workers,
                state=state,
                checkpoint=checkpoint,
                on_round=step,
                record=probes.recorder(e.record),
            )
    except Diverged as error:
        final, history, before, status = None, error.history, {}, f"failed: {error}"
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"{e.method} on {device} is out of memory with batch={e.batch} and {e.participation:.0%} of {fed.K} clients at once; "
            "lower batch or participation, take executor='threads' with few workers, or device='cpu'; a run with a checkpoint "
            f"resumes from it ({str(error).partition('.')[0]})"
        ) from error
    meta = dict(
        id=run_id,
        status=status,
        schema=SCHEMA,
        revision=method.revision,
        version=__version__,
        clients=fed.K,
        classes=fed.classes,
        input_shape=list(fed.input_shape),
        parameters=sum(v.numel() for n, v in method.task.initial.items() if n in method.task.parameters),
        device=_device_name(device),
        executor=history.executor or used,
        torch=torch.__version__,
        python=platform.python_version(),
        partition_hash=fed.hash,
        leaks_test=method.leaks_test,
        wall_s=history.wall[-1] if history.wall else time.monotonic() - wall,
    )
    arrays = {"rounds": np.array(history.rounds, dtype=np.int64)}
    arrays |= {k: torch.stack(v[: len(history.rounds)]).numpy() for k, v in history.evals.items() if history.rounds}
    arrays |= probes.stacked(history.probes)
    arrays |= {f"n/{s}": np.array([len(i) for i in fed.index[s]]) for s in ("train", "val", "test")}
    with writing(work):
        if e.keep_models and final is not None:
            _save_models(work / "models.pt", final, before, method)
        _history_frame(history, fed, arrays, method).to_csv(work / "history.csv", index=False)
        np.savez_compressed(work / "arrays.npz", **arrays)
        raw = {name: (work / name).read_bytes() for name in ("history.csv", "arrays.npz")}
        whole = {"experiment": e.plain(), "meta": meta, "sha256": digests(e.plain(), meta, raw)}
        (work / "experiment.json").write_text(json.dumps(whole, indent=1))
    checkpoint.unlink(missing_ok=True)
    (work / "executor").unlink(missing_ok=True)
    os.replace(work, folder)
    return load_result(folder, e)


def _initial_state(
    e: Experiment, method: Method, store: Path, device: str, executor: str, workers: int | None
) -> State | None:
    # Another experiment's end: its global model (or the mean of its personal ones) becomes the common initial model.
    if e.init_from is None:
        return None
    source = run(e.init_from.but(keep_models=True), device=device, executor=executor, workers=workers, store=store)
    if not source.ok:
        raise Diverged(f"{e.method}: init_from, run {source.id}, {source.meta['status']}", History())
    try:
        z = load_whole(source.folder / "models.pt", device)
    except ValueError as error:
        set_aside(source.folder, error)
        return _initial_state(e, method, store, device, executor, workers)
    if e.adopt:
        if z["extra"] and type(method).adopt is Method.adopt:  # rows of the clients that the server knows
            raise ValueError(
                f"{e.method} keeps state for each client it knows and cannot adopt new ones; use pfedhn, or adopt=False"
            )
        return method.adopt(State(z["server"], {}, z["extra"]), method.task.K)
    initial = method.task.initial
    for n in initial:
        v = z["server"].get(n, z["models"][n].mean(0) if z["models"][n].is_floating_point() else z["models"][n][0])
        if v.shape != initial[n].shape:
            raise ValueError(
                f"init_from has {n} of shape {tuple(v.shape)}, this model needs {tuple(initial[n].shape)}; use the same model"
            )
        initial[n] = v.clone()
    return None


def _save_models(path: Path, final: State, before: dict, method: Method) -> None:
    kept = {
        "models": final_models(before, method.task.names),
        "server": final.server,
        "clients": final.clients,
        "extra": final.extra,
    }
    torch.save(kept, path)


def _history_frame(h: History, fed: Federation, arrays: dict[str, np.ndarray], method: Method) -> pd.DataFrame:
    size = torch.finfo(fed.dtype).bits // 8
    out = []
    for key in [k for k in arrays if k.endswith("/correct")]:
        when, split, _ = key.split("/")
        n = arrays[f"n/{split}"]
        has = n > 0
        if not has.any():
            continue
        acc = 100 * arrays[key][:, has] / n[has]
        loss = arrays[key.replace("correct", "loss")]
        spread = {
            "acc_pct": acc.mean(1),
            "acc_sd": acc.std(1),
            "acc_min": acc.min(1),
            "acc_max": acc.max(1),
            "acc_p10": np.percentile(acc, 10, axis=1),
        }
        spread["acc_worst10"] = np.sort(acc, 1)[:, : max(1, acc.shape[1] // 10)].mean(1)
        series = [("client", m, v) for m, v in spread.items()]
        series += [("pooled", "acc_pct", 100 * arrays[key].sum(1) / n.sum()), ("pooled", "loss", loss.sum(1) / n.sum())]
        for mean, metric, values in series:
            frame = pd.DataFrame({"round": arrays["rounds"], "value": values})
            out.append(frame.assign(when=when, split=split, mean=mean, metric=metric))
    totals = {"download_bytes": h.download, "upload_bytes": h.upload, "client_visits": h.steps, "train_s": h.wall}
    for metric, values in totals.items():
        scale = size if metric.endswith("bytes") else 1
        frame = pd.DataFrame(
            {"round": arrays["rounds"], "value": np.array(values[: len(arrays["rounds"])], dtype=float) * scale}
        )
        out.append(frame.assign(when="", split="", mean="total", metric=metric))
    return pd.concat(out, ignore_index=True)[["round", "when", "split", "mean", "metric", "value"]]


def _drop_damaged(checkpoint: Path) -> None:
    if not checkpoint.exists():
        return
    try:
        restore(checkpoint, torch.device("cpu"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # damaged, or of another version's form
        set_aside(checkpoint, error)


def _recorded_executor(work: Path, executor: str, device: str) -> str:
    # A resumed run keeps the executor it began with, so that its numbers are of one kind.
    note = work / "executor"
    if note.exists() and (work / "checkpoint.pt").exists():
        return note.read_text()
    chosen = AUTO[device] if executor == "auto" else executor
    note.write_text(chosen)
    return chosen


def pick_device(device: str) -> str:
    """ "cpu" or "cuda": "auto" takes $PFL_DEVICE, else a GPU where there is one; ValueError for a GPU that is not there."""
    if device == "auto":
        device = os.environ.get("PFL_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        checks.known("device", device, ("auto", "cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but torch sees no GPU here; use device='cpu' or 'auto'")
    return device


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


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
    experiments = list(experiments)
    if not experiments:
        return pd.DataFrame(columns=ROW_COLUMNS)
    store = store or runs_root() / "store"
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
        results = importlib.import_module("pfl_core.extras.ray").run_all(todo, store, how, cpus, gpus)
    else:
        results = _run_all(todo, jobs, store, how)
    with Progress(len(todo), "runs") as bar:
        for result in results:
            done[result.id] = result
            bar.update()
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
    allowed = 'allowed is {"lr": [0.01, 0.1], ...}, whose combinations are tried, or a list of changes, [{"lr": 0.01}, ...]'
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
                f"one of {jobs} worker processes was ended from outside (by hand, or for want of memory); run the sweep again, "
                "with fewer jobs where memory is short: it goes on from finished runs and checkpoints"
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
    frames = [pd.read_csv(path, dtype={"run": str}, keep_default_na=False, low_memory=False) for path, _ in stamp]
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
    return (runs_root() / "store" / e.id).is_dir() or not recompute and _kept(e, _committed())


def _committed() -> dict[str, pd.DataFrame]:
    return _committed_at(tuple((str(p), p.stat().st_mtime_ns) for p in sorted(results_folder().glob("*.csv"))))


def prune(keep: Iterable[str], store: Path | None = None) -> list[str]:
    """Delete finished runs of the store whose id is not in `keep`; returns the deleted ids. Runs in progress are left alone."""
    keep, store, gone = set(keep), store or runs_root() / "store", []
    for folder in sorted(store.glob("*")):
        if folder.is_dir() and "." not in folder.name and folder.name not in keep:
            try:
                with FileLock(store / f"{folder.name}.lock", timeout=0):
                    shutil.rmtree(folder)
                    gone.append(folder.name)
            except Timeout:
                continue
    return gone
