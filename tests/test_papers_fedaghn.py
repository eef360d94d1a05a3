"""FedAGHN's paper module: its settings and labels, and claims that can be decided either way."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from pfl_core import Experiment
from pfl_core.experiments.store import ROW_COLUMNS
from pfl_core.papers import base as papers
from pfl_core.papers import fedaghn, plan, report
from pfl_core.papers.base import Probed, Scope
from pfl_core.papers.fedaghn import PAPER

PUBLISHED = report.reported("fedaghn")
MEDIUM = {a: about.medium for a, about in PAPER.artefacts.items() if about.medium}  # seeds


def labels(artefact, metric="acc_pct"):
    some = PUBLISHED[(PUBLISHED.table == artefact) & (PUBLISHED.metric == metric)]
    return set(some.row), set(some.column)


@pytest.fixture(scope="module")
def paper_cells(swept):
    return [e for e in swept("fedaghn", "paper") if e.tags["artefact"] != "tuning"]


def test_the_papers_own_numbers(paper_cells):
    assert {e.seed for e in paper_cells} == {0, 1, 2} and {e.clients for e in paper_cells} == {20}
    assert {(e.epochs, e.batch, e.momentum) for e in paper_cells if e.tags["row"] != "pfedhn"} == {
        (5, 64, 0.0)
    }
    rounds = {(e.dataset, e.model): e.rounds for e in paper_cells if e.tags["row"] != "pfedhn"}
    assert rounds == {
        ("cifar10", "cnn_bn"): 200, ("cifar100", "cnn_bn"): 200, ("cifar100", "resnet18"): 80, ("tiny_imagenet", "resnet18"): 40,
    }  # fmt: skip
    hn = [e for e in paper_cells if e.tags["row"] == "pfedhn" and e.dataset == "cifar10"]
    assert all(e.rounds * e.participation == 200 for e in hn)  # as many visits of clients


def test_cells_of_the_main_table(paper_cells):
    main = [
        e
        for e in paper_cells
        if e.tags["artefact"] == "table1" and "partition a seed" not in e.tags["column"]
    ]
    rows, columns = labels("table1")
    assert {e.tags["row"] for e in main} | {f"{r}_ft" for r in PAPER.when} == rows
    assert {e.tags["column"] for e in main} == columns and len(main) == 8 * 14 * 3
    assert {e.partition for e in main if "Pathological" in e.tags["column"]} == {"shards"}
    assert {e.partition_seed for e in main if e.dataset == "cifar10"} == {66666}


def test_columns_of_the_other_tables(paper_cells):
    for artefact in ("table2", "table3", "apptable1"):
        cells = [e for e in paper_cells if e.tags["artefact"] == artefact]
        assert {e.tags["column"] for e in cells} == labels(artefact)[1]
    alphas = {e.partition_args["alpha"] for e in paper_cells if e.tags["artefact"] == "table2"}
    assert alphas == {0.1, 0.2, 0.5}


def test_the_case_study_is_computed_once(paper_cells):
    case = [e for e in paper_cells if e.tags["artefact"] in fedaghn.CASE and e.model == "cnn_bn"]
    assert {e.partition for e in case} == {"groups"}
    assert len({repr(replace(e, tags={})) for e in case}) == 2 * len(fedaghn.CASE["table3"]) * 3
    assert all(e.record == ("weights",) for e in case if e.method != "local")


def test_medium_is_the_papers_own_setting_with_fewer_rounds(swept):
    every = swept("fedaghn", "medium")
    cells = [e for e in every if e.tags["artefact"] != "tuning"]
    assert {e.tags["artefact"] for e in cells} == set(MEDIUM)
    assert all(
        {e.seed for e in cells if e.tags["artefact"] == a} == set(range(n))
        for a, n in MEDIUM.items()
    )
    assert {(e.model, e.clients, e.epochs, e.batch, e.max_samples) for e in cells} == {
        ("cnn_bn", 20, 5, 64, 800)
    }
    assert {e.rounds * e.participation for e in cells} == {20} and all(
        e.rounds // e.eval_every >= 12 for e in cells
    )
    assert {e.lr for e in cells if e.method != "pfedhn"} == {0.01} and {
        e.partition for e in cells
    } == {"dirichlet", "groups"}
    main = {e.tags["row"] for e in cells if e.tags["artefact"] == "table1"}
    assert main | {f"{r}_ft" for r in PAPER.when} == labels("table1")[0] and len(main) == 14
    columns = {a: {e.tags["column"] for e in cells if e.tags["artefact"] == a} for a in MEDIUM}
    assert columns["table1"] == {"Dir(0.1), CIFAR-10"} and columns["fig4"] == {
        "CIFAR-10",
        "CIFAR-100",
    }
    assert columns["table4"] == columns["fig5"] == {"CIFAR-100"}
    ablated = {e.tags["row"] for e in cells if e.tags["artefact"] == "apptable1"}
    assert ablated == {"w/o p and q", "frozen", "fedaghn"}
    full = [
        replace(e, tags={}, rounds=0, max_samples=0, eval_every=1, partition_seed=None)
        for e in cells
    ]
    theirs = [e for e in swept("fedaghn", "paper") if e.tags["artefact"] in MEDIUM]
    theirs = {
        repr(replace(e, tags={}, rounds=0, eval_every=1, partition_seed=None)) for e in theirs
    }
    assert {repr(e) for e in full} <= theirs, "else as at profile paper"


def test_quick_is_small(swept):
    assert 30 <= len({e.id for e in swept("fedaghn", "quick")}) <= 40


# -- claims: judged over rows as the notebook makes them -------------------------------------------


def rows(cells, column, when="after", metric="acc_pct", mean="client"):
    made = []
    for row, value in cells.items():
        for split in ("val", "test"):
            line = dict.fromkeys(ROW_COLUMNS, "") | dict(
                run=f"{row}/{column}", row=row, column=column, metric=metric
            )
            made.append(
                line | dict(seed=0, round=1, split=split, when=when, mean=mean, value=value)
            )
    return pd.DataFrame(made, columns=ROW_COLUMNS)


def weights(course):
    made = [
        rows({k: v}, c, metric="weight", mean="derived")
        for k, vs in course.items()
        for c, v in zip(fedaghn.STAGES, vs, strict=True)
    ]
    return pd.concat(made, ignore_index=True)


def judge(start, *frames):
    (claim,) = (c for c in PAPER.claims if c.says.startswith(start))
    return claim.judge(pd.concat(frames, ignore_index=True))


C = "Dir(0.1), CIFAR-10"


def test_best_method():
    assert judge("FedAGHN is best in every", rows({"ditto": 80, "fedaghn": 81}, C)) == (
        f"{C}: FedAGHN 81.0, rank 1 of 2; best other ditto 80.0", True)  # fmt: skip
    assert not judge("FedAGHN is best in every", rows({"ditto": 82, "fedaghn": 81}, C))[1]
    second = rows({"fedpac": 82, "fedaghn": 81}, "Pathological, CIFAR-10")
    assert judge("FedAGHN is best in every", second)[1]  # the paper's own exception
    with pytest.raises(LookupError):
        judge("FedAGHN is best in every", rows({"ditto": 80}, C))


def test_fedavg_before_and_after_fine_tuning():
    local = rows({"local": 70}, C)
    for before, after, holds in ((60, 80, True), (75, 80, False), (60, 65, False)):
        got = judge(
            "FedAvg's global model",
            local,
            rows({"fedavg": before}, C, "before"),
            rows({"fedavg": after}, C),
        )
        assert got[1] is holds


def test_the_lead_over_fedavg():
    def at(column, lead):
        before = rows(
            {"fedavg": 20 if column == "Dir(0.1)" else 50}, column, "before"
        )  # has no say: another moment
        return pd.concat([before, rows({"fedavg": 60, "fedaghn": 60 + lead}, column)])

    assert judge("FedAGHN leads FedAvg-FT", at("Dir(0.1)", 9), at("Dir(0.5)", 4)) == (
        "Dir(0.1): +9.0 points, Dir(0.5): +4.0 points", True)  # fmt: skip
    assert not judge("FedAGHN leads FedAvg-FT", at("Dir(0.1)", 4), at("Dir(0.5)", 9))[1]
    with pytest.raises(LookupError):
        judge("FedAGHN leads FedAvg-FT", at("Dir(0.1)", 9))


@pytest.mark.parametrize("start", ["In the case study", "FedAGHN is best with all"])
def test_first_of_its_table(start):
    names = ("local", "cfl", "heurfedamp") if "case" in start else tuple(fedaghn.ABLATED)
    others = dict.fromkeys(names, 70)
    assert judge(start, rows(others | {"fedaghn": 71}, "CIFAR-10"))[1]
    assert not judge(start, rows(others | {"fedaghn": 71, names[-1]: 72}, "CIFAR-10"))[1]
    with pytest.raises(LookupError):
        judge(start, rows({"fedaghn": 71}, "CIFAR-10"))


def test_weights_over_stages():
    said = {
        f"{p}, {k}": [v] * 4
        for p, s in (("shallow", 0.06), ("deep", 0.09))
        for k, v in (("similar", s), ("other", 0.05))
    }
    assert judge("Similar clients", weights(said))[1]
    assert not judge("Similar clients", weights(said | {"deep, similar": [0.05] * 4}))[1]
    assert judge("The self weight falls", weights({"whole, self": [0.03, 0.02, 0.015, 0.01]}))[1]
    assert not judge("The self weight falls", weights({"whole, self": [0.03, 0.02, 0.02, 0.01]}))[1]
    with pytest.raises(LookupError):
        judge("The self weight falls", weights({"deep, self": [0.03] * 4}))


def test_the_papers_own_table_4_fulfils_its_claims():
    said = PUBLISHED[(PUBLISHED.table == "table4") & (PUBLISHED.metric == "weight")]
    course = {
        r: [said[(said.row == r) & (said.column == c)].value.item() for c in fedaghn.STAGES]
        for r in said.row.unique()
    }
    assert (
        judge("Similar clients", weights(course))[1]
        and judge("The self weight falls", weights(course))[1]
    )


def test_settings_below_the_papers_scale():
    for profile in ("quick", "smoke"):
        for artefact in PAPER.artefacts:
            e = Experiment(**fedaghn.setting(artefact, profile, "digits"))
            assert (e.partition == "groups") == (artefact in fedaghn.CASE)
            assert len(fedaghn.rows(artefact, profile, "digits")) >= 1
    recorded = Probed("", "", "", 0, np.zeros(1), {"fc": np.zeros((1, 20, 20))})
    assert np.array_equal(fedaghn._groups(recorded), np.arange(20) // 4)
    assert papers.title("apptable2") == "Appendix Table 2"


# -- weights that probes recorded ------------------------------------------------------------------


def probed(row, column="CIFAR-100", own=0.1):
    """Weights of ten clients in five pairs at rounds 0 to 8.

    They are `own` + .01 a round on oneself, .05 on the other of the pair in the two shallow layers,
    .3 in the two deep ones, and 0 on the rest.
    """
    same = np.arange(10) // 2
    pair = (same[:, None] == same) & ~np.eye(10, dtype=bool)
    rounds = np.arange(9)
    kinds = {"conv1": 0.05, "bn1": 0.05, "fc2": 0.3, "fc3": 0.3}
    layers = {
        k: np.stack([np.eye(10) * (own + r / 100) + pair * v for r in rounds])
        for k, v in kinds.items()
    }
    return Probed(f"{row}/{column}", row, column, 0, rounds, layers)


def recorded(*some, best=8):
    """Rows of these probes' runs, best at one round, and what `Artefact.numbers` reads."""
    made = [rows({p.row: 90}, p.column).assign(round=best) for p in some]

    def found(probe):
        return list(some) if probe == "weights" else []

    return pd.concat(made, ignore_index=True), found


def test_weights_of_table_4_by_part_kind_and_stage():
    numbers = pd.DataFrame(
        fedaghn.stage_weights(*recorded(probed("fedaghn"), probed(fedaghn.DESCENT, own=0.5)))
    )
    at = numbers.set_index(["row", "column"])
    assert at.loc["whole, self"].value.tolist() == pytest.approx([0.11, 0.12, 0.14, 0.18])
    assert at.loc["whole, self"]["round"].tolist() == [1, 2, 4, 8]
    assert at.loc[("deep, similar", "Final")].value == pytest.approx(0.3)
    assert at.loc[("shallow, similar", "Final")].value == pytest.approx(0.05)
    assert at.loc[("whole, self (descent)", "First")].value == pytest.approx(0.51)
    assert set(numbers.row) == labels("table4", "weight")[0] | {
        f"whole, {k} (descent)" for k in ("self", "similar", "other")
    }


def test_final_weights_of_each_method():
    numbers = pd.DataFrame(
        fedaghn.final_weights(*recorded(probed("cfl"), probed("fedaghn"), best=4))
    )
    assert set(numbers.column) == labels("apptable2", "weight")[1] and set(numbers.row) == {
        "cfl",
        "fedaghn",
    }
    assert numbers[numbers.column == "Self"].value.tolist() == pytest.approx([0.14] * 2)


def test_the_course_of_weights():
    got = fedaghn.course([probed("fedaghn"), probed(fedaghn.DESCENT, own=0.5)])
    assert len(got) == 9 * 3 * (3 + 1) and not got.duplicated(["kind", "row", "round"]).any()
    own = got[(got.kind == "self") & (got["round"] == 8)].set_index("row").value
    assert own["deep"] == pytest.approx(0.18) and own["whole, descent"] == pytest.approx(0.58)
    assert set(got.row) == {"whole", "shallow", "deep", "whole, descent"}


def test_graphs_of_the_first_seed():
    runs = [probed("cfl"), probed("fedaghn", own=0.4)]
    finished, _ = recorded(*runs)
    both = fedaghn.graphs(finished, [*runs, runs[0]._replace(seed=1)], str.upper)
    assert list(both) == ["CFL", "FEDAGHN"] and both["FEDAGHN"][0, :3] == pytest.approx(
        [0.48, 0.175, 0]
    )
    at_stages = fedaghn.graphs(finished, runs[:1], str.upper, staged=True)
    assert [m[0, 0] for m in at_stages.values()] == pytest.approx([0.11, 0.12, 0.14, 0.18])
    assert list(at_stages) == [f"CFL, {s}" for s in fedaghn.STAGES]
    by_layer = fedaghn.graphs(finished, runs[:1], str.upper, layered=True)
    assert list(by_layer) == ["conv1", "fc2", "fc3"] and by_layer["fc3"][0, 1] == pytest.approx(0.3)
    other = runs[0]._replace(run="cfl/CIFAR-10", column="CIFAR-10")
    assert set(fedaghn.graphs(recorded(runs[0], other)[0], [runs[0], other], str.upper)) == {
        "CFL, CIFAR-100",
        "CFL, CIFAR-10",
    }


# -- p0 and q0 of each column ----------------------------------------------------------------------


def scored(best, metric="acc_pct"):
    """Rows of the tuning runs: validation accuracy by label, test accuracy in the opposite order."""
    made = []
    for r, v in best.items():
        for split, score in (("val", v), ("test", 100 - v)):
            line = dict.fromkeys(ROW_COLUMNS, "") | dict(
                run=r, artefact="tuning", row=r, column=C, metric=metric
            )
            made += [
                line
                | dict(seed=7, round=n, split=split, when="after", mean="client", value=score - n)
                for n in (0, 1)
            ]
    return pd.DataFrame(made, columns=ROW_COLUMNS)


def tuned(profile, best=None, **asked):
    """The paper's sweeps where the runs that choose p0 and q0 end as told ({} or None: are not finished), and these runs."""
    tried = []

    def finished(cells):
        tried.append(cells)
        return (
            pd.concat([scored({c.tags["row"]: best.get(c.tags["row"], 10)}) for c in cells])
            if best
            else None
        )

    return PAPER.sweeps(Scope(profile, finished=finished, **asked)), tried


def column(sweeps, artefact, label):
    (found,) = (s for s in sweeps if s.artefact == artefact and label in s.columns)
    return found


def test_p0_and_q0_are_chosen_on_validation_data():
    sweeps, tried = tuned(
        "medium",
        {"p0 = 0.1, q0 = 3": 70, "p0 = 0.03, q0 = 1": 60},
        artefacts=("table1", "apptable1"),
    )
    main = column(sweeps, "table1", C)
    assert main.rows["fedaghn"]["method_args"] == {"p0": 0.1, "q0": 3.0}
    cells, _ = tried  # of Table 1's column and App. Table 1's
    assert len(cells) == 9 and {(e.rounds, e.seed, e.tags["column"]) for e in cells} == {(5, 7, C)}
    short = column(sweeps, "tuning", C)
    assert [e.plain() for e in short.experiments()] == [
        e.plain() for e in cells
    ] and short.part == "table1"
    assert short.base.partition_seed == main.base.partition_seed
    ablated = column(sweeps, "apptable1", "CIFAR-10").rows
    assert all({"p0": 0.1, "q0": 3.0}.items() <= r["method_args"].items() for r in ablated.values())


def test_what_chooses_stands_before_what_it_serves():
    sweeps, _ = tuned("paper", artefacts=("table2",))
    assert [(s.artefact, s.part) for s in sweeps] == [("tuning", "table2"), ("table2", "")] * 3
    assert all(a.columns == b.columns for a, b in zip(sweeps[::2], sweeps[1::2], strict=True))


def test_the_default_p0_is_left_out_so_that_runs_are_shared():
    sweeps, tried = tuned("paper", {"p0 = 0.03, q0 = 0.5": 70}, artefacts=("table2",))
    assert (
        column(sweeps, "table2", "Dir(0.1)").rows["fedaghn"]["method_args"]
        == {"q0": 0.5}
        == fedaghn.EXAMPLE
    )
    assert len(tried) == 3, "a column each"


@pytest.mark.parametrize(
    "profile, artefact", [("quick", "table1"), ("smoke", "apptable1"), ("medium", "table4")]
)
def test_given_values_stay_where_nothing_is_tuned(profile, artefact):
    sweeps, tried = tuned(profile, {"p0 = 0.1, q0 = 3": 70}, artefacts=(artefact,))
    (only,) = sweeps
    given = {"q0": 3.0} if artefact == "table4" else fedaghn.EXAMPLE
    assert only.rows["fedaghn"]["method_args"] == given and not tried


def test_nothing_tuned_yet():
    sweeps, tried = tuned("medium", artefacts=("table1",))
    assert (
        column(sweeps, "table1", C).rows["fedaghn"]["method_args"] == fedaghn.EXAMPLE
        and len(tried) == 1
    )


def test_nothing_is_tuned_for_other_methods_alone():
    sweeps, tried = tuned(
        "medium", {"p0 = 0.1, q0 = 3": 70}, artefacts=("table1",), methods=("local",)
    )
    assert [list(s.rows) for s in sweeps if s.rows] == [["local"]] and not tried


def test_compute_tunes_first_and_then_computes_what_was_chosen(monkeypatch, tmp_path):
    small = dict(
        model="lenet",
        model_args={"bn": True, "kernels": 2},
        rounds=4,
        epochs=1,
        max_samples=8,
        partition="iid",
        partition_args={},
    )
    monkeypatch.setattr(
        fedaghn, "PAPER", replace(PAPER, setting=lambda *where: fedaghn.setting(*where) | small)
    )
    monkeypatch.setattr(
        fedaghn,
        "columns",
        lambda scope, artefact: {C: fedaghn.DATA["CIFAR-10"]} if artefact == "table1" else {},
    )
    monkeypatch.setattr(
        fedaghn, "tuning", lambda rows: pd.DataFrame({"chosen": ["p0 = 0.01, q0 = 3"]})
    )
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    how = dict(profile="medium", datasets=["digits"], methods=["fedaghn"], artefacts=["table1"])

    def main():
        return [
            e.method_args for e in plan.planned("fedaghn", **how) if e.tags["artefact"] == "table1"
        ]

    assert main() == [{"q0": 0.5}] * 2
    table = plan.compute("fedaghn", **how, device="cpu")
    assert set(table.status) == {"done"} and table.artefact.value_counts().to_dict() == {
        "tuning": 9,
        "table1": 2,
    }
    assert main() == [{"q0": 3.0, "p0": 0.01}] * 2 and list(
        table[table.artefact == "table1"].seed
    ) == [0, 1]


def test_the_table_of_what_was_tried():
    best = {"p0 = 0.01, q0 = 0.5": 40.0, "p0 = 0.1, q0 = 3": 50.0}
    table = fedaghn.tuning(pd.concat([scored(best), rows({"fedaghn": 99}, C)]))
    assert table.loc[C].tolist() == [40.0, 50.0, "p0 = 0.1, q0 = 3"]
    assert "as given" in fedaghn.tuning(scored({})).chosen.item()


def test_every_tuned_column_is_tuned_once(swept):
    for profile, different in (("medium", 1), ("paper", 9 + 2)):
        tried = [e for e in swept("fedaghn", profile) if e.tags["artefact"] == "tuning"]
        assert {e.seed for e in tried} == {fedaghn.TUNING_SEED} and {e.method for e in tried} == {
            "fedaghn"
        }
        own = {"table1", "table2", "apptable1"}
        columns = {e.tags["column"] for e in swept("fedaghn", profile) if e.tags["artefact"] in own}
        assert {e.tags["column"] for e in tried} == columns
        once = {repr(replace(e, tags={})) for e in tried}
        assert len(once) == 9 * different, "Dir(0.1) and App. Table 1 are Table 1's"
