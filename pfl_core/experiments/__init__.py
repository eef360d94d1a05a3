"""From plain values to stored results: the Experiment, one run, many runs, what is committed."""

# What other rooms may take from it.
__all__ = [
    "build",
    "committed",
    "compute",
    "experiment",
    "listing",
    "lookup",
    "metrics",
    "personal",
    "prune",
    "run",
    "settings",
    "store",
    "sweep",
    "workers",
]
