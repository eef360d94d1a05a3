"""Evaluation of very many small clients: models are stacked, so that no client costs a call."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pfl_core.data.client_data import ClientData
from pfl_core.engine.scoring import judged
from pfl_core.engine.stack import over_clients
from pfl_core.engine.threads import Threads
from pfl_core.methods.base import Method
from pfl_core.stacked import Params, take

MANY, SMALL = 1000, 64  # from so many clients on, of at most so many samples on average
AT_ONCE = 2048  # samples of a stack: what a CPU's caches hold of small images


def applies(n: np.ndarray) -> bool:
    """Whether clients with n (S,) samples each are many and small."""
    return len(n) >= MANY and n.mean() <= SMALL


def evaluate(
    method: Method,
    data: ClientData,
    threads: Threads,
    p: Params,
    index: list[np.ndarray],
    at_once: int = AT_ONCE,
    scores: bool = False,
) -> np.ndarray:
    """Of each sample, client after client: is the answer right (0 or 1), and its loss; (2, N).

    Parameters
    ----------
    p : {name: (S, *shape)}
        The clients' models.
    index
        Each client's samples in the pool.
    at_once
        Samples of a stack.
    scores
        Whether its class scores follow: (2 + C, N).

    Raises
    ------
    RuntimeError
        If `method.logits` cannot be stacked.
    """
    n = np.array([len(i) for i in index])
    pool = torch.as_tensor(np.concatenate(index), device=data.device)
    first = n.cumsum() - n
    # Clients of one size come together. A smaller one repeats its last sample.
    order = np.argsort(n, kind="stable")[(n == 0).sum() :]
    stacks, at = [], 0
    while at < len(order):
        end = at + max(1, at_once // n[order[at]])
        end = at + max(1, at_once // n[order[min(end, len(order)) - 1]])
        stacks.append(order[at:end])
        at = end

    def one(rows: np.ndarray) -> tuple[np.ndarray, Tensor]:
        column = np.arange(n[rows].max())
        where = first[rows][:, None] + np.minimum(column, n[rows][:, None] - 1)
        x, y = data.batch(pool[torch.as_tensor(where, device=data.device)])
        mine = _rows(p, rows)
        with torch.no_grad(), method.task.mode(False):
            given = over_clients(method.logits, (mine, x)).flatten(0, 1)
            found = judged(given, y.flatten(), scores)
        there = column < n[rows][:, None]
        return where[there], found[:, torch.as_tensor(there, device=data.device).flatten()]

    parts = threads.map(one, stacks)
    # One transfer for all.
    found = torch.cat([found for _, found in parts], 1).double().cpu().numpy()
    out = np.zeros_like(found)
    out[:, np.concatenate([where for where, _ in parts])] = found
    return out


def _rows(p: Params, rows: np.ndarray) -> Params:
    # Neighbours are looked at; other rows are copied.
    if (np.diff(rows) == 1).all():
        return {name: v[rows[0] : rows[-1] + 1] for name, v in p.items()}
    return take(p, torch.as_tensor(rows, device=next(iter(p.values())).device))
