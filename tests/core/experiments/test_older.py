"""What was computed is read later: without its code, of older schemas, and after it was computed anew."""

import importlib
import json
import shutil
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from pfl_core import Experiment, load_model, plot, register_model, run
from pfl_core.data import partition as partitions
from pfl_core.data import pools
from pfl_core.experiments import listing
from pfl_core.experiments.build import client_data
from pfl_core.experiments.experiment import SCHEMA
from pfl_core.experiments.store import digests, finished
from pfl_core.methods.base import METHODS, Method
from pfl_core.models import _MODELS
from pfl_papers.evidence import committed
from pfl_papers.explore import sources
from tests.core.methods.setting import OURS
from tests.made import main

TINY = dict(clients=3, model="mlp", rounds=2, partition="iid", max_samples=20)


# -- computed anew ---------------------------------------------------------------------------------


def redone(folder, change):
    """The run in a folder as another computation of it would have left it, and the old one aside."""
    shutil.copytree(folder, folder.with_name(f"{folder.name}.before-20260101-000000"))
    for name in ("models.pt", "state.pt"):
        if (folder / name).exists():
            kept = torch.load(folder / name, weights_only=True)
            change(kept)
            torch.save(kept, folder / name)
    about = json.loads((folder / "experiment.json").read_text())
    about["meta"]["date"] = "2026-01-01T00:00:00Z"
    about["sha256"] = digests(about["experiment"], about["meta"], folder)
    (folder / "experiment.json").write_text(json.dumps(about))


def zeroed(kept):
    for part in ("models", "server"):
        for v in kept.get(part, {}).values():
            v.zero_()


READERS = {
    "model": lambda r, tmp: r.model(0).state_dict(),
    "personal": lambda r, tmp: r.personal(0).net.state_dict(),
    "kept": lambda r, tmp: r.kept("models.pt")["server"],
    "state": lambda r, tmp: r.kept("state.pt")["server"],
    "save": lambda r, tmp: (r.save(0, tmp / "m.pt"), load_model(tmp / "m.pt").net.state_dict())[1],
    "predict": lambda r, tmp: {"p": torch.as_tensor(r.predict(0, np.eye(28, dtype="uint8")[None]))},
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("there", [True, False])
def test_a_result_gives_its_own_models_after_the_run_was_computed_anew(
    store, tmp_path, reader, there
):
    a = run(Experiment(**TINY, keep_models=True), keep_state=True)
    read = READERS[reader]
    before = read(a, tmp_path)
    redone(a.folder, zeroed)
    b = run(Experiment(**TINY, keep_models=True))
    assert any(not torch.equal(v, before[n]) for n, v in read(b, tmp_path).items()) or (
        reader == "predict"
    )
    if there:
        again = read(a, tmp_path)
        assert all(torch.equal(v, before[n]) for n, v in again.items())
        return
    shutil.rmtree(next(store.glob(f"{a.id}.before-*")))
    with pytest.raises(ValueError, match="written anew since this Result was read"):
        read(a, tmp_path)


# -- without its code ------------------------------------------------------------------------------


@pytest.fixture(params=["method", "model", "partition", "plugin"])
def orphan(request, store, tmp_path, monkeypatch):
    """A finished run whose method, model, partition or plugin is not here any more."""
    name = f"gone_{request.param}"
    more = {}
    if request.param == "method":
        type("Gone", (Method,), {"name": name})
        more = {"method": name}
    elif request.param == "model":
        register_model(name, lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))
        more = {"model": name}
    elif request.param == "partition":
        partitions.register_partition(name, partitions.function("iid"))
        more = {"partition": name}
    else:
        (tmp_path / f"{name}.py").write_text(
            f"from pfl_core import Method\n\nclass Gone(Method):\n    name = {name!r}\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        more = {"method": name, "plugins": (name,)}
    result = run(Experiment(**TINY | {"keep_models": True} | more))
    monkeypatch.delitem(METHODS, name, raising=False)
    monkeypatch.delitem(_MODELS, name, raising=False)
    monkeypatch.delitem(partitions._SCHEMES, name, raising=False)
    monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / f"{name}.py").unlink(missing_ok=True)
    return result, name


def test_a_run_is_read_without_its_code(orphan, capsys):
    result, name = orphan
    (found,) = finished()
    assert found.experiment.plain() == result.experiment.plain()
    pd.testing.assert_frame_equal(found.rows, result.rows)
    pd.testing.assert_frame_equal(found.clients, result.clients)
    assert repr(found) == repr(result) and found.summary().equals(result.summary())
    assert listing.by_id(result.id[:6]).id == result.id
    assert plot(found).axes
    assert committed.experiment(result.id).plain() == result.experiment.plain()
    assert result.id in set(sources.rows(sources.OWN).run)
    for words in ("list runs", f"show {result.id}", f"show {result.id} {result.id}", "prune"):
        assert main(words.split()) == 0
        assert result.id in capsys.readouterr().out


def test_what_needs_the_code_says_so(orphan):
    result, name = orphan
    (found,) = finished()
    for needs in (
        lambda: run(found.experiment),
        lambda: found.experiment.but(rounds=1),
        lambda: found.experiment.id,
        lambda: Experiment(**TINY, init_from=found.experiment),
    ):
        with pytest.raises(ValueError, match=name):
            needs()
    if "model" in name:
        with pytest.raises(ValueError, match=name):
            found.model(0)
    else:  # the network is ours
        assert found.model(0)


# -- of an older schema ----------------------------------------------------------------------------


@pytest.mark.parametrize("schema", range(1, SCHEMA))
@pytest.mark.parametrize("signed", [True, False])
def test_every_older_schema_is_read(store, schema, signed, capsys):
    new = run(Experiment(**TINY))
    old = store / "0123456789abcdef"
    shutil.move(new.folder, old)
    about = json.loads((old / "experiment.json").read_text())
    about["meta"] |= {"schema": schema, "id": old.name}
    about["sha256"] = digests(about["experiment"], about["meta"], old)
    if not signed:  # the first versions wrote no digests
        del about["sha256"]
    text = (old / "history.csv").read_text()
    (old / "history.csv").write_text(
        text.replace("rounds,when,split,average", "round,when,split,mean")
    )
    if signed:
        about["sha256"] = digests(about["experiment"], about["meta"], old)
    (old / "experiment.json").write_text(json.dumps(about))
    found = listing.by_id("0123")
    assert found.rows.drop(columns=["run", "setting"]).equals(
        new.rows.drop(columns=["run", "setting"])
    )
    assert found.summary().equals(new.summary()) and plot(found).axes
    assert committed.experiment(old.name).plain() == new.experiment.plain()
    assert set(sources.rows(sources.OWN).run) == {old.name}
    np.testing.assert_array_equal(
        committed.arrays_of(old.name)["before/test/correct"], new.arrays["before/test/correct"]
    )
    assert main(["list", "runs"]) == 0 and old.name in capsys.readouterr().out
    assert run(Experiment(**TINY)).id != old.name  # computed: it is no hit


def test_a_run_of_a_later_schema_is_left_out_with_a_message(store, capsys):
    result = run(Experiment(**TINY))
    about = json.loads((result.folder / "experiment.json").read_text())
    about["meta"]["schema"] = SCHEMA + 1
    about["sha256"] = digests(about["experiment"], about["meta"], result.folder)
    (result.folder / "experiment.json").write_text(json.dumps(about))
    assert not list(finished())
    assert f"schema {SCHEMA + 1}" in capsys.readouterr().err


# -- models out of runs ----------------------------------------------------------------------------


def right(personal, data, client):
    """How many of a client's test samples a model gives their class."""
    index = data.index["test"][client]
    return int((personal.predict(data.federation.x[index]) == data.federation.y[index]).sum())


@pytest.mark.parametrize("method", OURS)
def test_models_of_every_method_predict_what_their_run_measured(store, tmp_path, method):
    e = Experiment(
        **TINY | {"model": "cnn", "model_args": {"width": 0.125}, "participation": 0.67},
        method=method,
        lr=0.05,
        holdout=0.2 if method in ("fedfomo",) else 0.0,
        keep_models=True,
    )
    result, data = run(e), client_data(e)
    measured = result.arrays["before/test/correct"][-1].astype(int).tolist()
    for client, correct in enumerate(measured):
        assert right(result.personal(client), data, client) == correct
        result.save(client, tmp_path / "model.pt")
        again = load_model(tmp_path / "model.pt")
        assert right(again, data, client) == correct
        x = data.federation.x[data.index["test"][client]]
        assert torch.equal(again.scores(x), result.personal(client).scores(x))


class Projected(nn.Module):
    """Scores of a fixed projection that is drawn and in no state_dict."""

    def __init__(self, classes, how):
        super().__init__()
        drawn = torch.randn(784, 32) / 28
        if how == "buffer":
            self.register_buffer("drawn", drawn, persistent=False)
        else:
            self.drawn = [drawn] if how == "list" else drawn
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        drawn = self.drawn[0] if isinstance(self.drawn, list) else self.drawn
        return self.head((x.flatten(1) @ drawn).relu())


@pytest.mark.parametrize("how", ["buffer", "attribute", "list"])
@pytest.mark.parametrize("method", ["fedavg", "fedper", "gpfl"])
def test_what_a_model_draws_beside_its_state_is_drawn_again(store, tmp_path, how, method):
    register_model("projected", lambda shape, classes: Projected(classes, how))
    e = Experiment(**TINY | {"model": "projected"}, seed=3, method=method, keep_models=True, lr=0.1)
    result, data = run(e), client_data(e)
    for client, correct in enumerate(result.arrays["before/test/correct"][-1]):
        assert right(result.personal(client), data, client) == correct
        result.save(client, tmp_path / "model.pt")
        assert right(load_model(tmp_path / "model.pt"), data, client) == correct


SCALED = """
from torch import nn
from pfl_core import register_model
class Scaled(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = nn.Linear(784, classes)
    def forward(self, x):
        return self.head(x.flatten(1)){scale}
register_model("scaled", lambda shape, classes: Scaled(classes))
"""


@pytest.mark.parametrize("method", ["fedavg", "gpfl"])
def test_a_model_whose_code_has_changed_since_says_so(store, tmp_path, monkeypatch, method):
    def now(source):
        (tmp_path / "scaling.py").write_text(source)
        importlib.invalidate_caches()
        sys.modules.pop("scaling", None)
        importlib.import_module("scaling")

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    now(SCALED.replace("{scale}", ""))
    e = Experiment(**TINY | {"model": "scaled"}, method=method, keep_models=True)
    result = run(e)
    result.save(0, tmp_path / "model.pt")
    now(SCALED.replace("{scale}", "  # the same"))
    result.model(0), load_model(tmp_path / "model.pt")
    now(SCALED.replace("{scale}", " / 100"))
    for read in (lambda: result.model(0), lambda: load_model(tmp_path / "model.pt")):
        with pytest.warns(UserWarning, match=f"'scaled' is not that of run {result.id}"):
            read()


class OwnGate(Method):
    """A gate of the client's own over the class scores, which no network holds."""

    name = "own_gate"

    def init(self):
        state = super().init()
        gate = torch.linspace(-1, 1, self.task.C).repeat(self.task.K, 1)
        state.clients["gate.weight"] = gate * torch.arange(1, self.task.K + 1)[:, None]
        return state

    def logits(self, p, x):
        return self.task.apply(p, x) * p["gate.weight"].sign()


def test_scores_of_an_own_method_and_an_own_network(store, tmp_path, monkeypatch):
    register_model(
        "own_net", lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    )
    e = Experiment(**TINY | {"model": "own_net"}, method="own_gate", keep_models=True)
    result, data = run(e), client_data(e)
    for client in range(3):
        correct = result.arrays["before/test/correct"][-1, client]
        assert right(result.personal(client), data, client) == correct
    path = tmp_path / "model.pt"
    result.save(1, path)
    x = data.federation.x[:20]
    np.testing.assert_array_equal(load_model(path).predict(x), result.predict(1, x))
    moved = result.model(1).double()
    assert moved(torch.zeros(2, 1, 28, 28, dtype=torch.float64)).dtype == torch.float64
    with monkeypatch.context() as gone:
        gone.delitem(_MODELS, "own_net")
        with pytest.raises(
            ValueError,
            match="'own_net' is not registered.*import tests.core.experiments.test_older",
        ):
            load_model(path)
    monkeypatch.delitem(METHODS, "own_gate")
    with pytest.raises(
        ValueError, match="'own_gate' is not registered.*import tests.core.experiments.test_older"
    ):
        load_model(path)
    with pytest.raises(ValueError, match="'own_gate' is not registered"):
        result.model(0)


def test_models_of_texts_need_no_data_set(store, tmp_path, monkeypatch):
    x = np.random.default_rng(0).integers(1, 50, (60, 12)).astype(np.int32)
    extra = {"vocab": np.arange(70)}
    pool = pools.Pool("own_texts", x, np.arange(60) % 3, np.arange(60) % 4 == 0, 3, extra)
    monkeypatch.setattr(pools, "_ENTRIES", dict(pools._ENTRIES))
    pools.register_dataset("own_texts", lambda: pool)
    result = run(Experiment(**TINY | {"model": "fasttext"}, dataset="own_texts", keep_models=True))
    before = result.predict(0, x)
    monkeypatch.delitem(pools._ENTRIES, "own_texts")
    monkeypatch.setattr(pools, "load", lambda name: pytest.fail(f"{name} is loaded"))
    (found,) = finished()
    np.testing.assert_array_equal(found.predict(0, x), before)
    found.save(0, tmp_path / "model.pt")
    np.testing.assert_array_equal(load_model(tmp_path / "model.pt").predict(x), before)


def test_adopting_names_what_a_method_has_to_say(store):
    class Momentum(Method):
        name = "own_momentum"

        def init(self):
            state = super().init()
            state.extra = {"momentum": {n: torch.zeros_like(v) for n, v in state.server.items()}}
            return state

    e = Experiment(**TINY, method="own_momentum")
    with pytest.raises(ValueError, match="state at the server .momentum.*`adopts = True`"):
        run(e.but(init_from=e, adopt=True))
