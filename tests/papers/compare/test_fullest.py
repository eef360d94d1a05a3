"""The fullest evidence: paper before medium, but what rests on too few runs gives way."""

import pandas as pd
import pytest

from pfl_papers import places
from pfl_papers.compare import fullest
from pfl_papers.evidence import committed
from pfl_papers.papers.base import PAPERS, Scope, paper


def judged(profile, **worth):
    lines = [dict(cell=cell, profile=profile, worth=w) for cell, w in worth.items()]
    return pd.DataFrame(lines)


def test_the_fuller_profile_counts_unless_too_little_was_run():
    medium, paper = judged("medium", a=2, b=2, c=0), judged("paper", a=2, b=1, c=0, d=1)
    found = fullest.fullest([medium, paper], ["cell"], lambda lines: lines.worth)
    assert found.set_index("cell").profile.sort_index().to_dict() == dict(
        a="paper", b="medium", c="paper", d="paper"
    )


def test_rows_of_the_fullest_profile():
    rows = pd.DataFrame(dict(profile=["quick", "medium", "quick", "medium"], value=range(4)))
    assert fullest.of_fullest_profile(rows).value.tolist() == [1, 3]
    assert fullest.of_fullest_profile(rows[rows.profile == "quick"]).value.tolist() == [0, 2]
    assert fullest.of_fullest_profile(rows[:0]).empty


def test_parts_of_the_papers_own_setting_the_fullest_last():
    profiles = [part.profile for part in fullest.parts("pfedhn")]
    assert profiles == ["medium", "paper"]


A_FIGURE = {(row, column, seed) for row in "xy" for column in "ab" for seed in (0, 1)}


@pytest.mark.parametrize("found, whole", [
    ([("x", "a", 0), ("y", "a", 0)], {("a", 0)}),  # one seed of one column
    ([("x", "a", 0), ("y", "a", 1)], set()),  # no seed of both rows
    ([("x", "a", 0), ("y", "a", 0), ("x", "b", 0)], {("a", 0)}),
    ([("x", "a", 0), ("y", "a", 0), ("x", "a", 1)], {("a", 0)}),  # equal seeds a column
    (A_FIGURE, {("a", 0), ("a", 1), ("b", 0), ("b", 1)}),
])  # fmt: skip
def test_of_a_figure_those_columns_and_seeds_count_that_have_all_rows(found, whole):
    kept = fullest._whole(A_FIGURE, set(found))
    assert kept == {(row, column, seed) for row in "xy" for column, seed in whole}


@pytest.mark.parametrize("name", PAPERS)
def test_a_notebook_shows_whatever_is_kept_of_its_runs(name):
    """Also what is made of a run for cells that no run is planned for, as pFedHN's of Table 2."""
    about, kept = paper(name), committed.parts(name, own=True)
    for artefact in about.artefacts:
        if found := fullest.best(about, Scope("quick"), artefact):
            full, shown = found
            every = kept[f"{name}.{places.label(full.profile, full.label)}"].rows()
            every = every[(every.artefact == artefact) & every.run.isin(shown.run)]
            assert len(shown) == len(every), artefact
