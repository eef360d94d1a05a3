"""Statistics of finished results: data frames and arrays in, never tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from pfl_core.util.percent import spread

# SciPy and scikit-learn are imported where they are called: they take seconds.

# -- tables and runs -------------------------------------------------------------------------------


def paired(a: ArrayLike, b: ArrayLike) -> dict[str, float]:
    """Compare two methods on the same clients, or on the same seeds.

    Parameters
    ----------
    a, b : (n,) float
        A number of each client (or seed), in the same order in both.

    Returns
    -------
    dict
        "n"; "difference", the mean of a - b; "better", the share with a > b; and "p", of Wilcoxon's
        signed-rank test (two-sided, zeros split). p is NaN for n < 6, where it is never below .05.

    Raises
    ------
    ValueError
        If a and b differ in length.
    """
    from scipy.stats import wilcoxon

    a, b = (np.asarray(values, dtype=float) for values in (a, b))
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(
            f"pairs of {a.shape} and {b.shape} values; give both for the same clients (or seeds), "
            "in one order"
        )
    tested: Any = wilcoxon(a - b, zero_method="zsplit") if len(a) >= 6 else None
    p = tested.pvalue if tested is not None else np.nan
    difference, better = float((a - b).mean()), float((a > b).mean())
    return dict(n=len(a), difference=difference, better=better, p=float(p))


def spent(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """What each run had spent by each evaluated round, since round 0.

    Parameters
    ----------
    rows : DataFrame
        Rows in the long form; their totals are read.
    keys : list of str
        Columns that tell runs, or cells of a table, apart.

    Returns
    -------
    DataFrame
        The keys, `round`, `client_visits`, `megabytes` (1e6 bytes, down and up) and `train_s`
        (seconds of training).
    """
    totals = rows[rows["average"] == "total"].drop_duplicates([*keys, "rounds", "metric"])
    wide = totals.pivot(index=[*keys, "rounds"], columns="metric", values="value")
    wide = wide.reindex(columns=["client_visits", "download_bytes", "upload_bytes", "train_s"])
    moved = wide.download_bytes + wide.upload_bytes
    wide = wide.assign(megabytes=moved / 1e6)
    return wide[["client_visits", "megabytes", "train_s"]].reset_index()


def smooth(rows: pd.DataFrame, window: int) -> pd.DataFrame:
    """Replace each `value` by the mean over the last `window` evaluations.

    Every run, metric, split and moment (`when`) is smoothed for itself.
    """
    rows = rows.sort_values("rounds", kind="stable")
    keys = ["run", "row", "column", "when", "split", "average", "metric"]
    groups = rows.groupby(keys, sort=False).value
    means = groups.transform(lambda values: values.rolling(window, min_periods=1).mean())
    return rows.assign(value=means).sort_index()


def fairness(acc: ArrayLike) -> dict[str, float]:
    """How the accuracies of clients spread (FedPer Figs. 3, 13).

    Parameters
    ----------
    acc : (K,) float
        Accuracy of every client, in any unit; the results are in the same one.

    Returns
    -------
    dict
        "average"; "sd" (ddof 0); the percentiles "p10" and "p90"; and "worst10" and "best10", the
        means over the worst and the best tenth of the clients (one client at least).
    """
    found = spread(np.asarray(acc, dtype=float))
    return {n: float(found[n]) for n in ("average", "sd", "worst10", "p10", "p90", "best10")}


# -- weights among clients -------------------------------------------------------------------------


def shares(weights: ArrayLike, group: ArrayLike) -> dict[str, float]:
    """Mean weight of a client on itself, on others of its group, and on the rest.

    If rows sum to 1 and every group has m clients, then
    self + (m - 1) similar + (K - m) other = 1. (FedAGHN's table of weights)

    Parameters
    ----------
    weights : (K, K) float
        Weights of an aggregation: the client of the row receives, that of the column gives.
    group : (K,)
        The group of each client.

    Returns
    -------
    dict
        "self", "similar" and "other"; NaN for a kind without a pair of clients.
    """
    weights, group = np.asarray(weights), np.asarray(group)
    diagonal, same = np.eye(len(group), dtype=bool), group[:, None] == group
    pairs = {"self": diagonal, "similar": same & ~diagonal, "other": ~same}
    return {
        kind: float(weights[chosen].mean()) if chosen.any() else np.nan
        for kind, chosen in pairs.items()
    }


def stages(
    weights: dict[str, np.ndarray], rounds: ArrayLike, group: ArrayLike, best: int
) -> pd.DataFrame:
    """`shares` of weights at four stages of training, in three parts of the model.

    The stage First is the first round with updates (1 or later); Prior, Middle and Final are the
    recorded rounds nearest to best / 4, best / 2 and best. The parts are the whole model, and its
    shallow and deep half; the middle one of an odd number of layers is in both halves.
    (FedAGHN's self, similar and other weights; pFedLA Figs. 5-7)

    Parameters
    ----------
    weights : {layer: (E, K, K) float}
        Weights at the E recorded rounds; layers in the model's order.
    rounds : (E,) int
        The recorded rounds.
    group : (K,)
        The group of each client.
    best : int
        The round that is reported.

    Returns
    -------
    DataFrame
        Long form: part, kind, stage, round, weight.

    Raises
    ------
    ValueError
        If there are more or fewer weights than rounds, or no round after a first update.
    """
    rounds, stack = np.asarray(rounds), np.stack(list(weights.values()))  # (layers, E, K, K)
    at = _stage_indices(rounds, stack.shape[1], best)
    half_up, half_down = (len(stack) + 1) // 2, len(stack) // 2
    parts = {"whole": stack, "shallow": stack[:half_up], "deep": stack[half_down:]}
    lines = []
    for part, layers in parts.items():
        for stage, index in at.items():
            where = dict(stage=stage, rounds=int(rounds[index]))
            for kind, weight in shares(layers[:, index].mean(0), group).items():
                lines.append(dict(part=part, kind=kind) | where | dict(weight=weight))
    return pd.DataFrame(lines)


def _stage_indices(rounds: np.ndarray, recorded: int, best: int) -> dict[str, int]:
    """Where in `rounds` each stage is, {stage: index}; `recorded` is the number of weights."""
    if recorded != len(rounds):
        raise ValueError(
            f"weights at {recorded} rounds, but {len(rounds)} rounds named; give one round for each"
        )
    after = np.flatnonzero(rounds >= 1)
    if not len(after):
        raise ValueError(
            f"weights of rounds {rounds.tolist()}: none is after a first update; "
            "record a round >= 1"
        )
    aims = {"First": 1, "Prior": best / 4, "Middle": best / 2, "Final": best}
    return {stage: int(after[abs(rounds[after] - aim).argmin()]) for stage, aim in aims.items()}


def overlap(counts: np.ndarray) -> np.ndarray:
    """How many labels each two clients both hold: (K, K) integers, from sample counts (K, C)."""
    held = (np.asarray(counts) > 0).astype(int)
    return held @ held.T


def correlation(weights: np.ndarray, overlap: np.ndarray) -> dict[str, float]:
    """Spearman's "rho", with its "p", of weights (K, K) and label overlap (K, K).

    Only pairs of different clients count; both numbers are NaN where one of the two matrices is
    constant. p takes the K (K - 1) pairs as independent, which they are not: it describes, it does
    not test (pFedLA Figs. 5-7).
    """
    from scipy.stats import spearmanr

    pairs = ~np.eye(len(weights), dtype=bool)
    weight, shared = np.asarray(weights)[pairs], np.asarray(overlap)[pairs]
    varied = np.ptp(weight) and np.ptp(shared)
    found: Any = spearmanr(weight, shared) if varied else (np.nan, np.nan)
    rho, p = found
    return dict(rho=float(rho), p=float(p))


# -- embeddings and distances ----------------------------------------------------------------------


def tsne(x: np.ndarray, perplexity: float = 5.0, seed: int = 0) -> np.ndarray:
    """t-SNE of points x (n, d) in the plane: (n, 2) (pFedHN Fig. 4).

    It starts at random (by `seed`) and takes 1000 steps with exact gradients. ValueError, from
    scikit-learn, if perplexity >= n.
    """
    from sklearn.manifold import TSNE

    # Barnes-Hut would add in an order that its threads decide, whatever n_jobs is. 1000 steps are
    # the default, whose name differs among versions.
    exact = TSNE(
        2, perplexity=perplexity, random_state=seed, init="random", method="exact", n_jobs=1
    )
    return exact.fit_transform(np.asarray(x))


def clustering(
    x: ArrayLike, label: ArrayLike, neighbours: int = 4, permutations: int = 1000, seed: int = 0
) -> dict[str, float]:
    """How well points cluster by their labels, measured in all d dimensions (pFedHN Fig. 4).

    Parameters
    ----------
    x : (n, d) float
        The points.
    label : (n,)
        The label of each point.
    neighbours : int
        How many nearest neighbours of a point `purity` looks at, 1 to n - 1.
    permutations : int
        How many random permutations of the labels give p.

    Returns
    -------
    dict
        "silhouette"; "purity", the share of nearest neighbours that have the point's label;
        "chance", the purity to expect of random labels; and "p", the share of permutations that are
        at least as pure, the real labels included.
    """
    from scipy.spatial.distance import cdist
    from sklearn.metrics import silhouette_score

    x, label = np.asarray(x), np.unique(np.asarray(label), return_inverse=True)[1]
    n = len(x)
    if not 0 < neighbours < n:
        raise ValueError(f"{neighbours} neighbours of each of {n} points; ask for 1 to {n - 1}")
    distance = cdist(x, x)
    np.fill_diagonal(distance, np.inf)
    nearest = distance.argsort(1, kind="stable")[:, :neighbours]

    def purity(labels: np.ndarray) -> float:
        return float((labels[nearest] == labels[:, None]).mean())

    rng, real = np.random.default_rng(seed), purity(label)
    as_pure = sum(purity(rng.permutation(label)) >= real for _ in range(permutations))
    return dict(
        silhouette=float(silhouette_score(x, label)),
        purity=real,
        chance=float((np.bincount(label)[label] - 1).mean() / (n - 1)),
        p=(1 + as_pure) / (1 + permutations),
    )


def total_variation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Total variation between label distributions: half the sum of |p - q|, 0 to 1.

    The distance of a client to the nearest of the others is the minimum of its row (pFedHN
    Sec. 5.3).

    Parameters
    ----------
    a : (M, C)
        Sample counts of M clients by class.
    b : (K, C)
        Sample counts of K clients by class.

    Returns
    -------
    (M, K) float

    Raises
    ------
    ValueError
        If a client has no samples.
    """
    from scipy.spatial.distance import cdist

    a, b = (np.asarray(counts, dtype=float) for counts in (a, b))
    for name, counts in (("a", a), ("b", b)):
        if empty := np.flatnonzero(counts.sum(1) <= 0).tolist():
            raise ValueError(
                f"rows {empty} of {name} hold no samples and have no distribution; "
                "leave those clients out"
            )
    p, q = a / a.sum(1, keepdims=True), b / b.sum(1, keepdims=True)
    return cdist(p, q, "cityblock") / 2


def slope(x: ArrayLike, y: ArrayLike, seed: int = 0, resamples: int = 1000) -> dict[str, float]:
    """Least-squares slope of y over x, with a 95 % bootstrap interval (pFedHN Sec. 5.3).

    The interval is that of percentiles over resampled pairs. A resample in which all x are the same
    has no slope and is left out.

    Parameters
    ----------
    x, y : (n,) float
        The pairs.

    Returns
    -------
    dict
        "slope", and the ends of the interval, "low" and "high".

    Raises
    ------
    ValueError
        If x and y differ in length, or all x are the same.
    """
    x, y = (np.asarray(values, dtype=float) for values in (x, y))
    if x.shape != y.shape or x.ndim != 1 or len(np.unique(x)) < 2:
        raise ValueError(
            f"a slope of {y.shape} values over {x.shape}: give as many x as y, "
            "and at least two different x"
        )

    def fit(x: np.ndarray, y: np.ndarray) -> Any:
        dx = x - x.mean(-1, keepdims=True)
        return (dx * y).sum(-1) / (dx**2).sum(-1)

    drawn = np.random.default_rng(seed).integers(len(x), size=(resamples, len(x)))
    drawn = drawn[np.ptp(x[drawn], axis=1) > 0]
    low, high = np.percentile(fit(x[drawn], y[drawn]), (2.5, 97.5))
    return dict(slope=float(fit(x, y)), low=float(low), high=float(high))


# -- mix and match ---------------------------------------------------------------------------------


def row_scaled(acc: np.ndarray) -> np.ndarray:
    """Scale each row of accuracies (K, K) from 0, its worst, to 1, its best (pFedHN Fig. 3).

    A constant row becomes 0.
    """
    acc = np.asarray(acc, dtype=float)
    low, span = acc.min(1, keepdims=True), np.ptp(acc, axis=1, keepdims=True)
    return np.divide(acc - low, span, out=np.zeros_like(acc), where=span > 0)


def diagonal_rank(acc: np.ndarray) -> np.ndarray:
    """Rank (K,) of each client's own part among all in its row of accuracies (K, K).

    1 is best; ties share the best rank.
    """
    acc = np.asarray(acc)
    return 1 + (acc > acc.diagonal()[:, None]).sum(1)
