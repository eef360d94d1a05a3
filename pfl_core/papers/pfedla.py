"""pFedLA and HeurpFedLA (Ma et al., CVPR 2022): Tables 1 to 3, Figures 1, 5, 6, 7. Figures 2 to 4 are diagrams."""

from __future__ import annotations

from typing import Any

import pandas as pd

from pfl_core import store
from pfl_core.papers import use

ARTEFACTS = ["table1", "table2", "table3", "fig1", "fig5", "fig6", "fig7"]
TABLES = ("table1", "table2", "table3")  # those whose rows `presets` gives
OWN = "pfedla"
REPORT: dict[str, str] = dict(select="last", when="before", mean="client")
WHEN: dict[str, str] = {"local": "after"}

DATA = {"EMNIST": "emnist-digits", "FMNIST": "fashion_mnist", "CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}
COLUMNS = {f"{name}, N={n}": (name, n) for name in DATA for n in (10, 100)}
RETAINED = {
    "EMNIST": ("fc", "fc1"),
    "CIFAR-10": ("fc1", "conv2", "fc"),
}  # what Table 3's differences are the sizes of [I]
KINDS = {0: "target itself", 1: "same 4 labels", 2: "3 labels shared"}  # clients of Figure 5; the others: random labels
PERIODS = {"prior": (0.0, 0.1), "middle": (0.45, 0.55), "last": (0.9, 1.0)}  # shares of the rounds [C]

# Sec. 4.1, 4.2 [P]: SGD, batch 32, lr .01 (CIFAR) or .005, 600 rounds of 10 epochs with 10 clients, 2500 of 20 with a tenth of 100.
# LeNet-16, with BatchNorm for CIFAR only, from Table 3's megabytes [I]; 600 images a client [I]; BatchNorm statistics stay local [C].
# Fig. 1: 100 rounds [C]. quick and smoke [C]: half as many channels, larger rates, fewer rounds, epochs and images.
_SCALE: dict[str, dict[str, Any]] = {
    "paper": dict(batch=32, eval_every=10),
    "quick": dict(rounds=20, epochs=5, batch=12, lr=0.1, eval_every=4, partition_args={"split": "20/80"}),
    "real": dict(rounds=16, epochs=3, batch=32, lr=0.1, eval_every=4, max_samples=160),  # quick on data not embedded
    "smoke": dict(rounds=2, epochs=1, batch=8, lr=0.05, eval_every=1, max_samples=8),
}
_KERNELS = {"paper": 16, "quick": 8, "smoke": 2}
_CLIENTS = {"fig1": 6, "fig5": 8, "fig6": 8}
_PARTITION = {"table2": "pfedla_noniid2", "fig1": "pfedla_ring", "fig5": "pfedla_target", "fig6": "pfedla_ring"}
# Rate of the hypernetworks: 5e-3 is third-party code's (their file's default). quick [C]: 1, the power of ten with which weights leave
# 1/N but do not reach 1 within 20 rounds on digits; accuracy had no part in it.
_RATE: dict[str, dict[str, Any]] = {"paper": {}, "quick": dict(lr=1.0), "smoke": dict(lr=1.0)}


def setting(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, Any]:
    """Fields of the Experiment that an artefact's runs vary."""
    cifar, n = dataset.startswith("cifar"), clients or _CLIENTS.get(artefact, 10)
    fields = dict(dataset=dataset, clients=n, partition=_PARTITION.get(artefact, "pfedla_noniid1"), model="lenet")
    fields |= dict(model_args={"bn": cifar} | ({} if profile == "paper" else {"kernels": _KERNELS[profile]}))
    fields |= _SCALE["real" if profile == "quick" and not dataset.startswith("digits") else profile]
    if profile == "paper":
        few = dict(rounds=600, epochs=10) if n <= 10 else dict(rounds=2500, epochs=20, participation=0.1)
        fields |= dict(lr=0.01 if cifar else 0.005) | few | (dict(rounds=100) if artefact == "fig1" else {})
    if profile == "quick" and artefact in ("fig1", "fig5"):
        fields |= dict(eval_every=1)
    return fields


def own(profile: str, method: str = "pfedla", **args: Any) -> dict[str, Any]:
    """The row of pFedLA (its weights are recorded) or HeurpFedLA at a profile, with other hyper-parameters as given."""
    return use(method, **_RATE[profile] | args) | (dict(record=("weights",)) if method == "pfedla" else {})


def rows(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, dict]:
    """Rows of an artefact as changes to its `setting`."""
    n, cifar, paper = clients or 10, dataset.startswith("cifar"), profile == "paper"
    if artefact == "table3":
        heur = {f"k={k}": own(profile, "heurpfedla", retain_k=k) for k in range(2, 8 if cifar else 6)}
        return {"k=0": own(profile), "k=1": own(profile, "heurpfedla")} | heur
    if (
        artefact == "fig1"
    ):  # FedAGHN's graphs without strengths: softmax(5 cos) of the last updates over all clients, kept as they are [C]
        how = dict(ablation="no_p", q0=5.0, h=0.0)
        names = {"layer-wise": "module", "model-wise": "model"}
        return {r: use("fedaghn", **how, by=by) | dict(record=("weights",)) for r, by in names.items()}
    if artefact in ("fig5", "fig6", "fig7"):
        return {"pfedla": own(profile)}
    # The paper gives no hyper-parameters of baselines ?: their files' defaults (Per-FedAvg alpha = beta = lr; pFedMe 15, 5, .01, 1;
    # FedRep 1 + E epochs; FedFomo all others). quick [C]: what suits its rate, pFedMe with fewer inner steps.
    fields = setting(artefact, profile, dataset, clients)
    visits = max(1, round(fields.get("participation", 1) * n))
    hn = dict(lr=0.005, momentum=0.9, weight_decay=5e-5, clip=50.0, plan="fresh", participation=1 / n, eval_after=False)
    hn |= dict(
        rounds=fields["rounds"] * visits, eval_every=fields["eval_every"] * visits
    )  # as many visits as the others
    out = {m: use(m) for m in ("local", "fedavg")}
    out["perfedavg"] = use("perfedavg", **({} if paper else dict(alpha=0.01, passes=2)))
    out["pfedme"] = use("pfedme", **({} if paper else dict(inner_steps=2, personal_lr=0.05)))
    out |= {"pfedhn": use("pfedhn") | hn} | ({"fedbn": use("fedbn")} if cifar else {})
    out |= {"fedrep": use("fedrep"), "fedfomo": use("fedfomo", neighbours=n) | dict(holdout=0.2)}
    return out | {"pfedla": own(profile), "heurpfedla": own(profile, "heurpfedla")}


def extras(profile: str, dataset: str) -> dict[str, dict]:
    """Rows of ours for Table 1: the other sign, the other code's rate, and averaged BatchNorm statistics where there are any."""
    out = {"pfedla (literal sign)": own(profile, hn_sign="literal"), "pfedla (rate 0.005)": own(profile, lr=0.005)}
    if dataset.startswith("cifar"):
        averaged = {"fedavg": use("fedavg"), "pfedla": own(profile)}
        out |= {f"{m} (BatchNorm averaged)": row | dict(buffers="average") for m, row in averaged.items()}
    return out


def columns(study: Any, artefact: str) -> dict[str, tuple[str, int]]:
    """The columns (panels) {label: (data set's name in the paper, clients)} that an artefact has at a study's profile and data."""
    both, four = ("EMNIST", "CIFAR-10"), tuple(DATA)
    if artefact in ("table1", "table2"):
        found = COLUMNS
    else:
        found = {c: (c, 0) for c in {"fig1": ("CIFAR-10",), "fig6": four}.get(artefact, both)}
    if study.profile == "paper" and not study.datasets:
        return found
    if study.label == "digits":
        return dict([next(iter(found.items()))])
    found = {c: v for c, v in found.items() if study.data(DATA[v[0]]) == DATA[v[0]]}
    if study.profile == "paper":
        return found
    few = {"table1": ("FMNIST", "CIFAR-10"), "table2": ("FMNIST",)}.get(artefact, four)  # what quick has time for
    return {c: v for c, v in found.items() if v[0] in few and v[1] < 100} or dict(list(found.items())[:1])


def sweep(study: Any, artefact: str, seeds: int | None = None, ours: bool = False) -> pd.DataFrame:
    """Rows of all `columns` of an artefact, with `ours` those of `extras`; seeds: how many at quick."""
    frames = []
    for label, (name, n) in columns(study, artefact).items():
        base = study.base(artefact, DATA[name], **({"clients": n} if n else {}))
        if base is not None:
            some = extras(study.profile, base.dataset) if ours else study.rows_for(artefact, DATA[name], n)
            if artefact == "table3" and study.label not in ("digits", "paper"):
                some = dict(list(some.items())[: 1 + len(RETAINED[name])])  # the k that are published
            frames.append(study.sweep(base, some, {label: {}}, seeds if study.profile == "quick" else None))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=store.ROW_COLUMNS)
