"""The runner and run_all.sh, on tiny notebooks: words, parameters, failures, limits, the cleaner, the install stamp."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import psutil
import pytest

from pfl_papers.papers.base import PAPERS, PROFILES
from tests import conftest
from tools import clean, gates, notebooks, runner

PARAMETERS = """profile: str = "quick"  # size
datasets: list[str] = []
methods: list[str] = []
seeds: list[int] = []
artefacts: list[str] = []
train: bool = False
device: str = "auto\""""
FIGURE = """import os, pathlib
folder = pathlib.Path(os.environ["PFL_RUNS"], "figures", "fedper", f"{profile}-digits")
folder.mkdir(parents=True, exist_ok=True)
(folder / "fig2.png").write_bytes(b"png")
print("train is", train, datasets, os.environ["PFL_HEADLESS"])"""


def make(folder: Path, name: str, *cells: str) -> Path:
    """A notebook of a parameters cell and `cells`."""
    new = nbformat.v4
    code = [
        new.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}),
        *map(new.new_code_cell, cells),
    ]
    metadata = {"kernelspec": clean.KERNELSPEC, "language_info": {"name": "python"}}
    path = folder / f"{name}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new.new_notebook(cells=code, metadata=metadata), path)
    return path


def project(folder: Path) -> Path:
    """A copy of what run_all.sh needs, with no notebooks."""
    (folder / "pfl_core").mkdir(parents=True)
    (folder / "tools").mkdir()
    tools = (f"tools/{name}.py" for name in ("__init__", "runner", "notebooks", "gates", "clean"))
    for name in ("run_all.sh", "pyproject.toml", *tools):
        shutil.copy(runner.ROOT / name, folder / name)
    return folder


# ---------------------------------------------------------------- the words


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("tset", "'tset' is unknown; did you mean test?; known: test, lab, report, docs"),
        ("--profile fast", "'fast' is unknown; known: smoke, quick, "),
        ("--paper fedpr", "'fedpr' is unknown; did you mean fedper?"),
        ("--paper pfedhn", "'pfedhn'"),  # known, but it has no notebook
        ("--data no/such/folder", "'no/such/folder' is not a folder"),
        ("--datasets digits cifar", "'cifar' is unknown; did you mean cifar10"),
        ("--device gpu", "'gpu' is unknown; did you mean cpu?; known: auto, cpu, cuda"),
        ("--jobs 0", "'0' is not a number"),
        ("--jobs two", "'two' is not a number"),
        ("--prof quick", "unknown option --prof; did you mean --profile?; known: "),
        ("test --jobs 2", "test takes no --jobs"),
        ("lab --profile smoke", "lab takes no --profile"),
    ],
)
def test_wrong_words_get_one_line_and_code_2(words, line, tmp_path, capsys):
    make(tmp_path, "fedper")
    with pytest.raises(SystemExit) as stop:
        runner.parse(words.split(), tmp_path)
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert message.startswith("run_all.sh: ") and message.count("\n") == 1 and line in message


def test_right_words(tmp_path):
    make(tmp_path, "fedper"), make(tmp_path, "explore"), make(tmp_path, "scratch")
    args = runner.parse([], tmp_path)
    assert (args.word, args.profile, args.paper, args.jobs) == (
        None,
        "quick",
        ["fedper", "explore"],
        1,
    )
    words = f"--profile smoke --paper explore --data {tmp_path} --datasets digits mnist --device cuda --jobs 2"
    args = runner.parse(words.split(), tmp_path)
    assert (args.paper, args.data, args.datasets) == (["explore"], tmp_path, ["digits", "mnist"])
    assert (args.device, args.jobs) == ("cuda", 2)
    assert runner.parse(["lab", "--data", str(tmp_path)], tmp_path).word == "lab"


def test_every_data_set_can_be_named():
    code = "import pfl_core; print(*pfl_core.list_datasets())"  # apart from what other tests register here
    listed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(runner.DATASETS) == set(listed)


def test_the_words_are_those_of_the_library_and_of_the_folder():
    assert tuple(notebooks.LIMIT_S) == PROFILES
    assert [name for name in notebooks.NAMES if name in PAPERS] == list(PAPERS)
    committed = ["git", "ls-files", "notebooks/*.ipynb"]
    listed = subprocess.run(
        committed, cwd=runner.ROOT, capture_output=True, text=True
    ).stdout.split()
    assert {f"notebooks/{name}.ipynb" for name in notebooks.NAMES} == set(
        listed
    ) or not listed  # not in a checkout


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"bogus": 1}, "has no parameter bogus; it has profile, datasets"),
        ({"train": "no"}, "train must be a bool, not 'no'"),
        ({"train": 1}, "train must be a bool"),
        ({"seeds": (1, 2)}, r"seeds must be a list, not \(1, 2\)"),
        ({"seeds": [np.int64(3)]}, "plain JSON values"),
        ({"datasets": [("digits",)]}, "plain JSON values"),
    ],
)
def test_parameters_that_papermill_would_change_are_refused(parameters, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        notebooks.check_parameters(make(tmp_path, "fedper"), parameters)


def test_good_parameters_pass(tmp_path):
    good = {"profile": "smoke", "train": True, "seeds": [0, 1], "datasets": ["digits"]}
    notebooks.check_parameters(make(tmp_path, "fedper"), good)


# ---------------------------------------------------------------- running


@pytest.mark.slow
def test_run_all_notebooks_with_one_that_fails(tmp_path):
    here = project(tmp_path / "a folder")
    make(here / "notebooks", "fedper", FIGURE)
    make(
        here / "notebooks",
        "pfedhn",
        "print('before')",
        "raise ValueError('seven\\nlines')",
        "print('after')",
    )
    env = {k: v for k, v in os.environ.items() if k != "PFL_RUNS"}
    command = [
        sys.executable,
        "-P",
        str(here / "tools" / "runner.py"),
        "--profile",
        "smoke",
        "--jobs",
        "2",
    ]
    done = subprocess.run(
        [*command, "--datasets", "digits"], env=env, cwd=here, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert "fedper | train is True ['digits'] 1\n" in done.stdout
    assert "pfedhn | before\n" in done.stdout and "after" not in done.stdout
    head, good, bad = done.stdout.splitlines()[-3:]
    assert head.split() == ["notebook", "status", "wall", "figures"]
    assert good.startswith("fedper    ok ") and good.endswith("  runs/figures/fedper/smoke-digits")
    kept = "runs/notebooks/pfedhn.smoke-digits.failed.ipynb"
    assert bad.startswith("pfedhn    failed ") and bad.endswith(
        f"  cell 4: ValueError: seven; partly run: {kept}"
    )
    assert {p.name for p in (here / "runs/notebooks").iterdir()} == {
        "fedper.smoke-digits.ipynb",
        Path(kept).name,
    }
    assert nbformat.read(here / kept, as_version=4).cells[3].outputs[0].text == "before\n"


@pytest.mark.slow
def test_a_repaired_notebook_replaces_its_failed_output(tmp_path):
    make(tmp_path, "fedper", "print(1)")
    old = tmp_path / "runs" / "notebooks" / "fedper.smoke.failed.ipynb"
    old.parent.mkdir(parents=True)
    old.touch()
    (row,) = notebooks.run(
        ["fedper"],
        {"profile": "smoke"},
        notebooks.environment(tmp_path / "runs"),
        notebooks=tmp_path,
    )
    assert row.status == "ok" and row.where == "no figures"
    assert [p.name for p in old.parent.iterdir()] == ["fedper.smoke.ipynb"]


@pytest.mark.slow
def test_an_unknown_parameter_fails_that_notebook_before_it_starts(tmp_path):
    make(tmp_path, "fedper")
    (row,) = notebooks.run(
        ["fedper"], {"bogus": 1}, notebooks.environment(tmp_path), notebooks=tmp_path
    )
    assert row.status == "failed" and "ValueError: fedper.ipynb has no parameter bogus" in row.where


@pytest.mark.slow
def test_the_limit_ends_notebook_and_kernel(tmp_path, monkeypatch):
    pid = tmp_path / "pid"

    class AsSoonAsItRuns(threading.Timer):  # a slow computer starts a kernel in any time
        def run(self):
            while not self.finished.is_set():
                if pid.exists() and pid.read_text():
                    return self.function(*self.args)
                time.sleep(0.05)

    monkeypatch.setattr(notebooks, "Timer", AsSoonAsItRuns)
    make(
        tmp_path,
        "fedper",
        f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))",
        "time.sleep(600)",
    )
    (row,) = notebooks.run(
        ["fedper"], {}, notebooks.environment(tmp_path / "runs"), notebooks=tmp_path, limit_s=0.1
    )
    assert row.status == "failed" and row.where.startswith(
        "stopped at its limit of 0.1 s; partly run: "
    )
    assert (tmp_path / "runs/notebooks/fedper.quick.failed.ipynb").exists()
    with contextlib.suppress(psutil.NoSuchProcess):
        kernel = psutil.Process(int(pid.read_text()))
        for _ in range(6000):  # the system takes a moment to end what was killed
            if kernel.status() == psutil.STATUS_ZOMBIE:
                return
            time.sleep(0.1)
        pytest.fail(f"the kernel still is {kernel}")


def test_environment_leaves_the_backend_to_the_kernel(monkeypatch, tmp_path):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    env = notebooks.environment(tmp_path, tmp_path / "data")
    assert "MPLBACKEND" not in env and env["PFL_DATA"] == str(tmp_path / "data")


def test_nbval_waits_for_silent_cells_and_compares_no_progress():
    class Item:
        output_timeout = 5
        parent = type("Notebook", (), {"skip_compare": ("name",), "sanitize_patterns": {}})

    item = Item()
    scope = {}
    exec((notebooks.NOTEBOOKS / "conftest.py").read_text(), scope)
    scope["pytest_collection_modifyitems"]([item, item])
    assert item.output_timeout > 100 and item.parent.skip_compare == ("name", "stderr")
    assert list(item.parent.sanitize_patterns.values()) == ["figure"]


@pytest.mark.slow
def test_gates_run_to_the_end_and_the_second_one_finds_what_does_not_repeat(tmp_path):
    here = project(tmp_path / "my project")
    shutil.copytree(
        notebooks.NOTEBOOKS,
        here / "notebooks",
        ignore=shutil.ignore_patterns("*.ipynb", "__pycache__"),
    )
    (name,) = gates.AGAIN
    make(here / "notebooks", name, "import random", "random.random() if profile == 'smoke' else 1")
    (here / "tests").mkdir()
    (here / "tests" / "test_one.py").write_text("def test_one():\n    assert 1 == 2\n")
    cleaner = [sys.executable, "-m", "tools.clean", "--run", f"notebooks/{name}.ipynb"]
    subprocess.run(cleaner, cwd=here, check=True)
    program = [sys.executable, "-P", str(here / "tools" / "runner.py")]
    done = subprocess.run([*program, "test"], cwd=here, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    table = done.stdout[done.stdout.rindex("\ncheck ") :].splitlines()[2:]
    checks = {line[:29].strip(): line[29:35].strip() for line in table[:-1]}
    assert checks == {
        "ruff check": "ok",
        "ruff format": "ok",
        "pyright": "ok",
        "pytest": "failed",
        "gate 1: committed notebooks": "ok",
        f"gate 2: {name}": "ok",
        "gate 2: trained again": "failed",
    }
    assert "kept in runs/test-" in table[-1]


def test_what_one_worker_takes_is_there():
    assert all((gates.ROOT / "tests" / name).is_file() for name in conftest.TOGETHER)


# ---------------------------------------------------------------- the cleaner


def test_clean_keeps_tags_and_outputs_and_drops_the_rest(tmp_path):
    new = nbformat.v4
    path = make(tmp_path, "fedper", "x")
    nb = nbformat.read(path, as_version=4)
    nb.metadata |= {"widgets": {"state": {}}, "papermill": {"duration": 3.2}}
    nb.metadata.kernelspec.name = "my-venv"
    nb.cells[1].metadata = nbformat.from_dict(
        {"papermill": {"duration": 1.0}, "execution": {}, "tags": ["mine"]}
    )
    widget = {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "IntSlider()"}
    parts = [new.new_output("stream", name="stdout", text=text) for text in ("a\n", "b\n")]
    nb.cells[1].outputs = [
        *parts,
        new.new_output("display_data", widget),
        new.new_output("display_data", {"a/b": "c"}),
    ]
    nbformat.write(nb, path)
    ids = [cell.id for cell in nb.cells]
    clean.clean(path)
    once = path.read_bytes()
    nb = nbformat.read(path, as_version=4)
    assert nb.metadata == {"kernelspec": clean.KERNELSPEC, "language_info": {"name": "python"}}
    assert nb.cells[1].metadata == {"tags": ["mine"]} and nb.cells[0].metadata == {
        "tags": ["parameters"]
    }
    assert [output.get("text") for output in nb.cells[1].outputs] == ["a\nb\n", None]
    assert [cell.id for cell in nb.cells] == ids
    clean.clean(path)
    assert path.read_bytes() == once and [p.name for p in tmp_path.iterdir()] == ["fedper.ipynb"]


@pytest.mark.slow
def test_clean_run_twice_gives_the_same_file(tmp_path, monkeypatch):
    path = make(
        tmp_path, "fedper", "import os\nprint(profile, train, os.environ['PFL_OFFLINE'])\nprofile"
    )
    monkeypatch.chdir(tmp_path)
    assert clean.main(["--run", "fedper.ipynb"]) == 0
    once = path.read_bytes()
    assert clean.main(["--run", "fedper.ipynb"]) == 0
    assert path.read_bytes() == once
    nb = nbformat.read(path, as_version=4)
    assert len(nb.cells) == 2 and [cell.execution_count for cell in nb.cells] == [1, 2]
    assert nb.cells[1].outputs[0].text == "quick False 1\n"


@pytest.mark.slow
def test_clean_run_leaves_a_failing_notebook_alone(tmp_path, capsys):
    path = make(tmp_path, "fedper", "1 / 0")
    before = path.read_bytes()
    assert clean.main(["--run", str(path)]) == 1
    assert path.read_bytes() == before and "ZeroDivisionError" in capsys.readouterr().out


# ---------------------------------------------------------------- run_all.sh


HOSTILE = "ensurepip venv pip uv json argparse ast signal torch psutil papermill nbformat jupyter_client ruff pytest runner"


@pytest.fixture
def shell(tmp_path):
    """run_all.sh in a folder with a space, with an active environment whose pip and uv only write down what they are asked; called in a folder
    of files that are named as modules are: if one of them is executed, the test fails."""
    here, bin, cwd = (
        project(tmp_path / "my project"),
        tmp_path / "env" / "bin",
        tmp_path / "called here",
    )
    bin.mkdir(parents=True), cwd.mkdir()
    for name in HOSTILE.split():
        (cwd / f"{name}.py").write_text(
            f"open({str(tmp_path / 'executed')!r}, 'a').write('{name} ')\n"
        )
    note = f'case "$*" in *"pip install"*) echo "$PWD: $*" >>"{tmp_path}/asked"; exit;; esac'
    (bin / "python").write_text(f'#!/bin/sh\n{note}\nexec "{sys.executable}" "$@"\n')
    (bin / "python").chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CONDA", "PFL_", "PIP_"))}
    env["PIP_CONFIG_FILE"] = os.devnull

    def call(*words: str, **more: str) -> SimpleNamespace:
        command = ["bash", str(here / "run_all.sh"), *words]
        active = {"VIRTUAL_ENV": str(tmp_path / "env")} | more
        done = subprocess.run(command, env=env | active, cwd=cwd, capture_output=True, text=True)
        asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
        asked = [line for line in asked.splitlines() if " -e " in line]  # uv itself comes by pip
        return SimpleNamespace(
            code=done.returncode, out=done.stdout, err=done.stderr, asked=asked, here=here
        )

    yield call
    assert not (tmp_path / "executed").exists(), (tmp_path / "executed").read_text()


@pytest.mark.slow
def test_nothing_of_the_current_folder_is_executed_while_an_environment_is_made(shell, tmp_path):
    for name in ("python3.13", "python3.12", "python3.11", "python3"):
        shutil.copy(tmp_path / "env" / "bin" / "python", tmp_path / "env" / "bin" / name)
    none = {
        "VIRTUAL_ENV": "",
        "PATH": f"{tmp_path / 'env' / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    assert shell("--help", **none).code == 0
    done = shell(
        PIP_NO_INDEX="1", **none
    )  # a real venv with a real pip, which finds nothing to install from
    assert (
        done.code == 1 and "run_all.sh: installing into " in done.out and "setuptools" in done.err
    )
    assert (done.here / ".venv" / "bin" / "python").exists()


def test_no_python_is_started_that_looks_into_the_current_folder():
    script = (runner.ROOT / "run_all.sh").read_text()
    first = re.findall(r'"\$(?:1|name|base|python)" (-\S+|"\$runner")', script)
    assert len(first) == 14 and set(first) == {"-I", "-P", '--version)"'}
    for module in (runner, notebooks, gates):
        assert not re.search(r'sys\.executable, "(?!-P|-I)', Path(module.__file__).read_text())


def test_wrong_words_install_nothing(shell):
    done = shell("--profile", "fast")
    assert (
        done.code == 2
        and done.asked == []
        and done.err.startswith("run_all.sh: argument --profile")
    )
    assert not (done.here / ".venv").exists()


@pytest.mark.parametrize("hops", [1, 2])
def test_a_symlink_to_the_door_is_the_door(shell, hops, tmp_path):
    to = shell("--help").here / "run_all.sh"
    for hop in range(hops):  # the second one by a relative path
        (tmp_path / f"door{hop}").symlink_to(to)
        to = f"door{hop}"
    command = ["bash", str(tmp_path / to), "--help"]
    env = os.environ | {"VIRTUAL_ENV": str(tmp_path / "env")}
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0 and "--profile" in done.stdout, done.stderr


def test_another_shell_is_told_to_be_bash():
    door = runner.ROOT / "run_all.sh"
    done = subprocess.run(
        ["bash", "-c", f"unset BASH_VERSION; . {door}"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "use bash: bash run_all.sh" in done.stderr
    assert done.stderr.count("\n") == 1
    first = door.read_text().partition("\nfi\n")[0] + "\nfi\n"  # what another one reads
    done = subprocess.run(["sh", "-c", first], capture_output=True, text=True)
    assert (done.returncode, done.stderr) in ((0, ""), (2, done.stderr))
    assert done.stderr in ("", "run_all.sh: this shell is not bash; use bash: bash run_all.sh\n")


def test_help_installs_nothing(shell):
    done = shell("--help")
    assert done.code == 0 and done.asked == []
    for word in (
        "test",
        "lab",
        "--profile",
        "--paper",
        "--data",
        "--datasets",
        "--device",
        "--jobs",
    ):
        assert word in done.out


@pytest.mark.slow
def test_installs_when_something_changed_only(shell):
    done = shell()
    assert (
        done.code == 1 and "no notebook in" in done.err
    )  # an empty project: everything before went well
    assert len(done.asked) == 1 and done.asked[0].startswith(f"{done.here}: -I -m uv pip install")
    assert done.asked[0].endswith(" -e .[notebooks]")
    assert len(shell().asked) == 1
    make(done.here / "notebooks", "fedper", FIGURE)
    done = shell("--paper", "fedper")
    assert (
        done.code == 0
        and len(done.asked) == 1
        and "my project/runs/figures/fedper/quick-digits" in done.out
    )
    with (done.here / "pyproject.toml").open("a") as f:
        f.write("# changed\n")
    shutil.rmtree(done.here / "notebooks")
    assert len(shell().asked) == 2


@pytest.mark.slow
def test_ray_is_installed_where_it_is_asked_for(shell):
    assert shell().asked[-1].endswith(" -e .[notebooks]")
    assert shell("--on", "ray").asked[-1].endswith(" -e .[notebooks,ray]")
    assert (
        len(shell("--on", "ray").asked) == len(shell().asked) == 2
    )  # what is there is enough without it


def test_pip_installs_where_it_has_an_index_and_where_uv_fails(shell, tmp_path):
    assert "-I -m pip install" in shell(PIP_INDEX_URL="https://example.org/simple").asked[-1]
    python = tmp_path / "env" / "bin" / "python"
    broken = 'case "$*" in *"uv pip install"*) exit 1;; esac'
    python.write_text(python.read_text().replace("#!/bin/sh", f"#!/bin/sh\n{broken}"))
    (tmp_path / "env" / ".pfl_core-installed").unlink()
    done = shell()
    assert "uv did not manage that; now with pip" in done.out
    assert len(done.asked) == 2 and "-I -m pip install" in done.asked[-1]


def test_an_active_environment_without_python_is_named(shell, tmp_path):
    done = shell(VIRTUAL_ENV=str(tmp_path / "gone"))
    assert done.code == 1 and "gone has no Python 3.11 or newer" in done.err and done.asked == []


def test_bash_reads_the_scripts():
    for script in ("run_all.sh", ".ci/run"):
        assert os.access(runner.ROOT / script, os.X_OK)
        subprocess.run(["bash", "-n", runner.ROOT / script], check=True)
