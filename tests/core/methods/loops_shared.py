"""What plain loops over clients share: a model as a function, a client's batches, gradients."""

import torch
import torch.nn.functional as F
from torch.func import functional_call

from tests.core.methods.averaging_shared import bound

EXECUTORS = ("threads", "batched")


def mlp(name, **kw):
    """The method on a network without BatchNorm, and its clients' data."""
    return bound(name, "mlp", **kw)


def scored(method, p, x):
    return functional_call(method.task.model, p, (x,))


def hidden(method, p, x):
    """The features of that network."""
    model = method.task.model
    found = []
    handle = model.fc.register_forward_hook(lambda _, args, out: found.append(args[0]))
    try:
        functional_call(model, p, (x,))
    finally:
        handle.remove()
    return found[0]


def batches(data, k, r, **how):
    """Client k's batches (x, y) of round r."""
    for (rows,) in data.batch_indices(k, r, batch=6, **how):
        yield data.batch(torch.as_tensor(rows))


def gradient(loss, p):
    """d loss(q) / dq at q = p, name by name; 0 where the loss does not depend on it."""
    leaves = {n: v.detach().clone().requires_grad_() for n, v in p.items()}
    found = torch.autograd.grad(
        loss(leaves), [*leaves.values()], allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))


def fit(method, p, x, y):
    return F.cross_entropy(scored(method, p, x), y)


def average(models, n):
    """The mean of models (a list) with weights n."""
    w = n.double() / n.sum()
    return {name: sum(a * m[name] for a, m in zip(w, models, strict=True)) for name in models[0]}


def close(found, wanted, k=None):
    """`found` {name: (*shape)}, or row k of it, equals `wanted` to 1e-10."""
    for n, v in wanted.items():
        got = found[n] if k is None else found[n][k]
        torch.testing.assert_close(got, v, rtol=1e-10, atol=1e-10, msg=lambda m, n=n: f"{n}: {m}")
