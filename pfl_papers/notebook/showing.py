"""How cells display text, tables and pictures; IPython is not imported before."""

from __future__ import annotations

from typing import Any

from pfl_core.util import checks


def ipython() -> Any:
    """Return IPython.display."""
    with checks.extra("notebooks", "showing text, tables and figures"):
        import IPython.display
    return IPython.display


def show(thing: Any) -> None:
    """Display a table or a picture as it is, and text that is not empty as Markdown."""
    if not isinstance(thing, str):
        ipython().display(thing)
    elif thing:
        ipython().display(ipython().Markdown(thing))
