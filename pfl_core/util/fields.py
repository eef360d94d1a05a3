"""What a value may be, said once where it is declared: of Experiments, methods, models, partitions.

    class Mine(Method):
        lam: float = number(1.0, low=0, doc="pull to the global model; 0 is FedAvg")
        start: str = choice("own", "global", doc="the model that local training starts from")
        scaled: bool = value(True, doc="whether features are scaled")

The annotation is the type; `float | None` allows None, too, whose meaning `doc` says. Of a method's
hyper-parameter, `doc` also says at which value the method becomes another one, and in parentheses
where the default is from. A plain `lam: float = 1.0` is one of any finite value. Errors, help and
documentation read the declaration, and so does a random search: `search=log_uniform(0.01, 1)` says
which values are worth a try. In a subclass `lam = 2.0` is another default, and all else stays.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pfl_core.util import checks

ASIDE = 0.2  # in what share of its draws a search takes one of the values beside its range


@dataclass(frozen=True)
class Range:
    """Numbers from `low` (or `above`, which is left out) to `high` (or `below`); None is no end."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    def __contains__(self, v: float) -> bool:
        fits_low = (self.low is None or v >= self.low) and (self.above is None or v > self.above)
        fits_high = (self.high is None or v <= self.high) and (self.below is None or v < self.below)
        return fits_low and fits_high

    def __str__(self) -> str:
        least = self.low if self.above is None else self.above
        most = self.high if self.below is None else self.below
        if least is None or most is None:
            signs = {">=": self.low, ">": self.above, "<=": self.high, "<": self.below}
            return "".join(f"{sign} {end}" for sign, end in signs.items() if end is not None)
        left, right = "[" if self.above is None else "(", "]" if self.below is None else ")"
        return f"in {left}{least}, {most}{right}"


@dataclass(frozen=True)
class Search:
    """What a random search draws a value from: `values`, and a range from `low` to `high`.

    With both, a value beside the range comes in a fifth of the draws.
    """

    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0  # as low: no range
    log: bool = False

    def __post_init__(self) -> None:
        ends = f"{self.low!r}, {self.high!r}"
        if not np.isfinite([self.low, self.high]).all() or self.low > self.high:
            raise ValueError(f"a search from {ends}: allowed are numbers, the smaller one first")
        if self.log and self.low <= 0:
            raise ValueError(f"log_uniform({ends}): allowed are numbers > 0; also=(0,) adds a 0")
        if self.low == self.high and not self.values:
            raise ValueError("a search needs a range, or values: among(1, 2, 5)")

    def draw(self, rng: np.random.Generator) -> Any:
        """One of its values, or a number of its range to three digits."""
        first, second = rng.random(2)
        if self.low == self.high or self.values and first < ASIDE:
            return self.values[int(second * len(self.values))]
        ends = np.log([self.low, self.high]) if self.log else np.array([self.low, self.high])
        drawn = ends[0] + second * (ends[1] - ends[0])
        rounded = float(f"{np.exp(drawn) if self.log else drawn:.3g}")
        return min(max(rounded, float(self.low)), float(self.high))

    def __str__(self) -> str:
        values = ", ".join(map(repr, self.values))
        if self.low == self.high:
            return f"among {values}"
        span = f"{self.low:g} to {self.high:g}" + " on a log scale" * self.log
        return f"{span}, and {values}" if values else span


def log_uniform(low: float, high: float, also: tuple[Any, ...] = ()) -> Search:
    """Numbers of which the logarithm is uniform; a fifth of the draws are of the values `also`.

    Examples
    --------
    >>> str(log_uniform(0.001, 1, also=(0.0,)))
    '0.001 to 1 on a log scale, and 0.0'
    """
    return Search(tuple(also), low, high, log=True)


def uniform(low: float, high: float, also: tuple[Any, ...] = ()) -> Search:
    """Numbers between two ends, all alike; a fifth of the draws are of the values `also`."""
    return Search(tuple(also), low, high)


def among(*values: Any) -> Search:
    """Some values, all alike."""
    return Search(values)


# What parents declare of fields that are annotated anew. Ids read `metadata`: there it is not.
_of_parent: dict[dataclasses.Field, Mapping[str, Any]] = {}
Legal = Range | tuple[Any, ...] | None  # numbers between ends; some values; any of the type


def number(
    default: float | None,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    given: str = "",
    search: Search | None = None,
) -> Any:
    """A field that is a number: `low <= value <= high`, `above < value < below`.

    `search` is what a random search draws it from.
    """
    about = {"allowed": Range(low, high, above, below), "doc": doc, "given": given}
    about |= {"search": search}
    return field(default=default, metadata=about)


def choice(default: str, *others: str, doc: str, search: Search | None = None) -> Any:
    """A field that is one of some strings; `search` is what a random search draws it from."""
    about = {"allowed": (default, *others), "doc": doc, "search": search}
    return field(default=default, metadata=about)


def value(default: Any, doc: str, *, given: str = "", search: Search | None = None) -> Any:
    """A field that may be any value of its type: a bool, a tuple, a dict.

    `given` is the type of what may be given, where an object holds another; `search` is what a
    random search draws it from.
    """
    about = {"doc": doc, "given": given, "search": search}
    return _field(default, about)


def _field(default: Any, about: Mapping[str, Any]) -> Any:
    if isinstance(default, dict | list):  # each object gets one of its own
        return field(default_factory=lambda: copy.deepcopy(default), metadata=about)
    return field(default=default, metadata=about)


def frozen(cls: type) -> None:
    """Make a class a frozen dataclass that declares anew what it says of its parents' fields.

    A plain value is the default, whether it is annotated or not; all else stays as declared.
    """
    parents = [getattr(parent, "__dataclass_fields__", {}) for parent in cls.__mro__[:0:-1]]
    known: dict[str, dataclasses.Field] = {n: f for of in parents for n, f in of.items()}
    own = dict(cls.__annotations__)
    for name in known.keys() - own.keys():
        f, default = known[name], getattr(cls, name, known[name].default)
        if default is not f.default and not hasattr(default, "__get__"):
            cls.__annotations__[name] = f.type
            declared = isinstance(default, dataclasses.Field)
            setattr(cls, name, default if declared else _field(default, about(f)))
    dataclass(frozen=True, eq=False)(cls)
    for name in known.keys() & own.keys():
        f = vars(cls)["__dataclass_fields__"][name]
        if not f.metadata and _alike(f.type, known[name].type):
            _of_parent[f] = about(known[name])


def about(f: dataclasses.Field) -> Mapping[str, Any]:
    """What is declared of a field, by its class or by a parent of it."""
    return _of_parent.get(f, f.metadata)


def _alike(one: Any, other: Any) -> bool:
    # Whether a declaration of one type says something of another: float, and float | None.
    names = (getattr(t, "__name__", str(t)).split(" | ") for t in (one, other))
    return bool(set.intersection(*map(set, names)) - {"None"})


def searched(thing: Any) -> dict[str, Search]:
    """{field: what a random search draws it from} of those fields that declare it."""
    found = {f.name: about(f).get("search") for f in dataclasses.fields(thing)}
    return {name: search for name, search in found.items() if search is not None}


def kind(f: dataclasses.Field) -> str:
    """The type of what may be given for a field."""
    return about(f).get("given") or getattr(f.type, "__name__", str(f.type))


def allowed(f: dataclasses.Field) -> str:
    """What a field may be, in words: "a number >= 0", "one of own, global"."""
    return said(kind(f), about(f).get("allowed"))


def said(kind: str, legal: Legal) -> str:
    """What a value of a type may be, in words."""
    if isinstance(legal, tuple):
        return "one of " + ", ".join(map(str, legal))
    words = {"int": "an integer", "float": "a number", "bool": "True or False"}
    parts = [words.get(part, part) for part in kind.split(" | ")]
    parts[0] = f"{parts[0]} {legal or ''}".strip()
    return " or ".join(parts)


def check(where: str, thing: Any) -> None:
    """Raise ValueError unless every field of `thing` (a dataclass) is what its declaration allows.

    The message says where, which, what was given and what is allowed.
    """
    for f in dataclasses.fields(thing):
        check_value(where, f, getattr(thing, f.name))


def check_value(where: str, f: dataclasses.Field, given: Any) -> None:
    """Raise ValueError unless a value is what a field's declaration allows, as `check` does."""
    legal = about(f).get("allowed")
    checks.kind(where, f.name, given, kind(f))
    if legal is not None and given is not None and given not in legal:
        raise ValueError(f"{where}({f.name}={given!r}): allowed is {allowed(f)}")


def check_names(where: str, cls: type, method: type) -> None:
    """Raise ValueError where a hyper-parameter of `cls` has a name that means something else.

    A hook or a setting of `method`, such as `loss` or `noise`, would be gone, or a function or
    property of `cls` or of a class that it stands on.
    """
    for f in dataclasses.fields(cls):
        taken = f.name in vars(method) or f.name in method.__annotations__
        hidden = [c for c in cls.__mro__ if hasattr(vars(c).get(f.name), "__get__")]
        if not (taken or hidden):
            continue
        owner = method if taken else hidden[0]
        raise ValueError(
            f"{where}({f.name}=...): a hyper-parameter cannot be called so, because "
            f"{owner.__name__}.{f.name} is there; choose another name, or write it without "
            "an annotation"
        )


def documented(doc: str, cls: type) -> str:
    """A class's docstring with a section on its hyper-parameters, for `help` and `Method?`."""
    out = [inspect.cleandoc(doc), "", "Hyper-parameters", "----------------"]
    for f in dataclasses.fields(cls):
        default = "" if f.default is dataclasses.MISSING else f", default {f.default!r}"
        out.append(f"{f.name} : {allowed(f)}{default}")
        if doc_of := about(f).get("doc"):
            out.append(f"    {doc_of}")
        if search := about(f).get("search"):
            out.append(f"    A random search draws it from {search}.")
    return "\n".join(out) + "\n" if dataclasses.fields(cls) else doc
