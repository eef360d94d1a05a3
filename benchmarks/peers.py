"""FedAvg here and in two public simulators: `benchmarks/peers.sh`.

In an environment of its own, one of them is `python -m benchmarks.peers WHO`.

All have the same data, split, initial model, batch and steps (quickstart of `benchmarks.cases`);
the simulators' clients train by the textbook loop. Each is run at 1, 2, 4, ... processes up to the
number of cores, and its best median stands. Seconds are of a round of training without evaluation,
after one round that warms up; the accuracy reached after all rounds stands beside them. Two shorter
runs then say whether all weights come out bit for bit again.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import CASES
from benchmarks.common import about, save
from benchmarks.plain_loop import quickstart

# What each needs. BlazeFL trains its clients in threads or in processes.
PACKAGES = {
    "ours": (),
    "flower": ("flwr", "ray"),
    "pfl": ("pfl",),
    "blazefl-threads": ("blazefl",),
    "blazefl-processes": ("blazefl",),
}
State = dict[str, torch.Tensor]


def accuracy(state: dict[str, torch.Tensor], samples: int) -> float:
    """Pooled test accuracy (%) of a model."""
    here = quickstart(samples)
    here.shared = state
    return here.evaluate("test")


def digest(state: State) -> str:
    """A hash of all weights."""
    whole = hashlib.sha256()
    for name in sorted(state):
        whole.update(state[name].detach().cpu().contiguous().numpy().tobytes())
    return whole.hexdigest()


def flower(processes: int, rounds: int, samples: int) -> tuple[list[float], State]:
    """Seconds of each round, and the last model, of Flower's simulation.

    It has `processes` workers of one core each.
    """
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from benchmarks.peer_client import app

    k, ends, last, server = quickstart(samples).data.K, [], {}, ServerApp()

    def told(round: int, arrays: Any) -> None:
        ends.append(time.perf_counter())
        last.update(arrays.to_torch_state_dict())

    @server.main()
    def main(grid: Any, context: Any) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=k, min_available_nodes=k)
        strategy.start(
            grid, ArrayRecord(quickstart(samples).shared), num_rounds=rounds, evaluate_fn=told
        )

    os.environ["PEERS_SAMPLES"] = str(samples)
    resources = {
        "init_args": {"num_cpus": processes},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server, app, num_supernodes=k, backend_config=resources)
    return [b - a for a, b in zip(ends, ends[1:], strict=False)], last


def ours(processes: int, rounds: int, samples: int) -> tuple[list[float], State]:
    """The same of pfl_core with `processes` worker threads."""
    from benchmarks.rounds import Ours
    from pfl_core.engine.engine import Engine

    torch.set_num_threads(1)
    run = Ours(CASES["quickstart"].experiment().but(max_samples=samples), "cpu")
    run.engine = Engine(run.method, run.data, workers=processes)
    times = []
    with torch.no_grad():
        for _ in range(rounds):
            began = time.perf_counter()
            run.train()
            times.append(time.perf_counter() - began)
    return times, run.state.server


def pfl(processes: int, rounds: int, samples: int) -> tuple[list[float], State]:
    """The same of Apple's pfl, whose simulation on one computer is one process."""
    from benchmarks.peer_pfl import simulate

    return simulate(quickstart(samples), rounds)


def blazefl(processes: int, rounds: int, samples: int, kind: str) -> tuple[list[float], State]:
    """The same of BlazeFL, whose workers are "threads" or "processes"."""
    from benchmarks.peer_blazefl import simulate

    return simulate(quickstart(samples), rounds, processes, kind)


SIMULATORS = {
    "ours": ours,
    "flower": flower,
    "pfl": pfl,
    "blazefl-threads": functools.partial(blazefl, kind="threads"),
    "blazefl-processes": functools.partial(blazefl, kind="processes"),
}


def _repeats(command: list[str]) -> bool:
    # Hashes come in files: workers that a simulator leaves behind would hold a pipe open.
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("first", "second")]
        for file in files:
            subprocess.run([*command, "--rounds", "2", "--digest", str(file)], check=True)
        first, second = (file.read_text() for file in files)
    return first == second


def main() -> None:
    """Run one simulator at each number of processes; write results/peers-cpu.json with the best."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("who", choices=list(PACKAGES))
    parser.add_argument("--rounds", type=int, default=6, help="of which the first is not counted")
    parser.add_argument(
        "--samples", type=int, default=0, help="images a client at most (0: all); a trial run"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=0,
        help="0: 1, 2, 4, ... up to the number of cores, the best stands",
    )
    parser.add_argument("--digest", type=Path, help="write a hash of the last weights there alone")
    args = parser.parse_args()
    command = [sys.executable, "-m", "benchmarks.peers", args.who, "--samples", str(args.samples)]
    if not args.processes:
        cores = len(os.sched_getaffinity(0))
        many = sorted({min(2**i, cores) for i in range(cores.bit_length() + 1)})
        # Each in a process of its own: a simulator leaves its workers behind.
        for n in [1] if args.who == "pfl" else many:
            whole = [*command, "--rounds", str(args.rounds), "--processes", str(n)]
            subprocess.run(whole, check=True)
        return
    times, state = SIMULATORS[args.who](args.processes, args.rounds, args.samples)
    if args.digest:
        args.digest.write_text(digest(state))
        return
    row: dict[str, Any] = dict(
        train_s=statistics.median(times[1:]),
        fastest_s=min(times[1:]),
        slowest_s=max(times[1:]),
        acc_pct=accuracy(state, args.samples),
    )
    row["repeats"] = _repeats([*command, "--processes", str(args.processes)])
    row |= dict(rounds_s=times, processes=args.processes, samples=args.samples)
    row["versions"] = {p: importlib.metadata.version(p) for p in PACKAGES[args.who]}
    print(json.dumps(row))
    save("peers-cpu", {f"{args.who}/{args.processes}": row}, "cpu", about("cpu"))


if __name__ == "__main__":
    main()
