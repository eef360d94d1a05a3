"""The computation of one run: from its checkpoint, or the end of a shorter run, to a finished folder of the store."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from pfl_core import models
from pfl_core.data.client_data import ClientData
from pfl_core.data.federation import Federation
from pfl_core.engine import probes
from pfl_core.engine.checkpoint import History, check, load_whole, writing
from pfl_core.engine.engine import AUTO
from pfl_core.engine.simulate import FINISH, Diverged, final_models, simulate
from pfl_core.experiments import metrics
from pfl_core.experiments.build import build_method, client_data, federation, vocabulary
from pfl_core.experiments.experiment import SCHEMA, Experiment
from pfl_core.experiments.store import Result, digests, load_result, read_meta, set_aside
from pfl_core.methods.base import Method, State
from pfl_core.util import checks
from pfl_core.util.progress import Progress
from pfl_core.util.provenance import commit, processor
from pfl_core.util.version import __version__


@dataclass(frozen=True, eq=False)
class Job:
    """One call of `run`: what is to be computed, where it is kept, and how."""

    e: Experiment
    id: str
    course: str
    checksum: str  # of its data
    store: Path
    device: str
    executor: str
    workers: int | None
    fed: Federation | None  # the user's own
    on_round: Callable[[int, History], bool | str | None] | None
    keep_state: bool
    anew: bool  # not from the end of a shorter run either

    @property
    def folder(self) -> Path:
        return self.store / self.id


def compute(job: Job, source: Callable[[Experiment], Result]) -> Result:
    """The result of a job whose lock is held, computed and kept in the store; `source` runs what it starts from (`init_from`)."""
    e = job.e
    data = client_data(e, job.device, job.fed)
    method = build_method(e, data)
    if e.init_from:
        _check_source(job, method, data)
    work = _work_folder(job)
    stamp = _resume(job, method, work)
    status, began, ended = "done", time.monotonic(), e.rounds
    try:
        state = _initial_state(job, method, source)
        with Progress(e.rounds, f"{e.method} {e.dataset} seed {e.seed}") as bar:
            final, history, before, _ = simulate(
                method,
                data,
                executor=stamp["executor"],
                workers=job.workers,
                state=state,
                checkpoint=work / "checkpoint.pt",
                stamp=stamp,
                end=work / "state.pt" if job.keep_state or job.on_round else None,
                on_round=_told(job, method, bar),
                record=probes.recorder(e.record),
            )
        ended = final.round
    except Diverged as error:
        final, history, before, status = None, error.history, {}, f"failed: {error}"
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"{e.method} on {job.device} is out of memory with batch={e.batch} and {e.participation:.0%} of {data.K} clients at once; "
            "lower batch or participation, take executor='threads' with few workers, or device='cpu'; a run with a checkpoint "
            f"resumes from it ({str(error).partition('.')[0]})"
        ) from error
    if ended < e.rounds:  # ended early: the result of an Experiment of so many rounds
        short = e.but(rounds=ended)
        stamp |= {"ended_early": job.id}
        job = replace(job, e=short, id=short.id_for(job.checksum))
        stamp |= {"id": job.id}
    wall = history.wall[-1] if history.wall else time.monotonic() - began
    meta = _meta(job, data, method, history, stamp, status, wall)
    return _finish(job, work, meta, method, data, history, final, before)


def _told(job: Job, method: Method, bar: Progress) -> Callable[[int, History], bool | str]:
    # Moves the bar, and passes on what the user's on_round says.
    def step(r: int, history: History) -> bool | str:
        acc = history.accuracy()
        bar.at(r, "" if acc is None else f"{acc:.1f} %")
        told = job.on_round(r, history) if job.on_round else None
        if told == FINISH and method.scheduled and r < job.e.rounds:
            print(
                f"{method.name}: what a round does depends on their number, so it cannot end early; run rounds={r} instead"
            )
            return True
        return told if told == FINISH else bool(told)

    return step


def _work_folder(job: Job) -> Path:
    # Where the run is written until it is whole; what stands in its way is set aside before anything is trained.
    work = job.folder.with_suffix(".part")
    for path in (job.folder, work):
        if path.is_symlink() or os.path.lexists(path) and not path.is_dir():
            set_aside(path, "it is no folder of a run")
    checks.make_folder(work)
    with writing(work):
        trial = work / "trial"
        trial.write_bytes(b"0" * 4096)
        trial.unlink()
    return work


def _resume(job: Job, method: Method, work: Path) -> dict[str, Any]:
    """The stamp of a run, its executor that of the checkpoint in `work`; a checkpoint that is not this run's is set aside.

    Without one, the end of the longest run of the same course with fewer rounds serves as one.
    """
    checkpoint, e = work / "checkpoint.pt", job.e
    stamp = dict(
        id=job.id, course=job.course, schema=SCHEMA, revision=method.revision, version=__version__
    )
    stamp |= {
        "device": job.device,
        "executor": AUTO[job.device] if job.executor == "auto" else job.executor,
    }
    may = not (checkpoint.exists() or method.scheduled or job.anew)
    if may and (shorter := _beginning(job)):
        with writing(checkpoint):
            shutil.copyfile(shorter, part := checkpoint.with_suffix(".part"))
            os.replace(part, checkpoint)
    if checkpoint.exists():
        try:
            ran = load_whole(checkpoint)["stamp"]["executor"]
            check(checkpoint, stamp | {"executor": ran}, method, e.rounds)
            stamp["executor"] = ran  # a resumed run's numbers are of one kind
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:  # damaged, another run's, or of another form
            set_aside(checkpoint, error)
    return stamp


def _beginning(job: Job) -> Path | None:
    found = {}
    for path in job.store.glob("*/state.pt"):
        meta = read_meta(path.parent)
        if (
            meta
            and meta["status"] == "done"
            and meta.get("course") == job.course
            and meta["rounds"] < job.e.rounds
        ):
            found[meta["rounds"]] = path
    return found[max(found)] if found else None


def _meta(job, data, method, history, stamp, status, wall) -> dict[str, Any]:
    of_data = dict(pool=job.checksum, mean=data.mean, std=data.std, classes=data.classes)
    of_data |= dict(input_shape=list(data.input_shape), input_kind=data.kind)
    of_data |= dict(partition_hash=data.federation.hash)
    parameters = sum(
        v.numel() for n, v in method.task.initial.items() if n in method.task.parameters
    )
    ran_on = dict(device=_device_name(job.device), executor=history.executor or stamp["executor"])
    ran_on |= dict(
        torch=torch.__version__,
        python=platform.python_version(),
        processor=processor(),
        commit=commit(),
    )
    ran_on |= dict(date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), wall_s=wall)
    about = dict(
        status=status,
        rounds=job.e.rounds,
        clients=data.K,
        parameters=parameters,
        leaks_test=method.leaks_test,
    )
    return stamp | of_data | about | ran_on


def _finish(job, work, meta, method, data, history, final, before) -> Result:
    # Write what was measured, and rename the folder: from then on it is a finished run.
    e = job.e
    arrays = {"rounds": np.array(history.rounds, dtype=np.int64)}
    arrays |= {
        k: torch.stack(v[: len(history.rounds)]).numpy()
        for k, v in history.evals.items()
        if history.rounds
    }
    arrays |= probes.stacked(history.probes)
    arrays |= {"n/train": np.array([len(i) for i in data.index["train"]])}
    arrays |= {
        f"n/{s}": history.n.get(s, np.array([len(i) for i in data.index[s]]))
        for s in ("val", "test")
    }
    if meta["status"] == "done" and not (job.keep_state or "ended_early" in meta):
        (work / "state.pt").unlink(missing_ok=True)
    with writing(work):
        if e.keep_models and final is not None:
            _save_models(work / "models.pt", final, before, method, meta)
        frame = metrics.history_frame(arrays, history, torch.finfo(data.dtype).bits // 8)
        frame.to_csv(work / "history.csv", index=False)
        np.savez_compressed(work / "arrays.npz", **arrays)
        plain = json.loads(json.dumps(e.plain()))
        whole = {
            "experiment": plain,
            "meta": json.loads(json.dumps(meta)),
            "sha256": digests(plain, meta, work),
        }
        (work / "experiment.json").write_text(json.dumps(whole, indent=1))
    (work / "checkpoint.pt").unlink(missing_ok=True)
    # A run that ended early is another one than that whose lock is held.
    with FileLock(job.store / f"{job.id}.lock") if "ended_early" in meta else nullcontext():
        if found := load_result(job.folder, e):
            shutil.rmtree(work)
            return found
        os.replace(work, job.folder)
    return load_result(job.folder, e)


def _check_source(job: Job, method: Method, data: ClientData) -> None:
    # What can be refused before the source is trained.
    e = job.e
    if e.adopt:
        if (
            type(method).adopt is Method.adopt and method.init().extra
        ):  # rows of the clients that the server knows
            raise ValueError(
                f"{e.method} keeps state for each client it knows and cannot adopt new ones; use pfedhn, or adopt=False"
            )
        return
    source = e.init_from
    like = data if source.dataset == e.dataset else federation(source)
    drawn = models.build(
        source.model, like.input_shape, like.classes, **vocabulary(source) | source.model_args
    )
    there = {n: tuple(v.shape) for n, v in drawn.state_dict().items()}
    for n, v in method.task.initial.items():
        if there.get(n) != tuple(v.shape):
            has = f"has {n} of shape {there[n]}" if n in there else f"has no {n}"
            raise ValueError(
                f"init_from's model {has}, this one has {n} of shape {tuple(v.shape)}; use the same model"
            )


def _initial_state(
    job: Job, method: Method, source: Callable[[Experiment], Result]
) -> State | None:
    # Another experiment's end: its global model (or the mean of its personal ones) becomes the common initial model.
    e = job.e
    if e.init_from is None:
        return None
    found = source(e.init_from.but(keep_models=True))
    if not found.ok:
        raise Diverged(f"{e.method}: init_from, run {found.id}, {found.meta['status']}", History())
    try:
        z = found.kept("models.pt", job.device)
    except ValueError as error:
        set_aside(found.folder, error)
        return _initial_state(job, method, source)
    if e.adopt:
        return method.adopt(State(z["server"], {}, z["extra"]), method.task.K)
    initial = method.task.initial
    for n in initial:
        v = z["server"].get(
            n, z["models"][n].mean(0) if z["models"][n].is_floating_point() else z["models"][n][0]
        )
        initial[n] = v.clone()
    return None


def _save_models(
    path: Path, final: State, before: dict, method: Method, meta: dict[str, Any]
) -> None:
    kept = {
        "models": final_models(before, method.task.names),
        "server": final.server,
        "clients": final.clients,
        "extra": final.extra,
    }
    torch.save(kept | {n: meta[n] for n in ("id", "revision", "version")}, path)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"
