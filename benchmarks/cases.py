"""The rounds that are timed, in settings of the papers.

They run over real data where these are, and elsewhere over noise of the same size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pfl_core.data import pools as data
from pfl_core.data.pools import DatasetMissing, Pool
from pfl_core.experiments.experiment import Experiment

SHAPES = {"mnist": (70_000, (28, 28)), "cifar10": (60_000, (32, 32, 3))}


class Case(NamedTuple):
    """One round to time.

    `says` is what it is; `cpu` and `gpu` are the ratios over the plain loop that it should reach on
    two cores and on an H100.
    """

    says: str
    experiment: Callable[[], Experiment]
    cpu: float
    gpu: float


def served(name: str) -> str:
    """`name`, or the name of noise of its size, where it is not here.

    Of noise the times are the same, and accuracies mean nothing.
    """
    try:
        data.load(name)
        return name
    except DatasetMissing:
        noise = f"noise_{name}"
        if noise not in data.list_datasets():
            data.register_dataset(noise, lambda: _noise(name), f"random images of {name}'s size")
        return noise


def _noise(name: str) -> Pool:
    n, shape = SHAPES[name]
    draw = np.random.default_rng(0)
    y = np.repeat(np.arange(10), n // 10)
    x = draw.integers(0, 256, (n, *shape), dtype=np.uint8)
    return Pool(
        f"noise_{name}",
        x,
        y,
        np.arange(n) % 6 == 0,
        10,
        {},
        (0.5,) * (1 if len(shape) == 2 else 3),
        None,
    )


def _dirichlet(dataset: str, model: str, **changes) -> Callable[[], Experiment]:
    fields = dict(
        partition="dirichlet",
        partition_args={"alpha": 0.1},
        clients=20,
        model=model,
        batch=10,
        lr=0.005,
        rounds=1,
    )
    return lambda: Experiment(**fields | changes | {"dataset": served(dataset)})


CASES: dict[str, Case] = {
    "quickstart": Case(
        "MNIST, 20 clients, Dir(0.1), CNN, batch 10, one epoch: PFLlib's quick start",
        _dirichlet("mnist", "cnn"),
        2.5,
        30,
    ),
    "flayer": Case(
        "FLAYER on CIFAR-10: 20 clients, CNN, batch 10, one epoch",
        _dirichlet("cifar10", "cnn", method="flayer", plan="drop"),
        2.0,
        30,
    ),
    "fedaghn": Case(
        "FedAGHN on CIFAR-10: 20 clients, CNN with BatchNorm, batch 64, 5 epochs of 600 images "
        "a client",
        _dirichlet(
            "cifar10",
            "cnn_bn",
            method="fedaghn",
            batch=64,
            epochs=5,
            lr=0.01,
            plan="drop",
            max_samples=600,
        ),
        1.75,
        8,
    ),
    "pfedhn": Case(
        "pFedHN on CIFAR-10: one of 50 clients, 50 steps of batch 64 (20 communication steps "
        "timed together)",
        _dirichlet(
            "cifar10",
            "lenet",
            method="pfedhn",
            partition="pfedhn_classes",
            partition_args={},
            clients=50,
            participation=0.02,
            steps=50,
            batch=64,
            plan="fresh",
            momentum=0.9,
            weight_decay=5e-5,
            clip=50.0,
            rounds=20,
        ),
        1.1,
        6,
    ),
    "participation": Case(
        "pFedLA on CIFAR-10: 10 of 100 clients, LeNet with BatchNorm, batch 32, 20 epochs",
        _dirichlet(
            "cifar10",
            "lenet",
            model_args={"bn": True},
            method="pfedla",
            partition="pfedla_noniid1",
            partition_args={},
            clients=100,
            participation=0.1,
            batch=32,
            epochs=20,
            lr=0.01,
        ),
        2.0,
        15,
    ),
    "resnet": Case(
        "FLAYER's ResNet-18 on CIFAR-10: 20 clients, batch 10, one epoch of 150 images a client",
        _dirichlet("cifar10", "resnet18", method="flayer", plan="drop", lr=0.1, max_samples=150),
        1.2,
        4,
    ),
}
