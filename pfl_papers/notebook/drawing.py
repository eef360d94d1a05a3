"""What figures show beside our numbers: published ones, and what the most common label gives."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from pfl_core.analysis import plots
from pfl_core.analysis.select import tuples
from pfl_papers.compare import report
from pfl_papers.evidence.contrasts import majority
from pfl_papers.papers import base, overrides
from pfl_papers.papers.base import Paper, Scope


def with_levels(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with a column `level`: accuracy (%) of each client's most common label, by their run."""
    levels = {run: majority(run) for run in rows.run.unique()}
    return rows.assign(level=rows.run.map(levels))


def with_published(rows: pd.DataFrame, paper: Paper, artefact: str) -> pd.DataFrame:
    """Rows with a column `published`: the accuracy (%) that the paper prints, else NaN.

    It is taken from the artefact itself or from a table with the same row and column, and only for
    runs that are like the paper's there (`report.unlike`) and that no reader changed.
    """
    printed: dict[tuple[str, str], float] = {}
    if paper.tables and not overrides.in_rows(rows):
        said = base.reported(paper)
        said = said[said.metric == "acc_pct"]
        said = pd.concat([said[said.table == artefact], said])  # the artefact's own come first
        said = said.drop_duplicates(["row", "column"])
        known = dict(zip(zip(said.row, said.column, strict=True), said.value, strict=True))
        for v in tuples(rows.drop_duplicates(["row", "column"])):
            named = (v.row, v.column) in known
            if named and not report.unlike(paper, artefact, v.row, v.column, v.run):
                printed[v.row, v.column] = known[v.row, v.column]
    cells = zip(rows.row, rows.column, strict=True)
    return rows.assign(published=[printed.get(cell, float("nan")) for cell in cells])


def whole(
    paper: Paper, scope: Scope, artefact: str, ran: dict[str, bool], rows: pd.DataFrame
) -> dict[str, bool]:
    """Panels of a paper's figure in its order, with whether they were run.

    Those that were not come last where a column has several panels, which would not stand together.
    Only those that were where data, or what a reader changed, are not the paper's, and where panels
    are no columns of the figure.

    Parameters
    ----------
    paper : Paper
    scope : Scope
        The paper's profile, with what a reader restricted it to.
    artefact : str
    ran : {panel: True}
        Their names begin with those of columns.
    rows : DataFrame
        Of their runs.
    """
    full = set(map(overrides.profile_of, rows.profile)) <= set(base.FULL)
    if not full or overrides.in_rows(rows):
        return ran
    planned = [s for s in paper.planned(scope, artefact) if s.artefact == artefact]
    columns = list(dict.fromkeys(c for s in planned for c in s.columns))
    of = {panel: column_of(paper.printed(panel), columns) for panel in ran}
    if not all(of.values()):
        return ran
    each = [[p for p, own in of.items() if own == column] or [column] for column in columns]
    if max(map(len, each)) > 1:  # side by side, whatever else was run
        each.sort(key=lambda panels: panels[0] not in ran)
    return {panel: panel in ran for panels in each for panel in panels}


def column_of(panel: str, columns: Sequence[str]) -> str:
    """The column that a panel is of, or that its name begins with; "" if there is none."""
    found = [c for c in columns if panel == c or panel.startswith((f"{c}, ", f"{c}: "))]
    return max(found, key=len, default="")


def beside_published(compared: pd.DataFrame) -> Figure | None:
    """A panel a column of `report.compare`: its published and our accuracies, with intervals.

    None where no number of ours may stand beside a published one.
    """
    both = compared.dropna(subset=["reported", "reproduced"])
    if both.empty:
        return None
    columns = list(dict.fromkeys(both.column))
    most = int(both.column.value_counts().max())
    size = (plots.PANEL[0], 0.9 + 0.22 * most)
    fig, axes = plots.panels(len(columns), size=size, sharey=False)
    for ax, column in zip(axes, columns, strict=True):
        plots.reported(both[both.column == column], ax).set_title(column)
    plots.outer_labels(axes)
    return fig
