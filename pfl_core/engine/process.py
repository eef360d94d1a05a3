"""What a run changes for the whole process while it lasts: number of threads, use of memory.

Several runs may be under way at once. The first one makes the change, and the last one undoes it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Parameters of glibc's mallopt: (number, value during a run, value that glibc starts with).
MMAP_MAX = (-4, 0, 65536)  # no map of its own for a large block
TRIM_THRESHOLD = (-1, -1, 2**17)  # nothing goes back while it may be asked for again
TOP_PAD = (-2, 2**26, 2**17)  # a heap grows by 64 MB


class Shared:
    """Who relies on a change of the process at the moment."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.before: Any = None  # what the first user found, for the last one to put back


_one_thread, _kept_memory = Shared(), Shared()


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it, torch computes each operation with one thread: sums then have one order."""
    with _one_thread.lock:
        if not _one_thread.users:
            _one_thread.before = torch.get_num_threads()
        _one_thread.users += 1
    torch.set_num_threads(1)
    try:
        yield
    finally:
        with _one_thread.lock:
            _one_thread.users -= 1
            if not _one_thread.users:
                torch.set_num_threads(_one_thread.before)


@contextmanager
def kept_memory() -> Iterator[None]:
    """Within it, memory of freed tensors stays with the process; afterwards it goes back.

    Pages that are handed back and asked for again in every step cost up to half of a round
    (FLAYER's ResNet-18; a sixth of FedAGHN's).
    """
    with _kept_memory.lock:
        if not _kept_memory.users:
            _tune_malloc(during_run=True)
        _kept_memory.users += 1
    try:
        yield
    finally:
        with _kept_memory.lock:
            _kept_memory.users -= 1
            if not _kept_memory.users:
                _tune_malloc(during_run=False)
                _call_libc("malloc_trim", 0)


def _tune_malloc(during_run: bool) -> None:
    # malloc cannot be asked how it is set: its documented defaults stand for what was there before.
    # What stays: from the first call on, malloc no longer adapts its thresholds by itself.
    for parameter, value, default in (MMAP_MAX, TRIM_THRESHOLD, TOP_PAD):
        _call_libc("mallopt", parameter, value if during_run else default)


def _call_libc(name: str, *args: int) -> None:
    # A call of the C library, where it has such a function (glibc).
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), name):
        getattr(libc, name)(*args)
