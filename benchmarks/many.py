"""Very many small clients: the series `many` of `python -m benchmarks.scaling`.

10 to 100,000 clients of 20 images, of whom a hundredth, at most 200, takes part in a round, and a
network of 12,730 parameters: seconds of a round without evaluation, with the default one (every
round, all clients) and with one of 200 clients; memory, and a checkpoint's size, writing and
reading. Each run is killed in its second round by SIGKILL, too, and must end bit for bit as one
that was not. The last row has clients of its own, whose images stay in a file. All images are
noise, which takes as long as any.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import resource
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes

from benchmarks.pretend import tensors
from pfl_core.analysis import plots
from pfl_core.analysis.plots.style import line_style
from pfl_core.data import pools as data
from pfl_core.data.client_data import ClientData
from pfl_core.data.federation import Federation
from pfl_core.data.pools import Pool
from pfl_core.engine import simulate as engine
from pfl_core.engine.checkpoint import History, restore, save
from pfl_core.engine.simulate import Outcome, simulate
from pfl_core.experiments.build import build_method, client_data
from pfl_core.experiments.experiment import Experiment

CLIENTS, EACH, SOME = (10, 100, 1000, 5000, 20_000, 100_000), 20, 200
FILE = "fedavg/file"  # the key of the row of clients whose images are in one
FILE_EACH = 60  # images of a client in a file
# Ditto keeps a model a client: 100,000 of them, and a round beside them, take 10 GB and more.
MOST = {"ditto": 20_000}
# pFedHN's embeddings have a quarter as many numbers as there are clients, by the paper's rule: 100
# are kept here, so that the clients alone grow.
METHODS = {"fedavg": {}, "fedper": {}, "ditto": {}, "pfedhn": {"dim": 100}}
SMALL: dict[str, Any] = dict(model="mlp", model_args={"hidden": 16}, batch=10)
ROUNDS = 3  # of the run that is killed
TARGETS = dict(round_s=0.3, ratio=5.0, evaluated_mb=4000)  # at 20,000 clients


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
            if k > MOST.get(method, k):
                continue
            yield Experiment(
                dataset=_random(k),
                clients=k,
                partition="iid",
                partition_args={"split": "80/20"},
                method=method,
                method_args=hyper,
                participation=min(0.01, SOME / k),
                **SMALL,
            )


def _read(plain: dict[str, Any]) -> Experiment:
    _random(int(plain["dataset"].removeprefix("noise_")))
    return Experiment.from_plain(plain)


def measure(plain: dict[str, Any], device: str, repeats: int, killed: Path) -> dict[str, Any]:
    """Median seconds of rounds, peaks of memory of this process (MB), and a checkpoint's cost.

    `killed` is the checkpoint of a run of three rounds that did not end.
    """
    e = _read(plain).but(rounds=repeats + 2)
    began = time.perf_counter()
    clients = client_data(e, device)
    row: dict[str, Any] = {"data_s": time.perf_counter() - began}
    some = _some(e)
    for name, experiment in (
        ("round", e.but(eval_every=e.rounds)),
        ("some", some),
        ("evaluated", e),
    ):
        seconds, outcome, anonymous = _rounds(experiment, clients)
        row |= {f"{name}_s": seconds, f"{name}_mb": _peak(), f"{name}_anonymous_mb": anonymous}
    row["ratio"] = row["evaluated_s"] / row["round_s"]
    row |= _checkpoint(outcome, clients)
    return row | {"resumed": _resumed(some.but(rounds=ROUNDS), clients, killed)}


def _some(e: Experiment) -> Experiment:
    return e.but(eval_clients=min(SOME, e.clients))


def kill(plain: dict[str, Any], device: str, checkpoint: Path) -> None:
    """Run with a checkpoint a round, and end this process in the second one."""
    e = _some(_read(plain)).but(rounds=ROUNDS)
    clients = client_data(e, device)
    engine.CHECKPOINT_EVERY = 0.0

    def die(r: int, history: History) -> None:
        if r == 1:  # the second round; the checkpoint of the first is there
            os.kill(os.getpid(), signal.SIGKILL)

    simulate(build_method(e, clients), clients, checkpoint=checkpoint, on_round=die)


def _resumed(e: Experiment, clients: ClientData, killed: Path) -> str:
    # Whether the run goes on from the checkpoint, and ends bit for bit as one that is not killed.
    seen: list[int] = []
    again = simulate(
        build_method(e, clients), clients, checkpoint=killed, on_round=lambda r, h: seen.append(r)
    )
    whole = simulate(build_method(e, clients), clients)
    if min(seen) == 0:
        return "no: it began again"
    ours, theirs = (tensors(dataclasses.asdict(outcome.state)) for outcome in (again, whole))
    same = len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
    return "equal" if same else "no: other numbers"


def measure_file(device: str, repeats: int, clients: int) -> dict[str, Any]:
    """FedAvg over a Federation of one's own whose images stay in a file, as `measure` does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "own")
        _federation(Path(name, "x.npy"), clients).save(folder)
        Path(name, "x.npy").unlink()
        began = time.perf_counter()
        fed = Federation.open(folder)
        few = dict(rounds=repeats + 2, participation=min(0.01, SOME / clients))
        e = _some(Experiment(dataset="own", clients=clients, **SMALL, **few))
        held = client_data(e, device, fed)
        row: dict[str, Any] = {"data_s": time.perf_counter() - began}
        row["some_s"], outcome, row["some_anonymous_mb"] = _rounds(e, held)
        row |= {"some_mb": _peak(), "file_mb": (folder / "x.npy").stat().st_size / 1e6}
        return row | _checkpoint(outcome, held)


def _federation(file: Path, clients: int) -> Federation:
    # Images are written a client at a time: no more of them is ever in memory.
    shape, draw = (clients * FILE_EACH, 28, 28), np.random.default_rng(0)
    x = np.lib.format.open_memmap(file, "w+", np.uint8, shape)
    for k in range(clients):
        x[k * FILE_EACH :][:FILE_EACH] = draw.integers(0, 256, (FILE_EACH, 28, 28), np.uint8)
    x.flush()
    ids = np.arange(len(x)).reshape(clients, FILE_EACH)
    first = FILE_EACH * 4 // 5
    return Federation(
        np.lib.format.open_memmap(file, "r"),
        np.arange(len(x)) % 10,
        [*ids[:, :first]],
        test=[*ids[:, first:]],
        classes=10,
        mean=[0.5],
        std=[0.25],
    )


def _rounds(e: Experiment, clients: ClientData) -> tuple[float, Outcome, float]:
    # Median seconds between the ends of rounds, without the first and the last one, and the largest
    # anonymous memory at their ends.
    ends: list[float] = []
    held: list[float] = []

    def note(r: int, history: History) -> None:
        ends.append(time.perf_counter())
        held.append(_anonymous())

    out = simulate(build_method(e, clients), clients, on_round=note)
    return statistics.median(np.diff(ends)[:-1]), out, max(held)


def _anonymous() -> float:
    # MB of memory that no file backs; NaN where the system does not say it.
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1e3


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

    def apart(fn: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
        with fresh.Pool(1) as pool:
            return pool.apply(fn, given)

    for e in experiments(most):
        with tempfile.TemporaryDirectory() as folder:
            killed = Path(folder, "checkpoint.pt")
            dying = fresh.Process(target=kill, args=(e.plain(), device, killed))
            dying.start()
            dying.join()
            row = apart(measure, e.plain(), device, repeats, killed)
        yield f"{e.method}/{e.clients}", {"method": e.method, "clients": e.clients} | row
    k = CLIENTS[: most + 1][-1]
    row = apart(measure_file, device, repeats, k)
    yield FILE, {"method": "fedavg", "clients": k, "in_file": True} | row


def plot(frame: pd.DataFrame, path: Path) -> None:
    """Seconds of a round, without and with evaluation, and memory, against the clients."""
    shown = frame[frame.evaluated_mb.notna()].assign(evaluated_gb=frame.evaluated_mb / 1000)
    seconds = "Seconds a round"
    panels = [
        ("No evaluation", "round_s", seconds, TARGETS["round_s"]),
        (f"{SOME} clients evaluated", "some_s", seconds, None),
        ("All clients evaluated", "evaluated_s", seconds, None),
        ("All clients evaluated", "evaluated_gb", "Memory (GB)", TARGETS["evaluated_mb"] / 1000),
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
