"""results/ in and out: what a notebook keeps of its runs, what is published of that, and what is read where no data set lies.

A notebook keeps its rows in runs/results/PAPER.PROFILE-DATA/; `publish` puts them into results/. Both have the form of `tables`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from pfl_core.data import pools
from pfl_core.experiments import build, copies, metrics, tables
from pfl_core.experiments.experiment import TAGS, Experiment
from pfl_core.experiments.store import Result, load_result
from pfl_core.experiments.tables import PART, Arrays, Content, Measured, Results, results
from pfl_core.util import paths, sums


class Part(NamedTuple):
    """What was published together, or is kept to be: the runs of a paper at a profile over some data, and the folder they stand in."""

    paper: str
    profile: str
    data: str
    folder: Path

    @property
    def name(self) -> str:
        """As its folder in runs/results/ is named: "fedper.quick-digits"."""
        return f"{self.paper}.{self.profile}-{self.data}"

    def rows(self) -> pd.DataFrame:
        """Its rows in the one long form. ValueError names a damaged file."""
        return results(self.folder).rows(self.paper, self.profile, self.data).copy(deep=False)


def parts(paper: str = "", *, own: bool = False, folder: Path | None = None) -> dict[str, Part]:
    """{name: part} of what results/ (or another folder) has of a paper, or of all; own: runs/results/, too, which goes before."""
    found = [folder or paths.results_folder(), *(_kept() if own else [])]
    every = [Part(*part, place) for place in found for part in results(place).parts]
    return {p.name: p for p in every if paper in ("", p.paper)}


def _kept() -> list[Path]:
    return sorted(p for p in (paths.runs_root() / "results").glob("*") if p.is_dir())


def named_runs(of: Collection[str] = ()) -> set[str]:
    """Ids of all runs that results/ or runs/results/ show; with `of`, those of these papers. ValueError for a damaged file."""
    shown = [
        tables.named(r.cells, r.derived) for r in map(results, [paths.results_folder(), *_kept()])
    ]
    return {run for s in shown for run in (s[s.paper.isin(list(of))] if of else s).run}


# -- out -----------------------------------------------------------------------------------------------------------------


def save(rows: pd.DataFrame, paper: str, profile: str, data: str) -> Path:
    """Keep rows, and what their runs measured, in runs/results/PAPER.PROFILE-DATA/, in place of what was there; returns the folder.

    rows: of finished runs, of the store or of results/, and what was computed of them. A cell shows all that its run measured, however
    much of it is in `rows`. ValueError for rows of other runs; OSError leaves what was there.
    """
    part = dict(zip(PART, (paper, profile, data), strict=True))
    folder = paths.runs_root() / "results" / f"{paper}.{profile}-{data}"
    tables.write(folder, _content(rows, part))
    return folder


def publish(paper: str) -> list[Path]:
    """Put what is kept of a paper (not of smoke) into results/, in place of what was published of it, and copy its figures.

    Returns the files; ValueError if there are none.
    """
    home, done = paths.results_folder(), []
    for kept in [
        p
        for folder in _kept()
        for p in parts(paper, folder=folder).values()
        if p.profile != "smoke"
    ]:
        done += tables.write(
            home, tables.merged(results(home).content(), results(kept.folder).content())
        )
        figures = Path("figures", paper, f"{kept.profile}-{kept.data}")
        for file in sorted((paths.runs_root() / figures).glob("*")):
            if file.suffix in (".png", ".csv", ".md"):  # not .pdf, which is a new file at every run
                done.append(home.parent / figures / file.name)
                done[-1].parent.mkdir(parents=True, exist_ok=True)
                with sums.replacing(done[-1]) as out:
                    out.write(file.read_bytes())
    if not done:
        raise ValueError(
            f"nothing of {paper!r} to publish in {paths.runs_root()}; run its notebook at profile quick or paper first"
        )
    return list(dict.fromkeys(done))


def _content(rows: pd.DataFrame, part: dict[str, str]) -> Content:
    found = {run: _measured(run) for run in rows.run.unique()}
    history, clients = (
        tables.joined(
            f"{kind}.csv.gz", [getattr(m, kind).assign(run=run) for run, m in found.items()]
        )
        for kind in ("history", "clients")
    )
    runs = tables.joined(
        "runs.csv", [pd.DataFrame([m.line | {"run": run}]) for run, m in found.items()]
    )
    used = {
        (json.loads(m.line["experiment"])["dataset"], m.line["pool"]): None for m in found.values()
    }
    known = [pd.DataFrame([copies.line(*copy)]) for copy in used if copy[1]]
    cells, derived = _labelled(rows.assign(**part), history, runs)
    probes = {run: m.probes for run, m in found.items() if m.probes}
    return Content(
        runs, cells, tables.joined("pools.csv", known), derived, history, clients, probes
    )


def _measured(run: str) -> Measured:
    if found := load_result(paths.store_folder() / run, aside=False):
        return _of_result(found)
    if run not in (known := _holding(run)).home:
        raise ValueError(
            f"run {run} is neither in {paths.store_folder()} nor in results/; compute it again"
        )
    return known.of(run)


def _of_result(r: Result) -> Measured:
    line = {name: r.meta.get(name, "") for name in tables.RECORDED}
    line |= dict(
        pool=_copy(r),
        wall_s=round(r.meta["wall_s"], 2),
        experiment=json.dumps(r.experiment.plain()),
    )
    return Measured(
        line, metrics.wide(r.history), tables.counts(r.arrays), tables.of_probes(r.arrays)
    )


def _copy(r: Result) -> str:
    # The checksum of its data: as recorded, or, of runs of before it was, of the copy over which they have their id.
    if "pool" in r.meta or r.experiment.dataset == "own":
        return r.meta.get("pool", "")
    every = [copies.checksum(r.experiment.dataset), *copies.checksums(r.experiment.dataset)]
    return next((c for c in every if r.experiment.id_for(c) == r.id), "")


def _labelled(
    rows: pd.DataFrame, history: pd.DataFrame, runs: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows as cells, where they say what their run measured, and as derived numbers where they say something else."""
    measured = metrics.long(history).rename(columns={"value": "measured"})
    both = rows.merge(measured, on=["run", *metrics.KEYS, "mean", "metric"], how="left")
    own = both.run.map(
        {
            run: json.loads(text)["dataset"]
            for run, text in zip(runs.run, runs.experiment, strict=True)
        }
    )
    both["dataset"] = both.dataset.where(both.dataset != own, "")
    cell = ["artefact", "row", "column", "run"]
    both["other"] = ~np.isclose(
        both.value.astype(float), both.measured.astype(float), atol=1e-4, rtol=0
    )
    other = (both["mean"] == "derived") | both[both["mean"] != "derived"].groupby(
        cell
    ).other.transform("any")
    cells = both[~other][tables.COLUMNS["cells.csv"]].drop_duplicates(ignore_index=True)
    return cells, both[other][tables.COLUMNS["derived.csv"]].reset_index(drop=True)


# -- reading -------------------------------------------------------------------------------------------------------------


def find(e: Experiment) -> str | None:
    """The id of the committed run of an Experiment, over the data that are here or over another copy of them; None without one."""
    return next((i for i in e.ids if i in results().home), None)


def rows_of(e: Experiment, run: str) -> pd.DataFrame:
    """The rows of a committed run under an Experiment's tags."""
    return results().rows_of(run, {t: e.tags.get(t, "") for t in TAGS})


def experiment(run: str) -> Experiment | None:
    """The Experiment of a committed run; None for one that is not committed."""
    runs = results().runs
    return Experiment.from_plain(json.loads(runs.experiment[run])) if run in runs.index else None


def arrays_of(run: str) -> Arrays:
    """Arrays of a finished run, of the store, else what results/ or runs/results/ have of them; KeyError if none has the run."""
    folder = paths.store_folder() / run
    if folder.is_dir():
        with np.load(folder / "arrays.npz", allow_pickle=False) as z:
            return {k: z[k] for k in z.files}
    return _holding(run).arrays(run)


def _holding(run: str) -> Results:
    every = [results(), *map(results, _kept())]
    return next((r for r in every if run in r.home), every[0])


def arrays_named(run: str) -> set[str]:
    """Names of the arrays that `arrays_of` gives."""
    file = paths.store_folder() / run / "arrays.npz"
    if not file.is_file():
        return set(_holding(run).arrays(run))
    with np.load(file, allow_pickle=False) as z:
        return set(z.files)


def accuracies(run: str, when: str, round: int) -> pd.DataFrame:
    """Test accuracy of every client with test samples at an evaluated round: client, acc_pct, n. KeyError as `arrays_of`."""
    return metrics.accuracies(arrays_of(run), when, round)


def copy_of(run: str) -> str:
    """How the copy of the data that a committed run used differs from the published set: "58,865 of 60,000 samples ..."; else ""."""
    known = results()
    found = known.pools[known.pools.checksum == known.runs.pool.get(run, "-")]
    return found["copy"].iloc[0] if len(found) else ""


def label_counts(e: Experiment) -> np.ndarray:
    """(K, C) training samples of each class that clients have. Where the data are not here, they are dealt from the numbers of labels in
    pools.csv, by the same rule (see `copies.labels_of`); DatasetMissing where these do not have the data set either."""
    try:
        return build.federation(e).counts()
    except pools.DatasetMissing:
        if (pool := copies.labels_of(e.dataset)) is None:
            raise
        return build.federation(e, pool=pool).counts()
