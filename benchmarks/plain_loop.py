"""The textbook loop that peers are built on, with a DataLoader and torch.optim.SGD.

It has one model, and trains one client after another.
"""

from __future__ import annotations

import copy
import functools
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.cases import CASES
from pfl_core.data.client_data import ClientData
from pfl_core.experiments.build import build_method, client_data
from pfl_core.methods.task import TrainConfig
from pfl_core.util.percent import accuracy


class PlainLoop:
    """Federated averaging over clients; their samples lie ready as normalised floats.

    Of `config` it takes batch, epochs, steps, lr, momentum, weight_decay, clip. Shuffled batches;
    the last, smaller one is used.
    """

    def __init__(self, model: nn.Module, data: ClientData, config: TrainConfig):
        self.model, self.data, self.config = copy.deepcopy(model).to(data.device), data, config
        self.shared = copy.deepcopy(self.model.state_dict())
        self.own = [self.shared] * data.K
        self.sets = {s: [self._set(s, k) for k in range(data.K)] for s in ("train", "test")}

    def _set(self, split: str, k: int) -> TensorDataset:
        return TensorDataset(
            *self.data.batch(torch.as_tensor(self.data.index[split][k], device=self.data.device))
        )

    def train(self, clients: list[int]) -> None:
        """One round: each client trains the shared model, which becomes their weighted mean."""
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
        config, params = self.config, list(self.model.parameters())
        optimizer = torch.optim.SGD(
            params, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
        loader = DataLoader(self.sets["train"][k], config.batch, shuffle=True)
        epochs = itertools.chain.from_iterable(itertools.repeat(loader))
        self.model.train()
        for x, y in itertools.islice(epochs, config.steps or config.epochs * len(loader)):
            optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            if config.clip:
                nn.utils.clip_grad_norm_(params, config.clip)
            optimizer.step()

    def evaluate(self, split: str) -> float:
        """Pooled accuracy (%) of the shared model on all clients' samples of a split.

        Batches have the size of those of training.
        """
        right = n = 0
        self.model.load_state_dict(self.shared)
        self.model.eval()
        with torch.no_grad():
            for data in self.sets[split]:
                for x, y in DataLoader(data, self.config.batch):
                    right += (self.model(x).argmax(1) == y).sum().item()
                    n += len(y)
        return accuracy(right, n)


@functools.cache
def quickstart(samples: int) -> PlainLoop:
    """The loop over the clients of the case "quickstart", made once a process.

    Each has at most `samples` images, all of them with 0.
    """
    torch.set_num_threads(1)
    experiment = CASES["quickstart"].experiment().but(max_samples=samples)
    data = client_data(experiment)
    method = build_method(experiment, data)
    return PlainLoop(method.task.model, data, method.task.config)
