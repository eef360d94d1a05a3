"""pFedFDA: its rule, beside plain loops and what it reduces to."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from pfl_core.engine import engine
from pfl_core.engine.simulate import news, simulate
from pfl_core.methods import pfedfda
from pfl_core.methods.pfedfda import EPS, discriminant, estimated
from pfl_core.stacked import select
from tests.core.methods.features_shared import EVERYONE, FC, context, one_round, randn
from tests.core.methods.loops_shared import batches, chosen, descend, fit, samples
from tests.core.methods.setting import assert_same, client_data, setup


def lda(mean, cov, pi):
    """LDA's weights and biases by an inverse."""
    eye = torch.eye(len(cov)).double()
    inverse = torch.linalg.inv((1 - EPS) * cov + EPS * cov.trace() / len(cov) * eye)
    w = torch.stack([inverse @ m for m in mean])
    return w, torch.stack([pi[c].log() - m @ w[c] / 2 for c, m in enumerate(mean)])


def estimates(z, y, known, ridge=1.0):
    """A client's means and covariance, sample by sample."""
    means = [z[y == c].mean(0) if (y == c).sum() > 2 else known[c] for c in range(len(known))]
    cov = torch.zeros(z.shape[1], z.shape[1]).double()
    for b, c in enumerate(y.tolist()):
        cov += torch.outer(z[b] - means[c], z[b] - means[c])
    return torch.stack(means), cov / max(len(y) - 1, 1) + ridge * torch.eye(len(cov)).double()


def blend(own, known, betas):
    return [b * a + (1 - b) * k for a, k, b in zip(own, known, betas, strict=True)]


def adapted(zs, y, known, pi, kind, grid):
    """A client's blended means and covariance: halves, and the whole grid, by loops.

    zs: the features of its samples (n, F) under each model; in turn an image is in the other half.
    """
    half, seen = [], {}
    for c in y.tolist():
        half.append(seen.get(c, 0) % 2)
        seen[c] = seen.get(c, 0) + 1
    half = torch.cat([(torch.tensor(half) + e) % 2 for e in range(len(zs))])
    z, y = torch.cat(zs), y.repeat(len(zs))
    own = estimates(z, y, known[0])
    if kind == "local":
        return own
    if min(int((half == h).sum()) for h in range(2)) < 2:
        return known
    parts = [estimates(z[half == h], y[half == h], known[0]) for h in range(2)]
    values = [g / (grid - 1) for g in range(grid)]
    pairs = [(a, b) for a in values for b in values if kind == "two" or a == b]

    def loss(betas):
        total = 0.0
        for h in range(2):
            w, b = lda(*blend(parts[1 - h], known, betas), pi)
            scores = z[half == h] @ w.T + b
            total += float(F.cross_entropy(scores, y[half == h], reduction="sum"))
        return total

    return blend(own, known, min(pairs, key=loss))


@pytest.mark.parametrize("executor", ["threads", "batched"])
@pytest.mark.parametrize("features", ["after", "epochs"])
@pytest.mark.parametrize("kind", ["two", "one", "local"])
def test_pfedfda_is_a_plain_loop(executor, kind, features):
    args = dict(beta=kind, grid=4, features=features)
    epochs = 3 if features == "epochs" else 1
    method, data = setup("pfedfda", bn=False, args=args, participation=0.75, epochs=epochs)
    state, history, served, *_ = simulate(method, data, executor=executor, workers=2)
    t, loss = method.task, partial(fit, method)
    base = [n for n in t.parameters if n not in FC]
    first = method.init().server
    shared, known = {n: first[n] for n in base}, [first["mean"], first["cov"]]
    pis = t.label_counts.double() / t.n[:, None] + EPS
    pis = pis / pis.sum(1, keepdim=True)

    def client(models, i):
        x, y = samples(data, i)
        zs = [t.features(p, x).detach() for p in models]
        return adapted(zs, y, known, pis[i], kind, 4)

    def trained(p, i, r):
        """The model after local training, and those whose features are taken."""
        if features == "after":
            end = descend(p, base, batches(method, data, i, r), loss, 0.05)
            return end, [end]
        models = []
        for e in range(t.config.epochs):
            models.append(p)
            seen = batches(method, data, i, r, stream=f"local {e}", epochs=1)
            p = descend(p, base, seen, loss, 0.05)
        return p, models

    for r in range(3):
        sel, ends, fitted = chosen(method, r), {}, {}
        for i in sel:
            p = shared | dict(zip(FC, lda(*known, pis[i]), strict=True))
            ends[i], models = trained(p, i, r)
            fitted[i] = client(models, i)
        share = {i: float(data.n[i]) / sum(float(data.n[j]) for j in sel) for i in sel}
        shared = {n: sum(share[i] * ends[i][n] for i in sel) for n in base}
        known = [sum(share[i] * fitted[i][k] for i in sel) for k in range(2)]
    close = dict(rtol=1e-10, atol=1e-10)
    for n, v in (shared | dict(zip(("mean", "cov"), known, strict=True))).items():
        torch.testing.assert_close(state.server[n], v, **close)
    for i in range(4):
        p = shared | dict(zip(FC, lda(*known, pis[i]), strict=True))
        for n, v in zip(FC, lda(*client([p], i), pis[i]), strict=True):
            torch.testing.assert_close(served[n][i], v, rtol=1e-9, atol=1e-9)


def fda(**how):
    method, data = setup("pfedfda", **how)
    state = method.init()
    return method, data, state, context(method, data, state)


def test_lda_with_the_unit_covariance_is_the_nearest_mean():
    mean, z = randn(3, 5), randn(50, 5, seed=1)
    w, b = discriminant(mean, torch.eye(5).double(), torch.full((3,), 1 / 3).double())
    nearest = torch.cdist(z, mean).argmin(1)
    assert torch.equal((z @ w.T + b).argmax(1), nearest)


def test_lda_is_sklearns():
    z, y = randn(60, 4), torch.arange(60) % 3
    z = z + y[:, None] * randn(4, seed=2)
    mean = torch.stack([z[y == c].mean(0) for c in range(3)])
    cov = (z - mean[y]).T @ (z - mean[y]) / 60
    w, b = discriminant(mean, cov, torch.full((3,), 1 / 3).double())
    # Its shrinkage is of each class's covariance, and of the same form.
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=EPS).fit(z.numpy(), y.numpy())
    scores = torch.as_tensor(theirs.predict_log_proba(z.numpy()))
    torch.testing.assert_close((z @ w.T + b).log_softmax(1), scores, rtol=1e-8, atol=1e-8)


def test_covariance_from_sums_is_that_of_the_samples():
    z, known = 100 + randn(9, 4), randn(3, 4, seed=1)
    y = torch.tensor([0, 0, 0, 1, 1, 0, 0, 1, 2])  # three of class 1, one of class 2
    hot = F.one_hot(y, 3).double()
    sums = {"z": hot.T @ z, "n": hot.sum(0), "square": z.T @ z}
    for found, want in zip(estimated(sums, known, 0.5), estimates(z, y, known, 0.5), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-9)
    assert torch.equal(estimated(sums, known, 0.5)[0][2], known[2]), "a rare class"


def test_clients_that_take_only_global_estimates_leave_them_as_they_are(monkeypatch):  # R27
    method, data, state, _ = fda(bn=False)
    nothing = lambda self, *_: (torch.zeros(4).double(), torch.zeros(4).double())  # noqa: E731
    monkeypatch.setattr(type(method), "betas", nothing)
    first = {n: v.clone() for n, v in state.server.items()}
    for _ in range(2):
        state, _ = one_round(method, data, state)
    for n in ("mean", "cov"):
        torch.testing.assert_close(state.server[n], first[n], rtol=0, atol=1e-15)
    assert not torch.allclose(state.server["conv1.weight"], first["conv1.weight"])


def test_one_clients_own_estimates_become_the_servers():
    method, data, state, ctx = fda(data=client_data((9,)), bn=False, args=dict(beta="local"))
    known = state.server["mean"].clone()
    state, end = one_round(method, data, state, torch.arange(1))
    x, y = samples(data, 0)
    p = {n: v[0] for n, v in method.serve(end).items()}
    want = estimates(method.task.features(p, x), y, known)
    for n, v in zip(("mean", "cov"), want, strict=True):
        torch.testing.assert_close(state.server[n], v, rtol=1e-9, atol=1e-9)


def test_shares_are_positive_sum_to_one_and_stay():
    method, data, state, ctx = fda()
    pi = method.shares(EVERYONE)
    assert (pi > 0).all() and torch.allclose(pi.sum(1), torch.ones(4).double())
    assert pi[3].argmax() == 1 and float(pi[3, 1]) > 0.99, "the last has one class"
    start = method.begin(state, EVERYONE)
    end = method.local(ctx, start)
    up = news(start, end).keys() - state.clients.keys()
    assert up == state.server.keys(), "no head and no share is sent"


@pytest.mark.parametrize("kind", ["two", "one"])
def test_samples_that_are_evaluated_at_once_do_not_matter(kind, monkeypatch):
    ends = []
    for at_once in (3, 128):
        monkeypatch.setitem(engine.EVAL_BATCH, "cpu", at_once)
        method, data, state, ctx = fda(bn=False, args=dict(beta=kind, grid=4))
        ends.append(method.adapted(ctx, method.begin(state, EVERYONE)))
    assert_same(*ends, exact=False)


def test_too_few_samples_take_the_global_estimates():
    for size in (1, 2, 3):
        method, data, state, ctx = fda(data=client_data((size, 8)), bn=False)
        before = method.begin(state, torch.arange(2))
        end = one_round(method, data, state, torch.arange(2))[1]
        assert torch.equal(end["mean"][0], before["mean"][0]), size
        assert torch.equal(end["cov"][0], before["cov"][0]), size


@pytest.mark.parametrize("kind", ["two", "one"])
@pytest.mark.parametrize("draw", range(4))
def test_rounding_decides_no_beta(kind, draw, monkeypatch):
    """Halves without a class of three samples have the global means: beta_1 changes no loss."""
    ends, real = [], pfedfda.total

    def rounded(parts):
        whole = real(parts)
        noise = 1e-13 * torch.randn(whole.shape, generator=g, dtype=torch.double)
        return whole * (1 + noise) if whole.shape[1:] == (11, 11) else whole

    monkeypatch.setattr(pfedfda, "total", rounded)
    seeds = (s for s in range(100) if client_data((6, 18), seed=s).label_counts[0].max() <= 4)
    seed = next(itertools.islice(seeds, draw, None))
    for again in range(3):
        g = torch.Generator().manual_seed(again)
        method, data, state, ctx = fda(
            data=client_data((6, 18), seed=seed), bn=False, args=dict(beta=kind)
        )
        p = method.begin(state, torch.arange(2))
        ends.append(one_round(method, data, state, torch.arange(2))[1])
        if kind == "two":
            torch.testing.assert_close(ends[-1]["mean"][0], p["mean"][0], rtol=0, atol=1e-15)
    assert_same(*ends[:2], exact=False)
    assert_same(*ends[1:], exact=False)


def test_the_head_stands_still_while_the_base_is_trained():
    method, data, state, ctx = fda(bn=False, weight_decay=0.1, momentum=0.9)
    start = method.begin(state, EVERYONE)
    seen = {}
    train = ctx.train

    def watched(loss, p, **how):
        seen["start"], seen["end"] = p, train(loss, p, **how)
        return seen["end"]

    ctx.train = watched
    method.local(ctx, start)
    for n in FC:
        assert torch.equal(seen["start"][n], seen["end"][n])
    assert not torch.equal(seen["start"]["conv1.weight"], seen["end"]["conv1.weight"])
    assert_same(select(seen["start"], FC), select(method.serve(start), FC))


def test_pfedfda_counts_base_and_estimates():
    method, data = setup("pfedfda", rounds=1)
    _, history, *_ = simulate(method, data, workers=1)
    initial = method.task.initial
    base = sum(v.numel() for n, v in initial.items() if n in method.task.parameters and n not in FC)
    c, f = initial["fc.weight"].shape
    assert history.download[-1] == history.upload[-1] == 4 * (base + c * f + f * f)


def test_features_of_epochs_need_epochs():
    with pytest.raises(ValueError, match="count local training in epochs"):
        setup("pfedfda", args=dict(features="epochs"), steps=3)
