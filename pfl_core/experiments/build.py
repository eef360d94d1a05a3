"""From an Experiment to what is trained: its settings, its clients' data on a device, and its method bound to both."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pfl_core import models
from pfl_core.data import partition as partitions
from pfl_core.data import pools
from pfl_core.data.client_data import ClientData
from pfl_core.data.federation import Federation
from pfl_core.experiments.experiment import WHICH, Experiment, which_clients
from pfl_core.methods.base import Method, head_models, make_method
from pfl_core.methods.task import Task, TrainConfig


def train_config(e: Experiment) -> TrainConfig:
    """What engine, round loop and method need of an Experiment; the only place where one is made."""
    return TrainConfig(**{f.name: getattr(e, f.name) for f in dataclasses.fields(TrainConfig)})


# -- data and clients ----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def _split(
    pool: pools.Pool, fn: Callable, partition: str, args: str, clients: int, seed: int
) -> partitions.Split:
    # `pool` and `fn` as they are now: another PFL_DATA, or a scheme registered anew, is another split.
    given = json.loads(args)
    of, kept = which_clients(clients, given)
    scheme = {n: v for n, v in given.items() if n not in WHICH}
    s = partitions.partition(partition, pool, of, seed, **scheme)
    return partitions.Split(s.train[kept], s.val[kept], s.test[kept])


def split(e: Experiment, pool: pools.Pool | None = None) -> partitions.Split:
    """Who holds what in an Experiment: index arrays into its pool (default: the data set of its name), not yet capped by max_samples."""
    seed = e.seed if e.partition_seed is None else e.partition_seed
    args = json.dumps(e.partition_args, sort_keys=True)
    return _split(
        pool or pools.load(e.dataset),
        partitions.function(e.partition),
        e.partition,
        args,
        e.clients,
        seed,
    )


def federation(e: Experiment, pool: pools.Pool | None = None) -> Federation:
    """The data (default: the data set of its name) and clients of an Experiment, with at most max_samples in each of their lists."""
    return _dealt(e, pool).at_most(e.max_samples)


def _dealt(e: Experiment, pool: pools.Pool | None = None) -> Federation:
    pool = pool or pools.load(e.dataset)
    s = split(e, pool)
    about = dict(classes=pool.classes, mean=pool.mean, std=pool.std, name=e.dataset)
    return Federation(pool.inputs, pool.y, s.train, s.val, s.test, **about)


def own(e: Experiment, fed: Federation) -> Experiment:
    """An Experiment over a user's own Federation, with the clients that it has; ValueError where the two contradict each other."""
    if e.clients not in (fed.K, Experiment.clients):
        raise ValueError(
            f"Experiment(clients={e.clients}) over a Federation of {fed.K} clients; give clients={fed.K}, or leave it out"
        )
    if e.normalize != "dataset" and fed.kind != "image":
        raise ValueError(
            f"Experiment(normalize={e.normalize!r}) over a Federation of {fed.kind}: only uint8 images are normalised, other samples are "
            "taken as they are; leave normalize out"
        )
    if e.normalize != "dataset" and fed.mean is not None:
        raise ValueError(
            f"Federation(mean={fed.mean}) in Experiment(normalize={e.normalize!r}); leave one of them out"
        )
    return e.but(clients=fed.K)


def client_data(
    e: Experiment, device: str | torch.device = "cpu", fed: Federation | None = None
) -> ClientData:
    """What the engine trains on: the clients of an Experiment, or of a user's own Federation under its settings, on a device."""
    fed = _dealt(e) if fed is None else fed
    mean, std = _normalisation(e, fed)
    how = dict(
        seed=e.seed,
        holdout=e.holdout,
        dtype=getattr(torch, e.dtype),
        device=device,
        mean=mean,
        std=std,
    )
    return ClientData(fed.at_most(e.max_samples), **how)


def _normalisation(
    e: Experiment, fed: Federation
) -> tuple[Sequence[float] | None, Sequence[float] | None]:
    # Mean and std of images. Those without a mean of their own take that of their training samples, as a Pool does.
    if e.normalize == "half":
        return [0.5], [0.5]
    if fed.kind != "image" or fed.mean is not None:
        return fed.mean, fed.std
    x = fed.x if fed.x.ndim < 4 or fed.x.shape[-1] in (1, 3) else fed.x.transpose(0, 2, 3, 1)
    return pools.statistics(x[np.unique(np.concatenate(fed.index["train"]))])


# -- the method ----------------------------------------------------------------------------------------------------------


class Shapes(Protocol):
    """What a method must know of the data before any of them is seen: `ClientData`, or what clients say of themselves."""

    K: int
    classes: int
    input_shape: tuple[int, ...]
    n: Tensor
    label_counts: Tensor
    device: torch.device

    def extremes(self) -> Tensor:
        """Two samples (2, *input_shape) to try the model on; of tokens those with the smallest and the largest."""


def build_method(e: Experiment, data: Shapes) -> Method:
    """The Experiment's method, bound to its model and clients."""
    make = functools.partial(
        models.build, e.model, data.input_shape, data.classes, **vocabulary(e) | e.model_args
    )
    dtype = getattr(torch, e.dtype)
    model = make(seed=e.seed).to(dtype)
    models.check_fit(e.model, model, data.extremes(), data.classes)
    model, heads = model.to(data.device), None
    if e.head_init == "own":
        names = models.head(model, e.head_depth, e.head_by)
        drawn = head_models(lambda k: make(seed=_own_seed(e.seed, k)), names, data.K)
        heads = {
            n: v.to(data.device, dtype if v.is_floating_point() else v.dtype)
            for n, v in drawn.items()
        }
    task = Task(model, data.n, data.label_counts, train_config(e), heads)
    return make_method(e.method, **e.method_args).bind(task)


def _own_seed(seed: int, k: int) -> int:
    return (seed + 1) * 100_003 + k


def vocabulary(e: Experiment) -> dict[str, int]:
    """Model options that the data decide: the vocabulary's size for texts."""
    if e.dataset == "own" or "vocab" not in (pool := pools.load(e.dataset)).extra:
        return {}
    return {"vocab": len(pool.extra["vocab"])}
