"""What changes if the same runs are read otherwise: the benchmark for those who doubt a choice."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pandas as pd

from pfl_core.engine.finetune import TUNED
from pfl_papers.bench import ranks, tiers
from pfl_papers.bench.found import Found, main
from pfl_papers.bench.record import Record
from pfl_papers.bench.rows import EQUAL, is_read, tuned_epochs

FEW = 5  # seeds


def one_epoch(known: Record) -> pd.DataFrame:
    """With one epoch of fine-tuning at most, chosen on the tuning seeds; the draw stays."""
    whens = {row: _best(known, row, most=1) for row in main(known)}
    return known.accuracies({row: when for row, when in whens.items() if when})


def _best(known: Record, row: str, most: int) -> str:
    # The moment of the best validation accuracy with so many epochs of fine-tuning at most.
    lines = known.tuning[(known.tuning.row == row) & (known.tuning.chosen != "")]
    allowed = [w for w in _moments(known, row) if tuned_epochs(row, w) <= most]
    means = lines[[f"val.{w}" for w in allowed]].mean().dropna()
    return str(means.idxmax()).removeprefix("val.") if len(means) else ""


def _moments(known: Record, row: str) -> list[str]:
    # Moments among which tuning chose.
    whens = [str(c).removeprefix("val.") for c in known.tuning if str(c).startswith("val.")]
    own = known.runs.own[known.runs.row == row].unique()
    return [w for w in whens for o in own if is_read(row, str(o), w)]


def best_round(known: Record, split: str = "val") -> pd.DataFrame:
    """At each run's best evaluation: of all rounds as served, and of the chosen fine-tuning."""
    found = {}
    history = {key: h for key, h in known.history.groupby(["row", "seed"])}
    ends = known.accuracies(), known.metric("val")
    for run in known.runs.to_dict("records"):
        key = (run["row"], run["seed"])
        if key not in history:
            continue
        served = run["own"] if not run["own"].startswith(TUNED) else "before"
        own = history[key][history[key].when == served]
        if np.isneginf(ends[0].loc[key]):
            continue
        test = [*own.test, ends[0].loc[key]]
        by = [*(own.val if split == "val" else own.test), ends[split == "val"].loc[key]]
        found[key] = test[int(np.nanargmax(by))] if not np.isnan(by).all() else np.nan
    return known.table(found)


def few_seeds(known: Record) -> pd.DataFrame:
    """With the first five seeds."""
    return known.accuracies().iloc[:, :FEW]


def untuned(known: Record) -> pd.DataFrame:
    """Draw 0, what its paper takes, on the first tuning seed; only the moment is chosen."""
    seed = known.tuning.seed.min()
    lines = known.tuning[(known.tuning.draw == 0) & (known.tuning.seed == seed)]
    found = {}
    for line in lines.to_dict("records"):
        val = {w: line[f"val.{w}"] for w in _moments(known, line["row"])}
        val = {w: v for w, v in val.items() if not np.isnan(v)}
        found[line["row"]] = line[f"test.{max(val, key=lambda w: val[w])}"] if val else -np.inf
    return pd.DataFrame({seed: pd.Series(found, dtype=float)})


def equal_gradients(known: Record) -> pd.DataFrame:
    """With the line at equal gradients of each row that has one."""
    table = known.accuracies()
    lines = {row: f"{row}, {EQUAL}" for row in main(known)}
    return pd.DataFrame({r: table.loc[e if e in table.index else r] for r, e in lines.items()}).T


def served(known: Record) -> pd.DataFrame:
    """As each paper reads its models: no row is fine-tuned but those that are by themselves."""
    return known.accuracies("own")


READINGS: dict[str, Callable[[Record], pd.DataFrame]] = {
    "as declared": lambda known: known.accuracies(),
    "as served": served,
    "one epoch": one_epoch,
    "best validation round": best_round,
    "best test round": lambda known: best_round(known, "test"),
    "five seeds": few_seeds,
    "no tuning": untuned,
    "equal gradients": equal_gradients,
}
SAYS = {
    "as served": "no fine-tuning, but in rows whose papers have it",
    "one epoch": "one epoch of fine-tuning at most, in place of ten",
    "best validation round": "each run's best evaluation by validation data, not the last",
    "best test round": "each run's best evaluation by test data",
    "five seeds": "the first five seeds",
    "no tuning": "draw 0 on the first tuning seed; one seed, so no words",
    "equal gradients": "costly rows with fewer rounds",
}


@functools.lru_cache(maxsize=1)  # a page asks for them five times
def readings(found: Found) -> dict[str, dict[str, pd.DataFrame]]:
    """{reading: {setting: accuracies in %, a line a row and a column a seed}}."""
    return {
        name: {s: _like(found.tables[s], read(r)) for s, r in found.records.items()}
        for name, read in READINGS.items()
    }


def _like(table: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    # The rows of a table, and those of its seeds that there are, but for one that tuning saw.
    seeds = [seed for seed in other if seed in table] or list(other)
    return other.reindex(table.index)[seeds]


def mean_ranks(found: Found) -> pd.DataFrame:
    """Mean ranks over settings, a line a row and a column a reading."""
    every = {name: ranks.mean_ranks(tables) for name, tables in readings(found).items()}
    return pd.DataFrame(every).reindex(found.summary.index)


def words(found: Found) -> pd.DataFrame:
    """Each method's word in each setting that has it: a line a pair, a column a reading.

    None is untuned, which is one seed.
    """
    out = {
        name: pd.concat({s: tiers.judged(t).tier.reindex(found.methods) for s, t in tables.items()})
        for name, tables in readings(found).items()
        if name != "no tuning"
    }
    return pd.DataFrame(out).dropna(subset="as declared")


def counts(found: Found) -> pd.DataFrame:
    """How many pairs of a method and a setting are better, equal, open or worse, by reading."""
    every = {
        n: w.value_counts().reindex(tiers.WORDS, fill_value=0) for n, w in words(found).items()
    }
    return pd.DataFrame(every, dtype=int).T
