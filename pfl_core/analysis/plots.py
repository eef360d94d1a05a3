"""One function a kind of figure: (frame, ax) -> ax. Frames are rows in the project's long form; nothing here sees a tensor."""

from __future__ import annotations

import io
import itertools
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

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
_OWN = {
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
_CB = sns.color_palette("colorblind", 10)
# The papers' own methods and the two ends have colours of their own; baselines share the rest, told apart by dashes too.
PALETTE = {m: _CB[_OWN[m]] if m in _OWN else _CB[(i * 3) % 10] for i, m in enumerate(LABELS)}
_LINES = ("", (4, 1.5), (1, 1), (3, 1, 1, 1))
DASHES = {m: "" if m in _OWN else _LINES[1 + i % 3] for i, m in enumerate(LABELS)}
PANEL = (3.4, 2.5)  # inches: a column's width


def label(name: str) -> str:
    """Display name of a method key, also where words follow ("fedavg, lr 0.1"); other names as they are."""
    key = re.match(r"\w*", name)[0]
    return LABELS[key] + name[len(key) :] if key in LABELS else name


def colours(names: Sequence[str]) -> dict[str, tuple]:
    """A colour for every name: a method's own; others take those of the colour-blind safe cycle that no method here has."""
    own = {n: PALETTE[n] for n in names if n in PALETTE}
    free = [c for c in _CB if c not in own.values()] or _CB
    rest = [n for n in names if n not in own]
    return {n: own.get(n) or free[rest.index(n) % len(free)] for n in names}


def dashes(names: Sequence[str]) -> dict[str, str | tuple]:
    """A line style for every name, "" if solid: a method's own, else the next of four."""
    rest = [n for n in names if n not in DASHES]
    return {n: DASHES[n] if n in DASHES else _LINES[rest.index(n) % 4] for n in names}


def panels(
    n: int, columns: int = 3, size: tuple[float, float] = PANEL, **kw
) -> tuple[Figure, list[Axes]]:
    """A figure of n >= 1 panels in rows of `columns`, sharing the y axis; returns it and the list of axes. ValueError if n is 0."""
    if n < 1:
        raise ValueError(
            f"a figure of {n} panels: there is nothing to draw; look whether the rows for it are empty"
        )
    columns = min(columns, n)
    rows = -(-n // columns)
    kw = {"sharey": True} | kw
    # Not through pyplot, which is neither for threads (widgets are drawn in one) nor forgets a figure unasked.
    fig = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    flat = list(fig.subplots(rows, columns, squeeze=False, **kw).ravel())
    for ax in flat[n:]:
        ax.remove()
    return fig, flat[:n]


def curves(rows: pd.DataFrame, ax: Axes, hue: str = "row", y: str = "Test accuracy (%)") -> Axes:
    """Mean over seeds of `value` against `round`, a line for each `hue`; the band is the range over seeds."""
    names = list(dict.fromkeys(rows[hue]))
    shown = rows.assign(**{hue: rows[hue].map(label)})
    palette, lines = ({label(n): c for n, c in of(names).items()} for of in (colours, dashes))
    how = dict(hue=hue, style=hue, palette=palette, dashes=lines, errorbar=("pi", 100))
    sns.lineplot(shown, x="round", y="value", ax=ax, **how)
    return _axes(ax, "Communication round", y)


def spread(rows: pd.DataFrame, ax: Axes, hue: str = "row") -> Axes:
    """Client mean with +-1 standard deviation over clients (band) and worst and best client (thin lines), against the round.

    rows hold the metrics acc_pct, acc_sd, acc_min, acc_max; seeds are averaged.
    """
    for name, colour in colours(list(dict.fromkeys(rows[hue]))).items():
        wide = rows[rows[hue] == name].pivot_table(
            index="round", columns="metric", values="value", aggfunc="mean"
        )
        ax.plot(wide.index, wide.acc_pct, color=colour, label=label(name))
        ax.fill_between(
            wide.index,
            wide.acc_pct - wide.acc_sd,
            wide.acc_pct + wide.acc_sd,
            color=colour,
            alpha=0.2,
            lw=0,
        )
        for edge in ("acc_min", "acc_max"):
            ax.plot(wide.index, wide[edge], color=colour, lw=0.6, ls=":")
    return _axes(ax, "Communication round", "Test accuracy (%)")


def bars(
    rows: pd.DataFrame,
    ax: Axes,
    x: str = "row",
    hue: str | None = None,
    y: str = "Test accuracy (%)",
) -> Axes:
    """Mean of `value` by x (and hue), coloured by hue (else by x); the line shows the range over seeds."""
    by = hue or x
    shown = rows.assign(**{c: rows[c].map(label) for c in {x, by}})
    palette = {label(n): c for n, c in colours(list(dict.fromkeys(rows[by]))).items()}
    order = list(dict.fromkeys(shown[x]))
    how = dict(
        hue=by,
        hue_order=list(palette),
        palette=palette,
        errorbar=("pi", 100),
        legend=hue is not None,
    )
    sns.barplot(shown, x=x, y="value", order=order, ax=ax, **how)
    return _axes(ax, "", y)


def label_distribution(counts: np.ndarray, ax: Axes, classes: Sequence[str] | None = None) -> Axes:
    """Who holds what: a bubble for each client and class, its area the number of samples; counts (K, C)."""
    k, c = np.nonzero(counts)
    area = 120 * counts[k, c] / max(1, counts.max())
    ax.scatter(k, c, s=area, color=_CB[0], alpha=0.8, lw=0)
    ax.set_xlim(-0.7, len(counts) - 0.3)
    ax.set_ylim(-0.7, counts.shape[1] - 0.3)
    if classes is not None:
        ax.set_yticks(range(len(classes)), classes)
    return _axes(ax, "Client", "Class", legend=False)


def heat(
    matrix: np.ndarray, ax: Axes, x: str = "Source client", y: str = "Receiving client", **kw
) -> Axes:
    """A heat map of `matrix`, rows downwards; kw (vmin, vmax, annot, ...) go to seaborn."""
    sns.heatmap(matrix, ax=ax, square=True, cmap="viridis", **kw)
    return _axes(ax, x, y, legend=False)


def heats(
    matrices: Mapping[str, np.ndarray],
    columns: int = 4,
    labels: Sequence[str] | None = None,
    x: str = "Source client",
    y: str = "Receiving client",
    said: str = "Weight",
    clip: float | None = None,
    **kw,
) -> Figure:
    """A figure of one heat map for each titled matrix (R, C), all in one colour scale, with one bar that `said` names.

    labels (R,) name the rows, and the columns where there are as many. clip: the percentile of all values at which the
    scale ends, so that a strong diagonal leaves the rest readable. kw (vmin, vmax, annot, ...) go to `heat`.
    ValueError without matrices, or for labels of another number than rows.
    """
    for title, m in matrices.items() if labels is not None else ():
        if len(m) != len(labels):
            raise ValueError(
                f"{len(labels)} labels for the {len(m)} rows of {title!r}; give one for each row"
            )
    values = np.concatenate([np.ravel(m) for m in matrices.values()]) if matrices else np.zeros(0)
    side = PANEL[0] * (1 if min(columns, len(matrices)) < 3 else 0.65)
    fig, axes = panels(len(matrices), columns, size=(side, side), sharey=False)
    top = np.nanmax(values) if clip is None else np.nanpercentile(values, clip)
    kw = dict(vmin=np.nanmin(values), vmax=top) | kw
    for i, (ax, (title, m)) in enumerate(zip(axes, matrices.items(), strict=True)):
        names = [
            list(labels) if labels is not None and len(labels) == n else range(n)
            for n in np.shape(m)
        ]
        every = dict(
            zip(("yticklabels", "xticklabels"), (-(-n // 10) for n in np.shape(m)), strict=True)
        )
        heat(pd.DataFrame(m, *names), ax, x, y, cbar=False, **every | kw).set_title(title)
        ax.tick_params(labelsize=6)
        ax.tick_params(axis="y", rotation=0)
        if i % columns:
            ax.set_ylabel("")
        if i + columns < len(axes):
            ax.set_xlabel("")
    beyond = int(np.nanmin(values) < kw["vmin"]) + 2 * int(np.nanmax(values) > kw["vmax"])
    ends = ("neither", "min", "max", "both")[beyond]
    fig.colorbar(axes[0].collections[0], ax=axes, label=said, extend=ends, shrink=0.8)
    return fig


def layers(frame: pd.DataFrame, ax: Axes, hue: str = "row", y: str = "Value") -> Axes:
    """Mean of `value` against `layer` in order of appearance, a line for each `hue` and, if there is that column, line style
    for each `stage`; the band is the range over what is averaged."""
    names = list(dict.fromkeys(frame[hue]))
    shown = frame.assign(
        **{hue: frame[hue].map(label), "layer": frame.layer.astype(str)}
    )  # text keeps its order
    how = dict(
        hue=hue,
        palette={label(n): c for n, c in colours(names).items()},
        style=hue,
        errorbar=("pi", 100),
    )
    how["dashes"] = {label(n): d for n, d in dashes(names).items()}
    if "stage" in frame:
        kinds = list(dict.fromkeys(frame.stage))
        how |= dict(style="stage", dashes=dict(zip(kinds, itertools.cycle(_LINES))))
    marks = dict(markers=dict.fromkeys(how["dashes"], "o"), markersize=4, markeredgewidth=0)
    sns.lineplot(shown, x="layer", y="value", ax=ax, **marks, **how)
    for handle, text in (
        zip(*ax.get_legend_handles_labels(), strict=True) if how["style"] != hue else ()
    ):
        handle.set(
            marker="", label="_" if text in (hue, "stage") else text
        )  # dashes show; seaborn's headings go
    ax.tick_params(axis="x", rotation=30)
    return _axes(ax, "", y)


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
    """Column y against column x, a dot for each row, coloured by `hue`; with `line`, a least-squares line for each of its values."""
    frame = frame.dropna(subset=[x, y])
    groups = frame.groupby(hue, sort=False) if hue else [(None, frame)]
    names = list(dict.fromkeys(frame[hue])) if hue else [None]
    palette, lines = (colours(names), dashes(names)) if hue else ({None: _CB[0]}, {None: ""})
    for name, part in groups:
        ax.scatter(
            part[x],
            part[y],
            s=14,
            color=palette[name],
            alpha=0.7,
            lw=0,
            label=label(name) if hue else None,
        )
        if line and part[x].nunique() > 1:  # else there is no slope
            ends = np.array([part[x].min(), part[x].max()], dtype=float)
            fit = np.polyval(np.polyfit(part[x], part[y], 1), ends)
            ax.plot(
                ends, fit, color=palette[name], lw=1.2, ls=(0, lines[name]) if lines[name] else "-"
            )
    return _axes(ax, xlabel or x, ylabel or y)


def embedding(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Points x, y of an embedding, coloured by `group`, with four shapes in turn; up to 20 groups are named beside the axes."""
    names = list(dict.fromkeys(frame.group))
    shades = colours(names).values() if len(names) <= 10 else sns.husl_palette(len(names), l=0.6)
    for name, colour, shape in zip(names, shades, itertools.cycle("os^D")):
        part = frame[frame.group == name]
        ax.scatter(
            part.x,
            part.y,
            s=16,
            color=colour,
            marker=shape,
            edgecolor="0.2",
            lw=0.3,
            label=str(name),
        )
    ax.set(xticks=[], yticks=[])
    ax.set_aspect("equal", adjustable="datalim")
    _axes(ax, "t-SNE 1", "t-SNE 2", legend=False)
    if len(names) <= 20:
        how = dict(
            loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=6, handletextpad=0
        )
        ax.legend(ncols=1 + (len(names) > 10), columnspacing=0.5, **how)
    return ax


def reported(frame: pd.DataFrame, ax: Axes) -> Axes:
    """What the paper reports (grey) and what came out here (in colour), joined, a line for each `row` from the top; a row's
    `reported` and `reproduced` numbers (%) are averaged, NaN leaves a dot out."""
    mean = frame.groupby("row", sort=False)[["reported", "reproduced"]].mean()
    for i, (name, colour) in enumerate(colours(list(mean.index)).items()):
        ax.plot(mean.loc[name], [i, i], color="0.75", lw=1, zorder=1)
        ax.scatter(mean.reproduced[name], i, s=22, color=colour, lw=0)
        ax.scatter(
            mean.reported[name], i, s=30, fc="none", ec="0.45", label=None if i else "Reported"
        )
    ax.scatter([], [], s=22, color="k", lw=0, label="Reproduced")
    ax.set_yticks(range(len(mean)), [label(n) for n in mean.index])
    ax.set_ylim(len(mean) - 0.5, -0.5)
    ax.grid(axis="x", lw=0.4, color="0.9")
    ax.set_axisbelow(True)
    return _axes(ax, "Test accuracy (%)", "")


def ranges(frame: pd.DataFrame, ax: Axes, clients: pd.DataFrame | None = None) -> Axes:
    """How clients spread, a line for each row of `frame` from the top: from acc_min to acc_max, a dot at acc_pct, a triangle at
    acc_worst10 (%; each where there is that column). clients: row, acc_pct of every client, drawn as small ticks."""
    for i, (name, colour) in enumerate(colours(list(frame.index)).items()):
        v = frame.loc[name]
        if {"acc_min", "acc_max"} <= set(frame):
            ax.plot([v.acc_min, v.acc_max], [i, i], color=colour, lw=1, zorder=1)
        if clients is not None and len(own := clients[clients.row == name]):
            ax.scatter(
                own.acc_pct, [i] * len(own), s=30, marker="|", color=colour, lw=0.8, alpha=0.7
            )
        for metric, shape, said in (("acc_pct", "o", "Mean"), ("acc_worst10", "v", "Worst tenth")):
            if metric in frame:
                ax.scatter(v[metric], i, s=24, marker=shape, color=colour, ec="k", lw=0.5, zorder=2)
                ax.scatter([], [], s=24, marker=shape, color="k", lw=0, label="_" if i else said)
    ax.set_yticks(range(len(frame)), [label(n) for n in frame.index])
    ax.set_ylim(len(frame) - 0.5, -0.5)
    return _axes(ax, "Test accuracy of a client (%)", "")


def leads(a: np.ndarray, b: np.ndarray, ax: Axes, names: tuple[str, str] = ("a", "b")) -> Axes:
    """By how many points b (K,) is ahead of a (K,) on each client, sorted; a bar in the colour of who is ahead."""
    lead = np.sort(b - a)
    ax.bar(range(len(lead)), lead, color=[colours(names)[names[int(v > 0)]] for v in lead])
    ax.axhline(0, color="0.4", lw=0.8)
    return _axes(ax, "Clients, sorted", f"{label(names[1])} ahead by (points)", legend=False)


def note(fig: Figure, text: str) -> Figure:
    """Write a caption of profile, data and seeds below a figure."""
    lines = textwrap.fill(text, int(20 * fig.get_figwidth()))
    fig.supxlabel(lines, fontsize=7, color="0.35", x=0.01, ha="left")
    return fig


def save(fig: Figure, frame: pd.DataFrame, path: Path) -> Path:
    """Write path.png, path.pdf, and path.csv with the numbers that were plotted; returns the PNG's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    png = path.with_suffix(".png")
    fig.savefig(png, dpi=150, metadata={"Software": None})
    fig.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None})
    frame.round(4).to_csv(path.with_suffix(".csv"), index=False)
    return png


def compact(fig: Figure, dpi: int = 72) -> bytes:
    """The figure as a PNG of at most 64 colours: what a notebook keeps, a third of the usual size."""
    raw, small = io.BytesIO(), io.BytesIO()
    fig.savefig(raw, dpi=dpi, format="png", metadata={"Software": None})
    Image.open(raw).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(
        small, "PNG", optimize=True
    )
    return small.getvalue()


def _axes(ax: Axes, x: str, y: str, legend: bool = True) -> Axes:
    ax.set(xlabel=x, ylabel=y)
    if x in ("Communication round", "Client"):
        ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    sns.despine(ax=ax)
    if legend and (handles := ax.get_legend_handles_labels()[0]):
        beside = (
            dict(loc="upper left", bbox_to_anchor=(1, 1)) if len(handles) > 6 else {}
        )  # too many to lie between lines
        if beside and ax.get_subplotspec().rowspan.start == 0:
            ax.figure.set_figwidth(ax.figure.get_figwidth() + PANEL[0] / 3)
        ax.legend(frameon=False, fontsize=7, title=None, **beside)
    return ax
