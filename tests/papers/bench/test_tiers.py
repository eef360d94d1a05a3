"""The benchmark's words and ranks: how often they are wrong, by simulation, and edges by hand."""

import numpy as np
import pandas as pd
import pytest

from pfl_papers.bench import ranks, tiers
from pfl_papers.bench.rows import REFERENCE
from pfl_papers.bench.tiers import BETTER, DIVERGED, EQUAL, LEVEL, WORSE

SETS, ROWS, SEEDS = 200, 34, 10


def drawn(lead, sets=SETS, own=0.6, spread=0.3, common=2.0, seed=0):
    """Tables of a setting: a seed moves all rows together by sd `common`, and each by its own, whose logs spread.

    The first row is the reference; `lead` (ROWS,) is by how much others are truly ahead of it.
    """
    rng = np.random.default_rng([seed, ROWS, SEEDS])
    for _ in range(sets):
        sd = own * np.exp(spread * rng.standard_normal((ROWS, 1)))
        values = common * rng.standard_normal(SEEDS) + sd * rng.standard_normal((ROWS, SEEDS))
        names = [REFERENCE, *(f"m{i}" for i in range(1, ROWS))]
        yield pd.DataFrame(70 + values + np.r_[0, lead][:ROWS, None], names, range(SEEDS))


def shares(lead, word, **how):
    """The share of tables in which any row that is truly at `lead` gets a word, and of rows that do."""
    found = [(tiers.judged(t).tier == word).to_numpy() for t in drawn(lead, **how)]
    return np.mean([f.any() for f in found]), np.mean(found)


@pytest.mark.slow
def test_rows_at_the_threshold_are_rarely_called_better_or_worse():
    for lead, word in ((1.0, BETTER), (-1.0, WORSE)):
        any_row, _ = shares(np.full(ROWS - 1, lead), word)
        assert any_row <= LEVEL + 3 * (LEVEL * (1 - LEVEL) / SETS) ** 0.5


@pytest.mark.slow
def test_equal_rows_are_called_equal_or_open():
    tables = [tiers.judged(t) for t in drawn(np.zeros(ROWS - 1), own=0.3)]
    found = pd.concat(tables).tier.value_counts(normalize=True)
    assert found.get(BETTER, 0) + found.get(WORSE, 0) == 0 and found[EQUAL] > 0.9


@pytest.mark.slow
def test_a_lead_of_three_points_is_found():
    lead = np.zeros(ROWS - 1)
    lead[:3], lead[3:6] = 3.0, -3.0
    found = [tiers.judged(t).tier.to_numpy() for t in drawn(lead)]
    assert np.mean([f[:3] == BETTER for f in found]) > 0.9
    assert np.mean([f[3:6] == WORSE for f in found]) > 0.9


@pytest.mark.slow
def test_equal_is_rarely_said_of_rows_two_points_away():
    _, rows = shares(np.full(ROWS - 1, 2.0), EQUAL)
    assert rows < 0.01


def test_moderation_helps_where_seeds_are_few():
    """With three seeds, intervals that borrow from other rows are shorter and still cover."""
    covered, own, borrowed = [], [], []
    for table in drawn(np.zeros(ROWS - 1), sets=100):
        few = table.iloc[:, :3]
        found = tiers.judged(few).difference
        gaps = (few - few.loc[REFERENCE]).iloc[1:]
        own.append(4.303 * (gaps.std(axis=1, ddof=1) / 3**0.5).mean())
        borrowed.append(np.mean([d.half for d in found]))
        covered.append(np.mean([d.low < 0 < d.high for d in found]))
    assert np.mean(borrowed) < 0.8 * np.mean(own) and 0.93 < np.mean(covered) < 0.98


def test_the_reference_itself_is_not_judged_and_a_twin_is_equal():
    table = next(drawn(np.zeros(ROWS - 1)))
    table.loc["m1"] = table.loc[REFERENCE]
    found = tiers.judged(table)
    assert REFERENCE not in found.index and found.tier["m1"] == EQUAL


def test_a_row_that_diverged_is_neither_better_nor_counted():
    table = next(drawn(np.full(ROWS - 1, 5.0)))
    table.loc["m1", 4] = -np.inf
    found = tiers.judged(table)
    assert found.tier["m1"] == DIVERGED and np.isnan(found.p_better["m1"])
    others = found.drop(index="m1")
    again = tiers.judged(table.drop(index="m1"))
    assert (others.p_better - again.p_better).abs().max() < 0.01


@pytest.mark.parametrize("row", ["m1", REFERENCE])
@pytest.mark.parametrize("ended", [np.nan, -np.inf])
def test_what_a_seed_lacks_leaves_the_other_seeds(row, ended):
    # A seed that was not run is no divergence; where the reference diverged nothing is compared.
    table = next(drawn(np.full(ROWS - 1, 5.0)))
    few = table.copy()
    few.loc[row, [3, 4]] = ended
    found, of = tiers.judged(few), ["m1"] if row == "m1" else list(few.index.drop(REFERENCE))
    assert ((found.tier == DIVERGED) == [r == row and ended < 0 for r in found.index]).all()
    gaps = (table - table.loc[REFERENCE]).drop(columns=[3, 4]).mean(axis=1)
    for name in of:
        assert found.difference[name].estimate == pytest.approx(gaps[name])
        assert found.difference[name].seeds == table.shape[1] - 2
    others = found.drop(index=of)
    assert (others.tier == tiers.judged(table).tier[others.index]).all()
    few.loc["m1"] = ended  # no seed at all
    assert ("m1" in tiers.judged(few).index) == (ended < 0)


def test_holms_numbers_by_hand():
    p = pd.Series([0.01, 0.04, np.nan, 0.03])
    assert tiers.holm(p).tolist()[:2] == pytest.approx([0.03, 0.06])
    assert tiers.holm(p)[3] == pytest.approx(0.06) and np.isnan(tiers.holm(p)[2])


def test_two_rows_and_one_seed_say_nothing():
    table = pd.DataFrame([[70.0], [90.0]], [REFERENCE, "m1"])
    assert tiers.judged(table).tier["m1"] == "open"


def settings(lead, number=7, **how):
    return {f"s{i}": t for i, t in enumerate(drawn(lead, sets=number, **how))}


def test_mean_ranks_by_hand():
    one = pd.DataFrame([[1.0, 3.0], [4.0, 4.0], [0.0, 0.0]], [REFERENCE, "a", "b"])
    two = pd.DataFrame([[9.0, 9.0], [4.0, 4.0], [9.0, 9.0]], [REFERENCE, "a", "b"])
    both = {"one": one, "two": two}
    assert ranks.mean_ranks(both).to_dict() == {REFERENCE: 1.75, "a": 2.0, "b": 2.25}
    found = ranks.summary(both, resamples=50)
    assert found.improves.to_dict() == {REFERENCE: 0.5, "a": 0.5, "b": 0.25}
    assert list(found.index) == [REFERENCE, "a", "b"]
    assert ((found.rank_low <= found["rank"]) & (found["rank"] <= found.rank_high)).all()


def test_a_row_that_a_setting_lacks_or_that_diverged():
    one = pd.DataFrame([[60.0, 60.0], [80.0, -np.inf], [50.0, 50.0]], [REFERENCE, "a", "b"])
    two = one.drop(index="b")
    assert ranks.common({"one": one, "two": two}) == [REFERENCE, "a"]
    assert ranks.mean_ranks({"one": one}).to_dict() == {REFERENCE: 1.0, "a": 3.0, "b": 2.0}
    some = one.replace(-np.inf, np.nan)  # a seed that is not run: no rank
    assert ranks.mean_ranks({"one": some}).to_dict() == {REFERENCE: 1.0, "b": 2.0}


@pytest.mark.slow
def test_a_rows_interval_holds_its_true_mean_rank():
    lead = np.linspace(-4, 4, ROWS - 1)
    true = pd.Series(ranks._ranks(np.r_[0, lead]), [REFERENCE, *(f"m{i}" for i in range(1, ROWS))])
    inside = []
    for seed in range(20):
        found = ranks.summary(settings(lead, seed=seed), resamples=300)
        inside.append(
            ((found.rank_low <= true[found.index]) & (true[found.index] <= found.rank_high)).mean()
        )
    assert np.mean(inside) > 0.8  # ranks of noisy means are pulled to the middle
    best = ranks.summary(settings(lead), resamples=300)
    assert best.improves["m33"] > 0.99 and best.improves["m1"] < 0.01


def test_intervals_are_the_same_each_time():
    tables = settings(np.zeros(ROWS - 1))
    pd.testing.assert_frame_equal(
        ranks.summary(tables, resamples=100), ranks.summary(tables, resamples=100)
    )
