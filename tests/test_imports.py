"""The shape of the library: imports point down only, and optional packages are imported late."""

import importlib
import sys

import pytest

from tests.house import (
    CORE,
    FILES,
    HOUSE,
    PAPERS,
    RANK,
    at_import,
    dotted,
    module,
    modules,
    named,
    ours,
)
from tools.pages import code_lines

LATE = {"torchvision", "datasets", "ray", "flwr", "tensorboard", "ipywidgets", "IPython"}


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
