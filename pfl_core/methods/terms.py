"""Mathematics that is no method's own: terms of a loss, and problems that methods solve."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pfl_core.stacked import Params, total


def hot(y: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Labels (B,) as (B, C) of ones and zeros, in any executor."""
    return (y[:, None] == torch.arange(classes, device=y.device)).to(dtype)


def class_sums(z: Tensor, y: Tensor, classes: int) -> dict[str, Tensor]:
    """Of ONE client's features z (B, F): "z", their sums by class (C, F), and counts "n" (C,)."""
    known = hot(y, classes, z.dtype)
    return {"z": known.T @ z, "n": known.sum(0)}


def class_means(sums: dict[str, Tensor]) -> Tensor:
    """Mean features (..., C, F) by class, 0 where there is none, from `class_sums` of samples."""
    return sums["z"] / sums["n"].clamp_min(1)[..., None]


def half_square(p: Params, q: Params, names: Iterable[str]) -> Tensor:
    """||p - q||^2 / 2 over `names` of ONE client, a scalar.

    Its gradient at p is p - q, also where both are equal.
    """
    return total((p[n] - q[n]).square().sum() for n in names) / 2


def mmd(x: Tensor, y: Tensor, widths: Sequence[float] = (10.0, 15.0, 20.0, 50.0)) -> Tensor:
    """Squared maximum mean discrepancy of x and y (B, F), a scalar >= 0.

    The kernel is sum_w exp(-d^2 / 2w) over `widths` w.
    """
    both = torch.cat([x, y])
    square = both.square().sum(1)
    distance = (square[:, None] + square - 2 * both @ both.T).clamp_min(0)
    sign = torch.cat([x.new_ones(len(x)), -y.new_ones(len(y))]) / len(x)
    return sign @ total(torch.exp(-distance / (2 * w)) for w in widths) @ sign


def simplex_qp(q: Tensor) -> Tensor:
    """argmin of a^T q a over the probability simplex, (b, m), for each of q (b, m, m).

    q is positive semidefinite, in float64. a = x / sum(x), where x >= 0 and q x >= 1 and one of
    both is tight in every place: block principal pivoting (Portugal et al., 1994).
    """
    m, trace = q.shape[-1], q.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    q = q / trace.clamp_min(1e-30) + 1e-10 * torch.eye(m, dtype=q.dtype, device=q.device)
    free = torch.ones_like(q[:, 0], dtype=torch.bool)
    place = torch.arange(1, m + 1, device=q.device)
    for attempt in range(20 + 10 * m):
        f = free.to(q)
        x = torch.linalg.solve(q * f[:, :, None] * f[:, None] + torch.diag_embed(1 - f), f)
        slack = torch.einsum("bij,bj->bi", q, x) - 1
        wrong = torch.where(free, x < 0, slack < -1e-9 - 1e-14 * x.abs().amax(1, keepdim=True))
        if not wrong.any():
            break
        if attempt >= 20:  # all at once may cycle; the last one alone does not (Murty's rule)
            wrong &= place == (wrong * place).amax(1, keepdim=True)
        free = free ^ wrong
    x = x.clamp_min(0)
    return x / x.sum(1, keepdim=True)
