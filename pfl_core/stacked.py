"""Algebra on stacked parameters: {name: Tensor[K, *shape]}, the clients in the leading axis
(architecture: "Stacked clients").

A model that all K clients hold alike is expanded with stride 0, never copied; `put` is the one
function that writes in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

Params = dict[str, Tensor]
V = TypeVar("V")
# Numbers that products over all entries turn into float64 at once: what a cache holds; whole models
# cost page faults.
BLOCK = 2**20


def expand(p: Params, k: int) -> Params:
    """{name: (*shape)} -> {name: (k, *shape)} as a stride-0 view."""
    return {n: v.expand(k, *v.shape) for n, v in p.items()}


def take(p: Params, sel: Tensor) -> Params:
    """Rows `sel` (S,) int64 of {name: (K, *shape)} as {name: (S, *shape)}.

    A stride-0 axis stays one.
    """
    return {
        n: v[:1].expand(len(sel), *v.shape[1:]) if is_common(v) else v[sel] for n, v in p.items()
    }


def put(p: Params, sel: Tensor, q: Params) -> None:
    """Write the rows q {name: (S, *shape)} into p {name: (K, *shape)} at `sel` (S,), in place.

    Every name of q must be in p.
    """
    for n, v in q.items():
        p[n][sel] = v


def is_common(v: Tensor) -> bool:
    """Whether all rows of (K, *shape) are one and the same memory (a stride-0 client axis)."""
    return len(v) > 1 and v.stride(0) == 0


def clone(p: Params) -> Params:
    """A copy of {name: (K, *shape)} in which every client has contiguous memory of its own."""
    return {n: v.clone(memory_format=torch.contiguous_format) for n, v in p.items()}


def select(p: dict[str, V], names: Iterable[str] | Callable[[str], bool]) -> dict[str, V]:
    """The entries of p whose name is in `names`, or for which `names(name)` holds, in the order of
    p.
    """
    keep = names if callable(names) else set(names).__contains__
    return {n: v for n, v in p.items() if keep(n)}


def prefixed(prefix: str, p: Params) -> Params:
    """{name: v} -> {prefix + name: v}."""
    return {prefix + n: v for n, v in p.items()}


def unprefixed(prefix: str, p: Params) -> Params:
    """The entries of p whose name begins with `prefix`, without it."""
    return {n[len(prefix) :]: v for n, v in p.items() if n.startswith(prefix)}


def weighted_mean(p: Params, weight: Tensor) -> Params:
    """Mean over the client axis of {name: (S, *shape)} with weights (S,) >= 0, normalised here.

    Integers (counters) take the maximum.
    """
    w = weight / weight.sum()
    return {
        n: torch.tensordot(w.to(v.dtype), v, dims=1) if averages(v) else v.amax(0)
        for n, v in p.items()
    }


def averages(v: Tensor) -> bool:
    """Whether a mean of such numbers is one of them; integers and truth values have none."""
    return v.is_floating_point() or v.is_complex()


def mix(a: Tensor, p: Params) -> Params:
    """Row s of the result is sum_k a[s, k] p[k]: (S, K) x {name: (K, *shape)} -> {name: (S,
    *shape)}; integers take the maximum.
    """
    return {
        n: torch.tensordot(a.to(v.dtype), v, dims=1)
        if averages(v)
        else v.amax(0).expand(len(a), *v.shape[1:])
        for n, v in p.items()
    }


def axpy(a: float | Tensor, x: Params, y: Params) -> Params:
    """a x + y, name by name over the names of x."""
    return {n: y[n] + a * v for n, v in x.items()}


def flat(p: Params) -> Tensor:
    """{name: (K, *shape)} -> (K, D), names in their order."""
    return torch.cat([v.reshape(len(v), -1) for v in p.values()], 1)


def unflat(x: Tensor, like: Params) -> Params:
    """(S, D) -> {name: (S, *shape)} with names, order and shapes of `like` {name: (K, *shape)}."""
    sizes = [v[0].numel() for v in like.values()]
    return {
        n: c.reshape(len(x), *v.shape[1:])
        for (n, v), c in zip(like.items(), x.split(sizes, 1), strict=True)
    }


def blocks(*stacks: Params) -> Iterator[list[Tensor]]:
    """Columns of `flat` of each stack in float64, a few MB at a time: [(K, c), (S, c), ...], over
    the names of the first.
    """
    for n, v in stacks[0].items():
        size = max(1, BLOCK // len(v))
        rows = [q[n].reshape(len(q[n]), v[0].numel()) for q in stacks]
        for at in range(0, max(1, rows[0].shape[1]), size):  # a tensor without entries is a block
            yield [r[:, at : at + size].double() for r in rows]


def total(parts: Iterable[Tensor]) -> Tensor:
    """The sum of tensors, one at least."""
    return functools.reduce(torch.add, parts)


def gram(p: Params, q: Params | None = None) -> Tensor:
    """Inner products over all entries, in float64: (K, K), or (K, S) with q."""
    return total(b[0] @ b[-1].T for b in (blocks(p) if q is None else blocks(p, q)))


def inner(p: Params, q: Params) -> Tensor:
    """Inner product of each client's entries in p with its own in q, in float64: (K,)."""
    return total((a * b).sum(1) for a, b in blocks(p, q))


def cosine(p: Params) -> Tensor:
    """Cosine similarity of the clients' parameter vectors, (K, K) float64.

    A zero vector has cosine 0 with all.
    """
    g = gram(p)
    # No epsilon is added: small updates keep their angles.
    norm = g.diagonal().sqrt().clamp_min(torch.finfo(g.dtype).tiny)
    return g / norm / norm[:, None]


def distances(p: Params) -> Tensor:
    """Squared Euclidean distances between clients, (K, K) float64, to within 1e-12 of the largest
    squared distance from their mean.
    """
    g = total((x := b - b.mean(0)) @ x.T for (b,) in blocks(p))
    d = g.diagonal()
    return (d + d[:, None] - (g + g.T)).clamp_min(
        0
    )  # symmetric to the last digit, whatever the product's order


def scalars(p: Params) -> int:
    """Number of scalars that one client holds in {name: (K, *shape)}."""
    return sum(v[0].numel() for v in p.values())
