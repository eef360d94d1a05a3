"""The central equation of each paper, worked by the library on three clients small enough to draw.

A view for each takes what its sliders choose and returns a `Shown`; `show` puts it under its
sliders, or draws it once where nobody can move them. Models, updates and embeddings are points of
a plane, so that what the server does with them is a picture. The numbers come from the methods' own
hooks, over tasks that are made here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from pfl_core.util import checks
from pfl_papers.explore import widgets
from pfl_papers.explore.choices import Choices
from pfl_papers.explore.mathematics.clients import VIEWS
from pfl_papers.explore.mathematics.fedaghn import attention
from pfl_papers.explore.mathematics.fedper import split
from pfl_papers.explore.mathematics.flayer import rates_and_masks
from pfl_papers.explore.mathematics.pfedhn import pulled, subspace
from pfl_papers.explore.mathematics.pfedla import layer_weights

__all__ = [
    "VIEWS",
    "attention",
    "choices",
    "layer_weights",
    "pulled",
    "rates_and_masks",
    "show",
    "split",
    "subspace",
]


def choices(name: str, wanted: Mapping[str, Any]) -> Choices:
    """The sliders of a view: what they can be, and the defaults of its parameters.

    Parameters
    ----------
    name : str
        One of `VIEWS`.
    wanted : mapping
        What is chosen in place of the defaults.
    """
    view, sliders = VIEWS[name]
    defaults, found = inspect.signature(view).parameters, Choices(wanted)
    for parameter, (_, options) in sliders.items():
        found.offer(parameter, options, defaults[parameter].default, "slide")
    return found


def show(name: str, *, interactive: str = "auto", **start: Any) -> None:
    """Show a view under its sliders; where nobody can move them, as they stand at first.

    Parameters
    ----------
    name : str
        One of `VIEWS`.
    interactive : {"auto", "yes", "no"}
        Whether there are sliders, as for `widgets.live`.
    **start
        What sliders have chosen at first.

    Raises
    ------
    ValueError
        If there is no such view or slider.
    """
    checks.known("view", name, VIEWS)
    view, sliders = VIEWS[name]
    for parameter in start:
        checks.known(f"slider of {name}:", parameter, sliders)
    offered = functools.partial(choices, name)
    if not widgets.live(interactive):
        with widgets.styled():
            widgets.static(view(**offered(start).values))
        return
    panel = widgets.Panel(offered, start, lambda values: widgets.tried(view, values))
    slider: Any
    for parameter, slider in panel.controls.items():
        slider.description, slider.continuous_update = sliders[parameter][0], True
    widgets.display(panel.box)
