"""The only round loop: sample, download, local training, upload, evaluate, checkpoint.

After the last round, fine-tuning follows, if there is any (finetune.py).

Read it from the top: `simulate` sets a run up, `_Run.rounds` is the loop, and below it stand the
parts of a round in the order in which they happen.
"""

from __future__ import annotations

import functools
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pfl_core.data.client_data import ClientData
from pfl_core.engine import hooks, pairs, scoring, server
from pfl_core.engine.checkpoint import History, restore, save
from pfl_core.engine.context import Context, check_steps
from pfl_core.engine.engine import Engine
from pfl_core.engine.finetune import Tuning, check_served, moments
from pfl_core.engine.graphs import side_stream
from pfl_core.engine.participation import (
    answers,
    evaluate_at,
    evaluated,
    evaluates_after,
    everyone,
    paces,
    participants,
    sample,
)
from pfl_core.engine.process import one_thread
from pfl_core.engine.scoring import Sums
from pfl_core.engine.sgd import precision
from pfl_core.methods.base import Method, State, initial_state
from pfl_core.stacked import Params, clone, is_common, select, take
from pfl_core.util.percent import compared

CHECKPOINT_EVERY = 60.0  # seconds
EVALUATED_AT_ONCE = 2000  # clients whose models are in memory together, where nobody keeps them
FINISH = "finish"  # what `on_round` returns to end a run early, with a result

OnRound = Callable[[int, History], bool | str | None]


class Diverged(FloatingPointError):
    """Parameters became NaN or infinite; `history` is what was measured before."""

    def __init__(self, message: str, history: History):
        super().__init__(message)
        self.history = history


class Interrupted(Exception):
    """The run was asked to stop; its checkpoint is written."""


class Outcome(NamedTuple):
    """What a run ends with."""

    state: State
    history: History
    # The last personal models, {name: (K, *shape)}, before and after local training; {} where that
    # was not evaluated, or for more than EVALUATED_AT_ONCE clients whose models nobody keeps.
    before: Params
    after: Params
    tuned: Params  # those of the last epoch of fine-tuning, under the same conditions

    @property
    def served(self) -> Params:
        """The models that clients end with."""
        return self.tuned or self.before


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
    on_round: OnRound | None = None,
    record: Callable[..., None] | None = None,
) -> Outcome:
    """Run all rounds and evaluate. `method.task.config` says how many, and what is evaluated when.

    Parameters
    ----------
    executor
        What trains the clients, see engine.py.
    workers
        Its threads, by default one per CPU core.
    state
        What round 0 starts from, by default `initial_state(method)`.
    checkpoint, end, stamp
        Files. The first is written at most once a minute, and the run goes on from it if it exists;
        the second is written at the last round, and a longer run can go on from it.
        Both carry `stamp`, plain values that say whose they are.
    on_round
        `on_round(round, history)` is called in every round. If it returns True, the run writes its
        checkpoint and stops; if it returns "finish", this round is the last one.
    record
        `record(engine, state, before, after, history, best, last)` sees the models of every
        evaluated round.

    Raises
    ------
    Diverged
        If parameters are no longer finite.
    Interrupted
        If `on_round` stopped the run.
    """
    with (
        one_thread(),
        torch.no_grad(),
        precision(method.task.config.precision),
        side_stream(data.device.type),
    ):
        engine = Engine(method, data, executor, workers)
        try:
            pairs.warn(method, participants(engine.config.participation, data.K))
            if engine.foreign:
                hooks.check_shared(method)
            if state is None:
                with engine.drawing("init"):
                    look = functools.partial(hooks.check_state, method, "init")
                    state = initial_state(method, look if engine.foreign else None)
            if engine.foreign:
                with engine.drawing("rehearsal"):
                    check_served(method, hooks.rehearse(method, data, state))
            with engine.drawing("rehearsal"):
                check_steps(engine, state)
            server.begin(method, state)
            run = _Run(engine, state, on_round, record)
            run.keep_files(checkpoint, end, stamp or {})
            return run.rounds()
        finally:
            engine.close()


class _Trained(NamedTuple):
    # A round's participants that answer: what they were sent, and what local training began and
    # ended with; and of those that do not, what they were sent in vain.
    ids: list[int]
    sel: Tensor
    sent: Params
    start: Params
    end: Params
    lost: Tensor
    vain: Params


class _Run:
    """One run's rounds. Its state is that of the federation before the round under way."""

    def __init__(
        self,
        engine: Engine,
        state: State,
        on_round: OnRound | None,
        record: Callable[..., None] | None,
    ):
        self.engine, self.method, self.data = engine, engine.method, engine.data
        self.config = engine.config
        self.state = state
        self.on_round = on_round
        self.record = record
        self.history = History()
        self.moved = [0.0, 0.0, 0.0]  # so far: scalars down, scalars up, client visits
        chosen = evaluated(self.config, self.data.K)
        self.evaluated_ids, self.evaluated = chosen.tolist(), chosen.to(self.data.device)
        self.keeps_models = bool(record) or self.config.keep_models
        self.scores = bool(self.config.metrics) or self.config.keep_scores
        self.before: Params = {}
        self.after: Params = {}
        self.tuned: Params = {}
        self.whole = True  # else the state is half-way from one round to the next
        self.known = not engine.foreign  # whether hooks return what they should
        self.told_of_nan = False
        self.outside = hooks.Outside(self.method, *scoring.functions(self.config.metrics))

    def keep_files(self, checkpoint: Path | None, end: Path | None, stamp: dict[str, Any]) -> None:
        """Say where this run is written to; if there is a checkpoint, go on from it."""
        self.checkpoint, self.end, self.stamp = checkpoint, end, stamp
        self.seconds_before = 0.0
        if checkpoint and checkpoint.exists():
            self.state, self.history, self.moved, self.seconds_before = restore(
                checkpoint, self.data.device
            )
        self.engine.batched.faster = self.history.faster
        self.engine.batched.chunks = self.history.chunks
        self.history.n = {split: self._sizes(split) for split in ("val", "test")}
        self.saved_at = self.started_at = time.monotonic()
        self.cpu_before = self.history.cpu - time.process_time()
        self.saved_round = self.state.round
        self._remember_start()

    def _sizes(self, split: str) -> np.ndarray:
        # (K,) samples of the evaluated clients, 0 for the others.
        n = np.zeros(self.data.K, dtype=np.int64)
        n[self.evaluated_ids] = [len(self.data.index[split][k]) for k in self.evaluated_ids]
        return n

    @property
    def seconds(self) -> float:
        """Time that the run has taken, together with what its checkpoint says."""
        return self.seconds_before + time.monotonic() - self.started_at

    def _note_cpu(self, history: History) -> None:
        history.cpu = self.cpu_before + time.process_time()

    # -- the loop ------------------------------------------------------------------------------

    def rounds(self) -> Outcome:
        """The rounds that are left, and an evaluation of what the last one leads to.

        Ctrl-C keeps what is complete; a note of the KeyboardInterrupt says what that is.
        """
        try:
            return self._rounds()
        except KeyboardInterrupt as error:
            if self.checkpoint:
                if self.whole:
                    self._save(self.checkpoint, self.history.until(*self.at_start))
                error.add_note(self._kept())
            raise

    def _kept(self) -> str:
        done = f"{self.saved_round} of {self.config.rounds} rounds"
        return (
            f"{self.method.name}, seed {self.config.seed}: {done} are kept; "
            "run it again to go on from there"
        )

    def _rounds(self) -> Outcome:
        for r in range(self.state.round, self.config.rounds):
            due = evaluate_at(self.config, r)
            if due:
                self._evaluate_before(r)
            trained = self._train(r)
            if due:
                self._evaluate_after(r, trained)
            told = self.on_round(r, self.history) if self.on_round else None
            if told == FINISH:
                if not due:
                    self._evaluate_before(r)
                    self._evaluate_after(r, trained, last=True)
                return self._finish(r)
            self.whole = False
            self._upload(r, trained)
            self.outside.check(r)
            self._remember_start()
            self.whole = True
            self._save_checkpoint(now=bool(told))
            if told:
                raise Interrupted(f"stopped after round {r}; run it again to go on from there")
        return self._evaluate_end(self.config.rounds)

    def _remember_start(self) -> None:
        # A longer run goes on from before the last evaluation, which it may do at another round.
        self.at_start = len(self.history.rounds), dict(self.history.probes)

    def _evaluate_end(self, r: int) -> Outcome:
        # As a round, without its upload: no later round needs it.
        self._evaluate_before(r)
        # Stragglers are evaluated as in any other round.
        all_train = everyone(self.config, self.data.K) or self.config.stragglers > 0
        trained = self._train(r) if all_train and self._evaluates_after else None
        self._evaluate_after(r, trained, last=True)
        if self.on_round:
            self.on_round(r, self.history)
        return self._finish(r)

    def _finish(self, r: int) -> Outcome:
        if self.end:
            self._save(self.end, self.history.until(*self.at_start))
        if self.config.keep_models and len(self.evaluated) < self.data.K:
            sel = torch.arange(self.data.K, device=self.data.device)
            with self.engine.drawing("personal", r):
                self.before = self._personal(r, sel, list(range(self.data.K)))
        if moments(self.config.finetune):
            self._tune(r)
        return Outcome(self.state, self.history, self.before, self.after, self.tuned)

    # -- fine-tuning ---------------------------------------------------------------------------

    def _tune(self, r: int) -> None:
        # Epochs on the served models, each evaluated. The state stays as it is, and an interrupted
        # fine-tuning begins anew.
        if self.checkpoint:
            self._save(self.checkpoint, self.history.until(*self.at_start))
        began, tuning = time.monotonic(), Tuning(self.engine, self.state)
        sums, history = {moment: self._blank() for moment in tuning.moments}, self.history
        last = 1 if self.before else len(self._parts())
        for part, (sel, ids, served) in enumerate(self._served(r), 1):
            for moment, self.tuned in tuning.epochs(served, sel, ids):
                when = f"in epoch {moment.rpartition(' ')[2]} of fine-tuning"
                _check_finite(self.tuned, self.method, when, history, sel)
                self._add(sums[moment], *self._seen(self.tuned, ids), when)
                if part == last:  # what is measured is kept, should a later epoch diverge
                    history.note(moment, sums[moment])
                self._note_executors()
                history.tuned_s = time.monotonic() - began
                self._note_cpu(history)
        self.tuned = self.tuned if self.before else {}

    def _served(self, r: int) -> Iterator[tuple[Tensor, list[int], Params]]:
        # What is fine-tuned: all clients whose models are kept, else those that are evaluated.
        if self.before:
            ids = list(range(self.data.K)) if self.config.keep_models else self.evaluated_ids
            yield torch.tensor(ids, device=self.data.device), ids, self.before
            return
        for i, (sel, ids) in enumerate(self._parts()):
            with self.engine.drawing("personal", r, *([i] if i else [])):
                served = self._personal(r, sel, ids)
            yield sel, ids, served

    def _seen(self, models: Params, ids: list[int]) -> tuple[Params, list[int]]:
        # Of models of clients `ids`, those that are evaluated, and of whom they are.
        if set(ids) <= set(self.evaluated_ids):
            return models, ids
        return {n: v[self.evaluated] for n, v in models.items()}, self.evaluated_ids

    # -- training ------------------------------------------------------------------------------

    def _train(self, r: int) -> _Trained:
        # Sample, download, local training of those who answer; the state stays as it is.
        asked = sample(self.config, self.data.K, r)
        there, device = answers(self.config, asked, r), self.data.device
        ids, sel, lost = asked[there].tolist(), asked[there].to(device), asked[~there].to(device)
        vain, start, end = {}, {}, {}
        with self.engine.drawing("local", r):
            with self._reading("download"):
                sent = self.method.download(self.state, asked.to(device))
            if len(lost):  # the server sends before it knows who answers
                rows = (who.nonzero().flatten().to(device) for who in (~there, there))
                vain, sent = (take(sent, of) for of in rows)
            if ids:
                with self._reading("begin", sent):
                    start = self.method.begin(self.state, sel, sent)
                with self._reading("local", start):
                    end = self.method.local(self._context(r, sel, ids), start)
        trained = _Trained(ids, sel, sent, start, end, lost, vain)
        if not ids:
            return trained
        if not self.known:
            kept = [n for n in self.state.clients if n in end]
            like = select(start, [*self.method.task.names, *kept])
            hooks.check_rows(self.method, "local", end, len(ids), like)
        _check_finite(end, self.method, f"in round {r}", self.history, sel)
        self._note_executors()
        return trained

    def _reading(self, hook: str, given: Params | None = None) -> AbstractContextManager:
        # Until all hooks were looked at once, they are watched.
        if self.known:
            return nullcontext()
        return hooks.reading(self.method, hook, self.state, given)

    def _context(self, r: int, sel: Tensor, ids: list[int]) -> Context:
        return Context(self.engine, self.state, sel, r, ids, paces(self.config, ids, r))

    def _upload(self, r: int, trained: _Trained) -> None:
        # The state of the next round, and what was sent for it.
        lost, down, up = trained.lost, 0, 0
        in_vain = self.method.traffic(self.state, lost, trained.vain, {})[0] if len(lost) else 0
        if trained.ids:
            down, up = self._step(r, trained)
        self.state.round = r + 1
        if self.config.client_dropout:
            self.history.answered[r] = trained.ids
        now = (down + in_vain, up, len(trained.ids))
        self.moved = [total + more for total, more in zip(self.moved, now, strict=True)]

    def _step(self, r: int, trained: _Trained) -> tuple[int, int]:
        # The server's step, and what the participants keep; scalars down and up.
        sel, sent, start = trained.sel, trained.sent, trained.start
        kept, up = returned(self.method, self.state, start, sent, trained.end)
        joins = self.method.task.joins is not None
        if joins and not self.method.adopts:  # the server learns nothing from who is new to it
            moved = self.method.traffic(self.state, sel, sent, {})
            self._keep(sel, kept)
            return moved
        moved = self.method.traffic(self.state, sel, sent, news(start, up))
        weight = self.data.n[sel].to(self.data.dtype)
        like = {} if self.known else hooks.tensors(self.state)
        before = server.held(self.method, self.state)
        served = clone(self.state.server) if joins else {}
        with self.engine.drawing("upload", r):
            state = self.method.upload(self.state, sel, start, up, weight)
        state, self.known = hooks.check_state(self.method, "upload", state, like), True
        if joins:
            state.server = served
        self.state = server.stepped(self.method, self.state, state, before)
        held = {**self.state.server, **self.state.extra}
        _check_finite(held, self.method, f"in round {r}", self.history)
        self._keep(sel, kept)
        return moved

    def _keep(self, sel: Tensor, kept: Params) -> None:
        # What clients keep of a round.
        for name, value in kept.items():
            self.state.clients[name][sel] = value

    def _note_executors(self) -> None:
        known = set(self.history.executor.split("+")) - {""}
        self.history.executor = "+".join(sorted(known | self.engine.ran))

    # -- evaluation ----------------------------------------------------------------------------

    @property
    def _evaluates_after(self) -> bool:
        return evaluates_after(self.config, self.data.K)

    def _evaluate_before(self, r: int) -> None:
        # The models that round r starts from, as they are served.
        with self._reading("personal, or logits,"):
            self.before = self._evaluate("before", r, self._personal)

    def _personal(self, r: int, sel: Tensor, ids: list[int]) -> Params:
        got = self.method.personal(self.state, Context(self.engine, self.state, sel, r, ids))
        return got if self.known else hooks.check_rows(self.method, "personal", got, len(ids))

    def _evaluate_after(self, r: int, trained: _Trained | None, last: bool = False) -> None:
        # The same models after local training on round r's batches; closes the round's entry.
        history = self.history
        if self._evaluates_after:
            models = functools.partial(self._after_training, trained)
            with self._reading("serve, or logits,", trained.end if trained else None):
                self.after = self._evaluate("after", r, models)
            self._note_executors()
        history.rounds.append(r)
        history.download.append(self.moved[0])
        history.upload.append(self.moved[1])
        history.visits.append(self.moved[2])
        history.wall.append(self.seconds)
        self._note_cpu(history)
        if self.record:
            best = _is_best(history)
            self.record(self.engine, self.state, self.before, self.after, history, best, last)

    def _after_training(
        self, trained: _Trained | None, r: int, sel: Tensor, ids: list[int]
    ) -> Params:
        # Who did not take part in the round trains here, on a copy that is thrown away.
        sampled = trained.ids if trained else []
        if trained and sampled == ids == list(range(self.data.K)):
            return self.method.serve(trained.end)
        row = {k: i for i, k in enumerate(sampled)}
        done = [k for k in ids if k in row]
        others = [k for k in ids if k not in row]
        parts = []
        if trained and done:
            rows = [row[k] for k in done]
            parts.append({name: value[rows] for name, value in trained.end.items()})
        if others:
            sel = torch.tensor(others, device=self.data.device)
            ctx = Context(self.engine, self.state, sel, r, others)
            parts.append(self.method.local(ctx, self.method.begin(self.state, sel)))
        served = [self.method.serve(part) for part in parts]
        order = torch.argsort(torch.tensor([*done, *others], device=self.data.device))
        return {name: torch.cat([part[name] for part in served])[order] for name in served[0]}

    def _evaluate(self, when: str, r: int, models: Callable[..., Params]) -> Params:
        # Sums over each evaluated client's validation and test samples, into arrays (K,). Returns
        # the models, {} where they are so many that they were made in several parts.
        purpose, sums = "personal" if when == "before" else when, self._blank()
        parts = self._parts()
        for i, (sel, some) in enumerate(parts):
            with self.engine.drawing(purpose, r, *([i] if i else [])):
                served = models(r, sel, some)
            _check_finite(served, self.method, f"in round {r}", self.history, sel)
            self._add(sums, served, some, f"of round {r}")
        self.history.note(when, sums)
        return served if len(parts) == 1 else {}

    def _parts(self) -> list[tuple[Tensor, list[int]]]:
        # The evaluated clients, in parts whose models are in memory together.
        ids = self.evaluated_ids
        parts = 1 if self.keeps_models else -(-len(ids) // EVALUATED_AT_ONCE)
        several = self.evaluated.tensor_split(parts)
        ends = np.cumsum([len(sel) for sel in several]).tolist()
        return [(sel, ids[end - len(sel) : end]) for sel, end in zip(several, ends, strict=True)]

    def _blank(self) -> Sums:
        pairs = [*itertools.product(("val", "test"), ("correct", "loss")), ("test", "balanced")]
        sums = {pair: np.zeros(self.data.K) for pair in pairs}
        shape = self.data.K, self.method.task.C
        return sums | scoring.blank(self.config, shape, self.history.n["test"].sum())

    def _add(self, sums: Sums, models: Params, ids: list[int], when: str) -> None:
        # What the models of clients `ids` get right, into their rows.
        for split in ("val", "test"):
            with self.engine.watched(f"evaluation {when}"):
                found = self.engine.evaluate(models, split, ids, self.scores)
            self._tell_of_nan(found["loss"], ids, f"{split} samples {when}")
            if self.scores:
                of = found["y"], found["scores"], found["n"]
                found |= scoring.measured(self.config.metrics, *of, ids)
            for metric in (m for s, m in sums if s == split):
                rows = self._samples(ids) if metric == scoring.SCORES else ids
                sums[split, metric][rows] = found[metric]

    def _tell_of_nan(self, loss: np.ndarray, ids: list[int], which: str) -> None:
        # Networks of ours have such scores only where they are about to diverge.
        if self.known or self.told_of_nan or not np.isnan(loss).any():
            return
        self.told_of_nan = True
        k = ids[int(np.flatnonzero(np.isnan(loss))[0])]
        warnings.warn(
            f"{self.method.name}: class scores of {which} are NaN or infinite, first client {k}'s; "
            "NaN counts as a wrong answer and leaves other metrics undefined; look for 0 / 0 or "
            "log(0) in the model, and add an epsilon",
            stacklevel=2,
        )

    def _samples(self, ids: list[int]) -> slice:
        # Where test samples of clients `ids`, which follow one another, are among all.
        n = self.history.n["test"]
        first = n[: ids[0]].sum()
        return slice(first, first + n[ids].sum())

    # -- files ---------------------------------------------------------------------------------

    def _save_checkpoint(self, now: bool) -> None:
        if self.checkpoint and (now or time.monotonic() - self.saved_at > CHECKPOINT_EVERY):
            self._save(self.checkpoint, self.history)
            self.saved_at = time.monotonic()

    def _save(self, path: Path, history: History) -> None:
        self._note_cpu(history)
        save(path, self.state, history, self.moved, self.seconds, self.stamp)
        self.saved_round = self.state.round


# -- details -----------------------------------------------------------------------------------


def returned(
    method: Method, state: State, start: Params, sent: Params, end: Params
) -> tuple[Params, Params]:
    """What of `end` the clients keep, and what goes to the server.

    Buffers that start anew in every round (buffers="reset") are in neither.
    """
    reset = {name for name in method.task.buffers if name in start and name not in sent}
    kept = {name: value for name, value in end.items() if name in state.clients}
    up = {name: v for name, v in end.items() if name not in kept and name not in reset}
    return kept, up


def news(start: Params, up: Params) -> Params:
    """What of `up` has to be sent: not what `local` returned as it was in `start`."""
    return {name: v for name, v in up.items() if v is not start.get(name)}


def _is_best(history: History) -> bool:
    # Whether the latest evaluation is better than all before, by the clients' mean accuracy on
    # validation data; on test data where there are none.
    split = "val" if history.n["val"].any() else "test"
    n = torch.as_tensor(history.n[split])
    correct = torch.stack(history.evals[f"before/{split}/correct"])
    score = compared(100 * (correct[:, n > 0] / n[n > 0]).mean(1).numpy())
    return bool((score[-1] > score[:-1]).all())


def _check_finite(
    p: dict[str, Any], method: Method, when: str, history: History, ids: Tensor | None = None
) -> None:
    # p: models of the clients `ids`, or what the server holds.
    found = {
        name: v[:1] if v.dim() > 1 and is_common(v) else v  # alike rows are looked at once
        for name, v in hooks.flat(p)
        if v.is_floating_point()
    }
    # One look at all sums together: on a GPU each look is a wait.
    if not found or torch.isfinite(torch.stack([v.sum().double() for v in found.values()])).all():
        return
    for name, v in found.items():
        rows = torch.isfinite(v.flatten(1) if v.dim() > 1 else v[..., None]).all(-1)
        if rows.all():  # large numbers whose sum alone is infinite
            continue
        who = "the server" if ids is None else f"client {int(ids[: len(rows)][~rows][0])}"
        layer = name.rpartition(".")[0] or name
        raise Diverged(
            f"{method.name}: layer {layer} ({name}) of {who} is not finite {when}; "
            "lower lr, or clip gradients",
            history,
        )


def final_models(models: Params, names: tuple[str, ...]) -> Params:
    """The entries `names` of personal models, {name: (K, *shape)}, copied to the CPU."""
    return {name: v.cpu() for name, v in clone(select(models, names)).items()}
