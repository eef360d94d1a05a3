"""What the benchmark would run, and in how many hours, before anything starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd

from pfl_core.experiments.build import client_data
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.run import pick_device
from pfl_core.util import checks, paths, sums
from pfl_core.util.progress import Progress
from pfl_core.util.provenance import processor
from pfl_papers.bench import record, rows
from pfl_papers.bench.protocol import KEEP, Asked, named, searched
from pfl_papers.bench.rows import EQUAL, ORACLE, REFERENCE, Row
from pfl_papers.bench.settings import Setting
from pfl_papers.compare import costs

PLAN = record.PLAN
COUNTS = ["tuning", "reported", "equal", "oracle", "there"]


def plan(asked: Asked, device: str = "auto", train: bool = False) -> pd.DataFrame:
    """Runs and hours of each row in each setting; those of rows that are known whole are there.

    Of a row that is not tuned yet, draw 0 stands for the draw that tuning will choose, and the
    first four for those that run on all tuning seeds. Draws that diverge end sooner. Hours are told
    from two short runs of each method here, at the rounds and gradients that are asked for.

    Returns
    -------
    DataFrame
        By setting and method: runs of tuning, reported ones, those at equal gradients and within
        the true groups, how many of
        these are there, gradients of a client in a run, and hours of those that are not there.
    """
    device, lines = pick_device(device), {}
    with Progress(len(asked.settings) * len(asked.rows), "rows timed", 0) as progress:
        for setting in asked.settings:
            known, seen = record.read(asked.named(setting)), set()
            for row in asked.rows:
                key = asked.named(setting), rows.said(row.name)
                lines[key] = _line(_Runs(asked, setting, row, known, train), seen, device)
                progress.at(len(lines), " ".join(key))
    return (
        pd.DataFrame(lines).T.rename_axis(["setting", "method"]).astype(dict.fromkeys(COUNTS, int))
    )


def totals(lines: pd.DataFrame) -> pd.DataFrame:
    """A line a setting where there are several, and a line of all."""
    summed = [*COUNTS, "hours"]
    if lines.index.get_level_values("setting").nunique() > 1:
        out = pd.DataFrame(lines.groupby("setting", sort=False)[summed].sum())
    else:
        out = lines.droplevel("setting")[[*COUNTS, "gradients", "hours"]]
    out.loc["all"] = out[summed].sum()
    return out.astype({n: int for n in COUNTS}).round({"hours": 2, "gradients": 0})


def keep(lines: pd.DataFrame, device: str = "auto") -> Path:
    """Keep a plan's hours in runs/bench/, so that `publish bench` takes them."""
    cores = os.cpu_count() or 1
    where = f"{cores} cores of {processor()}" if pick_device(device) == "cpu" else device
    hours = lines.groupby("setting", sort=False).hours.sum().round(2).reset_index()
    checks.make_folder(folder := record.kept(""))
    with sums.replacing(folder / PLAN) as file:
        file.write(hours.assign(where=where).to_csv(index=False).encode())
    return folder / PLAN


def published() -> tuple[dict[str, float], str]:
    """Hours of settings by the published plan, and on which computer; ({}, "") without one."""
    file = record.committed("") / PLAN
    if not file.is_file():
        return {}, ""
    found = pd.read_csv(file)
    return dict(zip(found.setting, found.hours, strict=True)), str(found["where"].iloc[0])


class _Runs:
    """The runs of one row in one setting, as far as they are known beforehand."""

    def __init__(self, asked: Asked, setting: Setting, row: Row, known: record.Record, train: bool):
        self.asked, self.setting, self.row = asked, setting, row
        base = asked.base(setting)
        self.cell = cell = row.cell(base)
        data, drawn = client_data(cell), row.draws(setting, base, asked.draws)
        tried = row.tried(base)
        every = [tried.but(**c) for c in drawn]
        why = {i: rows.refused(e, data) for i, e in enumerate(every)}
        refused = {i for i in why if why[i]}
        ids = searched(tried, drawn, why, asked.tuning_seeds)
        self.known = record.Record.empty() if train else known
        self.search = self.known.search(row.name, ids)
        self.draws = [e for i, e in enumerate(every) if i not in refused]
        mine = known.tuning[known.tuning.row == row.name]
        chosen = mine.draw[mine.chosen != ""]
        others = mine[mine.seed.isin(asked.tuning_seeds[1:])].draw
        known_best = [*dict.fromkeys(map(int, [*chosen, *others])), *range(len(every))]
        some = [i for i in dict.fromkeys(known_best) if i < len(every) and i not in refused]
        self.best = every[some[0]].but(eval_every=base.eval_every)
        self.kept = [every[i] for i in some[:KEEP]]
        reference = Row(REFERENCE).cell(base)
        self.shorter = rows.at_equal_gradients(self.best, rows.batches(reference))

    def tuning(self) -> list[Experiment]:
        first, *others = self.asked.tuning_seeds
        return [*rows.over([first], self.draws), *rows.over(others, self.kept)]

    def reported(self) -> list[Experiment]:
        return rows.over(self.asked.seeds, [self.best])

    def equal(self) -> list[Experiment]:
        return rows.over(self.asked.seeds, [self.shorter] if self.shorter else [])

    def oracle(self) -> list[Experiment]:
        groups = self.setting.groups if self.row.name == REFERENCE else 1
        parts = [self.setting.group(g, self.best) for g in range(groups)] if groups > 1 else []
        return rows.over(self.asked.seeds, parts)

    def there(self) -> set[str]:
        """Ids of runs that are not run again, since what they belong to is known whole."""
        chosen, out = self.search.chosen[self.search.chosen != ""], set(self.search.run)
        lines = {"": self.reported(), f", {EQUAL}": self.equal(), f", {ORACLE}": self.oracle()}
        for line, cells in lines.items() if len(chosen) else ():
            if self.known.has(self.row.name + line, chosen.iloc[0], named(cells)):
                out |= {e.id for e in cells}
        return out


def _line(runs: _Runs, seen: set[str], device: str) -> dict[str, Any]:
    # Draws that are runs of another row (FT1's) count once. Which of them run on more seeds is not
    # known: they count for each row.
    cells = {"tuning": runs.tuning(), "reported": runs.reported(), "equal": runs.equal()}
    cells["oracle"] = runs.oracle()
    parts = {name: rows.with_starts(found) for name, found in cells.items()}
    first, there = runs.asked.tuning_seeds[0], runs.there()
    parts["tuning"] = [e for e in parts["tuning"] if e.seed != first or e.id not in seen]
    seen |= {e.id for e in parts["tuning"]}
    every = [e for found in parts.values() for e in found]
    new = [e for found in cells.values() for e in found if e.id not in there]
    needed = {e.id for e in rows.with_starts(new)}
    todo = [e for e in every if e.id in needed and not (paths.store_folder() / e.id).is_dir()]
    return {name: len(found) for name, found in parts.items()} | {
        "there": len(every) - len(todo),
        "gradients": rows.batches(runs.best),
        "hours": _hours(runs, todo, device),
    }


def _hours(runs: _Runs, todo: list[Experiment], device: str) -> float:
    # Draws differ in the gradients that they take, and some runs are others' start or are shorter.
    paces: dict[str, costs.Pace] = {}
    total = 0.0
    for e in todo:
        alike = runs.cell if e.method == runs.cell.method else e
        if e.method not in paces:
            executor = runs.setting.executor(device)
            paces[e.method] = costs.pace(alike, device, executor)
        times = costs.gradients(e) / costs.gradients(alike) * e.clients / alike.clients
        total += paces[e.method].hours(e.rounds * times, device)
    return total
