"""A frozen tensor is a constant: of all clients alike, and no method's. Tied weights are one tensor. Nothing that has no gradient moves."""

import copy
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pfl_core import Experiment, models, register_model, run
from pfl_core.anatomy import Anatomy
from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.engine.probes import activations
from pfl_core.engine.simulate import simulate
from pfl_core.experiments.personal import load_model
from pfl_core.methods.base import State, make_method
from pfl_core.methods.task import Task
from pfl_core.stacked import expand
from tests.core.methods.setting import ARGS, CONFIG, OURS, client_data, leaves

# Methods that use the head; that train or write what is below it alone.
HEADS = set("fedper fedrep fedbabu lgfedavg fedala flayer pfedhn_pc fedas".split())
BODIES = {"fedbabu", "pfedhn_pc"}


class Adapted(nn.Module):
    """A frozen Linear beside a trained path of low rank."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def chain(classes=3):
    torch.manual_seed(5)
    net = nn.Sequential()
    net.add_module("conv", nn.Conv2d(1, 3, 5, stride=4))
    net.add_module("norm", nn.BatchNorm2d(3))
    net.add_module("flat", nn.Sequential(nn.ReLU(), nn.Flatten()))
    net.add_module("fc1", nn.Linear(27, 5))
    net.add_module("relu", nn.ReLU())
    net.add_module("fc", nn.Linear(5, classes))
    return net


def without(*names, still=False):
    net = chain()
    for name in names:
        net.get_submodule(name).requires_grad_(False)
        net.get_submodule(name).train(not still)
    return net


def adapted():
    net = chain()
    net.conv.requires_grad_(False)
    net.fc1 = Adapted(net.fc1)
    return net


KINDS = {
    "layer": lambda: without("conv"),
    "norm": lambda: without("norm"),
    "still norm": lambda: without("norm", still=True),
    "middle": lambda: without("norm", "fc1"),
    "backbone": lambda: without("conv", "norm", "fc1", still=True),
    "bias": lambda: (net := chain(), net.fc.bias.requires_grad_(False))[0],
    "adapters": adapted,
    "head": lambda: without("fc"),
}
OPTIMISERS = [(0.0, 0.0), (0.01, 0.9), (0.0, 0.9), (0.01, 0.0)]  # weight decay, momentum


def bound(name, net, **changes):
    data = client_data()
    config = replace(CONFIG, rounds=2, keep_models=True, **changes)
    task = Task(net.to(data.dtype), data.n, data.label_counts, config)
    return make_method(name, **ARGS.get(name, {})).bind(task), data


def ended(name, net, executor, **changes):
    method, data = bound(name, net, **changes)
    return method, simulate(method, data, executor=executor, workers=2)


def refused(name, kind):
    """Whether a method has nothing to do with such a model, and says so."""
    if name == "pfedfda":  # it makes weights and biases of the last layer
        return kind in ("head", "bias")
    return kind == "head" and name in HEADS or kind == "backbone" and name in BODIES


def frozen_of(net):
    kept = {n for n, p in net.named_parameters() if not p.requires_grad}
    return kept | {n for n, m in net.named_buffers() if n.rpartition(".")[0] in models.still(net)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OURS)
def test_frozen_tensors_are_constants(name, kind):
    net = KINDS[kind]()
    names, before = (
        frozen_of(net),
        {n: v.double() for n, v in copy.deepcopy(net).state_dict().items()},
    )
    assert names
    if refused(name, kind):
        says = "nothing in it is trained|nothing to write|is frozen|nothing below"
        with pytest.raises(ValueError, match=says):
            ended(name, net, "threads")
        return
    # Over its kinds of model each method meets each of them.
    decay, momentum = OPTIMISERS[[*KINDS].index(kind) % 4] if name != "apfl" else (0.0, 0.0)
    how = dict(weight_decay=decay, momentum=momentum, buffers="average")
    (method, a), (_, b) = (
        ended(name, copy.deepcopy(net), x, **how) for x in ("threads", "batched")
    )
    held = [p.rpartition("/")[2] for p, _ in leaves(a.state)]
    assert not [n for n in held for f in names if n == f or n.endswith(f".{f}")], "nobody's"
    assert not names & a.before.keys() and not names & set(models.head(net))
    assert not names & {n for part in method.task.layers.values() for n in part}
    for n, v in method.task.constants.items():
        assert torch.equal(v, before[n]), n
    assert a.history.upload == b.history.upload and a.history.download == b.history.download
    for (path, v), (_, w) in zip(leaves(a.state), leaves(b.state), strict=True):
        torch.testing.assert_close(v, w, rtol=1e-9, atol=1e-10, msg=path)
    moved = [(a.before[n] != v).any() for n, v in method.task.initial.items()]
    assert any(moved), "what is not frozen learns"


# ---------------------------------------------------------------- as torch trains them


class Tied(nn.Module):
    """Tokens in, tokens out, with one table for both; a module that stands under two names; and one that the scores do not need."""

    def __init__(self, classes=3):
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Linear(classes, 256)  # as a table: (256, classes)
        self.again = self.inner = nn.Linear(classes, classes)
        self.unused = nn.Linear(4, 4)
        self.output = nn.Linear(256, classes, bias=False)
        self.output.weight = nn.Parameter(torch.randn(classes, 256) / 16)
        self.embedding.weight = self.output.weight  # (classes, 256), used by F.linear below

    def forward(self, x):
        x = F.linear(x.flatten(1), self.embedding.weight)
        x = self.again(self.inner(x).tanh()).tanh()
        return self.output(F.linear(x, self.output.weight.T))


class Auxiliary(nn.Module):
    """A branch that no loss reaches, and a frozen BatchNorm below the scores."""

    def __init__(self):
        super().__init__()
        self.net, self.branch = without("norm"), nn.Linear(27, 3)

    def forward(self, x):
        return self.net(x)


NETS = {
    "layer": KINDS["layer"],
    "norm": KINDS["norm"],
    "adapters": adapted,
    "tied": Tied,
    "no gradient": Auxiliary,
}


def textbook(net, data, k, clip):
    """One round of torch.optim.SGD."""
    net.train()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    for (idx,) in data.batch_indices(k, 0, batch=6, epochs=2):
        x, y = data.batch(torch.as_tensor(idx))
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        opt.step()
    return net.state_dict()


@pytest.mark.parametrize("executor", ["threads", "batched"])
@pytest.mark.parametrize("kind", NETS)
def test_local_training_is_the_textbook_loop(kind, executor):
    how = dict(momentum=0.9, weight_decay=0.1, clip=0.5, epochs=2)
    method, data = bound("fedavg", NETS[kind](), **how)
    sel = torch.arange(data.K)
    engine = Engine(method, data, executor, 2)
    end = Context(engine, State({}, {}), sel, 0).train(method.loss, expand(method.task.initial, 4))
    engine.close()
    for k in range(data.K):
        got = method.task.constants | {n: v[k] for n, v in end.items()}
        got |= {n: got[first] for n, first in method.task.tied.items()}
        for n, v in textbook(NETS[kind]().double(), data, k, 0.5).items():
            torch.testing.assert_close(got[n], v, rtol=1e-9, atol=1e-11, msg=n)
    if kind == "no gradient":
        assert torch.equal(end["branch.weight"][0], method.task.initial["branch.weight"])


class Evaluating(nn.Sequential):
    """Its own `train` leaves the norm in evaluation mode."""

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


def evaluating():
    return Evaluating(OrderedDict(chain().named_children()))


@pytest.mark.parametrize("executor", ["threads", "batched"])
@pytest.mark.parametrize("make", [lambda: without("norm", still=True), evaluating])
def test_a_norm_that_is_still_keeps_and_uses_its_statistics(make, executor):
    net = make().double()
    net.norm.running_mean += 0.3
    before = copy.deepcopy(net)
    method, outcome = ended("fedavg", net, executor, buffers="average", epochs=1)
    kept = {n: method.task.constants[n] for n in ("norm.running_mean", "norm.running_var")}
    assert all(torch.equal(v, before.state_dict()[n]) for n, v in kept.items())
    assert not kept.keys() & outcome.before.keys()
    # The first local step's gradient is that of evaluation mode.
    _, data = bound("fedavg", make())
    x = data.batch(torch.arange(9))[0]
    with method.task.mode(True):
        found = method.task.apply(method.task.initial, x)
    torch.testing.assert_close(found, before.eval()(x))


# ---------------------------------------------------------------- what is served, kept and measured


def test_traffic_counts_what_is_trained():
    method, outcome = ended("fedavg", without("conv", "norm", "fc1", still=True), "threads")
    size = sum(p.numel() for p in method.task.model.fc.parameters())
    assert outcome.history.upload[1] == outcome.history.download[1] == 4 * size


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    monkeypatch.setattr(models, "_MODELS", dict(models._MODELS))

    def build(input_shape, classes, tie=False):
        net = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.ReLU())
        if tie:
            net.extend([twin := nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)])
            net[-1].weight = twin.weight
        net[1].requires_grad_(False)
        return net.append(nn.Linear(8, classes))

    register_model("own_frozen", build)
    return Experiment(model="own_frozen", clients=3, rounds=2, max_samples=20, keep_models=True)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("method", ["fedavg", "fedper", "ditto", "pfedla"])
def test_a_served_model_is_whole(own, method, tie, tmp_path):
    e = own.but(method=method, model_args={"tie": tie}, weight_decay=0.01, dtype="float64")
    result = run(e, workers=1)
    start = models.build("own_frozen", (1, 28, 28), 10, seed=0, tie=tie).double().state_dict()
    net = result.model(1)
    assert net.state_dict().keys() == start.keys()
    assert torch.equal(net.state_dict()["1.weight"], start["1.weight"])
    assert not torch.equal(net[-1].weight, start[f"{len(net) - 1}.weight"])
    if tie:
        assert net[4].weight is net[6].weight and not torch.equal(net[4].weight, start["4.weight"])
    kept = result.kept("models.pt")
    assert "1.weight" in kept["constants"] and "1.weight" not in kept["models"]
    assert result.meta["parameters"] == sum(p.numel() for p in net.parameters() if p.requires_grad)
    result.save(1, tmp_path / "one.pt")
    again = load_model(tmp_path / "one.pt").net.state_dict()
    assert all(torch.equal(v, again[n]) for n, v in net.state_dict().items())


def test_a_run_starts_from_anothers_constants(own):
    """Frozen there and trained here, trained there and frozen here, or frozen in both under another seed."""

    def build(input_shape, classes):
        return models.build("own_frozen", input_shape, classes).requires_grad_(True)

    register_model("own_trained", build)
    for source, here in (
        ("own_frozen",) * 2,
        ("own_frozen", "own_trained"),
        ("own_trained", "own_frozen"),
    ):
        first = own.but(model=source, dtype="float64", partition_seed=0)
        e = first.but(model=here, seed=1, rounds=0, init_from=first)
        begun, end = run(e, workers=1).model(0).state_dict(), run(first, workers=1)
        each = [end.model(k).state_dict() for k in range(3)]
        if source == "own_frozen":
            assert torch.equal(begun["1.weight"], each[0]["1.weight"])
        else:
            server = end.kept("models.pt")["server"]
            assert torch.equal(begun["1.weight"], server["1.weight"])


def test_new_clients_meet_the_servers_constants(own):
    first = own.but(dtype="float64", partition_seed=0)
    e = first.but(seed=1, init_from=first, adopt=True)
    new, old = run(e, workers=1).model(0), run(first, workers=1).model(0)
    assert torch.equal(new[1].weight, old[1].weight)


class Projects(nn.Module):
    """Scores of a projection that is drawn and never trained, held as `how` says."""

    def __init__(self, classes, how):
        super().__init__()
        drawn = torch.randn(784, 16)
        if how == "parameter":
            self.p = nn.Parameter(drawn, requires_grad=False)
        elif how == "attribute":
            self.p = drawn
        else:
            self.register_buffer("p", drawn, persistent=how == "buffer")
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        return self.fc(torch.tanh(x.flatten(1) @ self.p.to(x.dtype) * 0.05))


@pytest.mark.parametrize("how", ["parameter", "buffer", "buffer beside the state", "attribute"])
@pytest.mark.parametrize("adopt", [True, False])
def test_what_is_drawn_with_a_model_comes_along_or_another_seed_is_refused(own, how, adopt):
    register_model("projects", lambda shape, classes: Projects(classes, how))
    first = own.but(model="projects", partition_seed=0, rounds=3, lr=0.1)
    new = first.but(rounds=0, init_from=first, adopt=adopt)
    for e in (new, new.but(seed=1)):
        if e.seed and how not in ("parameter", "buffer"):
            with pytest.raises(ValueError, match="draws p by the seed and does not keep it"):
                run(e, workers=1)
            continue
        ended, begun = run(first, workers=1), run(e, workers=1)
        assert torch.allclose(ended.model(0).p, begun.model(0).p, rtol=1e-6)
        there, here = (
            r.clients.query("when == 'before' and split == 'test'").acc_pct.tail(3).tolist()
            for r in (ended, begun)
        )
        assert there == here and max(here) > 0


def test_what_frozen_layers_hand_on_is_measured():
    method, data = bound("fedavg", without("fc1"))
    found = activations(method.task, method.task.initial, data.batch(torch.arange(5))[0])
    assert [*found] == ["conv", "norm", "fc1", "fc"]
    assert found["norm"].shape == (5, 27) and found["fc1"].shape == (5, 5)


# ---------------------------------------------------------------- what is refused


class Language(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.body, self.out = nn.Linear(256, 256), nn.Linear(256, 256, bias=False)
        self.out.weight = self.body.weight
        self.pick = classes

    def forward(self, x):
        return self.out(self.body(x.flatten(1)))[:, : self.pick]


@pytest.mark.parametrize("name", sorted(HEADS - {"pfedhn_pc", "fedas"}))
def test_a_tied_tensor_that_gives_the_scores_is_in_the_head_as_a_whole(name):
    data = client_data()
    net = Language().double()
    seen = Anatomy.seen(net, data.batch(torch.arange(2))[0])
    assert "body.weight" in seen.head(1, "module") and seen.head(1, "child", "out") == [
        "body.weight"
    ]
    config = replace(CONFIG, rounds=2, head="out", momentum=0.9)
    task = Task(net, data.n, data.label_counts, config, anatomy=seen)
    assert task.head == {"body.weight"}
    method = make_method(name).bind(task)
    a, b = (simulate(method, data, executor=x, workers=2).state for x in ("threads", "batched"))
    for (path, v), (_, w) in zip(leaves(a), leaves(b), strict=True):
        torch.testing.assert_close(v, w, rtol=1e-9, atol=1e-10, msg=path)
    if name in ("fedper", "fedrep"):
        assert "body.weight" not in a.server and "body.bias" in a.server


def test_a_head_that_is_named_and_frozen_is_refused():
    net = without("fc")
    with pytest.raises(ValueError, match="head='fc'.: nothing in it is trained"):
        Anatomy(net).head(1, "block", "fc")


def test_memory_that_two_parameters_share_is_refused():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = nn.Parameter(net[0].weight.data)
    with pytest.raises(ValueError, match="1.weight and 0.weight are two parameters in one piece"):
        models.check_fit("mine", net, torch.ones(2, 3), 3)
    net.requires_grad_(False)
    with pytest.raises(ValueError, match="only frozen parameters"):
        models.check_fit("mine", net, torch.ones(2, 3), 3)
