"""Plain loops over clients and batches, beside which tests hold whole rounds of a method."""

import torch
import torch.nn.functional as F

from pfl_core.engine.simulate import sample


def chosen(method, r):
    """Who takes part in round r."""
    return sample(method.task.config, method.task.K, r).tolist()


def batches(method, data, k, r, **how):
    """(x, y) of client k's batches in round r; `how` is stream and epochs."""
    c = method.task.config
    how = dict(batch=c.batch, kind=c.plan, shuffle=c.shuffle, epochs=c.epochs) | how
    for at in data.batch_indices(k, r, **how)[:, 0]:
        yield data.batch(torch.as_tensor(at))


def samples(data, k):
    """(x, y) of all training samples of client k."""
    return data.batch(torch.as_tensor(data.index["train"][k]))


def slopes(p, names, loss):
    """Gradients {name: (*shape)} of loss(p) at `names` of one model."""
    leaves = {n: p[n].detach().clone().requires_grad_() for n in names}
    grads = torch.autograd.grad(loss(p | leaves), list(leaves.values()))
    return dict(zip(names, grads, strict=True))


def descend(p, names, seen, loss, lr):
    """One model after a step of SGD at `names` for each (x, y) of `seen`."""
    for x, y in seen:
        g = slopes(p, names, lambda q, x=x, y=y: loss(q, x, y))
        p = p | {n: p[n] - lr * g[n] for n in names}
    return p


def fit(method):
    """Mean cross-entropy of the network alone."""
    return lambda p, x, y: F.cross_entropy(method.task.apply(p, x), y)
