"""The command line `python -m pfl_papers`: plans, comparisons, and what is wrong in a line."""

import pytest

from pfl_core import Experiment, run, sweep
from pfl_papers import places
from pfl_papers.compare import plan
from pfl_papers.evidence import committed
from pfl_papers.papers import base
from tests.commands import TINY, said


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ("compare fedpr", 1, "did you mean 'fedper'"),
        ("compare 12ab", 1, "`python -m pfl_core show 12ab` shows runs"),
        ("compare 12ab 34cd 56ef", 1, "`python -m pfl_core show 12ab 34cd 56ef` shows runs"),
        ("compare fedaghn table1 table2", 1, "compare takes one table, got table1 table2"),
        ("compare pfedhn table99", 1, "'table99' is unknown; did you mean 'table4'"),
        ("compare methods", 1, "run `python -m pfl_papers methods-table DATASET` first"),
        ("plan fedper --artefacts fig99", 1, "did you mean 'fig9'"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(words, code, line, home, capsys, monkeypatch):
    monkeypatch.setattr(places, "results_folder", lambda: home / "none")
    message = said(capsys, words, code)
    assert line in message and message.startswith("pfl_papers ") and message.count("\n") == 1


def test_compare_a_papers_claims_and_all_methods(home, capsys, monkeypatch):
    assert "FedPer is significantly better than FedAvg" in said(capsys, "compare fedper")
    shown = said(capsys, "compare methods")
    assert all(column in shown for column in ("worst tenth", "seconds", "validation"))
    monkeypatch.setattr(places, "results_folder", lambda: home / "none")
    assert "no rows of 'methods' in results/" in said(capsys, "compare methods", 1)


def test_compare_a_table(home, capsys):
    rows = sweep([Experiment(**TINY | {"method": m}) for m in ("fedavg", "fedaghn")])
    first = base.reported("fedaghn").query("table == 'table1'").column.iloc[0]
    rows = rows.assign(artefact="table1", row=rows.method, column=first, profile="quick")
    committed.save(rows, "fedaghn", "quick", "digits")
    out = said(capsys, "compare fedaghn table1")
    assert "quick-digits" in out and f"{first}: on digits" in out and "FedAGHN" in out
    own = out.partition("fedaghn, quick-digits:")[2].partition("published")
    assert own[1] and "±" not in own[0]  # a part of the digits stands beside no published number
    assert f"{first}: published, not run" in out
    tex = said(capsys, "compare fedaghn table1 --latex")
    assert tex.startswith("% fedaghn, ")
    own = tex.partition("% fedaghn, quick-digits:\n")[2]
    assert own.startswith(r"\begin{tabular}") and r"\toprule" in own
    assert "FedAvg-FT &" in tex and r"\bottomrule" in tex
    assert "known are table1, table2" in said(capsys, "compare fedaghn table9", 1)


def test_a_plan_names_the_runs_of_the_notebook_and_trains_nothing(home, capsys, monkeypatch):
    out = said(capsys, "plan fedper --profile smoke --artefacts fig2 fig3 --train")
    lines = [line.split() for line in out.splitlines()[2:]]
    assert [line[0] for line in lines] == ["fig2", "fig3", "all,"] and not home.exists()
    cells = plan.planned("fedper", profile="smoke", artefacts=["fig3"])
    assert len(cells) == 2 and {e.tags["artefact"] for e in cells} == {"fig3"}
    before = plan.plan("fedper", profile="smoke", artefacts=["fig3"], train=True)
    run(cells[0])
    after = plan.plan("fedper", profile="smoke", artefacts=["fig3"], train=True)
    assert (
        before.loc["fig3", "runs"],
        before.loc["fig3", "cached"],
        after.loc["fig3", "cached"],
    ) == (2, 0, 1)
    assert after.loc["fig3", "client-steps"] == before.loc["fig3", "client-steps"] / 2
    assert before.loc["all, each run once"].tolist() == before.loc["fig3"].tolist()


def test_data_that_are_missing_leave_a_plan_without_hours(home, capsys):
    out = said(capsys, "plan fedper --profile paper --artefacts fig2")
    assert (
        "NaN: the time cannot be told without cifar10" in out
        and "python -m pfl_core fetch cifar10" in out
    )


def test_a_finished_run_waits_in_results_by_words_alone(home, capsys, monkeypatch):
    monkeypatch.setattr(places, "results_folder", lambda: home / "results")
    (first, *_) = [
        e for e in plan.planned("pfedhn", artefacts=["fig5"]) if e.tags["row"] == "K = 1"
    ]
    run(first)
    assert said(capsys, "keep pfedhn --artefacts fig5 --waiting").endswith("in results/: 1\n")
    assert committed.find(first) == first.id and committed.parts() == {}
    assert said(capsys, "keep pfedhn --artefacts fig5 --waiting").endswith("in results/: 0\n")
