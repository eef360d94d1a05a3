"""Which evidence is shown where several profiles have some: the fullest, paper before medium."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pandas as pd

from pfl_papers.evidence import committed
from pfl_papers.papers.base import FULL, PROFILES


def parts(paper: str) -> list[committed.Part]:
    """A paper's committed results of its own setting, the fullest last; quick counts nowhere."""
    found = [part for part in committed.parts(paper).values() if part.profile in FULL]
    return sorted(found, key=lambda part: FULL.index(part.profile))


def fullest(
    judged: Iterable[pd.DataFrame], by: list[str], worth: Callable[[pd.DataFrame], pd.Series]
) -> pd.DataFrame:
    """Keep one line of each thing: that of the greatest worth, of equal ones the last.

    Parameters
    ----------
    judged : frames
        What was made of each profile's runs, the fullest last.
    by : list of str
        Columns that say of what a line is.
    worth : function
        A number a line, by which what rests on too few runs gives way to a smaller profile.
    """
    both = pd.concat(judged, ignore_index=True)
    order = worth(both).sort_values(kind="stable")
    return both.loc[order.index].drop_duplicates(by, keep="last")


def of_fullest_profile(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the fullest profile among some."""
    place = rows.profile.map(PROFILES.index)
    return rows[place == place.max()]
