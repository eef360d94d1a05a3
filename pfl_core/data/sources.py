"""The table of public sets: where each is found, what it looks like, how it is read and downloaded.

One more public set is one more entry of `SOURCES`, and a reader in readers.py where none reads
files of its form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pfl_core.data import readers
from pfl_core.util import checks

DEBIAN_FASHION = "/usr/share/datasets/fashion-mnist"  # Debian's package dataset-fashion-mnist

# md5 of CIFAR's pickles as published, the test part last; nothing else is unpickled.
CIFAR10_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
CIFAR100_MD5 = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
}


CLASS_NAMES = {  # of sets whose classes are not numbers, where a figure has room for them
    "cifar10": "airplane automobile bird cat deer dog frog horse ship truck".split(),
    "fashion_mnist": "T-shirt trouser pullover dress coat sandal shirt sneaker bag boot".split(),
    "ag_news": ["world", "sports", "business", "science"],
}


@dataclass(frozen=True)
class Source:
    """Where a public data set is found and what it must look like."""

    doc: str
    classes: int | None  # None: as many as there are labels
    shape: tuple[int, ...] | None  # of one sample; None: any
    read: Callable[[Path], readers.Arrays]
    folders: tuple[str, ...]  # below ROOT, in order of preference
    files: tuple[str, ...]  # all in one of these folders
    # train and test samples of the complete set, of equal classes if `balanced`
    official: tuple[int, ...]
    licence: str
    by_hand: str
    # brings the raw files below ROOT, or returns the arrays
    download: Callable[[Path], readers.Arrays | None] | None = None
    columns: tuple[str, ...] = ()
    stats: tuple[tuple[float, ...] | None, tuple[float, ...] | None] = (None, None)
    balanced: bool = True
    packed: str = ""  # ending of the packed form in which the files may be, too
    slow: bool = False  # reading the raw files takes so long that `load` keeps the arrays

    def absent(self, folder: Path) -> list[str]:
        """Which of the files `folder` lacks."""
        return [
            f
            for f in self.files
            if not ((folder / f).exists() or (folder / (f + self.packed)).exists())
        ]


def _torchvision(dataset: str, *parts: dict) -> Callable[[Path], None]:
    def download(root: Path) -> None:
        from torchvision import (
            datasets,  # late: it is slow to import, and most uses of this module never need it
        )

        for part in parts or ({},):
            getattr(datasets, dataset)(root, download=True, **part)

    return download


def _hugging_face(
    repository: str, test: str, convert: Callable
) -> Callable[[Path], readers.Arrays]:
    def download(root: Path) -> readers.Arrays:
        with checks.extra("datasets", "it"):
            import datasets  # pyright: ignore[reportMissingImports]  # tests do not install it
        parts = datasets.load_dataset(repository, cache_dir=str(root / "huggingface"))
        return convert(*((p["label"], p) for p in (parts["train"], parts[test])))

    return download


def _hf_images(*parts: tuple[list[int], Sequence]) -> readers.Arrays:
    return readers.joined(
        *(
            (np.stack([np.asarray(r["image"].convert("RGB")) for r in p]), np.array(y))
            for y, p in parts
        )
    )


def _hf_texts(*parts: tuple[list[int], Any]) -> readers.Arrays:
    return readers.texts(*((list(p["text"]), list(y)) for y, p in parts))


def _idx_files(train: str = "train", test: str = "t10k") -> tuple[str, ...]:
    return tuple(
        f"{p}-{kind}-ubyte" for p in (train, test) for kind in ("images-idx3", "labels-idx1")
    )


def _emnist(split: str, doc: str, classes: int, *official: int, balanced: bool = True) -> Source:
    train, test, first_label = (
        f"emnist-{split}-train",
        f"emnist-{split}-test",
        int(split == "letters"),
    )
    return Source(
        doc=doc,
        classes=classes,
        shape=(28, 28),
        read=partial(readers.idx, train=train, test=test, transposed=True, first_label=first_label),
        folders=("EMNIST/raw", "EMNIST/raw/gzip"),
        files=_idx_files(train, test),
        official=official,
        balanced=balanced,
        packed=".gz",
        licence="none stated; cite Cohen et al. 2017",
        by_hand=(
            "gzip.zip (536 MB, md5 58c8d27c78d21e728a6bc7b3cc06412e) of the NIST page on EMNIST, "
            "into EMNIST/raw"
        ),
        download=_torchvision("EMNIST", {"split": split}),
    )


SOURCES: dict[str, Source] = {
    "mnist": Source(
        doc="handwritten digits, 28x28",
        classes=10,
        shape=(28, 28),
        read=readers.idx,
        folders=("MNIST/raw",),
        files=_idx_files(),
        official=(60_000, 10_000),
        balanced=False,
        packed=".gz",
        stats=((0.1307,), (0.3081,)),
        licence="CC BY-SA 3.0",
        by_hand=(
            "the four .gz files (12 MB) from https://ossci-datasets.s3.amazonaws.com/mnist/ into "
            "MNIST/raw"
        ),
        download=_torchvision("MNIST"),
    ),
    "fashion_mnist": Source(
        doc="pictures of clothes, 28x28",
        classes=10,
        shape=(28, 28),
        read=readers.idx,
        folders=("FashionMNIST/raw", DEBIAN_FASHION),
        files=_idx_files(),
        official=(60_000, 10_000),
        packed=".gz",
        stats=((0.2860,), (0.3530,)),
        licence="MIT",
        by_hand=(
            "apt install dataset-fashion-mnist, or the four .gz files (31 MB) of the repository "
            "zalandoresearch/fashion-mnist into FashionMNIST/raw"
        ),
        download=_torchvision("FashionMNIST"),
    ),
    "emnist": _emnist(
        "byclass", "EMNIST ByClass, 28x28: 0-9, A-Z, a-z", 62, 697_932, 116_323, balanced=False
    ),
    "emnist-bymerge": _emnist(
        "bymerge", "EMNIST, cases merged where alike", 47, 697_932, 116_323, balanced=False
    ),
    "emnist-balanced": _emnist("balanced", "EMNIST ByMerge, equal classes", 47, 112_800, 18_800),
    "emnist-letters": _emnist("letters", "EMNIST letters, cases merged", 26, 124_800, 20_800),
    "emnist-mnist": _emnist("mnist", "EMNIST digits, as many as in MNIST", 10, 60_000, 10_000),
    "cifar10": Source(
        doc="photographs of 10 kinds of things, 32x32x3",
        classes=10,
        shape=(32, 32, 3),
        read=partial(readers.cifar, md5=CIFAR10_MD5, label="labels"),
        folders=("cifar-10-batches-py",),
        files=tuple(CIFAR10_MD5),
        official=(50_000, 10_000),
        stats=((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),  # as pFedHN's code has it
        licence="none stated; cite Krizhevsky 2009",
        by_hand="cifar-10-python.tar.gz (170 MB, md5 c58f30108f718f92721af3b95e74349a) from "
        "https://www.cs.toronto.edu/~kriz/cifar.html, unpacked",
        download=_torchvision("CIFAR10"),
    ),
    "cifar100": Source(
        doc="photographs of 100 kinds of things in 20 coarse classes, 32x32x3",
        classes=100,
        shape=(32, 32, 3),
        read=partial(
            readers.cifar,
            md5=CIFAR100_MD5,
            label="fine_labels",
            columns={"coarse": "coarse_labels"},
        ),
        folders=("cifar-100-python",),
        files=tuple(CIFAR100_MD5),
        official=(50_000, 10_000),
        columns=("coarse",),
        stats=((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        licence="none stated; cite Krizhevsky 2009",
        by_hand="cifar-100-python.tar.gz (169 MB, md5 eb9058c3a382ffc7106e4002c42a8d85) from "
        "https://www.cs.toronto.edu/~kriz/cifar.html, unpacked",
        download=_torchvision("CIFAR100"),
    ),
    "omniglot": Source(
        doc="characters of 50 alphabets, 20 drawings each, 105x105 (a cache may hold 28x28)",
        classes=None,
        shape=None,
        read=readers.omniglot,
        folders=("omniglot-py",),
        files=("images_background", "images_evaluation"),
        official=(1623 * 17, 1623 * 3),
        columns=("alphabet", "character"),
        slow=True,
        licence="MIT",
        by_hand=(
            "images_background.zip and images_evaluation.zip (16 MB) of the repository "
            "brendenlake/omniglot, folder python, unpacked into omniglot-py"
        ),
        download=_torchvision("Omniglot", {"background": True}, {"background": False}),
    ),
    "tiny_imagenet": Source(
        doc="photographs of 200 kinds of things, 64x64x3; the test part is the official val",
        classes=200,
        shape=(64, 64, 3),
        read=readers.tiny_imagenet,
        folders=(".",),
        files=("tiny-imagenet-200",),
        official=(100_000, 10_000),
        packed=".zip",
        slow=True,
        licence="non-commercial research (ImageNet's terms)",
        by_hand=(
            "tiny-imagenet-200.zip (248 MB) from "
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip, unpacked or as it is"
        ),
        download=_hugging_face("zh-plus/tiny-imagenet", "valid", _hf_images),
    ),
    "ag_news": Source(
        doc="news texts of 4 kinds, 200 tokens",
        classes=4,
        shape=(readers.TEXT_LENGTH,),
        read=readers.ag_news,
        folders=("ag_news",),
        files=("train.csv", "test.csv"),
        official=(120_000, 7_600),
        columns=("vocab",),
        slow=True,
        licence="non-commercial use",
        by_hand="train.csv and test.csv (rows class,title,description or text,label) into ag_news",
        download=_hugging_face("fancyzhx/ag_news", "test", _hf_texts),
    ),
    "flickr_aes": Source(
        doc="photographs rated 0-4 by 210 workers, resampled to 64x64x3, one row a rating",
        classes=5,
        shape=(*readers.FLICKR_SIZE, 3),
        read=readers.flickr_aes,
        folders=("flickr_aes",),
        files=(readers.FLICKR_CSV, "40K"),
        official=(0, 0),
        columns=("worker", "image"),
        slow=True,
        licence="none stated, so never downloaded by this package",
        by_hand=(
            "FLICKR-AES-001.zip (5.8 GB) and the CSV by the links in the repository "
            "alanspike/personalizedImageAesthetics; the CSV and the folder 40K into flickr_aes"
        ),
    ),
}
