"""What a claim asks of finished runs, as a line of text says it: `judges` answers.

`compares` names what is compared, `how` says the rest:

| | |
| --- | --- |
| `a | b > c` | a and b each have more than c; `a < b` is the other way round |
| `a > b > c` | a chain |
| `a == b` | both have the same |
| `a @ x | y` | in columns x and y, which are needed; else in those that have the rows named |
| `;` | between comparisons |
| a name | a label as it stands in the table, "0", or a difference: "fedper - fedavg" |
| a pattern | "K = *", "w/o [pq]": those of the paper's that were run; "!a": without a |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import pandas as pd

ZERO = "0"  # the other side of a number that has to be above 0, or below it


@dataclass(frozen=True)
class Measure:
    """How a metric is compared and said.

    Attributes
    ----------
    says : str
        A difference in words, of {difference}, {row} and {column}.
    name : str
        What it is called beside other metrics.
    unit, small, digits
        As of a `Contrast`.
    scale : float
        What it is multiplied by.
    pooled : bool
        Whether noise is pooled over a column's rows, as it is of accuracies; else it is the
        number's own.
    least : bool
        Whether less is better; who has less has to have learned.
    last : bool
        Whether it is a round, which a run's end may have cut off.
    across : bool
        Whether it is read as the mean over all columns.
    """

    says: str = "{difference}, {column}"
    name: str = ""
    unit: str = ""
    small: float = 0.0
    digits: int = 2
    scale: float = 1.0
    pooled: bool = False
    least: bool = False
    last: bool = False
    across: bool = False


POOLED = Measure(pooled=True)  # of metrics in points that nothing is said of


@dataclass(frozen=True)
class Terms:
    """The terms on which a paper's claims are judged.

    Attributes
    ----------
    measures : dict of Measure
        {metric: how it is compared}.
    our_rows, our_columns : tuple of str
        Patterns of those that the paper does not have; they decide nothing.
    instead : dict of str
        {column: the metric that stands for accuracy in it}.
    """

    measures: Mapping[str, Measure] = field(default_factory=dict)
    our_rows: tuple[str, ...] = ("*(*",)
    our_columns: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)

    def measure(self, metric: str) -> Measure:
        """How a metric is compared."""
        return self.measures.get(metric, POOLED)


class Comparison(NamedTuple):
    """One comparison: alternatives on each side, the sign between them, and the columns."""

    sides: tuple[tuple[str, ...], ...]
    sign: str = ">"
    columns: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """All names in it."""
        return [name for side in self.sides for name in side]

    def steps(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Sides that follow each other."""
        return itertools.pairwise(self.sides)


@dataclass(frozen=True)
class Ask:
    """What a claim asks of the evidence.

    Attributes
    ----------
    judge : str
        One of `judges.JUDGES`.
    comparisons : tuple of Comparison
        What is compared, one after the other.
    row : str
        Whose columns, or metrics, are compared.
    metric : str
        What is compared, "" for accuracy.
    by : float
        The threshold.
    within : float
        How far apart is still alike, or equal.
    but : tuple of str
        Rows of which nothing is asked, "row" or "row @ column".
    asked : str
        "printed": in a column of the paper's only the rows that it prints there. "behind": of
        these only those that it prints behind.
    on : str
        The data set without which nothing is judged.
    said : tuple of str
        Sentences in place of the usual ones, in order; the last one serves all that follow.
    absent : str
        What was not run where nothing can be compared.
    mean : bool
        Whether the mean over the columns is compared, in place of each.
    metrics : bool
        Whether metrics are compared, of `row` or of all.
    most : bool
        Whether more than half of the columns are enough.
    terms : Terms
        The paper's.
    printed : callable
        A column -> the paper's own numbers by row.
    """

    judge: str
    comparisons: tuple[Comparison, ...]
    row: str = ""
    metric: str = ""
    by: float = 0.0
    within: float = 0.0
    but: tuple[str, ...] = ()
    asked: str = ""
    on: str = ""
    said: tuple[str, ...] = ()
    absent: str = ""
    mean: bool = False
    metrics: bool = False
    most: bool = False
    terms: Terms = field(default_factory=Terms)
    printed: Callable[[str], pd.Series] = lambda column: pd.Series(dtype=float)

    @property
    def read(self) -> set[str]:
        """Metrics that are read, beside accuracy."""
        named = [name for part in self.comparisons for name in part.names] if self.metrics else []
        return {self.metric, *self.terms.instead.values(), *named} - {"", ZERO}


def is_pattern(name: str) -> bool:
    """Whether a name stands for any number of labels."""
    return name.startswith("!") or any(sign in name for sign in "*[")


def matches(text: str, patterns: Collection[str]) -> bool:
    """Whether a text fits one of these patterns, and none of those behind a "!"."""
    wanted = [p for p in patterns if not p.startswith("!")]
    return (not wanted or any(fnmatchcase(text, p) for p in wanted)) and not any(
        fnmatchcase(text, p[1:]) for p in patterns if p.startswith("!")
    )


def term(name: str) -> dict[str, float]:
    """{label: sign} of a name: of a difference two; nothing of "0"."""
    first, *less = name.split(" - ")
    return {} if name == ZERO else {first: 1.0} | dict.fromkeys(less, -1.0)


def comparisons(compares: str) -> tuple[Comparison, ...]:
    """The comparisons of a line. ValueError if it has none, or mixes signs."""
    return tuple(_comparison(text) for text in _split(compares, ";"))


def _comparison(text: str) -> Comparison:
    text, _, columns = text.partition(" @ ")
    signs = [sign for sign in (">", "<", "==") if f" {sign} " in text]
    if len(signs) > 1:
        raise ValueError(f"compares {text!r}: one of >, < and == is allowed in a comparison")
    sign = signs[0] if signs else ">"
    sides = tuple(_split(side, "|") for side in text.split(f" {sign} "))
    return Comparison(sides, sign, _split(columns, "|") if columns else ())


def options(how: str) -> dict[str, Any]:
    """The other fields of an `Ask` that a line says: "row=flayer; by=2; mean".

    Raises
    ------
    ValueError
        For an unknown word, or a value that is not of its kind.
    """
    out: dict[str, Any] = {}
    for text in _split(how, ";") if how else ():
        word, _, value = text.partition("=")
        if word not in _KINDS or (word in _FLAGS) != (not value):
            raise ValueError(f"how {text!r}: allowed are {', '.join(_SAID)}")
        try:
            out[word] = _KINDS[word](value)
        except ValueError:
            raise ValueError(f"how {text!r}: {word} is a number") from None
    if out.get("asked", "printed") not in ("printed", "behind"):
        raise ValueError(f"how 'asked={out['asked']}': allowed are printed, behind")
    return out


def _split(text: str, by: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(by))
    if not all(found):
        raise ValueError(f"{text!r}: a name is missing")
    return found


_FLAGS = ("mean", "metrics", "most")
_KINDS: dict[str, Callable[[str], Any]] = dict.fromkeys(_FLAGS, lambda value: True)
_KINDS |= dict.fromkeys(("row", "metric", "asked", "on", "absent"), str)
_KINDS |= dict.fromkeys(("by", "within"), float)
_KINDS |= dict.fromkeys(("but", "said"), lambda value: _split(value, "|"))
_SAID = [word if word in _FLAGS else f"{word}=..." for word in _KINDS]
