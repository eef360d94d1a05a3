"""One paper's notebook from the inside: artefacts run and shown, figures, tables, rows, claims."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pfl_core.analysis import plots, select
from pfl_core.analysis.select import tuples
from pfl_core.data.sources import CLASS_NAMES
from pfl_core.engine import probes
from pfl_core.experiments import metrics
from pfl_core.experiments import run as runs
from pfl_core.experiments import sweep as sweeps
from pfl_core.experiments.experiment import Experiment
from pfl_core.util import checks, paths
from pfl_core.util.version import __version__
from pfl_papers import places
from pfl_papers.compare import parameters, plan, readable, report
from pfl_papers.compare.fullest import BEST, best
from pfl_papers.evidence import committed, contrasts, diverged
from pfl_papers.notebook import drawing, folded
from pfl_papers.notebook.showing import ipython, show
from pfl_papers.papers import base as papers
from pfl_papers.papers import overrides
from pfl_papers.papers.base import TUNING, Number, Paper, Probed, Scope, Sweep

_SEEDS = (
    "Some rows have more seeds: their means are over other draws of clients. Bold compares rows "
    "over the seeds that they share."
)


class Study:
    """The notebook of one paper: `show` an artefact, or `run` it and make more of its rows.

    Parameters
    ----------
    paper : Paper or str
        A Paper, or its name.
    profile : str
        "smoke", "quick", "medium", "paper"; or "best", where an artefact is shown at the fullest
        profile of which rows are committed, else run at quick. What that trains, and how long it
        takes, is printed first.
    datasets, methods, seeds, artefacts
        What to restrict it to, empty for the profile's own.
    overrides
        What to change in the paper's runs, {"lr": 0.1, "partition_args": {"alpha": 0.5}}. They are
        labelled as not the paper's setting, held against no number of it, and not kept.
    train : bool
        Train even where committed rows exist.
    finished : bool
        Show only runs that are finished, and train nothing. Those that wait in results/ count with
        the other rows of their seed, not before.

    Raises
    ------
    ValueError
        For an unknown or ill-typed parameter, and for artefacts, data and methods that select no
        run, before anything runs.
    """

    def __init__(
        self,
        paper: str | Paper,
        *,
        profile: str = "quick",
        train: bool = False,
        finished: bool = False,
        device: str = "auto",
        **how: Any,
    ):
        self.began = time.monotonic()
        self.paper = papers.paper(paper)
        checks.known("profile:", profile, (*papers.PROFILES, BEST))
        self.best, train = profile == BEST, parameters.in_words_of_now(how, train)
        how |= dict(profile="quick" if self.best else profile, train=train)
        if self.best:
            how["shown"] = functools.partial(best, self.paper)
        self.scope = parameters.asked(self.paper, **how)
        self.train, self.finished = train, finished
        self.device = runs.pick_device(device)
        self.wanted = device  # on a cluster, "auto" is what each node has
        self._fuller = functools.cache(functools.partial(best, self.paper, self.scope))
        if not (finished or train or self.scope.profile == "smoke"):
            self._say_what_is_trained()
        self._said: set[str] = set()  # artefacts whose card was shown
        self._told = False  # whether the tables' legend was shown
        self.ran: dict[tuple[str, str | None], pd.DataFrame] = {}
        self.collected: list[pd.DataFrame] = []
        self._held_before: dict[Hashable, report.Held] = {}
        self._style = contextlib.ExitStack()  # until `finish`
        style: dict[Any, Any] = {**plots.STYLE}
        self._style.enter_context(plt.rc_context(style))
        # Claims are sentences.
        self._style.enter_context(pd.option_context("display.max_colwidth", None))

    def base(self, artefact: str, dataset: str, **changes: Any) -> Experiment | None:
        """The Experiment that an artefact's runs vary, None if it is not run: `Scope.base`."""
        return self.scope_of(artefact).base(self.paper, artefact, dataset, **changes)

    def _say_what_is_trained(self) -> None:
        """Print what is trained because it is neither committed nor finished, and how long."""
        asked = self.scope.artefacts or tuple(self.paper.artefacts)
        wanted = tuple(a for a in asked if not (self.best and self._fuller(a, None)))
        scope = replace(self.scope, artefacts=wanted)
        planned = self.paper.planned(scope) if wanted else []
        runs = plan.lacking((e for s in planned for e in s.experiments()), self.train)
        if not runs:
            return
        of = ", ".join(dict.fromkeys(e.tags["artefact"] for e in runs))
        where = f"at profile {self.scope.profile}, " * self.best
        print(
            f"no committed runs of {of} are such as asked for; {len(runs)} are trained {where}"
            f"{plan.expected_time(runs, self.device)} on this computer"
            + ". What is committed shows without datasets, methods, seeds, overrides and train"
            * self.best
        )

    # -- runs --------------------------------------------------------------------------------------

    def scope_of(self, name: str) -> Scope:
        """What the runs of an artefact are asked for; also by a name that begins with it."""
        known = [a for a in (*self.paper.artefacts, TUNING) if name.startswith(a)]
        found = self._fuller(max(known, key=len), None) if self.best and known else None
        return found[0] if found else self.scope

    def folder(self, scope: Scope | None = None) -> Path:
        """Where figures and tables of a scope are saved, by default of the notebook's own."""
        scope = scope or self.scope
        label = places.label(scope.profile, scope.label) + overrides.folder(scope.overrides)
        return places.figures_folder() / self.paper.key / label

    def run(self, artefact: str, part: str | None = None) -> pd.DataFrame:
        """Rows of an artefact's runs, what is derived from them at the end; each is run once.

        What chooses its parameters is run first; "tuning" is an artefact, too. If it is not run
        here, that is printed with the reason, and the frame is empty.

        Parameters
        ----------
        artefact : str
        part : str, optional
            Only the sweeps of this part.
        """
        if (artefact, part) not in self.ran:
            self.ran[artefact, part] = self._run(artefact, part)
        return self.ran[artefact, part]

    def _run(self, artefact: str, part: str | None) -> pd.DataFrame:
        if self.best and (fuller := self._fuller(artefact, part)):
            self.collected.append(fuller[1])
            return fuller[1]
        if artefact == TUNING:
            return self._sweep(self.paper.planned(self.scope, TUNING))
        if why := self.paper.missing(self.scope, artefact):
            if self.best:
                self._say_not_run(artefact)
            print(f"{artefact}: {why}")
            return pd.DataFrame(columns=metrics.ROW_COLUMNS)
        planned = self.paper.planned(self.scope, artefact, part)
        if tuning := [s for s in planned if s.artefact == TUNING]:
            self._sweep(tuning)  # what it chose is known now
            planned = self.paper.planned(self.scope, artefact, part)
        wanted = [s for s in planned if s.artefact != TUNING]
        about, rows = self.paper.artefacts[artefact], self._sweep(wanted)
        cells = [e for s in wanted for e in s.experiments()]
        parts = [rows, diverged.rows(cells, self.train)]
        self.collected.append(parts[1])
        whole = not self.finished or not about.together or all(map(self._is_there, cells))
        if about.numbers and len(rows) and whole:
            numbers = about.numbers(rows, functools.partial(self.probed, rows))
            parts.append(self.derive(rows, numbers + self._past(artefact, rows)))
        return pd.concat([p for p in parts if len(p)] or [rows], ignore_index=True)

    def _sweep(self, planned: list[Sweep]) -> pd.DataFrame:
        # Small networks leave cores idle in one process; smoke's runs are over before another
        # process has started.
        many = torch.cuda.device_count() if self.device == "cuda" else min(8, os.cpu_count() or 1)
        how: dict[str, Any] = dict(found=parameters.looked_up(self.train), device=self.wanted)
        how["jobs"] = 1 if self.scope.profile == "smoke" else many
        how["keep_state"] = self.scope.full  # a column whose contrasts still move can go on
        cells = [e for s in planned for e in s.experiments()]
        cells = self._finished(cells) if self.finished else cells
        frame = diverged.ended(sweeps.sweep(cells, **how))
        self.collected.append(frame)
        return frame

    def _finished(self, cells: list[Experiment]) -> list[Experiment]:
        there = [self._is_there(e) for e in cells]
        lacking = {e.seed for e, known in zip(cells, there, strict=True) if not known}
        return [
            e
            for e, known in zip(cells, there, strict=True)
            if known and not (e.seed in lacking and committed.waits(e))
        ]

    def _is_there(self, experiment: Experiment) -> bool:
        return parameters.is_there(experiment, self.train)

    def show(self, artefact: str, part: str | None = None, **how: Any) -> None:
        """Run an artefact and display what its `Artefact.show` names.

        Parameters
        ----------
        artefact : str
        part : str, optional
            As for `run`.
        **how
            For `compare` and `standing` select, when, average; for `curves` and `spread` columns.
        """
        display = ipython().display
        rows, about = self.run(artefact, part), self.paper.artefacts[artefact]
        for kind in about.show:
            if kind == "compare":
                shown = [self.compare(artefact, rows, metric=about.metrics, **how)]
            elif kind == "standing":
                shown = [self.standing(artefact, rows, **how)]
            else:
                shown = [getattr(self, kind)(artefact, rows, about.said, **how)]
            for table in shown:
                if table is not None:
                    display(table)
            if kind == "compare" and "acc_pct" in about.metrics and len(rows):
                self.beside_published(artefact, rows, **how)
                if not how and (ahead := self.advantages(artefact, rows)) is not None:
                    display(ahead)

    def _placed(self, name: str, profile: str, thing: Any) -> Any:
        """What is displayed under an artefact's heading: the thing, or what it is folded into.

        At profile "best" a thing that is not of the paper's own data is folded, below a card that
        says so once. What was asked for at a smaller profile is shown as it is.
        """
        artefact = self._artefact(name)
        if not self.best or profile in papers.FULL or not artefact:
            return thing
        self._say_not_run(artefact)
        return folded.fold(artefact, thing)

    def _artefact(self, name: str) -> str:
        """The artefact of a figure or table: "fig6" of "fig6a" and "fig6.kept"; else ""."""
        known = [a for a in self.paper.artefacts if name.startswith(a)]
        return max(known, key=len, default="")

    def _say_not_run(self, artefact: str) -> None:
        if artefact not in self._said:
            self._said.add(artefact)
            show(folded.not_run(self.paper, artefact))

    # -- figures -----------------------------------------------------------------------------------

    def figure(
        self,
        name: str,
        fig: Figure,
        frame: pd.DataFrame,
        said: str = "",
        rows: pd.DataFrame | None = None,
    ) -> None:
        """Save a figure with its numbers below runs/, and show it.

        Parameters
        ----------
        name : str
            Of its files.
        fig : Figure
        frame : DataFrame
            The numbers.
        said : str
            The end of its caption, which begins with profile, data and seeds.
        rows : DataFrame, optional
            Of the runs behind it, by default the frame.
        """
        rows = frame if rows is None else rows
        profile = next(iter(rows.get("profile", ())), "") or self.scope_of(name).said
        named = rows.get("dataset", [self.scope.label])
        used = report.data_sets(rows) if "run" in rows else ", ".join(sorted(set(named)))
        cells = [name for name in ("column", "row") if name in rows]
        seeded = bool(cells) and "seed" in rows and len(rows) > 0
        counts = rows.groupby(cells, dropna=False).seed.nunique() if seeded else [1]
        caption = [papers.title(name.partition("-")[0]), f"profile {profile}", f"data {used}"]
        where = report.on_devices(rows) if "device" in rows else ""
        caption += [f"{report.seeds_in_words(counts)}{where}. {said}".strip()]
        if "run" in rows:
            self._name_data(fig, rows)
        for ax in fig.axes:
            if title := ax.get_title():
                plots.entitle(ax, title)
        plots.share_legend(fig)
        plots.note(fig, ", ".join(caption))
        path = self.folder(replace(self.scope, profile=overrides.profile_of(profile))) / name
        data = plots.save(fig, frame, path).read_bytes()
        show(self._placed(name, profile, ipython().Image(data=data, alt=plots.described(fig))))
        plt.close(fig)

    def curves(
        self, name: str, rows: pd.DataFrame, said: str = "", columns: int = 3, when: str = "before"
    ) -> pd.DataFrame | None:
        """Figure `name`: test accuracy against the round, a panel a column, a line a row.

        Returns the last round's numbers, None without rows.
        """
        return self._panels(name, rows, plots.curves, ["acc_pct"], said, columns, when)

    def spread(
        self, name: str, rows: pd.DataFrame, said: str = "", columns: int = 3, when: str = "before"
    ) -> pd.DataFrame | None:
        """As `curves`, with the spread over clients; returns the last round's sd.

        The band is one sd to both sides, thin lines are the worst and the best client.
        """
        shown = ["acc_sd", "acc_pct", "acc_min", "acc_max"]
        return self._panels(name, rows, plots.spread, shown, said, columns, when)

    def _panels(
        self,
        name: str,
        rows: pd.DataFrame,
        plot: Callable[..., Axes],
        shown: list[str],
        said: str,
        columns: int,
        when: str,
    ) -> pd.DataFrame | None:
        # shown: metrics; the first is returned.
        if rows.empty:
            return None
        kept = rows[(rows.split == "test") & (rows.when == when) & (rows["average"] == "client")]
        kept = kept[kept.metric.isin(shown)]
        lost = diverged.said(rows)
        if kept.empty and not lost:
            known = sorted(set(rows.when) - {""})
            raise ValueError(f"{name}: no test accuracy at when={when!r}; evaluated are {known}")
        if kept.empty:
            only = readable.named(diverged.marked(pd.DataFrame(), rows))
            return self._placed(name, rows.profile.iloc[0], only)
        said = " ".join([said, *(f"{plots.label(r)}, {c}: {n}." for (r, c), n in lost.items())])
        kept = drawing.with_levels(kept)
        if (kept := drawing.with_published(kept, self.paper, name)).published.isna().all():
            kept = kept.drop(columns="published")
        self.draw(name, kept, plot, rows, said, columns, sharey=True)
        last = select.summary(select.pick(rows, "last", when, metric=shown[0]))
        last = readable.named(diverged.marked(last, rows))
        return self._placed(name, kept.profile.iloc[0], last)

    def draw(
        self,
        name: str,
        frame: pd.DataFrame,
        plot: Callable[..., Axes],
        rows: pd.DataFrame,
        said: str = "",
        columns: int = 3,
        by: str = "column",
        sharey: bool = False,
        size: tuple[float, float] = plots.PANEL,
        **kw: Any,
    ) -> None:
        """Draw figure `name`: plot(part of frame, axes, **kw), a panel for each value of frame[by].

        Parameters
        ----------
        name, frame, rows, said
            As for `figure`.
        plot : callable
            Draws a panel.
        columns : int
            Panels side by side.
        by : str
            A column of the frame.
        sharey : bool
            Whether panels have one axis of y.
        size : tuple of float
            Of a panel, in inches.
        **kw
            For `plot`.
        """
        if frame.empty:
            return
        names, hue = self._whole(name, frame[by].unique(), rows), kw.get("hue", "row")
        fig, every = plots.panels(len(names), columns, size, sharey=sharey)
        shown = frame
        if hue in frame:  # as categories, of which each panel knows all: one look for each name
            order = list(dict.fromkeys(frame[hue]))
            shown = frame.assign(**{hue: pd.Categorical(frame[hue], order)})
        for ax, (value, ran) in zip(every, names.items(), strict=True):
            if ran:
                plot(shown[shown[by] == value], ax, **kw).set_title(value)
            else:
                plots.not_run(ax, value)
        plots.outer_labels(
            [ax for ax, ran in zip(every, names.values(), strict=True) if ran], sharey
        )
        if plot in (plots.curves, plots.layers) and rows.seed.nunique() > 1:
            said = f"{said} Intervals: 95 %, by t over seeds.".strip()
        self.figure(name, fig, frame, said, rows)

    def _whole(self, name: str, panels: Iterable[str], rows: pd.DataFrame) -> dict[str, bool]:
        # {panel: whether it was run}: those of the paper's figure, if it is one.
        ran, artefact = dict.fromkeys(panels, True), self._artefact(name)
        scope = Scope("paper", self.scope.datasets, self.scope.methods)
        return drawing.whole(self.paper, scope, artefact, ran, rows) if artefact else ran

    def beside_published(self, table: str, rows: pd.DataFrame, **how: str) -> None:
        """Figure `table`: our accuracies beside the published ones, where they may be compared."""
        got = self._held(table, rows, **how).cells
        if (fig := drawing.beside_published(got)) is not None:
            self.figure(f"{table}-published", fig, got, "Bars: 95 % intervals over seeds.", rows)

    def _name_data(self, fig: Figure, rows: pd.DataFrame) -> None:
        """Below a panel's title that begins with a column's name, what was used instead of it."""
        heads = rows[rows["average"] != "derived"].drop_duplicates("column")
        named: dict[str, str] = {
            v.column: report.column_of_ours(self.paper, v.artefact, v.row, v.column, v.run)
            for v in tuples(heads)
        }
        for ax in fig.axes:
            title = ax.get_title()
            column = drawing.column_of(title, list(named))
            if instead := named.get(column, "").removeprefix(column).removeprefix(": "):
                ax.title.set_text(f"{title}\n{instead}")

    def heats(
        self,
        name: str,
        matrices: dict[str, np.ndarray],
        rows: pd.DataFrame,
        said: str = "",
        **kw: Any,
    ) -> None:
        """Draw figure `name`: heat maps of weights in one colour scale, which begins at 0.

        Parameters
        ----------
        name, rows, said
            As for `figure`.
        matrices : dict of ndarray
            {title: (R, C)}.
        **kw
            For `plots.heats`.
        """
        if not matrices:
            return
        every = {title: matrices.get(title) for title in self._whole(name, matrices, rows)}
        long = []
        for title, m in matrices.items():
            i, j = np.indices(m.shape)
            cells = dict(panel=title, row=i.ravel(), column=j.ravel(), value=m.ravel())
            long.append(pd.DataFrame(cells))
        kw.setdefault("vmin", 0.0)
        self.figure(name, plots.heats(every, **kw), pd.concat(long), said, rows)

    def show_partitions(
        self, base: Experiment | None, columns: dict[str, dict[str, Any]], name: str = "partition"
    ) -> None:
        """Draw figure `name`: who holds which labels of the training data.

        Parameters
        ----------
        base : Experiment, optional
            Without one nothing is drawn.
        columns : dict of dict
            {title of a panel: changes to base}.
        name : str
        """
        if base is None:
            return
        fig, axes = plots.panels(len(columns))
        names = CLASS_NAMES.get(base.dataset)
        frames, seed = [], self.scope.seeds_of(self.paper, base.tags["artefact"])[0]
        dealt = {
            label: committed.label_counts(
                overrides.overridden(base.but(**changes, seed=seed), self.scope.overrides)
            )
            for label, changes in columns.items()
        }
        most = max(int(counts.max()) for counts in dealt.values())
        for ax, (label, counts) in zip(axes, dealt.items(), strict=True):
            plots.label_distribution(counts, ax, names, most).set_title(label)
            k, c = counts.nonzero()
            held = {"column": label, "client": k, "class": c, "count": counts[k, c]}
            frames.append(pd.DataFrame(held))
        plots.outer_labels(axes, sharey=True)
        said = overrides.labelled(overrides.profile_of(base.tags["profile"]), self.scope.overrides)
        frame = pd.concat(frames).assign(dataset=base.dataset, profile=said)
        self.figure(name, fig, frame, "Area: number of training samples.")

    # -- tables ------------------------------------------------------------------------------------

    def _held(
        self, table: str, rows: pd.DataFrame, metric: str = "acc_pct", **how: str
    ) -> report.Held:
        # Table, picture, leads and text of the same rows are made of the same numbers.
        key = table, metric, tuple(sorted(how.items())), _content(rows), committed.results()
        held = report.Held(rows, self.paper, table, metric, **how)
        return self._held_before.setdefault(key, held)

    def compare(
        self,
        table: str,
        rows: pd.DataFrame,
        *,
        metric: str | Sequence[str] = "acc_pct",
        digits: int = 0,
        **how: str,
    ) -> readable.Table:
        """Return table `table` to display: reported beside reproduced, by `report.compare`.

        Parameters
        ----------
        table, rows, **how
            As for `report.compare`.
        metric : str or sequence of str
            One published number, or several, which stand side by side.
        digits : int
            Decimals shown, by default the artefact's.
        """
        metrics = [metric] if isinstance(metric, str) else [*metric]
        each = [self._held(table, rows, m, **how).cells.copy() for m in metrics]
        title, name, rule = papers.title(table), table, self.paper.report | how
        said = [plots.display(m, plots.MEASURE_LABELS).lower() for m in metrics]
        got = each[0]
        if len(metrics) > 1:
            ends = ["" if m == "acc_pct" else f", {s}" for m, s in zip(metrics, said, strict=True)]
            each = [t.assign(column=t.column + end) for t, end in zip(each, ends, strict=True)]
            got = pd.concat(each, ignore_index=True)
        elif metrics != ["acc_pct"]:
            title, name = f"{title}, {said[0]}", f"{table}.{metrics[0]}"
        rule = rule if "acc_pct" in metrics else {}
        caption = self._caption(title, table, rows, got, rule)
        if (got[got.n > 0].groupby("column").n.nunique() > 1).any():
            caption += f" {_SEEDS}"
        return self._saved(table, name, got, caption, digits)

    def advantages(self, table: str, rows: pd.DataFrame) -> readable.Table | None:
        """By how much the paper's own method is ahead of each other row, by `report.advantages`.

        None without a row to compare, as where data or networks are not the paper's.
        """
        got = self._held(table, rows).leads.copy()
        if got.empty:
            return None
        title = f"{papers.title(table)}, {plots.label(self.paper.own)}'s leads in points"
        caption = self._caption(title, table, rows, got, self.paper.report)
        return self._saved(table, f"{table}.advantages", got, caption)

    def _saved(
        self, table: str, name: str, got: pd.DataFrame, caption: str, digits: int = 0
    ) -> readable.Table:
        digits = digits or self.paper.artefacts[table].digits
        shown = readable.Table(got, caption, digits, legend=False)
        folder = self.folder(self.scope_of(table))
        folder.mkdir(parents=True, exist_ok=True)
        got.to_csv(folder / f"{name}.csv", index=False)
        (folder / f"{name}.md").write_text(shown.markdown() + "\n")
        placed = self._placed(table, self.scope_of(table).profile, shown)
        if placed is shown and shown.ran and not self._told:  # once, below what is not folded
            shown.legend = self._told = True
        return placed

    def _caption(
        self, title: str, table: str, rows: pd.DataFrame, got: pd.DataFrame, rule: dict[str, str]
    ) -> str:
        ran = got[got.reproduced.notna()]
        profile = next(iter(rows.profile), self.scope_of(table).said)
        parts = [title, f"profile {profile}"]
        if len(ran):
            seeds = report.seeds_in_words(ran.n) + report.on_devices(rows)
            parts += [f"data {report.data_sets(rows)}", seeds]
        if rule:
            odd = "".join(
                f", {plots.label(r)} {w}" for r, w in self.paper.when.items() if r in set(ran.row)
            )
            read = f"{select.SELECT[rule['select']]}, {select.MOMENTS[rule['when']]}"
            parts.append(f"{read}{odd}, {rule['average']} average")
        if len(ran) and (share := report.scale(self.paper, rows, table)):
            parts.append(share)
        return ", ".join(parts) + "."

    def reading(self, table: str) -> None:
        """Display what a table that was shown says, in sentences made of its rows.

        Who leads and by how much, how that stands beside the paper, what is open and why.
        """
        whole = [(table, None)] if (table, None) in self.ran else []
        for part in whole or [key for key in self.ran if key[0] == table]:
            if said := self._held(table, self.ran[part]).text:
                text, profile = "\n\n".join(said), next(iter(self.ran[part].profile))
                show(self._placed(table, profile, text))

    def clients(self, rows: pd.DataFrame, **how: Any) -> pd.DataFrame:
        """Test accuracy of every client at the round that is reported.

        Columns row, column, seed, client, acc_pct, n (test samples).
        """
        out = [pd.DataFrame(columns=["row", "column", "seed", "client", "acc_pct", "n"])]
        for v in tuples(contrasts.reproduced(rows, self.paper, **how)):
            head = pd.DataFrame(dict(row=[v.row], column=v.column, seed=v.seed))
            out.append(head.merge(committed.accuracies(v.run, v.when, v.rounds), how="cross"))
        return pd.concat(out[1:] or out, ignore_index=True)

    def standing(self, table: str, rows: pd.DataFrame, **how: str) -> pd.DataFrame | None:
        """Ranks in the column that was run, by `report.standing`; None without rows.

        And the paper's own row against each other one over clients and seeds.
        """
        if rows.empty:
            return None
        got = report.standing(rows, self.paper, table, self.clients(rows, **how), **how)
        self.table(f"{table}.standing", got)
        *ranks, ahead, share, p = got.columns
        forms = dict.fromkeys(ranks, "{:g}") | {ahead: "{:+.2f}", share: "{:.0%}", p: "{:.4f}"}
        shown = got.apply(lambda c: c.map(forms[c.name].format)).replace(
            r"\+?nan%?", "", regex=True
        )
        shown[p] = shown[p].replace("0.0000", "< 0.0001")
        return self._placed(table, next(iter(rows.profile)), shown)

    def table(self, name: str, frame: pd.DataFrame) -> pd.DataFrame:
        """Save a table as CSV and Markdown below runs/, and return it for display."""
        report.save_table(frame, self.folder(self.scope_of(name)) / name)
        return self._placed(name, self.scope_of(name).profile, readable.named(frame))

    # -- numbers made of runs ----------------------------------------------------------------------

    def probed(self, rows: pd.DataFrame, probe: str) -> list[Probed]:
        """What a probe recorded in each run of `rows` that has it, in the order of rows.

        Until the last round of the run in `rows`.
        """
        measured = rows[rows["average"] != "derived"]  # derived rows have labels of their own
        ends, out = measured.groupby("run")["rounds"].max(), []
        for v in tuples(measured.drop_duplicates(["run", "row", "column"])):
            arrays = committed.arrays_of(v.run)
            if f"probe/{probe}" in arrays:
                every = Probed(v.run, v.row, v.column, v.seed, *probes.read(arrays, probe))
                out.append(every.until(ends[v.run]))
        return [there for there in out if len(there.rounds)]

    def _past(self, artefact: str, rows: pd.DataFrame) -> list[Number]:
        # What claims ask of an artefact's numbers, had its runs ended at three quarters of their
        # rounds. What a probe did not record between half of them and there is not known.
        asks = [claim.ask for claim in self.paper.claims if claim.needs == artefact]
        named = {metric for ask in asks if ask for metric in ask.read} - {*contrasts.ACCURACIES}
        if not (named or None in asks):
            return []
        past = contrasts.before_the_last_quarter(rows)
        half = rows.groupby("run")["rounds"].max() / 2

        def recorded(probe: str) -> list[Probed]:
            return [p for p in self.probed(past, probe) if p.rounds[-1] > half[p.run]]

        make, ends = self.paper.artefacts[artefact].numbers, past.groupby("run")["rounds"].max()
        return [
            dict(rounds=ends[n["run"]]) | n | dict(metric=n["metric"] + contrasts.PAST)
            for n in (make(past, recorded) if make else ())
            if n["metric"] in named or (None in asks and "average" not in n)
        ]

    def derive(self, rows: pd.DataFrame, numbers: list[Number]) -> pd.DataFrame:
        """Numbers computed from finished runs, as rows that are kept and judged with the others.

        Parameters
        ----------
        rows : DataFrame
            Of the finished runs.
        numbers : list of dict
            run, metric, value, and what else differs from that run's rows in `rows` (row, column,
            artefact, round).
        """
        out = []
        for number in numbers:
            own = rows[rows.run == number["run"]]
            blank = dict(split="", when="", average="derived", rounds=own["rounds"].max())
            out.append(own.iloc[0].to_dict() | blank | number)
        frame = pd.DataFrame(out, columns=metrics.ROW_COLUMNS)
        self.collected.append(frame)
        return frame

    # -- the end -----------------------------------------------------------------------------------

    def rows(self) -> pd.DataFrame:
        """All rows of this notebook so far, each once."""
        kept = [f for f in self.collected if len(f)]
        none = pd.DataFrame(columns=metrics.ROW_COLUMNS)
        return pd.concat(kept or [none], ignore_index=True).drop_duplicates()

    def claims(self) -> readable.Claims:
        """Return what the paper says, with verdicts and the numbers that decide them, to display.

        Saved as `claims` beside what decided them: at profile "best" that may be several folders.
        """
        got = report.claims(self.paper, self.rows())
        decided = got.profile.where(got.profile != "", self.scope.profile)
        got = got.drop(columns=["profile", "brief"])
        for profile, some in got.groupby(decided):
            folder = self.folder(replace(self.scope, profile=overrides.profile_of(str(profile))))
            report.save_table(some.reset_index(drop=True), folder / "claims")
        return readable.Claims(got)

    def finish(self) -> str:
        """Keep all rows and their runs in runs/results/; a line on versions, device and time.

        At profile "best" nothing is kept: what is committed stands there, the rest in the store.
        So does what is not the paper's setting.
        """
        self._style.close()
        rows, kept = self.rows(), ""
        if not (self.best or self.scope.overrides):
            out = committed.save(rows, self.paper.key, self.scope.profile, self.scope.label)
            kept = f"rows in {_short(out)}, "
        cpu = f"cpu, {os.cpu_count()} cores"
        where = torch.cuda.get_device_name() if self.device == "cuda" else cpu
        versions = f"pfl_core {__version__}, torch {torch.__version__}"
        python, took = platform.python_version(), time.monotonic() - self.began
        return (
            f"{rows.run.nunique()} runs; {versions}, Python {python}, {where}; {took:.0f} s; "
            f"{kept}figures in {_short(self.folder())}"
        )


def _content(rows: pd.DataFrame) -> Hashable:
    # Equal for frames of equal content alone: a reader may change one in place.
    return *rows.columns, pd.util.hash_pandas_object(rows, index=False).to_numpy().tobytes()


def _short(path: Path) -> str:
    # Below runs/, so that no notebook holds a path of somebody's computer.
    return str(Path("runs") / path.relative_to(paths.runs_root()))
