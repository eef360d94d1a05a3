"""What a stacked step computes in another way than torch by itself, with the same numbers.

- Convolutions in one of two forms, see convolutions.py.
- BatchNorm of bfloat16 in float32: its parameters are float32, and vmap takes no two formats.
- The cross-entropy of a batch's labels in few operations: vmap makes some 25 of torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pfl_core.engine import convolutions
from pfl_core.engine.convolutions import GROUPED, UNFOLD

SHORT = (torch.bfloat16, torch.float16)
DEFAULTS = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}


class Rules(TorchFunctionMode):
    """Within it, ONE client's loss is computed by these rules.

    Parameters
    ----------
    form : str
        How convolutions are multiplied (convolutions.py).
    labels : (B,) int64, optional
        Those of the batch; without them cross-entropy is torch's.
    """

    def __init__(self, form: str = GROUPED, labels: Tensor | None = None):
        super().__init__()
        self.form, self.labels = form, labels

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv2d and self.form == UNFOLD and convolutions.unfolds(*args, **kwargs):
            func = convolutions.unfolded
        elif func in (F.batch_norm, torch.batch_norm) and args and args[0].dtype in SHORT:
            args = (args[0].float(), *args[1:])
        elif func is F.cross_entropy and self._is_plain(*args, **kwargs):
            return cross_entropy(*args[:2])
        return func(*args, **kwargs)

    def _is_plain(self, scores: Tensor, y: Tensor | None = None, *more: Any, **how: Any) -> bool:
        # Other targets may be shares, or hold -100 for samples that do not count.
        if y is None or y is not self.labels or scores.dim() != 2 or len(scores) != len(y):
            return False
        return not more and all(
            v is None or (n in DEFAULTS and v == DEFAULTS[n]) for n, v in how.items()
        )


def cross_entropy(scores: Tensor, y: Tensor) -> Tensor:
    """The mean over a batch of -log softmax of scores (B, C) at the labels y (B,) in 0..C-1."""
    wide = torch.float32 if scores.dtype in SHORT else scores.dtype
    return scores.log_softmax(1, wide).gather(1, y[:, None]).sum() * (-1 / len(y))
