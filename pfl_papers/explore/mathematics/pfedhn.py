"""pFedHN: one client pulls all, and a linear hypernetwork finds the principal subspace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.linalg import subspace_angles
from sklearn.decomposition import PCA

from pfl_core.analysis import plots
from pfl_papers.explore.mathematics.clients import (
    ALL,
    CLIENTS,
    COLOURS,
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

PLAIN = dict(momentum=0.0, weight_decay=0.0, clip=0.0)  # the hypernetwork's step as printed


def _pulled(wanted: np.ndarray, apart: float, hidden: int, alpha: float) -> np.ndarray:
    """Models of the three clients before and after client 1 alone was visited: (2, 3, 2)."""
    hyper = dict(dim=2, hidden=32, n_hidden=hidden, lr=alpha)
    method = method_for("pfedhn", points_model("layer"), hyper | PLAIN)
    state = method.init()
    state.extra["phi"]["v"][:] = torch.as_tensor(towards(0, apart, 240))
    before, first = method.download(state, ALL), ALL[:1]
    start = method.download(state, first)
    end = {n: v + torch.as_tensor(wanted) for n, v in start.items()}
    after = method.download(method.upload(state, first, start, end, torch.ones(1)), ALL)
    return np.stack([points(p, "layer") for p in (before, after)])


@sliders(
    direction=("Training to (°)", range(0, 360, 15)),
    length=("and how far", (0.1, 0.2, 0.5, 1.0, 2.0)),
    apart=("v₁ to v₂ (°)", range(0, 181, 15)),
    hidden=("Hidden layers", (0, 1, 2, 3)),
    alpha=("Rate α", (0.01, 0.02, 0.05, 0.1)),
)
def pulled(
    direction: int = 60, length: float = 1.0, apart: int = 60, hidden: int = 0, alpha: float = 0.05
) -> Worked:
    """pFedHN: one client's update pulls the models of all (Algorithm 1).

    Parameters
    ----------
    direction, length : int, float
        Where local training moves client 1's model, in degrees, and how far.
    apart : int
        Degrees between the embeddings of clients 1 and 2, of length 1; client 3's lies at 240.
    hidden : int
        Hidden layers of the hypernetwork; 0 is linear.
    alpha : float
        Rate of the hypernetwork and its embeddings.
    """
    wanted = length * towards(direction)[0]
    before, after = _pulled(wanted, apart, hidden, alpha)
    angles = np.arange(0, 181, 15)
    turned = np.array([_pulled(wanted, float(angle), hidden, alpha) for angle in angles])
    follow = (turned[:, 1] - turned[:, 0]) @ wanted / length**2  # (angles, clients)
    fig, (left, right) = plots.panels(2, sharey=False)
    arrow(left, before[0], before[0] + wanted, color="0.6", ls=":")
    left.plot([], [], color="0.6", ls=":", label="Local training of client 1")
    for j, colour in enumerate(COLOURS):
        left.plot(*before[j], "o", color=colour, mfc="w", label=CLIENTS[j])
        arrow(left, before[j], after[j], color=colour)
    finish_plane(left, "Models before and after the server's step")
    curves(right, angles, 100 * follow, apart)
    right.axhline(0, color="0.8", lw=0.8, zorder=0)
    plots.finish(right, "Between embeddings 1 and 2 (degrees)", "Followed (%)", legend=False)
    right.set_title("How far models follow")
    shares = (after - before) @ wanted / length**2
    lengths = np.linalg.norm(after - before, axis=1)
    table = pd.DataFrame({"moved": lengths, "followed": shares}, CLIENTS).round(4)
    said = (
        f"Client 1's model goes {100 * shares[0]:.0f} % of the way that its training went, client "
        f"2's {100 * shares[1]:.0f} % and client 3's {100 * shares[2]:.0f} %, although these were "
        "not visited: all are written by the same weights."
    )
    return fig, said, table


@sliders(
    third=("Client 3 at (°)", range(-60, 61, 10)),
    rounds=("Rounds", (0, 1, 2, 5, 10, 20, 50, 100, 200)),
)
def subspace(third: int = 20, rounds: int = 100) -> Worked:
    """pFedHN, Proposition 1: a linear hypernetwork finds the principal subspace of the solutions.

    Embeddings have one number, so that all models lie on a line. Layers have biases, which fit the
    mean: the line is that of a PCA of centred solutions.

    Parameters
    ----------
    third : int
        Direction in which client 3's own solution lies, in degrees.
    rounds : int
        How many rounds of all three clients are run; each goes half of the way to its own solution.
    """
    solutions = np.concatenate([towards(100, 230), 1.5 * towards(third)])
    aims = stacked(layer=solutions)
    hyper = dict(dim=1, hidden=4, n_hidden=0, lr=0.2)
    method = method_for("pfedhn", points_model("layer"), hyper | PLAIN)
    pca: Any = PCA(1).fit(solutions)
    state, degrees = method.init(), []
    for _ in range(rounds + 1):
        phi, start = state.extra["phi"], method.download(state, ALL)
        weights = phi["head.0.layer.weight.weight"] @ phi["trunk.0.weight"]
        degrees.append(np.degrees(subspace_angles(weights.numpy(), pca.components_.T)[0]))
        end = {n: torch.lerp(v, aims[n], 0.5) for n, v in start.items()}
        state = method.upload(state, ALL, start, end, torch.ones(3))
    written = points(start, "layer")

    fig, (left, right) = plots.panels(2, sharey=False)
    left.axline(pca.mean_, pca.mean_ + pca.components_[0], color="0.6", ls="--", lw=1)
    left.plot([], [], color="0.6", ls="--", label="PCA of the solutions")
    for j, colour in enumerate(COLOURS):
        left.plot(*np.stack([solutions[j], written[j]], 1), color=colour, lw=0.8, ls=":")
        left.plot(*solutions[j], "x", color=colour)
        left.plot(*written[j], "o", color=colour, label=CLIENTS[j])
    finish_plane(left, "Own solutions (x) and models as written")
    right.plot(np.arange(rounds + 1), degrees, color="k", lw=1.5)
    right.set_yscale("log")
    plots.finish(right, "Round", "Degrees", legend=False)
    right.set_title("Angle between the subspaces")
    projected = pca.inverse_transform(pca.transform(solutions))
    lost = [np.sum((made - solutions) ** 2) for made in (written, projected)]
    table = pd.DataFrame({"squared error": lost}, ["hypernetwork", "PCA"]).round(4)
    said = (
        f"After {rounds} rounds the line of the models and that of scikit-learn's PCA are "
        f"{degrees[-1]:.4f} degrees apart."
    )
    return fig, said, table
