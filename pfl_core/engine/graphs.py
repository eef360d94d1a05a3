"""CUDA graphs: a step is captured once and replayed, without the host's part in it.

`GRAPHS` says by kind of device what captures a step; tests put a stand-in there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """A step that was captured once and can be replayed: the same operations on the same memory."""

    def capture(self, fn: Callable[[], None]) -> None:
        """Record what fn launches, without running it; RuntimeError if it needs the host."""

    def replay(self) -> None:
        """Run what was recorded."""


class CudaGraph:
    """A CUDA graph. All share one memory pool: they run in turn, and keep nothing in it."""

    pool: Any = None

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        CudaGraph.pool = CudaGraph.pool or torch.cuda.graph_pool_handle()

    def capture(self, fn: Callable[[], None]) -> None:
        """Record what fn launches; RuntimeError if it needs the host."""
        try:
            with torch.cuda.graph(self.graph, pool=CudaGraph.pool):
                fn()
        except RuntimeError:
            CudaGraph.pool = None  # a broken capture may leave its mark on it
            raise

    def replay(self) -> None:
        """Launch it."""
        self.graph.replay()


GRAPHS: dict[str, Callable[[], Graph]] = {"cuda": CudaGraph}
