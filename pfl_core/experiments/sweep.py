"""Many Experiments -> rows: found, or computed here, in other processes or on a cluster."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from pfl_core.data import pools
from pfl_core.data.federation import Federation
from pfl_core.engine.participation import participants
from pfl_core.experiments import lookup, workers
from pfl_core.experiments.experiment import TAGS, Experiment
from pfl_core.experiments.feds import Given, OfSeeds, in_folders, of_seeds
from pfl_core.experiments.metrics import DIVERGED, FAILED, ROW_COLUMNS, lost
from pfl_core.experiments.run import check_how, pick_device
from pfl_core.experiments.settings import setting
from pfl_core.experiments.starts import id_of_start, settled
from pfl_core.experiments.store import Result
from pfl_core.experiments.workers import Failed, tried
from pfl_core.util import checks, paths
from pfl_core.util.progress import Progress
from pfl_core.util.say import say

HOW = ("device", "executor", "workers", "keep_state", "on_round")  # what is handed on to `run`


def sweep(
    experiments: Iterable[Experiment],
    *,
    recompute: bool = False,
    compute: bool = True,
    found: Callable[[Experiment], pd.DataFrame | None] | None = None,
    jobs: int | None = None,
    on: str | None = None,
    cpus: float = 1,
    gpus: float | None = None,
    store: str | Path | None = None,
    fed: Given = None,
    source: Result | Federation | None = None,
    **how: Any,
) -> pd.DataFrame:
    """Run many Experiments, those that the store has not got yet, and return the rows of all.

    A run that diverges or raises an error leaves a message and one row, of metric "diverged" or
    "failed", by which tables know it; the others are computed and stored.

    Parameters
    ----------
    experiments : list of Experiment; one that is in it twice counts once
    recompute : compute all of them anew and keep the old ones, as `run(experiment, recompute=True)`
    compute : False: compute nothing, and raise `Unfinished` where a run is not finished
    found : function of an Experiment that gives its rows from elsewhere, or None; what the store
        does not hold is looked for there before it is computed
    jobs : number of runs at a time, each in a process; of several GPUs each process has its own;
        by default one, but one a core of a CPU where a round trains a single client (pFedHN)
    on : "local" (this machine) or "ray" (a cluster, docs/cluster.md), by default $PFL_ON or "local"
    cpus, gpus : what a run takes of a node of the cluster
    store : folder of the runs, by default store/ in $PFL_RUNS
    fed : for Experiments with dataset="own" a Federation, or a function of the seed that gives one:
        intervals over seeds then include the draw of clients. For other processes and nodes it is
        written to a folder in the store, for as long as they run, unless it was opened from one
    source : as for `run`, of all Experiments that start from another one; they run one by one
    **how : what else `run` takes: device, executor, workers, keep_state, on_round

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
    for name in how:
        checks.known(
            "sweep's argument", name, (*[*inspect.signature(sweep).parameters][1:-1], *HOW)
        )
    listed = _listed(experiments, on)
    feds = of_seeds(fed, (e.seed for e in listed))
    wanted = _fitted(listed, feds, source)
    _say_what_seeds_draw(fed, feds)
    if on == "local":
        check_how(**how)  # what all runs would fail of
    store, how = paths.store_folder(store), how | {"recompute": recompute}
    checks.make_folder(store)
    if source is not None and (on != "local" or (jobs or 1) > 1):
        raise ValueError(
            f"sweep(source=..., on={on!r}, jobs={jobs}): only this process has source; leave out "
            "on and jobs, and the runs go one by one"
        )
    kw: dict[str, Any] = dict(on=on, jobs=jobs, cpus=cpus, gpus=gpus, how=how)
    computed = functools.partial(_computed, **kw, feds=feds, source=source) if compute else _none
    return _rows(_found_or_computed(wanted, store, recompute, found, computed, feds, source))


class Unfinished(LookupError):
    """Runs are asked for that are not finished, and nothing is to be computed."""


def _none(todo: list[Experiment], store: Path) -> list[Result | Failed]:
    if todo:
        raise Unfinished(f"{len(todo)} runs are not finished in {store}")
    return []


def _say_what_seeds_draw(fed: Given, feds: OfSeeds) -> None:
    if isinstance(fed, Federation) and len(feds) > 1:
        say(
            f"sweep: {len(feds)} seeds over one Federation, so that intervals over seeds leave out "
            "the draw of clients; if clients are drawn, give a function of the seed: "
            "fed=lambda seed: Federation(...)"
        )


def _listed(experiments: Any, on: str) -> list[Experiment]:
    if isinstance(experiments, Experiment):
        raise TypeError(
            "sweep takes a list of Experiments, got one; "
            "write sweep([experiment]), or run(experiment)"
        )
    checks.known("on", on, ("local", "ray"))
    listed = list(experiments)
    for i, e in enumerate(listed):
        if not isinstance(e, Experiment):
            raise TypeError(
                f"sweep takes a list of Experiments, and item {i} is a {type(e).__name__}; make "
                "each with experiment.but(...), and join lists as [*a, *b]"
            )
    return listed


def _fitted(
    experiments: list[Experiment], feds: OfSeeds, source: Result | Federation | None
) -> list[Experiment]:
    once = {}
    for e in experiments:
        # Rows that stand there twice would be counted as two seeds.
        ready = settled(e, feds.get(e.seed), source if e.earlier else None)
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
    feds: OfSeeds,
    source: Result | Federation | None,
) -> Iterable[Result | Failed | pd.DataFrame]:
    # In the order of `experiments` each one's Result, or the rows that were found elsewhere.
    # Of runs over a user's own data nothing is elsewhere.
    own = {seed: fed.checksum for seed, fed in feds.items()}

    def checksum(e: Experiment) -> str:
        return own[e.seed] if own else pools.checksum(e.dataset)

    def name(e: Experiment) -> str:
        return e.id_for(checksum(e), id_of_start(e, source if e.earlier else None))

    named = _once((name(e), e) for e in experiments)
    look = None if recompute or feds or source is not None else found
    rows = [look(e) if look and not lookup.is_there(e, store) else None for _, e in named]
    here: dict[str, Experiment] = {}
    for (i, e), elsewhere in zip(named, rows, strict=True):
        if elsewhere is None:
            here.setdefault(i, e)
    # What is there is read in this process: none is started for it.
    there = {} if recompute else here
    looked = {i: lookup.find(e, i, checksum(e), store) for i, e in there.items()}
    done: dict[str, Result | Failed] = {i: r for i, r in looked.items() if r}
    todo = {i: e for i, e in here.items() if i not in done}
    for result in _said(computed([*todo.values()], store), len(named)):
        if isinstance(result, Failed):
            plain = result.experiment.plain()
            done[next(i for i, e in todo.items() if e.plain() == plain)] = result
            continue
        if result.key not in here:
            raise RuntimeError(
                f"run {result.id}, which is kept, is not one of those that were asked for: it "
                "ended early, or the code of its method or model, or what that reads, has changed "
                "since this process or its workers began; restart Python, and sweep again"
            )
        done[result.key] = result
    _say_failures(done[i] for i in here)
    for (i, e), elsewhere in zip(named, rows, strict=True):
        got = done[i] if elsewhere is None else elsewhere
        if isinstance(got, Failed):
            got = got._replace(experiment=e)  # with the tags of this cell
        yield _as_asked(got, e, feds) if isinstance(got, Result) else got


def _as_asked(result: Result, experiment: Experiment, feds: OfSeeds) -> Result:
    # With the tags of now; the data, too, may be known by more than when it was computed.
    dealing = feds[experiment.seed].dealing if feds else ""
    meta = result.meta | ({"dealing": dealing} if dealing else {})
    return replace(result, experiment=experiment, meta=meta)


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
    feds: OfSeeds,
    source: Result | Federation | None,
    how: dict[str, Any],
) -> Iterable[Result | Failed]:
    # The results of runs that have to be computed, with a progress bar.
    for name in dict.fromkeys(e.dataset for e in todo if e.dataset != "own"):
        pools.load(name)  # what is missing is said before anything is trained
    for e in todo:
        if e.weights:
            e.weights.keep(store)  # where workers and nodes find it
    if source is not None:  # this process has it
        given = ({"source": source} if e.earlier else {} for e in todo)
        each = zip(todo, given, strict=True)
        results = (tried(e, store=store, fed=feds.get(e.seed), **s, **how) for e, s in each)
    elif todo and on == "ray":
        results = _run_on_ray(todo, store, feds, how, cpus, gpus)
    else:
        results = _run_all(todo, jobs, store, feds, how)
    with Progress(len(todo), "runs", done=0) as bar, _counted(bar):
        for count, result in enumerate(results, 1):
            yield result
            bar.at(count)


def _run_on_ray(
    todo: list[Experiment],
    store: Path,
    feds: OfSeeds,
    how: dict[str, Any],
    cpus: float,
    gpus: float | None,
) -> Iterable[Result | Failed]:
    ray = importlib.import_module("pfl_core.extras.ray")  # what is optional lies above this module
    with in_folders(feds, store) as there:
        yield from ray.run_all(workers.tried_there, todo, store, there, how, cpus, gpus)


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
    # Rows of those that ended, one row of each other; the first error where all raised one.
    frames: list[pd.DataFrame] = []
    failed: list[Failed] = []
    for r in found:
        if isinstance(r, Failed):
            failed.append(r)
            frames.append(_failed(r.experiment))
        elif isinstance(r, pd.DataFrame):
            frames.append(r)
        else:
            frames.append(r.rows if r.ok else r.rows[r.rows.metric == DIVERGED])
    if failed and len(failed) == len(frames):
        raise failed[0].error
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=ROW_COLUMNS)


def _failed(e: Experiment) -> pd.DataFrame:
    # All that is known of a run that raised an error; it is none of the store's.
    line: dict[str, Any] = dict.fromkeys(ROW_COLUMNS, "") | {"run": None}
    line |= {n: getattr(e, n) for n in ("method", "dataset", "partition", "model", "seed")}
    line |= {tag: e.tags.get(tag, "") for tag in TAGS} | lost(FAILED)
    line |= dict(n_clients=e.clients or 0, revision=0, wall_s=0.0, setting=setting(e.plain(), {}))
    seed = e.seed if e.partition_seed is None else e.partition_seed
    return pd.DataFrame([line | dict(partition_seed=seed)])


def _jobs(experiments: list[Experiment], how: dict) -> int:
    # A single client's training occupies one core.
    alone = all(participants(e.participation, e.clients) == 1 for e in experiments)
    here = not any(e.in_main for e in experiments)
    on_cpu = pick_device(how.get("device", "auto")) == "cpu"
    return (os.cpu_count() or 1) if alone and here and on_cpu else 1


def _run_all(
    experiments: list[Experiment], jobs: int | None, store: Path, feds: OfSeeds, how: dict
) -> Iterable[Result | Failed]:
    jobs = min(_jobs(experiments, how) if jobs is None else jobs, len(experiments))
    if jobs > 1 and any(e.in_main for e in experiments):
        say(
            "a method, model, partition, metric or data set is defined in this notebook or script, "
            "where worker processes do not find it: jobs=1"
        )
        jobs = 1
    if jobs <= 1:
        yield from (tried(e, store=store, fed=feds.get(e.seed), **how) for e in experiments)
        return
    how = {"workers": max(1, (os.cpu_count() or 1) // jobs)} | how | {"store": store}
    with in_folders(feds, store) as there:
        yield from workers.run_all(experiments, jobs, there, how)
