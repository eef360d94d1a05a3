"""Where the explorers' numbers come from.

Three places: what is committed in results/, what notebooks kept in runs/results/, and the run store
of this computer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from pfl_core.analysis import plots
from pfl_core.analysis import stats as analysis
from pfl_core.analysis.select import records
from pfl_core.experiments import listing, settings, store
from pfl_core.experiments.experiment import Experiment
from pfl_core.util import paths
from pfl_papers.bench import comparison
from pfl_papers.evidence import committed
from pfl_papers.evidence.committed import Part
from pfl_papers.evidence.contrasts import READ_AFTER
from pfl_papers.evidence.tables import Results, results
from pfl_papers.explore import words
from pfl_papers.papers import base as papers

TUNED = ("tune", papers.TUNING)  # artefacts of runs that choose parameters
MARK = ", setting "  # in labels, before a digest of what no field tells apart
OWN = "runs of this computer"  # the source that is the run store; the others are published parts

_METRICS = ("acc_pct", "acc_worst10", "acc_min", "acc_max", "acc_p10", "acc_sd")
METRICS = {metric: plots.MEASURE_LABELS[metric] for metric in _METRICS}
# What curves may be drawn against.
AXES = {name: plots.MEASURE_LABELS[name] for name in ("rounds", "client_visits", "megabytes")}
MOMENTS = {
    "own": "as the method's paper does",
    "before": "before local training",
    "after": "after local training",
}

# Fields of an Experiment that make runs comparable: they name a column, all others a row.
_PROBLEM = ("dataset", "partition", "clients", "model", "max_samples", "partition_seed")
_ARGUMENTS = ("partition", "model", "method")  # fields with arguments in a field of their own
_SILENT = ("seed", "tags", *settings.SILENT)  # are in no label


# -- which there are -------------------------------------------------------------------------------


def names(array: str = "") -> list[str]:
    """The sources that there are, those of the fullest profile first, the run store's last.

    Parameters
    ----------
    array : str
        Only those with runs that have kept this array; by default all.
    """
    parts = sorted(committed.parts(own=True).values(), key=_rank)
    found = [part.name for part in parts]
    if _finished():
        found.append(OWN)
    return [name for name in found if len(keeping(rows(name), array))] if array else found


def _rank(part: Part) -> int:
    return -papers.PROFILES.index(part.profile)


def best(of: list[str]) -> str | None:
    """The best evidence among these sources, None if there are none.

    Of the fullest profile with several methods in one table, where medium and paper count alike,
    the part with most of them: few rows of many rounds hide no table of all.
    """
    every = committed.parts(own=True)
    parts = [every[name] for name in of if name in every]
    many = {part.name: _methods(part) for part in parts}
    several = [part for part in parts if many[part.name] > 1]
    full = -papers.PROFILES.index(papers.FULL[0])
    place = {p.name: (max(_rank(p), full), -many[p.name], _rank(p)) for p in parts}
    chosen = min(several or parts, key=lambda p: place[p.name], default=None)
    return chosen.name if chosen else next(iter(of), None)


def _methods(part: Part) -> int:
    """How many methods the fullest table of a part has."""
    cells = results(part.folder).cells
    own = (cells[["paper", "profile", "data"]] == list(part[:3])).all(axis=1)
    cells = cells[own & cells.row.isin(plots.LABELS) & ~cells.artefact.isin(TUNED)]
    return int(cells.groupby(["artefact", "column"]).row.nunique().max()) if len(cells) else 0


def title(source: str) -> str:
    """A source in words: "FedAGHN: quick, digits"."""
    part = committed.parts(own=True).get(source)
    if part is None:
        return source.capitalize()
    data = "the paper's data" if part.data == "paper" else plots.in_words(part.data)
    name = "All methods" if part.paper == "methods" else plots.label(part.paper)
    return f"{name}: {part.profile}, {data}"


# -- rows ------------------------------------------------------------------------------------------


def rows(source: str) -> pd.DataFrame:
    """Rows of a source in the long form: means over clients, of the metrics in `METRICS`.

    The labels in `column` begin with the title of their artefact, because two artefacts may use one
    label for different runs. Runs of this computer are in order, the newest first.

    Raises
    ------
    ValueError
        If there is no such source.
    """
    return _of(source)[0]


def amounts(source: str, column: str) -> pd.DataFrame:
    """What the runs of a column had spent by each round: run, and the keys of `AXES`."""
    totals = _of(source)[1].query("column == @column")
    return analysis.spent(totals, ["run"])[["run", *AXES]]


def _of(source: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    if source == OWN and source in names():
        return _stored_now()
    if source not in (parts := committed.parts(own=True)):
        known = ", ".join(names()) or "none yet"
        raise ValueError(f"no results {source!r}; there are {known}")
    return _published(parts[source], results(parts[source].folder))


@functools.lru_cache(maxsize=32)
def _published(part: Part, of: Results) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A part's rows and totals; what its folder holds at present is for the cache only."""
    rows = part.rows()
    rows = rows[rows.artefact != "tune"]  # of the comparison: nine short runs a row
    rows = rows[~rows.row.str.endswith(comparison.START)]  # no method: what one begins with
    # Before local training FedAvg-FT's model is one of FedAvg's.
    return _split(rows[(rows.when != "before") | ~rows.row.isin(READ_AFTER)])


def _stored_now() -> tuple[pd.DataFrame, pd.DataFrame]:
    stamps = [(p.stat().st_mtime_ns, p.parent) for p in _finished()]
    return _stored(tuple(sorted(stamps, reverse=True)))


def _finished() -> list[Path]:
    """Histories of the runs in the store that can be read."""
    files = [p for p in paths.store_folder().glob("*/history.csv") if "." not in p.parent.name]
    return [p for p in files if _is_whole(p.parent, p.stat().st_mtime_ns)]


@functools.lru_cache(maxsize=4096)
def _is_whole(folder: Path, stamp: int) -> bool:
    """Whether a run can be read; when it was written is for the cache only."""
    return store.load_result(folder, aside=False) is not None


@functools.lru_cache(maxsize=8)
def _stored(stamps: tuple[tuple[int, Path], ...]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows and totals of these run folders, and the times at which they changed."""
    frame = pd.concat([_labelled(folder) for _, folder in stamps], ignore_index=True)
    # Versions of one's code, or own data, are in no field: they are no seeds of one row.
    several = frame.groupby(["column", "row"]).setting.transform("nunique") > 1
    return _split(frame.assign(row=frame.row + (MARK + frame.setting.str[:4]).where(several, "")))


def _split(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Means over clients, and totals, with titles in their columns."""
    titles = {key: f"{papers.title(key)}: " if key else "" for key in frame.artefact.unique()}
    prefix = frame.artefact.map(titles)
    frame = frame.assign(column=prefix + frame.column)
    means = (frame["average"] == "client") & frame.metric.isin(METRICS)
    return frame[means], frame[frame["average"] == "total"]


def keeping(frame: pd.DataFrame, array: str) -> pd.DataFrame:
    """The rows of runs that have kept this array."""
    runs = [run for run in frame.run.unique() if array in _arrays_named(run)]
    return frame[frame.run.isin(runs)]


@functools.lru_cache(maxsize=4096)
def _arrays_named(run: str) -> frozenset[str]:
    return frozenset(committed.arrays_named(run))


# -- moments ---------------------------------------------------------------------------------------


def timed(frame: pd.DataFrame, when: str) -> pd.DataFrame:
    """The rows that were evaluated at a moment, a key of `MOMENTS`.

    "own" is before or after local training, for each row of a table as its paper, or its method's,
    reports it; where it was not evaluated then, at the other one.
    """
    if when != "own":
        return frame[frame.when == when]
    there = frame.groupby("row").when.unique()
    heads = records(frame.drop_duplicates("row"))
    read = {v["row"]: _read(v["paper"], v["row"], v["method"]) for v in heads}
    read = {row: when if when in there[row] else there[row][0] for row, when in read.items()}
    return frame[frame.when == frame.row.map(read)]


def moment(when: str) -> str:
    """When models were evaluated, in words."""
    return MOMENTS.get(when, f"after {when.rpartition(' ')[2]} epochs of fine-tuning")


def _read(paper: str, row: str, method: str) -> str:
    if paper in papers.PAPERS:
        found = papers.paper(paper)
        return found.when.get(row, found.report.get("when", "before"))
    return comparison.when(row if paper else method)


# -- labels ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _labelled(folder: Path) -> pd.DataFrame:
    """Rows of a run in the store, which has no labels of a table: they are made of its fields."""
    result = store.load_result(folder, aside=False)
    assert result is not None  # its folder was listed
    found = result.experiment
    row = _said(found, lambda name: name not in _PROBLEM, "method")
    column = _said(found, _PROBLEM.__contains__, "dataset", "partition", "clients", "model")
    return result.rows.assign(row=row, column=column)


def _said(found: Experiment, wanted: Callable[[str], bool], *always: str) -> str:
    """Fields of an Experiment as text: `always`, then those wanted that are not as by default."""
    plain, defaults = found.plain(), Experiment().plain()
    if source := found.earlier:
        plain["init_from"] = f"{source.method}, {settings.setting(source.plain(), {})[:6]}"
    elif found.weights:
        plain["init_from"] = f"weights, {found.weights.id[:6]}"
    inner = [f"{name}_args" for name in _ARGUMENTS]
    others = [
        f"{name}={value}"
        for name, value in plain.items()
        if wanted(name) and value != defaults[name] and name not in (*always, *inner, *_SILENT)
    ]
    calls = {name: _call(plain, name) for name in _ARGUMENTS}
    calls |= {"dataset": found.dataset, "clients": f"{found.clients} clients"}
    return ", ".join([*(calls[name] for name in always), *others])


def _call(plain: dict[str, Any], field: str) -> str:
    """A field and its arguments as text, such as "dirichlet (alpha=0.1)"."""
    arguments = ", ".join(f"{name}={value}" for name, value in plain[f"{field}_args"].items())
    return plain[field] + (f" ({arguments})" if arguments else "")


def column_names(frame: pd.DataFrame) -> dict[str, str]:
    """{column: its display name}: of a paper its label, of this computer's runs their setting."""
    heads = frame.drop_duplicates("column")
    if heads.artefact.any():
        return {column: plots.in_plain_words(column) for column in heads.column}
    known = {v["column"]: committed.experiment(v["run"]) for v in records(heads)}
    return {column: words.setting(e, _PROBLEM) if e else column for column, e in known.items()}


def short(frame: pd.DataFrame) -> dict[str, str]:
    """{row: its name beside the other rows of `frame`}, for legends and tables.

    It begins with the method's key, by which it has its look. Rows of papers keep their names. Runs
    of this computer are named by their method, and by what is unusual about them here.
    """
    heads = frame.drop_duplicates("row")
    if heads.artefact.any():
        return {row: plots.tailed(row) for row in heads.row}
    found = [e for run in heads.run if (e := committed.experiment(run))]
    several = len({e.lr for e in found}) > 1
    out = {}
    for row, e, more in zip(heads.row, found, listing.differing(found), strict=True):
        said = [f"learning rate {e.lr:g}"] * several
        said += [
            words.field(name, value)
            for name, value in more.items()
            if name not in ("method", "lr", *_SILENT) and value is not None
        ]
        out[row] = ", ".join([e.method, *said]) + "".join(row.partition(MARK)[1:])
    return out


def listed(frame: pd.DataFrame) -> dict[str, str]:
    """{row: its line in a list}: its name, its learning rate, its seeds."""
    out = {}
    for row, name in short(frame).items():
        own = frame[frame.row == row]
        found = committed.experiment(own.run.iloc[0])
        said = [plots.in_plain_words(name)]
        if found and "rate " not in name:
            said.append(f"learning rate {found.lr:g}")
        seeds = sorted(own.seed.unique().tolist())
        said.append(("seed " if len(seeds) == 1 else "seeds ") + ", ".join(map(str, seeds)))
        out[row] = ", ".join(said)
    return out
