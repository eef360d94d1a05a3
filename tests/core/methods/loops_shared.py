"""Plain loops over clients and batches, beside which tests hold whole rounds of a method."""

import torch
import torch.nn.functional as F
from torch.func import functional_call

from pfl_core.engine.participation import sample
from tests.core.methods.averaging_shared import bound

EXECUTORS = ("threads", "batched")


def mlp(name, **kw):
    """The method on a network without BatchNorm, and its clients' data."""
    return bound(name, "mlp", **kw)


# -- who trains on what ----------------------------------------------------------------------------


def chosen(method, r):
    """Who takes part in round r."""
    return sample(method.task.config, method.task.K, r).tolist()


def batches(method, data, k, r, **how):
    """(x, y) of client k's batches in round r; `how` is stream, epochs and batch."""
    c = method.task.config
    how = dict(batch=c.batch, kind=c.plan, shuffle=c.shuffle, epochs=c.epochs) | how
    for at in data.batch_indices(k, r, **how)[:, 0]:
        yield data.batch(torch.as_tensor(at))


def samples(data, k):
    """(x, y) of all training samples of client k."""
    return data.batch(torch.as_tensor(data.index["train"][k]))


# -- a model as a function, and its steps ----------------------------------------------------------


def scored(method, p, x):
    return functional_call(method.task.model, p, (x,))


def fit(method, p, x, y):
    """Mean cross-entropy of the network alone."""
    return F.cross_entropy(scored(method, p, x), y)


def hidden(method, p, x):
    """The features of the network of `mlp`."""
    model = method.task.model
    found = []
    handle = model.fc.register_forward_hook(lambda _, args, out: found.append(args[0]))
    try:
        functional_call(model, p, (x,))
    finally:
        handle.remove()
    return found[0]


def gradient(loss, p, names=None):
    """d loss(q) / dq at q = p, by name, default all; 0 where the loss does not depend on it."""
    leaves = {n: p[n].detach().clone().requires_grad_() for n in names or p}
    found = torch.autograd.grad(
        loss(p | leaves), [*leaves.values()], allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))


def descend(p, names, seen, loss, lr):
    """One model after a step of SGD at `names` on loss(p, x, y) for each (x, y) of `seen`."""
    for x, y in seen:
        g = gradient(lambda q, x=x, y=y: loss(q, x, y), p, names)
        p = p | {n: p[n] - lr * g[n] for n in names}
    return p


def average(models, n):
    """The mean of models (a list) with weights n."""
    w = n.double() / n.sum()
    return {name: sum(a * m[name] for a, m in zip(w, models, strict=True)) for name in models[0]}


def close(found, wanted, k=None):
    """`found` {name: (*shape)}, or row k of it, equals `wanted` to 1e-10."""
    for n, v in wanted.items():
        got = found[n] if k is None else found[n][k]
        torch.testing.assert_close(got, v, rtol=1e-10, atol=1e-10, msg=lambda m, n=n: f"{n}: {m}")
