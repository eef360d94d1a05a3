"""Federation and ClientData: what batch plans promise, how samples become inputs, which mistakes are named, and files."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_core import Experiment, load, run
from pfl_core.data.client_data import ClientData, round_half_up
from pfl_core.data.federation import Federation
from pfl_core.data.partition import partition
from pfl_core.util.draws import rng

few = settings(max_examples=25)


def bound(fed, seed=0, holdout=0.0, dtype=torch.float32):
    """A Federation's data as the engine trains on them."""
    return ClientData(fed, seed=seed, holdout=holdout, dtype=dtype, mean=fed.mean, std=fed.std)


def client_data(sizes=(7, 12, 3), **kw):
    """Clients of these sizes; sample i has label i % 3 and is a single number i; as many test samples follow."""
    n = sum(sizes)
    cuts = np.split(np.random.default_rng(9).permutation(n), np.cumsum(sizes)[:-1])
    test = [n + np.arange(2) + 2 * k for k in range(len(sizes))]
    x = np.arange(n + 2 * len(sizes), dtype=np.float32)[:, None]
    return bound(Federation(x, np.arange(len(x)) % 3, cuts, None, test), **kw)


def plan(n, batch, **kw):
    """A plan of client 0, which holds n samples."""
    data = client_data((n, 5), **{k: kw.pop(k) for k in ("seed", "holdout") if k in kw})
    return data.index["train"][0], data.batch_indices(0, kw.pop("round", 1), batch=batch, **kw)


def is_permutation(a, of):
    return np.array_equal(np.sort(a, axis=None), np.sort(of))


# ---------------------------------------------------------------- plans


@few
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 3), st.integers(1, 3))
def test_wrap_visits_every_sample_each_epoch(n, batch, epochs, seed):
    idx, got = plan(n, batch, epochs=epochs, seed=seed)
    per_epoch = -(-n // batch)
    assert got.shape == (epochs * per_epoch, 1, batch) and got.dtype == np.int64
    orders = got.reshape(epochs, per_epoch * batch)
    for order in orders:
        assert is_permutation(order[:n], idx)
        assert np.array_equal(order, np.resize(order[:n], len(order))), (
            "filled from the start of the same permutation"
        )
    if n >= 8:
        assert len({tuple(order[:n]) for order in orders}) == epochs, (
            "each epoch has an order of its own"
        )


def test_wrap_without_a_rest_is_one_pass():
    idx, got = plan(12, 4, epochs=3)
    for epoch in got.reshape(3, -1):
        assert is_permutation(epoch, idx)


@pytest.mark.parametrize("kind", ["wrap", "drop", "fresh"])
def test_a_client_smaller_than_a_batch_takes_its_samples_in_turn(kind):
    idx, got = plan(3, 8, kind=kind, epochs=2)
    assert got.shape == (2, 1, 8)
    for b in got[:, 0]:
        assert is_permutation(b[:3], idx) and np.array_equal(b, np.resize(b[:3], 8))


@few
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 3))
def test_drop_leaves_the_rest_out(n, batch, epochs):
    idx, got = plan(n, batch, epochs=epochs, kind="drop")
    per_epoch = max(1, n // batch)
    assert got.shape == (epochs * per_epoch, 1, batch)
    if n >= batch:
        assert all(len(set(e)) == per_epoch * batch for e in got.reshape(epochs, -1))
        assert np.array_equal(got[:per_epoch], plan(n, batch)[1][:per_epoch]), (
            "the batches of wrap, but the last"
        )


@few
@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 2))
def test_fresh_draws_anew_each_step(n, batch, batches):
    idx, got = plan(n, batch, kind="fresh", steps=6, batches=batches)
    assert got.shape == (6, batches, batch) and np.isin(got, idx).all()
    for b in got.reshape(-1, batch):
        assert len(set(b)) == min(n, batch), "no sample twice in a draw"
    if n >= 8 and batch >= 4:
        assert len({tuple(b) for b in got.reshape(-1, batch)}) == 6 * batches


def test_fresh_reaches_every_sample_and_steps_of_an_epoch_are_those_of_wrap():
    idx, got = plan(20, 6, kind="fresh", steps=60)
    assert set(got.reshape(-1)) == set(idx)
    assert len(plan(20, 6, kind="fresh", epochs=2)[1]) == len(plan(20, 6, epochs=2)[1]) == 8


@pytest.mark.parametrize("kind", ["wrap", "drop", "fresh"])
@pytest.mark.parametrize("steps", [1, 3, 11])
def test_steps_replace_epochs(kind, steps):
    assert plan(10, 4, kind=kind, steps=steps, epochs=5)[1].shape == (steps, 1, 4)


def test_steps_begin_as_epochs_do():
    assert np.array_equal(plan(10, 4, steps=4)[1], plan(10, 4, epochs=2)[1][:4])


@pytest.mark.parametrize("kind", ["wrap", "drop", "fresh"])
def test_no_epoch_has_no_step(kind):
    assert plan(10, 4, kind=kind, epochs=0)[1].shape == (0, 1, 4)


@pytest.mark.parametrize("batches", [2, 3])
@pytest.mark.parametrize(("kind", "whole"), [("wrap", 6), ("drop", 5)])
def test_several_batches_a_step_are_consecutive(kind, whole, batches):
    idx, got = plan(11, 2, kind=kind, batches=batches)
    single = plan(11, 2, kind=kind)[1]
    assert len(single) == whole and got.shape == (whole // batches, batches, 2)
    assert np.array_equal(got.reshape(-1, 2), single[: whole // batches * batches, 0])


@pytest.mark.parametrize("batches", [2, 3])
def test_a_small_client_still_makes_one_step_of_several_batches(batches):
    idx, got = plan(3, 2, batches=batches)
    assert got.shape == (1, batches, 2)
    assert is_permutation(got.reshape(-1)[:3], idx) and np.array_equal(
        got.ravel(), np.resize(got.ravel()[:3], got.size)
    )


def test_without_shuffling_the_order_is_the_given_one():
    idx, got = plan(10, 4, shuffle=False, epochs=2)
    assert np.array_equal(got[:3, 0].ravel(), [*idx, *idx[:2]]) and np.array_equal(got[3:], got[:3])
    assert np.array_equal(plan(10, 4, shuffle=False, kind="drop")[1].ravel(), idx[:8])
    assert np.array_equal(
        plan(10, 4, shuffle=False, kind="fresh", steps=2)[1][:, 0], [idx[:4], idx[:4]]
    )


@pytest.mark.parametrize(("fraction", "m"), [(0.5, 5), (0.25, 3), (0.24, 2), (0.01, 1), (1.0, 10)])
def test_fraction_takes_a_random_part_of_each_round(fraction, m):
    idx, got = plan(10, 1, fraction=fraction)
    assert len(got) == m and len(set(got.ravel())) == m and np.isin(got, idx).all()
    other = [set(plan(10, 1, fraction=fraction, round=r)[1].ravel()) for r in range(2, 9)]
    assert (m == 10) or any(o != set(got.ravel()) for o in other), "another round, another part"


def test_round_half_up():
    assert [round_half_up(v) for v in (0.4, 0.5, 1.5, 2.5, 2.49)] == [0, 1, 2, 3, 2]


# ---------------------------------------------------------------- streams


def test_equal_streams_give_equal_batches():
    data, again = client_data(), client_data()
    for k in range(3):
        assert np.array_equal(data.batch_indices(k, 4, batch=4), again.batch_indices(k, 4, batch=4))
        assert np.array_equal(
            data.batch_indices(k, 4, batch=4, stream="head"),
            again.batch_indices(k, 4, batch=4, stream="head"),
        )


@pytest.mark.parametrize(
    "other", [dict(stream="head"), dict(round=2), dict(seed=1)], ids=["stream", "round", "seed"]
)
def test_another_stream_round_or_seed_gives_other_batches(other):
    assert not np.array_equal(plan(20, 4)[1], plan(20, 4, **other)[1])


def test_two_clients_of_one_size_have_orders_of_their_own():
    data = client_data((20, 20))
    first, second = (
        np.searchsorted(np.sort(data.index["train"][k]), data.batch_indices(k, 0, batch=20).ravel())
        for k in (0, 1)
    )
    assert not np.array_equal(first, second)


def test_a_client_does_not_depend_on_the_others_or_on_what_was_asked_before():
    data = client_data((7, 12, 3))
    lists = data.index["train"]
    x, y = data.federation.x, data.federation.y
    alone = bound(Federation(x, y, lists[:2]))
    changed = bound(Federation(x, y, [lists[2], lists[1], lists[0], [27]]))
    want = data.batch_indices(1, 5, batch=4, fraction=0.5)
    data.batch_indices(0, 5, batch=2)
    for f in (data, alone, changed):
        assert np.array_equal(f.batch_indices(1, 5, batch=4, fraction=0.5), want)


def test_draws_do_not_touch_numpys_own_generator():
    before = np.random.get_state()[1].copy()
    plan(10, 3)
    assert np.array_equal(before, np.random.get_state()[1])


def test_rng_is_a_function_of_seed_purpose_and_ids():
    draw = [
        rng(*a).integers(2**60)
        for a in ((0, "a"), (0, "a"), (1, "a"), (0, "b"), (0, "a", 1), (0, "a", 1, 2))
    ]
    assert draw[0] == draw[1] and len(set(draw)) == 5


# ---------------------------------------------------------------- held-out samples


@few
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.floats(0.01, 0.99))
def test_holdout_parts_train_and_keeps_both_sides(sizes, share):
    data = client_data(sizes, holdout=share)
    for idx, held, fit in zip(*(data.index[s] for s in ("train", "holdout", "fit")), strict=True):
        assert is_permutation(np.concatenate([held, fit]), idx)
        assert len(fit) >= 1 and (len(held) >= 1) == (len(idx) > 1)
        assert abs(len(held) - share * len(idx)) <= 1
    assert data.n.tolist() == sizes, "weights count all of train"


def test_training_never_sees_the_holdout_which_no_round_changes():
    data = client_data((20, 30), holdout=0.2)
    held = [i.copy() for i in data.index["holdout"]]
    assert [len(h) for h in held] == [4, 6]
    for r in range(5):
        for k in (0, 1):
            seen = data.batch_indices(k, r, batch=4)
            assert (
                is_permutation(np.unique(seen), data.index["fit"][k])
                and not np.isin(seen, held[k]).any()
            )
            assert np.isin(data.batch_indices(k, r, batch=4, split="holdout"), held[k]).all()
            assert np.array_equal(data.index["holdout"][k], held[k])
    assert not np.array_equal(
        client_data((20, 30), holdout=0.2, seed=1).index["holdout"][0], held[0]
    )


def test_without_a_holdout_all_of_train_is_fitted():
    data = client_data()
    assert all(len(h) == 0 for h in data.index["holdout"])
    assert all(
        np.array_equal(a, b) for a, b in zip(data.index["fit"], data.index["train"], strict=True)
    )


# ---------------------------------------------------------------- samples as inputs


def images(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


IMAGES = {
    "HW": ((6, 4, 5), (1, 4, 5), lambda x: x[:, None]),
    "HWC": ((6, 4, 5, 3), (3, 4, 5), lambda x: x.transpose(0, 3, 1, 2)),
    "HW1": ((6, 4, 5, 1), (1, 4, 5), lambda x: x.transpose(0, 3, 1, 2)),
    "CHW": ((6, 3, 4, 5), (3, 4, 5), lambda x: x),
    "flat": ((6, 7), (7,), lambda x: x),
}


@pytest.mark.parametrize("form", IMAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images_are_scaled_and_normalised_per_channel(form, dtype):
    shape, want, chw = IMAGES[form]
    x, c = images(shape), want[0] if len(want) == 3 else 1
    mean, std = [0.1, 0.4, 0.7][:c], [0.2, 0.3, 0.6][:c]
    for m, s in (
        (mean, std),
        (tuple(mean), tuple(std)),
        (np.array(mean), np.array(std)),
        (None, None),
        (None, std),
    ):
        data = bound(Federation(x, np.arange(6) % 2, [[0, 1], [2]], mean=m, std=s), dtype=dtype)
        assert data.input_shape == want and data.x.dtype == torch.uint8
        idx = torch.tensor([[3, 0], [0, 5]])
        got, y = data.batch(idx)
        m, s = (
            np.zeros(c) if m is None else np.asarray(m),
            np.ones(c) if s is None else np.asarray(s),
        )
        tail = (-1, *[1] * (len(want) - 1))
        expected = (chw(x)[idx.numpy()] / 255 - m.reshape(tail)) / s.reshape(tail)
        assert got.shape == (2, 2, *want) and got.dtype == dtype
        np.testing.assert_allclose(
            got.numpy(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-12
        )
        assert torch.equal(y, idx % 2)


def test_one_mean_serves_all_channels():
    x, y = images((4, 2, 2, 3)), [0, 1, 0, 1]
    feds = [Federation(x, y, [[0]], mean=m, std=m) for m in ([0.5], [0.5] * 3, 0.5)]
    one, three, number = (bound(fed).batch(torch.arange(4))[0] for fed in feds)
    assert torch.equal(one, three) and three.min() >= -1 and three.max() <= 1
    assert torch.equal(one, number)


def test_tokens_stay_integers():
    x = np.arange(12, dtype=np.int32).reshape(4, 3)
    data = bound(Federation(x, [0, 1, 0, 1], [[0], [1]]))
    got, _ = data.batch(torch.tensor([2, 0]))
    assert (
        data.input_shape == (3,)
        and got.dtype == torch.int32
        and np.array_equal(got.numpy(), x[[2, 0]])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats_are_taken_as_they_are(dtype):
    x = np.random.default_rng(0).standard_normal((5, 1, 2, 2))
    fed = Federation(
        torch.from_numpy(x), torch.tensor([0, 1, 1, 0, 1]), [[0, 1]], mean=[9.0], std=[9.0]
    )
    data = bound(fed, dtype=dtype)
    assert torch.equal(data.batch(torch.arange(5))[0], torch.from_numpy(x).to(dtype))


def test_floats_that_look_like_pixels_are_taken_with_a_warning():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 1, 4, 4))
    with pytest.warns(UserWarning, match=r"whole numbers up to 2\d\d, .* or x / 255"):
        Federation(pixels.astype(np.float32), np.arange(6) % 2, [np.arange(6)])
    for fine in (pixels / 255, pixels % 2 * 1.0, pixels - 128.0, pixels.reshape(6, 16) % 60 * 1.0):
        Federation(fine, np.arange(6) % 2, [np.arange(6)])


def test_a_batch_leaves_the_samples_alone():
    data = bound(Federation(images((3, 2, 2)), [0, 1, 0], [[0]], mean=[0.5], std=[0.5]))
    before = data.x.clone()
    data.batch(torch.tensor([0, 1]))[0].zero_()
    assert torch.equal(data.x, before)


def test_arrays_that_cannot_be_written_are_read():
    x = images((3, 2, 2))
    x.flags.writeable = False
    assert bound(Federation(x, [0, 1, 0], [[0]])).batch(torch.tensor([1]))[0].shape == (1, 1, 2, 2)


FORMS = {
    "upside down": lambda x: x[:, ::-1, ::-1],
    "backwards": lambda x: x[::-1],
    "of other bytes": lambda x: (x / 256).astype(">f4"),
    "halves": lambda x: (x / 256).astype(np.float16),
    "a tensor with a gradient": lambda x: torch.tensor(x / 256).requires_grad_(),
}


@pytest.mark.parametrize("form", FORMS)
def test_arrays_of_other_forms_are_read(form):
    x = FORMS[form](images((3, 4, 2)))
    data = bound(Federation(x, [[0], [1], [0]], [[0]]))
    want = np.asarray(x.detach() if isinstance(x, torch.Tensor) else x).astype(np.float64)
    want = want[:, None] / 255 if data.kind == "image" else want
    np.testing.assert_allclose(data.batch(torch.arange(3))[0].numpy(), want, rtol=1e-6)
    assert data.y.tolist() == [0, 1, 0], "labels (n, 1) are as good as (n,)"


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int8, np.int64])
def test_tokens_of_any_integers(dtype):
    x = np.array([[5, 1], [2, 7], [3, 3]], dtype)
    data = bound(Federation(x, [0, 1, 0], [[0]]))
    assert data.batch(torch.arange(3))[0].tolist() == x.tolist() and data.extremes().tolist() == [
        [5, 1],
        [2, 7],
    ]


def test_many_classes_are_allowed_where_they_are_meant():
    x, far = np.zeros((3, 2)), [0, 1, 5000]
    assert Federation(x, far, [[0]], classes=5001).classes == 5001
    assert Federation(x, [0, 1, 999], [[0]]).classes == 1000
    assert Federation(np.zeros((2000, 1)), np.arange(2000), [[0]]).classes == 2000


def test_counts():
    y = np.array([0, 0, 1, 2, 2, 2, 1])
    fed = Federation(np.zeros((7, 2)), y, [[0, 1, 2], [3, 4]], None, [[5], [6]], classes=4)
    data = bound(fed)
    assert fed.counts().tolist() == [[2, 1, 0, 0], [0, 0, 2, 0]] == data.label_counts.tolist()
    assert (
        fed.counts("test").tolist() == [[0, 0, 1, 0], [0, 1, 0, 0]] and not fed.counts("val").any()
    )
    assert (data.K, data.classes, data.n.tolist()) == (2, 4, [3, 2])
    assert [i.tolist() for i in fed.at_most(2).index["train"]] == [[0, 1], [3, 4]] and fed.at_most(
        0
    ) is fed
    assert fed.at_most(2).hash != fed.hash == fed.at_most(3).hash
    assert Federation(np.zeros((7, 2)), y, [[0]]).classes == 3


# ---------------------------------------------------------------- mistakes


X, Y = np.zeros((6, 4, 4), np.uint8), np.array([0, 1, 2, 0, 1, 2])
MASK = np.array([True, False, True, False, False, False])
MISTAKES = {
    "too high": (dict(train=[[0], [1, 6]]), "train indices of client 1 reach 1..6; allowed: 0..5"),
    "negative": (dict(train=[[-1], [1]]), "train indices of client 0 reach -1..-1; allowed: 0..5"),
    "test too high": (dict(test=[[], [9]]), "test indices of client 1 reach 9..9"),
    "mask": (dict(train=[MASK, [1]]), "train of client 0 holds bool values; give integer indices"),
    "shares": (
        dict(test=[[], [0.5]]),
        "test of client 1 holds float64 values; give integer indices",
    ),
    "empty client": (
        dict(train=[[0], [], [1], []]),
        "clients without training samples: [1, 3]; give each at least one",
    ),
    "no client": (dict(train=[]), "clients without training samples: all"),
    "test in train": (
        dict(test=[[4], [5, 0, 2]]),
        "2 of 3 test samples of client 1 are trained on (sample 0 by client 0); test must be disjoint",
    ),
    "val in train": (
        dict(val=[[4, 3], [5]]),
        "1 of 2 val samples of client 0 are trained on (sample 3 by client 1); val must be disjoint from train of all",
    ),
    "lists": (
        dict(test=[[4]]),
        "test has index lists for 1 clients and train for 2; give one list a client",
    ),
    "val lists": (dict(val=[[4]] * 3), "val has index lists for 3 clients and train for 2"),
    "labels": (dict(y=Y[:5]), "x has 6 samples and y has 5; they must be equally long"),
    "classes": (dict(classes=2), "labels reach 0..2; allowed: 0..1"),
    "labels from 1": (
        dict(y=Y + 1, classes=3),
        "labels reach 1..3; allowed: 0..2; of labels that start at 1 take y - 1",
    ),
    "negative labels": (dict(y=Y - 1), "labels reach -1..1; allowed: 0..1"),
    "channels": (
        dict(mean=[0.1, 0.2, 0.3]),
        "mean or std has 3 numbers; give one, or one for each of 1 channels",
    ),
    "std": (dict(std=[]), "mean or std has 0 numbers"),
    "std of 0": (dict(std=[0.0]), "std is [0.0]; allowed are finite numbers > 0"),
    "mean of NaN": (
        dict(mean=np.nan),
        "mean is [nan]; allowed are finite numbers, from -1e+37 to 1e37, a number a channel",
    ),
    "a dict": (
        dict(train={0: [0], 1: [1]}),
        "train is a dict; give a list of one index array a client",
    ),
    "no lists": (
        dict(train=[0, 1]),
        "train of client 0 is 0; give one index array a client, such as [[0, 1], [2, 3]]",
    ),
    "one-hot labels": (
        dict(y=np.eye(6)),
        "labels y have shape (6, 6); allowed is one integer a sample, (n,) or (n, 1)",
    ),
    "one label for all": (dict(y=np.array(3)), "labels y have shape ()"),
    "labels of NaN": (
        dict(y=np.full(6, np.nan)),
        "labels y are float64; allowed are integers 0 to classes - 1",
    ),
    "names for labels and another number of classes": (
        dict(y=np.array(list("abcdef")), classes=9),
        "classes=9 and 6 names of classes (a, b, c, d, e and 1 more); leave classes out",
    ),
    "a stray label": (
        dict(y=np.where(Y, 10**9, 0)),
        "labels reach 1000000000; without classes= labels up to 999 are allowed for 6 samples: number them from 0",
    ),
    "int16 images": (
        dict(x=X.astype(np.int16)),
        "x is int16 (6, 4, 4); allowed are uint8 images (n, h, w)",
    ),
    "images of bits": (dict(x=X > 0), "x is bool (6, 4, 4); allowed are uint8 images"),
    "one number a sample": (dict(x=np.zeros(6)), "x is float64 (6,); allowed are uint8 images"),
    "texts": (dict(x=np.array([["a word"]] * 6)), "x is <U6 (6, 1); allowed are"),
    "an alpha channel": (
        dict(x=np.zeros((6, 5, 5, 4), np.uint8)),
        "x is uint8 (6, 5, 5, 4); images have 1 or 3 channels, first or last: leave an alpha channel out with x[..., :3]",
    ),
    "NaN": (
        dict(x=np.where(np.arange(6)[:, None] > 3, np.nan, np.ones((6, 2)))),
        "x is not finite as torch.float64 in 2 of 6 samples, the first is sample 4; NaN and infinite values spoil",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_named_at_construction(case):
    changes, said = MISTAKES[case]
    given = dict(x=X, y=Y, train=[[0, 1], [2, 3]]) | changes
    with pytest.raises(ValueError) as error:
        Federation(given.pop("x"), given.pop("y"), given.pop("train"), **given)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "setting", [dict(seed=0), dict(holdout=0.2), dict(dtype=torch.float32), dict(device="cpu")]
)
def test_settings_are_an_experiments(setting):
    (name,) = setting
    with pytest.raises(
        TypeError,
        match=rf"Federation\({name}=.*data and clients only; say it in (Experiment|run)\({name}=",
    ):
        Federation(X, Y, [[0, 1], [2, 3]], **setting)
    with pytest.raises(
        TypeError,
        match=r"Federation\(labels=3\): unknown; a Federation takes x, y, train, val, test",
    ):
        Federation(X, Y, [[0, 1], [2, 3]], labels=3)


def test_samples_too_large_for_the_number_format_are_refused():
    fed = Federation(np.full((6, 2), 1e200), Y, [[0, 1], [2, 3]])
    assert torch.isfinite(bound(fed, dtype=torch.float64).x).all()
    with pytest.raises(ValueError, match="x is not finite as torch.float32 in 6 of 6 samples"):
        bound(fed)


def test_good_lists_of_every_kind_pass():
    for train in (
        [[0, 1], [2]],
        [np.array([0, 1], np.int32), np.array([2], np.uint8)],
        np.array([[0, 1], [2, 3]]),
    ):
        fed = Federation(X, Y, train, np.array([[4], [4]]), np.array([[5], [5]]))
        assert fed.index["train"][0].tolist() == [0, 1] and fed.index["val"][1].tolist() == [4]
        assert all(i.dtype == np.int64 for lists in fed.index.values() for i in lists)
    tensors = Federation(X, Y, [torch.tensor([0, 1]), torch.tensor([2])])
    assert tensors.index["train"][0].tolist() == [0, 1]
    for nothing in (None, [], [[], []]):
        assert [len(i) for i in Federation(X, Y, [[0], [1]], nothing, nothing).index["test"]] == [
            0,
            0,
        ]


def test_batches_of_an_empty_split_are_refused():
    with pytest.raises(ValueError, match="client 1 has no val samples to make batches of"):
        client_data().batch_indices(1, 0, batch=4, split="val")
    with pytest.raises(ValueError, match="client 0 has no holdout samples"):
        client_data((1, 4), holdout=0.5).batch_indices(0, 0, batch=4, split="holdout")


# ---------------------------------------------------------------- files


def own(**changes):
    given = dict(
        x=images((12, 4, 4)),
        y=np.arange(12) % 3,
        train=[[0, 5], [1, 2, 3]],
        val=[[4], []],
        test=[[6], [7, 8]],
    )
    given |= changes
    return Federation(
        given.pop("x"),
        given.pop("y"),
        given.pop("train"),
        given.pop("val"),
        given.pop("test"),
        **given,
    )


@pytest.mark.parametrize("file", ["clients.npz", "c.of.mine.npz"])
def test_save_and_load(tmp_path, file):
    fed = own(name="mine")
    fed.save(tmp_path / file)
    assert [p.name for p in tmp_path.iterdir()] == [file]
    back = Federation.load(tmp_path / file, fed.x, fed.y, mean=[0.5])
    assert (back.name, back.K, back.hash, back.mean) == ("mine", 2, fed.hash, (0.5,))
    for s in ("train", "val", "test"):
        assert all(np.array_equal(a, b) for a, b in zip(fed.index[s], back.index[s], strict=True))
    assert Federation.load(tmp_path / file, fed.x, fed.y, name="other").name == "other"


@pytest.mark.parametrize("which", ["x", "y", "dtype"])
def test_a_partition_is_refused_on_other_data(tmp_path, which):
    fed = own(name="mine")
    fed.save(tmp_path / "clients.npz")
    x, y = fed.x.copy(), fed.y.copy()
    if which == "dtype":
        x = (x / 256).astype(np.float32)
    else:
        {"x": x, "y": y}[which][11] ^= 1
    with pytest.raises(ValueError) as error:
        Federation.load(tmp_path / "clients.npz", x, y)
    assert "clients.npz was made for other data" in str(error.value) and "it names: mine" in str(
        error.value
    )
    assert fed.hash[:12] in str(error.value)


def test_the_hash_sees_every_change_and_nothing_else():
    x, y = own().x, own().y
    other_x, other_y = x.copy(), y.copy()
    other_x[9, 0, 0] ^= 1
    other_y[9] = (other_y[9] + 1) % 3
    changes = [
        *(dict(x=v) for v in (other_x, (x / 256).astype(np.float32), x.reshape(12, 2, 8))),
        dict(y=other_y),
        *(
            dict(train=v)
            for v in (
                [[5, 0], [1, 2, 3]],
                [[0, 5], [1, 2]],
                [[0], [5, 1, 2, 3]],
                [[1, 2, 3], [0, 5]],
            )
        ),
        *(dict(val=v) for v in (None, [[], [4]], [[9], []])),
        *(dict(test=v) for v in (None, [[6, 7], [8]], [[6], [8, 7]])),
        dict(train=[[0, 5], [1, 2, 3], [10]], val=None, test=None),
    ]
    hashes = [own(**c).hash for c in changes]
    assert len({own().hash, *hashes}) == len(changes) + 1
    assert own(mean=[0.5], name="n").hash == own().hash
    assert (
        own(x=np.asfortranarray(x), train=np.array([[0, 5]]).tolist() + [np.array([1, 2, 3])]).hash
        == own().hash
    )


def pfllib(folder, pickled, dtype=np.float64):
    """Two clients' files, in PFLlib's form (a pickled dict named data) or as plain arrays."""
    g, made = np.random.default_rng(0), {}
    for split, sizes in (("train", (4, 3)), ("test", (2, 1))):
        (folder / split).mkdir(parents=True)
        for k, n in enumerate(sizes):
            z = made[split, k] = {
                "x": g.standard_normal((n, 1, 2, 2)).astype(dtype),
                "y": g.integers(0, 5, n),
            }
            np.savez_compressed(folder / split / f"{k}.npz", **({"data": z} if pickled else z))
    (folder / "config.json").write_text(json.dumps({"num_clients": 2}))
    return made


@pytest.mark.parametrize("pickled", [False, True])
def test_pfllib_files(tmp_path, pickled):
    folder = tmp_path / "Cifar10"
    made = pfllib(folder, pickled)
    fed = Federation.from_pfllib(folder, trusted=pickled, classes=5)
    data = bound(fed)
    assert (fed.name, fed.K, fed.classes, data.n.tolist()) == ("Cifar10", 2, 5, [4, 3])
    assert fed.x.dtype == np.float32 and fed.input_shape == (1, 2, 2)
    for (split, k), z in made.items():
        x, y = data.batch(torch.as_tensor(fed.index[split][k]))
        np.testing.assert_array_equal(x.numpy(), z["x"].astype(np.float32))
        np.testing.assert_array_equal(y.numpy(), z["y"])
    assert [len(v) for v in fed.index["val"]] == [0, 0]


def test_pickled_files_are_refused_unless_trusted(tmp_path):
    pfllib(tmp_path, pickled=True)
    with pytest.raises(
        ValueError, match=r"0\.npz holds a pickled dict; pass trusted=True if you made it yourself"
    ):
        Federation.from_pfllib(tmp_path)


def test_a_pickle_that_acts_does_not_act(tmp_path):
    class Acts:
        def __reduce__(self):
            return (tmp_path.joinpath("acted").touch, ())

    pfllib(tmp_path, pickled=False)
    np.savez(tmp_path / "train" / "0.npz", data=np.array(Acts(), dtype=object))
    with pytest.raises(ValueError, match="pickled"):
        Federation.from_pfllib(tmp_path)
    np.savez(tmp_path / "train" / "0.npz", x=np.array([Acts()], dtype=object), y=np.zeros(1))
    with pytest.raises(ValueError, match="pickled objects.*pass trusted=True if you made it"):
        Federation.from_pfllib(tmp_path)
    assert not (tmp_path / "acted").exists()


def test_folders_that_are_not_pfllibs_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds train files \[\]; expected train/0\.npz, 1\.npz"):
        Federation.from_pfllib(tmp_path)
    pfllib(tmp_path, pickled=False)
    (tmp_path / "train" / "1.npz").rename(tmp_path / "train" / "2.npz")
    with pytest.raises(ValueError, match=r"holds train files \[0, 2\]"):
        Federation.from_pfllib(tmp_path)
    np.savez(tmp_path / "train" / "1.npz", features=np.zeros(2))
    with pytest.raises(ValueError, match=r"1\.npz holds features; expected arrays x and y"):
        Federation.from_pfllib(tmp_path, trusted=True)


# ---------------------------------------------------------------- arrays dealt to clients


def test_arrays_are_dealt_as_the_partition_deals_a_pool(tmp_path):
    pool = load("digits")
    fed = Federation.dealt(pool.x, pool.y, "dirichlet", clients=6, seed=3, alpha=0.3)
    split = partition("dirichlet", pool, 6, 3, alpha=0.3)
    for part in ("train", "test"):
        for mine, theirs in zip(fed.index[part], getattr(split, part), strict=True):
            assert np.array_equal(mine, theirs)
    result = run(Experiment(dataset="own", model="mlp", rounds=0), fed=fed, store=tmp_path)
    assert result.meta["clients"] == 6


def test_a_test_part_is_made_for_partitions_that_deal_it_apart():
    pool = load("digits")
    fed = Federation.dealt(pool.x, pool.y, "iid", clients=3, test=0.4)
    assert fed.counts("test").sum() == pytest.approx(0.4 * pool.n, abs=5)
    assert fed.counts("test").sum() + fed.counts().sum() == pool.n


def test_what_cannot_be_dealt_is_said_before():
    pool = load("digits")
    with pytest.raises(ValueError, match="partition 'dirichlt' is unknown; did you mean"):
        Federation.dealt(pool.x, pool.y, "dirichlt", clients=3)
    with pytest.raises(ValueError, match=r"test=1.5\): allowed is a share in \(0, 1\)"):
        Federation.dealt(pool.x, pool.y, clients=3, test=1.5)
    with pytest.raises(ValueError, match="alphabet"):
        Federation.dealt(pool.x, pool.y, "alphabets", clients=3)


def test_federations_and_pools_show_what_matters():
    pool = load("digits")
    assert repr(pool) == "Pool(digits: 1,797 images of 1 x 28 x 28, 299 for test; 10 classes)"
    assert "174 to 183 a class" in pool._repr_html_()
    fed = Federation.dealt(pool.x, pool.y, clients=4, name="<mine>")
    assert repr(fed).startswith("Federation(<mine>: 4 clients, 1,797 images of 1 x 28 x 28, 10")
    page = fed._repr_html_()
    counts = fed.counts()
    assert "&lt;mine&gt;" in page and page.count('<td style="background') == counts.size
    assert f">{counts.max()}</td>" in page and "0.70)" in page
    many = Federation.dealt(pool.x, pool.y, "iid", clients=40)
    assert "background" not in many._repr_html_()  # too many for a table
