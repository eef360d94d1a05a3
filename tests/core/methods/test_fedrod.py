"""FedRoD: its rule, beside plain loops and what it reduces to."""

import pytest
import torch
import torch.nn.functional as F

from pfl_core.engine.simulate import simulate
from pfl_core.methods.task import Task
from pfl_core.stacked import select
from tests.core.methods.features_shared import EVERYONE, FC, batch_of, client, one_round, randn
from tests.core.methods.loops_shared import (
    EXECUTORS,
    average,
    batches,
    close,
    gradient,
    hidden,
    mlp,
    scored,
)
from tests.core.methods.setting import assert_same, setup


def prior(data, k, gamma):
    n = data.label_counts[k]
    logs = [gamma * float(c.double().log()) if c else -torch.inf for c in n]
    return torch.tensor(logs, dtype=torch.float64)


def balanced(method, p, x, y, log):
    """The paper's first term, written as a softmax."""
    e = torch.exp(scored(method, p, x) + log)
    return -(e[torch.arange(len(y)), y] / e.sum(1)).log().mean()


def scores(method, p, phi, x):
    z = hidden(method, p, x)
    return scored(method, p, x) + z @ phi["fc.weight"].T + phi["fc.bias"]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("args", [{}, dict(gamma=0.5, start="zero")], ids=["copy", "zero"])
def test_fedrod_is_a_plain_loop(executor, args):
    method, data = mlp("fedrod", lr=0.3, **args)
    state, _, before, *_ = simulate(method, data, executor=executor, workers=1)
    w, lr = method.task.initial, 0.3
    phi = [{n: w[n] * (method.start == "copy") for n in FC}] * 4
    for r in range(3):
        ends = []
        for k in range(4):
            p, log = w, prior(data, k, method.gamma)
            for x, y in batches(method, data, k, r):
                # In turn, as PFLlib does; the second sees the model from before the first.
                g = gradient(lambda q, x=x, y=y, log=log: balanced(method, q, x, y, log), p)
                h = gradient(
                    lambda q, x=x, y=y, p=p: F.cross_entropy(scores(method, p, q, x), y), phi[k]
                )
                p = {n: v - lr * g[n] for n, v in p.items()}
                phi[k] = {n: v - lr * h[n] for n, v in phi[k].items()}
            ends.append(p)
        w = average(ends, data.n)
    close(state.server, w)
    x = data.batch(torch.as_tensor(data.index["test"][0]))[0]
    for k in range(4):
        close(state.clients, {f"own.{n}": v for n, v in phi[k].items()}, k)
        torch.testing.assert_close(
            method.logits(client(before, k), x),
            scores(method, w, phi[k], x),
            rtol=1e-10,
            atol=1e-10,
        )


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("changes", [{}, dict(clip=0.5, momentum=0.5, weight_decay=1e-3)])
def test_fedrod_without_its_balance_is_fedavg(executor, changes):  # T1
    how = dict(participation=0.5, **changes)
    (rod, data), (avg, _) = setup("fedrod", args=dict(gamma=0.0), **how), setup("fedavg", **how)
    a, b = (simulate(m, data, executor=executor, workers=1)[0] for m in (rod, avg))
    assert_same(a.server, b.server)
    assert_same(select(a.clients, b.clients), b.clients)


def test_fedrod_with_equal_class_counts_is_fedavg():  # T3
    (rod, data), (avg, _) = mlp("fedrod"), mlp("fedavg")
    t = rod.task
    alike = Task(t.model, t.n, torch.full_like(t.label_counts, 7), t.config)
    a, b = (simulate(m, data, workers=1)[0] for m in (rod.bind(alike), avg))
    assert_same(a.server, b.server, exact=False)


@pytest.mark.parametrize("changes", [{}, dict(clip=0.5)])
def test_the_server_knows_nothing_of_personal_heads(changes):  # T2, T6
    method, data = setup("fedrod", **changes)
    other, _ = setup("fedrod", args=dict(start="zero"), **changes)
    a, b = method.init(), other.init()
    for _ in range(2):
        a, b = one_round(method, data, a)[0], one_round(other, data, b)[0]
    assert_same(a.server, b.server)
    # One client's head is nothing to the others.
    c = method.init()
    for _ in range(2):
        c.clients["own.fc.weight"][1] += 1
        c = one_round(method, data, c)[0]
    assert_same(c.server, a.server)
    others = [0, 2, 3]
    assert_same(
        {n: v[others] for n, v in c.clients.items()}, {n: v[others] for n, v in a.clients.items()}
    )
    assert not torch.equal(c.clients["own.fc.weight"][1], a.clients["own.fc.weight"][1])


def test_the_generic_model_reads_no_personal_head():  # T4
    generic, data = setup("fedrod", args=dict(score="generic"))
    personal, _ = setup("fedrod")
    p, x = client(generic.begin(generic.init(), EVERYONE)), batch_of(data).x
    plain = {n: v for n, v in p.items() if not n.startswith("own.")}
    assert torch.equal(generic.logits(plain, x), generic.task.apply(plain, x))
    # At first a copy: the scores are twice the generic ones.
    torch.testing.assert_close(personal.logits(p, x), 2 * generic.logits(p, x))


def test_a_client_of_one_class_uploads_what_it_received():
    method, data = setup("fedrod")
    state = method.init()
    assert int((data.label_counts[3] > 0).sum()) == 1
    start = method.begin(state, EVERYONE)
    _, end = one_round(method, data, state)
    for n in method.task.parameters:
        torch.testing.assert_close(end[n][3], start[n][3], rtol=1e-12, atol=1e-14)
        assert n.endswith("bias") or not torch.equal(end[n][0], start[n][0]), n
    assert not torch.equal(end["own.fc.weight"][3], start["own.fc.weight"][3])


def test_fedrods_prior_has_no_class_that_a_client_has_not():
    method, data = setup("fedrod", args=dict(gamma=2.0))
    found, n = method.prior(EVERYONE), data.label_counts
    assert torch.equal(found == -torch.inf, n == 0) and (n == 0).any()
    torch.testing.assert_close(found[n > 0].exp(), n[n > 0].double() ** 2)
    off, _ = setup("fedrod", args=dict(gamma=0.0))
    assert not off.prior(EVERYONE).any()
    p, near, batch = (
        client(method.begin(method.init(), EVERYONE), 3),
        {"prior": found[3]},
        batch_of(data, 3),
    )
    p = p | {n: p[n] + randn(*p[n].shape) for n in method.task.parameters}
    g = gradient(lambda q: method.loss(p | q, near, batch), select(p, method.task.parameters))
    assert all(torch.isfinite(v).all() for v in g.values())


def test_fedrod_sends_one_model_each_way():
    method, data = setup("fedrod", participation=0.5, rounds=1)
    size = sum(method.task.initial[n].numel() for n in method.task.parameters)
    _, history, *_ = simulate(method, data, workers=1)
    assert history.upload[-1] == history.download[-1] == 2 * size
