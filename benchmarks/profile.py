"""Where the time of one round goes: `python -m benchmarks.profile [CASE]`.

One round under torch.profiler, after one that warms up. A table of operations by their own time,
and sums by kind of work. On a CPU the clients are taken one after another here, in the one thread
that is profiled. Replayed CUDA graphs show as kernels.
"""

from __future__ import annotations

import argparse

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import CASES
from benchmarks.common import RESULTS, about, save, timed
from benchmarks.rounds import Ours
from pfl_core.engine.engine import EXECUTORS
from pfl_core.experiments.run import pick_device

KINDS = {  # the first whose word is in an operation's name
    "convolution": "conv cudnn mkldnn_conv wgrad dgrad",
    "matrix products": "addmm ::mm bmm matmul linear gemm",
    "normalisation, activation, pooling, loss": "norm relu pool threshold softmax nll",
    "gathering and casting samples": "index_select _to_copy gather index",
    "update": "_foreach multi_tensor",
    "copies, memory": "copy clone empty zero fill contiguous cat resize memcpy memset",
}


def kind(name: str) -> str:
    """The kind of work of an operation or kernel."""
    low = name.lower()
    found = (k for k, words in KINDS.items() if any(w in low for w in words.split()))
    return next(found, "other")


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    add = parser.add_argument
    add("case", nargs="?", default="quickstart", choices=list(CASES))
    add("--part", default="train", choices=("train", "evaluate"))
    add("--rows", type=int, default=20)
    add("--samples", type=int, default=0, help="samples a client at most (0: all); a trial run")
    add("--trace", default="", help="also write a trace for chrome://tracing or Perfetto")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--executor", default="auto", choices=EXECUTORS)
    return parser.parse_args()


def operations(profiled: profile, device: str) -> pd.DataFrame:
    """Operations by their own time: name, kind, calls, ms, share (%)."""
    own = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    rows = [
        dict(name=a.key, kind=kind(a.key), calls=a.count, ms=getattr(a, own) / 1e3)
        for a in profiled.key_averages()
    ]
    frame = pd.DataFrame(rows).sort_values("ms", ascending=False)
    return frame[frame.ms > 0].assign(share=lambda f: 100 * f.ms / f.ms.sum())


def main() -> None:
    """Profile one round of a case, print both tables and write results/profile-<device>.json."""
    args = options()
    device, case = pick_device(args.device), CASES[args.case]
    e = case.experiment()
    ours = Ours(e.but(max_samples=args.samples) if args.samples else e, device, args.executor)
    torch.set_num_threads(1)
    ours.engine.threads.map = lambda fn, items: [fn(i) for i in items]
    part = ours.train if args.part == "train" else lambda: ours.evaluate("test")
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with torch.no_grad():
        ours.train()
        part()
        plain = timed(part, device)
        with profile(activities=activities) as profiled:
            seconds = timed(part, device)
    executor = "+".join(sorted(ours.engine.ran))
    print(f"{case.says}: {args.part}, {plain:.3f} s", end=" ")
    print(f"({seconds:.3f} s under the profiler), {device}, {executor}")
    frame = operations(profiled, device)
    kinds = frame.groupby("kind")[["calls", "ms", "share"]].sum().sort_values("ms", ascending=False)
    top = frame.head(args.rows)
    print(
        top.to_string(index=False, float_format="%.1f"),
        kinds.to_string(float_format="%.1f"),
        sep="\n\n",
    )
    got = dict(seconds=plain, profiled_s=seconds, executor=executor, samples=args.samples)
    got |= dict(kinds=kinds.reset_index().to_dict("records"), top=top.to_dict("records"))
    written = save(f"profile-{device}", {f"{args.case}/{args.part}": got}, device, about(device))
    print("written", written.relative_to(RESULTS.parent))
    if args.trace:
        profiled.export_chrome_trace(args.trace)
    ours.engine.close()


if __name__ == "__main__":
    main()
