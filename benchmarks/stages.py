"""What the stages of `python -m benchmarks.gpu` do: each yields its rows as tasks, one by one."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import io
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.agree import compared, difference, held, replays, wrong
from benchmarks.cases import CASES, Case
from benchmarks.common import timed
from benchmarks.plain_loop import PlainLoop
from benchmarks.rounds import Ours, matrix_rate
from benchmarks.steps import TINY, Step, network
from benchmarks.waits import SMALL, trained
from pfl_core.engine import graphs
from pfl_core.engine.convolutions import FORMS
from pfl_core.engine.participation import sample
from pfl_core.engine.sgd import precision
from pfl_core.engine.simulate import Interrupted, Outcome
from pfl_core.experiments.build import build_method, client_data
from pfl_core.experiments.experiment import Experiment
from pfl_core.methods.base import METHODS
from pfl_core.util import driver, gpu
from tools import notebooks
from tools.notebooks import ROOT

Row = dict[str, Any]
GRAPHED = ("graphs:fastest", "graphs", "graphs:unfold")
STACKED = (*GRAPHED, "batched:fastest", "batched", "batched:unfold")
AGREE = ("fedavg", "flayer", "pfedhn", "fedrep")


class Task(NamedTuple):
    """One row: `what` it is of, and what finds the rest of it."""

    what: Row
    find: Callable[[], Row]
    drops: tuple[str, ...] = ()  # executors that are not taken any more if it fails


class Asked(NamedTuple):
    """What a stage is called with."""

    device: Any
    executor: str  # the best that has not failed yet
    dropped: frozenset[str]  # executors that have
    smallest: bool  # a trial of the script itself
    folder: Path

    @property
    def kind(self) -> str:
        """The kind of device."""
        return torch.device(self.device).type

    @property
    def captures(self) -> bool:
        """Whether steps are captured here."""
        return self.kind in graphs.GRAPHS and not self.dropped.issuperset(GRAPHED)

    @property
    def stacked(self) -> list[str]:
        """The stacked executors that are left."""
        left = STACKED if self.kind in graphs.GRAPHS else STACKED[len(GRAPHED) :]
        return [x for x in left if x not in self.dropped]


Tasks = Iterator[Task]


class Unusable(RuntimeError):
    """Nothing later makes sense; the message has the remedy."""


# -- 0: driver, wheel, rates, graphs ---------------------------------------------------------------


def preflight(asked: Asked) -> Tasks:
    """Driver, wheel and card; rates of matrix products; whether anything can be captured."""
    yield Task({"what": "computer"}, partial(_computer, asked))
    for kind in ("full", "tf32", "bf16"):
        yield Task({"what": "matrix products", "precision": kind}, partial(_rate, asked, kind))
    if asked.kind in graphs.GRAPHS:
        yield Task({"what": "graphs"}, partial(captured_thrice, asked), GRAPHED)


def _computer(asked: Asked) -> Row:
    row = dict(torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version())
    row |= dict(driver=driver.version(), cores=len(os.sched_getaffinity(0)))
    if asked.device == "cuda":
        _usable()
        free, total = torch.cuda.mem_get_info()
        row |= dict(card=torch.cuda.get_device_name(), free_gb=free / 1e9, total_gb=total / 1e9)
        row |= dict(capability=".".join(map(str, torch.cuda.get_device_capability())))
        row |= dict(cudnn=torch.backends.cudnn.version(), built=torch.cuda.get_arch_list())
    return row


def _usable() -> None:
    try:
        gpu.tried()
    except RuntimeError as error:
        raise Unusable(gpu.refused() or str(error)) from error


def _rate(asked: Asked, kind: str) -> Row:
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    with precision(kind):
        return {"tflops": matrix_rate(asked.device, 64 if asked.smallest else 0, dtype) / 1e12}


def captured_thrice(asked: Asked) -> Row:
    """Each time into a pool of its own, which is given up before the next one is opened."""
    for turn in range(3):
        with graphs.side_stream(asked.kind):
            made, count = graphs.opened(asked.kind), torch.zeros(3).to(asked.device)
            replay = graphs.captured(made, partial(_add_one, count), asked.kind)
            replay(), replay()
        if count.cpu().tolist() != [2.0] * 3:
            raise RuntimeError(f"turn {turn}: two replays of adding 1 gave {count.cpu().tolist()}")
        del made, replay
        gc.collect()
    return {"captured": 3}


def _add_one(count: torch.Tensor) -> None:
    count += 1


# -- 1 and 4: a step, by parts and in all its forms ------------------------------------------------


def parts(asked: Asked) -> Tasks:
    """Each part of a step, captured and replayed; the first that fails is the one to look at."""
    for model in ("cnn", "cnn_bn", "lenet")[: 1 if asked.smallest else None]:
        for form in FORMS:
            step = functools.cache(partial(_step, asked, model, form, 20))
            for name in ("gather", "forward", "gradient", "update", "whole step"):
                drops = GRAPHED if name == "whole step" else ()
                what = {"network": model, "form": form, "part": name}
                yield Task(what, partial(_part, asked, step, name), drops)


def steps(asked: Asked) -> Tasks:
    """Microseconds of a step: networks, forms, clients at once, precisions; what it launches."""
    kinds = ("full", "tf32") if asked.kind == "meta" else ("full", "tf32", "bf16")
    for model in ("lenet", "cnn", "cnn_bn", "resnet18")[: 1 if asked.smallest else None]:
        for rows in (2,) if asked.smallest else (1, 10, 20):
            for kind in kinds:
                for form in FORMS[: 1 if asked.smallest else None]:
                    what = dict(network=model, clients=rows, precision=kind, form=form)
                    make = partial(_step, asked, model, form, rows, precision=kind)
                    yield Task(what, partial(_whole, asked, make))


def _step(asked: Asked, model: str, form: str, rows: int, **changes: Any) -> Step:
    most = 2 if asked.smallest else rows
    return Step(network(model, asked.smallest, **changes), asked.device, form, most)


def _part(asked: Asked, step: Callable[[], Step], name: str) -> Row:
    count = 1 if asked.smallest else 50
    found = {"eager_us": step().microseconds(name, count)}
    if asked.captures:
        found["graph_us"] = step().microseconds(name, count, captured=True)
    return found


def _whole(asked: Asked, make: Callable[[], Step]) -> Row:
    if asked.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = make()
    found = {"launches": step.launches()} | _part(asked, lambda: step, "whole step")
    if asked.device == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


# -- 2: the executors agree ------------------------------------------------------------------------


def agree(asked: Asked) -> Tasks:
    """Some methods in all stacked executors beside threads, in float64."""
    for executor in asked.stacked[:: 2 if asked.smallest else 1]:
        for method in AGREE[: 1 if asked.smallest else None]:
            what = {"executor": executor, "method": method}
            yield Task(what, partial(agrees, asked, method, executor), (executor,))


def agrees(asked: Asked, method: str, executor: str) -> Row:
    """How far an executor ends from threads; RuntimeError if it is far, or something else ran."""
    base = TINY.but(rounds=2) if asked.smallest else SMALL
    found = compared(method, asked.device, (executor,), base)
    if wrong(found):
        raise RuntimeError(f"ends elsewhere, or ran otherwise: {found[executor]}")
    return found[executor]


# -- 3: the life of an engine ----------------------------------------------------------------------


def life(asked: Asked) -> Tasks:
    """Runs after one another, again, resumed, and in too little memory."""
    for name, find in LIFE.items():
        yield Task({"what": name, "executor": asked.executor}, partial(find, asked))


def several_runs(asked: Asked) -> Row:
    """Three runs in one process; the third is the first one again, and ends so bit for bit."""
    ends, ran = [], []
    for method in ("fedavg", "fedrep", "fedavg"):
        with replays(asked.kind) as count:
            outcome = _run(asked, method=method)
        ends.append(held(outcome))
        ran.append(f"{method} {outcome.history.executor} ({len(count)} replays)")
        if asked.executor in GRAPHED and not count:
            raise RuntimeError(f"no graph was replayed: {', '.join(ran)}")
    return {"ran": ", ".join(ran), "off": _same(ends[0], ends[2])}


def resumed(asked: Asked) -> Row:
    """A run that was stopped after its first round ends as one that was not, bit for bit."""
    if asked.kind == "meta":
        return {"skipped": "what pretends to be a tensor is not written to files"}
    whole = held(_run(asked))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        try:
            _run(asked, checkpoint=path, on_round=lambda r, history: True)
        except Interrupted:
            return {"off": _same(whole, held(_run(asked, checkpoint=path)))}
    raise RuntimeError("the run did not stop")


def little_memory(asked: Asked) -> Row:
    """With memory for some of the clients that it took at once, training ends alike."""
    if asked.device != "cuda":
        return {"skipped": "needs a card's memory"}
    e = network("cnn", dtype="float64")
    one, _ = _reserved(asked, e.but(participation=1 / e.clients))
    every, whole = _reserved(asked, e)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((one + every) / 2 / total)
    try:
        _, other = _reserved(asked, e)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    off = max(difference(v, other[n]) for n, v in whole.items())
    if not off <= 1e-9:
        raise RuntimeError(f"in chunks it ends elsewhere, by {off:.2g}")
    return {"off": off, "one_gb": one / 1e9, "all_gb": every / 1e9}


def _reserved(asked: Asked, e: Experiment) -> tuple[int, dict[str, torch.Tensor]]:
    # Bytes that a run takes from the driver at most, data and workspaces included; its end.
    gc.collect(), torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ends = held(trained(e, "cuda", executor=asked.executor))
    return torch.cuda.max_memory_reserved(), {n: v.cpu() for n, v in ends.items()}


LIFE = {"several runs": several_runs, "resumed": resumed, "little memory": little_memory}


def _run(asked: Asked, method: str = "fedavg", **how: Any) -> Outcome:
    # By its time another form could be chosen in each run.
    executor = asked.executor.removesuffix(":fastest")
    e = TINY.but(rounds=2) if asked.smallest else SMALL
    return trained(e.but(method=method), asked.device, executor=executor, **how)


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    if off := max(difference(v, b[n]) for n, v in a.items()):
        raise RuntimeError(f"it ends elsewhere, by {off:.2g} of a tensor's largest entry")
    return off


# -- 5: rounds beside the plain loop ---------------------------------------------------------------


def rounds(asked: Asked) -> Tasks:
    """The cases of rounds.py: ours of all cases first, then the plain loop, once each."""
    tiny = {"tiny": Case("tiny", lambda: TINY.but(rounds=1), 1.0, 1.0)}
    cases = tiny if asked.smallest else CASES
    for who, find in (("ours", _ours), ("plain loop", _plain)):
        for name, case in cases.items():
            yield Task({"case": name, "who": who}, partial(find, asked, case))


def _ours(asked: Asked, case: Case) -> Row:
    experiment = case.experiment()
    ours = Ours(experiment, asked.device, asked.executor)

    def train() -> None:
        for _ in range(experiment.rounds):
            ours.train()

    with torch.no_grad():
        first = timed(train, asked.device)  # captures, and chooses a form
        again = [timed(train, asked.device) for _ in range(1 if asked.smallest else 3)]
        evaluate = timed(lambda: [ours.evaluate(s) for s in ("train", "test")], asked.device)
        found = dict(first_s=first, train_s=statistics.median(again), eval_s=evaluate)
        found |= dict(ran="+".join(sorted(ours.engine.ran)), acc_pct=ours.evaluate("test"))
    ours.engine.close()
    return found


def _plain(asked: Asked, case: Case) -> Row:
    experiment = case.experiment()
    data = client_data(experiment, asked.device)
    method = build_method(experiment, data)
    plain = PlainLoop(method.task.model, data, method.task.config)
    clients = [sample(plain.config, data.K, r).tolist() for r in range(experiment.rounds)]
    train = timed(lambda: [plain.train(few) for few in clients], asked.device)
    evaluate = timed(lambda: [plain.evaluate(s) for s in ("train", "test")], asked.device)
    return dict(train_s=train, eval_s=evaluate, acc_pct=plain.evaluate("test"))


# -- 6: notebooks ----------------------------------------------------------------------------------


def papermill(asked: Asked) -> Tasks:
    """Three notebooks at smoke on the device; what is not installed is said."""
    for name in ("start",) if asked.smallest else ("start", "pfedhn", "fedaghn"):
        yield Task({"notebook": name}, partial(_notebook, asked, name))


def _notebook(asked: Asked, name: str) -> Row:
    needs = ("papermill", "ipykernel", "psutil")
    if lacking := [n for n in needs if importlib.util.find_spec(n) is None]:
        return {"skipped": f"not installed: {', '.join(lacking)}"}
    given = {"profile": "smoke", "device": "cuda" if asked.device == "cuda" else "cpu"}
    notebooks.check_parameters(notebooks.NOTEBOOKS / f"{name}.ipynb", given)
    if asked.smallest:
        return {"skipped": "parameters alone were looked at"}
    env = notebooks.environment(asked.folder / "runs", PFL_OFFLINE="1", TQDM_DISABLE="1")
    (row,) = notebooks.run([name], given, env, limit_s=150)
    if row.status != "ok":
        raise RuntimeError(row.where)
    return {"wall": row.wall}


# -- 7: the rest -----------------------------------------------------------------------------------


def rest(asked: Asked) -> Tasks:
    """All methods agree; the tests that need a GPU; processes side by side; server; growth."""
    device = ("--device", "cuda" if asked.device == "cuda" else "cpu")
    commands = {
        "agree": ("benchmarks.agree", *sorted(METHODS), *device),
        "tests": ("pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/test_gpu.py"),
        "server": ("benchmarks.server", *device),
        "scaling": ("benchmarks.scaling", "clients", "batch", "--most", "3", *device),
    }
    run = _parsed if asked.smallest else _command
    for name, words in commands.items():
        yield Task({"what": name}, partial(run, asked, name, words))
    for count in (1,) if asked.smallest else (1, 2, 4, 8):
        yield Task({"what": "processes", "count": count}, partial(_side_by_side, asked, count))


def _parsed(asked: Asked, name: str, words: tuple[str, ...]) -> Row:
    # Whether a benchmark would take these words; --help at their end keeps it from beginning.
    if words[0] == "pytest":
        return {"tests": (ROOT / words[-1]).stat().st_size}
    said = io.StringIO()
    with mock.patch.object(sys, "argv", [*words, "--help"]), contextlib.redirect_stderr(said):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                importlib.import_module(words[0]).main()
        except SystemExit as end:
            if end.code:
                raise RuntimeError(said.getvalue().strip().splitlines()[-1]) from end
    return {}


def _command(asked: Asked, name: str, words: tuple[str, ...]) -> Row:
    log, began = asked.folder / f"{name}.log", time.monotonic()
    with log.open("wb") as out:
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, stdout=out, stderr=out, cwd=ROOT, timeout=400)
    last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}: {last[:200]}")
    return {"seconds": time.monotonic() - began, "last": last[:200]}


def _side_by_side(asked: Asked, count: int) -> Row:
    # Client-steps a second of so many processes together, each with its share of the memory.
    device = "pretend" if asked.kind == "meta" else str(asked.device)
    words = ["benchmarks.steps", "--device", device, "--seconds", "0" if asked.smallest else "8"]
    words += ["--smallest"] * asked.smallest
    env = os.environ | {"PFL_GPU_SHARE": f"{1 / count:.3f}"}
    how = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=ROOT)
    running = [subprocess.Popen([sys.executable, "-m", *words], **how) for _ in range(count)]
    said = [process.communicate(timeout=180)[0].strip() for process in running]
    if bad := [text for text, p in zip(said, running, strict=True) if p.returncode]:
        raise RuntimeError((bad[0].splitlines() or ["a process ended without a word"])[-1])
    return {"client_steps_per_s": sum(float(text.split()[-1]) for text in said)}
