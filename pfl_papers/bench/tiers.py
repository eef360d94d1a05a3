"""Whether a row beats the reference in a setting: differences over seeds, and words for them.

Each seed gives a row's difference to the reference, on the same clients. The variance of a row's
differences is drawn towards what those of all rows have in common (`pfl_core.analysis.noise`). A
row is *better* if its mean lies above +1 point, one-sided at 2.5 % after Holm's correction for the
number of rows, and *worse* if it lies below -1; *equal* if its 95 % interval lies within a point
around 0; else *open*. One that diverged with a reported seed is *diverged*. A row and the reference
are compared on the seeds that both have. How often these words are wrong is simulated in
tests/papers/bench/test_tiers.py.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.special import stdtr

from pfl_core.analysis import noise
from pfl_core.analysis.noise import Interval, Variance
from pfl_papers.bench.rows import REFERENCE

POINT = 1.0  # a difference of at most so many points is none
LEVEL = 0.025  # of each side, over all rows of a setting
BETTER, EQUAL, OPEN, WORSE, DIVERGED = WORDS = ("better", "equal", "open", "worse", "diverged")


def judged(table: pd.DataFrame, reference: str = REFERENCE) -> pd.DataFrame:
    """The rows of a setting beside its reference.

    Parameters
    ----------
    table : DataFrame
        Accuracies in %: a line a row and a column a seed, -inf where a run diverged, NaN where
        there is none.
    reference : str
        The row that others are compared with.

    Returns
    -------
    DataFrame
        A line for each other row that has a seed of the reference: difference (an `Interval`),
        p_better and p_worse (one-sided, corrected), tier.
    """
    lost = table == -np.inf
    ours = table.mask(lost)
    gaps = (ours - ours.loc[reference]).drop(index=reference)
    lost = lost.any(axis=1)[gaps.index]
    gaps = gaps[lost | gaps.notna().any(axis=1)]
    seeds, lost = gaps.notna().sum(axis=1), lost[gaps.index]
    own = Variance(gaps.var(axis=1, ddof=1).to_numpy(), (seeds - 1).clip(lower=0).to_numpy())
    known = noise.prior(own.value, own.freedom)
    value, freedom = (np.asarray(v, float) for v in known.moderate(own))
    lines = zip(gaps.mean(axis=1), value, freedom, seeds, strict=True)
    found = [_interval(float(m), float(v), float(f), int(n)) for m, v, f, n in lines]
    out = pd.DataFrame({"difference": pd.Series(found, gaps.index, dtype=object)})
    for name, sign in (("p_better", 1), ("p_worse", -1)):
        p = pd.Series([_one_sided(d, sign) for d in out.difference], out.index)
        out[name] = holm(p.mask(lost))
    out["tier"] = [
        _word(*line) for line in zip(out.difference, out.p_better, out.p_worse, strict=True)
    ]
    out.loc[lost, "tier"] = DIVERGED
    return out


def _interval(mean: float, variance: float, freedom: float, seeds: int) -> Interval:
    parts = (Variance(variance / seeds, freedom),) if freedom > 0 and seeds > 1 else ()
    return Interval(mean, parts, seeds)


def _one_sided(found: Interval, sign: int) -> float:
    # That the true difference is at most a point, in the direction of `sign`.
    if not found.known:
        return np.nan
    (part,) = found.parts
    beyond = sign * found.estimate - POINT
    if part.value <= 0:
        return 0.0 if beyond > 0 else 1.0
    return float(stdtr(part.freedom, -beyond / part.value**0.5))


def holm(p: pd.Series) -> pd.Series:
    """Holm's corrected p-values of those that are not NaN."""
    known = p.dropna().sort_values(kind="stable")
    factors = np.arange(len(known), 0, -1)
    corrected = np.minimum(np.maximum.accumulate(known.to_numpy() * factors), 1.0)
    return pd.Series(corrected, known.index, dtype=float).reindex(p.index)


def _word(found: Interval, p_better: float, p_worse: float) -> str:
    if p_better <= LEVEL:
        return BETTER
    if p_worse <= LEVEL:
        return WORSE
    return EQUAL if found.known and found.within(POINT) else OPEN
