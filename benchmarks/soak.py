"""Many small experiments in one process, memory and open files watched: python -m benchmarks.soak.

They are read every ten seconds. The slope of the memory, from the second fifth of the time on, must
stay below 1 MB per 100 runs. Exit code 1 if it does not, if open files grow, or if there were fewer
runs than asked for. Writes FOLDER/soak.md and soak.png.
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
    """Sweep until the time is over; returns readings (N, 4), one every `every` seconds.

    A reading is seconds since the start, finished runs, resident memory in MB, and open files.
    """
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
    """Growth of memory in MB and of open files, per 100 runs.

    It is by least squares over the readings from the second fifth on.
    """
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


def report(folder: Path, minutes: float, result: str, readings: np.ndarray) -> None:
    """Write soak.md and soak.png."""
    folder.mkdir(parents=True, exist_ok=True)
    draw(readings, folder / "soak.png")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()}"
    lines = [
        "# Many experiments in one process",
        f"**{result}.**",
        "![Memory and open files against finished runs](soak.png)",
        f"{versions}, on the CPU. Written by `python -m benchmarks.soak --minutes {minutes:g} "
        "--report docs`.",
    ]
    (folder / "soak.md").write_text("\n\n".join(lines) + "\n")


def main() -> int:
    """Watch as long as asked; 1 if memory or open files grow, or runs are too few."""
    about = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=about)
    add = parser.add_argument
    add("--minutes", type=float, default=30)
    add("--runs", type=int, default=500, help="at least so many are expected (default: 500)")
    add("--every", type=float, default=EVERY_S, metavar="SECONDS", help="between two readings")
    add("--report", type=Path, help="folder for soak.md and soak.png")
    args = parser.parse_args()
    readings = watched(args.minutes, args.every)
    runs, (memory, files) = int(readings[-1, 1]), slopes(readings)
    good = memory < LIMIT_MB and files < 0.5 and runs >= args.runs
    result = (
        f"{runs} runs in {readings[-1, 0] / 60:.0f} minutes, {len(readings)} readings: "
        f"memory grows by {memory:.2f} MB and open files by {files:.2f} per 100 runs "
        f"(allowed: below {LIMIT_MB:g} MB, 0.5; at least {args.runs} runs): "
        f"{'held' if good else 'NOT HELD'}"
    )
    print(result)
    if args.report:
        report(args.report, args.minutes, result, readings)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
