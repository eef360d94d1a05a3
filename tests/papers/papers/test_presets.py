"""Presets: every row of every table is an Experiment, and the papers' own settings are what the papers print."""

import pytest

from pfl_core import Experiment
from pfl_papers.papers import base as papers
from pfl_papers.papers import presets

TABLES = [(p, t) for p in papers.PAPERS for t in papers.paper(p).tables]


@pytest.mark.parametrize("paper, table", TABLES)
def test_every_row_is_an_experiment(paper, table):
    rows = presets.presets(paper, table)
    assert len(rows) >= 1
    for label, fields in rows.items():
        Experiment(
            **fields | {"dataset": "digits"}, tags={"row": label}
        )  # checks names, values and hyper-parameters


def test_rows_of_the_main_tables():
    views = {"fedaghn": 2, "pfedla": 0, "flayer": 0, "pfedhn": 0}  # FedAvg-FT and FedProx-FT
    counts = {
        p: len(presets.presets(p, "table2" if p == "flayer" else "table1")) + v
        for p, v in views.items()
    }
    assert counts == {
        "fedaghn": 16,
        "pfedla": 10,
        "flayer": 9,
        "pfedhn": 8,
    }  # FLAYER: 8 methods, FLAYER in both modes
    assert "fedbn" not in presets.presets(
        "pfedla", "table1", "emnist-digits"
    )  # its network there has no BatchNorm


def test_numbers_that_the_papers_print():
    la = presets.presets("pfedla", "table1", "cifar100", clients=100)["pfedla"]
    assert (la["rounds"], la["participation"], la["epochs"], la["batch"], la["lr"]) == (
        2500,
        0.1,
        20,
        32,
        0.01,
    )
    assert presets.presets("pfedla", "table1", "emnist-digits")["local"]["lr"] == 0.005
    aghn = presets.presets("fedaghn", "table1")["ditto"]
    assert (aghn["rounds"], aghn["epochs"], aghn["batch"], aghn["clients"]) == (200, 5, 64, 20)
    flayer = presets.presets("flayer", "table2")["flayer (official)"]
    assert (
        flayer["batch"],
        flayer["lr"],
        flayer["head_depth"],
        flayer["method_args"]["middle"],
    ) == (10, 0.005, 2, 20)
    assert presets.presets("flayer", "table5a")["flayer"]["lr"] == 0.1  # ResNet-18
    hn = presets.presets("pfedhn", "table1")["pfedhn"]
    assert (hn["rounds"], hn["participation"] * hn["clients"], hn["steps"], hn["clip"]) == (
        5000,
        1,
        50,
        50,
    )
    per = papers.paper("fedper").setting("fig2", "paper", "cifar10")
    assert (per["rounds"], per["epochs"], per["batch"], per["lr"], per["clients"]) == (
        100,
        4,
        128,
        0.01,
        10,
    )


def test_unknown_names():
    with pytest.raises(
        ValueError, match="table of fedaghn: 'table9' is unknown; .*known are table1"
    ):
        presets.presets("fedaghn", "table9")
