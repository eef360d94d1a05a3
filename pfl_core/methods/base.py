"""The contract of a method: hooks with FedAvg as their defaults; a method overrides the one or two in which it differs.

Letters: K clients, S sampled this round (`sel` (S,) int64), B batch, C classes. Params is {name: tensor}, stacked over clients unless it
says ONE client. `start` and `end` are read-only. Of a State, `upload` alone changes `server` and `extra`; the round loop writes into
`clients` what `local` returns under their names.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_core.methods.task import Task
from pfl_core.stacked import Params, expand, own, scalars, select, take, weighted_mean
from pfl_core.util import checks, identity
from pfl_core.util.cards import Listing, card

METHODS: dict[str, type[Method]] = {}


class Batch(NamedTuple):
    """ONE client's full batch: x (B, ...), y (B,) int64, noise (B, *method.noise) uniform in [0, 1) or None."""

    x: Tensor
    y: Tensor
    noise: Tensor | None = None


class Step(NamedTuple):
    """What a custom step may know: t (local step, from 0), lr, memory (whatever it returned at t - 1; empty at t = 0)."""

    t: int
    lr: float
    memory: Params


@dataclass
class State:
    """A federation between two rounds: what the server averages, what each client keeps (K, *shape), the method's own; dicts of tensors."""

    server: Params
    clients: Params
    extra: dict[str, Any] = field(default_factory=dict)
    round: int = 0


class Context(Protocol):
    """One round as a method sees it; the engine provides it."""

    sel: Tensor
    round: int
    state: State

    def train(self, loss: Callable, start: Params, **how: Any) -> Params:
        """Local training of all S clients; see engine/context.py."""

    def measure(self, fn: Callable, p: Params, split: str = "train") -> Any:
        """Sums of `fn` over each client's samples; see engine/context.py."""


@dataclass(frozen=True, eq=False)
class Method:
    """Federated averaging, hook by hook: a method inherits it and overrides what it does otherwise.

    A subclass is registered under its `name` when it is made; a second class of that name is an error.

    Examples
    --------
    Clients that keep the biases to themselves:

    >>> class OwnBiases(Method):
    ...     name = "own_biases"
    ...     def is_shared(self, name):
    ...         return not name.endswith("bias")
    >>> Experiment(method="own_biases").method
    'own_biases'
    """

    name: ClassVar[str] = ""
    revision: ClassVar[int] = 1  # raised when a method's numbers change
    leaks_test: ClassVar[bool] = (
        False  # True allows reading test data while training; printed with its rows
    )
    scheduled: ClassVar[bool] = (
        False  # True: a round depends on how many there are; such a run is not continued
    )
    noise: ClassVar[tuple[int, ...] | None] = (
        None  # shape of a sample's uniform noise in Batch, if the loss needs any
    )
    task: ClassVar[Task]

    def __init_subclass__(cls, **kw: Any):
        super().__init_subclass__(**kw)
        known = METHODS.get(cls.name)
        if known and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"method name {cls.name!r} is taken by {known.__module__}.{known.__qualname__}; choose another `name`"
            )
        if cls.name and "name" in cls.__dict__:
            identity.note(cls)
            METHODS[cls.name] = cls

    def bind(self, task: Task) -> Method:
        """This method with its hyper-parameters, for one task."""
        bound = copy.copy(self)
        object.__setattr__(bound, "task", task)
        bound.check()
        return bound

    def _repr_html_(self) -> str:
        facts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return card(f"{self.name}: {_first_line(type(self))}", facts)

    def check(self) -> None:
        """Raise ValueError for hyper-parameters that do not fit the task; called before anything is trained."""

    def check_last_linear(self) -> None:
        """For a `check`: raise ValueError, naming the method, unless the model ends in an nn.Linear."""
        try:
            _ = self.task.last_linear
        except ValueError as error:
            raise ValueError(
                f"{self.name}: {error}, or take a method other than fedcp, fedpac and gpfl"
            ) from None

    # -- state -----------------------------------------------------------------------------------------------------------
    def is_shared(self, name: str) -> bool:
        """Whether the server averages parameter `name`; the rest stays with the client."""
        return True

    def is_clipped(self, name: str) -> bool:
        """Whether the experiment's gradient clipping counts parameter `name`."""
        return True

    def shared(self) -> list[str]:
        """Names that travel: `is_shared`, and buffers only where the policy is to average them."""
        t = self.task
        return [
            n
            for n in t.names
            if self.is_shared(n) and (n not in t.buffers or t.config.buffers == "average")
        ]

    def init(self) -> State:
        """The state before round 0."""
        start, shared = self.task.start(), set(self.shared())
        reset = set(self.task.buffers) - shared if self.task.config.buffers == "reset" else set()
        kept = own(select(start, lambda n: n not in shared and n not in reset))
        return State({n: start[n][0].clone() for n in start if n in shared}, kept)

    def download(self, state: State, sel: Tensor) -> Params:
        """ONLY what the server sends to `sel`, {name: (S, *shape)}."""
        return expand(state.server, len(sel))

    def begin(self, state: State, sel: Tensor, sent: Params | None = None) -> Params:
        """What clients `sel` start a round from: what they keep, what they were sent, and buffers that the policy resets."""
        p = take(state.clients, sel) | (self.download(state, sel) if sent is None else sent)
        reset = {n: self.task.initial[n] for n in self.task.buffers if n not in p}
        return p | expand(reset, len(sel))

    # -- a round ---------------------------------------------------------------------------------------------------------
    def logits(self, p: Params, x: Tensor) -> Tensor:
        """Class scores (B, C) of ONE client."""
        return self.task.apply(p, x)

    def loss(self, p: Params, anchor: Params, batch: Batch) -> Tensor:
        """Training objective of ONE client on one full batch, a mean over it."""
        return F.cross_entropy(self.logits(p, batch.x), batch.y)

    def local(self, c: Context, start: Params) -> Params:
        """Local training of the S clients from `start`; what it returns goes back to `clients` by name, the rest to `upload`."""
        return c.train(self.loss, start)

    def upload(
        self, state: State, sel: Tensor, start: Params, end: Params, weight: Tensor
    ) -> State:
        """The server's step on `end` {name: (S, *shape)} (names that clients keep are not in it); weight (S,) = n_k."""
        state.server |= weighted_mean(select(end, state.server), weight)
        return state

    # -- what is served --------------------------------------------------------------------------------------------------
    def serve(self, p: Params) -> Params:
        """The personal models {name: (S, *shape)} inside clients' dicts p, as `begin` or `local` gives them."""
        return p

    def personal(self, state: State, c: Context) -> Params:
        """The personal models of c.sel as served before local training; may call c.train."""
        return self.serve(self.begin(state, c.sel))

    def adopt(self, state: State, k: int) -> State:
        """A state of k new clients, the server as it is; the new clients keep what `init` gives a client."""
        fresh = self.init().clients
        return State(
            state.server,
            {n: v[:1].repeat(k, *[1] * (v.dim() - 1)) for n, v in fresh.items()},
            state.extra,
            state.round,
        )

    def traffic(self, state: State, sel: Tensor, down: Params, up: Params) -> tuple[int, int]:
        """Scalars moved this round (server to clients, clients to server), summed over the S participants."""
        return tuple(
            len(sel) * scalars(select(p, lambda n, p=p: p[n].is_floating_point())) if p else 0
            for p in (down, up)
        )


def list_methods() -> Listing:
    """{key: the first sentence of its docstring} of every registered method.

    Examples
    --------
    >>> list_methods()["fedper"]
    'Personal head, shared base, trained jointly (Arivazhagan et al., 2019).'
    """
    return Listing({name: _first_line(cls) for name, cls in sorted(METHODS.items())})


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().partition("\n")[0] or "(its class has no docstring)"


def make_method(name: str, **hyper: Any) -> Method:
    """The method registered as `name` with hyper-parameters `hyper`; ValueError for an unknown name or a value of a wrong type."""
    checks.known("method", name, sorted(METHODS), "a file of your own is named in plugins")
    allowed = {f.name: f.type for f in dataclasses.fields(METHODS[name])}
    for key, value in hyper.items():
        checks.known(f"hyper-parameter of method {name!r}:", key, allowed)
        checks.kind(name, key, value, allowed[key])
    return METHODS[name](**hyper)


def head_models(model_fn: Callable[[int], nn.Module], head: list[str], k: int) -> Params:
    """Heads of the clients' own, {name: (k, *shape)}: those of k models drawn with seeds 0..k-1 by `model_fn(seed)`."""
    drawn = [dict(model_fn(i).state_dict()) for i in range(k)]
    return {n: torch.stack([d[n] for d in drawn]) for n in head}
