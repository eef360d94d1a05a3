"""Settings: what a run is but for its seed, in one short digest, which rows carry.

Runs with equal settings are replicates of one cell; others are never averaged. A digest is made of
an Experiment's plain values and of what decides numbers beside them: the data, the method's
revision, code that is not ours. Device, executor and version do not count, and neither does what is
only kept (models, probes).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
from collections.abc import Iterable
from numbers import Real
from types import SimpleNamespace
from typing import Any

from pfl_core.experiments import keys

SEEDS = ("seed", "partition_seed")
SILENT = ("plugins", "record", "metrics", "keep_models", "keep_scores")  # decide no number
ABOUT = ("revision", "pool", "source_pool", "code")  # of a run's meta
_MISSING = object()
# Of the settings that this process has met: what they are made of, and all values as written.
_known: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}


def setting(plain: dict[str, Any], meta: dict[str, Any]) -> str:
    """The setting of a run, 12 hex digits, from its Experiment's plain values and its meta."""
    about = {name: v for name in ABOUT if (v := meta.get(name))}
    about |= {"pool": meta["dealing"]} if meta.get("dealing") else {}  # the seed that deals is one
    values = _flat(plain) | {name: _number(v) for name, v in about.items()}
    if plain["dataset"] == "own" and plain["max_samples"] and "key" not in meta:
        values["max_samples"] = f"the first {plain['max_samples']}"  # as up to version 0.2
    text = json.dumps(values, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    if digest not in _known:
        _known[digest] = values, _flat(plain, whole=True)
    return digest


def _flat(plain: dict[str, Any], before: str = "", whole: bool = False) -> dict[str, Any]:
    # {field: value} of those that are not at their default, or of the `whole` as it is written;
    # fields of dicts as partition_args.alpha.
    out, usual = {}, {} if whole else _defaults()
    with contextlib.suppress(ValueError, LookupError, AttributeError):  # its code is not here
        plain = plain if whole else plain | keys.canonical(SimpleNamespace(**plain))
    for name, value in plain.items():
        if name in (*SEEDS, *SILENT) or value == usual.get(name, _MISSING):
            continue
        if name == "init_from":
            counts = {n: v for n, v in (value or {}).items() if n != "path"}  # of weights: content
            source = _flat(counts, f"{before}{name}.", whole)
            out |= {f"{before}{name}": bool(value)} | source
        elif isinstance(value, dict):
            out |= {f"{before}{name}.{key}": _number(inner) for key, inner in value.items()}
        else:
            out[before + name] = _number(value)
    return out


@functools.cache
def _defaults() -> dict[str, Any]:
    # Of an Experiment's fields; experiment.py lies above: it opens results/, whose rows have these.
    return importlib.import_module("pfl_core.experiments.experiment").defaults()


def _number(value: Any) -> Any:
    # One form of a number: 1 and 1.0 decide the same.
    if isinstance(value, list | tuple):
        return [_number(v) for v in value]
    number = isinstance(value, Real) and not isinstance(value, bool)
    return float(value) + 0.0 if number else value


def differences(settings: Iterable[str]) -> dict[str, list[Any]]:
    """{field: its values} of all in which settings differ; None stands for a default.

    Empty where a setting was not met in this process, as of rows that were read from a file.
    """
    found = [_known.get(digest) for digest in dict.fromkeys(settings)]
    if None in found:
        return {}
    names = dict.fromkeys(name for values, _ in filter(None, found) for name in values)
    table = {name: [values.get(name) for values, _ in filter(None, found)] for name in names}
    apart = [n for n, values in table.items() if any(v != values[0] for v in values)]
    return {n: [v.get(n, w.get(n)) for v, w in filter(None, found)] for n in apart}


def differences_text(settings: Iterable[str]) -> str:
    """Return in what settings differ: "partition_args.alpha (0.1, 1.0)"; "" if unknown."""
    said = []
    for name, values in differences(settings).items():
        texts = [_text(name, v) for v in dict.fromkeys(map(_hashable, values))]
        more = ["..."] * (len(texts) > 4)
        said.append(f"{name} ({', '.join(texts[:4] + more)})")
    return ", ".join(said)


def _hashable(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def _text(name: str, value: Any) -> str:
    if value is None:
        return "default"
    if name in ("pool", "code"):
        return str(value)[:8]
    return f"{value:g}" if isinstance(value, float) else str(value)
