"""FedCP, FedPAC, GPFL, FedDBE: their parts by hand, gradients against autograd, limits, and the identities they reduce to."""

import math

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from test_methods import ARGS, OURS, assert_same, setup
from torch import nn

from pfl_core import Experiment, models, run
from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.methods.base import Batch, Method
from pfl_core.methods.terms import mmd, simplex_qp
from pfl_core.stacked import expand, select

NAMES = ("fedcp", "fedpac", "gpfl", "feddbe")
EVERYONE = torch.arange(4)
FC = ("fc.weight", "fc.bias")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def context(method, data, state, sel=EVERYONE):
    return Context(Engine(method, data, "threads", 1), state, sel, state.round)


@torch.no_grad()
def one_round(method, data, state, sel=EVERYONE):
    """The state after one round of clients `sel`, as the round loop makes it; and what left the clients' training."""
    start = method.begin(state, sel, method.download(state, sel))
    end = method.local(context(method, data, state, sel), start)
    up = {n: v for n, v in end.items() if n not in state.clients}
    state = method.upload(state, sel, start, up, data.n[sel].to(data.dtype))
    for n, v in end.items():
        if n in state.clients:
            state.clients[n][sel] = v
    state.round += 1
    return state, end


def client(p, k=0):
    return {n: v[k] for n, v in p.items()}


def batch_of(data, k=0, b=6):
    return Batch(*data.batch(torch.as_tensor(data.index["train"][k][:b])))


@pytest.mark.parametrize("name", NAMES)
def test_order_of_clients_does_not_matter(name):
    states = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        method, data = setup(name)
        state = method.init()
        for _ in range(2):
            state, _ = one_round(method, data, state, torch.tensor(order))
        states.append(state)
    assert_same(*states, exact=False)


BAD = {
    "fedcp": [dict(lam=-1.0)],
    "fedpac": [dict(lam=-1.0), dict(head_epochs=-1), dict(cut=1.0)],
    "gpfl": [dict(lam=-1.0), dict(mu=-0.1), dict(condition="mine")],
    "feddbe": [dict(kappa=-1.0), dict(mu=0.0), dict(mu=1.1)],
}


@pytest.mark.parametrize("name, args", [(n, a) for n, all_args in BAD.items() for a in all_args])
def test_illegal_values_are_named(name, args):
    with pytest.raises(ValueError, match=f"{name}.*{next(iter(args))}.*allowed"):
        setup(name, args=args)


@pytest.mark.parametrize("name", ["fedcp", "fedpac", "gpfl"])
def test_traffic_is_that_of_the_formula(name):
    method, data = setup(name)
    state = method.init()
    sent = method.download(state, EVERYONE[:3])
    _, end = one_round(method, data, state)
    up = {n: v for n, v in end.items() if n not in state.clients and n not in method.task.buffers}
    classes, size = method.task.initial["fc.weight"].shape
    whole = sum(method.task.initial[n].numel() for n in method.task.parameters)
    head, square = (size + 1) * classes, 2 * size**2 + 6 * size
    down = {
        "fedcp": whole + square,
        "fedpac": whole + classes * size,
        "gpfl": whole - head + classes * size + square,
    }
    extra = {"fedcp": 0, "fedpac": classes * size + classes + 1, "gpfl": 0}
    assert method.traffic(state, EVERYONE[:3], sent, up) == (
        3 * down[name],
        3 * (down[name] + extra[name]),
    )


# -- models of other forms ---------------------------------------------------------------------------------------------------


def chain(input_shape, classes):
    """No fc, no features, no bias at the end."""
    body = nn.Linear(math.prod(input_shape), 6), nn.BatchNorm1d(6), nn.Tanh()
    return nn.Sequential(nn.Flatten(), *body, nn.Linear(6, classes, bias=False))


def all_convolutions(input_shape, classes):
    """The scores are means of a convolution."""
    last = nn.Conv2d(4, classes, 1)
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 4, 5, 4), nn.ReLU(), last, nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


def softmax_after(input_shape, classes):
    """More than the last layer makes the scores."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes), nn.LogSoftmax(1))


@pytest.fixture
def experiment(monkeypatch, store):
    """(method, model function) -> a tiny Experiment over that model."""
    monkeypatch.setattr(models, "_MODELS", dict(models._MODELS))

    def make(name, fn):
        models.register_model("mine", fn)
        how = dict(method=name, method_args=ARGS.get(name, {}), holdout=0.25, lr=0.05, rounds=2)
        return Experiment(model="mine", partition="iid", clients=3, max_samples=12, **how)

    return make


@pytest.mark.parametrize("executor", ["threads", "batched"])
@pytest.mark.parametrize("name", OURS)
def test_every_method_takes_a_model_without_fc_and_features(name, executor, experiment):
    result = run(experiment(name, chain), executor=executor)
    assert result.ok and result.history.value.notna().all()


@pytest.mark.parametrize("name", OURS)
def test_a_model_that_does_not_end_in_a_linear_layer_is_refused_where_that_is_needed(
    name, experiment
):
    e = experiment(name, all_convolutions)
    if name not in NAMES:
        assert run(e).ok
        return
    said = rf"{name}: .*the scores of Sequential come from 2: .*let its forward end in it, .* or take a method that needs no features"
    with pytest.raises(ValueError, match=said):
        run(e)
    with pytest.raises(ValueError, match="they are not the output of one nn.Linear over features"):
        run(experiment(name, softmax_after))


# -- FedCP -----------------------------------------------------------------------------------------------------------------


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


# -- FedPAC ----------------------------------------------------------------------------------------------------------------


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


# -- GPFL ------------------------------------------------------------------------------------------------------------------


def gpfl(**args):
    method, data = setup("gpfl", args=args)
    p = client(method.begin(method.init(), EVERYONE))
    return (
        method,
        data,
        {n: v + 0.3 * randn(*v.shape) if v.is_floating_point() else v for n, v in p.items()},
    )


def by_hand(p, z, condition):
    out = {}
    for name in ("gamma", "beta"):
        h = (p[f"cov.{name}.0.weight"] @ condition + p[f"cov.{name}.0.bias"]).clamp_min(0)
        h = (h - h.mean()) / (h.var(unbiased=False) + 1e-5).sqrt()
        out[name] = h * p[f"cov.{name}.2.weight"] + p[f"cov.{name}.2.bias"]
    return (z * (out["gamma"] + 1) + out["beta"]).clamp_min(0)


def test_gpfl_valve_and_loss():
    method, data, p = gpfl(lam=0.7, mu=0.4)
    batch, frozen = batch_of(data), randn(*p["gce"].shape, seed=5)
    z = method.task.features(p, batch.x, training=False)
    torch.testing.assert_close(method.valve(p, z, p["personal"]), by_hand(p, z, p["personal"]))
    scores = by_hand(p, z, p["personal"]) @ p["fc.weight"].T + p["fc.bias"]
    torch.testing.assert_close(method.logits(p, batch.x), scores)
    generic = by_hand(p, z, p["generic"])
    unit = lambda v: v / v.norm(dim=1, keepdim=True).clamp_min(1e-12)  # noqa: E731
    want = F.cross_entropy(scores, batch.y) + F.cross_entropy(
        unit(generic) @ unit(p["gce"]).T, batch.y
    )
    want += 0.7 * torch.linalg.matrix_norm(generic - frozen[batch.y])
    decayed = [v for n, v in p.items() if n == "gce" or n.startswith("cov.")]
    assert len(decayed) == 9
    want += 0.2 * sum((v**2).sum() for v in decayed)
    torch.testing.assert_close(method.loss(p, {"gce": frozen}, batch), want)


def test_gpfl_gradient_is_finite_where_generic_features_meet_their_class():
    method, data, p = gpfl()
    batch = batch_of(data)
    dead = (
        p
        | {n: v * 0 for n, v in p.items() if n.startswith("cov.beta")}
        | {"conv1.weight": p["conv1.weight"] * 0}
    )
    dead |= {
        n: v * 0 - 1 for n, v in p.items() if n in ("fc2.bias", "fc2.weight")
    }  # all features are 0
    leaves = {
        n: v.clone().requires_grad_() for n, v in dead.items() if n not in method.task.buffers
    }
    loss = method.loss(dead | leaves, {"gce": torch.zeros_like(p["gce"])}, batch)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    assert all(torch.isfinite(g).all() for g in grads if g is not None)


def test_gpfl_serves_the_personal_route():
    method, data, p = gpfl()
    batch = batch_of(data)
    other = p | {"gce": randn(*p["gce"].shape, seed=3), "generic": p["generic"] + 1}
    assert torch.equal(method.logits(p, batch.x), method.logits(other, batch.x))
    leaves = [p[n].clone().requires_grad_() for n in ("gce", "fc.weight")]
    scores = method.logits(p | dict(zip(("gce", "fc.weight"), leaves, strict=True)), batch.x)
    gce, head = torch.autograd.grad(scores.sum(), leaves, allow_unused=True, materialize_grads=True)
    assert not gce.any() and head.any()  # of the task's own loss, E learns nothing


@pytest.mark.parametrize("condition", ["own", "global"])
def test_gpfl_conditions(condition):
    method, data = setup("gpfl", args=dict(condition=condition))
    state = method.init()
    first = method.begin(state, EVERYONE)
    assert not first["generic"].any() and not first["personal"].any()
    state, end = one_round(method, data, state)
    assert not end["personal"].any()  # what the round was trained with
    start = method.begin(state, EVERYONE)
    gce = end["gce"] if condition == "own" else state.server["gce"].expand(4, -1, -1)
    for k in range(4):
        share = data.label_counts[k] / data.n[k]
        torch.testing.assert_close(start["generic"][k], gce[k].mean(0))
        torch.testing.assert_close(
            start["personal"][k], sum(share[c] * gce[k, c] for c in range(3))
        )


def test_gpfl_of_equal_label_shares_has_one_route():
    method, data = setup("gpfl")
    method.task.label_counts = torch.full((4, 3), 2)
    method.task.n = torch.full((4,), 6)
    c = method.conditions(randn(4, 3, 7), EVERYONE)
    torch.testing.assert_close(c["generic"], c["personal"])


def test_gpfl_trains_and_averages_its_modules():
    method, data = setup("gpfl")
    state = method.init()
    before = {n: v.clone() for n, v in state.server.items()}
    start = method.begin(state, EVERYONE)
    with torch.no_grad():
        end = method.local(context(method, data, state), start)
    assert_same(before, state.server)  # E as received stays what the clients are pulled to
    new = method.upload(state, EVERYONE, start, end, data.n.double()).server
    share = (data.n / data.n.sum()).double()
    assert {"gce", "cov.gamma.0.weight", "cov.beta.2.bias", "conv1.weight"} <= new.keys() and FC[
        0
    ] not in new
    for n in new:
        assert "conv" in n or not torch.equal(new[n], before[n]), n
        torch.testing.assert_close(new[n], torch.einsum("s,s...->...", share, end[n]))


# -- FedDBE ----------------------------------------------------------------------------------------------------------------


def feddbe(**args):
    """The method, its data and the state after the round that makes g (without one for kappa = 0)."""
    method, data = setup("feddbe", args=args)
    return method, data, method.init()


def test_feddbe_with_frozen_vectors_is_fedavg():
    method, data, state = feddbe()
    frozen = type("Frozen", (type(method),), dict(local=Method.local, name=""))().bind(method.task)
    assert frozen.kappa == 0
    avg, *_ = setup("fedavg")
    other = avg.init()
    for sel in (EVERYONE, EVERYONE[1:3], EVERYONE):
        state, _ = one_round(frozen, data, state, sel)
        other, _ = one_round(avg, data, other, sel)
    assert not state.clients["z"].any()
    assert_same(state.server, other.server)  # bit for bit
    assert_same(select(state.clients, other.clients), other.clients)


def test_feddbe_vectors_move_only_where_their_client_takes_part():
    method, data, state = feddbe()
    state, _ = one_round(method, data, state, EVERYONE[:2])
    z = state.clients["z"]
    assert z[:2].any(1).all() and not z[2:].any()
    kept = z.clone()
    state, _ = one_round(method, data, state, EVERYONE[2:])
    assert torch.equal(state.clients["z"][:2], kept[:2]) and state.clients["z"][2:].any(1).all()


def test_feddbe_first_round_makes_g_and_nothing_else():
    method, data, state = feddbe(kappa=2.0, mu=0.3)
    before = {n: v.clone() for n, v in state.server.items()}
    state, end = one_round(method, data, state)
    share = (data.n / data.n.sum()).double()
    torch.testing.assert_close(state.server["g"], torch.einsum("s,sf->f", share, end["m"]))
    assert_same(select(state.server, method.task.names), select(before, method.task.names))
    assert not state.clients["z"].any() and end["m"].any()
    g = state.server["g"].clone()
    for sel in (EVERYONE, EVERYONE[:2]):
        state, end = one_round(method, data, state, sel)
        assert "m" not in end and torch.equal(state.server["g"], g)
        assert not torch.equal(state.server["fc.weight"], before["fc.weight"])


def test_feddbe_first_round_trains_as_fedavg_does():
    # Its m is the running mean of what FedAvg's local model makes of the same batches.
    (method, data, state), (avg, *_) = feddbe(kappa=2.0, mu=0.3), setup("fedavg")
    k, seen = 2, []

    class Watched(type(avg)):
        name = ""

        def loss(self, p, anchor, batch):
            seen.append(self.task.features(p, batch.x).mean(0))
            return super().loss(p, anchor, batch)

    one_round(Watched().bind(avg.task), data, avg.init(), EVERYONE[k : k + 1])
    _, end = one_round(method, data, state, EVERYONE[k : k + 1])
    m, steps = 0, len(data.index["train"][k]) // 6
    for mean in seen[-steps:]:  # the engine tries a loss once before
        m = 0.7 * m + 0.3 * mean.detach()
    torch.testing.assert_close(end["m"][0], m)


def test_feddbe_loss_and_gradient_by_hand():
    method, data, _ = feddbe(kappa=2.0, mu=0.25)
    p = client(method.begin(method.init(), EVERYONE))
    size = len(p["z"])
    p |= {"z": randn(size), "m": randn(size, seed=1)}
    anchor, batch = {"g": randn(size, seed=2), "kappa": torch.tensor(2.0).double()}, batch_of(data)
    leaf = {n: p[n].clone().requires_grad_() for n in ("z", "m", "fc.weight", "conv1.weight")}
    loss = method.loss(p | leaf, anchor, batch)
    got = dict(zip(leaf, torch.autograd.grad(loss, list(leaf.values())), strict=True))
    z = method.task.features(p | {"conv1.weight": leaf["conv1.weight"]}, batch.x)
    scores = (z + leaf["z"]) @ leaf["fc.weight"].T + p["fc.bias"]
    fit = F.cross_entropy(scores, batch.y)
    m = 0.75 * p["m"] + 0.25 * z.mean(0)
    penalty = 2.0 * ((m - anchor["g"]) ** 2 / 2).mean()
    want = torch.autograd.grad(fit + penalty, [leaf[n] for n in ("z", "fc.weight", "conv1.weight")])
    for n, g in zip(("z", "fc.weight", "conv1.weight"), want, strict=True):
        torch.testing.assert_close(got[n], g)
    # SGD at rate mu on this is the running mean; earlier batches are constants of the penalty.
    torch.testing.assert_close(p["m"] - 0.25 * got["m"], m.detach())
    torch.testing.assert_close(method.logits(p, batch.x), scores.detach())


def test_feddbe_sends_means_in_the_first_round_and_models_later():
    method, data, state = feddbe(kappa=1.0)
    size = method.task.initial["fc.weight"].shape[1]
    whole = sum(method.task.initial[n].numel() for n in method.task.parameters)
    for up in (size, whole):
        sent = method.download(state, EVERYONE)
        start = method.begin(state, EVERYONE, sent)
        with torch.no_grad():
            end = method.local(context(method, data, state), start)
        gone = {n: v for n, v in end.items() if n not in state.clients}
        assert method.traffic(state, EVERYONE, sent, gone) == (4 * (whole + size), 4 * up)
        state = method.upload(state, EVERYONE, start, gone, data.n.double())
        state.round += 1


@pytest.mark.parametrize("changes", [dict(momentum=0.5), dict(weight_decay=1e-3)])
def test_feddbe_penalty_wants_plain_sgd(changes):
    setup("feddbe", **changes)
    with pytest.raises(ValueError, match="feddbe: kappa = 1.0 with momentum = .* allowed: both 0"):
        setup("feddbe", args=dict(kappa=1.0), **changes)


def test_feddbe_penalty_pulls_features_to_the_common_mean():
    away = {}
    for kappa in (1e-9, 50.0):
        method, data, state = feddbe(kappa=kappa, mu=1.0)
        for _ in range(3):
            state, end = one_round(method, data, state)
        x = [data.batch(torch.as_tensor(data.index["train"][k]))[0] for k in range(4)]
        means = [method.task.features(client(end, k), x[k], True).mean(0) for k in range(4)]
        away[kappa] = sum(float((m - state.server["g"]).norm()) for m in means)
    assert away[50.0] < 0.9 * away[1e-9]
