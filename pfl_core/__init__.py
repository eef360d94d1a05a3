"""pfl_core: personalized federated learning, five papers reproduced.

You write one client; the engine runs them all.

    list_methods()                          what there is, a line each; list_datasets(),
                                            list_models() and list_partitions() likewise

    experiment = Experiment(dataset="digits", method="fedper", rounds=20)
                                            a run, as plain values
    experiment.but(lr=0.1)                  another one, with a field changed
    result = run(experiment)                found in the store, resumed, or computed
    result.summary()                        what came out; result.rows and result.clients say more

    plot(result, other)                     their curves in one figure, seeds with an interval

    cells = grid(experiment, {"FedAvg": {"method": "fedavg"}, "FedPer": {}})
    rows = sweep(cells)                     many runs, as rows of one data frame
    best, rows = tune(experiment, {"lr": [0.01, 0.1]})
                                            hyper-parameters, chosen on validation data

    Federation(x, y, train=[...], test=[...])
                                            clients over arrays of your own
    Method                                  the class that a method of your own inherits from

`help(Experiment)`, `help(Method)`, ... say more, docs/errors.md lists what can go wrong, and
`python -m pfl_core --help` is the command line.
"""

from pfl_core import methods
from pfl_core.analysis.side_by_side import plot
from pfl_core.data.federation import Federation
from pfl_core.data.partition import list_partitions, register_partition
from pfl_core.data.pools import fetch, list_datasets, load, register_dataset
from pfl_core.experiments.experiment import Experiment, grid
from pfl_core.experiments.personal import load_model
from pfl_core.experiments.run import run
from pfl_core.experiments.store import Result
from pfl_core.experiments.sweep import sweep, tune
from pfl_core.methods.base import Method, list_methods
from pfl_core.models import list_models, register_model
from pfl_core.util.version import __version__

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
    "load_model",
    "methods",
    "plot",
    "register_dataset",
    "register_model",
    "register_partition",
    "run",
    "sweep",
    "tune",
]
