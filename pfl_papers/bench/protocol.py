"""The benchmark's protocol: equal random search on tuning seeds, then runs on reported seeds.

Setting by setting: all rows are tuned, the gate is computed from the tuning seeds, and then each
row runs on the reported seeds with what its tuning chose. Finished runs are found in the store, so
that the same command goes on after a stop. What is known is kept after each row (record.py). Rows
that are known whole, published ones among them, are not run again.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pfl_core.analysis.select import tuples
from pfl_core.data import pools
from pfl_core.experiments import sweep as sweeps
from pfl_core.experiments import tune as tuning
from pfl_core.experiments.build import build_method, client_data
from pfl_core.experiments.experiment import Experiment, seeded
from pfl_core.experiments.run import check_how, pick_device
from pfl_core.experiments.store import Result, load_result
from pfl_core.util import checks, paths
from pfl_papers.bench import gate as gates
from pfl_papers.bench import record, rows
from pfl_papers.bench.record import DIGITS, Record
from pfl_papers.bench.rows import EQUAL, ORACLE, REFERENCE, Row
from pfl_papers.bench.settings import SETTINGS, Setting

KEEP = 4  # draws that run on all tuning seeds


class Usual(NamedTuple):
    """What is asked if nothing is said: draws of a row's search, seeds, and rows (all, if none)."""

    draws: int
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    methods: tuple[str, ...] = ()


USUAL = Usual(16, tuple(range(10, 20)), (100, 101, 102))
SMALL = Usual(2, (10, 11), (100, 101), ("local", "fedavg", "fedavg_ft", "fedper"))  # on digits


@dataclass(frozen=True)
class Asked:
    """What is asked of the benchmark, checked.

    Attributes
    ----------
    settings : tuple of Setting
    rows : tuple of Row
    draws : int
        Of each row's search; the first is what its paper takes.
    seeds, tuning_seeds : tuple of int
        Reported seeds, and those of tuning, which are others.
    digits : bool
        Whether settings have their form over digits, for a try.
    """

    settings: tuple[Setting, ...]
    rows: tuple[Row, ...]
    draws: int = USUAL.draws
    seeds: tuple[int, ...] = USUAL.seeds
    tuning_seeds: tuple[int, ...] = USUAL.tuning_seeds
    digits: bool = False

    def named(self, setting: Setting) -> str:
        """A setting's name in rows and folders: "mild", "mild-digits"."""
        return setting.key + DIGITS * self.digits

    def base(self, setting: Setting) -> Experiment:
        """What all rows have in common in a setting, on the first tuning seed."""
        tags = {"paper": "bench", "profile": self.named(setting)}
        return setting.base(self.tuning_seeds[0], self.digits).but(tags=tags)


def asked(
    settings: Iterable[str] = (),
    methods: Iterable[str] = (),
    plugins: Iterable[str] = (),
    draws: int | None = None,
    seeds: Iterable[int] = (),
    tuning_seeds: Iterable[int] = (),
    digits: bool = False,
) -> Asked:
    """What a command asks for; empty: all settings and rows, 16 draws, seeds 10 to 19.

    Raises
    ------
    ValueError
        For unknown settings, rows or modules, and for seeds that are both tuned on and reported.
    """
    usual = SMALL if digits else USUAL
    some = list(settings)
    for name in some:
        checks.known("setting", name, SETTINGS)
    draws = usual.draws if draws is None else draws
    checks.count("bench", "draws", draws, "the number of random choices")
    of = Usual(draws, tuple(seeds) or usual.seeds, tuple(tuning_seeds) or usual.tuning_seeds)
    for name, values in {"seeds": of.seeds, "tuning_seeds": of.tuning_seeds}.items():
        if len(set(values)) < len(values):
            raise ValueError(f"bench({name}={values}): allowed are different integers")
    if both := sorted(set(of.seeds) & set(of.tuning_seeds)):
        raise ValueError(
            f"bench: {both} are among seeds and tuning seeds; what tuning has seen cannot be "
            "reported: choose others"
        )
    wanted = tuple(s for s in SETTINGS.values() if s.key in some or not some)
    found = rows.chosen(list(methods) or usual.methods, plugins)
    return Asked(wanted, tuple(found), of.draws, of.seeds, of.tuning_seeds, digits)


def check(asked: Asked, **how: Any) -> None:
    """Raise the error that a run would end with, as far as it can be said before any is trained.

    Each row's method is made on each setting's clients, and all of its draws are drawn.

    Raises
    ------
    DatasetMissing, ValueError
    """
    check_how(**{n: v for n, v in how.items() if n not in ("jobs", "on")})
    for name in dict.fromkeys(asked.base(s).dataset for s in asked.settings):
        pools.load(name)
    for setting in asked.settings:
        base = asked.base(setting)
        for row in asked.rows:
            cell = row.cell(base)
            build_method(cell, client_data(cell))
            row.draws(setting, base, asked.draws)


class Choice(NamedTuple):
    """What tuning chose for a row: the draw, the moment at which it is read, and its run."""

    draw: int
    when: str
    experiment: Experiment


def searched(
    cell: Experiment, changes: list[dict[str, Any]], why: dict[int, str], seeds: Iterable[int]
) -> dict[tuple[int, int], str]:
    """Runs that a search may have, {(draw, seed): id}; "" for draws that are refused (`why`)."""
    return {
        (draw, s): "" if why[draw] else seeded(cell.but(**change), s).id
        for s, (draw, change) in itertools.product(seeds, enumerate(changes))
    }


def named(cells: Iterable[Experiment]) -> dict[int, str]:
    """{seed: ids of its runs}, as a record names them."""
    found: dict[int, list[str]] = {}
    for e in cells:
        found.setdefault(e.seed, []).append(e.id)
    return {seed: " ".join(ids) for seed, ids in found.items()}


class Work:
    """The benchmark's work in one setting.

    Parameters
    ----------
    asked : Asked
    setting : Setting
    train : bool
        Whether rows that are known run again, too; what the store has is still found there.
    **how
        For `sweep`: device, jobs, on.
    """

    def __init__(self, asked: Asked, setting: Setting, train: bool = False, **how: Any):
        executor = setting.executor(pick_device(how.get("device") or "auto"))
        self.asked, self.setting = asked, setting
        self.how: dict[str, Any] = how | {"executor": executor}
        self.name, self.base = asked.named(setting), asked.base(setting)
        self.known = Record.empty() if train else record.read(self.name)
        self.choices: dict[str, Choice] = {}
        self.taken: dict[str, tuple[Row, pd.DataFrame]] = {}  # searches that were known
        self.failed: dict[str, Exception] = {}

    def steps(self) -> Iterator[str]:
        """Do all of it; yields what was done, after each row."""
        for row in self.asked.rows:
            yield from self._attempt(row, self.tune)
        self.prior()
        yield self.gate()
        for step in (self.report, self.report_equal, self.report_oracle):
            for row in self.asked.rows:
                yield from self._attempt(row, step)

    def _attempt(self, row: Row, step: Any) -> Iterator[str]:
        # An error of one row, such as of a method of one's own, does not end the others'.
        try:
            said = step(row)
        except Exception as error:
            self.failed[row.name] = error
            said = f"{type(error).__name__}: {error}"
        if said:
            yield f"{self.name}, {rows.said(row.name)}: {said}"

    # -- tuning ------------------------------------------------------------------------------------

    def tune(self, row: Row) -> str:
        """Choose a row's draw and moment on the tuning seeds."""
        cell, changes = row.tried(self.base), row.draws(self.setting, self.base, self.asked.draws)
        cell, whens = cell.but(tags={"artefact": "tune", "column": row.name}), row.whens(cell)
        data = client_data(cell)
        why = {i: rows.refused(cell.but(**c), data) for i, c in enumerate(changes)}
        known = self.known.search(row.name, searched(cell, changes, why, self.asked.tuning_seeds))
        if len(known):
            for v in tuples(known[known.chosen != ""][:1]):
                self._choose(row, v.draw, v.chosen, cell.but(**changes[v.draw]))
            self.taken[row.name] = row, known
            return self._said(row, known)
        legal = [c for i, c in enumerate(changes) if not why[i]]
        ended = self._tuned(cell, legal, whens)
        if ended is not None:
            best, scores = ended
            at = next(i for i, c in enumerate(changes) if cell.but(**c).plain() == best.plain())
            label = json.dumps(changes[at], sort_keys=True, default=lambda e: e.id)
            self._choose(row, at, str(scores[label].idxmax()), best)
        lines = self._tuning_lines(row, cell, changes, why)
        self._keep_tuning(row, lines)
        return self._said(row, lines)

    def _choose(self, row: Row, draw: int, when: str, best: Experiment) -> None:
        self.choices[row.name] = Choice(draw, when, best.but(eval_every=self.base.eval_every))

    def _keep_tuning(self, row: Row, lines: pd.DataFrame) -> None:
        # Reported runs of another choice are no longer this row's.
        choice = self.choices.get(row.name)

        def with_tuning(found: Record) -> Record:
            mine = found.runs[found.runs.row.map(record.method_of) == row.name]
            same = choice and (mine.draw == choice.draw).all() and (mine.when == choice.when).all()
            if len(mine) and not same:
                others = {record.method_of(name) for name in found.lines()} | {*found.tuning.row}
                found = found.of(others - {row.name})
            return found.updated(replace(Record.empty(), tuning=lines))

        record.keep(self.name, with_tuning)

    def _tuned(
        self, cell: Experiment, changes: list[dict[str, Any]], whens: tuple[str, ...]
    ) -> tuple[Experiment, pd.Series] | None:
        # The best choice and all scores; None if no draw ended with finite numbers.
        how: dict[str, Any] = dict(seeds=self.asked.tuning_seeds, keep=KEEP, when=whens, last=True)
        try:
            best, found = tuning.tune(cell, changes, **how, **self.how)
        except ValueError:
            tried = [self._stored(cell.but(**c)) for c in changes]
            if any(run is None or run.ok for run in tried):
                raise
            return None
        return best, tuning.scores(found, whens, last=True)

    def _tuning_lines(
        self, row: Row, cell: Experiment, changes: list[dict[str, Any]], why: dict[int, str]
    ) -> pd.DataFrame:
        chosen, lines = self.choices.get(row.name), []
        for seed, (draw, change) in itertools.product(self.asked.tuning_seeds, enumerate(changes)):
            when = chosen.when if chosen and chosen.draw == draw else ""
            e = seeded(cell.but(**change), seed)
            if why[draw] and seed == self.asked.tuning_seeds[0]:
                run = f"refused: {why[draw]}"
            else:
                run = self._stored(e)
            if run:
                lines.append(record.tuned(row.name, draw, change, seed, run, when))
        return pd.DataFrame(lines)

    def _said(self, row: Row, lines: pd.DataFrame) -> str:
        first = lines[lines.seed == self.asked.tuning_seeds[0]]
        lost = first.status.str.partition(":")[0].value_counts()
        words = {"failed": "diverged", "refused": "refused"}
        text = "".join(
            f", {lost[w]} of {len(first)} draws {says}" for w, says in words.items() if w in lost
        )
        if row.name not in self.choices:
            return f"no draw ended with finite numbers{text}"
        draw, when, _ = self.choices[row.name]
        mine = lines[lines.draw == draw]
        return (
            f"draw {draw} of {self.asked.draws}, read {when}: validation "
            f"{mine[f'val.{when}'].mean():.2f} %, {mine.change.iloc[0]}{text}"
        )

    # -- reported runs -----------------------------------------------------------------------------

    def report(self, row: Row) -> str:
        """Run a row on the reported seeds."""
        if row.name not in self.choices:
            return ""
        choice = self.choices[row.name]
        return self._reported(row, row.name, choice, choice.experiment)

    def report_equal(self, row: Row) -> str:
        """Run a row that takes far more gradients than FedAvg again, in fewer rounds."""
        choice, reference = self.choices.get(row.name), self.choices.get(REFERENCE)
        if choice is None or reference is None:
            return ""
        allowed = rows.batches(reference.experiment)
        if (shorter := rows.at_equal_gradients(choice.experiment, allowed)) is None:
            return ""
        return self._reported(row, f"{row.name}, {EQUAL}", choice, shorter)

    def _reported(self, row: Row, name: str, choice: Choice, experiment: Experiment) -> str:
        tags = {"artefact": "reported", "row": name, "column": ""}
        cells = rows.over(self.asked.seeds, [experiment.but(tags=tags)])
        if self.known.has(name, choice.when, named(cells)):
            return self._told(name, self.known)
        sweeps.sweep(cells, **self.how)
        about = self._about(row, choice, experiment)
        return self._keep_reported(
            name,
            [
                record.reported(
                    name, e, [self._stored(r) for r in rows.with_starts([e])[::-1]], about
                )
                for e in cells
            ],
        )

    def _about(self, row: Row, choice: Choice, experiment: Experiment) -> dict[str, Any]:
        spent = dict(gradients=rows.batches(experiment), extra=rows.extra(experiment, choice.when))
        return dict(draw=choice.draw, when=choice.when, own=row.own) | spent

    def report_oracle(self, row: Row) -> str:
        """Run the reference within the true groups of clients, which no method is told."""
        choice, groups = self.choices.get(row.name), self.setting.groups
        if choice is None or row.name != REFERENCE or groups < 2:
            return ""
        name = f"{row.name}, {ORACLE}"
        tagged = choice.experiment.but(tags={"artefact": "reported", "row": name, "column": ""})
        parts = [self.setting.group(g, tagged) for g in range(groups)]
        cells = rows.over(self.asked.seeds, parts)
        if self.known.has(name, choice.when, named(cells)):
            return self._told(name, self.known)
        sweeps.sweep(cells, **self.how)
        about = self._about(row, choice, choice.experiment)
        return self._keep_reported(
            name,
            [
                record.grouped(name, s, [self._stored(seeded(e, s)) for e in parts], about)
                for s in self.asked.seeds
            ],
        )

    def _keep_reported(self, name: str, found: list[Record]) -> str:
        new, method = Record.joined(found), record.method_of(name)
        if method in self.taken:  # a method that is kept replaces the published one with all lines
            self._keep_tuning(*self.taken.pop(method))
            record.keep(self.name, lambda kept: kept.updated(self.known.of([method])))
        return self._told(name, record.keep(self.name, lambda known: known.updated(new)))

    def _told(self, name: str, known: Record) -> str:
        means = known.accuracies().loc[name, list(self.asked.seeds)]
        when, ended = known.runs.when[known.runs.row == name].iloc[0], means[np.isfinite(means)]
        ways = {"diverged": np.isneginf(means).sum(), "ended with an error": means.isna().sum()}
        lost = "".join(f", {n} of {len(means)} runs {way}" for way, n in ways.items() if n)
        return f"{rows.said(name)}, read {when}: {ended.mean():.2f} % over {len(ended)} seeds{lost}"

    # -- the setting itself ------------------------------------------------------------------------

    def prior(self) -> None:
        """Keep what the label prior gets right on all seeds."""
        seeds = (*self.asked.tuning_seeds, *self.asked.seeds)
        found = [record.prior(e.seed, *gates.label_prior(e)) for e in rows.over(seeds, [self.base])]
        record.keep(self.name, lambda known: Record.joined([known, *found]))

    def gate(self) -> str:
        """What the declared gate says of the setting, by the tuning seeds of all known rows."""
        return f"{self.name}, gate: {gates.said(gates.gate(record.read(self.name)))}"

    def _stored(self, experiment: Experiment) -> Result | None:
        return load_result(paths.store_folder() / experiment.id, experiment, aside=False)
