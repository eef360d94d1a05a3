"""FedAMP and HeurFedAMP: its rule, beside plain loops and what it reduces to."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from pfl_core.stacked import clone, expand, flat, select, unprefixed
from tests.core.methods.mixing_shared import EVERYONE, one_round
from tests.core.methods.setting import CONFIG, assert_same, rounds, setup


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
