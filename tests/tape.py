"""A stand-in for a CUDA graph on the CPU: it records the operations that a step launches and repeats exactly them on the same memory."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.pretend import ASK, tensors

FREE = {
    "aten::detach",
    "aten::lift_fresh",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::empty",
    "aten::empty_like",
}


def written(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """The arguments that an operation writes into."""
    out = []
    for i, a in enumerate(func._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            out += tensors(kwargs.get(a.name) if a.kwarg_only or i >= len(args) else args[i])
    return out


def launches(func: Any) -> bool:
    """Whether an operation computes: views and bare allocations do not."""
    views = any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )
    return not views and func._schema.name not in FREE


class Counter(TorchDispatchMode):
    """Counts, within it, the operations that compute (`ops`) and the tensors newly made (`made`; `largest`: entries of the largest)."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = self.made = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if launches(func):
            self.ops += 1
            new = tensors(out) if not written(func, args, kwargs or {}) else []
            self.made += len(new)
            self.largest = max([self.largest, *(t.numel() for t in new)])
        return out


class Tape(TorchDispatchMode):
    """One captured step. As on a GPU, capturing changes nothing, Python runs no more, and what needs an answer of the device is refused."""

    log: list[tuple[str, "Tape"]] = []  # ("capture" | "replay", which)

    def capture(self, fn: Any) -> None:
        self.ops, self.undo, self.mine = [], [], set()
        try:
            with self:
                fn()
        finally:
            for t, old in reversed(self.undo):
                t.copy_(old)
        Tape.log.append(("capture", self))

    def replay(self) -> None:
        for func, args, kwargs, out in self.ops:
            new = func(*args, **kwargs)
            for t, v in zip(tensors(out), tensors(new), strict=True):
                if t.data_ptr() != v.data_ptr():
                    t.copy_(v)
        Tape.log.append(("replay", self))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name in ASK:
            raise RuntimeError("operation not permitted when stream is capturing")
        for t in written(func, args, kwargs):
            if t.untyped_storage().data_ptr() not in self.mine:
                self.undo.append((t, t.clone()))
        out = func(*args, **kwargs)
        if launches(func):
            self.ops.append((func, args, kwargs, out))
            if not written(func, args, kwargs):
                self.mine |= {t.untyped_storage().data_ptr() for t in tensors(out)}
        return out
