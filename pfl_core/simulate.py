"""The only round loop: sample, download, local training, upload, evaluate, checkpoint."""

from __future__ import annotations

import os
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl_core.batched import precision
from pfl_core.engine import Engine
from pfl_core.federation import Federation, rng
from pfl_core.methods.base import Method, State
from pfl_core.stacked import Params, own, select

CHECKPOINT_EVERY = 60.0  # seconds


@dataclass
class History:
    """What was measured: one entry a recorded round; per-client sums are (K,) float64 arrays.

    evals[(when, split)] holds {"correct", "loss"} as lists of (K,) arrays, in step with `rounds`; traffic and time are cumulative.
    """

    rounds: list[int] = field(default_factory=list)
    evals: dict[str, list[Tensor]] = field(default_factory=dict)
    download: list[float] = field(default_factory=list)
    upload: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    probes: Params = field(default_factory=dict)  # what `record` measured: "weights/10/conv1"
    executor: str = ""  # what local training ran through, "graphs+threads" where it was more than one

    def add(self, key: str, value: np.ndarray) -> None:
        """Append one (K,) array under "when/split/metric"."""
        self.evals.setdefault(key, []).append(torch.as_tensor(value, dtype=torch.float64))


class Diverged(FloatingPointError):
    """Parameters became NaN or infinite; the message says where, `history` is what was measured before."""

    def __init__(self, message: str, history: History):
        super().__init__(message)
        self.history = history


def sample(cfg: Any, k: int, round: int) -> Tensor:
    """Participants of a round, sorted ids (S,): the same for every method of one seed."""
    s = max(1, int(cfg.participation * k + 0.5))
    return torch.as_tensor(np.sort(rng(cfg.seed, "participants", round).permutation(k)[:s]))


def evaluate_at(cfg: Any, round: int) -> bool:
    """Whether a round is evaluated: 0, e, 2e, ..., and always the last."""
    return round % cfg.eval_every == 0 or round == cfg.rounds


def simulate(
    method: Method,
    fed: Federation,
    cfg: Any,
    *,
    executor: str = "auto",
    workers: int | None = None,
    state: State | None = None,
    checkpoint: Path | None = None,
    on_round: Callable[[int, History], bool | None] | None = None,
    record: Callable[..., None] | None = None,
) -> tuple[State, History, Params, Params]:
    """Run cfg.rounds rounds and evaluate; returns the last state, the history, and the last personal models before / after local training.

    cfg: fields of an Experiment (rounds, participation, eval_every, eval_after, seed and the training fields of `Engine`). `checkpoint` is
    a file written at most once a minute and resumed from if it is there. `on_round(round, history)` is told of each round; True stops
    after writing the checkpoint. `record(engine, state, before, after, history, best, last)` sees the models of every evaluated round.
    Raises Diverged when parameters stop being finite, Interrupted when stopped.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = Engine(method, fed, cfg, executor, workers)
    try:
        with torch.no_grad(), precision(getattr(cfg, "precision", "full")):
            return _loop(engine, cfg, state or method.init(), checkpoint, on_round, record)
    finally:
        engine.close()
        torch.set_num_threads(threads)


class Interrupted(Exception):
    """The run was asked to stop; its checkpoint is written."""


def _loop(
    engine: Engine, cfg: Any, state: State, checkpoint: Path | None, on_round: Callable | None, record: Callable | None
):
    method, fed = engine.method, engine.fed
    everyone = torch.arange(fed.K, device=fed.device)
    history, moved, spent = History(), [0.0, 0.0, 0.0], 0.0
    if checkpoint and checkpoint.exists():
        state, history, moved, spent = restore(checkpoint, fed.device)
    saved = clock = time.monotonic()
    before: Params = {}
    after: Params = {}
    while True:
        r = state.round
        sel = sample(cfg, fed.K, r).to(fed.device)
        full, last, measured = len(sel) == fed.K, r == cfg.rounds, evaluate_at(cfg, r)
        if measured:
            before = method.personal(state, engine.context(state, everyone, r))
            _check_finite(before, method, r, history, everyone)
            _record(engine, history, "before", before)
        sent = start = end = None
        if not last or (measured and cfg.eval_after and full):
            sent = method.download(state, sel)
            start = method.begin(state, sel, sent)
            end = method.local(engine.context(state, sel, r), start)
            _check_finite(end, method, r, history, sel)
        history.executor = "+".join(sorted({*history.executor.split("+")} - {""} | engine.ran))
        if measured and cfg.eval_after:
            after = _after(engine, state, sel, end, r)
            _check_finite(after, method, r, history, everyone)
            _record(engine, history, "after", after)
        if measured:
            history.rounds.append(r)
            for series, value in zip((history.download, history.upload, history.steps), moved, strict=True):
                series.append(value)
            history.wall.append(spent + time.monotonic() - clock)
            if record:
                record(engine, state, before, after, history, _is_best(history, fed), last)
        stop = bool(on_round and on_round(r, history))
        if last:
            return state, history, before, after
        kept, up = returned(method, state, start, sent, end)
        down_n, up_n = method.traffic(state, sel, sent, up)
        state = method.upload(state, sel, start, up, fed.n[sel].to(fed.dtype))
        _check_finite({**state.server, **state.extra}, method, r, history)
        for n, v in kept.items():
            state.clients[n][sel] = v
        state.round = r + 1
        moved = [moved[0] + down_n, moved[1] + up_n, moved[2] + len(sel)]
        if checkpoint and (stop or time.monotonic() - saved > CHECKPOINT_EVERY):
            _save(checkpoint, state, history, moved, spent + time.monotonic() - clock)
            saved = time.monotonic()
        if stop:
            raise Interrupted(f"stopped after round {r}; run it again to go on from there")


def returned(method: Method, state: State, start: Params, sent: Params, end: Params) -> tuple[Params, Params]:
    """What of `end` the clients keep, and what goes to the server; buffers that the policy resets are in neither."""
    reset = {n for n in method.task.buffers if n in start and n not in sent}
    kept = {n: v for n, v in end.items() if n in state.clients}
    return kept, {n: v for n, v in end.items() if n not in kept and n not in reset}


def _after(engine: Engine, state: State, sel: Tensor, end: Params | None, r: int) -> Params:
    # Every client's model after local training on round r's batches; who was not sampled trains a copy that is thrown away.
    method, k = engine.method, engine.fed.K
    if end is not None and len(sel) == k:
        return method.serve(end)
    others = torch.tensor([i for i in range(k) if end is None or i not in set(sel.tolist())], device=sel.device)
    ids, ends = ([sel], [end]) if end is not None else ([], [])
    ids.append(others)
    ends.append(method.local(engine.context(state, others, r), method.begin(state, others)))
    back = torch.argsort(torch.cat(ids))
    served = [method.serve(e) for e in ends]
    return {n: torch.cat([s[n] for s in served])[back] for n in served[0]}


def _record(engine: Engine, history: History, when: str, models: Params) -> None:
    for split in ("val", "test"):
        got = engine.evaluate(models, split)
        for metric in ("correct", "loss"):
            history.add(f"{when}/{split}/{metric}", got[metric])


def _is_best(history: History, fed: Federation) -> bool:
    # Whether the latest evaluation is better than all before: client mean on validation data, without any on test data.
    split = "val" if any(map(len, fed.index["val"])) else "test"
    n = torch.tensor([len(i) for i in fed.index[split]])
    score = (torch.stack(history.evals[f"before/{split}/correct"])[:, n > 0] / n[n > 0]).mean(1)
    return bool((score[-1] > score[:-1]).all())


def _check_finite(p: dict[str, Any], method: Method, r: int, history: History, ids: Tensor | None = None) -> None:
    # p: models of the clients `ids`, or what the server holds. One look at all sums together: on a GPU each look is a wait.
    found = {n: v for n, v in _flat(p) if v.is_floating_point()}
    if not found or torch.isfinite(torch.stack([v.sum().double() for v in found.values()])).all():
        return
    for name, v in found.items():
        rows = torch.isfinite(v.flatten(1) if v.dim() > 1 else v[..., None]).all(-1)
        if rows.all():  # large numbers whose sum alone is infinite
            continue
        who = "the server" if ids is None else f"client {int(ids[~rows][0])}"
        layer = name.rpartition(".")[0] or name
        raise Diverged(
            f"{method.name}: layer {layer} ({name}) of {who} is not finite in round {r}; lower lr, or clip gradients",
            history,
        )


def _flat(p: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for n, v in p.items():
        yield from _flat(v, f"{prefix}{n}.") if isinstance(v, dict) else ((prefix + n, v),)


def _save(path: Path, state: State, history: History, moved: list[float], spent: float) -> None:
    whole = {
        "server": state.server,
        "clients": state.clients,
        "extra": state.extra,
        "round": state.round,
        "moved": moved,
        "spent": spent,
    }
    whole["history"] = {**vars(history), "evals": {k: torch.stack(v) for k, v in history.evals.items()}}
    part = path.with_suffix(".part")
    with writing(part):
        with part.open("wb") as file:
            torch.save(whole, file)
            file.flush()
            os.fsync(file.fileno())  # else a power cut after the rename leaves neither the old one nor the new one
        os.replace(part, path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within it, what cannot be written is said with its place and what to do, as OSError; half a file is deleted."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError) as error:  # torch.save on a full disk raises RuntimeError, from the reason
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


def final_models(models: Params, names: tuple[str, ...]) -> Params:
    """The entries `names` of personal models {name: (K, *shape)} in memory of their own, on the CPU."""
    return {n: v.cpu() for n, v in own(select(models, names)).items()}
