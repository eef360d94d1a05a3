"""Figures of numbers over rounds and layers, with intervals over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from pfl_core.analysis.noise import Column
from pfl_core.analysis.plots.names import in_words
from pfl_core.analysis.plots.style import Look, bounds, finish, line_style, looks, names_of
from pfl_core.analysis.select import alike, replicates

FEW = 4  # lines of a panel with bands; more have a bar at their end
BESIDE = 4.0  # points from one such bar to the next
ACCURACY = "Test accuracy (%)"


def intervals(
    frame: pd.DataFrame, hue: str, x: str, within: tuple[float, float] | None = None
) -> pd.DataFrame:
    """Mean over seeds of `value` for each value of `hue` and `x`, with a 95 % t interval.

    The interval is that of `noise.Column.level`, with seeds as replicates and noise pooled over all
    rows (values of `hue`) that are drawn together; tables know more of the noise.

    Parameters
    ----------
    frame : DataFrame
        Columns `value`, `hue`, `x`, and `seed`; several lines of one seed are averaged.
    within : (float, float), optional
        Where intervals are cut off.

    Returns
    -------
    DataFrame
        Columns of `hue` and `x`, and value, low and high; NaN ends for one seed, or without `seed`.

    Raises
    ------
    ValueError
        If what would be averaged differs in more than the seed (`select.alike`).
    """
    alike(frame, [hue, x])
    frame = replicates(frame, [hue, x])
    # As text: groups of a categorical column would hold names that are not here.
    frame = frame.assign(**{hue: frame[hue].astype(str)}, seed=frame.get("seed", 0))
    each = frame.groupby([x, hue, "seed"], sort=False).value.mean().reset_index()
    out = []
    for at, part in each.groupby(x, sort=False):
        table = part.pivot(index=hue, columns="seed", values="value")
        column = Column(table)
        for name in dict.fromkeys(part[hue]):
            if table.loc[name].isna().all():
                continue
            found = column.level(name)
            ends = np.array([found.low, found.high])
            low, high = ends if within is None else np.clip(ends, *within)
            out.append({hue: name, x: at, "value": found.estimate, "low": low, "high": high})
    return pd.DataFrame(out, columns=[hue, x, "value", "low", "high"])


def curves(rows: pd.DataFrame, ax: Axes, hue: str = "row", y: str = ACCURACY) -> Axes:
    """Draw `value` against `rounds`, a line for each value of the column `hue`.

    The line is the mean over seeds. Up to four lines have a band, more a bar at the last round:
    the interval of `intervals`, where there are two seeds or more. Two columns are drawn if `rows`
    have them: `level`, what answering the most common label gives, as a thin line, and
    `published`, what the paper prints for that line, as a hollow mark at the last round.
    """
    names = names_of(rows, hue)
    found = looks(names)
    shown = intervals(rows, hue, "rounds", bounds(y)).sort_values("rounds")
    present = [name for name in names if name in set(shown[hue])]
    for place, name in enumerate(present):
        own = shown[shown[hue] == name]
        _line(ax, own, "rounds", found[name], in_words(name))
        if len(present) <= FEW:
            _band(ax, own["rounds"], own.low, own.high, found[name].colour)
        else:
            _bar(ax, own.iloc[-1:], "rounds", found[name], BESIDE * (place + 1))
    last = shown[shown["rounds"] == shown["rounds"].max()].dropna(subset=["low", "high"])
    if len(present) > FEW and len(last):
        _widen(ax, last, BESIDE * (len(present) + 1))
    _levels(rows, ax)
    _published(rows, ax, hue, present, found)
    return finish(ax, "Communication round", y)


def spread(rows: pd.DataFrame, ax: Axes, hue: str = "row") -> Axes:
    """Draw how clients spread, against the round; seeds are averaged.

    A line is the mean over clients, its band one standard deviation over clients to both sides, and
    two thin lines are the worst and the best client. `rows` hold the metrics acc_pct, acc_sd,
    acc_min and acc_max, and may have a `level` as for `curves`.
    """
    names = names_of(rows, hue)
    found = looks(names)
    for name in names:
        own = rows[rows[hue] == name]
        if own.empty:
            continue
        wide = own.pivot_table(index="rounds", columns="metric", values="value", aggfunc="mean")
        wide = wide.clip(0, 100).assign(rounds=wide.index)
        _line(ax, wide.rename(columns={"acc_pct": "value"}), "rounds", found[name], in_words(name))
        low, high = wide.acc_pct - wide.acc_sd, wide.acc_pct + wide.acc_sd
        _band(ax, wide["rounds"], low.clip(lower=0), high.clip(upper=100), found[name].colour)
        for edge in ("acc_min", "acc_max"):
            ax.plot(wide.index, wide[edge], color=found[name].colour, lw=0.6, ls=":")
    ax.plot([], [], color="0.4", lw=0.6, ls=":", label="Worst and best client")
    _levels(rows, ax)
    return finish(ax, "Communication round", ACCURACY)


def layers(
    frame: pd.DataFrame, ax: Axes, hue: str = "row", y: str = "Value", numbers: bool = False
) -> Axes:
    """Draw `value` against `layer` in order of appearance, a line for each value of `hue`.

    Means with intervals (`intervals`); one or two layers are dots without a line between them.

    Parameters
    ----------
    frame : DataFrame
        Columns value, layer, `hue`, and seed where there are several.
    numbers : bool
        Print the means: at the dots of up to six layers; of more, over all layers below the axis.
    """
    frame = frame.assign(layer=frame.layer.astype(str))
    names, order = names_of(frame, hue), list(dict.fromkeys(frame.layer))
    found = looks(names)
    shown = intervals(frame, hue, "layer", bounds(y))
    shown = shown.assign(at=[float(order.index(layer)) for layer in shown.layer])
    present = [name for name in names if name in set(shown[hue])]
    for place, name in enumerate(present):
        own = shown[shown[hue] == name].sort_values("at")
        look, text = found[name], in_words(name)
        aside = 5.0 * (place - (len(present) - 1) / 2) if len(order) <= 2 else 0.0
        _bar(ax, own, "at", look, aside, joined=len(order) > 2, text=text)
    if numbers and len(order) <= SIX:
        _print(ax, shown)
        if limits := bounds(y):  # with room for the numbers above
            ax.set_ylim(limits[0], limits[1] + 0.15 * (limits[1] - limits[0]))
    _name_layers(ax, order)
    means = shown.groupby(hue, sort=False).value.mean()
    said = ", ".join(f"{in_words(name)} {means[name]:.2f}" for name in present)
    return finish(ax, f"Mean: {said}" if numbers and len(order) > SIX else "", y)


SIX = 6  # layers with printed numbers: more would overlap


def _name_layers(ax: Axes, order: Sequence[str]) -> None:
    # Upright where names are too long to stand side by side.
    ax.set_xticks(range(len(order)), [in_words(name) for name in order])
    ax.set_xlim(-0.4, len(order) - 0.6)
    if sum(len(name) + 2 for name in order) > 40:
        ax.tick_params(axis="x", rotation=90)


def _line(ax: Axes, own: pd.DataFrame, x: str, look: Look, text: str) -> None:
    every = max(1, len(own) // 8)
    how: dict[str, Any] = dict(color=look.colour, ls=line_style(look.dash), lw=1.3, label=text)
    ax.plot(own[x], own.value, marker=look.mark, ms=3.2, mew=0, markevery=every, **how)


def _band(ax: Axes, x: pd.Series, low: pd.Series, high: pd.Series, colour: str) -> None:
    if low.notna().any():
        ax.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)


def _bar(
    ax: Axes,
    own: pd.DataFrame,
    x: str,
    look: Look,
    aside: float,
    joined: bool = False,
    text: str | None = None,
) -> None:
    """Means with bars from low to high, moved to the right by `aside` points."""
    moved = ax.transData
    if aside:
        moved = moved + ScaledTranslation(aside / 72, 0, ax.figure.dpi_scale_trans)
    if text is not None:
        style = line_style(look.dash) if joined else "none"
        mark: dict[str, Any] = dict(marker=look.mark, ms=4, mew=0, label=text, transform=moved)
        ax.plot(own[x], own.value, color=look.colour, ls=style, lw=1.2, **mark)
    if own.low.notna().any():
        ax.vlines(own[x], own.low, own.high, color=look.colour, lw=1, alpha=0.8, transform=moved)


def _widen(ax: Axes, last: pd.DataFrame, room: float) -> None:
    # Make the axes end `room` points after the last number, and hold its bars.
    end = last["rounds"].max()
    ax.update_datalim([(end, last.low.min()), (end, last.high.max())])
    ax.autoscale_view()
    left, right = ax.get_xlim()
    share = room / 72 / (ax.get_position().width * cast(Figure, ax.figure).get_figwidth())
    ax.set_xlim(left, max(right, left + (end - left) / (1 - share)))


def _print(ax: Axes, shown: pd.DataFrame) -> None:
    # The largest mean of a layer stands above its dot, the smallest below.
    box = dict(boxstyle="square,pad=0.1", fc="white", ec="none", alpha=0.8)
    for at, part in shown.groupby("at"):
        ends = part.value.nlargest(1), part.value.nsmallest(1)
        for values, up in zip(ends[: len(part)], (1, -1), strict=False):
            where: dict[str, Any] = dict(xytext=(0, 6 * up), va="bottom" if up > 0 else "top")
            ax.annotate(
                f"{values.iloc[0]:.2f}",
                (at, values.iloc[0]),
                textcoords="offset points",
                ha="center",
                fontsize=6,
                bbox=box,
                zorder=4,
                **where,
            )
    ax.margins(y=0.2)


def _levels(rows: pd.DataFrame, ax: Axes) -> None:
    """A thin line at what the clients' most common labels alone give, if `rows` say it."""
    if "level" in rows and not np.isnan(level := rows.level.mean()):
        ax.axhline(
            level, color="0.5", lw=0.9, ls=(0, (1, 2.5)), zorder=0, label="Most common label"
        )


def _published(
    rows: pd.DataFrame, ax: Axes, hue: str, names: Sequence[str], found: dict[str, Look]
) -> None:
    """Hollow marks at the last round for what the paper prints, if `rows` say it."""
    if "published" not in rows:
        return
    said = rows.dropna(subset=["published"]).drop_duplicates(hue).set_index(hue).published
    end, text = rows["rounds"].max(), "Published"
    for name in names:
        if name in said:
            how: dict[str, Any] = dict(mfc="white", mec=found[name].colour, mew=1.2, ms=6)
            how["clip_on"] = False
            ax.plot([end], [said[name]], found[name].mark, label=text, zorder=5, **how)
            text = None
