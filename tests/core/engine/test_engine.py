"""The engine: two executors with one contract, equal to the textbook loop, independent of threads and client order."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pfl_core import Experiment, models
from pfl_core.data.client_data import ClientData
from pfl_core.data.federation import Federation
from pfl_core.engine import checkpoint, process
from pfl_core.engine import engine as engines
from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.engine.sgd import clip_
from pfl_core.experiments.build import train_config
from pfl_core.methods.base import State
from pfl_core.methods.fedavg import FedAvg
from pfl_core.methods.task import Task
from pfl_core.stacked import expand

CONFIG = train_config(Experiment(batch=4, epochs=2, lr=0.1))


def client_data(sizes=(9, 5, 12, 1), shape=(1, 8, 8), classes=3, seed=0):
    g = np.random.default_rng(seed)
    n = sum(sizes)
    x, y = g.standard_normal((n, *shape)), g.integers(0, classes, n)
    cuts = np.split(np.arange(n), np.cumsum(sizes)[:-1])
    return ClientData(
        Federation(x, y, cuts, classes=classes), seed=seed, holdout=0, dtype=torch.float64
    )


def tiny(bn=False, classes=3, seed=0):
    torch.manual_seed(seed)
    net = torch.nn.Sequential()
    net.add_module("conv", torch.nn.Conv2d(1, 4, 3))
    if bn:
        net.add_module("norm", torch.nn.BatchNorm2d(4))
    net.add_module("relu", torch.nn.ReLU())
    net.add_module("flat", torch.nn.Flatten())
    net.add_module("fc", torch.nn.Linear(144, classes))
    return net.double()


def engine(executor, data=None, bn=False, workers=2, method=None, **changes):
    data = data or client_data()
    task = Task(tiny(bn), data.n, data.label_counts, replace(CONFIG, **changes))
    return Engine((method or FedAvg()).bind(task), data, executor, workers)


def train(executor, bn=False, sel=(0, 1, 2, 3), how=None, start=None, **changes):
    e = engine(executor, bn=bn, **changes)
    sel = torch.tensor(sel)
    c = Context(e, State({}, {}), sel, 3)
    return c.train(e.method.loss, start or expand(e.task.initial, len(sel)), **(how or {}))


CASES = {
    "plain": {},
    "momentum": dict(momentum=0.9),
    "decay": dict(weight_decay=0.1, momentum=0.5),
    "clip": dict(clip=0.05),
    "drop": dict(plan="drop"),
    "fresh": dict(plan="fresh", steps=5),
    "in order": dict(shuffle=False),
    "steps": dict(steps=7),
}


@pytest.mark.parametrize("bn", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_executors_agree(case, bn):
    a, b = (train(x, bn=bn, **CASES[case]) for x in ("threads", "batched"))
    assert a.keys() == b.keys()
    for n in a:
        torch.testing.assert_close(a[n], b[n], rtol=1e-10, atol=1e-12)
    moved = [n for n in a if n.endswith("weight")]
    assert all((a[n][0] != a[n][2]).any() for n in moved)


@pytest.mark.parametrize("executor", ["threads", "batched"])
def test_equals_the_textbook_loop(executor):
    got = train(executor, bn=True, momentum=0.9, weight_decay=0.01, clip=0.5)
    data = client_data()
    for k in range(4):
        net = tiny(bn=True).train()
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        for (idx,) in data.batch_indices(k, 3, batch=4, epochs=2):
            x, y = data.batch(torch.as_tensor(idx))
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()
        for n, v in net.state_dict().items():
            torch.testing.assert_close(got[n][k], v, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("executor", ["threads", "batched"])
@pytest.mark.parametrize("batch", [1, 3, 20])
@pytest.mark.parametrize("case", [{}, dict(plan="drop"), dict(plan="fresh"), dict(steps=3)])
def test_a_batch_size_of_its_own_is_as_the_experiments(executor, batch, case):
    own, whole = (
        train(executor, how=dict(batch=batch), **case),
        train(executor, batch=batch, **case),
    )
    other = train(executor, **case)
    for n in own:
        assert torch.equal(own[n], whole[n]), n
        assert not torch.equal(own[n], other[n]), n


@pytest.mark.parametrize("executor", ["threads", "batched"])
def test_trainings_of_two_batch_sizes_in_turn(executor):
    e = engine(executor)
    c, p = Context(e, State({}, {}), torch.arange(4), 3), expand(e.task.initial, 4)
    for batch in (2, None, 2):
        p = c.train(e.method.loss, p, batch=batch)
        torch.testing.assert_close(
            c.train(e.method.loss, p, batch=4), c.train(e.method.loss, p), rtol=0, atol=0
        )
    alone = expand(e.task.initial, 4)
    for batch in (2, 4, 2):
        alone = train(executor, start=alone, batch=batch)
    for n in p:
        assert torch.equal(p[n], alone[n]), n


def test_independent_of_workers_and_company():
    one, four = (train("threads", bn=True, workers=w, momentum=0.5) for w in (1, 4))
    some = train("threads", bn=True, sel=(1, 3), momentum=0.5)
    for n in one:
        assert torch.equal(one[n], four[n])
        assert torch.equal(one[n][[1, 3]], some[n])


@pytest.mark.parametrize("executor", ["threads", "batched"])
def test_frozen_stays_bit_for_bit(executor):
    e = engine(executor, bn=True)
    start = expand(e.task.initial, 4)
    end = train(
        executor, bn=True, how=dict(only=["fc.weight"], bn="eval"), weight_decay=0.5, momentum=0.9
    )
    for n in end:
        assert torch.equal(end[n], start[n]) == (n != "fc.weight"), n


@pytest.mark.parametrize("executor", ["threads", "batched"])
def test_rates_by_name_and_start_untouched(executor):
    e = engine(executor)
    start = {n: v.clone() for n, v in expand(e.task.initial, 4).items()}
    kept = {n: v.clone() for n, v in start.items()}
    rates = {n: 0.1 if n.startswith("fc") else 0.0 for n in start}
    end = train(executor, start=start, how=dict(lr=rates))
    assert all(torch.equal(start[n], kept[n]) for n in start)
    assert torch.equal(end["conv.weight"], start["conv.weight"]) and not torch.equal(
        end["fc.weight"], start["fc.weight"]
    )


def sgd_by_hand(p, anchor, grad, s):
    g = grad(p)
    return p | {n: p[n] - s.lr * g[n] for n in g}, {"t": g["fc.bias"] * 0 + s.t}


@pytest.mark.parametrize("executor", ["threads", "batched"])
def test_custom_step_equals_sgd(executor):
    a, b = train(executor, bn=True), train(executor, bn=True, how=dict(step=sgd_by_hand))
    for n in a:
        torch.testing.assert_close(a[n], b[n], rtol=1e-10, atol=1e-12)


def two_batches(p, anchor, grad, s):
    inner = p | {n: p[n] - 0.05 * g for n, g in grad(p, 0).items()}
    counted = p.get("count", p["fc.bias"].sum() * 0) + 1
    return p | {n: p[n] - s.lr * g for n, g in grad(inner, 1).items()} | {"count": counted}, {}


def test_custom_step_with_batches_state_and_anchor_agrees():
    def loss(p, anchor, batch):
        pull = sum((p[n] - anchor[n]).square().sum() for n in ("fc.weight",))
        return F.cross_entropy(e.task.apply(p, batch.x), batch.y) + pull

    ends = []
    for executor in ("threads", "batched"):
        e = engine(executor, bn=True)
        start = expand(e.task.initial, 4)
        c = Context(e, State({}, {}), torch.arange(4), 0)
        ends.append(
            c.train(
                loss,
                start | {"count": torch.zeros(4).double()},
                anchor=start,
                step=two_batches,
                batches=2,
                epochs=1,
            )
        )
    for n in ends[0]:
        torch.testing.assert_close(ends[0][n], ends[1][n], rtol=1e-10, atol=1e-12)
    assert ends[0]["count"].tolist() == [
        1,
        1,
        1,
        1,
    ]  # 3, 2, 3 and 1 batches an epoch make 1, 1, 1, 1 steps of two
    assert ends[0]["norm.num_batches_tracked"].tolist() == [
        1,
        1,
        1,
        1,
    ]  # statistics advance on the first batch of a step only


@pytest.mark.parametrize("executor", ["threads", "batched"])
@pytest.mark.parametrize("order", [(0, 0), (0, 1), (1, 0)])
def test_gradients_of_a_step_share_statistics(executor, order):
    # They advance at each gradient on a step's first batch, at whatever model, in their order.
    def twice(p, anchor, grad, at):
        for j, scale in zip(order, (1.0, 3.0), strict=True):
            grad({n: v * scale for n, v in p.items()}, j)
        return p, {}

    e = engine(executor, bn=True)
    start = expand(e.task.initial, 4)
    how = dict(step=twice, batches=2, epochs=1)
    end = Context(e, State({}, {}), torch.arange(4), 0).train(e.method.loss, start, **how)
    for k in range(4):
        norm = tiny(bn=True).norm.train()
        for rows in e.data.batch_indices(k, 0, batch=4, batches=2):
            for j, scale in zip(order, (1.0, 3.0), strict=True):
                x, _ = e.data.batch(torch.as_tensor(rows[0]))
                if j == 0:
                    p = {n: scale * e.task.initial[f"conv.{n}"] for n in ("weight", "bias")}
                    norm(F.conv2d(x, **p))
        for n, v in norm.state_dict().items():
            torch.testing.assert_close(end[f"norm.{n}"][k], v, rtol=1e-10, atol=1e-12)


class Noisy(FedAvg):
    name = "noisy_for_test"
    noise = (144,)

    def loss(self, p, anchor, batch):
        return F.cross_entropy(
            F.linear(batch.x.flatten(1)[:, :1] * 0 + batch.noise, p["fc.weight"], p["fc.bias"]),
            batch.y,
        )


def test_noise_is_the_same_in_both_executors():
    ends = []
    for executor in ("threads", "batched"):
        e = engine(executor, method=Noisy())
        ends.append(
            Context(e, State({}, {}), torch.arange(4), 0).train(
                e.method.loss, expand(e.task.initial, 4)
            )
        )
    torch.testing.assert_close(ends[0]["fc.weight"], ends[1]["fc.weight"], rtol=1e-10, atol=1e-12)


def test_persistent_momentum_rides_in_the_parameters():
    whole = train(
        "threads", momentum=0.9, plan="fresh", steps=1, how=dict(only=["fc.weight"], steps=1)
    )
    e = engine("threads", momentum=0.9, plan="fresh")
    start = expand(e.task.initial, 4) | {"opt.fc.weight": torch.ones(4, 3, 144).double()}
    for executor in ("threads", "batched"):
        end = train(
            executor, momentum=0.9, plan="fresh", start=start, how=dict(only=["fc.weight"], steps=1)
        )
        torch.testing.assert_close(
            end["fc.weight"], whole["fc.weight"] - 0.1 * 0.9, rtol=1e-10, atol=1e-12
        )
        assert (end["opt.fc.weight"] != 1).any() and (start["opt.fc.weight"] == 1).all()


@pytest.mark.parametrize("stacked", [False, True])
def test_clipping_is_by_client(stacked):
    g = [torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.tensor([[0.0], [0.0]])]
    clip_(g, 1.0, stacked)
    want = (
        [[0.6, 0.8], [0.3, 0.4]]
        if stacked
        else [[3 / 25.25**0.5, 4 / 25.25**0.5], [0.3 / 25.25**0.5, 0.4 / 25.25**0.5]]
    )
    torch.testing.assert_close(g[0], torch.tensor(want), rtol=1e-5, atol=1e-6)


def test_evaluate_counts_every_sample():
    data = client_data(sizes=(600, 3, 700))
    data.index["test"] = data.index["train"]
    e = engine("threads", data=data)
    common = expand(e.task.initial, 3)
    apart = {n: v.clone() for n, v in common.items()}
    a, b = e.evaluate(common, "test"), e.evaluate(apart, "test")
    scores = tiny().eval()(data.x)
    right = (scores.argmax(1) == data.y).double().split([600, 3, 700])
    for got in (a, b):
        np.testing.assert_array_equal(got["correct"], [float(r.sum()) for r in right])
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-9)
    assert e.evaluate(common, "val")["n"].tolist() == [0, 0, 0]


def test_measure_sums_over_a_split():
    e = engine("threads")
    c = Context(e, State({}, {}), torch.tensor([0, 3]), 0)
    got = c.measure(
        lambda p, b: {"n": torch.tensor(len(b.y)), "x": b.x.sum()}, expand(e.task.initial, 2)
    )
    assert got["n"].tolist() == [9, 1]
    torch.testing.assert_close(got["x"][1], e.data.x[-1].sum())


@pytest.mark.parametrize("executor", ["threads", "batched"])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("at_once", [1, 4, 128])
def test_folds_are_dealt_out_class_by_class(executor, n, at_once, monkeypatch):
    monkeypatch.setitem(engines.EVAL_BATCH, "cpu", at_once)  # it does not matter
    e = engine(executor)
    c, p = Context(e, State({}, {}), torch.arange(4), 0), expand(e.task.initial, 4)

    def sums(p, batch):
        assert len(batch.y)  # a network need not take an empty batch
        return {"n": (batch.y[:, None] == torch.arange(3)).sum(0), "x": batch.x.sum()}

    parts, whole = [c.measure(sums, p, fold=(i, n)) for i in range(n)], c.measure(sums, p)
    torch.testing.assert_close(sum(part["x"] for part in parts), whole["x"])
    assert torch.equal(whole["n"], e.data.label_counts)
    for i, part in enumerate(parts):
        assert torch.equal(part["n"], (e.data.label_counts + n - 1 - i) // n)
    assert torch.equal(parts[-1]["x"][3] == 0, torch.tensor(n > 1)), "of one sample"


def test_folds_are_in_turn():
    y = np.array([0, 1, 0, 0, 2, 1, 1, 0])
    federation = Federation(np.zeros((8, 1)), y, [np.arange(8)], classes=3)
    data = ClientData(federation, seed=0, holdout=0, dtype=torch.float64)
    assert data.fold(0, "train", 1, 2).tolist() == [2, 5, 7]
    assert data.fold(0, "train", 2, 3).tolist() == [3, 6]
    assert data.fold(0, "train", 0, 1).tolist() == list(range(8))


def test_a_split_without_samples_has_sums_of_0():
    e = engine("threads")  # nothing is held out
    c, p = Context(e, State({}, {}), torch.arange(4), 0), expand(e.task.initial, 4)
    got = c.measure(
        lambda p, b: e.method.logits(p, b.x.view(len(b.x), 1, 8, -1)).sum(0), p, "holdout"
    )
    assert torch.equal(got, torch.zeros(4, 3).double())


def test_refusals():
    e = engine("threads")
    c = Context(e, State({}, {}), torch.arange(4), 0)
    start = expand(e.task.initial, 4)
    with pytest.raises(ValueError, match="leaks_test"):
        c.train(e.method.loss, start, split="test")
    with pytest.raises(ValueError, match="split 'tset' is unknown"):
        c.measure(lambda p, b: b.y.sum(), start, split="tset")
    with pytest.raises(ValueError, match="cannot train"):
        c.train(e.method.loss, start, only=["nothing"])
    for batch in (0, -1, 2.5):
        with pytest.raises(ValueError, match=rf"batch={batch}\): allowed is an integer >= 1"):
            c.train(e.method.loss, start, batch=batch)
    for fold in ((2, 2), (-1, 2), (0, 0), (0, 2.5), (1,), 2):
        with pytest.raises(ValueError, match=r"fold=.*: allowed is \(i, n\), the i-th of n"):
            c.measure(lambda p, b: b.y.sum(), start, fold=fold)
    with pytest.raises(ValueError, match="executor 'gpu' is unknown"):
        engine("gpu")


def test_resnet_trains_batched_with_batchnorm():
    g = np.random.default_rng(0)
    x, y = g.integers(0, 255, (12, 16, 16, 3)).astype(np.uint8), np.arange(12) % 2
    fed = Federation(x, y, [np.arange(6), np.arange(6, 12)])
    data = ClientData(fed, seed=0, holdout=0, dtype=torch.float64)
    ends = []
    for executor in ("threads", "batched"):
        net = models.build("resnet18", (3, 16, 16), 2, stem="cifar", width=0.0625).double()
        task = Task(net, data.n, data.label_counts, replace(CONFIG, epochs=1))
        e = Engine(FedAvg().bind(task), data, executor)
        ends.append(
            Context(e, State({}, {}), torch.arange(2), 0).train(
                e.method.loss, expand(e.task.initial, 2)
            )
        )
    for n in ends[0]:
        torch.testing.assert_close(ends[0][n], ends[1][n], rtol=1e-9, atol=1e-11)


# -- the process, and files of older runs ------------------------------------------------------------


def test_the_last_run_sets_the_number_of_threads_back():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with process.one_thread():
            with process.one_thread():
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_memory_is_kept_while_an_engine_is_open(monkeypatch):
    said = []
    monkeypatch.setattr(process, "_kept_memory", process.Shared())
    monkeypatch.setattr(process, "_call_libc", lambda *call: said.append(call))
    with process.kept_memory():
        with process.kept_memory():
            assert said == [("mallopt", -4, 0), ("mallopt", -1, -1), ("mallopt", -2, 2**26)]
        assert len(said) == 3
    assert [name for name, *_ in said[3:]] == ["mallopt"] * 3 + ["malloc_trim"]
    assert {n: v for _, n, v in said[3:6]} == {-4: 65536, -1: 2**17, -2: 2**17}


def test_visits_of_an_older_checkpoint(tmp_path):
    path, state = tmp_path / "checkpoint.pt", State({"w": torch.ones(2)}, {}, round=3)
    history = checkpoint.History(rounds=[0], download=[1.0], upload=[2.0], visits=[5.0], wall=[0.1])
    checkpoint.save(path, state, history, [1.0, 2.0, 5.0], 0.1, {})
    whole = checkpoint.load_whole(path)
    whole["history"]["steps"] = whole["history"].pop("visits")
    torch.save(whole, path)
    assert checkpoint.restore(path, torch.device("cpu"))[1].visits == [5.0]
