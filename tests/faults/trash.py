"""Faults of the trash."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from tests.faults.table import BYSTANDER, LONGER, E, Fault, World, signed
from tests.made import main


def pruned(w: World, *words: str) -> tuple[set[str], set[str]]:
    """What is in the store after `prune`, and what in the trash."""
    assert main(["prune", *words, "--yes"]) == 0
    left = {p.name for p in w.store.iterdir() if p.suffix != ".lock"}
    return left, {p.name for p in w.folder.glob("trash/*/*")}


def one_cannot_be_moved(w: World) -> Iterator[None]:
    w.has(E), w.has(LONGER)
    rename = os.rename

    def busy(source, target):
        if Path(source).name == E.id:
            raise OSError(errno.EBUSY, "Device or resource busy")
        rename(source, target)

    w.patch.setattr(os, "rename", busy)
    yield
    w.expected = {E.id}, {LONGER.id, BYSTANDER.id}
    return pruned(w)


def trash_is_a_file(w: World) -> Iterator[None]:
    w.has(E), (w.folder / "trash").write_text("mine")
    yield
    if main(["prune", "--yes"]):
        raise OSError


def day_is_a_link(w: World) -> Iterator[None]:
    w.has(E), (w.folder / "trash").mkdir()
    (w.folder / "elsewhere").mkdir()
    (w.folder / "trash" / f"{pd.Timestamp.now():%Y-%m-%d}").symlink_to(w.folder / "elsewhere")
    yield
    w.expected = {BYSTANDER.id}, {E.id}
    found = pruned(w, E.id)
    assert not list((w.folder / "elsewhere").iterdir())
    return found


def several_of_one_second(w: World) -> Iterator[None]:
    yield
    for _ in range(3):
        w.has(E)
        pruned(w, E.id)
    assert len(list(w.folder.glob(f"trash/*/{E.id}"))) == 3
    w.expected = {BYSTANDER.id}, {E.id}
    return pruned(w, "--method", "none")


def letters_that_steer_a_terminal(w: World) -> Iterator[None]:
    signed(w.has(E), lambda z: z["experiment"].update(method="\x1b[2J\x1b]0;mine\x07"))
    yield
    assert main(["prune"]) == 0


FAULTS = [
    # the trash
    Fault(
        "prune: one of several folders cannot be moved",
        one_cannot_be_moved,
        "stays: it cannot be moved .Device or resource busy",
        "moved, but for that",
    ),
    Fault(
        "prune: a file in the trash's place", trash_is_a_file, "trash", "refused, nothing changed"
    ),
    Fault(
        "prune: a link to elsewhere in the place of the day's trash",
        day_is_a_link,
        r"1 moved to \S*\.1;",
        "moved, but for that",
    ),
    Fault(
        "prune: the same run three times within a second",
        several_of_one_second,
        r"1 moved to \S*\.2;",
        "moved, but for that",
    ),
    Fault(
        "prune: a name that steers the terminal",
        letters_that_steer_a_terminal,
        r"\\x1b\[2J",
        "as before",
    ),
]
