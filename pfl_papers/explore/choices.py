"""What an explorer's view returns, and what its controls offer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure


class Shown(NamedTuple):
    """What a view returns."""

    figure: Figure | None  # None where there is nothing to draw
    said: str  # a sentence or two on what is to be seen
    table: pd.DataFrame | None
    code: str  # a line of Python that gives the figure, or its numbers, again


class Choice(NamedTuple):
    """What a control offers."""

    options: tuple  # in their order
    value: Any  # the option that is chosen; a tuple of options for the kind "several"
    kind: str  # "one", "several" or "slide": a list, a list for several options, a slider
    words: tuple[str, ...]  # what the control says for each option


class Choices(dict):
    """The controls of a view, {name: Choice}, filled from the first to the last.

    Parameters
    ----------
    wanted : mapping
        {name: value} to choose. Where a value is not among the options, the default is chosen.
    """

    def __init__(self, wanted: Mapping[str, Any]):
        super().__init__()
        self.wanted = wanted

    def offer(
        self,
        name: str,
        options: Iterable,
        default: Any = None,
        kind: str = "one",
        words: Callable[[Any], Any] = str,
    ) -> Any:
        """Add a control and return what is chosen.

        Parameters
        ----------
        name : str
            The view's parameter that the control sets.
        options : iterable
            What can be chosen.
        default : object, optional
            What is chosen where the wanted value is no option. Without a default that is the first
            option, and all of them for the kind "several".
        kind : {"one", "several", "slide"}
            As for `Choice`.
        words : function of an option -> str
            What the control says for an option.

        Returns
        -------
        object
            An option, or None if there are none; for "several" a tuple of options.
        """
        options, want = tuple(options), self.wanted.get(name)
        if kind == "several":
            value = tuple(option for option in options if option in (want or ()))
            value = value or tuple(options if default is None else default)
        else:
            value = next((v for v in (want, default, *options) if v in options), None)
        self[name] = Choice(options, value, kind, tuple(map(words, options)))
        return value

    @property
    def values(self) -> dict[str, Any]:
        """{name: what is chosen}."""
        return {name: choice.value for name, choice in self.items()}


def arguments(values: Mapping[str, Any]) -> str:
    """Values as the arguments of a call: "clients=10, seed=0"."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
