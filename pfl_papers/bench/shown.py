"""The benchmark's tables for people, as frames of text, each number computed from the records."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd

from pfl_core.analysis import verdicts
from pfl_core.experiments.experiment import Experiment
from pfl_core.util.percent import spread
from pfl_papers.bench import sceptic, tiers
from pfl_papers.bench.found import Found, main
from pfl_papers.bench.record import DIGITS, Record, method_of
from pfl_papers.bench.rows import LOCAL, REFERENCE, said, tuned_epochs
from pfl_papers.bench.settings import SETTINGS

FAMILIES = {  # what a method does beside averaging
    "one model for all, or none": "local fedavg fedavg_ft lpft fedprox feddbe",
    "a part of the network stays": "lgfedavg fedbn fedper fedrep fedbabu fedas fedrod fedpac",
    "a model of one's own beside": "pfedme ditto apfl",
    "a start for adaptation": "perfedavg",
    "other clients are weighed": "fedfomo fedamp heurfedamp fedala apple fedfew pfedla heurpfedla "
    "flayer fedaghn",
    "clusters": "cfl",
    "hypernetworks": "pfedhn pfedhn_pc",
    "features": "fedproto fedcp gpfl pfedfda",
}
COLUMNS = ["rank", "accuracy", "beside FedAvg + FT", "word", "read", "served", "worst tenth"]
COLUMNS += [
    "balanced",
    "below Local, %",
    "below FedAvg + FT, %",
    "gradients",
    "+ FT",
    "CPU s",
    "MB",
]
FIELDS = {f.name for f in fields(Experiment)}  # a method may have an argument of the same name
OfSetting = Callable[[Found, str], pd.DataFrame]
BELOW = 5.0  # points under another row, from which a client counts as harmed


def why(setting: str) -> str:
    """Why personalization could help in a setting."""
    return SETTINGS[setting.removesuffix(DIGITS)].why


def gates(found: Found) -> pd.DataFrame:
    """The gate's numbers on the tuning seeds, a line a setting."""
    lines = {}
    for s in found.records:
        gate = found.gate(s)
        numbers = {"label prior": gate.prior, "Local": gate.local, "range of rows": gate.range}
        numbers |= {"best - Local": gate.ahead, "half an interval": gate.half}
        lines[s] = {n: f"{v:.1f}" if not np.isnan(v) else "" for n, v in numbers.items()}
        lines[s]["half an interval"] = f"{gate.half:.2f}" if not np.isnan(gate.half) else ""
        lines[s]["gate"] = (
            "fails; it asks that " + "; ".join(gate.fails()) if gate.fails() else "passes"
        )
    return pd.DataFrame(lines).T.rename_axis("setting")


def matrix(found: Found) -> pd.DataFrame:
    """Words and differences to the reference: a line a row, a column a setting."""
    columns = {}
    for s in found.records:
        judged = found.tiers(s)
        words = zip(judged.tier, judged.difference, strict=True)
        columns[s] = pd.Series([f"{w} {d.estimate:+.1f}" for w, d in words], judged.index)
    out = pd.DataFrame(columns).reindex([r for r in found.rows if r != REFERENCE]).fillna("")
    return _named(out)


def overall(found: Found) -> pd.DataFrame:
    """Mean rank and probability of improvement over settings, with intervals."""
    lines = {}
    for row, v in found.summary.iterrows():
        rank = f"{v['rank']:.1f} [{v.rank_low:.1f}, {v.rank_high:.1f}]"
        improves = f"{v.improves:.2f} [{v.improves_low:.2f}, {v.improves_high:.2f}]"
        lines[row] = {"mean rank": rank, "improves on FedAvg + FT": improves}
    return _named(pd.DataFrame(lines).T)


def setting(found: Found, name: str) -> pd.DataFrame:
    """The ranked table of a setting, with second lines and the label prior below."""
    known, judged = found.records[name], found.tiers(name)
    second = [row for row in known.lines() if row not in main(known)]
    frames = _numbers(known)
    lines: dict[str, dict[str, str]] = {}
    for rank, row in enumerate([*found.order(name), *second], 1):
        line = {"rank": str(rank) if row in judged.index or row == REFERENCE else ""}
        line["accuracy"] = _mean(frames["accuracy"].T[row], lacks=True)
        if row in judged.index:
            line["beside FedAvg + FT"] = verdicts.ends(judged.difference[row], unit="")
            line["word"] = judged.tier[row]
        line["read"] = _read(known, row)
        for column, table in frames.items():
            if column != "accuracy" and row in table.index:
                line[column] = _mean(table.T[row])
        lines[row] = line | _spent(known, row)
    lines["label prior"] = {"accuracy": _mean(_prior(known))}
    out = _named(pd.DataFrame(lines).T.reindex(columns=COLUMNS).fillna(""))
    return out.loc[:, (out != "").any()]


def _numbers(known: Record) -> dict[str, pd.DataFrame]:
    # Further numbers of runs, a line a row and a column a seed.
    clients = known.per_client()
    out = {"accuracy": known.accuracies(), "served": known.accuracies("own")}
    worst = {key: float(spread(acc)["worst10"]) for key, acc in clients.items()}
    out |= {"worst tenth": known.table(worst), "balanced": known.metric("balanced")}
    for name, row in {"Local": LOCAL, "FedAvg + FT": REFERENCE}.items():
        shares = {
            (r, s): float(100 * (acc < clients[row, s] - BELOW).mean())
            for (r, s), acc in clients.items()
            if (row, s) in clients
        }
        out[f"below {name}, %"] = known.table(shares)
    return out


def _prior(known: Record) -> pd.Series:
    right, n = known.facts("prior"), known.samples
    seeds = [s for s in known.runs.seed.unique() if s in right]
    return pd.Series([float((100 * right[s] / n[s]).mean()) for s in seeds], dtype=float)


def _spent(known: Record, row: str) -> dict[str, str]:
    runs = known.runs[known.runs.row == row]
    n = len(next(iter(known.samples.values())))
    bytes_ = (runs.down + runs.up).mean() / n / 1e6
    out = {
        "gradients": runs.gradients.mean(),
        "+ FT": runs.extra.mean(),
        "CPU s": runs.cpu_s.mean(),
    }
    text = {name: f"{v:.0f}" if not np.isnan(v) else "" for name, v in out.items()}
    return text | {"MB": f"{bytes_:.1f}" if not np.isnan(bytes_) else ""}


def _read(known: Record, row: str) -> str:
    # When a row is read, as tuning chose.
    return _moment(row, str(known.runs.when[known.runs.row == row].iloc[0]))


def _moment(row: str, when: str) -> str:
    epochs = tuned_epochs(method_of(row), when)
    words = {"before": "served", "after": "after local training"}
    return words.get(when, f"{epochs} epoch{'s' * (epochs != 1)}")


def families(found: Found) -> pd.DataFrame:
    """The best row of each family beside the reference, a column a setting."""
    out: dict[str, dict[str, str]] = {}
    for name, names in FAMILIES.items():
        rows = [row for row in names.split() if row != REFERENCE]
        for s in found.records:
            judged = found.tiers(s)
            gains = {r: judged.difference[r].estimate for r in rows if r in judged.index}
            if gains:
                best = max(gains, key=lambda r: gains[r])
                text = f"{said(best)} {gains[best]:+.1f}"
                won = judged.tier[best] == tiers.BETTER
                out.setdefault(name, {})[s] = f"**{text}**" if won else text
    return pd.DataFrame(out).T.rename_axis("family").fillna("")


def choices(found: Found, name: str) -> pd.DataFrame:
    """What tuning chose in a setting, and what of it lies at an edge of what was drawn."""
    known, lines = found.records[name], {}
    for row, mine in known.tuning.groupby("row", sort=False):
        chosen = mine[mine.chosen != ""]
        lost = mine[mine.seed == mine.seed.min()].status.str.partition(":")[0].value_counts()
        line = {"diverged": str(lost.get("failed", "")), "refused": str(lost.get("refused", ""))}
        if len(chosen):
            draw, when = int(chosen.draw.iloc[0]), str(chosen.chosen.iloc[0])
            values = _values(chosen.change.iloc[0])
            line["chosen"] = ", ".join(
                f"{n} {v:g}" if _is_number(v) else f"{n} {v}" for n, v in values
            )
            line["chosen"] = line["chosen"] or "its paper's"
            line |= {
                "draw": str(draw),
                "read": _read(known, str(row)) if row in known.lines() else when,
            }
            line["validation"] = _mean(chosen[f"val.{when}"])
            line["at an edge"] = ", ".join(f"{n} ({end})" for n, end in edges(mine).items())
        lines[row] = line
    columns = ["draw", "chosen", "read", "validation", "at an edge", "diverged", "refused"]
    return _named(pd.DataFrame(lines).T.reindex(columns=columns).fillna(""))


def _values(change: str) -> list[tuple[str, Any]]:
    # What a draw changes, by short names.
    out = []
    for name, value in json.loads(change).items():
        if name == "finetune":
            stage = value[0] if isinstance(value, list) else value
            out.append(("FT lr", stage["lr"]))
        elif isinstance(value, dict):
            out += [(f"own {n}" if n in FIELDS else n, v) for n, v in value.items()]
        elif name != "init_from":
            out.append((name, value))
    return out


def edges(tuned: pd.DataFrame) -> dict[str, str]:
    """Numbers that tuning chose for a row at an end of what it drew: {name: least or largest}.

    Parameters
    ----------
    tuned : pd.DataFrame
        The row's lines of `Record.tuning`.
    """
    drawn: dict[str, list[float]] = {}
    for change in tuned[tuned.seed == tuned.seed.min()].change:
        for name, value in _values(change):
            if _is_number(value):
                drawn.setdefault(name, []).append(value)
    chosen = tuned[tuned.chosen != ""].change
    ends = {}
    for name, value in _values(chosen.iloc[0]) if len(chosen) else []:
        of = drawn.get(name, [])
        if len(set(of)) > 2 and value in (min(of), max(of)):
            ends[name] = "least" if value == min(of) else "largest"
    return ends


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def sceptical(found: Found) -> pd.DataFrame:
    """Mean ranks under other ways to read the same runs."""
    return _named(sceptic.mean_ranks(found).map(lambda v: "" if np.isnan(v) else f"{v:.1f}"))


def sceptical_words(found: Found) -> pd.DataFrame:
    """How many pairs of method and setting have each word, by reading."""
    counts = sceptic.counts(found)
    counts.insert(0, "what changes", [sceptic.SAYS.get(str(n), "nothing") for n in counts.index])
    return counts.rename_axis("reading")


def _mean(values: pd.Series, lacks: bool = False) -> str:
    # The mean of those that did not diverge, and what is lacking.
    there, known = values.dropna(), values[np.isfinite(values)]
    parts = [f"{known.mean():.1f}"] if len(known) else []
    if lacks and len(known) < len(there):
        parts.append(f"({len(there) - len(known)} of {len(there)} diverged)")
    if lacks and len(there) < len(values):
        parts.append(f"({len(there)} of {len(values)} seeds)")
    return " ".join(parts)


def _named(frame: pd.DataFrame) -> pd.DataFrame:
    names = [
        f"{said(str(row))} + FT" if row == REFERENCE else said(str(row)) for row in frame.index
    ]
    return frame.set_axis(names, axis=0).rename_axis("method")
