"""Who takes part in a round, who answers, how far each trains; and who is evaluated when."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from pfl_core.methods.task import TrainConfig
from pfl_core.util.draws import rng


def participants(participation: float, k: int) -> int:
    """How many of k clients take part in a round: rounded, a half up; 1 at least."""
    return max(1, int(participation * k + 0.5))


def everyone(config: TrainConfig, k: int) -> bool:
    """Whether the server hears of all k clients in every round."""
    return participants(config.participation, k) == k and not config.client_dropout


def sample(config: TrainConfig, k: int, round: int) -> Tensor:
    """Participants of a round, sorted ids (S,): the same for every method of one seed."""
    order = rng(config.seed, "participants", round).permutation(k)
    return torch.as_tensor(np.sort(order[: participants(config.participation, k)]))


def answers(config: TrainConfig, asked: Tensor, round: int) -> Tensor:
    """Whether each of the participants `asked` (S,) answers in a round, (S,) bool.

    Each fails to with the probability `client_dropout`, by (seed, round, client) alone.
    """
    share = config.client_dropout
    drawn = [rng(config.seed, "dropout", round, k).random() >= share for k in asked.tolist()]
    return torch.tensor(drawn) if share else torch.ones(len(asked), dtype=torch.bool)


def paces(config: TrainConfig, ids: Iterable[int], round: int) -> list[float]:
    """Which part of its local steps each of clients `ids` makes in a round; [] if all make all.

    A straggler has a number from 0 to 1, drawn by (seed, round, client) alone, and the others 1.
    """
    if not config.stragglers:
        return []
    pairs = [rng(config.seed, "stragglers", round, k).random(2).tolist() for k in ids]
    return [part if slow < config.stragglers else 1.0 for slow, part in pairs]


def evaluated(config: TrainConfig, k: int) -> Tensor:
    """Clients that are evaluated, sorted ids: all, or eval_clients drawn at random by the seed."""
    if not config.eval_clients:
        return torch.arange(k)
    order = rng(config.seed, "evaluated").permutation(k)
    return torch.as_tensor(np.sort(order[: config.eval_clients]))


def evaluate_at(config: TrainConfig, round: int) -> bool:
    """Whether a round is evaluated: 0, e, 2e, ... of e = eval_every, and always the last."""
    return round % config.eval_every == 0 or round == config.rounds


def evaluates_after(config: TrainConfig, k: int) -> bool:
    """Whether models are evaluated after local training, too.

    As config.eval_after says; where that is None, if all k clients train in every round.
    """
    return everyone(config, k) if config.eval_after is None else config.eval_after


def visits(config: TrainConfig, k: int) -> float:
    """How often the k clients train in a run, in sum, also for evaluations after local training.

    What chance decides counts with its mean: who answers, who is evaluated without having trained
    in the round, and a straggler's part of its steps.
    """
    answer = participants(config.participation, k) * (1 - config.client_dropout)
    steady = 1 - config.stragglers / 2
    trained = answer * steady * config.rounds
    if not evaluates_after(config, k):
        return trained
    scored = config.eval_clients or k
    times = sum(evaluate_at(config, r) for r in range(config.rounds))
    others = scored * (1 - answer / k)
    end = answer * steady + others if everyone(config, k) or config.stragglers else scored
    return trained + others * times + end
