"""FedALA: its rule, beside plain loops and what it reduces to."""

import pytest
import torch

from pfl_core.engine.simulate import simulate
from pfl_core.methods.base import Batch, Step, make_method
from pfl_core.stacked import select, unprefixed
from tests.core.methods.layers_shared import ALL, context
from tests.core.methods.setting import assert_same, client_data, rounds, setup


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("executor", ["threads", "batched"])
def test_fedala_without_rate_is_fedavg(executor):  # T1, R10
    (_, a), (_, b) = (
        rounds("fedala", 3, executor, args={"eta": 0.0, "max_epochs": 2}),
        rounds("fedavg", 3, executor),
    )
    assert_same(a.server, b.server)
    assert all((v == 1).all() for v in unprefixed("ala.", a.clients).values())


def test_fedala_alone_is_local():  # R15: with one client, own and global head never differ
    kw = dict(data=client_data(sizes=(9,)))
    (_, a), (_, b) = rounds("fedala", 3, **kw), rounds("local", 3, **kw)
    assert_same({n: v[None] for n, v in a.server.items()}, select(b.clients, a.server))
    assert not a.clients["started"].any()


def test_fedala_blend_is_exact_at_its_ends_and_the_base_is_global():  # T2, T3, T4
    method, state = rounds("fedala", 2)
    weights = unprefixed("ala.", state.clients)
    assert all(((0 <= v) & (v <= 1)).all() for v in weights.values()) and any(
        (v < 1).any() for v in weights.values()
    )
    start = method.begin(state, ALL)
    p = method.adapt(context(method, state, round=2), start)
    for n in method.task.parameters:
        assert n in method.top or torch.equal(p[n], start[n])
    still = make_method("fedala", eta=0.0).bind(method.task)
    for value, rule in ((0.0, "own."), (1.0, "")):
        for v in weights.values():
            v.fill_(value)
        p = still.adapt(context(still, state, round=2), still.begin(state, ALL))
        for n in method.top:
            assert torch.equal(p[n], state.clients["own." + n] if rule else start[n]), n


def test_fedala_step_is_projected_gradient_descent_on_the_weights():
    method, data = setup("fedala", bn=False, args={"eta": 0.7})
    g = torch.Generator().manual_seed(1)
    draw = lambda v: torch.rand(v.shape, generator=g, dtype=v.dtype)  # noqa: E731
    w = {n: v + 0.2 * draw(v) for n, v in method.task.initial.items()}
    anchor = w | {f"own.{n}": w[n] - draw(w[n]) for n in method.top}
    ala = {f"ala.{n}": draw(w[n]) for n in method.top}
    batch = Batch(*data.batch(torch.as_tensor(data.index["train"][0])))
    loss = lambda a: method.loss(w | method.blend(a, anchor), w, batch)  # noqa: E731
    slopes = torch.func.grad(loss)(ala)
    p = w | ala | method.blend(ala, anchor) | {"score": torch.tensor(3.0, dtype=data.dtype)}
    grad = lambda q: torch.func.grad(lambda x: method.scored(p | x, anchor, batch))(  # noqa: E731
        {n: q[n] for n in [*method.top, "score"]}
    )
    q, _ = method.learn(p, anchor, grad, Step(0, 0.1, {}))
    for n, s in slopes.items():
        torch.testing.assert_close(q[n], (ala[n] - 0.7 * s).clamp(0, 1), rtol=1e-12, atol=1e-14)
    for n in method.top:
        torch.testing.assert_close(
            q[n], anchor["own." + n] + (w[n] - anchor["own." + n]) * q["ala." + n]
        )
    torch.testing.assert_close(q["score"], loss(ala))


def test_fedala_start_phase_then_one_epoch():
    method, state = rounds("fedala", 0)
    c = context(method, state, round=0)
    method.local(c, method.begin(state, ALL))
    assert len(c.calls) == 1, "in round 0 there is nothing to blend"
    method, state = rounds("fedala", 1)
    assert not state.clients["started"].any()
    c = context(method, state)
    end = method.local(c, method.begin(state, ALL))
    learned = [call for call in c.calls if call.get("stream") == "ala"]
    assert len(learned) > method.window and all(call["fraction"] == 0.8 for call in learned)
    scores = torch.stack([call["end"]["score"] for call in learned])
    for k in range(
        4
    ):  # each client stopped with the first epoch at which its last ten losses lay close together
        done = [
            e for e in range(11, len(scores) + 1) if scores[e - 10 : e, k].std(correction=0) < 0.1
        ]
        at = learned[done[0] - 1]["end"]
        assert torch.equal(end["ala.fc.weight"][k], at["ala.fc.weight"][k])
    assert end["started"].all()
    method, state = rounds("fedala", 2)
    c = context(method, state, round=2)
    method.local(c, method.begin(state, ALL))
    assert len(c.calls) == 2
    method, state = rounds("fedala", 1, args={"threshold": 0.0, "max_epochs": 13})
    c = context(method, state)
    method.personal(state, c)
    assert len(c.calls) == 13


def test_fedala_clients_do_not_wait_for_each_other():
    method, state = rounds("fedala", 1, args={"threshold": 0.02})
    together = method.adapt(context(method, state), method.begin(state, ALL))
    for k in range(4):
        sel = torch.tensor([k])
        alone = method.adapt(context(method, state, sel), method.begin(state, sel))
        assert_same(alone, {n: v[k : k + 1] for n, v in together.items()})


def test_fedala_leaves_statistics_alone_while_it_blends():
    method, state = rounds("fedala", 1)
    start = method.begin(state, ALL)
    p = method.adapt(context(method, state), start)
    assert method.task.buffers and all(torch.equal(p[n], start[n]) for n in method.task.buffers)


def test_fedala_without_head_is_fedavg():
    method, data = setup("fedala", head_depth=0)
    assert_same(simulate(method, data, workers=1)[0].server, rounds("fedavg", 3)[1].server)
