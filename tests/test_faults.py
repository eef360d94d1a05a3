"""What goes wrong on real machines: a message, the damaged part set aside, finished work intact, never a wrong number."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pfl_core import Experiment, methods, simulate, sweep
from pfl_core.methods.base import METHODS
from pfl_core.runs import run
from pfl_core.simulate import Interrupted
from pfl_core.store import load_result

TINY = dict(partition_args={"alpha": 1.0}, clients=4, model="mlp", model_args={"hidden": 8}, batch=16, max_samples=40)
TINY |= dict(rounds=4, lr=0.1)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    monkeypatch.setattr(simulate, "CHECKPOINT_EVERY", 0.0)
    return tmp_path / "store"


def same(a, b):
    assert a.arrays.keys() == b.arrays.keys()
    for k, v in a.arrays.items():
        np.testing.assert_array_equal(v, b.arrays[k], err_msg=k)


# -- divergence ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def spoiled():
    """FedAvg whose hook `hook` spoils what it returns from round `at` on; forgotten after the test."""

    class Spoiled(methods.base.Method):
        name = "spoiled"
        hook, at = "upload", 2

        def local(self, c, start):
            end = super().local(c, start)
            if self.hook == "local" and c.round >= self.at:
                end["fc.bias"][list(c.sel).index(2)] = float("nan")
            return end

        def upload(self, state, sel, start, end, weight):
            state = super().upload(state, sel, start, end, weight)
            if self.hook == "upload" and state.round >= self.at:
                state.server["fc.weight"][0, 0] = float("inf")
            return state

        def personal(self, state, c):
            models = {n: v.clone() for n, v in super().personal(state, c).items()}
            if self.hook == "personal" and c.round >= self.at:
                models["fc.weight"][3] = float("nan")
            return models

    yield Spoiled
    del METHODS["spoiled"]


@pytest.mark.parametrize(
    ("hook", "where"),
    [
        ("local", r"layer fc \(fc.bias\) of client 2 is not finite in round 2"),
        ("upload", r"layer fc \(fc.weight\) of the server is not finite in round 2"),
        ("personal", r"layer fc \(fc.weight\) of client 3 is not finite in round 2"),
    ],
)
def test_divergence_is_named_within_its_round(store, spoiled, hook, where):
    spoiled.hook = hook
    seen = []
    e = Experiment(**TINY, method="spoiled", eval_after=False)
    failed = run(e, on_round=lambda r, h: seen.append(r))
    assert not failed.ok and re.match(f"failed: spoiled: {where}", failed.meta["status"])
    kept = failed.history.query("metric == 'acc_pct' and mean == 'client' and split == 'test'")
    last = 2 if hook == "upload" else 1  # the evaluation that round 2 begins with is of models that are still sound
    assert kept["round"].tolist() == list(range(last + 1)) and kept.value.notna().all()
    assert seen == list(range(last + 1))


def test_the_last_rounds_divergence_is_no_number(store, spoiled):
    spoiled.at = TINY["rounds"] - 1  # nobody trains on what this upload leaves
    failed = run(Experiment(**TINY, method="spoiled", eval_after=False))
    assert (
        not failed.ok and "of the server" in failed.meta["status"] and failed.arrays["rounds"].tolist() == [0, 1, 2, 3]
    )


def test_a_resumed_run_that_diverges_keeps_its_history(store, spoiled, capsys):
    bad, good = Experiment(**TINY, method="spoiled"), Experiment(**TINY)
    with pytest.raises(Interrupted):
        run(bad, on_round=lambda r, h: r == 1)
    rows = sweep([bad, good])
    assert load_result(store / bad.id).arrays["rounds"].tolist() == [0, 1, 2] and set(rows.run) == {good.id}
    assert "(spoiled, seed 0) failed: spoiled: layer fc" in capsys.readouterr().out


def test_large_but_finite_is_no_divergence():
    huge = {"a.w": torch.full((2, 3), 3e38), "n": torch.tensor([1, 2])}
    simulate._check_finite(huge, SimpleNamespace(name="m"), 0, simulate.History(), torch.arange(2))
    huge["b"] = {"c": torch.tensor(float("nan"))}  # a number of the server's, not one a client
    with pytest.raises(simulate.Diverged, match=r"m: layer b \(b.c\) of the server"):
        simulate._check_finite(huge, SimpleNamespace(name="m"), 0, simulate.History())
