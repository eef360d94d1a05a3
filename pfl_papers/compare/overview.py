"""All five papers at a glance: what they print, and how much of it came out here."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable

import pandas as pd
from matplotlib.figure import Figure

from pfl_core.analysis import plots
from pfl_core.experiments.metrics import ROW_COLUMNS
from pfl_core.methods.base import METHODS
from pfl_papers.compare import fullest, report
from pfl_papers.evidence import committed
from pfl_papers.evidence.tables import Results
from pfl_papers.papers.base import PAPERS, paper

CLAIMS = ("holds", "contradicted", "undecided", "not run")


def address(name: str) -> str:
    """Where a paper is to be read: arXiv's page of it, as its method's file cites it."""
    doc = inspect.getdoc(inspect.getmodule(METHODS[paper(name).own])) or ""
    number = re.search(r"arXiv:(\d{4}\.\d{5})", doc)
    if number is None:
        raise ValueError(f"the file of {paper(name).own} cites no arXiv number")
    return f"https://arxiv.org/abs/{number[1]}"


def every(name: str, number: str = "accuracy") -> pd.DataFrame:
    """What stands beside a paper's published numbers, made once for what results/ holds now.

    number: "accuracy" (`report.every_cell`) or "advantage" (`report.every_advantage`).
    """
    return _every(name, number, committed.results()).copy()


@functools.lru_cache(maxsize=4 * len(PAPERS))
def _every(name: str, number: str, known: Results) -> pd.DataFrame:
    return NUMBERS[number](name)


NUMBERS = {"accuracy": report.every_cell, "advantage": report.every_advantage}
SHOWN = {"accuracy": "Accuracy (%)", "advantage": "Paper's method ahead by (points)"}


def ran() -> pd.DataFrame:
    """All published accuracies that two seeds or more were run of in their paper's setting.

    And by how much each paper's own method is ahead of the other rows there.

    Columns: number ("accuracy" or "advantage"), paper, and those of `report.every_cell` that say
    what came out.
    """
    found = [every(p, number).assign(number=number, paper=p) for number in NUMBERS for p in PAPERS]
    cells = pd.concat([of for of in found if len(of)], ignore_index=True)
    cells = cells[cells.n > 1]  # one seed has no interval
    first = ["number", "paper"]
    return cells[first + [c for c in cells if c not in (*first, "comparable", "why")]]


def drawn(cells: pd.DataFrame) -> Figure:
    """The picture of `ran`: published against reproduced, accuracies and advantages."""
    numbers = list(dict.fromkeys(cells.number))
    fig, axes = plots.panels(len(numbers), size=(3.6, 3.6), sharey=False)
    for ax, number in zip(axes, numbers, strict=True):
        plots.against_published(cells[cells.number == number], ax, SHOWN[number])
    plots.share_legend(fig)
    return fig


def said(cells: pd.DataFrame) -> str:
    """What the picture shows: how many accuracies and advantages agree, and how well orders do."""
    parts = dict(iter(cells.groupby("number", sort=False)))
    acc, ahead = parts["accuracy"], parts.get("advantage", cells.iloc[:0])
    trained = (acc.metric == "train_acc_pct").sum()
    how = [f"profile {' and '.join(acc.profile.unique())}, {acc.n.min():.0f} seeds or more"]
    how += ["medium has fewer rounds, and in part fewer samples"] * ("medium" in set(acc.profile))
    how += [f"{trained} on training data as printed"] * bool(trained)
    if lacking := _lacking(acc.dataset.unique()):
        how.append(f"samples missing here: {lacking}")
    text = f"{len(acc)} published accuracies beside ours, with the paper's data, network and "
    text += f"clients ({'; '.join(how)}): {report.counted(acc.verdict)}."
    if len(ahead):
        many = f"{len(ahead)} difference{'s' * (len(ahead) > 1)}"
        text += f" Of {many} between a paper's own method and another row, "
        text += f"{report.counted(ahead.verdict)}."
    taus = pd.concat([report.order_agreement(of).tau for _, of in acc.groupby("paper", sort=False)])
    if len(taus):
        over = f", median over {len(taus)} columns" if len(taus) > 1 else ", in one column"
        text += f" Kendall's tau of methods' orders: {taus.median():.2f}{over}."
    hollow = " Hollow: undecided."
    return text + hollow * bool((cells.verdict == "undecided").any())


def _lacking(names: Iterable[str]) -> str:
    # "CIFAR-10 2 %": what the copies that committed runs used lack of the published sets.
    shares = {name: committed.lacks(name) for name in sorted(names)}
    return ", ".join(f"{plots.in_words(n)} {100 * v:.0f} %" for n, v in shares.items() if v)


def counts() -> pd.DataFrame:
    """A line a paper: its published accuracies and what became of them, and of its claims.

    Comparable are those that profile paper computes in the paper's setting. Only runs with the
    paper's own data, networks and clients count (profiles medium and paper).
    """
    lines = []
    for name in PAPERS:
        cells, claimed = every(name), best_claims(name)
        ran = cells[cells.reproduced.notna()].verdict.value_counts()
        line = {"paper": plots.LABELS[name], "accuracies published": len(cells)}
        line |= {"comparable": int(cells.comparable.sum()), "run": int(ran.sum())}
        line |= {word: int(ran.get(word, 0)) for word in report.CELLS}
        of_claims = claimed.verdict.value_counts()
        line |= {f"claims: {word}": int(of_claims.get(word, 0)) for word in CLAIMS}
        lines.append(line)
    return pd.DataFrame(lines)


def best_claims(name: str) -> pd.DataFrame:
    """A paper's claims, each from the fullest profile at which it was judged; quick counts not.

    A verdict that rests on too few runs gives way to any other.
    """
    none = report.claims(name, pd.DataFrame(columns=ROW_COLUMNS))
    out = [none.assign(data="")]
    for part in fullest.parts(name):
        judged = report.claims(name, part.rows())
        out.append(judged[judged.verdict != "not run"].assign(data=part.data))
    placed = [judged.rename_axis("place").reset_index() for judged in out]
    found = fullest.fullest(placed, ["place"], _worth_of_claims).sort_values("place")
    return found.drop(columns="place").reset_index(drop=True)


def _worth_of_claims(judged: pd.DataFrame) -> pd.Series:
    return (judged.verdict != "not run") * (1 + ~judged.reason.isin(["one seed", "rows missing"]))
