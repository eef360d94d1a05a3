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
from types import SimpleNamespace
from typing import Any

from pfl_core.experiments import keys

SEEDS = ("seed", "partition_seed")
SILENT = ("plugins", "record", "keep_models")  # decide no number
ABOUT = ("revision", "pool", "code")  # of a run's meta
_MISSING = object()
_known: dict[str, dict[str, Any]] = {}  # what the settings are that this process has met


def setting(plain: dict[str, Any], meta: dict[str, Any]) -> str:
    """The setting of a run, 12 hex digits, from its Experiment's plain values and its meta."""
    values = _flat(plain) | {name: _number(v) for name in ABOUT if (v := meta.get(name))}
    text = json.dumps(values, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    _known.setdefault(digest, values)
    return digest


def _flat(plain: dict[str, Any], before: str = "") -> dict[str, Any]:
    # {field: value} of those that are not at their default; fields of dicts as partition_args.alpha
    out = {}
    with contextlib.suppress(ValueError, LookupError, AttributeError):  # its code is not here
        plain = plain | keys.canonical(SimpleNamespace(**plain))
    for name, value in plain.items():
        if name in (*SEEDS, *SILENT) or value == _defaults().get(name, _MISSING):
            continue
        if name == "init_from":
            counts = {n: v for n, v in value.items() if n != "path"}  # of weights, their content
            out |= {f"{before}{name}": True} | _flat(counts, f"{before}{name}.")
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
    whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) + 0.0 if whole or isinstance(value, float) else value


def differences(settings: Iterable[str]) -> dict[str, list[Any]]:
    """{field: its values} of all in which settings differ; None stands for a default.

    Empty where a setting was not met in this process, as of rows that were read from a file.
    """
    met = [_known.get(digest) for digest in dict.fromkeys(settings)]
    found = [values for values in met if values is not None]
    if len(found) < len(met):
        return {}
    names = dict.fromkeys(name for values in found for name in values)
    table = {name: [values.get(name) for values in found] for name in names}
    return {n: values for n, values in table.items() if any(v != values[0] for v in values)}


def in_words(settings: Iterable[str]) -> str:
    """In what settings differ: "partition_args.alpha (0.1, 1.0)"; "" where that is not known."""
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
