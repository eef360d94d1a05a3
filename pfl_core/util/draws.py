"""Random numbers of our own: numpy's by purpose, torch's in one thread alone.

Torch's global generator is neither read nor written; `unmoved` looks whether other code does so.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode


def rng(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """A generator that is a function of (seed, purpose, ids) alone.

    So no draw depends on how often another purpose, round or client drew before.
    """
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), *ids])


_seed: ContextVar[int] = ContextVar("seed", default=0)


class Draws(TorchDispatchMode):
    """Within it, what torch draws at random in this thread is a function of `seed`.

    `count` says how often it drew. On a CPU the numbers are those of torch.manual_seed(seed).

    Raises
    ------
    ValueError
        For an operation that takes no generator.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's default imports its compiler at the first draw, which takes seconds

    def __init__(self, seed: int):
        super().__init__()
        self.seed, self.count = seed % 2**63, 0
        self._generators: dict[torch.device, torch.Generator] = {}

    def generator(self, device: torch.device) -> torch.Generator:
        """The generator of a kind of device, made when it is first asked for."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`; where it draws, with our generator."""
        kwargs = kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in func.tags and _dropped(func, args, kwargs) != 0
        if draws and _generator(func, args, kwargs) is None:
            self.count += 1
            device = next(
                (a.device for a in args if isinstance(a, torch.Tensor)), kwargs.get("device")
            )
            own = self.generator(torch.device(device or "cpu"))
            if func is torch.ops.aten.native_dropout.default:  # a GPU's, which takes no generator
                return _dropout(args[0], args[1], args[2], own)
            func = _with_generator(func)
            args = args[: _place(func)] if len(args) > _place(func) else args  # it was None
            kwargs = kwargs | {"generator": own}
        return func(*args, **kwargs)


def _place(func: Any) -> int:
    # Where an operation takes its generator; behind all arguments, if it takes none.
    names = [a.name for a in func._schema.arguments]
    return names.index("generator") if "generator" in names else len(names)


def _generator(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    # The generator that an operation is called with.
    place = _place(func)
    return args[place] if place < len(args) else kwargs.get("generator")


def _with_generator(func: Any) -> Any:
    # The operation, or its form of the same arguments and a generator.
    if _place(func) < len(func._schema.arguments):
        return func
    form = {"default": "generator"}.get(func._overloadname, f"{func._overloadname}_generator")
    if not hasattr(func.overloadpacket, form):
        raise ValueError(
            f"{func} draws random numbers that cannot be seeded for one run alone; use "
            "torch.rand, torch.randn, torch.bernoulli or nn.Dropout, or a method's "
            "Batch.noise"
        )
    return getattr(func.overloadpacket, form)


def _dropped(func: Any, args: tuple, kwargs: dict[str, Any]) -> float | None:
    # The share that an attention or a recurrent layer drops, None where that is not asked.
    for i, a in enumerate(func._schema.arguments):
        if a.name in ("dropout_p", "dropout"):
            return args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
    return None


def _dropout(x: torch.Tensor, p: float, train: bool | None, generator: torch.Generator) -> tuple:
    if not train or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x).bernoulli_(1 - p, generator=generator)
    return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask.bool()


@contextmanager
def seeded(seed: int) -> Iterator[Draws]:
    """Within it, modules made on the CPU have weights that are a function of `seed`.

    `current_seed()` gives that seed.
    """
    token = _seed.set(seed)
    try:
        with torch.device("cpu"), Draws(seed) as draws:
            yield draws
    finally:
        _seed.reset(token)


def current_seed() -> int:
    """The seed of the innermost `seeded`, 0 outside."""
    return _seed.get()


INSTEAD = (
    "draw with torch.rand, torch.randn or dropout in a model, loss or hook (they are seeded for "
    "each client), use Batch.noise, or in init `with self.task.seeded(...)`, and leave "
    "torch.manual_seed out"
)


def _states() -> dict[str, object]:
    # Of the generators that all threads share.
    _, keys, *place = np.random.get_state()
    found = {
        "numpy's (np.random)": (np.asarray(keys).tobytes(), *place),
        "Python's (random)": random.getstate(),
        "torch's": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_initialized():
        found["torch's of the GPU"] = torch.cuda.get_rng_state().numpy().tobytes()
    return found


@contextmanager
def unmoved(where: str, instead: str = INSTEAD) -> Iterator[None]:
    """Watch the global generators, and raise afterwards if one has moved.

    All threads share these generators, so what is drawn from them differs from run to run.

    Raises
    ------
    ValueError
        If one has moved; `where` begins the message, which says what to do `instead`.
    """
    before = _states()
    yield
    moved = [name for name, state in _states().items() if before.get(name, state) != state]
    if moved:
        raise ValueError(
            f"{where}: code of yours moved {' and '.join(moved)} global generator of random "
            f"numbers, which differs from run to run; {instead}; nothing is stored"
        )
