"""What all judged columns say of noise: each column's variance is drawn towards it."""

from __future__ import annotations

import functools

import pandas as pd

from pfl_core.analysis import noise
from pfl_core.analysis.noise import Column, Priors
from pfl_core.analysis.select import tuples
from pfl_papers.compare import fullest
from pfl_papers.evidence import committed
from pfl_papers.evidence.contrasts import ACCURACIES, column_of, reproduced
from pfl_papers.evidence.tables import Results
from pfl_papers.papers import base as papers
from pfl_papers.papers.base import FULL, Paper


def priors(rows: pd.DataFrame) -> Priors | None:
    """What the committed columns of all papers' own data say of the noise of some rows.

    None where these are of other data or networks.
    """
    return _priors(committed.results()) if set(rows.profile.unique()) & set(FULL) else None


def judged_columns() -> dict[tuple[str, str, str], Column]:
    """{(paper, table, column): it} of all real-data columns with a printed accuracy and two seeds.

    Each from the fullest profile; one whose runs all stand in another one is left out.
    """
    found: dict[tuple[str, str, str], tuple[frozenset[str], Column]] = {}
    for name in papers.PAPERS:
        found |= _columns(papers.paper(name))
    runs = [of for of, _ in found.values()]
    kept = {key: pair for key, pair in found.items() if not any(pair[0] < of for of in runs)}
    once = {of: key for key, (of, _) in reversed(kept.items())}  # of equal ones the first
    return {key: column for key, (of, column) in kept.items() if once[of] == key}


@functools.lru_cache(maxsize=4)
def _priors(known: Results) -> Priors:
    return noise.priors(judged_columns().values())


def _columns(paper: Paper) -> dict[tuple[str, str, str], tuple[frozenset[str], Column]]:
    out: dict[tuple[str, str, str], tuple[frozenset[str], Column]] = {}
    if not paper.tables:
        return out
    every = [part.rows() for part in fullest.parts(paper.key)]
    every = [rows[rows.metric.isin(ACCURACIES)] for rows in every]
    said = papers.reported(paper)
    said = said[said.metric.isin(ACCURACIES)]
    for v in tuples(said.drop_duplicates(["table", "metric", "column"])):
        for rows in every:  # a fuller profile comes later
            of = rows[(rows.artefact == v.table) & (rows.column == v.column)]
            of = reproduced(of, paper, v.metric) if len(of) else of
            table = of.pivot_table(index="row", columns="seed", values="value", sort=False)
            if table.shape[1] > 1:
                column = column_of(table, papers.printed_rows(paper, v.table))
                out[paper.key, v.table, v.column] = frozenset(of.run), column
    return out
