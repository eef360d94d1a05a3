"""The only round loop: sample, download, local training, upload, evaluate, checkpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl_core.data.client_data import ClientData
from pfl_core.engine.checkpoint import History, restore, save
from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.engine.sgd import precision
from pfl_core.methods.base import Method, State
from pfl_core.methods.task import TrainConfig
from pfl_core.stacked import Params, own, select
from pfl_core.util.draws import rng

CHECKPOINT_EVERY = 60.0  # seconds
FINISH = "finish"  # what `on_round` returns to end a run early, with a result


class Diverged(FloatingPointError):
    """Parameters became NaN or infinite; the message says where, `history` is what was measured before."""

    def __init__(self, message: str, history: History):
        super().__init__(message)
        self.history = history


class Interrupted(Exception):
    """The run was asked to stop; its checkpoint is written."""


def sample(config: TrainConfig, k: int, round: int) -> Tensor:
    """Participants of a round, sorted ids (S,): the same for every method of one seed."""
    return torch.as_tensor(
        np.sort(rng(config.seed, "participants", round).permutation(k)[: participants(config, k)])
    )


def participants(config: TrainConfig, k: int) -> int:
    """How many of k clients take part in a round."""
    return max(1, int(config.participation * k + 0.5))


def evaluated(config: TrainConfig, k: int) -> Tensor:
    """Clients that are evaluated, sorted ids: all, or a sample of eval_clients, the same for every method of one seed."""
    few = config.eval_clients
    return torch.as_tensor(
        np.sort(rng(config.seed, "evaluated").permutation(k)[:few]) if few else np.arange(k)
    )


def evaluate_at(config: TrainConfig, round: int) -> bool:
    """Whether a round is evaluated: 0, e, 2e, ..., and always the last."""
    return round % config.eval_every == 0 or round == config.rounds


def evaluates_after(config: TrainConfig, k: int) -> bool:
    """Whether models are evaluated after local training, too: as config.eval_after says, by default where all k clients take part."""
    return participants(config, k) == k if config.eval_after is None else config.eval_after


def simulate(
    method: Method,
    data: ClientData,
    *,
    executor: str = "auto",
    workers: int | None = None,
    state: State | None = None,
    checkpoint: Path | None = None,
    stamp: dict[str, Any] | None = None,
    end: Path | None = None,
    on_round: Callable[[int, History], bool | str | None] | None = None,
    record: Callable[..., None] | None = None,
) -> tuple[State, History, Params, Params]:
    """Run all rounds and evaluate; returns the last state, the history, and the last personal models before / after local training.

    How many rounds, and what is evaluated when, is in `method.task.config`. `checkpoint` is a file written at most once a minute and
    resumed from if it is there, `end` one written at the last round, from which a longer run can go on; both carry `stamp`.
    `on_round(round, history)` is told of each round; True stops after writing the checkpoint, "finish" makes this round the last one.
    `record(engine, state, before, after, history, best, last)` sees the models of every evaluated round. Raises Diverged when parameters
    stop being finite, Interrupted when stopped.
    """
    with one_thread(), torch.no_grad(), precision(method.task.config.precision):
        engine = Engine(method, data, executor, workers)
        try:
            with engine.drawing("init"):
                state = state or method.init()
            loop = _Loop(engine, state, checkpoint, stamp or {}, on_round, record)
            return loop.run(end)
        finally:
            engine.close()


class _Loop:
    """One run's rounds: what is measured and when a checkpoint is written."""

    def __init__(
        self, engine: Engine, state: State, checkpoint: Path | None, stamp: dict, on_round, record
    ):
        self.engine, self.method, self.data, self.config = (
            engine,
            engine.method,
            engine.data,
            engine.config,
        )
        self.state = state
        self.checkpoint, self.stamp, self.on_round, self.record = (
            checkpoint,
            stamp,
            on_round,
            record,
        )
        self.history, self.moved, self.spent = History(), [0.0, 0.0, 0.0], 0.0
        if checkpoint and checkpoint.exists():
            self.state, self.history, self.moved, self.spent = restore(checkpoint, self.data.device)
        self.ids = evaluated(self.config, self.data.K).to(self.data.device)
        self.history.n = {s: self._counts(s) for s in ("val", "test")}
        self.with_after = evaluates_after(self.config, self.data.K)
        self.saved = self.clock = time.monotonic()
        self.before: Params = {}
        self.after: Params = {}

    def _counts(self, split: str) -> np.ndarray:
        n = np.zeros(self.data.K, dtype=np.int64)
        n[self.ids.cpu().numpy()] = [len(self.data.index[split][k]) for k in self.ids.tolist()]
        return n

    @property
    def seconds(self) -> float:
        return self.spent + time.monotonic() - self.clock

    def run(self, end: Path | None) -> tuple[State, History, Params, Params]:
        while True:
            r, history = self.state.round, self.history
            start_of_round = len(history.rounds), dict(history.probes)
            sel = sample(self.config, self.data.K, r).to(self.data.device)
            last, measured = r == self.config.rounds, evaluate_at(self.config, r)
            if measured:
                self._measure_before(r)
            sent = start = trained = None
            if not last or (measured and self.with_after and len(sel) == self.data.K):
                sent, start, trained = self._train(sel, r)
            if measured:
                self._measure_after(sel, trained, r, last)
            told = self.on_round(r, history) if self.on_round else None
            if told == FINISH and not last:
                last = True
                if not measured:
                    self._measure_before(r)
                    self._measure_after(sel, trained, r, last)
            if last:
                if end:
                    save(
                        end,
                        self.state,
                        history.until(*start_of_round),
                        self.moved,
                        self.seconds,
                        self.stamp,
                    )
                if len(self.ids) < self.data.K and self.config.keep_models:
                    self.before = self._personal(
                        torch.arange(self.data.K, device=self.data.device), r
                    )
                return self.state, history, self.before, self.after
            self._upload(sel, sent, start, trained, r)
            if self.checkpoint and (told or time.monotonic() - self.saved > CHECKPOINT_EVERY):
                save(self.checkpoint, self.state, history, self.moved, self.seconds, self.stamp)
                self.saved = time.monotonic()
            if told:
                raise Interrupted(f"stopped after round {r}; run it again to go on from there")

    def _train(self, sel: Tensor, r: int) -> tuple[Params, Params, Params]:
        with self.engine.drawing("local", r):
            sent = self.method.download(self.state, sel)
            start = self.method.begin(self.state, sel, sent)
            trained = self.method.local(Context(self.engine, self.state, sel, r), start)
        _check_finite(trained, self.method, r, self.history, sel)
        self.history.executor = "+".join(
            sorted({*self.history.executor.split("+")} - {""} | self.engine.ran)
        )
        return sent, start, trained

    def _upload(self, sel: Tensor, sent: Params, start: Params, trained: Params, r: int) -> None:
        kept, up = returned(self.method, self.state, start, sent, trained)
        down_n, up_n = self.method.traffic(self.state, sel, sent, up)
        with self.engine.drawing("upload", r):
            self.state = self.method.upload(
                self.state, sel, start, up, self.data.n[sel].to(self.data.dtype)
            )
        _check_finite({**self.state.server, **self.state.extra}, self.method, r, self.history)
        for n, v in kept.items():
            self.state.clients[n][sel] = v
        self.state.round = r + 1
        self.moved = [self.moved[0] + down_n, self.moved[1] + up_n, self.moved[2] + len(sel)]

    # -- evaluation ------------------------------------------------------------------------------------------------------
    def _personal(self, ids: Tensor, r: int) -> Params:
        with self.engine.drawing("personal", r):
            models = self.method.personal(self.state, Context(self.engine, self.state, ids, r))
        _check_finite(models, self.method, r, self.history, ids)
        return models

    def _measure_before(self, r: int) -> None:
        self.before = self._personal(self.ids, r)
        self._add("before", self.before)

    def _measure_after(self, sel: Tensor, trained: Params | None, r: int, last: bool) -> None:
        history = self.history
        if self.with_after:
            with self.engine.drawing("after", r):
                self.after = self._after(sel, trained, r)
            _check_finite(self.after, self.method, r, history, self.ids)
            self._add("after", self.after)
            history.executor = "+".join(
                sorted({*history.executor.split("+")} - {""} | self.engine.ran)
            )
        history.rounds.append(r)
        for series, value in zip(
            (history.download, history.upload, history.steps), self.moved, strict=True
        ):
            series.append(value)
        history.wall.append(self.seconds)
        if self.record:
            self.record(
                self.engine, self.state, self.before, self.after, history, _is_best(history), last
            )

    def _after(self, sel: Tensor, trained: Params | None, r: int) -> Params:
        # Models after local training on round r's batches; who was not sampled trains a copy that is thrown away.
        if trained is not None and len(sel) == len(self.ids) == self.data.K:
            return self.method.serve(trained)
        at = {k: i for i, k in enumerate(sel.tolist())} if trained is not None else {}
        have = [k for k in self.ids.tolist() if k in at]
        rest = torch.tensor(
            [k for k in self.ids.tolist() if k not in at], dtype=torch.int64, device=sel.device
        )
        parts = [{n: v[[at[k] for k in have]] for n, v in trained.items()}] if have else []
        if len(rest):
            context = Context(self.engine, self.state, rest, r)
            parts.append(self.method.local(context, self.method.begin(self.state, rest)))
        back = torch.argsort(torch.tensor([*have, *rest.tolist()], device=sel.device))
        served = [self.method.serve(p) for p in parts]
        return {n: torch.cat([s[n] for s in served])[back] for n in served[0]}

    def _add(self, when: str, models: Params) -> None:
        for split in ("val", "test"):
            got = self.engine.evaluate(models, split, self.ids.tolist())
            for metric in ("correct", "loss"):
                whole = np.zeros(self.data.K)
                whole[self.ids.cpu().numpy()] = got[metric]
                self.history.add(f"{when}/{split}/{metric}", whole)


_threads = threading.Lock()
_runs = [0, 1]  # runs under way in this process, and its number of threads before the first of them


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it, torch computes with one thread, so that numbers do not depend on how many there are; several runs may be within."""
    with _threads:
        _runs[:] = [_runs[0] + 1, _runs[1] if _runs[0] else torch.get_num_threads()]
    torch.set_num_threads(1)
    try:
        yield
    finally:
        with _threads:
            _runs[0] -= 1
            if not _runs[
                0
            ]:  # a library's threads are one number for the whole process: not while another run counts on it
                torch.set_num_threads(_runs[1])


def returned(
    method: Method, state: State, start: Params, sent: Params, end: Params
) -> tuple[Params, Params]:
    """What of `end` the clients keep, and what goes to the server; buffers that the policy resets are in neither."""
    reset = {n for n in method.task.buffers if n in start and n not in sent}
    kept = {n: v for n, v in end.items() if n in state.clients}
    return kept, {n: v for n, v in end.items() if n not in kept and n not in reset}


def _is_best(history: History) -> bool:
    # Whether the latest evaluation is better than all before: client mean on validation data, without any on test data.
    split = "val" if history.n["val"].any() else "test"
    n = torch.as_tensor(history.n[split])
    score = (torch.stack(history.evals[f"before/{split}/correct"])[:, n > 0] / n[n > 0]).mean(1)
    return bool((score[-1] > score[:-1]).all())


def _check_finite(
    p: dict[str, Any], method: Method, r: int, history: History, ids: Tensor | None = None
) -> None:
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


def final_models(models: Params, names: tuple[str, ...]) -> Params:
    """The entries `names` of personal models {name: (K, *shape)} in memory of their own, on the CPU."""
    return {n: v.cpu() for n, v in own(select(models, names)).items()}
