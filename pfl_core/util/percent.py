"""The one place that says what an accuracy is, how many digits it has, and how several spread."""

from __future__ import annotations

from typing import Any

import numpy as np

DECIMALS = 4  # in committed tables


def compared(values: Any) -> Any:
    """What is compared to choose a round or a run: an array or frame as committed tables have it.

    A tie in the fourth digit would otherwise be broken by a run's floats where it lies in the
    store, and not where it is committed.
    """
    return values.round(DECIMALS)


def accuracy(correct: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Accuracy in percent: `correct` (..., K) of `n` (K,) samples, or two numbers; NaN of none."""
    with np.errstate(invalid="ignore"):
        return 100 * correct / n


def spread(acc: np.ndarray) -> dict[str, np.ndarray]:
    """How the accuracies (..., K) of K clients spread, in their unit: {name: (...)}.

    "average"; "sd" (ddof 0); "min" and "max"; the percentiles "p10" and "p90"; and "worst10" and
    "best10", the means over the worst and the best tenth of the clients (one client at least).
    """
    tenth, ordered = max(1, acc.shape[-1] // 10), np.sort(acc, -1)
    p10, p90 = np.percentile(acc, (10, 90), axis=-1)
    return {
        "average": acc.mean(-1),
        "sd": acc.std(-1),
        "min": ordered[..., 0],
        "max": ordered[..., -1],
        "p10": p10,
        "p90": p90,
        "worst10": ordered[..., :tenth].mean(-1),
        "best10": ordered[..., -tenth:].mean(-1),
    }
