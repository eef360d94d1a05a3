"""Faults of disks and processes."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pfl_core import run
from tests.faults.table import KEEPS, E, Fault, World, shown


def read_only_at_the_end(w: World) -> Iterator[None]:
    replace = os.replace

    def refuse(source, target):
        if Path(target).name == E.id:
            raise OSError(errno.EROFS, "Read-only file system")
        replace(source, target)

    yield
    with w.patch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="Read-only") as error:
            w.run(E)
    print(error.value)
    w.seen.clear()
    return w.run(E)


def folder_is_gone(w: World) -> Iterator[None]:
    def remove(r, history):
        if r == 2:
            shutil.rmtree(w.store / f"{E.id}.part")

    yield
    run(E, on_round=remove)


def killed_before_the_result(w: World) -> Iterator[None]:
    save = np.savez_compressed

    def killed(*args, **arrays):
        save(*args, **arrays)
        raise KeyboardInterrupt

    yield
    with w.patch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(np, "savez_compressed", killed)
        w.run(KEEPS)
    assert (w.store / f"{KEEPS.id}.part" / "models.pt").exists()
    w.seen.clear()
    return w.run(KEEPS)


def half_files_of_another_process(w: World) -> Iterator[None]:
    results = w.published()
    for name in (".runs.csv.gz.4711.part", ".SHA256SUMS.4711.part"):
        (results / name).write_text("run,")
    yield
    return shown()


FAULTS = [
    # disks and processes
    Fault(
        "a store that is read-only when the result is to be renamed",
        read_only_at_the_end,
        "Read-only file system.*set PFL_RUNS",
        "goes on, equal",
    ),
    Fault(
        "a run's folder deleted while it is computed",
        folder_is_gone,
        "cannot write .*checkpoint.part .*No such file",
        "ends; run again, equal",
    ),
    Fault("killed between models and result", killed_before_the_result, "", "goes on, equal"),
    Fault(
        "half files of another process in results/", half_files_of_another_process, "", "as before"
    ),
]
