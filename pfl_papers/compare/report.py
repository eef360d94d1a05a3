"""Published numbers beside ours: tables with verdicts, readings, and claims."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pfl_core.analysis import noise, verdicts
from pfl_core.analysis.plots import LABELS, in_words, label, named
from pfl_core.analysis.select import grouped, tuples
from pfl_core.analysis.stats import paired
from pfl_core.analysis.verdicts import Budget, Verdict
from pfl_core.data import partition as partitions
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.metrics import ROW_COLUMNS
from pfl_core.util import checks
from pfl_papers.compare import fullest, readings
from pfl_papers.compare.priors import priors
from pfl_papers.compare.readable import flat, markdown, renamed
from pfl_papers.compare.readings import Read
from pfl_papers.evidence import committed, contrasts, diverged
from pfl_papers.evidence.committed import Part
from pfl_papers.evidence.contrasts import (
    ACCURACIES,
    READ_AFTER,
    Evidence,
    Runs,
    column_of,
    reproduced,
)
from pfl_papers.evidence.tables import Results
from pfl_papers.papers import base as papers
from pfl_papers.papers import overrides
from pfl_papers.papers.base import Paper, Scope

# -- published beside reproduced -------------------------------------------------------------------


# What has to be the paper's for a number of ours to stand beside a published one.
_ALIKE: dict[str, Callable[[Experiment], Any]] = {
    "data": lambda e: e.dataset,
    "network": lambda e: (e.model, e.model_args),
    "partition": lambda e: _dealt(e)._replace(validation=0),
    "clients": lambda e: e.clients,
}


class _Dealt(NamedTuple):
    """How the clients' data are dealt, and the shares that test and validation have of them."""

    partition: str
    arguments: dict[str, Any]  # without those that say the shares
    test: float | None  # None: the data set's own test data
    validation: float


def _dealt(experiment: Experiment) -> _Dealt:
    # Validation data are taken from training data: a partition is the same with and without.
    known = checks.parameters(partitions.function(experiment.partition))
    args = {n: p.default for n, p in known.items() if p.default is not p.empty}
    args |= experiment.partition_args
    train, split = args.pop("train_ratio", None), args.pop("split", None)
    of_train = float(args.pop("val", 0.0))
    if split is not None:
        _, validation, test = partitions.read_shares(split)
    else:
        validation, test = of_train, None if train is None else 1 - train
    test = test if test is None else round(test, 9)
    return _Dealt(experiment.partition, args, test, validation)


@functools.lru_cache(maxsize=64)
def _of_the_paper(key: str, artefact: str) -> dict[tuple[str, str], Experiment]:
    """{(row, column): the Experiment of profile paper} of an artefact."""
    out = {}
    for sweep in papers.paper(key).planned(Scope("paper"), artefact):
        for e in replace(sweep, seeds=sweep.seeds[:1]).experiments():
            out[e.tags["row"], e.tags["column"]] = e
    return out


@functools.lru_cache(maxsize=2**12)
def counterpart(key: str, artefact: str, row: str, column: str) -> Experiment | None:
    """The run of a cell at profile paper; of a row that only we have, another one of the column.

    One run may serve several columns, as pFedHN's of Table 2 does. It stands in a column of its
    own, and is the run of its row's cells in the others.
    """
    found, paper = _of_the_paper(key, artefact), papers.paper(key)
    row, column = READ_AFTER.get(row, row), paper.printed(column)
    if (row, column) in found:
        return found[row, column]
    other = next((e for (_, c), e in found.items() if c == column), None)
    if other is None or not paper.tables:
        return other
    said = papers.reported(paper)
    printed = set(said[said.table == artefact].column)
    if column not in printed:
        return other
    serving = [e for (r, c), e in found.items() if r == row and c not in printed]
    return next((e for e in serving if e.dataset == other.dataset), other)


def _counterparts(key: str, artefact: str, row: str, column: str) -> list[Experiment]:
    # The counterpart of a cell; of a column that only we have, all runs of the artefact.
    one = counterpart(key, artefact, row, column)
    return [one] if one else list(_of_the_paper(key, artefact).values())


def _cuts(paper: Paper, artefact: str, row: str, column: str, runs: Runs) -> tuple[float, bool]:
    """The paper's rounds over our shortest run's of a cell, and whether samples are cut, too."""
    theirs = counterpart(paper.key, artefact, row, column)
    of_cell = runs.get((READ_AFTER.get(row, row), column), [])
    found = {run: committed.experiment(run) for run in of_cell}
    ours = {run: ran for run, ran in found.items() if ran is not None}
    if theirs is None or not ours:
        return 1.0, False
    rounds = theirs.rounds / min(ran.rounds for ran in ours.values())
    return rounds, any(
        _cut(ran, theirs) or committed.share_of(run) < MOST for run, ran in ours.items()
    )


MOST = 0.9  # of a data set's samples; a copy with fewer is a part of it


def _cut(ours: Experiment, theirs: Experiment) -> bool:
    # Whether a client has fewer samples here than the paper gives it.
    return bool(ours.max_samples) and ours.max_samples != theirs.max_samples


def unlike(paper: Paper, artefact: str, row: str, column: str, run: str) -> list[str]:
    """In what a run differs from the cell of the paper that it is named by.

    Of "data", "network", "partition" and "clients"; of a cell that only we have, what no run of
    the artefact at profile paper has.
    """
    ours, theirs = committed.experiment(run), _counterparts(paper.key, artefact, row, column)
    if ours is None or not theirs:
        return []
    return [what for what, of in _ALIKE.items() if of(ours) not in [of(e) for e in theirs]]


def for_whom(paper: Paper, runs: Iterable[str]) -> str:
    """ "; for the authors' clients" of runs that have their draw of clients, else ""."""
    ran = [committed.experiment(run) for run in dict.fromkeys(runs)] if paper.clients else []
    drawn = ["numpy_seed" in e.partition_args for e in ran if e]
    return f"; {'' if all(drawn) else 'in part '}{paper.clients}" if any(drawn) else ""


def scale(paper: str | Paper, rows: pd.DataFrame, artefact: str) -> str:
    """What share of the paper's rounds and images was run, and what else is not the paper's.

    "10 % of the rounds; other data, network"; "" where all is the paper's.
    """
    paper, said, shares = papers.paper(paper), [], set()
    heads = rows[rows["average"] != "derived"].drop_duplicates(["row", "column"])
    for v in tuples(heads):
        said += unlike(paper, artefact, v.row, v.column, v.run)
        theirs = _counterparts(paper.key, artefact, v.row, v.column)
        ours = committed.experiment(v.run)
        if ours is None or not theirs:
            continue
        alike = [e for e in theirs if e.method == ours.method] or theirs
        shares |= {round(100 * ours.rounds / e.rounds) for e in alike}
        if all(_cut(ours, e) for e in theirs):
            said.append(f"at most {ours.max_samples} images a client")
        if (part := committed.share_of(v.run)) < MOST:
            said.append(f"{part:.0%} of the samples of {in_words(ours.dataset)}")
        if all(_dealt(ours).validation > _dealt(e).validation for e in theirs):
            said.append("a part of the training data is validation")
    out = []
    if shares and shares != {100}:
        ends = sorted({min(shares), max(shares)})
        none = artefact in paper.unstated
        whose = (
            "our rounds at profile paper (the article gives none)" if none else "the paper's rounds"
        )
        out.append(f"{' to '.join(map(str, ends))} % of {whose}")
    words = list(dict.fromkeys(said))
    other = [w for w in _ALIKE if w in words]
    out += [f"other {', '.join(other)} than the paper's"] * bool(other)
    return "; ".join(out + [w for w in words if w not in _ALIKE])


def compare(
    rows: pd.DataFrame, paper: str | Paper, table: str, *, metric: str = "acc_pct", **how: str
) -> pd.DataFrame:
    """Every published cell of a table beside what `rows` give: a line a row and column.

    Ours stand beside a published number only if data, network, partition and number of clients are
    the paper's. Else they stand in a column of their own, named by the data that were used, without
    a difference. Where a reader overrode the paper's setting, ours stand alone.

    Parameters
    ----------
    rows : DataFrame
        Of the table's runs, labelled as the published rows and columns are.
    paper : str or Paper
    table : str
        "table1".
    metric : str
        The published number.
    **how
        select, when, average in place of the paper's.

    Returns
    -------
    DataFrame
        Columns row, column, reported, reported_sd, reproduced, sd, n (runs), low and high (95 %
        interval of ours), best (whether ours is the column's best or ties with it), last (ours at
        the last round, where another is reported), difference (ours minus the published one),
        difference_low, difference_high (of the interval that predicts a published number), verdict,
        reason, extent, decided, why (see `analysis.verdicts`), profile, dataset, and setting (the
        column as the rows have it).
    """
    return Held(rows, paper, table, metric, **how).cells


class Held:
    """A table's rows held against the paper, each answer worked out once.

    Parameters
    ----------
    rows, paper, table, metric, **how
        As for `compare`. Later changes of `rows` count for nothing.
    """

    def __init__(
        self,
        rows: pd.DataFrame,
        paper: str | Paper,
        table: str,
        metric: str = "acc_pct",
        **how: str,
    ):
        self.paper, self.table, self.metric, self.how = papers.paper(paper), table, metric, how
        self._rows = _needed(rows, metric).copy()
        self._held = functools.cache(self._under)

    @functools.cached_property
    def cells(self) -> pd.DataFrame:
        """What `compare` returns."""
        return readings.over([(read, self._held(i)[1]) for i, read in enumerate(self._reads)])

    @functools.cached_property
    def leads(self) -> pd.DataFrame:
        """What `advantages` returns, by the rule of `how`."""
        found = [(read, self._leads(i)) for i, read in enumerate(self._reads)]
        return readings.over(found, beside=self.paper.own)

    @property
    def leads_as_run(self) -> pd.DataFrame:
        """`leads` with the verdicts of the runs as they are, whatever other readings say."""
        return self._leads(0)

    @functools.cached_property
    def text(self) -> list[str]:
        """What `reading` returns, by the rule of `how`."""
        if set(map(overrides.profile_of, self._rows.profile.unique())) <= {"smoke"}:
            return []
        return _texts(self._held(0)[0], self.cells)

    @functools.cached_property
    def _reads(self) -> list[Read]:
        return readings.read(self._rows, self.paper)  # as run first

    def _under(self, i: int) -> tuple[Evidence, pd.DataFrame]:
        # The cells under a reading, and what they are made of.
        evidence = _evidence(self._reads[i].rows, self.paper, self.table, **self.how)
        return evidence, _compared(evidence, self.paper, self.table, self.metric)

    def _leads(self, i: int) -> pd.DataFrame:
        return _leads(*self._held(i), self.paper, self.table, self.metric)


def _compared(evidence: Evidence, paper: Paper, table: str, metric: str) -> pd.DataFrame:
    rows, said = evidence.rows, papers.reported(paper)
    said = said[(said.table == table) & (said.metric == metric)]
    if said.empty:
        known = sorted(set(papers.reported(paper).table))
        raise ValueError(f"{paper.key} prints no {metric} in {table!r}; it has {known}")
    said = said[:0] if overrides.in_rows(rows) else said
    ours = rows
    if len(rows):
        ours = _own_columns(evidence.reported("now", metric), paper, table)
    lines = {(c.column, c.row): dict(reported=c.value, reported_sd=c.sd) for c in tuples(said)}
    last = metric == "acc_pct" and (paper.report | evidence.how)["select"] != "last"
    if len(ours):
        cells = _Cells(evidence, ours, paper, table, metric, last)
        for (column, row), of_cell in grouped(ours, ["column", "row"]):
            line = lines.setdefault((column, row), dict(reported=np.nan, reported_sd=np.nan))
            line |= cells.line(row, column, of_cell, line)
    for (column, row), line in _diverged(rows, paper, table).items():
        lines.setdefault((column, row), dict(reported=np.nan, reported_sd=np.nan)).update(line)
    frame = pd.DataFrame(
        [dict(row=r, column=c) | line for (c, r), line in lines.items()], columns=_COMPARED
    )
    frame["verdict"] = frame.verdict.astype(object).fillna("not run")
    frame["n"] = frame.n.fillna(0).astype(int)
    frame[["best", "decided"]] = frame[["best", "decided"]].eq(True)
    texts = ["profile", "dataset", "reason", "extent", "why", "setting"]
    frame[texts] = frame[texts].astype(object).fillna("")
    return _by_column(frame if last else frame.drop(columns="last"))


_COMPARED = (
    "row column reported reported_sd reproduced sd n low high best last difference "
    "difference_low difference_high verdict reason extent decided why profile dataset setting"
).split()


def _diverged(rows: pd.DataFrame, paper: Paper, table: str) -> dict[tuple[str, str], dict]:
    """{(column, row): what its line says in place of a verdict} of cells of which runs diverged."""
    none = dict(reason="", extent="", why="", decided=False, best=False)
    lost = rows[rows.metric == diverged.METRIC].drop_duplicates(["row", "column"])
    out, said = {}, diverged.said(rows)
    for v in tuples(lost):
        column = column_of_ours(paper, table, v.row, v.column, v.run)
        line = none | dict(verdict=said[v.row, v.column], setting=v.column)
        out[column, v.row] = line | dict(profile=v.profile, dataset=v.dataset)
    return out


def advantages(
    rows: pd.DataFrame, paper: str | Paper, table: str, *, metric: str = "acc_pct"
) -> pd.DataFrame:
    """By how many points the paper's own method leads each other row: published beside ours.

    What a draw of clients does to all rows of a column falls out of such a difference, in our
    numbers and, as we assume, in the paper's. So two seeds say more of it than of an accuracy.

    Parameters
    ----------
    rows, paper, table, metric
        As for `compare`; only columns that are like the paper's count.

    Returns
    -------
    DataFrame
        Columns as `compare` has them, a line a column and row that is compared with. budget: what
        both rows had of the paper's (`verdicts.Budget.missing`); nears: whether the lead is not at
        rest and goes towards 0. n counts the seeds that both have.
    """
    return Held(rows, paper, table, metric).leads


def _leads(
    evidence: Evidence, compared: pd.DataFrame, paper: Paper, table: str, metric: str
) -> pd.DataFrame:
    out = []
    there = compared[compared.reported.notna() & compared.reproduced.notna()]
    there = there[~there.verdict.str.startswith(diverged.WORD)]

    @functools.cache  # over a column, not for each of its leads
    def whom(at: str) -> str:
        of_column = [
            run for (_, column), some in evidence.runs.items() if column == at for run in some
        ]
        return for_whom(paper, of_column)

    for _, cells in grouped(there[there.profile.isin(papers.FULL)], "column"):
        own = cells[cells.row == paper.own]
        for _, other in cells.drop(own.index).iterrows() if len(own) else ():
            line = _advantage(evidence, paper, table, own.iloc[0], other, metric)
            out.append(line | dict(why=line["why"] + whom(other.setting)))
    return pd.DataFrame(out, columns=[*(c for c in _COMPARED if c != "last"), "budget", "nears"])


def _advantage(
    evidence: Evidence, paper: Paper, table: str, own: pd.Series, other: pd.Series, metric: str
) -> dict[str, Any]:
    # Of the paper's row over another one, which are lines of `compare`.
    ours = evidence.ahead(own["row"], other["row"], other.setting, metric=metric)
    reported, column = own.reported - other.reported, evidence.column(other.setting, metric)
    predicted = column.difference(own["row"], other["row"], paper.draws)
    verdict = verdicts.of_lead(ours.found, predicted, reported, ours.unlearned)
    if ours.approaches:
        by = f"; it nears 0, by {abs(ours.moved or 0):.1f} in the last quarter of the rounds"
        verdict = verdict._replace(why=verdict.why + by)
    off = predicted.minus(reported)
    line = {name: other[name] for name in ("row", "column", "profile", "dataset", "setting")}
    line |= dict(reported=reported, reported_sd=np.nan, best=False, n=ours.found.seeds)
    line |= dict(reproduced=ours.found.estimate, low=ours.found.low, high=ours.found.high)
    line |= dict(difference=off.estimate, difference_low=off.low, difference_high=off.high)
    cuts = [_cuts(paper, table, r["row"], r.setting, evidence.runs) for r in (own, other)]
    budget = Budget(max(rounds for rounds, _ in cuts), any(fewer for _, fewer in cuts))
    line |= dict(budget=budget.missing, nears=ours.approaches)
    return line | verdict._asdict()


def _evidence(rows: pd.DataFrame, paper: Paper, artefact: str, **how: str) -> Evidence:
    return Evidence(rows, paper, papers.printed_rows(paper, artefact), priors(rows), **how)


def _by_column(frame: pd.DataFrame) -> pd.DataFrame:
    # Columns in the order in which they are met, rows in the order of the paper, ours behind.
    place = {name: i for i, name in enumerate(dict.fromkeys(frame.column))}
    return frame.sort_values("column", key=lambda c: c.map(place), kind="stable", ignore_index=True)


def _own_columns(ours: pd.DataFrame, paper: Paper, table: str) -> pd.DataFrame:
    # Cells that are not like the paper's get a column of their own.
    named = {}
    for v in tuples(ours.drop_duplicates(["row", "column"])):
        ran = committed.experiment(v.run)
        if v.average == "derived" and ran is not None and v.dataset != ran.dataset:
            # It says what data it is of, as Table 3's megabytes of pFedLA do.
            named[v.row, v.column] = v.column
        else:
            named[v.row, v.column] = column_of_ours(paper, table, v.row, v.column, v.run)
    names = [named[key] for key in zip(ours.row, ours.column, strict=True)]
    return ours.assign(setting=ours.column, column=names)


def column_of_ours(paper: Paper, artefact: str, row: str, column: str, run: str) -> str:
    """A column's name if the run is like the paper's there, else with what it has instead."""
    other = unlike(paper, artefact, row, column, run)
    if not other:
        return column
    ran = committed.experiment(run)
    if "data" in other and ran is not None:  # the caption has the rest
        return f"{column}: on {ran.dataset}"
    return f"{column}: with other {', '.join(other)}"


class _Cells:
    """Our side of a table: intervals, the last round, and how far curves still move.

    Parameters
    ----------
    ours : DataFrame
        One number a run, its columns named by `_own_columns`.
    last : bool
        Whether the last round is shown, too.
    """

    def __init__(
        self,
        evidence: Evidence,
        ours: pd.DataFrame,
        paper: Paper,
        table: str,
        metric: str,
        last: bool,
    ):
        self.evidence, self.ours = evidence, ours
        self.paper, self.table, self.metric = paper, table, metric
        # Of accuracy on training data only the test data say whether it still moves.
        now, past = (_by_run(evidence.reported(at)) for at in ("now", "earlier"))
        self.moved = {run: now[run] - past[run] for run in now.keys() & past.keys()}
        how = evidence.how | {"select": "last"}
        self.last = _by_run(reproduced(evidence.rows, paper, metric, **how)) if last else {}
        self._noisy = functools.cache(self._column)
        self._best = functools.cache(self._of_best)

    def _column(self, column: str) -> noise.Column:
        # A column of ours with its noise.
        of_column = self.ours[self.ours.column == column]
        table = of_column.pivot_table(index="row", columns="seed", values="value", sort=False)
        known = self.evidence.priors if self.metric in ACCURACIES else None
        return column_of(table, self.evidence.printed, known)

    def _of_best(self, column: str) -> set[str]:
        sign = better(self.metric)
        return self._noisy(column).best(sign) if sign else set()

    def line(
        self, row: str, column: str, cells: pd.DataFrame, said: dict[str, Any]
    ) -> dict[str, Any]:
        """What a cell of ours shows, beside what is `said` in the paper."""
        noisy = self._noisy(column)
        own, setting = noisy.level(row), cells.setting.iloc[0]
        keys = [(run, row, setting) for run in cells.run]
        last = [v for key in keys if not np.isnan(v := self.last.get(key, np.nan))]
        least, most = bounds(self.metric)
        line = dict(
            reproduced=cells.value.mean(),
            sd=cells.value.std(ddof=1),
            n=len(cells),
            low=max(own.low, least),
            high=min(own.high, most),
            best=row in self._best(column),
            last=np.mean(last) if last else np.nan,
            setting=setting,
            profile=cells.profile.iloc[0],
            dataset=cells.dataset.iloc[0],
        )
        if np.isnan(said["reported"]):
            return line | dict(verdict="no published number")
        paper = self.paper
        predicted = noisy.level(row, paper.draws, said["reported_sd"], paper.runs)
        off = predicted.minus(said["reported"])
        line |= dict(difference=off.estimate, difference_low=off.low, difference_high=off.high)
        if line["profile"] not in papers.FULL or self.metric not in ACCURACIES:
            return line | dict(verdict="not judged")
        moved = [self.moved.get(key, np.nan) for key in keys]
        rest = verdicts.at_rest(None if np.isnan(moved).any() else float(np.mean(moved)))
        budget = Budget(*_cuts(paper, self.table, row, setting, self.evidence.runs), rest)
        verdict = verdicts.of_accuracy(predicted, said["reported"], budget)
        why = verdict.why + for_whom(paper, cells.run)
        return line | verdict._replace(why=why)._asdict()


def _needed(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    # Without metrics and columns that no verdict needs.
    rows = contrasts.narrow(rows)
    if metric in ACCURACIES and len(rows):
        return rows[rows.metric.isin([*ACCURACIES, diverged.METRIC])]
    return rows


# Metrics of which less is better, and those of which nothing is better.
_LESS = ("iterations", "total_s", "s_per_iteration", "mbytes")
_NEUTRAL = ("weight",)


def better(metric: str) -> int:
    """1 if more of a metric is better, -1 if less is, 0 if neither is."""
    return -1 if metric in _LESS else 0 if metric in _NEUTRAL else 1


def bounds(metric: str) -> tuple[float, float]:
    """Between which values a metric can lie."""
    if metric in ACCURACIES:
        return 0.0, 100.0
    return (0.0 if metric in (*_LESS, *_NEUTRAL) else -np.inf), np.inf


def _by_run(picked: pd.DataFrame) -> dict[Any, float]:
    return picked.groupby(["run", "row", "column"]).value.mean().to_dict()


def tables(rows: pd.DataFrame, paper: str | Paper, table: str) -> dict[str, pd.DataFrame]:
    """{metric: `compare`} of its Artefact's metrics that the paper prints; {} if it prints none.

    Parameters
    ----------
    rows : DataFrame
        Of the whole paper.
    paper : str or Paper
    table : str
    """
    return {metric: held.cells for metric, held in every_held(rows, paper, table).items()}


def every_held(rows: pd.DataFrame, paper: str | Paper, table: str) -> dict[str, Held]:
    """{metric: `Held`}, as `tables`."""
    paper = papers.paper(paper)
    if not paper.tables:
        return {}
    of_table, said = rows[rows.artefact == table], papers.reported(paper)
    printed = set(said[said.table == table].metric)
    found = [m for m in paper.artefacts[table].metrics if m in printed]
    return {m: Held(of_table, paper, table, m) for m in found}


def held_of(part: Part, table: str) -> dict[str, Held]:
    """Return `every_held` of published rows, worked out once while these stay as they are."""
    return _held_of(part, table, committed.results(part.folder), committed.results())


@functools.lru_cache(maxsize=256)
def _held_of(part: Part, table: str, *known: Results) -> dict[str, Held]:
    return every_held(part.rows(), part.paper, table)


def claims_of(part: Part) -> pd.DataFrame:
    """Return `claims` on published rows, worked out once while these stay as they are."""
    return _claims_of(part, committed.results(part.folder), committed.results()).copy()


@functools.lru_cache(maxsize=64)
def _claims_of(part: Part, *known: Results) -> pd.DataFrame:
    return claims(part.paper, part.rows())


def seeds_in_words(counts: Iterable[int]) -> str:
    """Return how many seeds some cells have, as "2 seeds" or, where they differ, "2 to 5 seeds"."""
    found = sorted(counts)
    low, high = found[0], found[-1]
    return f"{low} to {high} seeds" if low < high else f"{high} seed{'s' * (high > 1)}"


def on_devices(rows: pd.DataFrame) -> str:
    """Which GPUs computed rows: ", on NVIDIA H200", or ", in part on NVIDIA H200"; else ""."""
    devices = set(rows.device.dropna())
    others, part = sorted(devices - {"cpu"}), "in part " * ("cpu" in devices)
    return f", {part}on {' and '.join(others)}" if others else ""


def data_sets(rows: pd.DataFrame) -> str:
    """The data sets of rows, with what is known of the copy that committed runs used.

    "CIFAR-10 (58,865 of 60,000 samples, ...)" where it is not what its makers published.
    """
    out, heads = [], rows.drop_duplicates("run")  # what is derived may name another data set
    for name, own in grouped(heads.sort_values("dataset", kind="stable"), "dataset"):
        copies = sorted({committed.copy_of(run) for run in own.run.unique()} - {""})
        out.append(in_words(name) + (f" ({'; '.join(copies)})" if copies else ""))
    return ", ".join(out)


def standing(
    rows: pd.DataFrame,
    paper: str | Paper,
    table: str,
    clients: pd.DataFrame,
    column: str = "",
    **how: str,
) -> pd.DataFrame:
    """Ranks in one column, and the paper's own row against each other one, client by client.

    p is of Wilcoxon's signed ranks over clients and seeds: clients of one seed are not independent,
    so it says less than as many seeds would. The paper's ranks are shown where the column is like
    the paper's.

    Parameters
    ----------
    rows, paper, table, **how
        As for `compare`.
    clients : DataFrame
        Test accuracy of every client of every run at the round that is reported, with columns row,
        column, seed, client, acc_pct.
    column : str
        As the rows have it, by default the first.
    """
    paper = papers.paper(paper)
    column = column or clients.column.iloc[0]
    compared = compare(rows[rows.column == column], paper, table, **how)
    cells = compared[compared.reproduced.notna()].set_index("row")
    own = paper.own
    of_column = clients[clients.column == column]
    by = of_column.pivot_table(index=["seed", "client"], columns="row", values="acc_pct")
    many = of_column.groupby("row").client.nunique().to_dict()  # a row of ours may have others
    others = [r for r in cells.index if r != own and many.get(r) == many.get(own, 0)]
    tests = pd.DataFrame(
        {r: paired(*by[[own, r]].dropna().to_numpy().T) for r in others},
        index=["difference", "better", "p"],
        dtype=float,
    ).T
    like = cells.reported.notna()
    out = pd.DataFrame({"rank": cells.reproduced.rank(ascending=False)})
    if like.any():
        out["rank reported"] = cells.reported.rank(ascending=False)
        out["rank among these"] = cells.reproduced.where(like).rank(ascending=False)
    out[f"{label(own)} ahead by"] = tests.difference.round(2)
    out["share of clients ahead"] = tests.better.round(2)
    out["p, clients as if independent"] = tests.p.round(4)
    return out.sort_values("rank").rename(index=named).rename_axis("method")


class Every(NamedTuple):
    """The published numbers of a paper's tables beside the committed ones of ours.

    Of profile paper where it was run, else medium; while a row of a column has one seed there, the
    column's cells of medium come first. Smaller profiles count nowhere.

    Attributes
    ----------
    cells : DataFrame
        Columns as `compare` has them, table, metric (accuracy on test data, or on training data
        where the paper prints that), and comparable: whether profile paper has a run for it.
    leads : DataFrame
        Columns as `advantages` has them, table, metric.
    """

    cells: pd.DataFrame
    leads: pd.DataFrame


def every(name: str) -> Every:
    """Every published accuracy of a paper and every lead of its own method, run or not."""
    about = papers.paper(name)
    if not about.tables:
        empty = pd.DataFrame(columns=["table", "metric", "comparable", *_COMPARED])
        return Every(empty, empty.copy())
    parts = fullest.parts(name)
    said = papers.reported(name)
    said = said[said.metric.isin(ACCURACIES) & said.table.isin(list(about.artefacts))]
    none = pd.DataFrame(columns=ROW_COLUMNS)
    out: list[list[pd.DataFrame]] = [[], []]
    for table, metric in said[["table", "metric"]].drop_duplicates().itertuples(index=False):
        some = [held_of(part, table)[metric] for part in parts]
        each = [Held(none, about, table, metric), *some]
        pairs = [(held.cells, held.leads) for held in each]
        for found, frames in zip(out, zip(*pairs, strict=True), strict=True):
            # Of each published cell from the fullest profile that has one.
            said_of = [cells[cells.reported.notna()] for cells in frames]
            cells = fullest.fullest(said_of, ["row", "column"], _worth_of_cells)
            found.append(cells.assign(table=table, metric=metric))
    cells, leads = (pd.concat(found, ignore_index=True) for found in out)
    planned = {t: _of_the_paper(name, t) for t in cells.table.unique()}
    where = cells[["table", "row", "column"]].to_numpy()
    there = [(READ_AFTER.get(r, r), c) in planned[t] for t, r, c in where]
    return Every(cells.assign(comparable=there), leads)


def _worth_of_cells(cells: pd.DataFrame) -> pd.Series:
    # One seed has no interval; 0: not run.
    least = cells[cells.n > 0].groupby(["profile", "column"]).n.transform("min")
    return least.clip(upper=2).reindex(cells.index, fill_value=0)


def contradictions() -> pd.DataFrame:
    """Pairs of methods whose order two papers print differently: a line a pair.

    A paper says that one of the two is ahead if it is in three quarters of the paper's columns.

    Returns
    -------
    DataFrame
        Columns ahead, behind, and for each paper in how many of how many columns that order holds.
    """
    wins: dict[tuple[str, str], dict[str, tuple[int, int]]] = {}
    for name in papers.PAPERS:
        if not papers.paper(name).tables:
            continue
        said = papers.reported(name)
        said = said[(said.metric == "acc_pct") & said.row.isin(LABELS)]
        table = said.pivot_table(index=["table", "column"], columns="row", values="value")
        for a, b in itertools.combinations(sorted(map(str, table)), 2):
            both = table[[a, b]].dropna()
            if len(both):
                wins.setdefault((a, b), {})[name] = int((both[a] > both[b]).sum()), len(both)
    lines = []
    for (a, b), found in wins.items():
        ahead = [n for n, (k, of) in found.items() if k >= 0.75 * of]
        behind = [n for n, (k, of) in found.items() if of - k >= 0.75 * of]
        if ahead and behind:
            counts = {LABELS[n]: f"{k} of {of}" for n, (k, of) in found.items()}
            lines.append({"ahead": label(a), "behind": label(b)} | counts)
    return pd.DataFrame(lines).fillna("")


# -- readings --------------------------------------------------------------------------------------


def reading(rows: pd.DataFrame, paper: str | Paper, table: str) -> list[str]:
    """What a table says of accuracies, a Markdown paragraph for each column that was run.

    Which method is best and by how much, how that compares with the paper, and what is open.
    """
    return Held(rows, paper, table).text


def _texts(evidence: Evidence, compared: pd.DataFrame) -> list[str]:
    out = []
    for column in evidence.columns:
        names = evidence.methods(column)
        if len(names) < 2:
            continue
        lines = compared[compared.setting == column]
        lines = lines.set_index("row")
        said = [_leader(evidence, column, names)]
        if lines.reported.notna().any():
            said += _beside(lines)
        else:
            other = lines.column.iloc[0].removeprefix(column).removeprefix(": ")
            instead = f"Run {other}" if other else overrides.UNLIKE.capitalize()
            unlike = other or overrides.in_rows(evidence.rows)
            said.append(f"{instead}: not held against the paper's numbers." * bool(unlike))
        out.append(f"**{column}.** " + " ".join(said))
    return out


def _leader(evidence: Evidence, column: str, names: list[str]) -> str:
    mean = evidence.means(column)
    best = str(mean.idxmax())
    leads = {r: evidence.ahead(best, r, column) for r in names if r != best}
    second = str(mean.drop(best).idxmax())
    first, found = f"{_first(best)} has the highest mean ({mean[best]:.1f} %)", leads[second].found
    if not found.known:
        gap = f"{found.estimate:.1f} points above {label(second)}"
        return f"{first}, {gap}; one seed does not say whether that is more than chance."
    gap = f"The next is {label(second)} (difference {verdicts.ends(found, unit='', sign='')})."
    level = [label(r) for r, c in leads.items() if not c.clears]
    if not level:
        return f"{first} and beats all others. {gap}"
    return f"{first}. {gap} {_listed(level)} {'tie' if len(level) > 1 else 'ties'} with it."


def _first(row: str) -> str:
    # A row's name where a sentence begins.
    name = label(row)
    return name if name != row or row in LABELS.values() else name[:1].upper() + name[1:]


def _listed(names: list[str], most: int = 6) -> str:
    shown, rest = names[:most], len(names) - most
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


def _beside(lines: pd.DataFrame) -> list[str]:
    # lines: cells of a column, indexed by row, some with a published number.
    both, said = lines[lines.reported.notna()], []
    if len(both) > 1:
        there, here = str(both.reported.idxmax()), str(both.reproduced.idxmax())
        same = "as here" if there == here else f"of the same rows here {label(here)} is"
        said.append(f"In the paper {label(there)} is best, {both.reported[there]:.1f} %; {same}.")
    if len(both) > 2:
        tau = both.reported.corr(both.reproduced, method="kendall")
        said.append(f"Order of these {len(both)} methods: Kendall's tau {tau:.2f}.")
    if counts := counted(both.verdict):
        said.append(f"Printed accuracies beside what our runs predict: {counts}.")
    worst = both[both.verdict == "outside"]
    if len(worst):
        row = str(worst.difference.abs().idxmax())
        said.append(f"The largest difference is {label(row)}'s: {worst.why[row]}.")
    return said


WORDS = (*dict.fromkeys((*verdicts.ACCURACIES, *verdicts.LEADS)), verdicts.DEPENDS)


def counted(words: pd.Series) -> str:
    """Verdicts, counted: "11 inside, 3 outside, 1 open"."""
    counts = {word: int((words == word).sum()) for word in WORDS}
    return ", ".join(f"{n} {word}" for word, n in counts.items() if n)


# -- claims ----------------------------------------------------------------------------------------


def claims(paper: str | Paper, rows: pd.DataFrame) -> pd.DataFrame:
    """The paper's claims with a verdict, and the numbers that decide it.

    Parameters
    ----------
    paper : str or Paper
    rows : DataFrame
        Of a notebook, with its derived numbers; of an artefact those of the fullest profile count.

    Returns
    -------
    DataFrame
        Columns says, source, artefact, kind, verdict, reason, why, status (what the verdict says of
        the paper, in words), limit (a threshold of ours), scale (the share of the paper that was
        run), profile, brief (the difference that decides).
    """
    paper = papers.paper(paper)
    parts, found = decided(paper, rows)
    scales, out = functools.cache(lambda needed: scale(paper, parts[needed], needed)), []
    for claim, verdict in zip(paper.claims, found, strict=True):
        of = parts[claim.needs]
        profile = next(iter(of.profile), "")
        line = dict(says=claim.says, source=claim.where, artefact=claim.needs, limit=claim.limit)
        judged = verdict.verdict not in _SILENT
        whom = for_whom(paper, of.run.unique()) if judged else ""
        line |= dict(verdict=verdict.verdict, reason=verdict.reason, why=verdict.why + whom)
        line |= dict(kind=claim.kind, profile=profile, scale="", brief=verdict.brief)
        line["status"] = _status(claim, verdict, profile)
        if judged:
            line["scale"] = scales(claim.needs)
        out.append(line)
    return pd.DataFrame(out, columns=_CLAIMED)


def decided(paper: Paper, rows: pd.DataFrame) -> tuple[dict[str, pd.DataFrame], list[Verdict]]:
    """Each artefact's rows of the fullest profile, by its name, and the verdict on every claim."""
    read = {*ACCURACIES, diverged.METRIC, *(m for c in paper.claims if c.ask for m in c.ask.read)}
    rows = contrasts.narrow(rows)
    rows = rows[(rows["average"] == "derived") | rows.metric.isin(read)]
    parts = {
        needed: fullest.of_fullest_profile(rows[rows.artefact == needed])
        for needed in dict.fromkeys(claim.needs for claim in paper.claims)
    }
    under = {
        needed: readings.evidence(_evidence(of, paper, needed), paper)
        for needed, of in parts.items()
    }
    out = []
    for claim in paper.claims:
        profile = next(iter(parts[claim.needs].profile), "")
        found = {says: _judged(claim, of, profile) for says, of in under[claim.needs].items()}
        out.append(verdicts.over_readings(found))
    return parts, out


_CLAIMED = "says source artefact kind verdict reason why status limit scale profile brief".split()
_SILENT = ("not run", "not judged")


def _judged(claim: papers.Claim, evidence: Evidence, profile: str) -> Verdict:
    if not len(evidence.rows):
        return Verdict("not run")
    if overrides.UNLIKE in profile:
        return Verdict("not judged", "", profile)
    if profile not in papers.FULL:
        return Verdict("not judged", "", f"profile {profile} has other data and networks")
    try:
        return verdicts.of_claim(claim.judge(evidence), claim.most)
    except LookupError as missing:
        return Verdict("not run", "", f"{missing.args[0]} was not run")


def _status(claim: papers.Claim, verdict: Verdict, profile: str) -> str:
    """What a verdict says of the paper, in words."""
    if verdict.verdict == "holds":
        return "as the paper says"
    if verdict.verdict == verdicts.DEPENDS:
        return claim.status
    if verdict.verdict != "contradicted":
        return ""
    if claim.status:
        return claim.status
    if claim.limit:
        return "a definition of ours"
    return "a finding about the paper" if profile == "paper" else "at a cut budget"


# -- tables to read --------------------------------------------------------------------------------


def save_table(frame: pd.DataFrame, path: Path) -> None:
    """Write a table as path.csv, with keys, and as path.md, with display names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flat(frame).to_csv(f"{path}.csv")
    Path(f"{path}.md").write_text(markdown(renamed(flat(frame))) + "\n")


def latex(frame: pd.DataFrame) -> str:
    """A frame as a LaTeX table (booktabs); a plain 0..n-1 index is left out."""
    return frame.to_latex(escape=True, index=not isinstance(frame.index, pd.RangeIndex))
