"""One phase of local SGD: what it starts from and trains on, the number formats it computes in, and the update of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from pfl_core.methods.base import Method
from pfl_core.methods.task import TrainConfig
from pfl_core.stacked import Params

PRECISIONS = ("full", "tf32", "bf16")
Update = Callable[[list[Tensor], list[Tensor], list[Tensor]], None]


class Job(NamedTuple):
    """One phase of local training: what every client starts from, what it trains on and how."""

    loss: Callable
    start: Params
    anchor: Params
    names: list[str]  # trained
    plans: list[Tensor]  # pool indices (T_k, batches, B) of each client
    noise: list[
        Callable[[], Callable[[tuple[int, ...]], Tensor]] | None
    ]  # called anew, it draws the same again
    step: Callable | None
    lr: float | dict[str, float]
    training: bool
    seeds: list[int] = []  # of what foreign code draws, one a client

    @property
    def rates(self) -> list[float]:
        """The learning rate of each trained name."""
        return [self.lr[n] if isinstance(self.lr, dict) else self.lr for n in self.names]

    def changing(self, buffers: Iterable[str]) -> list[str]:
        """Names of start that local SGD writes: trained parameters, optimiser state and, in training mode, the model's `buffers`."""
        names = {
            *self.names,
            *(f"opt.{n}" for n in self.names),
            *(buffers if self.training else ()),
        }
        return [n for n in self.start if n in names]

    @property
    def order(self) -> list[int]:
        """Clients by their number of steps, longest first."""
        return sorted(range(len(self.plans)), key=lambda i: -len(self.plans[i]))


@contextmanager
def precision(kind: str) -> Iterator[None]:
    """Within it, a GPU multiplies float32 matrices as `kind` says: "tf32" in TF32, else in full (torch lets convolutions use TF32)."""
    flags = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [f.allow_tf32 for f in flags]
    try:
        for f in flags:
            f.allow_tf32 = kind == "tf32"
        yield
    finally:
        for f, v in zip(flags, before, strict=True):
            f.allow_tf32 = v


def cast(config: TrainConfig, device: torch.device) -> AbstractContextManager:
    """The context of a training loss: with precision "bf16" its products are taken in bfloat16; parameters and updates stay float32."""
    if config.precision != "bf16":
        return nullcontext()
    return torch.autocast(
        device.type, torch.bfloat16, cache_enabled=False
    )  # a captured step must not keep casts


def clip_(grads: list[Tensor], limit: float, stacked: bool) -> None:
    """Scale gradients in place to L2 norm <= limit, over all tensors together and for each client of a stack alone."""
    square = sum(g.square().flatten(1).sum(1) if stacked else g.square().sum() for g in grads)
    scale = (limit / (square.sqrt() + 1e-6)).clamp(max=1)
    if stacked:
        torch._foreach_mul_(grads, [scale.view(-1, *[1] * (g.dim() - 1)) for g in grads])
    else:
        torch._foreach_mul_(grads, scale)


def sgd(method: Method, job: Job, stacked: bool) -> Update:
    """update(params, grads, velocity): one step in place, as torch.optim.SGD counts it; velocity is empty without momentum."""
    config, rates = method.task.config, job.rates
    uniform = rates[0] if len(set(rates)) == 1 else None
    clipped = [i for i, n in enumerate(job.names) if method.is_clipped(n)] if config.clip else []

    def update(params: list[Tensor], grads: list[Tensor], velocity: list[Tensor]) -> None:
        if clipped:
            clip_([grads[i] for i in clipped], config.clip, stacked)
        if config.weight_decay:
            grads = torch._foreach_add(grads, params, alpha=config.weight_decay)
        if config.momentum:
            torch._foreach_mul_(velocity, config.momentum)
            torch._foreach_add_(velocity, grads)
            grads = velocity
        if uniform is None:
            torch._foreach_add_(params, torch._foreach_mul(grads, [-r for r in rates]))
        else:
            torch._foreach_add_(params, grads, alpha=-uniform)

    return update
