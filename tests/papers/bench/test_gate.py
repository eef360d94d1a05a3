"""The gate of a setting: the label prior by hand, and what is said where it fails."""

import numpy as np
import pytest

from pfl_core.experiments.build import federation
from pfl_papers.bench import gate
from pfl_papers.bench.settings import SETTINGS


@pytest.mark.parametrize("key", ["mild", "permute", "case"])
def test_the_label_prior_is_right_where_the_most_common_training_label_is(key):
    """New labels count, not those of the pool."""
    e = SETTINGS[key].base(7, digits=True)
    right, of = gate.label_prior(e)
    fed = federation(e)
    for k in range(fed.K):
        train, test = (fed.y[fed.index[part][k]].tolist() for part in ("train", "test"))
        most = max(sorted(set(train)), key=train.count)
        assert (right[k], of[k]) == (test.count(most), len(test))
    assert len(right) == fed.K and 5 < 100 * right.sum() / of.sum() < 60


GOOD = gate.Gate(prior=10.0, local=60.0, range=16.0, ahead=6.0, half=0.5)


def test_a_setting_that_passes():
    assert GOOD.fails() == [] and gate.said(GOOD).endswith("passes")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prior": 55.0}, "under 55"),
        ({"prior": 56.0, "local": 60.0}, "points above that"),
        ({"range": 8.0}, "differ by more than 8"),
        ({"ahead": 0.0}, "a row leads Local"),
        ({"half": 0.81}, "half an interval"),
        ({"half": np.nan}, "half an interval"),
    ],
)
def test_each_condition_is_said_where_it_fails(change, said):
    fails = GOOD._replace(**change).fails()
    assert any(said in words for words in fails) and "fails" in gate.said(GOOD._replace(**change))


@pytest.mark.parametrize("lacks", ["local", "range"])
def test_a_gate_that_lacks_rows_fails_and_is_not_said(lacks):
    """As that of a method of one's own alone, where nothing is published."""
    some = GOOD._replace(**{lacks: np.nan})
    assert some.fails() and gate.said(some) == "not known before Local and another row are tuned"
