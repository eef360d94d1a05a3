"""FedCP, FedPAC, GPFL, FedDBE, FedRoD, FedProto: their parts by hand, gradients against autograd, limits, and the identities they reduce to."""

import math

import pytest
import torch
from torch import nn

from pfl_core import Experiment, models, run
from tests.core.methods.features_shared import EVERYONE, one_round
from tests.core.methods.setting import ARGS, OURS, assert_same, setup

NAMES = ("fedcp", "fedpac", "gpfl", "feddbe", "fedas", "pfedfda", "fedrod", "fedproto")


@pytest.mark.parametrize("name", NAMES)
def test_order_of_clients_does_not_matter(name):
    states = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        method, data = setup(name)
        state = method.init()
        for _ in range(2):
            state, _ = one_round(method, data, state, torch.tensor(order))
        states.append(state)
    assert_same(*states, exact=False)


BAD = {
    "fedcp": [dict(lam=-1.0)],
    "fedpac": [dict(lam=-1.0), dict(head_epochs=-1), dict(cut=1.0)],
    "gpfl": [dict(lam=-1.0), dict(mu=-0.1), dict(condition="mine")],
    "feddbe": [dict(kappa=-1.0), dict(mu=0.0), dict(mu=1.1)],
    "fedrod": [dict(gamma=-1.0), dict(start="psi"), dict(score="own")],
    "fedproto": [dict(lam=-1.0), dict(proto="mean"), dict(weights="n"), dict(score="head")],
}


@pytest.mark.parametrize("name, args", [(n, a) for n, all_args in BAD.items() for a in all_args])
def test_illegal_values_are_named(name, args):
    with pytest.raises(ValueError, match=f"{name}.*{next(iter(args))}.*allowed"):
        setup(name, args=args)


@pytest.mark.parametrize("name", ["fedcp", "fedpac", "gpfl"])
def test_traffic_is_that_of_the_formula(name):
    method, data = setup(name)
    state = method.init()
    sent = method.download(state, EVERYONE[:3])
    _, end = one_round(method, data, state)
    up = {n: v for n, v in end.items() if n not in state.clients and n not in method.task.buffers}
    classes, size = method.task.initial["fc.weight"].shape
    whole = sum(method.task.initial[n].numel() for n in method.task.parameters)
    head, square = (size + 1) * classes, 2 * size**2 + 6 * size
    down = {
        "fedcp": whole + square,
        "fedpac": whole + classes * size,
        "gpfl": whole - head + classes * size + square,
    }
    extra = {"fedcp": 0, "fedpac": classes * size + classes + 1, "gpfl": 0}
    assert method.traffic(state, EVERYONE[:3], sent, up) == (
        3 * down[name],
        3 * (down[name] + extra[name]),
    )


def chain(input_shape, classes):
    """No fc, no features, no bias at the end."""
    body = nn.Linear(math.prod(input_shape), 6), nn.BatchNorm1d(6), nn.Tanh()
    return nn.Sequential(nn.Flatten(), *body, nn.Linear(6, classes, bias=False))


def all_convolutions(input_shape, classes):
    """The scores are means of a convolution."""
    last = nn.Conv2d(4, classes, 1)
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 4, 5, 4), nn.ReLU(), last, nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


def softmax_after(input_shape, classes):
    """More than the last layer makes the scores."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes), nn.LogSoftmax(1))


@pytest.fixture
def experiment(monkeypatch, store):
    """(method, model function) -> a tiny Experiment over that model."""
    monkeypatch.setattr(models, "_MODELS", dict(models._MODELS))

    def make(name, fn):
        models.register_model("mine", fn)
        how = dict(method=name, method_args=ARGS.get(name, {}), holdout=0.25, lr=0.05, rounds=2)
        return Experiment(model="mine", partition="iid", clients=3, max_samples=12, **how)

    return make


@pytest.mark.parametrize("executor", ["threads", "batched"])
@pytest.mark.parametrize("name", OURS)
def test_every_method_takes_a_model_without_fc_and_features(name, executor, experiment):
    result = run(experiment(name, chain), executor=executor)
    assert result.ok and result.history.value.notna().all()


@pytest.mark.parametrize("name", OURS)
def test_a_model_that_does_not_end_in_a_linear_layer_is_refused_where_that_is_needed(
    name, experiment
):
    e = experiment(name, all_convolutions)
    if name not in NAMES:
        assert run(e).ok
        return
    said = rf"{name}: .*the scores of Sequential come from 2: .*let its forward end in it, .* or take a method that needs no features"
    with pytest.raises(ValueError, match=said):
        run(e)
    with pytest.raises(ValueError, match="they are not the output of one nn.Linear over features"):
        run(experiment(name, softmax_after))
