"""Verdicts: what intervals cover, and what makes a claim hold, fail or stay open."""

import numpy as np
import pytest

from pfl_core.analysis import verdicts
from pfl_core.analysis.verdicts import (
    Contrast,
    Interval,
    beside,
    cell_interval,
    interval,
    of_cell,
    of_claim,
)

DRAWS = 2000


def tables(seeds, client_sd, rows=8, clients=20, seed_sd=3.0):
    """Made-up tables (rows, seeds): seeds move all rows together, rows have a noise of their own."""
    rng = np.random.default_rng(seeds)
    for _ in range(DRAWS):
        seed = rng.normal(0, seed_sd, seeds) + rng.normal(0, client_sd, (seeds, clients)).mean(1)
        noise = rng.normal(0, 1, (rows, seeds))
        yield seed + noise + rng.normal(0, client_sd, (rows, seeds, clients)).mean(2)


FIRST_TWO = np.array([1.0, -1.0, 0, 0, 0, 0, 0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("client_sd", [1, 3])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_the_interval_of_a_difference_covers_what_it_says(seeds, client_sd):
    found = [interval([t], [FIRST_TWO]) for t in tables(seeds, client_sd)]
    assert 0.93 <= np.mean([i.low <= 0 <= i.high for i in found]) <= 0.97
    # Two equal methods are called different, one way or the other, in at most 6 %.
    held = [of_claim([Contrast("", i if s else mirrored(i))]) for i in found for s in (0, 1)]
    assert sum(v.verdict == "holds" for v in held) / DRAWS <= 0.06


def mirrored(i):
    return i._replace(estimate=-i.estimate, low=-i.high, high=-i.low)


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("seed_sd", [0.5, 3.0])
def test_the_interval_of_a_cell_covers_at_least_what_it_says(seeds, seed_sd):
    found = [cell_interval(t, 0) for t in tables(seeds, 1, seed_sd=seed_sd)]
    assert np.mean([i.low <= 0 <= i.high for i in found]) >= 0.93


def test_a_row_with_a_noise_of_its_own_has_an_interval_of_its_own():
    rng = np.random.default_rng(0)
    hit = 0
    for _ in range(DRAWS):
        noise = rng.normal(0, [[10]] + [[1]] * 7, (8, 3))
        found = interval([noise + rng.normal(0, 3, 3)], [FIRST_TWO])
        hit += found.low <= 0 <= found.high
    assert hit / DRAWS >= 0.9  # with the noise of the others it would be 0.4


def test_a_difference_over_two_columns():
    a, b = (np.random.default_rng(s).normal(0, 1, (8, 3)) for s in (1, 2))
    both = interval([a, b], [FIRST_TWO, -FIRST_TWO])
    assert both.estimate == pytest.approx((a[0] - a[1] - b[0] + b[1]).mean())
    one = interval([a], [FIRST_TWO])
    assert both.error > one.error and both.freedom > one.freedom


@pytest.mark.slow
def test_a_method_far_ahead_holds_at_three_seeds():
    found = [interval([t], [FIRST_TWO]) for t in shifted(4.0)]
    assert np.mean([of_claim([Contrast("", i)]).verdict == "holds" for i in found]) > 0.95
    behind = [interval([t], [-FIRST_TWO]) for t in shifted(4.0)]
    assert np.mean([of_claim([Contrast("", i)]).verdict == "contradicted" for i in behind]) > 0.95


def shifted(points):
    for table in tables(3, 0):
        table[0] += points
        yield table


# -- claims ----------------------------------------------------------------------------------------

CLEAR, AGAINST = Interval(3, 2, 4, 0.4, 8, 3), Interval(-3, -4, -2, 0.4, 8, 3)
SMALL, WIDE = Interval(0.2, -1, 1.4, 0.5, 8, 3), Interval(2, -3, 7, 2, 8, 3)
ONE = Interval(9, np.nan, np.nan, np.nan, 0, 1)


@pytest.mark.parametrize(
    ("contrasts", "verdict", "reason"),
    [
        ([Contrast("", CLEAR)], "holds", ""),
        ([Contrast("", CLEAR), Contrast("", CLEAR)], "holds", ""),
        ([Contrast("", AGAINST)], "contradicted", ""),
        ([Contrast("", CLEAR), Contrast("", AGAINST)], "contradicted", ""),
        ([Contrast("", CLEAR, above=2.5)], "undecided", "tie"),
        ([Contrast("", CLEAR, above=8)], "contradicted", ""),
        ([Contrast("", SMALL)], "undecided", "tie"),
        ([Contrast("", SMALL, small=0)], "undecided", "too wide"),
        ([Contrast("", WIDE)], "undecided", "too wide"),
        ([Contrast("", CLEAR), Contrast("", WIDE)], "undecided", "too wide"),
        ([Contrast("", ONE)], "undecided", "one seed"),
        ([Contrast("", CLEAR, unlearned="FedPer is at 25 %")], "undecided", "not learned"),
        ([Contrast("", AGAINST, unlearned="FedPer is at 25 %")], "undecided", "not learned"),
        ([Contrast("", CLEAR, censored=True)], "undecided", "censored"),
        ([Contrast("", CLEAR, moved=-1.5)], "undecided", "stopped early"),
        ([Contrast("", AGAINST, moved=1.5)], "undecided", "stopped early"),
        ([Contrast("", CLEAR, moved=-0.9)], "holds", ""),  # less than its interval
        ([Contrast("", CLEAR, moved=5)], "holds", ""),  # away from the threshold
        ([Contrast("", AGAINST, moved=-5)], "contradicted", ""),
        ([], "not run", ""),
    ],
)
def test_a_claim(contrasts, verdict, reason):
    got = of_claim(contrasts)
    assert (got.verdict, got.reason) == (verdict, reason) and bool(got.why) == bool(contrasts)


def test_many_contrasts_are_adjusted_for_their_number():
    slightly = Interval(-1.2, -2.35, -0.05, 0.5, 8, 3)  # p = 0.02 of one side
    assert of_claim([Contrast("", slightly)]).verdict == "contradicted"
    assert of_claim([Contrast("", slightly)] * 5).verdict == "undecided"


@pytest.mark.parametrize(
    ("groups", "verdict"),
    [
        ([CLEAR, CLEAR, AGAINST], "holds"),
        ([CLEAR, AGAINST, AGAINST], "contradicted"),
        ([CLEAR, AGAINST], "contradicted"),  # half is not most
        ([CLEAR, WIDE, AGAINST], "undecided"),
        ([CLEAR, CLEAR, WIDE], "holds"),
    ],
)
def test_most_cases_are_more_than_half(groups, verdict):
    contrasts = [Contrast("", found, group=str(i)) for i, found in enumerate(groups)]
    assert of_claim(contrasts, most=True).verdict == verdict


def test_a_small_number_is_not_written_as_zero():
    tiny = Contrast("a - b", CLEAR._replace(estimate=3e-5, low=2e-5, high=4e-5), unit="", digits=4)
    assert str(tiny).startswith("a - b: +0.000030 [+0.000020, +0.000040]")
    assert (
        str(Contrast("a - b", CLEAR._replace(estimate=0.0, low=0.0, high=0.0)))
        == "a - b: +0.0 [+0.0, +0.0] points"
    )


def test_why_names_the_contrast_that_decides():
    first = Contrast("FedPer - FedAvg, k=4", CLEAR, above=1)
    assert of_claim([first]).why == "FedPer - FedAvg, k=4: +3.0 [+2.0, +4.0] points, to be above 1"
    both = of_claim([first, Contrast("FedPer - Local, k=4", AGAINST)])
    assert "the clearest of 2: FedPer - Local, k=4: -3.0 [-4.0, -2.0] points" in both.why
    low = of_claim([Contrast("a", CLEAR, unlearned="FedPer has 25.0 %")])
    assert low.why.endswith("a row has not learned: FedPer has 25.0 %")


# -- cells -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "moved", "verdict", "reason"),
    [
        (-1, 1.5, None, "agrees", ""),
        (1.2, 1.9, 0.0, "agrees", ""),
        (-1, 4, None, "close", ""),
        (3, 4, 0.0, "close", ""),
        (4, 8, 0.1, "differs", ""),
        (-9, -6, None, "differs", ""),
        (4, 8, -1.5, "undecided", "stopped early"),
        (-17, -6, 2.3, "undecided", "stopped early"),  # less than its interval, which seeds make
        (4, 8, -0.9, "differs", ""),
        (4, 8, 2.5, "differs", ""),  # away from the published number
        (-3, 8, 0.0, "undecided", "too wide"),
    ],
)
def test_a_cell(low, high, moved, verdict, reason):
    got = of_cell(Interval((low + high) / 2, low, high, 1.0, 2, 2), moved)
    assert (got.verdict, got.reason) == (verdict, reason)


@pytest.mark.parametrize(
    ("moved", "missing", "reason"),
    [
        (0.9, 8.0, "stopped early"),  # 3 doublings more, of which a quarter is 0.4: +6.5
        (0.3, 8.0, ""),  # +2.2
        (0.9, 1.0, ""),  # there are no more rounds
        (-0.9, 8.0, ""),  # away from the published number
        (1.1, 1.0, "stopped early"),
    ],
)
def test_a_cell_differs_if_the_papers_rounds_would_not_close_the_gap(moved, missing, reason):
    assert of_cell(Interval(-5.5, -7, -4, 1.0, 2, 2), moved, missing).reason == reason


@pytest.mark.parametrize(
    ("low", "high", "verdict", "reason"),
    [(4, 8, "undecided", "fewer samples"), (-3, 8, "undecided", "too wide"), (3, 4, "close", "")],
)
def test_images_that_are_cut_leave_a_gap_open(low, high, verdict, reason):
    found = Interval((low + high) / 2, low, high, 1.0, 2, 2)
    assert of_cell(found, 0.0, fewer=True)[:2] == (verdict, reason)


def test_a_cell_of_one_seed_is_undecided():
    table = np.array([[90.0], [80.0]])
    assert of_cell(beside(cell_interval(table, 0), 90.0))[:2] == ("undecided", "one seed")


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_a_published_number_is_of_one_draw_of_clients(seeds):
    rng, alone, both = np.random.default_rng(0), [], []
    for t in tables(seeds + 1, 1):  # the paper's draw is the last one, ours are the others
        found = cell_interval(t[:, :-1], 0)
        alone.append(abs(found.estimate - t[0, -1]) <= found.half)
        difference = beside(found, t[0, -1], abs(rng.normal(0, 0.1)))
        both.append(difference.low <= 0 <= difference.high)
    assert np.mean(both) >= 0.93
    assert seeds == 2 or np.mean(alone) < 0.9  # more so, the more seeds of ours


def test_the_papers_own_spread_counts_where_it_is_larger():
    found = cell_interval(np.random.default_rng(0).normal(90, 0.5, (6, 3)), 0)
    bare, small, large, known = (beside(found, 90.0, *sd) for sd in ((), (0.1,), (3.0,), (3.0, 3)))
    assert found.half < bare.half == small.half < large.half < known.half  # t of two degrees
    assert {found.estimate - 90} == {i.estimate for i in (bare, small, large, known)}


def test_reasons_say_what_they_mean():
    assert set(verdicts.MEANS) == set(verdicts.REASONS)
