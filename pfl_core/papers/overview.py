"""All five papers at a glance: what they print, and how much of it came out here."""

from __future__ import annotations

import functools
import inspect
import re

import pandas as pd
from matplotlib.figure import Figure

from pfl_core.analysis import plots
from pfl_core.experiments import committed
from pfl_core.experiments.metrics import ROW_COLUMNS
from pfl_core.methods.base import METHODS
from pfl_core.papers import report
from pfl_core.papers.base import FULL, PAPERS, paper

CELLS = ("agrees", "close", "differs", "undecided")
CLAIMS = ("holds", "contradicted", "undecided", "not run")


def address(name: str) -> str:
    """Where a paper is to be read: arXiv's page of it, as its method's file cites it."""
    doc = inspect.getdoc(inspect.getmodule(METHODS[paper(name).own])) or ""
    number = re.search(r"arXiv:(\d{4}\.\d{5})", doc)
    if number is None:
        raise ValueError(f"the file of {paper(name).own} cites no arXiv number")
    return f"https://arxiv.org/abs/{number[1]}"


def every_cell(name: str) -> pd.DataFrame:
    """`report.every_cell` of a paper, made once for what results/ holds at present."""
    return _every_cell(name, committed.results()).copy()


@functools.lru_cache(maxsize=2 * len(PAPERS))
def _every_cell(name: str, known: committed.Results) -> pd.DataFrame:
    return report.every_cell(name)


def ran() -> pd.DataFrame:
    """All published accuracies that two seeds or more were run of in their paper's setting.

    Columns: paper, and those of `report.every_cell` that say what came out.
    """
    every = [every_cell(name).assign(paper=name) for name in PAPERS]
    cells = pd.concat(every, ignore_index=True)
    cells = cells[cells.n > 1]  # one seed has no interval
    return cells[["paper", *[c for c in cells if c not in ("paper", "comparable", "why")]]]


def drawn(cells: pd.DataFrame) -> Figure:
    """The picture of `ran`: published against reproduced accuracies."""
    fig, (ax,) = plots.panels(1, size=(5, 4.2))
    plots.agreement(cells, ax)
    return fig


def said(cells: pd.DataFrame) -> str:
    """What the picture shows, in two sentences: how many cells agree, and how well orders do."""
    orders = [report.order_agreement(of).tau for _, of in cells.groupby("paper", sort=False)]
    taus = pd.concat(orders)
    counts = {word: int((cells.verdict == word).sum()) for word in CELLS}
    verb = {"agrees": "agree", "differs": "differ"}
    found = [f"{n} {word if n == 1 else verb.get(word, word)}" for word, n in counts.items() if n]
    runs = f"profile {' and '.join(cells.profile.unique())}, {cells.n.min():.0f} seeds or more"
    text = f"{len(cells)} published accuracies beside ours, with the paper's data, network and "
    text += f"clients ({runs}): {', '.join(found)}."
    if len(taus):
        over = f", median over {len(taus)} columns" if len(taus) > 1 else ", in one column"
        text += f" Kendall's tau of the orders of methods: {taus.median():.2f}{over}."
    return text


def counts() -> pd.DataFrame:
    """A line a paper: its published accuracies and what became of them, and of its claims.

    Comparable are those that profile paper computes in the paper's setting. Only runs with the
    paper's own data, networks and clients count (profiles medium and paper).
    """
    lines = []
    for name in PAPERS:
        cells, claimed = every_cell(name), best_claims(name)
        ran = cells[cells.reproduced.notna()].verdict.value_counts()
        line = {"paper": plots.LABELS[name], "accuracies published": len(cells)}
        line |= {"comparable": int(cells.comparable.sum()), "run": int(ran.sum())}
        line |= {word: int(ran.get(word, 0)) for word in CELLS}
        of_claims = claimed.verdict.value_counts()
        line |= {f"claims: {word}": int(of_claims.get(word, 0)) for word in CLAIMS}
        lines.append(line)
    return pd.DataFrame(lines)


def best_claims(name: str) -> pd.DataFrame:
    """A paper's claims, each from the fullest profile at which it was judged; quick counts not."""
    none = report.claims(name, pd.DataFrame(columns=ROW_COLUMNS))
    out = [none.assign(data="")]
    parts = [p for p in committed.parts(name).values() if p.profile in FULL]
    for part in sorted(parts, key=lambda p: FULL.index(p.profile)):
        judged = report.claims(name, part.rows())
        out.append(judged[judged.verdict != "not run"].assign(data=part.data))
    both = pd.concat(out).rename_axis("place").reset_index()
    last = both.drop_duplicates("place", keep="last").sort_values("place")
    return last.drop(columns="place").reset_index(drop=True)
