"""The explorers: what each view shows of a small store, its code and controls; training live."""

import time

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from pfl_core.analysis import plots
from pfl_core.analysis import stats as analysis
from pfl_core.data.federation import Federation
from pfl_core.experiments import run as runs
from pfl_core.experiments.build import federation
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.sweep import sweep
from pfl_core.util import paths
from pfl_papers import places
from pfl_papers.evidence import committed
from pfl_papers.explore import choices, sources, training, views, widgets, words
from tests import made

SMALL = Experiment(
    dataset="digits",
    partition="groups",
    clients=10,
    model="lenet",
    model_args={"kernels": 2},
    rounds=3,
    batch=10,
    lr=0.1,
    max_samples=20,
)
RUNS = {
    "fedavg": {},
    "fedper": {"method": "fedper"},
    "fedaghn": {"method": "fedaghn", "record": ("weights",)},
    "pfedhn": {"method": "pfedhn", "record": ("embeddings",)},
}
COLUMN = "digits, groups, 10 clients, lenet (kernels=2), max_samples=20"
TRAINED = "rounds=3, batch=10, lr=0.1"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{label: Result} of the only runs that there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PFL_RUNS", str(tmp_path_factory.mktemp("runs")))
        empty = tmp_path_factory.mktemp("results")
        patch.setattr(places, "results_folder", lambda: empty)
        yield {
            label: runs.run(SMALL.but(**changes), executor="threads")
            for label, changes in RUNS.items()
        }


@pytest.fixture
def nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path)


def row(method: str) -> str:
    return f"{method}, {TRAINED}"


def default(name: str, **wanted):
    show, choices = views.VIEWS[name]
    return show(**choices({"column": COLUMN} | wanted).values)


def by_its_code(shown: choices.Shown):
    """What a view's line of code gives, in a namespace of its own."""
    imports, _, call = shown.code.rpartition("; ")
    scope = {}
    exec(imports, scope)
    return eval(call, scope)


# -- views -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["runs", "clients", "collaboration", "embedding"])
def test_a_view_over_results_and_its_code_are_the_same(name, results):
    shown = default(name)
    again = by_its_code(shown)
    assert isinstance(again, Figure) and plots.compact(again) == plots.compact(shown.figure)
    assert len(shown.table) and sources.OWN in shown.code


def test_partition_view(results):
    shown = views.partition("digits", "dirichlet", 8, seed=3, alpha=0.3)
    counts = by_its_code(shown)
    same = Experiment(
        dataset="digits", partition="dirichlet", partition_args={"alpha": 0.3}, clients=8, seed=3
    )
    assert (counts == federation(same).counts()).all()
    assert shown.table.loc["training samples", "most"] == counts.sum(1).max()
    share = counts / counts.sum(1, keepdims=True)
    apart = np.abs(share[:, None] - share[None]).sum(-1) / 2
    nearest = (apart + 9 * np.eye(8)).min(1)
    assert shown.table.loc["distance to the nearest client", "average"] == pytest.approx(
        nearest.mean(), abs=0.005
    )


def test_partition_controls_follow_the_scheme():
    assert {"alpha", "clients"} <= views.partition_choices({}).keys()
    classes = views.partition_choices({"scheme": "pfedhn_classes", "alpha": 5.0})
    assert "alpha" not in classes and classes["k"].value == 2
    assert "alpha" not in classes.values and views.partition(**classes.values).figure


def test_an_impossible_partition_says_what_is_possible():
    with pytest.raises(ValueError, match="groups=5 must divide 10 classes and 7 clients"):
        views.partition("digits", "groups", 7, groups=5)


def test_rows_are_called_by_what_differs(results):
    assert set(sources.rows(sources.OWN).query("column == @COLUMN").row) == set(map(row, RUNS))


def test_runs_on_other_data_stay_apart_and_the_newest_come_first(nothing):
    runs.run(SMALL.but(rounds=1))
    runs.run(SMALL.but(clients=5, method="fedprox", method_args={"mu": 0.5}, rounds=1, seed=1))
    columns = sources.rows(sources.OWN).column.unique().tolist()
    assert columns == [COLUMN.replace("10 clients", "5 clients"), COLUMN]
    newest = sources.rows(sources.OWN).query("column != @COLUMN")
    assert newest.row.unique().tolist() == ["fedprox (mu=0.5), rounds=1, batch=10, lr=0.1"]
    assert views.runs_choices({})["column"].value == columns[0]


def test_runs_are_listed_by_what_differs_between_them(tmp_path, monkeypatch, results):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    for lr, seed in ((0.1, 0), (0.1, 1), (0.2, 0)):
        runs.run(SMALL.but(lr=lr, seed=seed, rounds=1))
    runs.run(SMALL.but(method="ditto", method_args={"lam": 0.5}, rounds=1))
    frame = sources.rows(sources.OWN)
    assert list(sources.listed(frame).values()) == [
        "Ditto, learning rate 0.1, λ 0.5, seed 0",
        "FedAvg, learning rate 0.2, seed 0",
        "FedAvg, learning rate 0.1, seeds 0, 1",
    ]
    shown = default("runs")
    assert sorted(shown.table.index) == [
        "Ditto, learning rate 0.1, λ 0.5",
        "FedAvg, learning rate 0.1",
        "FedAvg, learning rate 0.2",
    ]
    assert shown.table.loc["FedAvg, learning rate 0.1", "seeds"] == 2


def test_runs_view(results):
    shown = default("runs", rows=(row("fedper"),), smoothing=2)
    rows = results["fedper"].rows.query(
        "when == 'before' and split == 'test' and average == 'client' and metric == 'acc_pct'"
    )
    acc = rows.sort_values("rounds").value.to_numpy()
    last_and_best = [acc[-1].round(2), acc.max().round(2)]
    assert shown.table.index.tolist() == ["FedPer"]
    assert shown.table.loc["FedPer", ["last", "best"]].tolist() == last_and_best
    (line,) = [ln for ln in shown.figure.axes[0].lines if len(ln.get_ydata()) == len(acc)]
    assert line.get_ydata() == pytest.approx([acc[0], *(acc[1:] + acc[:-1]) / 2])


@pytest.mark.parametrize("axis", sources.AXES)
def test_curves_are_drawn_against_what_was_spent(axis, results):
    shown = default("runs", rows=(row("fedper"), row("pfedhn")), against=axis)
    left, want = shown.figure.axes[0], {}
    for method in ("fedper", "pfedhn"):
        totals = results[method].rows.query("average == 'total'")
        spent = totals.pivot(index="rounds", columns="metric", values="value").reset_index()
        spent["megabytes"] = (spent.upload_bytes + spent.download_bytes) / 1e6
        want[method] = spent[axis].tolist()
        assert shown.table.MB[plots.label(method)] == pytest.approx(
            spent.megabytes.iloc[-1], abs=0.005
        )
    assert left.get_xlabel() == sources.AXES[axis]
    drawn = [list(line.get_xdata()) for line in left.lines if len(line.get_xdata()) == 4]
    assert all(any(x == pytest.approx(points) for x in drawn) for points in want.values())
    assert views._readable_axis(sources.rows(sources.OWN).query("column == @COLUMN")) == "rounds"


def test_smooth_keeps_runs_apart():
    rows = pd.DataFrame(
        {"run": list("aabb"), "rounds": [0, 1, 0, 1], "value": [0.0, 2.0, 10.0, 20.0]}
    )
    rows = rows.assign(
        row="x", column="", when="before", split="test", average="client", metric="acc_pct"
    )
    assert analysis.smooth(rows, 2).value.tolist() == [0.0, 1.0, 10.0, 15.0]
    assert analysis.smooth(rows, 1).equals(rows)


def test_clients_view(results):
    shown = default("clients", first=row("fedavg"), second=row("fedper"), when="after")
    acc = {
        m: results[m].clients.query("rounds == 3 and when == 'after' and split == 'test'").acc_pct
        for m in RUNS
    }
    lead = acc["fedper"].to_numpy() - acc["fedavg"].to_numpy()
    does = "beats" if lead.mean() >= 0 else "trails"
    assert f"FedPer {does} FedAvg by {abs(lead.mean()):.2f} points" in shown.said
    assert f"better on {100 * (lead > 0).mean():.0f} % of 10 clients" in shown.said
    assert shown.table["mean over clients"].tolist() == [
        acc[m].mean().round(2) for m in ("fedavg", "fedper")
    ]
    bars = [p.get_height() for p in shown.figure.axes[1].patches]
    assert bars == pytest.approx(np.sort(lead))


def test_a_client_is_compared_with_another_method_only(results):
    fedper = row("fedper")
    offered = views.clients_choices({"column": COLUMN, "first": fedper, "second": fedper})
    assert offered["first"].value == fedper and fedper not in offered["second"].options


def test_only_runs_of_one_seed_on_test_data_are_offered_together(nothing):
    e = Experiment(partition="iid", clients=2, model="mlp", rounds=1, max_samples=8, batch=4)
    for one in (e, e.but(method="fedper", seed=1)):
        runs.run(one)
    assert default("clients", column=None).figure is None  # fedper has another seed
    runs.run(e.but(method="fedper", seed=0))
    assert default("clients", column=None).figure is not None
    x, y = np.zeros((9, 4), np.float32), np.arange(9) % 3
    fed = Federation(x, y, train=[range(3), range(3, 6)], val=[[6], [7, 8]])
    for method in ("fedavg", "fedper"):
        own = Experiment(dataset="own", model="mlp", rounds=1, batch=4, method=method)
        runs.run(own, fed=fed)
    assert default("clients", column=None).figure is None, "without test data"


def test_two_methods_are_drawn_on_equal_axes_with_the_diagonal(results):
    shown = default("clients", first=row("pfedhn"), second=row("fedper"), when="after")
    left = shown.figure.axes[0]
    assert left.get_xlim() == left.get_ylim() and left.get_aspect() == 1
    assert list(left.get_xticks()) == list(left.get_yticks())
    (line,) = left.lines
    assert list(line.get_xdata()) == list(line.get_ydata()) == list(left.get_xlim())
    dots = np.concatenate([c.get_offsets() for c in left.collections])
    assert dots.min() >= left.get_xlim()[0] and dots.max() <= left.get_xlim()[1]


def left_heat_map(shown: choices.Shown) -> np.ndarray:
    return np.asarray(shown.figure.axes[0].collections[0].get_array()).reshape(10, 10)


def test_collaboration_view(results):
    rounds, weights = results["fedaghn"].probe("weights")
    layer, at = list(weights)[1], 1
    shown = default("collaboration", layer=layer, round=int(rounds[at]))
    group = np.arange(10) * 5 // 10
    shares = analysis.shares(weights[layer][at], group)
    assert list(shown.table) == [plots.MEASURE_LABELS[name] for name in shares]
    assert shown.table.loc[layer].tolist() == pytest.approx(list(shares.values()), abs=1e-4)
    assert left_heat_map(shown) == pytest.approx(weights[layer][at])
    mean = default("collaboration", round=int(rounds[at]))
    assert left_heat_map(mean) == pytest.approx(np.mean([w[at] for w in weights.values()], 0))
    assert "group of the partition" in shown.said


def test_embedding_view(results):
    rounds, values = results["pfedhn"].probe("embeddings")
    shown = default("embedding")
    assert shown.table.index.tolist() == rounds.tolist()
    real = analysis.clustering(values["v"][-1], np.arange(10) // 2, 1, 200)
    assert shown.table.silhouette.iloc[-1] == pytest.approx(real["silhouette"], abs=0.001)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: views.runs("fedper.quick", COLUMN),
            "no results 'fedper.quick'; there are runs of this computer",
        ),
        (
            lambda: views.runs(sources.OWN, "nowhere"),
            "no acc_pct 'own' of any row, seeds any, in 'nowhere'",
        ),
        (
            lambda: views.clients(sources.OWN, COLUMN, row("fedavg"), "ditto"),
            "no run of ditto with seed 0",
        ),
        (
            lambda: views.collaboration(sources.OWN, COLUMN, row("fedaghn"), 9),
            "no run of 'fedaghn, rounds=3.*' with seed 9",
        ),
        (
            lambda: views.collaboration(sources.OWN, COLUMN, row("fedavg"), 0),
            "'weights' was not recorded",
        ),
        (
            lambda: views.collaboration(sources.OWN, COLUMN, row("fedaghn"), 0, "conv9"),
            "layer 'conv9' has no weights; there are",
        ),
    ],
)
def test_wrong_values_are_named(call, message, results):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["runs", "clients", "collaboration", "embedding"])
def test_where_nothing_is_there_a_view_says_so(name, nothing):
    shown = default(name)
    assert shown.figure is None and shown.table is None
    assert shown.said.startswith("Nothing to show yet")
    assert "run_all.sh --paper" in shown.code or "sweep(" in shown.code


def test_alike_clients(nothing):
    class Row:
        run, n_clients, partition, dataset = "none", 20, "coarse", "digits100"

    group, by = views.kin(Row)
    assert by == "coarse class" and group.tolist() == [i // 2 for i in range(20)]
    Row.partition = "shards"  # and no Experiment in the store
    assert len(set(views.kin(Row)[0])) == 1
    shared = SMALL.but(partition="iid", rounds=0)
    Row.run, Row.partition, Row.n_clients = runs.run(shared).id, "iid", 10
    assert views.kin(Row)[0].tolist() == federation(shared).counts().argmax(1).tolist()


def test_clients_of_a_coarse_class_are_alike_where_the_data_are_not_here(monkeypatch):
    monkeypatch.setattr(places, "results_folder", lambda: paths.CHECKOUT / "results")

    class Row:
        run, n_clients, partition, dataset = "none", 100, "coarse", "cifar100"

    group, by = views.kin(Row)
    assert by == "coarse class" and group.tolist() == [i // 5 for i in range(100)]


def test_the_comparison_of_all_methods_is_shown_without_its_tuning(tmp_path, monkeypatch, results):
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "results")
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    rows = results["fedper"].rows.assign(row="fedper", column="cifar10")
    both = pd.concat([rows.assign(artefact=a) for a in ("tune", "comparison")])
    made.publish(tmp_path / "results", both, "methods")
    assert sources.title("methods.quick-digits") == "All methods: quick, digits"
    assert set(sources.rows("methods.quick-digits").column) == {"Comparison: cifar10"}


def test_fine_tuned_rows_are_shown_after_local_training_alone(tmp_path, monkeypatch, results):
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "results")
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    rows = results["fedper"].rows.assign(column="cifar10", artefact="comparison")
    after = rows[rows.when == "before"].assign(when="after")
    both = pd.concat([rows[rows.when != "after"], after])
    named = [both.assign(row=name) for name in ("fedavg", "fedavg_ft")]
    made.publish(tmp_path / "results", pd.concat(named), "methods")
    shown = sources.rows("methods.quick-digits")
    read = {tuple(pair) for pair in shown[["row", "when"]].to_numpy().tolist()}
    assert read == {("fedavg", "before"), ("fedavg", "after"), ("fedavg_ft", "after")}
    values = views.runs_choices({"source": "methods.quick-digits"}).values
    assert list(values["rows"]) == ["fedavg", "fedavg_ft"] and values["when"] == "own"
    own = sources.timed(shown, "own")[["row", "when"]].drop_duplicates().to_numpy().tolist()
    assert own == [["fedavg", "before"], ["fedavg_ft", "after"]]


def test_rows_of_runs_go_before_committed_ones_and_artefacts_stay_apart(
    tmp_path, monkeypatch, results
):
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "results")
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    rows = results["fedper"].rows.assign(row="fedper", column="k=4")
    for folder, value in (("results", 1.0), ("runs/results/fedper.quick-digits", 2.0)):
        both = pd.concat([rows.assign(value=value, artefact=a) for a in ("fig2", "fig3")])
        made.publish(tmp_path / folder, both, "fedper")
    assert sources.names() == ["fedper.quick-digits"]
    assert sources.title("fedper.quick-digits") == "FedPer: quick, digits"
    read = sources.rows("fedper.quick-digits")
    assert set(read.value) == {2.0} and set(read.column) == {"Figure 2: k=4", "Figure 3: k=4"}


def test_clients_of_committed_runs_are_grouped_as_their_experiments_say(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "results")
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    tags = {"row": "fedaghn", "column": "a", "artefact": "fig4"}
    rows = sweep([SMALL.but(**RUNS["fedaghn"], rounds=1, tags=tags)])
    committed.save(rows, "fedaghn", "quick", "digits")
    committed.publish("fedaghn")
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "nothing"))
    shown = default("collaboration", column="Figure 4: a")
    assert "group of the partition" in shown.said and sources.names() == ["fedaghn.quick-digits"]


# -- widgets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"profile": "fast"}, "profile: 'fast' is unknown"),
        ({"datasets": "digits"}, "datasets='digits': give a list"),
        ({"methods": ["fedpr"]}, "methods: 'fedpr' is unknown"),
        ({"seeds": ["0"]}, "give a list of integers"),
        ({"artefacts": ["fig2"]}, "artefacts: 'fig2' is unknown; known are partition"),
        ({"train": "true"}, "train='true': got str"),
        ({"interactive": True}, "interactive=True is unknown; use auto, yes or no"),
    ],
)
def test_wrong_parameters_of_the_notebook(parameters, message):
    with pytest.raises(ValueError, match=message):
        widgets.Explore(**parameters)


def test_headless_views_are_static(capsys, results, monkeypatch):
    shown = []
    monkeypatch.setattr(widgets, "display", shown.append)
    explore = widgets.Explore(profile="smoke", artefacts=["partition", "runs", "train"])
    explore.show("partition", clients=5)
    explore.show("embedding")
    explore.train()
    out = capsys.readouterr().out
    assert "clients=5, seed=0))" in out and "embedding: not among artefacts" in out
    assert "rounds=2" in out
    assert [type(s).__name__ for s in shown] == ["Image", "Markdown", "DataFrame", "Markdown"]
    assert shown[-1].data.startswith("In JupyterLab, Run begins this")
    with pytest.raises(ValueError, match="no explorer 'partitions'; there are partition"):
        explore.show("partitions")


def test_matplotlib_keeps_its_settings(results, monkeypatch):
    monkeypatch.setattr(widgets, "display", lambda shown: None)
    sizes, before = [], dict(plt.rcParams)
    monkeypatch.setattr(widgets, "static", lambda shown: sizes.append(plt.rcParams["font.size"]))
    widgets.Explore(profile="smoke").show("partition", clients=5)
    assert sizes == [widgets.STYLE["font.size"]] and sizes[0] != before["font.size"]
    assert dict(plt.rcParams) == before


@pytest.mark.slow
def test_live_views_are_widgets(results, monkeypatch):
    shown = []
    monkeypatch.setattr(widgets, "display", shown.append)
    explore = widgets.Explore(interactive="yes", datasets=["digits"], methods=["fedper"], seeds=[0])
    for name in views.VIEWS:
        explore.show(name, column=COLUMN)
    explore.train()
    assert len(shown) == 6
    for box in shown:
        left, page = box.children
        assert "Copy as code" in page.value
        assert "<img alt=" in page.value or "Run begins this" in page.value
        assert all(getattr(w, "description", "buttons") for w in left.children)
    assert sources.OWN in shown[1].children[1].value


def test_a_control_changes_the_page_and_what_others_offer(results):
    panel = widgets.Panel(views.partition_choices, {}, lambda v: widgets.tried(views.partition, v))
    page = panel.page.value
    panel.controls["alpha"].value = 100.0
    assert panel.page.value != page and "&#x27;alpha&#x27;: 100.0" in panel.page.value
    panel.controls["scheme"].value = "pfedhn_classes"
    described = ["Data", "Partition", "Classes each", "Clients", "Seed"]
    assert [w.description for w in panel.left.children] == described
    assert "&#x27;k&#x27;: 2" in panel.page.value
    panel.controls["scheme"].value = "coarse"  # needs coarse classes: says so, and stays usable
    assert panel.page.value.startswith('<p role="alert">') and "coarse" in panel.page.value
    panel.controls["scheme"].value = "dirichlet"
    assert "<img" in panel.page.value and panel.controls["alpha"].value == 100.0


def test_results_open_on_the_fullest_profile_that_compares_methods(tmp_path, monkeypatch, results):
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path)
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    rows = results["fedper"].rows.assign(column="a", artefact="table1")
    several = pd.concat([rows.assign(row=m, run=m) for m in ("fedper", "fedavg", "local")])
    made.publish(tmp_path, several, "flayer", "quick")
    made.publish(tmp_path, several[several.row != "local"], "fedper", "quick")
    made.publish(tmp_path, rows.assign(row="rate 5"), "pfedla", "medium", "paper")
    assert sources.names() == ["pfedla.medium-paper", "fedper.quick-digits", "flayer.quick-digits"]
    opened = views.runs_choices({})
    assert opened["source"].value == "flayer.quick-digits"
    assert opened["source"].words[0] == "pFedLA: medium, the paper's data"
    made.publish(tmp_path, several, "pfedhn", "medium", "paper")
    assert views.runs_choices({})["source"].value == "pfedhn.medium-paper"
    made.publish(tmp_path, several[several.row != "local"], "flayer", "paper", "paper")
    assert views.runs_choices({})["source"].value == "pfedhn.medium-paper"
    made.publish(tmp_path, several, "flayer", "paper", "paper")
    assert views.runs_choices({})["source"].value == "flayer.paper-paper"


def test_runs_of_many_short_rounds_do_not_squash_the_others(results):
    rows = pd.DataFrame({"run": ["a", "b"], "rounds": [20, 400]})
    assert views._readable_axis(rows) == "client_visits"
    assert views._readable_axis(rows.assign(rounds=20)) == "rounds"


def test_missing_data_are_marked_in_the_list(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_DATA", str(tmp_path))
    data = training.choices({})["dataset"]
    says = dict(zip(data.options, data.words, strict=True))
    assert says["digits"] == "digits" and says["cifar10"] == "CIFAR-10 (not on this computer)"
    here = [not word.endswith("computer)") for word in data.words]
    assert here == sorted(here, reverse=True)  # what is here comes first
    (tmp_path / "cifar10.npz").touch()
    assert words.data("cifar10") == "CIFAR-10"


# -- the panel that trains -------------------------------------------------------------------------


def until(seen, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


class Job:
    """Stands for a Background that does what it is told."""

    def __init__(self, experiment, device):
        self.state, self.curve, self.asked = "running", None, False

    def stop(self):
        self.asked = True

    def poll(self):
        if self.curve is not None and self.asked:
            self.state = "stopped"
        self.curve = pd.DataFrame({"rounds": [0, 1], "when": "before", "value": [10.0, 20.0]})
        return True


def test_the_panel_that_trains(monkeypatch):
    monkeypatch.setattr(widgets, "Background", Job)
    trainer = widgets.Trainer({"rounds": 50}, "cpu")
    page = trainer.panel.page
    assert trainer.stop.disabled and "Run begins this" in page.value and "rounds=50" in page.value
    trainer.run.click()
    assert trainer.run.disabled and not trainer.stop.disabled
    assert "running: no round yet" in page.value
    until(lambda: "running: round 1 of 50" in page.value and "<img" in page.value)
    trainer.panel.controls["rounds"].value = 100  # of the next run; this one stays on the page
    assert "running: round 1 of 50" in page.value
    trainer.stop.click()
    until(lambda: "stopped: round 1 of 50. Run goes on from there." in page.value)
    until(lambda: trainer.stop.disabled and not trainer.run.disabled)


def test_the_panel_sets_data_network_and_rates(results):
    values = training.choices({"alpha": 0.5, "model": "mlp", "batch": 32, "lr": 0.2}).values
    trained = training.experiment(**values)
    assert trained.partition_args["alpha"] == 0.5 and trained.model == "mlp"
    assert (trained.batch, trained.lr) == (32, 0.2)
    pfedhn = training.choices({"method": "pfedhn"})  # its own rate, until another is chosen
    assert pfedhn["lr"].value == 0.005 and training.experiment(**pfedhn.values).lr == 0.005
    other = training.choices({"method": "pfedhn", "lr": 0.1})
    assert training.experiment(**other.values).lr == 0.1
    assert training.choices({"dataset": "ag_news"})["model"].options == ("fasttext",)


def test_what_does_not_go_together_is_said_and_not_begun(monkeypatch):
    monkeypatch.setattr(widgets, "Background", Job)
    trainer = widgets.Trainer({}, "cpu")
    said = ValueError("batch=10: too many")
    monkeypatch.setattr(training, "experiment", lambda **values: (_ for _ in ()).throw(said))
    trainer.run.click()
    assert 'role="alert">batch=10: too many' in trainer.panel.page.value
    assert trainer.job is None and not trainer.run.disabled


def test_runs_of_a_method_that_is_not_here_are_shown(tmp_path, monkeypatch):
    from pfl_core import Method
    from pfl_core.methods.base import METHODS

    class Elsewhere(Method):
        name = "elsewhere"

    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    runs.run(SMALL.but(rounds=1))
    runs.run(SMALL.but(method="elsewhere", rounds=1))
    assert set(sources.rows(sources.OWN).method) == {SMALL.method, "elsewhere"}
    del METHODS["elsewhere"]  # as in another process
    assert set(sources.rows(sources.OWN).method) == {SMALL.method, "elsewhere"}


def test_runs_that_no_field_tells_apart_are_two_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    e = Experiment(dataset="own", model="mlp", rounds=1)
    for seed in (0, 1):  # other data, and no seed of the same
        x = np.random.default_rng(seed).random((40, 8), dtype=np.float32)
        lists = np.arange(40).reshape(4, 10)
        runs.run(e.but(seed=seed), fed=Federation(x, np.arange(40) % 2, lists[:2], test=lists[2:]))
    rows = sources.rows(sources.OWN)
    assert rows.row.nunique() == 2 and len(set(sources.short(rows).values())) == 2
    assert len(views.runs(sources.OWN, rows.column.iloc[0]).table) == 2
