"""pFedLA and HeurpFedLA (Ma et al., CVPR 2022): Tables 1 to 3, Figures 1, 5, 6, 7. Figures 2 to 4 are diagrams."""

from __future__ import annotations

from typing import Any

from pfl_core.papers import Claim, use

ARTEFACTS = ["table1", "table2", "table3", "fig1", "fig5", "fig6", "fig7"]
TABLES = ("table1", "table2", "table3")  # those whose rows `presets` gives
OWN = "pfedla"
REPORT: dict[str, str] = dict(select="last", when="before", mean="client")
WHEN: dict[str, str] = {"local": "after"}


def _paper(table: str, dataset: str, clients: int) -> tuple[dict, dict]:
    # Sec. 4.1, 4.2 [P]; 600 images a client, LeNet-16 with BatchNorm for CIFAR: inferred from Table 3's megabytes.
    cifar = dataset.startswith("cifar")
    few = dict(rounds=600, epochs=10) if clients <= 10 else dict(rounds=2500, epochs=20, participation=0.1)
    fields = dict(
        dataset=dataset, clients=clients, model="lenet", model_args={"bn": cifar}, batch=32, lr=0.01 if cifar else 0.005
    )
    fields |= few | dict(partition="pfedla_noniid2" if table == "table2" else "pfedla_noniid1", eval_every=10)
    if table == "table3":
        return fields, {f"k={k}": use("heurpfedla", retain_k=k) for k in range(8 if cifar else 6)}
    rows = {
        m: use(m) for m in ("local", "fedavg", "perfedavg", "pfedme")
    }  # ? their files' defaults: alpha = beta = lr; 15, 5, .01, 1
    rows["pfedhn"] = use("pfedhn") | dict(
        momentum=0.9, weight_decay=5e-5, clip=50.0
    )  # ? as in its own paper, the others' visits
    rows |= {"fedbn": use("fedbn")} if cifar else {}
    rows |= {
        "fedrep": use("fedrep"),
        "fedfomo": use("fedfomo", neighbours=clients) | dict(holdout=0.2),
    }  # ? 1 + E epochs; all others
    return fields, rows | {m: use(m) for m in ("pfedla", "heurpfedla")}


def setting(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, Any]:
    """Fields of the Experiment that an artefact's runs vary."""
    return _paper(artefact, dataset, clients or 10)[0]


def rows(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, dict]:
    """Rows of an artefact as changes to its `setting`."""
    return _paper(artefact, dataset, clients or 10)[1]


CLAIMS: list[Claim] = []
