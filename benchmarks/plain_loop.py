"""The textbook loop that peers are built on: one model, one client after another, a DataLoader and torch.optim.SGD."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pfl_core.data.federation import Federation


class PlainLoop:
    """Federated averaging over a Federation's clients; the samples lie ready as normalised floats.

    cfg: an Experiment's batch, epochs, steps, lr, momentum, weight_decay, clip. Shuffled batches; the last, smaller one is used.
    """

    def __init__(self, model: nn.Module, fed: Federation, cfg: Any):
        self.model, self.fed, self.cfg = copy.deepcopy(model).to(fed.device), fed, cfg
        self.shared = copy.deepcopy(self.model.state_dict())
        self.own = [self.shared] * fed.K
        self.sets = {s: [self._set(s, k) for k in range(fed.K)] for s in ("train", "test")}

    def _set(self, split: str, k: int) -> TensorDataset:
        return TensorDataset(*self.fed.batch(torch.as_tensor(self.fed.index[split][k], device=self.fed.device)))

    def train(self, clients: list[int]) -> None:
        """One round: every client starts from the shared model and trains; the shared model becomes their weighted mean."""
        for k in clients:
            self.model.load_state_dict(self.shared)
            self._local(k)
            self.own[k] = copy.deepcopy(self.model.state_dict())
        total = sum(len(self.sets["train"][k]) for k in clients)
        mean: dict[str, Tensor] = {}
        for k in clients:
            for name, v in self.own[k].items():
                part = v * (len(self.sets["train"][k]) / total)
                mean[name] = mean[name] + part if name in mean else part
        self.shared = {n: v.to(self.shared[n].dtype) for n, v in mean.items()}

    def _local(self, k: int) -> None:
        cfg, params = self.cfg, list(self.model.parameters())
        optimizer = torch.optim.SGD(params, lr=cfg.lr, momentum=cfg.momentum, weight_decay=cfg.weight_decay)
        loader = DataLoader(self.sets["train"][k], cfg.batch, shuffle=True)
        epochs = itertools.chain.from_iterable(itertools.repeat(loader))
        self.model.train()
        for x, y in itertools.islice(epochs, cfg.steps or cfg.epochs * len(loader)):
            optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            if cfg.clip:
                nn.utils.clip_grad_norm_(params, cfg.clip)
            optimizer.step()

    def evaluate(self, split: str) -> float:
        """Pooled accuracy (%) of the shared model on all clients' samples of a split, in batches of the training size."""
        right = n = 0
        self.model.load_state_dict(self.shared)
        self.model.eval()
        with torch.no_grad():
            for data in self.sets[split]:
                for x, y in DataLoader(data, self.cfg.batch):
                    right += (self.model(x).argmax(1) == y).sum().item()
                    n += len(y)
        return 100 * right / n
