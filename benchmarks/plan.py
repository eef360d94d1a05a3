"""What the five papers cost at profile paper: `python -m benchmarks.plan [PAPER ...] [--gflops N]`.

Client-steps, bytes and FLOP are counted from the papers' settings (`pfl_core.papers`), no data needed: partitions are drawn over labels
of the data sets' sizes. Hours are FLOP over the rate that `benchmarks.rounds` measured (results/rounds-<device>.json, the case of the
nearest model), or over --gflops. Runs are independent: on G GPUs it is the longest run, or the sum over G, whichever is more.
"""

from __future__ import annotations

import argparse
import functools
import json
from typing import Any

import numpy as np
import pandas as pd
import torch

from benchmarks.common import RESULTS, about, save
from benchmarks.rounds import training_flop
from pfl_core import experiments, models, papers, presets
from pfl_core import partition as partitions
from pfl_core.data import Pool
from pfl_core.experiments import Experiment
from pfl_core.papers import fedaghn, fedper, flayer, pfedhn, pfedla
from pfl_core.study import Study

# images or texts, classes, shape of one as a model sees it
SIZES = {
    "mnist": (70_000, 10, (1, 28, 28)), "fashion_mnist": (70_000, 10, (1, 28, 28)), "emnist-digits": (280_000, 10, (1, 28, 28)),
    "cifar10": (60_000, 10, (3, 32, 32)), "cifar100": (60_000, 100, (3, 32, 32)), "tiny_imagenet": (110_000, 200, (3, 64, 64)),
    "omniglot": (32_460, 1623, (1, 28, 28)), "ag_news": (127_600, 4, (200,)), "flickr_aes": (40_988, 5, (3, 64, 64)),
}  # fmt: skip
# Gradients of a client's step, FedAvg's as 1: a second model or phase, inner steps, other batches; 1 where it is not here.
GRADIENTS = {
    "ditto": 2,
    "perfedavg": 2,
    "pfedme": 5,
    "fedcp": 1.5,
    "gpfl": 1.5,
    "fedfomo": 1.5,
    "fedrep": 2,
    "fedpac": 2,
    "fedala": 1.2,
}
NEAREST = {
    "cnn": "flayer",
    "cnn_bn": "fedaghn",
    "lenet": "pfedhn",
    "mlp": "pfedhn",
    "lenet4": "pfedhn",
    "fasttext": "pfedhn",
}
GPUS = (1, 8, 64)


class Planned(Study):
    """A paper's notebook at profile paper that notes its runs instead of computing them."""

    def __init__(self, paper: str):
        super().__init__(paper, profile="paper", device="cpu")
        self.cells: list[Experiment] = []

    def sweep(self, base, rows, columns=None, seeds=None) -> pd.DataFrame:
        """Note the grid that would be run."""
        if base is not None and rows:
            self.cells += experiments.grid(base, rows, columns, self.seeds[:seeds])
        return super().sweep(None, {})


CIFAR10, FLICKR = ("fig2", "fig3", "fig4", "fig13"), ("fig7", "fig8", "fig9", "fig10", "fig17", "fig18")
BOTH, DEEP = ("fig2", "fig4", "fig14"), ("fig6", "fig8", "fig10", "fig11", "fig16", "fig18")
KS = {"fig2": (4, 8, 10), "fig3": (4,), "fig4": (4,), "fig13": (10,)} | dict.fromkeys(("fig11", "fig12"), (40, 80, 100))


def _fedper(s: Planned) -> None:
    # As notebooks/fedper.ipynb does.
    nets = fedper.nets("paper")
    for a in s.known:
        data = "flickr_aes" if a in FLICKR else "cifar10" if a in CIFAR10 else "cifar100"
        some = nets if a in BOTH else dict([list(nets.items())[a in DEEP]])
        cells = {f"{n}, k={k}": net | {"partition_args": {"k": k}} for n, net in some.items() for k in KS.get(a, (40,))}
        if data == "flickr_aes":
            cells = some
        rows = s.rows_for(a, data)
        if a in ("fig4", "fig14"):
            rows = {f"K_P = {d}": dict(method="fedper", head_depth=d) for d in (1, 2, 3, 4)}
        elif a in ("fig5", "fig6", "fig9", "fig10"):  # the networks are the rows'
            net = next(iter(some.values()))
            rows = {r: dict(method="fedper") | net | v for r, v in fedper.linear_rows(net).items()}
            cells = {n: {k: v for k, v in c.items() if k not in net} for n, c in cells.items()}
        s.sweep(s.base(a, data), rows, cells)


def planned(paper: str) -> list[Experiment]:
    """The runs of a paper at profile paper, each once."""
    s = Planned(paper)
    if paper == "fedper":
        _fedper(s)
    elif paper == "pfedhn":
        pfedhn.table(s, "table1", pfedhn.columns("paper"))
        pfedhn.table(s, "table3", {f"N={n}": ("mnist", n) for n in (10, 50, 100)})
        pfedhn.table(s, "table4", {f"{d}, N={n}": (d, n) for d in ("cifar10", "cifar100") for n in (10, 50, 100)})
        for d in ("cifar10", "cifar100"):
            pfedhn.sizes(s, d, d, ["fedavg", "perfedavg", "pfedme", "lgfedavg"])
        for a in ("fig3", "fig4", "fig5", "fig6", "appc5"):
            data = "cifar100" if a == "fig4" else "cifar10"
            s.sweep(s.base(a, data), s.rows_for(a, data))
        for alpha in (0.1, 0.25, 0.5, 1.0):
            base = s.base("fig2", "cifar10", partition_args={"novel_alpha": alpha})
            s.sweep(base, s.rows_for("fig2", "cifar10"))
    elif paper == "pfedla":
        for a in s.known:
            pfedla.sweep(s, a)
    elif paper == "flayer":
        for a in s.known:
            flayer.sweep(s, flayer.sweeps(s, a))
        flayer.sweep(s, flayer.rates(s))
    else:
        for a in s.known:
            fedaghn.table(s, a)
    every = {json.dumps(e.plain(), sort_keys=True): e for e in s.cells}
    return list(every.values())


@functools.cache
def _pool(name: str) -> Pool:
    n, classes, _ = SIZES[name]
    y = np.arange(n) % classes
    return Pool(name, np.zeros((n, 1, 1), np.uint8), y, np.arange(n) % 6 == 0, classes, {}, None, None)


@functools.cache
def _counts(dataset: str, partition: str, args: str, clients: int, cap: int) -> tuple[np.ndarray, np.ndarray]:
    given = json.loads(args)
    of = given.get("of", clients)
    scheme = {k: v for k, v in given.items() if k not in ("of", "first", "every")}
    try:
        s = partitions.partition(partition, _pool(dataset), of, 0, **scheme)
        train, rest = (
            [len(i) for i in part][:clients]
            for part in (s.train, [np.concatenate(p) for p in zip(s.val, s.test, strict=True)])
        )
    except (KeyError, ValueError):  # needs more of the data than labels: equal shares
        train, rest = [round(0.75 * SIZES[dataset][0] / of)] * clients, [round(0.25 * SIZES[dataset][0] / of)] * clients
    cut = np.minimum if cap else lambda a, b: a
    return cut(np.array(train), cap or 0), cut(np.array(rest), 2 * cap or 0)


@functools.cache
def _model(name: str, args: str, dataset: str) -> tuple[float, int]:
    _, classes, shape = SIZES[dataset]
    more = {"vocab": 95_812} if dataset == "ag_news" else {}
    net = models.build(name, shape, classes, **more | json.loads(args)).to("meta")  # shapes alone are counted
    x = torch.zeros(2, *shape, dtype=torch.int64 if dataset == "ag_news" else torch.float32, device="meta")
    return training_flop(net, x) / 2, sum(p.numel() for p in net.parameters())


def cost(e: Experiment) -> dict[str, Any]:
    """Client-steps, bytes over the network, and FLOP (training and evaluation) of one run."""
    train, rest = _counts(
        e.dataset, e.partition, json.dumps(e.partition_args, sort_keys=True), e.clients, e.max_samples
    )
    flop, size = _model(e.model, json.dumps(e.model_args, sort_keys=True), e.dataset)
    batches = np.full(len(train), e.steps) if e.steps else e.epochs * np.maximum(1, np.ceil(train / e.batch))
    visits = max(1, round(e.participation * e.clients)) * e.rounds
    steps = visits * batches.mean()
    evaluations = e.rounds // e.eval_every + 2
    full = e.participation == 1
    also = e.eval_after * (1 if full else evaluations) * batches.sum()  # training that is for "after" alone
    forward = evaluations * (1 + e.eval_after) * rest.sum() / 3
    work = flop * (GRADIENTS.get(e.method, 1) * e.batch * (steps + also) + forward)
    return dict(client_steps=steps + also, bytes=visits * 2 * 4 * size, flop=work, model=e.model)


def rates(device: str, gflops: float) -> tuple[dict[str, float], str]:
    """FLOP/s that training reached by case of `benchmarks.rounds`, and where; with `gflops` that number for all."""
    if gflops:
        return dict.fromkeys(set(NEAREST.values()) | {"resnet"}, gflops * 1e9), f"{gflops:g} GFLOP/s, assumed"
    path = RESULTS / f"rounds-{device}.json"
    if not path.exists():
        return {}, f"not measured (run `python -m benchmarks.rounds --device {device}`, or give --gflops)"
    cases = json.loads(path.read_text())["cases"]
    return {k: 1e9 * c["training_gflops"] for k, c in cases.items()}, next(iter(cases.values()))["about"]["device"]


def main() -> None:
    """Print a line a paper and write results/plan.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument(
        "paper", nargs="*", choices=[[], *papers.PAPERS], metavar=f"PAPER of {', '.join(papers.PAPERS)}"
    )
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"), help="whose measured rates count")
    parser.add_argument("--gflops", type=float, default=0.0, help="an assumed rate in place of measured ones")
    args = parser.parse_args()
    known, where = rates(args.device, args.gflops)
    print(f"rate: {where}")
    for paper in args.paper or papers.PAPERS:
        frame = pd.DataFrame([cost(e) for e in planned(paper)])
        case = frame.model.map(lambda m: NEAREST.get(m, "resnet"))
        total = frame[["client_steps", "bytes", "flop"]].sum()
        row = dict(
            runs=len(frame), client_steps=total.client_steps, terabytes=total.bytes / 1e12, petaflop=total.flop / 1e15
        )
        if set(case) <= known.keys():
            hours = frame.flop / case.map(known) / 3600
            row |= {f"hours_{g}_gpus": max(hours.max(), hours.sum() / g) for g in GPUS}
        row |= dict(seeds=len(presets.seeds("paper", False)), rate=where)
        save("plan", {paper: row}, args.device, about("cpu"))
        said = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k != "rate"]
        print(f"{paper:8}", *said, sep="  ", flush=True)


if __name__ == "__main__":
    main()
