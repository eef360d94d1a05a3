"""Very many small clients: the series `many` of `python -m benchmarks.scaling`.

10 to 20,000 clients of 20 images, of whom a hundredth takes part in a round, and a network of
12,730 parameters: seconds of a round without evaluation, with the default one (every round, all
clients) and with one of 200 clients; memory, and a checkpoint's size, writing and reading. The
images are noise, which takes as long as any.
"""

from __future__ import annotations

import functools
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from pfl_core.analysis import plots
from pfl_core.analysis.plots.style import line_style
from pfl_core.data import pools as data
from pfl_core.data.client_data import ClientData
from pfl_core.data.pools import Pool
from pfl_core.engine.checkpoint import restore, save
from pfl_core.engine.simulate import Outcome, simulate
from pfl_core.experiments.build import build_method, client_data
from pfl_core.experiments.experiment import Experiment

CLIENTS, EACH, SOME = (10, 100, 1000, 5000, 20_000), 20, 200
# pFedHN's embeddings have a quarter as many numbers as there are clients, by the paper's rule: 100
# are kept here, so that the clients alone grow.
METHODS = {"fedavg": {}, "fedper": {}, "ditto": {}, "pfedhn": {"dim": 100}}
TARGETS = dict(round_s=0.3, ratio=5.0, memory_mb=4000)  # at 20,000 clients


def _images(clients: int) -> Pool:
    n, draw = clients * EACH, np.random.default_rng(0)
    x = draw.integers(0, 256, (n, 28, 28), dtype=np.uint8)
    return Pool(f"noise_{clients}", x, np.arange(n) % 10, np.arange(n) % 5 == 0, 10, {}, (0.5,))


def _random(clients: int) -> str:
    """The name of the data set of so many clients, made known on first use."""
    name = f"noise_{clients}"
    if name not in data.list_datasets():
        fn = functools.partial(_images, clients)
        data.register_dataset(name, fn, f"{EACH} random images a client")
    return name


def experiments(most: int) -> Iterator[Experiment]:
    """Each method with the first `most` + 1 numbers of clients."""
    for method, hyper in METHODS.items():
        for k in CLIENTS[: most + 1]:
            yield Experiment(
                dataset=_random(k),
                clients=k,
                partition="iid",
                partition_args={"split": "80/20"},
                model="mlp",
                model_args={"hidden": 16},
                method=method,
                method_args=hyper,
                participation=0.01,
                batch=10,
            )


def measure(plain: dict[str, Any], device: str, repeats: int) -> dict[str, Any]:
    """Median seconds of rounds, peaks of memory of this process (MB), and a checkpoint's cost."""
    _random(int(plain["dataset"].removeprefix("noise_")))
    e = Experiment.from_plain(plain).but(rounds=repeats + 2)
    began = time.perf_counter()
    clients = client_data(e, device)
    row = {"data_s": time.perf_counter() - began}
    for name, changes in (
        ("round", dict(eval_every=e.rounds)),
        ("some", dict(eval_clients=min(SOME, e.clients))),
        ("evaluated", {}),
    ):
        seconds, outcome = _rounds(e.but(**changes), clients)
        row |= {f"{name}_s": seconds, f"{name}_mb": _peak()}
    row["ratio"] = row["evaluated_s"] / row["round_s"]
    return row | _checkpoint(outcome, clients)


def _rounds(e: Experiment, clients: ClientData) -> tuple[float, Outcome]:
    # Median seconds between the ends of rounds; the first and the last one are left out.
    ends: list[float] = []
    method = build_method(e, clients)
    out = simulate(method, clients, on_round=lambda r, history: ends.append(time.perf_counter()))
    return statistics.median(np.diff(ends)[:-1]), out


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # kilobytes on Linux


def _checkpoint(outcome: Outcome, clients: ClientData) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path, began = Path(folder, "checkpoint.pt"), time.perf_counter()
        save(path, outcome.state, outcome.history, [0.0] * 3, 0.0, {})
        written, size = time.perf_counter(), path.stat().st_size / 1e6
        restore(path, clients.device)
        read = time.perf_counter()
    return {"save_s": written - began, "resume_s": read - written, "checkpoint_mb": size}


def measured(device: str, repeats: int, most: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """One case after the other, each in a process of its own: its key, and its row."""
    fresh = multiprocessing.get_context("spawn")
    for e in experiments(most):
        with fresh.Pool(1) as pool:
            row = pool.apply(measure, (e.plain(), device, repeats))
        yield f"{e.method}/{e.clients}", {"method": e.method, "clients": e.clients} | row


def plot(frame: pd.DataFrame, path: Path) -> None:
    """Seconds of a round, without and with evaluation, and memory, against the clients."""
    seconds, shown = "Seconds a round", frame.assign(evaluated_gb=frame.evaluated_mb / 1000)
    panels = [
        ("No evaluation", "round_s", seconds, TARGETS["round_s"]),
        (f"{SOME} clients evaluated", "some_s", seconds, None),
        ("All clients evaluated", "evaluated_s", seconds, None),
        ("All clients evaluated", "evaluated_gb", "Memory (GB)", TARGETS["memory_mb"] / 1000),
    ]
    with matplotlib.rc_context(plots.STYLE):
        fig, axes = plots.panels(len(panels), len(panels), (2.3, 2.3), sharey=False)
        for ax, (title, column, y, target) in zip(axes, panels, strict=True):
            _lines(ax, shown, column)
            if target:
                ax.axhline(target, color="0.5", lw=0.8, label="target at 20,000")
            ax.set(title=title, xscale="log", yscale="log" if y == seconds else "linear")
            plots.finish(ax, "Clients", y)
        ends = [end for ax in axes[:3] for end in ax.get_ylim()]
        for ax in axes[:3]:
            ax.set_ylim(min(ends), max(ends))
        axes[3].set_ylim(0, None)
        plots.share_legend(fig)
        path.write_bytes(plots.compact(fig))


def _lines(ax: Axes, frame: pd.DataFrame, column: str) -> None:
    looks = plots.looks(list(frame.method.unique()))
    for method, line in frame.sort_values("clients").groupby("method", sort=False):
        look = looks[method]
        style = dict(color=look.colour, linestyle=line_style(look.dash), marker=look.mark, ms=4)
        ax.plot(line.clients, line[column], label=plots.label(method), **style)
