"""Two forms in which the convolutions of stacked clients are multiplied, with the same numbers.

- `grouped`: as vmap has it, one convolution with a group for each client.
- `unfold`: patches of the images are laid side by side, and each client's kernels multiply them in
  a batched matrix product. (K. Chellapilla, S. Puri, P. Simard, "High Performance Convolutional
  Neural Networks for Document Processing", 2006.) It needs a kernel's size times the memory.
  Kernels of 1x1 and depthwise ones are multiplied as `grouped` has it.

Which one is faster depends on the GPU, its libraries and the network: `fastest` times both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

FORMS = GROUPED, UNFOLD = "grouped", "unfold"
FASTEST = "fastest"


def unfolds(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> bool:
    """Whether form `unfold` takes a convolution: not of 1x1 kernels, and not channel by channel.

    Those have no patches that overlap, or no sum over channels.
    """
    return weight.shape[2:].numel() > 1 and (groups == 1 or weight.shape[1] > 1)


def unfolded(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    """What torch.conv2d makes of images (B, channels, height, width), as one matrix product."""
    if input.dim() == 3:
        return unfolded(input[None], weight, bias, stride, padding, dilation, groups)[0]
    kernel, stride, dilation = weight.shape[2:], _pair(stride), _pair(dilation)
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if padding == "same":
        ends = [n for r in reversed(reach) for n in (r // 2, r - r // 2)]
        input, padding = F.pad(input, ends), 0
    border = _pair(0 if padding == "valid" else padding)
    size = [
        (n + 2 * p - r - 1) // s + 1
        for n, p, r, s in zip(input.shape[2:], border, reach, stride, strict=True)
    ]
    patches = _Patches.apply(input.flatten(0, 1), (kernel, dilation, border, stride))
    patches = patches.view(len(input), groups, -1, size[0] * size[1])
    kernels = weight.flatten(1).unflatten(0, (groups, -1))
    out = torch.einsum("gok,bgkl->bgol", kernels, patches).flatten(1, 2).unflatten(2, size)
    return out if bias is None else out + bias.view(-1, 1, 1)


class _Patches(Function):
    """F.unfold of an image (C, H, W), (C * kernel's size, places).

    A GPU unfolds image by image: clients are channels of one image.
    """

    @staticmethod
    def forward(image: Tensor, how: tuple) -> Tensor:
        return F.unfold(image[None], *how)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        image, ctx.how = inputs
        ctx.size = image.shape[1:]

    @staticmethod
    def backward(ctx: Any, patches: Tensor) -> tuple:
        return _Image.apply(patches, ctx.size, ctx.how), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, image: Tensor, how: tuple) -> tuple[Tensor, int]:
        every = _Patches.apply(image.movedim(in_dims[0], 0).flatten(0, 1), how)
        return every.unflatten(0, (info.batch_size, -1)), 0


class _Image(Function):
    """F.fold of patches (C * kernel's size, places), (C, H, W): the derivative of _Patches."""

    @staticmethod
    def forward(patches: Tensor, size: tuple, how: tuple) -> Tensor:
        return F.fold(patches[None], size, *how)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        *_, ctx.how = inputs

    @staticmethod
    def backward(ctx: Any, image: Tensor) -> tuple:
        return _Patches.apply(image, ctx.how), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, patches: Tensor, size: tuple, how: tuple) -> tuple:
        every = _Image.apply(patches.movedim(in_dims[0], 0).flatten(0, 1), size, how)
        return every.unflatten(0, (info.batch_size, -1)), 0


def _pair(v: Any) -> tuple[int, ...]:
    return (v, v) if isinstance(v, int) else tuple(v) * (2 // len(v))
