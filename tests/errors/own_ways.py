"""A user's own data in the forms in which they come: users, image folders, tables, torch data sets."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from pfl_core import Federation, run
from tests.errors.table import Case, X, Y, own, tiny

WHO = ["ann"] * 6 + ["bob"] * 2
FRAME = pd.DataFrame({"age": np.arange(8.0), "client": WHO, "label": Y})
WHOLE = TensorDataset(torch.zeros(8, 2), torch.tensor(Y))


class Flipped(Dataset):
    """Images that are turned round now and then."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        x = torch.arange(4.0)
        return x.flip(0) if torch.rand(()) < 0.5 else x, i % 2


def folder(broken: Callable[[Path], object]) -> Callable[[], object]:
    """What reads a folder of images after one of them, or of the folders, was `broken`."""

    def use() -> object:
        for client in ("ann", "bob"):
            (path := Path("photos", client, "cat")).mkdir(parents=True)
            for i in range(4):
                Image.new("L", (4, 4)).save(path / f"{i}.png")
        broken(Path("photos", "bob"))
        return Federation.from_folder("photos")

    return use


def image(*where: str, size: tuple[int, int] = (4, 4), mode: str = "L") -> Callable[[Path], object]:
    return lambda bob: Image.new(mode, size).save(bob.joinpath(*where))


CASES = [
    # own data in other forms
    Case(
        "Federation.grouped(x, y, by=users), a user of two samples",
        lambda: Federation.grouped(X, Y, by=WHO),
        r"needs: 'bob' \(2\); leave them out with small='drop'",
    ),
    Case(
        "Federation.grouped(x, y, by=users), a user is missing",
        lambda: Federation.grouped(X, Y, by=[None, *WHO[1:]]),
        "by is missing for 1 of 8 samples, the first is sample 0",
    ),
    Case(
        "Federation.grouped(x, y, by=users), too few users",
        lambda: Federation.grouped(X, Y, by=WHO[1:]),
        "by has 7 values for 8 samples",
    ),
    Case(
        'Federation.grouped(x, y, by=users, split="70/20")',
        lambda: Federation.grouped(X, Y, by=WHO, split="70/20"),
        "must be percent train/test or train/val/test of sum 100",
    ),
    Case(
        "Federation.grouped(x, y, by=users, split=parts), a user without train",
        lambda: Federation.grouped(X, Y, by=WHO, split=["train"] * 6 + ["test"] * 2),
        r"clients without training samples \(of so many\): 'bob' \(2\)",
    ),
    Case(
        "Federation(x, y), labels that are texts and numbers",
        lambda: Federation(X, [0, "cat"] * 4, [[0]]),
        "y holds values of type int, str; give either integers or texts",
    ),
    Case(
        'Federation(x, y, class_names=["cat"]), a label without a name',
        lambda: Federation(X, ["cat", "dog"] * 4, [[0]], class_names=["cat"]),
        "y holds 'dog'; allowed are 'cat'",
    ),
    Case(
        'Federation(x, y, client_names=["ann", "ann"])',
        lambda: own(client_names=["ann", "ann"]),
        "client_names has 'ann' more than once",
    ),
    Case(
        'Federation.from_folder("no/folder")',
        lambda: Federation.from_folder("no/folder"),
        "no/folder is no folder; give one that holds CLIENT/CLASS/IMAGE",
    ),
    Case(
        "an image file that is broken",
        folder(lambda bob: (bob / "cat" / "1.png").write_bytes(b"no image")),
        r"1 of 8 images of photos cannot be read \(bob/cat/1.png",
    ),
    Case(
        "image files of two sizes",
        folder(image("cat", "1.png", size=(5, 6))),
        r"bob/cat/1.png has \(6, 5\); give size=",
    ),
    Case(
        "an image file of 16 bits",
        folder(image("cat", "1.png", mode="I;16")),
        r"more than 8 bits a channel \(bob/cat/1.png\)",
    ),
    Case(
        "an image in no folder of a class",
        folder(image("1.png")),
        r"images in no folder of a client's class \(bob/1.png\)",
    ),
    Case(
        "a table among image files",
        folder(lambda bob: (bob / "cat" / "labels.csv").write_text("")),
        r"no images \(bob/cat/labels.csv\)",
    ),
    Case(
        'Federation.from_table(frame, client="clinet")',
        lambda: Federation.from_table(FRAME, client="clinet"),
        "'clinet' is unknown; did you mean 'client'",
    ),
    Case(
        "Federation.from_table(frame), a column of texts",
        lambda: Federation.from_table(FRAME.assign(sex="f")),
        "columns that are no numbers: 'sex'.*get_dummies",
    ),
    Case(
        "Federation.from_table(frame), a value is missing",
        lambda: Federation.from_table(FRAME.assign(age=[np.nan, *range(7)])),
        r"so many\): 'age' \(1\), the first in row 0",
    ),
    Case(
        "Federation.from_torch(dataset), one data set",
        lambda: Federation.from_torch(WHOLE),
        "give a list of one Dataset a client, or say who holds which samples",
    ),
    Case(
        "Federation.from_torch(subsets), a sample of two clients",
        lambda: Federation.from_torch([Subset(WHOLE, [0, 1, 2]), Subset(WHOLE, [2, 3, 4])]),
        "sample 2 of a TensorDataset is in .*list each sample once",
    ),
    Case(
        "Federation.from_torch(datasets), samples of two shapes",
        lambda: Federation.from_torch([WHOLE, TensorDataset(torch.zeros(8, 3), torch.zeros(8))]),
        "give all one type and shape",
    ),
    Case(
        "Federation.grouped(x, y, by=users), users that are no exact integers",
        lambda: Federation.grouped(X, Y, by=[1e300] * 4 + [2e300] * 4),
        r"by holds float64, such as 1e\+300; give integers or texts",
    ),
    Case(
        "Federation.grouped(x, y, by=generator)",
        lambda: Federation.grouped(X, Y, by=(w for w in WHO)),
        "by is a generator; give a list or array, one a sample",
    ),
    Case(
        "Federation.grouped(x, y, by=users, split=None)",
        lambda: Federation.grouped(X, Y, by=WHO, split=None),
        "split is a NoneType; give a list or array",
    ),
    Case(
        'Federation.from_table(frame, client="label")',
        lambda: Federation.from_table(FRAME, client="label"),
        "one column cannot say two of them; give each its own",
    ),
    Case(
        "Federation.from_torch(subsets), an index from the end",
        lambda: Federation.from_torch([Subset(WHOLE, [0, 1, 7]), Subset(WHOLE, [2, 3, -1])]),
        "sample 7 of a TensorDataset is in train of client '0' and in train of client '1'",
    ),
    Case(
        "Federation.from_torch(datasets), one of them joined to itself",
        lambda: Federation.from_torch([ConcatDataset([WHOLE, WHOLE])]),
        "sample 0 of a TensorDataset is in .*list each sample once",
    ),
    Case(
        "Federation.from_torch(datasets), flips of one client in two",
        lambda: Federation.from_torch(
            [TensorDataset(torch.zeros(4, 4), torch.zeros(4)), Flipped()]
        ),
        "is another each time that it is read, as by a random transform",
    ),
    Case(
        "an image of one client that is a link to another's",
        folder(lambda bob: (bob / "cat" / "9.png").symlink_to("../../ann/cat/0.png")),
        "one image at two places, ann/cat/0.png, bob/cat/9.png: a link",
    ),
    Case(
        "a folder of a client that is a link to nothing",
        folder(lambda bob: (bob.parent / "cem").symlink_to("gone")),
        r"holds links to nothing \(cem\); take them away",
    ),
    Case(
        "a pipe among image files",
        folder(lambda bob: os.mkfifo(bob / "cat" / "9.png")),
        r"no images \(bob/cat/9.png\)",
    ),
    Case(
        "images that a Mac packed, with __MACOSX",
        folder(lambda bob: (bob.parent / "__MACOSX" / "bob" / "cat").mkdir(parents=True)),
        r"no images \(__MACOSX/bob/cat\)",
    ),
    Case(
        'Experiment(augment=["RandomFlip"])',
        lambda: tiny(augment=["RandomFlip"]),
        "transform 'RandomFlip' is unknown; did you mean",
    ),
    Case(
        'Experiment(augment=[{"name": "RandomCrop", "size": 20}]), of another size',
        lambda: run(tiny(augment=[{"name": "RandomCrop", "size": 20}])),
        r"RandomCrop makes uint8 \(1, 20, 20\) of an image uint8 \(1, 28, 28\)",
    ),
    Case(
        "result.predict(0, images, names=True), of classes without names",
        lambda: run(tiny(keep_models=True)).predict(0, np.zeros((1, 28, 28), np.uint8), names=True),
        "the classes of this model have no names.*class_names",
    ),
]
