"""FedPer: what is averaged and what stays, over three clients who divide one plane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from torch import nn

from pfl_core import models
from pfl_core.analysis import plots
from pfl_core.data.client_data import ClientData
from pfl_core.data.federation import Federation
from pfl_core.engine.simulate import simulate
from pfl_core.experiments.build import train_config
from pfl_core.experiments.experiment import Experiment
from pfl_core.methods.base import Method, make_method
from pfl_core.methods.task import Task
from pfl_core.stacked import Params
from pfl_core.util import draws
from pfl_papers.explore.mathematics.clients import CLIENTS, COLOURS, Worked, sliders


def _sectors(points: np.ndarray, turn: float) -> np.ndarray:
    """Classes 0 to 2 of points (n, 2): thirds of the plane, turned by so many degrees."""
    degrees = np.degrees(np.arctan2(points[:, 1], points[:, 0]))
    return ((degrees - turn) % 360 // 120).astype(int)


SIDE = 60  # of the grid on which regions are asked for


def _network() -> models.Net:
    """Two hidden layers of 16 on points of the plane: three blocks, of which K_P are personal."""
    with draws.seeded(0):
        units: dict[str, dict[str, nn.Module]] = {}
        inputs = 2
        for name in ("fc1", "fc2"):
            units[name] = {name: nn.Linear(inputs, 16), "relu": nn.ReLU()}
            inputs = 16
        units["fc"] = {"fc": nn.Linear(inputs, 3)}
        return models.Net(units).double()


def _trained(personal: int, points: np.ndarray, labels: np.ndarray) -> tuple[Method, Params]:
    """FedPer after 20 rounds of 5 full batches: the method, and the clients' models as served."""
    count = len(points[0])
    indices = [*np.arange(3 * count).reshape(3, -1)]
    fed = Federation(points.reshape(-1, 2), labels.ravel(), indices, classes=3)
    how: dict[str, Any] = dict(
        rounds=20, epochs=5, lr=1.0, batch=count, eval_every=20, eval_after=False
    )
    settings = train_config(Experiment(dataset="own", clients=3, head_depth=personal, **how))
    data = ClientData(fed, seed=0, holdout=0, dtype=torch.float64)
    method = make_method("fedper").bind(Task(_network(), data.n, data.label_counts, settings))
    return method, simulate(method, data, executor="threads", workers=1).before


@sliders(
    personal=("Personal: K_P", (0, 1, 2, 3)),
    turn=("Turned by (°)", range(0, 121, 15)),
    samples=("Samples each", (5, 10, 20, 40, 80)),
)
def split(personal: int = 1, turn: int = 120, samples: int = 20) -> Worked:
    """FedPer: what travels and what clients learn, as the split moves (Algorithm 1).

    The clients divide the same plane into three classes. Client 2 has turned the borders by `turn`
    degrees, client 3 by twice that.

    Parameters
    ----------
    personal : {0, 1, 2, 3}
        K_P, how many of the last blocks are personal: 0 is FedAvg, 3 is training alone.
    turn : int
        0 makes clients alike; with 120 they have the same borders, and other names for the classes.
    samples : int
        How many training samples a client has.
    """
    points = np.random.default_rng(0).uniform(-1, 1, (3, samples, 2))
    labels = np.stack([_sectors(own, turn * j) for j, own in enumerate(points)])
    method, served = _trained(personal, points, labels)
    side = np.linspace(-1, 1, SIDE)
    plane = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
    asked = torch.as_tensor(plane)
    found = [method.logits({n: v[j] for n, v in served.items()}, asked).argmax(1) for j in range(3)]
    right = [np.mean(c.numpy() == _sectors(plane, turn * j)) for j, c in enumerate(found)]

    fig, (bars, *axes) = plots.panels(4, columns=4, size=(2.4, 2.4), sharey=False)
    table = _blocks(method)
    _draw_blocks(bars, table)
    pale = ListedColormap([0.35 * np.array(to_rgb(c)) + 0.65 for c in COLOURS])
    for j, ax in enumerate(axes):
        regions = found[j].numpy().reshape(SIDE, SIDE)
        ax.imshow(regions, extent=(-1, 1, -1, 1), origin="lower", cmap=pale, vmin=0, vmax=2)
        ax.scatter(*points[j].T, c=[COLOURS[c] for c in labels[j]], s=12, ec="k", lw=0.4)
        ax.set(xticks=[], yticks=[], title=f"{CLIENTS[j]}: {100 * right[j]:.1f} % right")
    travel = table.parameters[table.place == "averaged"].sum()
    said = (
        f"K_P = {personal}: {travel} of {table.parameters.sum()} parameters travel and are "
        f"averaged. Clients label {100 * np.mean(right):.1f} % of the plane as they should."
    )
    return fig, said, table


def _blocks(method: Method) -> pd.DataFrame:
    """How many parameters each block has, and whether they are averaged."""
    size, blocks = method.task.initial, method.task.layers_by("block")
    shared = [method.is_shared(names[0]) for names in blocks.values()]
    columns = {
        "parameters": [sum(size[n].numel() for n in names) for names in blocks.values()],
        "place": ["averaged" if here else "personal" for here in shared],
    }
    return pd.DataFrame(columns, list(blocks))


def _draw_blocks(ax: Axes, table: pd.DataFrame) -> None:
    """A bar for each block, from the input at the top."""
    for place, shade in (("averaged", "0.25"), ("personal", "0.75")):
        own = table.parameters.where(table.place == place)
        ax.barh(table.index, own, color=shade, label=place)
    ax.invert_yaxis()
    ax.legend(frameon=False, fontsize=7, loc="lower right")
    plots.finish(ax, "Parameters", "", legend=False)
    ax.set_title("Blocks of the network")
