"""Runs in TensorBoard, through its own client library: run(e, on_round=tensorboard(e, "logs"))."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from pfl_core.data.federation import Federation
from pfl_core.engine.simulate import History
from pfl_core.experiments.build import federation
from pfl_core.experiments.experiment import Experiment


def tensorboard(
    e: Experiment, folder: str | Path, fed: Federation | None = None
) -> Callable[[int, History], None]:
    """An `on_round` of `run` that writes each evaluation below folder/<method>-<seed>: client means of accuracy in %, pooled losses,
    scalars moved since the start. `fed`: as for `run`. Raises ImportError where tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            'logging needs the package tensorboard: pip install "pfl-core[logging]"'
        ) from error
    writer = SummaryWriter(str(Path(folder) / f"{e.method}-{e.seed}"))
    n = {s: np.array([len(i) for i in v]) for s, v in (fed or federation(e)).index.items()}

    def on_round(r: int, history: History) -> None:
        if not history.rounds or history.rounds[-1] != r:
            return
        for key, series in history.evals.items():
            (at, split, metric), value = key.split("/"), series[-1].numpy()
            has = n[split] > 0
            if metric == "correct" and has.any():
                writer.add_scalar(
                    f"{at}/{split}/acc_pct", (100 * value[has] / n[split][has]).mean(), r
                )
            elif has.any():
                writer.add_scalar(f"{at}/{split}/{metric}", value.sum() / n[split].sum(), r)
        writer.add_scalar("download", history.download[-1], r)
        writer.add_scalar("upload", history.upload[-1], r)
        writer.flush()

    return on_round
