"""Train S clients at once and evaluate all: one contract, executors with the same numbers.

`threads` runs one client a worker with plain autograd (CPU), longest first; `batched` stacks clients and takes one vmapped step for all of
them (see batched.py); `graphs` is `batched` with its steps captured and replayed (GPU).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pfl_core.data.client_data import ClientData
from pfl_core.engine.batched import Batched
from pfl_core.engine.graphs import GRAPHS
from pfl_core.engine.sgd import Job
from pfl_core.engine.threads import Threads, channels_last
from pfl_core.methods.base import Batch, Method
from pfl_core.stacked import Params, is_common
from pfl_core.util import checks, identity
from pfl_core.util.draws import Draws, rng

EXECUTORS = ("auto", "graphs", "batched", "threads")
# executor="auto", by kind of device. On a CPU no kind of model gains enough from another one to be worth other last digits (two cores, s a
# round, threads / batched): CNN, LeNet: threads; MobileNet-v1 3.05 / 5.4; ResNet-34 of width 1/4 6.7 / 5.8.
AUTO = {"cpu": "threads", "cuda": "graphs"}
EVAL_BATCH = {
    "cpu": 128,
    "cuda": 2048,
}  # samples; on a CPU what fits its caches, measured: 512 takes 1.5 times as long


class Engine:
    """Executes local training and evaluation of one method, under the settings of its task, on its clients' data."""

    def __init__(
        self, method: Method, data: ClientData, executor: str = "auto", workers: int | None = None
    ):
        checks.known("executor", executor, EXECUTORS)
        self.method, self.task, self.data, self.config = (
            method,
            method.task,
            data,
            method.task.config,
        )
        self.executor = AUTO[data.device.type] if executor == "auto" else executor
        if self.executor == "graphs" and data.device.type not in GRAPHS:
            raise ValueError(
                "executor 'graphs' needs a GPU; use device='cuda', or executor 'threads' or 'batched'"
            )
        self.batched = Batched(method, data, graphs=self.executor == "graphs")
        self.ran: set[str] = set()  # executors that jobs went through
        self._resists: set[Any] = set()  # losses and steps that no stack can take
        # Only code that is not ours may draw random numbers of its own (dropout): it is looked at, and seeded.
        self.foreign = not (
            identity.is_ours(type(method)) and identity.is_ours(type(method.task.model))
        )
        self._random: dict[Any, bool] = {}
        self.threads = Threads(method, data, workers)

    def close(self) -> None:
        """End the worker threads."""
        self.threads.close()

    def drawing(self, purpose: str, *ids: int) -> AbstractContextManager:
        """Within it, what foreign code draws in this thread is a function of (seed, purpose, ids), not of torch's global generator."""
        seed = lambda: int(rng(self.config.seed, purpose + "/draws", *ids).integers(2**62))  # noqa: E731
        return Draws(seed()) if self.foreign else nullcontext()

    def draws(self, job: Job) -> bool:
        """Whether local training draws random numbers beside its batches, as a model with dropout does: its first step is tried."""
        what = (job.loss, job.step)
        if self.foreign and what not in self._random:
            with Draws(0) as trial:
                self.threads.rehearse(job)
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
            return job.start | self.threads.run(job, drawn=True)
        if self.executor == "threads" or what in self._resists:
            self.ran.add("threads")
            return job.start | self.threads.run(job)
        try:
            changed = self.batched.run(job)
        except RuntimeError as error:
            if self.executor == "batched" or isinstance(error, torch.OutOfMemoryError):
                raise
            said = str(error).strip().partition("\n")[0]
            warnings.warn(
                f"{self.method.name}: clients cannot be stacked ({said}); they run one by one",
                stacklevel=2,
            )
            self._resists.add(what)
            return self.run(job)
        self.ran |= self.batched.used
        return job.start | changed

    # -- evaluation ------------------------------------------------------------------------------------------------------
    def evaluate(
        self, p: Params, split: str, ids: Iterable[int] | None = None
    ) -> dict[str, np.ndarray]:
        """Accuracy and loss of models p {name: (K, *shape)} on each client's `split`: {"correct", "loss", "n"}, each (K,) sums."""
        ids = list(range(self.data.K)) if ids is None else list(ids)
        index = [self.data.index[split][k] for k in ids]
        n = np.array([len(i) for i in index])
        if not n.sum():
            return {"correct": np.zeros(len(ids)), "loss": np.zeros(len(ids)), "n": n}
        alike = all(is_common(v) for v in p.values())
        where = (
            [np.arange(n.sum())]
            if alike or len(ids) == 1
            else np.split(np.arange(n.sum()), n.cumsum()[:-1])
        )
        pool = torch.as_tensor(np.concatenate(index), device=self.data.device)
        hit, loss = np.zeros(n.sum()), np.zeros(n.sum())
        size, cpu = EVAL_BATCH[self.data.device.type], self.data.device.type == "cpu"
        tasks = [
            (m, w[at : at + size]) for m, w in enumerate(where) for at in range(0, len(w), size)
        ]

        @functools.lru_cache(2 * self.threads.workers)  # a model's batches follow one another
        def served(model: int) -> Params:
            return {k: channels_last(v[model]) if cpu else v[model] for k, v in p.items()}

        def one(todo: tuple[int, np.ndarray]) -> None:
            model, at = todo
            x, y = self.data.batch(pool[torch.as_tensor(at, device=self.data.device)])
            if cpu and self.data.kind == "image":
                x = x.contiguous(memory_format=torch.channels_last)
            with torch.no_grad(), self.task.mode(False):
                scores = self.method.logits(served(model), x)
                hit[at] = (scores.argmax(1) == y).cpu().numpy()
                loss[at] = F.cross_entropy(scores, y, reduction="none").cpu().numpy()

        self.threads.map(one, sorted(tasks, key=lambda todo: -len(todo[1])))
        owner = np.repeat(np.arange(len(ids)), n)
        return {
            "correct": np.bincount(owner, hit, len(ids)),
            "loss": np.bincount(owner, loss, len(ids)),
            "n": n,
        }

    def measure(self, fn: Callable, p: Params, split: str, ids: list[int]) -> Any:
        """Sums of fn(ONE client's p, Batch) -> tensor or dict of tensors over each client's samples, stacked (S, ...)."""

        def one(i: int) -> Any:
            idx = torch.as_tensor(self.data.index[split][ids[i]], device=self.data.device)
            mine = {n: v[i] for n, v in p.items()}
            with torch.no_grad(), self.task.mode(False):
                parts = [
                    fn(mine, Batch(*self.data.batch(chunk)))
                    for chunk in idx.split(EVAL_BATCH[self.data.device.type])
                ]
            if isinstance(parts[0], dict):
                return {n: sum(part[n] for part in parts) for n in parts[0]}
            return sum(parts)

        got = self.threads.map(one, range(len(ids)))
        return (
            {n: torch.stack([g[n] for g in got]) for n in got[0]}
            if isinstance(got[0], dict)
            else torch.stack(got)
        )
