"""Rows made readable: tables, claims with verdicts, and what is published to results/ and figures/."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from pfl_core.runs import ROW_COLUMNS, results_folder, runs_root

SELECT = ("last", "last10", "best_val", "best_test")


def pick(
    rows: pd.DataFrame, select: str = "last", when: str = "before", mean: str = "client", metric: str = "acc_pct"
) -> pd.DataFrame:
    """One number a run: `metric` on the test split by a named rule; adds nothing, drops all other rows.

    select: "last" round, mean of the "last10" evaluations, round of "best_val" (first best), or "best_test" (optimistic: test data choose).
    Raises ValueError for another rule, and for "best_val" where a run has no validation data.
    """
    if select not in SELECT:
        raise ValueError(f"select={select!r} is unknown; use one of {', '.join(SELECT)}")
    series = rows[(rows.when == when) & (rows["mean"] == mean) & (rows.metric == metric)]
    series = series.sort_values("round", kind="stable", ignore_index=True)
    test, val = series[series.split == "test"], series[series.split == "val"]
    keys = ["run", "paper", "artefact", "row", "column"]
    if select == "last10":
        tail = test.groupby(keys, sort=False).tail(10)
        means = tail.groupby(keys, sort=False).value.transform("mean")
        return tail.assign(value=means).groupby(keys, sort=False).tail(1)
    if select == "last":
        return test.groupby(keys, sort=False).tail(1)
    chooser = val if select == "best_val" else test
    if len(blind := test[~test.run.isin(chooser.run)]):
        names = ", ".join(dict.fromkeys(blind.row))
        raise ValueError(f"select='best_val' needs validation data, and these rows have none: {names}; use 'last'")
    best = chooser.loc[chooser.groupby(keys, sort=False).value.idxmax()]
    return test.merge(best[[*keys, "round"]], on=[*keys, "round"])


def summary(picked: pd.DataFrame, rows: str = "row", columns: str = "column") -> pd.DataFrame:
    """Mean (and sd over n seeds, ddof 1) of picked numbers as text, a row x column table."""

    def cell(v: pd.Series) -> str:
        return f"{v.mean():.2f}" + (f" ± {v.std(ddof=1):.2f}" if len(v) > 1 else "")

    order = [list(dict.fromkeys(picked[c])) for c in (rows, columns)]
    table = picked.groupby([rows, columns], sort=False).value.agg(cell).unstack(columns)
    return table.reindex(index=order[0], columns=order[1]).fillna("not run")


# -- claims --------------------------------------------------------------------------------------------------------------


class Claim(NamedTuple):
    """What a paper says; `needs` the artefact it is judged on; `judge(rows) -> (what we measured, whether it holds)`."""

    says: str
    needs: str
    judge: Callable[[pd.DataFrame], tuple[str, bool]]


def _mean(rows: pd.DataFrame, row: str, column: str, metric: str = "acc_pct") -> float:
    got = pick(rows[(rows.row == row) & (rows.column == column)], metric=metric)
    if not len(got):
        raise LookupError(f"{row} / {column}")
    return float(got.value.mean())


def _gap(rows: pd.DataFrame, column: str, a: str = "fedper", b: str = "fedavg") -> float:
    return _mean(rows, a, column) - _mean(rows, b, column)


def _fedper_heterogeneous(rows: pd.DataFrame) -> tuple[str, bool]:
    gaps = {c: _gap(rows, c) for c in rows.column.unique() if c.endswith("k=4")}
    return ", ".join(f"{c}: {g:+.1f} points" for c, g in gaps.items()), all(g > 1 for g in gaps.values())


def _fedper_shrinks(rows: pd.DataFrame) -> tuple[str, bool]:
    nets = dict.fromkeys(c.split(",")[0] for c in rows.column.unique() if c.endswith("k=10"))
    pairs = {n: (_gap(rows, f"{n}, k=4"), _gap(rows, f"{n}, k=10")) for n in nets}
    return ", ".join(f"{n}: {a:+.1f} at k=4, {b:+.1f} at k=10" for n, (a, b) in pairs.items()), all(
        a > b for a, b in pairs.values()
    )


def _fedper_spread(rows: pd.DataFrame) -> tuple[str, bool]:
    c = next(iter(rows.column.unique()))
    a, b = (_mean(rows, m, c, "acc_sd") for m in ("fedper", "fedavg"))
    return f"sd over clients {a:.1f} (FedPer), {b:.1f} (FedAvg)", a < b


def _fedper_depth(rows: pd.DataFrame) -> tuple[str, bool]:
    out, good = [], True
    for net in rows.column.unique():
        acc = {r: _mean(rows, r, net) for r in rows[rows.column == net].row.unique()}
        span = max(acc.values()) - min(acc.values())
        out.append(f"{net}: {min(acc.values()):.1f} to {max(acc.values()):.1f}")
        good &= span < 5
    return ", ".join(out), good


def _fedper_linear(rows: pd.DataFrame) -> tuple[str, bool]:
    pairs = {c: (_mean(rows, "original", c), _mean(rows, "linear base", c)) for c in rows.column.unique()}
    return ", ".join(f"{c}: {a:.1f} original, {b:.1f} linear" for c, (a, b) in pairs.items()), all(
        a > b for a, b in pairs.values()
    )


def _fedper_finetune(rows: pd.DataFrame) -> tuple[str, bool]:
    pairs = {c: (_mean(rows, "fedper", c), _mean(rows, "fedper + fine-tuning", c)) for c in rows.column.unique()}
    return ", ".join(f"{c}: {a:.1f} without, {b:.1f} with" for c, (a, b) in pairs.items()), all(
        abs(a - b) < 3 for a, b in pairs.values()
    )


CLAIMS: dict[str, list[Claim]] = {
    "fedper": [
        Claim(
            "FedPer is clearly better than FedAvg where clients hold few classes (Sec. 4.3, Fig. 2)",
            "fig2",
            _fedper_heterogeneous,
        ),
        Claim("The gap shrinks as the data become alike (k from 4 to 10, Fig. 2)", "fig2", _fedper_shrinks),
        Claim("Clients' accuracies vary less under FedPer than under FedAvg (Fig. 3)", "fig3", _fedper_spread),
        Claim(
            "How many layers are personal matters little as long as the classifier is (Fig. 4: within 5 points)",
            "fig4",
            _fedper_depth,
        ),
        Claim("The federated base earns its keep: better than a linear base (Figs. 5, 6)", "fig5", _fedper_linear),
        Claim(
            "Fine-tuning the personal layers first changes little (App. A.3, Fig. 15: within 3 points)",
            "fig15",
            _fedper_finetune,
        ),
    ]
}


def claims(paper: str, rows: pd.DataFrame, profile: str) -> pd.DataFrame:
    """The paper's claims with the deciding number here and a verdict: columns says, artefact, measured, verdict, profile."""
    out = []
    for c in CLAIMS[paper]:
        own = rows[rows.artefact == c.needs]
        try:
            measured, holds = c.judge(own) if len(own) else ("", None)
        except LookupError as missing:
            measured, holds = f"{missing.args[0]} was not run", None
        if not measured:  # no cell of the artefact decides it, so neither does all([])
            holds = None
        verdict = "not run" if holds is None else "holds" if holds else "does not hold"
        out.append(dict(says=c.says, artefact=c.needs, measured=measured, verdict=verdict, profile=profile))
    return pd.DataFrame(out)


# -- files ---------------------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> pd.DataFrame:
    """Rows as `save_rows` wrote them."""
    rows = pd.read_csv(path, dtype={"run": str}, keep_default_na=False, low_memory=False)
    return rows.assign(value=pd.to_numeric(rows.value))


def save_rows(rows: pd.DataFrame, path: Path) -> None:
    """Write rows as CSV, columns in the project's order, numbers to 4 decimals."""
    rows[ROW_COLUMNS].assign(value=rows.value.astype(float).round(4)).to_csv(path, index=False)


def save_table(frame: pd.DataFrame, path: Path) -> None:
    """Write a table as path.csv, path.md and path.tex (booktabs)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path.with_suffix(".csv"))
    path.with_suffix(".md").write_text(markdown(frame) + "\n")
    path.with_suffix(".tex").write_text(latex(frame))


def markdown(frame: pd.DataFrame) -> str:
    """A frame as a Markdown table; a plain 0..n-1 index is left out."""
    body = frame.reset_index() if not isinstance(frame.index, pd.RangeIndex) else frame
    head, *rest = [[str(v).replace("|", "\\|") for v in r] for r in (body.columns, *body.to_numpy())]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * body.shape[1], *rest))


def latex(frame: pd.DataFrame) -> str:
    """A frame as a LaTeX table (booktabs); a plain 0..n-1 index is left out."""
    body = frame.reset_index() if not isinstance(frame.index, pd.RangeIndex) else frame
    marks = (
        {"\\": r"\textbackslash{}"}
        | {c: "\\" + c for c in "&%$#_{}"}
        | {"±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\^{}"}
    )
    text = [["".join(marks.get(ch, ch) for ch in str(v)) for v in r] for r in (body.columns, *body.to_numpy())]
    head, *rest = [" & ".join(r) + r" \\" for r in text]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{'l' * body.shape[1]}}}",
            r"\toprule",
            head,
            r"\midrule",
            *rest,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def named_runs() -> set[str]:
    """Ids of all runs that a row in results/ or runs/results/ names."""
    files = [*results_folder().glob("*.csv"), *(runs_root() / "results").glob("*.csv")]
    return {run for f in files for run in pd.read_csv(f, usecols=["run"], dtype=str).run.unique()}


def publish(paper: str) -> list[Path]:
    """Copy rows and figures of a paper's notebook (not of smoke) from runs/ to results/ and figures/; returns the files."""
    home, done = results_folder().parent, []
    for source in sorted((runs_root() / "results").glob(f"{paper}.*.csv")):
        profile = source.name.split(".")[1].split("-")[0]
        if profile == "smoke":  # never shown as a reproduction
            continue
        target = home / "results" / source.name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)
        done.append(target)
        folder = runs_root() / "figures" / paper / source.name.removeprefix(f"{paper}.").removesuffix(".csv")
        for f in sorted(folder.glob("*")):
            out = home / "figures" / paper / folder.name / f.name
            out.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(f, out)
            done.append(out)
    if not done:
        raise ValueError(
            f"nothing of {paper!r} to publish in {runs_root()}; run its notebook at profile quick or paper first"
        )
    return done
