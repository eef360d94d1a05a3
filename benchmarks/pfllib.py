"""A round of PFLlib's quick start, theirs and ours in turn: `python -m benchmarks.pfllib FOLDER`.

FOLDER is a checkout of TsingZ0/PFLlib, whose FedAvg client and server run as they are, over files
of our clients and from our initial model. A round is what theirs is: models are sent, test and
training data evaluated, clients trained, weights averaged. They leave out a client's last,
incomplete batch, and so do we here.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cases import CASES
from benchmarks.common import about, save, timed
from benchmarks.rounds import Ours, bandwidth, matrix_rate, work
from pfl_core.data.client_data import ClientData
from pfl_core.experiments.experiment import Experiment

TARGET = 0.38  # of their time
NAME = "quickstart"
# What their server and clients read of the command line, as its defaults.
DEFAULTS: dict[str, Any] = dict(
    device="cpu",
    dataset=NAME,
    algorithm="FedAvg",
    global_rounds=1,
    join_ratio=1.0,
    random_join_ratio=False,
    time_select=False,
    time_threthold=10000.0,
    goal="test",
    save_folder_name="items",
    top_cnt=100,
    auto_break=False,
    eval_gap=1,
    client_drop_rate=0.0,
    train_slow_rate=0.0,
    send_slow_rate=0.0,
    dlg_eval=False,
    dlg_gap=100,
    batch_num_per_client=2,
    num_new_clients=0,
    fine_tuning_epoch_new=0,
    learning_rate_decay=False,
    learning_rate_decay_gamma=0.99,
)


def deal(data: ClientData, folder: Path) -> None:
    """Write all clients' samples as PFLlib's files: train/0.npz, test/0.npz, ..."""
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        for k, index in enumerate(data.index[split]):
            x, y = data.batch(torch.as_tensor(index))
            held = np.array({"x": x.numpy(), "y": y.numpy()}, dtype=object)
            np.savez_compressed(folder / split / f"{k}.npz", data=held)


def theirs(checkout: Path, ours: Ours, e: Experiment) -> Any:
    """PFLlib's FedAvg server with its clients, over the files of the current folder's dataset/."""
    sys.path.insert(0, str(checkout / "system"))
    from flcore.servers.serveravg import FedAvg  # pyright: ignore[reportMissingImports]

    args = Namespace(
        **DEFAULTS,
        model=ours.method.task.model,
        num_clients=e.clients,
        num_classes=ours.data.classes,
        batch_size=e.batch,
        local_epochs=e.epochs,
        local_learning_rate=e.lr,
    )
    return FedAvg(args, 0)


def measure(checkout: Path, repeats: int, samples: int) -> dict[str, Any]:
    """Times (s) of `repeats` rounds of both in turn, and what they reach; one round warms up."""
    e = CASES[NAME].experiment().but(plan="drop", max_samples=samples)
    ours, threads, rows = Ours(e, "cpu"), torch.get_num_threads(), []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.mkdir("system")
        deal(ours.data, Path("dataset", NAME))
        os.chdir("system")  # theirs reads ../dataset
        with contextlib.redirect_stdout(io.StringIO()):
            server = theirs(checkout, ours, e)
            for i in range(repeats + 1):
                row = _round(ours, server, threads)
                rows += [row] if i else []
            server.send_models()
            server.evaluate()
        with torch.no_grad():
            reached = ours.evaluate("test")
    ours.engine.close()
    train, evaluate, moved = work(ours, e, [[*range(e.clients)]])
    rate = matrix_rate("cpu")
    share = [
        (row["ours_train_s"] + row["ours_eval_s"]) / (row["theirs_train_s"] + row["theirs_eval_s"])
        for row in rows
    ]
    return {
        "rows": rows,
        **{k: statistics.median(row[k] for row in rows) for k in rows[0]},
        "images": int(ours.data.n.sum()),
        "share": statistics.median(share),
        "share_min": min(share),
        "share_max": max(share),
        "ours_acc_pct": float(reached),
        "theirs_acc_pct": 100 * server.rs_test_acc[-1],
        "floor_train_s": train / rate + moved / bandwidth("cpu"),
        "floor_eval_s": evaluate / rate,
    }


def _round(ours: Ours, server: Any, threads: int) -> dict[str, float]:
    # Seconds of the two pieces of one round of both.
    def train() -> None:
        server.selected_clients = server.select_clients()
        for client in server.selected_clients:
            client.train()
        server.receive_models()
        server.aggregate_parameters()

    server.send_models()
    row = {"theirs_eval_s": timed(server.evaluate, "cpu")}
    row["theirs_train_s"] = timed(train, "cpu")
    torch.set_num_threads(1)  # as `simulate` does: workers take one each
    with torch.no_grad():
        row["ours_eval_s"] = timed(lambda: [ours.evaluate(s) for s in ("test", "train")], "cpu")
        row["ours_train_s"] = timed(ours.train, "cpu")
    torch.set_num_threads(threads)
    return row


def main() -> None:
    """Time both, and write benchmarks/results/pfllib-cpu.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pfllib", description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkout of TsingZ0/PFLlib")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=0, help="at most, a client (0: all)")
    args = parser.parse_args()
    got = measure(args.folder.resolve(), args.repeats, args.samples)
    save("pfllib-cpu", {NAME: got | {"target": TARGET}}, "cpu", about("cpu"))
    print({k: v for k, v in got.items() if k != "rows"})


if __name__ == "__main__":
    main()
