"""FedFomo: its rule, beside plain loops and what it reduces to."""

import math

import pytest
import torch
import torch.nn.functional as F

from pfl_core.stacked import clone, expand, select, unprefixed
from tests.core.methods.mixing_shared import EVERYONE, one_round
from tests.core.methods.setting import assert_same, client_data, rounds, setup


def test_fedfomo_needs_held_out_samples():
    with pytest.raises(ValueError, match="holdout=0.0; set it"):
        setup("fedfomo", holdout=0.0)


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_fedfomo_mixes_by_the_formula(buffers):
    method, data = setup("fedfomo", buffers=buffers, args=dict(neighbours=2, explore=0.0))
    state, _ = (
        rounds("fedfomo", n=2, buffers=buffers, args=dict(neighbours=2, explore=0.0))[1],
        None,
    )
    state.extra["affinity"] = torch.tensor(
        [[1, 5, 2, 9], [7, 1, 3, 2], [1, 2, 3, 4], [4, 3, 2, 1]]
    ).double()
    before = {n: v.clone() for n, v in state.clients.items()}
    models, affinity = clone(state.extra["models"]), state.extra["affinity"].clone()
    _, end = one_round(method, data, state, train=False)
    t, asked = method.task, [[3, 1], [0, 2], [3, 1], [0, 1]]

    def loss(k, p):
        x, y = data.batch(torch.as_tensor(data.index["holdout"][k]))
        return F.cross_entropy(t.apply(p, x), y)

    mixed_something = False
    for k in range(4):
        b = {n: before["base." + n][k] for n in t.names}
        near = {k: {n: before[n][k] for n in t.names}} | {
            j: {n: models[n][j] for n in t.names} for j in asked[k]
        }
        norm = {
            j: math.sqrt(sum(float((u[n] - b[n]).square().sum()) for n in t.parameters))
            for j, u in near.items()
        }
        omega = {j: float(loss(k, b) - loss(k, u)) / (norm[j] + 1e-5) for j, u in near.items()}
        for j in range(4):
            assert state.extra["affinity"][k, j] - affinity[k, j] == pytest.approx(
                omega.get(j, 0), abs=1e-12
            )
        plus = {j: max(v, 0) for j, v in omega.items()}
        total = sum(plus.values())
        weight = {j: v / total for j, v in plus.items()} if total else {k: 1.0}
        mixed_something |= len([v for v in weight.values() if v > 0]) > 1
        for n in t.names:
            want = sum(w * near[j][n] for j, w in weight.items())
            if n in t.buffers and (buffers == "local" or "tracked" in n):
                want = before[n][k]
            torch.testing.assert_close(end[n][k], want, rtol=1e-9, atol=1e-12)
    assert mixed_something


def test_fedfomo_without_neighbours_is_local_on_what_is_not_held_out():  # R14
    _, fomo = rounds("fedfomo", n=3, args=dict(neighbours=0))
    method, local = rounds("local", n=3)
    assert_same(select(fomo.clients, method.task.names), local.clients)


def test_fedfomo_goes_on_from_its_own_or_its_first_model():
    for fallback in ("trained", "start"):
        method, data = setup("fedfomo", args=dict(fallback=fallback))
        state, _ = one_round(method, data, method.init())
        for models in (state.clients, state.extra["models"]):
            models["fc.weight"] *= -100  # what was trained is made useless
        kept, affinity = (
            {n: v.clone() for n, v in state.clients.items()},
            state.extra["affinity"].clone(),
        )
        _, end = one_round(method, data, state, train=False)
        unhelped = (state.extra["affinity"] < affinity).all(1)
        assert unhelped.tolist() == [
            True,
            True,
            True,
            False,
        ]  # the last one's single sample happens to fit
        want = kept if fallback == "trained" else unprefixed("base.", kept)
        for n in method.task.parameters:
            assert torch.equal(end[n][unhelped], want[n][unhelped]), n


def test_fedfomo_remembers_shares_of_omega_as_its_authors_do():
    told = {}
    for affinity in ("raw", "shares"):
        method, data = setup("fedfomo", args=dict(affinity=affinity, explore=0.0))
        state, _ = one_round(method, data, method.init())
        before = state.extra["affinity"].clone()
        state, _ = one_round(method, data, state)
        told[affinity] = state.extra["affinity"] - before
    total = told["raw"].sum(1, keepdim=True).abs()
    torch.testing.assert_close(told["shares"], told["raw"] / total, rtol=1e-9, atol=1e-12)
    assert (total > 0).all() and not torch.allclose(total, torch.ones_like(total))


def test_fedfomo_keeps_a_model_that_all_share():
    method, data = setup("fedfomo")
    state = method.init()
    state.extra["known"][:] = True
    _, end = one_round(method, data, state, train=False)
    for n, v in method.task.initial.items():
        assert torch.equal(end[n], expand({n: v}, 4)[n]), n
    assert torch.equal(state.extra["affinity"], torch.eye(4).double())


def test_fedfomo_asks_known_others_and_explores_less_with_time():
    method, data = setup(
        "fedfomo", data=client_data(sizes=[6] * 12), args=dict(neighbours=3, explore=0.5)
    )
    state = method.init()
    assert method.candidates(state, torch.arange(12))[0].shape == (12, 0)
    state.extra["known"][:5] = True
    state.extra["affinity"] += torch.arange(12).double()
    ids, known = method.candidates(state, torch.arange(12))
    assert ids[known].max() < 5 and not (ids == torch.arange(12)[:, None]).any()
    state.extra["known"][:] = True
    best = torch.tensor([11, 10, 9])
    greedy = []
    for state.round in (0, 5, 10):
        ids, known = method.candidates(state, torch.arange(9))
        assert known.all()
        greedy.append(int((ids == best).all(1).sum()))
    assert greedy[0] < greedy[2] == 9


def test_fedfomo_learns_on_other_samples_than_it_judges():
    data = client_data()
    for k in range(4):
        assert not set(data.index["holdout"][k]) & set(data.index["fit"][k])
        for r in (0, 1):
            assert set(data.batch_indices(k, r, batch=6).ravel()) <= set(data.index["fit"][k])


def test_fedfomo_traffic_counts_the_models_that_are_sent():
    method, data = setup("fedfomo", args=dict(neighbours=2))
    state = method.init()
    size = sum(v.numel() for v in method.task.initial.values() if v.is_floating_point())
    for want in (0, 4 * 2 * size):
        sent = method.download(state, EVERYONE)
        start = method.begin(state, EVERYONE, sent)
        state, end = one_round(method, data, state)
        up = {n: v for n, v in end.items() if n not in state.clients and n not in start}
        assert method.traffic(state, EVERYONE, sent, up) == (want, 4 * (size + 4))
