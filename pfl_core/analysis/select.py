"""Which number of a run is reported: four named rules, and a table of what they picked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from pfl_core.engine.scoring import COUNTED, less_is_better
from pfl_core.experiments import settings
from pfl_core.experiments.metrics import TOTALS
from pfl_core.util import checks
from pfl_core.util.percent import compared

SELECT = {  # the rules, in words
    "last": "last round",
    "last10": "mean of the last ten evaluations",
    "best_val": "best validation round",
    "best_test": "best test round (optimistic: test data choose it)",
}
MOMENTS = {"before": "before local training", "after": "after local training"}
RUN = ["run", "paper", "artefact", "row", "column"]  # a run, where it is shown
KINDS = ["when", "split", "average", "metric"]  # of a number
ONE = 1e-3  # by which one number may differ between the store and what is committed


def pick(
    rows: pd.DataFrame,
    select: str = "last",
    when: str = "before",
    average: str = "client",
    metric: str = "acc_pct",
) -> pd.DataFrame:
    """Keep one row a run: `metric` on the test split, at the round that a named rule says.

    What is counted over the run (bytes, visits, seconds) is of no split: it is that of the last
    round, whatever `select`, `when` and `average` say.

    Parameters
    ----------
    rows : DataFrame
        Rows in the long form, of any metrics, splits and rounds.
    select : {"last", "last10", "best_val", "best_test"}
        "last": the last round. "last10": the mean of the last ten evaluations, without that of the
        untrained models ("before" round 0). "best_val": the
        round of the best accuracy on validation data, the first one of several. "best_test": that
        on test data; it is optimistic, since test data choose what they judge. Accuracy chooses
        whatever the metric is, but one of `Experiment(metrics=...)` chooses for itself.
    when : {"before", "after"}
        Whether models were evaluated before or after the round's local training; or "tuned 3":
        after 3 epochs of the fine-tuning that follows the last round.
    average : {"client", "pooled"}
        Mean over clients, or over all samples of all clients.

    Raises
    ------
    ValueError
        For another rule, and for "best_val" and "best_test" where a run has no accuracies on these
        data; for "last10" where a run has only its untrained models'; where one run stands in
        the rows twice, with two numbers; and where a metric is undefined for all clients.
    """
    checks.known("select", select, SELECT)
    if metric in TOTALS:
        totals = _once(_one_a_key(rows[(rows.metric == metric) & (rows["average"] == "total")]))
        return totals.sort_values("rounds", kind="stable").drop_duplicates(RUN, keep="last")
    seen = (rows.when == when) & (rows["average"] == average)
    if select != "best_val":  # nothing else looks at other data
        seen &= rows.split == "test"
    rows = rows[seen & rows.metric.isin(read_with(metric))]
    rows = _once(_one_a_key(rows)).sort_values("rounds", kind="stable", ignore_index=True)
    test = rows[rows.split == "test"]
    counted = test[test.metric == metric + COUNTED]
    found = _picked(rows, test[test.metric == metric], select, when, metric if len(counted) else "")
    if len(counted) and len(lost := counted[~counted.run.isin(found.run)]):
        where = "one of the rounds" if select == "last10" else "the round"
        raise ValueError(
            f"{metric} is undefined for all clients in {where} that select={select!r} shows: "
            f"{_whose(lost)}; leave these out"
        )
    return found


def read_with(metric: str) -> list[str]:
    """The metrics that `pick` reads where one is asked for."""
    return [metric, metric + COUNTED, "acc_pct"]


def _picked(
    rows: pd.DataFrame, test: pd.DataFrame, select: str, when: str, named: str
) -> pd.DataFrame:
    # named: what `Experiment(metrics=...)` named, if it is shown; `test` lacks where it is NaN.
    if select == "last10":
        return _last_ten(test, ten(rows[rows.split == "test"], when))
    if select == "last":
        if named:
            ends = rows.groupby(RUN, sort=False)["rounds"].transform("max")[test.index]
            test = test[test["rounds"] == ends]
        return test.drop_duplicates(RUN, keep="last")
    split, data = ("val", "validation") if select == "best_val" else ("test", "test")
    chooser = rows[(rows.split == split) & (rows.metric == (named or "acc_pct"))]
    if len(blind := test[~test.run.isin(chooser.run)]):
        raise ValueError(
            f"select={select!r} needs {named or 'accuracies'} on {data} data, and these rows have "
            f"none: {_whose(blind)}; use 'last'"
        )
    chooser = chooser.assign(value=compared(chooser.value))
    of_each = chooser.groupby(RUN, sort=False).value
    best = chooser.loc[of_each.idxmin() if less_is_better(named) else of_each.idxmax()]
    return test.merge(best[[*RUN, "rounds"]], on=[*RUN, "rounds"])


def _one_a_key(rows: pd.DataFrame) -> pd.DataFrame:
    # Two runs of one key, under an older name and a new one, are one seed: the first is kept.
    if "key" not in rows:
        return rows
    if len({*rows.key.dropna().unique()} - {""}) == rows.run.nunique():  # as nearly always
        return rows
    runs = rows[["run", "key"]].drop_duplicates()
    key = runs.key.where(runs.key.notna() & (runs.key != ""), runs.run)
    return rows[~rows.run.isin(runs.run[key.duplicated()])]


def ten(rows: pd.DataFrame, when: str) -> pd.DataFrame:
    """The last ten evaluations of each run, as lines of its columns and "rounds".

    The untrained models of round 0 are no evaluation of what a method made.
    """
    trained = rows[rows["rounds"] > 0] if when == "before" else rows
    at = trained[[*RUN, "rounds"]].drop_duplicates().sort_values("rounds", kind="stable")
    return at.groupby(RUN, sort=False).tail(10)


def _last_ten(test: pd.DataFrame, at: pd.DataFrame) -> pd.DataFrame:
    # at: the evaluations, as `ten` gives them.
    if len(blind := test[~test.run.isin(at.run)]):
        raise ValueError(
            "select='last10' averages evaluations after round 0, and these rows have none: "
            f"{_whose(blind)}; use 'last'"
        )
    tail = test.merge(at, on=[*RUN, "rounds"])
    of_each = tail.groupby(RUN, sort=False).value
    tail = tail.assign(value=of_each.transform("mean"), n=of_each.transform("size"))
    of = tail[RUN].merge(at.groupby(RUN, sort=False).size().rename("n").reset_index(), on=RUN)
    whole = tail[tail.n.to_numpy() == of.n.to_numpy()]  # a metric may be undefined in some
    return whole.drop(columns="n").groupby(RUN, sort=False).tail(1)


def _whose(rows: pd.DataFrame) -> str:
    # Their labels; ids of runs that have none.
    return ", ".join(dict.fromkeys(rows.row.where(rows.row != "", rows.run).astype(str)))


def _once(rows: pd.DataFrame) -> pd.DataFrame:
    # Rows without those that stand there twice, as in frames that were joined.
    keys = [*RUN, "rounds", *KINDS]
    if not (twice := rows.duplicated(keys, keep=False)).any():
        return rows
    values = rows[twice].groupby(keys, sort=False).value
    apart = (values.transform("max") - values.transform("min")) > ONE
    if apart.any():
        raise ValueError(
            f"run {rows[twice].run[apart].iloc[0]} stands in these rows twice, with two numbers: "
            "keep those of one computation"
        )
    return rows.drop_duplicates(keys)


def alike(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """The frame without what counts twice, after a look at what it would pool.

    Parameters
    ----------
    frame : DataFrame
        One number a line, with the columns of `Result.rows` or some of them.
    by : list of str
        The columns whose values make a cell. A cell holds runs that differ in their seeds alone.

    Returns
    -------
    DataFrame
        One line a cell and computation: the same one is no second seed.

    Raises
    ------
    ValueError
        If runs of a cell differ in more than the seed; it names the fields. Also if numbers of a
        cell are of different kinds: metric, split, average, before or after local training.
    """
    compared = [c for c in ("setting", *KINDS) if c in frame and c not in by]
    varied = frame.groupby(by, sort=False, observed=True)[compared].nunique()
    for name in compared:
        if (varied[name] > 1).any():
            cell = varied.index[varied[name] > 1][0]
            values = cell if isinstance(cell, tuple) else (cell,)
            own = frame[(frame[by] == list(values)).all(axis=1)]
            raise ValueError(f"{_named(by, values)} {_pooled(own, name)}")
    if {"setting", "seed", "partition_seed"} <= set(frame):
        return frame.drop_duplicates([*by, "setting", "seed", "partition_seed"])
    return frame.drop_duplicates([*by, "run"]) if "run" in frame else frame


def replicates(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """The frame with `seed` as what tells the replicates of a cell apart.

    That is the seed, but the pair of it and `partition_seed`, as text, for all where a cell has
    several partitions under one seed: each of them is a draw of its own.

    Parameters
    ----------
    frame : DataFrame
        One number a line, of runs of a cell that differ in their seeds alone (`alike`).
    by : list of str
        The columns whose values make a cell.
    """
    if not {"seed", "partition_seed"} <= set(frame):
        return frame
    cells = frame.groupby([*by, "seed"], sort=False, observed=True)
    if not (cells.partition_seed.nunique() > 1).any():
        return frame
    return frame.assign(seed=frame.seed.astype(str) + "/" + frame.partition_seed.astype(str))


def _named(by: list[str], values: tuple) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in zip(by, values, strict=True))


def _pooled(own: pd.DataFrame, name: str) -> str:
    # What is wrong with a cell that pools several values of a column.
    if name != "setting":
        found = ", ".join(map(str, own[name].unique()))
        return f"has numbers of several kinds, {name} {found}: choose one"
    said = settings.differences_text(own.setting)
    if not said and "run" in own:
        some = " ".join(own.drop_duplicates("setting").run[:2])
        said = f"`python -m pfl_core show {some}` says in what"
    dealt = "pool" in settings.differences(own.setting) and {*own.dataset} == {"own"}
    cure = "run a Federation a seed as sweep(cells, fed=lambda seed: Federation(...)); else "
    return (
        f"pools runs that differ in more than the seed: {said}; {cure * dealt}choose among them, "
        "or give them labels of their own (tags row and column)"
    )


def summary(picked: pd.DataFrame, rows: str = "row", columns: str = "column") -> pd.DataFrame:
    """Table of picked numbers as text: the mean over seeds, and "± sd" (ddof 1) over several.

    A cell with fewer seeds than its column has in all says so: "52.00 (1 of 3 seeds)".
    `rows` and `columns` name the columns of `picked` whose values label the table's two sides.

    Raises
    ------
    ValueError
        If runs of a cell differ in more than the seed.
    """

    by = [*dict.fromkeys([rows, columns])]
    picked = replicates(alike(picked, by), by)
    seeds = picked.groupby(columns, sort=False).seed.nunique()

    def cell(own: pd.DataFrame) -> str:
        there, tried = own.seed.nunique(), seeds[own.name[1]]
        deviation = f" ± {own.value.std(ddof=1):.2f}" if len(own) > 1 else ""
        fewer = f" ({there} of {tried} seeds)" if there < tried else ""
        return f"{own.value.mean():.2f}" + deviation + fewer

    index, header = (list(dict.fromkeys(picked[side])) for side in (rows, columns))
    cells = picked.groupby([rows, columns], sort=False)[["seed", "value"]]
    table = cells.apply(cell).unstack(columns)
    return table.reindex(index=index, columns=header).fillna("not run")


# -- frames, line by line: their values are of any kind --------------------------------------------


def tuples(frame: pd.DataFrame) -> Iterator[Any]:
    """The lines of a frame as named tuples."""
    return iter(frame.itertuples())


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The lines of a frame as {column: value}."""
    return [{str(name): v for name, v in line.items()} for line in frame.to_dict("records")]


def grouped(frame: pd.DataFrame, by: Any) -> Iterator[tuple[Any, pd.DataFrame]]:
    """The parts of a frame with equal values in columns `by`, in the order in which they come."""
    return iter(frame.groupby(by, sort=False))
