"""How our objects look at the prompt (text), in a notebook (HTML) and in Markdown."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

FEW = 30  # rows and columns of a table of counts that still is one


class Listing(dict):
    """{name: one line about it}, shown a line each."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:{width}}  {line}" for name, line in self.items())

    def _repr_html_(self) -> str:
        return card("", self)


def span(numbers: Sequence[int]) -> str:
    """Least and most of some counts: "3 to 12", or one number where they are equal."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def shape(of: Sequence[int]) -> str:
    """The shape of a sample: "1 x 28 x 28"."""
    return " x ".join(map(str, of)) or "1"


def markdown(frame: pd.DataFrame) -> str:
    """A frame as a Markdown table, blank where it is NaN; a plain 0..n-1 index is left out."""
    body = frame.reset_index() if not isinstance(frame.index, pd.RangeIndex) else frame
    cells = body.astype(object).where(body.notna(), "").to_numpy()
    text = [[str(v).replace("|", "\\|") for v in line] for line in (body.columns, *cells)]
    lines = [text[0], ["---"] * body.shape[1], *text[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shaded(counts: np.ndarray, title: str) -> str:
    """HTML of counts (R, C) as a table, the larger the darker; "" for more than FEW of either.

    It is readable on light and on dark pages.
    """
    if max(counts.shape) > FEW:
        return ""

    def cell(n: int) -> str:
        return f'<td style="background:rgba(0,114,178,{0.7 * n / top:.2f})">{n or ""}</td>'

    top = max(1, counts.max())
    head = "".join(f"<th>{c}</th>" for c in range(counts.shape[1]))
    lines = [
        f"<tr><th>{r}</th>{''.join(map(cell, line))}</tr>" for r, line in enumerate(counts.tolist())
    ]
    return f"<p>{title}</p><table><tr><th></th>{head}</tr>{''.join(lines)}</table>"


def card(title: str, facts: dict[str, Any], more: str = "") -> str:
    """HTML of a title, a table of facts, and `more` HTML below."""
    with pd.option_context("display.max_colwidth", None):
        table = (
            pd.Series(facts, dtype=object)
            .map(str)
            .to_frame()
            .to_html(header=False, border=0)
            .replace("<td>", '<td style="text-align:left">')
        )
    return (f"<b>{html.escape(title)}</b>" if title else "") + table + more
