"""The executor of a CPU: each worker thread trains one client at a time, with plain autograd.

Clients with the most steps come first. Numbers do not depend on how many workers there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext

import torch
from torch import Tensor

from pfl_core import optim
from pfl_core.data.client_data import ClientData
from pfl_core.engine.hooks import check_loss
from pfl_core.engine.process import kept_memory
from pfl_core.engine.sgd import Job, cast, update
from pfl_core.methods.base import Batch, Method, Step
from pfl_core.stacked import Params, clone
from pfl_core.util.draws import Draws

GATHER = 2048  # samples made into floats at once: few calls, little memory


class Threads:
    """Worker threads, in each of which torch uses one thread, and local training in them.

    ordered : whether images and kernels may be in channels-last order, see `channels_last`. Code
    that is not ours may need the usual one, as `x.view(len(x), -1)` does.
    """

    def __init__(
        self, method: Method, data: ClientData, workers: int | None = None, ordered: bool = True
    ):
        self.method, self.data = method, data
        self.layout: Callable[[Tensor], Tensor] = channels_last if ordered else lambda v: v
        self.ordered = ordered
        self.workers = workers or os.cpu_count() or 1
        self._until_closed = ExitStack()
        if data.device.type == "cpu":
            self._until_closed.enter_context(kept_memory())
        self._pool = ThreadPoolExecutor(self.workers, initializer=lambda: torch.set_num_threads(1))

    def close(self) -> None:
        """End the worker threads, and give back the memory that was kept for them."""
        self._pool.shutdown()
        self._until_closed.close()

    def map(self, fn: Callable, items: Iterable) -> list:
        """[fn(item) for item in items], by the workers; on a GPU this thread issues all work."""
        if self.data.device.type == "cpu":
            return list(self._pool.map(fn, items))
        return [fn(item) for item in items]

    def rehearse(self, job: Job) -> None:
        """Take client 0's first step (without the optimizer's update), and keep nothing of it."""
        first = job._replace(indices=[job.indices[0][:1]])
        with self.method.task.mode(job.training):
            if job.step:
                self._one_custom(first, 0)
            else:
                p, near = ({n: v[0].clone() for n, v in q.items()} for q in (job.start, job.anchor))
                with torch.enable_grad():
                    p |= {n: p[n].requires_grad_() for n in job.names}
                    value = job.loss(p, near, next(self._batches(first, 0))[0])
                check_loss(self.method, value, job.names)

    def run(self, job: Job, drawn: bool = False) -> Params:
        """What local training changed, {name: (S, *shape)}, in new memory.

        If `drawn`, torch's random draws (dropout) are seeded, for each client by `job.seeds`.
        """
        changing = job.changing(self.method.task.buffers) if job.step is None else ()
        out = clone({n: job.start[n] for n in changing})
        results: list[Params] = [{}] * len(job.indices)

        def one(i: int) -> None:
            seeded = Draws(job.seeds[i]) if drawn else nullcontext()
            with self.method.task.mode(job.training), torch.enable_grad(), seeded:
                results[i] = self._one_custom(job, i) if job.step else self._one_sgd(job, i, out)

        self.map(one, job.order)
        if job.step is None:
            return out
        return {n: torch.stack([r[n] for r in results]) for n in results[0]}

    def _batches(self, job: Job, i: int) -> Iterator[list[Batch]]:
        # The batches of each step of client i, gathered many steps at a time.
        _, batches, size = job.indices[i].shape
        draw = noise() if (noise := job.noise[i]) else None
        stride = max(1, GATHER // (batches * size))
        for chunk in job.indices[i].split(stride):
            x, y = self.data.batch(chunk)
            if self.ordered and self.data.kind == "image" and len(self.data.input_shape) == 3:
                x = x.flatten(0, 2).contiguous(memory_format=torch.channels_last).view_as(x)
            for t in range(len(chunk)):
                step = []
                for j in range(batches):
                    noise = draw((size,)).to(self.data.device) if draw else None
                    step.append(Batch(x[t, j], y[t, j], noise))
                yield step

    def _one_sgd(self, job: Job, i: int, out: Params) -> Params:
        # .data: autograd counts changes of it for this client alone, not those of other threads.
        params = [self.layout(out[n][i].data).requires_grad_() for n in job.names]
        mine = {n: v[i] for n, v in job.start.items()} | {n: v[i].data for n, v in out.items()}
        mine |= dict(zip(job.names, params, strict=True))
        anchor = {n: v[i] for n, v in job.anchor.items()}
        config, step = self.method.task.config, update(self.method, job, stacked=False)
        moments = {}
        for prefix in optim.optimizer(config).kept(config):
            kept = [mine.get(prefix + n) for n in job.names]
            pairs = zip(params, kept, strict=True)
            moments[prefix] = [optim.moment(prefix, p, False) if k is None else k for p, k in pairs]
        for (batch,) in self._batches(job, i):
            with cast(config, self.data.device):
                value = job.loss(mine, anchor, batch)
            grads = torch.autograd.grad(value, params, allow_unused=True)
            with torch.no_grad():
                step(params, list(grads), moments)
        for n, v in zip(job.names, params, strict=True):
            out[n][i] = v.data
        return {}

    def _one_custom(self, job: Job, i: int) -> Params:
        p = {n: v[i] for n, v in job.start.items()}
        p |= {n: self.layout(p[n].clone()) for n in job.names}
        anchor = {n: v[i] for n, v in job.anchor.items()}
        stats = {}
        if job.training:
            stats = {n: p.pop(n).clone() for n in self.method.task.buffers if n in p}
        memory: Params = {}
        before, custom = dict(p), job.step
        assert custom is not None  # it is asked for before
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
                p, memory = custom(p, anchor, gradient, Step(t, job.lr, memory))
        changed = {n: v for n, v in p.items() if n in job.names or v is not before.get(n)}
        return changed | stats


def channels_last(v: Tensor) -> Tensor:
    """A copy of images or kernels (4 dimensions) in channels-last order; other tensors as they are.

    Convolutions on a CPU are a fifth to a third faster in this order (measured).
    """
    # With one channel, `contiguous` would keep strides that convolutions take for the other order.
    return torch.empty_like(v, memory_format=torch.channels_last).copy_(v) if v.dim() == 4 else v
