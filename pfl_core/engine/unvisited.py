"""Clients that are scored with BatchNorm statistics of their own and seldom take part, said before
training.

Their statistics are those of the last round they took part in, or those of the initial model, while
their weights are the server's latest: scores of such a mixture say little of the method.
"""

from __future__ import annotations

import warnings

from pfl_core.engine.participation import answers, evaluated, everyone, sample
from pfl_core.methods.base import Method


def warn(method: Method) -> str:
    """Say how many evaluated clients take no part in the first half of the rounds, and what to do.

    Returns what was said; "" where nothing is: all take part in every round, statistics are
    averaged or reset, or no weights come from the server.
    """
    t, config = method.task, method.task.config
    statistics = t.bn.intersection(t.buffers)
    kept = config.buffers == "local" or not any(map(method.is_shared, statistics))
    if not statistics or not kept or config.buffers == "reset" or not config.rounds:
        return ""
    if everyone(config, t.K) or not any(map(method.is_shared, t.parameters)):
        return ""
    rounds, seen = config.rounds, set()
    scored = evaluated(config, t.K).tolist()
    missing = {}
    for r in range(rounds):
        asked = sample(config, t.K, r)
        seen.update(asked[answers(config, asked, r)].tolist())
        missing[r + 1] = len(set(scored) - seen)
        if not missing[r + 1]:
            break
    half = (rounds + 1) // 2
    early = missing.get(half, 0)
    if not early:
        return ""
    local = config.buffers == "local" and method.is_shared(min(statistics))
    cure = 'use buffers="average", or' if local else "use"
    said = (
        f"{method.name}: {early} of {len(scored)} clients take no part in the first {half} of "
        f"{rounds} rounds, {missing.get(rounds, 0)} in none, and are scored with the BatchNorm "
        f"statistics of the initial model under weights from the server; {cure} more rounds or a "
        "higher participation"
    )
    warnings.warn(said, stacklevel=2)
    return said
