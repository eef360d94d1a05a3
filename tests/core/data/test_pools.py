"""Every way into the pool: embedded sets, array caches, raw files in their public forms, downloads (faked)."""

import csv
import gzip
import hashlib
import io
import os
import pickle
import sys
import types
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pfl_core import Experiment
from pfl_core.data import pools as data
from pfl_core.data import readers, sources
from pfl_core.data.pools import DatasetDamaged, DatasetMissing, Pool, fetch, load
from pfl_core.experiments import build

REAL = os.environ.get("PFL_DATA")  # read before the fixtures point it elsewhere
PARTS = ["looked in", "found", "expected", "get it", "or", "licence", "meanwhile"]
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """An empty data folder, which $PFL_DATA names; nothing decoded earlier, nothing of this machine."""
    monkeypatch.setenv("PFL_DATA", str(tmp_path))
    monkeypatch.delenv("PFL_OFFLINE", raising=False)
    monkeypatch.setattr(data, "_ENTRIES", dict(data._ENTRIES))
    source(monkeypatch, "fashion_mnist", folders=("FashionMNIST/raw",))
    data._load.cache_clear()
    yield tmp_path
    data._load.cache_clear()


def source(monkeypatch, name, **changes):
    monkeypatch.setitem(sources.SOURCES, name, replace(sources.SOURCES[name], **changes))


def images(n, *shape):
    return RNG.integers(0, 256, (n, *shape), dtype=np.uint8)


def encoded(array, form):
    out = io.BytesIO()
    Image.fromarray(array).save(out, form)
    return out.getvalue()


def write(path: Path, content: bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_idx(path: Path, array, packed=False):
    raw = (
        b"\0\0\x08"
        + bytes([array.ndim])
        + b"".join(n.to_bytes(4, "big") for n in array.shape)
        + array.tobytes()
    )
    write(Path(f"{path}.gz") if packed else path, gzip.compress(raw) if packed else raw)


def write_mnist(folder: Path, train=20, test=10, names=("train", "t10k"), packed=False, first=0):
    """Four IDX files; returns (x, y) of both parts, as stored."""
    x, y = images(train + test, 28, 28), (np.arange(train + test) % 10 + first).astype(np.uint8)
    for name, part in zip(names, (slice(train), slice(train, None)), strict=True):
        write_idx(folder / f"{name}-images-idx3-ubyte", x[part], packed)
        write_idx(folder / f"{name}-labels-idx1-ubyte", y[part], packed)
    return x, y


def arrays(n=30, shape=(28, 28), **changes):
    y = np.arange(n) % 10
    return {
        "x": images(n, *shape),
        "y": y.astype(np.int64),
        "is_test": np.arange(n) % 6 == 0,
        **changes,
    }


def lines_of(error) -> dict[str, str]:
    """The parts of an error: its lines after the headline."""
    return {
        k.strip(): v.strip()
        for k, v in (line.split(":", 1) for line in str(error.value).splitlines()[1:])
    }


# ---- embedded sets


@pytest.mark.parametrize(
    "name, n, classes, checksum",
    [
        ("digits", 1797, 10, "3c1b995226f94a6ad4c3df572da93a605ff39db8f81aa16c0cec2fd618c7cb9c"),
        (
            "digits100",
            6000,
            100,
            "6f5b3f52fc86d37987a4b6cdfc694e00f297b214f3f2d31eee6e8be4ff0d7467",
        ),
    ],
)
def test_embedded_sets_are_fixed(name, n, classes, checksum):
    pool = load(name)
    assert (pool.n, pool.classes, pool.input_shape, pool.kind) == (n, classes, (1, 28, 28), "image")
    assert pool.checksum == checksum
    share = np.bincount(pool.y[pool.is_test]) / np.bincount(pool.y)
    assert np.abs(share - 1 / 6).max() < 0.01
    assert not pool.x[:, [0, 1, -2, -1]].any() and not pool.x[:, :, [0, 1, -2, -1]].any()


@pytest.mark.parametrize("file", ["there", "elsewhere"])
def test_digits_are_scikit_learns(file, monkeypatch):
    from sklearn.datasets import load_digits

    if file == "elsewhere":
        monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    pool, small = data._digits(), load_digits()
    assert np.array_equal(pool.y, small.target)
    assert np.abs(pool.x[:, 3:27:3, 3:27:3] / 255 * 16 - small.images).max() < 0.05
    assert np.array_equal(pool.x[:, 2:26:3, 2:26:3], pool.x[:, 4:26:3, 4:26:3])


def test_texts_of_digits_name_their_bright_pixels():
    ones, pool = load("digits"), load("digits_texts")
    assert (pool.kind, pool.n, pool.options) == ("text", 1797, {"vocab": 65})
    assert np.array_equal(pool.y, ones.y) and np.array_equal(pool.is_test, ones.is_test)
    for text, image in zip(pool.x[::50], ones.x[::50], strict=True):
        words = [pool.extra["vocab"][token] for token in text if token]
        rows, columns = np.nonzero(image[3:27:3, 3:27:3] >= 128)
        assert words == [f"row{r}column{c}" for r, c in zip(rows, columns, strict=True)]
        assert not text[len(words) :].any()


def test_digits100_pairs_never_mix_train_and_test():
    ones, pool = load("digits"), load("digits100")
    assert np.array_equal(pool.extra["coarse"], pool.y // 10)
    assert np.array_equal(np.bincount(pool.y), np.full(100, 60))
    whole = ones.x[:, 2:26, 5:23].reshape(-1, 24, 6, 3)[..., :2].reshape(-1, 24, 12)
    known = {}  # the pixels of a half -> the (digit, part) it is made of
    for half, digit, test in zip(whole, ones.y, ones.is_test, strict=True):
        known.setdefault(half.tobytes(), set()).add((digit, test))
    for x, y, test in zip(pool.x, pool.y, pool.is_test, strict=True):
        assert (y // 10, test) in known[x[2:26, 2:14].tobytes()]
        assert (y % 10, test) in known[x[2:26, 14:26].tobytes()]


def test_raters_of_digits100():
    base, pool = load("digits100"), load("raters_digits100")
    worker, image = pool.extra["worker"], pool.extra["image"]
    per_worker = np.bincount(worker)
    assert len(per_worker) >= 30 and per_worker.min() >= 60 and per_worker.max() <= 290
    assert np.array_equal(pool.x, base.x[image]) and pool.classes == 5 and pool.mean == base.mean
    labels = [np.bincount(pool.y[worker == w], minlength=5) for w in range(len(per_worker))]
    assert (
        max(np.ptp(n) for n in labels) <= 1
    )  # quintiles, so the majority class of a worker is worth 20 %
    seen, scores = np.unique(np.stack([image, pool.y]), axis=1)[0], np.bincount(image)
    assert (np.bincount(seen) > 1)[scores > 1].mean() > 0.5  # one image, several labels
    assert all(len(set(image[worker == w])) == n for w, n in enumerate(per_worker))
    share = np.bincount(worker[pool.is_test]) / per_worker
    assert np.abs(share - 0.2).max() < 0.01


def test_raters_of_colour_images(root):
    np.savez(root / "cifar10.npz", **arrays(2000, (32, 32, 3)))
    pool = load("raters_cifar10")
    assert (
        pool.input_shape == (3, 32, 32)
        and pool.mean == load("cifar10").mean
        and len(set(pool.extra["worker"])) >= 30
    )


# ---- the pool itself


def test_statistics_are_those_of_the_training_part():
    x = images(3000, 5, 4, 3)
    test = np.arange(3000) % 2 == 0
    pool = Pool("own", x, np.zeros(3000, np.int64), test, 1)
    part = x[~test] / 255
    assert pool.input_shape == (3, 5, 4)
    np.testing.assert_allclose(pool.mean, part.mean((0, 1, 2)), atol=1e-4)
    np.testing.assert_allclose(pool.std, part.std((0, 1, 2)), atol=1e-4)
    floats = Pool("own", (x / 255).astype(np.float32), np.zeros(3000, np.int64), test, 1)
    assert (floats.mean, floats.std) == (pool.mean, pool.std)
    assert Pool(
        "black", np.zeros((2, 3, 3), np.uint8), np.zeros(2, np.int64), np.zeros(2, bool), 1
    ).std == (1.0,)


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 1), (5, 4, 3)])
def test_float_images_reach_a_model_as_bytes_do(shape, monkeypatch):
    x = images(30, *shape)
    a = arrays() | {"x": x}
    data.register_dataset("bytes", lambda: Pool("bytes", **a, classes=10, mean=(0.0,), std=(1.0,)))
    data.register_dataset(
        "floats", lambda: Pool("floats", **a | {"x": (x / 255).astype(np.float32)}, classes=10)
    )
    one, two = (
        build.client_data(Experiment(dataset=name, partition="iid", clients=2))
        for name in ("bytes", "floats")
    )
    assert one.input_shape == two.input_shape == load("floats").input_shape
    at = torch.arange(30)
    torch.testing.assert_close(one.batch(at)[0], two.batch(at)[0])


def test_checksum_sees_values_shapes_and_kinds():
    a = arrays()
    pool = Pool("own", **a, classes=10)
    assert (
        pool.checksum == Pool("other", **{k: v.copy() for k, v in a.items()}, classes=10).checksum
    )
    for key, changed in (
        ("x", a["x"] ^ 1),
        ("x", a["x"].reshape(30, 14, 56)),
        ("is_test", ~a["is_test"]),
    ):
        assert Pool("own", **{**a, key: changed}, classes=10).checksum != pool.checksum
    for other in (dict(classes=11), dict(mean=(0.2,), std=(0.3,)), dict(extra={"coarse": a["y"]})):
        assert Pool("own", **{**a, "classes": 10} | other).checksum != pool.checksum


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"x": images(30, 28, 28).astype(np.float64)}, "x is float64"),
        ({"x": images(30, 28)}, "x is uint8"),
        ({"x": images(30, 28).tolist()}, "x is a list; give a numpy array"),
        ({"y": np.ma.array(np.zeros(30, np.int64), mask=True)}, "y is a masked array"),
        ({"x": np.full((30, 4), np.inf)}, "not finite in 30 of 30 samples"),
        ({"x": np.zeros((0, 28, 28), np.uint8)}, "not empty"),
        ({"y": np.zeros(30, np.int32)}, "y is int32"),
        ({"y": np.zeros(29, np.int64)}, r"expected int64 \(30,\)"),
        ({"y": np.full(30, 10)}, "y goes from 10 to 10, expected 0 to 9"),
        ({"y": np.full(30, -1)}, "y goes from -1"),
        ({"is_test": np.zeros(30)}, "is_test is float64"),
        ({"is_test": np.ones(30, bool)}, "all samples are test samples"),
        ({"extra": {"worker": np.zeros(3)}}, "'worker' has shape"),
        (
            {"x": np.full((30, 4), 9, np.int32), "extra": {"vocab": np.array(["a", "b"])}},
            "vocabulary has 2 words",
        ),
        (
            {"x": images(30, 28, 28, 4)},
            r"x is uint8 \(30, 28, 28, 4\); allowed are 1 or 3 channels, last",
        ),
        ({"x": images(30, 3, 28, 28).astype(np.float32)}, "allowed are 1 or 3 channels, last"),
        (
            {"x": np.where(np.arange(30) < 28, 0, np.nan).astype(np.float32)[:, None, None]},
            "not finite in 2 of 30 samples",
        ),
        ({"classes": 10**9}, "1000000000 classes of 30 samples; allowed are 1000"),
    ],
)
def test_pool_says_what_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        Pool("own", **{**arrays(), "classes": 10, **changes})


# ---- raw files


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "name, folder", [("mnist", "MNIST/raw"), ("fashion_mnist", "FashionMNIST/raw")]
)
def test_idx_files(root, name, folder, packed):
    x, y = write_mnist(root / folder, packed=packed)
    pool = load(name)
    assert np.array_equal(pool.x, x) and np.array_equal(pool.y, y)
    assert np.array_equal(np.flatnonzero(pool.is_test), np.arange(20, 30))
    assert pool.mean == sources.SOURCES[name].stats[0] and not (root / f"{name}.npz").exists()


def test_fashion_mnist_of_debian_is_looked_for():
    assert "/usr/share/datasets/fashion-mnist" == sources.DEBIAN_FASHION
    assert (
        str(Path("/any") / sources.DEBIAN_FASHION) == sources.DEBIAN_FASHION
    )  # an absolute folder is not below the root


@pytest.mark.parametrize("split", ["byclass", "bymerge", "balanced", "letters", "mnist"])
def test_emnist_is_turned_upright(root, split):
    first = int(split == "letters")  # whose labels begin at 1
    names = (f"emnist-{split}-train", f"emnist-{split}-test")
    x, y = write_mnist(root / "EMNIST/raw", names=names, packed=True, first=first)
    pool = load("emnist" if split == "byclass" else f"emnist-{split}")
    assert np.array_equal(pool.x, x.transpose(0, 2, 1)) and np.array_equal(
        pool.y, y.astype(int) - first
    )


def test_emnist_subsets(root):
    y = np.arange(124) % 62
    np.savez(root / "emnist.npz", **arrays(124, y=y, is_test=np.arange(124) >= 62))
    whole, digits, letters = load("emnist"), load("emnist-digits"), load("emnist-letters10")
    assert np.array_equal(digits.x, whole.x[y < 10]) and np.array_equal(digits.y, y[y < 10])
    upper, lower = (y >= 10) & (y < 20), (y >= 36) & (y < 46)
    assert np.array_equal(letters.x, whole.x[upper | lower])
    assert np.array_equal(letters.y, [*range(10)] * 4) and letters.classes == digits.classes == 10
    assert letters.is_test.sum() == 20 and digits.name == "emnist-digits"


@pytest.mark.parametrize(
    "content, message",
    [
        (b"no IDX file at all", "is not an IDX file"),
        (b"", "is not an IDX file"),
        (
            b"\0\0\x08\x03" + (20).to_bytes(4, "big") + (28).to_bytes(4, "big") * 2 + bytes(99),
            "truncated",
        ),
        (
            b"\0\0\x08\x03"
            + (19).to_bytes(4, "big")
            + (28).to_bytes(4, "big") * 2
            + bytes(19 * 784),
            "belong together",
        ),
    ],
)
def test_damaged_idx(root, content, message):
    write_mnist(root / "MNIST/raw")
    write(root / "MNIST/raw/train-images-idx3-ubyte", content)
    with pytest.raises(DatasetDamaged, match=message):
        load("mnist")


def test_truncated_gzip(root):
    write_mnist(root / "MNIST/raw", packed=True)
    path = root / "MNIST/raw/train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DatasetDamaged, match="MNIST/raw"):
        load("mnist")


def write_cifar(folder: Path, monkeypatch, published, **labels):
    """Pickles of two images each, whose md5 takes the place of the `published` one; returns the images as [n, 32, 32, 3]."""
    x = images(2 * len(published), 3, 32, 32)
    for i, name in enumerate(published):
        part = slice(2 * i, 2 * i + 2)
        raw = pickle.dumps(
            {"data": x[part].reshape(2, -1), **{k: v[part] for k, v in labels.items()}}
        )
        write(folder / name, raw)
        monkeypatch.setitem(published, name, hashlib.md5(raw).hexdigest())
    return x.transpose(0, 2, 3, 1)


def test_cifar10_pickles(root, monkeypatch):
    y = RNG.integers(0, 10, 12).tolist()
    x = write_cifar(root / "cifar-10-batches-py", monkeypatch, sources.CIFAR10_MD5, labels=y)
    pool = load("cifar10")
    assert (
        np.array_equal(pool.x, x)
        and pool.y.tolist() == y
        and pool.is_test.tolist() == [False] * 10 + [True] * 2
    )
    assert (pool.mean, pool.std) == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def test_cifar100_pickles_have_coarse_labels(root, monkeypatch):
    fine, coarse = [3, 99, 0, 50], [1, 19, 0, 7]
    x = write_cifar(
        root / "cifar-100-python",
        monkeypatch,
        sources.CIFAR100_MD5,
        fine_labels=fine,
        coarse_labels=coarse,
    )
    pool = load("cifar100")
    assert (
        np.array_equal(pool.x, x)
        and pool.y.tolist() == fine
        and pool.extra["coarse"].tolist() == coarse
    )


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_foreign_pickle_is_not_opened(root, monkeypatch):
    write_cifar(
        root / "cifar-100-python",
        monkeypatch,
        sources.CIFAR100_MD5,
        fine_labels=[1] * 4,
        coarse_labels=[1] * 4,
    )
    (root / "cifar-100-python/test").write_bytes(pickle.dumps(Trap(str(root / "opened"))))
    with pytest.raises(DatasetDamaged, match="test has md5"):
        load("cifar100")
    assert not (root / "opened").exists()


def test_omniglot_drawings(root):
    drawn = {}
    for part, alphabets in (("background", ["Korean", "Balinese"]), ("evaluation", ["Angelic"])):
        for a in alphabets:
            for c in range(1, 3):
                for i in range(6):
                    ink = np.where(images(1, 105, 105)[0] > 250, 0, 255).astype(
                        np.uint8
                    )  # stored black on white
                    path = f"omniglot-py/images_{part}/{a}/character{c:02}/{c:04}_{i:02}.png"
                    write(root / path, encoded(ink, "PNG"))
                    drawn[a, c - 1, i] = 255 - ink
    pool = load("omniglot")
    order = ["Balinese", "Korean", "Angelic"]
    assert pool.input_shape == (1, 105, 105) and pool.classes == 6
    assert pool.extra["alphabet"].tolist() == sorted([0, 1, 2] * 12)
    for i in range(pool.n):
        a, c = pool.extra["alphabet"][i], pool.extra["character"][i]
        assert np.array_equal(pool.x[i], drawn[order[a], c, i % 6]) and pool.y[i] == 2 * a + c
    assert np.array_equal(np.bincount(pool.y[pool.is_test]), np.ones(6))


def tiny_imagenet_files():
    """{path: bytes} of 3 classes, 4 training and 2 val images each; the mean of the pixels tells the class."""
    classes = ["n03", "n01", "n02"]
    files = {"wnids.txt": "\n".join(classes).encode()}
    annotations = []
    for k, wnid in enumerate(sorted(classes)):
        picture = encoded(np.full((64, 64, 3), 50 + 60 * k, np.uint8), "JPEG")
        grey = encoded(
            np.full((64, 64), 50 + 60 * k, np.uint8), "JPEG"
        )  # some of the real ones are grey
        for i in range(4):
            files[f"train/{wnid}/images/{wnid}_{i}.JPEG"] = grey if i == 0 else picture
        for i in range(2):
            files[f"val/images/val_{3 * i + k}.JPEG"] = picture
            annotations.append(f"val_{3 * i + k}.JPEG\t{wnid}\t0\t0\t62\t62")
    files["val/val_annotations.txt"] = "\n".join(annotations[::-1]).encode()
    return files


def write_tiny(root, files, packed):
    if packed:
        with zipfile.ZipFile(root / "tiny-imagenet-200.zip", "w") as z:
            for name, content in files.items():
                z.writestr(f"tiny-imagenet-200/{name}", content)
    else:
        for name, content in files.items():
            write(root / "tiny-imagenet-200" / name, content)


@pytest.mark.parametrize("packed", [False, True])
def test_tiny_imagenet_regroups_val(root, packed):
    write_tiny(root, tiny_imagenet_files(), packed)
    pool = load("tiny_imagenet")
    assert pool.x.shape == (18, 64, 64, 3) and pool.is_test.sum() == 6
    assert np.bincount(pool.y[~pool.is_test]).tolist() == [4, 4, 4]
    assert np.array_equal(np.rint((pool.x.mean((1, 2, 3)) - 50) / 60), pool.y)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (
            lambda f: f.pop("train/n02/images/n02_3.JPEG"),
            "train: unequal classes, n01 has 4 images and n02 has 3",
        ),
        (lambda f: f.update({"train/val/images/v.JPEG": b""}), "train: unequal classes"),
        (lambda f: f.pop("val/val_annotations.txt"), "val_annotations.txt is not in it"),
        (
            lambda f: f.pop("val/images/val_0.JPEG"),
            "1 images named in val_annotations.txt are not in it",
        ),
        (
            lambda f: f.update({"train/n01/images/n01_2.JPEG": b"\xff\xd8 no picture"}),
            "cannot identify image",
        ),
        (
            lambda f: f.update(
                {"train/n01/images/n01_2.JPEG": encoded(images(1, 9, 9, 3)[0], "JPEG")}
            ),
            "the others are",
        ),
    ],
)
def test_damaged_tiny_imagenet(root, spoil, message):
    files = tiny_imagenet_files()
    spoil(files)
    write_tiny(root, files, packed=True)
    with pytest.raises(DatasetDamaged, match=message):
        load("tiny_imagenet")
    assert not (root / "tiny_imagenet.npz").exists()


ROWS = [
    ("Wall St.", "Stocks fell", 2),
    ("Chip", "A chip; cheaper", 3),
    ("Cup", "Who won?", 1),
    ("Vote", "Aye", 0),
]


def write_news(root, three, header, parts=(("train.csv", ROWS), ("test.csv", ROWS[:2]))):
    for name, rows in parts:
        path = root / "ag_news" / name
        path.parent.mkdir(exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as f:
            out = csv.writer(f, quoting=csv.QUOTE_ALL if three else csv.QUOTE_MINIMAL)
            if header:
                out.writerow(
                    ["Class Index", "Title", "Description"] if three else ["text", "label"]
                )
            out.writerows([(y + 1, t, d) if three else (f"{t} {d}", y) for t, d, y in rows])


@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize("three", [False, True])
def test_ag_news_in_its_forms(root, three, header):
    write_news(root, three, header)
    pool = load("ag_news")
    assert (
        pool.y.tolist() == [2, 3, 1, 0, 2, 3] and pool.is_test.tolist() == [False] * 4 + [True] * 2
    )
    assert (
        pool.kind == "text"
        and pool.input_shape == (200,)
        and pool.x.dtype == np.int32
        and pool.mean is None
    )
    vocab = pool.extra["vocab"].tolist()
    read = [" ".join(vocab[i] for i in row if i) for row in pool.x]
    assert read[:2] == ["<cls> wall st . stocks fell", "<cls> chip a chip cheaper"]
    assert vocab[:6] == [
        "<pad>",
        "<cls>",
        "<unk>",
        "<eos>",
        "chip",
        ".",
    ]  # chip 4 times, then those of 2, "." first


def test_ag_news_dev_rows_that_train_has_are_taken_once(root):
    new = ("New", "row", 1)
    write_news(
        root,
        False,
        False,
        [("train.csv", ROWS), ("dev.csv", [*ROWS[:3], new]), ("test.csv", ROWS[:1])],
    )
    assert load("ag_news").y.tolist() == [2, 3, 1, 0, 1, 2]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "train.csv has 0 columns"),
        ("a,b,c,d\n", "train.csv has 4 columns"),
        ("text,label\n", "train.csv has no rows"),
        ("text,label\na,0\nb,4\n", "row 2: expected 2 columns with a class 0 to 3"),
        ("0,a,b\n", "row 1: expected 3 columns with a class 1 to 4"),
        ("a,0\nb\n", "row 2: expected 2 columns"),
    ],
)
def test_damaged_ag_news(root, text, message):
    write_news(root, False, False)
    (root / "ag_news/train.csv").write_text(text)
    with pytest.raises(DatasetDamaged, match=message):
        load("ag_news")


def test_tokens():
    assert readers.tokenize('The "U.S." won\'t; pay: (yes)!?') == [
        *("the", "u", ".", "s", ".", "won", "'", "t", "pay", "(", "yes", ")", "!", "?")
    ]
    tokens, vocab = readers.encode(["b b a", "a c d", "long " * 9], length=4)
    assert vocab.tolist() == [*readers.SPECIALS, "long", "a", "b", "c", "d"]
    assert tokens.tolist() == [[1, 6, 6, 5], [1, 5, 7, 8], [1, 4, 4, 4]]


@given(st.lists(st.text(alphabet="abc .'é", max_size=20), min_size=1, max_size=8))
def test_tokens_give_the_words_back(texts):
    tokens, vocab = readers.encode(texts, length=30)
    for row, text in zip(tokens, texts, strict=True):
        assert [str(vocab[i]) for i in row if i] == ["<cls>", *readers.tokenize(text)]


def test_flickr_aes(root):
    photographs = {f"p{i}.jpg": np.full((40 + i, 60, 3), 40 * i, np.uint8) for i in range(5)}
    for name, picture in photographs.items():
        write(root / "flickr_aes/40K" / name, encoded(picture, "JPEG"))
    rows = [(f"w{w}", f"p{i}.jpg", (w + i) % 5 + 1) for w in (2, 0, 1) for i in range(5)]
    table = root / "flickr_aes" / readers.FLICKR_CSV
    table.write_text("worker, imagePair, score\n" + "".join(f"{w}, {p}, {s}\n" for w, p, s in rows))
    pool = load("flickr_aes")
    assert pool.x.shape == (15, 64, 64, 3) and pool.y.tolist() == [s - 1 for *_, s in rows]
    assert pool.extra["worker"].tolist() == [int(w[1]) for w, *_ in rows]
    assert np.array_equal(np.rint(pool.x.mean((1, 2, 3)) / 40), [int(p[1]) for _, p, _ in rows])
    assert np.bincount(pool.extra["worker"][pool.is_test]).tolist() == [1, 1, 1]
    (root / "flickr_aes.npz").unlink()
    data._load.cache_clear()
    table.write_text(table.read_text() + "w1, lost.jpg, 3\n")
    with pytest.raises(DatasetDamaged, match="lost.jpg"):
        load("flickr_aes")
    table.write_text("w1,p1.jpg,6\n")
    with pytest.raises(DatasetDamaged, match="score 1 to 5"):
        load("flickr_aes")


# ---- array caches


def test_slow_raw_files_are_kept_as_arrays(root):
    write_news(root, three=True, header=False)
    first = load("ag_news")
    with np.load(root / "ag_news.npz", allow_pickle=False) as z:
        assert set(z.files) == {"tokens", "y", "is_test", "vocab"}
    for path in (root / "ag_news").iterdir():
        path.unlink()
    data._load.cache_clear()
    again = load("ag_news")
    assert again is not first and again.checksum == first.checksum
    assert again.extra["vocab"].tolist() == first.extra["vocab"].tolist()
    assert [p.name for p in root.iterdir()] in (
        ["ag_news", "ag_news.npz"],
        ["ag_news.npz", "ag_news"],
    )


def test_root_that_cannot_be_written(root, monkeypatch):
    write_news(root, three=True, header=False)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert load("ag_news").n == 6 and not (root / "ag_news.npz").exists()


def test_cache_goes_before_raw_files(root):
    write_mnist(root / "MNIST/raw")
    np.savez(root / "mnist.npz", **arrays())
    assert load("mnist").is_test.tolist() == arrays()["is_test"].tolist()


def test_omniglot_cache_may_be_small(root):
    np.savez(
        root / "omniglot.npz", **arrays(alphabet=np.arange(30) // 15, character=np.arange(30) % 15)
    )
    pool = load("omniglot")
    assert (
        pool.input_shape == (1, 28, 28)
        and pool.classes == 10
        and set(pool.extra) == {"alphabet", "character"}
    )


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("mnist", {"x": images(30, 27, 28)}, r"x is \(30, 27, 28\), expected \(n, 28, 28\)"),
        ("mnist", {"x": images(30, 28, 28).astype(np.int16)}, "x is int16"),
        ("mnist", {"x": images(29, 28, 28)}, r"expected int64 \(29,\)"),
        ("mnist", {"y": np.zeros(30)}, "y is float64"),
        ("mnist", {"y": np.full(30, 10)}, "expected 0 to 9"),
        ("mnist", {"is_test": None}, "'is_test' is not in it"),
        ("mnist", {"y": np.array([None] * 30)}, "y holds pickled objects"),
        ("cifar100", {"x": images(30, 32, 32, 3)}, "'coarse' is not in it"),
        ("omniglot", {"alphabet": np.zeros(30), "character": np.zeros(3)}, "'character' has shape"),
        (
            "omniglot",
            {"y": np.array(["a"] * 30), "alphabet": np.zeros(30), "character": np.zeros(30)},
            "omniglot.npz",
        ),
        (
            "ag_news",
            {
                "x": None,
                "y": np.zeros(30, int),
                "tokens": np.full((30, 200), 5, np.int32),
                "vocab": np.array(["a"]),
            },
            "has 1 words",
        ),
    ],
)
def test_damaged_cache(root, name, content, message):
    np.savez(root / f"{name}.npz", **{k: v for k, v in arrays(**content).items() if v is not None})
    with pytest.raises(DatasetDamaged, match=message) as error:
        load(name)
    parts = lines_of(error)
    assert (
        list(parts) == PARTS
        and str(root / f"{name}.npz") in parts["found"]
        and "Delete" in parts["found"]
    )


def test_broken_archives(root):
    path = root / "mnist.npz"
    np.savez(path, **arrays())
    whole = path.read_bytes()
    flipped = [
        whole[:i] + bytes([whole[i] ^ 255]) + whole[i + 1 :] for i in (300, 9000, len(whole) - 60)
    ]
    for content in [
        b"",
        b"no archive",
        *(whole[: len(whole) * i // 9] for i in range(1, 9)),
        *flipped,
    ]:
        path.write_bytes(content)
        with pytest.raises(DatasetDamaged, match="mnist.npz"):
            load("mnist")
    path.write_bytes(whole)
    assert load("mnist").n == 30  # a failure is not remembered


def test_cache_appears_whole_or_not_at_all(root, monkeypatch):
    write_news(root, three=True, header=False)

    def interrupted(path, **arrays):
        Path(path).write_bytes(b"the first half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load("ag_news")
    assert [p.name for p in root.iterdir()] == ["ag_news"]


def test_lack_of_memory_is_no_damage(root, monkeypatch):
    def full(*args, **kwargs):
        raise MemoryError

    np.savez(root / "mnist.npz", **arrays())
    monkeypatch.setattr(np, "frombuffer", full)
    with pytest.raises(MemoryError):
        load("mnist")


# ---- missing data, downloads


@pytest.mark.parametrize("name", list(sources.SOURCES))
def test_missing_in_seven_parts(root, name):
    with pytest.raises(DatasetMissing, match=f"^{name} is not available.") as error:
        load(name)
    parts = lines_of(error)
    assert list(parts) == PARTS and isinstance(error.value, FileNotFoundError)
    assert str(root / f"{name}.npz") in parts["looked in"] and parts["found"].startswith("nothing")
    assert '"digits"' in parts["meanwhile"]
    if name == "flickr_aes":
        assert parts["get it"] == "by hand only"
    else:
        assert parts["get it"] == f"python -m pfl_core fetch {name}"


def test_missing_says_what_is_there(root):
    write_mnist(root / "MNIST/raw")
    (root / "MNIST/raw/t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DatasetMissing, match="MNIST/raw without t10k-labels-idx1-ubyte"):
        load("mnist")
    with pytest.raises(DatasetMissing, match="does not exist"):
        load("mnist", root=root / "nowhere")
    with pytest.raises(DatasetMissing, match="^cifar10 is not available"):
        load("raters_cifar10")


def test_packed_forms_that_no_reader_takes_do_not_count(root):
    write(root / "omniglot-py/images_background.zip", b"")
    write(root / "omniglot-py/images_evaluation.zip", b"")
    with pytest.raises(DatasetMissing):
        load("omniglot")


def test_root(root, monkeypatch, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    monkeypatch.setenv("XDG_CACHE_HOME", str(other))
    for folder in (root, other):
        np.savez(folder / "mnist.npz", **arrays())
    stats = dict(classes=10, mean=(0.1307,), std=(0.3081,))  # mnist's
    here, there = (
        Pool("", **np.load(folder / "mnist.npz"), **stats).checksum for folder in (root, other)
    )
    assert load("mnist").checksum == here
    assert load("mnist", root=other).checksum == load("mnist", root=str(other)).checksum == there
    monkeypatch.delenv("PFL_DATA")
    with pytest.raises(DatasetMissing) as error:
        load("mnist")
    assert str(other / "pfl/mnist.npz") in lines_of(error)["looked in"]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(other))
    with pytest.raises(DatasetMissing, match="/.cache/pfl/cifar10.npz"):
        load("cifar10")


def fake_torchvision(monkeypatch, download):
    """A torchvision whose MNIST runs `download(root)`."""
    module = types.ModuleType("torchvision")
    module.datasets = types.SimpleNamespace(
        MNIST=lambda root, download: download and download_(root)
    )
    download_ = download
    monkeypatch.setitem(sys.modules, "torchvision", module)


def test_fetch_through_torchvision(root, monkeypatch):
    calls = []
    fake_torchvision(
        monkeypatch, lambda where: calls.append(write_mnist(where / "MNIST/raw", packed=True))
    )
    source(monkeypatch, "mnist", official=(20, 10))
    pool = fetch("mnist")
    assert np.array_equal(pool.x, calls[0][0]) and (root / "mnist.npz").exists()
    assert fetch("mnist") is pool and load("mnist") is pool and len(calls) == 1
    data._load.cache_clear()
    assert load("mnist").checksum == pool.checksum


def test_fetch_verifies_the_numbers(root, monkeypatch):
    fake_torchvision(monkeypatch, lambda where: write_mnist(where / "MNIST/raw"))
    with pytest.raises(
        DatasetDamaged, match=r"20 train and 10 test samples, expected \(60000, 10000\)"
    ):
        fetch("mnist")
    assert not (root / "mnist.npz").exists()


def test_failed_download(monkeypatch):
    def refused(where):
        raise OSError("no route")

    fake_torchvision(monkeypatch, refused)
    with pytest.raises(DatasetMissing, match="download failed .OSError: no route") as error:
        fetch("mnist")
    assert list(lines_of(error)) == PARTS
    fake_torchvision(monkeypatch, lambda where: None)  # done, it says, and brought nothing
    with pytest.raises(DatasetMissing):
        fetch("mnist")


@pytest.mark.parametrize("name", ["mnist", "ag_news", "emnist-digits", "raters_cifar10"])
def test_offline_touches_no_network(root, monkeypatch, name):
    monkeypatch.setenv("PFL_OFFLINE", "1")
    monkeypatch.setattr(data, "_download", lambda *args: pytest.fail("it went to the network"))
    with pytest.raises(DatasetMissing, match="network: off, because PFL_OFFLINE"):
        fetch(name)


def test_fetch_where_there_is_nothing_to_fetch(monkeypatch):
    monkeypatch.setenv("PFL_OFFLINE", "1")
    assert fetch("digits") is load("digits")
    monkeypatch.delenv("PFL_OFFLINE")
    with pytest.raises(DatasetMissing, match="by hand only"):
        fetch("flickr_aes")


class Column(list):
    """A part of a Hugging Face data set: rows by iteration, columns by name."""

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


def fake_hugging_face(monkeypatch, repository, parts):
    def load_dataset(name, cache_dir):
        assert name == repository and cache_dir
        return {k: Column(v) for k, v in parts.items()}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))


def test_fetch_ag_news(root, monkeypatch):
    rows = [{"text": f"{t} {d}", "label": y} for t, d, y in ROWS]
    fake_hugging_face(monkeypatch, "fancyzhx/ag_news", {"train": rows, "test": rows})
    with pytest.raises(DatasetDamaged, match="expected .120000, 7600"):
        fetch("ag_news")
    source(monkeypatch, "ag_news", official=(4, 4))
    pool = fetch("ag_news")
    assert pool.y.tolist() == [2, 3, 1, 0] * 2 and (root / "ag_news.npz").exists()
    (root / "ag_news.npz").unlink()
    data._load.cache_clear()
    fake_hugging_face(monkeypatch, "fancyzhx/ag_news", {"train": rows, "test": [rows[0]] * 4})
    with pytest.raises(DatasetDamaged, match="not equally large"):
        fetch("ag_news")


def test_fetch_tiny_imagenet(root, monkeypatch):
    x = images(400, 64, 64, 3)
    x[0] = x[0, :, :, :1]
    rows = [{"image": Image.fromarray(a), "label": i % 200} for i, a in enumerate(x)]
    rows[0]["image"] = rows[0]["image"].convert("L")
    fake_hugging_face(
        monkeypatch, "zh-plus/tiny-imagenet", {"train": rows[:200], "valid": rows[200:]}
    )
    source(monkeypatch, "tiny_imagenet", official=(200, 200))
    pool = fetch("tiny_imagenet")
    assert (
        np.array_equal(pool.x, x)
        and pool.is_test.sum() == 200
        and pool.y.tolist() == [*range(200)] * 2
    )


def test_the_optional_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DatasetMissing, match=r'pip install "pfl-core\[datasets\]"'):
        fetch("ag_news")


# ---- names


@pytest.mark.parametrize(
    "given, meant", [("cifar", "cifar10"), ("MNIST", "mnist"), ("tiny-imagenet", "tiny_imagenet")]
)
def test_unknown_names_get_the_nearest(given, meant):
    with pytest.raises(
        ValueError, match=f"did you mean '{meant}'.*known are ag_news, .*tiny_imagenet"
    ):
        load(given)


def test_unknown_names_without_a_near_one():
    with pytest.raises(ValueError, match="data set 'xyz' is unknown; known are"):
        fetch("xyz")


def test_list_has_a_line_for_each():
    listed = data.list_datasets()
    assert {
        "digits",
        "digits100",
        "raters_digits100",
        "raters_cifar10",
        "emnist-digits",
        *sources.SOURCES,
    } <= set(listed)
    assert all(line and "\n" not in line for line in listed.values())


def test_register():
    made = []

    def mine():
        made.append(Pool("anything", **arrays(), classes=10))
        return made[-1]

    data.register_dataset("mine", mine, "my own")
    assert data.list_datasets()["mine"] == "my own"
    assert load("mine") is load("mine") is fetch("mine") and len(made) == 1
    assert load("mine").name == "mine" and load("mine").checksum == made[0].checksum
    for name in ("own", "digits", "mnist"):
        with pytest.raises(ValueError, match="exists already"):
            data.register_dataset(name, mine)
    data.register_dataset("wrong", lambda: made[0].x)
    with pytest.raises(TypeError, match="returned ndarray, expected pfl_core.data.pools.Pool"):
        load("wrong")


def test_a_pool_is_decoded_once():
    assert load("digits") is load("digits")
    assert load("digits100") is load("digits100")


# ---- real data, as far as this machine has them

COMPLETE = {
    "mnist": (70_000,),
    "fashion_mnist": (70_000,),
    "cifar10": (60_000, 58_865),
    "cifar100": (60_000,),
}
COMPLETE |= {"emnist": (814_255, 116_323), "omniglot": (32_460, 5_840), "tiny_imagenet": (110_000,)}
HALF_FOR_TEST = 15_578  # texts of a part with the whole official test data
COMPLETE |= {"ag_news": (127_600, HALF_FOR_TEST, 6_000)}


def test_real_data(monkeypatch):
    monkeypatch.undo()
    if REAL:
        monkeypatch.setenv("PFL_DATA", REAL)
    read = {}
    for name in COMPLETE:
        try:
            pool = load(name)
        except DatasetMissing as error:
            assert f"python -m pfl_core fetch {name}" in str(error)
        else:
            read[name] = pool.n
            share = np.bincount(pool.y[pool.is_test], minlength=pool.classes) / np.bincount(pool.y)
            assert (
                pool.n in COMPLETE[name]
                and np.bincount(pool.y).min() > 0
                and 0.05 < share.min() <= share.max() < (0.5 if pool.n == HALF_FOR_TEST else 0.25)
            )
            sample = pool.x[~pool.is_test][:20_000]
            if pool.kind == "image":
                np.testing.assert_allclose(sample.mean() / 255, np.mean(pool.mean), atol=0.01)
    if read.get("emnist") and read.get(
        "mnist"
    ):  # upright: an EMNIST 1 looks like a 1 of MNIST, not like a lying one
        ones = {name: load(name).x[load(name).y == 1].mean(0) for name in ("mnist", "emnist")}
        upright, lying = (
            np.corrcoef(ones["mnist"].ravel(), a.ravel())[0, 1]
            for a in (ones["emnist"], ones["emnist"].T)
        )
        assert upright > 0.8 > 0.6 > lying
