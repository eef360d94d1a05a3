"""The computation of one run: from its checkpoint, or a shorter run's end, to a finished folder."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pfl_core.engine import probes, unvisited
from pfl_core.engine.checkpoint import History, check, writing
from pfl_core.engine.engine import automatic
from pfl_core.engine.simulate import FINISH, Diverged, simulate
from pfl_core.experiments import begun
from pfl_core.experiments.experiment import SCHEMA, Experiment
from pfl_core.experiments.finish import Trained, finish
from pfl_core.experiments.prepare import Call, Prepared, prepared
from pfl_core.experiments.store import Result, clear_way, is_whole, read_about, set_aside
from pfl_core.methods.base import Method, State
from pfl_core.stacked import Params, select
from pfl_core.util import checks
from pfl_core.util.progress import Progress
from pfl_core.util.say import say
from pfl_core.util.version import __version__


def compute(call: Call, source: Callable[[Experiment], Result]) -> Result:
    """Compute what a call asks for, whose lock the caller holds, and keep the result in the store.

    `source` runs the Experiment that this one starts from (`init_from`).
    """
    run = prepared(call)
    work = _work_folder(call)
    stamp = _resume(call, run.method, work)
    warned = "; ".join(filter(None, [unvisited.warn(run.method), run.leak]))
    trained = _train(run, work, stamp, source)
    stamp |= {"warned": warned} if warned else {}
    if call.fed is not None:
        call.fed.check_unchanged()
    return finish(run, work, stamp, trained)


def _train(
    run: Prepared, work: Path, stamp: dict[str, Any], source: Callable[[Experiment], Result]
) -> Trained:
    call, method, data = run.call, run.method, run.data
    e, began, status = call.experiment, time.monotonic(), "done"
    try:
        state = _initial_state(call, method, source)
        with Progress(e.rounds, f"{e.method} {e.dataset} seed {e.seed}") as bar:
            outcome = simulate(
                method,
                data,
                executor=stamp["executor"],
                workers=call.workers,
                state=state,
                checkpoint=work / "checkpoint.pt",
                stamp=stamp,
                end=work / "state.pt" if call.keep_state or call.on_round else None,
                on_round=_told(call, method, bar),
                record=probes.recorder(e.record),
            )
        final, history, served = outcome.state, outcome.history, outcome.served
    except Diverged as error:
        final, history, served, status = None, error.history, {}, f"failed: {error}"
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"{e.method} on {call.device} is out of memory with batch={e.batch} and "
            f"{e.participation:.0%} of {data.K} clients at once; lower batch or participation, "
            "take executor='threads' with few workers, or device='cpu'; a run with a checkpoint "
            f"resumes from it ({str(error).partition('.')[0]})"
        ) from error
    rounds = history.wall[-1] if history.wall else time.monotonic() - began
    return Trained(history, final, served, status, rounds + history.tuned_s)


def _told(call: Call, method: Method, bar: Progress) -> Callable[[int, History], bool | str]:
    # Moves the bar, and passes on what the user's on_round says.
    def step(r: int, history: History) -> bool | str:
        acc = history.accuracy()
        bar.at(r, "" if acc is None else f"{acc:.1f} %")
        told = call.on_round(r, history) if call.on_round else None
        if told == FINISH and not method.continues and r < call.experiment.rounds:
            say(
                f"{method.name}: what a round does depends on their number, so it cannot end "
                f"early; run rounds={r} instead"
            )
            return True
        return told if told == FINISH else bool(told)

    return step


def _work_folder(call: Call) -> Path:
    # Where the run is written until it is whole. What stands in its way is set aside, and a trial
    # is written there, before anything is trained.
    work = call.folder.with_suffix(".part")
    for path in (call.folder, work):
        clear_way(path)
    checks.make_folder(work)
    with writing(work):
        trial = work / "trial"
        trial.write_bytes(b"0" * 4096)
        trial.unlink()
        begun.note(work, call.experiment, call.id)
    return work


def _resume(call: Call, method: Method, work: Path) -> dict[str, Any]:
    """The stamp of a run, and in `work` the checkpoint that it goes on from, if there is one.

    The stamp's executor is that of the checkpoint. A checkpoint that is not this run's is set
    aside. Where there is none, the end of the longest run of the same course with fewer rounds
    serves as one.
    """
    checkpoint = work / "checkpoint.pt"
    stamp = dict(id=call.id, course=call.course, schema=SCHEMA, revision=method.revision)
    stamp |= dict(version=__version__, device=call.device)
    auto = automatic(method, call.device)
    stamp["executor"] = auto if call.executor == "auto" else call.executor
    may_continue = method.continues and not (checkpoint.exists() or call.anew)
    if may_continue and (shorter := _beginning(call)):
        with writing(checkpoint):
            shutil.copyfile(shorter, part := checkpoint.with_suffix(".part"))
            os.replace(part, checkpoint)
    if checkpoint.exists():
        try:
            # A resumed run's numbers are of one kind.
            stamp["executor"] = check(checkpoint, stamp, method, call.experiment.rounds)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            set_aside(checkpoint, error)  # damaged, another run's, or of another form
    return stamp


def _beginning(call: Call) -> Path | None:
    # The end of the longest run that is a beginning of this one.
    shorter = {}
    for path in call.store.glob("*/state.pt"):
        meta = (read_about(path.parent) or {"meta": {}})["meta"]
        # A state is kept at the end of all rounds, also where fine-tuning diverged after them.
        if meta.get("course") != call.course:
            continue
        # One of as many rounds differs in its fine-tuning, which follows them.
        if meta.get("rounds") not in range(call.experiment.rounds + 1):
            continue
        if is_whole(path):
            shorter[meta["rounds"]] = path
        else:
            say(f"{path} is not as its run wrote it: no run goes on from there")
    return shorter[max(shorter)] if shorter else None


def _initial_state(
    call: Call, method: Method, source: Callable[[Experiment], Result]
) -> State | None:
    # Another Experiment's end: its global model becomes the common initial model. What only the
    # clients have is averaged over them, or the first client's where it is not a float.
    experiment = call.experiment
    if experiment.earlier is None:
        return None
    found = source(experiment.earlier.but(keep_models=True))
    if not found.ok:
        raise Diverged(
            f"{experiment.method}: init_from, run {found.id}, {found.meta['status']}", History()
        )
    try:
        kept = found.kept("models.pt", call.device)
    except (ValueError, FileNotFoundError) as error:
        if found is call.source:  # a Result that the user gave is not computed again
            raise
        assert found.folder is not None  # it lies in the store, unless it was pruned just now
        if found.folder.is_dir():
            set_aside(found.folder, error)
        return _initial_state(call, method, source)
    ended = _ended(kept)
    if experiment.adopt:
        server, extra = (_of_type(kept[n], method.task.dtype) for n in ("server", "extra"))
        method.task.joins = State(server, {}, extra)
        ended = select(ended, method.task.constants) | _alike(kept, method)
    new = method.task.named_head if experiment.new_head else ()
    method.task.start_from(select(ended, lambda n: n not in new))
    return None


def _of_type(tree: Any, dtype: torch.dtype) -> Any:
    # Floats in a dict of tensors, at any depth, as the run that takes them computes.
    if isinstance(tree, dict):
        return {n: _of_type(v, dtype) for n, v in tree.items()}
    return tree.to(dtype) if tree.dtype in (torch.float32, torch.float64) else tree


def _alike(kept: dict[str, Any], method: Method) -> Params:
    # Buffers that are the model's and no client's, such as a projection that is drawn with it.
    of_clients = select(kept["models"], set(method.task.buffers) - method.task.bn)
    return {n: v[0] for n, v in of_clients.items() if (v == v[:1]).all()}


def _ended(kept: dict[str, Any]) -> Params:
    # The whole model of a run's end, {name: (*shape)}, from what models.pt holds.
    constants, tied = kept.get("constants", {}), kept.get("tied", {})  # older files have neither
    of_clients = {
        n: v.mean(0) if v.is_floating_point() else v[0] for n, v in kept["models"].items()
    }
    whole = constants | of_clients | select(kept["server"], of_clients)
    return whole | {n: whole[first] for n, first in tied.items()}
