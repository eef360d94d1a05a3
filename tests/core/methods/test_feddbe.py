"""FedDBE: its rule, beside plain loops and what it reduces to."""

import pytest
import torch
import torch.nn.functional as F

from pfl_core.methods.base import Method
from pfl_core.stacked import select
from tests.core.methods.features_shared import EVERYONE, batch_of, client, context, one_round, randn
from tests.core.methods.setting import assert_same, setup


def feddbe(**args):
    """The method, its data and the state after the round that makes g (without one for kappa = 0)."""
    method, data = setup("feddbe", args=args)
    return method, data, method.init()


def test_feddbe_with_frozen_vectors_is_fedavg():
    method, data, state = feddbe()
    frozen = type("Frozen", (type(method),), dict(local=Method.local, name=""))().bind(method.task)
    assert frozen.kappa == 0
    avg, *_ = setup("fedavg")
    other = avg.init()
    for sel in (EVERYONE, EVERYONE[1:3], EVERYONE):
        state, _ = one_round(frozen, data, state, sel)
        other, _ = one_round(avg, data, other, sel)
    assert not state.clients["z"].any()
    for a, b in ((state.server, other.server), (state.clients, other.clients)):
        assert_same(
            select(a, b), b, exact=False
        )  # images lie otherwise for a class that is not ours


def test_feddbe_vectors_move_only_where_their_client_takes_part():
    method, data, state = feddbe()
    state, _ = one_round(method, data, state, EVERYONE[:2])
    z = state.clients["z"]
    assert z[:2].any(1).all() and not z[2:].any()
    kept = z.clone()
    state, _ = one_round(method, data, state, EVERYONE[2:])
    assert torch.equal(state.clients["z"][:2], kept[:2]) and state.clients["z"][2:].any(1).all()


def test_feddbe_first_round_makes_g_and_nothing_else():
    method, data, state = feddbe(kappa=2.0, mu=0.3)
    before = {n: v.clone() for n, v in state.server.items()}
    state, end = one_round(method, data, state)
    share = (data.n / data.n.sum()).double()
    torch.testing.assert_close(state.server["g"], torch.einsum("s,sf->f", share, end["m"]))
    assert_same(select(state.server, method.task.names), select(before, method.task.names))
    assert not state.clients["z"].any() and end["m"].any()
    g = state.server["g"].clone()
    for sel in (EVERYONE, EVERYONE[:2]):
        state, end = one_round(method, data, state, sel)
        assert "m" not in end and torch.equal(state.server["g"], g)
        assert not torch.equal(state.server["fc.weight"], before["fc.weight"])


def test_feddbe_first_round_trains_as_fedavg_does():
    # Its m is the running mean of what FedAvg's local model makes of the same batches.
    (method, data, state), (avg, *_) = feddbe(kappa=2.0, mu=0.3), setup("fedavg")
    k, seen = 2, []

    class Watched(type(avg)):
        name = ""

        def loss(self, p, anchor, batch):
            seen.append(self.task.features(p, batch.x).mean(0))
            return super().loss(p, anchor, batch)

    one_round(Watched().bind(avg.task), data, avg.init(), EVERYONE[k : k + 1])
    _, end = one_round(method, data, state, EVERYONE[k : k + 1])
    m, steps = 0, len(data.index["train"][k]) // 6
    for mean in seen[-steps:]:  # the engine tries a loss once before
        m = 0.7 * m + 0.3 * mean.detach()
    torch.testing.assert_close(end["m"][0], m)


def test_feddbe_loss_and_gradient_by_hand():
    method, data, _ = feddbe(kappa=2.0, mu=0.25)
    p = client(method.begin(method.init(), EVERYONE))
    size = len(p["z"])
    p |= {"z": randn(size), "m": randn(size, seed=1)}
    anchor, batch = {"g": randn(size, seed=2), "kappa": torch.tensor(2.0).double()}, batch_of(data)
    leaf = {n: p[n].clone().requires_grad_() for n in ("z", "m", "fc.weight", "conv1.weight")}
    loss = method.loss(p | leaf, anchor, batch)
    got = dict(zip(leaf, torch.autograd.grad(loss, list(leaf.values())), strict=True))
    z = method.task.features(p | {"conv1.weight": leaf["conv1.weight"]}, batch.x)
    scores = (z + leaf["z"]) @ leaf["fc.weight"].T + p["fc.bias"]
    fit = F.cross_entropy(scores, batch.y)
    m = 0.75 * p["m"] + 0.25 * z.mean(0)
    penalty = 2.0 * ((m - anchor["g"]) ** 2 / 2).mean()
    want = torch.autograd.grad(fit + penalty, [leaf[n] for n in ("z", "fc.weight", "conv1.weight")])
    for n, g in zip(("z", "fc.weight", "conv1.weight"), want, strict=True):
        torch.testing.assert_close(got[n], g)
    # SGD at rate mu on this is the running mean; earlier batches are constants of the penalty.
    torch.testing.assert_close(p["m"] - 0.25 * got["m"], m.detach())
    torch.testing.assert_close(method.logits(p, batch.x), scores.detach())


def test_feddbe_sends_means_in_the_first_round_and_models_later():
    method, data, state = feddbe(kappa=1.0)
    size = method.task.initial["fc.weight"].shape[1]
    whole = sum(method.task.initial[n].numel() for n in method.task.parameters)
    for up in (size, whole):
        sent = method.download(state, EVERYONE)
        start = method.begin(state, EVERYONE, sent)
        with torch.no_grad():
            end = method.local(context(method, data, state), start)
        gone = {n: v for n, v in end.items() if n not in state.clients}
        assert method.traffic(state, EVERYONE, sent, gone) == (4 * (whole + size), 4 * up)
        state = method.upload(state, EVERYONE, start, gone, data.n.double())
        state.round += 1


@pytest.mark.parametrize("changes", [dict(momentum=0.5), dict(weight_decay=1e-3)])
def test_feddbe_penalty_wants_plain_sgd(changes):
    setup("feddbe", **changes)
    with pytest.raises(ValueError, match="feddbe: kappa = 1.0 with momentum = .* allowed: both 0"):
        setup("feddbe", args=dict(kappa=1.0), **changes)


def test_feddbe_penalty_pulls_features_to_the_common_mean():
    away = {}
    for kappa in (1e-9, 50.0):
        method, data, state = feddbe(kappa=kappa, mu=1.0)
        for _ in range(3):
            state, end = one_round(method, data, state)
        x = [data.batch(torch.as_tensor(data.index["train"][k]))[0] for k in range(4)]
        means = [method.task.features(client(end, k), x[k], True).mean(0) for k in range(4)]
        away[kappa] = sum(float((m - state.server["g"]).norm()) for m in means)
    assert away[50.0] < 0.9 * away[1e-9]
