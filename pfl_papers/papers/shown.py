"""What a paper's file is written in: values by profile, columns and rows, and what a table shows.

`SHOWN` of a paper has a line for each table and figure. It names columns and rows, which are
changes to the artefact's setting, in the dicts `COLUMNS` and `ROWS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pfl_core.experiments.experiment import Experiment


class At(NamedTuple):
    """A value that hangs on the profile.

    medium and quick are the paper's where they are not said, smoke is quick's. `...` is no value:
    the field keeps its default.
    """

    paper: Any = ...
    medium: Any = None
    quick: Any = None
    smoke: Any = None

    def value(self, profile: str) -> Any:
        """What it is at a profile, `...` where it has no value."""
        quick = self.paper if self.quick is None else self.quick
        every = {
            "paper": self.paper,
            "medium": self.paper if self.medium is None else self.medium,
            "quick": quick,
            "smoke": quick if self.smoke is None else self.smoke,
        }
        return every[profile]


def at(profile: str, said: Any) -> Any:
    """What a value is at a profile: itself if it is no `At`."""
    return said.value(profile) if isinstance(said, At) else said


def fields_at(profile: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an Experiment at a profile: later parts win, and dicts in them are merged."""
    out: dict[str, Any] = {}
    for part in parts:
        for name, said in part.items():
            value = at(profile, said)
            if isinstance(value, Mapping):
                out[name] = fields_at(profile, out.get(name, {}), value)
            elif value is not ...:
                out[name] = value
    return out


# Changes to an Experiment, or what makes them of it; values in them may be an `At`.
Changes = dict[str, Any] | Callable[[Experiment], dict[str, Any]]
# Names of rows, or {label: name} where a row is called otherwise than what it is; may be an `At`.
Names = Any


def changes_at(profile: str, base: Experiment, changes: Changes) -> dict[str, Any]:
    """What changes `base` at a profile."""
    return fields_at(profile, changes(base) if callable(changes) else changes)


class Column(NamedTuple):
    """A column of a table.

    Attributes
    ----------
    dataset : str
        The paper's data set.
    changes : Changes
        To the artefact's setting.
    rows : Names
        The only ones that it has; () for all that the artefact shows.
    """

    dataset: str
    changes: Changes = {}
    rows: Names = ()


@dataclass(frozen=True)
class Shown:
    """What a table or figure shows, as far as it is run at a profile; each may be an `At`.

    Attributes
    ----------
    columns : sequence of str, or At
        Labels in the paper's `COLUMNS`.
    rows : Names
        In its `ROWS`.
    """

    columns: Any
    rows: Names

    def labels(self, profile: str) -> list[str]:
        """Those of its columns at a profile."""
        return list(at(profile, self.columns))


def rows_at(
    profile: str, base: Experiment, every: Mapping[str, Changes], names: Names
) -> dict[str, dict[str, Any]]:
    """Rows by label as changes to `base`.

    Parameters
    ----------
    profile : str
        One of `PROFILES`.
    base : Experiment
        Of their column.
    every : {name: Changes}
        All rows of the paper.
    names : Names
        Which of them.
    """
    names = at(profile, names)
    named = names if isinstance(names, Mapping) else {name: name for name in names}
    return {label: changes_at(profile, base, every[name]) for label, name in named.items()}


def use(method: str, **args: Any) -> dict[str, Any]:
    """Changes to an Experiment that make it run a method with these hyper-parameters."""
    return dict(method=method, method_args=args)


def without_probes(rows: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows (changes to a setting) of which nothing is recorded that no figure shows."""
    return {row: changes | {"record": ()} for row, changes in rows.items()}


def drawn_anew(base: Experiment) -> Experiment:
    """An Experiment whose clients are drawn for each seed, and not those of a released script."""
    released = ("numpy_seed", "class_size")
    args = {name: v for name, v in base.partition_args.items() if name not in released}
    return replace(base, partition_args=args)
