"""pfl_core: personalized federated learning, five papers reproduced. You write one client; the engine runs them all."""

from pfl_core import methods
from pfl_core.data import fetch, list_datasets, load, register_dataset
from pfl_core.experiments import Experiment, grid
from pfl_core.federation import Federation
from pfl_core.methods.base import Method, list_methods
from pfl_core.models import list_models, register_model
from pfl_core.partition import list_partitions, register_partition
from pfl_core.runs import Result, run, sweep
from pfl_core.version import __version__

__all__ = [
    "__version__",
    "Experiment",
    "Federation",
    "Method",
    "Result",
    "fetch",
    "grid",
    "list_datasets",
    "list_methods",
    "list_models",
    "list_partitions",
    "load",
    "methods",
    "register_dataset",
    "register_model",
    "register_partition",
    "run",
    "sweep",
]
