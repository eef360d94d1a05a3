"""Claims as lines: published/<paper>.claims.csv, read here and nowhere else.

Columns: key, artefact (whose runs decide it), where (in the paper), judge (one of
`evidence.judges.JUDGES`, or a function of the paper's file), compares and how (see
`evidence.asks`), says (in the paper's words or near to them), limit (a threshold that is ours, in
words), kind, why_kind (why it holds by construction), status (what a person found out about its
contradiction).
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Callable, Iterator
from importlib import resources

import pandas as pd

from pfl_core.analysis.verdicts import Contrast
from pfl_core.util import checks
from pfl_papers.evidence import asks, judges
from pfl_papers.evidence.asks import Ask, Terms
from pfl_papers.evidence.contrasts import READ_AFTER, Evidence, with_past
from pfl_papers.papers.base import KINDS, PROFILES, Claim, Paper, Scope, reported

COLUMNS = "key artefact where judge compares how says limit kind why_kind status".split()
PUBLISHED = resources.files("pfl_papers.papers") / "published"
LEAST_SIDES = {"ahead": 2, "ladder": 3, "best": 1, "alike": 1, "change": 2, "equal": 2}
MOST_SIDES = {"ahead": 2, "best": 1, "alike": 1, "equal": 2}
CLOSE = ("alike", "equal")  # judges that need `within`
OF_COLUMNS = ("change", "equal")  # judges that compare columns, of a row


def read(
    paper: str, terms: Terms, **own: Callable[[Evidence], list[Contrast]]
) -> tuple[Claim, ...]:
    """The claims of a paper.

    Parameters
    ----------
    paper : str
        Its key.
    terms : Terms
        What its judges have to know of its metrics, and of the rows that are ours.
    own : functions from Evidence to contrasts
        Claims outside of the shared vocabulary name one as their judge.

    Raises
    ------
    ValueError
        What a line lacks or has too much, with its file and number.
    """
    out: list[Claim] = []
    for where, line in _lines(paper):
        try:
            out.append(_claim(paper, line, terms, own))
            if out[-1].key in [claim.key for claim in out[:-1]]:
                raise ValueError(f"key {out[-1].key!r} stands twice")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return tuple(out)


def _lines(paper: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Each line with where it stands."""
    name = f"{paper}.claims.csv"
    with (PUBLISHED / name).open(encoding="utf-8") as f:
        first, *lines = csv.reader(f)
    if first != COLUMNS:
        raise ValueError(f"{name}, line 1: allowed are the columns {', '.join(COLUMNS)}")
    for n, line in enumerate(lines, 2):
        if len(line) != len(COLUMNS):
            raise ValueError(f"{name}, line {n}: {len(line)} values for {len(COLUMNS)} columns")
        yield f"{name}, line {n}", dict(zip(COLUMNS, line, strict=True))


def _claim(
    paper: str,
    line: dict[str, str],
    terms: Terms,
    own: dict[str, Callable[[Evidence], list[Contrast]]],
) -> Claim:
    for name in ("key", "artefact", "where", "says"):
        if not line[name]:
            raise ValueError(f"{name} is missing")
    checks.known("kind", line["kind"], KINDS)
    if (line["kind"] == KINDS[-1]) != bool(line["why_kind"]):
        raise ValueError(f"kind {line['kind']!r}: why_kind is for {KINDS[-1]!r}, which needs it")
    judge, ask = line["judge"], None
    checks.known("judge", judge, [*judges.JUDGES, *own])
    if judge in judges.JUDGES:
        ask = _asked(paper, line, terms)
        decide = functools.partial(judges.judge, ask)
    elif line["compares"] or line["how"]:
        raise ValueError(f"judge {judge!r} is a function: compares and how are to be empty")
    else:
        decide = own[judge]
    decide = functools.partial(with_past, decide)
    said = {name: line[name] for name in ("key", "where", "says", "limit", "kind")}
    most = ask is not None and ask.most
    return Claim(
        **said, needs=line["artefact"], judge=decide, most=most, status=line["status"], ask=ask
    )


def _asked(paper: str, line: dict[str, str], terms: Terms) -> Ask:
    judge = line["judge"]
    printed = functools.partial(_printed, paper, line["artefact"])
    given = asks.options(line["how"])
    ask = Ask(judge, asks.comparisons(line["compares"]), **given, terms=terms, printed=printed)
    for part in ask.comparisons:
        most = MOST_SIDES.get(judge, len(part.sides))
        if not LEAST_SIDES[judge] <= len(part.sides) <= most:
            raise ValueError(f"compares {line['compares']!r}: not what judge {judge!r} compares")
    if (judge in CLOSE) != ("within" in given) or ("row" in given) < (judge in OF_COLUMNS):
        needs = "within" if judge in CLOSE else "row, and no within"
        raise ValueError(f"how {line['how']!r}: judge {judge!r} needs {needs}")
    said = re.findall(r"\d+(?:\.\d+)?", f"{line['limit']} {line['says']}")
    for number in {abs(ask.by), ask.within} - {0.0, *map(float, said)}:
        raise ValueError(f"limit {line['limit']!r}: neither it nor says tells of {number:g}")
    return ask


@functools.cache
def _printed(paper: str, table: str, column: str) -> pd.Series:
    """The accuracies that a paper prints in a column, by row."""
    said = reported(paper)
    said = said[(said.table == table) & (said.column == column) & (said.metric == "acc_pct")]
    return said.drop_duplicates("row").set_index("row").value


# -- labels ----------------------------------------------------------------------------------------


def check(paper: Paper) -> None:
    """See that each name in a paper's claims is one of its artefact's.

    Raises
    ------
    ValueError
        An artefact, row, column or metric that is not, with its file and line.
    """
    for (where, _), claim in zip(_lines(paper.key), paper.claims, strict=True):
        try:
            checks.known("artefact", claim.needs, paper.artefacts)
            if claim.ask:
                _check(claim.ask, labels(paper, claim.needs))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def labels(paper: Paper, artefact: str) -> tuple[set[str], set[str]]:
    """All rows and columns of an artefact, printed or run at any profile."""
    rows, columns = (set(names) for names in paper.artefacts[artefact].makes)
    for profile in PROFILES:
        for sweep in paper.planned(Scope(profile), artefact):
            if sweep.artefact == artefact:
                rows |= set(sweep.rows)
                columns |= set(sweep.columns)
    rows |= {other for other, row in READ_AFTER.items() if row in rows}
    said = reported(paper) if paper.tables else pd.DataFrame(columns=["table", "row", "column"])
    said = said[said.table == artefact]
    return rows | set(said.row), columns | set(said.column)


def _check(ask: Ask, known: tuple[set[str], set[str]]) -> None:
    compared = [name for part in ask.comparisons for name in part.names]
    but = [name.partition(" @ ") for name in ask.but]
    rows = [ask.row, *(row for row, _, _ in but)]
    columns = [where for _, _, where in but] + [c for part in ask.comparisons for c in part.columns]
    metrics = [ask.metric]
    over = metrics if ask.metrics else columns if ask.judge in OF_COLUMNS else rows
    over += compared
    for what, names, legal in (
        ("row", rows, known[0]),
        ("column", columns, known[1]),
        ("metric", metrics, {*ask.terms.measures}),
    ):
        for label in [label for name in names if name for label in asks.term(name)]:
            if not any(asks.matches(one, (label.removeprefix("!"),)) for one in legal):
                checks.known(what, label, sorted(legal))
