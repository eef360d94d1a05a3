"""A notebook from the inside: parameters refused before anything runs, stand-ins, and one real sweep from rows to published files."""

import dataclasses

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from pfl_core.analysis import plots
from pfl_core.data import pools as data
from pfl_core.experiments import compute
from pfl_core.experiments import sweep as sweeps
from pfl_core.experiments.metrics import ROW_COLUMNS
from pfl_core.methods.base import METHODS
from pfl_core.util import gpu
from pfl_papers import places
from pfl_papers.compare import readable, report
from pfl_papers.compare.fullest import best
from pfl_papers.evidence import asks, committed, contrasts
from pfl_papers.evidence.asks import Ask
from pfl_papers.evidence.contrasts import READ_AFTER
from pfl_papers.notebook import drawing
from pfl_papers.notebook.study import Study
from pfl_papers.papers import base, fedaghn, fedper
from pfl_papers.papers.base import FULL, PROFILES, STAND_INS, TUNING, Artefact, Scope
from pfl_papers.papers.shown import use
from tests import made

# Where a display is set, Agg says that it shows nothing.
pytestmark = pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
SMALL = dict(model="lenet", model_args={"kernels": 4}, clients=5, partition_args={"k": 4}, rounds=2)
BOTH = {"fedavg": {"method": "fedavg"}, "fedper": {"method": "fedper"}}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A project with nothing run and nothing committed."""
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "home" / "results")
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    with plt.rc_context():
        yield tmp_path
    plt.close("all")


@pytest.fixture
def trained(monkeypatch):
    """The list of (method, seed) that were trained, as it grows."""
    seen, simulate = [], compute.simulate

    def counting(method, data, **how):
        seen.append((method.name, method.task.config.seed))
        return simulate(method, data, **how)

    monkeypatch.setattr(compute, "simulate", counting)
    return seen


def study(paper="fedper", **how):
    return Study(paper, **{"profile": "smoke", "device": "cpu"} | how)


def small(artefact="fig3", rows=None, columns=("a",), paper=fedper.PAPER, seeds=(), **changes):
    """A paper whose only runs are small ones of one artefact."""

    def sweeps(scope):
        base = scope.base(paper, artefact, "cifar10", **SMALL | changes)
        return scope.sweep(paper, base, rows or BOTH, {c: {} for c in columns}, seeds=seeds)

    return dataclasses.replace(paper, sweeps=sweeps)


# ---------------------------------------------------------------- parameters

WRONG = {
    "profile": (
        dict(profile="fast"),
        ["profile: 'fast' is unknown; known are " + ", ".join(PROFILES)],
    ),
    "no profile": (dict(profile=None), ["profile: None is unknown"]),
    "datasets": (
        dict(datasets=["digits", "cifar"]),
        ["datasets: 'cifar' is unknown", *data.list_datasets()],
    ),
    "methods": (dict(methods=["fedpr"]), ["methods: 'fedpr' is unknown", *METHODS, *READ_AFTER]),
    "artefacts": (dict(artefacts=["fig2", "table9"]), ["artefacts: 'table9'", *fedper.FIGURES]),
    "in a list": (
        dict(methods=[["fedper"]]),
        ["methods: ['fedper'] is unknown; did you mean 'fedper'? known are"],
    ),
    "string": (
        dict(datasets="digits"),
        ["datasets='digits': give a list, such as ['", "an empty list means"],
    ),
    "tuple": (dict(methods=("fedper",)), ["methods=('fedper',): give a list"]),
    "empty string": (dict(artefacts=""), ["artefacts='': give a list, such as ['fig2']"]),
    "train": (
        dict(train="true"),
        ["train='true': got str, allowed is True or False (not a string)"],
    ),
    "train 1": (dict(train=1), ["train=1: got int"]),
    "seeds": (dict(seeds=3), ["seeds=3: give a list of integers >= 0"]),
    "seed text": (dict(seeds=["0"]), ["seeds=['0']: give a list of integers"]),
    "seed bool": (dict(seeds=[True]), ["seeds=[True]"]),
    "seed float": (dict(seeds=[1.0]), ["seeds=[1.0]"]),
    "seed negative": (dict(seeds=[0, -1]), ["seeds=[0, -1]: give a list of integers >= 0"]),
    "device": (
        dict(device="gpu"),
        ["device 'gpu' is unknown; did you mean 'cpu'? known are auto, cpu, cuda"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_parameters_are_refused_with_what_is_known(case, home):
    how, said = WRONG[case]
    with pytest.raises(ValueError) as error:
        study(**how)
    for part in said:
        assert part in str(error.value)
    assert not (home / "runs").exists()


def test_an_unknown_paper_is_refused():
    with pytest.raises(
        ValueError, match="paper 'fedpr' is unknown; did you mean 'fedper'. known are"
    ):
        Study("fedpr")


def test_a_gpu_that_is_absent_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "misfit", lambda: "")
    with pytest.raises(
        ValueError,
        match="device cuda was asked for, but torch sees no GPU here; use device='cpu' or",
    ):
        study(device="cuda")
    monkeypatch.setenv("PFL_DEVICE", "cuda")
    with pytest.raises(ValueError, match="no GPU"):
        study(device="auto")
    assert study(device="cpu").device == "cpu"


def test_defaults_are_the_profiles_own(home):
    s = study(datasets=[], methods=None, seeds=[], artefacts=[])
    assert (s.scope.label, seeds(s), s.train) == ("digits", [0], False)
    assert not s.scope.artefacts and s.folder() == home / "runs" / "figures/fedper/smoke-digits"
    assert seeds(study(seeds=[3, 0])) == [3, 0]
    asked = (("paper", None), ("quick", ["mnist", "cifar10"]))
    assert {study(profile=p, datasets=d).scope.label for p, d in asked} == {
        "paper",
        "mnist+cifar10",
    }
    real = {p: seeds(study(profile=p, datasets=["cifar10"]), "fig4") for p in PROFILES}
    assert real == {"smoke": [0], "quick": [0, 1], "medium": [0, 1], "paper": [0, 1, 2]}


def seeds(s, artefact="fig2"):
    return list(s.scope.seeds_of(s.paper, artefact))


# ---------------------------------------------------------------- data


@pytest.mark.parametrize("profile", ["smoke", "quick"])
def test_embedded_data_stand_in_for_the_papers(profile):
    scope = study(profile=profile).scope
    served = {name: scope.data(name) for name in STAND_INS}
    assert {served[n] for n in ("cifar10", "mnist", "fashion_mnist", "emnist-digits")} == {"digits"}
    assert served["cifar100"] == served["tiny_imagenet"] == "digits100"
    assert (
        served["flickr_aes"] == "raters_digits100"
        and served["omniglot"] is None is served["ag_news"]
    )
    assert scope.data("digits") == "digits" and scope.data("emnist") is None


@pytest.mark.parametrize("profile", FULL)
def test_the_paper_profile_takes_the_papers_data(profile):
    s = study(profile=profile)
    assert [s.scope.data(n) for n in STAND_INS] == list(STAND_INS)
    assert (s.scope.label, s.folder().name) == ("paper", f"{profile}-paper")


@pytest.mark.parametrize("profile", PROFILES)
def test_data_that_are_asked_for_are_the_only_ones(profile):
    scope = study(profile=profile, datasets=["digits100", "cifar10", "raters_cifar10"]).scope
    assert (scope.data("cifar10"), scope.data("cifar100"), scope.data("mnist")) == (
        "cifar10",
        "digits100",
        None,
    )
    assert scope.data("flickr_aes") == "raters_cifar10"


def test_every_stand_in_is_a_data_set():
    assert set(STAND_INS) | {d for ds in STAND_INS.values() for d in ds} <= set(
        data.list_datasets()
    )


# ---------------------------------------------------------------- base and pick


def test_base_is_the_preset_over_what_serves():
    e = study().base("fig3", "cifar10", **SMALL)
    want = fedper.setting("fig3", "smoke", "digits") | SMALL
    assert {k: getattr(e, k) for k in want} == want and e.dataset == "digits"
    assert e.tags == {"paper": "fedper", "artefact": "fig3", "profile": "smoke"}


def test_what_is_not_run_says_so_and_draws_nothing(capsys, home):
    s, named = study(datasets=["digits"]), study(artefacts=["fig2"])
    for asked, artefact in ((named, "fig3"), (s, "fig7"), (named, "fig3")):  # why is said once
        rows = asked.run(artefact)
        assert rows.empty and list(rows.columns) == ROW_COLUMNS
        assert s.curves(artefact, rows) is None and s.spread(artefact, rows) is None
        asked.show(artefact)
    assert named.base("fig3", "cifar10") is None is named.base("fig2", "omniglot")
    s.show_partitions(None, {"k": {}})
    letters = dataclasses.replace(
        fedper.PAPER, artefacts={"fig2": Artefact(("omniglot", "ag_news"))}, claims=()
    )
    assert study(letters).run("fig2").empty
    assert capsys.readouterr().out.splitlines() == [
        "fig3: not run, not among artefacts=['fig2']",
        "fig7: not run, needs flickr_aes (datasets=['digits'])",
        "fig2: not run, needs omniglot or ag_news (datasets=the embedded ones)",
    ]
    assert not (home / "runs").exists()
    assert set(s.claims().left.verdict) == {"not run"} and not len(s.claims().ran)


def test_an_unknown_artefact_of_a_cell_is_a_mistake():
    for cell in (
        lambda s: s.base("fig99", "cifar10"),
        lambda s: s.run("fig99"),
        lambda s: s.show("fig99"),
    ):
        with pytest.raises(
            ValueError, match="artefact: 'fig99' is unknown; did you mean 'fig9'. known are fig2"
        ):
            cell(study())


def test_medium_runs_what_its_paper_names_and_as_many_seeds(capsys):
    paper = fedper.PAPER
    some = {
        a: dataclasses.replace(paper.artefacts[a], medium=n)
        for a, n in (("fig2", 3), ("fig3", 1), ("fig4", 0))
    }

    def sweeps(scope):
        bases = [scope.base(paper, a, "cifar10") for a in some]
        return [
            s for base in bases for s in scope.sweep(paper, base, {"a": {}}, {"a": {}}, quick=7)
        ]

    paper = dataclasses.replace(paper, artefacts=some, sweeps=sweeps)

    def asked(**how):
        s = study(paper, profile="medium", datasets=["cifar10"], **how)
        return {p.artefact: list(p.seeds) for p in paper.planned(s.scope)}

    assert asked() == {"fig2": [0, 1, 2], "fig3": [0]}
    assert asked(seeds=[5]) == {"fig2": [5], "fig3": [5]} and asked(artefacts=["fig3"]) == {
        "fig3": [0]
    }
    with pytest.raises(
        ValueError, match="no such run of fig4 at profile medium; it has fig2, fig3"
    ):
        asked(artefacts=["fig3", "fig4"])
    medium = study(paper, profile="medium", datasets=["cifar10"])
    capsys.readouterr()  # what it would train
    medium.run("fig4")
    said = "fig4: not run at profile medium, which has fig2, fig3; use profile='paper'"
    assert capsys.readouterr().out.splitlines() == [said]
    none = dataclasses.replace(paper, artefacts={"fig4": some["fig4"]})
    assert study(none, profile="medium").run("fig4").empty
    assert "which has nothing of this paper;" in capsys.readouterr().out


def test_pick_follows_profile_and_data():
    def pick(profile, datasets=None, **values):
        return study(profile=profile, datasets=datasets).scope.pick("p", **values)

    three = dict(quick="q", smoke="s")
    assert [pick(p, **three) for p in ("paper", "medium", "quick", "smoke")] == ["p", "p", "q", "s"]
    assert pick("smoke", quick="q") == "q"
    assert pick("quick", ["cifar10"], **three) == "p" == pick("quick", ["cifar100"], quick=0)
    assert pick("smoke", ["cifar10"], **three) == "s"
    assert [pick(p, quick=0, medium="m") for p in PROFILES] == [0, 0, "m", "p"]


# ---------------------------------------------------------------- sweeps, figures, rows


@pytest.mark.slow
def test_from_a_sweep_to_published_rows_and_back(home, trained, capsys, monkeypatch):
    s = study(small(), seeds=[0, 1])
    rows = s.run("fig3")
    assert trained == [("fedavg", 0), ("fedavg", 1), ("fedper", 0), ("fedper", 1)]
    assert (
        list(rows.columns) == ROW_COLUMNS
        and rows.run.nunique() == 4
        and set(rows["rounds"]) == {0, 2}
    )
    assert rows[
        ["paper", "artefact", "column", "profile", "dataset"]
    ].drop_duplicates().to_numpy().tolist() == [["fedper", "fig3", "a", "smoke", "digits"]]
    # figures
    last = s.curves("fig3", rows, "K_P = 2.")
    assert (
        list(last.index) == ["FedAvg", "FedPer"] and last.map(lambda v: "±" in v).to_numpy().all()
    )
    assert s.spread("fig3 spread", rows).shape == (2, 1)
    whole = s.base("fig3", "cifar10", **SMALL, max_samples=0)
    s.show_partitions(whole, {"k = 4": {}, "k = 6": {"partition_args": {"k": 6}}})
    held = (
        pd.read_csv(s.folder() / "partition.csv").groupby(["column", "client"])["class"].nunique()
    )
    assert held.groupby("column").agg(["min", "max", "size"]).to_numpy().tolist() == [
        [4, 4, 5],
        [6, 6, 5],
    ]
    shown = pd.read_csv(s.folder() / "fig3.csv")
    assert len(shown) == 8 and set(shown.metric) == {"acc_pct"} and set(shown.split) == {"test"}
    assert set(pd.read_csv(s.folder() / "fig3 spread.csv").metric) == {
        "acc_pct",
        "acc_sd",
        "acc_min",
        "acc_max",
    }
    assert plt.get_fignums() == [], "figures are closed once shown"
    # tables and claims
    claims = s.claims().frame
    assert set(claims[claims.artefact == "fig3"].verdict) == {"not judged"}, "smoke has none"
    assert set(claims[claims.artefact != "fig3"].verdict) == {"not run"}
    said = s.finish()
    assert said.startswith("4 runs; pfl_core ") and "runs/results/fedper.smoke-digits, " in said
    assert str(home) not in said + capsys.readouterr().out, "no path of this computer in a notebook"
    kinds = [
        f"{n}.{k}" for n in ("fig3", "fig3 spread", "partition") for k in ("csv", "pdf", "png")
    ]
    assert sorted(p.name for p in s.folder().iterdir()) == sorted(
        [*kinds, "claims.csv", "claims.md"]
    )
    # a second notebook finds the runs in the store, also where it should not trust committed rows
    again = study(small(), seeds=[0, 1], train=True)
    pd.testing.assert_frame_equal(again.run("fig3"), rows)
    assert len(trained) == 4 and again.rows().equals(s.rows())
    # what is committed serves another computer, unless it is to be computed again
    with pytest.raises(ValueError, match="nothing of 'fedper' to publish"):
        committed.publish("fedper")
    committed.save(s.rows(), "fedper", "quick", "digits")
    names = [p.name for p in committed.publish("fedper")]
    assert {"runs.csv.gz", "cells.csv", "fedper.history.csv.gz", "SHA256SUMS"} <= set(names)
    monkeypatch.setenv("PFL_RUNS", str(home / "elsewhere"))
    served = study(small(), seeds=[0, 1]).run("fig3")
    assert len(trained) == 4 and not list((home / "elsewhere").glob("store/*/"))
    pd.testing.assert_frame_equal(served, rows.assign(value=rows.value.round(4)), check_dtype=False)
    study(small(), seeds=[1], methods=["fedper"], train=True).run("fig3")
    assert trained[4:] == [("fedper", 1)]


def test_an_artefact_is_run_once_and_shown_as_it_says(home, trained, capsys, monkeypatch):
    asked, sweep = [], sweeps.sweep
    monkeypatch.setattr(
        sweeps, "sweep", lambda cells, **how: (asked.append(len(cells)), sweep(cells, **how))[1]
    )
    figures = {a: dataclasses.replace(fedper.FIGURES[a], said="As said.") for a in ("fig2", "fig3")}
    paper = dataclasses.replace(fedper.PAPER, artefacts=figures)
    s = study(small(paper=paper, rounds=0))
    s.show("fig3")
    assert sum(asked) == 2 and s.run("fig3") is s.run("fig3") and len(trained) == 2
    s.show("fig3", columns=1)
    assert sum(asked) == 2
    shown = pd.read_csv(s.folder() / "fig3.csv")
    assert set(shown.metric) == {"acc_pct", "acc_sd", "acc_min", "acc_max"}, (
        "Figure 3 is the spread over clients"
    )
    out = capsys.readouterr().out
    assert out.count("Image object") == 2 and out.count("MobileNet") == 0 and "FedAvg" in out, (
        "a figure and its table"
    )
    nothing = s.run("fig2")
    assert nothing.empty and s.show("fig2") is None and s.curves("fig2", nothing) is None


def test_methods_restrict_the_rows(trained):
    s = study(small(columns=("a", "b"), rounds=0), methods=["fedper"], seeds=[5])
    rows = s.run("fig3")
    assert set(rows.method) == {"fedper"} == set(rows.row) and set(rows.column) == {"a", "b"}
    assert trained == [("fedper", 5)], "two columns alike are one run"
    assert set(s.rows().artefact) == {"fig3"} and not s.rows().duplicated().any()
    depth = {"K_P = 1": {"head_depth": 1}, "K_P = 2": {}, "global": use("fedavg")}
    asked = dict(methods=["fedper"], seeds=[5])
    labels = study(small("fig4", depth, method="fedper", rounds=0), **asked).run("fig4").row
    assert list(dict.fromkeys(labels)) == ["K_P = 1", "K_P = 2"]
    with pytest.raises(ValueError, match=r"methods=\['fedper'\].* it has runs of fedavg$"):
        study(small("fig4", {"global": use("fedavg")}, rounds=0), **asked)
    view = small(rows={"fedavg_ft": use("fedavg"), "fedavg": use("fedavg")}, rounds=0)
    assert set(study(view, methods=["fedavg_ft"]).run("fig3").row) == {"fedavg_ft"}, (
        "a row may be named as its view"
    )


def test_how_many_seeds_is_said_for_quick_only():
    figure = {"fig3": dataclasses.replace(fedper.FIGURES["fig3"], quick=2)}
    paper = dataclasses.replace(fedper.PAPER, artefacts=figure)
    asked = [dict(seeds=[4, 2, 9]), dict(profile="smoke"), dict(profile="quick")]
    given = [study(small(paper=paper), **how).scope for how in asked]
    assert [list(p.seeds) for scope in given for p in small(paper=paper).planned(scope)] == [
        [4, 2, 9],
        [0],
        [0, 1],
    ]
    fixed = small(paper=paper, seeds=(7,))
    assert [list(p.seeds) for scope in given for p in fixed.planned(scope)] == [[7]] * 3


def test_parts_of_an_artefact_are_run_alone(trained):
    def sweeps(scope):
        base = scope.base(fedper.PAPER, "fig3", "cifar10", **SMALL | {"rounds": 0})
        each = [("", "fedavg"), ("ours", "fedper")]
        return [
            s
            for part, m in each
            for s in scope.sweep(fedper.PAPER, base, {m: use(m)}, {"a": {}}, part=part)
        ]

    s = study(dataclasses.replace(fedper.PAPER, sweeps=sweeps))
    assert set(s.run("fig3", "ours").row) == {"fedper"} and trained == [("fedper", 0)]
    assert set(s.run("fig3", "").row) == {"fedavg"} and set(s.run("fig3").row) == {
        "fedavg",
        "fedper",
    }
    assert len(trained) == 2 and not s.rows().duplicated().any()


def test_what_waits_is_shown_with_the_others_of_its_seed():
    paper = small(seeds=(0, 1))
    *first, last = [e for s in paper.planned(Scope("quick"), "fig3") for e in s.experiments()]
    rows = sweeps.sweep(first)
    assert (last.seed, last.tags["row"]) == (1, "fedper")

    def shown():
        found = study(paper, profile="quick", finished=True).run("fig3")
        return {row: set(of.seed) for row, of in found.groupby("row")}

    assert shown() == {"fedavg": {0, 1}, "fedper": {0}}  # what is kept here is shown, whole or not
    committed.wait(rows[rows.seed == 1], "fedper", "quick", "digits")
    assert shown() == {"fedavg": {0}, "fedper": {0}}
    sweeps.sweep([last])
    assert shown() == {"fedavg": {0, 1}, "fedper": {0, 1}}


def test_tuning_comes_first_and_what_it_chose_is_asked_again(trained, home):
    tuned = {
        "fig3": dataclasses.replace(fedper.FIGURES["fig3"], tuned=True),
        "fig2": fedper.FIGURES["fig2"],
    }

    def sweeps(scope):
        bases = {
            a: scope.base(paper, a, "cifar10", **SMALL | {"method": "fedper", "rounds": 0})
            for a in tuned
        }
        base = bases["fig3"] or bases["fig2"]
        tags = {"artefact": TUNING}
        tried = {f"lr {lr}": {"lr": lr} for lr in (0.1, 0.2)}
        tuning = scope.sweep(
            paper, base.but(partition_args={"val": 0.2}, tags=tags), tried, {"a": {}}, seeds=(7,)
        )
        seen = scope.finished(tuning[0].experiments())
        lr = 0.3 if seen is None else float(seen.row.iloc[-1].removeprefix("lr "))
        each = [
            scope.sweep(paper, b, {f"with {lr}": {"lr": lr}}, {"a": {}}) for b in bases.values()
        ]
        return [*tuning, *each[0], *each[1]]

    paper = dataclasses.replace(fedper.PAPER, artefacts=tuned, sweeps=sweeps)
    s = study(paper)
    assert set(s.run("fig2").row) == {"with 0.3"} and trained == [("fedper", 0)], (
        "not tuned, so nothing else is run"
    )
    assert set(s.run("fig3").row) == {"with 0.2"} and trained[1:] == [
        ("fedper", 7),
        ("fedper", 7),
        ("fedper", 0),
    ]
    assert set(s.run(TUNING).row) == {"lr 0.1", "lr 0.2"} and len(trained) == 4
    assert set(s.rows().artefact) == {"fig2", "fig3", TUNING}
    assert (
        s.scope.finished([e.but(seed=8) for e in paper.planned(s.scope)[0].experiments()]) is None
    )


def test_a_column_that_was_not_evaluated_is_named():
    s = study(small(rounds=0))
    rows = s.run("fig3")
    with pytest.raises(
        ValueError, match=r"fig3: no test accuracy at when='after'; evaluated are \['before'\]"
    ):
        s.curves("fig3", rows, when="after")
    assert plt.get_fignums() == []


def test_what_is_overridden_is_labelled_drawn_apart_and_not_kept(home, trained, capsys):
    about = small(rows={"fedper": {"method": "fedper"}}, rounds=1)
    s = Study(about, profile="smoke", device="cpu", overrides={"rounds": 3})
    s.show("fig3")
    rows, said = s.rows(), "smoke, not the paper's setting (rounds=3)"
    assert set(rows.profile) == {said} and rows["rounds"].max() == 3 and len(trained) == 1
    folders = list((home / "runs" / "figures" / "fedper").iterdir())
    assert folders == [s.folder()] and "-overridden-" in folders[0].name
    line = s.finish()
    assert "rows in" not in line and not (home / "runs" / "results").exists()
    capsys.readouterr()


def test_finishing_without_runs_writes_an_empty_file(home):
    assert study().finish().startswith("0 runs; pfl_core ")
    assert (
        committed.parts("fedper", own=True) == {}
        and (home / "runs/results/fedper.smoke-digits/runs.csv.gz").exists()
    )


# ---------------------------------------------------------------- tables beside the paper's, and what probes recorded

CASE = dict(
    clients=6, partition_args={"groups": 2}, rounds=2, eval_every=1, batch=8, max_samples=16
)
CASE_ROWS = {"local": use("local"), "fedaghn": use("fedaghn") | {"record": ("weights",)}}


def case_study(rounds=0, claims=(), **about):
    """FedAGHN's case study, small; about: what its Artefact says."""
    case = CASE | ({"rounds": rounds} if rounds else {})

    def sweeps(scope):
        base = scope.base(paper, "table3", "cifar10", **case)
        return scope.sweep(paper, base, CASE_ROWS, {"CIFAR-10": {}})

    artefacts = {"table3": dataclasses.replace(fedaghn.PAPER.artefacts["table3"], **about)}
    paper = dataclasses.replace(fedaghn.PAPER, artefacts=artefacts, claims=claims, sweeps=sweeps)
    return Study(paper, profile="smoke", device="cpu", seeds=[0, 1])


@pytest.fixture
def case(home):
    s = case_study()
    return s, s.run("table3")


def test_a_table_beside_the_papers(case):
    s, rows = case
    table = s.compare("table3", rows)
    assert table.caption.startswith(
        "Table 3, profile smoke, data digits, 2 seeds, best validation round, after local training"
    )
    assert "other data, network, partition, clients than the paper's" in table.caption
    published = base.reported("fedaghn").query("table == 'table3'")
    assert set(table.not_run().columns) == set(published.column)
    (column,) = table.ran
    assert column == "CIFAR-10: on digits"
    shown = table.text()[column]
    assert set(shown.index) == {"Local", "FedAGHN"} and set(shown) == {"ours", "ours, last round"}
    picked = contrasts.reproduced(rows, s.paper).groupby("row").value.mean()
    assert shown.ours["FedAGHN"].startswith(f"{picked['fedaghn']:.2f} [")
    cells = report.tables(rows, s.paper, "table3")["acc_pct"]
    assert len(cells) == 16 + 2 and set(cells.verdict) == {"not run", "no published number"}
    assert sorted(p.name for p in s.folder().iterdir()) == ["table3.csv", "table3.md"]
    assert (s.folder() / "table3.md").read_text() == table.markdown() + "\n"


def test_a_table_is_worked_out_once_and_anew_when_its_rows_change(case, monkeypatch):
    s, rows = case
    rows = rows.assign(profile="quick")
    counted, compared = [], report._compared
    monkeypatch.setattr(report, "_compared", lambda *a: counted.append(a) or compared(*a))
    first = s.compare("table3", rows).compared
    whole = first.copy()
    s.beside_published("table3", rows)
    s.advantages("table3", rows.copy())
    assert len(counted) == 1, "picture and leads are made of the table's numbers"
    first["reproduced"] = 0.0  # a reader's frame is the reader's own
    pd.testing.assert_frame_equal(s.compare("table3", rows).compared, whole)
    accuracy = (rows.metric == "acc_pct") & (rows.split == "test")
    rows.loc[accuracy, "value"] = rows.value[accuracy] / 2
    halved = s.compare("table3", rows).compared
    ran = whole.reproduced.notna()
    np.testing.assert_allclose(halved.reproduced[ran], whole.reproduced[ran] / 2)
    assert len(counted) == 2
    assert list(s.compare("table3", rows, select="last").compared.verdict) == list(whole.verdict)
    assert len(counted) == 3, "another rule is another table"


def test_the_legend_stands_once(case):
    s, rows = case
    shown = [s.compare("table3", rows)._repr_html_() for _ in range(3)]
    assert [readable.LEGEND[:40] in page for page in shown] == [True, False, False]
    assert all(readable.LEGEND[:40] in p.read_text() for p in s.folder().glob("*.md"))


def test_a_table_of_several_numbers_is_one_table(home):
    s = Study("flayer", profile="smoke", device="cpu", methods=["fedper"], artefacts=["table1"])
    rows = s.run("table1")
    table = s.compare("table1", rows, metric=("acc_pct", "iterations", "total_s"))
    ends = "", ", iterations", ", seconds in all"
    assert table.ran == [f"CIFAR-10, CNN: on digits{e}" for e in ends]
    one = s.compare("table1", rows, metric="iterations").compared
    accuracy, iterations, _ = table.compared.dropna(subset="reproduced").reproduced
    assert iterations == one.reproduced.dropna().item() and 0 <= accuracy <= 100
    assert "before local training" in table.caption and "iterations" not in table.caption
    assert {p.name for p in s.folder().glob("*.csv")} == {"table1.csv", "table1.iterations.csv"}


def test_a_reading_is_shown_where_there_are_verdicts(case, capsys):
    s, rows = case
    s.reading("table3")
    assert capsys.readouterr().out == "", "smoke has none"
    s.ran["table3", None] = rows.assign(profile="quick")
    s.reading("table3")
    assert "Markdown" in capsys.readouterr().out


def test_titles_say_what_data_were_used(case):
    s, rows = case
    both = pd.concat([rows, rows.assign(column="CIFAR-10, N=6")])
    titles = ["CIFAR-10", "CIFAR-10, fc", "CIFAR-10, N=6: Client 1", "CIFAR-100", "FedAGHN"]
    fig, axes = plots.panels(len(titles))
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title)
    s.figure("any", fig, both)
    assert [ax.get_title() for ax in axes] == [f"{t}\non digits" for t in titles[:3]] + titles[3:]


def test_a_copy_of_the_data_is_named_in_captions(case, monkeypatch):
    s, rows = case
    monkeypatch.setattr(
        committed, "copy_of", lambda run: "half of 1,797 samples" if run == rows.run.iloc[0] else ""
    )
    said = s.compare("table3", rows).caption
    assert "profile smoke, data digits (half of 1,797 samples), 2 seeds" in said
    assert report.data_sets(rows[rows.row == "fedaghn"]) == "digits"


def test_captions_name_a_gpu_that_computed_rows(case):
    s, rows = case
    assert " on " not in s.compare("table3", rows).caption
    card = rows.assign(device="NVIDIA H200")
    assert "2 seeds, on NVIDIA H200," in s.compare("table3", card).caption
    some = rows.device.where(rows.row != "local", "NVIDIA H200")
    assert (
        "2 seeds, in part on NVIDIA H200," in s.compare("table3", rows.assign(device=some)).caption
    )


def test_captions_say_where_rows_of_a_column_have_other_seeds(case):
    s, rows = case
    said = "Some rows have more seeds: their means are over other draws of clients."
    assert said not in s.compare("table3", rows).caption
    fewer = rows[(rows.row != "local") | (rows.seed == 0)]
    caption = s.compare("table3", fewer).caption
    assert "1 to 2 seeds," in caption and said in caption


def test_clients_are_read_at_the_round_that_is_reported(case):
    s, rows = case
    clients = s.clients(rows)
    picked = contrasts.reproduced(rows, s.paper).set_index(["row", "seed"]).value
    for key, mean in clients.groupby(["row", "seed"]).acc_pct.mean().items():
        assert mean == pytest.approx(picked[key])
    standing = s.standing("table3", rows)
    assert (
        set(standing.index) == {"Local", "FedAGHN"} and (s.folder() / "table3.standing.md").exists()
    )
    gap = (
        clients[clients.row == "fedaghn"].acc_pct.mean()
        - clients[clients.row == "local"].acc_pct.mean()
    )
    assert float(standing.loc["Local", "FedAGHN ahead by"]) == pytest.approx(gap, abs=0.006)


def test_what_a_probe_recorded_comes_from_store_and_from_committed_files_alike(
    case, home, monkeypatch
):
    s, rows = case
    (first, second) = s.probed(rows, "weights")
    assert (first.row, first.column, first.seed, second.seed) == ("fedaghn", "CIFAR-10", 0, 1)
    assert list(first.rounds) == [0, 1, 2] and first.at()["fc"].shape == (6, 6)
    assert (first.at(1)["fc"] == first.values["fc"][1]).all() and (
        first.at(99)["fc"] == first.at()["fc"]
    ).all()
    committed.save(s.rows(), "fedaghn", "quick", "digits")
    committed.publish("fedaghn")
    monkeypatch.setenv("PFL_RUNS", str(home / "elsewhere"))
    again = case_study()
    served = again.run("table3")
    assert not list((home / "elsewhere").glob("store/*/")), "nothing was trained again"
    back = again.probed(served, "weights")
    assert (back[1].at()["fc1"] == second.at()["fc1"]).all() and again.clients(served).equals(
        s.clients(rows)
    )


@pytest.mark.slow
def test_derived_numbers_are_rows_of_their_run(case):
    s, rows = case
    one = s.probed(rows, "weights")[0]
    there = dict(artefact="table4", row="whole, self", column="First", metric="weight", value=0.25)
    got = s.derive(rows, [dict(run=one.run, metric="self", value=0.5), dict(run=one.run) | there])
    kept = s.rows()
    found = kept[kept["average"] == "derived"]
    assert found.metric.tolist() == ["self", "weight"] and set(found.run) == {one.run}
    assert got[["artefact", "row", "column", "seed", "dataset"]].to_numpy().tolist() == [
        ["table3", "fedaghn", "CIFAR-10", 0, "digits"],
        ["table4", "whole, self", "First", 0, "digits"],
    ]
    s.heats("fig4", {k: v for k, v in one.at().items()}, rows, "Weights.")
    assert (
        len(pd.read_csv(s.folder() / "fig4.csv")) == 36 * len(one.at())
        and (s.folder() / "fig4.png").exists()
    )


@pytest.mark.slow
def test_an_artefacts_numbers_stand_behind_its_rows_and_are_compared(home, capsys):
    def numbers(rows, recorded):
        assert set(rows.row) == set(CASE_ROWS) and [p.seed for p in recorded("weights")] == [0, 1]
        return [
            dict(run=p.run, metric="acc_gain", value=float(len(p.rounds)))
            for p in recorded("weights")
        ]

    s = case_study(numbers=numbers, show=("compare", "standing"))
    rows = s.run("table3")
    assert rows["average"].tolist()[-2:] == ["derived"] * 2 and rows.value.tolist()[-2:] == [
        3.0,
        3.0,
    ]
    assert s.rows().equals(
        pd.concat([s.rows()[s.rows()["average"] != "derived"], rows.tail(2)], ignore_index=True)
    )
    with pd.option_context("display.width", 200, "display.max_columns", None):
        s.show("table3")
    out = capsys.readouterr().out
    assert out.startswith("Table 3, profile smoke") and "FedAGHN ahead by" in out
    assert set(contrasts.reproduced(rows, s.paper, "acc_gain").value) == {3.0}
    assert "acc_gain" not in set(contrasts.reproduced(rows, s.paper).metric)


@pytest.mark.slow
def test_what_claims_ask_of_numbers_is_kept_as_it_was_at_three_quarters(home):
    def numbers(rows, recorded):
        ends = rows.groupby("run")["rounds"].max()
        made = [dict(run=run, metric=m, value=float(ends[run])) for run in ends.index for m in "ab"]
        last = [dict(run=p.run, metric="c", value=float(p.rounds[-1])) for p in recorded("weights")]
        return made + last

    asked = Ask("ahead", asks.comparisons("a | c > 0"), metrics=True)
    claim = base.Claim("", "", "table3", lambda evidence: [], ask=asked)
    s = case_study(4, (claim,), numbers=numbers)
    rows = s.run("table3")
    found = rows[rows["average"] == "derived"].groupby("metric").value.agg(set).to_dict()
    past = {f"a{contrasts.PAST}": {3.0}, f"c{contrasts.PAST}": {3.0}}
    assert found == dict.fromkeys("abc", {4.0}) | past
    s = case_study(2, (dataclasses.replace(claim, ask=None),), numbers=numbers)
    rows = s.run("table3")
    found = rows[rows["average"] == "derived"].groupby("metric").value.agg(set).to_dict()
    past = {f"{m}{contrasts.PAST}": {1.0} for m in "ab"}
    assert found == dict.fromkeys("abc", {2.0}) | past, "nothing recorded after half of the rounds"


# ---------------------------------------------------------------- the best evidence there is


def committed_at(home, profile, cells, paper="pfedla", artefact="table1", average="client"):
    """Rows of a profile that were published: {(row, column, seed): accuracy}."""
    blank = dict.fromkeys(ROW_COLUMNS, "") | dict(paper=paper, artefact=artefact, profile=profile)
    blank |= dict(rounds=1, when="before", split="test", metric="acc_pct", average=average)
    blank |= dict(dataset="cifar10", partition="pfedla_noniid1", model="lenet")
    rows = [
        blank
        | dict(
            row=r,
            column=c,
            seed=s,
            value=v,
            method=r,
            run=f"{profile} {r} {c} {s}".replace(" ", "_"),
        )
        for (r, c, s), v in cells.items()
    ]
    made.publish(home / "home" / "results", pd.DataFrame(rows), paper, profile, "paper")


CIFAR = "CIFAR-10, N=10"
TWO = {("local", CIFAR, 0): 60.0, ("pfedla", CIFAR, 0): 61.0}


def test_a_notebook_shows_the_fullest_profile_that_is_committed(home, trained):
    committed_at(home, "medium", TWO)
    s = Study("pfedla", profile="best", device="cpu")
    rows = s.run("table1")
    assert not trained and set(rows.profile) == {"medium"} and sorted(rows.value) == [60.0, 61.0]
    table = s.compare("table1", rows)
    assert table.caption.startswith("Table 1, profile medium, data CIFAR-10, 1 seed")
    assert (s.folder(s.scope_of("table1")) / "table1.md").parent.name == "medium-paper"
    assert (s.scope_of("table1.kept").profile, s.scope_of("fig1").profile) == ("medium", "quick")
    assert set(s.claims().frame.query("artefact == 'table1'").verdict) <= {"open", "not run"}
    kept = {p.parent.name: pd.read_csv(p) for p in places.figures_folder().rglob("claims.csv")}
    assert set(kept) == {"medium-paper", "quick-digits"}
    assert "table1" in set(kept["medium-paper"].artefact) and len(kept["quick-digits"])
    assert not set(kept["medium-paper"].says) & set(kept["quick-digits"].says)
    assert "rows in" not in s.finish() and not places.kept_folder().exists()
    committed_at(home, "paper", TWO)
    assert Study("pfedla", profile="best", device="cpu").scope_of("table1").profile == "paper"


def test_one_seed_of_a_fuller_profile_does_not_displace_two_of_a_smaller(home, trained):
    of = {n: {(row, CIFAR, n): 60.0 for row in ("local", "pfedla")} for n in (0, 1)}
    committed_at(home, "medium", of[0] | of[1])
    # Local has all its rounds at medium already, so that its seeds count at paper, too.
    committed_at(home, "paper", of[0] | {("local", CIFAR, 1): 60.0})
    assert Study("pfedla", profile="best").scope_of("table1").profile == "medium"
    committed_at(home, "paper", of[0] | of[1])
    assert Study("pfedla", profile="best").scope_of("table1").profile == "paper" and not trained


@pytest.mark.parametrize(
    ("cells", "how"),
    [
        ({("pfedla", CIFAR, 0): 60.0}, {}),
        ({("local", CIFAR, 0): 60.0, ("fedavg", CIFAR, 0): 61.0}, {}),
        ({("local", CIFAR, 0): 60.0, ("pfedla", "FMNIST, N=10", 0): 61.0}, {}),
        ({("local", CIFAR, 5): 60.0, ("pfedla", CIFAR, 5): 61.0}, {}),
        (TWO, dict(datasets=("digits",))),
        (TWO, dict(seeds=(3,))),
        (TWO, dict(methods=("fedavg",))),
    ],
    ids=[
        "a row",
        "baselines",
        "a row a column",
        "seeds not planned",
        "data asked for",
        "seed",
        "method",
    ],
)
def test_too_little_is_not_evidence(home, cells, how):
    committed_at(home, "medium", cells)
    s = Study("pfedla", device="cpu", profile="quick")
    assert best(s.paper, dataclasses.replace(s.scope, **how), "table1") is None


def test_of_figures_those_columns_and_seeds_are_shown_that_have_all_rows(home):
    s = Study("fedper", device="cpu")
    planned = s.paper.planned(dataclasses.replace(s.scope, profile="medium"), "fig2")
    planned = [p for p in planned if p.artefact == "fig2"]
    all_ = {(r, c, n): 60.0 for p in planned for r in p.rows for c in p.columns for n in p.seeds}
    (row, column, seed), *_ = all_
    for lost in (
        {(row, column, seed)},  # one run: its seed of its column
        {cell for cell in all_ if cell[::2] == (row, seed)},  # a row of one seed
        {cell for cell in all_ if cell[0] == row},  # a row: nothing is left
        set(),
    ):
        some = {cell: v for cell, v in all_.items() if cell not in lost}
        committed_at(home, "medium", some, "fedper", "fig2")
        _, rows = best(s.paper, s.scope, "fig2") or (None, pd.DataFrame(columns=ROW_COLUMNS))
        gone = {(c, n) for _, c, n in lost}
        assert {*zip(rows.row, rows.column, rows.seed, strict=True)} == {
            cell for cell in all_ if cell[1:] not in gone
        }


def fed_of(*columns, profile="medium"):
    return pd.DataFrame({"profile": profile, "column": columns})


@pytest.mark.parametrize(
    ("paper", "artefact", "ran", "whole"),
    [
        (
            "fedper",
            "fig2",
            ["MobileNet of half width, k=10", "MobileNet of half width, k=4"],
            {
                "MobileNet of half width, k=4": True,
                "MobileNet, k=8": False,
                "MobileNet of half width, k=10": True,
                "ResNet-34, k=4": False,
                "ResNet-34, k=8": False,
                "ResNet-34, k=10": False,
            },
        ),
        (
            "pfedla",
            "fig5",
            ["CIFAR-10, classifier", "CIFAR-10, mean of all layers"],
            {
                "CIFAR-10, classifier": True,
                "CIFAR-10, mean of all layers": True,
                "EMNIST": False,
                "CIFAR-10, rate 0.5": False,
            },
        ),
        ("pfedla", "fig5", ["by another word"], {"by another word": True}),
    ],
)
def test_a_papers_grid_is_kept_and_says_what_was_not_run(paper, artefact, ran, whole):
    got = drawing.whole(
        base.paper(paper), Scope("paper"), artefact, dict.fromkeys(ran, True), fed_of(*ran)
    )
    assert list(got.items()) == list(whole.items())
    small = fed_of(*ran, profile="quick")
    some = dict.fromkeys(ran, True)
    assert drawing.whole(base.paper(paper), Scope("paper"), artefact, some, small) == some
