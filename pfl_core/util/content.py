"""A digest of what code reads: any value by content, whatever holds it, however deep.

Of a function or class that is foreign, what counts is what it can reach: closures, defaults, class
attributes, and the values of the global names in its code. `Reader` says which are foreign.
"""

from __future__ import annotations

import contextvars
import copyreg
import dis
import functools
import hashlib
import inspect
import io
import logging
import os
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Generator, Iterator
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch

from pfl_core.util import sums

Visit = Generator[tuple[str, Any], str, list[str]]  # yields (label, child), is sent its digest
PLAIN = (bool, int, float, complex, bytes, type(None), type(...), type(NotImplemented), np.generic)
DRAWING = (
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    random.Random,
    torch.Generator,
)
PARTED = (list, tuple, dict, set, frozenset)  # an empty one has no parts
# Numpy's and random's own: the engine looks whether they move.
GLOBAL = [f.__self__ for f in (np.random.rand, random.random)]  # type: ignore[attr-defined]
# What code may hold without reading numbers from it: how it is called is all that counts.
TOOLS = (logging.Logger, logging.Handler, logging.LoggerAdapter, types.ModuleType)
TOOL_MODULES = {"_thread", "threading", "_weakref", "weakref", "_contextvars", "concurrent"}

ENVIRONMENT = {"environ", "getenv"}  # what code reads its variables with

# Instructions that load a global, a module, and an attribute.
LOADING = (
    {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"},
    {"IMPORT_NAME"},
    {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"},
)
ATTRIBUTE = 2
OWN = (("self",), ("super",))  # their attributes are those of an object


class Reader(NamedTuple):
    """How foreign code is told: `foreign(thing)`, and `code(thing)`, a digest of its own text."""

    foreign: Callable[[Any], bool]
    code: Callable[[Any], str]


def digest(things: list[Any], reader: Reader) -> tuple[str, list[str]]:
    """sha256 (hex) of the contents of things, and what in them has none: ["label (type)"].

    Raises
    ------
    ValueError
        For a generator of random numbers.
    """
    walk = _Walk(reader)
    return walk.of(("", things)), walk.opaque


def parts(things: list[Any], reader: Reader) -> dict[str, list[str]]:
    """{label: digests} of what has no parts among the contents of things, as `digest` meets it.

    Entries of a set have one label, and so have the keys of a dict.
    """
    walk = _Walk(reader)
    walk.of(("", things))
    return walk.leaves


class _Walk:
    # Depth first, without recursion: structures may be as deep as they like, and go round.

    def __init__(self, reader: Reader):
        self.reader = reader
        self.opaque: list[str] = []
        self.leaves: dict[str, list[str]] = {}
        self.done: dict[int, str] = {}
        self.alive: list[Any] = []  # else ids would be used again

    def of(self, root: tuple[str, Any]) -> str:
        frames: list[tuple[Any, Visit, str]] = []
        at: dict[int, int] = {}  # {id: its place in frames}
        said: str | None = None
        (label, value), entering = root, True
        while True:
            if entering:
                if id(value) in at:
                    said = f"round {len(frames) - at[id(value)]}"
                elif said := self.done.get(id(value)):
                    if isinstance(value, (*PLAIN, str)):
                        self.leaves.setdefault(label, []).append(said)
                else:
                    at[id(value)] = len(frames)
                    frames.append((value, self.visit(label, value), label))
            if not frames:
                return said or ""
            value, visit, label = frames[-1]
            leaf = said is None
            try:
                name, child = visit.send(said)  # type: ignore[arg-type]  # None begins it
                label, value, entering = f"{label}{name}", child, True
            except StopIteration as end:
                said = hashlib.sha256("\0".join(end.value).encode()).hexdigest()
                self.done[id(value)] = said
                if leaf and type(value) not in PARTED:
                    self.leaves.setdefault(label, []).append(said)
                self.alive.append(value)
                frames.pop()
                del at[id(value)]
                entering = False

    # -- each kind of value --------------------------------------------------------------------

    def visit(self, label: str, v: Any) -> Visit:
        if isinstance(v, DRAWING):
            raise ValueError(
                f"{label.lstrip('.')} is a generator of random numbers ({type(v).__name__}), which "
                "goes on from run to run; draw with torch in a loss or hook, with Batch.noise, or "
                "make the generator where it is used, from a seed"
            )
        visit = _EXACT.get(type(v))
        visit = visit or next((how for kinds, how in _KINDS if isinstance(v, kinds)), None)
        if visit:
            return (yield from visit(self, label, v))
        if callable(v) and hasattr(v, "__wrapped__"):
            return ["wrapper", (yield ".__wrapped__", v.__wrapped__)]
        return (yield from self._object(label, v))

    def _plain(self, label: str, v: Any) -> Visit:
        more = getattr(v, "__dict__", None)  # of a subclass
        return [type(v).__name__, repr(v), *([(yield "", more)] if more else [])]

    def _text(self, label: str, v: str) -> Visit:
        # The name of a file stands for what the file holds.
        if held := _named_file(v):
            return ["file", held]
        return [type(v).__name__, v]
        yield

    def _path(self, label: str, v: PurePath) -> Visit:
        return ["path", _file(v) or str(v)]
        yield

    def _array(self, label: str, v: np.ndarray) -> Visit:
        if v.dtype.hasobject:
            return ["array", str(v.shape), (yield "", v.tolist())]
        masked = (yield ".mask", np.ma.getmaskarray(v)) if isinstance(v, np.ma.MaskedArray) else ""
        data = np.ascontiguousarray(v)
        return ["array", v.dtype.str, str(v.shape), masked, _bytes(data)]

    def _tensor(self, label: str, v: torch.Tensor) -> Visit:
        about = ["tensor", str(v.dtype), str(tuple(v.shape)), str(v.requires_grad)]
        about += [(yield "", vars(v))] if vars(v) else []
        if v.layout != torch.strided or v.is_meta or v.is_quantized:
            state = None if v.is_meta else v.to_dense() if not v.is_quantized else v.dequantize()
            return [*about, str(v.layout), (yield "", state)]
        flat = v.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return [*about, _bytes(flat.view(torch.uint8).numpy())]

    def _list(self, label: str, v: Any) -> Visit:
        out = [type(v).__name__]
        for i, child in enumerate(v):
            out.append((yield f"[{i}]" if label else "", child))
        return out

    def _dict(self, label: str, v: dict) -> Visit:
        out = [type(v).__name__]
        for key, child in list(v.items()):
            out += [(yield "", key), (yield f"[{key!r:.40}]", child)]
        return out

    def _set(self, label: str, v: Any) -> Visit:
        found = []
        for child in v:
            found.append((yield "{}", child))
        return [type(v).__name__, *sorted(found)]

    def _tool(self, label: str, v: Any) -> Visit:
        return ["tool", type(v).__name__]
        yield

    def _stream(self, label: str, v: io.IOBase) -> Visit:
        if v not in (sys.stdin, sys.stdout, sys.stderr) and not v.closed and v.readable():
            self._has_none(label, v)
        return ["stream"]
        yield

    def _holder(self, label: str, v: Any) -> Visit:
        # What refers to a value, or has one for each thread.
        held = v.get(None) if isinstance(v, contextvars.ContextVar) else None
        held = v() if isinstance(v, weakref.ref) else held
        return ["holder", (yield "", vars(v) if isinstance(v, threading.local) else held)]

    def _partial(self, label: str, v: functools.partial) -> Visit:
        args, words = (yield "(args)", v.args), (yield "(keywords)", v.keywords)
        return ["partial", (yield "", v.func), args, words]

    def _bound(self, label: str, v: types.MethodType) -> Visit:
        if any(v.__self__ is one for one in GLOBAL):
            return ["global", v.__name__]
        return ["bound", (yield "", v.__func__), (yield ".__self__", v.__self__)]

    def _builtin(self, label: str, v: Any) -> Visit:
        of = getattr(v, "__self__", None)
        name = [str(getattr(v, "__module__", "")), getattr(v, "__qualname__", repr(type(v)))]
        known = of is None or isinstance(of, types.ModuleType | type)
        known = known or any(of is one for one in GLOBAL)
        return ["builtin", *name, "" if known else (yield ".__self__", of)]

    def _descriptor(self, label: str, v: Any) -> Visit:
        names = ("fget", "fset", "func", "__func__")
        inner = [f for n in names if (f := getattr(v, n, None)) is not None]
        return [type(v).__name__, (yield "", inner)]

    def _function(self, label: str, v: types.FunctionType) -> Visit:
        out = ["function", str(v.__module__), v.__qualname__]
        ours = not self.reader.foreign(v)
        if ours and "<locals>" not in v.__qualname__:
            return out
        cells = [_cell(cell) for cell in v.__closure__ or ()]
        for name, held in zip(v.__code__.co_freevars, cells, strict=True):
            out.append((yield f"{label and '.'}{name}", held))
        given = (v.__defaults__, v.__kwdefaults__)
        out.append((yield "(defaults)", given))
        if ours:
            return out
        out.append(self.reader.code(v))
        if vars(v):
            out.append((yield "", vars(v)))
        read = list(self._read(v))
        out += _named(v, [*cells, *_flat(given), *(value for _, value in read)])
        for name, value in read:
            out += [name, (yield f"{label and '.'}{name}", value)]
        return out

    def _read(self, fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
        # The global names that a function's code loads, and their values; of foreign modules what
        # it takes from them.
        names, space = _loads(fn.__code__), fn.__globals__
        found = [(n, space[n]) for n in sorted(names.globals) if n in space]
        found += [(n, sys.modules[n]) for n in sorted(names.imports) if n in sys.modules]
        taken = sorted(names.every)
        modules: list[types.ModuleType] = []  # they may name each other
        while found:
            name, value = found.pop(0)
            if isinstance(value, types.ModuleType) and self.reader.foreign(value):
                if value not in modules:
                    modules.append(value)
                    found += [(f"{name}.{n}", vars(value)[n]) for n in taken if n in vars(value)]
            elif not isinstance(value, types.ModuleType):
                yield name, value

    def _class(self, label: str, v: type) -> Visit:
        out = ["class", v.__module__, v.__qualname__]
        if not self.reader.foreign(v):
            return out
        out.append(self.reader.code(v))
        for base in (*v.__mro__[1:], type(v)):
            out.append((yield "", base))
        for name, value in sorted(vars(v).items()):
            dunder = name.startswith("__") and not inspect.isroutine(value)
            if (not dunder and name != "_abc_impl") or name == "__dataclass_fields__":
                out += [name, (yield f".{name}", value)]
        return out

    def _object(self, label: str, v: Any) -> Visit:
        # As pickle sees it.
        kind = type(v)
        if kind.__module__.partition(".")[0] in TOOL_MODULES:
            return ["tool", kind.__qualname__]
        try:
            known = copyreg.dispatch_table.get(kind)
            made = known(v) if known else v.__reduce_ex__(4)
        except Exception:  # anything: what an object does here is its own
            self._has_none(label, v)
            return ["opaque", kind.__module__, kind.__qualname__]
        out = ["object", (yield "", kind)]
        if isinstance(made, str):
            return [*out, made]
        parts: tuple = (*made, None, None, None)  # type: ignore[misc]
        _, args, state, items, pairs = parts[:5]
        args = tuple(a for a in args if a is not kind)
        for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
            named = dict(sorted(part.items(), key=str)) if type(part) is dict else part
            for name, value in named.items() if type(named) is dict else [("state", named)]:
                out += [str(name), (yield f".{name}", value)]
        out.append((yield "", args))
        out.append((yield "", list(items or ())))
        return [*out, (yield "", list(pairs or ()))]

    def _has_none(self, label: str, v: Any) -> None:
        self.opaque.append(f"{label.lstrip('.') or 'a value'} ({type(v).__name__})")


_EXACT: dict[type, Callable[..., Visit]] = {
    str: _Walk._text,
    list: _Walk._list,
    tuple: _Walk._list,
    dict: _Walk._dict,
    types.MappingProxyType: _Walk._dict,
    set: _Walk._set,
    frozenset: _Walk._set,
}
_KINDS: list[tuple[Any, Callable[..., Visit]]] = [
    (PLAIN, _Walk._plain),
    (PurePath, _Walk._path),
    (np.ndarray, _Walk._array),
    (torch.Tensor, _Walk._tensor),
    (TOOLS, _Walk._tool),
    (io.IOBase, _Walk._stream),
    ((threading.local, weakref.ref, contextvars.ContextVar), _Walk._holder),
    (functools.partial, _Walk._partial),
    (types.MethodType, _Walk._bound),
    (types.FunctionType, _Walk._function),
    (type, _Walk._class),
    ((types.BuiltinFunctionType, types.MethodWrapperType, np.ufunc), _Walk._builtin),
    ((types.WrapperDescriptorType, types.MethodDescriptorType), _Walk._builtin),
    ((property, staticmethod, classmethod, functools.cached_property), _Walk._descriptor),
]


def _bytes(a: np.ndarray) -> str:
    return hashlib.sha256(a.reshape(-1).view(np.uint8).data).hexdigest()


def _file(path: Any) -> str | None:
    try:
        if not os.path.isfile(path):  # a device or pipe need not end
            return None
        return sums.file_digest(path)
    except (OSError, ValueError):
        return None


def _named_file(text: str, folder: str = "") -> str | None:
    # What the file holds that a text names, if it names one.
    a_name = len(text) < 1024 and (os.path.splitext(text)[1] or os.sep in text)
    return _file(os.path.join(folder, text)) if a_name else None


def _named(fn: types.FunctionType, read: list[Any]) -> list[str]:
    # What a function that reads these values names beside: files in the current folder, beside its
    # module and in folders that it reads; variables of the environment, if it looks there.
    texts = sorted(_texts(fn.__code__).union(v for v in read if isinstance(v, str)))
    home = getattr(sys.modules.get(fn.__module__), "__file__", None)
    folders = {os.path.dirname(home)} if home else set()
    folders |= {str(v) for v in read if isinstance(v, str | PurePath) and os.path.isdir(v)}
    out = [held for text in texts if (held := _named_file(text))]
    for folder in sorted(folders):
        inside = (_named_file(text.lstrip(os.sep), folder) for text in texts)
        out += [held for held in inside if held]
    if not ENVIRONMENT.isdisjoint(_loads(fn.__code__).every):
        out += [f"{text}={os.environ[text]}" for text in texts if text in os.environ]
    return out


def _flat(given: Any) -> list[Any]:
    # The values in a function's defaults.
    first, named = given
    return [*(first or ()), *(named or {}).values()]


def _texts(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return {c for c in code.co_consts if isinstance(c, str)}.union(*map(_texts, inner))


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


class _Loads(NamedTuple):
    # The names that code loads, and the code within it.
    globals: frozenset[str]
    imports: frozenset[str]
    attributes: frozenset[str]  # but for those of `self`, which is no module

    @property
    def every(self) -> frozenset[str]:
        return self.globals | self.imports | self.attributes


@functools.lru_cache(4096)
def _loads(code: types.CodeType) -> _Loads:
    found: tuple[set[str], set[str], set[str]] = set(), set(), set()
    of: Any = None  # whose attribute the next one is
    for step in dis.get_instructions(code):
        kind = next((i for i, how in enumerate(LOADING) if step.opname in how), None)
        if kind is not None and not (kind == ATTRIBUTE and of in OWN):
            found[kind].add(step.argval)
        if kind != ATTRIBUTE and step.opname.startswith("LOAD_"):  # Python 3.13 loads two at once
            of = step.argval[-1:] if isinstance(step.argval, tuple) else (step.argval,)
    parts = [_Loads(*map(frozenset, found))]
    parts += [_loads(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return _Loads(*(frozenset().union(*kinds) for kinds in zip(*parts, strict=True)))
