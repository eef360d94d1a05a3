"""Faults of locks."""

import threading
from collections.abc import Iterator

from filelock import FileLock

from pfl_core import run
from pfl_core.experiments import store
from tests.faults.table import E, Fault, World


def lock_is_a_folder(w: World) -> Iterator[None]:
    (w.store / f"{E.id}.lock").mkdir(parents=True)
    (w.store / f"{E.id}.lock" / "mine").write_text("mine")
    yield
    return w.run(E)


def lock_is_a_link(w: World) -> Iterator[None]:
    (w.folder / "mine").write_text("mine")
    (w.store / f"{E.id}.lock").symlink_to(w.folder / "mine")
    yield
    return w.run(E)


def lock_with_something_in_it(w: World) -> Iterator[None]:
    (w.store / f"{E.id}.lock").write_text("mine")
    yield
    found = w.run(E)
    assert (w.store / f"{E.id}.lock").read_text() == "mine"
    return found


def lock_of_a_stopped_process(w: World) -> Iterator[None]:
    held, ended = threading.Event(), threading.Event()

    def hold():
        with FileLock(w.store / f"{E.id}.lock"):
            held.set()
            ended.wait(600)

    def said(text):  # the other one goes on as soon as it is known to be waited for
        print(text)
        ended.set()

    w.patch.setattr(store, "SAID_AFTER", 0.1)
    w.patch.setattr(store, "say", said)
    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    yield
    return w.run(E)


def lock_of_a_shorter_run_is_a_folder(w: World) -> Iterator[None]:
    (w.store / f"{E.but(rounds=2).id}.lock").mkdir()
    yield
    return run(E, on_round=lambda r, h: r == 2 and "finish")


FAULTS = [
    # locks
    Fault("a folder in a lock's place", lock_is_a_folder, "no lock.*set aside", "computed, equal"),
    Fault(
        "a link in a lock's place", lock_is_a_link, "no lock of a run.*set aside", "computed, equal"
    ),
    Fault("a lock with a text in it", lock_with_something_in_it, "", "computed, equal"),
    Fault(
        "a lock that a stopped process holds",
        lock_of_a_stopped_process,
        "computed by another process, which is waited for",
        "computed, equal",
    ),
    Fault(
        "a folder in the place of the lock of a run that another one ends early as",
        lock_of_a_shorter_run_is_a_folder,
        "no lock of a run.*set aside",
        "computed, equal",
    ),
]
