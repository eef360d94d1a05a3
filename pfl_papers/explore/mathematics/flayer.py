"""FLAYER: rates by the norm of a layer's gradient, and what is uploaded of each layer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from pfl_core.analysis import plots
from pfl_core.methods.base import Step
from pfl_core.stacked import Params
from pfl_papers.explore.mathematics.clients import (
    ALL,
    CLIENTS,
    COLOURS,
    Worked,
    method_for,
    points,
    points_model,
    sliders,
    stacked,
)

FOUR = ["layer1", "layer2", "layer3", "layer4"]
ENTRIES = 8  # of each layer


class _Round:
    """One round of FLAYER from zero, a step each, by gradients (layers, clients, entries).

    `end` and `sent` have that shape, too: the clients' models and what they upload of them.
    `server` (layers, entries) is the server's mean.
    """

    def __init__(self, gradients: np.ndarray, lr: float):
        self.lr, self.gradients = lr, stacked(**dict(zip(FOUR, gradients, strict=True)))
        model = points_model(*FOUR, size=ENTRIES)
        method = method_for("flayer", model, dict(mixing=False), lr=lr)
        state = method.init()
        start = method.begin(state, ALL)
        seen = dict(sel=ALL, round=0, lr=lr, state=state, measure=None, train=self.train)
        context: Any = SimpleNamespace(**seen)
        end = method.local(context, start)
        server = method.upload(state, ALL, start, end, torch.ones(3)).server
        self.end = np.stack([points(end, layer) for layer in FOUR])
        self.sent = np.stack([points(end, f"mask.{layer}") for layer in FOUR])
        self.server = np.stack([server[f"{layer}.weight"][0].numpy() for layer in FOUR])

    def train(self, loss: Any, start: Params, step: Callable) -> Params:
        """A step of each client, in place of the engine's training on data."""
        ends = []
        for k in range(3):
            p, g = ({n: v[k].clone() for n, v in x.items()} for x in (start, self.gradients))
            ends.append(step(p, p, lambda _, g=g: g, Step(0, self.lr, {}))[0])
        return {n: torch.stack([end[n] for end in ends]) for n in start}


@sliders(
    layer=("Layer i", (1, 2, 3, 4)),
    norm=("Norm of g", (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)),
    first=("First entry ×", (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)),
    lr=("Rate η", (0.01, 0.05, 0.1, 0.2)),
)
def rates_and_masks(
    layer: int = 2, norm: float = 1.0, first: float = 1.0, lr: float = 0.1
) -> Worked:
    """FLAYER: four layers' rates, what clients upload, and the server's mean (Eq. 3 to 9).

    Each client takes one step from zero. The sliders change a layer's gradient at client 1.

    Parameters
    ----------
    layer : {1, 2, 3, 4}
        Which layer, i.
    norm : float
        Norm of its gradient, > 0. All others have norm 1.
    first : float
        Factor on its first entry, before the norm is set.
    lr : float
        The clients' rate, eta.
    """
    gradients = np.random.default_rng(1).normal(size=(4, 3, ENTRIES))
    gradients[layer - 1, 0, 0] *= first
    gradients /= np.linalg.norm(gradients, axis=2, keepdims=True)
    gradients[layer - 1, 0] *= norm
    done = _Round(gradients, lr)
    norms = np.linalg.norm(gradients[:, 0], axis=1)
    rates = np.linalg.norm(done.end[:, 0], axis=1) / norms

    fig, (left, middle, right) = plots.panels(3, sharey=False)
    grid = np.geomspace(0.01, 100, 60)
    for i, curve in enumerate(_curves(grid, lr)):
        shade = str(0.75 - 0.25 * i)
        left.plot(grid, curve, color=shade, lw=1.5, label=f"Layer {i + 1}")
        left.plot(norms[i], rates[i], "o", color=shade, ms=7 if i == layer - 1 else 4)
    left.set(xscale="log", ylim=0)
    left.legend(frameon=False, fontsize=7)
    plots.finish(left, "Norm of a layer's gradient", "Rate", legend=False)
    left.set_title("Rates (dots: client 1)")
    _draw_sent(middle, done)
    _draw_mean(right, done, layer)
    columns = {
        "norm": norms,
        "rate": rates,
        "uploaded": done.sent[:, 0].sum(1),
        "by nobody": (~done.sent.any(1)).sum(1),
    }
    table = pd.DataFrame(columns, [f"layer {i}" for i in (1, 2, 3, 4)]).round(4)
    said = (
        f"At client 1 the gradient of layer {layer} has norm {norm:g}, so its rate is "
        f"{rates[layer - 1] / lr:.2f} times the client's {lr:g}. Of its {ENTRIES} entries the "
        f"{done.sent[layer - 1, 0].sum()} that changed most are uploaded."
    )
    return fig, said, table


def _curves(grid: np.ndarray, lr: float) -> np.ndarray:
    """The rates (layers, n) at gradients of these norms (n,), three norms a round: one a client."""
    unit = np.eye(ENTRIES)[0]
    ends = [_Round(np.stack([norms[:, None] * unit] * 4), lr).end for norms in grid.reshape(-1, 3)]
    return np.linalg.norm(np.concatenate(ends, 1), axis=2) / grid


def _draw_sent(ax: Axes, done: _Round) -> None:
    """By how much entries changed, against the most of their layer; grey where not sent."""
    change = np.abs(done.end) / np.abs(done.end).max(2, keepdims=True)
    shown = np.where(done.sent, change, np.nan)
    for i, part in enumerate(shown):
        left = i * (ENTRIES + 1)
        ax.add_patch(Rectangle((left, 0), ENTRIES, 3, color="0.93", lw=0))
        edges = left + np.arange(ENTRIES + 1)
        ax.pcolormesh(edges, range(4), part, cmap="viridis", vmin=0, vmax=1, ec="w", lw=0.5)
    middle = np.arange(4) * (ENTRIES + 1) + ENTRIES / 2
    ax.set_xticks(middle, [f"Layer {i}" for i in (1, 2, 3, 4)])
    ax.set_yticks(np.arange(3) + 0.5, CLIENTS)
    for text, colour in zip(ax.get_yticklabels(), COLOURS, strict=True):
        text.set_color(colour)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set(xlim=(0, 4 * ENTRIES + 3), ylim=(3, 0), title="Change of entries (grey: not sent)")


def _draw_mean(ax: Axes, done: _Round, layer: int) -> None:
    """What clients have in each entry of a layer, and what the server makes of what they sent."""
    x = np.arange(1, ENTRIES + 1)
    for k, colour in enumerate(COLOURS):
        sent, values = done.sent[layer - 1, k], done.end[layer - 1, k]
        ax.plot(x[sent], values[sent], "o", color=colour, ms=4)
        ax.plot(x[~sent], values[~sent], "o", color=colour, ms=4, mfc="none", alpha=0.6)
    ax.plot(x, done.server[layer - 1], "_", color="k", ms=11, mew=1.5)
    ax.axhline(0, color="0.8", lw=0.8, zorder=0)
    plots.finish(ax, "Entry (hollow: not sent)", "Value", legend=False)
    ax.set_title(f"Layer {layer}: clients, server (dash)")
