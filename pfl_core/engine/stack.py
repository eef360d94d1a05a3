"""Memory for a stack of clients of one kind of job, and their vmapped step, captured on a GPU.

A stack is memory that stays where it is. Clients with the most steps come first in it. Those that
are done drop off its end, and the stack shrinks over a few sizes (`sizes`), so that few graphs are
captured. Until it shrinks, a client that is done is copied out and its rows run on, unused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad as func_grad
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from pfl_core import optim
from pfl_core.data.client_data import ClientData
from pfl_core.engine.convolutions import GROUPED, UNFOLD
from pfl_core.engine.graphs import CaptureFailed, Graphs, captured
from pfl_core.engine.rules import Rules
from pfl_core.engine.sgd import Job, cast, update
from pfl_core.methods.base import Batch, Method, Step
from pfl_core.stacked import Params, clone, is_common, select

WARM = 2  # eager steps of a size before it is captured: libraries choose their kernels in them
# Of a stack's size to the next: at most three rows in ten are computed in vain, on average 1 or 2.
SHRINK = 0.71


def sizes(most: int) -> list[int]:
    """The sizes that a stack of `most` clients shrinks over, largest first, 1 last."""
    out = [most]
    while out[-1] > 1:
        out.append(min(out[-1] - 1, math.ceil(out[-1] * SHRINK)))
    return out


class Stack:
    """Memory for `most` clients of one kind of job, and its step over the first rows of it.

    Parameters
    ----------
    most : int
        How many clients it has room for.
    capturing : Graphs, optional
        What captures the step for each of `sizes`, if anything does.
    form : str
        How convolutions are multiplied (convolutions.py).
    """

    def __init__(
        self,
        method: Method,
        data: ClientData,
        job: Job,
        most: int,
        capturing: Graphs | None,
        form: str = GROUPED,
    ):
        self.method, self.data, self.config = method, data, method.task.config
        self.most, self.capturing, self.form = most, capturing, form
        # The job itself is not kept: a graph lives for many rounds, each with a start of its own.
        self.names, self.loss = job.names, job.loss
        self.custom, self.lr = job.step, job.lr
        self.rates: Tensor | None = None
        if job.varies and self.custom is None:  # read from memory: a graph lives for many rounds
            self.rates = torch.tensor(job.rates, dtype=torch.float64, device=data.device)
        self.update = update(method, job, True, None if self.rates is None else [*self.rates])
        changing = set(job.changing(method.task.buffers))
        self.stats = [n for n in method.task.buffers if n in job.start] if job.training else []
        self.live = {
            n: v.new_empty(most, *v.shape[1:]) for n, v in job.start.items() if n in changing
        }
        self.fixed = {n: _room(v, most) for n, v in job.start.items() if n not in changing}
        self.anchor = {n: _room(v, most) for n, v in job.anchor.items()}
        self.given = tuple(job.start)
        self.memory: Params = {}
        self.reached = set(self.names)
        kept = optim.optimizer(self.config).kept(self.config) if self.custom is None else ()
        if self.custom is None and (kept or self.config.weight_decay):
            # Of the others vmap gives zeros, which decay and momentum would move.
            value, leaves = first_loss(method, data, job, form)
            found = torch.autograd.grad(value, [*leaves.values()], allow_unused=True)
            self.reached = {n for n, g in zip(leaves, found, strict=True) if g is not None}
        self.moments = {p: [self._moment(p, n) for n in self.names] for p in kept}
        self.idx = job.indices[0].new_zeros(most, *job.indices[0].shape[1:])
        self.noise: Tensor | None = None
        # float64 calculates as a Python number does.
        self.t = torch.zeros((), dtype=torch.float64, device=data.device)
        steps = sizes(most)
        self.size_for = [min(s for s in steps if s >= active) for active in range(most + 1)]
        self.graphs: dict[int, Callable[[], None]] = {}  # by size, what replays the step
        self.warm = dict.fromkeys(steps, 0)

    @property
    def executor(self) -> str:
        """What its steps run through, as a result says it."""
        return ("graphs" if self.capturing else "batched") + f":{self.form}" * (self.form == UNFOLD)

    def run(self, job: Job, ids: list[int], out: Params) -> None:
        """Train clients `ids` of a job, which come longest first.

        What changed is written into their rows of `out` {name: (S, *shape)}. CaptureFailed if the
        step is to be captured and cannot be.
        """
        rows = torch.tensor(ids, device=self.data.device)
        self._begin(job, rows)
        indices = pad_sequence([job.indices[i] for i in ids])  # (T, clients, batches, B)
        lengths, active = [len(job.indices[i]) for i in ids], len(ids)
        noise = self._draw(job, ids) if job.noise[0] else None
        for t in range(lengths[0]):
            self.idx[:active] = indices[t, :active]
            if noise is not None and self.noise is not None:
                self.noise[:active] = noise[t, :active]
            self._step(active, t)
            before = active
            while active and lengths[active - 1] == t + 1:
                active -= 1
            if active < before:
                self._copy_out(job, rows, slice(active, before), out)

    def _draw(self, job: Job, ids: list[int]) -> Tensor:
        # The noise of all steps in one transfer, (T, clients, batches, B, *noise).
        asked = [(len(job.indices[i]), job.noise[i]) for i in ids]
        drawn = [noise()((steps, *self.idx.shape[1:])) for steps, noise in asked if noise]
        noise = pad_sequence(drawn).to(self.data.device)
        if self.noise is None:
            self.noise = noise.new_zeros(self.most, *noise.shape[2:])
        return noise

    def _copy_out(self, job: Job, rows: Tensor, done: slice, out: Params) -> None:
        # The clients in rows `done` have made their last step.
        for n, v in self.live.items():
            if n not in out:  # a custom step changed it, or brought it forth
                out[n] = _rows_of(job.start.get(n), v, len(job.indices))
            out[n][rows[done]] = v[done]

    def _begin(self, job: Job, rows: Tensor) -> None:
        _fill(select(self.live, job.start), job.start, rows)
        _fill(self.fixed, job.start, rows)
        _fill(self.anchor, job.anchor, rows)
        kept = {id(v) for v in self.live.values()}
        for v in (v for several in self.moments.values() for v in several):
            if id(v) not in kept:
                v.zero_()
        self.t.zero_()
        if self.rates is not None:
            self.rates.copy_(torch.tensor(job.rates, dtype=torch.float64))

    def _moment(self, prefix: str, n: str) -> Tensor:
        # The optimizer's state of a trained name: rows of it that clients keep, or memory for them.
        kept = self.live.get(prefix + n)
        return optim.moment(prefix, self.live[n], True) if kept is None else kept

    def _step(self, active: int, t: int) -> None:
        # A custom step sees at t = 0 that it has no memory yet: that one is never captured.
        eager = self.custom is not None and t == 0
        if self.capturing is None:  # as many rows as there are clients
            return self._body(active, t)
        size = self.size_for[active]
        if not eager and size not in self.graphs and self.warm[size] >= WARM:
            body = functools.partial(self._body, size, None)
            self.graphs[size] = captured(self.capturing, body, self.data.device.type)
        if size in self.graphs and not eager:
            return self.graphs[size]()
        self.warm[size] += not eager
        self._body(size, t)

    def _body(self, size: int, t: int | None) -> None:
        # One local step of the first `size` rows, from gathering to update. In a graph t is None:
        # the number of the step is read from self.t, which counts by itself.
        x, y = self.data.batch(self.idx[:size])
        noise = None if self.noise is None else self.noise[:size]
        known = self.fixed | self.live  # what a custom step brings forth is not there at first
        here = {n: known[n][:size] for n in (self.given if t == 0 else known)}
        near = {n: v[:size] for n, v in self.anchor.items()}
        if self.custom is None:
            grads, new = self._gradients(
                here, near, x[:, 0], y[:, 0], None if noise is None else noise[:, 0]
            )
            found = [grads[n] if n in self.reached else None for n in self.names]
            moments = {p: [v[:size] for v in several] for p, several in self.moments.items()}
            self.update([here[n] for n in self.names], found, moments)
        else:
            memory = {n: v[:size] for n, v in self.memory.items()} if t != 0 else {}
            count = self.t if t is None else t
            stats = {n: here.pop(n) for n in self.stats}
            step = functools.partial(self._custom_step, count)
            new, memory = over_clients(step, (here, stats, near, x, y, noise, memory))
            if t != 0 and memory.keys() != self.memory.keys():
                self._changed("its memory")
                self.memory = select(self.memory, memory)
            self._keep(self.memory, memory, size, t)
            self.t += 1
        self._keep(self.live, new, size, t)

    def _keep(self, into: Params, new: Params, size: int, t: int | None) -> None:
        for n, v in new.items():
            if n not in into:  # a step changes what stood fixed: from now on it has rows
                if t != 0 or self.graphs:
                    self._changed(n)
                old = self.fixed.get(n) if into is self.live else None
                into[n] = _rows_of(old, v, self.most)
            into[n][:size] = v

    def _changed(self, what: str) -> None:
        # Graphs are of steps that touch the same memory each time.
        if self.capturing is not None:
            raise CaptureFailed(f"{what} is not the same from step to step")

    def _gradients(
        self, p: Params, anchor: Params, x: Tensor, y: Tensor, noise: Tensor | None
    ) -> tuple[Params, Params]:
        stats = {n: p[n] for n in self.stats}
        rest = {n: v for n, v in p.items() if n not in stats and n not in self.names}

        def value(
            trained: Params, stats: Params, rest: Params, anchor: Params, *batch: Tensor
        ) -> tuple[Tensor, Params]:
            return self._value(rest | trained, stats, anchor, Batch(*batch))

        args = ({n: p[n] for n in self.names}, stats, rest, anchor, x, y, noise)
        return over_clients(func_grad(value, has_aux=True), args)

    def _value(
        self, p: Params, stats: Params, anchor: Params, batch: Batch
    ) -> tuple[Tensor, Params]:
        # ONE client's loss, and the statistics after it: BatchNorm writes into them.
        stats = {n: v.clone() for n, v in stats.items()}
        with cast(self.config, self.data.device), Rules(self.form, batch.y):
            return self.loss(p | stats, anchor, batch), stats

    def _custom_step(
        self,
        t: int | Tensor,
        p: Params,
        stats: Params,
        anchor: Params,
        x: Tensor,
        y: Tensor,
        noise: Tensor | None,
        memory: Params,
    ) -> tuple[Params, Params]:
        # Of ONE client.
        custom, live = self.custom, [stats]
        assert custom is not None  # it is asked for before

        def gradient(q: Params, j: int = 0) -> Params:
            batch = Batch(x[j], y[j], None if noise is None else noise[j])

            def value(trained: Params) -> tuple[Tensor, Params]:
                return self._value(q | trained, live[0], anchor, batch)

            g, s = func_grad(value, has_aux=True)({n: q[n] for n in self.names})
            if j == 0:
                live[0] = s
            return g

        q, kept = custom(p, anchor, gradient, Step(t, self.lr, memory))
        return {n: v for n, v in q.items() if v is not p.get(n)} | live[0], kept


def first_loss(method: Method, data: ClientData, job: Job, form: str) -> tuple[Tensor, Params]:
    """The loss of client 0's first batch, and the leaves {name: (*shape)} that are trained in it.

    Nothing is changed by it.
    """
    p, near = ({n: v[0] for n, v in q.items()} for q in (job.start, job.anchor))
    leaves = {n: p[n].detach().requires_grad_() for n in job.names}
    stats = {n: p[n].clone() for n in method.task.buffers if n in p}
    drawn = job.noise[0] and job.noise[0]()(job.indices[0].shape[2:]).to(data.device)
    batch = Batch(*data.batch(job.indices[0][0, 0]), drawn)
    mode, autocast = method.task.mode(job.training), cast(method.task.config, data.device)
    with mode, torch.enable_grad(), autocast, Rules(form, batch.y):
        return job.loss(p | leaves | stats, near, batch), leaves


def _room(v: Tensor, most: int) -> Tensor:
    # Memory for `most` rows like those of v; one row for all where v's are one.
    if is_common(v):
        return v.new_empty(1, *v.shape[1:]).expand(most, *v.shape[1:])
    return v.new_empty(most, *v.shape[1:])


def _rows_of(old: Tensor | None, like: Tensor, count: int) -> Tensor:
    # A copy of `old`; where there is none, `count` rows of zeros.
    if old is None:
        return like.new_zeros(count, *like.shape[1:])
    return clone({"": old})[""]


def _fill(into: Params, source: Params, rows: Tensor) -> None:
    for n, room in into.items():
        v = source[n]
        if is_common(v):
            room[: 1 if is_common(room) else len(rows)] = v[:1]
        else:
            room[: len(rows)] = v[rows]


def over_clients(fn: Callable, args: tuple) -> Any:
    """vmap of `fn` over the leading axis of `args`; what all clients hold alike is passed once."""

    def split(v: Any) -> tuple[Any, Any]:
        if isinstance(v, dict):
            pairs = {n: split(u) for n, u in v.items()}
            return {n: a for n, (a, _) in pairs.items()}, {n: d for n, (_, d) in pairs.items()}
        if v is None:
            return None, None
        return (v[0], None) if is_common(v) else (v, 0)

    values, dims = zip(*(split(a) for a in args), strict=True)
    return vmap(fn, in_dims=dims, randomness="error")(*values)
