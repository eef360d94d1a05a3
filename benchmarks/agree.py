"""Whether all executors end where `threads` does: `python -m benchmarks.agree [METHOD ...]`.

Three rounds of a small run in float64 on one device, of each method through each executor; the
largest difference of all that server and clients hold, as a share of its tensor's largest entry,
goes to results/agree-<device>.json. Status 1 if one is above 1e-9.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from benchmarks.common import about, said, save
from benchmarks.waits import SMALL, trained
from pfl_core.engine.engine import EXECUTORS
from pfl_core.engine.simulate import Outcome
from pfl_core.experiments.run import pick_device
from pfl_core.methods.base import METHODS
from pfl_core.stacked import Params

MOST = 1e-9


def compared(method: str, device: str) -> dict[str, float]:
    """{executor, and what ran if it is another: largest difference from executor `threads`}."""
    stacked = [x for x in EXECUTORS if x not in ("auto", "threads")]
    if device == "cpu":
        stacked = [x for x in stacked if not x.startswith("graphs")]
    first = held(trained(SMALL.but(method=method), device, executor="threads"))
    found = {}
    for executor in stacked:
        outcome = trained(SMALL.but(method=method), device, executor=executor)
        other = held(outcome)
        off = max(difference(v, other[n]) for n, v in first.items())
        ran = outcome.history.executor
        found[executor if ran == executor else f"{executor} ({ran})"] = off
    return found


def held(outcome: Outcome) -> Params:
    """{where: tensor} of all that server and clients hold at the end."""
    state = outcome.state
    leaves, _ = tree_flatten_with_path((state.server, state.clients, state.extra))
    return {keystr(path): v for path, v in leaves if v.numel()}


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of their entries, as a share of a's largest."""
    a, b = a.double(), b.double()
    return ((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).item()


def main() -> int:
    """Compare, print and keep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agree", description=__doc__)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="by default all")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    args = parser.parse_args()
    device, cases = pick_device(args.device), {}
    for name in args.methods or sorted(METHODS):
        cases[name] = compared(name, device)
        print(name, *said(cases[name]), sep="  ", flush=True)
    print(save(f"agree-{device}", cases, device, about(device)))
    return int(any(off > MOST for case in cases.values() for off in case.values()))


if __name__ == "__main__":
    raise SystemExit(main())
