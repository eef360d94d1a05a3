"""The server's layer-wise aggregation beside a loop: `python -m benchmarks.server`.

The loop takes one weighted sum per client and layer.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics

import torch
from torch import Tensor

from benchmarks.common import about, save, timed
from pfl_core import models
from pfl_core.experiments.run import pick_device
from pfl_core.stacked import Params, mix


def looped(
    weights: dict[str, Tensor], layers: dict[str, list[str]], stacked: list[Params], few: int
) -> list[Params]:
    """What peers do, for the first `few` clients.

    In each layer they take the weighted sum over all clients' state dicts.
    """
    out = []
    for i in range(few):
        model = {}
        for layer, names in layers.items():
            for n in names:
                model[n] = sum(
                    w * other[n] for w, other in zip(weights[layer][i], stacked, strict=True)
                )
        out.append(model)
    return out


def together(weights: dict[str, Tensor], layers: dict[str, list[str]], stacked: Params) -> Params:
    """What pFedLA and FedAGHN do here: one matrix product a layer over the client axis."""
    out = {}
    for layer, names in layers.items():
        out |= mix(weights[layer], {n: stacked[n] for n in names})
    return out


def main() -> None:
    """Time both for 20, 100 and 500 clients, and write results/server-<device>.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server", description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 100, 500])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    args = parser.parse_args()
    device = pick_device(args.device)
    where = about(device)
    print(json.dumps(where))
    for k in args.clients:
        net = models.build("lenet", (3, 32, 32), 10, bn=True)
        layers = models.layers(net, "module")
        draw = torch.Generator().manual_seed(0)
        stacked = {
            n: torch.randn(k, *v.shape, generator=draw).to(device)
            for n, v in net.named_parameters()
        }
        weights = {
            layer: torch.rand(k, k, generator=draw).softmax(1).to(device) for layer in layers
        }
        apart = [{n: v[i].clone() for n, v in stacked.items()} for i in range(k)]
        few = min(k, 2 if k > 100 else k)  # clients that the loop serves; its time is scaled to all
        one = functools.partial(looped, weights, layers, apart, few)
        every = functools.partial(together, weights, layers, stacked)
        first, second = one(), every()
        worst = max(
            (first[i][n] - second[n][i]).abs().max().item() for i in range(few) for n in second
        )
        times = [(timed(one, device) * k / few, timed(every, device)) for _ in range(args.repeats)]
        ratios = [a / b for a, b in times]
        row = {
            "clients": k,
            "loop_s": statistics.median(a for a, _ in times),
            "ours_s": statistics.median(b for _, b in times),
        }
        row |= {
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "largest_difference": worst,
        }
        save(f"server-{device}", {str(k): row}, device, where)
        print("  ".join(f"{n} {v:.4g}" for n, v in row.items()), flush=True)


if __name__ == "__main__":
    main()
