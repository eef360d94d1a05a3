"""The one place that says what an accuracy is."""

from __future__ import annotations

import numpy as np


def accuracy(correct: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Accuracy in percent of `correct` of `n` samples, arrays (..., K) and (K,), or numbers; NaN where there are no samples."""
    with np.errstate(invalid="ignore"):
        return 100 * correct / n
