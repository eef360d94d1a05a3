"""Which number of a run is reported: named rules, and their table."""

from __future__ import annotations

import pandas as pd

from pfl_core.util import checks

SELECT = ("last", "last10", "best_val", "best_test")


def pick(
    rows: pd.DataFrame, select: str = "last", when: str = "before", mean: str = "client", metric: str = "acc_pct"
) -> pd.DataFrame:
    """One number a run: `metric` on the test split by a named rule; adds nothing, drops all other rows.

    select: "last" round, mean of the "last10" evaluations, round of "best_val" (first best), or "best_test" (optimistic: test data choose).
    Raises ValueError for another rule, and for "best_val" where a run has no validation data.
    """
    checks.known("select", select, SELECT)
    series = rows[(rows.when == when) & (rows["mean"] == mean) & (rows.metric == metric)]
    series = series.sort_values("round", kind="stable", ignore_index=True)
    test, val = series[series.split == "test"], series[series.split == "val"]
    keys = ["run", "paper", "artefact", "row", "column"]
    if select == "last10":
        tail = test.groupby(keys, sort=False).tail(10)
        means = tail.groupby(keys, sort=False).value.transform("mean")
        return tail.assign(value=means).groupby(keys, sort=False).tail(1)
    if select == "last":
        return test.groupby(keys, sort=False).tail(1)
    chooser = val if select == "best_val" else test
    if len(blind := test[~test.run.isin(chooser.run)]):
        names = ", ".join(dict.fromkeys(blind.row))
        raise ValueError(f"select='best_val' needs validation data, and these rows have none: {names}; use 'last'")
    best = chooser.loc[chooser.groupby(keys, sort=False).value.idxmax()]
    return test.merge(best[[*keys, "round"]], on=[*keys, "round"])


def summary(picked: pd.DataFrame, rows: str = "row", columns: str = "column") -> pd.DataFrame:
    """Mean (and sd over n seeds, ddof 1) of picked numbers as text, a row x column table."""

    def cell(v: pd.Series) -> str:
        return f"{v.mean():.2f}" + (f" ± {v.std(ddof=1):.2f}" if len(v) > 1 else "")

    order = [list(dict.fromkeys(picked[c])) for c in (rows, columns)]
    table = picked.groupby([rows, columns], sort=False).value.agg(cell).unstack(columns)
    return table.reindex(index=order[0], columns=order[1]).fillna("not run")
