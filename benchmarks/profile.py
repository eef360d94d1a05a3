"""Where the time of one round goes: `python -m benchmarks.profile [CASE] [--part train|evaluate] [--rows 20] [--trace FILE]`.

One round under torch.profiler, after one that warms up. A table of operations by their own time, and sums by kind of work. On a CPU the
clients are taken one after another here, in the one thread that is profiled. Replayed CUDA graphs show as kernels.
"""

from __future__ import annotations

import argparse

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import CASES
from benchmarks.common import RESULTS, about, save, timed
from benchmarks.rounds import Ours
from pfl_core.experiments.run import pick_device

KINDS = {  # the first whose word is in an operation's name
    "convolution": ("conv", "cudnn", "mkldnn_conv", "wgrad", "dgrad"),
    "matrix products": ("addmm", "::mm", "bmm", "matmul", "linear", "gemm"),
    "normalisation, activation, pooling, loss": (
        "norm",
        "relu",
        "pool",
        "threshold",
        "softmax",
        "nll",
    ),
    "gathering and casting samples": ("index_select", "_to_copy", "gather", "index"),
    "update": ("_foreach", "multi_tensor"),
    "copies, memory": (
        "copy",
        "clone",
        "empty",
        "zero",
        "fill",
        "contiguous",
        "cat",
        "resize",
        "memcpy",
        "memset",
    ),
}


def kind(name: str) -> str:
    """The kind of work of an operation or kernel."""
    low = name.lower()
    return next((k for k, words in KINDS.items() if any(w in low for w in words)), "other")


def main() -> None:
    """Profile one round of a case, print both tables and write results/profile-<device>.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("case", nargs="?", default="quickstart", choices=list(CASES))
    parser.add_argument("--part", default="train", choices=("train", "evaluate"))
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument(
        "--samples", type=int, default=0, help="samples a client at most (0: all); a trial run"
    )
    parser.add_argument(
        "--trace", default="", help="also write a trace for chrome://tracing or Perfetto"
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--executor", default="auto", choices=("auto", "threads", "batched", "graphs")
    )
    args = parser.parse_args()
    device = pick_device(args.device)
    e = CASES[args.case].experiment()
    ours = Ours(e.but(max_samples=args.samples) if args.samples else e, device, args.executor)
    torch.set_num_threads(1)
    ours.engine.threads.map = lambda fn, items: [fn(i) for i in items]
    fn = ours.train if args.part == "train" else lambda: ours.evaluate("test")
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with torch.no_grad():
        ours.train()
        fn()
        plain = timed(fn, device)
        with profile(activities=activities) as p:
            seconds = timed(fn, device)
    own = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    rows = [
        dict(name=a.key, kind=kind(a.key), calls=a.count, ms=getattr(a, own) / 1e3)
        for a in p.key_averages()
    ]
    frame = pd.DataFrame(rows).sort_values("ms", ascending=False)
    frame = frame[frame.ms > 0].assign(share=lambda f: 100 * f.ms / f.ms.sum())
    sums = frame.groupby("kind")[["calls", "ms", "share"]].sum().sort_values("ms", ascending=False)
    print(
        f"{CASES[args.case].says}: {args.part}, {plain:.3f} s ({seconds:.3f} s under the profiler), {device}, {ours.engine.executor}"
    )
    print(
        frame.head(args.rows).to_string(index=False, float_format="%.1f"),
        sums.to_string(float_format="%.1f"),
        sep="\n\n",
    )
    got = dict(
        seconds=plain, profiled_s=seconds, executor=ours.engine.executor, samples=args.samples
    )
    got |= dict(
        kinds=sums.reset_index().to_dict("records"), top=frame.head(args.rows).to_dict("records")
    )
    print(
        "written",
        save(
            f"profile-{device}", {f"{args.case}/{args.part}": got}, device, about(device)
        ).relative_to(RESULTS.parent),
    )
    if args.trace:
        p.export_chrome_trace(args.trace)
    ours.engine.close()


if __name__ == "__main__":
    main()
