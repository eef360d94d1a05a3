"""results/ in and out: what a notebook keeps of its runs, what is published, what can be read.

A notebook keeps its rows in runs/results/PAPER.PROFILE-DATA/ (`save`); `publish` puts them into
results/, which is committed. Both have the form that form.py describes. Reading them needs no data
set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from pfl_core.data import pools
from pfl_core.experiments import build, metrics
from pfl_core.experiments.experiment import TAGS, Experiment
from pfl_core.experiments.store import is_whole, locked, read_about, said_to_be
from pfl_core.util import checks, paths, sums
from pfl_papers import places
from pfl_papers.evidence import copies, kept, tables
from pfl_papers.evidence.form import CELL, PART, WAITING, Arrays
from pfl_papers.evidence.tables import Content, results


class Part(NamedTuple):
    """The runs of a paper at a profile over some data, which are kept and published together.

    Attributes
    ----------
    paper, profile, data : str
        "fedper", "quick", "digits".
    folder : Path
        results/, or their folder in runs/results/.
    """

    paper: str
    profile: str
    data: str
    folder: Path

    @property
    def label(self) -> str:
        """Its profile and data, as its figures' folder is called: "quick-digits"."""
        return places.label(self.profile, self.data)

    @property
    def name(self) -> str:
        """The name of its folder in runs/results/: "fedper.quick-digits"."""
        return f"{self.paper}.{self.label}"

    def rows(self) -> pd.DataFrame:
        """Its rows, one number a row (see `Result.rows`); ValueError names a damaged file."""
        return results(self.folder).rows(self.paper, self.profile, self.data).copy(deep=False)


def parts(paper: str = "", *, own: bool = False, folder: Path | None = None) -> dict[str, Part]:
    """What there is of a paper, or of all: {name: part}.

    Parameters
    ----------
    paper : str
        Name of a paper; "" for all.
    own : bool
        Whether runs/results/ is read, too. A part of one's own takes the place of the committed
        one of the same name.
    folder : Path, optional
        Where to look in place of results/.
    """
    found = [folder or places.results_folder(), *(tables.kept_folders() if own else [])]
    every = [Part(*part, place) for place in found for part in results(place).parts]
    return {p.name: p for p in every if paper in ("", p.paper)}


def named_runs(of: Collection[str] = ()) -> set[str]:
    """Names and keys of all runs that results/ or runs/results/ show; with `of`, of these papers.

    Raises
    ------
    ValueError
        For a damaged file.
    """
    ids = set()
    for found in map(results, [places.results_folder(), *tables.kept_folders()]):
        pairs = tables.shown(found.cells, found.derived)
        mine = set(pairs[pairs.paper.isin(list(of))].run if of else pairs.run)
        ids |= mine | {key for key, run in found.names.items() if run in mine}
    return ids


# -- out ------------------------------------------------------------------------------------------


def save(rows: pd.DataFrame, paper: str, profile: str, data: str) -> Path:
    """Keep rows, and what their runs measured, in runs/results/PAPER.PROFILE-DATA/.

    Parameters
    ----------
    rows : DataFrame
        Rows of finished runs, from the store or from results/, and numbers that were computed from
        them (mean "derived"). All that a run measured is kept, however much of it is in `rows`.
    paper, profile, data : str
        What the folder is named by; it replaces one that is there.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    ValueError
        If a run is neither in the store nor in results/.
    OSError
        If the files cannot be written; what was there stays.
    """
    part = dict(zip(PART, (paper, profile, data), strict=True))
    for name, given in part.items():  # parts of a file's name
        checks.name(f"save({name})", given)
        if {"/", "\\", ":"} & set(given) or given.startswith("."):
            raise ValueError(f"save({name}={given!r}): allowed is a name without / \\ : or first .")
    folder = places.kept_folder() / f"{paper}.{places.label(profile, data)}"
    with _alone(paths.runs_root()):
        tables.write(folder, kept.content(rows, part))
    return folder


def publish(paper: str, replace: bool = False) -> list[Path]:
    """Copy what is kept of a paper, except at profile smoke, into results/ and figures/.

    It takes the place of what was published at the same profile over the same data. Figures are
    those of all published parts that were drawn here.

    Parameters
    ----------
    paper : str
        Name of a paper, or "methods".
    replace : bool
        Whether published cells may go, or lose runs.

    Returns
    -------
    list of Path
        The files that were written.

    Raises
    ------
    ValueError
        If nothing is kept or drawn, or if a cell has fewer runs than the published one, or fewer
        claims are judged than there (unless `replace`); nothing is written then.
    OSError
        If the package is installed without its repository.
    """
    places.checkout("publish")
    # Two at a time would each read what is there, and the later one write over the other's.
    with _alone(places.results_folder().parent / "runs"):
        return _publish(paper, replace)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    checks.make_folder(folder)
    with locked(folder / "results.lock", "results are written"):
        yield


def _publish(paper: str, replace: bool) -> list[Path]:
    home, done = places.results_folder(), []
    found = [parts(paper, folder=folder) for folder in tables.kept_folders()]
    every = [part for own in found for part in own.values()]
    contents = {p.name: results(p.folder).content() for p in every if p.profile != "smoke"}
    for name, content in contents.items():
        fewer = _fewer_runs(results(home).content(), content)
        if fewer and not replace:
            raise ValueError(
                f"{name} in {paths.runs_root()} has fewer runs than results/ of {len(fewer)} "
                f"cells, the first {fewer[0]!r}; keep all of it (`python -m pfl_papers keep "
                f"{paper}` without artefacts, data sets, methods or seeds; numbers that only the "
                "notebook computes: run it), or let them go with `publish --replace`"
            )
    for part in (parts(paper) | {p.name: p for p in every}).values():
        if not replace:
            _check_claims(part, home.parent)
    for content in contents.values():
        done += tables.write(home, tables.with_parts(results(home).content(), content))
    for part in parts(paper).values():
        done += _publish_figures(part, home.parent)
    if not done:
        raise ValueError(
            f"nothing of {paper!r} to publish in {paths.runs_root()}; "
            "run its notebook at profile quick or paper first"
        )
    return list(dict.fromkeys(done))


def wait(rows: pd.DataFrame, paper: str, profile: str, data: str) -> list[str]:
    """Put finished runs into results/, where nothing shows them yet; return the names of new ones.

    Other computers find them there (`find`) and do not compute them again. A finished `Study`
    takes them with the other rows of their seed, and then `publish` shows them.

    Parameters
    ----------
    rows : DataFrame
        Rows of finished runs; what was computed from them is left out.
    paper, profile, data : str
        What they belong to.

    Raises
    ------
    ValueError
        For profile smoke, which is never published.
    OSError
        If the package is installed without its repository.
    """
    places.checkout("wait")
    if profile == "smoke":
        raise ValueError("runs at profile smoke are never published, so none of them waits")
    home = places.results_folder()
    part = dict(zip(PART, (paper, WAITING, places.label(profile, data)), strict=True))
    with _alone(home.parent / "runs"):
        there = results(home)
        measured = rows[(rows["average"] != "derived") & ~rows.run.isin([*there.home])]
        if measured.empty:
            return []
        old, new = there.content(), kept.content(measured, part)
        before = old.cells[(old.cells[PART] == list(part.values())).all(axis=1)]
        new.cells = tables.joined("cells.csv", [before, new.cells])
        tables.write(home, tables.with_parts(old, new))
    return list(measured.run.unique())


def _fewer_runs(old: Content, new: Content) -> list[str]:
    # Cells of `old` with fewer runs in `new`, or numbers computed of fewer, if their part is there:
    # "artefact, row, column" and the number's metric.
    cell = [*PART, *CELL[:-1], "metric"]
    was, now = (
        pd.concat([c.cells.assign(metric=""), c.derived])
        .groupby(cell, dropna=False, sort=False)
        .run.nunique()
        for c in (old, new)
    )
    parts = {names[:3] for names in now.index}
    fewer = was[was > now.reindex(was.index, fill_value=0)].index
    return [", ".join(map(str, filter(None, names[3:]))) for names in fewer if names[:3] in parts]


def _check_claims(part: Part, checkout: Path) -> None:
    # A study of some artefacts judges their claims alone.
    folder = Path(part.paper, part.label, "claims.csv")
    new, old = places.figures_folder() / folder, checkout / "figures" / folder
    if not (new.is_file() and old.is_file()):
        return
    judged = [(pd.read_csv(file).verdict != "not run").sum() for file in (new, old)]
    if judged[0] < judged[1]:
        raise ValueError(
            f"{new} judges {judged[0]} claims, the published one {judged[1]}: call claims() of a "
            "study that has run all artefacts, take the file away, or let them go with "
            "`publish --replace`"
        )


def _publish_figures(part: Part, checkout: Path) -> list[Path]:
    folder, done = Path(part.paper, part.label), []
    for file in sorted((places.figures_folder() / folder).glob("*")):
        if file.suffix in (".png", ".csv", ".md"):  # not .pdf, which is a new file at every run
            target = checkout / "figures" / folder / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            with sums.replacing(target) as out:
                out.write(file.read_bytes())
            done.append(target)
    return done


# -- reading --------------------------------------------------------------------------------------


def find(experiment: Experiment) -> str | None:
    """The name of the committed run of an Experiment, None without one.

    It is found by its key. It may be over another copy of the data than the one that is here.
    """
    names = results().names
    return next((names[i] for i in experiment.ids if i in names), None)


def found(experiment: Experiment) -> pd.DataFrame | None:
    """The rows of the committed run of an Experiment, for `sweep(found=...)`; None without one.

    One that diverged has none.
    """
    run, tags = find(experiment), {tag: experiment.tags.get(tag, "") for tag in TAGS}
    if run is None:
        return None
    rows = results().rows_of(run, tags)
    return rows[:0] if status(run).startswith("failed") else rows


def waits(experiment: Experiment) -> bool:
    """Whether the committed run of an Experiment waits for others: nothing shows it yet."""
    return find(experiment) in results().waiting


def status(run: str) -> str:
    """What became of a committed run: "done", or "failed: " and why."""
    return str(results().runs.status[run])


def experiment(run: str) -> Experiment | None:
    """The Experiment of a run in the store, results/ or runs/results/.

    None if none has it. Its code need not be here (see `Experiment.read`).
    """
    about = read_about(paths.store_folder() / run)
    if about and about["meta"].get("id") == run:
        return said_to_be(about["experiment"])
    return tables.holding(run).experiment(run)


def arrays_of(run: str) -> Arrays:
    """The arrays of a finished run (see `Result.arrays`).

    They come from the store if it holds the run undamaged, else from results/ or runs/results/,
    which have only the numbers client by client and what probes recorded.

    Raises
    ------
    KeyError
        If none has the run.
    """
    file = paths.store_folder() / run / "arrays.npz"
    if is_whole(file):
        with np.load(file, allow_pickle=False) as z:
            return {k: z[k] for k in z.files}
    return tables.holding(run).arrays(run)


def arrays_named(run: str) -> set[str]:
    """Names of the arrays that `arrays_of` gives."""
    file = paths.store_folder() / run / "arrays.npz"
    if not is_whole(file):
        return set(tables.holding(run).arrays(run))
    with np.load(file, allow_pickle=False) as z:
        return set(z.files)


def accuracies(run: str, when: str, round: int) -> pd.DataFrame:
    """Test accuracy of every client with test samples at an evaluated round of a finished run.

    Columns: client, acc_pct (%), n (test samples). KeyError as for `arrays_of`.
    """
    return metrics.accuracies(arrays_of(run), when, round)


def copy_of(run: str) -> str:
    """How the data of a committed run differ from the published set; "" if they do not.

    Such as "58,865 of 60,000 samples, ...".
    """
    found = results().pool_of(run)
    return found["copy"].iloc[0] if len(found) else ""


def share_of(run: str) -> float:
    """The share of a data set's published samples in the copy of a committed run.

    1 where either number is not known.
    """
    found = results().pool_of(run)
    published = sum(copies.official(found["name"].iloc[0])) if len(found) else 0
    return float(found.samples.iloc[0]) / published if published else 1.0


def lacks(dataset: str) -> float:
    """The share of a data set's published samples that a copy of committed runs lacks, at most.

    0 where the numbers are not known.
    """
    pools, published = results().pools, sum(copies.official(dataset))
    held = pools.samples[pools.name == dataset]
    return 1 - float(held.min()) / published if published and len(held) else 0.0


def label_counts(experiment: Experiment) -> np.ndarray:
    """How many training samples of each class clients have: (K, C).

    Where the data are not here, the labels that pools.csv counts are split by the same rule (see
    `copies.labels_of`).

    Raises
    ------
    DatasetMissing
        If pools.csv has not got the data set either.
    """
    try:
        return build.federation(experiment).counts()
    except pools.DatasetMissing:
        if (pool := copies.labels_of(experiment.dataset)) is None:
            raise
        return build.federation(experiment, pool=pool).counts()
