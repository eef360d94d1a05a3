"""A client's personal model on its own: the network, and what it needs to predict."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pfl_core import models
from pfl_core.data.client_data import ClientData
from pfl_core.data.federation import Federation
from pfl_core.engine.checkpoint import load_whole
from pfl_core.stacked import Params
from pfl_core.util import sums

BATCH = 256  # samples at a time
NEEDED = {*"model model_args dtype classes input_shape input_kind mean std".split()}  # facts


class Personal:
    """One client's network, and what it needs to predict from samples as they come.

    Attributes
    ----------
    net : nn.Module
        The network, in evaluation mode.
    facts : dict
        model, model_args, dtype, classes, input_shape, input_kind, mean and std (of images), and
        where it comes from: method, client, id (of the run), revision, version.
    """

    def __init__(self, facts: dict[str, Any], weights: Params):
        self.facts = facts
        for name, v in weights.items():
            if not torch.isfinite(v).all():
                raise ValueError(f"{name} of this model is not finite; take that of a sound run")
        net = models.build(
            facts["model"], tuple(facts["input_shape"]), facts["classes"], **facts["model_args"]
        )
        tied = {n: weights[first] for n, first in models.tied(net).items() if first in weights}
        net.to(getattr(torch, facts["dtype"])).load_state_dict(tied | weights)
        self.net: nn.Module = net.eval()

    def scores(self, x: np.ndarray) -> Tensor:
        """Class scores (n, C) of samples x (n, ...), as they are before normalisation.

        ValueError for samples of another kind or shape than the run's.
        """
        f, n = self.facts, len(x)
        fed = Federation(x, np.zeros(n, np.int64), [np.arange(n)], classes=f["classes"])
        if (fed.kind, fed.input_shape) != (f["input_kind"], tuple(f["input_shape"])):
            raise ValueError(
                f"samples of kind {fed.kind} and shape {fed.input_shape}; "
                f"this model takes {f['input_kind']} {tuple(f['input_shape'])}, one or more: of a "
                "single sample x give x[None]"
            )
        how = dict(dtype=getattr(torch, f["dtype"]), mean=f["mean"], std=f["std"])
        data = ClientData(fed, seed=0, holdout=0, **how)
        with torch.no_grad():
            return torch.cat([self.net(data.batch(i)[0]) for i in torch.arange(n).split(BATCH)])

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Classes (n,) int64 of samples x, as for `scores`."""
        return self.scores(x).argmax(1).numpy()

    def save(self, path: str | Path) -> None:
        """Write network and facts to one file, without pickled code."""
        torch.save({"facts": self.facts, "state_dict": self.net.state_dict()}, raw := io.BytesIO())
        with sums.replacing(Path(path)) as file:
            file.write(raw.getbuffer())


def load_model(path: str | Path) -> Personal:
    """The personal model that `Result.save` or `Personal.save` wrote.

    ValueError for another file, or a damaged one.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path} is no file; one is written by result.save(client, path)")
    z = load_whole(Path(path))
    if not isinstance(z, dict) or {"facts", "state_dict"} - z.keys():
        raise ValueError(
            f"{path} holds no personal model; write one with result.save(client, path)"
        )
    try:
        if missing := NEEDED - z["facts"].keys():
            raise ValueError(f"its facts lack {', '.join(sorted(missing))}")
        return Personal(z["facts"], z["state_dict"])
    except MemoryError:
        raise
    except (ValueError, RuntimeError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
