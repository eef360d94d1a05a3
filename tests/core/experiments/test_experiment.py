"""Experiment's own rules: what `but` and `grid` make of arguments, and how many clients there are."""

import dataclasses
import inspect
import itertools
import json
import pickle

import numpy as np
import pytest

from pfl_core import Experiment, Federation, grid, models, run, sweep, tune
from pfl_core.data import partition
from pfl_core.methods.base import METHODS
from pfl_core.util import checks, fields
from tests.made import main

OWN = dict(dataset="own", model="mlp", model_args={"hidden": 4}, rounds=1, batch=8)


def own(k):
    rng = np.random.default_rng(0)
    lists = [list(range(8 * i, 8 * i + 8)) for i in range(k)]
    x = rng.normal(size=(8 * k, 5)).astype(np.float32)
    return Federation(x, np.arange(8 * k) % 2, lists, test=None)


def defaults(arguments):
    # Those arguments that have a default which JSON can keep.
    given = {n: p.default for n, p in arguments.items() if type(p.default) in (int, float, str)}
    return dict(list(given.items())[:1])


METHOD_ARGS = {
    m: {
        n: p.default
        for n, p in inspect.signature(kind).parameters.items()
        if type(p.default) in (int, float)
    }
    for m, kind in METHODS.items()
}
MODEL_ARGS = {m: defaults(models.arguments(m)) for m in models.list_models()}
PARTITION_ARGS = {p: defaults(partition.arguments(p)) for p in partition.list_partitions()}
ALL = {"method": METHOD_ARGS, "model": MODEL_ARGS, "partition": PARTITION_ARGS}
BASE = Experiment(model="mlp", tags={"row": "a"})


def test_defaults_are_what_is_allowed():
    """They are not looked at again whenever an Experiment is made."""
    for f in dataclasses.fields(Experiment):
        if (usual := f.default) is not dataclasses.MISSING:
            fields.check_value("Experiment", f, usual)
            cast = checks.cast(usual, f.type)
            assert cast == usual and type(cast) is type(usual), f.name


def test_what_equals_a_default_is_held_as_it():
    e = Experiment(lr=np.float64(Experiment.lr), momentum=-0.0, rounds=np.int64(Experiment.rounds))
    kinds = {name: type(getattr(e, name)) for name in ("lr", "momentum", "rounds")}
    assert kinds == dict(lr=float, momentum=float, rounds=int) and str(e.momentum) == "0.0"
    assert e.plain() == Experiment().plain() and e.id == Experiment().id


# -- but -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_another_one_begins_with_the_arguments_that_are_given_beside_it(kind):
    assert sum(map(bool, ALL[kind].values())) > 5  # else nothing is shown
    for (a, of_a), (b, of_b) in itertools.product(ALL[kind].items(), repeat=2):
        if a == b:
            continue
        first = BASE.but(**{kind: a, f"{kind}_args": of_a})
        assert dict(getattr(first, f"{kind}_args")) == of_a
        fresh = BASE.but(**{kind: b, f"{kind}_args": None})
        assert first.but(**{kind: b}).plain() == fresh.plain(), (a, b)
        changed = first.but(**{kind: b, f"{kind}_args": of_b})
        assert dict(getattr(changed, f"{kind}_args")) == of_b, (a, b)


@pytest.mark.parametrize("kind", ALL)
def test_the_same_one_keeps_its_arguments(kind):
    for name, args in ALL[kind].items():
        e = BASE.but(**{kind: name, f"{kind}_args": args})
        for change in ({kind: name}, {f"{kind}_args": {}}, {kind: name, f"{kind}_args": {}}):
            assert e.but(**change).plain() == e.plain(), (name, change)
        assert dict(getattr(e.but(**{f"{kind}_args": None}), f"{kind}_args")) == {}


def test_tags_merge_and_are_cleared():
    assert dict(BASE.but(tags={"column": "b"}).tags) == {"row": "a", "column": "b"}
    assert dict(BASE.but(tags={}).tags) == dict(BASE.but(method="fedper").tags) == {"row": "a"}
    assert dict(BASE.but(tags=None).tags) == {}


def test_what_a_change_names_is_not_kept_in_the_change():
    change = {"method": "fedprox", "method_args": {"mu": 0.1}}
    BASE.but(method="ditto", method_args={"lam": 2.0}).but(**change)
    grid(BASE, {"a": change}, {"b": {"method": "ditto", "method_args": {"lam": 2.0}}})
    assert change == {"method": "fedprox", "method_args": {"mu": 0.1}}


def test_a_wrong_kind_is_still_refused():
    with pytest.raises(ValueError, match=r"method_args=3\): got int, allowed is dict"):
        BASE.but(method_args=3)
    with pytest.raises(ValueError, match="no field of an Experiment; give it as method_args"):
        BASE.but(method="fedprox", mu=0.1)


def test_to_own_data_and_back():
    named = Experiment(
        partition="fedper_classes", partition_args={"k": 2}, partition_seed=3, rounds=1
    )
    there = named.but(dataset="own")
    assert (there.partition, there.clients, dict(there.partition_args)) == ("own", None, {})
    back = there.but(dataset="digits")
    assert back.plain() == Experiment(rounds=1).plain()
    assert named.but(dataset="own", clients=3).clients == 3


# -- grid ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        ({"method": "fedper"}, {}, ("fedper", {})),
        ({"method": "fedprox"}, {}, ("fedprox", {"mu": 0.5})),
        ({}, {"method": "fedprox", "method_args": {"mu": 0.1}}, ("fedprox", {"mu": 0.1})),
        ({"method_args": None}, {}, ("fedprox", {})),
        ({"method_args": {"mu": 0.1}}, {"method_args": {"mu": 0.2}}, ("fedprox", {"mu": 0.1})),
        ({"method": "ditto"}, {"method_args": {"lam": 3.0}}, ("ditto", {"lam": 3.0})),
        ({"method_args": {"lam": 3.0}}, {"method": "ditto"}, ("ditto", {"lam": 3.0})),
        (
            {"method": "ditto", "method_args": {"lam": 3.0}},
            {"method": "pfedme", "method_args": {"lam": 9.0, "K": 2}},
            ("ditto", {"lam": 3.0}),
        ),
        ({"method": "ditto"}, {"method": "fedper"}, ("ditto", {})),
    ],
)
def test_rows_and_columns_of_a_grid(rows, columns, expected):
    base = Experiment(method="fedprox", method_args={"mu": 0.5})
    (cell,) = grid(base, {"r": rows}, {"c": columns})
    assert (cell.method, dict(cell.method_args)) == expected


def test_an_argument_of_a_column_that_a_row_cannot_use_is_refused():
    with pytest.raises(ValueError, match="hyper-parameter of method 'fedper': 'mu'"):
        grid(BASE, {"FedPer": {"method": "fedper"}}, {"mu": {"method_args": {"mu": 0.1}}})


# -- clients ---------------------------------------------------------------------------------------


def test_a_named_data_set_has_ten_unless_it_is_said():
    assert Experiment().clients == Experiment(clients=None).clients == 10
    assert "clients" not in repr(Experiment(clients=10)) and Experiment().plain()["clients"] == 10
    assert Experiment(clients=10).id == Experiment(clients=None).id == Experiment().id


@pytest.mark.parametrize("k", [1, 3, 10])
def test_own_data_say_how_many(k, tmp_path):
    fed, e = own(k), Experiment(**OWN)
    assert e.clients is None and "clients" not in repr(e)
    result = run(e, fed=fed, store=tmp_path)
    assert result.experiment.clients == result.meta["clients"] == k
    assert run(e.but(clients=k), fed=fed, store=tmp_path).id == result.id
    others = [n for n in (1, 3, 9, 10, 11) if n != k]
    for call in (run, lambda e, **how: sweep([e], **how)):
        for n in others:
            with pytest.raises(ValueError, match=f"clients={n}.*of {k} clients; give clients={k}"):
                call(e.but(clients=n), fed=fed, store=tmp_path)
    for n in others:
        with pytest.raises(ValueError, match=f"give clients={k}"):
            tune(e.but(clients=n), {"lr": [0.1]}, fed=fed, store=tmp_path)


@pytest.mark.parametrize("clients", [None, 3, 10])
def test_how_many_is_known_after_json_pickle_repr_and_but(clients):
    e = Experiment(**OWN, clients=clients)
    back = Experiment.from_plain(json.loads(json.dumps(e.plain())))
    for same in (back, pickle.loads(pickle.dumps(e)), eval(repr(e)), e.but(lr=0.5).but(lr=0.01)):
        assert same.clients == clients and same.plain() == e.plain()


def test_what_was_not_said_is_not_said_by_but():
    assert Experiment(rounds=1).but(lr=0.1).but(dataset="own").clients is None
    assert Experiment(clients=10).but(lr=0.1).but(dataset="own").clients == 10
    assert Experiment(**OWN).but(dataset="digits").clients == 10


def test_sampled_clients_are_checked_against_the_federation(tmp_path):
    e = Experiment(**OWN, eval_clients=4)
    with pytest.raises(ValueError, match="eval_clients=4.*clients=3"):
        run(e, fed=own(3), store=tmp_path)


def test_on_the_command_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    words = "run --model mlp --model_args hidden=2 --rounds 0 --max_samples 4 --partition iid"
    for more in ([], ["--clients", "10"], ["--clients", "null"]):
        assert main([*words.split(), *more]) == 0
    ids = {line for line in capsys.readouterr().out.splitlines() if line.startswith("Result(")}
    assert len(ids) == 1 and "10 clients" in ids.pop()
