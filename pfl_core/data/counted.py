"""Splits by numbers of samples a client, as benchmarks want them; of no paper.

Sizes and hardness stay as they are said, whatever the pool's size. Both official parts are merged,
and no sample is dealt twice. A client's train, val and test are random parts of one draw.
Arguments that these schemes have:

- `each="40/20/40"`: numbers of train/val/test samples of a client; two leave val empty.
- `spread=0`: above 0, training sizes are log-normal: as said on average, `spread` the standard
  deviation of their logarithm. val and test stay, so that all clients are measured alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pfl_core.data.dealing import (
    TRIES,
    Pieces,
    Rng,
    Split,
    assign,
    check_room,
    classes_each,
    deal,
    indices_by_class,
    integer,
    level,
    mixed,
    need,
    real,
    sizes_of,
)

Groups = int | list  # how many, or the classes of each


def class_equal(
    pool: Any, clients: int, rng: Rng, k: int | None = None, each: str = "40/20/40"
) -> Split:
    """k random classes a client (2; 10 of 100), as many samples of each.

    All clients have equally many samples, all classes about as many owners; k = C is IID with
    equal classes. The numbers of `each` must be multiples of k.
    """
    k = classes_each(k, pool, min(2, pool.classes), 10)
    numbers = _numbers(each)
    need(not (numbers % k).any(), f"each={each!r} must hold multiples of k={k}, a client's classes")
    members, q = indices_by_class(pool), numbers.sum() // k
    sizes = sizes_of(members)

    def owners(n: int) -> np.ndarray:
        return np.minimum(n, sizes // q)  # the most that each class can have

    why = f"each needs {q} samples of {k} classes, the smallest class has {sizes.min()}"
    check_room(clients, lambda n: owners(n).sum() >= n * k, why)
    held = assign(level(owners(clients), clients * k, rng), clients, rng)
    dealt = deal(members, held * q, rng)
    pieces = [[piece for piece in client if len(piece)] for client in dealt]
    return _divided(pieces, np.tile(numbers // k, (clients, 1)), rng)


def dirichlet_clients(
    pool: Any,
    clients: int,
    rng: Rng,
    alpha: float = 1.0,
    most: float = 1.0,
    each: str = "40/20/40",
    spread: float = 0.0,
) -> Split:
    """Each client's class shares by Dir(alpha), in given numbers of samples.

    A client of which one class has more than the share `most`, or for which the pool has not
    enough of a class left, is drawn again.
    """
    alpha, most = real("alpha", alpha, above=0), real("most", most, above=0, high=1)
    members, few = indices_by_class(pool), _numbers(each).sum()
    total = sizes_of(members).sum()
    check_room(clients, lambda n: n * few <= total, f"each needs {few} of {total} samples")
    numbers = _sizes(clients, each, spread, rng)
    why = f"spread={spread} draws sizes that add up to {numbers.sum()} of {total} samples"
    need(numbers.sum() <= total, f"{why}; lower it")
    left, want = sizes_of(members), np.zeros((clients, pool.classes), int)
    for i, n in enumerate(numbers.sum(1)):
        for _ in range(TRIES):
            want[i] = rng.multinomial(n, rng.dirichlet(np.full(pool.classes, alpha)))
            if want[i].max() <= most * n and (want[i] <= left).all():
                break
        else:
            raise ValueError(
                f"alpha={alpha}, most={most}: none of {TRIES} draws for client {i} of {clients} "
                f"has no class above that share and finds its {n} samples; raise alpha or most, "
                "lower clients or their samples"
            )
        left = left - want[i]
    return _divided([[idx] for idx in mixed(deal(members, want, rng), rng)], numbers, rng)


def domains(
    pool: Any,
    clients: int,
    rng: Rng,
    groups: Groups = 2,
    each: str = "40/20/40",
    spread: float = 0.0,
) -> Split:
    """Groups of clients whose classes differ and whose labels are the same: one task in domains.

    `groups` are lists of classes, [[0, 1], [5, 6]]: the j-th class of each becomes label j; or a
    number, into which the classes are cut in their order. Client i is of group i modulo their
    number, and its samples are drawn at random from those of the group.
    """
    members = indices_by_class(pool)
    table = _groups(groups, pool.classes)
    integer("clients", clients, len(table))
    sizes, few = sizes_of(members)[table].sum(1), _numbers(each).sum()
    group = np.arange(clients) % len(table)

    def fits(n: int) -> bool:
        many = np.bincount(np.arange(n) % len(table), minlength=len(table))
        return n >= len(table) and (many * few <= sizes).all()

    why = f"each needs {few} samples of its group, the smallest has {sizes.min()}"
    check_room(clients, fits, why)
    numbers = _sizes(clients, each, spread, rng)
    wanted = np.bincount(group, numbers.sum(1), len(table)).astype(int)
    why = f"spread={spread} draws {wanted.tolist()} samples a group, which have {sizes.tolist()}"
    need((wanted <= sizes).all(), f"{why}; lower it")
    left, want = sizes_of(members), np.zeros((clients, pool.classes), int)
    relabel = np.full((clients, pool.classes), -1)
    for i, n in enumerate(numbers.sum(1)):
        mine = table[group[i]]
        want[i, mine] = rng.multivariate_hypergeometric(left[mine], n, method="marginals")
        relabel[i, mine] = np.arange(len(mine))
        left = left - want[i]
    dealt = [[idx] for idx in mixed(deal(members, want, rng), rng)]
    found = _divided(dealt, numbers, rng)
    return Split(found.train, found.val, found.test, relabel=relabel)


def _groups(groups: Groups, classes: int) -> np.ndarray:
    # The classes of each group (G, C').
    if not isinstance(groups, list | tuple):
        count = integer("groups", groups, 1, classes)
        legal = [g for g in range(1, classes + 1) if classes % g == 0]
        need(count in legal, f"groups={groups} must divide {classes} classes; legal: {legal}")
        return np.arange(classes).reshape(count, -1)
    why = (
        f"groups={groups!r}: allowed is a number, or lists of equally many classes of "
        f"0..{classes - 1}, each in one of them"
    )
    need(len(groups) > 0 and all(isinstance(g, list | tuple) and len(g) for g in groups), why)
    named = [c for g in groups for c in g]
    known = all(type(c) is int and 0 <= c < classes for c in named)
    need(known and len({len(g) for g in groups}) == 1 and len(set(named)) == len(named), why)
    return np.array(groups)


def _numbers(each: str) -> np.ndarray:
    # "60/40/100" -> [60, 40, 100]; "60/100" -> [60, 0, 100].
    fields = str(each).split("/")
    numbers = [int(f) if f.isdecimal() and len(f) < 8 else -1 for f in fields]
    numbers = [numbers[0], 0, numbers[1]] if len(numbers) == 2 else numbers
    ok = len(numbers) == 3 and min(numbers[0], numbers[-1]) > 0 and min(numbers) >= 0
    why = "must be numbers of train/test or train/val/test samples, like '60/100' or '60/40/100'"
    need(ok, f"each={each!r} {why}")
    return np.array(numbers)


def _sizes(clients: int, each: str, spread: float, rng: Rng) -> np.ndarray:
    # Samples of each client in train, val and test (N, 3).
    numbers = _numbers(each)
    real("spread", spread, low=0, high=3)
    out = np.tile(numbers, (clients, 1))
    if spread:
        factor = np.exp(rng.normal(-(spread**2) / 2, spread, clients))
        out[:, 0] = np.maximum(1, np.rint(numbers[0] * factor))
    return out


def _divided(pieces: Pieces, numbers: np.ndarray, rng: Rng) -> Split:
    # Each client's pieces cut into as many train, val and test samples (N, 3) of each piece.
    cuts = np.cumsum(numbers, axis=1)[:, :2]
    parts = [
        [np.split(piece, cut) for piece in client] for client, cut in zip(pieces, cuts, strict=True)
    ]
    return Split(*[mixed([[p[i] for p in client] for client in parts], rng) for i in range(3)])
