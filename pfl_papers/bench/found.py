"""What the benchmark found: its records, and what is computed from them, each once."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import pandas as pd

from pfl_core.util import checks
from pfl_papers.bench import gate, ranks, record, tiers
from pfl_papers.bench.record import DIGITS, Record
from pfl_papers.bench.rows import FT1, LOCAL, REFERENCE
from pfl_papers.bench.settings import SETTINGS


class Found:
    """The records of settings that have reported runs of the reference.

    Parameters
    ----------
    records : dict of Record
        {setting: what is known of it}.
    """

    def __init__(self, records: Mapping[str, Record]):
        self.records = {s: r for s, r in records.items() if REFERENCE in r.lines()}
        self.tables = {s: _table(r) for s, r in self.records.items()}
        self.tiers = functools.cache(self._tiers)

    @classmethod
    def read(
        cls, settings: Iterable[str] = (), *, own: bool = False, digits: bool = False
    ) -> Found:
        """What is published whole, or with `own` all of it and what is kept on this computer.

        Raises
        ------
        ValueError
            For an unknown setting, or a damaged file.
        """
        wanted = list(settings) or [*SETTINGS]
        for name in wanted:
            checks.known("setting", name, SETTINGS)
        found = {s: record.read(s, own) for s in (w + DIGITS * digits for w in wanted)}
        return cls({s: r for s, r in found.items() if own or not r.waiting()})

    def _tiers(self, setting: str, reference: str = REFERENCE) -> pd.DataFrame:
        """The rows of a setting beside a reference (see `tiers.judged`)."""
        return tiers.judged(self.tables[setting], reference)

    @functools.cached_property
    def summary(self) -> pd.DataFrame:
        """Mean ranks and probabilities of improvement over all settings, best row first."""
        return ranks.summary(self.tables)

    def order(self, setting: str) -> list[str]:
        """Rows of a setting, the best mean over their seeds first; those that diverged last."""
        means = self.tables[setting].mean(axis=1)
        return [str(r) for r in means.sort_values(ascending=False, kind="stable").index]

    @property
    def rows(self) -> list[str]:
        """Rows of any setting: those of all settings by their mean rank, then the others."""
        first = [str(r) for r in self.summary.index] if self.records else []
        others = [row for t in self.tables.values() for row in map(str, t.index)]
        return list(dict.fromkeys([*first, *others]))

    @property
    def methods(self) -> list[str]:
        """Rows beside the reference and its form with one epoch."""
        return [row for row in self.rows if row not in (REFERENCE, FT1)]

    def gate(self, setting: str) -> gate.Gate:
        """What the gate says of a setting."""
        return gate.gate(self.records[setting])

    def hours(self, setting: str) -> float:
        """Processor hours that a setting's runs took, each counted once."""
        known = self.records[setting]
        both = pd.concat([known.runs[["run", "cpu_s"]], known.tuning[["run", "cpu_s"]]])
        return float(both.drop_duplicates("run").cpu_s.sum()) / 3600

    def wins(self, word: str = tiers.BETTER) -> dict[str, list[str]]:
        """{row: settings in which it has a word}, of all methods."""
        found = {s: self.tiers(s).tier for s in self.records}
        return {
            row: [s for s, tier in found.items() if tier.get(row) == word] for row in self.methods
        }

    def twins(self, reference: str, but: int = 0) -> list[str]:
        """Methods that are equal to a row in all settings that are run but for so many."""
        if not all(reference in table.index for table in self.tables.values()):
            return []
        found = [self.tiers(s, reference).tier for s in self.records]
        others = [row for row in self.methods if row not in (reference, LOCAL)]
        return [r for r in others if sum(t.get(r) != tiers.EQUAL for t in found) == but]


def _table(known: Record) -> pd.DataFrame:
    # Accuracies on the seeds that the reference has.
    table = known.accuracies().loc[main(known)]
    return table.loc[:, table.loc[REFERENCE].notna()]


def main(known: Record) -> list[str]:
    """Rows of a record without second lines, such as that at equal gradients."""
    return [row for row in known.lines() if record.method_of(row) == row]
