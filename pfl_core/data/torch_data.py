"""Samples, labels and clients out of torch's data sets."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from pfl_core.data import arrays, files, names

ALLOWED_IMAGES = ("L", "RGB")
TWICE = 16  # samples of a data set that are read twice: so many coins seldom fall alike


class Read(NamedTuple):
    """Samples client by client, and of each its label, client and part."""

    x: np.ndarray
    y: list[Any]
    client: np.ndarray
    part: list[str]
    clients: tuple[str, ...]
    classes: tuple[str, ...] | None


def read(datasets: Any, clients: Any, val: Any, test: Any) -> Read:
    """All samples of all clients, train, val and test one after another.

    Parameters
    ----------
    datasets, val, test
        A list of one Dataset a client, or {name: Dataset}; or one Dataset, which `clients` divides.
    clients
        A list of one list of indices a client, or {name: indices}.

    Raises
    ------
    ValueError
    """
    if clients is not None:
        datasets = _divided(datasets, clients, val, test)
    mine = {"train": _named("datasets", datasets)}
    known = sorted(mine["train"], key=names.order)
    for part, given in (("val", val), ("test", test)):
        mine |= {} if given is None else {part: _named(part, given)}
        if part in mine and set(mine[part]) != set(known):
            raise ValueError(
                f"{part} has data sets of {names.some(mine[part])}, and train of "
                f"{names.some(known)}; give one for each client in both"
            )
    parts = [part for part in files.SPLITS if mine.get(part)]
    every = [(part, name, mine[part][name]) for part in parts for name in known]
    _check_owners(every)
    x, y = _samples(every)
    sizes = [len(dataset) for *_, dataset in every]
    place = {name: k for k, name in enumerate(known)}
    who = np.repeat([place[name] for _, name, _ in every], sizes)
    part = np.repeat([part for part, *_ in every], sizes).tolist()
    return Read(x, y, who, part, tuple(known), _classes([d for *_, d in every]))


def _divided(dataset: Any, clients: Any, val: Any, test: Any) -> dict[str, Any]:
    if not isinstance(dataset, Dataset) or val is not None or test is not None:
        raise ValueError(
            "clients= divides one Dataset, without val and test; of several data sets give a list, "
            "one a client"
        )
    n = _length("datasets", dataset)
    by_name = isinstance(clients, Mapping)
    lists = arrays.index_lists(list(clients.values()) if by_name else clients, "clients", 0)
    texts = names.given(
        "clients", list(clients if by_name else range(len(lists))), len(lists), "client"
    )
    for name, index in zip(texts, lists, strict=True):
        if len(index) and not (0 <= index.min() and index.max() < n):
            raise ValueError(
                f"indices of client {name!r} reach {index.min()}..{index.max()}; allowed: "
                f"0..{n - 1}"
            )
    return {name: Subset(dataset, index.tolist()) for name, index in zip(texts, lists, strict=True)}


def _named(part: str, given: Any) -> dict[str, Any]:
    # {client's name: Dataset}
    if isinstance(given, Dataset):
        raise ValueError(
            f"{part} is one {type(given).__name__}; give a list of one Dataset a client, or say "
            "who holds which samples: clients=[[0, 1], [2, 3]]"
        )
    if not isinstance(given, Mapping | list | tuple) or not len(given):
        raise ValueError(
            f"{part} is {type(given).__name__} {given!r:.40}; give a list of one torch Dataset a "
            "client, or a dict {name: Dataset}"
        )
    each = given if isinstance(given, Mapping) else dict(enumerate(given))
    texts = names.given(part, list(each), len(each), "client")
    for name, dataset in zip(texts, each.values(), strict=True):
        _length(f"{part} of client {name!r}", dataset)
    return dict(zip(texts, each.values(), strict=True))


def _length(what: str, dataset: Any) -> int:
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise ValueError(f"{what} is a DataLoader; give its data set, loader.dataset")
    kinds = type(dataset).__mro__
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if Dataset not in kinds or IterableDataset in kinds or not sized:
        raise ValueError(
            f"{what} is a {type(dataset).__name__}; give a torch Dataset with a length and indices"
        )
    return len(dataset)


def _place(dataset: Any, i: int) -> tuple[Any, int]:
    # The data set in which sample i of a Subset or ConcatDataset lies, at any depth, and where.
    while isinstance(dataset, Subset | ConcatDataset):
        i += len(dataset) * (i < 0)
        if isinstance(dataset, Subset):
            dataset, i = dataset.dataset, int(dataset.indices[i])
        else:
            k = bisect.bisect_right(dataset.cumulative_sizes, i)
            i -= dataset.cumulative_sizes[k - 1] if k else 0
            dataset = dataset.datasets[k]
    return dataset, i + len(dataset) * (i < 0)


def _check_owners(every: list[tuple[str, str, Any]]) -> None:
    # ValueError for a sample that is listed twice: it could be trained on and tested.
    owner: dict[tuple[int, int], str] = {}
    for part, name, dataset in every:
        here = f"{part} of client {name!r}"
        for i in range(len(dataset)):
            base, at = _place(dataset, i)
            if (id(base), at) in owner:
                raise ValueError(
                    f"sample {at} of a {type(base).__name__} is in {owner[id(base), at]} and in "
                    f"{here}; list each sample once. Clients that share a test set are "
                    "Federation(x, y, train=[...], test=[...])"
                )
            owner[id(base), at] = here


def _samples(every: list[tuple[str, str, Any]]) -> tuple[np.ndarray, list[Any]]:
    total = sum(len(dataset) for *_, dataset in every)
    if not total:
        raise ValueError("the data sets hold no sample; give some")
    x, y, first = np.empty(0), [], ""
    seen: Counter[int] = Counter()
    for part, name, dataset in every:
        for i in range(len(dataset)):
            where = f"sample {i} of {part} of client {name!r}"
            sample, label = _pair(dataset, i, where)
            base, _ = _place(dataset, i)
            seen[id(base)] += 1
            if seen[id(base)] <= TWICE:
                _check_fixed(dataset, i, sample, where)
            if not y:
                x, first = np.empty((total, *sample.shape), sample.dtype), where
            if (sample.shape, sample.dtype) != (x.shape[1:], x.dtype):
                raise ValueError(
                    f"{where} is {sample.dtype} {sample.shape}, and {first} is {x.dtype} "
                    f"{x.shape[1:]}; give all one type and shape, by a transform of the data set"
                )
            x[len(y)] = sample
            y.append(label)
    return x, y


def _pair(dataset: Any, i: int, where: str) -> tuple[np.ndarray, Any]:
    try:
        pair = dataset[i]
    except IndexError as error:
        raise ValueError(f"{where} is not in its data set: {error}") from error
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(
            f"{where} is a {type(pair).__name__}; a Dataset's samples are (sample, label)"
        )
    sample, label = pair
    if (mode := getattr(sample, "mode", None)) is not None and hasattr(sample, "getbands"):
        if mode not in ALLOWED_IMAGES:
            raise ValueError(
                f"{where} is an image of mode {mode}; allowed are L and RGB: image.convert('RGB')"
            )
        sample = np.asarray(sample)
    label = label.item() if getattr(label, "ndim", 1) == 0 else label
    return arrays.array(where, sample), label


def _check_fixed(dataset: Any, i: int, sample: np.ndarray, where: str) -> None:
    again, _ = _pair(dataset, i, where)
    if not np.array_equal(again, sample, equal_nan=sample.dtype.kind == "f"):
        raise ValueError(
            f"{where} is another each time that it is read, as by a random transform; samples are "
            "read once and stay: take that transform away"
        )


def _classes(datasets: list[Any]) -> tuple[str, ...] | None:
    # The names of classes that torchvision's data sets have, where all have the same and labels
    # are not changed.
    found = []
    for base in (_place(d, 0)[0] for d in datasets if len(d)):
        changed = getattr(base, "target_transform", None) is not None
        found.append(() if changed else tuple(getattr(base, "classes", None) or ()))
    alike = found[0] if len(set(found)) == 1 else ()
    return alike if alike and all(isinstance(name, str) for name in alike) else None
