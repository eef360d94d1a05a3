"""The shape of the library: imports point down only, and optional packages are imported late."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

import pfl_core
import pfl_papers
from tools.pages import code_lines

CORE, PAPERS = (Path(package.__file__).parent for package in (pfl_core, pfl_papers))
HOUSE = CORE.parent
ROOMS = [  # from the bottom up: a room takes from those above its line in this list, and from itself
    "pfl_core.util",
    "pfl_core.stacked",
    "pfl_core.models pfl_core.data",
    "pfl_core.anatomy",
    "pfl_core.methods",
    "pfl_core.engine",
    "pfl_core.experiments",
    "pfl_core.analysis pfl_core.extras",
    "pfl_core.__init__ pfl_core.__main__",
    "pfl_papers.places",
    "pfl_papers.evidence",
    "pfl_papers.papers",
    "pfl_papers.compare",
    "pfl_papers.bench",
    "pfl_papers.notebook",
    "pfl_papers.explore",
    "pfl_papers.__init__ pfl_papers.__main__",
]
RANK = {name: rank for rank, line in enumerate(ROOMS) for name in line.split()}
LATE = {"torchvision", "datasets", "ray", "flwr", "tensorboard", "ipywidgets", "IPython"}

# All files, however deep; a room's face has no code, but a package inside a room may.
FILES = sorted(
    p
    for package in (CORE, PAPERS)
    for p in package.rglob("*.py")
    if p.name != "__init__.py" or len(p.relative_to(package).parts) != 2
)


def module(path: Path) -> str:
    """The room of a file: the name by which `RANK` knows it."""
    return ".".join(path.relative_to(HOUSE).with_suffix("").parts[:2])


def imported(path: Path) -> set[str]:
    """Dotted names imported or reached anywhere in a file, relative ones written out: `from . import data` is
    pfl_core.data.pools, and so is `pfl_core.data.pools` after a plain `import pfl_core`."""
    package = [*path.relative_to(HOUSE).parent.parts]
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
            and node.value.id in ("pfl_core", "pfl_papers")
        ):
            names.add(f"{node.value.id}.{node.attr}")
    return {name for name in names if name.partition(".")[0] in ("pfl_core", "pfl_papers")}


def ours(path: Path) -> set[str]:
    """The rooms that a file imports from; a package itself counts as its __init__."""
    found = {tuple(name.split(".")[:2]) for name in imported(path)}
    heads = {".".join(p) if ".".join(p) in RANK else f"{p[0]}.__init__" for p in found}
    return heads - {module(path)}


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
    """The files of ours that a file imports, "pfl_core.analysis.plots.style"."""
    known = {dotted(p) for p in FILES}
    parts = [name.split(".") for name in imported(path)]
    heads = (".".join(p[:n]) for p in parts for n in range(1, len(p) + 1))
    return {found for found in heads if found in known and found != dotted(path)}


def dotted(path: Path) -> str:
    parts = path.relative_to(HOUSE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def named(path: Path) -> str:
    return path.relative_to(HOUSE).as_posix()


def test_every_file_is_in_a_room():
    assert {module(path) for path in FILES} <= RANK.keys()


@pytest.mark.parametrize("path", FILES, ids=named)
def test_imports_point_down(path):
    assert {name for name in ours(path) if RANK[name] >= RANK[module(path)]} == set()


def test_the_library_knows_nothing_of_papers():
    """No import at any depth, and no way by a name either."""
    texts = {named(p): p.read_text(encoding="utf-8") for p in sorted(CORE.rglob("*.py"))}
    assert {n for n, text in texts.items() if "pfl_papers" in text} == {"pfl_core/util/identity.py"}


def test_there_is_no_circle():
    # A package's face takes from its files, and a file may name its package on the way to another.
    below = {dotted(path): modules(path) for path in FILES}
    below = {n: {f for f in found if not n.startswith(f"{f}.")} for n, found in below.items()}
    assert "pfl_core.engine.engine" in below["pfl_core.engine.simulate"]
    assert "pfl_core.analysis.plots.files" in below["pfl_core.analysis.plots.style"]
    while ends := [name for name, found in below.items() if not found & below.keys()]:
        for name in ends:
            del below[name]
    assert below == {}


def rooms() -> dict[str, object]:
    inside = [room for package in (CORE, PAPERS) for room in package.iterdir() if room.is_dir()]
    named = [".".join(room.parts[-2:]) for room in inside if (room / "__init__.py").exists()]
    return {name: importlib.import_module(name) for name in named}


@pytest.mark.parametrize("path", FILES, ids=named)
def test_rooms_take_only_what_another_names(path):
    known = rooms()
    taken = [
        (*name.split(".")[:2], name.split(".")[2]) for name in modules(path) if name.count(".") > 1
    ]
    taken = [(f"{a}.{b}", file) for a, b, file in taken]
    assert [t for t in taken if t[0] != module(path) and t[1] not in known[t[0]].__all__] == []


def test_rooms_say_what_they_are_for():
    assert len(rooms()) > 10 and all(room.__doc__ for room in rooms().values())


@pytest.mark.parametrize("path", FILES, ids=named)
def test_optional_packages_are_imported_late(path):
    late = set() if module(path) in ("pfl_core.extras", "pfl_papers.explore") else LATE
    assert at_import(path) & late == set()


def test_analysis_sees_no_tensors():
    assert [
        path.name
        for path in FILES
        if module(path) == "pfl_core.analysis" and "torch" in at_import(path)
    ] == []


@pytest.mark.parametrize("name", ["runner", "notebooks", "gates", "clean"])
def test_run_all_needs_nothing_before_it_runs_something(name):
    assert at_import(HOUSE / "tools" / f"{name}.py") <= set(sys.stdlib_module_names) | {"tools"}


def test_code_lines():
    source = '"""doc\nof two lines"""\n\nx = """a\nb"""  # one\n# two\ndef f():\n    "doc"\n    return (1,\n        2)\n'
    assert code_lines(source) == 5


def test_imports_are_seen_in_every_form():
    read = modules(CORE / "data" / "pools.py")
    assert {"pfl_core.data.readers", "pfl_core.util.checks"} <= read
    below = {f"pfl_core.{room}" for room in ("data", "methods", "stacked")}
    assert ours(CORE / "engine" / "simulate.py") >= below
