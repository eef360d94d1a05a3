"""pFedLA's paper: settings as printed, labels as published, numbers from recorded weights.

Its claims hold, are contradicted, and stay open.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.store import ROW_COLUMNS
from pfl_papers import places
from pfl_papers.compare import report
from pfl_papers.notebook import study
from pfl_papers.papers import base as papers
from pfl_papers.papers import pfedla
from pfl_papers.papers.base import TUNING, Probed, Scope
from pfl_papers.papers.pfedla import PAPER
from tests.made import judged

SAID = papers.reported("pfedla")
MEDIUM = [name for name, about in PAPER.artefacts.items() if about.medium]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "results")
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))


def test_at_profile_paper_everything_is_as_printed(swept):
    every = [c for c in swept("pfedla", "paper") if c.tags["artefact"] != TUNING]
    planned = [c for c in every if c.tags["row"] != "centralized"]
    assert {c.seed for c in planned} == {0, 1, 2}
    assert set(PAPER.artefacts) == {c.tags["artefact"] for c in planned}
    for c in planned:
        cifar, hn = c.dataset.startswith("cifar"), c.method == "pfedhn"
        visits = 10 if hn else 1  # one client a round
        assert (c.batch, c.model, c.model_args, c.buffers in ("local", "average")) == (
            32,
            "lenet",
            {"bn": cifar},
            True,
        )
        assert hn or c.lr == (0.01 if cifar else 0.005)
        if c.clients == 100:
            assert (c.rounds, c.epochs, c.participation) == (2500 * visits, 20, 0.01 if hn else 0.1)
        elif c.tags["artefact"] == "fig1":
            assert (c.rounds, c.epochs, c.clients, c.partition) == (100, 10, 6, "pfedla_ring")
        else:
            assert (c.rounds, c.epochs, c.participation) == (600 * visits, 10, 0.1 if hn else 1.0)
    main = [c for c in planned if c.tags["artefact"] in ("table1", "table2")]
    assert {c.tags["column"] for c in main} == set(SAID[SAID.table == "table1"].column)
    assert {c.method_args.get("retain_k", 1) for c in main if c.method == "heurpfedla"} == {1}
    once = {repr(replace(c, tags={})) for c in planned}
    assert (len(planned), len(once)) == (801, 780), (
        "cells, and runs: Figure 7 and two rows of Table 3 are Table 1's; 42 at rate 0.5"
    )


def test_medium_is_the_papers_own_setting_with_fewer_rounds(swept):
    every = [c for c in swept("pfedla", "medium") if c.tags["artefact"] != TUNING]
    cells = [c for c in every if c.tags["row"] != "centralized"]
    n = {"fig5": 8, "fig6": 8}
    assert {c.tags["artefact"] for c in cells} == set(MEDIUM)
    assert {c.seed for c in cells} == set(range(7))  # not 7, which tunes
    columns = {
        a: list(dict.fromkeys(c.tags["column"] for c in cells if c.tags["artefact"] == a))
        for a in MEDIUM
    }
    assert sorted(columns["table1"]) == ["CIFAR-10, N=10", "EMNIST, N=10", "FMNIST, N=10"]
    assert columns["table2"] == ["EMNIST, N=10"]
    assert (columns["fig5"], columns["fig7"], sorted(columns["fig6"])) == (
        ["CIFAR-10", "CIFAR-10, rate 0.5"],
        ["EMNIST", "CIFAR-10", "EMNIST, rate 0.5", "CIFAR-10, rate 0.5"],
        ["CIFAR-10", "CIFAR-10, rate 0.5", "FMNIST", "FMNIST, rate 0.5"],
    )
    kept = [c for c in cells if c.tags["artefact"] == "table3"]
    assert {(c.tags["column"], c.tags["row"], c.seed) for c in kept} == {
        (column, f"k={k}", seed)
        for column, most in (("EMNIST", 2), ("CIFAR-10", 3))
        for k in range(most + 1)
        for seed in range(2)
    }
    assert {c.id_for("") for c in kept if c.tags["row"] in ("k=0", "k=1")} <= {
        c.id_for("") for c in cells if c.tags["artefact"] == "table1"
    }
    for c in cells:
        visits, cifar = (10, False) if c.method == "pfedhn" else (1, c.dataset == "cifar10")
        assert (
            c.clients == n.get(c.tags["artefact"], 10)
            and c.rounds == 60 * visits
            and c.rounds // c.eval_every >= 12
        )
        assert (c.epochs, c.batch, c.max_samples, c.model_args) == (
            10,
            32,
            0,
            {"bn": c.dataset == "cifar10"},
        )
        assert visits == 10 or c.lr == (0.01 if cifar else 0.005)
        assert c.partition_args == {"split": "63/7/30"}, (
            "a tenth of train is validation, the test part is the paper's"
        )
        assert visits == 1 or c.eval_after
    of = {
        a: {
            repr(replace(c, tags={}))
            for c in cells
            if c.tags["artefact"] == a and "rate" not in c.tags["column"]
        }
        for a in ("fig7", "table1")
    }
    assert of["fig7"] <= of["table1"]
    said = set(SAID[(SAID.table == "table1") & (SAID.column == "CIFAR-10, N=10")].row)
    ran = {
        c.tags["row"]
        for c in cells
        if c.tags["column"] == "CIFAR-10, N=10" and c.tags["artefact"] == "table1"
    }
    assert said <= ran


def test_quick_is_within_its_budget_and_shares_runs(swept):
    planned = swept("pfedla", "quick")
    ids = {a: {c.id for c in planned if c.tags["artefact"] == a} for a in PAPER.artefacts}
    assert len(set.union(*ids.values())) <= 40
    assert ids["fig7"] < ids["table1"] and len(ids["table3"] & ids["table1"]) == 2


@pytest.mark.parametrize("table", PAPER.tables)
def test_published_labels_are_those_of_the_notebook(table):
    said = SAID[SAID.table == table]
    for name, dataset in pfedla.DATA.items():
        for n in (10, 100):
            column = name if table == "table3" else f"{name}, N={n}"
            here = set(said[said.column == column].row)
            assert here <= set(pfedla.rows(table, "paper", dataset, n))
            assert table == "table3" or here == set(pfedla.rows(table, "paper", dataset, n))
    assert set(said.column) <= (set(pfedla.RETAINED) if table == "table3" else set(pfedla.COLUMNS))


def of_ours(profile, dataset):
    """Our rows beside Table 1's first column."""
    base = Experiment(**pfedla.setting("table1", profile, dataset, 10))
    return pfedla.made(profile, base, pfedla.OURS)


def test_extra_rows_are_named_apart_from_published_ones():
    more = of_ours("paper", "cifar10")
    averaged = {n.removesuffix(" (BatchNorm averaged)") for n in more if n.endswith("averaged)")}
    assert averaged == set(pfedla.rows("table1", "paper", "cifar10")) - set(pfedla.OWN_STATISTICS)
    assert len(more) == 16 and not set(more) & set(SAID.row)
    assert more["pfedla (literal sign)"]["method_args"]["hn_sign"] == "literal"
    assert more["perfedavg (one step)"]["method_args"] == {"adapt_steps": 1}
    both = {"adapt_steps": 1, "beta": 0.001}
    assert more["perfedavg (one step, beta 0.001)"]["method_args"] == both
    assert set(of_ours("paper", "digits")) == set(list(more)[:8])


@pytest.mark.parametrize("table", ["table1", "table2"])
def test_plain_sgd_of_pfedhn_is_the_optimiser_of_all_others(swept, table):
    planned = [c for c in swept("pfedla", "medium") if c.tags["artefact"] == table]
    for column in {c.tags["column"] for c in planned}:
        by_row = {c.tags["row"]: c.plain() for c in planned if c.tags["column"] == column}
        plain, own, others = by_row[pfedla.PLAIN], by_row["pfedhn"], by_row["fedavg"]
        local = {"lr", "momentum", "weight_decay", "clip", "plan", "optimizer", "epochs", "batch"}
        assert {k: plain[k] for k in local} == {k: others[k] for k in local}
        assert {k for k in plain if plain[k] != own[k]} - local == set()


@pytest.mark.parametrize("profile", ["medium", "paper"])
def test_one_client_holds_as_many_images_as_ten_have_together(swept, profile):
    cells = [c for c in swept("pfedla", profile) if c.tags["column"] == "CIFAR-10, N=10"]
    one, *_ = [c for c in cells if c.tags["row"] == "centralized"]
    fedavg, *_ = [c for c in cells if c.tags["row"] == "fedavg"]
    args = fedavg.partition_args | {"k": 10, "images": 6000}
    alike = fedavg.but(clients=1, partition_args=args)
    assert one.plain() == alike.plain()


# ---------------------------------------------------------------- numbers


def table(cells, numbers=()):
    """Rows of made accuracies {(row, column): %} and derived numbers (metric, row, column, v)."""
    blank = dict.fromkeys(ROW_COLUMNS, "") | dict(
        run="r", split="test", metric="acc_pct", seed=0, rounds=1
    )
    out = []
    for (row, column), v in cells.items():
        for when in ("before", "after"):
            out.append(
                blank
                | {"row": row, "column": column, "value": v, "when": when, "average": "client"}
            )
    for metric, row, column, v in numbers:
        out.append(
            blank
            | {
                "row": row,
                "column": column,
                "value": v,
                "metric": metric,
                "split": "",
                "average": "derived",
            }
        )
    return pd.DataFrame(out, columns=ROW_COLUMNS)


def made(weights, rounds, column="EMNIST", row="pfedla"):
    """What a probe would have recorded: made weights (rounds, clients, clients) of each layer."""
    return [Probed("r", row, column, 0, np.array(rounds), weights)]


def test_all_megabytes_that_table_3_prints():
    got = (
        pd.DataFrame(pfedla.megabytes(table({("k=0", "EMNIST"): 90.0})))
        .set_index(["column", "row"])
        .value
    )
    said = (
        SAID[(SAID.table == "table3") & (SAID.metric == "mbytes")]
        .set_index(["column", "row"])
        .value
    )
    assert len(said) == 7 and set(got.index) == set(said.index)
    assert ((got - said).abs() < 0.03).all()
    assert pfedla.megabytes(table({})) == []


def test_megabytes_of_the_papers_networks_do_not_say_that_its_data_were_used():
    rows = table({("k=0", "EMNIST"): 90.0}).assign(dataset="digits")
    both = pd.concat([rows, pd.DataFrame(pfedla.megabytes(rows))])
    assert (
        set(both.dataset) == {"digits", "emnist-digits", "cifar10"}
        and report.data_sets(both) == "digits"
    )


def test_weights_of_the_target_by_kind_and_period():
    rounds = list(range(21))
    w = np.full((21, 8, 8), 1 / 8)
    w[2, 0] = [0.3, 0.2, 0.1, 0.08, 0.08, 0.08, 0.08, 0.08]
    w[18:, 0] = [0.5, 0.2, 0.1, 0.04, 0.04, 0.04, 0.04, 0.04]
    frame = pfedla.evolution(made({"conv1": np.full_like(w, 1 / 8), "fc": w}, rounds))
    fc = frame[frame.panel == "EMNIST, classifier"].set_index(["layer", "row"]).value
    assert fc["prior", "target itself"] == pytest.approx((1 / 8 + 0.3) / 2), "rounds 1 and 2, not 0"
    assert fc["last", "target itself"] == pytest.approx(0.5) and fc[
        "last", "random labels"
    ] == pytest.approx(0.04)
    assert fc["middle"].tolist() == pytest.approx([1 / 8] * 4)
    means = {(d["metric"], d["row"]): d["value"] for d in pfedla.periods(frame)}
    assert (
        means["weight, last", "same 4 labels"] == pytest.approx((0.2 + 1 / 8) / 2)
        and len(means) == 12
    )
    short = pfedla.evolution(made({"fc": w[:3]}, [0, 1, 2]))
    assert set(short.layer) == set(pfedla.PERIODS), (
        "where no round lies in a period, the nearest one stands for it"
    )


def test_weights_on_the_ring(monkeypatch):
    held = np.eye(8, 10) + np.eye(8, 10, 1)
    monkeypatch.setattr(pfedla.committed, "label_counts", lambda e: held)
    distance = np.abs(np.subtract.outer(range(8), range(8)))
    good = np.exp(-1.0 * distance)[None]
    rows = table({("pfedla", "EMNIST"): 90.0}).assign(profile="quick", dataset="digits")
    found = made({"conv1": np.flip(good, 2), "fc": good}, [9])
    maps = pfedla.ring_maps(found)
    assert list(maps) == ["EMNIST, fc", "EMNIST, mean of all layers"] and maps[
        "EMNIST, fc"
    ].shape == (8, 8)
    got = (
        pd.DataFrame(pfedla.ring_numbers(rows, lambda probe: found))
        .set_index(["row", "metric"])
        .value
    )
    assert (
        got["fc", "largest"] == 100
        and got["conv1", "largest"] == 0
        and got["fc", "rho"] > 0.5 > got["conv1", "rho"]
    )
    assert got["fc", "lead"] == pytest.approx(1 - np.exp(-1)) and got["conv1", "lead"] < 0
    assert (
        list(pfedla.ring_maps(made({"fc1": good, "fc": good}, [9], "CIFAR-10")))[0]
        == "CIFAR-10, fc1"
    )
    second = found[0]._replace(seed=1, values={"fc": 0 * good})
    assert pfedla.ring_maps([*found, second])["EMNIST, fc"].any(), "one seed is shown, the first"


def test_weights_by_layer_and_what_is_retained():
    w = np.full((2, 4, 4), 0.1)
    w[1] = 0.1 + 0.6 * np.eye(4)
    found = made({"conv1": w[:1].repeat(2, 0), "fc": w}, [0, 5])
    got = {(d["row"], d["metric"]): d["value"] for d in pfedla.self_weights(pfedla.by_layer(found))}
    assert got["fc", "target, on itself"] == pytest.approx(0.7) == got["fc", "all, on themselves"]
    assert (
        got["fc", "target, on each other"]
        == pytest.approx(0.1)
        == got["conv1", "target, on itself"]
    )
    w[1, 0] = [1, 0, 0, 0]
    totals = table({("pfedla", "EMNIST"): 1.0}).iloc[:1].assign(average="total")
    totals = pd.concat(
        [totals.assign(metric=m, value=2e6) for m in ("download_bytes", "upload_bytes")]
    )
    kept = {d["metric"]: d["value"] for d in pfedla.retained(totals, found)}
    assert kept == {"keep conv1 (%)": 0, "keep fc (%)": 25, "megabytes moved": 4}


def test_one_weight_for_the_whole_model_is_repeated_for_its_layers():
    each = made({"a": np.eye(3)[None], "b": np.eye(3)[None]}, [1], row="layer")
    maps, names = pfedla.layer_weights(each + made({"model": np.eye(3)[None]}, [1], row="model"), 1)
    assert {r: m.tolist() for r, m in maps.items()} == dict.fromkeys(
        ("layer", "model"), [[0, 1, 0]] * 2
    )
    assert names == ["a", "b"]
    told = pfedla.toy_weights(each + made({"model": np.eye(3)[None]}, [1], row="model"), 1)
    assert [(d["row"], d["metric"], d["value"]) for d in told] == [
        ("layer", "weight of a", 1),
        ("layer", "weight of b", 1),
    ], "one weight for the whole model is no layer's"


def test_accuracy_of_one_client(monkeypatch):
    correct = np.array([[1, 2], [2, 2], [3, 4], [3, 2]])
    arrays = {
        "before/test/correct": correct,
        "n/test": np.array([4, 4]),
        "rounds": np.array([0, 4, 8, 9]),
    }
    monkeypatch.setattr(pfedla.committed, "arrays_of", lambda run: arrays)
    rows = table({("layer-wise", "CIFAR-10"): 1.0})
    frame = pfedla.client(rows.assign(rounds=9))
    assert frame[frame.panel == "CIFAR-10: Client 1"].value.tolist() == [25, 50, 75, 75]
    past = pfedla.client(rows.assign(rounds=4))
    assert set(past["rounds"]) == {0, 4}, "no further than the rows do"
    assert {d["metric"]: d["value"] for d in pfedla.late(frame)} == {
        "client 1": 75,
        "mean of all clients": 75,
    }


def test_numbers_derived_from_a_run_are_not_read_as_runs_of_their_own(monkeypatch):
    weights = {"probe/weights": np.array([1]), "fc": np.eye(3)[None]}
    monkeypatch.setattr(study.committed, "arrays_of", lambda run: weights)
    monkeypatch.setattr(
        study.probes, "read", lambda arrays, probe: (arrays[f"probe/{probe}"], {"fc": arrays["fc"]})
    )
    rows = table({("pfedla", "EMNIST"): 90.0}, [("largest", "fc", "EMNIST", 100.0)])
    assert [
        p.row for p in study.Study("pfedla", profile="smoke", device="cpu").probed(rows, "weights")
    ] == ["pfedla"]


# ---------------------------------------------------------------- the rate of the hypernetworks


@pytest.mark.parametrize("profile", ["quick", "medium", "paper"])
def test_the_third_party_rate_stands_with_the_outputs_that_it_belongs_to(profile):
    extra = of_ours(profile, "cifar10")
    assert extra["pfedla (relu_norm, rate 0.005)"]["method_args"] == {
        "lr": 0.005,
        "hn_out": "relu_norm",
    }
    assert pfedla._RATE.value(profile) > 0.1, "with softmax and zero heads 0.005 is FedAvg"
    assert pfedla._RATE.value("paper") == pfedla._RATE.value("medium")


def test_rates_are_tried_on_the_papers_network_and_another_seed(swept):
    assert not [c for c in swept("pfedla", "quick") if c.tags["artefact"] == TUNING]
    for profile, rounds in (("medium", 60), ("paper", 600)):
        tried = {
            repr(c): c for c in swept("pfedla", profile) if c.tags["artefact"] == TUNING
        }.values()
        args = [c.method_args for c in tried]
        assert args[:-1] == [{"lr": r} for r in pfedla.RATES] and args[-1] == {
            "lr": 0.005,
            "hn_out": "relu_norm",
        }
        assert max(pfedla.RATES) / min(pfedla.RATES) >= 1000 and pfedla.RATE in pfedla.RATES
        where = {
            (c.dataset, c.model, c.model_args["bn"], c.clients, c.rounds, c.seed, c.max_samples)
            for c in tried
        }
        assert where == {("cifar10", "lenet", True, 10, rounds, pfedla.TUNING_SEED, 0)}
        assert all(
            c.partition_args["split"] == "63/7/30" and c.record == ("weights",) for c in tried
        )


def tried(best):
    made = []
    for row, v in best.items():
        for split, score in (("val", v), ("test", 100 - v)):
            line = dict.fromkeys(ROW_COLUMNS, "") | dict(
                run=row, artefact="tuning", row=row, column="CIFAR-10, N=10"
            )
            line |= dict(when="before", average="client", metric="acc_pct", seed=7, split=split)
            made += [line | dict(rounds=n, value=score + (n - 4) ** 2) for n in (0, 2, 4)]
    return pd.DataFrame(made, columns=ROW_COLUMNS)


def test_the_rate_is_chosen_by_validation_accuracy_alone():
    rows = tried({"rate 0.5": 60.0, "rate 5": 50.0, "relu_norm, rate 0.005": 70.0})
    w = np.stack(
        [
            np.full((2, 2), 0.5),
            np.array([[0.6, 0.4], [0.2, 0.8]]),
            np.array([[0.9, 0.1], [0.3, 0.7]]),
        ]
    )
    weights = {"conv1": w, "fc": np.full_like(w, 0.5)}
    found = [
        Probed(r, r, "CIFAR-10, N=10", 7, np.array([0, 2, 4]), weights)
        for r in dict.fromkeys(rows.run)
    ]
    course = pfedla.rate_course(found)
    assert list(dict.fromkeys(course.panel)) == [pfedla.ALL_LAYERS, "conv1", "fc"]
    assert course[
        (course.panel == "conv1") & (course.row == "rate 5")
    ].value.tolist() == pytest.approx([0.5, 0.7, 0.8])
    table = pfedla.rate_table(rows, course)
    assert table["validation accuracy"].tolist() == [60, 50, 70], "of the last round"
    assert table.chosen.tolist() == ["best", "", ""], "among the rates of our own outputs"
    assert table["weight on itself, middle"].tolist() == pytest.approx([0.6] * 3)
    assert table["at the end"].tolist() == pytest.approx([0.65] * 3)


def test_the_chosen_rate_is_that_of_all_rows_but_those_that_name_theirs():
    asked = []

    def finished(cells):
        asked.extend(cells)
        return tried({"rate 0.5": 60.0, "rate 5": 50.0, "relu_norm, rate 0.005": 70.0})

    swept = pfedla.sweeps(Scope("medium", finished=finished))
    assert {e.tags["artefact"] for e in asked} == {TUNING} and len(asked) == len(pfedla.RATES) + 1
    first = [s for s in swept if s.artefact == "table1"]
    got = {
        r: v["method_args"]["lr"]
        for s in first
        for r, v in s.rows.items()
        if "pfedla" in v["method"]
    }
    named = {r: v for r, v in got.items() if "rate" in r}
    others = {v for r, v in got.items() if r not in named}
    assert others == {0.5} and len(got) > len(named) + 3, (
        "test accuracy and other outputs have no part in it"
    )
    assert named["pfedla (rate 0.005)"] == 0.005 == named["pfedla (relu_norm, rate 0.005)"]
    assert {
        e.method_args["lr"] for s in swept if s.artefact == "fig5" for e in s.experiments()
    } == {0.5}


def test_until_all_rates_are_finished_the_default_stands():
    for profile, rate in (
        ("medium", pfedla.RATE),
        ("paper", pfedla.RATE),
        ("quick", pfedla._RATE.quick),
    ):
        swept = [s for s in pfedla.sweeps(Scope(profile)) if s.artefact == "fig5"]
        cells = [e for s in swept for e in s.experiments()]
        usual = [e for e in cells if "rate" not in e.tags["column"]]
        assert {e.method_args["lr"] for e in usual} == {rate}
        assert {e.method_args["lr"] for e in cells if e not in usual} <= {0.5}
    asked = []
    pfedla.sweeps(Scope("quick", finished=asked.append))
    assert not asked and pfedla._RATE.quick != pfedla.RATE


def test_tuning_serves_every_artefact_with_hypernetworks():
    scope = Scope("paper")
    for artefact in PAPER.artefacts:
        planned = PAPER.planned(scope, artefact)
        trained = {e.method for s in planned if s.artefact == artefact for e in s.experiments()}
        assert (planned[0].artefact == TUNING) == bool({"pfedla", "heurpfedla"} & trained), artefact


def test_the_rows_of_ours_are_a_part_of_table_1_with_fewer_seeds_on_real_data():
    for datasets, seeds in (((), ((0, 1), (0, 1))), (("cifar10",), ((0, 1), (0,)))):
        first, ours = (
            PAPER.planned(Scope("quick", datasets), "table1", part) for part in ("", "ours")
        )
        assert ({s.seeds for s in first}, {s.seeds for s in ours}) == ({seeds[0]}, {seeds[1]})
        assert [list(s.columns) for s in first] == [list(s.columns) for s in ours]
        assert all(set(s.rows) == set(of_ours("quick", s.base.dataset)) for s in ours)


def test_no_rates_where_none_were_tried():
    assert pfedla.rate_table(tried({}), pfedla.rate_course([])).empty


# ---------------------------------------------------------------- claims

C = "EMNIST, N=10"
SURE, UNSURE = 0.002, 2.0  # noise of seeds, as a share of the value


def seeds(rows, noise=SURE, n=4):
    """The same rows for n seeds, each number as often above as below its own by the noise."""
    random = np.random.default_rng(1)
    each = np.array([random.permutation(np.resize([1, -1], n)) for _ in range(len(rows))])
    made = [
        rows.assign(seed=i, run=f"r{i}", value=rows.value * (1 + noise * each[:, i]))
        for i in range(n)
    ]
    return pd.concat(made, ignore_index=True)


def verdict(artefact, word, rows, printed=()):
    """The verdict of the one claim on an artefact that has a word in it."""
    try:
        found = judged(PAPER, rows, lambda c: c.needs == artefact and word in c.says, printed)
        return found.verdict
    except LookupError:
        return "not run"


def accuracies(*columns, name="EMNIST, N=10"):
    """Columns {row: accuracy}, the first of a name that is printed."""
    names = [name, *list(pfedla.COLUMNS)[1:]]
    return table({(r, c): v for c, of in zip(names, columns, strict=False) for r, v in of.items()})


def main(*own):
    """A column with two baselines and one of ours for each accuracy of pFedLA."""
    others = {"local": 80.0, "fedavg": 85.0, "pfedla (literal sign)": 99.0}
    return accuracies(*[others | {"pfedla": v} for v in own])


def retaining(column, *acc, moved=()):
    numbers = [("megabytes moved", f"k={k}", column, v) for k, v in enumerate(moved)]
    return table({(f"k={k}", column): v for k, v in enumerate(acc)}, numbers)


def derived(column, numbers):
    """Rows of derived numbers {metric: {row: value}}."""
    return table({}, [(m, row, column, v) for m, of in numbers.items() for row, v in of.items()])


def toy(layer, model):
    return derived("CIFAR-10", {"client 1": {"layer-wise": layer, "model-wise": model}})


def toy_layers(**weights):
    return derived("CIFAR-10", {f"weight of {n}": {"layer-wise": v} for n, v in weights.items()})


def shares(first, last):
    """Weights of the target, the alike, the similar and the random clients in two periods."""
    kinds = [*pfedla.KINDS.values(), pfedla.RANDOM]
    named = {f"weight, {p}": w for p, w in {"prior": first, "middle": last, "last": last}.items()}
    return derived("EMNIST", {m: dict(zip(kinds, w, strict=True)) for m, w in named.items()})


def on_ring(**numbers):
    return derived("EMNIST", {metric: {pfedla.ALL_LAYERS: v} for metric, v in numbers.items()})


def target(column, **weights):
    return derived(column, {"target, on itself": weights})


START = (0.125, 0.125, 0.125, 0.125)
KEPT = retaining("EMNIST", 90.0, 94.0, 88.5, 50.0, moved=(9.0, 8.0, 5.0))
# artefact, a word of the claim, rows of which it holds, rows that contradict it
JUDGED = [
    ("fig1", "more accurate", toy(90.0, 80.0), toy(80.0, 90.0)),
    (
        "fig1",
        "Conv1",
        toy_layers(conv2=0.3, fc1=0.6, fc2=0.5),
        toy_layers(conv2=0.4, fc1=0.6, fc2=0.2),
    ),
    ("table1", "superior", main(90.0, 89.0, 70.0), main(90.0, 70.0)),
    ("table2", "superior", main(90.0), main(84.0)),
    (
        "table1",
        "outperforms",
        accuracies({"local": 80.0, "pfedhn": 85.0, "heurpfedla": 90.0}),
        accuracies({"local": 80.0, "pfedhn": 95.0, "heurpfedla": 90.0}),
    ),
    (  # Table 1 has FedAvg and pFedMe ahead there
        "table1",
        "outperforms",
        accuracies({"local": 80.0, "pfedme": 95.0, "heurpfedla": 90.0}, name="FMNIST, N=100"),
        accuracies({"local": 95.0, "pfedme": 80.0, "heurpfedla": 90.0}, name="FMNIST, N=100"),
    ),
    (
        "table2",
        "negligible",
        accuracies({"local": 80.0, "pfedla": 90.0, "heurpfedla": 89.0}),
        accuracies({"local": 80.0, "pfedla": 90.0, "heurpfedla": 86.0}),
    ),
    (
        "table1",
        "100 clients",
        accuracies({"pfedla": 80.0}, {"pfedla": 90.0}),
        accuracies({"pfedla": 90.0}, {"pfedla": 80.0}),
    ),
    (
        "fig5",
        "decrease",
        shares(START, (0.4, 0.2, 0.1, 0.06)),
        shares(START, (0.1, 0.1, 0.1, 0.14)),
    ),
    (
        "fig5",
        "more similar",
        shares(START, (0.4, 0.2, 0.1, 0.06)),
        shares(START, (0.4, 0.1, 0.2, 0.06)),
    ),
    ("fig6", "overlapping", on_ring(rho=0.5), on_ring(rho=-0.5)),
    ("fig6", "self-weight", on_ring(lead=0.2), on_ring(lead=-0.2)),
    ("table3", "communication", KEPT, retaining("EMNIST", 90.0, moved=(9.0, 8.0, 8.5))),
    ("table3", "On EMNIST", KEPT, retaining("EMNIST", 94.0, 90.0)),
    ("table3", "On CIFAR-10", retaining("CIFAR-10", 60.0, 55.0), retaining("CIFAR-10", 55.0, 60.0)),
    ("table3", "different numbers", KEPT, retaining("EMNIST", 90.0, 94.0, 86.0)),
    ("fig7", "On EMNIST", target("EMNIST", fc1=0.5, fc=0.6), target("EMNIST", fc1=0.7, fc=0.6)),
    (
        "fig7",
        "On CIFAR-10",
        target("CIFAR-10", fc1=0.7, fc=0.6, conv1=0.1),
        target("CIFAR-10", fc1=0.5, fc=0.6, conv1=0.1),
    ),
]


@pytest.mark.parametrize("artefact, word, good, bad", JUDGED)
def test_claims_hold_are_contradicted_and_stay_open(artefact, word, good, bad):
    assert verdict(artefact, word, seeds(good)) == "holds"
    assert verdict(artefact, word, seeds(bad)) == "contradicted"
    assert verdict(artefact, word, seeds(good, UNSURE)) in ("open", "tie")
    assert verdict(artefact, word, seeds(good, n=1)) == "open", "one seed has no interval"
    assert verdict(artefact, word, table({("nobody", "nowhere"): 50.0})) == "not run"


@pytest.mark.parametrize("word, own", [("superior", "pfedla"), ("outperforms", "heurpfedla")])
def test_to_be_ahead_of_all_those_have_to_be_there_that_are_printed(word, own):
    printed = list(dict.fromkeys(SAID[SAID.table == "table1"].row))
    whole = dict.fromkeys(pfedla.BASELINES, 80.0) | {own: 90.0}
    without = {row: value for row, value in whole.items() if row != "fedbn"}
    for column, found in (("FMNIST, N=10", "holds"), ("CIFAR-10, N=10", "open")):
        rows = seeds(accuracies(without, name=column))
        assert verdict("table1", word, rows, printed) == found, "FedBN needs BatchNorm"
        assert verdict("table1", word, seeds(accuracies(whole, name=column)), printed) == "holds"


def test_a_column_without_the_papers_row_leaves_claims_to_the_others():
    begun = accuracies({"local": 80.0}, name="CIFAR-10, N=10")
    assert verdict("table1", "superior", seeds(pd.concat([main(90.0), begun]))) == "holds"


def test_every_judge_is_tried_here():
    tried = [c for a, word, *_ in JUDGED for c in PAPER.claims if c.needs == a and word in c.says]
    others = {c.key.replace("table2", "table1") for c in PAPER.claims} - {c.key for c in tried}
    assert len(tried) == len(JUDGED) and others == {"table1_negligible"}, "tried on table 2"
    assert {c.needs for c in PAPER.claims} == set(PAPER.artefacts)


def test_rows_of_ours_and_of_others_data_decide_nothing():
    rows = seeds(main(90.0))
    assert (rows.row == "pfedla (literal sign)").any() and verdict(
        "table1", "super", rows
    ) == "holds"
    clients = seeds(accuracies({"pfedla": 80.0}))
    assert verdict("table1", "100 clients", clients) == "not run", "ten clients alone"
    whole = seeds(pd.concat([KEPT, table({}, [("mbytes", "k=0", "CIFAR-10", 5.0)])]))
    assert verdict("table3", "communication", whole) == "holds", "a column without runs"


def test_claims_name_their_place_in_the_paper():
    assert all(c.where.startswith("Sec. ") and "Sec." not in c.says for c in PAPER.claims)
    limit = "at most 2.2 points, its largest loss in Table 1: ours"
    rank = "in rank, in the mean of all layers: ours"
    assert {c.limit for c in PAPER.claims} == {"", limit, rank}
    printed = SAID[SAID.table == "table1"].pivot_table(
        index="row", columns="column", values="value"
    )
    assert (printed.loc["pfedla"] - printed.loc["heurpfedla"]).max() == pytest.approx(2.19)
    assert papers.paper("pfedla") is PAPER and PAPER.own == "pfedla" and PAPER.runs == 0
