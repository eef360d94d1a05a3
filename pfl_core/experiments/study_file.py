"""The text of a study's file: read, and held to what it may say, before Experiments are made of it.

What one part of a file says, no other part silently replaces: a field has one value in a cell.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pfl_core.experiments.experiment import JSON_FIELDS
from pfl_core.util import checks

KINDS: dict[str, Any] = dict(base=dict, rows=dict, columns=dict, product=dict, tune=dict)
KINDS |= dict(table=dict, seeds=list, plugins=list, data=str)
WORDS = {dict: "a table", list: "a list", str: "a text"}
TUNE = ("choices", "draws", "draw_seed", "seeds", "keep", "when", "last", "metric")
TABLE = ("against", "metric", "select", "when", "average", "digits")
ELSEWHERE = {  # no fields of a base, a row, a column or a product, and what to write in their place
    "seed": "seeds = [0, 1] at the head of the file",
    "plugins": 'plugins = ["mine"] at the head of the file',
    "tags": "labels of rows and columns, which are the tags",
}
Changes = dict[str, Any]


def read(path: Path) -> dict[str, Any]:
    """{entry: value} of a file; rows are those of its product, too.

    Raises
    ------
    OSError, ValueError
        For a file that is not there or no TOML; for an unknown or ill-typed entry, and for a field
        that has two values in one cell.
    """
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # no text, no TOML, nested without end
        raise ValueError(f"{path} is no TOML file: {error}") from None
    for name, value in said.items():
        checks.known(f"{path}: entry", name, KINDS)
        _check_kind(f"{path}: {name}", value, KINDS[name])
    for part, known in (("tune", TUNE), ("table", TABLE)):
        for name in said.get(part, {}):
            checks.known(f"{path}: entry of {part}", name, known)
    if said.get("tune") == {}:
        raise ValueError(
            f"{path}: tune is empty; write choices = {{ lr = [0.01, 0.1] }}, or draws = 16"
        )
    _check_plain(path, said)
    said["rows"] = _rows(path, said.get("rows", {}), said.pop("product", {}))
    _check_one_value(path, said)
    return said


def _check_kind(where: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{where} is {value!r}; allowed is {WORDS[kind]}")


def _check_plain(path: Path, said: dict[str, Any]) -> None:
    # Seeds, names of modules, and fields that are said at another place.
    _check_seeds(f"{path}: seeds", said.get("seeds", [0]))
    tuned = said.get("tune", {}).get("seeds")
    if tuned is not None:
        _check_seeds(f"{path}: tune.seeds", tuned)
    if shared := {*(tuned or [])} & {*said.get("seeds", [0])}:
        raise ValueError(
            f"{path}: tune has the seeds {sorted(shared)}, which are reported, too; tune "
            "on others: seeds = [100, 101]"
        )
    for plugin in said.get("plugins", []):
        if not isinstance(plugin, str):
            raise ValueError(f"{path}: plugins has {plugin!r}; allowed are names of modules")
    for label in [*said.get("rows", {}), *said.get("columns", {})]:
        checks.name(f"{path}: a label", label)
    for where, changes in [*_parts(said), ("product", said.get("product", {}))]:
        _check_kind(f"{path}: {where}", changes, dict)
        for name in ELSEWHERE.keys() & changes.keys():
            raise ValueError(f"{path}: {where} has {name}; write {ELSEWHERE[name]}")


def _check_seeds(where: str, seeds: Any) -> None:
    whole = isinstance(seeds, list) and all((checks.whole(s) or 0) == s >= 0 for s in seeds)
    if not whole or any(isinstance(s, bool) for s in seeds) or len({*seeds}) < len(seeds):
        raise ValueError(f"{where} = {seeds!r}; allowed is a list of different integers >= 0")
    if not seeds:
        raise ValueError(f"{where} is an empty list; give one seed at least")


def _parts(said: dict[str, Any]) -> Iterator[tuple[str, Changes]]:
    # Where changes of an Experiment are said, and what they are.
    yield "base", said.get("base", {})
    for kind in ("row", "column"):
        for label, changes in said.get(f"{kind}s", {}).items():
            yield f"{kind} {label}", changes


def _rows(path: Path, rows: dict[str, Any], product: dict[str, Any]) -> dict[str, Changes]:
    # The rows, each with every combination of the lists of `product`.
    for name, values in product.items():
        if not isinstance(values, list) or not values:
            raise ValueError(
                f"{path}: product has {name} = {values!r}; allowed is a list of values"
            )
    if not rows and not product:
        raise ValueError(f'{path} has no rows; write [rows.FedAvg] and below it method = "fedavg"')
    out: dict[str, Changes] = {}
    for label, changes in (rows or {"": {}}).items():
        for values in itertools.product(*product.values()):
            more = dict(zip(product, values, strict=True))
            said = [label] * bool(label) + [_label(n, v) for n, v in more.items()]
            name = ", ".join(said)
            if name in out:
                raise ValueError(f"{path}: two rows are called {name!r}; say each value once")
            out[name] = _joined(f"{path}: row {label!r} and product", changes, more)
    return out


def _label(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{n} {v}" for n, v in value.items())
    return str(value) if name in ("method", "model", "dataset", "partition") else f"{name} {value}"


def _joined(where: str, first: Changes, then: Changes) -> Changes:
    # Both, the arguments of methods and the like together.
    _check_apart(where, _flat(first), _flat(then))
    both = first | then
    for name in JSON_FIELDS:
        inner = [c[name] for c in (first, then) if isinstance(c.get(name), dict)]
        if len(inner) == 2:
            both[name] = inner[0] | inner[1]
    return both


def _flat(changes: Changes) -> dict[str, Any]:
    # {field: value}, of arguments as method_args.mu.
    out: dict[str, Any] = {}
    for name, value in changes.items():
        inner = isinstance(value, dict) and name in JSON_FIELDS
        out |= {f"{name}.{n}": v for n, v in value.items()} if inner else {name: value}
    return out


def _check_apart(where: str, first: dict[str, Any], then: dict[str, Any]) -> None:
    if twice := [n for n in first if n in then and first[n] != then[n]]:
        raise ValueError(f"{where} both say {', '.join(twice)}; say it in one of them")


def _check_one_value(path: Path, said: dict[str, Any]) -> None:
    # A row that replaced what its column says would bear the column's label.
    for row, of_row in said["rows"].items():
        for column, of_column in said.get("columns", {}).items():
            where = f"{path}: row {row!r} and column {column!r}"
            _check_apart(where, _flat(of_row), _flat(of_column))


def check_tuned(side: str, label: str, changes: Changes, choices: Any, drawn: bool) -> None:
    """Raise ValueError where `choices` may replace what a row or a column (`side`) says.

    `drawn` says that these are what fields declare for a random search. A label is a tag, too.
    """
    tuned = {*_tuned(choices)}
    said = [*_flat(changes), f"tags.{side}"]
    if twice := [n for n in said if n in tuned or _owner(n) in tuned]:
        cure = "; without choices, draws are of all that fields declare: name some" * drawn
        raise ValueError(
            f"{side} {label!r} and tune.choices both say {', '.join(twice)}; "
            f"say it in one of them{cure}"
        )


def _owner(name: str) -> str:
    # Of method_args.mu method: another one begins without the arguments that are there.
    field, dot, _ = name.partition(".")
    return field.removesuffix("_args") if dot else ""


def _tuned(choices: Any) -> Iterator[str]:
    # The fields that choices set: of a grid or ranges, {"lr": [0.1, 1]}, or of a list of changes.
    if isinstance(choices, dict):
        values = {n: of if isinstance(of, list) else [of] for n, of in choices.items()}
        listed = [{n: v} for n, of in values.items() for v in of]
    else:
        listed = [c for c in choices if isinstance(c, dict)] if isinstance(choices, list) else []
    for changes in listed:
        yield from _flat(changes)
