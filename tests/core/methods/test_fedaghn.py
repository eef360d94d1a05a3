"""FedAGHN: its rule, beside plain loops and what it reduces to."""

import copy

import pytest
import torch

from pfl_core import models
from pfl_core.methods.fedaghn import ABLATIONS
from pfl_core.stacked import flat, select
from tests.core.methods.layers_shared import on, random_updates
from tests.core.methods.setting import assert_same, client_data, rounds, setup


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


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
