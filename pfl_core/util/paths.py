"""Where things lie: the package, its checkout, what runs write, and what is committed."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
CHECKOUT = PACKAGE.parent  # of an installed package: where packages lie, without results


def runs_root() -> Path:
    """Where runs are kept.

    That is $PFL_RUNS, else runs/ beside the checked-out package, else runs/ in the current folder.
    """
    if os.environ.get("PFL_RUNS"):
        return Path(os.environ["PFL_RUNS"]).expanduser()
    return (CHECKOUT if (CHECKOUT / "pyproject.toml").exists() else Path.cwd()) / "runs"


def store_folder() -> Path:
    """The store: a folder for each run, finished or not."""
    return runs_root() / "store"


def results_folder() -> Path:
    """Committed rows: results/ beside the checked-out package."""
    return CHECKOUT / "results"
