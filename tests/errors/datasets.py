"""Data sets that are missing or damaged."""

import contextlib
import json
from pathlib import Path

import numpy as np

from pfl_core import Federation, fetch, load, run
from pfl_core.data.pools import DatasetDamaged, DatasetMissing
from pfl_core.engine.simulate import Interrupted
from tests.errors.table import Case, X, Y, own, tiny


def damaged_cache() -> None:
    Path("cifar10.npz").write_bytes(b"PK\3\4 half a file")
    load("cifar10", root=".")


def cache_of_another_shape() -> None:
    np.savez(
        "cifar10.npz",
        x=np.zeros((4, 8, 8, 3), np.uint8),
        y=np.zeros(4, np.int64),
        is_test=np.arange(4) > 2,
    )
    load("cifar10", root=".")


def damaged(name: str) -> None:
    folder = run(tiny()).folder
    (folder / name).write_bytes((folder / name).read_bytes()[:30])
    run(tiny())


def older_schema() -> None:
    path = run(tiny()).folder / "experiment.json"
    kept = json.loads(path.read_text())
    kept["meta"]["schema"] = 0
    path.write_text(json.dumps(kept))
    run(tiny())


def damaged_checkpoint() -> None:
    with contextlib.suppress(Interrupted):
        run(tiny(rounds=3), on_round=lambda r, h: r == 1)
    (path,) = Path("runs/store").glob("*.part/checkpoint.pt")
    path.write_bytes(path.read_bytes()[:100])
    run(tiny(rounds=3))


def saved_partition_of_other_data() -> None:
    own().save("split.npz")
    Federation.load("split.npz", X + 1, Y)


def pickled_pfllib() -> None:
    for part in ("train", "test"):
        Path("set", part).mkdir(parents=True)
        np.savez(Path("set", part, "0.npz"), data=np.array({"x": X, "y": Y}))
    Federation.from_pfllib("set")


CASES = [
    # data that are missing or damaged
    Case(
        'load("cifar10") where it is not',
        lambda: load("cifar10", root="."),
        "fetch cifar10",
        DatasetMissing,
    ),
    Case(
        "fetch with PFL_OFFLINE=1",
        lambda: fetch("mnist", root="."),
        "because PFL_OFFLINE",
        DatasetMissing,
    ),
    Case(
        'load("flickr_aes")', lambda: load("flickr_aes", root="."), "by hand only", DatasetMissing
    ),
    Case("a damaged cifar10.npz", damaged_cache, "Delete or replace it", DatasetDamaged),
    Case(
        "a cifar10.npz of 8x8 images",
        cache_of_another_shape,
        r"expected \(n, 32, 32, 3\)",
        DatasetDamaged,
    ),
    Case(
        "damaged history.csv of a run",
        lambda: damaged("history.csv"),
        "set aside.*computing again",
        None,
    ),
    Case(
        "damaged arrays.npz of a run",
        lambda: damaged("arrays.npz"),
        "set aside.*computing again",
        None,
    ),
    Case(
        "a run of an older schema",
        older_schema,
        "schema 0 of the store.*set aside.*computing again",
        None,
    ),
    Case(
        "a damaged checkpoint",
        damaged_checkpoint,
        "checkpoint.pt.*set aside.*computing again",
        None,
    ),
    Case("a saved partition over other data", saved_partition_of_other_data, "made for other data"),
    Case("a folder of PFLlib with pickles", pickled_pfllib, "trusted=True"),
    Case(
        'Federation.from_pfllib("no/folder")',
        lambda: Federation.from_pfllib("no/folder"),
        r"expected train/0\.npz",
    ),
]
