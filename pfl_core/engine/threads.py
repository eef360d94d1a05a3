"""The executor of a CPU: one client a worker thread with plain autograd, longest first; numbers do not depend on the workers."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

from pfl_core.data.client_data import ClientData
from pfl_core.engine.sgd import Job, cast, sgd
from pfl_core.methods.base import Batch, Method, Step
from pfl_core.stacked import Params, own
from pfl_core.util.draws import Draws

GATHER = 2048  # samples made into floats at once: few calls, little memory


class Threads:
    """Worker threads, one intra-op thread each (equal numbers whatever their number), and local training in them."""

    def __init__(self, method: Method, data: ClientData, workers: int | None = None):
        self.method, self.data, self.workers = method, data, workers or (os.cpu_count() or 1)
        if data.device.type == "cpu":
            _keep_memory()
        self._pool = ThreadPoolExecutor(self.workers, initializer=lambda: torch.set_num_threads(1))

    def close(self) -> None:
        """End the worker threads."""
        self._pool.shutdown()
        if self.data.device.type == "cpu":
            _libc("malloc_trim", 0)

    def map(self, fn: Callable, items: Iterable) -> list:
        """[fn(item) for item in items]: on a CPU each worker takes the next item, on a GPU one thread issues all work."""
        return (
            list(self._pool.map(fn, items))
            if self.data.device.type == "cpu"
            else [fn(i) for i in items]
        )

    def rehearse(self, job: Job) -> None:
        """Take client 0's first step (without the update of plain SGD), and keep nothing of it."""
        first = job._replace(plans=[job.plans[0][:1]])
        with self.method.task.mode(job.training):
            if job.step:
                self._one_custom(first, 0)
            else:
                p, near = ({n: v[0].clone() for n, v in q.items()} for q in (job.start, job.anchor))
                job.loss(p, near, next(self._batches(first, 0))[0])

    def run(self, job: Job, drawn: bool = False) -> Params:
        """What local training changed, {name: (S, *shape)}, in memory of its own; drawn: each client's random draws are seeded."""
        changing = job.changing(self.method.task.buffers) if job.step is None else ()
        out = own({n: job.start[n] for n in changing})
        results: list[Params] = [{}] * len(job.plans)

        def one(i: int) -> None:
            seeded = Draws(job.seeds[i]) if drawn else nullcontext()
            with self.method.task.mode(job.training), torch.enable_grad(), seeded:
                results[i] = self._one_custom(job, i) if job.step else self._one_sgd(job, i, out)

        self.map(one, job.order)
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
                drawn = [
                    noise((b,)).to(self.data.device) if noise else None
                    for _ in range(plan.shape[1])
                ]
                yield [Batch(x[t, j], y[t, j], drawn[j]) for j in range(plan.shape[1])]

    def _one_sgd(self, job: Job, i: int, out: Params) -> Params:
        # .data: a version counter of the client's own, which other threads' in-place updates do not touch.
        params = [channels_last(out[n][i].data).requires_grad_() for n in job.names]
        mine = {n: v[i].data for n, v in (job.start | out).items()} | dict(
            zip(job.names, params, strict=True)
        )
        anchor = {n: v[i] for n, v in job.anchor.items()}
        update = sgd(self.method, job, stacked=False)
        velocity = (
            [mine.get(f"opt.{n}") for n in job.names] if self.method.task.config.momentum else []
        )
        velocity = [
            torch.zeros_like(p) if v is None else v for p, v in zip(params, velocity, strict=False)
        ]
        for (batch,) in self._batches(job, i):
            with cast(self.method.task.config, self.data.device):
                value = job.loss(mine, anchor, batch)
            grads = torch.autograd.grad(value, params, allow_unused=True, materialize_grads=True)
            with torch.no_grad():
                update(params, list(grads), velocity)
        for n, v in zip(job.names, params, strict=True):
            out[n][i] = v.data
        return {}

    def _one_custom(self, job: Job, i: int) -> Params:
        p = {n: channels_last(v[i]) if n in job.names else v[i] for n, v in job.start.items()}
        anchor = {n: v[i] for n, v in job.anchor.items()}
        stats = (
            {n: p.pop(n).clone() for n in self.method.task.buffers if n in p}
            if job.training
            else {}
        )
        memory: Params = {}
        before = dict(p)
        for t, batches in enumerate(self._batches(job, i)):

            def gradient(p: Params, j: int = 0, batches: list[Batch] = batches) -> Params:
                leaves = {n: p[n].detach().requires_grad_() for n in job.names}
                # Statistics advance on a step's first batch only; the others see a copy.
                live = stats if j == 0 else {n: v.clone() for n, v in stats.items()}
                with torch.enable_grad():
                    with cast(self.method.task.config, self.data.device):
                        value = job.loss(p | leaves | live, anchor, batches[j])
                    grads = torch.autograd.grad(
                        value, list(leaves.values()), allow_unused=True, materialize_grads=True
                    )
                return dict(zip(leaves, grads, strict=True))

            with torch.no_grad():
                p, memory = job.step(p, anchor, gradient, Step(t, job.lr, memory))
        return {n: v for n, v in p.items() if v is not before.get(n)} | stats


def channels_last(v: Tensor) -> Tensor:
    """A copy, images and kernels (4 dimensions) in channels-last order: a fifth to a third faster in convolutions on a CPU (measured)."""
    # A copy, always: with one channel `contiguous` keeps strides that convolutions take for the other order.
    return torch.empty_like(v, memory_format=torch.channels_last).copy_(v) if v.dim() == 4 else v


def _libc(name: str, *args: int) -> None:
    # A call of the C library, where it has such a function (glibc).
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), name):
        getattr(libc, name)(*args)


def _keep_memory() -> None:
    # From now on memory of freed tensors stays with the process, until an engine closes and what is free goes back: pages handed back and
    # asked for again in every step cost up to half of a round (FLAYER's ResNet-18; a sixth of FedAGHN's). In this order: no maps of their
    # own for large blocks, no trim, heaps that grow by 64 MB.
    for parameter, value in (
        (-4, 0),
        (-1, -1),
        (-2, 2**26),
    ):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
        _libc("mallopt", parameter, value)
