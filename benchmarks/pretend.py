"""A pretend accelerator: tensors that say they lie on device "meta:0" and have values on the CPU.

An operation over both devices is refused, as on a GPU; what a GPU would wait for is counted. The
engine sees a device that is not a CPU, so all its code for GPUs runs; graphs are those of tape.py.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta:0")
# What needs an answer of the device.
ASK = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def asks(func: Any, args: tuple) -> bool:
    """Whether an operation needs an answer of the device, such as how many entries a mask has."""
    name = func._schema.name
    masks = name in ("aten::index", "aten::index_put_") and tensors(args[1])
    return name in ASK or any(t.dtype == torch.bool for t in masks or ())


def crosses(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether an operation copies from the accelerator to the CPU, or back."""
    name, asked = func._schema.name, kwargs.get("device")
    here = any(isinstance(t, Pretend) for t in tensors((args, kwargs)))
    if name == "aten::_to_copy" and asked is not None:
        return here != (torch.device(asked).type == DEVICE.type)
    return name == "aten::copy_" and isinstance(args[0], Pretend) != isinstance(args[1], Pretend)


class Pretend(Tensor):
    """A tensor on the pretend accelerator; `held` has its values."""

    @staticmethod
    def __new__(cls, held, trained=False):
        return Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=DEVICE,
            requires_grad=trained or held.requires_grad,
        )

    def __init__(self, held, trained=False):
        self.held = held

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {}, Counter())

    def __deepcopy__(self, memo):
        out = Pretend(self.held.clone(), self.requires_grad)
        out._is_param = getattr(self, "_is_param", False)
        return out

    def __repr__(self, **_):
        return f"Pretend({self.held})"


class FromPython(TorchFunctionMode):
    """Within it, what is made of Python's and numpy's values on device "meta:0" has values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is Tensor.tolist:  # torch refuses it for subclasses
            return func(args[0].cpu())
        if func is Tensor.new_tensor and isinstance(args[0], Pretend):
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to(DEVICE)
        if func in (torch.tensor, torch.as_tensor) and device is not None:
            return func(*args, **kwargs | {"device": "cpu"}).to(device)
        return func(*args, **kwargs)


class Accelerator(TorchDispatchMode):
    """Within it, device "meta:0" computes; `seen` counts asks, uploads and downloads."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __enter__(self):
        self.made = FromPython()
        self.made.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.made.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {}, self.seen)


def dispatch(func, args, kwargs, seen):
    """Run an operation on the values that its tensors hold."""
    name = func._schema.name
    given = tensors((args, kwargs))
    here = [t for t in given if isinstance(t, Pretend)]
    asked = kwargs.get("device")
    goes = here if asked is None else torch.device(asked).type == DEVICE.type
    if not here and not goes:
        return func(*args, **kwargs)
    if crosses(func, args, kwargs):
        up = bool(goes) if name == "aten::_to_copy" else isinstance(args[0], Pretend)
        seen["uploads" if up else "downloads"] += 1
        seen["numbers"] += given[0].numel() if up and name == "aten::_to_copy" else 0
    else:
        # As on a GPU, a number (0-dimensional) of the CPU may take part.
        if strange := [t for t in given if not isinstance(t, Pretend) and t.dim()]:
            raise RuntimeError(
                f"{name}: tensors on two devices, {[tuple(t.shape) for t in strange]} on the CPU"
            )
        if asks(func, args):
            seen["asks"] += 1
    plain_kwargs = kwargs | ({} if asked is None else {"device": torch.device("cpu")})
    held = tree_map(lambda t: t.held if isinstance(t, Pretend) else t, (args, plain_kwargs))
    out = func(*held[0], **held[1])
    if not goes:
        return out
    out = tree_map(lambda t: Pretend(t) if isinstance(t, Tensor) else t, out)
    return return_and_correct_aliasing(func, args, kwargs, out)
