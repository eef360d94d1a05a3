"""The algebra on stacked parameters against numpy and plain loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from benchmarks.tape import Counter
from pfl_core import stacked
from pfl_core.stacked import expand, flat, is_common, mix, put, select, take, unflat, weighted_mean

SHAPES = {"conv.weight": (2, 3, 2), "conv.bias": (2,), "scale": ()}
SIZE = 15
clients = st.integers(1, 6)
seeds = st.integers(0, 2**31)
few = settings(max_examples=20)


def make(k, seed=0, dtype=torch.float64, counter=True):
    """Random parameters of k clients, with a scalar entry and a BatchNorm counter."""
    g = torch.Generator().manual_seed(seed)
    p = {
        n: torch.randn(k, *s, generator=g, dtype=torch.float64).to(dtype) for n, s in SHAPES.items()
    }
    return p | (
        {"bn.num_batches_tracked": torch.randint(0, 99, (k,), generator=g)} if counter else {}
    )


def rows(seed, k, s):
    return torch.from_numpy(np.random.default_rng(seed).choice(k, s, replace=False))


def same(a, b):
    assert list(a) == list(b)
    for n in a:
        assert a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]), n


# ---------------------------------------------------------------- rows


@few
@given(clients, seeds, st.data())
def test_put_after_take_restores_and_touches_nothing_else(k, seed, data):
    sel = rows(seed, k, data.draw(st.integers(0, k)))
    p, fresh = make(k, seed), make(len(sel), seed + 1)
    before = stacked.clone(p)
    kept = take(p, sel)
    memory = {n: v.data_ptr() for n, v in p.items()}
    put(p, sel, fresh)
    same(take(p, sel), fresh)
    others = [i for i in range(k) if i not in sel.tolist()]
    assert all(torch.equal(p[n][others], before[n][others]) for n in p)
    put(p, sel, kept)
    same(p, before)
    assert memory == {n: v.data_ptr() for n, v in p.items()}, "put writes in place"


def test_take_is_a_copy_and_follows_the_order_of_sel():
    p = make(4)
    got = take(p, torch.tensor([3, 0, 3]))
    assert all(torch.equal(got[n], torch.stack([v[3], v[0], v[3]])) for n, v in p.items())
    got["scale"].zero_()
    assert (p["scale"] != 0).all()


def test_put_takes_some_names_and_refuses_new_ones():
    p, before = make(3), make(3)
    put(p, torch.tensor([1]), {"scale": torch.tensor([7.0], dtype=torch.float64)})
    assert p["scale"][1] == 7 and torch.equal(p["conv.bias"], before["conv.bias"])
    with pytest.raises(KeyError, match="other"):
        put(p, torch.tensor([1]), {"other": torch.zeros(1)})


@few
@given(st.integers(2, 6), st.integers(0, 9), seeds)
def test_expand_holds_one_row(k, s, seed):
    one = {n: v[0] for n, v in make(1, seed).items()}
    p = expand(one, k)
    for n, v in p.items():
        assert (
            v.shape == (k, *one[n].shape) and v.stride(0) == 0 and v.data_ptr() == one[n].data_ptr()
        )
    got = take(p, torch.arange(s) % k)
    for n, v in got.items():
        assert v.shape == (s, *one[n].shape) and (v == one[n]).all()
        assert is_common(v) == (s > 1) and (s == 0 or v.data_ptr() == one[n].data_ptr())


def test_is_common_and_own():
    one = {"w": torch.arange(6.0).reshape(2, 3)}
    p = expand(one, 4)
    assert is_common(p["w"]) and not is_common(p["w"][:1]) and not is_common(torch.zeros(4, 2))
    mine = stacked.clone(p)
    assert not is_common(mine["w"]) and mine["w"].is_contiguous()
    put(mine, torch.tensor([2]), {"w": torch.full((1, 2, 3), 9.0)})
    assert (mine["w"][2] == 9).all() and torch.equal(mine["w"][1], one["w"]) and one["w"].max() == 5
    lasts = {"w": torch.zeros(4, 2, 3, 5, 5).to(memory_format=torch.channels_last_3d)}
    assert stacked.clone(lasts)["w"].is_contiguous()


# ---------------------------------------------------------------- names


def test_select_by_names_and_by_rule_keeps_the_order():
    p = make(2)
    assert list(select(p, ["scale", "conv.weight", "absent"])) == ["conv.weight", "scale"]
    assert list(select(p, iter(("scale",)))) == ["scale"]
    assert list(select(p, lambda n: n.startswith("conv"))) == ["conv.weight", "conv.bias"]
    assert select(p, []) == {} and select(p, p)["scale"] is p["scale"]


@few
@given(st.text("v.z~", max_size=3))
def test_prefixes_come_off_again(prefix):
    p = make(2)
    both = {"zz" + n: v for n, v in p.items()} | stacked.prefixed(prefix + "~", p)
    got = stacked.unprefixed(prefix + "~", both)
    assert list(got) == list(p) and all(got[n] is v for n, v in p.items())


def test_a_prefix_that_repeats_comes_off_once():
    assert list(stacked.unprefixed("v.", {"v.v.w": 0, "w.v.": 1, "v.": 2})) == ["v.w", ""]


def test_scalars_counts_one_client():
    assert (
        stacked.scalars(make(5)) == SIZE + 1
        and stacked.scalars(expand({"w": torch.zeros(3, 4)}, 7)) == 12
    )
    assert stacked.scalars({}) == 0


# ---------------------------------------------------------------- averages


@few
@given(clients, seeds)
def test_weighted_mean_is_the_loop(k, seed):
    p, w = make(k, seed), np.random.default_rng(seed).uniform(0.01, 50, k)
    got = weighted_mean(p, torch.from_numpy(w))
    for n in SHAPES:
        assert_close(got[n], sum(w[i] / w.sum() * p[n][i] for i in range(k)))
    assert got["bn.num_batches_tracked"] == p["bn.num_batches_tracked"].max()
    assert got["bn.num_batches_tracked"].dtype == torch.int64


@few
@given(clients, seeds, st.floats(1e-3, 1e6), st.permutations(range(6)))
def test_weighted_mean_ignores_scale_and_order(k, seed, scale, order):
    p, w = make(k, seed), torch.from_numpy(np.random.default_rng(seed).uniform(0.01, 50, k))
    base, order = weighted_mean(p, w), torch.tensor([i for i in order if i < k])
    for got in (weighted_mean(p, w * scale), weighted_mean(take(p, order), w[order])):
        assert_close(got, base)


@few
@given(seeds, st.floats(1e-30, 1e30), st.sampled_from([torch.float32, torch.float64]))
def test_one_participant_is_returned_bit_for_bit(seed, weight, dtype):
    p = make(1, seed, dtype)
    same(weighted_mean(p, torch.tensor([weight])), {n: v[0] for n, v in p.items()})
    same(
        weighted_mean(p, torch.tensor([17])), {n: v[0] for n, v in p.items()}
    )  # a number of samples


@few
@given(st.integers(2, 6), seeds)
def test_common_rows_average_to_themselves(k, seed):
    one = {n: v[0] for n, v in make(1, seed).items()}
    assert_close(weighted_mean(expand(one, k), torch.rand(k) + 0.1), one)
    assert_close(mix(torch.full((3, k), 1 / k), expand(one, k)), expand(one, 3))


def test_weight_zero_leaves_a_client_out():
    p = make(3)
    got = weighted_mean(p, torch.tensor([0.0, 2.0, 0.0]))
    assert all(torch.equal(got[n], p[n][1]) for n in SHAPES)


def test_averages_keep_the_type_of_the_parameters():
    p = make(3, dtype=torch.float32)
    w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert {v.dtype for n, v in weighted_mean(p, w).items() if n in SHAPES} == {torch.float32}
    assert {v.dtype for n, v in mix(w[None], p).items() if n in SHAPES} == {torch.float32}


@few
@given(clients, st.integers(1, 5), seeds)
def test_mix_is_the_loop(k, s, seed):
    p, a = make(k, seed), torch.from_numpy(np.random.default_rng(seed).normal(size=(s, k)))
    got = mix(a, p)
    for n in SHAPES:
        assert_close(
            got[n], torch.stack([sum(a[i, j] * p[n][j] for j in range(k)) for i in range(s)])
        )
    counter = got["bn.num_batches_tracked"]
    assert counter.shape == (s,) and (counter == p["bn.num_batches_tracked"].max()).all()


@few
@given(clients, seeds)
def test_mix_with_the_identity_and_with_one_row(k, seed):
    p = make(k, seed, counter=False)
    assert_close(mix(torch.eye(k), p), p)
    w = torch.rand(k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    assert_close({n: v[0] for n, v in mix((w / w.sum())[None], p).items()}, weighted_mean(p, w))


def test_averages_carry_gradients():
    p, a = make(3, counter=False), torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    flat(mix(a, p)).sum().backward()
    assert_close(a.grad, flat(p).sum(1).expand(2, 3))


def test_axpy():
    x, y = make(2, 1, counter=False), make(2, 2)
    got = stacked.axpy(-0.5, x, y)
    assert list(got) == list(x)
    assert all(torch.equal(got[n], y[n] - 0.5 * x[n]) for n in x)


# ---------------------------------------------------------------- vectors


@few
@given(clients, st.integers(1, 4), seeds)
def test_unflat_undoes_flat(k, s, seed):
    p = make(k, seed, counter=False)
    x = flat(p)
    assert x.shape == (k, SIZE)
    assert torch.equal(x[0], torch.cat([v[0].reshape(-1) for v in p.values()]))
    same(unflat(x, p), p)
    other = torch.randn(s, SIZE, dtype=torch.float64)
    assert torch.equal(flat(unflat(other, p)), other)


def test_flat_reads_common_rows_and_unflat_refuses_another_length():
    p = expand({"w": torch.arange(4.0).reshape(2, 2)}, 3)
    assert torch.equal(flat(p), torch.arange(4.0).expand(3, 4))
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        unflat(torch.zeros(3, 5), p)


def brute(p):
    return [
        np.concatenate([v[k].numpy().ravel() for v in p.values()]).astype(np.float64)
        for k in range(len(p["scale"]))
    ]


@few
@given(clients, st.integers(1, 4), seeds)
def test_gram_cosine_and_distances_against_numpy(k, s, seed):
    p, q = make(k, seed, counter=False), make(s, seed + 1, torch.float32, counter=False)
    x, y = brute(p), brute(q)
    near = dict(rtol=1e-10, atol=1e-12)
    assert_close(stacked.gram(p), torch.tensor([[a @ b for b in x] for a in x]), **near)
    assert_close(stacked.gram(p, q), torch.tensor([[a @ b for b in y] for a in x]), **near)
    norm = np.linalg.norm
    assert_close(
        stacked.cosine(p), torch.tensor([[a @ b / norm(a) / norm(b) for b in x] for a in x]), **near
    )
    assert_close(
        stacked.distances(p), torch.tensor([[norm(a - b) ** 2 for b in x] for a in x]), **near
    )
    assert_close(stacked.inner(p, p), torch.tensor([a @ a for a in x]), **near)
    assert all(
        f(q).dtype == torch.float64 for f in (stacked.gram, stacked.cosine, stacked.distances)
    )


@pytest.mark.parametrize(
    "f", [stacked.gram, stacked.cosine, stacked.distances, lambda p: stacked.inner(p, p)]
)
def test_products_hold_a_block_of_the_models_at_a_time(f, monkeypatch):
    # Memory: no float64 copy of all clients' models (500 of the CNN are 2.3 GB).
    p = {n: torch.randn(5, *shape) for n, shape in (("w", (30, 7)), ("b", (3,)))}
    want = f(p)
    monkeypatch.setattr(stacked, "BLOCK", 50)
    with Counter() as c:
        got = f(p)
    assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert c.largest == 50


@few
@given(st.sampled_from([1e-30, 1e-9, 1.0, 1e20]))
def test_cosine_knows_directions_only(scale):
    right, up = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    p = {
        "w": torch.stack([right, right * scale, (right + up) * scale, -up, torch.zeros(2)]).double()
    }
    half = 0.5**0.5
    want = [
        [1, 1, half, 0, 0],
        [1, 1, half, 0, 0],
        [half, half, 1, -half, 0],
        [0, 0, -half, 1, 0],
        [0] * 5,
    ]
    assert_close(stacked.cosine(p), torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-12)


def test_zero_vectors_have_no_cosine_and_no_distance():
    p = {"w": torch.zeros(3, 4)}
    assert torch.equal(stacked.cosine(p), torch.zeros(3, 3, dtype=torch.float64))
    assert torch.equal(stacked.distances(p), torch.zeros(3, 3, dtype=torch.float64))


def test_distances_of_near_equal_models_keep_their_digits():
    base = torch.full((1, 1000), 1e3, dtype=torch.float64)
    step = torch.tensor([0.0, 1e-7, -2e-7], dtype=torch.float64)[:, None]
    got = stacked.distances({"w": base + step * torch.ones(3, 1000, dtype=torch.float64)})
    want = 1000 * (step - step.T) ** 2
    assert_close(got, want, rtol=1e-5, atol=0)
    assert (got.diagonal() == 0).all() and torch.equal(got, got.T)


@pytest.mark.parametrize("far", [0.0, 1.0, 1e3])
def test_distances_are_as_exact_as_said_with_one_client_far_away(far):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 200_000, generator=g, dtype=torch.float64) * 1e-3
    x[1] = x[0]
    x[-1] += far * torch.randn(200_000, generator=g, dtype=torch.float64)
    want = torch.stack([(x - row).square().sum(1) for row in x])
    got = stacked.distances({"w": x})
    assert (got - want).abs().max() < 1e-12 * (x - x.mean(0)).square().sum(1).max()
