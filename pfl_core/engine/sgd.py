"""One phase of local training: what it trains on, its number formats, and its update."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pfl_core import optim
from pfl_core.methods.base import Method
from pfl_core.methods.task import TrainConfig
from pfl_core.optim import Moments
from pfl_core.stacked import Params

PRECISIONS = ("full", "tf32", "bf16")
Update = Callable[[list[Tensor], list[Tensor | None], Moments], None]
# Called, it begins a client's noise anew: a function that draws the next (*shape, *noise).
Noise = Callable[[], Callable[[tuple[int, ...]], Tensor]]


class Job(NamedTuple):
    """One phase of local training: what every client starts from, what it trains on and how.

    `start` and `anchor` are {name: (S, *shape)}; lists have an entry for each of the S clients.
    """

    loss: Callable
    start: Params
    anchor: Params
    names: list[str]  # what is trained
    indices: list[Tensor]  # of samples in the pool, (T_k, batches, B) int64
    noise: list[Noise | None]
    step: Callable | None  # in place of the optimizer's
    lr: float | dict[str, float]
    training: bool  # BatchNorm's mode
    seeds: list[int] = []  # for random draws of code that is not ours
    clipped: frozenset[str] | None = None  # names whose gradients are clipped; None: all trained
    varies: bool = False  # whether lr is another one in other rounds

    @property
    def rates(self) -> list[float]:
        """The learning rate of each trained name."""
        return [self.lr[n] if isinstance(self.lr, dict) else self.lr for n in self.names]

    def changing(self, buffers: Iterable[str]) -> list[str]:
        """Names of `start` that local training writes.

        They are the trained parameters, their optimiser state and, in training mode, `buffers`.
        """
        names = {*self.names, *(p + n for p in optim.PREFIXES for n in self.names)}
        if self.training:
            names.update(buffers)
        return [n for n in self.start if n in names]

    @property
    def order(self) -> list[int]:
        """Clients by their number of steps, longest first."""
        return sorted(range(len(self.indices)), key=lambda i: -len(self.indices[i]))


@contextmanager
def precision(kind: str) -> Iterator[None]:
    """Within it, float32 is multiplied in TF32 on a GPU if `kind` is "tf32", else in full.

    Torch by itself would let convolutions use TF32. cuDNN takes algorithms that give the same
    numbers each time, by no measurement. What was set before is set again afterwards.
    """
    cudnn: Any = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    new = hasattr(torch.backends, "fp32_precision")  # torch 2.9
    with (_multiplied if new else _multiplied_before)(kind == "tf32"):
        try:
            cudnn.deterministic, cudnn.benchmark = True, False
            yield
        finally:
            cudnn.deterministic, cudnn.benchmark = before


@contextmanager
def _multiplied_before(tf32: bool) -> Iterator[None]:
    # With torch's older flags, the only ones until 2.9.
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn


@contextmanager
def _multiplied(tf32: bool) -> Iterator[None]:
    # Torch refuses to read older flags that differ from the new ones, also in its own kernels: both
    # are set. A new one that is "none" shows what stands above it: those above come first.
    backends: Any = torch.backends
    above = [backends, backends.cudnn]
    gpu = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    cpu = [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]
    before = []
    for flag in [*above, *gpu, *cpu]:
        before.append(flag.fp32_precision)
        flag.fp32_precision = "none" if flag in above else "ieee"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the older flags will go
        # Where all new ones say "ieee", the older ones of matrix products can be read.
        matmul = torch.get_float32_matmul_precision()
        try:
            cudnn = torch.backends.cudnn.allow_tf32
        except RuntimeError:  # it differs from "ieee"
            cudnn = True

        def older(matmul: str, cudnn: bool) -> None:
            torch.set_float32_matmul_precision(matmul)
            torch.backends.cudnn.allow_tf32 = cudnn

        older("high" if tf32 else "highest", tf32)
    for flag in [*gpu, *cpu]:
        flag.fp32_precision = "tf32" if tf32 and flag in gpu else "ieee"
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            older(matmul, cudnn)
        for flag, value in zip([*above, *gpu, *cpu], before, strict=True):
            flag.fp32_precision = value


def cast(config: TrainConfig, device: torch.device) -> AbstractContextManager:
    """The context in which a loss is computed: with precision "bf16", products are in bfloat16.

    Parameters and updates stay float32.
    """
    if config.precision != "bf16":
        return nullcontext()
    # No cache: a captured step must not keep casts.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def clip_(grads: list[Tensor], limit: float, stacked: bool) -> None:
    """Scale gradients in place to L2 norm <= limit, over all tensors together.

    If `stacked`, the tensors are (S, *shape), and each client has a norm of its own.
    """
    if not stacked:
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1))
        return
    # One tensor of all, and back: a GPU would take three launches for each of them otherwise.
    parts = [g.reshape(len(g), -1) for g in grads]
    every = torch.cat(parts, 1)
    every *= (limit / (torch.linalg.vector_norm(every, dim=1, keepdim=True) + 1e-6)).clamp(max=1)
    sizes = [part.shape[1] for part in parts]
    torch.split_with_sizes_copy(every, sizes, 1, out=parts)
    for g, part in zip(grads, parts, strict=True):
        if g.data_ptr() != part.data_ptr():  # not contiguous
            g.copy_(part.view_as(g))


def update(method: Method, job: Job, stacked: bool, rates: list | None = None) -> Update:
    """update(params, grads, moments): one step of the experiment's optimizer, in place.

    The lists have an entry for each trained name. What has no gradient (None) stays as it is, as in
    torch.optim: neither decay nor momentum moves it. `rates` are tensors in place of the job's.
    """
    counts = job.names if job.clipped is None else job.clipped
    clipped = [n in counts for n in job.names]
    return _update(method.task.config, rates or job.rates, clipped, stacked)


def _update(config: TrainConfig, rates: list, counts: list[bool], stacked: bool) -> Update:
    # counts: whose gradients are clipped.
    optimizer, shortest = optim.optimizer(config), optim.shortest(rates)
    clipped = [i for i, count in enumerate(counts) if config.clip and count]

    def update(params: list[Tensor], found: list[Tensor | None], moments: Moments) -> None:
        grads = [g for g in found if g is not None]
        if len(grads) < len(found):
            there = [i for i, g in enumerate(found) if g is not None]
            some = lambda v: [v[i] for i in there]  # noqa: E731
            part = _update(config, some(rates), some(counts), stacked)
            return part(some(params), [*grads], {p: some(v) for p, v in moments.items()})
        if clipped:
            clip_([grads[i] for i in clipped], config.clip, stacked)
        optimizer.step(config, params, grads, moments, shortest)

    return update
