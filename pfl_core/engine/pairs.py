"""What pairs of clients cost a method whose server compares them, said before training."""

from __future__ import annotations

import time
import warnings

import torch

from pfl_core.methods.base import Method
from pfl_core.stacked import gram

MANY = 500  # clients, from which on it is looked at
SECONDS, GB = 1.0, 1.0  # a round's, and the server's memory, from which on it is said
TRIAL = (256, 4096)  # models compared to see how long it takes, and numbers of each


def warn(method: Method, participants: int) -> None:
    """Say what a round's comparison of clients will take, if that is much.

    An estimate in seconds a round, by a trial on this computer's CPU, and in memory.
    """
    if method.task.K < MANY:
        return
    compared, held = method.pairs(participants)
    memory = held * torch.finfo(method.task.dtype).bits / 8e9
    products = compared * sum(method.task.initial[n].numel() for n in method.task.parameters)
    seconds = products * _seconds_each() if products > 1e9 else 0.0
    if seconds < SECONDS and memory < GB:
        return
    costs = [f"about {seconds:,.0f} s a round"] if seconds >= SECONDS else []
    costs += [f"{memory:,.1f} GB of memory"] if memory >= GB else []
    warnings.warn(
        f"{method.name}: its server's work grows with pairs of clients; with {method.task.K:,} of "
        f"them, {participants:,} a round, it takes {' and '.join(costs)}, by an estimate; "
        "take fewer clients, a lower participation or a smaller model if that is too much",
        stacklevel=2,
    )


def _seconds_each() -> float:
    # Of one product in a comparison of models.
    models = {"": torch.ones(TRIAL)}
    gram(models)
    began = time.perf_counter()
    gram(models)
    return (time.perf_counter() - began) / (TRIAL[0] ** 2 * TRIAL[1])
