"""Two forms in which the convolutions of stacked clients are multiplied, with the same numbers.

- `grouped`: as vmap has it, one convolution with a group for each client.
- `unfold`: patches of the images are laid side by side, and each client's kernels multiply them in
  a batched matrix product. (K. Chellapilla, S. Puri, P. Simard, "High Performance Convolutional
  Neural Networks for Document Processing", 2006.) It needs a kernel's size times the memory.

Which one is faster depends on the GPU, its libraries and the network: `fastest` times both.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

FORMS = GROUPED, UNFOLD = "grouped", "unfold"
FASTEST = "fastest"


def multiplied(form: str) -> AbstractContextManager:
    """The context in which conv2d, also that of nn.Conv2d, multiplies in one of `FORMS`."""
    return _Unfolded() if form == UNFOLD else nullcontext()


class _Unfolded(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (unfolded if func is torch.conv2d else func)(*args, **(kwargs or {}))


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
    # As channels of one image: a GPU unfolds image by image.
    patches = F.unfold(input.flatten(0, 1)[None], kernel, dilation, border, stride)
    patches = patches.view(len(input), groups, -1, size[0] * size[1])
    kernels = weight.flatten(1).unflatten(0, (groups, -1))
    out = torch.einsum("gok,bgkl->bgol", kernels, patches).flatten(1, 2).unflatten(2, size)
    return out if bias is None else out + bias.view(-1, 1, 1)


def _pair(v: Any) -> tuple[int, ...]:
    return (v, v) if isinstance(v, int) else tuple(v) * (2 // len(v))
