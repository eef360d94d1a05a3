"""The form of results/: nothing stands there twice, and every file has its digest in SHA256SUMS.

runs.csv              a line a run: its name, its key (the id of its Experiment, by which it is
                      found), Experiment (JSON), and where, when and on which data it ran
cells.csv             which run is shown where: paper, profile, data, artefact, row, column
pools.csv             the data: checksum, samples, shape, and how many samples each class has
derived.csv           numbers that were computed from finished runs
PAPER.history.csv.gz  what runs measured: a line a run, round, when and split, columns
                      "average.metric"
PAPER.clients.csv.gz  client by client: samples (when ""), and how many of them are classified right
PAPER.npz             what probes recorded: "<run>/probe/<name>" (rounds) and
                      "<run>/probe/<name>/<key>"

pandas reads and writes the tables. A run that several papers show stands in the files of the first
of them. Equal content gives equal bytes.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd

from pfl_core.experiments import metrics, settings
from pfl_core.experiments.metrics import KEYS, ROW_COLUMNS
from pfl_core.util import checks, sums
from pfl_core.util.percent import DECIMALS
from pfl_papers import places

PART = ["paper", "profile", "data"]  # what is published together
CELL = ["artefact", "row", "column", "run"]
RECORDED = (  # what runs.csv takes from a Result's meta
    "status pool revision version device executor torch python processor commit date wall_s "
    "clients parameters leaks_test partition_hash schema code"
).split()
COLUMNS = {
    "runs.csv": ["run", "key", *RECORDED, "experiment"],
    "cells.csv": [*PART, *CELL],
    "pools.csv": "name checksum samples test classes shape copy labels".split(),
    # dataset: where it is another than the run's
    "derived.csv": [*PART, *CELL, "dataset", *KEYS, "average", "metric", "value"],
    "history.csv.gz": ["run", *KEYS],
    "clients.csv.gz": ["run", "split", "when", "rounds", "counts"],
}
ONCE = {  # what no two lines of a table have in common
    "runs.csv": ["run"],
    "cells.csv": COLUMNS["cells.csv"],
    "pools.csv": ["name", "checksum"],
    "history.csv.gz": COLUMNS["history.csv.gz"],
    "clients.csv.gz": COLUMNS["clients.csv.gz"][:-1],
}
WHOLE = "rounds revision clients parameters schema samples test classes".split()
NUMBERS = [*WHOLE, "value", "wall_s"]

Arrays = dict[str, np.ndarray]


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


def named(cells: pd.DataFrame, derived: pd.DataFrame) -> pd.DataFrame:
    """Which runs papers show: columns paper and run, each pair once, sorted as the files are."""
    both = pd.concat([cells[[*PART, "run"]], derived[[*PART, "run"]]])
    both = both.sort_values(PART, kind="stable")[["paper", "run"]]
    return both.drop_duplicates(ignore_index=True)


def _check(table: pd.DataFrame, kind: str) -> None:
    # ValueError for lines that are there twice, and for numbers that cannot be.
    keys = ONCE.get(kind, [])
    if keys and len(twice := table[table.duplicated(keys)]):
        raise ValueError(f"it has {' '.join(map(str, twice[keys].iloc[0]))} twice")
    for name in [c for c in table.columns.astype(str) if ".acc_" in c]:
        if len(beyond := table[name][(table[name] < 0) | (table[name] > 100)]):
            raise ValueError(f"{name} is {beyond.iloc[0]:g}; an accuracy is 0 to 100 %")
    if kind == "derived.csv" and np.isinf(table.value).any():
        raise ValueError("a value is infinite")


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

    def _there(self, name: str) -> bool:
        return name in self.listed or (self.folder / name).exists()

    def _table(self, name: str, columns: list[str]) -> pd.DataFrame:
        path = self.folder / name
        if not self._there(name):
            return pd.DataFrame(columns=columns)
        raw = sums.read(path)
        try:
            raw = gzip.decompress(raw) if name.endswith(".gz") else raw
            frame = pd.read_csv(io.BytesIO(raw), dtype=str, keep_default_na=False)
            frame = frame.rename(columns=metrics.OLD)
            if name == "runs.csv":  # those of version 0.2 lack the key, and code, which was ours
                frame = frame.assign(**{c: "" for c in ("key", "code") if c not in frame})
            if missing := [c for c in columns if c not in frame]:
                raise ValueError(f"it has no column {', '.join(missing)}")
            numbers = [c for c in frame.columns.astype(str) if c in NUMBERS or "." in c]
            frame = frame.assign(**{c: pd.to_numeric(frame[c]) for c in numbers})
            _check(frame, name if name in COLUMNS else name.partition(".")[2])
            return frame
        except (ValueError, TypeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise damaged(path, error) from error  # pandas' own are ValueErrors

    def _history(self, paper: str) -> pd.DataFrame:
        return self._table(f"{paper}.history.csv.gz", COLUMNS["history.csv.gz"])

    def _clients(self, paper: str) -> pd.DataFrame:
        return self._table(f"{paper}.clients.csv.gz", COLUMNS["clients.csv.gz"])

    def _probes(self, paper: str) -> dict[str, Arrays]:
        path, out = self.folder / f"{paper}.npz", {}
        if not self._there(path.name):
            return out
        raw = sums.read(path)
        try:
            with np.load(io.BytesIO(raw), allow_pickle=False) as z:
                for name in z.files:
                    run, _, key = name.partition("/")
                    out.setdefault(run, {})[key] = z[name]
        except Exception as error:  # zipfile meets damage with nearly any type
            raise damaged(path, error) from error
        return out

    @cached_property
    def runs(self) -> pd.DataFrame:
        """runs.csv, by the run's id."""
        return self._table("runs.csv", COLUMNS["runs.csv"]).set_index("run")

    @cached_property
    def cells(self) -> pd.DataFrame:
        """cells.csv: which run is shown where."""
        return self._table("cells.csv", COLUMNS["cells.csv"])

    @cached_property
    def pools(self) -> pd.DataFrame:
        """pools.csv: the data of the runs."""
        return self._table("pools.csv", COLUMNS["pools.csv"])

    @cached_property
    def derived(self) -> pd.DataFrame:
        """derived.csv: numbers that were computed from finished runs."""
        return self._table("derived.csv", COLUMNS["derived.csv"])

    @cached_property
    def home(self) -> dict[str, str]:
        """{run: the paper in whose files it stands}."""
        shown = named(self.cells, self.derived)
        if len(lost := shown.run[~shown.run.isin(self.runs.index)]):
            what = f"it has no run {lost.iloc[0]}, which the other tables name"
            raise damaged(self.folder / "runs.csv", ValueError(what))
        return _homes(shown)

    @cached_property
    def names(self) -> dict[str, str]:
        """{key: name of the run that is an answer to it}."""
        known = self.runs[self.runs.index.isin(self.home)]
        keys = known.key.where(known.key != "", known.index)
        return dict(zip(keys[::-1], known.index[::-1], strict=True))

    @property
    def parts(self) -> list[tuple[str, str, str]]:
        """(paper, profile, data) of all that is there, sorted."""
        return sorted(dict.fromkeys(_parts(self.cells) + _parts(self.derived)))

    @cached_property
    def facts(self) -> pd.DataFrame:
        """What rows say of a run wherever it is shown: a line a run, by its id."""
        of_experiment = ("method", "dataset", "partition", "model", "seed")
        try:
            plain = [json.loads(text) for text in self.runs.experiment]
            said = {n: [p[n] for p in plain] for n in of_experiment}
            about = self.runs[[n for n in settings.ABOUT if n in self.runs]]
            said["setting"] = [
                settings.setting(p, dict(zip(map(str, about), line, strict=True)))
                for p, line in zip(plain, about.to_numpy(), strict=True)
            ]
            said["partition_seed"] = [
                p["seed"] if p["partition_seed"] is None else p["partition_seed"] for p in plain
            ]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise damaged(self.folder / "runs.csv", error) from error
        said = pd.DataFrame(said, index=self.runs.index)
        return said.join(self.runs.rename(columns={"clients": "n_clients"}))

    def _rows(self, paper: str, profile: str, data: str) -> pd.DataFrame:
        """What was published together, one number a row: cells in their order, then derived."""
        cells, derived = (
            t[(t[PART] == [paper, profile, data]).all(axis=1)] for t in (self.cells, self.derived)
        )
        shown = cells.merge(self.histories(cells.run), on="run").assign(dataset="")
        both = [f.astype({"rounds": int, "value": float}) for f in (shown, derived)]
        return self._with_facts(pd.concat(both, ignore_index=True))

    def histories(self, runs: Iterable[str]) -> pd.DataFrame:
        """The histories of these runs, one number a row."""
        wanted = set(runs)
        homes = sorted({self.home[run] for run in wanted})
        found = joined("history.csv.gz", [h[h.run.isin(wanted)] for h in map(self.history, homes)])
        for run in wanted - set(found.run):
            lost = ValueError(f"it has no history of run {run}")
            raise damaged(self.folder / f"{self.home[run]}.history.csv.gz", lost)
        return metrics.long(found)

    def rows_of(self, run: str, tags: dict[str, str]) -> pd.DataFrame:
        """A run's rows, with these tags."""
        return self._with_facts(self.histories([run]).assign(**tags, dataset=""))

    def _with_facts(self, frame: pd.DataFrame) -> pd.DataFrame:
        facts = self.facts.loc[frame.run].reset_index(drop=True)
        named = frame.dataset.where(frame.dataset != "", facts.dataset)
        own = {str(name): column for name, column in frame.items() if name != "dataset"}
        return facts.assign(**own, dataset=named)[ROW_COLUMNS]

    def of(self, run: str) -> Measured:
        """What there is of one run; KeyError if it is not here."""
        home = self.home[run]
        line = {str(name): value for name, value in self.runs.loc[run].items()}
        probes = self.probes(home).get(run, {})
        history, clients = (
            t[t.run == run].drop(columns="run") for t in (self.history(home), self.clients(home))
        )
        return Measured(line, history, clients, probes)

    def _arrays(self, run: str) -> Arrays:
        """A run's arrays, as its Result has them.

        There are the rounds, the clients' training and test samples, how many of the latter they
        classify right, and probes.
        """
        _, history, clients, probes = self.of(run)
        rounds = np.unique(history["rounds"].to_numpy(dtype=np.int64))
        out = {"rounds": rounds}
        try:
            for (when, split), lines in clients.groupby(["when", "split"], sort=False):
                if when and lines["rounds"].tolist() != rounds.tolist():
                    raise ValueError(f"{run} has other rounds than its history")
                counts = np.array([text.split() for text in lines.counts], dtype=np.int64)
                out |= {f"{when}/{split}/correct": counts} if when else {f"n/{split}": counts[0]}
        except ValueError as error:
            raise damaged(self.folder / f"{self.home[run]}.clients.csv.gz", error) from error
        return out | probes

    def content(self) -> Content:
        """Everything that the folder holds."""
        papers = sorted(set(self.home.values()))
        history = joined("history.csv.gz", map(self.history, papers))
        clients = joined("clients.csv.gz", map(self.clients, papers))
        probes = {run: arrays for p in papers for run, arrays in self.probes(p).items()}
        runs = self.runs.reset_index()
        return Content(runs, self.cells, self.pools, self.derived, history, clients, probes)


def counts(arrays: Arrays) -> pd.DataFrame:
    """A run's lines of PAPER.clients.csv.gz, without its id, from its arrays."""

    def text(values: np.ndarray) -> str:
        return " ".join(map(str, values.astype(np.int64)))

    lines = [(split, "", None, text(arrays[f"n/{split}"])) for split in ("train", "test")]
    for when in ("before", "after"):
        right = arrays.get(f"{when}/test/correct", ())
        lines += [("test", when, r, text(v)) for r, v in zip(arrays["rounds"], right, strict=False)]
    return pd.DataFrame(lines, columns=COLUMNS["clients.csv.gz"][1:])


def of_probes(arrays: Arrays) -> Arrays:
    """Those of a run's arrays that its probes recorded."""
    return {k: v for k, v in arrays.items() if k.startswith("probe/")}


def damaged(path: Path, error: Exception) -> ValueError:
    """The error of a file that cannot be read."""
    return ValueError(
        f"{path} is damaged ({error}); restore it from git, or delete its folder if it lies below "
        "runs/, and run its notebook again: runs that are finished are not computed again"
    )


def results(folder: Path | None = None) -> Results:
    """What a folder (default: the committed results/) holds at present; read once, then kept."""
    folder = folder or places.results_folder()
    files = sorted(folder.glob("*")) if folder.is_dir() else []
    stats = [(file.name, file.stat()) for file in files]
    return _results(folder, tuple((name, s.st_mtime_ns, s.st_size) for name, s in stats))


@functools.lru_cache(maxsize=32)
def _results(folder: Path, stamp: tuple) -> Results:
    return Results(folder)


def merged(old: Content, new: Content) -> Content:
    """`old`, with the parts that `new` has in place of its own.

    Runs that no cell and no derived number names any more are left out.
    """
    parts, out = {*_parts(new.cells), *_parts(new.derived)}, {}
    for name in ("cells", "derived"):
        mine = getattr(old, name)
        kept = np.array([part not in parts for part in _parts(mine)], dtype=bool)
        out[name] = joined(f"{name}.csv", [mine[kept], getattr(new, name)])
    shown = set(out["cells"].run) | set(out["derived"].run)
    for file in ("runs.csv", "history.csv.gz", "clients.csv.gz"):
        name = file.partition(".")[0]
        mine, more = getattr(old, name), getattr(new, name)
        both = joined(file, [mine[~mine.run.isin(more.run)], more])
        out[name] = both[both.run.isin(shown)]
    pools = joined("pools.csv", [old.pools, new.pools])
    pools = pools.drop_duplicates(["name", "checksum"], keep="last")
    out["pools"] = pools[pools.checksum.isin(out["runs"].pool)]
    out["probes"] = {run: v for run, v in (old.probes | new.probes).items() if run in shown}
    return Content(**out)


def fewer_runs(old: Content, new: Content) -> list[str]:
    """Cells of `old` with fewer runs in `new`, if their part is there: "artefact, row, column"."""
    cell, parts = [*PART, *CELL[:-1]], {*_parts(new.cells), *_parts(new.derived)}
    was, now = (
        pd.concat([c.cells, c.derived]).groupby(cell, dropna=False, sort=False).run.nunique()
        for c in (old, new)
    )
    fewer = was[was > now.reindex(was.index, fill_value=0)].index
    return [", ".join(map(str, names[3:])) for names in fewer if names[:3] in parts]


def joined(file: str, frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Parts of one table as one; a table without lines has the columns of its file."""
    kept = [f for f in frames if len(f)]
    return pd.concat(kept, ignore_index=True) if kept else pd.DataFrame(columns=COLUMNS[file])


def write(folder: Path, content: Content) -> list[Path]:
    """Make a folder hold this and nothing else of this form.

    It is written whole, or, if that fails with OSError, stays as it was. Digests are written last:
    a file that is read in between is refused.

    Returns
    -------
    list of Path
        The files.
    """
    shown = named(content.cells, content.derived)
    home, order = _homes(shown), {run: i for i, run in enumerate(dict.fromkeys(shown.run))}
    runs, history, clients = (
        t.sort_values("run", key=lambda r: r.map(order), kind="stable")
        for t in (content.runs, content.history, content.clients)
    )
    cells, derived = (t.sort_values(PART, kind="stable") for t in (content.cells, content.derived))
    pools = content.pools.sort_values(["name", "checksum"])
    tables = {"runs.csv": runs, "cells.csv": cells, "pools.csv": pools}
    raw = {name: _csv(table, COLUMNS[name]) for name, table in tables.items()}
    # Weights of clients can differ by less than the fourth decimal.
    raw["derived.csv"] = _csv(derived, COLUMNS["derived.csv"], decimals=8)
    for paper in sorted(set(home.values())):
        for kind, table in (("history.csv.gz", history), ("clients.csv.gz", clients)):
            mine = _csv(table[table.run.map(home) == paper], COLUMNS[kind])
            raw[f"{paper}.{kind}"] = gzip.compress(mine, mtime=0)
        probes = {run: content.probes.get(run, {}) for run in order if home[run] == paper}
        arrays = {f"{run}/{key}": v for run, kept in probes.items() for key, v in kept.items()}
        if arrays:
            np.savez_compressed(file := io.BytesIO(), **cast(dict[str, Any], arrays))
            raw[f"{paper}.npz"] = file.getvalue()
    return _put(folder, raw)


def _homes(named: pd.DataFrame) -> dict[str, str]:
    # {run: the first paper that names it}
    return dict(zip(named.run[::-1], named.paper[::-1], strict=True))


def _csv(table: pd.DataFrame, first: list[str], decimals: int = DECIMALS) -> bytes:
    # Columns of metrics that none of these runs has are left out.
    more = [c for c in table if c not in first and table[c].notna().any()]
    table = table[[*first, *more]].round(decimals)
    # Some lines have no such number, which must not make 3.0 of the 3 of others.
    whole = {c: pd.to_numeric(table[c]).astype("Int64") for c in table if c in WHOLE}
    return table.assign(**whole).to_csv(index=False).encode()


def _put(folder: Path, raw: dict[str, bytes]) -> list[Path]:
    checks.make_folder(folder)
    listed = sums.known(folder)
    with ExitStack() as whole:
        for name, content in raw.items():
            file = whole.enter_context(sums.replacing(folder / name))
            file.write(content)
            file.flush()
    for old in listed.keys() - raw.keys():
        if old in COLUMNS or old.endswith((".history.csv.gz", ".clients.csv.gz", ".npz")):
            (folder / old).unlink(missing_ok=True)
    sums.write(folder, raw)
    return [*(folder / name for name in raw), folder / sums.NAME]
