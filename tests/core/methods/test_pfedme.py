"""pFedMe: its rule, beside plain loops and what it reduces to."""

import pytest
import torch

from pfl_core.engine.simulate import simulate
from pfl_core.stacked import select, unprefixed
from tests.core.methods.averaging_shared import (
    LR,
    SIGNS,
    SIZES,
    START,
    both_nets,
    bound,
    mean,
    near,
    one_round,
    pair,
    ran,
    read,
    slope,
)
from tests.core.methods.setting import assert_same, client_data


@both_nets
def test_pfedme_with_one_exact_follower_is_fedavg(net):
    # K = 1, nu = 0, eta lambda = 1: theta starts each batch at w_i, which then becomes theta.
    _, pfedme = ran("pfedme", net, lr=0.05, lam=20.0, inner_steps=1, decay=0.0, personal_lr=0.03)
    _, fedavg = ran("fedavg", net, lr=0.03)
    assert_same(pfedme.server, fedavg.server, exact=False)
    assert_same(select(pfedme.clients, fedavg.clients), fedavg.clients, exact=False)


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
    state, _, before, *_ = simulate(method, data, workers=1)
    near(read(state.server), w)
    for k in (0, 1):
        near(read(before, k), thetas[k])
    # As published code scores: the global model before local training, w_i after it.
    method, data = pair("pfedme", score="local", rounds=1, **how)
    state, _, before, *_ = simulate(method, data, workers=1)
    near(read(before, 0), last)
    _, end = one_round(method, data, state)
    for k in (0, 1):
        near(read(method.serve(end), k), locals_[k])


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
