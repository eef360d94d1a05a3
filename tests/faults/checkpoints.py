"""Faults of checkpoints."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.faults.table import E, Fault, World, put


def checkpoint(change: Callable[[dict], Any]) -> Callable[[World], Iterator[None]]:
    """A fault: half of the run is there, with another content of its checkpoint."""

    def happens(w: World) -> Iterator[None]:
        w.checkpoint(change)
        yield
        return w.run(E)

    return happens


def rounds_to_come(whole: dict) -> None:
    """The last entry of all that was measured once more, as one of round 7."""
    kept = whole["history"]
    for name in ("download", "upload", "visits", "wall"):
        kept[name] += kept[name][-1:]
    kept["rounds"] += [7]
    kept["evals"] = {n: torch.cat([v, v[-1:]]) for n, v in kept["evals"].items()}


def checkpoint_is_a_folder(w: World) -> Iterator[None]:
    path = w.half()
    path.unlink()
    path.mkdir()
    (path / "mine").write_text("mine")
    yield
    return w.run(E)


def checkpoint_of_fewer_clients(w: World) -> Iterator[None]:
    e = E.but(method="fedper")
    w.checkpoint(lambda z: put(z, "clients", "fc.bias", value=lambda v: v[1:]), e)
    yield
    return w.run(e)


FAULTS = [
    # checkpoints
    Fault(
        "a checkpoint of an executor that does not exist",
        checkpoint(lambda z: put(z, "stamp", "executor", value="tpu:unfold")),
        "executor 'tpu:unfold' is unknown.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a checkpoint of a form of convolutions that does not exist",
        checkpoint(lambda z: put(z, "history", "faster", value={"fc.weight": "winograd"})),
        "form of convolutions 'winograd' is unknown.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a checkpoint in which clients answered that are not there",
        checkpoint(lambda z: put(z, "history", "answered", value={0: [99]})),
        "clients answered which are not there.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a checkpoint with NaN among the weights",
        checkpoint(lambda z: put(z, "server", "fc.bias", value=lambda v: v * float("nan"))),
        "fc.bias in server is not finite.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a checkpoint with weights in float64",
        checkpoint(lambda z: put(z, "server", "fc.bias", value=lambda v: v.double())),
        "it lacks fc.bias .*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a checkpoint without all of its traffic",
        checkpoint(lambda z: put(z, "moved", value=[0.0])),
        "its traffic or its time is missing.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a checkpoint with evaluations of rounds to come",
        checkpoint(rounds_to_come),
        "evaluations do not belong to its rounds.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a checkpoint with evaluations of fewer clients",
        checkpoint(
            lambda z: put(
                z, "history", "evals", value=lambda v: {n: a[:, 1:] for n, a in v.items()}
            )
        ),
        "not those of 4 clients.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a checkpoint with what fewer clients keep",
        checkpoint_of_fewer_clients,
        "it lacks fc.bias of shape .*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a folder in a checkpoint's place",
        checkpoint_is_a_folder,
        "checkpoint.pt could not be read.*set aside",
        "set aside, computed again, equal",
    ),
]
