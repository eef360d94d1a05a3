"""One paper's notebook from the inside: its parameters checked, its sweeps, figures and rows in one place."""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from pfl_core.analysis import plots
from pfl_core.data import pools as data
from pfl_core.engine import probes
from pfl_core.experiments import committed, metrics, store
from pfl_core.experiments import run as runs
from pfl_core.experiments import sweep as sweeps
from pfl_core.experiments.experiment import Experiment
from pfl_core.methods.base import METHODS
from pfl_core.papers import base as papers
from pfl_core.papers import report
from pfl_core.papers.base import Paper, Probed, Scope, Sweep
from pfl_core.util import checks, paths
from pfl_core.util.version import __version__

SELECTED = {
    "last": "last round",
    "last10": "mean of the last ten evaluations",
    "best_val": "best validation round",
}
SELECTED["best_test"] = "best test round (optimistic: test data choose it)"


def check(
    known: Iterable[str],
    *,
    profile: str = "quick",
    datasets: list[str] | None = None,
    methods: list[str] | None = None,
    seeds: list[int] | None = None,
    artefacts: list[str] | None = None,
    recompute: bool = False,
) -> None:
    """ValueError for a parameter of a notebook that is unknown or of the wrong type; `known` are the artefacts it may name."""
    checks.known("profile:", profile, papers.PROFILES)
    lists = dict(
        datasets=(datasets, data.list_datasets()), methods=(methods, (*METHODS, *report.VIEWS))
    )
    for name, (value, legal) in (lists | dict(artefacts=(artefacts, known))).items():
        if value is not None and not isinstance(value, list):
            some = (
                f"give a list, such as {[next(iter(legal))]}; an empty list means the profile's own"
            )
            raise ValueError(f"{name}={value!r}: {some}")
        for v in value or []:
            checks.known(f"{name}:", v, legal)
    if not isinstance(recompute, bool):
        got = type(recompute).__name__
        raise ValueError(
            f"recompute={recompute!r}: got {got}, allowed is True or False (not a string)"
        )
    whole = isinstance(seeds, list) and all(type(s) is int and s >= 0 for s in seeds)
    if seeds is not None and not whole:
        raise ValueError(f"seeds={seeds!r}: give a list of integers >= 0")


def asked(paper: Paper, *, profile: str = "quick", recompute: bool = False, **lists: Any) -> Scope:
    """The Scope that a notebook's parameters ask for, checked; what it finds finished is in the store or, unless recompute, committed."""
    check(paper.artefacts, profile=profile, recompute=recompute, **lists)
    some = {name: tuple(v or ()) for name, v in lists.items()}
    return Scope(profile, **some, finished=functools.partial(finished, recompute=recompute))


def finished(cells: list[Experiment], recompute: bool) -> pd.DataFrame | None:
    """Rows of Experiments that are all finished, in the store or (unless recompute) committed; None if one is not. Trains nothing."""
    try:
        found = [store.load_result(paths.store_folder() / e.id, e, aside=False) for e in cells]
        there = all(
            r or (not recompute and sweeps.is_there(e, False))
            for r, e in zip(found, cells, strict=True)
        )
    except data.DatasetMissing:
        return None
    return sweeps.sweep(cells, recompute=recompute) if there else None


class Study:
    """The notebook of one paper: `show` an artefact, or `run` it and make more of its rows; `claims` and `finish` at the end.

    profile "smoke" | "quick" | "medium" | "paper"; datasets, methods, seeds, artefacts: what to restrict it to, empty for the
    profile's own; recompute: train even where committed rows exist. `paper` is a Paper, or its name. Raises ValueError for an unknown or
    ill-typed parameter, before anything runs.
    """

    def __init__(
        self, paper: str | Paper, *, recompute: bool = False, device: str = "auto", **how: Any
    ):
        self.began = time.monotonic()
        self.paper = papers.paper(paper)
        self.scope = asked(self.paper, recompute=recompute, **how)
        self.recompute = recompute
        self.device, self.wanted = (
            runs.pick_device(device),
            device,
        )  # on a cluster, "auto" is what each node has
        self.folder = (
            paths.runs_root()
            / "figures"
            / self.paper.key
            / f"{self.scope.profile}-{self.scope.label}"
        )
        self.ran: dict[tuple[str, str | None], pd.DataFrame] = {}
        self.collected: list[pd.DataFrame] = []
        plt.rcParams.update({"font.size": 8, "axes.titlesize": 9, "figure.dpi": 72})
        pd.set_option("display.max_colwidth", None)  # claims are sentences

    def base(self, artefact: str, dataset: str, **changes: Any) -> Experiment | None:
        """The Experiment that an artefact's runs vary, over the data that serve for the paper's `dataset`; None if it is not run here."""
        return self.scope.base(self.paper, artefact, dataset, **changes)

    # -- runs ------------------------------------------------------------------------------------------------------------

    def run(self, artefact: str, part: str | None = None) -> pd.DataFrame:
        """Rows of an artefact's runs (of the sweeps called `part`), those derived from them at the end; each is run once.

        What chooses its parameters is run first. "tuning" is an artefact, too. An empty frame, and why, if it is not run here.
        """
        if (artefact, part) not in self.ran:
            self.ran[artefact, part] = self._run(artefact, part)
        return self.ran[artefact, part]

    def _run(self, artefact: str, part: str | None) -> pd.DataFrame:
        tuning = artefact == papers.TUNING
        if not tuning and (why := self.paper.missing(self.scope, artefact)):
            print(f"{artefact}: {why}")
            return pd.DataFrame(columns=metrics.ROW_COLUMNS)
        first = [
            s for s in self.paper.planned(self.scope, artefact, part) if s.artefact == papers.TUNING
        ]
        rows = self._sweep(first)
        if not tuning:  # asked again: what tuning chose is known now
            planned = self.paper.planned(self.scope, artefact, part)
            rows = self._sweep([s for s in planned if s.artefact != papers.TUNING])
        numbers = None if tuning else self.paper.artefacts[artefact].numbers
        if numbers is None or rows.empty:
            return rows
        made = self.derive(rows, numbers(rows, functools.partial(self.probed, rows)))
        return pd.concat([rows, made], ignore_index=True) if len(made) else rows

    def _sweep(self, planned: list[Sweep]) -> pd.DataFrame:
        # Small networks leave cores idle in one process; smoke's runs are over before another process has started.
        many = torch.cuda.device_count() if self.device == "cuda" else min(8, os.cpu_count() or 1)
        jobs = 1 if self.scope.profile == "smoke" else many
        keep = self.scope.full  # so that a column whose contrasts still move can go on
        cells = [e for s in planned for e in s.experiments()]
        frame = sweeps.sweep(
            cells, recompute=self.recompute, device=self.wanted, jobs=jobs, keep_state=keep
        )
        self.collected.append(frame)
        return frame

    def show(self, artefact: str, part: str | None = None, **how: Any) -> None:
        """Run an artefact and display what its `Artefact.show` names; `how` goes to `compare` and `standing`, or `curves` and `spread`."""
        from IPython.display import display

        rows, about = self.run(artefact, part), self.paper.artefacts[artefact]
        for kind in about.show:
            if kind == "compare":
                shown = [self.compare(artefact, rows, metric=m, **how) for m in about.metrics]
            elif kind == "standing":
                shown = [self.standing(artefact, rows, **how)]
            else:
                shown = [getattr(self, kind)(artefact, rows, about.said, **how)]
            for table in shown:
                if table is not None:
                    display(table)

    # -- figures ---------------------------------------------------------------------------------------------------------

    def figure(
        self,
        name: str,
        fig: Figure,
        frame: pd.DataFrame,
        said: str = "",
        rows: pd.DataFrame | None = None,
    ) -> None:
        """Save a figure with its numbers below runs/ and show it; the caption names profile, data and seeds (of `rows`) and `said`."""
        from IPython.display import Image, display

        rows = frame if rows is None else rows
        used = (
            report.data_sets(rows)
            if "run" in rows
            else ", ".join(rows.get("dataset", [self.scope.label])[:1])
        )
        seeds = rows.seed.nunique() if "seed" in rows else 1
        plots.note(
            fig,
            f"{papers.title(name)}, profile {self.scope.profile}, data {used}, {seeds} seed{'s' * (seeds > 1)}. {said}".strip(),
        )
        plots.save(fig, frame, self.folder / name)
        display(Image(data=plots.compact(fig)))
        plt.close(fig)

    def curves(
        self, name: str, rows: pd.DataFrame, said: str = "", columns: int = 3, when: str = "before"
    ) -> pd.DataFrame | None:
        """Figure `name`: test accuracy against the round, a panel a column, a line a row; returns the last round's numbers."""
        return self._panels(name, rows, plots.curves, ["acc_pct"], said, columns, when)

    def spread(
        self, name: str, rows: pd.DataFrame, said: str = "", columns: int = 3, when: str = "before"
    ) -> pd.DataFrame | None:
        """As `curves`, with the spread over clients: band +-1 sd, thin lines worst and best client; returns the last sd."""
        return self._panels(
            name,
            rows,
            plots.spread,
            ["acc_pct", "acc_sd", "acc_min", "acc_max"],
            said,
            columns,
            when,
        )

    def _panels(self, name, rows, draw, metrics, said, columns, when) -> pd.DataFrame | None:
        if rows.empty:
            return None
        kept = rows[
            (rows.split == "test")
            & (rows.when == when)
            & (rows["mean"] == "client")
            & rows.metric.isin(metrics)
        ]
        if kept.empty:
            raise ValueError(
                f"{name}: no test accuracy at when={when!r}; evaluated are {sorted(set(rows.when) - {''})}"
            )
        names = list(dict.fromkeys(kept.column))
        fig, axes = plots.panels(len(names), columns)
        for ax, c in zip(axes, names, strict=True):
            draw(kept[kept.column == c], ax).set_title(c)
        self.figure(name, fig, kept, said)
        return report.summary(
            report.pick(rows, "last", when, metric=metrics[1] if len(metrics) > 1 else "acc_pct")
        )

    def show_partitions(
        self, base: Experiment | None, columns: dict[str, dict], name: str = "partition"
    ) -> None:
        """Figure `name`: who holds which labels of the training data, a panel for each change to `base`."""
        if base is None:
            return
        fig, axes = plots.panels(len(columns))
        frames, seed = [], self.scope.seeds_of(self.paper, base.tags["artefact"])[0]
        for ax, (label, changes) in zip(axes, columns.items(), strict=True):
            counts = committed.label_counts(base.but(**changes, seed=seed))
            plots.label_distribution(counts, ax).set_title(label)
            k, c = counts.nonzero()
            frames.append(
                pd.DataFrame({"column": label, "client": k, "class": c, "count": counts[k, c]})
            )
        self.figure(
            name,
            fig,
            pd.concat(frames).assign(dataset=base.dataset),
            "Area: number of training samples.",
        )

    # -- tables ----------------------------------------------------------------------------------------------------------

    def compare(
        self,
        table: str,
        rows: pd.DataFrame,
        *,
        own: str = "",
        metric: str = "acc_pct",
        digits: int = 0,
        **how: Any,
    ) -> pd.DataFrame:
        """Table `table`: reported beside reproduced (see `report.compare`); prints its caption.

        digits: decimals shown, by default the artefact's.
        """
        got = report.compare(rows, self.paper, table, own=own, metric=metric, **how)
        rule = self.paper.report | how
        if metric == "acc_pct" and rule["select"] != "last" and len(rows):
            last = report.reproduced(rows, self.paper, **how | {"select": "last"})
            means = last.groupby(["column", "row"]).value.mean().rename("last")
            got = got.merge(means, left_on=["column", "row"], right_index=True, how="left")
        plain = metric == "acc_pct"
        title = papers.title(table) + ("" if plain else f", {metric}")
        print(self._caption(title, rows, got, rule if plain else {}))
        shown = report.wide(got, digits or self.paper.artefacts[table].digits)
        return self.table(table if plain else f"{table}.{metric}", shown)

    def _caption(
        self, title: str, rows: pd.DataFrame, got: pd.DataFrame, rule: dict[str, str]
    ) -> str:
        ran = got[got.reproduced.notna()]
        parts = [title, f"profile {self.scope.profile}"]
        if len(ran):
            instead = " in place of the paper's" if self.scope.label == "digits" else ""
            parts += [
                f"data {report.data_sets(rows)}{instead}",
                f"{ran.n.max()} seed{'s' * bool(ran.n.max() > 1)}",
            ]
        if rule:
            when = {"before": "before local training", "after": "after local training"}[
                rule["when"]
            ]
            odd = "".join(f", {r} {w}" for r, w in self.paper.when.items() if r in set(ran.row))
            parts.append(f"{SELECTED[rule['select']]}, {when}{odd}, {rule['mean']} mean")
        if missing := [c for c in dict.fromkeys(got.column) if c not in set(ran.column)]:
            parts.append(f"not run at {self.scope.profile}: {'; '.join(missing)}")
        return ". ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 2 else ", ".join(parts)

    def clients(self, rows: pd.DataFrame, **how: Any) -> pd.DataFrame:
        """Test accuracy of every client at the round that is reported: row, column, seed, client, acc_pct, n."""
        out = []
        for v in report.reproduced(rows, self.paper, **how).itertuples():
            head = pd.DataFrame(dict(row=[v.row], column=v.column, seed=v.seed))
            out.append(head.merge(committed.accuracies(v.run, v.when, v.round), how="cross"))
        return (
            pd.concat(out, ignore_index=True)
            if out
            else pd.DataFrame(columns=["row", "column", "seed", "client", "acc_pct", "n"])
        )

    def standing(
        self, table: str, rows: pd.DataFrame, own: str = "", **how: Any
    ) -> pd.DataFrame | None:
        """Ranks reported and reproduced in the column that was run, and the own row against each other one over clients and seeds."""
        if rows.empty:
            return None
        got = report.standing(rows, self.paper, table, self.clients(rows, **how), own, **how)
        return self.table(f"{table}.standing", got)

    # -- what probes recorded --------------------------------------------------------------------------------------------

    def probed(self, rows: pd.DataFrame, probe: str) -> list[Probed]:
        """What a probe recorded in each run of `rows` that has it, in the order of rows."""
        out, measured = [], rows[rows["mean"] != "derived"]  # derived rows have labels of their own
        for v in measured.drop_duplicates(["run", "row", "column"]).itertuples():
            arrays = committed.arrays_of(v.run)
            if f"probe/{probe}" in arrays:
                out.append(Probed(v.run, v.row, v.column, v.seed, *probes.read(arrays, probe)))
        return out

    def derive(self, rows: pd.DataFrame, numbers: list[dict[str, Any]]) -> pd.DataFrame:
        """Numbers computed from finished runs, as rows that are kept and judged with the others.

        numbers: dicts of run, metric, value, and what else differs from that run's rows in `rows` (row, column, artefact, round).
        """
        out = []
        for d in numbers:
            own = rows[rows.run == d["run"]]
            blank = dict(split="", when="", mean="derived", round=own["round"].max())
            out.append(own.iloc[0].to_dict() | blank | d)
        frame = pd.DataFrame(out, columns=metrics.ROW_COLUMNS)
        self.collected.append(frame)
        return frame

    def heats(
        self, name: str, matrices: dict[str, Any], rows: pd.DataFrame, said: str = "", **kw: Any
    ) -> None:
        """Figure `name`: heat maps of matrices {title: (R, C)} in one colour scale; `rows` are those of the runs that they are from."""
        if not matrices:
            return
        long = []
        for title, m in matrices.items():
            i, j = np.indices(m.shape)
            long.append(
                pd.DataFrame(dict(panel=title, row=i.ravel(), column=j.ravel(), value=m.ravel()))
            )
        fig = plots.heats(matrices, **kw)
        self.figure(name, fig, pd.concat(long), said, rows)

    def draw(
        self,
        name: str,
        frame: pd.DataFrame,
        plot: Any,
        rows: pd.DataFrame,
        said: str = "",
        columns: int = 3,
        by: str = "column",
        **kw: Any,
    ) -> None:
        """Figure `name`: plot(part of frame, ax, **kw) in a panel for each value of frame[by]; `rows` are those of the runs behind it."""
        if frame.empty:
            return
        names = list(dict.fromkeys(frame[by]))
        fig, axes = plots.panels(len(names), columns, sharey=False)
        for ax, c in zip(axes, names, strict=True):
            plot(frame[frame[by] == c], ax, **kw).set_title(c)
        self.figure(name, fig, frame, said, rows)

    def table(self, name: str, frame: pd.DataFrame) -> pd.DataFrame:
        """Save a table as CSV and Markdown below runs/ and return it for display."""
        report.save_table(frame, self.folder / name)
        return frame

    def rows(self) -> pd.DataFrame:
        """All rows swept so far, each once."""
        kept = [f for f in self.collected if len(f)]
        return (
            pd.concat(kept, ignore_index=True).drop_duplicates()
            if kept
            else pd.DataFrame(columns=metrics.ROW_COLUMNS)
        )

    def claims(self) -> pd.DataFrame:
        """What the paper says, the number here that decides it, and a verdict; saved as the table `claims`."""
        return self.table("claims", report.claims(self.paper, self.rows(), self.scope.profile))

    def finish(self) -> str:
        """Keep all rows and their runs in runs/results/ and return one line on versions, device and time."""
        out = committed.save(self.rows(), self.paper.key, self.scope.profile, self.scope.label)
        where = (
            torch.cuda.get_device_name()
            if self.device == "cuda"
            else f"cpu, {os.cpu_count()} cores"
        )
        count = self.rows().run.nunique()
        return (
            f"{count} runs; pfl_core {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {where}; "
            f"{time.monotonic() - self.began:.0f} s; rows in {_short(out)}, figures in {_short(self.folder)}"
        )


def _short(path: Path) -> str:
    # Below runs/, so that no notebook holds a path of somebody's computer.
    return str(Path("runs") / path.relative_to(paths.runs_root()))
