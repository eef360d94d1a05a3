"""Metrics of class scores: equal to scikit-learn's over what models answer, for every client, method and executor."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import softmax
from sklearn import metrics as sk

from pfl_core import (
    Experiment,
    Federation,
    list_metrics,
    plot,
    register_metric,
    run,
    sweep,
    table,
    tune,
)
from pfl_core.analysis.select import pick
from pfl_core.engine import scoring, simulate, small
from pfl_core.engine.simulate import FINISH, Interrupted
from pfl_core.experiments.metrics import validated
from pfl_core.extras import flower
from pfl_core.methods.base import METHODS
from tests.core.methods.setting import OURS

NUMBERS = ("auc", "f1", "balanced_acc")
EVERY = (*NUMBERS, "confusion")
OWN = Experiment(
    dataset="own", model="mlp", rounds=2, lr=0.1, batch=8, dtype="float64", metrics=EVERY
)
WITH = {"pfedhn": {"lr": 0.01}, "fedfomo": {"holdout": 0.2}}  # what a method asks for


def labels(kind, n, g):
    if kind == "binary":
        return g.integers(0, 2, n)
    if kind == "imbalanced":
        return (g.random(n) < 0.1).astype(int)
    return g.integers(0, 4, n)


def own(kind="four", n=60, clients=5):
    """Clients with all classes, with one, with two, with one in training and none to test, and as the first."""
    g = np.random.default_rng(1)
    y = np.concatenate([labels(kind, n, g) for _ in range(clients)])
    y[n : 2 * n] = 1
    y[2 * n : 3 * n] %= 2
    x = (g.normal(size=(len(y), 6)) + y[:, None]).astype(np.float32)
    parts = [np.split(np.arange(k * n, (k + 1) * n), [n // 2, 2 * n // 3]) for k in range(clients)]
    test = [p[2] for p in parts]
    test[3] = test[3][:0]
    classes = 4 if kind == "four" else 2
    train, val = [p[0] for p in parts], [p[1] for p in parts]
    return Federation(x, y, train, val, test, classes=classes)


def by_hand(name, y, scores):
    """scikit-learn's number, NaN where it is undefined."""
    if name == "f1":
        return sk.f1_score(y, scores.argmax(1), average="macro")
    if name == "balanced_acc":
        own = np.unique(y)
        return sk.recall_score(y, scores.argmax(1), average="macro", labels=own)
    if len(set(y)) == 1:
        return np.nan
    p = softmax(scores, 1)
    if scores.shape[1] == 2:
        return sk.roc_auc_score(y, p[:, 1])
    return np.mean([sk.roc_auc_score(y == c, p[:, c]) for c in np.unique(y)])


def means(found, when="before", split="test", at=-1):
    rows = found.history
    rows = rows[(rows.when == when) & (rows.split == split) & (rows["average"] == "client")]
    return rows[rows["rounds"] == sorted(set(rows["rounds"]))[at]].set_index("metric").value


# -- values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("kind", ["many ties", "smooth", "one class", "one sample", "sure"])
@pytest.mark.parametrize("c", [2, 3, 7])
def test_each_number_is_that_of_scikit_learn(name, kind, c):
    g = np.random.default_rng(0)
    for n in (1,) if kind == "one sample" else (2, 5, 40):
        y = np.full(n, c - 1) if kind == "one class" else g.integers(0, c, n)
        scores = g.normal(size=(n, c)) * (30 if kind == "sure" else 1)
        scores = scores.round() if kind == "many ties" else scores
        got = scoring.functions([name])[0](y, scores)
        assert got == pytest.approx(by_hand(name, y, scores), abs=1e-12, nan_ok=True)


def test_all_classes_together_are_scikit_learns_one_against_the_rest():
    g = np.random.default_rng(0)
    y, p = np.arange(60) % 3, softmax(g.normal(size=(60, 3)), 1)
    assert scoring.auc(y, np.log(p)) == pytest.approx(sk.roc_auc_score(y, p, multi_class="ovr"))


@pytest.mark.parametrize("kind", ["binary", "imbalanced", "four"])
def test_clients_are_scored_by_their_own_models(kind, tmp_path):
    fed = own(kind)
    found = run(OWN.but(keep_models=True), fed=fed, store=tmp_path)
    end = found.clients[(found.clients["rounds"] == 2) & (found.clients.when == "before")]
    for split in ("val", "test"):
        mine = end[end.split == split].set_index("client")
        for k, at in enumerate(fed.index[split]):
            scores = found.personal(k).scores(fed.x[at]).numpy() if len(at) else np.zeros((0, 2))
            for name in NUMBERS:
                expected = by_hand(name, fed.y[at], scores) if len(at) else np.nan
                assert mine[name][k] == pytest.approx(expected, abs=1e-12, nan_ok=True), (name, k)
            if split == "test" and len(at):
                matrix = sk.confusion_matrix(fed.y[at], scores.argmax(1), labels=range(fed.classes))
                assert (found.confusion(k, when="before").to_numpy() == matrix).all()
        for name in NUMBERS:  # the mean over those for whom it is defined, and how many these are
            said = means(found, split=split)
            assert said[name] == pytest.approx(mine[name].mean())
            assert said[f"{name}_clients"] == mine[name].notna().sum() >= 2
    assert np.isnan(found.clients.query("client == 1").auc).all(), "it has one class"
    one = means(found)
    assert one["balanced_acc"] * 100 == pytest.approx(one["acc_balanced"])
    assert found.confusion().to_numpy().sum() == found.arrays["n/test"].sum()


@pytest.mark.parametrize("method", OURS)
def test_of_every_method_stored_scores_are_what_models_predict(method, tmp_path):
    fed = own()
    e = OWN.but(method=method, rounds=1, keep_models=True, keep_scores=True, **WITH.get(method, {}))
    found = run(e, fed=fed, store=tmp_path)
    given = found.predictions()
    assert given.client.value_counts().to_dict() == {0: 20, 1: 20, 2: 20, 4: 20}
    for k, mine in given.groupby("client"):
        assert (mine.sample_id == fed.index["test"][k]).all()
        assert (mine.label == fed.y[mine.sample_id]).all()
        x = fed.x[mine.sample_id]
        np.testing.assert_allclose(mine.filter(like="score_"), found.personal(k).scores(x), 1e-9)
        assert (mine.predicted == found.predict(k, x)).all()
        for name in NUMBERS:
            scores = mine.filter(like="score_").to_numpy()
            expected = by_hand(name, mine.label.to_numpy(), scores)
            got = found.arrays[f"before/test/{name}"][-1, k]
            assert got == pytest.approx(expected, abs=1e-12, nan_ok=True)


# -- what changes, and what does not -------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["threads", "batched"])
@pytest.mark.parametrize("finetune", [None, {"epochs": 2}])
def test_nothing_that_was_measured_changes(executor, finetune, tmp_path):
    fed, e = own(), OWN.but(dtype="float32", finetune=finetune)
    how = dict(fed=fed, device="cpu", executor=executor)
    bare = run(e.but(metrics=()), store=tmp_path / "bare", **how)
    full = run(e.but(keep_scores=True), store=tmp_path / "full", **how)
    for key, value in bare.arrays.items():
        np.testing.assert_array_equal(value, full.arrays[key])
    other = full.arrays.keys() - bare.arrays.keys()
    assert {k.rpartition("/")[2] for k in other} == {
        *EVERY,
        "scores",
        "client",
        "sample_id",
        "label",
    }
    assert full.setting == bare.setting, "they are replicates"


def test_executors_agree(tmp_path):
    one, other = (
        run(OWN, fed=own(), store=tmp_path / how, device="cpu", executor=how)
        for how in ("threads", "batched")
    )
    for key, value in one.arrays.items():
        np.testing.assert_allclose(value, other.arrays[key], 1e-9)


def test_many_small_clients_are_scored_alike(tmp_path, monkeypatch):
    few = run(OWN.but(keep_scores=True), fed=own(), store=tmp_path / "few")
    monkeypatch.setattr(small, "MANY", 1)
    monkeypatch.setattr(simulate, "EVALUATED_AT_ONCE", 2)  # in several parts, too
    many = run(OWN.but(keep_scores=True), fed=own(), store=tmp_path / "many")
    for key, value in few.arrays.items():
        np.testing.assert_allclose(value, many.arrays[key], 1e-9, err_msg=key)


@pytest.mark.parametrize("more", [{}, {"finetune": [{"epochs": 2}]}, {"eval_clients": 2}])
def test_a_run_that_was_stopped_ends_with_the_same(more, store):
    e, fed = OWN.but(rounds=4, participation=0.6, keep_scores=True, **more), own()
    whole = run(e, fed=fed, store=store.parent / "whole")
    for stop in (1, 3):
        with pytest.raises(Interrupted):
            run(e, fed=fed, store=store, on_round=lambda r, _, stop=stop: r == stop)
    parts = run(e, fed=fed, store=store)
    assert whole.arrays.keys() == parts.arrays.keys()
    for key, value in whole.arrays.items():
        np.testing.assert_array_equal(value, parts.arrays[key])
    of = fed.index["test"]
    who = whole.arrays["n/test"].nonzero()[0]
    assert (whole.predictions().sample_id == np.concatenate([of[k] for k in who])).all()


def test_what_is_kept_is_of_the_last_round(tmp_path):
    e, fed = OWN.but(rounds=5, eval_every=2, keep_scores=True), own()
    early = run(e, fed=fed, store=tmp_path, on_round=lambda r, _: FINISH if r == 3 else False)
    short = run(e.but(rounds=3), fed=fed, store=tmp_path / "short")
    assert early.experiment.rounds == 3 and early.id == short.id
    np.testing.assert_allclose(early.predictions(), short.predictions())
    longer = run(e, fed=fed, store=tmp_path)
    assert not np.allclose(longer.predictions(), short.predictions())


def test_fine_tuned_models_are_what_predict_uses(tmp_path):
    e, fed = OWN.but(finetune={"epochs": 2}, keep_models=True, keep_scores=True), own()
    found = run(e, fed=fed, store=tmp_path)
    for k, mine in found.predictions().groupby("client"):
        assert (mine.predicted == found.predict(k, fed.x[mine.sample_id])).all()
    assert not found.predictions().equals(found.predictions("before"))
    assert found.predictions().equals(found.predictions("tuned 2"))
    right = found.predictions("before").eval("label == predicted").sum()
    assert right == found.arrays["before/test/correct"][-1].sum()
    with pytest.raises(ValueError, match="when 'tuned 1' is unknown; .*before, after, tuned 2"):
        found.predictions("tuned 1")
    assert means(found, "tuned 1")["auc_clients"] == 3
    made = table(found, metric="auc", when="tuned 2", select="best_val")
    assert made.cells.value.item() == pytest.approx(means(found, "tuned 2")["auc"])
    assert "Test AUC over 3 of 5 clients" in made.caption and "tuned 2" in made.caption


def test_classes_have_their_names(tmp_path):
    fed = own("binary")
    named = Federation(
        *(fed.x, fed.y, *fed.index.values()),
        class_names=["ill", "well"],
        client_names=list("abcde"),
    )
    found = run(OWN.but(keep_scores=True), fed=named, store=tmp_path)
    assert set(found.predictions(names=True).label) == {"ill", "well"}
    assert {"score_ill", "score_well"} < set(found.predictions(names=True))
    assert list(found.confusion("b")) == list(found.confusion("b").index) == ["ill", "well"]
    assert found.confusion("b").loc["ill"].sum() == 0


# -- the id --------------------------------------------------------------------------------------------------------------


def test_metrics_are_in_the_id_as_probes_are():
    plain = Experiment()
    ids = {e.id for e in (plain, plain.but(metrics=("auc",)), plain.but(keep_scores=True))}
    assert len(ids) == 3 and plain.but(metrics=()).id == plain.id
    same = [("auc", "f1"), ["f1", "auc"], ("f1", "auc", "auc")]
    assert len({plain.but(metrics=given).id for given in same}) == 1


def test_the_code_of_a_metric_of_ones_own_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = "from pfl_core import register_metric\ndef share(y, scores):\n    return {}\n"
    text += "register_metric('share', share)\n"
    ids = []
    for name, value in (("my_share", "0.5"), ("my_share2", "0.25"), ("my_share3", "0.5  # half")):
        (tmp_path / f"{name}.py").write_text(text.format(value))
        e = Experiment(metrics=("share",), plugins=(name,))
        ids.append(e.id)
        assert e.modules == [name] and not e.in_main and "register_metric" in e.sources()
    assert len({*ids}) == 3  # the module's name is a part of it, as everywhere


def test_a_stored_run_is_read_where_its_metric_is_gone(tmp_path, home):
    register_metric("gone", lambda y, scores: 0.5)
    found = run(OWN.but(metrics=("gone",)), fed=own(), store=tmp_path)
    scoring._METRICS.pop("gone")
    stored = Experiment.read(found.experiment.plain())
    assert stored.metrics == ("gone",)
    with pytest.raises(ValueError, match="metric 'gone' is unknown"):
        stored.checked()


# -- metrics of one's own ------------------------------------------------------------------------------------------------


def brier_error(y, scores):
    """Mean squared error of probabilities."""
    scores[:] = softmax(scores, 1)  # its own copy
    scores[np.arange(len(y)), y] -= 1
    return torch.tensor((scores**2).sum(1).mean())


def rare(y, scores):
    return np.nan if len(set(y)) < 3 else 1


def test_metrics_of_ones_own(tmp_path):
    register_metric("brier_error", brier_error)
    register_metric("rare", rare, "1 for clients with three classes")
    assert list_metrics()["brier_error"] == "Mean squared error of probabilities."
    e = OWN.but(metrics=("brier_error", "rare", "auc"), keep_scores=True, rounds=3)
    found = run(e, fed=own(), store=tmp_path)
    for _, mine in found.predictions("before").groupby("client"):
        p = softmax(mine.filter(like="score_").to_numpy(), 1)
        onehot = np.eye(4)[mine.label]
        got = found.clients.query("rounds == 3 and when == 'before' and split == 'test'")
        got = got[got.client == mine.client.iloc[0]].brier_error.item()
        assert got == pytest.approx(((p - onehot) ** 2).sum(1).mean())
    assert means(found)["rare_clients"] == 2 and means(found)["rare"] == 1
    best = pick(found.rows, "best_val", metric="brier_error")
    val = found.history.query("when == 'before' and split == 'val' and metric == 'brier_error'")
    assert best["rounds"].item() == val.set_index("rounds").value.idxmin()
    other = run(e.but(lr=1e-4), fed=own(), store=tmp_path)
    assert table(found, other, metric="brier_error").cells.best.tolist() == [True, False]
    assert found.rows.value[found.rows.metric == "brier_error"].notna().all()


@pytest.mark.parametrize(
    "value, said",
    [
        (None, "it returned None; allowed is a finite number, or NaN"),
        ("0.5", "it returned '0.5'"),
        (np.ones(3), r"it returned array\(\[1., 1., 1.\]\)"),
        (np.inf, "it returned inf"),
        (1 / 3 + 1j, "it returned"),
    ],
)
def test_what_is_no_number_is_refused_before_training(value, said, tmp_path):
    register_metric("odd", lambda y, scores: value)
    told = []
    with pytest.raises(ValueError, match=rf"metric 'odd' of client 0: {said}"):
        run(
            OWN.but(metrics=("odd",)),
            fed=own(),
            store=tmp_path,
            on_round=lambda r, _: told.append(r),
        )
    assert told == []


def test_what_fails_or_draws_is_said(tmp_path):
    register_metric("fails", lambda y, scores: 1 / (len(set(y)) - 1))
    with pytest.raises(
        ValueError, match=r"'fails' of client 1: ZeroDivisionError.*return float\('nan'\)"
    ):
        run(OWN.but(metrics=("fails",)), fed=own(), store=tmp_path)
    register_metric("draws", lambda y, scores: np.random.rand())
    with pytest.raises(ValueError, match="metric 'draws': code of yours moved numpy's"):
        run(OWN.but(metrics=("draws",)), fed=own(), store=tmp_path)


@pytest.mark.parametrize(
    "name", ["auc", "loss", "acc_pct", "n", "two words", "auc_clients", "a/b", ""]
)
def test_names_that_are_taken(name):
    with pytest.raises(ValueError, match=r"register_metric\("):
        register_metric(name, lambda y, scores: 0.5)


def test_a_name_is_taken_by_each_column_that_results_have(tmp_path):
    found = run(OWN.but(metrics=(), finetune={"epochs": 1}), fed=own(), store=tmp_path)
    parts = {part for key in found.arrays for part in key.split("/")[2:]}
    for name in {*found.history.metric, *found.clients, *parts}:
        with pytest.raises(ValueError, match=r"register_metric\("):
            register_metric(name, lambda y, scores: 0.5)


def test_methods_and_metrics_have_no_names_in_common():
    assert not METHODS.keys() & list_metrics().keys()


# -- rows, tables, figures, tuning ---------------------------------------------------------------------------------------


def test_tables_say_over_how_many_clients(tmp_path):
    found = [run(OWN.but(seed=s), fed=own(), store=tmp_path) for s in (0, 1)]
    made = table(*found, metric="auc")
    assert made.caption.startswith("Test AUC over 3 of 5 clients, client mean, last round, before ")
    expected = np.mean([means(r)["auc"] for r in found])
    assert made.cells.value.item() == pytest.approx(expected) and made.digits == 3
    assert table(*found).digits == 2 and "clients," not in table(*found).caption
    with pytest.raises(ValueError, match="no auc of test data at when='before', average='pooled'"):
        table(*found, metric="auc", average="pooled")
    bare = run(OWN.but(metrics=(), seed=5), fed=own(), store=tmp_path)
    with pytest.raises(
        ValueError, match=r"metric 'auc' is unknown; .*run with Experiment\(metrics="
    ):
        table(bare, metric="auc")
    assert plot(*found, metric="auc").axes[0].get_ylabel() == "Test AUC"
    with pytest.raises(ValueError, match=r"metric 'f1' is unknown; .*metrics=\('f1',\)"):
        plot(bare, metric="f1")
    shown = found[0].summary().loc["before"]
    assert shown.auc_clients == 3 and shown.auc == round(means(found[0])["auc"], 4)


def test_a_metric_that_nobody_has_is_said(tmp_path):
    register_metric("never", lambda y, scores: np.nan)
    found = run(OWN.but(metrics=("never",)), fed=own(), store=tmp_path)
    for select in ("last", "last10", "best_val", "best_test"):
        with pytest.raises(ValueError, match="never is undefined for all clients"):
            table(found, metric="never", select=select)
    with pytest.raises(ValueError, match="undefined on the validation data of every client"):
        tune(OWN.but(metrics=("never",)), {"lr": [0.1]}, metric="never", fed=own(), store=tmp_path)


def test_a_round_in_which_nobody_has_it_is_not_replaced_by_another(tmp_path):
    register_metric("early", lambda y, scores: np.nan if np.ptp(scores) > 1.5 else 0.5)
    found = run(OWN.but(metrics=("early",), lr=1.0, rounds=6), fed=own(), store=tmp_path)
    assert means(found, at=0)["early_clients"] > 0 and means(found)["early_clients"] == 0
    for select, where in (("last", "the round"), ("last10", "one of the rounds")):
        with pytest.raises(ValueError, match=f"early is undefined for all clients in {where}"):
            pick(found.rows, select, metric="early")


def test_the_last_ten_evaluations_count_those_that_have_the_metric_in_each(tmp_path):
    register_metric("few", lambda y, scores: np.nan if np.ptp(scores) > 3.0 else 0.5)
    found = run(OWN.but(metrics=("few",), lr=0.01, rounds=14), fed=own(), store=tmp_path)
    at = found.history.query("when == 'before' and split == 'test' and metric == 'few_clients'")
    counts = at[at["rounds"] > 0].value.tail(10).astype(int)
    assert len(counts) == 10 and 0 < counts.min() < counts.max()
    said = table(found, metric="few", select="last10").caption
    assert f"over {counts.min()} to {counts.max()} of" in said


@pytest.mark.parametrize("select", ["best_val", "best_test"])
def test_a_metric_chooses_its_own_round(select, tmp_path):
    found = run(OWN.but(rounds=6, lr=0.3), fed=own(), store=tmp_path)
    split = select.removeprefix("best_")
    rows = found.history.query(f"when == 'before' and split == '{split}' and metric == 'auc'")
    best = rows.set_index("rounds").value.round(4).idxmax()
    got = pick(found.rows, select, metric="auc")
    assert got["rounds"].item() == best
    acc = pick(found.rows, select, metric="acc_worst10")["rounds"].item()
    assert acc == pick(found.rows, select)["rounds"].item(), "accuracy chooses for all others"


def test_tune_chooses_by_it(tmp_path):
    register_metric("brier_error", brier_error)
    e, grid = OWN.but(metrics=("auc", "brier_error", "confusion")), {"lr": [0.3, 1e-4, 0.01]}
    how = dict(fed=own(), store=tmp_path)
    for metric in ("auc", "brier_error"):
        best, rows = tune(e, grid, metric=metric, **how)
        found = validated(rows, ["row"], metric=metric)
        top = found.idxmin() if metric == "brier_error" else found.idxmax()
        assert top == f'{{"lr": {best.lr}}}'
        best, _ = tune(e, grid, metric=metric, seeds=(0, 1), keep=2, **how)
        assert top == f'{{"lr": {best.lr}}}'
    for metric in ("confusion", "f1", "loss"):
        with pytest.raises(ValueError, match=f"metric that chooses '{metric}' is unknown"):
            tune(e, grid, metric=metric, **how)


def test_rows_of_runs_with_and_without_stand_in_one_table(tmp_path):
    bare = run(OWN.but(metrics=(), method="fedper"), fed=own(), store=tmp_path)
    full = run(OWN, fed=own(), store=tmp_path)
    made = table(bare, full)
    assert made.cells.value.notna().all() and len(made.cells) == 2
    frame = pd.concat([bare.rows, full.rows])
    assert set(pick(frame, metric="auc").method) == {"fedavg"}


def test_what_lacks_them_says_what_to_do(tmp_path):
    found = run(OWN.but(metrics=()), fed=own(), store=tmp_path)
    with pytest.raises(ValueError, match="kept no class scores; run it with .*keep_scores=True"):
        found.predictions()
    with pytest.raises(ValueError, match=r"no confusion matrices; .*metrics=\('confusion',\)"):
        found.confusion()


def test_nodes_of_flower_are_refused_before_they_start(tmp_path):
    for changes in ({"metrics": ("auc",)}, {"keep_scores": True}):
        e = Experiment(clients=2, model="mlp", partition="iid", **changes)
        with pytest.raises(ValueError, match="leave metrics and keep_scores out"):
            flower.write_app(tmp_path / "app", e)
        with pytest.raises(ValueError, match="not over Flower; leave them out"):
            flower.serve(e, [flower.Client(e, k).about() for k in range(2)], None)
    assert not (tmp_path / "app").exists()


@pytest.mark.slow
def test_processes_know_the_metrics_of_a_plugin(tmp_path, monkeypatch, home):
    (tmp_path / "my_metrics.py").write_text(
        "from pfl_core import register_metric\n"
        "register_metric('half', half := lambda y, scores: 0.5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    e = Experiment(clients=2, model="mlp", rounds=1, partition="iid", max_samples=20)
    e = e.but(metrics=("half", "auc"), plugins=("my_metrics",))
    rows = sweep([e, e.but(seed=1)], jobs=2, device="cpu")
    assert set(rows[rows.metric == "half"].value) == {0.5}
    assert set(rows[rows.metric == "half_clients"].value) == {2}
