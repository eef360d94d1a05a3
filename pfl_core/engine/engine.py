"""Train S clients at once and evaluate all: one contract, executors with the same numbers.

- `threads` (CPU): each worker thread trains one client at a time, with plain autograd.
- `batched`: clients are stacked, and one vmapped step serves all of them (batched.py).
- `graphs` (GPU): `batched`, with its steps captured and replayed.

Of the last two, `batched:unfold` multiplies convolutions in another form (convolutions.py), and
`batched:fastest` in the one that is found to be faster. What `graphs` cannot do falls to the next
of `BELOW`: so a step that cannot be captured runs batched, and one that cannot be stacked in
threads. What `batched`, asked for by name, cannot stack is an error.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from pfl_core import models
from pfl_core.data.client_data import ClientData
from pfl_core.engine import hooks, small
from pfl_core.engine.batched import Batched
from pfl_core.engine.convolutions import FASTEST, UNFOLD
from pfl_core.engine.graphs import GRAPHS, CaptureFailed, first, synchronize
from pfl_core.engine.scoring import judged
from pfl_core.engine.sgd import Job
from pfl_core.engine.threads import Threads, channels_last
from pfl_core.methods.base import Batch, Method
from pfl_core.stacked import Params, is_common, total
from pfl_core.util import checks, identity
from pfl_core.util.draws import Draws, rng, unmoved

T = TypeVar("T")
EXECUTORS = (
    *("auto", "graphs", "batched", "threads"),
    *(f"{how}:{form}" for how in ("graphs", "batched") for form in (UNFOLD, FASTEST)),
)
# What executor="auto" means on a device. On a CPU, `batched` is slower for most models and never
# enough faster to be worth other last digits. Seconds of a round on two cores, threads / batched:
# MobileNet-v1 3.05 / 5.4; ResNet-34 of width 1/4 6.7 / 5.8.
AUTO = {"cpu": "threads", "cuda": f"graphs:{FASTEST}"}
# What a job runs through that the executor before cannot run.
BELOW = {
    **{"graphs:fastest": "graphs", "graphs:unfold": "graphs", "graphs": "batched:fastest"},
    **{"batched:fastest": "batched", "batched:unfold": "batched", "batched": "threads"},
}
# Samples evaluated at once. On a CPU, what fits its caches: 512 take 1.5 times as long (measured).
EVAL_BATCH = {"cpu": 128, "cuda": 2048}

# From so many participants on, networks of nn.Linear alone are stacked on a CPU, too: of a step of
# so little arithmetic, calls take most. Seconds of a round of 200 clients, threads / batched, for
# 12,730 parameters 0.87 / 0.12; for 159,010 1.54 / 0.70.
STACKED_FROM = 100


def automatic(method: Method, kind: str) -> str:
    """What executor="auto" means for a method on a kind of device, "cpu" or "cuda"."""
    model, config = method.task.model, method.task.config
    own = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    linear = all(isinstance(m, torch.nn.Linear) for m in own)
    ours = identity.is_ours(type(method)) and models.is_ours(model)
    if kind == "cpu" and linear and ours and config.participation * method.task.K >= STACKED_FROM:
        return "batched"
    return AUTO[kind]


class Engine:
    """Trains and evaluates the clients of one method, on their data, with its task's settings."""

    def __init__(
        self, method: Method, data: ClientData, executor: str = "auto", workers: int | None = None
    ):
        checks.known("executor", executor, EXECUTORS)
        self.method, self.data = method, data
        self.task, self.config = method.task, method.task.config
        chosen = automatic(method, data.device.type) if executor == "auto" else executor
        self.asked, self.executor = chosen, chosen.partition(":")[0]
        if self.executor == "graphs" and data.device.type not in GRAPHS:
            raise ValueError(
                "executor 'graphs' needs a GPU; use device='cuda', "
                "or executor 'threads' or 'batched'"
            )
        self.batched = Batched(method, data, chosen)
        self.ran: set[str] = set()  # executors that jobs went through
        self._fallen: dict[Any, str] = {}  # by loss and step: the executor, if it is not `asked`
        self._told: set[str] = set()
        # A model or method that is not ours may draw random numbers (dropout): these are seeded.
        ours = models.is_ours(method.task.model)
        self.foreign = not (ours and identity.is_ours(type(method)))
        self._random: dict[Any, bool] = {}
        self.threads = Threads(method, data, workers, ordered=not self.foreign)

    def close(self) -> None:
        """End the worker threads; free stacks, graphs, and the memory that was kept for them."""
        self.threads.close()
        self.batched.forget()

    @contextmanager
    def drawing(self, purpose: str, *ids: int) -> Iterator[None]:
        """Within it, foreign code in this thread draws at random by (seed, purpose, ids) only.

        Global generators play no part in that.

        Raises
        ------
        ValueError
            If one of them has moved.
        """
        if not self.foreign:
            yield
            return
        seed = int(rng(self.config.seed, purpose + "/draws", *ids).integers(2**62))
        with self.watched(purpose), Draws(seed):
            yield

    def watched(self, purpose: str) -> AbstractContextManager:
        """Within it foreign code may not move a global generator."""
        return unmoved(f"{self.method.name}, {purpose}") if self.foreign else nullcontext()

    def draws(self, job: Job) -> bool:
        """Whether local training draws random numbers, as dropout does; a first step is tried."""
        what = (job.loss, job.step)
        if self.foreign and what not in self._random:
            with Draws(0) as trial:
                self.threads.rehearse(job)
            self._random[what] = trial.count > 0
        return self.foreign and self._random[what]

    # -- local training ------------------------------------------------------------------------
    def run(self, job: Job) -> Params:
        """Local training of all clients of a job.

        Returns
        -------
        {name: (S, *shape)}
            `job.start`, with new tensors for what was trained.
        """
        what = (job.loss, job.step)
        if self.draws(job):
            if self.executor == "batched":
                raise ValueError(
                    f"{self.method.name}: its loss draws random numbers (dropout), and executor "
                    "'batched' cannot seed them for each client; use executor='auto' or 'threads'"
                )
            self.ran.add("threads")
            return job.start | self.threads.run(job, drawn=True)
        at, reasons = self._fallen.get(what, self.asked), []
        while at != "threads":
            try:
                changed = self.batched.run(job, at)
                break
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                below = self._below(at, error)
                reasons.append(self._why(error))
            # An error that the device does not recover from is raised here again.
            synchronize(self.data.device.type)
            at = below
        if reasons:
            self._fallen[what] = at
            self._tell(reasons, at)
        if at == "threads":
            self.ran.add("threads")
            before = torch.get_rng_state() if self.foreign else None
            changed = self.threads.run(job)
            if before is not None and not torch.equal(before, torch.get_rng_state()):
                # It draws after all, in a later round, step or client than was tried.
                torch.set_rng_state(before)
                self._random[what] = True
                changed = self.threads.run(job, drawn=True)
            return job.start | changed
        self.ran |= self.batched.used
        return job.start | changed

    def _below(self, at: str, error: RuntimeError) -> str:
        # What runs a job that an executor failed at. Only who asked for it gets the faster form.
        if ":" not in at and not isinstance(error, CaptureFailed):
            return "threads"
        return BELOW[at] if FASTEST in self.asked else BELOW[at].replace(f":{FASTEST}", "")

    def _why(self, error: RuntimeError) -> str:
        # Why clients run through another executor; an error where `batched` was asked for.
        if isinstance(error, CaptureFailed):
            return f"its step cannot be captured ({error})"
        said, cure = hooks.unstackable(first(error))
        why = f"clients cannot be stacked ({said})"
        if self.executor == "batched":
            synchronize(self.data.device.type)
            cure = f"{cure}use executor='threads'"
            raise RuntimeError(f"{self.method.name}: {why}; {cure}") from error
        return why

    def _tell(self, reasons: list[str], at: str) -> None:
        # Say once that jobs run through another executor than was asked for, and why.
        if at in self._told:
            return
        self._told.add(at)
        how = at.partition(":")[0]
        said = f"{reasons[-1]}; they run one by one" if at == "threads" else reasons[0]
        runs = "" if at == "threads" else f"; it runs {how}"
        warnings.warn(f"{self.method.name}: {said}{runs}", stacklevel=3)

    # -- evaluation ----------------------------------------------------------------------------

    def evaluate(
        self, p: Params, split: str, ids: Iterable[int] | None = None, scores: bool = False
    ) -> dict[str, np.ndarray]:
        """Right answers and loss of each client's model on its own samples.

        Parameters
        ----------
        p : {name: (S, *shape)}
            A model for each of `ids`.
        split
            "train", "val", "test", "holdout" or "fit".
        ids
            The clients, by default all K.
        scores
            Whether the class scores are returned.

        Returns
        -------
        {"correct", "loss", "n", "balanced"}
            (S,) each: sums over a client's samples, and how many they are; and the mean over the
            classes that it has of the share of right answers, 0 without samples.
            With `scores` "y" (N,) and "scores" (N, C), too, of all samples, client after client.
        """
        ids = list(range(self.data.K)) if ids is None else list(ids)
        index = [self.data.index[split][k] for k in ids]
        n = np.array([len(i) for i in index])
        if not n.sum():
            none = {"y": np.zeros(0, np.int64), "scores": np.zeros((0, self.task.C))}
            sums = {name: np.zeros(len(ids)) for name in ("correct", "loss", "balanced")}
            return sums | {"n": n} | (none if scores else {})
        if small.applies(n) and not self.foreign:  # vmap may not take code that is not ours
            one = functools.partial(small.evaluate, self.method, self.data, self.threads, p, index)
            most = small.AT_ONCE
        else:
            one = functools.partial(self._evaluate_batches, p, index)
            most = EVAL_BATCH[self.data.device.type]
        correct, loss, *given = self._fitting(functools.partial(one, scores=scores), most)
        owner = np.repeat(np.arange(len(ids)), n)
        labels = self.data.federation.y[np.concatenate(index)]
        whole = {"y": labels, "scores": np.stack(given, 1)} if scores else {}
        return whole | {
            "correct": np.bincount(owner, correct, len(ids)),
            "loss": np.bincount(owner, loss, len(ids)),
            "n": n,
            "balanced": _balanced(owner, labels, correct, len(ids)),
        }

    def _fitting(self, fn: Callable[[int], T], most: int) -> T:
        # fn(samples at once), with fewer of them where it runs out of memory.
        chunks, what = self.batched.chunks, f"evaluation {most}"
        while True:
            size = min(most, chunks.get(what, most))
            try:
                return fn(size)
            except torch.OutOfMemoryError:
                pass  # what it took is free from here on
            if self.batched.stacks:  # of training
                self.batched.forget()
            elif size > 1:
                chunks[what] = size // 2
            else:
                raise MemoryError(self.batched.advice("evaluating one sample ran out of memory"))

    def _evaluate_batches(
        self, p: Params, index: list[np.ndarray], size: int, scores: bool
    ) -> np.ndarray:
        # Of each sample, client after client: is the answer right (0 or 1), its loss, and its class
        # scores if they are asked for; (2, N) or (2 + C, N).
        # A batch is a row of p, and positions in the pool's indices, one after the other.
        pool = torch.as_tensor(np.concatenate(index), device=self.data.device)
        # Where all clients have the same model, one batch may hold samples of several of them.
        common = len(index) == 1 or all(is_common(v) for v in p.values())
        where = np.arange(len(pool))
        ends = np.cumsum([len(i) for i in index])[:-1]
        parts = [where] if common else np.split(where, ends)
        batches = [
            (row, part[at : at + size])
            for row, part in enumerate(parts)
            for at in range(0, len(part), size)
        ]
        ordered = self.threads.ordered and self.data.device.type == "cpu"

        @functools.lru_cache(2 * self.threads.workers)  # a model's batches follow one another
        def model(row: int) -> Params:
            return {n: channels_last(v[row]) if ordered else v[row] for n, v in p.items()}

        def evaluate_batch(batch: tuple[int, np.ndarray]) -> Tensor:
            row, at = batch
            x, y = self.data.batch(pool[at[0] : at[-1] + 1])
            if ordered and self.data.kind == "image" and x.dim() == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            with torch.no_grad(), self.task.mode(False):
                return judged(self.method.logits(model(row), x), y, scores)

        order = sorted(batches, key=lambda batch: -len(batch[1]))
        # One transfer for all.
        found = torch.cat(self.threads.map(evaluate_batch, order), 1).double().cpu().numpy()
        out = np.zeros_like(found)
        out[:, np.concatenate([at for _, at in order])] = found
        return out

    def measure(
        self, fn: Callable, p: Params, split: str, ids: list[int], fold: tuple[int, int] = (0, 1)
    ) -> Any:
        """Sums of fn(ONE client's p, Batch) over each client's samples; see Context.measure."""
        index = [self.data.fold(k, split, *fold) for k in ids]
        some = np.zeros(1, dtype=np.int64)  # a sample in place of none, for the sums' shapes
        found = [mine if len(mine) else some for mine in index]
        here = torch.as_tensor(np.concatenate(found), device=self.data.device)  # in one transfer
        samples = here.split([len(mine) for mine in found])

        def one(i: int, size: int) -> dict[str, Tensor]:
            mine = {n: v[i] for n, v in p.items()}
            with torch.no_grad(), self.task.mode(False):
                parts = [
                    fn(mine, Batch(*self.data.batch(chunk))) for chunk in samples[i].split(size)
                ]
            named = [part if isinstance(part, dict) else {"": part} for part in parts]
            sums = {n: total(part[n] for part in named) for n in named[0]}
            return sums if len(index[i]) else {n: torch.zeros_like(v) for n, v in sums.items()}

        def every(size: int) -> list[dict[str, Tensor]]:
            return self.threads.map(functools.partial(one, size=size), range(len(index)))

        sums = self._fitting(every, EVAL_BATCH[self.data.device.type])
        stacked = {n: torch.stack([each[n] for each in sums]) for n in sums[0]}
        return stacked[""] if stacked.keys() == {""} else stacked


def _balanced(owner: np.ndarray, y: np.ndarray, correct: np.ndarray, many: int) -> np.ndarray:
    # Of samples of `many` clients: each client's mean over its classes of the share of right ones.
    width = int(y.max()) + 1
    cells, at = np.unique(owner * width + y, return_inverse=True)
    share, who = np.bincount(at, correct) / np.bincount(at), cells // width
    return np.bincount(who, share, many) / np.maximum(np.bincount(who, minlength=many), 1)
