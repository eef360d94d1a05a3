"""Which number of a run is reported: four named rules, and a table of what they picked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from pfl_core.util import checks
from pfl_core.util.percent import DECIMALS

SELECT = ("last", "last10", "best_val", "best_test")


def pick(
    rows: pd.DataFrame,
    select: str = "last",
    when: str = "before",
    average: str = "client",
    metric: str = "acc_pct",
) -> pd.DataFrame:
    """Keep one row a run: `metric` on the test split, at the round that a named rule says.

    Parameters
    ----------
    rows : DataFrame
        Rows in the long form, of any metrics, splits and rounds.
    select : {"last", "last10", "best_val", "best_test"}
        "last": the last round. "last10": the mean of the last ten evaluations. "best_val": the
        round of the best accuracy on validation data, the first one of several. "best_test": that
        on test data; it is optimistic, since test data choose what they judge. Accuracy chooses
        whatever the metric is.
    when : {"before", "after"}
        Whether models were evaluated before or after the round's local training.
    average : {"client", "pooled"}
        Mean over clients, or over all samples of all clients.

    Raises
    ------
    ValueError
        For another rule, and for "best_val" and "best_test" where a run has no accuracies on these
        data.
    """
    checks.known("select", select, SELECT)
    seen = (rows.when == when) & (rows["average"] == average)
    rows = rows[seen & rows.metric.isin([metric, "acc_pct"])]
    rows = rows.sort_values("rounds", kind="stable", ignore_index=True)
    test = rows[(rows.split == "test") & (rows.metric == metric)]
    keys = ["run", "paper", "artefact", "row", "column"]
    if select == "last10":
        tail = test.groupby(keys, sort=False).tail(10)
        means = tail.groupby(keys, sort=False).value.transform("mean")
        return tail.assign(value=means).groupby(keys, sort=False).tail(1)
    if select == "last":
        return test.groupby(keys, sort=False).tail(1)
    split, data = ("val", "validation") if select == "best_val" else ("test", "test")
    chooser = rows[rows.split == split]
    chooser = chooser[chooser.metric == "acc_pct"]
    if len(blind := test[~test.run.isin(chooser.run)]):
        names = ", ".join(dict.fromkeys(blind.row))
        raise ValueError(
            f"select={select!r} needs accuracies on {data} data, and these rows have none: "
            f"{names}; use 'last'"
        )
    chooser = chooser.assign(value=chooser.value.round(DECIMALS))
    best = chooser.loc[chooser.groupby(keys, sort=False).value.idxmax()]
    return test.merge(best[[*keys, "rounds"]], on=[*keys, "rounds"])


def summary(picked: pd.DataFrame, rows: str = "row", columns: str = "column") -> pd.DataFrame:
    """Table of picked numbers as text: the mean over seeds, and "± sd" (ddof 1) over several.

    `rows` and `columns` name the columns of `picked` whose values label the table's two sides.
    """

    def cell(values: pd.Series) -> str:
        deviation = f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else ""
        return f"{values.mean():.2f}" + deviation

    index, header = (list(dict.fromkeys(picked[side])) for side in (rows, columns))
    table = picked.groupby([rows, columns], sort=False).value.agg(cell).unstack(columns)
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
