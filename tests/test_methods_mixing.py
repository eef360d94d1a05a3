"""FedFomo, CFL, FedAMP, HeurFedAMP, APPLE: mixes worked by hand, limits, and the identities they reduce to."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.cluster import AgglomerativeClustering
from test_methods import CONFIG, assert_same, client_data, rounds, setup, under

from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.methods.cfl import bipartition
from pfl_core.methods.fedavg import FedAvg
from pfl_core.stacked import clone, expand, flat, select, unprefixed

EVERYONE = torch.arange(4)


class Uniform(FedAvg):
    """FedAvg with equal weights."""

    name = ""

    def upload(self, state, sel, start, end, weight):
        return super().upload(state, sel, start, end, torch.ones_like(weight))


class Untrained:
    """A round's context in which local training changes nothing."""

    def __init__(self, context):
        self.context = context

    def __getattr__(self, name):
        return getattr(self.context, name)

    def train(self, loss, start, **how):
        return start


@torch.no_grad()
def one_round(method, data, state, sel=EVERYONE, train=True):
    """The state after one round of clients `sel`, as the round loop makes it; and what left the clients' training."""
    c = Context(Engine(method, data, "threads", 1), state, sel, state.round)
    start = method.begin(state, sel, method.download(state, sel))
    end = method.local(c if train else Untrained(c), start)
    up = {n: v for n, v in end.items() if n not in state.clients}
    state = method.upload(state, sel, start, up, data.n[sel].to(data.dtype))
    for n, v in end.items():
        if n in state.clients:
            state.clients[n][sel] = v
    state.round += 1
    return state, end


def scattered(method, seed=0, spread=0.1):
    """A state in which every client has a model of its own and the server knows it."""
    state, g = method.init(), torch.Generator().manual_seed(seed)
    for n in method.task.parameters:
        own_models = state.clients[n] + spread * torch.randn(
            state.clients[n].shape, generator=g, dtype=torch.float64
        )
        state.clients[n] = own_models
        state.extra["models"][n] = own_models.clone()
    state.extra["known"][:] = True
    state.round = 1
    return state


@pytest.mark.parametrize("name", ["fedfomo", "cfl", "fedamp", "heurfedamp", "apple"])
def test_order_of_clients_does_not_matter(name):
    states = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        method, data = setup(name)
        state = method.init()
        for _ in range(2):
            state, _ = one_round(method, data, state, torch.tensor(order))
        states.append(state)
    assert_same(*states, exact=False)


@pytest.mark.parametrize("name", ["fedfomo", "cfl", "fedamp", "heurfedamp", "apple"])
def test_a_default_mixes(name):
    _, mine = rounds(name, n=3)
    _, alone = rounds("local", n=3)
    trained = mine.clients | mine.extra["models"] if name == "cfl" else mine.clients
    assert any((trained[n] - v).abs().max() > 1e-4 for n, v in alone.clients.items())


BAD = {
    "fedfomo": [dict(neighbours=-1), dict(fallback="none"), dict(affinity="share")],
    "cfl": [
        dict(linkage="average"),
        dict(weighting="n"),
        dict(warmup=2.0),
        dict(min_size=0),
        dict(still=2.0),
    ],
    "fedamp": [dict(rho=-1.0), dict(rho=100.0), dict(start="u"), dict(share=1.5), dict(sigma=0.0)],
    "heurfedamp": [dict(zeta=1.5), dict(similarity="l2"), dict(start="u")],
    "apple": [dict(schedule="linear"), dict(span=2.0), dict(dr_lr=-1.0)],
}


@pytest.mark.parametrize("name, args", [(n, a) for n, all_args in BAD.items() for a in all_args])
def test_illegal_values_are_named(name, args):
    with pytest.raises(ValueError, match=f"{name}.*{next(iter(args))}.*allowed"):
        setup(name, args=args)


# -- FedFomo ---------------------------------------------------------------------------------------------------------------


def test_fedfomo_needs_held_out_samples():
    with pytest.raises(ValueError, match="holdout=0.0; set it"):
        setup("fedfomo", holdout=0.0)


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_fedfomo_mixes_by_the_formula(buffers):
    method, data = setup("fedfomo", buffers=buffers, args=dict(neighbours=2, explore=0.0))
    state, _ = (
        rounds("fedfomo", n=2, buffers=buffers, args=dict(neighbours=2, explore=0.0))[1],
        None,
    )
    state.extra["affinity"] = torch.tensor(
        [[1, 5, 2, 9], [7, 1, 3, 2], [1, 2, 3, 4], [4, 3, 2, 1]]
    ).double()
    before = {n: v.clone() for n, v in state.clients.items()}
    models, affinity = clone(state.extra["models"]), state.extra["affinity"].clone()
    _, end = one_round(method, data, state, train=False)
    t, asked = method.task, [[3, 1], [0, 2], [3, 1], [0, 1]]

    def loss(k, p):
        x, y = data.batch(torch.as_tensor(data.index["holdout"][k]))
        return F.cross_entropy(t.apply(p, x), y)

    mixed_something = False
    for k in range(4):
        b = {n: before["base." + n][k] for n in t.names}
        near = {k: {n: before[n][k] for n in t.names}} | {
            j: {n: models[n][j] for n in t.names} for j in asked[k]
        }
        norm = {
            j: math.sqrt(sum(float((u[n] - b[n]).square().sum()) for n in t.parameters))
            for j, u in near.items()
        }
        omega = {j: float(loss(k, b) - loss(k, u)) / (norm[j] + 1e-5) for j, u in near.items()}
        for j in range(4):
            assert state.extra["affinity"][k, j] - affinity[k, j] == pytest.approx(
                omega.get(j, 0), abs=1e-12
            )
        plus = {j: max(v, 0) for j, v in omega.items()}
        total = sum(plus.values())
        weight = {j: v / total for j, v in plus.items()} if total else {k: 1.0}
        mixed_something |= len([v for v in weight.values() if v > 0]) > 1
        for n in t.names:
            want = sum(w * near[j][n] for j, w in weight.items())
            if n in t.buffers and (buffers == "local" or "tracked" in n):
                want = before[n][k]
            torch.testing.assert_close(end[n][k], want, rtol=1e-9, atol=1e-12)
    assert mixed_something


def test_fedfomo_without_neighbours_is_local_on_what_is_not_held_out():  # R14
    _, fomo = rounds("fedfomo", n=3, args=dict(neighbours=0))
    method, local = rounds("local", n=3)
    assert_same(select(fomo.clients, method.task.names), local.clients)


def test_fedfomo_goes_on_from_its_own_or_its_first_model():
    for fallback in ("trained", "start"):
        method, data = setup("fedfomo", args=dict(fallback=fallback))
        state, _ = one_round(method, data, method.init())
        for models in (state.clients, state.extra["models"]):
            models["fc.weight"] *= -100  # what was trained is made useless
        kept, affinity = (
            {n: v.clone() for n, v in state.clients.items()},
            state.extra["affinity"].clone(),
        )
        _, end = one_round(method, data, state, train=False)
        unhelped = (state.extra["affinity"] < affinity).all(1)
        assert unhelped.tolist() == [
            True,
            True,
            True,
            False,
        ]  # the last one's single sample happens to fit
        want = kept if fallback == "trained" else unprefixed("base.", kept)
        for n in method.task.parameters:
            assert torch.equal(end[n][unhelped], want[n][unhelped]), n


def test_fedfomo_remembers_shares_of_omega_as_its_authors_do():
    told = {}
    for affinity in ("raw", "shares"):
        method, data = setup("fedfomo", args=dict(affinity=affinity, explore=0.0))
        state, _ = one_round(method, data, method.init())
        before = state.extra["affinity"].clone()
        state, _ = one_round(method, data, state)
        told[affinity] = state.extra["affinity"] - before
    total = told["raw"].sum(1, keepdim=True).abs()
    torch.testing.assert_close(told["shares"], told["raw"] / total, rtol=1e-9, atol=1e-12)
    assert (total > 0).all() and not torch.allclose(total, torch.ones_like(total))


def test_apples_momentum_acts_on_cores_and_relations():
    # Two steps of one client, by hand: the second adds 0.9 of the first, on c_i and on p_i.
    ends = {}
    for momentum in (0.0, 0.9):
        method, data, state = apple(mu=0.0, dr_lr=0.03, core_lr=0.4)
        _, first = one_round(under(method, momentum=momentum, steps=1), data, state)
        method, data, state = apple(mu=0.0, dr_lr=0.03, core_lr=0.4)
        begin = {n: v.clone() for n, v in state.clients.items()}
        _, second = one_round(under(method, momentum=momentum, steps=2), data, state)
        ends[momentum] = {
            n: (first[n] - begin[n], second[n] - begin[n]) for n in ("dr", "core.fc.weight")
        }
    for n, (one, two) in ends[0.0].items():
        torch.testing.assert_close(ends[0.9][n][0], one)
        torch.testing.assert_close(ends[0.9][n][1] - two, 0.9 * one, rtol=1e-9, atol=1e-12)


def test_fedfomo_keeps_a_model_that_all_share():
    method, data = setup("fedfomo")
    state = method.init()
    state.extra["known"][:] = True
    _, end = one_round(method, data, state, train=False)
    for n, v in method.task.initial.items():
        assert torch.equal(end[n], expand({n: v}, 4)[n]), n
    assert torch.equal(state.extra["affinity"], torch.eye(4).double())


def test_fedfomo_asks_known_others_and_explores_less_with_time():
    method, data = setup(
        "fedfomo", data=client_data(sizes=[6] * 12), args=dict(neighbours=3, explore=0.5)
    )
    state = method.init()
    assert method.candidates(state, torch.arange(12))[0].shape == (12, 0)
    state.extra["known"][:5] = True
    state.extra["affinity"] += torch.arange(12).double()
    ids, known = method.candidates(state, torch.arange(12))
    assert ids[known].max() < 5 and not (ids == torch.arange(12)[:, None]).any()
    state.extra["known"][:] = True
    best = torch.tensor([11, 10, 9])
    greedy = []
    for state.round in (0, 5, 10):
        ids, known = method.candidates(state, torch.arange(9))
        assert known.all()
        greedy.append(int((ids == best).all(1).sum()))
    assert greedy[0] < greedy[2] == 9


def test_fedfomo_learns_on_other_samples_than_it_judges():
    data = client_data()
    for k in range(4):
        assert not set(data.index["holdout"][k]) & set(data.index["fit"][k])
        for r in (0, 1):
            assert set(data.batch_indices(k, r, batch=6).ravel()) <= set(data.index["fit"][k])


def test_fedfomo_traffic_counts_the_models_that_are_sent():
    method, data = setup("fedfomo", args=dict(neighbours=2))
    state = method.init()
    size = sum(v.numel() for v in method.task.initial.values() if v.is_floating_point())
    for want in (0, 4 * 2 * size):
        sent = method.download(state, EVERYONE)
        start = method.begin(state, EVERYONE, sent)
        state, end = one_round(method, data, state)
        up = {n: v for n, v in end.items() if n not in state.clients and n not in start}
        assert method.traffic(state, EVERYONE, sent, up) == (want, 4 * (size + 4))


# -- CFL -------------------------------------------------------------------------------------------------------------------


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


# -- FedAMP, HeurFedAMP ----------------------------------------------------------------------------------------------------


def amp(name, **args):
    method, data = setup(name, args=args)
    return method, data, scattered(method)


@pytest.mark.parametrize("args", [dict(), dict(scale=0.1, share=1.0), dict(sigma=20.0, alpha=3.0)])
def test_fedamp_attention(args):
    method, _, state = amp("fedamp", **args)
    x = flat(state.extra["models"])
    d = ((x[:, None] - x) ** 2).sum(-1)
    sigma = args.get(
        "sigma", args.get("scale", 1.0) * float(d[torch.ones(4, 4).triu(1) > 0].median())
    )
    alpha = args.get("alpha", args.get("share", 0.5) * sigma / 3)
    xi = method.weights(state)["all"]
    for i, j in itertools.permutations(range(4), 2):
        assert xi[i, j] == pytest.approx(
            alpha * math.exp(-float(d[i, j]) / sigma) / sigma, rel=1e-9
        )
    torch.testing.assert_close(xi.sum(1), torch.ones(4).double())
    torch.testing.assert_close(xi, xi.T)
    assert (xi.diagonal() >= 0).all()
    cloud = unprefixed("cloud.", method.download(state, EVERYONE))
    assert_same(
        {n: v.sum(0) for n, v in cloud.items()},
        {n: v.sum(0) for n, v in state.extra["models"].items()},
        False,
    )
    torch.testing.assert_close(flat(cloud), xi @ x)


def test_fedamp_extremes():
    method, _, state = amp("fedamp", sigma=1e-3)
    assert torch.equal(method.weights(state)["all"], torch.eye(4).double())
    assert_same(
        unprefixed("cloud.", method.download(state, EVERYONE)), state.extra["models"]
    )  # u = w
    method, _, state = amp("fedamp", sigma=1e6, alpha=1e7)  # alpha (K - 1) > sigma
    xi = method.weights(state)["all"]
    assert (xi >= 0).all() and torch.allclose(xi.sum(1), torch.ones(4).double())
    method, _ = setup("fedamp")
    state = method.init()
    state.extra["known"][:] = True  # all models equal
    assert_same(
        unprefixed("cloud.", method.download(state, EVERYONE)), state.extra["models"], exact=False
    )


@pytest.mark.parametrize("sigma, similarity", [(10.0, "delta"), (1.0, "params"), (0.0, "delta")])
def test_heurfedamp_attention(sigma, similarity):
    method, _, state = amp("heurfedamp", sigma=sigma, similarity=similarity, zeta=0.3)
    x = flat(state.extra["models"]) - (
        flat(expand(select(method.task.initial, method.task.parameters), 4))
        if similarity == "delta"
        else 0
    )
    xi = method.weights(state)["all"]
    for i in range(4):
        e = {
            j: math.exp(sigma * float(F.cosine_similarity(x[i], x[j], dim=0)))
            for j in range(4)
            if j != i
        }
        assert xi[i, i] == pytest.approx(0.3, abs=1e-15)
        for j, v in e.items():
            assert xi[i, j] == pytest.approx(0.7 * v / sum(e.values()), rel=1e-9)


def test_heurfedamp_extremes():
    method, _, state = amp("heurfedamp", zeta=1.0)
    assert_same(
        unprefixed("cloud.", method.download(state, EVERYONE)), state.extra["models"]
    )  # u = w
    method, _, state = amp("heurfedamp")
    assert torch.allclose(
        method.weights(state)["all"].diagonal(), torch.tensor(0.25).double(), atol=1e-15
    )
    for n, v in state.extra["models"].items():
        v[:] = method.task.initial[n]  # no cosine is defined
    torch.testing.assert_close(method.weights(state)["all"], torch.full((4, 4), 0.25).double())


@pytest.mark.parametrize("name", ["fedamp", "heurfedamp"])
def test_attention_is_paid_to_whom_the_server_knows(name):
    method, _, state = amp(name)
    state.extra["known"][:] = torch.tensor([False, True, False, True])
    xi = method.weights(state)["all"]
    seen = state.extra["known"] | torch.eye(4, dtype=torch.bool)
    assert torch.equal(xi > 0, seen) and torch.allclose(xi.sum(1), torch.ones(4).double())
    state.extra["known"][:] = torch.tensor([False, True, False, False])
    xi = method.weights(state)["all"]
    assert (
        xi[1].tolist() == [0, 1, 0, 0]
        and xi[0, 1] > 0
        and torch.allclose(xi.sum(1), torch.ones(4).double())
    )
    state.extra["known"][:] = False
    assert torch.equal(method.weights(state)["all"], torch.eye(4).double())


@pytest.mark.parametrize("name", ["fedamp", "heurfedamp"])
def test_amp_without_its_pull_is_local(name):  # R9
    _, amped = rounds(name, n=3, args=dict(rho=0.0))
    _, local = rounds("local", n=3)
    assert_same(amped.clients, local.clients)
    _, amped = rounds(name, n=1)
    _, local = rounds("local", n=1)
    assert_same(amped.clients, local.clients)  # nobody is known in round 0
    assert torch.equal(amped.extra["models"]["fc.weight"], local.clients["fc.weight"])


@pytest.mark.parametrize("name", ["fedamp", "heurfedamp"])
@pytest.mark.parametrize("begin", ["own", "cloud"])
def test_amp_takes_the_steps_of_the_formula(name, begin):
    method, data = setup(name, bn=False, steps=2, epochs=0, args=dict(rho=3.0, start=begin))
    state = scattered(method)
    cloud = {
        n: v.clone() for n, v in unprefixed("cloud.", method.download(state, EVERYONE)).items()
    }
    w = clone(select(state.clients, method.task.parameters) if begin == "own" else cloud)
    for k in range(4):
        for idx in data.batch_indices(k, 1, batch=CONFIG.batch, steps=2)[:, 0]:
            p = {n: v[k].clone().requires_grad_() for n, v in w.items()}
            x, y = data.batch(torch.as_tensor(idx))
            grads = torch.autograd.grad(
                F.cross_entropy(method.task.apply(p, x), y), list(p.values())
            )
            for n, g in zip(p, grads, strict=True):
                w[n][k] -= CONFIG.lr * (g + 3.0 * (w[n][k] - cloud[n][k]))
    state, end = one_round(method, data, state)
    assert_same(select(end, w), w, exact=False)
    assert_same(state.extra["models"], w, exact=False)
    assert_same(method.serve(state.clients), w, exact=False)  # what is served is w, not u


# -- APPLE -----------------------------------------------------------------------------------------------------------------


def apple(**args):
    method, data = setup("apple", bn=False, steps=3, epochs=0, args=dict(span=1.0) | args)
    state, g = method.init(), torch.Generator().manual_seed(0)
    for n, v in state.extra["cores"].items():
        v += 0.05 * torch.randn(v.shape, generator=g, dtype=v.dtype)
        state.clients["core." + n][:] = v
    state.clients["dr"] += 0.1 * torch.randn(4, 4, generator=g, dtype=torch.float64)
    return method, data, state


def test_apple_takes_the_steps_of_the_formula():
    method, data, state = apple(mu=2.0, dr_lr=0.03, core_lr=0.4)
    names, t = list(state.extra["cores"]), method.task
    old = flat(state.extra["cores"]).clone()  # cores of the round's start
    core, p, p0 = old.clone(), state.clients["dr"].clone(), data.n / data.n.sum()
    sizes = [v[0].numel() for v in state.extra["cores"].values()]
    shapes = [v.shape[1:] for v in state.extra["cores"].values()]
    for k in range(4):
        for idx in data.batch_indices(k, 0, batch=CONFIG.batch, steps=3)[:, 0]:
            w = sum(p[k, j] * (core if j == k else old)[j] for j in range(4))
            leaf = w.clone().requires_grad_()
            model = {
                n: v.reshape(s) for n, v, s in zip(names, leaf.split(sizes), shapes, strict=True)
            }
            x, y = data.batch(torch.as_tensor(idx))
            (grad,) = torch.autograd.grad(F.cross_entropy(t.apply(model, x), y), leaf)
            step = torch.stack([grad @ (core if j == k else old)[j] for j in range(4)]) + 2.0 * (
                p[k] - p0
            )
            core[k] -= 0.4 * p[k, k] * grad
            p[k] -= 0.03 * step
    state, end = one_round(method, data, state)
    torch.testing.assert_close(
        flat(unprefixed("core.", state.clients)), core, rtol=1e-9, atol=1e-11
    )
    torch.testing.assert_close(state.clients["dr"], p, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(flat(state.extra["cores"]), core, rtol=1e-9, atol=1e-11)
    served = torch.stack(
        [sum(p[k, j] * (core if j == k else old)[j] for j in range(4)) for k in range(4)]
    )
    torch.testing.assert_close(
        flat(select(method.serve(end), names)), served, rtol=1e-9, atol=1e-11
    )
    begun = method.serve(method.begin(state, EVERYONE))  # next round: everybody's new core
    torch.testing.assert_close(flat(select(begun, names)), p @ core, rtol=1e-9, atol=1e-11)


def test_apple_of_its_own_core_alone_is_local():  # R13
    method, data = setup("apple", args=dict(dr_lr=0.0, core_lr=0.05))
    state = method.init()
    state.clients["dr"] = torch.eye(4).double()
    for _ in range(3):
        state, _ = one_round(method, data, state)
    _, local = rounds("local", n=3)
    assert_same(
        unprefixed("core.", state.clients),
        select(local.clients, method.task.parameters),
        exact=False,
    )
    assert_same(method.serve(method.begin(state, EVERYONE)), local.clients, exact=False)


@pytest.mark.parametrize("schedule", ["exp", "cos"])
def test_apple_pull_ends(schedule):
    method, _ = setup("apple", rounds=50, args=dict(schedule=schedule, span=0.2))
    pulls = [method.decay(r) for r in range(50)]
    assert pulls[0] == 1 and pulls[:11] == sorted(pulls[:11], reverse=True) and not any(pulls[10:])
    assert pulls[5] == pytest.approx(0.001**0.5 if schedule == "exp" else 0.5)


def test_apple_starts_from_sample_shares_and_learns_relations():
    method, data = setup("apple")
    state = method.init()
    p0 = (data.n / data.n.sum()).double().repeat(4, 1)
    torch.testing.assert_close(state.clients["dr"], p0)
    for _ in range(3):
        state, _ = one_round(method, data, state)
    assert (state.clients["dr"] - p0).abs().max() > 1e-4


def test_apple_traffic():
    method, data = setup("apple")
    state = method.init()
    size = sum(v.numel() for n, v in method.task.initial.items() if n in method.task.parameters)
    down = method.download(state, EVERYONE[:3])
    state, end = one_round(method, data, state)
    up = {n: v for n, v in end.items() if n not in state.clients}
    assert method.traffic(state, EVERYONE[:3], down, up) == (3 * 3 * size, 3 * size)
