"""Where the run of an Experiment lies in a store, also under a name of an earlier version."""

from __future__ import annotations

import contextlib
import functools
import re
from pathlib import Path
from typing import Any

from pfl_core.data import pools
from pfl_core.experiments import older
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.store import Result, load_result, read_about, said_to_be
from pfl_core.util import paths

TOLD_APART = ("method", "dataset", "model", "partition", "rounds", "seed")  # at a glance


def stored(
    experiment: Experiment, store: Path | None = None, checksum: str | None = None
) -> Result | None:
    """The finished run of an Experiment in a store (default: one's own); None without one.

    `checksum` is that of the data where they are the user's own.

    Raises
    ------
    DatasetMissing
        Where its id cannot be said.
    """
    checksum, store = checksum or pools.checksum(experiment.dataset), store or paths.store_folder()
    return find(experiment, experiment.id_for(checksum), checksum, store)


def find(
    experiment: Experiment, id: str, checksum: str, store: Path, aside: bool = False
) -> Result | None:
    """The finished run of an Experiment with this id, over data with this checksum.

    `aside` is that of `load_result`; a run under an older name is never set aside.
    """
    if found := load_result(store / id, experiment, aside):
        return found
    folder = _older(experiment, id, checksum, store)
    return folder and load_result(folder, experiment, aside=False)


def is_there(experiment: Experiment, store: Path | None = None) -> bool:
    """Whether a store has a folder of the run, whole or not, or a run under an older name."""
    checksum, store = pools.checksum(experiment.dataset), store or paths.store_folder()
    id = experiment.id_for(checksum)
    return (store / id).is_dir() or _older(experiment, id, checksum, store) is not None


def _older(experiment: Experiment, id: str, checksum: str, store: Path) -> Path | None:
    # A run with code that is not ours has no key that can be made again; samples were not drawn.
    if experiment.code or experiment.draws_samples:
        return None
    mine = experiment.plain()
    for folder in store.glob("*"):
        plain = _named_by_the_old_rule(folder)
        if plain is None or any(plain.get(n) != mine[n] for n in TOLD_APART):
            continue
        with contextlib.suppress(ValueError, TypeError, LookupError):  # of other hands
            same = said_to_be(plain).id_for(checksum) == id
            if same and older.legacy(plain, checksum) == folder.name:
                return folder
    return None


def _named_by_the_old_rule(folder: Path) -> dict[str, Any] | None:
    # The values as they were written, if a folder is such a run.
    if not re.fullmatch("[0-9a-f]{16}", folder.name):
        return None
    try:
        at = (folder / "experiment.json").stat()
    except OSError:
        return None
    return _plain(folder, at.st_mtime_ns, at.st_size)


@functools.lru_cache(maxsize=2**14)
def _plain(folder: Path, *stamp: int) -> dict[str, Any] | None:
    about = read_about(folder)
    return about["experiment"] if about and "key" not in about["meta"] else None
