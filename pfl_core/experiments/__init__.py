"""From plain values to stored results: the Experiment, one run, many runs."""

# What other rooms may take from it.
__all__ = [
    "begun",
    "build",
    "compute",
    "experiment",
    "feds",
    "keys",
    "listing",
    "lookup",
    "metrics",
    "older",
    "personal",
    "prune",
    "run",
    "settings",
    "store",
    "sweep",
    "tune",
    "workers",
]
