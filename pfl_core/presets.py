"""Hyper-parameters per paper, artefact and profile, each with its source: [P] the paper, [O] the authors' code, [C] our choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pfl_core.experiments import Experiment


def seeds(profile: str, embedded: bool) -> list[int]:
    """Seeds of a profile: quick takes one on the embedded data, where time is short, and two on real data."""
    return {"smoke": [0], "quick": [0] if embedded else [0, 1], "paper": [0, 1, 2]}[profile]


ARTEFACTS = {"fedper": [f"fig{i}" for i in range(2, 19)]}

# FedPer, Sec. 4.1 [P]: N = 10, e = 4, batch 128, SGD with lr .01, 100 rounds; FLICKR-AES: N = 30, batch 4, 80/20.
# [C] (the paper is silent): BatchNorm statistics of the base are averaged, personal layers start from draws of their own (Alg. 1),
# networks have CIFAR stems, no momentum, no augmentation; K_P = 2 where a figure does not say.
# quick and smoke [C]: narrow networks with their original stem, fewer and smaller batches, and a rate that suits them.
_FEDPER: dict[str, dict[str, Any]] = {
    "paper": dict(rounds=100, epochs=4, batch=128, lr=0.01, clients=10),
    "quick": dict(rounds=20, epochs=1, batch=16, lr=0.1, clients=10, eval_every=4, max_samples=160),
    "smoke": dict(rounds=2, epochs=1, batch=8, lr=0.05, clients=10, eval_every=2, max_samples=8),
}
_RATERS = {"paper": dict(clients=30, batch=4), "quick": dict(batch=8), "smoke": {}}
_NETS = {
    "paper": dict(width=1.0, stem="cifar"),
    "quick": dict(width=0.25, stem="imagenet"),
    "smoke": dict(width=0.0625, stem="imagenet"),
}


def fedper_nets(profile: str) -> dict[str, dict[str, Any]]:
    """FedPer's two networks at a profile, as changes to an Experiment."""
    nets = {"MobileNet": "mobilenet", "ResNet-34": "resnet34"}
    return {name: {"model": model, "model_args": _NETS[profile]} for name, model in nets.items()}


def linear_rows(net: dict[str, Any], depth: int = 1) -> dict[str, dict]:
    """Rows "original" and "linear base" (Sec. 4.4): all below the last `depth` blocks of a network is one linear layer."""
    return {"original": {}, "linear base": {"model": "linear", "model_args": {"of": net["model"], "depth": depth}}}


def fedper(profile: str, dataset: str) -> dict[str, Any]:
    """Fields of the Experiment that FedPer's figures vary; network, k and K_P are set there."""
    fields = dict(
        dataset=dataset, partition="fedper_classes", buffers="average", head_init="own", head_depth=2, eval_after=False
    )
    fields |= _FEDPER[profile]
    if profile == "quick" and dataset in ("cifar10", "cifar100"):
        fields |= dict(batch=32, max_samples=320, eval_every=2)
    if dataset.startswith(("raters", "flickr")):
        fields |= dict(partition="workers") | _RATERS[profile]
    return fields


def preset(paper: str, artefact: str, profile: str, dataset: str) -> dict[str, Any]:
    """Fields of an Experiment for one artefact of a paper at a profile over a data set."""
    return {"fedper": fedper}[paper](profile, dataset)


# -- all methods side by side --------------------------------------------------------------------------------------------

# The common settings of the comparison [C]: Dir(.1), 20 clients, a LeNet with BatchNorm (so that FedBN differs from FedAvg).
COMPARISON: dict[str, Any] = dict(
    dataset="fashion_mnist",
    partition="dirichlet",
    partition_args={"alpha": 0.1, "split": "70/10/20"},
    clients=20,
    model="lenet",
    model_args={"bn": True},
    rounds=30,
    epochs=2,
    batch=32,
    lr=0.05,
    max_samples=160,
    eval_every=3,
)


def _fixed(method: str, **args: Any) -> Callable[[Experiment], dict[str, Any]]:
    return lambda e: dict(method=method, method_args=args)


def _lgfedavg(e: Experiment) -> dict[str, Any]:
    # The paper starts from a trained FedAvg model; here it gets half of the budget, so that all rows train equally long.
    half = e.rounds // 2
    return dict(
        method="lgfedavg", rounds=e.rounds - half, init_from=e.but(method="fedavg", rounds=half, keep_models=True)
    )


def _pfedhn(method: str) -> Callable[[Experiment], dict[str, Any]]:
    # One client a communication step [P]; as many client visits as the others have, so K times their rounds. Local SGD as in the
    # authors' code [O]: fresh batches, lr 5e-3, momentum .9, weight decay 5e-5, clip 50.
    local = dict(lr=0.005, momentum=0.9, weight_decay=5e-5, clip=50.0, plan="fresh")
    return lambda e: dict(
        method=method,
        participation=1 / e.clients,
        rounds=e.rounds * e.clients,
        eval_every=e.eval_every * e.clients,
        **local,
    )


# Rows of the comparison, in the order of tables: changes to the common Experiment. A method that is not tuned here has the
# defaults of its file, each with its source there.
COMPARED: dict[str, Callable[[Experiment], dict[str, Any]]] = {
    "local": _fixed("local"),
    "fedavg": _fixed("fedavg"),
    "fedprox": _fixed("fedprox"),
    "perfedavg": _fixed("perfedavg", passes=2),  # two batches a step: two passes make as many steps as the others take
    "pfedme": _fixed("pfedme"),
    "lgfedavg": _lgfedavg,
    "fedbn": _fixed("fedbn"),
    "fedper": _fixed("fedper"),
    "fedrep": _fixed("fedrep"),
    "fedfomo": lambda e: dict(method="fedfomo", holdout=0.2),
    "ditto": _fixed("ditto"),
    "fedcp": _fixed("fedcp"),
    "fedpac": _fixed("fedpac"),
    "cfl": _fixed("cfl"),
    "fedamp": _fixed("fedamp"),
    "heurfedamp": _fixed("heurfedamp"),
    "fedala": _fixed("fedala"),
    "apple": _fixed("apple"),
    "gpfl": _fixed("gpfl"),
    "pfedhn": _pfedhn("pfedhn"),
    "pfedhn_pc": _pfedhn("pfedhn_pc"),
    "pfedla": _fixed("pfedla"),
    "heurpfedla": _fixed("heurpfedla"),
    "flayer": _fixed("flayer"),
    "fedaghn": _fixed("fedaghn"),
}
