"""The comparison of all methods: equal grids, seeds of all sources, the whole path from tuning to tables."""

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pfl_core.experiments.build import build_method, client_data, split
from pfl_core.experiments.sweep import sweep
from pfl_papers import places
from pfl_papers.bench import comparison
from pfl_papers.compare import costs, readable
from pfl_papers.evidence import committed
from pfl_papers.papers import presets
from tools import pages

TINY = dict(rounds=2, eval_every=1)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "none")
    return tmp_path / "runs"


@pytest.mark.slow
def test_every_row_has_an_equal_grid_of_legal_values():
    assert set(presets.GRIDS) == set(comparison.chosen())
    assert set(presets.SERVED) <= set(presets.GRIDS) and set(presets.AFTER) <= set(presets.GRIDS)
    shared = comparison.common("digits", "smoke")
    data = client_data(shared.but(holdout=0.2))
    for row in comparison.chosen():
        g = comparison.grid_of(row)
        e, changes = comparison.candidates(row, shared)
        assert (len(g.rates), len(g.values), g.source != "") == (3, 3, True), row
        assert list(g.rates) == sorted(g.rates) and list(g.values) == sorted(g.values), row
        tried = [e.but(**c) for c in changes]
        assert len({json.dumps(t.plain(), sort_keys=True) for t in tried}) == 9, row
        for t in tried:
            build_method(t, data)  # hyper-parameters are checked together with the rate


def test_rows_start_from_runs_of_their_own_seed():
    cells = comparison.experiments("digits", seeds=[0, 3], profile="smoke")
    rows = [e for e in cells if not e.tags["row"].endswith(comparison.START)]
    assert [e.seed for e in rows] == [0, 3] * len(comparison.chosen())
    started = [e for e in rows if e.init_from]
    assert [(e.tags["row"], e.seed) for e in started] == [("lgfedavg", 0), ("lgfedavg", 3)]
    for e in started:
        assert e.init_from.seed == e.seed
        ours, theirs = split(e), split(e.init_from)
        assert all(
            np.array_equal(a, b)
            for a, b in zip(ours.train + ours.test, theirs.train + theirs.test, strict=True)
        )
        assert e.init_from.but(keep_models=True).id in {
            c.id for c in cells
        }  # its traffic and time are counted


def test_a_rate_is_that_of_what_a_row_starts_from_too():
    _, changes = comparison.candidates("lgfedavg", comparison.common("digits", "smoke"))
    assert [c["init_from"].lr for c in changes] == [c["lr"] for c in changes]
    assert {c["init_from"].head_depth for c in changes} == {1}  # FedAvg has no head


@pytest.mark.slow
def test_from_tuning_to_tables(home, capsys):
    how = dict(
        methods=["fedavg", "fedavg_ft", "lgfedavg", "perfedavg"],
        seeds=[0, 1],
        profile="smoke",
        changes=TINY,
    )
    assert (
        comparison.hours("digits", how["methods"], profile="smoke", changes=TINY).loc[
            "all", "there"
        ]
        == 0
    )
    shown = comparison.run("digits", **how)
    said = capsys.readouterr().out
    assert (
        "lgfedavg: lr 0.01, 0.03, 0.1 x head_depth 1, 2, 3 -> lr " in said
        and "(validation " in said
    )
    # Read at the row's own time: a method and its view are two rows; a meta-model that nobody adapted has no number.
    blank = {r: [t for t in ("before", "after") if not shown.loc[r, t]] for r in shown.index}
    assert blank == {
        "fedavg": ["after"],
        "fedavg_ft": ["before"],
        "perfedavg": ["after"],
        "lgfedavg": [],
    }
    assert [(shown.loc[r, f"rank {t}"] == "") for r, ts in blank.items() for t in ts] == [True] * 3
    assert sorted(shown["rank before"])[-1] <= "3" and shown.read.fedavg_ft == "after"
    # What is kept gives the same tables again.
    kept = committed.parts("methods", own=True)["methods.smoke-digits"].rows()
    tables = comparison.tables(kept)
    assert tables["comparison"].before.tolist() == shown.before.tolist()
    assert tables["costs"].gradients.to_dict() == {
        "fedavg": "1",
        "fedavg_ft": "1",
        "perfedavg": "2",
        "lgfedavg": "1",
    }
    # Nothing is computed twice.
    done = {f: f.stat().st_mtime_ns for f in (home / "store").glob("*/history.csv")}
    pd.testing.assert_frame_equal(comparison.run("digits", **how), shown)
    assert done == {f: f.stat().st_mtime_ns for f in (home / "store").glob("*/history.csv")}
    plan = comparison.hours("digits", how["methods"], profile="smoke", changes=TINY)
    assert plan.loc["fedavg", "there"] >= 9 and plan.loc["fedavg", "hours of tuning"] == 0
    tuned = kept[(kept.artefact == "tune") & (kept.split == "val") & (kept["average"] == "client")]
    assert set(tuned.seed) == {0} and tuned.groupby("row").column.nunique().eq(9).all()
    choices = tables["choices"]
    at_its_time = (tuned.row == "perfedavg") & (tuned.when == comparison.when("perfedavg"))
    tuned = tuned[at_its_time & (tuned.metric == "acc_pct")]
    best = tuned.groupby("column", sort=False).value.max()
    assert (
        choices.chosen.perfedavg == f"alpha {json.loads(best.idxmax())['method_args']['alpha']:g}"
    )
    files = "comparison.csv comparison.md costs.csv costs.md choices.md clients.png clients.csv"
    for name in files.split():
        assert (home / "figures" / "methods" / "smoke-digits" / name).exists()


def test_runs_of_the_comparison_have_the_choice_that_tuning_made(home):
    shared = comparison.common("digits", "smoke", **TINY)
    choice, rows = comparison.tuned("fedprox", shared)
    seen = rows[
        (rows.split == "val")
        & (rows.when == "before")
        & (rows["average"] == "client")
        & (rows.metric == "acc_pct")
    ]
    assert choice == json.loads(seen.groupby("column", sort=False).value.max().idxmax())
    (e,) = comparison.experiments("digits", ["fedprox"], [1], "smoke", {"fedprox": choice}, **TINY)
    assert (e.lr, e.method_args["mu"], e.seed, e.rounds) == (
        choice["lr"],
        choice["method_args"]["mu"],
        1,
        2,
    )


def test_what_a_row_starts_from_counts_in_its_traffic_and_time(home):
    cells = comparison.experiments("digits", ["lgfedavg"], [0], "smoke", rounds=4, eval_every=2)
    rows = sweep(cells)
    total = {}
    for e in cells:
        own = rows[(rows.run == e.id) & (rows["average"] == "total")]
        total[e.tags["row"]] = own[own["rounds"] == own["rounds"].max()].set_index("metric").value
    first, second = total["lgfedavg" + comparison.START], total["lgfedavg"]
    assert first.upload_bytes > second.upload_bytes > 0  # a whole model against a head
    shown = comparison.costs(rows)
    mean = (
        (first.upload_bytes + second.upload_bytes)
        / (first.client_visits + second.client_visits)
        / 1000
    )
    assert shown.index.tolist() == ["lgfedavg"] and shown["up, kB"].lgfedavg == f"{mean:.0f}"
    assert float(shown.seconds.lgfedavg) == round(rows.drop_duplicates("run").wall_s.sum())


def test_a_row_is_behind_the_first_by_the_difference_seed_by_seed():
    # Local: read before training. FedAvg-FT: after it, where it is first.
    values = {
        ("local", "before"): (80.0, 70.0),
        ("fedper", "before"): (78.0, 69.0),
        ("fedavg_ft", "before"): (99.0, 99.0),
        ("fedavg_ft", "after"): (85.0, 74.0),
    }
    fixed = dict(paper="methods", artefact="comparison", column="x", rounds=2, average="client")
    rows = pd.DataFrame(
        fixed | dict(run=f"{row}{s}", row=row, seed=s, when=when, value=v, split=split, metric=m)
        for (row, when), seeds in values.items()
        for s, v in enumerate(seeds)
        for split in ("val", "test")
        for m in ("acc_pct", "acc_min", "acc_max", "acc_worst10")
    )
    gaps = comparison.behind(rows)
    # Seed by seed the residuals are (0, .5, -.5) and (0, -.5, .5): variance 1 / 2, t(2) = 4.303.
    half = 4.3027 * (0.5 * 2 / 2) ** 0.5
    assert gaps.to_dict() == {
        "local": f"-4.5 [{-4.5 - half:.1f}, {-4.5 + half:.1f}]",
        "fedper": f"-6.0 [{-6 - half:.1f}, {-6 + half:.1f}]",
        "fedavg_ft": "",
    }
    assert comparison.behind(rows[rows.seed == 0])["local"] == "-5.0"
    # A row without one of the seeds is compared on the other, and takes part in no other's noise.
    some = rows[(rows.seed == 0) | (rows.row != "fedper")]
    half = 12.7062 * (0.5**2 * 2 / 2) ** 0.5
    assert comparison.behind(some).to_dict() == {
        "local": f"-4.5 [{-4.5 - half:.1f}, {-4.5 + half:.1f}]",
        "fedper": "-7.0",
        "fedavg_ft": "",
    }
    uncommon = rows[(rows.seed == 0) == (rows.row == "local")]
    assert comparison.behind(uncommon).tolist() == ["", "", ""]
    _, numbers = comparison.drawn(rows)
    assert numbers.row.tolist() == ["fedavg_ft", "local", "fedper"]
    assert numbers.acc_pct.tolist() == [79.5, 75.0, 73.5]


def test_fine_tuned_rows_are_read_after_their_last_epoch(home):
    assert [comparison.when(row) for row in ("lpft", "fedbabu")] == ["tuned 15", "tuned 5"]
    cells = comparison.experiments("digits", ["fedavg", "lpft", "fedbabu"], [0], "smoke", **TINY)
    rows = sweep(cells)
    shown = comparison.table(rows)
    assert shown.read.to_dict() == dict(fedavg="before", lpft="fine-tuned", fedbabu="fine-tuned")
    others = shown.loc[["lpft", "fedbabu"], ["before", "rank before", "after", "rank after"]]
    assert (others == "").all(axis=None) and shown["fine-tuned"].fedavg == ""
    for row in ("lpft", "fedbabu"):
        own = rows[(rows.row == row) & (rows.when == comparison.when(row))]
        own = own[(own.split == "test") & (own["average"] == "client") & (own.metric == "acc_pct")]
        assert shown["fine-tuned"][row] == f"{own.value.item():.2f}"
    ranking = pages._ranking(shown, comparison.gaps(rows))
    assert ranking.method.tolist() == ["FedAvg", "LP-FT", "FedBABU"]
    assert (ranking.accuracy != "").all() and "fine-tuned" in pages._moments(shown)


def test_hours_count_fine_tuning(monkeypatch):
    monkeypatch.setattr(costs, "measured", lambda *args: (3600.0 * (os.cpu_count() or 1), 0.0))
    e = comparison.cell("fedbabu", comparison.common("digits", "smoke"), {})
    tuning = costs.run_hours(e, "cpu") - costs.run_hours(e.but(finetune=None), "cpu")
    assert tuning == pytest.approx(
        5 * costs.client_steps(e.but(finetune=None, rounds=1, eval_after=False))
    )


@pytest.mark.parametrize(
    "row, choice, times",
    [
        ("fedavg", {}, 1.0), ("ditto", {}, 2.0), ("perfedavg", {}, 2.0), ("pfedme", {}, 5.0), ("fedala", {}, 1.8),
        ("fedrep", {"method_args": {"head_epochs": 5}}, 6.0), ("fedpac", {"epochs": 3}, 4.0), ("fedfomo", {}, 0.8),
        ("pfedhn", {}, 1.0), ("fedas", {}, 3.0), ("apfl", {}, 2.0), ("fedfew", {}, 3.0),
    ],
)  # fmt: skip
def test_gradients_are_counted(row, choice, times):
    e = comparison.cell(row, comparison.common("digits", "smoke"), choice)
    # FedFomo holds a fifth of its images out: eight batches of ten.
    assert costs.per_step(e) * e.epochs * (0.8 if row == "fedfomo" else 1) == pytest.approx(times)


def test_unknown_rows_and_profiles_are_named():
    with pytest.raises(
        ValueError, match="method of the comparison 'fedavgft' is unknown; did you mean 'fedavg_ft'"
    ):
        comparison.experiments("digits", ["fedavgft"])
    with pytest.raises(
        ValueError, match="profile of the comparison 'quick' is unknown; .*smoke, medium"
    ):
        comparison.experiments("digits", profile="quick")


def test_the_page_of_the_comparison_has_its_grids():
    page = (Path(__file__).parents[3] / "docs" / "comparison.md").read_text(encoding="utf-8")
    assert readable.markdown(readable.named(comparison.grids())) in page


def test_the_pages_need_no_comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path)
    assert pages.comparison_section() == "Not run yet."
