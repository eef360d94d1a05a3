"""One function a kind of figure: (frame, ax) -> ax. Frames are rows in the project's long form; nothing here sees a tensor."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
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
    """Display name of a method key; other names as they are."""
    return LABELS.get(name, name)


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


def panels(n: int, columns: int = 3, size: tuple[float, float] = PANEL, **kw) -> tuple[Figure, list[Axes]]:
    """A figure of n >= 1 panels in rows of `columns`, sharing the y axis; returns it and the list of axes. ValueError if n is 0."""
    if n < 1:
        raise ValueError(f"a figure of {n} panels: there is nothing to draw; look whether the rows for it are empty")
    columns = min(columns, n)
    rows = -(-n // columns)
    kw = {"sharey": True} | kw
    fig, axes = plt.subplots(
        rows, columns, figsize=(size[0] * columns, size[1] * rows), squeeze=False, layout="constrained", **kw
    )
    flat = list(axes.ravel())
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
        wide = rows[rows[hue] == name].pivot_table(index="round", columns="metric", values="value", aggfunc="mean")
        ax.plot(wide.index, wide.acc_pct, color=colour, label=label(name))
        ax.fill_between(
            wide.index, wide.acc_pct - wide.acc_sd, wide.acc_pct + wide.acc_sd, color=colour, alpha=0.2, lw=0
        )
        for edge in ("acc_min", "acc_max"):
            ax.plot(wide.index, wide[edge], color=colour, lw=0.6, ls=":")
    return _axes(ax, "Communication round", "Test accuracy (%)")


def bars(rows: pd.DataFrame, ax: Axes, x: str = "row", hue: str | None = None, y: str = "Test accuracy (%)") -> Axes:
    """Mean of `value` by x (and hue), coloured by hue (else by x); the line shows the range over seeds."""
    by = hue or x
    shown = rows.assign(**{c: rows[c].map(label) for c in {x, by}})
    palette = {label(n): c for n, c in colours(list(dict.fromkeys(rows[by]))).items()}
    order = list(dict.fromkeys(shown[x]))
    how = dict(hue=by, hue_order=list(palette), palette=palette, errorbar=("pi", 100), legend=hue is not None)
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


def heat(matrix: np.ndarray, ax: Axes, x: str = "Source client", y: str = "Receiving client", **kw) -> Axes:
    """A heat map of `matrix`, rows downwards; kw (vmin, vmax, annot, ...) go to seaborn."""
    sns.heatmap(matrix, ax=ax, square=True, cmap="viridis", **kw)
    return _axes(ax, x, y, legend=False)


def note(fig: Figure, text: str) -> Figure:
    """Write a caption of profile, data and seeds below a figure."""
    fig.supxlabel(text, fontsize=7, color="0.35", x=0.01, ha="left")
    return fig


def save(fig: Figure, frame: pd.DataFrame, path: Path) -> Path:
    """Write path.png, and path.csv with the numbers that were plotted; returns the PNG's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    png = path.with_suffix(".png")
    fig.savefig(png, dpi=150, metadata={"Software": None})
    frame.round(4).to_csv(path.with_suffix(".csv"), index=False)
    return png


def compact(fig: Figure, dpi: int = 72) -> bytes:
    """The figure as a PNG of at most 64 colours: what a notebook keeps, a third of the usual size."""
    raw, small = io.BytesIO(), io.BytesIO()
    fig.savefig(raw, dpi=dpi, format="png", metadata={"Software": None})
    Image.open(raw).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def _axes(ax: Axes, x: str, y: str, legend: bool = True) -> Axes:
    ax.set(xlabel=x, ylabel=y)
    if x == "Communication round":
        ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    sns.despine(ax=ax)
    if legend and ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=7, title=None)
    return ax
