"""Two forms of stacked convolutions: the same numbers in all networks; which one is taken, recorded and taken again."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap
from torch.profiler import ProfilerActivity, profile

from benchmarks.agree import compared, wrong
from benchmarks.tape import taped
from benchmarks.waits import SMALL, accelerated, trained, waits
from pfl_core import Experiment, models
from pfl_core.engine import convolutions
from pfl_core.engine.batched import Batched
from pfl_core.engine.convolutions import FORMS, GROUPED, UNFOLD, unfolds
from pfl_core.engine.engine import AUTO, Engine
from pfl_core.engine.rules import Rules
from pfl_core.engine.simulate import Interrupted
from pfl_core.experiments.run import run
from pfl_core.methods.fedavg import FedAvg
from pfl_core.methods.task import Task
from tests.core.engine.setting import CONFIG, assert_close, client_data, clients_of, engine, train
from tests.core.methods.setting import assert_same, leaves


@pytest.fixture(autouse=True)
def _graphs_of_a_stand_in():
    with taped():
        yield


@pytest.fixture
def calls(monkeypatch):
    """One entry for each convolution that is unfolded."""
    seen, unfolded = [], convolutions.unfolded
    monkeypatch.setattr(
        convolutions, "unfolded", lambda *a, **k: seen.append(1) or unfolded(*a, **k)
    )
    return seen


# -- the same numbers ----------------------------------------------------------------------------------------------------

HOW = [
    dict(stride=stride, padding=padding, dilation=dilation, groups=groups)
    for stride, padding, dilation, groups in itertools.product(
        (1, 2, (2, 1)), (0, 1, (0, 2), "same", "valid"), (1, (1, 2)), (1, 2, 4)
    )
    if padding != "same" or stride == 1  # torch has no other
]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_values_and_gradients_of_input_weight_and_bias(how):
    g = torch.Generator().manual_seed(0)
    x, w, b = (
        torch.randn(shape, generator=g, dtype=torch.float64)
        for shape in ((3, 2, 4, 9, 8), (3, 8, 4 // how["groups"], 3, 2), (3, 8))
    )

    def value(x, w, b):  # of one client
        out = F.conv2d(x, w, b, **how)
        return out.sin().sum(), out

    torch._C._functorch._set_vmap_fallback_enabled(False)  # client by client would be slow
    try:
        found = []
        for form in FORMS:
            with Rules(form):
                found.append(vmap(grad(value, (0, 1, 2), has_aux=True))(x, w, b))
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(True)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    assert found[0][1].abs().min() > 0


def test_one_image_and_no_bias(calls):
    x, w = torch.randn(4, 7, 7), torch.randn(6, 4, 3, 3)
    with Rules(UNFOLD):
        got = F.conv2d(x, w, padding=1), F.conv2d(input=x[None], weight=w, padding=1)[0]
    assert len(calls) == 3  # one image is taken as a batch of one
    torch.testing.assert_close(got, (F.conv2d(x, w, padding=1),) * 2)


SIZES = {"lenet": dict(kernels=2), "lenet4": {}, "cnn": dict(width=0.1), "cnn_bn": {}}
SIZES |= dict.fromkeys(("resnet18", "resnet34"), dict(width=0.05, stem="cifar"))
SIZES |= {"mobilenet": dict(width=0.05), "linear": dict(width=0.05, depth=2)}


def test_all_networks_with_convolutions_are_here():
    built = {
        n: models.build(n, (3, 16, 16), 3, **SIZES.get(n, {}))
        for n in models._OURS
        if n != "fasttext"
    }
    convolve = {
        n for n, net in built.items() if any(type(m) is torch.nn.Conv2d for m in net.modules())
    }
    assert convolve == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_two_local_steps_of_every_network(name, calls):
    g = np.random.default_rng(0)
    x, y = g.integers(0, 256, (40, 16, 16), dtype=np.uint8), g.integers(0, 3, 40)
    ends = {}
    for executor in ("batched", "batched:unfold", "graphs:unfold"):
        del calls[:]
        data = clients_of(x, y, [np.arange(20), np.arange(20, 40)])
        net = models.build(name, data.input_shape, 3, **SIZES[name])
        task = Task(net.double(), data.n, data.label_counts, replace(CONFIG, batch=10, lr=0.01))
        e = Engine(FedAvg().bind(task), data, executor, 1)
        ends[executor] = train(e)
        assert e.ran == {executor}
        convs = [m for m in net.modules() if type(m) is torch.nn.Conv2d]
        convs = [m for m in convs if unfolds(m.weight[None], m.weight, groups=m.groups)]
        assert len(calls) == 2 * len(convs) * (executor != "batched")
    assert not torch.equal(ends["batched"]["fc.weight"][0], net.fc.weight)
    for other in ("batched:unfold", "graphs:unfold"):
        for n, v in ends["batched"].items():
            torch.testing.assert_close(ends[other][n], v, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["fedavg", "perfedavg", "pfedme", "flayer"])
def test_on_a_pretend_accelerator(name):
    small = SMALL.but(method=name, rounds=2)
    with accelerated() as (_, steps):
        there = trained(small, executor="batched:unfold")
    assert there.history.executor == "batched:unfold" and not waits(steps)
    here = dict(leaves(trained(small, "cpu", executor="batched").state))
    assert_same({p: v.held for p, v in leaves(there.state)}, here, exact=False)


def test_a_wrong_product_would_be_seen(monkeypatch):
    asked = ("batched", "batched:unfold", "batched:fastest")
    found = compared("fedavg", "cpu", asked)
    assert (*found,) == asked and not wrong(found)
    right = convolutions.unfolded
    monkeypatch.setattr(convolutions, "unfolded", lambda *a, **k: right(*a, **k) * (1 + 1e-6))
    found = compared("fedavg", "cpu", asked)
    assert "batched:unfold" in wrong(found) and "batched" not in wrong(found)


# -- the choice ----------------------------------------------------------------------------------------------------------


def test_who_chooses():
    assert AUTO["cuda"] == "graphs:fastest"
    for executor in ("threads", "batched", "graphs", "batched:unfold"):
        e = engine(executor)
        train(e)
        assert e.ran == {executor} and not e.batched.faster
    with pytest.raises(ValueError, match="executor 'threads:unfold' is unknown"):
        engine("threads:unfold")


@pytest.mark.parametrize("executor", ["batched:fastest", "graphs:fastest"])
def test_the_form_that_is_found_faster_leaves_no_trace_but_its_name(executor, monkeypatch):
    seconds, found = Batched.seconds, []
    monkeypatch.setattr(Batched, "seconds", lambda *a: found.append(seconds(*a)) or found[-1])
    e = engine(executor, momentum=0.5)
    got = train(e, rounds=2)
    (form,) = e.batched.faster.values()
    assert len(found) == 2 and min(found) > 0 and form == FORMS[found.index(min(found))]
    forced = executor.replace(":fastest", ":unfold" * (form == UNFOLD))
    assert e.ran == {forced}
    want = train(engine(forced, momentum=0.5), rounds=2)
    assert all(torch.equal(got[n], want[n]) for n in want)


def faster(monkeypatch, form, but=()):
    """From now on measurements find `form` faster; what is in `but` runs out of memory. Which were made, in turn."""
    made = []

    def seconds(self, job, how, tried):
        made.append(tried)
        if tried in but:
            raise torch.OutOfMemoryError("no")
        return 1.0 if tried == form else 2.0

    monkeypatch.setattr(Batched, "seconds", seconds)
    return made


def test_it_is_measured_once_for_what_is_trained(monkeypatch):
    made = faster(monkeypatch, UNFOLD)
    e = engine("batched:fastest")
    for lr in (0.1, 0.2):
        train(e, lr=lr)
    assert made == [*FORMS] and e.ran == {"batched:unfold"}
    faster(monkeypatch, GROUPED)
    train(e)
    train(e, only=["fc.weight"])
    assert e.batched.faster["fc.weight"] == GROUPED and e.ran == {"batched", "batched:unfold"}
    assert_close(train(engine("threads")), train(e))


def test_a_form_that_does_not_fit_is_not_taken(monkeypatch):
    for but, ran in (((UNFOLD,), "batched"), ((GROUPED,), "batched:unfold"), (FORMS, "batched")):
        faster(monkeypatch, UNFOLD, but)
        e = engine("batched:fastest")
        train(e)
        assert e.ran == {ran}


def test_a_network_without_convolutions_has_no_forms():
    data = client_data((8, 7))
    net = models.build("mlp", (1, 8, 8), 3).double()
    method = FedAvg().bind(Task(net, data.n, data.label_counts, CONFIG))
    for executor in ("batched:fastest", "batched:unfold"):
        e = Engine(method, data, executor, 1)
        train(e)
        assert e.ran == {"batched"} and not e.batched.faster


def test_what_cannot_be_stacked_still_runs_one_by_one():
    e = engine("graphs:fastest")

    def branches(p, anchor, batch):
        out = e.method.loss(p, anchor, batch)
        return out * 2 if out > 100 else out

    with pytest.warns(UserWarning, match="they run one by one"):
        train(e, loss=branches)
    assert e.ran == {"threads"}


def test_memory_is_estimated_for_the_form():
    e, jobs = engine("batched"), []
    e.batched.run = lambda job, *_: jobs.append(job) or {}
    train(e)
    likely = {form: e.batched._activations(jobs[0], form) for form in FORMS}
    # Kept for the kernels' gradient: of 4 images 9 entries at each of 6 x 6 places, in place of 8 x 8 pixels.
    assert likely[UNFOLD] - likely[GROUPED] == 4 * (9 * 6 * 6 - 8 * 8) * 8
    assert e.batched.estimate(jobs[0], UNFOLD)[1] > e.batched.estimate(jobs[0])[1]


@pytest.mark.parametrize("form", FORMS)
def test_a_step_takes_at_least_and_at_most_what_is_estimated(form):
    g = np.random.default_rng(0)
    x, y = g.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8), g.integers(0, 3, 40)
    data = clients_of(x, y, list(np.arange(40).reshape(4, 10)), torch.float32)
    net, config = models.build("lenet", data.input_shape, 3), replace(CONFIG, batch=10)
    method = FedAvg().bind(Task(net, data.n, data.label_counts, config))
    e = Engine(method, data, "batched" + ":unfold" * (form == UNFOLD), 1)
    jobs, trains = [], e.batched.run
    e.batched.run = lambda job, *_: jobs.append(job) or trains(job)
    train(e)  # its stack is there
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen, torch.no_grad():
        trains(jobs[0])
    events = seen.profiler.kineto_results.events()  # allocations and releases, in turn
    used = np.cumsum([v.nbytes() for v in events if v.name() == "[memory]"])
    (stack,) = e.batched.stacks.values()
    held = stack.live | stack.fixed | stack.anchor
    held = sum(v.untyped_storage().nbytes() for v in held.values())
    least, likely = e.batched.estimate(jobs[0], form)
    assert least < (held + used.max()) / 4 < likely


# -- the record ----------------------------------------------------------------------------------------------------------

TINY = Experiment(
    partition_args={"alpha": 1.0},
    clients=4,
    model="lenet",
    model_args={"kernels": 2},
    batch=6,
    rounds=3,
    lr=0.05,
    max_samples=14,
)


def test_a_resumed_run_takes_the_form_of_its_checkpoint(store, tmp_path, monkeypatch):
    faster(monkeypatch, UNFOLD)
    how = dict(executor="batched:fastest")
    with pytest.raises(Interrupted):
        run(TINY, store=store, on_round=lambda r, h: r == 0, **how)
    made = faster(monkeypatch, GROUPED)
    got = run(TINY, store=store)
    assert not made and got.meta["executor"] == "batched:unfold"
    losses = lambda r: r.arrays["before/test/loss"]  # noqa: E731
    whole = run(TINY, store=tmp_path / "whole", executor="batched:unfold")
    assert np.array_equal(losses(whole), losses(got)) and whole.id == got.id
    other = run(TINY, store=tmp_path / "other", **how)
    assert made == [*FORMS] and other.meta["executor"] == "batched" and other.id == got.id
    assert not np.array_equal(losses(other), losses(got)), "the last digits differ"
    np.testing.assert_allclose(losses(other), losses(got), rtol=1e-3)
