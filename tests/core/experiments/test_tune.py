"""Tuning: what is refused before training, random draws, several seeds, and who may win."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from pfl_core import Experiment, list_methods, optim, sweep, tune
from pfl_core.experiments import tune as tuning
from pfl_core.experiments.settings import SEEDS
from pfl_core.experiments.tune import JUDGED_ON, declared, drawn, scores
from pfl_core.methods.base import METHODS
from pfl_core.util.fields import Search, among, log_uniform, searched, uniform
from tests.core.experiments.setting import TINY


def test_tune_chooses_on_validation_data_only(store):
    e = Experiment(
        **TINY
        | {
            "partition_args": {"alpha": 1.0, "split": "70/10/20"},
            "max_samples": 0,
            "model_args": {"hidden": 32},
        }
    )
    best, rows = tune(e, [{"lr": 0.0}, {"lr": 0.05}, {"lr": 1e-6}])
    assert best.lr == 0.05 and set(rows.row) == {'{"lr": 0.0}', '{"lr": 0.05}', '{"lr": 1e-06}'}
    with pytest.raises(ValueError, match="only 'val'"):
        tune(e, [{"lr": 0.1}], split="test")
    with pytest.raises(ValueError, match="leaves no validation data"):
        tune(Experiment(**TINY), [{"lr": 0.1}])


VAL = TINY | {"partition_args": {"alpha": 1.0, "split": "70/10/20"}, "max_samples": 0}


def test_tune_tries_all_combinations_of_a_dict_of_lists(store):
    e = Experiment(**VAL | {"method": "fedprox", "rounds": 1})
    grid = {"lr": [0.0, 0.05], "method_args": [{"mu": 0.0}, {"mu": 1.0}]}
    best, rows = tune(e, grid)
    assert rows.row.nunique() == 4 and '{"lr": 0.05, "method_args": {"mu": 1.0}}' in set(rows.row)
    again, same = tune(
        e, [{"lr": x, "method_args": m} for x in grid["lr"] for m in grid["method_args"]]
    )
    assert again.id == best.id and best.lr == 0.05 and same.row.tolist() == rows.row.tolist()
    e = e.but(participation=0.9)  # of 3 clients all take part
    after, _ = tune(e, {"lr": [0.05]}, when="after")
    assert after.id == e.but(lr=0.05).id


def test_tune_names_other_runs_by_their_ids(store):
    e = Experiment(**VAL | {"rounds": 1})
    starts = [e.but(lr=0.05, method="fedavg"), e.but(lr=0.01, method="fedavg")]
    _, rows = tune(e, {"init_from": starts})
    assert {json.loads(r)["init_from"] for r in rows.row} == {s.id for s in starts}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("epochs", list(np.arange(1, 3))),
        ("lr", list(np.float32([0.1, 0.01]))),
        ("shuffle", [np.bool_(True), np.bool_(False)]),
        ("dtype", [np.str_("float64")]),
        ("momentum", [np.array(0.5), torch.tensor(0.25)]),
        ("finetune", [[{"epochs": np.int64(1), "lr": np.float32(0.1)}]]),
        ("method_args", [{"mu": np.float32(0.1)}, {"mu": np.int64(1)}]),
        ("init_from", [None, "w.pt", Path("w.pt")]),
    ],
)
def test_what_an_experiment_takes_is_labelled(name, values, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({}, "w.pt")
    e, how = Experiment(**VAL | {"method": "fedprox"}), {}
    if name == "finetune":  # the Experiment as it is, the first draw, is another choice
        e, how = e.but(finetune={"epochs": 1}), {"when": "tuned 1"}
    made = tuning.planned(e, {name: values}, **how)
    wanted = [e.but(**{name: v}).plain() for v in values]
    assert [m.plain() for m in made.values()] == wanted[: len(made)]
    assert len(made) == len({json.dumps(w) for w in wanted})
    assert all(list(json.loads(label)) == [name] for label in made)
    assert len(tuning.planned(e, {name: values}, draws=9, **how)) <= len(values) + 1


@pytest.mark.parametrize(
    "choices, how, said",
    [
        ({"lr": 0.1}, {}, "'lr' has 0.1, not a list of values; allowed is "),
        ({"lr": "0.1"}, {}, "'lr' has '0.1', not a list of values"),
        ({"lr": []}, {}, "not a list of values"),
        ({}, {}, "an empty dict; allowed is"),
        ([0.1, 0.2], {}, 'allowed is {"lr": '),
        ([], {}, "allowed is"),
        ({"rate": [0.1]}, {}, "'rate' is unknown"),
        ({"lr": [0.1]}, {"when": "befor"}, "did you mean 'before'"),
        ({"lr": [0.1], "eval_after": [False]}, {"when": "after"}, "set eval_after=True"),
        ({"lr": [0.1]}, {"split": "test"}, "only 'val'"),
        ({"lr": [0.1]}, {"when": ("before", "tuned 1")}, "'tuned 1' is unknown"),
        ({"method": ["fedper"], "method_args": [{"mu": 1.0}]}, {}, "'mu' is unknown"),
        (None, {}, "or draws=16"),
        ({"lr": log_uniform(0.01, 1)}, {}, "with draws=16 it is drawn"),
        ([{"lr": 0.1}], {"draws": 4}, "there is nothing to draw"),
        ({"lr": 0.1}, {"draws": 4}, "there is nothing to draw"),
        ({"lr": []}, {"draws": 4}, "there is nothing to draw"),
        ({"lr": log_uniform(0.01, 1), "rate": 1}, {"draws": 4}, "'rate' is unknown"),
        ({"lr": uniform(-1, -0.5)}, {"draws": 4}, "allowed is a number >= 0"),
        ({"method_args": {"mu": among(1)}}, {"draws": 4}, "'mu' is unknown"),
        (None, {"draws": 0}, "allowed is an integer >= 1"),
        ({"lr": [0.1]}, {"keep": 0}, "allowed is an integer >= 1"),
        ({"lr": [0.1]}, {"seeds": ()}, "allowed is a list of different integers"),
        ({"lr": [0.1]}, {"seeds": (1, 1)}, "allowed is a list of different integers"),
        ({"lr": [0.1]}, {"seeds": 3}, "allowed is a list of different integers"),
        ({"lr": [0.1]}, {"seeds": (0, -1)}, "seed=-1"),
        ({"lr": [0.1]}, {"when": 3}, "tune(when=3): allowed is"),
        ({"lr": [0.1]}, {"when": ()}, "tune(when=()): allowed is"),
        ({"lr": [0.1]}, {"metric": ["auc"]}, "allowed is str"),
        (None, {"draws": 2, "draw_seed": -1}, "tune(draw_seed=-1): allowed is an integer >= 0"),
        (None, {"draws": 2, "draw_seed": True}, "tune(draw_seed=True): allowed is"),
    ],
)
def test_what_tune_refuses_it_refuses_before_training(choices, how, said, store, monkeypatch):
    monkeypatch.setattr(tuning, "sweep", lambda *args, **kw: pytest.fail("it trained"))
    with pytest.raises(ValueError, match=re.escape(said)):
        tune(Experiment(**VAL), choices, **how)


def test_tune_says_that_no_choice_ended(store):
    with pytest.raises(ValueError, match="none of 2 choices ended with finite numbers; try lower"):
        tune(Experiment(**VAL), {"lr": [1e30, 1e35]})


OTHER = dict(dataset="digits100", partition="iid", partition_args={"alpha": 0.5}, clients=5)
OTHER |= dict(max_samples=10, eval_clients=2, seed=1, partition_seed=1)


@pytest.mark.parametrize("name", [*SEEDS, *JUDGED_ON])
def test_what_decides_the_samples_of_the_judge_is_no_choice(name, monkeypatch):
    monkeypatch.setattr(tuning, "sweep", lambda *args, **kw: pytest.fail("it trained"))
    said = "luckiest would win; give seeds=" if name in SEEDS else "judged on different samples"
    for choices in ({name: [OTHER[name]]}, [{"lr": 0.1}, {name: OTHER[name]}]):
        with pytest.raises(ValueError, match=f"has '{name}': .*{said}"):
            tune(Experiment(**VAL), choices)
    with pytest.raises(ValueError, match=f"has '{name}': .*{said}"):
        tune(Experiment(**VAL), {name: [OTHER[name]]}, draws=3)


# -- random draws


def test_draws_are_those_of_their_name_and_number_alone():
    of = {m: drawn(Experiment(method=m), 16) for m in ("fedavg", "fedprox", "ditto")}
    for changes in of.values():
        assert changes[0] == {}
        assert [c.get("lr") for c in changes] == [c.get("lr") for c in of["fedavg"]]
    assert drawn(Experiment(method="ditto", rounds=3, seed=7), 5) == of["ditto"][:5]
    assert drawn(Experiment(method="ditto"), 16, seed=1)[1:] != of["ditto"][1:]
    rates = [c["lr"] for c in of["fedavg"][1:]]
    assert len(set(rates)) == 15 and all(0.01 <= lr <= 0.5 for lr in rates)
    mus = {c["method_args"]["mu"] for c in of["fedprox"][1:]}
    assert len(mus) > 5 and mus != {c["method_args"]["lam"] for c in of["ditto"][1:]}


def test_draws_at_any_depth():
    ranges = {
        "lr": [0.1, 0.2],
        "finetune": [{"epochs": 10, "lr": log_uniform(0.005, 0.2)}],
        "method_args": {"lam": uniform(0, 1), "personal_epochs": among(1, 2)},
        "batch": 8,
    }
    changes = drawn(Experiment(method="ditto"), 40, ranges)[1:]
    assert {c["lr"] for c in changes} == {0.1, 0.2} and {c["batch"] for c in changes} == {8}
    assert {c["finetune"]["epochs"] for c in changes} == {10}
    assert len({c["finetune"]["lr"] for c in changes}) > 30
    assert {c["method_args"]["personal_epochs"] for c in changes} == {1, 2}
    made = [Experiment(method="ditto").but(**c) for c in changes]
    assert len({e.finetune[0]["lr"] for e in made}) > 30


@pytest.mark.parametrize("name", ["Experiment", *sorted(METHODS)])
def test_what_fields_declare_is_allowed_and_holds_their_default(name):
    cls = Experiment if name == "Experiment" else METHODS[name]
    for field, search in searched(cls).items():
        draw = np.random.default_rng(0)
        for v in {search.draw(draw) for _ in range(60)}:
            cls(**{field: v})  # ValueError for what is not allowed
        usual = next(f.default for f in dataclasses.fields(cls) if f.name == field)
        none = usual is None  # which says: as the experiment has it
        assert none or usual in search.values or search.low <= usual <= search.high, field
        assert str(search) in " ".join(cls.__doc__.split())


def test_some_methods_declare_what_is_searched():
    found = {m for m in list_methods() if "method_args" in declared(Experiment(method=m))}
    assert {"fedprox", "ditto", "fedrep"} <= found and "fedavg" not in found
    assert set(declared(Experiment(method="fedavg"))) == {"lr"}


def test_optimizers_declare_what_is_searched():
    sgd = Experiment(method="fedprox")
    by = {name: declared(sgd.but(optimizer=name)) for name in optim.OPTIMIZERS}
    assert by["sgd"]["lr"].high == 0.5 and by["adam"]["lr"].high < 0.1
    assert "lr" not in declared(Experiment(method="pfedme", optimizer="adam"))
    for name, args in [("momentum", {"lr"}), ("adam", {"lr", "tau"})]:
        e = sgd.but(server=name)
        found = declared(e)
        assert found["server_args"].keys() == args and found["method_args"].keys() == {"mu"}
        for change in drawn(e, 8):
            assert 0 < e.but(**change).server_args.get("lr", 1.0) <= 1
    assert all("_args" not in n for n in declared(Experiment(lr_schedule="cosine")))


def test_a_search_covers_its_range_and_its_values():
    draw = np.random.default_rng(1)
    found = [log_uniform(0.001, 1, also=(0.0,)).draw(draw) for _ in range(4000)]
    beside = found.count(0.0) / 4000
    logs = np.log10([v for v in found if v])
    assert abs(beside - 0.2) < 0.03 and abs(logs.mean() + 1.5) < 0.05
    assert min(logs) >= -3 and max(logs) <= 0 and abs(np.mean(logs < -2) - 1 / 3) < 0.03
    plain = [uniform(2, 4).draw(draw) for _ in range(1000)]
    assert abs(np.mean(plain) - 3) < 0.1 and all(v == float(f"{v:.3g}") for v in found + plain)
    assert {among("a", None, 3).draw(draw) for _ in range(50)} == {"a", None, 3}
    assert 0.0123 <= log_uniform(0.012345, 0.01235).draw(draw) <= 0.01235


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: log_uniform(0, 1), "allowed are numbers > 0; also"),
        (lambda: uniform(2, 1), "the smaller one first"),
        (lambda: uniform(float("nan"), 1), "the smaller one first"),
        (lambda: among(), "needs a range, or values"),
        (lambda: Search(low=1.0, high=1.0), "needs a range, or values"),
    ],
)
def test_a_search_of_nothing_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_draws_are_runs_like_all_others(store):
    e = Experiment(**VAL | {"method": "fedprox", "rounds": 1})
    best, rows = tune(e, draws=4)
    cells = [e.but(**c) for c in drawn(e, 4)]
    assert cells[0].id == e.id and best.id in {c.id for c in cells}
    assert rows.run.drop_duplicates().tolist() == [c.id for c in cells]
    assert rows.row.drop_duplicates().map(json.loads).tolist() == drawn(e, 4)
    again = sweep(cells, found=lambda cell: pytest.fail("it is in the store"))
    assert again.run.tolist() == rows.run.tolist()


# -- several seeds


def fake(monkeypatch, values):
    """A sweep whose runs end with values[row, seed] % on validation data; without one they fail."""
    asked = []

    def sweeps(cells, **how):
        asked.append([(e.tags["row"], e.seed) for e in cells])
        lines = []
        for row, seed in asked[-1]:
            given = values.get((row, seed), {})
            for (when, r), v in (
                given.items() if isinstance(given, dict) else [(("before", 4), given)]
            ):
                lines.append(dict(row=row, seed=seed, when=when, rounds=r, value=v))
        about = dict(split="val", metric="acc_pct", average="client")
        columns = ["row", "seed", "when", "rounds", "value", *about]
        return pd.DataFrame(lines, columns=columns).assign(**about)

    monkeypatch.setattr(tuning, "sweep", sweeps)
    return asked


A, B, C = ('{"lr": 0.1}', '{"lr": 0.2}', '{"lr": 0.3}')
CHOICES = {"lr": [0.1, 0.2, 0.3]}


def test_all_run_with_the_first_seed_and_the_best_with_the_others(monkeypatch):
    values = {(A, 5): 50.0, (B, 5): 80.0, (C, 5): 60.0}
    values |= {(B, 6): 10.0, (C, 6): 55.0, (B, 7): 50.0, (C, 7): 56.0}
    asked = fake(monkeypatch, values)
    best, rows = tune(Experiment(**VAL), CHOICES, seeds=(5, 6, 7), keep=2)
    assert asked == [[(A, 5), (B, 5), (C, 5)], [(B, 6), (C, 6), (B, 7), (C, 7)]]
    assert (best.lr, best.seed, best.tags) == (0.3, 0, {}) and len(rows) == 7
    assert scores(rows)[C, "before"] == pytest.approx(57.0)
    one, _ = tune(Experiment(**VAL), CHOICES, seeds=[5])
    assert one.lr == 0.2 and len(asked) == 3
    tune(Experiment(**VAL), CHOICES, seeds=range(5, 7), keep=None)
    assert len(asked[-1]) == 3


def test_of_equal_choices_the_first_wins(monkeypatch):
    fake(monkeypatch, {(row, s): 50.0 for row in (A, B, C) for s in (0, 1)})
    assert tune(Experiment(**VAL), CHOICES)[0].lr == 0.1
    assert tune(Experiment(**VAL), CHOICES, seeds=(0, 1), keep=2)[0].lr == 0.1


def test_what_diverges_with_any_seed_is_said_and_never_chosen(monkeypatch, capsys):
    values = {(B, 5): 80.0, (C, 5): 60.0, (C, 6): 55.0}
    asked = fake(monkeypatch, values)
    best, _ = tune(Experiment(**VAL), CHOICES, seeds=(5, 6), keep=2)
    said = capsys.readouterr().out.splitlines()
    assert best.lr == 0.3 and asked[1] == [(B, 6), (C, 6)]
    assert said[0].startswith("tune: 1 of 3 choices did not end") and said[0].endswith(A)
    assert said[1].startswith("tune: 1 of 2 choices did not end") and said[1].endswith(B)
    for values in ({}, {(A, 5): 1.0, (B, 5): 1.0, (C, 5): 1.0}):
        fake(monkeypatch, values)
        with pytest.raises(ValueError, match="none of [23] choices ended with finite numbers"):
            tune(Experiment(**VAL), CHOICES, seeds=(5, 6), keep=2)


def test_each_choice_counts_at_its_best_moment_and_round(monkeypatch):
    values = {
        (A, 0): {("before", 2): 70.0, ("before", 4): 20.0, ("after", 4): 90.0},
        (B, 0): {("before", 2): 60.0, ("before", 4): 60.0, ("after", 4): 10.0},
    }
    fake(monkeypatch, values)
    e, choices = Experiment(**VAL), {"lr": [0.1, 0.2]}
    assert tune(e, choices)[0].lr == 0.1 and tune(e, choices, last=True)[0].lr == 0.2
    best, rows = tune(e, choices, when=("before", "after"), last=True)
    assert best.lr == 0.1 and scores(rows, ("before", "after"), last=True).idxmax() == (A, "after")


def test_seeds_reach_what_choices_start_from(store):
    e = Experiment(**VAL | {"rounds": 1})
    new = e.but(init_from=e.but(lr=0.05), method="fedper")
    _, rows = tune(new, {"lr": [0.1]}, seeds=(1, 2))
    want = [tuning.seeded(new.but(lr=0.1), s).id for s in (1, 2)]
    assert rows.run.drop_duplicates().tolist() == want
    assert tuning.seeded(new, 2).init_from.seed == 2


def test_choices_of_fine_tuning_are_judged_after_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    e = Experiment(clients=4, model="mlp", rounds=1, lr=0.05, max_samples=40, batch=8)
    e = e.but(partition_args={"split": "50/25/25"})
    choices = [{"epochs": 1, "lr": 1e-9}, {"epochs": 1, "lr": 0.1}]
    for when in ("before", "after", ("before", "after")):
        with pytest.raises(ValueError, match="say nothing of choices of finetune"):
            tune(e, {"finetune": choices}, when=when, device="cpu")
    for given in (choices, choices[::-1]):
        for when in ("tuned 1", ("before", "tuned 1")):
            best, _ = tune(e, {"finetune": given}, when=when, device="cpu")
            assert best.finetune[0]["lr"] == 0.1
