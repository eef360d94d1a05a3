"""Hyper-parameters per paper, artefact and profile, each with its source: [P] the paper, [O] the authors' code, [C] our choice."""

from __future__ import annotations

from typing import Any

SEEDS = {"smoke": [0], "quick": [0, 1], "paper": [0, 1, 2]}

ARTEFACTS = {"fedper": [f"fig{i}" for i in range(2, 19)]}

# FedPer, Sec. 4.1 [P]: N = 10, e = 4, batch 128, SGD with lr .01, 100 rounds; FLICKR-AES: N = 30, batch 4, 80/20.
# [C] (the paper is silent): BatchNorm statistics of the base are averaged, personal layers start from draws of their own (Alg. 1),
# networks have CIFAR stems at 32x32, no momentum, no augmentation; K_P = 2 where a figure does not say.
_FEDPER: dict[str, dict[str, Any]] = {
    "paper": dict(rounds=100, epochs=4, batch=128, lr=0.01, clients=10),
    # Small networks, fewer and smaller batches, and a rate that suits them [C]: a run takes seconds on two cores.
    "quick": dict(rounds=12, epochs=1, batch=16, lr=0.05, clients=10, eval_every=2, max_samples=400),
    "smoke": dict(rounds=1, epochs=1, batch=16, lr=0.05, clients=4, max_samples=16),
}
_WIDTH = {"paper": 1.0, "quick": 0.125, "smoke": 0.0625}
_RATERS = {"paper": dict(clients=30, batch=4), "quick": dict(clients=10, batch=8), "smoke": dict(clients=4)}


def fedper(profile: str, dataset: str) -> dict[str, Any]:
    """Fields of the Experiment that FedPer's figures vary; model and K_P are set there."""
    raters = dataset.startswith(("raters", "flickr"))
    fields = (
        _FEDPER[profile]
        | (_RATERS[profile] if raters else {})
        | dict(buffers="average", head_init="own", head_depth=2, eval_after=False)
    )
    if profile == "quick" and dataset.startswith("cifar"):
        fields |= dict(rounds=20, batch=32, eval_every=2)
    scheme = (
        dict(partition="workers", partition_args={}) if raters else dict(partition="fedper_classes", partition_args={})
    )
    return fields | scheme | dict(dataset=dataset, model_args={"width": _WIDTH[profile]})


def preset(paper: str, artefact: str, profile: str, dataset: str) -> dict[str, Any]:
    """Fields of an Experiment for one artefact of a paper at a profile over a data set."""
    return {"fedper": fedper}[paper](profile, dataset)
