"""Runs in TensorBoard or MLflow, as `on_round` of `run`: run(e, on_round=tensorboard(e, "logs"))."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from pfl_core.experiments import Experiment, federation
from pfl_core.federation import Federation
from pfl_core.simulate import History

INSTALL = 'needs the package {0}: pip install "pfl-core[logging]", or pip install {0}'


def scalars(history: History, fed: Federation) -> Iterator[tuple[str, float]]:
    """("before/test/acc_pct", ...) of the latest evaluation: client means in percent, pooled losses, traffic in scalars."""
    for key, series in history.evals.items():
        when, split, metric = key.split("/")
        n = [len(i) for i in fed.index[split]]
        if any(n):
            v = series[-1].tolist()
            mean = sum(100 * c / k for c, k in zip(v, n, strict=True) if k) / sum(k > 0 for k in n)
            yield (
                f"{when}/{split}/{'acc_pct' if metric == 'correct' else metric}",
                mean if metric == "correct" else sum(v) / sum(n),
            )
    yield from (("download", history.download[-1]), ("upload", history.upload[-1]))


def _on_round(log: Callable[[str, float, int], None], fed: Federation, end: Callable[[], None]) -> Callable:
    def on_round(r: int, history: History) -> None:
        if history.rounds and history.rounds[-1] == r:
            for name, v in scalars(history, fed):
                log(name, v, r)
            end()

    return on_round


def tensorboard(e: Experiment, folder: str | Path, fed: Federation | None = None) -> Callable:
    """An `on_round` that writes every evaluation below folder/<method>-<seed>; `fed`: as for run. ImportError without tensorboard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(f"logging to TensorBoard {INSTALL.format('tensorboard')}") from error
    writer = SummaryWriter(str(Path(folder) / f"{e.method}-{e.seed}"))
    return _on_round(writer.add_scalar, fed or federation(e), writer.flush)


def mlflow(e: Experiment, fed: Federation | None = None) -> Callable:
    """An `on_round` that logs every evaluation to the active MLflow run, the experiment's fields first. ImportError without mlflow."""
    try:
        import mlflow as client
    except ImportError as error:
        raise ImportError(f"logging to MLflow {INSTALL.format('mlflow')}") from error
    client.log_params({k: v for k, v in e.plain().items() if v not in (None, {}, [])})
    return _on_round(lambda name, v, r: client.log_metric(name, v, step=r), fed or federation(e), lambda: None)
