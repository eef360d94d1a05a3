"""The form of results/: every column is described, nothing is lost, and it is read without us."""

import ast
import gzip
import io
import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfl_core import optim
from pfl_core.experiments.experiment import Experiment, defaults
from pfl_core.experiments.keys import ARGS
from pfl_core.experiments.sweep import sweep
from pfl_core.util import paths, sums
from pfl_papers import places
from pfl_papers.evidence import committed, form, tables

RESULTS = paths.CHECKOUT / "results"
README = RESULTS / "README.md"
TAGS = dict(paper="fedper", artefact="fig2", row="fedavg", column="x", profile="quick")
TINY = Experiment(model="mlp", clients=3, rounds=1, max_samples=20, tags=TAGS)


def described():
    """{file: the names of columns that results/README.md describes}."""
    parts = re.split(r"^### (.*)$", README.read_text(), flags=re.M)[1:]
    found = (re.findall(r"^\| `(.*?)` \| .{4}", text, flags=re.M) for text in parts[1::2])
    return dict(zip(parts[::2], map(set, found), strict=True))


def undescribed(file, columns):
    known = described()[form.kind(file)]
    return [c for c in columns if not {c, f"{c.partition('.')[0]}.*"} & known]


def test_every_column_of_every_file_is_described():
    files = sorted(RESULTS.glob("*.csv*"))
    assert len(files) > 10
    for file in files:
        assert undescribed(file.name, pd.read_csv(file, nrows=1)) == [], file.name
    assert undescribed("fedper.history.csv.gz", ["client.acc_pct", "client.f1"]) == ["client.f1"]
    assert {f"{n}.*" if n in ARGS else n for n in form.FIELDS} <= described()["runs.csv.gz"]


def test_a_difference_in_three_lines_of_pandas(monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    said = [ast.unparse(n) for n in ast.parse(code).body]
    assert len(code.strip().splitlines()) == len(said) + 1 == 7
    assert said[:2] == ["from glob import glob", "from pandas import concat, read_csv as read"]
    monkeypatch.chdir(RESULTS)
    exec(code, known := {})
    gain = known["gain"].loc["comparison", "cifar10", "before", "test"]
    rows = committed.parts("methods")["methods.medium-cifar10"].rows()
    rows = rows.query(
        "artefact == 'comparison' and average == 'client' and metric == 'acc_pct' "
        "and when == 'before' and split == 'test'"
    )
    last = rows.groupby(["row", "seed"]).value.last()
    assert gain.to_dict() == (last["fedper"] - last["local"]).to_dict() and len(gain) >= 2


# ---------------------------------------------------------------- an Experiment and its columns

TEXT = st.sampled_from(["", "1", "null", "NaN", "true", "[]", "a,b", ' "', "70/10/20", "{", "None"])
SCALAR = st.none() | st.booleans() | st.integers(-(10**18), 10**18) | TEXT
SCALAR |= st.floats(allow_nan=False, allow_infinity=False)
ARGUMENT = SCALAR | st.lists(SCALAR, max_size=3) | st.dictionaries(TEXT, SCALAR, max_size=2)
OF_ARGS = st.dictionaries(st.sampled_from(["alpha", "a.b", "lr"]), ARGUMENT)
PLAIN = st.fixed_dictionaries(
    {},
    optional={n: OF_ARGS for n in ARGS}
    | {n: st.none() | st.integers(0, 9) for n in ("clients", "partition_seed")}
    | {n: st.lists(TEXT, max_size=2) for n in ("record", "plugins")}
    | {n: TEXT for n in ("dataset", "head", "model")}
    | {"optimizer": st.sampled_from([*optim.OPTIMIZERS])}
    | {"lr": st.floats(0, 1), "shuffle": st.booleans(), "eval_after": st.none() | st.booleans()}
    | {"init_from": st.none() | st.just(TINY.plain())}
    | {"finetune": st.lists(st.just({"epochs": 2, "lr": 0.1, "only": "head"}), max_size=2)},
)


@given(st.lists(PLAIN, min_size=1, max_size=3))
def test_an_experiment_comes_back_from_its_columns(plains):
    text = pd.DataFrame([form.fields(p) for p in plains]).to_csv(index=False)
    back = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False).to_dict("records")
    whole = [{n: p.get(n, usual) for n, usual in defaults().items() if n != "tags"} for p in plains]
    assert list(map(form.plain, back)) == whole
    assert json.dumps([p["lr"] for p in whole]) == json.dumps([form.plain(b)["lr"] for b in back])


def test_a_field_that_is_younger_than_the_file_has_its_default(home):
    folder = kept()
    runs = pd.read_csv(folder / "runs.csv.gz", dtype=str, keep_default_na=False)
    before = tables.results(folder).rows("fedper", "quick", "digits")
    runs.drop(columns=["head", "new_head"]).to_csv(folder / "runs.csv.gz", index=False)
    (folder / sums.NAME).unlink()
    pd.testing.assert_frame_equal(tables.results(folder).rows("fedper", "quick", "digits"), before)
    tables.write(folder, tables.results(folder).content())
    written = pd.read_csv(folder / "runs.csv.gz", dtype=str, keep_default_na=False)
    pd.testing.assert_frame_equal(written, runs)


# ---------------------------------------------------------------- the form of version 0.2


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A project of its own, with nothing in it."""
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "home" / "results")


def kept(seed=0):
    """The folder of a kept run."""
    rows = sweep([TINY.but(seed=seed, method="fedprox", method_args={"mu": 0.5})])
    return committed.save(rows, "fedper", "quick", "digits")


def in_old_form(folder: Path, lacks: tuple[str, ...]) -> None:
    """Give a folder the runs.csv that it had up to version 0.2, without these columns."""
    known = tables.results(folder)
    old = known.runs[["key", *form.FACTS]].rename(columns={"n_clients": "clients"})
    young = ("head", "new_head")  # fields that 0.2 had not
    said = [{n: v for n, v in p.items() if n not in young} for p in known.plain.values()]
    old = old.assign(experiment=list(map(json.dumps, said))).drop(columns=list(lacks))
    old.to_csv(folder / "runs.csv")
    (folder / "runs.csv.gz").unlink()
    sums.put(folder, {"runs.csv": (folder / "runs.csv").read_bytes()})


LACKS = [(), ("key", "code")]


@pytest.mark.slow
@pytest.mark.parametrize("lacks", LACKS)
def test_what_is_committed_is_read_from_the_form_of_version_0_2(tmp_path, lacks):
    shutil.copytree(RESULTS, folder := tmp_path / "results")
    new, numbers = tables.results(RESULTS), [*form.FACTS, "setting", "seed", "partition_seed"]
    in_old_form(folder, lacks)
    old = tables.results(folder)
    assert old.plain == new.plain and old.parts == new.parts and len(old.plain) > 800
    same = ["method", "dataset", "partition", "model", *numbers, *(() if lacks else ["key"])]
    pd.testing.assert_frame_equal(old.facts[same], new.facts[same], check_exact=True)
    for name in ("cells", "derived", "pools"):
        pd.testing.assert_frame_equal(getattr(old, name), getattr(new, name), check_exact=True)
    part, drop = old.parts[0], ["key"] if lacks else []
    rows = [known.rows(*part).drop(columns=drop) for known in (old, new)]
    pd.testing.assert_frame_equal(*rows, check_exact=True)
    if not lacks:  # written, it is what is committed
        tables.write(folder, old.content())
        written, there = inside(folder), inside(RESULTS)
        assert written.keys() == there.keys()
        assert [n for n, content in written.items() if content != there[n]] == []
        assert tables.results(folder).parts == new.parts  # its digests are those of its files


def inside(folder: Path) -> dict[str, Any]:
    """Contents of a folder's files; packed bytes depend on Python's version, those inside do not."""
    out: dict[str, Any] = {}
    for path in folder.iterdir():
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as z:
                out[path.name] = {n: z.read(n) for n in z.namelist()}
        elif path.is_file() and path.name not in (README.name, sums.NAME):
            raw = path.read_bytes()
            out[path.name] = gzip.decompress(raw) if path.suffix == ".gz" else raw
    return out


@pytest.mark.parametrize("lacks", LACKS)
def test_what_version_0_2_kept_is_read_kept_and_published(home, lacks):
    folder = kept()
    (before,) = [part.rows() for part in committed.parts(own=True).values()]
    in_old_form(folder, lacks)
    (part,) = committed.parts(own=True).values()
    rows = part.rows()
    same = [c for c in rows if not (lacks and c == "key")]
    pd.testing.assert_frame_equal(rows[same], before[same], check_exact=True)
    shutil.rmtree(paths.store_folder())
    e = committed.experiment(rows.run[0])
    assert (e.method, dict(e.method_args), e.max_samples) == ("fedprox", {"mu": 0.5}, 20)
    committed.publish("fedper")
    assert committed.find(TINY.but(method="fedprox", method_args={"mu": 0.5})) == rows.run[0]
    committed.save(rows, "fedper", "quick", "digits")
    assert not (folder / "runs.csv").exists() and (folder / "runs.csv.gz").exists()
    pd.testing.assert_frame_equal(part.rows(), before, check_exact=True)  # with the key, too
