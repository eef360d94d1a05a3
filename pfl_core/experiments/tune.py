"""Hyper-parameters chosen on validation data: choices or random draws, over one seed or several."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from pfl_core import optim
from pfl_core.data import pools
from pfl_core.engine import finetune
from pfl_core.engine.finetune import moments
from pfl_core.engine.participation import evaluates_after
from pfl_core.engine.scoring import COUNTED, LARGE, less_is_better, list_metrics
from pfl_core.experiments import build, settings
from pfl_core.experiments.build import fitted
from pfl_core.experiments.experiment import Experiment, seeded
from pfl_core.experiments.feds import OfSeeds, of_seeds
from pfl_core.experiments.metrics import LOST, validated
from pfl_core.experiments.sweep import sweep
from pfl_core.methods.base import METHODS
from pfl_core.util import checks
from pfl_core.util.draws import rng
from pfl_core.util.fields import Search, searched
from pfl_core.util.percent import compared
from pfl_core.util.say import say

# Fields that decide which samples a choice would be judged on.
JUDGED_ON = ("dataset", "partition", "partition_args", "clients", "max_samples", "eval_clients")
ALLOWED = (
    'allowed is {"lr": [0.01, 0.1], ...}, whose combinations are tried, '
    'or a list of changes, [{"lr": 0.01}, ...]'
)


class NoneEnded(ValueError):
    """No choice ended with finite numbers."""


def tune(
    experiment: Experiment,
    choices: dict[str, Any] | list[dict[str, Any]] | None = None,
    *,
    draws: int | None = None,
    draw_seed: int = 0,
    seeds: Iterable[int] | None = None,
    keep: int | None = 4,
    split: str = "val",
    when: str | Sequence[str] = "before",
    last: bool = False,
    metric: str = "acc_pct",
    **how: Any,
) -> tuple[Experiment, pd.DataFrame]:
    """Choose hyper-parameters on validation data: the best of `choices`, and the rows of all.

    A choice counts with its accuracy at its best round, the mean over clients and `seeds`; of equal
    ones the first. One that diverges with any of its seeds is said, and never chosen.

    Parameters
    ----------
    experiment : what is tuned; its partition must give clients validation samples
    choices : values of fields, {"lr": [0.01, 0.1], "method_args": [{"mu": 1}, {"mu": 2}]}, of which
        all combinations are tried; or a list of changes, each as `Experiment.but` takes it. With
        `draws` a dict of what is drawn, see `drawn`; by default what the fields declare
    draws : number of random choices; the first is the Experiment as it is
    draw_seed : seed of the draws; equal ones draw the same learning rates for all methods
    seeds : by default the Experiment's alone. All choices run with the first, and the best `keep`
        of them with the others, too. Report results on other seeds
    keep : number of choices that run with all seeds; None: all
    split : "val"; all else is an error, so that nobody chooses on test data
    when : "before" or "after" local training models are judged; "tuned 3": after 3 epochs of
        their fine-tuning; of several, each choice at its best one (`scores` says which)
    last : whether the last round counts in place of the best one
    metric : what is judged in place of accuracy, of those in the Experiment's `metrics`
    **how : what else `sweep` takes

    Returns
    -------
    Experiment, DataFrame
        The best one, with the seed of `experiment`, and the rows of all; their column `row` holds
        the choice as JSON.

    Raises
    ------
    ValueError
        Before anything is trained, for wrong `choices` or `split`, for choices that would be judged
        on other samples, or without validation data.

    Examples
    --------
    >>> from pfl_core import Experiment, tune
    >>> experiment = Experiment(clients=3, model="mlp", rounds=1, partition="iid",
    ...                         partition_args={"split": "70/10/20"})
    >>> best, rows = tune(experiment, {"lr": [0.01, 0.1]}, device="cpu")
    >>> best.lr in (0.01, 0.1), sorted(rows.row.unique())
    (True, ['{"lr": 0.01}', '{"lr": 0.1}'])

    Four random rates, all with seed 0 and the better two with seed 1:

    >>> best, rows = tune(experiment, draws=4, seeds=(0, 1), keep=2, device="cpu")
    >>> rows.groupby("seed").row.nunique().tolist()
    [4, 2]
    """
    if not isinstance(experiment, Experiment):
        got = type(experiment).__name__
        raise TypeError(f"tune takes an Experiment, got {got}; of several, tune one after another")
    if split != "val":
        raise ValueError(f"tune(split={split!r}): only 'val' may choose hyper-parameters")
    said: dict[str, Any] = dict(draws=draws, draw_seed=draw_seed, keep=keep, last=last)
    made = planned(experiment, choices, **said, seeds=seeds, when=when, metric=metric)
    seeds, whens = _seeds(experiment, seeds), _whens(when)
    how["fed"] = feds = of_seeds(how.get("fed"), seeds)
    fitted(experiment, feds.get(seeds[0]))
    cells = {label: e.but(tags={"row": label}) for label, e in made.items()}
    _check_tunable(list(cells.values()), seeds, whens, feds)
    rows = sweep([seeded(e, seeds[0]) for e in cells.values()], **how)
    judge: dict[str, Any] = dict(whens=whens, last=last, metric=metric)
    found = _ended(rows, cells, seeds[:1], **judge)
    if seeds[1:]:
        tops = found.groupby("row", sort=False).max().nlargest(keep or len(cells)).index
        best = {label: e for label, e in cells.items() if label in tops}
        more = sweep([seeded(e, s) for s in seeds[1:] for e in best.values()], **how)
        rows = pd.concat([rows, more], ignore_index=True)
        found = _ended(rows, best, seeds, **judge)
    label, _ = found.index[int(found.to_numpy().argmax())]
    return made[label], rows


def planned(
    experiment: Experiment,
    choices: Any = None,
    *,
    draws: int | None = None,
    draw_seed: int = 0,
    seeds: Iterable[int] | None = None,
    keep: int | None = 4,
    when: str | Sequence[str] = "before",
    last: bool = False,
    metric: str = "acc_pct",
) -> dict[str, Experiment]:
    """What each choice of `tune`, which takes the same, makes of an Experiment; by its label.

    Raises
    ------
    ValueError
        For what `tune` refuses of them whatever the data are.
    """
    checks.count("tune", "keep", keep, "the number of choices that run with all seeds")
    checks.kind("tune", "last", last, "bool")
    checks.kind("tune", "metric", metric, "str")
    if checks.whole(draw_seed) is None or draw_seed < 0:
        raise ValueError(f"tune(draw_seed={draw_seed!r}): allowed is an integer >= 0")
    seeds, whens = _seeds(experiment, seeds), _whens(when)
    if draws is None:
        changes = _choices(choices)
    else:
        changes = drawn(experiment, draws, choices, draw_seed)
    _check_comparable(changes)
    made = {_label(changed): experiment.but(**changed) for changed in changes}
    for seed in seeds:
        seeded(experiment, seed)
    _check_judge(list(made.values()), metric)
    tuned = min((moments(e.finetune) for e in made.values()), key=len)
    stages = {json.dumps(finetune.plain(e.finetune)) for e in made.values()}
    if len(stages) > 1 and {*whens} <= {"before", "after"}:
        raise ValueError(
            f"tune(when={when!r}): fine-tuning comes after the last round, so that 'before' and "
            "'after' say nothing of choices of finetune; give when='tuned 3', of the epoch that "
            "counts, or all of them, of which each choice counts at its best"
        )
    for one in whens:
        legal = ("before", "after", *tuned)
        checks.known("when", one, legal, "each choice must be evaluated then")
    return made


def scores(
    rows: pd.DataFrame,
    when: str | Sequence[str] = "before",
    *,
    last: bool = False,
    metric: str = "acc_pct",
) -> pd.Series:
    """Return the validation accuracies in % by which `tune` chooses, or another metric.

    Parameters
    ----------
    rows : DataFrame
        In the long form, as `tune` returns them.
    when : str or several
        Moments at which models are judged, as for `tune`.
    last : bool
        At the last round in place of a run's best one.
    metric : str
        As for `tune`.

    Returns
    -------
    Series
        By row and when, in the order of the rows: means over the seeds that a row has.
    """
    whens = [when] if isinstance(when, str) else [*when]
    by = ["row", "when", "seed"]
    found = validated(rows[rows.when.isin(whens)], by, None, last=last, metric=metric)
    return compared(found.groupby(["row", "when"], sort=False).mean())


def drawn(
    experiment: Experiment, draws: int, ranges: Any = None, seed: int = 0
) -> list[dict[str, Any]]:
    """Random changes of an Experiment; the first changes nothing.

    Draw i of a field depends on its name, i and the seed alone: more draws begin with the same
    ones, and all methods get the same learning rates.

    Parameters
    ----------
    experiment : Experiment
    draws : int
        How many.
    ranges : dict, optional
        What is drawn: fields with a `Search` (`fields.log_uniform(0.01, 1)`, `uniform`, `among`), a
        list to draw from, or a dict of these; all else is the same in every draw. By default what
        `declared` gives.
    seed : int

    Examples
    --------
    >>> from pfl_core import Experiment
    >>> from pfl_core.util.fields import log_uniform
    >>> drawn(Experiment(), 3, {"lr": log_uniform(0.01, 1)})
    [{}, {'lr': 0.0102}, {'lr': 0.0316}]
    """
    checks.count("tune", "draws", draws, "the number of random choices")
    ranges = declared(experiment) if ranges is None else ranges
    if not isinstance(ranges, dict) or not any(map(_is_drawn, ranges.values())):
        raise ValueError(
            f"tune(choices={ranges!r}, draws={draws}): there is nothing to draw; allowed is "
            '{"lr": log_uniform(0.01, 1), ...}, with lists or what pfl_core.util.fields has, '
            "or nothing, which means what the fields declare"
        )
    return [{}] + [
        {name: _one(v, name, i, seed) for name, v in ranges.items()} for i in range(1, draws)
    ]


def declared(experiment: Experiment) -> dict[str, Any]:
    """What a random search draws of an Experiment and its method, as their fields declare it.

    Examples
    --------
    >>> from pfl_core import Experiment
    >>> found = declared(Experiment(method="fedprox"))
    >>> str(found["lr"]), str(found["method_args"]["mu"])
    ('0.01 to 0.5 on a log scale', '0.001 to 1 on a log scale, and 0.0')
    """
    method = METHODS[experiment.method]
    shared: dict[str, Any] = {**searched(experiment)}
    if rates := optim.OPTIMIZERS[experiment.optimizer].search:
        shared["lr"] = rates
    shared = {n: v for n, v in shared.items() if n not in method.untuned}
    for field, kinds in optim.KINDS.items():
        if args := searched(kinds[getattr(experiment, field)]):
            shared[f"{field}_args"] = args
    return shared | ({"method_args": own} if (own := searched(method)) else {})


def _is_drawn(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else []
    return isinstance(value, Search | list | tuple) and value != [] or any(map(_is_drawn, inner))


def _one(value: Any, path: str, i: int, seed: int) -> Any:
    # What draw i has at a path such as method_args.mu.
    if isinstance(value, list | tuple):
        value = Search(tuple(value))
        return _one(value.draw(rng(seed, f"tune/{path}", i)), f"{path}.", i, seed)
    if isinstance(value, Search):
        return value.draw(rng(seed, f"tune/{path}", i))
    if isinstance(value, dict):
        return {name: _one(inner, f"{path}.{name}", i, seed) for name, inner in value.items()}
    return value


def _seeds(experiment: Experiment, seeds: Iterable[int] | None) -> list[int]:
    if seeds is None:
        return [experiment.seed]
    given = list(seeds) if isinstance(seeds, Iterable) and not isinstance(seeds, str) else []
    if not given or len(set(given)) < len(given):
        raise ValueError(
            f"tune(seeds={seeds!r}): allowed is a list of different integers, (100, 101, 102)"
        )
    return given


def _whens(when: str | Sequence[str]) -> Sequence[str]:
    whens = (when,) if isinstance(when, str) else when
    if not isinstance(whens, list | tuple) or not whens:
        raise ValueError(
            f'tune(when={when!r}): allowed is "before", "after" or "tuned 3", or a list of these'
        )
    return whens


def _label(changes: dict[str, Any]) -> str:
    return json.dumps(changes, sort_keys=True, default=_named)


def _named(value: Any) -> Any:
    # What JSON cannot keep: other Experiments by their ids, numpy's numbers as Python's.
    if isinstance(value, Experiment):
        return value.id_for("") if value.dataset == "own" else value.id
    kept = checks.cast(value, "")
    return str(value) if kept is value else kept


def _ended(
    rows: pd.DataFrame,
    cells: dict[str, Experiment],
    seeds: list[int],
    whens: Sequence[str],
    last: bool,
    metric: str,
) -> pd.Series:
    # The scores, the higher the better, of those choices that ended with finite numbers with all
    # these seeds; says the others.
    ended = rows[rows.row.isin(cells) & rows.seed.isin(seeds) & ~rows.metric.isin(list(LOST))]
    count = ended.groupby("row", sort=False).seed.nunique()
    lost = [label for label in cells if count.get(label, 0) < len(seeds)]
    if lost:
        said = f"tune: {len(lost)} of {len(cells)} choices did not end with finite numbers"
        say(f"{said}, which counts against them: {'; '.join(lost)}")
    if len(lost) == len(cells):
        raise NoneEnded(
            f"tune: none of {len(cells)} choices ended with finite numbers; try lower values of lr"
        )
    found = scores(ended[~ended.row.isin(lost)], whens, last=last, metric=metric)
    if found.empty and metric in ended.metric.str.removesuffix(COUNTED).array:
        raise ValueError(
            f"tune(metric={metric!r}): it is undefined on the validation data of every client; "
            "give clients more of them, or judge by another metric"
        )
    if found.empty:
        raise _no_validation_data(next(iter(cells.values())))
    return -found if less_is_better(metric) else found


def _check_comparable(changes: list[dict[str, Any]]) -> None:
    # Of choices that are judged on other samples, the easiest samples would win.
    names = dict.fromkeys(name for changed in changes for name in changed)
    if name := next((n for n in names if n in settings.SEEDS), ""):
        raise ValueError(
            f"tune(choices) has {name!r}: among seeds the luckiest would win; give "
            "seeds=(0, 1, 2), over which a choice's accuracy is averaged"
        )
    if name := next((n for n in names if n in JUDGED_ON), ""):
        raise ValueError(
            f"tune(choices) has {name!r}: its values would be judged on different samples; say it "
            "in the Experiment, and tune one after another"
        )


def _check_judge(cells: list[Experiment], metric: str) -> None:
    for cell in cells:
        legal = ("acc_pct", *(m for m in cell.metrics if m not in LARGE))
        add = f"run with Experiment(metrics=({metric!r},))" * (metric in list_metrics())
        checks.known("metric that chooses", metric, legal, add)


def _check_tunable(
    cells: list[Experiment], seeds: list[int], whens: Sequence[str], feds: OfSeeds
) -> None:
    ready = (fitted(c, feds.get(seeds[0])) for c in cells)
    if "after" in whens and not all(
        evaluates_after(build.train_config(c), c.clients) for c in ready
    ):
        raise ValueError(
            "tune(when='after') reads models after local training; "
            "set eval_after=True in the Experiment"
        )
    # Without the data, all of it is published, or the sweep says what is missing.
    with contextlib.suppress(pools.DatasetMissing):
        for seed in seeds:  # all choices have the same clients
            one = seeded(cells[0], seed)
            dealt = feds[seed].index["val"] if feds else build.split(one).val
            if not any(map(len, dealt)):
                raise _no_validation_data(one)


def _no_validation_data(experiment: Experiment) -> ValueError:
    if experiment.dataset == "own":
        return ValueError("this Federation has no validation data; give it some: val=[...]")
    return ValueError(
        f"{experiment.partition} leaves no validation data; tune with a partition that does "
        "(split='70/10/20', for example)"
    )


def _choices(given: Any) -> list[dict[str, Any]]:
    # The changes to try, from a grid or a list of them.
    if isinstance(given, dict):
        if not given:
            raise ValueError(f"tune(choices): an empty dict; {ALLOWED}")
        for name, values in given.items():
            if not isinstance(values, list | tuple) or not values:
                raise ValueError(
                    f"tune(choices): {name!r} has {values!r}, not a list of values; {ALLOWED}"
                    + "; with draws=16 it is drawn" * isinstance(values, Search)
                )
        combined = itertools.product(*given.values())
        return [dict(zip(given, values, strict=True)) for values in combined]
    listed = isinstance(given, list | tuple) and all(isinstance(c, dict) for c in given)
    if not listed or not given:
        raise ValueError(f"tune(choices={given!r}); {ALLOWED}; or draws=16, random ones")
    return list(given)
