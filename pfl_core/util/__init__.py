"""What every room may use: checks, seeded draws, progress, digests of foreign code, paths."""

# What other rooms may take from it.
__all__ = [
    "cards",
    "checks",
    "commands",
    "draws",
    "driver",
    "fields",
    "gpu",
    "identity",
    "paths",
    "percent",
    "progress",
    "provenance",
    "say",
    "sums",
    "version",
]
