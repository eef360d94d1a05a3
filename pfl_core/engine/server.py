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


def begin(method: Method, state: State) -> None:
    """Give a state the optimizer's, unless it has one; ValueError if there is nothing to move."""
    name, there = method.task.config.server, held(method, state)
    if name != "plain" and not there:
        raise ValueError(
            f"Experiment(server={name!r}): the server of {method.name} holds no single model that "
            "it could move; allowed with it is server='plain'"
        )
    state.moments = state.moments or optim.server_at_rest(method.task.config, there)


def stepped(method: Method, old: State, new: State, before: Params) -> State:
    """The state that `upload` made of the old one, with the optimizer's step from `before`."""
    if not before:
        return new
    new.moments = old.moments  # also where upload made another State
    change = {n: new.server[n] - v for n, v in before.items()}
    new.server |= optim.server(method.task.config).step(before, change, new.moments)
    return new
