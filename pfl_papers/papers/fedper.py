"""FedPer (Arivazhagan et al., 2019): settings, runs, and what decides its claims.

Figures 2 to 18; the paper has no tables. [P], [O], [C] and ? say where a value is from; see
`papers.base`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from pfl_core.analysis.plots import label
from pfl_core.analysis.verdicts import Contrast
from pfl_core.experiments.experiment import Experiment
from pfl_papers.evidence.asks import Measure, Terms
from pfl_papers.evidence.contrasts import Evidence
from pfl_papers.papers import claims
from pfl_papers.papers.base import PROFILES, Artefact, Paper, Scope, Sweep
from pfl_papers.papers.shown import At, Changes, Shown, at, fields_at, rows_at, use

# -- what the paper shows --------------------------------------------------------------------------

MOBILE, RES = "MobileNet", "ResNet-34"


def holding(k: int) -> dict[str, Any]:
    """Clients that hold k classes each, as a change to an Experiment."""
    return {"partition_args": {"k": k}}


def _k(net: str, *counts: int) -> list[str]:
    return [f"{net}, k={k}" for k in counts]


def _depths(*depths: int) -> list[str]:
    return [f"K_P = {depth}" for depth in depths]


# A figure's columns are networks, some with the classes that each client holds.
_NETS, _MANY = At([MOBILE, RES], quick=[MOBILE]), (40, 80, 100)
_BOTH, _TUNED = ("fedavg", "fedper"), ("fedper", "fedper + fine-tuning")
_LINEAR = ("original", "linear base")
SHOWN = {
    "fig2": Shown(
        At(
            _k(MOBILE, 4, 8, 10) + _k(RES, 4, 8, 10),
            medium=_k(MOBILE, 4, 10),
            quick=_k(MOBILE, 4, 8, 10) + _k(RES, 4),
        ),
        _BOTH,
    ),
    "fig3": Shown(_k(MOBILE, 4), _BOTH),
    "fig4": Shown(_NETS, At(_depths(1, 2, 3, 4), quick=_depths(1, 2, 4))),
    "fig5": Shown([MOBILE], (*_LINEAR, "local")),
    "fig6": Shown([RES], (*_LINEAR, "local")),
    "fig7": Shown([MOBILE], _BOTH),
    "fig8": Shown([RES], _BOTH),
    "fig9": Shown([MOBILE], _LINEAR),
    "fig10": Shown([RES], _LINEAR),
    "fig11": Shown(At(_k(RES, *_MANY), quick=_k(RES, 40)), _BOTH),
    "fig12": Shown(At(_k(MOBILE, *_MANY), quick=_k(MOBILE, 40, 100), smoke=_k(MOBILE, 40)), _BOTH),
    "fig13": Shown(_k(MOBILE, 10), _BOTH),
    "fig14": Shown(_NETS, At(_depths(1, 2, 3, 4), quick=_depths(1, 2))),
    "fig15": Shown([MOBILE], _TUNED),
    "fig16": Shown([RES], _TUNED),
    "fig17": Shown([MOBILE], _TUNED),
    "fig18": Shown([RES], _TUNED),
}

# Of which data each figure is.
CIFAR10, CIFAR100, FLICKR = ("cifar10",), ("cifar100",), ("flickr_aes",)
CURVES, SPREAD = ("curves",), ("spread",)
FIGURES = {
    "fig2": Artefact(CIFAR10, CURVES, medium=3, said="K_P = 2."),
    "fig3": Artefact(CIFAR10, SPREAD, medium=3, said="K_P = 2."),
    "fig4": Artefact(CIFAR10, CURVES),
    "fig5": Artefact(CIFAR100, CURVES),
    "fig6": Artefact(CIFAR100, CURVES),
    "fig7": Artefact(FLICKR, CURVES),
    "fig8": Artefact(FLICKR, CURVES),
    "fig9": Artefact(FLICKR, CURVES),
    "fig10": Artefact(FLICKR, CURVES),
    "fig11": Artefact(CIFAR100, CURVES, said="K_P = 2."),
    "fig12": Artefact(CIFAR100, CURVES, said="K_P = 2."),
    "fig13": Artefact(CIFAR10, SPREAD, said="K_P = 2."),
    "fig14": Artefact(CIFAR100, CURVES),
    "fig15": Artefact(CIFAR100, CURVES, said="k = 40, K_P = 2."),
    "fig16": Artefact(CIFAR100, CURVES, said="k = 40, K_P = 2."),
    "fig17": Artefact(FLICKR, CURVES),
    "fig18": Artefact(FLICKR, CURVES),
}

# -- settings --------------------------------------------------------------------------------------

# Sec. 4.1 [P]: N = 10, e = 4, batch 128, SGD with lr .01, 100 rounds.
# [C] (the paper is silent): BatchNorm statistics of the base are averaged, personal layers start
# from draws of their own (Alg. 1), networks have CIFAR stems, no momentum, no augmentation; K_P = 2
# where a figure does not say, 1 for the linear bases (Sec. 4.4).
# medium [C]: the paper's numbers with half the width, at most 1,000 training images a client and
# fewer rounds; a tenth of train is validation.
# quick and smoke [C]: narrow networks with their original stem, fewer and smaller batches, and a
# rate that suits them.
COMMON: dict[str, Any] = dict(
    clients=10,
    epochs=At(4, quick=1),
    batch=At(128, quick=16, smoke=8),
    lr=At(0.01, quick=0.1, smoke=0.05),
    rounds=At(100, medium=40, quick=20, smoke=2),
    eval_every=At(medium=3, quick=4, smoke=2),
    eval_after=At(False, medium=True),
    max_samples=At(medium=1000, quick=160, smoke=8),
    partition="fedper_classes",
    partition_args={"val": At(medium=0.1)},
    buffers="average",
    head_init="own",
    head_depth=2,
)
WIDTH = At(1.0, medium=0.5, quick=0.25, smoke=0.0625)
_SHAPE = {"width": WIDTH, "stem": At("cifar", quick="imagenet")}
NETS: dict[str, dict[str, Any]] = {
    MOBILE: dict(model="mobilenet", model_args=_SHAPE),
    RES: dict(model="resnet34", model_args=_SHAPE),
}
COLUMNS = NETS | {
    label: NETS[net] | holding(k)
    for net in NETS
    for k in (4, 8, 10, *_MANY)
    for label in _k(net, k)
}
_CIFAR = dict(
    batch=At(quick=32, smoke=...),
    max_samples=At(quick=320, smoke=...),
    eval_every=At(quick=2, smoke=...),
)
# FLICKR-AES [P]: N = 30, batch 4, 80/20. Synthetic raters stand in for it [C].
_RATED = dict(partition="workers", clients=At(30, quick=...), batch=At(4, quick=8, smoke=...))
DATA: dict[str, dict[str, Any]] = {"cifar10": _CIFAR, "cifar100": _CIFAR}
DATA |= dict.fromkeys(("flickr_aes", "raters_cifar10", "raters_digits100"), _RATED)
# What a figure has otherwise than Figure 2: classes a client where no column says them, K_P.
_LINEAR_BASE = dict(head_depth=1)
OTHERWISE: dict[str, dict[str, Any]] = {
    "fig4": holding(4),
    "fig5": holding(40) | _LINEAR_BASE,
    "fig6": holding(40) | _LINEAR_BASE,
    "fig9": _LINEAR_BASE,
    "fig10": _LINEAR_BASE,
    "fig14": holding(40),
    "fig15": holding(40),
    "fig16": holding(40),
}


def setting(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, Any]:
    """Fields of the Experiment that FedPer's figures vary; columns set the network."""
    own: dict[str, Any] = {"dataset": dataset} | ({"clients": clients} if clients else {})
    parts = COMMON, DATA.get(dataset, {}), OTHERWISE.get(artefact, {}), own
    return fields_at(profile, *parts)


# -- rows ------------------------------------------------------------------------------------------


def _linear(base: Experiment) -> dict[str, Any]:
    # All below the classifier (K_P = 1) is one linear layer (Sec. 4.4).
    linear = {"model": "linear", "model_args": base.model_args | {"of": base.model}}
    return use("fedper") | linear


ROWS: dict[str, Changes] = {
    "fedavg": use("fedavg"),
    "fedper": use("fedper"),
    "fedper + fine-tuning": use("fedper", finetune_epochs=1),
    "original": use("fedper"),
    "linear base": _linear,
    "local": use("local"),  # Sec. 4.4
    **{f"K_P = {depth}": use("fedper") | {"head_depth": depth} for depth in (1, 2, 3, 4)},
}

# -- runs ------------------------------------------------------------------------------------------


def narrower(profile: str) -> str:
    """How labels say that a profile's networks are narrower than the paper's."""
    width = WIDTH.value(profile)
    return {1.0: "", 0.5: " of half width"}.get(width, f" of width 1/{1 / width:.0f}")


def printed(column: str) -> str:
    """A column's label at profile paper."""
    for profile in PROFILES:
        column = column.replace(narrower(profile), "")
    return column


def sweeps(scope: Scope) -> list[Sweep]:
    """All runs of Figures 2 to 18, a Sweep each: a base with the first column's changes."""
    # quick has all columns and rows where data are real.
    size = "paper" if scope.profile == "quick" and scope.label != "digits" else scope.profile
    synthetic = scope.data("flickr_aes") != "flickr_aes"
    out = []
    for figure, shown in SHOWN.items():
        (dataset,) = FIGURES[figure].data
        raters = ", synthetic raters" if synthetic and dataset == "flickr_aes" else ""
        columns = {}
        for name in shown.labels(size):
            net, comma, k = name.partition(", ")
            label = f"{net}{narrower(scope.profile)}{comma}{k}{raters}"
            columns[label] = fields_at(scope.profile, COLUMNS[name])
        first = next(iter(columns))
        base = scope.base(PAPER, figure, dataset, **columns[first])
        if base:
            rows = rows_at(scope.profile, base, ROWS, at(size, shown.rows))
            out += scope.sweep(PAPER, base, rows, columns | {first: {}})
    return out


# -- claims ----------------------------------------------------------------------------------------

IDENTICAL = (", k=10", ", k=100")  # how columns end whose clients have all classes
# % of five ratings, and points above it: a limit of ours.
CHANCE, GUESS = 20.0, 5.0
SOON = 5.0  # rounds: a smaller difference is a tie


def rounds_saved(evidence: Evidence) -> list[Contrast]:
    """FedPer is sooner than FedAvg at the best accuracy of the lower of both."""
    out = []
    for column in evidence.columns:
        if column.endswith(IDENTICAL):
            continue
        says, sooner = f"FedAvg's - FedPer's rounds, {column}", _sooner(evidence.rows, column)
        found = evidence.above(says, sooner, unit="rounds", small=SOON, digits=1)
        # A network at chance reaches any level at once.
        unlearned = evidence.ahead("fedper", "fedavg", column).unlearned
        out.append(replace(found, unlearned=unlearned))
    return out


def _sooner(rows: pd.DataFrame, column: str) -> pd.Series:
    # By how many rounds, by seed.
    rule, both = PAPER.report, ("fedavg", "fedper")
    seen = rows[(rows.column == column) & (rows.metric == "acc_pct") & (rows.split == "test")]
    seen = seen[(seen.when == rule["when"]) & (seen["average"] == rule["average"])]
    if missing := set(both) - set(seen.row):
        raise LookupError(f"{label(missing.pop())} / {column}")
    out = {}
    for seed, of_seed in seen.groupby("seed"):
        curves = of_seed.pivot_table(index="rounds", columns="row", values="value")
        if set(both) <= set(curves):
            level = curves[[*both]].max().min()
            needed = {row: (curves[row] >= level).idxmax() for row in both}
            out[seed] = needed["fedavg"] - needed["fedper"]
    return pd.Series(out, dtype=float)


def guesses(evidence: Evidence) -> list[Contrast]:
    """FedAvg is at most `GUESS` points above chance on FLICKR-AES."""
    if set(evidence.rows.dataset) != {"flickr_aes"}:  # synthetic raters say nothing about it
        raise LookupError("FLICKR-AES")
    # That FedAvg has learned nothing is what the paper says, so it is no obstacle here.
    found = [
        evidence.contrast(f"0 - FedAvg, {column}", {("fedavg", column): -1.0}, -CHANCE - GUESS)
        for column in evidence.columns
    ]
    return [replace(one, unlearned="") for one in found]


TERMS = Terms(
    {"acc_sd": Measure("sd over clients, {difference}, {column}", pooled=True, least=True)}
)

# -- the paper -------------------------------------------------------------------------------------

PAPER = Paper(
    key="fedper",
    artefacts=FIGURES,
    claims=claims.read("fedper", TERMS, rounds_saved=rounds_saved, guesses=guesses),
    sweeps=sweeps,
    own="fedper",
    report=dict(select="last", when="before", average="client"),
    setting=setting,
    printed=printed,
)
