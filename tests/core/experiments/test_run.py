"""Experiments and the run store: hashed, resumed bit for bit, damaged parts set aside, nothing computed twice."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pandas as pd
import pytest
import torch

from pfl_core import Experiment, Federation, grid, load, load_model, sweep
from pfl_core.engine import simulate
from pfl_core.engine.simulate import Interrupted
from pfl_core.experiments import sweep as sweeps
from pfl_core.experiments.build import client_data, train_config
from pfl_core.experiments.metrics import ROW_COLUMNS
from pfl_core.experiments.run import run
from pfl_core.experiments.store import load_result
from pfl_core.util import gpu, paths
from pfl_papers import places
from pfl_papers.evidence import committed
from tests.core.experiments.setting import TINY, same

# -- Experiment ----------------------------------------------------------------------------------------------------------


def test_id_hashes_what_decides_the_numbers():
    e = Experiment(**TINY)
    assert e.id == Experiment(**TINY).id == e.but(tags={"row": "a"}).id
    others = [
        e.but(seed=1),
        e.but(lr=0.2),
        e.but(method="local"),
        e.but(partition_args={"alpha": 2.0}),
        e.but(init_from=e),
    ]
    assert len({x.id for x in (e, *others)}) == 6


def test_plain_round_trip():
    e = Experiment(
        **TINY,
        init_from=Experiment(**TINY, seed=3),
        method="fedper",
        method_args={"finetune_epochs": 1},
    )
    back = Experiment.from_plain(json.loads(json.dumps(e.plain())))
    assert back.plain() == e.plain() and back.id == e.id
    assert eval(repr(e), {"Experiment": Experiment}).id == e.id


BAD = {
    "rounds=-1": dict(rounds=-1),
    "participation=0": dict(participation=0),
    "participation=1.5": dict(participation=1.5),
    "lr='0.1'": dict(lr="0.1"),
    "lr=nan": dict(lr=float("nan")),
    "shuffle=1": dict(shuffle=1),
    "rounds=True": dict(rounds=True),
    "plan='wrapped'": dict(plan="wrapped"),
    "buffers='mean'": dict(buffers="mean"),
    "momentum=1.0": dict(momentum=1.0),
    "method 'fedperr' is unknown; did you mean 'fedper'": dict(method="fedperr"),
    "hyper-parameter of method 'fedper': 'finetune' is unknown; did you mean 'finetune_epochs'": dict(
        method="fedper", method_args={"finetune": 1}
    ),
    "did you mean 'digits'": dict(dataset="digit"),
    "partition 'dirichlt' is unknown": dict(partition="dirichlt"),
    "model 'cnnn' is unknown; did you mean 'cnn'": dict(model="cnnn"),
    "JSON": dict(model_args={"hidden": np.arange(3)}),
    "tag 'colour' is unknown": dict(tags={"colour": "red"}),
}


@pytest.mark.parametrize("words", BAD)
def test_refused_at_construction(words):
    with pytest.raises(ValueError) as error:
        Experiment(**TINY | BAD[words])
    assert words in str(error.value)


def test_grid_labels_and_merges():
    cells = grid(
        Experiment(**TINY),
        {"a": {"lr": 0.2}, "b": {"model_args": {"hidden": 9}}},
        {"x": {"clients": 3}},
        seeds=[0, 1],
    )
    assert [(e.tags["row"], e.tags["column"], e.seed) for e in cells] == [
        ("a", "x", 0),
        ("a", "x", 1),
        ("b", "x", 0),
        ("b", "x", 1),
    ]
    assert cells[0].lr == 0.2 and cells[2].model_args == {"hidden": 9} and cells[2].clients == 3


# -- running -------------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_found_again(store):
    first = run(Experiment(**TINY))
    stamp = (store / first.id / "history.csv").stat().st_mtime_ns
    again = run(Experiment(**TINY, tags={"paper": "x"}))
    assert (
        store / first.id / "history.csv"
    ).stat().st_mtime_ns == stamp and again.rows.paper.unique().tolist() == ["x"]
    assert sorted(p.name for p in (store / first.id).iterdir()) == [
        "arrays.npz",
        "experiment.json",
        "history.csv",
    ]
    assert (
        first.ok
        and first.rows.columns.tolist() == ROW_COLUMNS
        and not first.rows.isna().any().any()
    )
    acc = first.clients.query("when == 'before' and split == 'test' and rounds == 4").acc_pct.mean()
    row = first.rows.query(
        "when == 'before' and split == 'test' and rounds == 4 and metric == 'acc_pct' and average == 'client'"
    )
    assert row.value.item() == pytest.approx(acc) and "digits" in repr(first)


@pytest.mark.parametrize("method", ["fedper", "local"])
def test_interrupted_anywhere_it_ends_with_the_same_numbers(store, tmp_path, method):
    e = Experiment(**TINY, method=method, participation=0.5, momentum=0.5)
    whole = run(e, store=tmp_path / "other")
    for stop in range(4):
        with pytest.raises(Interrupted):
            run(e, on_round=lambda r, h, stop=stop: r == stop)
        assert (store / f"{e.id}.part" / "checkpoint.pt").exists()
    same(run(e), whole)
    assert not (store / f"{e.id}.part").exists()


@pytest.mark.parametrize("step", ["_evaluate_before", "_train", "_evaluate_after", "_upload"])
def test_ctrl_c_keeps_the_rounds_that_are_complete(store, tmp_path, monkeypatch, step):
    e = Experiment(**TINY, method="fedper", momentum=0.5)
    whole, do = run(e, store=tmp_path / "other"), getattr(simulate._Run, step)

    def interrupted(self, *args, **how):
        if self.state.round == 2:
            raise KeyboardInterrupt
        return do(self, *args, **how)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as stopped:
        patch.setattr(simulate._Run, step, interrupted)
        patch.setattr(simulate, "CHECKPOINT_EVERY", 60.0)
        run(e)
    kept = 0 if step == "_upload" else 2  # half-way through the server's step no state is whole
    assert f"{kept} of 4 rounds are kept" in stopped.value.__notes__[0]
    same(run(e), whole)


def script(body):
    head = f"import os, signal\nfrom pfl_core import Experiment; from pfl_core.engine import simulate\nfrom pfl_core.experiments.run import run\nTINY = {TINY!r}\n"
    code = head + "simulate.CHECKPOINT_EVERY = 0.0\n" + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=600
    )


@pytest.mark.slow
def test_killed_by_the_system_it_resumes(store, tmp_path):
    e = Experiment(**TINY | {"rounds": 5})
    whole = run(e, store=tmp_path / "other")
    body = "run(Experiment(**TINY | {'rounds': 5}), on_round=lambda r, h: r == 3 and os.kill(os.getpid(), signal.SIGKILL))"
    assert script(body).returncode == -signal.SIGKILL
    part = store / f"{e.id}.part" / "checkpoint.pt"
    assert torch.load(part, weights_only=True)["round"] == 3
    same(run(e), whole)


def test_a_killed_write_leaves_the_last_checkpoint(store, tmp_path):
    e = Experiment(**TINY)
    whole = run(e, store=tmp_path / "other")
    with pytest.raises(Interrupted):
        run(e, on_round=lambda r, h: r == 1)
    (store / f"{e.id}.part" / "checkpoint.part").write_bytes(b"half a fi")
    same(run(e), whole)


@pytest.mark.parametrize("harm", ["truncate", "flip", "empty"])
def test_damaged_checkpoint_is_set_aside(store, tmp_path, harm, capsys):
    e = Experiment(**TINY)
    with pytest.raises(Interrupted):
        run(e, on_round=lambda r, h: r == 1)
    path = store / f"{e.id}.part" / "checkpoint.pt"
    raw = path.read_bytes()
    path.write_bytes(
        {
            "truncate": raw[: len(raw) // 2],
            "flip": raw[:40] + b"\xff" * 64 + raw[104:],
            "empty": b"",
        }[harm]
    )
    same(run(e), run(e, store=tmp_path / "other"))
    assert "set aside" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["experiment.json", "history.csv", "arrays.npz"])
def test_damaged_result_is_set_aside_and_computed_again(store, name, capsys):
    first = run(Experiment(**TINY))
    path = store / first.id / name
    path.write_bytes(path.read_bytes()[:30])
    same(run(Experiment(**TINY)), first)
    assert (
        "set aside" in capsys.readouterr().out and (store / f"{first.id}.damaged" / name).exists()
    )


@pytest.mark.slow
def test_two_processes_never_compute_the_same_run(store):
    body = f"""
    import time
    note = lambda r, h: (open({str(store.parent / "who")!r}, "a").write(f"{{os.getpid()}}\\n"), time.sleep(0.2)) and None
    run(Experiment(**TINY), on_round=note)
    """
    procs = []
    for _ in range(2):
        head = f"import os\nfrom pfl_core import Experiment\nfrom pfl_core.experiments.run import run\nTINY = {TINY!r}\n"
        procs.append(
            subprocess.Popen([sys.executable, "-c", head + textwrap.dedent(body)], env=os.environ)
        )
    assert [p.wait(600) for p in procs] == [0, 0]
    assert len(set((store.parent / "who").read_text().split())) == 1


def test_diverged_run_is_kept_as_failed_and_the_sweep_goes_on(store, capsys):
    bad = Experiment(**TINY | {"lr": 1e30, "rounds": 3})
    rows = sweep([bad, Experiment(**TINY)])
    lost = rows[rows.run == bad.id]
    assert rows.run.unique().tolist() == [bad.id, Experiment(**TINY).id]
    assert lost[["metric", "value", "average"]].to_numpy().tolist() == [["diverged", 0, "derived"]]
    kept = load_result(store / bad.id)
    assert not kept.ok and "of client" in kept.meta["status"] and "round 0" in kept.meta["status"]
    named = kept.clients.assign(name=np.array(["a", "b"])[kept.clients.client])
    assert kept.clients.empty and named.empty and list(kept.clients) == list(run(bad).clients)
    assert set(kept.clients) == set(run(Experiment(**TINY)).clients), "nothing was measured"
    assert "failed" in capsys.readouterr().out
    assert "no test accuracy, failed: " in repr(kept) and "round 3" not in repr(kept)
    assert {*sweep([bad, bad]).metric} == {"diverged"}
    assert capsys.readouterr().out.count("failed") == 1, "said again"


def test_an_experiment_that_is_given_twice_counts_once(tmp_path):
    e, store = Experiment(**TINY), str(tmp_path / "mine")
    rows = sweep([e, e.but(lr=e.lr), e.but(tags={"row": "again"})], store=store)
    assert (
        rows.drop(columns="row").duplicated().sum() == len(rows) / 2 and not rows.duplicated().any()
    )
    assert run(e, store=store).folder == tmp_path / "mine" / e.id


def test_a_file_in_the_place_of_the_store(tmp_path):
    (tmp_path / "store").write_text("")
    with pytest.raises(OSError, match="PFL_RUNS"):
        run(Experiment(**TINY), store=tmp_path / "store")


def test_processes_do_not_change_numbers(store, tmp_path):
    cells = grid(Experiment(**TINY), {"fedavg": {}, "local": {"method": "local"}}, seeds=[0, 1])
    a, b = sweep(cells, jobs=2), sweep(cells[::-1], store=tmp_path / "other")
    keys = ["run", "when", "split", "average", "metric", "rounds"]
    a, b = (
        x[x.metric != "train_s"].drop(columns="wall_s").sort_values(keys, ignore_index=True)
        for x in (a, b)
    )
    pd.testing.assert_frame_equal(a, b)


@pytest.mark.parametrize("share, in_main, jobs", [(0.1, False, 4), (0.5, False, 1), (0.1, True, 1)])
def test_one_client_a_round_leaves_cores_to_other_runs(share, in_main, jobs, monkeypatch):
    monkeypatch.setattr(sweeps.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(Experiment, "in_main", property(lambda e: in_main))
    alone = Experiment(**TINY | {"clients": 10}, participation=0.1)
    assert sweeps._jobs([alone, alone.but(participation=share)], {"device": "cpu"}) == jobs


def test_committed_rows_spare_the_training(store, tmp_path, monkeypatch):
    e = Experiment(
        **TINY,
        tags={
            "paper": "fedper",
            "artefact": "fig2",
            "row": "fedavg",
            "column": "x",
            "profile": "quick",
        },
    )
    rows = sweep([e])
    committed.save(pd.concat([rows, rows.assign(artefact="fig3")]), "fedper", "quick", "digits")
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "home" / "results")
    committed.publish("fedper")
    again = sweep(
        [e.but(tags={"artefact": "fig3"})], found=committed.found, store=tmp_path / "empty"
    )
    assert not (tmp_path / "empty" / e.id).exists() and set(again.artefact) == {"fig3"}
    np.testing.assert_array_equal(again.value, rows.value.round(4))


def test_models_are_kept_on_request(store, tmp_path):
    r = run(Experiment(**TINY, method="fedper", keep_models=True))
    data = client_data(r.experiment)
    x, y = data.batch(torch.as_tensor(data.index["test"][2]))
    net = r.model(2)
    assert (net(x).argmax(1) == y).sum() == r.arrays["before/test/correct"][-1, 2]
    r.save(2, tmp_path / "model.pt")
    again = load_model(tmp_path / "model.pt")
    raw = data.federation.x[data.index["test"][2]]
    np.testing.assert_array_equal(again.predict(raw), net(x).argmax(1).numpy())
    np.testing.assert_array_equal(r.predict(2, raw), again.predict(raw))
    assert (again.facts["model"], again.facts["classes"], again.facts["mean"]) == (
        "mlp",
        10,
        list(load("digits").mean),
    )
    with pytest.raises(
        ValueError, match=r"kind float and shape \(1, 28, 28\); this model takes image"
    ):
        again.predict(raw[:, None] / np.float32(255))
    torch.save({"state": 1}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="holds no personal model"):
        load_model(tmp_path / "other.pt")
    with pytest.raises(ValueError, match="keep_models=True"):
        run(Experiment(**TINY, method="fedper")).model(0)
    with pytest.raises(ValueError, match="clients 0..3"):
        r.model(4)


def test_init_from_starts_at_another_end(store):
    source = Experiment(**TINY, keep_models=True)
    r = run(Experiment(**TINY | {"rounds": 0}, init_from=source))
    np.testing.assert_array_equal(
        r.arrays["before/test/correct"][0], run(source).arrays["before/test/correct"][-1]
    )


def test_new_clients_are_adopted_by_a_trained_server(store):
    dealt = {"alpha": 1.0, "of": 9}
    source = Experiment(
        **TINY | {"clients": 6, "lr": 0.01, "rounds": 3, "partition_args": dealt},
        method="pfedhn",
        method_args={"n_hidden": 0},
    )
    new = Experiment(
        **TINY | {"clients": 3, "lr": 0.01, "partition_args": dealt | {"first": 6}},
        seed=1,
        partition_seed=0,
        method="pfedhn",
        method_args={"n_hidden": 0, "dim": 2},
    )
    e = new.but(init_from=source.but(method_args={"dim": 2}), adopt=True, keep_models=True)
    r = run(e)
    phi = torch.load(store / r.id / "models.pt", weights_only=True)["extra"]["phi"]
    trained = torch.load(
        store / e.init_from.but(keep_models=True).id / "models.pt", weights_only=True
    )["extra"]["phi"]
    assert len(phi["v"]) == 3 and len(trained["v"]) == 6
    assert all(torch.equal(phi[n], trained[n]) for n in phi if n != "v") and r.meta["clients"] == 3
    with pytest.raises(ValueError, match="needs init_from"):
        Experiment(**TINY, adopt=True)
    amp = Experiment(**TINY, method="fedamp")
    with pytest.raises(ValueError, match="fedamp keeps state for each client"):
        run(amp.but(init_from=amp, adopt=True))


@pytest.mark.parametrize("bn", [True, False])
@pytest.mark.parametrize("buffers", ["local", "average", "reset"])
def test_new_clients_without_statistics_are_said_before_training(bn, buffers, store, capsys):
    old = Experiment(
        **TINY | dict(model="lenet", model_args={"kernels": 2, "bn": bn}), buffers=buffers
    )
    run(old.but(init_from=old, adopt=True, rounds=0))
    assert ("begin at mean 0 and variance 1" in capsys.readouterr().err) == (
        bn and buffers == "local"
    )


def test_a_new_field_at_its_default_keeps_ids(store):
    e = Experiment(**TINY)
    assert (
        e.id
        == Experiment(**TINY, momentum=0.0, adopt=False, plugins=()).id
        != e.but(momentum=0.5).id
    )


def test_own_federation(store):
    g = np.random.default_rng(0)
    x, y = g.standard_normal((60, 1, 8, 8)).astype(np.float32), g.integers(0, 3, 60)
    fed = Federation(
        x, y, [np.arange(20), np.arange(20, 40)], test=[np.arange(40, 50), np.arange(50, 60)]
    )
    r = run(Experiment(**TINY | {"dataset": "own", "clients": 2, "partition_args": {}}), fed=fed)
    assert r.ok and r.arrays["n/test"].tolist() == [10, 10]
    with pytest.raises(ValueError, match="go together"):
        run(Experiment(**TINY | {"dataset": "own", "partition_args": {}}))


def test_own_method_by_name_from_a_file_outside(store, tmp_path, monkeypatch):
    (tmp_path / "my_methods.py").write_text(
        "from pfl_core import Method\n\nclass Mine(Method):\n"
        '    """All but the biases are averaged."""\n    name = "mine_outside"\n'
        "    def is_shared(self, name):\n        return not name.endswith('bias')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    e = Experiment(**TINY, method="mine_outside", plugins=("my_methods",), keep_models=True)
    rows = sweep([e, e.but(seed=1)], jobs=2)
    assert rows.run.nunique() == 2
    a, b = run(e).model(0), run(e).model(1)
    assert torch.equal(a.fc.weight, b.fc.weight) and not torch.equal(a.fc.bias, b.fc.bias)


def test_gpu_asked_for_and_absent(store, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "misfit", lambda: "")
    with pytest.raises(ValueError, match="no GPU"):
        run(Experiment(**TINY), device="cuda")
    with pytest.raises(ValueError, match="unknown"):
        run(Experiment(**TINY), device="tpu")


# -- the loop ------------------------------------------------------------------------------------------------------------


def test_evaluations_and_traffic(store):
    e = Experiment(**TINY | {"rounds": 5, "eval_every": 2, "participation": 0.5}, method="fedper")
    r = run(e)
    assert r.arrays["rounds"].tolist() == [0, 2, 4, 5]
    shared = 784 * 8 + 8  # the classifier, 8 x 10 + 10, stays
    up = r.history.query("metric == 'upload_bytes'").value.tolist()
    assert up == [0, 2 * 2 * 4 * shared, 4 * 2 * 4 * shared, 5 * 2 * 4 * shared]
    assert r.history.query("metric == 'client_visits'").value.tolist() == [0, 4, 8, 10]


def test_participants_are_the_same_for_every_method():
    some = [
        train_config(Experiment(**TINY, participation=0.5, method=m)) for m in ("fedavg", "local")
    ]
    a = [simulate.sample(config, 4, 3).tolist() for config in some]
    assert a[0] == a[1] and len(a[0]) == 2 and a[0] == sorted(a[0])


@pytest.mark.parametrize("tuned", [None, {"epochs": 1}])
def test_processor_seconds_are_counted_over_all_sessions(store, monkeypatch, tuned):
    clock = [100.0]  # another one for each process
    monkeypatch.setattr(simulate.time, "process_time", lambda: clock[0])

    def work(r, history):
        clock[0] += 10
        return stop == r

    e, stop = Experiment(**TINY, finetune=tuned), 2
    with pytest.raises(Interrupted):
        run(e, on_round=work)
    clock[0], stop = 7.0, None
    result = run(e, on_round=work)
    # Rounds 0, 1, 2, then 3 and 4; the last call comes when all is measured but for fine-tuning.
    assert result.meta["cpu_s"] == (30 + 20 if tuned else 30 + 10)
    assert "s of processors" in result._repr_html_()


def test_evaluation_has_no_influence(store):
    often, seldom = (
        run(Experiment(**TINY, participation=0.5, eval_every=n, eval_after=a))
        for n, a in ((1, True), (4, False))
    )
    np.testing.assert_array_equal(
        often.arrays["before/test/correct"][-1], seldom.arrays["before/test/correct"][-1]
    )


def test_sweep_recompute_trains_all_anew_and_keeps_the_old(store, capsys):
    cells = [Experiment(**TINY | {"rounds": 1}, seed=s) for s in (0, 1)]
    first = sweep(cells)
    asked = []
    rows = sweep(cells, recompute=True, found=lambda e: asked.append(e))
    assert not asked and set(rows.run) == set(first.run)
    assert len(list(paths.store_folder().glob("*.before-*"))) == 2
    assert capsys.readouterr().out.count("computed anew; what was there is kept") == 2
    sweep(cells)
    assert len(list(paths.store_folder().glob("*.before-*"))) == 2


def wall_of(folder):
    return json.loads((folder / "experiment.json").read_text())["meta"]["wall_s"]


@pytest.mark.parametrize("way", ["stopped", "refused", "raised"])
def test_a_run_stays_until_its_recomputation_is_whole(store, way):
    e = Experiment(**TINY)
    before = run(e)

    def wrong(r, history):
        if way == "raised":
            raise ArithmeticError
        return True

    how = dict(executor="graphs") if way == "refused" else dict(on_round=wrong)
    with pytest.raises((Interrupted, ArithmeticError, ValueError)):
        run(e, recompute=True, **how)
    assert load_result(before.folder, e).meta["date"] == before.meta["date"]
    assert not list(store.glob("*.before-*"))
    again = run(e, recompute=True)
    assert again.id == before.id and (before.folder / "history.csv").is_file()
    kept = [p for p in store.glob(f"{e.id}.before-*") if (p / "experiment.json").is_file()]
    assert len(kept) == 1 and wall_of(kept[0]) == before.meta["wall_s"]


@pytest.mark.parametrize("first", ["of so many rounds", "ended early"])
def test_a_recomputation_that_ends_early_keeps_its_numbers_and_the_old(store, first):
    e = Experiment(**TINY)
    on_round = lambda r, h: "finish" if r == 2 else None  # noqa: E731
    old = run(e.but(rounds=2)) if first == "of so many rounds" else run(e, on_round=on_round)
    new = run(e, on_round=on_round, recompute=True)
    assert new.id == old.id and new.meta["wall_s"] != old.meta["wall_s"]
    assert load_result(old.folder).meta["wall_s"] == new.meta["wall_s"]
    (kept,) = store.glob(f"{old.id}.before-*")
    assert wall_of(kept) == old.meta["wall_s"]


@pytest.mark.parametrize("names", [("client_names",), ("client_names", "class_names"), ()])
def test_a_result_has_the_names_of_the_federation_that_was_given(store, names):
    x, y = np.random.default_rng(0).random((30, 5), dtype=np.float32), np.arange(30) % 2
    lists = np.arange(30).reshape(3, 10)
    given = dict(client_names=["n", "s", "e"], class_names=["a", "b"])
    e = Experiment(dataset="own", model="mlp", rounds=1)
    for named in (given, {n: given[n] for n in names}):
        fed = Federation(x, y, lists[:, :6], None, lists[:, 6:], **named)
        result = run(e, fed=fed)
        assert {n: result.meta[n] for n in given if n in result.meta} == fed.names


def test_a_word_that_sweep_does_not_know_is_refused_though_nothing_is_to_be_computed(store):
    cells = [Experiment(**TINY | {"rounds": 1})]
    sweep(cells)
    with pytest.raises(ValueError, match="keep_sate.*did you mean 'keep_state'"):
        sweep(cells, keep_sate=True)


def test_sweep_computes_what_is_found_neither_in_the_store_nor_elsewhere(store):
    here, there, nowhere = (Experiment(**TINY | {"rounds": 1}, seed=s) for s in range(3))
    held = run(here).rows
    asked = []

    def found(e):
        asked.append(e.seed)
        return held.assign(seed=1) if e.seed == 1 else None

    rows = sweep([here, there, nowhere], found=found)
    assert asked == [1, 2] and rows.seed.drop_duplicates().tolist() == [0, 1, 2]
    assert not (paths.store_folder() / there.id).exists()
    assert (paths.store_folder() / nowhere.id).is_dir()


@pytest.mark.parametrize("mode", [0o700, 0o770, 0o2775, 0o777])
def test_who_may_write_in_a_store_may_take_its_locks(mode, tmp_path):
    from pfl_core.experiments.store import locked

    tmp_path.chmod(mode)
    with locked(tmp_path / "run.lock"):
        assert (tmp_path / "run.lock").stat().st_mode & 0o777 == mode & 0o666
