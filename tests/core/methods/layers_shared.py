"""What tests of several methods share (layers)."""

from dataclasses import replace

import torch

from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.methods.base import make_method
from pfl_core.methods.task import Task
from tests.core.methods.setting import CONFIG, client_data

ALL = torch.arange(4)


def on(net, name, k=3, **args):
    """The method on a bare network, without data."""
    task = Task(
        net, torch.full((k,), 4), torch.ones(k, 3, dtype=torch.int64), replace(CONFIG, lr=0.1)
    )
    return make_method(name, **args).bind(task)


class Watched:
    """A context that notes every training."""

    def __init__(self, c):
        self.c, self.calls = c, []

    def __getattr__(self, name):
        return getattr(self.c, name)

    def train(self, loss, start, **how):
        self.calls.append(how | {"end": self.c.train(loss, start, **how)})
        return self.calls[-1]["end"]


def context(method, state, sel=ALL, round=1, data=None):
    return Watched(Context(Engine(method, data or client_data(), "threads", 1), state, sel, round))


def random_updates(state, names, seed=0, scale=0.1):
    g = torch.Generator().manual_seed(seed)
    return {
        n: state[n] + scale * torch.randn(state[n].shape, generator=g, dtype=state[n].dtype)
        for n in names
    }
