"""A reader's changes to what a paper runs, `overrides`: which there are, and how results say so.

Rows of such runs have them in their profile: "medium, not the paper's setting (rounds=400)". So
every caption has them, and whatever compares with a paper finds that the profile is none of its.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from pfl_core import models
from pfl_core.data import partition as partitions
from pfl_core.experiments import settings
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.keys import ARGS
from pfl_core.methods.base import METHODS
from pfl_core.util import checks, fields

# {field of an Experiment: value}, with arguments as {"method_args": {name: value}}.
Overrides = Mapping[str, Any]
UNLIKE = "not the paper's setting"
# What other parameters of a notebook choose, and what its figures rest on.
_CHOSEN = {"dataset": "datasets", "method": "methods", "seed": "seeds"}
_KEPT = ("init_from", "new_head", "adopt", "finetune", "tags", *settings.SILENT)
FIELDS = {
    f.name: fields.kind(f)
    for f in dataclasses.fields(Experiment)
    if f.name not in (*_CHOSEN, *_KEPT)
}
# Of these a row has what it makes of the setting's value: pFedHN has five times as many rounds.
FOLLOWED = ("rounds", "steps", "epochs", "eval_every", "clients", "participation")


def check(given: Any) -> None:
    """Raise ValueError unless `given` is a dict of fields that can be overridden.

    Ranges of values are checked by the Experiments that they change.
    """
    if not isinstance(given, dict):
        raise ValueError(
            f"overrides={given!r}: give a dict, such as {{'rounds': 400}}; for papermill "
            "-y 'overrides: {rounds: 400}'"
        )
    for name, value in given.items():
        if name in _CHOSEN:
            raise ValueError(f"overrides={{{name!r}: ...}}: choose with {_CHOSEN[name]}=[...]")
        checks.known("overrides:", name, FIELDS)
        if name in ARGS and not (isinstance(value, dict) and value):
            raise ValueError(
                f"overrides={{{name!r}: {value!r}}}: give a dict of arguments and their values"
            )
        checks.kind("overrides", name, value, FIELDS[name])


def overridden(experiment: Experiment, given: Overrides, setting: bool = False) -> Experiment:
    """Return an Experiment, and what it starts from, with a reader's changes.

    Arguments change where the method, model or partition has them.

    Parameters
    ----------
    experiment : Experiment
    given : mapping
        As `check` takes it.
    setting : bool
        Whether it is the setting that rows vary; else the fields in `FOLLOWED` stay.
    """
    changes = {n: v for n, v in given.items() if setting or n not in FOLLOWED}
    for name in changes.keys() & ARGS.keys():
        taken = arguments(name, changes.get(ARGS[name], getattr(experiment, ARGS[name])))
        changes[name] = {n: v for n, v in changes[name].items() if n in taken}
    if changes and experiment.earlier:
        changes["init_from"] = overridden(experiment.earlier, given, setting)
    return experiment.but(**changes) if changes else experiment


def arguments(field: str, name: str) -> list[str]:
    """The arguments that a field holds ("method_args") of a method, model or partition."""
    if field == "method_args":
        return [f.name for f in dataclasses.fields(METHODS[name])] if name in METHODS else []
    return [*models.arguments(name)] if field == "model_args" else [*partitions.arguments(name)]


def in_words(given: Overrides) -> str:
    """What is overridden: "rounds=400, partition_args.alpha=0.5"."""
    each = {n: v if n in ARGS else {"": v} for n, v in given.items()}
    return ", ".join(
        f"{name}{'.' if key else ''}{key}={value}"
        for name, of in each.items()
        for key, value in of.items()
    )


def labelled(profile: str, given: Overrides) -> str:
    """A profile as rows and captions say it: with what is overridden."""
    return f"{profile}, {UNLIKE} ({in_words(given)})" if given else profile


def folder(given: Overrides) -> str:
    """The end of the name of a folder for what is drawn of them; "" without any."""
    text = json.dumps(given, sort_keys=True)
    return f"-overridden-{hashlib.sha256(text.encode()).hexdigest()[:8]}" if given else ""


def profile_of(said: str) -> str:
    """The profile of rows, without what is overridden in them."""
    return said.partition(",")[0]


def in_rows(rows: pd.DataFrame) -> bool:
    """Whether some rows are of runs that a reader changed."""
    return len(rows) > 0 and any(UNLIKE in said for said in rows.profile.unique())
