"""Sweeps over a Ray cluster: sweep(experiments, on="ray", cpus=1, gpus=0.25).

Each run is a task, and all nodes share the store. The cluster is that of $RAY_ADDRESS, or the one
to which `ray.init` was called before. Without either, Ray is started on this computer and listens
on 127.0.0.1 only: who can connect to a cluster can run any code on it (docs/cluster.md says what
Ray's token does). A task whose node is lost is started again on another one and goes on from the
run's checkpoint, so that only the rounds since then are lost. Every node needs pfl_core, the data
below the same $PFL_DATA, and the store at the same path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.store import Result

RETRIES = 10  # nodes that one run may lose
CARRIED = ("PFL_DATA", "PFL_OFFLINE", "PFL_HEADLESS")


def start(ray: Any) -> None:
    """Connect to $RAY_ADDRESS, else start Ray on this computer, for nobody else.

    RuntimeError if it listens to others, too.
    """
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)
        return
    # No argument of ray.init does this (it turns 127.0.0.1 into the address that others see). Where
    # clusters are switched off, as Ray does on macOS and Windows, its address is the loopback's,
    # and with that every one of its servers'.
    constants = ray._private.ray_constants
    as_it_was, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
    finally:
        constants.ENABLE_RAY_CLUSTER = as_it_was
    if open_to := {n["NodeManagerAddress"] for n in ray.nodes()} - {"127.0.0.1", "::1"}:
        ray.shutdown()
        raise RuntimeError(
            f"Ray would listen on {', '.join(sorted(open_to))}, not on this computer only; "
            "start it yourself (ray start --head) and set RAY_ADDRESS"
        )


def run_all(
    run: Callable[..., Result],
    experiments: list[Experiment],
    store: Path,
    how: dict[str, Any],
    cpus: float,
    gpus: float | None,
) -> Iterator[Result]:
    """run(experiment, store=store, **how) of each Experiment, in the order in which they end.

    cpus and gpus are what one run takes of a node; gpus=None takes a quarter of a GPU where there
    are any. Raises ImportError without ray, ValueError where no node has what a run asks for, and a
    run's own error as it was raised.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError('on="ray" needs the package ray: pip install "pfl-core[ray]"') from error
    if not ray.is_initialized():
        start(ray)
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    if gpus is None:
        gpus = 0.25 if how.get("device") != "cpu" and any(n.get("GPU") for n in nodes) else 0
    fits = [n for n in nodes if n.get("CPU", 0) >= cpus and n.get("GPU", 0) >= gpus]
    if not fits:  # Ray would wait for ever
        there = "; ".join(f"{n.get('CPU', 0):g} CPUs and {n.get('GPU', 0):g} GPUs" for n in nodes)
        raise ValueError(
            f"a run asks for cpus={cpus:g}, gpus={gpus:g}, and no node has that: {there}; "
            "ask for less"
        )
    task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES)(_task)
    environ = {name: os.environ[name] for name in CARRIED if name in os.environ}
    how = {"workers": max(1, int(cpus))} | how | {"store": store.resolve()}
    waiting = [task.remote(run, e.plain(), e.tags, environ, how) for e in experiments]
    try:
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1)
            yield ray.get(ready[0])
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    finally:  # after an interruption: nothing goes on behind the user's back
        for ref in waiting:
            ray.cancel(ref, force=True)


def _task(
    run: Callable[..., Result],
    plain: dict,
    tags: dict,
    environ: dict[str, str],
    how: dict[str, Any],
) -> Result:
    os.environ.update(environ)
    return run(Experiment.from_plain(plain).but(tags=tags), **how)
