"""The benchmarks on the pretend accelerator: what would spend a GPU's hour on a slip is found here."""

import numpy as np
import pytest
import torch

from benchmarks import many, pfllib, rounds
from benchmarks.cases import Case
from benchmarks.pretend import DEVICE
from benchmarks.rounds import Ours, measure
from benchmarks.waits import SMALL, accelerated
from pfl_core.data.federation import Federation
from pfl_core.engine.engine import Engine
from pfl_core.engine.simulate import Interrupted, simulate
from pfl_core.experiments.build import build_method, client_data

TINY = SMALL.but(clients=2, max_samples=12, model_args={"kernels": 1}, dtype="float32", rounds=1)
CASE = Case("tiny", lambda: TINY, 1.0, 1.0)


@pytest.mark.slow
def test_a_case_of_rounds_is_measured_there_as_here():
    kept = []
    with accelerated():
        there = measure(CASE, 1, DEVICE, keep=kept.append)
    here = measure(CASE, 1, "cpu")
    assert there["executor"] == "batched" and there["training_gflops"] > 0
    assert there["ours_acc_pct"] == pytest.approx(here["ours_acc_pct"], abs=10)
    assert "training_gflops" not in kept[0] and kept[0]["ours_train_s"] == there["ours_train_s"]


def test_what_was_timed_is_kept_though_counting_fails(monkeypatch):
    def fails(*_):
        raise RuntimeError("no FLOP")

    kept = []
    monkeypatch.setattr(rounds, "training_flop", fails)
    with pytest.raises(RuntimeError, match="no FLOP"):
        measure(CASE, 1, "cpu", keep=kept.append)
    assert kept[0]["ratio"] > 0


def test_the_floor_counts_each_part_of_a_round():
    ours = Ours(TINY, "cpu")
    task, index = ours.method.task, ours.data.index
    one = rounds.training_flop(
        task.model, ours.data.batch(torch.as_tensor(index["train"][0][:1]))[0]
    )
    images = {s: sum(map(len, index[s])) for s in ("train", "test")}
    train, forward, moved = rounds.work(ours, TINY, [[0, 1]])
    assert train == pytest.approx(one * images["train"])  # one epoch
    assert forward == pytest.approx(one * sum(images.values()) / 3)
    weights = sum(p.nbytes for p in task.model.parameters())
    assert moved == pytest.approx(rounds.PASSES * weights * images["train"] / TINY.batch)


def test_pfllib_reads_the_samples_that_ours_trains_on(tmp_path):
    data = client_data(TINY)
    pfllib.deal(data, tmp_path / "tiny")
    again = Federation.from_pfllib(tmp_path / "tiny", trusted=True)
    for split in ("train", "test"):
        for k in range(TINY.clients):
            x, y = data.batch(torch.as_tensor(data.index[split][k]))
            held = np.load(tmp_path / "tiny" / split / f"{k}.npz", allow_pickle=True)["data"].item()
            assert np.array_equal(held["x"], x) and np.array_equal(held["y"], y)
            assert np.array_equal(again.x[again.index[split][k]], x)


def test_a_resumed_run_is_told_from_one_that_began_again_or_ended_elsewhere(tmp_path):
    e = next(many.experiments(0)).but(rounds=many.ROUNDS)
    clients, other = client_data(e), e.but(lr=0.5)
    files = {name: tmp_path / name for name in ("same", "other", "none")}
    for name, experiment in (("same", e), ("other", other)):
        method, stop = build_method(experiment, clients), lambda r, history: True
        with pytest.raises(Interrupted):
            simulate(method, clients, checkpoint=files[name], on_round=stop)
    said = [many._resumed(e, clients, file) for file in files.values()]
    assert said == ["equal", "no: other numbers", "no: it began again"]


def test_counting_leaves_the_model_where_it_is(monkeypatch):
    with accelerated():
        ours = Ours(TINY, DEVICE)
        with torch.no_grad():
            ours.train()
        assert min(rounds.work(ours, TINY, [[1, 0]])) > 0
        assert {p.device for p in ours.method.task.model.parameters()} == {DEVICE}


@pytest.mark.parametrize("kind", ["full", "tf32", "bf16"])
def test_all_that_is_timed_multiplies_as_the_experiment_says(kind, monkeypatch):
    seen = []

    def noted(name):
        real = getattr(Engine, name)

        def call(self, *given):
            seen.append(
                (name, torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)
            )
            return real(self, *given)

        monkeypatch.setattr(Engine, name, call)

    noted("run"), noted("evaluate")
    plain = TINY.but(precision=kind, model_args={"kernels": 1, "bn": False})
    ours = Ours(plain, "cpu", "batched")
    with torch.no_grad():
        ours.train()
        ours.evaluate("test")
    tf32 = kind == "tf32"
    assert seen == [("run", tf32, tf32), ("evaluate", tf32, tf32)]
