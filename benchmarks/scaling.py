"""Seconds of a round and memory as one thing grows: `python -m benchmarks.scaling [SERIES ...]`.

Every cell runs in a process of its own, so that its peak of memory is its own. Cost should be
linear in client-steps: the last column, microseconds a client-step, should stay level. `--most N`
leaves out larger cells (a trial run: `--most 0` takes each series' first). The series `many` is
that of many.py, with files of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics

import matplotlib
import pandas as pd
import torch

from benchmarks import many
from benchmarks.cases import served
from benchmarks.common import RESULTS, about, said, save, timed
from benchmarks.rounds import Ours
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.run import pick_device

# 60 images a client, so that only the number of clients grows; FedAGHN and pFedLA weigh all pairs
# of clients on the server.
BASE = dict(
    partition="dirichlet",
    partition_args={"alpha": 0.5},
    clients=20,
    model="cnn",
    batch=10,
    lr=0.005,
    rounds=1,
    max_samples=60,
)
METHODS = ("fedavg", "fedaghn", "pfedla", "flayer", "fedamp")
CLIENTS, SHARES = (5, 20, 50, 100, 200, 500), (0.05, 0.1, 0.2, 0.5, 1.0)
MODELS = (
    ("lenet", {}),
    ("cnn", {}),
    ("mobilenet", {"width": 0.25}),
    ("resnet18", {"width": 0.25}),
    ("resnet18", {}),
)
SERIES: dict[str, dict[str, list[dict]]] = {
    "clients": {m: [dict(method=m, clients=k) for k in CLIENTS] for m in METHODS},
    "batch": {"fedavg": [dict(batch=b) for b in (1, 5, 10, 20, 60)]},
    "model": {"fedavg": [dict(model=m, model_args=a) for m, a in MODELS]},
    "participation": {"fedavg": [dict(clients=100, participation=p) for p in SHARES]},
}


def measure(plain: dict, device: str, repeats: int) -> dict:
    """Median seconds of a round's training and evaluation, client-steps, and memory.

    Memory is the peak of this process, in MB.
    """
    torch.set_num_threads(1)
    served(plain["dataset"].removeprefix("noise_"))
    e = Experiment.from_plain(plain)
    ours = Ours(e, device)
    with torch.no_grad():
        ours.train()
        train = [timed(ours.train, device) for _ in range(repeats)]
        evaluate = [timed(lambda: ours.evaluate("test"), device) for _ in range(repeats)]
    steps = [
        len(ours.data.batch_indices(k, 0, batch=e.batch, epochs=e.epochs, steps=e.steps))
        for k in range(e.clients)
    ]
    ours.engine.close()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # kilobytes on Linux
    row = dict(
        train_s=statistics.median(train),
        eval_s=statistics.median(evaluate),
        spread_s=max(train) - min(train),
        memory_mb=memory,
    )
    row |= dict(
        client_steps=sum(steps) * e.participation, executor="+".join(sorted(ours.engine.ran))
    )
    if device == "cuda":
        row["gpu_memory_mb"] = torch.cuda.max_memory_allocated() / 1e6
    return row | dict(us_per_client_step=1e6 * row["train_s"] / row["client_steps"])


def plot(frame: pd.DataFrame, path: str) -> None:
    """One panel a series: seconds of training against what grows.

    Megabytes are dashed, on the right.
    """
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(frame.series))
    fig, axes = plt.subplots(
        1, len(names), figsize=(4 * len(names), 3), squeeze=False, layout="constrained"
    )
    for ax, name in zip(axes[0], names, strict=True):
        right, part = ax.twinx(), frame[frame.series == name]
        for i, (method, line) in enumerate(part.groupby("method", sort=False)):
            ax.plot(line.value, line.train_s, "o-", color=f"C{i}", label=method)
            right.plot(line.value, line.memory_mb, "--", color=f"C{i}", lw=0.8)
        if name != "model":
            ax.set(xscale="log", yscale="log")
        ax.tick_params(axis="x", rotation=30 if name == "model" else 0)
        ax.set(xlabel=name, ylabel="training of a round (s)")
        right.set(ylabel="memory (MB, dashed)", ylim=(0, None))
        ax.legend(fontsize=7)
    fig.savefig(path, dpi=120)


def grow(device: str, repeats: int, most: int) -> None:
    """Measure the series `many`; write results/many-<device>.json and .png."""
    where = about(device)
    for key, row in many.measured(device, repeats, most):
        print(*said(row), sep="  ", flush=True)
        path = save(f"many-{device}", {key: row}, device, where)
    rows = pd.DataFrame(json.loads(path.read_text())["cases"].values()).drop(columns="about")
    many.plot(rows, path.with_suffix(".png"))


def main() -> None:
    """Measure the series asked for; write results/scaling-<device>.json, .csv and .png."""
    names = (*SERIES, "many")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument(
        "series", nargs="*", choices=[[], *names], metavar=f"SERIES of {', '.join(names)}"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--most", type=int, default=99, help="cells of a line after the first")
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    args = parser.parse_args()
    device, where = pick_device(args.device), None
    base = Experiment(**BASE | {"dataset": served(args.dataset)})
    fresh = multiprocessing.get_context("spawn")
    chosen = args.series or names
    if "many" in chosen:
        grow(device, args.repeats, args.most)
    for name in SERIES.keys() & chosen:
        for method, cells in SERIES[name].items():
            for changes in cells[: args.most + 1]:
                e, value = base.but(**changes), changes[name]
                if name == "model":
                    value = " ".join([e.model, *(f"x{w}" for w in e.model_args.values())])
                with fresh.Pool(1) as pool:
                    row = pool.apply(measure, (e.plain(), device, args.repeats))
                row = dict(series=name, method=method, value=value, dataset=e.dataset) | row
                print(*said(row), sep="  ", flush=True)
                where = where or about(device)
                path = save(f"scaling-{device}", {f"{name}/{method}/{value}": row}, device, where)
    if not SERIES.keys() & chosen:
        return
    rows = pd.DataFrame(json.loads(path.read_text())["cases"].values()).drop(columns="about")
    rows.to_csv(RESULTS / f"scaling-{device}.csv", index=False)
    plot(rows, RESULTS / f"scaling-{device}.png")


if __name__ == "__main__":
    main()
