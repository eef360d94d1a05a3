"""Rows and summaries: what a run's arrays say, as data frames; nothing here reads a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from pfl_core.engine.checkpoint import History
from pfl_core.util.percent import DECIMALS, accuracy, spread

# The one long form of rows in memory, one number a row.
ROW_COLUMNS = (
    "run paper artefact row column method dataset partition model seed profile rounds when split "
    "average metric value n_clients device executor revision version wall_s "
    "key code setting partition_seed"
).split()
OLD = {"round": "rounds", "mean": "average"}  # columns of files up to version 0.1
SUMMARY = ("last round", "best round", "round of best", "worst tenth", "sd over clients")
KEYS = ["rounds", "when", "split"]  # of a number in a run's history, besides average and metric
OF_CLIENTS = {  # {metric over clients: its name in `spread`}
    "acc_pct": "average",
    "acc_sd": "sd",
    "acc_min": "min",
    "acc_max": "max",
    "acc_p10": "p10",
    "acc_worst10": "worst10",
}
TOTALS = {
    "download_bytes": "download",
    "upload_bytes": "upload",
    "client_visits": "visits",
    "train_s": "wall",
}


def history_frame(
    arrays: dict[str, np.ndarray], history: History, scalar_bytes: int
) -> pd.DataFrame:
    """A run's history: rounds, when, split, average, metric, value, one number a row.

    Totals of the run so far (bytes, visits, seconds) have when "" and split "".

    Parameters
    ----------
    arrays : dict
        As a Result has them.
    history : History
        What the totals are taken from.
    scalar_bytes : int
        Bytes of one number that travels.
    """
    rounds, parts = arrays["rounds"], []
    for when, split, correct in _counted(arrays):
        n = arrays[f"n/{split}"]
        if (n > 0).any():
            loss, equal = (arrays.get(f"{when}/{split}/{m}") for m in ("loss", "balanced"))
            for average, metric, values in _measured(correct, loss, equal, n):
                known = ~np.isnan(values)  # an older version did not measure all
                at = rounds[-len(correct) :][known]
                parts.append(((when, split, average, metric), at, values[known]))
    for metric, name in TOTALS.items():
        values = np.array(getattr(history, name)[: len(rounds)], dtype=float)
        values *= scalar_bytes if metric.endswith("bytes") else 1
        parts.append((("", "", "total", metric), rounds, values))
    named = [name for name, _, values in parts for _ in values]
    frame = pd.DataFrame(named, columns=["when", "split", "average", "metric"])
    numbers = {"rounds": np.concatenate([at for _, at, _ in parts])}
    numbers |= {"value": np.concatenate([values for *_, values in parts])}
    return frame.assign(**numbers)[[*KEYS, "average", "metric", "value"]]


def _counted(arrays: dict[str, np.ndarray]) -> Iterator[tuple[str, str, np.ndarray]]:
    # What was measured at the last len(correct) of the rounds: fine-tuning at the last one.
    for key in arrays:
        if key.endswith("/correct"):
            when, split, _ = key.split("/")
            yield when, split, arrays[key]


def _measured(
    correct: np.ndarray, loss: Any, equal: np.ndarray | None, n: np.ndarray
) -> list[tuple[str, str, np.ndarray]]:
    # From correct, loss and balanced (E, K): (average, metric, values (E,)), over the clients with
    # samples.
    has = n > 0
    found = spread(accuracy(correct[:, has], n[has]))
    of_clients = {metric: found[name] for metric, name in OF_CLIENTS.items()}
    of_clients |= {} if equal is None else {"acc_balanced": 100 * equal[:, has].mean(1)}
    pooled = {"acc_pct": accuracy(correct.sum(1), n.sum()), "loss": loss.sum(1) / n.sum()}
    both = (("client", of_clients), ("pooled", pooled))
    return [(average, metric, v) for average, values in both for metric, v in values.items()]


def clients_frame(arrays: dict[str, np.ndarray]) -> pd.DataFrame:
    """The accuracy of every client at every evaluated round.

    Columns: rounds, when, split, client, acc_pct (%), n (samples).
    """
    frames = []
    for when, split, correct in _counted(arrays):
        n, rounds = arrays[f"n/{split}"], arrays["rounds"][-len(correct) :]
        r, k = np.meshgrid(rounds, np.arange(len(n)), indexing="ij")
        part = dict(rounds=r.ravel(), when=when, split=split, client=k.ravel())
        part |= dict(acc_pct=accuracy(correct, n).ravel(), n=np.tile(n, len(rounds)))
        frames.append(pd.DataFrame(part))
    return pd.concat(frames, ignore_index=True)


def accuracies(arrays: dict[str, np.ndarray], when: str, round: int) -> pd.DataFrame:
    """Test accuracy of every client with test samples at an evaluated round.

    Columns: client, acc_pct (%), n (test samples).
    """
    ids, found = arrays["n/test"].nonzero()[0], arrays[f"{when}/test/correct"]
    at = list(arrays["rounds"][-len(found) :]).index(round)
    n, correct = arrays["n/test"][ids], found[at][ids]
    return pd.DataFrame(dict(client=ids, acc_pct=accuracy(correct, n), n=n))


def validated(
    rows: pd.DataFrame, by: list[str], when: str | None = "before", *, last: bool = False
) -> pd.Series:
    """Return the accuracy in % on validation data that chooses among runs.

    It is a run's mean over clients at its best round; `idxmax` is the choice, of equal ones the
    first. Test data have no say.

    Parameters
    ----------
    rows : DataFrame
        In the long form.
    by : list of str
        Columns that tell runs apart.
    when : str or None
        "before" or "after" local training, None for the better of both.
    last : bool
        At the last round in place of the best one.

    Returns
    -------
    Series
        By `by`, in the order of the rows; empty without validation data.
    """
    seen = rows[(rows.split == "val") & (rows.metric == "acc_pct")]
    seen = seen[seen["average"] == "client"]
    if when is not None:
        seen = seen[seen.when == when]
    if last:
        ends = seen.groupby(by, sort=False)["rounds"].transform("max")
        seen = seen[seen["rounds"] == ends]
    return seen.groupby(by, sort=False).value.max()


def summary(history: pd.DataFrame) -> pd.DataFrame:
    """Test accuracy in %, a line for each moment of evaluation; see `Result.summary`."""
    acc = history[
        (history["average"] == "client") & history.metric.isin(["acc_pct", "acc_worst10", "acc_sd"])
    ]
    out = {}
    for when in dict.fromkeys(acc.when):
        these = acc[acc.when == when]
        table = these.pivot(index="rounds", columns=["split", "metric"], values="value")
        chosen = table["val" if "val" in table else "test"].acc_pct.round(DECIMALS).idxmax()
        if "test" in table:
            last, best = table.test.iloc[-1], table.test.loc[chosen]
            values = last.acc_pct, best.acc_pct, chosen, last.acc_worst10, last.acc_sd
            out[when] = dict(zip(SUMMARY, values, strict=True))
    table = pd.DataFrame(out).T.round(2).rename_axis("when")
    return table.astype({name: int for name in table if name == "round of best"})
