"""What tests of several methods share (hypernetworks)."""

import copy
from dataclasses import replace

import torch

from pfl_core import models
from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.methods.base import make_method
from pfl_core.methods.task import Task
from tests.core.methods.setting import CONFIG, client_data


def bound(
    name,
    shape=(3, 32, 32),
    classes=10,
    k=4,
    model="lenet",
    dtype=torch.float32,
    task=None,
    net=None,
    **hyper,
):
    net = net or models.build(model, shape, classes, **hyper.pop("model_args", {}))
    net = net.to(dtype)
    counts = torch.arange(k * classes).reshape(k, classes)
    return make_method(name, **hyper).bind(
        Task(net, counts.sum(1), counts, replace(CONFIG, **task or {}))
    )


def small(name, args=None, bn=False, kernels=2, sizes=(13, 5, 18, 2), **changes):
    """A method on 16x16 images in float64 under CONFIG with `changes`, and its clients' data."""
    data = client_data(sizes=sizes)
    net = models.build("lenet", (1, 16, 16), 3, kernels=kernels, bn=bn).double()
    task = Task(net, data.n, data.label_counts, replace(CONFIG, **changes))
    return make_method(name, **args or {}).bind(task), data


def everyone(k):
    return torch.arange(k)


def one_round(method, data, state, sel):
    """(start, end, next state) of one round with participants sel; the old state is left alone."""
    state = copy.deepcopy(state)
    engine = Engine(method, data, "threads", 1)
    start = method.begin(state, sel)
    end = method.local(Context(engine, state, sel, state.round), start)
    for n in state.clients:
        state.clients[n][sel] = end[n]
    up = {n: v for n, v in end.items() if n not in state.clients}
    engine.close()
    return start, end, method.upload(state, sel, start, up, data.n[sel].double())


def scalars(params):
    return sum(v.numel() for v in params.values())


def drawn(method, state, seed=0, spread=1.0):
    """The state with other models and heads than the symmetric start."""
    g = torch.Generator().manual_seed(seed)
    noise = lambda v: spread * torch.randn(v.shape, generator=g, dtype=v.dtype)  # noqa: E731
    theta = {n: v + 0.1 * noise(v) for n, v in state.extra["theta"].items()}
    hn = {
        n: v + noise(v).abs() * 0.1 if n.startswith("head") else v
        for n, v in state.extra["hn"].items()
    }
    state.extra = {"theta": theta, "hn": hn}
    return state
