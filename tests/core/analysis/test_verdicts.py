"""Verdicts: each word at its edges."""

from dataclasses import replace

import numpy as np
import pytest

from pfl_core.analysis import verdicts
from pfl_core.analysis.noise import Interval, Variance
from pfl_core.analysis.verdicts import Budget, Contrast, Verdict, of_accuracy, of_claim, of_lead

MANY = 1e9  # degrees of freedom: the interval is 1.96 sd to each side


def about(estimate, half, seeds=3):
    """An interval of this half width."""
    return Interval(estimate, (Variance((half / 1.959964) ** 2, MANY),), seeds)


ONE = Interval(9.0, (), 1)


# -- leads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimate", "half", "predicted", "printed", "word", "size"),
    [
        (3, 1, 2, 3, "ahead", "as printed"),
        (3, 1, 4, 3, "ahead", ""),  # neither 0 nor the printed lead is excluded
        (3, 1, 2, 9, "ahead", "smaller"),
        (5, 1, 2, 1, "ahead", "larger"),
        (5, 1, 6, -4, "ahead", "larger"),
        (-3, 1, 2, 3, "behind", ""),
        (0.5, 1, 2, 9, "no lead", ""),
        (0.5, 1, 2, 2, "too small to tell", ""),
        (0.5, 1.6, 2, 9, "open", ""),  # not inside 2 points
        (3, 4, 5, 3, "open", ""),
    ],
)
def test_a_lead(estimate, half, predicted, printed, word, size):
    got = of_lead(about(estimate, half), about(estimate, predicted), printed)
    assert (got.verdict, got.extent) == (word, size) and got.decided == (word != "open")
    assert f"printed {printed:+.1f}" in got.why


def test_an_open_lead_says_what_would_decide_it():
    wide = of_lead(about(1, 2.5), about(1, 4), 3)
    assert wide.reason == "too wide" and "about 19 seeds in place of 3" in wide.why
    assert "more than 30 seeds" in of_lead(about(1, 9), about(1, 12), 3).why
    assert of_lead(ONE, ONE, 3)[:2] == ("open", "one seed")
    low = of_lead(about(3, 1), about(3, 2), 3, "FedPer has 10 %")
    assert low.reason == "not learned" and "FedPer has 10 %" in low.why and "more rounds" in low.why


def test_equal_methods_are_ahead_by_chance_as_often_as_said():
    rng = np.random.default_rng(0)
    found = [of_lead(about(x, 1.96), about(x, 3), 5.0).verdict for x in rng.normal(0, 1, 4000)]
    assert abs(np.mean([v == "ahead" for v in found]) - 0.025) < 0.01
    assert abs(np.mean([v == "behind" for v in found]) - 0.025) < 0.01


# -- accuracies ------------------------------------------------------------------------------------

FULL, CUT = Budget(), Budget(rounds=4.0, fewer=True, rest=True)


@pytest.mark.parametrize(
    ("half", "printed", "budget", "word", "reason", "decided"),
    [
        (1.5, 81, FULL, "inside", "", True),
        (2.5, 81, FULL, "inside", "", False),
        (1.5, 81, CUT, "inside", "", True),
        (1.5, 81, CUT._replace(rest=False), "inside", "", False),
        (1.5, 81, FULL._replace(rest=False), "inside", "", True),
        (1.5, 85, FULL, "outside", "full budget", True),
        (1.5, 85, CUT, "outside", "fewer rounds, fewer samples", False),
        (1.5, 75, Budget(2.0), "outside", "fewer rounds", False),
        (1.5, 75, Budget(1.0, True), "outside", "fewer samples", False),
    ],
)
def test_an_accuracy(half, printed, budget, word, reason, decided):
    got = of_accuracy(about(80, half), printed, budget)
    assert (got.verdict, got.reason, got.decided) == (word, reason, decided)
    assert f"± {half}" in got.why


def test_an_accuracy_of_one_seed_is_open():
    assert of_accuracy(ONE, 80, FULL)[:2] == ("open", "one seed")


@pytest.mark.parametrize(
    ("moved", "half", "rows", "rest"),
    [
        (1.0, 0, (), True),
        (-1.1, 0, (), False),
        (None, 0, (), True),
        (1.8, 2.0, (1.9, 0.1), True),
        (1.8, 2.0, (2.1, 0.3), False),
        (0.0, 2.0, (5.0, 5.0), False),
        (0.5, np.nan, (0.5, 0.0), True),
    ],
)
def test_at_rest(moved, half, rows, rest):
    assert verdicts.at_rest(moved, half, rows) is rest


# -- claims ----------------------------------------------------------------------------------------

CLEAR, AGAINST = about(3, 1), about(-3, 1)
SMALL, WIDE = about(0.2, 1.2), about(2, 5)


@pytest.mark.parametrize(
    ("contrasts", "verdict", "reason"),
    [
        ([Contrast("", CLEAR)], "holds", ""),
        ([Contrast("", CLEAR), Contrast("", CLEAR)], "holds", ""),
        ([Contrast("", AGAINST)], "contradicted", ""),
        ([Contrast("", CLEAR), Contrast("", AGAINST)], "contradicted", ""),
        ([Contrast("", CLEAR, above=2.5)], "tie", ""),
        ([Contrast("", CLEAR, above=8)], "contradicted", ""),
        ([Contrast("", SMALL)], "tie", ""),
        ([Contrast("", SMALL, small=0)], "open", "too wide"),
        ([Contrast("", CLEAR), Contrast("", SMALL)], "tie", ""),
        ([Contrast("", SMALL), Contrast("", AGAINST)], "contradicted", ""),
        ([Contrast("", WIDE)], "open", "too wide"),
        ([Contrast("", CLEAR), Contrast("", WIDE)], "open", "too wide"),
        ([Contrast("", SMALL), Contrast("", WIDE)], "open", "too wide"),
        ([Contrast("", ONE)], "open", "one seed"),
        ([Contrast("", Interval()), Contrast("", ONE)], "open", "rows missing"),
        ([Contrast("", CLEAR, unlearned="FedPer is at 25 %")], "open", "not learned"),
        ([Contrast("", AGAINST, unlearned="FedPer is at 25 %")], "open", "not learned"),
        ([Contrast("", CLEAR, censored=True)], "open", "censored"),
        ([Contrast("", CLEAR, moved=1.5)], "open", "still moves"),
        ([Contrast("", CLEAR, moved=0.9)], "holds", ""),
        ([Contrast("", CLEAR, moved=0.9, rows=(3.0, 2.1))], "open", "still moves"),
        ([Contrast("", SMALL, moved=1.5)], "open", "still moves"),
        ([Contrast("", AGAINST, moved=1.5)], "open", "still moves"),  # it could get there
        ([Contrast("", AGAINST, moved=-5)], "contradicted", ""),  # further away
        ([Contrast("", about(1, 0.1), moved=5, unit="")], "holds", ""),  # no accuracy
        ([Contrast("", about(1, 0.1), moved=-5, unit="")], "open", "still moves"),
        ([], "not run", ""),
    ],
)
def test_a_claim(contrasts, verdict, reason):
    got = of_claim(contrasts)
    assert (got.verdict, got.reason) == (verdict, reason) and bool(got.why) == bool(contrasts)


def test_holms_correction_asks_more_of_one_among_many():
    near = Contrast("", about(-2.2, 2.0))  # p of 0.016, one-sided
    clear = Contrast("", CLEAR)
    assert of_claim([near]).verdict == "contradicted"
    assert of_claim([near, clear]).verdict == "open"
    assert of_claim([Contrast("", AGAINST), *[clear] * 9]).verdict == "contradicted"


def test_what_is_open_says_what_would_decide_it():
    for reason in verdicts.REASONS:
        assert reason == "too wide" or "would decide" in verdicts.REASONS[reason]
    assert "about 4 seeds in place of 3" in of_claim([Contrast("", about(3, 3.2))]).why
    moving = of_claim([Contrast("a - b", CLEAR, moved=1.5)])
    assert "by +1.5 in the last quarter" in moving.why and "more rounds" in moving.why


@pytest.mark.parametrize("unit", ["points", ""])
@pytest.mark.parametrize("rows", [(), (0.4, -2.5), (None, 3.0)])
@pytest.mark.parametrize("moved", [-5.0, -1.2, -0.1, 0.1, 1.2, 5.0])
def test_what_still_moves_says_by_how_much_it_or_a_row_did(moved, rows, unit):
    got = Contrast("", CLEAR, moved=moved, rows=rows, unit=unit)
    if got.rest:
        assert "move" not in got.decides()
        return
    alone = unit == "points" and verdicts.at_rest(moved, CLEAR.half)  # the difference stands still
    largest = {(): None, (0.4, -2.5): "-2.5", (None, 3.0): "+3.0"}[rows]
    said = f"its rows still move (by {largest}" if alone else f"it still moves (by {moved:+.1f}"
    assert said in got.decides() and "more rounds would decide it" in got.decides()


@pytest.mark.parametrize(
    ("moved", "small", "rest"),
    [(-0.004, 0.01, True), (-0.006, 0.01, False), (-0.002, 0.0, False), (0.006, 0.01, True)],
)
def test_a_weight_may_near_its_threshold_by_half_of_what_counts_as_a_tie(moved, small, rest):
    sharp = Contrast("", about(0.1, 0.001), moved=moved, unit="", small=small)
    assert sharp.rest is rest
    wide = replace(sharp, found=about(0.1, 0.05))
    assert wide.rest, "or by half its interval's width"
    assert (
        "by -0.000041 in"
        in replace(sharp, moved=-0.000041, small=0, found=about(0.1, 1e-6)).decides()
    )


def test_a_claim_on_most_cases():
    def judged(*found):
        return of_claim([Contrast("", f, group=str(i)) for i, f in enumerate(found)], most=True)

    assert judged(CLEAR, CLEAR, AGAINST).verdict == "holds"
    assert judged(CLEAR, AGAINST).verdict == "contradicted"
    assert judged(CLEAR, SMALL, AGAINST).verdict == "tie"
    assert judged(CLEAR, WIDE)[:2] == ("open", "too wide")
    assert judged(CLEAR, SMALL, AGAINST, AGAINST, WIDE, WIDE).verdict == "open"
    assert judged(CLEAR, SMALL, AGAINST, AGAINST, SMALL)[:2] == ("tie", "")


def test_a_claim_says_its_deciding_contrast():
    far, near = Contrast("far", about(5, 1)), Contrast("near", about(2, 1), above=0.5)
    assert of_claim([far, near]).why == (
        "the smallest of 2: near: +2.0 [+1.0, +3.0] points, to be above 0.5"
    )
    tiny = Contrast("w", about(0.00123, 0.0002), unit="", digits=2)
    assert str(tiny) == "w: +0.0012 [+0.0010, +0.0014]"
    assert str(Contrast("w", Interval())) == "w" and str(Contrast("w", ONE)) == "w: +9.0 points"


def test_readings():
    one, other = Verdict("ahead", why="a"), Verdict("behind", why="b")
    assert verdicts.over_readings({"as run": one, "averaged": one._replace(why="c")}) == one
    got = verdicts.over_readings({"as run": one, "averaged": other})
    assert got.verdict == "depends on reading" and not got.decided
    assert got.why == "as run: ahead (a); averaged: behind (b)"
    assert verdicts.over_readings({"as run": one}) == one


# -- order -----------------------------------------------------------------------------------------


def test_order():
    printed = np.array([80.0, 82.0, 84.0, 90.0])
    same = verdicts.order(printed, 2 * printed, Variance(1e-6, 9.0), 3)
    assert (same.rows, same.tau, same.tau_low, same.tau_high) == (4, 1, 1, 1)
    assert same.slope == pytest.approx(2) and same.ceiling == pytest.approx(1)
    assert verdicts.order(printed, -printed, Variance(1e-6, 9.0), 3).tau == -1
    noisy = verdicts.order(printed, 2 * printed, Variance(25.0, 9.0), 2)
    assert noisy.tau == 1 and noisy.tau_low < 0.7 and 0.2 < noisy.ceiling < 0.7
    one = verdicts.order(printed, printed, Variance(np.nan, 0.0), 1)
    assert one.tau == 1 and np.isnan([one.tau_low, one.ceiling]).all()
    uneven = verdicts.order(printed, [80, 83, 82, 90], Variance(1.0, 9.0), 2)
    assert (
        uneven.tau == pytest.approx(2 / 3) and uneven.slope_low < uneven.slope < uneven.slope_high
    )
    assert np.isnan(verdicts.order([1, 1, 1], [1, 2, 3], Variance(1.0, 9.0), 2).slope)
    with pytest.raises(ValueError, match="three or more"):
        verdicts.order([1, 2], [1, 2], Variance(1.0, 9.0), 2)


def test_a_noisy_order_stays_below_its_ceiling_no_more_than_by_chance():
    # Were a paper's order true, tau would be about the ceiling.
    rng, printed, taus = np.random.default_rng(1), np.linspace(80, 84, 9), []
    for _ in range(60):
        ours, theirs = (printed + rng.normal(0, 1 / k**0.5, 9) for k in (3, 1))
        taus.append(verdicts.order(theirs, ours, Variance(1.0, 50.0), 3).tau)
    ceiling = verdicts.order(printed, printed, Variance(1.0, 50.0), 3).ceiling
    assert np.mean(taus) == pytest.approx(ceiling, abs=0.05)


def test_words_are_told_apart():
    assert len({*verdicts.LEADS, *verdicts.ACCURACIES, *verdicts.CLAIMS}) == 5 + 2 + 3


@pytest.mark.parametrize(
    ("half", "said"), [(0.98, "-1.00 [-1.98, -0.02]"), (0.9, "-1.0 [-1.9, -0.1]")]
)
def test_an_end_beside_0_shows_its_side(half, said):
    assert verdicts.ends(about(-1, half), unit="") == said


def test_what_is_below_by_itself_alone_is_told_so():
    below = Contrast("", about(-1.3, 1))
    assert below.found.below(0) and not below.found.below(0, 12)
    judged = of_claim([below, *[Contrast("", about(3, 1))] * 11])
    assert judged.verdict == "open" and "below alone, not as one of 12 (Holm)" in judged.why
