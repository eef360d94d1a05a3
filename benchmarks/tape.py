"""A stand-in for CUDA graphs on the CPU and on the pretend accelerator: `taped`.

A tape records the operations that a step launches, and repeats exactly them on the same memory.
What CUDA and torch's allocator refuse in a capture is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.pretend import Pretend, asks, crosses, tensors
from pfl_core.engine import graphs

FREE = {
    "aten::detach",
    "aten::lift_fresh",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::empty",
    "aten::empty_like",
}


def written(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes into."""
    out = []
    for i, a in enumerate(func._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            out += tensors(kwargs.get(a.name) if a.kwarg_only or i >= len(args) else args[i])
    return out


def launches(func: Any) -> bool:
    """Whether an operation computes: views and bare allocations do not."""
    views = any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )
    return not views and func._schema.name not in FREE


class Counter(TorchDispatchMode):
    """Counts, within it, operations that compute (`ops`) and tensors newly made (`made`).

    largest: entries of the largest of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops = self.made = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if launches(func):
            self.ops += 1
            new = tensors(out) if not written(func, args, kwargs or {}) else []
            self.made += len(new)
            self.largest = max([self.largest, *(t.numel() for t in new)])
        return out


class Tape(TorchDispatchMode):
    """One graph, with the methods of torch.cuda.CUDAGraph that the engine needs.

    Capturing changes nothing, Python runs no more in a replay, and what needs the host is refused.
    """

    log: list[tuple[str, Tape]] = []  # ("capture" | "replay", which), but for anchors
    living: dict[int, int] = {}  # tapes of each pool that was ever captured into
    broken: set[int] = set()  # pools in which a capture failed
    under_way: Tape | None = None

    def __init__(self) -> None:
        super().__init__()
        self.pool: int | None = None
        self.ops: list[tuple] = []
        self.undo: list[tuple[Tensor, Tensor]] = []
        self.mine: set[int] = set()
        self.destroyed = 0  # other tapes, while this one was captured

    def replay(self) -> None:
        """Run what was recorded."""
        for func, args, kwargs, out in self.ops:
            new = func(*args, **kwargs)
            for t, v in zip(tensors(out), tensors(new), strict=True):
                if _memory(t) != _memory(v) or _held(t).data_ptr() != _held(v).data_ptr():
                    t.copy_(v)
        self._note("replay")

    def begin(self, pool: int) -> None:
        """Open a pool, as torch's allocator does."""
        if pool in Tape.broken:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if Tape.living.get(pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        Tape.living[pool] = Tape.living.get(pool, 0) + 1
        self.pool, Tape.under_way = pool, self

    def end(self, failed: bool) -> None:
        """Leave memory as it was before the capture."""
        Tape.under_way = None
        for t, old in reversed(self.undo):
            t.copy_(old)
        self.undo = []
        if failed or self.destroyed:
            Tape.broken.add(self.pool or 0)
            raise RuntimeError("operation failed due to a previous error during capture")
        self._note("capture")

    def _note(self, what: str) -> None:
        if len(self.ops) > 1:
            Tape.log.append((what, self))

    def __del__(self) -> None:
        if self.pool is not None and self.pool in Tape.living:
            Tape.living[self.pool] -= 1
            if Tape.under_way is not None:
                Tape.under_way.destroyed += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if asks(func, args) or crosses(func, args, kwargs):
            raise RuntimeError("operation not permitted when stream is capturing")
        for t in written(func, args, kwargs):
            if _memory(t) not in self.mine:
                self.undo.append((t, t.clone()))
        out = func(*args, **kwargs)
        if launches(func):
            self.ops.append((func, args, kwargs, out))
            if not written(func, args, kwargs):
                self.mine |= {_memory(t) for t in tensors(out)}
        return out


def _held(t: Tensor) -> Tensor:
    return t.held if isinstance(t, Pretend) else t


def _memory(t: Tensor) -> int:
    return _held(t).untyped_storage().data_ptr()


@contextmanager
def _capture(tape: Tape, pool: int, stream: Any = None) -> Iterator[None]:
    # As torch.cuda.graph does, the error of the capture's end comes last.
    tape.begin(pool)
    failed = True
    try:
        with tape:
            yield
        failed = False
    finally:
        tape.end(failed)


@contextmanager
def taped(kind: str = "cpu") -> Iterator[list[tuple[str, Tape]]]:
    """Within it, the engine's CudaGraphs captures tapes on a kind of device; their log."""
    pools = itertools.count(1)
    faked: dict[str, Any] = dict(CUDAGraph=Tape, graph=_capture, current_stream=lambda: None)
    with (
        mock.patch.multiple(torch.cuda, **faked, graph_pool_handle=lambda: next(pools)),
        mock.patch.dict(graphs.GRAPHS, {kind: partial(graphs.CudaGraphs, kind)}),
        mock.patch.multiple(Tape, log=[], living={}, broken=set(), under_way=None),
        mock.patch.object(graphs, "FAILED", []),
    ):
        yield Tape.log
