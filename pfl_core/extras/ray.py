"""Sweeps over a Ray cluster: `sweep(experiments, on="ray", cpus=1, gpus=0.25)`.

Each run is a task, and all nodes share the store. The cluster is that of $RAY_ADDRESS, or the one
to which `ray.init` was called before. Without either, Ray is started on this computer and listens
on 127.0.0.1 only: who can connect to a cluster can run any code on it (docs/cluster.md says what
Ray's token does). A task whose node is lost is started again on another one and goes on from the
run's checkpoint, so that only the rounds since then are lost. Every node needs pfl_core, the data
below the same $PFL_DATA, and the store at the same path.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.feds import OfSeeds
from pfl_core.experiments.store import Result
from pfl_core.experiments.workers import Failed
from pfl_core.util import checks

RETRIES = 10  # how often a run may lose its node
CARRIED = ("PFL_DATA", "PFL_OFFLINE", "PFL_HEADLESS")  # environment variables that tasks get


def start(ray: Any) -> None:
    """Connect to $RAY_ADDRESS; where it is not set, start Ray for this computer only.

    Raises
    ------
    RuntimeError
        If that Ray would listen to other computers, too.
    """
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)
        return
    with _without_clusters(ray._private.ray_constants):
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
    if open_to := {node["NodeManagerAddress"] for node in ray.nodes()} - {"127.0.0.1", "::1"}:
        ray.shutdown()
        raise RuntimeError(
            f"Ray would listen on {', '.join(sorted(open_to))}, not on this computer only; "
            "start it yourself (ray start --head) and set RAY_ADDRESS"
        )


@contextlib.contextmanager
def _without_clusters(constants: Any) -> Iterator[None]:
    """Switch clusters off in Ray's constants, as Ray itself does on macOS and Windows.

    All its servers then listen on the loopback's address. No argument of `ray.init` does this: it
    turns 127.0.0.1 into the address that others see.
    """
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def run_all(
    tried: Callable[..., Result | Failed],
    experiments: list[Experiment],
    store: Path,
    feds: OfSeeds,
    how: dict[str, Any],
    cpus: float,
    gpus: float | None,
) -> Iterator[Result | Failed]:
    """Run every Experiment as a task of the cluster; yield what comes of each when its run ends.

    Parameters
    ----------
    tried : function
        Called as `tried(plain, tags, store=store, fed=fed, **how)` on a node.
    experiments : list of Experiment
        What is run.
    store : Path
        Folder of the runs, the same on all nodes.
    feds : OfSeeds
        The user's own data for each seed, in folders.
    how : dict
        What else `run` takes, such as device.
    cpus : float
        CPUs that a run takes of its node; it gets as many workers, one at least.
    gpus : float or None
        GPUs that a run takes of its node. None: a quarter of one if any node has a GPU and the
        device is not "cpu", else none.

    Raises
    ------
    ImportError
        Without the package ray.
    ValueError
        If no node has what a run takes.
    Exception
        What is no run's own error, such as the end of the cluster; the runs that wait are
        cancelled.
    """
    ray = _connected()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if gpus is None:
        any_gpu = any(node.get("GPU") for node in nodes)
        gpus = 0.25 if any_gpu and how.get("device") != "cpu" else 0
    _check_fit(nodes, cpus, gpus)
    task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES)(_task)
    environ = {name: os.environ[name] for name in CARRIED if name in os.environ}
    how = {"workers": max(1, int(cpus))} | how | {"store": store.resolve()}
    started = [
        task.remote(tried, e.plain(), e.tags, environ, how | {"fed": feds.get(e.seed)})
        for e in experiments
    ]
    yield from _as_they_end(ray, started)


def _connected() -> ModuleType:
    """The module ray, connected to a cluster or to one that begins here."""
    with checks.extra("ray", 'on="ray"'):
        import ray
    if not ray.is_initialized():
        start(ray)
    return ray


def _as_they_end(ray: ModuleType, waiting: list[Any]) -> Iterator[Result | Failed]:
    try:
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1)
            yield ray.get(ready[0])
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    finally:  # after an interruption, too: no run goes on unseen
        for ref in waiting:
            ray.cancel(ref, force=True)


def _check_fit(nodes: list[dict[str, float]], cpus: float, gpus: float) -> None:
    """Raise ValueError if no node has the resources of a run: Ray would wait for ever."""
    if any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
        return
    there = "; ".join(
        f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes
    )
    raise ValueError(
        f"a run asks for cpus={cpus:g}, gpus={gpus:g}, and no node has that: {there}; ask for less"
    )


def _task(
    tried: Callable[..., Result | Failed],
    plain: dict[str, Any],
    tags: dict[str, str],
    environ: dict[str, str],
    how: dict[str, Any],
) -> Result | Failed:
    """What a node does; `environ` is what it takes of the environment of who asked."""
    with _environment(environ):
        return tried(plain, tags, **how)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a while: Ray runs other tasks in the same process later."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
