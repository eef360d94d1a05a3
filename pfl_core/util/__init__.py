"""What every room may use: names checked, files written whole, progress, foreign code as a digest, where things lie."""

# What other rooms may take from it.
__all__ = [
    "cards",
    "checks",
    "draws",
    "identity",
    "paths",
    "percent",
    "progress",
    "provenance",
    "sums",
    "version",
]
