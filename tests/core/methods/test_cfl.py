"""CFL: its rule, beside plain loops and what it reduces to."""

import itertools
import math

import numpy as np
import pytest
import torch
from sklearn.cluster import AgglomerativeClustering

from pfl_core.methods.cfl import bipartition
from pfl_core.methods.fedavg import FedAvg
from pfl_core.stacked import clone, flat
from tests.core.methods.mixing_shared import EVERYONE, one_round
from tests.core.methods.setting import assert_same, client_data, rounds, setup


class Uniform(FedAvg):
    """FedAvg with equal weights."""

    name = ""

    def upload(self, state, sel, start, end, weight):
        return super().upload(state, sel, start, end, torch.ones_like(weight))


def similarities(n, seed):
    x = np.random.default_rng(seed).standard_normal((n, 4))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return torch.as_tensor(x @ x.T)


def crossing(s, part):
    return float(s[part][:, ~part].max())


def same_parts(a, b):
    return (a == b).all() or (a != b).all()


@pytest.mark.parametrize("seed", range(20))
def test_bipartition(seed):
    s = similarities(6, seed)
    splits = [
        torch.tensor([i >> j & 1 for j in range(6)], dtype=torch.bool) for i in range(1, 2**5)
    ]
    best = min(crossing(s, p) for p in splits)
    assert crossing(s, bipartition(s, "single")) == pytest.approx(best)
    theirs = AgglomerativeClustering(2, metric="precomputed", linkage="complete").fit_predict(
        (1 - s).numpy()
    )
    assert same_parts(bipartition(s, "complete").numpy(), theirs == 1)


@pytest.mark.parametrize("linkage", ["complete", "single"])
def test_bipartition_finds_blocks(linkage):
    block = torch.tensor([0, 1, 1, 0, 1]) == 1
    s = torch.where(block[:, None] == block, 1.0, -1.0).double()
    assert same_parts(bipartition(s, linkage).numpy(), block.numpy())
    assert bipartition(torch.ones(2, 2).double(), linkage).sum() == 1


def cfl(data=None, **args):
    method, data = setup("cfl", bn=False, data=data, args=dict(warmup=0.0) | args)
    return method, data, method.init()


def push(method, data, state, sel, updates):
    """The state after clients sel sent `updates` (S, D), first coordinates of the last layer's weights."""
    start = method.download(state, sel)
    end = clone(start)
    end["fc.weight"].flatten(1)[:, : updates.shape[1]] += updates
    state.round += 1
    return method.upload(state, sel, start, end, data.n[sel].double())


def labels(state):
    return state.extra["cluster"].tolist()


def test_cfl_splits_again_and_keeps_ids():
    group = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0, 0, 2, 1, 3])
    method, data, state = cfl(data=client_data(sizes=[4] * 12))
    # Opposite halves first; then, inside both, opposite quarters; then all alike, which splits nothing.
    ways = [torch.tensor(w).double()[group] for w in ([1, 1, -1, -1], [1, -1, 1, -1], [1, 1, 1, 1])]
    finest = group
    for way, count in zip(ways, (2, 4, 4), strict=True):
        before = labels(state)
        state = push(method, data, state, torch.arange(12), way[:, None])
        after = labels(state)
        assert sorted(set(after)) == list(range(count))
        for i, j in itertools.combinations(range(12), 2):
            assert before[i] == before[j] or after[i] != after[j]  # parts of a part, never merged
            if after[i] == after[j]:
                assert all(torch.equal(v[i], v[j]) for v in state.extra["models"].values())
    assert all(
        (labels(state)[i] == labels(state)[j]) == (finest[i] == finest[j])
        for i in range(12)
        for j in range(12)
    )
    moved = state.extra["models"]["fc.weight"][:, 0, 0] - method.task.initial["fc.weight"][0, 0]
    torch.testing.assert_close(moved, sum(ways))
    assert torch.equal(method.weights(state)["all"], (group[:, None] == group).double() / 3)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_cfl_averages_inside_clusters(weighting):
    method, data, state = cfl(weighting=weighting)
    state.extra["cluster"] = torch.tensor([0, 1, 0, 1])
    state = push(
        method, data, state, torch.tensor([0, 2, 3]), torch.tensor([[1.0], [4.0], [5.0]]).double()
    )
    assert labels(state) == [0, 1, 0, 1]  # two members are too few to split
    both = (13 * 1 + 18 * 4) / 31 if weighting == "samples" else 2.5
    moved = state.extra["models"]["fc.weight"][:, 0, 0] - method.task.initial["fc.weight"][0, 0]
    torch.testing.assert_close(
        moved, torch.tensor([both, 5, both, 5]).double()
    )  # client 1, idle, gets its cluster's
    state.extra["cluster"] = torch.tensor([0, 0, 1, 1])
    idle = state.extra["models"]["fc.weight"][2:].clone()
    state = push(method, data, state, torch.tensor([0]), torch.tensor([[1.0]]).double())
    assert torch.equal(state.extra["models"]["fc.weight"][2:], idle)


def test_cfl_splits_only_what_it_may():
    opposite = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]).double()
    for args, splits in [
        ({}, True), (dict(warmup=0.5), False), (dict(min_size=4), False), (dict(min_size=3), True),
        (dict(eps1=0.01, eps2=0.99), True), (dict(eps1=0.01, eps2=1.01), False), (dict(eps1=0.0), False),
    ]:  # fmt: skip
        method, data, state = cfl(**args)
        state = push(method, data, state, EVERYONE, opposite)
        assert (
            labels(state) == ([0, 0, 1, 1] if splits else [0] * 4)
            or labels(state) == [1, 1, 0, 0]
            and splits
        ), args
    method, data, state = cfl()
    state = push(method, data, state, EVERYONE[:3], opposite[:3])  # one member did not take part
    assert labels(state) == [0] * 4
    state = push(method, data, state, EVERYONE, opposite * 0.05)  # updates have become small
    assert labels(state) == [0] * 4
    state = push(method, data, state, EVERYONE, torch.zeros(4, 1).double())
    assert labels(state) == [0] * 4 and torch.isfinite(flat(state.extra["models"])).all()


def test_cfl_splits_a_cluster_that_stands_still_and_not_one_whose_updates_are_orthogonal():
    method, data, state = cfl(data=client_data(sizes=[4] * 8))
    state = push(
        method, data, state, torch.arange(8), torch.eye(8).double()
    )  # the mean is a third as long as each
    assert labels(state) == [0] * 8 and state.extra["fastest"] == pytest.approx(1 / math.sqrt(8))
    halves = torch.tensor([1.0] * 4 + [-1.0] * 4).double()[:, None]
    state = push(
        method, data, state, torch.arange(8), halves + 0.2
    )  # more than half as fast as at first
    assert labels(state) == [0] * 8
    state = push(method, data, state, torch.arange(8), halves + 0.1)
    assert labels(state) in ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4)


@pytest.mark.parametrize("limit", [dict(warmup=1.0), dict(eps2=1e9)])
def test_cfl_that_never_splits_is_uniform_fedavg(limit):  # R11
    method, state = rounds("cfl", n=3, args=limit)
    _, data = setup("cfl")
    same = Uniform().bind(method.task)
    other = same.init()
    for _ in range(3):
        other, _ = one_round(same, data, other)
    for k in range(4):
        assert_same({n: v[k] for n, v in state.extra["models"].items()}, other.server, exact=False)
    assert_same(state.clients, other.clients, exact=False)


def test_cfl_of_one_client_is_local():  # R15
    data = client_data(sizes=(9,))
    _, state = rounds("cfl", n=3, data=data)
    _, local = rounds("local", n=3, data=data)
    assert_same(state.extra["models"] | state.clients, local.clients, exact=False)


def test_cfl_finds_clients_that_disagree_on_labels():
    data = client_data(sizes=[24] * 6, seed=3)
    for k in (1, 2, 5):  # the same pictures, other names
        data.y[torch.as_tensor(data.index["train"][k])] = (
            data.y[torch.as_tensor(data.index["train"][k])] + 1
        ) % 3
    method, data = setup(
        "cfl", bn=False, data=data, lr=0.2, rounds=10, epochs=2, args=dict(warmup=0.3)
    )
    state = method.init()
    for _ in range(40):  # until all of them stand still
        state, _ = one_round(method, data, state, torch.arange(6))
        if max(labels(state)):
            break
    found = state.extra["cluster"]
    assert same_parts((found == found[1]).numpy(), np.isin(range(6), (1, 2, 5)))
