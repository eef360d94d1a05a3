"""Rows and summaries: what a run's arrays say, as data frames; nothing here reads a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from pfl_core.engine import probes
from pfl_core.engine.checkpoint import History
from pfl_core.engine.finetune import TUNED
from pfl_core.engine.scoring import CONFUSION, COUNTED, LARGE, SCORES, less_is_better
from pfl_core.util import checks
from pfl_core.util.percent import accuracy, compared, spread

# The one long form of rows in memory, one number a row.
ROW_COLUMNS = (
    "run paper artefact row column method dataset partition model seed profile rounds when split "
    "average metric value n_clients device executor revision version wall_s "
    "key code setting partition_seed"
).split()
# A run without a number has one row of this metric: its value is the last round that was evaluated.
LOST = {"diverged": "diverges", "failed": "fails"}  # failed: it raised an error
DIVERGED, FAILED = LOST
UNTESTED = (
    "no client has test data, so there is no test accuracy; a Federation takes test=[...] or "
    "split='70/10/20', an Experiment partition_args={'split': '70/10/20'}"
)
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
ALWAYS = ("correct", "loss", "balanced", *LARGE)  # what is no metric of an Experiment's
OWN = "own"  # the `average` of a method's own numbers
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

    Totals of the run so far (bytes, visits, seconds) have when "" and split "", and so have a
    method's own `numbers`, of average "own".

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
            found = _measured(correct, loss, equal, n) + _scored(named_metrics(arrays, when, split))
            for average, metric, values in found:
                known = ~np.isnan(values)  # an older version did not measure all
                at = rounds[-len(correct) :][known]
                parts.append(((when, split, average, metric), at, values[known]))
    for metric, name in TOTALS.items():
        values = np.array(getattr(history, name)[: len(rounds)], dtype=float)
        values *= scalar_bytes if metric.endswith("bytes") else 1
        parts.append((("", "", "total", metric), rounds, values))
    if "probe/numbers" in arrays:
        at, found = probes.read(arrays, "numbers")
        parts += [(("", "", OWN, name), at, values) for name, values in found.items()]
    named = [name for name, _, values in parts for _ in values]
    frame = pd.DataFrame(named, columns=["when", "split", "average", "metric"])
    numbers = {"rounds": np.concatenate([at for _, at, _ in parts])}
    numbers |= {"value": np.concatenate([values for *_, values in parts])}
    return frame.assign(**numbers)[[*KEYS, "average", "metric", "value"]]


def lost(metric: str, rounds: int = 0) -> dict[str, Any]:
    """What a row of a run says that has no number, of metric DIVERGED or FAILED."""
    blank = dict(when="", split="", average="derived")
    return blank | dict(rounds=rounds, metric=metric, value=float(rounds))


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


def named_metrics(arrays: dict[str, np.ndarray], when: str, split: str) -> dict[str, np.ndarray]:
    """What `Experiment(metrics=...)` named: {metric: (E, K)}, NaN where it is undefined."""
    start = f"{when}/{split}/"
    found = {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}
    return {name: v for name, v in found.items() if name not in ALWAYS}


def _scored(found: dict[str, np.ndarray]) -> list[tuple[str, str, np.ndarray]]:
    # As _measured, over the clients for which a metric is defined; and how many these are.
    out = []
    for metric, values in found.items():
        count = (~np.isnan(values)).sum(1)
        with np.errstate(invalid="ignore"):
            mean = np.nansum(values, 1) / count
        out += [("client", metric, mean), ("client", metric + COUNTED, count.astype(float))]
    return out


def clients_frame(arrays: dict[str, np.ndarray]) -> pd.DataFrame:
    """The accuracy of every client at every evaluated round.

    Columns: rounds, when, split, client, acc_pct (%), n (samples), and what
    `Experiment(metrics=...)` named.
    """
    frames = []
    for when, split, correct in _counted(arrays):
        n, rounds = arrays[f"n/{split}"], arrays["rounds"][-len(correct) :]
        r, k = np.meshgrid(rounds, np.arange(len(n)), indexing="ij")
        part = dict(rounds=r.ravel(), when=when, split=split, client=k.ravel())
        part |= dict(acc_pct=accuracy(correct, n).ravel(), n=np.tile(n, len(rounds)))
        part |= {m: v.ravel() for m, v in named_metrics(arrays, when, split).items()}
        frames.append(pd.DataFrame(part))
    if not frames:  # it diverged in the first round
        whole, blank = np.zeros(0, np.int64), np.zeros(0)
        keys = dict(rounds=whole, when=blank.astype(str), split=blank.astype(str), client=whole)
        return pd.DataFrame(keys | dict(acc_pct=blank, n=whole))
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
    rows: pd.DataFrame,
    by: list[str],
    when: str | None = "before",
    *,
    last: bool = False,
    metric: str = "acc_pct",
) -> pd.Series:
    """Return the accuracy in % on validation data that chooses among runs, or another metric.

    It is a run's mean over clients at its best round; `idxmax` is the choice, of equal ones the
    first; `idxmin` of a metric of which less is better. Test data have no say.

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
    metric : str

    Returns
    -------
    Series
        By `by`, in the order of the rows; empty without validation data.
    """
    seen = rows[(rows.split == "val") & (rows.metric == metric)]
    seen = seen[seen["average"] == "client"]
    if when is not None:
        seen = seen[seen.when == when]
    if last:
        ends = seen.groupby(by, sort=False)["rounds"].transform("max")
        seen = seen[seen["rounds"] == ends]
    found = seen.groupby(by, sort=False).value
    return compared(found.min() if less_is_better(metric) else found.max())


def summary(history: pd.DataFrame) -> pd.DataFrame:
    """Test accuracy in %, a line for each moment of evaluation; see `Result.summary`."""
    acc = history[
        (history["average"] == "client") & history.metric.isin(["acc_pct", "acc_worst10", "acc_sd"])
    ]
    out = {}
    for when in dict.fromkeys(acc.when):
        these = acc[acc.when == when]
        table = these.pivot(index="rounds", columns=["split", "metric"], values="value")
        chosen = compared(table["val" if "val" in table else "test"].acc_pct).idxmax()
        if "test" in table:
            last, best = table.test.iloc[-1], table.test.loc[chosen]
            values = last.acc_pct, best.acc_pct, chosen, last.acc_worst10, last.acc_sd
            out[when] = dict(zip(SUMMARY, values, strict=True))
            out[when] |= _named_at_end(history[history.when == when])
    table = pd.DataFrame(out).T.rename_axis("when")
    table = table.round(dict.fromkeys(table, 4) | dict.fromkeys(SUMMARY, 2))
    whole = [c for c in map(str, table) if c == "round of best" or c.endswith(COUNTED)]
    return table.astype(dict.fromkeys(whole, int))


def at_end(history: pd.DataFrame) -> dict[str, float]:
    """The last test accuracies in %, means over clients: {when: accuracy}; {} if there are none.

    Of fine-tuning that after its last epoch alone.
    """
    acc = history[(history.metric == "acc_pct") & (history["average"] == "client")]
    last = acc[acc.split == "test"].groupby("when", sort=False).value.last()
    found = {str(when): float(value) for when, value in last.items()}
    tuned = [when for when in found if when.startswith(TUNED)][:-1]
    return {when: value for when, value in found.items() if when not in tuned}


def told(accuracies: Mapping[str, str]) -> str:
    """Say accuracies by when: "16.66 % before, 74.07 % after local training"."""
    said = [f"{a} {when}" for when, a in accuracies.items() if not when.startswith(TUNED)]
    said[-1:] = [f"{last} local training" for last in said[-1:]]
    for when, a in accuracies.items():
        if when.startswith(TUNED):
            epochs = when.removeprefix(TUNED).strip()
            said.append(f"{a} after {epochs} epoch{'s' * (epochs != '1')} of fine-tuning")
    return ", ".join(said) or "no test accuracy"


def _named_at_end(history: pd.DataFrame) -> dict[str, float]:
    # Of one moment: what `Experiment(metrics=...)` named, of test data at the last round.
    own = history[(history.split == "test") & (history["average"] == "client")]
    end = own[own["rounds"] == own["rounds"].max()].set_index("metric").value
    names = [m.removesuffix(COUNTED) for m in map(str, end.index) if m.endswith(COUNTED)]
    return {m: end.get(m, np.nan) for name in names for m in (name, name + COUNTED)}


def _moment(arrays: dict[str, np.ndarray], what: str, when: str | None) -> str:
    # The moment at which "confusion" or "scores" are kept, by default that of the models that
    # clients end with.
    there = [key.split("/")[0] for key in arrays if key.endswith(f"/test/{what}")]
    if when is None:
        return there[-1] if there[-1].startswith("tuned") else "before"
    checks.known("when", when, there)
    return when


def predictions_frame(
    arrays: dict[str, np.ndarray], when: str | None, names: Sequence[str] = ()
) -> pd.DataFrame:
    """The class scores of all test samples; see `Result.predictions`.

    `names` are of classes. Scores that are NaN predict none: -1, with names "".
    """
    scores = arrays[f"{_moment(arrays, SCORES, when)}/test/scores"]
    said = {name: arrays[f"test/{name}"] for name in ("client", "sample_id", "label")}
    lost = np.isnan(scores).any(1)
    said |= {"predicted": np.where(lost, -1, scores.argmax(1))}
    if names:
        said |= {n: np.array([*names, ""])[said[n]] for n in ("label", "predicted")}
    columns = [f"score_{c}" for c in names or range(scores.shape[1])]
    return pd.DataFrame(said).join(pd.DataFrame(scores, columns=columns))


def confusion_frame(
    arrays: dict[str, np.ndarray], when: str | None, client: int | None, names: Sequence[str] = ()
) -> pd.DataFrame:
    """A confusion matrix; see `Result.confusion`."""
    every = arrays[f"{_moment(arrays, CONFUSION, when)}/test/confusion"]
    counts = every.sum(0) if client is None else every[client]
    of = list(names) or range(len(counts))
    return pd.DataFrame(counts, pd.Index(of, name="label"), pd.Index(of, name="predicted"))
