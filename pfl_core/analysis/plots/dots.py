"""Figures of dots: accuracies beside published ones, clients, embeddings, agreement."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ticker import MaxNLocator

from pfl_core.analysis.plots.names import in_words, label
from pfl_core.analysis.plots.style import COLOURS, Look, beside, finish, line_style, looks, names_of
from pfl_core.analysis.select import tuples


def reported(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Draw what the paper reports (a grey ring) and what came out here (a dot), joined by a line.

    `frame` has the columns `row`, `reported` and `reproduced` (%), and may have `low` and `high`,
    the interval of ours. Each `row` has a line of its own, the first one at the top, and its
    numbers are averaged; NaN leaves a dot out.
    """
    frame = frame.assign(**{end: frame.get(end, np.nan) for end in ("low", "high")})
    numbers = ["reported", "reproduced", "low", "high"]
    shown = frame.assign(row=frame.row.astype(str)).groupby("row", sort=False)[numbers].mean()
    for i, (name, look) in enumerate(looks(list(shown.index)).items()):
        own = shown.loc[name]
        ax.plot([own.reported, own.reproduced], [i, i], color="0.75", lw=1, zorder=1)
        if not np.isnan(own.low):
            ax.hlines(i, max(own.low, 0), min(own.high, 100), color=look.colour, lw=1)
        ax.scatter(own.reproduced, i, s=22, color=look.colour, marker=look.mark, lw=0, zorder=2)
        ax.scatter(own.reported, i, s=34, fc="none", ec="0.35", label=None if i else "Published")
    ax.scatter([], [], s=22, color="k", lw=0, label="Here")
    ax.grid(axis="x", lw=0.4, color="0.9")
    ax.set_axisbelow(True)
    return finish(_name_rows(ax, list(shown.index)), "Test accuracy (%)", "")


def ranges(frame: pd.DataFrame, ax: Axes, clients: pd.DataFrame | None = None) -> Axes:
    """Draw from the worst to the best client, a line for each row of `frame`, the first at the top.

    Parameters
    ----------
    frame : DataFrame
        Accuracies in percent, indexed by the names of rows: a line from acc_min to acc_max, a dot
        at acc_pct, a triangle at acc_worst10; what has no column is left out.
    clients : DataFrame, optional
        `row` and `acc_pct` of every client, drawn as small ticks.
    """
    for i, (name, look) in enumerate(looks(list(frame.index)).items()):
        numbers, colour = frame.loc[name], look.colour
        if {"acc_min", "acc_max"} <= set(frame):
            ax.plot([numbers.acc_min, numbers.acc_max], [i, i], color=colour, lw=1, zorder=1)
        if clients is not None and len(own := clients[clients.row == name]):
            at = [i] * len(own)
            ax.scatter(own.acc_pct, at, s=30, marker="|", color=colour, lw=0.8, alpha=0.7)
        for metric, shape, text in (("acc_pct", "o", "Mean"), ("acc_worst10", "v", "Worst tenth")):
            if metric in frame:
                mark: dict[str, Any] = dict(s=24, marker=shape)
                ax.scatter(numbers[metric], i, color=colour, ec="k", lw=0.5, zorder=2, **mark)
                ax.scatter([], [], color="k", lw=0, label="_" if i else text, **mark)
    return finish(_name_rows(ax, list(frame.index)), "Test accuracy of a client (%)", "")


def leads(a: np.ndarray, b: np.ndarray, ax: Axes, names: tuple[str, str] = ("a", "b")) -> Axes:
    """Draw by how many points b (K,) is ahead of a (K,) on each client, sorted.

    A bar has the colour of the one that is ahead.
    """
    lead = np.sort(b - a)
    first, second = (look.colour for look in looks(names).values())
    ax.bar(range(len(lead)), lead, color=[second if points > 0 else first for points in lead])
    ax.axhline(0, color="0.4", lw=0.8)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return finish(ax, "Clients, sorted", f"{label(names[1])} ahead by (points)", legend=False)


def points(
    frame: pd.DataFrame,
    ax: Axes,
    x: str = "x",
    y: str = "y",
    hue: str | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    line: bool = False,
) -> Axes:
    """Draw the column `y` against the column `x`, a dot for each line of `frame` without NaN.

    `hue` is a column that colours the dots. `line` adds a least-squares line for each colour with
    three different x or more. Columns `low` and `high` are drawn as bars through the dots.
    """
    frame = frame.dropna(subset=[x, y])
    found: dict = looks(names_of(frame, hue)) if hue else {None: Look(COLOURS["blue"], "", "o")}
    for name, look in found.items():
        part = frame[frame[hue] == name] if hue else frame
        if part.empty:
            continue
        dot: dict[str, Any] = dict(s=18, color=look.colour, marker=look.mark, alpha=0.7, lw=0)
        dot["clip_on"] = False
        ax.scatter(part[x], part[y], label=in_words(name) if hue else None, **dot)
        if {"low", "high"} <= set(part):
            ax.vlines(part[x], part.low, part.high, color=look.colour, lw=1, alpha=0.8)
        if line and part[x].nunique() > 2:  # two points would always lie on it
            ends = np.array([part[x].min(), part[x].max()], dtype=float)
            fit = np.polyval(np.polyfit(part[x], part[y], 1), ends)
            ax.plot(ends, fit, color=look.colour, lw=1.2, ls=line_style(look.dash))
    if hue and frame[x].nunique() < 2:  # no scale of an axis can be read off one place
        ax.set_xticks(at := frame[x].unique(), [f"{place:.3g}" for place in at])
        ax.margins(x=0.5)
    return finish(ax, xlabel or x, ylabel or y)


SEEN = (0.1, 0.9)  # quantiles of an embedding between which its scale is chosen
BEYOND = 1.0  # how far beyond them the axes reach, as a share of what lies between


def embedding(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Draw points `x`, `y` of an embedding, coloured by `group`, with four shapes in turn.

    Far outliers would press all others into one spot: they are drawn at the edge, in a ring, and
    counted below the axes. Up to 20 groups are named beside the axes. A column `said` is written
    below the panel.
    """
    names = list(dict.fromkeys(frame.group))
    few = len(names) <= 10
    shades = sns.husl_palette(len(names), l=0.55) if not few else sns.color_palette("colorblind")
    centre, reach = _seen(frame[["x", "y"]].to_numpy(dtype=float))
    at = frame[["x", "y"]].clip(centre - reach, centre + reach, axis=1)
    outside = (at != frame[["x", "y"]]).any(axis=1)
    for name, colour, shape in zip(names, shades, itertools.cycle("os^D"), strict=False):
        part = at[frame.group == name]
        dot: dict[str, Any] = dict(s=20, color=colour, marker=shape, edgecolor="0.2", lw=0.4)
        ax.scatter(part.x, part.y, label=str(name), clip_on=False, **dot)
    if outside.any():
        ring = at[outside]
        ax.scatter(ring.x, ring.y, s=90, fc="none", ec="0.2", lw=0.7, clip_on=False)
    ax.set(xticks=[], yticks=[])
    for limits, middle in zip((ax.set_xlim, ax.set_ylim), centre, strict=True):
        limits(middle - 1.03 * reach, middle + 1.03 * reach)
    ax.set_aspect("equal")
    finish(ax, "t-SNE 1", "t-SNE 2", legend=False)
    below = [f"{n} outlier{'s' * (n > 1)} in a ring at the edge" for n in [int(outside.sum())] if n]
    below += [textwrap.fill(said, 30) for said in dict.fromkeys(frame.get("said", []))]
    ax.set_xlabel("\n".join(["t-SNE 1", *below]))
    if len(names) <= 20:
        handles, texts = ax.get_legend_handles_labels()
        beside(ax, dict(zip(texts, handles, strict=True)), "Group")
    return ax


def _seen(at: np.ndarray) -> tuple[np.ndarray, float]:
    """Centre (2,) and half side of the square in which points (n, 2) are drawn."""
    low, high = np.quantile(at, SEEN, axis=0)
    span = float((high - low).max()) or 1.0
    inside = ((at >= low - BEYOND * span) & (at <= high + BEYOND * span)).all(1)
    kept = at[inside]
    centre = (kept.min(0) + kept.max(0)) / 2
    return centre, float((kept.max(0) - kept.min(0)).max()) / 2 or 1.0


# -- leads beside printed ones ---------------------------------------------------------------------

WORDS = {  # of a lead: a colour and a mark; those that decide nothing are hollow
    "ahead": Look(COLOURS["blue"], "", ">"),
    "behind": Look(COLOURS["crimson"], "", "<"),
    "no lead": Look(COLOURS["ink"], "", "s"),
    "too small to tell": Look(COLOURS["orange"], "", "D"),
    "open": Look(COLOURS["green"], "", "o"),
    "depends on reading": Look("0.5", "", "X"),
}
HOLLOW = ("open", "depends on reading")


def forest(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Draw printed leads (a tick) beside ours (a mark with its interval), a line each, in groups.

    Colour and mark say the verdict. Where our runs had less than the paper's budget they are pale.

    Parameters
    ----------
    frame : DataFrame
        Columns group (its name stands above its lines; none for ""), row, reported, reproduced,
        low, high (points; NaN for one seed), verdict (of `WORDS`) and full (whether at full
        budget); a line a lead, those of a group together, the first at the top.
    """
    at, names = 0.0, {}
    for group, leads in frame.groupby("group", sort=False):
        if group:
            said: dict[str, Any] = dict(weight="bold", fontsize=7, va="center", zorder=1)
            said |= dict(transform=ax.get_yaxis_transform(), bbox=dict(fc="w", ec="none", pad=0.6))
            ax.text(0.01, at, in_words(group), **said)
            at += 1
        for lead in tuples(leads):
            _lead(lead, at, ax)
            names[at] = in_words(lead.row)
            at += 1
        at += 0.25
    ax.axvline(0, color="0.3", lw=0.8, zorder=0)
    ax.grid(axis="x", lw=0.4, color="0.9")
    ax.set_axisbelow(True)
    ax.set_yticks(list(names), list(names.values()))
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(at - 0.6, -0.7)
    words = sorted(names_of(frame, "verdict"), key=list(WORDS).index)
    entries = {"printed": dict(_PRINTED)} | {word: _mark(word) for word in words}
    if not frame.full.all():
        entries["pale: fewer rounds or samples"] = dict(s=30, marker="s", color=_pale("k"), lw=0)
    for text, how in entries.items():
        ax.scatter([], [], label=text, **how)
    return finish(ax, "Lead (points)", "", legend=False)


_PRINTED: dict[str, Any] = dict(s=42, marker="|", color="k", lw=1.5)
STRENGTH = 0.4  # of a colour where the budget is cut


def _lead(lead: Any, at: float, ax: Axes) -> None:
    # A line of `forest`.
    colour = WORDS[lead.verdict].colour
    ax.plot([lead.reported, lead.reproduced], [at, at], color="0.75", lw=0.7, ls=":", zorder=1)
    ax.hlines(at, lead.low, lead.high, color=colour if lead.full else _pale(colour), lw=1.6)
    ax.scatter(lead.reported, at, zorder=3, **_PRINTED)
    ax.scatter(lead.reproduced, at, zorder=4, **_mark(lead.verdict, lead.full))


def _mark(word: str, full: bool = True) -> dict[str, Any]:
    colour, _, mark = WORDS[word]
    fill = "white" if word in HOLLOW else colour if full else _pale(colour)
    return dict(s=30, marker=mark, facecolors=[fill], edgecolors=[colour], lw=1)


def _pale(colour: str) -> tuple[float, ...]:
    return tuple(1 - STRENGTH * (1 - part) for part in to_rgb(colour))


def _name_rows(ax: Axes, names: Sequence[str]) -> Axes:
    """Name the rows of a figure that has one a line, the first at the top."""
    ax.set_yticks(range(len(names)), [in_words(name) for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    return ax
