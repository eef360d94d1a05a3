"""Runs in TensorBoard: `run(experiment, on_round=tensorboard(experiment, "logs"))`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pfl_core.data.federation import Federation
from pfl_core.engine.checkpoint import History
from pfl_core.experiments.build import fitted
from pfl_core.experiments.experiment import Experiment
from pfl_core.util import checks, paths
from pfl_core.util.percent import accuracy


def tensorboard(
    experiment: Experiment, folder: str | Path, fed: Federation | None = None
) -> Callable[[int, History], None]:
    """Make an `on_round` for `run` that writes every evaluation for TensorBoard.

    It writes the clients' mean accuracies in %, losses over all samples of all clients, and how
    many scalars have travelled since the start. A run that resumes, or goes on from a shorter one,
    writes its history from round 0 anew, which TensorBoard shows in place of what was there.

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

    def on_round(round: int, history: History) -> None:
        first = not writers
        if first:  # what the same run wrote before it was stopped gives way
            writers.append(SummaryWriter(place, purge_step=0))
        if first or history.rounds and history.rounds[-1] == round:
            for at in range(0 if first else len(history.rounds) - 1, len(history.rounds)):
                _write(writers[0], history, at)
            writers[0].flush()

    return on_round


def _write(writer: Any, history: History, at: int) -> None:
    # The evaluation at place `at` of a history.
    step = history.rounds[at]
    for key, series in history.evals.items():
        if at >= len(series):
            continue
        when, split, metric = key.split("/")
        value, n = series[at].numpy(), history.n[split]
        measured = n > 0
        if metric == "correct" and measured.any():
            mean = accuracy(value[measured], n[measured]).mean()
            writer.add_scalar(f"{when}/{split}/acc_pct", mean, step)
        elif measured.any():
            writer.add_scalar(f"{when}/{split}/{metric}", value.sum() / n.sum(), step)
    writer.add_scalar("download", history.download[at], step)
    writer.add_scalar("upload", history.upload[at], step)
