"""Where the explorers' numbers come from.

Three places: what is committed in results/, what notebooks kept in runs/results/, and the run store
of this computer.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pandas as pd

from pfl_core.experiments import committed, store
from pfl_core.experiments.experiment import Experiment
from pfl_core.papers import base as papers
from pfl_core.util import paths

OWN = "runs of this computer"  # the source that is the run store; the others are published parts
METRICS = {
    "acc_pct": "Test accuracy (%)",
    "acc_worst10": "Accuracy of the worst tenth (%)",
    "acc_min": "Worst client (%)",
    "acc_max": "Best client (%)",
    "acc_p10": "10th percentile (%)",
    "acc_sd": "sd over clients (points)",
}
# Fields that `_column` words in its own way, or that may differ among runs of one column.
NAMED = (
    "dataset partition partition_args clients model model_args rounds method method_args seed "
    "record keep_models"
).split()


def names() -> list[str]:
    """The sources that there are: published parts, then `OWN` if the run store has any run."""
    stored = any(paths.store_folder().glob("*/experiment.json"))
    return [*committed.parts(own=True), *([OWN] if stored else [])]


def rows(source: str) -> pd.DataFrame:
    """Rows of a source in the long form: means over clients, of the metrics in `METRICS`.

    The labels in `column` begin with the title of their artefact, because two artefacts may use one
    label for different runs.

    Raises
    ------
    ValueError
        If there is no such source.
    """
    if source not in (known := names()):
        raise ValueError(f"no results {source!r}; there are {', '.join(known) or 'none yet'}")
    frame = _stored_now() if source == OWN else committed.parts(own=True)[source].rows()
    frame = frame[(frame["average"] == "client") & frame.metric.isin(METRICS)]
    prefix = frame.artefact.map(lambda key: f"{papers.title(key)}: " if key else "")
    return frame.assign(column=prefix + frame.column)


def _stored_now() -> pd.DataFrame:
    files = [p for p in paths.store_folder().glob("*/history.csv") if "." not in p.parent.name]
    return _stored(tuple((p.parent, p.stat().st_mtime_ns) for p in sorted(files)))


@functools.lru_cache(maxsize=8)
def _stored(stamps: tuple[tuple[Path, int], ...]) -> pd.DataFrame:
    """Rows of these run folders; the times at which they changed are there for the cache only."""
    return pd.concat([_labelled(folder) for folder, _ in stamps], ignore_index=True)


@functools.lru_cache(maxsize=4096)
def _labelled(folder: Path) -> pd.DataFrame:
    """Rows of a run in the store, which has no labels of a table: they are made of its fields."""
    found = committed.experiment(folder.name)
    row = _call(found.plain(), "method").replace("()", "")
    return store.load_result(folder, found.but(tags={"row": row, "column": _column(found)})).rows


def _column(found: Experiment) -> str:
    """The setting of an Experiment in words, without its method, its seed and what it records."""
    plain, defaults = found.plain(), Experiment().plain()
    plain["init_from"] = found.init_from and found.init_from.id[:6]
    others = {
        name: value
        for name, value in plain.items()
        if value != defaults[name] and name not in NAMED
    }
    words = [
        found.dataset,
        _call(plain, "partition"),
        f"{found.clients} clients",
        _call(plain, "model"),
        f"{found.rounds} rounds",
        *(f"{name}={value}" for name, value in others.items()),
    ]
    return ", ".join(words)


def _call(plain: dict[str, Any], field: str) -> str:
    """A field and its arguments as a call, such as "dirichlet(alpha=0.1)"."""
    arguments = ", ".join(f"{name}={value}" for name, value in plain[f"{field}_args"].items())
    return f"{plain[field]}({arguments})"
