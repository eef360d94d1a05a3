"""Checkpoints: a run between two rounds in one file; whose it is, and whether it is undamaged."""

from __future__ import annotations

import math
import os
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl_core.engine import server
from pfl_core.engine.convolutions import FORMS
from pfl_core.engine.engine import EXECUTORS
from pfl_core.engine.scoring import LARGE, Sums
from pfl_core.methods.base import Method, State
from pfl_core.methods.task import Task
from pfl_core.stacked import Params
from pfl_core.util import checks
from pfl_core.util.percent import accuracy


@dataclass
class History:
    """What was measured, one entry an evaluated round.

    Attributes
    ----------
    rounds
        The rounds that were evaluated. The lists below have an entry for each of them.
    evals
        {"when/split/metric": [(K,) float64]}: sums over each client's samples, the metric being
        "correct" or "loss"; of test samples "balanced", too, each client's mean over its classes of
        the share of right answers; and what `metrics` names, NaN where it is undefined.
    download, upload
        Scalars that travelled to and from the clients since the start.
    visits
        Client visits since the start: how often a client took part in a round, and answered.
    answered
        {round: ids of the clients that answered}, of all rounds so far, where clients drop out.
    wall
        Seconds since the start.
    cpu
        Processor seconds of this process since the start, all of its threads together.
    probes
        {"name/round/key": what `record` measured}.
    tuned
        As `evals`, {"tuned 1/split/metric": (K,) float64}: after each epoch of fine-tuning, which
        follows the last round. No checkpoint has it.
    tuned_s
        Seconds of that.
    ends
        {"when/test/metric": array} of the last evaluation alone: "confusion" (K, C, C) counts, and
        "scores" (N, C) of all test samples, client after client. No checkpoint has it.
    executor
        What local training ran through, "graphs+threads" if it was more than one.
    faster
        {names that are trained: the faster form of their convolutions}, where both were timed.
    chunks
        {what was trained or evaluated: clients or samples at once}, as memory allowed.
    n
        {split: (K,) int}: samples that `evals` sums over, 0 for clients that are not evaluated.
    """

    rounds: list[int] = field(default_factory=list)
    evals: dict[str, list[Tensor]] = field(default_factory=dict)
    download: list[float] = field(default_factory=list)
    upload: list[float] = field(default_factory=list)
    visits: list[float] = field(default_factory=list)
    answered: dict[int, list[int]] = field(default_factory=dict)
    wall: list[float] = field(default_factory=list)
    cpu: float = 0.0
    probes: Params = field(default_factory=dict)
    tuned: Params = field(default_factory=dict)
    tuned_s: float = 0.0
    ends: dict[str, np.ndarray] = field(default_factory=dict)
    executor: str = ""
    faster: dict[str, str] = field(default_factory=dict)
    chunks: dict[str, int] = field(default_factory=dict)
    n: dict[str, np.ndarray] = field(default_factory=dict)

    def note(self, when: str, measured: Sums) -> None:
        """Append what one evaluation measured, {(split, metric): array}; of tuning, set it."""
        tuned = when not in ("before", "after")
        for (split, metric), value in measured.items():
            key = f"{when}/{split}/{metric}"
            if metric in LARGE:
                kind = when.partition(" ")[0]
                old = [k for k in self.ends if k.startswith(kind) and k.endswith(f"/{metric}")]
                self.ends = {k: v for k, v in self.ends.items() if k not in old} | {key: value}
            elif tuned:
                self.tuned[key] = torch.as_tensor(value)
            else:
                row = torch.as_tensor(value, dtype=torch.float64)
                self.evals.setdefault(key, []).append(row)

    def accuracy(self, when: str = "before", split: str = "test") -> float | None:
        """The clients' mean of the latest accuracy in %; None if there is none."""
        series = self.evals.get(f"{when}/{split}/correct")
        has = self.n.get(split, np.zeros(1)) > 0
        if not series or not has.any():
            return None
        return float(accuracy(series[-1].numpy()[has], self.n[split][has]).mean())

    def numbers(self, round: int) -> dict[str, float]:
        """What a tracker draws of a round; {} of one that was not evaluated.

        Returns
        -------
        {name: number}
            "before/test/acc_pct" and "acc_balanced", the clients' mean accuracies in %, and "loss",
            over all their samples, of each when and split, and the clients' mean of each of the
            Experiment's `metrics`; "download" and "upload", scalars, and "visits", since the start;
            "own/NAME", what a method's `numbers` gives, if recorded.
        """
        if round not in self.rounds:
            return {}
        at, out = self.rounds.index(round), {}
        for key, series in self.evals.items():
            when, split, metric = key.split("/")
            has = self.n[split] > 0
            if at < len(series) and has.any():
                value, n = series[at].numpy()[has], self.n[split][has]
                name, number = _of_clients(metric, value, n)
                out[f"{when}/{split}/{name}"] = number
        out |= {n: float(getattr(self, n)[at]) for n in ("download", "upload", "visits")}
        start = f"numbers/{round}/"
        own = {k.removeprefix(start): v for k, v in self.probes.items() if k.startswith(start)}
        out |= {f"own/{name}": float(value) for name, value in own.items()}
        return {name: v for name, v in out.items() if math.isfinite(v)}

    def until(self, count: int, probes: Params) -> History:
        """The first `count` entries, with the probes of that time."""
        lists: dict[str, Any] = {k: v[:count] for k, v in vars(self).items() if isinstance(v, list)}
        evals = {k: v[:count] for k, v in self.evals.items() if v[:count]}
        same: dict[str, Any] = dict(executor=self.executor, faster=self.faster, n=self.n)
        same |= dict(chunks=self.chunks, cpu=self.cpu, answered=self.answered)
        return History(**lists, **same, evals=evals, probes=probes)


def _of_clients(metric: str, value: np.ndarray, n: np.ndarray) -> tuple[str, float]:
    # One number of what was measured of clients with n samples each, and its name in rows.
    if metric == "correct":
        return "acc_pct", float(accuracy(value, n).mean())
    if metric == "balanced":
        return "acc_balanced", float(100 * value.mean())
    if metric == "loss":
        return metric, float(value.sum() / n.sum())
    known = value[~np.isnan(value)]  # clients for which a metric of the Experiment's is defined
    return metric, float(known.mean()) if len(known) else math.nan


def save(
    path: Path,
    state: State,
    history: History,
    moved: list[float],
    spent: float,
    stamp: dict[str, Any],
) -> None:
    """Write a checkpoint, whole or not at all; `stamp` says whose it is (plain values)."""
    parts = {
        "server": state.server,
        "clients": state.clients,
        "extra": state.extra,
        "moments": state.moments,
        "round": state.round,
    }
    passing = ("n", "tuned", "tuned_s", "ends")
    kept = {k: v for k, v in vars(history).items() if k not in passing}
    evals = {k: torch.stack(v) for k, v in history.evals.items()}
    whole = parts | {
        "moved": moved,
        "spent": spent,
        "history": kept | {"evals": evals},
        "stamp": stamp,
    }
    part = path.with_suffix(".part")
    with writing(part):
        with part.open("wb") as file:
            torch.save(whole, file)
            file.flush()
            # Else a power cut after the rename leaves neither the old one nor the new one.
            os.fsync(file.fileno())
        os.replace(part, path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within it, an error of writing becomes an OSError that names the place and says what to do.

    What was half written is deleted.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError) as error:
        # On a full disk torch.save raises RuntimeError; the reason is its context.
        if path.is_file():
            path.unlink()
        why = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(
            f"cannot write {path} ({why}); make room there, or set PFL_RUNS to another folder, "
            "and run it again: finished runs and the last checkpoint are kept"
        ) from error


def load_whole(path: Path, device: torch.device | str = "cpu") -> Any:
    """torch.load, after a look at the file's checksums, which torch does not look at.

    Raises
    ------
    ValueError
        If the file is not as it was written.
    """
    try:
        with zipfile.ZipFile(path) as z:
            if bad := z.testzip():
                raise ValueError(f"{bad} is not as it was written")
        return torch.load(path, map_location=device, weights_only=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except pickle.UnpicklingError:  # torch's own words say how to run it
        raise ValueError(
            f"{path.name} is damaged: it holds code, which is not run, or other things that are no "
            "tensors and no plain values"
        ) from None
    except Exception as error:  # torch and zipfile meet damage with many types
        raise ValueError(f"{path.name} is damaged: {error}") from error


def restore(path: Path, device: torch.device) -> tuple[State, History, list[float], float]:
    """State, history, traffic and seconds of a checkpoint, as `save` was given them.

    Traffic is [scalars down, scalars up, client visits], each since the start.

    Raises
    ------
    ValueError, KeyError
        If the file is damaged.
    """
    return _parts(load_whole(path, device))


def _parts(whole: dict[str, Any]) -> tuple[State, History, list[float], float]:
    kept = whole["history"]
    series = {k: list(v) for k, v in kept.items() if isinstance(v, list)}
    if "steps" in series:  # its name in files of older runs
        series["visits"] = series.pop("steps")
    known = ("executor", "faster", "chunks", "cpu", "answered")
    plain = {n: kept[n] for n in known if n in kept}
    history = History(**series, **plain)
    history.evals = {k: list(v.cpu()) for k, v in kept["evals"].items()}
    for key in [k for k in history.evals if k.endswith("/test/correct")]:
        # Unknown in checkpoints of versions that did not measure it.
        unknown = [torch.full_like(v, torch.nan) for v in history.evals[key]]
        history.evals.setdefault(key.replace("correct", "balanced"), unknown)
    history.probes = {k: v.cpu() for k, v in kept["probes"].items()}
    state = State(whole["server"], whole["clients"], whole["extra"], whole["round"])
    state.moments = whole.get("moments", {})  # younger than some files
    return state, history, whole["moved"], whole["spent"]


def check(path: Path, stamp: dict[str, Any], method: Method, rounds: int) -> str:
    """The executor of the checkpoint at `path`, which must belong to this run.

    Its stamp must be the same but for version and executor. Its round must be one of `rounds`, and
    what it measured that of the rounds before. It must hold what the method's `init` has, in the
    same shapes and types, and finite. A longer run goes on from the end of a shorter one, whose id
    differs: ids must be the same only if a shorter run is no beginning of this one.

    Raises
    ------
    ValueError, KeyError
        If it does not belong to this run, or is damaged.
    """
    whole = load_whole(path)
    state, history, moved, spent = _parts(whole)
    found = whole.get("stamp", {})
    free = {"version", "executor", *(["id"] if method.continues else [])}
    for key, mine in stamp.items():
        if key not in free and found.get(key) != mine:
            raise ValueError(f"it is of {key} {found.get(key)!r}, this run has {mine!r}")
    if not isinstance(state.round, int) or not 0 <= state.round <= rounds:
        raise ValueError(f"it is of round {state.round}, this run has {rounds} rounds")
    like = method.init()
    _check_params("server", state.server, like.server)
    _check_params("clients", state.clients, like.clients)
    server.begin(method, like)
    _check_params("moments", state.moments, like.moments)
    _check_measured(history, state.round, method.task)
    ids = {k for some in history.answered.values() for k in some}
    if not ids <= set(range(method.task.K)) or any(r >= state.round for r in history.answered):
        raise ValueError(
            "it says that clients answered which are not there, or have not been asked"
        )
    if len(moved) != 3 or not all(map(math.isfinite, [*moved, spent, history.cpu])):
        raise ValueError("its traffic or its time is missing")
    checks.known("executor", found["executor"], EXECUTORS)
    for form in history.faster.values():
        checks.known("form of convolutions", form, FORMS)
    for many in history.chunks.values():
        if not isinstance(many, int) or many < 1:
            raise ValueError(f"it trained or evaluated {many!r} at once")
    return found["executor"]


def _check_params(kind: str, kept: Params, like: Params) -> None:
    # ValueError unless `kept` has what `like` has, and finite.
    for n, v in like.items():
        if n not in kept or (kept[n].shape, kept[n].dtype) != (v.shape, v.dtype):
            raise ValueError(f"it lacks {n} of shape {tuple(v.shape)} in {kind}")
        if not torch.isfinite(kept[n]).all():
            raise ValueError(f"{n} in {kind} is not finite")


def _check_measured(history: History, round: int, task: Task) -> None:
    # ValueError unless there is an entry, of all clients, for each evaluated round before `round`.
    due = list(range(0, round, task.config.eval_every))
    series = [v for v in vars(history).values() if isinstance(v, list)]
    shapes = {v.shape for values in history.evals.values() for v in values}
    if history.rounds != due or any(len(v) != len(due) for v in [*series, *history.evals.values()]):
        raise ValueError("its evaluations do not belong to its rounds")
    if shapes - {(task.K,)}:
        raise ValueError(f"its evaluations are not those of {task.K} clients")
