"""pfl_core: personalized federated learning, five papers reproduced.

You write one client; the engine runs them all.

    list_methods()                          what there is, a line each; list_datasets(),
                                            list_models(), list_partitions() and list_metrics()
                                            likewise

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
`pfl --help`, or `python -m pfl_core --help`, is the command line.
"""

import lazy_loader

# What __init__.pyi names is imported when it is first asked for: torch takes seconds, and `import
# pfl_core`, or a list on the command line, needs none of it.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
