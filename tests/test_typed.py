"""What a sweep varies is a value of its runs' Experiments; no label is read back."""

import re
from pathlib import Path

import pandas as pd
import pytest

import pfl_papers
from pfl_core.experiments.experiment import Experiment
from pfl_papers.evidence import committed
from pfl_papers.papers import pfedhn
from pfl_papers.papers.base import Scope, Sweep, field_of


def test_the_value_is_that_of_the_runs_experiment(monkeypatch):
    base = Experiment(method="fedprox")
    names = {"small": {"method_args": {"mu": 0.1}}, "usual": {}}
    sweep = Sweep("fig1", base, names, {"x": {}}, (0,), vary="method_args.mu")
    known = {"a": base.but(method_args={"mu": 7.0})}
    monkeypatch.setattr(committed, "experiment", known.get)
    rows = pd.DataFrame(dict(run=[*"abcd"], row=["small", "small", "usual", "other"], column="x"))
    got = sweep.typed(rows)
    assert got.varied.tolist() == [7.0, 0.1, field_of(base, "method_args.mu")]
    assert sweep.typed(rows.assign(column="y")).empty and not sweep.typed(rows[3:]).size


def test_fields_and_arguments_have_values():
    e = Experiment(method="pfedhn", lr=0.3, method_args={"lr": 0.2})
    assert (field_of(e, "lr"), field_of(e, "method_args.lr")) == (0.3, 0.2)
    assert field_of(e, "method_args.n_hidden") == 3, "the method's default"


@pytest.mark.parametrize("profile", ["quick", "medium", "paper"])
def test_each_panel_of_figure_6_varies_one_field(profile):
    sweeps = pfedhn.PAPER.planned(Scope(profile), "fig6")
    assert [s.vary for s in sweeps] == ["method_args.dim", "method_args.n_hidden"]
    for sweep in sweeps:
        values = [field_of(e, sweep.vary) for e in sweep.experiments() if e.seed == 0]
        assert len(set(values)) == len(sweep.rows) > 1


def test_no_label_is_read_back_by_a_pattern():
    folder = pfl_papers.__path__[0]
    patterns = r"\.str\.(extract|fullmatch|match|contains)|\b(int|float)\([^()]*\.split\("
    rooms = [f"{folder}/{room}" for room in ("papers", "compare", "bench", "notebook")]
    found = [
        file.name
        for room in rooms
        for file in Path(room).glob("*.py")
        if re.search(patterns, file.read_text(encoding="utf-8"))
    ]
    assert found == []
