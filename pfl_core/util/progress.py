"""Progress of long work, shown in the way that fits where the code runs.

A widget in JupyterLab, one redrawn line in a terminal, plain lines every ten seconds in a log (papermill), nothing
under pytest and nbval. A bar opened while another one is open draws nothing itself: it moves the outer one.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

EVERY_S = {"widget": 0.2, "line": 0.2, "log": 10.0, "silent": float("inf")}
_open: list[Progress] = []


def mode(environ: Mapping[str, str], stream: TextIO) -> str:
    """One of `EVERY_S`, from the environment variables and the stream written to."""
    if environ.get("PYTEST_VERSION"):  # nbval's kernels inherit it: progress would differ from the committed output
        return "silent"
    if environ.get("PFL_HEADLESS"):
        return "log"
    if environ.get("JPY_SESSION_NAME") and "ipykernel" in sys.modules:  # a kernel, not a process started by one
        return "widget"
    return "line" if stream.isatty() else "log"


def duration(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, s = divmod(int(seconds + 0.5), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


class Progress:
    """Context manager that shows how far `total` steps have come.

    total: number of steps; label: what is counted; done: steps finished before (a resumed run);
    clock: seconds, rising; stream: where text goes (stdout); how: one of `EVERY_S`, found out by default.
    """

    def __init__(
        self,
        total: int,
        label: str = "",
        *,
        done: int = 0,
        clock: Callable[[], float] = time.monotonic,
        stream: TextIO | None = None,
        how: str | None = None,
    ):
        self.total, self.label, self.done, self.note = total, label, done, ""
        self.clock, self.stream = clock, stream or sys.stdout
        self.how = how or mode(os.environ, self.stream)
        if self.how not in EVERY_S:
            raise ValueError(f"unknown kind of progress {self.how!r}; known: {', '.join(EVERY_S)}")
        self.first, self.outer, self.inner, self.drawn = done, None, 0.0, False

    def __enter__(self) -> Progress:
        self.outer = _open[-1] if _open else None
        _open.append(self)
        self.began = self.last = self.clock()
        return self

    def update(self, n: int = 1, note: str = "") -> None:
        """Counts n more steps; note: a few words on the step, shown behind the count."""
        self.done, self.note, self.inner = self.done + n, note, 0.0
        self._moved()

    def __exit__(self, kind, error, trace) -> None:
        _open.remove(self)
        if self.outer is None and self.drawn:
            self._draw(end=f"{'done' if kind is None else 'stopped'} after {duration(self.clock() - self.began)}")

    def _moved(self) -> None:
        if self.outer is not None:
            self.outer.inner = self._steps() / max(self.total, 1)
            self.outer.note = self._count()
            self.outer._moved()
        elif self.clock() - self.last >= EVERY_S[self.how]:
            self.last = self.clock()
            self._draw(end=self._left())

    def _steps(self) -> float:
        return min(self.done + self.inner, self.total)

    def _count(self) -> str:
        return f"{self.label} {self.done}/{self.total}" + (f", {self.note}" if self.note else "")

    def _left(self) -> str:
        spent, steps = self.clock() - self.began, self._steps() - self.first
        left = f", about {duration(spent / steps * (self.total - self._steps()))} left" if steps else ""
        return duration(spent) + left

    def _draw(self, end: str) -> None:
        text = f"{self._count()}, {end}"
        if self.how == "widget":
            self._widget(text)
        elif self.how == "line":
            width, last = shutil.get_terminal_size().columns - 1, "\n" if self not in _open else ""
            self.stream.write(f"\r{text[:width]:<{width}}{last}")
        else:
            self.stream.write(text + "\n")
        self.stream.flush()
        self.drawn = True

    def _widget(self, text: str) -> None:
        if not self.drawn:
            import ipywidgets
            from IPython.display import display

            self.bar, self.text = ipywidgets.FloatProgress(max=self.total), ipywidgets.Label()
            display(ipywidgets.HBox([self.bar, self.text]))
        self.bar.value, self.text.value = self._steps(), text
