"""The views of mathematics: what they show is the paper's equation, worked here in numpy on three clients."""

import numpy as np
import pytest
import torch
from numpy.linalg import norm

from pfl_core.analysis import plots
from pfl_core.util import draws
from pfl_papers.explore import mathematics, widgets
from pfl_papers.explore.mathematics import clients, fedper, pfedhn

pytestmark = pytest.mark.slow

CORNERS = np.array([[0, 1], [-(3**0.5) / 2, -0.5], [3**0.5 / 2, -0.5]])


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def line(ax, number):
    return np.asarray(ax.lines[number].get_ydata(), dtype=float)


# -- FedAGHN ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "q", "second", "third"), [(0.3, 2.0, 30, 120), (0.0, 5.0, 170, 0), (2.0, 0.0, 90, 40)]
)
def test_attention_is_eq_4_to_6(p, q, second, third):
    shown = mathematics.attention(p=p, q=q, second=second, third=third)
    s = np.cos(np.radians([0, second, third]))
    others = np.exp(q * s[1:]) / np.exp(q * s[1:]).sum()
    w = np.array([p, *others]) / (1 + p)
    np.testing.assert_allclose(shown.table["s"], s, atol=5.1e-5)
    np.testing.assert_allclose(shown.table["a"], [p, *others], atol=5.1e-5)
    np.testing.assert_allclose(shown.table["w"], w, atol=5.1e-5)
    left, right = shown.figure.axes
    (star,) = [ln.get_xydata()[0] for ln in left.lines if ln.get_marker() == "*"]
    np.testing.assert_allclose(star, w @ CORNERS, atol=1e-12)
    dots = [ln.get_xydata()[0] for ln in right.lines if ln.get_marker() == "o"]
    np.testing.assert_allclose(dots, np.stack([[q] * 3, w], 1), atol=1e-12)


# -- pFedLA ----------------------------------------------------------------------------------------


class Hypernetwork:
    """HN_1 of the view in numpy: three ReLU layers of 8, a softmax head for each layer."""

    def __init__(self):
        with draws.seeded(clients_seed("hypernetworks")):
            v = torch.randn(3, 4)
            layers = [torch.nn.Linear(4 if i == 0 else 8, 24) for i in range(3)]
        self.p = {"v": v.numpy().astype(float)}
        for i, layer in enumerate(layers):
            self.p[f"W{i}"] = layer.weight.detach().double().numpy().reshape(3, 8, -1)
            self.p[f"b{i}"] = layer.bias.detach().double().numpy().reshape(3, 8)
        self.p |= {"H": np.zeros((3, 2, 3, 8)), "c": np.zeros((3, 2, 3))}

    def forward(self, k):
        h = [self.p["v"][k]]
        for i in range(3):
            h.append(np.maximum(self.p[f"W{i}"][k] @ h[-1] + self.p[f"b{i}"][k], 0))
        return h, softmax(self.p["H"][k] @ h[-1] + self.p["c"][k])

    def step(self, k, slope, rate):
        """v, psi + rate (d alpha)^T slope."""
        h, a = self.forward(k)
        z = a * (slope - (a * slope).sum(-1, keepdims=True))
        up = np.einsum("lj,ljh->h", z, self.p["H"][k])
        self.p["H"][k] += rate * z[:, :, None] * h[3]
        self.p["c"][k] += rate * z
        for i in (2, 1, 0):
            up = up * (h[i + 1] > 0)
            down = self.p[f"W{i}"][k].T @ up
            self.p[f"W{i}"][k] += rate * np.outer(up, h[i])
            self.p[f"b{i}"][k] += rate * up
            up = down
        self.p["v"][k] += rate * up


def clients_seed(purpose):
    return int(draws.rng(0, purpose).integers(2**62))


@pytest.mark.parametrize(("layer", "sign"), [(2, "descent"), (1, "literal")])
def test_layer_weights_are_eq_4_to_6_10_and_11(layer, sign):
    rounds, rate, drift = 12, 1.0, 2.0
    shown = mathematics.layer_weights(drift=drift, layer=layer, rounds=rounds, rate=rate, sign=sign)
    optima = np.stack([0.3 * CORNERS] * 2)  # (layers, clients, 2)
    optima[layer - 1, 2] += drift * CORNERS[2]
    theta, hn, course = np.zeros((2, 3, 2)), Hypernetwork(), []
    for _ in range(rounds + 1):
        alpha = np.stack([hn.forward(k)[1] for k in range(3)])  # (clients, layers, sources)
        course.append(alpha[0])
        mixed = np.einsum("klj,ljx->lkx", alpha, theta)
        delta = 0.5 * (optima - mixed)
        for k in range(3):
            away = theta - mixed[:, k : k + 1]
            slope = np.einsum("ljx,lx->lj", away, delta[:, k])
            hn.step(k, slope, rate if sign == "descent" else -rate)
        theta = mixed + delta
    np.testing.assert_allclose(shown.table.to_numpy().T, course[-1], atol=5.1e-5)
    for i, ax in enumerate(shown.figure.axes[1:]):
        curves = [ln.get_ydata() for ln in ax.lines if len(ln.get_ydata()) == rounds + 1]
        np.testing.assert_allclose(np.stack(curves, 1), np.array(course)[:, i], atol=1e-9)
    last = course[-1][layer - 1]
    assert last[2] < 1 / 3 if sign == "descent" else last[2] > 1 / 3


# -- FLAYER ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "size", "first"), [(2, 1.0, 1.0), (3, 0.03, 5.0), (1, 30.0, 10.0)]
)
def test_rates_and_masks_are_eq_3_to_9(layer, size, first):
    lr = 0.2
    shown = mathematics.rates_and_masks(layer=layer, norm=size, first=first, lr=lr)
    g = np.random.default_rng(1).normal(size=(4, 3, 8))
    g[layer - 1, 0, 0] *= first
    g /= norm(g, axis=2, keepdims=True)
    g[layer - 1, 0] *= size
    i = np.arange(1, 5)
    rate = lr * (1 + np.log(1 + 1 / norm(g, axis=2)) * i[:, None] / 4)  # (layers, clients)
    np.testing.assert_allclose(shown.table["rate"], rate[:, 0], atol=5.1e-5)
    theta = -rate[:, :, None] * g
    sent = np.zeros(g.shape, bool)
    for at in np.ndindex(4, 3):
        keep = int(np.ceil(min(max((at[0] + 1) / 4, 0.1), 1) * 8))
        sent[at][np.argsort(-np.abs(theta[at]))[:keep]] = True
    assert shown.table.uploaded.tolist() == sent[:, 0].sum(1).tolist() == [2, 4, 6, 8]
    assert shown.table["by nobody"].tolist() == (sent.sum(1) == 0).sum(1).tolist()
    number = sent.sum(1)
    server = np.where(number, (theta * sent).sum(1) / np.maximum(number, 1), 0.0)  # 0: as before
    (dash,) = [ln.get_ydata() for ln in shown.figure.axes[2].lines if ln.get_marker() == "_"]
    np.testing.assert_allclose(dash, server[layer - 1], atol=1e-12)
    x = np.asarray(shown.figure.axes[0].lines[0].get_xdata())
    np.testing.assert_allclose(
        line(shown.figure.axes[0], 6), lr * (1 + np.log(1 + 1 / x)), rtol=1e-9
    )


def test_a_norm_moves_the_rate_and_not_the_mask():
    low, high = (mathematics.rates_and_masks(layer=3, norm=n) for n in (0.01, 100.0))
    assert low.table.rate["layer 3"] > 2 * high.table.rate["layer 3"]
    drawn = [s.figure.axes[1].collections[2].get_array().mask for s in (low, high)]
    assert (drawn[0] == drawn[1]).all() and drawn[0].sum() == 3 * 2


# -- pFedHN ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [0, 2])
def test_pulled_is_algorithm_1(hidden):
    apart, alpha, direction, length = 45, 0.05, 120, 0.5
    shown = mathematics.pulled(
        direction=direction, length=length, apart=apart, hidden=hidden, alpha=alpha
    )
    hyper = dict(dim=2, hidden=32, n_hidden=hidden, **pfedhn.PLAIN)
    phi = clients.method_for("pfedhn", clients.points_model("layer"), hyper).init().extra["phi"]
    phi = {n: v.numpy() for n, v in phi.items()}
    names = [f"trunk.{i}" for i in range(hidden + 1)] + ["head.0.layer.weight"]
    W, b = ([phi[f"{n}.{kind}"].copy() for n in names] for kind in ("weight", "bias"))
    angle = np.radians([0, apart, 240])
    v = np.stack([np.cos(angle), np.sin(angle)], 1)

    def write(v):
        h = [v]
        for i in range(hidden + 2):
            inputs = np.maximum(h[-1], 0) if 0 < i <= hidden else h[-1]
            h.append(W[i] @ inputs + b[i])
        return h

    before = np.stack([write(each)[-1] for each in v])
    wanted = length * np.array([np.cos(np.radians(direction)), np.sin(np.radians(direction))])
    h, up = write(v[0]), -wanted  # Delta: before - after
    for i in reversed(range(hidden + 2)):
        inputs = np.maximum(h[i], 0) if 0 < i <= hidden else h[i]
        down = W[i].T @ up
        W[i] -= alpha * np.outer(up, inputs)
        b[i] -= alpha * up
        up = down * (h[i] > 0) if 0 < i <= hidden else down
    v[0] -= alpha * up
    moved = np.stack([write(each)[-1] for each in v]) - before
    np.testing.assert_allclose(shown.table.moved, norm(moved, axis=1), atol=5.1e-5)
    np.testing.assert_allclose(shown.table.followed, moved @ wanted / length**2, atol=5.1e-5)


def test_the_more_alike_embeddings_are_the_further_a_client_is_pulled_along():
    followed = [mathematics.pulled(apart=a).table.followed for a in (0, 90, 180)]
    assert [f["Client 1"] for f in followed] == pytest.approx([followed[0]["Client 1"]] * 3)
    near, far, opposite = (f["Client 2"] for f in followed)
    assert near > far > opposite


@pytest.mark.parametrize("third", [-60, 20])
def test_subspace_is_proposition_1(third):
    shown = mathematics.subspace(third=third, rounds=200)
    at = np.radians([100, 230, third])
    solutions = np.stack([np.cos(at), np.sin(at)], 1) * [[1], [1], [1.5]]
    centred = solutions - solutions.mean(0)
    _, values, axes = np.linalg.svd(centred)  # PCA, without scikit-learn
    left, right = shown.figure.axes
    written = np.stack([ln.get_xydata()[0] for ln in left.lines if ln.get_marker() == "o"])
    along = centred @ axes[0][:, None] * axes[0] + solutions.mean(0)
    np.testing.assert_allclose(written, along, atol=1e-2)
    np.testing.assert_allclose(shown.table["squared error"], values[1] ** 2, atol=1e-3)
    degrees = line(right, 0)
    assert degrees[0] > 1 and degrees[-1] < 0.1
    assert f"{degrees[-1]:.4f} degrees" in shown.said


# -- FedPer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("personal", [0, 1, 3])
def test_split_is_algorithm_1(personal):
    samples, turn = 10, 60
    shown = mathematics.split(personal=personal, turn=turn, samples=samples)
    x = np.random.default_rng(0).uniform(-1, 1, (3, samples, 2))
    borders = turn * np.arange(3)
    degrees = np.degrees(np.arctan2(x[..., 1], x[..., 0]))
    y = ((degrees - borders[:, None]) % 360 // 120).astype(int)
    start = [
        (layer.weight, layer.bias)
        for layer in fedper._network().children()
        if hasattr(layer, "weight")
    ]
    start = [[t.detach().numpy() for t in pair] for pair in start]
    nets = [[[t.copy() for t in pair] for pair in start] for _ in range(3)]

    def forward(net, p):
        h = [p]
        for i, (W, b) in enumerate(net):
            h.append(h[-1] @ W.T + b)
            if i < 2:
                h[-1] = np.maximum(h[-1], 0)
        return h

    for _ in range(20):
        for k, net in enumerate(nets):
            for _ in range(5):  # one batch of all samples an epoch
                h = forward(net, x[k])
                up = (softmax(h[-1]) - np.eye(3)[y[k]]) / samples
                for i in (2, 1, 0):
                    W, b = net[i]
                    down = (up @ W) * (h[i] > 0)
                    net[i] = [W - up.T @ h[i], b - up.sum(0)]  # rate 1
                    up = down
        for i in range(3 - personal):  # the base: equal clients, equal gammas
            for t in (0, 1):
                mean = np.mean([net[i][t] for net in nets], 0)
                for net in nets:
                    net[i][t] = mean.copy()
    side = np.linspace(-1, 1, fedper.SIDE)
    plane = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
    right = []
    for k, ax in enumerate(shown.figure.axes[1:]):
        found = forward(nets[k], plane)[-1].argmax(1)
        drawn = np.asarray(ax.images[0].get_array()).ravel()
        assert (drawn == found).mean() > 0.999  # a point on a border may fall to either side
        degrees = np.degrees(np.arctan2(plane[:, 1], plane[:, 0]))
        right.append(100 * (found == (degrees - borders[k]) % 360 // 120).mean())
        assert f"{right[-1]:.1f}" in ax.get_title()
    assert f"{np.mean(right):.1f} %" in shown.said
    assert shown.table.parameters.tolist() == [2 * 16 + 16, 16 * 16 + 16, 16 * 3 + 3]
    places = ["averaged"] * (3 - personal) + ["personal"] * personal
    assert shown.table.place.tolist() == places


def test_a_personal_head_serves_clients_with_other_names_for_classes():
    right = {}
    for personal in (0, 1):
        said = mathematics.split(personal=personal, turn=120).said
        right[personal] = float(said.split("label ")[1].split(" %")[0])
    assert right[0] < 60 < 90 < right[1]


# -- sliders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mathematics.VIEWS)
def test_a_view_its_code_and_its_sliders_agree(name, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(widgets, "display", shown.append)
    mathematics.show(name)
    out = capsys.readouterr().out
    assert [type(s).__name__ for s in shown] == ["Image", "Markdown", "DataFrame"]
    imports, _, call = out.strip().splitlines()[-1].rpartition("; ")
    scope = {}
    exec(imports, scope)
    with widgets.styled():
        assert plots.compact(eval(call, scope)) == shown[0].data

    monkeypatch.setattr(plots, "compact", lambda figure, dpi: b"")  # the code says what is drawn
    mathematics.show(name, interactive="yes")
    left, page = shown[-1].children
    view, sliders = mathematics.VIEWS[name]
    assert [w.description for w in left.children] == [label for label, _ in sliders.values()]
    assert all(w.continuous_update for w in left.children)
    before = page.value
    assert before.startswith("<div") and "<img" in before
    for slider in left.children:
        first = slider.value
        slider.index = slider.index - 1 if slider.index else 1
        assert page.value != before and "<img" in page.value, slider.description
        slider.value = first
        assert page.value == before, slider.description


@pytest.mark.parametrize("name", mathematics.VIEWS)
def test_every_value_of_a_slider_is_drawn(name):
    view, sliders = mathematics.VIEWS[name]
    for parameter, (_, options) in sliders.items():
        for value in (options[0], options[-1]):
            assert view(**{parameter: value}).figure.axes


def test_an_unknown_view_or_slider_is_named():
    with pytest.raises(ValueError, match="view 'attentions' is unknown; did you mean 'attention'"):
        mathematics.show("attentions")
    with pytest.raises(ValueError, match="slider of attention: 'r' is unknown"):
        mathematics.show("attention", r=1)
