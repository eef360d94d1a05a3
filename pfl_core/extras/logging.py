"""Runs in a tracker: `run(experiment, on_round=tracker(log))`, TensorBoard among them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pfl_core.data.federation import Federation
from pfl_core.engine.checkpoint import History
from pfl_core.experiments.build import fitted
from pfl_core.experiments.experiment import Experiment
from pfl_core.util import checks, paths


def tracker(log: Callable[..., Any]) -> Callable[[int, History], None]:
    """Make an `on_round` for `run` that hands every evaluation to a tracker.

    A run that resumes, or goes on from a shorter one, hands on its history from round 0 first. So
    does each run of several with one tracker.

    Parameters
    ----------
    log : function
        `log(numbers, step=round)` keeps `History.numbers(round)` of an evaluated round, as
        wandb.log, trackio.log and mlflow.log_metrics do.

    Examples
    --------
    >>> from pfl_core.extras.logging import tracker
    >>> def log(numbers, step):
    ...     print(step, sorted(numbers)[:3])
    >>> e = Experiment(clients=3, model="mlp", rounds=1, partition="iid", eval_after=False)
    >>> result = run(e, on_round=tracker(log), recompute=True)
    0 ['before/test/acc_balanced', 'before/test/acc_pct', 'before/test/loss']
    1 ['before/test/acc_balanced', 'before/test/acc_pct', 'before/test/loss']
    """
    of, told = None, 0

    def on_round(round: int, history: History) -> None:
        nonlocal of, told
        if history is not of:  # another run
            of, told = history, 0
        for step in history.rounds[told:]:
            log(history.numbers(step), step=step)
            told += 1

    return on_round


def tensorboard(
    experiment: Experiment, folder: str | Path, fed: Federation | None = None
) -> Callable[[int, History], None]:
    """Make an `on_round` for `run` that writes every evaluation for TensorBoard.

    It writes `History.numbers`. A run that resumes, or goes on from a shorter one, writes its
    history from round 0 anew, which TensorBoard shows in place of what was there.

    Parameters
    ----------
    experiment : Experiment
        What is run.
    folder : path
        The files go to <method>-<seed>-<id of the run> below it.
    fed : Federation, optional
        Own data, as `run` takes them.

    Raises
    ------
    ImportError
        If tensorboard is not installed.
    ValueError
        If `experiment` is over own data and `fed` is missing, as for `run`.
    """
    with checks.extra("logging", "logging"):
        from torch.utils.tensorboard import SummaryWriter
    e = fitted(experiment, fed)
    id = e.id_for(fed.checksum) if fed is not None else e.id
    place, writers = str(paths.expanded(folder, "folder") / f"{e.method}-{e.seed}-{id}"), []

    def log(numbers: dict[str, float], step: int) -> None:
        if not writers:  # what the same run wrote before it was stopped gives way
            writers.append(SummaryWriter(place, purge_step=0))
        for name, value in numbers.items():
            writers[0].add_scalar(name, value, step)
        writers[0].flush()

    return tracker(log)
