"""What tests of several methods share (averaging)."""

from dataclasses import fields, replace
from math import exp

import numpy as np
import pytest
import torch
from torch import nn

from pfl_core import models
from pfl_core.data.client_data import ClientData
from pfl_core.data.federation import Federation
from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.engine.simulate import simulate
from pfl_core.methods.base import make_method
from pfl_core.methods.task import Task, TrainConfig
from tests.core.methods.setting import CONFIG, client_data

NETS = {"mlp": dict(hidden=5), "lenet": dict(kernels=2, bn=True)}


SETTINGS = {f.name for f in fields(TrainConfig)}


both_nets = pytest.mark.parametrize("net", NETS)


def bound(name, net="mlp", depth=1, data=None, cls=None, **kw):
    """The method `name` (or `cls`) with hyper-parameters and settings among `kw`, and its clients' data."""
    args = {k: v for k, v in kw.items() if k not in SETTINGS}
    config = replace(CONFIG, head_depth=depth, **{k: v for k, v in kw.items() if k in SETTINGS})
    data = data or client_data()
    if isinstance(net, str):
        net = models.build(net, (1, 16, 16), data.classes, **NETS[net])
    method = cls(**args) if cls else make_method(name, **args)
    return method.bind(Task(net.to(data.dtype), data.n, data.label_counts, config)), data


def ran(name, net="mlp", **kw):
    method, data = bound(name, net, **kw)
    return method, simulate(method, data, workers=2)[0]


def one_round(method, data, state):
    with torch.no_grad():
        sel = torch.arange(data.K)
        start = method.begin(state, sel)
        return start, method.local(
            Context(Engine(method, data, "threads", 1), state, sel, state.round), start
        )


class Pair(nn.Module):
    """A base of one weight u and a head of two, a and -a."""

    def __init__(self, u=0.75, a=0.5):
        super().__init__()
        self.base, self.fc = nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)
        self.base.weight.data.fill_(u)
        self.fc.weight.data.copy_(torch.tensor([[a], [-a]]))

    def features(self, x):
        return self.base(x)

    def forward(self, x):
        return self.fc(self.features(x))


SIGNS, SIZES, LR = (1, -1), (2, 6), 0.3  # client 0 holds label 0 alone, client 1 label 1


def pair(name, **kw):
    y = np.repeat([0, 1], SIZES)
    x = np.ones((len(y), 1))
    index = np.split(np.arange(len(y)), [SIZES[0]])
    train, test = [index[0], index[1]], [[len(y)], [len(y) + 1]]
    fed = Federation(np.r_[x, [[1.0], [1.0]]], np.r_[y, 0, 1], train, None, test)
    data = ClientData(fed, seed=0, holdout=0, dtype=torch.float64)
    return bound(name, Pair().double(), data=data, **dict(batch=1, lr=LR, rounds=2) | kw)


def slope(u, a, s):
    """d/du and d/da of log(1 + exp(-2 s a u))."""
    q = 1 / (1 + exp(2 * s * a * u))
    return np.array([-s * q * 2 * a, -s * q * u])


def mean(pairs):
    return sum(n * np.array(p) for n, p in zip(SIZES, pairs, strict=True)) / sum(SIZES)


def read(p, k=None, prefix=""):
    u, a = p[prefix + "base.weight"], p[prefix + "fc.weight"]
    u, a = (u, a) if k is None else (u[k], a[k])
    assert torch.allclose(a[0], -a[1], rtol=0, atol=1e-14)
    return np.array([float(u), float(a[0])])


def near(a, b, tol=1e-12):
    np.testing.assert_allclose(a, b, rtol=tol, atol=tol)


START = np.array([0.75, 0.5])


def descend(p, s, steps, lr=LR, pull=0.0, to=0.0, move=(1, 1)):
    for _ in range(steps):
        p = p - lr * (slope(*p, s) + pull * (p - to)) * np.array(move)
    return p
