"""Metrics of a client's class scores, beside accuracy and loss: those that are here, and one's own.

A metric is a function of ONE client's labels y (n,) and class scores (n, C), as the method gives
them, before softmax. It returns a number, or NaN where it is undefined for these samples. More is
better, but of a metric whose name ends with "_error" or "_loss": scikit-learn's rule for names.

Those that are here equal scikit-learn's (tests/core/engine/test_scoring.py), which takes a hundred
times as long for the AUC of ten classes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_core.methods.task import TrainConfig
from pfl_core.util import checks, identity
from pfl_core.util.cards import Listing
from pfl_core.util.draws import unmoved

Metric = Callable[[np.ndarray, np.ndarray], float]
Sums = dict[tuple[str, str], np.ndarray]  # {(split, metric): (K,)}
CONFUSION, SCORES = "confusion", "scores"
LARGE = (CONFUSION, SCORES)  # no number a client: kept of the last evaluation alone
COUNTED = "_clients"  # what follows a metric's name where rows say for how many clients it is
# What a client's results call something else, beside all that begins with "acc_".
TAKEN = "rounds when split client name n correct loss balanced download_bytes upload_bytes".split()
TAKEN += ["client_visits", "train_s", *LARGE]


def auc(y: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve, 0 to 1: of class 1 of two; of more the mean over a client's own."""
    from scipy.special import softmax  # late: they take a second
    from scipy.stats import rankdata

    mine = np.unique(y)
    if len(mine) < 2:
        return math.nan
    classes = mine if scores.shape[1] > 2 else mine[1:]
    with np.errstate(invalid="ignore"):  # scores that overflowed make it NaN
        ranks = rankdata(softmax(scores, axis=1)[:, classes], axis=0)
    positive = y[:, None] == classes
    n = positive.sum(0)
    wins = (ranks * positive).sum(0) - n * (n + 1) / 2
    return float((wins / (n * (len(y) - n))).mean())


def f1(y: np.ndarray, scores: np.ndarray) -> float:
    """Macro F1, 0 to 1: the mean over all classes that a client's labels or answers have."""
    found = confusion(y, scores)
    either = found.sum(0) + found.sum(1)
    return float((2 * found.diagonal() / np.maximum(either, 1)).sum() / (either > 0).sum())


def balanced_acc(y: np.ndarray, scores: np.ndarray) -> float:
    """Balanced accuracy, 0 to 1: the mean over a client's classes of the share of right answers."""
    found = confusion(y, scores)
    n = found.sum(1)
    return float((found.diagonal() / np.maximum(n, 1)).sum() / (n > 0).sum())


def confusion(y: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """A matrix a client at the end, in `Result.confusion`: class of a sample x class answered."""
    c = scores.shape[1]
    return np.bincount(y * c + scores.argmax(1), minlength=c * c).reshape(c, c)


_METRICS: dict[str, tuple[Callable, str]] = {
    fn.__name__: (fn, (fn.__doc__ or "").partition("\n")[0])
    for fn in (auc, f1, balanced_acc, confusion)
}


def register_metric(name: str, fn: Metric, doc: str = "") -> None:
    """Add a metric of your own, `fn(y, scores) -> float`.

    Parameters
    ----------
    name : str
        What an Experiment and the rows call it: letters, digits and "_". Less is better of one that
        ends with "_error" or "_loss". A name of yours may be registered again.
    fn : callable
        Makes a number of ONE client's labels y (n,) int64 and class scores (n, C) float64, before
        softmax; n >= 1. NaN says that it is undefined for these samples.
    doc : str
        Its line in `list_metrics`, by default the first one of fn's docstring.

    Raises
    ------
    TypeError, ValueError
        For what is no such function, and for a name that is taken.

    Examples
    --------
    >>> from pfl_core import Experiment, register_metric, run
    >>> def top2(y, scores):
    ...     "Share of samples whose class is among the two best."
    ...     return float((scores.argsort(1)[:, -2:] == y[:, None]).any(1).mean())
    >>> register_metric("top2", top2)
    >>> e = Experiment(clients=3, model="mlp", rounds=1, partition="iid", metrics=("top2", "auc"))
    >>> rows = run(e, device="cpu").history
    >>> rows[rows.metric.isin(["top2", "auc"])].value.between(0, 1).all().item()
    True
    """
    where = f"register_metric({name!r})"
    checks.name("register_metric(name)", name)
    if not (name.isascii() and name.isidentifier()):
        raise ValueError(f"{where}: allowed are letters, digits and _, as in 'top2'")
    if name in _METRICS and identity.is_ours(_METRICS[name][0]) and not identity.is_ours(fn):
        raise ValueError(f"{where}: pfl_core has a metric of this name; register yours as another")
    if name in TAKEN or name.startswith("acc_") or name.endswith(COUNTED):
        raise ValueError(f"{where}: rows call something else so; register it under another name")
    checks.takes(where, fn, "y", "scores")
    identity.note(fn)
    _METRICS[name] = fn, doc or (inspect.getdoc(fn) or "").partition("\n")[0]


def list_metrics() -> Listing:
    """{name: one line about it} of every metric that `Experiment(metrics=...)` may name.

    Examples
    --------
    >>> from pfl_core import list_metrics
    >>> list_metrics()["f1"]
    "Macro F1, 0 to 1: the mean over all classes that a client's labels or answers have."
    """
    return Listing({name: doc for name, (_, doc) in _METRICS.items()})


def check(names: Iterable[str]) -> None:
    """Raise ValueError for an unknown metric."""
    for name in names:
        add = "add your own with register_metric, in a module of `plugins`"
        checks.known("metric", name, _METRICS, add)


def functions(names: Iterable[str]) -> list[Callable]:
    """The functions of metrics."""
    return [_METRICS[name][0] for name in names]


def less_is_better(name: str) -> bool:
    """Whether a lower value of a metric is the better one, by its name."""
    return name == "loss" or name.endswith(("_error", "_loss"))


def blank(config: TrainConfig, shape: tuple[int, int], samples: int) -> Sums:
    """What the evaluation of a run with so many test samples puts its scores' metrics into.

    `shape` is (K, C): clients and classes. Metrics are NaN where a client is not evaluated.
    """
    k, c = shape
    numbers = [m for m in config.metrics if m != CONFUSION]
    out: Sums = {(s, m): np.full(k, np.nan) for m in numbers for s in ("val", "test")}
    if CONFUSION in config.metrics:
        out["test", CONFUSION] = np.zeros((k, c, c), np.int32)
    if config.keep_scores:
        out["test", SCORES] = np.zeros((samples, c))
    return out


def judged(scores: Tensor, y: Tensor, whole: bool) -> Tensor:
    """Of samples (n,): is the answer right (0 or 1), and its loss, (2, n); its scores if `whole`.

    `scores` are (n, C); with them it is (2 + C, n). Scores that are NaN are no answer.
    """
    top, at = scores.max(1)  # NaN if one of them is
    right = ((at == y) & (top == top)).to(scores.dtype)
    found = torch.stack([right, F.cross_entropy(scores, y, reduction="none")])
    return torch.cat([found, scores.T]) if whole else found


def measured(
    names: Iterable[str], y: np.ndarray, scores: np.ndarray, n: np.ndarray, who: list[int]
) -> dict[str, np.ndarray]:
    """Metrics of clients whose samples follow one another: {name: (S,), of matrices (S, C, C)}.

    Parameters
    ----------
    y, scores : (N,), (N, C)
    n : (S,)
        How many samples each client has. Of none a metric is NaN, and a matrix 0. So it is where a
        score is NaN; a matrix counts the other samples.
    who : (S,)
        What errors call the clients.

    Raises
    ------
    ValueError
        If a metric of a user's own fails, returns no number, or draws from a global generator.
    """
    ends, c, out = n.cumsum(), scores.shape[1], {}
    given = np.asarray(~np.isnan(scores).any(1))
    for name in names:
        fn, blank = functions([name])[0], np.full(len(n), np.nan)
        if name == CONFUSION:
            blank = np.zeros((len(n), c, c), np.int32)
        elif not identity.is_ours(fn):
            fn = _own(name, fn)
        for i in np.flatnonzero(n):
            at = slice(ends[i] - n[i], ends[i])
            some = given[at]
            if not some.all() and name != CONFUSION:
                continue
            try:
                blank[i] = fn(y[at][some], scores[at][some])
            except _Refused as error:
                raise ValueError(f"metric {name!r} of client {who[i]}: {error}") from error
        out[name] = blank
    return out


class _Refused(ValueError):
    """What a metric of a user's own did."""


def _own(name: str, fn: Metric) -> Metric:
    # On copies, so that nothing that it changes is seen by anybody else.
    def checked(y: np.ndarray, scores: np.ndarray) -> float:
        with unmoved(f"metric {name!r}", "draw from np.random.default_rng(0)"):
            try:
                value: Any = fn(y.copy(), scores.copy())
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                raise _Refused(f"{said}; return float('nan') where it is undefined") from error
        if (number := _number(value)) is None:
            raise _Refused(f"it returned {value!r:.100}; allowed is a finite number, or NaN")
        return number

    return checked


def _number(value: Any) -> float | None:
    # A number or NaN, None for anything else.
    if isinstance(value, str):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return None if math.isinf(number) else number
