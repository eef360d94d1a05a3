"""Where things lie: the package, its checkout, what runs write, and what is committed."""

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

    ValueError for a "~name" of no user; it says `what` the path is.
    """
    try:
        return Path(given).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{what}={os.fspath(given)!r}: {Path(given).parts[0]} is the folder of no user of this "
            "computer; write the path in full"
        ) from None


def store_folder(given: str | os.PathLike | None = None) -> Path:
    """The store: a folder for each run, finished or not; by default store/ in `runs_root`."""
    return absolute(given, "store") if given else runs_root() / "store"


def kept_folder() -> Path:
    """What notebooks keep of their runs until it is published: a folder for each part."""
    return runs_root() / "results"


def figures_folder() -> Path:
    """What notebooks draw until it is published: PAPER/PROFILE-DATA/ for each part."""
    return runs_root() / "figures"


def trash_folder(root: Path | None = None) -> Path:
    """What `prune` moved away, below `root` (default: where runs are kept)."""
    return (root or runs_root()) / "trash"


def label(profile: str, data: str) -> str:
    """How a part is called in names of files and folders: "quick-digits"."""
    return f"{profile}-{data}"


def results_folder() -> Path:
    """Committed rows: results/ beside the checked-out package; a package alone has none."""
    return (CHECKOUT if IN_CHECKOUT else PACKAGE) / "results"


def checkout(what: str) -> Path:
    """The folder of the repository; OSError where the package alone is installed.

    what: what needs it.
    """
    if not IN_CHECKOUT:
        raise OSError(
            f"{what} needs the repository of pfl_core, with its results/ and figures/, and not the "
            "package alone: get its source code, and run `pip install -e .` in its folder"
        )
    return CHECKOUT
