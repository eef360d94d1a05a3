"""FedPer (Arivazhagan et al., 2019): Figures 2 to 18. The paper has no tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from pfl_core.analysis.plots import label
from pfl_core.analysis.verdicts import Contrast
from pfl_papers.evidence.asks import Measure, Terms
from pfl_papers.evidence.contrasts import Evidence
from pfl_papers.papers import claims
from pfl_papers.papers.base import Artefact, Paper, Scope, Sweep
from pfl_papers.papers.shown import At, fields_at, use

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
NETS = {"MobileNet": "mobilenet", "ResNet-34": "resnet34"}
WIDTH, STEM = At(1.0, medium=0.5, quick=0.25, smoke=0.0625), At("cifar", quick="imagenet")
_CIFAR = dict(
    batch=At(quick=32, smoke=...),
    max_samples=At(quick=320, smoke=...),
    eval_every=At(quick=2, smoke=...),
)
# FLICKR-AES [P]: N = 30, batch 4, 80/20. Synthetic raters stand in for it [C].
_RATED = dict(partition="workers", clients=At(30, quick=...), batch=At(4, quick=8, smoke=...))
DATA: dict[str, dict[str, Any]] = {"cifar10": _CIFAR, "cifar100": _CIFAR}
DATA |= dict.fromkeys(("flickr_aes", "raters_cifar10", "raters_digits100"), _RATED)
LINEAR = ("fig5", "fig6", "fig9", "fig10")  # figures with a linear base


def nets(profile: str) -> dict[str, dict[str, Any]]:
    """FedPer's two networks at a profile, as changes to an Experiment.

    The label says where a network is narrower than the paper's.
    """
    width = WIDTH.value(profile)
    narrower = {1.0: "", 0.5: " of half width"}
    narrow = narrower.get(width, f" of width 1/{1 / width:.0f}")
    args = {"width": width, "stem": STEM.value(profile)}
    return {name + narrow: {"model": net, "model_args": args} for name, net in NETS.items()}


def linear_rows(net: dict[str, Any]) -> dict[str, dict]:
    """Rows "original" and "linear base" (Sec. 4.4).

    With a linear base all below the classifier (K_P = 1) is one linear layer.
    """
    linear = {"model": "linear", "model_args": net["model_args"] | {"of": net["model"]}}
    return {"original": {}, "linear base": linear}


def setting(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, Any]:
    """Fields of the Experiment that FedPer's figures vary; network, k and K_P are set there."""
    own: dict[str, Any] = {"dataset": dataset} | ({"head_depth": 1} if artefact in LINEAR else {})
    fields = fields_at(profile, COMMON, DATA.get(dataset, {}), own)
    return fields | ({"clients": clients} if clients else {})


# -- figures and their runs ------------------------------------------------------------------------

CIFAR10, CIFAR100, FLICKR = ("cifar10",), ("cifar100",), ("flickr_aes",)
CURVES, SPREAD = ("curves",), ("spread",)
FIGURES = {
    "fig2": Artefact(
        CIFAR10, CURVES, medium=3, said="K_P = 2."
    ),  # at medium MobileNet, k = 4 and 10
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
BOTH = {"fedavg": use("fedavg"), "fedper": use("fedper")}
TUNED = {"fedper": use("fedper"), "fedper + fine-tuning": use("fedper", finetune_epochs=1)}
ALONE = {"local": use("local")}  # Sec. 4.4


def holding(k: int) -> dict[str, Any]:
    """Clients that hold k classes each, as a change to an Experiment."""
    return {"partition_args": {"k": k}}


def sweeps(scope: Scope) -> list[Sweep]:
    """All runs of Figures 2 to 18: of each figure its changes, its rows and its columns."""
    both = nets(scope.profile)
    (mobile, mobilenet), (res, resnet) = both.items()
    raters = "" if scope.data("flickr_aes") == "flickr_aes" else ", synthetic raters"
    own = {"method": "fedper"}
    each_k = {mobile: scope.pick((4, 8, 10), quick=(4, 8, 10), medium=(4, 10))}
    each_k[res] = scope.pick((4, 8, 10), quick=(4,), medium=())
    many_k = scope.pick((40, 80, 100), quick=(40, 100), smoke=(40,))
    few_k = scope.pick(many_k, quick=(40,))
    depths = [scope.pick((1, 2, 3, 4), quick=few) for few in ((1, 2, 4), (1, 2))]
    fig4, fig14 = ({f"K_P = {d}": {"head_depth": d} for d in ds} for ds in depths)
    deep = scope.pick(both, quick={mobile: mobilenet})
    fig2 = {f"{n}, k={k}": both[n] | holding(k) for n, ks in each_k.items() for k in ks}
    runs: dict[str, tuple[dict, dict, dict]] = {
        "fig2": ({}, BOTH, fig2),
        "fig3": (mobilenet | holding(4), BOTH, {f"{mobile}, k=4": {}}),
        "fig4": (own | holding(4), fig4, deep),
        "fig5": (own | holding(40) | mobilenet, linear_rows(mobilenet) | ALONE, {mobile: {}}),
        "fig6": (own | holding(40) | resnet, linear_rows(resnet) | ALONE, {res: {}}),
        "fig7": (mobilenet, BOTH, {mobile + raters: {}}),
        "fig8": (resnet, BOTH, {res + raters: {}}),
        "fig9": (own | mobilenet, linear_rows(mobilenet), {mobile + raters: {}}),
        "fig10": (own | resnet, linear_rows(resnet), {res + raters: {}}),
        "fig11": (resnet, BOTH, {f"{res}, k={k}": holding(k) for k in few_k}),
        "fig12": (mobilenet, BOTH, {f"{mobile}, k={k}": holding(k) for k in many_k}),
        "fig13": (mobilenet | holding(10), BOTH, {f"{mobile}, k=10": {}}),
        "fig14": (own | holding(40), fig14, deep),
        "fig15": (holding(40) | mobilenet, TUNED, {mobile: {}}),
        "fig16": (holding(40) | resnet, TUNED, {res: {}}),
        "fig17": (mobilenet, TUNED, {mobile + raters: {}}),
        "fig18": (resnet, TUNED, {res + raters: {}}),
    }
    out = []
    for figure, (changes, rows, columns) in runs.items():
        base = scope.base(PAPER, figure, FIGURES[figure].data[0], **changes)
        out += scope.sweep(PAPER, base, rows, columns)
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
PAPER = Paper(
    key="fedper",
    artefacts=FIGURES,
    claims=claims.read("fedper", TERMS, rounds_saved=rounds_saved, guesses=guesses),
    sweeps=sweeps,
    own="fedper",
    report=dict(select="last", when="before", average="client"),
    setting=setting,
)
