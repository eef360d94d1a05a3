"""Readings of what a paper leaves open: a verdict that one of them changes depends on it.

A reading puts rows of ours into the place of others. It decides what is said of these alone: their
numbers change the noise of their columns, too, but of two other rows the runs say what they said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pandas as pd

from pfl_core.analysis import verdicts
from pfl_core.analysis.verdicts import Contrast, Verdict
from pfl_papers.evidence.contrasts import READ_AFTER, Evidence
from pfl_papers.papers import base as papers
from pfl_papers.papers.base import Paper

AS_RUN = "as run"


class Read(NamedTuple):
    """Rows under a reading.

    Attributes
    ----------
    says : str
        The reading, or "as run".
    rows : DataFrame
    cells : set of (row, column)
        Those that are another row's here.
    """

    says: str
    rows: pd.DataFrame
    cells: frozenset[tuple[str, str]] = frozenset()


def read(rows: pd.DataFrame, paper: Paper) -> list[Read]:
    """Rows as run, then under every declared reading that they have runs of."""
    found = [Read(AS_RUN, rows)]
    for reading in papers.readings(paper):
        if set(reading.runs).intersection(rows.row.unique()):
            cells = _taken(rows, reading.runs)
            found.append(Read(reading.says, swapped(rows, reading.runs), cells))
    return found


def swapped(rows: pd.DataFrame, runs: dict[str, str]) -> pd.DataFrame:
    """Rows in which those of `runs`, {row: another}, stand in the place of the other, by column."""
    other = rows[rows.row.isin(runs)]
    other = other.assign(row=other.row.map(runs))
    taken = pd.MultiIndex.from_frame(other[["column", "row"]].drop_duplicates())
    gone = pd.MultiIndex.from_frame(rows[["column", "row"]]).isin(taken)
    return pd.concat([rows[~rows.row.isin(runs) & ~gone], other])


def _taken(rows: pd.DataFrame, runs: dict[str, str]) -> frozenset[tuple[str, str]]:
    # The places that rows of `runs` take, and those of rows that are read from the same runs.
    there = rows[rows.row.isin(runs)][["row", "column"]].drop_duplicates()
    taken = {(runs[row], column) for row, column in there.itertuples(index=False)}
    after = {(r, c) for r, source in READ_AFTER.items() for row, c in taken if row == source}
    return frozenset(taken | after)


class Reread(Evidence):
    """Evidence under a reading, whose contrasts of other cells are those of the runs as they are.

    Parameters
    ----------
    as_run : Evidence
    read : Read
        The same runs under the reading.
    """

    def __init__(self, as_run: Evidence, read: Read):
        super().__init__(read.rows, as_run.paper, as_run.printed, as_run.priors)
        self._as_run, self._cells = as_run, read.cells

    def contrast(
        self, says: str, weights: Mapping[tuple[str, str], float], *args: Any, **how: Any
    ) -> Contrast:
        """As `Evidence.contrast`."""
        judge = super().contrast if self._cells.intersection(weights) else self._as_run.contrast
        return judge(says, weights, *args, **how)


def evidence(as_run: Evidence, paper: Paper) -> dict[str, Evidence]:
    """{reading: what a claim is judged by}, as run first."""
    _, *others = read(as_run.rows, paper)
    return {AS_RUN: as_run} | {other.says: Reread(as_run, other) for other in others}


def over(each: list[tuple[Read, pd.DataFrame]], beside: str = "") -> pd.DataFrame:
    """The lines as run, the first of `each`, whose verdicts hold under every reading of their rows.

    Where a reading gives another verdict, the verdict is that it depends on the reading.

    Parameters
    ----------
    each : list of (Read, DataFrame)
        Lines as `compare` has them, as run and under each reading.
    beside : str
        The row with which every line is compared.
    """
    (_, as_run), *others = each
    found = as_run.copy()
    keyed = [(read, frame.set_index(["row", "column"])) for read, frame in others]
    for i, line in found.iterrows():
        if line.verdict not in _JUDGED:
            continue
        key = line["row"], line["column"]
        places = {(row, line.setting) for row in (line["row"], beside)}
        said = {AS_RUN: _verdict(line)} | {
            read.says: _verdict(frame.loc[key])
            for read, frame in keyed
            if places & read.cells and key in frame.index
        }
        whole = verdicts.over_readings(said)._asdict()
        for name in found.columns.intersection([*whole]):
            found.at[i, name] = whole[name]
    return found


_JUDGED = (*verdicts.LEADS, *verdicts.ACCURACIES)


def _verdict(line: pd.Series) -> Verdict:
    return Verdict(**{name: line[name] for name in Verdict._fields if name in line})
