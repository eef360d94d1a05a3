"""What a GPU would wait for in a round of each method, counted on a pretend accelerator.

python -m benchmarks.waits [METHOD ...] writes results/waits.json: of one round without evaluation
its waits (answers that the host needs, and values that it fetches), uploads, how many numbers these
have, and the waits and uploads while local steps run; and the waits of one evaluation.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from benchmarks.common import about, said, save
from benchmarks.pretend import DEVICE, Accelerator
from pfl_core.engine import batched, engine
from pfl_core.engine.simulate import Outcome, simulate
from pfl_core.experiments.build import build_method, client_data
from pfl_core.experiments.experiment import Experiment
from pfl_core.methods.base import METHODS

SMALL = Experiment(
    dataset="digits",
    clients=4,
    partition="dirichlet",
    partition_args={"alpha": 1.0},
    max_samples=30,
    model="lenet",
    model_args={"kernels": 2, "bn": True},
    rounds=4,
    batch=6,
    lr=0.05,
    holdout=0.25,
    dtype="float64",
    eval_every=3,
    eval_after=False,
)


@contextmanager
def accelerated() -> Iterator[tuple[Accelerator, Counter]]:
    """An accelerator that the engine takes for one, and what is counted while local steps run."""
    accelerator, steps, step = Accelerator(), Counter(), batched.Stack._step

    def counting(self: Any, *how: Any) -> None:
        before = Counter(accelerator.seen)
        step(self, *how)
        steps.update(accelerator.seen - before)

    kind = DEVICE.type
    with (
        mock.patch.dict(engine.AUTO, {kind: "batched"}),
        mock.patch.dict(engine.EVAL_BATCH, {kind: engine.EVAL_BATCH["cuda"]}),
        mock.patch.object(batched.Stack, "_step", counting),
        accelerator,
    ):
        yield accelerator, steps


def trained(experiment: Experiment, device: Any = DEVICE, **how: Any) -> Outcome:
    """The rounds of an Experiment on a device, past the store."""
    data = client_data(experiment, device)
    return simulate(build_method(experiment, data), data, workers=1, **how)


def counted(experiment: Experiment) -> tuple[dict[str, int], Outcome]:
    """What a round and an evaluation wait for (see the head of this file), and how the run ended.

    The experiment has four rounds and is evaluated after the third.
    """
    with accelerated() as (accelerator, steps):
        seen: list[Counter] = []

        def note(*_: Any) -> None:
            seen.append(Counter(accelerator.seen))

        ended = trained(experiment, on_round=note)
    # From one round's local training to the next one's: without an evaluation, and with one.
    now, each = seen[2] - seen[1], seen[3] - seen[2]
    found = {name: waits(c) for name, c in (("waits", now), ("while steps run", steps))}
    found |= {"uploads": now["uploads"], "numbers uploaded": now["numbers"]}
    found["while steps run"] += steps["uploads"]
    return found | {"waits of an evaluation": waits(each) - waits(now)}, ended


def waits(seen: Counter) -> int:
    """Answers and values that the host waited for."""
    return seen["asks"] + seen["downloads"]


def main() -> None:
    """Count, print and keep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waits", description=__doc__)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="by default all")
    cases = {}
    for name in parser.parse_args().methods or sorted(METHODS):
        cases[name], _ = counted(SMALL.but(method=name))
        print(name, *said(cases[name]), sep="  ", flush=True)
    print(save("waits", cases, "cpu", about("cpu")))


if __name__ == "__main__":
    main()
