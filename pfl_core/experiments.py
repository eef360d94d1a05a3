"""Experiment: everything that decides a run's numbers, frozen and hashed; its federation and its bound method."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from pfl_core import checks, data, models, probes
from pfl_core import partition as partitions
from pfl_core.batched import PRECISIONS
from pfl_core.cards import card
from pfl_core.federation import PLANS, Federation
from pfl_core.methods.base import Method, Task, head_models, make_method

SCHEMA = 1  # of the run store; a run of another schema is computed again
TAGS = ("paper", "artefact", "row", "column", "profile")
_SOME = ("of", "first", "every")  # partition_args that every scheme has
_RANGES = {  # field: (test, what is allowed)
    "clients": (lambda v: v >= 1, "an integer >= 1"),
    "rounds": (lambda v: v >= 0, "an integer >= 0"),
    "participation": (lambda v: 0 < v <= 1, "a share in (0, 1]"),
    "epochs": (lambda v: v >= 0, "an integer >= 0"),
    "steps": (lambda v: v >= 0, "an integer >= 0 (0: count in epochs)"),
    "batch": (lambda v: v >= 1, "an integer >= 1"),
    "plan": (PLANS.__contains__, "one of " + ", ".join(PLANS)),
    "lr": (lambda v: v >= 0, "a number >= 0"),
    "momentum": (lambda v: 0 <= v < 1, "a number in [0, 1)"),
    "weight_decay": (lambda v: v >= 0, "a number >= 0"),
    "clip": (lambda v: v >= 0, "a number >= 0 (0: no clipping)"),
    "buffers": (("local", "average", "reset").__contains__, "one of local, average, reset"),
    "head_depth": (lambda v: v >= 0, "an integer >= 0"),
    "head_by": (("block", "child", "module", "tensor").__contains__, "one of block, child, module, tensor"),
    "head_init": (("common", "own").__contains__, "common or own"),
    "holdout": (lambda v: 0 <= v < 1, "a share in [0, 1)"),
    "normalize": (("dataset", "half").__contains__, "dataset (its mean and std) or half ((x - .5) / .5)"),
    "max_samples": (lambda v: v >= 0, "an integer >= 0 (0: all)"),
    "eval_every": (lambda v: v >= 1, "an integer >= 1"),
    "seed": (lambda v: v >= 0, "an integer >= 0"),
    "partition_seed": (lambda v: v is None or v >= 0, "an integer >= 0, or None"),
    "dtype": (("float32", "float64").__contains__, "float32 or float64"),
    "precision": (PRECISIONS.__contains__, "one of " + ", ".join(PRECISIONS)),
}


@dataclass(frozen=True, eq=False)
class Experiment:
    """Everything that decides a run's numbers, as plain values; checked at construction.

    Training: `epochs` (or `steps`) of SGD on batches of `batch` a round, drawn by `plan` (see Federation.plan). `buffers`: BatchNorm
    statistics stay "local", are "average"d, or "reset". `max_samples` caps each client's train, val and test lists.
    `head_depth` layers counted from the end by `head_by` are the head. `seed` decides
    initial model, participants and batches; `init_from` starts from another experiment's end: its models, or with `adopt` its server,
    these clients being new to it. `partition_seed` (default: seed) who holds what. `partition_args` are the scheme's; with `of` among
    them it deals to that many, and the clients here are numbers `first`, `first` + `every`, ... of them: one group, or those who are
    new to the others. `precision` of local training in float32: "full", "tf32" (a GPU's products of matrices and convolutions, evaluation
    too), "bf16" (products of the training loss in bfloat16). `record` names probes (`probes.PROBES`), whose arrays
    the Result keeps. `tags` label rows and are not hashed.
    Raises ValueError naming the field, the value, and what is allowed.
    """

    dataset: str = "digits"
    partition: str = "dirichlet"
    partition_args: dict = field(default_factory=dict)
    clients: int = 10
    model: str = "cnn"
    model_args: dict = field(default_factory=dict)
    method: str = "fedavg"
    method_args: dict = field(default_factory=dict)
    rounds: int = 10
    participation: float = 1.0
    epochs: int = 1
    steps: int = 0
    batch: int = 32
    plan: str = "wrap"
    shuffle: bool = True
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    buffers: str = "local"
    head_depth: int = 1
    head_by: str = "block"
    head_init: str = "common"
    holdout: float = 0.0
    normalize: str = "dataset"
    max_samples: int = 0
    eval_every: int = 1
    eval_after: bool = True
    seed: int = 0
    partition_seed: int | None = None
    dtype: str = "float32"
    precision: str = "full"
    keep_models: bool = False
    init_from: Experiment | None = None
    adopt: bool = False
    record: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    tags: dict = field(default_factory=dict)

    def __new__(cls, *args: Any, **fields: Any) -> Experiment:
        """As always, after a look at the names of the fields."""
        for name in fields:
            checks.known("field of an Experiment:", name, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            checks.kind("Experiment", f.name, getattr(self, f.name), f.type)
        for name, (legal, allowed) in _RANGES.items():
            if not legal(getattr(self, name)):
                raise ValueError(f"Experiment({name}={getattr(self, name)!r}): allowed is {allowed}")
        if self.precision != "full" and self.dtype != "float32":
            raise ValueError(
                f"Experiment(precision={self.precision!r}, dtype={self.dtype!r}): allowed with float32 only"
            )
        if self.adopt and self.init_from is None:
            raise ValueError(
                "Experiment(adopt=True) needs init_from: the Experiment whose server takes these clients in"
            )
        for name in ("plugins", "record"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for tag in self.tags:
            checks.known("tag", tag, TAGS)
        try:
            for name in (
                "partition_args",
                "model_args",
                "method_args",
                "tags",
            ):  # as JSON gives them back; nobody else's dict
                object.__setattr__(self, name, json.loads(json.dumps(getattr(self, name))))
            plain = json.loads(json.dumps(self.plain()))
        except (TypeError, ValueError) as e:
            raise ValueError(
                f"Experiment holds a value that JSON cannot keep ({e}); use numbers, strings, lists, dicts"
            ) from None
        if plain != json.loads(json.dumps(plain)):
            raise ValueError("Experiment holds NaN; every value must equal itself after a round trip through JSON")
        for plugin in self.plugins:
            _import(plugin)
        if self.dataset != "own":
            data.check_name(self.dataset)
            partitions.check(self.partition, {n: v for n, v in self.partition_args.items() if n not in _SOME})
            _some(self.clients, self.partition_args)
        models.check(self.model, self.model_args)
        probes.check(self.record, make_method(self.method, **self.method_args))

    def but(self, **changes: Any) -> Experiment:
        """A copy with fields changed; dict-valued fields (model_args, tags, ...) are merged into the old ones."""
        merged = {
            k: getattr(self, k) | v if isinstance(v, dict) else v
            for k, v in changes.items()
            if k in self.__dataclass_fields__
        }
        return dataclasses.replace(self, **(changes | merged))

    def plain(self) -> dict[str, Any]:
        """The hashed fields as JSON-able values."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "tags"}
        lists = {name: list(getattr(self, name)) for name in ("plugins", "record")}
        return out | lists | {"init_from": self.init_from.plain() if self.init_from else None}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Experiment:
        """The Experiment whose `plain()` this is."""
        source = plain.get("init_from")
        return cls(**plain | {"init_from": source and cls.from_plain(source)})

    @functools.cached_property
    def id(self) -> str:
        """16 hex digits over the hashed fields, the pool's checksum, the store's schema and the method's revision. Needs the data."""
        return self.id_for(data.load(self.dataset).checksum)

    def id_for(self, checksum: str) -> str:
        """The id over data with another checksum (a user's own Federation)."""
        source = self.init_from.id_for(checksum) if self.init_from else None
        # Fields at their defaults are left out, so that a new field leaves the ids of earlier runs as they were; a default that changes
        # therefore needs a new SCHEMA.
        defaults = {f.name: _default(f) for f in dataclasses.fields(self)} | {"plugins": [], "record": []}
        key = {n: v for n, v in self.plain().items() if v != defaults[n]} | {
            "init_from": source,
            "pool": checksum,
            "schema": SCHEMA,
            "revision": make_method(self.method, **self.method_args).revision,
        }
        return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]

    def _changed(self) -> dict[str, Any]:
        values = {f.name: (getattr(self, f.name), _default(f)) for f in dataclasses.fields(self)}
        return {name: v for name, (v, default) in values.items() if v != default}

    def __repr__(self) -> str:
        return f"Experiment({', '.join(f'{name}={v!r}' for name, v in self._changed().items())})"

    def _repr_html_(self) -> str:
        main = {name: getattr(self, name) for name in ("method", "dataset", "partition", "model", "clients", "rounds")}
        return card("Experiment", main | self._changed())


def _default(f: dataclasses.Field) -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


checks.KINDS["Experiment"] = Experiment


def _import(plugin: str) -> None:
    try:
        importlib.import_module(plugin)
    except ModuleNotFoundError as error:
        if error.name != plugin.partition(".")[0]:  # the file is there, and lacks something itself
            raise
        raise ValueError(
            f"Experiment(plugins=({plugin!r},)): there is no such module; name a file (without .py) in the current folder "
            "or in a folder of PYTHONPATH"
        ) from None


def _some(clients: int, args: dict[str, Any]) -> tuple[int, slice]:
    # How many clients a partition deals to, and which of them are an Experiment's.
    of, first, every = args.get("of", clients), args.get("first", 0), args.get("every", 1)
    whole = all(type(v) is int for v in (of, first, every))
    if not (whole and first >= 0 and every >= 1 and (end := first + every * (clients - 1) + 1) <= of):
        raise ValueError(
            f"Experiment(clients={clients}, partition_args={args!r}): allowed are integers with first >= 0, every >= 1 and "
            "first + every * (clients - 1) < of"
        )
    return of, slice(first, end, every)


# -- building ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def _split(dataset: str, partition: str, args: str, clients: int, seed: int) -> partitions.Split:
    given = json.loads(args)
    of, kept = _some(clients, given)
    scheme = {n: v for n, v in given.items() if n not in _SOME}
    s = partitions.partition(partition, data.load(dataset), of, seed, **scheme)
    return partitions.Split(s.train[kept], s.val[kept], s.test[kept])


def split(e: Experiment) -> partitions.Split:
    """Who holds what in an Experiment: index arrays into its pool, not yet capped by max_samples."""
    seed = e.seed if e.partition_seed is None else e.partition_seed
    return _split(e.dataset, e.partition, json.dumps(e.partition_args, sort_keys=True), e.clients, seed)


def federation(e: Experiment, device: str = "cpu") -> Federation:
    """The clients of an Experiment on a device."""
    pool, s = data.load(e.dataset), split(e)
    mean, std = (pool.mean, pool.std) if e.normalize == "dataset" else ([0.5] * 3, [0.5] * 3)
    if mean is not None:
        channels = 1 if pool.x.ndim == 3 else pool.x.shape[-1]
        mean, std = list(mean)[:channels], list(std)[:channels]
    kw = dict(
        classes=pool.classes,
        mean=mean,
        std=std,
        device=device,
        dtype=getattr(torch, e.dtype),
        holdout=e.holdout,
        seed=e.seed,
    )
    cap = e.max_samples or None
    lists = (
        [i[:cap] for i in part] for part in (s.train, s.val, s.test)
    )  # in random order, so a start is a random part
    return Federation(pool.x, pool.y, *lists, name=e.dataset, **kw)


def build_method(e: Experiment, fed: Federation) -> Method:
    """The Experiment's method, bound to its model and clients."""
    make = functools.partial(models.build, e.model, fed.input_shape, fed.classes, **vocabulary(e) | e.model_args)
    dtype = getattr(torch, e.dtype)
    model = make(seed=e.seed).to(fed.device, dtype)
    heads = None
    if e.head_init == "own":
        names = models.head(model, e.head_depth, e.head_by)
        drawn = head_models(lambda k: make(seed=_own_seed(e.seed, k)), names, fed.K)
        heads = {n: v.to(fed.device, dtype if v.is_floating_point() else v.dtype) for n, v in drawn.items()}
    task = Task(
        model,
        fed.n,
        fed.label_counts,
        head_depth=e.head_depth,
        head_by=e.head_by,
        buffers=e.buffers,
        rounds=e.rounds,
        lr=e.lr,
        epochs=e.epochs,
        holdout=e.holdout,
        seed=e.seed,
        heads=heads,
    )
    return make_method(e.method, **e.method_args).bind(task)


def _own_seed(seed: int, k: int) -> int:
    return (seed + 1) * 100_003 + k


def vocabulary(e: Experiment) -> dict[str, int]:
    """Model options that the data decide: the vocabulary's size for texts."""
    if e.dataset == "own" or "vocab" not in (pool := data.load(e.dataset)).extra:
        return {}
    return {"vocab": len(pool.extra["vocab"])}


def grid(
    base: Experiment, rows: dict[str, dict], columns: dict[str, dict] | None = None, seeds: Iterable[int] = (0,)
) -> list[Experiment]:
    """One Experiment for each row x column x seed: labels -> changed fields (as for `but`); the labels become tags.

    A seed is that of the sources (`init_from`), too: with another one they would hold other clients.
    """
    for name, given in (("rows", rows), ("columns", columns or {})):
        if not isinstance(given, dict):
            raise TypeError(
                f"grid({name}={given!r}): allowed is a dict of labels and changed fields, such as {{'FedPer': dict(method='fedper')}}"
            )
    cells = itertools.product(columns.items() if columns else [("", {})], rows.items(), seeds)
    return [_seeded(base.but(**c).but(**r), s).but(tags={"row": rl, "column": cl}) for (cl, c), (rl, r), s in cells]


def _seeded(e: Experiment, seed: int) -> Experiment:
    return e.but(seed=seed, init_from=e.init_from and _seeded(e.init_from, seed))
