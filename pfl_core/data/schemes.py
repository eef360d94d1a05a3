"""Every split of the reproduced papers, as a pure function of a pool: who holds which samples.

A scheme is a function `(pool, clients, rng, **args) -> Split`. All its random numbers come from the
numpy Generator `rng`. `pool` is a Pool, or anything with its y, is_test, classes and extra. Most
schemes fill a table `want` (N, C), how many samples of each class each client gets, and `deal`
hands them out. Bounds are checked before that; a draw that can fail is repeated up to TRIES times.

In the descriptions, N are clients, C classes, and k the classes of one client. What is under "Ours"
was decided here, where the paper says nothing. Arguments that many schemes have:

- `split="70/10/20"`: percent of train/val/test; two numbers leave val empty. test, then val, are
  rounded up, or to the nearest integer where every class is divided by itself.
- `k=None`: as the paper has it, for CIFAR-10 below 100 classes, else for CIFAR-100.
- `val`: the share of the official training part that becomes val.
- `numpy_seed`: how many samples of each class a client gets is drawn as released code draws it,
  with numpy's older generator and this seed, from classes of `class_size` samples (None: the
  pool's). Which samples these are is drawn from `rng`. FLAYER, FedALA (PFLlib): 1; FedAGHN: 66666
  on CIFAR-10, else 666.
"""

from __future__ import annotations

from math import ceil, gcd
from typing import Any

import numpy as np

from pfl_core.data.dealing import (
    EPS,
    HOPELESS,
    MANY,
    TRIES,
    Rng,
    Split,
    assign,
    check_room,
    classes_each,
    column_of,
    deal,
    deal_parts,
    divide,
    fewest,
    indices_by_class,
    integer,
    label_counts,
    level,
    need,
    official_parts,
    read_shares,
    real,
    sizes_of,
)


def iid(pool: Any, clients: int, rng: Rng, split: str | None = None) -> Split:
    """Equal random shares of the official train and test parts.

    Not from a paper. 10 clients, 50,000 + 10,000 images: 5,000 train and 1,000 test each; sizes
    differ by one at most. split="70/30" merges the two parts and divides anew.
    """
    test = np.asarray(pool.is_test, bool)
    if split is not None:
        shares = read_shares(split)
        few = fewest(shares)
        check_room(
            clients, lambda n: len(test) // n >= few, f"of {len(test)} samples each needs {few}"
        )
        return divide(
            [[idx] for idx in np.array_split(rng.permutation(len(test)), clients)], shares, rng
        )
    few = min(test.sum(), (~test).sum())
    need(few > 0, "the pool has no official test part, or nothing else; split='70/30' makes one")
    check_room(clients, lambda n: n <= few, f"the smaller official part has {few} samples")
    train, held = (
        np.array_split(rng.permutation(np.flatnonzero(part)), clients) for part in (~test, test)
    )
    return Split(train, [train[0][:0]] * clients, held)


def _majors(
    pool: Any, clients: int, rng: Rng, k: int, images: int, share: float, split: str
) -> Split:
    """k classes have `share` of a client's images in equal parts, the other classes the rest.

    Each client has `images` of them, fewer if the pool has not as many.
    """
    shares, members, others = read_shares(split), indices_by_class(pool), pool.classes - k
    sizes, few = sizes_of(members), fewest(shares)
    integer("images", images, few * k)

    def amounts(m: int) -> tuple[int, int]:
        return int(m * share / k + EPS), int(m * (1 - share) / others + EPS) if share < 1 else 0

    def fits(n: int, m: int) -> bool:
        return caps(n, *amounts(m)).min() >= 0 and caps(n, *amounts(m)).sum() >= n * k

    def caps(n: int, major: int, minor: int) -> np.ndarray:
        # How many clients can have each class as a major one.
        return np.minimum(n, (sizes - n * minor) // (major - minor))

    legal = [
        m
        for m in range(few * k, images + 1)
        if amounts(m)[0] > amounts(m)[1] >= (few if share < 1 else 0)
    ]
    why = (
        f"images={images} at k={k} leave fewer than {few} of a class, or the k no larger; raise "
        "images or share"
    )
    need(bool(legal), why)
    why = (
        f"at k={k} of {pool.classes} classes they need {legal[0]} images each of classes of "
        f"{sizes.min()} or more"
    )
    check_room(clients, lambda n: fits(n, legal[0]), why)
    major, minor = amounts(next(m for m in reversed(legal) if fits(clients, m)))
    held = assign(level(caps(clients, major, minor), clients * k, rng), clients, rng)
    return divide(deal(members, minor + held * (major - minor), rng), shares, rng, each=True)


def pfedla_noniid1(
    pool: Any, clients: int, rng: Rng, k: int | None = None, images: int = 600, split: str = "70/30"
) -> Split:
    """pFedLA non-IID_1: k classes a client (4; 12 of 100), the same number of images of each.

    Source: pFedLA Sec. 4.1. 100 clients, 60,000 images of 10 classes: 4 x 150 images (105 train, 45
    test), every class at 40 clients and used up. Ours: official parts merged; 600 images, which
    fits CIFAR-10 and CIFAR-100 exactly; classes spread evenly over the clients. A small pool gives
    the most images a class that it has for all; classes short of samples then have fewer owners.
    """
    k = classes_each(k, pool, min(4, pool.classes), 12)
    return _majors(pool, clients, rng, k, images, 1.0, split)


def pfedla_noniid2(
    pool: Any,
    clients: int,
    rng: Rng,
    k: int | None = None,
    images: int = 600,
    share: float | None = None,
    split: str = "70/30",
) -> Split:
    """pFedLA non-IID_2: all classes at each client, k of them larger (2; 6 of 100).

    Together the k classes have `share` of the client's images.

    Source: pFedLA Sec. 4.1. 10 classes: 2 x 144 + 8 x 39 = 600; 100 classes: 6 x 53 + 94 x 3 = 600.
    Ours: the share, .48 (.53 from 100 classes), which uses 60,000 images up at 100 clients; a small
    pool scales both amounts, down to 2 images of a class.
    """
    k = classes_each(k, pool, min(2, pool.classes - 1), 6, top=pool.classes - 1)
    share = (
        (0.48 if pool.classes < 100 else 0.53)
        if share is None
        else real("share", share, above=0, below=1)
    )
    return _majors(pool, clients, rng, k, images, share, split)


def _holders(pool: Any, sets: list[np.ndarray], images: int, split: str, rng: Rng) -> Split:
    """Each client gets the same number of images of every class in its set of k classes.

    That is images / k, or fewer if the pool has not as many.
    """
    shares, members, k = read_shares(split), indices_by_class(pool), len(sets[0])
    sizes, few = sizes_of(members), fewest(shares)
    check_room(
        len(sets),
        lambda n: sizes.min() // n >= few,
        f"the smallest class has {sizes.min()} images for {few} each",
    )
    held = label_counts(np.arange(pool.classes), sets, pool.classes)
    q = min(integer("images", images, few * k) // k, *(sizes // np.maximum(held.sum(0), 1)))
    return divide(deal(members, held * q, rng), shares, rng, each=True)


def pfedla_target(
    pool: Any, clients: int, rng: Rng, k: int | None = None, images: int = 600, split: str = "70/30"
) -> Split:
    """pFedLA Fig. 5: client 1 has the classes of client 0, client 2 most of them, others random.

    Client 0 is the target; client 2 shares three quarters of its k classes.

    Source: pFedLA Sec. 4.3; 8 clients, 4 classes (12 of 100): overlap with client 0 is 4, 4, 3,
    then at most 2. Ours: 600 images a client, divided class by class; a random client that overlaps
    as much as client 2 is redrawn.
    """
    top = max(q for q in range(pool.classes) if q < 2 or q + max(1, q // 4) < pool.classes)
    k = classes_each(k, pool, min(4, top), 12, 2, top)
    integer("clients (target, same, similar, random ones)", clients, 3)
    order, shared = rng.permutation(pool.classes), k - max(1, k // 4)
    target, outside = order[:k], order[k:]
    sets = [target, target, np.concatenate([target[:shared], outside[: k - shared]])]
    drawn = [rng.permutation(pool.classes)[:k] for _ in range(TRIES)]
    sets += [one for one in drawn if np.isin(one, target).sum() < shared]
    why = (
        f"k={k} of {pool.classes} classes: only {len(sets)} clients after {TRIES} draws; lower k "
        "or clients"
    )
    need(len(sets) >= clients, why)
    return _holders(pool, sets[:clients], images, split, rng)


def pfedla_ring(
    pool: Any,
    clients: int,
    rng: Rng,
    k: int | None = None,
    shift: int | None = None,
    images: int = 600,
    split: str = "70/30",
) -> Split:
    """pFedLA Fig. 6: clients on a ring, neighbours share 3 of 4 classes (9 of 12).

    Each client swaps `shift` of its neighbour's k classes for new ones.

    Source: pFedLA Sec. 4.3, 8 clients. Client i holds pi(i * shift .. i * shift + k - 1), pi a
    random permutation on a ring: overlap max(0, 4 - |i - j|), and 1 for clients 0 and 7 at 10
    classes, where the ring closes. Ours: the ring, shift = k / 4, 600 images.
    """
    k = classes_each(k, pool, min(4, pool.classes - 1), 12, top=pool.classes - 1)
    shift = integer("shift", max(1, k // 4) if shift is None else shift, 1, pool.classes - k)
    check_room(
        clients,
        lambda n: n * shift <= pool.classes,
        f"shift={shift} comes round the ring of {pool.classes} classes",
    )
    order = rng.permutation(pool.classes)
    sets = [order[(i * shift + np.arange(k)) % pool.classes] for i in range(clients)]
    return _holders(pool, sets, images, split, rng)


def _of_released_code(
    seed: int | None, class_size: int | None, members: list[np.ndarray]
) -> tuple[np.random.RandomState | None, np.ndarray]:
    """The generator of released code (None without a seed), and the sizes of classes it deals."""
    sizes = sizes_of(members)
    need(class_size is None or seed is not None, "class_size is of a draw with numpy_seed")
    if seed is None:
        return None, sizes
    state = np.random.RandomState(integer("numpy_seed", seed, 0, 2**32 - 1))
    if class_size is not None:
        sizes = np.full_like(sizes, integer("class_size", class_size, 1))
    return state, sizes


def _permuted(
    things: np.ndarray, rng: Rng, state: np.random.RandomState | None, whole: np.ndarray
) -> np.ndarray:
    """A random order; released code shuffles its classes, of sizes `whole`, before it."""
    if state is None:
        return rng.permutation(things)
    for size in whole:
        state.shuffle(np.arange(size))
    return state.permutation(things)


def _like(table: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """A table (N, C) in the same shares of classes of other sizes (C,)."""
    ends = table.cumsum(0)
    return np.diff(ends * sizes // np.maximum(ends[-1], 1), axis=0, prepend=0)


def shards(
    pool: Any,
    clients: int,
    rng: Rng,
    k: int | None = None,
    distinct: bool = False,
    split: str = "70/10/20",
    numpy_seed: int | None = None,
    class_size: int | None = None,
) -> Split:
    """FedAGHN pathological: classes cut into equal shards, k random shards a client (5; 20 of 100).

    Source: FedAGHN App. C.1 and released code. 20 clients, 60,000 images of 10 classes: 10 shards
    of 600 a class, 3,000 images a client, 2,100 / 300 / 600. Two shards of a client may be of one
    class, so k is an upper bound; distinct=True draws k different ones, as the paper words it.
    Ours: if N * k / C is not whole it is rounded up, and spare shards stay unused.
    """
    shares, members, classes = read_shares(split), indices_by_class(pool), pool.classes
    k = classes_each(k, pool, max(1, classes // 2), classes // 5)
    small, few = sizes_of(members).min(), fewest(shares)
    why = f"{k} shards hold fewer than {few} samples, as the smallest class has {small}"
    check_room(clients, lambda n: small // ceil(n * k / classes) * k >= few, why)
    pieces = ceil(clients * k / classes)
    state, whole = _of_released_code(numpy_seed, class_size, members)
    if distinct:
        need(state is None, "distinct=True is not what released code draws: leave out numpy_seed")
        held = assign(level(np.full(classes, pieces), clients * k, rng), clients, rng)
    else:
        cut = np.repeat(np.arange(classes), pieces)
        drawn = _permuted(cut, rng, state, whole)[: clients * k]
        held = label_counts(np.arange(classes), [*drawn.reshape(clients, k)], classes)
    return divide(deal(members, held * (small // pieces), rng), shares, rng)


def _dirichlet_table(
    sizes: np.ndarray, clients: int, alpha: float, rng: Rng | np.random.RandomState
) -> np.ndarray:
    """One draw of the table (N, C): class by class, and none to clients that hold n / N already."""
    want = np.zeros((clients, len(sizes)), int)
    for c, size in enumerate(sizes):
        if isinstance(rng, np.random.RandomState):
            rng.shuffle(np.arange(size))  # as released code does, before it draws shares
        room = want.sum(1) < sizes.sum() / clients
        for _ in range(TRIES):
            edge = np.cumsum(rng.dirichlet(np.full(clients, alpha)) * room)
            if edge[-1] > 0:  # else every share went to full clients, and nothing can be normalised
                break
        else:
            raise ValueError(
                f"alpha={alpha}: {TRIES} draws gave class {c} to full clients only; raise alpha"
            )
        want[:, c] = np.diff(np.floor(edge / edge[-1] * size), prepend=0)
    return want


def _possible(sizes: np.ndarray, clients: int, alpha: float, wanted: float, spare: float) -> float:
    """Which of two least numbers of samples draws for very many clients can give all of them.

    That is `wanted`, or `spare` if draws would leave clients with fewer than `wanted`. How many
    these are is seen in draws for MANY clients, of as many samples each.

    Raises
    ------
    ValueError
        If `spare` is out of reach, too.
    """
    rng, fewer = np.random.default_rng(0), np.rint(sizes * (MANY / clients)).astype(int)
    if abs(fewer.sum() - sizes.sum() * MANY / clients) > 0.01 * fewer.sum():
        return wanted  # classes of too few samples to be made smaller
    tables = [_dirichlet_table(fewer, MANY, alpha, rng) for _ in range(20)]
    got = np.concatenate([table.sum(1) for table in tables])
    for least in (wanted, min(wanted, spare)):
        short = (got < least).mean() * clients
        if short < 15:  # else about e^-15 of all draws would leave nobody short
            return least
    raise ValueError(
        f"alpha={alpha}, clients={clients}: a draw would leave about {short:,.0f} of them with "
        f"fewer than {least:g} of {sizes.sum() / clients:g} samples on average; raise alpha, lower "
        "clients, least or fallback_least"
    )


def dirichlet(
    pool: Any,
    clients: int,
    rng: Rng,
    alpha: float = 0.1,
    least: int = 40,
    fallback_least: int | None = 10,
    train_ratio: float = 0.75,
    split: str | None = None,
    source: str = "all",
    numpy_seed: int | None = None,
    class_size: int | None = None,
) -> Split:
    """FLAYER, FedAGHN, PFLlib: each class shared out by Dir(alpha), until all have `least` samples.

    Source: FLAYER Sec. Evaluation Setup and released code; FedAGHN App. C.1 with least=1,
    split="70/10/20". Classes in order: r ~ Dir(alpha, N); r = 0 for clients that hold n / N or
    more; cuts at floor(cumsum(r) / sum(r) * n_c). least is capped at n / N / 2; 40 = batch 10 / (1
    - .75). 60,000 images, 20 clients: 40 to 3,000 each and a class share more. source="train" uses
    the official training part only (FLAYER's Tiny-ImageNet). Ours: if none of 1,000 draws has
    `least`, the first of them with fallback_least (the batch; None: never) is taken; split
    overrides train_ratio; a client never has fewer samples than fill its parts (2, with val 3).
    """
    alpha, ratio = real("alpha", alpha, above=0), real("train_ratio", train_ratio, above=0, below=1)
    shares = (ratio, 0.0, 1 - ratio) if split is None else read_shares(split)
    need(source in ("all", "train"), f"source={source!r} must be 'all' or 'train'")
    members = indices_by_class(pool, source == "all" or ~np.asarray(pool.is_test, bool), empty=True)
    own, few = sizes_of(members), fewest(shares)
    state, sizes = _of_released_code(numpy_seed, class_size, members)
    n = sizes.sum()
    check_room(
        clients,
        lambda k: n / k / 2 >= few,
        f"{n} samples: half the mean is below {few}, which the parts need",
    )
    wanted = max(few, min(integer("least", least, 1), n / clients / 2))
    spare = np.inf
    if fallback_least is not None:
        spare = max(few, integer("fallback_least", fallback_least, 1))
    found, best, short, enough = None, 0, clients, min(wanted, spare)
    if clients >= MANY:
        wanted = _possible(sizes, clients, alpha, wanted, spare)
    want, low, draw = None, 0, 0
    for draw in range(1, TRIES + 1):
        want = _dirichlet_table(sizes, clients, alpha, state or rng)
        low, short = want.sum(1).min(), min(short, (want.sum(1) < enough).sum())
        found, best = want if found is None and low >= spare else found, max(best, low)
        if low >= wanted or (draw == HOPELESS[0] and short >= HOPELESS[1]):
            break
    why = (
        f"none of {draw} draws gave all of them {enough:g} samples, the best left one with {best} "
        f"and each {short} or more short"
    )
    cure = "raise alpha, lower clients, least or fallback_least"
    dealt = want if low >= wanted else found
    if dealt is None:
        raise ValueError(f"alpha={alpha}, clients={clients}: {why}; {cure}")
    if state:
        dealt = _like(dealt, own)
        poorest = dealt.sum(1).min()
        need(poorest >= few, f"the pool leaves a client {poorest} samples, the parts need {few}")
    return divide(deal(members, dealt, rng), shares, rng)


def groups(
    pool: Any,
    clients: int,
    rng: Rng,
    groups: int = 5,
    share: float = 0.8,
    split: str = "70/10/20",
    numpy_seed: int | None = None,
    class_size: int | None = None,
) -> Split:
    """FedAGHN case study: groups of clients, each with dominant classes; the rest is IID.

    A group has `share` of its dominant classes; what is left of each class is dealt to all clients.

    Source: FedAGHN Sec. 6.1, App. E.1 and released code. 20 clients, 5 groups, CIFAR-10: a client
    holds 1,200 each of its group's 2 classes and 60 of all 10, 3,000 in all. Clients 0..3 are group
    0 and so on. Ours: where a class has less than one IID sample a client, the rests of all classes
    are pooled and dealt in equal numbers.
    """
    shares, members, classes = read_shares(split), indices_by_class(pool), pool.classes
    legal = [g for g in range(1, classes + 1) if classes % g == 0 == clients % g]
    fine = integer("groups", groups, 1) in legal
    need(
        fine, f"groups={groups} must divide {classes} classes and {clients} clients; legal: {legal}"
    )
    sizes, few = sizes_of(members), fewest(shares)
    dominant = (sizes * real("share", share, above=0, high=1) + EPS).astype(int)
    rest, own, each = sizes - dominant, classes // groups, clients // groups

    def fits(n: int) -> bool:
        part = dominant.min() * groups // n
        return (
            n % groups == 0 and part >= 1 and part * own >= few and (share == 1 or rest.sum() >= n)
        )

    check_room(
        clients,
        fits,
        f"each group deals {dominant.min()} samples of its smallest class, all clients "
        f"{rest.sum()}",
    )
    state, whole = _of_released_code(numpy_seed, class_size, members)
    order = _permuted(np.arange(classes), rng, state, whole).reshape(groups, own)
    want = np.zeros((clients, classes), int)
    for g, mine in enumerate(order):
        want[g * each : (g + 1) * each, mine] = dominant[mine] // each
        want[(g + 1) * each - 1, mine] += dominant[mine] % each
    if share == 1 or rest.min() >= clients:
        want += rest // clients
    else:
        labels = rng.permutation(np.repeat(np.arange(classes), rest))[
            : rest.sum() // clients * clients
        ]
        want += label_counts(labels, [*np.arange(len(labels)).reshape(clients, -1)], classes)
    return divide(deal(members, want, rng), shares, rng)


def _portion(by_class: list[np.ndarray], share: np.ndarray) -> np.ndarray:
    return np.floor(share * sizes_of(by_class) + EPS).astype(int)


def pfedhn_classes(
    pool: Any,
    clients: int,
    rng: Rng,
    k: int | None = None,
    leftover: bool = True,
    val: float = 0.2,
    low: float = 0.4,
    high: float = 0.6,
) -> Split:
    """pFedHN: k classes a client (2; 10 of 100), in shares drawn from U(low, high).

    Source: pFedHN Sec. 5.1 and released code. Official test; a random fifth of train is val; the
    same shares in all three. The code draws N * k // C + 1 numbers a class and so one too many: 10
    clients, 2 of 10 classes: 2 of 3 used, 2/3 of the data (50 clients: 10/11, 100: 20/21).
    leftover=False normalises over the owners, as the paper's formula, and uses all but the
    rounding. Ours: a class that the client has is passed over, so its k classes always differ.
    """
    real("high", high, low=real("low", low, above=0))
    k, classes = classes_each(k, pool, min(2, pool.classes), 10), pool.classes
    parts = official_parts(pool, val, rng)
    small = min(*sizes_of(parts[0]), *sizes_of(parts[2]))

    def entries(n: int) -> int:
        return n * k // classes + 1 if leftover else ceil(n * k / classes)

    # The smallest possible share of the smallest class must be a sample.
    why = f"{entries(clients)} shares a class, the smallest official part of one has {small}"
    check_room(clients, lambda n: small * low / (low + high * (entries(n) - 1)) >= 1, why)
    draws, used = rng.uniform(low, high, (entries(clients), classes)), np.zeros(classes, int)
    share = np.zeros((clients, classes))
    for row in (row for row in share for _ in range(k)):
        free = np.flatnonzero(row == 0)
        c = rng.choice(free[used[free] == used[free].min()])
        row[c] = draws[used[c], c]
        used[c] += 1
    share /= draws.sum(0) if leftover else np.maximum(share.sum(0), low)
    return deal_parts(parts, [_portion(part, share) for part in parts], rng)


def alphabets(pool: Any, clients: int, rng: Rng, split: str = "70/15/15") -> Split:
    """pFedHN Omniglot: one alphabet a client, the 20 images of every character divided 14 / 3 / 3.

    Source: pFedHN Sec. 5.1, 50 clients. Needs extra["alphabet"]. Ours: division by character,
    official parts merged; fewer clients than alphabets take a random choice of them, in the order
    of their ids. Labels stay global.
    """
    shares, column, y = read_shares(split), column_of(pool, "alphabet"), np.asarray(pool.y)
    names, few = np.unique(column), fewest(shares)
    check_room(clients, lambda n: n <= len(names), f"the pool has {len(names)} alphabets")
    chosen = np.sort(rng.choice(names, clients, replace=False))
    pieces = [
        [np.flatnonzero((column == a) & (y == c)) for c in np.unique(y[column == a])]
        for a in chosen
    ]
    small = min(len(p) for piece in pieces for p in piece)
    need(small >= few, f"a character has {small} images, split={split!r} needs {few} of each")
    return divide(pieces, shares, rng, each=True)


def coarse(pool: Any, clients: int, rng: Rng, val: float = 0.2) -> Split:
    """pFedHN Fig. 4: one coarse class a client; clients of a coarse class share it equally.

    Source: pFedHN Sec. 5.5. Needs extra["coarse"]. CIFAR-100, 100 clients: client i has coarse
    class i // 5, that is 5 fine classes x (80 train, 20 val, 20 test). Ours: val is a fifth of
    every fine class, so the numbers are exact.
    """
    column = column_of(pool, "coarse")
    parts = official_parts(pool, val, rng, each=True)
    names, parent = np.unique(column), np.array([column[idx[0]] for idx in parts[0]])
    need(
        (column == parent[pool.y]).all(),
        "extra['coarse'] puts one class of y into two coarse classes",
    )
    small = min(sizes_of(part).min() for part in parts if val or part is not parts[1])
    legal = [len(names) * m for m in range(1, small + 1)]
    near = sorted(sorted(legal, key=lambda n: abs(n - clients))[:2])
    why = (
        f"clients={clients} must be 1..{small} times the {len(names)} coarse classes; nearest: "
        f"{near}"
    )
    need(clients in legal, why)
    per = clients // len(names)
    mine = np.repeat(names, per)[:, None] == parent
    return deal_parts(parts, [mine * (sizes_of(part) // per) for part in parts], rng)


def dirichlet_columns(
    pool: Any,
    clients: int,
    rng: Rng,
    alpha: float = 0.1,
    novel_alpha: float | None = None,
    novel: int | None = None,
    least: int = 20,
    val: float = 0.2,
) -> Split:
    """pFedHN novel clients: class shares p_i ~ Dir(alpha); the last `novel` have another alpha.

    Source: pFedHN Sec. 5.3: 90 training clients with alpha .1 and 10 novel ones with .1, .25, .5 or
    1. Client i gets floor(n_c * p_ic / sum_j p_jc) of class c in train, val (a random fifth of
    train) and test: p_c = .1, .1, .3 and n_c = 100 -> 20, 20, 60. Ours: novel is a tenth of the
    clients and novel_alpha = alpha; the p of training and of novel clients are streams of their
    own, so a seed draws the same training p for every novel_alpha; a client with fewer than `least`
    samples in all, or an empty part, is redrawn.
    """
    alpha = real("alpha", alpha, above=0)
    novel_alpha = alpha if novel_alpha is None else real("novel_alpha", novel_alpha, above=0)
    novel = integer("novel", clients // 10 if novel is None else novel, 0, clients - 1)
    integer("least", least, 1)
    check_room(
        clients,
        lambda n: len(pool.y) // n >= least,
        f"{len(pool.y)} samples are fewer than least={least} a client",
    )
    parts, streams = official_parts(pool, val, rng), rng.spawn(2)
    new, redraw = np.arange(clients) >= clients - novel, np.ones(clients, bool)
    p = np.zeros((clients, pool.classes))
    for draw in range(1, TRIES + 1):
        for who, a, stream in zip(
            (redraw & ~new, redraw & new), (alpha, novel_alpha), streams, strict=True
        ):
            p[who] = stream.dirichlet(np.full(pool.classes, a), who.sum())
        wants = [_portion(part, p / np.maximum(p.sum(0), np.finfo(float).tiny)) for part in parts]
        each = np.stack([want.sum(1) for want in (wants if val else wants[::2])])
        redraw = (each.sum(0) < least) | (each.min(0) == 0)
        if not redraw.any():
            return deal_parts(parts, wants, rng)
        if clients >= MANY and draw == HOPELESS[0] and redraw.sum() > 0.99 * clients:
            break
    why = (
        f"after {draw} draws {redraw.sum()} clients have fewer than least={least} samples or an "
        "empty part"
    )
    raise ValueError(
        f"alpha={alpha}, clients={clients}: {why}; raise alpha, lower clients or least"
    )


def fedper_classes(
    pool: Any, clients: int, rng: Rng, k: int | None = None, val: float = 0.0
) -> Split:
    """FedPer: k classes a client (4 of 10, 40 of 100), each shared equally by its owners.

    A class has k * N / C owners; k = C is IID.

    Source: FedPer Sec. 4.1. CIFAR-10, 10 clients, k = 4: every class at 4 clients, 1,250 train
    images each, so 5,000 train and 1,000 test a client. Ours: client j holds pi(j * C // N + r), r
    < k, on a ring, pi and the order of the clients random; official test kept and dealt to the same
    owners; clients are equal, (client, class) amounts equal within one, so an uneven pool is cut to
    its smallest class. A share val of every class's train part is validation.
    """
    classes, common = pool.classes, gcd(pool.classes, clients)
    step, turn = classes // common, clients // common
    k = classes_each(k, pool, max(1, 2 * classes // 5), 2 * classes // 5)
    why = (
        f"k={k} gives classes unequal numbers of owners: with {clients} clients and {classes} "
        "classes"
    )
    need(
        k * clients % classes == 0,
        f"{why} k must be a multiple of {step}, from {step} to {classes}",
    )
    parts, owners = official_parts(pool, val, rng, each=bool(val)), k * clients // classes
    small = min(sizes_of(part).min() for part in parts if val or part is not parts[1])
    why = f"each class has {owners} owners, but the smallest official part of one {small} samples"
    check_room(clients, lambda n: n * k % classes == 0 and n * k // classes <= small, why)
    order, start = rng.permutation(classes), rng.permutation(clients) * classes // clients

    def ring(
        width: int,
    ) -> np.ndarray:  # every class is in width * N / C of the clients' windows, if that is whole
        windows = [order[(s + np.arange(width)) % classes] for s in start]
        return label_counts(np.arange(classes), windows, classes)

    def want(part: list[np.ndarray]) -> np.ndarray:
        each, rest = divmod(sizes_of(part).min(), owners)
        return each * ring(k) + ring(
            rest // turn * step
        )  # the rest as far as it leaves all clients equal

    return deal_parts(parts, [want(part) for part in parts], rng)


def workers(
    pool: Any, clients: int, rng: Rng, least_per_class: int = 0, split: str = "80/20"
) -> Split:
    """FedPer FLICKR-AES: raters drawn at random as clients, each one's images divided 80/20.

    Source: FedPer Sec. 4.1, 30 of 210 users. Needs extra["worker"]. 160 ratings -> 128 train, 32
    test. least_per_class=4 keeps only users with 4 images of every score, a published
    re-implementation's filter; the paper has none. Ours: official parts merged, clients in the
    order of the workers' ids.
    """
    shares, column = read_shares(split), column_of(pool, "worker")
    few = fewest(shares)
    integer("least_per_class", least_per_class, 0)
    mine = [np.flatnonzero(column == name) for name in np.unique(column)]
    counts = label_counts(np.asarray(pool.y), mine, pool.classes)
    fit = np.flatnonzero((counts.sum(1) >= few) & (counts.min(1) >= least_per_class))
    why = (
        f"only {len(fit)} of {len(mine)} workers have {few} samples and {least_per_class} of "
        "every class"
    )
    check_room(clients, lambda n: n <= len(fit), why)
    return divide(
        [[mine[w]] for w in np.sort(rng.choice(fit, clients, replace=False))], shares, rng
    )
