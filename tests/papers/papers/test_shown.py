"""A paper's file says in one place what each table and figure shows."""

import functools
import importlib
import json
from collections import Counter
from dataclasses import replace

import pytest

from pfl_core.experiments.experiment import Experiment
from pfl_papers.notebook.study import Study
from pfl_papers.papers.base import PAPERS, PROFILES, paper
from pfl_papers.papers.shown import At, at, changes_at, drawn_anew, fields_at, rows_at, use


def module(name):
    return importlib.import_module(f"pfl_papers.papers.{name}")


@pytest.mark.parametrize("name", PAPERS)
def test_each_table_and_figure_has_a_line_whose_columns_and_rows_are_there(name):
    paper = module(name)
    assert [*paper.SHOWN] == [*paper.PAPER.artefacts]
    columns = {*paper.COLUMNS, getattr(paper, "ANEW", "")}
    for artefact, shown in paper.SHOWN.items():
        studied = artefact in getattr(paper, "CASE", ())
        every = paper.STUDIED if studied else paper.ROWS
        for profile in PROFILES:
            assert columns.issuperset(shown.labels(profile)), (artefact, profile)
            names = at(profile, shown.rows)
            named = names.values() if isinstance(names, dict) else names
            assert set(named) <= set(every), (artefact, profile)


@pytest.mark.parametrize("name", PAPERS)
def test_every_row_is_shown_somewhere(name):
    paper = module(name)
    also = [getattr(c, "rows", ()) for c in paper.COLUMNS.values()]
    ours = getattr(paper, "OURS", ())
    each = [*ours.values()] if isinstance(ours, dict) else [ours]  # by artefact
    for of in (*each, *getattr(paper, "SLOWER", {}).values()):
        also.append(getattr(of, "rows", of))
    shown = set()
    for names in [*(s.rows for s in paper.SHOWN.values()), *also]:
        for profile in PROFILES:
            found = at(profile, names)
            shown |= set(found.values() if isinstance(found, dict) else found)
    assert {*paper.ROWS, *getattr(paper, "STUDIED", ())} - shown == set()


@pytest.mark.parametrize(
    "value, want",
    [
        (At(1), [1, 1, 1, 1]),
        (At(1, quick=2), [2, 2, 1, 1]),
        (At(1, medium=3, quick=2, smoke=4), [4, 2, 3, 1]),
        (At(quick=2, smoke=...), [..., 2, ..., ...]),
        (5, [5, 5, 5, 5]),
    ],
)
def test_a_value_by_profile(value, want):
    assert [at(profile, value) for profile in PROFILES] == want


def test_later_fields_win_and_arguments_are_merged():
    first = dict(lr=1.0, model_args={"a": 1, "b": At(2, quick=3)}, rounds=At(quick=4))
    later = dict(lr=At(2.0, quick=...), model_args={"c": 5})
    assert fields_at("paper", first, later) == dict(lr=2.0, model_args={"a": 1, "b": 2, "c": 5})
    quick = dict(lr=1.0, model_args={"a": 1, "b": 3, "c": 5}, rounds=4)
    assert fields_at("quick", first, later) == quick
    assert first["model_args"]["b"] == At(2, quick=3), "what is written stays as it is"


def test_rows_are_changes_or_made_of_the_columns_experiment():
    base = Experiment(rounds=6)
    every = {"local": use("local"), "long": lambda b: use("fedavg") | {"rounds": At(2 * b.rounds)}}
    found = rows_at("paper", base, every, At({"ours": "long"}, quick=("local",)))
    assert found == {"ours": {"method": "fedavg", "method_args": {}, "rounds": 12}}
    assert rows_at("quick", base, every, At((), quick=("local",))) == {"local": use("local")}
    assert changes_at("smoke", base, {"lr": At(smoke=...)}) == {}


def test_clients_of_a_released_script_are_drawn_anew():
    args = {"alpha": 0.1, "numpy_seed": 1, "class_size": 6000}
    base = Experiment(partition="dirichlet", partition_args=args)
    assert drawn_anew(base).plain() == replace(base, partition_args={"alpha": 0.1}).plain()


MADE = [n for n in PAPERS if any(a.numbers for a in paper(n).artefacts.values())]


@pytest.mark.parametrize("name", MADE)
def test_numbers_wait_for_other_runs_where_they_are_made_of_several(name, monkeypatch, tmp_path):
    """What is `together` differs from what its runs give one by one, or cannot be made so; all else is the same."""
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    study = Study(name, profile="quick", device="cpu", finished=True)
    for artefact, about in study.paper.artefacts.items():
        if not about.numbers or (rows := study.run(artefact)).empty:
            continue
        rows = rows[rows["average"] != "derived"]

        def made(rows, about=about):
            numbers = about.numbers(rows, functools.partial(study.probed, rows))
            return Counter(json.dumps(n, default=str, sort_keys=True) for n in numbers)

        try:
            each = sum((made(of) for _, of in rows.groupby("run", sort=False)), Counter())
        except ValueError:
            each = None
        assert (each == made(rows)) is not about.together, artefact
