"""Federation: the pool on the device, train/val/test indices of every client, and seeded batch plans."""

from __future__ import annotations

import copy
import hashlib
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SPLITS = ("train", "val", "test")
PLANS = ("wrap", "drop", "fresh")
FORMS = ("uint8", "float16", "float32", "float64")  # of samples that are no tokens


def rng(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """The generator of one purpose: a pure function of (seed, purpose, ids), so that no draw depends on any other."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), *ids])


class Federation:
    """K clients over one pool of samples.

    seed, holdout, dtype and device are an Experiment's to say (`bound`); one that is given here, too, must be the same there.
    x: uint8 images (n, h, w), (n, h, w, c) or (n, c, h, w) of c = 1 or 3 channels, scaled to [0, 1], then (x - mean) / std per channel;
    integer tokens (n, length); or floats (n, ...) as they are, images as (n, c, h, w). y: labels (n,) or (n, 1).
    train, val, test: one int array of pool indices a client (val and test may be left out); classes: C, by default max(y) + 1;
    mean, std: a number a channel, or one for all. Raises ValueError for other arrays, NaN, labels or indices out of range, masks in place
    of indices, a client without training samples, or a val or test sample that is also trained on.
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
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        holdout: float | None = None,
        seed: int | None = None,
        name: str = "own",
    ):
        said = dict(seed=seed, holdout=holdout, dtype=dtype and str(dtype).removeprefix("torch."))
        self.given = {n: v for n, v in said.items() if v is not None}  # an Experiment may not say otherwise
        self.given_device = device and torch.device(device)
        self.name, self.seed, self.dtype = name, seed or 0, dtype or torch.float32
        self.device, holdout = torch.device(device or "cpu"), holdout or 0.0
        self.x_raw, self.y_raw = _samples(x), _labels(y)
        if not 0 <= holdout < 1:
            raise ValueError(f"Federation(holdout={holdout!r}): allowed is a share in [0, 1)")
        k = len(train)
        lists = {"train": train, "val": val, "test": test}
        for s, v in lists.items():
            if isinstance(v, dict):
                raise ValueError(f"{s} is a dict; give a list of one index array a client, such as list({s}.values())")
        lists = {s: [[]] * k if v is None or not len(v) else v for s, v in lists.items()}
        self.index = {s: [_indices(i, s, c) for c, i in enumerate(v)] for s, v in lists.items()}
        self.K, self.classes = k, int(classes or _count_classes(self.y_raw))
        self._check()
        self.n = torch.tensor([len(i) for i in self.index["train"]], device=self.device)
        self.label_counts = torch.tensor(self.counts("train"), device=self.device)
        self.index["holdout"], self.index["fit"] = self._hold_out(holdout)
        self.mean, self.std = mean, std
        self.x, self.y = _tensor(self.x_raw).to(self.device), torch.as_tensor(self.y_raw).to(self.device)
        if self.x.is_floating_point():
            self.x = self.x.to(self.dtype)
            self._check_finite()
        self.is_image = self.x.dtype == torch.uint8
        if self.is_image:
            if self.x.dim() == 3:
                self.x = self.x[:, None]
            elif self.x.dim() == 4 and self.x.shape[-1] in (1, 3):
                self.x = self.x.permute(0, 3, 1, 2).contiguous()
            self._normalize()

    def _normalize(self) -> None:
        m, s = (self._per_channel(v, d) for v, d in ((self.mean, 0.0), (self.std, 1.0)))
        self._scale, self._shift = 1 / (255 * s), -m / s

    def bound(
        self,
        device: str | torch.device,
        *,
        seed: int,
        holdout: float,
        dtype: str,
        max_samples: int = 0,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> Federation:
        """The same data and clients under an Experiment's settings, on a device; at most max_samples (0: all) in each client's lists."""
        fed = copy.copy(self)
        fed.__dict__.pop("hash", None)
        fed.seed, fed.dtype, fed.device, fed.mean, fed.std = (
            seed,
            getattr(torch, dtype),
            torch.device(device),
            mean,
            std,
        )
        # Lists are in random order, so their start is a random part.
        fed.index = {s: [i[: max_samples or None] for i in self.index[s]] for s in SPLITS}
        fed.index["holdout"], fed.index["fit"] = fed._hold_out(holdout)
        fed.n = torch.tensor([len(i) for i in fed.index["train"]], device=fed.device)
        fed.label_counts = torch.tensor(fed.counts("train"), device=fed.device)
        fed.x, fed.y = self.x.to(fed.device), self.y.to(fed.device)
        if fed.x.is_floating_point():
            fed.x = _tensor(self.x_raw).to(fed.device, fed.dtype)
        if fed.is_image:
            fed._normalize()
        return fed

    def _per_channel(self, values: Sequence[float] | None, default: float) -> Tensor:
        v = [default] if values is None else np.asarray(values, float).ravel().tolist()
        if len(v) not in (1, self.x.shape[1]):
            raise ValueError(
                f"mean or std has {len(v)} numbers; give one, or one for each of {self.x.shape[1]} channels"
            )
        if not np.isfinite(v).all() or (default and min(v) <= 0):  # the default of std is 1, of mean 0
            name, allowed = ("std", "finite numbers > 0") if default else ("mean", "finite numbers")
            raise ValueError(f"{name} is {v}; allowed are {allowed}, a number a channel or one for all")
        return torch.tensor(v, dtype=self.dtype, device=self.device).reshape(-1, *[1] * (self.x.dim() - 2))

    def _check(self) -> None:
        k, n = len(self.index["train"]), len(self.y_raw)
        if len(self.x_raw) != n:
            raise ValueError(f"x has {len(self.x_raw)} samples and y has {n}; they must be equally long")
        if n and not (0 <= self.y_raw.min() and self.y_raw.max() < self.classes):
            raise ValueError(f"labels reach {self.y_raw.min()}..{self.y_raw.max()}; allowed: 0..{self.classes - 1}")
        for s, lists in self.index.items():
            if len(lists) != k:
                raise ValueError(
                    f"{s} has index lists for {len(lists)} clients and train for {k}; give one list a client"
                )
            for i, idx in enumerate(lists):
                if len(idx) and not (0 <= idx.min() and idx.max() < n):
                    raise ValueError(f"{s} indices of client {i} reach {idx.min()}..{idx.max()}; allowed: 0..{n - 1}")
        empty = [i for i, idx in enumerate(self.index["train"]) if not len(idx)]
        if k == 0 or empty:
            raise ValueError(
                f"clients without training samples: {empty or 'all'}; give each at least one, or fewer clients"
            )
        trainer = np.full(n, -1)
        for i, idx in enumerate(self.index["train"]):
            trainer[idx] = i
        for s in ("val", "test"):
            for i, idx in enumerate(self.index[s]):
                if len(seen := idx[trainer[idx] >= 0]):
                    raise ValueError(
                        f"{len(seen)} of {len(idx)} {s} samples of client {i} are trained on (sample {seen[0]} by client "
                        f"{trainer[seen[0]]}); {s} must be disjoint from train of all clients"
                    )

    def _check_finite(self) -> None:
        bad = torch.nonzero(~torch.isfinite(self.x).flatten(1).all(1)).flatten().tolist()
        if bad:
            raise ValueError(
                f"x is not finite as {self.dtype} in {len(bad)} of {len(self.x)} samples, the first is sample {bad[0]}; "
                "NaN and infinite values spoil every model: leave these samples out, or replace the values"
            )

    def _hold_out(self, share: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
        # A fixed part of each client's train that SGD never sees (FedFomo's validation); at least one sample stays on either side.
        held, rest = [], []
        for k, idx in enumerate(self.index["train"]):
            perm = rng(self.seed, "holdout", k).permutation(idx)
            m = min(max(1, round(share * len(idx))), len(idx) - 1) if share else 0
            held.append(np.sort(perm[:m]))
            rest.append(np.sort(perm[m:]) if m else idx)
        return held, rest

    def counts(self, split: str = "train") -> np.ndarray:
        """Labels per client, (K, C) int64."""
        return np.stack([np.bincount(self.y_raw[i], minlength=self.classes) for i in self.index[split]])

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample as a model sees it."""
        return tuple(self.x.shape[1:])

    @cached_property
    def hash(self) -> str:
        """sha256 of samples, labels and all index lists."""
        h = hashlib.sha256()
        for a in (self.x_raw, self.y_raw, *(i for s in SPLITS for i in self.index[s])):
            h.update(str((a.shape, a.dtype)).encode() + np.ascontiguousarray(a).tobytes())
        return h.hexdigest()

    @property
    def kind(self) -> str:
        """What samples are: "image" (uint8), "tokens" or "float"."""
        return "image" if self.is_image else "float" if self.x.is_floating_point() else "tokens"

    @property
    def checksum(self) -> str:
        """sha256 of all of it that decides numbers: samples, labels, lists, classes, mean and std."""
        rest = [self.classes, *(None if v is None else np.ravel(v).tolist() for v in (self.mean, self.std))]
        return hashlib.sha256(f"{self.hash}{rest}".encode()).hexdigest()

    def extremes(self) -> Tensor:
        """Two samples as a model gets them, (2, *input_shape), on the CPU; of tokens those that hold the smallest and the largest."""
        at = [0, len(self.x) - 1]
        if not self.is_image and not self.x.is_floating_point():
            at = [int(self.x.amin(1).argmin()), int(self.x.amax(1).argmax())]
        return self.batch(torch.tensor(at, device=self.device))[0].cpu()

    def batch(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """Samples `idx` (...,) as model inputs (..., *input_shape), and labels (...,)."""
        flat = idx.reshape(-1)
        x = self.x.index_select(0, flat)
        if self.is_image:
            x = x.to(self.dtype).mul_(self._scale).add_(self._shift)
        return x.reshape(*idx.shape, *x.shape[1:]), self.y.index_select(0, flat).reshape(idx.shape)

    def sample(self, k: int, round: int, split: str, stream: str, fraction: float) -> np.ndarray:
        """The samples that client k trains on in one phase: "train" leaves the held-out share out; a random `fraction` of them."""
        idx = self.index["fit" if split == "train" else split][k]
        if fraction < 1:
            m = max(1, round_half_up(fraction * len(idx)))
            idx = np.sort(rng(self.seed, f"{stream}/subset", round, k).permutation(idx)[:m])
        return idx

    def plan(
        self,
        k: int,
        round: int,
        *,
        batch: int,
        epochs: int = 1,
        steps: int = 0,
        kind: str = "wrap",
        shuffle: bool = True,
        stream: str = "local",
        batches: int = 1,
        split: str = "train",
        fraction: float = 1.0,
    ) -> np.ndarray:
        """Pool indices (T, batches, B) of client k's local steps; steps > 0 replaces epochs. ValueError if its split is empty.

        "wrap": ceil(n/B) batches an epoch, the last filled from the start of the permutation; "drop": floor(n/B); "fresh": each batch a new
        draw. n < B: one batch of the client's samples in turn. With `batches` > 1 a step takes that many consecutive batches.
        """
        idx = self.sample(k, round, split, stream, fraction)
        g, n = rng(self.seed, stream, round, k), len(idx)
        if not n:
            raise ValueError(
                f"client {k} has no {split} samples to make batches of; give it some, or use another split"
            )
        per_epoch = max(1, (n // batch if kind == "drop" else -(-n // batch)) // batches)
        total = steps or epochs * per_epoch
        if kind == "fresh":
            need, times = batch, total * batches
        else:
            need, times = per_epoch * batches * batch, -(-total // per_epoch)
        out = [np.resize(g.permutation(n) if shuffle else np.arange(n), need) for _ in range(times)]
        return idx[np.array(out, dtype=np.int64)].reshape(-1, batches, batch)[:total]

    def save(self, path: str | Path) -> None:
        """Write the partition (index lists and the hash of the data it belongs to) as npz."""
        flat = {f"{s}_{k}": i for s in SPLITS for k, i in enumerate(self.index[s])}
        with open(path, "wb") as f:  # by name, numpy would add .npz where it is missing
            np.savez_compressed(f, clients=self.K, name=self.name, hash=self.hash, **flat)

    @classmethod
    def load(cls, path: str | Path, x: np.ndarray, y: np.ndarray, **kw) -> Federation:
        """The partition saved at `path` over the same x, y; ValueError if they are not the arrays it was made for."""
        with np.load(path, allow_pickle=False) as z:
            k, digest, name = int(z["clients"]), str(z["hash"]), str(z["name"])
            lists = {s: [z[f"{s}_{i}"] for i in range(k)] for s in SPLITS}
        fed = cls(x, y, **lists, **{"name": name} | kw)
        if fed.hash != digest:
            raise ValueError(
                f"{path} was made for other data (hash {digest[:12]}..., these have {fed.hash[:12]}...); load the data it names: {name}"
            )
        return fed

    @classmethod
    def from_pfllib(cls, folder: str | Path, **kw) -> Federation:
        """A data set as PFLlib writes it: train/<k>.npz and test/<k>.npz, each with `data` = {"x", "y"} (a pickled dict) or arrays x and y.

        Files that need unpickling are refused unless `trusted=True`: only say so for files that you made yourself.
        """
        trusted = kw.pop("trusted", False)
        folder = Path(folder)
        ids = sorted(int(p.stem) for p in (folder / "train").glob("*.npz"))
        if ids != list(range(len(ids))) or not ids:
            raise ValueError(
                f"{folder} holds train files {ids}; expected train/0.npz, 1.npz, ... and test/ likewise, as PFLlib writes them"
            )
        xs, ys, lists, at = [], [], {"train": [], "test": []}, 0
        for s in lists:
            for i in ids:
                x, y = _pfllib_arrays(folder / s / f"{i}.npz", trusted)
                xs.append(x)
                ys.append(y)
                lists[s].append(np.arange(at, at + len(y)))
                at += len(y)
        return cls(np.concatenate(xs), np.concatenate(ys), **lists, **{"name": folder.name} | kw)


def round_half_up(v: float) -> int:
    """Nearest integer, halves upwards (Python's own rounds them to even)."""
    return int(v + 0.5)


def _array(v: np.ndarray | Tensor) -> np.ndarray:
    return np.asarray(v.detach().cpu() if isinstance(v, Tensor) else v)


def _samples(x: np.ndarray | Tensor) -> np.ndarray:
    # Samples as an array of a kind that is allowed; ValueError for others.
    x = _array(x)
    tokens = x.dtype.kind in "iu" and x.dtype != np.uint8
    allowed = x.ndim == 2 if tokens else x.ndim >= 2 and x.dtype.newbyteorder("=").name in FORMS
    if not allowed:
        raise ValueError(
            f"x is {x.dtype} {x.shape}; allowed are uint8 images (n, h, w), (n, h, w, c) or (n, c, h, w) of 0 to 255, floats "
            "(n, ...) as a model takes them, images as (n, c, h, w), and integer tokens (n, length)"
        )
    if x.dtype == np.uint8 and x.ndim == 4 and not {x.shape[1], x.shape[3]} & {1, 3}:
        raise ValueError(
            f"x is uint8 {x.shape}; images have 1 or 3 channels, first or last: leave an alpha channel out with x[..., :3], and "
            "give images of other channels as floats (n, c, h, w)"
        )
    return x


def _labels(y: np.ndarray | Tensor) -> np.ndarray:
    # Labels as int64 (n,); ValueError for what is no label.
    y = _array(y)
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1:
        raise ValueError(
            f"labels y have shape {y.shape}; allowed is one integer a sample, (n,) or (n, 1); of one-hot rows take y.argmax(1)"
        )
    with np.errstate(invalid="ignore"):  # NaN differs from any integer, and is refused
        whole = y.astype(np.int64) if y.dtype.kind in "biuf" else None
    if whole is None or (y != whole).any():
        raise ValueError(f"labels y are {y.dtype}; allowed are integers 0 to classes - 1, one a sample")
    return whole


def _count_classes(y: np.ndarray) -> int:
    # A network has an output a class: a stray label, such as 10^9, would take all memory.
    found, most = int(y.max(initial=0)) + 1, max(1000, len(y))
    if found > most:
        raise ValueError(
            f"labels reach {found - 1}; without classes= labels up to {most - 1} are allowed for {len(y)} samples: number them from "
            "0 with np.unique(y, return_inverse=True)[1], or give classes="
        )
    return found


def _tensor(x: np.ndarray) -> Tensor:
    # A copy where torch takes no view: arrays that cannot be written (memory maps), that run backwards, or of another machine's bytes.
    if x.dtype.kind == "u" and x.dtype != np.uint8:
        x = x.astype(np.int64)
    x = x.astype(x.dtype.newbyteorder("="), copy=False)
    return torch.as_tensor(x if x.flags.writeable and min(x.strides) >= 0 else x.copy())


def _indices(v: np.ndarray, split: str, client: int) -> np.ndarray:
    v = _array(v)
    if not v.ndim:
        raise ValueError(f"{split} of client {client} is {v}; give one index array a client, such as [[0, 1], [2, 3]]")
    v = v.reshape(-1)
    if len(v) and v.dtype.kind not in "iu":
        raise ValueError(
            f"{split} of client {client} holds {v.dtype} values; give integer indices (np.flatnonzero(mask))"
        )
    return v.astype(np.int64)


def _pfllib_arrays(path: Path, trusted: bool) -> tuple[np.ndarray, np.ndarray]:
    with np.load(path, allow_pickle=trusted) as z:
        if {"x", "y"} <= set(z.files):
            data = z
        elif "data" not in z.files:
            raise ValueError(
                f"{path} holds {', '.join(z.files) or 'nothing'}; expected arrays x and y, or `data` with both"
            )
        elif not trusted:
            raise ValueError(
                f"{path} holds a pickled dict; pass trusted=True if you made it yourself, else save arrays x and y in it"
            )
        else:
            data = z["data"].item()
        x, y = np.asarray(data["x"]), np.asarray(data["y"])
    return (x.astype(np.float32) if x.dtype == np.float64 else x), y
