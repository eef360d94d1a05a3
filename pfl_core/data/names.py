"""Names of clients and classes: values of any kind as numbers, in an order that is defined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pfl_core.data import arrays
from pfl_core.util import checks

SHOWN = 5  # names in a message
MOST_DIGITS = 1000  # of a name that is a number; Python reads no more than 4300
EXACT = 2**53  # from here on floats are no longer all whole numbers: two of them may be one


def order(name: str) -> tuple[bool, int, str]:
    """Sorts names: whole numbers first and by size, then texts by alphabet."""
    number = name.isdecimal() and len(name) < MOST_DIGITS
    return not number, int(name) if number else 0, name


def some(names: Iterable[Any]) -> str:
    """The first few of them, for a message."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(str, names[:SHOWN])) + more


def plain(what: str, values: Any) -> np.ndarray:
    """One integer or one text a sample, (n,); ValueError for other values and missing ones."""
    listed = isinstance(values, list | tuple)
    v = np.array(values, object) if listed else arrays.array(what, values)
    v = v[:, 0] if v.ndim == 2 and v.shape[1] == 1 else v
    if not v.ndim:
        raise ValueError(f"{what} is a {type(values).__name__}; give a list or array, one a sample")
    if v.ndim != 1:
        raise ValueError(f"{what} has shape {v.shape}; give one value a sample, (n,)")
    if v.dtype.kind == "O":
        v = _of_objects(what, v)
    if v.dtype.kind == "f":
        _check_there(what, np.isnan(v))
        v = v.astype(np.int64) if (v == np.round(v)).all() and (abs(v) < EXACT).all() else v
    if v.dtype.kind not in "biuUT":
        raise ValueError(f"{what} holds {v.dtype}, such as {v[0]!s:.40}; {_instead(what, v)}")
    return v


def _instead(what: str, v: np.ndarray) -> str:
    if what == "y" and v.dtype.kind == "f":  # as texts each number would be a class
        return f"regression is not served; {arrays.SERVED}"
    return f"give integers or texts: {what}.astype(str)"


def _of_objects(what: str, v: np.ndarray) -> np.ndarray:
    import pandas as pd

    each = [one.item() if getattr(one, "ndim", 1) == 0 else one for one in v]
    if nested := [one for one in each if hasattr(one, "__len__") and not isinstance(one, str)]:
        served = f": more than a class a sample is not served; {arrays.SERVED}" * (what == "y")
        raise ValueError(
            f"{what} holds values of type {type(nested[0]).__name__}; give one integer or text a "
            f"sample{served}"
        )
    _check_there(what, np.array([bool(pd.isna(one)) for one in each], bool))
    kinds = {str if isinstance(one, str) else type(one) for one in each}
    if kinds <= {bool} or kinds <= {int, float}:
        return np.array(each, float if float in kinds else None)
    if kinds <= {str}:
        return np.array(each, str)
    found = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise ValueError(f"{what} holds values of type {found}; give either integers or texts")


def _check_there(what: str, missing: np.ndarray) -> None:
    if missing.any():
        raise ValueError(
            f"{what} is missing for {missing.sum()} of {len(missing)} samples, the first is sample "
            f"{missing.argmax()}; leave these samples out, or give them a value"
        )


def numbered(
    what: str, values: Any, names: Sequence[str] | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Values as numbers 0, 1, ..., (n,) int64, and what each number stands for.

    `names` are all that there are, in their order; without them they are those found, by `order`.
    """
    found, at = np.unique(plain(what, values).astype(str), return_inverse=True)
    texts = found.tolist()
    for text in texts:
        checks.name(what, text)
    names = sorted(texts, key=order) if names is None else names
    place = {name: k for k, name in enumerate(names)}
    if odd := [repr(text) for text in texts if text not in place]:
        raise ValueError(
            f"{what} holds {some(odd)}; allowed are {some(map(repr, names))}: leave these samples "
            "out, or say all that there are"
        )
    to = np.array([place[text] for text in texts], np.int64)
    return to[at.reshape(-1)] if texts else np.empty(0, np.int64), tuple(names)


def given(what: str, names: Any, count: int, of: str) -> tuple[str, ...]:
    """Names that a user gives, one for each of `count` things; ValueError for others."""
    if isinstance(names, str | dict | set) or not hasattr(names, "__len__"):
        raise ValueError(f"{what} is a {type(names).__name__}; give a list, a name for each {of}")
    texts = tuple(plain(what, list(names)).astype(str).tolist())
    for text in texts:
        checks.name(what, text)
    if twice := [repr(text) for text, n in Counter(texts).items() if n > 1]:
        raise ValueError(f"{what} has {some(twice)} more than once; give each {of} its own name")
    if len(texts) != count:
        raise ValueError(f"{what} has {len(texts)} names for {count}; give one for each {of}")
    return texts


def labels(y: Any, classes: Any, names: Any) -> tuple[np.ndarray, int, tuple[str, ...] | None]:
    """Labels as int64 (n,), the number of classes, and their names; None where they have none.

    Integers stay as they are. Texts are numbered, in the order of `names`, of a categorical's
    categories, or else by `order`; so are integers, where `names` are integers.
    """
    names = _categories(y) if names is None else names
    known = None if names is None else given("class_names", names, len(names), "class")
    numbers = arrays.array("y", y).dtype.kind not in "OUST"
    values = arrays.labels(y) if numbers else plain("y", y)
    values_named = names is not None and all(checks.whole(n) is not None for n in names)
    if values.dtype.kind in "UT" or values_named:
        values, known = numbered("y", values, known)
    else:
        values = arrays.labels(values)
    if known is None:
        return values, arrays.number_of_classes(classes, values), None
    if classes not in (None, len(known)):
        raise ValueError(
            f"classes={classes!r} and {len(known)} names of classes ({some(known)}); leave classes "
            "out, or name them all with class_names=[...]"
        )
    return values, len(known), known


def _categories(y: Any) -> Any:
    # Of pandas' categorical labels.
    categories = getattr(getattr(y, "dtype", None), "categories", None)
    return None if categories is None else list(categories)
