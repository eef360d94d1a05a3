"""Rows of finished runs, and all that these runs measured, as what a folder is to hold."""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd

from pfl_core.data import pools
from pfl_core.experiments import older
from pfl_core.experiments.metrics import KEYS
from pfl_core.experiments.store import Result, load_result, said_to_be
from pfl_core.util import paths
from pfl_papers.evidence import copies, form, tables
from pfl_papers.evidence.form import CELL, FACTS, RUNS, TABLES
from pfl_papers.evidence.tables import Content, Measured, results


def content(rows: pd.DataFrame, part: dict[str, str]) -> Content:
    """Everything that the folder of a part is to hold.

    Parameters
    ----------
    rows : DataFrame
        Rows of finished runs, and numbers that were computed from them.
    part : dict of str
        Its paper, profile and data.

    Raises
    ------
    ValueError
        If a run is neither in the store nor in results/.
    """
    rows, found = _once(rows, {run: _measured(run) for run in rows.run.unique()})
    runs = tables.joined(RUNS, [pd.DataFrame([m.line | {"run": r}]) for r, m in found.items()])
    history = tables.joined("history.csv.gz", [m.history.assign(run=r) for r, m in found.items()])
    clients = tables.joined("clients.csv.gz", [m.clients.assign(run=r) for r, m in found.items()])
    used = runs[["dataset", "pool"]][runs.pool != ""].drop_duplicates()
    known = [pd.DataFrame([copies.line(*copy)]) for copy in used.to_numpy()]
    cells, derived = _cells_and_derived(rows.assign(**part), history, runs)
    return Content(
        runs=runs,
        cells=cells,
        pools=tables.joined("pools.csv", known),
        derived=derived,
        history=history,
        clients=clients,
        probes={run: m.probes for run, m in found.items() if m.probes},
    )


def _once(
    rows: pd.DataFrame, found: dict[str, Measured]
) -> tuple[pd.DataFrame, dict[str, Measured]]:
    # One run of each key, under the name that results/ has it by, if it has.
    known, first = results().names, {}
    for run, m in found.items():
        first.setdefault(known.get(m.line["key"], run), (run, m))
    names = {run: name for name, (run, _) in first.items()}
    mine = rows[rows.run.isin(list(names))]
    named = mine.run.map(names).astype(object)  # of no rows, too
    return mine.assign(run=named), {name: m for name, (_, m) in first.items()}


def _measured(run: str) -> Measured:
    if found := load_result(paths.store_folder() / run, aside=False):
        return _of_result(found)
    if run not in (known := tables.holding(run)).home:
        raise ValueError(
            f"run {run} is neither in {paths.store_folder()} nor in results/; compute it again"
        )
    m = known.of(run)
    if not m.line["key"]:  # kept by version 0.2
        m.line["key"] = older.key(said_to_be(known.plain[run]), m.line | {"id": run})
    return m


def _of_result(r: Result) -> Measured:
    line = form.fields(r.experiment.plain()) | {name: r.meta.get(name, "") for name in FACTS}
    line |= dict(key=r.key, pool=_checksum(r), wall_s=round(r.meta["wall_s"], 2))
    line |= dict(n_clients=r.meta["clients"])
    probes = {k: v for k, v in r.arrays.items() if k.startswith("probe/")}
    return Measured(line, form.lines(r.history), form.counts(r.arrays), probes)


def _checksum(r: Result) -> str:
    # The checksum of a run's data. Older runs did not record it: theirs is that of the copy with
    # which their Experiment has their id.
    name = r.experiment.dataset
    if "pool" in r.meta or name == "own":
        return r.meta.get("pool", "")
    every = [pools.checksum(name), *pools.copies(name)]
    ids = (r.experiment.id_for, functools.partial(older.legacy, r.experiment.plain()))
    return next((c for c in every if r.id in [of(c) for of in ids]), "")


def _cells_and_derived(
    rows: pd.DataFrame, history: pd.DataFrame, runs: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows that repeat what their run measured, as cells; the others as derived numbers.

    A cell (artefact, row, column, run) one of whose numbers differs from its run's is derived as a
    whole.
    """
    measured = form.numbers(history).rename(columns={"value": "measured"})
    both = rows.merge(measured, on=["run", *KEYS, "average", "metric"], how="left")
    dataset_of_run = both.run.map(dict(zip(runs.run, runs.dataset, strict=True)))
    both["dataset"] = both.dataset.where(both.dataset != dataset_of_run, "")
    value, measured = both.value.astype(float), both.measured.astype(float)
    both["differs"] = ~np.isclose(value, measured, atol=1e-4, rtol=0)
    computed = both["average"] == "derived"
    cell = both[~computed].groupby(CELL)
    derived = computed | cell.differs.transform("any")
    cells = both[~derived][[*TABLES["cells.csv"].columns]].drop_duplicates(ignore_index=True)
    return cells, both[derived][[*TABLES["derived.csv"].columns]].reset_index(drop=True)
