"""How our objects look at the prompt (text) and in a notebook (HTML)."""

from __future__ import annotations

import html
from typing import Any

import pandas as pd


class Listing(dict):
    """{name: one line about it}, shown a line each."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:{width}}  {line}" for name, line in self.items())

    def _repr_html_(self) -> str:
        return card("", self)


def card(title: str, facts: dict[str, Any], more: str = "") -> str:
    """HTML of a title, a table of facts, and `more` HTML below."""
    with pd.option_context("display.max_colwidth", None):
        table = (
            pd.Series(facts, dtype=object)
            .map(str)
            .to_frame()
            .to_html(header=False, border=0, justify="left")
        )
    return (f"<b>{html.escape(title)}</b>" if title else "") + table + more
