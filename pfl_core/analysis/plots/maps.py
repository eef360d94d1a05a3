"""Figures of matrices: who holds which labels, and heat maps of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pfl_core.analysis.plots.names import in_words
from pfl_core.analysis.plots.style import (
    COLOURS,
    PANEL,
    beside,
    finish,
    not_run,
    outer_labels,
    panels,
)
from pfl_core.util import checks

PRINTED = 10  # rows and columns of a matrix up to which its numbers are printed
FLAT = 0.05  # share of the common scale below which a matrix has a scale of its own
COLOUR, OWN = "viridis", "Greys"  # colours of a common scale, and of a map with its own

STEPS = (1, 2, 5, 10, 20, 50, 100, 1000)  # between the ticks of larger ones

# -- who holds what --------------------------------------------------------------------------------


def label_distribution(
    counts: np.ndarray, ax: Axes, classes: Sequence[str] | None = None, most: int = 0
) -> Axes:
    """Draw who holds what: a bubble for each client and class, its area the number of samples.

    Parameters
    ----------
    counts : (K, C) int
        Sample counts.
    classes : (C,), optional
        Names of the classes; by default they are numbered.
    most : int
        The count of the largest bubble, for panels that are compared; by default the largest here.
    """
    clients, kinds = counts.shape
    most = most or int(counts.max(initial=0)) or 1
    side = min(72 * 0.75 * PANEL[0] / clients, 72 * 0.75 * PANEL[1] / kinds, 11)  # points
    client, held = np.nonzero(counts)
    how: dict[str, Any] = dict(color=COLOURS["blue"], alpha=0.8, lw=0)
    ax.scatter(client, held, s=side**2 * counts[client, held] / most, **how)
    ax.set_xlim(-0.7, clients - 0.3)
    ax.set_ylim(-0.7, kinds - 0.3)
    if classes is not None:
        ax.set_yticks(range(kinds), classes)
    elif kinds <= PRINTED:
        ax.set_yticks(range(kinds))
    key = {
        f"{count:,}": ax.scatter([], [], s=side**2 * count / most, **how)
        for count in dict.fromkeys((_round(most), _round(most / 4), _round(most / 20)))
    }
    finish(ax, "Client", "Class", legend=False)
    width = beside(ax, key, "Samples")
    place = ax.get_subplotspec()
    if place is None or place.rowspan.start == 0:
        figure: Any = ax.figure
        figure.set_figwidth(figure.get_figwidth() + width)
    return ax


def _round(count: float) -> int:
    """A count with one digit that is not 0, at least 1."""
    size = 10 ** int(np.log10(max(count, 1)))
    return max(1, int(count / size)) * size


# -- heat maps -------------------------------------------------------------------------------------


def heat(
    matrix: np.ndarray | pd.DataFrame,
    ax: Axes,
    x: str = "Source client",
    y: str = "Receiving client",
    **options: Any,
) -> Axes:
    """Draw a matrix as a heat map, rows downwards; `options` (vmin, annot, ...) are seaborn's.

    Up to 10 x 10 its numbers are printed.
    """
    if max(np.shape(matrix)) <= PRINTED and "annot" not in options:
        options |= dict(annot=_numbers(np.asarray(matrix)), fmt="", annot_kws=dict(fontsize=5.5))
    options.setdefault("cmap", COLOUR)
    sns.heatmap(matrix, ax=ax, square=True, **options)
    return finish(ax, x, y, legend=False)


def _numbers(matrix: np.ndarray) -> np.ndarray:
    """Numbers as they fit a small cell: 87 for 87.3, .12 for 0.12, 1 for 1, nothing for NaN."""
    digits = 0 if np.nanmax(np.abs(matrix), initial=0) >= 10 else 2

    def text(value: float) -> str:
        number = f"{round(value, digits) + 0.0:.{digits}f}".removesuffix(".00")  # 0 has no sign
        return "" if np.isnan(value) else number.replace("0.", ".", 1)

    return np.vectorize(text, otypes=[object])(matrix)


def heats(
    matrices: Mapping[str, np.ndarray | None],
    columns: int = 4,
    labels: Sequence[str] | None = None,
    x: str = "Source client",
    y: str = "Receiving client",
    said: str | Mapping[str, str] = "Weight",
    ends: Mapping[str, Sequence[str]] | None = None,
    **options: Any,
) -> Figure:
    """A figure of heat maps that share one colour scale and one colour bar.

    A matrix that is flat on this scale is drawn in greys, on a scale of its own; its title says
    from where to where that goes. If all its values are equal, it says that. The diagonal of a
    square matrix with printed numbers is outlined.

    Parameters
    ----------
    matrices : {title: (R, C) float}
        A map for each; None marks what was not run.
    columns : int
        How many maps stand in a row at most.
    labels : (R,), optional
        Names of the rows; of the columns, too, where there are as many. Else they are numbered.
    said : str or {title: str}
        The name of the colour bar. With a name for each title, each has a scale and a bar.
    ends : {title: (R,) str}, optional
        What is written at the right end of each row of a map.
    options
        For `heat`: vmin, vmax, annot, ...

    Raises
    ------
    ValueError
        Without matrices, if labels or ends and rows differ in number, or for ends of no map.
    """
    ran = {title: matrix for title, matrix in matrices.items() if matrix is not None}
    _check_labels(ran, labels)
    ends = ends or {}
    for title, words in ends.items():
        checks.known("heats(ends): map", title, ran)
        _check_labels({title: ran[title]}, words)
    fig, every = panels(len(matrices), columns, size=_size(ran, columns), sharey=False)
    own = isinstance(said, Mapping)
    scale, extend = _scale(np.concatenate([np.ravel(m) for m in ran.values()]), options)
    shared, axes = [], []
    for ax, title in zip(every, matrices, strict=True):
        if title not in ran:
            not_run(ax, title).set_box_aspect(1)
            continue
        matrix = ran[title]
        axes.append(ax)
        flat, words = ({}, "") if own else _own_scale(matrix, scale)
        if own:
            flat, extend = _scale(np.ravel(matrix), options)
        _heat_panel(matrix, ax, labels, (x, y), options | scale | flat)
        ax.set_title(title + words)
        _outline(ax, *np.shape(matrix))
        for row, word in enumerate(ends.get(title, ())):
            ax.text(np.shape(matrix)[1] + 0.15, row + 0.5, word, va="center", fontsize=5.5)
        if own:
            pad = 0.15 if title in ends else 0.05  # of the map's width
            how: dict[str, Any] = dict(label=said[title], extend=extend, shrink=0.8, pad=pad)
            fig.colorbar(ax.collections[0], ax=ax, **how)
        if not flat:
            shared.append(ax)
    outer_labels(axes, sharey=labels is None)
    if not own:
        mesh = (shared or axes)[0].collections[0]
        fig.colorbar(mesh, ax=every, label=said, extend=extend, shrink=0.8)
    return fig


def _size(matrices: Mapping[str, np.ndarray], columns: int) -> tuple[float, float]:
    # Few maps are as wide as a column, and so are those with numbers.
    printed = max(max(np.shape(m)) for m in matrices.values()) if matrices else 0
    few = min(columns, len(matrices)) < 3 or 5 < printed <= PRINTED
    side = PANEL[0] * (1 if few else 0.65)
    return side, side + 0.25  # a title of two lines


def _own_scale(matrix: np.ndarray, scale: dict[str, float]) -> tuple[dict[str, Any], str]:
    """The scale of a matrix that is flat on the common one, and what its title says of it."""
    if np.isnan(matrix).all():
        return {}, "\nno numbers"
    low, high = float(np.nanmin(matrix)), float(np.nanmax(matrix))
    if high - low >= FLAT * (scale["vmax"] - scale["vmin"]):
        return {}, ""
    if high - low <= 1e-6 * max(abs(high), 1e-9):
        return {}, f"\nall {high:.3g}"
    digits = max(0, -int(np.floor(np.log10(high - low))))  # to where they differ
    ends = f"{low:.{digits}f}–{high:.{digits}f}"
    return {"vmin": low, "vmax": high, "cmap": OWN}, f"\ngrey: {ends}"


def _outline(ax: Axes, rows: int, columns: int) -> None:
    # The diagonal: what a client has of itself.
    if 1 < rows == columns <= PRINTED:
        cells = [Rectangle((k, k), 1, 1) for k in range(rows)]
        ax.add_collection(PatchCollection(cells, fc="none", ec=COLOURS["crimson"], lw=0.9))


def _check_labels(matrices: Mapping[str, np.ndarray], labels: Sequence[str] | None) -> None:
    for title, matrix in matrices.items():
        if labels is not None and len(matrix) != len(labels):
            raise ValueError(
                f"{len(labels)} labels for the {len(matrix)} rows of {title!r}; "
                "give one for each row"
            )


def _scale(values: np.ndarray, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Ends of the colour scale (those in `options` first), and beyond which of them values lie."""
    if np.isnan(values).all():  # a client that nobody trained, for example
        return {"vmin": 0.0, "vmax": 1.0}, "neither"
    low, high = np.nanmin(values), np.nanmax(values)
    scale = {"vmin": options.get("vmin", low), "vmax": options.get("vmax", high)}
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
    """One map of several: small tick labels, up to ten to a side, and no colour bar of its own."""
    index, header = (
        [in_words(name) for name in labels]
        if labels is not None and len(labels) == n
        else list(map(str, range(n)))
        for n in np.shape(matrix)
    )
    every = {
        name: next(step for step in STEPS if n <= 8 * step or n <= PRINTED)
        for name, n in zip(("yticklabels", "xticklabels"), np.shape(matrix), strict=True)
    }
    heat(pd.DataFrame(matrix, index, header), ax, *titles, cbar=False, **every | options)
    ax.tick_params(labelsize=6)
    ax.tick_params(axis="y", rotation=0)
    ax.tick_params(axis="x", rotation=90 if max(map(len, header)) > 3 else 0)
