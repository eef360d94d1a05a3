"""FLAYER (Chen et al., IJCAI 2025): Tables 1 to 5, Figures 2 and 3. Figure 1 is a diagram."""

from __future__ import annotations

from typing import Any

from pfl_core.papers import Claim, use

ARTEFACTS = ["table1", "table2", "table3", "table4", "table5", "fig2", "fig3"]
TABLES = ("table1", "table2", "table3", "table5")  # those whose rows `presets` gives
OWN = "flayer"
REPORT: dict[str, str] = dict(select="best_test", when="before", mean="pooled")
WHEN: dict[str, str] = {}


def _paper(table: str, dataset: str, clients: int) -> tuple[dict, dict]:
    # Sec. 5.1 [P]; 200 rounds: the largest published count of iterations is 195 [inferred]; PFLlib's partition [O].
    deep = table in ("table1", "table5")  # ResNet-18
    text = dataset == "ag_news"
    fields = dict(
        dataset=dataset,
        clients=clients,
        model="resnet18" if deep else "fasttext" if text else "cnn",
        batch=10,
        epochs=1,
    )
    fields |= dict(
        lr=0.1 if deep or text else 0.005,
        rounds=1000 if text else 200,
        plan="drop",
        normalize="half",
        partition="dirichlet",
    )
    fields |= dict(head_depth=2, head_by="child") if deep else {}
    fields["partition_args"] = {"alpha": 0.1, "source": "train"} if dataset == "tiny_imagenet" else {"alpha": 0.1}
    rows = {m: use(m) for m in ("fedavg", "apple", "ditto", "fedamp", "fedper", "fedrep", "fedala")}
    if table == "table5":
        rows |= {"gpfl": use("gpfl", lam=1e-4), "fedcp": use("fedcp", lam=1.0)}  # GPFL's own script for ResNet-18; ?
    released = use("flayer", mode="official", middle=1.0 if deep or text else 20.0)
    released |= dict(head_by="tensor", head_depth=4 if deep else 2)  # `-p` of the released commands [O]
    return fields, rows | {"flayer": use("flayer"), "flayer (official)": released}


def setting(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, Any]:
    """Fields of the Experiment that an artefact's runs vary."""
    return _paper(artefact, dataset, clients or 20)[0]


def rows(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, dict]:
    """Rows of an artefact as changes to its `setting`."""
    return _paper(artefact, dataset, clients or 20)[1]


CLAIMS: list[Claim] = []
