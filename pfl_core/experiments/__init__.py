"""From plain values to stored results: the Experiment, one run, many runs, and what of them is committed."""

# What other rooms may take from it.
__all__ = ["build", "compute", "experiment", "personal", "prune", "run", "store"]
