"""What the engine trains on: a Federation's samples on a device, and seeded batches of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl_core.data import augment as augmentation
from pfl_core.data.arrays import check_finite, per_channel, tensor
from pfl_core.data.federation import Federation
from pfl_core.util.draws import rng

PLANS = ("wrap", "drop", "fresh")  # what `Experiment.plan` may be


class ClientData:
    """K clients' samples x (n, ...) and labels y (n,) on a device, and who holds which of them.

    Parameters
    ----------
    seed
        Decides batches, and what is held out.
    holdout
        The share of each client's train that SGD never sees (FedFomo's validation).
    dtype
        Of a model's inputs; tokens stay integers.
    mean, std
        Normalise images, see Federation.
    augment
        Transforms of training images, see `augmented`.

    Attributes
    ----------
    index
        {"train", "val", "test", "holdout", "fit" (train without holdout)}: lists of one index array
        for each client.
    n : (K,) int64
        Numbers of training samples.
    label_counts : (K, C) int64
        Training samples of each class.

    Raises
    ------
    ValueError
        If samples are not finite in `dtype`, and for transforms that do not fit them.
    """

    def __init__(
        self,
        federation: Federation,
        *,
        seed: int,
        holdout: float,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        augment: Sequence[dict[str, Any]] = (),
    ):
        self.federation, self.seed = federation, seed
        self.dtype, self.device = dtype, torch.device(device)
        self.mean, self.std = mean, std
        self.K, self.classes, self.kind = federation.K, federation.classes, federation.kind
        self.input_shape = federation.input_shape
        held, fit = self._hold_out(holdout)
        lists = {split: list(lists) for split, lists in federation.index.items()}
        self.index = lists | {"holdout": list(held), "fit": list(fit)}
        self.n = torch.tensor([len(i) for i in self.index["train"]], device=self.device)
        self.label_counts = torch.tensor(federation.counts(), device=self.device)
        self.x = tensor(federation.x).to(self.device)
        self.y = tensor(federation.y).clone().to(self.device)
        if self.kind == "float":
            self.x = self.x.to(dtype)
            check_finite(self.x)
        if self.kind == "image":
            self._channels_first()
            centre, spread = self._per_channel(mean, 0.0), self._per_channel(std, 1.0)
            self._scale, self._shift = 1 / (255 * spread), -centre / spread
        self._transforms = augmentation.transforms(augment)
        if self._transforms:
            self._check_augmented()
            self.x = self.x.clone()  # the Federation's own samples stay as they are

    def _check_augmented(self) -> None:
        if self.kind == "tokens" or self.x.dim() != 4:
            raise ValueError(
                "Experiment(augment=...) changes images (n, c, h, w); leave it out over samples "
                f"of kind {self.kind!r} and shape {self.input_shape}"
            )
        fit = np.concatenate(self.index["fit"])
        if len(np.unique(fit)) < len(fit):
            raise ValueError(
                "Experiment(augment=...) over clients that share training samples: each would have "
                "them in another form; give each client its own"
            )
        self._drawn(0, 0, slice(2))

    def _drawn(self, k: int, round: int, part: slice = slice(None)) -> Tensor:
        # Client k's training images (m, c, h, w) as it has them in a round.
        at = torch.as_tensor(self.index["fit"][k][part], device=self.device)
        return augmentation.changed(self.x[at], self._transforms, self.seed, round, k)

    @contextmanager
    def augmented(self, round: int, clients: Sequence[int]) -> Iterator[None]:
        """Within it, training images of these clients are as they are drawn for the round.

        Each image is drawn once a round: epochs of one round see the same. What is held out, and
        validation and test images, are as they are.
        """
        if not self._transforms:
            yield
            return
        at = torch.as_tensor(
            np.concatenate([self.index["fit"][k] for k in clients]), device=self.device
        )
        before = self.x[at]
        self.x[at] = torch.cat([self._drawn(k, round) for k in clients])
        try:
            yield
        finally:
            self.x[at] = before

    def _hold_out(self, share: float) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
        # At least one sample of each client stays on either side.
        train = self.federation.index["train"]
        if not share:
            return [idx[:0] for idx in train], train
        held, rest = [], []
        for k, idx in enumerate(train):
            perm = rng(self.seed, "holdout", k).permutation(idx)
            m = min(max(1, round(share * len(idx))), len(idx) - 1)
            held.append(np.sort(perm[:m]))
            rest.append(np.sort(perm[m:]) if m else idx)
        return held, rest

    def _channels_first(self) -> None:
        if self.x.dim() == 3:
            self.x = self.x[:, None]
        elif self.x.dim() == 4 and self.x.shape[-1] in (1, 3):
            self.x = self.x.permute(0, 3, 1, 2).contiguous()

    def _per_channel(self, values: Sequence[float] | None, default: float) -> Tensor:
        numbers = per_channel(values, default, self.input_shape[0])
        shape = (-1, *[1] * (self.x.dim() - 2))
        return torch.tensor(numbers, dtype=self.dtype, device=self.device).reshape(shape)

    def extremes(self) -> Tensor:
        """Two samples as a model gets them, (2, *input_shape), on the CPU.

        Of tokens, they are those that hold the smallest and the largest token.
        """
        at = [0, len(self.x) - 1]
        if self.kind == "tokens":
            at = [int(self.x.amin(1).argmin()), int(self.x.amax(1).argmax())]
        return self.batch(torch.tensor(at, device=self.device))[0].cpu()

    def batch(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """Samples `idx` (...,) as model inputs (..., *input_shape), and labels (...,)."""
        flat = idx.reshape(-1)
        x = self.x.index_select(0, flat)
        if self.kind == "image":
            x = x.to(self.dtype).mul_(self._scale).add_(self._shift)
        return x.reshape(*idx.shape, *x.shape[1:]), self.y.index_select(0, flat).reshape(idx.shape)

    def sample(self, k: int, round: int, split: str, stream: str, fraction: float) -> np.ndarray:
        """Indices of what client k trains on in one phase: a random `fraction` of its split.

        Of "train", what is held out is left out.
        """
        idx = self.index["fit" if split == "train" else split][k]
        if fraction < 1:
            m = max(1, round_half_up(fraction * len(idx)))
            idx = np.sort(rng(self.seed, f"{stream}/subset", round, k).permutation(idx)[:m])
        return idx

    def fold(self, k: int, split: str, i: int, n: int) -> np.ndarray:
        """Indices of the i-th of n parts of client k's split, dealt out in turn class by class."""
        index = self.index[split][k]
        if n == 1:
            return index
        y = self.federation.y[index]
        order = np.argsort(y, kind="stable")
        place = np.empty(len(y), dtype=np.int64)  # of a sample among those of its class
        place[order] = np.arange(len(y)) - np.searchsorted(y[order], y[order])
        return index[place % n == i]

    def batch_indices(
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
        """Pool indices (T, batches, B) int64 of client k's T local steps.

        Parameters
        ----------
        batch : int
            B, samples in a batch.
        epochs, steps : int
            How long; steps > 0 replaces epochs.
        kind : {"wrap", "drop", "fresh"}
            "wrap" is ceil(n/B) batches an epoch, the last filled from the start of the epoch's
            permutation; "drop" is floor(n/B); with "fresh" each batch is a new draw. With n < B, a
            batch repeats the client's samples in turn.
        shuffle : bool
            False takes the samples in their order.
        stream : str
            Equal streams give equal batches.
        batches : int
            How many consecutive ones a step uses.
        split, fraction
            What is trained on, see `sample`.

        Raises
        ------
        ValueError
            If the client has no samples in that split.
        """
        idx = self.sample(k, round, split, stream, fraction)
        generator, n = rng(self.seed, stream, round, k), len(idx)
        if not n:
            raise ValueError(
                f"client {k} has no {split} samples to make batches of; give it some, or use "
                "another split"
            )
        per_epoch = max(1, (n // batch if kind == "drop" else -(-n // batch)) // batches)
        total = steps or epochs * per_epoch
        if kind == "fresh":
            need, times = batch, total * batches
        else:
            need, times = per_epoch * batches * batch, -(-total // per_epoch)
        orders = [generator.permutation(n) if shuffle else np.arange(n) for _ in range(times)]
        positions = np.array([np.resize(order, need) for order in orders], dtype=np.int64)
        return idx[positions].reshape(-1, batches, batch)[:total]


def round_half_up(v: float) -> int:
    """Nearest integer, halves upwards (Python's own rounds them to even)."""
    return int(v + 0.5)
