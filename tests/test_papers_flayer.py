"""FLAYER's paper module: its settings and labels, costs and gains, and claims decided either way."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from pfl_core import models
from pfl_core.engine.probes import PROBES
from pfl_core.experiments.store import ROW_COLUMNS
from pfl_core.papers import flayer, report
from pfl_core.papers.base import Probed, Scope

PUBLISHED = report.reported("flayer")


@pytest.fixture(scope="module")
def paper_cells(swept):
    return swept("flayer", "paper")


def of(cells, artefact):
    """Without the control of Table 2, whose columns are rates."""
    return [
        e
        for e in cells
        if e.tags["artefact"] == artefact and not e.tags["column"].startswith("lr ")
    ]


def test_the_papers_own_numbers(paper_cells):
    assert {(e.epochs, e.batch, e.momentum) for e in paper_cells} == {(1, 10, 0.0)}
    assert {e.seed for e in paper_cells} == {0, 1, 2, 3, 4}  # "five times for each task"
    own = [e for e in of(paper_cells, "table2") if e.tags["row"] == "flayer"]
    rates = {(e.model, e.lr, e.head_depth, e.head_by, e.rounds) for e in own}
    every = [
        (*net, "module", n)
        for *net, n in (
            ("cnn", 0.005, 1, 200),
            ("resnet18", 0.1, 2, 200),
            ("fasttext", 0.1, 1, 1000),
        )
    ]
    assert rates == set(every)
    assert {e.partition_args["alpha"] for e in paper_cells} == {0.1, 0.01}
    assert {e.clients for e in of(paper_cells, "table5b")} == {20, 50, 100}
    assert {e.tags["column"] for e in of(paper_cells, "table5c")} == {"CIFAR-100, ResNet-18"}


def test_labels_are_those_of_the_published_numbers(paper_cells):
    for artefact in ("table2", "table4", "table5a", "table5b", "table5c"):
        said = PUBLISHED[
            (PUBLISHED.table == artefact) & PUBLISHED.metric.isin(["acc_pct", "train_acc_pct"])
        ]
        cells = of(paper_cells, artefact)
        assert {e.tags["column"] for e in cells} == set(said.column), artefact
        ours = {flayer.OFFICIAL, flayer.AVERAGED}
        assert {e.tags["row"] for e in cells} - ours == set(said.row), artefact


def head_of(experiment):
    shape = (20,) if experiment.model == "fasttext" else (3, 32, 32)
    return models.head(
        models.build(experiment.model, shape, 10, **experiment.model_args),
        experiment.head_depth,
        experiment.head_by,
    )


LAST = {
    "cnn": ["fc.weight", "fc.bias"],
    "fasttext": ["fc.weight", "fc.bias"],
    "resnet18": ["layer4.1.bn2.weight", "layer4.1.bn2.bias", "fc.weight", "fc.bias"],
}


@pytest.mark.parametrize("model", LAST)
def test_a_head_is_the_last_s_modules_and_that_of_a_baseline_the_classifier(paper_cells, model):
    cells = {e.tags["row"]: e for e in of(paper_cells, "table2") if e.model == model}
    trained = [n for n in head_of(cells["flayer"]) if n.endswith(("weight", "bias"))]
    assert trained == LAST[model] and head_of(cells["flayer"]) == head_of(cells[flayer.OFFICIAL])
    for row in ("fedper", "fedrep", "fedala"):
        assert head_of(cells[row]) == ["fc.weight", "fc.bias"]


def test_flayer_around_a_baseline_keeps_its_head(paper_cells):
    depth = {e.tags["row"]: e.head_depth for e in of(paper_cells, "table5c")}
    assert depth == dict(fedavg=2, ditto=2, fedamp=2, fedper=1, fedrep=1, fedala=1)


def test_the_released_code_has_its_own_head_rates_rounds_and_order(paper_cells):
    cells = [e for e in of(paper_cells, "table2") if e.tags["row"] == flayer.OFFICIAL]
    cnn, deep, text = (
        next(e for e in cells if e.model == m) for m in ("cnn", "resnet18", "fasttext")
    )
    assert (cnn.head_by, cnn.head_depth, cnn.lr * cnn.method_args["middle"]) == (
        "tensor",
        2,
        flayer.FAST,
    )
    assert (deep.head_by, deep.head_depth, deep.method_args["middle"]) == ("tensor", 4, 1)
    rounds = {e.tags["column"]: e.rounds for e in cells}
    assert rounds == dict(zip(flayer.COLUMNS, (100, 40, 25, 100, 75, 25, 1000), strict=True))
    assert not any(e.shuffle for e in cells) and all(
        e.shuffle for e in of(paper_cells, "table2") if e not in cells
    )
    assert (
        text.method_args["acc_on"] == "train" and "acc_on" not in cnn.method_args
    )  # its reader knows no test texts


def test_the_ablation_has_the_released_arms(paper_cells):
    arms = {e.tags["row"]: e.method_args for e in of(paper_cells, "fig3") if e.model == "cnn"}
    assert len(flayer.PARTS) == 3
    for label, part in flayer.PARTS.items():
        assert sum(part.values()) == 1 and arms[label] == part
        assert arms[f"{label} (official)"] == arms[flayer.OFFICIAL] | part


def test_texts_are_tested_on_their_training_data_too(paper_cells):
    for e in of(paper_cells, "table2"):
        assert ("train" in e.record) == (e.model == "fasttext")


def test_apples_cores_are_compared_beside_its_mixtures(paper_cells):
    assert {e.method for e in paper_cells if "cka_cores" in e.record} == {"apple"}
    assert {e.record for e in of(paper_cells, "fig2") if e.method == "apple"} == {
        ("cka", "cka_cores")
    }


def test_quick_is_small_and_runs_are_shared(swept):
    cells = swept("flayer", "quick")
    runs = {repr(replace(e, tags={})) for e in cells}
    assert 30 <= len(runs) <= 40 < len(cells)
    assert {r for e in cells for r in e.record} == {"cka", "cka_cores"} <= set(PROBES)


def test_medium_is_the_papers_own_setting_with_fewer_rounds(swept, paper_cells):
    cells = swept("flayer", "medium")
    there = {a for a, v in flayer.PAPER.artefacts.items() if v.medium}
    columns = {a: {e.tags["column"] for e in cells if e.tags["artefact"] == a} for a in there}
    assert columns == {a: set(c) for a, c in flayer.AT_MEDIUM.items()}
    assert {e.tags["artefact"] for e in cells} == there and {e.seed for e in cells} == {0, 1}
    full = {(e.tags["artefact"], e.tags["column"], e.tags["row"]): e for e in paper_cells}
    for e in cells:
        p = full[e.tags["artefact"], e.tags["column"], e.tags["row"]]
        assert e.rounds == (200 if e.model == "fasttext" else 25)
        assert e.rounds // e.eval_every >= 12 and not e.max_samples
        assert e.partition_args == p.partition_args | {"split": "67.5/7.5/25"}
        assert e.eval_after is not False
        same = "dataset model model_args method method_args lr batch epochs plan shuffle".split()
        same += ["clients", "head_depth", "head_by", "normalize"]
        assert all(getattr(e, f) == getattr(p, f) for f in same)
    assert {e.tags["row"] for e in cells if e.tags["artefact"] == "table2"} == {
        *flayer.BASELINES,
        "flayer",
        flayer.OFFICIAL,
    }


def test_the_control_is_a_part_of_table_2(swept):
    for profile, rates in (
        ("quick", (0.02, 0.1)),
        ("medium", ()),
        ("paper", (0.005, 0.05, 0.1, 0.2)),
    ):
        main, control = (
            [
                e
                for s in flayer.PAPER.planned(Scope(profile), "table2", part)
                for e in s.experiments()
            ]
            for part in ("", "control")
        )
        assert len(main) + len(control) == len(
            [e for e in swept("flayer", profile) if e.tags["artefact"] == "table2"]
        )
        assert {e.tags["column"] for e in main} <= set(flayer.COLUMNS)
        assert {(e.tags["column"], e.lr) for e in control} == {(f"lr {r:g}", r) for r in rates}
        ran = [e.plain() for e in main]
        assert all(
            e.plain() in ran for e in control if e.lr == rates[0]
        )  # at the table's own rate nothing more is run


# -- numbers from rows -----------------------------------------------------------------------------


def lines(cells, column="CIFAR-10, CNN", metric="acc_pct", mean="pooled", run="r", at=1):
    made = []
    for row, value in cells.items():
        line = dict.fromkeys(ROW_COLUMNS, "") | dict(
            run=f"{run}/{row}/{column}", row=row, column=column, metric=metric, seed=0
        )
        for split in ("test",) if mean != "total" else ("",):
            made.append(
                line
                | dict(
                    round=at,
                    split=split,
                    when="before",
                    mean=mean,
                    value=value,
                    dataset="d",
                    model="m",
                )
            )
    return pd.DataFrame(made, columns=ROW_COLUMNS)


def test_costs_are_those_up_to_the_best_round():
    rows = [lines({"flayer": acc}, at=r) for r, acc in enumerate((20, 60, 50))]
    for r in range(3):
        for metric, each in dict(
            client_visits=20, download_bytes=1e6, upload_bytes=2e6, train_s=4
        ).items():
            rows.append(lines({"flayer": each * r}, metric=metric, mean="total", at=r))
    got = {c["metric"]: c["value"] for c in flayer.costs(pd.concat(rows, ignore_index=True))}
    assert got == dict(iterations=1, client_visits=20, megabytes=3, total_s=4, s_per_iteration=4)


def test_improvements_are_over_the_method_alone():
    got = flayer.improvements(
        lines({"ditto": 80, "fedper": 70}), lines({"ditto": 75, "fedper": 71, "apple": 90})
    )
    assert {g["row"]: g["value"] for g in got} == {"ditto": 5, "fedper": -1}


def test_accuracy_on_training_texts_is_that_of_its_best_round():
    p = Probed("r", "flayer", "AG News, fastText", 0, np.array([0, 10, 20]), {})
    p = p._replace(
        values={"hits": np.array([[1, 2], [3, 8], [4, 6]]), "n": np.array([[4, 12]] * 3)}
    )
    (got,) = flayer.trained([p])
    assert (got["metric"], got["round"], got["value"]) == ("train_acc_pct", 10, 68.75)


def test_similarity_is_over_pairs_of_clients():
    m = np.array([[1, 0.2], [0.4, 1]])
    key = ("r/apple/CIFAR-10, CNN", "apple", "CIFAR-10, CNN", 0, np.array([0, 2]))
    found = {
        "cka": [Probed(*key, {"fc": np.stack([m, m + 0.2])})],
        "cka_cores": [Probed(*key, {"fc": np.stack([m, m])})],
    }
    rows = lines({"apple": 60}, at=2)
    got = flayer.similarity(rows, found.__getitem__)
    assert {(g["row"], g["metric"]): g["value"] for g in got} == pytest.approx(
        {
            ("apple", "cka initial fc"): 0.3,
            ("apple", "cka best fc"): 0.5,
            (flayer.CORES, "cka initial fc"): 0.3,
            (flayer.CORES, "cka best fc"): 0.3,
        }
    )
    made = pd.DataFrame(
        [rows.iloc[0].to_dict() | {"mean": "derived"} | g for g in got], columns=ROW_COLUMNS
    )
    alike = flayer.layers(pd.concat([rows, made], ignore_index=True))
    assert alike.stage.tolist() == ["initial", "best"] * 2 and set(alike.layer) == {"fc"}
    assert alike.row.tolist() == ["apple"] * 2 + [flayer.CORES] * 2 and alike.value.tolist() == [
        g["value"] for g in got
    ]


# -- claims ----------------------------------------------------------------------------------------


def judge(start, *frames):
    (claim,) = (c for c in flayer.PAPER.claims if c.says.startswith(start))
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


def test_texts_are_judged_on_what_the_paper_measured():
    column = "AG News, fastText"
    tested = lines({"fedavg": 80, "flayer": 70}, column)
    trained = lines({"fedavg": 80, "flayer": 98}, column, "train_acc_pct", "derived")
    assert judge("FLAYER is more", tested, trained) == (f"{column}: flayer 98.0, fedavg 80.0", True)
    with pytest.raises(LookupError):
        judge("FLAYER is more", tested)


def test_fewer_rounds():
    for own, holds in ((8, True), (12, False)):
        got = judge(
            "FLAYER is at its best",
            derived("iterations", {"flayer": own, "fedavg": 15, "fedala": 10}),
        )
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
    assert not judge(
        "FLAYER improves", derived("improvement_points", {"ditto": 3, "fedper": -0.1})
    )[1]
    with pytest.raises(LookupError):
        judge("FLAYER improves", lines({"ditto": 70}))


def test_similarity_of_layers():
    def cka(**at):
        return pd.concat(
            [derived(f"cka {k.replace('_', ' ')}", {"fedavg": v}) for k, v in at.items()]
        )

    falls = cka(initial_conv1=0.7, initial_fc=0.5, best_conv1=0.9, best_fc=0.6)
    assert judge("Clients' models are least", falls)[1] and judge("Training makes", falls)[1]
    rises = cka(initial_conv1=0.9, initial_fc=0.5, best_conv1=0.7, best_fc=0.8)
    assert (
        not judge("Clients' models are least", rises)[1] and not judge("Training makes", rises)[1]
    )
    with pytest.raises(LookupError):
        judge("Training makes", lines({"fedavg": 1}))


def test_apple_is_judged_on_its_cores():
    def layers(row, first, last):
        return pd.concat(
            derived(f"cka {stage} {layer}", {row: v})
            for stage, values in (("initial", first), ("best", last))
            for layer, v in zip(("conv1", "fc"), values, strict=True)
        )

    mixed = layers("apple", (1.0, 1.0), (0.9, 0.5))
    cores = layers(flayer.CORES, (0.7, 0.6), (0.8, 0.5))
    assert not judge("Training makes", mixed)[1] and judge("Training makes", mixed, cores)[1]


def test_parts():
    said = {f"{label} (official)": v for label, v in zip(flayer.PARTS, (40, 58, 45), strict=True)}
    assert judge("Of the three", lines(said))[1]
    assert not judge("Of the three", lines(said | {"aggregation only (official)": 50}))[1]
    # Without the head's epoch, two of them are served as one global model.
    with pytest.raises(LookupError):
        judge("Of the three", lines({label: 40 for label in flayer.PARTS}))
