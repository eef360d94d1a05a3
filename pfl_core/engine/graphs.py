"""CUDA graphs: a step is captured once and replayed, without the host's part in it.

`GRAPHS` says by kind of device what captures steps; tests put a stand-in there.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

MOST_FAILED = 2  # captures of a process: after so many that failed, no more are tried
FAILED: list[str] = []  # why they did


class CaptureFailed(RuntimeError):
    """A step could not be captured; its message is the first of the errors that led to it."""


class Graphs(Protocol):
    """The captured steps of one engine."""

    def capture(self, fn: Callable[[], None]) -> Callable[[], None]:
        """What repeats all that fn launches; fn does not run. RuntimeError if it needs the host."""
        ...


class CudaGraphs:
    """CUDA graphs in a memory pool of their own: they run in turn, and keep nothing in it.

    A pool whose graphs all died may not be opened again. One small graph, the anchor, lives as long
    as the pool. It is replayed at once: where that fails, no step need be tried.

    Raises
    ------
    RuntimeError
        If this computer captures nothing.
    """

    def __init__(self, kind: str = "cuda") -> None:
        self.pool = torch.cuda.graph_pool_handle()
        count = torch.zeros(1, device=kind)
        self.anchor = self.capture(lambda: _add_one(count))
        self.anchor()
        if count.item() != 1:
            raise RuntimeError(f"a captured sum of 0 and 1 gave {count.item():g}")

    def capture(self, fn: Callable[[], None]) -> Callable[[], None]:
        """What repeats all that fn launches; RuntimeError if it needs the host."""
        graph = torch.cuda.CUDAGraph()
        # On the current stream: a capture that fails may leave its own one current.
        with torch.cuda.graph(graph, pool=self.pool, stream=torch.cuda.current_stream()):
            fn()
        return graph.replay


def _add_one(count: torch.Tensor) -> None:
    count += 1


GRAPHS: dict[str, Callable[[], Graphs]] = {"cuda": CudaGraphs}


def opened(kind: str) -> Graphs:
    """What captures steps on a kind of device; CaptureFailed if nothing can."""
    gc.collect()  # what is due frees its memory now, not in a capture
    return _tried(GRAPHS[kind], kind)


def captured(graphs: Graphs, fn: Callable[[], None], kind: str) -> Callable[[], None]:
    """What replays the operations of fn; CaptureFailed if they cannot be captured."""
    return _tried(functools.partial(graphs.capture, fn), kind)


def _tried(capture: Callable[[], Any], kind: str) -> Any:
    if len(FAILED) >= MOST_FAILED:
        why = f"{len(FAILED)} captures failed in this process, the last with {FAILED[-1]!r}"
        raise CaptureFailed(why)
    try:
        with _no_collection():
            return capture()
    except RuntimeError as error:
        if memory := [e for e in chain(error) if isinstance(e, torch.OutOfMemoryError)]:
            raise memory[0] from None
        why = str(first(error)).strip().partition("\n")[0]
    synchronize(kind)
    FAILED.append(why)
    raise CaptureFailed(why)


@contextmanager
def _no_collection() -> Iterator[None]:
    # Garbage that is collected in a capture may hold another graph: to destroy it breaks this one.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def side_stream(kind: str) -> Iterator[None]:
    """Within it, a GPU works on a stream other than its default one, which cannot be captured."""
    if kind != "cuda" or torch.cuda.current_stream() != torch.cuda.default_stream():
        yield
        return
    outer, side = torch.cuda.current_stream(), _side(torch.cuda.current_device())
    side.wait_stream(outer)
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        outer.wait_stream(side)


@functools.cache  # one of a process: memory that it frees is not lost to the next run
def _side(device: int) -> Any:
    return torch.cuda.Stream(device)


def synchronize(kind: str) -> None:
    """Wait for a GPU. After an error that it does not recover from this raises it again."""
    if kind == "cuda":
        torch.cuda.synchronize()


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, the one that it followed from, and so on to the first."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def first(error: BaseException) -> BaseException:
    """The error that all others of a chain followed from."""
    *_, found = chain(error)
    return found
