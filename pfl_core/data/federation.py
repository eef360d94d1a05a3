"""Federation: samples, labels, and which of them each client trains, validates and tests on."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl_core.data.partition import partition as deal
from pfl_core.data.readers import held_out
from pfl_core.util import cards, sums

SPLITS = ("train", "val", "test")
FORMS = ("uint8", "float16", "float32", "float64")  # of samples that are no tokens
WHOSE = {n: f"Experiment({n}=...)" for n in ("seed", "holdout", "dtype")} | {
    "device": "run(device=...)"
}


class Federation:
    """K clients over one pool of samples: data and clients only.

    With what they are trained is an Experiment's to say: `run(experiment, fed=...)`.

    Parameters
    ----------
    x
        uint8 images (n, h, w), (n, h, w, c) or (n, c, h, w) of c = 1 or 3 channels, which are
        scaled to [0, 1] and then to (x - mean) / std; integer tokens (n, length); or floats
        (n, ...) as a model takes them, images as (n, c, h, w).
    y : (n,) or (n, 1)
        Integer labels, 0 to classes - 1.
    train, val, test
        One array of indices into x for each client. val and test may be left out.
    classes
        C, by default max(y) + 1.
    mean, std
        One number per channel, or one for all.

    Raises
    ------
    ValueError
        For arrays of other shapes or types, NaN, labels or indices out of range, masks in place of
        indices, a client without training samples, or a val or test sample that is also trained on.
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
        **settings: Any,
    ):
        for setting, value in settings.items():
            raise TypeError(f"Federation({setting}={value!r}): {_where(setting)}")
        self.name, self.mean, self.std = name, mean, std
        self.x, self.y = _samples(x), _labels(y)
        k = len(train)
        lists = {"train": train, "val": val, "test": test}
        for s, v in lists.items():
            if isinstance(v, dict):
                raise ValueError(
                    f"{s} is a dict; give a list of one index array a client, such as "
                    f"list({s}.values())"
                )
        none = [np.empty(0, dtype=np.int64)] * k
        lists = {s: none if v is None or not len(v) else v for s, v in lists.items()}
        self.index = {s: [_indices(i, s, c) for c, i in enumerate(v)] for s, v in lists.items()}
        self.K, self.classes = k, int(classes or _count_classes(self.y))
        self._check()
        if self.kind == "float":
            check_finite(tensor(self.x))
            _warn_of_pixels(self.x)
        if self.kind == "image":
            for values, default in ((mean, 0.0), (std, 1.0)):
                per_channel(values, default, self.input_shape[0])

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

    def _check_lists(self, split: str, lists: list[np.ndarray]) -> None:
        n = len(self.y)
        if len(lists) != self.K:
            raise ValueError(
                f"{split} has index lists for {len(lists)} clients and train for {self.K}; "
                "give one list a client"
            )
        for k, idx in enumerate(lists):
            if len(idx) and not (0 <= idx.min() and idx.max() < n):
                raise ValueError(
                    f"{split} indices of client {k} reach {idx.min()}..{idx.max()}; "
                    f"allowed: 0..{n - 1}"
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

    def at_most(self, samples: int) -> Federation:
        """The same with at most that many samples in each client's train, val and test; 0: all.

        Lists are in random order, so that their start is a random part of them.
        """
        if not samples:
            return self
        fed = copy.copy(self)
        fed.__dict__.pop("hash", None)
        fed.index = {s: [i[:samples] for i in lists] for s, lists in self.index.items()}
        return fed

    @cached_property
    def hash(self) -> str:
        """sha256 of samples, labels and all index lists."""
        h = hashlib.sha256()
        for a in (self.x, self.y, *(i for s in SPLITS for i in self.index[s])):
            h.update(str((a.shape, a.dtype)).encode() + np.ascontiguousarray(a).tobytes())
        return h.hexdigest()

    @property
    def checksum(self) -> str:
        """sha256 of all that decides numbers: samples, labels, lists, classes, mean and std."""
        scale = [None if v is None else np.ravel(v).tolist() for v in (self.mean, self.std)]
        rest = [self.classes, *scale]
        return hashlib.sha256(f"{self.hash}{rest}".encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the partition (index lists and the hash of the data it belongs to) as npz."""
        flat: dict[str, Any] = {f"{s}_{k}": i for s in SPLITS for k, i in enumerate(self.index[s])}
        with sums.replacing(Path(path)) as f:  # by name, numpy would add .npz where it is missing
            np.savez_compressed(f, clients=self.K, name=self.name, hash=self.hash, **flat)

    @classmethod
    def load(cls, path: str | Path, x: np.ndarray, y: np.ndarray, **kw) -> Federation:
        """The partition saved at `path`, over the same x and y.

        Raises
        ------
        ValueError
            If x and y are not the arrays that it was made for, or the file is damaged.
        """
        try:
            # Given a path, numpy leaves broken files open.
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as z:
                k, digest, name = int(z["clients"]), str(z["hash"]), str(z["name"])
                lists: dict[str, Any] = {s: [z[f"{s}_{i}"] for i in range(k)] for s in SPLITS}
        except OSError:
            raise
        except Exception as error:  # zipfile and numpy meet damage with nearly any type
            raise ValueError(
                f"{path} is damaged, or no partition that Federation.save wrote: {error}"
            ) from error
        about: dict[str, Any] = lists | {"name": name} | kw
        fed = cls(x, y, **about)
        if fed.hash != digest:
            raise ValueError(
                f"{path} was made for other data (hash {digest[:12]}..., these have "
                f"{fed.hash[:12]}...); load the data it names: {name}"
            )
        return fed

    @classmethod
    def dealt(
        cls,
        x: np.ndarray | Tensor,
        y: np.ndarray | Tensor,
        partition: str = "dirichlet",
        *,
        clients: int,
        seed: int = 0,
        test: float = 0.2,
        classes: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        name: str = "own",
        **args: Any,
    ) -> Federation:
        """Arrays of your own, dealt to clients by a partition of `list_partitions()`.

        Parameters
        ----------
        x, y, classes, mean, std, name
            As for Federation.
        partition
            Name of the partition; `args` are its own arguments, such as alpha=0.3.
        clients
            How many clients, K.
        seed
            Decides who gets which samples; equal seeds deal alike.
        test
            Share of each class that is the test part, for partitions that deal it apart from the
            training part ("iid", for example). The others divide what each client has.

        Raises
        ------
        ValueError
            As Federation, and where the partition cannot deal these samples so.

        Examples
        --------
        >>> pool = load("digits")
        >>> Federation.dealt(pool.x, pool.y, "iid", clients=3)
        Federation(own: 3 clients, 1,797 images of 1 x 28 x 28, 10 classes;
        a client has 479 to 480 train, 119 to 120 test)
        """
        if not isinstance(test, float | np.floating) or not 0 < test < 1:
            raise ValueError(f"Federation.dealt(test={test!r}): allowed is a share in (0, 1)")
        y = _labels(y)
        classes = int(classes or _count_classes(y))
        pool = SimpleNamespace(y=y, is_test=held_out(y, test, seed), classes=classes, extra={})
        split = deal(partition, pool, clients, seed, **args)
        about: dict[str, Any] = dict(classes=classes, mean=mean, std=std, name=name)
        return cls(x, y, split.train, split.val, split.test, **about)

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

    @classmethod
    def from_pfllib(cls, folder: str | Path, **kw) -> Federation:
        """A data set as PFLlib writes it: train/<k>.npz and test/<k>.npz for each client k.

        A file holds arrays x and y, or `data` = {"x", "y"}, a pickled dict.

        Files that need unpickling are refused unless `trusted=True`: only say so for files that you
        made yourself.
        """
        trusted = kw.pop("trusted", False)
        folder = Path(folder)
        stems = [p.stem for p in (folder / "train").glob("*.npz")]
        ids: list[Any] = sorted(int(stem) for stem in stems if stem.isdecimal())
        ids += [stem for stem in stems if not stem.isdecimal()]
        if ids != list(range(len(ids))) or not ids:
            raise ValueError(
                f"{folder} holds train files {ids}; expected train/0.npz, 1.npz, ... and test/ "
                "likewise, as PFLlib writes them"
            )
        xs, ys, lists, at = [], [], {"train": [], "test": []}, 0
        for s in lists:
            for i in ids:
                x, y = _pfllib_arrays(file := folder / s / f"{i}.npz", trusted)
                xs.append(x)
                mine, first = (f"{a.dtype} of shape {a.shape[1:]}" for a in (x, xs[0]))
                if mine != first:
                    raise ValueError(f"{file} holds samples {mine}, and the first file {first}")
                ys.append(y)
                lists[s].append(np.arange(at, at + len(y)))
                at += len(y)
        about: dict[str, Any] = lists | {"name": folder.name} | kw
        return cls(np.concatenate(xs), np.concatenate(ys), **about)


def check_finite(x: Tensor) -> None:
    """ValueError for samples (n, ...) that hold NaN or infinite values in their number format."""
    bad = torch.nonzero(~torch.isfinite(x).flatten(1).all(1)).flatten().tolist()
    if bad:
        raise ValueError(
            f"x is not finite as {x.dtype} in {len(bad)} of {len(x)} samples, the first is sample "
            f"{bad[0]}; "
            "NaN and infinite values spoil every model: leave these samples out, or replace the "
            "values"
        )


def per_channel(
    values: Sequence[float] | float | None, default: float, channels: int
) -> list[float]:
    """A mean (default 0) or std (default 1), as one number or one for each channel.

    Raises
    ------
    ValueError
        If there are more or fewer, or a number is not finite, or a std not > 0.
    """
    v = [default] if values is None else np.asarray(values, float).ravel().tolist()
    if len(v) not in (1, channels):
        raise ValueError(
            f"mean or std has {len(v)} numbers; give one, or one for each of {channels} channels"
        )
    if not np.isfinite(v).all() or (default and min(v) <= 0):
        name, allowed = ("std", "finite numbers > 0") if default else ("mean", "finite numbers")
        raise ValueError(f"{name} is {v}; allowed are {allowed}, a number a channel or one for all")
    return v


def _where(setting: str) -> str:
    if setting in WHOSE:
        return f"a Federation holds data and clients only; say it in {WHOSE[setting]}"
    return "unknown; a Federation takes x, y, train, val, test, classes, mean, std, name"


def _array(v: np.ndarray | Tensor) -> np.ndarray:
    return np.asarray(v.detach().cpu() if isinstance(v, Tensor) else v)


def _samples(x: np.ndarray | Tensor) -> np.ndarray:
    # Samples as an array of a kind that is allowed; ValueError for others.
    try:
        x = _array(x)
    except (ValueError, RuntimeError, TypeError) as error:  # of a list: numpy's or torch's
        shapes = dict.fromkeys(str(tuple(np.shape(sample))) for sample in x)
        if len(shapes) == 1:
            raise ValueError(f"x is a list that makes no array: {error}") from error
        some = ", ".join([*shapes][:3])
        raise ValueError(
            f"x is a list of samples of shape {some}; cut or pad them to one shape"
        ) from None
    tokens = x.dtype.kind in "iu" and x.dtype != np.uint8
    allowed = x.ndim == 2 if tokens else x.ndim >= 2 and x.dtype.newbyteorder("=").name in FORMS
    if not allowed:
        raise ValueError(
            f"x is {x.dtype} {x.shape}; allowed are uint8 images (n, h, w), (n, h, w, c) or (n, "
            "c, h, w) of 0 to 255, floats "
            "(n, ...) as a model takes them, images as (n, c, h, w), and integer tokens (n, length)"
        )
    if x.dtype == np.uint8 and x.ndim == 4 and not {x.shape[1], x.shape[3]} & {1, 3}:
        raise ValueError(
            f"x is uint8 {x.shape}; images have 1 or 3 channels, first or last: leave an alpha "
            "channel out with x[..., :3], and "
            "give images of other channels as floats (n, c, h, w)"
        )
    return x


def _warn_of_pixels(x: np.ndarray) -> None:
    # Floats are used as they are, but torch's and numpy's conversions keep pixels at 0 to 255.
    some = x[:256]
    whole = x.ndim == 4 and some.size and (some == some.round()).all()
    if whole and some.min() >= 0 and 2 <= some.max() <= 255:
        warnings.warn(
            f"x is {x.dtype} {x.shape} of whole numbers up to {some.max():g}, used as they are: if "
            "these are pixels of 0 to 255, give x.astype('uint8'), which is scaled, or x / 255",
            stacklevel=3,
        )


def _labels(y: np.ndarray | Tensor) -> np.ndarray:
    # Labels as int64 (n,); ValueError for what is no label.
    y = _array(y)
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1:
        raise ValueError(
            f"labels y have shape {y.shape}; allowed is one integer a sample, (n,) or (n, 1); of "
            "one-hot rows take y.argmax(1)"
        )
    with np.errstate(invalid="ignore"):  # NaN differs from any integer, and is refused
        whole = y.astype(np.int64) if y.dtype.kind in "biuf" else None
    if whole is None or (y != whole).any():
        raise ValueError(
            f"labels y are {y.dtype}; allowed are integers 0 to classes - 1, one a sample: "
            "number others with np.unique(y, return_inverse=True)[1]"
        )
    return whole


def _count_classes(y: np.ndarray) -> int:
    # A network has an output a class: a stray label, such as 10^9, would take all memory.
    found, most = int(y.max(initial=0)) + 1, max(1000, len(y))
    if found > most:
        raise ValueError(
            f"labels reach {found - 1}; without classes= labels up to {most - 1} are allowed for "
            f"{len(y)} samples: number them from "
            "0 with np.unique(y, return_inverse=True)[1], or give classes="
        )
    if len(y) and y.min() > 0:
        raise ValueError(
            f"labels reach {y.min()}..{found - 1} and not 0: of labels that start at {y.min()} "
            f"take y - {y.min()}, or give classes={found} if others are to be there"
        )
    return found


def tensor(x: np.ndarray) -> Tensor:
    """An array as a tensor; a copy where torch takes no view.

    That is of memory maps, of arrays with negative strides, and of another machine's byte order.
    """
    if x.dtype.kind == "u" and x.dtype != np.uint8:
        x = x.astype(np.int64)
    x = x.astype(x.dtype.newbyteorder("="), copy=False)
    return torch.as_tensor(x if x.flags.writeable and min(x.strides) >= 0 else x.copy())


def _indices(v: np.ndarray, split: str, client: int) -> np.ndarray:
    v = _array(v)
    if not v.ndim:
        raise ValueError(
            f"{split} of client {client} is {v}; give one index array a client, such as [[0, 1], "
            "[2, 3]]"
        )
    v = v.reshape(-1)
    if len(v) and v.dtype.kind not in "iu":
        raise ValueError(
            f"{split} of client {client} holds {v.dtype} values; give integer indices "
            "(np.flatnonzero(mask))"
        )
    return v.astype(np.int64)


def _pfllib_arrays(path: Path, trusted: bool) -> tuple[np.ndarray, np.ndarray]:
    data, names = None, []
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=trusted) as z:
            names = z.files
            if {"x", "y"} <= set(names):
                data = z["x"], z["y"]
            elif "data" in names and trusted:
                data = tuple(np.asarray(z["data"].item()[name]) for name in "xy")
    except OSError:
        raise
    except Exception as error:  # zipfile and numpy meet damage with nearly any type
        raise ValueError(f"{path} cannot be read: {error}") from error
    if data is None and "data" in names:
        raise ValueError(
            f"{path} holds a pickled dict; pass trusted=True if you made it yourself, else "
            "save arrays x and y in it"
        )
    if data is None:
        raise ValueError(
            f"{path} holds {', '.join(names) or 'nothing'}; expected arrays x and y, or "
            "`data` with both"
        )
    x, y = data
    if x.shape[:1] != y.shape[:1]:
        raise ValueError(f"{path} has samples {x.shape} and labels {y.shape}; give each one label")
    return (x.astype(np.float32) if x.dtype == np.float64 else x), y
