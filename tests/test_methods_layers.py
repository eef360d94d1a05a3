"""FedALA, FLAYER, FedAGHN: weights, masks and rates by hand, gradients against autograd, and what each reduces to."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from test_methods import CONFIG, assert_same, client_data, joined, rounds, setup
from torch import nn

from pfl_core import models
from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.engine.simulate import simulate
from pfl_core.methods.base import Batch, State, Step, check_adopts, make_method
from pfl_core.methods.fedaghn import ABLATIONS
from pfl_core.methods.flayer import FORMS, INNER, accuracy, largest
from pfl_core.methods.task import Task
from pfl_core.stacked import clone, flat, prefixed, select, unprefixed

ALL = torch.arange(4)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def on(net, name, k=3, **args):
    """The method on a bare network, without data."""
    task = Task(
        net, torch.full((k,), 4), torch.ones(k, 3, dtype=torch.int64), replace(CONFIG, lr=0.1)
    )
    return make_method(name, **args).bind(task)


class Watched:
    """A context that notes every training."""

    def __init__(self, c):
        self.c, self.calls = c, []

    def __getattr__(self, name):
        return getattr(self.c, name)

    def train(self, loss, start, **how):
        self.calls.append(how | {"end": self.c.train(loss, start, **how)})
        return self.calls[-1]["end"]


def context(method, state, sel=ALL, round=1, data=None):
    return Watched(Context(Engine(method, data or client_data(), "threads", 1), state, sel, round))


def random_updates(state, names, seed=0, scale=0.1):
    g = torch.Generator().manual_seed(seed)
    return {
        n: state[n] + scale * torch.randn(state[n].shape, generator=g, dtype=state[n].dtype)
        for n in names
    }


# -- FedALA --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["threads", "batched"])
def test_fedala_without_rate_is_fedavg(executor):  # T1, R10
    (_, a), (_, b) = (
        rounds("fedala", 3, executor, args={"eta": 0.0, "max_epochs": 2}),
        rounds("fedavg", 3, executor),
    )
    assert_same(a.server, b.server)
    assert all((v == 1).all() for v in unprefixed("ala.", a.clients).values())


def test_fedala_alone_is_local():  # R15: with one client, own and global head never differ
    kw = dict(data=client_data(sizes=(9,)))
    (_, a), (_, b) = rounds("fedala", 3, **kw), rounds("local", 3, **kw)
    assert_same({n: v[None] for n, v in a.server.items()}, select(b.clients, a.server))
    assert not a.clients["started"].any()


def test_fedala_blend_is_exact_at_its_ends_and_the_base_is_global():  # T2, T3, T4
    method, state = rounds("fedala", 2)
    weights = unprefixed("ala.", state.clients)
    assert all(((0 <= v) & (v <= 1)).all() for v in weights.values()) and any(
        (v < 1).any() for v in weights.values()
    )
    start = method.begin(state, ALL)
    p = method.adapt(context(method, state, round=2), start)
    for n in method.task.parameters:
        assert n in method.top or torch.equal(p[n], start[n])
    still = make_method("fedala", eta=0.0).bind(method.task)
    for value, rule in ((0.0, "own."), (1.0, "")):
        for v in weights.values():
            v.fill_(value)
        p = still.adapt(context(still, state, round=2), still.begin(state, ALL))
        for n in method.top:
            assert torch.equal(p[n], state.clients["own." + n] if rule else start[n]), n


def test_fedala_step_is_projected_gradient_descent_on_the_weights():
    method, data = setup("fedala", bn=False, args={"eta": 0.7})
    g = torch.Generator().manual_seed(1)
    draw = lambda v: torch.rand(v.shape, generator=g, dtype=v.dtype)  # noqa: E731
    w = {n: v + 0.2 * draw(v) for n, v in method.task.initial.items()}
    anchor = w | {f"own.{n}": w[n] - draw(w[n]) for n in method.top}
    ala = {f"ala.{n}": draw(w[n]) for n in method.top}
    batch = Batch(*data.batch(torch.as_tensor(data.index["train"][0])))
    loss = lambda a: method.loss(w | method.blend(a, anchor), w, batch)  # noqa: E731
    slopes = torch.func.grad(loss)(ala)
    p = w | ala | method.blend(ala, anchor) | {"score": torch.tensor(3.0, dtype=data.dtype)}
    grad = lambda q: torch.func.grad(lambda x: method.scored(p | x, anchor, batch))(  # noqa: E731
        {n: q[n] for n in [*method.top, "score"]}
    )
    q, _ = method.learn(p, anchor, grad, Step(0, 0.1, {}))
    for n, s in slopes.items():
        torch.testing.assert_close(q[n], (ala[n] - 0.7 * s).clamp(0, 1), rtol=1e-12, atol=1e-14)
    for n in method.top:
        torch.testing.assert_close(
            q[n], anchor["own." + n] + (w[n] - anchor["own." + n]) * q["ala." + n]
        )
    torch.testing.assert_close(q["score"], loss(ala))


def test_fedala_start_phase_then_one_epoch():
    method, state = rounds("fedala", 0)
    c = context(method, state, round=0)
    method.local(c, method.begin(state, ALL))
    assert len(c.calls) == 1, "in round 0 there is nothing to blend"
    method, state = rounds("fedala", 1)
    assert not state.clients["started"].any()
    c = context(method, state)
    end = method.local(c, method.begin(state, ALL))
    learned = [call for call in c.calls if call.get("stream") == "ala"]
    assert len(learned) > method.window and all(call["fraction"] == 0.8 for call in learned)
    scores = torch.stack([call["end"]["score"] for call in learned])
    for k in range(
        4
    ):  # each client stopped with the first epoch at which its last ten losses lay close together
        done = [
            e for e in range(11, len(scores) + 1) if scores[e - 10 : e, k].std(correction=0) < 0.1
        ]
        at = learned[done[0] - 1]["end"]
        assert torch.equal(end["ala.fc.weight"][k], at["ala.fc.weight"][k])
    assert end["started"].all()
    method, state = rounds("fedala", 2)
    c = context(method, state, round=2)
    method.local(c, method.begin(state, ALL))
    assert len(c.calls) == 2
    method, state = rounds("fedala", 1, args={"threshold": 0.0, "max_epochs": 13})
    c = context(method, state)
    method.personal(state, c)
    assert len(c.calls) == 13


def test_fedala_clients_do_not_wait_for_each_other():
    method, state = rounds("fedala", 1, args={"threshold": 0.02})
    together = method.adapt(context(method, state), method.begin(state, ALL))
    for k in range(4):
        sel = torch.tensor([k])
        alone = method.adapt(context(method, state, sel), method.begin(state, sel))
        assert_same(alone, {n: v[k : k + 1] for n, v in together.items()})


def test_fedala_leaves_statistics_alone_while_it_blends():
    method, state = rounds("fedala", 1)
    start = method.begin(state, ALL)
    p = method.adapt(context(method, state), start)
    assert method.task.buffers and all(torch.equal(p[n], start[n]) for n in method.task.buffers)


def test_fedala_without_head_is_fedavg():
    method, data = setup("fedala", head_depth=0)
    assert_same(simulate(method, data, workers=1)[0].server, rounds("fedavg", 3)[1].server)


# -- FedAGHN -------------------------------------------------------------------------------------------------------------


def aghn(net=None, k=5, **args):
    """FedAGHN with differing models and an update of each, as after a round."""
    net = net or models.build("lenet", (1, 16, 16), 3, kernels=2, bn=True).double()
    method = on(net, "fedaghn", k, **args)
    state, sel = method.init(), torch.arange(k)
    state.extra["theta"] = random_updates(state.extra["theta"], method.task.parameters, 1)
    start = method.begin(state, sel)
    state = method.upload(
        state, sel, start, start | random_updates(start, method.task.parameters, 2), torch.ones(k)
    )
    return method, state, sel


def test_fedaghn_first_weights_are_those_of_table_4():
    method, _ = setup("fedaghn", data=client_data(sizes=(2,) * 20))
    for name, w in method.weights(method.init()).items():
        assert name in method.task.layers
        assert torch.equal((w * 1e6).round().diagonal(), torch.full((20,), 29126.0, dtype=w.dtype))
        assert (w - torch.diag(w.diagonal()) - 0.051099 * (1 - torch.eye(20))).abs().max() < 1e-6


def test_fedaghn_layers_are_modules():
    assert list(aghn()[0].task.layers) == ["conv1", "bn1", "conv2", "bn2", "fc1", "fc2", "fc"]
    assert len(on(models.build("cnn_bn", (3, 32, 32), 10), "fedaghn").task.layers) == 6
    assert (
        len(on(models.build("resnet18", (3, 32, 32), 10, width=0.02), "fedaghn").task.layers) == 41
    )


def test_fedaghn_rows_sum_to_one_and_the_self_weight_is_p():
    method, state, sel = aghn(h=0.5)
    g = torch.Generator().manual_seed(0)
    state.extra["p"] = torch.rand(5, 7, generator=g, dtype=torch.float64)
    state.extra["q"] = torch.randn(5, 7, generator=g, dtype=torch.float64) * 3
    for i, w in enumerate(method.weights(state).values()):
        p = state.extra["p"][:, i]
        torch.testing.assert_close(w.sum(1), torch.ones(5, dtype=w.dtype), rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(w.diagonal(), p / (1 + p), rtol=1e-14, atol=0)
    state.extra["q"].zero_()
    for w in method.weights(state).values():
        others = w[~torch.eye(5, dtype=torch.bool)].view(5, 4)
        torch.testing.assert_close(others, others[:, :1].expand(5, 4), rtol=1e-14, atol=0)
    state.extra["q"].fill_(1e5)
    state.extra["p"].zero_()
    for i, w in enumerate(method.weights(state).values()):
        s = state.extra["s"][:, i].clone().fill_diagonal_(-2)
        assert torch.equal(w.argmax(1), s.argmax(1)) and (w.amax(1) == 1).all()


def test_fedaghn_mixes_layer_by_layer():
    method, state, sel = aghn()
    w, theta, sent = method.weights(state), state.extra["theta"], method.download(state, sel)
    for layer, names in method.task.layers.items():
        for n in names:
            by_hand = torch.stack(
                [sum(w[layer][i, j] * theta[n][j] for j in range(5)) for i in range(5)]
            )
            torch.testing.assert_close(sent[n], by_hand)
    assert set(sent) == set(method.task.parameters)


@pytest.mark.parametrize("sign", ["literal", "descent"])
def test_fedaghn_gradients_are_the_closed_form(sign):
    method, state, sel = aghn(h=0.3, hn_sign=sign)
    some = torch.tensor([1, 3])
    p0, q0, s, theta = (copy.deepcopy(state.extra[n]) for n in ("p", "q", "s", "theta"))
    w, start = method.weights(state), method.begin(state, some)
    end = start | random_updates(start, method.task.parameters, 5)
    after = method.upload(copy.deepcopy(state), some, start, end, torch.ones(2))
    for row, i in enumerate(some.tolist()):
        for at, (layer, names) in enumerate(method.task.layers.items()):
            p, q = p0[i, at], q0[i, at]
            delta = torch.cat([(end[n] - start[n])[row].flatten() for n in names])
            models = torch.cat([theta[n].flatten(1) for n in names], 1)
            a, bar = w[layer][i] * (1 + p), torch.cat([start[n][row].flatten() for n in names])
            others = [j for j in range(5) if j != i]
            mean = sum(a[j] * s[i, at, j] for j in others)
            dp = ((models[i] - bar) / (1 + p)) @ delta
            dq = sum(a[j] * (s[i, at, j] - mean) * models[j] for j in others) @ delta / (1 + p)
            h = 0.3 if sign == "descent" else -0.3
            torch.testing.assert_close(
                after.extra["p"][i, at], (p + h * dp).clamp_min(0), rtol=1e-10, atol=1e-12
            )
            torch.testing.assert_close(after.extra["q"][i, at], q + h * dq, rtol=1e-10, atol=1e-12)
    for n in "pq":  # the others' parameters are not touched
        assert torch.equal(after.extra[n][[0, 2, 4]], state.extra[n][[0, 2, 4]])
    assert (after.extra["p"] >= 0).all()


def test_fedaghn_literal_sign_climbs_the_loss_and_descent_goes_down():
    gains = {}
    for sign in ("literal", "descent"):
        method, state, sel = aghn(h=1e-4, hn_sign=sign)
        s, theta = state.extra["s"].clone(), copy.deepcopy(state.extra["theta"])
        start = method.begin(state, sel)
        end = start | random_updates(start, method.task.parameters, 5)
        state = method.upload(state, sel, start, end, torch.ones(5))
        state.extra |= {"s": s, "theta": theta}
        names = (
            method.task.parameters
        )  # Delta points down the loss, so that <change of thetabar, Delta> > 0 is descent
        moved = flat(select(method.begin(state, sel), names)) - flat(select(start, names))
        gains[sign] = float((moved * (flat(select(end, names)) - flat(select(start, names)))).sum())
    assert gains["literal"] < 0 < gains["descent"]


def test_fedaghn_keeps_p_and_q_in_the_round_of_equal_models():
    for args in ({}, {"ablation": "no_p"}, {"ablation": "shared"}):
        method, before = rounds("fedaghn", 0, args={"h": 1e6} | args)
        _, state = rounds("fedaghn", 1, args={"h": 1e6} | args)
        assert torch.equal(state.extra["p"], before.extra["p"]) and torch.equal(
            state.extra["q"], before.extra["q"]
        )
        assert not torch.equal(state.extra["s"], before.extra["s"])


def test_fedaghn_p_stays_nonnegative():
    _, state = rounds("fedaghn", 3, args={"h": 1e3})
    assert (state.extra["p"] >= 0).all() and (state.extra["p"] == 0).any()


def test_fedaghn_weights_ignore_the_length_of_updates_and_follow_the_clients():
    method, state, sel = aghn(h=0.0)
    start = method.begin(state, sel)
    step = random_updates(
        {n: torch.zeros_like(start[n]) for n in method.task.parameters}, method.task.parameters, 7
    )
    go = lambda s, d, sel=sel: method.weights(  # noqa: E731
        method.upload(
            copy.deepcopy(s),
            sel,
            start,
            start | {n: start[n] + v for n, v in d.items()},
            torch.ones(5),
        )
    )
    one = go(state, step)
    lengths = torch.tensor([1.0, 7.0, 0.1, 3.0, 100.0], dtype=torch.float64)
    other = go(state, {n: v * lengths.view(-1, *[1] * (v.dim() - 1)) for n, v in step.items()})
    order = torch.tensor([3, 0, 4, 1, 2])
    permuted = go(state, {n: v[order] for n, v in step.items()})
    for layer, w in one.items():
        torch.testing.assert_close(w, other[layer], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(w[order][:, order], permuted[layer], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_fedaghn_ablations(ablation):
    method, state, sel = aghn(h=5.0, ablation=ablation, hn_sign="descent", q0=0.7)
    before = copy.deepcopy(state.extra)
    start = method.begin(state, sel)
    end = start | random_updates(start, method.task.parameters, 3)
    after = method.upload(state, sel, start, end, torch.ones(5)).extra
    for n in "pq":
        assert (not torch.equal(after[n], before[n])) == (n in ABLATIONS[ablation]), n
    if ablation in ("no_q", "no_pq"):
        assert (after["q"] == 1).all()
    if ablation == "no_pq":
        for i, w in enumerate(method.weights(state).values()):
            torch.testing.assert_close(w, after["s"][:, i].softmax(1))
            assert (after["s"][:, i].diagonal() == 1).all()
    if ablation == "no_p":  # the client competes as any other node, with s_ii = 1
        w, q = method.weights(state)["fc"], after["q"][:, -1]
        torch.testing.assert_close(w, (q[:, None] * after["s"][:, -1]).softmax(1))
    if ablation == "shared":
        free, same, _ = aghn(h=5.0, hn_sign="descent", q0=0.7)
        for n in "pq":  # started together; the sum of the layers' moves (first step of `aghn`: where p was not clamped)
            assert (after[n] == after[n][:, :1]).all()
        same.extra |= {n: before[n].clone() for n in "pqs"}
        moved = free.upload(same, sel, start, end, torch.ones(5)).extra["q"] - before["q"]
        torch.testing.assert_close(after["q"][:, 0] - before["q"][:, 0], moved.sum(1))


def test_fedaghn_statistics_stay_at_home():
    method, state = rounds("fedaghn", 2)
    assert set(state.clients) == set(method.task.buffers) and not state.server
    assert set(state.extra["theta"]) == set(method.task.parameters)
    mean = state.clients["bn1.running_mean"]
    assert all(not torch.equal(mean[i], mean[j]) for i in range(4) for j in range(i))


def test_fedaghn_of_one_client_is_local():
    kw = dict(data=client_data(sizes=(9,)))
    (a, x), (_, y) = rounds("fedaghn", 3, **kw), rounds("local", 3, **kw)
    assert all((w == 1).all() for w in a.weights(x).values())
    assert_same(x.extra["theta"], select(y.clients, a.task.parameters), exact=False)


# -- FLAYER --------------------------------------------------------------------------------------------------------------

CNN = dict(input_shape=(3, 32, 32), classes=10)


def cnn(**args):
    return on(models.build("cnn", **CNN), "flayer", **args)


def changes(method, k=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        n: torch.rand(k, *method.task.initial[n].shape, generator=g) for n in method.task.parameters
    }


def factors(method, g):
    """Rates over eta as the method's mode has them."""
    return FORMS[method.mode][0](g, method.task, method.middle)


def masks_of(method, change):
    """What the method's mode uploads."""
    return FORMS[method.mode][1](change, method.task, method.fix_1x1)


class Deep(nn.Module):
    """Twenty layers of 7 x 3 weights and 3 biases (none in `fc`)."""

    def __init__(self):
        super().__init__()
        for i in range(19):
            self.add_module(f"l{i}", nn.Linear(7, 3))
        self.fc = nn.Linear(7, 3, bias=False)


@pytest.mark.parametrize("inner", INNER)
def test_flayer_without_its_parts_is_the_method_inside(inner):
    off = dict(inner=inner, mixing=False, rates=False, masking=False)
    (a, x), (b, y) = rounds("flayer", 3, args=off), rounds(inner, 3)
    assert_same(x, y)
    state = copy.deepcopy(x)
    assert_same(
        a.personal(x, context(a, x, round=3)), b.personal(state, context(b, state, round=3))
    )


def test_flayer_heads_begin_between_global_and_own():
    method, state = rounds("flayer", 2)
    head = [n for n in method.task.parameters if n in method.task.head]
    assert set(unprefixed("flayer.", state.clients)) == {*head, "acc"}
    state.clients["flayer.acc"].copy_(torch.tensor([0.0, 1.0, 0.25, 0.5]))
    p = method.begin(state, ALL)
    for n, v in state.server.items():
        mine = state.clients.get("flayer." + n)
        for k, a in enumerate((0.0, 1.0, 0.25, 0.5)):
            if n not in head or a == 0:
                assert torch.equal(p[n][k], v), n
            elif a == 1:
                assert torch.equal(p[n][k], mine[k])
            else:
                torch.testing.assert_close(p[n][k], a * mine[k] + (1 - a) * v)
    assert_same(
        select(method.personal(state, context(method, state)), method.task.names),
        select(p, method.task.names),
    )


@pytest.mark.parametrize("where", ["auto", "val", "test"])
def test_flayer_accuracy_is_that_of_the_last_round(where):
    args = {"acc_on": where}
    method, state = rounds("flayer", 0, args=args)
    assert (state.clients["flayer.acc"] == 0).all() and method.leaks_test == (where == "test")
    c = context(method, state, round=0)
    end = method.local(c, method.begin(state, ALL))
    split = "train" if where == "auto" else where
    got = c._engine.evaluate(select(end, method.task.names), split)
    hits = torch.tensor(
        [h / n if n else 0.0 for h, n in zip(got["correct"], got["n"], strict=True)]
    )
    torch.testing.assert_close(end["flayer.acc"], hits.double())
    assert torch.equal(end["flayer.fc.weight"], end["fc.weight"])


def test_flayer_reads_test_data_only_where_it_says_so():
    method, data = setup("flayer", args={"mode": "official"})
    assert (
        method.leaks_test
        and not setup("flayer", args={"mode": "official", "acc_on": "train"})[0].leaks_test
    )
    assert not setup("flayer", args={"mode": "official", "mixing": False})[0].leaks_test
    simulate(method, data, workers=1)
    object.__setattr__(method, "mixing", False)  # declares no leak now, but would read
    with pytest.raises(ValueError, match="leaks_test"):
        accuracy(
            method.logits,
            context(method, method.init()),
            method.begin(method.init(), ALL),
            method.split,
        )


def test_flayer_paper_rates():
    method = cnn()
    g = {n: torch.randn(v.shape) for n, v in method.task.initial.items()}
    f = factors(method, g)
    for i, layer in enumerate(("conv1", "conv2", "fc1", "fc"), 1):
        norm = math.sqrt(
            sum(float(g[f"{layer}.{part}"].square().sum()) for part in ("weight", "bias"))
        )
        for part in ("weight", "bias"):
            assert float(f[f"{layer}.{part}"]) == pytest.approx(
                1 + math.log(1 + 1 / norm) * i / 4, rel=1e-5
            )
    sizes = [
        factors(method, {n: v * a for n, v in g.items()}) for a in (0, 1e-6, 1e-3, 1.0, 1e3, 1e9)
    ]
    for n in g:
        series = [float(s[n]) for s in sizes]
        assert series == sorted(series, reverse=True) and all(1 <= v < math.inf for v in series)
        assert series[-1] == pytest.approx(1, abs=1e-6)
    assert set(factors(method, select(g, ["fc.weight"]))) == {"fc.weight"}


def test_flayer_step_keeps_the_rates_of_the_first_batch():
    method = on(models.build("mlp", (4,), 3, hidden=2).double(), "flayer")
    p = {n: v + 1 for n, v in method.task.initial.items()} | {
        "v.extra": torch.ones(2, dtype=torch.float64)
    }
    g = {n: torch.full_like(v, 0.3) for n, v in p.items()}
    f = factors(method, g)

    def step(p, factor, at):  # it writes into what it is given
        return method.step(clone(p), {}, lambda _: {n: factor * v for n, v in g.items()}, at)

    q, memory = step(p, 1, Step(0, 0.1, {}))
    r, _ = step(q, 5, Step(1, 0.1, memory))
    for n in p:
        rate = 0.1 * float(f.get(n, 1.0))
        torch.testing.assert_close(q[n], p[n] - rate * g[n])
        torch.testing.assert_close(r[n], q[n] - 5 * rate * g[n])
    by_name, _ = step(p, 1, Step(0, {n: 0.2 for n in p}, {}))
    torch.testing.assert_close(by_name["fc.bias"], p["fc.bias"] - 0.2 * f["fc.bias"] * g["fc.bias"])


@pytest.mark.parametrize("executor", ["threads", "batched"])
def test_flayer_trains_every_client_with_its_own_rates(executor):
    args = dict(mixing=False, masking=False)
    method, data = setup(
        "flayer", bn=False, args=args, batch=100
    )  # one full batch: one step a round
    state = method.init()
    start = method.begin(state, ALL)
    end = method.local(Context(Engine(method, data, executor, 1), state, ALL, 0), start)
    for k in range(4):
        batch = Batch(*data.batch(torch.as_tensor(data.batch_indices(k, 0, batch=100))[0, 0]))
        mine = {n: v[k] for n, v in start.items()}
        g = torch.func.grad(lambda q, b=batch: method.loss(q, q, b))(mine)
        f = factors(method, g)
        for n in g:
            torch.testing.assert_close(
                end[n][k], mine[n] - CONFIG.lr * f[n] * g[n], rtol=1e-9, atol=1e-12
            )


def test_flayer_official_rates():
    for middle in (20.0, 1.0):
        method = cnn(mode="official", middle=middle)
        g = {n: torch.randn(v.shape) for n, v in method.task.initial.items()}
        f = factors(method, g)
        assert f["conv1.weight"] == f["conv1.bias"] == 1 and float(f["fc.weight"]) == pytest.approx(
            0.2
        )
        for idx, layer in ((1, "conv2"), (2, "fc1")):
            logs = [
                math.log(1 + 1 / float(g[f"{layer}.{part}"].norm())) for part in ("weight", "bias")
            ]
            by_hand = sum(middle * (1 + idx / 3 * v) for v in logs) / 2
            assert float(f[f"{layer}.weight"]) == pytest.approx(by_hand, rel=1e-5)
    # FLAYER, Eq. 3 and 4: eta = .005 at norm 1.
    unit = {n: torch.zeros_like(v) for n, v in method.task.initial.items()}
    for n in unit:
        unit[n].view(-1)[0] = 1.0
    f = factors(cnn(mode="official"), unit)
    assert [round(0.005 * float(f[n]), 2) for n in ("conv2.bias", "fc1.bias")] == [0.12, 0.15]


def test_flayer_paper_masks_keep_the_upper_layers_share():
    method = cnn()
    change = changes(method)
    masks = masks_of(method, change)
    for i, (layer, names) in enumerate(method.task.layers_by("child").items(), 1):
        m, d = flat(select(masks, names)), flat(select(change, names))
        assert (m.sum(1) == math.ceil(i * m.shape[1] / 4)).all(), layer
        assert all(d[k][m[k]].min() > d[k][~m[k]].max() for k in range(2) if not m[k].all())
    share = sum(int(m[0].sum()) for m in masks.values()) / sum(v[0].numel() for v in masks.values())
    assert round(100 * share, 1) == 73.5
    deep = on(Deep(), "flayer")
    kept = [
        int(flat(select(masks_of(deep, changes(deep)), v))[0].sum())
        for v in deep.task.layers_by("child").values()
    ]
    assert (
        kept[:4] == [3, 3, 4, 5] and kept[9] == 12 and kept[-2:] == [23, 21]
    )  # of 24, the last of 21


def test_flayer_ties_go_to_the_lower_index():
    x = torch.tensor(
        [[1.0, 2.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0]]
    )
    expected = [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]
    assert largest(x, 3).int().tolist() == expected
    assert not largest(x, 0).any() and largest(x, 5).all()
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 5, (3, 4, 50), generator=g).double()
    for keep in (1, 7, 49):
        order = x.argsort(dim=-1, descending=True, stable=True)[..., :keep]
        assert torch.equal(
            largest(x, keep), torch.zeros_like(x, dtype=torch.bool).scatter_(-1, order, True)
        )


def test_flayer_official_masks_keep_what_the_code_keeps():
    method = cnn(mode="official")
    masks = masks_of(method, changes(method))
    per_kernel = {
        n: set(masks[n].flatten(3).sum(-1).view(-1).tolist())
        for n in ("conv1.weight", "conv2.weight")
    }
    assert per_kernel == {"conv1.weight": {3}, "conv2.weight": {6}}
    kept = {
        n: masks[n].flatten(1).sum(1).unique().tolist()
        for n in ("conv1.bias", "conv2.bias", "fc1.bias")
    }
    assert kept == {"conv1.bias": [4], "conv2.bias": [24], "fc1.bias": [320]}
    assert all(masks[n].all() for n in ("fc1.weight", "fc.weight", "fc.bias"))
    share = sum(int(m[0].sum()) for m in masks.values()) / sum(v[0].numel() for v in masks.values())
    assert round(100 * share, 1) == 95.3
    text = on(models.build("fasttext", (6,), 4, vocab=50), "flayer", mode="official")
    assert sum(int((~m[0]).sum()) for m in masks_of(text, changes(text)).values()) == 19


def test_flayer_official_bug_of_1x1_kernels():
    net = models.build("resnet18", (3, 32, 32), 100)
    change = changes(on(net, "flayer"), k=1)
    for fix in (True, False):
        masks = masks_of(on(net, "flayer", mode="official", fix_1x1=fix), change)
        down = [n for n in masks if n.endswith("downsample.0.weight")]
        assert len(down) == 3 and all(
            bool(masks[n].all()) == fix and bool(masks[n].any()) == fix for n in down
        )
    share = sum(int(m.sum()) for m in masks.values()) / sum(v.numel() for v in masks.values())
    assert round(100 * share, 1) == 75.3


def uploaded(agg, masks=None, seed=3):
    """The server before and after an upload of random models under masks {name: (3, *shape)}, and those models."""
    method = on(models.build("mlp", (4,), 3, hidden=2).double(), "flayer", agg=agg, mixing=False)
    state, sel = method.init(), torch.arange(3)
    start = method.begin(state, sel)
    end = start | random_updates(start, method.task.parameters, seed)
    before = {n: v.clone() for n, v in state.server.items()}
    masks = {n: torch.ones_like(end[n], dtype=torch.bool) for n in state.server} | (masks or {})
    after = method.upload(
        state, sel, start, end | prefixed("mask.", masks), torch.tensor([1.0, 2.0, 5.0]).double()
    )
    return before, after.server, end


def test_flayer_full_masks_are_fedavg():
    (_, a, end), (_, b, _) = uploaded("contributors"), uploaded("literal")
    mean = on(models.build("mlp", (4,), 3, hidden=2).double(), "fedavg")
    w = torch.tensor([1.0, 2.0, 5.0]).double()
    c = mean.upload(
        State({n: v[0] for n, v in end.items()}, {}), torch.arange(3), {}, end, w
    ).server
    assert_same(a, b)
    assert_same(a, c)


def test_flayer_server_averages_contributors_and_keeps_what_nobody_sent():
    masks = {
        "fc.bias": torch.tensor([[True, False, False], [True, True, False], [False, True, False]])
    }
    before, a, end = uploaded("contributors", masks)
    x, w = end["fc.bias"], (1.0, 2.0, 5.0)
    by_hand = torch.stack(
        [(x[0, 0] + 2 * x[1, 0]) / 3, (2 * x[1, 1] + 5 * x[2, 1]) / 7, before["fc.bias"][2]]
    )
    torch.testing.assert_close(a["fc.bias"], by_hand, rtol=1e-14, atol=0)
    _, b, _ = uploaded("literal", masks)
    zeros = torch.stack([(x[0, 0] + 2 * x[1, 0]) / 8, (2 * x[1, 1] + 5 * x[2, 1]) / 8, 0 * x[0, 0]])
    torch.testing.assert_close(b["fc.bias"], zeros)
    assert sum(w) == 8 and torch.equal(a["fc.weight"], b["fc.weight"])


def test_flayer_literal_rule_shrinks_the_base_and_contributors_do_not():
    sel, sizes = torch.arange(3), {}
    for agg in ("contributors", "literal"):
        method = cnn(agg=agg)
        state = method.init()
        start = method.begin(state, sel)
        one = {n: v[:1] for n, v in random_updates(start, method.task.parameters).items()}
        end = start | {n: v.expand(3, *v.shape[1:]) for n, v in one.items()}  # three equal clients
        masks = masks_of(method, {n: (end[n] - start[n]).abs() for n in one})
        after = method.upload(
            state, sel, start, end | prefixed("mask.", masks), torch.ones(3)
        ).server
        m, v = masks["conv1.weight"][0], one["conv1.weight"][0]
        expected = v * m if agg == "literal" else torch.where(m, v, start["conv1.weight"][0])
        torch.testing.assert_close(after["conv1.weight"], expected)
        sizes[agg] = float(after["conv1.weight"].abs().mean())
        kept = float(v.abs()[m].mean())
    assert (
        sizes["literal"] == pytest.approx(0.25 * kept, rel=0.02)
        and sizes["contributors"] > 1.5 * sizes["literal"]
    )


def test_flayer_traffic_counts_what_the_masks_let_through():
    method, data = setup("flayer")
    _, history, *_ = simulate(method, data, workers=1)
    layers = [
        sum(method.task.initial[n].numel() for n in v)
        for v in method.task.layers_by("child").values()
    ]
    kept = sum(math.ceil(max(i / len(layers), 0.1) * n - 1e-9) for i, n in enumerate(layers, 1))
    assert history.upload[1:] == [4 * kept * r for r in (1, 2, 3)]
    assert history.download[1] == 4 * sum(layers)


def test_flayer_masks_compare_with_where_clients_began():
    method, state = rounds("flayer", 2)
    start = method.begin(state, ALL)
    end = method.local(context(method, state, round=2), start)
    masks = unprefixed("mask.", end)
    assert set(masks) == set(method.task.parameters)
    again = masks_of(method, {n: (end[n] - start[n]).abs() for n in masks})
    assert_same(masks, again)
    flipped = masks_of(method, {n: (start[n] - end[n]).abs() for n in masks})
    assert_same(masks, flipped)


def test_flayer_official_trains_the_head_before_it_is_tested():
    method, state = rounds("flayer", 1, args={"mode": "official"})
    c = context(method, state)
    start = method.begin(state, ALL)
    served = method.personal(state, c)
    head = [n for n in method.task.parameters if n in method.task.head]
    assert len(c.calls) == 1 and c.calls[0]["only"] == head and c.calls[0]["epochs"] == 1
    for n in method.task.parameters:
        assert torch.equal(served[n], start[n]) == (n not in head), n
    c = context(method, state)
    end = method.local(c, start)
    assert len(c.calls) == 2 and all(torch.equal(c.calls[0]["end"][n], served[n]) for n in head)
    got = c._engine.evaluate(select(served, method.task.names), "test")
    torch.testing.assert_close(end["flayer.acc"], torch.tensor(got["correct"] / got["n"]))
    for n in masks_of(method, {n: end[n] for n in method.task.parameters}):
        changed = masks_of(method, {n: (end[n] - c.calls[0]["end"][n]).abs()})
        assert torch.equal(changed[n], end["mask." + n])


@pytest.mark.parametrize("part", [None, "rates", "masking"])
def test_flayer_official_trains_heads_that_are_not_mixed(
    part,
):  # Fig. 3: else one global model would be served
    args = dict.fromkeys(("mixing", "rates", "masking"), False) | ({part: True} if part else {})
    method, state = rounds("flayer", 1, args=args | {"mode": "official"})
    c = context(method, state)
    start, served = method.begin(state, ALL), method.personal(state, c)
    head = {n for n in method.task.parameters if n in method.task.head}
    assert not any(n.startswith("flayer.") for n in start) and not method.leaks_test
    for n in method.task.parameters:
        assert torch.equal(start[n][0], start[n][1]), "all clients begin with the global model"
        assert torch.equal(served[n], start[n]) == (n not in head)
    assert not torch.equal(served["fc.weight"][0], served["fc.weight"][1])
    c = context(method, state)
    method.local(c, start)
    assert [call.get("only") and set(call["only"]) for call in c.calls] == [head, None]
    assert all(torch.equal(c.calls[0]["end"][n], served[n]) for n in head)


PARTS = {"mixing": "flayer.", "rates": None, "masking": "mask."}


@pytest.mark.parametrize("part", PARTS)
def test_flayer_parts_alone(part):  # Fig. 3
    method, state = rounds("flayer", 2, args={p: p == part for p in PARTS})
    c = context(method, state, round=2)
    end = method.local(c, method.begin(state, ALL))
    for p, prefix in PARTS.items():
        if prefix:
            assert bool(unprefixed(prefix, end)) == (p == part)
    assert ("step" in c.calls[0]) == (part == "rates")
    assert not all(
        torch.equal(v, rounds("fedavg", 2)[1].server[n]) for n, v in state.server.items()
    )


MIXED = {"fedavg", "ditto", "fedamp"}  # methods whose server sends a head that nothing else adapts


@pytest.mark.parametrize("inner", INNER)
def test_flayer_around_other_methods(inner):
    args = {"inner": inner}
    method, state = rounds("flayer", 2, args=args)
    plain, other = rounds(inner, 2)
    extras = {f"flayer.{n}" for n in method.task.parameters if n in method.task.head} | {
        "flayer.acc"
    }
    assert set(state.clients) - set(other.clients) == (extras if inner in MIXED else set())
    assert state.server.keys() == other.server.keys() and isinstance(
        method.inner_method, type(plain)
    )
    c = context(method, state, round=2)
    start = method.begin(state, ALL)
    end = method.local(c, start)
    stepped = [call for call in c.calls if call.get("step") == method.step]
    assert len(stepped) == (2 if inner in ("ditto", "fedrep") else 1)
    masks = unprefixed("mask.", end)
    assert set(masks) == {
        n for n in end if n not in state.clients and method.carried(n) and "mask." not in n
    }
    for i, names in enumerate(method.task.layers_by("child").values(), 1):
        if part := {n: m for n, m in masks.items() if method.carried(n) in names}:
            m = flat(part)
            assert (
                m.sum(1) == max(math.ceil(i * m.shape[1] / 7), math.ceil(m.shape[1] / 10))
            ).all()
    assert all(v.shape[0] == 4 for v in method.personal(state, c).values())


@pytest.mark.parametrize(
    "args", [{"mode": "official"}, {"agg": "literal"}, *({"inner": n} for n in INNER[1:])], ids=str
)
def test_flayer_variants_agree_between_executors(args):
    (_, a), (_, b) = (rounds("flayer", 2, x, args=args) for x in ("threads", "batched"))
    assert_same(a, b, exact=False)


@pytest.mark.parametrize("inner", INNER)
def test_flayer_gives_new_clients_a_beginning(inner):
    method, state = rounds("flayer", 1, args={"inner": inner})
    if inner == "fedamp":
        with pytest.raises(ValueError, match="flayer keeps state for each client"):
            check_adopts(method)
        return
    check_adopts(method)
    method, new = joined(method, copy.deepcopy(state), 2)
    assert new.clients.keys() == state.clients.keys() and all(
        len(v) == 2 for v in new.clients.values()
    )
    p = method.begin(new, torch.arange(2))
    for n, v in new.server.items():
        assert torch.equal(p[n][0], v) or not v.is_floating_point(), (
            "A = 0: the global model as it is"
        )


@pytest.mark.parametrize(
    "name, bad",
    [
        ("fedala", {"eta": -1}),
        ("fedala", {"share": 0}),
        ("fedala", {"window": 0}),
        ("fedala", {"max_epochs": 0}),
        ("fedala", {"threshold": -1}),
        ("fedaghn", {"hn_sign": "up"}),
        ("fedaghn", {"ablation": "x"}),
        ("fedaghn", {"p0": -0.1}),
        ("fedaghn", {"h": -1}),
        ("flayer", {"mode": "new"}),
        ("flayer", {"agg": "mean"}),
        ("flayer", {"acc_on": "all"}),
        ("flayer", {"inner": "flayer"}),
        ("flayer", {"middle": 0}),
        ("flayer", {"mode": "official", "inner": "fedper"}),
        ("flayer", {"inner_args": {"nonsense": 1}}),
    ],
)
def test_illegal_values_are_refused_before_training(name, bad):
    with pytest.raises(
        ValueError, match=next(iter(bad)) if "inner_args" not in bad else "nonsense"
    ):
        setup(name, args=bad)
