"""The head is what gives the scores, whatever a network looks like; and what is tried before training."""

import contextlib
import copy
import functools
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pfl_core import Experiment, Federation, models, run
from pfl_core.anatomy import Anatomy, examined
from pfl_core.engine.simulate import simulate
from pfl_core.methods.base import METHODS, make_method
from pfl_core.methods.pfedhn import narrowed
from pfl_core.methods.task import Task
from tests.core.methods.setting import ARGS, CONFIG, OURS, client_data

SHAPE, C = (1, 16, 16), 3


def body():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(256, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU()
    )


class Plain(nn.Module):
    """A body and a head, in the order in which they are registered: `first` or "body"."""

    def __init__(self, first="body"):
        super().__init__()
        parts = {"body": body(), "fc": nn.Linear(5, C)}
        for name in (first, *(n for n in parts if n != first)):
            self.add_module(name, parts[name])

    def forward(self, x):
        return self.fc(self.body(x))


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, scale=1.0):
        return self.model(x)


class Auxiliary(Plain):
    """With a layer that no score depends on, or only those of training."""

    def __init__(self, outputs=C):
        super().__init__()
        self.aux = nn.Linear(5, outputs)

    def forward(self, x):
        z = self.body(x)
        if self.training and self.aux.out_features == C:
            return self.fc(z) + 0.1 * self.aux(z)
        return self.fc(z)


class Ends(nn.Module):
    """A body, then what `end` makes of features with the modules or parameters `parts`, registered first."""

    def __init__(self, end, **parts):
        super().__init__()
        self.end = end
        for name, part in parts.items():
            setattr(self, name, part)
        self.body = body()

    def forward(self, x):
        return self.end(self, self.body(x))


class Reads(nn.Module):
    """A head, registered first, over what `base` makes of images: convolutions, a recurrent net, a transformer."""

    def __init__(self, read, base, head, position=False):
        super().__init__()
        self.head, self.base, self.read = head, base, read
        if position:
            self.position = nn.Parameter(torch.zeros(1, 16, 16))

    def forward(self, x):
        return self.read(self, x)


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape) / 8)


def attention():
    return nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)


linear = lambda: nn.Linear(5, C)  # noqa: E731
# a network, what its head is, and whether an nn.Linear over features (B, F) gives its scores
ZOO = {
    "plain": (Plain, "fc", True),
    "wrapper": (lambda: Wrapper(Plain()), "model.fc", True),
    "double wrapper": (lambda: Wrapper(Wrapper(Plain("fc"))), "model.model.fc", True),
    "parallel": (lambda: nn.DataParallel(Plain()), "module.fc", True),
    "ours, wrapped": (
        lambda: Wrapper(models.build("lenet", SHAPE, C, kernels=2)),
        "model.fc",
        True,
    ),
    "chain in a chain": (lambda: nn.Sequential(nn.Sequential(body(), linear())), "0.1", True),
    "head first": (lambda: Plain("fc"), "fc", True),
    "auxiliary last": (lambda: Auxiliary(7), "fc", True),
    "auxiliary in training": (Auxiliary, "fc", True),
    "a head of layers": (
        lambda: Ends(
            lambda m, z: m.out(z), out=nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, C))
        ),
        "out",
        True,
    ),
    "squeezed": (
        lambda: Ends(lambda m, z: m.out(z[:, None]).squeeze(1), out=linear()),
        "out",
        True,
    ),
    "softmax after": (lambda: Ends(lambda m, z: m.out(z).softmax(1), out=linear()), "out", False),
    "temperature after": (
        lambda: Ends(lambda m, z: m.out(z) * m.t, t=nn.Parameter(torch.ones(1)), out=linear()),
        "t,out",
        False,
    ),
    "norm after": (
        lambda: Ends(lambda m, z: m.norm(m.out(z)), out=linear(), norm=nn.BatchNorm1d(C)),
        "out,norm",
        False,
    ),
    "two heads": (lambda: Ends(lambda m, z: m.a(z) + m.b(z), a=linear(), b=linear()), "a,b", False),
    "prototypes": (
        lambda: Ends(lambda m, z: -(z[:, None] - m.w).square().sum(2), w=parameter(C, 5)),
        "w",
        False,
    ),
    "functional": (
        lambda: Ends(lambda m, z: F.linear(z, m.w, m.b), b=parameter(C), w=parameter(C, 5)),
        "b,w",
        False,
    ),
    "dict of parameters": (
        lambda: Ends(
            lambda m, z: z @ m.p["w"] + m.p["b"],
            p=nn.ParameterDict({"w": parameter(5, C), "b": parameter(C)}),
        ),
        "p",
        False,
    ),
    "list of parameters": (
        lambda: Reads(
            lambda m, x: (x.flatten(1) @ m.base[0] + m.base[1]).relu() @ m.base[2] + m.base[3],
            nn.ParameterList([parameter(256, 5), parameter(5), parameter(5, C), parameter(C)]),
            nn.Identity(),
        ),
        "base.2,base.3",
        False,
    ),
    "products that are summed": (
        lambda: Ends(
            lambda m, z: (z.repeat(1, C).view(-1, C, 5) * m.p["w"]).sum(2),
            p=nn.ParameterDict({"w": parameter(C, 5)}),
        ),
        "p",
        False,
    ),
    "weight norm": (
        lambda: Ends(lambda m, z: m.out(z), out=nn.utils.parametrizations.weight_norm(linear())),
        "out",
        False,
    ),
    "child called blocks": (
        lambda: Ends(lambda m, z: m.out(m.blocks(z)), out=linear(), blocks=nn.Linear(5, 5)),
        "out",
        True,
    ),
    "1x1 convolution": (
        lambda: Reads(
            lambda m, x: m.head(m.base(x).relu()).mean((2, 3)),
            nn.Conv2d(1, 4, 3, 2),
            nn.Conv2d(4, C, 1),
        ),
        "head",
        False,
    ),
    "Conv1d": (
        lambda: Reads(
            lambda m, x: m.head(m.base(x[:, 0]).relu().mean(2)),
            nn.Conv1d(16, 4, 3),
            nn.Linear(4, C),
        ),
        "head",
        True,
    ),
    "LSTM": (
        lambda: Reads(
            lambda m, x: m.head(m.base(x[:, 0])[0][:, -1]),
            nn.LSTM(16, 4, batch_first=True),
            nn.Linear(4, C),
        ),
        "head",
        True,
    ),
    "transformer": (
        lambda: Reads(
            lambda m, x: m.head(m.base(x[:, 0] + m.position).mean(1)),
            attention(),
            nn.Linear(16, C),
            True,
        ),
        "head",
        True,
    ),
}


def built(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ZOO[name][0]()


def mine(model, parts):
    names = [n for n, _ in model.named_parameters()]
    return {n for n in names if any((n + ".").startswith(part + ".") for part in parts.split(","))}


@pytest.mark.parametrize("name", ZOO)
def test_a_trial_run_finds_the_head(name):
    model, x = built(name), torch.randn(2, *SHAPE, generator=torch.Generator())
    before = copy.deepcopy(model.state_dict())
    found = examined("mine", model, x, C, 2)
    head = found.head(1, "block")
    found.check_head(head, 1, "block")
    params = {n for n, _ in model.named_parameters()}
    assert params.intersection(head) == mine(model, ZOO[name][1])
    assert set(found.head(0, "block", ZOO[name][1])) == set(head), "named, it is the same"
    assert list(found.layers("module"))[-1] in found.scorer.split(",")
    assert not any(m._forward_hooks for m in model.modules())
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    if not ZOO[name][2]:
        with pytest.raises(ValueError, match="they are not the output of one nn.Linear"):
            found.last_linear()
        return
    task = Task(model, *data_sizes(), replace(CONFIG), anatomy=found)
    assert set(task.last_linear) <= task.head
    p = {n: v.detach() for n, v in task.initial.items()}
    torch.testing.assert_close(task.classify(p, task.features(p, x)), task.apply(p, x))


def data_sizes():
    counts = torch.tensor([[2, 1, 1], [1, 1, 2]])
    return counts.sum(1), counts


READ_HEAD = sorted(
    {
        "fedper",
        "fedrep",
        "lgfedavg",
        "fedala",
        "flayer",
        "pfedhn_pc",
        "gpfl",
        "fedcp",
        "fedpac",
        "fedas",
    }
)


def trained(method, model, **how):
    """What a round leaves with the server and with each client; and the method."""
    data = client_data(sizes=(9, 6), classes=C)
    model = model.double()
    found = Anatomy.seen(model, data.extremes())
    config = replace(CONFIG, rounds=1, eval_after=False, **how)
    task = Task(model, data.n, data.label_counts, config, anatomy=found)
    bound = make_method(method, **ARGS.get(method, {})).bind(task)
    return bound, simulate(bound, data, executor="threads", workers=1)


@pytest.mark.parametrize("name", ["wrapper", "head first", "auxiliary last", "parallel"])
@pytest.mark.parametrize("method", OURS)
def test_every_method_takes_the_same_network_in_any_form(method, name):
    # The same weights under other names, or registered in another order, end in the same numbers.
    if (method, name) == ("flayer", "auxiliary last"):
        return  # one more layer: its rates are other ones
    forms, found = {"plain": built("plain")}, {}
    model = forms[name] = built(name)
    inside = {"wrapper": "model.", "parallel": "module."}.get(name, "")
    weights = {inside + n: v for n, v in forms["plain"].state_dict().items()}
    model.load_state_dict(model.state_dict() | weights)
    if method in ("pfedhn", "pfedhn_pc", "pfedla", "heurpfedla") and name != "wrapper":
        # What they draw has the order of tensors: who keeps what is compared.
        a, b = (trained(method, m)[0] for m in forms.values())
        shared = {n for n in a.task.parameters if a.is_shared(n)}
        other = {n for n in b.task.parameters if b.is_shared(n)} - mine(model, "aux")
        assert other == {inside + n for n in shared}
        return
    for form, m in forms.items():
        found[form] = trained(method, m)[1].before
    for n in forms["plain"].state_dict():
        torch.testing.assert_close(found[name][inside + n], found["plain"][n], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("method", READ_HEAD)
def test_who_keeps_the_head(method):
    for name in ("double wrapper", "head first", "auxiliary in training", "a head of layers"):
        bound, outcome = trained(method, built(name))
        kept = {n for n in bound.task.parameters if not bound.is_shared(n)}
        head, linear = mine(bound.task.model, ZOO[name][1]), set(bound.task.last_linear)
        expected = {
            "lgfedavg": set(bound.task.parameters) - head,
            "fedala": set(),
            "flayer": set(),
            **dict.fromkeys(("gpfl", "fedcp", "fedpac"), linear),
        }
        assert kept == expected.get(method, head), name
        assert bound.task.head == head, name
        if method == "flayer":
            carried = {
                n.removeprefix("flayer.") for n in outcome.state.clients if n[:7] == "flayer."
            }
            assert carried == head | {"acc"}


class Odd(nn.Module):
    """A backbone and a scale of its scores: by children, the head would be all of it."""

    def __init__(self):
        super().__init__()
        self.backbone, self.scale = Plain(), nn.Parameter(torch.ones(C))

    def forward(self, x):
        return self.backbone(x) * self.scale


@pytest.fixture
def registry(monkeypatch, store):
    monkeypatch.setattr(models, "_MODELS", dict(models._MODELS))


def own(model, shape=(16, 16), n=24, **how):
    """(Experiment, Federation) over a network of ours."""
    models.register_model("mine", lambda input_shape, classes: model())
    g = np.random.default_rng(0)
    x, y = g.standard_normal((n, 1, *shape)).astype(np.float32), np.arange(n) % C
    train, test = np.array_split(np.arange(n // 2), 2), np.array_split(np.arange(n // 2, n), 2)
    fed = Federation(x, y, train, None, test, classes=C)
    how = dict(dataset="own", model="mine", rounds=1, batch=4) | how
    return Experiment(**how), fed


def test_scores_of_another_precision_than_the_weights_are_taken(registry):
    class Doubled(Plain):
        def forward(self, x):
            return super().forward(x).double()

    accuracies = []
    for model in (Plain, Doubled):
        with torch.random.fork_rng():
            e, fed = own(model)
            accuracies.append(run(e, fed=fed).history.query("metric == 'acc_pct'").value.tolist())
    assert accuracies[0] == accuracies[1]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("where", ["forward", "train"])
def test_a_model_that_freezes_or_unfreezes_itself_is_refused(registry, frozen, where):
    class Flips(Plain):
        def __init__(self):
            super().__init__()
            self.body.requires_grad_(not frozen)

        def forward(self, x):
            if where == "forward":
                self.body.requires_grad_(frozen)
            return super().forward(x)

        def train(self, mode=True):
            if where == "train" and mode:
                self.body.requires_grad_(frozen)
            return super().train(mode)

    experiment, fed = own(Flips)
    with pytest.raises(ValueError, match="freezes or unfreezes body.1.weight.*requires_grad_"):
        run(experiment, fed=fed)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("held", [list, lambda parts: dict(enumerate(parts))])
def test_layers_that_are_not_registered_are_refused_unless_they_are_constants(
    registry, held, frozen
):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.layers = body(), held([nn.Linear(5, C), nn.Linear(C, C)])
            self.layers[1].requires_grad_(False)
            self.layers[0].requires_grad_(not frozen)

        def forward(self, x):
            return self.layers[1](self.layers[0](self.body(x)))

    experiment, fed = own(Hidden)
    if frozen:
        assert run(experiment, fed=fed).ok
        return
    with pytest.raises(ValueError, match=r"shape \(3, 5\) that is not registered.*ModuleList"):
        run(experiment, fed=fed)


def test_a_head_that_does_not_give_the_scores_is_refused_and_can_be_named(registry):
    experiment, fed = own(Odd, method="fedper")
    said = r"scores of Odd come from scale,backbone.fc, .* is the whole network; name the modules.*head="
    with pytest.raises(ValueError, match=said):
        run(experiment, fed=fed)
    run(experiment.but(method="fedavg"), fed=fed)  # it has no head
    for named in ("backbone.fc,scale", " backbone.fc , scale"):
        result = run(experiment.but(head=named, keep_models=True), fed=fed)
        assert result.ok
    with pytest.raises(ValueError, match=r"did you mean 'backbone.fc'.*known are backbone, "):
        run(experiment.but(head="backbone.fcc"), fed=fed)
    with pytest.raises(ValueError, match="is the whole network"):
        run(experiment.but(method="fedavg", head_init="own"), fed=fed)
    assert experiment.but(head="").id_for("x") == experiment.id_for("x")
    frozen = Plain()
    for p in frozen.fc.parameters():
        p.requires_grad_(False)
    seen = Anatomy.seen(frozen.eval(), torch.zeros(2, *SHAPE))
    with pytest.raises(ValueError, match=r"come from fc, .* nothing in it is trained"):
        seen.check_head(seen.head(1, "block"), 1, "block")


class InTraining(Plain):
    """What training mode makes of the scores, before they are trained; and of the least input."""

    def __init__(self, made, low=False):
        super().__init__()
        self.made = made
        if low:
            self.register_buffer("low", torch.tensor(torch.inf))

    def forward(self, x):
        if self.training and "low" in self._buffers:
            self.low = torch.minimum(self.low, x.min())
        out = super().forward(x)
        return self.made(out) if self.training else out


def fails(out):
    raise AttributeError("no such thing")


TRAINING = {
    "tuple": (lambda: InTraining(lambda o: (o, o)), {}, "returns tuple for 2 samples in training"),
    "dict": (lambda: InTraining(lambda o: {"out": o}), {}, "returns dict .* aux_logits=False"),
    "fewer": (
        lambda: InTraining(lambda o: o[:, :2]),
        {},
        r"returns \(2, 2\) .* give scores \(2, 3\)",
    ),
    "error": (lambda: InTraining(fails), {}, "fails in training mode: no such thing"),
    "batch of 1": (Plain, {"batch": 1}, "fails in training mode with batch=1 .*use batch=2"),
    "infinite": (
        lambda: InTraining(lambda o: o, low=True),
        {},
        "buffer low holds infinite numbers, .* training changes it",
    ),
    "lazy": (
        lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(C)),
        {},
        r"layers whose size is not known yet \(1.weight\)",
    ),
    "complex": (
        lambda: Ends(lambda m, z: m.out(z), out=linear(), w=nn.Parameter(torch.zeros(2) + 1j)),
        {},
        r"complex parameters \(w\)",
    ),
}


@pytest.mark.parametrize("name", TRAINING)
def test_training_mode_is_tried_before_training(name, registry):
    model, how, said = TRAINING[name]
    experiment, fed = own(model, **how)
    with pytest.raises(ValueError, match=said):
        run(experiment, fed=fed, on_round=lambda r, history: pytest.fail("it trained"))


class Counts(Plain):
    """What it does in forward, to what it holds beside its layers."""

    def __init__(self, act):
        super().__init__()
        self.act = act
        self.body_norm, self.drop = nn.BatchNorm1d(C), nn.Dropout(0.5)
        self.step, self.seen, self.by, self.last = 0, [], {"n": {"m": 0}}, None

    def forward(self, x):
        out = self.drop(self.body_norm(super().forward(x)))
        self.act(self, out)
        return out


class Trains(Counts):
    def forward(self, x):
        out = Plain.forward(self, x)
        if self.training:
            self.act(self, out)
        return out


MEMORY = {
    "step": lambda m, z: setattr(m, "step", m.step + 1),
    "seen": lambda m, z: m.seen.append(len(z)),
    "by": lambda m, z: m.by["n"].update(m=m.by["n"]["m"] + 1),
    "fc.calls": lambda m, z: setattr(m.fc, "calls", getattr(m.fc, "calls", 0) + 1),
    "last": lambda m, z: setattr(m, "last", torch.ones(2) + (0 if m.last is None else m.last)),
}
CONSTANTS = {
    "a shape": lambda m, z: setattr(m, "last", tuple(z.shape)),
    "a cache": lambda m, z: m.by.setdefault(len(z), torch.ones(2)),
    "features": lambda m, z: setattr(m, "last", z.detach()),
    "nothing": lambda m, z: None,
}


@pytest.mark.parametrize("name", MEMORY)
@pytest.mark.parametrize("kind", [Counts, Trains])
def test_what_a_model_counts_beside_its_buffers_is_refused(name, kind):
    x = torch.zeros(2, *SHAPE)
    with pytest.raises(ValueError, match=f"'mine' changes {name} each time .*register_buffer"):
        examined("mine", kind(MEMORY[name]), x, C, 4)


@pytest.mark.parametrize("name", CONSTANTS)
def test_what_a_model_keeps_and_does_not_change_is_taken(name):
    examined("mine", Counts(CONSTANTS[name]), torch.zeros(2, *SHAPE), C, 4)


def of_random(seed):
    return random.Random(seed).random


def drawn_by(g):
    return lambda: torch.rand(1, generator=g).item()


def hooked(model):
    g = np.random.default_rng(0)
    model.fc.register_forward_hook(lambda module, given, out: out * (g.random() > 0.1))


# what a model holds, by the name under which it is refused
GENERATORS = {
    "numpy's": (lambda m: setattr(m, "own", np.random.default_rng(0)), "own"),
    "numpy's old": (lambda m: setattr(m, "own", np.random.RandomState(0)), "own"),
    "Python's": (lambda m: setattr(m, "own", random.Random(0)), "own"),
    "torch's": (lambda m: setattr(m, "own", torch.Generator()), "own"),
    "in a list": (lambda m: setattr(m, "own", [1, [np.random.default_rng(0)]]), "own"),
    "in a dict": (lambda m: setattr(m, "own", {"a": {"b": random.Random(0)}}), "own"),
    "in an inner module": (lambda m: setattr(m.body[1], "own", random.Random(0)), "body.1.own"),
    "in an object": (lambda m: setattr(m, "own", SimpleNamespace(g=random.Random(0))), "own"),
    "a method": (lambda m: setattr(m, "own", of_random(0)), "own"),
    "the copied method of a global one": (lambda m: setattr(m, "own", np.random.rand), "own"),
    "in a closure": (lambda m: setattr(m, "own", drawn_by(torch.Generator())), "own"),
    "in a hook": (hooked, "fc._forward_hooks"),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_model_that_holds_a_generator_is_refused(name, registry):
    hold, place = GENERATORS[name]

    def made():
        model = Plain()
        hold(model)
        return model

    experiment, fed = own(made)
    said = f"'mine': {place} is or holds a generator of random numbers.*draw with torch.rand"
    with pytest.raises(ValueError, match=said):
        run(experiment, fed=fed, on_round=lambda r, history: pytest.fail("it trained"))


@pytest.mark.parametrize("draw", [lambda: np.random.rand(), lambda: random.random()])
@pytest.mark.parametrize("kind", [Counts, Trains])
def test_a_model_that_draws_from_a_global_generator_is_refused_for_that(draw, kind, registry):
    experiment, fed = own(lambda: kind(lambda m, z: z.mul_(draw())))
    with pytest.raises(ValueError, match="'mine': code of yours moved .* global generator"):
        run(experiment, fed=fed)


def into(store):
    return lambda module, given, out: store.update(z=out.detach())


def counting():
    calls = 0

    def count(module, given):
        nonlocal calls
        calls += 1

    return count


class Hooked(Plain):
    """What `hook` does to it, and what its own method keeps by a hook."""

    def __init__(self, hook):
        super().__init__()
        self.kept = None
        hook(self)

    def _keep(self, module, given, out):
        self.kept = out

    def forward(self, x):
        z = self.body(x)
        if "act" in vars(self):
            self.act(z)
        return self.fc(z)


def by_the_model(m):
    m.body.register_forward_hook(lambda module, given, out: setattr(m, "kept", out.detach()))


# what is held outside of the module, by what reads it
SHARED = {
    "a dict": (lambda m: m.body.register_forward_hook(into({})), "body._forward_hooks"),
    "before": (lambda m: m.fc.register_forward_pre_hook(counting()), "fc._forward_pre_hooks"),
    "the model": (by_the_model, "kept"),
    "a function": (lambda m: setattr(m, "act", (lambda s: lambda z: s.append(1))([])), "act"),
    "in a list": (
        lambda m: [setattr(m, "acts", [into({})]), m.fc.register_forward_hook(m.acts[0])],
        "acts",
    ),
}
UNSHARED = {
    "a method": lambda m: m.body.register_forward_hook(m._keep),
    "a partial of a method": lambda m: m.body.register_forward_hook(functools.partial(m._keep)),
    "a constant": lambda m: m.body.register_forward_hook((lambda c: lambda m, i, z: z * c)(2.0)),
    "a function": lambda m: setattr(m, "act", lambda z: setattr(z, "seen", 1)),
    "nothing": lambda m: None,
}


@pytest.mark.parametrize("name", SHARED)
def test_what_copies_of_a_model_share_may_not_change(name):
    hook, place = SHARED[name]
    said = f"'mine': a copy of it that runs changes {place} of the others.*that forward itself sets"
    with pytest.raises(ValueError, match=said):
        examined("mine", Hooked(hook), torch.zeros(2, *SHAPE), C, 4)


@pytest.mark.parametrize("name", UNSHARED)
def test_hooks_that_copies_do_not_share_are_taken(name):
    examined("mine", Hooked(UNSHARED[name]), torch.zeros(2, *SHAPE), C, 4)


def test_what_a_copy_does_not_find_is_said_to_be_shared():
    def hook(m):
        by_the_model(m)
        m.act = lambda z: z + None  # it fails

    with pytest.raises(ValueError, match="a copy of it that runs changes kept of the others"):
        examined("mine", Hooked(hook), torch.zeros(2, *SHAPE), C, 4)


class Evaluates(nn.Module):
    """Plain, of images (B, 16, 16) to which `scale` times what `act` makes of them is added."""

    def __init__(self, act, scale=1.0, **parts):
        super().__init__()
        self.act, self.plain = act, Plain()
        self.scale = nn.Parameter(torch.tensor(scale))
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.plain((x[:, 0] + self.scale * self.act(self, x[:, 0]))[:, None])


def encoder(**how):
    return nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, **how)


def two_or_more(m, x):
    if len(x) < 2:
        raise IndexError("one sample")
    return x


def padded(m, x):
    """Attention over the first places alone: how many depends on the sample."""
    masked = torch.arange(16) >= 4 + 8 * (x.mean((1, 2)) > 0.1)[:, None]
    out = m.att(x, src_key_padding_mask=masked)
    return F.pad(out, (0, 0, 0, 16 - out.shape[1])).masked_fill(masked[:, :, None], 0.0)


# what is done, by which modules; "a zero scale" hides it before training
MIXING = {
    "attention": (lambda m, x: m.att(x), dict(att=encoder())),
    "attention alone": (lambda m, x: m.att(x, x, x)[0], dict(att=nn.MultiheadAttention(16, 2))),
    "a zero scale": (lambda m, x: m.att(x), dict(scale=0.0, att=encoder())),
    "LSTM": (lambda m, x: m.rnn(x)[0], dict(rnn=nn.LSTM(16, 16))),
    "backward GRU": (lambda m, x: m.rnn(x)[0], dict(rnn=nn.GRU(16, 8, bidirectional=True))),
    "BatchNorm": (lambda m, x: m.norm(x), dict(norm=nn.BatchNorm1d(16, track_running_stats=False))),
    "softmax": (lambda m, x: x.softmax(0), {}),
    "norm": (lambda m, x: F.normalize(x, dim=0), {}),
    "centred": (lambda m, x: x - x.mean(0), {}),
    "the largest": (lambda m, x: x / x.abs().max(), {}),
    "neighbours": (lambda m, x: x.roll(1, 0), {}),
    "size": (lambda m, x: x / len(x), {}),
    "place": (lambda m, x: torch.arange(len(x))[:, None, None] * torch.ones_like(x), {}),
    "two or more": (lambda m, x: two_or_more(m, x).softmax(0), {}),
}
ALONE = {
    "attention": (lambda m, x: m.att(x), dict(att=encoder(batch_first=True))),
    "padded attention": (
        padded,
        dict(
            att=nn.TransformerEncoder(
                encoder(batch_first=True), 2, enable_nested_tensor=True, mask_check=True
            )
        ),
    ),
    "transposed attention": (
        lambda m, x: m.att(x.transpose(0, 1)).transpose(0, 1),
        dict(att=encoder()),
    ),
    "LSTM": (lambda m, x: m.rnn(x)[0], dict(rnn=nn.LSTM(16, 16, 2, batch_first=True))),
    "BatchNorm": (lambda m, x: m.norm(x), dict(norm=nn.BatchNorm1d(16))),
    "softmax": (lambda m, x: x.softmax(1), {}),
    "GroupNorm": (lambda m, x: m.norm(x), dict(norm=nn.GroupNorm(4, 16))),
    "deep": (
        lambda m, x: m.deep(x[:, None])[:, 0],
        dict(deep=nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1) for _ in range(50)))),
    ),
    "wide": (
        lambda m, x: m.deep(x.flatten(1)).view(x.shape),
        dict(deep=nn.Sequential(nn.Linear(256, 4096), nn.GELU(), nn.Linear(4096, 256))),
    ),
    "half": (lambda m, x: m.deep(x.bfloat16()).float(), dict(deep=nn.Linear(16, 16).bfloat16())),
    "steep": (
        lambda m, x: torch.sin(30 * m.b(torch.sin(30 * m.a(x)))),
        dict(a=nn.Linear(16, 16), b=nn.Linear(16, 16)),
    ),
    "two or more": (two_or_more, {}),
}
SAMPLES = {
    "unlike": torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0)),
    "zero": torch.zeros(2, *SHAPE),
    "one": torch.ones(2, *SHAPE),
    "near": torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(0)).repeat(2, 1, 1, 1)
    + torch.tensor([0.0, 1e-6])[:, None, None, None],
    "large": torch.full((2, *SHAPE), 1000.0),
}
MANY = ["attention", "BatchNorm"]  # with all of these samples


@pytest.mark.parametrize(
    ("name", "samples"),
    [(n, "unlike") for n in MIXING] + [(n, s) for n in MANY for s in SAMPLES if s != "unlike"],
)
def test_a_model_that_mixes_the_samples_of_a_batch_is_refused(name, samples):
    act, parts = MIXING[name]
    said = "'mine': in evaluation mode a sample's scores change with the other .* batch_first=True"
    for seed in range(5):
        torch.manual_seed(seed)
        for m in (
            m for part in parts.values() if isinstance(part, nn.Module) for m in part.modules()
        ):
            for reset in ("reset_parameters", "_reset_parameters"):
                getattr(m, reset, lambda: None)()
        with pytest.raises(ValueError, match=said):
            examined("mine", Evaluates(act, **parts), SAMPLES[samples], C, 4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("name", "samples"),
    [(n, "unlike") for n in ALONE] + [(n, s) for n in MANY for s in SAMPLES if s != "unlike"],
)
def test_a_model_that_looks_at_each_sample_alone_is_taken(name, samples):
    act, parts = ALONE[name]
    model = Evaluates(act, **copy.deepcopy(parts))
    examined("mine", model, SAMPLES[samples], C, 4)
    if name != "half":
        examined("mine", model.double(), SAMPLES[samples].double(), C, 4)


@pytest.mark.parametrize("tokens", [[[0, 9, 1], [2, 3, 4]], [[9, 0, 9], [9, 0, 9]]])
@pytest.mark.parametrize("batch_first", [True, False])
def test_mixing_is_seen_with_tokens(batch_first, tokens):
    model = Reads(
        lambda m, x: m.head(m.base[1](m.base[0](x))[0].mean(1)),
        nn.ModuleList([nn.Embedding(10, 8), nn.GRU(8, 8, batch_first=batch_first)]),
        nn.Linear(8, C),
    )
    refused = pytest.raises(ValueError, match="'mine': in evaluation mode a sample's scores change")
    with contextlib.nullcontext() if batch_first else refused:
        examined("mine", model, torch.tensor(tokens), C, 4)


def one_hot(m, z):
    return m.out(z) + F.one_hot(z.argmax(1)).sum() * 0


STACKED = {
    "one_hot": (one_hot, r"one_hot in test_anatomy.py, line \d+: return m.out.*\(y\[:, None\] =="),
    "item": (
        lambda m, z: m.out(z) * m.out.weight.sum().item(),
        r"line \d+: .*item\(\).*keep the value a tensor",
    ),
    "choice": (lambda m, z: m.out(z) if z.sum() > -1 else z, r"line \d+: .*by torch.where"),
}


@pytest.mark.parametrize("name", STACKED)
def test_what_vmap_cannot_do_is_said_with_its_place(name, registry):
    end, said = STACKED[name]
    experiment, fed = own(lambda: Ends(end, out=linear()))
    with pytest.raises(RuntimeError, match=f"fedavg: clients cannot be stacked.*{said}.*'threads'"):
        run(experiment, fed=fed, executor="batched")
    assert run(experiment, fed=fed).ok


def test_clients_that_never_take_part_are_said_before_training(registry):
    how = dict(participation=0.5, rounds=1)
    experiment, fed = own(Plain, **how)
    with pytest.warns(UserWarning, match='1 of 2 clients take no part.*use buffers="average"'):
        result = run(experiment, fed=fed)
    assert "BatchNorm statistics of the initial model" in result.meta["warned"]
    with pytest.warns(UserWarning, match="fedbn: .*; use more rounds or a higher"):
        run(experiment.but(method="fedbn"), fed=fed)
    for quiet in (
        dict(buffers="average"),
        dict(buffers="reset"),
        dict(participation=1.0),
        dict(method="local"),
        dict(method="fedbn", participation=1.0),
        dict(rounds=20),
    ):
        assert "warned" not in run(experiment.but(**quiet), fed=fed).meta, quiet


def test_every_method_is_tried():
    assert set(READ_HEAD) <= METHODS.keys()


# -- any buffer, any axes, any common module ---------------------------------------------------------------------------


class Buffers(Plain):
    """With buffers of other kinds, the first of which is registered before all parameters."""

    def __init__(self):
        nn.Module.__init__(self)
        self.register_buffer("ids", torch.arange(5))
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, 0.0, -torch.inf]))
        self.register_buffer("wide", torch.full((5,), 2.0, dtype=torch.float64))
        self.register_buffer("low", torch.ones(5, dtype=torch.float16))
        self.register_buffer("keep", torch.tensor([True, True, False, True, True]))
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("turn", torch.ones(5, dtype=torch.complex64) * 1j)
        self.body, self.fc = body(), nn.Linear(5, C)

    def forward(self, x):
        z = self.body(x) * self.keep * self.scale * self.low * self.wide + self.ids
        if self.training:
            self.steps += 1
        return self.fc(z * (self.turn * self.turn).real * self.mask.softmax(0))


@pytest.mark.parametrize("policy", ["local", "average"])
@pytest.mark.parametrize("method", OURS)
def test_buffers_of_any_kind(method, policy, registry):
    how = dict(method=method, method_args=ARGS.get(method, {}), buffers=policy, holdout=0.25)
    experiment, fed = own(Buffers, batch=3, keep_models=True, **how)
    fixed = {
        n: v
        for n, v in Buffers().named_buffers()
        if n.count(".") == 0 and n not in ("steps", "mask")
    }
    ends = []
    for executor in ("threads", "batched"):
        result = run(experiment.but(dtype="float64"), fed=fed, executor=executor, recompute=True)
        assert result.ok, result.meta["status"]
        ends.append(result.kept("models.pt")["models"])
    for n, v in ends[0].items():
        torch.testing.assert_close(ends[1][n], v, rtol=1e-9, atol=1e-10)
    for n, v in fixed.items():
        kept = ends[0][n].to(v.dtype)
        torch.testing.assert_close(kept, v.expand_as(kept), rtol=0, atol=0)
    assert (ends[0]["steps"] > 0).all()


AXES = {
    "Conv3d": (nn.Conv3d(1, 4, 2), nn.Conv3d(4, 4, 2)),
    "ConvTranspose3d": (nn.ConvTranspose3d(1, 4, 2), nn.ConvTranspose3d(4, 8, 2)),
    "ConvTranspose2d": (nn.ConvTranspose2d(1, 4, 2), nn.ConvTranspose2d(4, 8, 2)),
    "Conv1d": (nn.Conv1d(1, 4, 2), nn.Conv1d(4, 8, 2)),
}


class Convolves(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.one, self.two = copy.deepcopy(AXES[name])
        self.axes = {"1": (64,), "2": (8, 8), "3": (4, 4, 4)}[name[-2]]
        self.fc = nn.Linear(self.two.out_channels, C)

    def forward(self, x):
        z = self.two(self.one(x.reshape(-1, 1, *self.axes)).relu()).relu()
        return self.fc(z.flatten(2).mean(2))


@pytest.mark.parametrize("name", AXES)
@pytest.mark.parametrize("method", ["pfedhn", "pfedhn_pc", "flayer", "pfedla", "fedaghn"])
def test_weights_of_any_number_of_axes(method, name, registry):
    args = {"flayer": dict(mode="official")}.get(method, ARGS.get(method, {}))
    experiment, fed = own(lambda: Convolves(name), (8, 8), method=method, method_args=args)
    assert run(experiment, fed=fed).ok


@pytest.mark.parametrize("name", AXES)
def test_pfedhn_narrows_inputs_and_outputs(name):
    net = Convolves(name)
    task = Task(net, *data_sizes(), CONFIG)
    small = narrowed(task, 0.5)
    two = AXES[name][1]
    axes = (2, two.out_channels // 2) if two.transposed else (two.out_channels // 2, 2)
    assert small["two.weight"] == (*axes, *two.kernel_size)
    assert small["one.bias"] == (2,) and small["fc.weight"] == (C, two.out_channels // 2)
    assert narrowed(task, 1)["two.weight"] == two.weight.shape
    net.two = nn.Conv1d(4, 4, 2, groups=2)
    with pytest.raises(ValueError, match="two convolves in groups"):
        narrowed(Task(net, *data_sizes(), CONFIG), 0.5)


def with_hook():
    model = Plain()
    model.body.register_forward_hook(lambda module, given, out: out * 2)
    return model


def compiled_part():
    model = Plain()
    model.fc = torch.compile(model.fc, backend="eager")
    return model


COMMON = {
    "hook": with_hook,
    "compiled": lambda: torch.compile(Plain(), backend="eager"),
    "compiled part": compiled_part,
    "weight norm": lambda: nn.Sequential(
        body(), nn.utils.parametrizations.weight_norm(nn.Linear(5, C))
    ),
    "mixed numbers": lambda: nn.Sequential(body().double(), nn.Linear(5, C).half()),
    "no affine": lambda: nn.Sequential(nn.BatchNorm2d(1, affine=False), body(), nn.Linear(5, C)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of weight norm
@pytest.mark.parametrize("name", COMMON)
def test_common_modules_train_in_both_executors(name, registry):
    experiment, fed = own(COMMON[name], method="fedper", dtype="float64", keep_models=True)
    ends = []
    for executor in ("threads", "batched"):
        result = run(experiment, fed=fed, executor=executor, recompute=True)
        ends.append(result.kept("models.pt")["models"])
        assert result.ok and result.model(0)
    for n, v in ends[0].items():
        torch.testing.assert_close(ends[1][n], v, rtol=1e-9, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*a run's id does not see")  # of what is scripted
def test_scripted_modules_are_refused(registry):
    with pytest.warns(FutureWarning):
        made = torch.jit.trace(Plain().eval(), torch.zeros(2, *SHAPE))
    for model in (made, Wrapper(made)):
        experiment, fed = own(lambda model=model: model)
        with pytest.raises(ValueError, match="made by torch.jit, .* return the module that was"):
            run(experiment, fed=fed)


def test_a_name_that_model_and_method_both_have_is_refused(registry):
    def named():
        return Ends(lambda m, z: m.out(z) * m.seen, out=linear(), seen=nn.Parameter(torch.ones(1)))

    experiment, fed = own(named, method="fedpac")
    with pytest.raises(ValueError, match="not the output of one nn.Linear"):
        run(experiment, fed=fed)

    def unused():
        model = Plain()
        model.register_buffer("seen", torch.tensor(0))
        return model

    experiment, fed = own(unused, method="fedpac")
    with pytest.raises(ValueError, match="fedpac keeps something of its own .* 'seen'.*rename"):
        run(experiment, fed=fed)
