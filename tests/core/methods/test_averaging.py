"""FedProx, Per-FedAvg, pFedMe, LG-FedAvg, FedBN, FedRep, Ditto: rounds by hand, hand-derived gradients, and what each reduces to."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad as gradient_of

from pfl_core.engine.simulate import simulate
from pfl_core.methods.base import Batch
from pfl_core.methods.fedavg import Local
from pfl_core.methods.terms import half_square
from pfl_core.stacked import axpy, expand, select
from tests.core.methods.averaging_shared import (
    START,
    both_nets,
    bound,
    near,
    one_round,
    pair,
    ran,
    read,
    slope,
)
from tests.core.methods.setting import assert_same, client_data, joined, under


def held(method, state):
    """Everything that the clients hold when a round begins: parameters and statistics, (K, ...)."""
    return select(method.begin(state, torch.arange(method.task.K)), method.task.names)


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
        assert_same(held(method, a), held(local, b), exact=name != "fedrep")  # Frozen is not ours


@both_nets
def test_fine_tuned_is_a_view_of_fedavg(net):
    method, data = bound("fedavg", net)
    with_after, history, _, after, _ = simulate(method, data, workers=1)
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
