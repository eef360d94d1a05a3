"""Arbitrary input: an Experiment keeps its value through JSON or is refused; files from outside are data, never code."""

import ast
import dataclasses
import gzip
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from papermill.translators import PythonTranslator

import pfl_core
from pfl_core import Experiment
from pfl_core.data import federation
from pfl_core.data import pools as data
from pfl_core.data.client_data import ClientData
from pfl_core.engine.checkpoint import load_whole
from pfl_core.engine.simulate import Interrupted
from pfl_core.experiments import run as runs
from pfl_core.experiments import store
from pfl_core.methods.base import METHODS
from pfl_core.util import paths
from pfl_papers.evidence import committed, tables
from pfl_papers.papers import base
from tools import runner

some = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# -- Experiment ----------------------------------------------------------------------------------------------------------

held = st.floats(0, width=32, allow_infinity=False, allow_subnormal=False)  # by float32
line = st.text(st.characters(categories=("L", "N", "P", "S", "Zs")), max_size=9)  # printable
LEGAL = {
    "dataset": st.sampled_from(["digits", "digits100", "own"]),
    "clients": st.integers(1, 50),
    "method": st.sampled_from(["fedavg", "fedper", "local", "pfedhn", "fedaghn"]),
    "rounds": st.integers(0, 10**6),
    "participation": st.floats(0, 1, exclude_min=True),
    "steps": st.integers(0, 99),
    "plan": st.sampled_from(["wrap", "drop", "fresh"]),
    "shuffle": st.booleans(),
    "lr": held.filter(lambda v: v < 1e30) | st.integers(0, 3),
    "momentum": held.filter(lambda v: v < 1),
    "lr_schedule": st.sampled_from(["constant", "cosine", "step", "exponential"]),
    "server": st.sampled_from(["plain", "momentum", "adam"]),
    "buffers": st.sampled_from(["local", "average", "reset"]),
    "seed": st.integers(0, 2**63 - 1),
    "partition_seed": st.none() | st.integers(0, 2**63 - 1),
    "keep_models": st.booleans(),
    "keep_scores": st.booleans(),
    "metrics": st.lists(st.sampled_from(["auc", "f1", "confusion"])),
    "tags": st.dictionaries(st.sampled_from(["row", "column"]), line),
    "model_args": st.dictionaries(st.just("hidden"), st.integers(1, 99)),
}
legal = st.fixed_dictionaries({}, optional=LEGAL).filter(
    lambda fields: fields.get("dataset") != "own" or fields.get("partition_seed") is None
)
legal |= st.builds(lambda a, b: a | {"init_from": Experiment(**{"model": "mlp"} | b)}, legal, legal)


@some
@given(legal, st.randoms())
def test_an_experiment_survives_json_and_keeps_its_id(fields, order):
    e = Experiment(**{"model": "mlp"} | fields)
    text = json.dumps(e.plain(), allow_nan=False)
    shuffled = list(json.loads(text).items())
    order.shuffle(shuffled)
    back = Experiment.from_plain(dict(shuffled))
    assert back.plain() == e.plain() and back.id_for("x") == e.id_for("x") == e.but(
        tags={"row": "?"}
    ).id_for("x")
    changed = e.but(seed=e.seed + 1)
    assert changed.id_for("x") != e.id_for("x") != e.id_for("y")


JOINED = ("model_args", "tags")  # `but` adds to dicts
ALONE = {n: v for n, v in LEGAL.items() if n not in ("dataset", "partition_seed", *JOINED)}


@some
@given(
    st.fixed_dictionaries({}, optional=ALONE), st.fixed_dictionaries({}, optional=ALONE), st.data()
)
def test_what_but_changes_is_the_experiment_that_says_it_and_back_is_the_first(was, now, data):
    """One at a time in any order or at once, `but` is the Experiment with these fields; ids differ if numbers may."""
    first, both = Experiment(**{"model": "mlp"} | was), {"model": "mlp"} | was | now
    wanted = Experiment(**both)
    one_by_one = first
    for name in data.draw(st.permutations(sorted(now))):
        one_by_one = one_by_one.but(**{name: now[name]})
    for e in (first.but(**now), one_by_one):
        assert e.plain() == wanted.plain() and e.id_for("x") == wanted.id_for("x")
    back = wanted.but(**{name: getattr(first, name) for name in now})
    assert back.plain() == first.plain() and back.id_for("x") == first.id_for("x")
    same = wanted.canonical() == first.canonical()
    assert (wanted.id_for("x") == first.id_for("x")) == same


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
    ),
    max_leaves=4,
)
ANYTHING |= st.sampled_from(
    [10**400, -1, float("inf"), np.int64(1), torch.tensor(1.0), object(), "digits", "mlp", ()]
)


@settings(some, max_examples=400)
@given(
    st.sampled_from([f.name for f in dataclasses.fields(Experiment) if f.name != "plugins"]),
    ANYTHING,
)
def test_an_experiment_is_whole_or_refused(name, value):
    try:
        e = Experiment(**{"model": "mlp", name: value})
    except (ValueError, TypeError) as error:
        assert len(str(error)) > 20
        return
    assert json.loads(json.dumps(e.plain(), allow_nan=False)) == e.plain()
    assert Experiment.from_plain(e.plain()).id_for("x") == e.id_for("x")


OUTSIDE = {
    "clients": st.integers(max_value=0),
    "rounds": st.integers(max_value=-1),
    "participation": st.floats(max_value=0) | st.floats(1, exclude_min=True),
    "batch": st.integers(max_value=0),
    "lr": st.floats(max_value=0, exclude_max=True) | st.just(float("nan")),
    "momentum": st.floats(1),
    "eval_every": st.integers(max_value=0),
    "seed": st.integers(max_value=-1),
    "partition_seed": st.integers(max_value=-1),
    "plan": st.text().filter(lambda v: v not in ("wrap", "drop", "fresh")),
    "method": st.text().filter(lambda v: v not in METHODS),
    "optimizer": st.text().filter(lambda v: v not in ("sgd", "adam", "adamw")),
    "dtype": st.text().filter(lambda v: v not in ("float32", "float64")),
}


@some
@given(st.sampled_from(sorted(OUTSIDE)), st.data())
def test_what_is_outside_its_range_is_refused(name, draw):
    with pytest.raises(ValueError, match=name):
        Experiment(**{name: draw.draw(OUTSIDE[name])})


# -- own data ------------------------------------------------------------------------------------------------------------

KINDS = ["u1", "i1", "i2", "u2", "i8", ">f4", "f2", "f4", "f8", "c8", "?", "U3", "O", "M8[s]"]
SHAPES = [
    (6,),
    (6, 1),
    (6, 3),
    (6, 4, 4),
    (6, 3, 4),
    (6, 4, 4, 1),
    (6, 4, 4, 3),
    (6, 3, 4, 4),
    (6, 4, 4, 4),
    (),
    (0, 4),
]
VALUES = [0, 1, 2, 7, 255, -1, 10**9, np.nan, np.inf, -1e300]


@st.composite
def arrays(draw, kinds=KINDS, shapes=SHAPES):
    a = np.empty(draw(st.sampled_from(shapes)), object)
    a[...] = draw(st.sampled_from(VALUES[:3]))
    if a.size and draw(st.booleans()):
        a.flat[draw(st.integers(0, a.size - 1))] = draw(st.sampled_from(VALUES))
    try:
        with np.errstate(all="ignore"):
            a = a.astype(draw(st.sampled_from(kinds)))
    except (OverflowError, ValueError, TypeError):
        pass
    return a[::-1] if a.ndim and draw(st.booleans()) else a


LISTS = st.lists(st.lists(st.integers(-1, 6), max_size=3), max_size=2)
GOOD = {  # argument: what is legal, and what need not be
    "x": (
        arrays(["u1", ">f4", "f2", "f8"], SHAPES[2:7]) | arrays(["i1", "u2", "i8"], SHAPES[1:3]),
        arrays(),
    ),
    "y": (
        st.sampled_from([np.array([0, 1, 2, 0, 1, 2]), np.array([[0.0], [1.0]] * 3)]),
        arrays(shapes=SHAPES[:3]),
    ),
    "train": (st.lists(st.lists(st.integers(0, 3), min_size=1), min_size=2, max_size=2), LISTS),
    "test": (st.none() | st.just([[4], [5, 4]]), LISTS),
    "std": (st.none() | st.just(0.5), st.sampled_from([[0.1] * 3, [0.0], float("nan"), []])),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@settings(some, max_examples=300)
@given(st.sampled_from([None, *GOOD]), st.data())
def test_own_data_are_taken_whole_or_refused(wild, draw):
    given = {name: draw.draw(GOOD[name][name == wild]) for name in GOOD}
    try:
        fed = federation.Federation(**given)
        data = ClientData(fed, seed=0, holdout=0, dtype=torch.float32, mean=fed.mean, std=fed.std)
    except ValueError as error:
        assert len(str(error)) > 20
        return
    n = len(given["y"])
    got, labels = data.batch(torch.arange(n))
    assert torch.isfinite(got.double()).all() and got.shape == (n, *fed.input_shape)
    assert 0 <= labels.min() <= labels.max() < fed.classes <= 1000 and len(data.extremes()) == 2
    assert fed.K == len(given["train"]) and fed.counts().sum() == sum(map(len, given["train"]))


# -- published numbers ---------------------------------------------------------------------------------------------------


@some
@given(
    st.binary(max_size=300)
    | st.lists(st.text(max_size=12), max_size=8).map(lambda v: ",".join(v).encode())
)
def test_the_reader_of_rows_returns_rows_or_says_value_error(tmp_path, raw):
    path = tmp_path / "derived.csv"
    path.write_bytes(raw)
    try:
        rows = tables.Results(tmp_path).derived
    except ValueError:  # no rows, no column `value`, no text
        return
    assert rows.value.dtype.kind in "iuf"


@settings(some, max_examples=20)
@given(st.sampled_from(["pfedhn", "pfedla", "flayer", "fedaghn"]), st.integers(0, 10**6), st.data())
def test_published_cells_are_numbers_whatever_is_asked(paper, at, draw):
    said = base.reported(paper)
    cell = said.iloc[at % len(said)]
    assert (
        np.isfinite(cell.value)
        and (np.isnan(cell["sd"]) or cell["sd"] >= 0)
        and cell.row
        and cell.table
    )
    with pytest.raises(ValueError, match="no published numbers"):
        base.reported(
            draw.draw(st.text(max_size=9).filter(lambda v: "/" not in v and v != paper)) + "?"
        )


# -- files from outside --------------------------------------------------------------------------------------------------


def spoiled(whole):
    """`whole` with pieces changed, cut or put in; now and then bytes that have nothing to do with it."""

    @st.composite
    def build(draw):
        raw = bytearray(whole)
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, len(raw)))
            raw[at : at + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
        return bytes(raw[: draw(st.integers(0, len(raw)))] if draw(st.booleans()) else raw)

    return build() | st.binary(max_size=200)


def idx_bytes(a):
    return (
        b"\0\0\x08"
        + bytes([a.ndim])
        + b"".join(n.to_bytes(4, "big") for n in a.shape)
        + a.tobytes()
    )


IMAGES, LABELS = (
    np.arange(12 * 784).astype(np.uint8).reshape(12, 28, 28),
    np.arange(12, dtype=np.uint8) % 10,
)


def npz_bytes(path, **arrays):
    np.savez(path, **arrays)
    return path.read_bytes()


def read_or_refused(name, root):
    try:
        pool = data._read(name, root)
    except (data.DatasetDamaged, data.DatasetMissing) as error:
        assert "get it" in str(error)
        return None
    assert (
        pool.n == len(pool.x) == len(pool.is_test)
        and 0 <= pool.y.min() <= pool.y.max() < pool.classes
    )
    return pool


@some
@given(spoiled(idx_bytes(IMAGES)), st.booleans())
def test_idx_files(tmp_path, raw, packed):
    folder = tmp_path / "MNIST" / "raw"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx_bytes(LABELS))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(IMAGES))
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(raw)
    if packed:
        path.unlink()
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(raw) if len(raw) % 2 else raw)
    read_or_refused("mnist", tmp_path)


def test_dataset_caches(tmp_path):
    whole = npz_bytes(tmp_path / "a.npz", x=IMAGES, y=LABELS.astype(np.int64), is_test=LABELS > 7)

    @settings(some, max_examples=100)
    @given(spoiled(whole))
    def fuzz(raw):
        (tmp_path / "mnist.npz").write_bytes(raw)
        read_or_refused("mnist", tmp_path)

    fuzz()


@some
@given(
    st.text(max_size=60) | st.lists(st.lists(st.text(max_size=5), max_size=4), max_size=5),
    st.booleans(),
)
def test_csv_files(tmp_path, rows, binary):
    folder = tmp_path / "ag_news"
    folder.mkdir(exist_ok=True)
    text = rows if isinstance(rows, str) else "\n".join(",".join(row) for row in rows)
    raw = text.encode("utf-16" if binary else "utf-8", "surrogatepass")
    (folder / "train.csv").write_bytes(raw)
    (folder / "test.csv").write_bytes(b"1,a title,some words\n2,another,more words\n")
    read_or_refused("ag_news", tmp_path)
    (tmp_path / "ag_news.npz").unlink(missing_ok=True)


@pytest.fixture
def finished(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    args = dict(
        partition_args={"alpha": 1.0},
        model="mlp",
        model_args={"hidden": 4},
        max_samples=20,
        clients=3,
    )
    return runs.run(Experiment(**args, rounds=1))


def signed(folder):
    """Give a run's folder the digests of what lies in it, if its experiment.json is one."""
    path = folder / "experiment.json"
    try:
        z = json.loads(path.read_bytes())
        path.write_text(
            json.dumps(z | {"sha256": store.digests(z["experiment"], z["meta"], folder)})
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass


def test_run_folders(finished, tmp_path, capsys):
    whole = {p.name: p.read_bytes() for p in finished.folder.iterdir()}
    json_like = st.recursive(
        st.none() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )

    @settings(some, max_examples=120)
    @given(st.data())
    def fuzz(draw):
        name = draw.draw(st.sampled_from(sorted(whole)))
        raw = draw.draw(spoiled(whole[name]))
        if name == "experiment.json" and draw.draw(st.booleans()):
            z = json.loads(whole[name])
            z[draw.draw(st.sampled_from(sorted(z)))] = draw.draw(json_like)
            raw = json.dumps(z).encode()
        folder = tmp_path / "other" / finished.id
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for other, content in whole.items():
            (folder / other).write_bytes(raw if other == name else content)
        if draw.draw(st.booleans()):  # digests that fit: what is read then is fuzz, too
            signed(folder)
        found = store.load_result(folder, aside=False)
        assert found is None or len(found.history)

    fuzz()
    (finished.folder / "experiment.json").write_bytes(b"[" * 100_000)
    assert store.load_result(finished.folder) is None and "set aside" in capsys.readouterr().out


# -- never code ----------------------------------------------------------------------------------------------------------


class Trap:
    """Unpickled, it writes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickles_from_outside_are_not_opened(finished, tmp_path, capsys):
    opened = tmp_path / "opened"
    e = finished.experiment.but(seed=1)
    with pytest.raises(Interrupted):
        runs.run(e, on_round=lambda r, h: r == 0)
    checkpoint = paths.store_folder() / f"{e.id}.part" / "checkpoint.pt"
    torch.save({"round": Trap(opened)}, checkpoint)
    assert runs.run(e).ok and "set aside" in capsys.readouterr().out
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Trap(opened)))
    with pytest.raises(ValueError, match="damaged"):
        load_whole(tmp_path / "plain.pt")
    np.savez(finished.folder / "arrays.npz", rounds=np.array([Trap(opened)], dtype=object))
    assert store.load_result(finished.folder) is None
    np.savez(tmp_path / "mnist.npz", x=IMAGES, y=np.array([Trap(opened)] * 12), is_test=LABELS > 7)
    assert read_or_refused("mnist", tmp_path) is None
    np.savez(
        tmp_path / "split.npz",
        clients=1,
        name="a",
        hash="b",
        train_0=np.array([Trap(opened)], dtype=object),
    )
    with pytest.raises(ValueError, match="pickled objects"):
        federation.Federation.load(tmp_path / "split.npz", IMAGES, LABELS)
    assert not opened.exists()


def test_a_run_folder_imports_nothing(finished, tmp_path, monkeypatch, capsys):
    (tmp_path / "from_outside.py").write_text(
        f"import os\nos.mkdir({str(tmp_path / 'opened')!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = finished.folder / "experiment.json"
    whole = json.loads(path.read_text())
    for source in (False, True):
        z = json.loads(json.dumps(whole))
        inner = z["experiment"]["init_from"] = dict(z["experiment"]) if source else None
        (inner or z["experiment"])["plugins"] = ["from_outside"]
        path.write_text(json.dumps(z))
        signed(finished.folder)
        read = store.load_result(finished.folder)
        assert read is not None and len(read.rows) == len(finished.rows)
        with pytest.raises(ValueError, match="import from_outside first"):
            read.experiment.but(rounds=1)
    assert not (tmp_path / "opened").exists()


def test_archives_write_nothing(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    with zipfile.ZipFile(root / "tiny-imagenet-200.zip", "w") as z:
        for name in ("../../escaped", "/tmp/escaped", "tiny-imagenet-200/train/../../../escaped"):
            z.writestr(name, "x")
        z.writestr("tiny-imagenet-200/val/val_annotations.txt", "../../escaped\tn1\n")
    assert read_or_refused("tiny_imagenet", root) is None
    assert [p.name for p in tmp_path.rglob("*")] == ["data", "tiny-imagenet-200.zip"]


RULES = {  # call: what must be among its keywords, or None where it may not stand at all
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "eval": None,
    "exec": None,
    "compile": None,
    "pickle.load": None,
    "pickle.loads": None,
    "pd.read_pickle": None,
    "os.system": None,
    "yaml.load": None,
    "extractall": None,
    "unpack_archive": None,
}
ALLOWED = {  # file, call: why
    ("readers.py", "pickle.loads"): "CIFAR's files, after a look at their published md5",
    (
        "workers.py",
        "pickle.loads",
    ): "what this process has just pickled, to see whether it comes back",
    ("files.py", "np.load"): "allow_pickle=trusted: a user's word for files of their own",
}


def offences(source, file):
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        whole, last = ast.unparse(node.func), getattr(node.func, "attr", "")
        name = (
            whole if whole in RULES else last if last in ("extractall", "unpack_archive") else None
        )
        given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        bad = name and (RULES[name] is None or given.get(RULES[name][0]) is not RULES[name][1])
        if bad or given.get("shell"):
            yield file, name or whole


def test_nothing_in_the_library_unpickles_or_evaluates():
    root = Path(pfl_core.__file__).parents[1]
    files = [
        p
        for folder in ("pfl_core", "pfl_papers", "benchmarks")
        for p in (root / folder).rglob("*.py")
    ]
    found = {bad for p in files for bad in offences(p.read_text(encoding="utf-8"), p.name)}
    assert len(files) > 40 and found == set(ALLOWED)
    seen = "torch.load(f)\nnp.load(f, allow_pickle=True)\neval(x)\nnet.eval()\nz.extractall()\nsubprocess.run(x, shell=True)"
    assert len(list(offences(seen, ""))) == 5


@some
@given(st.dictionaries(st.sampled_from(["profile", "datasets", "seeds"]), ANYTHING, max_size=3))
def test_parameters_of_a_notebook_are_values(parameters):
    try:
        kept = json.loads(json.dumps(parameters, allow_nan=False)) == parameters
    except (TypeError, ValueError):
        kept = False
    if kept:  # others are refused by notebooks.check_parameters
        written = ast.parse(PythonTranslator.codify(parameters)).body
        assert {s.targets[0].id: ast.literal_eval(s.value) for s in written} == parameters


def test_jupyterlab_is_started_on_the_loopback_with_its_token(monkeypatch, tmp_path):
    started = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", lambda *command: started.append(command))
    runner.main_lab(runner.parse(["lab"]))
    (_, words, env), said = started[0], " ".join(started[0][1]).lower()
    assert words[1:4] == ["-P", "-m", "jupyterlab"] and [w for w in words if "ip=" in w] == [
        "--ip=127.0.0.1"
    ]
    assert not [
        w
        for w in ("token", "password", "xsrf", "allow_origin", "allow_remote", "certfile")
        if w in said
    ]
    assert env == os.environ | {"JUPYTER_PREFER_ENV_PATH": "1"}


def test_results_that_are_committed_hold_numbers_only():
    for part in committed.parts().values():
        rows = part.rows()
        assert rows.value.dtype == float and np.isfinite(rows.value[rows.metric == "acc_pct"]).all()
