"""Faults of runs that ended early, and of sweeps."""

import shutil
from collections.abc import Iterator

import numpy as np
import pytest

from pfl_core import run, sweep
from pfl_core.experiments.store import Result, load_result
from tests.faults.table import LONGER, E, Fault, World


def early(w: World) -> Result:
    return run(LONGER, on_round=lambda r, h: r == E.rounds and "finish")


def early_into_a_file(w: World) -> Iterator[None]:
    (w.store / E.id).write_text("mine")
    yield
    return early(w)


def early_over_a_damaged_run(w: World) -> Iterator[None]:
    (w.has(E) / "history.csv").write_text("rounds\n")
    yield
    return early(w)


def early_and_its_state_is_damaged(w: World) -> Iterator[None]:
    folder = early(w).folder
    (folder / "state.pt").write_bytes((folder / "state.pt").read_bytes()[:-200])
    yield
    return w.run(LONGER)


def killed_while_it_ends_early(w: World) -> Iterator[None]:
    save = np.savez_compressed

    def killed(*args, **arrays):
        save(*args, **arrays)
        raise KeyboardInterrupt

    with w.patch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(np, "savez_compressed", killed)
        early(w)
    yield
    return w.run(LONGER)


def sweep_over_damage(w: World) -> Iterator[None]:
    cells = [E, E.but(lr=0.3), E.but(seed=1)]
    (w.has(cells[0]) / "arrays.npz").write_bytes(b"PK")
    (w.store / cells[1].id).write_text("mine")
    shutil.copytree(w.has(cells[2]), w.store / f"{cells[2].id}.part")
    yield
    assert sweep(cells).run.nunique() == 3
    return [load_result(w.store / e.id, e) for e in cells]


FAULTS = [
    # runs that ended early, and sweeps
    Fault(
        "a run ends early, and a file lies in the place of its result",
        early_into_a_file,
        "no folder of a run.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a run ends early, and a damaged run lies in the place of its result",
        early_over_a_damaged_run,
        "could not be read.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "the state of a run that ended early is cut off, and a longer one could go on from it",
        early_and_its_state_is_damaged,
        "state.pt is not as its run wrote it",
        "computed, equal",
    ),
    Fault("killed while a run ends early", killed_while_it_ends_early, "", "goes on, equal"),
    Fault(
        "a sweep over a damaged run, a file in the place of one, and half a run beside its result",
        sweep_over_damage,
        "could not be read.*no folder of a run",
        "set aside, computed again, equal",
    ),
]
