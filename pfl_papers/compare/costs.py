"""What a run costs: local steps and gradients, counted, and hours, from what is measured here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from pfl_core import models
from pfl_core.data import pools
from pfl_core.data.federation import Federation
from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.engine.participation import evaluate_at, evaluated, evaluates_after, visits
from pfl_core.experiments.build import (
    build_method,
    client_data,
    fitted,
    split,
    train_config,
    vocabulary,
)
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.run import run
from pfl_core.methods.base import Batch
from pfl_core.stacked import Params

# -- steps and gradients ---------------------------------------------------------------------------


def client_steps(experiment: Experiment, fed: Federation | None = None) -> int:
    """Local SGD steps of a run, summed over clients, also those of evaluations after training and
    of fine-tuning. `fed` holds the data where they are the user's own.
    """
    e = fitted(experiment, fed)
    tuning = tuning_epochs(e) * epoch(e, fed)
    return round(_visit(e, fed) * visits(train_config(e), e.clients) + tuning)


def tuning_epochs(experiment: Experiment) -> int:
    """Epochs of fine-tuning of a run, summed over clients."""
    e = experiment
    tuned = e.clients if e.keep_models else e.eval_clients or e.clients
    return sum(stage["epochs"] for stage in e.finetune) * tuned


def epoch(experiment: Experiment, fed: Federation | None = None) -> float:
    """Batches of an epoch, mean over clients; `fed` holds data of the user's own."""
    e, train = fitted(experiment, fed), fed.index["train"] if fed else split(experiment).train
    sizes = [int(min(len(i), e.max_samples or len(i)) * (1 - e.holdout)) for i in train]
    batches = [max(1, n // e.batch if e.plan == "drop" else -(-n // e.batch)) for n in sizes]
    return sum(batches) / e.clients


def _visit(experiment: Experiment, fed: Federation | None) -> float:
    # Local steps of a round that a client takes part in, mean over clients.
    return experiment.steps or experiment.epochs * epoch(experiment, fed)


def gradients(experiment: Experiment, fed: Federation | None = None) -> float:
    """Gradients over one batch that a client takes in a round of its own, mean over clients.

    `fed` holds the data where they are the user's own.
    """
    return per_step(experiment) * _visit(fitted(experiment, fed), fed)


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
_SMALL |= dict(momentum=0.0, participation=1.0, eval_clients=0, seed=0, tags={}, record=())
_SMALL |= dict(init_from=None, adopt=False, new_head=False, finetune=None)
_SMALL |= dict(client_dropout=0.0, stragglers=0.0, model="lenet", weight_decay=0.0, clip=0.0)
_SMALL |= dict(normalize="dataset", head_init="common", buffers="local")
_SMALL |= dict(eval_after=None, keep_models=False)


def _small(experiment: Experiment) -> Experiment:
    # With BatchNorm, which some methods are about; networks of several sizes cannot have it.
    bn = not experiment.method_args.get("widths")
    return dataclasses.replace(experiment, **_SMALL, model_args={"bn": bn, "kernels": 4})


def per_step(experiment: Experiment) -> float:
    """Gradients over one batch that a method takes for each local step: 1 for FedAvg, 2 for Ditto.

    Counted in the third round of two small clients on digits, after what a method does once; passes
    that only serve a model are not in it.
    """
    return _per_step(json.dumps(_small(experiment).plain(), sort_keys=True))


@functools.lru_cache(maxsize=2**12)
def _per_step(plain: str) -> float:
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
    return ctx.calls / (data.K * _visit(experiment, None))


def serves_network(experiment: Experiment) -> bool:
    """Whether its method serves parameters of the network, which fine-tuning can train."""
    with _engine(_small(experiment)) as engine, torch.no_grad():
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


# -- hours -----------------------------------------------------------------------------------------


def run_hours(experiment: Experiment, device: str, fed: Federation | None = None) -> float:
    """Hours of a run on this computer's cores, or (at most so many) on its GPU.

    From the seconds of one step, measured here; a forward pass counts a third of a step. `fed`
    holds the data where they are the user's own.
    """
    e = fitted(experiment, fed)
    second, _ = measured(*net(e, fed), device)
    config, held = train_config(e), fed.index if fed else vars(split(e))
    seen = sum(evaluate_at(config, r) for r in range(e.rounds + 1))
    scored = evaluated(config, e.clients).tolist()
    parts = [len(held[n][i]) for n in ("val", "test") for i in scored]
    batches = sum(min(n, e.max_samples or n) for n in parts) / e.batch
    forward = batches / 3 * seen * (1 + evaluates_after(config, e.clients))
    cores = (os.cpu_count() or 1) if device == "cpu" else 1
    tuning = tuning_epochs(e) * epoch(e, fed)
    trained = visits(config, e.clients) * gradients(e, fed) + tuning
    return (trained + forward) * second / 3600 / cores


def net(experiment: Experiment, fed: Federation | None = None) -> tuple[str, str, int]:
    """An Experiment's model, what it is made for, and its batch, as `measured` takes them.

    `fed` holds the data where they are the user's own.
    """
    e, options = experiment, vocabulary(experiment) | experiment.model_args
    if fed is not None:
        samples = fed.input_shape, fed.classes, fed.kind == "tokens"
    else:
        pool, words = pools.load(e.dataset), e.partition_args.get("words")
        shape = (words,) if words else pool.input_shape
        samples = shape, pool.classes, pool.kind == "text" and not words
    return e.model, json.dumps([*samples, options]), e.batch


@functools.lru_cache
def measured(model: str, rest: str, batch: int, device: str) -> tuple[float, int]:
    """Seconds of one plain SGD step of a model on one core (or on the GPU), and its parameters.

    A large model's seconds are measured with a batch of 16.

    Parameters
    ----------
    model : str
    rest : str
        Shape of a sample, number of classes, whether samples are tokens, and arguments of the
        model, as JSON.
    batch : int
        Samples in a step.
    device : str
        "cpu" or "cuda".
    """
    shape, classes, tokens, options = json.loads(rest)
    net = models.build(model, tuple(shape), classes, **options).to(device)
    kind = torch.int32 if tokens else torch.float32
    # What else the computer does is not counted.
    clock = time.process_time if device == "cpu" else time.perf_counter

    def step(few: int) -> float:
        x, seconds = torch.zeros(few, *shape, device=device, dtype=kind), float("inf")
        for _ in range(3):  # the first pays for what is made once; others may be disturbed
            began = clock()
            net(x).logsumexp(1).mean().backward()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = min(seconds, clock() - began)
        return seconds * batch / few

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = step(min(batch, 16))
        if seconds < 0.5:  # a small batch makes a small model look slow
            seconds = min(seconds, step(batch))
    finally:
        torch.set_num_threads(threads)
    return seconds, sum(p.numel() for p in net.parameters())


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
