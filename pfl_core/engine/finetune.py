"""Fine-tuning as a stage of any run: epochs on the served models after the last round.

Nobody learns from it: the State of the federation stays as it is, and nothing travels. Each epoch
is evaluated, and its rows have when="tuned 1", "tuned 2", ..., counted through all stages. Its loss
is the cross-entropy of the method's class scores; a method's own terms and tensors play no part.
The optimizer is the experiment's; its state begins anew in each stage, and the rate is a stage's
own, or the experiment's `lr` whatever its schedule. The batches of epoch e after round R are those
of round R + e - 1: without a schedule "tuned 1" of FedAvg is its "after", and Local after R rounds
and e epochs is Local after R + e rounds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pfl_core import optim
from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.methods.base import Batch, Method, State
from pfl_core.methods.task import Task
from pfl_core.stacked import Params, select
from pfl_core.util import checks, fields
from pfl_core.util.fields import choice, number

ALL, HEAD, BODY = "all", "head", "body"
TUNED = "tuned"  # what `when` of its rows begins with
MOST = 10_000  # epochs of a stage; rows have each of them
FORM = 'allowed is {"epochs": 10, "lr": 0.01, "only": "head"}, lr and only may be left out, '
FORM += "or a list of such stages"


@dataclass(frozen=True)
class Stage:
    """One stage of fine-tuning."""

    epochs: int = number(
        0,
        "Epochs over a client's training samples (0: the stage is none); each is evaluated",
        low=0,
        high=MOST,
    )
    lr: float | None = number(None, "Learning rate (None: the experiment's)", low=0)
    only: str = choice(
        ALL,
        HEAD,
        BODY,
        doc="What is trained: the whole network, all below its head, or the head alone, on "
        "features that stay as they are served: BatchNorm normalises by its running statistics "
        "then",
    )


def stages(given: Any) -> list[Stage]:
    """The stages that a value of `Experiment(finetune=...)` says: a dict, a list of them, or None.

    Raises
    ------
    ValueError
        For another value.
    """
    listed = [given] if isinstance(given, dict) else [] if given is None else given
    if not isinstance(listed, list | tuple) or not all(isinstance(s, dict) for s in listed):
        raise ValueError(f"Experiment(finetune={given!r}): {FORM}")
    return [_stage(s) for s in listed]


def _stage(given: dict[str, Any]) -> Stage:
    kinds = Stage.__dataclass_fields__
    for name in given:
        checks.known("finetune: a stage's", name, kinds)
    if "epochs" not in given:
        raise ValueError(f"Experiment(finetune={dict(given)!r}) says no epochs; {FORM}")
    stage = Stage(**{n: checks.cast(v, kinds[n].type) for n, v in given.items()})
    fields.check("finetune", stage)
    return stage


def plain(given: Any) -> list[dict[str, Any]]:
    """The stages as dicts, in the form in which an Experiment keeps them: without defaults."""
    return [_told(stage) for stage in stages(given)]


def canonical(given: Any, lr: float) -> list[dict[str, Any]]:
    """The stages that change numbers, in the one form that ids are made of."""
    told = [_told(stage, lr) for stage in stages(given) if stage.epochs]
    return [{n: float(v) if n == "lr" else v for n, v in stage.items()} for stage in told]


def _told(stage: Stage, lr: float | None = None) -> dict[str, Any]:
    usual = {"lr": (None, lr), "only": (ALL,)}
    told = dataclasses.asdict(stage)
    return {n: v for n, v in told.items() if n == "epochs" or v not in usual[n]}


def moments(given: Any) -> list[str]:
    """What `when` says in the rows of fine-tuning: "tuned 1", ... up to all epochs together."""
    return [f"{TUNED} {e}" for e in range(1, sum(s.epochs for s in stages(given)) + 1)]


def check_served(method: Method, served: Params) -> None:
    """Raise ValueError where a method serves nothing that fine-tuning trains."""
    if moments(method.task.config.finetune) and served.keys().isdisjoint(method.task.parameters):
        raise ValueError(
            f"{method.name} serves {', '.join(served)}, and fine-tuning trains parameters of the "
            "network: serve them under their names, or leave finetune out"
        )


def check(method: Method) -> None:
    """Raise ValueError where a part of the network is to be tuned in which nothing is trained."""
    for stage in stages(method.task.config.finetune):
        if stage.epochs and not _part(method.task, stage.only):
            depth = "head_depth >= 1" if stage.only == HEAD else "a smaller head_depth"
            raise ValueError(
                f"Experiment(finetune={{'only': {stage.only!r}, ...}}) needs a {stage.only} that "
                f"can be trained: give {depth}, or name the head's modules in `head`"
            )


def _part(task: Task, only: str) -> list[str]:
    # Names of the parameters that a stage trains.
    head = task.head if only != ALL else frozenset()
    return [n for n in task.parameters if only == ALL or (n in head) == (only == HEAD)]


class Tuning:
    """The fine-tuning of one run's served models."""

    def __init__(self, engine: Engine, state: State):
        self.engine, self.state = engine, state
        self.task, self.config = engine.task, engine.config
        self.stages = stages(self.config.finetune)
        self.moments = moments(self.config.finetune)

    def loss(self, p: Params, anchor: Params, batch: Batch) -> Tensor:
        """What ONE client minimises: the cross-entropy of the class scores that it is served."""
        return F.cross_entropy(self.engine.method.logits(p, batch.x), batch.y)

    def epochs(self, served: Params, sel: Tensor, ids: list[int]) -> Iterator[tuple[str, Params]]:
        """(moment, {name: (S, *shape)}) after each epoch, from what clients `sel` are served."""
        moments, end = iter(enumerate(self.moments)), served
        for stage in self.stages:
            names = [n for n in _part(self.task, stage.only) if n in served]
            p = end | self._rest(names, end)  # the optimizer goes on from epoch to epoch
            for done, moment in itertools.islice(moments, stage.epochs):
                ctx = Context(self.engine, self.state, sel, self.state.round + done, ids)
                with self.engine.drawing("tune", ctx.round):
                    p = self._epoch(ctx, stage, names, p)
                end = select(p, served)
                yield moment, end

    def _epoch(self, ctx: Context, stage: Stage, names: list[str], p: Params) -> Params:
        bn = "eval" if stage.only == HEAD else "train"
        rate = self.config.lr if stage.lr is None else stage.lr  # whatever the rounds' schedule
        return ctx.train(self.loss, p, anchor={}, only=names, lr=rate, epochs=1, bn=bn)

    def _rest(self, names: list[str], p: Params) -> Params:
        # The optimizer's state at rest; the engine goes on with the one that it is given.
        if not optim.optimizer(self.config).kept(self.config):
            return {}
        return optim.at_rest(self.config, select(p, names))
