"""Which evidence is shown where several profiles have some: the fullest, paper before medium."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import pandas as pd

from pfl_papers import places
from pfl_papers.evidence import committed, diverged
from pfl_papers.papers import base as papers
from pfl_papers.papers.base import FULL, PROFILES, TUNING, Paper, Scope, Sweep
from pfl_papers.papers.overrides import profile_of

BEST = "best"  # as the profile of a notebook


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
    place = {name: PROFILES.index(profile_of(name)) for name in rows.profile.unique()}
    most = max(place.values(), default=0)
    return rows[rows.profile.isin([name for name, at in place.items() if at == most])]


def best(
    paper: Paper, scope: Scope, artefact: str, part: str | None = None
) -> tuple[Scope, pd.DataFrame] | None:
    """The fullest scope of which an artefact has enough rows, and these; None if none has.

    Enough is of a table the paper's own row and another in one column, of a figure all rows of one
    column, of tuning every run. While a printed row of each such column has one seed, which has no
    interval, a smaller profile that has two of all comes first. Of a figure only those columns
    count, at the seeds that all of their rows have. Nothing is trained, and no data set is needed.

    Parameters
    ----------
    paper : Paper
    scope : Scope
        Whose methods and seeds are asked for; with data sets of its own, or with overrides, there
        is nothing better.
    artefact : str
    part : str, optional
        Only the sweeps of this part.
    """
    found = []
    for profile in reversed(FULL) if not (scope.datasets or scope.overrides) else ():
        full = replace(scope, profile=profile)
        if enough := _enough(paper, full, artefact, part):
            seeds, rows = enough
            if seeds > 1:
                return full, rows
            found.append((full, rows))
    return found[0] if found else None


def _enough(
    paper: Paper, full: Scope, artefact: str, part: str | None
) -> tuple[float, pd.DataFrame] | None:
    """The rows of an artefact at a profile, and how many seeds each printed row has; or None.

    Infinitely many where every planned run is there; parts of ours may lack some.
    """
    label = places.label(full.profile, full.label)
    kept = committed.parts(paper.key, own=True).get(f"{paper.key}.{label}")
    if kept is None or (artefact != TUNING and paper.missing(full, artefact)):
        return None
    planned = [s for s in paper.planned(full, artefact, part) if s.artefact == artefact]
    cells = _cells(planned)
    needed = _cells([s for s in planned if not s.part] or planned)
    rows = kept.rows()
    rows = rows[rows.artefact == artefact]
    made = rows.average == "derived"
    if made.all():
        return None
    # A run may serve cells that no run is planned for, in its own row: those are made, too.
    every = cells if part is None else _cells(paper.planned(full, artefact))
    served = ~_where(rows).isin(every) & rows.row.isin({row for row, _, _ in cells})
    rows, derived = rows[_where(rows).isin(cells) & ~made], rows[made | served]
    there = rows.drop_duplicates(["row", "column", "seed"])
    lost = derived[derived.metric == diverged.METRIC]
    lost = lost[_where(lost).isin(cells)]
    found = {*_where(there), *_where(lost)}
    seeds = float("inf") if len(there) and needed <= found else 0.0
    if artefact in paper.tables and not seeds:
        each = there.groupby("column").row.agg(set)
        compared = [c for c, r in each.items() if paper.own in r and len(r) > 1]
        there = there[
            there.column.isin(compared) & there.row.isin(papers.printed_rows(paper, artefact))
        ]
        many = there.groupby(["column", "row"]).seed.nunique().groupby("column").min()
        seeds = float(many.max()) if compared else 0.0
    elif artefact != TUNING and not seeds:
        whole = _whole(needed, found)
        rows, lost = (t[_where(t).isin(whole)] for t in (rows, lost))
        each = Counter(
            column for column, _ in {(column, seed) for _, column, seed in whole & needed}
        )
        seeds = float(max(each.values(), default=0))
    own = derived[derived.run.isin([*rows.run.unique(), *lost.run.unique()])]
    return (seeds, pd.concat([rows, own], ignore_index=True)) if seeds else None


def _whole(
    planned: set[tuple[str, str, int]], found: set[tuple[str, str, int]]
) -> set[tuple[str, str, int]]:
    # Of what was found: the seeds of each column that all of its planned rows have.
    lacking = {(column, seed) for _, column, seed in planned - found}
    return {(row, column, seed) for row, column, seed in found if (column, seed) not in lacking}


def _cells(planned: Iterable[Sweep]) -> set[tuple[str, str, int]]:
    # (row, column, seed) of runs.
    return {(r, c, n) for s in planned for r in s.rows for c in s.columns for n in s.seeds}


def _where(rows: pd.DataFrame) -> pd.MultiIndex:
    return pd.MultiIndex.from_frame(rows[["row", "column", "seed"]])
