"""What tests of several methods share (core)."""

import torch

from pfl_core import models
from pfl_core.engine.simulate import simulate
from pfl_core.methods.base import make_method
from pfl_core.methods.task import Task
from tests.core.methods.setting import setup


def run(name, n=2, data=None, depth=1, own_heads=False, args=None, **kw):
    """As `rounds`, with a head `depth` blocks deep and, on request, heads of the clients' own."""
    method, data = setup(name, data=data, args=args, rounds=n, head_depth=depth, **kw)
    old = method.task
    heads = None
    if own_heads:
        names = models.head(old.model, depth)
        heads = {k: torch.stack([old.initial[k] + 0.01 * i for i in range(data.K)]) for k in names}
    task = Task(old.model, data.n, data.label_counts, old.config, heads)
    method = make_method(name, **args or {}).bind(task)
    return method, simulate(method, data, workers=2), data
