"""Per-FedAvg: its rule, beside plain loops and what it reduces to."""

from math import sqrt

import pytest
import torch
from torch.func import grad as gradient_of

from pfl_core.engine.simulate import simulate
from pfl_core.methods.base import Step
from pfl_core.methods.perfedavg import PerFedAvg
from pfl_core.stacked import axpy, clone
from tests.core.methods.averaging_shared import (
    SIGNS,
    SIZES,
    START,
    both_nets,
    descend,
    mean,
    near,
    pair,
    ran,
    read,
    slope,
)
from tests.core.methods.setting import assert_same, client_data


@both_nets
@pytest.mark.parametrize("version", ["fo", "hf"])
def test_perfedavg_without_inner_step_is_fedavg_on_its_second_batches(net, version):
    data, batches = client_data(), {"fo": 2, "hf": 3}[version]
    indices = data.batch_indices
    data.batch_indices = lambda k, r, **how: indices(k, r, **how | {"batches": batches})[:, 1:2]
    _, fedavg = ran("fedavg", net, data=data, lr=0.03)
    _, meta = ran("perfedavg", net, version=version, alpha=0.0, beta=0.03)
    # Convolutions of the two training paths differ in their memory layout; statistics advance on the first batch.
    assert_same(meta.server, fedavg.server, exact=net == "mlp")


@pytest.mark.parametrize("version", ["fo", "hf"])
def test_perfedavg_by_hand(version):
    alpha, beta, delta = 0.5, 0.2, 1e-3
    w = START
    for _ in range(2):
        ends = []
        for s, steps in zip(SIGNS, (1, 3 if version == "fo" else 2), strict=True):
            p = w
            for _ in range(steps):
                d = v = slope(*(p - alpha * slope(*p, s)), s)
                if version == "hf":
                    norm = lambda p: sqrt(p[0] ** 2 + 2 * p[1] ** 2)  # noqa: E731  (the head counts twice)
                    h = delta * norm(p) / norm(v)
                    d = v - alpha * (slope(*(p + h * v), s) - slope(*(p - h * v), s)) / (2 * h)
                p = p - beta * d
            ends.append(p)
        w = mean(ends)
    method, data = pair("perfedavg", version=version, alpha=alpha, beta=beta)
    state, _, before, *_ = simulate(method, data, workers=1)
    near(read(state.server), w)
    for k in (0, 1):
        near(read(before, k), descend(w, SIGNS[k], SIZES[k], lr=alpha))
    method, data = pair("perfedavg", version=version, alpha=alpha, beta=beta, adapt_steps=1)
    _, _, before, *_ = simulate(method, data, workers=1)
    near(read(before, 1), descend(w, SIGNS[1], 1, lr=alpha))


def curved(p):
    """A smooth function of two tensors with a full Hessian."""
    return (
        torch.tanh(p["a"] @ p["b"]).square().sum()
        + (p["a"].sin() * p["b"].T).sum()
        + p["b"].exp().mean()
    )


def point():
    g = torch.Generator().manual_seed(3)
    return {
        n: torch.randn(s, generator=g, dtype=torch.float64)
        for n, s in (("a", (3, 2)), ("b", (2, 3)))
    }


def direction(method, p, grad, rate=1.0):
    q, memory = method.step(clone(p), {}, grad, Step(0, rate, {}))
    assert memory == {}
    return {n: (p[n] - q[n]) / rate for n in p}


def test_hessian_free_direction_is_mamls_gradient():
    grad, alpha, p = gradient_of(curved), 0.3, point()
    exact = gradient_of(lambda p: curved(axpy(-alpha, grad(p), p)))(p)
    hf = direction(PerFedAvg(version="hf", alpha=alpha, delta=1e-5), p, lambda q, j=0: grad(q))
    torch.testing.assert_close(hf, exact, rtol=1e-6, atol=1e-7)
    fo = direction(PerFedAvg(version="fo", alpha=alpha), p, lambda q, j=0: grad(q))
    torch.testing.assert_close(fo, grad(axpy(-alpha, grad(p), p)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 1e-9, 0.0])
def test_hessian_free_direction_is_exact_on_a_quadratic(scale):
    # f_j = 1/2 p' A_j p - b_j' p on three batches: d = (I - alpha A_2)(A_1 p~ - b_1), p~ = p - alpha (A_0 p - b_0).
    g = torch.Generator().manual_seed(5)
    m = torch.randn(3, 4, 4, generator=g, dtype=torch.float64)
    big, b = scale * (m + m.mT), scale * torch.randn(3, 4, generator=g, dtype=torch.float64)
    p, alpha = torch.randn(4, generator=g, dtype=torch.float64), 0.3
    got = direction(
        PerFedAvg(version="hf", alpha=alpha), {"p": p}, lambda q, j=0: {"p": big[j] @ q["p"] - b[j]}
    )["p"]
    v = big[1] @ (p - alpha * (big[0] @ p - b[0])) - b[1]
    torch.testing.assert_close(got, v - alpha * big[2] @ v, rtol=1e-6, atol=1e-15)


def test_both_versions_agree_without_an_inner_step():
    p, grad = point(), lambda q, j=0: gradient_of(curved)(q)
    fo, hf = (direction(PerFedAvg(version=v, alpha=0.0), p, grad) for v in ("fo", "hf"))
    assert all(torch.equal(fo[n], hf[n]) for n in p)
