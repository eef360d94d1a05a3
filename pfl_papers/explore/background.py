"""One run in a process of its own: the notebook stays usable, and a stopped run can go on later."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pfl_core.engine.simulate import History, Interrupted
from pfl_core.experiments.build import federation
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.run import run
from pfl_core.experiments.workers import end_with_parent
from pfl_core.util.percent import accuracy

EVERY_S = 0.5  # least number of seconds between two reports of the process that trains


class Background:
    """`run(experiment)` in another process, through the run store; it begins at once.

    Parameters
    ----------
    experiment : Experiment
        What is run.
    device : {"auto", "cpu", "cuda"}
        Where it is trained.
    store : Path, optional
        Folder of the runs; by default store/ in $PFL_RUNS.

    Attributes
    ----------
    state : str
        "running"; "stopped", with a checkpoint from which the same Experiment goes on when it is
        started again; "done"; or "failed: " and the reason. `poll` brings it up to date.
    curve : DataFrame or None
        The clients' mean test accuracy so far, in columns rounds, when and value (%); None before
        the first evaluation. `poll` brings it up to date.
    """

    def __init__(self, experiment: Experiment, *, device: str = "auto", store: Path | None = None):
        context = multiprocessing.get_context("spawn")
        self.state = "running"
        self.curve: pd.DataFrame | None = None
        self._stop = context.Event()
        self._inbox, outbox = context.Pipe(duplex=False)
        how = dict(device=device, store=store)
        args = (experiment.plain(), how, self._stop, outbox)
        self._process = context.Process(target=_work, args=args, daemon=True)
        self._process.start()
        # The other process has its own copy. With this one closed, the pipe ends when it ends.
        outbox.close()

    def stop(self) -> None:
        """Ask the run to stop after the round that it is in."""
        self._stop.set()

    def poll(self, timeout: float = 0.0) -> bool:
        """Read the reports that have come; wait at most `timeout` seconds for the first one.

        Returns whether there were any.
        """
        news = False
        while self.state == "running" and self._inbox.poll(0 if news else timeout):
            news = True
            try:
                self.state, self.curve = self._inbox.recv()
            except EOFError:
                self._process.join()
                self.state = f"failed: its process ended with code {self._process.exitcode}"
        return news

    def wait(self) -> str:
        """Wait for the end of the run and return its state."""
        while self.state == "running":
            self.poll(60)
        self._process.join()
        return self.state


class _Reports:
    """Sends a run's curve to the notebook's process; `watch` is an `on_round` of `run`."""

    def __init__(self, outbox: Connection, stop: Event):
        self.outbox, self.stop = outbox, stop
        self.history, self.samples = History(), np.ones(1)
        self.due = 0.0  # when the next report may be sent

    def watch(self, round: int, history: History) -> bool:
        """Report the curve if it is time; returns whether the run is to stop."""
        self.history = history
        # Not after every round: training never waits until somebody has read the last report.
        if time.monotonic() >= self.due:
            self.send("running")
            self.due = time.monotonic() + EVERY_S
        return self.stop.is_set()

    def send(self, state: str) -> None:
        self.outbox.send((state, _curve(self.history, self.samples)))


def _work(plain: dict[str, Any], how: dict[str, Any], stop: Event, outbox: Connection) -> None:
    """What the other process does."""
    end_with_parent()
    reports = _Reports(outbox, stop)
    try:
        experiment = Experiment.from_plain(plain)
        tests = federation(experiment).index["test"]
        reports.samples = np.array([len(samples) for samples in tests])
        result = run(experiment, on_round=reports.watch, **how)
        rows = result.history.query(
            "average == 'client' and metric == 'acc_pct' and split == 'test'"
        )
        outbox.send((result.meta["status"], rows[["rounds", "when", "value"]]))
    except Interrupted:
        reports.send("stopped")
    except Exception as error:  # whatever it is, the panel shows it
        reports.send(f"failed: {error}")


def _curve(history: History, samples: np.ndarray) -> pd.DataFrame | None:
    """The mean test accuracy of clients that have so many test `samples` (K,)."""
    points = []
    for when in ("before", "after"):
        series = history.evals.get(f"{when}/test/correct", [])
        for round, correct in zip(history.rounds, series, strict=False):
            points.append((round, when, float(accuracy(correct.numpy(), samples).mean())))
    return pd.DataFrame(points, columns=["rounds", "when", "value"]) if points else None
