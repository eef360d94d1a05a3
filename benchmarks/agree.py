"""Whether all executors end where `threads` does: `python -m benchmarks.agree [METHOD ...]`.

Three rounds of a small run in float64 on one device, of each method through each executor; the
largest difference of all that server and clients hold, as a share of its tensor's largest entry,
goes to results/agree-<device>.json. Status 1 if one is above 1e-9, or if what ran is not what was
asked for: another executor, or graphs of which none was replayed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from benchmarks.common import about, said, save
from benchmarks.waits import SMALL, trained
from pfl_core.engine import graphs
from pfl_core.engine.convolutions import FASTEST, UNFOLD
from pfl_core.engine.engine import EXECUTORS
from pfl_core.engine.simulate import Outcome
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.run import pick_device
from pfl_core.methods.base import METHODS
from pfl_core.stacked import Params

MOST = 1e-9


def compared(
    method: str, device: Any, executors: tuple[str, ...] = EXECUTORS, base: Experiment = SMALL
) -> dict[str, dict[str, Any]]:
    """Of each stacked executor: what `ran`, graphs' `replays`, and how far it is `off` threads."""
    small, kind = base.but(method=method), torch.device(device).type
    first, found = held(trained(small, device, executor="threads")), {}
    for executor in executors:
        how = executor.partition(":")[0]
        if how in ("auto", "threads") or (how == "graphs" and kind not in graphs.GRAPHS):
            continue
        with replays(kind) as count:
            outcome = trained(small, device, executor=executor)
        other = held(outcome)
        off = max(difference(v, other[n]) for n, v in first.items())
        found[executor] = dict(ran=outcome.history.executor, replays=len(count), off=off)
    return found


def wrong(found: dict[str, dict[str, Any]]) -> list[str]:
    """The executors of `compared` that end elsewhere, or did not run as was asked."""
    return [x for x, row in found.items() if not row["off"] <= MOST or not honoured(x, row)]


def honoured(asked: str, row: dict[str, Any]) -> bool:
    """Whether all that ran is what was asked for; graphs are only if they were replayed."""
    how, _, form = asked.partition(":")
    forms = {FASTEST: ("", UNFOLD)}.get(form, (form,))
    parts = [ran.partition(":") for ran in row["ran"].split("+")]
    same = all(ran == how and in_form in forms for ran, _, in_form in parts)
    return same and (how != "graphs" or row["replays"] > 0)


@contextmanager
def replays(kind: str) -> Iterator[list[None]]:
    """Within it, an entry for each replay of a captured step on a kind of device."""
    count: list[None] = []
    if kind not in graphs.GRAPHS:
        yield count
        return
    made = graphs.GRAPHS[kind]

    class Counting:
        def __init__(self) -> None:
            self.graphs = made()

        def capture(self, fn: Callable[[], None]) -> Callable[[], None]:
            replay = self.graphs.capture(fn)

            def counted() -> None:
                count.append(None)
                replay()

            return counted

    with mock.patch.dict(graphs.GRAPHS, {kind: Counting}):
        yield count


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
        found = compared(name, device)
        bad = wrong(found)
        cases[name] = {x: row["off"] for x, row in found.items()} | {"wrong": bad}
        for executor, row in found.items():
            print(name, executor, *said(row), "WRONG" * (executor in bad), sep="  ", flush=True)
    print(save(f"agree-{device}", cases, device, about(device)))
    return int(any(case["wrong"] for case in cases.values()))


if __name__ == "__main__":
    raise SystemExit(main())
