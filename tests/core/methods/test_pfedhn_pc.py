"""pFedHN-PC: its rule, beside plain loops and what it reduces to."""

import pytest
import torch

from pfl_core.engine.simulate import simulate
from tests.core.methods.hypernetworks_shared import everyone, one_round, small
from tests.core.methods.setting import assert_same


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():  # as in the round loop
        yield


def test_classifiers_stay_with_their_clients():
    method, data = small("pfedhn_pc", momentum=0.9)
    state = method.init()
    assert state.clients.keys() == {"fc.weight", "fc.bias", "opt.fc.weight", "opt.fc.bias"}
    assert not state.server and not any("fc." in n for n in method.download(state, everyone(4)))
    *_, new = one_round(method, data, state, torch.tensor([1, 3]))
    for n, v in new.clients.items():
        assert torch.equal(v[[0, 2]], state.clients[n][[0, 2]])
        assert not torch.equal(v[1], state.clients[n][1])
    assert method.serve(method.begin(new, everyone(4))).keys() == set(method.task.names)


def test_clipping_counts_the_extractor_only():
    ends = []
    for clip in (0.0, 1e-9):
        method, data = small("pfedhn_pc", steps=1, epochs=0, clip=clip)
        start, end, _ = one_round(method, data, method.init(), everyone(4))
        ends.append(end)
    assert torch.equal(ends[0]["fc.weight"], ends[1]["fc.weight"])
    assert (
        (ends[1]["conv1.weight"] - start["conv1.weight"]).abs().max()
        < 1e-9
        < (ends[0]["conv1.weight"] - start["conv1.weight"]).abs().max()
    )


def test_no_head_is_pfedhn():
    states = []
    for name in ("pfedhn", "pfedhn_pc"):
        method, data = small(name, dict(lr=0.1), head_depth=0, momentum=0.5, clip=0.1)
        states.append(simulate(method, data, workers=1)[0])
    assert_same(*states)
