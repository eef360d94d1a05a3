"""The gate that a setting has to pass, declared before any method is compared.

It is computed on the tuning seeds alone, from the draws that tuning chose. A setting that fails is
marked, and stays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from pfl_core.analysis.noise import own_noise
from pfl_core.experiments.build import federation
from pfl_core.experiments.experiment import Experiment
from pfl_core.util.percent import accuracy
from pfl_papers.bench.record import PRIOR, Record
from pfl_papers.bench.rows import LOCAL

MOST, BELOW = 55.0, 5.0  # %: the most common label alone; points that it stays under Local
RANGE, HALF = 8.0, 0.8  # points
SEEDS = 10  # of the interval that is foretold
ASKED = (
    f"the clients' most common labels alone are right for under {MOST:g} % (label prior)",
    f"Local is more than {BELOW:g} points above that",
    f"rows differ by more than {RANGE:g} points",
    "a row leads Local",
    f"half an interval over {SEEDS} seeds is at most {HALF:g} points",
)


class Gate(NamedTuple):
    """What the gate asks, by number, and what was found; NaN where it cannot be said.

    Attributes
    ----------
    prior, local : float
        Accuracy in % of each client's most common label, and of Local.
    range : float
        Points between the best and the worst row.
    ahead : float
        Points by which the best row leads Local; 0 if Local is first.
    half : float
        Half the 95 % interval of a difference of two rows over ten seeds, foretold.
    """

    prior: float
    local: float
    range: float
    ahead: float
    half: float

    def fails(self) -> list[str]:
        """Which of `ASKED` fail or cannot be said; [] for a setting that passes."""
        passed = (
            self.prior < MOST,
            self.local - self.prior > BELOW,
            self.range > RANGE,
            self.ahead > 0,
            self.half <= HALF,
        )
        return [words for words, so in zip(ASKED, passed, strict=True) if not so]


def gate(known: Record) -> Gate:
    """The gate of a setting by what tuning has found."""
    table, n, right = accuracies(known.tuning), known.samples, known.facts(PRIOR)
    seeds = [int(s) for s in known.tuning.seed.unique() if int(s) in right]
    priors = [float(accuracy(right[s], n[s]).mean()) for s in seeds]
    prior = float(np.mean(priors)) if priors else np.nan
    means = table.mean(axis=1)
    local = float(means.get(LOCAL, np.nan))
    spread = float(means.max() - means.min()) if len(means) > 1 else np.nan
    return Gate(prior, local, spread, float(means.max() - local), _half(table))


def label_prior(experiment: Experiment) -> tuple[np.ndarray, np.ndarray]:
    """How many test samples of each client have the most common label that it trains on, of all."""
    fed = federation(experiment)
    train, test = fed.counts(), fed.counts("test")
    return test[np.arange(len(test)), train.argmax(1)], test.sum(1)


def accuracies(tuning: pd.DataFrame, split: str = "test") -> pd.DataFrame:
    """Accuracies in % of the chosen draws at the chosen moments: a line a row, a column a seed."""
    chosen = tuning[(tuning.chosen != "") & (tuning.status == "done")]
    values = [line[f"{split}.{line['chosen']}"] for line in chosen.to_dict("records")]
    index = pd.MultiIndex.from_frame(chosen[["row", "seed"]])
    return pd.Series(values, index, dtype=float).unstack("seed").reindex(chosen.row.unique())


def _half(table: pd.DataFrame) -> float:
    block = table.dropna().to_numpy()
    noise = own_noise(block) if block.size else None
    if noise is None or noise.freedom < 1:
        return np.nan
    return float(stdtrit(SEEDS - 1, 0.975) * np.sqrt(2 * noise.value / SEEDS))


def said(found: Gate) -> str:
    """The gate in a line."""
    if np.isnan(found.range) or np.isnan(found.local):
        return "not known before Local and another row are tuned"
    numbers = (
        f"label prior {found.prior:.1f} %, Local {found.local:.1f} %, rows differ by "
        f"{found.range:.1f} points, the best leads Local by {found.ahead:.1f}, half an interval "
        f"{found.half:.2f}"
    )
    fails = found.fails()
    return f"{numbers}: " + (f"fails; it asks that {'; '.join(fails)}" if fails else "passes")
