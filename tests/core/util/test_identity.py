"""One id, one computation: code, data and settings that decide numbers are in it, and nothing of another run is taken for one's own."""

import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
from torch import nn

from pfl_core import Experiment, Federation, Method, load_model, models, register_model, sweep
from pfl_core.data.pools import load
from pfl_core.engine import simulate
from pfl_core.engine.simulate import Interrupted
from pfl_core.experiments.build import client_data, federation, split, train_config
from pfl_core.experiments.run import run
from pfl_core.methods.base import METHODS
from pfl_core.util import identity, paths
from pfl_core.util.draws import Draws, seeded

TINY = dict(
    model="mlp", model_args={"hidden": 8}, partition_args={"alpha": 1.0}, clients=4, rounds=3
)
TINY |= dict(batch=16, lr=0.1, max_samples=40)
OWN = dict(dataset="own", model="mlp", model_args={"hidden": 8}, rounds=2, batch=8, lr=0.1)


def equal(a, b):
    return a.arrays.keys() == b.arrays.keys() and all(
        np.array_equal(v, b.arrays[k]) for k, v in a.arrays.items()
    )


# -- code that is not ours -----------------------------------------------------------------------------------------------


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Writes files of a folder that Python looks into, and imports or reloads the first of them."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def write(**files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        for name in reversed(files):  # what is imported first
            sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
            importlib.reload(sys.modules[name]) if name in sys.modules else importlib.import_module(
                name
            )
            sys.dont_write_bytecode = before
            made.append(name)

    yield write
    for name in made:
        sys.modules.pop(name, None)


SCALED = '''
from pfl_core import Method
{more}
class Scaled(Method):
    """{doc}"""
    name = "scaled_{key}"
    def loss(self, p, anchor, batch):
        return {factor} * super().loss(p, anchor, batch)
'''


def scaled(key, factor="0.5", doc="Scaled.", more=""):
    return SCALED.format(key=key, factor=factor, doc=doc, more=more)


def test_an_edited_method_is_another_run(store, plugin):
    plugin(scaled_a=scaled("a"))
    e = Experiment(**TINY, method="scaled_a", plugins=("scaled_a",))
    first = run(e)
    plugin(scaled_a=scaled("a", doc="Said in other words.") + "# a comment\n")
    assert run(e).id == first.id
    plugin(scaled_a=scaled("a", factor="2.0"))
    second = run(e)
    assert second.id != first.id and not equal(second, first) and (store / first.id).is_dir()


def test_a_run_keeps_its_code(store, plugin):
    plugin(scaled_k=scaled("k"))
    e = Experiment(**TINY, method="scaled_k", plugins=("scaled_k",))
    r, ours = run(e), run(Experiment(**TINY, plugins=("scaled_k",)))
    assert r.meta["code"] == e.code != "" and set(r.rows.code) == {e.code}
    assert "class Scaled(Method)" in (r.folder / "code.txt").read_text()
    assert "code.txt" in json.loads((r.folder / "experiment.json").read_text())["sha256"]
    assert (
        set(ours.rows.code) == {""} == {ours.meta["code"]}
        and not (ours.folder / "code.txt").exists()
    )


def test_a_plugin_counts_where_something_comes_from_it(plugin):
    ids = []
    for factor in ("0.5", "2.0"):
        plugin(scaled_l=scaled("l", factor=factor))
        both = dict(method="scaled_l"), dict(method="fedavg"), dict(method="fedprox")
        ids.append([Experiment(**TINY, plugins=("scaled_l",), **how).id for how in both])
    assert ids[0][0] != ids[1][0] and ids[0][1:] == ids[1][1:]
    assert Experiment(**TINY).id == ids[0][1]


def test_what_a_plugin_imports_counts_too(plugin):
    plugin(
        scaled_b=scaled("b", "FACTOR", more="from scaled_helper import FACTOR"),
        scaled_helper="FACTOR = 1.0\n",
    )
    ids = [Experiment(**TINY, method="scaled_b", plugins=("scaled_b",)).id]
    plugin(
        scaled_b=scaled("b", "FACTOR", more="from scaled_helper import FACTOR"),
        scaled_helper="FACTOR = 2.0\n",
    )
    ids.append(Experiment(**TINY, method="scaled_b", plugins=("scaled_b",)).id)
    plugin(scaled_other="X = 1\n")  # lies beside it, and nobody imports it
    assert Experiment(**TINY, method="scaled_b", plugins=("scaled_b",)).id == ids[1] != ids[0]


def test_what_is_imported_later_counts_and_is_not_imported_for_it(plugin, tmp_path):
    """Neither a package beside the method nor one of an index is executed for an id."""
    package = tmp_path / "scaled_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    late = "def late():\n    import scaled_package.inner, tensorboard.compat.proto\n"
    ids, before = [], {"scaled_package", "tensorboard.compat"} & set(sys.modules)
    for value in (1, 2):
        (package / "inner.py").write_text(f"X = {value}\n")
        importlib.invalidate_caches()
        plugin(scaled_m=scaled("m", more=late))
        ids.append(Experiment(**TINY, method="scaled_m", plugins=("scaled_m",)).id)
    assert ids[0] != ids[1]
    assert {"scaled_package", "tensorboard.compat"} & set(sys.modules) == before


def test_the_id_is_that_of_the_code_that_is_loaded(plugin, tmp_path):
    plugin(scaled_c=scaled("c"))
    e = Experiment(**TINY, method="scaled_c")
    before = e.id
    (tmp_path / "scaled_c.py").write_text(scaled("c", factor="3.0"))  # not loaded yet
    assert e.id == before


def test_an_edited_registered_function_is_another_run(plugin):
    text = "from torch import nn\nfrom pfl_core import register_model\ndef net(input_shape, classes):\n"
    text += "    return nn.Sequential(nn.Flatten(), nn.Linear(784, {width}), nn.ReLU(), nn.Linear({width}, classes))\n"
    ids = []
    for width in (8, 9, 8):
        plugin(own_net=text.format(width=width) + "register_model('own_net', net)\n")
        ids.append(Experiment(**TINY | dict(model="own_net", model_args={})).id)
    assert ids[0] == ids[2] != ids[1]
    text = "from pfl_core import register_partition\nfrom pfl_core.data.partition import Split\nimport numpy as np\n"
    text += "def dealt(pool, clients, rng):\n    o = rng.permutation(len(pool.y))[:400].reshape(clients, -1)\n"
    text += "    return Split(list(o[:, {n}:]), list(o[:, :0]), list(o[:, :{n}]))\nregister_partition('own_split', dealt)\n"
    found = []
    for n in (10, 20):
        plugin(own_split=text.format(n=n))
        e = Experiment(**TINY | dict(partition="own_split", partition_args={}))
        found.append((e.id, len(split(e).test[0])))
    assert found[0][0] != found[1][0] and [n for _, n in found] == [10, 20]


def test_what_a_script_defines_is_hashed_by_definition_and_what_it_refers_to():
    def of(text):
        space = sys.modules["__main__"].__dict__
        names = set(space)
        try:
            exec(compile(text, "<cell>", "exec"), space)
            return identity.digest(space["chosen"])
        finally:
            for n in set(space) - names:
                del space[n]

    one = of(
        "RATE = 1\ndef helper(x): return x * RATE\ndef chosen(x): return helper(x)\nchosen.__module__ = '__main__'\n"
    )
    assert one and one != of("def chosen(x): return x + 1\nchosen.__module__ = '__main__'\n")
    torchs = [identity.digest(*what) for what in ((Experiment, nn.Linear), (nn.Linear,), (nn.GRU,))]
    assert "" != torchs[0] == torchs[1] != torchs[2] != ""


def test_ours_is_not_hashed():
    assert identity.digest(Experiment, federation) == "" and not Experiment(**TINY).in_main


# -- data and settings ---------------------------------------------------------------------------------------------------


def own(K=2, **how):
    g = np.random.default_rng(0)
    x, y = g.integers(0, 256, (40 * K, 8, 8), dtype=np.uint8), g.integers(0, 3, 40 * K)
    parts = np.arange(40 * K).reshape(K, 40)
    return Federation(x, y, list(parts[:, :24]), list(parts[:, 24:30]), list(parts[:, 30:]), **how)


def test_all_of_own_data_that_decides_numbers_is_in_the_id(store):
    e = Experiment(**OWN)
    feds = [own(), own(mean=[0.5], std=[0.5]), own(mean=[0.5], std=[0.25]), own(classes=5)]
    results = [run(e, fed=f) for f in feds]
    assert len({r.id for r in results}) == 4 and not equal(results[0], results[1])
    for change in (
        dict(seed=1),
        dict(holdout=0.25),
        dict(dtype="float64"),
        dict(max_samples=12),
        dict(normalize="half"),
    ):
        other = run(e.but(**change), fed=own())
        assert other.id != results[0].id and not equal(other, results[0]), change


def test_two_seeds_are_two_sets_of_batches(store):
    fed = own()
    a, b = (run(Experiment(**OWN, seed=s, record=()), fed=fed) for s in (0, 1))
    assert (
        a.id != b.id
        and client_data(a.experiment, fed=fed).batch_indices(0, 0, batch=8).tolist()
        != client_data(b.experiment, fed=fed).batch_indices(0, 0, batch=8).tolist()
    )


def test_what_is_recorded_of_own_data_is_true(store):
    r = run(Experiment(**OWN), fed=own(K=3))
    assert (r.experiment.clients, r.experiment.partition, r.meta["clients"]) == (3, "own", 3)
    assert r.rows.partition.unique().tolist() == ["own"] and len(r.meta["mean"]) == 1


@pytest.mark.parametrize(
    "fields, given, words",
    [
        (dict(clients=99), {}, r"clients=99\) over a Federation of 2 clients; give clients=2"),
        (
            dict(normalize="half"),
            dict(mean=[0.1]),
            r"mean=\(0.1,\)\) in Experiment\(normalize='half'\)",
        ),
    ],
)
def test_contradictions_name_both_values(store, fields, given, words):
    with pytest.raises(ValueError, match=words):
        run(Experiment(**OWN | fields), fed=own(**given))
    assert not list(store.glob("*.part"))


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(seed=3), r"Federation\(seed=3\): .* say it in Experiment\(seed=...\)"),
        (dict(holdout=0.2), r"Federation\(holdout=0.2\): .* say it in Experiment\(holdout=...\)"),
        (
            dict(dtype=torch.float64),
            r"Federation\(dtype=torch.float64\): .* say it in Experiment\(dtype=...\)",
        ),
        (dict(device="cuda"), r"Federation\(device='cuda'\): .* say it in run\(device=...\)"),
        (
            dict(labels=[0]),
            r"Federation\(labels=\[0\]\): unknown; a Federation takes x, y, train, val, test, classes",
        ),
    ],
)
def test_settings_are_not_a_federations(given, words):
    with pytest.raises(TypeError, match=words):
        own(**given)


def test_floats_are_not_normalised(store):
    fed = Federation(np.zeros((8, 4), np.float32), np.arange(8) % 2, [[0, 1], [2, 3]])
    with pytest.raises(ValueError, match="normalize='half'.* over a Federation of float"):
        run(Experiment(**OWN, normalize="half"), fed=fed)


def test_what_a_script_defines_is_computed_in_its_own_process(store, capsys, monkeypatch):
    monkeypatch.setattr(Experiment, "in_main", True)
    assert sweep([Experiment(**TINY), Experiment(**TINY, seed=1)], jobs=2).run.nunique() == 2
    assert "worker processes do not find it: jobs=1" in capsys.readouterr().out


OF_A_SCRIPT = {
    "dataset": "register_dataset('mine', lambda: load('digits'))",
    "model": "register_model('mine', lambda shape, classes: models.build('mlp', shape, classes))",
    "partition": "register_partition('mine', lambda pool, clients, rng: function('iid')(pool, clients, rng))",
}


@pytest.mark.parametrize("field", OF_A_SCRIPT)
def test_what_a_script_registers_is_found_with_several_jobs(field, tmp_path):
    script = f"""
from pfl_core import *
from pfl_core import models
from pfl_core.data.partition import function
if __name__ == "__main__":
    {OF_A_SCRIPT[field]}
    e = Experiment(clients=2, rounds=1, max_samples=20, model="mlp", partition="iid").but({field}="mine")
    print(sweep([e, e.but(seed=1)], jobs=2, device="cpu").run.nunique(), e.in_main)
"""
    (tmp_path / "script.py").write_text(script)
    env = os.environ | {"PFL_RUNS": str(tmp_path), "PYTHONPATH": str(paths.PACKAGE.parent)}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "2 True", done.stderr
    assert "jobs=1" in done.stdout + done.stderr


def test_own_data_have_no_partition():
    with pytest.raises(ValueError, match="a Federation says who holds what"):
        Experiment(**OWN, partition="iid")
    with pytest.raises(ValueError, match="a Federation says who holds what"):
        Experiment(**OWN, partition_args={"alpha": 0.1})


def test_an_experiments_values_do_not_change():
    e = Experiment(**TINY, method="fedprox", method_args={"mu": 0.1})
    before = e.id
    for change in (
        lambda: e.partition_args.__setitem__("alpha", 0.05),
        lambda: e.method_args.update(mu=1.0),
        lambda: e.model_args.pop("hidden"),
    ):
        with pytest.raises(TypeError, match="make another one with experiment.but"):
            change()
    assert e.id == before and e.but(partition_args={"alpha": 0.05}).id != before


def test_another_data_folder_is_another_partition(store, tmp_path, monkeypatch):
    g, ids, sizes = np.random.default_rng(0), [], []
    for n in (120, 240):
        folder = tmp_path / f"data{n}"
        folder.mkdir()
        y = np.arange(n) % 10
        np.savez(
            folder / "mnist.npz",
            x=g.integers(0, 256, (n, 28, 28), dtype=np.uint8),
            y=y,
            is_test=np.arange(n) % 6 == 0,
        )
        monkeypatch.setenv("PFL_DATA", str(folder))
        e = Experiment(**TINY | dict(dataset="mnist", partition="iid", partition_args={}))
        ids.append(e.id)
        sizes.append(sum(map(len, split(e).train)))
    assert ids[0] != ids[1] and sizes[1] == 2 * sizes[0]


# -- other people's files in one's own place -----------------------------------------------------------------------------


def test_another_runs_folder_is_set_aside(store, capsys):
    a, b = run(Experiment(**TINY)), Experiment(**TINY, seed=1)
    shutil.copytree(a.folder, store / b.id)
    assert run(b).experiment.seed == 1 and not equal(run(b), a)
    assert f"it is run {a.id}" in capsys.readouterr().out and (store / f"{b.id}.damaged").is_dir()


def test_another_runs_checkpoint_is_set_aside(store, tmp_path, capsys):
    e = Experiment(**TINY | {"rounds": 8})
    for other in (e.but(seed=1), e.but(method="fedprox")):
        with pytest.raises(Interrupted):
            run(other, on_round=lambda r, h: r == 5)
        (store / f"{e.id}.part").mkdir()
        shutil.copy(store / f"{other.id}.part" / "checkpoint.pt", store / f"{e.id}.part")
        r = run(e)
        assert "it is of course" in capsys.readouterr().out and equal(
            r, run(e, store=tmp_path / "other")
        )
        shutil.rmtree(r.folder)


@pytest.mark.parametrize("harm", ["round", "name", "shape", "device", "revision"])
def test_a_checkpoint_that_does_not_fit_is_set_aside(store, tmp_path, capsys, harm):
    e = Experiment(**TINY)
    with pytest.raises(Interrupted):
        run(e, on_round=lambda r, h: r == 1)
    path = store / f"{e.id}.part" / "checkpoint.pt"
    z = torch.load(path, weights_only=True)
    if harm == "round":
        z["round"] = 8
    elif harm == "name":
        del z["server"]["fc.bias"]
    elif harm == "shape":
        z["server"]["fc.bias"] = torch.zeros(3)
    else:
        z["stamp"][harm] = "cuda" if harm == "device" else 7
    torch.save(z, path)
    assert equal(run(e), run(e, store=tmp_path / "other"))
    assert "set aside as checkpoint.pt.damaged" in capsys.readouterr().out


def test_another_runs_models_are_refused(store):
    a, b = (run(Experiment(**TINY, keep_models=True, seed=s)) for s in (0, 1))
    shutil.copy(b.folder / "models.pt", a.folder / "models.pt")
    with pytest.raises(ValueError, match=f"it is not what run {a.id} wrote"):
        a.model(0)
    kept = torch.load(b.folder / "models.pt", weights_only=True)
    assert (kept["id"], kept["revision"]) == (b.id, 1) and kept["version"] == b.meta["version"]


def test_what_stands_in_the_way_of_a_run_is_set_aside_before_training(store, tmp_path, capsys):
    e = Experiment(**TINY)
    store.mkdir()
    (store / e.id).symlink_to(tmp_path / "nowhere")
    (store / f"{e.id}.part").write_text("mine")
    assert run(e).ok and (store / f"{e.id}.part.damaged").read_text() == "mine"
    assert capsys.readouterr().out.count("set aside") == 2


def test_the_store_may_be_named_from_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PFL_RUNS", "~/x")
    assert run(Experiment(**TINY | {"rounds": 0})).folder.is_relative_to(tmp_path / "x")


# -- computed anew, ended early, gone on ---------------------------------------------------------------------------------


def test_recompute_keeps_the_old_result(store, capsys):
    e = Experiment(**TINY)
    first = run(e)
    (first.folder / "mark").write_text("old")
    second = run(e, recompute=True)
    kept = list(store.glob(f"{e.id}.before-*"))
    assert equal(first, second) and not (second.folder / "mark").exists()
    assert [p.name for p in kept] == [kept[0].name] and (kept[0] / "mark").read_text() == "old"
    assert f"kept as {kept[0].name}" in capsys.readouterr().out


def test_recompute_does_not_go_on_from_a_shorter_run(store):
    e, seen = Experiment(**TINY), []
    run(e, keep_state=True)
    run(e.but(rounds=5), recompute=True, on_round=lambda r, h: seen.append(r))
    assert seen[0] == 0
    whole = json.loads((store / e.id / "experiment.json").read_text())
    assert "state.pt" in whole["sha256"] and run(e).kept("state.pt")["round"] == 3
    assert not (store / e.but(rounds=5).id / "state.pt").exists()


@pytest.mark.parametrize("method", ["fedavg", "fedper", "pfedhn", "fedala"])
def test_a_longer_run_goes_on_from_a_shorter_one(store, tmp_path, method):
    e = Experiment(**TINY, method=method, participation=0.5, momentum=0.5, eval_every=2, record=())
    seen = []
    run(e, keep_state=True)
    longer = run(e.but(rounds=6), on_round=lambda r, h: seen.append(r))
    assert seen == [3, 4, 5, 6] and equal(longer, run(e.but(rounds=6), store=tmp_path / "other"))


def test_a_method_whose_rounds_depend_on_their_number_starts_anew(store):
    e, seen = Experiment(**TINY, method="apple"), []
    run(e, keep_state=True)
    run(e.but(rounds=6), on_round=lambda r, h: seen.append(r))
    assert seen[0] == 0


def test_a_run_may_end_early_with_a_result(store, tmp_path):
    e, told = Experiment(**TINY | {"rounds": 9}, eval_every=4), []
    r = run(e, on_round=lambda r, h: told.append(r) or (r == 5 and "finish"))
    short = e.but(rounds=5)
    assert (
        told == [0, 1, 2, 3, 4, 5] and r.ok and r.id == short.id and r.meta["ended_early"] == e.id
    )
    assert equal(r, run(short, store=tmp_path / "other")) and equal(run(short), r)
    assert equal(run(e), run(e, store=tmp_path / "other"))  # goes on from there
    assert equal(run(e.but(rounds=7), on_round=lambda r, h: r == 5 and "finish"), r)


def test_a_scheduled_method_does_not_end_early(store, capsys):
    with pytest.raises(Interrupted):
        run(Experiment(**TINY, method="apple"), on_round=lambda r, h: "finish")
    assert "run rounds=0 instead" in capsys.readouterr().out


def test_on_round_must_be_a_function(store):
    with pytest.raises(TypeError, match="allowed is a function"):
        run(Experiment(**TINY), on_round="finish")


def test_progress_says_the_last_accuracy(store, capsys, monkeypatch):
    monkeypatch.setattr("pfl_core.util.progress.mode", lambda *a: "log")
    monkeypatch.setattr("pfl_core.util.progress.LOG_EVERY_S", 0.0)
    r = run(Experiment(**TINY))
    last = r.history.query(
        "when == 'before' and split == 'test' and average == 'client' and metric == 'acc_pct'"
    ).value.iloc[-1]
    assert f"3/3, {last:.1f} %" in capsys.readouterr().err


def test_where_numbers_come_from_is_stored(store):
    meta = run(Experiment(**TINY)).meta
    assert meta["date"].startswith("20") and meta["date"].endswith("Z") and meta["processor"]
    assert set(meta["commit"]) <= set("0123456789abcdef+")


# -- who is evaluated ----------------------------------------------------------------------------------------------------


def test_after_follows_participation(store):
    whole, part, asked = (
        run(Experiment(**TINY, **how))
        for how in ({}, {"participation": 0.5}, {"participation": 0.5, "eval_after": True})
    )
    has = lambda r: "after/test/correct" in r.arrays  # noqa: E731
    assert has(whole) and not has(part) and has(asked)
    assert np.array_equal(part.arrays["before/test/correct"], asked.arrays["before/test/correct"])


def test_a_sample_of_clients_is_evaluated(store):
    whole, part = (run(Experiment(**TINY, eval_clients=n, keep_models=True)) for n in (0, 2))
    seen = part.arrays["n/test"] > 0
    assert seen.sum() == 2 and len(part.clients.dropna().client.unique()) == 2
    for key in ("before/test/correct", "after/test/correct"):
        assert np.array_equal(part.arrays[key][:, seen], whole.arrays[key][:, seen])
        assert not part.arrays[key][:, ~seen].any()
    acc = part.rows.query(
        "when == 'before' and split == 'test' and metric == 'acc_pct' and average == 'client'"
    ).value
    n = part.arrays["n/test"][seen]
    np.testing.assert_allclose(acc, (100 * part.arrays["before/test/correct"][:, seen] / n).mean(1))
    assert all(
        torch.equal(a, b)
        for a, b in zip(part.model(3).parameters(), whole.model(3).parameters(), strict=True)
    )
    assert np.array_equal(
        run(Experiment(**TINY, eval_clients=2, method="local")).arrays["n/test"] > 0, seen
    )
    with pytest.raises(ValueError, match="there are clients=4; 0 means all"):
        Experiment(**TINY, eval_clients=5)
    with pytest.raises(ValueError, match="probes need all clients"):
        Experiment(**TINY, eval_clients=2, record=("cka",))


def test_all_but_a_sample_takes_part(store):
    how = dict(participation=0.5, eval_after=True)
    whole, part = (run(Experiment(**TINY, eval_clients=n, **how)) for n in (0, 3))
    seen = part.arrays["n/test"] > 0
    assert np.array_equal(
        part.arrays["after/test/correct"][:, seen], whole.arrays["after/test/correct"][:, seen]
    )


# -- random numbers ------------------------------------------------------------------------------------------------------


def dropout(input_shape, classes):
    """A network with dropout."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, classes)
    )


DROPS = TINY | dict(model="with_dropout", model_args={})


@pytest.fixture(autouse=True)
def _with_dropout(monkeypatch):
    monkeypatch.setattr(
        "pfl_core.models._MODELS", dict(models._MODELS)
    )  # other tests take every model
    register_model("with_dropout", dropout)


def test_dropout_has_a_seed_a_client(store, tmp_path):
    e = Experiment(**DROPS)
    results = [run(e, store=tmp_path / str(w), workers=w) for w in (1, 2, 3)]
    assert equal(results[0], results[1]) and equal(results[0], results[2])
    torch.manual_seed(3)
    with pytest.raises(Interrupted):
        run(e, on_round=lambda r, h: r == 1)
    assert equal(run(e), results[0]) and not equal(run(e.but(seed=1)), results[0])
    with pytest.raises(ValueError, match="draws random numbers .dropout."):
        run(e, store=tmp_path / "batched", executor="batched")


def test_no_global_generator_is_read_or_written(store):
    before, numpy_before = torch.get_rng_state(), json.dumps(np.random.get_state()[1].tolist())
    for e in (
        Experiment(**TINY, method="fedcp"),
        Experiment(**TINY, method="pfedhn"),
        Experiment(**DROPS),
    ):
        run(e)
    assert (
        torch.equal(before, torch.get_rng_state())
        and json.dumps(np.random.get_state()[1].tolist()) == numpy_before
    )


@pytest.mark.parametrize(
    "state, said",
    [
        (lambda: torch.autocast("cpu", torch.bfloat16), "torch.autocast is on"),
        (torch.inference_mode, "torch.inference_mode is on"),
        (lambda: torch.device("meta"), "torch's default device is meta"),
    ],
)
def test_torchs_own_state_that_would_change_numbers_is_refused(store, state, said):
    with state(), pytest.raises(ValueError, match=said):
        run(Experiment(**TINY))
    with state(), pytest.raises(ValueError, match=said):
        sweep([Experiment(**TINY)])
    assert not list(store.glob("*"))


@pytest.mark.parametrize("state", [torch.no_grad, torch.enable_grad])
def test_whether_gradients_are_on_changes_nothing(store, state):
    one = run(Experiment(**TINY))
    with state():
        two = run(Experiment(**TINY), recompute=True)
    assert one.id == two.id
    for name in ("before/test/loss", "after/test/loss"):
        np.testing.assert_array_equal(one.arrays[name], two.arrays[name])


def noisy(draw):
    class Noisy(nn.Linear):
        def forward(self, x):
            draw()
            return super().forward(x.flatten(1))

    return lambda input_shape, classes: Noisy(784, classes)


@pytest.mark.parametrize("where", ["model", "loss", "init", "upload", "personal"])
@pytest.mark.parametrize(
    "name, draw",
    [
        ("numpy", np.random.rand),
        ("Python", random.random),
        ("torch", lambda: torch.manual_seed(54321)),
        ("torch", lambda: torch.default_generator.seed()),
    ],
)
@pytest.mark.parametrize("executor", ["threads", "batched"])
def test_a_global_generator_that_moves_is_an_error(store, where, name, draw, executor):
    states = np.random.get_state(), random.getstate(), torch.get_rng_state()
    if where == "model":
        register_model("noisy", noisy(draw))
        e = Experiment(**TINY | dict(model="noisy", model_args={}))
    else:

        def hook(self, *args, **kw):
            draw()
            return getattr(Method, where)(self, *args, **kw)

        cls = type("Drawing", (Method,), {"name": "drawing", where: hook, "__module__": __name__})
        e = Experiment(**TINY, method=cls.name)
    try:
        with pytest.raises(ValueError, match=f"code of yours moved {name}'s.*nothing is stored"):
            run(e, executor=executor)
    finally:
        METHODS.pop("drawing", None)
        np.random.set_state(states[0]), random.setstate(states[1]), torch.set_rng_state(states[2])
    finished = [f for f in store.glob("*/experiment.json") if "." not in f.parent.name]
    assert not finished and not list(store.rglob("checkpoint.pt"))


@pytest.mark.parametrize("draw", [np.random.rand, lambda: np.random.default_rng().random()])
def test_a_model_that_is_drawn_anew_is_an_error(store, draw):
    def net(input_shape, classes):
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, classes))
        nn.init.constant_(model[1].weight, float(draw()))
        return model

    register_model("drawn_anew", net)
    with pytest.raises(ValueError, match="1.weight differs between two models of one seed"):
        run(Experiment(**TINY | dict(model="drawn_anew", model_args={})))


def test_draws_are_those_of_a_seeded_generator():
    torch.manual_seed(7)
    expected = [
        torch.rand(3),
        torch.randn(3),
        nn.Linear(4, 2).weight,
        torch.randperm(5),
        nn.functional.dropout(torch.ones(9)),
    ]
    state = torch.get_rng_state()
    with seeded(7):
        drawn = [
            torch.rand(3),
            torch.randn(3),
            nn.Linear(4, 2).weight,
            torch.randperm(5),
            nn.functional.dropout(torch.ones(9)),
        ]
    assert all(torch.equal(a, b) for a, b in zip(expected, drawn, strict=True)) and torch.equal(
        state, torch.get_rng_state()
    )
    with Draws(1) as outer, Draws(2) as inner:
        torch.rand(1)
    assert (outer.count, inner.count) == (0, 1)


def test_dropout_of_a_gpu_has_a_seed_too():
    x = torch.ones(4000, requires_grad=True)
    out = []
    for seed in (1, 1, 2):
        with Draws(seed):
            out.append(
                torch.native_dropout(x, 0.25, True)
            )  # what torch takes there; it knows no generator
    assert torch.equal(out[0][0], out[1][0]) and not torch.equal(out[0][0], out[2][0])
    values, kept = out[0]
    assert torch.equal(values, kept / 0.75) and abs(kept.float().mean() - 0.75) < 0.03
    (grad,) = torch.autograd.grad(values.sum(), x)
    assert torch.allclose(grad, kept / 0.75)


def test_attention_without_dropout_draws_nothing():
    x = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    attend = nn.functional.scaled_dot_product_attention
    with Draws(1) as draws:
        assert torch.equal(attend(x, x, x), attend(x, x, x)) and draws.count == 0
        attend(x, x, x, dropout_p=0.5)
    assert draws.count > 0


@pytest.mark.slow
def test_runs_in_threads_of_one_process(store, tmp_path):
    cells = [
        Experiment(**TINY | dict(model="cnn_bn", model_args={}), method=m, seed=s)
        for m in ("fedcp", "fedper")
        for s in (0, 1)
    ]
    alone, together = [run(e, store=tmp_path / "alone") for e in cells], {}
    threads = [threading.Thread(target=lambda e=e: together.update({e.id: run(e)})) for e in cells]
    before = torch.get_num_threads()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(equal(r, together[r.id]) for r in alone) and torch.get_num_threads() == before


# -- a model on its own --------------------------------------------------------------------------------------------------


def test_a_saved_model_predicts_from_samples_as_they_are(store, tmp_path):
    r = run(Experiment(**TINY, keep_models=True, method="fedper"))
    x = load("digits").x[:50]
    r.save(1, tmp_path / "m.pt")
    again = load_model(tmp_path / "m.pt")
    np.testing.assert_array_equal(again.predict(x), r.predict(1, x))
    assert again.facts["id"] == r.id and again.facts["mean"] and again.facts["classes"] == 10
    assert not np.array_equal(r.predict(1, x), r.predict(0, x))


def test_own_data_can_be_swept(store):
    rows = sweep([Experiment(**OWN), Experiment(**OWN, seed=1)], fed=own())
    assert rows.run.nunique() == 2
    with pytest.raises(ValueError, match="go together"):
        sweep([Experiment(**OWN)])


def test_simulate_knows_who_is_evaluated():
    e = Experiment(**TINY, eval_clients=2)
    ours, others = (
        simulate.evaluated(train_config(c), 4).tolist()
        for c in (e, e.but(method="local", rounds=9))
    )
    assert ours == others
