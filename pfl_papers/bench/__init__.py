"""All methods beside each other, equally tuned: one comparison, and a benchmark of settings."""

# What other rooms may take from it.
__all__ = ["comparison", "found", "page", "record", "rows", "settings", "shown"]
