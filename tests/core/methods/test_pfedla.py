"""pFedLA: its rule, beside plain loops and what it reduces to."""

import copy

import pytest
import torch
import torch.nn.functional as F

from pfl_core.engine.simulate import simulate
from pfl_core.methods.base import State
from pfl_core.stacked import flat, select
from tests.core.methods.hypernetworks_shared import (
    bound,
    drawn,
    everyone,
    one_round,
    scalars,
    small,
)
from tests.core.methods.setting import assert_same


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():  # as in the round loop
        yield


@pytest.mark.parametrize("k, heads", [(10, 5_050), (100, 50_500)])
def test_size_of_pfedlas_hypernetworks(k, heads):
    hn = bound("pfedla", k=k).init().extra["hn"]
    one = {n: v[0] for n, v in hn.items()}
    assert (
        scalars(select(one, [f"{i}.{p}" for i in range(3) for p in ("weight", "bias")])) == 30_300
    )
    assert one["head.weight"].shape == (5, k, 100) and one["v"].shape == (100,)
    assert one["head.weight"].numel() + one["head.bias"].numel() == heads


@pytest.mark.parametrize("bn, n_layers", [(False, 5), (True, 7)])
def test_what_a_layer_is(bn, n_layers):
    method = bound("pfedla", model_args={"bn": bn})
    weights = method.weights(method.init())
    assert list(weights) == [
        n for n in ("conv1", "bn1", "conv2", "bn2", "fc1", "fc2", "fc") if bn or "bn" not in n
    ]
    assert len(weights) == n_layers
    assert len(bound("pfedla", by="block", model_args={"bn": bn}).layers) == 5


@pytest.mark.parametrize("out", ["softmax", "relu_norm"])
def test_weights_are_a_simplex(out):
    method, data = small("pfedla", dict(hn_out=out, lr=0.5))
    state = method.init()
    for a in method.weights(state).values():
        if out == "softmax":
            assert torch.equal(a, torch.full((4, 4), 0.25).double())
        else:
            assert 0.2 < a.min() and a.max() < 0.3
    end, *_ = simulate(method, data, workers=1)
    for a in method.weights(end).values():
        assert (a >= 0).all() and a.std() > 0
        torch.testing.assert_close(a.sum(1), torch.ones(4).double())


def test_one_client_mixes_itself():
    method, data = small("pfedla", sizes=(9,))
    state = drawn(method, method.init())
    for n, v in method.download(state, everyone(1)).items():
        assert torch.equal(v, state.extra["theta"][n])
    *_, new = one_round(method, data, state, everyone(1))
    assert_same(state.extra["hn"], new.extra["hn"])


def test_equal_models_mix_to_themselves():
    method, data = small("pfedla")
    state = drawn(method, method.init())
    state.extra["theta"] = {
        n: v[:1].repeat(4, *[1] * (v.dim() - 1)) for n, v in state.extra["theta"].items()
    }
    start, end, new = one_round(method, data, state, everyone(4))
    for n, v in state.extra["theta"].items():
        torch.testing.assert_close(start[n], v, rtol=1e-13, atol=1e-15)
    for n, v in state.extra["hn"].items():
        torch.testing.assert_close(new.extra["hn"][n], v, rtol=0, atol=1e-16)


@pytest.mark.parametrize("out", ["softmax", "relu_norm"])
@pytest.mark.parametrize("sign", ["descent", "literal"])
def test_hypernetworks_follow_the_chain_rule(out, sign):
    # Eq. 10-11 by autograd through one client at a time, written from the equations.
    method, data = small("pfedla", dict(hn_out=out, hn_sign=sign, lr=0.7), bn=True)
    state = drawn(method, method.init())
    sel = torch.tensor([1, 3])
    start, end, new = one_round(method, data, state, sel)
    for s, i in enumerate(sel):
        hn = {n: v[i].clone().requires_grad_() for n, v in state.extra["hn"].items()}
        with torch.enable_grad():
            h = hn["v"]
            for t in range(3):
                h = F.relu(hn[f"{t}.weight"] @ h + hn[f"{t}.bias"])
            z = hn["head.weight"] @ h + hn["head.bias"]
            alpha = z.softmax(1) if out == "softmax" else F.relu(z) / F.relu(z).sum(1, keepdim=True)
            value = 0.0
            for a, names in zip(alpha, method.layers.values(), strict=True):
                for n in names:
                    mixed = sum(a[j] * state.extra["theta"][n][j] for j in range(4))
                    torch.testing.assert_close(start[n][s], mixed.detach(), rtol=1e-12, atol=1e-14)
                    value = value + (mixed * (end[n][s] - start[n][s])).sum()
            grads = dict(zip(hn, torch.autograd.grad(value, list(hn.values())), strict=True))
        for n, g in grads.items():
            moved = new.extra["hn"][n][i] - state.extra["hn"][n][i]
            torch.testing.assert_close(
                moved, (0.7 if sign == "descent" else -0.7) * g, rtol=1e-8, atol=1e-14
            )
        if out == "softmax":  # in closed form, on the logits
            for row, a, names in zip(
                grads["head.bias"], alpha.detach(), method.layers.values(), strict=True
            ):
                delta, mine = (
                    torch.cat([p[n][s].flatten() for n in names])
                    for p in ({n: end[n] - start[n] for n in names}, start)
                )
                inner = (flat(select(state.extra["theta"], names)) - mine) @ delta
                torch.testing.assert_close(row, a * inner, rtol=1e-8, atol=1e-14)
    for n, v in new.extra["theta"].items():
        assert torch.equal(v[sel], end[n])


def test_pfedla_finite_difference():
    method, data = small("pfedla", dict(lr=1.0))
    state = drawn(method, method.init())
    start, end, new = one_round(method, data, state, everyone(4))
    g = torch.Generator().manual_seed(3)
    hn = state.extra["hn"]
    way = {n: torch.randn(v.shape, generator=g, dtype=v.dtype) for n, v in hn.items()}

    def value(hn):
        p = method.download(State({}, {}, state.extra | {"hn": hn}), everyone(4))
        return sum((p[n] * (end[n] - start[n])).sum() for n in method.task.parameters)

    eps = 1e-6
    up, down = (value({n: v + s * eps * way[n] for n, v in hn.items()}) for s in (1, -1))
    gradient = sum(((new.extra["hn"][n] - hn[n]) * way[n]).sum() for n in hn)
    torch.testing.assert_close(gradient, (up - down) / (2 * eps), rtol=1e-5, atol=1e-8)


def test_slopes_of_close_models_keep_their_digits():
    # Models of size 100 that differ by 1e-3: in float32 alone, <theta_j, Delta> would drown what tells them apart.
    method = bound("pfedla", shape=(1, 16, 16), classes=3, lr=1.0)
    state, sel = method.init(), everyone(4)
    g = torch.Generator().manual_seed(0)
    for v in state.extra["theta"].values():
        v.copy_(100 + 1e-3 * torch.randn(v.shape, generator=g))
    start = method.download(state, sel)
    end = {n: v + 0.01 * torch.randn(v.shape, generator=g) for n, v in start.items()}
    new = method.upload(copy.deepcopy(state), sel, start, end, torch.ones(4))
    for i, names in enumerate(method.layers.values()):
        delta = flat({n: end[n].double() - start[n].double() for n in names})
        theta = flat(select(state.extra["theta"], names)).double()
        inner = delta @ (theta - theta.mean(0)).T  # the first weights are 1/4
        torch.testing.assert_close(
            new.extra["hn"]["head.bias"][:, i], (inner / 4).float(), rtol=1e-3, atol=1e-7
        )


@pytest.mark.parametrize("sign, up", [("descent", True), ("literal", False)])
def test_sign_of_pfedlas_step(sign, up):
    method, data = small("pfedla", dict(lr=1e-4, hn_sign=sign))
    state = drawn(method, method.init())
    start, end, new = one_round(method, data, state, everyone(4))
    new.extra["theta"] = state.extra["theta"]
    again = method.download(new, everyone(4))
    for i in range(4):
        gain = sum(
            ((again[n][i] - start[n][i]) * (end[n][i] - start[n][i])).sum()
            for n in method.task.parameters
        )
        assert (gain > 0) == up and gain != 0


@pytest.mark.parametrize("sign", ["descent", "literal"])
def test_two_clients_that_move_towards_themselves(sign):
    method, data = small("pfedla", dict(lr=0.1, hn_sign=sign), sizes=(9, 9))
    state = drawn(method, method.init())
    state.extra["hn"] = {
        n: torch.zeros_like(v) if n != "head.bias" else v for n, v in state.extra["hn"].items()
    }
    start = method.download(state, everyone(2))
    end = {n: v + 0.5 * (state.extra["theta"][n] - v) for n, v in start.items()}
    before = method.weights(state)
    after = method.weights(
        method.upload(copy.deepcopy(state), everyone(2), start, end, data.n.double())
    )
    for layer, a in before.items():
        moved = after[layer].diagonal() - a.diagonal()
        assert (moved > 0).all() if sign == "descent" else (moved < 0).all()


def test_who_is_absent_keeps_model_and_hypernetwork():
    method, data = small("pfedla")
    state = drawn(method, method.init())
    *_, new = one_round(method, data, state, torch.tensor([0, 2]))
    for part in ("theta", "hn"):
        for n, v in state.extra[part].items():
            assert torch.equal(new.extra[part][n][[1, 3]], v[[1, 3]])
            if part == "theta" or not n.startswith(("0.", "1.", "2.")):
                assert not torch.equal(new.extra[part][n][[0, 2]], v[[0, 2]]), n


@pytest.mark.parametrize(
    "name, hyper, message",
    [
        ("pfedla", dict(hn_sign="up"), "one of descent, literal"),
        ("pfedla", dict(hn_out="max"), "one of softmax, relu_norm"),
        ("pfedla", dict(dim=0), "dim=0"),
        ("pfedla", dict(by="net"), "net"),
        ("heurpfedla", dict(retain_k=6), "retain_k = 6; allowed: 0 to 5"),
        ("pfedla", dict(retain_k=1), "hyper-parameter of method 'pfedla': 'retain_k' is unknown"),
    ],
)
def test_pfedla_refuses(name, hyper, message):
    with pytest.raises(ValueError, match=message):
        bound(name, **hyper)
