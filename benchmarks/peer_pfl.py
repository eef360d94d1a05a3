"""FedAvg in Apple's pfl over the clients of a plain loop, for peers.py.

It is one process, as pfl's simulation on one computer is.
"""

from __future__ import annotations

import time
import types

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks.plain_loop import PlainLoop


class Clock(TrainingProcessCallback):
    """Notes when each central iteration ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *, model):
        """The first round begins."""
        self.ends.append(time.perf_counter())
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """A round is over."""
        self.ends.append(time.perf_counter())
        return False, Metrics()


def _loss(self, x, y, eval=False):
    self.train(not eval)
    return F.cross_entropy(self(x), y)


def simulate(loop: PlainLoop, rounds: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Seconds of each round, and the last model."""
    config, k, net = loop.config, loop.data.K, loop.model
    net.load_state_dict(loop.shared)
    net.loss = types.MethodType(_loss, net)
    net.metrics = types.MethodType(lambda self, x, y, eval=False: {}, net)
    data = {i: list(loop.sets["train"][i].tensors) for i in range(k)}
    train = FederatedDataset(
        lambda i: Dataset(data[i], user_id=i), get_user_sampler("minimize_reuse", list(data))
    )
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=k,
            val_cohort_size=None,
        ),
        SimulatedBackend(train, None, [WeightByDatapoints()]),
        model,
        NNTrainHyperParams(
            local_batch_size=config.batch,
            local_num_epochs=config.epochs,
            local_learning_rate=config.lr,
        ),
        NNEvalHyperParams(local_batch_size=config.batch),
        [clock],
    )
    return [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)], net.state_dict()
