"""From plain values to stored results: the Experiment, one run, many runs, and what of them is committed."""

# What other rooms may take from it.
__all__ = [
    "build",
    "committed",
    "compute",
    "experiment",
    "metrics",
    "personal",
    "prune",
    "run",
    "store",
    "sweep",
]
