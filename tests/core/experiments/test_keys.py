"""The key of an id: equal computations have equal ids, however they are written, and others have others."""

import dataclasses
import inspect
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pfl_core import Experiment, Method, models, optim, run
from pfl_core.analysis.select import pick, summary
from pfl_core.data import partition as partitions
from pfl_core.experiments import keys, older
from pfl_core.methods.base import METHODS, make_method
from pfl_core.util import provenance
from pfl_papers.evidence import tables

FILE = Path(__file__).with_name("defaults.json")
FIELDS = [f for f in dataclasses.fields(Experiment) if type(f.default) in (int, float)]


def defaults():
    """{method, model, partition, optimizer, ...: {argument: default}} of all that are ours."""
    methods = {n: c for n, c in METHODS.items() if c.__module__.startswith("pfl_core.")}
    out = {"method": {}, "model": {}, "partition": {}}
    for name in sorted(methods):
        out["method"][name] = {f.name: keys._default(f) for f in dataclasses.fields(methods[name])}
    for kind, names, of in (
        ("model", models._OURS, models.options_of),
        ("partition", partitions._SCHEMES, lambda n, _: partitions.arguments(n)),
    ):
        for name in sorted(
            n for n in names if kind == "model" or names[n].__module__.startswith("pfl_core.")
        ):
            found = {n: p.default for n, p in of(name, {}).items()}
            out[kind][name] = {n: v for n, v in found.items() if v is not inspect.Parameter.empty}
    for kind, names in optim.KINDS.items():
        out[kind] = {
            n: {f.name: f.default for f in dataclasses.fields(c)} for n, c in names.items()
        }
    return json.loads(json.dumps(out))


DEFAULTS = json.loads(FILE.read_text()) if FILE.exists() else {}
ALL = [(kind, name) for kind, names in DEFAULTS.items() for name in names]


def test_defaults_stay_as_they_are():
    """A default that changes would give old runs to new computations: raise the revision, or SCHEMA."""
    assert defaults() == DEFAULTS


@pytest.mark.parametrize("kind, name", ALL)
def test_a_default_that_is_spelled_out_changes_nothing(kind, name):
    e = Experiment(**{kind: name})
    for arg, value in DEFAULTS[kind][name].items():
        if arg in keys.BY_DATA:
            continue
        for way in {
            repr(v): v
            for v in (value, np.asarray(value)[()] if type(value) in (int, float) else value)
        }.values():
            assert Experiment(**{kind: name, f"{kind}_args": {arg: way}}).id == e.id, (arg, way)
        if type(value) is float and value.is_integer():
            assert Experiment(**{kind: name, f"{kind}_args": {arg: int(value)}}).id == e.id, arg


@pytest.mark.parametrize("f", FIELDS, ids=lambda f: f.name)
def test_a_number_has_one_form(f):
    if isinstance(f.default, float):
        ways = (
            [1, 1.0, np.float32(1), np.int64(1)]
            if f.name in ("lr", "clip", "weight_decay", "participation")
            else [0, -0.0, 0.0]
        )
    else:
        ways = [3, np.int32(3)]
    made = [Experiment(**{f.name: way}) for way in ways]
    assert len({e.id for e in made}) == 1 and len({repr(e) for e in made}) == 1
    with pytest.raises(ValueError, match="got bool"):
        Experiment(**{f.name: True})


def test_what_says_the_same_has_one_id():
    e = Experiment(seed=3, participation=0.5)
    for same in (
        dict(partition_seed=3),
        dict(eval_after=False),
        dict(partition_args={"of": 10, "first": 0, "every": 1}),
    ):
        assert e.but(**same).id == e.id, same
    for other in (
        dict(partition_seed=4),
        dict(eval_after=True),
        dict(partition_args={"of": 20}),
        dict(lr=0.02),
    ):
        assert e.but(**other).id != e.id, other
    two = Experiment(record=("cka", "train")), Experiment(record=["train", "cka", "cka"])
    assert two[0].id == two[1].id
    again = Experiment.from_plain(json.loads(json.dumps(e.plain())))
    assert again.id == e.id and repr(again) == repr(e)


@pytest.mark.parametrize(
    "field, args",
    [
        ("partition_args", {"alpha": True}),
        ("model_args", {"width": True}),
        ("method_args", {"mu": True}),
    ],
)
def test_a_bool_is_no_number(field, args):
    with pytest.raises(ValueError, match="got bool, allowed is float"):
        Experiment(method="fedprox", **{field: args})


def test_committed_runs_have_the_key_that_their_experiment_has():
    known = tables.results()
    for run_, line in known.runs.iterrows():
        plain = known.plain[run_]
        e = Experiment.from_plain(plain)
        assert line.key == e.id_for(line.pool), run_
        assert run_ in (line.key, older.legacy(plain, line.pool)), run_
        assert make_method(e.method, **e.method_args).revision == line.revision
    assert known.runs.key.is_unique


TINY = dict(model="mlp", partition_args={"alpha": 1}, clients=3, rounds=1, max_samples=20)


def test_a_run_under_an_older_name_is_found(store):
    spelled = Experiment(**TINY, method="fedprox", method_args={"mu": METHODS["fedprox"].mu}, lr=1)
    new = run(spelled)
    about = json.loads((new.folder / "experiment.json").read_text())
    plain, meta = about["experiment"] | {"lr": 1}, about["meta"]
    del meta["key"], meta["code"]
    meta["id"] = older.legacy(plain, meta["pool"])
    new.folder.rename(folder := store / meta["id"])
    from pfl_core.experiments.store import digests

    whole = {"experiment": plain, "meta": meta, "sha256": digests(plain, meta, folder)}
    (folder / "experiment.json").write_text(json.dumps(whole))
    assert meta["id"] != new.id
    found = run(Experiment(**TINY, method="fedprox", lr=1.0))
    assert (found.folder, found.id, found.key) == (folder, meta["id"], new.id)
    assert [p for p in store.iterdir() if p.is_dir()] == [folder] and set(found.rows.key) == {
        new.id
    }


def test_two_runs_of_one_key_are_one_seed(store):
    rows = run(Experiment(**TINY)).rows
    both = pd.concat([rows, rows.assign(run="0" * 16)], ignore_index=True)
    assert len(pick(both)) == 1 and "±" not in summary(pick(both)).iloc[0, 0]


def test_the_commit_is_that_of_the_repository_that_holds_the_package(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    there = provenance.commit.__wrapped__()
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.setenv(name, os.fspath(tmp_path / ".git"))
    assert provenance.commit.__wrapped__() == there
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path / "lib" / "pfl_core")
    (tmp_path / "lib" / "pfl_core").mkdir(parents=True)
    assert provenance.commit.__wrapped__() == ""  # installed below another repository


@pytest.mark.parametrize("how", [None, {}, dict(frozen=True, eq=False)])
def test_a_method_may_have_the_decorator_of_version_0_1(how):
    decorated = (lambda c: c) if how is None else dataclasses.dataclass(**how)
    cls = decorated(
        type(
            "Old",
            (Method,),
            {"__annotations__": {"mu": "float"}, "mu": 0.5, "__module__": __name__},
        )
    )
    assert cls(mu=0.25).mu == 0.25
    with pytest.raises(dataclasses.FrozenInstanceError):
        cls().mu = 1


if __name__ == "__main__":
    FILE.write_text(json.dumps(defaults(), indent=1) + "\n")
