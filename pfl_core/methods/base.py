"""The contract of a method: twelve hooks, all with FedAvg's defaults.

A method is a subclass of `Method` that overrides the one or two hooks in which it differs from
FedAvg. It is written for clients as data, never for a loop over them: the engine runs all of a
round's clients, batch after batch, on a CPU or a GPU. One round, as engine/simulate.py walks it:

    models = method.personal(state, ctx)                  # evaluated "before" local training
    sent   = method.download(state, sel)                  # what the server sends
    start  = method.begin(state, sel, sent)               # and what clients make of it
    end    = method.local(ctx, start)                     # local training
    models = method.serve(end)                            # evaluated "after" local training
    kept, up                                              # `end` in two, by name: see State.clients
    state  = method.upload(state, sel, start, up, weight) # the server's step

Letters: K clients, of whom S take part in a round (`sel` (S,) int64); B samples in a batch; C
classes; k or "ONE client" is one of them. Params is {name: tensor}. Its tensors are stacked over
clients in their first axis, (K, *shape) or (S, *shape), unless a text says ONE client. Names are
those of the network's parameters and buffers, or a method's own, such as "v.fc.weight" in Ditto.

Two rules keep a method right. `start` and `end` are read-only: make new tensors. And of a State,
`upload` alone changes `server` and `extra`, while the round loop writes `clients`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, dataclass_transform

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_core import models, optim
from pfl_core.methods import names
from pfl_core.methods.task import Task
from pfl_core.stacked import Params, clone, expand, scalars, select, take, weighted_mean
from pfl_core.util import checks, fields, identity
from pfl_core.util.cards import Listing, card

METHODS: dict[str, type[Method]] = {}


class Batch(NamedTuple):
    """ONE client's batch of B samples."""

    x: Tensor  # (B, ...) images, features or tokens
    y: Tensor  # (B,) int64 classes
    noise: Tensor | None = None  # (B, *method.noise) uniform in [0, 1), for methods that ask for it


class Step(NamedTuple):
    """Where local training is, for a method with an update rule of its own (`ctx.train(step=)`)."""

    t: Any  # local step, from 0: a number, or a tensor of it
    lr: Any  # a number, or {name: rate}, as it was given to `ctx.train`
    memory: Params  # what the step returned beside the parameters at t - 1; {} at t = 0


@dataclass
class State:
    """A federation between two rounds."""

    server: Params  # {name: (*shape)}: the global model, and what else is averaged
    clients: Params  # {name: (K, *shape)}: what clients keep; it never leaves them
    # What else the server has: dicts of tensors, at any depth, such as all clients' last models.
    extra: dict[str, Any] = field(default_factory=dict)
    round: int = 0
    # State of the experiment's server optimizer, which the round loop keeps.
    moments: Params = field(default_factory=dict)


class Context(Protocol):
    """A round as a method sees it; engine/context.py provides it."""

    sel: Tensor  # (S,) int64: ids of the clients that train (or are evaluated)
    round: int
    state: State  # to be read only

    @property
    def lr(self) -> float:
        """The experiment's learning rate in this round, as its schedule has it."""
        ...

    def train(
        self,
        loss: Callable[[Params, Params, Batch], Tensor],
        start: Params,
        *,
        anchor: Params | None = None,
        only: Iterable[str] | Callable[[str], bool] | None = None,
        clipped: Iterable[str] | None = None,
        lr: float | dict[str, float] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        step: Callable | None = None,
        batch: int | None = None,
        batches: int = 1,
        split: str = "train",
        fraction: float = 1.0,
        stream: str = "local",
        bn: str = "train",
        aside: bool = False,
    ) -> Params:
        """`start` after local training of all S clients on `loss(p, anchor, batch)`.

        What is not said here is the experiment's: epochs or steps, batch, optimizer, rate, ...
        The optimizer's state (velocity, moments) begins anew in each call, unless `start` has it
        under the names that `task.optimizer_state` gives. A tensor that the loss does not depend on
        stays as it is, as in torch.optim: decay and momentum do not move it. In a `step` of the
        method's own its gradient is 0.

        Parameters
        ----------
        loss : function of ONE client's Params p, of its anchor and a Batch -> scalar
            Uses its arguments only; what it needs of the server rides in `anchor`. What it carries
            from batch to batch is trained by it (FedDBE's m), or a step's memory.
        start : {name: (S, *shape)}
        anchor : {name: (S, *shape)}, default `start`
            Constants that every step sees, such as the model that was received.
        only : names that are trained; default the network's parameters
        clipped : trained names that the experiment clips, by one norm over all of them; default
            all that are trained. Name the network's, where what stays with a client must not change
            what the server learns (FedRoD)
        lr : rate, or a rate for each trained name; default `ctx.lr`. What is said stays, whatever
            the experiment's schedule
        epochs, steps : how long; steps > 0 replace epochs
        batch : B, samples in a batch
        step : `step(p, anchor, grad, at) -> (p, memory)` of ONE client, in place of the optimizer
            grad(p, j=0) is the gradient at p on the j-th of the step's `batches`; `at` is a Step.
            It may write into the trained tensors of p, which are the client's own. Momentum, decay
            and clipping are the optimizer's: a step has none but its own, and an experiment with
            another optimizer than SGD is refused.
        aside : whether `step` is no local training but something beside it, such as FedALA's
            weights, and goes with any optimizer
        split, fraction : the samples: "train", "holdout" or "fit"; a random share of them
        stream : trainings with equal streams see equal batches
        bn : "train" (batch statistics; running ones advance) or "eval" (running statistics)
            A client has one set of running statistics. Each training and each `grad` on a step's
            first batch advances it, by whatever model is evaluated: of a step that takes two, at w
            and at a mixture (APFL), they are a blend. `grad` with j > 0 and `measure` leave them.
        """
        ...

    def measure(
        self,
        fn: Callable[[Params, Batch], Any],
        p: Params,
        split: str = "train",
        fold: tuple[int, int] | None = None,
    ) -> Any:
        """Sums of `fn(p, batch)` over all samples of each client, in evaluation mode.

        Parameters
        ----------
        fn : function of ONE client's Params and a Batch
            It returns a tensor or a dict of tensors, sums over its batch.
        p : {name: (S, *shape)}
        split : {"train", "holdout", "fit", "val", "test"}
            "fit" is train without holdout; "test" is for methods that declare `leaks_test`.
        fold : (i, n), default all samples
            Only the i-th of n parts, i from 0: a client's samples are dealt out in turn, class by
            class. A part without samples has sums of 0.

        Returns
        -------
        (S, ...) tensor, or a dict of them
        """


@dataclass_transform(
    eq_default=False,
    frozen_default=True,
    field_specifiers=(fields.number, fields.choice, fields.value),
)
class Method:
    """Federated averaging, hook by hook.

    A subclass with a `name` is registered under it when it is created. Its annotated attributes are
    its hyper-parameters: every subclass is made a frozen dataclass, without a decorator.
    util/fields.py says how to declare what they may be; a plain `mu = 5.0` gives one of a parent
    another default. Hooks read them, and `self.task`: names and sizes of the model, and the
    experiment's settings (`self.task.config`).

    Examples
    --------
    Clients that keep the biases to themselves, and are pulled to where the round began:

    >>> class OwnBiases(Method):
    ...     name = "own_biases"
    ...     mu: float = 0.1
    ...
    ...     def is_shared(self, name):
    ...         return not name.endswith("bias")
    ...
    ...     def loss(self, p, anchor, batch):
    ...         far = sum((p[n] - anchor[n]).square().sum() for n in self.task.parameters)
    ...         return super().loss(p, anchor, batch) + self.mu / 2 * far
    >>> Experiment(method="own_biases", method_args={"mu": 0.5})
    Experiment(method='own_biases', method_args={'mu': 0.5})
    """

    # What a subclass may say of itself.
    name: ClassVar[str] = ""
    revision: ClassVar[int] = 1  # raised when a method's numbers change; part of a run's id
    leaks_test: ClassVar[bool] = False  # may read test data while training; printed with its rows
    scheduled: ClassVar[bool] = False  # a round depends on how many there are; no run is continued
    untuned: ClassVar[tuple[str, ...]] = ()  # fields of an Experiment that no random search draws
    noise: ClassVar[tuple[int, ...] | None] = None  # shape of a sample's `Batch.noise`, if it asks
    # Whether `init` can make `extra` for clients that are new to a trained server, `task.joins`.
    # Methods without `extra` take in new clients anyhow; others refuse before anything is trained.
    adopts: ClassVar[bool] = False

    task: ClassVar[Task]  # set by `bind`
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]  # every subclass is a dataclass

    # -- the hooks: setting up ---------------------------------------------------------------------
    def check(self) -> None:
        """Raise ValueError where hyper-parameters do not fit the task or each other.

        Called before anything is trained. What one value may be is said at its field instead.
        """

    def init(self) -> State:
        """The state before round 0: what is shared at the server, the rest with each client."""
        start, policy, buffers = self.task.start(), self.task.config.buffers, self.task.buffers
        # Buffers are BatchNorm's statistics: averaged, kept by clients, or reset at each download.
        shared = [
            n for n in start if self.is_shared(n) and (n not in buffers or policy == "average")
        ]
        reset = [n for n in buffers if n not in shared and policy == "reset"]
        kept = clone(select(start, lambda n: n not in shared and n not in reset))
        return State({n: start[n][0].clone() for n in shared}, kept)

    def is_shared(self, name: str) -> bool:
        """Whether the server averages the parameter or buffer `name`; else it stays with clients.

        FedPer is this hook alone: `return name not in self.task.head`.
        """
        return True

    # -- the hooks: a round ------------------------------------------------------------------------
    def download(self, state: State, sel: Tensor) -> Params:
        """ONLY what the server sends to clients `sel`: {name: (S, *shape)}.

        It is made of `state.server` and `state.extra`, and its size is the round's traffic.
        """
        return expand(state.server, len(sel))

    def begin(self, state: State, sel: Tensor, sent: Params | None = None) -> Params:
        """What clients `sel` start a round from, {name: (S, *shape)}.

        That is what they keep (their rows of `state.clients`), what they were sent (default: what
        `download` gives), and buffers that the experiment resets.
        """
        p = take(state.clients, sel) | (self.download(state, sel) if sent is None else sent)
        reset = {n: self.task.initial[n] for n in self.task.buffers if n not in p}
        return p | expand(reset, len(sel))

    def logits(self, p: Params, x: Tensor) -> Tensor:
        """Class scores (B, C) of ONE client's model p {name: (*shape)} on x (B, ...)."""
        return self.task.apply(p, x)

    def loss(self, p: Params, anchor: Params, batch: Batch) -> Tensor:
        """What ONE client minimises: a mean over its batch, a scalar.

        p is the client's model in training, {name: (*shape)}, and `anchor` what stays constant
        meanwhile: what the round began with, unless `local` says otherwise.
        """
        return F.cross_entropy(self.logits(p, batch.x), batch.y)

    def local(self, ctx: Context, start: Params) -> Params:
        """Local training of the S clients `ctx.sel` from `start`: {name: (S, *shape)}.

        Of what it returns, names in `state.clients` are kept by the clients; the rest is uploaded,
        but for tensors that it returns as they were in `start`. So what was sent for this round
        alone may stay where `ctx.train` leaves it: `serve` and `upload` find it, and it costs
        nothing (FedProto's prototypes).
        """
        return ctx.train(self.loss, start)

    def upload(
        self, state: State, sel: Tensor, start: Params, end: Params, weight: Tensor
    ) -> State:
        """The server's step: the state after it, which may be `state`, changed.

        `end` {name: (S, *shape)} is what `local` returned without what clients `sel` keep, `start`
        what they began with (in a deployment what they were sent), and `weight` (S,) their numbers
        of training samples.
        """
        state.server |= weighted_mean(select(end, state.server), weight)
        return state

    def traffic(self, state: State, sel: Tensor, down: Params, up: Params) -> tuple[int, int]:
        """Scalars sent down and up in a round, summed over its S clients.

        `down` is what `download` gave, `up` what clients upload, {name: (S, *shape)} each; {} of
        clients that do not answer.
        """
        floats = lambda p: select(p, lambda n: p[n].is_floating_point())  # noqa: E731
        return len(sel) * scalars(floats(down)), len(sel) * scalars(floats(up))

    # -- the hooks: what is served -----------------------------------------------------------------
    def serve(self, p: Params) -> Params:
        """The personal models in clients' Params p, as `begin` or `local` gives them.

        {name: (S, *shape)}, with all that `logits` reads under the names that it reads. Models that
        lie under other names are picked or mixed here (FedFew, APFL), and need not be sent for it.
        """
        return p

    def personal(self, state: State, ctx: Context) -> Params:
        """The personal models of clients `ctx.sel` before local training, as `serve` gives them.

        A method whose personal models are made on demand trains them here, with `ctx.train`.
        """
        return self.serve(self.begin(state, ctx.sel))

    # -- no hooks ----------------------------------------------------------------------------------
    @property
    def own_scores(self) -> bool:
        """Whether class scores need more than the network: `logits` is the method's own."""
        return type(self).logits is not Method.logits

    def pairs(self, s: int) -> tuple[int, int]:
        """What grows with pairs of clients where `s` take part in a round; (0, 0): nothing does.

        Of how many pairs a round compares or mixes the models, and how many numbers the server
        holds of pairs. Where many clients make that expensive, it is said before training.
        """
        return 0, 0

    @property
    def continues(self) -> bool:
        """Whether a run goes on from a shorter one: no round depends on how many there are."""
        return not (self.scheduled or optim.schedule(self.task.config).by_rounds)

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(
            f"{self.name}.{name} = {value!r}: a method does not change; what a round leaves behind "
            "belongs into its State, and hyper-parameters into method_args"
        )

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"del {self.name}.{name}: a method does not change")

    def __init_subclass__(cls, **kw: Any) -> None:
        super().__init_subclass__(**kw)
        doc = cls.__doc__
        fields.frozen(cls)
        # Those of Method stay, and a class may have the decorator that version 0.1 asked for.
        del cls.__setattr__, cls.__delattr__
        fields.check_names(cls.name or cls.__name__, cls, Method)
        cls.__doc__ = doc and fields.documented(doc, cls)
        known = METHODS.get(cls.name)
        if known and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"method name {cls.name!r} is taken by {known.__module__}.{known.__qualname__}; "
                "choose another `name`"
            )
        if cls.name and "name" in cls.__dict__:
            checks.name(f"the name of method {cls.__name__}", cls.name)
            identity.note(cls)
            METHODS[cls.name] = cls

    def __post_init__(self) -> None:
        fields.check(self.name or type(self).__name__, self)

    def bind(self, task: Task, check: bool = True) -> Method:
        """This method with its hyper-parameters, for one task.

        `check` is False where they were looked at before.

        Raises
        ------
        ValueError
            If they do not fit.
        """
        bound = dataclasses.replace(self)  # without what another task left in it
        object.__setattr__(bound, "task", task)
        if not check:
            return bound
        try:
            bound.check()
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        if name := "" if models.is_ours(task.model) else names.taken(type(self), task.initial):
            raise ValueError(self._keeps(name))
        return bound

    def _keeps(self, name: str) -> str:
        return (
            f"{self.name} keeps something of its own under the name {name.partition('.')[0]!r}, "
            "which the model has, too; rename it in the model"
        )

    def _repr_html_(self) -> str:
        facts = {
            f.name: f"{getattr(self, f.name)!r}: {fields.about(f).get('doc', '')}".rstrip(": ")
            for f in dataclasses.fields(self)
        }
        return card(f"{self.name}: {_first_line(type(self))}", facts)


def initial_state(method: Method, look: Callable[[Any], State] | None = None) -> State:
    """The state before round 0: what `init` gives, which `look` may refuse.

    Clients that are new to a trained federation (`method.task.joins`) meet its server as it is, and
    each of them keeps what `init` gives the first of them.

    Raises
    ------
    ValueError
        If a name in it is both the model's and the method's own.
    """
    state, joins = method.init(), method.task.joins
    state = look(state) if look else state
    for n, v in method.task.initial.items():
        shapes = [state.server[n].shape] if n in state.server else []
        shapes += [state.clients[n].shape[1:]] if n in state.clients else []
        if any(shape != v.shape for shape in shapes):
            raise ValueError(method._keeps(n))
    if joins is None:
        return state
    alike = {n: v[:1].repeat(len(v), *[1] * (v.dim() - 1)) for n, v in state.clients.items()}
    return State(joins.server, alike, state.extra, joins.round)


def check_adopts(method: Method) -> None:
    """Raise ValueError unless the method takes clients into a federation trained without them."""
    extra = {} if method.adopts else method.init().extra
    if not extra:
        return
    k = method.task.K
    of_clients = [name for name, v in extra.items() if any(len(t) == k for t in _tensors(v))]
    what = (
        f"keeps state for each client it knows ({', '.join(of_clients)})"
        if of_clients
        else f"keeps state at the server ({', '.join(extra)})"
    )
    raise ValueError(
        f"{method.name} {what} and cannot adopt new ones as it is: use pfedhn, or adopt=False; of "
        "a method of your own, set `adopts = True` in its class, and let `init` make that state "
        "for the new clients from `self.task.joins`, the trained State"
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    # All tensors with an axis in a dict of tensors, at any depth.
    for v in value.values() if isinstance(value, dict) else [value]:
        if isinstance(v, dict):
            yield from _tensors(v)
        elif isinstance(v, Tensor) and v.dim():
            yield v


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
    """The method registered as `name` with hyper-parameters `hyper`, not yet bound to a task.

    Raises
    ------
    ValueError
        For a name or hyper-parameter that is unknown, and for a value that its field does not
        allow.
    """
    own = "a file of your own is named in plugins, and its class has a `name`"
    checks.known("method", name, sorted(METHODS), own)
    known = [f.name for f in dataclasses.fields(METHODS[name])]
    for key in hyper:
        there = f"annotate it in its class ({key}: float = ...)" * hasattr(METHODS[name], key)
        checks.known(f"hyper-parameter of method {name!r}:", key, known, there)
    return METHODS[name](**hyper)


def head_models(model_fn: Callable[[int], nn.Module], head: list[str], k: int) -> Params:
    """Heads of the clients' own: those of k models drawn by `model_fn(seed)`, seeds 0 to k-1.

    `head` are the names; the result is {name: (k, *shape)}.
    """
    drawn = [select(dict(model_fn(i).state_dict()), head) for i in range(k)]
    return {n: torch.stack([d[n] for d in drawn]) for n in head}
