"""Verdicts: the only place where a number is said to agree, and a claim to hold.

Seeds are the replicates: a seed draws clients, batches and initial weights anew, and moves all rows
of a table together. So rows are compared seed by seed, and clients are never counted as replicates.
Few seeds say little of one row's noise, but a table has many rows, whose noise is pooled. (Agarwal
et al., NeurIPS 2021, on what few runs can say)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

LEVEL = 0.95  # of every interval
AGREES, CLOSE, DIFFERS = 2.0, 5.0, 1.0  # points between a published number and ours
SMALL = 2.0  # points: a difference whose interval ends within them is a tie
MOVES = 1.0  # points that a curve may still move by at its end
OWN_SEEDS = 5  # with so many seeds a contrast's own spread is known well enough
OUTLIER = 3.0  # times the median row's spread
REASONS = {
    "rows missing": "not all rows were run",
    "one seed": "one seed has no interval",
    "not learned": "a row has not learned",
    "stopped early": "it still moves",
    "fewer samples": "the paper trains on more samples",
    "censored": "the best round is the last one",
    "tie": "the interval says that it is small",
    "too wide": "the interval is too wide to say",
}
# What a verdict says of the paper.
MEANS = {
    "rows missing": "open",
    "one seed": "open",
    "not learned": "under-trained here",
    "stopped early": "under-trained here",
    "fewer samples": "under-trained here",
    "censored": "under-trained here",
    "tie": "open",
    "too wide": "open",
}


# -- intervals -------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """An estimate with its 95 % t interval; error and ends are NaN for one seed.

    error: standard error. freedom: degrees of freedom of `error`. seeds: how many.
    """

    estimate: float
    low: float
    high: float
    error: float
    freedom: float
    seeds: int

    @property
    def half(self) -> float:
        """Half its width."""
        return (self.high - self.low) / 2

    @classmethod
    def none(cls) -> Interval:
        """That of what was not run."""
        return cls(np.nan, np.nan, np.nan, np.nan, 0.0, 0)

    def below(self, threshold: float) -> float:
        """p of the test that the true value is at least `threshold`, one-sided."""
        if self.error == 0:
            return float(self.estimate >= threshold)
        return float(student.cdf((self.estimate - threshold) / self.error, self.freedom))


class _Part(NamedTuple):
    # A variance, and on how many degrees of freedom it was estimated.
    variance: float
    freedom: float


def _interval(estimate: float, parts: Sequence[_Part], seeds: int) -> Interval:
    # Of a sum of variances each takes the t of its own degrees of freedom (Cochran). With
    # Satterthwaite's, a variance that came out small by chance makes a short interval.
    total = sum(part.variance for part in parts)
    if seeds < 2 or np.isnan(total):
        return Interval(estimate, np.nan, np.nan, np.nan, 0.0, seeds)
    spread = sum(part.variance**2 / part.freedom for part in parts)
    freedom = total**2 / spread if spread > 0 else min(part.freedom for part in parts)
    upper = (1 + LEVEL) / 2
    half = sum(float(student.ppf(upper, p.freedom)) ** 2 * p.variance for p in parts) ** 0.5
    error = half / float(student.ppf(upper, freedom))
    return Interval(estimate, estimate - half, estimate + half, error, freedom, seeds)


def _residuals(table: np.ndarray) -> np.ndarray:
    return table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()


def _noise(table: np.ndarray) -> tuple[_Part, np.ndarray]:
    """Variance of one number of a table beside its row and its seed, and its odd rows.

    A row is odd if its residuals spread over more than three times the median row's. It is counted
    in all the same: left out by chance it would make the others look surer than they are.
    """
    rows, seeds = table.shape
    freedom = (rows - 1) * (seeds - 1)
    if freedom < 1:
        return _Part(np.nan, 0.0), np.ones(rows, bool)
    spread = np.sqrt((_residuals(table) ** 2).sum(1))
    odd = spread > OUTLIER * np.median(spread) if rows > 2 else np.zeros(rows, bool)
    return _Part(float((_residuals(table) ** 2).sum() / freedom), freedom), odd


def interval(tables: Sequence[np.ndarray], weights: Sequence[np.ndarray]) -> Interval:
    """A sum of weighted rows, of one column of a table or of several, with its interval.

    The noise is pooled over a column's rows where the weights of the column add up to 0, so that
    what a seed does to all rows falls out. It is the sum's own with five seeds or more, for a row
    with an odd spread, and where weights do not add up to 0.

    Parameters
    ----------
    tables : sequence of (m, S) float
        One number a row and seed, for each column; seeds are the same in all rows.
    weights : sequence of (m,) float
        The weight of each row: 1 and -1 for a difference of two.

    Returns
    -------
    Interval
        NaN ends for one seed.
    """
    estimate, parts, seeds = 0.0, [], np.asarray(tables[0]).shape[1]
    for values, weight in zip(tables, weights, strict=True):
        table, weight = np.asarray(values, dtype=float), np.asarray(weight, dtype=float)
        by_seed = weight @ table
        estimate += float(by_seed.mean())
        if seeds < 2:
            continue
        noise, odd = _noise(table)
        if seeds >= OWN_SEEDS or odd[weight != 0].any() or abs(weight.sum()) > 1e-9:
            parts.append(_Part(float(by_seed.var(ddof=1)) / seeds, seeds - 1))
        else:
            parts.append(_Part(noise.variance * float((weight**2).sum()) / seeds, noise.freedom))
    return _interval(estimate, parts, seeds)


def cell_interval(table: np.ndarray, row: int) -> Interval:
    """A row's mean with its interval, in which what a seed does to all rows counts.

    Parameters
    ----------
    table : (m, S) float
        Our numbers of the column, a row a method and a column a seed.
    row : int
        The row that is meant.
    """
    table = np.asarray(table, dtype=float)
    (m, seeds), parts = table.shape, []
    if seeds > 1:
        noise, odd = _noise(table)
        if m < 3 or seeds >= OWN_SEEDS or odd[row]:
            parts = [_Part(float(table[row].var(ddof=1)) / seeds, seeds - 1)]
        else:  # what a seed does to all rows, with 1/m of a row's noise, and the rest of that noise
            moved = float(table.mean(0).var(ddof=1))
            rest = noise._replace(variance=noise.variance * (m - 1) / m / seeds)
            parts = [_Part(moved / seeds, seeds - 1), rest]
    return _interval(float(table[row].mean()), parts, seeds)


def beside(
    found: Interval, reported: float, reported_sd: float = np.nan, runs: int = 0
) -> Interval:
    """An estimate of ours minus the published number, with the interval of this difference.

    The published number varies as one more seed of ours would, or as its printed spread says if
    that is larger: it is of one draw of clients, which released code makes once for all runs.

    Parameters
    ----------
    found : Interval
        Our estimate, of a cell or of a difference of two.
    reported, reported_sd : float
        The published number and its standard deviation, NaN if there is none.
    runs : int
        Over how many runs the paper took it, 0 if it does not say: then its standard deviation
        counts as that of its mean.
    """
    estimate = found.estimate - reported
    if np.isnan(found.error):
        return _interval(estimate, [], found.seeds)
    ours = _Part(found.error**2, found.freedom)
    one = _Part(found.seeds * ours.variance, ours.freedom)
    said = _Part(reported_sd**2 / max(runs, 1), runs - 1 if runs > 1 else np.inf)
    return _interval(estimate, [ours, said if said.variance > one.variance else one], found.seeds)


# -- verdicts --------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """A verdict, the reason if it is "undecided", and why, in a sentence.

    verdict: of a cell "agrees", "close", "differs"; of a claim "holds", "contradicted"; of both
    "undecided" and "not run".
    """

    verdict: str
    reason: str = ""
    why: str = ""


@dataclass(frozen=True)
class Contrast:
    """A difference on which a claim rests: it has to be above a threshold.

    says: what is compared, "FedPer - FedAvg, CIFAR-10".
    found: the difference.
    above: the threshold.
    moved: how much of it came in the last quarter of the rounds, None if that is not known.
    unlearned: what has not learned, "" if all have.
    censored: whether a number of rounds in it is that of the last round.
    group: claims on "most cases" count groups.
    unit: what it is measured in; small: below what it counts as a tie, in this unit.
    """

    says: str
    found: Interval
    above: float = 0.0
    moved: float | None = None
    unlearned: str = ""
    censored: bool = False
    group: str = ""
    unit: str = "points"
    small: float = SMALL
    digits: int = 1

    @property
    def clears(self) -> bool:
        """Whether the whole interval is above the threshold."""
        return self.found.low > self.above

    @property
    def tied(self) -> bool:
        """Whether the interval ends within a small distance of the threshold on both sides."""
        inside = self.found.low > self.above - self.small
        return bool(inside and self.found.high < self.above + self.small)

    @property
    def moves(self) -> bool:
        """Whether it still goes towards the threshold: more rounds could change the verdict."""
        if self.moved is None:
            return False
        towards = self.moved * (self.found.estimate - self.above) < 0
        least = MOVES if self.unit == "points" else 0.0
        return bool(towards and abs(self.moved) > max(least, self.found.half))

    @property
    def unsure(self) -> str:
        """Why nothing can be concluded from it, whatever its interval; "" if that is not so."""
        if not self.found.seeds:
            return "rows missing"
        if np.isnan(self.found.error):
            return "one seed"
        if self.unlearned:
            return "not learned"
        if self.moves:
            return "stopped early"
        return "censored" if self.censored else ""

    @property
    def open(self) -> str:
        """The reason why it is undecided, if it is."""
        return self.unsure or ("tie" if self.tied else "too wide")

    def __str__(self) -> str:
        d, f = self.digits, self.found
        if not f.seeds:
            return self.says
        largest = np.nanmax(np.abs([f.estimate, f.low, f.high]))
        if 0 < largest < 0.5 * 10**-d and self.unit != "points":
            d = 1 - int(np.floor(np.log10(largest)))  # two digits of the largest are left
        how = f"+.{d}f"
        ends = "" if np.isnan(f.error) else f" [{f.low:{how}}, {f.high:{how}}]"
        unit = f" {self.unit}" if self.unit else ""
        bar = f", to be above {self.above:g}" if self.above else ""
        return f"{self.says}: {f.estimate:{how}}{ends}{unit}{bar}"


def of_claim(contrasts: Sequence[Contrast], most: bool = False) -> Verdict:
    """The verdict of a claim that rests on contrasts.

    It holds if every contrast clears its threshold, and is contradicted if one, Holm-adjusted for
    their number, lies beyond it on the other side.

    most: the claim speaks of most cases. Then it is judged in every group of contrasts, and holds
    if it does in more than half of the groups; it is contradicted if it is in at least half.
    """
    if not contrasts:
        return Verdict("not run")
    if most:
        return _of_most(contrasts)
    sure = [c for c in contrasts if not c.unsure]
    if len(sure) == len(contrasts) and all(c.clears for c in contrasts):
        nearest = min(contrasts, key=lambda c: c.found.low - c.above)
        return Verdict("holds", "", _also(nearest, contrasts, "the smallest"))
    against = {c: c.found.below(c.above) for c in sure}
    if against and min(against.values()) * len(contrasts) <= (1 - LEVEL) / 2:
        worst = min(sure, key=against.__getitem__)
        return Verdict("contradicted", "", _also(worst, contrasts, "the clearest"))
    left = [c for c in contrasts if c.unsure or not c.clears]
    order = list(REASONS)
    first = min(left, key=lambda c: (order.index(c.open), c.found.estimate - c.above))
    more = f": {first.unlearned}" if first.open == "not learned" else ""
    if first.open == "stopped early":
        more = f" ({first.moved:+.{first.digits}f} over the last quarter of the rounds)"
    why = f"{_also(first, left, 'one')}; {REASONS[first.open]}{more}"
    return Verdict("undecided", first.open, why)


def _also(shown: Contrast, among: Sequence[Contrast], which: str) -> str:
    return f"{shown}" if len(among) == 1 else f"{which} of {len(among)}: {shown}"


def _of_most(contrasts: Sequence[Contrast]) -> Verdict:
    groups: dict[str, list[Contrast]] = {}
    for contrast in contrasts:
        groups.setdefault(contrast.group, []).append(contrast)
    judged = {group: of_claim(some) for group, some in groups.items()}
    count = {v: sum(j.verdict == v for j in judged.values()) for v in ("holds", "contradicted")}
    why = "; ".join(f"{group}: {j.verdict}, {j.why}" for group, j in judged.items())
    if 2 * count["holds"] > len(groups):
        return Verdict("holds", "", why)
    if 2 * count["contradicted"] >= len(groups):
        return Verdict("contradicted", "", why)
    # Some group is undecided: with none, one of the two counts would have decided.
    reasons = [j.reason for j in judged.values() if j.reason]
    return Verdict("undecided", min(reasons, key=list(REASONS).index), why)


def of_cell(
    found: Interval, moved: float | None = None, missing: float = 1.0, fewer: bool = False
) -> Verdict:
    """The verdict of our number minus the published one of the same setting.

    It agrees if the interval lies within 2 points of 0, and is close within 5. It differs if the
    interval lies beyond 1 point, and neither more samples nor more rounds could change that: over
    the last quarter of the rounds it came at most 1 point closer to the published number, and it
    stays beyond if it goes on so, by the logarithm of the rounds, to as many as the paper has.

    Parameters
    ----------
    found : Interval
        Of the difference.
    moved : float or None
        Points that our number gained over the last quarter, None if not known.
    missing : float
        The paper's rounds over ours.
    fewer : bool
        Whether the paper trains on more samples, and these could close the gap.
    """
    text = f"{found.estimate:+.1f}"
    if np.isnan(found.error):
        return Verdict("undecided", "one seed", f"{text} points, one seed")
    text = f"{text} [{found.low:+.1f}, {found.high:+.1f}] points"
    reach = max(-found.low, found.high)
    if reach <= AGREES:
        return Verdict("agrees", "", text)
    if reach <= CLOSE:
        return Verdict("close", "", text)
    if found.low <= DIFFERS and found.high >= -DIFFERS:
        return Verdict("undecided", "too wide", text)
    if fewer:
        return Verdict("undecided", "fewer samples", f"{text}, on a part of the paper's samples")
    if moved is not None and moved * found.estimate < 0:
        gained = moved * max(np.log(missing), 0.0) / np.log(4 / 3)
        near = found.high if found.estimate < 0 else found.low
        if abs(moved) > MOVES or abs(gained) >= abs(near) - DIFFERS:
            more = f"{text}, and {moved:+.1f} over the last quarter of the rounds"
            return Verdict("undecided", "stopped early", more)
    return Verdict("differs", "", text)
