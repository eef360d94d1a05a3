"""Statistics of finished results: data frames and arrays in, never tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.spatial.distance import cdist
from scipy.stats import spearmanr, wilcoxon
from sklearn.manifold import TSNE
from sklearn.metrics import silhouette_score

from pfl_core.analysis.select import pick

# -- tables and runs -----------------------------------------------------------------------------------------------------


def ranks(table: pd.DataFrame) -> pd.DataFrame:
    """Ranks in every column of a row x column table, higher is better: 1 is best, ties share their mean, NaN stays.

    A last column "mean rank" averages those that are there; rows come sorted by it.
    """
    out = table.astype(float).rank(ascending=False)
    return out.assign(**{"mean rank": out.mean(axis=1)}).sort_values("mean rank", kind="stable")


def paired(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """Two methods on the same n clients or seeds, a and b (n,): n, mean difference a - b, share with a > b ("better"), p.

    p of Wilcoxon's signed-rank test, two-sided, zeros split; NaN for n < 6, where it cannot get below .05.
    Raises ValueError for unequal lengths.
    """
    a, b = (np.asarray(v, dtype=float) for v in (a, b))
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(
            f"pairs of {a.shape} and {b.shape} values; give both for the same clients (or seeds), in one order"
        )
    p = wilcoxon(a - b, zero_method="zsplit").pvalue if len(a) >= 6 else np.nan
    return dict(n=len(a), difference=float((a - b).mean()), better=float((a > b).mean()), p=float(p))


def convergence(rows: pd.DataFrame, when: str = "before", share: float = 0.99) -> pd.DataFrame:
    """When each run was best and what that took, by the client mean of test accuracy (FLAYER Tables 1, 3).

    Index run; row, column, seed, round (the first best), best (%), reached (first round at `share` of the best), and up to
    the best round: client_visits, megabytes (1e6 bytes, down and up), train_s (s); NaN where rows do not say.
    """
    keys = ["run", "row", "column", "seed"]
    # keys first: runs in their order, and one that two artefacts share once
    best = rows[keys].drop_duplicates().merge(pick(rows, "best_test", when).drop_duplicates(keys), on=keys)
    best = best[[*keys, "round", "value"]].rename(columns={"value": "best"})
    series = rows.query("when == @when and mean == 'client' and metric == 'acc_pct' and split == 'test'")
    near = series.merge(best.drop(columns="round"), on=keys).query("value >= @share * best")
    near = near.groupby(keys)["round"].min().rename("reached").reset_index()
    spent = rows[rows["mean"] == "total"].drop_duplicates([*keys, "round", "metric"])
    spent = spent.pivot(index=[*keys, "round"], columns="metric", values="value")
    spent = spent.reindex(columns=["client_visits", "download_bytes", "upload_bytes", "train_s"]).reset_index()
    spent.insert(6, "megabytes", (spent.pop("download_bytes") + spent.pop("upload_bytes")) / 1e6)
    return best.merge(near, on=keys).merge(spent, on=[*keys, "round"], how="left").set_index("run")


def smooth(rows: pd.DataFrame, window: int) -> pd.DataFrame:
    """Rows of one metric with each `value` replaced by the mean of the last `window` evaluations of its run, when and split."""
    rows = rows.sort_values("round", kind="stable")
    keys = ["run", "row", "column", "when", "split", "mean", "metric"]
    means = rows.groupby(keys, sort=False).value.transform(lambda v: v.rolling(window, min_periods=1).mean())
    return rows.assign(value=means).sort_index()


def fairness(acc: Sequence[float]) -> dict[str, float]:
    """How accuracies (K,) of clients spread: mean, sd (ddof 0), percentiles p10, p90, mean of the worst and best tenth
    (at least one client), all in the unit given (FedPer Figs. 3, 13)."""
    acc = np.sort(np.asarray(acc, dtype=float))
    tenth = max(1, len(acc) // 10)
    p10, p90 = np.percentile(acc, (10, 90))
    out = dict(mean=acc.mean(), sd=acc.std(), worst10=acc[:tenth].mean(), p10=p10, p90=p90, best10=acc[-tenth:].mean())
    return {k: float(v) for k, v in out.items()}


# -- weights among clients -----------------------------------------------------------------------------------------------


def shares(weights: np.ndarray, group: Sequence) -> dict[str, float]:
    """Mean weight (K, K; row receives, column gives) of a client on itself, on others of its group (K,) ("similar") and on
    the rest ("other"); NaN for a kind that nobody is of (FedAGHN's table of weights).

    self + (m - 1) similar + (K - m) other = 1 if rows sum to 1 and all groups have m clients.
    """
    weights, group = np.asarray(weights), np.asarray(group)
    own, same = np.eye(len(group), dtype=bool), group[:, None] == group
    kinds = {"self": own, "similar": same & ~own, "other": ~same}
    return {kind: float(weights[of].mean()) if of.any() else np.nan for kind, of in kinds.items()}


def stages(weights: dict[str, np.ndarray], rounds: Sequence[int], group: Sequence, best: int) -> pd.DataFrame:
    """`shares` at four stages of training and three parts of a model, in long form: part, kind, stage, round, weight.

    weights: {layer: (E, K, K)}, in the model's order, at the E recorded `rounds`. First is the first round with updates (>= 1);
    Prior, Middle and Final are those recorded nearest to best / 4, best / 2 and best (the round). The middle one of an odd
    number of layers counts as shallow and as deep. ValueError for weights of other rounds, or without a round >= 1.
    (FedAGHN's self, similar and other weights; pFedLA Figs. 5-7)
    """
    rounds, stack = np.asarray(rounds), np.stack(list(weights.values()))  # (L, E, K, K)
    if stack.shape[1] != len(rounds):
        raise ValueError(f"weights at {stack.shape[1]} rounds, but {len(rounds)} rounds named; give one round for each")
    after = np.flatnonzero(rounds >= 1)
    if not len(after):
        raise ValueError(f"weights of rounds {rounds.tolist()}: none is after a first update; record a round >= 1")
    aims = {"First": 1, "Prior": best / 4, "Middle": best / 2, "Final": best}
    at = {stage: after[np.abs(rounds[after] - aim).argmin()] for stage, aim in aims.items()}
    n = len(stack)
    parts = {"whole": stack, "shallow": stack[: (n + 1) // 2], "deep": stack[n // 2 :]}
    return pd.DataFrame(
        [
            dict(part=part, kind=kind, stage=stage, round=int(rounds[e]), weight=weight)
            for part, layers in parts.items()
            for stage, e in at.items()
            for kind, weight in shares(layers[:, e].mean(0), group).items()
        ]
    )


def overlap(counts: np.ndarray) -> np.ndarray:
    """How many labels each two clients both hold, (K, K) integers, from sample counts (K, C)."""
    held = (np.asarray(counts) > 0).astype(int)
    return held @ held.T


def agreement(weights: np.ndarray, overlap: np.ndarray) -> dict[str, float]:
    """Spearman's rho, and its p, of weights and label overlap (both K, K) off the diagonal; NaN where one is constant.

    p counts the K (K - 1) pairs as independent, which they are not: it describes, it does not test (pFedLA Figs. 5-7).
    """
    w, o = (np.asarray(m)[~np.eye(len(m), dtype=bool)] for m in (weights, overlap))
    rho, p = spearmanr(w, o) if np.ptp(w) and np.ptp(o) else (np.nan, np.nan)
    return dict(rho=float(rho), p=float(p))


# -- embeddings and distances --------------------------------------------------------------------------------------------


def tsne(x: np.ndarray, perplexity: float = 5.0, seed: int = 0) -> np.ndarray:
    """t-SNE (n, 2) of x (n, d) as it is: random start by `seed`, 1000 iterations, exact gradients (pFedHN Fig. 4).

    Raises ValueError (scikit-learn's) if perplexity >= n.
    """
    # Barnes-Hut would add in an order that its threads decide, whatever n_jobs; 1000 iterations are the default,
    # whose name differs among versions.
    how = dict(init="random", method="exact", n_jobs=1)
    return TSNE(2, perplexity=perplexity, random_state=seed, **how).fit_transform(np.asarray(x))


def clustering(
    x: np.ndarray, label: Sequence, neighbours: int = 4, permutations: int = 1000, seed: int = 0
) -> dict[str, float]:
    """How well points x (n, d) lie by label (n,), in all d dimensions (pFedHN Fig. 4).

    silhouette; purity: share of the nearest `neighbours` of a point that have its label; chance: the same if labels were
    random; p: share of label permutations at least as pure, the real one included. ValueError unless 0 < neighbours < n.
    """
    x, label = np.asarray(x), np.unique(np.asarray(label), return_inverse=True)[1]
    n = len(x)
    if not 0 < neighbours < n:
        raise ValueError(f"{neighbours} neighbours of each of {n} points; ask for 1 to {n - 1}")
    distance = cdist(x, x)
    np.fill_diagonal(distance, np.inf)
    near = distance.argsort(1, kind="stable")[:, :neighbours]

    def purity(of: np.ndarray) -> float:
        return float((of[near] == of[:, None]).mean())

    rng, real = np.random.default_rng(seed), purity(label)
    beaten = sum(purity(rng.permutation(label)) >= real for _ in range(permutations))
    chance = float((np.bincount(label)[label] - 1).mean() / (n - 1))
    silhouette = float(silhouette_score(x, label))
    return dict(silhouette=silhouette, purity=real, chance=chance, p=(1 + beaten) / (1 + permutations))


def total_variation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Total variation, 0 to 1, between the label distributions of M and K clients, (M, K), from counts (M, C) and (K, C).

    .5 sum |p - q|; the distance to the nearest is its min(1) (pFedHN Sec. 5.3). ValueError for a client without samples.
    """
    a, b = (np.asarray(v, dtype=float) for v in (a, b))
    for name, counts in (("a", a), ("b", b)):
        if empty := np.flatnonzero(counts.sum(1) <= 0).tolist():
            raise ValueError(
                f"rows {empty} of {name} hold no samples and have no distribution; leave those clients out"
            )
    return cdist(a / a.sum(1, keepdims=True), b / b.sum(1, keepdims=True), "cityblock") / 2


def slope(x: Sequence[float], y: Sequence[float], seed: int = 0, resamples: int = 1000) -> dict[str, float]:
    """Least-squares slope of y (n,) over x (n,), and the ends of its 95 % bootstrap percentile interval over pairs.

    Resamples of one x only have no slope and are left out (pFedHN Sec. 5.3). ValueError for unequal lengths or one x.
    """
    x, y = (np.asarray(v, dtype=float) for v in (x, y))
    if x.shape != y.shape or x.ndim != 1 or len(np.unique(x)) < 2:
        raise ValueError(
            f"a slope of {y.shape} values over {x.shape}: give as many x as y, and at least two different x"
        )

    def fit(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        dx = x - x.mean(-1, keepdims=True)
        return (dx * y).sum(-1) / (dx**2).sum(-1)

    drawn = np.random.default_rng(seed).integers(len(x), size=(resamples, len(x)))
    drawn = drawn[np.ptp(x[drawn], axis=1) > 0]
    low, high = np.percentile(fit(x[drawn], y[drawn]), (2.5, 97.5))
    return dict(slope=float(fit(x, y)), low=float(low), high=float(high))


# -- mix and match -------------------------------------------------------------------------------------------------------


def row_scaled(acc: np.ndarray) -> np.ndarray:
    """Accuracies (K, K) with every row brought to 0 (its worst) .. 1 (its best); a constant row gives 0 (pFedHN Fig. 3)."""
    acc = np.asarray(acc, dtype=float)
    low, span = acc.min(1, keepdims=True), np.ptp(acc, axis=1, keepdims=True)
    return np.divide(acc - low, span, out=np.zeros_like(acc), where=span > 0)


def diagonal_rank(acc: np.ndarray) -> np.ndarray:
    """Rank (K,) of each client's own part among all in its row of accuracies (K, K): 1 is best, ties share the best rank."""
    acc = np.asarray(acc)
    return 1 + (acc > acc.diagonal()[:, None]).sum(1)
