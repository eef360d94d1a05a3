"""Copies of data sets: which of them committed runs used, and what pools.csv says of data that are not here."""

from __future__ import annotations

import json

import numpy as np

from pfl_core.data import pools, sources
from pfl_core.experiments import tables

GROUPS = (
    "alphabet",
    "coarse",
    "worker",
)  # columns of a pool by which partitions deal, besides the class


def checksums(name: str) -> list[str]:
    """Checksums of the copies of a data set that committed runs used."""
    known = tables.results().pools
    return known.checksum[known.name == name].tolist()


def checksum(name: str) -> str:
    """The checksum of the data that are here, else of the copy that committed runs used; DatasetMissing where there is neither."""
    try:
        return pools.load(name).checksum
    except pools.DatasetMissing:
        if known := checksums(name):
            return known[0]
        raise


def line(name: str, of: str) -> dict[str, object]:
    """What pools.csv says of a copy: of the data that are here, else what it has said; of neither only the checksum."""
    try:
        pool = pools.load(name)
    except (pools.DatasetMissing, ValueError):
        pool = None
    if pool is None or pool.checksum != of:
        known = tables.results().pools
        known = known[(known.name == name) & (known.checksum == of)]
        return known.iloc[0].to_dict() if len(known) else {"name": name, "checksum": of}
    shape = "x".join(map(str, pool.x.shape[1:]))
    sizes = dict(samples=pool.n, test=int(pool.is_test.sum()), classes=pool.classes)
    return dict(
        name=name,
        checksum=of,
        **sizes,
        shape=shape,
        copy=_differs(pool),
        labels=json.dumps(_labels(pool), separators=(",", ":")),
    )


def _differs(pool: pools.Pool) -> str:
    # How a copy of a public set differs from what its makers published, "" if it does not.
    source = sources.SOURCES.get(pool.name)
    official = source.official if source else (0, 0)
    test = int(pool.is_test.sum())
    if sum(official) == 0 or (pool.n - test, test) == official:
        return ""
    if pool.n == sum(official):
        return f"all {pool.n:,} samples, {test:,} of them drawn for test"
    return f"{pool.n:,} of {sum(official):,} samples, {test:,} of them for test"


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
    """The labels of a data set that is not here, sorted, without samples; None where pools.csv does not have it.

    A partition that deals by class deals as many of each as of the data themselves; where it draws from a mixture, chance decides anew.
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
