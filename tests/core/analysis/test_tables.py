"""A table of finished runs: labels, intervals, what ties, what diverged, and what is refused."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from pfl_core import Experiment, Federation, export, grid, plot, run, runs, sweep, table
from pfl_core.analysis.noise import ONE_MODEL, Column
from pfl_core.analysis.plots.lines import intervals
from pfl_core.analysis.select import pick, summary
from pfl_core.analysis.tables import LESS
from pfl_core.experiments import keys
from pfl_core.experiments.metrics import TOTALS
from pfl_core.methods.base import METHODS

OURS = {name for name, c in METHODS.items() if c.__module__.startswith("pfl_core.")}
HERE = {"cfl", "fedbn"}  # CFL until it splits, FedBN without BatchNorm
BASE = Experiment(clients=3, model="mlp", rounds=2, max_samples=40, lr=0.1, eval_after=True)
ROWS = {"FedPer": {"method": "fedper"}, "Local": {"method": "local"}}
COLUMNS = {"0.1": {}, "1 & 10 %": {"partition_args": {"alpha": 1.0}}}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PFL_RUNS", str(tmp_path_factory.mktemp("runs")))
        yield sweep(grid(BASE, ROWS, COLUMNS, (0, 1, 2)), device="cpu", jobs=1)


@pytest.fixture(scope="module")
def results(rows):
    return runs(method=["fedper", "local"])


def wide(rows, column, metric="acc_pct", average="client"):
    last = rows[(rows.split == "test") & (rows.when == "before") & (rows["rounds"] == 2)]
    last = last[(last.metric == metric) & (last["average"] == average) & (last.column == column)]
    return last.pivot_table(index="row", columns="seed", values="value", sort=False)


def test_a_cell_is_the_mean_over_seeds_with_the_noise_of_its_column(rows):
    found = table(rows, against="Local").cells.set_index(["column", "row"])
    for column in COLUMNS:
        numbers = wide(rows, column)
        own = found.loc[column, "FedPer"]
        assert own.seeds == 3 and own.value == pytest.approx(numbers.loc["FedPer"].mean())
        assert own.half == pytest.approx(Column(numbers).level("FedPer").half)
        gap = Column(numbers).difference("FedPer", "Local")
        assert (own.difference, own.low) == pytest.approx((gap.estimate, gap.low))
        assert own.difference == pytest.approx(
            (numbers.loc["FedPer"] - numbers.loc["Local"]).mean()
        )


@pytest.mark.parametrize("metric", TOTALS)
def test_what_a_run_took_in_all_is_a_table(rows, metric):
    found = table(rows, metric=metric, columns="column")
    own = rows[(rows.metric == metric) & (rows["rounds"] == 2)]
    for cell in found.cells.itertuples():
        here = own[(own.row == cell.row) & (own.column == cell.column)]
        assert cell.seeds == 3 and cell.value == pytest.approx(here.value.mean())
    assert "of the run in all" in found.caption and metric not in found.caption
    means = found.cells.groupby("column").value
    assert (found.cells.value > 0).any()
    assert found.cells.best[means.idxmin()].all()


def test_labels_may_be_numbers(rows):
    found = table(rows.assign(row=rows.row.map({"FedPer": 0.1, "Local": 2})))
    assert "<td>" in found._repr_html_() and "tabular" in found.latex() and "|" in found.markdown()
    (cell,) = grid(BASE, {0.1: {"lr": 0.1}}, {2: {}})
    assert cell.tags == {"row": "0.1", "column": "2"}


def test_each_partition_under_one_seed_is_a_replicate(tmp_path, monkeypatch):
    """As many seeds of both, with the same numbers: the same table, picture and summary."""
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    cells = [
        e.but(seed=0, partition_seed=e.seed, tags=e.tags)
        for e in grid(BASE, ROWS, {"0.1": {}}, (0, 1, 2))
    ]
    found = sweep(cells, device="cpu", jobs=1)
    kept = found.assign(seed=found.partition_seed)  # what they would be as seeds
    assert found.seed.nunique() == 1 and kept.seed.nunique() == 3
    one, other = table(found, against="Local").cells, table(kept, against="Local").cells
    assert one.seeds.tolist() == [3, 3] and one.half.notna().all()
    pd.testing.assert_frame_equal(one, other)
    picked, same = pick(found), pick(kept)
    assert summary(picked).equals(summary(same)) and "±" in summary(picked).iloc[0, 0]
    drawn, as_seeds = (intervals(p, "row", "rounds") for p in (picked, same))
    pd.testing.assert_frame_equal(drawn, as_seeds)
    assert drawn.low.notna().all()


@pytest.mark.parametrize("metric", ["acc_pct", "acc_worst10", "loss", "acc_sd"])
def test_the_best_and_what_is_not_told_from_it_are_marked_whatever_is_better(rows, metric):
    average = "pooled" if metric == "loss" else "client"
    found = table(rows, metric=metric, average=average).cells
    for column, cells in found.groupby("column"):
        numbers = wide(rows, column, metric, average)
        means = numbers.mean(axis=1)
        top = means.idxmin() if metric in LESS else means.idxmax()
        marked = set(cells.row[cells.best])
        assert top in marked
        for row in set(means.index) - {top}:
            gap = Column(numbers).difference(row, top)
            assert (row in marked) == (gap.low <= 0 <= gap.high)


def test_rows_and_runs_make_one_table_in_the_order_given(rows, results):
    text = table(rows).text()
    assert list(text.index) == ["FedPer", "Local"] and list(text) == list(COLUMNS)
    again = table(*results, rows="method", columns="partition_args.alpha").text()
    assert list(again) == ["default", "1"]
    assert again.to_numpy().tolist() == text.to_numpy().tolist()
    turned = table(*results[::-1], rows="method", columns="partition_args.alpha").text()
    assert list(turned.index) == ["local", "fedper"] and list(turned) == ["1", "default"]
    tagged = [run(e, device="cpu") for e in grid(BASE, ROWS, COLUMNS)]
    assert list(table(*tagged).text()) == list(COLUMNS), "the tags of the grid"


def test_every_form_has_every_number(rows, tmp_path):
    found = table(rows, against="Local")
    numbers = [f"{v:.2f}" for v in found.cells.value]
    for text in (repr(found), found.latex(), found.markdown(), found._repr_html_()):
        assert all(number in text for number in numbers) and "Local" in text
        assert found.caption.split(".")[0] in text
    assert r"1 \& 10 \%" in found.latex() and r"\toprule" in found.latex()
    assert "1 &amp; 10 %" in found._repr_html_()
    kept = pd.read_csv(tmp_path / "t.csv") if found.csv(tmp_path / "t.csv") else None
    assert np.allclose(kept.value, found.cells.value)


def test_a_run_that_diverged_is_counted_and_no_number(results):
    ended = [r for r in results if r.experiment.partition_args.get("alpha") != 1.0]
    bad = run(BASE.but(method="fedper", lr=1e30, seed=9), device="cpu")
    only = run(BASE.but(method="fedavg", lr=1e30), device="cpu")
    assert not bad.ok and not only.ok
    text = table(*ended, bad, only, rows="method").text()
    assert text.loc["fedper"].item().endswith("diverges (1 of 4)")
    assert text.loc["fedavg"].item() == "diverges (1 of 1)"
    before = table(*ended, rows="method").text()
    assert text.loc["fedper"].item().startswith(before.loc["fedper"].item())
    with pytest.raises(ValueError, match="none of 1 runs ended with finite numbers"):
        table(only)


def without(rows, seed, row="FedPer", named="Frail"):
    """A row's runs once more, under another name, but for a seed."""
    own = rows[(rows.row == row) & (rows.seed != seed)]
    return own.assign(row=named, run=own.run + named, key=own.key + named)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_missing_seed_is_said_and_neither_gains_nor_loses_a_rank(rows, seed):
    """FedPer once more without a seed: its mean is another one, and it is as good."""
    both = pd.concat([rows, without(rows, seed)], ignore_index=True)
    for some in (both, both[both.row != "Local"], both[both.row != "Local"][::-1]):
        found = table(some, against="FedPer")
        cells = found.cells.set_index(["column", "row"])
        for column in COLUMNS:
            assert cells.best[column, "Frail"] == cells.best[column, "FedPer"]
            assert cells.value[column, "Frail"] != cells.value[column, "FedPer"]
            assert cells.difference[column, "Frail"] == 0
        frail = found.text().loc["Frail", list(COLUMNS)]
        assert frail.str.endswith("(2 of 3 seeds)").all()
        assert "seeds)" not in found.text().drop("Frail").to_string()
        for text in (found.latex(), found.markdown(), found._repr_html_(), repr(found)):
            assert text.count("(2 of 3 seeds)") == len(COLUMNS) and "seeds that both have" in text
    assert "both have" not in table(rows).caption


def test_bold_is_decided_over_the_seeds_that_rows_share(rows):
    """A seed moves all methods by 40 points, and Local is a point better with each."""
    small = (rows.row + rows.column).map(len) * rows.seed % 3 * 0.01
    level = 40.0 * rows.seed + (rows.row == "Local") + small
    made = rows.assign(value=level.where(rows.metric == "acc_pct", rows.value))
    both = pd.concat([made, without(made, 0)], ignore_index=True)
    cells = table(both).cells
    assert cells.value[cells.row == "Frail"].min() > cells.value[cells.row != "Frail"].max()
    assert set(cells.row[cells.best]) == {"Local"}
    one = both[
        (both.row != "Local") & (both.seed > 0) & ~((both.row == "Frail") & (both.seed == 1))
    ]
    assert table(one).cells.best.all(), "one shared seed, and no difference there"


def test_rows_that_share_no_seed_have_no_bold_between_them(rows):
    apart = rows[(rows.row == "Local") == (rows.seed == 2)]
    found = table(apart, against="Local")
    assert not found.cells.best.any() and found.cells.difference.isna().all()
    text = found.text()
    assert text.loc["FedPer", "0.1"].endswith("(2 of 3 seeds)")
    assert text.loc["Local", "0.1"].endswith("(1 of 3 seeds)")
    alone = table(rows[(rows.row == "Local") & (rows.seed == 0)])
    assert alone.cells.best.all(), "a row alone is the best of its column"


def test_rows_and_results_make_one_table_of_runs_that_did_not_end(rows):
    """One seed diverges, all do, one raises an error: each is said, by both ways alike."""
    tagged = [e for e in grid(BASE, ROWS, seeds=range(3)) if e.tags["row"] == "FedPer"]
    wild = [e.but(lr=1e30 if e.seed == 1 else e.lr, tags={"row": "Wild"}) for e in tagged]
    gone = [e.but(lr=1e30, tags={"row": "Gone"}) for e in tagged]
    swept = sweep([*tagged, *wild, *gone], device="cpu")
    results = [run(e, device="cpu") for e in [*tagged, *wild, *gone]]
    found, again = table(swept, against="FedPer"), table(*results, against="FedPer")
    pd.testing.assert_frame_equal(found.cells, again.cells)
    assert repr(found) == repr(again) and found.latex() == again.latex()
    assert list(found.text().index) == ["FedPer", "Wild", "Gone"]
    assert found.text().loc["Wild", "value"].endswith(", diverges (1 of 3)")
    assert found.text().loc["Gone"].tolist() == ["diverges (3 of 3)", ""]
    assert found.cells.best.tolist() == [True, True, False], "over the seeds that both have"
    assert "both have" in found.caption
    whole = pd.concat([r.rows for r in results], ignore_index=True)
    assert repr(table(whole, against="FedPer")) == repr(found), "a history that broke off is none"
    assert repr(table(swept, swept, against="FedPer")) == repr(found)
    with pytest.raises(ValueError, match="none of 3 runs ended"):
        table(swept[swept.row == "Gone"])

    torn = [e.but(batch=5000 if e.seed > 0 else e.batch, tags={"row": "Torn"}) for e in tagged]
    failed = sweep([*tagged, *torn], device="cpu")
    lost = failed[failed.metric == "failed"]
    assert lost.seed.tolist() == [1, 2] and set(lost.row) == {"Torn"} and set(lost.value) == {0}
    assert table(failed).text().loc["Torn"].item().endswith(", fails (2 of 3)")
    with pytest.raises(ValueError, match="batch=5000"):
        sweep(torn[1:], device="cpu")


def test_rows_of_runs_that_did_not_end_outlive_a_file(rows, tmp_path):
    cells = [BASE.but(lr=lr, tags={"row": f"lr {lr}"}) for lr in (0.1, 1e30)]
    swept = sweep([cells[0], cells[0].but(seed=1), cells[1]], device="cpu")
    kept = pd.read_csv(export(tmp_path / "rows.csv", swept), keep_default_na=False)
    assert repr(table(kept)) == repr(table(swept)) and "diverges (1 of 1)" in repr(table(kept))


def federation(seed=0, test=True):
    g = np.random.default_rng(seed)
    x, lists = g.random((40, 8), dtype=np.float32), np.arange(40).reshape(4, 10)
    return Federation(x, np.arange(40) % 2, lists[:2], test=lists[2:] if test else None)


def test_clients_without_test_data_are_said_with_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    e = Experiment(dataset="own", model="mlp", rounds=1)
    said = r"no client has test data.*test=\[...\] or split='70/10/20'"
    bare = run(e, fed=federation(test=False), device="cpu")
    assert re.search(said, capsys.readouterr().err)
    for make in (lambda: table(bare), lambda: table(bare.rows), lambda: plot(bare)):
        with pytest.raises(ValueError, match=said):
            make()
    run(e, fed=federation(), device="cpu")
    assert "no client" not in capsys.readouterr().err


def test_a_loop_over_federations_is_told_of_the_sweep_that_pools_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    e = Experiment(dataset="own", model="mlp", rounds=1)
    looped = [run(e.but(seed=s), fed=federation(s), device="cpu") for s in (0, 1)]
    with pytest.raises(ValueError, match=r"pool \(.*sweep\(cells, fed=lambda seed: Federation"):
        table(*looped, rows="method")
    cells = [e.but(seed=s) for s in (0, 1)]
    assert table(sweep(cells, fed=federation, device="cpu")).cells.seeds.tolist() == [2]
    other = [run(e.but(batch=b), fed=federation(), device="cpu") for b in (5, 10)]
    with pytest.raises(ValueError, match="batch") as refused:
        table(pd.concat([r.rows for r in other]))
    assert "lambda" not in str(refused.value)


def test_one_seed_has_no_interval_and_says_so(results):
    found = table(*[r for r in results if r.experiment.seed == 0], columns="partition_args.alpha")
    assert found.cells.half.isna().all() and "One seed" in found.caption
    assert "±" not in found.text().to_string()
    assert found.cells.groupby("column").best.sum().eq(1).all()


def test_the_same_run_twice_is_one_seed(results, rows):
    how = dict(rows="method", columns="partition_args.alpha")
    once, twice = table(*results, **how), table(*results, *results, **how)
    pd.testing.assert_frame_equal(once.cells, twice.cells)
    pd.testing.assert_frame_equal(table(rows).cells, table(rows, rows).cells)


def test_one_run_in_two_rows_is_in_both(results):
    """Two rows may say one Experiment in two ways: the run is computed once and shown twice."""
    own = [r for r in results if r.experiment.method == "local"]
    own, also = (
        [
            replace(
                r,
                experiment=r.experiment.but(
                    tags={"row": row, "column": str(r.experiment.partition_args)}
                ),
            )
            for r in own
        ]
        for row in ("Local", "Alone")
    )
    found = table(*own, *also)
    values = found.cells.set_index(["column", "row"]).value.unstack("row")
    assert (values["Local"] == values["Alone"]).all() and len(values) == 2
    assert table(*own, *also, rows="method").cells.seeds.tolist() == [3, 3], "one run is one seed"


def test_a_run_that_diverged_counts_once_in_each_row(results):
    lost = replace(results[0], meta=results[0].meta | {"status": "failed: x"})
    twice = [lost, replace(lost, experiment=lost.experiment.but(tags={"row": "again"}))]
    said = (
        table(*results[1:], *twice, rows="method", columns="partition_args.alpha")
        .text()
        .to_string()
    )
    assert "diverges (1 of 3)" in said


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda r, f: table(f, digits=-1), ValueError, "digits=-1: allowed is an integer from 0"),
        (lambda r, f: table(f, digits="2"), ValueError, "digits='2': allowed"),
        (lambda r, f: table(f, select="best"), ValueError, "select 'best' is unknown"),
        (lambda r, f: table(f, average="mean"), ValueError, "average 'mean' is unknown; .*client"),
        (lambda r, f: table(f[["row", "value"]]), ValueError, "lacks the columns run, .*sweep"),
        (lambda r, f: table(pd.DataFrame()), ValueError, "lacks the columns"),
        (lambda r, f: runs(lr="0.1"), ValueError, r"runs\(lr='0.1'\): got str, allowed is float"),
        (lambda r, f: runs(method="fedpr"), ValueError, "method 'fedpr' is unknown; did you mean"),
        (lambda r, f: runs(dataset=["digits", "digit"]), ValueError, "'digit' is unknown"),
        (lambda r, f: runs(plan="wrapp"), ValueError, "plan='wrapp'.: allowed is one of"),
        (lambda r, f: runs(record="weights"), ValueError, "allowed is tuple"),
        (lambda r, f: export("no/such/x.csv", f), OSError, "lies in no folder: no/such is none"),
        (lambda r, f: export(".", f), OSError, "is a folder; give the name of a file"),
        (lambda r, f: table(f).csv("no/such/x.csv"), OSError, "lies in no folder"),
        (lambda r, f: table(), ValueError, "there is nothing"),
        (lambda r, f: table(r), TypeError, "got list"),
        (lambda r, f: table(*r, rows="method"), ValueError, "partition_args.alpha"),
        (lambda r, f: table(f, against="Ditto"), ValueError, "Ditto"),
        (lambda r, f: table(f, metric="auc"), ValueError, "auc"),
        (lambda r, f: table(*r, rows="methd"), ValueError, "methd"),
        (lambda r, f: table(f, rows="lr"), ValueError, "'lr'"),
        (lambda r, f: table(f, when="tuned 3"), ValueError, "before, client"),
        (lambda r, f: table(f, metric="loss"), ValueError, "before, pooled"),
        (lambda r, f: export("x.csv"), ValueError, "there is nothing"),
        (lambda r, f: export("x.csv", f, clients=True), TypeError, "runs"),
        (lambda r, f: runs(methd="fedper"), ValueError, "methd"),
        (lambda r, f: runs(status="over"), ValueError, "over"),
    ],
)
def test_what_makes_no_table_is_said(results, rows, call, error, says):
    with pytest.raises(error, match=says):
        call(results, rows)


def test_runs_are_found_by_their_fields(results):
    assert len(results) == 12
    assert {r.experiment.method for r in runs(method="local")} == {"local"}
    assert len(runs(partition_args={"alpha": 1.0}, seed=(0, 1))) == 4
    assert runs(dataset="mnist") == [] and not [r for r in runs() if not r.ok]


def test_filters_take_values_in_any_form_that_an_experiment_takes(tmp_path, monkeypatch):
    """What a run is made with finds it, and nothing else: of every field that may be written in several ways."""
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    base = Experiment(clients=3, model="mlp", rounds=1, partition="iid", max_samples=20)
    weights = tmp_path / "w.pt"
    torch.save(run(base.but(keep_models=True), device="cpu").model(0).state_dict(), weights)
    forms = {
        "finetune": [{"epochs": 1}, [{"epochs": 1, "only": "all"}], ({"epochs": 1},)],
        "augment": ["RandomHorizontalFlip", ["RandomHorizontalFlip"], [{"name": "RandomHorizontalFlip"}]],
        "record": [("train",), ["train"]],
        "init_from": [weights, str(weights)],
        "seed": [7, range(6, 9), (s for s in [7]), np.arange(7, 8), {7}, np.int64(7)],
        "lr": [1, 1.0, np.float64(1), [1, 2]],
        "plugins": [("json",), ["json"]],
        "method": ["local", ("local", "fedper"), np.array(["local"])],
        "method_args": [{}],
    }  # fmt: skip
    for name, ways in forms.items():
        value = ways[0]
        r = run(base.but(**{name: value, "momentum": 0.5}), device="cpu")
        for way in ways:
            assert r.id in {found.id for found in runs(**{name: way, "momentum": 0.5})}, (name, way)
        if name != "method_args":
            assert r.id not in {f.id for f in runs(**{name: getattr(base, name)})}, name
    start = run(base.but(init_from=base), device="cpu")
    assert [f.id for f in runs(init_from=base)] == [start.id]


def test_filters_find_what_a_run_has_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    e = Experiment(clients=3, rounds=1, max_samples=20, method="fedprox", optimizer="adam")
    own = run(e, device="cpu").id
    spelled = [
        (field, {name: declared.default})
        for field in keys.ARGS
        for name, declared in keys._declared(e, field).items()
        if declared.default not in (keys.NONE, None)
    ]
    assert len({field for field, _ in spelled}) > 3
    for field, value in (*spelled, ("partition_seed", 0), ("eval_after", True)):
        assert e.but(**{field: value}).id == own
        assert [r.id for r in runs(**{field: value})] == [own], (field, value)
    others = dict(partition_args={"alpha": 0.3}, method_args={"mu": 7.0}, partition_seed=1)
    for field, value in (others | dict(eval_after=False, method_args={"none": 1})).items():
        assert runs(**{field: value}) == []
    with pytest.raises(ValueError, match="the store keeps no tags"):
        runs(tags={"row": "a"})


def test_a_file_that_is_there_stays_whole_where_it_cannot_be_replaced(
    results, tmp_path, monkeypatch
):
    def full(*args):
        raise OSError(28, "No space left on device")

    for write in (lambda p: export(p, *results), lambda p: table(*results).csv(p)):
        path = tmp_path / "mine.csv"
        path.write_text("what was there")
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", full)
            with pytest.raises(OSError, match="No space left.*what was there is as it was"):
                write(path)
        assert path.read_text() == "what was there" and len(list(tmp_path.iterdir())) == 1
        write(str(path))
        assert len(pd.read_csv(path))


def test_an_export_holds_all_rows(results, tmp_path):
    out = export(tmp_path / "rows.csv", *results)
    kept = pd.read_csv(out, keep_default_na=False)
    assert len(kept) == sum(len(r.rows) for r in results)
    assert kept.value.sum() == pytest.approx(sum(r.rows.value.sum() for r in results))
    clients = pd.read_csv(export(tmp_path / "clients.csv", *results, clients=True))
    assert set(clients.run) == {r.id for r in results}
    assert len(clients) == sum(map(len, (r.clients for r in results)))
    for (key, seed), own in clients.groupby(["run", "seed"]):
        (of,) = [r for r in results if r.id == key]
        assert seed == of.experiment.seed and np.allclose(
            own.acc_pct, of.clients.acc_pct, equal_nan=True
        )


@pytest.mark.parametrize("name", sorted(OURS))
def test_who_serves_all_clients_one_model_is_known(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    few = dict(rounds=2, model="mlp", max_samples=30, lr=0.05, keep_models=True, holdout=0.2)
    found = run(Experiment(clients=3, method=name, **few), device="cpu")
    x = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first, *others = (found.model(i)(x) for i in range(3))
    alike = all(torch.equal(first, other) for other in others)
    assert alike == (name in ONE_MODEL) or (alike and name in HERE)


OWN = Experiment(dataset="own", model="mlp", rounds=1)
SEEDS = (0, 1)


def swept(fed, *methods):
    return sweep([OWN.but(method=m, seed=s) for m in methods for s in SEEDS], fed=fed, device="cpu")


def ran(fed, *methods):
    return [
        run(OWN.but(method=m, seed=s), fed=fed(s), device="cpu") for m in methods for s in SEEDS
    ]


def dealt_anew():
    """One function, two sweeps: equal settings over other clients."""
    where = [0]

    def fed(seed, where=where):
        where[0] += 1
        return federation(where[0])

    return [swept(fed, "fedavg"), swept(fed, "fedper")]


OTHER = {
    "results": lambda: [*ran(lambda s: federation(1), "fedavg"), *ran(lambda s: federation(2), "fedper")],
    "frames": lambda: [swept(federation(1), "fedavg"), swept(federation(2), "fedper")],
    "one frame": lambda: [pd.concat([swept(federation(1), "fedavg"), swept(federation(2), "fedper")])],
    "both": lambda: [*ran(lambda s: federation(1), "fedavg"), swept(federation(2), "fedper")],
    "function": dealt_anew,
    "one seed of two": lambda: [
        swept(federation, "fedavg"), swept(lambda seed: federation(2 * seed), "fedper")
    ],
}  # fmt: skip
SAME = {
    "one Federation": lambda: [swept(federation(1), "fedavg", "fedper")],
    "a Federation a seed": lambda: [swept(federation, "fedavg", "fedper")],
    "two sweeps": lambda: [swept(federation, "fedavg"), swept(federation, "fedper")],
    "results": lambda: ran(lambda s: federation(1), "fedavg", "fedper"),
}


@pytest.mark.parametrize("way", OTHER)
def test_rows_over_other_data_of_ones_own_are_not_compared(way, tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    given = OTHER[way]()
    frames = [g if isinstance(g, pd.DataFrame) else g.rows for g in given]
    for some in (given, given[::-1], frames):
        with pytest.raises(
            ValueError, match="other data or clients .*one Federation a seed.*column"
        ):
            table(*some, rows="method")
    # Each in a column of its own is no comparison.
    apart = [f.assign(column=f.method) for f in frames]
    assert not table(*apart).cells.empty


def test_rows_of_another_store_are_told_apart_by_their_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "a"))
    given = [swept(federation(1), "fedavg"), swept(federation(2), "fedper")]
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "b"))
    with pytest.raises(ValueError, match="other data or clients"):
        table(*given)


@pytest.mark.parametrize("way", SAME)
def test_rows_over_the_same_data_seed_by_seed_are_compared(way, tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    found = table(*SAME[way](), rows="method", against="fedavg").cells
    assert found.seeds.tolist() == [2, 2] and found.difference.notna().tolist() == [False, True]
