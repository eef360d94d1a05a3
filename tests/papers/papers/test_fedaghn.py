"""FedAGHN's paper module: its settings and labels, and claims that can be decided either way."""

import zlib
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from pfl_core import Experiment
from pfl_core.experiments.store import ROW_COLUMNS
from pfl_papers.compare import plan
from pfl_papers.evidence.contrasts import PAST, Evidence
from pfl_papers.papers import base as papers
from pfl_papers.papers import fedaghn
from pfl_papers.papers.base import Probed, Scope
from pfl_papers.papers.fedaghn import PAPER
from tests.made import judged

PUBLISHED = papers.reported("fedaghn")
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
    ours = [e for e in main if "(" in e.tags["row"]]
    assert {(e.tags["row"], *e.method_args.values()) for e in ours} == {
        ("pfedla (rate 50)", 50.0), ("cfl (pFedGraph's thresholds)", 2.0, 2.5, 0.0),
    }  # fmt: skip
    main = [e for e in main if e not in ours]
    rows, columns = labels("table1")
    assert {e.tags["row"] for e in main} | {f"{r}_ft" for r in PAPER.when} == rows
    assert {e.tags["column"] for e in main} == columns and len(main) == 8 * 14 * 3
    assert {e.partition for e in main if "Pathological" in e.tags["column"]} == {"shards"}
    anew = [e for e in paper_cells if e.tags["column"] == fedaghn.ANEW]
    assert anew and not any("numpy_seed" in e.partition_args for e in anew)
    draws = {
        (e.dataset, *(e.partition_args[a] for a in ("numpy_seed", "class_size"))) for e in main
    }
    assert draws == {("cifar10", 66666, 6000), ("cifar100", 666, 600), ("tiny_imagenet", 666, 550)}


def test_columns_of_the_other_tables(paper_cells):
    for artefact in ("table2", "table3", "apptable1"):
        cells = [e for e in paper_cells if e.tags["artefact"] == artefact]
        assert {e.tags["column"] for e in cells} == labels(artefact)[1]
    alphas = {e.partition_args["alpha"] for e in paper_cells if e.tags["artefact"] == "table2"}
    assert alphas == {0.1, 0.2, 0.5}


def test_the_case_study_is_computed_once(paper_cells):
    case = [e for e in paper_cells if e.tags["artefact"] in fedaghn.CASE and e.model == "cnn_bn"]
    assert {e.partition for e in case} == {"groups"}
    assert (
        len({repr(replace(e, tags={})) for e in case})
        == 2 * (len(fedaghn.SHOWN["table3"].rows.paper) + 1) * 3  # and a row of ours
    )
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
    main = {row for row in main if "(" not in row}
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


# -- claims ----------------------------------------------------------------------------------------

C = "Dir(0.1), CIFAR-10"


def rows(cells, column, when="after", metric="acc_pct", average="client", seed=0):
    made = []
    for row, value in cells.items():
        for split in ("val", "test"):
            line = dict.fromkeys(ROW_COLUMNS, "") | dict(
                run=f"{row}/{column}/{seed}", row=row, column=column, metric=metric, when=when
            )
            made.append(line | dict(seed=seed, rounds=1, split=split, average=average, value=value))
    return pd.DataFrame(made, columns=ROW_COLUMNS)


def seeded(cells, column=C, seeds=3, small=0.1, **how):
    """Rows of three seeds; their noise is small against a point (of a weight, against .001).

    A row's noise has the mean 0, so that rows of one accuracy are a tie.
    """
    random, frames = np.random.default_rng(zlib.crc32(column.encode())), []
    noise = random.normal(0, small, (seeds, len(cells)))
    for seed, moved in enumerate(noise - noise.mean(0)):
        noisy = {row: cells[row] + by for row, by in zip(cells, moved, strict=True)}
        frames.append(rows(noisy, column, seed=seed, **how))
    return pd.concat(frames, ignore_index=True)


def weights(table, columns=fedaghn.STAGES, metric="weight"):
    """Derived rows of {row: (a number for each column)}."""
    how = dict(small=1e-5, metric=metric, average="derived")
    each = [seeded({r: v[i] for r, v in table.items()}, c, **how) for i, c in enumerate(columns)]
    return pd.concat(each, ignore_index=True)


def verdict(start, *frames, printed=()):
    rows_ = pd.concat(frames, ignore_index=True)
    return judged(PAPER, rows_, lambda c: c.says.startswith(start), printed)


OTHERS = dict(local=70, cfl=70, heurfedamp=70, fedaghn=75)
PARTS = dict.fromkeys(fedaghn.ABLATED, 70) | {"w/o p and q": 60, "w/o p": 65, "fedaghn": 75}
FINE = dict(pfedla=75, fedala=75, cfl=70, fedamp=70, heurfedamp=70)
# A claim, accuracies with which it holds, what changes to contradict it, and to leave a tie.
ACCURACIES = [
    ("FedAGHN is best in", OTHERS, dict(cfl=80), dict(cfl=75)),
    ("HeurFedAMP outperforms", dict(heurfedamp=75, fedamp=70), dict(fedamp=80), dict(fedamp=75)),
    ("FedALA performs", dict(pfedla=75, fedala=70), dict(fedala=80), dict(fedala=75)),
    ("FedAGHN outperforms", OTHERS, dict(local=80), dict(local=75)),
    ("pFedLA and FedALA", FINE, dict(cfl=80), dict(cfl=75)),
    ("In the case study", OTHERS, dict(heurfedamp=80), dict(heurfedamp=75)),
    ("FedAGHN performs best", PARTS, dict(frozen=80), dict(frozen=75)),
    ("The most severe", PARTS, dict(frozen=50), dict(frozen=60)),
    ("Performance decreases", PARTS, {"w/o p": 80}, {"w/o p": 70}),
]


@pytest.mark.parametrize("start, cells, against, tied", ACCURACIES, ids=[a[0] for a in ACCURACIES])
def test_claims_on_accuracy(start, cells, against, tied):
    assert verdict(start, seeded(cells)).verdict == "holds"
    assert verdict(start, seeded(cells | against)).verdict == "contradicted"
    assert verdict(start, seeded(cells | tied)).verdict == "tie"
    assert verdict(start, seeded(cells, seeds=1)).reason == "one seed"


@pytest.mark.parametrize("claim", PAPER.claims, ids=lambda claim: claim.says[:40])
def test_a_claim_without_its_rows_is_not_run(claim):
    with pytest.raises(LookupError):
        claim.judge(Evidence(seeded({fedaghn.DESCENT: 70}), PAPER))


def test_the_papers_own_exception_and_rows_of_ours_decide_nothing():
    second = seeded(OTHERS | dict(fedpac=80), "Pathological, CIFAR-10")
    anew = fedaghn.ANEW
    ours = seeded({fedaghn.DESCENT: 90}), seeded(OTHERS | dict(cfl=90), anew)
    assert verdict("FedAGHN is best in", second, seeded(OTHERS), *ours).verdict == "holds"
    elsewhere = seeded(OTHERS | dict(fedpac=80))
    assert verdict("FedAGHN is best in", elsewhere).verdict == "contradicted"


def test_to_be_the_best_of_all_all_have_to_be_there_but_the_papers_exception():
    printed = (*OTHERS, "fedavg", "fedpac")
    start, column = "FedAGHN is best in", "Pathological, CIFAR-10"
    assert verdict(start, seeded(OTHERS, column), printed=printed).verdict == "holds"
    assert verdict(start, seeded(OTHERS), printed=printed).reason == "rows missing"


def test_fedavg_counts_after_local_training():
    start, before = "FedAGHN is best in", seeded(dict(fedavg=90), when="before")
    for after, found in ((70, "holds"), (80, "contradicted")):
        tuned = seeded(dict(fedavg=after))
        assert verdict(start, before, tuned, seeded(OTHERS)).verdict == found


def test_most_cases():
    start, columns = "HeurFedAMP outperforms", [C, "Dir(0.1), CIFAR-100", "Dir(0.1), TINY"]
    for leads, found in (((5, 5, -5), "holds"), ((5, -5, -5), "contradicted")):
        cells = [dict(heurfedamp=70 + lead, fedamp=70) for lead in leads]
        assert verdict(start, *map(seeded, cells, columns)).verdict == found


def test_fedavg_before_and_after_fine_tuning():
    def table(before, after):
        globals_ = seeded(dict(fedavg=before, fedprox=60), when="before")
        return globals_, seeded(dict(fedavg=after, fedprox=79, local=70, fedaghn=80))

    worse, competitive = "FedAvg and FedProx, tested before", "FedAvg-FT and FedProx-FT"
    assert verdict(worse, *table(60, 79)).verdict == "holds"
    assert verdict(worse, *table(75, 79)).verdict == "contradicted"
    assert verdict(worse, *table(70, 79)).verdict == "tie"
    assert verdict(competitive, *table(60, 79)).verdict == "holds"
    assert verdict(competitive, *table(60, 75)).verdict == "contradicted"
    assert verdict(competitive, *table(60, 78)).verdict == "tie"


def test_the_lead_over_fedavg_after_local_training():
    def at(column, lead):
        before = seeded(dict(fedavg=20 + lead), column, when="before")  # has no say
        return pd.concat([before, seeded(dict(fedavg=60, fedaghn=60 + lead), column)])

    start = "FedAGHN leads FedAvg-FT"
    for leads, found in (((9, 4), "holds"), ((4, 9), "contradicted"), ((4, 4), "tie")):
        rows_ = map(at, ("Dir(0.1)", "Dir(0.5)"), leads)
        assert verdict(start, *rows_).verdict == found
    with pytest.raises(LookupError):
        verdict(start, at("Dir(0.1)", 9))


def test_weights_over_stages():
    said = {
        "whole, self": (0.03, 0.02, 0.015, 0.01),
        "shallow, similar": (0.12, 0.09, 0.07, 0.06),
        "shallow, other": (0.04,) * 4,
        "deep, similar": (0.16, 0.12, 0.11, 0.1),
        "deep, other": (0.03,) * 4,
    }
    similar, own, evens = "Similar clients", "The weight of oneself gradually", "In shallow layers"
    for start in (similar, own, evens):
        assert verdict(start, weights(said)).verdict == "holds"
    for start, row, against, tied in (
        (similar, "deep, similar", 0.04, 0.05),
        (own, "whole, self", 0.02, 0.015),
        (evens, "shallow, similar", 0.08, 0.07),
    ):
        changed = weights(said | {row: (*said[row][:3], against)})
        assert verdict(start, changed).verdict == "contradicted"
        level = weights(said | {row: (*said[row][:3], tied)})
        assert verdict(start, level).verdict == "tie"


@pytest.mark.parametrize("similar", [0.06, 0.14])
def test_about_twice_has_two_sides(similar):
    said = {"deep, similar": (0.09,) * 4, "deep, other": (0.045,) * 4}
    assert verdict("In deep", weights(said)).verdict == "holds"
    other = weights(said | {"deep, similar": (0.09, 0.09, 0.09, similar)})
    assert verdict("In deep", other).verdict == "contradicted"


def test_the_papers_own_weights_fulfil_its_claims():
    for artefact, starts in {
        "table4": ("Similar clients", "The weight of oneself gradually", "In shallow", "In deep"),
        "apptable2": ("In FedAGHN the", "CFL maintains", "HeurFedAMP assigns"),
    }.items():
        said = PUBLISHED[(PUBLISHED.table == artefact) & (PUBLISHED.metric == "weight")]
        table = said.pivot_table(index="row", columns="column", values="value", sort=False)
        frame = weights({row: tuple(v) for row, v in zip(table.index, table.to_numpy(), strict=True)},
                        table.columns)  # fmt: skip
        assert {verdict(start, frame).verdict for start in starts} == {"holds"}


FINAL = dict(
    cfl=(0.25, 0.25, 0.0), heurfedamp=(0.05, 0.0506, 0.0499), fedaghn=(0.0126, 0.0733, 0.048)
)


@pytest.mark.parametrize(
    "starts, method, against",
    [
        (("FedAGHN's weights", "In FedAGHN the"), "fedaghn", (0.06, 0.07, 0.05)),
        (("In CFL all",), "cfl", (0.25, 0.25, 0.01)),
        (("In CFL all", "CFL maintains"), "cfl", (0.3, 0.25, 0.0)),
        (("HeurFedAMP gives", "HeurFedAMP assigns"), "heurfedamp", (0.05, 0.0499, 0.0506)),
        (("HeurFedAMP gives", "HeurFedAMP assigns"), "heurfedamp", (0.05, 0.09, 0.04)),
    ],
)
def test_final_weights(starts, method, against):
    for start in starts:
        assert verdict(start, at_the_end(FINAL)).verdict == "holds"
        assert verdict(start, at_the_end(FINAL | {method: against})).verdict == "contradicted"
        one = at_the_end(FINAL)
        assert verdict(start, one[one.seed == 0]).reason == "one seed"


def at_the_end(table, earlier=None):
    kinds = ("Self", "Similar", "Other")
    parts = {"weight": table, "weight" + PAST: earlier or table}
    return pd.concat(weights(found, kinds, metric) for metric, found in parts.items())


def test_where_cfl_still_divides_its_clients_more_rounds_could_do_it_again():
    now, earlier = {"cfl": (0.15, 0.15, 0.025)}, {"cfl": (0.1, 0.1, 0.0375)}
    assert verdict("In CFL all", at_the_end(now)).verdict == "contradicted"
    found = verdict("In CFL all", at_the_end(now, earlier))
    assert (found.verdict, found.reason) == ("open", "still moves")
    assert verdict("CFL maintains", at_the_end(now, earlier)).verdict == "holds"


def test_weights_of_layers_and_a_weight_that_stays():
    deep, stays = "Deep layers", "The weight of oneself in Heur"
    for last, found in ((0.09, "holds"), (0.05, "contradicted"), (0.07, "tie")):
        gaps = dict(zip(fedaghn.PLACES, ((0.01,), (0.02,), (0.07,), (last,)), strict=True))
        assert verdict(deep, weights(gaps, ["CIFAR-100"], "similar minus other")).verdict == found
    for final, found in ((0.05, "holds"), (0.06, "contradicted"), (0.051, "tie")):
        course = {"heurfedamp, self": (0.05, 0.05, 0.05, final)}
        assert verdict(stays, weights(course)).verdict == found


def test_settings_below_the_papers_scale():
    for profile in ("quick", "smoke"):
        for artefact in PAPER.artefacts:
            e = Experiment(**fedaghn.setting(artefact, profile, "digits"))
            assert (e.partition == "groups") == (artefact in fedaghn.CASE)
            some = fedaghn.rows(artefact, profile, "digits")
            assert bool(some) == (artefact != "appfig1"), "which runs nothing"
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
    return Probed(f"{row}/{column}/0", row, column, 0, rounds, layers)


def recorded(*some, best=8):
    """Rows of these probes' runs, best at one round, and what `Artefact.numbers` reads."""
    made = [rows({p.row: 90}, p.column).assign(rounds=best) for p in some]

    def found(probe):
        return list(some) if probe == "weights" else []

    return pd.concat(made, ignore_index=True), found


def test_weights_of_table_4_by_part_kind_and_stage():
    numbers = pd.DataFrame(
        fedaghn.stage_weights(*recorded(probed("fedaghn"), probed(fedaghn.DESCENT, own=0.5)))
    )
    at = numbers.set_index(["row", "column"])
    assert at.loc["whole, self"].value.tolist() == pytest.approx([0.11, 0.12, 0.14, 0.18])
    assert at.loc["whole, self"]["rounds"].tolist() == [1, 2, 4, 8]
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
    assert numbers[numbers.column == "Self"].value.mean() == pytest.approx(0.14)
    assert set(numbers["rounds"]) == {4}, "the round that they are of"


def test_the_course_of_each_methods_weights():
    runs = probed("cfl"), probed(fedaghn.OWN, own=0.4)
    at = pd.DataFrame(fedaghn.course_of_methods(*recorded(*runs))).set_index(["row", "column"])
    assert at.loc["cfl, self"].value.tolist() == pytest.approx([0.11, 0.12, 0.14, 0.18])
    assert at.loc[("fedaghn, similar", "Final")].value == pytest.approx(0.175)
    assert len(at) == 2 * 3 * 4


def test_weights_of_the_outer_layers():
    one = probed("fedaghn")
    one = one._replace(
        values={"conv1": one.values["conv1"]}
        | {
            name: one.values[like]
            for name, like in (
                ("bn1", "fc2"),
                ("conv2", "conv1"),
                ("fc1", "conv1"),
                ("fc2", "fc2"),
                ("fc3", "fc3"),
            )
        }
    )
    got = pd.DataFrame(fedaghn.layer_weights(*recorded(one, best=5)))
    assert set(got["rounds"]) == {5}
    assert got.row.tolist() == list(fedaghn.PLACES)
    assert got.value.tolist() == pytest.approx([0.05, 0.05, 0.3, 0.3])


def test_the_course_of_weights():
    got = fedaghn.course([probed("fedaghn"), probed(fedaghn.DESCENT, own=0.5)])
    assert len(got) == 9 * 3 * (3 + 1) and not got.duplicated(["kind", "row", "rounds"]).any()
    own = got[(got.kind == "On oneself") & (got["rounds"] == 8)].set_index("row").value
    assert own["deep"] == pytest.approx(0.18) and own["whole, descent"] == pytest.approx(0.58)
    assert set(got.row) == {"whole", "shallow", "deep", "whole, descent"}


def test_graphs_of_the_first_seed():
    runs = [probed("cfl"), probed("fedaghn", own=0.4)]
    finished, _ = recorded(*runs)
    both = fedaghn.graphs(finished, [*runs, runs[0]._replace(seed=1)])
    assert list(both) == ["CFL", "FedAGHN"] and both["FedAGHN"][0, :3] == pytest.approx(
        [0.48, 0.175, 0]
    )
    at_stages = fedaghn.graphs(finished, runs[:1], staged=True)
    assert [m[0, 0] for m in at_stages.values()] == pytest.approx([0.11, 0.12, 0.14, 0.18])
    assert list(at_stages) == [f"CFL, {s}" for s in fedaghn.STAGES]
    by_layer = fedaghn.graphs(finished, runs[:1], layered=True)
    assert list(by_layer) == ["conv1", "fc2", "fc3"] and by_layer["fc3"][0, 1] == pytest.approx(0.3)
    other = runs[0]._replace(run="cfl/CIFAR-10/0", column="CIFAR-10")
    assert set(fedaghn.graphs(recorded(runs[0], other)[0], [runs[0], other])) == {
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
                | dict(
                    seed=7, rounds=n, split=split, when="after", average="client", value=score - n
                )
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


@pytest.mark.slow
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
        fedaghn, "columns", lambda scope, artefact: [C] if artefact == "table1" else []
    )
    monkeypatch.setattr(
        fedaghn, "tuned", lambda rows: pd.DataFrame({"chosen": ["p0 = 0.01, q0 = 3"]})
    )
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    how = dict(profile="medium", datasets=["digits"], methods=["fedaghn"], artefacts=["table1"])

    def main():
        return [
            e.method_args for e in plan.planned("fedaghn", **how) if e.tags["artefact"] == "table1"
        ]

    assert main() == [{"q0": 0.5}] * 3
    table = plan.compute("fedaghn", **how, device="cpu")
    assert set(table.status) == {"done"} and table.artefact.value_counts().to_dict() == {
        "tuning": 9,
        "table1": 3,
    }
    assert main() == [{"q0": 3.0, "p0": 0.01}] * 3 and list(
        table[table.artefact == "table1"].seed
    ) == [0, 1, 2]


def test_the_table_of_what_was_tried():
    best = {"p0 = 0.01, q0 = 0.5": 40.0, "p0 = 0.1, q0 = 3": 50.0}
    table = fedaghn.tuned(pd.concat([scored(best), rows({"fedaghn": 99}, C)]))
    assert table.loc[C].tolist() == [40.0, 50.0, "p0 = 0.1, q0 = 3"]
    assert "as given" in fedaghn.tuned(scored({})).chosen.item()


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
