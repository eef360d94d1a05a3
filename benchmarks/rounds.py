"""Seconds of a round, ours and the plain loop in turn: `python -m benchmarks.rounds [CASE ...]`.

A round is training and evaluation of train and test data. Ratios are medians over the repeats, with
their range. The floor is the time in which this computer could do FedAvg's arithmetic of the round
as large matrix products, and move the weights that its steps touch through its memory.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.cases import CASES, Case
from benchmarks.common import about, save, timed
from benchmarks.plain_loop import PlainLoop
from pfl_core.engine.context import Context
from pfl_core.engine.engine import EXECUTORS, Engine
from pfl_core.engine.participation import sample
from pfl_core.engine.sgd import precision
from pfl_core.experiments.build import build_method, client_data
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.run import pick_device
from pfl_core.util.percent import accuracy

# A step of SGD reads the weights forward and backward, writes their gradients and reads them, and
# reads and writes the weights.
PASSES = 6


class Ours:
    """The rounds of an Experiment by pfl_core's engine, in pieces that can be timed.

    They multiply as the Experiment's `precision` says, as `simulate` does.
    """

    def __init__(self, experiment: Experiment, device: Any, executor: str = "auto"):
        self.data = client_data(experiment, device)
        self.method = build_method(experiment, self.data)
        self.engine = Engine(self.method, self.data, executor)
        self.state = self.method.init()

    def train(self) -> None:
        """One communication round without evaluation."""
        with precision(self.engine.config.precision):
            self._train()

    def _train(self) -> None:
        state, r = self.state, self.state.round
        chosen = sample(self.engine.config, self.data.K, r)
        sel = chosen.to(self.data.device)
        sent = self.method.download(state, sel)
        start = self.method.begin(state, sel, sent)
        end = self.method.local(Context(self.engine, state, sel, r, chosen.tolist()), start)
        kept = {n: v for n, v in end.items() if n in state.clients}
        up = {n: v for n, v in end.items() if n not in kept}
        self.state = self.method.upload(state, sel, start, up, self.data.n[sel].to(self.data.dtype))
        for n, v in kept.items():
            self.state.clients[n][sel] = v
        self.state.round = r + 1

    def evaluate(self, split: str) -> float:
        """Pooled accuracy (%) of the models as served."""
        everyone = torch.arange(self.data.K, device=self.data.device)
        with precision(self.engine.config.precision):
            served = self.method.personal(
                self.state, Context(self.engine, self.state, everyone, self.state.round)
            )
            got = self.engine.evaluate(served, split)
        return accuracy(got["correct"].sum(), got["n"].sum())


def matrix_rate(device: Any, n: int = 0, dtype: torch.dtype = torch.float32) -> float:
    """Multiply-adds a second x 2 (FLOP/s) of large n x n matrix products, the best of ten."""
    n = n or (2048 if device == "cpu" else 8192)
    a, b = (torch.randn(n, n).to(device, dtype) for _ in range(2))
    a @ b
    return 2 * n**3 / min(timed(lambda: a @ b, device) for _ in range(10))


def bandwidth(device: Any, megabytes: int = 256) -> float:
    """Bytes a second that a copy of a large tensor reads and writes, the best of ten."""
    a = torch.zeros(megabytes * 2**18, device=device)
    b = torch.empty_like(a)
    b.copy_(a)
    return 2 * a.nbytes / min(timed(lambda: b.copy_(a), device) for _ in range(10))


def training_flop(model: torch.nn.Module, x: torch.Tensor) -> float:
    """FLOP of one forward and backward pass on x."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    return float(counter.get_total_flops())


def measure(
    case: Case,
    repeats: int,
    device: Any,
    executor: str = "auto",
    keep: Callable[[dict[str, Any]], Any] = dict,
) -> dict[str, Any]:
    """Times (s) of `repeats` rounds of both loops in turn, and what they reach.

    One round before warms up. `keep` gets what was timed before its arithmetic is counted.
    """
    experiment = case.experiment()
    torch.set_num_threads(torch.get_num_threads())
    ours, threads = Ours(experiment, device, executor), torch.get_num_threads()
    plain = PlainLoop(ours.method.task.model, ours.data, ours.engine.config)
    rows = []
    for i in range(repeats + 1):
        clients = [_sampled(ours, experiment.rounds * i + j) for j in range(experiment.rounds)]
        row = _times(ours, plain, clients, device, threads)
        rows += [row] if i else []
    with torch.no_grad():
        reached = {"ours_acc_pct": ours.evaluate("test"), "plain_acc_pct": plain.evaluate("test")}
    ours.engine.close()
    median = {k: statistics.median(row[k] for row in rows) for k in rows[0]}
    got = {
        "says": case.says,
        "experiment": experiment.plain(),
        "dataset": experiment.dataset,
        "executor": "+".join(sorted(ours.engine.ran)),
        "rows": rows,
        **median,
        **_ratios(rows),
        **reached,
    }
    keep(got)
    flop, forward, moved = work(ours, experiment, clients)
    rate = flop / median["ours_train_s"] / 1e9
    return got | {"training_gflops": rate, "flop": flop + forward, "moved_bytes": moved}


def _sampled(ours: Ours, r: int) -> list[int]:
    # The clients of round r.
    return sample(ours.engine.config, ours.data.K, r).tolist()


def _times(
    ours: Ours, plain: PlainLoop, clients: list[list[int]], device: Any, threads: int
) -> dict[str, float]:
    # Seconds of as many rounds of both as there are lists of clients, and of one evaluation.
    splits = ("train", "test")
    row = {
        "plain_train_s": timed(lambda: [plain.train(few) for few in clients], device),
        "plain_eval_s": timed(lambda: [plain.evaluate(s) for s in splits], device),
    }
    torch.set_num_threads(1)  # as `simulate` does: workers take one each
    with torch.no_grad():
        row["ours_train_s"] = timed(lambda: [ours.train() for _ in clients], device)
        row["ours_eval_s"] = timed(lambda: [ours.evaluate(s) for s in splits], device)
    torch.set_num_threads(threads)
    return row


def work(
    ours: Ours, experiment: Experiment, clients: list[list[int]]
) -> tuple[float, float, float]:
    """FLOP of training in rounds of these clients, FLOP of one evaluation, bytes that steps move.

    They are counted on the CPU, on a copy of the model.
    """
    data, batch, epochs = ours.data, experiment.batch, experiment.epochs
    first = torch.as_tensor(data.index["train"][clients[0][0]][:batch], device=data.device)
    model = copy.deepcopy(ours.method.task.model).cpu()
    per_batch = training_flop(model, data.batch(first)[0].cpu())
    held = [sum(len(data.index["train"][k]) for k in few) for few in clients]
    batches = sum(
        experiment.steps * len(few) if experiment.steps else epochs * n / batch
        for few, n in zip(clients, held, strict=True)
    )
    evaluated = sum(len(part) for s in ("train", "test") for part in data.index[s])
    weights = sum(p.nbytes for p in model.parameters())
    forward = per_batch / len(first) * evaluated / 3
    return per_batch * batches, forward, PASSES * weights * batches


def _ratios(rows: list[dict[str, float]]) -> dict[str, float]:
    # Seconds of the plain loop over ours: median and range.
    whole = [
        (row["plain_train_s"] + row["plain_eval_s"]) / (row["ours_train_s"] + row["ours_eval_s"])
        for row in rows
    ]
    return {
        "ratio": statistics.median(whole),
        "ratio_min": min(whole),
        "ratio_max": max(whole),
        "train_ratio": statistics.median(
            row["plain_train_s"] / row["ours_train_s"] for row in rows
        ),
    }


def main() -> None:
    """Time the cases asked for, print a table and write benchmarks/results/rounds-<device>.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounds", description=__doc__)
    parser.add_argument(
        "case", nargs="*", choices=[[], *CASES], metavar=f"CASE of {', '.join(CASES)}"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--executor", default="auto", choices=EXECUTORS)
    args = parser.parse_args()
    device = pick_device(args.device)
    peak, memory = matrix_rate(device), bandwidth(device)
    where = about(device) | {
        "matrix_gflops": peak / 1e9,
        "memory_gb_s": memory / 1e9,
        "repeats": args.repeats,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(where))
    said = "" if args.executor == "auto" else "-" + args.executor.replace(":", "-")
    name = f"rounds-{device}{said}"
    for key in args.case or CASES:
        target = CASES[key].cpu if device == "cpu" else CASES[key].gpu

        def keep(got: dict[str, Any], key: str = key, target: float = target) -> None:
            save(name, {key: got | {"target": target}}, device, where)

        got = measure(CASES[key], args.repeats, device, args.executor, keep)
        share = got["training_gflops"] * 1e9 / peak
        floor = got["flop"] / peak + got["moved_bytes"] / memory
        spent = got["ours_train_s"] + got["ours_eval_s"]
        counted = {"share_of_matrix_rate": share, "floor_s": floor, "times_floor": spent / floor}
        keep(got | counted)
        print(
            f"{key:14} {got['ratio']:5.2f}x ({got['ratio_min']:.2f}-{got['ratio_max']:.2f})  "
            f"training {got['train_ratio']:.2f}x  "
            f"ours {got['ours_train_s']:.2f}+{got['ours_eval_s']:.2f} s, "
            f"plain {got['plain_train_s']:.2f}+{got['plain_eval_s']:.2f} s  "
            f"{100 * share:.0f} % of the matrix rate, {spent / floor:.1f} times the floor  "
            f"accuracy {got['ours_acc_pct']:.1f} / {got['plain_acc_pct']:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
