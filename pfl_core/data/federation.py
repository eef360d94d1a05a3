"""Federation: samples, labels, and which of them each client trains, validates and tests on."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from pfl_core.data import arrays, files
from pfl_core.data import names as naming
from pfl_core.data.checksum import Checksum
from pfl_core.data.files import SPLITS
from pfl_core.data.ways import Ways
from pfl_core.util import cards, checks, paths
from pfl_core.util.draws import rng

MADE_BY = "function "  # begins the rule of what a function of the seed made
WHOSE = {n: f"Experiment({n}=...)" for n in ("seed", "holdout", "dtype")} | {
    "device": "run(device=...)"
}


class Federation(Ways):
    """K clients over one pool of samples: data and clients only.

    With what they are trained is an Experiment's to say: `run(experiment, fed=...)`. It does not
    change: arrays are copied, a file that numpy maps read-only is not, and all of it is read-only.

    Parameters
    ----------
    x
        uint8 images (n, h, w), (n, h, w, c) or (n, c, h, w) of c = 1 or 3 channels or tables (n,
        d), which are scaled to [0, 1] and then to (x - mean) / std; integer tokens (n, length); or
        floats (n, ...) as a model takes them, images as (n, c, h, w).
    y : (n,) or (n, 1)
        Integer labels, 0 to classes - 1; or texts, which are numbered by their order.
    train, val, test
        One array of indices into x for each client. val and test may be left out. Clients may
        share samples of one part, such as a common test set.
    classes
        C, by default max(y) + 1.
    mean, std
        One number per channel, or one for all, of uint8 samples; others are taken as they are.
    class_names, client_names
        What classes and clients are called, for predictions and tables; they change no number.
        Labels that are texts are numbered in the order of class_names.

    Raises
    ------
    ValueError
        For arrays of other shapes or types, NaN, labels or indices out of range, masks in place of
        indices, a client without training samples, a sample twice in a list, or a val or test
        sample that is also trained on.
    TypeError
        For settings of an Experiment or of `run` (seed, holdout, dtype, device).

    Examples
    --------
    Three clients, each with 100 digits to train on and 20 to test:

    >>> pool = load("digits")
    >>> start = range(0, 360, 120)
    >>> federation = Federation(
    ...     pool.x,
    ...     pool.y,
    ...     train=[range(s, s + 100) for s in start],
    ...     test=[range(s + 100, s + 120) for s in start],
    ... )
    >>> federation.K, federation.classes, federation.input_shape
    (3, 10, (1, 28, 28))
    >>> federation.counts().sum(axis=1)
    array([100, 100, 100])
    """

    x: np.ndarray
    y: np.ndarray
    index: Mapping[str, tuple[np.ndarray, ...]]
    K: int
    classes: int
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    name: str
    folder: Path | None
    class_names: tuple[str, ...] | None
    client_names: tuple[str, ...] | None
    rule: str = ""
    _stamps: tuple[files.Stamp, ...]

    def __init__(
        self,
        x: np.ndarray | Tensor,
        y: np.ndarray | Tensor,
        train: Sequence[np.ndarray],
        val: Sequence[np.ndarray] | None = None,
        test: Sequence[np.ndarray] | None = None,
        *,
        classes: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        name: str = "own",
        class_names: Sequence[str] | None = None,
        client_names: Sequence[str] | None = None,
        **settings: Any,
    ):
        for setting, value in settings.items():
            raise TypeError(f"Federation({setting}={value!r}): {_where(setting)}")
        mean, std = (None if v is None else (*np.ravel(v).tolist(),) for v in (mean, std))
        x = arrays.frozen(arrays.samples(x))
        y, classes, class_names = naming.labels(y, classes, class_names)
        y = arrays.frozen(y)
        lists = {"train": arrays.index_lists(train, "train", 0)}
        for split, given in (("val", val), ("test", test)):
            lists[split] = arrays.index_lists(given, split, len(lists["train"]))
        checks.name("Federation(name)", name)
        if client_names is not None:
            count = len(lists["train"])
            client_names = naming.given("client_names", client_names, count, "client")
        about: dict[str, Any] = dict(name=name, mean=mean, std=std, classes=classes)
        about |= dict(class_names=class_names, client_names=client_names)
        about |= dict(x=x, y=y, index=MappingProxyType(lists), K=len(lists["train"]), folder=None)
        stamps = files.stamps(filter(None, [arrays.mapped_file(x)]))
        self.__dict__.update(about, _stamps=stamps)
        self._check()
        if self.kind == "float":
            arrays.check_finite(arrays.tensor(x))
            arrays.warn_of_pixels(x)
        if self.kind == "image":
            for values, default in ((mean, 0.0), (std, 1.0)):
                arrays.per_channel(values, default, self.input_shape[0])

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"a Federation does not change, so that runs say truly what they were over; make "
            f"another one with another {name}"
        )

    def _check(self) -> None:
        n = len(self.y)
        if len(self.x) != n:
            raise ValueError(
                f"x has {len(self.x)} samples and y has {n}; they must be equally long"
            )
        if n and not (0 <= self.y.min() and self.y.max() < self.classes):
            raise ValueError(
                f"labels reach {self.y.min()}..{self.y.max()}; allowed: 0..{self.classes - 1}"
                + "; of labels that start at 1 take y - 1" * bool(self.y.min() == 1)
                + f"; {arrays.NUMBER}" * bool(self.y.min() < 0)
            )
        for split, lists in self.index.items():
            self._check_lists(split, lists)
        empty = [k for k, idx in enumerate(self.index["train"]) if not len(idx)]
        if self.K == 0 or empty:
            raise ValueError(
                f"clients without training samples: {empty or 'all'}; "
                "give each at least one, or fewer clients"
            )
        self._check_disjoint()

    def _check_lists(self, split: str, lists: Sequence[np.ndarray]) -> None:
        n = len(self.y)
        if len(lists) != self.K:
            raise ValueError(
                f"{split} has index lists for {len(lists)} clients and train for {self.K}; "
                "give one list a client"
            )
        last = np.empty(n, np.int64)  # where a sample stands in a client's list
        for k, idx in enumerate(lists):
            if len(idx) and not (0 <= idx.min() and idx.max() < n):
                raise ValueError(
                    f"{split} indices of client {k} reach {idx.min()}..{idx.max()}; "
                    f"allowed: 0..{n - 1}"
                )
            at = np.arange(len(idx))
            last[idx] = at
            if len(twice := idx[last[idx] != at]):
                raise ValueError(
                    f"{split} of client {k} lists {len(twice)} samples more than once, the first "
                    f"is sample {twice[0]}; list each once: np.unique(indices)"
                )

    def _check_disjoint(self) -> None:
        # What is trained on, by whom ever, is no one's validation or test sample; and what chooses
        # hyper-parameters is no one's test sample.
        for used, does in {"train": "are trained on", "val": "are validated on"}.items():
            user = np.full(len(self.y), -1)
            for k, idx in enumerate(self.index[used]):
                user[idx] = k
            for split in SPLITS[SPLITS.index(used) + 1 :]:
                for k, idx in enumerate(self.index[split]):
                    if len(seen := idx[user[idx] >= 0]):
                        raise ValueError(
                            f"{len(seen)} of {len(idx)} {split} samples of client {k} {does} "
                            f"(sample {seen[0]} by client {user[seen[0]]}); "
                            f"{split} must be disjoint from {used} of all clients"
                        )

    def counts(self, split: str = "train") -> np.ndarray:
        """Labels per client, (K, C) int64."""
        return np.stack([np.bincount(self.y[i], minlength=self.classes) for i in self.index[split]])

    @property
    def kind(self) -> str:
        """What samples are: "image" (uint8), "tokens" or "float"."""
        if self.x.dtype == np.uint8:
            return "image"
        return "float" if self.x.dtype.kind == "f" else "tokens"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample as a model sees it, images channels first."""
        shape = self.x.shape[1:]
        if self.kind != "image" or len(shape) < 2:
            return shape
        if len(shape) == 2:
            return (1, *shape)
        return (shape[2], *shape[:2]) if shape[2] in (1, 3) else shape

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """class_names and client_names, those of both that there are."""
        both = {n: getattr(self, n) for n in files.NAMES}
        return {n: v for n, v in both.items() if v is not None}

    def at_most(self, samples: int, seed: int | None = None) -> Federation:
        """The same with at most that many samples in each client's train, val and test; 0: all.

        Without a seed they are the first of each list, which is a random part of what a partition
        dealt in random order. With one they are drawn from each list, its classes in proportion.
        """
        if not samples:
            return self
        lists = {}
        for split, whole in self.index.items():
            lists[split] = tuple(
                i[:samples] if seed is None else self._drawn(i, samples, rng(seed, split, k))
                for k, i in enumerate(whole)
            )
        fed = self._but(index=MappingProxyType(lists), folder=None)
        fed.__dict__.pop("hash", None)
        return fed

    def _drawn(self, index: np.ndarray, samples: int, draw: np.random.Generator) -> np.ndarray:
        # In a random order the r-th of n samples of a class is wanted at (r + 1/2) / n, so that
        # the first `samples` have the classes in proportion; they keep the order of the list.
        if len(index) <= samples:
            return index
        order = draw.permutation(len(index))
        wanted = np.empty(len(index))
        for label in np.unique(y := self.y[index[order]]):
            mine = np.flatnonzero(y == label)
            wanted[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
        return arrays.fixed(index[np.sort(order[np.argsort(wanted, kind="stable")[:samples]])])

    @cached_property
    def hash(self) -> str:
        """sha256 of samples, labels and all index lists."""
        return arrays.digest([self.x, self.y, *(i for s in SPLITS for i in self.index[s])])

    @cached_property
    def dealing(self) -> str:
        """sha256 of samples, labels and how they were dealt, whatever the seed; "" if by hand.

        Where a function made them (`ruled`), that is all that counts.
        """
        if not self.rule:
            return ""
        if self.rule.startswith(MADE_BY):
            return hashlib.sha256(self.rule.encode()).hexdigest()
        about = [self.rule, self.classes, self.mean, self.std]
        return hashlib.sha256(f"{arrays.digest([self.x, self.y])}{about}".encode()).hexdigest()

    def ruled(self, code: str) -> Federation:
        """The same, said to be made by a function of the seed with this digest; "" says nothing."""
        return self._but(rule=f"{MADE_BY}{code}" if code else "")

    def _but(self, **changes: Any) -> Federation:
        fed = object.__new__(type(self))
        fed.__dict__.update(self.__dict__ | changes)
        fed.__dict__.pop("dealing", None)
        return fed

    @property
    def checksum(self) -> Checksum:
        """sha256 of all that decides numbers: samples, labels, lists, classes, mean and std.

        Raises
        ------
        ValueError
            If a file that x maps has changed since the Federation was made.
        """
        scale = [None if v is None else list(v) for v in (self.mean, self.std)]
        rest, digest = [self.classes, *scale], self.hash
        self.check_unchanged()
        whole = hashlib.sha256(f"{digest}{rest}".encode()).hexdigest()
        return Checksum(whole, self.input_shape, self.classes)

    def check_unchanged(self) -> None:
        """Raise ValueError if a file that x maps has changed since the Federation was made."""
        files.check_unchanged(self._stamps)

    def save(self, path: str | Path) -> None:
        """Write data and clients to a folder, which `Federation.open` reads.

        It holds x.npy, y.npy, and index.npz: the lists, classes, mean, std, name and hash. Where it
        holds the same already, nothing is written. A path that ends in .npz becomes a file of the
        lists and the hash alone, which `Federation.load` reads.

        Raises
        ------
        ValueError
            If there is something else at that path.
        OSError
            If it cannot be written; what was there stays.

        Examples
        --------
        >>> pool = load("digits")
        >>> federation = Federation.dealt(pool.x, pool.y, "iid", clients=3)
        >>> federation.save("my_digits")
        >>> Federation.open("my_digits").hash == federation.hash
        True
        """
        path = paths.expanded(path, "path")
        about: dict[str, Any] = dict(name=self.name, hash=self.hash)
        if path.suffix == ".npz":
            about |= dict(clients=self.K) | self.names
            return files.write_partition(paths.to_write(path, "path"), self.index, about)
        if path.is_file() or path.is_dir() and any(path.iterdir()):
            return self._check_saved(path)
        about |= dict(classes=self.classes, mean=self.mean, std=self.std, rule=self.rule)
        about |= self.names
        try:
            files.write_folder(path.absolute(), self.x, self.y, self.index, about)
        except OSError:
            if not path.is_dir() or not any(path.iterdir()):
                raise
            self._check_saved(path)  # another process was faster

    def _check_saved(self, path: Path) -> None:
        try:
            there = None if path.is_file() else type(self).open(path)
        except ValueError:
            there = None
        mine = (self.checksum, self.name, self.names)
        if there is None or (there.checksum, there.name, there.names) != mine:
            raise ValueError(
                f"{path} is there already and holds something else; save to another folder, or "
                "take it away"
            )

    @classmethod
    def open(cls, folder: str | Path) -> Federation:
        """The Federation that `save` wrote to a folder; its samples stay in the file.

        x.npy is mapped read-only: it takes no memory, and processes share it. All of it is read
        once here, to compare it with the hash in the folder. Each run looks whether size, time or
        inode of the files changed since.

        Raises
        ------
        ValueError
            If the folder is another one, or damaged; from a run, if its files have changed.
        """
        folder = paths.absolute(folder, "folder")
        given = files.read_folder(folder)
        digest, rule = given.pop("hash"), given.pop("rule")
        fed = cls(**given)
        fed.__dict__["rule"] = rule
        if fed.hash != digest:
            raise ValueError(
                f"{folder} is not as it was saved: its hash is {fed.hash[:12]}..., the one in "
                f"index.npz {digest[:12]}...; save it again"
            )
        fed._lies_in(folder, _stamped(folder))
        return fed

    def moved(self, folder: Path) -> Federation:
        """The same, saved to a folder that is not there yet and opened from it.

        Sent to another process, it is opened there.
        """
        self.save(folder)
        return _in_folder(type(self), folder, _stamped(folder), self.hash)

    def _lies_in(self, folder: Path, stamps: Sequence[files.Stamp]) -> None:
        self.__dict__.update(folder=folder, _stamps=tuple(stamps))

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the folder again; what lies in memory is sent.
        if self.folder:
            return _reopened, (type(self), self.folder, self._stamps, self.hash, self.rule)
        given = {n: getattr(self, n) for n in ("x", "y", "classes", "mean", "std", "name")}
        return _remade, (type(self), given | self.names | dict(self.index), self.rule)

    @classmethod
    def load(cls, path: str | Path, x: np.ndarray, y: np.ndarray, **kw) -> Federation:
        """The partition saved at `path`, a file, over the same x and y.

        Raises
        ------
        ValueError
            If x and y are not the arrays that it was made for, or the file is damaged.
        """
        about, digest = files.read_partition(paths.expanded(path, "path"))
        fed = cls(x, y, **about | kw)
        if fed.hash != digest:
            raise ValueError(
                f"{path} was made for other data (hash {digest[:12]}..., these have "
                f"{fed.hash[:12]}...); load the data it names: {about['name']}"
            )
        return fed

    def __repr__(self) -> str:
        each = ", ".join(f"{held} {split}" for split, held in self._held().items())
        return f"Federation({self.name}: {self._said()}; a client has {each})"

    def _held(self) -> dict[str, str]:
        # How many samples clients have in each part that is not empty.
        parts = {split: [len(i) for i in lists] for split, lists in self.index.items()}
        return {split: cards.span(sizes) for split, sizes in parts.items() if any(sizes)}

    def _said(self) -> str:
        kind = {"image": "images", "tokens": "texts"}.get(self.kind, "samples")
        of = f"{len(self.y):,} {kind} of {cards.shape(self.input_shape)}"
        return f"{self.K:,} clients, {of}, {self.classes:,} classes"

    def _repr_html_(self) -> str:
        counts = self.counts()
        held = {f"{split} samples": f"{held} a client" for split, held in self._held().items()}
        held["classes"] = f"{cards.span((counts > 0).sum(1).tolist())} a client"
        table = cards.shaded(counts, "Training samples by client (down) and class (across)")
        return cards.card(f"Federation {self.name}: {self._said()}", held, table)


def _where(setting: str) -> str:
    if setting in WHOSE:
        return f"a Federation holds data and clients only; say it in {WHOSE[setting]}"
    return (
        "unknown; a Federation takes x, y, train, val, test, classes, mean, std, name, "
        "class_names, client_names"
    )


def _stamped(folder: Path) -> tuple[files.Stamp, ...]:
    return files.stamps(folder / name for name in files.FILES)


def _in_folder(
    cls: type[Federation], folder: Path, stamps: Sequence[files.Stamp], digest: str
) -> Federation:
    # A saved Federation whose digest is known.
    files.check_unchanged(stamps)
    given = files.read_folder(folder)
    given.pop("hash")
    fed = _remade(cls, given, given.pop("rule"))
    fed._lies_in(folder, stamps)
    fed.__dict__["hash"] = digest
    return fed


@functools.lru_cache(maxsize=16)  # once for all runs of a worker process; samples stay in files
def _reopened(
    cls: type[Federation], folder: Path, stamps: tuple[files.Stamp, ...], digest: str, rule: str
) -> Federation:
    return _in_folder(cls, folder, stamps, digest)._but(rule=rule)


def _remade(cls: type[Federation], given: dict[str, Any], rule: str) -> Federation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given["x"] = arrays.owned(given["x"])
        fed = cls(**given)
    fed.__dict__["rule"] = rule
    return fed
