"""FLAYER's paper module: the paper's settings and labels, costs and gains from rows, and claims that can be decided either way."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from pfl_core import report
from pfl_core.papers import flayer
from pfl_core.probes import PROBES
from pfl_core.store import ROW_COLUMNS

PUBLISHED = report.published("flayer")


@pytest.fixture(scope="module")
def paper_cells(swept):
    return swept("flayer", "paper")


def of(cells, artefact):
    """Without the control of Table 2, whose columns are rates."""
    return [e for e in cells if e.tags["artefact"] == artefact and not e.tags["column"].startswith("lr ")]


def test_the_papers_own_numbers(paper_cells):
    assert {(e.epochs, e.batch, e.momentum) for e in paper_cells} == {(1, 10, 0.0)} and {
        e.seed for e in paper_cells
    } == {0, 1, 2}
    plain = [e for e in of(paper_cells, "table2") if e.tags["row"] != flayer.OFFICIAL]
    rates = {(e.model, e.lr, e.head_depth, e.rounds) for e in plain}
    assert rates == {("cnn", 0.005, 1, 200), ("resnet18", 0.1, 2, 200), ("fasttext", 0.1, 1, 1000)}
    assert {e.partition_args["alpha"] for e in paper_cells} == {0.1, 0.01}
    assert {e.clients for e in of(paper_cells, "table5b")} == {20, 50, 100}
    assert {e.tags["column"] for e in of(paper_cells, "table5c")} == {"CIFAR-100, ResNet-18"}


def test_labels_are_those_of_the_published_numbers(paper_cells):
    for artefact in ("table2", "table4", "table5a", "table5b", "table5c"):
        said = PUBLISHED[(PUBLISHED.table == artefact) & (PUBLISHED.metric == "acc_pct")]
        cells = of(paper_cells, artefact)
        assert {e.tags["column"] for e in cells} == set(said.column), artefact
        ours = {flayer.OFFICIAL, flayer.AVERAGED}
        assert {e.tags["row"] for e in cells} - ours == set(said.row), artefact


def test_the_released_code_has_its_own_head_and_rates(paper_cells):
    cnn, deep = (
        next(e for e in of(paper_cells, "table2") if (e.tags["row"], e.model) == (flayer.OFFICIAL, m))
        for m in ("cnn", "resnet18")
    )
    assert (cnn.head_by, cnn.head_depth, cnn.lr * cnn.method_args["middle"]) == ("tensor", 2, flayer.FAST)
    assert (deep.head_by, deep.head_depth, deep.method_args["middle"]) == ("tensor", 4, 1)


def test_quick_is_small_and_runs_are_shared(swept):
    cells = swept("flayer", "quick")
    runs = {repr(replace(e, tags={})) for e in cells}
    assert 30 <= len(runs) <= 40 < len(cells)
    assert {r for e in cells for r in e.record} == {"cka"} <= set(PROBES)


# -- numbers from rows --------------------------------------------------------------------------------------------------------


def lines(cells, column="CIFAR-10, CNN", metric="acc_pct", mean="pooled", run="r", at=1):
    made = []
    for row, value in cells.items():
        line = dict.fromkeys(ROW_COLUMNS, "") | dict(
            run=f"{run}/{row}/{column}", row=row, column=column, metric=metric, seed=0
        )
        for split in ("test",) if mean != "total" else ("",):
            made.append(
                line | dict(round=at, split=split, when="before", mean=mean, value=value, dataset="d", model="m")
            )
    return pd.DataFrame(made, columns=ROW_COLUMNS)


def test_costs_are_those_up_to_the_best_round():
    rows = [lines({"flayer": acc}, at=r) for r, acc in enumerate((20, 60, 50))]
    for r in range(3):
        for metric, each in dict(client_visits=20, download_bytes=1e6, upload_bytes=2e6, train_s=4).items():
            rows.append(lines({"flayer": each * r}, metric=metric, mean="total", at=r))
    got = {c["metric"]: c["value"] for c in flayer.costs(pd.concat(rows, ignore_index=True))}
    assert got == dict(iterations=1, client_visits=20, megabytes=3, total_s=4, s_per_iteration=4)


def test_improvements_are_over_the_method_alone():
    got = flayer.improvements(lines({"ditto": 80, "fedper": 70}), lines({"ditto": 75, "fedper": 71, "apple": 90}))
    assert {g["row"]: g["value"] for g in got} == {"ditto": 5, "fedper": -1}


def test_similarity_is_over_pairs_of_clients():
    class P:
        run, row, column, seed = "r/flayer/CIFAR-10, CNN", "flayer", "CIFAR-10, CNN", 0

        def at(self, when):
            return {"fc": np.array([[1, 0.2], [0.4, 1]]) + 0.1 * when}

    got = flayer.similarity([P()], lines({"flayer": 60}, at=2))
    assert got.stage.tolist() == ["initial", "best"] and got.value.tolist() == pytest.approx([0.3, 0.5])


# -- claims -------------------------------------------------------------------------------------------------------------------


def judge(start, *frames):
    (claim,) = (c for c in flayer.CLAIMS if c.says.startswith(start))
    return claim.judge(pd.concat(frames, ignore_index=True))


def derived(metric, cells):
    return lines(cells, metric=metric, mean="derived")


def test_most_accurate():
    assert judge("FLAYER is more", lines({"fedavg": 50, "fedala": 60, "flayer": 61})) == (
        "CIFAR-10, CNN: flayer 61.0, fedala 60.0",
        True,
    )
    assert not judge("FLAYER is more", lines({"fedavg": 50, "fedala": 62, "flayer": 61}))[1]
    with pytest.raises(LookupError):
        judge("FLAYER is more", lines({"flayer": 61}))


def test_fewer_rounds():
    for own, holds in ((8, True), (12, False)):
        got = judge("FLAYER is at its best", derived("iterations", {"flayer": own, "fedavg": 15, "fedala": 10}))
        assert got[1] == holds
    with pytest.raises(LookupError):
        judge("FLAYER is at its best", derived("iterations", {"flayer": 8}))


def test_depth_of_the_head():
    assert judge("One personal layer", lines({"s=1": 60, "s=2": 59, "s=3": 58}))[1]
    assert not judge("One personal layer", lines({"s=1": 60, "s=2": 61, "s=3": 58}))[1]
    deep = lines({"s=1": 60, "s=2": 61, "s=3": 58}, "CIFAR-100, ResNet-18")
    assert judge("One personal layer", deep)[1]


def test_around_other_methods():
    assert judge("FLAYER improves", derived("improvement_points", {"ditto": 3, "fedper": 0.1}))[1]
    assert not judge("FLAYER improves", derived("improvement_points", {"ditto": 3, "fedper": -0.1}))[1]
    with pytest.raises(LookupError):
        judge("FLAYER improves", lines({"ditto": 70}))


def test_similarity_of_layers():
    def cka(**at):
        return pd.concat([derived(f"cka {k.replace('_', ' ')}", {"fedavg": v}) for k, v in at.items()])

    falls = cka(initial_conv1=0.7, initial_fc=0.5, best_conv1=0.9, best_fc=0.6)
    assert judge("Clients' models are least", falls)[1] and judge("Training makes", falls)[1]
    rises = cka(initial_conv1=0.9, initial_fc=0.5, best_conv1=0.7, best_fc=0.8)
    assert not judge("Clients' models are least", rises)[1] and not judge("Training makes", rises)[1]
    with pytest.raises(LookupError):
        judge("Training makes", lines({"fedavg": 1}))


def test_parts():
    said = {"aggregation only": 40, "learning rates only": 58, "masking only": 45}
    assert judge("Of the three", lines(said))[1]
    assert not judge("Of the three", lines(said | {"aggregation only": 50}))[1]
