"""How figures look: the look of each method, panels, titles and legends."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pfl_core.analysis.plots.files import compact
from pfl_core.analysis.plots.names import LABELS, in_words, key

PANEL = (3.4, 2.5)  # inches: a column's width
# Of figures of this size.
STYLE: dict[Any, Any] = {"font.size": 8, "axes.titlesize": 9, "figure.dpi": 72}
LONG = 14  # entries of a legend: more stand in two columns


# -- the look of methods ---------------------------------------------------------------------------


class Look(NamedTuple):
    """What a name is drawn with: colour, dashes ("" is solid) and mark."""

    colour: str
    dash: str | tuple[float, ...]
    mark: str


# Lightness steps by 10 at least from one to the next, so that they differ in grey, too; under
# protanopia they are farther apart than that. (held by tests/core/analysis/test_plots.py)
COLOURS = {
    "ink": "#000000",
    "purple": "#3f1276",
    "crimson": "#99173c",
    "blue": "#1b69b6",
    "green": "#12936a",
    "orange": "#dd9a0b",
}
STYLES: dict[str, tuple[str | tuple[float, ...], str]] = {
    "solid": ("", "o"),
    "dashed": ((4, 1.6), "s"),
    "dotted": ((1, 1.2), "^"),
    "dash-dot": ((5, 1.4, 1, 1.4), "D"),
    "long": ((10, 2.4), "v"),
    "dash-dot-dot": ((5, 1.2, 1, 1.2, 1, 1.2), "X"),
    "long-dot": ((10, 1.8, 1, 1.8), "P"),
    "short": ((2.2, 1), "p"),
}
# A colour is a family: references, partial sharing, one personal model each, and so on. Solid are
# the papers' own methods, dashed is FedAvg and nothing else.
_METHODS = {
    "ink": {
        "local": "dotted",
        "fedavg": "dashed",
        "fedavg_ft": "dash-dot",
        "fedprox": "long",
        "fedprox_ft": "dash-dot-dot",
        "lpft": "long-dot",
    },
    "green": {
        "fedper": "solid",
        "fedrep": "dotted",
        "lgfedavg": "dash-dot",
        "fedbn": "long",
        "fedpac": "dash-dot-dot",
        "fedas": "long-dot",
        "fedrod": "short",
    },
    "crimson": {
        "pfedhn": "solid",
        "pfedhn_pc": "dash-dot",
        "perfedavg": "dotted",
        "pfedme": "long",
        "ditto": "dash-dot-dot",
        "fedbabu": "long-dot",
    },
    "blue": {
        "pfedla": "solid",
        "heurpfedla": "dash-dot",
        "fedfomo": "dotted",
        "fedamp": "long",
        "heurfedamp": "dash-dot-dot",
        "fedfew": "long-dot",
    },
    "orange": {
        "flayer": "solid",
        "fedala": "dotted",
        "apple": "dash-dot",
        "gpfl": "long",
        "apfl": "dash-dot-dot",
    },
    "purple": {
        "fedaghn": "solid",
        "cfl": "dotted",
        "fedcp": "dash-dot",
        "feddbe": "long",
        "pfedfda": "dash-dot-dot",
        "fedproto": "long-dot",
    },
}
LOOKS = {
    method: Look(COLOURS[colour], *STYLES[style])
    for colour, family in _METHODS.items()
    for method, style in family.items()
}
PALETTE = {method: LOOKS[method].colour for method in LABELS}
DASHES = {method: LOOKS[method].dash for method in LABELS}
_IN_TURN = ("blue", "orange", "purple", "green", "crimson", "ink")  # of other names
_STYLES_IN_TURN = ("solid", "dotted", "dash-dot", "long", "dash-dot-dot", "dashed")


def looks(names: Sequence[str]) -> dict[str, Look]:
    """A look for every name: a method's own, whoever else is drawn.

    A variant of a method ("fedavg, lr 0.1") has its method's look or, where that is drawn too, its
    colour with another style. Other names take colours that no method here has, in turn.
    """
    out = {name: LOOKS[name] for name in names if name in LOOKS}
    for name in names:
        if name in out or (own := LOOKS.get(key(name))) is None:
            continue
        styles = [(own.dash, own.mark), *(STYLES[style] for style in _STYLES_IN_TURN)]
        every = [Look(own.colour, *style) for style in styles]
        out[name] = next((look for look in every if look not in out.values()), own)
    taken = {look.colour for look in out.values()}
    free = [COLOURS[c] for c in _IN_TURN if COLOURS[c] not in taken] or [*COLOURS.values()]
    for i, name in enumerate(name for name in names if name not in out):
        style = _STYLES_IN_TURN[(i + i // len(free)) % len(_STYLES_IN_TURN)]
        out[name] = Look(free[i % len(free)], *STYLES[style])
    return {name: out[name] for name in names}


def colours(names: Sequence[str]) -> dict[str, str]:
    """The colours of `looks`."""
    return {name: look.colour for name, look in looks(names).items()}


def dashes(names: Sequence[str]) -> dict[str, str | tuple[float, ...]]:
    """The line styles of `looks` ("" is solid)."""
    return {name: look.dash for name, look in looks(names).items()}


def line_style(dash: str | tuple[float, ...]) -> Any:
    """Dashes as matplotlib's `linestyle` has them."""
    return (0, dash) if dash else "-"


def names_of(frame: pd.DataFrame, column: str) -> list[str]:
    """Names in a column in order; of a categorical one all, so that panels share their looks."""
    values = frame[column]
    found = values.cat.categories if isinstance(values.dtype, pd.CategoricalDtype) else values
    return list(dict.fromkeys(found))


# -- panels ----------------------------------------------------------------------------------------


class Picture(Figure):
    """A figure that a notebook shows where it is the value of a cell."""

    def _repr_png_(self) -> tuple[bytes, dict[str, str]]:
        return compact(self), {"alt": described(self)}


def described(fig: Figure) -> str:
    """What a figure shows, for who cannot see it: its panels, axes, legend and caption."""
    said = [" ".join(text.split()) for ax in fig.axes if (text := ax.get_title())]
    axes = [(ax.get_xlabel(), ax.get_ylabel()) for ax in fig.axes]
    axes = [" against ".join(filter(None, (y, x))) for x, y in axes]
    keys = [legend for ax in fig.axes if (legend := ax.get_legend())] + fig.legends
    names = [text.get_text() for legend in keys for text in legend.get_texts()]
    parts = ["; ".join(dict.fromkeys(filter(None, of))) for of in (said, axes, names)]
    parts.append(" ".join(fig.get_supxlabel().split()))
    return ". ".join(part.rstrip(".") for part in parts if part) + "."


def note(fig: Figure, text: str) -> Figure:
    """Write a caption of profile, data and seeds below a figure."""
    lines = textwrap.fill(in_words(text), int(20 * fig.get_figwidth()))
    fig.supxlabel(lines, fontsize=7, color="0.35", x=0.01, ha="left")
    return fig


def panels(
    n: int, columns: int = 3, size: tuple[float, float] = PANEL, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of n panels, and the list of their axes.

    Parameters
    ----------
    n : int
        How many panels, at least one.
    columns : int
        How many stand in a row at most; rows are filled evenly.
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
    rows = -(-n // columns)
    columns = -(-n // rows)
    # Not through pyplot: it is not for threads (widgets are drawn in one), and keeps every figure.
    figsize = (size[0] * columns, size[1] * rows)
    fig = Picture(figsize=figsize, layout="constrained")
    shared: dict[str, Any] = {"sharey": True} | options
    grid = fig.subplots(rows, columns, squeeze=False, **shared)
    axes = list(grid.ravel())
    for ax in axes[n:]:
        ax.remove()
    return fig, axes[:n]


def not_run(ax: Axes, title: str) -> Axes:
    """Mark a panel of a paper's grid for which there are no runs."""
    ax.set_title(title)
    ax.text(0.5, 0.5, "not run", transform=ax.transAxes, ha="center", va="center", color="0.4")
    ax.patch.set_facecolor("0.95")
    ax.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
    sns.despine(ax=ax, left=True, bottom=True)
    return ax


def outer_labels(axes: Sequence[Axes], sharey: bool = False) -> None:
    """Name an axis once: a common x only where no panel is below, a shared y at the left only.

    Panels that were not run are left out of `axes`.
    """
    common = len({ax.get_xlabel() for ax in axes}) == 1
    places: list[Any] = [ax.get_subplotspec() for ax in axes]
    filled = [(p.rowspan.start, p.colspan.start) for p in places]
    for ax, (row, column) in zip(axes, filled, strict=True):
        if common and (row + 1, column) in filled:
            ax.set_xlabel("")
        first = min(c for r, c in filled if r == row)
        if sharey and column > first:
            ax.set_ylabel("")
        elif sharey:
            ax.tick_params(labelleft=True)


def entitle(ax: Axes, text: str) -> Axes:
    """Write a panel's title in words, in lines that fit its width."""
    place, figure = ax.get_subplotspec(), cast(Figure, ax.figure)
    columns = place.get_gridspec().ncols if place else 1
    letters = int(11 * min(PANEL[0], figure.get_figwidth() / columns)) - 1
    lines = [textwrap.fill(line, max(letters, 12)) for line in in_words(text).split("\n")]
    ax.set_title("\n".join(lines))
    return ax


def finish(ax: Axes, x: str, y: str, legend: bool = True) -> Axes:
    """Name both axes, take two spines off, and draw the legend beside the axes.

    Percentages stay within 0 and 100.
    """
    ax.set(xlabel=in_words(x), ylabel=in_words(y))
    if x in ("Communication round", "Client"):
        ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    for name, limits, bound in ((x, ax.get_xlim, ax.set_xbound), (y, ax.get_ylim, ax.set_ybound)):
        if "accuracy (%)" in name or "of a client (%)" in name:
            low, high = sorted(limits())
            bound(max(low, 0), min(high, 100))
    sns.despine(ax=ax)
    entries = {text: handle for handle, text in zip(*ax.get_legend_handles_labels(), strict=True)}
    if legend and entries:
        _widen(cast(Figure, ax.figure), beside(ax, entries), ax)
    return ax


def beside(ax: Axes, entries: dict[str, Any], title: str | None = None) -> float:
    """A legend right of the axes; returns the width that it takes, in inches."""
    ax.legend(
        entries.values(),
        entries.keys(),
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        borderaxespad=0,
        ncols=1 if len(entries) <= LONG else 2,
        title=title,
        **_LEGEND,
    )
    return _width(entries)


_LEGEND: dict[str, Any] = dict(
    frameon=False, fontsize=7, title_fontsize=7, alignment="left", handlelength=2.8
)


def _width(entries: Sequence[str] | dict[str, Any]) -> float:
    # About as wide as letters of 7 points are, behind the sample of a line.
    return (1 if len(entries) <= LONG else 2) * (0.5 + 0.056 * max(map(len, entries)))


def _widen(fig: Figure, by: float, ax: Axes) -> None:
    # Once for each column: panels below one another share the room.
    place = ax.get_subplotspec()
    if place is None or place.rowspan.start == 0:
        fig.set_figwidth(fig.get_figwidth() + by)


def share_legend(fig: Figure) -> None:
    """One legend beside all panels, in place of one beside each; its entries are theirs."""
    own = [(ax, legend) for ax in fig.axes if (legend := ax.get_legend())]
    if not own or len(fig.axes) < 2:
        return
    entries: dict[str, Any] = {}
    title = None
    for ax, legend in own:
        texts = [text.get_text() for text in legend.get_texts()]
        entries |= dict(zip(texts, legend.legend_handles, strict=True))
        _widen(fig, -_width(texts), ax)
        title = legend.get_title().get_text() or title
        legend.remove()
    where = dict(loc="outside right upper", title=title)
    fig.legend(entries.values(), entries.keys(), **where, **_LEGEND)
    fig.set_figwidth(fig.get_figwidth() + _width(entries))


def legend_above(fig: Figure) -> None:
    """One legend above all panels, in lines of four; its entries are theirs."""
    entries: dict[str, Any] = {}
    for ax in fig.axes:
        handles, texts = ax.get_legend_handles_labels()
        entries |= dict(zip(texts, handles, strict=True))
    where: dict[str, Any] = dict(loc="outside upper center", ncols=4)
    fig.legend(entries.values(), entries.keys(), **where, **_LEGEND)


def bounds(y: str) -> tuple[float, float] | None:
    """Between what a quantity lies, by the name of its axis: percentages, weights, AUC, ..."""
    if "(%)" in y:
        return 0.0, 100.0
    return (0.0, 1.0) if re.search(r"weight|CKA|AUC|F1|Test balanced", y, re.IGNORECASE) else None
