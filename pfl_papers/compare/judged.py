"""What holds: every lead, accuracy, order and claim of the papers' own data, judged in one place.

Only runs with a paper's own data, networks and clients count. README, notebooks, docs/results.md
and the report page take their words and their counts from here.
"""

from __future__ import annotations

import functools
from typing import Any

import pandas as pd

from pfl_core.analysis import verdicts
from pfl_core.analysis.noise import LEVEL
from pfl_core.analysis.select import tuples
from pfl_core.experiments.metrics import ROW_COLUMNS
from pfl_papers.compare import fullest, report
from pfl_papers.compare.priors import judged_columns
from pfl_papers.evidence import committed
from pfl_papers.evidence.contrasts import serves_one_model
from pfl_papers.evidence.tables import Results
from pfl_papers.papers import base as papers
from pfl_papers.papers.base import FULL, KINDS, PAPERS

# When the rules were committed. Of older runs the numbers were known when they were made.
RULES_OF = "2026-11-25T23:40:00Z"
LARGE = 2.0  # points: printed leads above it, and those of at most as much, are counted apart
RETROSPECTIVE, PROSPECTIVE = "retrospective", "prospective"
PERSONAL, ONE_MODEL = "personal", "one model"


def accuracies() -> pd.DataFrame:
    """Every published accuracy that was run, once: columns of `report.Every`, and three more.

    paper; kind ("personal" or "one model": what the row serves); dated ("retrospective" or
    "prospective").
    """
    return _each("accuracy", committed.results(), tuple(PAPERS)).copy()


def leads(name: str = "") -> pd.DataFrame:
    """Every printed lead of a paper's own method that was run, once; columns as `accuracies` has.

    kind is that of the other row.

    Parameters
    ----------
    name : str
        Of this paper alone; "" for all of them.
    """
    return _each("lead", committed.results(), (name,) if name else tuple(PAPERS)).copy()


def claims(name: str = "") -> pd.DataFrame:
    """Every claim of a paper, by default of all of them, with its verdict at the fullest profile.

    Columns of `report.claims`, paper, data, and dated.
    """
    known = committed.results()
    found = [_claims(each, known) for each in ([name] if name else PAPERS)]
    return pd.concat(found, ignore_index=True)


def of_paper(name: str, number: str) -> pd.DataFrame:
    """Accuracies ("accuracy") or leads ("lead") of one paper in all its tables, run or not."""
    return _of_paper(name, committed.results())[number].copy()


@functools.lru_cache(maxsize=4 * len(PAPERS))
def _of_paper(name: str, known: Results) -> dict[str, pd.DataFrame]:
    cells, leads = report.every(name)
    return {"accuracy": cells, "lead": leads}


@functools.lru_cache(maxsize=16)
def _each(number: str, known: Results, names: tuple[str, ...]) -> pd.DataFrame:
    found = [_of_paper(name, known)[number].assign(paper=name) for name in names]
    cells = pd.concat([of for of in found if len(of)] or found[:1], ignore_index=True)
    cells = cells[cells.reproduced.notna() & cells.verdict.isin([*report.WORDS])]
    once = ["paper", "row", "reported", "reproduced"]  # tables may print a number again
    cells = cells.assign(reported=cells.reported.round(6), reproduced=cells.reproduced.round(6))
    cells = cells.drop_duplicates(once).reset_index(drop=True)
    kind = [ONE_MODEL if serves_one_model(row) else PERSONAL for row in cells.row]
    dated = [_dated(v.paper, v.table, v.row, v.setting) for v in tuples(cells)]
    return cells.assign(kind=kind, dated=dated)


@functools.lru_cache(maxsize=4 * len(PAPERS))
def _claims(name: str, known: Results) -> pd.DataFrame:
    every = _best_claims(name).assign(paper=name)
    return every.assign(dated=[_dated(v.paper, v.artefact) for v in tuples(every)])


def _dated(paper: str, artefact: str, row: str = "", column: str = "") -> str:
    # Prospective if all runs began after the rules were committed.
    known = committed.results()
    of = known.cells[(known.cells.paper == paper) & (known.cells.artefact == artefact)]
    of = of[of.profile.isin(FULL)]
    of = of[of.column == column] if column else of
    of = of[of.row.isin([row, papers.paper(paper).own])] if row else of
    dates = known.runs.date.reindex(of.run.unique())
    return PROSPECTIVE if len(dates) and (dates > RULES_OF).all() else RETROSPECTIVE


def _best_claims(name: str) -> pd.DataFrame:
    """A paper's claims, each from the fullest profile at which it was judged.

    A verdict that rests on too few runs gives way to any other.
    """
    none = report.claims(name, pd.DataFrame(columns=ROW_COLUMNS))
    out = [none.assign(data="")]
    for part in fullest.parts(name):
        judged = report.claims_of(part)
        out.append(judged[judged.verdict != "not run"].assign(data=part.data))
    placed = [judged.rename_axis("place").reset_index() for judged in out]
    found = fullest.fullest(placed, ["place"], _worth_of_claims).sort_values("place")
    return found.drop(columns="place").reset_index(drop=True)


def _worth_of_claims(judged: pd.DataFrame) -> pd.Series:
    return (judged.verdict != "not run") * (1 + ~judged.reason.isin(["one seed", "rows missing"]))


# -- order -----------------------------------------------------------------------------------------


def orders() -> pd.DataFrame:
    """How our order of methods is that of a paper: a line a column and kind of rows.

    Columns: paper, table, column, kind, and those of `verdicts.Order`; only where three rows or
    more of a kind were run.
    """
    out, noisy = [], judged_columns()
    for keys, of in accuracies().groupby(["paper", "table", "column", "kind"], sort=False):
        paper, table, column, kind = map(str, keys)
        if len(of) < 3 or (paper, table, column) not in noisy:
            continue
        own = noisy[paper, table, column].raw()["own" if kind == PERSONAL else "shared"]
        draws = papers.paper(paper).draws
        found = verdicts.order(of.reported, of.reproduced, own, int(of.n.min()), draws)
        out.append(dict(paper=paper, table=table, column=column, kind=kind) | found._asdict())
    columns = ["paper", "table", "column", "kind", *verdicts.Order._fields]
    return pd.DataFrame(out, columns=columns)


# -- counts ----------------------------------------------------------------------------------------


def summary() -> dict[str, Any]:
    """All counts, once: what README, notebooks, docs and the report page say.

    leads: {(kind, "above 2" | "at most 2" | "behind"): {word: count}}, of retrospective and
    prospective runs together; "behind": the paper prints its own method below the other.
    nearing: {word: how many of these leads, ahead or behind, near 0 in the last quarter}.
    chance: how many of these leads would be ahead, or behind, by chance were all methods equal.
    accuracies: {word: count}.
    claims: {kind: {word: count}}.
    prospective: how many leads, accuracies and claims rest on runs younger than the rules.
    """
    ours, cells, said = leads(), accuracies(), claims()
    judged = ours[ours.low.notna()]
    ran = said[said.verdict.isin([*verdicts.CLAIMS, verdicts.DEPENDS])]
    return dict(
        leads=counted(ours),
        nearing=nearing(ours),
        chance={
            kind: (1 - LEVEL) / 2 * int((judged.kind == kind).sum())
            for kind in (PERSONAL, ONE_MODEL)
        },
        accuracies=tally(cells.verdict),
        claims={k: tally(of) for k in KINDS if len(of := ran.verdict[ran.kind == k])},
        prospective={
            what: int((of.dated == PROSPECTIVE).sum())
            for what, of in dict(leads=ours, accuracies=cells, claims=ran).items()
        },
    )


def counted(leads: pd.DataFrame) -> dict[tuple[str, str], dict[str, int]]:
    """Leads by kind and size, as `summary` has them: {(kind, size): {verdict: count}}.

    Parameters
    ----------
    leads : DataFrame
        As `leads` gives them.
    """
    size = leads.reported.map(size_of)
    return {
        (kind, which): tally(leads[(leads.kind == kind) & (size == which)].verdict)
        for kind in (PERSONAL, ONE_MODEL)
        for which in SIZES
    }


def nearing(leads: pd.DataFrame) -> dict[str, int]:
    """Leads, ahead or behind, that near 0 in the last quarter of the rounds: {verdict: count}.

    Parameters
    ----------
    leads : DataFrame
        As `leads` gives them.
    """
    return tally(leads[leads.verdict.isin(["ahead", "behind"]) & leads.nears.eq(True)].verdict)


ABOVE, AT_MOST, BEHIND = "above 2", "at most 2", "behind"
SIZES = {ABOVE: " above 2 points", AT_MOST: " of at most 2 points", BEHIND: ""}  # and in words


def size_of(printed: float) -> str:
    """One of `SIZES`: how large a printed lead is, in points."""
    if printed <= 0:
        return BEHIND
    return ABOVE if printed > LARGE else AT_MOST


def tally(words: pd.Series) -> dict[str, int]:
    """Verdicts that are there, counted, in one order: {verdict: count}."""
    order = dict.fromkeys([*verdicts.LEADS, *verdicts.ACCURACIES, *verdicts.CLAIMS])
    every = {word: int((words == word).sum()) for word in (*order, verdicts.DEPENDS)}
    return {word: n for word, n in every.items() if n}
