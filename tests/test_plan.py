"""Computing a paper's runs without its notebook: order, store, resuming, and hours that say why they are not there."""

from types import SimpleNamespace

import pandas as pd
import pytest

from pfl_core import Experiment
from pfl_core.__main__ import main
from pfl_core.data import pools as data
from pfl_core.engine.simulate import Interrupted
from pfl_core.experiments import compute, store
from pfl_core.experiments import run as runs
from pfl_core.papers import pfedhn, plan


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


HOW = dict(profile="smoke", artefacts=["table1"], methods=["fedavg", "lgfedavg", "pfedhn"], seeds=[1, 0], device="cpu")


def test_what_a_notebook_asks_for_is_computed_seed_by_seed_and_found_again(home, monkeypatch, capsys):
    asked, sweep = [], runs.sweep
    monkeypatch.setattr(
        runs, "sweep", lambda cells, **how: (asked.append([e.id for e in cells]), sweep(cells, **how))[1]
    )
    table = plan.compute("pfedhn", **HOW)
    rows = ["fedavg", "pfedhn", "pfedhn (literal sign)", "lgfedavg"]  # what starts from another run comes last
    assert table.row.drop_duplicates().tolist() == rows and set(table.status) == {"done"}
    assert table.seed.tolist() == [0] * (len(table) // 2) + [1] * (len(table) // 2)
    assert asked == [table.run.tolist()] and set(table.column) == {"CIFAR-10, N=10"}
    assert set(table.run) == {p.name for p in (home / "store").glob("*/")}
    monkeypatch.setattr(compute, "simulate", None)  # nothing is trained again, and the plan agrees
    again = plan.compute("pfedhn", **HOW)
    pd.testing.assert_frame_equal(again, table)
    left = plan.plan("pfedhn", recompute=True, **HOW)
    assert (left.runs == left.cached).all() and (left["client-steps"] == 0).all()
    words = (
        "compute pfedhn --profile smoke --artefacts table1 --methods fedavg lgfedavg pfedhn --seeds 0 1 --device cpu"
    )
    assert main(words.split()) == 0
    assert f"{table.run.nunique()} runs are there, 0 of them diverged" in capsys.readouterr().out


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


def test_wrong_ways_to_compute_are_refused_before_anything_is_trained(home, capsys):
    with pytest.raises(ValueError, match=r"compute\(jobs=0\): allowed is an integer >= 1"):
        plan.compute("pfedhn", **HOW, jobs=0)
    with pytest.raises(data.DatasetMissing, match="cifar10"):
        plan.compute("pfedhn", profile="medium", artefacts=["table1"])
    assert main("compute pfedhn --profile fast".split()) == 1
    assert "profile: 'fast' is unknown" in capsys.readouterr().err and not list(home.glob("store/*/"))


def test_medium_computes_whole_seeds_of_the_papers_table(monkeypatch, home):
    cells = []
    monkeypatch.setattr(runs, "sweep", lambda some, **how: cells.extend(some))
    monkeypatch.setattr(store, "load_result", lambda folder, e, **how: SimpleNamespace(meta={"status": "done"}))
    plan.compute("pfedhn", profile="medium", datasets=["digits"], device="cpu", jobs=2)
    order = [(e.tags["artefact"], e.seed) for e in cells]
    assert list(dict.fromkeys(order)) == [
        *(("table1", s) for s in range(3)), *(("fig3", s) for s in range(3)),
        *((a, s) for a in ("fig5", "table4") for s in range(2)),
    ]  # fmt: skip
    assert set(pfedhn.MEDIUM) == {a for a, _ in order}


def test_steps_of_evaluations_after_local_training_are_counted_where_they_are_made():
    e = Experiment(clients=4, partition="iid", rounds=2, steps=3, participation=0.5)
    visits = [plan.client_steps(e.but(eval_after=a, participation=p)) for a in (None, False, True) for p in (0.5, 1.0)]
    assert visits == [12, 24, 12, 24, 12 + 3 * 3 * 2, 24]
    assert plan.client_steps(e.but(eval_after=True, eval_clients=3)) == 12 + 3 * 3 * 1


def test_a_step_is_timed_without_what_else_the_computer_does(monkeypatch):
    clock = iter(range(0, 100_000_000, 1000))  # a wall clock that runs away
    monkeypatch.setattr(plan.time, "perf_counter", lambda: next(clock))
    plan.measured.cache_clear()
    seconds, parameters = plan.measured("mlp", '["digits", {}]', 64, "cpu")
    assert 0 < seconds < 1 and parameters > 0


def test_what_tuning_recorded_is_read_from_the_users_store(store, tmp_path, monkeypatch):
    e = Experiment(
        dataset="digits",
        partition="iid",
        clients=3,
        model="mlp",
        rounds=1,
        max_samples=8,
        method="pfedla",
        record=("weights",),
    )
    done = runs.run(e.but(tags={"row": "rate 5", "column": "a"}))
    monkeypatch.setattr(plan.Plan, "runs_root", tmp_path, raising=False)
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "aside"))
    (found,) = plan.Plan("pfedla", profile="smoke").probed(done.rows, "weights")
    assert (found.run, found.row) == (done.id, "rate 5") and found.values
