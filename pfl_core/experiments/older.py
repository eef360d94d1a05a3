"""Runs of earlier versions, whose names were made by another rule, and their keys.

Up to version 0.2 an id hashed values as they were written, so `lr=1` and `lr=1.0` were two runs.
Names stay; a run is found by its key, the id that its Experiment has now.
"""

from __future__ import annotations

from typing import Any

from pfl_core.experiments import keys
from pfl_core.experiments.experiment import Experiment, not_default
from pfl_core.experiments.weights import Weights
from pfl_core.methods.base import make_method


def legacy(plain: dict[str, Any], checksum: str) -> str:
    """The id by the old rule of an Experiment whose `plain()` this is; foreign code is left out."""
    source = plain.get("init_from")
    file = Weights.read(source)
    start = file.sha256 if file else source and legacy(source, checksum)
    key = not_default(plain) | {"init_from": start}
    method = make_method(plain["method"], **plain["method_args"])
    key |= {"pool": checksum, "schema": 2, "revision": method.revision}
    return keys.hashed(key)


def key(experiment: Experiment, meta: dict[str, Any]) -> str:
    """The key of a run of an earlier version; its name where that cannot be said.

    It cannot where it had another revision, code that is not ours or not here, or unknown data or
    samples.
    """
    try:
        experiment = experiment.checked()
    except ValueError:
        return meta["id"]
    revision = make_method(experiment.method, **experiment.method_args).revision
    ours = meta.get("revision") == revision and not experiment.code
    known = meta.get("pool") and ours and not experiment.draws_samples
    return experiment.id_for(meta["pool"]) if known else meta["id"]
