"""A tiny federation for the executors, and how what they train is compared."""

from dataclasses import replace

import numpy as np
import torch

from benchmarks.tape import Counter
from pfl_core.data.client_data import ClientData
from pfl_core.data.federation import Federation
from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.experiments.build import train_config
from pfl_core.experiments.experiment import Experiment
from pfl_core.methods.base import State, make_method
from pfl_core.methods.task import Task
from pfl_core.stacked import expand

CONFIG = train_config(Experiment(batch=4, lr=0.1))


LONG = (60, 41, 40, 23, 8, 3, 52, 30)  # samples a client: 15, 11, 10, 6, 2, 1, 13, 8 batches of 4


def clients_of(x, y, train, dtype=torch.float64, seed=0):
    return ClientData(Federation(x, y, train, classes=3), seed=seed, holdout=0, dtype=dtype)


def client_data(counts=LONG, seed=0, dtype=torch.float64):
    g = np.random.default_rng(seed)
    x = g.integers(0, 256, (sum(counts), 8, 8), dtype=np.uint8)
    cuts = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    return clients_of(x, g.integers(0, 3, sum(counts)), cuts, dtype, seed)


class Small(torch.nn.Module):
    """A convolution, BatchNorm and `depth` linear layers: small enough for many steps."""

    def __init__(self, depth=1):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3)
        self.mid = torch.nn.Sequential(*(torch.nn.Linear(108, 108) for _ in range(depth - 1)))
        self.fc = torch.nn.Linear(108, 3)

    def forward(self, x):
        return self.fc(self.mid(self.norm(self.conv(x)).relu().flatten(1)))


def engine(executor, counts=LONG, method="fedavg", args=None, depth=1, **changes):
    data = client_data(counts)
    made = method if not isinstance(method, str) else make_method(method, **(args or {}))
    task = Task(Small(depth).double(), data.n, data.label_counts, replace(CONFIG, **changes))
    return Engine(made.bind(task), data, executor, 1)


def train(e, rounds=1, start=None, sel=None, loss=None, **how):
    """What `rounds` rounds of local training make, each from the end of the one before."""
    sel = torch.arange(e.data.K) if sel is None else torch.tensor(sel)
    p = start or expand(e.task.initial, len(sel))
    for r in range(rounds):
        with torch.no_grad():
            p = Context(e, State({}, {}), sel, r).train(loss or e.method.loss, p, **how)
    return p


def assert_close(a, b):
    assert a.keys() == b.keys()
    for n in a:
        torch.testing.assert_close(
            a[n], b[n], rtol=1e-9, atol=1e-11, msg=lambda m, n=n: f"{n}: {m}"
        )


def counted(e, steps, sel=(0, 1, 2), **how):
    """Operations that compute, and tensors made, in one round of `steps` steps a client."""
    start = expand(e.task.initial, len(sel))
    e.threads.map = lambda fn, items: [fn(i) for i in items]  # a counter sees its own thread only
    with Counter() as c:
        train(e, sel=sel, start=start, steps=steps, **how)
    return np.array([c.ops, c.made])
