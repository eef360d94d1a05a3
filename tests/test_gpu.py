"""What needs a GPU to be shown: `python -m pytest -m gpu`. Elsewhere the same tests run on the pretend accelerator, with tapes
for graphs, so that none of them fails on a GPU by a slip; only what cannot be pretended is not run."""

from pathlib import Path

import pytest
import torch

from benchmarks import stages
from benchmarks.agree import compared, wrong
from benchmarks.stages import Asked
from benchmarks.steps import TINY, Step, network, reached
from pfl_core.engine.convolutions import FORMS
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.run import pick_device, run
from pfl_core.methods.base import METHODS
from pfl_core.util import gpu

ABSENT = gpu.refused()
CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(bool(ABSENT), reason=f"needs a GPU: {ABSENT}")],
)
PRETEND = pytest.param("pretend", marks=pytest.mark.slow)


@pytest.fixture(params=[PRETEND, CUDA])
def asked(request, tmp_path):
    """A stage's call, on each device."""
    with reached(request.param) as device:
        small = request.param == "pretend"
        yield Asked(device, "graphs", frozenset(), small, tmp_path)


@pytest.fixture(params=[CUDA])
def cuda(request):
    return request.param


# -- graphs --------------------------------------------------------------------------------------------------------------


def test_graphs_are_captured_given_up_and_captured_again(asked):
    assert stages.captured_thrice(asked) == {"captured": 3}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", ["lenet", "cnn", "cnn_bn"])
def test_each_part_is_captured_and_a_replayed_step_is_the_eager_one(model, form, asked):
    if asked.smallest and model != "lenet":
        model = "lenet"
    step = Step(network(model, asked.smallest, dtype="float64"), asked.device, form, 2)
    for name in step.parts:
        assert step.microseconds(name, 1, captured=True) > 0
    memory = step.stack.live
    before = {n: v.clone() for n, v in memory.items()}
    ends = []
    for captured in (False, True):
        for n, v in before.items():
            memory[n].copy_(v)
        with step.running():
            step.captured("whole step")() if captured else step.parts["whole step"]()
        ends.append({n: v.clone().cpu() for n, v in memory.items()})
    moved = [n for n, v in before.items() if not torch.equal(v.cpu(), ends[0][n])]
    assert "fc.weight" in moved or len(moved) > 3
    for n, v in ends[0].items():
        torch.testing.assert_close(ends[1][n], v, rtol=1e-9, atol=1e-11)


def agreements():
    return [
        *(pytest.param("pretend", name, marks=pytest.mark.slow) for name in ("fedavg", "flayer")),
        *(pytest.param("cuda", name, marks=CUDA.marks) for name in sorted(METHODS)),
    ]


@pytest.mark.parametrize(("device", "method"), agreements())
def test_all_stacked_executors_end_where_threads_does(device, method):
    with reached(device) as there:
        small = device == "pretend"
        executors = ("graphs", "graphs:unfold") if small else tuple(stages.STACKED)
        how = {"base": TINY.but(rounds=2)} if small else {}
        found = compared(method, there, executors, **how)
    assert [*found] == [*executors] and not wrong(found), found


@pytest.mark.parametrize(
    "device",
    [pytest.param("pretend", marks=pytest.mark.slow), pytest.param("cuda", marks=CUDA.marks)],
)
def test_other_optimizers_and_rates_end_where_threads_do(device):
    adam = dict(optimizer="adamw", optimizer_args={"eps": 1e-3}, lr=0.01, weight_decay=0.1)
    base = TINY.but(rounds=3, lr_schedule="cosine", server="adam", **adam)
    with reached(device) as there:
        found = compared("fedavg", there, ("graphs",), base=base)
    assert not wrong(found), found


# -- the life of a run ---------------------------------------------------------------------------------------------------


def test_a_run_after_others_is_the_first_one_again(asked):
    found = stages.several_runs(asked)
    assert found["off"] == 0 and " 0 replays" not in found["ran"]


def test_a_resumed_run_ends_as_one_that_was_not(cuda, tmp_path):
    assert stages.resumed(Asked(cuda, "graphs", frozenset(), False, tmp_path)) == {"off": 0}


def test_too_little_memory_makes_chunks_and_changes_nothing(cuda, tmp_path):
    found = stages.little_memory(Asked(cuda, "graphs", frozenset(), False, tmp_path))
    assert found["off"] <= 1e-9


# -- the door ------------------------------------------------------------------------------------------------------------


def test_a_run_finds_the_gpu_and_says_so(cuda, store, monkeypatch):
    monkeypatch.delenv("PFL_DEVICE", raising=False)
    assert gpu.misfit() == "" and pick_device("auto") == "cuda"
    e = Experiment(clients=2, model="lenet", rounds=2, max_samples=40)
    meta = run(e).meta
    assert meta["device"] == torch.cuda.get_device_name() and meta["executor"].startswith("graphs")
    assert Path(run(e).folder).is_dir()
