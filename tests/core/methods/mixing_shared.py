"""What tests of several methods share (mixing)."""

import torch

from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine

EVERYONE = torch.arange(4)


class Untrained:
    """A round's context in which local training changes nothing."""

    def __init__(self, context):
        self.context = context

    def __getattr__(self, name):
        return getattr(self.context, name)

    def train(self, loss, start, **how):
        return start


@torch.no_grad()
def one_round(method, data, state, sel=EVERYONE, train=True):
    """The state after one round of clients `sel`, as the round loop makes it; and what left the clients' training."""
    c = Context(Engine(method, data, "threads", 1), state, sel, state.round)
    start = method.begin(state, sel, method.download(state, sel))
    end = method.local(c if train else Untrained(c), start)
    up = {n: v for n, v in end.items() if n not in state.clients}
    state = method.upload(state, sel, start, up, data.n[sel].to(data.dtype))
    for n, v in end.items():
        if n in state.clients:
            state.clients[n][sel] = v
    state.round += 1
    return state, end
