"""FedPAC: its rule, beside plain loops and what it reduces to."""

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize

from pfl_core.methods.terms import simplex_qp
from pfl_core.stacked import select
from tests.core.methods.features_shared import EVERYONE, FC, client, context, one_round, randn
from tests.core.methods.setting import assert_same, setup


@pytest.mark.parametrize("m", [1, 2, 5, 9])
@pytest.mark.parametrize("variance", [1.0, 1e-3, 1e-6])
def test_simplex_qp_agrees_with_scipy(m, variance):
    h = randn(m, 8, seed=m)
    d = h[:, None] - h
    q = torch.einsum("ijd,ikd->ijk", d, d) + variance * torch.diag(randn(m, seed=1).abs())
    a = simplex_qp(q)
    assert (a >= 0).all() and torch.allclose(a.sum(1), torch.ones(m).double())
    grad = torch.einsum("bij,bj->bi", q, a)
    trace = q.diagonal(dim1=1, dim2=2).sum(1)
    assert (((grad * a).sum(1) - grad.min(1).values) / trace).max() < 1e-10  # duality gap
    for qi, ai in zip(q.numpy() / variance, a.numpy(), strict=True):
        value = lambda x, qi=qi: x @ qi @ x  # noqa: E731
        slope = lambda x, qi=qi: 2 * qi @ x  # noqa: E731
        whole = {"type": "eq", "fun": lambda x: x.sum() - 1, "jac": lambda x: x * 0 + 1}
        kw = dict(
            method="SLSQP",
            jac=slope,
            bounds=[(0, 1)] * m,
            constraints=whole,
            options=dict(maxiter=500, ftol=1e-14),
        )
        best = minimize(value, ai * 0 + 1 / m, **kw)
        assert value(ai) <= best.fun * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_simplex_qp_of_any_semidefinite_matrix(seed):
    x = randn(12, 12, 1 + seed % 12, seed=seed) * 10.0 ** (seed % 5 - 2)
    q = x @ x.transpose(1, 2)  # of rank 1 to 12
    a = simplex_qp(q)
    grad = torch.einsum("bij,bj->bi", q, a)
    assert (a >= 0).all() and torch.allclose(a.sum(1), torch.ones(12).double())
    assert (
        ((grad * a).sum(1) - grad.min(1).values) / q.diagonal(dim1=1, dim2=2).sum(1)
    ).max() < 1e-9


def fedpac(**args):
    method, data = setup("fedpac", args=args)
    return method, data, method.init()


def test_fedpac_head_weights():
    method, *_ = fedpac(cut=0.0)
    v = torch.tensor([1.0, 2.0, 4.0, 8.0]).double()
    alike = method.collaboration(randn(1, 3, 5).expand(4, 3, 5), v)
    torch.testing.assert_close(alike, (1 / v / (1 / v).sum()).expand(4, 4), rtol=1e-6, atol=1e-9)
    apart = method.collaboration(1e3 * randn(4, 3, 5), v)
    torch.testing.assert_close(apart, torch.eye(4).double(), rtol=0, atol=1e-4)
    assert method.collaboration(randn(1, 3, 5), v[:1]).item() == 1.0
    single = method.collaboration(
        randn(4, 3, 5), torch.zeros(4).double()
    )  # V = 0: clients of one sample
    torch.testing.assert_close(single, torch.eye(4).double(), rtol=0, atol=1e-6)
    h, v = 0.1 * randn(4, 3, 5), 0.01 * v
    a = method.collaboration(h, v)
    for i in range(4):
        d = (h[i] - h).flatten(1)
        q = d @ d.T + torch.diag(v)
        assert q[i, i] == v[i] and torch.linalg.eigvalsh(q).min() > 0
        grad = q @ a[i]
        assert float(a[i] @ grad - grad.min()) < 1e-9
    cut, *_ = fedpac(cut=0.3)
    b = cut.collaboration(h, v)
    assert (
        ((b == 0) | (b > 0.3)).all()
        and (b == 0).any()
        and torch.allclose(b.sum(1), torch.ones(4).double())
    )
    torch.testing.assert_close(b, a * (a >= 0.3) / (a * (a >= 0.3)).sum(1, keepdim=True))


def by_class(method, data, p, k):
    """Class means (C, F), counts (C,), and the mean squared norm of client k's features, by loops."""
    x, y = data.batch(torch.as_tensor(data.index["train"][k]))
    z = method.task.features(p, x, training=False)
    means = torch.stack([z[y == c].mean(0) if (y == c).any() else z[0] * 0 for c in range(3)])
    return means, torch.bincount(y, minlength=3), z.square().sum(1).mean(), z, y


def test_fedpac_statistics_and_prototypes():
    method, data, state = fedpac()
    state, _ = one_round(method, data, state)
    old, seen = state.server["proto"].clone(), state.server["seen"].clone()
    received = method.begin(state, EVERYONE)
    state, end = one_round(method, data, state)
    assert seen.all()
    total, counts = torch.zeros_like(old), torch.zeros(3)
    for k in range(4):
        means, n, square, z, y = by_class(method, data, client(received, k), k)
        share = n / n.sum()
        torch.testing.assert_close(end["h"][k], share[:, None] * means)
        # the paper's variance, class by class: mean squared norm less that of pi_c mu_c
        trace = sum(
            share[c] * z[y == c].square().sum(1).mean() - share[c] ** 2 * means[c].square().sum()
            for c in range(3)
            if n[c]
        )
        torch.testing.assert_close(end["v"][k], trace / n.sum())
        assert end["v"][k] >= 0
        means, n, *_ = by_class(method, data, client(end, k), k)  # by the trained base
        total, counts = total + n[:, None] * means, counts + n
    torch.testing.assert_close(state.server["proto"], total / counts[:, None])


def test_fedpac_keeps_the_prototype_of_a_class_that_nobody_holds():
    method, data, state = fedpac()
    state, _ = one_round(method, data, state, torch.tensor([3]))  # one client, one class
    assert state.server["seen"].tolist() == [False, True, False]
    state, _ = one_round(method, data, state)
    old = state.server["proto"].clone()
    assert state.server["seen"].all()
    state, _ = one_round(method, data, state, torch.tensor([3]))
    changed = (state.server["proto"] != old).any(1)
    assert changed.tolist() == [False, True, False] and state.server["seen"].all()


def test_fedpac_aligns_to_prototypes_or_to_own_means():
    method, data = setup("fedpac", steps=1, epochs=0, lr=0.1, args=dict(head_epochs=0, lam=3.0))
    state = method.init()
    state.round = 1
    state.server["proto"], state.server["seen"][0] = randn(*state.server["proto"].shape), True
    start = method.begin(state, EVERYONE)
    with torch.no_grad():
        end = method.local(context(method, data, state), start)
    for k in range(4):
        x, y = data.batch(torch.as_tensor(data.batch_indices(k, 1, batch=6, steps=1)[0, 0]))
        p = client(select(start, method.task.names), k)
        target = by_class(method, data, p, k)[0].index_copy(
            0, torch.tensor([0]), state.server["proto"][:1]
        )
        p = {n: v.clone() for n, v in p.items()}
        p["fc1.weight"].requires_grad_()
        z = method.task.features(p, x, training=True)
        loss = (
            F.cross_entropy(method.task.classify(p, z), y)
            + 3.0 * ((z - target[y]) ** 2).sum() / z.numel()
        )
        (grad,) = torch.autograd.grad(loss, p["fc1.weight"])
        torch.testing.assert_close(
            end["fc1.weight"][k], start["fc1.weight"][k] - 0.1 * grad, rtol=1e-9, atol=1e-12
        )
        assert torch.equal(end["fc.weight"][k], start["fc.weight"][k])


@pytest.mark.parametrize(
    "sel, args", [(EVERYONE, dict(combine=False)), (EVERYONE[:1], {})], ids=["apart", "alone"]
)
def test_fedpac_without_its_two_ideas_is_fedrep(sel, args):  # R12
    method, data, state = fedpac(lam=0.0, **args)
    rep, *_ = setup("fedrep", args=dict(head_epochs=1))
    other = rep.init()
    for _ in range(3):
        state, _ = one_round(method, data, state, sel)
        other, _ = one_round(rep, data, other, sel)
    assert_same(select(state.server, other.server), other.server)
    assert_same(state.clients | state.extra, other.clients)


def test_fedpac_combines_heads_by_default():
    method, data, state = fedpac()
    state, end = one_round(method, data, state)
    a = method.collaboration(end["h"], end["v"])
    assert (a.diagonal() < 0.999).any() and torch.allclose(a.sum(1), torch.ones(4).double())
    for n in FC:
        torch.testing.assert_close(state.extra[n], torch.einsum("ij,j...->i...", a, end[n]))
    before = {n: v.clone() for n, v in state.extra.items()}
    state, _ = one_round(method, data, state, EVERYONE[:2])
    assert all(
        torch.equal(state.extra[n][2:], v[2:]) for n, v in before.items()
    )  # idle clients' heads
