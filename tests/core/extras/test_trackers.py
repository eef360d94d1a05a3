"""Trackers: what `on_round` hands on, and the recipes of docs/runs.md, run against modules that write down what they are told."""

import math
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from pfl_core import Experiment, Federation, Method, run
from pfl_core.engine.simulate import Interrupted
from pfl_core.extras.logging import tracker
from pfl_core.methods.base import METHODS
from tests.commands import TINY

PAGE = Path(__file__).parents[3] / "docs" / "runs.md"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))


@pytest.fixture
def counting():
    class Counting(Method):
        """FedAvg that counts."""

        name = "counting"

        def numbers(self, state):
            return {"round": state.round, "bias": state.server["fc.bias"].abs().sum()}

    yield
    METHODS.pop("counting")


def logged(into):
    return tracker(lambda numbers, step: into.append((step, numbers)))


def test_a_tracker_is_told_what_the_rows_say(counting):
    said, e = [], Experiment(**TINY).but(method="counting", record=("numbers",))
    rows = run(e, on_round=logged(said)).rows
    assert [step for step, _ in said] == sorted(set(rows["rounds"]))
    of_client = (rows["average"] == "client") & rows.metric.isin(["acc_pct", "acc_balanced"])
    pooled = (rows["average"] == "pooled") & (rows.metric == "loss")
    for step, numbers in said:
        expected = {
            f"{r.when}/{r.split}/{r.metric}": r.value
            for r in rows[(rows["rounds"] == step) & (of_client | pooled)].itertuples()
        }
        own = rows[(rows["rounds"] == step) & (rows["average"] == "own")]
        expected |= {f"own/{r.metric}": r.value for r in own.itertuples()}
        total = rows[(rows["rounds"] == step) & (rows["average"] == "total")].set_index("metric")
        expected["visits"] = total.value["client_visits"]
        expected |= {n: total.value[f"{n}_bytes"] / 4 for n in ("download", "upload")}
        assert numbers == pytest.approx(expected) and len(own) == 2
        assert numbers["own/round"] == step


@pytest.mark.parametrize("stop", [0, 1])
def test_a_resumed_run_hands_on_its_history_once(stop, tmp_path):
    e, whole, first, then = Experiment(**TINY).but(rounds=3), [], [], []
    run(e, on_round=logged(whole), store=tmp_path / "whole")
    log = logged(first)
    with pytest.raises(Interrupted):
        run(e, store=tmp_path / "two", on_round=lambda r, h: (log(r, h), r == stop)[1])
    run(e, store=tmp_path / "two", on_round=logged(then))
    assert [s for s, _ in first] == list(range(stop + 1))
    assert [s for s, _ in then] == [s for s, _ in whole] == [0, 1, 2, 3]
    for (_, a), (_, b) in zip(then, whole, strict=True):
        assert a == b


@pytest.mark.parametrize("rounds", [(2, 2), (3, 1), (1, 3)])
def test_a_tracker_of_several_runs_is_told_each_round_of_each(rounds):
    said = []
    log = logged(said)
    for seed, n in enumerate(rounds):
        run(Experiment(**TINY).but(rounds=n, seed=seed), on_round=log)
    assert [step for step, _ in said] == [r for n in rounds for r in range(n + 1)]


def test_rounds_without_an_evaluation_have_no_numbers():
    said, e = [], Experiment(**TINY).but(rounds=4, eval_every=3)
    seen = {}
    log = logged(said)
    run(e, on_round=lambda r, h: (log(r, h), seen.update({r: h.numbers(r)}))[1])
    assert [step for step, _ in said] == [0, 3, 4]
    assert [r for r in seen if seen[r]] == [0, 3, 4] and list(seen) == [0, 1, 2, 3, 4]


def test_clients_without_test_samples_are_no_part_of_a_mean():
    x = np.random.default_rng(0).random((30, 6), dtype=np.float32)
    parts = np.arange(30).reshape(3, 10)
    fed = Federation(x, np.arange(30) % 2, parts[:, :6], None, [parts[0, 6:], parts[1, 6:], []])
    said = []
    e = Experiment(dataset="own", model="mlp", rounds=1)
    result = run(e, fed=fed, on_round=logged(said))
    h = result.history
    mean = h[(h.metric == "acc_pct") & (h["average"] == "client") & (h.when == "before")]
    assert [n["before/test/acc_pct"] for _, n in said] == pytest.approx(mean.value.tolist())
    assert all(math.isfinite(v) for _, n in said for v in n.values())


# -- a method's own numbers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3.0, "numbers returned float, allowed is"),
        ({"a": torch.ones(2)}, r"a is a Tensor of shape \(2,\), allowed is a number"),
        ({"a": "high"}, "a is a str, allowed is a number"),
        ({"a": None}, "a is a NoneType, allowed is a number"),
        ({"a/b": 1.0}, "the name 'a/b' must be a text without a slash"),
        ({1: 1.0}, "the name 1 must be a text"),
    ],
)
def test_what_is_no_number_is_named(given, says):
    class Odd(Method):
        name = "odd_numbers"

        def numbers(self, state):
            return given

    try:
        with pytest.raises(ValueError, match=f"odd_numbers.*{says}"):
            run(Experiment(**TINY).but(method="odd_numbers", record=("numbers",)))
    finally:
        METHODS.pop("odd_numbers")


def test_a_method_without_numbers_is_refused():
    with pytest.raises(ValueError, match="fedper has no numbers; leave 'numbers' out"):
        Experiment(**TINY).but(record=("numbers",))


# -- the recipes -----------------------------------------------------------------------------------

RECIPES = re.findall(r"```python\n(import (\w+)\n.*?)```", PAGE.read_text(), flags=re.S)


class Told(ModuleType):
    """A module whose functions write down what they are called with."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kw):
            self.calls.append((name, args, kw))
            return self

        return call

    def __enter__(self):
        self.calls.append(("enter", (), {}))

    def __exit__(self, *error):
        self.calls.append(("exit", (), {}))


def test_there_is_a_recipe_for_each():
    assert [name for _, name in RECIPES] == ["wandb", "mlflow", "trackio"]
    assert all(len(code.strip().splitlines()) <= 10 for code, _ in RECIPES)


@pytest.mark.parametrize(("code", "name"), RECIPES)
def test_a_recipe_hands_on_each_evaluation(code, name, monkeypatch):
    module = Told(name)
    monkeypatch.setitem(sys.modules, name, module)
    e = Experiment(**TINY)
    exec(code, {"e": e, "run": run})
    log = {"wandb": "log", "trackio": "log", "mlflow": "log_metrics"}[name]
    told = [(args, kw) for what, args, kw in module.calls if what == log]
    assert [kw for _, kw in told] == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert all("before/test/acc_pct" in numbers for (numbers,), _ in told)
    begun = [kw or args[0] for what, args, kw in module.calls if what in ("init", "log_params")]
    assert e.plain() in begun or begun[0]["config"] == e.plain()
    last = module.calls[-1][0]
    assert last in ("finish", "exit"), "and it ends"
