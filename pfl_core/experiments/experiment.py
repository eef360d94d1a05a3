"""Experiment: everything that decides a run's numbers, as plain values, frozen and hashed; grids of them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pfl_core import models
from pfl_core.data import partition as partitions
from pfl_core.data import pools as data
from pfl_core.data.client_data import PLANS
from pfl_core.engine import probes
from pfl_core.engine.sgd import PRECISIONS
from pfl_core.experiments import copies
from pfl_core.methods.base import Method, make_method
from pfl_core.util import checks, identity
from pfl_core.util.cards import card

SCHEMA = 2  # of the run store; a run of another schema is computed again
TAGS = ("paper", "artefact", "row", "column", "profile")
WHICH = (
    "of",
    "first",
    "every",
)  # partition_args that every scheme has: which of its clients are an Experiment's
RANGES = {  # field: (test, what is allowed)
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
    "head_by": (
        ("block", "child", "module", "tensor").__contains__,
        "one of block, child, module, tensor",
    ),
    "head_init": (("common", "own").__contains__, "common or own"),
    "holdout": (lambda v: 0 <= v < 1, "a share in [0, 1)"),
    "normalize": (
        ("dataset", "half").__contains__,
        "dataset (its mean and std) or half ((x - .5) / .5)",
    ),
    "max_samples": (lambda v: v >= 0, "an integer >= 0 (0: all)"),
    "eval_every": (lambda v: v >= 1, "an integer >= 1"),
    "eval_clients": (lambda v: v >= 0, "an integer >= 0 (0: all)"),
    "seed": (lambda v: v >= 0, "an integer >= 0"),
    "partition_seed": (lambda v: v is None or v >= 0, "an integer >= 0, or None"),
    "dtype": (("float32", "float64").__contains__, "float32 or float64"),
    "precision": (PRECISIONS.__contains__, "one of " + ", ".join(PRECISIONS)),
}


class _Frozen(dict):
    """A dict whose entries stay as they are: an Experiment's id stands for them."""

    def _refuse(self, *args: Any, **kw: Any) -> None:
        raise TypeError(
            "an Experiment's values do not change; make another one with e.but(partition_args={...})"
        )

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple:  # else copies and other processes would fill it entry by entry
        return _Frozen, (dict(self),)


class _FrozenList(list):
    """A list that stays as it is."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _Frozen._refuse
    append = extend = insert = remove = pop = clear = sort = reverse = _Frozen._refuse

    def __reduce__(self) -> tuple:
        return _FrozenList, (list(self),)


def _freeze(v: Any) -> Any:
    if isinstance(v, dict):
        return _Frozen({k: _freeze(x) for k, x in v.items()})
    return _FrozenList(map(_freeze, v)) if isinstance(v, list | tuple) else v


def _is(default: Any, doc: str) -> Any:
    made = {"default_factory": default} if default is dict else {"default": default}
    return field(**made, metadata={"doc": doc})


@dataclass(frozen=True, eq=False)
class Experiment:
    """Everything that decides a run's numbers, as plain values; checked at construction.

    Each field's meaning is its `metadata["doc"]`, which `python -m pfl_core run --help` prints with defaults and choices.
    `partition_args` are the scheme's; with `of` among them it deals to that many clients, and those here are numbers `first`,
    `first` + `every`, ... of them: one group, or those who are new to the others. With dataset="own" a Federation brings data, clients
    and partition (`run(e, fed=...)`); all else is the Experiment's. Raises ValueError naming the field, the value, and what is allowed.
    """

    dataset: str = _is(
        "digits", "name of the data set (list datasets), or own for a Federation of yours"
    )
    partition: str = _is("dirichlet", "who holds which samples (list partitions)")
    partition_args: dict = _is(dict, "arguments of the partition, such as alpha=0.1")
    clients: int = _is(10, "number of clients K")
    model: str = _is("cnn", "network (list models)")
    model_args: dict = _is(dict, "options of the network, such as width=0.5")
    method: str = _is("fedavg", "method (list methods)")
    method_args: dict = _is(dict, "hyper-parameters of the method")
    rounds: int = _is(10, "communication rounds")
    participation: float = _is(1.0, "share of the clients that take part in a round")
    epochs: int = _is(1, "epochs of local training a round")
    steps: int = _is(0, "local SGD steps a round in place of epochs (0: count in epochs)")
    batch: int = _is(32, "samples a batch")
    plan: str = _is(
        "wrap",
        "how batches are drawn: the last one filled up (wrap), left out (drop), or each anew (fresh)",
    )
    shuffle: bool = _is(True, "whether samples are shuffled each epoch")
    lr: float = _is(0.01, "learning rate of local SGD")
    momentum: float = _is(0.0, "momentum of local SGD")
    weight_decay: float = _is(0.0, "weight decay of local SGD")
    clip: float = _is(0.0, "largest L2 norm of a gradient (0: no clipping)")
    buffers: str = _is(
        "local", "BatchNorm statistics: stay with the client, are averaged, or reset each round"
    )
    head_depth: int = _is(1, "how many layers, counted from the end, are the head")
    head_by: str = _is("block", "what counts as a layer of the head")
    head_init: str = _is(
        "common", "whether clients' heads start equal (common) or from draws of their own (own)"
    )
    holdout: float = _is(0.0, "share of each client's training data that SGD never sees")
    normalize: str = _is(
        "dataset", "pixels: by the data set's mean and std, or half: (x - .5) / .5"
    )
    max_samples: int = _is(0, "most samples in each client's train, val and test part (0: all)")
    eval_every: int = _is(
        1, "rounds between evaluations; the first and the last are always evaluated"
    )
    eval_after: bool | None = _is(
        None,
        "evaluate after local training, too (None: where all clients take part; True needs extra training elsewhere)",
    )
    eval_clients: int = _is(
        0, "how many clients are evaluated, a sample drawn by the seed (0: all)"
    )
    seed: int = _is(0, "decides initial model, participants and batches")
    partition_seed: int | None = _is(None, "decides who holds what (None: seed)")
    dtype: str = _is("float32", "number format of models and data")
    precision: str = _is(
        "full",
        "of local training in float32: full, tf32 (a GPU's products), bf16 (products in bfloat16)",
    )
    keep_models: bool = _is(False, "keep the personal models of the last round")
    init_from: Experiment | None = _is(None, "another Experiment whose end this one starts from")
    adopt: bool = _is(False, "take over init_from's server, with clients that are new to it")
    record: tuple[str, ...] = _is(
        (),
        "probes whose arrays the Result keeps: weights, embeddings, cka, cka_cores, mix_and_match, train",
    )
    plugins: tuple[str, ...] = _is(
        (), "modules to import: they register your methods, models or partitions"
    )
    tags: dict = _is(dict, "labels of rows; they do not count in the id")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            checks.kind("Experiment", f.name, getattr(self, f.name), f.type)
        for name, (legal, allowed) in RANGES.items():
            if not legal(getattr(self, name)):
                raise ValueError(
                    f"Experiment({name}={getattr(self, name)!r}): allowed is {allowed}"
                )
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
                object.__setattr__(self, name, _freeze(json.loads(json.dumps(getattr(self, name)))))
            plain = json.loads(json.dumps(self.plain()))
        except (TypeError, ValueError) as e:
            raise ValueError(
                f"Experiment holds a value that JSON cannot keep ({e}); use numbers, strings, lists, dicts"
            ) from None
        if plain != json.loads(json.dumps(plain)):
            raise ValueError(
                "Experiment holds NaN; every value must equal itself after a round trip through JSON"
            )
        for plugin in self.plugins:
            _import(plugin)
        self._check_clients()
        models.check(self.model, self.model_args)
        probes.check(self.record, make_method(self.method, **self.method_args))

    def _check_clients(self) -> None:
        if self.eval_clients > self.clients:
            raise ValueError(
                f"Experiment(eval_clients={self.eval_clients}): there are clients={self.clients}; 0 means all"
            )
        if self.eval_clients and self.record:
            raise ValueError(
                f"Experiment(eval_clients={self.eval_clients}, record={self.record}): probes need all clients"
            )
        if self.dataset != "own":
            data.check_name(self.dataset)
            partitions.check(
                self.partition, {n: v for n, v in self.partition_args.items() if n not in WHICH}
            )
            which_clients(self.clients, self.partition_args)
            return
        if (
            self.partition not in ("own", "dirichlet")
            or self.partition_args
            or self.partition_seed is not None
        ):
            raise ValueError(
                f"Experiment(dataset='own', partition={self.partition!r}, partition_args={dict(self.partition_args)}, "
                f"partition_seed={self.partition_seed}): a Federation says who holds what; leave them out"
            )
        object.__setattr__(self, "partition", "own")

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

    @property
    def id(self) -> str:
        """16 hex digits over the hashed fields, the pool's checksum, the store's schema, the method's revision, and the source of all
        code that is not ours (`identity`). Where the data are not here, over the copy of them that committed runs used; DatasetMissing
        where there is none."""
        return self.id_for(copies.checksum(self.dataset))

    @property
    def ids(self) -> list[str]:
        """`id`, and those over other copies of the data, which committed runs used."""
        every = [copies.checksum(self.dataset), *copies.checksums(self.dataset)]
        return [self.id_for(c) for c in dict.fromkeys(every)]

    def id_for(self, checksum: str) -> str:
        """The id over data with another checksum (a user's own Federation)."""
        source = self.init_from.id_for(checksum) if self.init_from else None
        method = make_method(self.method, **self.method_args)
        # Fields at their defaults are left out, so that a new field leaves the ids of earlier runs as they were; a default that changes
        # therefore needs a new SCHEMA.
        defaults = {f.name: _default(f) for f in dataclasses.fields(self)} | {
            "plugins": [],
            "record": [],
        }
        key = {n: v for n, v in self.plain().items() if v != defaults[n]} | {
            "init_from": source,
            "pool": checksum,
            "schema": SCHEMA,
            "revision": method.revision,
        }
        if code := identity.digest(*self._code(method)):
            key["code"] = code
        return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]

    def course_for(self, checksum: str) -> str:
        """The id without the number of rounds: runs of one course are the beginnings of each other."""
        return self.but(rounds=0).id_for(checksum)

    def _code(self, method: Method) -> list[Any]:
        scheme = [] if self.dataset == "own" else [partitions.function(self.partition)]
        return [
            type(method),
            models.function(self.model),
            *scheme,
            *(sys.modules[p] for p in self.plugins),
        ]

    @property
    def in_main(self) -> bool:
        """Whether its method, model or partition is defined in a notebook or script, where other processes do not find it."""
        return any(
            identity.in_main(c) for c in self._code(make_method(self.method, **self.method_args))
        )

    def _changed(self) -> dict[str, Any]:
        values = {f.name: (getattr(self, f.name), _default(f)) for f in dataclasses.fields(self)}
        return {name: v for name, (v, default) in values.items() if v != default}

    def __repr__(self) -> str:
        return f"Experiment({', '.join(f'{name}={v!r}' for name, v in self._changed().items())})"

    def _repr_html_(self) -> str:
        main = {
            name: getattr(self, name)
            for name in ("method", "dataset", "partition", "model", "clients", "rounds")
        }
        return card("Experiment", main | self._changed())


def _named(init: Callable) -> Callable:
    # A look at the names of the fields first; the signature stays that of the fields.
    @functools.wraps(init)
    def checked(self: Experiment, *args: Any, **fields: Any) -> None:
        for name in fields:
            checks.known("field of an Experiment:", name, self.__dataclass_fields__)
        init(self, *args, **fields)

    return checked


Experiment.__init__ = _named(Experiment.__init__)


def _default(f: dataclasses.Field) -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


checks.KINDS["Experiment"] = Experiment


def _import(plugin: str) -> None:
    if plugin.endswith(".py") or not all(part.isidentifier() for part in plugin.split(".")):
        name = plugin.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
        raise ValueError(
            f"Experiment(plugins=({plugin!r},)): give the name of a module, such as {name!r}: without .py, and without folders, which "
            "PYTHONPATH names"
        )
    try:
        importlib.import_module(plugin)
    except ModuleNotFoundError as error:
        if error.name != plugin.partition(".")[0]:  # the file is there, and lacks something itself
            raise
        raise ValueError(
            f"Experiment(plugins=({plugin!r},)): there is no such module; name a file (without .py) in the current folder "
            "or in a folder of PYTHONPATH"
        ) from None


def which_clients(clients: int, args: dict[str, Any]) -> tuple[int, slice]:
    """How many clients a partition with these arguments deals to, and which of them are an Experiment's; ValueError for too few."""
    of, first, every = args.get("of", clients), args.get("first", 0), args.get("every", 1)
    whole = all(type(v) is int for v in (of, first, every))
    if not (
        whole and first >= 0 and every >= 1 and (end := first + every * (clients - 1) + 1) <= of
    ):
        raise ValueError(
            f"Experiment(clients={clients}, partition_args={args!r}): allowed are integers with first >= 0, every >= 1 and "
            "first + every * (clients - 1) < of"
        )
    return of, slice(first, end, every)


def grid(
    base: Experiment,
    rows: dict[str, dict],
    columns: dict[str, dict] | None = None,
    seeds: Iterable[int] = (0,),
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
    return [
        _seeded(base.but(**c).but(**r), s).but(tags={"row": rl, "column": cl})
        for (cl, c), (rl, r), s in cells
    ]


def _seeded(e: Experiment, seed: int) -> Experiment:
    return e.but(seed=seed, init_from=e.init_from and _seeded(e.init_from, seed))
