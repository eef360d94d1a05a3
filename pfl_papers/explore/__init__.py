"""Finished runs and live ones to look at in a notebook: views as functions, sliders over them."""

# What other rooms may take from it.
__all__ = ["background", "training", "views", "widgets"]
