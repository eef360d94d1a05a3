"""Train S clients at once and evaluate all: one contract, executors with the same numbers.

`threads` runs one client a worker with plain autograd (CPU), longest first; `batched` stacks clients and takes one vmapped step for all of
them (see batched.py); `graphs` is `batched` with its steps captured and replayed (GPU).
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_core.data.client_data import ClientData
from pfl_core.engine.batched import GRAPHS, Batched, Job, cast, sgd
from pfl_core.methods.base import Batch, Method, State, Step
from pfl_core.stacked import Params, is_common, own
from pfl_core.util import checks, identity
from pfl_core.util.draws import Draws, rng

EXECUTORS = ("auto", "graphs", "batched", "threads")
# executor="auto", by kind of device. On a CPU no kind of model gains enough from another one to be worth other last digits (two cores, s a
# round, threads / batched): CNN, LeNet: threads; MobileNet-v1 3.05 / 5.4; ResNet-34 of width 1/4 6.7 / 5.8.
AUTO = {"cpu": "threads", "cuda": "graphs"}
EVAL_BATCH = {"cpu": 128, "cuda": 2048}  # samples; on a CPU what fits its caches, measured: 512 takes 1.5 times as long
GATHER = 2048  # samples made into floats at once by the threads executor: few calls, little memory


class Engine:
    """Executes local training and evaluation of one method, under the settings of its task, on its clients' data."""

    def __init__(self, method: Method, data: ClientData, executor: str = "auto", workers: int | None = None):
        checks.known("executor", executor, EXECUTORS)
        self.method, self.task, self.data, self.config = method, method.task, data, method.task.config
        self.executor = AUTO[data.device.type] if executor == "auto" else executor
        if self.executor == "graphs" and data.device.type not in GRAPHS:
            raise ValueError("executor 'graphs' needs a GPU; use device='cuda', or executor 'threads' or 'batched'")
        self.batched = Batched(method, data, graphs=self.executor == "graphs")
        self.ran: set[str] = set()  # executors that jobs went through
        self._resists: set[Any] = set()  # losses and steps that no stack can take
        # Only code that is not ours may draw random numbers of its own (dropout): it is looked at, and seeded.
        self.foreign = not (identity.is_ours(type(method)) and identity.is_ours(type(method.task.model)))
        self._random: dict[Any, bool] = {}
        self.workers = workers or (os.cpu_count() or 1)
        if data.device.type == "cpu":
            _keep_memory()
        one_thread = lambda: torch.set_num_threads(1)  # noqa: E731  (equal numbers whatever the number of workers)
        self._pool = ThreadPoolExecutor(self.workers, initializer=one_thread)

    def close(self) -> None:
        """End the worker threads."""
        self._pool.shutdown()
        if self.data.device.type == "cpu":
            _libc("malloc_trim", 0)

    def context(self, state: State, sel: Tensor, round: int) -> Context:
        """The view of one round for clients `sel` (S,) that a method's hooks get."""
        return Context(self, state, sel, round)

    def _map(self, fn: Callable, items: Iterable) -> list:
        # On a GPU one thread issues all work; on a CPU each worker takes the next client.
        return list(self._pool.map(fn, items)) if self.data.device.type == "cpu" else [fn(i) for i in items]

    def drawing(self, purpose: str, *ids: int) -> AbstractContextManager:
        """Within it, what foreign code draws in this thread is a function of (seed, purpose, ids), not of torch's global generator."""
        seed = lambda: int(rng(self.config.seed, purpose + "/draws", *ids).integers(2**62))  # noqa: E731
        return Draws(seed()) if self.foreign else nullcontext()

    def draws(self, job: Job) -> bool:
        """Whether local training draws random numbers beside its batches, as a model with dropout does: its first step is tried."""
        what = (job.loss, job.step)
        if self.foreign and what not in self._random:
            first = job._replace(plans=[job.plans[0][:1]])
            with self.task.mode(job.training), Draws(0) as trial:
                if job.step:
                    self._one_custom(first, 0)
                else:
                    p, near = ({n: v[0].clone() for n, v in q.items()} for q in (job.start, job.anchor))
                    job.loss(p, near, next(self._batches(first, 0))[0])
            self._random[what] = trial.count > 0
        return self.foreign and self._random[what]

    # -- local training --------------------------------------------------------------------------------------------------
    def run(self, job: Job) -> Params:
        """Local training of all clients of a job: `job.start` with the trained entries replaced."""
        what = (job.loss, job.step)
        if self.draws(job):
            if self.executor == "batched":
                raise ValueError(
                    f"{self.method.name}: its loss draws random numbers (dropout), for which executor 'batched' has no seed a "
                    "client; use executor='auto' or 'threads'"
                )
            self.ran.add("threads")
            return job.start | self._threads(job, drawn=True)
        if self.executor == "threads" or what in self._resists:
            self.ran.add("threads")
            return job.start | self._threads(job)
        try:
            changed = self.batched.run(job)
        except RuntimeError as error:
            if self.executor == "batched" or isinstance(error, torch.OutOfMemoryError):
                raise
            said = str(error).strip().partition("\n")[0]
            warnings.warn(f"{self.method.name}: clients cannot be stacked ({said}); they run one by one", stacklevel=2)
            self._resists.add(what)
            return self.run(job)
        self.ran |= self.batched.used
        return job.start | changed

    def _threads(self, job: Job, drawn: bool = False) -> Params:
        # Own memory for all that local SGD writes.
        changing = job.changing(self.task.buffers) if job.step is None else ()
        out = own({n: job.start[n] for n in changing})
        results: list[Params] = [{}] * len(job.plans)

        def one(i: int) -> None:
            seeded = Draws(job.seeds[i]) if drawn else nullcontext()
            with self.task.mode(job.training), torch.enable_grad(), seeded:
                results[i] = self._one_custom(job, i) if job.step else self._one_sgd(job, i, out)

        self._map(one, job.order)
        if job.step is None:
            return out
        return {n: torch.stack([r[n] for r in results]) for n in results[0]}

    def _batches(self, job: Job, i: int) -> Iterable[list[Batch]]:
        # The batches of each step of client i, gathered many steps at a time.
        plan, b = job.plans[i], job.plans[i].shape[2]
        noise = job.noise[i]() if job.noise[i] else None
        stride = max(1, GATHER // (plan.shape[1] * b))
        for chunk in plan.split(stride):
            x, y = self.data.batch(chunk)
            if self.data.kind == "image":
                x = x.flatten(0, 2).contiguous(memory_format=torch.channels_last).view_as(x)
            for t in range(len(chunk)):
                drawn = [noise((b,)).to(self.data.device) if noise else None for _ in range(plan.shape[1])]
                yield [Batch(x[t, j], y[t, j], drawn[j]) for j in range(plan.shape[1])]

    def _one_sgd(self, job: Job, i: int, out: Params) -> Params:
        # .data: a version counter of the client's own, which other threads' in-place updates do not touch.
        # Kernels in channels-last order: convolutions on a CPU are a fifth to a third faster (measured).
        params = [_channels_last(out[n][i].data).requires_grad_() for n in job.names]
        mine = {n: v[i].data for n, v in (job.start | out).items()} | dict(zip(job.names, params, strict=True))
        anchor = {n: v[i] for n, v in job.anchor.items()}
        update = sgd(self.method, job, stacked=False)
        velocity = [mine.get(f"opt.{n}") for n in job.names] if self.config.momentum else []
        velocity = [torch.zeros_like(p) if v is None else v for p, v in zip(params, velocity, strict=False)]
        for (batch,) in self._batches(job, i):
            with cast(self.config, self.data.device):
                value = job.loss(mine, anchor, batch)
            grads = torch.autograd.grad(value, params, allow_unused=True, materialize_grads=True)
            with torch.no_grad():
                update(params, list(grads), velocity)
        for n, v in zip(job.names, params, strict=True):
            out[n][i] = v.data
        return {}

    def _one_custom(self, job: Job, i: int) -> Params:
        p = {n: _channels_last(v[i]) if n in job.names else v[i] for n, v in job.start.items()}
        anchor = {n: v[i] for n, v in job.anchor.items()}
        stats = {n: p.pop(n).clone() for n in self.task.buffers if n in p} if job.training else {}
        memory: Params = {}
        before = dict(p)
        for t, batches in enumerate(self._batches(job, i)):

            def gradient(p: Params, j: int = 0, batches: list[Batch] = batches) -> Params:
                leaves = {n: p[n].detach().requires_grad_() for n in job.names}
                # Statistics advance on a step's first batch only; the others see a copy.
                live = stats if j == 0 else {n: v.clone() for n, v in stats.items()}
                with torch.enable_grad():
                    with cast(self.config, self.data.device):
                        value = job.loss(p | leaves | live, anchor, batches[j])
                    grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
                return dict(zip(leaves, grads, strict=True))

            with torch.no_grad():
                p, memory = job.step(p, anchor, gradient, Step(t, job.lr, memory))
        return {n: v for n, v in p.items() if v is not before.get(n)} | stats

    # -- evaluation ------------------------------------------------------------------------------------------------------
    def evaluate(self, p: Params, split: str, ids: Iterable[int] | None = None) -> dict[str, np.ndarray]:
        """Accuracy and loss of models p {name: (K, *shape)} on each client's `split`: {"correct", "loss", "n"}, each (K,) sums."""
        ids = list(range(self.data.K)) if ids is None else list(ids)
        index = [self.data.index[split][k] for k in ids]
        n = np.array([len(i) for i in index])
        if not n.sum():
            return {"correct": np.zeros(len(ids)), "loss": np.zeros(len(ids)), "n": n}
        alike = all(is_common(v) for v in p.values())
        where = [np.arange(n.sum())] if alike or len(ids) == 1 else np.split(np.arange(n.sum()), n.cumsum()[:-1])
        pool = torch.as_tensor(np.concatenate(index), device=self.data.device)
        hit, loss = np.zeros(n.sum()), np.zeros(n.sum())
        size, cpu = EVAL_BATCH[self.data.device.type], self.data.device.type == "cpu"
        tasks = [(m, w[at : at + size]) for m, w in enumerate(where) for at in range(0, len(w), size)]

        @functools.lru_cache(2 * self.workers)  # a model's batches follow one another
        def served(model: int) -> Params:
            return {k: _channels_last(v[model]) if cpu else v[model] for k, v in p.items()}

        def one(todo: tuple[int, np.ndarray]) -> None:
            model, at = todo
            x, y = self.data.batch(pool[torch.as_tensor(at, device=self.data.device)])
            if cpu and self.data.kind == "image":
                x = x.contiguous(memory_format=torch.channels_last)
            with torch.no_grad(), self.task.mode(False):
                scores = self.method.logits(served(model), x)
                hit[at] = (scores.argmax(1) == y).cpu().numpy()
                loss[at] = F.cross_entropy(scores, y, reduction="none").cpu().numpy()

        self._map(one, sorted(tasks, key=lambda todo: -len(todo[1])))
        owner = np.repeat(np.arange(len(ids)), n)
        return {"correct": np.bincount(owner, hit, len(ids)), "loss": np.bincount(owner, loss, len(ids)), "n": n}

    def measure(self, fn: Callable, p: Params, split: str, ids: list[int]) -> Any:
        """Sums of fn(ONE client's p, Batch) -> tensor or dict of tensors over each client's samples, stacked (S, ...)."""

        def one(i: int) -> Any:
            idx = torch.as_tensor(self.data.index[split][ids[i]], device=self.data.device)
            mine = {n: v[i] for n, v in p.items()}
            with torch.no_grad(), self.task.mode(False):
                parts = [
                    fn(mine, Batch(*self.data.batch(chunk))) for chunk in idx.split(EVAL_BATCH[self.data.device.type])
                ]
            if isinstance(parts[0], dict):
                return {n: sum(part[n] for part in parts) for n in parts[0]}
            return sum(parts)

        got = self._map(one, range(len(ids)))
        return {n: torch.stack([g[n] for g in got]) for n in got[0]} if isinstance(got[0], dict) else torch.stack(got)


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
        names = [n for n in start if n in (e.task.parameters if only is None else _namer(only, start))]
        if epochs is None and not steps:
            epochs, steps = config.epochs, config.steps
        if not names or not (epochs or steps):
            return start
        how = dict(batch=config.batch, epochs=epochs or 0, steps=steps or 0, kind=config.plan, shuffle=config.shuffle)
        how |= dict(stream=stream, batches=batches, split=split, fraction=fraction)
        plans = [torch.as_tensor(e.data.plan(k, self.round, **how), device=e.data.device) for k in self._ids]
        noise = [_noise(e, stream, self.round, k) for k in self._ids]
        rate, near = config.lr if lr is None else lr, start if anchor is None else anchor
        seeds = [
            int(rng(e.config.seed, stream + "/draws", self.round, k).integers(2**62)) for k in self._ids if e.foreign
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


def _libc(name: str, *args: int) -> None:
    # A call of the C library, where it has such a function (glibc).
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), name):
        getattr(libc, name)(*args)


def _keep_memory() -> None:
    # From now on memory of freed tensors stays with the process, until an engine closes and what is free goes back: pages handed back and
    # asked for again in every step cost up to half of a round (FLAYER's ResNet-18; a sixth of FedAGHN's). In this order: no maps of their
    # own for large blocks, no trim, heaps that grow by 64 MB.
    for parameter, value in ((-4, 0), (-1, -1), (-2, 2**26)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
        _libc("mallopt", parameter, value)


def _channels_last(v: Tensor) -> Tensor:
    # A copy, always: with one channel `contiguous` keeps strides that convolutions take for the other order.
    return torch.empty_like(v, memory_format=torch.channels_last).copy_(v) if v.dim() == 4 else v


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
