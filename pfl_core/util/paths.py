"""Where things lie: the package, its checkout, and what runs write."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
CHECKOUT = PACKAGE.parent  # of an installed package: where packages lie
IN_CHECKOUT = (CHECKOUT / "pyproject.toml").exists()


def runs_root() -> Path:
    """Where runs are kept.

    That is $PFL_RUNS, else runs/ beside the checked-out package, else runs/ in the current folder.
    """
    if given := os.environ.get("PFL_RUNS"):
        return absolute(given, "PFL_RUNS")
    return (CHECKOUT if IN_CHECKOUT else Path.cwd()) / "runs"


def absolute(given: str | os.PathLike, what: str) -> Path:
    """`expanded`, and the same after the current folder has changed."""
    return expanded(given, what).absolute()


def expanded(given: str | os.PathLike, what: str) -> Path:
    """A path whose "~" is written out.

    Raises
    ------
    ValueError
        For a "~name" of no user; it says `what` the path is.
    """
    try:
        return Path(given).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{what}={os.fspath(given)!r}: {Path(given).parts[0]} is the folder of no user of this "
            "computer; write the path in full"
        ) from None


def to_write(given: str | os.PathLike, what: str) -> Path:
    """`expanded`, of a file that is to be written.

    Raises
    ------
    OSError
        For a folder, and for a file in no folder.
    """
    file = expanded(given, what)
    if file.is_dir() or not file.parent.is_dir():
        why = "is a folder" if file.is_dir() else f"lies in no folder: {file.parent} is none"
        raise OSError(f"{file} {why}; give the name of a file in a folder that is there")
    return file


def store_folder(given: str | os.PathLike | None = None) -> Path:
    """The store: a folder for each run, finished or not; by default store/ in `runs_root`."""
    return absolute(given, "store") if given else runs_root() / "store"


def trash_folder() -> Path:
    """What `prune` moved away."""
    return runs_root() / "trash"
