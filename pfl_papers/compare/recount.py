"""Which conclusions survive another way to count? The same runs, read under other rules.

A rule changes one choice in how a paper reports its runs: the round, before or after local
training, the mean over clients or over samples; or, where such runs exist, what becomes of
BatchNorm's statistics. Nothing is trained here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from pfl_core.analysis import noise
from pfl_core.analysis.noise import Interval
from pfl_core.analysis.plots import LABELS, label
from pfl_core.analysis.select import grouped
from pfl_core.analysis.verdicts import Verdict
from pfl_core.experiments.metrics import ROW_COLUMNS, validated
from pfl_core.util.percent import compared
from pfl_papers import places
from pfl_papers.compare import fullest, readings, report
from pfl_papers.evidence import committed, contrasts
from pfl_papers.evidence.committed import Part
from pfl_papers.evidence.contrasts import READ_AFTER, Evidence, column_of, reproduced
from pfl_papers.papers import base as papers
from pfl_papers.papers import presets
from pfl_papers.papers.base import FULL, PROFILES, Paper, Scope

REPORTED = "as the paper"  # counts
AVERAGED = "averaged"  # BatchNorm's statistics, where a row " (BatchNorm averaged)" was run, too
ROW_AVERAGED = " (BatchNorm averaged)"
SETTINGS = {  # how rows of ours are named that differ from a printed row in one setting
    ROW_AVERAGED: "BatchNorm averaged, not local",
    " (one step)": "adapted for one step, not an epoch",
    " (w scored)": "w tested, not the personal model",
}
RULES: dict[str, dict[str, str]] = {  # what each changes: keywords of `select.pick`
    "last": {"select": "last"},
    "last10": {"select": "last10"},
    "best_val": {"select": "best_val"},
    "best_test": {"select": "best_test"},
    "before": {"when": "before"},
    "after": {"when": "after"},
    "client": {"average": "client"},
    "pooled": {"average": "pooled"},
    AVERAGED: {},
}
TEN = 10  # evaluations that "last10" averages
FEWEST = 3  # methods that have an order worth a rank
COLUMN = ["paper", "artefact", "column"]  # what tells columns of all papers apart


@dataclass(frozen=True)
class Runs:
    """The runs of an artefact at the best profile that has some; rows in the long form."""

    paper: Paper
    artefact: str
    rows: pd.DataFrame

    @property
    def profile(self) -> str:
        """Of all its runs."""
        return self.rows.profile.iloc[0]

    @property
    def name(self) -> str:
        """ "FedAGHN, Table 1"."""
        return f"{label(self.paper.key)}, {papers.title(self.artefact)}"

    @functools.cached_property
    def measured(self) -> pd.DataFrame:
        """The rows with clients' mean accuracies."""
        return _measured(self.rows)

    @functools.cached_property
    def heads(self) -> list[tuple[str, str, str]]:
        """Column, row and run of each one that has such accuracies."""
        known = self.measured[["column", "row", "run"]].drop_duplicates()
        return [(str(c), str(row), str(run)) for c, row, run in known.to_numpy()]

    @functools.cached_property
    def evaluations(self) -> dict[tuple[str, ...], int]:
        """How often accuracies were measured, by average, column, row, run, when and split."""
        keys = ["average", "column", "row", "run", "when", "split"]
        of_each = self.rows[self.rows.metric == "acc_pct"].groupby(keys, sort=False)
        counted = of_each.rounds.nunique().reset_index().to_numpy()
        return {tuple(map(str, key)): int(n) for *key, n in counted}


# -- the best there is -----------------------------------------------------------------------------


def best_runs(
    profile: str = "quick",
    *,
    datasets: Sequence[str] = (),
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    artefacts: Sequence[str] = (),
) -> list[Runs]:
    """The best runs of every artefact: of profile paper where there are enough, else medium, quick.

    Parameters
    ----------
    profile : str
        The smallest that counts.
    datasets, methods, seeds, artefacts
        What to restrict it to, empty for the profile's own.
    """
    parts, out = committed.parts(own=True), []
    some: dict[str, tuple] = dict(datasets=tuple(datasets), methods=tuple(methods))
    some["seeds"] = tuple(seeds)
    for paper in map(papers.paper, papers.PAPERS):
        for artefact in paper.artefacts:
            if artefacts and artefact not in artefacts:
                continue
            fuller = fullest.best(paper, _scope("quick", some), artefact)
            rows = fuller[1] if fuller else _smaller(paper, artefact, profile, parts, some)
            if len(rows) and _rank(rows.profile.iloc[0]) >= _rank(profile):
                out.append(Runs(paper, artefact, rows))
    return out


def _scope(profile: str, some: dict[str, tuple]) -> Scope:
    return Scope(profile, some["datasets"], methods=some["methods"], seeds=some["seeds"])


def _rank(profile: str) -> int:
    return PROFILES.index(profile)


def _smaller(
    paper: Paper, artefact: str, profile: str, parts: dict[str, Part], some: dict[str, tuple]
) -> pd.DataFrame:
    # Of the largest profile that is kept over the data asked for, from `profile` on.
    rows = pd.DataFrame(columns=ROW_COLUMNS)
    for level in reversed(PROFILES[_rank(profile) :]):
        part = parts.get(f"{paper.key}.{places.label(level, _scope(level, some).label)}")
        if part is None or (level in FULL and not some["datasets"]):
            continue
        rows = part.rows()
        for name, wanted in (
            ("artefact", [artefact]),
            ("row", some["methods"]),
            ("seed", some["seeds"]),
        ):
            rows = rows[rows[name].isin(list(wanted))] if wanted else rows
        if len(rows):
            break
    return rows


def _measured(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[(rows["average"] == "client") & (rows.metric == "acc_pct")]


# -- counting again --------------------------------------------------------------------------------


def under(rule: str, paper: Paper) -> Paper:
    """The paper as if it counted by a rule.

    Models that are not meant to be served after local training stay as the paper reads them.
    """
    how = RULES.get(rule, {})
    if "when" not in how:
        return replace(paper, report=paper.report | how)
    usual = {r: paper.when.get(r, paper.report["when"]) for r in presets.UNSERVED_AFTER}
    return replace(paper, report=paper.report | how, when=usual if rule == "after" else {})


def without(rule: str, runs: Runs) -> dict[str, str]:
    """{column: why its runs cannot be counted by a rule}; no entry where they can."""
    paper, why = under(rule, runs.paper), {}
    if rule == AVERAGED:
        there = set(runs.rows.column[runs.rows.row.str.endswith(ROW_AVERAGED)])
        return dict.fromkeys(set(runs.rows.column) - there, "no such runs")
    for column, row, run in runs.heads:
        when = paper.when.get(row, paper.report["when"])
        tested, validated = (
            runs.evaluations.get((paper.report["average"], column, row, run, when, split), 0)
            for split in ("test", "val")
        )
        if not tested and "average" in RULES.get(rule, {}):
            why.setdefault(column, f"no {rule} mean")
        elif not tested:
            why.setdefault(column, f"no evaluation {when} local training")
        elif rule == "best_val" and not validated:
            why.setdefault(column, "no validation data")
        elif rule == "last10" and tested <= TEN:
            why.setdefault(column, f"at most {TEN} evaluations")
    return why


def recounted(runs: Runs) -> pd.DataFrame:
    """One number a run of a method (%), as the paper counts and under every rule of its column.

    A rule that a run of the column lacks is not there.

    Columns: paper, artefact, column, rule, same (whether that is how the paper counts), row, run,
    seed, value, profile, dataset.
    """
    few = (runs.rows.metric == "acc_pct") & runs.rows["average"].isin(["client", "pooled"])
    few &= runs.rows.row.str.removesuffix(ROW_AVERAGED).isin(LABELS)
    rows = contrasts.narrow(runs.rows)[few]  # a tenth of them: each rule reads them anew
    usual = reproduced(rows, runs.paper).assign(rule=REPORTED, same=True)
    out = [usual]
    for rule in RULES:
        missing = without(rule, runs)
        there = usual[~usual.column.isin(list(missing))]
        same = {c for c, of in there.groupby("column") if _same(rule, runs.paper, of.row)}
        out.append(there[there.column.isin(same)].assign(rule=rule))
        left = there[~there.column.isin(same)]
        if left.empty:
            continue
        if rule == AVERAGED:
            found = _swapped(left)
        else:
            some = rows[rows.column.isin(left.column)]
            found = reproduced(some, under(rule, runs.paper))
        out.append(found.assign(rule=rule, same=False))
    whole = pd.concat(out, ignore_index=True)
    return whole.assign(rate=whole.column.map(runs.paper.rates))[_RECOUNTED]


_RECOUNTED = [*COLUMN, *"rule same row run seed value profile dataset rate".split()]


def _same(rule: str, paper: Paper, rows: Iterable[str]) -> bool:
    # Whether the paper counts so; rows that are another's, read after training, are so by name.
    how, own = RULES[rule], {r for r in rows if r not in READ_AFTER}
    if "when" in how:
        theirs, ours = (
            {r: p.when.get(r, p.report["when"]) for r in own} for p in (paper, under(rule, paper))
        )
        return theirs == ours
    return bool(how) and all(paper.report[name] == value for name, value in how.items())


def _swapped(rows: pd.DataFrame) -> pd.DataFrame:
    # Rows with averaged statistics take the place, and the name, of those without, by column.
    averaged = [row for row in rows.row.unique() if row.endswith(ROW_AVERAGED)]
    return readings.swapped(rows, {row: row.removesuffix(ROW_AVERAGED) for row in averaged})


# -- ranks -----------------------------------------------------------------------------------------


def comparable(
    numbers: pd.DataFrame, fewest: int = FEWEST
) -> dict[tuple[str, str, str], pd.DataFrame]:
    """Columns with at least so many methods, on the seeds that all of these have.

    A column all of whose runs stand in another one is left out.

    Parameters
    ----------
    numbers : DataFrame
        As `recounted` gives them, of all artefacts.
    fewest : int
        Methods that a column has at least.
    """
    usual = numbers[(numbers.rule == REPORTED) & numbers.row.isin(LABELS)]
    usual = usual[usual.rate.isna()]  # `tuned` has the others
    runs = {key: frozenset(of.run) for key, of in usual.groupby(COLUMN, sort=False)}
    out: dict[tuple[str, str, str], pd.DataFrame] = {}
    for key, of in grouped(usual, COLUMN):
        within = any(
            runs[key] < other or (runs[key] == other and k in out) for k, other in runs.items()
        )
        seeds = set.intersection(*(set(own.seed) for _, own in of.groupby("row")))
        if of.row.nunique() < fewest or within or not seeds:
            continue
        found = numbers[(numbers[COLUMN] == list(key)).all(axis=1)]
        out[key] = found[found.row.isin(LABELS) & found.seed.isin(list(seeds))]
    return out


def _table(column: pd.DataFrame, rule: str) -> pd.DataFrame:
    # One number a method (index) and seed (columns), on the seeds that all methods have: of those
    # with averaged statistics some may have fewer than the others.
    found = column[column.rule == rule]
    return found.pivot_table(index="row", columns="seed", values="value").dropna(axis=1)


def ranks(column: pd.DataFrame) -> pd.DataFrame:
    """Ranks of methods (index, the paper's best first) under each rule (columns); 1 is the best."""
    tables = {rule: _table(column, rule) for rule in (REPORTED, *RULES)}
    means = {rule: table.mean(axis=1) for rule, table in tables.items() if table.size}
    out = pd.DataFrame(means).rank(ascending=False)
    return out.sort_values(REPORTED, kind="stable")


def taus(every: Iterable[pd.DataFrame]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Kendall's tau of the orders of methods under each two rules, averaged over columns.

    And over how many columns; those in which the two are one way to count are not among them.

    Parameters
    ----------
    every : iterable of DataFrame
        Columns, as `comparable` gives them.
    """
    taus: dict[tuple[str, str], list[float]] = {}
    for column in every:
        order, same = ranks(column), set(column.rule[column.same]) - {REPORTED}
        for a, b in itertools.combinations([r for r in RULES if r in order], 2):
            if not {a, b} <= same:
                tau = order[a].corr(order[b], method="kendall")
                taus.setdefault((a, b), []).append(tau)
    rules = [r for r in RULES if any(r in pair for pair in taus)]
    tau = pd.DataFrame(np.nan, rules, rules)
    count = pd.DataFrame(0, rules, rules)
    for (a, b), found in taus.items():
        known = [t for t in found if not np.isnan(t)]
        tau.loc[a, b] = tau.loc[b, a] = np.mean(known) if known else np.nan
        count.loc[a, b] = count.loc[b, a] = len(known)
    return tau, count


def leaders(column: pd.DataFrame) -> dict[str, list[str]]:
    """{method: the rules under which it has the highest accuracy of its column}."""
    out: dict[str, list[str]] = {}
    for rule, order in ranks(column).items():
        out.setdefault(str(order.idxmin()), []).append(str(rule))
    return out


def reversals(column: pd.DataFrame) -> pd.DataFrame:
    """Pairs of methods whose order another rule than the paper's turns round.

    Columns: rule, ahead and behind (as the paper counts), reported (the lead in points) and
    recounted (under the rule), each an `Interval`, and sure: whether both intervals leave out 0.
    """
    lines, usual = [], _table(column, REPORTED)
    for rule in [r for r in RULES if (column.rule == r).any()]:
        other = _table(column, rule)
        for a, b in itertools.permutations(usual.index, 2):
            if not usual.loc[a].mean() > usual.loc[b].mean():
                continue
            if other.loc[a].mean() < other.loc[b].mean():
                leads = [_lead(table, a, b) for table in (usual, other)]
                sure = leads[0].low > 0 > leads[1].high
                lines.append((rule, a, b, *leads, sure))
    return pd.DataFrame(lines, columns="rule ahead behind reported recounted sure".split())


def _lead(table: pd.DataFrame, a: str, b: str) -> Interval:
    return column_of(table).difference(a, b)


# -- what the choice of a round is worth -----------------------------------------------------------


def gains(column: pd.DataFrame) -> pd.DataFrame:
    """Points that "best_test" is above the rules that look at no test data, a line a rule.

    Before or after training and means are as the paper counts.

    Columns: against (the rule), gain (an `Interval` over seeds of the mean over methods), largest
    (of a method, mean over seeds), of (which one), methods, seeds.
    """
    lines = []
    for rule in ("best_val", "last10", "last"):
        if not {"best_test", rule} <= set(column.rule):
            continue
        each = _table(column, "best_test") - _table(column, rule)
        gain = noise.of_values(each.mean())
        means = each.mean(axis=1)
        line = dict(against=rule, gain=gain, largest=means.max(), of=means.idxmax())
        lines.append(line | dict(methods=len(each), seeds=each.shape[1]))
    return pd.DataFrame(lines, columns="against gain largest of methods seeds".split())


def tails(runs: Runs) -> list[float]:
    """Which share of a run's rounds its last ten evaluations stretch over, of runs with more."""
    seen = runs.measured
    each = seen[seen.split == "test"].groupby("run").rounds.unique()
    return [1 - sorted(r)[-TEN] / max(r) for r in each if len(r) > TEN]


# -- another setting -------------------------------------------------------------------------------


def tuned(runs: Runs) -> pd.DataFrame:
    """Accuracy (%) of each method at the learning rates that were run, the common one first.

    Columns: the rates, and "own": at the rate that is best for the method by validation accuracy,
    by `chosen`: "val", or "test" where there are no validation data. Empty without such runs.
    """
    rates = runs.paper.rates
    rows = runs.rows[runs.rows.column.isin(rates)]
    if rows.empty:
        return pd.DataFrame()
    means = reproduced(rows, runs.paper).pivot_table(index="row", columns="column", values="value")
    means = means.sort_index(axis=1, key=lambda c: c.map(rates)).dropna()
    tops = validated(rows, ["row", "column", "run"], None).reset_index()
    chosen = "val" if set(tops.run) == set(_measured(rows).run) else "test"
    judge = means
    if chosen == "val":
        judge = tops.pivot_table(index="row", columns="column", values="value")
        means = means[means.index.isin(judge.index)]  # not those read after another's training
    picks = compared(judge.loc[means.index, means.columns]).idxmax(axis=1)
    own: list[Any] = [means.at[row, column] for row, column in picks.items()]
    return means.assign(own=own, chosen=chosen).rename_axis(columns=None)


def tunings(found: Sequence[Runs]) -> list[Runs]:
    """The runs that chose rates for printed rows of these tables, a column a rate ("lr 0.1").

    Only the rates that were tried for all of a table's rows.
    """
    out = []
    for runs in found:
        printed = papers.printed_rows(runs.paper, runs.artefact)
        tuned = runs.paper.artefacts[runs.artefact].tuned
        fuller = (
            fullest.best(runs.paper, Scope("quick"), papers.TUNING) if tuned and printed else None
        )
        if fuller is None:
            continue
        tried = [
            s.typed(fuller[1]).assign(row=s.base.but(**next(iter(s.rows.values()))).method)
            for s in runs.paper.planned(fuller[0], papers.TUNING)
            if s.vary and s.part == runs.artefact
        ]
        if not tried:
            continue
        rows = pd.concat(tried)
        rows = rows.assign(column=[f"lr {rate:g}" for rate in rows.varied])
        rates = dict(zip(rows.column, rows.varied, strict=True))
        of_all = rows.groupby("column").row.transform("nunique") == rows.row.nunique()
        paper = replace(runs.paper, rates=rates)
        out += [Runs(paper, runs.artefact, rows[of_all])] * bool(of_all.any())
    return out


def other_settings(runs: Runs) -> pd.DataFrame:
    """What a setting that papers leave open changes: a line a column and method that ran with it.

    Columns: column, row, what (changes), gain (an `Interval`, in points).
    """
    found, lines = Evidence(runs.rows, runs.paper), []
    for (column, row), _ in grouped(runs.rows, ["column", "row"]):
        for named, what in SETTINGS.items():
            if row.endswith(named):
                method = row.removesuffix(named)
                gain = found.ahead(row, method, column).found
                lines.append(dict(column=column, row=method, what=what, gain=gain))
    return pd.DataFrame(lines, columns=["column", "row", "what", "gain"])


# -- beside the printed numbers --------------------------------------------------------------------


def distances(runs: Runs) -> pd.DataFrame:
    """How far our leads of a paper's own method lie from the printed ones, by rule.

    A lead is its accuracy minus another row's, as in `report.advantages`; only columns with the
    paper's own data and network count. The distance is the mean of the absolute differences, over
    the rows that all rules of a column have.

    Columns: column, rule, leads (how many), points, noise (points: half the interval of one of the
    differences, their median; NaN with one seed).
    """
    found, named = [], runs.rows.row.unique()
    for rule in (REPORTED, *RULES) if _prints_accuracy(runs) else ():
        if rule in RULES and _same(rule, runs.paper, named):
            found.append(found[0].assign(rule=rule))  # as the paper counts
            continue
        missing = {} if rule == REPORTED else without(rule, runs)
        rows = runs.rows[~runs.rows.column.isin(list(missing))]
        if len(rows):
            rows = _swapped(rows) if rule == AVERAGED else rows
            lines = report.Held(rows, under(rule, runs.paper), runs.artefact).leads_as_run
            found.append(lines.assign(rule=rule))
    every = pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=["column"])
    out = []
    for column, of in grouped(every, "column"):
        off = of.pivot_table(index="row", columns="rule", values="difference").abs().dropna()
        for rule in [r for r in (REPORTED, *RULES) if r in off]:
            own = of[(of.rule == rule) & of.row.isin(off.index)]
            noise = ((own.difference_high - own.difference_low) / 2).median()
            points = off[rule].mean()
            line = dict(column=column, rule=rule, leads=len(off), points=points, noise=noise)
            out.append(line)
    return pd.DataFrame(out, columns=["column", "rule", "leads", "points", "noise"])


def _prints_accuracy(runs: Runs) -> bool:
    if runs.artefact not in runs.paper.tables:
        return False
    said = papers.reported(runs.paper)
    return "acc_pct" in set(said.metric[said.table == runs.artefact])


# -- claims ----------------------------------------------------------------------------------------


def claims(runs: Runs) -> pd.DataFrame:
    """The verdict on each claim that rests on an artefact, under every rule that all its runs have.

    Columns: paper, says, source, profile, and a column a rule, "undecided: tie" or "holds"; "" for
    a rule that its runs lack. Without rows where no row has two seeds: all would be undecided.
    Claims whose numbers are the same under all rules, as those on weights, are left out.
    """
    several = runs.measured.groupby(["row", "column"]).seed.nunique().max() > 1
    own = tuple(c for c in runs.paper.claims if c.needs == runs.artefact)
    if not (own and several):
        return pd.DataFrame(columns=["paper", "says", "source", "profile"])
    out: dict[str, list[Verdict]] = {}
    for rule in (REPORTED, *RULES):
        missing = {} if rule == REPORTED else without(rule, runs)
        heads = {c: of.row.unique() for c, of in runs.measured.groupby("column")}
        if rule == AVERAGED and len(missing) < len(heads):
            missing = {}  # rows that were not run so stay
        if missing:
            continue
        if rule in RULES and all(_same(rule, runs.paper, rows) for rows in heads.values()):
            out[rule] = out[REPORTED]
            continue
        rows = _swapped(runs.rows) if rule == AVERAGED else runs.rows
        paper = replace(under(rule, runs.paper), claims=own)
        out[rule] = report.decided(paper, rows)[1]
    known = dict(paper=runs.paper.key, says=[c.says for c in own], source=[c.where for c in own])
    said = {rule: [_worded(verdict) for verdict in of] for rule, of in out.items()}
    counts = [len({verdict.why for verdict in of}) > 1 for of in zip(*out.values(), strict=True)]
    return pd.DataFrame(known | dict(profile=runs.profile) | said)[counts]


def _worded(said: Verdict) -> str:
    return f"{said.verdict}: {said.reason}" if said.reason else said.verdict
