"""A run that diverged has no numbers, and its cell says how many of its seeds did."""

import pandas as pd
import pytest

from pfl_core import Experiment, sweep
from pfl_core.analysis.select import tuples
from pfl_core.experiments import lookup
from pfl_papers import places
from pfl_papers.compare import report
from pfl_papers.evidence import committed, diverged

TAGS = dict(paper="fedper", artefact="fig9", profile="quick", column="MobileNet")
SMALL = dict(rounds=2, max_samples=20, clients=2, model="mlp", eval_every=1, tags=TAGS)


def cells(row, lr, seeds=(0, 1)):
    return [Experiment(**SMALL, lr=lr, seed=s).but(tags=TAGS | {"row": row}) for s in seeds]


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "home" / "results")


def ran():
    """Two runs that end well, and one of two that diverges: the cells, and all rows."""
    every = [
        *cells("original", 0.01),
        *cells("linear base", 0.01, [0]),
        *cells("linear base", 1e30, [1]),
    ]
    frame = sweep(every, device="cpu", jobs=1)
    return every, pd.concat([frame, diverged.rows(every)], ignore_index=True)


def test_a_cell_says_how_many_of_its_seeds_diverged():
    _, rows = ran()
    assert diverged.said(rows) == {("linear base", "MobileNet"): "diverges (1 of 2)"}
    table = pd.DataFrame({"MobileNet": {"original": "12.00", "linear base": "9.00"}})
    assert diverged.marked(table, rows).MobileNet.to_dict() == {
        "original": "12.00",
        "linear base": "9.00, diverges (1 of 2)",
    }


def test_a_row_of_which_all_diverged_is_not_missing():
    _, rows = ran()
    lost = rows[(rows.row == "original") | (rows.metric == diverged.METRIC)]
    table = pd.DataFrame({"MobileNet": {"original": "12.00"}})
    assert diverged.marked(table, lost).MobileNet["linear base"] == "diverges (1 of 1)"
    assert diverged.marked(pd.DataFrame(), lost[lost.row != "original"]).to_numpy().tolist() == [
        ["diverges (1 of 1)"]
    ]


def test_what_diverged_is_published_and_found_again_without_its_run(monkeypatch, tmp_path):
    every, rows = ran()
    last = every[-1]
    committed.save(rows, "fedper", "quick", "digits")
    committed.publish("fedper")
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "elsewhere"))
    assert committed.status(committed.find(last)).startswith("failed: ")
    assert committed.found(last).empty  # no number of it stands in a table
    again = diverged.rows(every)
    assert list(again.row) == ["linear base"] and list(again.seed) == [1]
    published = committed.parts()["fedper.quick-digits"].rows()
    assert diverged.said(published) == diverged.said(rows)
    assert diverged.rows(every, train=True).empty  # who trains looks at the store alone
    assert sweep([last], found=committed.found).empty and lookup.stored(last) is None


def test_a_table_says_so_in_place_of_a_verdict():
    _, rows = ran()
    lost = rows[rows.metric == diverged.METRIC]
    lines = report.compare(
        lost.assign(artefact="table2", row="flayer", column="lr 0.1"), "flayer", "table2"
    )
    (line,) = [c for c in tuples(lines) if c.n == 0 and c.verdict != "not run"]
    assert (line.row, line.verdict) == ("flayer", "diverges (1 of 1)")
