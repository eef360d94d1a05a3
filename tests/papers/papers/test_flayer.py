"""FLAYER's paper module: its settings and labels, costs and gains, and claims decided either way."""

import zlib
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from pfl_core import models
from pfl_core.engine.probes import PROBES
from pfl_core.experiments.store import ROW_COLUMNS
from pfl_papers.compare import report
from pfl_papers.evidence.contrasts import Evidence
from pfl_papers.papers import base, flayer
from pfl_papers.papers.base import Probed, Scope
from tests.made import judged

PUBLISHED = base.reported("flayer")


@pytest.fixture(scope="module")
def paper_cells(swept):
    return swept("flayer", "paper")


def of(cells, artefact):
    """Without columns of ours: the control of Table 2, whose columns are rates, and its own draws."""
    ours = ("lr ", flayer.ANEW)
    return [
        e for e in cells if e.tags["artefact"] == artefact and not e.tags["column"].startswith(ours)
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
    cells = [e for e in swept("flayer", "medium") if not e.tags["column"].startswith("lr ")]
    there = {a for a, v in flayer.PAPER.artefacts.items() if v.medium}
    columns = {a: {e.tags["column"] for e in cells if e.tags["artefact"] == a} for a in there}
    assert columns == {a: set(flayer.SHOWN[a].columns.medium) for a in there}
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


@pytest.mark.parametrize("profile", ["medium", "paper"])
def test_clients_are_those_of_released_code_and_in_our_column_drawn_anew(swept, profile):
    cells = [e for e in swept("flayer", profile) if e.model == "cnn"]
    anew = [e for e in cells if e.tags["column"] == flayer.ANEW]
    draws = {e.dataset: e.partition_args["class_size"] for e in cells if e not in anew}
    sizes = {"cifar10": 6000, "cifar100": 600, "tiny_imagenet": 500}
    assert draws == {d: sizes[d] for d in draws}
    assert {e.partition_args["numpy_seed"] for e in cells if e not in anew} == {1}
    assert {e.tags["row"] for e in anew} == {
        *flayer.BASELINES, "flayer", flayer.OFFICIAL
    } - set(flayer.SLOW)  # fmt: skip
    assert not any("numpy_seed" in e.partition_args for e in anew)


def test_the_control_is_a_part_of_table_2(swept):
    for profile, rates in (
        ("quick", (0.02, 0.1)),
        ("medium", (0.005, 0.1)),
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
        assert {e.tags["column"] for e in main} <= {*flayer.COLUMNS, flayer.ANEW}
        assert {(e.tags["column"], e.lr) for e in control} == {(f"lr {r:g}", r) for r in rates}
        ran = [e.plain() for e in main]
        assert all(
            e.plain() in ran for e in control if e.lr == rates[0]
        )  # at the table's own rate nothing more is run


# -- numbers from rows -----------------------------------------------------------------------------


def lines(cells, column="CIFAR-10, CNN", metric="acc_pct", average="pooled", run="r", at=1):
    made = []
    for row, value in cells.items():
        line = dict.fromkeys(ROW_COLUMNS, "") | dict(
            run=f"{run}/{row}/{column}", row=row, column=column, metric=metric, seed=0
        )
        for split in ("test",) if average != "total" else ("",):
            made.append(
                line
                | dict(
                    rounds=at,
                    split=split,
                    when="before",
                    average=average,
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
            rows.append(lines({"flayer": each * r}, metric=metric, average="total", at=r))
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
    assert (got["metric"], got["rounds"], got["value"]) == ("train_acc_pct", 10, 68.75)


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
    assert {(g["metric"], g["rounds"]) for g in got} == {("cka initial fc", 0), ("cka best fc", 2)}
    made = pd.DataFrame(
        [rows.iloc[0].to_dict() | {"average": "derived"} | g for g in got], columns=ROW_COLUMNS
    )
    alike = flayer.layers(pd.concat([rows, made], ignore_index=True))
    assert alike.stage.tolist() == ["first round", "best round"] * 2 and set(alike.layer) == {"fc"}
    assert alike.panel.iloc[0] == f"{alike.column.iloc[0]}, APPLE"
    assert alike.row.tolist() == ["apple"] * 2 + [flayer.CORES] * 2 and alike.value.tolist() == [
        g["value"] for g in got
    ]


# -- claims ----------------------------------------------------------------------------------------

COLUMN = "CIFAR-10, CNN"
NET2 = "CIFAR-10, ResNet-18"


def seeded(cells, column=COLUMN, seeds=3, **how):
    """Rows of three seeds, whose noise is small against a point (a hundredth, of CKA).

    A row's noise has the mean 0, so that rows of one accuracy are a tie.
    """
    name = column + how.get("metric", "")
    random, frames = np.random.default_rng(zlib.crc32(name.encode())), []
    noise = random.normal(0, 0.001 if "cka" in name else 0.1, (seeds, len(cells)))
    for seed, moved in enumerate(noise - noise.mean(0)):
        noisy = {row: cells[row] + by for row, by in zip(cells, moved, strict=True)}
        frames.append(lines(noisy, column, run=f"r{seed}", **how).assign(seed=seed))
    return pd.concat(frames, ignore_index=True)


def derived(metric, cells, column=COLUMN):
    return seeded(cells, column, metric=metric, average="derived")


def verdict(start, *frames, printed=()):
    rows_ = pd.concat(frames, ignore_index=True)
    return judged(flayer.PAPER, rows_, lambda c: c.says.startswith(start), printed)


OFFICIAL_PARTS = {
    f"{part} (official)": v for part, v in zip(flayer.PARTS, (40, 60, 50), strict=True)
}
STEPS = dict(fedavg=40, fedper=50, fedrep=55, fedala=60, flayer=65)
# A claim, accuracies with which it holds, what changes to contradict it, and to leave a tie.
ACCURACIES = [
    ("Of FedAvg, APPLE", dict(fedavg=4, apple=50, fedala=60), dict(apple=70), dict(apple=60)),
    ("APPLE and FedPer", dict(fedavg=40, apple=50, fedper=50), dict(fedper=30), dict(fedper=40)),
    ("FLAYER is more accurate than FedAvg", STEPS, dict(fedala=80), dict(fedala=65)),
    ("APPLE is the", dict(apple=60, ditto=50, fedamp=50), dict(ditto=70), dict(ditto=60)),
    ("FedAvg, FedPer, FedRep", STEPS, dict(fedrep=45), dict(fedrep=50)),
    ("One personal", {"s=1": 60, "s=2": 50, "s=3": 40}, {"s=2": 70}, {"s=2": 60}),
    ("FLAYER is more accurate than all", STEPS | dict(gpfl=9), dict(gpfl=80), dict(gpfl=65)),
    ("FLAYER is more accurate than the", STEPS | dict(fedcp=9), dict(fedcp=80), dict(fedcp=65)),
    ("Of the three", OFFICIAL_PARTS, {"masking only (official)": 70},
     {"masking only (official)": 60}),
]  # fmt: skip


@pytest.mark.parametrize("start, cells, against, tied", ACCURACIES, ids=[a[0] for a in ACCURACIES])
def test_claims_on_accuracy(start, cells, against, tied):
    assert verdict(start, seeded(cells)).verdict == "holds"
    assert verdict(start, seeded(cells | against)).verdict == "contradicted"
    assert verdict(start, seeded(cells | tied)).verdict == "tie"
    assert verdict(start, seeded(cells, seeds=1)).reason == "one seed"


@pytest.mark.parametrize("claim", flayer.PAPER.claims, ids=lambda c: c.says[:40])
def test_a_claim_without_its_rows_is_not_run(claim):
    rows = seeded({flayer.OFFICIAL: 60, flayer.AVERAGED: 40, "aggregation only": 50})
    try:
        assert not claim.judge(Evidence(rows, flayer.PAPER))
    except LookupError as missing:
        assert missing.args[0]


def test_to_be_the_best_of_all_all_have_to_be_there():
    start, printed = "FLAYER is more accurate than FedAvg", (*flayer.BASELINES, "flayer")
    whole = dict.fromkeys(flayer.BASELINES, 50) | dict(flayer=65)
    assert verdict(start, seeded(whole), printed=printed).verdict == "holds"
    assert verdict(start, seeded(STEPS), printed=printed).reason == "rows missing"
    behind = seeded(STEPS | dict(fedala=80))
    assert verdict(start, behind, printed=printed).verdict == "contradicted"


def test_rows_of_ours_and_columns_of_the_control_decide_nothing():
    own = seeded(STEPS | {flayer.OFFICIAL: 90}), seeded(STEPS | dict(fedavg=90), "lr 0.1")
    assert verdict("FLAYER is more accurate than FedAvg", *own).verdict == "holds"


def test_of_an_artefact_the_rows_of_the_fullest_profile_are_judged():
    full = seeded(STEPS).assign(artefact="table2", profile="medium")
    small = seeded(STEPS | dict(fedala=80)).assign(artefact="table2", profile="quick")
    small = small.assign(run="quick " + small.run)
    said = [report.claims("flayer", rows) for rows in (full, pd.concat([small, full]))]
    pd.testing.assert_frame_equal(*said)
    assert set(said[0].profile[said[0].artefact == "table2"]) == {"medium"}


def test_the_head_of_resnet_18_is_two_deep():
    cells = {"s=1": 60, "s=2": 70, "s=3": 50}
    assert verdict("One personal", seeded(cells, NET2)).verdict == "holds"
    assert verdict("One personal", seeded(cells)).verdict == "contradicted"


def test_texts_are_judged_on_what_the_paper_measured():
    column, start = "AG News, fastText", "FLAYER is more accurate than FedAvg"
    tested = seeded(dict(fedavg=80, flayer=70), column)
    trained = derived("train_acc_pct", dict(fedavg=80, flayer=98), column)
    found = verdict(start, tested, trained)
    assert found.verdict == "holds" and "training texts" in found.why
    against = derived("train_acc_pct", dict(fedavg=80, flayer=70), column)
    assert verdict(start, tested, against).verdict == "contradicted"
    with pytest.raises(LookupError, match="fastText"):
        verdict(start, tested)


@pytest.mark.parametrize(
    "start, first, other",
    [("Personal", "fedper", "fedavg"), ("FLAYER is at its", "flayer", "fedala")],
)
def test_fewer_rounds(start, first, other):
    ended = seeded(dict.fromkeys(("fedavg", "fedper", "fedala", "flayer"), 60), at=30)

    def after(own, others):
        rounds = {"fedavg": 25, other: others, first: own}
        return verdict(start, ended, derived("iterations", rounds))

    assert after(8, 20).verdict == "holds" and after(20, 8).verdict == "contradicted"
    assert after(20, 20).verdict == "tie"
    assert after(8, 31).verdict == "holds", "others may have not peaked"
    assert after(31, 31).reason == after(31, 8).reason == "censored"


def test_more_clients():
    def table(flayer, apple):
        few = seeded(dict(flayer=60, apple=60), "N=50")
        return few, seeded(dict(flayer=flayer, apple=apple), "N=100")

    falls, little = "The accuracy of all", "From 50 to 100"
    assert verdict(falls, *table(59, 50)).verdict == "holds"
    assert verdict(falls, *table(62, 50)).verdict == "contradicted"
    assert verdict(falls, *table(60, 50)).verdict == "tie"
    assert verdict(little, *table(59, 50)).verdict == "holds"
    assert verdict(little, *table(55, 50)).verdict == "contradicted"
    assert verdict(little, *table(59, 61.5)).verdict == "contradicted"
    assert verdict(little, *table(58, 50)).verdict == "tie"
    with pytest.raises(LookupError, match="N=100"):
        verdict(falls, table(59, 50)[0])


def test_around_other_methods():
    start, alone = "FLAYER improves", seeded(dict(ditto=70, fedper=70))
    for gain, found in ((2, "holds"), (-2, "contradicted"), (0, "tie")):
        gains = derived("improvement_points", dict(ditto=3, fedper=gain))
        assert verdict(start, alone, gains).verdict == found
    with pytest.raises(LookupError):
        verdict(start, alone)


def similarity(cells, column=COLUMN):
    """Rows of {row: (conv1 and fc initially, conv1 and fc in the best round)}."""
    names = [f"cka {stage} {layer}" for stage in ("initial", "best") for layer in ("conv1", "fc")]
    each = [derived(n, {r: v[i] for r, v in cells.items()}, column) for i, n in enumerate(names)]
    return pd.concat(each, ignore_index=True)


def test_similarity_of_layers():
    more, least = "Training makes", "Clients' models are least"
    for cells, trained, headed in (
        ((0.7, 0.5, 0.9, 0.6), "holds", "holds"),
        ((0.9, 0.5, 0.7, 0.8), "contradicted", "contradicted"),
        ((0.7, 0.5, 0.7, 0.7), "tie", "tie"),
    ):
        rows = similarity({"fedavg": (0.6, 0.4, 0.8, 0.5), "fedrep": cells})
        assert verdict(more, rows).verdict == trained
        assert verdict(least, rows).verdict == headed


def test_apple_is_judged_on_its_cores():
    mixed = similarity({"apple": (1.0, 1.0, 0.9, 0.5)})
    both = mixed, similarity({flayer.CORES: (0.7, 0.6, 0.8, 0.5)})
    assert verdict("Training makes", mixed).verdict == "contradicted"
    assert verdict("Training makes", *both).verdict == "holds"


def test_the_simpler_network_is_more_alike():
    simple = similarity({"fedavg": (0.7, 0.5, 0.9, 0.6)})
    for best, found in ((0.7, "holds"), (0.95, "contradicted"), (0.9, "tie")):
        deep = similarity({"fedavg": (0.7, 0.5, best, 0.6)}, NET2)
        assert verdict("The layers of the CNN", simple, deep).verdict == found
    with pytest.raises(LookupError):
        verdict("The layers of the CNN", simple)


def test_flayer_is_moderately_alike():
    others = {"fedavg": (0.7, 0.5, 0.9, 0.8), "fedrep": (0.7, 0.5, 0.7, 0.4)}
    for body, head, found in (
        (0.8, 0.6, "holds"),
        (0.95, 0.6, "contradicted"),
        (0.8, 0.3, "contradicted"),
        (0.9, 0.6, "tie"),
    ):
        rows = similarity(others | {"flayer": (0.7, 0.5, body, head)})
        assert verdict("FLAYER's layers", rows).verdict == found


def test_parts_as_printed_decide_nothing():
    # Without the head's epoch, two of them are served as one global model.
    with pytest.raises(LookupError, match="official"):
        verdict("Of the three", seeded(dict.fromkeys(flayer.PARTS, 40)))
