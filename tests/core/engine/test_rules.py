"""What a stacked step computes in another way than torch: the same numbers, in few launches, in both precisions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, grad_and_value, vmap

from benchmarks.tape import Counter
from pfl_core import models
from pfl_core.engine.convolutions import FORMS, UNFOLD
from pfl_core.engine.engine import Engine
from pfl_core.engine.rules import Rules
from pfl_core.engine.sgd import clip_
from pfl_core.methods import flayer
from pfl_core.methods.base import make_method
from pfl_core.methods.task import Task
from pfl_core.stacked import total
from tests.core.engine.setting import CONFIG, clients_of, counted, engine, train

CLOSE = dict(rtol=1e-10, atol=1e-12)


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- cross-entropy ---------------------------------------------------------------------------------

SCORES, LABELS = draws(3, 5, 4), torch.tensor([[0, 1, 2, 3, 0], [1, 1, 1, 1, 1], [3, 2, 0, 0, 2]])


def by_rules(scores, y):
    with Rules(labels=y):
        return F.cross_entropy(scores, y)


def launched(loss):
    with Counter() as c:
        found = vmap(grad_and_value(loss))(SCORES, LABELS)
    return c.ops, found


def test_cross_entropy_of_a_stack_launches_little():
    seed, _ = launched(lambda scores, y: scores.select(0, 0).select(0, 0))  # 1, to begin with
    (before, want), (now, got) = launched(F.cross_entropy), launched(by_rules)
    torch.testing.assert_close(got, want, **CLOSE)
    assert now <= 9 and before > 20 and seed <= 3, "the 1 that a gradient begins with, and eight"


def test_its_second_derivative_is_the_same():
    def hessian(loss):
        return vmap(grad(lambda s, y: grad(loss)(s, y).square().sum()))(SCORES, LABELS)

    torch.testing.assert_close(hessian(by_rules), hessian(F.cross_entropy), **CLOSE)


@pytest.mark.parametrize(
    "how",
    [dict(label_smoothing=0.1), dict(reduction="sum"), dict(ignore_index=1), dict(weight=draws(4))],
    ids=str,
)
def test_other_cross_entropies_are_torchs_own(how):
    def loss(scores, y):
        with Rules(labels=y):
            return F.cross_entropy(scores, y, **how)

    want = vmap(lambda s, y: F.cross_entropy(s, y, **how))(SCORES, LABELS)
    torch.testing.assert_close(vmap(loss)(SCORES, LABELS), want, equal_nan=True, **CLOSE)


def test_targets_that_are_not_the_labels_are_torchs_own():
    hidden = torch.tensor([0, -100, 2, 3, 0])
    with Rules(labels=LABELS[0]):
        assert F.cross_entropy(SCORES[0], hidden).isfinite()
        shares = F.cross_entropy(SCORES[0], SCORES[1].softmax(1))
        with pytest.raises(ValueError, match="batch_size"):
            F.cross_entropy(SCORES[0][:3], LABELS[0])
    torch.testing.assert_close(shares, F.cross_entropy(SCORES[0], SCORES[1].softmax(1)))


# -- clipping --------------------------------------------------------------------------------------


def clipped_before(grads, limit, stacked):
    """The sum over tensors, one after the other."""
    square = total(g.square().flatten(1).sum(1) if stacked else g.square().sum() for g in grads)
    scale = (limit / (square.sqrt() + 1e-6)).clamp(max=1)
    for g in grads:
        g *= scale.view(-1, *[1] * (g.dim() - 1)) if stacked else scale


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("limit", [1e-3, 3.0, 1e3])
@pytest.mark.parametrize("count", [1, 4, 20])
def test_clipping_launches_little_for_any_number_of_tensors(count, stacked, limit):
    grads = [draws(3, 4 + i, *[2] * (i % 3), seed=i) for i in range(count)]
    want, got = ([g.clone() for g in grads] for _ in range(2))
    clipped_before(want, limit, stacked)
    with Counter() as c:
        clip_(got, limit, stacked)
    torch.testing.assert_close(got, want, **CLOSE)
    assert c.ops <= 10


@pytest.mark.parametrize("stacked", [True, False])
def test_gradients_of_any_form_are_clipped_in_place(stacked):
    want, got = ([draws(3, 4, 5).transpose(1, 2), draws(3, 1, seed=1)] for _ in range(2))
    clipped_before(want, 0.1, stacked)
    clip_(got, 0.1, stacked)
    torch.testing.assert_close(got, want, **CLOSE)
    numbers = [draws(3)]  # a parameter without an axis
    clip_(numbers, 0.1, stacked)
    assert numbers[0].abs().max() <= 0.1


def test_clipping_in_a_step_adds_at_most_ten():
    def a_step(clip):
        e = engine("batched", clip=clip, depth=4)
        counted(e, 1)
        return (counted(e, 9) - counted(e, 5))[0] / 4

    assert a_step(0.05) - a_step(0.0) <= 10


# -- convolutions ----------------------------------------------------------------------------------


def kernels(channels, groups, size):
    return draws(3, 8, channels // groups, size, size)


@pytest.mark.parametrize(
    "groups, size, unfolds", [(1, 3, True), (2, 3, True), (4, 3, False), (1, 1, False)]
)
def test_only_patches_that_overlap_or_are_summed_are_unfolded(groups, size, unfolds):
    x, w = draws(3, 2, 4, 7, 7), kernels(4, groups, size)
    found = {}
    for form in FORMS:

        def value(x, w, form=form):
            with Rules(form):
                return F.conv2d(x, w, padding=size // 2, groups=groups).sin().sum()

        with Counter() as c:
            found[form] = vmap(grad(value, (0, 1)))(x, w), c.ops
    torch.testing.assert_close(found[UNFOLD][0], found["grouped"][0], **CLOSE)
    assert (found[UNFOLD][1] != found["grouped"][1]) == unfolds


def test_patches_are_taken_of_all_clients_in_one_image(monkeypatch):
    seen, unfold, fold = [], F.unfold, F.fold
    monkeypatch.setattr(F, "unfold", lambda v, *a: seen.append(len(v)) or unfold(v, *a))
    monkeypatch.setattr(F, "fold", lambda v, *a: seen.append(len(v)) or fold(v, *a))

    def value(x, w):
        with Rules(UNFOLD):
            return F.conv2d(x, w).square().sum()

    for clients in (2, 7):
        del seen[:]
        vmap(grad(value, (0, 1)))(draws(clients, 2, 4, 6, 6), draws(clients, 3, 4, 3, 3))
        assert seen == [1, 1], "a GPU takes one image after another"


def test_second_derivatives_through_patches():
    x, w = draws(3, 2, 4, 7, 7), kernels(4, 1, 3)
    found = []
    for form in FORMS:

        def value(x, w, form=form):
            with Rules(form):
                return F.conv2d(x, w, stride=2, padding=1).sin().sum()

        norm = lambda x, w, f=value: grad(f)(x, w).square().sum() + grad(f, 1)(x, w).square().sum()  # noqa: E731
        found.append(vmap(grad(norm, (0, 1)))(x, w))
    torch.testing.assert_close(*found, **CLOSE)


# -- bfloat16 --------------------------------------------------------------------------------------

NORMED = {
    "resnet18": dict(width=0.05, stem="cifar"),
    "mobilenet": dict(width=0.05),
    "lenet": dict(kernels=2, bn=True),
    "cnn_bn": {},
}


@pytest.mark.parametrize("form", ["", ":unfold"])
@pytest.mark.parametrize("name", NORMED)
def test_bfloat16_stacks_with_batchnorm(name, form):
    g = np.random.default_rng(0)
    x, y = g.integers(0, 256, (24, 16, 16), dtype=np.uint8), g.integers(0, 3, 24)
    ends = {}
    for precision in ("full", "bf16"):
        data = clients_of(x, y, [np.arange(12), np.arange(12, 24)], torch.float32)
        net = models.build(name, data.input_shape, 3, seed=0, **NORMED[name])
        config = replace(CONFIG, batch=6, lr=0.01, precision=precision)
        task = Task(net, data.n, data.label_counts, config)
        e = Engine(make_method("fedavg").bind(task), data, "batched" + form, 1)
        ends[precision] = train(e)
        assert e.ran == {"batched" + form}
    full, half = ends["full"], ends["bf16"]
    assert any(not torch.equal(full[n], half[n]) for n in task.parameters)
    for n in task.names:
        assert half[n].dtype == full[n].dtype
        assert half[n].isfinite().all()
        if name != "mobilenet":  # whose deepest images are one pixel: rounding decides there
            torch.testing.assert_close(half[n], full[n], rtol=0.1, atol=0.05)


# -- masks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 9, 25, flayer.SORTED, flayer.SORTED + 1, 5000])
def test_the_kth_smallest_is_found_as_on_a_cpu_without_kthvalue(size, monkeypatch):
    x = draws(3, size).abs()
    x[1] = x[1].round()  # many are equal
    x[2] = 0

    class There(torch.Tensor):  # as if on a GPU
        device = torch.device("meta")

    monkeypatch.setattr(torch.Tensor, "kthvalue", None)
    for k in sorted({0, size // 3, size // 2, size - 1}):
        got = flayer._smallest(x.as_subclass(There), k).as_subclass(torch.Tensor)
        assert torch.equal(got, flayer._smallest(x, k)) and got.shape == (3, 1)
