"""HeurpFedLA: its rule, beside plain loops and what it reduces to."""

import pytest
import torch

from pfl_core.methods import pfedla
from pfl_core.methods.pfedla import table3_megabytes
from pfl_core.stacked import select
from tests.core.methods.hypernetworks_shared import bound, drawn, everyone, one_round, small
from tests.core.methods.setting import assert_same, rounds


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():  # as in the round loop
        yield


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_nothing_retained_is_pfedla(buffers):
    (_, a), (_, b) = (
        rounds(name, n=3, buffers=buffers, args={"lr": 0.5} | args)
        for name, args in (("pfedla", {}), ("heurpfedla", dict(retain_k=0)))
    )
    assert_same(a, b)


def test_everything_retained_is_local():
    (_, a), (_, b) = (
        rounds(n, n=3, args=args) for n, args in (("local", {}), ("heurpfedla", dict(retain_k=7)))
    )
    for n, v in a.clients.items():
        assert torch.equal(v, (b.clients | b.extra["theta"])[n]), n


def test_retained_layers():
    method, data = small("heurpfedla", dict(retain_k=2, lr=0.5))
    state = drawn(method, method.init(), spread=3.0)
    sel = torch.tensor([0, 1, 3])
    alpha = pfedla.alpha({n: v[sel] for n, v in state.extra["hn"].items()}, "softmax")
    keep = method.retained(alpha, sel)
    start, end, new = one_round(method, data, state, sel)
    used = method.weights(state)
    for s, i in enumerate(sel.tolist()):
        mine = alpha[s, :, i]
        assert keep[s].sum() == 2 and mine[keep[s]].min() >= mine[~keep[s]].max()
        for row, (layer, names) in enumerate(method.layers.items()):
            own_row = torch.eye(4).double()[i]
            assert torch.equal(used[layer][i], own_row) == bool(keep[s, row])
            for n in names:
                assert torch.equal(start[n][s], state.extra["theta"][n][i]) == bool(keep[s, row])
            for n in ("head.weight", "head.bias"):
                still = torch.equal(new.extra["hn"][n][i, row], state.extra["hn"][n][i, row])
                assert still == bool(keep[s, row])


def test_ties_keep_the_first_layers():
    method, *_ = small("heurpfedla", dict(retain_k=2))
    alpha = torch.full((3, 5, 4), 0.25)
    assert method.retained(alpha, everyone(3)).tolist() == [[True, True, False, False, False]] * 3


TABLE3 = {  # cell: (input, BatchNorm, layers in the order in which they are retained, MBytes)
    "emnist": ((1, 28, 28), False, ("fc", "fc1"), (491.08, 488.65, 312.52)),
    "cifar10": ((3, 32, 32), True, ("fc1", "conv2", "fc"), (693.98, 418.97, 382.25, 379.82)),
}


@pytest.mark.parametrize("data, k", [(d, k) for d in TABLE3 for k in range(len(TABLE3[d][3]))])
def test_table_3(data, k):
    shape, bn, order, reported = TABLE3[data]
    method = bound("heurpfedla", shape=shape, k=10, retain_k=k, model_args={"bn": bn})
    state, sel = method.init(), everyone(10)
    for rank, layer in enumerate(order):
        row = list(method.layers).index(layer)
        state.extra["hn"]["head.bias"][sel, row, sel] = 3.0 - rank
    sent = method.download(state, sel)
    down, up = method.traffic(state, sel, sent, select(sent, method.task.parameters))
    assert abs(table3_megabytes((down + up) / 10) - reported[k]) < 0.03
    assert up == 10 * sum(method.task.initial[n].numel() for n in method.task.parameters)
