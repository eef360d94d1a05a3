"""The batched executor: a whole stack of clients in one vmapped step, on a GPU as a CUDA graph.

Where a GPU may choose how convolutions are multiplied, both forms of a step are timed.
"""

from __future__ import annotations

import functools
import gc
import os
import time
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from pfl_core import optim
from pfl_core.data.client_data import ClientData
from pfl_core.engine.convolutions import FASTEST, FORMS, GROUPED, UNFOLD
from pfl_core.engine.graphs import CaptureFailed, Graphs, opened, side_stream, synchronize
from pfl_core.engine.sgd import Job
from pfl_core.engine.stack import WARM, Stack, first_loss
from pfl_core.methods.base import Method
from pfl_core.stacked import Params, clone, is_common
from pfl_core.util.say import say

CPU_ROWS = 512  # clients of a stack on a CPU: more are not faster, and take more memory
KEPT = 4  # stacks kept between rounds: a method's phases
TIMED = 10  # steps of a form that are timed, three times


class Batched:
    """The executor: chunks of clients that fit the device's memory, each trained in a stack.

    Stacks are kept, so that later rounds find their memory and their graphs again.

    Parameters
    ----------
    executor : str
        "batched" or "graphs", and how convolutions are multiplied (convolutions.py), as in
        "graphs:fastest".
    """

    def __init__(self, method: Method, data: ClientData, executor: str = "batched"):
        self.method, self.data, self.config = method, data, method.task.config
        self.executor, self.share = executor, gpu_share()
        self.graphs: Graphs | None = None  # opened by the first stack that captures
        self.free = self._free if data.device.type == "cuda" else None
        self.stacks: OrderedDict[tuple, Stack] = OrderedDict()
        self.used: set[str] = set()
        self.convolves = any(isinstance(m, nn.Conv2d) for m in method.task.model.modules())
        # A checkpoint keeps these: a run that goes on from there goes on with the same numbers.
        self.faster: dict[str, str] = {}  # {names that are trained: the form found faster}
        self.chunks: dict[
            str, int
        ] = {}  # {names and batches: clients that fit at once}; of an evaluation: samples

    def run(self, job: Job, executor: str | None = None) -> Params:
        """What local training changed, {name: (S, *shape)}.

        `executor` takes the place of the one that this was made with.

        Raises
        ------
        CaptureFailed
            If its step is to be captured, and cannot be.
        MemoryError
            If not even one client's step fits.
        """
        how, _, asked = (executor or self.executor).partition(":")
        try:
            with side_stream(self.data.device.type):
                form = self._form(job, how, asked or GROUPED)
                out = self._run(job, how, form)
        except CaptureFailed:
            self.forget()  # the pool that it failed in
            raise
        if self.convolves and FASTEST in self.executor:
            self.faster[_trained(job)] = form
        return out

    def _run(self, job: Job, how: str, form: str) -> Params:
        what = f"{_trained(job)} {list(job.indices[0].shape[1:])}"
        most = self.chunks.get(what) or self._fitting(job, form)
        while True:
            self.chunks[what] = most
            each = _even(len(job.order), most)
            if (out := self._attempt(job, how, form, each)) is not None:
                return out
            # The estimate was too low, or other phases' stacks are in the way.
            alone = len(self.stacks) <= 1
            self.forget()
            if alone and each == 1:
                raise MemoryError(self.advice("one client's training step ran out of memory"))
            most = each // 2 if alone else most

    def _attempt(self, job: Job, how: str, form: str, each: int) -> Params | None:
        # What training changed; None if it ran out of memory, which is free when this returns.
        try:
            out, order = self._rows(job), job.order
            with self.method.task.mode(job.training):
                stack = self._stack(job, how, form, each)
                for at in range(0, len(order), each):
                    stack.run(job, order[at : at + each], out)
            self.used.add(stack.executor)
            return out
        except torch.OutOfMemoryError:
            return None

    def _rows(self, job: Job) -> Params:
        # What local training writes its results into.
        return clone({n: job.start[n] for n in job.changing(self.method.task.buffers)})

    def _form(self, job: Job, how: str, asked: str) -> str:
        # How this job's convolutions are multiplied; measured at the first that trains these names.
        if asked != FASTEST or not self.convolves:
            return GROUPED if asked == FASTEST or not self.convolves else asked
        if found := self.faster.get(_trained(job)):
            return found
        seconds = {}
        for form in FORMS:
            try:
                seconds[form] = self.seconds(job, how, form)
            except CaptureFailed:  # the others would be timed with an advantage
                raise
            except (RuntimeError, MemoryError):
                pass  # it does not fit; what else is wrong, training itself says
            if form not in seconds:
                synchronize(self.data.device.type)
                self.forget()
        return min(seconds, key=seconds.__getitem__, default=GROUPED)

    def seconds(self, job: Job, how: str, form: str) -> float:
        """Seconds that a job's step takes in a form, divided by the clients that take it at once.

        The step is warm, and captured where how is "graphs". What it trains is thrown away.
        """
        each = _even(len(job.order), self._fitting(job, form))

        def steps(count: int) -> float:
            same = [i[:1].expand(count, *i.shape[1:]) for i in job.indices]
            began = time.perf_counter()
            stack.run(job._replace(indices=same), job.order[:each], self._rows(job))
            synchronize(self.data.device.type)
            return time.perf_counter() - began

        with self.method.task.mode(job.training):
            stack = self._new_stack(job, how, form, each)
            steps(WARM + 2)  # the first one of a custom step does not count
            return min(steps(TIMED) for _ in range(3)) / (TIMED * each)

    def forget(self) -> None:
        """Free all stacks and graphs, and what the device keeps for them."""
        self.stacks.clear()
        self.graphs = None
        if self.data.device.type == "cuda":  # on a CPU nothing is kept, and collecting takes 0.2 s
            gc.collect()
            torch.cuda.empty_cache()

    def _stack(self, job: Job, how: str, form: str, most: int) -> Stack:
        key = (*self._kind(job), how, form, most)
        if key not in self.stacks:
            while len(self.stacks) >= KEPT:
                self.stacks.popitem(last=False)
            self.stacks[key] = self._new_stack(job, how, form, most)
        self.stacks.move_to_end(key)
        return self.stacks[key]

    def _new_stack(self, job: Job, how: str, form: str, most: int) -> Stack:
        if how == "graphs" and self.graphs is None:
            self.graphs = opened(self.data.device.type)
        capturing = self.graphs if how == "graphs" else None
        return Stack(self.method, self.data, job, most, capturing, form)

    def _kind(self, job: Job) -> tuple:
        # Jobs of one kind launch the same operations on memory of the same shapes.
        shapes = [
            [(n, v.shape[1:], v.dtype, is_common(v)) for n, v in p.items()]
            for p in (job.start, job.anchor)
        ]
        rates = tuple(sorted(job.lr.items())) if isinstance(job.lr, dict) else job.lr
        rates = None if job.varies and job.step is None else rates  # read from a stack's memory
        how = (job.loss, job.step, tuple(job.names), rates, job.training, job.indices[0].shape[1:])
        return (*how, job.clipped, *map(tuple, shapes))

    def _fitting(self, job: Job, form: str) -> int:
        # How many clients fit at once, by an estimate that is said before anything is trained.
        s = len(job.indices)
        if self.free is None:
            return CPU_ROWS
        least, likely, free = *self.estimate(job, form), self.free()
        if s * likely > 0.9 * free and self.stacks:
            self.forget()
            free = self.free()
        if least > free:
            need = f"one client's training step needs at least {least / 1e9:.2f} GB"
            raise MemoryError(self.advice(f"{need} and {free / 1e9:.2f} GB are free"))
        most = max(1, int(0.9 * free / likely))
        amount = f"about {likely / 1e9:.1g} GB each of {free / 1e9:.2g} GB"
        how = ", convolutions unfolded" * (form == UNFOLD)
        _say(f"{self.method.name}: {s} clients, {min(s, most)} at once, {amount}{how}")
        return most

    def advice(self, what: str) -> str:
        """A sentence on what needs more memory than there is, and what to do."""
        cure = "take smaller batches, a smaller model, fewer clients, or device='cpu'"
        return f"{self.method.name}: {what}; {cure}"

    def estimate(self, job: Job, form: str = GROUPED) -> tuple[int, int]:
        """Bytes that a client's step needs: at least, and in all likelihood.

        At least are its rows, and what a backward pass keeps.
        """
        given = [v for p in (job.start, job.anchor) for v in p.values()]
        trained = sum(job.start[n][0].nbytes for n in job.names)
        # Rows of its own, and twice what is trained: live and gradient.
        rows = sum(v[0].nbytes for v in given if not is_common(v)) + 2 * trained
        activations = self._activations(job, form)
        # Likely: rows of results, momentum and a step's copies; gradients of activations,
        # workspaces of convolutions, eager steps beside graphs.
        copies = 4 + optim.optimizer(self.config).room
        return rows + activations, 2 * rows + copies * trained + 3 * activations

    def _activations(self, job: Job, form: str) -> int:
        # Bytes that a backward pass of client 0 keeps, and of its batch: one loss is computed.
        kept: dict[int, int] = {}
        known = (job.start, job.anchor, self.method.task.constants)
        mine = {t.untyped_storage().data_ptr() for q in known for t in q.values()}

        def pack(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in mine:
                kept[storage.data_ptr()] = storage.nbytes()
                held.append(t)  # so that no later tensor gets its address
            return t

        held: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            first_loss(self.method, self.data, job, form)
        return sum(kept.values()) + self.data.batch(job.indices[0][0, 0])[0].nbytes

    def _free(self) -> int:
        # Bytes that the driver has left, and those that torch holds without using them; of a share
        # of the GPU, what this process has not taken yet.
        left, whole = torch.cuda.mem_get_info()
        snapshot = torch.cuda.memory_snapshot()
        mine = torch.cuda.memory_reserved()
        unused = idle(snapshot, torch.cuda.current_device())
        return min(left, max(0, int(self.share * whole) - mine)) + unused


def idle(snapshot: list[dict[str, Any]], device: int) -> int:
    """Bytes of torch.cuda.memory_snapshot() that are held for a device and not in use.

    Those in the pool of graphs that live are none: only graphs of that pool may take them.
    """
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in snapshot
        if segment["device"] == device and tuple(segment["segment_pool_id"]) == (0, 0)
    )


def gpu_share() -> float:
    """The part of a GPU's memory that this process may plan with: PFL_GPU_SHARE, 1 by default."""
    said = os.environ.get("PFL_GPU_SHARE") or "1"
    try:
        share = float(said)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(
            f"PFL_GPU_SHARE={said!r}: give the part of a GPU's memory that each process may take, "
            "above 0 and at most 1, such as 0.25 for four processes on one GPU"
        )
    return share


def _trained(job: Job) -> str:
    return " ".join(job.names)


def _even(count: int, most: int) -> int:
    # Clients of a chunk, if all are of one size: one stack serves all.
    return -(-count // -(-count // most))


@functools.cache  # a sweep says it once
def _say(text: str) -> None:
    say(text)
