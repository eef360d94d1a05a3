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
seeds = [100, 101]

[table]                               # what `table` takes
select = "best_val"
against = "FedAvg"
"""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from pfl_core.data.federation import Federation
from pfl_core.experiments import lookup
from pfl_core.experiments.build import fitted
from pfl_core.experiments.experiment import Experiment, grid, import_plugin, seeded
from pfl_core.experiments.store import Result
from pfl_core.experiments.sweep import Unfinished, sweep
from pfl_core.experiments.tune import tune
from pfl_core.util import checks, paths

TUNE = ("choices", "draws", "draw_seed", "seeds", "keep", "when", "last", "metric")
TABLE = ("against", "metric", "select", "when", "average", "digits")


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
            For a file that is not there or no TOML; for an unknown or ill-typed entry; for cells
            that no Experiment can be, before anything is trained.
        """
        path = Path(path)
        try:
            said = tomllib.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{path} is no TOML file: {error}") from None
        kinds = dict(base=dict, rows=dict, columns=dict, product=dict, tune=dict, table=dict)
        kinds |= dict(seeds=list, plugins=list, data=str)
        for name, value in said.items():
            checks.known(f"{path}: entry", name, kinds)
            if not isinstance(value, kinds[name]):
                wanted = {dict: "a table", list: "a list", str: "a text"}[kinds[name]]
                raise ValueError(f"{path}: {name} is {value!r}; allowed is {wanted}")
        for part, known in (("tune", TUNE), ("table", TABLE)):
            for name in said.get(part, {}):
                checks.known(f"{path}: entry of {part}", name, known)
        said["rows"] = _rows(path, said.get("rows", {}), said.pop("product", {}))
        if "data" in said:
            said["data"] = path.parent / said["data"]
        study = cls(path, said.pop("base", {}), **said)
        study.check()
        return study

    def check(self) -> None:
        """Raise ValueError where a cell is no Experiment."""
        for plugin in self.plugins:
            import_plugin(plugin)
        try:
            self.cells()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.path}: {error}") from error
        if shared := set(self.seeds) & set(self.tune.get("seeds", ())):
            raise ValueError(
                f"{self.path}: tune has the seeds {sorted(shared)}, which are reported, too; tune "
                "on others: seeds = [100, 101]"
            )

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
        i, n = shard
        how |= {"fed": self.fed()}
        if not self.tune:
            return sweep(self._reported(self.cells())[i - 1 :: n], **how)
        frames = [
            sweep(self._reported([self._chosen(c, how)]), **how) for c in self.cells()[i - 1 :: n]
        ]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def _reported(self, cells: list[Experiment]) -> list[Experiment]:
        return [seeded(cell, seed) for cell in cells for seed in self.seeds]

    def _chosen(self, cell: Experiment, how: dict[str, Any]) -> Experiment:
        if not self.tune:
            return cell
        said = dict(self.tune)
        best, _ = tune(cell, said.pop("choices", None), **said, **how)
        return best

    def found(self) -> Iterator[tuple[Experiment, int, Result | None]]:
        """(cell, seed, its run or None if it is not finished) of all runs that are reported.

        Nothing is computed. A cell whose tuning is not finished has none.
        """
        fed, store = self.fed(), paths.store_folder()
        how: dict[str, Any] = {"fed": fed, "compute": False}
        for cell in self.cells():
            try:
                chosen = self._chosen(cell, how)
            except Unfinished:
                yield from ((cell, seed, None) for seed in self.seeds)
                continue
            for e in self._reported([chosen]):
                e = fitted(e, fed)
                there = lookup.stored(e, store, fed.checksum if fed else None)
                yield cell, e.seed, dataclasses.replace(there, experiment=e) if there else None

    def results(self) -> list[Result]:
        """The finished runs that are reported, in the order of the table."""
        return [result for *_, result in self.found() if result]

    def status(self) -> pd.DataFrame:
        """How many runs of each cell are finished, of how many; columns as in the table."""
        lines = [
            (cell.tags.get("row", ""), cell.tags.get("column", "") or "runs", result is not None)
            for cell, _, result in self.found()
        ]
        frame = pd.DataFrame(lines, columns=["row", "column", "there"])
        said = frame.groupby(["row", "column"], sort=False).there.agg(
            lambda there: f"{there.sum()} of {len(there)}"
        )
        return said.unstack("column").reindex(index=list(self.rows)).rename_axis(None, axis=1)


def _rows(path: Path, rows: dict[str, Any], product: dict[str, Any]) -> dict[str, dict[str, Any]]:
    # The rows, each with every combination of the lists of `product`.
    for name, values in product.items():
        if not isinstance(values, list) or not values:
            raise ValueError(
                f"{path}: product has {name} = {values!r}; allowed is a list of values"
            )
    if not rows and not product:
        raise ValueError(f'{path} has no rows; write [rows.FedAvg] and below it method = "fedavg"')
    out = {}
    for label, changes in (rows or {"": {}}).items():
        if not isinstance(changes, dict):
            raise ValueError(f"{path}: row {label} is {changes!r}; allowed is a table of fields")
        for values in itertools.product(*product.values()):
            more = dict(zip(product, values, strict=True))
            said = [label] * bool(label) + [_named(n, v) for n, v in more.items()]
            out[", ".join(said)] = changes | more
    return out


def _named(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{n} {v}" for n, v in value.items())
    return str(value) if name in ("method", "model", "dataset", "partition") else f"{name} {value}"


def shard(text: str) -> tuple[int, int]:
    """(i, n) of "i/n". ValueError for another text."""
    i, _, n = text.partition("/")
    if not (i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise ValueError(f"shard {text!r}: allowed is i/n, such as 1/4, ..., 4/4")
    return int(i), int(n)
