"""Computing a paper's runs without its notebook: order, store, resuming, and hours that say why they are not there."""

import dataclasses
import functools
import os
from types import SimpleNamespace

import pandas as pd
import pytest

from pfl_core import Experiment, run
from pfl_core.data import pools as data
from pfl_core.data.client_data import ClientData
from pfl_core.engine.participation import evaluates_after
from pfl_core.engine.simulate import Interrupted
from pfl_core.experiments import compute, store
from pfl_core.experiments import sweep as sweeps
from pfl_core.experiments.build import federation, train_config
from pfl_papers import places
from pfl_papers.bench import rows
from pfl_papers.compare import costs, plan
from pfl_papers.evidence import committed
from pfl_papers.papers import base, fedper, pfedhn
from pfl_papers.papers.base import TUNING
from tests.commands import TINY
from tests.made import main

HOW = dict(
    profile="smoke",
    artefacts=["table1"],
    methods=["fedavg", "lgfedavg", "pfedhn"],
    seeds=[1, 0],
    device="cpu",
)


def test_what_a_notebook_asks_for_is_computed_seed_by_seed_and_found_again(
    home, monkeypatch, capsys
):
    asked, sweep = [], sweeps.sweep
    monkeypatch.setattr(
        sweeps,
        "sweep",
        lambda cells, **how: (asked.append([e.id for e in cells]), sweep(cells, **how))[1],
    )
    table = plan.compute("pfedhn", **HOW)
    rows = [
        "fedavg",
        "pfedhn",
        "pfedhn (literal sign)",
        "lgfedavg",
    ]  # what starts from another run comes last
    assert table.row.drop_duplicates().tolist() == rows and set(table.status) == {"done"}
    assert table.seed.tolist() == [0] * (len(table) // 2) + [1] * (len(table) // 2)
    assert asked == [table.run.tolist()] and set(table.column) == {"CIFAR-10, N=10"}
    assert set(table.run) == {p.name for p in (home / "store").glob("*/")}
    monkeypatch.setattr(compute, "simulate", None)  # nothing is trained again, and the plan agrees
    again = plan.compute("pfedhn", **HOW)
    pd.testing.assert_frame_equal(again, table)
    left = plan.plan("pfedhn", train=True, **HOW)
    assert (left.runs == left.cached).all() and (left["client-steps"] == 0).all()
    words = "compute pfedhn --profile smoke --artefacts table1 --methods fedavg lgfedavg pfedhn --seeds 0 1 --device cpu"
    assert main(words.split()) == 0
    assert f"{table.run.nunique()} runs are there, 0 of them diverged" in capsys.readouterr().out


@pytest.mark.parametrize("together", [True, False])
def test_what_is_finished_is_kept_published_and_not_computed_again(
    home, tmp_path, monkeypatch, capsys, together
):
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "results")
    some = HOW | dict(profile="quick", methods=["fedavg"], seeds=[0])
    small = dict(rounds=1, max_samples=20, eval_every=1)
    monkeypatch.setattr(pfedhn, "setting", functools.partial(_smaller, pfedhn.setting, small))
    made = dataclasses.replace(pfedhn.PAPER.artefacts["table1"], numbers=_ones, together=together)
    artefacts = pfedhn.PAPER.artefacts | {"table1": made}
    about = dataclasses.replace(pfedhn.PAPER, setting=pfedhn.setting, artefacts=artefacts)
    monkeypatch.setattr(pfedhn, "PAPER", about)
    table = plan.compute("pfedhn", **some)
    words = "keep pfedhn --profile quick --artefacts table1 --methods fedavg local --seeds 0 1"
    assert (
        main(words.split()) == 0 and "runs/results/pfedhn.quick-digits" in capsys.readouterr().out
    )
    assert main(["publish", "pfedhn"]) == 0
    (part,) = committed.parts("pfedhn").values()
    assert set(part.rows().run) == set(table.run), "what is not finished is not trained"
    one = part.rows()["average"] == "derived"
    assert one.any() != together, "numbers of all runs wait for all runs"
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "another"))
    monkeypatch.setattr(compute, "simulate", None)
    assert plan.compute("pfedhn", **some).equals(table)
    with pytest.raises(TypeError):
        plan.compute("pfedhn", **some, train=True)
    assert main("keep fedaghn --profile smoke".split()) == 0
    assert "nothing of it is finished" in capsys.readouterr().out


def _ones(rows, recorded):
    return [dict(run=run, metric="one", value=1.0) for run in rows.run.unique()]


def _smaller(setting, changes, *args):
    return setting(*args) | changes


def test_an_interrupted_computation_goes_on(home, monkeypatch):
    simulate, seen = compute.simulate, []

    def second_stops(*args, **how):
        seen.append(args[0].name)
        if len(seen) == 2:
            raise Interrupted
        return simulate(*args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(compute, "simulate", second_stops)
        with pytest.raises(Interrupted):
            plan.compute("pfedhn", **HOW)
    (first,) = store.finished()
    assert first.experiment.method == "fedavg"
    table = plan.compute("pfedhn", **HOW)
    assert first.id in set(table.run) and set(table.status) == {"done"}


def test_a_run_that_raises_an_error_is_not_done(home, monkeypatch, capsys):
    simulate = compute.simulate

    def some_raise(method, *args, **how):
        if method.name == "lgfedavg":
            raise MemoryError("no memory is left")
        return simulate(method, *args, **how)

    monkeypatch.setattr(compute, "simulate", some_raise)
    words = "compute pfedhn --profile smoke --artefacts table1 --methods fedavg lgfedavg --seeds 0 --device cpu"
    assert main(words.split()) == 1
    assert "1 runs ended with an error, said above" in capsys.readouterr().err
    table = plan.compute("pfedhn", **HOW | dict(methods=["fedavg", "lgfedavg"], seeds=[0]))
    assert dict(zip(table.row, table.status, strict=True)) == {
        "fedavg": "done",
        "lgfedavg": "error",
    }
    assert set(table.run.dropna()) == {r.id for r in store.finished()}


def test_wrong_ways_to_compute_are_refused_before_anything_is_trained(home, capsys):
    with pytest.raises(ValueError, match=r"compute\(jobs=0\): allowed is an integer >= 1"):
        plan.compute("pfedhn", **HOW, jobs=0)
    with pytest.raises(data.DatasetMissing, match="cifar10"):
        plan.compute("pfedhn", profile="medium", artefacts=["table1"])
    assert main("compute pfedhn --profile fast".split()) == 1
    assert "profile: 'fast' is unknown" in capsys.readouterr().err and not list(
        home.glob("store/*/")
    )


def test_medium_computes_whole_seeds_of_the_papers_table(monkeypatch, home):
    cells = []
    monkeypatch.setattr(sweeps, "sweep", lambda some, **how: cells.extend(some))
    monkeypatch.setattr(
        store, "load_result", lambda folder, e, **how: SimpleNamespace(meta={"status": "done"})
    )
    plan.compute("pfedhn", profile="medium", datasets=["digits"], device="cpu", jobs=2)
    order = [(e.tags["artefact"], e.seed) for e in cells]
    seeds = {"table1": 3, "table2": 2, "fig2": 2, "fig3": 3, "fig5": 3, "fig6": 3, "table4": 3}
    seeds |= {"fig7": 2}
    assert list(dict.fromkeys(order)) == [(a, s) for a, n in seeds.items() for s in range(n)]
    assert {a for a, about in pfedhn.PAPER.artefacts.items() if about.medium} == {
        a for a, _ in order
    }


def test_steps_of_evaluations_after_local_training_are_counted_where_they_are_made():
    e = Experiment(clients=4, partition="iid", rounds=2, steps=3, participation=0.5)
    visits = [
        costs.client_steps(e.but(eval_after=a, participation=p))
        for a in (None, False, True)
        for p in (0.5, 1.0)
    ]
    # After the last round all train; before it those who are evaluated and did not take part.
    assert visits == [12, 36, 12, 24, 12 + 3 * (2 + 2 + 4), 36]
    assert costs.client_steps(e.but(eval_after=True, eval_clients=3)) == 12 + 3 * (1.5 + 1.5 + 3)


@pytest.mark.parametrize("clients", [1, 2, 5, 10])
@pytest.mark.parametrize("participation", [0.1, 0.25, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("after", [True, False])
def test_all_counts_of_cost_agree(clients, participation, after, monkeypatch):
    monkeypatch.setattr(costs, "measured", lambda *args: (3600.0 * (os.cpu_count() or 1), 0.0))
    e = Experiment(clients=clients, participation=participation, partition="iid", batch=2)
    e = e.but(rounds=6, eval_every=2, eval_after=after, model="mlp")
    steps = costs.client_steps(e)
    assert rows.batches(e) == pytest.approx(costs.client_steps(e.but(eval_after=False)) / clients)
    forward = costs.run_hours(e, "cpu") - steps  # hours are steps here
    assert forward > 0
    for some in range(1, clients):  # equal shares: a part of the clients takes that part
        few = e.but(eval_clients=some)
        seen = costs.run_hours(few, "cpu") - costs.client_steps(few)
        assert seen == pytest.approx(forward * some / clients, rel=0.01, abs=1)


def test_a_step_is_timed_without_what_else_the_computer_does(monkeypatch):
    clock = iter(range(0, 100_000_000, 1000))  # a wall clock that runs away
    monkeypatch.setattr(costs.time, "perf_counter", lambda: next(clock))
    costs.measured.cache_clear()
    seconds, parameters = costs.measured(*costs.net(Experiment(model="mlp", batch=64)), "cpu")
    assert 0 < seconds < 1 and parameters > 0


@pytest.mark.parametrize("name", base.PAPERS)
def test_hours_of_all_runs_of_a_paper_can_be_told(name):
    """Gradients of each method's step are counted, whatever arguments its rows have."""
    least, steps = {"ditto": 2, "pfedme": 2, "fedala": 1.1}, {}
    for e in plan.planned(name, profile="paper"):
        e = e.but(epochs=1, steps=min(e.steps, 3))
        steps.setdefault(e.method, set()).add(costs.per_step(e))
    assert all(min(found) >= least.get(method, 1) for method, found in steps.items())
    assert steps["fedavg"] == {1.0}


def test_a_run_that_its_data_do_not_allow_is_named():
    said = r"^Table 1, CIFAR-10, N=10, FedAvg: .*clients=900: .*; leave it out by datasets, artefacts or methods$"
    how: dict = HOW | dict(overrides={"clients": 900})
    device = how.pop("device")
    with pytest.raises(ValueError, match=said):
        plan.plan("pfedhn", device, **how)
    with pytest.raises(ValueError, match=said):  # what a notebook asks before it trains
        plan.expected_time(plan.planned("pfedhn", **how), device)


def test_hours_count_the_gradients_of_a_step_not_its_epochs(monkeypatch):
    monkeypatch.setattr(costs, "measured", lambda *args: (3600.0 * (os.cpu_count() or 1), 1))
    plain = Experiment(clients=2, partition="iid", rounds=2, eval_after=False, model="mlp")
    for field in ({"epochs": 2}, {"steps": 7}):  # steps are not in epochs
        e, ditto = plain.but(**field), plain.but(method="ditto", **field)
        assert costs.gradients(e) == pytest.approx(field.get("steps") or 2 * costs.epoch(e))
        assert costs.gradients(ditto) == pytest.approx(2 * costs.gradients(e))
        more = plan._cost(ditto, "cpu")[1] - plan._cost(e, "cpu")[1]
        assert more == pytest.approx(costs.client_steps(e))  # hours are gradients here


def test_own_data_are_planned_like_a_data_set_of_the_same_clients():
    named = Experiment(clients=3, partition="iid", model="mlp", rounds=2, batch=16, method="ditto")
    fed, own = federation(named), named.but(dataset="own", clients=None)
    assert costs.client_steps(own, fed) == costs.client_steps(named) > 0
    assert costs.net(own, fed) == costs.net(named)
    assert costs.gradients(own, fed) == costs.gradients(named) > 0
    assert costs.run_hours(own, "cpu", fed) == costs.run_hours(named, "cpu") > 0
    with pytest.raises(ValueError, match="go together"):
        costs.client_steps(own)


def test_what_tuning_chooses_is_computed_and_planned(home):
    """At first the paper's own rate stands in the plan; where tuning is done, the rate with the best validation accuracy."""
    small = dict(
        model="mlp",
        clients=3,
        rounds=1,
        max_samples=40,
        method="fedper",
        partition_args={"k": 10, "val": 0.2},
    )

    def sweeps(scope):
        base = scope.base(paper, "fig2", "cifar10", **small)
        rates = {f"lr {lr:g}": {"lr": lr} for lr in (1e-6, 0.3)}
        tuning = scope.sweep(
            paper, base.but(tags={"artefact": TUNING}), rates, {"a": {}}, seeds=(7,)
        )
        found, chosen = scope.finished(tuning[0].experiments()), "lr 1e-06"
        if found is not None:
            seen = found[
                (found.split == "val")
                & (found.metric == "acc_pct")
                & (found["average"] == "client")
            ]
            chosen = seen.loc[seen.value.idxmax(), "row"]
        return [*tuning, *scope.sweep(paper, base, {"fedper": rates[chosen]}, {"a": {}})]

    fig2 = dataclasses.replace(fedper.FIGURES["fig2"], tuned=True)
    paper = dataclasses.replace(fedper.PAPER, artefacts={"fig2": fig2}, sweeps=sweeps)
    asked = [(e.tags["artefact"], e.lr, e.seed) for e in plan.planned(paper, profile="smoke")]
    assert asked == [(TUNING, 1e-6, 7), (TUNING, 0.3, 7), ("fig2", 1e-6, 0)]
    table = plan.compute(paper, profile="smoke", device="cpu")
    assert set(table.status) == {"done"} and table.artefact.tolist() == [TUNING, TUNING, "fig2"]
    chosen = plan.planned(paper, profile="smoke")
    assert [e.lr for e in chosen] == [1e-6, 0.3, 0.3] and [
        e.id for e in chosen
    ] == table.run.tolist()


@pytest.mark.parametrize("name", base.PAPERS)
def test_at_profile_paper_every_row_is_evaluated_when_it_is_read(name):
    about = base.paper(name)
    for sweep in about.planned(base.Scope("paper")):
        for e in dataclasses.replace(sweep, seeds=sweep.seeds[:1]).experiments():
            when = about.when.get(e.tags["row"], about.report["when"])
            assert when == "before" or evaluates_after(train_config(e), e.clients), e.tags


@pytest.mark.parametrize(
    "changes", [{}, {"participation": 0.34}, {"plan": "drop"}, {"epochs": 2}, {"steps": 3}]
)
def test_client_steps_are_those_that_are_made(home, changes, monkeypatch):
    e = Experiment(**TINY | {"eval_every": 2, "rounds": 3, "method": "fedavg"} | changes)
    made = []
    original = ClientData.batch_indices

    def counted(self, *args, **kw):
        made.append(len(out := original(self, *args, **kw)))
        return out

    monkeypatch.setattr(ClientData, "batch_indices", counted)
    run(e, workers=1)
    assert costs.client_steps(e) == pytest.approx(
        sum(made), rel=0.25
    )  # which clients are drawn differs from round to round


def test_sources_are_runs_too(home):
    e = Experiment(**TINY, init_from=Experiment(**TINY | {"rounds": 1}))
    assert [x.rounds for x in plan.with_sources(e)] == [1, 2] and plan.with_sources(e)[
        0
    ].keep_models


@pytest.mark.parametrize("there", [True, False])
def test_what_others_start_from_is_trained_for_those_that_are_not_there(there, home, monkeypatch):
    cells = plan.planned("pfedhn", profile="smoke", artefacts=["table1"], methods=["lgfedavg"])
    starts = {e.tags["row"] for e in cells if e.tags["row"].endswith(plan.START)}
    assert starts
    # Committed rows hold no models, so that a start itself is never there.
    ends = lambda e, train: there and not e.tags["row"].endswith(plan.START)  # noqa: E731
    monkeypatch.setattr(plan.parameters, "is_there", ends)
    left = plan._without_idle_starts(cells, train=False)
    assert {e.tags["row"] for e in cells} - {e.tags["row"] for e in left} == (
        starts if there else set()
    )
