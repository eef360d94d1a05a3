"""The one place that says what an accuracy is, and to how many digits one is kept."""

from __future__ import annotations

import numpy as np

# In committed tables. Rounds are compared as these have them: a tie in the fourth digit would
# otherwise be broken by a run's floats where it lies in the store, and not where it is committed.
DECIMALS = 4


def accuracy(correct: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Accuracy in percent: `correct` (..., K) of `n` (K,) samples, or two numbers; NaN of none."""
    with np.errstate(invalid="ignore"):
        return 100 * correct / n
