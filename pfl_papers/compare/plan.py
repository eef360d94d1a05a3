"""What a paper's runs cost (those that are there, hours, memory), and their computation."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from pfl_core.analysis.plots import label
from pfl_core.data import pools as data
from pfl_core.experiments import lookup
from pfl_core.experiments import run as runs
from pfl_core.experiments import sweep as sweeps
from pfl_core.experiments.experiment import Experiment
from pfl_core.util import checks
from pfl_papers.compare import costs, parameters
from pfl_papers.evidence import committed
from pfl_papers.papers import base as papers
from pfl_papers.papers.base import Paper

START = "'s start"  # of rows for what others begin with: LG-FedAvg's FedAvg
# Of all clients' models at once: their state, where a round starts, its gradient, its end.
COPIES = 4


def planned(paper: str | Paper, train: bool = False, **how: Any) -> list[Experiment]:
    """The runs that a notebook asks for, each once an artefact, after what it starts from.

    What tuning chose is known where all of its runs are finished.

    Parameters
    ----------
    paper : str or Paper
    train : bool
        Finished means in the store, not only committed.
    **how
        The notebook's parameters, as for `parameters.check`.
    """
    paper = papers.paper(paper)
    scope = parameters.asked(paper, train=train, **how)
    cells = (cell for sweep in paper.planned(scope) for cell in sweep.experiments())
    once: dict[str, Experiment] = {}
    for e in (e for cell in cells for e in with_sources(cell)):
        once.setdefault(json.dumps([e.plain(), e.tags.get("artefact")]), e)
    return list(once.values())


def with_sources(experiment: Experiment) -> list[Experiment]:
    """A run after those that it starts from, which keep their models and are rows of their own."""
    if experiment.earlier is None:
        return [experiment]
    tags = experiment.tags | {"row": f"{experiment.tags.get('row')}{START}"}
    return [*with_sources(experiment.earlier.but(keep_models=True, tags=tags)), experiment]


def plan(paper: str | Paper, device: str = "auto", train: bool = False, **how: Any) -> pd.DataFrame:
    """What runs cost, a line an artefact and one for all.

    Columns runs, cached (how many are there already), and of the rest client-steps (local SGD steps
    summed over clients), hours (on this computer's cores; on a GPU at most so many), GB (memory of
    the largest). NaN where data are missing, of which `attrs["missing"]` says {data set: where it
    was looked for, how to get it}.
    """
    device, lines, missing = runs.pick_device(device), [], {}
    for experiment in planned(paper, train, **how):
        try:
            cached = parameters.is_there(experiment, train)
            cost = (0, 0.0, 0.0) if cached else _cost(experiment, device)
        except data.DatasetMissing as error:
            missing[experiment.dataset] = str(error)
            cached, cost = False, (float("nan"),) * 3
        lines.append((experiment.tags["artefact"], json.dumps(experiment.plain()), cached, *cost))
    columns = ["artefact", "run", "cached", "client-steps", "hours", "GB"]
    frame = pd.DataFrame(lines, columns=columns)
    whole = frame.drop_duplicates("run").assign(artefact="all, each run once")
    by = pd.concat([frame, whole]).groupby("artefact", sort=False)
    total = by[["cached", "client-steps", "hours"]].agg(lambda v: v.sum(skipna=False))
    out = total.astype({"cached": int}).assign(GB=by.GB.max()).round({"hours": 2, "GB": 2})
    out.insert(0, "runs", by.size())
    out.attrs["missing"] = missing
    return out


def lacking(cells: Iterable[Experiment], train: bool) -> list[Experiment]:
    """The runs that training these Experiments takes, each once, with what they start from.

    Parameters
    ----------
    cells : iterable of Experiment
    train : bool
        Also those that are only committed.
    """
    once: dict[str, Experiment] = {}
    for cell in (c for c in cells if not _is_there(c, train)):
        for e in (e for e in with_sources(cell) if not _is_there(e, train)):
            once.setdefault(json.dumps(e.plain()), e)
    return list(once.values())


def _is_there(experiment: Experiment, train: bool) -> bool:
    try:
        return parameters.is_there(experiment, train)
    except data.DatasetMissing:
        return False


def expected_time(experiments: Sequence[Experiment], device: str) -> str:
    """Return how long runs of papers take on this computer: "about 3 min"; ValueError as `plan`."""
    try:
        hours = sum(_cost(e, device)[1] for e in experiments)
    except data.DatasetMissing:
        return "in a time that cannot be told without their data"
    if hours < 1 / 60:
        return "in less than a minute"
    return f"about {hours * 60:.0f} min" if hours < 1 else f"about {hours:.1f} h"


def _cost(experiment: Experiment, device: str) -> tuple[int, float, float]:
    # Client-steps, hours, GB.
    _, parameters = costs.measured(*costs.net(experiment), device)
    size = COPIES * 4 * parameters * experiment.clients + data.load(experiment.dataset).x.nbytes
    try:
        return costs.client_steps(experiment), costs.run_hours(experiment, device), size / 1e9
    except ValueError as error:  # such as more clients than these data can be dealt to
        tags = experiment.tags
        cell = f"{papers.title(tags['artefact'])}, {tags['column']}, {label(tags['row'])}"
        leave = "leave it out by datasets, artefacts or methods"
        raise ValueError(f"{cell}: {error}; {leave}") from None


def _without_idle_starts(cells: list[Experiment], train: bool) -> list[Experiment]:
    # What others start from is trained for those that are not there: committed rows hold no models.
    def is_start(e: Experiment) -> bool:
        return str(e.tags.get("row")).endswith(START)

    asked = [cell for cell in cells if not is_start(cell)]
    needed = {json.dumps(e.plain()) for e in lacking(asked, train)}
    return [e for e in cells if not is_start(e) or json.dumps(e.plain()) in needed]


def compute(
    paper: str | Paper,
    *,
    profile: str = "quick",
    device: str = "auto",
    jobs: int | None = None,
    train: bool = False,
    **how: Any,
) -> pd.DataFrame:
    """Train what a notebook asks for into the store; a line a run.

    What chooses parameters of others comes first. Then in the paper's order of artefacts; of each,
    all rows of the first seed before those of the next, and what others start from before them.
    Finished runs are found and interrupted ones go on, so that the same call resumes.

    Parameters
    ----------
    paper : str or Paper
    profile : str
    device : str
        As for `run`.
    jobs : int, optional
        Runs at a time, as for `sweep`.
    train : bool
        Also what is committed; by default that counts as computed.
    **how
        The notebook's other parameters, as for `parameters.check`.

    Returns
    -------
    DataFrame
        Columns artefact, column, row, seed, run (its id; None without one) and status: "done",
        "failed: " and why, or "error" where it raised one.

    Raises
    ------
    DatasetMissing, ValueError
        Before anything is trained.
    Exception
        The first run's error, where all runs raise one.
    """
    checks.count("compute", "jobs", jobs, "the number of runs computed at a time")
    asked = functools.partial(planned, paper, train, profile=profile, **how)
    common: dict[str, Any] = dict(found=parameters.looked_up(train), device=device, jobs=jobs)
    cells = asked()
    if tuning := [e for e in cells if e.tags["artefact"] == papers.TUNING]:
        sweeps.sweep(tuning, **common)
        cells = asked()  # with what they choose
    cells = _without_idle_starts(cells, train)
    order = list(dict.fromkeys(e.tags["artefact"] for e in cells))
    cells.sort(key=lambda e: (order.index(e.tags["artefact"]), e.seed, len(with_sources(e))))
    # At medium and paper the end is kept, so that a column whose contrasts still move can go on.
    sweeps.sweep(cells, keep_state=profile in papers.FULL, **common)
    lines = []
    for e in cells:
        found = lookup.stored(e)
        run = found.id if found else committed.find(e)
        # A run that raised an error is nowhere.
        status = found.meta["status"] if found else committed.status(run) if run else "error"
        where = {name: e.tags.get(name, "") for name in ("artefact", "column", "row")}
        lines.append(where | dict(seed=e.seed, run=run, status=status))
    return pd.DataFrame(lines, columns=["artefact", "column", "row", "seed", "run", "status"])
