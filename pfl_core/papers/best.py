"""The best evidence that is committed or kept of an artefact: profile paper, else medium."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from pfl_core.experiments import committed
from pfl_core.papers.base import FULL, TUNING, Paper, Scope
from pfl_core.util import paths

BEST = "best"  # as the profile of a notebook


def best(
    paper: Paper, scope: Scope, artefact: str, part: str | None = None
) -> tuple[Scope, pd.DataFrame] | None:
    """The fullest scope of which an artefact has enough rows, and these; None if none has.

    Enough is of a table the paper's own row and another in one column, of all else every run.
    Nothing is trained, and no data set is needed.

    scope: whose methods and seeds are asked for; with data sets of its own there is nothing better.
    part: only the sweeps of this part.
    """
    for profile in reversed(FULL) if not scope.datasets else ():
        full = replace(scope, profile=profile)
        label = paths.label(profile, full.label)
        kept = committed.parts(paper.key, own=True).get(f"{paper.key}.{label}")
        if kept is None or (artefact != TUNING and paper.missing(full, artefact)):
            continue
        planned = [s for s in paper.planned(full, artefact, part) if s.artefact == artefact]
        cells = {(r, c, n) for s in planned for r in s.rows for c in s.columns for n in s.seeds}
        rows = kept.rows()
        rows = rows[rows.artefact == artefact]
        made = rows.average == "derived"
        rows, derived = rows[~made], rows[made]
        if rows.empty:
            continue
        rows = rows[[cell in cells for cell in zip(rows.row, rows.column, rows.seed, strict=True)]]
        there = rows.drop_duplicates(["row", "column", "seed"])
        each = there.groupby("column").row.agg(set)
        table = artefact in paper.tables and any(paper.own in r and len(r) > 1 for r in each)
        if table or 0 < len(there) == len(cells):
            own = derived[derived.run.isin(rows.run)]
            return full, pd.concat([rows, own], ignore_index=True)
    return None
