"""What a method may know: settings of its training, sizes of its clients, names in its model, and
how to apply it.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from pfl_core import models, optim, reach
from pfl_core.anatomy import Anatomy
from pfl_core.stacked import Params, expand, select
from pfl_core.util import draws


@dataclass(frozen=True)
class TrainConfig:
    """What engine, round loop and methods need of an Experiment: its fields of the same names.

    Made from an Experiment in experiments/build.py and nowhere else, and carried by the Task.
    """

    seed: int
    rounds: int
    participation: float
    client_dropout: float
    stragglers: float
    eval_every: int
    eval_after: bool | None
    eval_clients: int
    keep_models: bool
    keep_scores: bool
    metrics: tuple[str, ...]
    epochs: int
    steps: int
    batch: int
    plan: str
    shuffle: bool
    lr: float
    lr_schedule: str
    lr_schedule_args: dict[str, Any]
    optimizer: str
    optimizer_args: dict[str, Any]
    momentum: float
    weight_decay: float
    clip: float
    server: str
    server_args: dict[str, Any]
    precision: str
    buffers: str
    head: str
    head_depth: int
    head_by: str
    holdout: float
    finetune: list[dict[str, Any]]

    @property
    def plain_sgd(self) -> bool:
        """Whether a step is the gradient times the rate, for a loss that counts on that."""
        return self.optimizer == "sgd" and not (self.momentum or self.weight_decay)

    @property
    def stepping(self) -> str:
        """What else a step has, for the error of who wants none of it."""
        decay = f"weight_decay = {self.weight_decay}"
        return f"momentum = {self.momentum}, {decay}, optimizer = {self.optimizer}"


class Task:
    """What methods may know of settings, model and clients.

    Parameters
    ----------
    model : nn.Module
        The network, with the weights that all clients begin with.
    n : (K,) int64
        The clients' numbers of training samples.
    label_counts : (K, C) int64
        How many training samples of each class they have.
    config : TrainConfig
    heads : {name: (K, *shape)}
        Initial heads of the clients' own; none: all begin with the model's.
    anatomy : Anatomy, optional
        What a trial run of the model found; by default layers are in the order of registration.

    Attributes
    ----------
    K, C : numbers of clients and classes
    parameters, buffers, names : tuples of the names of trained tensors, of BatchNorm's statistics,
        and of both; a tensor that the model has under several names is there under its first
    bn : set of the names of all that belongs to BatchNorm
    layers : {layer: names of its parameters}, by module, in forward order
    initial : {name: (*shape)}, the initial model of ONE client
    constants : {name: (*shape)}, what of the model is frozen: the same for all, and no method's
    tied : {further name: first name} of tensors that the model has under several names
    device, dtype : of the model
    joins : the State of a trained federation that these clients are new to, or None
    """

    def __init__(
        self,
        model: nn.Module,
        n: Tensor,
        label_counts: Tensor,
        config: TrainConfig,
        heads: Params | None = None,
        anatomy: Anatomy | None = None,
    ):
        self.model, self.n, self.label_counts, self.config = model, n, label_counts, config
        self.K, self.C = label_counts.shape
        self.parameters = tuple(models.trained(model))
        self.buffers = tuple(models.buffers(model))
        self.names = self.parameters + self.buffers
        self.tied = models.tied(model)
        self.anatomy = anatomy or Anatomy(model)
        self._head = frozenset(self.anatomy.head(config.head_depth, config.head_by, config.head))
        self.bn = frozenset(models.bn(model)).intersection(self.names)
        self.layers = self.layers_by("module")
        state = model.state_dict(keep_vars=True)
        self._fixed = {n: v for n, v in state.items() if n not in {*self.names, *self.tied}}
        self._still = models.still(model)
        self.constants = {n: v.detach() for n, v in self._fixed.items()}
        self.initial = {n: v.detach().clone() for n, v in state.items() if n in self.names}
        self.own_heads = heads or {}
        self.joins: Any = None
        first = self.initial[self.parameters[0]]
        self.device, self.dtype = first.device, first.dtype
        self._local = threading.local()

    @contextmanager
    def seeded(self, purpose: str) -> Iterator[None]:
        """Within it, torch draws by (seed, purpose): for weights of a method's own modules."""
        with draws.seeded(int(draws.rng(self.config.seed, purpose).integers(2**62))):
            yield

    def layers_by(self, by: str) -> dict[str, list[str]]:
        """{layer: parameter names} by "module", "child", "tensor" or "block", in forward order."""
        return self.anatomy.layers(by)

    @functools.cached_property
    def head(self) -> frozenset[str]:
        """Names of the experiment's head.

        Raises
        ------
        ValueError
            If it was counted and is not what gives the scores, or is frozen.
        """
        if not self.config.head:
            self.anatomy.check_head(self._head, self.config.head_depth, self.config.head_by)
        return self._head

    @property
    def named_head(self) -> frozenset[str]:
        """Names of the head as it is counted or named, whether or not it can be a client's own."""
        return self._head

    def drawn(self) -> Params:
        """The models as they were drawn, {name: (K, *shape)}: one common model (stride 0), or with
        heads of the clients' own.
        """
        return expand(self.initial, self.K) | self.own_heads

    def start_from(self, values: Params) -> None:
        """Take the initial model from `values` {name: (*shape)}, as far as it has the names.

        Numbers become those of the model's types.
        """
        like = self.initial
        self.initial |= {n: v.to(like[n].dtype, copy=True) for n, v in values.items() if n in like}
        for n in self.constants.keys() & values.keys():
            self.constants[n].copy_(values[n])

    def start(self) -> Params:
        """What clients begin with, {name: (K, *shape)}: the models as they were drawn; with
        `joins`, the parameters of its server instead.
        """
        served = select(self.joins.server, self.parameters) if self.joins else {}
        return self.drawn() | expand(served, self.K)

    def optimizer_state(self, p: Params) -> Params:
        """State of the experiment's optimizer for p {name: (S, *shape)}, before the first step.

        For clients that keep it from round to round: what is trained from it goes on with it.
        """
        return optim.at_rest(self.config, p)

    def apply(self, p: Params, x: Tensor) -> Tensor:
        """Class scores (B, C) of ONE client's model p on x (B, ...)."""
        return self._module(p)(x)

    @functools.cached_property
    def last_linear(self) -> tuple[str, ...]:
        """Names of weight and bias (if it has one) of the model's last layer, frozen or not.

        Raises
        ------
        ValueError
            If that is no nn.Linear.
        """
        try:
            return self.anatomy.last_linear()
        except ValueError as error:
            raise ValueError(f"{error}, or take a method that needs no features") from None

    @functools.cached_property
    def classifier(self) -> tuple[str, ...]:
        """Those names of `last_linear` that are trained."""
        return tuple(n for n in self.last_linear if n in self.parameters)

    def value(self, p: Params, name: str) -> Tensor:
        """The tensor `name` of ONE client's model p, or the constant of that name."""
        return p[name] if name in p else self.constants[name]

    def features(self, p: Params, x: Tensor, training: bool | None = None) -> Tensor:
        """Input of `last_linear`, (B, F), of ONE client.

        `training=False` forces BatchNorm's running statistics.
        """
        return models.features(self._module(p, training), x, self.anatomy.linear[0])

    def classify(self, p: Params, z: Tensor) -> Tensor:
        """Class scores (B, C) of ONE client's `last_linear` on features z (B, F)."""
        return F.linear(z, *(self.value(p, n) for n in self.last_linear))

    @contextmanager
    def mode(self, training: bool) -> Iterator[None]:
        """Within it, this thread's `apply` runs in training (or evaluation) mode."""
        before = getattr(self._local, "training", False)
        self._local.training = training
        try:
            yield
        finally:
            self._local.training = before

    def _module(self, p: Params, training: bool | None = None) -> nn.Module:
        # A module of this thread's own into which p is hung: as functional_call does, without its
        # cost per call.
        if training is None:
            training = bool(getattr(self._local, "training", False))
        both = self._local.__dict__.setdefault("modules", {})
        if training not in both:
            # Constants are not copied: all threads' modules have the same ones.
            module = copy.deepcopy(self.model, {id(v): v for v in self._fixed.values()})
            reach.crop(module).train(training)
            for path in self._still:
                module.get_submodule(path).eval()
            places = {n: n for n in self.names} | self.tied
            owners = [
                (first, *_slot(module, n)) for n, first in places.items() if first in self.initial
            ]
            both[training] = module, owners
        module, owners = both[training]
        for name, slots, key in owners:
            slots[key] = p[name]
        return module


def _slot(module: nn.Module, name: str) -> tuple[dict, str]:
    path, _, key = name.rpartition(".")
    holder = module.get_submodule(path)
    return (holder._parameters if key in holder._parameters else holder._buffers), key
