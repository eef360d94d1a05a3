"""FedProto: its rule, beside plain loops and what it reduces to."""

import pytest
import torch

from pfl_core.engine.simulate import simulate
from pfl_core.stacked import select
from tests.core.methods.features_shared import EVERYONE, client, context, one_round, randn
from tests.core.methods.loops_shared import (
    EXECUTORS,
    batches,
    close,
    fit,
    gradient,
    hidden,
    mlp,
    scored,
)
from tests.core.methods.setting import assert_same, setup

RUNNING = dict(proto="running")


def means(seen, classes):
    """{class: mean of its features} of pairs (features, labels)."""
    z, y = torch.cat([z for z, _ in seen]), torch.cat([y for _, y in seen])
    return {c: z[y == c].mean(0) for c in range(classes) if (y == c).any()}


def visit(method, data, k, r, p, known):
    """Client k's model after round r, and its class means; `known` is {class: prototype}."""
    seen, lr = [], method.task.config.lr

    def loss(q):
        z = hidden(method, q, x)
        pulls = [
            ((f - known[int(c)]) ** 2).sum() for f, c in zip(z, y, strict=True) if int(c) in known
        ]
        return fit(method, q, x, y) + method.lam * sum(pulls, torch.tensor(0.0)) / z.numel()

    for x, y in batches(method, data, k, r):
        seen.append((hidden(method, p, x), y))
        g = gradient(loss, p)
        p = {n: v - lr * g[n] for n, v in p.items()}
    if method.proto == "after":
        x, y = data.batch(torch.as_tensor(data.index["train"][k]))
        seen = [(hidden(method, p, x), y)]
    return p, means(seen, method.task.C)


def averaged(method, data, found, known):
    """Prototypes after a round, from the clients' class means."""
    out = dict(known)
    for c in range(method.task.C):
        there = [k for k in range(4) if c in found[k]]
        n = [float(data.label_counts[k, c]) if method.weights == "samples" else 1.0 for k in there]
        if there:
            out[c] = sum(a * found[k][c] for a, k in zip(n, there, strict=True)) / sum(n)
    return out


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "args", [dict(lam=2.0), dict(weights="clients", **RUNNING)], ids=["paper", "PFLlib"]
)
def test_fedproto_is_a_plain_loop(executor, args):
    method, data = mlp("fedproto", lr=0.2, **args)
    state, _, before, after, _ = simulate(method, data, executor=executor, workers=1)
    models, known = [method.task.initial] * 4, {}
    for r in range(3):
        done = [visit(method, data, k, r, models[k], known) for k in range(4)]
        models, known = [d[0] for d in done], averaged(method, data, [d[1] for d in done], known)
    x = data.batch(torch.as_tensor(data.index["test"][2]))[0]
    for c, v in known.items():
        close({"p": state.server["proto"][c]}, {"p": v})
    for k in range(4):
        close(state.clients, models[k], k)
        # After local training of one more round, with what was received for it.
        trained = visit(method, data, k, 3, models[k], known)[0]
        for served, model in ((before, models[k]), (after, trained)):
            z = hidden(method, model, x)
            want = torch.stack([-((z - known[c]) ** 2).sum(1) for c in range(3)], 1)
            got = method.logits(client(served, k), x)
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("args", [{}, RUNNING], ids=["after", "running"])
def test_fedproto_without_pull_is_local(executor, args):  # T1, T2
    given = dict(lam=0.0, score="classifier", **args)
    how = dict(participation=0.5)
    (proto, data), (local, _) = setup("fedproto", args=given, **how), setup("local", **how)
    a, b = (simulate(m, data, executor=executor, workers=1) for m in (proto, local))
    assert_same(select(a[0].clients, b[0].clients), b[0].clients, exact=not args)
    for split in ("before/test/loss", "after/test/loss"):
        torch.testing.assert_close(torch.stack(a[1].evals[split]), torch.stack(b[1].evals[split]))


def test_until_there_is_a_prototype_the_classifier_answers():  # T3
    method, data = setup("fedproto")
    p = client(method.serve(method.begin(method.init(), EVERYONE)))
    x = data.batch(torch.as_tensor(data.index["test"][0]))[0]
    assert torch.equal(method.logits(p, x), method.task.apply(p, x))


def test_a_class_that_nobody_holds_is_never_answered_and_keeps_its_prototype():  # T4
    method, data = setup("fedproto")
    state, _ = one_round(method, data, method.init(), torch.tensor([3]))  # one client, one class
    assert state.server["seen"].tolist() == [False, True, False]
    p = client(method.serve(method.begin(state, EVERYONE)))
    got = method.logits(p, data.batch(torch.as_tensor(data.index["test"][0]))[0])
    assert torch.isfinite(got).all() and (got.argmax(1) == 1).all()
    assert torch.equal(got[:, 0], got[:, 1] - 1) and torch.equal(got[:, 2], got[:, 0])
    state, _ = one_round(method, data, state)
    old = state.server["proto"].clone()
    state, _ = one_round(method, data, state, torch.tensor([3]))
    assert (state.server["proto"] != old).any(1).tolist() == [False, True, False]
    assert state.server["seen"].all()


@pytest.mark.parametrize("weights", ["samples", "clients"])
def test_a_prototype_is_the_mean_over_who_holds_its_class(weights):  # T5
    method, data = setup("fedproto", args=dict(weights=weights))
    mean, n = randn(4, 3, 84), torch.tensor([[5, 0, 1], [0, 2, 3], [0, 0, 0], [0, 0, 4]]).double()
    state = method.upload(method.init(), EVERYONE, {}, {"mean": mean, "count": n}, n.sum(1))
    torch.testing.assert_close(state.server["proto"][:2], torch.stack([mean[0, 0], mean[1, 1]]))
    w = n[:, 2] if weights == "samples" else (n[:, 2] > 0).double()
    torch.testing.assert_close(state.server["proto"][2], w @ mean[:, 2] / w.sum())


@pytest.mark.parametrize("plan", ["wrap", "drop"])
def test_running_means_are_over_the_samples_visited(plan):  # T6
    method, data = setup("fedproto", args=RUNNING, plan=plan, clip=0.1, epochs=2)
    state = method.init()
    with torch.no_grad():
        _, tallies = method.trained(context(method, data, state), method.begin(state, EVERYONE))
        end = method.local(context(method, data, state), method.begin(state, EVERYONE))
    for k in range(4):
        rows = data.batch_indices(k, 0, batch=6, epochs=2, kind=plan).ravel()
        visits = torch.bincount(data.batch(torch.as_tensor(rows))[1], minlength=3)
        assert torch.equal(tallies["n"][k], visits.double())
        # What is sent is the number of samples, and 0 where none of a class was seen.
        assert torch.equal(end["count"][k], data.label_counts[k] * (visits > 0).double())


def test_a_client_answers_with_classes_of_its_own_on_request():
    method, data = setup("fedproto", args=dict(score="own"))
    other, _ = setup("fedproto")
    state, free = one_round(method, data, method.init())[0], one_round(other, data, other.init())[0]
    for _ in range(2):
        assert_same(state.server, free.server)  # training is the same
        assert_same(
            select(state.clients, method.task.names), select(free.clients, method.task.names)
        )
        state, free = one_round(method, data, state)[0], one_round(other, data, free)[0]
    x = data.batch(torch.as_tensor(data.index["test"][0]))[0]
    start = method.begin(state, EVERYONE)
    with torch.no_grad():
        end = method.local(context(method, data, state), start)
    for p in (start, end):
        assert torch.equal(p["seen"], data.label_counts > 0)
        assert (method.logits(client(method.serve(p), 3), x).argmax(1) == 1).all()


@pytest.mark.parametrize("args", [{}, RUNNING], ids=["after", "running"])
def test_only_class_means_travel(args):
    method, data = setup("fedproto", args=args, participation=0.5, rounds=2)
    classes, size = method.task.initial["fc.weight"].shape
    _, history, *_ = simulate(method, data, workers=1)
    assert history.download == [0, 2 * classes * size, 4 * classes * size]
    assert history.upload == [0, 2 * classes * (size + 1), 4 * classes * (size + 1)]


def test_running_means_want_plain_sgd():
    for changes in (dict(momentum=0.5), dict(weight_decay=1e-3)):
        setup("fedproto", **changes)
        with pytest.raises(ValueError, match="fedproto: proto = running with .*allowed: both 0"):
            setup("fedproto", args=RUNNING, **changes)


def test_the_pull_brings_features_of_a_class_together():
    spread = {}
    for lam in (0.0, 2.0):
        method, data = mlp("fedproto", lam=lam, lr=0.1, rounds=8)
        state = simulate(method, data, workers=1)[0]
        far = []
        for k in range(3):
            x, y = data.batch(torch.as_tensor(data.index["train"][k]))
            z = hidden(method, client(select(state.clients, method.task.names), k), x)
            far.append(float((z - state.server["proto"][y]).norm()))
        spread[lam] = sum(far)
    assert spread[2.0] < 0.9 * spread[0.0]
    assert scored(method, method.task.initial, x).shape == (len(y), 3)


@pytest.mark.parametrize("score", ["prototype", "own"])
def test_a_fine_tuned_head_that_answers_nothing_is_refused(score):
    head = dict(epochs=1, only="head")
    with pytest.raises(ValueError, match="head only: nearest prototypes answer"):
        setup("fedproto", args=dict(score=score), finetune=[head])
    setup("fedproto", args=dict(score=score), finetune=[head, dict(epochs=1, only="all")])
    setup("fedproto", args=dict(score="classifier"), finetune=[head])
