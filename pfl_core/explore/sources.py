"""Where the explorers' numbers come from: results/, what notebooks kept in runs/results/, and the run store."""

from __future__ import annotations

import functools
import json
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
# Fields that a column names by themselves, or that do not tell runs of one column apart.
NAMED = (
    "dataset partition partition_args clients model model_args rounds method method_args seed "
    "record keep_models"
).split()


def names() -> list[str]:
    """What there is: parts of runs/results/ and of results/, and `OWN` where the store has runs."""
    stored = any(paths.store_folder().glob("*/experiment.json"))
    return [*committed.parts(own=True), *([OWN] if stored else [])]


def rows(source: str) -> pd.DataFrame:
    """Client means of a source's accuracies, in long form; a column says its artefact, too.

    ValueError for an unknown source.
    """
    if source not in (known := names()):
        raise ValueError(f"no results {source!r}; there are {', '.join(known) or 'none yet'}")
    frame = _stored_now() if source == OWN else committed.parts(own=True)[source].rows()
    frame = frame[(frame["mean"] == "client") & frame.metric.isin(METRICS)]
    # Two artefacts may call other runs by the same labels.
    where = frame.artefact.map(lambda a: f"{papers.title(a)}: " if a else "")
    return frame.assign(column=where + frame.column)


def experiment(run: str) -> Experiment | None:
    """The Experiment of a run of the store or of results/; None for one that neither has."""
    file = paths.store_folder() / run / "experiment.json"
    if file.is_file():
        return Experiment.from_plain(json.loads(file.read_text())["experiment"])
    return committed.experiment(run)


def _stored_now() -> pd.DataFrame:
    files = [p for p in paths.store_folder().glob("*/history.csv") if "." not in p.parent.name]
    return _stored(tuple((p.parent, p.stat().st_mtime_ns) for p in sorted(files)))


@functools.lru_cache(maxsize=8)
def _stored(stamps: tuple[tuple[Path, int], ...]) -> pd.DataFrame:
    return pd.concat([_labelled(folder) for folder, _ in stamps], ignore_index=True)


@functools.lru_cache(maxsize=4096)
def _labelled(folder: Path) -> pd.DataFrame:
    # A run of the store has no labels of a table: its method is its row, its setting its column.
    ran = experiment(folder.name)
    plain, usual = ran.plain(), Experiment().plain()
    plain["init_from"] = ran.init_from and ran.init_from.id[:6]
    column = [
        ran.dataset,
        _call(plain, "partition"),
        f"{ran.clients} clients",
        _call(plain, "model"),
        f"{ran.rounds} rounds",
        *(f"{k}={v}" for k, v in plain.items() if v != usual[k] and k not in NAMED),
    ]
    row = _call(plain, "method").replace("()", "")
    tagged = ran.but(tags={"row": row, "column": ", ".join(column)})
    return store.load_result(folder, tagged).rows


def _call(plain: dict[str, Any], name: str) -> str:
    return f"{plain[name]}({', '.join(f'{k}={v}' for k, v in plain[f'{name}_args'].items())})"
