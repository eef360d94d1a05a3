"""Samples, labels and clients out of a pandas frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pfl_core.data import names
from pfl_core.util import checks

if TYPE_CHECKING:
    import pandas as pd


def columns(
    frame: Any, client: str, label: str, features: Sequence[str] | None, split: str
) -> tuple[np.ndarray, pd.Series, pd.Series, Any]:
    """Samples float32 (n, d), and of each its label, its client, and its part or the shares.

    `features` are by default all columns that are nothing else. `split` is a column unless it has a
    "/", as shares have.

    Raises
    ------
    ValueError
        For columns that are not there, not numbers, or have missing values.
    """
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise ValueError(
            f"frame is a {type(frame).__name__}; give a pandas DataFrame, as pd.read_csv(file) or "
            "frame.to_pandas()"
        )
    has = frame.columns
    if not has.is_unique:
        twice = names.some(map(repr, has[has.duplicated()].unique()))
        raise ValueError(f"frame has the columns {twice} more than once; give each its own name")
    if not len(frame):
        raise ValueError("frame has no rows; give one a sample")
    parts = [split] if isinstance(split, str) and "/" not in split else []
    for what, column in (("client", client), ("label", label), *(("split", s) for s in parts)):
        checks.known(f"frame's {what} column", column, list(has))
    taken = {client, label, *parts}
    if len(taken) < 2 + len(parts):
        raise ValueError(
            f"client={client!r}, label={label!r}{f', split={split!r}' * len(parts)}: one column "
            "cannot say two of them; give each its own"
        )
    if features is None:
        features = [name for name in has if name not in taken]
    x = _numbers(frame, _features(features, list(has), taken))
    return x, frame[label], frame[client], frame[split].tolist() if parts else split


def _features(given: Any, has: list[str], taken: set[str]) -> list[str]:
    if isinstance(given, str) or not hasattr(given, "__len__") or not len(given):
        raise ValueError(
            f"features={given!r}: give a list of one or more columns; the frame has {has}"
        )
    given = list(given)
    for column in given:
        checks.known("frame's feature column", column, has)
    if len(set(given)) < len(given):
        raise ValueError(f"features={given!r} names a column twice; name each once")
    if used := [name for name in given if name in taken]:
        raise ValueError(
            f"features={given!r} holds {names.some(used)}, which is the client, label or split; "
            "leave it out"
        )
    return given


def _numbers(frame: pd.DataFrame, features: list[str]) -> np.ndarray:
    import pandas as pd

    odd = [n for n in features if not pd.api.types.is_numeric_dtype(frame[n])]
    odd += [n for n in features if n not in odd and pd.api.types.is_complex_dtype(frame[n])]
    if odd:
        kinds = names.some(f"{n!r} ({frame[n].dtype})" for n in odd)
        raise ValueError(
            f"columns that are no numbers: {kinds}; make numbers of them, as "
            "pd.get_dummies(frame, columns=[...]), or leave them out with features=[...]"
        )
    with np.errstate(over="ignore"):  # what float32 cannot hold is refused below
        x = frame[features].to_numpy(np.float32, na_value=np.nan)
    if not (finite := np.isfinite(x)).all():
        bad = np.flatnonzero(~finite.all(0))
        held = names.some(f"{features[j]!r} ({(~finite[:, j]).sum()})" for j in bad)
        raise ValueError(
            f"columns with values that are missing, or not finite as float32 (so many): {held}, "
            f"the first in row {np.flatnonzero(~finite.all(1))[0]}; fill them, as "
            "frame.fillna(...), or leave these rows out, as frame.dropna()"
        )
    return x
