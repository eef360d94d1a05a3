"""Runs that diverged: they have no numbers, and their cells say how many of their seeds did.

A run that diverged is kept as a derived row of its cell, with the metric `METRIC`. Here `rows`
makes them, for committed runs, too; those that `sweep` leaves are taken out by `ended`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import pandas as pd

from pfl_core.analysis.select import grouped
from pfl_core.data.pools import DatasetMissing
from pfl_core.experiments import lookup
from pfl_core.experiments.experiment import TAGS, Experiment
from pfl_core.experiments.metrics import DIVERGED, LOST, ROW_COLUMNS
from pfl_papers.evidence import committed, tables

METRIC, WORD = DIVERGED, LOST[DIVERGED]


def ended(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of runs that ended well, of those that `sweep` returned."""
    return rows[~rows.metric.isin(list(LOST))].reset_index(drop=True)


def rows(cells: Iterable[Experiment], train: bool = False) -> pd.DataFrame:
    """The rows of those among some Experiments whose run diverged, in the store or in results/.

    Parameters
    ----------
    cells : iterable of Experiment
    train : bool
        Whether results/ is left out.
    """
    found = [row for e in cells if (row := _row(e, train)) is not None]
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=ROW_COLUMNS)


def _row(e: Experiment, train: bool) -> pd.DataFrame | None:
    with contextlib.suppress(DatasetMissing):
        if found := lookup.stored(e):
            return None if found.ok else _made(found.rows).assign(**_tags(e))
    run = None if train else committed.find(e)
    if run is None or not committed.status(run).startswith("failed"):
        return None
    return _made(tables.results().rows_of(run, _tags(e)))


def _tags(e: Experiment) -> dict[str, str]:
    return {tag: e.tags.get(tag, "") for tag in TAGS}


def _made(measured: pd.DataFrame) -> pd.DataFrame:
    end = float(measured["rounds"].max())
    derived = dict(when="", split="", average="derived", metric=METRIC, value=end)
    return measured.tail(1).assign(**derived, rounds=int(end))


def said(rows: pd.DataFrame) -> dict[tuple[str, str], str]:
    """{(row, column): "diverges (3 of 4)"}, of how many runs, for each cell of which some did.

    Parameters
    ----------
    rows : DataFrame
        Of the runs that ended well, and of those that diverged.
    """
    lost = rows[rows.metric == METRIC]
    some = rows[rows.row.isin(lost.row) & rows.column.isin(lost.column)]
    out: dict[tuple[str, str], str] = {}
    for (row, column), own in grouped(some, ["row", "column"]):
        if n := own.run[own.metric == METRIC].nunique():
            out[row, column] = f"{WORD} ({n} of {own.run.nunique()})"
    return out


def marked(table: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """A table of text, its rows and columns named as those of `rows`, that says what diverged.

    A cell with a number keeps it: that of the runs that ended well.
    """
    table = table.copy()
    for (row, column), text in said(rows).items():
        known = row in table.index and column in table.columns
        number = str(table.loc[row, column]) if known else ""
        number = "" if number in ("", "nan", "not run") else f"{number}, "
        table.loc[row, column] = number + text
    return table.fillna("not run")
