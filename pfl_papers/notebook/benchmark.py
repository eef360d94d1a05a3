"""The notebook bench from the inside: the tables of docs/bench.md, recomputed without training."""

from __future__ import annotations

import contextlib
import platform
import time

import pandas as pd

from pfl_core.util.version import __version__
from pfl_papers.bench import page, rows, shown
from pfl_papers.bench.found import Found
from pfl_papers.bench.record import DIGITS
from pfl_papers.bench.settings import SETTINGS
from pfl_papers.compare import parameters
from pfl_papers.notebook.showing import show


class Benchmark:
    """The notebook: each method displays a part of the page.

    Parameters
    ----------
    settings, methods : list of str
        What to restrict it to, empty for all; the reference is always there.
    digits : bool
        Whether to show what is kept on this computer of the forms over digits.

    Raises
    ------
    ValueError
        For an unknown setting or row, or a damaged file.
    """

    def __init__(
        self,
        settings: list[str] | None = None,
        methods: list[str] | None = None,
        digits: bool = False,
    ):
        self.began = time.monotonic()
        parameters.check_list("settings", settings, SETTINGS)
        parameters.check_list("methods", methods, [row.name for row in rows.chosen()])
        found = Found.read(settings or [], own=digits, digits=digits)
        if methods:
            some = [*methods, rows.REFERENCE]
            found = Found({s: r.of(some) for s, r in found.records.items()})
        wanted = [s + DIGITS * digits for s in settings or SETTINGS]
        self.found, self.left = found, [s for s in wanted if s not in found.records]
        self._open = contextlib.ExitStack()  # until `finish`
        self._open.enter_context(pd.option_context("display.max_colwidth", None))
        self._open.enter_context(pd.option_context("display.max_rows", None))

    def findings(self) -> None:
        """The first sentence, a line a setting, and what is not run yet."""
        if self.found.records:
            show(f"**{page.first_sentence(self.found)}**")
            show("\n".join(page.findings(self.found)))
        if self.left:
            command = f"python -m pfl_papers bench --settings {' '.join(self.left)}"
            show(f"**Not run yet:** {', '.join(self.left)}. `{command}` runs what is missing.")

    def gates(self) -> pd.DataFrame | None:
        """What the gate says of each setting."""
        return shown.gates(self.found) if self.found.records else None

    def matrix(self) -> pd.DataFrame | None:
        """Words and differences: a line a method, a column a setting."""
        return shown.matrix(self.found) if self.found.records else None

    def overall(self) -> pd.DataFrame | None:
        """Mean ranks and probabilities of improvement, with intervals."""
        return shown.overall(self.found) if self.found.records else None

    def families(self) -> pd.DataFrame | None:
        """The best method of each family."""
        return shown.families(self.found) if self.found.records else None

    def settings(self) -> None:
        """The ranked table of each setting."""
        self._each(shown.setting)

    def choices(self) -> None:
        """What tuning chose in each setting."""
        self._each(shown.choices)

    def sceptic(self) -> None:
        """What changes if the same runs are read otherwise."""
        if self.found.records:
            show("\n".join(page.doubts(self.found)))
            show(shown.sceptical_words(self.found))
            show(shown.sceptical(self.found))

    def finish(self) -> str:
        """A line on rows, versions and time."""
        self._open.close()
        runs = sum(len(known.runs) for known in self.found.records.values())
        took = time.monotonic() - self.began
        versions = f"pfl_core {__version__}, Python {platform.python_version()}"
        return f"{runs} reported runs read, none trained; {versions}; {took:.0f} s"

    def _each(self, table: shown.OfSetting) -> None:
        for name in self.found.records:
            show(f"**{name}**: {shown.why(name)}")
            show(table(self.found, name))
