"""A client's personal model on its own: the network, and what it needs to predict."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pfl_core import models
from pfl_core.data.client_data import ClientData
from pfl_core.data.federation import Federation
from pfl_core.engine.checkpoint import load_whole
from pfl_core.experiments.build import train_config
from pfl_core.experiments.experiment import Experiment
from pfl_core.methods.base import METHODS, Method, make_method
from pfl_core.methods.task import Task
from pfl_core.stacked import Params
from pfl_core.util import identity, paths, sums

BATCH = 256  # samples at a time
NEEDED = {*"model model_args dtype classes input_shape input_kind mean std".split()}  # facts


class Scores(nn.Module):
    """A network with a method's own way to class scores: of GPFL, its valve and its condition.

    Parameters
    ----------
    net : nn.Module
        The network.
    own : {name: tensor}
        What the method serves beside it, for ONE client.
    method : Method
        Bound to a Task of this client.
    """

    def __init__(self, net: nn.Module, own: Params, method: Method):
        super().__init__()
        self.net, self.own, self.method = net, own, method

    def _apply(self, fn: Callable, recurse: bool = True) -> Scores:  # .to(device), .double(), ...
        self.own = {name: fn(v) for name, v in self.own.items()}
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores (B, C) of samples (B, ...)."""
        p = dict(self.net.named_parameters()) | dict(self.net.named_buffers()) | self.own
        with self.method.task.mode(self.training):
            return self.method.logits(p, x)


class Personal:
    """One client's network, and what it needs to predict from samples as they come.

    Attributes
    ----------
    net : nn.Module
        The network, in evaluation mode; a `Scores` around it where the method has class scores of
        its own.
    facts : dict
        model, model_args, dtype, classes, input_shape, input_kind, mean and std (of images), and
        where it comes from: method, client, seed and id (of the run), revision, version, code (a
        digest of what scores come from and is not ours), and modules, which register the model, or
        the method, if these are not ours. class_names, where there are any. scores: what a method's
        own class scores need to know of the client.
    """

    def __init__(self, facts: dict[str, Any], weights: Params):
        self.facts, self.weights = facts, weights
        _check_here(facts, "model", models.list_models())
        shape, options = tuple(facts["input_shape"]), facts["model_args"]
        # What it draws beside its state, such as a fixed projection, is drawn again.
        seed = facts.get("seed", 0)
        net = models.build(facts["model"], shape, facts["classes"], seed, **options)
        infinite = {n for n, v in net.named_buffers() if not v.isfinite().all()}  # a mask
        for name, v in weights.items():
            if name not in infinite and not torch.isfinite(v).all():
                raise ValueError(f"{name} of this model is not finite; take that of a sound run")
        net.to(getattr(torch, facts["dtype"]))
        names = net.state_dict().keys()
        whole = {n: v for n, v in weights.items() if n in names or not _scored(facts)}
        tied = {n: weights[first] for n, first in models.tied(net).items() if first in weights}
        net.load_state_dict(tied | whole)
        if _scored(facts):
            own = {n: v for n, v in weights.items() if n not in names}
            net = Scores(net, own, _bound(facts, net))
        self.net: nn.Module = net.eval()
        _warn_of_other_code(facts)

    def scores(self, x: np.ndarray) -> Tensor:
        """Class scores (n, C) of samples x (n, ...), as they are before normalisation.

        Raises
        ------
        ValueError
            For samples of another kind or shape than the run's.
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

    def predict(self, x: np.ndarray, *, names: bool = False) -> np.ndarray:
        """Classes (n,) int64 of samples x, as for `scores`.

        With `names` they are the names of classes that the Federation has, (n,) texts.

        Raises
        ------
        ValueError
            As `scores`, where a score is NaN, and where there are no such names.
        """
        if names and not self.facts.get("class_names"):
            raise ValueError(
                "the classes of this model have no names; leave names=True out, or run with a "
                "Federation that has class_names, which finds the same run"
            )
        scores = self.scores(x)
        if lost := int(scores.isnan().any(1).sum()):
            raise ValueError(
                f"class scores of {lost} of {len(scores)} samples are NaN, which is no answer; "
                "look for 0 / 0 or log(0) in the model, and add an epsilon"
            )
        classes = scores.argmax(1).numpy()
        return np.array(self.facts["class_names"])[classes] if names else classes

    def save(self, path: str | Path) -> None:
        """Write network and facts to one file, without pickled code."""
        torch.save({"facts": self.facts, "state_dict": self.weights}, raw := io.BytesIO())
        with sums.replacing(paths.to_write(path, "path")) as file:
            file.write(raw.getbuffer())


def _scored(facts: dict[str, Any]) -> bool:
    return "scores" in facts


def _check_here(facts: dict[str, Any], kind: str, known: Container[str]) -> None:
    # ValueError where a model's or method's code is not imported.
    name, modules = facts[kind], facts.get("modules") or ()
    if name in known:
        return
    where = " and ".join(m for m in modules if m != "__main__")
    remedy = (
        f"import {where} first, which registers it"
        if where
        else ("run the lines of the notebook or script that register it first")
    )
    raise ValueError(f"its {kind} {name!r} is not registered here: {remedy}")


def code_of_scores(experiment: Experiment, own_scores: bool) -> str:
    """A digest of what scores come from and is not ours: 16 hex digits, "" if all is ours."""
    return _code(experiment.model, experiment.model_args, experiment.method if own_scores else "")


def _code(model: str, options: dict[str, Any], method: str) -> str:
    of_method = [METHODS[method]] if method in METHODS else []
    return identity.digest(*models.functions(model, options), *of_method)[:16]


def _warn_of_other_code(facts: dict[str, Any]) -> None:
    # The same names and shapes do not make the same network.
    if "code" not in facts:  # of an earlier version
        return
    method = facts["method"] if _scored(facts) else ""
    if _code(facts["model"], facts["model_args"], method) != facts["code"]:
        warnings.warn(
            f"the code of model {facts['model']!r} is not that of run {facts['id']}, which trained "
            "it (the run's folder has that in code.txt): scores may be others than the run's",
            stacklevel=3,
        )


def _bound(facts: dict[str, Any], net: nn.Module) -> Method:
    # The method, bound to a federation of this client alone.
    _check_here(facts, "method", METHODS)
    about = facts["scores"]
    e = Experiment.read(about["experiment"])
    n, counts = torch.tensor([about["n"]]), torch.tensor([about["counts"]])
    task = Task(net, n, counts, train_config(e))
    return make_method(e.method, **e.method_args).bind(task, check=False)


def load_model(path: str | Path) -> Personal:
    """The personal model that `Result.save` or `Personal.save` wrote.

    Raises
    ------
    ValueError
        For another file, a damaged one, and where the code of a model of your own, or of a method
        with class scores of its own, is not imported: it names the module.
    """
    path = paths.expanded(path, "path")
    if not path.is_file():
        raise ValueError(f"{path} is no file; one is written by result.save(client, path)")
    z = load_whole(path)
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
