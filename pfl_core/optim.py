"""Optimizers of local training and of the server, and schedules of the learning rate.

A class each: its fields are what `optimizer_args`, `server_args` and `lr_schedule_args` of an
Experiment may say. Formulas are over lists of tensors, of ONE client or stacked over clients.

An optimizer's state is tensors beside each tensor that is trained, with a prefix of their own: SGD
keeps a velocity under "opt.", Adam its moments under "opt.m." and "opt.v." and a count of steps
under "opt.t.".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from pfl_core.stacked import Params
from pfl_core.util import checks
from pfl_core.util.fields import Search, log_uniform, number
from pfl_core.util.fields import check as check_fields

Moments = dict[str, list[Tensor]]  # an optimizer's state: {prefix: a tensor for each trained one}
# A number, or one for each trained tensor, or a tensor of it for each.
Rates = float | list[Any]
PREFIXES = ("opt.", "opt.m.", "opt.v.", "opt.t.")
COUNT = "opt.t."  # counts steps, of each client


class Settings(Protocol):
    """What of an Experiment's settings is read here."""

    @property
    def optimizer(self) -> str: ...
    @property
    def optimizer_args(self) -> dict[str, Any]: ...
    @property
    def momentum(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def lr(self) -> float: ...
    @property
    def lr_schedule(self) -> str: ...
    @property
    def lr_schedule_args(self) -> dict[str, Any]: ...
    @property
    def rounds(self) -> int: ...
    @property
    def server(self) -> str: ...
    @property
    def server_args(self) -> dict[str, Any]: ...


# -- optimizers of local training ------------------------------------------------------------------


@dataclass(frozen=True)
class SGD:
    """torch.optim.SGD, with the Experiment's momentum."""

    prefixes: ClassVar[tuple[str, ...]] = ("opt.",)
    search: ClassVar[Search | None] = None  # of lr, in place of the field's
    room: ClassVar[int] = 0  # copies of what is trained that a step takes beyond SGD's

    def kept(self, s: Settings) -> tuple[str, ...]:
        """Prefixes of the state that steps read and write."""
        return self.prefixes if s.momentum else ()

    def step(
        self, s: Settings, params: list[Tensor], grads: list[Tensor], moments: Moments, rates: Rates
    ) -> None:
        """One step in place."""
        if s.weight_decay:
            grads = [*torch._foreach_add(grads, params, alpha=s.weight_decay)]
        if s.momentum:
            velocity = moments["opt."]
            torch._foreach_mul_(velocity, s.momentum)
            torch._foreach_add_(velocity, grads)
            grads = velocity
        _descend(params, grads, rates)


@dataclass(frozen=True)
class Adam:
    """torch.optim.Adam: weight decay is added to the gradient."""

    prefixes: ClassVar[tuple[str, ...]] = ("opt.m.", "opt.v.", COUNT)
    search: ClassVar[Search | None] = log_uniform(1e-4, 0.01)
    room: ClassVar[int] = 4
    beta1: float = number(0.9, "Decay of the mean of gradients", low=0, below=1)
    beta2: float = number(0.999, "Decay of the mean of their squares", low=0, below=1)
    eps: float = number(1e-8, "What is added to the root of that mean", above=0)

    def kept(self, s: Settings) -> tuple[str, ...]:
        """Prefixes of the state that steps read and write."""
        return self.prefixes

    def decayed(
        self, s: Settings, params: list[Tensor], grads: list[Tensor], rates: Rates
    ) -> list[Tensor]:
        """The gradients that the moments are made of, after weight decay."""
        return [*torch._foreach_add(grads, params, alpha=s.weight_decay)]

    def step(
        self, s: Settings, params: list[Tensor], grads: list[Tensor], moments: Moments, rates: Rates
    ) -> None:
        """One step in place."""
        if s.weight_decay:
            grads = self.decayed(s, params, grads, rates)
        first, second, count = (moments[prefix] for prefix in self.prefixes)
        torch._foreach_add_(count, 1)
        torch._foreach_lerp_(first, grads, 1 - self.beta1)
        torch._foreach_mul_(second, self.beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - self.beta2)
        root = torch._foreach_sqrt(second)
        torch._foreach_div_(root, _like(params, [(1 - self.beta2**t).sqrt() for t in count]))
        torch._foreach_add_(root, self.eps)
        moves = torch._foreach_div(first, root)
        torch._foreach_div_(moves, _like(params, [1 - self.beta1**t for t in count]))
        _descend(params, [*moves], rates)


@dataclass(frozen=True)
class AdamW(Adam):
    """torch.optim.AdamW: weight decay shrinks the parameters themselves."""

    def decayed(
        self, s: Settings, params: list[Tensor], grads: list[Tensor], rates: Rates
    ) -> list[Tensor]:
        """Shrink the parameters in place; the gradients stay."""
        if isinstance(rates, list):
            torch._foreach_mul_(params, [1 - r * s.weight_decay for r in rates])
        else:
            torch._foreach_mul_(params, 1 - rates * s.weight_decay)
        return grads


def _like(params: list[Tensor], counted: list[Tensor]) -> list[Tensor]:
    # Counts are in float64, in which 1 - 0.999 is exact enough.
    return [c.to(p.dtype) for p, c in zip(params, counted, strict=True)]


def _descend(params: list[Tensor], moves: list[Tensor], rates: Rates) -> None:
    if isinstance(rates, list):
        torch._foreach_add_(params, torch._foreach_mul(moves, [-r for r in rates]))
    else:
        torch._foreach_add_(params, moves, alpha=-rates)


def shortest(rates: list) -> Rates:
    """The rates as steps take them: one number where all are the same one."""
    alike = not any(isinstance(r, Tensor) for r in rates) and len(set(rates)) == 1
    return rates[0] if alike else rates


OPTIMIZERS: dict[str, type[SGD | Adam]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


def optimizer(s: Settings) -> SGD | Adam:
    """The optimizer of local training."""
    return OPTIMIZERS[s.optimizer](**s.optimizer_args)


def moment(prefix: str, v: Tensor, stacked: bool) -> Tensor:
    """The state under a prefix before the first step, of a tensor (*shape), or (S, *shape)."""
    if prefix != COUNT:
        return torch.zeros_like(v)
    shape = [len(v) if stacked and i == 0 else 1 for i in range(v.dim())]
    return v.new_zeros(shape, dtype=torch.float64)


def at_rest(s: Settings, p: Params) -> Params:
    """The optimizer's state before the first step of p {name: (S, *shape)}, by name.

    For who keeps it: what local training starts from with it, ends with it.
    """
    prefixes = optimizer(s).prefixes
    return {f"{prefix}{n}": moment(prefix, v, True) for prefix in prefixes for n, v in p.items()}


# -- optimizers of the server ----------------------------------------------------------------------


@dataclass(frozen=True)
class Plain:
    """What the method's `upload` makes is the server's next model."""

    prefixes: ClassVar[tuple[str, ...]] = ()

    def step(self, old: Params, change: Params, moments: Params) -> Params:
        """The server's next {name: (*shape)}, from a round's change of it; writes into moments."""
        return {n: v + change[n] for n, v in old.items()}


@dataclass(frozen=True)
class ServerMomentum(Plain):
    """FedAvgM: a velocity of the rounds' changes (Hsu, Qi and Brown, arXiv:1909.06335)."""

    prefixes: ClassVar[tuple[str, ...]] = ("m.",)
    lr: float = number(1.0, "Rate of the server", above=0, search=log_uniform(0.1, 1))
    momentum: float = number(0.9, "Share of the velocity that is left", low=0, below=1)

    def step(self, old: Params, change: Params, moments: Params) -> Params:
        """The next parameters, along the velocity; shapes as `Plain.step` has them."""
        velocity = {n: moments[f"m.{n}"].mul_(self.momentum).add_(v) for n, v in change.items()}
        return {n: torch.add(v, velocity[n], alpha=self.lr) for n, v in old.items()}


@dataclass(frozen=True)
class ServerAdam(Plain):
    """FedAdam: Algorithm 2 of Reddi et al., "Adaptive Federated Optimization", ICLR 2021.

    As there, without a correction of the bias, and v begins at tau^2.
    """

    prefixes: ClassVar[tuple[str, ...]] = ("m.", "v.")
    lr: float = number(0.01, "Rate of the server", above=0, search=log_uniform(0.001, 0.1))
    beta1: float = number(0.9, "Decay of the mean of changes", low=0, below=1)
    beta2: float = number(0.99, "Decay of the mean of their squares", low=0, below=1)
    tau: float = number(
        1e-3, "What is added to the root of that mean", above=0, search=log_uniform(1e-5, 0.1)
    )

    def step(self, old: Params, change: Params, moments: Params) -> Params:
        """The next parameters, along the moments; shapes as `Plain.step` has them."""
        out = {}
        for n, d in change.items():
            first, second = (moments[f"{prefix}{n}"] for prefix in self.prefixes)
            first.lerp_(d, 1 - self.beta1)
            second.mul_(self.beta2).addcmul_(d, d, value=1 - self.beta2)
            out[n] = old[n] + self.lr * first / (second.sqrt() + self.tau)
        return out


SERVERS: dict[str, type[Plain]] = {"plain": Plain, "momentum": ServerMomentum, "adam": ServerAdam}


def server(s: Settings) -> Plain:
    """The server's optimizer."""
    return SERVERS[s.server](**s.server_args)


def server_at_rest(s: Settings, p: Params) -> Params:
    """The state of the server's optimizer before the first round, for p {name: (*shape)}."""
    made = server(s)
    first = {"v.": made.tau**2} if isinstance(made, ServerAdam) else {}
    return {
        prefix + n: torch.full_like(v, first.get(prefix, 0.0))
        for prefix in made.prefixes
        for n, v in p.items()
    }


# -- schedules of the learning rate over rounds ----------------------------------------------------


@dataclass(frozen=True)
class Constant:
    """The same rate in all rounds."""

    by_rounds: ClassVar[bool] = False  # whether it depends on how many rounds there are

    def factor(self, round: int, rounds: int) -> float:
        """What the rate of a round (from 0) is multiplied with."""
        return 1.0


@dataclass(frozen=True)
class Cosine(Constant):
    """From the whole rate down to `floor` of it, along half a cosine."""

    by_rounds: ClassVar[bool] = True
    floor: float = number(0.0, "Share of the rate that is left in the end", low=0, high=1)

    def factor(self, round: int, rounds: int) -> float:
        # The evaluation after the last round trains as that round did, not at the floor.
        at = max(0, min(round, rounds - 1)) / max(rounds, 1)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * at)) / 2


@dataclass(frozen=True)
class Steps(Constant):
    """Times `gamma` after every so many rounds."""

    every: int = number(10, "How many rounds have the same rate", low=1)
    gamma: float = number(0.1, "What the rate is then multiplied with", above=0, high=1)

    def factor(self, round: int, rounds: int) -> float:
        return self.gamma ** (round // self.every)


@dataclass(frozen=True)
class Exponential(Constant):
    """Times `gamma` after every round."""

    gamma: float = number(0.99, "What the rate is then multiplied with", above=0, high=1)

    def factor(self, round: int, rounds: int) -> float:
        return self.gamma**round


SCHEDULES: dict[str, type[Constant]] = {
    "constant": Constant,
    "cosine": Cosine,
    "step": Steps,
    "exponential": Exponential,
}


def schedule(s: Settings) -> Constant:
    """The schedule of the learning rate."""
    return SCHEDULES[s.lr_schedule](**s.lr_schedule_args)


def rate(s: Settings, round: int) -> float:
    """The learning rate of local training in a round, from 0."""
    return s.lr if s.lr_schedule == "constant" else s.lr * schedule(s).factor(round, s.rounds)


# -- what an Experiment may say --------------------------------------------------------------------

# By field: what its names stand for.
KINDS: dict[str, dict[str, type]] = {
    "optimizer": {**OPTIMIZERS},
    "lr_schedule": {**SCHEDULES},
    "server": {**SERVERS},
}


def arguments(field: str, name: str) -> list[str]:
    """Names of the arguments of what `name` stands for in a field."""
    return [f.name for f in fields(KINDS[field][name])] if name in KINDS[field] else []


def check(field: str, name: str, args: dict[str, Any]) -> None:
    """Raise ValueError unless these are arguments of what `name` stands for in a field."""
    for key in args:
        checks.known(f"argument of {field} {name!r}:", key, arguments(field, name))
    check_fields(f"{field} {name}", KINDS[field][name](**args))
