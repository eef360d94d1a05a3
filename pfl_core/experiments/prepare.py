"""What a run needs, resolved once before anything is trained: its data, its method, its folder."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from pfl_core import models
from pfl_core.anatomy import beside
from pfl_core.data.client_data import ClientData
from pfl_core.data.federation import Federation
from pfl_core.data.names import some
from pfl_core.engine.checkpoint import History
from pfl_core.engine.participation import evaluated
from pfl_core.experiments.build import (
    build_method,
    client_data,
    federation,
    places,
    split,
    vocabulary,
)
from pfl_core.experiments.experiment import Experiment, chain
from pfl_core.experiments.metrics import UNTESTED
from pfl_core.experiments.store import Result
from pfl_core.methods.base import Method, check_adopts
from pfl_core.methods.task import TrainConfig
from pfl_core.util import gpu
from pfl_core.util.draws import Draws
from pfl_core.util.say import say

REPEATED = 1024  # the largest batch that may be more than twice what any client trains on


@dataclass(frozen=True, eq=False)
class Call:
    """One call of `run`: what is to be found or computed, where it is kept, and how."""

    experiment: Experiment
    id: str
    course: str
    code: str  # a digest of what is not ours
    checksum: str  # of its data
    store: Path
    device: str
    executor: str
    workers: int | None
    fed: Federation | None  # the user's own
    source: Result | Federation | None  # of `init_from`, where own data are behind it
    start: str | None  # what stands for `init_from` in the id, if the Experiment cannot say it
    on_round: Callable[[int, History], bool | str | None] | None
    keep_state: bool
    anew: bool  # not from the end of a shorter run either

    @property
    def folder(self) -> Path:
        return self.store / self.id


@dataclass(frozen=True, eq=False)
class Prepared:
    """A call, with all that is trained.

    Attributes
    ----------
    call : Call
    data : ClientData
        Its clients' samples, on the device.
    method : Method
        Bound to the model and the clients.
    vocabulary : dict
        Options of the model that the data decide.
    leak : str
        What was said of test samples that `init_from` was trained on; "" without any.
    """

    call: Call
    data: ClientData
    method: Method
    vocabulary: dict[str, int]
    leak: str


def prepared(call: Call) -> Prepared:
    """Load a call's data, build its method, and refuse what could not be trained or evaluated.

    Raises
    ------
    DatasetMissing, ValueError
    """
    if call.device == "cuda":
        gpu.tried()
    e = call.experiment
    data = client_data(e, call.device, call.fed)
    _check_batch(data, e.batch)
    options = vocabulary(e)
    method = build_method(e, data, call.store, options)
    _check_evaluated(data, method.task.config)
    if e.init_from and not e.adopt:
        _check_start(e, method)
    if e.earlier:
        _check_source(call, method, data)
    return Prepared(call, data, method, options, _warn_of_leak(call, data))


def _check_evaluated(data: ClientData, config: TrainConfig) -> None:
    # A sample of clients for evaluation must not miss all those that can be evaluated.
    tested = [k for k, index in enumerate(data.index["test"]) if len(index)]
    if not tested and not any(map(len, data.index["val"])):
        say(UNTESTED, error=True)
    if tested and not set(tested) & set(evaluated(config, data.K).tolist()):
        raise ValueError(
            f"Experiment(eval_clients={config.eval_clients}): only {len(tested)} of {data.K} "
            "clients have test samples, and none of those is drawn; raise eval_clients, or leave "
            "it out, which means all"
        )


def _check_batch(data: ClientData, batch: int) -> None:
    # A batch repeats a client's samples where they are fewer, which is work without an end.
    most = max(map(len, data.index["fit"]))
    if batch > max(REPEATED, 2 * most):
        raise ValueError(
            f"Experiment(batch={batch}): no client trains on more than {most} samples, and a "
            f"larger batch repeats them; batch={most} has all of a client's samples in one"
        )


def _check_source(call: Call, method: Method, data: ClientData) -> None:
    # What can be refused before the source is trained.
    experiment = call.experiment
    if not experiment.new_head:
        _check_class_names(data.federation, call.source)
    source = experiment.earlier
    assert source is not None  # callers ask for it
    options = vocabulary(source) | source.model_args
    shapes = _shapes_of_source(call, source, data)
    drawn = models.build(source.model, *shapes, source.seed, **options)
    if source.seed != experiment.seed and not models.is_ours(drawn):
        other = models.build(source.model, *shapes, experiment.seed, **options)
        _check_drawn_beside(experiment, drawn, other)
    if experiment.adopt:
        check_adopts(method)
        if experiment.buffers == "local" and method.task.bn.intersection(method.task.buffers):
            say(
                "adopt: BatchNorm's statistics stay with each client (buffers='local'), so those "
                "of new clients begin at mean 0 and variance 1; before they have trained, accuracy "
                "says little. With buffers='average', there and here, the server sends its own",
                error=True,
            )
        return
    there = {n: tuple(v.shape) for n, v in drawn.state_dict().items()}
    new = method.task.named_head if experiment.new_head else ()
    for n, v in (method.task.initial | method.task.constants).items():
        if n in new:
            continue
        if there.get(n) != tuple(v.shape):
            has = f"has {n} of shape {there[n]}" if n in there else f"has no {n}"
            raise ValueError(
                f"init_from's model {has}, this one has {n} of shape {tuple(v.shape)}; "
                "use the same model; new_head=True draws a head anew"
            )


def _check_start(experiment: Experiment, method: Method) -> None:
    # ValueError where clients would not begin with what init_from gives.
    if experiment.head_init == "own" and not experiment.new_head:
        raise ValueError(
            "Experiment(head_init='own') draws a head for each client, in place of the one that "
            "init_from gives; leave head_init out, or say new_head=True"
        )
    task, first = method.task, torch.zeros(1, dtype=torch.long, device=method.task.device)
    given = dict(task.initial)
    task.initial |= {n: given[n] + 1 for n in task.parameters}
    with Draws(0):
        other = method.begin(method.init(), first)
    task.initial |= given
    with Draws(0):  # what it draws is the same, and moves no generator of the user's
        mine = method.begin(method.init(), first)
    body = [n for n in task.parameters if n not in task.named_head and n in mine]
    if same := [n for n in body if torch.equal(mine[n], other[n])]:
        raise ValueError(
            f"clients of {method.name} begin with a model that the method makes itself, so that "
            f"init_from would change nothing in {same[0]}; leave it out, or let new clients join "
            "a trained server with adopt=True"
        )


def _check_drawn_beside(experiment: Experiment, there: nn.Module, here: nn.Module) -> None:
    # What is in no state_dict does not come along with init_from.
    name, source = experiment.model, experiment.earlier
    assert source is not None  # callers ask for it
    now = beside(name, here)
    if apart := [n for n, v in beside(name, there).items() if v != now.get(n)]:
        raise ValueError(
            f"model {name!r} draws {apart[0]} by the seed and does not keep it in its state_dict, "
            f"and init_from has seed {source.seed}, this Experiment seed {experiment.seed}: what "
            "was trained would meet other numbers; keep it by register_buffer, or use one seed "
            "for both (partition_seed draws other clients)"
        )


def _warn_of_leak(call: Call, data: ClientData) -> str:
    # A start that saw samples on which this run is tested makes the test say too much.
    e = call.experiment
    tested = np.concatenate(places(e, data.index["test"]))
    sources = [start for start in chain(e)[1:] if start.dataset == e.dataset and start.rounds]
    trained = [index for start in sources for index in _train_of_source(call, start)]
    seen = np.isin(tested, np.concatenate(trained)).sum() if trained else 0
    if not seen:
        return ""
    cure = (
        "give source a Federation that trains on none of them, such as fed itself"
        if e.dataset == "own"
        else "give it the same partition and the same seed, as grid(seeds=...) does, or one "
        "partition_seed to both"
    )
    said = f"init_from was trained on {seen} of the {len(tested)} test samples; {cure}"
    warnings.warn(said, stacklevel=2)
    return said


def _train_of_source(call: Call, start: Experiment) -> Sequence[np.ndarray]:
    # Places in the data; of a Result over own data nothing says them.
    if start.dataset != "own":
        return [index[: start.max_samples or None] for index in split(start).train]
    source, fed = call.source, call.fed
    if not isinstance(source, Federation) or fed is None or source is fed:
        return []
    if not (np.array_equal(source.x, fed.x) and np.array_equal(source.y, fed.y)):
        return []
    return source.at_most(start.max_samples, start.seed).index["train"]


def _check_class_names(here: Federation, source: Result | Federation | None) -> None:
    # Label 3 must be the same class in both.
    known = source.meta if isinstance(source, Result) else source.names if source else {}
    there, mine = known.get("class_names"), here.class_names
    if there and mine and list(there) != list(mine):
        raise ValueError(
            f"classes are called {some(mine)} here and {some(there)} in what init_from starts "
            "from; make this Federation with class_names= of the other, or give new_head=True"
        )


def _shapes_of_source(
    call: Call, source: Experiment, data: ClientData
) -> tuple[tuple[int, ...], int]:
    # Of its samples, and how many classes it has.
    if isinstance(call.source, Result):
        return tuple(call.source.meta["input_shape"]), call.source.meta["classes"]
    like = data if source.dataset == call.experiment.dataset else None
    if source.dataset == "own" and call.source is not None:
        like = call.source
    like = like or federation(source)
    return like.input_shape, like.classes
