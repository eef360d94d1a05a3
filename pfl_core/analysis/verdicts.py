"""Verdicts: the only place where a lead, an accuracy or a claim is said to come out.

They are words for intervals and thresholds, nothing else. Seeds are the replicates, clients never
(`noise` has the intervals). A lead is ahead, behind, no lead, too small to tell or open. An
accuracy is inside or outside what our runs predict. A claim holds, is contradicted, is a tie or
open. What is open says what would decide it. (Patil, Peng and Leek 2016, on prediction intervals
for replications; Agarwal et al. 2021, on what few runs can say)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from pfl_core.analysis.noise import LEVEL, Interval, Variance

SMALL = 2.0  # points: a difference whose interval ends within them is no lead
MOVES = 1.0  # points that a row may move over the last quarter of its rounds and be at rest
ROW_MOVES = 2.0  # points that each row of a difference may move, if the difference is at rest
MANY = 30  # seeds beyond which no more of them are asked for
LEADS = ("ahead", "behind", "no lead", "too small to tell", "open")
ACCURACIES = ("inside", "outside", "open")
CLAIMS = ("holds", "contradicted", "tie", "open")
DEPENDS = "depends on reading"
REASONS = {  # why something is open, and what would decide it; the first that fits is said
    "diverges": "with some seeds there is no number; a lower rate would decide it",
    "rows missing": "not all rows were run; the missing ones would decide it",
    "one seed": "one seed has no interval; a second one would decide whether it has",
    "not learned": "a row has not learned; more rounds would decide it",
    "still moves": "it still moves; more rounds would decide it",
    "censored": "the best round is the last one; more rounds would decide it",
    "too wide": "the interval is too wide",
}


class Verdict(NamedTuple):
    """A verdict, what belongs to it, and why, in a sentence.

    Attributes
    ----------
    verdict : str
        One of `LEADS`, `ACCURACIES` or `CLAIMS`; "depends on reading"; "not run".
    reason : str
        Of what is open one of `REASONS`; of an accuracy what our runs lack.
    why : str
        The sentence.
    extent : str
        Of a lead that is ahead, beside the printed one: "as printed", "smaller", "larger", "".
    decided : bool
        Of an accuracy, whether more seeds, rounds or samples could hardly change it.
    brief : str
        Of a claim the difference that decides it, with its interval; of an open one also what
        would decide it.
    """

    verdict: str
    reason: str = ""
    why: str = ""
    extent: str = ""
    decided: bool = True
    brief: str = ""


class Budget(NamedTuple):
    """What our runs had of the paper's, and whether they came to rest.

    Attributes
    ----------
    rounds : float
        The paper's rounds over ours.
    fewer : bool
        Whether the paper trains on more samples.
    rest : bool
        Whether the row, or the difference, is at rest.
    """

    rounds: float = 1.0
    fewer: bool = False
    rest: bool = True

    @property
    def missing(self) -> str:
        """ "full budget", "fewer rounds", "fewer samples" or both."""
        lacks = ["fewer rounds"] * (self.rounds > 1) + ["fewer samples"] * self.fewer
        return ", ".join(lacks) or "full budget"


def at_rest(moved: float | None, half: float = 0.0, rows: Collection[float | None] = ()) -> bool:
    """Whether a row, or a difference of rows, stood still over the last quarter of the rounds.

    A row may move by 1 point; a difference by 1 point or half its interval's width, and each of its
    rows by 2. What has no curve is at rest.

    Parameters
    ----------
    moved : float, optional
        By how many points it moved; None without a curve.
    half : float
        Half the width of a difference's interval.
    rows : collection of float
        By how many points each row of a difference moved.
    """
    if moved is None:
        return True
    each = all(r is None or abs(r) <= ROW_MOVES for r in rows)
    return bool(each and abs(moved) <= max(MOVES, np.nan_to_num(half)))


def seeds_needed(found: Interval, margin: float) -> int | None:
    """About how many seeds make half the interval's width smaller than a margin; None: too many."""
    if not found.known or margin <= 0:
        return None
    needed = math.ceil(found.seeds * (found.half / margin) ** 2)
    return max(needed, found.seeds + 1) if needed <= MANY else None


def _more_seeds(found: Interval, margin: float) -> str:
    # What decides an interval that is too wide.
    n = seeds_needed(found, margin)
    if n is None:
        return f"more than {MANY} seeds would be needed"
    return f"about {n} seeds in place of {found.seeds} would decide it"


def ends(found: Interval, digits: int = 1, unit: str = "points", sign: str = "+") -> str:
    """ "+1.2 [+0.3, +2.1] points"; no brackets where there is no interval.

    Digits are added while an end that is not 0 looks like it.
    """
    near = [abs(end) for end in (found.low, found.high) if found.known and end]
    while any(end < 0.5 * 10**-digits for end in near) and digits < 3:
        digits += 1
    how = f"{sign}.{digits}f"
    inside = f" [{found.low:{how}}, {found.high:{how}}]" if found.known else ""
    return f"{found.estimate:{how}}{inside}" + f" {unit}" * bool(unit)


# -- leads and accuracies --------------------------------------------------------------------------


def of_lead(found: Interval, predicted: Interval, printed: float, unlearned: str = "") -> Verdict:
    """Whether a printed lead comes out: the paper's own method minus another row.

    Parameters
    ----------
    found : Interval
        Our lead.
    predicted : Interval
        Where a published lead is to be expected, by our runs.
    printed : float
        The published lead.
    unlearned : str
        What has not learned, "" if both rows have.
    """
    why = f"{ends(found)}, printed {printed:+.1f}"
    if not found.known or unlearned:
        reason = "not learned" if unlearned else "one seed"
        more = f": {unlearned}" * bool(unlearned)
        return Verdict("open", reason, f"{why}; {REASONS[reason]}{more}", decided=False)
    excluded = abs(predicted.estimate - printed) > predicted.half
    if found.below(0):
        return Verdict("behind", "", why)
    if found.above(0):
        size = "as printed" * (not _holds(predicted, 0.0))
        if excluded:
            size = "smaller" if printed > found.estimate else "larger"
        return Verdict("ahead", "", why, size)
    if found.within(SMALL):
        return Verdict("no lead" if excluded else "too small to tell", "", why)
    return Verdict(
        "open", "too wide", f"{why}; {_more_seeds(found, _nearest(found))}", decided=False
    )


def _holds(found: Interval, value: float) -> bool:
    return bool(found.low <= value <= found.high)


def _nearest(found: Interval) -> float:
    # The half width at which an interval would leave out 0, or end within 2 points of it.
    gap = abs(found.estimate)
    return max(gap, SMALL - gap)


def of_accuracy(predicted: Interval, printed: float, budget: Budget) -> Verdict:
    """Whether a published accuracy lies where our runs predict it.

    It is decided if it is inside an interval of at most 2 points to each side, at full budget or at
    rest, or outside at full budget.

    Parameters
    ----------
    predicted : Interval
        The prediction interval of a published number.
    printed : float
        The published number.
    budget : Budget
        What our runs had.
    """
    if not predicted.known:
        gap = f"{predicted.estimate - printed:+.1f} points"
        return Verdict("open", "one seed", f"{gap}; {REASONS['one seed']}", decided=False)
    full = budget.missing == "full budget"
    why = f"printed {printed:.1f}, predicted {predicted.estimate:.1f} ± {predicted.half:.1f}"
    why += "" if full else f", {budget.missing} than the paper"
    if _holds(predicted, printed):
        sure = predicted.half <= SMALL and (full or budget.rest)
        return Verdict("inside", "", why, decided=sure)
    return Verdict("outside", budget.missing, why, decided=full)


# -- claims ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contrast:
    """A difference on which a claim rests: it has to be above a threshold.

    Attributes
    ----------
    says : str
        What is compared, "FedPer - FedAvg, CIFAR-10".
    found : Interval
        The difference.
    above : float
        The threshold.
    moved : float, optional
        How much of it came in the last quarter of the rounds, None if that is not known.
    rows : tuple of float
        How much each of its rows moved.
    unlearned : str
        What has not learned, "" if all have.
    lost : str
        What diverged, "" if nothing has.
    censored : bool
        Whether a number of rounds in it is that of the last round.
    group : str
        Claims on "most cases" count groups.
    unit : str
        What it is measured in.
    small : float
        Below what it counts as a tie, in this unit.
    digits : int
        Decimals that are shown.
    """

    says: str
    found: Interval
    above: float = 0.0
    moved: float | None = None
    rows: tuple[float, ...] = ()
    unlearned: str = ""
    lost: str = ""
    censored: bool = False
    group: str = ""
    unit: str = "points"
    small: float = SMALL
    digits: int = 1

    @property
    def clears(self) -> bool:
        """Whether the whole interval is above the threshold."""
        return self.found.above(self.above)

    @property
    def tied(self) -> bool:
        """Whether the interval ends within a small distance of the threshold on both sides."""
        return self.found.within(self.small, self.above)

    @property
    def rest(self) -> bool:
        """Whether it stood still over the last quarter; what is no accuracy may move away.

        It may near its threshold by half its interval's width, or half of what counts as a tie, as
        accuracies by 1 of 2 points.
        """
        if self.unit == "points":
            return at_rest(self.moved, self.found.half, self.rows)
        allowed = max(self.found.half, self.small * MOVES / SMALL)
        return not (self._nears and abs(self.moved or 0.0) > allowed)

    @property
    def _nears(self) -> bool:
        return (self.moved or 0.0) * (self.found.estimate - self.above) < 0

    @property
    def approaches(self) -> bool:
        """Whether it is not at rest and goes towards the threshold: more rounds could change it."""
        return self._nears and not self.rest

    @property
    def unsure(self) -> str:
        """Why nothing can be concluded from it, whatever its interval; "" if that is not so."""
        if self.lost:
            return "diverges"
        if not self.found.seeds:
            return "rows missing"
        if not self.found.known:
            return "one seed"
        if self.unlearned:
            return "not learned"
        return "censored" if self.censored else ""

    @property
    def open(self) -> str:
        """The reason why it is open, if it is."""
        return self.unsure or ("too wide" if self.rest else "still moves")

    def decides(self, among: int = 1) -> str:
        """What would decide it, if it is open, as one of so many contrasts of a claim."""
        if self.open == "too wide":
            gap = abs(self.found.estimate - self.above)
            why = "too wide"
            if self.found.below(self.above) and not self.found.below(self.above, among):
                why = f"below alone, not as one of {among} (Holm)"
            return f"{why}; {_more_seeds(self.found, max(gap, self.small - gap))}"
        if self.open == "still moves":
            what, by = "it still moves", self.moved or 0.0
            if self.unit == "points" and at_rest(by, self.found.half):  # its rows alone do
                what, by = "its rows still move", max((r for r in self.rows if r), key=abs)
            moved = f"{what} (by {by:+.{self._digits(by)}f} in the last quarter of the rounds)"
            return REASONS[self.open].replace("it still moves", moved)
        said = self.lost or self.unlearned
        return REASONS[self.open] + f" ({said})" * bool(said)

    def __str__(self) -> str:
        f = self.found
        if not f.seeds:
            return self.says
        d = self._digits(np.nanmax(np.abs([f.estimate, f.low, f.high])))
        bar = f", to be above {self.above:g}" if self.above else ""
        return f"{self.says}: {ends(f, d, self.unit)}{bar}"

    def _digits(self, number: float) -> int:
        # So many that two digits are left of what would look like 0.
        if 0 < abs(number) < 0.5 * 10**-self.digits and self.unit != "points":
            return 1 - int(np.floor(np.log10(abs(number))))
        return self.digits

    @property
    def brief(self) -> str:
        """The difference with how many seeds it is over."""
        n = self.found.seeds
        return f"{self}, {n} seed{'s' * (n > 1)}" if n else f"{self}"


def of_claim(contrasts: Sequence[Contrast], most: bool = False) -> Verdict:
    """The verdict of a claim that rests on contrasts.

    It holds if every contrast is above its threshold and at rest. It is contradicted if one is
    below after Holm's correction for their number, and does not approach its threshold. It is a tie
    if none is below, and those that are not above lie within the limit: a result, no lack of one.
    Else it is open.

    Parameters
    ----------
    contrasts : list of Contrast
    most : bool
        The claim speaks of most cases. Then it is judged in every group of contrasts, and has the
        verdict of more than half of the groups; half of them suffice to contradict it.
    """
    if not contrasts:
        return Verdict("not run")
    if most:
        return _of_most(contrasts)
    sure = [c for c in contrasts if not c.unsure]
    if len(sure) == len(contrasts) and all(c.clears and c.rest for c in contrasts):
        nearest = min(contrasts, key=lambda c: c.found.low - c.above)
        return Verdict("holds", "", _also(nearest, contrasts, "the smallest"), brief=nearest.brief)
    against = [c for c in sure if c.found.below(c.above, len(contrasts)) and not c.approaches]
    if against:
        worst = min(against, key=lambda c: (c.found.high - c.above) / (c.found.half or 1.0))
        return Verdict(
            "contradicted", "", _also(worst, contrasts, "the clearest"), brief=worst.brief
        )
    left = [c for c in contrasts if c.unsure or not (c.clears and c.rest)]
    if all(not c.unsure and c.rest and c.tied for c in left):
        nearest = min(left, key=lambda c: c.found.estimate - c.above)
        return Verdict("tie", "", _also(nearest, contrasts, "the smallest"), brief=nearest.brief)
    undecided = [c for c in left if not (c.tied and c.rest) or c.unsure]
    order = list(REASONS)
    first = min(undecided, key=lambda c: (order.index(c.open), c.found.estimate - c.above))
    decides = first.decides(len(contrasts))
    why = f"{_also(first, undecided, 'one')}; {decides}"
    return Verdict("open", first.open, why, decided=False, brief=f"{first.brief}; {decides}")


def _also(shown: Contrast, among: Sequence[Contrast], which: str) -> str:
    return f"{shown}" if len(among) == 1 else f"{which} of {len(among)}: {shown}"


def _of_most(contrasts: Sequence[Contrast]) -> Verdict:
    groups: dict[str, list[Contrast]] = {}
    for contrast in contrasts:
        groups.setdefault(contrast.group, []).append(contrast)
    judged = {group: of_claim(some) for group, some in groups.items()}
    count = {v: sum(j.verdict == v for j in judged.values()) for v in CLAIMS}
    why = "; ".join(f"{group}: {j.verdict}, {j.why}" for group, j in judged.items())
    brief = {j.verdict: j.brief for j in reversed(judged.values())}  # of the first of each
    if 2 * count["holds"] > len(groups):
        return Verdict("holds", "", why, brief=brief["holds"])
    if 2 * count["contradicted"] >= len(groups):
        return Verdict("contradicted", "", why, brief=brief["contradicted"])
    if 2 * (count["holds"] + count["tie"]) > len(groups):
        return Verdict("tie", "", why, brief=brief["tie"])
    reasons = [j.reason for j in judged.values() if j.reason] or ["too wide"]
    least = min(reasons, key=list(REASONS).index)
    return Verdict("open", least, why, decided=False, brief=brief.get("open", ""))


def over_readings(found: Mapping[str, Verdict]) -> Verdict:
    """The verdict over readings of what a paper leaves open: theirs if all agree.

    Parameters
    ----------
    found : dict of Verdict
        {reading: its verdict}, the one that is shown first.
    """
    (_, first), *others = found.items()
    if all(v.verdict == first.verdict for _, v in others):
        return first
    why = "; ".join(f"{reading}: {v.verdict} ({v.why})" for reading, v in found.items())
    reading, other = next((r, v) for r, v in found.items() if v.verdict != first.verdict)
    parts = [("as run ", first), (f"{reading}: ", other)]
    decided = other if first.verdict == "open" else first
    brief = "; ".join(f"{p}{v.verdict}" + f" ({v.brief})" * (v is decided) for p, v in parts)
    return Verdict(DEPENDS, "", why, decided=False, brief=brief)


# -- order -----------------------------------------------------------------------------------------


class Order(NamedTuple):
    """How our order of a column's methods is that of the paper.

    Attributes
    ----------
    rows : int
        How many methods are compared.
    tau, tau_low, tau_high : float
        Kendall's, with its 95 % interval.
    ceiling : float
        What noise alone would leave of tau, had the paper the true order.
    slope, slope_low, slope_high : float
        Of our accuracies over the published ones, with its 95 % interval.
    """

    rows: int
    tau: float
    tau_low: float
    tau_high: float
    ceiling: float
    slope: float
    slope_low: float
    slope_high: float


DRAWN = 4000  # sets of numbers that tau's interval and ceiling are simulated with


def order(printed: ArrayLike, ours: ArrayLike, own: Variance, seeds: int, draws: int = 1) -> Order:
    """Compare two orders of the same methods.

    Parameters
    ----------
    printed, ours : (m,) float
        A number a method, three methods or more.
    own : Variance
        N of our column: the noise of one run of one method.
    seeds, draws : int
        Over how many seeds ours are, and over how many draws the published numbers.

    Raises
    ------
    ValueError
        If there are fewer than three methods, or unequally many.
    """
    from scipy.stats import linregress  # late: it takes a second

    printed, ours = np.asarray(printed, float), np.asarray(ours, float)
    m = len(printed)
    if m < 3 or ours.shape != printed.shape:
        raise ValueError(f"an order of {m} and {len(ours)} methods; give three or more in both")
    rng = np.random.default_rng(0)
    noise = rng.standard_t(own.freedom, (2, DRAWN, m)) * np.sqrt(own.value) if own.freedom else None
    low = high = ceiling = np.nan
    if noise is not None:
        low, high = np.percentile(_tau(printed, ours + noise[0] / np.sqrt(seeds)), (2.5, 97.5))
        other = noise[0] / np.sqrt(seeds) + noise[1] / np.sqrt(draws)
        ceiling = float(_tau(printed, printed + other).mean())
    slope = np.nan, np.nan
    if np.ptp(printed) > 0:
        fit: Any = linregress(printed, ours)
        slope = float(fit.slope), float(fit.stderr) * float(stdtrit(m - 2, (1 + LEVEL) / 2))
    tau = float(_tau(printed, ours))
    ends = slope[0] - slope[1], slope[0] + slope[1]
    return Order(m, tau, float(low), float(high), ceiling, slope[0], *ends)


def _tau(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    # Kendall's tau-b over the last axis.
    i, j = np.triu_indices(a.shape[-1], 1)
    x, y = np.sign(a[..., i] - a[..., j]), np.sign(b[..., i] - b[..., j])
    ties = np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
    return (x * y).sum(-1) / np.where(ties > 0, ties, np.nan)
