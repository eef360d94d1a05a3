"""Files of a user's own data: a folder is opened by map in any process, and damage is said at once."""

import contextlib
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch

from pfl_core import Experiment, Federation, run, sweep, tune
from pfl_core.data import arrays, federation, files
from pfl_core.experiments import feds
from pfl_core.experiments.build import client_data
from tests.made import main

N = 60
Y = np.arange(N) % 3
OWN = Experiment(dataset="own", model="mlp", rounds=2, batch=4, max_samples=12)


def own(form="images", **how):
    g = np.random.default_rng(0)
    x = g.integers(0, 256, (N, 4, 4), dtype=np.uint8)
    if form == "floats":
        x = x.astype(np.float32)[:, None] / 256
    if form == "another machine's":
        x = (x / 256).astype(">f8")
    if form == "tokens":
        x = x.reshape(N, 16).astype(np.int32)
    lists = dict(train=[range(20), range(20, 40)], val=[[40], []], test=[range(41, 50), [50, 51]])
    return Federation(x, Y, **lists | how)


def opened(tmp_path, **how):
    own(**how).save(tmp_path / "mine")
    return Federation.open(tmp_path / "mine")


def rows_of(found):
    return found[found.metric != "train_s"].drop(columns="wall_s").reset_index(drop=True)


# -- the folder ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["images", "floats", "another machine's", "tokens"])
def test_a_folder_holds_all_of_a_federation(tmp_path, form):
    fed = own(form, classes=7, mean=[0], std=[0.5], name="mine")
    fed.save(tmp_path / "deep" / "mine")
    back = Federation.open(tmp_path / "deep" / "mine")
    assert (back.checksum, back.name, back.mean) == (fed.checksum, "mine", (0,))
    assert sorted(p.name for p in (tmp_path / "deep" / "mine").iterdir()) == sorted(files.FILES)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["mine"]
    a, b = (client_data(OWN, fed=f).batch(torch.arange(N)) for f in (fed, back))
    assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("form", ["images", "floats", "tokens"])
def test_samples_stay_in_the_file(tmp_path, monkeypatch, form):
    fed = opened(tmp_path, form=form)
    assert arrays.mapped_file(fed.x) == str(tmp_path / "mine" / "x.npy")
    assert np.shares_memory(client_data(OWN, fed=fed).x.numpy(), fed.x)
    again = Federation(fed.x, fed.y, **fed.index)
    assert np.shares_memory(again.x, fed.x), "a map that is read only is not copied"
    monkeypatch.setattr(np, "ascontiguousarray", None)
    assert again.hash == fed.hash


def test_a_map_that_can_be_written_is_copied(tmp_path):
    fed = opened(tmp_path)
    for mode in ("r+", "c"):
        x = np.load(tmp_path / "mine" / "x.npy", mmap_mode=mode)
        assert not np.shares_memory(Federation(x, fed.y, **fed.index).x, x)


def test_the_same_again_is_not_written_and_something_else_is_not_replaced(tmp_path):
    fed = opened(tmp_path)
    before = files.stamps((tmp_path / "mine").iterdir())
    own().save(tmp_path / "mine")
    assert files.stamps((tmp_path / "mine").iterdir()) == before
    for other in (own(name="other"), own(classes=9), own("tokens")):
        with pytest.raises(ValueError, match="mine is there already and holds something else"):
            other.save(tmp_path / "mine")
    (tmp_path / "a file").write_text("")
    with pytest.raises(ValueError, match="holds something else"):
        fed.save(tmp_path / "a file")
    (tmp_path / "empty").mkdir()
    fed.save(tmp_path / "empty")
    assert Federation.open(tmp_path / "empty").checksum == fed.checksum


@pytest.mark.parametrize("name", ["own", "other"])
def test_two_processes_that_save_at_once(name, tmp_path, monkeypatch):
    """The second finds what the first wrote meanwhile: the same is there, and something else is said."""
    write_folder = files.write_folder

    def late(*args):
        monkeypatch.setattr(files, "write_folder", write_folder)
        own(name=name).save(tmp_path / "mine")
        write_folder(*args)

    monkeypatch.setattr(files, "write_folder", late)
    mine = own()
    said = pytest.raises(ValueError, match="holds something else")
    with said if name == "other" else contextlib.nullcontext():
        mine.save(tmp_path / "mine")
    assert Federation.open(tmp_path / "mine").name == name
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def write(path):
    a = np.load(path, mmap_mode="r+")
    a.flat[0] ^= 1
    a.flush()


def touched_later(path):
    write(path)
    os.utime(path, ns=(1, 2))


def another_file(path):
    a = np.load(path)
    path.unlink()
    np.save(path, a)


CHANGES = {"written to": touched_later, "replaced": another_file, "gone": lambda p: p.unlink()}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["opened", "mapped by numpy", "cut"])
def test_a_file_that_changed_is_no_longer_run(tmp_path, way, change):
    fed = opened(tmp_path)
    if way == "mapped by numpy":
        x = np.load(tmp_path / "mine" / "x.npy", mmap_mode="r")
        fed = Federation(x, fed.y, **fed.index)
    if way == "cut":
        fed = fed.at_most(5)
    run(OWN, fed=fed, store=tmp_path / "store", device="cpu")
    CHANGES[change](tmp_path / "mine" / "x.npy")
    with pytest.raises(ValueError, match=r"x.npy has (changed|gone) .*; open it again"):
        run(OWN, fed=fed, store=tmp_path / "store", device="cpu")


def test_a_file_that_changes_while_it_is_trained_on_leaves_no_result(tmp_path):
    fed = opened(tmp_path)
    change = CHANGES["written to"]
    with pytest.raises(ValueError, match="has changed"):
        run(
            OWN,
            fed=fed,
            store=tmp_path / "store",
            device="cpu",
            on_round=lambda r, h: change(tmp_path / "mine" / "x.npy") if r == 1 else None,
        )
    found = (tmp_path / "store").glob("*/experiment.json")
    assert [f for f in found if f.parent.suffix != ".part"] == []


def test_what_was_written_to_is_refused_when_it_is_opened(tmp_path):
    opened(tmp_path)
    write(tmp_path / "mine" / "x.npy")
    with pytest.raises(ValueError, match="is not as it was saved: its hash is"):
        Federation.open(tmp_path / "mine")


def test_another_process_opens_it_and_does_not_digest_it_again(tmp_path, monkeypatch):
    fed = opened(tmp_path)
    sent = pickle.dumps(fed)
    assert len(sent) < 2000
    monkeypatch.setattr(arrays, "digest", None)
    federation._reopened.cache_clear()
    there = pickle.loads(sent)
    assert there.checksum == fed.checksum and arrays.mapped_file(there.x)
    CHANGES["written to"](tmp_path / "mine" / "x.npy")
    federation._reopened.cache_clear()
    with pytest.raises(ValueError, match="x.npy has changed"):
        pickle.loads(sent)


# -- damaged and hostile folders -----------------------------------------------------------------------------------------


def header(path, shape, dtype="|u1"):
    body = path.read_bytes()
    with path.open("wb") as file:
        np.lib.format.write_array_header_2_0(
            file, {"descr": dtype, "fortran_order": False, "shape": shape}
        )
        file.write(body[128:])


def index(path, **changes):
    z = files.unpacked(path) | changes
    np.savez(path, **{n: v for n, v in z.items() if v is not None})


def bomb(path):
    """An index whose list promises 10^12 numbers."""
    with zipfile.ZipFile(path) as z:
        parts = {n: z.read(n) for n in z.namelist()}
    parts["train.npy"] = parts["train.npy"].replace(b"(40,), }", b"(%d,), }" % 10**12)[:118] + b"\n"
    with zipfile.ZipFile(path, "w") as z:
        for name, raw in parts.items():
            z.writestr(name, raw)


DAMAGE = {
    "x promises 10^12": ("x.npy", lambda p: header(p, (10**12, 4)), "promises .* and holds"),
    "x promises 10^30": ("x.npy", lambda p: header(p, (10**30,)), "promises .* and holds"),
    "x promises -1": ("x.npy", lambda p: header(p, (-1, -960)), "promises .* and holds"),
    "x promises none": ("x.npy", lambda p: header(p, (0, 4)), "promises .* and holds"),
    "x is cut off": (
        "x.npy",
        lambda p: p.write_bytes(p.read_bytes()[:-1]),
        "promises .* and holds",
    ),
    "x is longer": (
        "x.npy",
        lambda p: p.write_bytes(p.read_bytes() + b"a"),
        "promises .* and holds",
    ),
    "x is text": ("x.npy", lambda p: p.write_text("x"), "x.npy is no array that numpy wrote"),
    "x is empty": ("x.npy", lambda p: p.write_text(""), "x.npy is no array that numpy wrote"),
    "x is objects": (
        "x.npy",
        lambda p: np.save(p, np.array([[None]] * N), allow_pickle=True),
        "pickled objects, which are not read",
    ),
    "x is of others": (
        "x.npy",
        lambda p: np.save(p, np.zeros((9, 4))),
        "x has 9 samples and y has",
    ),
    "x has no axis": ("x.npy", lambda p: np.save(p, np.zeros(())), "x is float64"),
    "y promises 10^12": ("y.npy", lambda p: header(p, (10**12,), "<i8"), "promises .* and holds"),
    "y is floats": ("y.npy", lambda p: np.save(p, Y + 0.5), "labels y are float64"),
    "y is others": ("y.npy", lambda p: np.save(p, (Y + 1) % 3), "is not as it was saved"),
    "index is text": ("index.npz", lambda p: p.write_text("x"), "index.npz is damaged"),
    "index is cut off": (
        "index.npz",
        lambda p: p.write_bytes(p.read_bytes()[:-90]),
        "index.npz is damaged",
    ),
    "a list of 10^12": ("index.npz", bomb, "train promises .* and holds|index.npz is damaged"),
    "sizes of 10^12": (
        "index.npz",
        lambda p: index(p, train_n=np.array([10**12, 20])),
        "lists of 1000000000020 samples",
    ),
    "sizes below 0": (
        "index.npz",
        lambda p: index(p, train_n=np.array([-1, 41])),
        "sizes of lists",
    ),
    "sizes that overflow": (
        "index.npz",
        lambda p: index(p, train_n=np.array([2**62] * 4 + [40])),
        "lists of 18446744073709551656 samples",
    ),
    "indices beyond": (
        "index.npz",
        lambda p: index(p, test=np.full(11, 10**12)),
        "test indices of client 0 reach 10{12}",
    ),
    "10^18 classes": (
        "index.npz",
        lambda p: index(p, classes=np.array(10**18)),
        "allowed is an integer from 1 to 1,000,000",
    ),
    "other classes": ("index.npz", lambda p: index(p, classes=np.array(1)), "labels reach"),
    "no lists": ("index.npz", lambda p: index(p, val=None), "index.npz is damaged: .*val"),
    "objects": (
        "index.npz",
        lambda p: np.savez(p, train=np.array([None]), allow_pickle=True),
        "pickled objects",
    ),
    "no index": ("index.npz", lambda p: p.unlink(), "mine has no index.npz; expected is a folder"),
    "no samples": ("x.npy", lambda p: p.unlink(), "mine has no x.npy; expected is a folder"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_folder_is_refused_at_once(tmp_path, case):
    own().save(tmp_path / "mine")
    name, damage, says = DAMAGE[case]
    damage(tmp_path / "mine" / name)
    with pytest.raises(ValueError, match=says):
        Federation.open(tmp_path / "mine")


def test_the_two_forms_are_told_apart(tmp_path):
    own().save(tmp_path / "mine")
    own().save(tmp_path / "lists.npz")
    with pytest.raises(ValueError, match=r"mine is a folder; read it with Federation.open"):
        Federation.load(tmp_path / "mine", own().x, Y)
    with pytest.raises(ValueError, match=r"lists.npz has no x.npy, y.npy, index.npz"):
        Federation.open(tmp_path / "lists.npz")


def test_a_folder_on_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **how):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="cannot write .*No space left"):
        own().save(tmp_path / "mine")
    assert not list(tmp_path.iterdir())


# -- processes, the command line -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["images", "floats"])
def test_worker_processes_give_the_same_numbers(tmp_path, form):
    fed = own(form)
    todo = [OWN.but(seed=s) for s in range(2)] + [OWN.but(method="fedper")]
    one = sweep(todo, fed=fed, jobs=1, store=tmp_path / "one", device="cpu")
    for name, given in {"memory": fed, "a folder": opened(tmp_path, form=form)}.items():
        several = sweep(todo, fed=given, jobs=2, store=tmp_path / name, device="cpu")
        assert rows_of(several).equals(rows_of(one))
        assert not list((tmp_path / name).glob("own-data*")), "taken away afterwards"


def test_jobs_are_processes_and_what_is_there_is_found(tmp_path, monkeypatch):
    seen = []
    before = feds._in_a_folder

    @contextlib.contextmanager
    def noted(fed, store):
        with before(fed, store) as there:
            seen.append(there.folder)
            yield there

    monkeypatch.setattr(feds, "_in_a_folder", noted)
    todo = [OWN.but(seed=s, rounds=1) for s in range(2)]
    how = dict(fed=own(), jobs=2, store=tmp_path, device="cpu")
    first = sweep(todo, **how)
    assert len(seen) == 1 and seen[0].parent.parent == tmp_path
    assert sweep(todo, **how).value.equals(first.value) and len(seen) == 1


def test_a_choice_in_processes_is_that_of_one(tmp_path):
    def chosen(jobs):
        how = dict(fed=own(), jobs=jobs, store=tmp_path / str(jobs), device="cpu")
        return tune(OWN, {"lr": [0.01, 0.2]}, **how)

    (one, rows), (several, others) = chosen(1), chosen(2)
    assert one.lr == several.lr and rows_of(rows).equals(rows_of(others))


def test_the_command_line_runs_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    opened(tmp_path)
    words = (
        "run --dataset own --model mlp --rounds 2 --batch 4 --max_samples 12 --device cpu".split()
    )
    assert main([*words, "--fed", str(tmp_path / "mine")]) == 0
    result = run(OWN, fed=own(), device="cpu")
    assert result.id in capsys.readouterr().out
    assert main(words) == 1 and "--dataset own --fed FOLDER" in capsys.readouterr().err
    assert main([*words, "--fed", str(tmp_path)]) == 1
    assert "has no x.npy, y.npy, index.npz" in capsys.readouterr().err


# -- PFLlib --------------------------------------------------------------------------------------------------------------


def pfllib(folder, made):
    for (split, k), (x, y) in made.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / split / f"{k}.npz", data={"x": x, "y": y})


def texts(n, length, start=0):
    out = np.empty((n, 2), dtype=object)
    for i in range(n):
        out[i, 0], out[i, 1] = [start + i + t for t in range(length)], length
    return out


def test_pfllibs_texts_are_read(tmp_path):
    made = {("train", 0): (texts(4, 3), np.array([0, 1, 0, 1]))}
    made |= {("train", 1): (texts(3, 5, 7), np.array([1, 0, 1]))}
    made |= {
        ("test", 0): (texts(2, 3), np.array([0, 1])),
        ("test", 1): (np.array([]), np.array([])),
    }
    pfllib(tmp_path, made)
    fed = Federation.from_pfllib(tmp_path, trusted=True)
    assert fed.kind == "tokens" and fed.x.shape == (9, 5)
    assert fed.x[0].tolist() == [0, 1, 2, 0, 0] and fed.x[4].tolist() == [7, 8, 9, 10, 11]
    assert [len(i) for i in fed.index["test"]] == [2, 0] and fed.y.tolist()[:4] == [0, 1, 0, 1]


def test_an_empty_test_file_is_a_client_without(tmp_path):
    x = np.zeros((3, 1, 2, 2), np.float32)
    for empty in (np.array([]), np.zeros((0, 1, 2, 2), np.float32), np.array([], object)):
        y = np.arange(3) % 2
        made = {("train", k): (x, y) for k in (0, 1)} | {("test", 0): (empty, np.array([]))}
        pfllib(tmp_path / str(len(empty.shape)) / empty.dtype.name, made | {("test", 1): (x, y)})
        fed = Federation.from_pfllib(
            tmp_path / str(len(empty.shape)) / empty.dtype.name, trusted=True
        )
        assert [len(i) for i in fed.index["test"]] == [0, 3]


def test_other_objects_are_no_texts(tmp_path):
    pfllib(tmp_path, {("train", 0): (np.array(["a", None], object), np.arange(2))})
    pfllib(tmp_path, {("test", 0): (np.array([]), np.array([]))})
    with pytest.raises(ValueError, match="neither arrays of numbers nor texts"):
        Federation.from_pfllib(tmp_path, trusted=True)
