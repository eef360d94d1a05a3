"""Experiment: everything that decides a run's numbers, as plain values; and grids of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pfl_core import models, optim
from pfl_core.data import augment
from pfl_core.data import partition as partitions
from pfl_core.data import pools as data
from pfl_core.data.client_data import PLANS
from pfl_core.data.shifts import COMMON
from pfl_core.engine import finetune, probes, scoring
from pfl_core.engine.sgd import PRECISIONS
from pfl_core.experiments import keys
from pfl_core.experiments.keys import ARGS, WHICH
from pfl_core.experiments.weights import Weights
from pfl_core.methods.base import METHODS, make_method
from pfl_core.util import checks, fields, identity
from pfl_core.util.cards import card
from pfl_core.util.fields import choice, log_uniform, number, value

SCHEMA = 2  # of the run store; a run of another schema is computed again
TAGS = ("paper", "artefact", "row", "column", "profile")
JSON_FIELDS = (*ARGS, "tags")
TEXTS = ("record", "metrics", "plugins")
# Fields with numbers to train with.
COMPUTED = ("lr", "momentum", "weight_decay", "clip", "finetune", *ARGS)
CLIENTS = 10  # of an Experiment that does not say how many, over a data set with a name


def _refused(self: Any, *args: Any, **kw: Any) -> Any:
    raise TypeError(
        "an Experiment's values do not change; "
        "make another one with experiment.but(partition_args={...})"
    )


_refuse: Any = _refused  # takes the place of methods of any signature


class _Frozen(dict):
    """A dict whose entries stay as they are: an Experiment's id stands for them."""

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple:  # else copies and other processes would fill it entry by entry
        return _Frozen, (dict(self),)


class _FrozenList(list):
    """A list that stays as it is."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = remove = pop = clear = sort = reverse = _refuse

    def __reduce__(self) -> tuple:
        return _FrozenList, (list(self),)


def _freeze(v: Any) -> Any:
    if isinstance(v, dict):
        return _Frozen({k: _freeze(x) for k, x in v.items()})
    return _FrozenList(map(_freeze, v)) if isinstance(v, list | tuple) else v


@dataclass(frozen=True, eq=False)
class Experiment:
    """A run as plain values: everything that decides its numbers, checked when it is made.

    An Experiment does not change; `experiment.but(lr=0.1)` is another one. Its `id` names the run
    in the store: equal values have equal ids. Which device computes it, and how, is said to `run`.

    Raises
    ------
    ValueError
        If a field has a value that is not allowed; it names the field, the value and what is.

    Examples
    --------
    >>> from pfl_core import Experiment
    >>> experiment = Experiment(method="fedper", clients=4, rounds=2)
    >>> experiment
    Experiment(clients=4, method='fedper', rounds=2)
    >>> experiment.dataset, experiment.model, experiment.lr
    ('digits', 'cnn', 0.01)
    >>> other = experiment.but(method="fedprox", method_args={"mu": 0.1})
    >>> other.id == experiment.id
    False
    >>> experiment.but(tags={"row": "FedPer"}).id == experiment.id
    True
    """

    dataset: str = value(
        "digits",
        "Name of the data set (see list_datasets). own: the data are a Federation of yours, "
        "given to run(experiment, fed=...)",
    )
    partition: str = value(
        "dirichlet", "Rule by which samples are split over clients (see list_partitions)"
    )
    partition_args: dict = value(
        {},
        "Arguments of the partition, such as alpha=0.1. Every partition takes six more. of=50: "
        "split for 50 clients, and keep `clients` of them; first=10 (default 0) and every=2 "
        "(default 1): keep clients 10, 12, 14, ... of the 50. transform=['none', 'turn90'] and "
        "relabel=[0, 3], which makes y + 3 of label y: client i gets entry i modulo their number. "
        "words=1000: texts become vectors, which say what they hold of the 1000 words that are in "
        "most of the training texts dealt",
    )
    clients: int = number(
        None,
        f"Number of clients, K. None: {CLIENTS}, or with own data as many as the Federation has",
        low=1,
        given="int | None",
    )
    model: str = value("cnn", "Network that every client trains (see list_models)")
    model_args: dict = value({}, "Options of the network, such as width=0.5")
    method: str = value("fedavg", "Method of federated learning (see list_methods)")
    method_args: dict = value({}, "Hyper-parameters of the method, such as mu=0.1 for fedprox")
    rounds: int = number(10, "Number of communication rounds, R", low=0)
    participation: float = number(
        1.0, "Share of the clients that take part in a round", above=0, high=1
    )
    client_dropout: float = number(
        0.0,
        "Probability that a client which takes part in a round does not answer: it was sent the "
        "model, and the server goes on without it",
        low=0,
        below=1,
    )
    stragglers: float = number(
        0.0,
        "Probability that a client makes only some of its local steps in a round, from one to "
        "all of them",
        low=0,
        high=1,
    )
    epochs: int = number(1, "How often a client goes through its training data in a round", low=0)
    steps: int = number(
        0, "Local SGD steps of a client in a round, in place of epochs (0: count in epochs)", low=0
    )
    batch: int = number(32, "Number of samples in a batch, B", low=1)
    plan: str = choice(
        *PLANS,
        doc=(
            "How an epoch is cut into batches. The last batch is filled up with samples from the "
            "epoch's start (wrap) or left out (drop); or every batch is a new draw (fresh)"
        ),
    )
    shuffle: bool = value(True, "Whether a client's samples are shuffled in each epoch")
    lr: float = number(0.01, "Learning rate of local SGD", low=0, search=log_uniform(0.01, 0.5))
    lr_schedule: str = choice(
        *optim.SCHEDULES,
        doc=(
            "How lr goes on from round to round: it stays (constant), falls along half a cosine "
            "over all rounds (cosine), or is multiplied with gamma every so many rounds (step) or "
            "in each (exponential). Fine-tuning and rates of a method's own stay"
        ),
    )
    lr_schedule_args: dict = value(
        {},
        "Arguments of the schedule: floor=0.0 of cosine, the share of lr that is left in the end; "
        "every=10 and gamma=0.1 of step; gamma=0.99 of exponential",
    )
    optimizer: str = choice(
        *optim.OPTIMIZERS,
        doc=(
            "What trains clients. Its state begins anew in each round. Methods with a step of "
            "their own have sgd alone"
        ),
    )
    optimizer_args: dict = value(
        {}, "Arguments of adam and adamw: beta1=0.9, beta2=0.999, eps=1e-8"
    )
    momentum: float = number(0.0, "Momentum of local SGD (0: none)", low=0, below=1)
    weight_decay: float = number(
        0.0,
        "Weight decay of local training (0: none), added to the gradient (sgd, adam), or of the "
        "weights themselves (adamw)",
        low=0,
    )
    server: str = choice(
        *optim.SERVERS,
        doc=(
            "What the server makes of a round's change of the network's parameters that it "
            "averages: it takes it as the method says (plain), with momentum (FedAvgM) or by Adam "
            "(FedAdam)"
        ),
    )
    server_args: dict = value(
        {},
        "Arguments of the server's optimizer: lr=1.0 and momentum=0.9 of momentum; lr=0.01, "
        "beta1=0.9, beta2=0.99 and tau=0.001 of adam",
    )
    clip: float = number(
        0.0,
        "Largest L2 norm of a client's gradient; a longer one is scaled down (0: no clipping)",
        low=0,
    )
    buffers: str = choice(
        "local",
        "average",
        "reset",
        doc=(
            "What becomes of BatchNorm statistics between rounds: they stay with the client "
            "(local), "
            "are averaged with the parameters (average), or start anew in each round (reset)"
        ),
    )
    head: str = value(
        "",
        "Name of the module, or comma-separated names of modules, that are the head; '': found by "
        "a trial run, as the last head_depth layers before the scores",
    )
    head_depth: int = number(
        1, "How many layers, counted from the end of the network, are its head (0: no head)", low=0
    )
    head_by: str = choice(
        "block",
        "child",
        "module",
        "tensor",
        doc=(
            "What head_depth counts: residual blocks and the like (block), top-level "
            "children (child), "
            "layers with parameters (module), or single tensors (tensor)"
        ),
    )
    head_init: str = choice(
        "common",
        "own",
        doc="Whether the clients' heads start equal (common) or each from a draw of its own (own)",
    )
    holdout: float = number(
        0.0,
        "Share of each client's training samples that SGD never sees; some methods need it. They "
        "count where a server weighs clients",
        low=0,
        below=1,
    )
    normalize: str = choice(
        "dataset",
        "half",
        doc=(
            "How pixels are normalised: by mean and standard deviation of the data set "
            "(dataset), or "
            "as (x - 0.5) / 0.5 (half)"
        ),
    )
    max_samples: int = number(
        0,
        "Largest number of samples in each of a client's parts train, val and test (0: all); of "
        "own data drawn by the seed, classes in proportion",
        low=0,
    )
    eval_every: int = number(
        1,
        "Number of rounds between evaluations; the start and the last round are always evaluated",
        low=1,
    )
    eval_after: bool | None = value(
        None,
        "Whether models are evaluated after local training, too. None: if all clients take part in "
        "every round. True with fewer: the others are trained for it, which takes extra time",
    )
    eval_clients: int = number(
        0, "Number of clients that are evaluated, drawn by the seed (0: all)", low=0
    )
    seed: int = number(
        0,
        "Decides the initial model, who takes part in which round, and which batches are drawn",
        low=0,
    )
    partition_seed: int | None = number(
        None, "Decides who holds which samples (None: as seed)", low=0
    )
    dtype: str = choice("float32", "float64", doc="Number format of models and data")
    precision: str = choice(
        *PRECISIONS,
        doc=(
            "Arithmetic of local training in float32: all of it in float32 (full), a GPU's matrix "
            "products in TensorFloat-32 (tf32), or products in bfloat16 (bf16)"
        ),
    )
    finetune: list = value(
        [],
        "Fine-tuning of the served models after the last round: {'epochs': 10, 'lr': 0.01, 'only': "
        "'head'}, or a list of such stages, one after the other. lr: by default as above; only: "
        "'all' (default), or the 'head' or the 'body' alone. Each epoch is evaluated, in rows of "
        "its own: when='tuned 1', 'tuned 2', ...",
        given="dict | list of dicts | None",
    )
    augment: list = value(
        [],
        "Transforms of torchvision.transforms.v2 that change training images, one after the other: "
        "'RandomHorizontalFlip', or {'name': 'RandomCrop', 'size': 32, 'padding': 4}. Each image "
        "is drawn anew in each round, by (seed, round, client)",
        given="list of names or dicts | None",
    )
    keep_models: bool = value(
        False, "Whether the Result keeps the models that the clients end with"
    )
    keep_scores: bool = value(
        False,
        "Whether the Result keeps the class scores of all test samples at the end, which "
        "result.predictions shows",
    )
    init_from: Experiment | Weights | str | Path | None = value(
        None,
        "What the initial model is: another Experiment, whose model at the end it is; or a file of "
        "weights, torch.save(model.state_dict(), path), which counts by its content",
    )
    new_head: bool = value(
        False,
        "Whether the head is drawn anew and not taken from init_from, whose head may have another "
        "size",
    )
    adopt: bool = value(
        False,
        "Whether the clients are new to the server of init_from: it takes them in, and does not "
        "learn from them",
    )
    record: tuple[str, ...] = value(
        (),
        "Probes whose arrays the Result keeps: weights, embeddings, cka, cka_cores, mix_and_match, "
        "train, numbers (read them with result.probe)",
    )
    metrics: tuple[str, ...] = value(
        (),
        "Metrics of each client's class scores beside accuracy and loss: auc, f1, balanced_acc, "
        "confusion (a matrix), and those of register_metric (see list_metrics)",
    )
    plugins: tuple[str, ...] = value(
        (),
        "Modules of yours that are imported first: they register methods, models, partitions or "
        "metrics",
    )
    tags: dict = value(
        {},
        "What the columns paper, artefact, row, column and profile of the rows say; the only field "
        "that is not part of the id",
    )

    _says_clients: ClassVar[bool] = True  # each has its own: whether `clients` was given
    _only_read: ClassVar[bool] = False  # of one that `read` made, True

    def __post_init__(self) -> None:
        given = [f for f in dataclasses.fields(self) if getattr(self, f.name) is not f.default]
        for f in given:  # defaults are right
            object.__setattr__(self, f.name, checks.cast(getattr(self, f.name), f.type))
        if isinstance(self.init_from, str | Path):
            object.__setattr__(self, "init_from", Weights.of(self.init_from))
        for f in given:
            fields.check_value("Experiment", f, getattr(self, f.name))
        self._check_together()
        for name in TEXTS:
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for tag in self.tags:
            checks.known("tag", tag, TAGS)
            if isinstance(self.tags[tag], str) and checks.steering(self.tags[tag]):
                checks.name(f"Experiment(tags={{{tag!r}: ...}})", self.tags[tag])
        for plugin in self.plugins:
            import_plugin(plugin)
        scoring.check(self.metrics)
        self._freeze_values()
        self._check_numbers()
        self._settle_clients()
        if self.earlier:
            object.__setattr__(self, "init_from", self.earlier.checked())
        self._check_clients()
        models.check(self.model, self.model_args)
        augment.transforms(self.augment)
        for field in optim.KINDS:
            optim.check(field, getattr(self, field), getattr(self, f"{field}_args"))
        probes.check(self.record, make_method(self.method, **self.method_args))

    def _check_together(self) -> None:
        if self.precision != "full" and self.dtype != "float32":
            raise ValueError(
                f"Experiment(precision={self.precision!r}, dtype={self.dtype!r}): "
                "allowed with float32 only"
            )
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(
                f"Experiment(momentum={self.momentum}, optimizer={self.optimizer!r}): momentum is "
                "sgd's; of the others say optimizer_args={'beta1': 0.9}"
            )
        if self.new_head and (self.init_from is None or self.adopt):
            raise ValueError(
                "Experiment(new_head=True) needs init_from, and adopt=False: without them every "
                "head is new, or the server's"
            )
        if self.earlier and self.earlier.finetune:
            raise ValueError(
                "Experiment(init_from=...) begins with what a federation learned, and nobody "
                "learns from fine-tuning: give it without, as init_from=source.but(finetune=None)"
            )
        if self.adopt and self.earlier is None:
            raise ValueError(
                "Experiment(adopt=True) needs init_from: the Experiment whose server takes these "
                "clients in"
            )

    def _freeze_values(self) -> None:
        # Dicts become copies, with values as JSON gives them back, which nobody can change.
        values: dict[str, Any] = {name: keys.cast(self, name) for name in ARGS}
        values |= {"tags": self.tags, "finetune": finetune.plain(self.finetune)}
        values |= {"augment": augment.plain(self.augment)}
        try:
            for name, given in values.items():
                kept = json.loads(json.dumps(given, default=keys.scalar))
                object.__setattr__(self, name, _freeze(kept))
            plain = json.loads(json.dumps(self._alone()))  # what it starts from was checked
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"Experiment holds a value that JSON cannot keep ({error}); use numbers, strings, "
                "lists, dicts"
            ) from None
        if plain != json.loads(json.dumps(plain)):
            raise ValueError(
                "Experiment holds NaN; every value must equal itself after a round trip through "
                "JSON"
            )

    def _check_numbers(self) -> None:
        # Partitions count in float64; all else that is computed with has the Experiment's dtype.
        for name in COMPUTED:
            dtype = "float64" if name == "partition_args" else self.dtype
            checks.held(f"Experiment({name}={getattr(self, name)!r})", dtype, getattr(self, name))

    def _settle_clients(self) -> None:
        # With own data None stays: `run` has the Federation, which says how many there are.
        object.__setattr__(self, "_says_clients", self.clients is not None)
        if self.clients is None and self.dataset != "own":
            object.__setattr__(self, "clients", CLIENTS)

    def _check_clients(self) -> None:
        some = f"eval_clients={self.eval_clients}"
        if self.clients is not None and self.eval_clients > self.clients:
            raise ValueError(f"Experiment({some}): there are clients={self.clients}; 0 means all")
        if self.eval_clients and self.record:
            raise ValueError(f"Experiment({some}, record={self.record}): probes need all clients")
        if self.dataset != "own":
            data.check_name(self.dataset)
            scheme = {n: v for n, v in self.partition_args.items() if n not in WHICH}
            partitions.check(self.partition, scheme)
            which_clients(self.clients, self.partition_args)
            return
        if (
            self.partition not in ("own", "dirichlet")
            or self.partition_args
            or self.partition_seed is not None
        ):
            raise ValueError(
                f"Experiment(dataset='own', partition={self.partition!r}, "
                f"partition_args={dict(self.partition_args)}, "
                f"partition_seed={self.partition_seed}): a Federation says who holds what; "
                "leave them out"
            )
        object.__setattr__(self, "partition", "own")

    def but(self, **changes: Any) -> Experiment:
        """A copy with other values in some fields.

        A dict (`model_args`, `tags`, ...) is merged into the one that is there, and None clears it.
        Another method, model or partition has the arguments that are given with it, and no others;
        from own data to a data set with a name, or back, the partition begins anew.

        Examples
        --------
        >>> from pfl_core import Experiment
        >>> prox = Experiment(method="fedprox", method_args={"mu": 0.1})
        >>> prox.but(lr=0.1).method_args, prox.but(method="fedper").method_args
        ({'mu': 0.1}, {})
        >>> prox.but(method_args=None)  # with the method's own mu
        Experiment(method='fedprox')
        """
        if (here := self.checked()) is not self:
            return here.but(**changes)
        if (self.dataset == "own") != (changes.get("dataset", self.dataset) == "own"):
            anew = {"partition": Experiment.partition, "partition_args": None}
            changes = anew | {"partition_seed": None} | changes
        if not self._says_clients:
            changes = {"clients": None} | changes
        changes |= {name: self._args(name, changes) for name in JSON_FIELDS}
        return dataclasses.replace(self, **changes)

    def _args(self, name: str, changes: dict[str, Any]) -> Any:
        # What `but(**changes)` makes of a field with a dict.
        of, given = name.removesuffix("_args"), changes.get(name, {})
        if not isinstance(given, dict):
            return {} if given is None else given
        another = of != name and changes.get(of, getattr(self, of)) != getattr(self, of)
        return given if another else getattr(self, name) | given

    def plain(self) -> dict[str, Any]:
        """All fields but `tags`, as values that JSON can keep; the id hashes them."""
        start: Any = self.init_from  # of `plain`, an Experiment's or a file's
        return self._alone() | {"init_from": start.plain() if start else None}

    def _alone(self) -> dict[str, Any]:
        # `plain` without what it starts from: with it, a long chain is not walked at each link.
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "tags"}
        lists = {name: list(getattr(self, name)) for name in TEXTS}
        return out | lists | {"init_from": None}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Experiment:
        """The Experiment whose `plain()` this is."""
        source = plain.get("init_from")
        made = Weights.read(source) or source and cls.from_plain(source)
        fields: dict[str, Any] = plain | {"init_from": made}
        return cls(**fields)

    @classmethod
    def read(cls, plain: dict[str, Any]) -> Experiment:
        """The Experiment whose `plain()` this is, without a look for the code that it names.

        Its method, model, partition, data and plugins need not be here: what a stored run says of
        itself can be read where they are gone. `checked` gives one that can be run.

        Raises
        ------
        ValueError
            For an unknown field, and for a value of another kind than the field's.
        """
        made, source = object.__new__(cls), plain.get("init_from")
        told = plain | {"init_from": Weights.read(source) or source and cls.read(source)}
        for name in told:
            checks.known("field of an Experiment:", name, cls.__dataclass_fields__)
        for f in dataclasses.fields(cls):
            given = told.get(f.name, _default(f))
            checks.kind("Experiment", f.name, given, fields.kind(f))
            texts: Any = given if f.name in TEXTS else None
            given = _freeze(given) if texts is None else tuple(map(str, texts))
            object.__setattr__(made, f.name, given)
        object.__setattr__(made, "_only_read", True)
        return made

    def checked(self) -> Experiment:
        """This Experiment, checked if it was only read.

        No module is imported because a stored run names it.

        Raises
        ------
        ValueError
            If its code is not here.
        """
        if not self._only_read:
            return self
        made: Experiment | None = None
        for e in reversed(chain(self)):  # the first one first: no recursion
            e._check_imported()
            made = dataclasses.replace(e, init_from=made or e.init_from) if e._only_read else e
        assert made is not None  # a chain has one link at least
        return made

    def _check_imported(self) -> None:
        for plugin in self.plugins if self._only_read else ():
            if plugin not in sys.modules:
                raise ValueError(
                    f"the code of this stored Experiment is in the module {plugin!r}, which is not "
                    f"imported: import {plugin} first, or name it in plugins"
                )

    @property
    def earlier(self) -> Experiment | None:
        """The Experiment that this one starts from, if `init_from` is one."""
        return self.init_from if isinstance(self.init_from, Experiment) else None

    @property
    def weights(self) -> Weights | None:
        """The file that this one starts from, if `init_from` is one."""
        return self.init_from if isinstance(self.init_from, Weights) else None

    def canonical(self) -> dict[str, Any]:
        """The fields that decide numbers, each in one form (see keys.py), without defaults."""
        source: dict[str, Any] | None = None
        for e in reversed(chain(self)):
            source = {"sha256": e.weights.sha256} if e.weights else source
            kept = {"keep_models": e is self and e.keep_models}  # of a source it changes nothing
            source = e._key(kept) | ({"init_from": source} if source else {})
        assert source is not None  # a chain has one link at least
        return source

    def _key(self, kept: dict[str, bool]) -> dict[str, Any]:
        # What decides numbers, without what it starts from.
        return not_default(self._alone() | keys.canonical(self) | kept)

    @property
    def draws_samples(self) -> bool:
        """Whether `max_samples` draws, from lists of a user's own; up to 0.2 it took the first."""
        return self.dataset == "own" and self.max_samples > 0

    @property
    def id(self) -> str:
        """The run's name in the store: 16 hex digits, a hash of all that decides its numbers.

        That is: all fields but `tags`, the checksum of the data, the store's schema, the method's
        `revision`, and the source of code that is not part of pfl_core (see util/identity.py).
        Where the data are not here, the checksum is that of a copy elsewhere that is known of
        (`pools.register_copies`).

        Raises
        ------
        DatasetMissing
            If there is none.
        """
        return self.id_for(data.checksum(self.dataset))

    @property
    def ids(self) -> list[str]:
        """`id`, then the ids over other copies of the data, as far as they are known."""
        every = [data.checksum(self.dataset), *data.copies(self.dataset)]
        return [self.id_for(c) for c in dict.fromkeys(every)]

    def id_for(self, checksum: str, source: str | None = None) -> str:
        """The id over data with this checksum, such as that of a user's own Federation.

        `source` is the id of what it starts from, by default over the same data, or over the data
        set that `init_from` names.
        """
        if (here := self.checked()) is not self:
            return here.id_for(checksum, source)
        links: list[tuple[Experiment, str]] = [(self, checksum)]
        while (start := links[-1][0].earlier) and source is None:
            e, theirs = links[-1]
            # Of own data `run` says the source's id.
            named = start.dataset not in (e.dataset, "own")
            links.append((start, data.checksum(start.dataset) if named else theirs))
        for e, theirs in reversed(links[1:]):
            source = e._id(theirs, source, keep_models=False)
        return self._id(checksum, source, self.keep_models)

    def _id(self, checksum: str, source: str | None, keep_models: bool) -> str:
        # source: the id of what it starts from
        source = self.weights.sha256 if self.weights else source
        method = make_method(self.method, **self.method_args)
        key = self._key({"keep_models": keep_models}) | {"init_from": source}
        key |= {"pool": checksum, "schema": SCHEMA, "revision": method.revision}
        if self.draws_samples:
            key["drawn"] = "by seed and class"
        if code := self.code:
            key["code"] = code
        if brought := keys.brought(self, checksum):
            key["brought"] = brought
        return keys.hashed(key)

    @property
    def code(self) -> str:
        """A digest of the code that is not pfl_core's: 16 hex digits; "" if all is.

        See util/identity.py.
        """
        return identity.digest(*self._code())[:16]

    def course_for(self, checksum: str, source: str | None = None) -> str:
        """The id of this Experiment without its number of rounds.

        Of two runs with the same course, the shorter one is the beginning of the longer one.
        Fine-tuning follows the rounds and is no part of it.
        """
        return self.but(rounds=0, finetune=None).id_for(checksum, source)

    def sources(self) -> str:
        """The text of the code that `code` is a digest of."""
        return identity.sources(*self._code())

    def _code(self) -> list[Any]:
        # What is registered under the names that are used: a plugin counts where one is its own.
        scheme = [] if self.dataset == "own" else [partitions.function(self.partition)]
        code = [METHODS[self.method], *models.functions(self.model, self.model_args), *scheme]
        return code + scoring.functions(self.metrics)

    @property
    def in_main(self) -> bool:
        """Whether its method, model, partition, data set or a metric is a notebook's or script's.

        Other processes do not find it there.
        """
        return any(map(identity.in_main, [*self._code(), data.function(self.dataset)]))

    @property
    def modules(self) -> list[str]:
        """Names of the modules that its own method, model, ... are in; [] if all is ours.

        "__main__" is a notebook or script.
        """
        return sorted({identity.module_of(c) for c in self._code() if not identity.is_ours(c)})

    def _changed(self) -> dict[str, Any]:
        values = {f: getattr(self, f.name) for f in dataclasses.fields(self)}
        usual = {"clients": None if self.dataset == "own" else CLIENTS}
        return {f.name: v for f, v in values.items() if v != usual.get(f.name, _default(f))}

    def __repr__(self) -> str:
        return f"Experiment({', '.join(f'{name}={v!r}' for name, v in self._changed().items())})"

    def _repr_html_(self) -> str:
        main = ("method", "dataset", "partition", "model", "clients", "rounds")
        return card("Experiment", {n: getattr(self, n) for n in main} | self._changed())


def belongs(name: str, fields: dict[str, Any]) -> str:
    """Of which field a name is a part: "method_args" if it is a hyper-parameter of the method that
    `fields` name, likewise "partition_args" or "model_args"; else "".
    """
    known: dict[str, Callable[[str], Iterable[str]]] = {
        "method": lambda method: [f.name for f in dataclasses.fields(type(make_method(method)))],
        "partition": lambda partition: [*partitions.arguments(partition), *WHICH, *COMMON],
        "model": models.arguments,
        **{field: functools.partial(optim.arguments, field) for field in optim.KINDS},
    }
    for kind, names in known.items():
        with contextlib.suppress(ValueError, TypeError):  # an unknown method is said elsewhere
            if name in names(fields.get(kind, getattr(Experiment, kind))):
                return f"{kind}_args"
    return ""


def _named(init: Callable) -> Callable:
    # A look at the names of the fields first; the signature stays that of the fields.
    @functools.wraps(init)
    def checked(self: Experiment, *args: Any, **fields: Any) -> None:
        for name in (n for n in fields if n not in self.__dataclass_fields__):
            if where := belongs(name, fields):
                given = f"{where}={{{name!r}: {fields[name]!r}}}"
                raise ValueError(f"{name!r} is no field of an Experiment; give it as {given}")
            checks.known("field of an Experiment:", name, self.__dataclass_fields__)
        init(self, *args, **fields)

    return checked


Experiment.__init__ = _named(Experiment.__init__)


def _default(f: dataclasses.Field) -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


def defaults() -> dict[str, Any]:
    """{field: its value in a `plain()` that says nothing of it}."""
    usual = {f.name: _default(f) for f in dataclasses.fields(Experiment)}
    return usual | dict.fromkeys(TEXTS, []) | {"clients": CLIENTS}


def not_default(plain: dict[str, Any]) -> dict[str, Any]:
    """Those fields of a `plain()` that are not at their defaults.

    Ids are made of these alone, so a new field leaves the ids of earlier runs as they were. A
    default that changes needs a new SCHEMA.
    """
    usual = defaults()
    told = {n: v for n, v in plain.items() if n not in usual or v != usual[n]}
    source = plain.get("init_from")
    if file := Weights.read(source):  # wherever it lay
        return told | {"init_from": {"sha256": file.sha256}}
    return told | ({"init_from": not_default(source)} if source else {})


checks.KINDS |= {"Experiment": Experiment, "Weights": Weights, "Path": Path}


def _parameters() -> str:
    # The fields as a section of the class's docstring, for help(Experiment) and `Experiment?`.
    lines = ["Parameters", "----------"]
    for f in dataclasses.fields(Experiment):
        said = f"{f.metadata['doc']}."
        if f.metadata.get("allowed"):
            said += f" Allowed: {fields.allowed(f)}."
        if f.metadata.get("search"):
            said += f" A random search draws it from {f.metadata['search']}."
        lines.append(f"{f.name} : {fields.kind(f)}, default {_default(f)!r}")
        lines += textwrap.wrap(said, 92, initial_indent=" " * 4, subsequent_indent=" " * 4)
    return textwrap.indent("\n".join(lines), " " * 4)


Experiment.__doc__ = f"{Experiment.__doc__}\n{_parameters()}\n    "


def import_plugin(plugin: str) -> None:
    """Import a file of methods, models or data; ValueError if there is no such module."""
    if plugin.endswith(".py") or not all(part.isidentifier() for part in plugin.split(".")):
        name = plugin.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
        raise ValueError(
            f"Experiment(plugins=({plugin!r},)): give the name of a module, such as {name!r}: "
            "without .py, and without folders, which PYTHONPATH names"
        )
    try:
        importlib.import_module(plugin)
    except ModuleNotFoundError as error:
        if error.name != plugin.partition(".")[0]:  # the file is there, and lacks something itself
            raise
        raise ValueError(
            f"Experiment(plugins=({plugin!r},)): there is no such module; name a file (without "
            ".py) in the current folder or in a folder of PYTHONPATH"
        ) from None
    except SystemExit:
        raise ValueError(
            f"Experiment(plugins=({plugin!r},)): this module ends Python when it is imported; put "
            "what it does as a script below `if __name__ == '__main__':`"
        ) from None
    except (ValueError, ImportError):  # they say what is wrong; others may not name the module
        raise
    except Exception as error:
        raise ValueError(
            f"Experiment(plugins=({plugin!r},)): this module raises {type(error).__name__} when it "
            f"is imported ({error}); `python -c 'import {plugin}'` shows where"
        ) from error


def which_clients(clients: int, args: dict[str, Any]) -> tuple[int, slice]:
    """For how many clients a partition with these arguments splits, and which of them are kept.

    Raises
    ------
    ValueError
        If the split has too few clients to keep `clients` of them.
    """
    of, first, every = args.get("of", clients), args.get("first", 0), args.get("every", 1)
    if all(type(v) is int for v in (of, first, every)) and first >= 0 and every >= 1:
        end = first + every * (clients - 1) + 1
        if end <= of:
            return of, slice(first, end, every)
    raise ValueError(
        f"Experiment(clients={clients}, partition_args={args!r}): allowed are integers with "
        "first >= 0, every >= 1 and first + every * (clients - 1) < of"
    )


def grid(
    base: Experiment,
    rows: dict[str, dict],
    columns: dict[str, dict] | None = None,
    seeds: Iterable[int] = (0,),
) -> list[Experiment]:
    """The Experiments of a table: one for each column, row and seed, in this order.

    Parameters
    ----------
    base : Experiment
        What all of them have in common.
    rows, columns : dict of dicts
        What a row or a column changes in `base`, by its label: `{"FedPer": {"method": "fedper"}}`.
        Where both change a field, the row's value counts. The labels become the tags "row" and
        "column".
    seeds : iterable of int
        Values of the field `seed`. The sources (`init_from`) take the same seed, because with
        another one their clients would hold other samples.

    Returns
    -------
    list of Experiment

    Examples
    --------
    >>> from pfl_core import Experiment, grid
    >>> rows = {"FedAvg": {"method": "fedavg"}, "FedPer": {"method": "fedper"}}
    >>> for cell in grid(Experiment(rounds=2), rows, seeds=[0, 1]):
    ...     print(cell.tags["row"], cell.method, cell.seed)
    FedAvg fedavg 0
    FedAvg fedavg 1
    FedPer fedper 0
    FedPer fedper 1
    """
    for name, given in (("rows", rows), ("columns", columns or {})):
        if not isinstance(given, dict) or not all(isinstance(v, dict) for v in given.values()):
            raise TypeError(
                f"grid({name}={given!r}): allowed is a dict of labels and changed fields, such as "
                "{'FedPer': dict(method='fedper')}"
            )
    if not isinstance(seeds, Iterable):
        raise TypeError(f"grid(seeds={seeds!r}): allowed is a list of integers, such as range(3)")
    seeds = list(seeds)
    if not rows or not seeds:
        raise ValueError(f"grid(rows={rows}, seeds={seeds}): allowed is one of each at least")
    cells = itertools.product(columns.items() if columns else [("", {})], rows.items())
    unseeded = [
        base.but(**_both(of_column, of_row)).but(tags={"row": f"{row}", "column": f"{column}"})
        for (column, of_column), (row, of_row) in cells
    ]
    return [seeded(cell, seed) for cell in unseeded for seed in seeds]


def _both(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    # Two changes as one, so that what an argument belongs to may be named by the other one.
    both = first | then
    for name in JSON_FIELDS:
        of, inner = name.removesuffix("_args"), [c.get(name, {}) for c in (first, then)]
        another = of in first and both[of] != first[of]  # the first one's are of no use to it
        if all(isinstance(v, dict) for v in inner) and any(inner):
            both[name] = inner[1] if another else inner[0] | inner[1]
    return both


def chain(experiment: Experiment) -> list[Experiment]:
    """An Experiment, what it starts from (`init_from`), what that starts from, and so on."""
    out = [experiment]
    while start := out[-1].earlier:
        out.append(start)
    return out


def seeded(experiment: Experiment, seed: int) -> Experiment:
    """The Experiment with another seed, which what it starts from (`init_from`) takes, too."""
    source = experiment.earlier
    start = experiment.init_from if source is None else seeded(source, seed)
    return experiment.but(seed=seed, init_from=start)
