"""What schemes are made of: checks of their arguments, and ways to deal samples out.

N clients, C classes. `by_class` is a list of C index arrays; `want` (N, C) says how many samples of
each class each client gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite
from typing import Any

import numpy as np

from pfl_core.util.fields import Range, said

Rng = np.random.Generator
Pieces = list[list[np.ndarray]]
Shares = tuple[float, ...]
TRIES = 1000
# (draws, clients): if each of 20 draws left 30 clients or more short of samples, no later draw will
# do. Were they 30 on average, about e^-30 of all draws would leave none short.
HOPELESS = (20, 30)
MANY = 2000  # clients, from which on draws are expensive, and their averages safe
EPS = 1e-9  # keeps 0.2 * 3000 and 600 * 0.53 / 6 on the intended side of an integer


@dataclass(frozen=True, eq=False)
class Split:
    """For each client one array of indices into the pool in train, val and test, int64.

    They are in random order, and no sample is in two of them. What a client's samples are changed
    by when they are dealt (see shifts.py): `transform`, one name a client, and `relabel`, the label
    that each client gives to each class, (N, C) int, -1 for a class that it does not hold. `words`:
    texts become vectors, of which of so many words they hold.
    """

    train: list[np.ndarray]
    val: list[np.ndarray]
    test: list[np.ndarray]
    transform: list[str] | None = field(default=None, kw_only=True)
    relabel: np.ndarray | None = field(default=None, kw_only=True)
    words: int | None = field(default=None, kw_only=True)

    def of(self, clients: slice) -> Split:
        """The same of some clients."""
        return Split(
            self.train[clients],
            self.val[clients],
            self.test[clients],
            transform=None if self.transform is None else self.transform[clients],
            relabel=None if self.relabel is None else self.relabel[clients],
            words=self.words,
        )


def label_counts(y: np.ndarray, indices: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """How many samples of each class each client holds, (N, classes) int64.

    Parameters
    ----------
    y : (n,) int
        Labels.
    indices : N arrays
        Each client's indices into them.
    """
    return np.stack([np.bincount(y[i], minlength=classes) for i in indices])


# ---------------------------------------------------------------- checks


def need(ok: bool | np.bool, message: str) -> None:
    """Raise ValueError with a message unless it is ok."""
    if not ok:
        raise ValueError(message)


def integer(name: str, value: Any, low: int, high: float | None = None) -> int:
    """An integer from `low` to `high`; ValueError for another value, which says what is allowed."""
    ok = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return int(_held(ok, name, value, "int", Range(low, high)))


def real(name: str, value: Any, **ends: float) -> float:
    """A number between ends, as `fields.Range` takes them; ValueError for another value."""
    ok = isinstance(value, int | float | np.number) and isfinite(value)
    return float(_held(ok, name, value, "float", Range(**ends)))


def _held(ok: bool, name: str, value: Any, kind: str, legal: Range) -> Any:
    need(ok and value in legal, f"{name}={value!r}: allowed is {said(kind, legal)}")
    return value


def classes_each(
    k: int | None, pool: Any, few: int, many: int, low: int = 1, top: int | None = None
) -> int:
    """k classes a client: few by default, many from 100 classes on."""
    default, most = few if pool.classes < 100 else many, pool.classes if top is None else top
    need(low <= most, f"{pool.classes} classes are too few for this scheme; use data with more")
    return integer("k (classes a client)", default if k is None else k, low, most)


def check_room(clients: int, fits: Callable[[int], bool], why: str) -> None:
    """Refuse a number of clients that the pool cannot serve, naming the largest that it can."""
    if not fits(clients):
        best = next((n for n in range(clients - 1, 0, -1) if fits(n)), 0)
        legal = (
            f"the largest legal value is clients={best}"
            if best
            else "no smaller number will do: use more samples"
        )
        raise ValueError(f"clients={clients}: {why}; {legal}")


# ---------------------------------------------------------------- building blocks


def indices_by_class(
    pool: Any, mask: Any = True, part: str = "pool", empty: bool = False
) -> list[np.ndarray]:
    """Indices of each class inside the mask. A class may be without samples only if `empty`."""
    y = np.asarray(pool.y)
    need(
        len(y) > 0 and 0 <= y.min() and y.max() < pool.classes,
        f"a pool needs labels 0..{pool.classes - 1}",
    )
    where = np.flatnonzero(np.broadcast_to(mask, y.shape))
    where = where[np.argsort(y[where], kind="stable")]
    members = np.split(where, np.bincount(y[where], minlength=pool.classes).cumsum()[:-1])
    absent = [c for c, idx in enumerate(members) if not len(idx)]
    need(
        empty or not absent,
        f"classes {absent[:10]} have no samples in the {part}; this scheme needs every class",
    )
    return members


def sizes_of(by_class: list[np.ndarray]) -> np.ndarray:
    return np.array([len(idx) for idx in by_class])


def official_parts(pool: Any, val: float, rng: Rng, each: bool = False) -> Pieces:
    """The official training part without val, val, and the official test part, each by class.

    `val` is a random share of the training part; with `each`, of every class in it.
    """
    test, held = np.asarray(pool.is_test, bool), np.zeros(len(pool.y), bool)
    real("val", val, low=0, below=1)
    pieces = [np.flatnonzero(~test)]
    if each:
        pieces = indices_by_class(pool, ~test, "official training part")
    for idx in pieces:
        held[rng.permutation(idx)[: int(val * len(idx) + EPS)]] = True
    train = indices_by_class(pool, ~test & ~held, "official training part (less validation)")
    return [
        train,
        indices_by_class(pool, held, empty=True),
        indices_by_class(pool, test, "official test part"),
    ]


def deal(by_class: list[np.ndarray], want: np.ndarray, rng: Rng) -> Pieces:
    """Shuffle every class and hand out want (N, C) samples of it: one array a client and class."""
    cuts = np.cumsum(want, axis=0)
    columns = [np.split(rng.permutation(idx), cuts[:, c])[:-1] for c, idx in enumerate(by_class)]
    return [list(row) for row in zip(*columns, strict=True)]


def mixed(pieces: Pieces, rng: Rng) -> list[np.ndarray]:
    return [rng.permutation(np.concatenate(piece)) for piece in pieces]


def deal_parts(parts: Pieces, wants: list[np.ndarray], rng: Rng) -> Split:
    """Deal train, val and test separately, so that the official test part stays one."""
    dealt = zip(parts, wants, strict=True)
    return Split(*[mixed(deal(part, want, rng), rng) for part, want in dealt])


def read_shares(split: str) -> Shares:
    """'70/10/20' -> (.7, .1, .2); '70/30' -> (.7, 0, .3)."""
    fields = str(split).split("/")
    percent = [float(f) if f.replace(".", "", 1).isdigit() else np.nan for f in fields]
    percent = [percent[0], 0.0, percent[1]] if len(percent) == 2 else percent
    ok = len(percent) == 3 and abs(sum(percent) - 100) < EPS and percent[0] > 0 and percent[2] > 0
    need(
        ok,
        f"split={split!r} must be percent train/test or train/val/test of sum 100, like '70/30' "
        "or '70/10/20'",
    )
    return tuple(p / 100 for p in percent)


def cut_sizes(n: int, shares: Shares, nearest: bool = False) -> tuple[int, int, int]:
    """Numbers of train, val and test samples of n: test, then val, are rounded up.

    With `nearest` they are rounded to the nearest integer, and are at least 1.
    """

    def size(amount: float) -> int:
        return max(int(amount + 0.5 + EPS), int(amount > 0)) if nearest else ceil(amount - EPS)

    test = size(shares[2] * n)
    val = size(shares[1] / (1 - shares[2]) * (n - test))
    return n - test - val, val, test


def fewest(shares: Shares) -> int:
    """The fewest samples that leave no wanted part empty: 2 for 70/30, 3 for 70/10/20."""
    n = 1
    while any(size == 0 < share for size, share in zip(cut_sizes(n, shares), shares, strict=True)):
        n += 1
    return n


def divide(pieces: Pieces, shares: Shares, rng: Rng, each: bool = False) -> Split:
    """Divide each client's samples at random into train, val and test.

    With `each` every piece is divided by itself, so that all three have the same label shares.
    """
    if each:
        pieces = [[rng.permutation(p) for p in client] for client in pieces]
    else:
        pieces = [[samples] for samples in mixed(pieces, rng)]

    def cut(piece: np.ndarray) -> list[np.ndarray]:
        train, val, _ = cut_sizes(len(piece), shares, each)
        return [piece[:train], piece[train : train + val], piece[train + val :]]

    parts = [[cut(piece) for piece in client] for client in pieces]
    return Split(*[mixed([[p[i] for p in client] for client in parts], rng) for i in range(3)])


def level(caps: np.ndarray, slots: int, rng: Rng) -> np.ndarray:
    """Share slots out over the classes, as evenly as their caps allow; the odd ones at random."""
    counts = np.zeros_like(caps)
    while slots:
        take = rng.permutation(np.flatnonzero(counts < caps))[:slots]
        counts[take] += 1
        slots -= len(take)
    return counts


def assign(owners: np.ndarray, clients: int, rng: Rng) -> np.ndarray:
    """A random table (N, C) of 0 and 1: class c is at owners[c] <= N clients.

    Each client has sum(owners) / N different classes.
    """
    slots = rng.permutation(np.repeat(np.arange(len(owners)), owners)).reshape(clients, -1)
    held = label_counts(np.arange(len(owners)), [*slots], len(owners))
    # Swap repeats away. A swap adds none, and the client with the fewest different classes always
    # finds a partner: some client lacks its repeated class; that one has at least as many classes,
    # so one that the first client lacks.
    has = held > 0
    different, width = has.sum(1), slots.shape[1]
    while different.min() < width:
        i = np.argmin(different)
        a = rng.choice(np.flatnonzero(held[i] > 1))
        j, b = divmod(rng.choice(np.flatnonzero(has & ~has[i] & ~has[:, [a]])), len(owners))
        held[[i, j], [a, b]] -= 1
        held[[i, j], [b, a]] += 1
        has[[i, j]] = held[[i, j]] > 0
        different[[i, j]] = has[[i, j]].sum(1)
    return held


def column_of(pool: Any, name: str) -> np.ndarray:
    have = ", ".join(sorted(pool.extra)) or "none"
    need(
        name in pool.extra,
        f"needs the column extra[{name!r}], one value a sample; this pool has: {have}",
    )
    return np.asarray(pool.extra[name])
