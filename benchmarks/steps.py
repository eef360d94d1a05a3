"""One step of a stack of clients, whole and by parts: `python -m benchmarks.steps`.

As a program it prints how many client-steps it makes a second; several can share a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from benchmarks.cases import served
from benchmarks.common import timed
from benchmarks.pretend import DEVICE
from benchmarks.rounds import Ours
from benchmarks.tape import Counter, taped
from benchmarks.waits import SMALL, accelerated
from pfl_core.engine import graphs
from pfl_core.engine.convolutions import FORMS
from pfl_core.engine.sgd import Job, precision
from pfl_core.engine.stack import WARM, Stack, over_clients
from pfl_core.experiments.experiment import Experiment
from pfl_core.methods.base import Batch

TINY = SMALL.but(clients=2, max_samples=24, model_args={"kernels": 1, "bn": True}, rounds=1)


@contextmanager
def reached(device: str) -> Iterator[Any]:
    """The device to compute on: "cpu", "cuda", or "pretend" (pretend.py), with tapes for graphs."""
    if device != "pretend":
        yield device
        return
    with accelerated(), taped(DEVICE.type):
        yield DEVICE


def network(model: str, smallest: bool = False, **changes: Any) -> Experiment:
    """FedAvg of 20 clients with images of CIFAR-10's size; smallest: of two with digits."""
    if smallest:
        return TINY.but(**{"dtype": "float32"} | changes)
    base = dict(partition="dirichlet", partition_args={"alpha": 0.5}, clients=20, batch=10)
    base |= dict(lr=0.005, rounds=1, max_samples=60, model=model)
    return Experiment(**base | changes, dataset=served("cifar10"))


class Step:
    """A stack of FedAvg's first clients at their first batch; `parts` are what a step is made of.

    form: how convolutions are multiplied.
    """

    def __init__(self, experiment: Experiment, device: Any, form: str, rows: int):
        self.device, self.kind = device, torch.device(device).type
        self.experiment, self.rows = experiment, rows
        ours = Ours(experiment, device, "batched")
        self.task, job = ours.method.task, _job(ours)
        ours.engine.close()
        self.stack = Stack(ours.method, ours.data, job, rows, None, form)
        with torch.no_grad():
            self.stack._begin(job, torch.arange(rows).to(device))
            self.stack.idx[:] = torch.stack([job.indices[i][0] for i in range(rows)])
        self.parts = self._parts()
        self.graphs: dict[str, Callable[[], None]] = {}
        self.capturing: graphs.Graphs | None = None

    def _parts(self) -> dict[str, Callable[[], Any]]:
        s = self.stack
        here = s.fixed | s.live
        stats = {n: here[n] for n in s.stats}
        rest = {n: v for n, v in here.items() if n not in s.stats}
        with self.running():
            x, y = (v[:, 0].clone() for v in s.data.batch(s.idx))
            grads, _ = s._gradients(here, s.anchor, x, y, None)
        params = [here[n] for n in s.names]

        def value(p: Any, stats: Any, near: Any, x: Any, y: Any) -> Any:
            return s._value(p, stats, near, Batch(x, y, None))[0]

        return {
            "gather": lambda: s.data.batch(s.idx),
            "forward": lambda: over_clients(value, (rest, stats, s.anchor, x, y)),
            "gradient": lambda: s._gradients(here, s.anchor, x, y, None),
            "update": lambda: s.update(params, [grads[n] for n in s.names], s.moments),
            "whole step": lambda: s._body(self.rows, None),
        }

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it, parts run as the engine runs them."""
        with ExitStack() as on:
            for context in (torch.no_grad(), precision(self.experiment.precision)):
                on.enter_context(context)
            on.enter_context(self.task.mode(True))
            on.enter_context(graphs.side_stream(self.kind))
            yield

    def microseconds(self, name: str, count: int, captured: bool = False) -> float:
        """What a part takes, the mean of `count` in a row; captured: of its replays."""
        with self.running():
            fn = self.parts[name]
            for _ in range(WARM):
                fn()
            if captured:
                fn = self.captured(name)
                fn()
            return 1e6 * timed(lambda: [fn() for _ in range(count)], self.device) / count

    def captured(self, name: str) -> Callable[[], None]:
        """What replays a part, which is captured the first time."""
        if name not in self.graphs:
            self.capturing = self.capturing or graphs.opened(self.kind)
            part = self.parts[name]
            self.graphs[name] = graphs.captured(
                self.capturing, lambda: [part(), None][1], self.kind
            )
        return self.graphs[name]

    def launches(self, name: str = "whole step") -> int:
        """Operations that a part launches: on a GPU about as many kernels."""
        with self.running():
            self.parts[name]()
            with Counter() as counter:
                self.parts[name]()
        return counter.ops


def _job(ours: Ours) -> Job:
    # The local training that a round asks for; nothing is trained.
    jobs: list[Job] = []

    def noted(job: Job, *how: Any) -> dict[str, torch.Tensor]:
        jobs.append(job)
        return {}

    with mock.patch.object(ours.engine.batched, "run", noted), torch.no_grad():
        ours.train()
    return jobs[0]


def main() -> None:
    """Print client-steps a second of a stack of 20 clients, captured where the device can."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "pretend"))
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--form", default=FORMS[0], choices=FORMS)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--smallest", action="store_true", help="a trial run")
    args = parser.parse_args()
    with reached(args.device) as device:
        rows, count = (2, 1) if args.smallest else (20, 50)
        step = Step(network(args.model, args.smallest), device, args.form, rows)
        captured, made, began = step.kind in graphs.GRAPHS, 0, time.perf_counter()
        while not made or time.perf_counter() - began < args.seconds:
            took = step.microseconds("whole step", count, captured)
            made += 1
    print(f"client-steps a second: {1e6 * rows / took:.1f}")


if __name__ == "__main__":
    main()
