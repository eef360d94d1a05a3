"""What becomes of samples when they are dealt: images are turned, labels renamed, client by client.

Every partition takes both, `transform=["none", "turn90"]` and `relabel=[0, 3]`: client i gets entry
i modulo their number, so that clients form groups that differ in how things look (feature shift) or
in what they are called (concept shift). `words=1000` makes vectors of texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pfl_core.data.dealing import Split, integer, need
from pfl_core.util import checks


def _turned(times: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.rot90(x, times, axes=(1, 2))


# Of images (n, h, w, c), c = 1 or 3.
TRANSFORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda x: x,
    "turn90": _turned(1),
    "turn180": _turned(2),
    "turn270": _turned(3),
    "mirror": lambda x: x[:, :, ::-1],
    "invert": lambda x: 255 - x,
    "swap": lambda x: x[..., ::-1],  # red and blue
}
LISTS = ("transform", "relabel")  # which clients take in turn
COMMON = (*LISTS, "words")  # arguments that every partition has


def check(args: dict[str, Any]) -> None:
    """Raise ValueError for what no data can be dealt with.

    Parameters
    ----------
    args : dict
        `transform`, `relabel` and `words`, as a partition takes them; None or nothing for none.
    """
    transform, relabel = (args.get(name) for name in LISTS)
    for name, given in zip(LISTS, (transform, relabel), strict=True):
        fine = given is None or isinstance(given, list | tuple) and len(given) > 0
        need(fine, f"{name}={given!r}: allowed is a list, whose entries clients take in turn")
    for name in transform or ():
        checks.known("transform", name, TRANSFORMS)
    for entry in relabel or ():
        listed = isinstance(entry, list | tuple) and entry and all(map(_is_label, entry))
        need(
            bool(listed) or _is_label(entry),
            f"relabel has {entry!r}: allowed is an integer s >= 0, which makes y + s modulo the "
            "number of classes of a label y, or a list of the new labels of class 0, 1, ...",
        )
    if (words := args.get("words")) is not None:
        integer("words", words, 1, 10**6)


def _is_label(v: Any) -> bool:
    return (n := checks.whole(v)) is not None and n >= 0


def shortest(name: str, given: Sequence[Any]) -> list[Any]:
    """What says the same as a list of `transform` or `relabel`, as short as it can be; [] for none.

    Examples
    --------
    >>> shortest("relabel", [0, [1, 2, 0], 0, 1]), shortest("transform", ["none", "none"])
    ([0, 1], [])
    """
    entries = [_shift(e) if name == "relabel" else e for e in given]
    n = len(entries)
    period = next(p for p in range(1, n + 1) if n % p == 0 and entries == entries[:p] * (n // p))
    return [] if entries[:period] in ([0], ["none"]) else entries[:period]


def _shift(entry: Any) -> Any:
    # A list that only shifts the labels, as a number.
    if not isinstance(entry, list | tuple):
        return entry
    entry, n = list(entry), len(entry)
    return entry[0] if entry == [(c + entry[0]) % n for c in range(n)] else entry


def shifted(
    split: Split,
    classes: int,
    transform: Sequence[str] | None,
    relabel: Sequence[int | Sequence[int]] | None,
    words: int | None,
) -> Split:
    """A split with what its clients take in turn of two lists, beside what its scheme says.

    A scheme's own new labels come first, and `relabel` renames them.
    """
    clients = len(split.train)
    for name, given in zip(LISTS, (transform, relabel), strict=True):
        need(
            given is None or len(given) <= clients,
            f"{name} has {len(given or ())} entries for clients={clients}; lower it to one each",
        )
    if transform is not None:
        need(split.transform is None, "this scheme transforms by itself: leave transform out")
        names = [transform[i % len(transform)] for i in range(clients)]
        split = dataclasses.replace(split, transform=names)
    if relabel is not None:
        first = np.tile(np.arange(classes), (clients, 1))
        first = first if split.relabel is None else np.asarray(split.relabel)
        tables = [_table(entry, first.max() + 1) for entry in relabel]
        each = np.stack([tables[i % len(tables)] for i in range(clients)])
        new = np.where(first < 0, -1, np.take_along_axis(each, np.maximum(first, 0), 1))
        split = dataclasses.replace(split, relabel=new)
    return split if words is None else dataclasses.replace(split, words=words)


def _table(entry: int | Sequence[int], classes: int) -> np.ndarray:
    if (shift := checks.whole(entry)) is not None:
        return (np.arange(classes) + shift) % classes
    new = np.array(entry)
    need(
        len(new) == classes,
        f"relabel has a list of {len(new)} labels for {classes} classes; give one for each",
    )
    return new


def checked(split: Split, y: np.ndarray, clients: int, classes: int) -> Split:
    """A scheme's split whose transforms and labels fit; ValueError for another one."""
    need(split.words is None, "a scheme says no words: give partition_args={'words': ...}")
    if split.transform is not None:
        names = list(split.transform)
        need(len(names) == clients, f"transform has {len(names)} names for {clients} clients")
        for name in names:
            checks.known("transform", name, TRANSFORMS)
        split = dataclasses.replace(split, transform=names)
    if split.relabel is not None:
        table = np.asarray(split.relabel)
        fits = table.shape == (clients, classes) and table.dtype.kind in "iu"
        need(
            fits,
            f"relabel is {table.dtype} {table.shape}; allowed are integers, a label for each "
            f"client and class ({clients}, {classes})",
        )
        for i, lists in enumerate(zip(split.train, split.val, split.test, strict=True)):
            held = np.unique(y[np.concatenate(lists)])
            lost = held[table[i][held] < 0]
            need(not len(lost), f"relabel has no label for classes {lost.tolist()} of client {i}")
        split = dataclasses.replace(split, relabel=table.astype(np.int64))
    return split


def applied(
    x: np.ndarray, y: np.ndarray, classes: int, split: Split
) -> tuple[np.ndarray, np.ndarray, int, Split]:
    """Samples as their clients have them: x, y, the number of classes, and who holds what of them.

    Only what is dealt is left. Where nothing is changed, all is returned as it is.

    Parameters
    ----------
    x : array
        As a Federation takes them.
    y : (n,) int
    classes : int
    split : Split
        Indices into x and y.

    Raises
    ------
    ValueError
        For a transform that these samples cannot have.
    """
    if split.transform is None and split.relabel is None and split.words is None:
        return x, y, classes, split
    parts = (split.train, split.val, split.test)
    each = [np.concatenate(lists) for lists in zip(*parts, strict=True)]
    dealt = np.concatenate(each)
    x, y, ends = x[dealt], y[dealt], np.cumsum([0, *map(len, each)])
    for i, client in enumerate(map(slice, ends[:-1], ends[1:])):
        if split.transform is not None and split.transform[i] != "none":
            x[client] = _transformed(split.transform[i], x[client])
        if split.relabel is not None:
            y[client] = split.relabel[i][y[client]]
    if split.relabel is not None:
        classes = int(split.relabel.max()) + 1
    new = _renumbered(parts)
    return _presence(x, new.train, split.words) if split.words else x, y, classes, new


def _presence(x: np.ndarray, train: Sequence[np.ndarray], words: int) -> np.ndarray:
    # Texts (n, length) as float32 (n, words): 1 for a word that is there. The words are those in
    # most of the training texts; token 0 fills texts up and is none.
    texts = x.ndim == 2 and x.dtype.kind in "iu" and x.dtype != np.uint8
    need(texts, f"words={words} is for texts; these samples are {x.dtype} {x.shape[1:]}")
    seen = np.sort(x[np.concatenate(train)], axis=1)
    first = np.ones(seen.shape, bool)  # of a word that a text has several times
    first[:, 1:] = seen[:, 1:] != seen[:, :-1]
    often = np.bincount(seen[first & (seen > 0)], minlength=int(x.max()) + 1)
    there = np.count_nonzero(often)
    need(there >= words, f"words={words}: the training texts that are dealt have {there}; lower it")
    column = np.full(len(often), -1)
    column[np.argsort(-often, kind="stable")[:words]] = np.arange(words)
    at = column[x]
    out = np.zeros((len(x), words), np.float32)
    out[np.nonzero(at >= 0)[0], at[at >= 0]] = 1
    return out


def _renumbered(parts: Sequence[Sequence[np.ndarray]]) -> Split:
    # The same lists where each client's samples follow each other, train, val and test.
    out: tuple[list, list, list] = ([], [], [])
    begin = 0
    for lists in zip(*parts, strict=True):
        for new, idx in zip(out, lists, strict=True):
            new.append(np.arange(begin, begin + len(idx)))
            begin += len(idx)
    return Split(*out)


def _transformed(name: str, x: np.ndarray) -> np.ndarray:
    # As images (n, h, w, c), transformed, and back.
    image = x.dtype == np.uint8 and x.ndim >= 3 or x.ndim == 4
    need(image, f"transform {name!r} is for images; these samples are {x.dtype} {x.shape[1:]}")
    last = x.dtype == np.uint8 and x.ndim == 4 and x.shape[3] in (1, 3)
    form = x[..., None] if x.ndim == 3 else x if last else x.transpose(0, 2, 3, 1)
    _, h, w, c = form.shape
    need(h == w or name not in ("turn90", "turn270"), f"transform {name!r}: {h} x {w} is no square")
    need(c == 3 or name != "swap", f"transform 'swap' is for 3 channels, these images have {c}")
    pixels = x.dtype == np.uint8 or name != "invert"
    need(pixels, "transform 'invert' is for pixels, uint8 of 0 to 255; these are floats")
    new = TRANSFORMS[name](form)
    return new[..., 0] if x.ndim == 3 else new if last else new.transpose(0, 3, 1, 2)
