"""What is measured on models while they exist: weights, embeddings, CKA, mix-and-match.

A probe is a function of a `View` that returns {key: array}. An Experiment names its probes in
`record`. They run at the first evaluated round that has something for them, at each new best
evaluation and at the last one; those in `EVERY` run at every evaluated round. The arrays are kept
with the run: `Result.probe(name)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pfl_core import models
from pfl_core.stacked import Params
from pfl_core.util import checks
from pfl_core.util.percent import accuracy

if TYPE_CHECKING:
    from pfl_core.data.client_data import ClientData
    from pfl_core.engine.engine import Engine
    from pfl_core.methods.base import Method, State

CKA_SAMPLES = 1000  # test images that all clients see, for CKA as in FLAYER's Fig. 2


class View(NamedTuple):
    """A federation at one evaluated round."""

    method: Method
    state: State
    engine: Engine
    before: Params  # the models as served, {name: (K, *shape)}
    after: Params  # those after local training; {} if they are not evaluated
    round: int


def weights(view: View) -> dict[str, Tensor]:
    """Collaboration weights {layer: (K, K)} of the next aggregation (FedAGHN, pFedLA).

    Row: the client that receives; column: the client that gives.
    """
    method: Any = view.method  # one that has them
    return method.weights(view.state)


def embeddings(view: View) -> dict[str, Tensor]:
    """What the server knows a client by: {"v": (K, d)} (pFedHN, Fig. 4)."""
    method: Any = view.method  # one that has them
    return {"v": method.embeddings(view.state)}


def cka(view: View) -> dict[str, Tensor]:
    """Linear CKA between clients after local training, {layer: (K, K)} (FLAYER, Fig. 2).

    All clients see the same test images, balanced over the classes.
    """
    return _cka(view, view.after or view.before)


def cka_cores(view: View) -> dict[str, Tensor]:
    """As `cka`, of APPLE's core models as the server has them; `cka` sees mixtures of them.

    Not at round 0, where all are equal.
    """
    method: Any = view.method  # one that has them
    return _cka(view, view.before | method.cores(view.state)) if view.round else {}


def _cka(view: View, models: Params) -> dict[str, Tensor]:
    x = common_samples(view.engine.data, CKA_SAMPLES)
    grams: dict[str, list[Tensor]] = {}
    for k in range(view.engine.data.K):
        with view.method.task.mode(False):
            found = activations(view.method.task, {n: t[k] for n, t in models.items()}, x)
        for layer, a in found.items():
            grams.setdefault(layer, []).append(_unit_gram(a))
    stacked = {layer: torch.stack(g).flatten(1) for layer, g in grams.items()}
    return {layer: g @ g.T for layer, g in stacked.items()}


def mix_and_match(view: View) -> dict[str, Tensor]:
    """{"acc": (K, K)}: accuracy in % of client i's head on client j's features (pFedHN, Fig. 3).

    Row: i, whose test samples and head they are; column: j, whose other layers are taken.
    """
    k, head = view.engine.data.K, view.method.task.head
    out = torch.zeros(k, k, dtype=torch.float64)
    for shift in range(k):
        source = (torch.arange(k) + shift) % k
        mixed = {n: t if n in head else t[source.to(t.device)] for n, t in view.before.items()}
        got = view.engine.evaluate(mixed, "test")
        acc = accuracy(got["correct"], np.maximum(got["n"], 1))
        out[torch.arange(k), source] = torch.as_tensor(acc)
    return {"acc": out}


def train(view: View) -> dict[str, Tensor]:
    """{"hits": (K,), "n": (K,)}: right answers of the models as served, and training samples."""
    got = view.engine.evaluate(view.before, "train")
    return {"hits": torch.as_tensor(got["correct"]), "n": torch.as_tensor(got["n"])}


def numbers(view: View) -> dict[str, Tensor]:
    """{name: ()}: what a method of one's own says of itself in numbers, from its state.

    Raises
    ------
    ValueError
        For what is no number, and for a name with a slash.
    """
    method: Any = view.method  # one that has them
    found: Any = method.numbers(view.state)
    if not isinstance(found, dict):
        got = type(found).__name__
        raise ValueError(f"{method.name}.numbers returned {got}, allowed is {{name: number}}")
    return {name: _number(method.name, name, value) for name, value in found.items()}


def _number(method: str, name: Any, value: Any) -> Tensor:
    if not isinstance(name, str) or "/" in name:
        raise ValueError(f"{method}.numbers: the name {name!r} must be a text without a slash")
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.reshape(()).double()
    if isinstance(value, int | float | np.number):
        return torch.tensor(float(value), dtype=torch.float64)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor | np.ndarray) else ""
    raise ValueError(
        f"{method}.numbers: {name} is a {type(value).__name__}{shape}, allowed is a number"
    )


PROBES: dict[str, Callable[[View], dict[str, Tensor]]] = {
    "weights": weights,
    "embeddings": embeddings,
    "cka": cka,
    "cka_cores": cka_cores,
    "mix_and_match": mix_and_match,
    "train": train,
    "numbers": numbers,
}
EVERY = {"weights", "train", "numbers"}  # small, and their course over the rounds is of interest
# What a method must have for a probe: a function, which a hyper-parameter of that name is not.
NEEDS = {"weights": "weights", "embeddings": "embeddings", "cka_cores": "cores"}
NEEDS |= {"numbers": "numbers"}


def check(names: Iterable[str], method: Any) -> None:
    """Raise ValueError for an unknown probe, or one that the method has nothing for."""
    for name in names:
        checks.known("probe of `record`", name, PROBES)
        if name in NEEDS and not callable(getattr(method, NEEDS[name], None)):
            raise ValueError(f"record: {method.name} has no {name}; leave {name!r} out of `record`")


# -- linear CKA --------------------------------------------------------------------------------


def _unit_gram(x: Tensor) -> Tensor:
    # Of activations x (n, p), centred: XX' / |XX'|. The linear CKA of two layers is the sum of the
    # products of their entries (Kornblith et al., ICML 2019), cheaper than by features where these
    # are more than samples.
    x = x.flatten(1)
    x = x - x.mean(0)
    k = x @ x.T
    return k / k.norm().clamp_min(torch.finfo(k.dtype).tiny)


def activations(task: Any, p: Params, x: Tensor) -> dict[str, Tensor]:
    """What each top-level layer of ONE client's model hands on, {layer: (n, features)}.

    That is after ReLU and pooling; of the last layer, the class scores.
    """
    module, found, hooks = task._module(p), {}, []
    layers = models.layers(task.model, "child", every=True)  # frozen ones hand on, too
    names = list(layers)
    for layer, following in zip(names, names[1:], strict=False):
        first = module.get_submodule(layers[following][0].rpartition(".")[0])

        def keep(module: nn.Module, inputs: tuple[Tensor, ...], layer: str = layer) -> None:
            found[layer] = inputs[0].flatten(1)

        hooks.append(first.register_forward_pre_hook(keep))
    try:
        found[names[-1]] = module(x)
    finally:
        for hook in hooks:
            hook.remove()
    return {layer: found[layer] for layer in names}


def common_samples(data: ClientData, n: int) -> Tensor:
    """At most n test samples of all clients together, taken in turn from each class."""
    index = np.unique(np.concatenate(data.index["test"]))
    y = data.federation.y[index]
    turn = np.concatenate([np.arange((y == c).sum()) for c in np.unique(y)])
    order = np.argsort(turn, kind="stable")
    by_class = np.argsort(y, kind="stable")
    chosen = index[by_class][order][:n]
    return data.batch(torch.as_tensor(chosen, device=data.device))[0]


# -- recording ---------------------------------------------------------------------------------


def recorder(names: Iterable[str]) -> Callable[..., None] | None:
    """What `simulate` calls as `record`: it puts the arrays of probes `names` into history.probes.

    They lie on the CPU. Without names it is None.
    """
    names = tuple(names)

    def record(
        engine: Engine,
        state: State,
        before: Params,
        after: Params,
        history: Any,
        best: bool,
        last: bool,
    ) -> None:
        view = View(engine.method, state, engine, before, after, state.round)
        kept = history.probes
        for name in names:
            mine = [k for k in kept if k.startswith(f"{name}/")]
            if mine and not (name in EVERY or best or last):
                continue
            if best and name not in EVERY:
                _forget_earlier_best(kept, name, mine)
            dtype = torch.float64 if name == "numbers" else torch.float32
            for key, value in PROBES[name](view).items():
                kept[f"{name}/{view.round}/{key}"] = value.detach().to("cpu", dtype).clone()

    return record if names else None


def _forget_earlier_best(kept: Params, name: str, mine: list[str]) -> None:
    # Of the probe's keys `mine`, those of the first round stay.
    first = min((int(key.split("/")[1]) for key in mine), default=0)
    for key in mine:
        if not key.startswith(f"{name}/{first}/"):
            del kept[key]


def stacked(kept: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Arrays to store, of a probe that was recorded at E rounds.

    "probe/weights" (E,) are the rounds, "probe/weights/conv1" (E, ...) what was found under a key.
    """
    out: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(k.split("/")[0] for k in kept):
        mine = {tuple(k.split("/", 2)[1:]): v for k, v in kept.items() if k.startswith(f"{name}/")}
        rounds = sorted({int(r) for r, _ in mine})
        out[f"probe/{name}"] = np.array(rounds, dtype=np.int64)
        for key in dict.fromkeys(k for _, k in mine):
            out[f"probe/{name}/{key}"] = np.stack([mine[str(r), key].numpy() for r in rounds])
    return out


def read(arrays: Mapping[str, np.ndarray], name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A probe's rounds (E,) and {key: (E, ...)} from arrays that `stacked` made.

    Raises
    ------
    ValueError
        If the probe was not recorded.
    """
    if f"probe/{name}" not in arrays:
        raise ValueError(
            f"probe {name!r} was not recorded; run the Experiment with record=({name!r},)"
        )
    start = f"probe/{name}/"
    return arrays[f"probe/{name}"], {
        k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)
    }
