"""APPLE: its rule, beside plain loops and what it reduces to."""

import pytest
import torch
import torch.nn.functional as F

from pfl_core.stacked import flat, select, unprefixed
from tests.core.methods.mixing_shared import EVERYONE, one_round
from tests.core.methods.setting import CONFIG, assert_same, rounds, setup, under


def test_apples_momentum_acts_on_cores_and_relations():
    # Two steps of one client, by hand: the second adds 0.9 of the first, on c_i and on p_i.
    ends = {}
    for momentum in (0.0, 0.9):
        method, data, state = apple(mu=0.0, dr_lr=0.03, core_lr=0.4)
        _, first = one_round(under(method, momentum=momentum, steps=1), data, state)
        method, data, state = apple(mu=0.0, dr_lr=0.03, core_lr=0.4)
        begin = {n: v.clone() for n, v in state.clients.items()}
        _, second = one_round(under(method, momentum=momentum, steps=2), data, state)
        ends[momentum] = {
            n: (first[n] - begin[n], second[n] - begin[n]) for n in ("dr", "core.fc.weight")
        }
    for n, (one, two) in ends[0.0].items():
        torch.testing.assert_close(ends[0.9][n][0], one)
        torch.testing.assert_close(ends[0.9][n][1] - two, 0.9 * one, rtol=1e-9, atol=1e-12)


def apple(**args):
    method, data = setup("apple", bn=False, steps=3, epochs=0, args=dict(span=1.0) | args)
    state, g = method.init(), torch.Generator().manual_seed(0)
    for n, v in state.extra["cores"].items():
        v += 0.05 * torch.randn(v.shape, generator=g, dtype=v.dtype)
        state.clients["core." + n][:] = v
    state.clients["dr"] += 0.1 * torch.randn(4, 4, generator=g, dtype=torch.float64)
    return method, data, state


def test_apple_takes_the_steps_of_the_formula():
    method, data, state = apple(mu=2.0, dr_lr=0.03, core_lr=0.4)
    names, t = list(state.extra["cores"]), method.task
    old = flat(state.extra["cores"]).clone()  # cores of the round's start
    core, p, p0 = old.clone(), state.clients["dr"].clone(), data.n / data.n.sum()
    sizes = [v[0].numel() for v in state.extra["cores"].values()]
    shapes = [v.shape[1:] for v in state.extra["cores"].values()]
    for k in range(4):
        for idx in data.batch_indices(k, 0, batch=CONFIG.batch, steps=3)[:, 0]:
            w = sum(p[k, j] * (core if j == k else old)[j] for j in range(4))
            leaf = w.clone().requires_grad_()
            model = {
                n: v.reshape(s) for n, v, s in zip(names, leaf.split(sizes), shapes, strict=True)
            }
            x, y = data.batch(torch.as_tensor(idx))
            (grad,) = torch.autograd.grad(F.cross_entropy(t.apply(model, x), y), leaf)
            step = torch.stack([grad @ (core if j == k else old)[j] for j in range(4)]) + 2.0 * (
                p[k] - p0
            )
            core[k] -= 0.4 * p[k, k] * grad
            p[k] -= 0.03 * step
    state, end = one_round(method, data, state)
    torch.testing.assert_close(
        flat(unprefixed("core.", state.clients)), core, rtol=1e-9, atol=1e-11
    )
    torch.testing.assert_close(state.clients["dr"], p, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(flat(state.extra["cores"]), core, rtol=1e-9, atol=1e-11)
    served = torch.stack(
        [sum(p[k, j] * (core if j == k else old)[j] for j in range(4)) for k in range(4)]
    )
    torch.testing.assert_close(
        flat(select(method.serve(end), names)), served, rtol=1e-9, atol=1e-11
    )
    begun = method.serve(method.begin(state, EVERYONE))  # next round: everybody's new core
    torch.testing.assert_close(flat(select(begun, names)), p @ core, rtol=1e-9, atol=1e-11)


def test_apple_of_its_own_core_alone_is_local():  # R13
    method, data = setup("apple", args=dict(dr_lr=0.0, core_lr=0.05))
    state = method.init()
    state.clients["dr"] = torch.eye(4).double()
    for _ in range(3):
        state, _ = one_round(method, data, state)
    _, local = rounds("local", n=3)
    assert_same(
        unprefixed("core.", state.clients),
        select(local.clients, method.task.parameters),
        exact=False,
    )
    assert_same(method.serve(method.begin(state, EVERYONE)), local.clients, exact=False)


@pytest.mark.parametrize("schedule", ["exp", "cos"])
def test_apple_pull_ends(schedule):
    method, _ = setup("apple", rounds=50, args=dict(schedule=schedule, span=0.2))
    pulls = [method.decay(r) for r in range(50)]
    assert pulls[0] == 1 and pulls[:11] == sorted(pulls[:11], reverse=True) and not any(pulls[10:])
    assert pulls[5] == pytest.approx(0.001**0.5 if schedule == "exp" else 0.5)


def test_apple_starts_from_sample_shares_and_learns_relations():
    method, data = setup("apple")
    state = method.init()
    p0 = (data.n / data.n.sum()).double().repeat(4, 1)
    torch.testing.assert_close(state.clients["dr"], p0)
    for _ in range(3):
        state, _ = one_round(method, data, state)
    assert (state.clients["dr"] - p0).abs().max() > 1e-4


def test_apple_traffic():
    method, data = setup("apple")
    state = method.init()
    size = sum(v.numel() for n, v in method.task.initial.items() if n in method.task.parameters)
    down = method.download(state, EVERYONE[:3])
    state, end = one_round(method, data, state)
    up = {n: v for n, v in end.items() if n not in state.clients}
    assert method.traffic(state, EVERYONE[:3], down, up) == (3 * 3 * size, 3 * size)
