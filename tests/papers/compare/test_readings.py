"""A reading decides what is said of the rows that it swaps, and of no other ones."""

import itertools
from dataclasses import replace

import pandas as pd
import pytest

from pfl_core.analysis import verdicts
from pfl_papers.compare import readings, report
from pfl_papers.evidence.contrasts import READ_AFTER, Evidence
from pfl_papers.papers import base as papers
from pfl_papers.papers.base import Reading
from tests.papers.compare.test_compare import COLUMN, join, seeds

PAPER = papers.paper("fedaghn")
OTHER = "Dir(0.5), CIFAR-10"
ROWS = ("ditto", "fedrep", "fedamp", "local", "fedavg")
NOISE = ((0.0, 0.3, -0.3), (0.2, -0.1, 0.1), (-0.2, 0.0, 0.25), (0.1, 0.2, -0.25), (0.3, 0.0, 0.1))


def of(row, values, column=COLUMN):
    """A row's runs, a seed each; a global one is read before and after local training."""
    times = ("before", "after") if row.startswith("fedavg") else ("after",)
    return join(*(seeds(row, values, column=column, when=when) for when in times))


def table(column, apart=1.0):
    """Rows near each other, of which the column's noise decides who is ahead."""
    own = of("fedaghn", (70.0, 70.1, 70.2), column)
    each = zip(ROWS, itertools.count(1), NOISE, strict=False)
    return join(
        own, *(of(r, [70 - apart * i * 0.2 + e for e in off], column) for r, i, off in each)
    )


def declared(monkeypatch, **runs):
    """Declare a reading for each name, of {row of ours: row}."""
    found = [Reading(says.replace("_", " "), of, "a test", True) for says, of in runs.items()]
    monkeypatch.setattr(papers, "readings", lambda paper: found)


def loud(row, column=COLUMN):
    """A row of ours in the place of another: far from it, and of much noise."""
    return of(f"{row} (ours)", (10.0, 40.0, 85.0), column)


def judged(rows):
    """{table: its lines} by row and column."""
    both = dict(
        cells=report.compare(rows, PAPER, "table1"), leads=report.advantages(rows, PAPER, "table1")
    )
    return {name: lines.set_index(["row", "column"]) for name, lines in both.items()}


@pytest.mark.parametrize("swapped", ["fedaghn", *ROWS])
def test_a_line_depends_only_on_readings_of_its_rows(swapped, monkeypatch):
    rows = join(table(COLUMN), table(OTHER), loud(swapped))
    declared(monkeypatch)
    before = judged(rows)
    declared(monkeypatch, louder={f"{swapped} (ours)": swapped})
    after, changed = judged(rows), {}
    for name, lines in before.items():
        for key, line in lines.iterrows():
            now = after[name].loc[key]
            own = {key[0], READ_AFTER.get(key[0])}
            own |= {"fedaghn"} if name == "leads" else set()
            if key[1] != COLUMN or swapped not in own:
                pd.testing.assert_series_equal(now, line)
            else:
                changed[name, key[0]] = now.verdict
    assert verdicts.DEPENDS in changed.values()
    lead = after["leads"].loc[("ditto", COLUMN)]
    assert ("louder" in lead.why) == (swapped in ("fedaghn", "ditto"))


def test_a_row_read_from_the_same_runs_is_swapped_with_them(monkeypatch):
    rows = join(of("fedaghn", (70.0, 70.1, 70.3)), of("fedavg", (69.0, 69.1, 69.2)), loud("fedavg"))
    declared(monkeypatch, worse={"fedavg (ours)": "fedavg"})
    (_, other) = readings.read(rows, PAPER)
    assert other.cells == {("fedavg", COLUMN), ("fedavg_ft", COLUMN)}
    leads = judged(rows)["leads"]
    assert "worse: " in leads.why["fedavg_ft", COLUMN]


def test_a_line_that_several_readings_change_names_each_once(monkeypatch):
    declared(monkeypatch, one={"ditto (ours)": "ditto"}, two={"ditto (ours, too)": "ditto"})
    rows = join(
        table(COLUMN), loud("ditto"), loud("ditto").replace("ditto (ours)", "ditto (ours, too)")
    )
    line = judged(rows)["leads"].loc[("ditto", COLUMN)]
    assert line.verdict == verdicts.DEPENDS
    assert [part.split(":")[0] for part in line.why.split("; ")].count("one") == 1
    assert line.why.count("as run: ") == 1 and verdicts.DEPENDS not in line.why


@pytest.mark.parametrize("swapped", ["fedaghn", *ROWS])
def test_a_claim_depends_only_on_readings_of_rows_that_it_compares(swapped, monkeypatch):
    rows = join(table(COLUMN, apart=3.0), table(OTHER), loud(swapped))

    def judge(evidence):
        return [evidence.ahead("ditto", "local", COLUMN), evidence.ahead("fedaghn", "local", OTHER)]

    claim = replace(PAPER.claims[0], needs="table1", judge=judge, most=False)
    paper = replace(PAPER, claims=[claim])
    declared(monkeypatch)
    (before,) = report.claims(paper, rows).to_dict("records")
    declared(monkeypatch, louder={f"{swapped} (ours)": swapped})
    (after,) = report.claims(paper, rows).to_dict("records")
    assert before["verdict"] == "holds"
    if swapped in ("ditto", "local"):
        assert after["verdict"] == verdicts.DEPENDS and "louder: " in after["why"]
    else:
        assert after == before


def test_contrasts_of_other_cells_are_those_of_the_runs_as_they_are(monkeypatch):
    declared(monkeypatch, louder={"local (ours)": "local"})
    rows = join(table(COLUMN), loud("local"))
    as_run = Evidence(rows, PAPER, papers.printed_rows(PAPER, "table1"))
    under = readings.evidence(as_run, PAPER)
    assert [*under] == ["as run", "louder"] and under["as run"] is as_run
    for a, b in itertools.permutations(("fedaghn", *ROWS), 2):
        same = under["louder"].ahead(a, b, COLUMN) == as_run.ahead(a, b, COLUMN)
        assert same == ("local" not in (a, b))


def test_every_declared_reading_is_of_a_row_that_its_paper_prints():
    every = [(name, reading) for name in papers.PAPERS for reading in papers.readings(name)]
    assert every
    for name, reading in every:
        printed = set(papers.reported(name).row)
        assert set(reading.runs.values()) <= printed, (name, reading.says)
        assert not set(reading.runs) & printed
