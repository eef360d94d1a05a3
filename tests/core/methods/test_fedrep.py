"""FedRep: its rule, beside plain loops and what it reduces to."""

import numpy as np
import torch

from pfl_core.engine.simulate import simulate
from pfl_core.methods.base import State
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
    one_round,
    pair,
    ran,
    read,
)
from tests.core.methods.setting import assert_same


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


def test_fedrep_by_hand():
    u, heads = START[0], [START[1]] * 2
    for _ in range(2):
        ends = []
        for k in (0, 1):
            p = descend(np.array([u, heads[k]]), SIGNS[k], 2 * SIZES[k], move=(0, 1))
            ends.append(descend(p, SIGNS[k], 3 * SIZES[k], move=(1, 0)))
        u, heads = mean(ends)[0], [p[1] for p in ends]
    method, data = pair("fedrep", head_epochs=2, body_epochs=3)
    _, _, before, *_ = simulate(method, data, workers=1)
    for k in (0, 1):
        near(read(before, k), [u, heads[k]])


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
