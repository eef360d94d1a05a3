"""The shape of the library: imports point down only, and optional packages are imported late."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

import pfl_core
from tools.pages import code_lines

PACKAGE = Path(pfl_core.__file__).parent
ROOMS = [  # from the bottom up: a room takes from those above its line in this list, and from itself
    "util",
    "stacked",
    "models data",
    "anatomy",
    "methods",
    "engine",
    "experiments",
    "analysis extras",
    "papers",
    "explore",
    "__init__ __main__",
]
RANK = {name: rank for rank, line in enumerate(ROOMS) for name in line.split()}
LATE = {"torchvision", "datasets", "ray", "flwr", "tensorboard", "ipywidgets", "IPython"}

# All files, however deep; a room's face has no code, but a package inside a room may.
FILES = sorted(
    p
    for p in PACKAGE.rglob("*.py")
    if p.name != "__init__.py" or len(p.relative_to(PACKAGE).parts) != 2
)


def module(path: Path) -> str:
    """The name by which `RANK` knows a file: its own, or that of its package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Dotted names imported or reached anywhere in a file, relative ones written out: `from . import data` is
    pfl_core.data.pools, and so is `pfl_core.data.pools` after a plain `import pfl_core`."""
    package = ["pfl_core", *path.relative_to(PACKAGE).parent.parts]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "pfl_core"
        ):
            names.add(f"pfl_core.{node.attr}")
    return names


def ours(path: Path) -> set[str]:
    """The modules of pfl_core that a file imports; the package itself counts as __init__."""
    found = {name.split(".")[1] for name in imported(path) if name.startswith("pfl_core.")}
    return {name if name in RANK else "__init__" for name in found - {"__version__", "__file__"}}


def at_import(path: Path) -> set[str]:
    """Top-level packages imported when the file is imported: not inside a function."""
    body = list(ast.parse(path.read_text(encoding="utf-8")).body)
    names = set()
    for node in body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body += ast.iter_child_nodes(node)
    return names


def modules(path: Path) -> set[str]:
    """The files of pfl_core that a file imports, "engine.simulate", "analysis.plots.style"."""
    known = {dotted(p) for p in FILES}
    parts = [
        name.removeprefix("pfl_core.").split(".")
        for name in imported(path)
        if name.startswith("pfl_core.")
    ]
    heads = (".".join(p[:n]) for p in parts for n in range(1, len(p) + 1))
    return {found for found in heads if found in known and found != dotted(path)}


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def test_every_file_is_in_a_room():
    assert {module(path) for path in FILES} <= RANK.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    mine = module(path)
    assert {name for name in ours(path) if name != mine and RANK[name] >= RANK[mine]} == set()


def test_there_is_no_circle():
    # A package's face takes from its files, and a file may name its package on the way to another.
    below = {dotted(path): modules(path) for path in FILES}
    below = {n: {f for f in found if not n.startswith(f"{f}.")} for n, found in below.items()}
    assert "engine.engine" in below["engine.simulate"]
    assert "analysis.plots.files" in below["analysis.plots.style"]
    while ends := [name for name, found in below.items() if not found & below.keys()]:
        for name in ends:
            del below[name]
    assert below == {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_take_only_what_another_names(path):
    rooms = {
        room.name: importlib.import_module(f"pfl_core.{room.name}")
        for room in PACKAGE.iterdir()
        if room.is_dir()
    }
    taken = [name.split(".") for name in modules(path) if "." in name]
    assert [t for t in taken if t[0] != module(path) and t[1] not in rooms[t[0]].__all__] == []


def test_rooms_say_what_they_are_for():
    for room in {module(path) for path in FILES if path.parent != PACKAGE}:
        assert importlib.import_module(f"pfl_core.{room}").__doc__


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_optional_packages_are_imported_late(path):
    late = set() if module(path) in ("extras", "explore") else LATE
    assert at_import(path) & late == set()


def test_analysis_sees_no_tensors():
    assert [
        path.name for path in FILES if module(path) == "analysis" and "torch" in at_import(path)
    ] == []


@pytest.mark.parametrize("name", ["runner", "notebooks", "gates", "clean"])
def test_run_all_needs_nothing_before_it_runs_something(name):
    assert at_import(PACKAGE.parent / "tools" / f"{name}.py") <= set(sys.stdlib_module_names) | {
        "tools"
    }


def test_code_lines():
    source = '"""doc\nof two lines"""\n\nx = """a\nb"""  # one\n# two\ndef f():\n    "doc"\n    return (1,\n        2)\n'
    assert code_lines(source) == 5


def test_imports_are_seen_in_every_form():
    assert {"readers", "checks"} <= {
        n.split(".")[1] for n in modules(PACKAGE / "data" / "pools.py")
    }
    assert ours(PACKAGE / "engine" / "simulate.py") >= {"engine", "data", "methods", "stacked"}
