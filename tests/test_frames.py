"""No column of a frame that a public function returns hides an attribute of pandas' own."""

import sys
from pathlib import Path

import pandas as pd
import pytest

import pfl_core
import pfl_papers
from pfl_core import Experiment, grid, run, sweep
from pfl_core.analysis import stats
from pfl_core.analysis.select import pick
from pfl_core.experiments import listing, metrics
from pfl_papers.bench import comparison
from pfl_papers.compare import costs, plan, report
from pfl_papers.evidence import committed, form, tables
from pfl_papers.explore import views
from pfl_papers.papers import base as papers

pytestmark = pytest.mark.slow

PACKAGES = tuple(str(Path(package.__file__).parent) for package in (pfl_core, pfl_papers))


class Frames:
    """Which columns of frames, returned by public functions of the packages, hide what pandas has."""

    def __enter__(self):
        self.seen, self.hidden = set(), set()
        sys.setprofile(self.look)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    def look(self, frame, event, value):
        if event != "return" or not isinstance(value, pd.DataFrame):
            return
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGES) or code.co_name.startswith(("_", "<")):
            return
        if code.co_filename in (
            form.__file__,
            tables.__file__,
        ):  # the files of results/, as they lie there
            return
        where = f"{Path(code.co_filename).stem}.{code.co_name}"
        self.seen.add(where)
        taken = [c for c in value.columns if isinstance(c, str) and hasattr(pd.DataFrame, c)]
        self.hidden |= {f"{where}: {column}" for column in taken}


def test_of_runs(store):
    base = Experiment(clients=3, model="mlp", rounds=2, partition="iid", max_samples=20)
    with Frames() as frames:
        results = [run(base.but(method=m)) for m in ("fedavg", "fedper")]
        for result in results:
            _ = result.rows, result.clients, result.summary()
        rows = sweep(grid(base, {"FedPer": {"method": "fedper"}}))
        metrics.accuracies(results[0].arrays, "before", 2)
        form.numbers(form.lines(results[0].history).assign(run="a"))
        listing.side_by_side(results)
        stats.spent(rows, ["run"])
        pick(rows, "last")
    wanted = "store.rows store.clients store.summary sweep.sweep listing.side_by_side select.pick"
    assert frames.seen >= set(wanted.split()) and not frames.hidden


@pytest.mark.parametrize("name", papers.PAPERS)
def test_of_papers(name):
    paper = papers.paper(name)
    with Frames() as frames:
        printed = set() if name == "fedper" else set(papers.reported(name).table)
        rows = next(iter(committed.parts(name).values())).rows()
        every = dict.fromkeys(rows.artefact)
        artefact = next((a for a in every if a in printed), next(iter(every)))
        rows = rows[rows.artefact == artefact]
        report.claims(name, rows)
        if artefact in printed:
            report.tables(rows, paper, artefact)
    assert frames.seen >= {"committed.rows", "report.claims"} and not frames.hidden


def test_of_tables_plans_and_views(store, monkeypatch):
    monkeypatch.setattr(costs, "measured", lambda *args: (0.001, 1000))
    with Frames() as frames:
        plan.plan("fedper", profile="smoke", artefacts=["fig2"])
        comparison.hours("digits", ["fedavg", "fedper"], seeds=(0,), profile="smoke")
        report.every("flayer")
        report.contradictions()
    assert frames.seen >= {"plan.plan", "comparison.hours"} and not frames.hidden
    for view, choices in views.VIEWS.values():
        table = view(**choices({}).values).table
        if table is not None:
            assert not [c for c in table.columns if hasattr(pd.DataFrame, str(c))], view.__name__


def test_a_column_that_hides_something_is_found(monkeypatch):
    monkeypatch.setattr(metrics, "SUMMARY", ("mean", "b", "c", "d", "e"))
    wanted = dict(rounds=1, when="before", split="test", average="client", value=1.0)
    history = [wanted | {"metric": m} for m in ("acc_pct", "acc_worst10", "acc_sd")]
    with Frames() as frames:
        metrics.summary(pd.DataFrame(history))
    assert frames.hidden == {"metrics.summary: mean"}
