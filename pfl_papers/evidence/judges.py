"""The judges of claims: a small vocabulary, from what a claim asks to the contrasts it rests on.

| judge | has to be, in every column that is asked for |
| --- | --- |
| ahead | each row before ">" has more than each one behind it |
| ladder | each row of a chain has more than the next one |
| best | one row has more than every other row of the paper's |
| alike | no row has less than another one by more than `within` |
| change | `row` has more in one column than in the next; of those that were run |
| equal | `row` has the same in one column as in the others, to `within` either way |

Whether a claim then holds is said by `analysis.verdicts` alone.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd

from pfl_core.analysis.noise import Interval
from pfl_core.analysis.plots import in_words, label
from pfl_core.analysis.verdicts import Contrast
from pfl_papers.evidence.asks import ZERO, Ask, Comparison, Measure, is_pattern, matches, term
from pfl_papers.evidence.contrasts import Evidence


class Cell(NamedTuple):
    """A number of the evidence; without a row or a column it is the mean over all."""

    row: str | None
    column: str | None
    metric: str


Cells = dict[Cell, float]  # weights of a sum


def judge(ask: Ask, evidence: Evidence) -> list[Contrast]:
    """The contrasts of a claim; LookupError for what was not run."""
    if ask.on and set(evidence.rows.dataset) != {ask.on}:  # a stand-in says nothing about it
        raise LookupError(in_words(ask.on))
    case = Case(ask, evidence)
    found = [contrast for part in ask.comparisons for contrast in JUDGES[ask.judge](case, part)]
    if not found:
        part = ask.comparisons[0]
        raise LookupError(ask.absent or ", ".join(map(label, case.needed(part) or part.names)))
    return found


class Case:
    """A claim before its evidence: which rows and columns are compared, and how it is said."""

    def __init__(self, ask: Ask, evidence: Evidence):
        self.ask, self.evidence = ask, evidence
        self.pairs: dict[tuple[str, str], None] = {}  # that were compared, in order

    def metric(self, column: str) -> str:
        """What is compared in a column."""
        return self.ask.metric or self.ask.terms.instead.get(column, "acc_pct")

    def measure(self, metric: str = "") -> Measure:
        """How a metric, or that of the claim, is compared."""
        return self.ask.terms.measure(metric or self.ask.metric)

    # -- rows and columns --------------------------------------------------------------------------

    def there(self, column: str) -> list[str]:
        """The rows that a column has, of a number of its own those that have it."""
        metrics = self.ask.comparisons[0].names if self.ask.metrics else [self.ask.metric]
        trained, rows = self.evidence.methods(column), self.evidence.made
        if self.measure(metrics[0]).pooled:
            return trained
        some = rows.metric.isin(metrics) & (rows.column == column)
        found = set(rows.row[some])
        return [row for row in dict.fromkeys([*trained, *rows.row[some]]) if row in found]

    def asked_rows(self, column: str) -> list[str]:
        """The paper's rows in a column of which something is asked."""
        ours, but = self.ask.terms.our_rows, self.not_asked(column)
        return [r for r in self.there(column) if r not in but and not matches(r, ours)]

    def not_asked(self, column: str) -> set[str]:
        """Rows of which nothing is asked in a column, whether they are there or not."""
        pairs = [name.partition(" @ ") for name in self.ask.but]
        but = {row for row, _, where in pairs if matches(column, (where or "*",))}
        printed = self.ask.printed(column) if self.ask.asked else pd.Series(dtype=float)
        if printed.empty:
            return but
        own = self.ask.comparisons[0].names[0]
        asked = printed if self.ask.asked == "printed" else printed[printed < printed[own]]
        known = {*self.evidence.printed, *self.there(column), *printed.index}
        return but | (known - {*asked.index, own})

    def needed(self, part: Comparison) -> list[str]:
        """The rows without which a part compares nothing."""
        named = [self.ask.row] if self.ask.metrics else part.names
        return [row for name in named if name and not is_pattern(name) for row in term(name)]

    def asked_columns(self, part: Comparison) -> list[str]:
        """The columns of a part: those named, else the paper's that have all its rows."""
        if part.columns and not any(map(is_pattern, part.columns)):
            return list(part.columns)
        return [c for c in self.paper_columns(self.needed(part)) if matches(c, part.columns)]

    def paper_columns(self, needed: list[str]) -> list[str]:
        """The paper's columns that have these rows."""
        ours = self.ask.terms.our_columns
        columns = [c for c in self.evidence.columns if not (ours and matches(c, ours))]
        return [c for c in columns if set(needed) <= set(self.there(c))]

    def expanded(self, part: Comparison, side: tuple[str, ...], columns: list[str]) -> list[str]:
        """The names of a side; of patterns the rows that all columns have and no side names."""
        if not any(map(is_pattern, side)):
            return list(side)
        rows = [
            r for r in self.asked_rows(columns[0]) if all(r in self.asked_rows(c) for c in columns)
        ]
        return [r for r in rows if matches(r, side) and r not in part.names]

    # -- contrasts ---------------------------------------------------------------------------------

    def contrast(self, sums: Sequence[Cells], by: float, **words: str) -> Contrast:
        """Contrast two sums of cells: the first less the second, which has to be above `by`.

        Parameters
        ----------
        sums : list of Cells
            The two.
        by : float
            The threshold.
        **words
            What the sentence is made of: first, second, row, column, difference.
        """
        plus, minus = sums
        metric = next(iter(plus | minus)).metric
        measure, column = self.measure(metric), words["column"]
        usual = measure.says if column else measure.says.replace(", {column}", "")
        says = self._sentence(usual, words["first"], words["second"]).format(**words)
        if measure.pooled:
            weights: dict[tuple[str, str], float] = {}
            for cells, sign in ((plus, 1), (minus, -1)):
                for (row, place, _), weight in cells.items():
                    at = (str(row), str(place))
                    weights[at] = weights.get(at, 0.0) + sign * weight
            return self.evidence.contrast(says, weights, by, metric=metric, group=column)
        by_seed = measure.scale * (self._summed(plus) - self._summed(minus))
        how: dict[str, Any] = dict(unit=measure.unit, small=measure.small, digits=measure.digits)
        return self.evidence.above(says, by_seed, by, group=column, **how)

    def _sentence(self, usual: str, *pair: str) -> str:
        if not self.ask.said:
            return usual
        self.pairs.setdefault((pair[0], pair[1]))
        place = list(self.pairs).index((pair[0], pair[1]))
        return self.ask.said[min(place, len(self.ask.said) - 1)]

    def _summed(self, cells: Cells) -> Any:
        each = [w * self.evidence.derived(c.metric, c.row, c.column) for c, w in cells.items()]
        return functools.reduce(pd.Series.add, each) if each else 0.0

    def cells(self, name: str, columns: list[str]) -> Cells:
        """A row, or a difference of two, on average over these columns."""
        across = self.measure().across
        return {
            Cell(row, None if across else column, self.metric(column)): sign / len(columns)
            for row, sign in term(name).items()
            for column in columns
        }

    def rows_apart(self, first: str, second: str, columns: list[str], by: float) -> Contrast:
        """A row less another one."""
        column = f"mean of {', '.join(columns)}" if self.ask.mean else columns[0]
        words = dict(first=_shown(first), second=_shown(second), row="")
        words |= dict(column="" if self.measure().across else column)
        words["difference"] = f"{words['first']} - {words['second']}"
        cells = [self.cells(name, columns) for name in (first, second)]
        return self.contrast(cells, by, **words)

    def columns_apart(self, row: str, pair: tuple[str, str], by: float, sign: int = 1) -> Contrast:
        """A row, or a difference of two, in one column less the same in another one."""
        first, second = pair
        words = dict(first=first, second=second, row=_shown(row), column="", same=same(*pair))
        words["difference"] = f"{words['row']}, {first} - {second}"
        cells = [self.cells(row, [column]) for column in (first, second)]
        return self.contrast(cells[::sign], by, **words)


def same(first: str, second: str) -> str:
    """What the labels of two columns begin with in common: "EMNIST" of "EMNIST, N=10" and 100."""
    return os.path.commonprefix([first, second]).rpartition(", ")[0]


def _shown(name: str) -> str:
    return " - ".join(map(label, term(name))) or ZERO


# -- of rows ---------------------------------------------------------------------------------------


def ahead(case: Case, part: Comparison) -> list[Contrast]:
    """Names before the sign against those behind it."""
    if case.ask.metrics:
        return _of_metrics(case, part)
    found = case.asked_columns(part)
    groups = [[column] for column in found]
    if found and (case.ask.mean or case.measure().across):
        groups = [found] if case.ask.mean else groups[:1]
    pairs = [
        (first, second, columns)
        for columns in groups
        for one, other in part.steps()
        for first, second in itertools.product(
            case.expanded(part, one, columns), case.expanded(part, other, columns)
        )
        if not case.not_asked(columns[0]) & {first, second}
    ]
    out = [_one_ahead(case, part, *pair) for pair in pairs]
    compared = {row for first, second, _ in pairs for row in (*term(first), *term(second))}
    # A row of which nothing is asked in the columns that were run is not said to be ahead.
    left = [row for row in case.needed(part) if out and row not in compared]
    return out + [Contrast(f"{_shown(row)}: {ELSEWHERE}", Interval(), group=row) for row in left]


ELSEWHERE = "asked of other columns than those that were run"


def _one_ahead(
    case: Case, part: Comparison, first: str, second: str, columns: list[str]
) -> Contrast:
    more, less = (first, second) if part.sign == ">" else (second, first)
    found = case.rows_apart(more, less, columns, case.ask.by)
    measure, (column, *_) = case.measure(), columns
    if measure.least:
        found = replace(found, unlearned=case.evidence.ahead(less, more, column).unlearned)
    if measure.last:
        own = case.evidence.derived(case.ask.metric, less, column)
        found = replace(found, censored=bool(own.ge(_ends(case.evidence, less, column)).any()))
    return found


def _ends(evidence: Evidence, row: str, column: str) -> pd.Series:
    # The last evaluated round, by seed.
    every = evidence.rows
    runs = every[(every.row == row) & (every.column == column) & (every["average"] != "derived")]
    return runs.groupby("seed")["rounds"].max()


def _of_metrics(case: Case, part: Comparison) -> list[Contrast]:
    """A metric against another one, or 0, of each row that is asked for."""
    pairs = [pair for one, other in part.steps() for pair in itertools.product(one, other)]
    row, out = case.ask.row, []
    columns = [""] if case.measure(part.names[0]).across else case.asked_columns(part)
    for column in columns:
        rows = case.asked_rows(column) if is_pattern(row) else [row]
        for row_there, pair in itertools.product(rows, pairs):
            more, less = pair if part.sign == ">" else pair[::-1]
            out.append(_metrics_apart(case, more, less, row_there, column))
    return out


def _metrics_apart(case: Case, more: str, less: str, row: str, column: str) -> Contrast:
    names = [case.measure(name).name or name for name in (more, less) if name != ZERO]
    words = dict(first=more, second=less, difference=" - ".join(names))
    cells = [
        {} if name == ZERO else {Cell(row or None, column or None, name): 1.0}
        for name in (more, less)
    ]
    return case.contrast(cells, case.ask.by, **words, row=label(row), column=column)


def best(case: Case, part: Comparison) -> list[Contrast]:
    """One row against all others; those printed that were not run leave it open."""
    (own,), out = part.names, []
    for column in case.asked_columns(part):
        pooled = case.measure().pooled
        if not pooled:
            case.evidence.derived(case.ask.metric, own, column)
        others = [row for row in case.asked_rows(column) if row != own]
        if not others:
            raise LookupError(f"another method in {column}")
        out += [case.rows_apart(own, row, [column], case.ask.by) for row in others]
        if pooled:
            out += case.evidence.missing(own, column, but=case.not_asked(column))
    return out


def alike(case: Case, part: Comparison) -> list[Contrast]:
    """Each row against each other one."""
    (side,), out = part.sides, []
    for column in case.asked_columns(part):
        pairs = itertools.permutations(case.expanded(part, side, [column]), 2)
        out += [case.rows_apart(a, b, [column], -case.ask.within) for a, b in pairs]
    return out


# -- of columns ------------------------------------------------------------------------------------


def change(case: Case, part: Comparison) -> list[Contrast]:
    """Columns against those behind them, of a row or of each that they have."""
    out = []
    for pair in _pairs(case, part):
        rows = [case.ask.row]
        if is_pattern(case.ask.row):
            there = case.asked_rows(pair[1])
            rows = [row for row in case.asked_rows(pair[0]) if row in there and matches(row, rows)]
        out += [case.columns_apart(row, pair, case.ask.by) for row in rows]
    return out


def _pairs(case: Case, part: Comparison) -> list[tuple[str, str]]:
    """Pairs of columns: the steps of a chain, or for a pattern each with its counterpart."""
    needed = [] if is_pattern(case.ask.row) else [*term(case.ask.row)]
    columns = case.paper_columns(needed)
    names = part.names
    if not any(map(is_pattern, names)):
        if missing := [name for name in names if name not in columns]:
            if len(names) - len(missing) < 2:
                raise LookupError(case.ask.absent or ", ".join(missing))
        return list(itertools.pairwise([name for name in names if name in columns]))
    (start, end), (start_of_other, end_of_other) = (name.split("*") for name in names)
    same = {c: c[len(start) : len(c) - len(end)] for c in columns if matches(c, names[:1])}
    pairs = [(c, f"{start_of_other}{star}{end_of_other}") for c, star in same.items()]
    return [pair for pair in pairs if pair[1] in columns]


def equal(case: Case, part: Comparison) -> list[Contrast]:
    """Columns before the sign against the one behind it, either way."""
    firsts, (second,) = part.sides
    return [
        case.columns_apart(case.ask.row, (first, second), -case.ask.within, sign)
        for first in firsts
        for sign in (1, -1)
    ]


JUDGES: dict[str, Callable[[Case, Comparison], list[Contrast]]] = {
    "ahead": ahead,
    "ladder": ahead,  # of more than two
    "best": best,
    "alike": alike,
    "change": change,
    "equal": equal,
}
