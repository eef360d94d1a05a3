"""Finished runs as a table for a paper: rows x columns, intervals, differences, what ties."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pfl_core.analysis import plots
from pfl_core.analysis.noise import ONE_MODEL, Column, Interval
from pfl_core.analysis.select import (
    KINDS,
    MOMENTS,
    RUN,
    SELECT,
    alike,
    grouped,
    pick,
    replicates,
    ten,
    tuples,
)
from pfl_core.engine.scoring import COUNTED, less_is_better, list_metrics
from pfl_core.experiments import listing, settings
from pfl_core.experiments.metrics import LOST, TOTALS, UNTESTED
from pfl_core.experiments.store import Result, finished
from pfl_core.util import checks, paths, sums
from pfl_core.util.cards import markdown, span

AVERAGES = ("client", "pooled")
MOST_DIGITS = 15  # as a float has them
LESS = ("acc_sd", *TOTALS)  # of these less is better, too
NEEDED = ("run", "row", "column", "method", "seed", "rounds", *KINDS, "value")
Labels = str | Sequence[str] | None
UNEVEN = " Some rows have fewer seeds; bold compares two rows over the seeds that both have."


def table(
    *given: Result | pd.DataFrame,
    rows: Labels = None,
    columns: Labels = None,
    against: str = "",
    metric: str = "acc_pct",
    select: str = "last",
    when: str = "before",
    average: str = "client",
    digits: int | None = None,
) -> Table:
    """Make a table of finished runs: means over seeds with 95 % intervals, the best in bold.

    Parameters
    ----------
    *given : Result or DataFrame
        What `run` or `runs` returned, or the rows of a `sweep`. The table has their order.
    rows, columns : str or several, optional
        Fields of an Experiment whose values label a side: "method", "partition_args.alpha". By
        default the tags of `grid`; of runs without tags, rows are named by what differs.
    against : str
        A row from which all others' differences are shown, paired by seed.
    metric : str
        A metric of the rows: "acc_pct", "acc_worst10", "loss", ..., or what
        `Experiment(metrics=...)` named: the mean over the clients for which it is defined; or what
        a run took in all: "download_bytes", "upload_bytes", "client_visits", "train_s".
    select, when, average : str
        Which number of a run: see `analysis.select.pick`.
    digits : int, optional
        Decimals: by default 2, of what `Experiment(metrics=...)` named 3, of bytes and visits 0.

    Raises
    ------
    TypeError, ValueError
        For what is neither; for runs of one cell that differ in more than the seed; for rows of a
        column that have other data of a user's own under one seed; for a row, field or metric that
        is not there.

    Notes
    -----
    Noise over seeds is pooled over the rows of a column, as everywhere here (`analysis.noise`). A
    cell says which of its column's seeds it lacks: "3 of 4 seeds", "diverges (1 of 4)". Two rows
    are compared over the seeds that both have.

    Examples
    --------
    >>> from pfl_core import Experiment, grid, sweep
    >>> base = Experiment(clients=3, model="mlp", rounds=1, partition="iid", max_samples=50)
    >>> methods = {"FedAvg": {"method": "fedavg"}, "FedPer": {"method": "fedper"}}
    >>> found = table(sweep(grid(base, methods, seeds=(0, 1)), device="cpu"), against="FedAvg")
    >>> found.text().shape, found.cells.seeds.tolist()
    ((2, 2), [2, 2])
    """
    frame, lost, order = _labelled(given, rows, columns)
    check(order[0], against=against, select=select, average=average, digits=digits)
    if "test" not in set(frame.split):
        raise ValueError(f"table: {UNTESTED}")
    add = f"run with Experiment(metrics=({metric!r},))" * (metric in list_metrics())
    checks.known("metric", metric, sorted({*frame.metric.str.removesuffix(COUNTED)}), add)
    picked = pick(frame, select, when, average, metric)
    if picked.empty:
        own = frame[(frame.metric == metric) & (frame.split == "test")]
        there = own.when.str.cat(own["average"], ", ").unique()
        raise ValueError(
            f"table: no {metric} of test data at when={when!r}, average={average!r}; there are "
            f"{'; '.join(there) or 'none'}"
        )
    picked = alike(picked, ["row", "column"])
    _check_data(picked, given)
    cells = _cells(picked, lost, metric, when, against)
    counted = _counted(frame, picked, metric, select)
    how = f"{average} mean, {SELECT[select]}, {MOMENTS.get(when, when)}"
    how = "of the run in all" if metric in TOTALS else how
    if digits is None:
        digits = 3 if counted else 2 if metric not in TOTALS or metric == "train_s" else 0
    return Table(cells, order, against, digits, f"{_measure(metric)}{counted}, {how}.")


def check(
    rows: Collection[str],
    *,
    against: str = "",
    select: str = "last",
    average: str = "client",
    digits: int | None = None,
    **_: Any,
) -> None:
    """Raise ValueError for options of `table` that no runs of these rows could be shown with."""
    if against:
        checks.known("row", against, rows)
    checks.known("select", select, SELECT)
    checks.known("average", average, AVERAGES)
    if digits is not None and checks.whole(digits) not in range(MOST_DIGITS + 1):
        raise ValueError(f"digits={digits!r}: allowed is an integer from 0 to {MOST_DIGITS}")


class Table:
    """A table of finished runs: shown by a notebook, printed, or as LaTeX, CSV and Markdown.

    Attributes
    ----------
    cells : DataFrame
        A line a cell: row, column, seeds, value, half (of its 95 % interval), best (the best of
        its column, or not told apart from it), difference, low and high (to the row `against`),
        fewer ("3 of 4 seeds", if it was run with fewer than its column) and lost ("diverges (1 of
        4)", of its runs). One without a number has 0 seeds.
    caption : str
        What the numbers are.
    """

    def __init__(
        self, cells: pd.DataFrame, order: list[list[str]], against: str, digits: int, said: str
    ):
        self.cells, self._order = cells, order
        self.against, self.digits = against, digits
        self.caption = f"{said} {self._explained()}"

    def _explained(self) -> str:
        ended = self.cells[self.cells.seeds > 0]
        seeds = sorted({int(n) for n in ended.seeds})
        uneven = any(ended.fewer) or any(ended.groupby("column").seeds.nunique() > 1)
        n = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        if seeds[-1] < 2:
            return "One seed: there are no intervals." + UNEVEN * uneven
        text = f"± is half of the 95 % interval over {n} seeds."
        text += " Bold: the best of a column and all that its runs do not tell from it."
        text += UNEVEN * uneven
        if self.against:
            text += f" Brackets: 95 % interval of the difference from {self.against}."
        return text

    def text(self, bold: str = "{}", pm: str = "±") -> pd.DataFrame:
        """The table as text; `bold` is how the best are written, `pm` the sign between."""
        out: dict[Any, dict[str, str]] = {}
        d = self.digits
        for c in tuples(self.cells):
            value = f"{c.value:.{d}f}" + ("" if np.isnan(c.half) else f" {pm} {c.half:.{d}f}")
            value = (bold.format(value) if c.best else value) + f" ({c.fewer})" * bool(c.fewer)
            said = ", ".join(filter(None, [value * bool(c.seeds), c.lost]))
            out.setdefault((c.column, ""), {})[c.row] = said or "not run"
            if self.against and c.row != self.against:
                ends = "" if np.isnan(c.low) else f" [{c.low:+.{d}f}, {c.high:+.{d}f}]"
                head = f"- {self.against}"
                there = "" if np.isnan(c.difference) else f"{c.difference:+.{d}f}{ends}"
                out.setdefault((c.column, head), {})[c.row] = there
        return self._framed(out)

    def _framed(self, out: dict[Any, dict[str, str]]) -> pd.DataFrame:
        rows, columns = self._order
        heads = [(c, kind) for c in columns for kind in ("", f"- {self.against}")]
        frame = pd.DataFrame({h: out[h] for h in heads if h in out}).reindex(rows)
        frame = frame.astype(object).where(frame.notna(), "not run")
        for place, head in enumerate(frame.columns):
            if head[1]:  # a difference of what was not run is none
                frame.isetitem(place, frame.iloc[:, place].replace("not run", ""))
        return frame.set_axis([" ".join(filter(None, h)) or "value" for h in frame.columns], axis=1)

    def latex(self) -> str:
        """The table for a paper, with booktabs' rules; the caption stands above as a comment."""
        frame = self.text(r"\textbf{{{}}}", r"$\pm$")
        frame = frame.rename(index=_escaped, columns=_escaped).map(lambda v: v.replace("%", r"\%"))
        form = "l" + "r" * frame.shape[1]
        return f"% {self.caption}\n" + frame.to_latex(column_format=form)

    def markdown(self) -> str:
        """The table in Markdown, its caption above."""
        return f"{self.caption}\n\n{markdown(self.text('**{}**').reset_index(names=''))}"

    def csv(self, path: str | Path | None = None) -> str:
        """The cells as CSV, written to `path` if one is given."""
        text = self.cells.to_csv(index=False)
        if path is not None:
            _written(path, text)
        return text

    def _repr_html_(self) -> str:
        frame = self.text("\ue000{}").map(html.escape)
        marked = frame.map(lambda v: f"<b>{v[1:]}</b>" if v.startswith("\ue000") else v)
        shown = marked.rename(index=html.escape, columns=html.escape)
        return f"<p>{html.escape(self.caption)}</p>\n{shown.to_html(escape=False, border=0)}"

    def __repr__(self) -> str:
        return f"{self.caption}\n{self.text('*{}').to_string()}"


def export(path: str | Path, *given: Result | pd.DataFrame, clients: bool = False) -> Path:
    """Write the rows of finished runs to a CSV file, one number a line.

    Parameters
    ----------
    path : str or Path
        The file; one that is there is replaced.
    *given : Result or DataFrame
        As for `table`.
    clients : bool
        The accuracy of every client of every Result in place of what is over clients.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    TypeError, ValueError
        For what is neither, and for none.
    """
    _check(given, "export")
    if clients:
        whole = [r for r in given if isinstance(r, Result)]
        if len(whole) < len(given):
            raise TypeError("export(clients=True): only Results know their clients: give runs(...)")
        frames = [r.clients.assign(run=r.id, method=r.experiment.method) for r in whole]
        frames = [f.assign(seed=r.experiment.seed) for f, r in zip(frames, whole, strict=True)]
    else:
        frames = [g.rows if isinstance(g, Result) else g for g in given]
    return _written(path, pd.concat(frames, ignore_index=True).to_csv(index=False))


def _written(path: str | Path, text: str) -> Path:
    # Whole, or what was there stays.
    file = paths.to_write(path, "path")
    with sums.replacing(file) as out:
        out.write(text.encode())
    return file


# -- the labels ------------------------------------------------------------------------------------


def _check(given: Iterable[Any], what: str) -> None:
    if not given:
        raise ValueError(f"{what}: there is nothing; give Results or rows: {what}(run(...))")
    for one in given:
        if not isinstance(one, Result | pd.DataFrame):
            got = type(one).__name__
            raise TypeError(f"{what} takes Results and rows, got {got}; of a list write *results")


def _labelled(
    given: Sequence[Any], rows: Labels, columns: Labels
) -> tuple[pd.DataFrame, pd.DataFrame, list[list[str]]]:
    # All numbers of runs that ended, with their row and column; a line for each run that did not;
    # and the labels of both sides in order.
    _check(given, "table")
    results = [*{_cell(r): r for r in given if isinstance(r, Result)}.values()]
    of_rows = _side(results, "row", rows, _names(columns))
    sides = zip(results, of_rows, _side(results, "column", columns), strict=True)
    cells = {_cell(r): dict(row=row, column=column) for r, row, column in sides}
    parts = [
        one.rows.assign(**cells[_cell(one)])
        if isinstance(one, Result)
        else _relabelled(one, rows, columns)
        for one in given
    ]
    order = [[*dict.fromkeys(v for p in parts for v in p[side])] for side in ("row", "column")]
    frame = pd.concat(parts, ignore_index=True).assign(paper="", artefact="")
    marks = frame.metric.isin(list(LOST))
    lost = frame[marks].drop_duplicates(["row", "column", *_whose(frame)])
    frame = frame[~frame.run.isin(lost.run)]
    if frame.empty:
        raise ValueError(f"table: none of {len(lost)} runs ended with finite numbers")
    return frame, lost, order


def _whose(frame: pd.DataFrame) -> list[str]:
    # Columns that tell runs apart; those that raised an error have no key.
    known = [name for name in ("setting", "partition_seed") if name in frame]
    return ["key" if "key" in frame else "run", "seed", *known]


def _cell(result: Result) -> tuple[str, ...]:
    # A run, where it is shown: one run may be in two rows.
    return result.key, *(result.experiment.tags.get(side, "") for side in ("row", "column"))


def _relabelled(frame: pd.DataFrame, rows: Labels, columns: Labels) -> pd.DataFrame:
    if lacks := [name for name in NEEDED if name not in frame]:
        raise ValueError(
            f"table: a frame lacks the columns {', '.join(lacks)}; give what `sweep` returned, or "
            "result.rows"
        )
    for side, fields in (("row", rows), ("column", columns)):
        if names := _names(fields):
            for name in names:
                checks.known("column of these rows", name, list(frame))
            texts = frame[names].astype(str).agg(", ".join, axis=1)
            frame = frame.assign(**{side: texts})
    frame = frame.astype({"row": str, "column": str})  # labels may be numbers
    return frame.assign(row=frame.row.where(frame.row != "", frame.method))


def _names(fields: Labels) -> list[str]:
    return [fields] if isinstance(fields, str) else [*(fields or ())]


def _side(results: list[Result], side: str, fields: Labels, but: Sequence[str] = ()) -> list[str]:
    # The label of each run on one side of the table; fields in `but` label the other one.
    if names := _names(fields):
        flat = [listing.fields_of(r.experiment) for r in results]
        for name in names if results else ():  # those of frames are looked at there
            if not any(name in f for f in flat):
                checks.known("field", name, sorted({n for f in flat for n in f}))
        return [", ".join(_said(f.get(name)) for name in names) for f in flat]
    tags = [r.experiment.tags.get(side, "") for r in results]
    if side == "column" or all(tags):
        return tags
    return listing.names(results, but)


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "default" if value is None else str(value)


def _check_data(picked: pd.DataFrame, given: Sequence[Any]) -> None:
    # ValueError where rows of a column have other data of a user's own under one seed: what is
    # shown between them is paired by seed. Of rows alone, the store knows their data.
    own = picked[picked.dataset == "own"]
    if not own.duplicated(["column", "seed"]).any():
        return
    known = {r.id: r.meta.get("pool") for r in given if isinstance(r, Result)}
    for run in {*own.run} - {*known}:
        known |= {r.id: r.meta.get("pool") for r in finished(run) if r.id == run}
    for (column, seed), of in grouped(own, ["column", "seed"]):
        data = dict(zip(of.row, of.run.map(known), strict=True))
        if of.run.map(known).isna().any():  # they lie in another store
            apart = settings.differences(of.setting).get("pool", [])
            told = dict(zip(of.setting.unique(), apart, strict=False))
            data = dict(zip(of.row, of.setting.map(told), strict=True)) if told else {}
        first = next(iter(data), "")
        other = next((row for row, v in data.items() if v != data[first]), None)
        if other is not None:
            where = f"column {column!r}, seed {seed}" if column else f"seed {seed}"
            sums = " and ".join(str(data[row])[:8] for row in (first, other))
            raise ValueError(
                f"table: rows {first!r} and {other!r} are over other data or clients ({where}: "
                f"data {sums}), so they are not compared; run all methods over one Federation a "
                "seed, in one sweep, or give each Federation a column of its own: "
                'Experiment(tags={"column": ...})'
            )


# -- the numbers -----------------------------------------------------------------------------------


def _cells(
    picked: pd.DataFrame, lost: pd.DataFrame, metric: str, when: str, against: str
) -> pd.DataFrame:
    out = []
    every = replicates(pd.concat([picked, lost], ignore_index=True), ["row", "column"])
    for column, tried in every.groupby("column", sort=False):
        of = tried[~tried.metric.isin(list(LOST))]
        wide = of.pivot_table(index="row", columns="seed", values="value", sort=False)
        one = of[of.method.isin(ONE_MODEL)].row.unique() if when == "before" else ()
        found = Column(wide, [*one])
        best = found.best(-1 if metric in LESS or less_is_better(metric) else 1)
        for row, own in grouped(tried, "row"):
            there = row in wide.index
            level = found.level(row) if there else Interval()
            line = dict(row=row, column=column, seeds=level.seeds, value=level.estimate)
            line |= dict(half=level.half, best=row in best)
            both = there and against in wide.index
            other = _gap(found, row, against) if both else Interval()
            line |= dict(difference=other.estimate, low=other.low, high=other.high)
            fewer = there and own.seed.nunique() < tried.seed.nunique()
            line["fewer"] = f"{level.seeds} of {tried.seed.nunique()} seeds" * fewer
            out.append(line | dict(lost=_lost(own)))
    return pd.DataFrame(out)


def _lost(runs: pd.DataFrame) -> str:
    # "diverges (1 of 4), fails (1 of 4)" of a cell's runs.
    counts = {word: int((runs.metric == metric).sum()) for metric, word in LOST.items()}
    return ", ".join(f"{word} ({n} of {len(runs)})" for word, n in counts.items() if n)


def _counted(frame: pd.DataFrame, picked: pd.DataFrame, metric: str, select: str) -> str:
    # " over 14 of 20 clients", for which a metric is defined where it was picked; else "".
    kind = [*RUN, "when", "split", "average"]
    on = kind if select == "last10" else [*kind, "rounds"]
    counts = frame[frame.metric == metric + COUNTED].merge(picked[on].drop_duplicates(), on=on)
    if select == "last10" and len(counts):
        counts = counts.merge(ten(counts, picked.when.iloc[0]), on=[*RUN, "rounds"])
    if counts.empty:
        return ""
    n, of = (span([*map(int, counts[c])]) for c in ("value", "n_clients"))
    return f" over {n} of {of} clients"


def _gap(column: Column, row: str, other: str) -> Interval:
    # A difference over the seeds that both have, if any.
    if row == other or column.table.loc[[row, other]].dropna(axis=1).empty:
        return Interval()
    return column.difference(row, other)


def _measure(metric: str) -> str:
    return plots.display(metric, plots.MEASURE_LABELS)


def _escaped(text: str) -> str:
    signs = {sign: f"\\{sign}" for sign in "&%$#_{}"} | {"\\": r"\textbackslash{}"}
    signs |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return text.translate(str.maketrans(signs))
