"""The form of results/: what its files and columns say, and a run as their lines, both ways.

runs.csv.gz has an Experiment's fields as columns, so that a table is chosen without this package;
results/README.md is made of what is written here. Nothing stands there twice. What is read is what
was written: `plain(fields(p))` is p, and `numbers(lines(h))` is h.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pfl_core.engine.finetune import TUNED
from pfl_core.experiments.experiment import Experiment, defaults
from pfl_core.experiments.keys import ARGS
from pfl_core.experiments.metrics import KEYS

Arrays = dict[str, np.ndarray]

PART = ["paper", "profile", "data"]  # what is published together
WAITING = "waiting"  # as a profile, of runs that nothing shows before the others of their table
CELL = ["artefact", "row", "column", "run"]
RUNS = "runs.csv.gz"
OLD_RUNS = "runs.csv"  # its form up to version 0.2: each Experiment as JSON
FIELDS = {f.name: f for f in dataclasses.fields(Experiment) if f.name != "tags"}
# Fields that most runs leave as they are, which is empty: no column where no line has a value.
SELDOM = ("finetune", "augment", "client_dropout", "stragglers", "metrics", "keep_scores")
SELDOM += ("optimizer", "lr_schedule", "server")


class Schema(NamedTuple):
    """What is known of a table.

    Attributes
    ----------
    says : str
        What a line of it is.
    columns : dict of str
        {column: what it says}, in their order. "method_args.*" stands for all columns of this
        beginning; one with a dot is left out where no line has a value.
    once : list of str
        Columns that no two lines have in common.
    whole, real : list of str
        Columns of integers and of other numbers; all others are text.
    """

    says: str
    columns: dict[str, str]
    once: list[str]
    whole: list[str]
    real: list[str]

    @property
    def needed(self) -> list[str]:
        """Columns that a file must have. A field of Experiment may be younger than the file."""
        return [c for c in self.columns if "." not in c and c not in FIELDS]

    def numbers(self, frame: pd.DataFrame) -> list[str]:
        """Columns of a table that are numbers: those of all metrics, too."""
        metrics = [c for c in frame.columns.astype(str) if c.startswith(_AVERAGES)]
        return [*self.whole, *self.real, *metrics]

    def check(self, frame: pd.DataFrame) -> None:
        """Raise ValueError for lines that are there twice, and for numbers that cannot be."""
        if self.once and len(twice := frame[frame.duplicated(self.once)]):
            raise ValueError(f"it has {' '.join(map(str, twice[self.once].iloc[0]))} twice")
        for name in self.numbers(frame):
            beyond = frame[name][(frame[name] < 0) | (frame[name] > 100)]
            if ".acc_" in name and len(beyond):
                raise ValueError(f"{name} is {beyond.iloc[0]:g}; an accuracy is 0 to 100 %")
        if "value" in self.real and np.isinf(frame.value).any():
            raise ValueError("a value is infinite")


def _of_field(name: str) -> tuple[str, str]:
    said = FIELDS[name].metadata["doc"].replace("\n", " ")
    if name in ARGS:
        return f"{name}.*", f"{said}. A column for each argument; empty where it is not given"
    usual = defaults()[name] if name in SELDOM else None
    listed = f"{said}. JSON" if name == "init_from" or isinstance(usual, list) else said
    return name, f"{listed}. Empty: {usual}" if isinstance(usual, str) else listed


FACTS = {  # of runs.csv.gz: what a Result's meta says beside its Experiment
    "status": "`done`, or `failed: ` and why it diverged",
    "pool": "sha256 of the data, a line of pools.csv",
    "revision": "revision of the method's code, raised when its numbers change",
    "version": "version of pfl_core that computed it",
    "device": "`cpu`, or the GPU",
    "executor": "how clients were trained: threads, batched or, on a GPU, graphs",
    "torch": "version of PyTorch",
    "python": "version of Python",
    "processor": "model of the processor",
    "commit": "git commit of the code",
    "date": "when it ended, UTC",
    "wall_s": "seconds that it took",
    "n_clients": "number of clients that there were",
    "parameters": "number of parameters of a client's model",
    "leaks_test": "whether the method reads test data in training",
    "partition_hash": "sha256 of who holds which samples",
    "schema": "version of the run store's form",
    "code": "digest of code that is not part of pfl_core; empty if all is",
}
_RUN = {"run": "the run, a line of runs.csv.gz"}
_CELL = {
    "paper": "the paper, or `methods` for the comparison of all methods",
    "profile": "quick, medium or paper; `waiting` for a finished run that nothing shows yet",
    "data": "the data that were published together; `paper` if all of the paper's",
    "artefact": "table or figure of the paper",
    "row": "row, curve or bar of the artefact",
    "column": "column or panel of the artefact",
} | _RUN
_WHEN = "`before` or `after` local training, or `tuned 3`: after 3 epochs of fine-tuning, which "
_WHEN += "follows the last round; empty for totals of a run"
_SPLIT = "val or test (`train` where training accuracy is measured); empty for totals of a run"
_ROUND = {"rounds": "communication rounds done so far; 0 is the start"}
_KEYS = _ROUND | {"when": _WHEN, "split": _SPLIT}
_METRICS = {
    "client.acc_pct": "accuracy in %, mean over clients, each with weight 1",
    "client.acc_sd": "its standard deviation over clients, in points",
    "client.acc_min": "accuracy in % of the worst client",
    "client.acc_max": "accuracy in % of the best client",
    "client.acc_p10": "10th percentile of clients' accuracies, in %",
    "client.acc_worst10": "mean accuracy in % of the worst tenth of clients",
    "client.acc_balanced": "mean over a client's classes of the accuracy in %, mean over clients",
    "pooled.acc_pct": "accuracy in % over the samples of all clients",
    "pooled.loss": "mean loss over all samples",
    "total.download_bytes": "bytes from server to clients so far",
    "total.upload_bytes": "bytes from clients to server so far",
    "total.client_visits": "how often a client took part so far",
    "total.train_s": "seconds of training so far",
}
_AVERAGES = ("client.", "pooled.", "total.", "own.")  # of metrics: what their columns begin with
TABLES = {
    RUNS: Schema(
        "One line per run: its Experiment, what became of it, and where it ran. The columns "
        "from `dataset` to `plugins` are the fields of an `Experiment`, defaults written out.",
        {
            "run": "name of the run, by which the other tables know it",
            "key": "the id of its Experiment, 16 hex digits; the name of later runs",
        }
        | dict(_of_field(name) for name in FIELDS)
        | FACTS,
        ["run"],
        ["revision", "n_clients", "parameters", "schema"],
        ["wall_s"],
    ),
    "cells.csv": Schema(
        "Where each run is shown: one line per run and place.", _CELL, [*PART, *CELL], [], []
    ),
    "pools.csv": Schema(
        "The data that runs used: one line per copy, as some copies lack samples.",
        {
            "name": "name of the data set",
            "checksum": "sha256 of the copy, `pool` of runs.csv.gz",
            "samples": "number of samples",
            "test": "number of samples that are for test",
            "classes": "number of classes",
            "shape": "shape of a sample: 28x28",
            "copy": "how it differs from the published set; empty if it does not",
            "labels": "JSON: number of samples by official part (test is 1), class and group; the "
            "last of each line is the number",
        },
        ["name", "checksum"],
        ["samples", "test", "classes"],
        [],
    ),
    "derived.csv": Schema(
        "Numbers computed from finished runs, such as a weight in a figure: one per line.",
        _CELL
        | {"dataset": "data set of the number where it is another than the run's"}
        | _KEYS
        | {"rounds": "round that the number is of; the run's last one if it is of several, or none"}
        | {
            "average": "`derived`; else what the mean is over, of a number that is not its run's",
            "metric": "what the number is; ` at three quarters`: had the runs ended there",
            "value": "the number; empty where there is none",
        },
        [],
        ["rounds"],
        ["value"],
    ),
    "history.csv.gz": Schema(
        "What runs measured: one line per run, round, when and split. In files "
        "`PAPER.history.csv.gz`.",
        _RUN | _KEYS | _METRICS,
        ["run", *KEYS],
        ["rounds"],
        [],
    ),
    "clients.csv.gz": Schema(
        "Client by client: one line of counts per run, split, when and round. In files "
        "`PAPER.clients.csv.gz`.",
        _RUN
        | {"split": "train or test", "when": "as in the history; empty for numbers of samples"}
        | {"rounds": "as in the history; empty for numbers of samples"}
        | {
            "counts": "a number for each client, in order: how many of its test samples are "
            "classified right, or, with `when` empty, how many samples it has"
        },
        ["run", "split", "when", "rounds"],
        ["rounds"],
        [],
    ),
}


def kind(file: str) -> str:
    """The table of which a file is a part: "history.csv.gz" of "fedper.history.csv.gz".

    "" of a file that is none.
    """
    names = [RUNS if file == OLD_RUNS else file, file.partition(".")[2]]
    return next((name for name in names if name in TABLES), "")


def ordered(table: pd.DataFrame, file: str) -> list[str]:
    """The columns of a table as its file has them; those with a dot only if a line has a value."""
    there = [c for c in table.columns.astype(str) if (table[c].notna() & (table[c] != "")).any()]
    out: list[str] = []
    for name in TABLES[file].columns:
        if name.endswith(".*"):
            out += sorted(c for c in there if c.startswith(name[:-1]))
        elif name in there or "." not in name and name not in SELDOM:
            out.append(name)
    dotted = [c for c in there if "." in c and c not in out]
    return [*out, *dotted]


# -- an Experiment --------------------------------------------------------------------------------


def fields(plain: Mapping[str, Any]) -> dict[str, str]:
    """An Experiment's `plain()` as columns of runs.csv.gz: {column: text}, defaults written out.

    Text stands as it is, all else as JSON; None and the defaults of `SELDOM` are empty. Arguments
    have a column each, where text that JSON would read as something else stands as JSON, too.
    """
    out: dict[str, str] = {}
    for name in FIELDS:
        given = plain.get(name, defaults()[name])
        if name in ARGS:
            out |= {f"{name}.{key}": _argument(inner) for key, inner in given.items()}
        elif isinstance(given, str):
            out[name] = "" if name in SELDOM and given == defaults()[name] else given
        else:
            empty = given is None or name in SELDOM and not given
            out[name] = "" if empty else json.dumps(given)
    return out


def plain(line: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `fields`, of a line that may have other columns and may lack young fields.

    Raises
    ------
    ValueError
        For what is no JSON where it should be.
    """
    out: dict[str, Any] = {n: {} if n in ARGS else v for n, v in defaults().items() if n in FIELDS}
    for column, text in line.items():
        name, _, key = column.partition(".")
        if key and name in ARGS and text:
            out[name][key] = _read(text)
        elif column in SELDOM and not text:
            continue
        elif column in FIELDS and FIELDS[column].type == "str":
            out[column] = text
        elif column in FIELDS:
            out[column] = json.loads(text) if text else None
    return out


def _argument(value: Any) -> str:
    is_plain = isinstance(value, str) and value and _read(value) is value
    return value if is_plain else json.dumps(value)


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def of_old(frame: pd.DataFrame) -> pd.DataFrame:
    """The lines of a runs.csv, as those of runs.csv.gz.

    Its column experiment is the whole Experiment. In version 0.2 it lacks key, and code, which was
    ours.
    """
    known = frame.rename(columns={"clients": "n_clients"})
    known = known.assign(**{c: "" for c in ("key", "code") if c not in known})
    said = [fields(json.loads(text)) for text in known.pop("experiment")]
    return known.join(pd.DataFrame(said, index=known.index, dtype=object)).fillna("")


# -- what it measured -----------------------------------------------------------------------------


def lines(history: pd.DataFrame) -> pd.DataFrame:
    """A run's history with a column for each number, "average.metric".

    It has a line for each round, when and split, in the order in which they came.
    """
    named = history.assign(name=history["average"] + "." + history.metric)
    names, order = named.name.unique(), pd.MultiIndex.from_frame(history[KEYS].drop_duplicates())
    table = named.pivot(index=KEYS, columns="name", values="value").reindex(order)[names]
    return table.rename_axis(columns=None).reset_index()


def numbers(lines: pd.DataFrame) -> pd.DataFrame:
    """The inverse of `lines`, for several runs, which a column `run` tells apart.

    Each run's numbers are in the order that they had: by when and split, then metric, then round.
    """
    names, keys = [c for c in lines.columns.astype(str) if "." in c], ["run", *KEYS]
    blocks = lines.groupby(["run", "when", "split"], sort=False).ngroup().to_numpy()
    out = lines[keys + names].melt(keys, names, "name")
    order = np.argsort(np.tile(blocks, len(names)), kind="stable")
    out = out.iloc[order].dropna(subset="value").reset_index(drop=True)
    of = pd.Index(names).get_indexer(pd.Index(out["name"]))
    average, metric = (
        pd.array([name.split(".", 1)[i] for name in names], dtype="str").take(of) for i in (0, 1)
    )
    return out.assign(average=average, metric=metric)[[*keys, "average", "metric", "value"]]


def counts(arrays: Arrays) -> pd.DataFrame:
    """A run's lines of PAPER.clients.csv.gz, without its name, from its arrays."""

    def text(values: np.ndarray) -> str:
        return " ".join(map(str, values.astype(np.int64)))

    out = [(split, "", None, text(arrays[f"n/{split}"])) for split in ("train", "test")]
    tuned = (key.partition("/")[0] for key in arrays if key.startswith(TUNED))
    for when in ("before", "after", *dict.fromkeys(tuned)):
        right = arrays.get(f"{when}/test/correct", ())
        rounds = arrays["rounds"][-len(right) :]
        out += [("test", when, r, text(v)) for r, v in zip(rounds, right, strict=False)]
    return pd.DataFrame(out, columns=["split", "when", "rounds", "counts"])


def arrays(counts: pd.DataFrame, rounds: np.ndarray) -> Arrays:
    """The inverse of `counts`; ValueError if a line of one of the `rounds` is missing."""
    out = {"rounds": rounds}
    for (when, split), own in counts.groupby(["when", "split"], sort=False):
        due = rounds[-1:] if str(when).startswith(TUNED) else rounds
        if when and own["rounds"].tolist() != due.tolist():
            raise ValueError("it has other rounds than its history")
        table = np.array([text.split() for text in own.counts], dtype=np.int64)
        out |= {f"{when}/{split}/correct": table} if when else {f"n/{split}": table[0]}
    return out
