"""Arrays that a user gives: nobody changes them under a run, and what is none is named with what to do instead."""

import copy
import hashlib
import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from pfl_core import Experiment, Federation, load, register_dataset, run, sweep
from pfl_core.data import arrays, pools
from pfl_core.data.arrays import SERVED
from pfl_core.data.pools import Pool
from pfl_core.experiments.build import client_data

N = 24
X = np.random.default_rng(0).integers(0, 256, (N, 4, 4), dtype=np.uint8)
Y = np.arange(N) % 3
LISTS = dict(train=[range(8), range(8, 16)], val=[[16], [17]], test=[[18, 19], [20, 21, 22]])
OWN = Experiment(dataset="own", model="mlp", rounds=1, batch=4)


# -- nothing changes under a run -----------------------------------------------------------------------------------------

GIVEN = {  # what a user keeps -> what is given, and the array behind it
    "an array": lambda: (a := X.copy(), a),
    "a view": lambda: ((a := np.stack([X, X]))[0], a[0]),
    "a read-only view": lambda: (read_only((a := X.copy())[:]), a),
    "an array made read-only": lambda: still_written(X.copy()),
    "a tensor over numpy's memory": lambda: (torch.from_numpy(a := X.copy()), a),
    "every second row": lambda: ((a := np.repeat(X, 2, 0))[::2], a[::2]),
    "Fortran's order": lambda: (a := np.asfortranarray(X), a),
    "floats": lambda: (a := (X / 256).astype(np.float32), a),
    "another machine's floats": lambda: (a := (X / 256).astype(">f4"), a),
}


def read_only(a):
    a.flags.writeable = False
    return a


def still_written(a):
    before = a[:]  # a view that can be written
    return read_only(a), before


@pytest.mark.parametrize("form", GIVEN)
def test_what_the_user_keeps_and_changes_is_not_what_runs(form):
    given, behind = GIVEN[form]()
    labels, index, mean = Y.copy(), [np.arange(8), np.arange(8, 16)], [0.5]
    fed = Federation(given, labels, index, mean=mean, std=[1.0])
    before, images = fed.checksum, client_data(OWN, fed=fed).batch(torch.arange(N))
    behind[:], labels[:], index[0][:], mean[0] = 0, 0, 5, 0.1
    index.append(np.arange(2))
    again = client_data(OWN, fed=fed).batch(torch.arange(N))
    fed.__dict__.pop("hash")
    assert fed.checksum == before and all(map(torch.equal, images, again))
    assert fed.index["train"][0].tolist() == list(range(8)) and fed.K == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.x.__setitem__(0, 0),
        lambda f: f.y.__setitem__(0, 1),
        lambda f: f.index["train"][0].__setitem__(0, 1),
        lambda f: f.x.flags.__setattr__("writeable", True),
        lambda f: f.y.flags.__setattr__("writeable", True),
        lambda f: f.index["test"][1].flags.__setattr__("writeable", True),
        lambda f: f.index.__setitem__("test", ()),
        lambda f: f.index["test"].append([3]),
        lambda f: f.index["test"].__setitem__(0, [3]),
        lambda f: setattr(f, "x", f.x + 1),
        lambda f: setattr(f, "classes", 9),
        lambda f: f.mean.__setitem__(0, 9),
    ],
)
@pytest.mark.parametrize("way", ["as made", "pickled", "deeply copied", "cut", "from a folder"])
def test_a_federation_does_not_change(tmp_path, way, change):
    fed = Federation(X, Y, **LISTS, mean=[0.5])
    if way == "pickled":
        fed = pickle.loads(pickle.dumps(fed))
    if way == "deeply copied":
        fed = copy.deepcopy(fed)
    if way == "cut":
        fed = fed.at_most(5, seed=0)
    if way == "from a folder":
        fed.save(tmp_path / "mine")
        fed = Federation.open(tmp_path / "mine")
    before = fed.checksum
    with pytest.raises((ValueError, TypeError, AttributeError)):
        change(fed)
    fed.__dict__.pop("hash")
    assert fed.checksum == before


def test_a_stored_result_is_of_the_data_that_its_id_names(tmp_path):
    x, y = X.copy(), Y.copy()
    fed = Federation(x, y, **LISTS)
    first = run(OWN, fed=fed, store=tmp_path, device="cpu")
    x[:], y[:] = 0, 0
    second = run(OWN.but(rounds=2), fed=fed, store=tmp_path, device="cpu")
    sound = run(
        OWN.but(rounds=2), fed=Federation(X, Y, **LISTS), store=tmp_path / "b", device="cpu"
    )
    assert second.id == sound.id != first.id
    assert second.rows.query("metric == 'loss'").value.tolist() == (
        sound.rows.query("metric == 'loss'").value.tolist()
    )


def test_arrays_of_a_pool_are_its_own():
    x, y, test, groups = X.copy(), Y.copy(), np.arange(N) > 15, np.arange(N) // 4
    pool = Pool("mine", x, y, test, 3, {"worker": groups})
    again = Pool("mine", X, Y, np.arange(N) > 15, 3, {"worker": np.arange(N) // 4}).checksum
    x[:], y[:], test[:], groups[:] = 0, 0, False, 0
    assert pool.checksum == again and pool.x.any() and pool.extra["worker"].any()
    for a in (pool.x, pool.y, pool.is_test, pool.extra["worker"]):
        with pytest.raises(ValueError, match="read-only"):
            a[0] = 0
    with pytest.raises(TypeError):
        pool.extra["worker"] = Y


def test_a_federation_over_a_pool_shares_its_samples():
    pool = load("digits")
    fed = Federation.dealt(pool.x, pool.y, "iid", clients=2)
    assert np.shares_memory(fed.x, pool.x) and np.shares_memory(fed.at_most(3).x, pool.x)
    own = client_data(OWN, fed=fed)
    assert np.shares_memory(own.x.numpy(), pool.x), "nor does training copy them"


@pytest.mark.parametrize("order", ["C", "F", "rows apart"])
def test_a_digest_in_pieces_is_that_of_all_bytes(monkeypatch, order):
    monkeypatch.setattr(arrays, "CHUNK", 100)
    a = np.asfortranarray(X) if order == "F" else X[::2] if order == "rows apart" else X
    whole = hashlib.sha256(str((a.shape, a.dtype)).encode() + a.tobytes()).hexdigest()
    assert arrays.digest([a]) == whole


# -- what is no array ----------------------------------------------------------------------------------------------------


class Mine(Dataset):
    """A data set of the user's own."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.zeros(2), 0


class Fetched(Mine):
    """As torchvision's MNIST."""

    data, targets = torch.tensor(X), Y


T = torch.zeros(N, 2)
PAIRS = TensorDataset(T, torch.tensor(Y))
PICTURE = Image.fromarray(X[0])
OBJECTS = np.empty(N, object)
OBJECTS[:] = list(X)
NO_SAMPLES = {
    "TensorDataset": (PAIRS, "x is a TensorDataset; give its tensors: x, y = dataset.tensors"),
    "Subset": (Subset(PAIRS, [0]), "x is a Subset; give .*, and subset.indices as one client's"),
    "DataLoader": (DataLoader(PAIRS), "x is a DataLoader; give the arrays of loader.dataset"),
    "a Dataset": (Mine(), r"x is a Mine; give np.stack\(.* for image, _ in dataset\]\)"),
    "a fetched one": (Fetched(), "x is a Fetched; give x=dataset.data, y=dataset.targets"),
    "a table of integers": (
        pd.DataFrame({"a": range(N)}),
        r"x is a DataFrame; give .*x.to_numpy\('float32'\)",
    ),
    "scipy's sparse": (scipy.sparse.csr_array(np.eye(N)), r"give x.toarray\(\)"),
    "torch's sparse": (T.to_sparse(), r"x is a sparse_coo tensor; give x.to_dense\(\)"),
    "bfloat16": (T.bfloat16(), r"tensor of torch.bfloat16 .*; give x.float\(\)"),
    "no memory": (T.to("meta"), "on meta"),
    "complex": (T.to(torch.complex64), r"np.stack\(\[x.real, x.imag\], 1\)"),
    "a picture": (PICTURE, r"x is a Image; give np.stack of all images"),
    "a list of tensors": (list(T), r"x is a list; give torch.stack\(x\)"),
    "a list of pairs": ([(t, 0) for t in T], r"x, y = zip\(\*pairs\)"),
    "objects": (OBJECTS, r"np.stack\(list\(x\)\)"),
    "columns with names": (np.zeros(N, [("a", "f4"), ("b", "f4")]), "structured_to_unstructured"),
    "masked": (
        np.ma.array(X, mask=X > 250),
        "x is a masked array, of which .* leave these samples",
    ),
    "a generator": ((row for row in X), r"x is a generator; give np.stack\(list\(x\)\)"),
    "a dict": ({0: X}, r"x is a dict; give .*np.stack\(list\(x.values\(\)\)\)"),
    "a name": ("x.npy", "x is a str; give an array, read from its file"),
    "nothing": (None, "x is a NoneType; give an array"),
    "volumes of bytes": (np.zeros((N, 1, 2, 2, 2), np.uint8), "volumes as floats"),
    "no pixel": (np.zeros((N, 0, 3), np.uint8), "its samples hold no number"),
    "bits": (X > 9, r"of bits take x.astype\('float32'\)"),
    "one number": (np.zeros(N), r"take x\[:, None\]"),
}


@pytest.mark.parametrize("case", NO_SAMPLES)
def test_what_is_no_array_of_samples_is_named(case):
    x, says = NO_SAMPLES[case]
    with pytest.raises(ValueError, match=says):
        Federation(x, Y, **LISTS)


FINE = {
    "pictures": [Image.fromarray(a) for a in X],
    "a matrix": np.matrix(X.reshape(N, -1) / 256),
    "a table of floats": pd.DataFrame(X.reshape(N, -1) / 256),
    "nothing masked": np.ma.array(X),
    "a parameter": torch.nn.Parameter(torch.tensor(X / 256)),
    "a table of bytes": X.reshape(N, 16),
}


@pytest.mark.parametrize("case", FINE)
def test_other_containers_train(tmp_path, case):
    fed = Federation(FINE[case], Y, **LISTS)
    assert type(fed.x) is np.ndarray
    assert run(OWN, fed=fed, store=tmp_path, device="cpu").ok


NO_LABELS = {
    "one-hot": (np.eye(3)[Y], r"of one-hot rows take y.argmax\(1\)"),
    "several classes": (np.array([[1, 1, 0]] * N), f"several classes, .* not served; {SERVED}"),
    "shares": (np.full((N, 2), 0.5), f"shares of classes .* not served; {SERVED}"),
    "targets": (np.full((N, 2), 7.5), f"targets a sample are not served; {SERVED}"),
    "masks": (np.zeros((N, 4, 4), int), rf"a pixel or token \(segmentation\) .*; {SERVED}"),
    "a regression": (Y + 0.25, f"quantities, and regression is not served; {SERVED}"),
    "a regression in objects": ((Y + 0.25).astype(object), f"regression is not served; {SERVED}"),
    "lists of classes": ([[0], [1, 2]] * (N // 2), f"several classes a sample .*; {SERVED}"),
    "sets of classes": ([{0, 1}] * N, f"type set; .*more than a class a sample .*; {SERVED}"),
    "what a detector sees": ([{"boxes": 1}] * N, f"type dict; .* not served; {SERVED}"),
    "masks in objects": (
        pd.Series([np.zeros((2, 2), int)] * N),
        f"type ndarray; .* not served; {SERVED}",
    ),
    "names, one missing": (np.array([None] + ["a"] * (N - 1)), "y is missing for 1 of .* sample 0"),
    "NaN": (np.where(Y, np.nan, 0), "8 are NaN|16 are NaN"),
    "masked": (np.ma.array(Y, mask=Y > 1), "y is a masked array"),
    "nothing": (None, "y is a NoneType; give a list or array"),
}


@pytest.mark.parametrize("case", NO_LABELS)
def test_labels_that_are_none_lose_nothing(case):
    y, says = NO_LABELS[case]
    with pytest.raises(ValueError, match=says) as error:
        Federation(X, y, **LISTS)
    assert ("argmax" in str(error.value)) == (case == "one-hot")


@pytest.mark.parametrize(
    "y",
    [
        torch.tensor(Y > 0),
        torch.tensor(Y, dtype=torch.uint8),
        Y[:, None, None],
        Y.astype(float),
        pd.Series(Y),
        pd.DataFrame(Y),
        list(torch.tensor(Y)),
    ],
)
def test_labels_of_other_forms_are_read(y):
    assert Federation(X, y, **LISTS).y.tolist() in (Y.tolist(), (Y > 0).tolist())


NO_LISTS = {
    "twice": (
        dict(train=[[0, 1, 0], [2]]),
        "train of client 0 lists 1 samples more than once, .* 0",
    ),
    "twice in test": (dict(test=[[], [20, 20]]), "test of client 1 lists 1 samples more than once"),
    "a set": (dict(train=[{0, 1}, [2]]), "train of client 0 is a set, which has no order"),
    "a set of lists": (dict(train={(0,), (1,)}), "train is a set; give a list"),
    "a generator": (dict(train=(i for i in [[0], [1]])), "train is a generator; give a list"),
    "two axes": (dict(train=[np.zeros((2, 2), int), [2]]), r"has shape \(2, 2\); give one index"),
    "torch's mask": (dict(val=[torch.tensor(Y) == 5, [1]]), "np.flatnonzero"),
    "masked": (dict(train=[np.ma.array([0, 1], mask=[0, 1]), [2]]), "is a masked array"),
    "validated and tested": (dict(val=[[18], []]), "are validated on"),
}


@pytest.mark.parametrize("case", NO_LISTS)
def test_lists_that_are_none_are_named(case):
    changes, says = NO_LISTS[case]
    with pytest.raises(ValueError, match=says):
        Federation(X, Y, **LISTS | changes)


@pytest.mark.parametrize("classes", [0, -1, True, 2.5, 10**30, "3"])
def test_a_number_of_classes_is_one(classes):
    with pytest.raises(ValueError, match="allowed is an integer from 1 to 1,000,000"):
        Federation(X, Y, **LISTS, classes=classes)


def test_clients_may_share_samples_of_a_part():
    fed = Federation(X, Y, [[0, 1], [1, 2]], test=[[5, 6], [5, 6]])
    assert fed.counts("test").sum() == 4


@pytest.mark.parametrize("shape", [(4, 4), (1, 4, 4), (3, 4, 4), (1, 2, 4, 4), (16,)])
def test_pixels_as_floats_are_warned_of_at_any_shape(shape):
    pixels = np.random.default_rng(0).integers(0, 256, (N, *shape)).astype(np.float32)
    with pytest.warns(UserWarning, match=r"whole numbers up to 2\d\d.*pixels of 0 to 255"):
        Federation(pixels, Y, **LISTS)
    for fine in (pixels / 255, pixels - 128, pixels * 2, pixels % 2):
        Federation(fine, Y, **LISTS)


def test_resampled_images_are_warned_of_and_counts_are_not():
    with pytest.warns(UserWarning, match="numbers up to 200.5.*give x / 255$"):
        Federation(np.full((N, 3, 4, 4), 200.5), Y, **LISTS)
    counts = np.random.default_rng(0).integers(0, 40, (N, 30)).astype(float)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Federation(counts, Y, **LISTS)


def test_a_std_without_a_mean_is_not_dropped(tmp_path):
    with pytest.raises(ValueError, match=r"std=\(0.5,\)\) without a mean; give both"):
        run(OWN, fed=Federation(X, Y, **LISTS, std=[0.5]), store=tmp_path)


# -- max_samples ---------------------------------------------------------------------------------------------------------


def sorted_by_class(k=3, each=(60, 30, 10)):
    y = np.tile(np.repeat(np.arange(len(each)), each), 2 * k)
    parts = np.arange(len(y)).reshape(2 * k, -1)
    x = np.random.default_rng(0).integers(0, 256, (len(y), 4, 4), dtype=np.uint8)
    return Federation(x, y, [*parts[:k]], test=[*parts[k:]])


@pytest.mark.parametrize("samples", [10, 20, 50])
def test_of_lists_sorted_by_class_every_class_is_drawn_in_proportion(samples):
    fed = sorted_by_class()
    data = client_data(OWN.but(max_samples=samples), fed=fed)
    for split in ("train", "test"):
        for k, kept in enumerate(data.index[split]):
            assert len(set(kept.tolist())) == samples and np.isin(kept, fed.index[split][k]).all()
            share = np.bincount(fed.y[kept], minlength=3) / samples
            assert np.abs(share - [0.6, 0.3, 0.1]).max() <= 1 / samples


def test_the_seed_draws_and_few_are_all():
    fed = sorted_by_class()

    def drawn(seed, samples=10):
        data = client_data(OWN.but(seed=seed, max_samples=samples), fed=fed)
        return [i.tolist() for i in data.index["train"]]

    assert drawn(0) == drawn(0) != drawn(1)
    assert len({tuple(np.array(i) - i[0] // 100 * 100) for i in drawn(0)}) == 3, "each its own"
    assert drawn(0, 100) == drawn(1, 500) == [i.tolist() for i in fed.index["train"]]


def test_what_a_partition_dealt_is_cut_as_before():
    e = Experiment(model="mlp", clients=3, max_samples=7)
    whole = client_data(e.but(max_samples=0)).index["train"]
    now = client_data(e).index["train"]
    assert all(np.array_equal(a, b[:7]) for a, b in zip(now, whole, strict=True))


def test_only_own_data_that_are_cut_have_other_ids_than_before():
    dealt = Experiment(model="mlp", clients=3, max_samples=7)
    assert (OWN.id_for("0"), dealt.id_for("0")) == ("8f1f8c63ee75a54e", "4b9e9861a82b3cba")
    assert OWN.but(max_samples=7).id_for("0") != "2af42bca0eb3f2ef"


# -- tables as pools -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_table_is_a_data_set(tmp_path, monkeypatch, dtype):
    g = np.random.default_rng(0)
    y = g.integers(0, 3, 240)
    x = (g.standard_normal((240, 5)) + y[:, None]).astype(dtype)
    monkeypatch.setattr(pools, "_ENTRIES", dict(pools._ENTRIES))
    name = f"table of {np.dtype(dtype).name}"
    register_dataset(name, lambda: Pool(name, x, y, np.arange(240) % 5 == 0, 3))
    e = Experiment(dataset=name, partition="iid", clients=3, model="mlp", rounds=2, lr=0.1)
    pool = load(name)
    assert (pool.kind, pool.input_shape, pool.mean) == ("table", (5,), None)
    assert "240 samples of 5" in repr(pool)
    rows = sweep([e], store=tmp_path, device="cpu")
    best = rows.query("split == 'test' and metric == 'acc_pct'").value.max()
    assert best > 50
