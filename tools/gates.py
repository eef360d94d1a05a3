"""What `./run_all.sh test` does: ruff, pytest, and two gates that hold the notebooks to what is committed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools import notebooks
from tools.notebooks import NOTEBOOKS, ROOT, Row


def environment(runs: Path) -> dict[str, str]:
    """A kernel that sees a new run store and no data but what the project embeds, and no network."""
    return notebooks.environment(runs, runs / "no-data", PFL_OFFLINE="1")


def run() -> int:
    """ruff, pytest and both nbval gates, each in a process of its own; all of them run, whatever fails."""
    rows: list[Row] = []
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="test-", dir=ROOT / "runs"))
    names = notebooks.present()

    def stage(name: str, *command: str, env: Mapping[str, str] = os.environ) -> None:
        print(f"\n== {name}", flush=True)
        began = time.monotonic()
        code = subprocess.run(
            [sys.executable, "-P", "-m", *command], cwd=ROOT, env=dict(env)
        ).returncode
        rows.append(
            Row(name, "failed" if code else "ok", notebooks.clock(time.monotonic() - began), "")
        )

    def nbval(name: str, paths: Sequence[Path], runs: Path) -> None:
        settings = (
            "-c",
            str(ROOT / "pyproject.toml"),
            "-p",
            "no:cacheprovider",
            "--nbval",
            "--nbval-current-env",
        )
        if paths:
            stage(name, "pytest", *settings, *map(str, paths), env=environment(runs))
        else:
            rows.append(Row(name, "failed", "0:00", "no notebook to compare"))

    stage("ruff check", "ruff", "check", ".")
    stage("ruff format", "ruff", "format", "--check", ".")
    stage("pytest", "pytest", "-n", "auto", "--maxprocesses", "8")
    nbval(
        "gate 1: committed notebooks",
        [NOTEBOOKS / f"{name}.ipynb" for name in names],
        folder / "committed",
    )

    print("\n== gate 2: notebooks at smoke", flush=True)
    first = folder / "first"
    smoke = {"profile": "smoke", "recompute": True}
    executed = notebooks.run(names, smoke, environment(first))
    rows += [
        row._replace(name=f"gate 2: {row.name}", where=row.where * (row.status != "ok"))
        for row in executed
    ]
    if (first / "notebooks").is_dir():
        shutil.copy(NOTEBOOKS / "conftest.py", first / "notebooks")
    again = [
        p
        for p in sorted(first.glob("notebooks/[a-z]*.ipynb"))
        if not p.name.endswith(".failed.ipynb")
    ]
    nbval("gate 2: trained again", again, folder / "again")

    notebooks.table(("check", "status", "wall", ""), rows)
    good = all(row.status == "ok" for row in rows)
    if good:
        shutil.rmtree(folder)
    else:
        print(f"what the gates wrote is kept in {notebooks.shown(folder)}")
    return int(not good)
