"""What was measured: results/ in and out, and what a claim asks of it."""

# What other rooms may take from it.
__all__ = ["asks", "committed", "contrasts", "copies", "diverged", "form", "judges", "tables"]
