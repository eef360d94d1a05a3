"""Kernels are cropped to what meets a pixel, and nothing else changes."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pfl_core import models, reach

sizes = st.integers(1, 9)


@settings(max_examples=300)
@given(sizes, sizes, st.integers(1, 7), st.integers(1, 3), st.integers(0, 5), st.integers(1, 3))
def test_cropped_convolutions_give_the_same_numbers_and_gradients(h, w, k, stride, pad, dilation):
    how = dict(stride=stride, padding=pad, dilation=dilation)
    if min(h, w) + 2 * pad < dilation * (k - 1) + 1:
        return  # torch refuses it
    conv = nn.Conv2d(4, 6, k, groups=2, **how, dtype=torch.float64)
    x = torch.randn(2, 4, h, w, dtype=torch.float64, requires_grad=True)
    wanted = conv(x)
    cropped = reach.crop(nn.Sequential(conv))
    assert type(conv) is (reach.Reaching if pad else nn.Conv2d)
    out = cropped(x)
    torch.testing.assert_close(out, wanted)
    known = [x, conv.weight, conv.bias]
    weights = torch.randn_like(out)
    mine, theirs = (torch.autograd.grad((o * weights).sum(), known) for o in (out, wanted))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("n, how, part", [
    (1, (3, 1, 1, 1), (1, 2, 0)),  # the last stage of ResNet-18 on 32x32 pixels
    (2, (3, 2, 1, 1), (1, 3, 0)),  # and its first convolution
    (2, (3, 1, 1, 1), (0, 3, 1)),
    (32, (7, 2, 3, 1), (0, 7, 3)),
    (1, (5, 1, 2, 1), (2, 3, 0)),
    (2, (5, 1, 2, 1), (1, 4, 1)),
])  # fmt: skip
def test_what_of_a_kernel_meets_a_pixel(n, how, part):
    assert reach.reach(n, *how) == part


def test_other_paddings_and_other_classes_stay():
    class Own(nn.Conv2d):
        pass

    kept = [
        nn.Conv2d(1, 1, 3, padding="same"),
        nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"),
        Own(1, 1, 3, padding=1),
        nn.Conv2d(1, 1, 3),
    ]
    classes = list(map(type, kept))
    reach.crop(nn.Sequential(*kept))
    assert list(map(type, kept)) == classes


@pytest.mark.parametrize("name", ["resnet18", "resnet34"])
def test_a_network_on_small_images_multiplies_less_and_answers_alike(name):
    model = models.build(name, (3, 32, 32), 10, width=0.25).double().eval()
    cropped = reach.crop(copy.deepcopy(model))
    assert list(cropped.state_dict()) == list(model.state_dict())
    x, flop = torch.randn(2, 3, 32, 32, dtype=torch.float64), []
    for m in (model, cropped):
        with FlopCounterMode(display=False) as counter:
            m(x)
        flop.append(counter.get_total_flops())
    torch.testing.assert_close(cropped(x), model(x))
    assert flop[1] < 0.9 * flop[0]


def test_stacked_clients_are_cropped_too():
    model = reach.crop(models.build("resnet18", (3, 32, 32), 10, width=0.1).double().eval())
    p = {n: torch.stack([v, v + 0.01]) for n, v in model.state_dict().items()}
    x = torch.randn(2, 3, 3, 32, 32, dtype=torch.float64)
    one = lambda p, x: torch.func.functional_call(model, p, x)  # noqa: E731
    wanted = torch.stack([one({n: v[i] for n, v in p.items()}, x[i]) for i in range(2)])
    floats = {n: v for n, v in p.items() if v.is_floating_point()}
    torch.testing.assert_close(torch.func.vmap(one)(floats, x), wanted)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_lies_in_memory_as_the_kernels_do(order):
    conv = nn.Conv2d(8, 16, 3, padding=1)
    weight = conv.weight.detach().to(memory_format=order).requires_grad_()
    conv._parameters["weight"] = weight
    out = reach.crop(nn.Sequential(conv))(torch.randn(4, 8, 1, 1))
    assert torch.autograd.grad(out.sum(), weight)[0].stride() == weight.stride()
