"""All methods beside each other, equally tuned."""

# What other rooms may take from it.
__all__ = ["comparison"]
