"""Presets by name: the rows of every table at the paper's scale, and the settings in which all methods are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pfl_core import checks
from pfl_core.experiments import Experiment
from pfl_core.papers import PAPERS, paper, use


def seeds(profile: str, embedded: bool) -> list[int]:
    """Seeds of a profile: quick takes one on the embedded data, where time is short, and two on real data; medium two, unless a
    paper's MEDIUM says otherwise of an artefact."""
    return {"smoke": [0], "quick": [0] if embedded else [0, 1], "medium": [0, 1], "paper": [0, 1, 2]}[profile]


def presets(name: str, artefact: str, dataset: str = "", clients: int = 0) -> dict[str, dict[str, Any]]:
    """{row: fields of its Experiment} of a paper's table at the paper's scale; dataset and clients pick the column.

    Views (FedAvg-FT, FedProx-FT) are rows of fedavg and fedprox read at when="after". ValueError for an unknown paper or table.
    """
    tables = {p: paper(p).TABLES for p in PAPERS if paper(p).TABLES}
    checks.known("paper with presets", name, tables)
    checks.known(f"table of {name}:", artefact, tables[name])
    where = (artefact, "paper", dataset or "cifar10", clients)
    common = paper(name).setting(*where)
    return {label: common | changes for label, changes in paper(name).rows(*where).items()}


# -- all methods side by side --------------------------------------------------------------------------------------------

# The common settings of the comparison [C]: Dir(.1), 20 clients, a LeNet with BatchNorm (so that FedBN differs from FedAvg).
COMPARISON: dict[str, Any] = dict(
    dataset="cifar10",
    partition="dirichlet",
    partition_args={"alpha": 0.1, "split": "70/10/20"},
    clients=20,
    model="lenet",
    model_args={"bn": True, "kernels": 8},
    rounds=80,
    epochs=1,
    batch=32,
    lr=0.1,
    max_samples=160,
    eval_every=10,
)


def _fixed(method: str, **args: Any) -> Callable[[Experiment], dict[str, Any]]:
    return lambda e: use(method, **args)


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
