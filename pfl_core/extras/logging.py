"""Runs in TensorBoard, through its own client library: run(e, on_round=tensorboard(e, "logs"))."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pfl_core.engine.checkpoint import History
from pfl_core.experiments.experiment import Experiment
from pfl_core.util.percent import accuracy


def tensorboard(experiment: Experiment, folder: str | Path) -> Callable[[int, History], None]:
    """An `on_round` of `run` that writes each evaluation below folder/<method>-<seed>.

    It writes client means of accuracy in %, pooled losses, and the scalars moved since the start.
    Raises ImportError where tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            'logging needs the package tensorboard: pip install "pfl-core[logging]"'
        ) from error
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
