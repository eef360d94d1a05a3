"""What an id is made of: the fields of an Experiment `e`, each in one form.

Equal computations have equal keys, however their values are written: `lr=1` is `1.0`, `-0.0` is
`0`, a numpy scalar is its number, and a value that is spelled out is left out where it is the
default of its field, hyper-parameter, option or argument. Numbers whose type is not declared, as
those in lists, keep their type in the Experiment; in the key `1.0` is `1`. A bool is no number.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pfl_core import models, optim
from pfl_core.data import augment, shifts
from pfl_core.data import partition as partitions
from pfl_core.data.checksum import Checksum
from pfl_core.engine import finetune
from pfl_core.engine.participation import participants
from pfl_core.methods.base import METHODS
from pfl_core.util import checks, identity

# The partition_args that every scheme has: which of its clients are those of an Experiment.
WHICH = ("of", "first", "every")
# Options of models whose default is not what it says: the data decide.
BY_DATA = ("vocab",)
NONE = inspect.Parameter.empty


class Declared(NamedTuple):
    """What is said of an argument where it is declared; NONE: nothing."""

    kind: Any
    default: Any


ARGS = {"partition_args": "partition", "model_args": "model", "method_args": "method"}
ARGS |= {f"{field}_args": field for field in optim.KINDS}


def _declared(e: Any, field: str) -> dict[str, Declared]:
    # What the arguments in a field are declared as; ValueError for an unknown model or partition.
    name, args = getattr(e, ARGS[field]), getattr(e, field)
    if field == "partition_args" and e.dataset == "own":  # a Federation has none
        return {}
    if field not in ("partition_args", "model_args"):
        kinds: dict[str, Any] = METHODS if field == "method_args" else optim.KINDS[ARGS[field]]
        fields = dataclasses.fields(kinds[name]) if name in kinds else ()
        return {f.name: Declared(f.type, _default(f)) for f in fields}
    of_model = field == "model_args"
    found = models.options_of(name, args) if of_model else partitions.arguments(name)
    out = {n: Declared(p.annotation, p.default) for n, p in found.items()}
    if of_model:
        return out | {n: Declared(out[n].kind, NONE) for n in BY_DATA if n in out}
    common = dict.fromkeys(WHICH, Declared(int, NONE))
    common |= dict.fromkeys(shifts.LISTS, Declared(list, None))
    return common | {"words": Declared(int, None)} | out


def _default(f: dataclasses.Field) -> Any:
    if f.default_factory is not dataclasses.MISSING:
        return f.default_factory()
    return NONE if f.default is dataclasses.MISSING else f.default


def cast(e: Any, field: str) -> dict[str, Any]:
    """The arguments in a field of an Experiment, with numbers of their declared types."""
    kinds, args = _declared(e, field), getattr(e, field)
    return {n: checks.cast(v, kinds[n].kind if n in kinds else NONE) for n, v in args.items()}


def scalar(value: Any) -> Any:
    """What JSON keeps of a numpy scalar inside of a list; TypeError for all else."""
    if (number := checks.cast(value, NONE)) is not value:
        return number
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def canonical(e: Any) -> dict[str, Any]:
    """The fields that may be written in several ways, in the form that the key has."""
    k = e.clients or 1  # of own data None, until they are there
    everyone = participants(e.participation, k) == k and not getattr(e, "client_dropout", 0)
    return {
        **{field: _args(e, field) for field in ARGS},
        "partition_seed": None if e.partition_seed == e.seed else e.partition_seed,
        "eval_after": None if e.eval_after == everyone else e.eval_after,
        "record": sorted(set(e.record)),
        "metrics": sorted(set(getattr(e, "metrics", ()))),
        # Runs of earlier versions say nothing of it.
        "finetune": finetune.canonical(getattr(e, "finetune", []), e.lr),
        "augment": _plain(augment.canonical(getattr(e, "augment", []))),
        "plugins": [],  # what comes from them counts, see `Experiment.code`
        **_computed_otherwise(e, everyone),
    }


def _computed_otherwise(e: Any, everyone: bool) -> dict[str, Any]:
    # Runs that version 0.3 computes otherwise than the ones before are others.
    method = METHODS.get(e.method)
    frozen = getattr(e, "adopt", False) and e.rounds and not (method and method.adopts)
    out = {"adopt": "by a server that does not learn"} if frozen else {}
    if getattr(e, "stragglers", 0) and e.eval_after and not everyone:
        out["stragglers"] = f"{e.stragglers}, also in the last evaluation"
    return out


def _args(e: Any, field: str) -> dict[str, Any]:
    kinds, out = _declared(e, field), {}
    for n, v in getattr(e, field).items():
        kind, default = kinds.get(n, Declared(NONE, NONE))
        plain = v if _is_number(v) and checks.is_number(kind) else _plain(v)
        if default is NONE or _text(v) != _text(checks.cast(default, kind)):
            out[n] = plain
    return _shifts(e.partition, _which(e.clients, out)) if field == "partition_args" else out


def _shifts(partition: str, args: dict[str, Any]) -> dict[str, Any]:
    # A list that clients take in turn once, and not at all where it changes nothing.
    shared = partitions.common(partition, args) if args else {}
    short = {n: shifts.shortest(n, shared[n]) for n in shifts.LISTS if n in shared}
    return {n: short.get(n, v) for n, v in args.items() if short.get(n) != []}


def _which(clients: int, args: dict[str, Any]) -> dict[str, Any]:
    # Without what all clients of a split for so many are called anyhow.
    if args.get("of") == clients:
        args = {n: v for n, v in args.items() if n not in WHICH}
    gone = {"first": 0, "every": args.get("every") if clients == 1 else 1}
    return {n: v for n, v in args.items() if n not in gone or v != gone[n]}


def _is_number(v: Any) -> bool:
    return type(v) in (int, float)


def _plain(v: Any) -> Any:
    # Numbers in one form, at any depth.
    if isinstance(v, dict):
        return {str(n): _plain(x) for n, x in v.items()}
    if isinstance(v, list | tuple):
        return [_plain(x) for x in v]
    return int(v) if isinstance(v, float) and v.is_integer() else v


def _text(v: Any) -> str:
    return json.dumps(_plain(v), sort_keys=True, default=repr)


def brought(e: Any, checksum: str) -> str:
    """A digest of the tensors that a registered model brings along, such as weights from a file.

    It is built under two seeds: what is equal in both counts by content, what is drawn by name,
    shape and type. "" for our own networks, and where the data are not here: then `checksum` is a
    text that knows no shapes.
    """
    ours = all(map(identity.is_ours, models.functions(e.model, e.model_args)))
    if ours or not isinstance(checksum, Checksum):
        return ""
    words = e.partition_args.get("words")  # that texts become vectors of
    shape = (words,) if words else checksum.input_shape
    options = ({} if words else checksum.options) | e.model_args
    one, other = (
        dict(_tensors(models.build(e.model, shape, checksum.classes, s, **options))) for s in (0, 1)
    )
    about = {n: [v[0], v[1] if v == other.get(n) else ""] for n, v in one.items()}
    return hashed(about)


def _tensors(model: nn.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    # {name: (what it is, its content)}; of lazy ones the shape is not known yet.
    named = dict(model.named_parameters(remove_duplicate=False))
    for n, v in (named | dict(model.named_buffers(remove_duplicate=False))).items():
        about = f"{v.dtype} {v.requires_grad}"
        if is_lazy(v):
            yield n, (about, "")
            continue
        flat = v.detach().cpu().resolve_conj().reshape(-1).contiguous()
        raw = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
        content = hashlib.sha256(raw.view(torch.uint8).numpy().tobytes()).hexdigest()
        yield n, (f"{about} {tuple(v.shape)}", content)


def hashed(key: dict[str, Any]) -> str:
    """The id that a key has: 16 hex digits."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
