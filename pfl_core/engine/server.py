"""The server's optimizer: what it makes of the change that a method's `upload` would make.

It moves the network's parameters that the server holds. What else is there, such as averaged
statistics or prototypes, is as the method leaves it.
"""

from __future__ import annotations

from pfl_core import optim
from pfl_core.methods.base import Method, State
from pfl_core.stacked import Params, clone, select


def held(method: Method, state: State) -> Params:
    """A copy of what the optimizer moves, {name: (*shape)}; {} where there is none."""
    if method.task.config.server == "plain":
        return {}
    return clone(select(state.server, method.task.parameters))


def check(method: Method, state: State) -> None:
    """Raise ValueError where an optimizer has nothing to move."""
    name = method.task.config.server
    if name != "plain" and not held(method, state):
        raise ValueError(
            f"Experiment(server={name!r}): the server of {method.name} holds no single model that "
            "it could move; allowed with it is server='plain'"
        )


def moments(method: Method, state: State) -> Params:
    """The optimizer's state before the first round."""
    return optim.server_at_rest(method.task.config, held(method, state))


def stepped(method: Method, state: State, before: Params) -> State:
    """The state that `upload` made, with the optimizer's step from `before` in place of its own."""
    if not before:
        return state
    config = method.task.config
    state.moments = state.moments or optim.server_at_rest(config, before)
    change = {n: state.server[n] - v for n, v in before.items()}
    state.server |= optim.server(config).step(before, change, state.moments)
    return state
