"""All five papers at a glance: what they print, and how much of it came out here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping

import pandas as pd
from matplotlib.figure import Figure

from pfl_core.analysis import plots, verdicts
from pfl_core.methods.base import METHODS
from pfl_papers.compare import judged
from pfl_papers.compare.judged import ONE_MODEL, PERSONAL, SIZES
from pfl_papers.evidence import committed
from pfl_papers.papers.base import PAPERS, paper

CLAIMS = (*verdicts.CLAIMS, verdicts.DEPENDS, "not run")
SHOWN = {"accuracy": "Accuracy (%)", "lead": "Lead of the paper's method (points)"}


def address(name: str) -> str:
    """Where a paper is to be read: arXiv's page of it, as its method's file cites it."""
    doc = inspect.getdoc(inspect.getmodule(METHODS[paper(name).own])) or ""
    number = re.search(r"arXiv:(\d{4}\.\d{5})", doc)
    if number is None:
        raise ValueError(f"the file of {paper(name).own} cites no arXiv number")
    return f"https://arxiv.org/abs/{number[1]}"


def ran() -> pd.DataFrame:
    """All published accuracies, and all printed leads, that two seeds or more were run of.

    Columns: number ("accuracy" or "lead"), paper, and those of `judged.accuracies` that say what
    came out.
    """
    found = {"accuracy": judged.accuracies(), "lead": judged.leads()}
    cells = pd.concat([of.assign(number=number) for number, of in found.items()])
    cells = cells[cells.n > 1].reset_index(drop=True)  # one seed has no interval
    first = ["number", "paper"]
    return cells[first + [c for c in cells if c not in (*first, "comparable", "why")]]


def drawn(cells: pd.DataFrame) -> Figure:
    """The picture of `ran`: published against reproduced, accuracies and leads."""
    numbers = list(dict.fromkeys(cells.number))
    fig, axes = plots.panels(len(numbers), size=(3.6, 3.6), sharey=False)
    for ax, number in zip(axes, numbers, strict=True):
        plots.against_published(cells[cells.number == number], ax, SHOWN[number])
    plots.share_legend(fig)
    return fig


def headline() -> str:
    """What comes out and what does not, in a sentence with its counts."""
    counts = judged.summary()
    large, small = (counts["leads"][PERSONAL, size] for size in SIZES[:2])
    parts = [
        f"{sum(large.values())} printed leads above 2 points over personal methods "
        f"{_listed(large)}",
        f"of {sum(small.values())} of at most 2 points {_listed(small)}",
        f"of {sum(counts['accuracies'].values())} published accuracies "
        f"{_listed(counts['accuracies'])}",
    ]
    cells = judged.accuracies()
    cut = int(cells.reason[cells.verdict == "outside"].str.contains("fewer").sum())
    less = f" ({cut} of those outside with fewer rounds or samples than the paper)" * bool(cut)
    return f"Of {'; '.join(parts)}{less}."


def said(cells: pd.DataFrame) -> str:
    """What comes out and what does not, with all counts.

    Parameters
    ----------
    cells : DataFrame
        As `ran` gives them.
    """
    counts = judged.summary()
    seeds = f"{cells.n.min():.0f} seeds or more" if len(cells) else ""
    text = f"{_leads(counts)} Of {sum(counts['accuracies'].values())} published accuracies "
    text += f"{_listed(counts['accuracies'])}; {counts['decided']} are decided. {_claims(counts)} "
    text += f"{_order()}The papers' own data, networks and clients; profile "
    text += f"{' and '.join(dict.fromkeys(cells.profile))}, {seeds}"
    text += "; medium has fewer rounds, and in part fewer samples" * (
        "medium" in set(cells.profile)
    )
    if lacking := _lacking(cells.dataset.unique()):
        text += f"; samples missing here: {lacking}"
    young = counts["prospective"]
    when = "All" if not any(young.values()) else "Most"
    text += f". {when} of these runs are older than the rules that judge them (retrospective)"
    text += f"; prospective: {_listed(young)}" * any(young.values())
    return f"{text}. Hollow: open."


def _leads(counts: Mapping) -> str:
    # "Printed leads above 2 points over personal rows: 3 ahead, 2 behind; ..."
    parts = []
    for kind, rows in ((PERSONAL, "personal methods"), (ONE_MODEL, "one model for all")):
        of = {size: counts["leads"][kind, size] for size in SIZES}
        words = {"above 2": "above 2 points", "at most 2": "of at most 2 points"}
        found = [
            f"{sum(of[size].values())} printed leads {what}: {_listed(of[size])}"
            for size, what in words.items()
            if of[size]
        ]
        if found:
            chance = f"by chance {counts['chance'][kind]:.1f} ahead and as many behind"
            parts.append(f"Over {rows}, {'; '.join(found)} ({chance}).")
    return " ".join(parts)


def _claims(counts: Mapping) -> str:
    return " ".join(
        f"{f'{kind} claims'.strip().capitalize()}: {_listed(of)}."
        for kind, of in counts["claims"].items()
    )


def _order() -> str:
    found = judged.orders()
    own = found[found.kind == PERSONAL]
    if own.empty:
        return ""
    return (
        f"Kendall's tau of the order of personal methods: {own.tau.median():.2f}, median over "
        f"{len(own)} columns; noise alone would leave {own.ceiling.median():.2f}. "
    )


def _listed(counts: Mapping[str, int]) -> str:
    many = {"holds": "hold", "tie": "ties", verdicts.DEPENDS: "depend on a reading"}
    said = [f"{n} {many.get(word, word) if n > 1 else word}" for word, n in counts.items() if n]
    return ", ".join(said) or "none"


def _lacking(names: Iterable[str]) -> str:
    # "CIFAR-10 2 %": what the copies that committed runs used lack of the published sets.
    shares = {name: committed.lacks(name) for name in sorted(names)}
    return ", ".join(f"{plots.in_words(n)} {100 * v:.0f} %" for n, v in shares.items() if v)


def counts() -> pd.DataFrame:
    """A line a paper: its published accuracies and leads, its claims, and what became of them.

    Comparable are those that profile paper computes in the paper's setting. Only runs with the
    paper's own data, networks and clients count (profiles medium and paper); a number that several
    tables print counts once.
    """
    lines, claimed = [], judged.claims()
    parts = {"": judged.accuracies(), "leads: ": judged.leads()}
    for name in PAPERS:
        cells = judged.of_paper(name, "accuracy")
        line = {"paper": plots.LABELS[name], "accuracies published": len(cells)}
        line |= {"comparable": int(cells.comparable.sum()), "run": 0}
        for head, every in parts.items():
            words = every[every.paper == name].verdict
            known = verdicts.LEADS if head else verdicts.ACCURACIES
            line |= {f"{head}{w}": int((words == w).sum()) for w in (*known, verdicts.DEPENDS)}
            line["run"] = line["run"] if head else len(words)
        of_claims = claimed[claimed.paper == name].verdict
        line |= {f"claims: {word}": int((of_claims == word).sum()) for word in CLAIMS}
        lines.append(line)
    return pd.DataFrame(lines)


def best_claims(name: str) -> pd.DataFrame:
    """A paper's claims with their verdicts, as `judged.claims` has them."""
    every = judged.claims()
    return every[every.paper == name].reset_index(drop=True)


def every(name: str, number: str = "accuracy") -> pd.DataFrame:
    """What stands beside a paper's published numbers, each an "accuracy" or a "lead"."""
    return judged.of_paper(name, number)
