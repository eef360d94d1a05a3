"""Ditto: its rule, beside plain loops and what it reduces to."""

import pytest
import torch

from pfl_core.engine.simulate import simulate
from pfl_core.stacked import select
from tests.core.methods.averaging_shared import (
    SIGNS,
    SIZES,
    START,
    both_nets,
    bound,
    descend,
    mean,
    near,
    pair,
    ran,
    read,
)
from tests.core.methods.setting import assert_same


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


def test_ditto_by_hand():
    w, v = START, [START, START]
    for _ in range(2):
        v = [descend(v[k], SIGNS[k], 3 * SIZES[k], lr=0.2, pull=1.5, to=w) for k in (0, 1)]
        w = mean([descend(w, s, n) for s, n in zip(SIGNS, SIZES, strict=True)])
    method, data = pair("ditto", lam=1.5, personal_epochs=3, personal_lr=0.2)
    state, _, before, *_ = simulate(method, data, workers=1)
    near(read(state.server), w)
    for k in (0, 1):
        near(read(before, k), v[k])


def test_dittos_personal_model_stays_home():
    method, data = bound("ditto", "lenet", participation=0.5, rounds=1)
    size = sum(v.numel() for v in select(method.task.initial, method.task.parameters).values())
    _, history, *_ = simulate(method, data, workers=1)
    assert history.upload[-1] == history.download[-1] == 2 * size
