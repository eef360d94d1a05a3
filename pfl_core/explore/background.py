"""One run in a process of its own, so that a notebook stays usable: watched, stopped with its checkpoint, taken up again."""

from __future__ import annotations

import multiprocessing
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pfl_core.engine.simulate import History, Interrupted
from pfl_core.experiments.build import federation
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.run import run
from pfl_core.experiments.sweep import end_with_parent
from pfl_core.util.percent import accuracy

EVERY_S = 0.5  # how often news are sent


class Background:
    """`run(e)` in another process, through the run store; it begins at once.

    `state` is "running", "stopped" (its checkpoint is kept: start it again, and it goes on from there), "done", or "failed: why";
    `curve` its client mean of test accuracy so far (round, when, value in %), None before the first round. `poll` brings both
    up to date.
    """

    def __init__(self, e: Experiment, *, device: str = "auto", store: Path | None = None):
        context = multiprocessing.get_context("spawn")
        self.state, self.curve = "running", None
        self._stop = context.Event()
        self._inbox, outbox = context.Pipe(duplex=False)
        args = (e.plain(), dict(device=device, store=store), self._stop, outbox)
        self._process = context.Process(target=_work, args=args, daemon=True)
        self._process.start()
        outbox.close()  # the other process has it: its end is then the end of the pipe

    def stop(self) -> None:
        """Ask for a stop, which comes after the round that is running."""
        self._stop.set()

    def poll(self, timeout: float = 0.0) -> bool:
        """Take in what has come, waiting at most `timeout` seconds for it; True if there was news."""
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
        """Wait for the end; returns the state."""
        while self.state == "running":
            self.poll(60)
        self._process.join()
        return self.state


def _work(plain: dict[str, Any], how: dict[str, Any], stop: Any, outbox: Connection) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # interrupting a cell of the notebook is no stop of this run
    end_with_parent()
    seen, due, n = History(), 0.0, np.ones(1)

    def told(r: int, history: History) -> bool:
        nonlocal seen, due
        seen = history
        if time.monotonic() >= due:  # seldom, so that training never waits for somebody to read
            outbox.send(("running", _curve(seen, n)))
            due = time.monotonic() + EVERY_S
        return stop.is_set()

    try:
        e = Experiment.from_plain(plain)
        n = np.array(
            [len(i) for i in federation(e).index["test"]]
        )  # a partition gives everybody some
        result = run(e, on_round=told, **how)
        rows = result.history.query("mean == 'client' and metric == 'acc_pct' and split == 'test'")
        outbox.send((result.meta["status"], rows[["round", "when", "value"]]))
    except Interrupted:
        outbox.send(("stopped", _curve(seen, n)))
    except Exception as error:  # whatever it is, the panel says it
        outbox.send((f"failed: {error}", _curve(seen, n)))


def _curve(history: History, n: np.ndarray) -> pd.DataFrame | None:
    of = {when: history.evals.get(f"{when}/test/correct", []) for when in ("before", "after")}
    points = [
        (history.rounds[i], w, float(accuracy(v.numpy(), n).mean()))
        for w in of
        for i, v in enumerate(of[w])
    ]
    return pd.DataFrame(points, columns=["round", "when", "value"]) if points else None
