"""Rows over all settings: mean ranks and probabilities of improvement, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from pfl_core.util.draws import rng
from pfl_papers.bench.rows import REFERENCE

RESAMPLES = 2000
ENDS = (2.5, 97.5)  # percentiles


def common(tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """Rows that all settings have with all of their seeds, in the order of the first."""
    first, *others = (table.dropna() for table in tables.values())
    return [row for row in first.index if all(row in table.index for table in others)]


def mean_ranks(tables: Mapping[str, pd.DataFrame]) -> pd.Series:
    """Each row's mean rank over settings, 1 is best; in a setting by the mean over seeds.

    A run that diverged counts as 0 %. Rows that a setting lacks, or has without some of its seeds,
    are left out.

    Parameters
    ----------
    tables : dict of DataFrame
        {setting: accuracies in %, a line a row and a column a seed, as of `tiers.judged`}.
    """
    rows = common(tables)
    each = [_ranks(v.mean(1)) for v in _values(tables, rows)]
    return pd.Series(np.mean(each, 0), rows, dtype=float)


def _values(tables: Mapping[str, pd.DataFrame], rows: list[str]) -> list[np.ndarray]:
    return [t.loc[rows].replace(-np.inf, 0.0).to_numpy() for t in tables.values()]


def _ranks(means: np.ndarray) -> np.ndarray:
    return rankdata(-means, axis=-1)


def summary(
    tables: Mapping[str, pd.DataFrame], reference: str = REFERENCE, resamples: int = RESAMPLES
) -> pd.DataFrame:
    """Mean rank and probability of improvement over the reference, with 95 % intervals.

    The probability is that a row's accuracy is above the reference's with the same seed, mean over
    settings; half of equal ones count. Intervals resample settings, and seeds within them.

    Returns
    -------
    DataFrame
        By row, best first: rank, rank_low, rank_high, improves, improves_low, improves_high.
    """
    rows, draw = common(tables), rng(0, "bench/ranks")
    arrays = _values(tables, rows)
    at = rows.index(reference)
    picked = draw.integers(len(arrays), size=(resamples, len(arrays)))
    ranks, wins = np.empty((2, len(arrays), resamples, len(rows)))
    for i, values in enumerate(arrays):
        seeds = draw.integers(values.shape[1], size=(resamples, values.shape[1]))
        ranks[i] = _ranks(values[:, seeds].mean(-1).T)
        wins[i] = _improved(values, at)[:, seeds].mean(-1).T
    out = pd.DataFrame({"rank": mean_ranks(tables)})
    improves = np.mean([_improved(v, at).mean(1) for v in arrays], 0)
    for name, point, drawn in (("rank", out["rank"], ranks), ("improves", improves, wins)):
        means = drawn[picked, np.arange(resamples)[:, None]].mean(1)
        low, high = np.percentile(means, ENDS, axis=0)
        out = out.assign(**{name: point, f"{name}_low": low, f"{name}_high": high})
    return out.sort_values("rank", kind="stable")


def _improved(values: np.ndarray, reference: int) -> np.ndarray:
    gaps = values - values[reference]
    return (gaps > 0) + 0.5 * (gaps == 0)
