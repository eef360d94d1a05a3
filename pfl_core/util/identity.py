"""The code behind a run that is not pfl_core's, as one digest.

That code is plugins, registered functions, and methods that a notebook defines. What counts:

- of a module, the syntax tree, without comments and docstrings, of its file as it was loaded, and
  of every module below the file's folder that it imports;
- of an installed package, its version;
- of what a notebook or a script defines, the definition and what that refers to;
- what all of these read, by content: closures, defaults, class attributes, global values, and
  files whose path they hold (see content.py).
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import hashlib
import importlib.util
import inspect
import json
import linecache
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pfl_core.util import content
from pfl_core.util.paths import PACKAGE

OURS = ("pfl_core", "pfl_papers")  # of one distribution: the same version, the same revisions
INSTALLED = {"site-packages", "dist-packages"}
# A notebook's or script's own namespace, and its name in a worker process.
MAIN = ("__main__", "__mp_main__")
# {module: (its spec, which a reload makes anew; its source when it was loaded)}
_loaded: dict[str, tuple[Any, str]] = {}


def is_ours(thing: Any) -> bool:
    """Whether something is our own: then its `revision` counts, and not its source."""
    return _home(thing).partition(".")[0] in OURS


def in_main(thing: Any) -> bool:
    """Whether a notebook or the script that runs defines it: worker processes do not find it."""
    return _home(thing) in MAIN


def module_of(thing: Any) -> str:
    """The name of the module that defines a class or a function."""
    return _home(thing)


def note(thing: Any) -> None:
    """Keep the source of what is being registered, before its file can change."""
    if not is_ours(thing):
        _text_of(_inner(thing), {})


def digest(*things: Any) -> str:
    """sha256 (hex) of the foreign code of classes and functions, and of all that it reads.

    "" if all is ours.

    Raises
    ------
    ValueError
        For a generator of random numbers in it.

    Warns
    -----
    UserWarning
        It names what has no content that could be compared.
    """
    hashed, opaque, _ = _read(things)
    if opaque:
        warnings.warn(
            f"{', '.join(dict.fromkeys(opaque))}: a run's id does not see what code reads from it; "
            "raise the method's `revision` where that changes",
            stacklevel=2,
        )
    return hashed


def reads(*things: Any) -> dict[str, list[str]]:
    """{what: digests} of what the foreign code of classes and functions reads; {} if all is ours.

    Raises
    ------
    ValueError
        For a generator of random numbers in it.
    """
    foreign = [t for t in things if not is_ours(t)]
    return content.parts(foreign, content.Reader(_is_foreign, lambda thing: "")) if foreign else {}


def contents(value: Any) -> str:
    """A digest of a value by content; its code is not looked into.

    Raises
    ------
    ValueError
        For a generator of random numbers in it.
    """
    return content.digest([value], content.Reader(lambda thing: False, str))[0]


NOTHING = set(content.parts([None], content.Reader(bool, str))[""])  # the digest of None


def sources(*things: Any) -> str:
    """The text of the foreign code that `digest` hashes: files and definitions, one by one."""
    _, _, texts = _read(things)
    parts = [f"# ---- {name}\n{text.strip()}\n" for name, text in texts.items() if text.strip()]
    return "\n\n".join(parts)


def _read(things: tuple[Any, ...]) -> tuple[str, list[str], dict[str, str]]:
    foreign = [t for t in things if not is_ours(t) or isinstance(t, functools.partial)]
    if not foreign:
        return "", [], {}
    seen: dict[str, str] = {}  # {module or definition: its text}
    reader = content.Reader(_is_foreign, lambda thing: _text_of(thing, seen))
    for thing in foreign:
        _text_of(_inner(thing), seen)
    values, opaque = content.digest(foreign, reader)
    trees = {name: _tree(text) if _parses(text) else text for name, text in seen.items()}
    whole = json.dumps([sorted(trees.items()), values])
    return hashlib.sha256(whole.encode()).hexdigest(), opaque, seen


def _inner(thing: Any) -> Any:
    # The function or class of what can be called.
    while isinstance(thing, functools.partial):
        thing = thing.func
    return thing if hasattr(thing, "__qualname__") else type(thing)


def _is_foreign(thing: Any) -> bool:
    # Whether it is a user's own: neither ours, nor Python's, nor of an installed package.
    home = _home(thing)
    if home.partition(".")[0] in OURS or _standard(home):
        return False
    if home in MAIN:
        return True
    files = (getattr(sys.modules.get(n), "__file__", None) for n in (home, home.partition(".")[0]))
    file = next(filter(None, files), None)
    return home in sys.modules and not (file and INSTALLED & set(Path(file).parts))


def _home(thing: Any) -> str:
    while isinstance(thing, functools.partial):
        thing = thing.func
    if isinstance(thing, ModuleType):
        return thing.__name__
    return getattr(thing, "__module__", None) or type(thing).__module__


def _text_of(thing: Any, seen: dict[str, str]) -> str:
    # A digest of which definition it is; its text, and that of its modules, are put into `seen`.
    home = _home(thing)
    top = home.partition(".")[0]
    if top in OURS or _standard(home):
        return ""
    path = None if home in MAIN else _file(home)
    if path and INSTALLED & set(path.parts):  # a package from an index is what its version says
        version = str(getattr(sys.modules.get(top), "__version__", ""))
        seen[top] = version or _source(home, path)
        return ""
    if path:
        _add_module(home, _root(home, path), seen)
    found = _definition(thing, _source(home, path) if path else None)
    if path is None:
        seen[f"{home}.{thing.__qualname__}"] = found
    return _tree(found) if _parses(found) else found


# -- modules


def _add_module(name: str, root: Path, seen: dict[str, str]) -> None:
    if name in seen:
        return
    path = _file(name)
    if path is None:
        return
    seen[name] = text = _source(name, path)
    for other in _imports(name, path, text):
        if other not in seen and (file := _file(other)) and _below(file, root):
            _add_module(other, root, seen)


def _root(name: str, path: Path) -> Path:
    # The folder of a package's top level; of a file on its own, the folder it lies in.
    if "." not in name:
        return path.parent
    return path.parents[name.count(".") + (path.name == "__init__.py") - 1]


def _below(file: Path, root: Path) -> bool:
    ours = any(file.is_relative_to(PACKAGE.parent / name) for name in OURS)
    return file.is_relative_to(root) and not ours and not INSTALLED & set(file.parts)


def _file(name: str) -> Path | None:
    module, spec = sys.modules.get(name), None
    path = getattr(module, "__file__", None)
    if module is None:
        spec = _spec(name)
        path = spec.origin if spec and spec.has_location else None
    if not path:
        return None
    path = Path(path).resolve()
    return path if path.suffix == ".py" and path.is_file() or name in _loaded else None


def _spec(name: str) -> ModuleSpec | None:
    # Of a module that is not imported. `find_spec` would import the packages that it is in.
    spec, above = None, ""
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        for part in name.split("."):
            if not above:
                spec = importlib.util.find_spec(part)
            else:
                places = spec.submodule_search_locations if spec else None
                spec = PathFinder.find_spec(f"{above}.{part}", places) if places else None
            above = f"{above}.{part}".lstrip(".")
        return spec
    return None


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
    return hashlib.sha256(ast.unparse(_bare(ast.parse(text))).encode()).hexdigest()


@functools.lru_cache(512)
def _parses(text: str) -> bool:
    with contextlib.suppress(SyntaxError, ValueError):
        ast.parse(text)
        return True
    return False


def _bare(tree: ast.AST) -> ast.AST:
    # Without docstrings; comments and layout are not in a tree.
    tree = copy.deepcopy(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
    return tree


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


# -- definitions


def _definition(thing: Any, text: str | None) -> str:
    # The text of a class or function; of one that has none, as in `python -c`, its compiled form.
    files = dict.fromkeys(c.co_filename for c in _codes(thing))
    texts = [text] if text else ["".join(linecache.getlines(file)) for file in files]
    for whole in texts:
        found = [part for part in _definitions(whole) if _defines(part, thing)]
        if len(found) == 1:
            return found[0].text
    return repr(sorted(_compiled(thing)))


class _Part(NamedTuple):
    kind: type  # of its node
    name: str
    line: int  # the first one, of its decorators if it has any
    text: str  # without docstrings and comments


@functools.lru_cache(64)
def _definitions(text: str) -> list[_Part]:
    # All classes, functions and lambdas of a file or cell.
    out = []
    for node in ast.walk(ast.parse(text) if _parses(text) else ast.Module([], [])):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            lines = [node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]
            name = getattr(node, "name", "<lambda>")
            out.append(_Part(type(node), name, min(lines), ast.unparse(_bare(node))))
    return out


def _defines(part: _Part, thing: Any) -> bool:
    if inspect.isclass(thing):
        return part.kind is ast.ClassDef and part.name == thing.__name__
    code = getattr(inspect.unwrap(thing), "__code__", None)
    return code is not None and (part.name, part.line) == (code.co_name, code.co_firstlineno)


def _codes(thing: Any) -> Iterator[Any]:
    values = vars(thing).values() if inspect.isclass(thing) else [thing]
    for v in values:
        for f in (v, getattr(v, "__func__", None), getattr(v, "fget", None)):
            if code := getattr(f, "__code__", None):
                if not code.co_qualname.startswith("__create_fn__"):  # what dataclasses write
                    yield code


def _standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


def _compiled(thing: Any) -> Iterator[str]:
    for code in _codes(thing):
        yield _form(code)


def _form(code: Any) -> str:
    consts = [_form(c) if hasattr(c, "co_code") else repr(c) for c in code.co_consts]
    return repr((code.co_name, code.co_code, code.co_names, consts))
