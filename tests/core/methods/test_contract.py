"""What methods/base.py says of training, traffic and measuring, over all methods and executors."""

import dataclasses
import re
import sys

import pytest
import torch

from pfl_core.engine import probes
from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.engine.simulate import news, returned, simulate
from pfl_core.methods.base import METHODS, Method
from pfl_core.methods.fedaghn import FedAGHN
from pfl_core.methods.pfedfda import PFedFDA
from tests.core.methods.loops_shared import EXECUTORS
from tests.core.methods.setting import OURS, leaves, rounds, setup


def trained(method, data, executor):
    """State, what was sent, start and end of a first round of all clients."""
    everyone = torch.arange(data.K)
    state = method.init()
    with torch.no_grad():
        sent = method.download(state, everyone)
        start = method.begin(state, everyone, sent)
        end = method.local(Context(Engine(method, data, executor, 1), state, everyone, 0), start)
    return state, sent, start, end


# -- what travels ----------------------------------------------------------------------------------

# What a round begins with, `serve` reads, and nobody sends.
BACK = {"fedproto": {"proto", "seen"}, "pfedfda": {"prior"}}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", OURS)
def test_all_that_is_uploaded_is_new(name, executor):
    method, data = setup(name)
    state, sent, start, end = trained(method, data, executor)
    up = returned(method, state, start, sent, end)[1]
    assert up.keys() - news(start, up).keys() == BACK.get(name, set())


def test_heads_that_fedpac_does_not_train_reach_its_server_uncounted():
    method, data = setup("fedpac", args=dict(head_epochs=0))
    state, sent, start, end = trained(method, data, "threads")
    up = returned(method, state, start, sent, end)[1]
    assert up.keys() - news(start, up).keys() == set(method.task.classifier)


class Told(Method):
    """Clients train under a scale that came down for this round, and are served under it."""

    name = "told_for_test"

    def init(self):
        state = super().init()
        state.server["scale"] = torch.full((2, 3), 2.0).to(self.task.dtype)
        return state

    def logits(self, p, x):
        return super().logits(p, x) * p["scale"].sum()

    def local(self, ctx, start):
        return ctx.train(self.loss, start, only=self.task.head) | {"more": start["scale"] + 1}

    def upload(self, state, sel, start, end, weight):
        assert torch.equal(end["scale"], start["scale"])
        base = [n for n in self.task.names if n not in self.task.head]
        assert all(torch.equal(end[n], start[n]) for n in base if n in self.task.parameters)
        return super().upload(state, sel, start, end, weight)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_only_came_down_is_seen_by_serve_and_upload_and_not_counted(executor):
    method, data = setup("told_for_test", rounds=1, participation=0.5)
    _, history, *_, after, _ = simulate(method, data, executor=executor, workers=1)
    size = {n: v.numel() for n, v in method.task.initial.items()}
    model = sum(size[n] for n in method.task.parameters)
    assert history.download[-1] == 2 * (model + 6)
    assert history.upload[-1] == 2 * (sum(size[n] for n in method.task.head) + 6)
    assert torch.equal(after["scale"], torch.full((4, 2, 3), 2.0).double())


# -- what the experiment asks of SGD ---------------------------------------------------------------

ASKED = {"momentum": 0.9, "weight_decay": 0.3, "clip": 0.05}


@pytest.mark.parametrize("name", OURS)
def test_momentum_decay_and_clipping_act_are_refused_or_are_said_not_to(name):
    module = sys.modules[METHODS[name].__module__]
    said = re.search(r"[Mm]omentum, weight decay and clipping", module.__doc__)
    how = dict(eval_after=False, epochs=2, bn=False)
    plain = dict(leaves(rounds(name, n=1, **how)[1]))
    for asked, value in ASKED.items():
        try:
            state = rounds(name, n=1, **how, **{asked: value})[1]
        except ValueError as error:
            assert f"{asked} = {value}" in str(error) and said
            continue
        acts = any(not torch.equal(v, plain[path]) for path, v in leaves(state))
        assert acts == (not said), asked


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", probes.NEEDS)
@pytest.mark.parametrize("name", OURS)
def test_a_probe_is_refused_at_once_or_has_something_to_show(name, probe):
    method, data = setup(name, rounds=1)
    try:
        probes.check([probe], method)
    except ValueError as error:
        assert str(error).startswith(f"record: {name} has no {probe}; ")
        return
    record = probes.recorder([probe])
    _, history, *_ = simulate(method, data, workers=1, record=record)
    assert any(torch.isfinite(v).all() for v in history.probes.values())


def test_hyper_parameters_that_are_called_as_a_probe_are_none():
    called = {
        (m, f.name) for m in OURS for f in dataclasses.fields(METHODS[m]) if f.name in probes.PROBES
    }
    assert called == {("fedproto", "weights")}


@pytest.mark.parametrize("name", OURS)
def test_no_hyper_parameter_hides_a_function(name):
    for f in dataclasses.fields(METHODS[name]):
        for c in METHODS[name].__mro__:
            assert not callable(vars(c).get(f.name)), f"{c.__name__}.{f.name}"


@pytest.mark.parametrize(
    ("base", "name", "owner"),
    [
        (FedAGHN, "weights", "FedAGHN"),
        (PFedFDA, "head", "PFedFDA"),
        (PFedFDA, "crossed", "PFedFDA"),
        (Method, "loss", "Method"),
    ],
)
def test_a_hyper_parameter_that_would_hide_a_function_is_refused(base, name, owner):
    with pytest.raises(ValueError, match=rf"\({name}=...\): .* because {owner}.{name} is there"):
        type("Hides", (base,), {name: 0.5, "__annotations__": {name: "float"}})


def test_a_field_and_a_function_of_one_name_are_refused():
    words = {"__annotations__": {"mix": "str"}, "mix": lambda self: 1}
    with pytest.raises(ValueError, match=r"\(mix=...\): .* because Twice.mix is there"):
        type("Twice", (Method,), words)
    base = type("Constant", (Method,), {"scale": 2.0})
    made = type("Scaled", (base,), {"scale": 3.0, "__annotations__": {"scale": "float"}})
    assert made(scale=4.0).scale == 4.0
