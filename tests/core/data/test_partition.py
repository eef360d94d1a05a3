"""The splits: disjoint, repeatable, with the exact counts of the papers, and refusing what the data cannot give."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_core import Experiment, Federation, run
from pfl_core.analysis.stats import total_variation
from pfl_core.data.partition import (
    Split,
    label_counts,
    list_partitions,
    partition,
    register_partition,
)
from pfl_core.experiments import build

SCHEMES = import_module("pfl_core.data.partition")._SCHEMES
PARTS = ("train", "val", "test")
OFFICIAL = {"iid", "pfedhn_classes", "coarse", "dirichlet_columns", "fedper_classes"}


def make_pool(sizes, test=1 / 6, **extra):
    """Labels in order of class, an official test part of round(test * size) samples of each, spread over the class."""
    y = np.repeat(np.arange(len(sizes)), sizes)
    within = np.concatenate([np.arange(size) for size in sizes])
    is_test = within * 7919 % np.repeat(sizes, sizes) < np.repeat(
        np.round(np.multiply(sizes, test)), sizes
    )
    return SimpleNamespace(y=y, is_test=is_test, classes=len(sizes), extra=extra)


def full(name):
    """Pools of the papers' sizes."""
    if name == "cifar10":
        return make_pool([6000] * 10)
    return make_pool([600] * 100, coarse=np.repeat(np.arange(20), 3000))


def small():
    """The size of the digits, 1,797 samples, with every column that a scheme may ask for."""
    sizes = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    y = np.repeat(np.arange(10), sizes)
    return make_pool(sizes, coarse=y // 2, alphabet=y, worker=np.arange(len(y)) % 15)


def digits100():
    return make_pool([60] * 100, coarse=np.repeat(np.arange(10), 600))


CIFAR10, CIFAR100, DIGITS, DIGITS100 = full("cifar10"), full("cifar100"), small(), digits100()


def counts(pool, split, part):
    return label_counts(pool.y, getattr(split, part), pool.classes)


def total(pool, split):
    return sum(counts(pool, split, part) for part in PARTS)


def everything(split):
    return np.concatenate([idx for part in PARTS for idx in getattr(split, part)])


def same(a, b):
    return all(
        np.array_equal(x, y)
        for p in PARTS
        for x, y in zip(getattr(a, p), getattr(b, p), strict=True)
    )


def sizes(split, part):
    return {len(idx) for idx in getattr(split, part)}


def clients_for(name):
    return 8 if name.startswith("pfedla_") else 10


# ---------------------------------------------------------------- every scheme


def test_every_scheme_is_listed_with_a_line():
    lines = list_partitions()
    agreed = "iid fedper_classes workers pfedla_noniid1 pfedla_noniid2 pfedla_target pfedla_ring shards dirichlet groups "
    assert set(lines) == {
        *agreed.split(),
        "pfedhn_classes",
        "alphabets",
        "coarse",
        "dirichlet_columns",
        "class_equal",
        "dirichlet_clients",
        "domains",
    }
    assert all(20 < len(line) < 125 for line in lines.values())


@pytest.mark.parametrize("name", sorted(SCHEMES))
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**40))
def test_ten_clients_of_the_digits(name, seed):
    split = partition(name, DIGITS, 10, seed)
    drawn = everything(split)
    assert len(np.unique(drawn)) == len(drawn) and drawn.min() >= 0 and drawn.max() < len(DIGITS.y)
    assert all(len(getattr(split, part)) == 10 for part in PARTS)
    assert all(
        idx.dtype == np.int64 and len(idx)
        for part in ("train", "test")
        for idx in getattr(split, part)
    )
    assert sizes(split, "val") == {0} or 0 not in sizes(split, "val")
    if name in OFFICIAL:
        assert DIGITS.is_test[np.concatenate(split.test)].all()
        assert not DIGITS.is_test[np.concatenate(split.train + split.val)].any()


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_same_seed_same_split_whatever_the_global_state(name):
    clients = clients_for(name)
    np.random.seed(1)
    first = partition(name, DIGITS, clients, 3)
    np.random.seed(2)
    before = np.random.get_state()[1].copy()
    assert same(first, partition(name, DIGITS, clients, 3))
    assert np.array_equal(before, np.random.get_state()[1])
    assert not same(first, partition(name, DIGITS, clients, 4))


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_the_pool_is_not_changed_and_may_be_read_only(name):
    pool = small()
    for array in (pool.y, pool.is_test, *pool.extra.values()):
        array.flags.writeable = False
    assert same(
        partition(name, pool, clients_for(name), 0), partition(name, DIGITS, clients_for(name), 0)
    )


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_indices_of_a_client_are_in_random_order(name):
    # A method that does not shuffle its batches must not see one class after the other.
    idx = max(partition(name, DIGITS, clients_for(name), 0).train, key=len)
    assert (np.diff(idx) < 0).mean() > 0.25


@pytest.mark.parametrize("name", sorted(set(SCHEMES) - OFFICIAL))
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_merged_pools_are_divided_once_and_no_test_sample_is_ever_trained_on(name, seed):
    # PFLlib-type code merges the official parts; what matters then is that a sample tested anywhere is trained nowhere.
    split = partition(name, DIGITS, clients_for(name), seed)
    assert not set(np.concatenate(split.test)) & set(np.concatenate(split.train + split.val))
    assert (
        DIGITS.is_test[np.concatenate(split.train)].any()
        and not DIGITS.is_test[np.concatenate(split.test)].all()
    )


# ---------------------------------------------------------------- IID and FedPer


def test_iid_shares_are_equal_and_keep_the_official_test():
    split = partition("iid", CIFAR10, 10, 0)
    assert (sizes(split, "train"), sizes(split, "val"), sizes(split, "test")) == (
        {5000},
        {0},
        {1000},
    )
    table = counts(CIFAR10, split, "train")
    assert total_variation(table, table).max() < 0.1
    split = partition("iid", CIFAR10, 10, 0, split="70/10/20")
    assert (sizes(split, "train"), sizes(split, "val"), sizes(split, "test")) == (
        {4200},
        {600},
        {1200},
    )


@pytest.mark.parametrize(
    ("pool", "k"), [(CIFAR10, k) for k in (4, 8, 10)] + [(CIFAR100, k) for k in (40, 80, 100)]
)
def test_fedper_classes_as_in_the_paper(pool, k):
    split = partition("fedper_classes", pool, 10, 5, k=k)
    assert (sizes(split, "train"), sizes(split, "test"), sizes(split, "val")) == (
        {5000},
        {1000},
        {0},
    )
    for part, size in (("train", 50_000), ("test", 10_000)):
        table = counts(pool, split, part)
        assert (
            np.ptp(table[table > 0]) <= (k == 80) and table[table > 0].min() == size // 10 // k
        )  # 62.5 at k = 80
        assert ((table > 0).sum(1) == k).all() and (
            (table > 0).sum(0) == k * 10 // pool.classes
        ).all()
    assert len(everything(split)) == 60_000


def test_fedper_classes_with_validation():
    split = partition("fedper_classes", CIFAR10, 10, 5, k=4, val=0.1)
    assert [sizes(split, part) for part in PARTS] == [{4500}, {500}, {1000}]
    held = [counts(CIFAR10, split, part) > 0 for part in PARTS]
    assert (
        (held[0].sum(1) == 4).all()
        and np.array_equal(held[0], held[1])
        and np.array_equal(held[0], held[2])
    )
    with pytest.raises(ValueError, match="val=1"):
        partition("fedper_classes", CIFAR10, 10, 5, k=4, val=1)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 14),
    st.integers(1, 12),
    st.integers(1, 14),
    st.integers(0, 99),
    st.lists(st.integers(90, 120), min_size=14),
)
def test_fedper_classes_for_any_numbers(classes, clients, k, seed, per_class):
    pool, k = make_pool(per_class[:classes]), min(k, classes)
    if k * clients % classes:
        with pytest.raises(ValueError, match="multiple of"):
            partition("fedper_classes", pool, clients, seed, k=k)
        return
    split = partition("fedper_classes", pool, clients, seed, k=k)
    held = counts(pool, split, "train") > 0
    assert (held.sum(0) == k * clients // classes).all() and (held.sum(1) == k).all()
    assert np.array_equal(held, counts(pool, split, "test") > 0)
    assert len(sizes(split, "train")) == len(sizes(split, "test")) == 1


def test_workers_are_users_with_80_20():
    worker = np.repeat(np.arange(100, 140), 160)
    pool = SimpleNamespace(
        y=np.arange(6400) % 5, is_test=np.zeros(6400, bool), classes=5, extra={"worker": worker}
    )
    split = partition("workers", pool, 30, 0)
    users = [
        {*worker[train], *worker[test]} for train, test in zip(split.train, split.test, strict=True)
    ]
    assert all(len(user) == 1 for user in users) and len(set.union(*users)) == 30
    assert (sizes(split, "train"), sizes(split, "test")) == ({128}, {32})
    pool.y = np.where(
        worker < 120, pool.y, pool.y % 4
    )  # half of the users never give the highest score
    assert {
        worker[idx[0]] for idx in partition("workers", pool, 20, 0, least_per_class=4).train
    } == set(range(100, 120))
    with pytest.raises(ValueError, match="largest legal value is clients=20"):
        partition("workers", pool, 30, 0, least_per_class=4)


# ---------------------------------------------------------------- pFedLA


@pytest.mark.parametrize("clients", [10, 100])
@pytest.mark.parametrize(
    ("pool", "k", "q", "train"), [(CIFAR10, 4, 150, 105), (CIFAR100, 12, 50, 35)]
)
def test_noniid1_exact_counts(pool, k, q, train, clients):
    split = partition("pfedla_noniid1", pool, clients, 0)
    assert sizes(split, "train") == {k * train} and sizes(split, "test") == {600 - k * train}
    for part, size in (("train", train), ("test", q - train)):
        table = counts(pool, split, part)
        assert set(np.unique(table)) == {0, size} and ((table > 0).sum(1) == k).all()
    owners = (table > 0).sum(0)
    assert set(owners) <= {clients * k // pool.classes, -(-clients * k // pool.classes)}
    if clients == 100:  # every class is used up
        assert len(everything(split)) == 60_000


def test_noniid1_scales_to_a_pool_with_a_short_class():
    # 58,865 images, class 8 short of a thousand: the class that cannot serve 40 clients serves fewer.
    pool = make_pool([6000, 5999, 6000, 5999, 5993, 5994, 5992, 5981, 4907, 6000])
    table = total(pool, partition("pfedla_noniid1", pool, 100, 0))
    assert set(np.unique(table)) == {0, 146} and ((table > 0).sum(1) == 4).all()
    owners = (table > 0).sum(0)
    assert owners[8] == 33 and owners[7] == 40 and owners.sum() == 400 and owners.max() == 41
    assert set(np.unique(total(pool, partition("pfedla_noniid1", pool, 100, 0, images=580)))) == {
        0,
        145,
    }


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(2, 12), st.integers(1, 12), st.integers(0, 10**6))
def test_noniid1_for_any_numbers(clients, classes, k, seed):
    pool, k = make_pool([80 + 3 * c for c in range(classes)]), min(k, classes)
    split = partition("pfedla_noniid1", pool, clients, seed, k=k)
    table = total(pool, split)
    assert len(np.unique(table[table > 0])) == 1 and ((table > 0).sum(1) == k).all()
    assert np.array_equal(counts(pool, split, "test") > 0, table > 0)
    assert (
        len(np.unique(counts(pool, split, "train")[table > 0])) == 1
    )  # train and test labels in one proportion


@pytest.mark.parametrize("clients", [10, 100])
@pytest.mark.parametrize(
    ("pool", "k", "major", "minor"),
    [(CIFAR10, 2, (101, 43), (27, 12)), (CIFAR100, 6, (37, 16), (2, 1))],
)
def test_noniid2_exact_counts(pool, k, major, minor, clients):
    split = partition("pfedla_noniid2", pool, clients, 0)
    for part, large, little in zip(("train", "test"), major, minor, strict=True):
        table = counts(pool, split, part)
        assert set(np.unique(table)) == {large, little} and ((table == large).sum(1) == k).all()
    assert (total(pool, split).sum(1) == 600).all()
    if clients == 100:
        assert len(everything(split)) == 60_000


def test_noniid2_keeps_its_ratio_in_a_small_pool():
    table = total(DIGITS, partition("pfedla_noniid2", DIGITS, 10, 0))
    major, minor = table.max(), table.min()
    assert set(np.unique(table)) == {major, minor} and ((table == major).sum(1) == 2).all()
    assert abs(major / minor - 144 / 39) < 0.3


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_similarity_set_ups(seed):
    held = total(CIFAR10, partition("pfedla_target", CIFAR10, 8, seed)) > 0
    overlap = (held[:, None] & held[None]).sum(2)
    assert (
        (np.diag(overlap) == 4).all()
        and overlap[0, 1:3].tolist() == [4, 3]
        and (overlap[0, 3:] <= 2).all()
    )

    i = np.arange(8)
    expected = np.maximum(0, 4 - np.abs(i[:, None] - i))
    expected[0, 7] = expected[7, 0] = 1  # the ring closes
    table = total(CIFAR10, partition("pfedla_ring", CIFAR10, 8, seed))
    assert np.array_equal(((table > 0)[:, None] & (table > 0)[None]).sum(2), expected)
    assert set(np.unique(table)) == {0, 150}

    held = total(CIFAR100, partition("pfedla_ring", CIFAR100, 8, seed)) > 0
    assert np.array_equal(
        (held[:, None] & held[None]).sum(2), np.maximum(0, 12 - 3 * np.abs(i[:, None] - i))
    )
    held = total(CIFAR100, partition("pfedla_target", CIFAR100, 8, seed)) > 0
    assert (held[0] & held[1:3]).sum(1).tolist() == [12, 9]


# ---------------------------------------------------------------- FedAGHN


@pytest.mark.parametrize(
    ("pool", "k", "shard"),
    [(CIFAR10, 5, 600), (CIFAR100, 20, 150), (make_pool([550] * 200, 1 / 11), 40, 137)],
)
@pytest.mark.parametrize("distinct", [False, True])
def test_shards_exact_counts(pool, k, shard, distinct):
    table = total(pool, partition("shards", pool, 20, 1, distinct=distinct))
    assert (table % shard == 0).all() and (table.sum(1) == k * shard).all()
    assert (table.sum(0) == 20 * k // pool.classes * shard).all()
    assert ((table > 0).sum(1) <= k).all() and (table.max() == shard) == distinct


def test_cifar10_pathological_is_3000_a_client_in_shards_of_600():
    split = partition("shards", CIFAR10, 20, 0)
    assert [sizes(split, part) for part in PARTS] == [{2100}, {300}, {600}]
    assert set(np.unique(total(CIFAR10, split) % 600)) == {0}


def test_shards_that_do_not_divide_leave_spare_ones():
    pool = make_pool([120] * 10)  # 7 clients x 3 = 21 shards, 3 a class of 40 images, 9 spare
    table = total(pool, partition("shards", pool, 7, 0, k=3, distinct=True))
    assert set(np.unique(table)) == {0, 40} and ((table > 0).sum(1) == 3).all()


def test_case_study_counts():
    split = partition("groups", CIFAR10, 20, 0)
    table = total(CIFAR10, split)
    assert Counter(table[0].tolist()) == {1260: 2, 60: 8} and (table.sum(1) == 3000).all()
    assert [sizes(split, part) for part in PARTS] == [{2100}, {300}, {600}]
    owner = np.repeat(np.arange(5), 4)
    distance = total_variation(table, table)
    assert distance[owner[:, None] == owner].max() == 0
    assert np.allclose(distance[owner[:, None] != owner], 0.8)
    assert (
        ((table > 60).reshape(5, 4, 10).all(1)).sum(0) == 1
    ).all()  # every class is dominant in one group


def test_case_study_with_a_rest_below_one_sample_a_client():
    table = total(
        DIGITS100, partition("groups", DIGITS100, 20, 0)
    )  # 12 of 60 are IID, for 20 clients
    assert (table.sum(1) == 20 * 12 + 60).all()
    table = total(DIGITS, partition("groups", DIGITS, 10, 0, share=1.0))
    assert ((table > 0).sum(1) == 2).all() and (table.sum(0) == np.bincount(DIGITS.y)).all()


# ---------------------------------------------------------------- Dirichlet


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.1, 0.2, 0.5, 5.0]))
def test_dirichlet_least_cap_and_ratio(seed, alpha):
    split = partition("dirichlet", CIFAR10, 20, seed, alpha=alpha)
    table = total(CIFAR10, split)
    assert table.sum() == 60_000 and (table.sum(0) == 6000).all()
    assert table.sum(1).min() >= 40
    before = np.cumsum(table, axis=1) - table
    assert (
        table[before >= 3000] == 0
    ).all()  # a client with its n / N gets nothing of later classes
    for train, test in zip(split.train, split.test, strict=True):
        assert len(train) == (len(train) + len(test)) * 3 // 4


def test_dirichlet_of_fedaghn_and_of_the_training_part():
    split = partition("dirichlet", CIFAR100, 20, 0, least=1, split="70/10/20")
    for parts in zip(split.train, split.val, split.test, strict=True):
        n = sum(map(len, parts))
        assert len(parts[2]) == -(-n // 5) and len(parts[1]) == -(-(n - len(parts[2])) // 8)
    drawn = everything(partition("dirichlet", CIFAR10, 20, 0, source="train"))
    assert len(drawn) == 50_000 and not CIFAR10.is_test[drawn].any()


# How PFLlib dealt CIFAR-10, {class: images} a client, as its author has it in a repository of his:
# github.com/TsingZ0/FedKTL, dataset/Cifar10/config.json at 130081035e.
PFLLIB = [
    {1: 9, 3: 668, 4: 476, 5: 287, 6: 5, 7: 167, 9: 9},
    {0: 7, 1: 1, 2: 62, 4: 43, 7: 177, 8: 1524},
    {2: 16, 3: 158, 4: 1034, 5: 3},
    {1: 402, 2: 12, 3: 7, 6: 1, 8: 1, 9: 1657},
    {0: 24, 2: 5104},
    {0: 2832, 3: 1432},
    {0: 36, 2: 578, 3: 708, 4: 114, 8: 4},
    {1: 210, 2: 2, 3: 30, 4: 962, 5: 1, 7: 2, 9: 1415},
    {1: 18, 3: 137, 4: 11, 7: 2568, 8: 8, 9: 232},
    {0: 2, 3: 2511, 4: 723},
    {0: 454, 2: 2, 7: 53, 8: 655},
    {0: 9, 1: 744, 3: 7, 4: 187, 5: 5, 7: 93, 8: 226, 9: 693},
    {0: 248, 2: 2, 4: 360, 5: 1802, 6: 1, 8: 3581},
    {1: 21, 2: 3, 3: 237, 4: 96, 5: 1161, 7: 9},
    {1: 16, 4: 153, 5: 1, 7: 2930},
    {1: 1394, 2: 157, 3: 28, 4: 18, 6: 735, 9: 1993},
    {0: 2358, 1: 9, 2: 61, 3: 2, 4: 1822},
    {1: 3175},
    {0: 29, 3: 74, 5: 89, 6: 5257},
    {c: 1 for c in range(10)} | {5: 2651},
]


def test_numpy_seed_gives_the_clients_of_released_code():
    table = total(CIFAR10, partition("dirichlet", CIFAR10, 20, 5, numpy_seed=1))
    assert [{c: n for c, n in enumerate(row) if n} for row in table.tolist()] == PFLLIB
    one, other = (partition("dirichlet", CIFAR10, 20, s, numpy_seed=1) for s in (0, 1))
    assert any((a != b).any() for a, b in zip(one.test, other.test, strict=True)), "other images"


def test_a_part_of_a_data_set_is_dealt_in_the_shares_of_the_whole():
    few = make_pool([5800] * 4 + [3000] * 6)
    table = total(few, partition("dirichlet", few, 20, 0, numpy_seed=1, class_size=6000))
    for row, whole in zip(table, PFLLIB, strict=True):
        for c, n in enumerate(row):
            assert abs(n - whole.get(c, 0) * (5800 if c < 4 else 3000) / 6000) < 1
    assert (table.sum(0) == np.bincount(few.y)).all()


@pytest.mark.parametrize("scheme", ["shards", "groups"])
def test_numpy_seed_fixes_who_holds_which_classes(scheme):
    tables = [total(CIFAR10, partition(scheme, CIFAR10, 20, s, numpy_seed=66666)) for s in (0, 1)]
    other = total(CIFAR10, partition(scheme, CIFAR10, 20, 0, numpy_seed=666))
    assert (tables[0] == tables[1]).all() and (tables[0] != other).any()
    few = make_pool([5800] * 10)
    part = total(few, partition(scheme, few, 20, 0, numpy_seed=66666, class_size=6000))
    assert ((part > 100) == (tables[0] > 100)).all()


def test_dirichlet_heterogeneity_falls_with_alpha():
    def spread(alpha):
        table = total(CIFAR10, partition("dirichlet", CIFAR10, 20, 0, alpha=alpha))
        return total_variation(table, table).mean()

    assert spread(0.1) > spread(0.5) + 0.1 > spread(50.0) + 0.2 and spread(50.0) < 0.15


def test_dirichlet_least_never_above_half_the_mean():
    pool = make_pool([40] * 10)  # 400 / 8 / 2 = 25 < 40
    table = total(pool, partition("dirichlet", pool, 8, 0, alpha=1.0, fallback_least=None))
    assert table.sum(1).min() >= 25


def test_dirichlet_falls_back_after_the_cap():
    low = total(DIGITS, partition("dirichlet", DIGITS, 20, 0, alpha=0.05)).sum(1).min()
    assert 10 <= low < 40
    with pytest.raises(
        ValueError,
        match=r"none of 1000 draws gave all of them 40 .*raise alpha, lower clients, least",
    ):
        partition("dirichlet", DIGITS, 20, 0, alpha=0.05, fallback_least=None)
    with pytest.raises(ValueError, match="none of 1000 draws gave all of them 10 "):
        partition("dirichlet", DIGITS, 20, 0, alpha=0.001)


def test_a_hopeless_dirichlet_is_given_up_early(monkeypatch):
    scheme, drawn = import_module("pfl_core.data.schemes"), []
    table = scheme._dirichlet_table
    monkeypatch.setattr(scheme, "_dirichlet_table", lambda *a: drawn.append(0) or table(*a))
    said = (
        "none of 20 draws gave all of them 10 samples, the best left one with 0 and each .* short"
    )
    with pytest.raises(ValueError, match=said):
        partition("dirichlet", CIFAR10, 1000, 0, alpha=0.02)
    assert len(drawn) == 20
    with pytest.raises(
        ValueError, match="none of 1000 draws"
    ):  # few clients are short: a later draw might serve them
        partition("dirichlet", DIGITS, 20, 0, alpha=0.001)


def test_dirichlet_with_all_shares_at_full_clients_is_redrawn():
    class Forced:  # the first draw of the second class goes to client 0 alone, which is full by then
        draws = [np.array([1.0, 0.0]), np.array([1.0, 0.0]), np.array([0.5, 0.5])]

        def dirichlet(self, alpha):
            return self.draws.pop(0)

    table = import_module("pfl_core.data.schemes")._dirichlet_table(
        np.array([50, 50]), 2, 0.1, Forced()
    )
    assert table.tolist() == [[50, 0], [0, 50]]


def test_500_clients_of_cifar100_come_to_an_end():
    assert len(partition("dirichlet", CIFAR100, 500, 0).train) == 500


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.1, 1.0]))
def test_dirichlet_columns(seed, novel_alpha):
    split = partition("dirichlet_columns", CIFAR10, 100, seed, novel_alpha=novel_alpha)
    assert (total(CIFAR10, split).sum(1) >= 20).all()
    for part, n in (
        ("train", 40_000),
        ("val", 10_000),
        ("test", 10_000),
    ):  # columns sum to 1, less the rounding
        assert n - 1000 < counts(CIFAR10, split, part).sum() <= n


def test_novel_clients_come_last_and_leave_the_training_shares_alone():
    tables = [
        total(CIFAR10, partition("dirichlet_columns", CIFAR10, 100, 7, novel_alpha=a))
        for a in (0.1, 1.0)
    ]
    distance = [total_variation(a, tables[0]).diagonal() for a in tables]
    assert distance[0].max() == 0 and distance[1][:90].max() < 0.2 < distance[1][90:].mean()
    nearest = [total_variation(table[90:], table[:90]).min(1).mean() for table in tables]
    assert (
        nearest[1] > nearest[0]
    )  # clients of other label shares are farther from the training clients


# ---------------------------------------------------------------- pFedHN


@pytest.mark.parametrize(
    ("pool", "k", "clients", "used"),
    [
        (CIFAR10, 2, 10, 2 / 3),
        (CIFAR10, 2, 50, 10 / 11),
        (CIFAR10, 2, 100, 20 / 21),
        (CIFAR10, 2, 75, 15 / 16),
    ]
    + [(CIFAR100, 10, 10, 1 / 2), (CIFAR100, 10, 50, 5 / 6), (CIFAR100, 10, 100, 10 / 11)],
)
def test_pfedhn_fractions_and_classes(pool, k, clients, used):
    split = partition("pfedhn_classes", pool, clients, 0)
    train = counts(pool, split, "train")
    assert ((train > 0).sum(1) == k).all()
    assert np.array_equal(train > 0, counts(pool, split, "test") > 0)
    slack = 0.02 + clients * k / 10_000  # draws, and at most one image a share is lost to rounding
    for part, n in (("train", 40_000), ("val", 10_000), ("test", 10_000)):
        assert abs(sum(map(len, getattr(split, part))) / n - used) < slack, part
    every = partition("pfedhn_classes", pool, clients, 0, leftover=False)
    assert sum(map(len, every.train)) > 40_000 - clients * k


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 10), st.integers(0, 10**6), st.booleans())
def test_pfedhn_classes_are_distinct_for_any_k(clients, k, seed, leftover):
    pool = make_pool([200] * 10)
    table = counts(
        pool, partition("pfedhn_classes", pool, clients, seed, k=k, leftover=leftover), "train"
    )
    assert ((table > 0).sum(1) == k).all() and np.ptp((table > 0).sum(0)) <= 1


def test_alphabets_are_clients_and_characters_split_14_3_3():
    characters = [3, 5, 4, 2]
    alphabet = np.repeat(np.repeat(np.arange(4), characters), 20)
    pool = make_pool([20] * 14, alphabet=alphabet)
    split = partition("alphabets", pool, 4, 0)
    for part, each in zip(PARTS, (14, 3, 3), strict=True):
        table = counts(pool, split, part)
        assert set(np.unique(table)) == {0, each} and (table > 0).sum(1).tolist() == characters
    chosen = [alphabet[idx[0]] for idx in partition("alphabets", pool, 3, 0).train]
    assert len(set(chosen)) == 3 and chosen == sorted(chosen)


def test_coarse_clients_hold_one_coarse_class():
    split = partition("coarse", CIFAR100, 100, 0)
    for part, each in zip(PARTS, (80, 20, 20), strict=True):
        table = counts(CIFAR100, split, part)
        assert set(np.unique(table)) == {0, each}
        assert np.array_equal(table > 0, np.arange(100)[:, None] // 5 == np.arange(100) // 5)
    assert len(everything(split)) == 60_000
    assert sizes(partition("coarse", DIGITS100, 10, 0, val=0), "train") == {500}


# ---------------------------------------------------------------- so many samples a client

COUNTED = ("class_equal", "dirichlet_clients", "domains")


@pytest.mark.parametrize("name", COUNTED)
@settings(max_examples=15, deadline=None)
@given(
    st.integers(2, 12), st.integers(1, 3), st.integers(0, 2), st.integers(1, 4), st.integers(0, 999)
)
def test_every_client_has_the_numbers_that_are_asked_for(name, clients, train, val, test, seed):
    numbers = [10 * n for n in (train, val, test)]
    split = partition(name, DIGITS, clients, seed, each="/".join(map(str, numbers)))
    assert [sizes(split, part) for part in PARTS] == [{n} for n in numbers]
    assert len(np.unique(everything(split))) == clients * sum(numbers)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.integers(2, 12), st.integers(1, 12), st.integers(0, 10**6))
def test_class_equal_for_any_numbers(clients, classes, k, seed):
    pool, k = make_pool([400 + 3 * c for c in range(classes)]), min(k, classes)
    each = f"{2 * k}/{k}/{3 * k}"
    split = partition("class_equal", pool, clients, seed, k=k, each=each)
    for part, n in zip(PARTS, (2, 1, 3), strict=True):
        table = counts(pool, split, part)
        assert set(np.unique(table)) <= {0, n} and ((table > 0).sum(1) == k).all()
    assert np.ptp((table > 0).sum(0)) <= 1  # as many owners of each class
    assert np.array_equal(counts(pool, split, "train") > 0, table > 0)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.1, 0.5, 2.0]))
def test_no_class_of_a_client_is_above_the_share_most(seed, alpha):
    how = dict(alpha=alpha, each="40/20/40")
    table = total(CIFAR10, partition("dirichlet_clients", CIFAR10, 20, seed, most=0.5, **how))
    assert table.max() <= 50 and (table.sum(1) == 100).all()
    free = total(CIFAR10, partition("dirichlet_clients", CIFAR10, 20, seed, **how))
    assert alpha > 0.1 or free.max() > 50


def test_dirichlet_clients_are_more_alike_with_a_larger_alpha():
    def spread(alpha):
        table = total(CIFAR10, partition("dirichlet_clients", CIFAR10, 20, 0, alpha=alpha))
        return total_variation(table, table).mean()

    assert spread(0.1) > spread(1.0) + 0.1 > spread(100.0) + 0.2 and spread(1e6) < 0.2


@pytest.mark.parametrize("name", ["dirichlet_clients", "domains"])
def test_spread_draws_log_normal_training_sizes_and_no_others(name):
    split = partition(name, CIFAR10, 200, 0, each="40/20/40", spread=0.5)
    train = np.array([len(i) for i in split.train])
    assert sizes(split, "val") == {20} and sizes(split, "test") == {40}
    assert abs(train.mean() - 40) < 4 and abs(np.log(train).std() - 0.5) < 0.08
    assert train.min() >= 1 and len(np.unique(train)) > 40


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(4, 12))
def test_domains_have_classes_of_their_own_and_labels_in_common(seed, clients):
    groups = [[9, 1, 4], [0, 2, 3], [5, 6, 7]]
    split = partition("domains", DIGITS, clients, seed, groups=groups, each="20/5/10")
    held = total(DIGITS, split) > 0
    for i in range(clients):
        mine = groups[i % 3]
        assert set(np.flatnonzero(held[i])) <= set(mine)
        assert split.relabel[i, mine].tolist() == [0, 1, 2]
        assert (np.delete(split.relabel[i], mine) == -1).all()
    by_number = partition("domains", DIGITS, 5, seed, groups=5, each="20/5/10")
    assert by_number.relabel[1].tolist() == [-1, -1, 0, 1, -1, -1, -1, -1, -1, -1]


# ---------------------------------------------------------------- helpers


def test_label_counts_by_hand():
    table = label_counts(
        np.array([0, 2, 2, 1]), [np.array([0, 1, 2]), np.array([], int), np.array([3])], 4
    )
    assert table.tolist() == [[1, 0, 2, 0], [0, 0, 0, 0], [0, 1, 0, 0]]


# ---------------------------------------------------------------- errors

ERRORS = [
    ("dirichelet", {}, "partition 'dirichelet' is unknown; did you mean 'dirichlet'? known are alphabets, "),
    ("dirichlet", {"alhpa": 1}, "'alhpa' is unknown; did you mean 'alpha'? known are alpha, class_size, fallback_least, "),
    ("iid", {"clients": 0}, "clients=0: allowed is an integer >= 1"),
    ("iid", {"clients": 2.0}, "clients=2.0: allowed is an integer >= 1"),
    ("iid", {"seed": -1}, "seed=-1: allowed is an integer >= 0"),
    ("iid", {"clients": 10**9}, "clients=1000000000 is more than the pool's 1797 samples"),
    ("iid", {"clients": 400}, "the smaller official part has 299 samples; the largest legal value is clients=299"),
    ("iid", {"split": "70/20"}, "split='70/20' must be percent"),
    ("iid", {"split": "a/b"}, "split='a/b' must be percent"),
    ("dirichlet", {"alpha": 0}, "alpha=0: allowed is a number > 0"),
    ("dirichlet", {"alpha": float("nan")}, "alpha=nan): allowed is a finite number"),
    ("dirichlet", {"numpy_seed": -1}, "numpy_seed=-1: allowed is an integer in [0, 4294967295]"),
    ("dirichlet", {"class_size": 6000}, "class_size is of a draw with numpy_seed"),
    ("shards", {"numpy_seed": 1, "distinct": True}, "distinct=True is not what released code draws"),
    ("dirichlet", {"train_ratio": 1}, "train_ratio=1: allowed is a number in (0, 1)"),
    ("dirichlet", {"source": "test"}, "source='test' must be 'all' or 'train'"),
    ("dirichlet", {"clients": 1000}, "the largest legal value is clients=449"),
    ("dirichlet_columns", {"alpha": -1}, "alpha=-1: allowed is a number > 0"),
    ("dirichlet_columns", {"novel_alpha": 0}, "novel_alpha=0: allowed is a number > 0"),
    ("dirichlet_columns", {"novel": 10}, "novel=10: allowed is an integer in [0, 9]"),
    ("dirichlet_columns", {"clients": 90}, "the largest legal value is clients=89"),
    ("fedper_classes", {"k": 11}, "k (classes a client)=11: allowed is an integer in [1, 10]"),
    ("fedper_classes", {"k": 3, "clients": 4}, "k must be a multiple of 5, from 5 to 10"),
    ("fedper_classes", {"clients": 100}, "the largest legal value is clients=70"),
    ("pfedla_noniid1", {"k": 11}, "k (classes a client)=11: allowed is an integer in [1, 10]"),
    ("pfedla_noniid1", {"images": 7}, "images=7: allowed is an integer >= 8"),
    ("pfedla_noniid1", {"clients": 300}, "the largest legal value is clients=224"),
    ("pfedla_noniid2", {"k": 10}, "k (classes a client)=10: allowed is an integer in [1, 9]"),
    ("pfedla_noniid2", {"share": 0.1}, "raise images or share"),
    ("pfedla_noniid2", {"clients": 100}, "the largest legal value is clients=59"),
    ("pfedla_target", {"k": 8}, "k (classes a client)=8: allowed is an integer in [2, 7]"),
    ("pfedla_target", {"clients": 2}, "allowed is an integer >= 3"),
    ("pfedla_target", {"clients": 100}, "the largest legal value is clients=87"),
    ("pfedla_ring", {"clients": 11}, "the largest legal value is clients=10"),
    ("pfedla_ring", {"shift": 7}, "shift=7: allowed is an integer in [1, 6]"),
    ("shards", {"k": 0}, "k (classes a client)=0: allowed is an integer in [1, 10]"),
    ("shards", {"clients": 600}, "the largest legal value is clients=348"),
    ("groups", {"groups": 3}, "groups=3 must divide 10 classes and 10 clients; legal: [1, 2, 5, 10]"),
    ("groups", {"share": 0}, "share=0: allowed is a number in (0, 1]"),
    ("groups", {"clients": 400}, "the largest legal value is clients=345"),
    ("pfedhn_classes", {"low": 0.7}, "high=0.6: allowed is a number >= 0.7"),
    ("pfedhn_classes", {"val": 1}, "val=1: allowed is a number in [0, 1)"),
    ("pfedhn_classes", {"clients": 100}, "the largest legal value is clients=94"),
    ("alphabets", {"clients": 11}, "the largest legal value is clients=10"),
    ("coarse", {"clients": 12}, "clients=12 must be 1..29 times the 5 coarse classes; nearest: [10, 15]"),
    ("workers", {"clients": 16}, "the largest legal value is clients=15"),
    ("class_equal", {"k": 11}, "k (classes a client)=11: allowed is an integer in [1, 10]"),
    ("class_equal", {"k": 3}, "each='40/20/40' must hold multiples of k=3"),
    ("class_equal", {"each": "40/x"}, "each='40/x' must be numbers of train/test"),
    ("class_equal", {"each": "0/1"}, "each='0/1' must be numbers of train/test"),
    ("class_equal", {"each": "-2/4"}, "each='-2/4' must be numbers of train/test"),
    ("class_equal", {"clients": 100}, "the largest legal value is clients=15"),
    ("class_equal", {"clients": 100, "k": 10, "each": "40/20/40"}, "the largest legal value is clients=17"),
    ("dirichlet_clients", {"alpha": 0}, "alpha=0: allowed is a number > 0"),
    ("dirichlet_clients", {"most": 0}, "most=0: allowed is a number in (0, 1]"),
    ("dirichlet_clients", {"most": 0.05}, "none of 1000 draws for client 0 of 10"),
    ("dirichlet_clients", {"spread": -1}, "spread=-1: allowed is a number in [0, 3]"),
    ("dirichlet_clients", {"clients": 100}, "the largest legal value is clients=17"),
    ("dirichlet_clients", {"clients": 17, "seed": 2, "spread": 1.0}, "spread=1.0 draws sizes that add up to"),
    ("domains", {"clients": 16, "seed": 2, "spread": 1.0}, "spread=1.0 draws ["),
    ("domains", {"groups": 3}, "groups=3 must divide 10 classes; legal: [1, 2, 5, 10]"),
    ("domains", {"groups": [[0, 1], [1, 2]]}, "allowed is a number, or lists of equally many classes"),
    ("domains", {"groups": [[0, 1], [2]]}, "allowed is a number, or lists of equally many classes"),
    ("domains", {"groups": [[0, 10]]}, "allowed is a number, or lists of equally many classes"),
    ("domains", {"groups": [[]]}, "allowed is a number, or lists of equally many classes"),
    ("domains", {"groups": "ab"}, "groups='ab': allowed is an integer in [1, 10]"),
    ("domains", {"clients": 1}, "clients=1: allowed is an integer >= 2"),
    ("domains", {"clients": 100}, "the largest legal value is clients=17"),
    ("iid", {"transform": "turn90"}, "transform='turn90': allowed is a list"),
    ("iid", {"transform": []}, "transform=[]: allowed is a list"),
    ("iid", {"transform": ["turn80"]}, "transform 'turn80' is unknown; did you mean 'turn180'?"),
    ("iid", {"transform": ["none"] * 11}, "transform has 11 entries for clients=10"),
    ("iid", {"relabel": [1.5]}, "relabel has 1.5: allowed is an integer s >= 0"),
    ("iid", {"relabel": [[]]}, "relabel has []: allowed is an integer s >= 0"),
    ("iid", {"relabel": [[1, -1]]}, "relabel has [1, -1]: allowed is an integer s >= 0"),
    ("iid", {"relabel": [[1, 0]]}, "relabel has a list of 2 labels for 10 classes"),
    ("domains", {"relabel": [list(range(10))]}, "relabel has a list of 10 labels for 5 classes"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "args", "message"), ERRORS, ids=[f"{e[0]}-{i}" for i, e in enumerate(ERRORS)]
)
def test_errors_say_what_is_legal(name, args, message):
    with pytest.raises(ValueError) as error:
        partition(name, DIGITS, **({"clients": 10, "seed": 0} | args))
    assert message in str(error.value)


LARGEST = [
    e for e in ERRORS if "largest legal value is" in e[2] and not e[0].startswith("dirichlet")
]


@pytest.mark.parametrize(("name", "args", "message"), LARGEST)
def test_the_largest_legal_number_of_clients_is_legal_and_the_largest(name, args, message):
    best, args = int(message.rsplit("=", 1)[1]), {k: v for k, v in args.items() if k != "clients"}
    split = partition(name, DIGITS, best, 0, **args)
    assert len(split.train) == best and len(np.unique(everything(split))) == len(everything(split))
    with pytest.raises(ValueError):
        partition(name, DIGITS, best + 1, 0, **args)


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_an_empty_class_is_named_where_every_class_is_needed(name):
    pool = make_pool(
        [60, 0, 60, 60, 60, 60], alphabet=np.repeat(np.arange(5), 60), worker=np.arange(300) % 12
    )
    pool.extra["coarse"] = pool.y
    if name in ("iid", "dirichlet", "alphabets", "workers"):
        assert len(partition(name, pool, 3, 0).train) == 3
        return
    args = {"groups": {"groups": 3}, "fedper_classes": {"k": 2}}.get(name, {})
    with pytest.raises(ValueError, match=r"classes \[1\] have no samples"):
        partition(name, pool, 3, 0, **args)


@pytest.mark.parametrize("name", sorted(OFFICIAL))
def test_a_pool_without_official_test_part_is_refused(name):
    pool = SimpleNamespace(**vars(DIGITS) | {"is_test": np.zeros(len(DIGITS.y), bool)})
    with pytest.raises(ValueError, match="official test part"):
        partition(name, pool, 10, 0)


@pytest.mark.parametrize(
    ("name", "column"), [("alphabets", "alphabet"), ("coarse", "coarse"), ("workers", "worker")]
)
def test_a_missing_column_is_named(name, column):
    with pytest.raises(ValueError, match=rf"extra\['{column}'\].*this pool has: none"):
        partition(name, CIFAR10, 10, 0)


def test_a_scheme_of_ones_own_is_checked_too(monkeypatch):
    monkeypatch.setattr(import_module("pfl_core.data.partition"), "_SCHEMES", dict(SCHEMES))

    def halves(pool, clients, rng, test=5):
        """Halves."""
        order = np.array_split(rng.permutation(len(pool.y)), clients)
        return Split(
            [i[test:] for i in order],
            [i[:0] for i in order],
            [i[: test + 1 - (test == 5)] for i in order],
        )

    register_partition("halves", halves)
    assert (
        list_partitions()["halves"] == "Halves."
        and len(partition("halves", DIGITS, 2, 0).test[0]) == 5
    )
    with pytest.raises(ValueError, match="handed out more than once"):
        partition("halves", DIGITS, 2, 0, test=6)
    with pytest.raises(ValueError, match=r"clients \[0, 1\] have no train samples"):
        partition("halves", DIGITS, 2, 0, test=10**4)
    register_partition("halves", halves)
    with pytest.raises(
        ValueError, match="'iid' is one of the papers; register yours under another name"
    ):
        register_partition("iid", halves)


def scheme_of(order):
    """A partition that deals what `order(n, rng)` gives, and what it was called with."""
    calls = []

    def mine(pool, clients, rng):
        calls.append(clients)
        parts = np.array_split(order(len(pool.y), rng), clients)
        return Split([i[5:] for i in parts], [i[:0] for i in parts], [i[:5] for i in parts])

    return mine, calls


def shuffled(n, rng):
    return np.array(random.sample(range(n), n))


def in_place(n, rng, kept={}):  # noqa: B006
    """Goes on from where the last call left its array, with equal draws."""
    rng.shuffle(kept.setdefault(n, np.arange(n)))
    return kept[n]


def grows(n, rng, at=[0]):  # noqa: B006
    """Equal lists, but for a number that counts calls."""
    at[0] += 1
    return np.roll(np.arange(n), at[0])


@pytest.mark.parametrize(
    "order, says",
    [
        (lambda n, rng: np.random.permutation(n), r"moved numpy's \(np.random\) global generator"),
        (shuffled, r"moved Python's \(random\) global generator"),
        (lambda n, rng: torch.randperm(n).numpy(), "moved torch's global generator"),
        (lambda n, rng: rng.permutation(n + 0 * np.random.randint(9)), "moved numpy's"),
        (lambda n, rng: np.random.default_rng().permutation(n), "train differs between two calls"),
        (lambda n, rng: np.random.RandomState().permutation(n), "train differs between two calls"),
        (in_place, "train differs between two calls"),
        (grows, "train differs between two calls"),
    ],
)
@pytest.mark.parametrize("way", ["partition", "run", "dealt"])
def test_a_scheme_of_ones_own_draws_from_its_rng_alone(monkeypatch, tmp_path, order, says, way):
    monkeypatch.setattr(import_module("pfl_core.data.partition"), "_SCHEMES", dict(SCHEMES))
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    monkeypatch.setattr(build, "train_config", lambda e: pytest.fail("training is set up"))
    register_partition("mine", scheme_of(order)[0])
    build._split.cache_clear()
    x = np.ones((90, 4), "f4")
    ways = {
        "partition": lambda: partition("mine", DIGITS, 3, 0),
        "run": lambda: run(Experiment(partition="mine", clients=3, model="mlp", rounds=1)),
        "dealt": lambda: Federation.dealt(x, np.arange(90) % 3, "mine", clients=3),
    }
    with pytest.raises(ValueError, match=rf"partition 'mine': .*{says}.*draw from the `rng`"):
        ways[way]()


@pytest.mark.parametrize("changed", ["transform", "relabel"])
def test_what_a_scheme_of_ones_own_changes_is_the_same_each_time(monkeypatch, changed):
    monkeypatch.setattr(import_module("pfl_core.data.partition"), "_SCHEMES", dict(SCHEMES))
    calls = []

    def mine(pool, clients, rng):
        calls.append(1)
        names = ["mirror" if len(calls) == 1 else "none"] * clients
        labels = np.roll(np.tile(np.arange(10), (clients, 1)), len(calls), axis=1)
        made = {"transform": names, "relabel": labels}
        return replace(SCHEMES["iid"](pool, clients, rng), **{changed: made[changed]})

    register_partition("mine", mine)
    with pytest.raises(ValueError, match=f"{changed} differs between two calls"):
        partition("mine", DIGITS, 3, 0)


@pytest.mark.parametrize("seed", [0, 7])
def test_a_scheme_that_draws_from_its_rng_deals_as_it_did(monkeypatch, seed):
    """The check moves nothing: what is dealt is that of one call; ours are called once."""
    monkeypatch.setattr(import_module("pfl_core.data.partition"), "_SCHEMES", dict(SCHEMES))
    mine, calls = scheme_of(lambda n, rng: rng.permutation(n))
    register_partition("mine", mine)
    split = partition("mine", DIGITS, 3, seed)
    rng = np.random.default_rng([seed, *b"partition"])
    assert same(split, mine(DIGITS, 3, rng)) and len(calls) == 3
    register_partition("own_iid", partial(SCHEMES["iid"]))
    assert same(partition("own_iid", DIGITS, 3, seed), partition("iid", DIGITS, 3, seed))
    monkeypatch.setattr(mine, "__module__", "pfl_core.data.schemes")
    partition("mine", DIGITS, 3, seed)
    assert len(calls) == 4
