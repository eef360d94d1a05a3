"""Raw files -> arrays: one reader for each form in which the public sets are handed out.

A reader takes the folder that holds its files and returns {"x", "y", "is_test", extra columns}, as
`data.Pool` wants them. It raises ValueError, or what the libraries it calls raise, where a file is
not what it should be; `data` makes of that an error which says what to do.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]

# ids 0-3; unk and eos are in no text, but count in the vocabulary, as in FLAYER's code
SPECIALS = ("<pad>", "<cls>", "<unk>", "<eos>")
TEXT_LENGTH = 200
FLICKR_CSV = "FLICKR-AES_image_labeled_by_each_worker.csv"
FLICKR_SIZE = (64, 64)  # photographs of every size are resampled to this


def held_out(groups: np.ndarray, share: float, seed: int) -> np.ndarray:
    """A mask (n,): True for a random `share`, rounded, of each value of `groups` (n,).

    `seed` decides once and for all which they are.
    """
    rng = np.random.RandomState(
        seed
    )  # the legacy generator, because its stream is frozen across numpy versions
    mask = np.zeros(len(groups), dtype=bool)
    for g in np.unique(groups):
        members = rng.permutation(np.flatnonzero(groups == g))
        mask[members[: round(len(members) * share)]] = True
    return mask


def joined(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> Arrays:
    """One pool of two official parts, each (x, y), the training part first."""
    (x, y), (x_test, y_test) = train, test
    return {
        "x": np.concatenate([x, x_test]),
        "y": np.concatenate([y, y_test]).astype(np.int64),
        "is_test": np.arange(len(y) + len(y_test)) >= len(y),
    }


def read_idx(path: Path) -> np.ndarray:
    """The uint8 array of an IDX file; where `path` does not exist, of `path`.gz."""
    packed = path.with_name(path.name + ".gz")
    raw = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path.name} is not an IDX file of bytes")
    start = 4 + 4 * raw[3]
    shape = tuple(int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4))
    if len(raw) != start + np.prod(shape):
        raise ValueError(
            f"{path.name} holds {len(raw) - start} values, its header promises {shape}: truncated"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def idx(
    folder: Path,
    train: str = "train",
    test: str = "t10k",
    transposed: bool = False,
    first_label: int = 0,
) -> Arrays:
    """MNIST's form: four IDX files.

    Parameters
    ----------
    train, test : str
        What the names of the two parts' files begin with.
    transposed : bool
        Whether an image's rows are stored as columns, as EMNIST has it.
    first_label : int
        What labels begin at.
    """

    def part(prefix: str) -> tuple[np.ndarray, np.ndarray]:
        x, y = (
            read_idx(folder / f"{prefix}-images-idx3-ubyte"),
            read_idx(folder / f"{prefix}-labels-idx1-ubyte"),
        )
        if x.ndim != 3 or y.shape != x.shape[:1]:
            raise ValueError(
                f"{prefix}: images {x.shape} and labels {y.shape} do not belong together"
            )
        return (x.swapaxes(1, 2) if transposed else x), y.astype(np.int64) - first_label

    return joined(part(train), part(test))


def cifar(
    folder: Path, md5: Mapping[str, str], label: str, columns: Mapping[str, str] | None = None
) -> Arrays:
    """CIFAR's pickles. A file whose md5 is another than the published one is not opened.

    Parameters
    ----------
    md5 : {file: digest}
        Of every file, the test part last.
    label : str
        The key of the labels in these files.
    columns : {our extra column: their key}
    """

    def read(name: str) -> dict:
        raw = (folder / name).read_bytes()
        digest = hashlib.md5(raw).hexdigest()
        if digest != md5[name]:
            raise ValueError(
                f"{name} has md5 {digest}, not {md5[name]}; a pickle that is not the published "
                "one is not opened"
            )
        return pickle.loads(raw, encoding="latin1")

    parts = [read(name) for name in md5]
    x = np.concatenate([p["data"] for p in parts]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    column = {
        k: np.concatenate([p[key] for p in parts]).astype(np.int64)
        for k, key in {"y": label, **(columns or {})}.items()
    }
    return {
        "x": np.ascontiguousarray(x),
        "is_test": np.arange(len(x)) >= len(x) - len(parts[-1]["data"]),
        **column,
    }


def decoded(raw: bytes, mode: str, size: tuple[int, int] | None = None) -> np.ndarray:
    """An encoded image as uint8, (h, w) for mode "L", (h, w, 3) for "RGB"; transparency is dropped.

    `size` is (width, height), to which it is resampled if it has another.
    """
    from PIL import Image

    with Image.open(io.BytesIO(raw)) as image:
        if "transparency" in image.info:  # in one step, Pillow warns
            image = image.convert("RGBA")
        image = image.convert(mode)
        return np.asarray(image.resize(size, Image.Resampling.LANCZOS) if size else image)


def pixels(
    images: Sequence[Callable[[], bytes]], mode: str, size: tuple[int, int] | None = None
) -> np.ndarray:
    """Encoded images as uint8: [n, h, w] for mode "L", [n, h, w, 3] for "RGB".

    Parameters
    ----------
    images : functions
        Each returns the bytes of one.
    size : (width, height), optional
        What they are resampled to.
    """

    def one(read: Callable[[], bytes]) -> np.ndarray:
        return decoded(read(), mode, size)

    if not images:
        raise ValueError("there is no image in it")
    out = np.empty(0, dtype=np.uint8)
    with ThreadPoolExecutor() as workers:  # Pillow decodes outside the interpreter lock
        for i, a in enumerate(workers.map(one, images)):
            if i == 0:
                out = np.empty((len(images), *a.shape), dtype=np.uint8)
            if a.shape != out.shape[1:]:
                raise ValueError(f"image {i} is {a.shape}, the others are {out.shape[1:]}")
            out[i] = a
    return out


def omniglot(folder: Path) -> Arrays:
    """PNGs in images_{background,evaluation}/ALPHABET/characterNN/: 50 alphabets, ink bright.

    The official parts differ in alphabets, not in images, so `is_test` is a fixed random sixth of
    each character.
    """
    images, alphabet, character, label = [], [], [], []
    alphabets = [
        a
        for part in ("background", "evaluation")
        for a in sorted((folder / f"images_{part}").iterdir())
        if a.is_dir()
    ]
    for a, directory in enumerate(alphabets):
        for c, drawings in enumerate(sorted(d for d in directory.iterdir() if d.is_dir())):
            files = sorted(drawings.glob("*.png"))
            new = label[-1] + 1 if label else 0
            images += [f.read_bytes for f in files]
            alphabet += [a] * len(files)
            character += [c] * len(files)
            label += [new] * len(files)
    y = np.array(label, dtype=np.int64)
    columns = {
        "alphabet": np.array(alphabet, dtype=np.int64),
        "character": np.array(character, dtype=np.int64),
    }
    return {
        "x": 255 - pixels(images, "L"),
        "y": y,
        "is_test": held_out(y, 1 / 6, seed=0),
        **columns,
    }


def tiny_imagenet(folder: Path) -> Arrays:
    """tiny-imagenet-200, a folder or a .zip. The classes of val are in val_annotations.txt."""
    path = folder / "tiny-imagenet-200"
    if path.is_dir():
        files = {
            p.relative_to(path).as_posix(): p.read_bytes for p in path.rglob("*") if p.is_file()
        }
    else:
        archive = zipfile.ZipFile(path.with_suffix(".zip"))
        files = {
            n.removeprefix("tiny-imagenet-200/"): partial(archive.read, n)
            for n in archive.namelist()
        }
    train = [
        (n, m[1])
        for n in sorted(files)
        if (m := re.fullmatch(r"train/(\w+)/images/[^/]+\.JPEG", n))
    ]
    if "val/val_annotations.txt" not in files:
        raise ValueError("val/val_annotations.txt is not in it")
    lines = [
        line.split("\t")
        for line in files["val/val_annotations.txt"]().decode().splitlines()
        if line
    ]
    val = [(f"val/images/{name}", wnid) for name, wnid, *_ in lines]
    if lost := [n for n, _ in val if n not in files]:
        raise ValueError(
            f"{len(lost)} images named in val_annotations.txt are not in it, the first is {lost[0]}"
        )
    classes = {wnid: i for i, wnid in enumerate(sorted({w for _, w in train}))}
    # A val folder that was not regrouped shows here.
    for part, rows in (("train", train), ("val", val)):
        n = Counter(w for _, w in rows)
        if set(n) != set(classes) or len(set(n.values())) != 1:
            most, least = n.most_common()[0], n.most_common()[-1]
            raise ValueError(
                f"{part}: unequal classes, {most[0]} has {most[1]} images and {least[0]} has "
                f"{least[1]}"
            )
    y = np.array([classes[w] for _, w in train + val], dtype=np.int64)
    return {
        "x": pixels([files[n] for n, _ in train + val], "RGB"),
        "y": y,
        "is_test": np.arange(len(y)) >= len(train),
    }


def tokenize(text: str) -> list[str]:
    """The words of a text in lower case.

    Each of . , ( ) ! ? ' is a token; quotation marks, ; and : only separate words.
    """
    return re.findall(r"[.,()!?']|[^\s.,()!?'\";:]+", text.lower())


def encode(texts: Sequence[str], length: int = TEXT_LENGTH) -> tuple[np.ndarray, np.ndarray]:
    """Texts as tokens: int32 [n, length], and the vocabulary, str [v].

    A row is <cls> and the words, cut or padded. The vocabulary has every word (as FLAYER's), the
    most frequent first, equally frequent ones by alphabet.
    """
    words = [tokenize(t) for t in texts]
    counts = Counter(chain.from_iterable(words))
    vocab = [*SPECIALS, *sorted(counts, key=lambda w: (-counts[w], w))]
    ids = {w: i for i, w in enumerate(vocab)}
    tokens = np.zeros((len(texts), length), dtype=np.int32)
    tokens[:, 0] = ids["<cls>"]
    for row, ws in zip(tokens, words, strict=True):
        ws = ws[: length - 1]
        row[1 : 1 + len(ws)] = [ids[w] for w in ws]
    return tokens, np.array(vocab)


def texts(train: tuple[list[str], list[int]], test: tuple[list[str], list[int]]) -> Arrays:
    """Pool of two parts (texts, labels), with the vocabulary of both."""
    tokens, vocab = encode(train[0] + test[0])
    n = len(train[0])
    return {
        **joined((tokens[:n], np.array(train[1])), (tokens[n:], np.array(test[1]))),
        "vocab": vocab,
    }


def ag_news(folder: Path) -> Arrays:
    """train.csv and test.csv, with or without a header line.

    Their rows are class (1-4),title,description or text,label (0-3).

    Rows of a dev.csv, where there is one, join the training part unless they are in it already.
    """

    def part(name: str) -> list[tuple[str, int]]:
        with (folder / name).open(newline="", encoding="utf-8") as f:
            rows = [row for row in csv.reader(f) if row]
        width = len(rows[0]) if rows else 0
        if width not in (2, 3):
            raise ValueError(
                f"{name} has {width} columns, expected class,title,description or text,label"
            )
        where, first = (0, 1) if width == 3 else (1, 0)
        out = []
        for i, row in enumerate(rows if rows[0][where].strip().isdigit() else rows[1:], start=1):
            label = row[where].strip() if len(row) == width else ""
            if label not in map(str, range(first, first + 4)):
                raise ValueError(
                    f"{name}, row {i}: expected {width} columns with a class {first} to "
                    f"{first + 3}, found {row!r:.80}"
                )
            out.append((" ".join(row[1:]) if width == 3 else row[0], int(label) - first))
        if not out:
            raise ValueError(f"{name} has no rows")
        return out

    train, test = part("train.csv"), part("test.csv")
    if (folder / "dev.csv").exists():
        known = set(train)
        train += [row for row in part("dev.csv") if row not in known]
    return texts(*(([text for text, _ in rows], [c for _, c in rows]) for rows in (train, test)))


def flickr_aes(folder: Path) -> Arrays:
    """Rows worker,image,score (1-5, which become 0-4) and the photographs in 40K/.

    `is_test` is a random fifth of each worker's rows.
    """
    with (folder / FLICKR_CSV).open(newline="", encoding="utf-8") as f:
        rows = [tuple(c.strip() for c in row) for row in csv.reader(f) if row]
    rows = rows if rows and rows[0][-1].isdigit() else rows[1:]
    if bad := [r for r in rows or [()] if len(r) != 3 or r[2] not in set("12345")]:
        raise ValueError(f"expected rows worker,image,score 1 to 5, found {bad[0]}")
    worker, image, score = (np.array(column) for column in zip(*rows, strict=True))
    names, image = np.unique(image, return_inverse=True)
    worker = np.unique(worker, return_inverse=True)[1].astype(np.int64)
    photographs = pixels([(folder / "40K" / n).read_bytes for n in names], "RGB", FLICKR_SIZE)
    columns = {"worker": worker, "image": image.astype(np.int64)}
    return {
        "x": photographs[image],
        "y": score.astype(np.int64) - 1,
        "is_test": held_out(worker, 0.2, seed=0),
        **columns,
    }
