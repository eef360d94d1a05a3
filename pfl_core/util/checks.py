"""Names and values that a user gives, checked.

An error says what was given, the nearest name that is known, and what is allowed.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import math
import operator
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

_TURNING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # right to left and back
KINDS: dict[str, Any] = {
    "str": str,
    "int": int,
    "bool": bool,
    "float": int | float,
    "dict": dict,
    "None": type(None),
}
KINDS |= {"tuple[str, ...]": tuple | list}


def known(what: str, given: Any, legal: Iterable[Any], instead: str = "") -> None:
    """Raise ValueError unless `given` is among `legal`.

    The error names `what` it is, the nearest legal value, all of them, and what to do `instead`.
    """
    legal = list(legal)
    if given in legal:
        return
    lower = {str(k).lower(): k for k in legal}
    near = difflib.get_close_matches(str(given).lower(), lower, 1)
    hint = f"did you mean {lower[near[0]]!r}? " if near else ""
    listed = ", ".join(map(str, legal)) or "none"
    raise ValueError(
        f"{what} {given!r} is unknown; {hint}known are {listed}"
        + (f"; {instead}" if instead else "")
    )


def kind(where: str, name: str, value: Any, declared: Any) -> None:
    """Raise ValueError unless `value` has the declared type, and is finite if it is a float.

    `declared` is an annotation, as text ("float | None") or as a type; annotations with types that
    are not in `KINDS` are not checked. The error says `where(name=value)`.
    """
    parts = _parts(declared)
    types = [KINDS[p] for p in parts if p in KINDS]
    right = any(isinstance(value, k) for k in types) and (
        not isinstance(value, bool) or "bool" in parts
    )
    if len(types) == len(parts) and not right:
        raise ValueError(
            f"{where}({name}={value!r}): got {type(value).__name__}, allowed is {' | '.join(parts)}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}({name}={value!r}): allowed is a finite number")
    _short(f"{where}({name})", value, "; write it as a float" * ("float" in parts))


def _short(where: str, value: Any, instead: str = "") -> None:
    # An integer that is longer may be too long to be printed, too.
    if isinstance(value, int) and value.bit_length() > 64:
        raise ValueError(
            f"{where}: got an integer of {value.bit_length()} bits, allowed are 64{instead}"
        )


def held(where: str, dtype: str, value: Any) -> None:
    """Raise ValueError where `dtype` makes infinity or 0 of a number in `value`, at any depth.

    `value` is a number, or lists and dicts of them; `where` says what it is in the error.
    """
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            held(where, dtype, inner)
        return
    _short(where, value)
    if not isinstance(value, float):
        return
    most, least = float(np.finfo(dtype).max), float(np.finfo(dtype).smallest_subnormal)
    if abs(value) > most or 0 < abs(value) < least:
        became, near = ("infinity", most) if abs(value) > 1 else ("0", least)
        raise ValueError(
            f"{where}: {dtype} makes {became} of {value!r}; allowed are 0 and numbers from "
            f"{least:.2g} to {most:.2g}" + "; float64 holds it" * (dtype == "float32")
        )


def name(where: str, given: Any) -> None:
    """Raise ValueError unless `given` is a text without control characters.

    Names and labels are printed, in tables and as names of files, too: what would break a line,
    turn writing round or steer a terminal is refused.
    """
    if not isinstance(given, str) or not given.strip():
        raise ValueError(f"{where}: got {given!r}, allowed is a text that is not empty")
    if steering(given):
        raise ValueError(
            f"{where}: {given!r} holds {', '.join(map(ascii, steering(given)))}; allowed is a text "
            "of one line without control characters"
        )


def steering(text: str) -> list[str]:
    """The characters of a text that are no part of one printed line."""
    odd = ("Cc", "Cs", "Zl", "Zp")  # control, half of a pair, separators of lines and paragraphs
    return [c for c in dict.fromkeys(text) if unicodedata.category(c) in odd or c in _TURNING]


def cast(value: Any, declared: Any) -> Any:
    """A number, bool or text as Python has it, of its declared type if that loses nothing.

    Numpy's scalars become Python's, -0.0 is 0.0, and an int is a float where a float is declared.
    All else is returned as it is: `kind` says what is wrong.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of an enum, its value
    if isinstance(value, float):
        return float(value) + 0.0
    value = int(value)
    with contextlib.suppress(OverflowError):
        if is_number(declared) == "float" and float(value) == value:
            return float(value)
    return value


def is_number(declared: Any) -> str:
    """ "int" or "float" where one of them is what is declared, beside None; else ""."""
    found = {"int", "float"} & set(_parts(declared))
    return found.pop() if len(found) == 1 else ""


def _parts(declared: Any) -> tuple[str, ...]:
    # The types of an annotation: of "Optional[float]" float and None.
    text = declared if isinstance(declared, str) else getattr(declared, "__name__", str(declared))
    return _parts_of(str(declared) if text in ("Optional", "Union") else text)


@functools.lru_cache(maxsize=1024)  # of the fields of an Experiment, every time that one is made
def _parts_of(text: str) -> tuple[str, ...]:
    text = text.replace("typing.", "").replace("NoneType", "None")
    for name in ("Optional", "Union"):
        if text.startswith(f"{name}[") and text.endswith("]"):
            inner = text[len(name) + 1 : -1].replace(", ", " | ")
            text = inner + " | None" * (name == "Optional" and "None" not in inner)
    return tuple(text.split(" | "))


def parameters(given: Any) -> dict[str, inspect.Parameter]:
    """What a function takes, by name."""
    with contextlib.suppress(TypeError):  # an object that is called may have no hash
        if given not in _SIGNATURES:
            _SIGNATURES[given] = inspect.signature(given).parameters
        return dict(_SIGNATURES[given])
    return dict(inspect.signature(given).parameters)


# Of schemes and models, every time that an Experiment is made; what a function holds is let go.
_SIGNATURES: MutableMapping[Any, Mapping[str, inspect.Parameter]] = WeakKeyDictionary()


def count(where: str, name: str, value: Any, what: str) -> None:
    """Raise ValueError unless `value` is an integer >= 1 or None; `what` says what is counted."""
    if value is not None and (whole(value) or 0) < 1:
        raise ValueError(f"{where}({name}={value!r}): allowed is an integer >= 1, {what}")


def whole(value: Any) -> int | None:
    """An integer of Python, numpy or torch as an int; None for anything else, True and 2.0 too."""
    if isinstance(value, bool | np.bool_) or getattr(value, "ndim", 0):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def takes(where: str, given: Any, *arguments: str) -> None:
    """Raise TypeError unless `given` is a function that can be called with these arguments."""
    try:
        inspect.signature(given).bind_partial(*arguments)
    except TypeError:
        got = f"{type(given).__name__} {getattr(given, '__name__', '')}".strip()
        raise TypeError(
            f"{where} got {got}; allowed is a function that is called as fn({', '.join(arguments)})"
        ) from None


def printable(what: Any) -> str:
    """A text of a run's files for a terminal: what would steer it is written out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(what))


def make_folder(path: Path, variable: str = "PFL_RUNS") -> None:
    """Make a folder; an OSError names the environment `variable` that decides where it is."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"cannot make the folder {path} ({error.strerror}); "
            f"set {variable} to a folder that can be written"
        ) from None


@contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Imports within it that fail raise ImportError, which says how to install what is missing.

    Parameters
    ----------
    name : str
        The extra of this package, such as "notebooks".
    what : str
        What needs it, as the message begins.
    """
    try:
        yield
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        raise ImportError(
            f'{what} needs the package {missing}: pip install "pfl-core[{name}]"'
        ) from error
