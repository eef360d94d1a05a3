"""pFedHN and pFedHN-PC (Shamsian et al., ICML 2021): Tables 1 to 4, Figures 2 to 7, Appendix C.5. Figure 1 is a diagram."""

from __future__ import annotations

from typing import Any

from pfl_core.experiments import Experiment
from pfl_core.papers import Claim, use

ARTEFACTS = ["table1", "table2", "table3", "table4", "fig2", "fig3", "fig4", "fig5", "fig6", "fig7", "appc5"]
TABLES = ("table1", "table3", "table4")  # those whose rows `presets` gives
OWN = "pfedhn"
REPORT: dict[str, str] = dict(select="best_val", when="before", mean="client")
WHEN: dict[str, str] = {}


def _paper(table: str, dataset: str, clients: int) -> tuple[dict, dict]:
    # Sec. 5, App. B [P], trainer [O]: 5000 communication steps, one client each for pFedHN, five a round for baselines.
    mnist = table == "table3"
    fields = dict(
        dataset="mnist" if mnist else dataset,
        clients=clients,
        model="mlp" if mnist else "lenet",
        batch=64,
        plan="fresh",
    )
    fields |= dict(
        steps=50,
        lr=0.01,
        momentum=0.0,
        partition="pfedhn_classes",
        rounds=1000,
        participation=5 / clients,
        eval_every=20,
    )
    one = dict(
        rounds=5000, participation=1 / clients, eval_every=30, lr=0.005, momentum=0.9, weight_decay=5e-5, clip=50.0
    )
    one |= dict(eval_after=False)
    own = {"pfedhn": use("pfedhn", n_hidden=1 if mnist else 3) | one}
    if table == "table4":
        return fields, {"pfedhn": use("pfedhn", spectral_norm=True) | one}
    rows = {m: use(m) for m in ("fedavg", "perfedavg")} | {
        "pfedme": use("pfedme", inner_steps=3) | dict(steps=20, lr=0.05)
    }
    if mnist:
        return fields, rows | own
    trained = dict(init_from=Experiment(**fields | use("fedavg"), keep_models=True))
    rows = {"local": use("local") | dict(rounds=40, participation=1.0)} | rows  # 2000 steps a client
    rows |= {
        "fedper": use("fedper"),
        "lgfedavg": use("lgfedavg") | dict(rounds=200) | trained,
    }  # 1000 more communication steps
    return fields, rows | own | {"pfedhn_pc": use("pfedhn_pc") | one}


def setting(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, Any]:
    """Fields of the Experiment that an artefact's runs vary."""
    return _paper(artefact, dataset, clients or 50)[0]


def rows(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, dict]:
    """Rows of an artefact as changes to its `setting`."""
    return _paper(artefact, dataset, clients or 50)[1]


CLAIMS: list[Claim] = []
