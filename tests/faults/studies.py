"""Faults of studies in files, of tables that are written, and of image files."""

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from pfl_core import Federation, export, table
from pfl_core.experiments.store import Result
from pfl_core.experiments.study import Study
from tests.faults.table import E, Fault, World, clean, full_disk, images

STUDY = """
[base]
dataset = "digits"
partition_args = { alpha = 1.0 }
clients = 4
model = "mlp"
model_args = { hidden = 8 }
rounds = 4
batch = 16
lr = 0.1
max_samples = 40
[rows.FedAvg]
method = "fedavg"
[rows.Local]
method = "local"
"""


def ran() -> list[Result]:
    """The finished runs of the study in study.toml, swept here."""
    study = Study.read("study.toml")
    study.run(device="cpu", jobs=1)
    return study.results()


def file_of(raw: bytes) -> Callable[[World], Iterator[None]]:
    """A fault: the study's file holds these bytes when it is run."""

    def happens(w: World) -> Iterator[None]:
        Path("study.toml").write_bytes(raw)
        yield
        return ran()

    return happens


def a_damaged_run(w: World) -> Iterator[None]:
    Path("study.toml").write_text(STUDY)
    (w.has(E) / "history.csv").write_text("rounds\n")
    yield
    return ran()


def a_row_more(w: World) -> Iterator[None]:
    Path("study.toml").write_text(STUDY)
    ran()
    Path("study.toml").write_text(STUDY.replace("FedAvg", "Average") + "[rows.Slow]\nlr = 0.01\n")
    yield
    found = ran()
    assert [r.experiment.tags["row"] for r in found] == ["Average", "Local", "Slow"]
    return found


def its_data_go(w: World) -> Iterator[None]:
    images().save("mine")
    text = STUDY.replace('"digits"', '"own"').replace(
        "partition_args = { alpha = 1.0 }\nclients = 4", ""
    )
    Path("study.toml").write_text(f'data = "mine"\n{text}')
    Study.read("study.toml")
    Path("mine").rename("elsewhere")
    yield
    return ran()


def written_on_a_full_disk(write: Callable[..., object]) -> Callable[[World], Iterator[None]]:
    """A fault: a file of numbers is replaced on a full disk."""

    def happens(w: World) -> Iterator[None]:
        Path("mine.csv").write_text("what was there")
        found = clean(E), clean(E.but(method="local"))
        yield
        with full_disk():
            write(*found)

    return happens


def folder(broken: Callable[[Path], object]) -> Callable[[World], Iterator[None]]:
    """A fault: a folder of images is read in which one of them is `broken`."""

    def happens(w: World) -> Iterator[None]:
        for k, client in enumerate(("ann", "bob")):
            (path := Path("photos", client, "cat")).mkdir(parents=True)
            for i in range(4):
                Image.fromarray(np.full((4, 4), 40 * k + i, np.uint8)).save(path / f"{i}.png")
        broken(Path("photos", "bob", "cat"))
        yield
        Federation.from_folder("photos")

    return happens


def promises(path: Path, width: int, height: int) -> None:
    """A file that begins as an image of this size, and has no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", b"") + chunk(b"IEND", b""))


FAULTS = [
    # studies, tables and image files
    Fault(
        "a study's file, half of which is written",
        file_of(STUDY.encode()[: STUDY.index("hidden")]),
        "study.toml is no TOML file",
        "refused, nothing changed",
    ),
    Fault(
        "a study's file that a power cut left full of zeros",
        file_of(STUDY.encode() + b"\0" * 512),
        "study.toml is no TOML file",
        "refused, nothing changed",
    ),
    Fault(
        "a study's file in another encoding (UTF-16)",
        file_of(STUDY.encode("utf-16")),
        "study.toml is no TOML file",
        "refused, nothing changed",
    ),
    Fault(
        "a study's file with line ends of Windows and a byte order mark",
        file_of(b"\xef\xbb\xbf" + STUDY.replace("\n", "\r\n").encode()),
        "",
        "computed, equal",
    ),
    Fault(
        "a damaged run among those of a study",
        a_damaged_run,
        "could not be read.*set aside",
        "set aside, computed again, equal",
    ),
    Fault("a study's file changes between two sweeps", a_row_more, "", "computed, equal"),
    Fault(
        "a study's data are gone between two commands",
        its_data_go,
        "mine has no x.npy, y.npy, index.npz",
        "refused, nothing changed",
    ),
    Fault(
        "rows exported over an older file, on a full disk",
        written_on_a_full_disk(lambda *r: export("mine.csv", *r)),
        r"cannot write mine.csv \(File too large\); what was there is as it was",
        "refused, nothing changed",
    ),
    Fault(
        "a table's numbers written over an older file, on a full disk",
        written_on_a_full_disk(lambda *r: table(*r).csv("mine.csv")),
        r"cannot write mine.csv \(File too large\); what was there is as it was",
        "refused, nothing changed",
    ),
    Fault(
        "an image file of no pixels that promises 60,000 x 60,000",
        folder(lambda cat: promises(cat / "9.png", 60_000, 60_000)),
        "1 of 9 images of photos cannot be read",
        "refused, nothing changed",
    ),
    Fault(
        "a pipe without a writer among image files",
        folder(lambda cat: os.mkfifo(cat / "9.png")),
        r"no images \(bob/cat/9.png\)",
        "refused, nothing changed",
    ),
    Fault(
        "a folder of a client that lies on a disk which is not there",
        folder(lambda cat: (cat.parents[1] / "cem").symlink_to("/no/such/disk")),
        r"links to nothing \(cem\)",
        "refused, nothing changed",
    ),
    Fault(
        "an image that links put in the folders of two clients",
        folder(lambda cat: (cat / "9.png").symlink_to("../../ann/cat/0.png")),
        "one image at two places, ann/cat/0.png, bob/cat/9.png",
        "refused, nothing changed",
    ),
]
