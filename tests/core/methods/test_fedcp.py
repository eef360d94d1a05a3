"""FedCP: its rule, beside plain loops and what it reduces to."""

import math

import pytest
import torch
import torch.nn.functional as F

from pfl_core.methods.terms import mmd
from pfl_core.stacked import expand
from tests.core.methods.features_shared import (
    EVERYONE,
    FC,
    batch_of,
    client,
    context,
    one_round,
    randn,
)
from tests.core.methods.setting import assert_same, setup


def test_mmd():
    x, y = randn(5, 4), randn(5, 4, seed=1) + 1
    widths = (10.0, 15.0, 20.0, 50.0)
    kernel = lambda a, b: sum(math.exp(-float(((a - b) ** 2).sum()) / (2 * w)) for w in widths)  # noqa: E731
    want = sum(kernel(a, b) for a in x for b in x) + sum(kernel(a, b) for a in y for b in y)
    want -= 2 * sum(kernel(a, b) for a in x for b in y)
    assert float(mmd(x, y)) == pytest.approx(want / 25, rel=1e-9)
    assert abs(float(mmd(x, x))) < 1e-15 and float(mmd(x, y)) > 0
    weight = lambda a, b: sum(math.exp(-float(((a - b) ** 2).sum()) / (2 * w)) / w for w in widths)  # noqa: E731
    by_hand = torch.stack(
        [
            2
            / 25
            * (sum(weight(a, b) * (a - b) for b in y) - sum(weight(a, b) * (a - b) for b in x))
            for a in x
        ]
    )
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(mmd(leaf, y), leaf)[0], by_hand)
    torch.testing.assert_close(mmd(x + 100, y + 100), mmd(x, y))


def fedcp(**args):
    method, data = setup("fedcp", args=args)
    p = client(method.begin(method.init(), EVERYONE))
    return (
        method,
        data,
        {n: v + 0.3 * randn(*v.shape) if v.is_floating_point() else v for n, v in p.items()},
    )


def test_fedcp_gate_is_the_softmax_of_two_halves():
    method, _, p = fedcp()
    (size,) = method.noise
    z = randn(7, size).abs()
    c = p["context"] / p["context"].norm()
    h = F.layer_norm(
        (z * c) @ p["cpn.0.weight"].T + p["cpn.0.bias"],
        [2 * size],
        p["cpn.1.weight"],
        p["cpn.1.bias"],
    )
    h = F.relu(h).reshape(7, 2, size)
    r, s = h.softmax(1).unbind(1)
    torch.testing.assert_close(method.gate(p, z), r)
    torch.testing.assert_close(method.gate(p, z) + s, torch.ones(7, size).double())
    want = (
        (r * z) @ p["fc.weight"].T
        + p["fc.bias"]
        + (s * z) @ p["global.fc.weight"].T
        + p["global.fc.bias"]
    )
    torch.testing.assert_close(method.heads(p, z), want)
    same = p | {"global." + n: p[n] for n in FC}  # h_i = h_g: the gate has no say
    torch.testing.assert_close(method.heads(same, z), z @ p["fc.weight"].T + 2 * p["fc.bias"])
    assert torch.isfinite(method.gate(p | {"context": torch.zeros(size).double()}, z)).all()


def test_fedcp_noise_is_the_difference_of_two_gumbels():
    method, _, p = fedcp()
    (size,) = method.noise
    z, g = randn(1, size).abs().expand(4000, size), torch.Generator().manual_seed(1)
    uniform = lambda: torch.rand(4000, size, generator=g, dtype=torch.float64)  # noqa: E731
    gumbel = -torch.log(-torch.log(uniform())) + torch.log(-torch.log(uniform()))
    plain = method.gate(p, z)
    want = torch.sigmoid(torch.logit(plain) + gumbel)
    got = method.gate(p, z, uniform())
    for q in (0.1, 0.25, 0.5, 0.75, 0.9):
        torch.testing.assert_close(got.quantile(q, 0), want.quantile(q, 0), rtol=0, atol=0.05)
    assert torch.isfinite(
        method.gate(p, z[:2], torch.tensor([[0.0], [1.0]]).double().expand(2, size))
    ).all()


def test_fedcp_freezes_the_global_parts():
    method, data = setup("fedcp")
    state, _ = one_round(method, data, method.init())
    before = {n: v.clone() for n, v in state.server.items()}
    start = method.begin(state, EVERYONE)
    with torch.no_grad():
        end = method.local(context(method, data, state), start)
    for n in FC:
        assert torch.equal(end["global." + n], expand(before, 4)["global." + n])
        torch.testing.assert_close(end["sent." + n], (end[n] + before["global." + n]) / 2)
    assert torch.equal(end["context"], start["fc.weight"].sum(1)) and not torch.equal(
        end["fc.weight"], start["fc.weight"]
    )
    assert_same(before, state.server)
    new = method.upload(state, EVERYONE, start, end, data.n.double()).server
    share = (data.n / data.n.sum()).double()
    for n in FC:
        mixed = torch.einsum("s,s...->...", share, (end[n] + before["global." + n]) / 2)
        torch.testing.assert_close(new["global." + n], mixed)
    for n in ("conv1.weight", "cpn.0.weight", "cpn.1.bias"):
        torch.testing.assert_close(new[n], torch.einsum("s,s...->...", share, end[n]))


def test_fedcp_received_base_matters_through_the_mmd_alone():
    grads = {}
    for lam in (0.0, 5.0):
        method, data, p = fedcp(lam=lam)
        batch = batch_of(data)._replace(noise=torch.full((6, *method.noise), 0.5).double())
        for other in (0.0, 0.2):
            anchor = {n: v + other if v.is_floating_point() else v for n, v in p.items()}
            leaf = p["fc1.weight"].clone().requires_grad_()
            loss = method.loss(p | {"fc1.weight": leaf}, anchor, batch)
            grads[lam, other] = torch.autograd.grad(loss, leaf)[0]
    assert torch.equal(grads[0.0, 0.0], grads[0.0, 0.2])
    assert not torch.allclose(grads[5.0, 0.0], grads[5.0, 0.2])


def test_fedcp_context_is_random_first_and_the_heads_row_sum_later():
    method, data = setup("fedcp")
    state = method.init()
    first = method.begin(state, EVERYONE)["context"]
    assert first.min() >= 0 and first.max() < 1 and len(first.unique()) == first.numel()
    state, _ = one_round(method, data, state, EVERYONE[:2])
    torch.testing.assert_close(
        method.begin(state, EVERYONE)["context"], state.clients["fc.weight"].sum(1)
    )
    assert torch.equal(
        state.clients["fc.weight"][2:], expand(method.task.initial, 2)["fc.weight"]
    )  # idle
