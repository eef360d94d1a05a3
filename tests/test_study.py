"""A notebook from the inside: parameters refused before anything runs, stand-ins, and one real sweep from rows to published files."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch

from pfl_core.data import pools as data
from pfl_core.experiments import compute
from pfl_core.experiments import run as runs
from pfl_core.experiments.run import ROW_COLUMNS
from pfl_core.methods.base import METHODS
from pfl_core.papers import fedper, presets, report
from pfl_core.papers.base import FULL
from pfl_core.papers.report import VIEWS
from pfl_core.papers.study import PROFILES, STAND_INS, Study
from pfl_core.util import paths

# Where a display is set, Agg says that it shows nothing.
pytestmark = pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
SMALL = dict(model="lenet", model_args={"kernels": 4}, clients=5, partition_args={"k": 4}, rounds=2)
BOTH = {"fedavg": {"method": "fedavg"}, "fedper": {"method": "fedper"}}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A project with nothing run and nothing committed."""
    monkeypatch.setattr(paths, "results_folder", lambda: tmp_path / "home" / "results")
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


def study(**how):
    return Study("fedper", **{"profile": "smoke", "device": "cpu"} | how)


def sweep(s, columns=("a",), **changes):
    return s.sweep(s.base("fig3", "cifar10", **SMALL | changes), BOTH, {c: {} for c in columns})


# ---------------------------------------------------------------- parameters

WRONG = {
    "profile": (dict(profile="fast"), ["profile: 'fast' is unknown; known are " + ", ".join(PROFILES)]),
    "no profile": (dict(profile=None), ["profile: None is unknown"]),
    "datasets": (dict(datasets=["digits", "cifar"]), ["datasets: 'cifar' is unknown", *data.list_datasets()]),
    "methods": (dict(methods=["fedpr"]), ["methods: 'fedpr' is unknown", *METHODS, *VIEWS]),
    "artefacts": (dict(artefacts=["fig2", "table9"]), ["artefacts: 'table9'", *fedper.ARTEFACTS]),
    "in a list": (dict(methods=[["fedper"]]), ["methods: ['fedper'] is unknown; did you mean 'fedper'? known are"]),
    "string": (dict(datasets="digits"), ["datasets='digits': give a list, such as ['", "an empty list means"]),
    "tuple": (dict(methods=("fedper",)), ["methods=('fedper',): give a list"]),
    "empty string": (dict(artefacts=""), ["artefacts='': give a list, such as ['fig2']"]),
    "recompute": (dict(recompute="true"), ["recompute='true': got str, allowed is True or False (not a string)"]),
    "recompute 1": (dict(recompute=1), ["recompute=1: got int"]),
    "seeds": (dict(seeds=3), ["seeds=3: give a list of integers >= 0"]),
    "seed text": (dict(seeds=["0"]), ["seeds=['0']: give a list of integers"]),
    "seed bool": (dict(seeds=[True]), ["seeds=[True]"]),
    "seed float": (dict(seeds=[1.0]), ["seeds=[1.0]"]),
    "seed negative": (dict(seeds=[0, -1]), ["seeds=[0, -1]: give a list of integers >= 0"]),
    "device": (dict(device="gpu"), ["device 'gpu' is unknown; did you mean 'cpu'? known are auto, cpu, cuda"]),
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
    with pytest.raises(ValueError, match="paper 'fedpr' is unknown; did you mean 'fedper'. known are"):
        Study("fedpr")


def test_a_gpu_that_is_absent_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device cuda was asked for, but torch sees no GPU here; use device='cpu' or"):
        study(device="cuda")
    monkeypatch.setenv("PFL_DEVICE", "cuda")
    with pytest.raises(ValueError, match="no GPU"):
        study(device="auto")
    assert study(device="cpu").device == "cpu"


def test_defaults_are_the_profiles_own(home):
    s = study(datasets=[], methods=None, seeds=[], artefacts=[])
    assert (s.label, s.seeds, s.recompute) == ("digits", presets.seeds("smoke", True), False)
    assert s.artefacts == fedper.ARTEFACTS and s.folder == home / "runs" / "figures/fedper/smoke-digits"
    assert study(seeds=[3, 0]).seeds == [3, 0]
    labels = {study(profile=p, datasets=d).label for p, d in (("paper", None), ("quick", ["mnist", "cifar10"]))}
    assert labels == {"paper", "mnist+cifar10"}
    for profile in PROFILES:
        assert study(profile=profile, datasets=["cifar10"]).seeds == presets.seeds(profile, False)


# ---------------------------------------------------------------- data


@pytest.mark.parametrize("profile", ["smoke", "quick"])
def test_embedded_data_stand_in_for_the_papers(profile):
    s = study(profile=profile)
    served = {name: s.data(name) for name in STAND_INS}
    assert {served[n] for n in ("cifar10", "mnist", "fashion_mnist", "emnist-digits")} == {"digits"}
    assert served["cifar100"] == served["tiny_imagenet"] == "digits100"
    assert served["flickr_aes"] == "raters_digits100" and served["omniglot"] is None is served["ag_news"]
    assert s.data("digits") == "digits" and s.data("emnist") is None
    assert s.raters == ", synthetic raters"


@pytest.mark.parametrize("profile", FULL)
def test_the_paper_profile_takes_the_papers_data(profile):
    s = study(profile=profile)
    assert [s.data(n) for n in STAND_INS] == list(STAND_INS) and s.raters == ""
    assert (s.label, s.folder.name) == ("paper", f"{profile}-paper")


@pytest.mark.parametrize("profile", PROFILES)
def test_data_that_are_asked_for_are_the_only_ones(profile):
    s = study(profile=profile, datasets=["digits100", "cifar10", "raters_cifar10"])
    assert (s.data("cifar10"), s.data("cifar100"), s.data("mnist")) == ("cifar10", "digits100", None)
    assert s.data("flickr_aes") == "raters_cifar10" and s.raters != ""
    assert study(profile=profile, datasets=["flickr_aes"]).raters == ""


def test_every_stand_in_is_a_data_set():
    assert set(STAND_INS) | {d for ds in STAND_INS.values() for d in ds} <= set(data.list_datasets())


# ---------------------------------------------------------------- base and pick


def test_base_is_the_preset_over_what_serves():
    e = study().base("fig3", "cifar10", **SMALL)
    want = fedper.setting("fig3", "smoke", "digits") | SMALL
    assert {k: getattr(e, k) for k in want} == want and e.dataset == "digits"
    assert e.tags == {"paper": "fedper", "artefact": "fig3", "profile": "smoke"}


def test_what_is_not_run_says_so_and_draws_nothing(capsys, home):
    s = study(artefacts=["fig2"], datasets=["digits"])
    for base in (s.base("fig3", "cifar10"), s.base("fig2", "flickr_aes")):
        assert base is None
        rows = s.sweep(base, BOTH)
        assert rows.empty and list(rows.columns) == ROW_COLUMNS
        assert s.curves("fig3", rows) is None and s.spread("fig3", rows) is None
        s.show_partitions(base, {"k": {}})
    assert study().base("fig2", "omniglot") is None
    assert capsys.readouterr().out.splitlines() == [
        "fig3: not run, not among artefacts=['fig2']",
        "fig2: not run, needs flickr_aes (datasets=['digits'])",
        "fig2: not run, needs omniglot (datasets=the embedded ones)",
    ]
    assert not (home / "runs").exists()
    assert set(s.claims().verdict) == {"not run"}


def test_an_unknown_artefact_of_a_cell_is_a_mistake():
    with pytest.raises(ValueError, match="artefact: 'fig99' is unknown; did you mean 'fig9'. known are fig2"):
        study().base("fig99", "cifar10")


def test_medium_runs_what_its_paper_names_and_as_many_seeds(capsys, monkeypatch):
    monkeypatch.setattr(fedper, "MEDIUM", {"fig2": 3, "fig3": 1})
    full = fedper.setting
    monkeypatch.setattr(
        fedper, "setting", lambda a, profile, *more: full(a, "paper" if profile == "medium" else profile, *more)
    )
    s = study(profile="medium", datasets=["cifar10"])
    seeds = {a: [e.seed for e in s.cells(s.base(a, "cifar10"), {"a": {}}, None, 7)] for a in ("fig2", "fig3", "fig4")}
    assert seeds == {"fig2": [0, 1, 2], "fig3": [0], "fig4": []} and s.rows_for("fig4", "cifar10") == {}
    asked = study(profile="medium", datasets=["cifar10"], seeds=[5])
    assert [e.seed for e in asked.cells(asked.base("fig2", "cifar10"), {"a": {}}, None, None)] == [5]
    said = "fig4: not run at profile medium, which has fig2, fig3; use profile='paper'"
    assert capsys.readouterr().out.splitlines() == [said]
    monkeypatch.setattr(fedper, "MEDIUM", {})
    assert s.base("fig2", "cifar10") is None and "which has nothing of this paper;" in capsys.readouterr().out


def test_pick_follows_profile_and_data():
    three = dict(quick="q", smoke="s")
    values = [study(profile=p).pick("p", **three) for p in ("paper", "quick", "smoke")]
    assert values == ["p", "q", "s"] and study().pick("p", quick="q") == "q"
    assert study(profile="quick", datasets=["cifar10"]).pick("p", **three) == "p"
    assert study(profile="smoke", datasets=["cifar10"]).pick("p", **three) == "s"
    assert (
        study(profile="medium").pick("p", **three)
        == "p"
        == study(profile="quick", datasets=["mnist"]).pick("p", quick=0)
    )
    assert [study(profile=p).pick("p", quick=0, medium="m") for p in PROFILES] == [0, 0, "m", "p"]


# ---------------------------------------------------------------- sweeps, figures, rows


def test_from_a_sweep_to_published_rows_and_back(home, trained, capsys, monkeypatch):
    s = study(seeds=[0, 1])
    rows = sweep(s)
    assert trained == [("fedavg", 0), ("fedavg", 1), ("fedper", 0), ("fedper", 1)]
    assert list(rows.columns) == ROW_COLUMNS and rows.run.nunique() == 4 and set(rows["round"]) == {0, 2}
    assert rows[["paper", "artefact", "column", "profile", "dataset"]].drop_duplicates().to_numpy().tolist() == [
        ["fedper", "fig3", "a", "smoke", "digits"]
    ]
    # figures
    last = s.curves("fig3", rows, "K_P = 2.")
    assert list(last.index) == ["fedavg", "fedper"] and last.map(lambda v: "±" in v).to_numpy().all()
    assert s.spread("fig3 spread", rows).shape == (2, 1)
    whole = s.base("fig3", "cifar10", **SMALL, max_samples=0)
    s.show_partitions(whole, {"k = 4": {}, "k = 6": {"partition_args": {"k": 6}}})
    held = pd.read_csv(s.folder / "partition.csv").groupby(["column", "client"])["class"].nunique()
    assert held.groupby("column").agg(["min", "max", "size"]).to_numpy().tolist() == [[4, 4, 5], [6, 6, 5]]
    shown = pd.read_csv(s.folder / "fig3.csv")
    assert len(shown) == 8 and set(shown.metric) == {"acc_pct"} and set(shown.split) == {"test"}
    assert set(pd.read_csv(s.folder / "fig3 spread.csv").metric) == {"acc_pct", "acc_sd", "acc_min", "acc_max"}
    assert plt.get_fignums() == [], "figures are closed once shown"
    # tables and claims
    claims = s.claims()
    assert claims[claims.artefact == "fig3"].verdict.isin(["holds", "does not hold"]).all()
    assert set(claims[claims.artefact != "fig3"].verdict) == {"not run"} and set(claims.profile) == {"smoke"}
    said = s.finish()
    assert said.startswith("4 runs; pfl_core ") and "runs/results/fedper.smoke-digits.csv" in said
    assert str(home) not in said + capsys.readouterr().out, "no path of this computer in a notebook"
    kinds = [f"{n}.{k}" for n in ("fig3", "fig3 spread", "partition") for k in ("csv", "pdf", "png")]
    assert sorted(p.name for p in s.folder.iterdir()) == sorted(
        [*kinds, *(f"claims.{k}" for k in ("csv", "md", "tex"))]
    )
    # a second notebook finds the runs in the store, also where it should not trust committed rows
    again = study(seeds=[0, 1], recompute=True)
    pd.testing.assert_frame_equal(sweep(again), rows)
    assert len(trained) == 4 and again.rows().equals(s.rows())
    # what is committed serves another computer, unless it is to be computed again
    with pytest.raises(ValueError, match="nothing of 'fedper' to publish"):
        report.publish("fedper")
    written = home / "runs" / "results" / "fedper.smoke-digits.csv"
    written.rename(written.with_name("fedper.quick-digits.csv"))
    (home / "home").mkdir()
    assert [p.name for p in report.publish("fedper")] == ["fedper.quick-digits.csv", "SHA256SUMS"]
    monkeypatch.setenv("PFL_RUNS", str(home / "elsewhere"))
    served = sweep(study(seeds=[0, 1]))
    assert len(trained) == 4 and not list((home / "elsewhere").glob("store/*/"))
    pd.testing.assert_frame_equal(served, rows.assign(value=rows.value.round(4)), check_dtype=False)
    sweep(study(seeds=[1], methods=["fedper"], recompute=True))
    assert trained[4:] == [("fedper", 1)]


def test_methods_restrict_the_rows(trained):
    s = study(methods=["fedper"], seeds=[5])
    rows = sweep(s, ("a", "b"), rounds=0)
    assert set(rows.method) == {"fedper"} == set(rows.row) and set(rows.column) == {"a", "b"}
    assert trained == [("fedper", 5)], "two columns alike are one run"
    base = s.base("fig4", "cifar10", method="fedper", **SMALL | {"rounds": 0})
    depth = {"K_P = 1": {"head_depth": 1}, "K_P = 2": {}, "global": {"method": "fedavg"}}
    assert list(dict.fromkeys(s.sweep(base, depth).row)) == ["K_P = 1", "K_P = 2"]
    nothing = s.sweep(base, {"global": {"method": "fedavg"}})
    assert nothing.empty and s.curves("fig4", nothing) is None
    assert set(s.rows().artefact) == {"fig3", "fig4"} and not s.rows().duplicated().any()
    view = {"fedavg_ft": {"method": "fedavg"}, "fedavg": {"method": "fedavg"}}
    assert set(study(methods=["fedavg_ft"]).sweep(base, view).row) == {"fedavg_ft"}, (
        "a row may be named as the view it is"
    )


def test_how_many_seeds_is_said_for_quick_only(monkeypatch):
    asked = []
    monkeypatch.setattr(runs, "sweep", lambda cells, **how: asked.extend(e.seed for e in cells) or pd.DataFrame())
    for s in (study(seeds=[4, 2, 9]), study(profile="smoke"), study(profile="quick")):
        s.sweep(s.base("fig3", "cifar10"), {"fedper": {"method": "fedper"}}, seeds=2)
    assert asked == [4, 2, 9, 0, 0, 1]


def test_a_column_that_was_not_evaluated_is_named():
    s = study()
    rows = sweep(s, rounds=0)
    with pytest.raises(ValueError, match=r"fig3: no test accuracy at when='after'; evaluated are \['before'\]"):
        s.curves("fig3", rows, when="after")
    assert plt.get_fignums() == []


def test_finishing_without_runs_writes_an_empty_file(home):
    assert study().finish().startswith("0 runs; pfl_core ")
    assert report.read_rows(home / "runs/results/fedper.smoke-digits.csv").empty


# ---------------------------------------------------------------- tables beside the paper's, and what probes recorded

CASE = dict(clients=6, partition_args={"groups": 2}, rounds=2, eval_every=1, batch=8, max_samples=16)
CASE_ROWS = {"local": {"method": "local"}, "fedaghn": {"method": "fedaghn", "record": ("weights",)}}


@pytest.fixture
def case(home):
    s = Study("fedaghn", profile="smoke", device="cpu", seeds=[0, 1])
    base = s.base("table3", "cifar10", **CASE)
    return s, s.sweep(base, CASE_ROWS, {"CIFAR-10": {}})


def test_a_table_beside_the_papers(case, capsys):
    s, rows = case
    got = s.compare("table3", rows)
    said = capsys.readouterr().out
    assert said.startswith(
        "Table 3, profile smoke, data digits in place of the paper's, 2 seeds, best validation round"
    )
    assert "after local training" in said and said.rstrip().endswith("not run at smoke: CIFAR-100; CIFAR-100*; TINY")
    published = report.published("fedaghn").query("table == 'table3' and column == 'CIFAR-10'").set_index("row").value
    assert list(got.index) == list(published.index) and set(got["CIFAR-10"]) >= {"reported", "reproduced", "last"}
    assert got.loc["cfl", ("CIFAR-10", "reproduced")] == "not run"
    picked = report.reproduced(rows, "fedaghn").groupby("row").value.mean()
    assert got.loc["fedaghn", ("CIFAR-10", "reproduced")].startswith(f"{picked['fedaghn']:.2f}")
    cells = pd.read_csv(s.folder / "table3.cells.csv")
    assert len(cells) == 16 and set(cells.verdict) == {"not run", "not run at paper scale"}
    assert {p.suffix for p in s.folder.glob("table3.*")} == {".csv", ".md", ".tex"}


def test_clients_are_read_at_the_round_that_is_reported(case):
    s, rows = case
    clients = s.clients(rows)
    picked = report.reproduced(rows, "fedaghn").set_index(["row", "seed"]).value
    for key, mean in clients.groupby(["row", "seed"]).acc_pct.mean().items():
        assert mean == pytest.approx(picked[key])
    standing = s.standing("table3", rows)
    assert set(standing.index) == {"local", "fedaghn"} and (s.folder / "table3.standing.md").exists()
    gap = clients[clients.row == "fedaghn"].acc_pct.mean() - clients[clients.row == "local"].acc_pct.mean()
    assert standing.loc["local", "fedaghn ahead by"] == pytest.approx(gap, abs=0.006)


def test_what_a_probe_recorded_comes_from_store_and_from_committed_files_alike(case, home, monkeypatch):
    s, rows = case
    (first, second) = s.probed(rows, "weights")
    assert (first.row, first.column, first.seed, second.seed) == ("fedaghn", "CIFAR-10", 0, 1)
    assert list(first.rounds) == [0, 1, 2] and first.at()["fc"].shape == (6, 6)
    assert (first.at(1)["fc"] == first.values["fc"][1]).all() and (first.at(99)["fc"] == first.at()["fc"]).all()
    s.finish()
    (home / "home" / "results").mkdir(parents=True)
    for kind in ("csv", "npz"):
        name = f"results/fedaghn.smoke-digits.{kind}"
        (home / "runs" / name).rename(home / "home" / name.replace("smoke", "quick"))
    monkeypatch.setenv("PFL_RUNS", str(home / "elsewhere"))
    again = Study("fedaghn", profile="smoke", device="cpu", seeds=[0, 1])
    served = again.sweep(again.base("table3", "cifar10", **CASE), CASE_ROWS, {"CIFAR-10": {}})
    assert not list((home / "elsewhere").glob("store/*/")), "nothing was trained again"
    back = again.probed(served, "weights")
    assert (back[1].at()["fc1"] == second.at()["fc1"]).all() and again.clients(served).equals(s.clients(rows))


def test_derived_numbers_are_rows_of_their_run(case):
    s, rows = case
    one = s.probed(rows, "weights")[0]
    there = dict(artefact="table4", row="whole, self", column="First", metric="weight", value=0.25)
    got = s.derive(rows, [dict(run=one.run, metric="self", value=0.5), dict(run=one.run) | there])
    kept = s.rows()
    found = kept[kept["mean"] == "derived"]
    assert found.metric.tolist() == ["self", "weight"] and set(found.run) == {one.run}
    assert got[["artefact", "row", "column", "seed", "dataset"]].to_numpy().tolist() == [
        ["table3", "fedaghn", "CIFAR-10", 0, "digits"],
        ["table4", "whole, self", "First", 0, "digits"],
    ]
    s.heats("fig4", {k: v for k, v in one.at().items()}, rows, "Weights.")
    assert len(pd.read_csv(s.folder / "fig4.csv")) == 36 * len(one.at()) and (s.folder / "fig4.png").exists()
