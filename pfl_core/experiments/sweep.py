"""Many Experiments -> rows: found, or computed here, in other processes or on a cluster; tuning."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from pfl_core.data import pools
from pfl_core.data.federation import Federation
from pfl_core.engine.finetune import moments
from pfl_core.experiments import build, lookup, workers
from pfl_core.experiments.build import fitted
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.metrics import ROW_COLUMNS, validated
from pfl_core.experiments.run import check_how, pick_device
from pfl_core.experiments.starts import settled
from pfl_core.experiments.store import Result
from pfl_core.experiments.workers import Failed, tried
from pfl_core.util import checks, paths
from pfl_core.util.progress import Progress
from pfl_core.util.say import say


def sweep(
    experiments: Iterable[Experiment],
    *,
    recompute: bool = False,
    found: Callable[[Experiment], pd.DataFrame | None] | None = None,
    jobs: int | None = None,
    on: str | None = None,
    cpus: float = 1,
    gpus: float | None = None,
    store: str | Path | None = None,
    fed: Federation | None = None,
    source: Result | Federation | None = None,
    **how: Any,
) -> pd.DataFrame:
    """Run many Experiments, those that the store has not got yet, and return the rows of all.

    A run that fails, because it diverges or raises an error, leaves a message and no rows; the
    others are computed and stored.

    Parameters
    ----------
    experiments : list of Experiment; one that is in it twice counts once
    recompute : compute all of them anew and keep the old ones, as `run(experiment, recompute=True)`
    found : function of an Experiment that gives its rows from elsewhere, or None; what the store
        does not hold is looked for there before it is computed
    jobs : number of runs at a time, each in a process; of several GPUs each process has its own;
        by default one, but one a core of a CPU where a round trains a single client (pFedHN)
    on : "local" (this machine) or "ray" (a cluster, docs/cluster.md), by default $PFL_ON or "local"
    cpus, gpus : what a run takes of a node of the cluster
    store : folder of the runs, by default store/ in $PFL_RUNS
    fed : a Federation, for Experiments with dataset="own"; for other processes and nodes it is
        written to a folder in the store, for as long as they run, unless it was opened from one
    source : as for `run`, of all Experiments that start from another one; they run one by one
    **how : what else `run` takes: device, executor, workers, keep_state

    Returns
    -------
    DataFrame
        One number a row, in the order of `experiments`; see `Result.rows`.

    Raises
    ------
    Exception
        The first run's error, where all runs raise one.

    Examples
    --------
    >>> from pfl_core import Experiment, grid, sweep
    >>> base = Experiment(clients=3, model="mlp", rounds=1, partition="iid", max_samples=50)
    >>> found = sweep(grid(base, {"FedPer": {"method": "fedper"}}), device="cpu")
    >>> found[["row", "method"]].drop_duplicates().to_numpy().tolist()
    [['FedPer', 'fedper']]
    """
    on = on or os.environ.get("PFL_ON") or "local"
    checks.count("sweep", "jobs", jobs, "the number of runs at a time")
    wanted = _fitted(experiments, fed, on, source)
    if on == "local":
        check_how(**how)  # what all runs would fail of
    store, how = paths.store_folder(store), how | {"fed": fed}
    checks.make_folder(store)
    if source is not None:  # one after another in this process, which has it
        given = ((e, source if e.earlier else None) for e in wanted)
        how |= dict(store=store, recompute=recompute)
        return _rows(_said((tried(e, source=s, **how) for e, s in given), len(wanted)))
    how["recompute"] = recompute
    computed = functools.partial(_computed, on=on, jobs=jobs, cpus=cpus, gpus=gpus, how=how)
    checksum = fed.checksum if fed else None
    return _rows(_found_or_computed(wanted, store, recompute, found, computed, checksum))


def _fitted(
    experiments: Any, fed: Federation | None, on: str, source: Result | Federation | None
) -> list[Experiment]:
    if isinstance(experiments, Experiment):
        raise TypeError(
            "sweep takes a list of Experiments, got one; "
            "write sweep([experiment]), or run(experiment)"
        )
    checks.known("on", on, ("local", "ray"))
    once = {}
    for i, e in enumerate(experiments):
        if not isinstance(e, Experiment):
            raise TypeError(
                f"sweep takes a list of Experiments, and item {i} is a {type(e).__name__}; make "
                "each with experiment.but(...), and join lists as [*a, *b]"
            )
        # Rows that stand there twice would be counted as two seeds.
        ready = settled(e, fed, source if e.earlier else None)
        once.setdefault(json.dumps([e.plain(), e.tags], sort_keys=True), ready)
    if source is not None and not any(e.earlier for e in once.values()):
        raise ValueError("sweep(source=...): none of these Experiments has init_from; leave it out")
    return [*once.values()]


def _found_or_computed(
    experiments: list[Experiment],
    store: Path,
    recompute: bool,
    found: Callable[[Experiment], pd.DataFrame | None] | None,
    computed: Callable[[list[Experiment], Path], Iterable[Result | Failed]],
    checksum: str | None = None,
) -> Iterable[Result | Failed | pd.DataFrame]:
    # In the order of `experiments` each one's Result, or the rows that were found elsewhere.
    # checksum: of the user's own data, of which nothing is elsewhere.
    named = _once((e.id_for(checksum) if checksum else e.id, e) for e in experiments)
    look = None if recompute or checksum else found
    rows = [look(e) if look and not lookup.is_there(e, store) else None for _, e in named]
    here: dict[str, Experiment] = {}
    for (i, e), elsewhere in zip(named, rows, strict=True):
        if elsewhere is None:
            here.setdefault(i, e)
    # What is there is read in this process: none is started for it.
    there = {i: None if recompute else lookup.stored(e, store, checksum) for i, e in here.items()}
    done: dict[str, Result | Failed] = {i: r for i, r in there.items() if r}
    todo = {i: e for i, e in here.items() if i not in done}
    for result in _said(computed([*todo.values()], store), len(named)):
        if isinstance(result, Failed):
            plain = result.experiment.plain()
            done[next(i for i, e in todo.items() if e.plain() == plain)] = result
            continue
        if result.key not in here:
            raise RuntimeError(
                f"run {result.id}, which is kept, is not one of those that were asked for: it "
                "ended early, or the code of its method or model has changed since this process "
                "or its workers began; restart Python, and sweep again"
            )
        done[result.key] = result
    _say_failures(done[i] for i in here)
    for (i, e), elsewhere in zip(named, rows, strict=True):
        got = done[i] if elsewhere is None else elsewhere
        yield replace(got, experiment=e) if isinstance(got, Result) else got


def _said(results: Iterable[Result | Failed], of: int) -> Iterator[Result | Failed]:
    # An error is told when it comes; that of a single run is raised, see `_rows`.
    for result in results:
        if isinstance(result, Failed) and of > 1:
            say(result)
        yield result


def _once(named: Iterable[tuple[str, Experiment]]) -> list[tuple[str, Experiment]]:
    # Two ways to write one run, in one cell, would be counted as two seeds.
    found = list(named)
    return list({(i, json.dumps(e.tags, sort_keys=True)): (i, e) for i, e in found[::-1]}.values())[
        ::-1
    ]


def _say_failures(results: Iterable[Result | Failed]) -> None:
    # Each time, not only when they are computed: this is why rows are missing.
    for result in results:
        if isinstance(result, Result) and not result.ok:
            e = result.experiment
            say(f"run {result.id} ({e.method}, seed {e.seed}) {result.meta['status']}")


def _computed(
    todo: list[Experiment],
    store: Path,
    *,
    on: str,
    jobs: int | None,
    cpus: float,
    gpus: float | None,
    how: dict[str, Any],
) -> Iterable[Result | Failed]:
    # The results of runs that have to be computed, with a progress bar.
    for name in dict.fromkeys(e.dataset for e in todo if e.dataset != "own"):
        pools.load(name)  # what is missing is said before anything is trained
    for e in todo:
        if e.weights:
            e.weights.keep(store)  # where workers and nodes find it
    if todo and on == "ray":
        results = _run_on_ray(todo, store, how, cpus, gpus)
    else:
        results = _run_all(todo, jobs, store, how)
    with Progress(len(todo), "runs", done=0) as bar, _counted(bar):
        for count, result in enumerate(results, 1):
            yield result
            bar.at(count)


def _run_on_ray(
    todo: list[Experiment], store: Path, how: dict[str, Any], cpus: float, gpus: float | None
) -> Iterable[Result | Failed]:
    ray = importlib.import_module("pfl_core.extras.ray")  # what is optional lies above this module
    with _in_a_folder(how.get("fed"), store) as fed:
        yield from ray.run_all(workers.tried_there, todo, store, how | {"fed": fed}, cpus, gpus)


@contextlib.contextmanager
def _in_a_folder(fed: Federation | None, store: Path) -> Iterator[Federation | None]:
    # The user's own data for other processes, which open the folder that they lie in.
    if fed is None or fed.folder:
        yield fed
        return
    checks.make_folder(store)
    with tempfile.TemporaryDirectory(prefix="own-data.", dir=store) as folder:
        yield fed.moved(Path(folder).absolute() / "data")


@contextlib.contextmanager
def _counted(bar: Progress) -> Iterator[None]:
    # Ctrl-C says in one line how many runs are finished, and what is kept of the one under way.
    try:
        yield
    except KeyboardInterrupt as error:
        told = getattr(error, "__notes__", ["run it again to go on"])
        error.__notes__ = ["; ".join([f"{bar.done} of {bar.total} runs are finished", *told])]
        raise


def _rows(found: Iterable[Result | Failed | pd.DataFrame]) -> pd.DataFrame:
    # Rows of those that did not fail; the first error where all did.
    frames: list[pd.DataFrame] = []
    failed: list[Failed] = []
    for r in found:
        if isinstance(r, Failed):
            failed.append(r)
        elif isinstance(r, pd.DataFrame) or r.ok:
            frames.append(r if isinstance(r, pd.DataFrame) else r.rows)
    if failed and not frames:
        raise failed[0].error
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=ROW_COLUMNS)


def tune(
    experiment: Experiment,
    choices: dict[str, list[Any]] | list[dict[str, Any]],
    *,
    split: str = "val",
    when: str = "before",
    **how: Any,
) -> tuple[Experiment, pd.DataFrame]:
    """Choose hyper-parameters on validation data: the best of `choices`, and the rows of all.

    A choice counts with its best round's accuracy, the mean over clients; of equal ones the first.

    Parameters
    ----------
    experiment : what is tuned, with one seed; its partition must give clients validation samples
    choices : values of fields, {"lr": [0.01, 0.1], "method_args": [{"mu": 1}, {"mu": 2}]}, of which
        all combinations are tried; or a list of changes, each as `Experiment.but` takes it
    split : "val"; all else is an error, so that nobody chooses on test data
    when : "before" or "after" local training models are judged; "tuned 3": after 3 epochs of
        their fine-tuning
    **how : what else `sweep` takes

    Returns
    -------
    Experiment, DataFrame
        The best one, and the rows of all; their column `row` holds the choice as JSON.

    Raises
    ------
    ValueError
        Before anything is trained, for wrong `choices` or `split`, or without validation data.

    Examples
    --------
    >>> from pfl_core import Experiment, tune
    >>> experiment = Experiment(clients=3, model="mlp", rounds=1, partition="iid",
    ...                         partition_args={"split": "70/10/20"})
    >>> best, rows = tune(experiment, {"lr": [0.01, 0.1]}, device="cpu")
    >>> best.lr in (0.01, 0.1), sorted(rows.row.unique())
    (True, ['{"lr": 0.01}', '{"lr": 0.1}'])
    """
    if not isinstance(experiment, Experiment):
        got = type(experiment).__name__
        raise TypeError(f"tune takes an Experiment, got {got}; of several, tune one after another")
    fitted(experiment, how.get("fed"))
    if split != "val":
        raise ValueError(f"tune(split={split!r}): only 'val' may choose hyper-parameters")
    changes = _choices(choices)
    labels = [json.dumps(c, sort_keys=True, default=_named) for c in changes]
    named = zip(changes, labels, strict=True)
    cells = [experiment.but(**changed).but(tags={"row": label}) for changed, label in named]
    _check_tunable(cells, when, how.get("fed"))
    rows = sweep(cells, **how)
    return experiment.but(**changes[labels.index(_best(rows, cells, when))]), rows


def _named(source: Experiment) -> str:
    return source.id_for("") if source.dataset == "own" else source.id


def _best(rows: pd.DataFrame, cells: list[Experiment], when: str) -> str:
    # The label of the choice whose best round has the highest validation accuracy.
    if rows.empty:
        raise ValueError(
            f"tune: none of {len(cells)} choices ended with finite numbers; try lower values of lr"
        )
    found = validated(rows, ["row"], when)
    if found.empty:
        raise _no_validation_data(cells[0])
    return str(found.idxmax())


def _check_tunable(cells: list[Experiment], when: str, fed: Federation | None) -> None:
    tuned = min((moments(c.finetune) for c in cells), key=len)
    checks.known("when", when, ("before", "after", *tuned), "each choice must be evaluated then")
    if when == "after" and any(
        c.eval_after is False or c.eval_after is None and c.participation < 1 for c in cells
    ):
        raise ValueError(
            "tune(when='after') reads models after local training; "
            "set eval_after=True in the Experiment"
        )
    # Without the data, all of it is published, or the sweep says what is missing.
    with contextlib.suppress(pools.DatasetMissing):
        dealt = [fed.index["val"]] if fed else (build.split(c).val for c in cells)
        if not any(len(part) for lists in dealt for part in lists):
            raise _no_validation_data(cells[0])


def _no_validation_data(experiment: Experiment) -> ValueError:
    if experiment.dataset == "own":
        return ValueError("this Federation has no validation data; give it some: val=[...]")
    return ValueError(
        f"{experiment.partition} leaves no validation data; tune with a partition that does "
        "(split='70/10/20', for example)"
    )


def _choices(given: Any) -> list[dict[str, Any]]:
    # The changes to try, from a grid or a list of them.
    allowed = (
        'allowed is {"lr": [0.01, 0.1], ...}, whose combinations are tried, '
        'or a list of changes, [{"lr": 0.01}, ...]'
    )
    if isinstance(given, dict):
        if not given:
            raise ValueError(f"tune(choices): an empty dict; {allowed}")
        for name, values in given.items():
            if not isinstance(values, list | tuple) or not values:
                raise ValueError(
                    f"tune(choices): {name!r} has {values!r}, not a list of values; {allowed}"
                )
        combined = itertools.product(*given.values())
        return [dict(zip(given, values, strict=True)) for values in combined]
    listed = isinstance(given, list | tuple) and all(isinstance(c, dict) for c in given)
    if not listed or not given:
        raise ValueError(f"tune(choices={given!r}); {allowed}")
    return list(given)


def _jobs(experiments: list[Experiment], how: dict) -> int:
    # A single client's training occupies one core.
    alone = all(e.participation * e.clients < 1.5 for e in experiments)
    here = not any(e.in_main for e in experiments)
    on_cpu = pick_device(how.get("device", "auto")) == "cpu"
    return (os.cpu_count() or 1) if alone and here and on_cpu else 1


def _run_all(
    experiments: list[Experiment], jobs: int | None, store: Path, how: dict
) -> Iterable[Result | Failed]:
    jobs = min(_jobs(experiments, how) if jobs is None else jobs, len(experiments))
    if jobs > 1 and any(e.in_main for e in experiments):
        say(
            "a method, model or partition is defined in this notebook or script, "
            "where worker processes do not find it: jobs=1"
        )
        jobs = 1
    if jobs <= 1:
        yield from map(functools.partial(tried, store=store, **how), experiments)
        return
    how = {"workers": max(1, (os.cpu_count() or 1) // jobs)} | how
    with _in_a_folder(how.get("fed"), store) as fed:
        yield from workers.run_all(experiments, jobs, how | {"store": store, "fed": fed})
