"""Figures: one function for each kind, which draws a data frame on the axes and returns them.

Frames are rows in the long form, or what `analysis.stats` made of them. Nothing here sees a tensor.
"""

from __future__ import annotations

import io
import itertools
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

LABELS = {  # display names of methods, in the order of tables
    "local": "Local",
    "fedavg": "FedAvg",
    "fedavg_ft": "FedAvg-FT",
    "fedprox": "FedProx",
    "fedprox_ft": "FedProx-FT",
    "perfedavg": "Per-FedAvg",
    "pfedme": "pFedMe",
    "lgfedavg": "LG-FedAvg",
    "fedbn": "FedBN",
    "fedper": "FedPer",
    "fedrep": "FedRep",
    "fedfomo": "FedFomo",
    "ditto": "Ditto",
    "fedcp": "FedCP",
    "fedpac": "FedPAC",
    "cfl": "CFL",
    "fedamp": "FedAMP",
    "heurfedamp": "HeurFedAMP",
    "fedala": "FedALA",
    "apple": "APPLE",
    "gpfl": "GPFL",
    "pfedhn": "pFedHN",
    "pfedhn_pc": "pFedHN-PC",
    "pfedla": "pFedLA",
    "heurpfedla": "HeurpFedLA",
    "flayer": "FLAYER",
    "fedaghn": "FedAGHN",
}
# Methods with a colour of their own, as its index in seaborn's colour-blind safe cycle: the papers'
# own methods, and the two ends of the scale (local training, one global model).
_OWN_COLOURS = {
    "fedper": 2,
    "pfedhn": 3,
    "pfedhn_pc": 9,
    "pfedla": 0,
    "heurpfedla": 8,
    "flayer": 1,
    "fedaghn": 4,
    "local": 7,
    "fedavg": 5,
}
_CYCLE = sns.color_palette("colorblind", 10)
_LINE_STYLES = ("", (4, 1.5), (1, 1), (3, 1, 1, 1))  # solid, dashed, dotted, dash-dotted
# The other methods share the cycle and are told apart by dashes, too.
PALETTE = {
    method: _CYCLE[_OWN_COLOURS[method] if method in _OWN_COLOURS else (i * 3) % 10]
    for i, method in enumerate(LABELS)
}
DASHES = {
    method: "" if method in _OWN_COLOURS else _LINE_STYLES[1 + i % 3]
    for i, method in enumerate(LABELS)
}
PANEL = (3.4, 2.5)  # inches: a column's width
MANY = 6  # entries of a legend: more do not fit between the lines


# -- names, colours, panels ------------------------------------------------------------------------


def label(name: str) -> str:
    """Display name of a method key, also where words follow it ("fedavg, lr 0.1").

    Names of anything else are returned as they are.
    """
    key = re.match(r"\w*", name)[0]
    return LABELS[key] + name[len(key) :] if key in LABELS else name


def colours(names: Sequence[str]) -> dict[str, tuple]:
    """A colour for every name: a method's own, whoever else is drawn.

    Other names take colours that no method among `names` has, in turn.
    """
    own = {name: PALETTE[name] for name in names if name in PALETTE}
    free = [colour for colour in _CYCLE if colour not in own.values()] or _CYCLE
    others = [name for name in names if name not in own]
    return {name: own.get(name) or free[others.index(name) % len(free)] for name in names}


def dashes(names: Sequence[str]) -> dict[str, str | tuple]:
    """A line style for every name ("" is solid): a method's own, else the next of four."""
    others = [name for name in names if name not in DASHES]
    return {
        name: DASHES[name] if name in DASHES else _LINE_STYLES[others.index(name) % 4]
        for name in names
    }


def panels(
    n: int, columns: int = 3, size: tuple[float, float] = PANEL, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of n panels, `columns` in a row, and the list of their axes.

    Parameters
    ----------
    n : int
        How many panels, at least one.
    size : (float, float)
        Width and height of a panel, in inches.
    options
        For `Figure.subplots`; by default the panels share their y axis.

    Raises
    ------
    ValueError
        If n is 0.
    """
    if n < 1:
        raise ValueError(
            f"a figure of {n} panels: there is nothing to draw; "
            "look whether the rows for it are empty"
        )
    columns = min(columns, n)
    rows = -(-n // columns)
    # Not through pyplot: it is not for threads (widgets are drawn in one), and keeps every figure.
    figsize = (size[0] * columns, size[1] * rows)
    fig = Figure(figsize=figsize, layout="constrained")
    grid = fig.subplots(rows, columns, squeeze=False, **{"sharey": True} | options)
    axes = list(grid.ravel())
    for ax in axes[n:]:
        ax.remove()
    return fig, axes[:n]


# -- accuracies ------------------------------------------------------------------------------------


def curves(rows: pd.DataFrame, ax: Axes, hue: str = "row", y: str = "Test accuracy (%)") -> Axes:
    """Draw `value` against `round`, a line for each value of the column `hue`.

    The line is the mean over seeds, the band their range.
    """
    names = list(dict.fromkeys(rows[hue]))
    shown = rows.assign(**{hue: rows[hue].map(label)})
    sns.lineplot(
        shown,
        x="rounds",
        y="value",
        ax=ax,
        hue=hue,
        style=hue,
        palette=_labelled(colours(names)),
        dashes=_labelled(dashes(names)),
        errorbar=("pi", 100),
    )
    return _finish(ax, "Communication round", y)


def spread(rows: pd.DataFrame, ax: Axes, hue: str = "row") -> Axes:
    """Draw how clients spread, against the round; seeds are averaged.

    A line is the mean over clients, its band one standard deviation over clients to both sides, and
    two thin lines are the worst and the best client. `rows` hold the metrics acc_pct, acc_sd,
    acc_min and acc_max.
    """
    for name, colour in colours(list(dict.fromkeys(rows[hue]))).items():
        own = rows[rows[hue] == name]
        wide = own.pivot_table(index="rounds", columns="metric", values="value", aggfunc="mean")
        low, high = wide.acc_pct - wide.acc_sd, wide.acc_pct + wide.acc_sd
        ax.plot(wide.index, wide.acc_pct, color=colour, label=label(name))
        ax.fill_between(wide.index, low, high, color=colour, alpha=0.2, lw=0)
        for edge in ("acc_min", "acc_max"):
            ax.plot(wide.index, wide[edge], color=colour, lw=0.6, ls=":")
    return _finish(ax, "Communication round", "Test accuracy (%)")


def reported(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Draw what the paper reports (a grey ring) and what came out here (a dot), joined by a line.

    `frame` has the columns `row`, `reported` and `reproduced` (%). Each `row` has a line of its
    own, the first one at the top, and its numbers are averaged; NaN leaves a dot out.
    """
    mean = frame.groupby("row", sort=False)[["reported", "reproduced"]].mean()
    for i, (name, colour) in enumerate(colours(list(mean.index)).items()):
        here, paper = mean.reproduced[name], mean.reported[name]
        ax.plot([paper, here], [i, i], color="0.75", lw=1, zorder=1)
        ax.scatter(here, i, s=22, color=colour, lw=0)
        ax.scatter(paper, i, s=30, fc="none", ec="0.45", label=None if i else "Reported")
    ax.scatter([], [], s=22, color="k", lw=0, label="Reproduced")
    ax.grid(axis="x", lw=0.4, color="0.9")
    ax.set_axisbelow(True)
    return _finish(_name_rows(ax, mean.index), "Test accuracy (%)", "")


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
    for i, (name, colour) in enumerate(colours(list(frame.index)).items()):
        numbers = frame.loc[name]
        if {"acc_min", "acc_max"} <= set(frame):
            ax.plot([numbers.acc_min, numbers.acc_max], [i, i], color=colour, lw=1, zorder=1)
        if clients is not None and len(own := clients[clients.row == name]):
            ticks = dict(s=30, marker="|", color=colour, lw=0.8, alpha=0.7)
            ax.scatter(own.acc_pct, [i] * len(own), **ticks)
        for metric, shape, text in (("acc_pct", "o", "Mean"), ("acc_worst10", "v", "Worst tenth")):
            if metric in frame:
                mark = dict(s=24, marker=shape)
                ax.scatter(numbers[metric], i, color=colour, ec="k", lw=0.5, zorder=2, **mark)
                ax.scatter([], [], color="k", lw=0, label="_" if i else text, **mark)
    return _finish(_name_rows(ax, frame.index), "Test accuracy of a client (%)", "")


def leads(a: np.ndarray, b: np.ndarray, ax: Axes, names: tuple[str, str] = ("a", "b")) -> Axes:
    """Draw by how many points b (K,) is ahead of a (K,) on each client, sorted.

    A bar has the colour of the one that is ahead.
    """
    lead = np.sort(b - a)
    first, second = colours(names).values()
    ax.bar(range(len(lead)), lead, color=[second if points > 0 else first for points in lead])
    ax.axhline(0, color="0.4", lw=0.8)
    return _finish(ax, "Clients, sorted", f"{label(names[1])} ahead by (points)", legend=False)


# -- data, weights, layers, points -----------------------------------------------------------------


def label_distribution(counts: np.ndarray, ax: Axes, classes: Sequence[str] | None = None) -> Axes:
    """Draw who holds what: a bubble for each client and class, its area the number of samples.

    `counts` (K, C) are sample counts; `classes` (C,) are names of the classes.
    """
    client, held = np.nonzero(counts)
    area = 120 * counts[client, held] / max(1, counts.max())
    ax.scatter(client, held, s=area, color=_CYCLE[0], alpha=0.8, lw=0)
    ax.set_xlim(-0.7, len(counts) - 0.3)
    ax.set_ylim(-0.7, counts.shape[1] - 0.3)
    if classes is not None:
        ax.set_yticks(range(len(classes)), classes)
    return _finish(ax, "Client", "Class", legend=False)


def heat(
    matrix: np.ndarray,
    ax: Axes,
    x: str = "Source client",
    y: str = "Receiving client",
    **options: Any,
) -> Axes:
    """Draw a matrix as a heat map, rows downwards; `options` (vmin, annot, ...) are seaborn's."""
    sns.heatmap(matrix, ax=ax, square=True, cmap="viridis", **options)
    return _finish(ax, x, y, legend=False)


def heats(
    matrices: Mapping[str, np.ndarray],
    columns: int = 4,
    labels: Sequence[str] | None = None,
    x: str = "Source client",
    y: str = "Receiving client",
    said: str = "Weight",
    clip: float | None = None,
    **options: Any,
) -> Figure:
    """A figure of heat maps that share one colour scale and one colour bar.

    Parameters
    ----------
    matrices : {title: (R, C) float}
        A map for each.
    columns : int
        How many maps stand in a row.
    labels : (R,), optional
        Names of the rows; of the columns, too, where there are as many. Else they are numbered.
    said : str
        The name of the colour bar.
    clip : float, optional
        The percentile of all values at which the scale ends, so that a strong diagonal leaves the
        rest readable. By default it ends at the largest value.
    options
        For `heat`: vmin, vmax, annot, ...

    Raises
    ------
    ValueError
        Without matrices, or if labels and rows differ in number.
    """
    _check_labels(matrices, labels)
    few = min(columns, len(matrices)) < 3
    side = PANEL[0] * (1 if few else 0.65)
    fig, axes = panels(len(matrices), columns, size=(side, side), sharey=False)
    scale, extend = _scale(np.concatenate([np.ravel(m) for m in matrices.values()]), clip, options)
    for i, (ax, (title, matrix)) in enumerate(zip(axes, matrices.items(), strict=True)):
        _heat_panel(matrix, ax, labels, (x, y), options | scale)
        ax.set_title(title)
        if i % columns:
            ax.set_ylabel("")
        if i + columns < len(axes):
            ax.set_xlabel("")
    fig.colorbar(axes[0].collections[0], ax=axes, label=said, extend=extend, shrink=0.8)
    return fig


def _check_labels(matrices: Mapping[str, np.ndarray], labels: Sequence[str] | None) -> None:
    for title, matrix in matrices.items():
        if labels is not None and len(matrix) != len(labels):
            raise ValueError(
                f"{len(labels)} labels for the {len(matrix)} rows of {title!r}; "
                "give one for each row"
            )


def _scale(
    values: np.ndarray, clip: float | None, options: dict[str, Any]
) -> tuple[dict[str, float], str]:
    """Ends of the colour scale (those in `options` first), and beyond which of them values lie."""
    low, high = np.nanmin(values), np.nanmax(values)
    top = high if clip is None else np.nanpercentile(values, clip)
    scale = {"vmin": options.get("vmin", low), "vmax": options.get("vmax", top)}
    below, above = bool(low < scale["vmin"]), bool(high > scale["vmax"])
    beyond = {(False, False): "neither", (True, False): "min", (False, True): "max"}
    return scale, beyond.get((below, above), "both")


def _heat_panel(
    matrix: np.ndarray,
    ax: Axes,
    labels: Sequence[str] | None,
    titles: tuple[str, str],
    options: dict[str, Any],
) -> None:
    """One map of several: small tick labels, about ten to a side, and no colour bar of its own."""
    index, header = (
        list(labels) if labels is not None and len(labels) == n else range(n)
        for n in np.shape(matrix)
    )
    every = {
        name: -(-n // 10)
        for name, n in zip(("yticklabels", "xticklabels"), np.shape(matrix), strict=True)
    }
    heat(pd.DataFrame(matrix, index, header), ax, *titles, cbar=False, **every | options)
    ax.tick_params(labelsize=6)
    ax.tick_params(axis="y", rotation=0)


def layers(frame: pd.DataFrame, ax: Axes, hue: str = "row", y: str = "Value") -> Axes:
    """Draw `value` against `layer` in order of appearance, a line for each value of `hue`.

    A column `stage`, if there is one, chooses the style of the line. The line is the mean, the band
    the range of what is averaged.
    """
    names = list(dict.fromkeys(frame[hue]))
    # As text, layers keep their order on the axis.
    shown = frame.assign(**{hue: frame[hue].map(label), "layer": frame.layer.astype(str)})
    style, styles = hue, _labelled(dashes(names))
    if "stage" in frame:
        style = "stage"
        styles = dict(zip(dict.fromkeys(frame.stage), itertools.cycle(_LINE_STYLES), strict=False))
    sns.lineplot(
        shown,
        x="layer",
        y="value",
        ax=ax,
        hue=hue,
        palette=_labelled(colours(names)),
        style=style,
        dashes=styles,
        markers=dict.fromkeys(styles, "o"),
        markersize=4,
        markeredgewidth=0,
        errorbar=("pi", 100),
    )
    if style != hue:
        _hide_headings(ax, (hue, "stage"))
    ax.tick_params(axis="x", rotation=30)
    return _finish(ax, "", y)


def _hide_headings(ax: Axes, headings: tuple[str, str]) -> None:
    """Take seaborn's headings out of the legend, and markers off its lines, so that dashes show."""
    for handle, text in zip(*ax.get_legend_handles_labels(), strict=True):
        handle.set(marker="", label="_" if text in headings else text)


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

    `hue` is a column that colours the dots. `line` adds a least-squares line for each colour.
    """
    frame = frame.dropna(subset=[x, y])
    groups = frame.groupby(hue, sort=False) if hue else [(None, frame)]
    names = list(dict.fromkeys(frame[hue])) if hue else []
    palette, styles = colours(names) or {None: _CYCLE[0]}, dashes(names) or {None: ""}
    for name, part in groups:
        dot = dict(s=14, color=palette[name], alpha=0.7, lw=0)
        ax.scatter(part[x], part[y], label=label(name) if hue else None, **dot)
        if line and part[x].nunique() > 1:  # else there is no slope
            ends = np.array([part[x].min(), part[x].max()], dtype=float)
            fit = np.polyval(np.polyfit(part[x], part[y], 1), ends)
            style = (0, styles[name]) if styles[name] else "-"
            ax.plot(ends, fit, color=palette[name], lw=1.2, ls=style)
    return _finish(ax, xlabel or x, ylabel or y)


def embedding(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Draw points `x`, `y` of an embedding, coloured by `group`, with four shapes in turn.

    Up to 20 groups are named beside the axes.
    """
    names = list(dict.fromkeys(frame.group))
    few = len(names) <= 10
    shades = colours(names).values() if few else sns.husl_palette(len(names), l=0.6)
    for name, colour, shape in zip(names, shades, itertools.cycle("os^D"), strict=False):
        part = frame[frame.group == name]
        dot = dict(s=16, color=colour, marker=shape, edgecolor="0.2", lw=0.3)
        ax.scatter(part.x, part.y, label=str(name), **dot)
    ax.set(xticks=[], yticks=[])
    ax.set_aspect("equal", adjustable="datalim")
    _finish(ax, "t-SNE 1", "t-SNE 2", legend=False)
    if len(names) <= 20:
        ax.legend(
            loc="center left",
            bbox_to_anchor=(1, 0.5),
            ncols=1 if few else 2,
            columnspacing=0.5,
            handletextpad=0,
            frameon=False,
            fontsize=6,
        )
    return ax


def agreement(cells: pd.DataFrame, ax: Axes) -> Axes:
    """Published accuracies against ours, a colour a paper, with 95 % intervals and the diagonal.

    Cells that are undecided are hollow.

    Parameters
    ----------
    cells : DataFrame
        Columns paper (a method key), reported, reproduced, low, high (NaN for one seed) and
        verdict; a line a cell.
    """
    names = list(dict.fromkeys(cells.paper))
    ends = cells[["reported", "reproduced"]]
    span = float(np.floor(ends.min().min())) - 2, float(np.ceil(ends.max().max())) + 2
    ax.plot(span, span, color="0.6", lw=0.8, ls="--", zorder=0)
    for name, colour in colours(names).items():
        part = cells[cells.paper == name]
        reach = np.abs(part[["low", "high"]].to_numpy().T - part.reproduced.to_numpy())
        dots = dict(fmt="none", ecolor=colour, elinewidth=0.7, alpha=0.5)
        ax.errorbar(part.reported, part.reproduced, yerr=np.nan_to_num(reach), **dots)
        fill = [colour if v != "undecided" else "white" for v in part.verdict]
        ax.scatter(part.reported, part.reproduced, s=14, c=fill, edgecolors=colour, lw=0.8)
        ax.scatter([], [], s=14, color=colour, label=label(name))
    ax.set(xlim=span, ylim=span)
    ax.set_aspect("equal")
    return _finish(ax, "Published accuracy (%)", "Reproduced accuracy (%)")


# -- files -----------------------------------------------------------------------------------------


def note(fig: Figure, text: str) -> Figure:
    """Write a caption of profile, data and seeds below a figure."""
    lines = textwrap.fill(text, int(20 * fig.get_figwidth()))
    fig.supxlabel(lines, fontsize=7, color="0.35", x=0.01, ha="left")
    return fig


def save(fig: Figure, frame: pd.DataFrame, path: Path) -> Path:
    """Write path.png, path.pdf, and path.csv with the plotted numbers; returns the PNG's path.

    The files hold no dates or versions, so that the same figure is the same bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    png = path.with_suffix(".png")
    fig.savefig(png, dpi=150, metadata={"Software": None})
    fig.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None})
    frame.round(4).to_csv(path.with_suffix(".csv"), index=False)
    return png


def compact(fig: Figure, dpi: int = 72) -> bytes:
    """The figure as a PNG of at most 64 colours, for notebooks: a third of the usual size."""
    raw, small = io.BytesIO(), io.BytesIO()
    fig.savefig(raw, dpi=dpi, format="png", metadata={"Software": None})
    picture = Image.open(raw).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    picture.save(small, "PNG", optimize=True)
    return small.getvalue()


# -- what all figures have -------------------------------------------------------------------------


def _labelled(styles: dict[str, Any]) -> dict[str, Any]:
    return {label(name): style for name, style in styles.items()}


def _name_rows(ax: Axes, names: Sequence[str]) -> Axes:
    """Name the rows of a figure that has one a line, the first at the top."""
    ax.set_yticks(range(len(names)), [label(name) for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    return ax


def _finish(ax: Axes, x: str, y: str, legend: bool = True) -> Axes:
    """Name both axes, take two spines off, and draw the legend: beside the axes if it is long."""
    ax.set(xlabel=x, ylabel=y)
    if x in ("Communication round", "Client"):
        ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    sns.despine(ax=ax)
    handles = ax.get_legend_handles_labels()[0] if legend else []
    if not handles:
        return ax
    place: dict[str, Any] = {}
    if len(handles) > MANY:
        place = dict(loc="upper left", bbox_to_anchor=(1, 1))
        if ax.get_subplotspec().rowspan.start == 0:  # the figure grows once for each column
            ax.figure.set_figwidth(ax.figure.get_figwidth() + PANEL[0] / 3)
    ax.legend(frameon=False, fontsize=7, title=None, **place)
    return ax
