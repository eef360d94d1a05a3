"""pFedLA: who is mixed into a client's layers, as one layer of another client drifts away."""

from __future__ import annotations

import copy
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
)


@sliders(
    drift=("Drift", (0.0, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0)),
    layer=("of layer", (1, 2)),
    rounds=("Rounds", (1, 2, 5, 10, 20, 40, 80)),
    rate=("Rate", (0.0, 0.005, 0.1, 0.5, 1.0, 2.0)),
    sign=("Sign", ("descent", "literal")),
)
def layer_weights(
    drift: float = 1.5, layer: int = 2, rounds: int = 40, rate: float = 1.0, sign: str = "descent"
) -> Worked:
    """pFedLA: client 1's weights, as a layer of client 3 drifts away (Eq. 4 to 6, 10 and 11).

    In every round each client's layers go half of the way to optima of its own. These lie close
    together, but for one layer of client 3.

    Parameters
    ----------
    drift : float
        How far that layer's optimum lies from where it would be.
    layer : {1, 2}
        Which layer.
    rounds : int
        How many rounds are run.
    rate : float
        Rate of the hypernetworks.
    sign : {"descent", "literal"}
        Direction of their step.
    """
    names = ("layer1", "layer2")
    hyper = dict(lr=rate, hn_sign=sign, dim=4, hidden=8)
    method: Any = method_for("pfedla", points_model(*names), hyper)
    optima, at = {name: 0.3 * CORNERS for name in names}, names[layer - 1]
    optima[at] = optima[at] + [[0, 0], [0, 0], drift * CORNERS[2]]
    aims, state, course = stacked(**optima), method.init(), []
    for _ in range(rounds + 1):
        course.append([rows[0].numpy() for rows in method.weights(state).values()])
        start, theta = method.begin(state, ALL), copy.deepcopy(state.extra["theta"])
        end = {n: torch.lerp(v, aims[n], 0.5) for n, v in start.items()}
        state = method.upload(state, ALL, start, end, torch.ones(3))
    course = np.array(course)  # (rounds + 1, layers, clients)

    fig, (plane, *axes) = plots.panels(3, sharey=False)
    for j, colour in enumerate(COLOURS):
        plane.plot(*optima[at][j], "x", color=colour)
        plane.plot(*points(theta, at)[j], "o", color=colour, label=CLIENTS[j])
    arrow(plane, 0.3 * CORNERS[2], optima[at][2], color=COLOURS[2], ls=":", lw=0.8)
    plane.plot(*points(start, at)[0], "k*", ms=9, label="Mixed for client 1")
    finish_plane(plane, f"Layer {layer}: optima (x) and models")
    for i, ax in enumerate(axes):
        curves(ax, np.arange(rounds + 1), course[:, i], rounds)
        ax.set_ylim(0, 1)
        here = f"client 3 drifts by {drift:g}" if i == layer - 1 else "nobody drifts"
        plots.finish(ax, "Round", "Weight in client 1's next model", legend=False)
        ax.set_title(f"Layer {i + 1}: {here}")
    table = pd.DataFrame(course[-1].T, CLIENTS, ["layer 1", "layer 2"]).round(4)
    last, other = course[-1, :, 2], 3 - layer
    said = (
        f"After {rounds} rounds client 3 has the weight {last[layer - 1]:.3f} in layer {layer} of "
        f"client 1's next model, and {last[other - 1]:.3f} in layer {other}. All weights began at "
        "1/3."
    )
    return fig, said, table
