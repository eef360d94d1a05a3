"""Nothing unlike is pooled: what is one setting, and what tables and figures do with several."""

import dataclasses
import pickle

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from pfl_core import Experiment, Federation, run, sweep
from pfl_core.analysis import plots, select
from pfl_core.analysis.select import pick, summary
from pfl_core.experiments import settings
from pfl_core.experiments.settings import SEEDS, SILENT, differences_text, setting
from pfl_core.methods.base import make_method
from pfl_papers.evidence import committed

BASE = Experiment(clients=3, model="mlp", rounds=1, max_samples=20)
ABOUT = {"revision": 1, "pool": "a" * 64, "code": ""}
SOURCE = Experiment(clients=3, model="mlp", rounds=2)
OTHER = dict(  # of each field another value than BASE has
    dataset="digits100",
    partition="shards",
    partition_args={"alpha": 0.5},
    clients=4,
    model="cnn",
    model_args={"hidden": 7},
    method="fedper",
    method_args={"finetune_epochs": 2},
    rounds=2,
    participation=0.5,
    epochs=2,
    steps=3,
    batch=8,
    plan="drop",
    shuffle=False,
    lr=0.5,
    lr_schedule="cosine",
    lr_schedule_args={"floor": 0.1},
    optimizer="adam",
    optimizer_args={"eps": 1e-6},
    momentum=0.5,
    weight_decay=0.1,
    server="adam",
    server_args={"tau": 0.01},
    clip=1.0,
    buffers="average",
    head="fc",
    head_depth=2,
    head_by="module",
    head_init="own",
    holdout=0.1,
    normalize="half",
    max_samples=10,
    eval_every=2,
    eval_after=False,
    eval_clients=2,
    seed=1,
    partition_seed=1,
    dtype="float64",
    precision="tf32",
    finetune=[{"epochs": 1}],
    augment=["RandomInvert"],
    client_dropout=0.5,
    stragglers=0.5,
    keep_models=True,
    keep_scores=True,
    init_from=SOURCE,
    adopt=True,
    new_head=True,
    record=("weights",),
    metrics=("auc",),
    plugins=("json",),
)
NEUTRAL = {*SEEDS, *SILENT}


def of(e, **about):
    return setting(e.plain(), ABOUT | about)


def changed(name):
    base = BASE.but(method="fedper") if name == "method_args" else BASE
    base = base.but(init_from=SOURCE) if name in ("adopt", "new_head") else base
    base = base.but(method="fedaghn") if name == "record" else base
    base = base.but(optimizer="adamw") if name == "optimizer_args" else base
    base = base.but(server="adam") if name == "server_args" else base
    base = base.but(lr_schedule="cosine") if name == "lr_schedule_args" else base
    return base, base.but(**{name: OTHER[name]})


def test_every_field_is_tried():
    assert {f.name for f in dataclasses.fields(Experiment)} - {"tags"} == OTHER.keys()


@pytest.mark.parametrize("name", OTHER)
def test_each_field_but_the_seeds_and_what_is_kept_tells_settings_apart(name):
    base, other = changed(name)
    assert (of(base) == of(other)) == (name in NEUTRAL)
    if name not in NEUTRAL:
        said = differences_text([of(base), of(other)])
        assert name in said
        if name in ("lr", "batch", "method", "buffers"):
            assert said == f"{name} ({getattr(base, name)}, {getattr(other, name)})"


@pytest.mark.parametrize(
    "name", sorted(OTHER.keys() - NEUTRAL - {"init_from", "adopt", "new_head", "finetune"})
)
def test_fields_of_a_source_count_too(name):
    base, other = changed(name)
    a, b = BASE.but(init_from=base), BASE.but(init_from=other)
    assert of(a) != of(b) and f"init_from.{name}" in differences_text([of(a), of(b)])


@pytest.mark.parametrize("name", settings.ABOUT)
def test_data_code_and_revision_tell_settings_apart(name):
    assert of(BASE) != of(BASE, **{name: "b" * 16})
    assert name in differences_text([of(BASE), of(BASE, **{name: "b" * 16})])


def test_a_setting_has_one_form_however_it_is_written():
    plain = BASE.plain()
    for same in ({"lr": 0.01}, {"momentum": 0}, {"momentum": -0.0}, {"clients": 3.0}):
        assert setting(plain | same, ABOUT) == of(BASE)
    spelled = BASE.but(method="fedprox").plain()
    default = {"mu": make_method("fedprox").mu}
    assert setting(spelled | {"method_args": default}, ABOUT) == setting(spelled, ABOUT)
    assert setting(plain, ABOUT | {"revision": 1.0}) == of(BASE)


# -- rows ------------------------------------------------------------------------------------------

UNLIKE = {  # how two runs of a cell may be unlike
    "alpha": dict(partition_args={"alpha": 0.5}),
    "lr": dict(lr=0.5),
    "width": dict(model_args={"hidden": 7}),
    "rounds": dict(rounds=2),
    "eval_every": dict(eval_every=2),
}


def rows_of(*experiments):
    return sweep(list(experiments))


def drawn(rows, **how):
    """`curves` of rows."""
    fig, ax = plt.subplots()
    try:
        seen = (rows.when == "before") & (rows.split == "test") & (rows.metric == "acc_pct")
        plots.curves(rows[seen & (rows["average"] == "client")].assign(row="x"), ax, **how)
    finally:
        plt.close(fig)


@pytest.mark.parametrize("what", UNLIKE)
@pytest.mark.parametrize("seed", [0, 1])
def test_tables_and_curves_refuse_what_is_unlike(store, what, seed):
    rows = rows_of(BASE, BASE.but(seed=seed, **UNLIKE[what]))
    field = next(iter(UNLIKE[what]))
    with pytest.raises(ValueError, match=f"differ in more than the seed: .*{field}"):
        summary(pick(rows), rows="method", columns="dataset")
    with pytest.raises(ValueError, match=field):
        drawn(rows)


def test_seeds_are_pooled_and_one_run_is_one_seed(store):
    rows = rows_of(BASE, BASE.but(seed=1), BASE.but(partition_seed=5))
    table = summary(pick(rows), rows="method", columns="dataset")
    values = pick(rows).value
    wanted = f"{values.mean():.2f} ± {values.std(ddof=1):.2f}"
    assert table.iloc[0, 0] == wanted
    relabelled = rows.assign(row="again", artefact="other")
    for twice in (pd.concat([rows, rows]), pd.concat([rows, relabelled])):
        assert summary(pick(twice), rows="method", columns="dataset").iloc[0, 0] == wanted
    kept = rows_of(BASE, BASE.but(keep_models=True))  # two runs, one computation
    assert kept.run.nunique() == 2
    assert "±" not in summary(pick(kept), rows="method", columns="dataset").iloc[0, 0]


def test_numbers_of_several_kinds_are_no_seeds(store):
    rows = rows_of(BASE, BASE.but(seed=1))
    for other in (
        dict(when="after"),
        dict(average="pooled"),
        dict(metric="loss", average="pooled"),
    ):
        both = pd.concat([pick(rows), pick(rows, **other)])
        with pytest.raises(ValueError, match="several kinds"):
            summary(both, rows="method", columns="dataset")


@pytest.mark.parametrize("rule", [*select.SELECT][:2])
def test_a_run_that_stands_twice_with_two_numbers_is_refused(store, rule):
    rows = rows_of(BASE)
    with pytest.raises(ValueError, match="stands in these rows twice, with two numbers"):
        pick(pd.concat([rows, rows.assign(value=rows.value + 1)]), rule)
    rounded = rows.assign(value=rows.value.round(4))  # as committed rows have it
    assert pick(pd.concat([rows, rounded]), rule).value.item() == pick(rows, rule).value.item()


def test_own_data_are_told_apart(store):
    e = Experiment(dataset="own", model="mlp", rounds=1)
    feds = []
    for seed in (0, 1):
        x = np.random.default_rng(seed).random((40, 8), dtype=np.float32)
        lists = np.arange(40).reshape(4, 10)
        feds.append(Federation(x, np.arange(40) % 2, lists[:2], test=lists[2:]))
    rows = pd.concat([run(e.but(seed=s), fed=fed).rows for s, fed in enumerate(feds)])
    with pytest.raises(ValueError, match="pool"):
        summary(pick(rows), rows="method", columns="dataset")


@pytest.mark.parametrize("form", ["memory", "folder", "processes"])
def test_own_data_that_are_dealt_by_several_seeds_are_replicates(store, tmp_path, form):
    e = Experiment(dataset="own", model="mlp", rounds=1)
    g = np.random.default_rng(0)
    x, y = g.random((60, 8), dtype=np.float32), np.arange(60) % 2

    def rows(seed, **changes):
        how = dict(x=x, y=y, partition="dirichlet", alpha=0.5, clients=2, seed=seed) | changes
        fed = Federation.dealt(**how)
        if form == "folder":
            fed.save(folder := tmp_path / fed.hash)
            fed = Federation.open(folder)
        fed = pickle.loads(pickle.dumps(fed)) if form == "processes" else fed
        return run(e.but(seed=seed), fed=fed).rows

    first = rows(0)
    pooled = pd.concat([first, rows(1), rows(2)])
    assert pooled.run.nunique() == 3 and pooled.setting.nunique() == 1
    summary(pick(pooled), rows="method", columns="dataset")
    for other in (dict(alpha=5.0), dict(x=x + 1), dict(y=1 - y), dict(classes=3)):
        with pytest.raises(ValueError, match="pool"):
            both = pd.concat([first, rows(1, **other)])
            summary(pick(both), rows="method", columns="dataset")


def test_rows_that_were_read_from_a_file_say_which_runs_to_compare(store, tmp_path, monkeypatch):
    rows = rows_of(BASE, BASE.but(lr=0.5))
    rows.to_csv(tmp_path / "rows.csv", index=False)
    monkeypatch.setattr(settings, "_known", {})
    again = pd.read_csv(tmp_path / "rows.csv", keep_default_na=False)
    with pytest.raises(ValueError, match=rf"pfl_core show {' '.join(rows.run.unique())}"):
        summary(pick(again), rows="method", columns="dataset")


def test_committed_rows_have_settings_and_no_cell_pools_two():
    for part in committed.parts().values():
        rows = part.rows()
        measured = rows[rows["average"] != "derived"]
        cells = measured.groupby(["artefact", "row", "column"]).setting
        assert (cells.nunique() == 1).all() and cells.apply(lambda s: (s != "").all()).all()


def test_a_committed_run_and_its_twin_in_the_store_have_one_setting():
    for part in list(committed.parts().values())[:2]:
        rows = part.rows().drop_duplicates("run")
        known = committed.results().runs
        for run_id, said in zip(rows.run[:20], rows.setting[:20], strict=True):
            e = committed.experiment(run_id).checked()
            assert setting(e.plain(), dict(known.loc[run_id])) == said


# -- untrained models ------------------------------------------------------------------------------


def test_last10_leaves_the_untrained_models_out(store):
    rows = rows_of(BASE.but(rounds=3))
    seen = rows[(rows.split == "test") & (rows.metric == "acc_pct") & (rows["average"] == "client")]
    before, after = (seen[seen.when == w].set_index("rounds").value for w in ("before", "after"))
    assert 0 in before.index and 0 in after.index
    assert pick(rows, "last10").value.item() == pytest.approx(before[before.index > 0].mean())
    # after local training models of round 0 are trained
    assert pick(rows, "last10", "after").value.item() == pytest.approx(after.mean())
    with pytest.raises(ValueError, match="use 'last'"):
        pick(rows_of(BASE.but(rounds=0)), "last10")
