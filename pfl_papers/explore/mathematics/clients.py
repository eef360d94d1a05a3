"""Three clients in a plane: their tasks, their pictures, and the list of views over them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from pfl_core.analysis import plots
from pfl_core.engine.process import one_thread
from pfl_core.experiments.build import train_config
from pfl_core.experiments.experiment import Experiment
from pfl_core.methods.base import Method, make_method
from pfl_core.methods.task import Task
from pfl_core.stacked import Params
from pfl_papers.explore.choices import Shown, arguments

CLIENTS = ["Client 1", "Client 2", "Client 3"]
LOOKS = list(plots.looks(CLIENTS).values())
COLOURS = [look.colour for look in LOOKS]
ALL = torch.arange(3)

Slider = tuple[str, Sequence]  # its label, and what it can be
Worked = tuple[Figure, str, pd.DataFrame]  # a figure, a sentence on it, its numbers
# {name: (view, its sliders)}
VIEWS: dict[str, tuple[Callable[..., Shown], dict[str, Slider]]] = {}


def sliders(**offered: Slider) -> Callable:
    """Make a view of a function that returns what is `Worked`, and list it in `VIEWS`.

    It has a slider for each parameter, and returns a `Shown` with the call that gives it again.
    """

    def view(work: Callable[..., Worked]) -> Callable[..., Shown]:
        defaults = {name: p.default for name, p in inspect.signature(work).parameters.items()}

        @functools.wraps(work)
        def shown(**chosen: Any) -> Shown:
            values = defaults | chosen
            with torch.no_grad(), one_thread():
                fig, said, table = work(**values)
            call = f"mathematics.{work.__name__}({arguments(values)}).figure"
            return Shown(fig, said, table, f"from pfl_papers.explore import mathematics; {call}")

        VIEWS[work.__name__] = shown, offered
        return shown

    return view


# -- models as points ------------------------------------------------------------------------------


def method_for(name: str, model: nn.Module, hyper: Mapping[str, Any], **settings: Any) -> Method:
    """A method in float64 over three clients of equal size; settings are an Experiment's."""
    experiment = Experiment(dataset="own", clients=3, dtype="float64", **settings)
    counts = torch.ones(3, 1, dtype=torch.int64)
    task = Task(model.double(), counts[:, 0], counts, train_config(experiment))
    return make_method(name, **hyper).bind(task)


def points_model(*layers: str, size: int = 2) -> nn.Module:
    """A model whose layers are points of `size` numbers, all zero at first."""
    model = nn.ModuleDict({layer: nn.Linear(size, 1, bias=False) for layer in layers})
    for weight in model.parameters():
        nn.init.zeros_(weight)
    return model


def stacked(**points: np.ndarray) -> dict[str, Tensor]:
    """Points {layer: (S, size)} as S models."""
    return {f"{layer}.weight": torch.as_tensor(v)[:, None] for layer, v in points.items()}


def points(models: Params, layer: str = "layer") -> np.ndarray:
    """The points (S, size) of a layer of S models."""
    return models[f"{layer}.weight"][:, 0].numpy().copy()


def towards(*degrees: float) -> np.ndarray:
    """Points (n, 2) at distance 1 in these directions."""
    radians = np.radians(degrees)
    return np.stack([np.cos(radians), np.sin(radians)], 1)


CORNERS = towards(90, 210, 330)


# -- pictures --------------------------------------------------------------------------------------


def arrow(ax: Axes, start: np.ndarray, end: np.ndarray, **style: Any) -> None:
    """Draw an arrow that counts in the limits of the axes."""
    how = dict(arrowstyle="-|>", lw=1.3, shrinkA=0, shrinkB=0, mutation_scale=8) | style
    ax.annotate("", xy=tuple(end), xytext=tuple(start), arrowprops=how)
    ax.update_datalim([start, end])


def finish_plane(ax: Axes, title: str) -> None:
    """Finish a picture of points: equal units, no ticks, the legend below."""
    ax.margins(0.12)
    ax.autoscale_view()
    ax.set(xticks=[], yticks=[], title=title)
    ax.set_aspect("equal", adjustable="datalim")
    ax.spines[:].set_color("0.8")
    place: dict[str, Any] = dict(loc="upper left", bbox_to_anchor=(0, -0.01), ncols=2)
    ax.legend(frameon=False, fontsize=7, handletextpad=0.3, **place)


def curves(ax: Axes, x: np.ndarray, lines: np.ndarray, at: float) -> None:
    """Draw a curve of `lines` (E, 3) over x (E,) for each client, with a dot where x is `at`."""
    here = int(np.abs(x - at).argmin())
    for line, look in zip(lines.T, LOOKS, strict=True):
        ax.plot(x, line, color=look.colour, ls=(0, look.dash) if look.dash else "-", lw=1.5)
        ax.plot(x[here], line[here], "o", color=look.colour, ms=4)
    ax.axvline(x[here], color="0.6", lw=0.8, ls=":", zorder=0)
