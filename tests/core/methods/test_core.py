"""Local, FedAvg and FedPer: a round by hand, and the identities between them."""

import copy
import dataclasses
import inspect
import pickle
import re

import numpy as np
import pytest
import torch

from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.methods import base
from pfl_core.methods.base import METHODS, Method, list_methods, make_method
from pfl_core.methods.fedavg import FedAvg
from pfl_core.stacked import expand, weighted_mean
from pfl_core.util import fields, identity
from pfl_core.util.fields import choice, number
from tests.core.methods.core_shared import run
from tests.core.methods.setting import CONFIG, assert_same, client_data, leaves, setup, under


@pytest.mark.parametrize("name", ["train", "measure"])
def test_the_engine_takes_what_the_contract_says(name):
    """Both stand twice, in methods/base.py for authors of methods: names, order and defaults."""
    said, done = (inspect.signature(getattr(of, name)) for of in (base.Context, Context))
    plain = [[p.replace(annotation=p.empty) for p in x.parameters.values()] for x in (said, done)]
    assert plain[0] == plain[1]


def test_fedavg_round_by_hand():
    method, (state, *_), data = run("fedavg", n=1)
    task = method.task
    total = {n: torch.zeros_like(v) for n, v in task.initial.items() if n in task.parameters}
    for k in range(4):
        net = setup("fedavg")[0].task.model.train()
        opt = torch.optim.SGD(net.parameters(), lr=CONFIG.lr)
        for (idx,) in data.batch_indices(k, 0, batch=CONFIG.batch):
            x, y = data.batch(torch.as_tensor(idx))
            opt.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
        for n, v in net.named_parameters():
            total[n] += v.detach() * (13, 5, 18, 2)[k] / 38
        for n in task.buffers:
            torch.testing.assert_close(
                state.clients[n][k], net.get_buffer(n), rtol=1e-9, atol=1e-12
            )
    for n, v in total.items():
        torch.testing.assert_close(state.server[n], v, rtol=1e-9, atol=1e-12)


def test_fedavg_of_one_client_is_local():
    data = client_data(sizes=(11,))
    a, b = run("fedavg", data=data)[1][0], run("local", data=data)[1][0]
    for n, v in b.clients.items():
        assert torch.equal(v[0], a.server[n] if n in a.server else a.clients[n][0])


def test_local_client_ignores_others_data():
    data, other = client_data(), client_data()
    other.x[other.index["train"][0]] += 1
    a, b = run("local", data=data)[1][0], run("local", data=other)[1][0]
    for n, v in a.clients.items():
        assert torch.equal(v[1:], b.clients[n][1:])
    assert not torch.equal(a.clients["fc.weight"][0], b.clients["fc.weight"][0])


def test_no_training_leaves_the_global_model():
    _, (state, *_), *_ = run("fedavg", epochs=0)
    initial = setup("fedavg")[0].task.initial
    for n, v in state.server.items():
        torch.testing.assert_close(v, initial[n], rtol=1e-12, atol=0)


def test_weights_follow_sizes():
    p = {"a": torch.tensor([[1.0], [2.0], [4.0]])}
    assert weighted_mean(p, torch.tensor([1.0, 0.0, 3.0]))["a"].item() == pytest.approx(3.25)


def test_after_at_round_0_is_local_training():
    _, (_, h, *_), *_ = run("fedavg", n=1)
    _, (_, g, *_), *_ = run("local", n=1)
    for metric in ("correct", "loss"):
        assert torch.equal(h.evals[f"after/test/{metric}"][0], g.evals[f"after/test/{metric}"][0])


def test_relabelled_clients_get_the_same_average():
    a, b = client_data(), client_data()
    for s, lists in b.index.items():
        b.index[s] = [lists[k] for k in (2, 0, 3, 1)]
    b.n = b.n[[2, 0, 3, 1]]
    one = dict(epochs=1, shuffle=False)  # the order of batches is drawn by client id
    left, right = run("fedavg", data=a, **one)[1][0], run("fedavg", data=b, **one)[1][0]
    for n, v in left.server.items():
        torch.testing.assert_close(v, right.server[n], rtol=1e-9, atol=1e-12)


def test_server_never_sees_the_head():
    method, (state, _, before, *_), *_ = run("fedper", depth=2, own_heads=True, buffers="average")
    head = method.task.head
    assert not head & state.server.keys() and head == state.clients.keys()
    for n, v in before.items():
        alike = all(torch.equal(v[0], v[k]) for k in range(4))
        assert alike == (n not in head), n


def test_finetuning_trains_only_the_head():
    method, _, data = run("fedper", n=0, args={"finetune_epochs": 1})
    method = under(method, epochs=0)
    engine = Engine(method, data, "threads", 1)
    with torch.no_grad():
        start = expand(method.task.initial, 4)
        end = method.local(Context(engine, method.init(), torch.arange(4), 0), start)
    for n, v in end.items():
        assert torch.equal(v, start[n]) == (n not in ("fc.weight", "fc.bias")), n


def test_zero_rate_leaves_everything_fixed():
    method, (state, *_), *_ = run("fedper", lr=0.0, own_heads=True, bn=False)
    for path, v in leaves(state):
        n = path.split("/")[-1]
        want = method.task.start()[n]
        torch.testing.assert_close(
            v, want if path.startswith("/clients") else want[0], rtol=1e-12, atol=0
        )


def test_registry_refuses_a_taken_name_and_lists():
    with pytest.raises(ValueError, match="taken by pfl_core.methods.fedavg"):

        class Fake(Method):
            name = "fedavg"

    assert METHODS["fedavg"] is FedAvg
    assert list_methods()["local"].startswith("Every client trains alone")


def test_a_method_without_a_docstring_is_listed(forget):
    class Plain(Method):
        name = "plain_for_test"
        lam: float = 0.1

    assert list_methods()["plain_for_test"] == "(its class has no docstring)"


HOOKS = """check init is_shared download begin logits loss local upload traffic serve personal""".split()


def test_there_are_twelve_hooks_and_each_says_what_it_is():
    public = [n for n, v in vars(Method).items() if callable(v) and not n.startswith("_")]
    assert sorted(public) == sorted([*HOOKS, "bind", "pairs"]) and len(HOOKS) == 12
    assert all(getattr(Method, n).__doc__ for n in public)


def test_each_hook_is_overridden_by_a_method_of_ours():
    ours = [c for c in METHODS.values() if c.__module__.startswith("pfl_core.")]
    for hook in HOOKS:
        assert any(getattr(c, hook) is not getattr(Method, hook) for c in ours), hook


class Pulled(Method):
    """FedAvg with a pull."""

    name = "pulled_for_test"
    lam: float = 0.1
    near: str = choice("start", "zero", doc="where to")

    def loss(self, p, anchor, batch):
        far = sum(p[n].square().sum() for n in self.task.parameters)
        return super().loss(p, anchor, batch) + self.lam * far


class PulledMore(Pulled):
    """The same, with more."""

    name = "pulled_more_for_test"
    lam: float = number(2.0, above=0, high=3, doc="pull")
    more: int | None = number(None, low=1, doc="what else; None: nothing")


for _cls in (Pulled, PulledMore):  # registered within a test that asks for them
    del METHODS[_cls.name]


@pytest.fixture
def forget():
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


@pytest.fixture
def pulled(forget, monkeypatch):
    for cls in (Pulled, PulledMore):
        monkeypatch.setitem(METHODS, cls.name, cls)


def test_annotated_attributes_are_hyper_parameters(pulled):
    assert str(inspect.signature(Pulled)) == "(lam: float = 0.1, near: str = 'start') -> None"
    assert [f.name for f in dataclasses.fields(PulledMore)] == ["lam", "near", "more"]
    m = make_method("pulled_more_for_test", lam=1.5)
    assert (m.lam, m.near, m.more, Pulled().lam) == (1.5, "start", None, 0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        m.lam = 1.0
    with pytest.raises(ValueError, match="'lamb' is unknown; did you mean 'lam'"):
        make_method("pulled_for_test", lamb=1.0)


@pytest.mark.parametrize(
    "args, said",
    [
        (dict(lam=0), "lam=0): allowed is a number in (0, 3]"),
        (dict(lam=3.5), "lam=3.5): allowed is a number in (0, 3]"),
        (dict(lam="1"), "lam='1'): got str, allowed is float"),
        (dict(lam=float("inf")), "lam=inf): allowed is a finite number"),
        (dict(near="far"), "near='far'): allowed is one of start, zero"),
        (dict(more=0), "more=0): allowed is an integer >= 1 or None"),
        (dict(more=1.5), "more=1.5): got float, allowed is int | None"),
    ],
)
def test_what_a_field_does_not_allow_is_refused_where_the_method_is_made(args, said, pulled):
    for make in (PulledMore, lambda **a: make_method(PulledMore.name, **a)):
        with pytest.raises(ValueError, match="^" + re.escape(f"pulled_more_for_test({said}") + "$"):
            make(**args)


def test_help_and_the_card_show_hyper_parameters():
    text = inspect.getdoc(PulledMore)
    assert text.startswith("The same, with more.\n")
    assert "lam : a number in (0, 3], default 2.0\n    pull\n" in text
    assert "near : one of start, zero, default 'start'" in text
    html = PulledMore(lam=2.5)._repr_html_()
    assert "2.5: pull" in html and "<th>more</th>" in html


def test_a_method_survives_pickling_and_copying():
    for m in (PulledMore(lam=1.0), pickle.loads(pickle.dumps(PulledMore(lam=1.0)))):
        assert (m.lam, m.near, copy.deepcopy(m).lam) == (1.0, "start", 1.0)


def declared(cls, name):
    """What is said of a field, but for its default."""
    (f,) = [f for f in dataclasses.fields(cls) if f.name == name]
    return fields.allowed(f), dict(fields.about(f))


def mixed(parent, **body):
    return type("Mixed", (type("Mix", (), body), parent), {"__doc__": "Mixed.", "name": ""})


def child(parent, **body):
    return type("Child", (parent,), body | {"__doc__": "Another default.", "name": ""})


def annotated(parent, **body):
    name = next(iter(body))
    kind = next(f.type for f in dataclasses.fields(parent) if f.name == name)
    return child(parent, __annotations__={name: kind}, **body)


def grandchild(parent, **body):
    return child(child(parent, **body))


def diamond(parent, **body):
    return type(
        "Diamond", (child(parent), child(parent, **body)), {"__doc__": "Of two.", "name": ""}
    )


PLAIN = [(PulledMore, "lam", 2.5), (PulledMore, "near", "zero"), (PulledMore, "more", 7)]
PLAIN += [
    (cls, name, search.draw(np.random.default_rng(1)))
    for cls in METHODS.values()
    if identity.is_ours(cls)
    for name, search in fields.searched(cls).items()
]


@pytest.mark.parametrize("way", [child, annotated, grandchild, mixed, diamond])
@pytest.mark.parametrize("cls, name, new", PLAIN)
def test_a_plain_value_in_a_subclass_is_its_new_default_and_all_else_stays(way, cls, name, new):
    made = way(cls, **{name: new})
    assert getattr(made(), name) == getattr(made, name) == new
    assert getattr(cls(), name) == getattr(cls, name) and getattr(made(**{name: new}), name) == new
    assert declared(made, name) == declared(cls, name)
    assert [f.name for f in dataclasses.fields(made)] == [f.name for f in dataclasses.fields(cls)]
    assert fields.searched(made) == fields.searched(cls)
    assert f"{name} : {declared(cls, name)[0]}, default {new!r}" in made.__doc__
    for wrong in (object(), float("nan")):
        for make in (lambda v: made(**{name: v}), lambda v: way(cls, **{name: v})()):
            with pytest.raises(ValueError, match=rf"\({name}=.*allowed is"):
                make(wrong)


def test_a_plain_value_in_a_subclass_trains_and_has_an_id_of_its_own(pulled):
    class Strong(Pulled):
        name = "strong_for_test"
        lam = 0.5

    class Same(Pulled):
        name = "same_for_test"

    _, (a, *_), *_ = run("strong_for_test")
    _, (b, *_), *_ = run("pulled_for_test", args={"lam": 0.5})
    assert_same(a, b)
    digests = {identity.digest(cls) for cls in (Strong, Same, Pulled)}
    assert len(digests) == 3


def test_a_field_of_another_type_is_declared_anew():
    class Steps(PulledMore):
        more: str = "none"
        lam: int = 9

    assert fields.allowed(Steps.__dataclass_fields__["more"]) == "str"
    assert (Steps().more, Steps().lam) == ("none", 9)


def test_a_users_method_trains(pulled):
    _, (a, *_), *_ = run("pulled_for_test", args={"lam": 0.0})
    _, (b, *_), *_ = run("fedavg")
    assert_same(a, b, exact=False)  # ours may have images in another order, which rounds otherwise
    _, (c, *_), *_ = run("pulled_for_test", args={"lam": 0.5})
    assert c.server["fc.weight"].norm() < b.server["fc.weight"].norm()


def test_what_does_not_fit_the_task_names_the_method(forget):
    class Picky(Method):
        name = "picky_for_test"

        def check(self):
            raise ValueError(f"lr = {self.task.config.lr}; allowed: none")

    with pytest.raises(ValueError, match=r"^picky_for_test: lr = 0.05; allowed: none$"):
        setup("picky_for_test")
