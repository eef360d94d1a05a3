"""A tiny federation under which every method is tested, and how states are compared."""

from dataclasses import replace

import numpy as np
import torch

from pfl_core import Experiment, models
from pfl_core.data.client_data import ClientData
from pfl_core.data.federation import Federation
from pfl_core.engine.simulate import simulate
from pfl_core.experiments.build import train_config
from pfl_core.methods.base import METHODS, State, initial_state, make_method
from pfl_core.methods.task import Task

CONFIG = train_config(Experiment(batch=6, lr=0.05, rounds=3, eval_after=True, holdout=0.25))


ARGS: dict[str, dict] = {  # hyper-parameters that a tiny federation needs
    "pfedhn": {"lr": 0.1}
}


OURS = sorted(n for n, c in METHODS.items() if c.__module__.startswith("pfl_core."))


def client_data(sizes=(13, 5, 18, 2), classes=3, seed=0, dtype=torch.float64):
    """Clients of unequal size: one smaller than a batch, one (the last) of a single class; labels can be read off the images."""
    g = np.random.default_rng(seed)
    y = g.integers(0, classes, 2 * sum(sizes))
    cuts = np.split(np.arange(len(y)), np.cumsum([2 * s for s in sizes])[:-1])
    y[cuts[-1]] = 1
    x = g.standard_normal((len(y), 1, 16, 16)) * 0.3
    for i, c in enumerate(y):
        x[i, 0, 4 * c : 4 * c + 4] += 1.5
    train, test = [c[: len(c) // 2] for c in cuts], [c[len(c) // 2 :] for c in cuts]
    fed = Federation(x, y, train, None, test, classes=classes)
    return ClientData(fed, seed=seed, holdout=CONFIG.holdout, dtype=dtype)


def setup(name, bn=True, data=None, args=None, **changes):
    """The method `name` with hyper-parameters `args` under CONFIG with `changes`, and its clients' data."""
    data = data or client_data()
    net = models.build("lenet", (1, 16, 16), data.classes, kernels=2, bn=bn).to(data.dtype)
    task = Task(net, data.n, data.label_counts, replace(CONFIG, **changes))
    return make_method(name, **ARGS.get(name, {}) | (args or {})).bind(task), data


def joined(method, source, k):
    """The method for its first k clients as if they were new to the federation `source`, and their first state."""
    t = method.task
    task = Task(t.model, t.n[:k], t.label_counts[:k], t.config)
    task.joins = source
    new = method.bind(task)
    return new, initial_state(new)


def under(method, **changes):
    """The same method with the same model and clients, under other settings."""
    t = method.task
    return method.bind(
        Task(t.model, t.n, t.label_counts, replace(t.config, **changes), t.own_heads)
    )


def rounds(name, n=2, executor="threads", **kw):
    method, data = setup(name, **kw | dict(rounds=n))
    return method, simulate(method, data, executor=executor, workers=2)[0]


def leaves(tree, path=""):
    if isinstance(tree, State):
        tree = {"server": tree.server, "clients": tree.clients, "extra": tree.extra}
    if isinstance(tree, dict):
        for k, v in tree.items():
            yield from leaves(v, f"{path}/{k}")
    else:
        assert isinstance(tree, torch.Tensor), (
            f"{path} is a {type(tree).__name__}; a State holds dicts of tensors only"
        )
        yield path, tree


def assert_same(a, b, exact=True):
    a, b = dict(leaves(a)), dict(leaves(b))
    assert a.keys() == b.keys()
    for path, v in a.items():
        if exact:
            assert torch.equal(v, b[path]), path
        else:
            torch.testing.assert_close(
                v, b[path], rtol=1e-9, atol=1e-10, msg=lambda m, path=path: f"{path}: {m}"
            )
