"""Fine-tuning of the served models: what it trains, that nobody learns from it, and how its rows are named."""

import json
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pfl_core import Experiment, Federation, register_model, run, tune
from pfl_core.__main__ import value
from pfl_core.analysis.select import pick
from pfl_core.engine import simulate
from pfl_core.engine.finetune import Tuning
from pfl_core.experiments import metrics
from pfl_core.experiments.build import client_data
from pfl_core.methods.base import METHODS, Method
from pfl_papers.evidence import form
from pfl_papers.papers import presets
from tests.core.experiments.setting import same

TINY = Experiment(
    clients=3, model="mlp", rounds=2, max_samples=30, batch=8, lr=0.1, dtype="float64"
)
BN = dict(model="lenet", model_args={"bn": True, "kernels": 2})
LP_FT = [{"epochs": 2, "lr": 0.2, "only": "head"}, {"epochs": 1, "lr": 0.02}]
OURS = sorted(n for n, c in METHODS.items() if c.__module__.startswith("pfl_core."))


def of_method(name):
    return TINY.but(method=name, rounds=1, holdout=0.2, **BN)


def right(result, when):
    return result.arrays[f"{when}/test/correct"][-1], result.arrays[f"{when}/test/loss"][-1]


def without_tuned(arrays):
    return {n: v for n, v in arrays.items() if not n.startswith("tuned")}


# ---------------------------------------------------------------- what it is


def test_one_epoch_of_fedavg_is_its_local_training():
    result = run(TINY.but(finetune={"epochs": 1}, **BN))
    np.testing.assert_array_equal(right(result, "tuned 1"), right(result, "after"))


def test_local_goes_on_as_in_later_rounds():
    tuned = run(TINY.but(method="local", finetune={"epochs": 3}, **BN))
    longer = run(TINY.but(method="local", rounds=5, **BN))
    for e in (1, 2, 3):
        for metric in ("correct", "loss"):
            np.testing.assert_array_equal(
                tuned.arrays[f"tuned {e}/test/{metric}"][0],
                longer.arrays[f"before/test/{metric}"][2 + e],
            )


def test_dropout_draws_as_in_local_training():
    def dropping(input_shape, classes):
        return nn.Sequential(
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(math.prod(input_shape), classes)
        )

    register_model("dropping_tuned", dropping)
    e = TINY.but(model="dropping_tuned", finetune={"epochs": 2}, participation=0.7)
    result = run(e.but(eval_after=True))
    np.testing.assert_array_equal(right(result, "tuned 1"), right(result, "after"))


def plain_loop(e, net, k, lr, stages):
    """torch's own SGD, on the batches of the rounds after the last one; BatchNorm still for a head."""
    data, at = client_data(e), e.rounds
    for stage in stages:
        head = stage.get("only") == "head"
        trained = list((net.fc if head else net).parameters())
        if stage.get("only") == "body":
            trained = [p for p in trained if all(p is not q for q in net.fc.parameters())]
        how = dict(lr=stage.get("lr", lr), momentum=e.momentum, weight_decay=e.weight_decay)
        sgd = torch.optim.SGD(trained, **how)
        net.train(not head)
        for _ in range(stage["epochs"]):
            for batch in data.batch_indices(k, at, batch=e.batch):
                x, y = data.batch(torch.as_tensor(batch[0]))
                sgd.zero_grad()
                F.cross_entropy(net(x), y).backward()
                sgd.step()
            at += 1
    return net.eval()


@pytest.mark.parametrize("executor", ["threads", "batched"])
@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedbabu"])
def test_it_is_what_a_plain_loop_makes_of_what_was_served(method, executor, store):
    e = TINY.but(method=method, momentum=0.9, weight_decay=0.01, keep_models=True, **BN)
    stages = [*LP_FT, {"epochs": 1, "only": "body"}]
    served, tuned = run(e), run(e.but(finetune=stages), executor=executor, store=store)
    for k in range(3):
        net = plain_loop(e, served.model(k), k, e.lr, stages).state_dict()
        for name, v in tuned.model(k).state_dict().items():
            torch.testing.assert_close(v, net[name], rtol=1e-9, atol=1e-11, msg=name)


def test_a_head_alone_leaves_all_else_as_it_was_served():
    e = TINY.but(keep_models=True, **BN)
    served, tuned = run(e), run(e.but(finetune={"epochs": 2, "only": "head"}))
    for k in range(3):
        before, after = served.model(k).state_dict(), tuned.model(k).state_dict()
        moved = {n for n in before if not torch.equal(before[n], after[n])}
        assert moved == {"fc.weight", "fc.bias"}


def test_a_body_alone_leaves_the_head_as_it_was_served():
    e = TINY.but(keep_models=True, **BN)
    served, tuned = run(e), run(e.but(finetune={"epochs": 2, "only": "body"}))
    for k in range(3):
        before, after = served.model(k).state_dict(), tuned.model(k).state_dict()
        still = {n for n in before if torch.equal(before[n], after[n])}
        assert {"fc.weight", "fc.bias"} == still - {"conv1.bias", "conv2.bias"}


def test_lp_ft_is_fedavg_and_without_its_first_stage_its_local_training():  # R25
    e = TINY.but(rounds=2, epochs=1, **BN)
    row = e.but(**presets.COMPARED["lpft"](e))
    probing, tuning = row.finetune
    assert row.but(finetune=None).id == e.id and row.finetune == presets.FINETUNED["lpft"]
    assert probing["only"] == "head" and probing["epochs"] + tuning["epochs"] == 15
    alone = run(row.but(finetune=[probing | {"epochs": 0}, {"epochs": 1}]))
    np.testing.assert_array_equal(right(alone, "tuned 1"), right(run(e), "after"))


# ---------------------------------------------------------------- every method, every executor


@pytest.mark.parametrize("method", OURS)
def test_nobody_learns_from_it_and_executors_agree(method):
    e = of_method(method)
    one = run(e)
    two = run(e.but(finetune=LP_FT), executor="threads")
    other = run(e.but(finetune=LP_FT), executor="batched", recompute=True)
    alike = without_tuned(two.arrays)
    assert alike.keys() == one.arrays.keys()
    for name, v in one.arrays.items():
        np.testing.assert_array_equal(v, alike[name], err_msg=name)
    was, now = (r.history[~r.history.metric.eq("train_s")] for r in (one, two))
    now = now[~now.when.str.startswith("tuned")]  # traffic and visits, too, are those of before
    assert was.values.tolist() == now.values.tolist()
    for moment in ("tuned 1", "tuned 2", "tuned 3"):
        np.testing.assert_allclose(right(two, moment), right(other, moment), rtol=1e-9)
    assert right(two, "tuned 3")[1].sum() != right(two, "tuned 2")[1].sum()


# ---------------------------------------------------------------- how it is said, and named


@pytest.mark.parametrize("only", ["all", "body", "head"])
@pytest.mark.parametrize("method", OURS)
def test_what_is_trained_answers_or_is_refused(method, only):
    e = of_method(method).but(eval_after=False, finetune={"epochs": 1, "only": only})
    if (method, only) == ("fedproto", "head"):  # prototypes answer
        with pytest.raises(ValueError, match="finetune of the head only"):
            run(e)
    else:
        result = run(e)
        assert (right(result, "tuned 1")[1] != right(result, "before")[1]).all()


def test_ids():
    for none in (None, [], (), {"epochs": 0}, [{"epochs": 0, "only": "head"}]):
        assert TINY.but(finetune=none).id == TINY.id
    ids = {
        TINY.but(finetune=same_thing).id
        for same_thing in (
            {"epochs": 2},
            [{"epochs": 2}],
            ({"epochs": np.int64(2), "lr": None},),
            {"epochs": 2, "lr": 0.1, "only": "all"},
            [{"epochs": 2}, {"epochs": 0, "lr": 9}],
        )
    }
    assert len(ids) == 1 and TINY.id not in ids
    others = [{"epochs": 3}, {"epochs": 2, "lr": 1}, {"epochs": 2, "only": "head"}, LP_FT]
    assert len({TINY.but(finetune=f).id for f in others} | ids) == 5
    assert TINY.but(finetune=LP_FT).finetune == LP_FT
    assert Experiment.from_plain(TINY.but(finetune=LP_FT).plain()).id == TINY.but(finetune=LP_FT).id


def test_words_of_a_command_line():
    assert TINY.but(finetune=value("finetune", "epochs=2,only=head")).finetune == [
        {"epochs": 2, "only": "head"}
    ]
    assert TINY.but(finetune=value("finetune", json.dumps(LP_FT))).finetune == LP_FT


def test_rows_say_the_epoch_at_the_last_round():
    e = TINY.but(finetune=LP_FT, partition_args={"split": "70/10/20"}, eval_every=2)
    result = run(e)
    rows = result.rows[result.rows.when.str.startswith("tuned")]
    assert rows.when.unique().tolist() == ["tuned 1", "tuned 2", "tuned 3"]
    assert set(rows["rounds"]) == {2} and set(rows.split) == {"val", "test"}
    last = pick(result.rows, when="tuned 3")
    assert last.value.round(2).tolist() == [result.summary().loc["tuned 3", "last round"]]
    assert pick(result.rows, "best_val", "tuned 2")["rounds"].tolist() == [2]
    clients = result.clients[result.clients.when == "tuned 2"]
    assert set(clients["rounds"]) == {2} and len(clients) == 6
    found = metrics.accuracies(result.arrays, "tuned 3", 2)
    assert found.acc_pct.mean() == pytest.approx(last.value.iloc[0])
    assert list(run(e).arrays) == list(result.arrays)  # read again


def test_published_counts_come_back():
    result = run(TINY.but(finetune=LP_FT))
    counts = form.counts(result.arrays)
    back = form.arrays(counts.assign(rounds=counts["rounds"]), result.arrays["rounds"])
    for name, v in back.items():
        if not name.startswith("n/"):
            np.testing.assert_array_equal(v, result.arrays[name])
    assert {"tuned 1/test/correct", "tuned 3/test/correct"} <= back.keys()


def test_it_is_tuned_on_validation_data():
    e = TINY.but(partition_args={"split": "70/10/20"})
    choices = {"finetune": [{"epochs": 2, "lr": 0.0}, {"epochs": 3, "lr": 0.1}]}
    best, rows = tune(e, choices, when="tuned 2")
    assert best.finetune == [{"epochs": 3, "lr": 0.1}] and rows.row.nunique() == 2
    with pytest.raises(ValueError, match="when 'tuned 3' is unknown"):
        tune(e, choices, when="tuned 3")


# ---------------------------------------------------------------- stopped, continued, kept


def interrupted(monkeypatch):
    whole = Tuning.epochs

    def epochs(self, *args):
        yield next(whole(self, *args))
        raise KeyboardInterrupt

    return monkeypatch.setattr(Tuning, "epochs", epochs)


def no_rounds(monkeypatch):
    def upload(*args):
        raise AssertionError("a round was trained again")

    monkeypatch.setattr(simulate._Run, "_upload", upload)


def test_interrupted_it_begins_anew_and_no_round_does(store, monkeypatch):
    e = TINY.but(finetune=LP_FT, keep_models=True)
    whole = run(e, store=store / "whole")
    with monkeypatch.context() as patch:
        interrupted(patch)
        with pytest.raises(KeyboardInterrupt) as error:
            run(e, store=store)
    assert "2 of 2 rounds are kept" in error.value.__notes__[0]
    no_rounds(monkeypatch)
    same(run(e, store=store), whole)


def test_it_goes_on_from_the_end_of_a_run_without_it(store, monkeypatch):
    run(TINY, store=store, keep_state=True)
    whole = run(TINY.but(finetune=LP_FT), store=store / "whole")
    no_rounds(monkeypatch)
    same(run(TINY.but(finetune=LP_FT), store=store), whole)


def test_it_goes_on_from_rounds_whose_fine_tuning_diverged(store, monkeypatch):
    broken = run(
        TINY.but(finetune=[*LP_FT, {"epochs": 2, "lr": 1e200}]), store=store, keep_state=True
    )
    assert not broken.ok
    whole = run(TINY.but(finetune=LP_FT), store=store / "whole")
    no_rounds(monkeypatch)
    same(run(TINY.but(finetune=LP_FT), store=store), whole)


def test_no_run_goes_on_from_rounds_that_diverged(store):
    assert not run(TINY.but(lr=1e200), store=store, keep_state=True).ok
    assert not list(store.rglob("state.pt"))


def test_a_stored_run_without_its_end_says_so(store):
    run(TINY, store=store)
    with pytest.warns(UserWarning, match="keep_state: .* recompute=True"):
        run(TINY, store=store, keep_state=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for again in (True, False):
            run(TINY, store=store, keep_state=True, recompute=again)


def test_a_longer_run_goes_on_from_before_it(store):
    e = TINY.but(finetune=LP_FT)
    run(e, store=store, keep_state=True)
    longer = run(e.but(rounds=4), store=store)
    same(longer, run(e.but(rounds=4), store=store / "whole"))


def test_a_run_that_ends_early_is_fine_tuned(store):
    e = TINY.but(finetune={"epochs": 2})
    told = lambda r, history: "finish" if r == 2 else None  # noqa: E731
    early = run(e.but(rounds=5), store=store, on_round=told)
    assert early.id == e.id
    same(early, run(e, store=store / "whole"))


@pytest.mark.parametrize("method", ["fedavg", "fedcp", "gpfl", "feddbe", "pfedhn"])
def test_kept_models_are_the_tuned_ones(method, tmp_path):
    e = of_method(method).but(finetune=LP_FT, keep_models=True, eval_clients=2)
    result, data = run(e), client_data(e)
    counted = []
    for k in range(3):
        x, y = (v[data.index["test"][k]] for v in (data.federation.x, data.federation.y))
        counted.append((result.predict(k, x) == y).sum())
    n = result.arrays["n/test"] > 0
    np.testing.assert_array_equal(np.array(counted)[n], right(result, "tuned 3")[0][n])
    assert n.sum() == 2
    result.save(0, tmp_path / "model.pt")


def test_many_clients_are_tuned_in_parts(monkeypatch, store):
    e = TINY.but(finetune=LP_FT)
    whole = run(e, store=store)
    monkeypatch.setattr(simulate, "EVALUATED_AT_ONCE", 1)
    same(run(e, store=store / "parts"), whole)


def test_where_it_diverges_the_rounds_are_kept():
    result = run(TINY.but(finetune=[{"epochs": 1}, {"epochs": 2, "lr": 1e200}]))
    assert not result.ok and "in epoch 2 of fine-tuning" in result.meta["status"]
    assert result.arrays["rounds"].tolist() == [0, 1, 2]
    assert [m for m in result.history.when.unique() if m.startswith("tuned")] == ["tuned 1"]


# ---------------------------------------------------------------- what is refused


def test_a_source_is_not_fine_tuned():
    with pytest.raises(ValueError, match="finetune=None"):
        TINY.but(init_from=TINY.but(finetune=LP_FT))


def test_a_network_without_a_head_or_a_body_is_refused():
    for depth, stages in ((0, LP_FT), (2, {"epochs": 1, "only": "body"})):
        with pytest.raises(ValueError, match="needs a (head|body) that can be trained: give"):
            run(TINY.but(head_depth=depth, finetune=stages, rounds=0))
    nothing = {"epochs": 0, "only": "body"}
    assert run(TINY.but(head_depth=2, finetune=nothing, rounds=0)).ok


def test_a_method_that_serves_no_parameter_is_refused():
    class Renaming(Method):
        """Serves its model under names of its own."""

        name = "renaming"

        def serve(self, p):
            return {f"mine.{n}": v for n, v in p.items()}

        def logits(self, p, x):
            return self.task.apply({n.removeprefix("mine."): v for n, v in p.items()}, x)

    try:
        assert run(TINY.but(method="renaming", rounds=1)).ok
        with pytest.raises(ValueError, match="fine-tuning trains parameters of the network"):
            run(TINY.but(method="renaming", rounds=1, finetune={"epochs": 1}))
    finally:
        del METHODS["renaming"]


def test_own_data_are_tuned_on():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)).astype(np.float32), rng.integers(0, 2, 60)
    parts = np.split(np.arange(60), 6)
    fed = Federation(x, y, train=parts[:3], test=parts[3:])
    e = Experiment(dataset="own", model="mlp", rounds=1, finetune={"epochs": 2})
    assert run(e, fed=fed).history.when.unique().tolist() == [
        *("before", "after", "tuned 1", "tuned 2"),
        "",
    ]
