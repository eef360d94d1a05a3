"""What each judge asks of made-up rows."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from pfl_core.analysis import verdicts
from pfl_core.analysis.plots import label
from pfl_core.experiments.store import ROW_COLUMNS
from pfl_papers.compare import fullest, judged
from pfl_papers.evidence import asks, judges
from pfl_papers.evidence.asks import Ask, Measure, Terms
from pfl_papers.evidence.contrasts import PAST, Evidence
from pfl_papers.papers import base
from pfl_papers.papers.base import PAPERS

TERMS = Terms(
    {
        "gain": Measure(unit="points", small=2.0, digits=1),
        "share": Measure("{difference} of the weight", across=True, scale=100),
        "other": Measure(name="the other one", across=True),
        "lost": Measure(pooled=True, least=True),
    },
    our_columns=("ours *",),
)


class OurPaper:
    report = dict(select="last", when="before", average="client")  # noqa: RUF012
    when: dict[str, str] = {}  # noqa: RUF012


def table(cells, metric="acc_pct", average="client", seeds=3):
    """Rows of {(row, column): value}; a hundredth is noise, and all rows begin at 0."""
    random, out = np.random.default_rng(0), []
    for (row, column), value in cells.items():
        noise = random.normal(0, 0.01, seeds)
        for seed, moved in enumerate(noise - noise.mean()):
            line = dict.fromkeys(ROW_COLUMNS, "") | dict(row=row, column=column, seed=seed)
            line |= dict(run=f"{row}{column}{seed}", metric=metric, average=average)
            line |= dict(when="before", split="test", dataset="mnist")
            out += [
                line | dict(rounds=n, value=v)
                for n, v in ((0, 0.0), (4, value + moved), (8, value + moved))
            ]
    return pd.DataFrame(out, columns=ROW_COLUMNS)


def derived(metric, cells):
    rows = table(cells, metric, "derived")
    return rows[rows["rounds"] == 8]


def asked(judge, compares, how="", rows=None, printed=(), **more):
    ask = Ask(judge, asks.comparisons(compares), **asks.options(how), terms=TERMS)
    return judges.judge(replace(ask, **more), Evidence(rows, OurPaper(), printed))


def said(found):
    return {c.says: round(c.found.estimate) for c in found}


TWO = table({("a", "x"): 70, ("b", "x"): 60, ("c", "x"): 50, ("a", "y"): 40, ("b", "y"): 46})
GAINS = derived("gain", {("a", "x"): 9, ("b", "x"): 4, ("a", "y"): -1, ("b", "y"): 2})
# A judge, what it compares and how, and what it makes of these rows.
JUDGED = [
    ("ahead", "a > b", "", {"a - b, x": 10, "a - b, y": -6}),
    ("ahead", "b < a", "", {"a - b, x": 10, "a - b, y": -6}),
    ("ahead", "a > b | c", "", {"a - b, x": 10, "a - c, x": 20}),
    ("ahead", "a > b @ y", "", {"a - b, y": -6}),
    ("ahead", "a > b @ !y", "", {"a - b, x": 10}),
    ("ahead", "a > b @ x; b > a @ y", "", {"a - b, x": 10, "b - a, y": 6}),
    ("ahead", "* > b", "", {"a - b, x": 10, "c - b, x": -10, "a - b, y": -6}),
    ("ahead", "* > b", "but=c", {"a - b, x": 10, "a - b, y": -6}),
    ("ahead", "[ac] > b", "but=a @ y", {"a - b, x": 10, "c - b, x": -10}),
    ("ahead", "a > b", "mean", {"a - b, mean of x, y": 2}),
    ("ahead", "a - b > b - c", "", {"a - b - b - c, x": 0}),
    ("ahead", "a > b", "said=more in {column}", {"more in x": 10, "more in y": -6}),
    ("ahead", "a > b", "metric=gain", {"a - b, x": 5, "a - b, y": -3}),
    ("ahead", "gain > 0", "metrics; row=a", {"gain, x": 9, "gain, y": -1}),
    ("ladder", "a > b > c", "", {"a - b, x": 10, "b - c, x": 10}),
    ("ladder", "c < b < a", "", {"b - c, x": 10, "a - b, x": 10}),
    ("best", "b", "", {"b - a, x": -10, "b - c, x": 10, "b - a, y": 6}),
    ("best", "b", "metric=gain", {"b - a, x": -5, "b - a, y": 3}),
    ("alike", "a | b", "within=1", {"a - b, x": 10, "b - a, x": -10, "a - b, y": -6, "b - a, y": 6}),
    ("alike", "* | !c @ x", "within=1", {"a - b, x": 10, "b - a, x": -10}),
    ("change", "x > y", "row=a", {"a, x - y": 30}),
    ("change", "x > z > y", "row=a", {"a, x - y": 30}),
    ("change", "x > y", "row=*", {"a, x - y": 30, "b, x - y": 14}),
    ("change", "x > y", "row=a - b", {"a - b, x - y": 16}),
    ("equal", "x == y", "row=a; metric=gain; within=1", {"a, x - y": 10}),
]  # fmt: skip


@pytest.mark.parametrize(("judge", "compares", "how", "wanted"), JUDGED)
def test_what_a_judge_compares(judge, compares, how, wanted):
    found = asked(judge, compares, how, pd.concat([TWO, GAINS]))
    if judge == "equal":
        assert [round(c.found.estimate) for c in found] == [10, -10] and set(said(found)) == {
            *wanted
        }
    else:
        assert said(found) == wanted
    within = asks.options(how).get("within", 0)
    assert {c.above for c in found} == {-within}


def test_a_difference_has_to_be_above_its_threshold():
    for by, verdict in ((5, "holds"), (15, "contradicted")):
        found = asked("ahead", "a > b @ x", f"by={by}", TWO)
        assert verdicts.of_claim(found).verdict == verdict


def test_who_is_alike_is_so_either_way():
    near = table({("a", "x"): 60.5, ("b", "x"): 60})
    for within, verdict in ((1, "holds"), (0.2, "contradicted")):
        found = asked("alike", "a | b", f"within={within}", near)
        assert verdicts.of_claim(found).verdict == verdict


def test_rows_and_columns_of_ours_decide_nothing():
    ours = table({("b (twice)", "x"): 99, ("b", "ours x"): 99, ("a", "ours x"): 1})
    rows = pd.concat([TWO, ours])
    assert said(asked("best", "a", rows=rows)) == said(asked("best", "a", rows=TWO))
    assert said(asked("ahead", "b (twice) > b", rows=rows)) == {"b (twice) - b, x": 39}, "by name"


def test_the_best_is_open_while_printed_rows_are_missing():
    found = asked("best", "a", rows=TWO, printed=("a", "b", "c", "d"))
    assert [c.says for c in found if not c.found.seeds] == ["a - d, x", "a - c, y", "a - d, y"]
    found = asked("best", "a", "but=d | c @ y", TWO, printed=("a", "b", "c", "d"))
    assert all(c.found.seeds for c in found)


@pytest.mark.parametrize("how", ["but=b @ x", "but=b @ x; most"])
def test_a_row_that_is_compared_nowhere_leaves_a_claim_open(how):
    rows = TWO[TWO.column == "x"]  # where nothing is asked of b
    found = asked("ahead", "a > b | c", how, rows)
    assert [c.says for c in found if not c.found.seeds] == [f"b: {judges.ELSEWHERE}"]
    verdict = verdicts.of_claim(found, most="most" in how)
    assert (verdict.verdict, verdict.reason) == ("open", "rows missing")
    both = asked("ahead", "a > b", how, TWO)
    assert said(both) == {"a - b, y": -6}, "where it is compared nothing is missing"


@pytest.mark.parametrize("name", PAPERS)
def test_no_claim_holds_of_rows_that_were_compared_nowhere(name):
    said = judged.claims(name)
    for claim, verdict in zip(base.paper(name).claims, said.verdict, strict=True):
        if verdict not in ("holds", "tie") or claim.ask is None or claim.ask.metrics:
            continue
        if claim.ask.said or claim.ask.judge not in ("ahead", "ladder", "best", "alike"):
            continue
        rows = pd.concat([part.rows() for part in fullest.parts(name)])
        rows = fullest.of_fullest_profile(rows[rows.artefact == claim.needs])
        says = " ".join(c.says for c in claim.judge(Evidence(rows, base.paper(name))))
        named = [n for part in claim.ask.comparisons for n in part.names]
        for row in (r for n in named if not asks.is_pattern(n) for r in asks.term(n)):
            assert label(row) in says, (claim.key, row)


@pytest.mark.parametrize("name", PAPERS)
def test_no_claim_on_computed_numbers_is_judged_without_asking_whether_they_are_at_rest(name):
    parts = pd.concat([part.rows() for part in fullest.parts(name)])
    parts = parts[~parts.metric.str.endswith(PAST)]
    for claim in base.paper(name).claims:
        rows = fullest.of_fullest_profile(parts[parts.artefact == claim.needs])
        made = rows[rows["average"] == "derived"]
        past = made.assign(metric=made.metric + PAST, value=made.value + 0.5 * (made.seed + 1))
        try:
            now = claim.judge(Evidence(rows, base.paper(name)))
            then = claim.judge(Evidence(pd.concat([rows, past]), base.paper(name)))
        except LookupError:
            continue
        assert [c.found for c in now] == [c.found for c in then]
        if claim.ask is None or claim.ask.metrics or claim.ask.metric in set(made.metric):
            asked = [c for c in then if c.found.seeds and not c.rows]
            assert all(c.moved is not None for c in asked), claim.key


def test_only_what_the_paper_prints_is_asked():
    own = {"x": pd.Series(dict(a=9.0, b=10.0, c=8.0)), "y": pd.Series(dict(a=9.0, b=7.0))}
    for asked_for, wanted in (
        ("printed", ["a - b, x", "a - c, x", "a - b, y"]),
        ("behind", ["a - c, x", "a - b, y"]),
    ):
        ask = Ask(
            "best", asks.comparisons("a"), asked=asked_for, terms=TERMS, printed=own.__getitem__
        )
        found = judges.judge(ask, Evidence(TWO, OurPaper(), ("a", "b", "c")))
        assert [c.says for c in found] == wanted


def test_each_row_has_a_number_of_its_own():
    found = asked("ahead", "gain < 0", "metrics; row=*", GAINS)
    assert [round(c.found.estimate) for c in found] == [-9, -4, 1, -2]


def test_numbers_over_all_columns():
    rows = pd.concat(
        [
            derived("share", {("a", "x"): 0.5, ("a", "y"): 0.7}),
            derived("other", {("a", "x"): 0.1, ("a", "y"): 0.1}),
        ]
    )
    assert said(asked("ahead", "share > other", "metrics", rows)) == {
        "share - the other one of the weight": 50
    }


def test_columns_are_paired_by_what_they_have_in_common():
    cells = {(f"{net}, k={k}"): 10 * k + len(net) for net in ("cnn", "mlp") for k in (1, 2)}
    rows = table({("a", c): v for c, v in cells.items()} | {("a", "odd, k=2"): 9})
    how = "row=a; said={same}: {first} - {second}"
    assert said(asked("change", "*, k=2 > *, k=1", how, rows)) == {
        f"{net}: {net}, k=2 - {net}, k=1": 10 for net in ("cnn", "mlp")
    }


def test_whoever_has_less_has_to_have_learned():
    lost = table({("a", "x"): 5, ("b", "x"): 9}, "lost")
    acc = table({("a", "x"): 0, ("b", "x"): 0})
    (found,) = asked("ahead", "a < b", "metric=lost", pd.concat([lost, acc]))
    assert round(found.found.estimate) == 4 and "has not left round 0" in found.unlearned


@pytest.mark.parametrize(
    ("judge", "compares", "how", "missing"),
    [
        ("ahead", "a > d", "", "a, d"),
        ("ahead", "a > d @ x", "", "d / x"),
        ("ahead", "a > b", "on=flickr_aes", "FLICKR-AES"),
        ("ahead", "a > d", "absent=all of it", "all of it"),
        ("best", "c", "but=a | b", "another method in x"),
        ("best", "d", "", "d"),
        ("change", "x > z", "row=a", "z"),
        ("equal", "x == z", "row=a; metric=gain; within=1", "gain of a"),
        ("alike", "d*", "within=1", r"d\*"),
    ],
)
def test_what_was_not_run_is_said(judge, compares, how, missing):
    with pytest.raises(LookupError, match=f"^'?{missing}'?$"):
        asked(judge, compares, how, pd.concat([TWO, GAINS]))
