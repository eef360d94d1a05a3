"""The fullest evidence: paper before medium, but what rests on too few runs gives way."""

import pandas as pd

from pfl_papers.compare import fullest


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
    assert profiles == ["medium", "paper"] and not fullest.parts("fedper")
