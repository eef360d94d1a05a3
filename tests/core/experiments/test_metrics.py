"""What validation data choose: the best round or the last one, and never by test data."""

import pandas as pd
import pytest

from pfl_core.experiments.metrics import validated


def rows():
    """Two choices: a is best on the way, b at the end; test data say the opposite of each."""
    curves = {"a": (10.0, 80.0, 50.0), "b": (10.0, 60.0, 70.0)}
    made = [
        dict(row=r, rounds=n, split=split, when=when, average=average, metric="acc_pct", value=v)
        for r, curve in curves.items()
        for n, value in enumerate(curve)
        for average in ("client", "pooled")
        for when, more in (("before", 0.0), ("after", 5.0 if r == "b" else -5.0))
        for split, v in (("val", value + more), ("test", 100 - value))
    ]
    return pd.DataFrame(made).iloc[::-1].reset_index(drop=True)


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        (dict(), {"a": 80, "b": 70}),
        (dict(last=True), {"a": 50, "b": 70}),
        (dict(when="after"), {"a": 75, "b": 75}),
        (dict(when=None), {"a": 80, "b": 75}),
    ],
)
def test_what_validation_says(how, wanted):
    given = rows()
    given.loc[given["average"] == "pooled", "value"] += 100
    assert validated(given, ["row"], **how).to_dict() == wanted


def test_without_validation_data_nothing_is_chosen():
    given = rows()
    assert validated(given[given.split == "test"], ["row"]).empty
