"""pFedHN: its rule, beside plain loops and what it reduces to."""

import copy
from math import prod

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from pfl_core import models
from pfl_core.engine.participation import sample
from pfl_core.engine.simulate import simulate
from pfl_core.stacked import flat, select
from tests.core.methods.hypernetworks_shared import bound, everyone, one_round, scalars, small
from tests.core.methods.setting import CONFIG, assert_same, joined, under

PLAIN = dict(momentum=0.0, weight_decay=0.0, clip=0.0)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():  # as in the round loop
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, classes, size",
    [("pfedhn", 10, 12_271_732), ("pfedhn", 100, 13_044_382), ("pfedhn_pc", 10, 12_185_882)],
)
def test_size_of_the_hypernetwork(name, classes, size):
    method = bound(name, classes=classes, k=50)
    phi = method.init().extra["phi"]
    assert scalars(phi) == size
    heads = {n.removeprefix("head.0.").rpartition(".")[0] for n in phi if n.startswith("head.")}
    assert heads == set(method.task.parameters) - (
        {"fc.weight", "fc.bias"} if name == "pfedhn_pc" else set()
    )
    assert len(heads) == (8 if name == "pfedhn_pc" else 10)
    assert sum(phi[f"head.0.{n}.bias"].numel() for n in heads) == (
        120_332 if name == "pfedhn_pc" else 121_182 + 85 * (classes - 10)
    )


@pytest.mark.parametrize("k, d", [(10, 3), (50, 13), (75, 19), (90, 23), (100, 26)])
def test_size_of_the_embeddings(k, d):
    method = bound("pfedhn", model="mlp", shape=(1, 4, 4), k=k)
    assert method.embeddings(method.init()).shape == (k, d)
    assert bound("pfedhn", model="mlp", shape=(1, 4, 4), k=k, dim=5).init().extra["phi"][
        "v"
    ].shape == (k, 5)


@pytest.mark.parametrize("n_hidden", [0, 1, 4])
def test_depth_of_the_trunk(n_hidden):
    phi = bound("pfedhn", model="mlp", shape=(1, 4, 4), n_hidden=n_hidden).init().extra["phi"]
    assert sum(n.startswith("trunk") for n in phi) == 2 * (n_hidden + 1)


@pytest.mark.parametrize(
    "classes, sizes", [(10, (62_958, 121_182, 256_830)), (100, (70_608, 128_832, 264_480))]
)
def test_three_sizes_of_networks(classes, sizes):
    method = bound(
        "pfedhn", classes=classes, k=75, widths=(0.25, 0.5, 1), model_args={"kernels": 32}
    )
    for shapes, kernels, size in zip(method.hn.sizes, (8, 16, 32), sizes, strict=True):
        net = models.build("lenet", (3, 32, 32), classes, kernels=kernels)
        assert shapes == {n: tuple(p.shape) for n, p in net.named_parameters()}
        assert sum(map(prod, shapes.values())) == size
    state = method.init()
    heads = {
        n: v for n, v in state.extra["phi"].items() if n.startswith("head.") and n.endswith(".bias")
    }
    assert (
        scalars(heads) == sum(sizes) == {10: 440_970, 100: 463_920}[classes]
    )  # disjoint and complete
    if classes == 10:
        assert scalars(state.extra["phi"]) == 44_571_695
    assert state.extra["size"].bincount().tolist() == [25, 25, 25]


class Net(nn.Module):
    """The hypernetwork as the paper draws it: embedding, trunk, heads of one client's tensors."""

    def __init__(self, method, phi):
        super().__init__()
        self.shapes = method.hn.sizes[0]
        self.p = nn.ParameterDict(
            {n.replace(".", "-"): nn.Parameter(v.clone()) for n, v in phi.items()}
        )
        self.depth = method.n_hidden

    def linear(self, name, x):
        name = name.replace(".", "-")
        return F.linear(x, self.p[f"{name}-weight"], self.p[f"{name}-bias"])

    def forward(self, i):
        h = self.linear("trunk.0", self.p["v"][i])
        for t in range(self.depth):
            h = self.linear(f"trunk.{t + 1}", F.relu(h))
        return {n: self.linear(f"head.0.{n}", h).reshape(s) for n, s in self.shapes.items()}


@pytest.mark.parametrize("name", ["pfedhn", "pfedhn_pc"])
def test_equals_the_textbook_loop(name):
    # One client a round, drawn as the round loop draws; torch.optim for phi, for theta (new each visit), for omega (kept).
    local = dict(lr=0.05, momentum=0.9, weight_decay=5e-3, clip=0.2)
    how = dict(steps=3, plan="fresh", participation=0.25, rounds=9, eval_after=False)
    method, data = small(name, dict(lr=0.1, clip=0.05), **how, **local)
    first = method.init()
    hn = Net(method, first.extra["phi"])
    opt = torch.optim.SGD(hn.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    omega = [
        {
            n: nn.Parameter(v[i].clone())
            for n, v in first.clients.items()
            if not n.startswith("opt.")
        }
        for i in range(4)
    ]
    rule = dict(lr=local["lr"], momentum=local["momentum"], weight_decay=local["weight_decay"])
    own_opt = [torch.optim.SGD(w.values(), **rule) if w else None for w in omega]
    visited = []
    with torch.enable_grad():
        for r in range(9):
            i = int(sample(method.task.config, 4, r))
            visited.append(i)
            theta = hn(i)
            tilde = {n: nn.Parameter(v.detach().clone()) for n, v in theta.items()}
            inner = torch.optim.SGD(tilde.values(), **rule)
            for (idx,) in data.batch_indices(i, r, batch=CONFIG.batch, steps=3, kind="fresh"):
                x, y = data.batch(torch.as_tensor(idx))
                for o in filter(None, (inner, own_opt[i])):
                    o.zero_grad()
                F.cross_entropy(
                    functional_call(method.task.model, tilde | omega[i], (x,)), y
                ).backward()
                nn.utils.clip_grad_norm_(tilde.values(), local["clip"])
                for o in filter(None, (inner, own_opt[i])):
                    o.step()
            opt.zero_grad()
            delta = [theta[n].detach() - tilde[n].detach() for n in theta]
            torch.autograd.backward(list(theta.values()), delta)
            nn.utils.clip_grad_norm_(hn.parameters(), 0.05)
            opt.step()
    assert max(np.bincount(visited)) > 1  # somebody comes back to the optimiser that was kept
    state, *_ = simulate(method, data, workers=1)
    for n, v in state.extra["phi"].items():
        torch.testing.assert_close(
            v, hn.p[n.replace(".", "-")].detach(), rtol=1e-8, atol=1e-11, msg=n
        )
    for i in range(4):
        for n, v in omega[i].items():
            torch.testing.assert_close(state.clients[n][i], v.detach(), rtol=1e-8, atol=1e-11)
            if i not in visited:
                assert torch.equal(state.clients[n][i], first.clients[n][i])
                assert not state.clients["opt." + n][i].any()


def test_one_local_step_is_the_chain_rule():
    method, data = small("pfedhn", dict(lr=0.3, **PLAIN), steps=1, plan="fresh", lr=0.05)
    state, sel = method.init(), torch.tensor([2])
    phi = {n: v.clone().requires_grad_() for n, v in state.extra["phi"].items()}
    x, y = data.batch(
        torch.as_tensor(data.batch_indices(2, 0, batch=CONFIG.batch, steps=1, kind="fresh")[0, 0])
    )
    with torch.enable_grad():
        theta = {n: v[0] for n, v in method.hn.write(phi, sel, state.extra["size"][sel]).items()}
        loss = F.cross_entropy(functional_call(method.task.model, theta, (x,)), y)
        grads = dict(zip(phi, torch.autograd.grad(loss, list(phi.values())), strict=True))
    *_, new = one_round(method, data, state, sel)
    for n, v in new.extra["phi"].items():
        torch.testing.assert_close(
            v, state.extra["phi"][n] - 0.3 * 0.05 * grads[n], rtol=1e-9, atol=1e-15
        )


def test_finite_difference():
    method, data = small("pfedhn", dict(lr=1.0, **PLAIN), lr=0.05)
    state, sel = method.init(), torch.tensor([1])
    start, end, new = one_round(method, data, state, sel)
    phi, size = state.extra["phi"], state.extra["size"]
    delta = flat(start) - flat(end)
    value = lambda phi: (flat(method.hn.write(phi, sel, size[sel])) * delta).sum()  # noqa: E731
    g = torch.Generator().manual_seed(0)
    way = {n: torch.randn(v.shape, generator=g, dtype=v.dtype) for n, v in phi.items()}
    eps = 1e-6
    up, down = (value({n: v + s * eps * way[n] for n, v in phi.items()}) for s in (1, -1))
    gradient = sum(((phi[n] - new.extra["phi"][n]) * way[n]).sum() for n in phi)
    torch.testing.assert_close(gradient, (up - down) / (2 * eps), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("sign, lower", [("descent", True), ("literal", False)])
def test_sign_of_the_step(sign, lower):
    method, data = small("pfedhn", dict(lr=1e-3, hn_sign=sign, **PLAIN), lr=0.05)
    state, sel = method.init(), torch.tensor([0])
    start, end, new = one_round(method, data, state, sel)
    far = lambda p: float((flat(p) - flat(end)).square().sum() / 2)  # noqa: E731
    assert (far(method.download(new, sel)) < far(start)) == lower


def test_several_participants():
    # phi takes the mean of what each alone would do, v_i its own.
    method, data = small("pfedhn", dict(lr=0.2, **PLAIN))
    state, sel = method.init(), torch.tensor([0, 2, 3])
    alone = [one_round(method, data, state, sel[i : i + 1])[2].extra["phi"] for i in range(3)]
    *_, new = one_round(method, data, state, sel)
    old = state.extra["phi"]
    for n, v in new.extra["phi"].items():
        moved = sum(a[n] - old[n] for a in alone) / (1 if n == "v" else 3)
        torch.testing.assert_close(v, old[n] + moved, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("kept", [dict(momentum=0.9), dict(weight_decay=1e-3)])
def test_which_embeddings_move(kept):
    for extra, all_rows in (({}, False), (kept, True)):
        method, data = small("pfedhn", PLAIN | extra)
        *_, once = one_round(method, data, method.init(), torch.tensor([1]))
        *_, twice = one_round(method, data, once, torch.tensor([2]))
        moved = (method.embeddings(twice) != method.embeddings(once)).any(1).tolist()
        assert moved == (
            [True] * 4 if extra == dict(weight_decay=1e-3) else [False, all_rows, True, False]
        )


def test_what_is_written_runs_as_a_module():
    method, data = small("pfedhn")
    p = method.begin(method.init(), everyone(4))
    assert p.keys() == set(method.task.names)
    net = copy.deepcopy(method.task.model)
    net.load_state_dict({n: v[3] for n, v in p.items()})
    x, _ = data.batch(torch.arange(5))
    torch.testing.assert_close(
        net(x), method.logits({n: v[3] for n, v in p.items()}, x), rtol=0, atol=0
    )


def narrow(p, shapes):
    return {n: v[tuple(slice(s) for s in shapes[n])] for n, v in p.items()}


def test_padding_never_moves():
    method, data = small(
        "pfedhn", dict(widths=(0.5, 1)), kernels=4, momentum=0.9, weight_decay=0.1, epochs=3
    )
    state = method.init()
    start, end, new = one_round(method, data, state, everyone(4))
    size = state.extra["size"]
    assert size.bincount().tolist() == [2, 2]
    for p in (start, end, method.download(new, everyone(4))):
        for i in (size == 0).nonzero().flatten():
            mine = {n: v[i] for n, v in p.items()}
            inside = narrow(mine, method.hn.sizes[0])
            for n, v in mine.items():
                assert v.count_nonzero() == inside[n].count_nonzero() and (inside[n] != 0).any()
    # The padded network and the narrow one are one function, with equal gradients; those of the padding are exactly zero.
    i = int((size == 0).nonzero()[0])
    mine = {n: v[i].clone().requires_grad_() for n, v in start.items()}
    thin = {
        n: v.detach().clone().requires_grad_() for n, v in narrow(mine, method.hn.sizes[0]).items()
    }
    x, y = data.batch(torch.arange(9))
    with torch.enable_grad():
        a = F.cross_entropy(method.task.apply(mine, x), y)
        b = F.cross_entropy(
            functional_call(models.build("lenet", (1, 16, 16), 3, kernels=2).double(), thin, (x,)),
            y,
        )
        ga, gb = (
            dict(zip(p, torch.autograd.grad(v, list(p.values())), strict=True))
            for v, p in ((a, mine), (b, thin))
        )
    torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    for n, g in ga.items():
        torch.testing.assert_close(
            narrow({n: g}, method.hn.sizes[0])[n], gb[n], rtol=1e-9, atol=1e-12
        )
        assert g.count_nonzero() == gb[n].count_nonzero()


def test_heads_of_other_sizes_and_true_traffic():
    method, data = small("pfedhn", dict(widths=(0.5, 1), **PLAIN), kernels=4)
    state = method.init()
    sel = (state.extra["size"] == 0).nonzero().flatten()
    start, end, new = one_round(method, data, state, sel)
    for n, v in new.extra["phi"].items():
        assert torch.equal(v, state.extra["phi"][n]) == n.startswith("head.1."), n
    small_net, large = (sum(map(prod, s.values())) for s in method.hn.sizes)
    assert method.traffic(state, sel, start, end) == (2 * small_net, 2 * small_net)
    every = method.download(state, everyone(4))
    assert method.traffic(state, everyone(4), every, every) == (2 * small_net + 2 * large,) * 2


def test_classifiers_and_sizes_of_networks():
    method, data = small("pfedhn_pc", dict(widths=[0.5, 1]), kernels=4)
    state, history, *_ = simulate(method, data, workers=1)
    small_net, large = (sum(map(prod, s.values())) for s in method.hn.sizes)
    assert (
        large == scalars(select(method.task.initial, method.hn.full))
        and "fc.weight" not in method.hn.full
    )
    assert history.upload == history.download == [r * 2 * (small_net + large) for r in range(4)]


def test_spectral_norm():
    method, data = small("pfedhn", dict(spectral_norm=True, lr=0.05), kernels=1)
    state = method.init()
    linears = [n[:-2] for n in state.extra["phi"] if n.endswith(".u")]
    assert len(linears) == 4 + 10
    for _ in range(3):
        *_, state = one_round(method, data, state, everyone(4))
    phi = state.extra["phi"]
    for name in linears:
        w, u = phi[f"{name}.weight"], phi[f"{name}.u"]
        for _ in range(200):
            v = F.normalize(w.T @ u, dim=0)
            u = F.normalize(w @ v, dim=0)
        sure = phi | {f"{name}.u": u}
        x = torch.eye(w.shape[1]).double()
        for p, tolerance in ((sure, 1e-2), (phi, 0.2)):
            top = torch.linalg.matrix_norm(effective(method, p, name, x), 2)
            assert top <= 1 + tolerance, name


def effective(method, phi, name, x):
    """The effective weight of a linear layer, transposed."""
    return method.hn._linear(phi, name, x) - phi[f"{name}.bias"]


def test_spectral_norm_gradient_is_torchs():
    method, data = small("pfedhn", dict(spectral_norm=True), kernels=1)
    phi = method.init().extra["phi"]
    name, x = "trunk.1", torch.randn(5, 100, generator=torch.Generator().manual_seed(0)).double()
    v = F.normalize(phi[f"{name}.weight"].T @ phi[f"{name}.u"], dim=0)
    u = F.normalize(phi[f"{name}.weight"] @ v, dim=0)
    layer = nn.Linear(100, 100).double()
    layer.weight.copy_(phi[f"{name}.weight"])
    nn.utils.parametrizations.spectral_norm(layer).eval()
    layer.parametrizations.weight[0]._u.copy_(u)
    layer.parametrizations.weight[0]._v.copy_(v)
    w = phi[f"{name}.weight"].clone().requires_grad_()
    with torch.enable_grad():
        mine = effective(method, phi | {f"{name}.weight": w}, name, x).square().sum()
        torchs = (layer(x) - layer.bias).square().sum()
        a, b = (
            torch.autograd.grad(mine, w)[0],
            torch.autograd.grad(torchs, layer.parametrizations.weight.original)[0],
        )
    torch.testing.assert_close(mine, torchs, rtol=1e-12, atol=0)
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("embed, dim", [("fixed", 1), ("fixed_columns", 0)])
def test_fixed_descriptors(embed, dim):
    method, data = small("pfedhn", dict(embed=embed))
    state = method.init()
    v = method.embeddings(state)
    assert v.shape == (4, 3)
    torch.testing.assert_close(v.sum(dim), torch.ones(4 if dim else 3).double())
    new, *_ = simulate(method, data, workers=1)
    assert torch.equal(method.embeddings(new), v)
    assert not torch.equal(new.extra["phi"]["trunk.0.weight"], state.extra["phi"]["trunk.0.weight"])


@pytest.mark.parametrize("name", ["pfedhn", "pfedhn_pc"])
@pytest.mark.parametrize("novel", ["mean", "normal"])
def test_novel_clients(name, novel):
    args = dict(lr=0.05, weight_decay=0.0, novel=novel, spectral_norm=novel == "normal")
    method, data = small(name, args)
    trained, *_ = simulate(method, data, workers=1)
    method, data = small(name, args, sizes=(11, 7))
    method, state = joined(method, trained, 2)
    v = method.embeddings(state)
    assert v.shape == (2, 2) and state.round == trained.round
    if novel == "mean":
        assert torch.equal(v[0], v[1])
        torch.testing.assert_close(v[0], trained.extra["phi"]["v"].mean(0))
    phi = {n: u.clone() for n, u in trained.extra["phi"].items()}
    *_, one = one_round(method, data, state, torch.tensor([1]))
    *_, both = one_round(method, data, state, everyone(2))
    torch.testing.assert_close(
        method.embeddings(one)[1], method.embeddings(both)[1], rtol=1e-12, atol=1e-14
    )
    state.round = 0
    end, history, *_ = simulate(
        under(method, rounds=8), data, state=copy.deepcopy(state), workers=1
    )
    for n, u in phi.items():  # bit for bit, also in the federation that it came from
        assert torch.equal(trained.extra["phi"][n], u)
        assert n == "v" or torch.equal(end.extra["phi"][n], u)
    assert (method.embeddings(end) != v).all()
    trained.extra["phi"][
        "trunk.0.weight"
    ].zero_()  # nor does the federation, trained on, move what was adopted
    assert torch.equal(state.extra["phi"]["trunk.0.weight"], phi["trunk.0.weight"])


def test_the_trained_clients_are_taken_in_once_more():
    args = dict(weight_decay=0.0, novel="trained")
    method, data = small("pfedhn", args)
    trained, *_ = simulate(method, data, workers=1)
    (method, state), sel = joined(method, trained, 4), everyone(4)
    for n, v in method.download(trained, sel).items():
        assert torch.equal(method.download(state, sel)[n], v)
    before = method.embeddings(trained).clone()
    *_, end = one_round(method, data, state, sel)
    assert torch.equal(method.embeddings(trained), before) and not torch.equal(
        method.embeddings(end), before
    )
    with pytest.raises(
        ValueError, match="'trained' is for the 4 clients that were trained, here are 3; use mean"
    ):
        joined(method, trained, 3)


def test_novel_clients_are_fitted():
    # Targets that the frozen phi can write: the embeddings alone must come to write them.
    method, data = small("pfedhn", dict(lr=1.0, momentum=0.5, weight_decay=0.0))
    source, sel = method.init(), everyone(4)
    target = method.download(source, sel)
    method, state = joined(method, source, 4)
    start = method.download(state, sel)
    far = lambda p: (flat(p) - flat(target)).square().sum(1)  # noqa: E731
    for _ in range(100):
        state = method.upload(state, sel, method.download(state, sel), target, data.n.double())
    assert (far(method.download(state, sel)) < 0.1 * far(start)).all()


def test_novel_clients_of_fixed_descriptors():
    method, data = small("pfedhn", dict(embed="fixed"))
    method, state = joined(method, method.init(), 4)
    new = simulate(method, data, state=copy.deepcopy(state), workers=1)[0]
    assert_same({"phi": state.extra["phi"]}, {"phi": new.extra["phi"]})


@pytest.mark.slow
def test_proposition_1():
    # theta_i = W v_i, L_i = |X_i theta - y_i|^2 with X_i^T X_i = I: gradient descent ends in the top-k subspace of the ERM
    # solutions, uncentred. W is the product of the trunk's and the head's matrix; their biases are held at zero.
    g = torch.Generator().manual_seed(1)
    draw = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    d, k, n = 6, 2, 9
    x = torch.linalg.qr(draw(n, 12, d))[0]
    y = torch.einsum("nmd,nd->nm", x, draw(n, d) * torch.tensor([3, 2.5, 1, 0.6, 0.3, 0.2]) + 1)
    erm = torch.einsum("nmd,nm->nd", x, y)  # (X^T X)^-1 X^T y
    net = nn.Sequential()
    net.add_module("fc", nn.Linear(d, 1, bias=False))
    method = bound(
        "pfedhn", net=net, classes=2, k=n, dtype=torch.float64, n_hidden=0, dim=k, lr=0.02, **PLAIN
    )
    state = method.init()
    for name in ("trunk.0.bias", "head.0.fc.weight.bias"):
        state.extra["phi"][name] = torch.zeros_like(state.extra["phi"][name])
        del state.extra["momentum"][name]  # what has none is not trained
    sel = everyone(n)
    for _ in range(3000):
        start = method.download(state, sel)
        residual = torch.einsum("nmd,nd->nm", x, start["fc.weight"][:, 0]) - y
        step = 2 * torch.einsum("nmd,nm->nd", x, residual)[:, None]
        state = method.upload(
            state, sel, start, {"fc.weight": start["fc.weight"] - 0.5 * step}, torch.ones(n)
        )
    theta = method.download(state, sel)["fc.weight"][:, 0]
    basis = torch.linalg.svd(erm.T)[0][:, :k]
    torch.testing.assert_close(theta, erm @ basis @ basis.T, rtol=1e-5, atol=1e-6)
    centred = torch.linalg.svd((erm - erm.mean(0)).T)[0][:, :k]
    assert (erm @ centred @ centred.T - theta).abs().max() > 0.1


@pytest.mark.parametrize(
    "hyper, message",
    [
        (dict(embed="none"), "trainable"),
        (dict(hn_sign="up"), "one of descent, literal"),
        (dict(novel="zero"), "one of mean, normal, trained"),
        (dict(dim=-1), "dim=-1"),
        (dict(widths=(0.3,)), "whole channels"),
        (dict(widths=(2,)), r"\(0, 1\]"),
    ],
)
def test_pfedhn_refuses(hyper, message):
    with pytest.raises(ValueError, match=message):
        bound("pfedhn", **hyper)


def test_sizes_need_a_network_without_batchnorm():
    with pytest.raises(ValueError, match="BatchNorm"):
        bound("pfedhn", widths=(0.5, 1), model_args={"bn": True})
