"""One round as a method's hooks see it: the only way from a method to the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl_core import optim
from pfl_core.engine import hooks
from pfl_core.engine.engine import Engine
from pfl_core.engine.sgd import Job, Noise
from pfl_core.methods.base import State
from pfl_core.stacked import Params
from pfl_core.util import checks
from pfl_core.util.draws import rng


class Context:
    """One round as a method's hooks see it: participants `sel` (S,), `round`, `state`, training.

    `ids` is `sel` as numbers of the host, where they are known, so that no GPU is waited for.
    `paces` says which part of its steps each client makes (participation.py), by default all.
    """

    def __init__(
        self,
        engine: Engine,
        state: State,
        sel: Tensor,
        round: int,
        ids: list[int] | None = None,
        paces: Sequence[float] = (),
    ):
        self._engine, self.state, self.sel, self.round = engine, state, sel, round
        self._ids = sel.tolist() if ids is None else ids
        self._paces = paces

    @property
    def lr(self) -> float:
        """The experiment's learning rate in this round."""
        return optim.rate(self._engine.config, self.round)

    def train(
        self,
        loss: Callable,
        start: Params,
        *,
        anchor: Params | None = None,
        only: Iterable[str] | Callable[[str], bool] | None = None,
        clipped: Iterable[str] | None = None,
        lr: float | dict[str, float] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        step: Callable | None = None,
        batch: int | None = None,
        batches: int = 1,
        split: str = "train",
        fraction: float = 1.0,
        stream: str = "local",
        bn: str = "train",
        aside: bool = False,
    ) -> Params:
        """Local training of the S clients; methods/base.py says what each argument is.

        Raises
        ------
        ValueError
            For names that are not in start, for a batch that is no size, for a step of the method's
            own in place of another optimizer than SGD, and for split "test" if the method does not
            declare `leaks_test`.
        """
        self._check_split(split)
        if step is not None and not aside:
            hooks.check_step(self._engine.method)
        engine, config = self._engine, self._engine.config
        trained = engine.task.parameters if only is None else _namer(only, start)
        names = [n for n in start if n in trained]
        if epochs is None and not steps:
            epochs, steps = config.epochs, config.steps
        if not names or not (epochs or steps):
            return start
        how = dict(epochs=epochs or 0, steps=steps or 0, stream=stream, batches=batches)
        size = config.batch if batch is None else _size(batch)
        indices = self._batch_indices(**how, batch=size, split=split, fraction=fraction)
        noise = [_noise(engine, stream, self.round, k) for k in self._ids]
        near, rate = start if anchor is None else anchor, self.lr if lr is None else lr
        job = Job(loss, start, near, names, indices, noise, step, rate, bn == "train")
        counts = None if clipped is None else frozenset(clipped)
        job = job._replace(clipped=counts, varies=config.lr_schedule != "constant")
        with engine.data.augmented(self.round, self._ids):
            return engine.run(job._replace(seeds=self._seeds(stream)))

    def _batch_indices(self, **how: Any) -> list[Tensor]:
        data, config = self._engine.data, self._engine.config
        how |= dict(kind=config.plan, shuffle=config.shuffle)
        found = [data.batch_indices(k, self.round, **how) for k in self._ids]
        for i, pace in enumerate(self._paces):  # from one step to all of them
            found[i] = found[i][: 1 + int(pace * len(found[i]))]
        # One transfer for all.
        here = torch.as_tensor(np.concatenate(found), device=data.device)
        return list(here.split([len(indices) for indices in found]))

    def _seeds(self, stream: str) -> list[int]:
        if not self._engine.foreign:
            return []
        purpose, seed = stream + "/draws", self._engine.config.seed
        return [int(rng(seed, purpose, self.round, k).integers(2**62)) for k in self._ids]

    def measure(
        self, fn: Callable, p: Params, split: str = "train", fold: tuple[int, int] | None = None
    ) -> Any:
        """Sums over each client's samples; methods/base.py says of what.

        Raises
        ------
        ValueError
            For a fold that is none, and for split "test" if the method does not declare
            `leaks_test`.
        """
        self._check_split(split)
        part = (0, 1) if fold is None else _part(fold)
        return self._engine.measure(fn, p, split, self._ids, part)

    def _check_split(self, split: str) -> None:
        checks.known("split", split, self._engine.data.index)
        if split == "test" and not self._engine.method.leaks_test:
            raise ValueError(
                f"method {self._engine.method.name!r} reads test data while training; "
                "only one with leaks_test = True may"
            )


class Rehearsal(Context):
    """A round in which nothing is trained: whether a step takes the optimizer's place is noted."""

    steps = False

    def train(
        self, loss: Callable, start: Params, *, step: Any = None, aside: bool = False, **how: Any
    ) -> Params:
        """`start` as it is."""
        self.steps |= step is not None and not aside
        return start


def check_steps(engine: Engine, state: State) -> None:
    """Raise ValueError where a step of the method's own takes another optimizer's place than SGD's.

    Client 0 asks for all trainings of its first round, and nothing is trained.
    """
    if engine.config.optimizer == "sgd":
        return
    method, sel = engine.method, torch.zeros(1, dtype=torch.int64, device=engine.data.device)
    ctx = Rehearsal(engine, state, sel, state.round)
    # What is not ours may miss what training would have made; then `train` refuses, later.
    with contextlib.suppress(Exception) if engine.foreign else contextlib.nullcontext():
        method.local(ctx, method.begin(state, sel, method.download(state, sel)))
        method.personal(state, ctx)
    if ctx.steps:
        hooks.check_step(method)


def _namer(only: Iterable[str] | Callable[[str], bool], start: Params) -> set[str]:
    if callable(only):
        return {n for n in start if only(n)}
    names = set(only)
    if names - start.keys():
        raise ValueError(
            f"cannot train {sorted(names - start.keys())}: "
            f"not among the names of start ({', '.join(start)})"
        )
    return names


def _size(batch: int) -> int:
    if not isinstance(batch, int) or batch < 1:
        raise ValueError(f"ctx.train(batch={batch!r}): allowed is an integer >= 1")
    return batch


def _part(fold: Any) -> tuple[int, int]:
    match fold:
        case (int(i), int(n)) if 0 <= i < n:
            return i, n
    raise ValueError(f"ctx.measure(fold={fold!r}): allowed is (i, n), the i-th of n from 0")


def _noise(engine: Engine, stream: str, round: int, k: int) -> Noise | None:
    if engine.method.noise is None:
        return None
    shape = tuple(engine.method.noise)

    def begin() -> Callable[[tuple[int, ...]], Tensor]:
        generator = rng(engine.config.seed, stream + "/noise", round, k)

        def draw(lead: tuple[int, ...]) -> Tensor:
            return torch.as_tensor(generator.random((*lead, *shape)), dtype=engine.data.dtype)

        return draw

    return begin
