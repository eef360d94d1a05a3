"""Verdicts: the only place where a number is called reproduced, and a claim is said to hold."""

from __future__ import annotations

from typing import Any

import pandas as pd


def ordering(both: pd.DataFrame, column: str, row: str, own: str) -> str:
    """Whether a row stands to the paper's own as published, "kept" or "changed"; the own row to the best of the others."""
    c = both.loc[column].dropna(subset=["reported", "reproduced"])
    if row not in c.index or own not in c.index or len(c) < 2:
        return ""
    rest = c.drop(index=own)
    signs = []
    for v in ("reported", "reproduced"):
        other = rest[v].max() if row == own else c.loc[row, v]
        signs.append(c.loc[own, v] > other)
    return "kept" if signs[0] == signs[1] else "changed"


def of_cell(cell: Any) -> str:
    """The verdict of one compared cell (reported, reported_sd, reproduced, sd, difference, ordering, profile).

    reproduced: |difference| <= max(1 point, 2 x the larger sd); else "ordering kept" or "not reproduced". Only runs at profile paper are
    judged: others are "not run at paper scale".
    """
    if pd.isna(cell.reproduced):
        return "not run"
    if pd.isna(cell.reported):
        return "no published number"
    if cell.profile != "paper":
        return "not run at paper scale"
    spread = max([s for s in (cell.sd, cell.reported_sd) if not pd.isna(s)], default=0.0)
    if abs(cell.difference) <= max(1.0, 2 * spread):
        return "reproduced"
    return "ordering kept" if cell.ordering == "kept" else "not reproduced"


def of_claim(holds: bool | None) -> str:
    """The verdict of a claim that holds, does not, or could not be judged (None)."""
    return "not run" if holds is None else "holds" if holds else "does not hold"
