"""Effect of `Experiment(precision=...)` on accuracy and speed: `python -m benchmarks.precision`.

The same experiment at every precision that the device has ("tf32" is a GPU's), from the same
initial model over the same batches, in turn.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from benchmarks.cases import CASES
from benchmarks.common import about, save, timed
from benchmarks.rounds import Ours
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.run import pick_device

KINDS = {"cpu": ("full", "bf16"), "cuda": ("full", "tf32", "bf16")}
# Models and methods of the papers; few images, so that all rounds take minutes on two cores.
MEASURED = ("quickstart", "flayer", "fedaghn")


def one(experiment: Experiment, device: str) -> dict[str, Any]:
    """Median seconds of a round's training after the first, and test accuracy (%) at the end.

    The accuracy is of the personalized models.
    """
    run = Ours(experiment, device)
    with torch.no_grad():
        seconds = [timed(run.train, device) for _ in range(experiment.rounds)]
        reached = run.evaluate("test")
    run.engine.close()
    return {"train_s": statistics.median(seconds[1:]), "acc_pct": reached}


def main() -> None:
    """Measure each case at each precision; write benchmarks/results/precision-<device>.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=60, help="images a client at most")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    args = parser.parse_args()
    device = pick_device(args.device)
    torch.set_num_threads(1)
    for key in MEASURED:
        e = CASES[key].experiment().but(rounds=args.rounds, max_samples=args.samples)
        rows = [
            {"precision": kind, "seed": seed} | one(e.but(precision=kind, seed=seed), device)
            for seed in range(args.seeds)
            for kind in KINDS[device]
        ]
        for row in rows:
            print(key, row, flush=True)
        save(
            f"precision-{device}",
            {key: {"experiment": e.plain(), "rows": rows}},
            device,
            about(device),
        )


if __name__ == "__main__":
    main()
