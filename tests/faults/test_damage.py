"""Damaged and hostile files and answers, and machines that fail: what is said, and what is left. docs/reliability.md has the same table.

`python -m tests.faults.test_damage` writes the table anew.
"""

import contextlib
import importlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

from pfl_core import models, run
from pfl_core.data import partition, pools
from pfl_core.engine import simulate
from pfl_core.experiments.store import Result
from pfl_core.methods.base import METHODS
from pfl_papers import places
from pfl_papers.compare import readable
from tests.faults.table import (
    BYSTANDER,
    PAGE,
    E,
    Fault,
    World,
    clean,
    equal,
    workers_with_older_code,
)
from tools.marked import between

PARTS = [
    "runs",
    "checkpoints",
    "disks",
    "locks",
    "trash",
    "committed",
    "own_data",
    "models",
    "code",
    "many",
    "flower",
    "sweeps",
    "studies",
]
FAULTS = [one for part in PARTS for one in importlib.import_module(f"tests.faults.{part}").FAULTS]


class Played(NamedTuple):
    """A fault that has happened: what was said, returned and raised, and all files before and after."""

    world: World
    said: str
    value: Any
    error: BaseException | None
    before: dict[str, bytes]
    after: dict[str, bytes]


def as_it_should(p: Played) -> bool:
    """Whether what came of it is what comes of it without the fault."""
    found = p.value if isinstance(p.value, list) else [p.value]
    wanted = [clean(r.experiment) if isinstance(r, Result) else r for r in found]
    if p.world.expected is not None:
        wanted = [p.world.expected]
    return p.error is None and all(map(equal, found, wanted))


def unchanged(p: Played) -> bool:
    return p.before == p.after


def again(p: Played) -> bool:
    with contextlib.redirect_stdout(io.StringIO()):
        return equal(run(E), clean(E))


LEFT: dict[str, Callable[[Played], bool]] = {
    "as before": lambda p: as_it_should(p) and unchanged(p) and not p.world.seen,
    "computed, equal": lambda p: as_it_should(p) and p.world.seen[:1] in ([], [0]),
    "set aside, computed again, equal": lambda p: (
        as_it_should(p)
        and p.world.seen[:1] in ([], [0])
        and any(".damaged" in name and name not in p.before for name in p.after)
    ),
    "goes on, equal": lambda p: as_it_should(p) and p.world.seen[0] > 0,
    "refused, nothing changed": lambda p: p.error is not None and unchanged(p),
    "ends; run again, equal": lambda p: p.error is not None and again(p),
    "ends; nothing is lost": lambda p: p.error is not None,
    "left out, the round goes on": as_it_should,
    "left out, the others are shown": lambda p: as_it_should(p) and unchanged(p),
    "moved, but for that": as_it_should,
    "kept as failed": lambda p: p.value is False and len(p.after) > len(p.before),
}


def files(folder: Path) -> dict[str, bytes]:
    """All files of a folder but locks, which hold nothing; of links where they lead."""
    return {
        str(p.relative_to(folder)): os.readlink(p).encode() if p.is_symlink() else p.read_bytes()
        for p in folder.rglob("*")
        if (p.is_symlink() or p.is_file()) and p.suffix != ".lock"
    }


@contextlib.contextmanager
def empty_computer(folder: Path) -> Iterator[World]:
    registries = METHODS, models._MODELS, partition._SCHEMES, pools._ENTRIES
    known = [dict(names) for names in registries]
    loaded = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        env = {"PFL_RUNS": folder, "PFL_DATA": folder / "data", "PFL_OFFLINE": 1}
        for name, value in (env | {"PYTHONDONTWRITEBYTECODE": 1}).items():
            patch.setenv(name, str(value))
        patch.setenv("PFL_DEVICE", "cpu")
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setattr(simulate, "CHECKPOINT_EVERY", 0.0)
        patch.setattr(places, "results_folder", lambda: folder / "home" / "results")
        patch.syspath_prepend(folder)
        patch.chdir(folder)
        yield World(folder, patch)
    for names, before in zip(registries, known, strict=True):
        names.clear()
        names.update(before)
    for name in set(sys.modules) - loaded:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
            del sys.modules[name]


@contextlib.contextmanager
def played(fault: Fault, folder: Path) -> Iterator[Played]:
    """Let a fault happen on a computer with one finished run."""
    text, value, error = io.StringIO(), None, None
    with empty_computer(folder) as w:
        w.has(BYSTANDER)
        steps = fault.happens(w)
        with contextlib.redirect_stdout(io.StringIO()):
            next(steps)
        before = files(folder)
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            try:
                next(steps)
            except StopIteration as end:
                value = end.value
            except Exception as e:
                error = e
        said = f"{text.getvalue()}{error or ''}".replace(str(folder), "DIR").strip()
        yield Played(w, said, value, error, before, files(folder))


def slow(fault: Fault) -> tuple:
    return (pytest.mark.slow,) if fault.happens is workers_with_older_code else ()


@pytest.mark.parametrize("fault", [pytest.param(f, id=f.what, marks=slow(f)) for f in FAULTS])
def test_what_is_said_and_what_is_left(fault, tmp_path):
    with played(fault, tmp_path) as p:
        if p.error and not isinstance(p.error, ValueError | OSError | RuntimeError):
            raise p.error
        assert re.search(fault.says, p.said, re.DOTALL), p.said
        assert "Traceback" not in p.said and "\x1b" not in p.said
        assert LEFT[fault.left](p), (p.said, p.value, p.error, p.world.seen)
        there = set(p.after.values())
        lost = {n for n, raw in p.before.items() if raw and raw not in there}
        assert {n for n in lost if ".part/" not in n} == set()
        for name in [n for n in p.before if n.startswith(f"store/{BYSTANDER.id}/")]:
            assert p.before[name] == p.after.get(name) or fault.left == "moved, but for that"
        assert not (tmp_path / "opened").exists()


COMMAND = "python -m tests.faults.test_damage"


def code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def table() -> str:
    """What goes wrong, what is said, and what is left: a line each."""
    lines = []
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder, played(fault, Path(folder).resolve()) as p:
            match = re.search(fault.says, p.said, re.DOTALL)
            first, last = p.said.rfind("\n", 0, match.start()) + 1, p.said.find("\n", match.end())
            said = p.said[first : last if last > 0 else None] if fault.says else ""
        said = re.sub(
            r"\b(?=\d*[a-f])[0-9a-f]{16}\b",
            "RUN",
            re.sub(r"\d{4}-\d\d-\d\d( \d\d:\d\d)?", "DAY", said),
        )
        said = "<br>".join(code(line.strip()) for line in said.splitlines()) or "-"
        lines.append({"fault": fault.what, "what it says": said, "what is left": fault.left})
    return readable.markdown(pd.DataFrame(lines))


def test_the_page_holds_the_table():
    text = PAGE.read_text().split(f"<!-- faults: generated by `{COMMAND}` -->")[1]
    rows = [
        re.split(r" (?<!\\)\| ", line) for line in text.split("<!--")[0].strip().splitlines()[2:]
    ]
    told = [(row[0].removeprefix("| "), row[-1].removesuffix(" |")) for row in rows]
    assert told == [(f.what, f.left) for f in FAULTS]
    for fault, row in zip(FAULTS, rows, strict=True):
        assert re.search(fault.says, row[1].replace("`<br>`", "\n"), re.DOTALL), row


if __name__ == "__main__":
    PAGE.write_text(between(PAGE.read_text(), "faults", table(), COMMAND))
