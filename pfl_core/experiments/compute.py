"""The computation of one run: from its checkpoint, or a shorter run's end, to a finished folder."""

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
from typing import Any, cast

import numpy as np
import torch

from pfl_core import models
from pfl_core.data.client_data import ClientData
from pfl_core.data.federation import Federation
from pfl_core.engine import probes, unvisited
from pfl_core.engine.checkpoint import History, check, writing
from pfl_core.engine.engine import automatic
from pfl_core.engine.simulate import FINISH, Diverged, evaluated, final_models, simulate
from pfl_core.experiments import metrics
from pfl_core.experiments.build import (
    build_method,
    client_data,
    federation,
    train_config,
    vocabulary,
)
from pfl_core.experiments.experiment import SCHEMA, Experiment
from pfl_core.experiments.store import (
    Result,
    clear_way,
    digests,
    is_whole,
    load_result,
    locked,
    read_about,
    set_aside,
)
from pfl_core.methods.base import Method, State, check_adopts
from pfl_core.methods.task import TrainConfig
from pfl_core.stacked import Params, select
from pfl_core.util import checks, gpu
from pfl_core.util.progress import Progress
from pfl_core.util.provenance import commit, processor
from pfl_core.util.say import say
from pfl_core.util.version import __version__

REPEATED = 1024  # the largest batch that may be more than twice what any client trains on


@dataclass(frozen=True, eq=False)
class Job:
    """One call of `run`: what is to be computed, where it is kept, and how."""

    experiment: Experiment
    id: str
    course: str
    code: str  # a digest of what is not ours
    checksum: str  # of its data
    store: Path
    device: str
    executor: str
    workers: int | None
    fed: Federation | None  # the user's own
    source: Result | Federation | None  # of `init_from`, where own data are behind it
    start: str | None  # what stands for `init_from` in the id, if the Experiment cannot say it
    on_round: Callable[[int, History], bool | str | None] | None
    keep_state: bool
    anew: bool  # not from the end of a shorter run either

    @property
    def folder(self) -> Path:
        return self.store / self.id


@dataclass(frozen=True, eq=False)
class _Training:
    """What the training of a job ended with; of one that diverged, `final` is None."""

    method: Method
    data: ClientData
    history: History
    final: State | None
    before: Params  # the personal models of the last round
    status: str
    wall: float  # seconds


def compute(job: Job, source: Callable[[Experiment], Result]) -> Result:
    """Compute a job, whose lock the caller holds, and keep the result in the store.

    `source` runs the Experiment that this one starts from (`init_from`).
    """
    if job.device == "cuda":
        gpu.tried()
    data = client_data(job.experiment, job.device, job.fed)
    _check_evaluated(data, train_config(job.experiment))
    _check_batch(data, job.experiment.batch)
    method = build_method(job.experiment, data, job.store)
    if job.experiment.earlier:
        _check_source(job, method, data)
    work = _work_folder(job)
    stamp = _resume(job, method, work)
    warned = unvisited.warn(method)
    trained = _train(job, method, data, work, stamp, source)
    stamp |= {"warned": warned} if warned else {}
    if job.fed is not None:
        job.fed.check_unchanged()
    if trained.final is not None and trained.final.round < job.experiment.rounds:
        # It ended early: this is the result of an Experiment of so many rounds.
        short = job.experiment.but(rounds=trained.final.round)
        stamp["ended_early"] = job.id
        job = replace(job, experiment=short, id=short.id_for(job.checksum, job.start))
        stamp["id"] = job.id
    return _finish(job, work, _meta(job, trained, stamp), trained)


def _train(
    job: Job,
    method: Method,
    data: ClientData,
    work: Path,
    stamp: dict[str, Any],
    source: Callable[[Experiment], Result],
) -> _Training:
    e, began, status = job.experiment, time.monotonic(), "done"
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
    except Diverged as error:
        final, history, before, status = None, error.history, {}, f"failed: {error}"
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"{e.method} on {job.device} is out of memory with batch={e.batch} and "
            f"{e.participation:.0%} of {data.K} clients at once; lower batch or participation, "
            "take executor='threads' with few workers, or device='cpu'; a run with a checkpoint "
            f"resumes from it ({str(error).partition('.')[0]})"
        ) from error
    wall = history.wall[-1] if history.wall else time.monotonic() - began
    return _Training(method, data, history, final, before, status, wall)


def _told(job: Job, method: Method, bar: Progress) -> Callable[[int, History], bool | str]:
    # Moves the bar, and passes on what the user's on_round says.
    def step(r: int, history: History) -> bool | str:
        acc = history.accuracy()
        bar.at(r, "" if acc is None else f"{acc:.1f} %")
        told = job.on_round(r, history) if job.on_round else None
        if told == FINISH and method.scheduled and r < job.experiment.rounds:
            say(
                f"{method.name}: what a round does depends on their number, so it cannot end "
                f"early; run rounds={r} instead"
            )
            return True
        return told if told == FINISH else bool(told)

    return step


def _work_folder(job: Job) -> Path:
    # Where the run is written until it is whole. What stands in its way is set aside, and a trial
    # is written there, before anything is trained.
    work = job.folder.with_suffix(".part")
    for path in (job.folder, work):
        clear_way(path)
    checks.make_folder(work)
    with writing(work):
        trial = work / "trial"
        trial.write_bytes(b"0" * 4096)
        trial.unlink()
    return work


def _resume(job: Job, method: Method, work: Path) -> dict[str, Any]:
    """The stamp of a run, and in `work` the checkpoint that it goes on from, if there is one.

    The stamp's executor is that of the checkpoint. A checkpoint that is not this run's is set
    aside. Where there is none, the end of the longest run of the same course with fewer rounds
    serves as one.
    """
    checkpoint = work / "checkpoint.pt"
    stamp = dict(id=job.id, course=job.course, schema=SCHEMA, revision=method.revision)
    stamp |= dict(version=__version__, device=job.device)
    auto = automatic(method, job.device)
    stamp["executor"] = auto if job.executor == "auto" else job.executor
    may_continue = not (checkpoint.exists() or method.scheduled or job.anew)
    if may_continue and (shorter := _beginning(job)):
        with writing(checkpoint):
            shutil.copyfile(shorter, part := checkpoint.with_suffix(".part"))
            os.replace(part, checkpoint)
    if checkpoint.exists():
        try:
            # A resumed run's numbers are of one kind.
            stamp["executor"] = check(checkpoint, stamp, method, job.experiment.rounds)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            set_aside(checkpoint, error)  # damaged, another run's, or of another form
    return stamp


def _beginning(job: Job) -> Path | None:
    # The end of the longest run that is a beginning of this one.
    shorter = {}
    for path in job.store.glob("*/state.pt"):
        meta = (read_about(path.parent) or {"meta": {}})["meta"]
        if (meta.get("status"), meta.get("course")) != ("done", job.course):
            continue
        if meta.get("rounds") not in range(job.experiment.rounds):
            continue
        if is_whole(path):
            shorter[meta["rounds"]] = path
        else:
            say(f"{path} is not as its run wrote it: no run goes on from there")
    return shorter[max(shorter)] if shorter else None


def _meta(job: Job, trained: _Training, stamp: dict[str, Any]) -> dict[str, Any]:
    data, method, history = trained.data, trained.method, trained.history
    initial, parameters = method.task.initial, set(method.task.parameters)
    about_id = dict(key=job.id, code=job.code)
    about_data = dict(
        pool=str(job.checksum),
        mean=data.mean,
        std=data.std,
        classes=data.classes,
        input_shape=list(data.input_shape),
        input_kind=data.kind,
        partition_hash=data.federation.hash,
    )
    about_data |= {"dealing": dealing} if (dealing := data.federation.dealing) else {}
    about_data |= {"init_from": job.start} if job.start else {}
    if isinstance(job.source, Result):
        of = job.source.meta
        about_data["source_pool"] = of.get("dealing") or of.get("pool", "")
    elif job.source is not None:
        about_data["source_pool"] = job.source.dealing or str(job.source.checksum)
    about_run = dict(
        modules=job.experiment.modules,
        vocabulary=vocabulary(job.experiment),
        own_scores=method.own_scores,
        status=trained.status,
        rounds=job.experiment.rounds,
        clients=data.K,
        parameters=sum(v.numel() for n, v in initial.items() if n in parameters),
        leaks_test=method.leaks_test,
    )
    ran_on = dict(
        device=_device_name(job.device),
        executor=history.executor or stamp["executor"],
        executor_asked=stamp["executor"],
        torch=torch.__version__,
        python=platform.python_version(),
        processor=processor(),
        commit=commit(),
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        wall_s=trained.wall,
    )
    return stamp | about_id | about_data | about_run | ran_on


def _finish(job: Job, work: Path, meta: dict[str, Any], trained: _Training) -> Result:
    # Write what was measured, and rename the folder: from then on it is a finished run.
    experiment, early = job.experiment, "ended_early" in meta
    if meta["status"] == "done" and not (job.keep_state or early):
        (work / "state.pt").unlink(missing_ok=True)
    with writing(work):
        if experiment.keep_models and trained.final is not None:
            _save_models(work / "models.pt", trained, meta)
        arrays = _arrays(trained)
        scalar_bytes = torch.finfo(trained.data.dtype).bits // 8
        frame = metrics.history_frame(arrays, trained.history, scalar_bytes)
        frame.to_csv(work / "history.csv", index=False)
        np.savez_compressed(work / "arrays.npz", **cast(dict[str, Any], arrays))
        if job.code:
            (work / "code.txt").write_text(experiment.sources(), encoding="utf-8")
        plain = json.loads(json.dumps(experiment.plain()))
        whole = {"experiment": plain, "meta": json.loads(json.dumps(meta))}
        whole["sha256"] = digests(plain, meta, work)
        (work / "experiment.json").write_text(json.dumps(whole, indent=1))
    # The caller holds the lock of the whole run; one that ended early is another run.
    with locked(job.store / f"{job.id}.lock") if early else nullcontext():
        if found := load_result(job.folder, experiment):
            shutil.rmtree(work)
            return found
        clear_way(job.folder)
        with writing(job.folder):
            os.replace(work, job.folder)
    # Not before: until then a run that is killed goes on from it.
    (job.folder / "checkpoint.pt").unlink(missing_ok=True)
    if (found := load_result(job.folder, experiment)) is None:
        raise OSError(f"{job.folder} cannot be read again; is something else writing there?")
    return found


def _check_evaluated(data: ClientData, config: TrainConfig) -> None:
    # A sample of clients for evaluation must not miss all those that can be evaluated.
    tested = [k for k, index in enumerate(data.index["test"]) if len(index)]
    if tested and not set(tested) & set(evaluated(config, data.K).tolist()):
        raise ValueError(
            f"Experiment(eval_clients={config.eval_clients}): only {len(tested)} of {data.K} "
            "clients have test samples, and none of those is drawn; raise eval_clients, or leave "
            "it out, which means all"
        )


def _check_batch(data: ClientData, batch: int) -> None:
    # A batch repeats a client's samples where they are fewer, which is work without an end.
    most = max(map(len, data.index["fit"]))
    if batch > max(REPEATED, 2 * most):
        raise ValueError(
            f"Experiment(batch={batch}): no client trains on more than {most} samples, and a "
            f"larger batch repeats them; batch={most} has all of a client's samples in one"
        )


def _arrays(trained: _Training) -> dict[str, np.ndarray]:
    # What was measured, as a Result has it.
    history, index = trained.history, trained.data.index
    count = len(history.rounds)
    arrays = {"rounds": np.array(history.rounds, dtype=np.int64)}
    if count:
        arrays |= {k: torch.stack(v[:count]).numpy() for k, v in history.evals.items()}
    arrays |= probes.stacked(history.probes)
    held = {split: np.array([len(i) for i in index[split]]) for split in ("train", "val", "test")}
    counted = {split: history.n.get(split, held[split]) for split in ("val", "test")}
    return arrays | {f"n/{split}": n for split, n in (held | counted).items()}


def _check_source(job: Job, method: Method, data: ClientData) -> None:
    # What can be refused before the source is trained.
    experiment = job.experiment
    if experiment.adopt:
        check_adopts(method)
        return
    source = experiment.earlier
    assert source is not None  # callers ask for it
    options = vocabulary(source) | source.model_args
    drawn = models.build(source.model, *_shapes_of_source(job, source, data), **options)
    there = {n: tuple(v.shape) for n, v in drawn.state_dict().items()}
    new = method.task.named_head if experiment.new_head else ()
    for n, v in (method.task.initial | method.task.constants).items():
        if n in new:
            continue
        if there.get(n) != tuple(v.shape):
            has = f"has {n} of shape {there[n]}" if n in there else f"has no {n}"
            raise ValueError(
                f"init_from's model {has}, this one has {n} of shape {tuple(v.shape)}; "
                "use the same model; new_head=True draws a head anew"
            )


def _shapes_of_source(
    job: Job, source: Experiment, data: ClientData
) -> tuple[tuple[int, ...], int]:
    # Of its samples, and how many classes it has.
    if isinstance(job.source, Result):
        return tuple(job.source.meta["input_shape"]), job.source.meta["classes"]
    like = data if source.dataset == job.experiment.dataset else None
    if source.dataset == "own" and job.source is not None:
        like = job.source
    like = like or federation(source)
    return like.input_shape, like.classes


def _initial_state(
    job: Job, method: Method, source: Callable[[Experiment], Result]
) -> State | None:
    # Another Experiment's end: its global model becomes the common initial model. What only the
    # clients have is averaged over them, or the first client's where it is not a float.
    experiment = job.experiment
    if experiment.earlier is None:
        return None
    found = source(experiment.earlier.but(keep_models=True))
    if not found.ok:
        raise Diverged(
            f"{experiment.method}: init_from, run {found.id}, {found.meta['status']}", History()
        )
    try:
        kept = found.kept("models.pt", job.device)
    except (ValueError, FileNotFoundError) as error:
        if found is job.source:  # a Result that the user gave is not computed again
            raise
        assert found.folder is not None  # it lies in the store, unless it was pruned just now
        if found.folder.is_dir():
            set_aside(found.folder, error)
        return _initial_state(job, method, source)
    ended = _ended(kept)
    if experiment.adopt:
        method.task.joins = State(kept["server"], {}, kept["extra"])
        ended = select(ended, method.task.constants)
    new = method.task.named_head if experiment.new_head else ()
    method.task.start_from(select(ended, lambda n: n not in new))
    return None


def _ended(kept: dict[str, Any]) -> Params:
    # The whole model of a run's end, {name: (*shape)}, from what models.pt holds.
    constants, tied = kept.get("constants", {}), kept.get("tied", {})  # older files have neither
    of_clients = {
        n: v.mean(0) if v.is_floating_point() else v[0] for n, v in kept["models"].items()
    }
    whole = constants | of_clients | select(kept["server"], of_clients)
    return whole | {n: whole[first] for n, first in tied.items()}


def _save_models(path: Path, trained: _Training, meta: dict[str, Any]) -> None:
    final, method = trained.final, trained.method
    assert final is not None  # callers ask for it
    # Scores of a method's own are made of all that it serves, others of the network alone.
    names = tuple(trained.before) if method.own_scores else method.task.names
    served = final_models(trained.before, names)
    kept = dict(models=served, server=final.server, clients=final.clients, extra=final.extra)
    kept |= dict(constants=method.task.constants, tied=method.task.tied)
    kept |= dict(n=method.task.n.cpu(), label_counts=method.task.label_counts.cpu())
    torch.save(kept | {n: meta[n] for n in ("id", "revision", "version")}, path)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"
