"""Partitions by name: the schemes of the papers and your own, and their checks."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from pfl_core.data import counted, schemes, shifts
from pfl_core.data.dealing import Split, integer, label_counts, need, read_shares
from pfl_core.util import checks, identity
from pfl_core.util.cards import Listing
from pfl_core.util.draws import unmoved

__all__ = [
    "Split",
    "arguments",
    "check",
    "common",
    "function",
    "label_counts",
    "list_partitions",
    "partition",
    "read_shares",
    "register_partition",
]

_SCHEMES: dict[str, Callable[..., Split]] = {}
GIVEN = "draw from the `rng` that it is given, and from nothing else"


def register_partition(name: str, fn: Callable[..., Split]) -> Callable[..., Split]:
    """Add a scheme of your own, `fn(pool, clients, rng, **args) -> Split`; returns fn.

    It is called twice, and what it draws is drawn from `rng`: equal seeds give equal splits. A name
    of yours may be registered again, as when a notebook's cell runs twice.

    Raises
    ------
    ValueError
        If the name is that of a scheme of the papers.

    Examples
    --------
    Client k gets the samples of class k, a tenth of them for its test:

    >>> from pfl_core.data.partition import Split, partition
    >>> def one_class(pool, clients, rng):
    ...     mine = [rng.permutation(np.flatnonzero(pool.y == k)) for k in range(clients)]
    ...     cuts = [len(m) // 10 for m in mine]
    ...     train = [m[c:] for m, c in zip(mine, cuts)]
    ...     return Split(train, [m[:0] for m in mine], [m[:c] for m, c in zip(mine, cuts)])
    >>> fn = register_partition("one_class", one_class)
    >>> split = partition("one_class", load("digits"), clients=10, seed=0)
    >>> [len(idx) for idx in split.test]
    [17, 18, 17, 18, 18, 18, 18, 17, 17, 18]
    """
    taken = name in _SCHEMES and identity.is_ours(_SCHEMES[name]) and not identity.is_ours(fn)
    need(not taken, f"partition {name!r} is one of the papers; register yours under another name")
    checks.name("register_partition(name)", name)
    checks.takes(f"register_partition({name!r})", fn, "pool", "clients", "rng")
    identity.note(fn)
    _SCHEMES[name] = fn
    return fn


def function(name: str) -> Callable[..., Split]:
    """The function registered as `name`."""
    return _SCHEMES[name]


def list_partitions() -> Listing:
    """{name: one line about it} of every scheme that `partition` knows.

    Examples
    --------
    >>> list_partitions()["iid"]
    'Equal random shares of the official train and test parts.'
    """
    docs = {name: inspect.getdoc(fn) or "" for name, fn in sorted(_SCHEMES.items())}
    return Listing({name: doc.split("\n")[0] for name, doc in docs.items()})


def arguments(name: str) -> dict[str, inspect.Parameter]:
    """The arguments that a scheme has of its own, besides pool, clients and rng."""
    checks.known("partition", name, sorted(_SCHEMES), "add your own with register_partition")
    return dict(list(checks.parameters(_SCHEMES[name]).items())[3:])


def check(name: str, args: dict[str, Any]) -> None:
    """Raise ValueError for an unknown scheme, an argument that it does not have, or its type."""
    own, shared = arguments(name), common(name, args)
    shifts.check(shared)
    for arg in [] if any(p.kind is p.VAR_KEYWORD for p in own.values()) else args:
        if arg not in shared:
            checks.known(f"argument of partition {name!r}:", arg, sorted(own))
    for arg, value in args.items():
        if arg in own and not (value is None is own[arg].default):
            checks.kind(name, arg, checks.cast(value, own[arg].annotation), own[arg].annotation)


def common(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """Those of a partition's arguments that every partition has.

    A scheme of a user's own may have some of that name itself, or take all that is given.
    """
    own = arguments(name)
    if any(p.kind is p.VAR_KEYWORD for p in own.values()):
        return {}
    return {n: v for n, v in args.items() if n in shifts.COMMON and n not in own}


def partition(name: str, pool: Any, clients: int, seed: int, **args: Any) -> Split:
    """Deal the samples of `pool` out to clients. Equal seeds give equal splits.

    Parameters
    ----------
    name
        The scheme, one of `list_partitions()`.
    args
        The scheme's own arguments; and `transform`, a list of `shifts.TRANSFORMS`, and `relabel`, a
        list of shifts of labels, or of lists of new ones, which clients take in turn; and `words`,
        which makes vectors of texts. They change what is dealt, see `shifts.applied`.

    Raises
    ------
    ValueError
        For an unknown scheme or argument, an illegal value, a client without training or test
        samples, a scheme that hands a sample out twice, or one of a user's own that deals otherwise
        when it is called again, or moves a global generator.
    """
    check(name, args)
    fn = _SCHEMES[name]
    clients, seed = integer("clients", clients, 1), integer("seed", seed, 0)
    need(
        clients <= len(pool.y),
        f"clients={clients} is more than the pool's {len(pool.y)} samples; lower it",
    )
    shared = common(name, args)
    own = {n: v for n, v in args.items() if n not in shared}

    def dealt() -> Split:
        rng = np.random.default_rng([seed, *b"partition"])
        try:
            split = _checked(fn(pool, clients, rng, **own), clients, len(pool.y))
            split = shifts.checked(split, np.asarray(pool.y), clients, pool.classes)
            return shifts.shifted(split, pool.classes, *map(shared.get, shifts.COMMON))
        except ValueError as error:
            raise ValueError(f"partition {name!r}: {error}") from error

    if identity.is_ours(fn):
        return dealt()
    with unmoved(f"partition {name!r}", GIVEN):
        split = dealt()
    if part := _apart(split, dealt()):
        raise ValueError(
            f"partition {name!r}: {part} differs between two calls with one seed, so it is drawn "
            f"from a generator of its own, or read from what changes; {GIVEN}"
        )
    return split


def _apart(one: Split, two: Split) -> str:
    # The first field in which two splits differ; "": none.
    for f in dataclasses.fields(Split):
        a, b = getattr(one, f.name), getattr(two, f.name)
        lists = (a, b) if isinstance(a, list) and isinstance(b, list) else ([a], [b])
        if len(lists[0]) != len(lists[1]) or not all(map(np.array_equal, *lists)):
            return f.name
    return ""


def _checked(split: Any, clients: int, n: int) -> Split:
    got = type(split).__name__
    need(isinstance(split, Split), f"returned {got}, allowed is a Split(train, val, test)")
    parts = {
        # Copies: a scheme may shuffle an array of its own in place, call by call.
        part: [np.array(i, np.int64) for i in getattr(split, part)]
        for part in ("train", "val", "test")
    }
    for part, lists in parts.items():
        need(len(lists) == clients, f"{part} has {len(lists)} index arrays for {clients} clients")
        empty = [i for i, idx in enumerate(lists) if not len(idx)]
        fine = not empty or (part == "val" and len(empty) == clients)
        need(
            fine, f"clients {empty[:10]} have no {part} samples; lower clients or use more samples"
        )
    dealt = np.concatenate([idx for lists in parts.values() for idx in lists])
    need(
        dealt.min() >= 0 and dealt.max() < n,
        f"indices must be 0..{n - 1}, got {dealt.min()}..{dealt.max()}",
    )
    twice = np.flatnonzero(np.bincount(dealt) > 1)
    need(
        not len(twice),
        f"{len(twice)} samples are handed out more than once, the first is {twice[:1].tolist()}",
    )
    return dataclasses.replace(split, **parts)


for _fn in (
    schemes.iid,
    schemes.fedper_classes,
    schemes.workers,
    schemes.pfedla_noniid1,
    schemes.pfedla_noniid2,
    schemes.pfedla_target,
    schemes.pfedla_ring,
    schemes.shards,
    schemes.groups,
    schemes.dirichlet,
    schemes.dirichlet_columns,
    schemes.pfedhn_classes,
    schemes.alphabets,
    schemes.coarse,
    counted.class_equal,
    counted.dirichlet_clients,
    counted.domains,
):
    register_partition(_fn.__name__, _fn)
