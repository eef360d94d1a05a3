"""One round as a method's hooks see it: the only way from a method to the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pfl_core.engine.engine import Engine
from pfl_core.engine.sgd import Job
from pfl_core.methods.base import State
from pfl_core.stacked import Params
from pfl_core.util import checks
from pfl_core.util.draws import rng


class Context:
    """One round as a method's hooks see it: `sel` (S,), `round`, `state`, and the engine bound to them."""

    def __init__(self, engine: Engine, state: State, sel: Tensor, round: int):
        self._engine, self.state, self.sel, self.round = engine, state, sel, round
        self._ids = sel.tolist()

    def train(
        self,
        loss: Callable,
        start: Params,
        *,
        anchor: Params | None = None,
        only: Iterable[str] | Callable[[str], bool] | None = None,
        lr: float | dict[str, float] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        step: Callable | None = None,
        batches: int = 1,
        split: str = "train",
        fraction: float = 1.0,
        stream: str = "local",
        bn: str = "train",
    ) -> Params:
        """`start` {name: (S, *shape)} after local SGD on `loss(p, anchor, batch)` of ONE client; nothing else of it changes.

        anchor (default start) rides along, constant; `only` names what is trained (default: the model's parameters); lr may be one
        per name; steps > 0 replaces epochs; `step(p, anchor, grad, Step) -> (p, memory)` replaces SGD, with grad(p, j) the
        gradient on the j-th of the step's `batches`; equal `stream`s see equal batches; `fraction` of the split is drawn;
        bn "train" | "eval" (running statistics).
        BatchNorm statistics advance on a step's first batch. Raises ValueError for names that are not in start, and for split "test" unless
        the method declares `leaks_test`.
        """
        e, config = self._engine, self._engine.config
        self._check_split(split)
        names = [
            n for n in start if n in (e.task.parameters if only is None else _namer(only, start))
        ]
        if epochs is None and not steps:
            epochs, steps = config.epochs, config.steps
        if not names or not (epochs or steps):
            return start
        how = dict(
            batch=config.batch,
            epochs=epochs or 0,
            steps=steps or 0,
            kind=config.plan,
            shuffle=config.shuffle,
        )
        how |= dict(stream=stream, batches=batches, split=split, fraction=fraction)
        plans = [
            torch.as_tensor(e.data.plan(k, self.round, **how), device=e.data.device)
            for k in self._ids
        ]
        noise = [_noise(e, stream, self.round, k) for k in self._ids]
        rate, near = config.lr if lr is None else lr, start if anchor is None else anchor
        seeds = [
            int(rng(e.config.seed, stream + "/draws", self.round, k).integers(2**62))
            for k in self._ids
            if e.foreign
        ]
        return e.run(Job(loss, start, near, names, plans, noise, step, rate, bn == "train", seeds))

    def measure(self, fn: Callable, p: Params, split: str = "train") -> Any:
        """Sums of fn(ONE client's p, Batch) over all samples of each client's split, in evaluation mode: (S, ...), or a dict of them.

        split: "train", "holdout", "fit" (train without holdout), "val"; "test" only for methods that declare `leaks_test`.
        """
        self._check_split(split)
        return self._engine.measure(fn, p, split, self._ids)

    def _check_split(self, split: str) -> None:
        checks.known("split", split, self._engine.data.index)
        if split == "test" and not self._engine.method.leaks_test:
            raise ValueError(
                f"method {self._engine.method.name!r} reads test data while training; only one with leaks_test = True may"
            )


def _namer(only: Iterable[str] | Callable[[str], bool], start: Params) -> set[str]:
    if callable(only):
        return {n for n in start if only(n)}
    names = set(only)
    if names - start.keys():
        raise ValueError(
            f"cannot train {sorted(names - start.keys())}: not among the names of start ({', '.join(start)})"
        )
    return names


def _noise(e: Engine, stream: str, round: int, k: int) -> Callable | None:
    if e.method.noise is None:
        return None
    shape = tuple(e.method.noise)

    def draws() -> Callable[[tuple[int, ...]], Tensor]:
        g = rng(e.config.seed, stream + "/noise", round, k)
        return lambda lead: torch.as_tensor(g.random((*lead, *shape)), dtype=e.data.dtype)

    return draws
