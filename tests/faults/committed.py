"""Faults of committed results."""

import re
import shutil
from collections.abc import Callable, Iterator

from pfl_core.util import sums
from pfl_papers import places
from pfl_papers.evidence import committed
from tests.faults.table import E, Fault, World, shown


def twice(text: str, line: int = 1) -> str:
    """A table in which a line stands twice."""
    return text + text.splitlines(keepends=True)[line]


def edited(name: str, change: Callable[[str], str]) -> Callable[[World], Iterator[None]]:
    """A fault: a file of results/ is changed, and its digest with it."""

    def happens(w: World) -> Iterator[None]:
        w.edited(name, change)
        yield
        return shown()

    return happens


def digest_of_a_file_elsewhere(w: World) -> Iterator[None]:
    w.published()
    (places.kept_folder() / "mine").write_text("mine")
    with (places.kept_folder() / "fedper.quick-digits" / sums.NAME).open("a") as file:
        file.write(f"{'0' * 64}  ../mine\n")
    yield
    committed.save(shown(), "fedper", "quick", "digits")


def digest_of_a_file_of_ones_own(w: World) -> Iterator[None]:
    w.published()
    results = places.kept_folder() / "fedper.quick-digits"
    (results / "notes.txt").write_text("mine")
    sums.put(results, {"notes.txt": b"mine"})
    yield
    committed.save(shown(), "fedper", "quick", "digits")
    assert (results / "notes.txt").read_text() == "mine"
    (part,) = committed.parts(folder=results).values()
    return part.rows()


def digests_are_empty(w: World) -> Iterator[None]:
    results = w.published()
    (results / "cells.csv").write_text("paper,profile,data,artefact,row,column,run\n")
    (results / sums.NAME).write_text("")
    yield
    return committed.parts()


def digests_are_no_text(w: World) -> Iterator[None]:
    (w.published() / sums.NAME).write_bytes(b"\xff\xfe\x00")
    yield
    return shown()


def published_run_names_a_module(w: World) -> Iterator[None]:
    w.plugin("from_outside", "import os\nos.mkdir('opened')\n")
    w.edited("runs.csv.gz", lambda t: t.replace(",[],done,", ',"[""from_outside""]",done,'))
    shutil.rmtree(w.store / E.id)
    yield
    assert committed.experiment(E.id).plugins == ("from_outside",)
    return shown()


def round_is_missing(w: World) -> Iterator[None]:
    w.edited("fedper.clients.csv.gz", lambda t: re.sub(r".*,test,before,2,.*\n", "", t))
    shutil.rmtree(w.store / E.id)
    yield
    committed.accuracies(E.id, "before", 4)


FAULTS = [
    # committed results
    Fault(
        "SHA256SUMS that lists a file of another folder, where rows are kept",
        digest_of_a_file_elsewhere,
        "lists '../mine'.*names of files beside it",
        "refused, nothing changed",
    ),
    Fault(
        "SHA256SUMS that lists a file of one's own, where rows are kept",
        digest_of_a_file_of_ones_own,
        "",
        "as before",
    ),
    Fault(
        "an empty SHA256SUMS, after a power cut",
        digests_are_empty,
        "cells.csv was not published",
        "refused, nothing changed",
    ),
    Fault(
        "a SHA256SUMS that is no text",
        digests_are_no_text,
        "SHA256SUMS is damaged",
        "refused, nothing changed",
    ),
    Fault(
        "results/: a run twice in runs.csv.gz",
        edited("runs.csv.gz", twice),
        "runs.csv.gz is damaged .it has .* twice",
        "refused, nothing changed",
    ),
    Fault(
        "results/: a line twice in cells.csv",
        edited("cells.csv", twice),
        "cells.csv is damaged .it has .* twice",
        "refused, nothing changed",
    ),
    Fault(
        "results/: a run that nobody has, in cells.csv",
        edited("cells.csv", lambda t: t.replace(E.id, "0" * 16)),
        "runs.csv.gz is damaged .it has no run 0000",
        "refused, nothing changed",
    ),
    Fault(
        "results/: a run without a history",
        edited("fedper.history.csv.gz", lambda t: t.splitlines(keepends=True)[0]),
        "it has no history of run",
        "refused, nothing changed",
    ),
    Fault(
        "results/: an accuracy of 1e400 %",
        edited(
            "fedper.history.csv.gz", lambda t: re.sub(r"(,before,test,)[^,]+", r"\g<1>1e400", t)
        ),
        "client.acc_pct is inf; an accuracy is 0 to 100",
        "refused, nothing changed",
    ),
    Fault(
        "results/: a run's Experiment cut off",
        edited("runs.csv.gz", lambda t: t.replace(",[],done,", ",[,done,")),
        "runs.csv.gz is damaged",
        "refused, nothing changed",
    ),
    Fault(
        "results/: line ends of Windows, and a byte order mark",
        edited("cells.csv", lambda t: "\ufeff" + t.replace("\n", "\r\n")),
        "",
        "as before",
    ),
    Fault(
        "results/: a round missing client by client, read for a figure",
        round_is_missing,
        "clients.csv.gz is damaged .* other rounds than its history",
        "refused, nothing changed",
    ),
    Fault("results/: a run that names a module", published_run_names_a_module, "", "as before"),
]
