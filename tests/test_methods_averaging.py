"""FedProx, Per-FedAvg, pFedMe, LG-FedAvg, FedBN, FedRep, Ditto: rounds by hand, hand-derived gradients, and what each reduces to."""

import copy
from dataclasses import fields, replace
from math import exp, sqrt

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_methods import CONFIG, assert_same, client_data, joined, under
from torch import nn
from torch.func import grad as gradient_of

from pfl_core import Experiment, models, run
from pfl_core.data.client_data import ClientData
from pfl_core.data.federation import Federation
from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.engine.simulate import simulate
from pfl_core.methods.base import Batch, State, Step, make_method
from pfl_core.methods.fedavg import Local
from pfl_core.methods.fedprox import FedProx
from pfl_core.methods.perfedavg import PerFedAvg
from pfl_core.methods.task import Task, TrainConfig
from pfl_core.methods.terms import half_square
from pfl_core.stacked import axpy, clone, expand, scalars, select, unprefixed

NETS = {"mlp": dict(hidden=5), "lenet": dict(kernels=2, bn=True)}
SETTINGS = {f.name for f in fields(TrainConfig)}
both_nets = pytest.mark.parametrize("net", NETS)


def bound(name, net="mlp", depth=1, data=None, cls=None, **kw):
    """The method `name` (or `cls`) with hyper-parameters and settings among `kw`, and its clients' data."""
    args = {k: v for k, v in kw.items() if k not in SETTINGS}
    config = replace(CONFIG, head_depth=depth, **{k: v for k, v in kw.items() if k in SETTINGS})
    data = data or client_data()
    if isinstance(net, str):
        net = models.build(net, (1, 16, 16), data.classes, **NETS[net])
    method = cls(**args) if cls else make_method(name, **args)
    return method.bind(Task(net.to(data.dtype), data.n, data.label_counts, config)), data


def ran(name, net="mlp", **kw):
    method, data = bound(name, net, **kw)
    return method, simulate(method, data, workers=2)[0]


def held(method, state):
    """Everything that the clients hold when a round begins: parameters and statistics, (K, ...)."""
    return select(method.begin(state, torch.arange(method.task.K)), method.task.names)


def one_round(method, data, state):
    with torch.no_grad():
        sel = torch.arange(data.K)
        start = method.begin(state, sel)
        return start, method.local(
            Context(Engine(method, data, "threads", 1), state, sel, state.round), start
        )


# -- what they reduce to (methods.md, section 5) -----------------------------------------------------------------------
@both_nets
@pytest.mark.parametrize("buffers", ["local", "average", "reset"])
def test_fedprox_without_pull_is_fedavg(net, buffers):
    assert_same(
        ran("fedprox", net, mu=0.0, buffers=buffers)[1], ran("fedavg", net, buffers=buffers)[1]
    )
    assert not torch.equal(
        ran("fedprox", net)[1].server["fc.bias"], ran("fedavg", net)[1].server["fc.bias"]
    )


def test_fedbn_without_batchnorm_is_fedavg():
    assert_same(ran("fedbn", "mlp")[1], ran("fedavg", "mlp")[1])


@both_nets
def test_lgfedavg_between_fedavg_and_local(net):
    depth = len(models.layers(models.build(net, (1, 16, 16), 3, **NETS[net]), "block"))
    assert_same(ran("lgfedavg", net, depth=depth)[1], ran("fedavg", net)[1])
    assert_same(ran("lgfedavg", net, depth=0)[1], ran("local", net)[1])


@both_nets
def test_fedrep_with_one_phase_off(net):
    method, state = ran("fedrep", net, head_epochs=0)
    for n in select(state.clients, method.task.head):
        assert torch.equal(state.clients[n], method.task.start()[n]), n
    still = {n for n, v in state.server.items() if torch.equal(v, method.task.initial[n])}
    without_gradient = (
        {"conv1.bias", "conv2.bias"} if method.task.bn else set()
    )  # BatchNorm takes the mean away
    assert state.server and still <= without_gradient
    for n in without_gradient:
        torch.testing.assert_close(state.server[n], method.task.initial[n], rtol=0, atol=1e-12)
    method, state = ran("fedrep", net, body_epochs=0)
    assert_same(state.server, select(method.task.initial, state.server), exact=False)
    assert not torch.equal(state.clients["fc.weight"], method.task.start()["fc.weight"])


@both_nets
@pytest.mark.parametrize("lam", [0.0, 0.7])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_dittos_global_model_is_fedavg(net, lam, participation):
    how = dict(participation=participation)
    _, ditto = ran("ditto", net, lam=lam, **how)
    _, fedavg = ran("fedavg", net, **how)
    assert_same(ditto.server, fedavg.server)
    assert_same(select(ditto.clients, fedavg.clients), fedavg.clients)


@both_nets
@pytest.mark.parametrize("buffers", ["local", "average", "reset"])
def test_dittos_personal_models_without_pull_are_local(net, buffers):
    how = dict(buffers=buffers, participation=0.5)
    (ditto, a), (local, b) = ran("ditto", net, lam=0.0, **how), ran("local", net, **how)
    sel = torch.arange(4)
    assert_same(ditto.serve(ditto.begin(a, sel)), local.serve(local.begin(b, sel)))
    pulled, c = ran("ditto", net, lam=0.7, **how)
    assert not torch.equal(c.clients["v.fc.weight"], a.clients["v.fc.weight"])


@both_nets
def test_pfedme_with_one_exact_follower_is_fedavg(net):
    # K = 1, nu = 0, eta lambda = 1: theta starts each batch at w_i, which then becomes theta.
    _, pfedme = ran("pfedme", net, lr=0.05, lam=20.0, inner_steps=1, decay=0.0, personal_lr=0.03)
    _, fedavg = ran("fedavg", net, lr=0.03)
    assert_same(pfedme.server, fedavg.server, exact=False)
    assert_same(select(pfedme.clients, fedavg.clients), fedavg.clients, exact=False)


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


@both_nets
@pytest.mark.parametrize("name", ["fedprox", "fedbn", "lgfedavg", "fedrep", "ditto"])
def test_one_client_alone_is_local(name, net):
    class Frozen(Local):  # what FedRep without a head phase is
        name = ""

        def local(self, c, start):
            return c.train(self.loss, start, only=set(self.task.parameters) - self.task.head)

    args = {"fedprox": dict(mu=0.0), "fedrep": dict(head_epochs=0)}.get(name, {})
    how = dict(data=client_data(sizes=(13,)))
    local, b = ran("local", net, cls=Frozen if name == "fedrep" else Local, **how)
    for other in (name, "fedavg") if name == "fedprox" else (name,):
        method, a = ran(other, net, **(args if other == name else {}), **how)
        assert_same(held(method, a), held(local, b))


@both_nets
def test_fine_tuned_is_a_view_of_fedavg(net):
    method, data = bound("fedavg", net)
    with_after, history, _, after = simulate(method, data, workers=1)
    assert_same(with_after, simulate(under(method, eval_after=False), data, workers=1)[0])
    _, local, *_ = simulate(*bound("local", net), workers=1)
    assert torch.equal(history.evals["after/test/loss"][0], local.evals["after/test/loss"][0])
    assert not torch.equal(
        history.evals["after/test/loss"][1], history.evals["before/test/loss"][1]
    )
    _, untrained, *_ = simulate(under(method, epochs=0), data, workers=1)
    for before, after in zip(
        *(untrained.evals[f"{w}/test/loss"] for w in ("before", "after")), strict=True
    ):
        assert torch.equal(before, after)


# -- rounds by hand: scores (a u, -a u) on x = 1, so that every gradient is a scalar -----------------------------------
class Pair(nn.Module):
    """A base of one weight u and a head of two, a and -a."""

    def __init__(self, u=0.75, a=0.5):
        super().__init__()
        self.base, self.fc = nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)
        self.base.weight.data.fill_(u)
        self.fc.weight.data.copy_(torch.tensor([[a], [-a]]))

    def features(self, x):
        return self.base(x)

    def forward(self, x):
        return self.fc(self.features(x))


SIGNS, SIZES, LR = (1, -1), (2, 6), 0.3  # client 0 holds label 0 alone, client 1 label 1


def pair(name, **kw):
    y = np.repeat([0, 1], SIZES)
    x = np.ones((len(y), 1))
    index = np.split(np.arange(len(y)), [SIZES[0]])
    train, test = [index[0], index[1]], [[len(y)], [len(y) + 1]]
    fed = Federation(np.r_[x, [[1.0], [1.0]]], np.r_[y, 0, 1], train, None, test)
    data = ClientData(fed, seed=0, holdout=0, dtype=torch.float64)
    return bound(name, Pair().double(), data=data, **dict(batch=1, lr=LR, rounds=2) | kw)


def slope(u, a, s):
    """d/du and d/da of log(1 + exp(-2 s a u))."""
    q = 1 / (1 + exp(2 * s * a * u))
    return np.array([-s * q * 2 * a, -s * q * u])


def mean(pairs):
    return sum(n * np.array(p) for n, p in zip(SIZES, pairs, strict=True)) / sum(SIZES)


def read(p, k=None, prefix=""):
    u, a = p[prefix + "base.weight"], p[prefix + "fc.weight"]
    u, a = (u, a) if k is None else (u[k], a[k])
    assert torch.allclose(a[0], -a[1], rtol=0, atol=1e-14)
    return np.array([float(u), float(a[0])])


def near(a, b, tol=1e-12):
    np.testing.assert_allclose(a, b, rtol=tol, atol=tol)


START = np.array([0.75, 0.5])


def descend(p, s, steps, lr=LR, pull=0.0, to=0.0, move=(1, 1)):
    for _ in range(steps):
        p = p - lr * (slope(*p, s) + pull * (p - to)) * np.array(move)
    return p


def test_fedprox_by_hand():
    w = START
    for _ in range(2):
        w = mean([descend(w, s, n, pull=0.4, to=w) for s, n in zip(SIGNS, SIZES, strict=True)])
    method, data = pair("fedprox", mu=0.4)
    near(read(simulate(method, data, workers=1)[0].server), w)


def test_ditto_by_hand():
    w, v = START, [START, START]
    for _ in range(2):
        v = [descend(v[k], SIGNS[k], 3 * SIZES[k], lr=0.2, pull=1.5, to=w) for k in (0, 1)]
        w = mean([descend(w, s, n) for s, n in zip(SIGNS, SIZES, strict=True)])
    method, data = pair("ditto", lam=1.5, personal_epochs=3, personal_lr=0.2)
    state, _, before, _ = simulate(method, data, workers=1)
    near(read(state.server), w)
    for k in (0, 1):
        near(read(before, k), v[k])


def test_fedrep_by_hand():
    u, heads = START[0], [START[1]] * 2
    for _ in range(2):
        ends = []
        for k in (0, 1):
            p = descend(np.array([u, heads[k]]), SIGNS[k], 2 * SIZES[k], move=(0, 1))
            ends.append(descend(p, SIGNS[k], 3 * SIZES[k], move=(1, 0)))
        u, heads = mean(ends)[0], [p[1] for p in ends]
    method, data = pair("fedrep", head_epochs=2, body_epochs=3)
    _, _, before, _ = simulate(method, data, workers=1)
    for k in (0, 1):
        near(read(before, k), [u, heads[k]])


def test_lgfedavg_by_hand():
    bases, a = [START[0]] * 2, START[1]
    for _ in range(2):
        ends = [descend(np.array([bases[k], a]), SIGNS[k], SIZES[k]) for k in (0, 1)]
        a, bases = mean(ends)[1], [p[0] for p in ends]
    method, data = pair("lgfedavg")
    _, _, before, _ = simulate(method, data, workers=1)
    for k in (0, 1):
        near(read(before, k), [bases[k], a])


@pytest.mark.parametrize("beta", [1.0, 1.6])
def test_pfedme_by_hand(beta):
    lam, nu, fast = 2.0, 0.01, 0.1
    w = START
    for _ in range(2):
        locals_, thetas = [], []
        for s, n in zip(SIGNS, SIZES, strict=True):
            mine, theta = w, w
            for _ in range(n):
                for _ in range(3):
                    theta = theta - fast * (slope(*theta, s) + lam * (theta - mine) + nu * theta)
                mine = mine - LR * lam * (mine - theta)
            locals_.append(mine)
            thetas.append(theta)
        last, w = w, (1 - beta) * w + beta * mean(locals_)
    how = dict(lam=lam, inner_steps=3, personal_lr=fast, beta=beta, decay=nu)
    method, data = pair("pfedme", **how)
    state, _, before, _ = simulate(method, data, workers=1)
    near(read(state.server), w)
    for k in (0, 1):
        near(read(before, k), thetas[k])
    # As published code scores: the global model before local training, w_i after it.
    method, data = pair("pfedme", score="local", rounds=1, **how)
    state, _, before, _ = simulate(method, data, workers=1)
    near(read(before, 0), last)
    _, end = one_round(method, data, state)
    for k in (0, 1):
        near(read(method.serve(end), k), locals_[k])


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
    state, _, before, _ = simulate(method, data, workers=1)
    near(read(state.server), w)
    for k in (0, 1):
        near(read(before, k), descend(w, SIGNS[k], SIZES[k], lr=alpha))
    method, data = pair("perfedavg", version=version, alpha=alpha, beta=beta, adapt_steps=1)
    _, _, before, _ = simulate(method, data, workers=1)
    near(read(before, 1), descend(w, SIGNS[1], 1, lr=alpha))


def test_passes_make_as_many_updates_as_fedavg():
    # Six batches of one sample: three meta-steps a pass.
    p, beta = START, 0.2
    for _ in range(6):
        p = p - beta * slope(*(p - 0.5 * slope(*p, -1)), -1)
    method, data = pair("perfedavg", alpha=0.5, beta=beta, passes=2, rounds=1)
    _, end = one_round(method, data, method.init())
    near(read(end, 1), p)


@pytest.mark.parametrize(
    ("name", "streams"),
    [
        ("fedrep", {"head", "local"}),
        ("perfedavg", {"local", "local/1", "adapt"}),
        ("ditto", {"local"}),
        ("pfedme", {"local"}),
    ],
)
def test_extra_phases_have_batches_of_their_own(name, streams):
    data, seen = client_data(), set()
    indices = data.batch_indices
    data.batch_indices = lambda k, r, **how: seen.add(how["stream"]) or indices(k, r, **how)
    ran(name, data=data, rounds=1, **dict(passes=2) if name == "perfedavg" else {})
    assert seen == streams


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("perfedavg", dict(version="hf", passes=2)),
        ("pfedme", dict(beta=1.5)),
        ("fedrep", dict(head_epochs=2)),
    ],
)
def test_executors_agree_off_the_defaults_too(name, args):
    method, data = bound(name, "lenet", buffers="average", rounds=2, **args)
    a, b = (simulate(method, data, executor=x, workers=2)[0] for x in ("threads", "batched"))
    assert_same(a, b, exact=False)


# -- FedProx and Ditto: the proximal term ------------------------------------------------------------------------------
def test_gradient_of_the_proximal_term():
    g = torch.Generator().manual_seed(0)
    p, q = (
        {n: torch.randn(3, 2, generator=g, dtype=torch.float64) for n in ("a", "b", "c")}
        for _ in range(2)
    )
    got = gradient_of(half_square)(p, q, ("a", "b"))
    assert torch.equal(got["a"], p["a"] - q["a"]) and torch.equal(
        got["c"], torch.zeros_like(p["c"])
    )
    assert all(
        torch.equal(v, torch.zeros_like(v))
        for v in gradient_of(half_square)(p, p, ("a", "b")).values()
    )


@both_nets
@pytest.mark.parametrize(("name", "args"), [("fedprox", dict(mu=20.0)), ("ditto", dict(lam=20.0))])
def test_a_steps_pull_is_to_the_received_model(name, args, net):
    # eta mu = 1: wherever a step starts, it ends at w - eta grad F (FedProx, and Ditto's v).
    method, data = bound(name, net, lr=0.05, **args)
    batch = Batch(*data.batch(torch.as_tensor(data.index["train"][0])))
    g = torch.Generator().manual_seed(1)
    w, stats = (
        select(method.task.initial, names)
        for names in (method.task.parameters, method.task.buffers)
    )
    p = {n: v + 0.1 * torch.randn(v.shape, generator=g, dtype=v.dtype) for n, v in w.items()}
    pulled = method.loss if name == "fedprox" else method.personal_loss
    total = gradient_of(lambda p: pulled(p | stats, w, batch))(p)
    plain = gradient_of(lambda p: F.cross_entropy(method.task.apply(p | stats, batch.x), batch.y))(
        p
    )
    assert_same(axpy(-0.05, total, p), axpy(-0.05, plain, w), exact=False)


@both_nets
def test_fedprox_first_step_is_fedavgs_and_without_gradient_nothing_moves(net):
    first = dict(steps=1, epochs=0, rounds=1)
    assert_same(ran("fedprox", net, mu=1.0, **first)[1], ran("fedavg", net, **first)[1])

    class Flat(FedProx):
        name = ""

        def logits(self, p, x):
            return super().logits(p, x).detach()

    method, data = bound("fedprox", net, cls=Flat, mu=1.0)
    start, end = one_round(method, data, method.init())
    assert all(torch.equal(start[n], end[n]) for n in method.task.parameters)


def test_dittos_personal_model_stays_home():
    method, data = bound("ditto", "lenet", participation=0.5, rounds=1)
    size = sum(v.numel() for v in select(method.task.initial, method.task.parameters).values())
    _, history, *_ = simulate(method, data, workers=1)
    assert history.upload[-1] == history.download[-1] == 2 * size


# -- Per-FedAvg: the meta-gradient -------------------------------------------------------------------------------------
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


# -- pFedMe ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("frozen", ["beta", "lam"])
def test_pfedme_frozen_server(frozen):
    # Refused as hyper-parameters; the algebra of the limits, with weights that sum exactly.
    method, data = bound(
        "pfedme", "lenet", data=client_data(sizes=(4, 4, 8)), beta=2.0 if frozen == "lam" else 1.0
    )
    object.__setattr__(method, frozen, 0.0)
    state = simulate(method, data, workers=1)[0]
    assert_same(state.server, select(method.task.initial, state.server))
    assert not torch.equal(state.clients["theta.fc.weight"], method.task.start()["fc.weight"])


def test_pfedmes_personal_models_are_copies():
    method, *_ = bound("pfedme", "lenet")
    state = method.init()
    before = {n: v.clone() for n, v in state.clients.items()}
    for v in (*state.server.values(), *method.task.initial.values()):
        v.zero_()
    assert_same(state.clients, before)
    method, state = ran("pfedme")
    theta = unprefixed("theta.", state.clients)
    assert theta.keys() == set(method.task.parameters)
    assert all((v[0] - state.server[n]).abs().max() > 1e-6 for n, v in theta.items())


def test_pfedme_averages_statistics_without_beta():
    # beta > 1 extrapolates: a variance could become negative.
    method, data = bound("pfedme", "lenet", buffers="average", beta=2.0, rounds=1)
    state = method.init()
    _, end = one_round(method, data, state)
    w = data.n.double() / data.n.sum()
    new = simulate(method, data, workers=1)[0].server
    for n in method.task.buffers:
        if new[n].is_floating_point():
            torch.testing.assert_close(
                new[n], torch.tensordot(w, end[n], 1), rtol=1e-12, atol=1e-12
            )
    n = "fc.weight"
    mean = torch.tensordot(w, end[n], 1)
    torch.testing.assert_close(new[n], 2 * mean - method.task.initial[n], rtol=1e-12, atol=1e-12)


# -- FedBN, LG-FedAvg, FedRep: what travels ----------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["local", "average", "reset"])
def test_fedbn_against_plain_modules(policy):
    method, data = bound("fedbn", "lenet", rounds=2, buffers=policy)
    nets = [copy.deepcopy(method.task.model) for _ in range(4)]
    w = (data.n.double() / data.n.sum()).tolist()
    for r in range(2):
        for k, net in enumerate(nets):
            sgd = torch.optim.SGD(net.train().parameters(), lr=CONFIG.lr)
            for idx in torch.as_tensor(data.batch_indices(k, r, batch=CONFIG.batch))[:, 0]:
                x, y = data.batch(idx)
                sgd.zero_grad()
                F.cross_entropy(net(x), y).backward()
                sgd.step()
        owned = {
            f"{path}.{n}"
            for path, m in nets[0].named_modules()
            if isinstance(m, nn.BatchNorm2d)
            for n in m.state_dict()
        }
        averaged = {
            n: sum(a * net.state_dict()[n] for a, net in zip(w, nets, strict=True))
            for n in method.task.names
        }
        for net in nets:
            net.load_state_dict(
                net.state_dict() | {n: v for n, v in averaged.items() if n not in owned}
            )
    *_, before, _ = simulate(method, data, workers=1)
    assert owned
    for k, net in enumerate(nets):
        assert_same({n: v[k] for n, v in before.items()}, dict(net.state_dict()), exact=False)


def test_fedbn_sends_no_batchnorm_of_a_resnet():
    net = models.build("resnet18", (3, 32, 32), 10, stem="cifar", width=0.0625)
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    method, *_ = bound("fedbn", net)
    sent = method.download(method.init(), torch.arange(4))
    assert len(norms) == 20
    assert scalars(sent) == sum(p.numel() for p in net.parameters()) - sum(
        2 * m.num_features for m in norms
    )
    assert not any("downsample.1" in n for n in sent)


@both_nets
@pytest.mark.parametrize("name", ["lgfedavg", "fedbn"])
def test_what_was_sent_is_equal_everywhere_and_the_rest_is_not(name, net):
    method, state = ran(name, net)
    start = method.begin(state, torch.arange(4))
    for n in method.task.parameters:
        assert n in state.clients or torch.equal(start[n][0], start[n][2]), n
    for n in select(
        state.clients, lambda n: n.endswith("weight")
    ):  # a bias below BatchNorm gets no gradient
        assert not torch.equal(start[n][0], start[n][2]), n


@both_nets
def test_a_head_of_fedrep_matters_to_its_client_alone(net):
    method, state = ran("fedrep", net, rounds=1)
    _, data = bound("fedrep", net)
    other = State(state.server, {n: v.clone() for n, v in state.clients.items()}, {}, state.round)
    other.clients["fc.weight"][1] += 0.5
    (_, a), (_, b) = one_round(method, data, state), one_round(method, data, other)
    for n in a:
        assert torch.equal(a[n][[0, 2, 3]], b[n][[0, 2, 3]]), n
    assert not torch.equal(a["fc.weight"][1], b["fc.weight"][1])


def test_fedreps_frozen_part_does_not_decay():
    how = dict(momentum=0.9, weight_decay=0.1)
    method, state = ran("fedrep", "lenet", head_epochs=0, **how)
    assert torch.equal(state.clients["fc.weight"], method.task.start()["fc.weight"])
    method, state = ran("fedrep", "lenet", body_epochs=0, **how)
    assert_same(state.server, select(method.task.initial, state.server), exact=False)


@pytest.mark.parametrize(
    "name", ["fedprox", "perfedavg", "pfedme", "lgfedavg", "fedbn", "fedrep", "ditto"]
)
@pytest.mark.parametrize("buffers", ["local", "average"])
def test_scalars_on_the_wire(name, buffers):
    method, data = bound(name, "lenet", buffers=buffers, participation=0.5, rounds=2)
    count = lambda names: sum(method.task.initial[n].numel() for n in names)  # noqa: E731
    t, base = method.task, [n for n in method.task.parameters if n not in method.task.head]
    model, statistics = count(t.parameters), count(n for n in t.buffers if "running" in n)
    expected = {
        "lgfedavg": model - count(base),
        "fedrep": count(base),
        "fedbn": count(set(t.parameters) - t.bn),
    }
    expected = expected.get(name, model)
    if buffers == "average" and name not in (
        "fedbn",
        "lgfedavg",
    ):  # the head of this net has no BatchNorm
        expected += statistics
    _, history, *_ = simulate(method, data, workers=1)
    assert history.download == history.upload == [0, 2 * expected, 4 * expected]


def test_lgfedavg_starts_from_a_pretrained_model():
    how = dict(clients=3, model="mlp", model_args={"hidden": 8}, max_samples=20, batch=10)
    trained = Experiment(method="fedavg", rounds=2, lr=0.1, **how)
    lg = run(Experiment(method="lgfedavg", rounds=1, init_from=trained, **how), workers=1)
    last, first = (
        run(trained, workers=1).arrays["before/test/correct"][-1],
        lg.arrays["before/test/correct"][0],
    )
    scratch = run(Experiment(method="lgfedavg", rounds=1, **how), workers=1).arrays[
        "before/test/correct"
    ][0]
    assert np.array_equal(first, last) and not np.array_equal(first, scratch)


@both_nets
@pytest.mark.parametrize("name", ["pfedme", "ditto"])
def test_personal_models_of_new_clients_start_at_the_global_one(name, net):
    method, state = ran(name, net)
    method, new = joined(method, state, 2)
    served = method.serve(method.begin(new, torch.arange(2)))
    assert served.keys() == set(method.task.names)
    assert_same(
        select(served, method.task.parameters),
        expand(select(state.server, method.task.parameters), 2),
    )


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "args", "word"),
    [
        ("fedprox", dict(mu=-0.1), "mu"),
        ("fedprox", dict(mu=40.0), "diverges"),
        ("fedprox", dict(mu=float("nan")), "mu"),
        ("perfedavg", dict(version="second"), "version"),
        ("perfedavg", dict(alpha=-0.1), "alpha"),
        ("perfedavg", dict(beta=0.0), "beta"),
        ("perfedavg", dict(delta=0.0), "delta"),
        ("perfedavg", dict(passes=0), "passes"),
        ("perfedavg", dict(adapt_epochs=0), "adapt_epochs"),
        ("perfedavg", dict(adapt_steps=-1), "adapt_steps"),
        ("pfedme", dict(beta=0.0), "beta"),
        ("pfedme", dict(lam=0.0), "lam"),
        ("pfedme", dict(lam=40.0), "lam"),
        ("pfedme", dict(inner_steps=0), "inner_steps"),
        ("pfedme", dict(personal_lr=0.0), "personal_lr"),
        ("pfedme", dict(personal_lr=0.2), "personal_lr"),
        ("pfedme", dict(decay=-1.0), "decay"),
        ("pfedme", dict(score="global"), "score"),
        ("fedrep", dict(head_epochs=0, body_epochs=0), "head_epochs"),
        ("fedrep", dict(head_epochs=-1), "head_epochs"),
        ("fedrep", dict(body_epochs=-1), "body_epochs"),
        ("ditto", dict(lam=-1.0), "lam"),
        ("ditto", dict(lam=50.0), "lam"),
        ("ditto", dict(personal_epochs=0), "personal_epochs"),
        ("ditto", dict(personal_lr=0.0), "personal_lr"),
    ],
)
def test_refusals(name, args, word):
    with pytest.raises(
        ValueError,
        match=rf"{name}: .*{word}.*allowed|{name}: .*allowed.*{word}|{name}\({word}=.*\): allowed",
    ):
        bound(name, lr=0.05, **args)
