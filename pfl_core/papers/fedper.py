"""FedPer (Arivazhagan et al., 2019): Figures 2 to 18. The paper has no tables."""

from __future__ import annotations

from typing import Any

import pandas as pd

from pfl_core.papers.base import Claim, use, value

ARTEFACTS = [f"fig{i}" for i in range(2, 19)]
TABLES: tuple[str, ...] = ()
OWN = "fedper"
REPORT: dict[str, str] = dict(select="last", when="before", mean="client")
WHEN: dict[str, str] = {}
MEDIUM: dict[str, int] = {"fig2": 2, "fig3": 2}  # artefact: seeds; MobileNet, k = 4 and 10

# FedPer, Sec. 4.1 [P]: N = 10, e = 4, batch 128, SGD with lr .01, 100 rounds; FLICKR-AES: N = 30, batch 4, 80/20.
# [C] (the paper is silent): BatchNorm statistics of the base are averaged, personal layers start from draws of their own (Alg. 1),
# networks have CIFAR stems, no momentum, no augmentation; K_P = 2 where a figure does not say, 1 for the linear bases (Sec. 4.4).
# medium [C]: the paper's numbers with half the width, at most 1,000 training images a client and fewer rounds; a tenth of train is
# validation. quick and smoke [C]: narrow networks with their original stem, fewer and smaller batches, and a rate that suits them.
_FEDPER: dict[str, dict[str, Any]] = {
    "paper": dict(rounds=100, epochs=4, batch=128, lr=0.01, clients=10),
    "medium": dict(rounds=40, epochs=4, batch=128, lr=0.01, clients=10, eval_every=3, max_samples=1000),
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
    """FedPer's two networks at a profile, as changes to an Experiment; the label says where one is narrower than the paper's."""
    both = {"MobileNet": "mobilenet", "ResNet-34": "resnet34"}
    narrow = {1.0: "", 0.5: " of half width"}.get(width := _NETS[profile]["width"], f" of width 1/{1 / width:.0f}")
    return {name + narrow: {"model": model, "model_args": _NETS[profile]} for name, model in both.items()}


def linear_rows(net: dict[str, Any]) -> dict[str, dict]:
    """Rows "original" and "linear base" (Sec. 4.4): all below the classifier (K_P = 1) is one linear layer."""
    return {"original": {}, "linear base": {"model": "linear", "model_args": {"of": net["model"]}}}


def setting(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, Any]:
    """Fields of the Experiment that FedPer's figures vary; network, k and K_P are set there."""
    fields = dict(
        dataset=dataset, partition="fedper_classes", buffers="average", head_init="own", eval_after=profile == "medium"
    )
    fields |= {"head_depth": 1 if artefact in LINEAR else 2} | _FEDPER[profile]
    if profile == "medium":
        fields["partition_args"] = {"val": 0.1}
    if profile == "quick" and dataset in ("cifar10", "cifar100"):
        fields |= dict(batch=32, max_samples=320, eval_every=2)
    if dataset.startswith(("raters", "flickr")):
        fields |= dict(partition="workers") | _RATERS[profile]
    return fields | ({"clients": clients} if clients else {})


def rows(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, dict]:
    """The two rows of Figures 2, 3, 7, 8 and 11 to 13."""
    return {"fedavg": use("fedavg"), "fedper": use("fedper")}


# -- claims --------------------------------------------------------------------------------------------------------------


def _gap(rows: pd.DataFrame, column: str, a: str = "fedper", b: str = "fedavg") -> float:
    return value(rows, a, column) - value(rows, b, column)


def _heterogeneous(rows: pd.DataFrame) -> tuple[str, bool]:
    gaps = {c: _gap(rows, c) for c in rows.column.unique() if c.endswith("k=4")}
    return ", ".join(f"{c}: {g:+.1f} points" for c, g in gaps.items()), all(g > 1 for g in gaps.values())


def _shrinks(rows: pd.DataFrame) -> tuple[str, bool]:
    nets = dict.fromkeys(c.split(",")[0] for c in rows.column.unique() if c.endswith("k=10"))
    pairs = {n: (_gap(rows, f"{n}, k=4"), _gap(rows, f"{n}, k=10")) for n in nets}
    return ", ".join(f"{n}: {a:+.1f} at k=4, {b:+.1f} at k=10" for n, (a, b) in pairs.items()), all(
        a > b for a, b in pairs.values()
    )


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
    pairs = {c: (value(rows, "original", c), value(rows, "linear base", c)) for c in rows.column.unique()}
    return ", ".join(f"{c}: {a:.1f} original, {b:.1f} linear" for c, (a, b) in pairs.items()), all(
        a > b for a, b in pairs.values()
    )


def _finetuned(rows: pd.DataFrame) -> tuple[str, list[float]]:
    # Text, and what fine-tuning adds in each column.
    pairs = {c: (value(rows, "fedper", c), value(rows, "fedper + fine-tuning", c)) for c in rows.column.unique()}
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


CLAIMS = [
    Claim(
        "FedPer is clearly better than FedAvg where clients hold few classes (Sec. 4.3, Fig. 2)", "fig2", _heterogeneous
    ),
    Claim("The gap shrinks as the data become alike (k from 4 to 10, Fig. 2)", "fig2", _shrinks),
    Claim("Clients' accuracies vary less under FedPer than under FedAvg (Fig. 3)", "fig3", _spread),
    Claim(
        "How many layers are personal matters little as long as the classifier is (Fig. 4: within 5 points)",
        "fig4",
        _depth,
    ),
    Claim("The federated base earns its keep: better than a linear base (Figs. 5, 6)", "fig5", _linear),
    *(
        Claim(
            f"Fine-tuning the personal layers first improves accuracy on CIFAR-100 (App. A.3, Fig. {n})", f, _improves
        )
        for f, n in (("fig15", 15), ("fig16", 16))
    ),
    *(
        Claim(f"On FLICKR-AES it has no noticeable effect (App. A.3, Fig. {n}: within 3 points)", f, _unnoticed)
        for f, n in (("fig17", 17), ("fig18", 18))
    ),
]
