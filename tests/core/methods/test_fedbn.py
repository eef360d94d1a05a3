"""FedBN: its rule, beside plain loops and what it reduces to."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pfl_core import models
from pfl_core.engine.simulate import simulate
from pfl_core.stacked import scalars
from tests.core.methods.averaging_shared import bound, ran
from tests.core.methods.setting import CONFIG, assert_same


def test_fedbn_without_batchnorm_is_fedavg():
    assert_same(ran("fedbn", "mlp")[1], ran("fedavg", "mlp")[1])


@pytest.mark.parametrize("policy", ["local", "average", "reset"])
def test_fedbn_against_plain_modules(policy):
    method, data = bound("fedbn", "lenet", rounds=2, buffers=policy)
    nets = [copy.deepcopy(method.task.model) for _ in range(4)]
    w = (data.n.double() / data.n.sum()).tolist()
    for r in range(2):
        for k, net in enumerate(nets):
            sgd = torch.optim.SGD(net.train().parameters(), lr=CONFIG.lr)
            for idx in torch.as_tensor(data.batch_indices(k, r, batch=CONFIG.batch))[:, 0]:
                x, y = data.batch(idx)
                sgd.zero_grad()
                F.cross_entropy(net(x), y).backward()
                sgd.step()
        owned = {
            f"{path}.{n}"
            for path, m in nets[0].named_modules()
            if isinstance(m, nn.BatchNorm2d)
            for n in m.state_dict()
        }
        averaged = {
            n: sum(a * net.state_dict()[n] for a, net in zip(w, nets, strict=True))
            for n in method.task.names
        }
        for net in nets:
            net.load_state_dict(
                net.state_dict() | {n: v for n, v in averaged.items() if n not in owned}
            )
    _, _, before, *_ = simulate(method, data, workers=1)
    assert owned
    for k, net in enumerate(nets):
        assert_same({n: v[k] for n, v in before.items()}, dict(net.state_dict()), exact=False)


def test_fedbn_sends_no_batchnorm_of_a_resnet():
    net = models.build("resnet18", (3, 32, 32), 10, stem="cifar", width=0.0625)
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    method, *_ = bound("fedbn", net)
    sent = method.download(method.init(), torch.arange(4))
    assert len(norms) == 20
    assert scalars(sent) == sum(p.numel() for p in net.parameters()) - sum(
        2 * m.num_features for m in norms
    )
    assert not any("downsample.1" in n for n in sent)
