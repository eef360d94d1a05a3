"""Faults of own data."""

import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from pfl_core import Federation
from tests.faults.table import Fault, World, full_disk, images


def partition_file(w: World, **changes) -> Callable[[], Federation]:
    """A saved partition with other arrays in it; None: without one. What reads it."""
    fed = images()
    fed.save(w.folder / "clients.npz")
    with np.load(w.folder / "clients.npz") as z:
        arrays = {n: z[n] for n in z.files} | changes
    np.savez("clients.npz", **{n: v for n, v in arrays.items() if v is not None})
    return lambda: Federation.load("clients.npz", fed.x, fed.y)


def pfllib(*clients: tuple[np.ndarray, np.ndarray]) -> None:
    """A folder as PFLlib writes it, of samples and labels of each client."""
    for part in ("train", "test"):
        Path("set", part).mkdir(parents=True)
        for k, (x, y) in enumerate(clients):
            np.savez(Path("set", part, f"{k}.npz"), x=x, y=y)


def saved_partition(**changes) -> Callable[[World], Iterator[None]]:
    """A fault: a saved partition has other arrays."""

    def happens(w: World) -> Iterator[None]:
        read = partition_file(w, **changes)
        yield
        return read()

    return happens


def header_of_a_bomb(w: World) -> Iterator[None]:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": "<i8", "fortran_order": False, "shape": (10**12,)}
    )
    read = partition_file(w, train_0=None)
    with zipfile.ZipFile("clients.npz", "a") as z:
        z.writestr("train_0.npy", head.getvalue() + bytes(64))
    yield
    return read()


def partition_on_a_full_disk(w: World) -> Iterator[None]:
    images().save("clients.npz")
    yield
    with full_disk():
        images(3).save("clients.npz")


def labels_of_other_samples(w: World) -> Iterator[None]:
    x, y = np.zeros((9, 4), np.float32), np.arange(9) % 3
    pfllib((x[:5], y[:4]), (x[5:], y[4:]))  # together as many samples as labels
    yield
    Federation.from_pfllib("set")


def pixels_beside_floats(w: World) -> Iterator[None]:
    x, y = np.zeros((4, 1, 8, 8)), np.arange(4) % 3
    pfllib((x, y), (x.astype(np.uint8), y))
    yield
    Federation.from_pfllib("set")


def half_a_client(w: World) -> Iterator[None]:
    x, y = np.zeros((4, 1, 8, 8)), np.arange(4) % 3
    pfllib((x, y), (x, y))
    Path("set/test/1.npz").write_bytes(Path("set/test/1.npz").read_bytes()[:300])
    yield
    Federation.from_pfllib("set")


def without_a_test_file(w: World) -> Iterator[None]:
    x, y = np.zeros((4, 1, 8, 8)), np.arange(4) % 3
    pfllib((x, y), (x, y))
    Path("set/test/1.npz").unlink()
    yield
    Federation.from_pfllib("set")


def one_test_file_more(w: World) -> Iterator[None]:
    x, y = np.zeros((4, 1, 8, 8)), np.arange(4) % 3
    pfllib((x, y), (x, y))
    Path("set/train/1.npz").unlink()
    yield
    Federation.from_pfllib("set")


FAULTS = [
    # own data
    Fault(
        "a saved partition without one of its lists",
        saved_partition(train_1=None),
        "clients.npz is damaged.*train_1",
        "refused, nothing changed",
    ),
    Fault(
        "a saved partition of indices that are floats",
        saved_partition(train_1=np.array([0.5])),
        "train of client 1 holds float64",
        "refused, nothing changed",
    ),
    Fault(
        "a saved partition of indices beyond int64",
        saved_partition(train_1=np.array([2**64 - 1], np.uint64)),
        "train indices of client 1 reach",
        "refused, nothing changed",
    ),
    Fault(
        "a saved partition whose header says 10^12 numbers",
        header_of_a_bomb,
        "clients.npz is damaged",
        "refused, nothing changed",
    ),
    Fault(
        "a saved partition over an older one, on a full disk",
        partition_on_a_full_disk,
        "cannot write .*clients.npz.*what was there is as it was",
        "refused, nothing changed",
    ),
    Fault(
        "PFLlib's files: labels of one client with another one",
        labels_of_other_samples,
        "train/0.npz has samples .5, 4. and labels .4,.",
        "refused, nothing changed",
    ),
    Fault(
        "PFLlib's files: bytes for one client, floats for the others",
        pixels_beside_floats,
        "train/1.npz holds samples uint8 .*first file float32",
        "refused, nothing changed",
    ),
    Fault(
        "PFLlib's files: half of one",
        half_a_client,
        "test/1.npz cannot be read",
        "refused, nothing changed",
    ),
    Fault(
        "PFLlib's files: the test file of one client is missing",
        without_a_test_file,
        r"set holds test files \[0\]; expected train/0.npz, 1.npz, ... and test/ likewise",
        "refused, nothing changed",
    ),
    Fault(
        "PFLlib's files: a test file of a client that does not train",
        one_test_file_more,
        r"set holds test files \[0, 1\]; expected train/0.npz",
        "refused, nothing changed",
    ),
]
