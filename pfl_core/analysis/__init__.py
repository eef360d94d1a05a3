"""From data frames to numbers, verdicts and pictures; sees no tensors."""

# What other rooms may take from it.
__all__ = ["noise", "plots", "select", "side_by_side", "stats", "tables", "verdicts"]
