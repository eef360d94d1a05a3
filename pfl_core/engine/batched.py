"""The batched executor: a whole stack of clients in one vmapped step, on a GPU as a CUDA graph.

Where a GPU may choose how convolutions are multiplied, both forms of a step are timed.
"""

from __future__ import annotations

import functools
import gc
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn

from pfl_core.data.client_data import ClientData
from pfl_core.engine.convolutions import FASTEST, FORMS, GROUPED, UNFOLD
from pfl_core.engine.graphs import GRAPHS
from pfl_core.engine.sgd import Job
from pfl_core.engine.stack import WARM, Stack, first_loss
from pfl_core.methods.base import Method
from pfl_core.stacked import Params, clone, is_common

CPU_ROWS = 512  # clients of a stack on a CPU: more are not faster, and take more memory
KEPT = 4  # stacks kept between rounds: a method's phases
TIMED = 10  # steps of a form that are timed, three times


class Batched:
    """The executor: chunks of clients that fit the device's memory, each trained in a stack.

    Stacks are kept, so that later rounds find their memory and their graphs again.

    form: how convolutions are multiplied, see convolutions.py.
    """

    def __init__(
        self,
        method: Method,
        data: ClientData,
        graphs: bool,
        form: str = GROUPED,
        free: Callable[[], int] | None = None,
    ):
        self.method, self.data, self.config = method, data, method.task.config
        self.graph = GRAPHS[data.device.type] if graphs else None
        self.free = free or (_free if data.device.type == "cuda" else None)
        self.stacks: OrderedDict[tuple, Stack] = OrderedDict()
        self.fits: dict[tuple, int] = {}
        self.used: set[str] = set()
        convolves = any(isinstance(m, nn.Conv2d) for m in method.task.model.modules())
        self.form = form if convolves else GROUPED
        # {names that are trained: the form found faster}. A checkpoint keeps it: a run that goes on
        # from there goes on with the same numbers.
        self.faster: dict[str, str] = {}

    def run(self, job: Job) -> Params:
        """What local training changed, {name: (S, *shape)}.

        Raises
        ------
        MemoryError
            If not even one client's step fits.
        """
        key, order = self._kind(job), job.order
        form = self._form(job)
        most = self.fits.get(key) or self._fitting(job, form)
        while True:
            self.fits[key] = most
            each = _even(len(order), most)
            try:
                out = self._rows(job)
                with self.method.task.mode(job.training):
                    stack = self._stack(key, job, each, form)
                    for at in range(0, len(order), each):
                        stack.run(job, order[at : at + each], out)
                self.used.add(stack.executor)
                return out
            except torch.OutOfMemoryError:
                # The estimate was too low, or other phases' stacks are in the way.
                alone = len(self.stacks) <= 1
                out = stack = None
                self._forget()
                if alone and each == 1:
                    why = self._advice("one client's training step ran out of memory")
                    raise MemoryError(why) from None
                most = each // 2 if alone else most

    def _rows(self, job: Job) -> Params:
        # What local training writes its results into.
        return clone({n: job.start[n] for n in job.changing(self.method.task.buffers)})

    def _form(self, job: Job) -> str:
        # How this job's convolutions are multiplied; measured at the first that trains these names.
        if self.form != FASTEST:
            return self.form
        trained = " ".join(job.names)
        if trained not in self.faster:
            seconds = {}
            for form in FORMS:
                # A form that does not fit is not taken; what else is wrong, training itself says.
                with suppress(RuntimeError, MemoryError):
                    seconds[form] = self.seconds(job, form)
            self.faster[trained] = min(seconds, key=seconds.__getitem__, default=GROUPED)
        return self.faster[trained]

    def seconds(self, job: Job, form: str) -> float:
        """Seconds that a job's step takes in a form, divided by the clients that take it at once.

        The step is warm, and captured if it can be. What it trains is thrown away.
        """
        each = _even(len(job.order), self._fitting(job, form))

        def steps(count: int) -> float:
            same = [i[:1].expand(count, *i.shape[1:]) for i in job.indices]
            began = time.perf_counter()
            stack.run(job._replace(indices=same), job.order[:each], self._rows(job))
            if self.data.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - began

        with self.method.task.mode(job.training):
            stack = Stack(self.method, self.data, job, each, self.graph, form)
            steps(WARM + 2)  # the first one of a custom step does not count
            return min(steps(TIMED) for _ in range(3)) / (TIMED * each)

    def _forget(self) -> None:
        self.stacks.clear()
        gc.collect()
        if self.data.device.type == "cuda":
            torch.cuda.empty_cache()

    def _stack(self, key: tuple, job: Job, most: int, form: str) -> Stack:
        key = (*key, most)
        if key not in self.stacks:
            while len(self.stacks) >= KEPT:
                self.stacks.popitem(last=False)
            self.stacks[key] = Stack(self.method, self.data, job, most, self.graph, form)
        self.stacks.move_to_end(key)
        return self.stacks[key]

    def _kind(self, job: Job) -> tuple:
        # Jobs of one kind launch the same operations on memory of the same shapes.
        shapes = [
            [(n, v.shape[1:], v.dtype, is_common(v)) for n, v in p.items()]
            for p in (job.start, job.anchor)
        ]
        rates = tuple(sorted(job.lr.items())) if isinstance(job.lr, dict) else job.lr
        how = (job.loss, job.step, tuple(job.names), rates, job.training, job.indices[0].shape[1:])
        return (*how, job.clipped, *map(tuple, shapes))

    def _fitting(self, job: Job, form: str) -> int:
        # How many clients fit at once, by an estimate that is said before anything is trained.
        s = len(job.indices)
        if self.free is None:
            return CPU_ROWS
        least, likely, free = *self.estimate(job, form), self.free()
        if s * likely > 0.9 * free and self.stacks:
            self._forget()
            free = self.free()
        if least > free:
            need = f"one client's training step needs at least {least / 1e9:.2f} GB"
            raise MemoryError(self._advice(f"{need} and {free / 1e9:.2f} GB are free"))
        most = max(1, int(0.9 * free / likely))
        amount = f"about {likely / 1e9:.1g} GB each of {free / 1e9:.2g} GB"
        how = ", convolutions unfolded" * (form == UNFOLD)
        _say(f"{self.method.name}: {s} clients, {min(s, most)} at once, {amount}{how}")
        return most

    def _advice(self, what: str) -> str:
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
        return rows + activations, 2 * rows + 4 * trained + 3 * activations

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


def _even(count: int, most: int) -> int:
    # Clients of a chunk, if all are of one size: one stack serves all.
    return -(-count // -(-count // most))


@functools.cache  # a sweep says it once
def _say(text: str) -> None:
    print(text)


def _free() -> int:
    # Bytes that the driver has left, and those that torch holds without using them.
    left, _ = torch.cuda.mem_get_info()
    return left + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
