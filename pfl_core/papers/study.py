"""One paper's notebook from the inside: its parameters checked, its sweeps, figures and rows in one place."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from pfl_core.analysis import plots
from pfl_core.data import pools as data
from pfl_core.engine import probes
from pfl_core.experiments import experiment as experiments
from pfl_core.experiments import run as runs
from pfl_core.experiments import store
from pfl_core.experiments.experiment import Experiment
from pfl_core.methods.base import METHODS
from pfl_core.papers import base as papers
from pfl_core.papers import presets, report
from pfl_core.util import checks, paths
from pfl_core.util.version import __version__

PROFILES = ("smoke", "quick", "medium", "paper")
STAND_INS = {  # what serves where a paper's data are not asked for: embedded first, then what may be there
    "cifar10": ("digits",),
    "cifar100": ("digits100",),
    "mnist": ("digits",),
    "fashion_mnist": ("digits",),
    "emnist-digits": ("digits",),
    "omniglot": (),
    "tiny_imagenet": ("digits100",),
    "ag_news": (),
    "flickr_aes": ("raters_cifar10", "raters_digits100"),
}


SELECTED = {"last": "last round", "last10": "mean of the last ten evaluations", "best_val": "best validation round"}
SELECTED["best_test"] = "best test round (optimistic: test data choose it)"


class Probed(NamedTuple):
    """What a probe recorded in one run: rounds (E,), values {key: (E, ...)}."""

    run: str
    row: str
    column: str
    seed: int
    rounds: np.ndarray
    values: dict[str, np.ndarray]

    def at(self, round: int | None = None) -> dict[str, np.ndarray]:
        """{key: array} at the recorded round nearest to `round` (the later of two); default the last one."""
        i = -1 if round is None else np.abs(self.rounds[::-1] - round).argmin()
        return {k: (v[-1] if round is None else v[::-1][i]) for k, v in self.values.items()}


def check(known: Any, profile: Any, datasets: Any, methods: Any, seeds: Any, artefacts: Any, recompute: Any) -> None:
    """ValueError for a parameter of a notebook that is unknown or of the wrong type; `known` are the artefacts it may name."""
    checks.known("profile:", profile, PROFILES)
    for name, value, legal in (
        ("datasets", datasets, data.list_datasets()),
        ("methods", methods, (*METHODS, *report.VIEWS)),
        ("artefacts", artefacts, known),
    ):
        if value is not None and not isinstance(value, list):
            raise ValueError(
                f"{name}={value!r}: give a list, such as {[next(iter(legal))]}; an empty list means the profile's own"
            )
        for v in value or []:
            checks.known(f"{name}:", v, legal)
    if not isinstance(recompute, bool):
        raise ValueError(
            f"recompute={recompute!r}: got {type(recompute).__name__}, allowed is True or False (not a string)"
        )
    whole = isinstance(seeds, list) and all(type(s) is int and s >= 0 for s in seeds)
    if seeds is not None and not whole:
        raise ValueError(f"seeds={seeds!r}: give a list of integers >= 0")


class Study:
    """The notebook of one paper, checked parameters first.

    profile "smoke" | "quick" | "medium" | "paper"; datasets, methods, seeds, artefacts: what to restrict it to, empty for the
    profile's own; recompute: train even where committed rows exist. Raises ValueError for an unknown or ill-typed parameter, before
    anything runs.
    """

    there: Path | None = None  # the store that runs are read from, where it is not that of $PFL_RUNS

    def __init__(
        self,
        paper: str,
        *,
        profile: str = "quick",
        datasets: list[str] | None = None,
        methods: list[str] | None = None,
        seeds: list[int] | None = None,
        artefacts: list[str] | None = None,
        recompute: bool = False,
        device: str = "auto",
    ):
        self.began = time.monotonic()
        self.home = papers.paper(paper)
        self.known = self.home.ARTEFACTS
        check(self.known, profile, datasets, methods, seeds, artefacts, recompute)
        self.paper, self.profile, self.recompute = paper, profile, recompute
        self.device, self.asked = runs.pick_device(device), device  # on a cluster, "auto" is what each node has
        self.datasets, self.methods, self.artefacts = datasets or [], methods or [], artefacts or list(self.known)
        self.label = "+".join(self.datasets) or ("paper" if profile in papers.FULL else "digits")
        own = list(range(getattr(self.home, "SEEDS", {}).get(profile, 0)))  # where a paper says how many runs it has
        self.given, self.seeds = bool(seeds), seeds or own or presets.seeds(profile, self.label == "digits")
        self.folder = paths.runs_root() / "figures" / paper / f"{profile}-{self.label}"
        self.collected: list[pd.DataFrame] = []
        plt.rcParams.update({"font.size": 8, "axes.titlesize": 9, "figure.dpi": 72})
        pd.set_option("display.max_colwidth", None)  # claims are sentences

    def data(self, name: str) -> str | None:
        """The data set that serves for the paper's `name` here: itself, a stand-in, or None (then the artefact is not run)."""
        if not self.datasets and self.profile in papers.FULL:
            return name
        wanted = self.datasets or ["digits", "digits100", "raters_digits100"]
        return next((d for d in (name, *STAND_INS.get(name, ())) if d in wanted), None)

    def base(self, artefact: str, dataset: str, **changes: Any) -> Experiment | None:
        """The Experiment that an artefact's runs vary, over the data that serve for the paper's `dataset`; None if it is not run here."""
        served = self.data(dataset)
        checks.known("artefact:", artefact, self.known)
        if artefact not in self.artefacts:
            print(f"{artefact}: not run, not among artefacts={self.artefacts}")
            return None
        if served is None:
            print(f"{artefact}: not run, needs {dataset} (datasets={self.datasets or 'the embedded ones'})")
            return None
        if not self.runs(artefact):
            some = ", ".join(self.home.MEDIUM) or "nothing of this paper"
            print(f"{artefact}: not run at profile medium, which has {some}; use profile='paper'")
            return None
        fields = self.home.setting(artefact, self.profile, served, changes.get("clients", 0))
        return Experiment(**fields).but(
            **changes, tags={"paper": self.paper, "artefact": artefact, "profile": self.profile}
        )

    def runs(self, artefact: str) -> bool:
        """Whether this profile computes an artefact: medium those that its paper's MEDIUM names, others all."""
        return self.profile != "medium" or artefact in self.home.MEDIUM

    def rows_for(self, artefact: str, dataset: str, clients: int = 0) -> dict[str, dict]:
        """The rows of an artefact as changes to its `base` over the data that serve for `dataset`; {} if it is not run."""
        served = self.data(dataset)
        return self.home.rows(artefact, self.profile, served, clients) if served and self.runs(artefact) else {}

    def sweep(
        self,
        base: Experiment | None,
        rows: dict[str, dict],
        columns: dict[str, dict] | None = None,
        seeds: int | list[int] | None = None,
    ) -> pd.DataFrame:
        """Rows of the grid rows x columns x seeds of changes to `base`; an empty frame if base is None.

        seeds: how many at profile quick, in place of its own number; a user's own seeds and other profiles' stay. Medium has as many
        as the paper's MEDIUM says of the artefact. A list names them, whatever was asked for.
        """
        cells = self.cells(base, rows, columns, seeds)
        if not cells:
            return pd.DataFrame(columns=store.ROW_COLUMNS)
        # Small networks leave cores idle in one process; smoke's runs are over before another process has started.
        many = torch.cuda.device_count() if self.device == "cuda" else min(8, os.cpu_count() or 1)
        jobs = 1 if self.profile == "smoke" else many
        keep = self.profile in papers.FULL  # so that a column whose contrasts still move can go on
        frame = runs.sweep(cells, recompute=self.recompute, device=self.asked, jobs=jobs, keep_state=keep)
        self.collected.append(frame)
        return frame

    def cells(
        self,
        base: Experiment | None,
        rows: dict[str, dict],
        columns: dict[str, dict] | None,
        seeds: int | list[int] | None,
    ) -> list[Experiment]:
        """The Experiments of `sweep`."""
        if base is None:
            return []
        if self.methods:
            rows = {k: v for k, v in rows.items() if v.get("method", base.method) in self.methods or k in self.methods}
        if isinstance(seeds, list):
            return experiments.grid(base, rows, columns, seeds)
        if self.profile == "medium":
            seeds = self.home.MEDIUM.get(base.tags["artefact"])
        some = list(range(seeds)) if seeds and self.profile in ("quick", "medium") and not self.given else self.seeds
        return experiments.grid(base, rows, columns, some)

    def figure(
        self, name: str, fig: Figure, frame: pd.DataFrame, said: str = "", rows: pd.DataFrame | None = None
    ) -> None:
        """Save a figure with its numbers below runs/ and show it; the caption names profile, data and seeds (of `rows`) and `said`."""
        from IPython.display import Image, display

        rows = frame if rows is None else rows
        used = ", ".join(sorted(set(rows.get("dataset", pd.Series([self.label])))))
        seeds = rows.seed.nunique() if "seed" in rows else 1
        plots.note(
            fig,
            f"{papers.title(name)}, profile {self.profile}, data {used}, {seeds} seed{'s' * (seeds > 1)}. {said}".strip(),
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
        return self._panels(name, rows, plots.spread, ["acc_pct", "acc_sd", "acc_min", "acc_max"], said, columns, when)

    def _panels(self, name, rows, draw, metrics, said, columns, when) -> pd.DataFrame | None:
        if rows.empty:
            return None
        kept = rows[
            (rows.split == "test") & (rows.when == when) & (rows["mean"] == "client") & rows.metric.isin(metrics)
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
        return report.summary(report.pick(rows, "last", when, metric=metrics[1] if len(metrics) > 1 else "acc_pct"))

    def show_partitions(self, base: Experiment | None, columns: dict[str, dict], name: str = "partition") -> None:
        """Figure `name`: who holds which labels of the training data, a panel for each change to `base`."""
        if base is None:
            return
        fig, axes = plots.panels(len(columns))
        frames = []
        for ax, (label, changes) in zip(axes, columns.items(), strict=True):
            counts = experiments.federation(base.but(**changes, seed=self.seeds[0])).counts()
            plots.label_distribution(counts, ax).set_title(label)
            k, c = counts.nonzero()
            frames.append(pd.DataFrame({"column": label, "client": k, "class": c, "count": counts[k, c]}))
        self.figure(name, fig, pd.concat(frames).assign(dataset=base.dataset), "Area: number of training samples.")

    @property
    def raters(self) -> str:
        """What the title of a figure over FLICKR-AES must say when synthetic raters stand in for it."""
        return "" if self.data("flickr_aes") == "flickr_aes" else ", synthetic raters"

    def pick(self, paper: Any, *, quick: Any, smoke: Any = None, medium: Any = None) -> Any:
        """The value for this notebook's profile: `quick` on the embedded data only; smoke takes quick's where it has none, medium the
        paper's."""
        if self.profile == "quick" and self.label != "digits":
            return paper
        given = {"paper": paper, "medium": medium, "quick": quick, "smoke": smoke}[self.profile]
        return {"medium": paper, "smoke": quick}.get(self.profile) if given is None else given

    # -- tables ----------------------------------------------------------------------------------------------------------

    def compare(
        self, table: str, rows: pd.DataFrame, *, own: str = "", metric: str = "acc_pct", digits: int = 2, **how: Any
    ) -> pd.DataFrame:
        """Table `table`: reported beside reproduced (see `report.compare`), saved with every cell of it; prints its caption.

        digits: decimals shown.
        """
        got = report.compare(rows, self.paper, table, own=own, metric=metric, **how)
        rule = self.home.REPORT | how
        if metric == "acc_pct" and rule["select"] != "last" and len(rows):
            last = report.reproduced(rows, self.paper, **how | {"select": "last"})
            means = last.groupby(["column", "row"]).value.mean().rename("last")
            got = got.merge(means, left_on=["column", "row"], right_index=True, how="left")
        name = table if metric == "acc_pct" else f"{table}.{metric}"
        report.save_table(got, self.folder / f"{name}.cells")
        print(
            self._caption(table, got, rule if metric == "acc_pct" else {}, "" if metric == "acc_pct" else f", {metric}")
        )
        return self.table(name, report.wide(got, digits))

    def _caption(self, table: str, got: pd.DataFrame, rule: dict[str, str], what: str) -> str:
        ran = got[got.reproduced.notna()]
        parts = [papers.title(table) + what, f"profile {self.profile}"]
        if len(ran):
            instead = " in place of the paper's" if self.label == "digits" else ""
            parts += [
                f"data {', '.join(sorted(set(ran.dataset)))}{instead}",
                f"{ran.n.max()} seed{'s' * bool(ran.n.max() > 1)}",
            ]
        if rule:
            when = {"before": "before local training", "after": "after local training"}[rule["when"]]
            odd = "".join(f", {r} {w}" for r, w in self.home.WHEN.items() if r in set(ran.row))
            parts.append(f"{SELECTED[rule['select']]}, {when}{odd}, {rule['mean']} mean")
        if missing := [c for c in dict.fromkeys(got.column) if c not in set(ran.column)]:
            parts.append(f"not run at {self.profile}: {'; '.join(missing)}")
        return ". ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 2 else ", ".join(parts)

    def clients(self, rows: pd.DataFrame, **how: Any) -> pd.DataFrame:
        """Test accuracy of every client at the round that is reported: row, column, seed, client, acc_pct, n."""
        out = []
        for v in report.reproduced(rows, self.paper, **how).itertuples():
            head = pd.DataFrame(dict(row=[v.row], column=v.column, seed=v.seed))
            out.append(head.merge(store.accuracies(v.run, v.when, v.round), how="cross"))
        return (
            pd.concat(out, ignore_index=True)
            if out
            else pd.DataFrame(columns=["row", "column", "seed", "client", "acc_pct", "n"])
        )

    def standing(self, table: str, rows: pd.DataFrame, own: str = "", **how: Any) -> pd.DataFrame | None:
        """Ranks reported and reproduced in the column that was run, and the own row against each other one over clients and seeds."""
        if rows.empty:
            return None
        got = report.standing(rows, self.paper, table, self.clients(rows, **how), own, **how)
        return self.table(f"{table}.standing", got)

    # -- what probes recorded --------------------------------------------------------------------------------------------

    def probed(self, rows: pd.DataFrame, probe: str) -> list[Probed]:
        """What a probe recorded in each run of `rows` that has it, in the order of rows."""
        out = []
        for v in rows.drop_duplicates(["run", "row", "column"]).itertuples():
            arrays = store.arrays_of(v.run, self.there)
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
        frame = pd.DataFrame(out, columns=store.ROW_COLUMNS)
        self.collected.append(frame)
        return frame

    def heats(self, name: str, matrices: dict[str, Any], rows: pd.DataFrame, said: str = "", **kw: Any) -> None:
        """Figure `name`: heat maps of matrices {title: (R, C)} in one colour scale; `rows` are those of the runs that they are from."""
        if not matrices:
            return
        long = []
        for title, m in matrices.items():
            i, j = np.indices(m.shape)
            long.append(pd.DataFrame(dict(panel=title, row=i.ravel(), column=j.ravel(), value=m.ravel())))
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
        """Save a table as CSV, Markdown and LaTeX below runs/ and return it for display."""
        report.save_table(frame, self.folder / name)
        return frame

    def rows(self) -> pd.DataFrame:
        """All rows swept so far, each once."""
        kept = [f for f in self.collected if len(f)]
        return pd.concat(kept, ignore_index=True).drop_duplicates() if kept else pd.DataFrame(columns=store.ROW_COLUMNS)

    def claims(self) -> pd.DataFrame:
        """What the paper says, the number here that decides it, and a verdict; saved as the table `claims`."""
        return self.table("claims", report.claims(self.paper, self.rows(), self.profile))

    def finish(self) -> str:
        """Write all rows to runs/results/ and return one line on versions, device and time."""
        out = paths.runs_root() / "results" / f"{self.paper}.{self.profile}-{self.label}.csv"
        checks.make_folder(out.parent)
        report.save_rows(self.rows(), out)
        store.save_arrays(self.rows().run, out.with_suffix(".npz"))
        where = torch.cuda.get_device_name() if self.device == "cuda" else f"cpu, {os.cpu_count()} cores"
        count = self.rows().run.nunique()
        return (
            f"{count} runs; pfl_core {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {where}; "
            f"{time.monotonic() - self.began:.0f} s; rows in {_short(out)}, figures in {_short(self.folder)}"
        )


def _short(path: Path) -> str:
    # Below runs/, so that no notebook holds a path of somebody's computer.
    return str(Path("runs") / path.relative_to(paths.runs_root()))
