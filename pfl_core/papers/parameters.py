"""The parameters of a notebook: checked before anything runs, and the Scope that they ask for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pandas as pd

from pfl_core.data import pools
from pfl_core.experiments import committed, lookup
from pfl_core.experiments import sweep as sweeps
from pfl_core.experiments.experiment import Experiment
from pfl_core.methods.base import METHODS
from pfl_core.papers import base as papers
from pfl_core.papers import report
from pfl_core.papers.base import Paper, Scope
from pfl_core.util import checks


def check(
    known: Iterable[str],
    *,
    profile: str = "quick",
    datasets: list[str] | None = None,
    methods: list[str] | None = None,
    seeds: list[int] | None = None,
    artefacts: list[str] | None = None,
    train: bool = False,
) -> None:
    """ValueError for a parameter that is unknown or of the wrong type.

    known: the artefacts that the notebook may name.
    """
    checks.known("profile:", profile, papers.PROFILES)
    _check_names("datasets", datasets, pools.list_datasets())
    _check_names("methods", methods, (*METHODS, *report.READ_AFTER))
    _check_names("artefacts", artefacts, known)
    if not isinstance(train, bool):
        got = f"train={train!r}: got {type(train).__name__}"
        raise ValueError(f"{got}, allowed is True or False (not a string)")
    whole = isinstance(seeds, list) and all(type(s) is int and s >= 0 for s in seeds)
    if seeds is not None and not whole:
        raise ValueError(f"seeds={seeds!r}: give a list of integers >= 0")


def _check_names(name: str, given: list[str] | None, known: Iterable[str]) -> None:
    if given is not None and not isinstance(given, list):
        some = f"give a list, such as {[next(iter(known))]}"
        raise ValueError(f"{name}={given!r}: {some}; an empty list means the profile's own")
    for value in given or []:
        checks.known(f"{name}:", value, known)


def asked(paper: Paper, *, profile: str = "quick", train: bool = False, **lists: Any) -> Scope:
    """The Scope that a notebook's parameters ask for, checked.

    lists: datasets, methods, seeds, artefacts, as for `check`.
    train: what is only committed does not count as finished.

    Raises ValueError as `check` does, and if the paper has no run of the methods.
    """
    check(paper.artefacts, profile=profile, train=train, **lists)
    some = {name: tuple(v or ()) for name, v in lists.items()}
    scope = Scope(profile, **some, finished=functools.partial(finished, train=train))
    if scope.methods and not paper.planned(scope):
        every = paper.planned(replace(scope, methods=()))
        has = {c.get("method", s.base.method) for s in every for c in s.rows.values()}
        raise ValueError(
            f"methods={list(scope.methods)}: what is asked of {paper.key} has no run of them; it "
            f"has runs of {', '.join(sorted(has)) or 'none'}"
        )
    return scope


def finished(cells: list[Experiment], train: bool) -> pd.DataFrame | None:
    """Rows of Experiments that are all finished, in the store or (unless train) committed.

    None if one is not; nothing is trained.
    """
    try:
        found = [_is_finished(e, train) for e in cells]
    except pools.DatasetMissing:
        return None
    return sweeps.sweep(cells, found=looked_up(train)) if all(found) else None


def looked_up(train: bool) -> Callable[[Experiment], pd.DataFrame | None] | None:
    """Where `sweep` looks before it trains: in results/, unless a notebook is to `train`."""
    return None if train else committed.found


def is_there(experiment: Experiment, train: bool) -> bool:
    """Whether the store has the run of an Experiment, or (unless `train`) results/."""
    return lookup.is_there(experiment) or (not train and committed.find(experiment) is not None)


def _is_finished(experiment: Experiment, train: bool) -> bool:
    # A damaged folder is not: `sweep` would train.
    stored = lookup.stored(experiment) is not None
    return stored or (not train and committed.find(experiment) is not None)


def in_words_of_now(how: dict[str, Any], train: bool) -> bool:
    """Whether to train, of a call that may say it by the name of version 0.2, `recompute`."""
    if "recompute" not in how:
        return train
    print("the parameter recompute is called train now; please write it so")
    return how.pop("recompute")
