"""The one place that says what an accuracy is."""

from __future__ import annotations

import numpy as np


def accuracy(correct: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Accuracy in percent: `correct` (..., K) of `n` (K,) samples, or two numbers; NaN of none."""
    with np.errstate(invalid="ignore"):
        return 100 * correct / n
