"""What the notebook what_holds draws: ranks under rules, their agreement, and gains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pfl_core.analysis import plots
from pfl_core.analysis.plots import label
from pfl_papers.compare.recount import AVERAGED, REPORTED, RULES

WORDS = {  # of rules, in figures and tables
    REPORTED: REPORTED,
    "last": "last round",
    "last10": "last ten",
    "best_val": "best val.",
    "best_test": "best test",
    "before": "before",
    "after": "after",
    "client": "clients",
    "pooled": "pooled",
    AVERAGED: "BN averaged",
    "own": "each at its best",
}
ENDS = ("best_test", "after", "pooled")  # the last rules of a choice
MOST = 5  # ranks: a change by more has the strongest colour


def fit(fig: Figure, axes: Sequence[Axes], methods: Sequence[int]) -> list[int]:
    """Make each row of panels as high as its longest list of methods; returns that, by panel."""
    places: list[Any] = [ax.get_subplotspec() for ax in axes]
    most: dict[int, int] = {}
    for place, n in zip(places, methods, strict=True):
        most[place.rowspan.start] = max(n, most.get(place.rowspan.start, 0))
    inches = [0.15 * n + 1.2 for n in most.values()]
    places[0].get_gridspec().set_height_ratios(inches)
    fig.set_figheight(sum(inches))
    return [most[place.rowspan.start] for place in places]


def ranks(order: pd.DataFrame, same: set[str], ax: Axes, lines: int) -> Axes:
    """Ranks as numbers, a line a method and a column a rule; colours say what a rule changes.

    Blue: better than as the paper counts the same methods; red: worse; grey: no such numbers.

    Parameters
    ----------
    order : DataFrame
        As `recount.ranks` gives it; a rule that is missing is grey.
    same : set of str
        The rules that are how the paper counts, which get a star.
    ax : Axes
    lines : int
        How many there is room for, so that panels with fewer methods have the same cells.
    """
    rules = list(RULES) if AVERAGED in order else [rule for rule in RULES if rule != AVERAGED]
    shown = order.reindex(columns=rules)
    # Against the paper's way among the methods that a rule has, or one that lacks moves the others.
    paper = {rule: order[REPORTED][shown[rule].notna()].rank() for rule in rules}
    change = pd.DataFrame(paper, shown.index).sub(shown).round().clip(-MOST, MOST)
    ends = 1.7 * MOST  # light enough for black numbers
    ax.imshow(change, cmap="RdBu", vmin=-ends, vmax=ends, aspect="auto", interpolation="nearest")
    for (i, j), rank in np.ndenumerate(shown.to_numpy()):
        if np.isnan(rank):
            ax.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, fc="0.85", lw=0))
        else:
            ax.text(j, i, f"{rank:g}", ha="center", va="center", fontsize=6.5)
    for rule in ENDS:
        if rule != rules[-1]:
            ax.axvline(rules.index(rule) + 0.5, color="w", lw=4)
    names = [WORDS[rule] + "*" * (rule in same) for rule in rules]
    ax.set_xticks(range(len(rules)), names, rotation=90)
    ax.set_yticks(range(len(shown)), [label(name) for name in shown.index])
    ax.xaxis.tick_top()
    ax.set_ylim(lines - 0.5, -0.5)
    ax.tick_params(length=0, labelsize=6.5)
    sns.despine(ax=ax, left=True, bottom=True)
    return ax


def taus(tau: pd.DataFrame, count: pd.DataFrame, ax: Axes) -> Axes:
    """Kendall's tau between rules as a heat map, below each number over how many columns."""
    names = [WORDS[rule] for rule in tau.index]
    pairs = zip(tau.to_numpy().ravel(), count.to_numpy().ravel(), strict=True)
    text = np.array([f"{t:.2f}\n{n}" for t, n in pairs]).reshape(tau.shape)
    hidden = np.triu(np.ones(tau.shape, bool)) | tau.isna().to_numpy()
    shown = tau.set_axis(names, axis=0).set_axis(names, axis=1)
    options: dict[str, Any] = dict(vmin=0, vmax=1, cmap="viridis", square=True)
    options["annot_kws"] = {"fontsize": 6.5}
    sns.heatmap(shown, mask=hidden, annot=text, fmt="", ax=ax, cbar=False, **options)
    ax.set_xlim(0, len(names) - 1)
    ax.set_ylim(len(names), 1)
    ax.tick_params(length=0, labelsize=7)
    return ax


def gains(every: pd.DataFrame, ax: Axes) -> Axes:
    """Points that the best test round is above other rounds: a line a column, a mark a rule.

    Dots are means over methods, with 95 % intervals over seeds; ticks the method with most.

    Parameters
    ----------
    every : DataFrame
        As `recount.gains` gives them, with the names of columns in `column`.
    ax : Axes
    """
    names = list(dict.fromkeys(every.column))
    looks = dict(best_val=("blue", "o"), last=("orange", "s"), last10=("crimson", "D"))
    for i, (rule, (colour, mark)) in enumerate(looks.items()):
        own, shade = every[every.against == rule], plots.COLOURS[colour]
        at = np.array([names.index(name) for name in own.column]) + (i - 1) * 0.22
        mean, low, high = (
            np.array([getattr(g, e) for g in own.gain]) for e in ("estimate", "low", "high")
        )
        reach = np.nan_to_num([mean - low, high - mean]) if len(own) else None
        ax.errorbar(mean, at, xerr=reach, fmt="none", ecolor=shade, elinewidth=0.8)
        ax.scatter(own.largest, at, s=22, marker="|", color=shade, lw=0.9)
        ax.scatter(mean, at, s=13, marker=mark, color=shade, label=WORDS[rule], lw=0)
    ax.axvline(0, color="0.6", lw=0.7, zorder=0)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    return plots.finish(ax, "Points below the best test round", "")
