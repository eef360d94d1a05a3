"""The parameters of a notebook: checked before anything runs, and the Scope that they ask for."""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from pfl_core.data import pools
from pfl_core.experiments import lookup
from pfl_core.experiments import sweep as sweeps
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.keys import ARGS
from pfl_core.methods.base import METHODS
from pfl_core.util import checks
from pfl_papers.evidence import committed, contrasts, diverged
from pfl_papers.papers import base as papers
from pfl_papers.papers import overrides as changes
from pfl_papers.papers.base import Paper, Scope, Sweep

INJECTED = "# Parameters\n"  # the first line of the cell that papermill adds


def check(
    known: Iterable[str],
    *,
    profile: str = "quick",
    datasets: list[str] | None = None,
    methods: list[str] | None = None,
    seeds: list[int] | None = None,
    artefacts: list[str] | None = None,
    overrides: dict[str, Any] | None = None,
    train: bool = False,
) -> None:
    """Check a notebook's parameters.

    Parameters
    ----------
    known : iterable of str
        The artefacts that the notebook may name.
    profile, datasets, methods, seeds, artefacts, overrides, train
        As the notebook has them; None and empty ones mean the profile's own.

    Raises
    ------
    ValueError
        For a parameter that is unknown or of the wrong type.
    """
    checks.known("profile:", profile, papers.PROFILES)
    check_list("datasets", datasets, pools.list_datasets())
    check_list("methods", methods, (*METHODS, *contrasts.READ_AFTER))
    check_list("artefacts", artefacts, known)
    if not isinstance(train, bool):
        got = f"train={train!r}: got {type(train).__name__}"
        raise ValueError(f"{got}, allowed is True or False (not a string)")
    whole = isinstance(seeds, list) and all(type(s) is int and s >= 0 for s in seeds)
    if seeds is not None and not whole:
        raise ValueError(f"seeds={seeds!r}: give a list of integers >= 0")
    changes.check({} if overrides is None else overrides)


def check_list(name: str, given: Any, known: Iterable[str]) -> None:
    """Raise ValueError unless a parameter is None or a list of what is known."""
    if given is not None and not isinstance(given, list):
        some = f"give a list, such as {[next(iter(known))]}"
        raise ValueError(f"{name}={given!r}: {some}; an empty list means the profile's own")
    for value in given or []:
        checks.known(f"{name}:", value, known)


def asked(
    paper: Paper,
    *,
    profile: str = "quick",
    overrides: dict[str, Any] | None = None,
    train: bool = False,
    shown: Callable[[Scope, str], object] = lambda scope, artefact: None,
    **lists: Any,
) -> Scope:
    """Return the Scope that a notebook's parameters ask for, checked.

    Parameters
    ----------
    paper : Paper
    profile : str
    overrides : dict, optional
        As for `check`.
    train : bool
        What is only committed does not count as finished.
    shown : callable
        (scope, artefact) -> what there is to show of it without a run, None for nothing.
    **lists
        datasets, methods, seeds, artefacts, as for `check`.

    Raises
    ------
    ValueError
        As `check` does, for artefacts, data and methods that select no run, and for overrides
        that change none or that a run cannot have.
    """
    check(paper.artefacts, profile=profile, overrides=overrides, train=train, **lists)
    some: dict[str, Any] = {name: tuple(v or ()) for name, v in lists.items()}
    scope = Scope(profile, **some, finished=functools.partial(finished, train=train))
    _check_selection(paper, scope, shown)
    if overrides:
        _check_overrides(paper, scope, overrides)
    return replace(scope, overrides=overrides or {})


def _check_selection(paper: Paper, scope: Scope, shown: Callable[[Scope, str], object]) -> None:
    if scope.artefacts or scope.datasets or scope.methods:
        wanted = scope.artefacts or tuple(paper.artefacts)
        every = paper.planned(replace(scope, methods=()))
        has = {a: _methods_of(s for s in every if s.artefact == a) for a in wanted}
        _check_runs(paper, scope, [a for a, some in has.items() if not some], shown)
        _check_methods(paper, scope, has, shown)
        if idle := [d for d in scope.datasets if d not in _data_sets(every)]:
            at = f"at profile {scope.profile}"
            print(f"datasets: {', '.join(idle)}: no run of {paper.key} {at} has it")


def _check_overrides(paper: Paper, scope: Scope, given: dict[str, Any]) -> None:
    # All runs are made with them, so that the Experiments say what they cannot have.
    usual = _without_tuning(paper, scope)
    for field in given.keys() & ARGS.keys():
        names = dict.fromkeys(given.get(ARGS[field], getattr(e, ARGS[field])) for e in usual)
        taken = {name: changes.arguments(field, name) for name in names}
        for argument in given[field]:
            if not any(argument in known for known in taken.values()):
                listed = "; ".join(f"{n}: {', '.join(of)}" for n, of in taken.items() if of)
                raise ValueError(
                    f"overrides={{{field!r}: {{{argument!r}: ...}}}}: no {ARGS[field]} of these "
                    f"runs has it; they have {listed or 'none'}"
                )
    try:
        made = _without_tuning(paper, replace(scope, overrides=given))
    except (TypeError, ValueError) as error:
        raise ValueError(f"overrides={given}: a run cannot have them: {error}") from None
    known = {json.dumps(e.plain()) for e in usual}
    changed = sum(json.dumps(e.plain()) not in known for e in made)
    if not changed:
        raise ValueError(
            f"overrides={given}: these {len(usual)} runs have such values already, or their rows "
            "say others; leave overrides out"
        )
    words = changes.in_words(given)
    print(f"overrides: {words}: {changed} of {len(made)} runs are {changes.UNLIKE}")


def _without_tuning(paper: Paper, scope: Scope) -> list[Experiment]:
    planned = [s for s in paper.planned(scope) if s.artefact != papers.TUNING]
    return [e for s in planned for e in s.experiments()]


def _data_sets(planned: Iterable[Sweep]) -> set[str]:
    changes = [
        (s.base.dataset, c) for s in planned for c in (*s.rows.values(), *s.columns.values())
    ]
    return {c.get("dataset", own) for own, c in changes}


def _methods_of(planned: Iterable[Sweep]) -> set[str]:
    # By their own names, and by those of their rows.
    rows = [(s, label, changes) for s in planned for label, changes in s.rows.items()]
    return {n for s, label, c in rows for n in (c.get("method", s.base.method), label)}


def _check_runs(
    paper: Paper, scope: Scope, without: list[str], shown: Callable[[Scope, str], object]
) -> None:
    # Of artefacts that are named each has to be run, else one of all.
    if not scope.artefacts and len(without) < len(paper.artefacts):
        return
    drawn = [a for a in without if not paper.missing(scope, a) and not _is_ever_run(paper, a)]
    none = [a for a in without if a not in drawn and shown(scope, a) is None]
    if not none or (not scope.artefacts and len(none) < len(paper.artefacts)):
        return
    alike: dict[str, list[str]] = {}
    for artefact, data in data_of(paper, scope.profile).items():
        alike.setdefault(" or ".join(data), []).append(artefact)
    there = "; ".join(f"{', '.join(names)} with {data}" for data, names in alike.items())
    of = f" of {', '.join(none)}" if scope.artefacts else ""
    names = ("artefacts", "datasets", "methods", "seeds")
    given = said({name: getattr(scope, name) for name in names})
    raise ValueError(
        f"{given}: {paper.key} has no such run{of} at profile {scope.profile}; it has "
        f"{there or 'none'}. Name what goes together, or leave a parameter out"
    )


def _is_ever_run(paper: Paper, artefact: str) -> bool:
    # Some figures show how data are dealt, which no run is needed for.
    return bool(paper.planned(Scope("paper"), artefact))


def data_of(paper: Paper, profile: str) -> dict[str, list[str]]:
    """{artefact that is run at a profile: the data sets of which each alone gives it runs}."""
    names = {name for about in paper.artefacts.values() for name in about.data}
    known = [d for d in pools.list_datasets() if d in names.union(*map(_stand_ins, names))]
    out: dict[str, list[str]] = {a: [] for a in paper.artefacts}
    for data in known:
        for artefact in {s.artefact for s in paper.planned(Scope(profile, (data,)))} & out.keys():
            out[artefact].append(data)
    return {artefact: data for artefact, data in out.items() if data}


def _stand_ins(name: str) -> tuple[str, ...]:
    return papers.STAND_INS.get(name, ())


def said(lists: Mapping[str, Any]) -> str:
    """The lists that were given, as a message says them."""
    return ", ".join(f"{name}={list(given)}" for name, given in lists.items() if given)


def _check_methods(
    paper: Paper, scope: Scope, has: dict[str, set[str]], shown: Callable[[Scope, str], object]
) -> None:
    # Each has to be run in some artefact, and each artefact that is named needs one of them.
    def is_there(method: str, artefact: str) -> bool:
        alone = replace(scope, methods=(method,))
        return method in has[artefact] or shown(alone, artefact) is not None

    found = {a: {m for m in scope.methods if is_there(m, a)} for a in has}
    none = [m for m in scope.methods if not any(m in some for some in found.values())]
    bare = [a for a in scope.artefacts if has[a] and not found[a]]
    if not scope.methods or not (none or bare):
        return
    what = f"{', '.join(bare)} of {paper.key}" if bare else f"what is asked of {paper.key}"
    known = sorted(set().union(*(has[a] for a in bare or has)) & {*METHODS})
    read = [(m, contrasts.READ_AFTER[m]) for m in none if m in contrasts.READ_AFTER]
    raise ValueError(
        f"methods={list(scope.methods)}: {what} has no run of {', '.join(none or scope.methods)}; "
        f"it has runs of {', '.join(known) or 'none'}"
        + "".join(f"; {row} is read from runs of {method}: name that" for row, method in read)
    )


def finished(cells: list[Experiment], train: bool) -> pd.DataFrame | None:
    """Rows of Experiments that are all finished, in the store or (unless train) committed.

    None if one is not; nothing is trained.
    """
    try:
        found = [_is_finished(e, train) for e in cells]
    except pools.DatasetMissing:
        return None
    if not all(found):
        return None
    return diverged.ended(sweeps.sweep(cells, found=looked_up(train)))


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


def check_injected(notebook: dict[str, Any]) -> None:
    """Check the names of parameters that papermill gave a notebook; the first thing it does.

    Understands `recompute`, which is `train` since version 0.3.

    Parameters
    ----------
    notebook : dict
        Its `globals()`, in which `In` holds the cells that ran. papermill writes all that it is
        given into a cell of its own, after that of the parameters.

    Raises
    ------
    ValueError
        For a name that is none of the parameters.
    """
    cells = notebook.get("In", [])
    at = next((i for i, cell in enumerate(cells) if cell.startswith(INJECTED)), 0)
    if not at:
        return
    names, given = (_assigned(cells[i]) for i in (at - 1, at))
    if "recompute" in given and "recompute" in notebook:  # not when the cell runs again
        notebook["train"] = in_words_of_now(notebook, notebook["train"])
    for name in (n for n in given if n != "recompute"):
        checks.known("parameter", name, names, "give papermill -p only what the notebook has")


def _assigned(cell: str) -> list[str]:
    # NAME = value and NAME: type = value, as papermill sees and writes them.
    targets = (
        n.target if isinstance(n, ast.AnnAssign) else n.targets[0]
        for n in ast.parse(cell).body
        if isinstance(n, ast.Assign | ast.AnnAssign)
    )
    return [t.id for t in targets if isinstance(t, ast.Name)]


def in_words_of_now(how: dict[str, Any], train: bool) -> bool:
    """Whether to train, of a call that may say it by the name of version 0.2, `recompute`."""
    if "recompute" not in how:
        return train
    print("the parameter recompute is called train now; please write it so")
    return how.pop("recompute")
