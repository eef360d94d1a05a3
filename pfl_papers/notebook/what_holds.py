"""The notebook what_holds from the inside: figures, tables and sentences made of `recount`."""

from __future__ import annotations

import contextlib
import itertools
import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from pfl_core.analysis import plots, verdicts
from pfl_core.analysis.noise import Interval
from pfl_core.analysis.plots import label
from pfl_core.analysis.select import grouped, tuples
from pfl_core.util.version import __version__
from pfl_papers import places
from pfl_papers.compare import parameters, readable, recount, report
from pfl_papers.compare.recount import AVERAGED, REPORTED, RULES, Runs
from pfl_papers.evidence import committed
from pfl_papers.notebook import rank_figures
from pfl_papers.notebook.rank_figures import WORDS
from pfl_papers.notebook.showing import ipython, show
from pfl_papers.papers import base as papers

STYLE = {"font.size": 8, "axes.titlesize": 8}


# -- the notebook ----------------------------------------------------------------------------------


class WhatHolds:
    """The notebook: each method displays a part of the page. Nothing is trained.

    Parameters
    ----------
    profile : str
        The smallest that counts; of each artefact the best is shown.
    datasets, methods, seeds, artefacts
        What to restrict it to, empty for all.

    Raises
    ------
    ValueError
        For an unknown or ill-typed parameter, and for a choice without any run.
    """

    def __init__(self, profile: str = "quick", **lists: Any):
        self.began = time.monotonic()
        every = {a for name in papers.PAPERS for a in papers.paper(name).artefacts}
        parameters.check(sorted(every), profile=profile, **lists)
        self.profile = profile
        self.runs = recount.best_runs(profile, **lists)
        if not self.runs and any(lists.values()):
            there = ", ".join(committed.parts(own=True)) or "none"
            raise ValueError(
                f"{parameters.said(lists)}: no such runs are kept at profile {profile} or a fuller "
                f"one; there are {there}. Name what goes together, or leave a parameter out"
            )
        parts = [recount.recounted(runs) for runs in self.runs]
        self.numbers = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
        self.columns = recount.comparable(self.numbers) if parts else {}
        self._open = contextlib.ExitStack()  # until `finish`
        # Claims are sentences.
        self._open.enter_context(pd.option_context("display.max_colwidth", None))

    # -- what there is -----------------------------------------------------------------------------

    def evidence(self) -> pd.DataFrame:
        """A line for each paper, profile and data: what is read, and over how many seeds."""
        lines: dict[tuple[str, str, str], list[Runs]] = {}
        for runs in self.runs:
            data = report.data_sets(runs.rows)
            lines.setdefault((label(runs.paper.key), runs.profile, data), []).append(runs)
        show(_standing(self.runs))
        out = []
        for (paper, profile, data), some in lines.items():
            titles = ", ".join(papers.title(r.artefact) for r in some)
            read = dict(seeds=_seeds(r.rows for r in some), artefacts=titles)
            out.append(dict(paper=paper, profile=profile, data=data) | read)
        return readable.Texts(out).set_index("paper") if out else pd.DataFrame()

    # -- ranks -------------------------------------------------------------------------------------

    def ranks(self) -> None:
        """The rank of every method under every rule, a panel a column of a table.

        The papers' data and digits are pictures of their own.
        """
        for where, columns in _by_data(self.columns).items():
            self._ranks(where, columns)
        show(_lacking(self.runs, set(self.columns)))

    def _ranks(self, where: str, columns: dict[Any, pd.DataFrame]) -> None:
        orders = {key: recount.ranks(column) for key, column in columns.items()}
        with self._style():
            fig, axes = plots.panels(len(orders), 3, (3.4, 1), sharey=False)
            lines = rank_figures.fit(fig, axes, [len(order) for order in orders.values()])
            for ax, most, (key, order) in zip(axes, lines, orders.items(), strict=True):
                column = columns[key]
                rank_figures.ranks(order, set(column.rule[column.same]), ax, most)
                ax.set_title(f"{_named(*key)}\n{_where(column)}")
            ranks = [cast(pd.Series, order.stack()) for order in orders.values()]
            long = [r.rename("rank").reset_index() for r in ranks]
            said = "1 is the best, methods stand in the order of the paper's own way to count. "
            said += "* as the paper counts; blue: better than so, red: worse; grey: no such runs."
            frames = zip(orders, long, strict=True)
            frame = pd.concat([f.assign(panel=_named(*key)) for key, f in frames])
            said = f"{where}: ranks under other ways to count. {said}"
            self._figure(f"ranks{_FILES[where]}", fig, frame, said)

    def leaders(self) -> None:
        """Which columns have another leader under another rule, in sentences."""
        if not self.columns:
            return
        for where, columns in _by_data(self.columns).items():
            said = []
            for key, column in columns.items():
                (first, _), *others = recount.leaders(column).items()
                words = [
                    f"{label(m)} under {' and '.join(f'*{WORDS[r]}*' for r in of)}"
                    for m, of in others
                ]
                if words:
                    said.append(f"- {_named(*key)}: {label(first)} leads; {', '.join(words)}.")
            show(
                f"**{where}.** Another rule changes the leader in {len(said)} of {len(columns)} "
                "columns, noise not considered" + (":" if said else ".")
            )
            show("\n".join(said))

    def agreement(self) -> None:
        """Kendall's tau between rules, a panel a profile, and what moves most."""
        found = {}
        for profile in _profiles(self.columns):
            some = [c for c in self.columns.values() if c.profile.iloc[0] == profile]
            tau, count = recount.taus(some)
            if len(tau) > 1:
                found[profile] = tau, count
        if not found:
            return
        with self._style():
            fig, axes = plots.panels(len(found), 2, (4.2, 3.6), sharey=False)
            for ax, (profile, pair) in zip(axes, found.items(), strict=True):
                panel = rank_figures.taus(pair[0], pair[1], ax)
                panel.set_title(_read(self.columns.values(), profile))
            long = [_pairs(*pair).assign(profile=p) for p, pair in found.items()]
            said = "Kendall's tau of the orders of methods under two rules, mean over columns; "
            said += "below it, over how many. Columns where both rules are one are left out."
            self._figure("agreement", fig, pd.concat(long), said)
        for profile, pair in found.items():
            show(_least(profile, _pairs(*pair)))

    def reversals(self) -> pd.DataFrame:
        """Pairs of methods that are told apart under two rules, in opposite orders."""
        frames = [pd.DataFrame(columns=["column", "sure"])]
        for where, columns in _by_data(self.columns).items():
            some, pairs = [pd.DataFrame(columns=["column", "ahead", "behind", "sure"])], 0
            for key, column in columns.items():
                if column.seed.nunique() > 1:
                    found = recount.reversals(column)
                    some.append(found.assign(column=_named(*key), on=_where(column)))
                    pairs += column.row.nunique() * (column.row.nunique() - 1) // 2
            every = pd.concat(some, ignore_index=True)
            frames.append(every[every.sure.eq(True)])
            if pairs:
                ever = len(every.drop_duplicates(["column", "ahead", "behind"]))
                show(
                    f"**{where}.** Of {pairs} pairs of methods in columns with two seeds or more, "
                    f"{ever} change order under some rule. Beyond noise, so that the intervals of "
                    f"the two differences lie on opposite sides of 0: {len(frames[-1])}."
                )
        return self._table("reversals", _worded_reversals(pd.concat(frames, ignore_index=True)))

    # -- claims ------------------------------------------------------------------------------------

    def claims(self) -> pd.DataFrame:
        """Claims whose verdict is not the same under all rules that their runs have.

        Those that hold under all, and those that are contradicted under all, are said first.
        """
        found = [recount.claims(runs) for runs in self.runs]
        every = pd.concat([f for f in found if len(f)] or [pd.DataFrame()], ignore_index=True)
        rules = [rule for rule in (REPORTED, *RULES) if rule in every]
        if not rules:
            return pd.DataFrame()
        verdicts = every[rules].astype(object).where(every[rules].notna(), "")
        sets = [{v.partition(":")[0] for v in line} for line in verdicts.to_numpy()]
        silent = {"", "not run", "not judged"}
        kinds = pd.Series([kind - silent for kind in sets], verdicts.index, dtype=object)
        flips = kinds[kinds.map(len) > 1]
        turned = sum({"holds", "contradicted"} <= kind for kind in flips)
        judged = int((kinds.map(len) > 0).sum())
        firm = kinds[kinds.map(len) == 1].map("".join)
        said = ", ".join(f"{n} *{word}*" for word, n in firm.value_counts().items())
        show(
            f"We judge {judged} claims under all rules: those whose numbers change with the rule, "
            "and whose runs have two seeds or more. "
            f"The verdict stays for {len(firm)} ({said}) and changes for {len(flips)}; {turned} of "
            "these hold under one rule and are contradicted under another."
        )
        for word, heading in (("holds", "Hold"), ("contradicted", "Are contradicted")):
            lines = [_claim(v) for v in tuples(every.loc[firm.index[firm == word]])]
            if lines:
                show("\n".join([f"**{heading} under every rule:**\n", *lines]))
        shown = every.loc[flips.index]
        out = verdicts.loc[flips.index].rename(columns=WORDS)
        out.insert(0, "profile", shown.profile)
        out.insert(0, "claim", [_claim(v).removeprefix("- ") for v in tuples(shown)])
        return self._table("claims", out.loc[:, (out != "").any()])

    # -- beside the printed numbers ----------------------------------------------------------------

    def nearest(self) -> pd.DataFrame:
        """How far our leads of a paper's method lie from the printed ones under each rule."""
        lines, nearer, beyond = [], [], 0
        for runs in self.runs:
            for column, of in grouped(recount.distances(runs), "column"):
                points, name = of.set_index("rule").points, f"{runs.name}: {column}"
                line = {"column": name, "leads": of.leads.iloc[0]}
                line |= {"noise of one": f"{of.noise.iloc[0]:.1f}"}
                lines.append(line | {WORDS[str(rule)]: f"{v:.1f}" for rule, v in points.items()})
                first = str(points.idxmin())
                if first != REPORTED and points.min() < points[REPORTED] - 0.05:
                    best = f"{WORDS[first]} ({points.min():.1f}"
                    nearer.append(f"- {name}: {best} in place of {points[REPORTED]:.1f} points).")
                    beyond += bool(points[REPORTED] - points.min() > of.noise.iloc[0])
        if not lines:
            return pd.DataFrame()
        show(
            f"Another rule lies nearer to print in {len(nearer)} of {len(lines)} columns, in "
            f"{beyond} of them by more than the noise:"
        )
        show("\n".join(nearer))
        return self._table("nearest", pd.DataFrame(lines).fillna(""))

    # -- the best test round, and settings ---------------------------------------------------------

    def gains(self) -> pd.DataFrame:
        """How far the best test round is above rounds that no test data chose, by column."""
        each = [pd.DataFrame(columns=["paper", "against"])]
        two = recount.comparable(self.numbers, 2) if len(self.numbers) else {}
        own = {k: c for k, c in two.items() if c.profile.iloc[0] in papers.FULL}
        two = own or two  # digits say nothing beside the papers' data
        for key, column in two.items():
            name = _named(*key).partition(", ")[2]
            found = recount.gains(column).assign(paper=key[0], column=name, on=_where(column))
            each.append(found)
        every = pd.concat(each, ignore_index=True)
        if every.empty:
            return pd.DataFrame()
        names = list(dict.fromkeys(every.paper))
        most = max(every[every.paper == name].column.nunique() for name in names)
        with self._style():
            fig, axes = plots.panels(len(names), 2, (4.6, 0.27 * most + 1.2), sharey=False)
            for ax, name in zip(axes, names, strict=True):
                rank_figures.gains(every[every.paper == name], ax).set_title(label(name))
            plots.share_legend(fig)
            said = "What the best test round gives. Dots: mean over methods, with 95 % intervals "
            said += "over seeds where there are two or more; ticks: the method with most."
            said += "".join(f" {_read(two.values(), p)}." for p in _profiles(two))
            self._figure("gains", fig, _flat_gains(every), said)
        show(_tail(self.runs))
        for rule, of in grouped(every, "against"):
            means = np.array([g.estimate for g in of.gain])
            top = of.iloc[int(of.largest.argmax())]
            show(
                f"- Above *{WORDS[rule]}*: {np.median(means):.1f} points in the median of "
                f"{len(of)} columns, {means.min():.1f} to {means.max():.1f}; of a single method at "
                f"most {top.largest:.1f} ({label(top.of)} in {label(top.paper)}'s {top.column})."
            )
        return self._table("gains", _wide_gains(every))

    def settings(self) -> pd.DataFrame:
        """What averaged BatchNorm statistics, another tested model and a rate of its own change."""
        lines = []
        for runs in [*self.runs, *recount.tunings(self.runs)]:
            for v in tuples(recount.other_settings(runs)):
                where = f"{runs.name}: {v.column}"
                lines.append((where, label(v.row), v.what, _points(v.gain)))
            tried = recount.tuned(runs)
            rates = [str(c) for c in tried if c not in ("own", "chosen")]
            for row, line in tried.iterrows():
                for rate in rates[1:]:
                    text = f"{float(line[rate]) - float(line[rates[0]]):+.1f}"
                    lines.append((runs.name, label(row), f"{rate} in place of {rates[0]}", text))
            if len(tried):
                show(_tuned(runs, tried, rates))
        if not lines:
            show("No table that is read here has runs which differ in one of the three alone.")
        out = pd.DataFrame(lines, columns=["column", "method", "what changes", "points"])
        return self._table("settings", out)

    def finish(self) -> str:
        """A line on rows, versions and time."""
        self._open.close()
        runs = self.numbers.run.nunique() if len(self.numbers) else 0
        took = time.monotonic() - self.began
        versions = f"pfl_core {__version__}, Python {platform.python_version()}"
        return f"{runs} runs read, none trained; {versions}; {took:.0f} s"

    # -- showing -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _style(self) -> Iterator[None]:
        style: dict[Any, Any] = {**STYLE}
        with matplotlib.rc_context(style):
            yield

    def _figure(self, name: str, fig: Figure, frame: pd.DataFrame, said: str) -> None:
        plots.note(fig, said)
        plots.save(fig, frame, self._folder() / name)
        show(ipython().Image(data=plots.compact(fig, 100), alt=plots.described(fig)))

    def _table(self, name: str, frame: pd.DataFrame) -> pd.DataFrame:
        frame = frame.reset_index(drop=True)
        report.save_table(frame, self._folder() / name)
        return readable.Texts(readable.named(frame))

    def _folder(self) -> Path:
        return places.figures_folder() / "what_holds" / self.profile


# -- sentences -------------------------------------------------------------------------------------


OWN, DIGITS = "The papers' data", "Digits"
_FILES = {OWN: "", DIGITS: "-digits"}


def _by_data(columns: dict[Any, pd.DataFrame]) -> dict[str, dict[Any, pd.DataFrame]]:
    # What was run on the papers' own data, and what was not, where there is any.
    own = {key: c for key, c in columns.items() if c.profile.iloc[0] in papers.FULL}
    rest = {key: c for key, c in columns.items() if key not in own}
    return {k: v for k, v in {OWN: own, DIGITS: rest}.items() if v}


def _named(paper: str, artefact: str, column: str) -> str:
    return f"{label(paper)}, {papers.title(artefact)}: {column}"


def _where(column: pd.DataFrame) -> str:
    data = plots.in_words(", ".join(sorted(set(column.dataset))))
    return f"{column.profile.iloc[0]}, {data}, {_seeds([column])}"


def _profiles(columns: dict[Any, pd.DataFrame]) -> list[str]:
    return list(dict.fromkeys(column.profile.iloc[0] for column in columns.values()))


def _read(columns: Iterable[pd.DataFrame], profile: str) -> str:
    some = [column for column in columns if column.profile.iloc[0] == profile]
    data = sorted({name for column in some for name in column.dataset})
    return f"Profile {profile}, data {plots.in_words(', '.join(data))}, {_seeds(some)}"


def _seeds(parts: Iterable[pd.DataFrame]) -> str:
    # Of each row in each column, since rows may have more than their neighbours.
    counts = [p.groupby(["row", "column"]).seed.nunique() for p in parts]
    return report.seeds_in_words(pd.concat(counts))


def _lacking(runs: list[Runs], shown: set[tuple[str, str, str]]) -> str:
    # Which rules columns of the picture lack, and why.
    why: dict[tuple[str, str], set[str]] = {}
    some = [r for r in runs if (r.paper.key, r.artefact) in {key[:2] for key in shown}]
    for r, rule in itertools.product(some, [rule for rule in RULES if rule != AVERAGED]):
        for column, reason in recount.without(rule, r).items():
            if (r.paper.key, r.artefact, column) in shown:
                why.setdefault((rule, reason), set()).add(r.name)
    texts = [f"*{WORDS[k]}* in {'; '.join(sorted(v))} ({r})" for (k, r), v in why.items()]
    return f"Missing in some columns: {'. '.join(texts)}." if texts else ""


def _tail(runs: list[Runs]) -> str:
    shares = [share for r in runs for share in recount.tails(r)]
    if not shares:
        return ""
    low, high = (f"{100 * share:.0f} %" for share in (min(shares), max(shares)))
    ends = low if low == high else f"{low} to {high}"
    return (
        f"The last ten evaluations stretch over the last {ends} of a run's rounds here. The longer "
        "this stretch, the more *last ten* rewards fast starters."
    )


def _standing(runs: list[Runs]) -> str:
    small = [r for r in runs if r.profile not in papers.FULL]
    if not runs:
        return "There are no runs of this profile yet, so nothing is shown and nothing claimed."
    if not small:
        return "All that is read here ran with the papers' own data and networks."
    what = "All" if len(small) == len(runs) else f"{len(small)} of {len(runs)}"
    return (
        f"{what} tables and figures have runs on digits only. They show how much a rule can "
        "matter, and nothing about the papers' own data."
    )


def _pairs(tau: pd.DataFrame, count: pd.DataFrame) -> pd.DataFrame:
    i, j = np.tril_indices(len(tau), -1)
    where = dict(rule=tau.index[i], other=tau.index[j])
    out = pd.DataFrame(where | dict(tau=tau.to_numpy()[i, j], columns=count.to_numpy()[i, j]))
    return out[out["columns"] > 0]


def _least(profile: str, pairs: pd.DataFrame) -> str:
    low, high = (pairs.iloc[int(i)] for i in (pairs.tau.argmin(), pairs.tau.argmax()))
    texts = [
        f"*{WORDS[p.rule]}* and *{WORDS[p.other]}* ({p.tau:.2f}, {p['columns']} "
        f"column{'s' * int(p['columns'] > 1)})"
        for p in (low, high)
    ]
    return f"Profile {profile}: least alike are {texts[0]}, most alike {texts[1]}."


def _claim(line: Any) -> str:
    return f"- {label(line.paper)}: {line.says} ({line.source})"


def _points(found: Interval) -> str:
    return verdicts.ends(found, unit="")


def _worded_reversals(sure: pd.DataFrame) -> pd.DataFrame:
    texts = [
        {
            "column": f"{v.column} ({v.on})",
            "as the paper counts": f"{label(v.ahead)} before {label(v.behind)}",
            "by": _points(v.reported),
            "rule": WORDS[v.rule],
            "then": _points(v.recounted),
        }
        for v in tuples(sure)
    ]
    return pd.DataFrame(texts)


def _flat_gains(every: pd.DataFrame) -> pd.DataFrame:
    ends = pd.DataFrame(
        [(g.estimate, g.low, g.high) for g in every.gain], columns=["gain", "low", "high"]
    )
    return pd.concat([every.drop(columns="gain").reset_index(drop=True), ends], axis=1)


def _wide_gains(every: pd.DataFrame) -> pd.DataFrame:
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for v in tuples(every):
        text = _points(v.gain)
        line = lines.setdefault((label(v.paper), v.column, v.on), {})
        line[f"above {WORDS[v.against]}"] = text
    heads = [dict(zip(("paper", "column", "read on"), key, strict=True)) for key in lines]
    return pd.DataFrame([h | v for h, v in zip(heads, lines.values(), strict=True)]).fillna("")


def _tuned(runs: Runs, tried: pd.DataFrame, rates: list[str]) -> str:
    by = "validation data" if tried.chosen.iloc[0] == "val" else "test data (optimistic)"
    common, own = (
        ", ".join(label(m) for m in tried[c].sort_values(ascending=False, kind="stable").index)
        for c in (rates[0], "own")
    )
    same = "the same" if common == own else own
    return (
        f"{runs.name}: at the common rate ({rates[0]}) the order is {common}; each at its best of "
        f"{len(rates)} rates, chosen by {by}, it is {same}."
    )
