"""Where what is reproduced lies: what is committed, and what notebooks keep until then."""

from __future__ import annotations

from pathlib import Path

from pfl_core.util import paths

PACKAGE = Path(__file__).resolve().parent


def kept_folder() -> Path:
    """What notebooks keep of their runs until it is published: a folder for each part."""
    return paths.runs_root() / "results"


def figures_folder() -> Path:
    """What notebooks draw until it is published: PAPER/PROFILE-DATA/ for each part."""
    return paths.runs_root() / "figures"


def label(profile: str, data: str) -> str:
    """How a part is called in names of files and folders: "quick-digits"."""
    return f"{profile}-{data}"


def results_folder() -> Path:
    """Committed rows: results/ beside the checked-out package; a package alone has none."""
    return (paths.CHECKOUT if paths.IN_CHECKOUT else PACKAGE) / "results"


def checkout(what: str) -> Path:
    """Return the folder of the repository.

    Parameters
    ----------
    what : str
        What needs it, for the message.

    Raises
    ------
    OSError
        Where the package alone is installed.
    """
    if not paths.IN_CHECKOUT:
        raise OSError(
            f"{what} needs the repository of pfl_core, with its results/ and figures/, and not the "
            "package alone: get its source code, and run `pip install -e .` in its folder"
        )
    return paths.CHECKOUT
