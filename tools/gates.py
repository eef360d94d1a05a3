"""What `./run_all.sh test` does: ruff, pyright, pytest (the site among it), two notebook gates.

Gate 1 executes the committed notebooks and compares their outputs with those that are committed.
Gate 2 executes them at profile smoke, which trains; one is trained again, and the two are compared.
What holds reads one table there: gate 1 has it read all.
That every method ends with the same numbers again is held by tests/core/engine/test_determinism.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools import notebooks
from tools.notebooks import NOTEBOOKS, ROOT, Row

AGAIN = ("pfedhn",)
NARROW: dict[str, dict[str, Any]] = {"what_holds": {"artefacts": ["table3"]}}
PYRIGHT = ("pyright", "--pythonpath", sys.executable)  # not the Python of the PATH
SIDE_BY_SIDE = min(os.cpu_count() or 1, 8)


def environment(runs: Path) -> dict[str, str]:
    """A kernel's environment: a run store of its own, embedded data only, no network, no GPU.

    It shows no progress: what is committed, or compared with what is, must be the same every time.
    """
    ours = {"PFL_OFFLINE": "1", "TQDM_DISABLE": "1", "PFL_DEVICE": "cpu"}
    return notebooks.environment(runs, runs / "no-data", **ours)


def run() -> int:
    """Run all checks, each in a process of its own, whatever fails before; 1 if one failed."""
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="test-", dir=ROOT / "runs"))
    with ThreadPoolExecutor(1) as aside:  # it takes one core, a minute
        typed = aside.submit(_check, "pyright", *PYRIGHT)
        rows = [
            _check("ruff check", "ruff", "check", "."),
            _check("ruff format", "ruff", "format", "--check", "."),
            _check("pytest", "pytest", "-n", str(SIDE_BY_SIDE), "--dist", "loadgroup"),
        ]
    rows += [
        typed.result(),
        _gate_1(folder / "committed"),
        *_gate_2(folder / "first", folder / "again"),
    ]
    notebooks.table(("check", "status", "wall", ""), rows)
    good = all(row.status == "ok" for row in rows)
    if good:
        shutil.rmtree(folder)
    else:
        print(f"what the gates wrote is kept in {notebooks.shown(folder)}")
    return int(not good)


def docs(site: Path) -> list[str]:
    """The command, after `python -m`, that builds the documentation; a warning fails it."""
    return ["sphinx", "-qW", "--keep-going", "-c", "docs", ".", str(site)]


def _gate_1(runs: Path) -> Row:
    # what_holds takes as long as four others: beside them, not after them.
    first = sorted(notebooks.present(), key=lambda name: name not in notebooks.READERS)
    committed = [NOTEBOOKS / f"{name}.ipynb" for name in first]
    return _nbval("gate 1: committed notebooks", committed, runs)


def _gate_2(first: Path, again: Path) -> list[Row]:
    print("\n== gate 2: notebooks at smoke", flush=True)
    every, readers = notebooks.present(), notebooks.READERS
    rows = _smoke([name for name in every if name not in readers], first, SIDE_BY_SIDE)
    if (first / "notebooks").is_dir():
        shutil.copy(NOTEBOOKS / "conftest.py", first / "notebooks")
    trained = [notebooks.executed(first, name, "smoke") for name in AGAIN]
    executed = [path for path in trained if path.is_file()]
    with ThreadPoolExecutor(1) as aside:  # a core trains, one reads
        repeated = aside.submit(_nbval, "gate 2: trained again", executed, again)
        for name in (name for name in every if name in readers):
            rows += _smoke([name], first, 1, **NARROW.get(name, {}))
        return [*rows, repeated.result()]


def _smoke(names: Sequence[str], runs: Path, jobs: int, **narrow: Any) -> list[Row]:
    smoke = {"profile": "smoke", "train": True} | narrow
    rows = notebooks.run(names, smoke, environment(runs), jobs)
    return [r._replace(name=f"gate 2: {r.name}", where=r.where * (r.status != "ok")) for r in rows]


def _nbval(name: str, paths: Sequence[Path], runs: Path) -> Row:
    if not paths:
        return Row(name, "failed", "0:00", "no notebook to compare")
    settings = ("-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider")
    workers = str(min(SIDE_BY_SIDE, len(paths)))
    aside = ("-n", workers, "--dist", "loadfile", "--no-loadscope-reorder")  # in this order
    nbval = ("pytest", *settings, *aside, "--nbval", "--nbval-current-env", *map(str, paths))
    return _check(name, *nbval, env=environment(runs))


def _check(name: str, *command: str, env: Mapping[str, str] = os.environ) -> Row:
    print(f"\n== {name}", flush=True)
    began = time.monotonic()
    full = [sys.executable, "-P", "-m", *command]
    beside = threading.current_thread() is not threading.main_thread()
    done = subprocess.run(full, cwd=ROOT, env=dict(env), capture_output=beside, text=True)
    if beside:  # whole, not between the lines of another check
        print(f"\n== {name}\n{done.stdout}{done.stderr}", flush=True)
    clock = notebooks.clock(time.monotonic() - began)
    return Row(name, "failed" if done.returncode else "ok", clock, "")
