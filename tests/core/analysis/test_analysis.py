"""Statistics of finished results: small cases by hand, identities, and what is refused."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import spearmanr

from pfl_core.analysis import select
from pfl_core.analysis import stats as analysis

COUNTS = st.integers(0, 9)


def close(got, want, **kw):
    """Two dicts of numbers are the same, NaN included."""
    assert list(got) == list(want)
    np.testing.assert_allclose(list(got.values()), list(want.values()), **kw)


# ---------------------------------------------------------------- tables


def test_pick_and_summary_work_on_rows_of_the_long_form():
    rows = pd.concat(
        [series([10, 60, 40], row=r, seed=s) for r in ("fedper", "fedavg") for s in (0, 1)]
    )
    assert set(select.SELECT) == {"last", "last10", "best_val", "best_test"}
    assert select.pick(rows, "best_test").value.tolist() == [60] * 4
    assert select.summary(select.pick(rows)).to_dict() == {
        "c": dict.fromkeys(("fedper", "fedavg"), "40.00 ± 0.00")
    }


def test_a_tie_in_the_digits_that_are_committed_is_one_in_the_store_too():
    test = series([10, 20, 30], spent=False)
    for values in ([50, 200 / 3, 66.66671], [50, 66.6667, 66.6667]):  # a run's floats; committed
        rows = pd.concat([test, series(values, split="val", spent=False)])
        assert select.pick(rows, "best_val").value.tolist() == [20], "the first of several"


@pytest.mark.parametrize("none", ["", None])
@pytest.mark.parametrize("third", ["", "k"])  # with and without one that says no key
def test_two_runs_of_one_key_are_one_seed(none, third):
    """An older run may say no key: its name is its key."""

    def picked(*keys):
        runs = [
            series([n], seed=n).assign(run=run, key=key)
            for n, (run, key) in enumerate(zip("abc", (*keys, third), strict=True))
        ]
        return select.pick(pd.concat(runs)).value.tolist()

    for keys in ((none, "a"), ("j", "j")):
        assert picked(*keys) == [0, 2]
    for keys in ((none, none), ("i", "j"), ("a", none), ("b", none)[::-1]):
        assert picked(*keys) == [0, 1, 2]


# ---------------------------------------------------------------- pairs


def test_paired_by_hand():
    a, b = [3.0, 5, 7, 9, 11, 13], [2.0, 3, 4, 5, 6, 7]
    close(analysis.paired(a, b), dict(n=6, difference=3.5, better=1.0, p=2 / 2**6), rtol=1e-12)
    close(analysis.paired(b, a), dict(n=6, difference=-3.5, better=0.0, p=2 / 2**6), rtol=1e-12)
    close(analysis.paired(a[:5], b[:5]), dict(n=5, difference=3, better=1.0, p=np.nan))
    close(analysis.paired(a, a), dict(n=6, difference=0, better=0.0, p=1.0))
    assert analysis.paired([1, 2, 3, 4], [1, 1, 1, 9])["better"] == 0.5, "a tie is not better"
    mixed = analysis.paired([1.0, -2, 3, -4, 5, -6, 7, -8], [0] * 8)
    np.testing.assert_allclose(
        mixed["p"], 0.84375
    )  # W+ = 16 of 36: 216 / 256 of the sign patterns lie as far out


@pytest.mark.parametrize(("a", "b"), [([1, 2], [1]), ([1, 2, 3], [2]), ([[1, 2]], [[1, 2]])])
def test_pairs_have_two_sides(a, b):
    with pytest.raises(
        ValueError, match=r"pairs of \(.*\) and \(.*\) values; give both for the same clients"
    ):
        analysis.paired(a, b)


# ---------------------------------------------------------------- runs


def series(values, row="fedper", column="c", seed=0, artefact="fig2", spent=True, **more):
    """Rows of one run at rounds 0, 2, 4, ...: accuracies, and totals that grow by (3, 1e6, 2e6, .5) a round."""
    base = dict(
        run=f"{row}/{column}/{seed}",
        paper="p",
        artefact=artefact,
        row=row,
        column=column,
        seed=seed,
    )
    acc = dict(when="before", split="test", average="client", metric="acc_pct") | more
    rows = [base | acc | {"rounds": 2 * i, "value": float(v)} for i, v in enumerate(values)]
    totals = (
        dict(client_visits=3, download_bytes=1e6, upload_bytes=2e6, train_s=0.5) if spent else {}
    )
    for metric, each in totals.items():
        tail = dict(when="", split="", average="total", metric=metric)
        rows += [base | tail | {"rounds": 2 * i, "value": 2 * i * each} for i in range(len(values))]
    return pd.DataFrame(rows)


def test_what_a_run_had_spent_by_each_round():
    rows = pd.concat([series([10, 79.5, 80]), series([0, 50], "fedavg", seed=1)[::-1]])
    got = analysis.spent(rows, ["row", "seed"]).set_index(["row", "seed", "rounds"])
    assert got.columns.tolist() == ["client_visits", "megabytes", "train_s"]
    assert got.loc["fedper", 0].to_numpy().tolist() == [[0, 0, 0], [6, 6, 1], [12, 12, 2]]
    assert got.loc["fedavg", 1].to_numpy().tolist() == [[0, 0, 0], [6, 6, 1]]


def test_a_run_of_two_artefacts_is_counted_once_and_its_costs_may_be_missing():
    twice = pd.concat([series([1, 2]), series([1, 2], artefact="fig3")])
    assert analysis.spent(twice, ["run"])["rounds"].tolist() == [0, 2]
    assert analysis.spent(series([1, 2], spent=False), ["run"]).empty
    bare = series([1, 2])
    got = analysis.spent(bare[bare.metric != "train_s"], ["run"])
    assert got.client_visits.tolist() == [0, 6] and got.train_s.isna().all()


# ---------------------------------------------------------------- fairness


def test_fairness_by_hand():
    acc = [30, 10, 20, *range(40, 110, 10), *[50] * 10]
    got = analysis.fairness(acc)
    want = dict(average=52.5, sd=np.std(acc), worst10=15, p10=29, p90=81, best10=95)
    close(got, want, rtol=1e-12)
    few = analysis.fairness([4.0, 2, 9])
    assert (few["worst10"], few["best10"]) == (2, 9)


# ---------------------------------------------------------------- weights


def test_shares_by_hand():
    w = np.array([[0.5, 0.3, 0.2], [0.1, 0.7, 0.2], [0.25, 0.25, 0.5]])
    close(
        analysis.shares(w, ["a", "a", "b"]),
        {"self": 1.7 / 3, "similar": 0.2, "other": 0.225},
        rtol=1e-12,
    )
    close(
        analysis.shares(w, [0, 1, 2]),
        {"self": 1.7 / 3, "similar": np.nan, "other": 1.3 / 6},
        rtol=1e-12,
    )
    close(
        analysis.shares(w, [0, 0, 0]),
        {"self": 1.7 / 3, "similar": 1.3 / 6, "other": np.nan},
        rtol=1e-12,
    )


@given(st.integers(2, 4), st.integers(2, 4), st.integers(0, 99))
def test_shares_of_rows_that_sum_to_one(groups, m, seed):
    rng = np.random.default_rng(seed)
    w = rng.random((groups * m, groups * m))
    got = analysis.shares(w / w.sum(1, keepdims=True), rng.permutation(np.repeat(range(groups), m)))
    total = got["self"] + (m - 1) * got["similar"] + (groups - 1) * m * got["other"]
    np.testing.assert_allclose(total, 1)


def constant(own, similar, other):
    """Weights (4, 4) of two pairs."""
    return (
        np.kron(np.eye(2), np.full((2, 2), similar - other)) + other + (own - similar) * np.eye(4)
    )


def test_stages_by_hand():
    rounds, group = [0, 1, 4, 6, 10, 20, 24], [0, 0, 1, 1]
    weights = {
        f"l{k}": np.stack([constant(100 * k + r, 10 * k + r, k + r) for r in rounds])
        for k in range(3)
    }
    got = analysis.stages(weights, rounds, group, best=20)
    assert got.columns.tolist() == ["part", "kind", "stage", "rounds", "weight"] and len(got) == 36
    at = got.drop_duplicates("stage").set_index("stage")["rounds"].to_dict()
    assert at == {"First": 1, "Prior": 4, "Middle": 10, "Final": 20}, (
        "5 lies as near to 4 as to 6: the earlier"
    )
    level = {
        "whole": 1,
        "shallow": 0.5,
        "deep": 1.5,
    }  # mean of the layers' numbers; layer 1 is in both halves
    unit = {"self": 100, "similar": 10, "other": 1}
    want = [
        level[p] * unit[k] + r for p, k, r in zip(got.part, got.kind, got["rounds"], strict=True)
    ]
    np.testing.assert_allclose(got.weight, want)
    assert set(zip(got.part, got.kind, strict=True)) == {(p, k) for p in level for k in unit}


def test_stages_of_halves_and_of_one_matrix():
    weights = {f"l{k}": np.full((1, 2, 2), float(k)) for k in range(4)}
    got = (
        analysis.stages(weights, [3], [0, 1], best=3)
        .dropna()
        .groupby("part")
        .weight.agg(set)
        .to_dict()
    )
    assert got == {"whole": {1.5}, "shallow": {0.5}, "deep": {2.5}}
    whole = analysis.stages({"model": weights["l2"]}, [3], [0, 1], best=3)
    assert set(whole.part) == {"whole", "shallow", "deep"} and set(whole.weight.dropna()) == {2.0}
    early = analysis.stages({"model": np.ones((3, 2, 2))}, [0, 5, 9], [0, 0], best=0)
    assert set(early["rounds"]) == {5}, "round 0 is before any update"


def test_stages_need_a_round_with_updates_and_one_for_each_weight():
    with pytest.raises(ValueError, match=r"weights of rounds \[0\]: none is after a first update"):
        analysis.stages({"a": np.ones((1, 2, 2))}, [0], [0, 1], best=1)
    with pytest.raises(ValueError, match="weights at 3 rounds, but 2 rounds named"):
        analysis.stages({"a": np.ones((3, 2, 2))}, [0, 1], [0, 1], best=1)


def test_overlap_by_hand():
    counts = np.array([[5, 0, 2], [0, 0, 1], [0, 7, 0]])
    got = analysis.overlap(counts)
    assert got.tolist() == [[2, 1, 0], [1, 1, 0], [0, 0, 1]] and got.dtype.kind == "i"


def test_agreement_looks_off_the_diagonal():
    shared = np.array([[9, 2, 1, 0], [2, 9, 0, 1], [1, 0, 9, 2], [0, 1, 2, 9]])
    w = np.exp(shared.astype(float))
    np.fill_diagonal(w, -50)
    got = analysis.correlation(w, shared)
    assert list(got) == ["rho", "p"]
    np.testing.assert_allclose(got["rho"], 1)
    assert got["p"] < 1e-6
    np.testing.assert_allclose(analysis.correlation(-w, shared)["rho"], -1)
    noisy = np.random.default_rng(0).random((4, 4))
    off = ~np.eye(4, dtype=bool)
    close(
        analysis.correlation(noisy, shared),
        dict(zip(("rho", "p"), spearmanr(noisy[off], shared[off]), strict=True)),
    )
    close(analysis.correlation(w, np.eye(4)), dict(rho=np.nan, p=np.nan))


# ---------------------------------------------------------------- embeddings


def blobs(spread, groups=4, m=5, d=6):
    rng = np.random.default_rng(1)
    centres = np.repeat(5 * np.eye(d)[:groups], m, 0)
    return centres + spread * rng.normal(size=centres.shape), np.repeat([*"abcd"[:groups]], m)


def test_tsne_repeats_and_keeps_neighbours():
    x, label = blobs(0.1)
    got = analysis.tsne(x)
    assert got.shape == (20, 2) and np.isfinite(got).all()
    np.testing.assert_array_equal(got, analysis.tsne(x))
    assert not np.allclose(got, analysis.tsne(x, seed=1)) and not np.allclose(
        got, analysis.tsne(x, perplexity=3)
    )
    assert analysis.clustering(got, label, permutations=1)["purity"] == 1


def test_tsne_needs_more_points_than_perplexity():
    with pytest.raises(ValueError, match="perplexity"):
        analysis.tsne(np.eye(4))


def test_clustering_by_hand():
    x, label = np.array([[0.0], [1], [3], [10], [12], [13]]), [*"aabbbb"]
    got = analysis.clustering(x, label, neighbours=1, permutations=99)
    assert list(got) == ["silhouette", "purity", "chance", "p"]
    np.testing.assert_allclose((got["purity"], got["chance"]), (5 / 6, (2 * 1 + 4 * 3) / 5 / 6))
    s = [1 - 1 / 9.5, 1 - 1 / 8.5, 2.5 / (26 / 3) - 1, 1 - 4 / 9.5, 1 - 4 / 11.5, 1 - 14 / 3 / 12.5]
    np.testing.assert_allclose(got["silhouette"], np.mean(s))
    two = analysis.clustering(x, label, neighbours=2, permutations=9)
    np.testing.assert_allclose(two["purity"], 8 / 12)


def test_clustering_counts_permutations():
    x, label = blobs(0.1)
    sharp, none = (
        analysis.clustering(x, label, permutations=99),
        analysis.clustering(x, label, permutations=0),
    )
    assert (sharp["purity"], sharp["p"], none["p"]) == (1, 0.01, 1) and sharp["silhouette"] > 0.9
    np.testing.assert_allclose(sharp["chance"], 4 / 19)
    vague = [
        analysis.clustering(x, np.random.default_rng(s).permutation(label), permutations=199)
        for s in range(20)
    ]
    assert (
        abs(np.mean([v["purity"] for v in vague]) - 4 / 19) < 0.04
        and np.mean([v["p"] for v in vague]) > 0.3
    )
    again = [
        analysis.clustering(x, np.random.default_rng(s).permutation(label), permutations=199)
        for s in range(5)
    ]
    assert vague[:5] == again
    tied = analysis.clustering(np.eye(3), [*"aab"], neighbours=2, permutations=9)
    assert tied["p"] == 1, "all permutations are as pure as the labels"


@pytest.mark.parametrize("neighbours", [0, 20])
def test_neighbours_are_others(neighbours):
    with pytest.raises(
        ValueError, match=f"{neighbours} neighbours of each of 20 points; ask for 1 to 19"
    ):
        analysis.clustering(*blobs(1), neighbours=neighbours)


# ---------------------------------------------------------------- distances and slopes


def test_total_variation_by_hand():
    got = analysis.total_variation([[1, 1, 0], [0, 0, 9]], [[5, 5, 0], [0, 2, 2], [1, 0, 3]])
    np.testing.assert_allclose(got, [[0, 0.5, 0.75], [1, 0.5, 0.25]])


@given(arrays(int, (4, 5), elements=COUNTS), st.integers(2, 7))
def test_total_variation_is_a_distance_of_distributions(counts, factor):
    counts = counts + np.eye(4, 5, dtype=int)  # nobody is without samples
    d = analysis.total_variation(counts, counts)
    np.testing.assert_allclose(d, d.T, atol=1e-12)
    np.testing.assert_allclose(d.diagonal(), 0, atol=1e-12)
    np.testing.assert_allclose(analysis.total_variation(factor * counts, counts), d, atol=1e-12)
    assert (d <= 1 + 1e-12).all() and (d[:, None] <= d[:, :, None] + d + 1e-12).all(), "triangle"


def test_nobody_without_samples_has_a_distribution():
    for pair, name in (
        ((np.eye(3) - np.eye(3)[:1], np.eye(3)), "a"),
        ((np.eye(3), np.zeros((2, 3))), "b"),
    ):
        with pytest.raises(ValueError, match=rf"rows \[0.*\] of {name} hold no samples"):
            analysis.total_variation(*pair)


def test_slope_by_hand():
    close(analysis.slope([0, 1, 2, 3], [5, 3, 1, -1]), dict(slope=-2, low=-2, high=-2), rtol=1e-12)
    np.testing.assert_allclose(analysis.slope([0, 1, 2], [0, 0, 3])["slope"], 1.5)


def test_slope_interval_covers_and_narrows():
    rng = np.random.default_rng(0)
    x = rng.random(400)
    y = 3 * x + rng.normal(size=400)
    few, many = analysis.slope(x[:40], y[:40]), analysis.slope(x, y)
    assert few["low"] < few["slope"] < few["high"] and many["low"] < 3 < many["high"]
    width = [s["high"] - s["low"] for s in (few, many)]
    assert width[1] < width[0] / 2
    np.testing.assert_allclose(width[1], 2 * 1.96 / np.sqrt(400 * x.var()), rtol=0.2)
    assert many == analysis.slope(x, y) and many != analysis.slope(x, y, seed=1)
    assert (
        width[0]
        != np.diff([analysis.slope(x[:40], y[:40], resamples=50)[k] for k in ("low", "high")])[0]
    )


def test_slope_leaves_resamples_of_one_x_out():
    close(analysis.slope([0, 1], [0, 4]), dict(slope=4, low=4, high=4))


@pytest.mark.parametrize(("x", "y"), [([1, 2], [1, 2, 3]), ([1, 1, 1], [1, 2, 3]), ([], [])])
def test_slope_needs_two_x_and_as_many_y(x, y):
    with pytest.raises(ValueError, match="give as many x as y, and at least two different x"):
        analysis.slope(x, y)


# ---------------------------------------------------------------- mix and match


def test_row_scaled_by_hand():
    acc = np.array([[10, 20, 60], [7, 7, 7], [3, 1, 2]])
    np.testing.assert_allclose(analysis.row_scaled(acc), [[0, 0.2, 1], [0, 0, 0], [1, 0, 0.5]])


@given(arrays(int, (4, 4), elements=COUNTS))
def test_rows_span_zero_to_one_and_keep_their_order(acc):
    got = analysis.row_scaled(acc)
    assert (got.min(1) == 0).all() and (got.max(1) == (np.ptp(acc, axis=1) > 0)).all()
    np.testing.assert_array_equal(analysis.diagonal_rank(got), analysis.diagonal_rank(acc))


def test_diagonal_rank_by_hand():
    acc = np.array([[90, 20, 60], [80, 50, 70], [60, 60, 60]])
    assert analysis.diagonal_rank(acc).tolist() == [1, 3, 1]
