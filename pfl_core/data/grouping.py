"""Samples that belong to somebody: each client's, divided into train, val and test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pfl_core.data import names
from pfl_core.data.dealing import Shares, cut_sizes, fewest, integer, need, read_shares
from pfl_core.data.files import SPLITS
from pfl_core.util import checks
from pfl_core.util.draws import rng

SMALL = ("refuse", "drop", "train")
Lists = dict[str, list[np.ndarray]]


def divided(
    who: np.ndarray, clients: Sequence[str], split: Any, seed: int, small: str
) -> tuple[Lists, tuple[str, ...]]:
    """Index lists of clients that hold the samples who == k, and the clients' names.

    Parameters
    ----------
    who : (n,) int64
        Whose each sample is, 0 to len(clients) - 1.
    split : str or (n,) texts
        Shares in percent, or "train", "val" or "test" for each sample.
    seed : int
        Draws the shares; a client's depend on its place among all, and on nobody else's samples.
    small : {"refuse", "drop", "train"}
        What happens where a client has too few samples.

    Raises
    ------
    ValueError
    """
    checks.known("small", small, SMALL)
    seed, sizes = integer("seed", seed, 0), np.bincount(who, minlength=len(clients))
    mine = np.split(np.argsort(who, kind="stable"), np.cumsum(sizes)[:-1])
    shares = read_shares(split) if isinstance(split, str) else None
    if shares is None:
        part = _parts(split, len(who))
        cut = [[one[part[one] == s] for s in range(len(SPLITS))] for one in mine]
        few = [k for k, one in enumerate(cut) if not len(one[0])]
    else:
        least = fewest(shares)
        few = [k for k, n in enumerate(sizes) if n < least]
        cut = [_cut(one, k, shares, seed, least) for k, one in enumerate(mine)]
    if small == "train" and shares is not None:
        few = [k for k in few if not sizes[k]]
    if small != "drop":
        _check_few(few, clients, sizes, split)
    gone = set(few) if small == "drop" else set()
    kept = [k for k in range(len(clients)) if k not in gone]
    need(bool(kept), f"no client has enough samples for split={_said(split)}; give more")
    lists = {s: [cut[k][i] for k in kept] for i, s in enumerate(SPLITS)}
    return lists, tuple(clients[k] for k in kept)


def _cut(mine: np.ndarray, k: int, shares: Shares, seed: int, least: int) -> list[np.ndarray]:
    # Train, val and test of client k; of one with too few samples all are train.
    train, val, _ = cut_sizes(len(mine), shares) if len(mine) >= least else (len(mine), 0, 0)
    order = rng(seed, "grouped", k).permutation(mine)
    return [np.sort(part) for part in np.split(order, [train, train + val])]


def _parts(split: Any, n: int) -> np.ndarray:
    # The part of each sample, as a place in SPLITS.
    part, _ = names.numbered("split", split, SPLITS)
    need(len(part) == n, f"split has {len(part)} values for {n} samples; give one for each")
    return part


def _check_few(few: list[int], clients: Sequence[str], sizes: np.ndarray, split: Any) -> None:
    if not few:
        return
    held = names.some(f"{clients[k]!r} ({sizes[k]})" for k in few)
    if not isinstance(split, str):
        raise ValueError(
            f"clients without training samples (of so many): {held}; give each some, or leave "
            "them out with small='drop'"
        )
    raise ValueError(
        f"clients with fewer than the {fewest(read_shares(split))} samples that split={split!r} "
        f"needs: {held}; leave them out with small='drop', let them train on all that they have "
        "with small='train', or take another split"
    )


def _said(split: Any) -> str:
    return repr(split) if isinstance(split, str) else "[...]"
