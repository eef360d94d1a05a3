"""FedPer (Arivazhagan et al., 2019): Figures 2 to 18. The paper has no tables."""

from __future__ import annotations

from typing import Any

import pandas as pd

from pfl_core.papers.base import Artefact, Claim, Paper, Scope, Sweep, use, value

# FedPer, Sec. 4.1 [P]: N = 10, e = 4, batch 128, SGD with lr .01, 100 rounds; FLICKR-AES: N = 30,
# batch 4, 80/20.
# [C] (the paper is silent): BatchNorm statistics of the base are averaged, personal layers start
# from draws of their own (Alg. 1), networks have CIFAR stems, no momentum, no augmentation; K_P = 2
# where a figure does not say, 1 for the linear bases (Sec. 4.4).
# medium [C]: the paper's numbers with half the width, at most 1,000 training images a client and
# fewer rounds; a tenth of train is validation.
# quick and smoke [C]: narrow networks with their original stem, fewer and smaller batches, and a
# rate that suits them.
_FEDPER: dict[str, dict[str, Any]] = {
    "paper": dict(rounds=100, epochs=4, batch=128, lr=0.01, clients=10),
    "medium": dict(
        rounds=40, epochs=4, batch=128, lr=0.01, clients=10, eval_every=3, max_samples=1000
    ),
    "quick": dict(rounds=20, epochs=1, batch=16, lr=0.1, clients=10, eval_every=4, max_samples=160),
    "smoke": dict(rounds=2, epochs=1, batch=8, lr=0.05, clients=10, eval_every=2, max_samples=8),
}
LINEAR = ("fig5", "fig6", "fig9", "fig10")  # figures with a linear base
_RATERS = {"paper": dict(clients=30, batch=4), "quick": dict(batch=8), "smoke": {}}
_NETS = {
    "paper": dict(width=1.0, stem="cifar"),
    "medium": dict(width=0.5, stem="cifar"),
    "quick": dict(width=0.25, stem="imagenet"),
    "smoke": dict(width=0.0625, stem="imagenet"),
}


def nets(profile: str) -> dict[str, dict[str, Any]]:
    """FedPer's two networks at a profile, as changes to an Experiment.

    The label says where a network is narrower than the paper's.
    """
    args = _NETS[profile]
    width = args["width"]
    narrow = {1.0: "", 0.5: " of half width"}.get(width, f" of width 1/{1 / width:.0f}")
    both = {"MobileNet": "mobilenet", "ResNet-34": "resnet34"}
    return {name + narrow: {"model": net, "model_args": args} for name, net in both.items()}


def linear_rows(net: dict[str, Any]) -> dict[str, dict]:
    """Rows "original" and "linear base" (Sec. 4.4).

    With a linear base all below the classifier (K_P = 1) is one linear layer.
    """
    return {"original": {}, "linear base": {"model": "linear", "model_args": {"of": net["model"]}}}


def setting(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, Any]:
    """Fields of the Experiment that FedPer's figures vary; network, k and K_P are set there."""
    fields = dict(
        dataset=dataset,
        partition="fedper_classes",
        buffers="average",
        head_init="own",
        eval_after=profile == "medium",
    )
    fields |= {"head_depth": 1 if artefact in LINEAR else 2} | _FEDPER[profile]
    if profile == "medium":
        fields["partition_args"] = {"val": 0.1}
    if profile == "quick" and dataset in ("cifar10", "cifar100"):
        fields |= dict(batch=32, max_samples=320, eval_every=2)
    if dataset.startswith(("raters", "flickr")):
        fields |= dict(partition="workers") | _RATERS[profile]
    return fields | ({"clients": clients} if clients else {})


# -- figures and their runs ------------------------------------------------------------------------

CIFAR10, CIFAR100, FLICKR = ("cifar10",), ("cifar100",), ("flickr_aes",)
CURVES, SPREAD = ("curves",), ("spread",)
FIGURES = {
    "fig2": Artefact(
        CIFAR10, CURVES, medium=2, said="K_P = 2."
    ),  # at medium MobileNet, k = 4 and 10
    "fig3": Artefact(CIFAR10, SPREAD, medium=2, said="K_P = 2."),
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
        "fig5": (own | holding(40) | mobilenet, linear_rows(mobilenet), {mobile: {}}),
        "fig6": (own | holding(40) | resnet, linear_rows(resnet), {res: {}}),
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


def _gap(rows: pd.DataFrame, column: str) -> float:
    return value(rows, "fedper", column) - value(rows, "fedavg", column)


def _pairs(rows: pd.DataFrame, first: str, second: str) -> dict[str, tuple[float, float]]:
    # {column: accuracies of two rows}
    return {c: (value(rows, first, c), value(rows, second, c)) for c in rows.column.unique()}


def _heterogeneous(rows: pd.DataFrame) -> tuple[str, bool]:
    gaps = {c: _gap(rows, c) for c in rows.column.unique() if c.endswith("k=4")}
    text = ", ".join(f"{c}: {g:+.1f} points" for c, g in gaps.items())
    return text, all(g > 1 for g in gaps.values())


def _shrinks(rows: pd.DataFrame) -> tuple[str, bool]:
    nets = dict.fromkeys(c.split(",")[0] for c in rows.column.unique() if c.endswith("k=10"))
    pairs = {n: (_gap(rows, f"{n}, k=4"), _gap(rows, f"{n}, k=10")) for n in nets}
    text = ", ".join(f"{n}: {a:+.1f} at k=4, {b:+.1f} at k=10" for n, (a, b) in pairs.items())
    return text, all(a > b for a, b in pairs.values())


def _spread(rows: pd.DataFrame) -> tuple[str, bool]:
    c = next(iter(rows.column.unique()))
    a, b = (value(rows, m, c, "acc_sd") for m in ("fedper", "fedavg"))
    return f"sd over clients {a:.1f} (FedPer), {b:.1f} (FedAvg)", a < b


def _depth(rows: pd.DataFrame) -> tuple[str, bool]:
    out, good = [], True
    for net in rows.column.unique():
        acc = {r: value(rows, r, net) for r in rows[rows.column == net].row.unique()}
        span = max(acc.values()) - min(acc.values())
        out.append(f"{net}: {min(acc.values()):.1f} to {max(acc.values()):.1f}")
        good &= span < 5
    return ", ".join(out), good


def _linear(rows: pd.DataFrame) -> tuple[str, bool]:
    pairs = _pairs(rows, "original", "linear base")
    text = ", ".join(f"{c}: {a:.1f} original, {b:.1f} linear" for c, (a, b) in pairs.items())
    return text, all(a > b for a, b in pairs.values())


def _finetuned(rows: pd.DataFrame) -> tuple[str, list[float]]:
    # Text, and what fine-tuning adds in each column.
    pairs = _pairs(rows, "fedper", "fedper + fine-tuning")
    text = ", ".join(f"{c}: {a:.1f} without, {b:.1f} with" for c, (a, b) in pairs.items())
    return text, [b - a for a, b in pairs.values()]


def _improves(rows: pd.DataFrame) -> tuple[str, bool]:
    text, gains = _finetuned(rows)
    return text, min(gains) > 0


def _unnoticed(rows: pd.DataFrame) -> tuple[str, bool]:
    if set(rows.dataset) != {"flickr_aes"}:  # synthetic raters say nothing about it
        raise LookupError("FLICKR-AES")
    text, gains = _finetuned(rows)
    return text, max(map(abs, gains)) < 3


_BETTER = "FedPer is clearly better than FedAvg where clients hold few classes (Sec. 4.3, Fig. 2)"
_ALIKE = "The gap shrinks as the data become alike (k from 4 to 10, Fig. 2)"
_CLOSE = "Clients' accuracies vary less under FedPer than under FedAvg (Fig. 3)"
_FEW = "How many layers are personal matters little as long as the classifier is"
_BASE = "The federated base earns its keep: better than a linear base (Figs. 5, 6)"
_FIRST = "Fine-tuning the personal layers first improves accuracy on CIFAR-100"
_NONE = "On FLICKR-AES it has no noticeable effect"
CLAIMS = (
    Claim(_BETTER, "fig2", _heterogeneous),
    Claim(_ALIKE, "fig2", _shrinks),
    Claim(_CLOSE, "fig3", _spread),
    Claim(f"{_FEW} (Fig. 4: within 5 points)", "fig4", _depth),
    Claim(_BASE, "fig5", _linear),
    *(Claim(f"{_FIRST} (App. A.3, Fig. {n})", f"fig{n}", _improves) for n in (15, 16)),
    *(
        Claim(f"{_NONE} (App. A.3, Fig. {n}: within 3 points)", f"fig{n}", _unnoticed)
        for n in (17, 18)
    ),
)
PAPER = Paper(
    key="fedper",
    artefacts=FIGURES,
    claims=CLAIMS,
    sweeps=sweeps,
    own="fedper",
    report=dict(select="last", when="before", mean="client"),
    setting=setting,
)
