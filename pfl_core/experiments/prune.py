"""What a store may be cleared of: runs are listed, then moved to a trash folder; only `empty` deletes, and only what lies in the trash.

A run is a folder named by 16 hex digits whose experiment.json names the same id. Of anything else in the store nothing is touched, but
for what runs leave beside themselves (ID.part, ID.damaged..., ID.before-..., an empty ID.lock), as long as no process holds the run.
Links are never followed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from pfl_core.experiments import committed
from pfl_core.util import checks, paths

STATUS = (
    "done",
    "failed",
    "unfinished",
    "aside",
)  # aside: damaged, or replaced by a run that was computed anew
_NAME = re.compile(r"([0-9a-f]{16})(\.part|(?:\.part)?\.(?:damaged\d*|before-\d{8}-\d{6,}))?")
_DAY = re.compile(r"\d{4}-\d\d-\d\d(\.\d+)?")


class Found(NamedTuple):
    """A folder of the store: its run's id, what has become of it, size in bytes, when it was finished (or written to last)."""

    path: Path
    id: str
    status: str
    method: str
    dataset: str
    size: int
    date: datetime
    named: bool  # by a row in results/ or runs/results/

    def __str__(self) -> str:
        what = f"{self.path.name:<24} {self.status:<10} {self.method:<12} {self.dataset:<16}"
        return f"{what} {megabytes(self.size):>10}  {self.date:%Y-%m-%d %H:%M}{'  named by results' * self.named}"


def megabytes(size: float) -> str:
    """Bytes as a person reads them."""
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"


def find(
    ids: Collection[str] = (),
    *,
    age: float = 0,
    status: Collection[str] = (),
    method: Collection[str] = (),
    dataset: Collection[str] = (),
    paper: Collection[str] = (),
    store: Path | None = None,
) -> list[Found]:
    """What the store holds and nobody computes at present, oldest first, of which every filter that is given is true.

    ids: first digits of ids; age: days, at least; status: of `STATUS`; paper: runs that rows of these papers name. Without `status` and
    `ids`, what is unfinished is left out: it may go on. ValueError for an id that no run has, or a status that there is not.
    """
    for s in status:
        checks.known("status", s, STATUS)
    store, named = store or paths.store_folder(), committed.named_runs()
    of_paper = committed.named_runs(paper) if paper else set()
    until = datetime.now().astimezone() - timedelta(days=age)
    there = list(_folders(store, named))
    for start in ids:
        if len(start) < 4 or not any(f.id.startswith(start) for f in there):
            raise ValueError(
                f"no run of {store} that may be moved begins with {start!r} (four digits at least)"
            )
    kept = []
    for f in there:
        wanted = [
            f.date <= until,
            not method or f.method in method,
            not dataset or f.dataset in dataset,
        ]
        wanted += [not paper or f.id in of_paper, not ids or f.id.startswith(tuple(ids))]
        wanted += [f.status in status if status else bool(ids) or f.status != "unfinished"]
        if all(wanted):
            kept.append(f)
    return sorted(kept, key=lambda f: f.date)


def _folders(store: Path, named: set[str]) -> Iterable[Found]:
    try:
        entries = sorted(os.scandir(store), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        name = _NAME.fullmatch(entry.name)
        if not name or not entry.is_dir(follow_symlinks=False) or _held(store / f"{name[1]}.lock"):
            continue
        path, kind = Path(entry.path), name[2] or ""
        about = _about(path)
        if about is None and not kind:  # no run of ours
            continue
        plain, meta = about or ({}, {})
        if kind == ".part":
            state = "unfinished"
        else:
            state = "aside" if kind else "done" if meta.get("status") == "done" else "failed"
        what = (str(plain.get(key, "?")) for key in ("method", "dataset"))
        yield Found(
            path,
            name[1],
            state,
            *what,
            _size(path),
            _date(path, meta),
            not kind and name[1] in named,
        )


def _about(path: Path) -> tuple[dict, dict] | None:
    # Experiment and meta of a run's folder; None if it holds none, or another run's.
    file = path / "experiment.json"
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            return None
        whole = json.loads(file.read_bytes())
        plain, meta = whole["experiment"], whole["meta"]
        return (plain, meta) if meta["id"] == path.name[:16] and isinstance(plain, dict) else None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
    ):  # half a file, or somebody's own
        return None


def _date(path: Path, meta: dict) -> datetime:
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return datetime.fromisoformat(meta["date"]).astimezone()
    file = path / "experiment.json"
    return datetime.fromtimestamp((file if file.exists() else path).lstat().st_mtime).astimezone()


def _size(path: Path) -> int:
    return sum(Path(at, name).lstat().st_size for at, _, names in os.walk(path) for name in names)


def _held(lock: Path) -> bool:
    # Whether a process computes the run just now. A lock that is a link, or in which something stands, is not opened.
    if not os.path.lexists(lock):
        return False
    if lock.is_symlink() or lock.stat().st_size:
        return True
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True


def move(found: Iterable[Found], root: Path | None = None) -> tuple[Path | None, list[Found]]:
    """Move folders to a new folder of the trash, named by the day: that folder (None if there was nothing to move), and what was moved.

    What a process has begun to compute since it was listed stays. OSError where trash and store lie on different disks.
    """
    away, moved = None, []
    for f in found:
        lock = f.path.with_name(f"{f.id}.lock")
        if _held(lock) or f.path.is_symlink() or not f.path.is_dir():
            continue
        try:
            with FileLock(lock, timeout=0):
                away = away or _new_day((root or paths.runs_root()) / "trash")
                _rename(f.path, away / f.path.name)
                moved.append(f)
                if not any(lock.parent.glob(f"{f.id}*/")):
                    lock.unlink()
        except Timeout:
            continue
    return away, moved


def _rename(source: Path, target: Path) -> None:
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise OSError(
            f"{source.parent} and {target.parent} lie on different disks, so nothing was moved; set PFL_RUNS to the disk of the store"
        ) from None


def _new_day(trash: Path) -> Path:
    _own(trash)
    for i in count():
        day = trash / (f"{datetime.now():%Y-%m-%d}" + (f".{i}" if i else ""))
        try:
            day.mkdir(parents=True)
            return day
        except FileExistsError:
            continue


def _own(trash: Path) -> None:
    if trash.is_symlink():
        raise OSError(f"{trash} is a link, and links are not followed; put a folder there")


def trashed(root: Path | None = None) -> list[tuple[Path, int]]:
    """What lies in the trash, with its bytes: only folders that `move` could have put there."""
    trash, out = (root or paths.runs_root()) / "trash", []
    _own(trash)
    for day in sorted(trash.glob("*")):
        if _DAY.fullmatch(day.name) and day.is_dir() and not day.is_symlink():
            runs = [
                p
                for p in sorted(day.iterdir())
                if _NAME.fullmatch(p.name) and p.is_dir() and not p.is_symlink()
            ]
            out += [(p, _size(p)) for p in runs]
    return out


def empty(what: Iterable[tuple[Path, int]]) -> None:
    """Delete what `trashed` returned, and days of which nothing is left."""
    for path, _ in what:
        shutil.rmtree(path)
        with contextlib.suppress(OSError):  # something else lies there, too
            path.parent.rmdir()
