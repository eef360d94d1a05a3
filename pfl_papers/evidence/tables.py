"""The files of results/, read when they are needed and written whole, with digests in SHA256SUMS.

form.py says what they are and describes their columns. Beside its tables a folder has PAPER.npz:
what probes recorded, "<run>/probe/<name>" (rounds) and "<run>/probe/<name>/<key>". A run that
several papers show stands in the files of the first of them. Equal content gives equal bytes.
"""

from __future__ import annotations

import functools
import gzip
import io
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd

from pfl_core.experiments import metrics, settings
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.metrics import ROW_COLUMNS
from pfl_core.experiments.store import said_to_be
from pfl_core.util import checks, sums
from pfl_core.util.percent import DECIMALS
from pfl_papers import places
from pfl_papers.evidence import form
from pfl_papers.evidence.form import OLD_RUNS, PART, RUNS, TABLES, WAITING, Arrays


@dataclass
class Content:
    """Everything that a folder holds or is to hold: its tables, over all papers, and its probes."""

    runs: pd.DataFrame
    cells: pd.DataFrame
    pools: pd.DataFrame
    derived: pd.DataFrame
    history: pd.DataFrame
    clients: pd.DataFrame
    probes: dict[str, Arrays]  # {run: {array's name: values}}


class Measured(NamedTuple):
    """What there is of one run: its lines in the tables, without their column run, and probes."""

    line: dict[str, Any]
    history: pd.DataFrame
    clients: pd.DataFrame
    probes: Arrays


def shown(cells: pd.DataFrame, derived: pd.DataFrame) -> pd.DataFrame:
    """Which runs papers show: columns paper and run, each pair once, in the order of the files.

    The first paper that shows a run has it in its files.
    """
    both = pd.concat([cells[[*PART, "run"]], derived[[*PART, "run"]]])
    both = both.sort_values(PART, kind="stable")[["paper", "run"]]
    return both.drop_duplicates(ignore_index=True)


def _homes(cells: pd.DataFrame, derived: pd.DataFrame) -> dict[str, str]:
    # {run: the paper in whose files it stands}, in the order of the files
    first = shown(cells, derived).drop_duplicates("run")
    return dict(zip(first.run, first.paper, strict=True))


def _parts(table: pd.DataFrame) -> list[tuple[str, str, str]]:
    return list(table[PART].itertuples(index=False, name=None))


class Results:
    """A folder in this form, whose files are read when they are needed.

    A folder that does not exist holds nothing. A file that is damaged, or not as it was published,
    is a ValueError that names it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.listed = sums.known(folder)
        self.history = functools.cache(self._history)
        self.clients = functools.cache(self._clients)
        self.probes = functools.cache(self._probes)
        self.rows = functools.cache(self._rows)
        self.arrays = functools.cache(self._arrays)
        self.experiment = functools.cache(self._experiment)
        self.pool_of = functools.cache(self._pool_of)

    def _there(self, name: str) -> bool:
        return name in self.listed or (self.folder / name).exists()

    def _table(self, name: str) -> pd.DataFrame:
        path, about = self.folder / name, TABLES[form.kind(name)]
        if not self._there(name):
            return empty(form.kind(name))
        raw = sums.read(path, self.listed)
        try:
            raw = gzip.decompress(raw) if name.endswith(".gz") else raw
            frame = pd.read_csv(io.BytesIO(raw), dtype=str, keep_default_na=False)
            frame = frame.rename(columns=metrics.OLD) if name != RUNS else frame
            frame = form.of_old(frame) if name == OLD_RUNS else frame
            if missing := [c for c in about.needed if c not in frame]:
                raise ValueError(f"it has no column {', '.join(missing)}")
            frame = frame.assign(**{c: pd.to_numeric(frame[c]) for c in about.numbers(frame)})
            about.check(frame)
            return frame
        except _DAMAGE as error:
            raise damaged(path, error) from error

    def _history(self, paper: str) -> pd.DataFrame:
        return self._table(f"{paper}.history.csv.gz")

    def _clients(self, paper: str) -> pd.DataFrame:
        return self._table(f"{paper}.clients.csv.gz")

    def _probes(self, paper: str) -> dict[str, Arrays]:
        path, out = self.folder / f"{paper}.npz", {}
        if not self._there(path.name):
            return out
        raw = sums.read(path, self.listed)
        try:
            with np.load(io.BytesIO(raw), allow_pickle=False) as z:
                for name in z.files:
                    run, _, key = name.partition("/")
                    out.setdefault(run, {})[key] = z[name]
        except Exception as error:  # zipfile meets damage with nearly any type
            raise damaged(path, error) from error
        return out

    @property
    def _runs_file(self) -> Path:
        old = self._there(OLD_RUNS) and not self._there(RUNS)
        return self.folder / (OLD_RUNS if old else RUNS)

    @cached_property
    def runs(self) -> pd.DataFrame:
        """runs.csv.gz, by the run's name; fields that are younger than it have their defaults."""
        found = self._table(self._runs_file.name)
        young = {c: text for c, text in form.fields({}).items() if c not in found}
        return found.assign(**young).set_index("run")

    @cached_property
    def cells(self) -> pd.DataFrame:
        """cells.csv: which run is shown where."""
        return self._table("cells.csv")

    @cached_property
    def pools(self) -> pd.DataFrame:
        """pools.csv: the data of the runs."""
        return self._table("pools.csv")

    @cached_property
    def derived(self) -> pd.DataFrame:
        """derived.csv: numbers that were computed from finished runs."""
        return self._table("derived.csv")

    @cached_property
    def home(self) -> dict[str, str]:
        """{run: the paper in whose files it stands}."""
        homes = _homes(self.cells, self.derived)
        if lost := homes.keys() - set(self.runs.index):
            what = f"it has no run {min(lost)}, which the other tables name"
            raise damaged(self._runs_file, ValueError(what))
        return homes

    @cached_property
    def names(self) -> dict[str, str]:
        """{key: name of the run that is an answer to it}."""
        known = self.runs[self.runs.index.isin(list(self.home))]
        keys = known.key.where(known.key != "", known.index)
        return dict(zip(keys[::-1], known.index[::-1], strict=True))

    @cached_property
    def waiting(self) -> set[str]:
        """Runs that nothing shows yet."""
        return set(self.cells.run[self.cells.profile == WAITING])

    @cached_property
    def parts(self) -> list[tuple[str, str, str]]:
        """(paper, profile, data) of all that is shown, sorted."""
        every = dict.fromkeys(_parts(self.cells) + _parts(self.derived))
        return sorted(part for part in every if part[1] != WAITING)

    @cached_property
    def plain(self) -> dict[str, dict[str, Any]]:
        """{run: its Experiment's `plain()`}."""
        try:
            lines = self.runs.to_dict("index")
            return {str(run): form.plain(cast(dict[str, Any], v)) for run, v in lines.items()}
        except _DAMAGE as error:
            raise damaged(self._runs_file, error) from error

    def _experiment(self, run: str) -> Experiment | None:
        # Of a run that is here.
        return said_to_be(self.plain[run]) if run in self.plain else None

    def _pool_of(self, run: str) -> pd.DataFrame:
        # The line of pools.csv about the data of a run; none if it is not known.
        return self.pools[self.pools.checksum == self.runs.pool.get(run, "-")]

    @cached_property
    def facts(self) -> pd.DataFrame:
        """What rows say of a run wherever it is shown: a line a run, by its name."""
        of_experiment = ["method", "dataset", "partition", "model", "seed"]
        plain, about = (
            [*self.plain.values()],
            self.runs[[n for n in settings.ABOUT if n in self.runs]],
        )
        said = {n: [p[n] for p in plain] for n in of_experiment}
        try:
            said["setting"] = [
                settings.setting(p, cast(dict[str, Any], meta))
                for p, meta in zip(plain, about.to_dict("records"), strict=True)
            ]
        except _DAMAGE as error:
            raise damaged(self._runs_file, error) from error
        said["partition_seed"] = [
            p["seed"] if p["partition_seed"] is None else p["partition_seed"] for p in plain
        ]
        return self.runs.assign(**said)

    def _rows(self, paper: str, profile: str, data: str) -> pd.DataFrame:
        """What was published together, one number a row: cells in their order, then derived."""
        cells, derived = (
            t[(t[PART] == [paper, profile, data]).all(axis=1)] for t in (self.cells, self.derived)
        )
        both = [cells.merge(self.histories(cells.run), on="run").assign(dataset=""), derived]
        both = [f.astype({"rounds": int, "value": float}) for f in both]
        return self._with_facts(pd.concat(both, ignore_index=True))

    def histories(self, runs: Iterable[str]) -> pd.DataFrame:
        """The histories of these runs, one number a row."""
        wanted = set(runs)
        homes = sorted({self.home[run] for run in wanted})
        found = joined("history.csv.gz", [h[h.run.isin(wanted)] for h in map(self.history, homes)])
        for run in wanted - set(found.run.unique()):
            lost = ValueError(f"it has no history of run {run}")
            raise damaged(self.folder / f"{self.home[run]}.history.csv.gz", lost)
        return form.numbers(found)

    def rows_of(self, run: str, tags: dict[str, str]) -> pd.DataFrame:
        """A run's rows, with these tags."""
        return self._with_facts(self.histories([run]).assign(**tags, dataset=""))

    def _with_facts(self, frame: pd.DataFrame) -> pd.DataFrame:
        own = {str(name): column for name, column in frame.items() if name != "dataset"}
        others = [name for name in ROW_COLUMNS if name not in own]
        facts = self.facts[others].loc[frame.run].reset_index(drop=True)
        named = frame.dataset.where(frame.dataset != "", facts.dataset)
        return facts.assign(**own, dataset=named)[ROW_COLUMNS]

    def of(self, run: str) -> Measured:
        """What there is of one run; KeyError if it is not here."""
        home = self.home[run]
        line = cast(dict[str, Any], self.runs.loc[run].to_dict())
        history, clients = (
            t[t.run == run].drop(columns="run") for t in (self.history(home), self.clients(home))
        )
        return Measured(line, history, clients, self.probes(home).get(run, {}))

    def _arrays(self, run: str) -> Arrays:
        """A run's arrays, as its Result has them.

        There are the rounds, the clients' training and test samples, how many of the latter they
        classify right, and probes.
        """
        _, history, clients, probes = self.of(run)
        rounds = np.unique(history["rounds"].to_numpy(dtype=np.int64))
        try:
            return form.arrays(clients, rounds) | probes
        except ValueError as error:
            lost = ValueError(f"run {run}: {error}")
            raise damaged(self.folder / f"{self.home[run]}.clients.csv.gz", lost) from error

    def content(self) -> Content:
        """Everything that the folder holds."""
        papers = sorted(set(self.home.values()))
        history = joined("history.csv.gz", map(self.history, papers))
        clients = joined("clients.csv.gz", map(self.clients, papers))
        probes = {run: arrays for p in papers for run, arrays in self.probes(p).items()}
        runs = self.runs.reset_index()
        return Content(runs, self.cells, self.pools, self.derived, history, clients, probes)


# What damage is met with; pandas' own errors are ValueErrors.
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_DAMAGE += (EOFError, zlib.error, gzip.BadGzipFile)


def damaged(path: Path, error: Exception) -> ValueError:
    """The error of a file that cannot be read."""
    return ValueError(
        f"{path} is damaged ({error}); restore it from git, or delete its folder if it lies below "
        "runs/, and run its notebook again: runs that are finished are not computed again"
    )


def results(folder: Path | None = None) -> Results:
    """What a folder (default: the committed results/) holds at present; read once, then kept."""
    folder = folder or places.results_folder()
    # Not what `sums.replacing` has under way: it may be gone in a moment. Nor a page about them.
    every = list(os.scandir(folder)) if folder.is_dir() else []
    files = [file for file in every if file.name[0] != "." and not file.name.endswith(".md")]
    stats = sorted((file.name, file.stat()) for file in files)
    return _results(folder, tuple((name, s.st_mtime_ns, s.st_size) for name, s in stats))


@functools.lru_cache(maxsize=32)
def _results(folder: Path, stamp: tuple) -> Results:
    return Results(folder)


def kept_folders() -> list[Path]:
    """The folders that notebooks keep, in runs/results/."""
    return sorted(p for p in places.kept_folder().glob("*") if p.is_dir())


def holding(run: str) -> Results:
    """The first folder that has a run, results/ before those that are kept; results/ if none."""
    every = [results(), *map(results, kept_folders())]
    return next((r for r in every if run in r.home), every[0])


# -- out ------------------------------------------------------------------------------------------


def empty(file: str) -> pd.DataFrame:
    """A table without lines."""
    return pd.DataFrame(columns=[c for c in TABLES[file].columns if "." not in c])


def joined(file: str, frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Parts of one table as one."""
    kept = [f for f in frames if len(f)]
    return pd.concat(kept, ignore_index=True) if kept else empty(file)


def with_parts(old: Content, new: Content) -> Content:
    """`old`, with the parts that `new` has in place of its own; runs are the newer ones.

    What is shown waits no longer.
    """
    parts = {*_parts(new.cells), *_parts(new.derived)}

    def kept(name: str) -> pd.DataFrame:
        mine = getattr(old, name)
        if name in ("cells", "derived"):
            return mine[[part not in parts for part in _parts(mine)]]
        return mine if name == "pools" else mine[~mine.run.isin(new.runs.run)]

    names = {file.partition(".")[0]: file for file in TABLES}
    both = {n: joined(file, [kept(n), getattr(new, n)]) for n, file in names.items()}
    both["pools"] = both["pools"].drop_duplicates(["name", "checksum"], keep="last")
    waits = both["cells"].profile == WAITING
    seen = [*both["cells"].run[~waits], *both["derived"].run]
    both["cells"] = both["cells"][~(waits & both["cells"].run.isin(seen))]
    return Content(**both, probes=old.probes | new.probes)


def write(folder: Path, content: Content) -> list[Path]:
    """Make a folder hold this and nothing else of this form.

    Runs that no cell and no derived number names are left out, and data that no run used. It is
    written whole, or, if that fails with OSError, stays as it was (`sums.put`).

    Returns
    -------
    list of Path
        The files.
    """
    home = _homes(content.cells, content.derived)
    order = {run: i for i, run in enumerate(home)}
    runs, history, clients = (
        t[t.run.isin(list(order))].sort_values("run", key=lambda r: r.map(order), kind="stable")
        for t in (content.runs, content.history, content.clients)
    )
    cells, derived = (t.sort_values(PART, kind="stable") for t in (content.cells, content.derived))
    pools = content.pools[content.pools.checksum.isin(runs.pool)].sort_values(["name", "checksum"])
    raw = {RUNS: _csv(runs, RUNS), "cells.csv": _csv(cells, "cells.csv")}
    raw["pools.csv"] = _csv(pools, "pools.csv")
    # Weights of clients can differ by less than the fourth decimal.
    raw["derived.csv"] = _csv(derived, "derived.csv", decimals=8)
    for paper in sorted(set(home.values())):
        for file, table in (("history.csv.gz", history), ("clients.csv.gz", clients)):
            raw[f"{paper}.{file}"] = _csv(table[table.run.map(home) == paper], file)
        probes = {run: content.probes.get(run, {}) for run in order if home[run] == paper}
        arrays = {f"{run}/{key}": v for run, kept in probes.items() for key, v in kept.items()}
        if arrays:
            np.savez_compressed(out := io.BytesIO(), **cast(dict[str, Any], arrays))
            raw[f"{paper}.npz"] = out.getvalue()
    checks.make_folder(folder)
    old = sums.known(folder).keys() - raw.keys()
    return sums.put(folder, raw, [n for n in old if form.kind(n) or n.endswith(".npz")])


def _csv(table: pd.DataFrame, file: str, decimals: int = DECIMALS) -> bytes:
    table = table[form.ordered(table, file)].round(decimals)
    # Some lines have no such number, which must not make 3.0 of the 3 of others.
    whole = {c: pd.to_numeric(table[c]).astype("Int64") for c in TABLES[file].whole}
    text = table.assign(**whole).to_csv(index=False).encode()
    return gzip.compress(text, mtime=0) if file.endswith(".gz") else text
