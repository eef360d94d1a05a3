"""The benchmark's command: equal draws, seeds kept apart, resuming, a method of one's own, the plan."""

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import pfl_papers.__main__
from pfl_core.experiments import lookup, store
from pfl_core.methods.base import METHODS
from pfl_core.util import paths
from pfl_papers import places
from pfl_papers.bench import gate, planned, protocol, record, rows, settings

OWN = """
from pfl_core import Method


class Mine(Method):
    '''The head stays with the client.'''

    name = "bench_mine"

    def is_shared(self, name):
        return name not in self.task.head
"""
SMALL = dict(settings=["rotate"], draws=2, seeds=[10, 11], tuning_seeds=[100, 101], digits=True)


@pytest.fixture(scope="module")
def small():
    """Runs of two rounds; nothing is published."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(settings.DIGITS, "rounds", 2)
        patch.setitem(settings.DIGITS, "eval_every", 1)
        patch.setattr(places, "results_folder", lambda: places.PACKAGE / "none")
        yield patch


@pytest.fixture(scope="module")
def ran(small, tmp_path_factory):
    """What one command leaves that is stopped after its first row, and given again: its plan, what it printed, the store."""
    home = tmp_path_factory.mktemp("bench")
    small.setenv("PFL_RUNS", str(home))
    (home / "bench_own.py").write_text(OWN)
    small.syspath_prepend(str(home))
    asked = protocol.asked(methods=["local", "bench_mine"], plugins=["bench_own"], **SMALL)
    plan = planned.plan(asked, "cpu")
    steps = protocol.Work(asked, asked.settings[0], device="cpu").steps()
    said = [next(steps)]
    before = {r.id: (r.folder / "experiment.json").stat().st_mtime_ns for r in finished()}
    assert record.read("rotate-digits").lines() == []  # tuned, not reported
    words = (
        "bench --digits --settings rotate --methods local bench_mine --plugins bench_own --draws 2"
    )
    words += " --seeds 10 11 --tuning-seeds 100 101 --device cpu"
    assert pfl_papers.__main__.main(words.split()) == 0
    yield asked, plan, said, before, home
    sys.modules.pop("bench_own", None)
    METHODS.pop("bench_mine", None)


@pytest.mark.slow
def test_a_command_goes_on_where_it_was_stopped(ran):
    asked, _, said, before, home = ran
    assert "rotate-digits, Local: draw" in said[0] and len(before) == 4
    now = {r.id: (r.folder / "experiment.json").stat().st_mtime_ns for r in finished()}
    assert {i: now[i] for i in before} == before


@pytest.mark.slow
def test_the_plan_adds_up_to_what_is_run(ran):
    asked, plan, *_ = ran
    assert plan[[*planned.COUNTS[:-1]]].to_numpy().sum() == len(finished()) == 3 * (4 + 2) + 2 * 4
    again = planned.plan(asked, "cpu")
    assert (again.there == again[[*planned.COUNTS[:-1]]].sum(axis=1)).all()
    assert again.hours.sum() == 0 and plan.hours.sum() > 0
    assert planned.totals(plan).loc["all", "tuning"] == 12


@pytest.fixture
def published(ran, tmp_path, monkeypatch):
    """What the command found as rows in results/ alone; the asked, and what it told."""
    asked, *_ = ran
    told = list(protocol.Work(asked, asked.settings[0], device="cpu").steps())
    known = record.read("rotate-digits")
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "results")
    record.write(record.committed("rotate-digits"), known)
    return asked, told


def trains(*_, **how):
    raise Wrong("it would be trained")


@pytest.mark.slow
def test_published_rows_are_not_run_again(published, monkeypatch):
    asked, told = published
    for module in (protocol.tuning, protocol.sweeps):
        monkeypatch.setattr(module, "tune" if module is protocol.tuning else "sweep", trains)
    work = protocol.Work(asked, asked.settings[0], device="cpu")
    assert list(work.steps()) == told and not work.failed
    plan = planned.plan(asked, "cpu")
    assert plan.hours.sum() == 0 and plan.there.sum() == plan[planned.COUNTS[:-1]].to_numpy().sum()
    again = protocol.Work(asked, asked.settings[0], train=True, device="cpu")
    assert list(again.steps()) and set(again.failed) == {row.name for row in asked.rows}
    assert planned.plan(asked, "cpu", train=True).there.sum() == 0


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["local", "fedavg", "bench_mine", f"fedavg, {rows.ORACLE}", ""])
def test_what_is_published_stays_beside_new_runs_of_its_row(ran, published, gone, tmp_path):
    """Of a line, or of all runs, that another session reports: searches and other lines are kept."""
    asked, told = published
    home = ran[-1]
    shutil.copytree(home / "store", tmp_path / "runs" / "store")  # nothing is trained
    folder = record.committed("rotate-digits")
    whole = record.of_folder(folder)
    tables = {n: getattr(whole, n) for n in ("runs", "history", "clients")}
    left = {n: t[(t.row != gone) & ((t.row == "") | bool(gone))] for n, t in tables.items()}
    record.write(folder, replace(whole, **left))
    assert list(protocol.Work(asked, asked.settings[0], device="cpu").steps()) == told
    for found in (
        record.read("rotate-digits"),
        record.of_folder(folder) | record.here("rotate-digits"),
    ):
        for name in record.COLUMNS:
            lines = (getattr(r, name).drop_duplicates() for r in (found, whole))
            was, now = ({tuple(map(str, v)) for v in t[["row", "seed"]].to_numpy()} for t in lines)
            assert was == now, name
        assert len(found.tuning) == len(whole.tuning) and len(found.runs) == len(whole.runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({"draws": 3}, "tune"),
        ({"draws": 1}, "tune"),
        ({"tuning_seeds": (100, 102)}, "tune"),
        ({"seeds": (10, 12)}, "sweep"),
    ],
)
def test_other_draws_or_seeds_than_the_published_ones_are_run(published, monkeypatch, change, lost):
    asked, _ = published
    monkeypatch.setattr(protocol.tuning if lost == "tune" else protocol.sweeps, lost, trains)
    work = protocol.Work(replace(asked, **change), asked.settings[0], device="cpu")
    for row in asked.rows:
        with pytest.raises(Wrong):
            work.tune(row), work.report(row)


@pytest.mark.slow
def test_a_search_is_known_if_each_of_its_runs_is(ran):
    known = record.read("rotate-digits")
    mine = known.tuning[known.tuning.row == "local"]
    runs = {(v.draw, v.seed): v.run for v in mine.sort_values("seed").itertuples()}
    assert len(known.search("local", runs)) == len(runs) == 4
    assert known.search("fedavg", runs).empty and known.search("none", runs).empty
    for key in runs:
        assert known.search("local", runs | {key: "another"}).empty
        there = (mine.draw == key[0]) & (mine.seed == key[1])
        assert replace(known, tuning=mine[~there]).search("local", runs).empty == (
            key[1] == 100 or bool(mine.chosen[there].iloc[0])
        )


@pytest.mark.slow
def test_reported_seeds_are_never_seen_by_tuning(ran):
    known = record.read("rotate-digits")
    tuned, reported = set(known.tuning.run), {i for run in known.runs.run for i in run.split()}
    by = {r.id: r.experiment for r in finished()}
    assert tuned | reported == set(by) and not tuned & reported
    assert {by[i].seed for i in tuned} == {100, 101} and {by[i].seed for i in reported} == {10, 11}
    parts = {i: by[i].partition_seed for i in by}
    assert set(parts.values()) == {None}  # clients are drawn by the seed


@pytest.mark.slow
def test_small_networks_are_stacked_and_tuning_evaluates_the_last_round_alone(ran):
    tuned = set(record.read("rotate-digits").tuning.run)
    for run in finished():
        assert run.meta["executor"] == "batched"
        evaluated = sorted(set(run.rows.query("when == 'before'").rounds))
        assert evaluated == ([0, 2] if run.id in tuned else [0, 1, 2])


def test_networks_with_convolutions_are_not_stacked_on_a_cpu():
    found = {s.key: s.executor("cpu") for s in settings.SETTINGS.values()}
    assert found.pop("photos") == "auto" and set(found.values()) == {"batched"}
    assert {s.executor("cuda") for s in settings.SETTINGS.values()} == {"auto"}


def test_all_rows_draw_equal_rates():
    asked = protocol.asked(["mild"], methods=["local", "fedper", "ditto", "fedaghn"], draws=16)
    base, rates = asked.base(asked.settings[0]), {}
    for row in asked.rows:
        changes = row.draws(asked.settings[0], base, 16)
        assert changes[0] == {} and len(changes) == 16
        rates[row.name] = [(c["lr"], c["finetune"]["lr"]) for c in changes[1:]]
    assert len({json.dumps(r) for r in rates.values()}) == 1 and len(rates) == 5  # with FedAvg


@pytest.mark.slow
def test_an_own_method_stands_beside_the_others(ran):
    known = record.read("rotate-digits")
    assert known.lines() == ["local", "fedavg", "bench_mine", f"fedavg, {rows.ORACLE}"]
    assert set(known.runs.status) == {"done"}
    table = known.accuracies()
    assert table.shape == (4, 2) and table.notna().all(axis=None)
    run = lookup.stored(by_name("bench_mine"))
    when = known.runs.set_index(["row", "seed"]).when["bench_mine", 10]
    acc = run.clients[(run.clients["rounds"] == 2) & (run.clients.when == when)]
    acc = acc[acc.split == "test"].acc_pct.to_numpy()
    assert np.allclose(known.per_client()["bench_mine", 10], acc)
    assert table.loc["bench_mine", 10] == pytest.approx(acc.mean())


def test_the_gate_that_is_told_counts_published_rows(home, monkeypatch):
    """One's own method, run alone, says nothing of the gate."""
    monkeypatch.setattr(places, "results_folder", lambda: paths.CHECKOUT / "results")
    asked = protocol.asked(settings=["mild"], methods=["local"])
    told = protocol.Work(asked, asked.settings[0]).gate()
    published = gate.gate(record.of_folder(record.committed("mild")))
    assert told == f"mild, gate: {gate.said(published)}" and "label prior" in told


def finished():
    return list(store.finished())


def by_name(method, seed=10):
    found = [r.experiment for r in finished() if r.experiment.method == method]
    return next(e for e in found if e.seed == seed)


@pytest.mark.slow
def test_the_choice_is_the_best_mean_on_validation_data(ran):
    tuning = record.read("rotate-digits").tuning
    for row, of in tuning.groupby("row"):
        val = of[[c for c in of if c.startswith("val.")]].dropna(axis=1)
        val = val[["val.before", "val.tuned 1", "val.tuned 3", "val.tuned 10"]]
        means = val.groupby(of.draw).mean().stack()
        draw, when = means.idxmax()
        chosen = of[of.chosen != ""]
        assert set(chosen.draw) == {draw} and set("val." + chosen.chosen) == {when}, row


@pytest.mark.slow
def test_oracle_clusters_are_those_of_the_groups(ran):
    known = record.read("rotate-digits")
    found = known.per_client()[f"fedavg, {rows.ORACLE}", 10]
    ids = known.runs.set_index(["row", "seed"]).run[f"fedavg, {rows.ORACLE}", 10].split()
    runs = [next(r for r in finished() if r.id == i) for i in ids]
    assert len(runs) == 4 and len(found) == 8
    when = known.runs.set_index(["row", "seed"]).when["fedavg", 10]
    for group, run in enumerate(runs):
        mine = 100 * run.arrays[f"{when}/test/correct"][-1] / run.arrays["n/test"]
        assert np.allclose(found[group::4], mine)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(settings=["mildd"]), "did you mean 'mild'"),
        (dict(methods=["fedpr"]), "did you mean 'fedper'"),
        (dict(plugins=["no_such_module"]), "there is no such module"),
        (dict(plugins=["json"]), "has no method"),
        (dict(seeds=[10, 101]), r"\[101\] are among seeds and tuning seeds"),
        (dict(seeds=[10, 10]), "allowed are different integers"),
        (dict(draws=0), "draws"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(given, says):
    with pytest.raises(ValueError, match=says):
        protocol.asked(**given)


@pytest.mark.parametrize("name", ["lpft", rows.FT1, f"mine, {rows.EQUAL}"])
def test_a_method_of_ones_own_takes_no_row_of_the_benchmark(name, tmp_path, monkeypatch):
    (tmp_path / "bench_taken.py").write_text(OWN.replace("bench_mine", name))
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(ValueError, match=f"{name}' would stand in a row of the benchmark's"):
            protocol.asked(plugins=["bench_taken"], digits=True)
    finally:
        sys.modules.pop("bench_taken", None)
        METHODS.pop(name, None)


def test_data_that_are_missing_are_said_first(home, capsys):
    assert pfl_papers.__main__.main(["bench", "--settings", "rotate", "photos"]) == 1
    assert "mnist" in capsys.readouterr().err and not home.exists()


class Wrong(Exception):
    pass


def test_a_row_that_fails_does_not_end_the_others(small, home, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(home))
    asked = protocol.asked(methods=["local"], **SMALL | {"draws": 1, "settings": ["mild"]})
    work = protocol.Work(asked, asked.settings[0], device="cpu")
    tune = work.tune

    def fails(row):
        if row.name == "local":
            raise Wrong("of the method")
        return tune(row)

    work.tune = fails
    said = list(work.steps())
    assert "Local: Wrong: of the method" in said[0] and set(work.failed) == {"local"}
    assert record.read("mild-digits").lines() == ["fedavg"]


def test_draws_that_diverge_or_are_refused_are_counted(small, home, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(home))
    asked = protocol.asked(methods=["pfedme"], **SMALL | {"settings": ["mild"], "seeds": [10]})
    of = {"fedavg": [{"lr": 1e30}, {"lr": 0.1}, {}]}
    of["pfedme"] = [{}, {"method_args": {"lam": 30.0}, "lr": 0.5}, {"lr": 0.001}]
    monkeypatch.setattr(rows.Row, "draws", lambda row, *_: of[row.name])
    work = protocol.Work(asked, asked.settings[0], device="cpu")
    said = work.tune(next(r for r in asked.rows if r.name == "fedavg"))
    assert "1 of 3 draws diverged" in said
    said = work.tune(next(r for r in asked.rows if r.name == "pfedme"))
    assert "1 of 3 draws refused" in said
    tuning = record.of_folder(record.kept("mild-digits")).tuning
    first = tuning[tuning.seed == 100].set_index(["row", "draw"]).status
    assert first["fedavg", 0].startswith("failed") and first["fedavg", 2] == "done"
    assert first["pfedme", 1].startswith("refused: pfedme: lam")


@pytest.mark.slow
def test_a_records_files_are_read_as_they_were_written(ran, tmp_path):
    known = record.read("rotate-digits")
    files = record.write(tmp_path / "a", known)
    again = record.of_folder(tmp_path / "a")
    for name in record.COLUMNS:
        pd.testing.assert_frame_equal(
            getattr(again, name).reset_index(drop=True),
            getattr(known, name).reset_index(drop=True),
            check_dtype=False,
            atol=1e-4,
        )
    assert [f.read_bytes() for f in record.write(tmp_path / "b", again)] == [
        f.read_bytes() for f in files
    ]
    files[0].write_bytes(b"damaged")
    with pytest.raises(ValueError, match="damaged"):
        record.of_folder(tmp_path / "a")


def test_each_row_is_read_at_its_own_time_or_after_1_3_or_10_epochs():
    asked = protocol.asked(["mild"], methods=[r.name for r in rows.chosen()])
    base = asked.base(asked.settings[0])
    whens = {row.name: row.whens(row.cell(base)) for row in asked.rows}
    usual = ("before", "tuned 1", "tuned 3", "tuned 10")
    others = {
        "fedavg_ft": ("after",),
        "fedaghn": ("after", *usual[1:]),
        "fedbabu": ("tuned 5", *usual[1:]),
    }
    others["lpft"] = ("tuned 15", "tuned 5", "tuned 6", "tuned 8")
    assert whens == {row.name: others.get(row.name, usual) for row in asked.rows}
    assert len(whens) == 35 and {len(w) for name, w in whens.items() if name != "fedavg_ft"} == {4}
