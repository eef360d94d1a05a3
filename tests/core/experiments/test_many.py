"""Very many small clients: evaluation in parts, what is said before training, kill and resume."""

import multiprocessing
import os
import signal
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pfl_core import models
from pfl_core.data import schemes
from pfl_core.data.dealing import assign, label_counts
from pfl_core.data.federation import Federation
from pfl_core.data.partition import partition
from pfl_core.engine import pairs, small
from pfl_core.engine import simulate as rounds
from pfl_core.engine.engine import Engine, automatic
from pfl_core.engine.simulate import simulate
from pfl_core.experiments.build import build_method, client_data, train_config
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.run import run
from pfl_core.methods.base import make_method
from pfl_core.methods.task import Task

pytestmark = pytest.mark.slow

SMALL = Experiment(
    clients=120,
    partition="dirichlet",
    partition_args={"alpha": 1.0, "least": 3, "fallback_least": 2, "split": "60/40"},
    model="mlp",
    participation=0.1,
    batch=4,
    rounds=2,
    dtype="float64",
)


def bound(**changes):
    data = client_data(e := SMALL.but(**changes))
    return build_method(e, data), data


@pytest.mark.parametrize("model", ["mlp", "lenet", "cnn_bn"])
def test_stacked_evaluation_equals_client_by_client(model, monkeypatch):
    method, data = bound(model=model, method="local", clients=40)
    p = method.init().clients
    torch.manual_seed(0)
    p = {n: v + 0.1 * torch.rand_like(v) if v.is_floating_point() else v for n, v in p.items()}
    data.index["test"][3] = data.index["test"][3][:0]
    engine = Engine(method, data, workers=2)
    try:
        alone = engine.evaluate(p, "test")
        monkeypatch.setattr(small, "MANY", 30)
        monkeypatch.setattr(small, "AT_ONCE", 64)
        together = engine.evaluate(p, "test")
    finally:
        engine.close()
    assert len(set(alone["n"].tolist())) > 5 and alone["n"].min() == 0
    np.testing.assert_array_equal(alone["correct"], together["correct"])
    np.testing.assert_allclose(alone["loss"], together["loss"], rtol=1e-10)


class Twofold(torch.nn.Module):
    """A network that no stack takes: it asks for a value."""

    def __init__(self, inputs, classes):
        super().__init__()
        self.fc = torch.nn.Linear(inputs, classes)

    def forward(self, x):
        scores = self.fc(x.flatten(1))
        return scores if scores.sum() > 0 else 2 * scores


def test_a_network_that_cannot_be_stacked_is_evaluated_client_by_client(monkeypatch):
    monkeypatch.setattr(small, "MANY", 30)
    monkeypatch.setitem(
        models._MODELS, "twofold", (lambda shape, classes: Twofold(784, classes), "")
    )
    method, data = bound(model="twofold", method="local", clients=40)
    engine = Engine(method, data, workers=1)
    try:
        assert engine.evaluate(method.init().clients, "test")["n"].min() > 0
    finally:
        engine.close()


def pool_of(n):
    x = np.arange(n)
    return SimpleNamespace(y=x % 10, is_test=(x // 10) % 5 == 0, classes=10, extra={})


def test_twenty_thousand_clients_are_dealt():
    split = partition("dirichlet", pool_of(400_000), 20_000, 0, alpha=10.0, least=5)
    assert min(map(len, split.train)) >= 2 and sum(map(len, split.train + split.test)) == 400_000
    # Draws that cannot give all of them the least are not tried a thousand times.
    args = dict(alpha=0.5, least=4, fallback_least=2)
    split = partition("dirichlet", pool_of(400_000), 20_000, 0, **args)
    held = [len(a) + len(b) for a, b in zip(split.train, split.test, strict=True)]
    assert 2 <= min(held) < 4


@pytest.mark.parametrize("alpha, short", [(0.1, "6,"), (1.0, "2")])
def test_an_impossible_dirichlet_is_refused_before_any_draw(alpha, short):
    drawn = np.random.default_rng(0)
    with pytest.raises(ValueError, match=f"leave about {short}.*fewer than 10 of 20.*raise alpha"):
        schemes.dirichlet(pool_of(400_000), 20_000, drawn, alpha=alpha)
    assert drawn.random() == np.random.default_rng(0).random()


def test_impossible_columns_are_given_up_early():
    with pytest.raises(ValueError, match="after 20 draws 20000 clients have fewer than least=5"):
        partition("dirichlet_columns", pool_of(400_000), 20_000, 0, alpha=10.0, least=5)


@pytest.mark.parametrize(
    "clients, classes, k", [(100, 10, 4), (40, 20, 6), (30, 5, 2), (7, 10, 10)]
)
def test_swaps_of_repeated_classes_draw_as_they_always_did(clients, classes, k):
    def plain(owners, rng):
        slots = rng.permutation(np.repeat(np.arange(classes), owners)).reshape(clients, -1)
        held = label_counts(np.arange(classes), slots, classes)
        while held.max() > 1:
            i = np.argmin((held > 0).sum(1))
            a = rng.choice(np.flatnonzero(held[i] > 1))
            j, b = rng.choice(np.argwhere((held[:, [a]] == 0) & (held > 0) & (held[i] == 0)))
            held[[i, j], [a, b]] -= 1
            held[[i, j], [b, a]] += 1
        return held

    owners = np.full(classes, clients * k // classes)
    one, other = np.random.default_rng(3), np.random.default_rng(3)
    np.testing.assert_array_equal(plain(owners, one), assign(owners, clients, other))
    assert one.random() == other.random()


def history_of(**changes):
    method, data = bound(**changes)
    return simulate(method, data, workers=2)[1]


@pytest.mark.parametrize("name", ["fedper", "ditto", "pfedhn"])
def test_models_made_in_parts_are_evaluated_alike(name, monkeypatch):
    changes = dict(method=name, eval_after=True, rounds=1)
    whole = history_of(**changes)
    monkeypatch.setattr(rounds, "EVALUATED_AT_ONCE", 50)
    parts = history_of(**changes)
    assert list(parts.evals) == list(whole.evals) and len(parts.evals) == 10
    for key, series in whole.evals.items():
        for a, b in zip(series, parts.evals[key], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_parts_are_made_only_where_nobody_keeps_the_models(monkeypatch):
    monkeypatch.setattr(rounds, "EVALUATED_AT_ONCE", 50)
    for keep in (False, True):
        method, data = bound(keep_models=keep, method="fedper")
        before = simulate(method, data, workers=1).before
        assert (len(before["fc.weight"]) == 120) if keep else before == {}


@pytest.mark.parametrize("clients", [60, 120])
def test_an_evaluation_of_some_costs_the_same_however_many_there_are(clients, monkeypatch):
    made, evaluated = [], []
    method, data = bound(clients=clients, method="fedper", eval_clients=20, eval_after=True)
    whole = Engine.evaluate

    def evaluate(self, p, split, ids=None, *how):
        evaluated.append((len(ids), len(p["fc.weight"])))
        return whole(self, p, split, ids, *how)

    def personal(self, state, ctx):
        made.append(len(ctx.sel))
        return type(method).__mro__[1].personal(self, state, ctx)

    monkeypatch.setattr(Engine, "evaluate", evaluate)
    monkeypatch.setattr(type(method), "personal", personal, raising=False)
    simulate(method, data, workers=1)
    assert set(made) == {20} and set(evaluated) == {(20, 20)} and len(evaluated) == 3 * 2 * 2


def test_what_auto_means_follows_participants_and_layers():
    for changes, expected in (
        (dict(participation=1.0), "batched"),
        (dict(participation=0.5), "threads"),
        (dict(participation=1.0, model="lenet"), "threads"),
    ):
        method, data = bound(**changes, rounds=1, eval_after=False)
        assert automatic(method, "cpu") == expected and automatic(method, "cuda") != expected
        assert simulate(method, data, workers=1).history.executor == expected


def of_clients(name, k, **hyper):
    model = models.build("mlp", (1, 28, 28), 10, hidden=16, seed=0)
    counts = torch.full((k, 10), 2)
    task = Task(model, counts.sum(1), counts, train_config(Experiment(holdout=0.2)))
    return make_method(name, **hyper).bind(task)


@pytest.mark.parametrize(
    "name, said",
    [
        ("fedamp", r"about [\d,]+ s a round and 6.4 GB"),
        ("heurfedamp", "s a round and 6.4 GB"),
        ("fedaghn", "s a round and 6.4 GB"),
        ("pfedla", "320.0 GB"),
        ("heurpfedla", "320.0 GB"),
        ("fedfomo", "1.6 GB"),
        ("apple", "1.6 GB"),
        ("pfedhn", "1.2 GB"),
    ],
)
def test_pairs_of_twenty_thousand_clients_are_said(name, said):
    with pytest.warns(UserWarning, match=f"{name}: .*20,000 of them, 200 a round, .*{said}"):
        pairs.warn(of_clients(name, 20_000), 200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pairs.warn(of_clients(name, 100), 100)


def test_pairs_of_participants_are_said():
    with pytest.warns(UserWarning, match=r"fedpac: .*2,000 a round, .* GB"):
        pairs.warn(of_clients("fedpac", 20_000), 2_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("fedavg", "fedper", "ditto", "fedpac", "cfl"):
            pairs.warn(of_clients(name, 20_000), 200)
        pairs.warn(of_clients("pfedhn", 20_000, dim=100), 200)


def test_pairs_are_said_before_the_server_makes_room(monkeypatch):
    method, data = bound(method="pfedla", clients=40)

    def init(self):
        raise MemoryError("no room")

    monkeypatch.setattr(type(method), "init", init)
    monkeypatch.setattr(pairs, "MANY", 40)
    monkeypatch.setattr(pairs, "GB", 1e-3)
    with pytest.warns(UserWarning, match="pfedla: .* GB of memory"):
        with pytest.raises(MemoryError, match="no room"):
            simulate(method, data)


def eight_by_eight(k):
    # k clients of 20 images of 8 x 8 pixels: 16 to train on, 4 to test.
    draw, ids = np.random.default_rng(0), np.arange(20 * k).reshape(k, 20)
    x = draw.integers(0, 256, (20 * k, 8, 8), dtype=np.uint8)
    return Federation(x, draw.integers(0, 10, 20 * k), [*ids[:, :16]], test=[*ids[:, 16:]])


def test_a_run_of_twenty_thousand_clients_is_killed_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "CHECKPOINT_EVERY", 0.0)
    e = Experiment(
        dataset="own",
        clients=20_000,
        model="mlp",
        model_args={"hidden": 169},
        method="fedper",
        participation=0.01,
        rounds=4,
        eval_every=2,
        batch=10,
    )
    how = dict(fed=eight_by_eight(e.clients), device="cpu", workers=2)
    whole, store = run(e, store=tmp_path / "whole", **how), tmp_path / "killed"

    def die(r, history):
        if r == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    fork, began = multiprocessing.get_context("fork"), []
    child = fork.Process(target=lambda: run(e, store=store, on_round=die, **how))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    kept = torch.load(next(store.glob("*.part")) / "checkpoint.pt", weights_only=True)
    assert kept["round"] == 3
    resumed = run(e, store=store, on_round=lambda r, history: began.append(r), **how)
    assert began == [3, 4] and resumed.meta["parameters"] == 12_685
    assert resumed.arrays.keys() == whole.arrays.keys()
    for name, v in whole.arrays.items():
        np.testing.assert_array_equal(v, resumed.arrays[name])
