"""Presets by name: every table's rows at the paper's scale, and the comparison of all methods."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from pfl_core.experiments.experiment import Experiment
from pfl_core.util import checks
from pfl_papers.papers.base import PAPERS, paper
from pfl_papers.papers.shown import use


def presets(
    name: str, artefact: str, dataset: str = "", clients: int = 0
) -> dict[str, dict[str, Any]]:
    """{row: fields of its Experiment} of a paper's table at the paper's scale.

    Views (FedAvg-FT, FedProx-FT) are rows of fedavg and fedprox read at when="after".

    Parameters
    ----------
    name : str
        Of the paper.
    artefact : str
        The table's key, "table1".
    dataset : str
        Picks the column; "" for CIFAR-10.
    clients : int
        Picks the column; 0 for as many as the paper has where no column says it.

    Raises
    ------
    ValueError
        For an unknown paper or table.
    """
    tables = {p: paper(p).tables for p in PAPERS if paper(p).tables}
    checks.known("paper with presets", name, tables)
    checks.known(f"table of {name}:", artefact, tables[name])
    where = (artefact, "paper", dataset or "cifar10", clients)
    common = paper(name).setting(*where)
    return {label: common | changes for label, changes in paper(name).rows(*where).items()}


# -- all methods side by side ----------------------------------------------------------------------

# The common settings of the comparison [C]: CIFAR-10, Dir(.1), 20 clients, at most 800 images to
# train on each (all of them: five hours of two cores in place of two and a half), a LeNet with
# BatchNorm (so that FedBN differs from FedAvg). Rates are tuned, this one is the middle of most
# grids.
COMPARISON: dict[str, Any] = dict(
    dataset="cifar10",
    partition="dirichlet",
    partition_args={"alpha": 0.1, "split": "70/10/20"},
    clients=20,
    model="lenet",
    model_args={"bn": True, "kernels": 16},
    rounds=30,
    epochs=1,
    batch=32,
    lr=0.03,
    eval_every=2,
    eval_after=True,
    max_samples=800,
)
# Changes to them, by profile; smoke is for tests.
SCALES: dict[str, dict[str, Any]] = {
    "smoke": dict(clients=4, rounds=4, max_samples=24, model_args={"kernels": 2}),
    "medium": {},
}


def _fixed(method: str, **args: Any) -> Callable[[Experiment], dict[str, Any]]:
    return lambda experiment: use(method, **args)


# Rows that are fine-tuned after the last round, and are scored then.
FINETUNED: dict[str, list[dict[str, Any]]] = {
    # The head on features that stay, then all: Kumar et al., "Fine-Tuning can Distort Pretrained
    # Features and Underperform Out-of-Distribution", ICLR 2022; after FedAvg: Chen et al., "A
    # Closer Look at Personalized Fine-Tuning in Heterogeneous Federated Learning",
    # arXiv:2511.12695, 15 epochs in all. How they are divided is ours: its appendix was not found.
    "lpft": [{"epochs": 5, "only": "head"}, {"epochs": 10}],
    "fedbabu": [{"epochs": 5}],  # authors' code
}


def _finetuned(row: str, method: str) -> Callable[[Experiment], dict[str, Any]]:
    return lambda experiment: dict(use(method), finetune=FINETUNED[row])


def _lgfedavg(experiment: Experiment) -> dict[str, Any]:
    # The paper starts from a trained FedAvg model; here it gets half of the budget, so that all
    # rows train equally long.
    half = experiment.rounds // 2
    evaluated = dict(eval_every=max(1, half), eval_after=False, finetune=None)
    trained = experiment.but(method="fedavg", rounds=half, keep_models=True, **evaluated)
    return dict(method="lgfedavg", rounds=experiment.rounds - half, init_from=trained)


def _pfedhn(method: str) -> Callable[[Experiment], dict[str, Any]]:
    # One client a communication step [P]; as many client visits as the others have, so K times
    # their rounds. Local SGD as in the authors' code [O]: fresh batches, lr 5e-3, momentum .9,
    # weight decay 5e-5, clip 50.
    local = dict(lr=0.005, momentum=0.9, weight_decay=5e-5, clip=50.0, plan="fresh")
    if method == "pfedhn_pc":  # each client draws its own classifier, as there
        local["head_init"] = "own"
    return lambda experiment: dict(
        method=method,
        participation=1 / experiment.clients,
        rounds=experiment.rounds * experiment.clients,
        eval_every=experiment.eval_every * experiment.clients,
        **local,
    )


# Rows of the comparison, in the order of tables: changes to the common Experiment, before tuning.
# What is not tuned (`GRIDS`) has the default of its method's file, each with its source there.
COMPARED: dict[str, Callable[[Experiment], dict[str, Any]]] = {
    "local": _fixed("local"),
    "fedavg": _fixed("fedavg"),
    "lpft": _finetuned("lpft", "fedavg"),
    "fedprox": _fixed("fedprox"),
    # Two batches a step: two passes make as many steps as other rows take.
    "perfedavg": _fixed("perfedavg", passes=2, alpha=0.01),
    # eta of the authors' code: w_i follows theta at eta lambda = 0.075.
    "pfedme": lambda experiment: dict(use("pfedme"), lr=0.005),
    "lgfedavg": _lgfedavg,
    "fedbn": _fixed("fedbn"),
    "fedper": _fixed("fedper"),
    "fedrep": _fixed("fedrep"),
    "fedbabu": _finetuned("fedbabu", "fedbabu"),
    "fedas": _fixed("fedas"),
    "fedfomo": lambda experiment: dict(method="fedfomo", holdout=0.2),
    "ditto": _fixed("ditto"),
    "apfl": _fixed("apfl"),
    "fedrod": _fixed("fedrod"),
    "fedproto": _fixed("fedproto"),
    "fedcp": _fixed("fedcp", lam=5.0),
    "fedpac": _fixed("fedpac"),
    "cfl": _fixed("cfl"),
    "fedamp": _fixed("fedamp", rho=0.1),
    "heurfedamp": _fixed("heurfedamp", rho=0.1),
    "fedala": _fixed("fedala"),
    # Momentum of c_i and p_i, as in the authors' code.
    "apple": lambda experiment: dict(use("apple"), momentum=0.9),
    "gpfl": _fixed("gpfl"),
    "feddbe": _fixed("feddbe"),
    "fedfew": _fixed("fedfew"),
    "pfedfda": _fixed("pfedfda"),
    "pfedhn": _pfedhn("pfedhn"),
    "pfedhn_pc": _pfedhn("pfedhn_pc"),
    "pfedla": _fixed("pfedla"),
    "heurpfedla": _fixed("heurpfedla"),
    "flayer": _fixed("flayer"),
    "fedaghn": _fixed("fedaghn"),
}


class Grid(NamedTuple):
    """What of a row is tuned: three learning rates times three values of a parameter of its own.

    Names are fields of an Experiment, or "method_args.NAME".

    Attributes
    ----------
    own : str
        The parameter that its paper or code tunes.
    values : tuple of float
        Which are tried.
    source : str
        Where they come from.
    rate : str
        The learning rate that is tuned.
    rates : tuple of float
        Which are tried.
    """

    own: str
    values: tuple[float, ...]
    source: str
    rate: str = "lr"
    rates: tuple[float, ...] = (0.01, 0.03, 0.1)

    def choices(self) -> list[dict[str, Any]]:
        """All combinations as changes to an Experiment, rates outermost."""
        pairs = itertools.product(self.rates, self.values)
        return [_merged(_change(self.rate, r), _change(self.own, v)) for r, v in pairs]


def _change(name: str, value: float) -> dict[str, Any]:
    field, _, key = name.partition(".")
    return {field: {key: value} if key else value}


def _merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return a | {n: a[n] | v if isinstance(v, dict) and n in a else v for n, v in b.items()}


def _arg(name: str, values: tuple[float, ...], source: str, **rates: Any) -> Grid:
    return Grid(f"method_args.{name}", values, source, **rates)


_ALIKE = "no parameter of its own; momentum as in PFLlib, FedRep's and pFedGraph's code"
_MOMENTUM = Grid("momentum", (0.0, 0.5, 0.9), _ALIKE)
_MU = _arg("mu", (0.001, 0.01, 0.1), "the authors' grid, without 0.5 and 1")
_DEPTH = (1, 2, 3)
_HN = "the paper's grid, code "
_HN_RATES: dict[str, Any] = dict(rates=(0.005, 0.01, 0.05))  # pFedHN's grid [P]
_PERSONAL: dict[str, Any] = dict(rate="method_args.personal_lr", rates=(0.01, 0.03, 0.05))
_CORE: dict[str, Any] = dict(rate="method_args.core_lr", rates=(0.01, 0.1, 1.0))

# Grids of the comparison, views (FedAvg-FT, FedProx-FT) included. What authors or their code use is
# in the middle, where known.
GRIDS: dict[str, Grid] = {
    "local": _MOMENTUM,
    "fedavg": _MOMENTUM,
    "fedavg_ft": _MOMENTUM,
    "lpft": _MOMENTUM,
    "fedprox": _MU,
    "fedprox_ft": _MU,
    "perfedavg": _arg(
        "alpha", (0.003, 0.01, 0.03), "FL-bench 0.01; lr is beta, so that alpha is not tied to it"
    ),
    "pfedme": _arg("lam", (5.0, 15.0, 30.0), "the authors tune 15 to 30", **_PERSONAL),
    "lgfedavg": Grid("head_depth", _DEPTH, "shared layers; authors on CIFAR-10: 2, on MNIST: 3"),
    "fedbn": _MOMENTUM,
    "fedper": Grid("head_depth", _DEPTH, "K_P; the paper tries 1 to 4"),
    "fedrep": _arg("head_epochs", (1, 5, 10), "PFLlib 1, FL-bench 4, authors 10"),
    "fedbabu": _MOMENTUM,
    "fedas": _arg("align_lr", (0.001, 0.01, 0.1), "the authors' code 0.01"),
    "fedfomo": _arg("neighbours", (2, 5, 10), "PFLlib, FL-bench 5, authors 4 to 9"),
    "ditto": _arg("lam", (0.1, 1.0, 2.0), "the authors' grid"),
    "apfl": _arg("alpha", (0.25, 0.5, 0.75), "the paper's figures (a recollection), code 0.5"),
    "fedrod": _arg("gamma", (0.5, 1.0, 2.0), "all codes 1; others ours"),
    "fedproto": _arg("lam", (0.1, 1.0, 10.0), "authors 0.1 and 1; 10 ours"),
    "fedcp": _arg("lam", (1.0, 5.0, 10.0), "PFLlib 1, authors' CNN 5"),
    "fedpac": Grid(
        "epochs",
        (1, 3, 5),
        "of the base, after one of the head; PFLlib 1, authors 5; lambda is 1 everywhere",
    ),
    "cfl": _arg(
        "still",
        (0.3, 0.5, 0.8),
        "ours, relative; the authors' eps1 is 0.4 for their model and rate",
    ),
    "fedamp": _arg(
        "rho", (0.01, 0.1, 1.0), "ours, around lambda / alpha that is neither Local nor divergent"
    ),
    "heurfedamp": _arg("rho", (0.01, 0.1, 1.0), "as FedAMP; pFedGraph 1"),
    "fedala": Grid("head_depth", _DEPTH, "p, adaptive layers; authors 1"),
    "apple": _arg("dr_lr", (1e-4, 1e-3, 1e-2), "authors 0.001; core rates 0.01", **_CORE),
    "gpfl": _arg("lam", (0.001, 0.01, 0.1), "authors' CNN 0.01"),
    "feddbe": _arg("kappa", (0.0, 1.0, 50.0), "PFLlib 0, authors' script for a CNN 50"),
    "fedfew": _arg("mu", (0.001, 0.01, 0.1), "the authors' sweep, without 1"),
    "pfedfda": _arg("ridge", (0.1, 1.0, 10.0), "ours, around the authors' code's 1"),
    "pfedhn": _arg("lr", (0.005, 0.01, 0.05), f"{_HN}0.01", **_HN_RATES),
    "pfedhn_pc": _arg("lr", (0.01, 0.05, 0.1), f"{_HN}0.05", **_HN_RATES),
    "pfedla": _arg("lr", (0.005, 0.1, 1.0), "third-party code 0.005, where weights hardly move"),
    "heurpfedla": _arg("retain_k", (1, 2, 3), "k; the paper's tables 1"),
    "flayer": Grid("head_depth", _DEPTH, "s; the paper's CNN 1"),
    "fedaghn": _arg("q0", (0.1, 0.5, 3.0), "authors' example 0.5; the case study is fitted by 3"),
}
# What a row's model has just gone through when it is scored as its paper scores it; "averaged"
# where nothing is said.
_TRAINED = (
    "local fedavg_ft fedprox_ft pfedme fedfomo ditto fedproto fedamp heurfedamp fedaghn".split()
)
SERVED: dict[str, str] = dict.fromkeys(_TRAINED, "trained")
SERVED |= dict.fromkeys(FINETUNED, "fine-tuned")
SERVED |= {
    "perfedavg": "adapted",
    "apfl": "mixed",
    "apple": "mixed",
    "pfedhn": "generated",
    "pfedhn_pc": "generated",
}
# Rows read after local training, as their papers are; all others before, but for `FINETUNED`.
AFTER = ("fedavg_ft", "fedprox_ft", "fedaghn")
# Rows whose models after local training are not meant to be served: Per-FedAvg's meta-model there
# has not been adapted.
UNSERVED_AFTER = ("perfedavg",)
# Share of the rounds, and images a client at most, on one seed.
TUNING: dict[str, float] = dict(rounds=1 / 4, max_samples=400)
