"""The noise of columns: how often intervals cover, by simulation, and each edge by hand."""

import functools

import numpy as np
import pandas as pd
import pytest
from scipy.special import polygamma
from scipy.stats import t as student

from pfl_core.analysis import noise
from pfl_core.analysis.noise import Column, Interval, Prior, Priors, Variance

LEVELS, SPREADS = (0.93, 0.97), (0.2, 0.8)
SHAPES = [(G, m, S) for G in (3, 4, 10) for m in (3, 8, 15) for S in (2, 3, 5)]


# -- the generating model --------------------------------------------------------------------------


def simulated(G, m, S, spread, draws, seed=0):
    """(draws, G, m, S): a seed moves a column by sd M and each row by N, whose logs spread."""
    rng = np.random.default_rng([seed, G, m, S, round(10 * spread)])
    own, common = (np.exp(rng.normal(np.log(sd), spread, (draws, G, 1, 1))) for sd in (1, 2))

    def numbers(seeds):
        moved = common * rng.standard_normal((draws, G, 1, seeds))
        return moved + own * rng.standard_normal((draws, G, m, seeds))

    return numbers(S), numbers(1)[..., 0]


def moderated(table):
    """N and M of each column, drawn towards what a set's columns have in common."""
    found = []
    for of in (noise.own_noise, noise.seed_noise):
        raw = of(table)
        prior = noise.prior(raw.value, np.full(raw.value.shape[-1], float(raw.freedom)))
        found.append(Prior(*(v[:, None] for v in prior)).moderate(raw))
    return found


def halves(table, draws=np.inf, known=None):
    """Half widths of a difference and of a level, as `Column` has them."""
    (own, common), m = known or moderated(table), table.shape[-2]
    share = 1 / table.shape[-1] + 1 / draws
    difference = noise.half_width([own.times(2 * share)])
    return difference, noise.half_width([common.times(share), own.times((m - 1) / m * share)])


@functools.cache
def coverage(G, m, S, spread):
    """How often an interval holds what it is for; a method's true mean is 0 in all columns."""
    table, published = simulated(G, m, S, spread, 300_000 // (G * m * S))
    mean, known = table.mean(-1), moderated(table)
    found = {}
    for kind, draws, true in (("", np.inf, 0 * published), ("predicted ", 1, published)):
        gap, level = halves(table, draws, known)
        off = mean - true
        found[f"{kind}difference"] = (np.abs(off[..., 0] - off[..., 1]) <= gap).mean()
        found[f"{kind}level"] = (np.abs(off[..., 0]) <= level).mean()
    return found


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("G", "m", "S"), SHAPES)
def test_intervals_cover_what_they_say(G, m, S, spread):
    found = coverage(G, m, S, spread)
    assert len(found) == 4
    assert {k: v for k, v in found.items() if not LEVELS[0] <= v <= LEVELS[1]} == {}


@pytest.mark.parametrize("spread", SPREADS)
def test_equal_methods_are_called_different_in_at_most_six_percent(spread):
    # Over the shapes that tables have; in a column of three rows at two seeds it is up to 7 % (93 % are covered).
    missed = [1 - coverage(*shape, spread)["difference"] for shape in SHAPES]
    assert np.mean(missed) <= 0.06
    assert max(v for v, (_, m, _) in zip(missed, SHAPES, strict=True) if m > 3) <= 0.06


def test_a_column_has_the_widths_that_were_simulated():
    table, _ = simulated(4, 8, 3, 0.8, 1)
    columns = [Column(pd.DataFrame(of, list("abcdefgh"))) for of in table[0]]
    known = noise.priors(columns)
    for draws in (np.inf, 1):
        for of, gap, level in zip(table[0], *(h[0] for h in halves(table, draws)), strict=True):
            column = Column(pd.DataFrame(of, list("abcdefgh")), priors=known)
            if noise.odd_rows(of):
                continue
            assert column.difference("a", "b", draws).half == pytest.approx(gap)
            assert column.level("c", draws).half == pytest.approx(level)


def test_a_row_with_one_model_for_all_is_covered_beside_personal_ones():
    """Its seeds move it by themselves, three times as far as a personal row's noise."""
    rng, hit, count = np.random.default_rng(3), 0, 0
    for _ in range(100):
        tables = []
        for _ in range(5):
            table = rng.normal(0, 1, (6, 3)) + rng.normal(0, 2, 3)
            table[0] = rng.normal(0, 3, 3) + rng.normal(0, 2, 3)
            tables.append(pd.DataFrame(table, ["fedavg", *"abcde"]))
        known = noise.priors([Column(t, {"fedavg"}) for t in tables])
        for t in tables:
            found = Column(t, {"fedavg"}, priors=known).difference("a", "fedavg")
            hit, count = hit + (found.low <= 0 <= found.high), count + 1
    assert 0.92 <= hit / count <= 0.98  # of 500


def test_an_odd_row_is_covered():
    rng, hit, count = np.random.default_rng(4), 0, 0
    for _ in range(100):
        tables = [rng.normal(0, [[8]] + [[1]] * 7, (8, 3)) + rng.normal(0, 2, 3) for _ in range(4)]
        tables = [pd.DataFrame(t, list("abcdefgh")) for t in tables]
        known = noise.priors([Column(t) for t in tables])
        for t in tables:
            found = Column(t, priors=known).difference("a", "b")
            hit, count = hit + (found.low <= 0 <= found.high), count + 1
    assert hit / count >= 0.85  # with the noise that is pooled over all rows it would be less


# A column of eight rows without priors, two of which vary three times as far as the others: how
# often the interval of a difference holds it, with 2, 3 and 5 seeds. docs/evaluation.md says so.
LOUD = {"loud": (0, 1), "mixed": (0, 2), "quiet": (2, 3)}
COVERED = {2: (0.75, 0.86, 0.99), 3: (0.78, 0.86, 0.995), 5: (0.84, 0.90, 0.995)}


@pytest.mark.parametrize("S", COVERED)
def test_where_two_rows_vary_more_their_difference_is_covered_less(S):
    rng, hits = np.random.default_rng([6, S]), {pair: [] for pair in LOUD}
    for _ in range(300):
        table = rng.normal(0, [[3]] * 2 + [[1]] * 6, (8, S)) + rng.normal(0, 2, S)
        column = Column(pd.DataFrame(table, list("abcdefgh")))
        for pair, (i, j) in LOUD.items():
            found = column.difference("abcdefgh"[i], "abcdefgh"[j])
            hits[pair].append(found.low <= 0 <= found.high)
    assert [np.mean(of) for of in hits.values()] == pytest.approx(COVERED[S], abs=0.08)


# -- each piece by hand ----------------------------------------------------------------------------


def column(values, names="abcdefgh", **how):
    values = np.asarray(values, dtype=float)
    return Column(pd.DataFrame(values, list(names[: len(values)])), **how)


def numbers(m, S, seed=0):
    return np.random.default_rng(seed).normal(0, 1, (m, S)) + np.arange(m)[:, None]


def test_without_priors_a_difference_is_that_of_the_two_way_table():
    values = numbers(5, 3)
    rest = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    n = (rest**2).sum() / 8
    found = column(values).difference("a", "b")
    assert found.estimate == pytest.approx((values[0] - values[1]).mean())
    assert found.half == pytest.approx(student.ppf(0.975, 8) * np.sqrt(2 * n / 3))
    ahead = column(values).difference("a", "b", draws=1)
    assert ahead.half == pytest.approx(student.ppf(0.975, 8) * np.sqrt(2 * n * (1 / 3 + 1)))


def test_a_level_has_the_seeds_movement_too():
    values = numbers(5, 3)
    own, common = noise.own_noise(values), noise.seed_noise(values)
    parts = [own.times(4 / 5 / 3), common.times(1 / 3)]
    assert column(values).level("b").half == pytest.approx(noise.half_width(parts))
    assert common.value == pytest.approx(values.mean(0).var(ddof=1)) and common.freedom == 2


def test_the_prior_solves_its_equations():
    variances, freedom = np.array([1.0, 9.0, 0.2, 3.0, 40.0, 0.5]), 4.0
    found = noise.prior(variances, freedom)
    e = np.log(variances) - noise.digamma(2) + np.log(2)
    excess = e.var(ddof=1) - polygamma(1, 2)
    assert polygamma(1, found.weight / 2) == pytest.approx(excess) and found.weight < 5
    shift = noise.digamma(found.weight / 2) - np.log(found.weight / 2)
    assert found.value == pytest.approx(np.exp(e.mean() + shift))


def test_inverse_trigamma():
    y = 10.0 ** np.arange(-6, 7)
    assert polygamma(1, noise._inverse_trigamma(y)) == pytest.approx(y, rel=1e-12)


@pytest.mark.parametrize(("columns", "weight"), [(2, 0), (3, 2), (4, 3), (6, 5), (12, 5)])
def test_a_column_borrows_one_degree_of_each_other_and_five_at_most(columns, weight):
    found = noise.prior(np.ones(columns), 8.0)  # alike: they agree as well as can be
    assert found.weight == weight and (weight == 0) == np.isnan(found.value)


def test_a_variance_of_zero_says_nothing_and_is_drawn_to_the_prior():
    assert noise.prior([1, 1, 1, 0.0], 8.0) == noise.prior([1, 1, 1.0], 8.0)
    values = np.tile(np.arange(3.0)[:, None], 2)
    assert column(values).difference("a", "b").half == 0
    known = Priors(own=Prior(4.0, 2.0))
    found = column(values, priors=known).difference("a", "b")
    assert found.half == pytest.approx(student.ppf(0.975, 4) * np.sqrt(2 * (2 * 4 / 4) / 2))


def test_one_seed_has_no_interval_whatever_the_prior():
    sure = Prior(1.0, 5.0)
    one = column(numbers(4, 1), priors=Priors(sure, sure, sure, sure, sure), shared={"d"})
    for found in (one.difference("a", "b"), one.level("a", 1), one.difference("a", "d")):
        assert found.seeds == 1 and not found.known and np.isnan(found.low)


def test_a_row_that_stands_alone():
    values = numbers(1, 3)
    own = values[0].var(ddof=1)
    assert column(values).level("a").half == pytest.approx(student.ppf(0.975, 2) * (own / 3) ** 0.5)
    known = Priors(row=Prior(4.0, 2.0), seed=Prior(100.0, 5.0))
    found = column(values, priors=known).level("a")
    drawn = (2 * 4 + 2 * own) / 4
    assert found.half == pytest.approx(student.ppf(0.975, 4) * (drawn / 3) ** 0.5)
    others = column(numbers(4, 3)).raw()
    assert others["row"].value == pytest.approx(others["seed"].value + others["own"].value * 3 / 4)


def test_unequal_seeds():
    values = numbers(6, 4)
    values[5, 2:] = np.nan
    found = column(values)
    assert found.difference("a", "f").seeds == 2 and found.difference("a", "b").seeds == 4
    assert found.difference("a", "f").estimate == pytest.approx((values[0] - values[5])[:2].mean())
    own = noise.own_noise(values[:5])  # the largest block: five rows with four seeds
    assert found.difference("a", "f").parts == (own.times(2 / 2),)
    values[0, :2] = np.nan
    with pytest.raises(LookupError, match="a seed that all of"):
        column(values).difference("a", "f")


def test_the_best_are_the_best_mean_and_what_ties_with_it_where_no_seed_is_missing():
    for seed in range(30):
        values = np.random.default_rng(seed).normal(0, 1, (6, 1 + seed % 4)) + np.arange(6)[:, None]
        found = column(values)
        for sign in (1, -1):
            top = "abcdef"[int((sign * values.mean(1)).argmax())]
            gaps = {row: found.difference(row, top) for row in set("abcdef") - {top}}
            ties = {row for row, gap in gaps.items() if gap.low <= 0 <= gap.high}
            assert found.best(sign) == {top} | ties


def test_a_seed_that_only_one_row_has_makes_no_row_best():
    for seed in range(30):
        rng = np.random.default_rng(seed)
        values = rng.normal(0, 1, (5, 4)) + rng.normal(0, 3, 4)
        values[1:, 3] = np.nan
        values[rng.integers(5), rng.integers(3)] = np.nan
        lucky = values.copy()
        lucky[0, 3] += 1000
        assert column(values).best() == column(lucky).best() != set()
    for apart in ([[1, 2, np.nan], [np.nan, np.nan, 3]], [[1, np.nan], [np.nan, 2.0]]):
        assert column(apart).best() == set() and column(apart[:1]).best() == {"a"}
    alike = [[1.0, 9.0], [1.0, np.nan]]
    assert column(alike).best() == {"a", "b"} and column(np.zeros((0, 2))).best() == set()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("gap", [-9.0, -0.5, 0.5, 9.0])
@pytest.mark.parametrize("more", [[], [[-90, -91, -92, -90, -91]]])
def test_two_rows_that_share_one_seed_are_not_told_apart(sign, gap, more):
    rows = [[5, 6, 7, np.nan, np.nan], [np.nan, np.nan, 7 + gap, 6, 5]]
    rows = sign * np.array([*rows, *more])
    assert not column(rows).best(sign) & {"a", "b"}
    assert len(column(rows[:, 2:3]).best(sign)) == 1, "of one seed it is the number ahead"


def test_rows_outside_the_pool_say_nothing_of_others():
    values = numbers(6, 3)
    values[5] *= 20
    quiet = column(values, pool=list("abcde"))
    assert quiet.difference("a", "b") == column(values[:5]).difference("a", "b")
    assert quiet.difference("a", "f").half > 3 * quiet.difference("a", "b").half


def test_an_odd_row_has_a_noise_of_its_own_from_three_seeds_on():
    values = numbers(8, 3)
    values[7] += [30, 0, -30]
    assert list(noise.odd_rows(values)) == [7] and noise.odd_rows(values[:, :2]) == {}
    found = column(values)
    alone = column(values[:7], names="abcdefg").difference("a", "b")
    assert found.difference("a", "h").half > 5 * alone.half
    assert found.difference("a", "h").parts[-1].freedom == 2


def test_shared_rows_are_never_pooled_with_personal_ones():
    values = numbers(6, 3)
    values[5] += [40, 0, -40]
    found = column(values, shared={"f"})
    assert found.difference("a", "b") == column(values[:5]).difference("a", "b")
    own = noise.own_noise(values[:5])
    beside = Variance((values[5] - values[:5].mean(0)).var(ddof=1), 2)
    gap = noise.half_width([own.times(4 / 5 / 3), beside.times(1 / 3)])
    assert found.difference("a", "f").half == pytest.approx(gap)
    assert found.difference("f", "a").half == pytest.approx(gap)
    alone = student.ppf(0.975, 2) * np.sqrt(values[5].var(ddof=1) / 3)
    assert found.level("f").half == pytest.approx(alone)
    two = column(values, shared={"e", "f"})
    gap = student.ppf(0.975, 2) * np.sqrt((values[4] - values[5]).var(ddof=1) / 3)
    assert two.difference("e", "f").half == pytest.approx(gap)


def test_a_printed_spread_counts_only_where_it_is_larger():
    found = column(numbers(5, 3))
    own, wide = found.level("a", 1), found.level("a", 1, sd=50.0)
    assert found.level("a", 1, sd=0.01) == own and wide.half > 90
    assert found.level("a", 1, sd=50.0, runs=4).parts[-1] == Variance(625.0, 3)
    assert found.level("a", 3).half < own.half  # a mean of three draws


def test_intervals():
    one = Interval(3.0, (Variance(1.0, 8),), 3)
    assert (one.low, one.high) == pytest.approx((3 - 2.306, 3 + 2.306), abs=1e-3)
    assert one.above(0) and not one.above(1) and one.below(6) and not one.below(6, among=3)
    assert one.within(6) and not one.within(5) and one.within(2.4, around=3)
    assert one.minus(3).estimate == 0 and one.minus(3).half == one.half
    both = noise.summed([one, one])
    assert both.estimate == 6 and both.half == pytest.approx(one.half * 2**0.5)
    assert not noise.summed([one, Interval(1.0, (), 1)]).known and not Interval().known
    values = [1.0, 2.0, 4.0]
    mean = noise.of_values(values)
    assert mean.half == pytest.approx(student.ppf(0.975, 2) * np.std(values, ddof=1) / 3**0.5)
    assert not noise.of_values([1.0]).known
