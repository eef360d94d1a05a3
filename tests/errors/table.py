"""What a wrong use is, and what cases of several subjects share."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pfl_core import Experiment, Federation

TINY = dict(
    dataset="digits", partition="iid", clients=2, model="mlp", rounds=1, max_samples=8, batch=8
)


X, Y = np.zeros((8, 4, 4), np.uint8), np.arange(8) % 2


class Case(NamedTuple):
    """A wrong use: `does` it in an empty folder (the current one); None as `raises`: it goes on, and only prints."""

    use: str
    does: Callable[[], object]
    says: str  # a regular expression
    raises: type[BaseException] | None = ValueError


def own(**lists) -> Federation:
    return Federation(X, Y, **{"train": [[0, 1], [2, 3]]} | lists)


def tiny(**changes) -> Experiment:
    return Experiment(**TINY | changes)
