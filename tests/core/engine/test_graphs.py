"""Captured steps by CUDA's rules, on tapes that keep them: pools, streams, garbage, failures, and the executors below."""

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F

from benchmarks.pretend import DEVICE
from benchmarks.tape import Tape, taped
from benchmarks.waits import SMALL, accelerated, trained
from pfl_core import Experiment, run
from pfl_core.engine import batched, graphs
from pfl_core.engine.batched import KEPT, Batched
from pfl_core.engine.convolutions import GROUPED, UNFOLD
from pfl_core.engine.engine import BELOW, EXECUTORS
from pfl_core.engine.graphs import CaptureFailed, CudaGraphs, captured, chain, first, opened
from tests.core.engine.setting import assert_close, engine, train
from tests.core.methods.setting import OURS

SHORT = (24, 24)  # samples a client: six steps


@pytest.fixture(autouse=True)
def log():
    with taped() as log:
        yield log


# -- what tapes refuse -----------------------------------------------------------------------------


def refuses(step, match, kind="cpu"):
    with pytest.raises(CaptureFailed, match=match):
        captured(opened(kind), step, kind)


def test_answers_of_the_device_are_refused():
    x = torch.arange(3.0)
    for step in (
        lambda: x.add_(x.sum().item()),
        lambda: x.add_(x[x > 1].sum()),
        lambda: x.add_(len(x.nonzero())),
    ):
        refuses(step, "not permitted when stream is capturing")
        graphs.FAILED.clear()


def test_copies_across_devices_are_refused():
    with accelerated(), taped(DEVICE.type):
        x = torch.zeros(3, device=DEVICE)
        for step in (
            lambda: x.add_(torch.ones(3).to(DEVICE)),
            lambda: x.copy_(torch.ones(3)),
            lambda: x.add_(torch.tensor([1.0, 2.0, 3.0], device=DEVICE)),
            lambda: torch.ones(3).copy_(x),
            lambda: x.cpu(),
        ):
            refuses(step, "not permitted when stream is capturing", DEVICE.type)
            graphs.FAILED.clear()
        replay = captured(opened(DEVICE.type), lambda: x.add_(1.0), DEVICE.type)
        for _ in range(3):
            replay()
        assert x.tolist() == [3, 3, 3], "the capture itself changed nothing"


def test_a_graph_destroyed_in_a_capture_is_refused():
    mine, x = opened("cpu"), torch.zeros(3)
    held = [captured(mine, lambda: x.add_(1), "cpu")]
    refuses(lambda: (x.add_(1), held.clear()), "previous error during capture")


def test_a_pool_without_a_living_graph_is_refused():
    mine, x = opened("cpu"), torch.zeros(3)
    mine.anchor = None
    with pytest.raises(CaptureFailed, match="use_count > 0"):
        captured(mine, lambda: x.add_(1), "cpu")


# -- the life of graphs ----------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["graphs", "graphs:fastest"])
def test_six_runs_of_one_process_capture(executor, log):
    for i in range(6):
        del log[:]
        e = engine(executor, SHORT)
        train(e, rounds=2)
        assert {x.partition(":")[0] for x in e.ran} == {"graphs"}, i
        assert [what for what, _ in log].count("replay") > 3
        e.close()


def test_two_engines_in_turn_capture_and_replay(log):
    a, b, c = engine("graphs", SHORT), engine("graphs", SHORT), engine("threads", SHORT)
    for _ in range(3):
        p, q, r = (train(e, rounds=2) for e in (a, b, c))
        assert_close(r, p)
        assert_close(r, q)
    a.close()
    train(b, loss=lambda p, anchor, batch: b.method.loss(p, anchor, batch) * 2)
    assert a.ran == b.ran == {"graphs"} and not graphs.FAILED


def test_stacks_that_are_dropped_leave_a_pool_to_capture_in(log):
    e = engine("graphs", SHORT)
    for i in range(2 * KEPT):
        train(e, loss=lambda p, anchor, batch, i=i: e.method.loss(p, anchor, batch) * (i + 1))
    assert e.ran == {"graphs"} and [what for what, _ in log].count("capture") == 2 * KEPT
    e.batched.forget()
    train(e)
    assert e.ran == {"graphs"} and not graphs.FAILED


def test_garbage_is_not_collected_in_a_capture():
    mine, x = opened("cpu"), torch.zeros(3)
    cycle = [captured(mine, lambda: x.add_(1), "cpu")]
    cycle.append(cycle)
    held, before = [cycle], gc.get_threshold()
    del cycle

    def drops_a_graph():
        x.add_(1)
        held.clear()
        return [[i] for i in range(5000)]

    gc.set_threshold(10, 1, 1)
    try:
        captured(mine, drops_a_graph, "cpu")
        assert gc.isenabled()
        refuses(lambda: x.sum().item(), "capturing")
        assert gc.isenabled(), "after one that failed, too"
        gc.disable()
        captured(opened("cpu"), lambda: x.add_(1), "cpu")
        assert not gc.isenabled(), "as it was"
    finally:
        gc.set_threshold(*before)
        gc.enable()


def test_a_closed_engine_holds_no_graphs(log):
    e = engine("graphs", SHORT)
    train(e)
    del log[:]
    assert sum(Tape.living.values()) > 1
    e.close()
    assert sum(Tape.living.values()) == 0 and not e.batched.stacks


# -- what fails ------------------------------------------------------------------------------------


def asks(p, anchor, grad, s):
    g = grad(p)
    return p | {n: p[n] - (0.2 if s.t % 2 else 0.1) * g[n] for n in g}, {}


def test_a_computer_that_captures_nothing_runs_batched_and_says_so_once(monkeypatch):
    def broken(*_):
        raise RuntimeError("CUDA driver version is insufficient")

    monkeypatch.setitem(graphs.GRAPHS, "cpu", broken)
    for executor in ("graphs", "graphs:fastest"):
        e = engine(executor, SHORT)
        match = "cannot be captured .*driver version.*it runs batched"
        with pytest.warns(UserWarning, match=match) as said:
            got = train(e, rounds=2)
        assert len(said) == 1 and {x.partition(":")[0] for x in e.ran} == {"batched"}
        assert_close(train(engine("threads", SHORT), rounds=2), got)


def test_a_probe_that_computes_nothing_is_seen(monkeypatch):
    monkeypatch.setattr(Tape, "replay", lambda self: None)
    with pytest.raises(CaptureFailed, match="a captured sum of 0 and 1 gave 0"):
        opened("cpu")


def test_after_two_failed_captures_no_more_are_tried(monkeypatch):
    tried = []
    begin = Tape.begin
    monkeypatch.setattr(Tape, "begin", lambda self, pool: tried.append(pool) or begin(self, pool))
    for i in range(4):
        with pytest.warns(UserWarning, match="cannot be captured"):
            train(engine("graphs:fastest", SHORT), step=asks)
        assert len(graphs.FAILED) == graphs.MOST_FAILED, i
    assert len(tried) == 4, "an anchor and a step, twice"


def test_the_first_error_is_told_not_the_last():
    e = engine("graphs", SHORT)
    with pytest.warns(UserWarning, match="not permitted when stream is capturing") as said:
        train(e, step=asks)
    assert "previous error" not in str(said[0].message)
    try:
        try:
            raise ValueError("first\nmore")
        except ValueError as error:
            raise RuntimeError("second") from error
    except RuntimeError as error:
        assert isinstance(first(error), ValueError) and len(list(chain(error))) == 2
    try:
        try:
            raise ValueError("first")
        except ValueError:
            raise RuntimeError("second") from None
    except RuntimeError as error:
        assert first(error) is error


@pytest.mark.parametrize("executor", ["graphs", "graphs:fastest"])
def test_an_error_that_the_device_keeps_is_no_reason_to_go_on(executor, monkeypatch):
    def sticky(kind):
        raise RuntimeError("an illegal memory access was encountered")

    for module in (graphs, batched, pytest.importorskip("pfl_core.engine.engine")):
        monkeypatch.setattr(module, "synchronize", sticky)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="illegal memory access"):
            train(engine(executor, SHORT), step=asks)

        def branches(p, anchor, batch):
            out = F.cross_entropy(p["fc.weight"][:3, :3], batch.y[:3])
            return out * 2 if out > 1 else out

        with pytest.raises(RuntimeError, match="illegal memory access"):
            train(engine(executor, SHORT), loss=branches)


def test_running_out_of_memory_in_a_capture_halves_the_chunk(monkeypatch):
    def full(self, fn):
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError:
            raise RuntimeError("capture invalidated")  # noqa: B904  as the end of a capture does

    right = CudaGraphs.capture
    e = engine("graphs", (24, 24, 24, 24))
    monkeypatch.setattr(
        CudaGraphs,
        "capture",
        lambda self, fn: (full if "_body" in str(fn) and len(sizes) < 1 else right)(self, fn),
    )
    sizes = []
    seen = Batched._attempt

    def attempt(self, job, how, form, each):
        out = seen(self, job, how, form, each)
        sizes.append(each)
        return out

    monkeypatch.setattr(Batched, "_attempt", attempt)
    assert_close(train(engine("threads", (24, 24, 24, 24))), train(e))
    assert sizes == [4, 2] and e.ran == {"graphs"} and not graphs.FAILED


# -- the ladder ------------------------------------------------------------------------------------


def test_every_executor_ends_in_threads():
    assert {*BELOW, "threads", "auto"} == set(EXECUTORS)
    for at in BELOW:
        passed = []
        while at != "threads":
            passed.append(at)
            at = BELOW[at]
        assert len(passed) == len(set(passed))
    ladder = ["graphs:fastest"]
    while ladder[-1] != "threads":
        ladder.append(BELOW[ladder[-1]])
    assert ladder == ["graphs:fastest", "graphs", "batched:fastest", "batched", "threads"]


def failing(monkeypatch, *what):
    """From now on stacks of these kinds fail: "graphs", "batched", or one of a form. What was tried."""
    tried, new = [], Batched._new_stack

    def stack(self, job, how, form, most):
        tried.append(f"{how} {form}")
        for each in (how, f"{how} {form}"):
            if each in what and how == "graphs":
                raise CaptureFailed(f"{each} fails")
            if each in what:
                raise RuntimeError(f"{each} fails")
        return new(self, job, how, form, most)

    monkeypatch.setattr(Batched, "_new_stack", stack)
    return tried


@pytest.mark.parametrize(
    "asked, fails, ran, tried",
    [
        ("graphs:fastest", ["graphs unfold"], "graphs", 3),
        ("graphs:fastest", ["graphs"], "batched", 5),
        ("graphs:fastest", ["graphs", "batched unfold"], "batched", 5),
        ("graphs:fastest", ["graphs", "batched"], "threads", 6),
        ("graphs", ["graphs"], "batched", 2),
        ("graphs:unfold", ["graphs unfold"], "graphs", 2),
        ("graphs:unfold", ["graphs"], "batched", 3),
        ("graphs", ["graphs", "batched"], "threads", 2),
    ],
)
def test_it_falls_as_far_as_it_must_and_says_so_once(asked, fails, ran, tried, monkeypatch):
    made = failing(monkeypatch, *fails)
    e = engine(asked, SHORT)
    with pytest.warns(UserWarning, match="fails") as said:
        got = train(e)
    assert len(said) == 1
    assert {x.partition(":")[0] for x in e.ran} == {ran} and len(made) == tried, made
    if "fastest" not in asked or ran != "batched":
        assert e.ran == {ran}, "in the form that was asked for"
    assert_close(train(engine("threads", SHORT)), got)


def test_a_form_that_was_fallen_to_is_kept_for_a_resumed_run(monkeypatch):
    failing(monkeypatch, f"graphs {UNFOLD}")
    e = engine("graphs:fastest", SHORT)
    with pytest.warns(UserWarning, match="it runs graphs"):
        train(e)
    assert set(e.batched.faster.values()) == {GROUPED}


def test_a_result_says_what_ran_and_what_was_asked(store, monkeypatch):
    tiny = Experiment(clients=3, rounds=2, model="mlp", batch=6, max_samples=14)
    failing(monkeypatch, "graphs")
    with pytest.warns(UserWarning, match="it runs batched"):
        got = run(tiny, executor="graphs", store=store)
    assert got.meta["executor"] == "batched" and got.meta["executor_asked"] == "graphs"
    assert "batched in place of graphs" in repr(got)
    assert "in place of" in got._repr_html_()
    plain = run(tiny.but(seed=1), store=store)
    assert plain.meta["executor"] == "threads" and "in place of" not in repr(plain)


# -- every method ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_every_method_is_captured_on_the_pretend_accelerator(name):
    with accelerated(), taped(DEVICE.type) as log:
        small = SMALL.but(method=name, rounds=2)
        ended = trained(small, executor="graphs")
        assert {what for what, _ in log} == {"capture", "replay"}
    assert ended.history.executor == "graphs" and not graphs.FAILED
