"""GPFL: its rule, beside plain loops and what it reduces to."""

import pytest
import torch
import torch.nn.functional as F

from tests.core.methods.features_shared import (
    EVERYONE,
    FC,
    batch_of,
    by_hand,
    client,
    context,
    one_round,
    randn,
)
from tests.core.methods.setting import assert_same, setup


def gpfl(**args):
    method, data = setup("gpfl", args=args)
    p = client(method.begin(method.init(), EVERYONE))
    return (
        method,
        data,
        {n: v + 0.3 * randn(*v.shape) if v.is_floating_point() else v for n, v in p.items()},
    )


def test_gpfl_valve_and_loss():
    method, data, p = gpfl(lam=0.7, mu=0.4)
    batch, frozen = batch_of(data), randn(*p["gce"].shape, seed=5)
    z = method.task.features(p, batch.x, training=False)
    torch.testing.assert_close(method.valve(p, z, p["personal"]), by_hand(p, z, p["personal"]))
    scores = by_hand(p, z, p["personal"]) @ p["fc.weight"].T + p["fc.bias"]
    torch.testing.assert_close(method.logits(p, batch.x), scores)
    generic = by_hand(p, z, p["generic"])
    unit = lambda v: v / v.norm(dim=1, keepdim=True).clamp_min(1e-12)  # noqa: E731
    want = F.cross_entropy(scores, batch.y) + F.cross_entropy(
        unit(generic) @ unit(p["gce"]).T, batch.y
    )
    want += 0.7 * torch.linalg.matrix_norm(generic - frozen[batch.y])
    decayed = [v for n, v in p.items() if n == "gce" or n.startswith("cov.")]
    assert len(decayed) == 9
    want += 0.2 * sum((v**2).sum() for v in decayed)
    torch.testing.assert_close(method.loss(p, {"gce": frozen}, batch), want)


def test_gpfl_gradient_is_finite_where_generic_features_meet_their_class():
    method, data, p = gpfl()
    batch = batch_of(data)
    dead = (
        p
        | {n: v * 0 for n, v in p.items() if n.startswith("cov.beta")}
        | {"conv1.weight": p["conv1.weight"] * 0}
    )
    dead |= {
        n: v * 0 - 1 for n, v in p.items() if n in ("fc2.bias", "fc2.weight")
    }  # all features are 0
    leaves = {
        n: v.clone().requires_grad_() for n, v in dead.items() if n not in method.task.buffers
    }
    loss = method.loss(dead | leaves, {"gce": torch.zeros_like(p["gce"])}, batch)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    assert all(torch.isfinite(g).all() for g in grads if g is not None)


def test_gpfl_serves_the_personal_route():
    method, data, p = gpfl()
    batch = batch_of(data)
    other = p | {"gce": randn(*p["gce"].shape, seed=3), "generic": p["generic"] + 1}
    assert torch.equal(method.logits(p, batch.x), method.logits(other, batch.x))
    leaves = [p[n].clone().requires_grad_() for n in ("gce", "fc.weight")]
    scores = method.logits(p | dict(zip(("gce", "fc.weight"), leaves, strict=True)), batch.x)
    gce, head = torch.autograd.grad(scores.sum(), leaves, allow_unused=True, materialize_grads=True)
    assert not gce.any() and head.any()  # of the task's own loss, E learns nothing


@pytest.mark.parametrize("condition", ["own", "global"])
def test_gpfl_conditions(condition):
    method, data = setup("gpfl", args=dict(condition=condition))
    state = method.init()
    first = method.begin(state, EVERYONE)
    assert not first["generic"].any() and not first["personal"].any()
    state, end = one_round(method, data, state)
    assert not end["personal"].any()  # what the round was trained with
    start = method.begin(state, EVERYONE)
    gce = end["gce"] if condition == "own" else state.server["gce"].expand(4, -1, -1)
    for k in range(4):
        share = data.label_counts[k] / data.n[k]
        torch.testing.assert_close(start["generic"][k], gce[k].mean(0))
        torch.testing.assert_close(
            start["personal"][k], sum(share[c] * gce[k, c] for c in range(3))
        )


def test_gpfl_of_equal_label_shares_has_one_route():
    method, data = setup("gpfl")
    method.task.label_counts = torch.full((4, 3), 2)
    method.task.n = torch.full((4,), 6)
    c = method.conditions(randn(4, 3, 7), EVERYONE)
    torch.testing.assert_close(c["generic"], c["personal"])


def test_gpfl_trains_and_averages_its_modules():
    method, data = setup("gpfl")
    state = method.init()
    before = {n: v.clone() for n, v in state.server.items()}
    start = method.begin(state, EVERYONE)
    with torch.no_grad():
        end = method.local(context(method, data, state), start)
    assert_same(before, state.server)  # E as received stays what the clients are pulled to
    new = method.upload(state, EVERYONE, start, end, data.n.double()).server
    share = (data.n / data.n.sum()).double()
    assert {"gce", "cov.gamma.0.weight", "cov.beta.2.bias", "conv1.weight"} <= new.keys() and FC[
        0
    ] not in new
    for n in new:
        assert "conv" in n or not torch.equal(new[n], before[n]), n
        torch.testing.assert_close(new[n], torch.einsum("s,s...->...", share, end[n]))
