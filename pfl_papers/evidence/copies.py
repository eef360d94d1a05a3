"""Copies of data sets: which of them committed runs used, and what is known of absent ones.

A copy is a data set as it lies on one machine, known by its checksum; some lack samples. What
results/pools.csv says of the copies that runs used stands in where no data lie.
"""

from __future__ import annotations

import json

import numpy as np

from pfl_core.data import pools, sources
from pfl_papers.evidence import tables

# Columns of a pool that partitions go by, besides the class.
GROUPS = ("alphabet", "coarse", "worker")


def checksums(name: str) -> list[str]:
    """Checksums of the copies of a data set that committed runs used."""
    known = tables.results().pools
    return known.checksum[known.name == name].tolist()


pools.register_copies(checksums)


def line(name: str, checksum: str) -> dict[str, object]:
    """The line of pools.csv about a copy: column -> value.

    It is made from the data if this copy is here, else taken from pools.csv; failing both, it has
    only name and checksum.
    """
    try:
        pool = pools.load(name)
    except (pools.DatasetMissing, ValueError):
        pool = None
    if pool is None or pool.checksum != checksum:
        known = tables.results().pools
        known = known[(known.name == name) & (known.checksum == checksum)]
        found = {str(k): v for k, v in known.iloc[0].items()} if len(known) else {}
        return found or {"name": name, "checksum": checksum}
    return dict(
        name=name,
        checksum=checksum,
        samples=pool.n,
        test=int(pool.is_test.sum()),
        classes=pool.classes,
        shape="x".join(map(str, pool.x.shape[1:])),
        copy=_differs(pool),
        labels=json.dumps(_labels(pool), separators=(",", ":")),
    )


def _differs(pool: pools.Pool) -> str:
    # How a copy of a public set differs from what its makers published, "" if it does not.
    published, test = official(pool.name), int(pool.is_test.sum())
    if sum(published) == 0 or (pool.n - test, test) == published:
        return ""
    if pool.n == sum(published):
        return f"all {pool.n:,} samples, {test:,} of them drawn for test"
    return f"{pool.n:,} of {sum(published):,} samples, {test:,} of them for test"


def official(name: str) -> tuple[int, ...]:
    """How many training and test samples a data set's makers published; (0, 0) if not known."""
    source = sources.SOURCES.get(name)
    return source.official if source else (0, 0)


def _labels(pool: pools.Pool) -> dict[str, list]:
    # Numbers of samples by official part, class and group; the last column is the number.
    groups = [name for name in GROUPS if name in pool.extra]
    columns = np.column_stack(
        [pool.is_test, pool.y, *(pool.extra[name] for name in groups)]
    ).astype(np.int64)
    which, number = np.unique(columns, axis=0, return_counts=True)
    return {
        "columns": ["test", "class", *groups],
        "lines": np.column_stack([which, number]).tolist(),
    }


def labels_of(name: str) -> pools.Pool | None:
    """A data set that is not here as a Pool of its labels, sorted, with empty samples.

    A partition that goes by class gives every client as many of each class as it would with the
    data; one that draws from a mixture of classes gives other numbers. None if pools.csv does not
    have the data set.
    """
    known = tables.results().pools
    known = known[(known.name == name) & (known.labels != "")]
    if known.empty:
        return None
    table, classes = json.loads(known.labels.iloc[0]), int(known.classes.iloc[0])
    *columns, number = np.array(table["lines"]).T
    test, y, *groups = (np.repeat(c, number) for c in columns)
    extra = dict(zip(table["columns"][2:], groups, strict=True))
    return pools.Pool(
        name, np.zeros((len(y), 1, 1), np.uint8), y, test.astype(bool), classes, extra
    )


def coarse_classes(name: str, clients: int) -> np.ndarray:
    """The coarse class of each client that the partition `coarse` deals to: (K,) int.

    Clients are dealt to coarse classes in equal shares, one class after the other. Where the data
    are not here, pools.csv says how many there are.

    Raises
    ------
    DatasetMissing
        If pools.csv has not got the data set either.
    """
    try:
        pool = pools.load(name)
    except pools.DatasetMissing:
        if (pool := labels_of(name)) is None:
            raise
    return np.arange(clients) * len(np.unique(pool.extra["coarse"])) // clients
