"""Clear the store: `find` lists runs, `move` puts them into a trash folder, `empty` deletes those.

A run is a folder named by 16 hex digits whose experiment.json names the same id. What runs leave
beside themselves (ID.part, ID.damaged..., ID.before-..., an empty ID.lock) goes with them, unless
a process holds the run. Nothing else in the store is touched, and links are never followed. Only
`empty` deletes, and only what lies in the trash.
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
from importlib.metadata import entry_points
from itertools import count
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from pfl_core.util import checks, paths
from pfl_core.util.say import say

# aside: damaged, or replaced by a run that was computed anew
STATUS = ("done", "failed", "unfinished", "aside")
_NAME = re.compile(r"([0-9a-f]{16})(\.part|(?:\.part)?\.(?:damaged\d*|before-\d{8}-\d{6,}))?")
_DAY = re.compile(r"\d{4}-\d\d-\d\d(\.\d+)?")


class Found(NamedTuple):
    """A folder of the store."""

    path: Path
    id: str  # of its run
    status: str  # one of STATUS
    method: str
    dataset: str
    size: int  # bytes
    date: datetime  # when it was finished, else when it was last written to
    named: bool  # whether rows that are kept elsewhere are from it (`shown`)

    def __str__(self) -> str:
        what = f"{self.path.name:<24} {self.status:<10} {self.method:<12} {self.dataset:<16}"
        line = f"{what} {megabytes(self.size):>10}  {self.date:%Y-%m-%d %H:%M}"
        return line + "  named by results" * self.named


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
    """What the store holds and no process computes at present: those that all filters let through.

    Parameters
    ----------
    ids : first digits of ids, four or more
    age : least age in days
    status : of STATUS; without `status` and `ids`, unfinished runs are left out, as they may go on
    method, dataset : names
    paper : papers of which kept rows are from the run (`shown`)
    store : folder of the runs, by default store/ in $PFL_RUNS

    Returns
    -------
    list of Found
        Oldest first.

    Raises
    ------
    ValueError
        If no run has such an id, there is no such status, or age is no number >= 0.
    """
    if not age >= 0:
        raise ValueError(f"age={age}: allowed is a number of days >= 0")
    for s in status:
        checks.known("status", s, STATUS)
    store = store or paths.store_folder()
    of_paper = shown(paper) if paper else set()
    until = datetime.now().astimezone() - timedelta(days=age)
    there = list(_folders(store, shown()))
    _check_ids(ids, there, store)
    wanted = [
        f
        for f in there
        if f.date <= until
        and (not method or f.method in method)
        and (not dataset or f.dataset in dataset)
        and (not paper or f.id in of_paper)
        and (not ids or f.id.startswith(tuple(ids)))
        and (f.status in status if status else ids or f.status != "unfinished")
    ]
    return sorted(wanted, key=lambda f: f.date)


def shown(papers: Collection[str] = ()) -> set[str]:
    """Runs from which rows are kept elsewhere, as packages say that keep some: of papers, or all.

    They say so by an entry point of the group "pfl_core.shown".
    """
    ids = set()
    for point in entry_points(group="pfl_core.shown"):
        with contextlib.suppress(ModuleNotFoundError):  # it was taken away
            ids |= point.load()(papers)
    return ids


def _check_ids(ids: Collection[str], there: list[Found], store: Path) -> None:
    for start in ids:
        if len(start) < 4 or not any(f.id.startswith(start) for f in there):
            raise ValueError(
                f"no run of {store} that may be moved begins with {start!r} (four digits at least)"
            )


def _folders(store: Path, named: set[str]) -> Iterable[Found]:
    try:
        entries = sorted(os.scandir(store), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        name = _NAME.fullmatch(entry.name)
        if not name or not entry.is_dir(follow_symlinks=False) or _held(store / f"{name[1]}.lock"):
            continue
        path, id, kind = Path(entry.path), name[1], name[2] or ""
        about = _about(path)
        if about is None and not kind:  # no run of ours
            continue
        plain, meta = about or ({}, {})
        yield Found(
            path=path,
            id=id,
            status=_status(kind, meta),
            method=checks.printable(plain.get("method", "?")),
            dataset=checks.printable(plain.get("dataset", "?")),
            size=_size(path),
            date=_date(path, meta),
            named=not kind and id in named,
        )


def _status(kind: str, meta: dict) -> str:
    # kind: what follows the id in the folder's name
    if kind:
        return "unfinished" if kind == ".part" else "aside"
    return "done" if meta.get("status") == "done" else "failed"


def _about(path: Path) -> tuple[dict, dict] | None:
    # Experiment and meta of a run's folder; None if it holds none, or another run's.
    file = path / "experiment.json"
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            return None
        whole = json.loads(file.read_bytes())
        plain, meta = whole["experiment"], whole["meta"]
        return (plain, meta) if meta["id"] == path.name[:16] and isinstance(plain, dict) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # half a file, or somebody's own


def _date(path: Path, meta: dict) -> datetime:
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return datetime.fromisoformat(meta["date"]).astimezone()
    file = path / "experiment.json"
    whole = file.exists() and path.suffix != ".part"
    return datetime.fromtimestamp((file if whole else path).lstat().st_mtime).astimezone()


def _size(path: Path) -> int:
    return sum(Path(at, name).lstat().st_size for at, _, names in os.walk(path) for name in names)


def _held(lock: Path) -> bool:
    # Whether a process computes the run just now. A lock that is a link, or in which something
    # stands, is not ours and is not opened.
    if not os.path.lexists(lock):
        return False
    if lock.is_symlink() or not lock.is_file() or lock.stat().st_size:
        return True
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True


def move(found: Iterable[Found]) -> tuple[Path | None, list[Found]]:
    """Move folders to a new folder of the trash, which is named by the day.

    What a process has begun to compute since it was listed stays, and so does, with a message, what
    cannot be moved.

    Returns
    -------
    Path or None, list of Found
        The new folder (None if nothing was moved), and what was moved.

    Raises
    ------
    OSError
        If trash and store lie on different disks.
    """
    away, moved = None, []
    for f in found:
        lock = f.path.with_name(f"{f.id}.lock")
        if _held(lock) or f.path.is_symlink() or not f.path.is_dir():
            continue
        try:
            with FileLock(lock, timeout=0):
                away = away or _new_day(paths.trash_folder())
                if _renamed(f.path, away / f.path.name):
                    moved.append(f)
                if not any(lock.parent.glob(f"{f.id}*/")):
                    lock.unlink()
        except Timeout:
            continue
    return away, moved


def _renamed(source: Path, target: Path) -> bool:
    try:
        os.rename(source, target)
        return True
    except OSError as error:
        if error.errno != errno.EXDEV:
            say(f"{source.name} stays: it cannot be moved ({error.strerror})")
            return False
        raise OSError(
            f"{source.parent} and {target.parent} lie on different disks, so nothing was moved; "
            "set PFL_RUNS to the disk of the store"
        ) from None


def _new_day(trash: Path) -> Path:
    _refuse_link(trash)
    days = (trash / (f"{datetime.now():%Y-%m-%d}" + (f".{i}" if i else "")) for i in count())
    for day in days:
        with contextlib.suppress(FileExistsError):
            day.mkdir(parents=True)
            return day
    raise AssertionError("count() ends")


def _refuse_link(trash: Path) -> None:
    if trash.is_symlink():
        raise OSError(f"{trash} is a link, and links are not followed; put a folder there")


def trashed() -> list[tuple[Path, int]]:
    """What lies in the trash, with its bytes: only folders that `move` could have put there."""
    trash = paths.trash_folder()
    _refuse_link(trash)
    days = _folders_named(_DAY, trash)
    return [(run, _size(run)) for day in days for run in _folders_named(_NAME, day)]


def _folders_named(name: re.Pattern, folder: Path) -> list[Path]:
    there = (p for p in sorted(folder.glob("*")) if name.fullmatch(p.name))
    return [p for p in there if p.is_dir() and not p.is_symlink()]


def empty(what: Iterable[tuple[Path, int]]) -> None:
    """Delete what `trashed` returned, and days of which nothing is left."""
    for path, _ in what:
        shutil.rmtree(path)
        with contextlib.suppress(OSError):  # something else lies there, too
            path.parent.rmdir()
