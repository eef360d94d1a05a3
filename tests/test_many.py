"""Very many small clients: evaluation in parts, what is said before training, kill and resume."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pfl_core.data import schemes
from pfl_core.data.dealing import assign, label_counts
from pfl_core.data.partition import partition
from pfl_core.engine import small
from pfl_core.engine.engine import Engine
from pfl_core.experiments.build import build_method, client_data
from pfl_core.experiments.experiment import Experiment

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


def pool_of(n):
    x = np.arange(n)
    return SimpleNamespace(y=x % 10, is_test=(x // 10) % 5 == 0, classes=10, extra={})


def test_twenty_thousand_clients_are_dealt_in_seconds():
    begun = time.process_time()
    split = partition("dirichlet", pool_of(400_000), 20_000, 0, alpha=10.0, least=5)
    assert min(map(len, split.train)) >= 2 and sum(map(len, split.train + split.test)) == 400_000
    # Draws that cannot give all of them the least are not tried a thousand times.
    args = dict(alpha=0.5, least=4, fallback_least=2)
    split = partition("dirichlet", pool_of(400_000), 20_000, 0, **args)
    held = [len(a) + len(b) for a, b in zip(split.train, split.test, strict=True)]
    assert 2 <= min(held) < 4
    assert time.process_time() - begun < 30


@pytest.mark.parametrize("alpha, short", [(0.1, "6,"), (1.0, "2")])
def test_an_impossible_dirichlet_is_refused_before_any_draw(alpha, short):
    drawn = np.random.default_rng(0)
    with pytest.raises(ValueError, match=f"leave about {short}.*fewer than 10 of 20.*raise alpha"):
        schemes.dirichlet(pool_of(400_000), 20_000, drawn, alpha=alpha)
    assert drawn.random() == np.random.default_rng(0).random()


def test_impossible_columns_are_given_up_early():
    began = time.process_time()
    with pytest.raises(ValueError, match="after 20 draws 20000 clients have fewer than least=5"):
        partition("dirichlet_columns", pool_of(400_000), 20_000, 0, alpha=10.0, least=5)
    assert time.process_time() - began < 10


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
