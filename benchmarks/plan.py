"""What the five papers cost at profile paper: `python -m benchmarks.plan [PAPER ...] [--gflops N]`.

Client-steps, bytes and FLOP are counted from the papers' runs (`compare.plan.planned`), no
data needed: partitions are drawn over labels of the data sets' sizes. Hours are FLOP over the rate
that `benchmarks.rounds` measured (results/rounds-<device>.json, the case of the nearest model), or
over --gflops. The floor is the same arithmetic at the rate of large matrix products, and the
weights that steps move at the memory's rate, which the same command measures. Runs are independent:
on G such devices it is the longest run, or the sum over G, whichever is more.
"""

from __future__ import annotations

import argparse
import functools
import json
from typing import Any

import numpy as np
import pandas as pd
import torch

from benchmarks.common import RESULTS, about, said, save
from benchmarks.rounds import PASSES, training_flop
from pfl_core import models
from pfl_core.data import partition as partitions
from pfl_core.data.pools import Pool
from pfl_core.engine.participation import evaluates_after, participants
from pfl_core.experiments.build import train_config
from pfl_core.experiments.experiment import Experiment
from pfl_papers.compare.costs import per_step
from pfl_papers.compare.plan import planned
from pfl_papers.papers import base as papers

# images or texts, classes, shape of one as a model sees it
SIZES = {
    "mnist": (70_000, 10, (1, 28, 28)),
    "fashion_mnist": (70_000, 10, (1, 28, 28)),
    "emnist-digits": (280_000, 10, (1, 28, 28)),
    "cifar10": (60_000, 10, (3, 32, 32)),
    "cifar100": (60_000, 100, (3, 32, 32)),
    "tiny_imagenet": (110_000, 200, (3, 64, 64)),
    "omniglot": (32_460, 1623, (1, 28, 28)),
    "ag_news": (127_600, 4, (200,)),
    "flickr_aes": (40_988, 5, (3, 64, 64)),
}
NEAREST = {
    "cnn": "flayer",
    "cnn_bn": "fedaghn",
    "lenet": "pfedhn",
    "mlp": "pfedhn",
    "lenet4": "pfedhn",
    "fasttext": "pfedhn",
}
DEVICES = (1, 8, 64)


@functools.cache
def _pool(name: str) -> Pool:
    n, classes, _ = SIZES[name]
    y = np.arange(n) % classes
    return Pool(
        name, np.zeros((n, 1, 1), np.uint8), y, np.arange(n) % 6 == 0, classes, {}, None, None
    )


@functools.cache
def _counts(
    dataset: str, partition: str, args: str, clients: int, cap: int
) -> tuple[np.ndarray, np.ndarray]:
    given = json.loads(args)
    of = given.get("of", clients)
    scheme = {k: v for k, v in given.items() if k not in ("of", "first", "every")}
    try:
        s = partitions.partition(partition, _pool(dataset), of, 0, **scheme)
        train = [len(i) for i in s.train][:clients]
        rest = [len(v) + len(t) for v, t in zip(s.val, s.test, strict=True)][:clients]
    except (KeyError, ValueError):  # needs more of the data than labels: equal shares
        share = SIZES[dataset][0] / of
        train, rest = [round(0.75 * share)] * clients, [round(0.25 * share)] * clients
    train, rest = np.array(train), np.array(rest)
    return (np.minimum(train, cap), np.minimum(rest, 2 * cap)) if cap else (train, rest)


@functools.cache
def _model(name: str, args: str, dataset: str) -> tuple[float, int]:
    _, classes, shape = SIZES[dataset]
    more = {"vocab": 95_812} if dataset == "ag_news" else {}
    net = models.build(name, shape, classes, **more | json.loads(args))
    net.to("meta")  # shapes alone are counted
    dtype = torch.int64 if dataset == "ag_news" else torch.float32
    x = torch.zeros(2, *shape, dtype=dtype, device="meta")
    return training_flop(net, x) / 2, sum(p.numel() for p in net.parameters())


def cost(experiment: Experiment) -> dict[str, Any]:
    """What one run costs.

    Client-steps, bytes over the network, FLOP (training and evaluation), and bytes of the weights
    that its steps move through memory.
    """
    e = experiment
    args = json.dumps(e.partition_args, sort_keys=True)
    train, rest = _counts(e.dataset, e.partition, args, e.clients, e.max_samples)
    flop, size = _model(e.model, json.dumps(e.model_args, sort_keys=True), e.dataset)
    if e.steps:
        batches = np.full(len(train), e.steps)
    else:
        batches = e.epochs * np.maximum(1, np.ceil(train / e.batch))
    visits = participants(e.participation, e.clients) * e.rounds
    steps = visits * batches.mean()
    evaluations = e.rounds // e.eval_every + 2
    full, after = e.participation == 1, evaluates_after(train_config(e), e.clients)
    # Training that is for "after" alone.
    also = after * (1 if full else evaluations) * batches.sum()
    forward = evaluations * (1 + after) * rest.sum() / 3
    steps += also
    gradients = per_step(e) * steps
    work = flop * (gradients * e.batch + forward)
    moved = gradients * PASSES * 4 * size
    sent = visits * 2 * 4 * size
    return dict(client_steps=steps, bytes=sent, flop=work, moved_bytes=moved, model=e.model)


def rates(device: str, gflops: float) -> tuple[dict[str, float], str]:
    """{case of `benchmarks.rounds`: FLOP/s that training reached}, and where; else `gflops`."""
    if gflops:
        every = {*NEAREST.values(), "resnet"}
        return dict.fromkeys(every, gflops * 1e9), f"{gflops:g} GFLOP/s, assumed"
    path = RESULTS / f"rounds-{device}.json"
    if not path.exists():
        command = f"python -m benchmarks.rounds --device {device}"
        return {}, f"not measured (run `{command}`, or give --gflops)"
    cases = json.loads(path.read_text())["cases"]
    first = next(iter(cases.values()))
    return {k: 1e9 * c["training_gflops"] for k, c in cases.items()}, first["about"]["device"]


def floor(device: str) -> tuple[float, float] | None:
    """FLOP/s of matrix products and bytes/s of the memory there; None where not measured."""
    path = RESULTS / f"rounds-{device}.json"
    cases = json.loads(path.read_text())["cases"].values() if path.exists() else ()
    found = [c["about"] for c in cases if "memory_gb_s" in c["about"]]
    return (found[-1]["matrix_gflops"] * 1e9, found[-1]["memory_gb_s"] * 1e9) if found else None


def main() -> None:
    """Print a line a paper and write results/plan.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument(
        "paper",
        nargs="*",
        choices=[[], *papers.PAPERS],
        metavar=f"PAPER of {', '.join(papers.PAPERS)}",
    )
    parser.add_argument(
        "--device", default="cuda", choices=("cpu", "cuda"), help="whose measured rates count"
    )
    parser.add_argument(
        "--gflops", type=float, default=0.0, help="an assumed rate in place of measured ones"
    )
    args = parser.parse_args()
    known, where = rates(args.device, args.gflops)
    print(f"rate: {where}")
    for paper in args.paper or papers.PAPERS:
        each = {json.dumps(e.plain()): e for e in planned(paper, profile="paper")}
        frame = pd.DataFrame([cost(e) for e in each.values()])
        case = frame.model.map(lambda m: NEAREST.get(m, "resnet"))
        total = frame[["client_steps", "bytes", "flop", "moved_bytes"]].sum()
        row = dict(
            runs=len(frame),
            client_steps=total.client_steps,
            terabytes=total.bytes / 1e12,
            petaflop=total.flop / 1e15,
        )
        if set(case) <= known.keys():
            hours = frame.flop / case.map(known) / 3600
            row |= {f"hours_{g}_devices": max(hours.max(), hours.sum() / g) for g in DEVICES}
        if fastest := floor(args.device):
            row["floor_hours"] = (total.flop / fastest[0] + total.moved_bytes / fastest[1]) / 3600
        row |= dict(seeds=len(papers.Scope("paper").seeds_of(papers.paper(paper), "")), rate=where)
        save("plan", {paper: row}, args.device, about("cpu"))
        print(
            f"{paper:8}", *said({k: v for k, v in row.items() if k != "rate"}), sep="  ", flush=True
        )


if __name__ == "__main__":
    main()
