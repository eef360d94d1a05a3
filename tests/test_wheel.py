"""What is installed without the repository: the built wheel, in a folder of its own, called from another one."""

import os
import subprocess
import sys
import tomllib
import zipfile
from shutil import copy, copytree, ignore_patterns, rmtree

import pytest

from pfl_core.util.paths import CHECKOUT
from tests.house import FILES, at_import, module, named

PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
IMPORTED_AS = {"pillow": "PIL", "scikit-learn": "sklearn"}  # else as the distribution is called
PACKAGES = ("pfl_core", "pfl_papers")
KINDS = {".py", ".pyi", ".typed", ".csv", ".html"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built without network from a copy, so that nothing is left in the repository."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy(CHECKOUT / name, source)
    for name in PACKAGES:
        copytree(CHECKOUT / name, source / name, ignore=ignore_patterns("__pycache__"))
    pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "-q"]
    build = ["wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out)]
    subprocess.run([*pip, *build], cwd=source, check=True)
    (file,) = out.glob("*.whl")
    install = ["install", "--no-deps", "--no-index", "--target", str(out / "site"), str(file)]
    subprocess.run([*pip, *install], check=True)
    return file


@pytest.fixture
def call(wheel, tmp_path):
    """Calls a command from a folder that holds nothing, where the wheel's package is found first."""
    site = wheel.parent / "site"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PFL_", "PYTEST"))}
    env |= {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", "PFL_OFFLINE": "1"}

    def run(*command: str) -> subprocess.CompletedProcess:
        words = [str(site / "bin" / "pfl") if word == "pfl" else word for word in command]
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)

    return run


@pytest.mark.slow
def test_the_package_is_in_it_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        sizes = {i.filename: i.file_size for i in archive.infolist()}
    about = {name for name in sizes if ".dist-info/" in name}
    ours = {
        file.relative_to(CHECKOUT).as_posix()
        for name in PACKAGES
        for file in (CHECKOUT / name).rglob("*")
        if file.suffix in KINDS
    }
    assert sizes.keys() - about == ours and {"pfl_core/py.typed", "pfl_core/__init__.pyi"} <= ours
    held = ("fedaghn.csv", "flayer.csv", "fedper.claims.csv", "flayer.claims.csv")
    assert {f"pfl_papers/papers/published/{file}" for file in held} <= ours
    assert max(sizes.values()) < 100_000 and wheel.stat().st_size < 1_000_000


@pytest.mark.parametrize("path", FILES, ids=named)
def test_what_is_imported_is_installed_without_any_extra(path):
    names = {line.partition(">")[0] for line in PROJECT["dependencies"]}
    brought = {IMPORTED_AS.get(name, name).replace("-", "_") for name in names}
    late = (
        {"IPython", "ipywidgets"} if module(path) == "pfl_papers.explore" else set()
    )  # says what to install
    assert at_import(path) - set(sys.stdlib_module_names) - {*PACKAGES} <= brought | late


@pytest.mark.slow
def test_the_command_lists_methods_without_torch(call):
    done = call("pfl", "list", "methods")
    assert done.stderr == "" and "\nfedper               Personal head, shared base" in done.stdout
    code = "import sys; from pfl_core.__main__ import main; main(['list', 'methods', 'datasets'])"
    heavy = "('torch', 'pandas', 'scipy', 'sklearn', 'matplotlib', 'torchvision')"
    done = call(sys.executable, "-c", f"{code}; print([m for m in {heavy} if m in sys.modules])")
    assert done.stdout.splitlines()[-1] == "['pandas']", done.stderr  # of shown data sets


@pytest.mark.slow
def test_the_command_line_says_it_is_pfl(call):
    assert call("pfl", "--help").stdout.startswith("usage: pfl [-h] WORD")
    wrong = call("pfl", "lst")
    assert wrong.returncode == 2 and "pfl: error: argument WORD" in wrong.stderr


HIDDEN = r"""
import contextlib, io, sys
from pathlib import Path

for name in ("IPython", "ipywidgets", "jupyterlab", "nbconvert", "nbformat", "papermill", "psutil"):
    sys.modules[name] = None
DRAW = {"matplotlib", "seaborn"}  # they take seconds to import, which who draws nothing need not wait for


def said(main, words, code=0):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(words.split()) == code, (words, out.getvalue(), err.getvalue())
    return (out if code == 0 else err).getvalue()
"""

# What a user does with the library alone; notebooks' packages are hidden from it, pfl_papers is deleted.
ALONE = r"""
sys.modules["pfl_papers"] = None  # an editable install would lead to the checkout's
import pfl_core

assert "torch" not in sys.modules
from pfl_core import Experiment, grid, plot, run, sweep
from pfl_core.__main__ import main

assert Path(pfl_core.__file__).is_relative_to(sys.argv[1]), pfl_core.__file__
assert set(pfl_core.__all__) <= set(dir(pfl_core)) and all(hasattr(pfl_core, n) for n in pfl_core.__all__)
base = Experiment(clients=3, model="mlp", rounds=2, max_samples=20)
result = run(base.but(method="fedper"))
assert result.ok and result.folder == Path.cwd() / "runs" / "store" / result.id
assert "torch._dynamo" not in sys.modules  # torch's compiler takes seconds to import
assert sys.modules.keys().isdisjoint(DRAW)
rows = sweep(grid(base, {"FedAvg": {"method": "fedavg"}, "FedPer": {"method": "fedper"}}))
assert set(rows.row) == {"FedAvg", "FedPer"}
plot(result).savefig("curves.png")
assert result.id in said(main, f"show {result.id}")
assert said(main, "list runs").count("fedper on digits") == 1
assert "2 moved to" in said(main, "prune --yes")
print("all done", sorted(p.name for p in Path.cwd().iterdir()))
"""

# What is there of the papers without the repository.
PAPERS = r"""
from pfl_papers.__main__ import main
from pfl_papers.papers.base import PAPERS, paper

assert len([paper(name) for name in PAPERS]) == 5
assert sys.modules.keys().isdisjoint(DRAW | {"scipy.stats", "sklearn"})
assert said(main, "plan fedper --profile smoke --artefacts fig2").startswith("   ")
assert sys.modules.keys().isdisjoint(DRAW)
for paper, known in (("pfedhn", "table1"), ("pfedla", "table1"), ("flayer", "table1"), ("fedaghn", "table1")):
    assert "published, not run" in said(main, f"compare {paper} {known}"), paper
assert "\\toprule" in said(main, "compare fedaghn table1 --latex")
assert said(main, "compare fedper").count("not run") >= 24
for words in ("report", "publish fedper"):
    message = said(main, words, 1)
    assert "needs the repository of pfl_core" in message and message.count("\n") == 1, message
assert "methods-table" in said(main, "compare methods", 1)
try:
    import pfl_papers.explore.widgets
except ImportError as error:
    assert 'pip install "pfl-core[notebooks]"' in str(error), error
else:
    raise AssertionError("sliders without ipywidgets")
print("all done", sorted(p.name for p in Path.cwd().iterdir()))
"""


@pytest.mark.slow
def test_papers_work_from_another_folder_without_the_repository(call, wheel):
    done = call(sys.executable, "-c", HIDDEN + PAPERS, str(wheel.parent / "site"))
    assert done.stdout == "all done []\n", done.stderr


@pytest.mark.slow
def test_the_library_works_without_papers_and_the_repository(call, wheel):
    rmtree(wheel.parent / "site" / "pfl_papers")
    done = call(sys.executable, "-c", HIDDEN + ALONE, str(wheel.parent / "site"))
    assert done.stdout == "all done ['curves.png', 'runs']\n", done.stderr
