"""Verdicts: the only place where a number is called reproduced, and a claim is said to hold."""

from __future__ import annotations

from typing import Any

import pandas as pd


def ordering(both: pd.DataFrame, column: str, row: str, own: str) -> str:
    """Whether a row and the paper's own row are in the same order here as in the paper.

    The own row itself is held against the best of the others.

    Parameters
    ----------
    both : DataFrame
        Columns `reported` and `reproduced`; its index is (column, row).
    column, row : str
        The cell to look at.
    own : str
        The row of the paper's own method.

    Returns
    -------
    str
        "kept" or "changed"; "" where one of the two rows lacks a number.
    """
    cells = both.loc[column].dropna(subset=["reported", "reproduced"])
    if row not in cells.index or own not in cells.index or len(cells) < 2:
        return ""
    others = cells.drop(index=own) if row == own else cells.loc[[row]]
    ahead_reported, ahead_reproduced = (
        cells.loc[own, source] > others[source].max() for source in ("reported", "reproduced")
    )
    return "kept" if ahead_reported == ahead_reproduced else "changed"


def of_cell(cell: Any) -> str:
    """The verdict of one cell of a table: the paper's number against ours.

    It is "reproduced" if the two differ by at most 1 point, or by at most twice the larger standard
    deviation. Else it is "ordering kept" or "not reproduced". Only runs at profile paper are
    judged; others are "not run at paper scale".

    Parameters
    ----------
    cell : Series or namedtuple
        Fields `reported`, `reported_sd`, `reproduced`, `sd` and `difference` (NaN where there is
        none), `ordering` (of `ordering`) and `profile`.
    """
    if pd.isna(cell.reproduced):
        return "not run"
    if pd.isna(cell.reported):
        return "no published number"
    if cell.profile != "paper":
        return "not run at paper scale"
    known = [sd for sd in (cell.sd, cell.reported_sd) if not pd.isna(sd)]
    if abs(cell.difference) <= max(1.0, 2 * max(known, default=0.0)):
        return "reproduced"
    return "ordering kept" if cell.ordering == "kept" else "not reproduced"


def of_claim(holds: bool | None) -> str:
    """The verdict of a claim that holds, does not hold, or could not be judged (None)."""
    if holds is None:
        return "not run"
    return "holds" if holds else "does not hold"
