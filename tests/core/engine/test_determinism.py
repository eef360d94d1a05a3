"""The same Experiment gives the same numbers whatever the threads, the interruptions, and what ran before it in the process."""

import numpy as np
import pytest
import torch
from torch import nn

from pfl_core import Experiment, models
from pfl_core.engine import simulate
from pfl_core.engine.simulate import Interrupted
from pfl_core.experiments import build
from pfl_core.experiments.run import run
from pfl_core.methods.base import METHODS

OURS = sorted(n for n, c in METHODS.items() if c.__module__.startswith("pfl_core."))
TINY = dict(
    partition_args={"alpha": 1.0},
    clients=4,
    model="lenet",
    model_args={"kernels": 2, "bn": True},
    batch=6,
)
TINY |= dict(
    rounds=3, participation=0.75, lr=0.02, momentum=0.5, holdout=0.25, max_samples=14, eval_every=2
)


@pytest.mark.slow
@pytest.mark.parametrize("method", OURS)
def test_threads_and_interruptions_change_nothing(method, tmp_path, monkeypatch):
    monkeypatch.setattr(simulate, "CHECKPOINT_EVERY", 0.0)
    e = Experiment(**TINY, method=method, record=("weights",) if method == "pfedla" else ())
    e = e.but(momentum=0.0) if method == "apfl" else e  # its steps are plain
    whole = run(e, store=tmp_path / "a", workers=1)
    np.random.seed(7)
    torch.manual_seed(7)  # what a user does to the global generators
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for stop, workers in ((0, 3), (1, 2), (2, 4)):
            with pytest.raises(Interrupted):
                run(
                    e,
                    store=tmp_path / "b",
                    workers=workers,
                    on_round=lambda r, h, stop=stop: r == stop,
                )
        again = run(e, store=tmp_path / "b", workers=3)
    finally:
        torch.set_num_threads(threads)
    assert whole.arrays.keys() == again.arrays.keys() and whole.ok
    for name, v in whole.arrays.items():
        np.testing.assert_array_equal(v, again.arrays[name], err_msg=name)
    keep = whole.history.metric != "train_s"
    assert whole.history[keep].equals(again.history[keep])
    assert whole.arrays["before/test/loss"].std() > 0  # it trained


def with_dropout(input_shape, classes):
    body = {"flat": nn.Flatten(), "fc1": nn.Linear(784, 8), "drop": nn.Dropout()}
    return models.Net({"body": body, "fc": {"fc": nn.Linear(8, classes)}})


def with_a_hook(input_shape, classes):
    net = models.build("mlp", input_shape, classes, hidden=8)
    net.get_submodule("fc").register_forward_pre_hook(
        lambda layer, x: (nn.functional.dropout(x[0], 0.5, layer.training),)
    )
    return net


@pytest.mark.parametrize("make", [with_dropout, with_a_hook])
def test_our_networks_changed_draw_by_the_seed(make, tmp_path, monkeypatch):
    monkeypatch.setitem(models._MODELS, "changed", (make, ""))
    e = Experiment(**TINY | dict(model="changed", model_args={}), keep_models=True)
    before = torch.random.get_rng_state()
    a, b = (run(e, store=tmp_path / str(w), workers=w).model(0).state_dict() for w in (1, 3))
    assert torch.equal(before, torch.random.get_rng_state())
    for name, v in a.items():
        assert torch.equal(v, b[name]), name


def test_the_features_of_our_networks_changed_are_those_of_their_last_layer(monkeypatch):
    def deeper(input_shape, classes):
        net = models.build("mlp", input_shape, classes, hidden=8)
        net.fc = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, classes))
        return net

    monkeypatch.setitem(models._MODELS, "deeper", (deeper, ""))
    e = Experiment(**TINY | dict(model="deeper", model_args={}))
    method = build.build_method(e, build.client_data(e))
    net, x = method.task.model, torch.randn(4, 1, 28, 28)
    z = method.task.features(method.task.initial, x)
    torch.testing.assert_close(method.task.classify(method.task.initial, z), net(x))
