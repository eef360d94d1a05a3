"""Runs in TensorBoard: `run(experiment, on_round=tensorboard(experiment, "logs"))`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

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


def _of_clients(metric: str, value: np.ndarray, n: np.ndarray) -> tuple[str, float]:
    # One number of what was measured of clients with n samples each, and its name in rows.
    if metric == "correct":
        return "acc_pct", accuracy(value, n).mean()
    if metric == "loss":
        return metric, value.sum() / n.sum()
    known = value[~np.isnan(value)]  # of a metric that is undefined for some
    mean = known.mean() if len(known) else np.nan
    return ("acc_balanced", 100 * mean) if metric == "balanced" else (metric, mean)


def _write(writer: Any, history: History, at: int) -> None:
    # The evaluation at place `at` of a history.
    step = history.rounds[at]
    for key, series in history.evals.items():
        if at >= len(series):
            continue
        when, split, metric = key.split("/")
        has = history.n[split] > 0
        value, n = series[at].numpy()[has], history.n[split][has]
        name, number = _of_clients(metric, value, n) if has.any() else (metric, np.nan)
        if not np.isnan(number):
            writer.add_scalar(f"{when}/{split}/{name}", number, step)
    writer.add_scalar("download", history.download[at], step)
    writer.add_scalar("upload", history.upload[at], step)
