"""What stands under a heading of the paper that was not run on its data: a card, and a fold.

The card says that it was not run, and how to. What a small run on embedded data draws is folded
below it: it shows that everything works, and nothing of the paper.
"""

from __future__ import annotations

import base64
import html
import re
from typing import Any, NamedTuple

import pandas as pd

from pfl_core.analysis import plots
from pfl_papers.compare import card
from pfl_papers.compare.readable import Table
from pfl_papers.papers import base as papers
from pfl_papers.papers.base import Paper

SUMMARY = "on digits (does it run)"


class Shown(NamedTuple):
    """What a notebook displays, as HTML and as text."""

    page: str
    text: str

    def _repr_html_(self) -> str:
        return self.page

    def __repr__(self) -> str:
        return self.text


def not_run(paper: Paper, artefact: str) -> Shown:
    """The card of an artefact without evidence on the paper's own data."""
    profile = "medium" if paper.artefacts[artefact].medium else "paper"
    title = papers.title(artefact)
    train, plan = (
        card.command(paper.key, [artefact], profile, word) for word in ("compute", "plan")
    )
    data = plots.in_words(", ".join(paper.artefacts[artefact].data))
    lines = {f"{title}: not run yet": f"on the paper's own data ({data})."}
    lines |= {"Train it": train, "Hours": plan}
    first, *rest = lines.items()
    text = "\n".join([" ".join(first), *(f"{says}: {what}" for says, what in rest)])
    commands = "".join(f"<br>{says}: <code>{what}</code>" for says, what in rest)
    text += ", on a GPU with --device cuda"
    commands += ", on a GPU with <code>--device cuda</code>"
    box = "border-left: 4px solid #888; padding: 0 1em"
    page = f'<div style="{box}"><p><b>{first[0]}</b> {html.escape(first[1])}{commands}</p></div>'
    return Shown(page, text)


def fold(artefact: str, thing: Any) -> Shown:
    """A figure (`IPython.display.Image`), a table or Markdown text, folded under its artefact."""
    if isinstance(thing, str):
        what, text, inside = "in words", thing, _paragraphs(thing)
    elif isinstance(thing, pd.DataFrame | Table):
        shown: Any = thing
        what, text, inside = "the numbers", repr(thing), str(shown._repr_html_())
    else:
        coded = base64.b64encode(thing.data).decode()
        what, text, inside = (
            "the picture",
            "",
            f'<img style="max-width: 100%" alt="{html.escape(getattr(thing, "alt", None) or "")}" '
            f'src="data:image/png;base64,{coded}">',
        )
    summary = f"{papers.title(artefact)}, {SUMMARY}: {what}"
    page = f"<details><summary>{summary}</summary>\n{inside}\n</details>"
    return Shown(page, f"{summary}\n{text}".strip())


def _paragraphs(markdown: str) -> str:
    # Of sentences whose only mark is bold.
    safe = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(markdown))
    return "\n".join(f"<p>{part}</p>" for part in safe.split("\n\n"))
