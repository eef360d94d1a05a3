"""What runs of the benchmark cost: gradients that a client takes, counted, and hours, measured."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from pfl_core.data.federation import Federation
from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.engine.participation import evaluate_at, evaluated, evaluates_after, visits
from pfl_core.experiments.build import build_method, client_data, fitted, split, train_config
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.run import run
from pfl_core.methods.base import Batch
from pfl_core.stacked import Params
from pfl_papers.compare import plan


class _Counted(Context):
    # Counts how often clients take the gradient of a loss over one batch, of the usual size.
    calls = 0.0

    def train(self, loss: Callable, start: Params, **how: Any) -> Params:
        def counted(p: Params, anchor: Params, batch: Batch) -> torch.Tensor:
            self.calls += len(batch.y) / self._engine.config.batch
            return loss(p, anchor, batch)

        return super().train(counted, start, **how)


# What decides how many gradients a method takes stays as it is.
_SMALL: dict[str, Any] = dict(dataset="digits", partition="iid", partition_args={}, clients=2)
_SMALL |= dict(partition_seed=None, max_samples=80, batch=8, rounds=3, eval_every=1, lr=0.01)
_SMALL |= dict(
    momentum=0.0, participation=1.0, eval_clients=0, seed=0, init_from=None, tags={}, record=()
)
_SMALL |= dict(
    client_dropout=0.0,
    stragglers=0.0,
    finetune=None,
    model="lenet",
    model_args={"bn": True, "kernels": 2},
)


def multiple(experiment: Experiment) -> float:
    """Gradients over one batch that a method takes in a round, in batches of one epoch.

    1 for FedAvg at epochs=1, 2 for Ditto. Counted in the third round of two small clients on
    digits, after what a method does once; passes that only serve a model are not in it.
    """
    return _multiple(json.dumps(dataclasses.replace(experiment, **_SMALL).plain(), sort_keys=True))


@functools.lru_cache(maxsize=2**12)
def _multiple(plain: str) -> float:
    experiment = Experiment.from_plain(json.loads(plain))
    with _engine(experiment) as engine, torch.no_grad():
        method, data, state = engine.method, engine.data, engine.method.init()
        everyone = torch.arange(data.K)
        for r in range(3):
            ctx = _Counted(engine, state, everyone, r)
            start = method.begin(state, everyone, method.download(state, everyone))
            end = method.local(ctx, start)
            kept = {n: v for n, v in end.items() if n in state.clients}
            up = {n: v for n, v in end.items() if n not in kept}
            state = method.upload(state, everyone, start, up, data.n.to(data.dtype))
            state.clients |= kept
            state.round = r + 1
    return ctx.calls / (data.K * epoch(experiment))


def serves_network(experiment: Experiment) -> bool:
    """Whether its method serves parameters of the network, which fine-tuning can train."""
    e = dataclasses.replace(experiment, **_SMALL)
    with _engine(e) as engine, torch.no_grad():
        method, everyone = engine.method, torch.arange(engine.data.K)
        state = method.init()
        served = method.serve(method.begin(state, everyone, method.download(state, everyone)))
        return not served.keys().isdisjoint(method.task.parameters)


@contextlib.contextmanager
def _engine(experiment: Experiment) -> Iterator[Engine]:
    data = client_data(experiment)
    engine = Engine(build_method(experiment, data), data, "threads", 1)
    try:
        yield engine
    finally:
        engine.close()


def epoch(experiment: Experiment, fed: Federation | None = None) -> float:
    """Batches of an epoch, mean over clients; `fed` holds data of the user's own."""
    whole = dict(epochs=1, steps=0, participation=1.0, rounds=1)
    once = experiment.but(**whole, eval_after=False, init_from=None, adopt=False)
    once = once.but(finetune=None, client_dropout=0.0, stragglers=0.0)
    return plan.client_steps(once, fed) / (fed.K if fed else experiment.clients)


def gradients(experiment: Experiment, fed: Federation | None = None) -> float:
    """Gradients over one batch that a client takes in a round of its own, mean over clients.

    `fed` holds the data where they are the user's own.
    """
    return multiple(experiment) * epoch(experiment, fed)


def run_hours(experiment: Experiment, device: str, fed: Federation | None = None) -> float:
    """Hours of a run on this computer's cores, or on its GPU.

    From the seconds of one step, measured here; a forward pass counts a third of a step. `fed`
    holds the data where they are the user's own.
    """
    e = fitted(experiment, fed)
    second, _ = plan.measured(*plan.net(e, fed), device)
    config, held = train_config(e), fed.index if fed else vars(split(e))
    seen = sum(evaluate_at(config, r) for r in range(e.rounds + 1))
    scored = evaluated(config, e.clients).tolist()
    parts = [len(held[n][i]) for n in ("val", "test") for i in scored]
    batches = sum(min(n, e.max_samples or n) for n in parts) / e.batch
    forward = batches / 3 * seen * (1 + evaluates_after(config, e.clients))
    cores = (os.cpu_count() or 1) if device == "cpu" else 1
    tuning = plan.tuning_epochs(e) * epoch(e, fed)
    trained = visits(config, e.clients) * gradients(e, fed) + tuning
    return (trained + forward) * second / 3600 / cores


class Pace(NamedTuple):
    """Seconds of a run beside its rounds, and of each round: of a processor, or on a GPU."""

    start: float
    round: float

    def hours(self, rounds: float, device: str) -> float:
        """Hours of a run on this computer's cores, or on its GPU."""
        cores = (os.cpu_count() or 1) if device == "cpu" else 1
        return (self.start + self.round * rounds) / 3600 / cores


def pace(experiment: Experiment, device: str, executor: str = "auto") -> Pace:
    """How fast a run is here, from two short ones that nobody keeps."""
    few, clock = min(experiment.eval_every, 5), "cpu_s" if device == "cpu" else "wall_s"
    took = []
    for rounds in (few, 2 * few):
        with tempfile.TemporaryDirectory() as store:
            short = experiment.but(rounds=rounds, eval_every=few, tags={})
            found = run(short, store=store, device=device, executor=executor)
            took.append(float(found.meta[clock]))
    each = max(took[1] - took[0], 0.0) / few
    return Pace(max(took[0] - few * each, 0.0), each)
