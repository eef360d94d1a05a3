"""Progress of long work by tqdm, in the form that fits where the code runs.

It is a widget in JupyterLab, one redrawn line in a terminal, a plain line every ten seconds in a
log (papermill), and nothing under pytest, nbval and TQDM_DISABLE=1. Text goes to stderr. Short work
shows nothing. A Progress opened inside another one draws nothing itself: it moves the outer one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from collections.abc import Mapping
from os import environ
from typing import Any, TextIO

from tqdm import tqdm

LOG_EVERY_S = 10.0
LIVE: dict[str, Any] = dict(
    mininterval=0.2,
    delay=0.5,
    bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
)
_open: list[Progress] = []


def mode(environ: Mapping[str, str], stream: TextIO | None) -> str:
    """How progress is shown here: "widget", "line", "log" or "silent"."""
    if stream is None or getattr(stream, "closed", False):
        return "silent"
    lab = bool(environ.get("JPY_SESSION_NAME"))
    if environ.get("PYTEST_VERSION"):  # nbval's kernels inherit it, and compare what they print
        return "silent"
    if environ.get("PFL_HEADLESS"):
        return "log"
    worker = multiprocessing.parent_process() is not None
    if worker and (lab or stream.isatty()):  # the bar there is its parent's
        return "silent"
    if lab and "ipykernel" in sys.modules:  # a kernel, not a program started by one
        return "widget"
    return "line" if stream.isatty() else "log"


class Lines(tqdm):
    """A line of its own each time, for a log; the last one where something has changed since."""

    monitor_interval = 0  # no thread that watches

    def __init__(self, **how: Any):
        how |= dict(bar_format="{desc}{postfix}, {elapsed}, {remaining} left")
        how |= dict(mininterval=LOG_EVERY_S, gui=True)  # gui: it is drawn by `display` alone
        super().__init__(**how)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Write the line."""
        self.fp.write(f"{self}\n")
        self.fp.flush()

    def close(self) -> None:
        """Write the last line, if there was one before."""
        if not self.disable and self.start_t < self.last_print_t and self.last_print_n < self.n:
            self.display()
        super().close()


class _Lasting:
    """A stream whose reader may go away: what cannot be written is left out, and ends no run."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _bar(how: str, total: int) -> tqdm:
    # miniters=0: at each step it is asked whether it is time to draw.
    # smoothing=0: the time left is by the mean speed so far.
    common: dict[str, Any] = dict(total=total, miniters=0, smoothing=0)
    if how == "widget":
        from tqdm.notebook import tqdm as widget  # here alone: it looks for a kernel's widgets

        return widget(**common, **LIVE)
    if how == "silent":
        return tqdm(**common, disable=True)
    common["file"] = _Lasting(sys.stderr)
    return Lines(**common) if how == "log" else tqdm(**common, **LIVE)


class Progress:
    """Context manager that shows how far `total` steps have come.

    `label` says what is counted. `done` is the number of steps that were finished before, in a time
    that nobody knows; None takes it from the first call of `at`.
    """

    def __init__(self, total: int, label: str, done: int | None = None):
        self.total, self.label, self.done = total, label, done
        self.outer: Progress | None = None
        self.bar: tqdm | None = None

    def __enter__(self) -> Progress:
        if _open:
            self.outer = _open[-1]
        else:
            self.bar = _bar(mode(environ, sys.stderr), self.total)
        _open.append(self)
        return self

    def at(self, done: int, note: str = "") -> None:
        """Say that so many steps are done, and in `note` a few words on the last one."""
        if self.done is None and self.bar is not None:
            self.bar.initial = done
        self.done = done
        self._show(done, note)

    def _show(self, steps: float, note: str) -> None:
        count = f"{self.label} {self.done or 0}/{self.total}"
        if self.outer is not None:
            whole = self.outer.done or 0
            self.outer._show(
                whole + steps / max(self.total, 1), ", ".join(filter(None, (count, note)))
            )
        elif self.bar is not None:
            self.bar.set_description_str(count, refresh=False)
            self.bar.set_postfix_str(note, refresh=False)
            self.bar.n = min(steps, self.total)
            self.bar.update(0)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        _open.remove(self)
        if self.bar is not None:
            if kind is None:  # ended early in good order: not in the colour of an error
                self.bar.total = self.bar.n
            self.bar.close()
