"""Padded convolutions of images that are smaller than their kernels reach.

A 3x3 kernel on one pixel multiplies that pixel and eight zeros of the border: so ends ResNet-18 on
32x32 pixels. Without the zeros the numbers are the same, and a step reads and multiplies less.
"""

from __future__ import annotations

import functools

import torch.nn.functional as F
from torch import Tensor, nn


class Reaching(nn.Conv2d):
    """nn.Conv2d, multiplying only those parts of its kernels that a pixel of the image meets."""

    def forward(self, x: Tensor) -> Tensor:
        how = zip(self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        (top, bottom, above), (left, right, beside) = (
            reach(n, *(int(v) for v in sizes)) for n, sizes in zip(x.shape[-2:], how, strict=True)
        )
        weight = self.weight
        if (bottom - top, right - left) != self.kernel_size:
            # Sliced as it lies in memory: so does its gradient, and a step adds neighbours.
            if weight.stride(-1) == 1:
                weight = weight[..., top:bottom, left:right]
            else:
                weight = weight.permute(0, 2, 3, 1)[:, top:bottom, left:right].permute(0, 3, 1, 2)
        border = above, beside
        return F.conv2d(x, weight, self.bias, self.stride, border, self.dilation, self.groups)


@functools.lru_cache(maxsize=1024)
def reach(n: int, kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, int, int]:
    """Which part of a kernel meets a pixel, in one dimension, and what border that part needs.

    Parameters
    ----------
    n : pixels
    kernel, stride, padding, dilation : as of nn.Conv2d

    Returns
    -------
    first, last, border : int
        kernel[first:last] with `border` zeros on both sides gives the same numbers; the whole
        kernel where no part of it does, or the image is too small for it.
    """
    whole = 0, kernel, padding
    places = _places(n, kernel, stride, padding, dilation)
    starts = range(-padding, -padding + places * stride, stride)
    met = [t for t in range(kernel) if any(0 <= s + t * dilation < n for s in starts)]
    if not met:
        return whole
    first, last = met[0], met[-1] + 1
    border = padding - first * dilation
    if border < 0 or _places(n, last - first, stride, border, dilation) != places:
        return whole
    return first, last, border


def _places(n: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    # Size of what the convolution makes.
    return (n + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def crop(model: nn.Module) -> nn.Module:
    """Let the convolutions of a network, in place, leave out what of their kernels meets no pixel.

    Those that are torch's own and zero-padded; what they hold stays as it is.
    """
    for m in model.modules():
        if type(m) is nn.Conv2d and m.padding_mode == "zeros" and not isinstance(m.padding, str):
            if any(m.padding):
                m.__class__ = Reaching
    return model
