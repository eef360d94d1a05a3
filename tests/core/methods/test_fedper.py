"""FedPer: its rule, beside plain loops and what it reduces to."""

import pytest
import torch

from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from tests.core.methods.core_shared import run
from tests.core.methods.setting import assert_same


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_fedper_without_head_is_fedavg(buffers):
    assert_same(run("fedper", depth=0, buffers=buffers)[1][0], run("fedavg", buffers=buffers)[1][0])


def test_fedper_with_all_personal_is_local():
    assert_same(run("fedper", depth=5)[1][0], run("local")[1][0])


def test_fedper_personal_layers_are_untouched_by_aggregation():
    method, (state, *_), data = run("fedper", n=1, own_heads=True)
    engine = Engine(method, data, "threads", 1)
    with torch.no_grad():
        start = method.begin(method.init(), torch.arange(4))
        end = method.local(Context(engine, method.init(), torch.arange(4), 0), start)
    for n in state.clients:
        assert torch.equal(state.clients[n], end[n])
    gamma = torch.tensor([13.0, 5, 18, 2]).double() / 38
    for n in state.server:
        torch.testing.assert_close(
            state.server[n], torch.tensordot(gamma, end[n], 1), rtol=1e-12, atol=1e-14
        )
