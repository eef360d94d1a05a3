"""Runs in TensorBoard: `run(experiment, on_round=tensorboard(experiment, "logs"))`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pfl_core.engine.checkpoint import History
from pfl_core.experiments.experiment import Experiment
from pfl_core.util import checks
from pfl_core.util.percent import accuracy


def tensorboard(experiment: Experiment, folder: str | Path) -> Callable[[int, History], None]:
    """Make an `on_round` for `run` that writes every evaluation for TensorBoard.

    It writes the clients' mean accuracies in %, losses over all samples of all clients, and how
    many scalars have travelled since the start.

    Parameters
    ----------
    experiment : Experiment
        What is run.
    folder : path
        The files go to <method>-<seed> below it.

    Raises
    ------
    ImportError
        If tensorboard is not installed.
    """
    with checks.extra("logging", "logging"):
        from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(str(Path(folder) / f"{experiment.method}-{experiment.seed}"))

    def on_round(round: int, history: History) -> None:
        if not history.rounds or history.rounds[-1] != round:
            return
        for key, series in history.evals.items():
            when, split, metric = key.split("/")
            value, n = series[-1].numpy(), history.n[split]
            measured = n > 0
            if metric == "correct" and measured.any():
                mean = accuracy(value[measured], n[measured]).mean()
                writer.add_scalar(f"{when}/{split}/acc_pct", mean, round)
            elif measured.any():
                writer.add_scalar(f"{when}/{split}/{metric}", value.sum() / n.sum(), round)
        writer.add_scalar("download", history.download[-1], round)
        writer.add_scalar("upload", history.upload[-1], round)
        writer.flush()

    return on_round
