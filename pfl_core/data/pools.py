"""Data set name -> `Pool` of arrays.

`load` looks for the array cache ROOT/NAME.npz, then for raw files below ROOT; only `fetch` uses the
network. ROOT is the argument `root`, else $PFL_DATA, else $XDG_CACHE_HOME/pfl, else ~/.cache/pfl.
What is absent or damaged is said before anything is trained, and no other data stand in for it.
`digits`, `digits100`, `digits_texts` and `raters_digits100` are made from scikit-learn's digits and
need no file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pfl_core.data import arrays, files, readers
from pfl_core.data.arrays import frozen, owned
from pfl_core.data.checksum import Checksum
from pfl_core.data.sources import SOURCES
from pfl_core.util import checks, paths
from pfl_core.util.cards import Listing, card, shape, span
from pfl_core.util.say import say


class DatasetMissing(FileNotFoundError):
    """A data set is in none of its places; the message says where was looked and how to get it."""


class DatasetDamaged(ValueError):
    """A file of a data set is not what it should be; the message names it."""


@dataclass(frozen=True, eq=False)
class Pool:
    """All samples of a data set, its official parts together.

    All who load a data set share its Pool. Its arrays are copies of those given, and read-only.

    Attributes
    ----------
    x
        uint8 or float32 images [n, h, w] or [n, h, w, channels] of 1 or 3 channels, float32 or
        float64 tables [n, columns], or int32 tokens [n, length]. uint8 images are normalised by
        mean and std, floats used as they are.
    y : [n] int64
        Classes, 0 to classes - 1.
    is_test : [n] bool
        The official test part; where there is none, a fixed random one.
    extra
        Columns [n] (coarse, alphabet, character, worker ...); for tokens also `vocab`, the words.
    mean, std
        One number per channel, on the [0, 1] scale; by default those of the images' training part.

    Raises
    ------
    ValueError
        If these do not fit together, or x holds NaN.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    is_test: np.ndarray
    classes: int
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise ValueError(f"pool {self.name!r}: {problem}")
        extra = MappingProxyType({name: frozen(column) for name, column in self.extra.items()})
        kept: dict[str, Any] = {n: frozen(getattr(self, n)) for n in ("x", "y", "is_test")}
        for name, value in (kept | {"extra": extra}).items():
            object.__setattr__(self, name, value)
        if self.kind == "image" and self.mean is None:
            found = statistics(self.x, np.flatnonzero(~self.is_test))
            for key, value in zip(("mean", "std"), found, strict=True):
                object.__setattr__(self, key, value)

    def _problem(self) -> str | None:
        return (
            self._problem_of_types()
            or self._problem_of_x()
            or self._problem_of_labels()
            or self._problem_of_columns()
        )

    def _problem_of_types(self) -> str | None:
        for name, a in {"x": self.x, "y": self.y, "is_test": self.is_test, **self.extra}.items():
            if not isinstance(a, np.ndarray):
                return f"{name} is a {type(a).__name__}; give a numpy array"
            if isinstance(a, np.ma.MaskedArray) and np.ma.getmaskarray(a).any():
                return f"{name} is a masked array; leave these samples out, or fill the gaps"
        return None

    def _problem_of_x(self) -> str | None:
        x, n = self.x, len(self.x)
        allowed = {"uint8": (3, 4), "float32": (2, 3, 4), "float64": (2,), "int32": (2,)}
        if x.ndim not in allowed.get(x.dtype.name, ()) or x.size == 0:
            return (
                f"x is {x.dtype} {x.shape}; allowed: uint8 or float32 images [n, h, w(, c)], "
                "float32 or float64 tables [n, columns], int32 tokens [n, length], not empty"
            )
        if x.ndim == 4 and x.shape[3] not in (1, 3):
            return (
                f"x is {x.dtype} {x.shape}; allowed are 1 or 3 channels, last: "
                "leave an alpha channel out with x[..., :3]"
            )
        if x.dtype.kind == "f" and (bad := sum(not np.isfinite(a).all() for a in x)):
            return (
                f"x is not finite in {bad} of {n} samples; leave them out, "
                "or replace NaN and infinite values"
            )
        return None

    def _problem_of_labels(self) -> str | None:
        y, n = self.y, len(self.x)
        for key, a, dtype in (("y", y, np.int64), ("is_test", self.is_test, bool)):
            if a.dtype != dtype or a.shape != (n,):
                served = f": {arrays.SERVED}" * (key == "y")
                return f"{key} is {a.dtype} {a.shape}, expected {np.dtype(dtype)} ({n},){served}"
        if not 0 <= y.min() <= y.max() < self.classes:
            cure = f"; {arrays.NUMBER}" * bool(y.min() < 0)
            return f"y goes from {y.min()} to {y.max()}, expected 0 to {self.classes - 1}{cure}"
        most = max(1000, n)
        if self.classes > most:
            # A network has an output for each class: a stray label would take all memory.
            return (
                f"{self.classes} classes of {n} samples; allowed are {most}: "
                "number the labels from 0 on"
            )
        return "all samples are test samples" if self.is_test.all() else None

    def _problem_of_columns(self) -> str | None:
        x, n = self.x, len(self.x)
        for name, column in self.extra.items():
            if name != "vocab" and column.shape != (n,):
                return f"extra column {name!r} has shape {column.shape}, expected ({n},)"
        if "vocab" in self.extra:
            words = len(self.extra["vocab"])
            if not 0 <= x.min() <= x.max() < words:
                return f"tokens go from {x.min()} to {x.max()}, the vocabulary has {words} words"
        return None

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.y)

    @property
    def kind(self) -> str:
        """ "image", "text" or "table"."""
        if self.x.ndim == 2:
            return "text" if self.x.dtype == np.int32 else "table"
        return "image"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) of an image, (length,) of a text, (columns,) of a table."""
        if self.kind != "image":
            return self.x.shape[1:]
        h, w, *c = self.x.shape[1:]
        return (*(c or [1]), h, w)

    @property
    def inputs(self) -> np.ndarray:
        """x as a Federation takes it: float images are [n, channels, h, w], channels first."""
        if self.kind != "image" or self.x.dtype == np.uint8:
            return self.x
        return self.x[:, None] if self.x.ndim == 3 else self.x.transpose(0, 3, 1, 2)

    def __repr__(self) -> str:
        return f"Pool({self.name}: {self._said()})"

    def _said(self) -> str:
        kind = {"image": "images", "text": "texts", "table": "samples"}[self.kind]
        parts = f"{self.n:,} {kind} of {shape(self.input_shape)}, {self.is_test.sum():,} for test"
        return f"{parts}; {self.classes:,} classes"

    def _repr_html_(self) -> str:
        each = np.bincount(self.y, minlength=self.classes).tolist()
        facts = {"samples": f"{span(each)} a class", "type": self.x.dtype}
        if self.mean is not None:
            facts |= {"mean, std": f"{self.mean}, {self.std}"}
        facts |= {"columns": ", ".join(self.extra)} if self.extra else {}
        return card(f"Pool {self.name}: {self._said()}", facts | {"checksum": self.checksum[:16]})

    @cached_property
    def checksum(self) -> Checksum:
        """sha256 (hex) over all that decides numbers.

        That is type, shape and bytes of all arrays, and classes, mean and std.
        """
        stats = [v and [float(c) for c in v] for v in (self.mean, self.std)]
        digest = hashlib.sha256(repr((self.classes, *stats)).encode())
        for a in (self.x, self.y, self.is_test, *(self.extra[k] for k in sorted(self.extra))):
            digest.update(f"{a.dtype.str}{a.shape}".encode())
            digest.update(np.ascontiguousarray(a).view(np.uint8).data)
        return Checksum(digest.hexdigest(), self.input_shape, self.classes, self.options)

    @property
    def options(self) -> dict[str, int]:
        """Options of the model that the data decide: of texts {"vocab": size of the vocabulary}."""
        return {"vocab": len(self.extra["vocab"])} if "vocab" in self.extra else {}


def statistics(
    x: np.ndarray, samples: np.ndarray | None = None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) per channel on the [0, 1] scale, to four digits; a constant channel has std 1.

    Parameters
    ----------
    x : (n, h, w), (n, h, w, channels) or (n, columns)
        Images, or a table, which is one channel.
    samples : (m,) int, optional
        Which of them count, by default all.
    """
    x = x.reshape(*(*x.shape, 1)[:3], -1)
    samples = np.arange(len(x)) if samples is None else samples
    total = np.zeros((2, x.shape[-1]))
    # In pieces: the whole in float64 would be eight times its size.
    for i in range(0, len(samples), 1024):
        a = x[samples[i : i + 1024]] / (255.0 if x.dtype == np.uint8 else 1.0)
        total += [a.sum((0, 1, 2), dtype=np.float64), np.square(a, dtype=np.float64).sum((0, 1, 2))]
    mean, square = total / (len(samples) * x.shape[1] * x.shape[2])
    std = np.sqrt(np.maximum(square - mean**2, 0)).round(4)
    return tuple(mean.round(4).tolist()), tuple(np.where(std > 0, std, 1.0).tolist())


# ---- public sets: caches, raw files, downloads


def _root(root: str | os.PathLike | None) -> Path:
    if root:
        return paths.absolute(root, "root")
    if given := os.environ.get("PFL_DATA"):
        return paths.absolute(given, "PFL_DATA")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return paths.absolute(Path(cache, "pfl"), "XDG_CACHE_HOME")


def _offline() -> bool:
    return os.environ.get("PFL_OFFLINE", "0") not in ("", "0")


def _explain(name: str, root: Path, headline: str, found: str = "") -> str:
    """The error about a public data set, in seven parts."""
    s = SOURCES[name]
    partly = {folder: s.absent(root / folder) for folder in s.folders}
    partly = [
        f"{root / f} without {', '.join(lost)}"
        for f, lost in partly.items()
        if len(lost) < len(s.files)
    ]
    there = (
        ", ".join(sorted(p.name for p in root.iterdir())[:12])
        if root.is_dir()
        else "does not exist"
    )
    parts = {
        "looked in": ", ".join(str(root / f) for f in (f"{name}.npz", *s.folders)),
        "found": found or "; ".join(partly) or f"nothing of it ({root}: {there or 'empty'})",
        "expected": f"{name}.npz, or {', '.join(s.files)} in one folder"
        + (f" (or as {s.packed})" if s.packed else ""),
        "get it": f"python -m pfl_core fetch {name}" if s.download else "by hand only",
        "or": f"{s.by_hand}, below {root}",
        "licence": f"{s.licence}; not redistributed with this package",
        "meanwhile": f'data set "digits" needs no file (its numbers say nothing about {name})',
    }
    if s.download and _offline():
        parts["get it"] += "   (network: off, because PFL_OFFLINE is set)"
    return "\n".join(
        [f"{name} {headline}", *(f"  {key:<10}: {text}" for key, text in parts.items())]
    )


def _pool(
    name: str, root: Path, path: Path, arrays: Callable[[], readers.Arrays], complete: bool = False
) -> Pool:
    """The Pool of what `arrays` reads from `path`; DatasetDamaged if that is not as it should be.

    A `complete` one must be as large as the official set.
    """
    s = SOURCES[name]
    try:
        a = dict(arrays())
        if absent := {"x", "y", "is_test", *s.columns} - set(a):
            raise ValueError(f"the array {min(absent)!r} is not in it")
        x, y, is_test = (owned(a.pop(key)) for key in ("x", "y", "is_test"))
        if s.shape and x.shape[1:] != s.shape:
            raise ValueError(f"x is {x.shape}, expected (n, {', '.join(map(str, s.shape))})")
        pool = Pool(name, x, y, is_test, s.classes or int(y.max(initial=0)) + 1, a, *s.stats)
        counts = [np.bincount(y[part], minlength=pool.classes) for part in (~is_test, is_test)]
        if complete and tuple(c.sum() for c in counts) != s.official:
            raise ValueError(
                f"{counts[0].sum()} train and {counts[1].sum()} test samples, expected {s.official}"
            )
        if complete and s.balanced and any(np.ptp(c) for c in counts):
            raise ValueError("the classes are not equally large, as they should be")
        return pool
    except (MemoryError, ImportError):
        raise
    except Exception as e:  # zipfile, numpy and Pillow meet damaged files with nearly any exception
        found = f"{path}: {e}. Delete or replace it, then get it again"
        raise DatasetDamaged(_explain(name, root, "is damaged.", found)) from e


def _read_cache(path: Path) -> readers.Arrays:
    return {"x" if key == "tokens" else key: a for key, a in files.unpacked(path).items()}


def _write_cache(pool: Pool, root: Path) -> None:
    """Write ROOT/NAME.npz, whole or not at all: no other process ever sees half of it."""
    mine = root / f".{pool.name}.{os.getpid()}.npz"
    try:
        x: dict[str, Any] = {"tokens" if pool.kind == "text" else "x": pool.x}
        x |= {"y": pool.y, "is_test": pool.is_test, **pool.extra}
        np.savez(mine, **x)
        os.replace(mine, root / f"{pool.name}.npz")
    finally:
        mine.unlink(missing_ok=True)


def _read(name: str, root: Path, complete: bool = False) -> Pool:
    s, cache = SOURCES[name], root / f"{name}.npz"
    if cache.exists():
        return _pool(name, root, cache, partial(_read_cache, cache))
    for folder in (root / f for f in s.folders):
        if not s.absent(folder):
            pool = _pool(name, root, folder, partial(s.read, folder), complete)
            if complete or (s.slow and os.access(root, os.W_OK)):
                try:
                    _write_cache(pool, root)
                except OSError as error:
                    say(
                        f"{name}: its array cache could not be kept in {root} ({error}); the raw "
                        "files serve, more slowly"
                    )
            return pool
    raise DatasetMissing(_explain(name, root, "is not available."))


def _download(name: str, root: Path) -> None:
    checks.make_folder(root, "PFL_DATA")
    download = SOURCES[name].download
    assert download is not None  # callers ask for it
    try:
        arrays = download(root)
    except (OSError, RuntimeError, ImportError) as e:
        found = f"nothing: the download failed ({type(e).__name__}: {e})"
        raise DatasetMissing(_explain(name, root, "is not available.", found)) from e
    if arrays is None:
        _read(name, root, complete=True)
    else:
        _write_cache(_pool(name, root, root, lambda: arrays, complete=True), root)


# ---- sets made from others


def _digits() -> Pool:
    """scikit-learn's 1,797 digits of 8x8 as 28x28: each pixel 3x3, border 2.

    A sixth of each class is test.
    """
    lines = _lines_of_digits()
    y = lines[:, -1].astype(np.int64)
    x = np.rint(lines[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    x = np.pad(x.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
    return Pool("digits", x, y, readers.held_out(y, 1 / 6, seed=0), 10)


def _lines_of_digits() -> np.ndarray:
    """64 pixels (0 to 16) and the label of each of scikit-learn's digits: (1797, 65)."""
    found = importlib.util.find_spec("sklearn")
    for folder in (found and found.submodule_search_locations) or ():
        # From its file: to import scikit-learn takes as long as ten rounds.
        if (file := Path(folder, "datasets", "data", "digits.csv.gz")).is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    small: Any = load_digits()
    return np.column_stack([small.data, small.target])


def _digits100() -> Pool:
    """6,000 numbers 00-99 of 28x28, 60 of each, made of `digits`; `coarse` is the tens digit.

    Of each 8x8 digit the outer columns (0.3 % of the ink) are left out; the six others are drawn 2
    wide and 3 high, two digits side by side, border 2. The 10 test images of a class are pairs of
    test digits, the 50 others distinct pairs of training digits.
    """
    ones = _digits()
    rng = np.random.RandomState(1)
    x, y, is_test = [], [], []
    narrow = np.delete(
        ones.x[:, 2:26, 5:23], np.s_[2::3], axis=2
    )  # columns 1-6, of whose three copies two stay
    for test, each in ((False, 50), (True, 10)):
        members = [narrow[(ones.y == d) & (ones.is_test == test)] for d in range(10)]
        for number in range(100):
            left, right = members[number // 10], members[number % 10]
            i, j = np.divmod(rng.choice(len(left) * len(right), each, replace=False), len(right))
            x.append(np.concatenate([left[i], right[j]], axis=2))
            y += [number] * each
            is_test += [test] * each
    order = rng.permutation(len(y))
    x = np.pad(np.concatenate(x), ((0, 0), (2, 2), (2, 2)))[order]
    y = np.array(y, dtype=np.int64)[order]
    return Pool("digits100", x, y, np.array(is_test)[order], 100, {"coarse": y // 10})


def _digits_texts() -> Pool:
    """`digits` as texts of 64 words, the places of 8x8 pixels: those of bright pixels, in order.

    A stand-in for texts; a text has 13 to 30 words and is filled up at its end.
    """
    ones = _digits()
    bright = ones.x[:, 2:26:3, 2:26:3].reshape(ones.n, -1) >= 128
    tokens = np.where(bright, np.arange(1, 65), 0).astype(np.int32)
    order = np.argsort(tokens == 0, axis=1, kind="stable")
    x = np.take_along_axis(tokens, order, 1)[:, : bright.sum(1).max()]
    words = np.array(["<pad>", *(f"row{r}column{c}" for r in range(8) for c in range(8))])
    return Pool("digits_texts", x, ones.y, ones.is_test, 10, {"vocab": words})


def _raters(name: str, base: Pool, workers: int = 40) -> Pool:
    """Synthetic raters, a stand-in for FLICKR-AES; y = score 0-4, columns `worker` and `image`.

    1,400 images of `base`; each worker rates 60 to 290 of them. Their taste weighs the class (the
    coarse one, where there is one), brightness, contrast and colourfulness; half of it is common to
    all workers, half their own. The score is the quintile, among their images, of taste plus noise
    (sd 30 % of it): one image has several labels. `is_test` is a fifth of each worker's images.
    """
    rng = np.random.RandomState(2)
    chosen = np.sort(rng.permutation(base.n)[:1400])
    x = base.x[chosen] / 255.0
    scalars = [x.mean(tuple(range(1, x.ndim))), x.std(tuple(range(1, x.ndim)))]
    if x.ndim == 4:  # colourfulness after Hasler and Suesstrunk (2003)
        opponent = np.stack([x[..., 0] - x[..., 1], (x[..., 0] + x[..., 1]) / 2 - x[..., 2]])
        scalars.append(np.hypot(*opponent.std((2, 3))) + 0.3 * np.hypot(*opponent.mean((2, 3))))
    scalars = [(s - s.mean()) / s.std() for s in scalars]
    kind = base.extra.get("coarse", base.y)[chosen]
    features = np.column_stack([np.eye(kind.max() + 1)[kind], *scalars])
    common, image, score, worker = rng.randn(features.shape[1]), [], [], []
    for w in range(workers):
        mine = rng.permutation(len(chosen))[: rng.randint(60, 291)]
        taste = features[mine] @ (0.5 * common + 0.5 * rng.randn(len(common)))
        taste += 0.3 * taste.std() * rng.randn(len(mine))
        image.append(chosen[mine])
        score.append(taste.argsort().argsort() * 5 // len(mine))
        worker.append(np.full(len(mine), w, dtype=np.int64))
    image, worker = np.concatenate(image), np.concatenate(worker)
    is_test, columns = readers.held_out(worker, 0.2, seed=2), {"worker": worker, "image": image}
    return Pool(
        name, base.x[image], np.concatenate(score), is_test, 5, columns, base.mean, base.std
    )


def _relabelled(name: str, base: Pool, label: np.ndarray, classes: int) -> Pool:
    """The samples of `base` whose new label (n,) is not -1."""
    keep = label >= 0
    return Pool(name, base.x[keep], label[keep], base.is_test[keep], classes)


def _emnist_digits(root: Path) -> Pool:
    base = _load("emnist", root)
    return _relabelled("emnist-digits", base, np.where(base.y < 10, base.y, -1), 10)


def _emnist_letters10(root: Path) -> Pool:
    base = _load("emnist", root)
    letter = np.where(base.y < 36, base.y - 10, base.y - 36)
    return _relabelled(
        "emnist-letters10", base, np.where((base.y >= 10) & (letter < 10), letter, -1), 10
    )


# ---- names


@dataclass(frozen=True)
class _Entry:
    doc: str
    make: Callable[[Path], Pool]
    needs: str = ""  # the public set whose files it needs
    given: Callable[[], Pool] | None = None  # what `register_dataset` was given


def _raters_of(base: str) -> Callable[[Path], Pool]:
    return lambda root: _raters(f"raters_{base}", _load(base, root))


_ENTRIES: dict[str, _Entry] = {
    "digits": _Entry("scikit-learn's digits as 28x28; needs no file", lambda root: _digits()),
    "digits100": _Entry(
        "numbers 00-99 made of `digits`, coarse = tens, 28x28; needs no file",
        lambda root: _digits100(),
    ),
    "digits_texts": _Entry(
        "texts that name the bright pixels of `digits`; needs no file", lambda root: _digits_texts()
    ),
    "raters_digits100": _Entry(
        "synthetic raters (score 0-4) of `digits100`; needs no file", _raters_of("digits100")
    ),
    "raters_cifar10": _Entry(
        "synthetic raters (score 0-4) of `cifar10`", _raters_of("cifar10"), "cifar10"
    ),
    "emnist-digits": _Entry("the digits of `emnist`", _emnist_digits, "emnist"),
    "emnist-letters10": _Entry("A-J of `emnist`, cases merged", _emnist_letters10, "emnist"),
    **{name: _Entry(s.doc, partial(_read, name), name) for name, s in SOURCES.items()},
}
_OURS = {*_ENTRIES, "own"}  # "own": a Federation, which has no name here


def _entry(name: str) -> _Entry:
    checks.known("data set", name, sorted(_ENTRIES), "add your own with register_dataset")
    return _ENTRIES[name]


def check_name(name: str) -> None:
    """Raise ValueError, naming the nearest, unless `load` knows the data set."""
    _entry(name)


@lru_cache(maxsize=4)
def _load(name: str, root: Path) -> Pool:
    pool = _entry(name).make(root)
    if not isinstance(pool, Pool):
        raise TypeError(
            f"data set {name!r}: its function returned {type(pool).__name__}, expected "
            "pfl_core.data.pools.Pool"
        )
    return pool if pool.name == name else replace(pool, name=name)


def load(name: str, *, root: str | os.PathLike | None = None) -> Pool:
    """All samples of a data set, by its name.

    The last four that were loaded stay in memory: another `load` returns the same object.

    Parameters
    ----------
    name
        One of `list_datasets()`.
    root
        The folder of array caches and raw files; by default $PFL_DATA, else ~/.cache/pfl.

    Raises
    ------
    ValueError
        If there is no data set of that name.
    DatasetMissing, DatasetDamaged
        If its files are absent, or not as they should be. The message says what to do.

    Examples
    --------
    >>> pool = load("digits")
    >>> pool.x.shape, pool.y[:5], pool.classes
    ((1797, 28, 28), array([0, 1, 2, 3, 4]), 10)
    """
    return _load(name, _root(root))


def is_here(name: str, *, root: str | os.PathLike | None = None) -> bool:
    """Whether the files of a data set are on this computer; it does not look into them.

    Raises
    ------
    ValueError
        If there is no data set of that name.

    Examples
    --------
    >>> is_here("digits")
    True
    """
    entry, where = _entry(name), _root(root)
    if not entry.needs:
        return True
    absent = SOURCES[entry.needs].absent
    folders = (where / folder for folder in SOURCES[entry.needs].folders)
    return (where / f"{entry.needs}.npz").exists() or not all(map(absent, folders))


def fetch(name: str, *, root: str | os.PathLike | None = None) -> Pool:
    """As `load`; a data set that is missing is downloaded first, verified, and kept.

    It is kept as ROOT/NAME.npz. Images come through torchvision, which compares md5 sums;
    tiny_imagenet and ag_news come through the optional package `datasets`, and the numbers of their
    samples are compared, in all and in each class.

    Raises
    ------
    ValueError, DatasetMissing, DatasetDamaged
        As `load`. With PFL_OFFLINE=1 in the environment nothing is downloaded, and DatasetMissing
        says so.
    """
    entry, where = _entry(name), _root(root)
    try:
        return _load(name, where)
    except DatasetMissing:
        if _offline() or not entry.needs or not SOURCES[entry.needs].download:
            raise
    _download(entry.needs, where)
    return _load(name, where)


def checksum(name: str) -> str:
    """The checksum of a data set: of the data that are here, else of a copy that others know of.

    Raises
    ------
    DatasetMissing
        Where there is neither.
    """
    try:
        return load(name).checksum
    except DatasetMissing:
        if known := copies(name):
            return known[0]
        raise


# Who knows checksums of copies that lie elsewhere: function of a data set's name.
_elsewhere: list[Callable[[str], list[str]]] = []


def register_copies(known: Callable[[str], list[str]]) -> None:
    """Ask `known(name)` for the checksums of copies of a data set that other machines have.

    So the id of a run that others published can be said where its data are not.
    """
    if known not in _elsewhere:
        _elsewhere.append(known)


def copies(name: str) -> list[str]:
    """Checksums of a data set's copies on other machines, as far as they are known."""
    return [found for known in _elsewhere for found in known(name)]


def register_dataset(name: str, fn: Callable[[], Pool], doc: str = "") -> None:
    """Make `load(name)` return `fn()`, a Pool.

    Parameters
    ----------
    name : str
        What Experiment(dataset=...) and `load` call it. A name of yours may be registered again, as
        when a notebook's cell runs twice.
    fn : function without arguments
        It returns the Pool.
    doc : str
        Its line in `list_datasets`.

    Raises
    ------
    ValueError
        If the name is that of a data set of this package.
    """
    if name in _OURS:
        doc = _ENTRIES[name].doc if name in _ENTRIES else "a Federation that is given to run"
        raise ValueError(f"data set {name!r} exists already ({doc}); choose another name")
    checks.name("register_dataset(name)", name)
    checks.takes(f"register_dataset({name!r})", fn)
    if name in _ENTRIES:
        _load.cache_clear()  # it holds what the function of before made
    _ENTRIES[name] = _Entry(doc, lambda root: fn(), given=fn)


def function(name: str) -> Callable[..., Pool]:
    """The function that was registered under a name; for a data set of this package `load`."""
    entry = _ENTRIES.get(name)
    return entry.given if entry and entry.given else load


def list_datasets() -> Listing:
    """{name: one line about it} of all data sets, whether their files are here or not.

    Examples
    --------
    >>> list_datasets()["digits"]
    "scikit-learn's digits as 28x28; needs no file"
    """
    return Listing({name: entry.doc for name, entry in sorted(_ENTRIES.items())})
