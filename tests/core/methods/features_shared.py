"""What tests of several methods share (features)."""

import torch

from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.methods.base import Batch

EVERYONE = torch.arange(4)


FC = ("fc.weight", "fc.bias")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def context(method, data, state, sel=EVERYONE):
    return Context(Engine(method, data, "threads", 1), state, sel, state.round)


@torch.no_grad()
def one_round(method, data, state, sel=EVERYONE):
    """The state after one round of clients `sel`, as the round loop makes it; and what left the clients' training."""
    start = method.begin(state, sel, method.download(state, sel))
    end = method.local(context(method, data, state, sel), start)
    up = {n: v for n, v in end.items() if n not in state.clients}
    state = method.upload(state, sel, start, up, data.n[sel].to(data.dtype))
    for n, v in end.items():
        if n in state.clients:
            state.clients[n][sel] = v
    state.round += 1
    return state, end


def client(p, k=0):
    return {n: v[k] for n, v in p.items()}


def batch_of(data, k=0, b=6):
    return Batch(*data.batch(torch.as_tensor(data.index["train"][k][:b])))


def by_hand(p, z, condition):
    out = {}
    for name in ("gamma", "beta"):
        h = (p[f"cov.{name}.0.weight"] @ condition + p[f"cov.{name}.0.bias"]).clamp_min(0)
        h = (h - h.mean()) / (h.var(unbiased=False) + 1e-5).sqrt()
        out[name] = h * p[f"cov.{name}.2.weight"] + p[f"cov.{name}.2.bias"]
    return (z * (out["gamma"] + 1) + out["beta"]).clamp_min(0)
