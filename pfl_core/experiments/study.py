"""A study in a file: a base, what rows and columns change in it, seeds, and how rows are tuned.

seeds = [0, 1, 2]
plugins = ["mine"]                    # modules that register methods, models, data
data = "hospitals"                    # of dataset "own": a folder that Federation.save wrote

[base]                                # fields of an Experiment
dataset = "digits"
rounds = 50

[rows.FedAvg]                         # what a row changes
method = "fedavg"
[rows.FedPer]
method = "fedper"

[columns."Dir(0.1)"]                  # what a column changes; may be left out
partition_args = { alpha = 0.1 }

[product]                             # lists whose product is run, beside rows or instead
lr = [0.01, 0.1]

[tune]                                # what `tune` takes: each cell chooses by itself
choices = { lr = [0.01, 0.1] }        # or draws = 16
seeds = [100, 101]                    # none that is reported; by default [100]

[table]                               # what `table` takes
select = "best_val"
against = "FedAvg"
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from pfl_core.data import pools
from pfl_core.data.federation import Federation
from pfl_core.engine.finetune import moments
from pfl_core.engine.participation import evaluates_after
from pfl_core.engine.scoring import LARGE, list_metrics
from pfl_core.experiments import begun, keys, lookup, study_file
from pfl_core.experiments.build import fitted, train_config
from pfl_core.experiments.experiment import Experiment, grid, import_plugin, seeded
from pfl_core.experiments.metrics import FAILED, OF_CLIENTS, ROW_COLUMNS
from pfl_core.experiments.store import Result
from pfl_core.experiments.sweep import Unfinished, sweep
from pfl_core.experiments.tune import NoneEnded, declared, planned, tune
from pfl_core.util import checks, paths, sums
from pfl_core.util.say import say

T = TypeVar("T")
TEXTS = {"against", "metric", "select", "when", "average"}  # of `table`


@dataclass(frozen=True)
class Study:
    """What a file of a study says.

    Attributes
    ----------
    path : Path
    base : dict
        Fields of the Experiment that all runs vary.
    rows, columns : dict of dicts
        What they change in it, by label.
    seeds : list of int
        Of the runs that are reported.
    tune, table : dict
        What `tune` and `table` take, beside what the study gives them.
    plugins : list of str
    data : Path, optional
        The folder of a Federation.
    """

    path: Path
    base: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0])
    tune: dict[str, Any] = field(default_factory=dict)
    table: dict[str, Any] = field(default_factory=dict)
    plugins: list[str] = field(default_factory=list)
    data: Path | None = None

    @classmethod
    def read(cls, path: str | Path) -> Study:
        """The study of a TOML file.

        Raises
        ------
        OSError, ValueError
            For a file that is not there or no TOML; for an unknown or ill-typed entry, and for a
            field that has two values; for cells that no Experiment can be. Nothing is trained.
        """
        path = paths.expanded(path, "path")
        said = study_file.read(path)
        if "data" in said:
            said["data"] = path.parent / paths.expanded(said["data"], "data")
        study = cls(path, said.pop("base", {}), **said)
        study.check()
        return study

    def check(self) -> None:
        """Raise ValueError for a cell that is no Experiment, or is tuned or shown wrongly."""
        for plugin in self.plugins:
            import_plugin(plugin)
        try:
            cells = self.cells()
            self._reported(cells)
            made = [e for cell in cells if self.tune for e in self._tried(cell)]
            self._check_table(made or cells)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.path}: {error}") from error
        if {cell.dataset == "own" for cell in cells} != {self.data is not None}:
            raise ValueError(
                f'{self.path}: dataset = "own" and data = "FOLDER", which Federation.save wrote, '
                "go together, in all cells; say both, or neither"
            )

    def _tried(self, cell: Experiment) -> Iterable[Experiment]:
        # What tuning tries of a cell; ValueError where it may replace what a label says.
        drawn = "draws" in self.tune and "choices" not in self.tune
        choices = declared(cell) if drawn else self.tune.get("choices")
        for side, every in (("row", self.rows), ("column", self.columns)):
            if label := cell.tags.get(side):
                study_file.check_tuned(side, label, every[label], choices, drawn)
        return planned(cell, **self._tuning()).values()

    def _check_table(self, cells: list[Experiment]) -> None:
        # ValueError for what no runs of these could be shown with.
        for name in TEXTS & self.table.keys():
            checks.kind("table", name, self.table[name], "str")
        # What shows runs lies above this module.
        importlib.import_module("pfl_core.analysis.tables").check(self.rows, **self.table)
        metric, when = self.table.get("metric", "acc_pct"), self.table.get("when", "before")
        average = self.table.get("average", "client")
        named = {m: None for e in cells for m in e.metrics if m not in LARGE}
        legal = (
            ["acc_pct", "loss"] if average == "pooled" else [*OF_CLIENTS, "acc_balanced", *named]
        )
        add = f"write metrics = [{metric!r}] in base; " * (metric in list_metrics())
        add += f"these are of average = {average!r}"
        checks.known("metric of table", metric, legal, add)
        after = any(e.clients is None or evaluates_after(train_config(e), e.clients) for e in cells)
        tuned = max((moments(e.finetune) for e in cells), key=len)
        legal = ["before", *["after"] * after, *tuned]
        checks.known("when of table", when, legal, "models must be evaluated then")

    def cells(self) -> list[Experiment]:
        """A cell of the table each, column by column, with the first seed."""
        base = Experiment(**self.base, plugins=tuple(self.plugins))
        return grid(base, self.rows, self.columns or None, self.seeds[:1])

    def fed(self) -> Federation | None:
        """The user's own data, None if they have a name."""
        return Federation.open(self.data) if self.data else None

    def run(self, shard: tuple[int, int] = (1, 1), **how: Any) -> pd.DataFrame:
        """Compute what the store does not hold yet, and return the rows of the reported runs.

        Parameters
        ----------
        shard : (i, n)
            Every n-th part from the i-th on: cells that are tuned, else runs. Several computers
            with one store share a study so.
        **how
            What `sweep` takes.
        """
        how |= {"fed": self.fed()}
        if not self.tune:
            return sweep([seeded(cell, seed) for cell, seed in self._part(shard)], **how)
        for _ in self.found(shard):  # what any cell's tuning is refused for, before one is trained
            pass
        frames = [
            sweep(self._reported([chosen]), **how)
            for cell in dict.fromkeys(cell for cell, _ in self._part(shard))
            if (chosen := self._chosen(cell, how))
        ]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=ROW_COLUMNS)

    def part(self, every: Sequence[T], shard: tuple[int, int]) -> list[T]:
        """What a shard has of something that is there for each cell and seed, in this order."""
        (i, n), k = shard, len(self.seeds) if self.tune else 1  # whole cells where each is tuned
        return [one for at, one in enumerate(every) if at // k % n == i - 1]

    @property
    def tuned_on(self) -> list[int]:
        """The seeds that tune: by default the first from 100 on that is not reported."""
        return self.tune.get("seeds", [next(s for s in count(100) if s not in self.seeds)])

    def _part(self, shard: tuple[int, int]) -> list[tuple[Experiment, int]]:
        return self.part([(cell, s) for cell in self.cells() for s in self.seeds], shard)

    def _reported(self, cells: list[Experiment]) -> list[Experiment]:
        return [seeded(cell, seed) for cell in cells for seed in self.seeds]

    def _chosen(self, cell: Experiment, how: dict[str, Any]) -> Experiment | None:
        # None, and a line that says so, where no choice of a cell ended: the others go on.
        if not self.tune:
            return cell
        try:
            best, rows = tune(cell, **self._tuning(), **how)
            if (rows.metric == FAILED).any():
                self._keep(cell, best)
            return best
        except Unfinished:
            return self._kept(cell)
        except NoneEnded as error:
            say(f"{', '.join(filter(None, cell.tags.values()))}: {error}")
            return None

    def _tuning(self) -> dict[str, Any]:
        return self.tune | {"seeds": self.tuned_on}

    def _keep(self, cell: Experiment, best: Experiment) -> None:
        # A run that raised an error is not in the store, from which a choice is told later.
        file = self._keeps(cell)
        checks.make_folder(file.parent)
        made = planned(cell, **self._tuning())
        label = next(label for label, e in made.items() if e.plain() == best.plain())
        with sums.replacing(file) as out:
            out.write(label.encode())

    def _kept(self, cell: Experiment) -> Experiment | None:
        try:
            label = self._keeps(cell).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
        return planned(cell, **self._tuning()).get(label)

    def _keeps(self, cell: Experiment) -> Path:
        # Named by all that decides it: another choice, seed or code is another tuning.
        fed, said = self.fed(), self._tuning()
        checksum = fed.checksum if fed else pools.checksum(cell.dataset)
        tried = [seeded(e, s) for e in planned(cell, **said).values() for s in self.tuned_on]
        ids = [fitted(e, fed).id_for(checksum) for e in tried]
        return paths.store_folder() / "chosen" / keys.hashed({"runs": ids, "tune": said})

    def found(
        self, shard: tuple[int, int] = (1, 1)
    ) -> Iterator[tuple[Experiment, int, Result | None]]:
        """(cell, seed, its run or None if it is not finished) of a shard's reported runs.

        Nothing is computed. A cell whose tuning is not finished, or chose nothing, has none.
        """
        for cell, seed, _, there in self._runs(shard):
            yield cell, seed, there

    def _runs(
        self, shard: tuple[int, int] = (1, 1)
    ) -> Iterator[tuple[Experiment, int, str, Result | None]]:
        # As `found`, with the run's id, "" where tuning has not chosen it.
        fed, store = self.fed(), paths.store_folder()

        @functools.cache
        def chosen(cell: Experiment) -> Experiment | None:
            return self._chosen(cell, {"fed": fed, "compute": False})

        for cell, seed in self._part(shard):
            if (choice := chosen(cell)) is None:
                yield cell, seed, "", None
                continue
            e = fitted(seeded(choice, seed), fed)
            checksum = fed.checksum if fed else pools.checksum(e.dataset)
            there = lookup.stored(e, store, checksum)
            there = dataclasses.replace(there, experiment=e) if there else None
            yield cell, seed, e.id_for(checksum), there

    def results(self) -> list[Result]:
        """The finished runs that are reported, in the order of the table."""
        return [result for *_, result in self.found() if result]

    def status(self) -> pd.DataFrame:
        """How many runs of each cell are finished, of how many, and how far those are that have
        begun; columns as in the table.
        """
        store, lines = paths.store_folder(), []
        for cell, seed, id, result in self._runs():
            far = None if result or not id else begun.read(store / f"{id}{begun.ENDING}")
            at = f"seed {seed}: {far}" if far else ""
            place = cell.tags.get("row", ""), cell.tags.get("column", "") or "runs"
            lines.append((*place, result is not None, at))
        frame = pd.DataFrame(lines, columns=["row", "column", "there", "at"])
        said = frame.groupby(["row", "column"], sort=False)[["there", "at"]].apply(
            lambda of: "; ".join([f"{of.there.sum()} of {len(of)}", *filter(None, of["at"])])
        )
        return said.unstack("column").reindex(index=list(self.rows)).rename_axis(None, axis=1)


def shard(text: str) -> tuple[int, int]:
    """(i, n) of "i/n". ValueError for another text."""
    i, _, n = text.partition("/")
    if not (i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise ValueError(f"shard {text!r}: allowed is i/n, such as 1/4, ..., 4/4")
    return int(i), int(n)
