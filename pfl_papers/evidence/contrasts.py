"""What a claim asks of finished runs: differences of rows, their intervals, and what hinders.

What hinders a verdict: a row that has not learned, a curve that still moves.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np
import pandas as pd

from pfl_core.analysis import noise
from pfl_core.analysis.noise import Column, Interval, Priors
from pfl_core.analysis.plots import label
from pfl_core.analysis.select import pick, read_with
from pfl_core.analysis.verdicts import Contrast
from pfl_core.data.pools import DatasetMissing
from pfl_papers.evidence import committed, diverged

# Rows that are another row's run, read after local training.
READ_AFTER = {"fedavg_ft": "fedavg", "fedprox_ft": "fedprox"}
ONE_MODEL = noise.ONE_MODEL | {"centralized"}
ACCURACIES = ("acc_pct", "train_acc_pct")  # metrics in % of which there are verdicts
# The columns of rows that a verdict reads; to carry the others along would double its time.
READ = (
    "run paper artefact row column seed profile dataset rounds when split average metric value key"
).split()
LEARNED = 1.0  # points above its clients' majority label, or above round 0, at which a row has


class Reporting(Protocol):
    """Which number of a run is reported, as a `Paper` says it: keywords of `select.pick`."""

    @property
    def report(self) -> dict[str, str]:
        """Keywords for all rows."""
        ...

    @property
    def when(self) -> dict[str, str]:
        """The time at which rows are read that are read at another one."""
        ...


def reproduced(
    rows: pd.DataFrame, paper: Reporting, metric: str = "acc_pct", **how: str
) -> pd.DataFrame:
    """Pick one number a run, as the paper reports it.

    Rows that are read after another's local training are added.

    Parameters
    ----------
    rows : DataFrame
        In the long form, with derived numbers.
    paper : Reporting
        Says which number is reported.
    metric : str
        Another one than accuracy is a derived one (`Artefact.numbers`) where there is one of this
        name.
    **how : str
        select, when, average in place of the paper's.

    Returns
    -------
    DataFrame
        As `select.pick` returns them.
    """
    derived = rows["average"] == "derived"
    if metric != "acc_pct" and (derived & (rows.metric == metric)).any():
        return rows[derived & (rows.metric == metric)].reset_index(drop=True)
    usual = paper.report | how
    if metric != "acc_pct":
        usual |= {"average": "client", "metric": metric}
    measured = rows[rows.metric.isin(read_with(metric)) & (rows["average"] == usual["average"])]
    order: list[str] = []  # of rows, those that are read after another's training behind it
    read: dict[str, list[str]] = {}  # rows by when they are read
    for name in measured.row.unique():
        read.setdefault(how.get("when", paper.when.get(name, usual["when"])), []).append(name)
        order += [name, *(other for other, source in READ_AFTER.items() if source == name)]
    parts = [
        pick(measured[measured.row.isin(names)], **usual | {"when": when})
        for when, names in read.items()
    ]
    of_others = measured[measured.row.isin(READ_AFTER.values()) & (measured.when == "after")]
    if "when" not in how and len(of_others):
        after = pick(of_others, **usual | {"when": "after"})
        parts += [
            after[after.row == source].assign(row=other) for other, source in READ_AFTER.items()
        ]
    whole = pd.concat([p for p in parts if len(p)] or [rows.iloc[:0]], ignore_index=True)
    place = {name: i for i, name in enumerate(order)}
    return whole.sort_values(
        "row", key=lambda names: names.map(place), kind="stable", ignore_index=True
    )


def column_of(
    table: pd.DataFrame, printed: Collection[str] = (), priors: Priors | None = None
) -> Column:
    """Return a column whose noise is pooled over the personal rows that the paper prints.

    Rows of ours are other readings, some made to fail: what they scatter says nothing of the
    paper's. Nor does one model for all of models of one's own: clients whose own tasks are easy can
    have a common one that is hard.

    Parameters
    ----------
    table : DataFrame
        A number a row (index) and seed (columns).
    printed : collection of str
        Rows that the paper prints; all if none of them is there.
    priors : Priors, optional
        What other columns say of noise.
    """
    shared = [row for row in table.index if serves_one_model(row)]
    pool = [row for row in table.index if row in printed]
    return Column(table, shared, pool, priors or Priors())


def narrow(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with the columns that a verdict reads."""
    return rows[[name for name in READ if name in rows]]


def serves_one_model(row: str) -> bool:
    """Whether a row serves all clients the same model, as it is or in another setting."""
    return row.partition(" (")[0] in ONE_MODEL


def before_the_last_quarter(rows: pd.DataFrame) -> pd.DataFrame:
    """What runs had measured at three quarters of their rounds; nothing that is derived."""
    measured = rows["rounds"].where(rows["average"] != "derived")
    return rows[measured <= 0.75 * measured.groupby(rows.run).transform("max")]


PAST = " at three quarters"  # behind a derived metric's name: had the runs ended there


def with_past(judge: Callable[[Evidence], list[Contrast]], evidence: Evidence) -> list[Contrast]:
    """The contrasts of a claim, with how far each moved whose numbers were computed from runs.

    Parameters
    ----------
    judge : callable
        Evidence -> contrasts. It is asked again of the evidence at three quarters of the rounds, if
        there are such numbers. A contrast that had other seeds there keeps what is known of it.
    evidence : Evidence

    Raises
    ------
    LookupError
        For what was not run.
    """
    found = judge(evidence)
    if all(contrast.rows or not contrast.found.seeds for contrast in found):
        return found
    earlier: dict[str, list[Contrast]] = {}
    try:
        for contrast in judge(evidence.past):
            earlier.setdefault(contrast.says, []).append(contrast)
    except LookupError:
        return found
    pairs = [(c, of.pop(0) if (of := earlier.get(c.says)) else c) for c in found]
    return [
        replace(now, moved=now.found.estimate - then.found.estimate)
        if then is not now and not now.rows and 0 < now.found.seeds == then.found.seeds
        else now
        for now, then in pairs
    ]


Runs = dict[tuple[str, str], list[str]]  # by row and column


def runs_of(rows: pd.DataFrame) -> Runs:
    """The runs of each cell, those that diverged among them."""
    out: Runs = {}
    for run, row, column in rows[["run", "row", "column"]].drop_duplicates().to_numpy():
        out.setdefault((row, column), []).append(run)
    return out


@functools.lru_cache(maxsize=4096)
def majority(run: str, average: str = "client") -> float:
    """Return the accuracy (%) of answering each client's most common label.

    Parameters
    ----------
    run : str
        Name of a finished run.
    average : str
        Over clients ("client"), or "pooled" over their samples.

    Returns
    -------
    float
        NaN where labels are not known.
    """
    experiment = committed.experiment(run)
    if experiment is None:
        return np.nan
    dealt = json.dumps([experiment.plain()[name] for name in _DEALT])
    if dealt not in _counts:
        try:
            _counts[dealt] = committed.label_counts(experiment)
        except (DatasetMissing, ValueError):
            return np.nan
    counts = _counts[dealt]
    top, n = counts.max(1), counts.sum(1)
    share = top[n > 0] / n[n > 0]
    return float(100 * (share.mean() if average == "client" else top.sum() / n.sum()))


_DEALT = "dataset partition partition_args clients seed partition_seed max_samples holdout".split()
_counts: dict[str, np.ndarray] = {}  # of clients' labels, by what deals them out


class Evidence:
    """The rows of an artefact's runs, as a claim of the paper looks at them.

    A row, column or metric that was not run is a LookupError, which makes the claim "not run".

    Parameters
    ----------
    rows : DataFrame
        In the long form, with derived numbers.
    paper : Reporting
        Says which number of a run is reported.
    printed : collection of str
        The rows that the paper prints beside each other; noise is pooled over them.
    priors : Priors, optional
        What all judged columns say of the noise of accuracies.
    **how : str
        select, when, average in place of the paper's.
    """

    def __init__(
        self,
        rows: pd.DataFrame,
        paper: Reporting,
        printed: Collection[str] = (),
        priors: Priors | None = None,
        **how: str,
    ):
        self.rows, self.paper, self.printed, self.priors = rows, paper, printed, priors
        self.how = how
        self._all = functools.cache(self._picked)
        self._table = functools.cache(self._pivoted)
        self._column = functools.cache(self._with_noise)
        self._rows = functools.cache(self._rows_of)
        self._guesses = functools.cache(self._at_majority)
        self._stays = functools.cache(self._at_start)
        self._gone = functools.cache(self._moved)
        self._contrast = functools.cache(self._weighed)

    @functools.cached_property
    def columns(self) -> list[str]:
        """Columns with runs, in the table's order."""
        return self.rows.column.unique().tolist()

    @functools.cached_property
    def made(self) -> pd.DataFrame:
        """The derived numbers among the rows."""
        return self.rows[self.rows["average"] == "derived"]

    @functools.cached_property
    def past(self) -> Evidence:
        """The evidence had the runs ended at three quarters."""
        return Evidence(self._earlier, self.paper, self.printed, self.priors, **self.how)

    @functools.cached_property
    def _earlier(self) -> pd.DataFrame:
        there = self.made[self.made.metric.str.endswith(PAST)]
        there = there.assign(metric=there.metric.str.removesuffix(PAST))
        return pd.concat([before_the_last_quarter(self.rows), there])

    @functools.cached_property
    def runs(self) -> Runs:
        """Runs of each cell."""
        return runs_of(self.rows)

    def reported(self, moment: str = "now", metric: str = "acc_pct") -> pd.DataFrame:
        """What is reported of every run, as `reproduced` picks it.

        Parameters
        ----------
        moment : str
            "now"; "earlier", had the runs ended at three quarters; "start", at round 0.
        metric : str
        """
        return self._all(moment, metric)

    def methods(self, column: str) -> list[str]:
        """Rows with an accuracy in a column, those read after another's training among them."""
        return [*self._rows(column)]

    def means(self, column: str) -> pd.Series:
        """Mean over seeds of the reported accuracy (%) of each row of a column."""
        return self._table("now", "acc_pct", column).mean(axis=1)

    # -- differences of rows -----------------------------------------------------------------------

    def ahead(
        self,
        first: str,
        second: str,
        column: str,
        by: float = 0.0,
        metric: str = "acc_pct",
        group: str = "",
    ) -> Contrast:
        """Contrast two rows: the first minus the second, which has to be above `by` points."""
        says = f"{label(first)} - {label(second)}, {column}"
        weights = {(first, column): 1.0, (second, column): -1.0}
        return self.contrast(says, weights, by, metric=metric, group=group)

    def missing(self, first: str, column: str, but: Collection[str] = ()) -> list[Contrast]:
        """Say what leaves open that a row is ahead of all others: those printed that were not run.

        A column that has no other one compares nothing, and leaves nothing open.

        Parameters
        ----------
        first, column : str
            Labels.
        but : collection of str
            Rows that need not be there.
        """
        others = [row for row in self.printed if row not in (first, *but)]
        lost = [row for row in others if row not in self.methods(column)]
        if len(lost) == len(others):
            return []
        says = [f"{label(first)} - {label(row)}, {column}" for row in lost]
        return [Contrast(text, Interval(), group=column) for text in says]

    def contrast(
        self,
        says: str,
        weights: Mapping[tuple[str, str], float],
        above: float = 0.0,
        *,
        metric: str = "acc_pct",
        group: str = "",
    ) -> Contrast:
        """Contrast cells: a weighted sum, which has to be above a threshold.

        Parameters
        ----------
        says : str
            What is compared.
        weights : {(row, column): weight}
            1 and -1 for a difference. Rows of weight below 0 are those that have to lose.
        above : float
            The threshold, in points.
        metric : str
            Accuracy in percent, or another one in points ("acc_sd"). Of accuracy on training data
            it is known from the test data alone whether rows have learned, and still move.
        group : str
            What claims on most cases count.
        """
        return self._contrast(says, tuple(weights.items()), above, metric, group)

    def _weighed(
        self,
        says: str,
        cells: tuple[tuple[tuple[str, str], float], ...],
        above: float,
        metric: str,
        group: str,
    ) -> Contrast:
        found, moved, weights = [], {}, dict(cells)
        curve = "acc_pct" if metric in ACCURACIES else metric
        for column in dict.fromkeys(column for _, column in weights):
            own = {row: weight for (row, at), weight in weights.items() if at == column}
            of = self.column(column, metric)
            if lost := [row for row in own if row not in of.table.index]:
                if said := self._lost(weights):
                    return Contrast(says, Interval(), above, lost=said, group=group)
                raise LookupError(f"{label(lost[0])} / {column}")
            found.append(of.sum(own))
            seeds = tuple(of.table.loc[list(own)].dropna(axis=1).columns.tolist())
            moved |= {(row, column): self._gone(row, column, curve, seeds) for row in own}
        gone = sum(weight * moved[cell] for cell, weight in weights.items())
        return Contrast(
            says,
            noise.summed(found),
            above,
            moved=None if np.isnan(gone) else gone,
            rows=tuple(moved.values()),
            unlearned=self._unlearned(weights, above < 0) if metric in ACCURACIES else "",
            lost=self._lost(weights),
            group=group,
        )

    def column(self, column: str, metric: str = "acc_pct") -> Column:
        """A column's reported numbers with their noise."""
        return self._column(column, metric)

    def _with_noise(self, column: str, metric: str) -> Column:
        priors = self.priors if metric in ACCURACIES else None
        return column_of(self._table("now", metric, column), self.printed, priors)

    def _moved(self, row: str, column: str, metric: str, seeds: tuple[int, ...]) -> float:
        # By how much a row's mean changed over the last quarter of the rounds, NaN if not known.
        now, past = (self._table(at, metric, column) for at in ("now", "earlier"))
        if not all(row in at.index and set(seeds) <= set(at) for at in (now, past)):
            return np.nan
        gone = now.loc[row, list(seeds)] - past.loc[row, list(seeds)]
        return float(cast(pd.Series, gone).mean())

    def _picked(self, moment: str, metric: str) -> pd.DataFrame:
        rows = self.rows
        if moment == "earlier":
            rows = self._earlier
        if moment == "start":  # one evaluation, whatever rule is used
            rows = rows[rows["rounds"] == 0]
            return reproduced(rows, self.paper, metric, **self.how | {"select": "last"})
        return reproduced(rows, self.paper, metric, **self.how)

    def _rows_of(self, column: str) -> dict[str, None]:
        now = self._all("now", "acc_pct")
        return dict.fromkeys(now[now.column == column].row)

    def _pivoted(self, moment: str, metric: str, column: str) -> pd.DataFrame:
        """A column as one number a row (index) and seed (columns)."""
        picked = self._all(moment, metric)
        of_column = picked[picked.column == column]
        return of_column.pivot_table(index="row", columns="seed", values="value", sort=False)

    def _lost(self, weights: Mapping[tuple[str, str], float]) -> str:
        # Seeds with which a row ended well say nothing of those with which it diverged.
        for row, column in weights:
            if said := self._diverged.get((READ_AFTER.get(row, row), column)):
                return f"{label(row)} {said}"
        return ""

    @functools.cached_property
    def _diverged(self) -> dict[tuple[str, str], str]:
        return diverged.said(self.rows)

    def _unlearned(self, weights: Mapping[tuple[str, str], float], both: bool) -> str:
        # both: nobody has to lose, so all rows have to have learned something.
        for (row, column), weight in weights.items():
            if (weight > 0 or both) and (why := self._guesses(row, column)):
                return why
            if weight < 0 and (why := self._stays(row, column)):
                return why
        return ""

    def _lead(self, row: str, column: str) -> tuple[np.ndarray, np.ndarray]:
        """A row's accuracies, a seed each, and the level of its clients' most common labels."""
        # A cell may have accuracies on training data alone: of those nothing is said.
        values, runs = self._accuracies.get((row, column), (np.array([]), []))
        average = (self.paper.report | self.how)["average"]
        return values, np.array([majority(run, average) for run in runs])

    @functools.cached_property
    def _accuracies(self) -> dict[tuple[str, str], tuple[np.ndarray, list[str]]]:
        # The reported accuracies of each cell, and their runs.
        picked = self._all("now", "acc_pct")
        return {
            (str(row), str(column)): (of.value.to_numpy(dtype=float), of.run.tolist())
            for (row, column), of in picked.groupby(["row", "column"], sort=False)
        }

    def _at_majority(self, row: str, column: str) -> str:
        own, levels = self._lead(row, column)
        if not (own - levels <= LEARNED).any():  # NaN: labels are not known
            return ""
        return (
            f"{label(row)} has {own.mean():.1f} %, "
            f"its clients' most common labels alone give {levels.mean():.1f} %"
        )

    def _at_start(self, row: str, column: str) -> str:
        usual = self.paper.when.get(row, self.paper.report["when"])
        if row in READ_AFTER or self.how.get("when", usual) == "after":
            return ""  # at round 0, too, it has trained
        now, start = (self._table(at, "acc_pct", column) for at in ("now", "start"))
        if row not in start.index:
            return ""
        own, levels = self._lead(row, column)
        began_trained = (own - levels > LEARNED).all()  # such as LG-FedAvg, from FedAvg's end
        stayed = bool(((now.loc[row] - start.loc[row]).abs() <= LEARNED).to_numpy().all())
        return f"{label(row)} has not left round 0" if stayed and not began_trained else ""

    # -- derived numbers ---------------------------------------------------------------------------

    def derived(self, metric: str, row: str | None = None, column: str | None = None) -> pd.Series:
        """Average a derived metric by seed, of one row and column or over all.

        LookupError without one.
        """
        found = self.made[self.made.metric == metric]
        for name, wanted in (("row", row), ("column", column)):
            found = found if wanted is None else found[found[name] == wanted]
        if not len(found):
            raise LookupError(f"{metric} of {label(row or 'all rows')}")
        return found.groupby("seed").value.mean()

    def above(
        self,
        says: str,
        by_seed: pd.Series,
        threshold: float = 0.0,
        *,
        unit: str = "",
        small: float = 0.0,
        digits: int = 2,
        censored: bool = False,
        group: str = "",
    ) -> Contrast:
        """Contrast a number that was computed for each seed with a threshold.

        Parameters
        ----------
        says : str
            What is compared.
        by_seed : Series
            A number a seed, NaN where it has none.
        threshold : float
            What it has to be above, in its unit.
        unit : str
            Of the number; "" for points.
        small : float
            Below what it counts as a tie, in its unit.
        digits : int
            That are shown behind the point.
        censored : bool
            Whether a number of rounds in it is that of the last round.
        group : str
            What claims on most cases count.
        """
        values = by_seed.dropna().to_numpy(dtype=float)
        if not len(values):
            raise LookupError(says)
        found = noise.of_values(values)
        how: dict[str, Any] = dict(unit=unit, small=small, digits=digits)
        how |= dict(censored=censored, group=group)
        return Contrast(says, found, threshold, **how)
