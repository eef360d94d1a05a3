"""Who answers and how far each trains: by (seed, round, client), of every method, on every executor."""

import copy
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pfl_core import Experiment, run
from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.engine.participation import answers, evaluates_after, paces, sample, visits
from pfl_core.engine.simulate import FINISH, Interrupted, simulate
from pfl_core.experiments import build
from tests.core.methods.setting import CONFIG, OURS, assert_same, client_data, leaves, setup, under

UNSTEADY = dict(client_dropout=0.4, stragglers=0.5, seed=3)
OWN = Experiment(clients=5, model="mlp", rounds=4, batch=8, max_samples=24, client_dropout=0.5)


def who(config, k, round):
    asked = sample(config, k, round)
    return asked[answers(config, asked, round)].tolist()


def test_the_draws():
    config = replace(CONFIG, client_dropout=0.3, stragglers=0.25)
    asked = torch.arange(300)
    there = torch.stack([answers(config, asked, r) for r in range(20)])
    assert abs(float(there.double().mean()) - 0.7) < 0.02
    assert len({int(n) for n in there.sum(1)}) > 5, "the number of answers varies"
    some = torch.tensor([7, 100, 299])
    assert torch.equal(answers(config, some, 3), there[3][some]), "whoever is asked beside them"
    assert not torch.equal(there[3], there[4])
    assert not torch.equal(there[3], answers(replace(config, seed=1), asked, 3))
    part = np.array(paces(config, range(4000), 1))
    assert (
        abs((part < 1).mean() - 0.25) < 0.03 and paces(config, [7, 9], 1) == part[[7, 9]].tolist()
    )
    steps = Counter(1 + int(p * 4) for p in part[part < 1])
    assert set(steps) == {1, 2, 3, 4} and min(steps.values()) > 0.8 * max(steps.values())


def test_without_them_all_answer_and_train_whole():
    assert answers(CONFIG, torch.arange(50), 2).all() and paces(CONFIG, range(50), 2) == []
    assert answers(replace(CONFIG, participation=0.1), torch.arange(50), 2).all()
    e = Experiment(client_dropout=0, stragglers=0.0)
    assert e.id_for("data") == Experiment().id_for("data")
    assert evaluates_after(CONFIG, 4) and not evaluates_after(
        replace(CONFIG, eval_after=None, client_dropout=0.1), 4
    )


@given(
    k=st.integers(1, 6),
    half=st.integers(1, 12),  # of a client: how many that are asked to take part
    after=st.sampled_from([None, True, False]),
    every=st.integers(1, 3),
)
def test_visits_are_those_that_are_made(k, half, after, every):
    shape = dict(clients=k, model="mlp", partition="iid", max_samples=6, steps=1, rounds=3)
    e = Experiment(**shape, participation=min(1, half / 2 / k), eval_after=after, eval_every=every)
    made, train = [], Context.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Context, "train", lambda ctx, *a, **kw: made.extend(ctx.sel) or train(ctx, *a, **kw)
        )
        data = build.client_data(e)
        simulate(build.build_method(e, data), data)
    assert visits(build.train_config(e), k) == len(made)


@pytest.mark.parametrize("name", OURS)
def test_executors_agree_and_a_stopped_run_goes_on(name, tmp_path):
    method, data = setup(name, **UNSTEADY)
    whole = simulate(method, data, executor="threads", workers=2)
    stacked = simulate(method, data, executor="batched")
    assert_same(whole.state, stacked.state, exact=False)
    expected = {r: who(method.task.config, 4, r) for r in range(3)}
    assert whole.history.answered == stacked.history.answered == expected
    assert {len(ids) for ids in expected.values()} - {4}, "some do not answer"
    for path, v in leaves(whole.state):
        assert not v.is_floating_point() or torch.isfinite(v).all(), path
    file = tmp_path / "checkpoint.pt"
    with pytest.raises(Interrupted):
        simulate(method, data, workers=1, checkpoint=file, on_round=lambda r, h: r == 1)
    resumed = simulate(method, data, workers=1, checkpoint=file)
    assert_same(whole.state, resumed.state)
    assert resumed.history.answered == expected
    for n in ("download", "upload", "visits"):
        assert getattr(resumed.history, n) == getattr(whole.history, n), n


@pytest.mark.parametrize("name", OURS)
def test_who_does_not_answer_keeps_its_state_and_gives_nothing(name):
    method, data = setup(name, **UNSTEADY)
    start, *_ = simulate(method, data, workers=1, on_round=lambda r, h: FINISH if r == 1 else None)
    before = copy.deepcopy(start)
    there = who(method.task.config, 4, 1)
    assert 0 < len(there) < 4
    lost = [k for k in range(4) if k not in there]
    one = under(method, rounds=2)
    after = simulate(one, data, workers=1, state=copy.deepcopy(start)).state
    for n, v in after.clients.items():
        assert torch.equal(v[lost], before.clients[n][lost]), n
    # Other samples at those who do not answer change nothing of what anybody has.
    other = client_data()
    at = torch.as_tensor(np.concatenate([other.index["train"][k] for k in lost]))
    other.x[at] = 3 - 2 * other.x[at]
    assert_same(simulate(one, other, workers=1, state=copy.deepcopy(start)).state, after)


@pytest.mark.parametrize("name", OURS)
def test_a_round_without_answers_changes_nothing(name):
    method, data = setup(name, client_dropout=0.98, rounds=1)
    assert who(method.task.config, 4, 0) == []
    first = simulate(under(method, rounds=0), data, workers=1).state
    state, history, *_ = simulate(method, data, workers=1)
    assert_same(state, first)
    assert (state.round, history.answered) == (1, {0: []})
    assert (history.upload, history.visits) == ([0, 0], [0, 0])
    full, _ = setup(name, rounds=1)
    everyone = simulate(full, data, workers=1).history
    assert history.download == everyone.download, "the model was sent all the same"


def test_traffic_counts_what_is_sent_and_who_answers():
    method, data = setup("fedavg", client_dropout=0.5, rounds=6, eval_after=False)
    history = simulate(method, data, workers=1).history
    size = sum(v.numel() for n, v in method.task.initial.items() if n in method.task.parameters)
    many = np.cumsum([0, *(len(who(method.task.config, 4, r)) for r in range(6))])
    assert history.visits == many.tolist() and history.upload == (many * size).tolist()
    assert history.download == [r * 4 * size for r in range(7)]


@pytest.mark.parametrize("executor", ["threads", "batched"])
def test_a_straggler_makes_the_first_of_its_steps(executor):
    method, data = setup("fedavg", stragglers=1.0, epochs=3)
    whole, _ = setup("fedavg", epochs=3)
    state, sel = method.init(), torch.arange(4)
    pace = paces(method.task.config, range(4), 1)
    with torch.no_grad():
        slow = method.local(
            Context(Engine(method, data, executor, 1), state, sel, 1, None, pace),
            method.begin(state, sel),
        )
        done = []
        for k, part in enumerate(pace):
            c = Context(Engine(whole, data, executor, 1), state, torch.tensor([k]), 1)
            total = len(data.batch_indices(k, 1, batch=6, epochs=3))
            done.append((1 + int(part * total), total))
            alone = c.train(whole.loss, whole.begin(state, c.sel), steps=done[-1][0])
            for n in method.task.names:
                torch.testing.assert_close(slow[n][k], alone[n][0], msg=n)
    assert any(n < total for n, total in done)


def test_evaluation_and_fine_tuning_know_no_stragglers():
    tuned = dict(rounds=0, finetune=[{"epochs": 2}])
    found = [
        simulate(method, data, workers=1)
        for method, data in (
            setup("perfedavg", **tuned),
            setup("perfedavg", stragglers=1.0, **tuned),
        )
    ]
    assert all(torch.equal(v, found[1].tuned[n]) for n, v in found[0].tuned.items())
    for key, series in found[0].history.evals.items():
        assert torch.equal(series[0], found[1].history.evals[key][0]), key


@pytest.mark.parametrize("participation", [0.5, 1.0])
@pytest.mark.parametrize("fails", [dict(stragglers=1.0), dict(stragglers=0.5, client_dropout=0.4)])
def test_the_last_evaluation_is_as_that_of_any_round(fails, participation, tmp_path):
    """Equal in a longer run, and in one that ends there by "finish", which has the same id."""
    e = Experiment(model="mlp", clients=4, rounds=4, max_samples=40, batch=5, epochs=3, lr=0.1)
    e = e.but(participation=participation, eval_after=True, **fails)
    short, long = run(e.but(rounds=2), store=tmp_path / "a"), run(e, store=tmp_path / "b")
    end = run(e, store=tmp_path / "c", on_round=lambda r, h: "finish" if r == 2 else None)
    assert end.id == short.id
    for name, series in short.arrays.items():
        if name.startswith("after/"):
            assert np.array_equal(series, end.arrays[name]), name
            np.testing.assert_allclose(series[2], long.arrays[name][2], rtol=1e-5)


def test_a_result_says_who_answered(tmp_path):
    result = run(OWN, store=tmp_path, device="cpu")
    config = replace(CONFIG, participation=1.0, client_dropout=0.5)
    expected = [[r, k] for r in range(4) for k in who(config, 5, r)]
    assert result.arrays["answered"].tolist() == expected
    visits = result.rows[result.rows.metric == "client_visits"].value
    assert visits.iloc[-1] == len(expected) < 20
    assert set(result.rows.when) == {"", "before"}, "not all train in every round"
    plain = run(OWN.but(client_dropout=0.0), store=tmp_path, device="cpu")
    assert plain.id != result.id and "answered" not in plain.arrays
