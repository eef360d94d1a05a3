"""Faults of saved models."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from pfl_core import load_model
from pfl_core.data import pools
from tests.faults.table import KEEPS, Fault, Trap, World, clean, full_disk, put


def saved_model(change: Callable[[dict], Any]) -> None:
    """A model's file with another content."""
    clean(KEEPS).save(0, "model.pt")
    z = torch.load("model.pt", weights_only=True)
    change(z)
    torch.save(z, "model.pt")


def predictions() -> np.ndarray:
    return load_model("model.pt").predict(pools.load("digits").x[:50])


def model_on_a_full_disk(w: World) -> Iterator[None]:
    clean(KEEPS).save(0, "model.pt")
    yield
    with full_disk():
        clean(KEEPS).save(1, "model.pt")


def model_file(change: Callable[[dict], Any]) -> Callable[[World], Iterator[None]]:
    """A fault: a model's file has another content."""

    def happens(w: World) -> Iterator[None]:
        saved_model(change)
        yield
        return predictions()

    return happens


FAULTS = [
    # saved models
    Fault(
        "a saved model of a network that is not registered",
        model_file(lambda z: put(z, "facts", "model", value="ours")),
        "model.pt cannot be read: its model 'ours' is not registered here.*register it first",
        "refused, nothing changed",
    ),
    Fault(
        "a saved model with weights of other shapes",
        model_file(lambda z: put(z, "state_dict", "fc.bias", value=lambda v: v[1:])),
        "model.pt cannot be read: .*size mismatch for fc.bias",
        "refused, nothing changed",
    ),
    Fault(
        "a saved model with NaN among its weights",
        model_file(lambda z: put(z, "state_dict", "fc.bias", value=lambda v: v * float("nan"))),
        "fc.bias of this model is not finite",
        "refused, nothing changed",
    ),
    Fault(
        "a saved model that does not say how samples are normalised",
        model_file(lambda z: z["facts"].pop("mean")),
        "its facts lack mean",
        "refused, nothing changed",
    ),
    Fault(
        "a saved model that asks for 10^12 hidden units",
        model_file(lambda z: put(z, "facts", "model_args", value={"hidden": 10**12})),
        "model.pt cannot be read: ",
        "refused, nothing changed",
    ),
    Fault(
        "a saved model with pickled code",
        model_file(lambda z: put(z, "facts", "model", value=Trap())),
        "model.pt is damaged: it holds code, which is not run",
        "refused, nothing changed",
    ),
    Fault(
        "a model saved over another one, on a full disk",
        model_on_a_full_disk,
        "cannot write .*model.pt.*what was there is as it was",
        "refused, nothing changed",
    ),
]
