"""FedFew: its rule, beside plain loops and what it reduces to."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from pfl_core.engine.simulate import simulate
from pfl_core.methods.fedfew import few_weights
from pfl_core.stacked import unprefixed
from tests.core.methods.features_shared import EVERYONE, context, one_round, randn
from tests.core.methods.loops_shared import batches, chosen, descend, fit, samples
from tests.core.methods.setting import assert_same, client_data, setup

EQUAL = (7, 7, 7)


def few(executor="threads", **how):
    method, data = setup("fedfew", **how)
    return method, data, simulate(method, data, executor=executor, workers=2)


@pytest.mark.parametrize("executor", ["threads", "batched"])
@pytest.mark.parametrize("losses", ["after", "before"])
def test_fedfew_is_a_plain_loop(executor, losses):
    args = dict(models=2, mu=0.05, losses=losses)
    method, data, (state, history, served, *_) = few(
        executor, bn=False, args=args, participation=0.75
    )
    names, loss = method.task.parameters, partial(fit, method)
    first = method.init().server
    thetas = [{n: first[f"m{k}.{n}"] for n in names} for k in range(2)]
    for r in range(3):
        sel = chosen(method, r)
        ends = {}
        for i in sel:
            for k in range(2):
                seen = batches(method, data, i, r, stream=["local", "local/1"][k])
                ends[i, k] = descend(thetas[k], names, seen, loss, 0.05)
        total, s, e = sum(float(data.n[i]) for i in sel), {}, {}
        for i in sel:
            for k in range(2):
                judged = ends[i, k] if losses == "after" else thetas[k]
                risk = float(loss(judged, *samples(data, i)))
                e[i, k] = math.exp(-float(data.n[i]) / total * risk / 0.05)
            s[i] = e[i, 0] + e[i, 1]
        whole = sum(1 / s[i] for i in sel)
        new = []
        for k in range(2):
            share = {i: 1 / s[i] / whole * e[i, k] / s[i] for i in sel}
            new.append(
                {
                    n: v + sum(share[i] * (ends[i, k][n] - v) for i in sel)
                    for n, v in thetas[k].items()
                }
            )
        thetas = new
    for k in range(2):
        for n in names:
            torch.testing.assert_close(
                state.server[f"m{k}.{n}"], thetas[k][n], rtol=1e-10, atol=1e-10
            )
    for i in range(4):  # each is served the model of its least training loss
        best = min(range(2), key=lambda k: float(loss(thetas[k], *samples(data, i))))
        for n in names:
            torch.testing.assert_close(served[n][i], thetas[best][n], rtol=1e-10, atol=1e-10)


def test_few_weights_are_the_gradient_of_the_objective():
    risk, mu = randn(5, 3).abs().requires_grad_(), 0.3
    a = few_weights(risk.detach(), torch.ones(5), mu)
    # With equal sizes q_i is 1 / 5; the objective has none, so its mu is five times that.
    mu *= 5
    objective = mu * torch.log((1 / torch.exp(-risk / mu).sum(1)).sum())
    torch.testing.assert_close(a, torch.autograd.grad(objective, risk)[0])
    assert (a >= 0).all() and float(a.sum()) == pytest.approx(1)
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(
        few_weights(risk.detach()[:, order], torch.ones(5), 0.3), a[:, order]
    )


def test_few_weights_at_a_tiny_mu_pick_the_client_that_is_worst_off():
    risk = torch.tensor([[1.0, 2.0], [9.0, 5.0], [0.1, 0.2]])
    a = few_weights(risk, torch.tensor([3, 3, 3]), 1e-6)
    assert torch.equal(a, torch.tensor([[0, 0], [0, 1], [0, 0]]).double())


@pytest.mark.parametrize("bn", [False, True])
@pytest.mark.parametrize("buffers", ["local", "average", "reset"])
def test_one_model_and_a_large_mu_are_fedavg_for_equal_sizes(bn, buffers):  # R26
    how = dict(bn=bn, buffers=buffers, data=client_data(EQUAL))
    _, _, (state, *_, before, after) = few(args=dict(models=1, mu=1e12), **how)
    method, data = setup("fedavg", **how)
    fedavg, *_, b, a = simulate(method, data, workers=2)
    assert_same(unprefixed("m0.", state.server), fedavg.server, exact=False)
    for one, other in ((before, b), (after, a)):
        assert_same({n: one[n] for n in other}, dict(other), exact=False)


def test_one_model_is_not_fedavg_for_unequal_sizes():
    _, _, (state, *_) = few(args=dict(models=1, mu=1e12))
    method, data = setup("fedavg")
    fedavg, *_ = simulate(method, data, workers=2)
    assert not torch.allclose(state.server["m0.fc.weight"], fedavg.server["fc.weight"])


def test_a_first_rounds_trained_model_is_fedavgs():
    models = []
    for name, args in (("fedfew", dict(models=1)), ("fedavg", {})):
        method, data = setup(name, args=args)
        state = method.init()
        with torch.no_grad():
            end = method.local(context(method, data, state), method.begin(state, EVERYONE))
        models.append(method.serve(end))
    assert_same(models[0], models[1])


def test_models_start_alike_only_where_asked_and_streams_tell_them_apart():
    method, data = setup("fedfew", args=dict(start="same"))
    state = method.init()
    assert torch.equal(state.server["m0.fc.weight"], state.server["m2.fc.weight"])
    state, _ = one_round(method, data, state)
    assert not torch.equal(state.server["m0.fc.weight"], state.server["m2.fc.weight"])
    method, _ = setup("fedfew")
    first, again = method.init().server, method.init().server
    assert_same(first, again)
    for n in ("conv1.weight", "fc.weight", "fc.bias"):
        a, b, c = (first[f"m{k}.{n}"] for k in range(3))
        assert not torch.equal(a, b) and not torch.equal(b, c), n
        assert torch.equal(a, method.task.initial[n])
        assert torch.equal(a.flatten().sort()[0], b.flatten().sort()[0]), "the same rule drew them"


def test_copies_that_see_equal_batches_stay_equal_and_share_the_step(monkeypatch):
    method, data = setup(
        "fedfew", bn=False, args=dict(start="same", mu=1e12), data=client_data(EQUAL)
    )
    one, _ = setup("fedfew", bn=False, args=dict(models=1, mu=1e12), data=data)
    alone, _ = one_round(one, data, one.init(), EVERYONE[:3])
    state = method.init()
    start = {n: v.clone() for n, v in state.server.items()}
    sent = method.begin(state, EVERYONE[:3])
    ctx = context(method, data, state, EVERYONE[:3])
    train = ctx.train
    monkeypatch.setattr(ctx, "train", lambda loss, p, stream="local": train(loss, p))
    with torch.no_grad():
        state = method.upload(state, EVERYONE[:3], sent, method.local(ctx, sent), data.n)
    for n in method.task.parameters:
        a, b, c = (state.server[f"m{k}.{n}"] for k in range(3))
        assert torch.equal(a, b) and torch.equal(b, c)
        step = alone.server[f"m0.{n}"] - start[f"m0.{n}"]
        torch.testing.assert_close(a - start[f"m0.{n}"], step / 3, rtol=1e-8, atol=1e-12)


def test_the_first_of_equal_models_is_served_and_the_best_of_others():
    method, data = setup("fedfew", args=dict(models=2))
    p = method.begin(method.init(), EVERYONE)
    assert torch.equal(method.serve(p)["fc.weight"], p["m0.fc.weight"])
    risk = torch.tensor([[1.0, 1.0], [2.0, 1.0], [1.0, 2.0], [3.0, 1.0]])
    served = method.serve(p | {"risk": risk})
    for i, k in enumerate([0, 1, 0, 1]):
        for n in method.task.names:
            assert torch.equal(served[n][i], p[f"m{k}.{n}"][i]), n


@pytest.mark.parametrize("buffers", ["local", "average", "reset"])
def test_fedfew_counts_models_and_losses(buffers):
    method, data, (state, history, *_) = few(buffers=buffers, rounds=1)
    counted = method.task.names if buffers == "average" else method.task.parameters
    floats = (v for n, v in method.task.initial.items() if n in counted and v.is_floating_point())
    size = sum(v.numel() for v in floats)
    assert history.download[-1] == 4 * 3 * size
    assert history.upload[-1] == 4 * (3 * size + 3)


def test_a_client_of_one_sample_and_one_client_alone():
    for sizes in ((1,), (1, 5)):
        _, _, (state, history, *_) = few(data=client_data(sizes))
        assert all(torch.isfinite(v).all() for v in state.server.values() if v.is_floating_point())


def test_fedfews_risk_is_the_mean_training_loss():
    method, data = setup("fedfew", bn=False)
    p = method.begin(method.init(), EVERYONE)
    found = method.risk(context(method, data, method.init()), method.several(p))
    for i in range(4):
        x, y = samples(data, i)
        for k in range(3):
            model = {n: p[f"m{k}.{n}"][i] for n in method.task.names}
            torch.testing.assert_close(found[i, k], F.cross_entropy(method.task.apply(model, x), y))
