"""The end of a computation: what was measured becomes a finished folder of the store."""

from __future__ import annotations

import itertools
import json
import os
import platform
import shutil
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from pfl_core.engine import probes
from pfl_core.engine.checkpoint import History, writing
from pfl_core.engine.scoring import SCORES
from pfl_core.engine.simulate import final_models
from pfl_core.experiments import build, metrics
from pfl_core.experiments.personal import code_of_scores
from pfl_core.experiments.prepare import Call, Prepared
from pfl_core.experiments.store import Result, clear_way, digests, load_result, locked
from pfl_core.methods.base import State
from pfl_core.stacked import Params
from pfl_core.util.provenance import commit, processor
from pfl_core.util.say import say


@dataclass(frozen=True, eq=False)
class Trained:
    """What the training of a run ended with; of one that diverged, `final` is None.

    served : the personal models that clients end with; wall : seconds
    """

    history: History
    final: State | None
    served: Params
    status: str
    wall: float


def finish(run: Prepared, work: Path, stamp: dict[str, Any], trained: Trained) -> Result:
    """Write what was measured, and rename the folder `work`: from then on it is a finished run.

    A training that ended early is the result of an Experiment of so many rounds.

    Parameters
    ----------
    stamp : dict
        What its checkpoint says of it; it becomes part of `Result.meta`.

    Raises
    ------
    OSError
        If the folder cannot be written, or not be read again.
    """
    call, early = run.call, False
    if trained.final is not None and trained.final.round < call.experiment.rounds:
        early, short = True, call.experiment.but(rounds=trained.final.round)
        stamp = stamp | {"ended_early": call.id}
        call = replace(call, experiment=short, id=short.id_for(call.checksum, call.start))
        stamp["id"] = call.id
    meta = _meta(run, call, trained, stamp)
    _write(run, call, work, meta, trained)
    # The caller holds the lock of the whole run; one that ended early is another run.
    with locked(call.store / f"{call.id}.lock") if early else nullcontext():
        return _moved(work, call)


def _write(run: Prepared, call: Call, work: Path, meta: dict[str, Any], trained: Trained) -> None:
    experiment, early = call.experiment, "ended_early" in meta
    if meta["status"] == "done" and not (call.keep_state or early):
        (work / "state.pt").unlink(missing_ok=True)
    with writing(work):
        if experiment.keep_models and trained.final is not None:
            _save_models(work / "models.pt", run, trained, meta)
        arrays = _arrays(run, trained)
        scalar_bytes = torch.finfo(run.data.dtype).bits // 8
        frame = metrics.history_frame(arrays, trained.history, scalar_bytes)
        frame.to_csv(work / "history.csv", index=False)
        np.savez_compressed(work / "arrays.npz", **cast(dict[str, Any], arrays))
        if call.code:
            (work / "code.txt").write_text(experiment.sources(), encoding="utf-8")
        plain = json.loads(json.dumps(experiment.plain()))
        whole = {"experiment": plain, "meta": json.loads(json.dumps(meta))}
        whole["sha256"] = digests(plain, meta, work)
        (work / "experiment.json").write_text(json.dumps(whole, indent=1))


def _moved(work: Path, call: Call) -> Result:
    if not call.anew and (found := load_result(call.folder, call.experiment)):
        shutil.rmtree(work)
        return found
    clear_way(call.folder)
    if call.anew:
        keep_aside(call.folder)
    with writing(call.folder):
        os.replace(work, call.folder)
    # Not before: until then a run that is killed goes on from it.
    (call.folder / "checkpoint.pt").unlink(missing_ok=True)
    if (found := load_result(call.folder, call.experiment)) is None:
        raise OSError(f"{call.folder} cannot be read again; is something else writing there?")
    return found


def keep_aside(path: Path) -> None:
    """Rename what is computed anew to NAME.before-<time>, with a message; nothing is deleted."""
    if not os.path.lexists(path):
        return
    now = time.strftime("%Y%m%d-%H%M%S")
    names = (f"{path.name}.before-{now}{i or ''}" for i in itertools.count())
    away = next(path.with_name(n) for n in names if not os.path.lexists(path.with_name(n)))
    os.replace(path, away)
    say(f"{path.name}: computed anew; what was there is kept as {away.name}")


def _meta(run: Prepared, call: Call, trained: Trained, stamp: dict[str, Any]) -> dict[str, Any]:
    # call: that of the run, or of a shorter one where it ended early.
    data, method, history = run.data, run.method, trained.history
    initial, parameters = method.task.initial, set(method.task.parameters)
    about_id = dict(key=call.id, code=call.code)
    about_data = dict(
        pool=str(call.checksum),
        mean=data.mean,
        std=data.std,
        classes=data.classes,
        input_shape=list(data.input_shape),
        input_kind=data.kind,
        partition_hash=data.federation.hash,
    )
    about_data |= {"dealing": dealing} if (dealing := data.federation.dealing) else {}
    about_data |= data.federation.names
    about_data |= {"init_from": call.start} if call.start else {}
    if isinstance(call.source, Result):
        of = call.source.meta
        about_data["source_pool"] = of.get("dealing") or of.get("pool", "")
    elif call.source is not None:
        about_data["source_pool"] = call.source.dealing or str(call.source.checksum)
    about_run = dict(
        modules=call.experiment.modules,
        vocabulary=run.vocabulary,
        own_scores=method.own_scores,
        score_code=code_of_scores(call.experiment, method.own_scores),
        status=trained.status,
        rounds=call.experiment.rounds,
        clients=data.K,
        parameters=sum(v.numel() for n, v in initial.items() if n in parameters),
        leaks_test=method.leaks_test or bool(run.leak),
    )
    ran_on = dict(
        device=_device_name(call.device),
        executor=history.executor or stamp["executor"],
        executor_asked=stamp["executor"],
        torch=torch.__version__,
        python=platform.python_version(),
        processor=processor(),
        commit=commit(),
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        wall_s=trained.wall,
        cpu_s=history.cpu,
    )
    return stamp | about_id | about_data | about_run | ran_on


def _arrays(run: Prepared, trained: Trained) -> dict[str, np.ndarray]:
    # What was measured, as a Result has it.
    history, index = trained.history, run.data.index
    count = len(history.rounds)
    arrays = {"rounds": np.array(history.rounds, dtype=np.int64)}
    if count:
        arrays |= {k: torch.stack(v[:count]).numpy() for k, v in history.evals.items()}
        arrays |= {k: v[None].numpy() for k, v in history.tuned.items()}  # of the last round
    arrays |= probes.stacked(history.probes)
    if run.call.experiment.client_dropout:
        pairs = [(r, k) for r, ids in sorted(history.answered.items()) for k in ids]
        arrays["answered"] = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    held = {split: np.array([len(i) for i in index[split]]) for split in ("train", "val", "test")}
    counted = {split: history.n.get(split, held[split]) for split in ("val", "test")}
    arrays |= {f"n/{split}": n for split, n in (held | counted).items()}
    return arrays | (_ends(run, history) if trained.status == "done" else {})


def _ends(run: Prepared, history: History) -> dict[str, np.ndarray]:
    # What is kept of the last evaluation alone, and which samples its class scores are of.
    large = {
        k: v.astype(run.call.experiment.dtype) if SCORES in k else v
        for k, v in history.ends.items()
    }
    if not run.call.experiment.keep_scores:
        return large
    who, index = history.n["test"].nonzero()[0], run.data.index["test"]
    there = build.places(run.call.experiment, index)
    said = {"sample_id": there, "label": [run.data.federation.y[mine] for mine in index]}
    for name, lists in said.items():
        large[f"test/{name}"] = np.concatenate([lists[k] for k in who]) if len(who) else who
    return large | {"test/client": np.repeat(who, history.n["test"][who])}


def _save_models(path: Path, run: Prepared, trained: Trained, meta: dict[str, Any]) -> None:
    final, method = trained.final, run.method
    assert final is not None  # callers ask for it
    # Scores of a method's own are made of all that it serves, others of the network alone.
    names = tuple(trained.served) if method.own_scores else method.task.names
    served = final_models(trained.served, names)
    kept = dict(models=served, server=final.server, clients=final.clients, extra=final.extra)
    kept |= dict(constants=method.task.constants, tied=method.task.tied)
    kept |= dict(n=method.task.n.cpu(), label_counts=method.task.label_counts.cpu())
    torch.save(kept | {n: meta[n] for n in ("id", "revision", "version")}, path)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"
