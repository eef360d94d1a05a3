"""FedAGHN: a client's row of attention, as p, q and the updates of others change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch

from pfl_core.analysis import plots
from pfl_papers.explore.mathematics.clients import (
    ALL,
    CLIENTS,
    COLOURS,
    CORNERS,
    Worked,
    arrow,
    curves,
    finish_plane,
    method_for,
    points,
    points_model,
    sliders,
    stacked,
    towards,
)


@sliders(
    p=("p", (0.0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)),
    q=("q", tuple(np.arange(0, 10.5, 0.5).tolist())),
    second=("Δ₁ to Δ₂ (°)", range(0, 181, 10)),
    third=("Δ₁ to Δ₃ (°)", range(0, 181, 10)),
)
def attention(p: float = 0.3, q: float = 2.0, second: int = 30, third: int = 120) -> Worked:
    """FedAGHN: how client 1's next model is mixed of all three (Eq. 4 to 6).

    Parameters
    ----------
    p : float
        Strength of the own model, >= 0.
    q : float
        Sharpness of the attention to the others.
    second, third : int
        Degrees between the last update of client 1 and those of clients 2 and 3.
    """
    method: Any = method_for("fedaghn", points_model("layer"), dict(p0=p, q0=q, h=0.0))
    updates = 0.6 * towards(0, second, third)
    start, end = stacked(layer=CORNERS - updates), stacked(layer=CORNERS)
    state = method.upload(method.init(), ALL, start, end, torch.ones(3))
    row = method.weights(state)["layer"][0].numpy()
    mixed = points(method.download(state, ALL[:1]), "layer")[0]
    grid = torch.linspace(0, 10, 101, dtype=torch.float64)
    first = torch.zeros(len(grid), dtype=torch.int64)
    own, similar = state.extra["p"][first], state.extra["s"][first]
    rows = method.attention(own, grid[:, None], similar, first)[:, 0].numpy()

    fig, (left, right) = plots.panels(2, sharey=False)
    for j, colour in enumerate(COLOURS):
        left.plot(*np.stack([CORNERS[j], mixed], 1), color=colour, lw=8 * row[j], alpha=0.25)
        arrow(left, CORNERS[j] - updates[j], CORNERS[j], color=colour)
        left.plot(*CORNERS[j], "o", color=colour, label=f"{CLIENTS[j]}: weight {row[j]:.2f}")
    left.plot(*mixed, "k*", ms=9, label="Mixed for client 1")
    finish_plane(left, "Models with their last updates")
    curves(right, grid.numpy(), rows, q)
    right.set_ylim(0, 1)
    plots.finish(right, "Sharpness q", "Weight in client 1's next model", legend=False)
    right.set_title(f"Weights at p = {p:g}")
    s = similar[0, 0].numpy()
    table = pd.DataFrame({"s": s, "a": row * (1 + p), "w": row}, CLIENTS).round(4)
    said = (
        f"Client 1 keeps p/(1+p) = {row[0]:.3f} of itself, whatever q is. The rest goes to client "
        f"2 ({row[1]:.3f}) and client 3 ({row[2]:.3f}), by the cosines {s[1]:.2f} and {s[2]:.2f} "
        "of their updates with its own."
    )
    return fig, said, table
