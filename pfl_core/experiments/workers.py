"""Runs in worker processes of this computer, and what is left of a run that raises an error."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import torch

from pfl_core.data.federation import Federation
from pfl_core.engine.simulate import Interrupted
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.feds import OfSeeds
from pfl_core.experiments.run import run
from pfl_core.experiments.store import Result
from pfl_core.util import checks


class Failed(NamedTuple):
    """What is left of a run that raised an error: nothing in the store, but for a checkpoint."""

    experiment: Experiment
    error: Exception

    def __str__(self) -> str:
        text = checks.printable(" ".join(str(self.error).split()))
        return f"{self.experiment!r} failed: {type(self.error).__name__}: {text}"


def tried(experiment: Experiment, **how: Any) -> Result | Failed:
    """`run(experiment, **how)`; its error is returned, so that other runs can go on.

    Only what asks to stop is raised: Interrupted, and what is no Exception, as Ctrl-C.
    """
    try:
        return run(experiment, **how)
    except Interrupted:
        raise
    except Exception as error:
        _forget_frames(error)
        return Failed(experiment, error)


def tried_there(plain: dict[str, Any], tags: dict[str, str], **how: Any) -> Result | Failed:
    """`tried` in another process, which gets an Experiment as its plain values."""
    try:
        experiment = Experiment.from_plain(plain).but(tags=tags)
    except Exception as error:  # its code is not found here
        return Failed(Experiment.read(plain), _to_send(error))
    found = tried(experiment, **how)
    return found._replace(error=_to_send(found.error)) if isinstance(found, Failed) else found


def _forget_frames(error: BaseException | None) -> None:
    # Their variables hold models and data, which the next run may have no memory beside.
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _to_send(error: Exception) -> Exception:
    # An error that survives pickling, with its traceback as a note.
    said = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # its class may do anything
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"in another process:\n{said}")
    return error


def run_all(
    experiments: list[Experiment], jobs: int, feds: OfSeeds, how: dict[str, Any]
) -> Iterator[Result | Failed]:
    """Run Experiments in worker processes, `jobs` at a time; yield what comes of each, in order.

    Workers have the current folder, sys.path and the environment of now.

    Raises
    ------
    RuntimeError
        If a worker process ends, or none can be started.
    """
    around = os.path.abspath("."), sys.path, _variables()
    packed = [(e.plain(), e.tags, feds.get(e.seed), *around) for e in experiments]
    try:
        found = _pool(jobs).map(functools.partial(_in_worker, **how), packed)
    except (OSError, ImportError, NotImplementedError) as error:  # semaphores, or processes
        _pool.cache_clear()
        raise RuntimeError(
            f"no worker processes can be started here ({error}): they need shared memory that can "
            "be written (/dev/shm) and processes that are allowed; use jobs=1"
        ) from error
    try:
        yield from found
    except BaseException as error:
        # Interrupted, or a worker died: nothing goes on behind the user's back.
        _pool(jobs).shutdown(wait=False, cancel_futures=True)
        _pool.cache_clear()
        if isinstance(error, BrokenProcessPool):
            raise RuntimeError(
                f"one of {jobs} worker processes ended (by hand, for want of memory, or because a "
                "script calls sweep without `if __name__ == '__main__':`); run it again, with "
                "fewer jobs where memory is short: it goes on from finished runs and checkpoints"
            ) from error
        raise


def _variables() -> dict[str, str]:
    # What code reads of them counts in an id. Each worker has a GPU of its own.
    return {name: v for name, v in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}


@functools.lru_cache(maxsize=1)
def _pool(jobs: int) -> ProcessPoolExecutor:
    # Kept between sweeps: a process that has imported torch costs seconds.
    context, given = multiprocessing.get_context("spawn"), os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    return ProcessPoolExecutor(
        jobs, context, initializer=_begin, initargs=(context.Value("i"), gpus)
    )


def _begin(begun: Any, gpus: list[str]) -> None:
    with begun.get_lock():
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[begun.value % len(gpus)]
        begun.value += 1
    end_with_parent()


def end_with_parent() -> None:
    """End this process when its parent ends, and ignore interrupts, which a kernel sends to all."""

    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


def _in_worker(
    packed: tuple[dict, dict, Federation | None, str, list[str], dict[str, str]], **how: Any
) -> Result | Failed:
    plain, tags, fed, folder, path, variables = packed
    # A process may be older than a plugin's folder, and than what its parent has set since.
    with contextlib.suppress(OSError):  # it is gone
        os.chdir(folder)
    sys.path[:] = path
    for name in _variables().keys() - variables:
        del os.environ[name]
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return tried_there(plain, tags, fed=fed, **how)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
