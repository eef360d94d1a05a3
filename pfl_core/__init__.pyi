# The public names, and where they are: for __init__.py, editors and type checkers.
from . import methods
from .analysis.side_by_side import plot
from .analysis.tables import export, table
from .data.federation import Federation
from .data.partition import list_partitions, register_partition
from .data.pools import fetch, list_datasets, load, register_dataset
from .engine.scoring import list_metrics, register_metric
from .experiments.experiment import Experiment, grid
from .experiments.listing import runs
from .experiments.personal import load_model
from .experiments.run import run
from .experiments.store import Result
from .experiments.sweep import sweep
from .experiments.tune import tune
from .methods.base import Method, list_methods
from .models import list_models, register_model
from .util.version import __version__

__all__ = [
    "__version__",
    "Experiment",
    "Federation",
    "Method",
    "Result",
    "export",
    "fetch",
    "grid",
    "list_datasets",
    "list_methods",
    "list_metrics",
    "list_models",
    "list_partitions",
    "load",
    "load_model",
    "methods",
    "plot",
    "register_dataset",
    "register_metric",
    "register_model",
    "register_partition",
    "run",
    "runs",
    "sweep",
    "table",
    "tune",
]
