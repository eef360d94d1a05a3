"""Many small experiments in one process, its memory and open files watched: python -m benchmarks.soak [--minutes N] [--report FOLDER]

Read every ten seconds; the slope of the memory, from the second fifth of the time on, must stay below 1 MB per 100 runs. Exit code 1 if
it does not, if open files grow, or if there were fewer runs than asked for. Writes FOLDER/soak.md and soak.png.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import platform
import sys
import tempfile
import threading
import time
from pathlib import Path

import matplotlib
import numpy as np
import psutil
import torch

from benchmarks.kill import cells
from pfl_core import sweep

EVERY_S, LIMIT_MB = 10.0, 1.0  # between two readings; allowed per 100 runs


def watched(minutes: float, every: float) -> np.ndarray:
    """Sweeps until the time is over; readings (N, 4): seconds, finished runs, resident MB, open files."""
    process, readings, done, over = psutil.Process(), [], [0], threading.Event()
    began = time.monotonic()

    def watch() -> None:
        while not over.wait(every):
            memory = process.memory_info().rss / 2**20
            readings.append((time.monotonic() - began, done[0], memory, process.num_fds()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with tempfile.TemporaryDirectory() as store, contextlib.redirect_stdout(io.StringIO()):
            for batch in range(10**6):
                for e in cells(batch, 12):
                    done[0] += sweep([e], store=Path(store)).run.nunique()
                if time.monotonic() - began > 60 * minutes:
                    break
    finally:
        over.set()
        watcher.join()
    return np.array(readings)


def slopes(readings: np.ndarray) -> tuple[float, float]:
    """Growth of memory in MB and of open files, per 100 runs, by least squares from the second fifth of the readings on."""
    late = readings[len(readings) // 5 :]
    return tuple(100 * np.polyfit(late[:, 1], late[:, i], 1)[0] for i in (2, 3))


def draw(readings: np.ndarray, path: Path) -> None:
    """Memory and open files against the number of finished runs."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(7, 2.5), dpi=100, layout="constrained")
    for ax, i, label in ((axes[0], 2, "resident memory, MB"), (axes[1], 3, "open files")):
        ax.plot(readings[:, 1], readings[:, i], linewidth=1)
        ax.set(xlabel="finished runs", ylabel=label, ylim=(0, 1.2 * readings[:, i].max()))
    fig.savefig(path)
    plt.close(fig)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument(
        "--runs", type=int, default=500, help="at least so many are expected (default: 500)"
    )
    parser.add_argument(
        "--every", type=float, default=EVERY_S, metavar="SECONDS", help="between two readings"
    )
    parser.add_argument("--report", type=Path, help="folder for soak.md and soak.png")
    args = parser.parse_args()
    readings = watched(args.minutes, args.every)
    runs, (memory, files) = int(readings[-1, 1]), slopes(readings)
    good = memory < LIMIT_MB and files < 0.5 and runs >= args.runs
    result = (
        f"{runs} runs in {readings[-1, 0] / 60:.0f} minutes, {len(readings)} readings: memory grows by {memory:.2f} MB and open files "
        f"by {files:.2f} per 100 runs (allowed: below {LIMIT_MB:g} MB, 0.5; at least {args.runs} runs): {'held' if good else 'NOT HELD'}"
    )
    print(result)
    if args.report:
        args.report.mkdir(parents=True, exist_ok=True)
        draw(readings, args.report / "soak.png")
        how = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()}, on the CPU."
        text = f"# Many experiments in one process\n\nWritten by `python -m benchmarks.soak --minutes {args.minutes:g}`.\n\n"
        text += (
            f"**{result}.**\n\n![Memory and open files against finished runs](soak.png)\n\n{how}\n"
        )
        (args.report / "soak.md").write_text(text)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
