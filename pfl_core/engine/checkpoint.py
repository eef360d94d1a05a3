"""Checkpoints: a run between two rounds in one file, whose it is, and whether it is as it was written."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl_core.methods.base import Method, State
from pfl_core.stacked import Params


@dataclass
class History:
    """What was measured, one entry an evaluated round.

    evals: {"when/split/metric": [(K,) float64]}, metric "correct" or "loss", sums over a client's samples, in step with `rounds`; n:
    {split: (K,) int} samples that they are sums over, 0 for clients that are not evaluated; download, upload (scalars), steps (client
    visits) and wall (seconds) count from the start; probes: {"name/round/key": what `record` measured}; executor: what local training
    ran through, "graphs+threads" where it was more than one.
    """

    rounds: list[int] = field(default_factory=list)
    evals: dict[str, list[Tensor]] = field(default_factory=dict)
    download: list[float] = field(default_factory=list)
    upload: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    probes: Params = field(default_factory=dict)
    executor: str = ""
    n: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, key: str, value: np.ndarray) -> None:
        """Append one (K,) array under "when/split/metric"."""
        self.evals.setdefault(key, []).append(torch.as_tensor(value, dtype=torch.float64))

    def accuracy(self, when: str = "before", split: str = "test") -> float | None:
        """Client mean of the latest accuracy in %, None where there is none."""
        series, has = self.evals.get(f"{when}/{split}/correct"), self.n.get(split, np.zeros(1)) > 0
        return (
            float((100 * series[-1].numpy()[has] / self.n[split][has]).mean())
            if series and has.any()
            else None
        )

    def until(self, count: int, probes: Params) -> History:
        """Its first `count` entries, with the probes of that time."""
        lists = {k: v[:count] for k, v in vars(self).items() if isinstance(v, list)}
        evals = {k: v[:count] for k, v in self.evals.items() if v[:count]}
        return History(**lists, evals=evals, probes=probes, executor=self.executor, n=self.n)


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
        "round": state.round,
    }
    kept = {k: v for k, v in vars(history).items() if k != "n"}
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
            os.fsync(
                file.fileno()
            )  # else a power cut after the rename leaves neither the old one nor the new one
        os.replace(part, path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within it, what cannot be written is said with its place and what to do, as OSError; half a file is deleted."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (
        OSError,
        RuntimeError,
    ) as error:  # torch.save on a full disk raises RuntimeError, from the reason
        if path.is_file():
            path.unlink()
        why = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(
            f"cannot write {path} ({why}); make room there, or set PFL_RUNS to another folder, and run it again: "
            "finished runs and the last checkpoint are kept"
        ) from error


def load_whole(path: Path, device: torch.device | str = "cpu") -> Any:
    """torch.load of a file each of whose bytes is as it was written (torch looks at no checksum); ValueError if not."""
    try:
        with zipfile.ZipFile(path) as z:
            if bad := z.testzip():
                raise ValueError(f"{bad} is not as it was written")
        return torch.load(path, map_location=device, weights_only=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch and zipfile meet damage with many types
        raise ValueError(f"{path.name} is damaged: {error}") from error


def restore(path: Path, device: torch.device) -> tuple[State, History, list[float], float]:
    """State, history, traffic and seconds of a checkpoint; ValueError or KeyError for a damaged one."""
    z = load_whole(path, device)
    h = z["history"]
    series = {k: list(v) for k, v in h.items() if isinstance(v, list)}
    history = History(**series, executor=h.get("executor", ""))
    history.evals = {k: list(v.cpu()) for k, v in h["evals"].items()}
    history.probes = {k: v.cpu() for k, v in h["probes"].items()}
    return State(z["server"], z["clients"], z["extra"], z["round"]), history, z["moved"], z["spent"]


def check(path: Path, stamp: dict[str, Any], method: Method, rounds: int) -> None:
    """ValueError unless the checkpoint at `path` is of this run: its stamp, a round up to `rounds`, and the method's names and shapes.

    A longer run goes on from the end of a shorter one, so that the id counts only where the method is `scheduled`.
    """
    state, history, *_ = restore(path, torch.device("cpu"))
    found = load_whole(path).get("stamp", {})
    for key, mine in stamp.items():
        if key not in ("version", *([] if method.scheduled else ["id"])) and found.get(key) != mine:
            raise ValueError(f"it is of {key} {found.get(key)!r}, this run has {mine!r}")
    if not 0 <= state.round <= rounds:
        raise ValueError(f"it is of round {state.round}, this run has {rounds} rounds")
    for kind, parts in vars(method.init()).items():
        if kind in ("server", "clients"):
            mine, found = (
                {n: tuple(v.shape) for n, v in p.items()} for p in (parts, getattr(state, kind))
            )
            if lost := [n for n in mine if mine[n] != found.get(n)]:
                raise ValueError(f"it lacks {lost[0]} of shape {mine[lost[0]]} in {kind}")
    if any(len(v) != len(history.rounds) for v in history.evals.values()):
        raise ValueError("its evaluations do not belong to its rounds")
