"""Runs that are not finished: what they are, and how many of their rounds are kept."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import torch

from pfl_core.experiments.experiment import SCHEMA, Experiment
from pfl_core.experiments.store import digests, read_about, said_to_be
from pfl_core.util import paths

ENDING = ".part"  # of the folder of a run until it is whole


class Begun(NamedTuple):
    """A run of the store that is under way, or was stopped."""

    id: str
    experiment: Experiment
    rounds: int  # those that its checkpoint has
    date: datetime  # when it was last written to

    def __str__(self) -> str:
        return f"round {self.rounds} of {self.experiment.rounds}"


def note(work: Path, experiment: Experiment, id: str) -> None:
    """Write into a run's folder what it will be, until its own experiment.json takes the place."""
    plain = json.loads(json.dumps(experiment.plain()))
    meta = {"id": id, "schema": SCHEMA, "status": "unfinished"}
    about = {"experiment": plain, "meta": meta, "sha256": digests(plain, meta, work, ())}
    (part := work / "about.part").write_text(json.dumps(about))
    os.replace(part, work / "experiment.json")


def begun() -> list[Begun]:
    """The runs of the store that are not finished, oldest first.

    Those of which nothing says what they are, as of earlier versions, are left out.
    """
    found = (read(folder) for folder in paths.store_folder().glob(f"*{ENDING}"))
    return sorted((run for run in found if run), key=lambda run: run.date)


def read(folder: Path) -> Begun | None:
    """What a folder says of a run that is not finished; None if it says nothing."""
    about = read_about(folder)
    if about is None or about["meta"].get("id") != folder.stem or folder.suffix != ENDING:
        return None
    try:
        experiment = said_to_be(about["experiment"])
        date = datetime.fromtimestamp(folder.stat().st_mtime).astimezone()
    except (OSError, ValueError, TypeError, LookupError):  # of other hands, or finished just now
        return None
    return Begun(folder.stem, experiment, _rounds(folder / "checkpoint.pt"), date)


def _rounds(checkpoint: Path) -> int:
    # Without its tensors, which stay in the file. What is damaged is said when the run goes on.
    try:
        whole = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        return int(whole["round"])
    except Exception:  # torch meets damage with many types
        return 0
