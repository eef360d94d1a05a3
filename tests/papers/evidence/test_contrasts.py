"""What claims are judged on: values by seed, three quarters of the rounds, and who has learned."""

import itertools
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from pfl_core import Experiment
from pfl_core.analysis import verdicts
from pfl_core.experiments.metrics import ROW_COLUMNS
from pfl_papers.evidence import committed, diverged
from pfl_papers.evidence import contrasts as evidence
from pfl_papers.evidence.contrasts import Evidence, majority

RULES = SimpleNamespace(report=dict(select="last", when="before", average="client"), when={})


def run(row, series, seed=0, column="A", when="before", metric="acc_pct"):
    """Rows of one run, its accuracy after each round."""
    base = dict.fromkeys(ROW_COLUMNS, "") | dict(row=row, column=column, seed=seed, metric=metric)
    base |= dict(run=f"{row}/{column}/{seed}", when=when, split="test", average="client")
    return pd.DataFrame([base | {"rounds": r, "value": v} for r, v in enumerate(series)])


def rows(**ends):
    """{row: last accuracy by seed}; all begin at 10 and reach their end at half of 8 rounds."""
    return pd.concat(
        [run(r, [10.0] * 4 + [v] * 5, s) for r, vs in ends.items() for s, v in enumerate(vs)]
    )


def of(frame, rules=RULES):
    return Evidence(frame, rules)


def test_rows_are_compared_seed_by_seed():
    got = of(rows(a=(80, 70, 60), b=(77, 67.5, 56.5), c=(50, 40, 30))).ahead("a", "b", "A", by=1)
    assert got.found.estimate == pytest.approx(3) and got.found.seeds == 3
    assert got.clears and got.above == 1 and got.moved == pytest.approx(0)
    assert str(got).startswith("a - b, A: +3.0 [")
    # Without the pairs the seeds' ten points would hide it.
    assert got.found.half < 2 < np.std([80, 70, 60])


def test_rows_that_the_paper_does_not_print_do_not_widen_its_intervals():
    printed = rows(a=(80, 70, 60), b=(77, 67.5, 56.5), c=(50, 40, 30.5))
    alone = of(printed).ahead("a", "b", "A").found
    both = pd.concat([printed, rows(ours=(30, 44, 35))])
    assert Evidence(both, RULES, "abc").ahead("a", "b", "A").found == alone
    assert of(both).ahead("a", "b", "A").found.half > 2 * alone.half
    assert Evidence(both, RULES, "abc").ahead("a", "ours", "A").found.estimate > 0


def test_only_seeds_that_both_have_count():
    got = of(rows(a=(80, 70, 60), b=(79, 69))).ahead("a", "b", "A")
    assert got.found.seeds == 2 and got.found.estimate == pytest.approx(1)
    one = of(rows(a=(80, 70), b=(79,))).ahead("a", "b", "A")
    assert verdicts.of_claim([one])[:2] == ("open", "one seed")


def test_accuracies_on_training_data_alone_are_compared():
    alike = [run(r, [10.0] * 4 + [v] * 5, s) for r in "cd" for s, v in enumerate((80, 70))]
    for other in ([], alike):  # no accuracy on test data, or that of other rows
        trained = rows(a=(80, 70), b=(77, 66.5)).assign(metric="train_acc_pct")
        got = of(pd.concat([trained, *other])).ahead("a", "b", "A", metric="train_acc_pct")
        assert got.found.seeds == 2 and got.found.estimate > 3 and not got.unlearned


@pytest.mark.parametrize("missing", [("a", "c"), ("c", "a")])
def test_what_was_not_run_is_named(missing):
    with pytest.raises(LookupError, match="c / A"):
        of(rows(a=(80, 70), b=(79, 69))).ahead(*missing, "A")
    with pytest.raises(LookupError, match="purity of all rows"):
        of(rows(a=(80, 70))).derived("purity")


def test_a_moving_contrast_is_never_final():
    a = pd.concat([run("a", [10, 20, 30, 40, 50, 60, 70, 80, 90], s) for s in (0, 1, 2)])
    b = pd.concat([run("b", [10, 92, 92, 92, 92, 92.2, 92, 92, 92.1], s) for s in (0, 1, 2)])
    got = of(pd.concat([a, b])).ahead("a", "b", "A")
    assert got.moved == pytest.approx(19.9)  # since round 6 of 8
    assert verdicts.of_claim([got])[:2] == ("open", "still moves")
    back = of(pd.concat([a, b])).ahead("b", "a", "A")
    assert verdicts.of_claim([back])[:2] == ("open", "still moves")


def test_a_gap_over_two_columns():
    both = pd.concat(
        [rows(a=(80, 70), b=(60, 50.5)), rows(a=(90, 80), b=(88, 77)).assign(column="B")]
    )
    both["run"] = both.run + both.column
    weights = {("a", "A"): 1.0, ("b", "A"): -1.0, ("a", "B"): -1.0, ("b", "B"): 1.0}
    got = of(both).contrast("the gap shrinks", weights)
    assert got.found.estimate == pytest.approx(19.75 - 2.5)


def test_rows_read_after_local_training_are_there_by_themselves():
    after = run("fedavg", [30, 60], when="after")
    frame = pd.concat([run("fedavg", [10, 40]), after, run("local", [10, 50])])
    found = of(frame)
    assert found.methods("A") == ["fedavg", "fedavg_ft", "local"]
    assert found.ahead("fedavg_ft", "local", "A").found.estimate == 10


# -- who has learned -------------------------------------------------------------------------------


@pytest.fixture
def known(monkeypatch):
    """Every run is one of ten clients of digits with two labels each."""
    experiment = Experiment(dataset="digits", partition="shards", clients=10, model="cnn")
    monkeypatch.setattr(committed, "experiment", lambda run: experiment)
    majority.cache_clear()
    yield experiment
    majority.cache_clear()


def test_the_majority_level_is_that_of_the_clients_labels(known):
    counts = committed.label_counts(known)
    assert majority("x") == pytest.approx(100 * (counts.max(1) / counts.sum(1)).mean())
    assert majority("x", "pooled") == pytest.approx(100 * counts.max(1).sum() / counts.sum())


def test_runs_that_were_dealt_otherwise_have_levels_of_their_own(known, monkeypatch):
    level = majority("x")
    monkeypatch.setattr(committed, "experiment", lambda run: known.but(partition_seed=9))
    majority.cache_clear()
    other = majority("x")
    assert other != level == pytest.approx(other, abs=20)


@pytest.mark.parametrize(
    "how", [dict(select="best_test"), dict(when="after"), dict(average="pooled")], ids=str
)
def test_a_rule_given_aside_is_as_good_as_the_papers_own(known, how, monkeypatch):
    uneven = known.but(partition="dirichlet", partition_args={"alpha": 0.5})
    monkeypatch.setattr(committed, "experiment", lambda run: uneven)
    assert abs(majority("x") - majority("x", "pooled")) > 0.5
    series = dict(a=[10, 99, 95], b=[10, 22, 20], c=[10, 22, 10])  # b guesses, c stays
    first = pd.concat([run(r, of, s, when=w) for r, of in series.items() for w, s in BOTH])
    first.loc[first.when == "after", "value"] += 3
    second = first.assign(average="pooled", value=first.value - 2)
    frame = pd.concat([first, second], ignore_index=True)
    ruled = SimpleNamespace(report=RULES.report | how, when={})
    aside, own = Evidence(frame, RULES, **how), of(frame, ruled)
    pd.testing.assert_frame_equal(aside.reported(), own.reported())
    assert not aside.reported().value.equals(of(frame).reported().value)
    for pair in itertools.permutations(series, 2):
        assert aside.ahead(*pair, "A") == own.ahead(*pair, "A")


BOTH = [(when, seed) for when in ("before", "after") for seed in (0, 1)]


def test_an_arm_at_its_clients_majority_label_never_holds(known):
    level, rng = majority("x"), np.random.default_rng(0)
    for _ in range(20):
        a = level + rng.normal(0, 0.3, 3)
        got = of(rows(a=a, b=a - 20)).ahead("a", "b", "A")
        assert verdicts.of_claim([got])[:2] == ("open", "not learned")
    assert "most common labels alone give" in got.unlearned
    learned = of(rows(a=(95, 95.2, 95.1), b=(60, 60.1, 60.2))).ahead("a", "b", "A")
    assert verdicts.of_claim([learned]).verdict == "holds"


def test_a_losing_arm_that_has_not_left_round_0_decides_nothing(known):
    got = of(rows(a=(95, 95.2, 95.1), b=(10.2, 9.8, 10.1))).ahead("a", "b", "A")
    assert got.unlearned == "b has not left round 0"
    assert verdicts.of_claim([got])[:2] == ("open", "not learned")


def test_a_losing_arm_that_began_trained_may_stay_where_it_was(known):
    flat = pd.concat([run("b", [60.0] * 9, s) for s in range(3)])
    both = pd.concat([rows(a=(95, 95.2, 95.1)), flat])
    assert verdicts.of_claim([of(both).ahead("a", "b", "A")]).verdict == "holds"


def test_unknown_runs_have_no_level():
    assert np.isnan(majority("0" * 16))


def lost(row, *seeds):
    """What is kept of runs that diverged."""
    parts = [run(row, [10.0, 9.0], s).tail(1) for s in seeds]
    about = dict(metric=diverged.METRIC, average="derived", split="", when="")
    return pd.concat(parts).assign(**about)


@pytest.mark.parametrize("ahead", [("a", "b"), ("b", "a"), ("a", "fedavg_ft"), ("fedavg", "a")])
@pytest.mark.parametrize("seeds", [(2,), (0, 1, 2)])
def test_seeds_that_ended_well_decide_nothing_where_others_diverged(known, ahead, seeds):
    names = {"a": (95, 95.2, 95.1), "b": (60, 61, 62), "fedavg": (60, 61, 62)}
    own = "fedavg" if "fedavg" in "".join(ahead) else "b"
    left = rows(**names).query("not (row == @own and seed in @seeds)")
    after = left[left.row == "fedavg"].assign(when="after")
    got = of(pd.concat([left, after, lost(own, *seeds)])).ahead(*ahead, "A")
    assert verdicts.of_claim([got])[:2] == ("open", "diverges")
    assert got.lost.endswith(f"diverges ({len(seeds)} of 3)") and got.lost in got.decides()


# -- numbers that were derived ---------------------------------------------------------------------


def derived(metric, **by_row):
    frames = [
        run(r, [v], s, metric=metric).assign(average="derived", split="", when="")
        for r, vs in by_row.items()
        for s, v in enumerate(vs)
    ]
    return pd.concat(frames)


def test_derived_numbers_are_judged_on_their_own_seeds():
    found = of(derived("weight", near=(0.30, 0.31, 0.32), far=(0.1, 0.1, 0.11)))
    gap = found.derived("weight", "near") - found.derived("weight", "far")
    got = found.above("near - far", gap, small=0.01)
    assert got.clears and got.found.parts[0].freedom == 2 and got.moved is None and got.unit == ""
    assert verdicts.of_claim([got]).why == "near - far: +0.21 [+0.19, +0.22]"
    with pytest.raises(LookupError, match="nothing"):
        found.above("nothing", pd.Series([np.nan]))


@pytest.mark.parametrize(
    ("earlier", "moved", "said"),
    [
        ((0.35, 0.36, 0.37), -0.05, ("open", "still moves")),  # towards the threshold
        ((0.25, 0.26, 0.27), 0.05, ("holds", "")),  # away from it
        ((0.3, 0.31), None, ("holds", "")),  # of other seeds: not known
    ],
)
def test_derived_numbers_are_asked_whether_they_are_at_rest(earlier, moved, said):
    now = derived("weight", near=(0.30, 0.31, 0.32), far=(0.1, 0.1, 0.1))
    past = derived("weight" + evidence.PAST, near=earlier, far=(0.1, 0.1, 0.1)[: len(earlier)])

    def judge(found):
        gap = found.derived("weight", "near") - found.derived("weight", "far")
        return [found.above("near - far", gap), found.above("either way", gap, -1)]

    for got in evidence.with_past(judge, of(pd.concat([now, past]))):
        assert got.moved == (None if moved is None else pytest.approx(moved))
        assert got.found == judge(of(now))[0].found, "past numbers are not counted as these"
        assert verdicts.of_claim([got])[:2] == said
    assert all(c.moved is None for c in evidence.with_past(judge, of(now)))


def test_a_pooled_number_that_was_derived_is_asked_whether_it_is_at_rest():
    now = derived("gap_points", a=(9, 8, 9.5), b=(2, 1, 2.2))
    past = derived("gap_points" + evidence.PAST, a=(13, 12, 13.5), b=(2, 1, 2.2))
    got = of(pd.concat([now, past])).ahead("a", "b", "A", metric="gap_points")
    assert (got.moved, got.approaches) == (pytest.approx(-4), True)


def test_another_metric_is_read_at_the_last_round():
    frame = pd.concat([run("a", [9, 4], metric="acc_sd"), run("b", [9, 7], metric="acc_sd")])
    assert evidence.reproduced(frame, RULES, "acc_sd").value.tolist() == [4, 7]
    assert of(frame).ahead("b", "a", "A", metric="acc_sd").found.estimate == 3
