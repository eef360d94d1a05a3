"""What is changed when samples are dealt: every scheme takes it, each client has its own, ids see it."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_core import Experiment, Federation, load, register_dataset, register_partition, run
from pfl_core.data import partition as partitions
from pfl_core.data import pools, shifts
from pfl_core.data.partition import Split, partition
from pfl_core.data.pools import Pool
from pfl_core.data.shifts import TRANSFORMS, applied, shortest
from pfl_core.experiments import build
from pfl_core.experiments.build import federation
from tests.core.data.test_partition import DIGITS, SCHEMES, clients_for, same

TURNS = ["none", "turn90", "turn180", "turn270"]
E = Experiment(partition="class_equal", partition_args={"k": 10}, clients=8, model="mlp", rounds=1)
IMAGES = sorted(set(TRANSFORMS) - {"swap"})  # of one channel


def of(fed, k, part="train"):
    at = fed.index[part][k]
    return fed.x[at], fed.y[at]


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_every_scheme_deals_the_same_samples_with_them(name):
    clients = clients_for(name)
    plain = partition(name, DIGITS, clients, 3)
    split = partition(name, DIGITS, clients, 3, transform=TURNS, relabel=[0, 1])
    assert same(plain, split)
    assert split.transform == [TURNS[i % 4] for i in range(clients)]
    first = np.tile(np.arange(10), (clients, 1)) if plain.relabel is None else plain.relabel
    many = first.max() + 1
    for i, table in enumerate(split.relabel):
        np.testing.assert_array_equal(table, np.where(first[i] < 0, -1, (first[i] + i % 2) % many))


@pytest.mark.parametrize("name", IMAGES)
def test_clients_have_their_samples_transformed(name):
    plain, fed = federation(E), federation(E.but(partition_args={"transform": ["none", name]}))
    turned = {"turn90": 1, "turn180": 2, "turn270": 3}.get(name, 0)
    by_hand = {"mirror": np.fliplr, "invert": lambda a: 255 - a}.get(name)
    for part in ("train", "val", "test"):
        for k in range(8):
            (x, y), (x0, y0) = of(fed, k, part), of(plain, k, part)
            want = x0
            if k % 2:
                want = np.stack([by_hand(a) if by_hand else np.rot90(a, turned) for a in x0])
            np.testing.assert_array_equal(x, want)
            np.testing.assert_array_equal(y, y0)
    assert len(fed.y) == 8 * 100, "what nobody holds is left out"


def test_clients_have_labels_of_their_own():
    plain = federation(E)
    odd = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
    fed = federation(E.but(partition_args={"relabel": [0, 3, odd]}))
    for k in range(8):
        (x, y), (x0, y0) = of(fed, k), of(plain, k)
        np.testing.assert_array_equal(x, x0)
        want = [y0, (y0 + 3) % 10, np.array(odd)[y0]][k % 3]
        np.testing.assert_array_equal(y, want)
    assert fed.classes == 10


def test_domains_are_one_task():
    e = Experiment(partition="domains", partition_args={"groups": 5}, clients=10)
    fed, split = federation(e), build.split(e)
    assert fed.classes == 2 and set(np.unique(fed.y)) == {0, 1}
    pool = load("digits")
    for k in range(10):
        np.testing.assert_array_equal(of(fed, k)[1], pool.y[split.train[k]] - 2 * (k % 5))
        np.testing.assert_array_equal(of(fed, k)[0], pool.x[split.train[k]])
    renamed = federation(e.but(partition_args={"relabel": [[1, 0]]}))
    np.testing.assert_array_equal(renamed.y, 1 - fed.y)
    result = run(e.but(model="mlp", rounds=1))
    assert result.ok and result.meta["classes"] == 2


def test_who_is_kept_keeps_its_own():
    args = {"transform": TURNS, "relabel": [0, 1, 2, 3]}
    whole = federation(E.but(partition_args=args))
    some = federation(E.but(clients=2, partition_args=args | dict(of=8, first=1, every=4)))
    for k, full in enumerate((1, 5)):
        for a, b in zip(of(some, k), of(whole, full), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("form", ["n h w", "n h w 3", "n 3 h w", "float"])
def test_all_forms_of_images_are_turned_alike(form):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (200, 3, 6, 6), dtype=np.uint8)
    y = np.arange(200) % 2
    last = x.transpose(0, 2, 3, 1)
    given = {"n h w": x[:, 0], "n h w 3": last, "n 3 h w": x, "float": x.astype(np.float32) / 255}
    how = dict(clients=3, seed=1, test=0.5)
    for name in TRANSFORMS:
        if (form, name) in {("n h w", "swap"), ("float", "invert")}:
            continue
        fed = Federation.dealt(given[form], y, "iid", **how, transform=[name])
        at = [i for k in range(3) for i in partition_of(y, how, k)]
        want = TRANSFORMS[name](last if form != "n h w" else x[:, 0][..., None])[at]
        if form == "n h w":
            want = want[..., 0]
        elif form != "n h w 3":
            want = want.transpose(0, 3, 1, 2)
        want = want.astype(np.float32) / 255 if form == "float" else want
        np.testing.assert_array_equal(fed.x, want)


def partition_of(y, how, k):
    plain = Federation.dealt(np.zeros((200, 4, 4), np.uint8), y, "iid", **how)
    return [*plain.index["train"][k], *plain.index["test"][k]]


@pytest.mark.parametrize(
    "x, name, said",
    [
        (np.zeros((60, 5), np.float32), "turn90", "is for images; these samples are float32"),
        (np.zeros((60, 5), np.int32), "invert", "is for images; these samples are int32"),
        (np.zeros((60, 4, 5), np.uint8), "turn90", "4 x 5 is no square"),
        (np.zeros((60, 4, 4), np.uint8), "swap", "is for 3 channels, these images have 1"),
        (np.zeros((60, 1, 4, 4), np.float32), "invert", "uint8 of 0 to 255; these are floats"),
    ],
)
def test_what_samples_cannot_have_is_refused(x, name, said):
    with pytest.raises(ValueError, match=said):
        Federation.dealt(x, np.arange(60) % 3, "iid", clients=2, transform=["none", name])
    Federation.dealt(x, np.arange(60) % 3, "iid", clients=2, transform=["none"])


def test_without_them_nothing_changes():
    pool = load("digits")
    split = build.split(E)
    x, y, classes, same_split = applied(pool.inputs, pool.y, pool.classes, split)
    assert x is pool.inputs and y is pool.y and classes == 10 and same_split is split
    assert federation(E).x is not None and len(federation(E).y) == len(pool.y)


# -- texts


def texts(n=400, length=9, vocab=60):
    rng = np.random.default_rng(5)
    x = np.minimum(rng.geometric(0.08, (n, length)), vocab - 1).astype(np.int32)
    x[np.arange(length) >= rng.integers(1, length + 1, (n, 1))] = 0
    x[:, 0] = np.arange(n) % 2 + 50  # what few texts have else
    return Pool("own_words", x, np.arange(n) % 2, np.arange(n) < 80, 2, {"vocab": np.arange(vocab)})


@pytest.fixture
def words(monkeypatch):
    monkeypatch.setattr(pools, "_ENTRIES", dict(pools._ENTRIES))
    register_dataset("own_words", texts)
    yield E.but(
        dataset="own_words", clients=4, partition_args={"k": 2, "each": "10/4/10", "words": 8}
    )
    pools._load.cache_clear()


def test_texts_become_vectors_of_the_words_of_training_texts(words):
    fed, split, pool = federation(words), build.split(words), load("own_words")
    train = pool.x[np.concatenate(split.train)]
    often = np.array([(train == w).any(1).sum() for w in range(1, 60)])
    chosen = 1 + np.argsort(-often, kind="stable")[:8]
    assert fed.x.dtype == np.float32 and fed.kind == "float" and fed.input_shape == (8,)
    for k in range(4):
        for part in ("train", "val", "test"):
            mine = pool.x[getattr(split, part)[k]]
            want = np.stack([(mine == w).any(1) for w in chosen], axis=1)
            np.testing.assert_array_equal(of(fed, k, part)[0], want)
    result = run(words.but(rounds=4, lr=0.5, model="mlp", keep_models=True))
    assert result.ok and result.meta["input_shape"] == [8]
    assert result.predict(0, of(fed, 0)[0]).shape == (10,)
    assert words.id != words.but(partition_args={"words": 9}).id
    assert (
        words.but(partition_args={"words": None}).id
        == words.but(partition_args=dict(words=None, k=2)).id
    )


def test_words_that_are_not_there_are_refused(words):
    with pytest.raises(
        ValueError, match="words=58: the training texts that are dealt have [0-9]+;"
    ):
        federation(words.but(partition_args={"words": 58}))
    with pytest.raises(ValueError, match="words=8 is for texts; these samples are uint8"):
        federation(E.but(partition_args={"words": 8}))
    with pytest.raises(ValueError, match="words=0: allowed is an integer"):
        words.but(partition_args={"words": 0})


def test_a_data_set_of_ones_own_may_be_registered_again(words):
    before = words.id
    register_dataset("own_words", texts)  # a cell that runs twice
    assert words.id == before and load("own_words").n == 400
    register_dataset("own_words", lambda: texts(300))
    assert words.id != before and load("own_words").n == 300
    for name in ("digits", "mnist", "own"):
        with pytest.raises(ValueError, match="exists already .*choose another name"):
            register_dataset(name, texts)


# -- ids


SAME = [  # ways to say the same
    [{}, {"transform": None}, {"transform": ["none"]}, {"relabel": [0, 0]}, {"relabel": None}],
    [{"transform": ["none", "mirror"]}, {"transform": ["none", "mirror"] * 2, "relabel": [0]}],
    [{"relabel": [0, 3]}, {"relabel": [[*range(10)], [(c + 3) % 10 for c in range(10)]]}],
    [{"transform": ["mirror", "none"]}],
    [{"relabel": [3]}, {"relabel": [3, 3, 3]}],
    [{"relabel": [[1, 0, *range(2, 10)]]}],
]


def test_what_is_changed_is_part_of_the_id_in_one_form():
    ids = [{E.but(partition_args=args).id for args in ways} for ways in SAME]
    assert [len(i) for i in ids] == [1] * len(SAME) and len(set.union(*ids)) == len(SAME)
    assert E.id in ids[0]
    for ways in SAME:
        feds = [federation(E.but(partition_args=args)) for args in ways]
        for fed in feds[1:]:
            for k in range(8):
                for a, b in zip(of(fed, k), of(feds[0], k), strict=True):
                    np.testing.assert_array_equal(a, b)
    again = Experiment.from_plain(E.but(partition_args={"relabel": [0, [*range(10)]]}).plain())
    assert again.id == E.id


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(1, 3))
def test_the_shortest_list_gives_clients_the_same(entries, times):
    short = shortest("relabel", entries * times) or [0]
    assert len(short) <= len(entries)
    assert all(short[i % len(short)] == entries[i % len(entries)] for i in range(40))


# -- a scheme of one's own


def halves(pool, clients, rng, transform=None):
    """Halves."""
    order = np.array_split(rng.permutation(len(pool.y)), clients)
    names = ["mirror"] * clients if transform is None else None
    parts = [[i[at] for i in order] for at in (slice(5, None), slice(0), slice(5))]
    return Split(*parts, transform=names)


@pytest.fixture
def own_schemes(monkeypatch):
    monkeypatch.setattr(partitions, "_SCHEMES", dict(SCHEMES))


def test_a_scheme_of_ones_own_says_what_is_changed(own_schemes):
    register_partition("halves", halves)
    assert partition("halves", DIGITS, 3, 0).transform == ["mirror"] * 3
    # An argument of that name is its own.
    assert partition("halves", DIGITS, 3, 0, transform=7).transform is None
    both = partition("halves", DIGITS, 3, 0, relabel=[1])
    assert both.transform == ["mirror"] * 3 and (both.relabel[0] == (np.arange(10) + 1) % 10).all()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"transform": ["mirror"]}, "transform has 1 names for 2 clients"),
        ({"transform": ["mirror", "miror"]}, "did you mean 'mirror'"),
        ({"relabel": np.zeros((2, 3), int)}, r"relabel is int64 \(2, 3\); allowed are integers"),
        ({"relabel": np.zeros((2, 10))}, "relabel is float64"),
        ({"relabel": np.full((2, 10), -1)}, "relabel has no label for classes .* of client 0"),
    ],
)
def test_what_does_not_fit_is_refused(own_schemes, changes, said):
    def scheme(pool, clients, rng):
        return dataclasses.replace(SCHEMES["iid"](pool, clients, rng), **changes)

    register_partition("wrong", scheme)
    with pytest.raises(ValueError, match=said):
        partition("wrong", DIGITS, 2, 0)


def takes_all(pool, clients, rng, **args):
    """All that is given."""
    assert args == {"transform": 7, "words": "a"}
    return SCHEMES["iid"](pool, clients, rng)


def lists(pool, clients, rng, transform: list | None = None):
    """A list of its own."""
    return SCHEMES["iid"](pool, clients, rng)


def test_what_a_scheme_takes_itself_is_its_own(own_schemes):
    register_partition("takes_all", takes_all)
    register_partition("lists", lists)
    assert partition("takes_all", DIGITS, 2, 0, transform=7, words="a").transform is None
    own = [
        Experiment(partition="lists", partition_args={"transform": t}) for t in ([1], [1, 1], [])
    ]
    assert len({e.id for e in own}) == 3


def test_a_scheme_that_transforms_takes_no_transform(own_schemes):
    def scheme(pool, clients, rng):
        return dataclasses.replace(
            SCHEMES["iid"](pool, clients, rng), transform=["mirror"] * clients
        )

    register_partition("mirrored", scheme)
    with pytest.raises(ValueError, match="leave transform out"):
        partition("mirrored", DIGITS, 2, 0, transform=["none"])


def test_errors_come_when_an_experiment_is_made():
    for args, said in (
        ({"transform": ["turn"]}, "did you mean 'turn"),
        ({"relabel": 3}, "relabel=3: allowed is a list"),
    ):
        with pytest.raises(ValueError, match=said):
            E.but(partition_args=args)


def test_a_pool_without_samples_is_no_matter():
    pool = SimpleNamespace(y=np.arange(40) % 4, is_test=np.arange(40) < 8, classes=4, extra={})
    split = partition("iid", pool, 2, 0, relabel=[0, 1])
    assert shifts.applied(np.zeros((40, 3)), pool.y, 4, split)[2] == 4


@pytest.mark.parametrize("kind", [int, np.int64, np.uint8])
def test_new_labels_are_whole_numbers_of_any_library(kind):
    x, y = np.zeros((80, 4), np.float32), np.arange(80) % 4
    how = dict(clients=4, partition="iid")
    for relabel in ([0, 3], [[1, 0, 2, 3], 2]):
        of = [list(map(kind, e)) if isinstance(e, list) else kind(e) for e in relabel]
        one, other = (Federation.dealt(x, y, relabel=r, **how) for r in (relabel, of))
        assert one.checksum == other.checksum and np.array_equal(one.counts(), other.counts())
