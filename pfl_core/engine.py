"""Train S clients at once and evaluate all: one contract, two executors, the same numbers.

`batched` stacks clients and takes one vmapped step for all of them (GPU); `threads` runs one client a worker with plain autograd (CPU).
Clients are sorted by their number of steps, so that finished ones drop off the end of the stack.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad as func_grad
from torch.func import vmap

from pfl_core import checks
from pfl_core.federation import Federation, rng
from pfl_core.methods.base import Batch, Method, State, Step
from pfl_core.stacked import Params, is_common, own

EXECUTORS = ("auto", "batched", "threads")
EVAL_BATCH = 512
GATHER = 2048  # samples made into floats at once by the threads executor: few calls, little memory


class Job(NamedTuple):
    """One phase of local training: what every client starts from, what it trains on and how."""

    loss: Callable
    start: Params
    anchor: Params
    names: list[str]  # trained
    plans: list[Tensor]  # pool indices (T_k, batches, B) of each client
    noise: list[Callable[[tuple[int, ...]], Tensor] | None]
    step: Callable | None
    lr: float | dict[str, float]
    training: bool


class Engine:
    """Executes local training and evaluation for one method on one federation.

    cfg holds the training fields of an Experiment: batch, epochs, steps, plan, shuffle, lr, momentum, weight_decay, clip.
    """

    def __init__(self, method: Method, fed: Federation, cfg: Any, executor: str = "auto", workers: int | None = None):
        checks.known("executor", executor, EXECUTORS)
        self.method, self.task, self.fed, self.cfg = method, method.task, fed, cfg
        self.executor = executor if executor != "auto" else ("threads" if fed.device.type == "cpu" else "batched")
        self.workers = workers or (os.cpu_count() or 1)
        one_thread = lambda: torch.set_num_threads(1)  # noqa: E731  (equal numbers whatever the number of workers)
        self._pool = ThreadPoolExecutor(self.workers, initializer=one_thread)

    def close(self) -> None:
        """End the worker threads."""
        self._pool.shutdown()

    def context(self, state: State, sel: Tensor, round: int) -> Context:
        """The view of one round for clients `sel` (S,) that a method's hooks get."""
        return Context(self, state, sel, round)

    def _map(self, fn: Callable, items: Iterable) -> list:
        # On a GPU one thread issues all work; on a CPU each worker takes the next client.
        return list(self._pool.map(fn, items)) if self.fed.device.type == "cpu" else [fn(i) for i in items]

    # -- local training --------------------------------------------------------------------------------------------------
    def run(self, job: Job) -> Params:
        """Local training of all clients of a job: `job.start` with the trained entries replaced."""
        changed = (self._batched if self.executor == "batched" else self._threads)(job)
        return job.start | changed

    def _rates(self, job: Job) -> list[float]:
        return [job.lr[n] if isinstance(job.lr, dict) else job.lr for n in job.names]

    def _optimizer(self, job: Job, optimiser: Params, stacked: bool) -> Callable[[list[Tensor], list[Tensor]], None]:
        # SGD in place, as torch.optim.SGD counts it; `opt.<name>` entries hold momentum across rounds.
        cfg, rates = self.cfg, self._rates(job)
        uniform = rates[0] if len(set(rates)) == 1 else None
        clipped = [i for i, n in enumerate(job.names) if self.method.is_clipped(n)] if cfg.clip else []
        velocity = [optimiser.get(f"opt.{n}") for n in job.names]

        def update(params: list[Tensor], grads: list[Tensor]) -> None:
            if clipped:
                clip_([grads[i] for i in clipped], cfg.clip, stacked)
            if cfg.weight_decay:
                grads = torch._foreach_add(grads, params, alpha=cfg.weight_decay)
            if cfg.momentum:
                for i, v in enumerate(velocity):
                    if v is None:
                        velocity[i] = torch.zeros_like(params[i])
                v = [b[: len(g)] if stacked else b for b, g in zip(velocity, grads, strict=True)]
                torch._foreach_mul_(v, cfg.momentum)
                torch._foreach_add_(v, grads)
                grads = v
            if uniform is None:
                torch._foreach_add_(params, torch._foreach_mul(grads, [-r for r in rates]))
            else:
                torch._foreach_add_(params, grads, alpha=-uniform)

        return update

    def _changing(self, job: Job) -> Params:
        # Own memory for all that local SGD writes: trained parameters, BatchNorm statistics, optimiser state.
        names = set(job.names) | {f"opt.{n}" for n in job.names}
        if job.training:
            names |= set(self.task.buffers)
        return own({n: v for n, v in job.start.items() if n in names})

    def _threads(self, job: Job) -> Params:
        out = self._changing(job) if job.step is None else {}
        order = sorted(range(len(job.plans)), key=lambda i: -len(job.plans[i]))
        results: list[Params] = [{}] * len(order)

        def one(i: int) -> None:
            with self.task.mode(job.training), torch.enable_grad():
                results[i] = self._one_custom(job, i) if job.step else self._one_sgd(job, i, out)

        self._map(one, order)
        if job.step is None:
            return out
        return {n: torch.stack([r[n] for r in results]) for n in results[0]}

    def _batches(self, job: Job, i: int) -> Iterable[list[Batch]]:
        # The batches of each step of client i, gathered many steps at a time.
        plan, noise, b = job.plans[i], job.noise[i], job.plans[i].shape[2]
        stride = max(1, GATHER // (plan.shape[1] * b))
        for chunk in plan.split(stride):
            x, y = self.fed.batch(chunk)
            if self.fed.is_image:
                x = x.flatten(0, 2).contiguous(memory_format=torch.channels_last).view_as(x)
            for t in range(len(chunk)):
                yield [Batch(x[t, j], y[t, j], noise((b,)) if noise else None) for j in range(plan.shape[1])]

    def _one_sgd(self, job: Job, i: int, out: Params) -> Params:
        # .data: a version counter of the client's own, which other threads' in-place updates do not touch.
        # Kernels in channels-last order: convolutions on a CPU are a fifth to a third faster (measured).
        params = [_channels_last(out[n][i].data).requires_grad_() for n in job.names]
        mine = {n: v[i].data for n, v in (job.start | out).items()} | dict(zip(job.names, params, strict=True))
        anchor = {n: v[i] for n, v in job.anchor.items()}
        update = self._optimizer(job, mine, stacked=False)
        for (batch,) in self._batches(job, i):
            value = job.loss(mine, anchor, batch)
            grads = torch.autograd.grad(value, params, allow_unused=True, materialize_grads=True)
            with torch.no_grad():
                update(params, list(grads))
        for n, v in zip(job.names, params, strict=True):
            out[n][i] = v.data
        return {}

    def _one_custom(self, job: Job, i: int) -> Params:
        p = {n: v[i] for n, v in job.start.items()}
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
                    value = job.loss(p | leaves | live, anchor, batches[j])
                    grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
                return dict(zip(leaves, grads, strict=True))

            with torch.no_grad():
                p, memory = job.step(p, anchor, gradient, Step(t, job.lr, memory))
        return {n: v for n, v in p.items() if v is not before.get(n)} | stats

    def _batched(self, job: Job) -> Params:
        order = sorted(range(len(job.plans)), key=lambda i: -len(job.plans[i]))
        perm = torch.tensor(order, device=self.fed.device)
        lengths = [len(job.plans[i]) for i in order]
        arrange = lambda p: {n: v if is_common(v) else v[perm] for n, v in p.items()}  # noqa: E731
        start, anchor = arrange(job.start), arrange(job.anchor)
        live = own({n: start[n] for n in self._changing(job)})
        update = self._optimizer(job, live, stacked=True)
        memory: Params = {}
        with self.task.mode(job.training):
            for t in range(lengths[0]):
                a = sum(n > t for n in lengths)
                idx = torch.stack([job.plans[i][t] for i in order[:a]])
                x, y = self.fed.batch(idx)
                drawn = [job.noise[i]((idx.shape[1], idx.shape[2])) if job.noise[i] else None for i in order[:a]]
                noise = torch.stack(drawn) if drawn[0] is not None else None
                here = {n: v[:a] for n, v in (start | live).items()}
                near = {n: v[:a] for n, v in anchor.items()}
                if job.step is None:
                    grads, stats = self._gradients(
                        job, here, near, x[:, 0], y[:, 0], None if noise is None else noise[:, 0]
                    )
                    update([here[n] for n in job.names], [grads[n] for n in job.names])
                    new = stats
                else:
                    new, memory = self._custom_step(
                        job, t, here, near, x, y, noise, {n: v[:a] for n, v in memory.items()}
                    )
                for n, v in new.items():
                    if n not in live:
                        live[n] = own({n: start[n]})[n] if n in start else v.new_zeros(len(order), *v.shape[1:])
                    live[n][:a] = v
        back = torch.argsort(perm)
        return {n: v[back] for n, v in live.items()}

    def _gradients(
        self, job: Job, p: Params, anchor: Params, x: Tensor, y: Tensor, noise: Tensor | None
    ) -> tuple[Params, Params]:
        stats = {n: p[n] for n in self.task.buffers if n in p} if job.training else {}
        rest = {n: v for n, v in p.items() if n not in stats and n not in job.names}

        def value(
            trained: Params, stats: Params, rest: Params, anchor: Params, x: Tensor, y: Tensor, noise: Tensor | None
        ):
            stats = {n: v.clone() for n, v in stats.items()}  # BatchNorm writes into them
            return job.loss(rest | trained | stats, anchor, Batch(x, y, noise)), stats

        args = ({n: p[n] for n in job.names}, stats, rest, anchor, x, y, noise)
        return _over_clients(func_grad(value, has_aux=True), args)

    def _custom_step(self, job, t, p, anchor, x, y, noise, memory) -> tuple[Params, Params]:
        stats = {n: p[n] for n in self.task.buffers if n in p} if job.training else {}
        p = {n: v for n, v in p.items() if n not in stats}

        def step(p: Params, stats: Params, anchor: Params, x: Tensor, y: Tensor, noise: Tensor | None, memory: Params):
            live = [stats]

            def gradient(q: Params, j: int = 0) -> Params:
                def value(trained: Params) -> tuple[Tensor, Params]:
                    s = {n: v.clone() for n, v in live[0].items()}
                    return job.loss(q | trained | s, anchor, Batch(x[j], y[j], None if noise is None else noise[j])), s

                g, s = func_grad(value, has_aux=True)({n: q[n] for n in job.names})
                if j == 0:
                    live[0] = s
                return g

            q, kept = job.step(p, anchor, gradient, Step(t, job.lr, memory))
            return {n: v for n, v in q.items() if v is not p.get(n)} | live[0], kept

        return _over_clients(step, (p, stats, anchor, x, y, noise, memory))

    # -- evaluation ------------------------------------------------------------------------------------------------------
    def evaluate(self, p: Params, split: str, ids: Iterable[int] | None = None) -> dict[str, np.ndarray]:
        """Accuracy and loss of models p {name: (K, *shape)} on each client's `split`: {"correct", "loss", "n"}, each (K,) sums."""
        ids = list(range(self.fed.K)) if ids is None else list(ids)
        index = [self.fed.index[split][k] for k in ids]
        n = np.array([len(i) for i in index])
        if not n.sum():
            return {"correct": np.zeros(len(ids)), "loss": np.zeros(len(ids)), "n": n}
        alike = all(is_common(v) for v in p.values())
        where = [np.arange(n.sum())] if alike or len(ids) == 1 else np.split(np.arange(n.sum()), n.cumsum()[:-1])
        pool = torch.as_tensor(np.concatenate(index), device=self.fed.device)
        hit, loss = np.zeros(n.sum()), np.zeros(n.sum())
        tasks = [(m, w[at : at + EVAL_BATCH]) for m, w in enumerate(where) for at in range(0, len(w), EVAL_BATCH)]

        def one(todo: tuple[int, np.ndarray]) -> None:
            model, at = todo
            x, y = self.fed.batch(pool[torch.as_tensor(at, device=self.fed.device)])
            with torch.no_grad(), self.task.mode(False):
                scores = self.method.logits({k: v[model] for k, v in p.items()}, x)
                hit[at] = (scores.argmax(1) == y).cpu().numpy()
                loss[at] = F.cross_entropy(scores, y, reduction="none").cpu().numpy()

        self._map(one, sorted(tasks, key=lambda todo: -len(todo[1])))
        owner = np.repeat(np.arange(len(ids)), n)
        return {"correct": np.bincount(owner, hit, len(ids)), "loss": np.bincount(owner, loss, len(ids)), "n": n}

    def measure(self, fn: Callable, p: Params, split: str, ids: list[int]) -> Any:
        """Sums of fn(ONE client's p, Batch) -> tensor or dict of tensors over each client's samples, stacked (S, ...)."""

        def one(i: int) -> Any:
            idx = torch.as_tensor(self.fed.index[split][ids[i]], device=self.fed.device)
            mine = {n: v[i] for n, v in p.items()}
            with torch.no_grad(), self.task.mode(False):
                parts = [fn(mine, Batch(*self.fed.batch(chunk))) for chunk in idx.split(EVAL_BATCH)]
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
        e, cfg = self._engine, self._engine.cfg
        self._check_split(split)
        names = [n for n in start if n in (e.task.parameters if only is None else _namer(only, start))]
        if epochs is None and not steps:
            epochs, steps = cfg.epochs, cfg.steps
        if not names or not (epochs or steps):
            return start
        how = dict(batch=cfg.batch, epochs=epochs or 0, steps=steps or 0, kind=cfg.plan, shuffle=cfg.shuffle)
        how |= dict(stream=stream, batches=batches, split=split, fraction=fraction)
        plans = [torch.as_tensor(e.fed.plan(k, self.round, **how), device=e.fed.device) for k in self._ids]
        noise = [_noise(e, stream, self.round, k) for k in self._ids]
        rate = cfg.lr if lr is None else lr
        return e.run(
            Job(loss, start, start if anchor is None else anchor, names, plans, noise, step, rate, bn == "train")
        )

    def measure(self, fn: Callable, p: Params, split: str = "train") -> Any:
        """Sums of fn(ONE client's p, Batch) over all samples of each client's split, in evaluation mode: (S, ...), or a dict of them.

        split: "train", "holdout", "fit" (train without holdout), "val"; "test" only for methods that declare `leaks_test`.
        """
        self._check_split(split)
        return self._engine.measure(fn, p, split, self._ids)

    def _check_split(self, split: str) -> None:
        checks.known("split", split, self._engine.fed.index)
        if split == "test" and not self._engine.method.leaks_test:
            raise ValueError(
                f"method {self._engine.method.name!r} reads test data while training; only one with leaks_test = True may"
            )


def _channels_last(v: Tensor) -> Tensor:
    return v.contiguous(memory_format=torch.channels_last) if v.dim() == 4 else v


def clip_(grads: list[Tensor], limit: float, stacked: bool) -> None:
    """Scale gradients in place to L2 norm <= limit, over all tensors together and for each client of a stack alone."""
    square = sum(g.square().flatten(1).sum(1) if stacked else g.square().sum() for g in grads)
    scale = (limit / (square.sqrt() + 1e-6)).clamp(max=1)
    for g in grads:
        g.mul_(scale.view(-1, *[1] * (g.dim() - 1)) if stacked else scale)


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
    g = rng(e.fed.seed, stream + "/noise", round, k)
    shape = tuple(e.method.noise)
    return lambda lead: torch.as_tensor(g.random((*lead, *shape)), dtype=e.fed.dtype, device=e.fed.device)


def _over_clients(fn: Callable, args: tuple) -> Any:
    # vmap over the leading axis; what all clients hold alike is passed once.
    def split(v: Any) -> tuple[Any, Any]:
        if isinstance(v, dict):
            pairs = {n: split(u) for n, u in v.items()}
            return {n: a for n, (a, _) in pairs.items()}, {n: d for n, (_, d) in pairs.items()}
        return (None, None) if v is None else (v[0], None) if is_common(v) else (v, 0)

    values, dims = zip(*(split(a) for a in args), strict=True)
    return vmap(fn, in_dims=dims, randomness="error")(*values)
