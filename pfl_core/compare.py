"""Every method of the five papers side by side: one data set, one model, one budget, one selection rule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from pfl_core import checks, presets, report, runs, store
from pfl_core.experiments import Experiment


def experiments(
    dataset: str, methods: Iterable[str] = (), seeds: Iterable[int] = (0, 1), **changes: Any
) -> list[Experiment]:
    """The runs of the comparison (views have none of their own); `changes` to the common settings of `presets.COMPARISON`."""
    wanted = list(dict.fromkeys(report.VIEWS.get(m, m) for m in methods)) or list(presets.COMPARED)
    for m in wanted:
        checks.known("method of the comparison", m, [*presets.COMPARED, *report.VIEWS])
    base = Experiment(**presets.COMPARISON | {"dataset": dataset}).but(**changes)
    out = []
    for m in wanted:
        e = base.but(**presets.COMPARED[m](base))
        out += [
            e.but(
                seed=s,
                tags={"paper": "methods", "artefact": "comparison", "row": m, "column": dataset, "profile": "quick"},
            )
            for s in seeds
        ]
    return out


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a row of the comparison: accuracy before / after local training at the best validation round, before at the last round
    (mean ± sd over seeds), worst tenth of clients, traffic a client and visit, and seconds of the run."""
    out = {}
    names = list(dict.fromkeys(rows.row))
    for v, source in report.VIEWS.items():
        if source in names:
            names.insert(names.index(source) + 1, v)
    for m in names:
        own = rows[rows.row == report.VIEWS.get(m, m)]
        main = "after" if m in report.VIEWS else "before"
        total = own[(own["mean"] == "total") & (own["round"] == own["round"].max())].groupby("metric").value.mean()
        cells = {
            "before": "" if m in report.VIEWS else _cell(report.pick(own, "best_val", "before")),
            "after": _cell(report.pick(own, "best_val", "after")),
            "last": _cell(report.pick(own, "last", main)),
            "worst tenth": _cell(report.pick(own, "best_val", main, metric="acc_worst10")),
        }
        visits = total["client_visits"]
        cells["down, kB"], cells["up, kB"] = (
            f"{total[f'{d}_bytes'] / visits / 1000:.0f}" for d in ("download", "upload")
        )
        cells["seconds"] = f"{own.groupby('run').wall_s.first().mean():.0f}"
        out[m] = cells
    return pd.DataFrame(out).T.rename_axis("method")


def _cell(picked: pd.DataFrame) -> str:
    return report.summary(picked.assign(row="", column="")).iloc[0, 0]


def run(dataset: str, **how: Any) -> pd.DataFrame:
    """Compute (or find) all runs, write runs/results/methods.quick-<dataset>.csv and the table beside it; returns the table."""
    rows = runs.sweep(experiments(dataset, **how))
    out = store.runs_root() / "results" / f"methods.quick-{dataset}.csv"
    checks.make_folder(out.parent)
    keep = (rows["mean"] != "pooled") & rows.metric.isin(
        ["acc_pct", "acc_worst10", "download_bytes", "upload_bytes", "client_visits"]
    )
    report.save_rows(rows[keep], out)
    shown = table(rows)
    report.save_table(shown, store.runs_root() / "figures" / "methods" / f"quick-{dataset}" / "comparison")
    return shown
