"""The benchmark's settings: what they deal, their groups, and what is drawn of each row."""

import numpy as np
import pytest

from pfl_core.data import pools
from pfl_core.experiments.build import federation
from pfl_core.experiments.tune import drawn
from pfl_core.util.fields import Search
from pfl_papers.bench import settings
from pfl_papers.papers import presets

SETTINGS = settings.SETTINGS
PARTS = ("train", "val", "test")


def labels(fed, part):
    return [fed.y[index] for index in fed.index[part]]


def test_there_are_seven():
    assert [*SETTINGS] == ["mild", "classes", "rotate", "permute", "case", "text", "photos"]
    assert all(key == s.key and s.why for key, s in SETTINGS.items())


@pytest.mark.parametrize("key", SETTINGS)
def test_a_setting_is_the_designs(key):
    e = SETTINGS[key].base(100)
    assert (e.clients, e.batch, e.epochs, e.participation) == (
        21 if key == "case" else 20,
        10,
        1,
        1,
    )
    assert e.rounds == SETTINGS[key].rounds == (30 if key == "photos" else 40)
    assert (e.seed, e.partition_seed) == (100, None)  # so that the seed draws the clients
    assert e.partition_args["each"].endswith("/300")


@pytest.mark.parametrize("key", SETTINGS)
def test_the_form_over_digits_deals_what_it_says(key):
    e = SETTINGS[key].base(3, digits=True)
    fed = federation(e)
    each = [int(n) for n in e.partition_args["each"].split("/")]
    assert [{len(index) for index in fed.index[part]} for part in PARTS] == [{n} for n in each]
    other = federation(SETTINGS[key].base(4, digits=True))
    assert not np.array_equal(fed.x[fed.index["train"][0]], other.x[other.index["train"][0]])


@pytest.mark.parametrize("key", SETTINGS)
def test_the_form_over_digits_is_the_same_rule(key):
    real, small = SETTINGS[key].base(0), SETTINGS[key].base(0, digits=True)
    assert (real.partition, real.model) == (small.partition, small.model)
    assert real.partition_args.keys() == small.partition_args.keys()
    assert small.dataset.startswith("digits") and not real.dataset.startswith("digits")


@pytest.mark.parametrize("key", ["mild", "text"])
def test_no_client_has_mostly_one_label(key):
    fed = federation(SETTINGS[key].base(5, digits=True))
    for k in range(fed.K):
        held = np.concatenate([labels(fed, part)[k] for part in PARTS])
        assert np.bincount(held).max() <= 0.7 * len(held)


@pytest.mark.parametrize("key", [k for k, s in SETTINGS.items() if s.groups > 1])
def test_a_group_alone_has_the_clients_that_it_has_among_all(key):
    s = SETTINGS[key]
    e = s.base(2, digits=True)
    whole, found = federation(e), {}
    for number in range(s.groups):
        alone = federation(s.group(number, e))
        found |= {number + s.groups * k: (alone, k) for k in range(alone.K)}
    assert sorted(found) == list(range(whole.K))
    for i, (alone, k) in found.items():
        for part in PARTS:
            a, b = whole.index[part][i], alone.index[part][k]
            assert np.array_equal(whole.x[a], alone.x[b])
            assert np.array_equal(whole.y[a], alone.y[b])


def test_a_setting_without_groups_has_none_alone():
    for s in (SETTINGS["mild"], SETTINGS["case"]):
        with pytest.raises(ValueError, match=f"setting '{s.key}' has {s.groups} groups, not one 3"):
            s.group(3, s.base(0, digits=True))


def test_domains_of_case_are_the_labels_of_emnist():
    """Upright: digits 0-9, A-Z, a-z."""
    names = [*"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"]
    groups = SETTINGS["case"].base(0).partition_args["groups"]
    assert ["".join(names[c] for c in g) for g in groups] == [
        "0123456789",
        "ABCDEFGHIJ",
        "abcdefghij",
    ]
    assert pools.SOURCES["emnist"].classes == len(names)


@pytest.mark.parametrize("key", SETTINGS)
@pytest.mark.parametrize("row", presets.COMPARED)
def test_what_is_drawn_of_a_row_can_be_built(key, row):
    base = SETTINGS[key].base(0, digits=True)
    e = base.but(**presets.COMPARED[row](base))
    for changes in drawn(e, 4, settings.ranges(key, row)):
        e.but(**changes)


def test_rates_are_equal_numbers_for_all_rows():
    rates = {
        row: [c.get("lr") for c in drawn(SETTINGS["text"].base(0), 5, settings.ranges("text", row))]
        for row in ("fedavg", "ditto", "fedrep", "fedbn")
    }
    assert len({tuple(r) for r in rates.values()}) == 1
    assert all(0.05 <= rate <= 1 for rate in rates["ditto"][1:])


def test_rates_of_rows_with_momentum_make_steps_of_equal_length():
    plain, moved = (settings.ranges("mild", row) for row in ("fedavg", "pfedhn"))
    pairs = [(plain["lr"], moved["lr"]), (plain["finetune"]["lr"], moved["finetune"]["lr"])]
    for a, b in pairs:
        assert (b.low, b.high) == pytest.approx((a.low / 10, a.high / 10))
    assert moved["lr"].low < presets.COMPARED["pfedhn"](SETTINGS["mild"].base(0))["lr"]


def test_what_a_setting_adds_to_a_methods_own():
    ditto = settings.ranges("mild", "ditto")
    assert ditto.keys() == {"lr", "method_args", "finetune"}
    assert isinstance(ditto["method_args"]["lam"], Search)
    assert settings.ranges("photos", "fedavg").keys() == {"lr", "buffers", "finetune"}
    assert settings.ranges("photos", "fedper")["head_depth"].values == (1, 2, 3)
    assert "head_depth" not in settings.ranges("mild", "fedper")
    lpft = settings.ranges("mild", "lpft")["finetune"].values[0]
    assert [stage["epochs"] for stage in lpft] == [5, 10] and lpft[0]["only"] == "head"
    with pytest.raises(ValueError, match="setting 'mlid' is unknown; did you mean 'mild'"):
        settings.ranges("mlid", "ditto")
