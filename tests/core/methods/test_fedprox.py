"""FedProx: its rule, beside plain loops and what it reduces to."""

import pytest
import torch

from pfl_core.engine.simulate import simulate
from pfl_core.methods.fedprox import FedProx
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
@pytest.mark.parametrize("buffers", ["local", "average", "reset"])
def test_fedprox_without_pull_is_fedavg(net, buffers):
    assert_same(
        ran("fedprox", net, mu=0.0, buffers=buffers)[1], ran("fedavg", net, buffers=buffers)[1]
    )
    assert not torch.equal(
        ran("fedprox", net)[1].server["fc.bias"], ran("fedavg", net)[1].server["fc.bias"]
    )


def test_fedprox_by_hand():
    w = START
    for _ in range(2):
        w = mean([descend(w, s, n, pull=0.4, to=w) for s, n in zip(SIGNS, SIZES, strict=True)])
    method, data = pair("fedprox", mu=0.4)
    near(read(simulate(method, data, workers=1)[0].server), w)


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
