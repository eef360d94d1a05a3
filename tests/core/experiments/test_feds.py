"""Own data for many seeds: one Federation for all, or one a seed; in processes, in tables, in tuning."""

import numpy as np
import pytest

from pfl_core import Experiment, Federation, load, run, sweep, tune
from pfl_core.analysis.select import pick, summary
from pfl_core.experiments import sweep as sweeps
from pfl_core.experiments.feds import OfSeeds, of_seeds

OWN = Experiment(dataset="own", model="mlp", model_args={"hidden": 8}, rounds=1, lr=0.1)
POOL = load("digits")


def by_hand(seed):
    """Other samples for each seed: three clients of 40, 20 and 40."""
    rng = np.random.default_rng(seed)
    mine = rng.permutation(len(POOL.y))[:300]
    at = np.arange(300).reshape(3, 100)
    parts = [list(at[:, a:b]) for a, b in ((0, 40), (40, 60), (60, 100))]
    return Federation(POOL.x[mine], POOL.y[mine], *parts, classes=10)


def dealt(seed):
    return Federation.dealt(POOL.x, POOL.y, "dirichlet", clients=3, seed=seed, split="50/20/30")


@pytest.mark.parametrize("fed", [by_hand, dealt, lambda seed: dealt(seed)])
def test_each_seed_is_run_over_its_own_federation(fed, tmp_path):
    cells = [OWN.but(seed=s, method=m) for m in ("fedavg", "local") for s in (0, 1)]
    rows = sweep(cells, fed=fed, store=tmp_path / "a", device="cpu", jobs=1)
    for e in cells:
        alone = run(e, fed=fed(e.seed), store=tmp_path / "b", device="cpu")
        mine = rows[(rows.seed == e.seed) & (rows.method == e.method)]
        assert set(mine.run) == {alone.id}
        keep = alone.rows.metric != "train_s"
        assert mine[mine.metric != "train_s"].value.tolist() == alone.rows.value[keep].tolist()


def test_federations_of_one_function_are_replicates(tmp_path):
    how = dict(store=tmp_path, device="cpu")
    first = run(OWN, fed=by_hand(0), **how)  # without a word on where its data are from
    rows = sweep([OWN.but(seed=s) for s in (0, 1)], fed=by_hand, **how)
    assert rows.setting.nunique() == 1 and first.id in set(rows.run)
    assert "±" in summary(pick(rows)).iloc[0, 0]
    other = sweep([OWN], fed=lambda seed: by_hand(seed + 7), **how)
    assert not set(other.setting) & set(rows.setting)
    kept = run(OWN.but(seed=1), fed=by_hand(1), **how)
    assert kept.meta["dealing"] and kept.setting == rows.setting[0]


def test_federations_that_a_partition_dealt_stay_the_replicates_that_they_are(tmp_path):
    how = dict(store=tmp_path, device="cpu")
    alone = [run(OWN.but(seed=s), fed=dealt(s), **how).setting for s in (0, 1)]
    rows = sweep([OWN.but(seed=s) for s in (0, 1)], fed=dealt, **how)
    assert {*alone} == {*rows.setting} and len({*alone}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("lies", ["memory", "folder"])
def test_processes_have_the_federation_of_their_seed(tmp_path, lies):
    def fed(seed):
        if lies == "memory":
            return by_hand(seed)
        by_hand(seed).save(tmp_path / f"data{seed}")
        return Federation.open(tmp_path / f"data{seed}")

    cells = [OWN.but(seed=s) for s in (0, 1, 2)]
    one = sweep(cells, fed=fed, store=tmp_path / "one", device="cpu", jobs=1)
    two = sweep(cells, fed=fed, store=tmp_path / "two", device="cpu", jobs=2)
    same = one.metric != "train_s"
    told = ["run", "seed", "setting", "metric", "value"]
    assert two[same][told].equals(one[same][told]) and one.setting.nunique() == 1
    assert not list((tmp_path / "two").glob("own-data*"))


def test_the_function_is_called_once_a_seed():
    asked = []

    def fed(seed):
        asked.append(seed)
        return by_hand(seed)

    feds = of_seeds(fed, [3, 1, 3, 1])
    assert asked == [3, 1] and isinstance(feds, OfSeeds) and of_seeds(feds, [9]) is feds
    assert of_seeds(None, [1]) == {}


def test_tuning_over_several_seeds_has_the_federation_of_each(tmp_path):
    best, rows = tune(OWN, {"lr": [0.0, 0.2]}, seeds=(4, 5), fed=dealt, store=tmp_path)
    assert best.lr == 0.2 and rows.groupby("seed").run.nunique().to_dict() == {4: 2, 5: 2}
    want = run(OWN.but(lr=0.2, seed=5), fed=dealt(5), store=tmp_path).id
    assert want in set(rows.run)


def test_one_federation_for_several_seeds_is_said(tmp_path, capsys):
    sweep([OWN.but(seed=s) for s in (0, 1)], fed=by_hand(0), store=tmp_path)
    assert "2 seeds over one Federation, so that intervals" in capsys.readouterr().out
    sweep([OWN, OWN.but(method="local")], fed=by_hand(0), store=tmp_path)
    sweep([OWN.but(seed=s) for s in (0, 1)], fed=by_hand, store=tmp_path)
    assert "one Federation" not in capsys.readouterr().out


def some_without_val(seed):
    fed = by_hand(seed)
    return fed if seed == 0 else Federation(fed.x, fed.y, fed.index["train"], classes=10)


@pytest.mark.parametrize(
    "fed, error, said",
    [
        (lambda seed: 7, TypeError, r"fed\(0\) returned a int; allowed is a Federation"),
        (lambda: by_hand(0), TypeError, r"fed got function <lambda>.*fn\(seed\)"),
        ([by_hand(0)], TypeError, "fed is a list; allowed is a Federation"),
        ({0: by_hand(0)}, TypeError, "fed is a dict; allowed is a Federation"),
        (some_without_val, ValueError, "no validation data"),
    ],
)
def test_what_is_no_federation_is_refused_before_training(fed, error, said, monkeypatch):
    monkeypatch.setattr(sweeps, "tried", lambda *args, **kw: pytest.fail("it trained"))
    with pytest.raises(error, match=said):
        tune(OWN, {"lr": [0.1]}, fed=fed, seeds=(0, 1))
    if error is TypeError:
        with pytest.raises(error, match=said):
            sweep([OWN, OWN.but(seed=1)], fed=fed)


def test_named_data_take_no_function():
    with pytest.raises(ValueError, match="go together"):
        sweep([Experiment(rounds=0)], fed=by_hand)
