"""How far seeds move the rows of a table's column, and the intervals that follow.

A column has m rows (methods) and S seeds. A seed moves all rows together (variance M) and each row
by itself (variance N). Two or three seeds say little of either, but many columns were run: each
variance is drawn towards what the columns have in common, as far as they agree (Smyth 2004, the
moment estimator of limma). Rows that serve one model to all clients vary in another way than
personal ones, and are never pooled with them. How often the intervals cover is simulated in
tests/core/analysis/test_noise.py.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.special import digamma, fdtri, stdtrit, zeta

# Methods that serve all clients the same model, as long as it has not trained there.
ONE_MODEL = frozenset({"fedavg", "fedprox", "fedbabu"})
LEVEL = 0.95  # of every interval
MOST = 5.0  # degrees of freedom that a column may borrow, and one at most from each other column
FEWEST = 3  # columns that can say what columns have in common
ODD = 0.01  # upper tail of F, shared by a column's rows, beyond which a row's noise is its own
ODD_SEEDS = 3  # seeds from which a row can be told to be odd
TINY = 1e-9


class Variance(NamedTuple):
    """A variance, or an array of them, and the degrees of freedom on which it is known."""

    value: float
    freedom: float

    def times(self, factor: float) -> Variance:
        """The variance of what is `factor` ** 0.5 times as large."""
        return self._replace(value=self.value * factor)


UNKNOWN = Variance(np.nan, 0.0)


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval, whose ends are NaN where the noise is not known.

    Attributes
    ----------
    estimate : float
    parts : tuple of Variance
        Their sum is the estimate's variance; each has the t of its own freedom (Cochran).
    seeds : int
        Over how many seeds the estimate is.
    """

    estimate: float = np.nan
    parts: tuple[Variance, ...] = ()
    seeds: int = 0

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return bool(self.parts) and all(part.freedom > 0 for part in self.parts)

    def half_at(self, level: float) -> float:
        """Half the width at another level."""
        return half_width(self.parts, level) if self.known else np.nan

    @functools.cached_property
    def half(self) -> float:
        """Half its width."""
        return self.half_at(LEVEL)

    @property
    def low(self) -> float:
        """Its lower end."""
        return self.estimate - self.half

    @property
    def high(self) -> float:
        """Its upper end."""
        return self.estimate + self.half

    def above(self, threshold: float) -> bool:
        """Whether all of it is above a threshold."""
        return self.low > threshold

    def below(self, threshold: float, among: int = 1) -> bool:
        """Whether all of it is below a threshold, were it the clearest of `among` (Holm)."""
        return self.estimate + self.half_at(1 - (1 - LEVEL) / among) < threshold

    def within(self, limit: float, around: float = 0.0) -> bool:
        """Whether all of it is less than `limit` from a value."""
        return self.low > around - limit and self.high < around + limit

    def minus(self, value: float) -> Interval:
        """The interval of the difference from a value."""
        return replace(self, estimate=self.estimate - value)


def half_width(parts: Iterable[Variance], level: float = LEVEL) -> float:
    """Half the width of the interval of a sum of independent estimates; arrays are allowed."""
    squares = [stdtrit(p.freedom, (1 + level) / 2) ** 2 * p.value for p in parts]
    return sum(squares) ** 0.5


def summed(parts: Sequence[Interval]) -> Interval:
    """The sum of independent intervals, of several columns."""
    every = tuple(v for part in parts for v in part.parts or (UNKNOWN,))
    return Interval(sum(p.estimate for p in parts), every, min(p.seeds for p in parts))


def of_values(values: ArrayLike) -> Interval:
    """The mean of one number a seed, with the t interval of its own spread."""
    found = np.asarray(values, dtype=float)
    n = len(found)
    parts = (Variance(float(found.var(ddof=1)) / n, n - 1),) if n > 1 else ()
    return Interval(float(found.mean()), parts, n)


# -- moderation ------------------------------------------------------------------------------------


class Prior(NamedTuple):
    """What columns have in common: a variance, and the degrees of freedom that it is worth."""

    value: float = np.nan
    weight: float = 0.0

    def moderate(self, own: Variance) -> Variance:
        """A column's variance, drawn towards the prior; arrays are allowed."""
        freedom = self.weight + own.freedom
        lent = np.where(np.asarray(self.weight) > 0, np.multiply(self.weight, self.value), 0.0)
        had = np.where(np.asarray(own.freedom) > 0, np.multiply(own.freedom, own.value), 0.0)
        value: Any = (lent + had) / np.where(freedom > 0, freedom, np.nan)
        return Variance(value, freedom)


def prior(variances: ArrayLike, freedom: ArrayLike) -> Prior:
    """The prior of columns' variances, by the moments of their logarithms (Smyth 2004, Sec. 6.2).

    It is worth at most 5 degrees of freedom, and at most one for each other column. Fewer than
    three columns give none; a variance of 0 says nothing.

    Parameters
    ----------
    variances, freedom : (..., G) float
        Of G columns; leading axes are independent sets of columns.
    """
    variances, freedom = np.broadcast_arrays(np.asarray(variances, float), freedom)
    known = (freedom > 0) & (np.nan_to_num(variances) > 0)
    count = known.sum(-1)
    half = np.where(known, freedom, 2.0) / 2
    logs = np.log(np.where(known, variances, 1.0)) - digamma(half) + np.log(half)
    mean = (logs * known).sum(-1) / np.maximum(count, 1)
    spread = ((logs - mean[..., None]) ** 2 * known).sum(-1) / np.maximum(count - 1, 1)
    excess = spread - (zeta(2, half) * known).sum(-1) / np.maximum(count, 1)  # zeta(2): trigamma
    wide = excess > 0  # else the columns spread no wider than chance: one variance for all
    worth = 2 * _inverse_trigamma(np.where(wide, excess, 1.0))
    shift = np.where(wide, digamma(worth / 2) - np.log(worth / 2), 0.0)
    weight = np.minimum(np.where(wide, worth, np.inf), np.minimum(MOST, count - 1))
    enough = count >= FEWEST
    value: Any = np.where(enough, np.exp(mean + shift), np.nan)
    lent: Any = np.where(enough, weight, 0.0)
    return Prior(value, lent)


def _inverse_trigamma(y: np.ndarray) -> np.ndarray:
    # Newton's steps on 1 / trigamma, which is nearly linear, from its ends' asymptotes.
    x = 1 / y + 1 / np.sqrt(y)
    for _ in range(8):
        trigamma = zeta(2, x)
        x = x + trigamma * (1 - trigamma / y) / (-2 * zeta(3, x))
    return x


# -- a block without gaps --------------------------------------------------------------------------


def own_noise(block: np.ndarray) -> Variance:
    """N of a (..., m, S) block: the variance of one number beside its row and its seed."""
    m, seeds = block.shape[-2:]
    freedom = (m - 1) * (seeds - 1)
    if freedom < 1:
        return UNKNOWN
    rest = block - block.mean(-1, keepdims=True) - block.mean(-2, keepdims=True)
    rest = rest + block.mean((-2, -1), keepdims=True)
    return Variance((rest**2).sum((-2, -1)) / freedom, freedom)


def seed_noise(block: np.ndarray) -> Variance:
    """M of a (..., m, S) block: the variance over seeds of its mean over rows."""
    if block.shape[-1] < 2:
        return UNKNOWN
    return Variance(block.mean(-2).var(-1, ddof=1), block.shape[-1] - 1)


def odd_rows(block: np.ndarray) -> dict[int, Variance]:
    """Rows of an (m, S) block that vary more than the others, with a variance of their own.

    From three seeds on: {row: its variance beside what a seed does to the others}.
    """
    m, seeds = block.shape
    out: dict[int, Variance] = {}
    for i in range(m) if seeds >= ODD_SEEDS and m >= 3 else ():
        others = np.delete(block, i, axis=0)
        own = float((block[i] - others.mean(0)).var(ddof=1)) * (m - 1) / m
        rest = own_noise(others)
        if own > fdtri(seeds - 1, rest.freedom, 1 - ODD / m) * rest.value:
            out[i] = Variance(own, seeds - 1)
    return out


def largest_block(table: pd.DataFrame) -> pd.DataFrame:
    """The rows and seeds without a gap on which a column's noise is known best.

    Parameters
    ----------
    table : DataFrame
        A row a method, a column a seed, NaN where a row lacks a seed.
    """
    there = table.notna()
    sets = {tuple(of) for of in there.to_numpy()} | {tuple(there.all())}
    blocks = [table.loc[:, np.array(seeds)].dropna() for seeds in sets if any(seeds)]
    if not blocks:
        return table.iloc[:0]
    return max(blocks, key=lambda b: ((len(b) - 1) * (b.shape[1] - 1), b.size, b.shape[1]))


class _Block(NamedTuple):
    """A block's rows and noise: N, M, and that of its odd rows."""

    rows: list[str]
    own: Variance
    seed: Variance
    odd: dict[str, Variance]

    @classmethod
    def of(cls, table: pd.DataFrame) -> _Block:
        block = largest_block(table)
        values, rows = block.to_numpy(), list(block.index)
        odd = {rows[i]: variance for i, variance in odd_rows(values).items()}
        return cls(rows, own_noise(values), seed_noise(values), odd)


# -- a column --------------------------------------------------------------------------------------


class Priors(NamedTuple):
    """What columns have in common, for each kind of variance.

    Attributes
    ----------
    own, seed : Prior
        Of N and M of personal rows.
    row : Prior
        Of M + N (m - 1) / m, of a row that stands alone.
    between : Prior
        Of a row with one model for all, beside what a seed does to personal ones.
    shared : Prior
        Of such a row by itself.
    """

    own: Prior = Prior()
    seed: Prior = Prior()
    row: Prior = Prior()
    between: Prior = Prior()
    shared: Prior = Prior()


def priors(columns: Iterable[Column]) -> Priors:
    """The priors of all columns that are judged, each of which may then be moderated."""
    raw = [column.raw() for column in columns]
    return Priors(*(_of_all([r[kind] for r in raw]) for kind in Priors._fields))


def _of_all(variances: Sequence[Variance]) -> Prior:
    if not variances:
        return Prior()
    values, freedom = zip(*variances, strict=True)
    found = prior(np.array(values, float), np.array(freedom, float))
    return Prior(float(found.value), float(found.weight))


@dataclass(frozen=True)
class Column:
    """A column's numbers, and the noise of sums of its rows.

    Attributes
    ----------
    table : DataFrame
        A row a method and a column a seed, NaN for gaps.
    shared : collection of str
        The rows that serve all clients one model.
    pool : collection of str
        The rows over which noise is pooled; all if it is empty. Rows that an estimate is of are in
        the pool in any case.
    priors : Priors
        What other columns say; by default nothing.
    """

    table: pd.DataFrame
    shared: Collection[str] = ()
    pool: Collection[str] = ()
    priors: Priors = Priors()

    def difference(self, first: str, second: str, draws: float = np.inf) -> Interval:
        """A row minus another, as `sum` with so many `draws`."""
        return self.sum({first: 1.0, second: -1.0}, draws)

    def level(self, row: str, draws: float = np.inf, sd: float = np.nan, runs: int = 0) -> Interval:
        """A row's mean over seeds, in which what a seed does to all rows counts.

        Parameters
        ----------
        row : str
        draws : float
            As for `sum`.
        sd : float
            The printed standard deviation of the number that is predicted, over `runs` runs, or of
            the mean where runs is 0. It counts in place of our noise where it is larger.
        runs : int
        """
        return self.sum(
            {row: 1.0}, draws, Variance(sd**2 / max(runs, 1), runs - 1 if runs > 1 else np.inf)
        )

    def sum(
        self, weights: Mapping[str, float], draws: float = np.inf, said: Variance = UNKNOWN
    ) -> Interval:
        """A sum of weighted rows over the seeds that they share, with its interval.

        Parameters
        ----------
        weights : dict of float
            {row: its weight}.
        draws : float
            Of how many draws of clients a published number is the mean, which the interval then
            predicts. With infinitely many it is the interval of our estimate.
        said : Variance
            The published number's variance as printed.

        Raises
        ------
        LookupError
            If the rows share no seed.
        """
        weights = {row: w for row, w in weights.items() if w}
        there = np.isnan(self._numbers(weights)).sum(axis=0) == 0
        seeds = int(there.sum())
        if not seeds:
            raise LookupError(f"a seed that all of {sorted(weights)} have")
        estimate = float(self._series(weights, there).mean())
        if seeds < 2:
            return Interval(estimate, (), seeds)
        one = self._parts(weights, there)
        parts = [part.times(1 / seeds) for part in one]
        if np.isfinite(draws):
            printed = sum(part.value for part in one) / draws < said.value
            parts += [said] if printed else [part.times(1 / draws) for part in one]
        return Interval(estimate, tuple(parts), seeds)

    def best(self, sign: int = 1) -> set[str]:
        """The row that is ahead, and all that tie with it; of sign -1 less is better.

        Two rows are compared over the seeds that both have. A row that shares fewer than two with
        the one that is ahead is not the best; nor are two that may both be ahead and share fewer.
        Of a column with one seed the number that is ahead is the best.
        """
        if not len(self.table):
            return set()
        apart = sign * (self._values[:, None] - self._values)
        if apart.shape[2] > 1:  # a difference over one seed has no interval
            apart[(~np.isnan(apart)).sum(2) < 2] = np.nan
        behind = (np.nansum(apart, axis=2) < 0).sum(1)
        tops = self.table.index[behind == behind.min()]
        return {row for row in self.table.index if all(self._ties(row, top) for top in tops)}

    def _ties(self, row: str, other: str) -> bool:
        if row == other:
            return True
        if np.isnan(self._numbers([row, other])).any(axis=0).all():  # no seed that both have
            return False
        gap = self.difference(row, other)
        return gap.estimate == 0 or gap.low <= 0 <= gap.high

    @functools.cached_property
    def _values(self) -> np.ndarray:
        return self.table.to_numpy(float)

    @functools.cached_property
    def _place(self) -> dict[str, int]:
        return {row: i for i, row in enumerate(self.table.index)}

    def _numbers(self, rows: Iterable[str]) -> np.ndarray:
        return self._values[[self._place[row] for row in rows]]

    def _series(self, weights: Mapping[str, float], seeds: np.ndarray) -> np.ndarray:
        # A sum of weighted rows, a number a seed.
        return np.array([*weights.values()]) @ self._numbers(weights)[:, seeds]

    def raw(self) -> dict[str, Variance]:
        """The column's own variances, by the names of `Priors`."""
        block = self._usual
        m, own, seed = len(block.rows), block.own, block.seed
        row = seed if m < 2 else seed._replace(value=seed.value + own.value * (m - 1) / m)
        each = [self._values[i] for r, i in self._place.items() if r in self.shared]
        series = [(values[~np.isnan(values)], ~np.isnan(values)) for values in each]
        return {
            "own": own,
            "seed": seed if m > 1 else UNKNOWN,
            "row": row,
            "between": _mean([self._beside(values, there, ()) for values, there in series]),
            "shared": _mean([_over_seeds(values) for values, _ in series]),
        }

    @functools.cached_property
    def _usual(self) -> _Block:
        personal = [r for r in self.table.index if r not in self.shared]
        return _Block.of(self.table.loc[[r for r in personal if not self.pool or r in self.pool]])

    def _block(self, wanted: Collection[str]) -> _Block:
        # The pool, and the personal rows that an estimate is of.
        more = frozenset(wanted) - {*self.pool, *self.shared}
        if not self.pool or not more:
            return self._usual
        if more not in self._larger:
            personal = [r for r in self.table.index if r not in self.shared]
            rows = [r for r in personal if r in more or r in self.pool]
            self._larger[more] = _Block.of(self.table.loc[rows])
        return self._larger[more]

    @functools.cached_property
    def _larger(self) -> dict[frozenset[str], _Block]:
        return {}

    def _beside(self, series: np.ndarray, seeds: np.ndarray, wanted: Collection[str]) -> Variance:
        # Of a number a seed minus the mean of the personal rows.
        rows = self._numbers(self._block(wanted).rows)[:, seeds]
        rows = rows[~np.isnan(rows).any(axis=1)]
        return _over_seeds(series - rows.mean(0)) if len(rows) else UNKNOWN

    def _parts(self, weights: Mapping[str, float], seeds: np.ndarray) -> list[Variance]:
        # The variances that make up the variance of one draw of the sum.
        personal = {row: w for row, w in weights.items() if row not in self.shared}
        common = {row: w for row, w in weights.items() if row in self.shared}
        moved, scale = sum(personal.values()), float(sum(common.values()))
        if scale == 0 and len(personal) == len(weights):
            return self._of_personal(personal, moved)
        if scale != 0 and not personal:
            own = _over_seeds(self._series(common, seeds) / scale)
            return [self.priors.shared.moderate(own).times(scale**2)]
        if scale != 0 and abs(scale + moved) < TINY:
            own = self._beside(self._series(common, seeds) / scale, seeds, personal)
            between = self.priors.between.moderate(own)
            return [*self._beside_seeds(personal, moved), between.times(scale**2)]
        return [_over_seeds(self._series(weights, seeds))]

    def _of_personal(self, weights: Mapping[str, float], moved: float) -> list[Variance]:
        parts = self._beside_seeds(weights, moved)
        if abs(moved) > TINY:
            block = self._block(weights)
            common = self.priors.seed if len(block.rows) > 1 else self.priors.row
            parts.append(common.moderate(block.seed).times(moved**2))
        return parts

    def _beside_seeds(self, weights: Mapping[str, float], moved: float) -> list[Variance]:
        # Of a sum of personal rows, beside `moved` times their mean.
        block = self._block(weights)
        squares = {row: w**2 for row, w in weights.items()}
        share = 1 - moved**2 / (len(block.rows) * sum(squares.values()))
        if share < TINY:
            return []
        usual = sum(square for row, square in squares.items() if row not in block.odd)
        parts = [self.priors.own.moderate(block.own).times(usual * share)] * (usual > 0)
        odd = [v.times(squares[row] * share) for row, v in block.odd.items() if row in squares]
        return parts + odd


def _over_seeds(series: np.ndarray) -> Variance:
    n = len(series)
    return Variance(float(series.var(ddof=1)), n - 1) if n > 1 else UNKNOWN


def _mean(variances: Sequence[Variance]) -> Variance:
    # Of rows that a seed moves alike: their freedom is that of one.
    known = [v for v in variances if v.freedom]
    if not known:
        return UNKNOWN
    return Variance(float(np.mean([v.value for v in known])), max(v.freedom for v in known))
