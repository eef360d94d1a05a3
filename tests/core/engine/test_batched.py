"""The batched executor: stack sizes, captured steps (through a stand-in for CUDA graphs), chunks that fit, counts of what is launched."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.tape import Counter, taped
from pfl_core import models
from pfl_core.engine import batched, graphs
from pfl_core.engine.batched import KEPT, Batched
from pfl_core.engine.engine import Engine
from pfl_core.engine.sgd import precision
from pfl_core.engine.simulate import Interrupted, simulate
from pfl_core.engine.stack import WARM, sizes
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.run import run
from pfl_core.methods.base import make_method
from pfl_core.methods.fedavg import FedAvg
from pfl_core.methods.task import Task
from pfl_core.stacked import expand
from tests.core.engine.setting import (
    CONFIG,
    LONG,
    Small,
    assert_close,
    client_data,
    clients_of,
    counted,
    engine,
    train,
)


@pytest.fixture(autouse=True)
def tape():
    with taped() as log:
        yield log


def network(dtype=torch.float64, **kw):
    return models.build("lenet", (1, 16, 16), 3, kernels=2, seed=0, **kw).to(dtype)


# -- sizes, capture, replay ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 3, 20, 500])
def test_sizes_are_few_and_near(most):
    got = sizes(most)
    assert got[0] == most and got[-1] == 1 and got == sorted(set(got), reverse=True)
    assert len(got) <= 2 + 3 * np.log2(most)
    assert all(a - 1 <= b / 0.7 for a, b in zip(got, got[1:], strict=False))  # rows in vain


CASES = {
    "plain": {},
    "momentum": dict(momentum=0.9),
    "decay and clip": dict(weight_decay=0.1, momentum=0.5, clip=0.05),
    "steps": dict(steps=7, plan="fresh"),
}


@pytest.mark.parametrize("case", CASES)
def test_replayed_steps_equal_the_others(case, tape):
    ends = {x: train(engine(x, **CASES[case]), rounds=3) for x in ("threads", "batched", "graphs")}
    assert [what for what, _ in tape].count("replay") > 5
    assert_close(ends["batched"], ends["graphs"])
    assert_close(ends["threads"], ends["graphs"])


def test_captures_and_replays_are_counted(tape):
    e = engine("graphs")
    lengths = sorted((-(-n // 4) for n in LONG), reverse=True)
    active = [sum(n > t for n in lengths) for t in range(lengths[0])]
    size = [min(s for s in sizes(len(LONG)) if s >= a) for a in active]
    stack = {}
    for s in size:
        stack[s] = stack.get(s, 0) + 1
    train(e)
    want = [s for s, n in stack.items() if n > WARM]
    assert [w for w, _ in tape].count("capture") == len(want)
    assert [w for w, _ in tape].count("replay") == sum(stack[s] - WARM for s in want)
    order = [
        graph for what, graph in tape if what == "replay"
    ]  # each size's own, one size after the other
    assert (
        len(dict.fromkeys(order)) == sum(a != b for a, b in zip(order, order[1:], strict=False)) + 1
    )
    del tape[:]
    train(e)  # a later round replays all it can: what lacked steps to be captured is captured now
    assert [w for w, _ in tape].count("capture") <= len(stack) - len(want)
    before = [w for w, _ in tape].count("replay")
    train(e)
    assert [w for w, _ in tape].count("replay") - before == sum(stack.values())
    assert e.ran == {"graphs"} and len(e.batched.stacks) == 1


def test_memory_stays_in_place():
    e = engine("graphs", momentum=0.9)
    train(e)
    (stack,) = e.batched.stacks.values()
    held = {n: v.data_ptr() for n, v in (stack.live | stack.fixed | stack.anchor).items()}
    train(
        e, start={n: v + 0 for n, v in expand(e.task.initial, 8).items()}
    )  # other memory, and rows of their own
    assert len(e.batched.stacks) == 2
    train(e, rounds=2)
    stack = next(s for s in e.batched.stacks.values() if s is stack)
    assert held == {n: v.data_ptr() for n, v in (stack.live | stack.fixed | stack.anchor).items()}


def test_other_clients_through_the_same_graphs(tape):
    a, b = engine("graphs"), engine("threads")
    for sel in ([0, 1, 2], [5, 6, 7], [4, 3, 1]):
        assert_close(train(b, sel=sel), train(a, sel=sel))
    assert len(a.batched.stacks) == 1 and "replay" in [w for w, _ in tape]


def test_few_stacks_are_kept():
    e = engine("graphs", counts=(8, 8))
    for i in range(2 * KEPT):
        train(e, loss=lambda p, anchor, batch, i=i: e.method.loss(p, anchor, batch) * i)
    assert len(e.batched.stacks) == KEPT


@pytest.mark.parametrize(
    "name, args",
    [
        ("flayer", {}),
        ("fedprox", {"mu": 0.1}),
        ("perfedavg", {}),
        ("pfedme", {}),
        ("apple", {}),
        ("fedcp", {}),
        ("fedrep", {}),
    ],
)
def test_methods_replay(name, args, tape):
    ends = []
    for executor in ("threads", "graphs", "graphs:unfold"):
        data = client_data((30, 21, 9))
        x = torch.nn.functional.interpolate(data.x.double(), scale_factor=2).to(torch.uint8)
        data = clients_of(x[:, 0].numpy(), data.federation.y, data.index["train"])
        config = replace(CONFIG, rounds=3, eval_every=3, eval_after=False)
        task = Task(network(bn=name != "fedcp"), data.n, data.label_counts, config)
        state, history, *_ = simulate(
            make_method(name, **args).bind(task), data, executor=executor, workers=1
        )
        assert history.executor == executor
        ends.append(
            state.server
            | state.clients
            | {n: v for n, v in state.extra.items() if torch.is_tensor(v)}
        )
    assert [w for w, _ in tape].count("replay") >= 3
    for n, v in ends[0].items():
        for e in ends[1:]:
            torch.testing.assert_close(
                v, e[n], rtol=1e-8, atol=1e-9, msg=lambda m, n=n: f"{n}: {m}"
            )


# -- steps of a method's own ---------------------------------------------------------------------------------------------


def slower(p, anchor, grad, s):
    """SGD whose rate falls with the step, and whose first gradient is remembered."""
    g = grad(p)
    first = s.memory or g
    q = p | {n: p[n] - s.lr / (1 + s.t) * (g[n] + 0.1 * first[n]) for n in g}
    return q | {"seen": p.get("seen", p["fc.bias"].sum() * 0) + 1}, first


def test_a_step_sees_its_number_and_its_memory(tape):
    a, b = (train(engine(x), step=slower) for x in ("threads", "graphs"))
    assert "replay" in [w for w, _ in tape]
    assert_close(a, b)
    assert b["seen"].tolist() == [15, 11, 10, 6, 2, 1, 13, 8]


def test_what_a_step_brings_forth_begins_anew_each_round():
    e = engine("graphs")
    for r in range(3):
        end = train(e, step=slower, start=expand(e.task.initial, 8))
        assert end["seen"].tolist() == [15, 11, 10, 6, 2, 1, 13, 8], r


def asks(p, anchor, grad, s):
    """Needs the host when its step number is odd: it cannot be captured, and would be wrong if it were."""
    g = grad(p)
    return p | {n: p[n] - (0.2 if s.t % 2 else 0.1) * g[n] for n in g}, {}


def test_what_cannot_be_captured_runs_batched():
    e = engine("graphs")
    with pytest.warns(UserWarning, match="cannot be captured .* it runs batched"):
        got = train(e, step=asks)
    assert e.ran == {"batched"}
    assert_close(train(engine("threads"), step=asks), got)
    train(e, step=asks)  # and is not tried again


def forgets(p, anchor, grad, s):
    g = grad(p)
    return p | {n: p[n] - 0.1 * g[n] for n in g}, ({} if s.memory else {"g": g["fc.bias"]})


def test_memory_that_comes_and_goes_runs_batched():
    e = engine("graphs")
    with pytest.warns(UserWarning, match="its memory is not the same .* it runs batched"):
        train(e, step=forgets)
    assert e.ran == {"batched"} and not graphs.FAILED, "nothing was captured in vain"
    assert_close(train(engine("threads"), step=forgets), train(e, step=forgets))


def branches(p, anchor, batch):
    out = F.cross_entropy(p["fc.weight"].new_ones(4, 3) @ p["fc.weight"][:, :3], batch.y)
    return out * 2 if out > 1 else out


def test_what_cannot_be_stacked_runs_one_by_one():
    e = engine("graphs")
    with pytest.warns(UserWarning, match="cannot be stacked .* they run one by one"):
        got = train(e, loss=branches)
    assert e.ran == {"threads"}
    assert_close(train(engine("threads"), loss=branches), got)
    train(e, loss=branches)  # told once
    with pytest.raises(RuntimeError):
        train(engine("batched"), loss=branches)


def test_graphs_need_a_gpu(monkeypatch):
    monkeypatch.delitem(graphs.GRAPHS, "cpu")
    with pytest.raises(ValueError, match="needs a GPU"):
        engine("graphs")


# -- memory --------------------------------------------------------------------------------------------------------------


def room(e, clients):
    """Free memory (bytes) in which that many clients fit."""
    job = []
    e.batched.run = lambda j, *_: job.append(j) or {}
    train(e)
    del e.batched.run
    likely = e.batched.estimate(job[0])[1]
    return int(clients * likely / 0.9) + 1


@pytest.mark.parametrize("executor", ["batched", "graphs"])
@pytest.mark.parametrize("clients", [1, 3, 5, 100])
def test_chunks_that_fit(executor, clients, capsys):
    e = engine(executor)
    free = room(e, clients)
    e.batched.free = lambda: free
    once, again = train(e), train(e)
    assert_close(train(engine("threads")), once)
    assert_close(once, again)
    chunks = -(-8 // min(clients, 8))
    assert {s.most for s in e.batched.stacks.values()} == {-(-8 // chunks)}


def test_the_estimate_is_said_and_grows_with_batch_and_model(capsys):
    batched._say.cache_clear()
    e = engine("batched")
    e.batched.free = lambda: int(1e9)
    train(e)
    assert "fedavg: 8 clients, 8 at once, about" in capsys.readouterr().out
    small, large, deep = (room(engine("batched", **c), 1) for c in ({}, {"batch": 8}, {"depth": 4}))
    assert large > 1.3 * small and deep > 1.3 * small


def test_not_even_one_client():
    e = engine("batched")
    e.batched.free = lambda: 1000
    with pytest.raises(MemoryError, match="needs at least .* GB .* are free; take smaller batches"):
        train(e)


def test_running_out_of_memory_halves_the_chunk(monkeypatch):
    e, most = engine("graphs"), 3
    whole, run = [], batched.Stack.run
    monkeypatch.setattr(
        batched.Stack,
        "run",
        lambda self, job, ids, out: (whole.append(len(ids)), full(self, job, ids, out)),
    )

    def full(self, job, ids, out):
        if len(ids) > most:
            raise torch.OutOfMemoryError("no")
        run(self, job, ids, out)

    assert_close(train(engine("threads")), train(e))
    assert whole == [8, 4, 2, 2, 2, 2]
    train(e)
    assert whole[6:] == [2, 2, 2, 2]  # remembered
    most = 0
    with pytest.raises(MemoryError, match="one client's training step ran out of memory"):
        train(e)


def test_memory_in_the_pool_of_living_graphs_is_not_free():
    def segment(pool, total, used, device=0):
        sizes = dict(total_size=total, allocated_size=used)
        return dict(segment_pool_id=pool, device=device, **sizes)

    some = [segment((0, 0), 100, 30), segment((0, 7), 1000, 10), segment((0, 0), 50, 50)]
    assert batched.idle([*some, segment((0, 0), 9, 0, device=1)], 0) == 70


def test_processes_plan_with_their_share_of_a_gpu(monkeypatch):
    gpu = dict(mem_get_info=(80, 100), memory_reserved=15, current_device=0)
    for name, value in gpu.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    segment = dict(segment_pool_id=(0, 0), device=0, total_size=15, allocated_size=10)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [segment])
    for share, free in ((None, 80 + 5), ("1", 80 + 5), ("0.25", 10 + 5), ("0.1", 5)):
        if share:
            monkeypatch.setenv("PFL_GPU_SHARE", share)
        assert engine("batched").batched._free() == free


@pytest.mark.parametrize("said", ["0", "2", "-1", "half", "nan", "inf"])
def test_a_share_that_is_none_is_refused_before_training(said, monkeypatch):
    monkeypatch.setenv("PFL_GPU_SHARE", said)
    for executor in ("threads", "batched"):
        with pytest.raises(ValueError, match="PFL_GPU_SHARE=.*above 0 and at most 1"):
            engine(executor)


@pytest.mark.parametrize("what", ["evaluate", "measure"])
def test_an_evaluation_that_runs_out_of_memory_takes_fewer_samples(what, monkeypatch):
    e = engine("batched", counts=(200, 150))
    train(e)
    e.data.index["test"] = e.data.index["train"]
    p, seen, most = expand(e.task.initial, 2), [], 20

    def found():
        if what == "evaluate":
            return e.evaluate(p, "test")["loss"]
        return e.measure(lambda p, batch: e.method.logits(p, batch.x).sum(), p, "test", [0, 1])

    want, batch = found(), e.data.batch
    assert e.batched.stacks

    def full(index):
        seen.append(len(index))
        if len(index) > most:
            raise torch.OutOfMemoryError("no")
        return batch(index)

    monkeypatch.setattr(e.data, "batch", full)
    np.testing.assert_allclose(found(), want, rtol=1e-12)
    assert not e.batched.stacks, "what training held is free first"
    assert max(seen) == 128 and 16 in seen and e.batched.chunks["evaluation 128"] == 16
    del seen[:]
    found()
    assert max(seen) == 16, "remembered"
    most = 0
    with pytest.raises(MemoryError, match="evaluating one sample ran out of memory; take smaller"):
        found()


def test_a_resumed_run_takes_the_chunks_of_its_checkpoint(store, tmp_path, monkeypatch):
    tiny = Experiment(clients=6, rounds=3, model="mlp", batch=6, max_samples=14)
    how = dict(executor="batched", store=store)
    sizes, free = [], {"clients": 3}
    monkeypatch.setattr(Batched, "_fitting", lambda self, job, form: free["clients"])
    attempt = Batched._attempt
    monkeypatch.setattr(
        Batched, "_attempt", lambda self, *a: sizes.append(a[-1]) or attempt(self, *a)
    )
    with pytest.raises(Interrupted):
        run(tiny, on_round=lambda r, h: r == 0, **how)
    free["clients"] = 6  # memory that another process has given back
    got = run(tiny, **how)
    assert set(sizes) == {3}
    free["clients"] = 3
    whole = run(tiny, executor="batched", store=tmp_path / "whole")
    losses = "before/test/loss"
    assert np.array_equal(whole.arrays[losses], got.arrays[losses])


# -- counts: a regression shows as another number ------------------------------------------------------------------------


def a_step(e, **how):
    """The same of one step, by difference."""
    counted(e, 1, **how)  # what is made once
    few, many = counted(e, 5, **how), counted(e, 9, **how)
    return (many - few) / 4


def test_a_batched_step_launches_the_same_for_any_number_of_clients():
    one, all8 = a_step(engine("batched"), sel=(0, 1)), a_step(engine("batched"), sel=range(8))
    assert (one == all8).all()


def test_counts_of_a_step():
    plain = a_step(engine("batched"))
    assert (plain <= [68, 62]).all(), plain
    for field in (
        "momentum",
        "weight_decay",
    ):  # a constant number of launches, whatever the number of tensors
        more = [
            a_step(engine("batched", depth=d, **{field: 0.5})) - a_step(engine("batched", depth=d))
            for d in (1, 5)
        ]
        assert more[0][0] == more[1][0] <= 3, field


def test_counts_of_a_step_of_one_client():
    plain = a_step(engine("threads"), sel=(0,))
    assert (plain <= [19, 23]).all(), plain  # 2 of them flatten what is in channels-last order
    more = [a_step(engine("threads", depth=d, momentum=0.5), sel=(0,)) for d in (1, 5)]
    plain = [a_step(engine("threads", depth=d), sel=(0,)) for d in (1, 5)]
    assert more[0][0] - plain[0][0] == more[1][0] - plain[1][0] <= 3


def test_a_replayed_step_launches_one_copy_and_the_graph(tape):
    e = engine("graphs")
    for _ in range(2):
        counted(e, 9)  # all sizes captured
    for stack in e.batched.stacks.values():
        stack.graphs = dict.fromkeys(stack.graphs, lambda: None)
    assert a_step(e).tolist() == [1, 0]  # the indices of the step's samples
    assert len({graph for _, graph in tape}) == 1 == [w for w, _ in tape].count("capture")


def test_evaluation_takes_large_batches():
    e = engine("threads", counts=(600, 700))
    e.data.index["test"] = e.data.index["train"]
    e.threads.map = lambda fn, items: [fn(i) for i in items]
    common = expand(e.task.initial, 2)
    counts = []
    for p in (common, common, {n: v.clone() for n, v in common.items()}):
        with Counter() as c:
            e.evaluate(p, "test")
        counts.append(c.ops)
    # 11 batches of at most 128, whether 1300 samples of one model or 600 and 700 of two; the first time modules are made. A network
    # that is not ours keeps the usual order of memory. Seeing NaN is 2 of a batch's 17. Results are joined and made float64 once.
    assert 11 * 12 <= counts[1] == counts[2] <= 11 * 17 + 2, counts


# -- precision -----------------------------------------------------------------------------------------------------------


def test_precision_is_off_by_default_and_leaves_ids():
    e = Experiment()
    assert e.precision == "full" and e.but(precision="full").id_for("x") == e.id_for("x") != e.but(
        precision="bf16"
    ).id_for("x")
    with pytest.raises(ValueError, match="precision='half'"):
        Experiment(precision="half")
    with pytest.raises(ValueError, match="float32 only"):
        Experiment(precision="bf16", dtype="float64")


def test_tf32_is_set_and_set_back():
    flags = lambda: (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)  # noqa: E731
    before = flags()
    with precision("full"):
        assert flags() == (False, False)
    with precision("tf32"):
        assert flags() == (True, True)
    assert flags() == before


@pytest.mark.parametrize("executor", ["threads", "batched", "graphs"])
def test_bf16_trains_coarsely_with_parameters_in_full(executor):
    ends = []
    for kind in ("full", "bf16"):
        data = client_data((40, 24), dtype=torch.float32)
        torch.manual_seed(0)
        net = Small() if executor == "threads" else torch.nn.Sequential(torch.nn.Flatten())
        if executor != "threads":  # a CPU has no stacked BatchNorm of two number formats
            net.add_module("fc", torch.nn.Linear(64, 3))
        task = Task(net, data.n, data.label_counts, replace(CONFIG, precision=kind))
        e = Engine(FedAvg().bind(task), data, executor, 1)
        ends.append(train(e))
    a, b = (e["fc.weight"] for e in ends)
    assert b.dtype == torch.float32 and not torch.equal(a, b)
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)


def test_a_batched_of_its_own_needs_no_engine():
    e = engine("threads")
    job = []
    e.threads.run = lambda j: job.append(j) or {}
    train(e)
    del e.threads.run
    got = Batched(e.method, e.data).run(job[0])
    assert_close({n: v for n, v in train(e).items() if n in got}, got)


@pytest.mark.parametrize("executor", ["threads", "batched"])
def test_what_a_run_made_goes_without_a_search_for_it(executor, monkeypatch, tmp_path):
    # A search through a large program takes as long as hundreds of small steps.
    made, searched, stack = [], [], batched.Batched._new_stack

    def remembered(self, *how):
        out = stack(self, *how)
        made.append(weakref.ref(out))
        return out

    monkeypatch.setattr(batched.Batched, "_new_stack", remembered)
    monkeypatch.setattr(gc, "collect", lambda: searched.append(1))
    gc.disable()
    try:
        small = Experiment(model="mlp", model_args={"hidden": 8}, clients=4, rounds=2, batch=8)
        run(small.but(max_samples=24), store=tmp_path, executor=executor)
        assert not searched and (executor == "threads" or made)
        assert [ref() for ref in made] == [None] * len(made)
    finally:
        gc.enable()
