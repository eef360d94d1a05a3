"""What validation data choose, never by test data; and accuracy with all classes alike."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pfl_core import Experiment, load, run
from pfl_core.analysis.select import pick
from pfl_core.data.shifts import TRANSFORMS
from pfl_core.engine.engine import _balanced
from pfl_core.engine.simulate import Interrupted
from pfl_core.experiments import metrics
from pfl_core.experiments.build import federation
from pfl_core.experiments.metrics import validated
from pfl_core.experiments.tune import scores


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


# A tie, or nearly one, in the digits that are committed.
NEARLY = st.sampled_from([46.0, 46.00000000000001, 46.00004, 100 * 2 / 3, 66.6667])


@given(st.lists(NEARLY, min_size=8, max_size=8))
def test_store_and_committed_rows_choose_alike(values):
    cells = itertools.product("ab", (0, 1), (1, 2))
    lines = [
        dict(row=r, run=f"{r}{seed}", seed=seed, rounds=n, value=v)
        for (r, seed, n), v in zip(cells, values, strict=True)
    ]
    same = dict(when="before", average="client", metric="acc_pct", paper="", artefact="", column="")
    ours = pd.DataFrame(lines).assign(**same)
    ours = pd.concat([ours.assign(split=s) for s in ("val", "test")], ignore_index=True)
    kept = ours.round(4)
    for chosen in (
        lambda rows: validated(rows, ["row", "seed"]),
        scores,
        lambda rows: pick(rows, "best_val")["rounds"],
        lambda rows: metrics.summary(_with_spread(rows[rows.run == "a0"]))["round of best"],
    ):
        assert chosen(ours).tolist() == chosen(kept).tolist()


def _with_spread(rows):
    return pd.concat([rows.assign(metric=m) for m in ("acc_pct", "acc_worst10", "acc_sd")])


def test_without_validation_data_nothing_is_chosen():
    given = rows()
    assert validated(given[given.split == "test"], ["row"]).empty


# -- all classes alike

E = Experiment(
    partition="dirichlet_clients",
    partition_args={"alpha": 0.3},
    clients=5,
    model="mlp",
    model_args={"hidden": 8},
    rounds=3,
    lr=0.1,
    eval_clients=4,
    keep_models=True,
)


def by_hand(result, fed, k):
    at = fed.index["test"][k]
    y, right = fed.y[at], result.predict(k, fed.x[at]) == fed.y[at]
    return np.mean([right[y == c].mean() for c in np.unique(y)])


@pytest.mark.parametrize("how", [{}, {"finetune": {"epochs": 2}}])
@pytest.mark.parametrize("executor", ["threads", "batched"])
def test_balanced_accuracy_is_the_mean_over_a_clients_classes(store, how, executor):
    e = E.but(**how)
    result, fed = run(e, executor=executor), federation(e)
    when = "tuned 2" if how else "before"
    seen, n = result.arrays[f"{when}/test/balanced"][-1], result.arrays["n/test"]
    assert (n > 0).sum() == 4 and (seen[n == 0] == 0).all()
    for k in np.flatnonzero(n).tolist():
        assert seen[k] == pytest.approx(by_hand(result, fed, k))
    rows = result.rows[(result.rows.metric == "acc_balanced") & (result.rows.when == when)]
    assert set(rows.split) == {"test"} and set(rows["average"]) == {"client"}
    assert rows.value.iloc[-1] == pytest.approx(100 * seen[n > 0].mean())
    assert rows["rounds"].tolist() == ([3] if how else [0, 1, 2, 3])


def test_balanced_accuracy_of_unlike_clients():
    owner = np.array([0, 0, 0, 0, 2, 2, 2])
    y, right = np.array([5, 5, 5, 0, 1, 1, 1]), np.array([1, 1, 0, 0, 0, 1, 1.0])
    found = _balanced(owner, y, right, 4)
    np.testing.assert_allclose(found, [(2 / 3 + 0) / 2, 0, 2 / 3, 0])


def test_a_checkpoint_from_before_it_was_measured_goes_on(store):
    e = E.but(keep_models=False)
    with pytest.raises(Interrupted):
        run(e, on_round=lambda r, h: r == 1)
    path = store / f"{e.id}.part" / "checkpoint.pt"
    whole = torch.load(path, weights_only=True)
    whole["history"]["evals"] = {
        n: v for n, v in whole["history"]["evals"].items() if "balanced" not in n
    }
    torch.save(whole, path)
    began = []
    result = run(e, on_round=lambda r, h: began.append(r))
    rows = result.history[result.history.metric == "acc_balanced"]
    assert began[0] == 2 and rows["rounds"].unique().tolist() == [2, 3]
    assert not result.history.value.isna().any()
    assert result.history[result.history.metric == "acc_pct"]["rounds"].nunique() == 4


SHIFTS = {"relabel": [0, 3], "transform": ["none", "turn90", "invert"]}


@pytest.mark.parametrize("names", [[], ["relabel"], ["transform"], ["relabel", "transform"]])
def test_predictions_say_where_in_the_data_a_sample_is(names, store):
    shifted = {n: SHIFTS[n] for n in names}
    e = Experiment(clients=3, model="mlp", rounds=2, max_samples=20, lr=0.1)
    e = e.but(partition_args=shifted, keep_models=True, keep_scores=True)
    result, pool = run(e, store=store), load("digits")
    found = result.predictions()
    for k in range(3):
        mine = found[found.client == k]
        turned = TRANSFORMS[shifted.get("transform", ["none"] * 3)[k]]
        x = turned(pool.x[mine.sample_id.to_numpy()][..., None])[..., 0]
        assert (result.predict(k, x) == mine.predicted).all()
        added = shifted.get("relabel", [0])[k % len(shifted.get("relabel", [0]))]
        assert ((pool.y[mine.sample_id] + added) % 10 == mine.label).all()
