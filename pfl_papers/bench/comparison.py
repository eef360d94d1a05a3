"""All methods of the five papers side by side: equal data, network, budget, tuning, selection."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from pfl_core.analysis import plots, select, verdicts
from pfl_core.analysis.noise import Interval
from pfl_core.engine.finetune import moments
from pfl_core.experiments import lookup
from pfl_core.experiments import run as runs
from pfl_core.experiments import sweep as sweeps
from pfl_core.experiments import tune as tuning
from pfl_core.experiments.experiment import Experiment, grid
from pfl_core.experiments.metrics import validated
from pfl_core.util import checks
from pfl_papers import places
from pfl_papers.compare import plan, report
from pfl_papers.compare.costs import gradients, run_hours
from pfl_papers.compare.plan import START
from pfl_papers.evidence import committed, diverged
from pfl_papers.evidence import contrasts as evidence
from pfl_papers.evidence.contrasts import READ_AFTER
from pfl_papers.papers import presets

TUNED = "fine-tuned"  # the column of rows that are


# -- the runs --------------------------------------------------------------------------------------


def chosen(methods: Iterable[str] = ()) -> list[str]:
    """Rows of the comparison in the order of its table, all or those named.

    Raises
    ------
    ValueError
        For an unknown one.
    """
    views = {v: [w for w, source in READ_AFTER.items() if source == v] for v in presets.COMPARED}
    every = [row for m in presets.COMPARED for row in (m, *views[m])]
    wanted = list(methods)
    for row in wanted:
        checks.known("method of the comparison", row, every)
    return [row for row in every if row in wanted] if wanted else every


def common(dataset: str, profile: str = "medium", **changes: Any) -> Experiment:
    """The settings that all rows share; `changes` to those of `presets.COMPARISON`.

    Raises
    ------
    ValueError
        For an unknown profile.
    """
    checks.known("profile of the comparison", profile, presets.SCALES)
    fields: dict[str, Any] = presets.COMPARISON | {"dataset": dataset}
    usual = Experiment(**fields)
    return usual.but(**presets.SCALES[profile]).but(**changes)


def grid_of(method: str) -> presets.Grid:
    """What of a row is tuned, with its source: `.choices()` are the nine changes that are tried."""
    checks.known("method of the comparison", method, presets.GRIDS)
    return presets.GRIDS[method]


def grids() -> pd.DataFrame:
    """The grids of all rows. Columns: rates, tuned (a parameter's values), source, read."""
    out = {}
    for row in chosen():
        g = grid_of(row)
        values = {"rates": (g.rate, g.rates), "tuned": (g.own, g.values)}
        out[row] = {column: _values(*v) for column, v in values.items()}
        out[row] |= {"source": g.source, "read": when(row)}
    return pd.DataFrame(out).T.rename_axis("method")


def when(row: str) -> str:
    """When a row's model is scored, as its paper does: "before" or "after" local training, or after
    the last epoch of its fine-tuning, "tuned 15".
    """
    if row in presets.FINETUNED:
        return moments(presets.FINETUNED[row])[-1]
    return "after" if row in presets.AFTER else "before"


def cell(row: str, shared: Experiment, choice: dict[str, Any] | None = None) -> Experiment:
    """A row's run with one choice of its grid; what it starts from has the same learning rate."""
    choice = grid_of(row).choices()[4] if choice is None else choice
    rate = {n: v for n, v in choice.items() if n == "lr"}
    own = presets.COMPARED[READ_AFTER.get(row, row)]
    return shared.but(**own(shared.but(**rate))).but(**choice)


def shorter(row: str, shared: Experiment) -> Experiment:
    """`shared` for tuning: a part of the rounds and of the images (`presets.TUNING`).

    It is read at the end and half-way.
    """
    rounds = math.ceil(shared.rounds * presets.TUNING["rounds"])
    most = int(presets.TUNING["max_samples"])
    # Rows of one method, read at different times, share their runs.
    both = when(row) == "after" or row in READ_AFTER.values()
    return shared.but(
        rounds=rounds,
        eval_every=math.ceil(rounds / 2),
        eval_after=both,
        max_samples=min(shared.max_samples or most, most),
    )


def candidates(row: str, shared: Experiment) -> tuple[Experiment, list[dict[str, Any]]]:
    """What `tune` gets for a row: an Experiment, and the changes to try."""
    short = shorter(row, shared)
    tags = {"paper": "methods", "artefact": "tune", "column": row}
    changes = []
    for choice in grid_of(row).choices():
        start = cell(row, short, choice).init_from
        changes.append(choice | ({"init_from": start} if start else {}))
    return cell(row, short, {}).but(tags=tags), changes


def tuned(row: str, shared: Experiment, **how: Any) -> tuple[dict[str, Any], pd.DataFrame]:
    """A row's best choice by validation accuracy, read at the row's own time; and all nine's rows.

    On the seed of `shared`. Rows are labelled with the row of the comparison, their column is the
    choice as JSON.

    Parameters
    ----------
    row : str
    shared : Experiment
        What all rows have in common.
    **how
        For `sweep`.
    """
    e, changes = candidates(row, shared)
    best, rows = tuning.tune(e, changes, when=when(row), **how)
    at = next(i for i, c in enumerate(changes) if e.but(**c).plain() == best.plain())
    choices = grid_of(row).choices()
    labels = {
        json.dumps(c, sort_keys=True, default=lambda v: v.id): json.dumps(k)
        for c, k in zip(changes, choices, strict=True)
    }
    return choices[at], rows.assign(row=row, column=rows.row.map(labels))


def experiments(
    dataset: str,
    methods: Iterable[str] = (),
    seeds: Iterable[int] = (0, 1),
    profile: str = "medium",
    choices: dict[str, dict[str, Any]] | None = None,
    **changes: Any,
) -> list[Experiment]:
    """The runs of the comparison, each after what it starts from, on its own seed.

    Parameters
    ----------
    dataset : str
    methods : iterable of str
        Rows of the comparison, by default all.
    seeds : iterable of int
    profile : str
    choices : dict of dict, optional
        {row: what tuning chose}, by default the middle of its grid.
    **changes
        To the common settings.
    """
    shared, out = common(dataset, profile, **changes), []
    for row in chosen(methods):
        base = cell(row, shared, (choices or {}).get(row))
        # What a run starts from gets its seed, too.
        for e in grid(base, {row: {}}, {dataset: {}}, seeds):
            e = e.but(tags={"paper": "methods", "artefact": "comparison", "profile": profile})
            out += plan.with_sources(e)
    return out


def run(
    dataset: str,
    *,
    methods: Iterable[str] = (),
    seeds: Iterable[int] = (0, 1),
    profile: str = "medium",
    changes: dict[str, Any] | None = None,
    **how: Any,
) -> pd.DataFrame:
    """Tune and run all rows, or find in the store what is done; returns the table.

    Prints each grid and what was chosen. Keeps rows and runs in
    runs/results/methods.<profile>-<dataset>/, tables and picture in runs/figures/methods/.

    Parameters
    ----------
    dataset, methods, seeds, profile
        As for `experiments`.
    changes : dict, optional
        To the common settings.
    **how
        For `sweep`: device, jobs, ...
    """
    shared, choices, parts = common(dataset, profile, **changes or {}), {}, []
    for row in chosen(methods):
        choices[row], rows = tuned(row, shared, **how)
        parts.append(diverged.ended(rows).assign(profile=profile))
        print(_said(row, parts[-1]))
    cells = experiments(dataset, methods, seeds, profile, choices, **changes or {})
    rows = diverged.ended(sweeps.sweep(cells, **how))
    spent = {e.id: gradients(e) for e in cells}
    heads = rows.drop_duplicates(["run", "row"])
    blank = dict(rounds=0, when="", split="", average="derived")
    counted = heads.assign(**blank, metric="gradients", value=heads.key.map(spent))
    every = pd.concat([*parts, rows, counted], ignore_index=True)
    committed.save(every, "methods", profile, dataset)
    folder = places.figures_folder() / "methods" / places.label(profile, dataset)
    for name, frame in tables(every).items():
        report.save_table(frame, folder / name)
    plots.save(*drawn(every), folder / "clients")
    return tables(every)["comparison"]


# -- what it costs ---------------------------------------------------------------------------------


def hours(
    dataset: str,
    methods: Iterable[str] = (),
    seeds: Iterable[int] = (0, 1),
    profile: str = "medium",
    device: str = "auto",
    changes: dict[str, Any] | None = None,
) -> pd.DataFrame:
    """Runs of tuning and of the comparison, and hours of those that are not there, a line a row.

    The last line is all. From the seconds of one step, measured on this computer; forward passes of
    evaluations count a third of a step. A row's choice is not known before it is tuned: the middle
    of its grid stands for it.
    """
    device, shared, lines = runs.pick_device(device), common(dataset, profile, **changes or {}), {}
    for row in chosen(methods):
        e, tried = candidates(row, shared)
        tunes = [e.but(**c) for c in tried]
        finals = experiments(dataset, [row], seeds, profile, **changes or {})
        todo = [c for c in (*tunes, *finals) if not lookup.is_there(c)]
        # Rates, the outer axis, change no hours.
        some = [run_hours(c, device) for c in tunes[: len(grid_of(row).values)]]
        cycle = zip(tunes, itertools.cycle(some), strict=False)
        lines[row] = {
            "tuning": len(tunes),
            "runs": len(finals),
            "there": len(tunes) + len(finals) - len(todo),
            "gradients": round(gradients(finals[-1]), 1),
            "hours of tuning": sum(h for c, h in cycle if c in todo),
            "hours of runs": sum(run_hours(c, device) for c in finals if c in todo),
        }
    out = pd.DataFrame(lines).T.rename_axis("method")
    out.loc["all"] = out.sum()
    out.loc["all", "gradients"] = float("nan")
    return out.astype({n: int for n in ("tuning", "runs", "there")}).round(2)


# -- tables ----------------------------------------------------------------------------------------


def tables(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """All tables of the comparison by the names of their files, the best row first."""
    found = {"comparison": table(rows), "costs": costs(rows), "choices": choices_table(rows)}
    order = ranked(rows)
    return {
        name: frame.loc[[r for r in order if r in frame.index]] for name, frame in found.items()
    }


def ranked(rows: pd.DataFrame) -> list[str]:
    """Rows of the comparison by their mean accuracy, each at its own time, the best one first."""
    means = read(rows).groupby("row", sort=False).value.mean()
    return means.sort_values(ascending=False, kind="stable").index.tolist()


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Accuracies, a line a row of the comparison: in %, mean ± sd over seeds.

    before, after: local training, at the best validation round, with the rank among all rows; and
    fine-tuned, where a row is. A row that lacks seeds says on how many it diverged. read: the
    column that its paper reports. served: what a model has just gone through when it is read.
    behind: the first row, by how many points (`behind`). last: at the last round. spread: standard
    deviation over clients. worst tenth: mean of these clients.
    """
    rows, out, ranked = rows[rows.artefact == "comparison"], {}, {}
    gaps, both = behind(rows), ("before", "after")
    for row in _listed(rows):
        own, main = rows[rows.row == row], when(row)
        column = TUNED if row in presets.FINETUNED else main
        lost, every = rows.seed.nunique() - own.seed.nunique(), rows.seed.nunique()
        some = f", diverges ({lost} of {every})" if lost else ""
        times = [t for t in both if t == main or t not in _blank(row)]
        picked = {t: select.pick(own, "best_val", t) for t in times}
        ranked[row] = {t: p.value.mean() for t, p in picked.items()}
        cells = {"read": column, "served": presets.SERVED.get(row, "averaged")}
        cells |= {t: _cell(picked[t]) + some if t in picked else "" for t in both}
        if column == TUNED:
            cells[TUNED] = _cell(select.pick(own, "best_val", main)) + some
        cells |= {"behind": gaps[row], "last": _cell(select.pick(own, "last", main))}
        for name, metric in (("spread", "acc_sd"), ("worst tenth", "acc_worst10")):
            cells[name] = _cell(read(own, metric))
        out[row] = cells
    frame = pd.DataFrame(out).T.rename_axis("method").fillna("")
    means = pd.DataFrame(ranked).T.reindex(columns=["before", "after"])
    ranks = means.rank(ascending=False, method="min")
    for t in ("after", "before"):
        shown = ranks[t].map(lambda v: "" if pd.isna(v) else f"{v:.0f}")
        frame.insert(list(frame).index(t) + 1, f"rank {t}", shown)
    return frame


def _listed(rows: pd.DataFrame) -> list[str]:
    # Rows of the table, without what they start from.
    return [row for row in dict.fromkeys(rows.row) if not row.endswith(START)]


def read(rows: pd.DataFrame, metric: str = "acc_pct") -> pd.DataFrame:
    """One number a run: at the best validation round, at the row's own time, of test samples.

    Parameters
    ----------
    rows : DataFrame
        Of the comparison, as `run` keeps them.
    metric : str

    Returns
    -------
    DataFrame
        As `select.pick` returns it.
    """
    rows = rows[rows.artefact == "comparison"]
    parts = [
        select.pick(rows[rows.row == row], "best_val", when(row), metric=metric)
        for row in _listed(rows)
    ]
    return pd.concat(parts, ignore_index=True)


def behind(rows: pd.DataFrame) -> pd.Series:
    """`gaps` as text: "-1.4 [-2.9, 0.2]"; "" where there is none."""
    return pd.Series({row: _gap(found) for row, found in gaps(rows).items()}, dtype=object)


def _gap(found: Interval | None) -> str:
    if found is None:
        return ""
    return verdicts.ends(found, unit="", sign="")


def gaps(rows: pd.DataFrame) -> dict[str, Interval | None]:
    """By how many points each row differs from the first one, each at its own time.

    With the 95 % interval of the difference, seed by seed; noise is pooled over rows, without those
    that serve all clients one model (`noise.Column`). A row that lacks a seed cannot be the
    first; None for the first, and for a row that shares no seed with it.
    """
    names: list[str] = _listed(rows)
    out: dict[str, Interval | None] = {}
    found = read(rows).pivot(index="row", columns="seed", values="value").loc[names]
    most = found.count(axis=1)
    first = names[found.mean(axis=1).where(most == most.max()).argmax()]
    column = evidence.column_of(found)
    for row in names:
        known = row != first and found.loc[[row, first]].notna().all().any()
        out[row] = column.difference(row, first) if known else None
    return out


def costs(rows: pd.DataFrame) -> pd.DataFrame:
    """What each row spends, a line a row of the comparison, with what its run starts from.

    Returns
    -------
    DataFrame
        gradients (over one batch, of a client and round), down and up (traffic of a client and
        visit), seconds (of a run).
    """
    rows = rows[rows.artefact == "comparison"]
    out = {row: _spent(rows[rows.row.isin([row, row + START])], row) for row in _listed(rows)}
    return pd.DataFrame(out).T.rename_axis("method")


def drawn(rows: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """Accuracies of clients, from the worst to the best, at each row's own time, best row first.

    Returns the picture, and its numbers: mean over seeds.
    """
    metrics = ("acc_pct", "acc_worst10", "acc_min", "acc_max")
    means = {m: read(rows, m).groupby("row", sort=False).value.mean() for m in metrics}
    frame = pd.DataFrame(means).sort_values("acc_pct", ascending=False, kind="stable")
    fig, (ax,) = plots.panels(1, size=(5.2, 0.6 + 0.19 * len(frame)))
    plots.ranges(frame, ax)
    return fig, frame.rename_axis("row").reset_index()


def _blank(row: str) -> tuple[str, ...]:
    # A method and its view are two rows, tuned each for its own time; models that nobody is meant
    # to use have no number.
    if row in presets.FINETUNED:
        return ("before", "after")
    if row in READ_AFTER:
        return ("before",)
    return ("after",) if row in READ_AFTER.values() or row in presets.UNSERVED_AFTER else ()


def _spent(rows: pd.DataFrame, row: str) -> dict[str, str]:
    last = rows[rows["average"] == "total"]
    last = last[last["rounds"] == last.groupby("run")["rounds"].transform("max")]
    # What it starts from is added.
    total = last.groupby(["row", "metric"]).value.mean().groupby("metric").sum()
    own = rows[(rows.metric == "gradients") & (rows.row == row)].value
    visits = total["client_visits"]
    seconds = rows.drop_duplicates(["row", "run"]).groupby("row").wall_s.mean().sum()
    return {
        "gradients": f"{own.mean():.0f}" if len(own) else "",
        "down, kB": f"{total['download_bytes'] / visits / 1000:.0f}",
        "up, kB": f"{total['upload_bytes'] / visits / 1000:.0f}",
        "seconds": f"{seconds:.0f}",
    }


def _cell(picked: pd.DataFrame) -> str:
    return str(select.summary(picked.assign(row="", column="")).iloc[0, 0])


def choices_table(rows: pd.DataFrame) -> pd.DataFrame:
    """What tuning chose, a line a row: rate, value of the parameter, validation accuracy in %.

    worst of nine: the accuracy of the worst choice, or how many diverged. at the edge: which of
    both lies at the edge of its grid, so that a wider one might give more.
    """
    rows, out = rows[rows.artefact == "tune"], {}
    for row in dict.fromkeys(rows.row):
        best = validated(rows[rows.row == row], ["column"], when(row))
        g, choice = grid_of(row), json.loads(str(best.idxmax()))
        got = {name: _of(choice, name) for name in (g.rate, g.own)}
        at = [n for n, vs in ((g.rate, g.rates), (g.own, g.values)) if got[n] in (vs[0], vs[-1])]
        every = len(g.choices())
        lost = every - len(best)
        out[row] = {
            "rate": _values(g.rate, [got[g.rate]]),
            "chosen": _values(g.own, [got[g.own]]),
            "validation": f"{best.max():.2f}",
            "worst of nine": f"diverges ({lost} of {every})" if lost else f"{best.min():.2f}",
            "at the edge": ", ".join(map(_short, at)),
        }
    return pd.DataFrame(out).T.rename_axis("method")


def _of(choice: dict[str, Any], name: str) -> float:
    field, _, key = name.partition(".")
    return choice[field][key] if key else choice[field]


def _values(name: str, values: Iterable[float]) -> str:
    return f"{_short(name)} " + ", ".join(f"{v:g}" for v in values)


def _short(name: str) -> str:
    # A method's own rate is that of its hypernetworks; the other one is of the clients.
    if name == "method_args.lr":
        return "hypernetwork lr"
    return name.removeprefix("method_args.")


def _said(row: str, tried: pd.DataFrame) -> str:
    g, got = grid_of(row), choices_table(tried).T.to_dict()[row]
    edge = f", {got['at the edge']} at the edge" if got["at the edge"] else ""
    grid = f"{_values(g.rate, g.rates)} x {_values(g.own, g.values)}"
    found = f"validation {got['validation']} %, worst {got['worst of nine']}{edge}"
    return f"{row}: {grid} -> {got['rate']}, {got['chosen']} ({found})"
