"""FedAS: its rule, beside plain loops and what it reduces to."""

import copy
from functools import partial

import pytest
import torch

from pfl_core.engine.simulate import simulate
from pfl_core.stacked import select
from tests.core.methods.features_shared import EVERYONE, context, one_round
from tests.core.methods.loops_shared import batches, chosen, descend, fit, gradient, samples
from tests.core.methods.setting import assert_same, client_data, setup

PER = dict(weigh_by="samples")


@pytest.mark.parametrize("executor", ["threads", "batched"])
@pytest.mark.parametrize("weigh_by", ["fisher", "samples"])
def test_fedas_is_a_plain_loop(executor, weigh_by):
    args = dict(align_lr=0.3, align_epochs=2, align_batch=4, weigh_by=weigh_by)
    method, data = setup("fedas", bn=False, args=args, participation=0.75)
    state, history, served, *_ = simulate(method, data, executor=executor, workers=2)
    t, loss = method.task, partial(fit, method)
    base = [n for n in t.parameters if n not in t.head]
    own = [{n: t.initial[n] for n in t.parameters} for _ in range(4)]  # last models
    shared = {n: t.initial[n] for n in base}
    for r in range(3):
        ends, weight = {}, {}
        for i in (sel := chosen(method, r)):
            x, y = samples(data, i)
            z = t.features(own[i], x)
            means = {c: z[y == c].mean(0) for c in y.unique().tolist()}

            def apart(p, x, y, means=means):
                z = t.features(p, x)
                parts = [
                    sum(((z[b] - means[c]) ** 2).mean() for b in (y == c).nonzero()[:, 0])
                    / (y == c).sum()
                    for c in y.unique().tolist()
                ]
                return sum(parts)

            p = own[i] | shared
            seen = batches(method, data, i, r, stream="align", epochs=2, batch=4)
            p = descend(p, base, seen, apart, 0.3)
            p = descend(p, list(t.parameters), batches(method, data, i, r), loss, 0.05)
            ends[i], weight[i] = p, float(data.n[i])
            if weigh_by == "fisher":
                weight[i] = 0.0
                for x, y in batches(method, data, i, r, stream="fisher", epochs=1):
                    g = gradient(lambda q, x=x, y=y: loss(q, x, y), p, t.parameters)
                    weight[i] += sum(float((v**2).sum()) for v in g.values())
        total = sum(weight.values())
        shared = {n: sum(weight[i] / total * ends[i][n] for i in sel) for n in base}
        for i in sel:
            own[i] = ends[i]
    for n in base:
        torch.testing.assert_close(state.server[n], shared[n], rtol=1e-10, atol=1e-10)
    for n in t.parameters:
        for i in range(4):
            torch.testing.assert_close(served[n][i], own[i][n], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bn", [False, True])
@pytest.mark.parametrize("args", [dict(align_lr=0.0), dict(align_epochs=0)])
def test_fedas_without_its_two_ideas_is_fedper(bn, args):  # R24
    method, data = setup("fedas", bn=bn, args=PER | args)
    per, _ = setup("fedper", bn=bn)
    a, b = (simulate(m, data, workers=2) for m in (method, per))
    assert_same(a[0].server, b[0].server)
    assert_same(select(a[0].clients, b[0].clients), b[0].clients)


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_before_a_round_is_after_the_last_one(buffers):
    method, data = setup("fedas", buffers=buffers)
    state = method.init()
    state, end = one_round(method, data, state, EVERYONE[:3])
    with torch.no_grad():
        before = method.personal(state, context(method, data, state))
    after = method.serve(end)
    for n in method.task.names:
        assert torch.equal(before[n][:3], after[n]), n
    for n in method.task.parameters:
        assert torch.equal(before[n][3], method.task.initial[n]), "it never took part"


def test_who_is_away_keeps_its_own_model():
    method, data = setup("fedas")
    state, _ = one_round(method, data, method.init())
    before = copy.deepcopy(state.clients)
    state, _ = one_round(method, data, state, EVERYONE[:2])
    for n, v in state.clients.items():
        assert torch.equal(v[2:], before[n][2:]), n
    assert not torch.equal(state.clients["own.conv1.weight"][:2], before["own.conv1.weight"][:2])


def test_fisher_weights_have_no_scale_and_fall_back_on_sizes():
    method, data = setup("fedas", bn=False)
    state = method.init()
    start = method.begin(state, EVERYONE)
    with torch.no_grad():
        end = method.local(context(method, data, state), start)
    f, n = end["fisher"], data.n.to(data.dtype)
    assert (f > 0).all() and f.argmax() != n.argmax()

    def averaged(fisher):
        new = method.upload(copy.deepcopy(state), EVERYONE, start, end | {"fisher": fisher}, n)
        return new.server["conv1.weight"]

    torch.testing.assert_close(averaged(f), averaged(1e6 * f), rtol=1e-12, atol=1e-14)
    bases = end["conv1.weight"]
    torch.testing.assert_close(averaged(f), torch.einsum("s,s...->...", f / f.sum(), bases))
    torch.testing.assert_close(averaged(0 * f), torch.einsum("s,s...->...", n / n.sum(), bases))


def test_alignment_moves_the_base_from_round_0_on_and_leaves_statistics():
    method, data = setup("fedas", lr=1e-30)
    state = method.init()
    ctx, start = context(method, data, state), method.begin(state, EVERYONE)
    still, _ = setup("fedas", lr=1e-30, args=dict(align_epochs=0))
    with torch.no_grad():
        end = method.local(ctx, start)
        other = still.local(context(still, data, state), start)
    assert not torch.allclose(end["conv1.weight"][0], start["conv1.weight"][0])
    assert torch.equal(end["fc.weight"], start["fc.weight"])
    counted = next(n for n in method.task.buffers if n.endswith("tracked"))
    assert torch.equal(end[counted], other[counted]), "local training alone advances them"


def test_fisher_of_all_parameters_depends_on_the_batch():
    found = []
    for batch in (1, 6):
        method, data = setup("fedas", bn=False, batch=batch)
        state = method.init()
        with torch.no_grad():
            p = method.begin(state, EVERYONE)
            model = select(p, method.task.names)
            found.append(method.fisher(context(method, data, state), model))
    assert (found[0] > found[1])[:3].all()


def test_fedas_counts_a_base_and_a_number():
    for args, more in (({}, 1), (PER, 0)):
        method, data = setup("fedas", args=args, rounds=1)
        _, history, *_ = simulate(method, data, workers=1)
        base = [n for n in method.task.parameters if n not in method.task.head]
        size = sum(method.task.initial[n].numel() for n in base)
        assert history.download[-1] == 4 * size and history.upload[-1] == 4 * (size + more)


def test_a_client_of_one_sample_is_aligned_and_weighs():
    method, data = setup("fedas", data=client_data((1, 6)), bn=False)
    state, end = one_round(method, data, method.init(), torch.arange(2))
    assert (end["fisher"] > 0).all()
    assert all(torch.isfinite(v).all() for v in state.server.values())
