"""What a random search may draw of every method: legal values that can be built, and few of them."""

import dataclasses
import itertools
import re

import pytest

from pfl_core import Experiment
from pfl_core.experiments.build import build_method, client_data
from pfl_core.experiments.tune import declared, drawn
from pfl_core.methods.base import METHODS, make_method
from pfl_core.util import checks
from pfl_core.util.fields import Search, kind, searched
from pfl_core.util.identity import is_ours

OURS = {name: cls for name, cls in sorted(METHODS.items()) if is_ours(cls)}
MOST = 2  # parameters of its own that are searched
LR = (0.01, 1.0)  # the ends of all rates with which ranges are drawn
BASE = Experiment(
    model="mlp",
    model_args={"hidden": 4},
    clients=4,
    partition="domains",
    partition_args={"groups": 1, "each": "10/5/5"},
    rounds=1,
    holdout=0.2,
)
# Methods with numbers of which none is searched, and why.
NONE = {
    "fedper": "its number makes a variant of the appendix; the paper tunes the Experiment's depth",
    "flayer": "its number counts in the released code's form alone; its depth is the Experiment's",
}
DEGENERATE = (
    r"(?P<value>\d+)(?: \([\w ]+\))?(?: is| trains as)? "
    r"(?:FedAvg|Local|pFedLA|none|no \w+|the plain mean)\b"
)


def numeric(cls):
    return [f for f in dataclasses.fields(cls) if re.match(r"(int|float)\b", kind(f))]


def ends(search: Search) -> list:
    return [*search.values, *([search.low, search.high] if search.low < search.high else [])]


def reaches(search: Search, v: float) -> bool:
    return v in search.values or search.low < search.high and search.low <= v <= search.high


CASES = [(name, field) for name, cls in OURS.items() for field in searched(cls)]


def test_all_methods_are_there():
    assert len(OURS) == 33 and len(CASES) > 30


@pytest.mark.parametrize("name, field", CASES)
def test_a_field_allows_all_of_its_range(name, field):
    about = {f.name: f for f in dataclasses.fields(OURS[name])}[field]
    search = searched(OURS[name])[field]
    for v in ends(search):
        assert getattr(make_method(name, **{field: v}), field) == v
    if search.low < search.high:  # numbers between its ends are no integers
        assert kind(about).startswith("float")
    for v in search.values:
        assert type(v) is type(checks.cast(v, about.type))


@pytest.mark.parametrize("name", OURS)
def test_few_parameters_are_searched(name):
    assert len(searched(OURS[name])) <= MOST


@pytest.mark.parametrize("name", OURS)
def test_a_method_with_numbers_has_a_range_or_a_reason(name):
    assert bool(numeric(OURS[name]) and not searched(OURS[name])) == (name in NONE)


@pytest.mark.parametrize("name, field", CASES)
def test_the_value_that_makes_it_another_method_is_reached(name, field):
    about = {f.name: f.metadata.get("doc", "") for f in dataclasses.fields(OURS[name])}[field]
    for found in re.finditer(DEGENERATE, about):
        assert reaches(searched(OURS[name])[field], float(found["value"])), found[0]


def test_values_that_make_another_method_are_found():
    found = {
        (name, f.name): [m["value"] for m in re.finditer(DEGENERATE, f.metadata.get("doc", ""))]
        for name, cls in OURS.items()
        for f in dataclasses.fields(cls)
    }
    assert found["fedprox", "mu"] == found["ditto", "lam"] == ["0"]
    assert found["apfl", "alpha"] == ["0", "1"] and found["heurpfedla", "retain_k"] == ["0"]
    assert sum(map(bool, found.values())) > 15


@pytest.mark.parametrize("name", OURS)
def test_all_that_is_drawn_can_be_trained(name):
    """The ends of all ranges, with one another and with the ends of all rates."""
    base = BASE.but(method=name)
    data, ranges = client_data(base), declared(base)
    own = ranges.get("method_args", {})
    rates = LR if "lr" in ranges else (base.lr,)
    for lr, *values in itertools.product(rates, *map(ends, own.values())):
        e = base.but(lr=lr, method_args=dict(zip(own, values, strict=True)))
        build_method(e, data)


def test_a_method_says_what_no_search_draws():
    assert "lr" not in declared(Experiment(method="pfedme"))
    assert "lr" in declared(Experiment(method="fedavg"))
    rates = [c["method_args"]["personal_lr"] for c in drawn(Experiment(method="pfedme"), 9)[1:]]
    assert len(set(rates)) == 8 and all(0.005 <= rate <= 0.1 for rate in rates)
