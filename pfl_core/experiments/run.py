"""Experiment -> Result, through a run store in which nothing computed is lost."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pfl_core.data import pools
from pfl_core.data.federation import Federation
from pfl_core.data.files import NAMES
from pfl_core.engine.checkpoint import History
from pfl_core.engine.engine import EXECUTORS
from pfl_core.experiments import lookup
from pfl_core.experiments.compute import compute
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.finish import keep_aside
from pfl_core.experiments.prepare import Call
from pfl_core.experiments.starts import id_of_start, settled
from pfl_core.experiments.store import Result, locked
from pfl_core.util import checks, gpu, paths


def run(
    experiment: Experiment,
    *,
    device: str = "auto",
    executor: str = "auto",
    workers: int | None = None,
    store: str | Path | None = None,
    fed: Federation | None = None,
    source: Result | Federation | None = None,
    recompute: bool = False,
    keep_state: bool = False,
    on_round: Callable[[int, History], bool | str | None] | None = None,
) -> Result:
    """The result of an Experiment: from the store if it is there, else computed and stored.

    An interrupted run goes on from its checkpoint; one that another process computes is waited for.

    Parameters
    ----------
    experiment : Experiment
    device : "auto" ($PFL_DEVICE, else a GPU if there is one), "cpu" or "cuda"
    executor : how clients are trained: "auto" (by the device), "threads", or stacked: "graphs" or
        "batched", and with ":unfold" after it, convolutions in another form; the result says which
    workers : number of threads of executor "threads", by default one a processor core
    store : folder of the runs, by default store/ in $PFL_RUNS
    fed : a Federation, data and clients of your own, for an Experiment with dataset="own"
    source : what `init_from` is where own data are behind it: its Result, which has kept models, or
        the Federation that it is trained on (the same as `fed`, or another one)
    recompute : compute the run anew, not what it starts from, and keep <id>.before-<time>
    keep_state : keep the end of the run, so that a run of more rounds can go on from it
    on_round : function (round, history), called after every round; if it returns "finish", the run
        ends as that of an Experiment of so many rounds; True stops it until the next call

    Returns
    -------
    Result
        If training diverged, its `ok` is False, and that is stored, too.

    Raises
    ------
    DatasetMissing, ValueError (before anything is trained), Interrupted (by on_round)

    Examples
    --------
    >>> from pfl_core import Experiment, run
    >>> result = run(Experiment(clients=3, model="mlp", rounds=2, partition="iid"), device="cpu")
    >>> result.ok, result.arrays["rounds"].tolist()
    (True, [0, 1, 2])
    """
    _check_call(experiment, executor, workers, on_round)
    how = dict(executor=executor, workers=workers, on_round=on_round, keep_state=keep_state)
    call = _job(experiment, device, store, fed, source, anew=recompute, **how)
    result = _found_or_computed(call)
    if keep_state and result.ok and not (call.store / result.id / "state.pt").exists():
        warnings.warn(
            f"keep_state: {result.id} was stored before without the end of its training; "
            "run(..., recompute=True, keep_state=True) trains it again",
            stacklevel=2,
        )
    # A run that is found may be of the same data under other names.
    if fed is None:
        return result
    meta = {n: v for n, v in result.meta.items() if n not in NAMES}
    return replace(result, meta=meta | fed.names)


def _check_call(experiment: Any, executor: str, workers: Any, on_round: Any) -> None:
    if not isinstance(experiment, Experiment):
        got = type(experiment).__name__
        raise TypeError(f"run takes an Experiment, got {got}; write run(Experiment(method=...))")
    if on_round is not None and not callable(on_round):
        raise TypeError(
            f"on_round={on_round!r}: allowed is a function of (round, history), or None"
        )
    check_how(executor=executor, workers=workers)


def check_how(
    device: str = "auto", executor: str = "auto", workers: Any = None, **others: Any
) -> None:
    """Raise ValueError for a device, executor or number of workers that no run can have.

    `others` are not looked at.
    """
    if device != "auto":
        pick_device(device)
    checks.known("executor", executor, EXECUTORS)
    _check_torch()
    checks.count("run", "workers", workers, "the number of threads; by default one a core")


def _check_torch() -> None:
    # What of torch's own state would change numbers that an id says nothing of, or end a run late.
    if (default := torch.get_default_dtype()) != torch.float32:
        raise ValueError(
            f"torch's default number format is {default}, in which models begin with other numbers "
            "than their ids say; set it back with torch.set_default_dtype(torch.float32), and say "
            "Experiment(dtype=...)"
        )
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ValueError(
            "torch.autocast is on, which changes numbers that the id says nothing of; call run "
            "outside of it, with Experiment(precision=...)"
        )
    if torch.is_inference_mode_enabled():
        raise ValueError("torch.inference_mode is on, in which nothing trains; call run outside it")
    if (device := torch.get_default_device()).type != "cpu":
        raise ValueError(
            f"torch's default device is {device}; set it back with "
            "torch.set_default_device('cpu'), and say run(device=...)"
        )


def _job(
    experiment: Experiment,
    device: str,
    store: str | Path | None,
    fed: Federation | None,
    source: Result | Federation | None,
    **how: Any,
) -> Call:
    # What `run` is to do; how: the fields of Call that are taken as they were given.
    experiment = settled(experiment, fed, source)
    store = paths.store_folder(store)
    checks.make_folder(store)
    checksum = fed.checksum if fed is not None else pools.checksum(experiment.dataset)
    start = id_of_start(experiment, source)
    return Call(
        experiment=experiment,
        id=experiment.id_for(checksum, start),
        course=experiment.course_for(checksum, start),
        code=experiment.code,
        checksum=checksum,
        start=start,
        store=store,
        device=pick_device(device),
        fed=fed,
        source=source,
        **how,
    )


def _found_or_computed(call: Call) -> Result:
    experiment = call.experiment
    where = (experiment, call.id, call.checksum, call.store)
    if not call.anew and (found := lookup.find(*where)):
        return found
    if call.fed is None:
        # The id may be known without the data, from a run that others published; computing is not.
        pools.load(experiment.dataset)
    with locked(call.store / f"{call.id}.lock"):
        if call.anew:  # the run itself stays until the new one is whole
            keep_aside(call.folder.with_suffix(".part"))
        elif found := lookup.find(*where, aside=True):
            return found
        return compute(call, functools.partial(_run_source, call))


def _run_source(call: Call, start: Experiment) -> Result:
    if isinstance(call.source, Result):
        return call.source
    how: dict[str, Any] = dict(device=call.device, executor=call.executor, workers=call.workers)
    how["fed" if start.dataset == "own" else "source"] = call.source
    return run(start, store=call.store, **how)


def pick_device(device: str) -> str:
    """The device that is meant: "cpu" or "cuda". "auto" is $PFL_DEVICE, else a GPU if there is one.

    Raises
    ------
    ValueError
        For a GPU that is not there, or that torch cannot use; "auto" warns of one that it cannot.
    """
    if device == "auto":
        device = os.environ.get("PFL_DEVICE") or _automatic()
    if device not in ("cpu", "cuda"):
        several = "of several GPUs choose one by CUDA_VISIBLE_DEVICES=1, for example"
        checks.known("device", device, ("auto", "cpu", "cuda"), several)
    if device == "cuda" and (why := gpu.refused()):
        raise ValueError(f"device cuda was asked for, but {why}; use device='cpu' or 'auto'")
    return device


def _automatic() -> str:
    if why := gpu.misfit():
        _warn(why)
    return "cpu" if gpu.refused() else "cuda"


@functools.cache  # once a process
def _warn(why: str) -> None:
    said = f"training on the CPU: {why}; device='cpu' or PFL_DEVICE=cpu says that this is meant"
    warnings.warn(said, stacklevel=4)
