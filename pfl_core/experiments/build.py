"""From an Experiment to what is trained: its settings, its clients' data, and its method."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from pfl_core import models
from pfl_core.anatomy import examined
from pfl_core.data import partition as partitions
from pfl_core.data import pools, shifts
from pfl_core.data.client_data import ClientData
from pfl_core.data.federation import Federation
from pfl_core.engine import finetune
from pfl_core.experiments.experiment import WHICH, Experiment, which_clients
from pfl_core.experiments.weights import fill
from pfl_core.methods.base import Method, head_models, make_method
from pfl_core.methods.task import Task, TrainConfig
from pfl_core.util import identity, paths
from pfl_core.util.draws import unmoved


def train_config(experiment: Experiment) -> TrainConfig:
    """What engine, round loop and method need of an Experiment; a TrainConfig is made only here."""
    names = [f.name for f in dataclasses.fields(TrainConfig)]
    return TrainConfig(**{name: getattr(experiment, name) for name in names})


# -- data and clients ------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def _split(
    pool: pools.Pool, scheme: Callable, partition: str, args: str, clients: int, seed: int
) -> partitions.Split:
    # `pool` and `scheme` are part of the key: with another PFL_DATA, or a scheme registered anew,
    # the same names give another split.
    given = json.loads(args)
    of, kept = which_clients(clients, given)
    given = {name: v for name, v in given.items() if name not in WHICH}
    return partitions.partition(partition, pool, of, seed, **given).of(kept)


def split(experiment: Experiment, pool: pools.Pool | None = None) -> partitions.Split:
    """Who holds what in an Experiment, before `max_samples` cuts it.

    Parameters
    ----------
    experiment : Experiment
    pool : Pool, optional
        The data; without it, the data set of the Experiment's name.

    Returns
    -------
    Split
        Index arrays into the pool, one a client.
    """
    e = experiment
    seed = e.seed if e.partition_seed is None else e.partition_seed
    args = json.dumps(e.partition_args, sort_keys=True)
    pool, scheme = pool or pools.load(e.dataset), partitions.function(e.partition)
    return _split(pool, scheme, e.partition, args, e.clients, seed)


def places(experiment: Experiment, index: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Where the test samples `index` of each client are in the data.

    A partition that transforms or relabels samples trains on copies, which have other indices.
    """
    if experiment.dataset == "own":
        return list(index)
    dealt = split(experiment).test
    return [whole[: len(mine)] for whole, mine in zip(dealt, index, strict=True)]


def federation(experiment: Experiment, pool: pools.Pool | None = None) -> Federation:
    """Data and clients of an Experiment, with at most `max_samples` samples in each part.

    `pool` is the data; without it, the data set of the Experiment's name.
    """
    return _whole_federation(experiment, pool).at_most(experiment.max_samples)


def _whole_federation(experiment: Experiment, pool: pools.Pool | None = None) -> Federation:
    pool = pool or pools.load(experiment.dataset)
    x, y, classes, s = shifts.applied(pool.inputs, pool.y, pool.classes, split(experiment, pool))
    about: dict[str, Any] = dict(classes=classes, mean=pool.mean, std=pool.std)
    return Federation(x, y, s.train, s.val, s.test, name=experiment.dataset, **about)


def fitted(experiment: Experiment, fed: Federation | None) -> Experiment:
    """The Experiment with as many clients as the user's own Federation, if there is one.

    Raises
    ------
    ValueError
        Where the two contradict each other, or where one of them is missing.
    """
    e = experiment.checked()
    if fed is not None and not isinstance(fed, Federation):
        got = type(fed).__name__
        raise TypeError(f"fed is a {got}; allowed is a Federation: fed=Federation(x, y, train=...)")
    if (e.dataset == "own") != (fed is not None):
        raise ValueError(
            'dataset="own" and a Federation go together: '
            'run(Experiment(dataset="own", ...), fed=Federation(...)), or on the command line '
            "--dataset own --fed FOLDER"
        )
    if fed is None:
        return e
    if e.clients not in (fed.K, None):
        raise ValueError(
            f"Experiment(clients={e.clients}) over a Federation of {fed.K} clients; "
            f"give clients={fed.K}, or leave it out"
        )
    if e.normalize != "dataset" and fed.kind != "image":
        raise ValueError(
            f"Experiment(normalize={e.normalize!r}) over a Federation of {fed.kind}: only uint8 "
            "images are normalised, other samples are taken as they are; leave normalize out"
        )
    if fed.kind == "image" and fed.mean is None and fed.std is not None:
        raise ValueError(
            f"Federation(std={fed.std}) without a mean; give both, or neither, which means those "
            "of the training images"
        )
    if e.normalize != "dataset" and fed.mean is not None:
        raise ValueError(
            f"Federation(mean={fed.mean}) in Experiment(normalize={e.normalize!r}); "
            "leave one of them out"
        )
    return e.but(clients=fed.K)


def client_data(
    experiment: Experiment, device: str | torch.device = "cpu", fed: Federation | None = None
) -> ClientData:
    """What the engine trains on: the clients of an Experiment, with their samples on a device.

    `fed` brings the clients instead, under the settings of the Experiment.
    """
    fed = _whole_federation(experiment) if fed is None else fed
    mean, std = _normalisation(experiment, fed)
    # A partition deals in random order; lists that a user gives may be sorted.
    drawn_by = experiment.seed if experiment.dataset == "own" else None
    return ClientData(
        fed.at_most(experiment.max_samples, drawn_by),
        seed=experiment.seed,
        holdout=experiment.holdout,
        dtype=getattr(torch, experiment.dtype),
        device=device,
        mean=mean,
        std=std,
        augment=experiment.augment,
    )


def _normalisation(
    experiment: Experiment, fed: Federation
) -> tuple[Sequence[float] | None, Sequence[float] | None]:
    # Mean and standard deviation of images. Images that come without are normalised by those of
    # their training samples, as a Pool's are.
    if experiment.normalize == "half":
        return [0.5], [0.5]
    if fed.kind != "image" or fed.mean is not None:
        return fed.mean, fed.std
    x = fed.x if fed.x.ndim < 4 or fed.x.shape[-1] in (1, 3) else fed.x.transpose(0, 2, 3, 1)
    return pools.statistics(x, np.unique(np.concatenate(fed.index["train"])))


# -- the method ------------------------------------------------------------------------------------


class DataShape(Protocol):
    """What a method must know of the data before any of them is seen.

    `ClientData` is one; so is what the clients of a Flower federation say of themselves.
    """

    K: int
    classes: int
    input_shape: tuple[int, ...]
    n: Tensor
    label_counts: Tensor
    device: torch.device

    def extremes(self) -> Tensor:
        """Two samples (2, *input_shape) to try the model on.

        Of tokens, one has the smallest and the other the largest of all.
        """
        ...


def build_method(
    experiment: Experiment,
    data: DataShape,
    store: Path | None = None,
    options: dict[str, int] | None = None,
) -> Method:
    """The Experiment's method, bound to its model and clients.

    Parameters
    ----------
    store : Path, optional
        The folder of runs, which keeps the weights that the Experiment starts from; by default
        store/ in $PFL_RUNS.
    options : dict, optional
        Those of the model that the data decide; by default `vocabulary`.
    """
    e, dtype = experiment, getattr(torch, experiment.dtype)
    options = (vocabulary(e) if options is None else options) | e.model_args
    make = functools.partial(models.build, e.model, data.input_shape, data.classes, **options)
    model = models.in_dtype(make(seed=e.seed), e.dtype)
    ours = identity.is_ours(models.function(e.model))
    if not ours:
        _check_built(e.model, model, models.in_dtype(make(seed=e.seed), e.dtype))
    with nullcontext() if ours else unmoved(f"model {e.model!r}"):
        anatomy = examined(e.model, model, data.extremes(), data.classes, e.batch)
    names = anatomy.head(e.head_depth, e.head_by, e.head)
    if e.weights:
        given = e.weights.load(store or paths.store_folder())
        fill(model, given, e.weights.path, names if e.new_head else ())
        name = f"{e.model} from {e.weights.path}"
        models.check_fit(name, model, data.extremes(), data.classes)  # it has other weights now
    model, heads = model.to(data.device), None
    if e.head_init == "own":
        drawn = head_models(lambda k: make(seed=_seed_of_head(e.seed, k)), names, data.K)
        heads = {
            name: v.to(data.device, dtype if v.is_floating_point() else v.dtype)
            for name, v in drawn.items()
        }
    task = Task(model, data.n, data.label_counts, train_config(e), heads, anatomy)
    if heads or "mix_and_match" in e.record:
        _ = task.head  # ValueError where it is not what gives the scores
    method = make_method(e.method, **e.method_args).bind(task)
    finetune.check(method)
    return method


def _check_built(name: str, one: nn.Module, two: nn.Module) -> None:
    # ValueError where two models of one seed differ.
    for (n, a), b in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        if not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
            raise ValueError(
                f"model {name!r}: {n} differs between two models of one seed, so it is drawn from "
                "numpy's or Python's random numbers, or read from what changes; draw with torch, "
                "which is seeded"
            )


def _seed_of_head(seed: int, k: int) -> int:
    return (seed + 1) * 100_003 + k


def vocabulary(experiment: Experiment) -> dict[str, int]:
    """Options of the model that the data decide: for texts, {"vocab": size of the vocabulary}."""
    if experiment.dataset == "own" or experiment.partition_args.get("words"):
        return {}  # vectors have none
    return pools.load(experiment.dataset).options
