"""The code behind a run that is not pfl_core's, as one digest.

That code is plugins, registered functions, and methods that a notebook defines. What counts:

- of a module, the syntax tree, without comments and docstrings, of its file as it was loaded, and
  of every module below the file's folder that it imports;
- of an installed package, its version;
- of what a notebook or a script defines, the definition and what that refers to.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import json
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from pfl_core.util.paths import PACKAGE

INSTALLED = {"site-packages", "dist-packages"}
# A notebook's or script's own namespace, and its name in a worker process.
MAIN = ("__main__", "__mp_main__")
# {module: (its spec, which a reload makes anew; its source when it was loaded)}
_loaded: dict[str, tuple[Any, str]] = {}


def is_ours(thing: Any) -> bool:
    """Whether something is pfl_core's own: then its `revision` counts, and not its source."""
    return _home(thing).partition(".")[0] == "pfl_core"


def in_main(thing: Any) -> bool:
    """Whether a notebook or the script that runs defines it: worker processes do not find it."""
    return _home(thing) in MAIN


def note(thing: Any) -> None:
    """Keep the source of what is being registered, before its file can change."""
    if not is_ours(thing):
        digest(thing)


def digest(*things: Any) -> str:
    """sha256 (hex) of the foreign code of classes, functions and modules; "" if all is ours."""
    seen: dict[str, str] = {}
    for thing in things:
        _add(thing, seen)
    return hashlib.sha256(json.dumps(sorted(seen.items())).encode()).hexdigest() if seen else ""


def _home(thing: Any) -> str:
    while isinstance(thing, functools.partial):
        thing = thing.func
    if isinstance(thing, ModuleType):
        return thing.__name__
    return getattr(thing, "__module__", None) or type(thing).__module__


def _add(thing: Any, seen: dict[str, str]) -> None:
    while isinstance(thing, functools.partial):
        seen["partial"] = seen.get("partial", "") + repr((thing.args, thing.keywords))
        thing = thing.func
    if not isinstance(thing, ModuleType) and not hasattr(thing, "__qualname__"):
        thing = type(thing)  # an object that can be called
    home = _home(thing)
    top = home.partition(".")[0]
    if top == "pfl_core" or _standard(home):
        return
    if home not in MAIN and (path := _file(home)):
        if INSTALLED & set(path.parts):  # a package from an index is what its version says
            version = str(getattr(sys.modules.get(top), "__version__", ""))
            seen[top] = version or _tree(_source(home, path))
        else:
            _add_module(home, _root(home, path), seen)
    elif inspect.isclass(thing):
        for base in thing.__mro__:
            if base.__module__ == home:
                _add_definition(base, seen)
    else:
        _add_definition(thing, seen)


# -- modules


def _add_module(name: str, root: Path, seen: dict[str, str]) -> None:
    if name in seen:
        return
    path = _file(name)
    if path is None:
        return
    text = _source(name, path)
    seen[name] = _tree(text)
    for other in _imports(name, path, text):
        if other not in seen and (file := _file(other)) and _below(file, root):
            _add_module(other, root, seen)


def _root(name: str, path: Path) -> Path:
    # The folder of a package's top level; of a file on its own, the folder it lies in.
    if "." not in name:
        return path.parent
    return path.parents[name.count(".") + (path.name == "__init__.py") - 1]


def _below(file: Path, root: Path) -> bool:
    ours = file.is_relative_to(PACKAGE)
    return file.is_relative_to(root) and not ours and not INSTALLED & set(file.parts)


def _file(name: str) -> Path | None:
    module, spec = sys.modules.get(name), None
    path = getattr(module, "__file__", None)
    if module is None:
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            spec = importlib.util.find_spec(name)
        path = spec.origin if spec and spec.has_location else None
    if not path:
        return None
    path = Path(path).resolve()
    return path if path.suffix == ".py" and path.is_file() or name in _loaded else None


def _source(name: str, path: Path) -> str:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if name in _loaded and spec is not None and _loaded[name][0] is spec:
        return _loaded[name][1]
    text = path.read_text(encoding="utf-8")
    if spec is not None:
        _loaded[name] = spec, text
    return text


@functools.lru_cache(512)
def _tree(text: str) -> str:
    return _plain(ast.parse(text))


def _plain(tree: ast.AST) -> str:
    # Without docstrings; comments and layout are not in a tree.
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


@functools.lru_cache(512)
def _imports(name: str, path: Path, text: str) -> tuple[str, ...]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    out: dict[str, None] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            out |= dict.fromkeys(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, *([base] if base else [])])
            out |= dict.fromkeys([base, *(f"{base}.{a.name}" for a in node.names)])
    return tuple(n for n in out if n)


# -- what a notebook or a script defines


def _add_definition(thing: Any, seen: dict[str, str]) -> None:
    key = f"__main__.{thing.__qualname__}"
    if key in seen:
        return
    seen[key] = ""
    node = _node(thing)
    if node is None:  # no source is kept, as in `python -c`: its compiled form
        seen[key] = hashlib.sha256(repr(sorted(_compiled(thing))).encode()).hexdigest()
        return
    seen[key] = _plain(node)
    space = vars(sys.modules.get(thing.__module__, sys))
    for name in sorted({n.id for n in ast.walk(node) if isinstance(n, ast.Name)}):
        if name in space:
            _add_value(name, space[name], seen)


def _add_value(name: str, value: Any, seen: dict[str, str]) -> None:
    if isinstance(value, ModuleType) or inspect.isclass(value) or inspect.isroutine(value):
        home = _home(value)
        file = None if home in MAIN else _file(home)
        if home in MAIN or file and _below(file, Path(file.anchor)) and not _standard(home):
            _add(value, seen)
    elif isinstance(
        value, bool | int | float | str | bytes | tuple | list | dict | set | frozenset | type(None)
    ):
        seen[f"__main__.{name}"] = repr(value)
    elif hasattr(value, "tobytes") and hasattr(value, "shape"):  # an array
        seen[f"__main__.{name}"] = hashlib.sha256(value.tobytes()).hexdigest()


def _standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


def _node(thing: Any) -> ast.AST | None:
    # The definition's syntax tree, from where Python keeps the text of files and of cells.
    for file in dict.fromkeys(c.co_filename for c in _codes(thing)):
        text = "".join(linecache.getlines(file))
        with contextlib.suppress(SyntaxError):
            for node in ast.walk(ast.parse(text)):
                if _defines(node, thing):
                    return node
    return None


def _defines(node: ast.AST, thing: Any) -> bool:
    if inspect.isclass(thing):
        return isinstance(node, ast.ClassDef) and node.name == thing.__name__
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
        return False
    code = getattr(inspect.unwrap(thing), "__code__", None)
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return code is not None and code.co_firstlineno == first


def _codes(thing: Any) -> Iterator[Any]:
    values = vars(thing).values() if inspect.isclass(thing) else [thing]
    for v in values:
        for f in (v, getattr(v, "__func__", None), getattr(v, "fget", None)):
            if code := getattr(f, "__code__", None):
                if not code.co_filename.startswith("<string"):  # what dataclasses write
                    yield code


def _compiled(thing: Any) -> Iterator[str]:
    for code in _codes(thing):
        yield repr(
            (
                code.co_name,
                code.co_code,
                code.co_names,
                [c for c in code.co_consts if not hasattr(c, "co_code")],
            )
        )
    if inspect.isclass(thing):
        yield from (
            f"{n}={v!r}"
            for n, v in vars(thing).items()
            if isinstance(v, bool | int | float | str | tuple)
        )
