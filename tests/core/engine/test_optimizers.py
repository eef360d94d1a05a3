"""Optimizers and schedules: torch's own in a plain loop, over executors, methods and resumed runs; who has a step of its own refuses."""

import copy
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

from benchmarks.tape import taped
from pfl_core import Experiment, optim, run
from pfl_core.engine.context import Context
from pfl_core.engine.simulate import FINISH, Interrupted, simulate
from pfl_core.methods.base import Method
from pfl_core.stacked import expand
from tests.core.engine.setting import assert_close, engine, train
from tests.core.methods.loops_shared import close, mlp
from tests.core.methods.setting import OURS, assert_same, setup

EXECUTORS = ("threads", "batched", "graphs")
TORCH = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": functools.partial(torch.optim.AdamW, weight_decay=0.0),  # there 0.01 by default
}
SETTINGS = {  # of an Experiment, and what torch calls them
    "plain": ({}, {}),
    "decay": (dict(weight_decay=0.1), dict(weight_decay=0.1)),
    "clip": (dict(clip=0.05, weight_decay=0.02), dict(weight_decay=0.02)),
    "momentum": (dict(momentum=0.9, weight_decay=0.02), dict(momentum=0.9, weight_decay=0.02)),
    "args": (
        dict(optimizer_args={"beta1": 0.5, "beta2": 0.9, "eps": 1e-3}),
        dict(betas=(0.5, 0.9), eps=1e-3),
    ),
}
CASES = [
    (name, case)
    for name, case in itertools.product(TORCH, SETTINGS)
    if (name == "sgd" or case != "momentum") and (name != "sgd" or case != "args")
]
SCHEDULES = {
    "constant": {},
    "cosine": {"floor": 0.1},
    "step": {"every": 2, "gamma": 0.5},
    "exponential": {"gamma": 0.8},
}
LR = {"sgd": 0.1, "adam": 0.01, "adamw": 0.01}
# The bias before BatchNorm has a gradient of rounding errors, which a small eps would make steps of.
EPS = {"sgd": {}, "adam": {"eps": 1e-3}, "adamw": {"eps": 1e-3}}


def args(name):
    """The optimizer and its rate, as an Experiment says them."""
    return dict(optimizer=name, optimizer_args=EPS[name], lr=LR[name])


@pytest.fixture(autouse=True)
def log():
    with taped() as log:  # "graphs" keeps steps on tapes
        yield log


def scheduler(opt, name, rounds):
    """torch's own."""
    return {
        "constant": lambda: torch.optim.lr_scheduler.ConstantLR(opt, 1.0, 1),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(
            opt, rounds, opt.param_groups[0]["lr"] * 0.1
        ),
        "step": lambda: torch.optim.lr_scheduler.StepLR(opt, 2, 0.5),
        "exponential": lambda: torch.optim.lr_scheduler.ExponentialLR(opt, 0.8),
    }[name]()


def rates(name, lr, rounds):
    """What torch's scheduler gives in rounds 0, 1, ..."""
    opt = torch.optim.SGD([torch.zeros(1)], lr=lr)
    at, found = scheduler(opt, name, rounds), []
    for _ in range(rounds):
        found.append(opt.param_groups[0]["lr"])
        opt.step()
        at.step()
    return found


# -- rates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", optim.SCHEDULES)
@pytest.mark.parametrize("rounds", [1, 2, 7, 30])
def test_rates_are_those_of_torch(name, rounds):
    e = Experiment(lr=0.3, lr_schedule=name, lr_schedule_args=SCHEDULES[name], rounds=rounds)
    found = [optim.rate(e, r) for r in range(rounds)]
    assert found == pytest.approx(rates(name, 0.3, rounds), rel=1e-12)
    assert optim.rate(e, 0) == 0.3 and optim.rate(e, rounds) > 0
    assert optim.rate(e.but(rounds=0), 0) == 0.3
    longer = e.but(rounds=rounds + 5)
    same = [optim.rate(longer, r) for r in range(rounds)] == found
    assert same == (not optim.SCHEDULES[name].by_rounds) or rounds == 1


# -- one training ----------------------------------------------------------------------------------


def by_torch(e, name, how, clip, rounds=1, again=True, schedule="constant", only=None):
    """Each client's model after some rounds of torch's optimizer; its state begins anew in each round if `again`."""
    out = []
    for k in range(e.data.K):
        net = copy.deepcopy(e.task.model).train()
        named = [p for n, p in net.named_parameters() if only is None or n in only]
        rate = rates(schedule, e.config.lr, e.config.rounds)
        opt = TORCH[name](named, lr=rate[0], **how)
        for r in range(rounds):
            if again:
                opt = TORCH[name](named, lr=rate[r], **how)
            for (idx,) in e.data.batch_indices(k, r, batch=e.config.batch, epochs=e.config.epochs):
                x, y = e.data.batch(torch.as_tensor(idx))
                net.zero_grad()
                F.cross_entropy(net(x), y).backward()
                if clip:
                    torch.nn.utils.clip_grad_norm_(named, clip)
                opt.step()
        out.append({n: v.detach() for n, v in net.state_dict().items()})
    return {n: torch.stack([p[n] for p in out]) for n in out[0]}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("name", "case"), CASES)
def test_equal_to_torch(executor, name, case):
    changes, how = SETTINGS[case]
    e = engine(executor, **args(name) | changes)
    got = train(e, rounds=2)
    assert_close(got, by_torch(e, name, EPS[name] | how, changes.get("clip"), rounds=2))
    assert {x.partition(":")[0] for x in e.ran} == {executor}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("schedule", ["cosine", "step", "exponential"])
def test_rates_of_rounds(executor, name, schedule, log):
    how = dict(weight_decay=0.1)
    e = engine(executor, **args(name), rounds=4, lr_schedule=schedule, lr_schedule_args=SCHEDULES[schedule], **how)  # fmt: skip
    assert_close(
        train(e, rounds=4), by_torch(e, name, how | EPS[name], 0, rounds=4, schedule=schedule)
    )
    one = engine(executor, **args(name), rounds=4, **how)
    seen = len(log)
    train(one, rounds=4)
    captures = [[what for what, _ in part].count("capture") for part in (log[:seen], log[seen:])]
    assert captures[0] == captures[1], "a rate that changes costs no capture"


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", TORCH)
def test_state_that_is_kept_goes_on(executor, name):
    how = dict(momentum=0.9) if name == "sgd" else {}
    e = engine(executor, counts=(24, 9, 16), **args(name), **how)
    p = expand(e.task.initial, 3)
    p |= e.task.optimizer_state({n: p[n] for n in e.task.parameters})
    end = train(e, rounds=3, start=p)
    wanted = by_torch(e, name, how | EPS[name], 0, rounds=3, again=False)
    assert_close({n: end[n] for n in wanted}, wanted)
    for n, v in end.items():
        if n.startswith(optim.COUNT):
            assert v.flatten().tolist() == [18, 9, 12], (
                "24, 9 and 16 samples in batches of 4, thrice"
            )


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", TORCH)
def test_what_has_no_gradient_stays(executor, name):
    e = engine(executor, optimizer=name, weight_decay=0.5, lr=LR[name])
    p = expand(e.task.initial, 8) | {"alone": torch.ones(8, 3).double()}
    end = train(e, start=p, only=[*e.task.parameters, "alone"])
    assert (end["alone"] == 1).all() and (end["fc.weight"] != p["fc.weight"]).any()


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", TORCH)
def test_rates_by_name(executor, name):
    e = engine(executor, optimizer=name, weight_decay=0.1, lr=LR[name])
    names = dict.fromkeys(e.task.parameters, 0.0)
    end = train(e, lr=names | {"fc.weight": LR[name]})
    alone = by_torch(e, name, dict(weight_decay=0.1), 0)
    start = expand(e.task.initial, 8)
    assert (end["fc.weight"] != start["fc.weight"]).any()
    for n in set(names) - {"fc.weight"}:
        assert torch.equal(end[n], start[n]) and (alone[n] != start[n]).any()


# -- methods ---------------------------------------------------------------------------------------


TRAIN = Context.train


@functools.cache
def takes_steps(name):
    """Whether a method asks for a step of its own in place of the optimizer, in rounds of SGD."""
    found = []

    class Spy(Context):
        def train(self, loss, start, **how):
            found.append(how.get("step") is not None and not how.get("aside"))
            return super().train(loss, start, **how)

    method, data = setup(name)
    from pfl_core.engine import simulate as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Context", Spy)
        simulate(method, data, workers=1)
    return any(found)


@pytest.mark.parametrize("name", OURS)
def test_every_method_follows_or_refuses(name):
    how = dict(args("adamw"), lr_schedule="exponential")
    if takes_steps(name):
        method, data = setup(name, **how)
        tried = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pfl_core.engine.engine.Engine.run", lambda *a: tried.append(a))
            with pytest.raises(ValueError, match=rf"'adamw'\): {name} .*allowed .*'sgd'"):
                simulate(method, data, workers=1)
        assert not tried, "nothing was trained"
        return
    (a, *_), (b, *_) = (simulate(*setup(name, **how), executor=x, workers=2) for x in EXECUTORS[:2])
    assert_same(a, b, exact=False)
    other, *_ = simulate(*setup(name, **how | dict(weight_decay=0.1)), workers=2)
    plain, *_ = simulate(*setup(name, **how | dict(lr_schedule="constant")), workers=2)
    for different in (other, plain):
        with pytest.raises(AssertionError):
            assert_same(a, different, exact=False)


def test_who_has_steps_of_its_own():
    assert {n for n in OURS if takes_steps(n)} == {"pfedme", "perfedavg", "apfl", "flayer"}


@pytest.mark.parametrize("inner", ["fedavg", "fedala", "ditto"])
def test_flayer_without_its_rates_is_trained_by_the_optimizer(inner):
    # Whether a step takes the optimizer's place hangs on arguments, and on the method inside.
    how = dict(args("adam"), args={"rates": False, "inner": inner})
    (a, *_), (b, *_) = (simulate(*setup("flayer", **how), executor=x) for x in EXECUTORS[:2])
    assert_same(a, b, exact=False)
    method, data = setup("flayer", optimizer="adam", args={"inner": inner})
    with pytest.raises(ValueError, match="flayer trains by a step of its own"):
        simulate(method, data, workers=1)


@pytest.mark.parametrize("executor", EXECUTORS[:2])
@pytest.mark.parametrize("name", TORCH)
def test_parts_that_are_trained_one_after_the_other(executor, name):
    # FedRep: the head by itself, then the base; each stage has an optimizer of its own.
    method, data = mlp("fedrep", **args(name), weight_decay=0.1, rounds=1, lr_schedule="step", lr_schedule_args={"every": 1, "gamma": 0.5}, participation=1.0)  # fmt: skip
    state, *_ = simulate(method, data, executor=executor, workers=1)
    ends = []
    for k in range(data.K):
        net = copy.deepcopy(method.task.model)
        for head, stream in ((True, "head"), (False, "local")):
            named = [p for n, p in net.named_parameters() if (n in method.task.head) == head]
            opt = TORCH[name](named, lr=LR[name], weight_decay=0.1, **EPS[name])
            c = method.task.config
            how = dict(batch=c.batch, kind=c.plan, shuffle=c.shuffle, stream=stream)
            for (idx,) in data.batch_indices(k, 0, epochs=1, **how):
                x, y = data.batch(torch.as_tensor(idx))
                net.zero_grad()
                F.cross_entropy(net(x), y).backward()
                opt.step()
        ends.append({n: v.detach() for n, v in net.state_dict().items()})
    w = data.n.double() / data.n.sum()
    for n in state.server:
        mean = sum(a * p[n] for a, p in zip(w, ends, strict=True))
        close({n: state.server[n]}, {n: mean})
    for k, p in enumerate(ends):
        close(state.clients, {n: p[n] for n in state.clients}, k)


def test_a_step_that_comes_second_is_refused_before_the_first(monkeypatch):
    class Hybrid(Method):
        """A plugin whose second training is a step of its own."""

        name = "hybrid_for_test"

        def local(self, ctx, start):
            half = ctx.train(self.loss, start)
            return ctx.train(self.loss, half, step=lambda p, anchor, grad, at: (p, {}))

    method, data = setup(Hybrid.name, optimizer="adam")
    tried = []
    monkeypatch.setattr("pfl_core.engine.engine.Engine.run", lambda *a: tried.append(a))
    with pytest.raises(ValueError, match="hybrid_for_test trains by a step of its own"):
        simulate(method, data, workers=1)
    assert not tried


@pytest.mark.parametrize(
    ("name", "hyper"), [("feddbe", {"kappa": 1.0}), ("fedproto", {"proto": "running"})]
)
def test_losses_that_count_on_plain_sgd_refuse_others(name, hyper):
    setup(name, args=hyper, lr_schedule="cosine")
    with pytest.raises(ValueError, match=f"{name}: .*optimizer = adam; allowed: both 0 and sgd"):
        setup(name, args=hyper, optimizer="adam")


@pytest.mark.parametrize(("name", "hyper"), [("feddbe", {"kappa": 1.0}), ("fedproto", {"proto": "running"}), ("apple", {})])  # fmt: skip
def test_rates_that_are_the_experiments_follow_its_schedule(name, hyper):
    seen = {}
    for schedule in ("constant", "step"):
        told = seen[schedule] = []

        def note(self, loss, start, *, lr=None, told=told, **how):
            told.append((self.round, lr))
            return TRAIN(self, loss, start, lr=lr, **how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Context, "train", note)
            changes = dict(lr_schedule=schedule, lr_schedule_args=SCHEDULES[schedule], rounds=3)
            simulate(*setup(name, args=hyper, **changes), workers=1)
    for (r, a), (_, b) in zip(seen["constant"], seen["step"], strict=True):
        moved = {n for n in a if a[n] != b[n]}
        halves = {n: a[n] * 0.5 ** (r // 2) for n in moved}
        assert halves == {n: b[n] for n in moved} and bool(moved) == (r >= 2), (r, a, b)
        assert moved.isdisjoint({"m", "sum.z", "sum.n", "dr"})


# -- runs ------------------------------------------------------------------------------------------

BASE = Experiment(
    model="mlp", clients=3, rounds=4, max_samples=30, batch=8, lr=0.05, dtype="float64"
)
KINDS = [dict(lr_schedule=name, lr_schedule_args=args) for name, args in SCHEDULES.items()]
KINDS += [dict(optimizer="adamw", lr=0.01), dict(optimizer="adam", lr=0.01, lr_schedule="cosine")]


def rows(result):
    found = result.rows
    found = found[~found.metric.isin(["train_s"])]
    return found[["rounds", "when", "split", "metric", "value"]].reset_index(drop=True)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_stopped_run_and_a_longer_one_go_on_as_one(tmp_path, kind):
    e = BASE.but(**kind)
    whole = run(e, store=tmp_path / "whole", device="cpu")
    with pytest.raises(Interrupted):
        run(e, store=tmp_path / "two", device="cpu", on_round=lambda r, h: r == 1)
    assert rows(run(e, store=tmp_path / "two", device="cpu")).equals(rows(whole))
    run(e.but(rounds=2), store=tmp_path / "grown", device="cpu", keep_state=True)
    began = []
    grown = run(e, store=tmp_path / "grown", device="cpu", on_round=lambda r, h: began.append(r))
    assert rows(grown).equals(rows(whole))
    by_rounds = optim.schedule(e).by_rounds
    assert began[0] == (0 if by_rounds else 2), "a cosine over 4 rounds does not begin as over 2"
    assert e.but(rounds=2).course_for("x") == e.course_for("x"), "which is said by the method"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_early_end_is_the_run_of_so_many_rounds_or_none(tmp_path, schedule, capsys):
    e = BASE.but(lr_schedule=schedule, lr_schedule_args=SCHEDULES[schedule])
    ends = lambda r, h: FINISH if r == 2 else None  # noqa: E731
    if schedule != "cosine":
        early = run(e, store=tmp_path / "a", device="cpu", on_round=ends)
        assert rows(early).equals(rows(run(e.but(rounds=2), store=tmp_path / "b", device="cpu")))
        return
    with pytest.raises(Interrupted):
        run(e, store=tmp_path, device="cpu", on_round=ends)
    assert "cannot end early; run rounds=2 instead" in capsys.readouterr().out


@pytest.mark.parametrize("stage", [{"epochs": 2}, {"epochs": 2, "lr": 0.02, "only": "head"}])
def test_fine_tuning_keeps_its_rate(tmp_path, stage):
    e = BASE.but(rounds=3, lr_schedule="step", lr_schedule_args={"every": 3, "gamma": 1e-6})
    e, plain = e.but(finetune=stage), BASE.but(rounds=3, finetune=stage)
    found = [rows(run(x, store=tmp_path, device="cpu")) for x in (e, plain)]
    tuned = [f[f.when.fillna("").str.startswith("tuned")] for f in found]
    assert tuned[0].equals(tuned[1]) and len(tuned[0])
    after = [f[(f.when == "after") & (f.rounds == 3)] for f in found]
    assert not after[0].equals(after[1])


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_fine_tuning_is_by_the_optimizer_whose_state_goes_on(name):
    method, data = setup("fedavg", bn=False, optimizer=name, lr=0.01, rounds=1, finetune=[{"epochs": 2}], keep_models=True, holdout=0.0)  # fmt: skip
    got = simulate(method, data, workers=1)
    for k in range(data.K):
        net = copy.deepcopy(method.task.model)
        net.load_state_dict({n: v[k] for n, v in got.before.items()})
        opt = TORCH[name](net.parameters(), lr=0.01)
        c = method.task.config
        for e in range(2):
            for (idx,) in data.batch_indices(k, 1 + e, batch=c.batch, epochs=1, kind=c.plan):
                x, y = data.batch(torch.as_tensor(idx))
                net.zero_grad()
                F.cross_entropy(net(x), y).backward()
                opt.step()
        close(got.tuned, dict(net.state_dict()), k)


def test_ids():
    every = [*KINDS[1:], dict(optimizer="adam"), dict(optimizer="adamw", optimizer_args={"eps": 1e-4})]  # fmt: skip
    ids = {BASE.but(**kind).id for kind in [{}, *every]}
    assert len(ids) == len(every) + 1
    assert BASE.but(lr_schedule="constant", optimizer="sgd").id == BASE.id
    for field, name in [("optimizer", "adam"), ("lr_schedule", "cosine"), ("lr_schedule", "step")]:
        cls = optim.KINDS[field][name]()
        spelled = {n: getattr(cls, n) for n in optim.arguments(field, name)}
        told = BASE.but(**{field: name, f"{field}_args": spelled})
        assert told.id == BASE.but(**{field: name}).id and told != BASE.but(**{field: name})


WRONG = {
    "momentum": (dict(optimizer="adam", momentum=0.5), r"momentum=0.5, optimizer='adam'\): momentum is sgd's"),
    "optimizer": (dict(optimizer="rmsprop"), "allowed is one of sgd, adam, adamw"),
    "argument": (dict(optimizer="adam", optimizer_args={"beta": 0.9}), "argument of optimizer 'adam': 'beta' is unknown; did you mean"),
    "of another": (dict(optimizer_args={"beta1": 0.9}), "argument of optimizer 'sgd': 'beta1' is unknown; known are none"),
    "range": (dict(optimizer="adamw", optimizer_args={"beta2": 1.0}), r"optimizer adamw\(beta2=1.0\): allowed is a number in \[0, 1\)"),
    "schedule": (dict(lr_schedule="linear"), "allowed is one of constant, cosine, step, exponential"),
    "gamma": (dict(lr_schedule="exponential", lr_schedule_args={"gamma": 1.1}), r"lr_schedule exponential\(gamma=1.1\): allowed is a number in \(0, 1\]"),
    "every": (dict(lr_schedule="step", lr_schedule_args={"every": 0}), r"lr_schedule step\(every=0\): allowed is an integer >= 1"),
    "flat": (dict(optimizer="adam", beta1=0.5), r"give it as optimizer_args=\{'beta1': 0.5\}"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case):
    given, says = WRONG[case]
    with pytest.raises(ValueError, match=says):
        Experiment(**given)
