"""FedAvg in BlazeFL over the clients of a plain loop, for peers.py: its own server and trainers."""

from __future__ import annotations

import copy
import tempfile
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from blazefl.contrib.fedavg import (
    FedAvgBaseServerHandler,
    FedAvgProcessPoolClientTrainer,
    FedAvgThreadPoolClientTrainer,
)
from blazefl.core import IPCMode
from torch.utils.data import DataLoader

from benchmarks.plain_loop import PlainLoop


class Net(StrEnum):
    """The networks: one."""

    ONLY = "only"


class Same:
    """Gives each client the model that all begin with."""

    def __init__(self, model: torch.nn.Module):
        self.model = model

    def select_model(self, model_name: Net) -> torch.nn.Module:
        """A copy of the model."""
        return copy.deepcopy(self.model)


class Clients:
    """The clients' samples, which lie ready."""

    def __init__(self, loop: PlainLoop):
        self.sets = loop.sets

    def get_dataset(self, type_: str, cid: int | None) -> Any:
        """Samples of a client."""
        return self.sets[str(type_)][cid or 0]

    def set_dataset(self, type_: str, cid: int | None, dataset: Any) -> None:
        """Nothing: no client's samples change."""

    def get_dataloader(
        self, type_: str, cid: int | None, batch_size: int | None, generator: Any
    ) -> DataLoader:
        """Shuffled batches of a client."""
        return DataLoader(
            self.get_dataset(type_, cid), batch_size, shuffle=True, generator=generator
        )


def simulate(
    loop: PlainLoop, rounds: int, workers: int, kind: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Seconds of each round, and the last model; `kind` is "threads" or "processes"."""
    k, config = loop.data.K, loop.config
    loop.model.load_state_dict(loop.shared)
    common: dict[str, Any] = dict(model_selector=Same(loop.model), model_name=Net.ONLY)
    common |= dict(dataset=Clients(loop), num_clients=k, device="cpu", seed=0)
    common |= dict(batch_size=config.batch)
    server = FedAvgBaseServerHandler(global_round=rounds, sample_ratio=1.0, **common)
    own = common | dict(epochs=config.epochs, lr=config.lr, num_parallels=workers)
    with tempfile.TemporaryDirectory() as folder:
        if kind == "threads":
            trainer: Any = FedAvgThreadPoolClientTrainer(**own)
        else:
            places = dict(share_dir=Path(folder, "share"), state_dir=Path(folder, "state"))
            trainer = FedAvgProcessPoolClientTrainer(
                ipc_mode=IPCMode.SHARED_MEMORY, **places, **own
            )
        times = []
        while not server.if_stop():
            began = time.perf_counter()
            trainer.local_process(server.downlink_package(), server.sample_clients())
            for package in trainer.uplink_package():
                server.load(package)
            times.append(time.perf_counter() - began)
    return times, server.model.state_dict()
