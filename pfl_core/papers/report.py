"""Published numbers beside ours: tables with verdicts, and claims."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pandas as pd

from pfl_core.analysis import verdicts
from pfl_core.analysis.select import SELECT, pick, summary
from pfl_core.analysis.stats import paired
from pfl_core.experiments import committed
from pfl_core.papers import base as papers
from pfl_core.papers.base import Paper

__all__ = ["SELECT", "pick", "summary"]  # defined in analysis, below the papers' claims
# Rows read from another row's run, at when="after".
VIEWS = {"fedavg_ft": "fedavg", "fedprox_ft": "fedprox"}


# -- published beside reproduced -------------------------------------------------------------------


def published(paper: str | Paper) -> pd.DataFrame:
    """Every number that a paper prints: table, row, column, metric, value, std, note.

    ValueError for a paper without tables.
    """
    name = paper if isinstance(paper, str) else paper.key
    file = resources.files("pfl_core.papers") / "published" / f"{name}.csv"
    if not file.is_file():
        raise ValueError(
            f"no published numbers for {name!r}; there are those of pfedhn, pfedla, flayer, fedaghn"
        )
    with file.open(encoding="utf-8") as f:
        return pd.read_csv(f, keep_default_na=False, na_values={"std": [""]})


def reproduced(
    rows: pd.DataFrame, paper: str | Paper, metric: str = "acc_pct", **how: str
) -> pd.DataFrame:
    """One number a run as the paper reports it, views added; rows as `select.pick` returns them.

    how: select, when, mean in place of the paper's.
    """
    paper, parts = papers.paper(paper), []
    derived = rows["mean"] == "derived"  # computed from finished runs: `Artefact.numbers`
    if metric != "acc_pct":
        return rows[derived & (rows.metric == metric)].reset_index(drop=True)
    for name in dict.fromkeys(rows[~derived].row):
        own = rows[~derived & (rows.row == name)]
        rule = paper.report | {"when": paper.when.get(name, paper.report["when"])} | how
        parts.append(pick(own, **rule))
        for view in [v for v, source in VIEWS.items() if source == name and "when" not in how]:
            parts.append(pick(own, **rule | {"when": "after"}).assign(row=view))
    return pd.concat([p for p in parts if len(p)] or [rows.iloc[:0]], ignore_index=True)


def compare(
    rows: pd.DataFrame,
    paper: str | Paper,
    table: str,
    *,
    metric: str = "acc_pct",
    own: str = "",
    **how: str,
) -> pd.DataFrame:
    """Every published cell of a table beside what `rows` give: a line a row and column.

    rows: of the table's runs, labelled as the published rows and columns are.
    own: the row that orderings are taken to, by default the artefact's or the paper's own method.
    how: select, when, mean in place of the paper's.

    Columns: row, column, reported, reported_sd, reproduced, sd, n (runs), difference, ordering
    ("kept" or "changed": the sign of the difference to `own` in this column), verdict (see
    `analysis.verdicts`), profile, dataset. Rows of ours that the paper does not have stand at the
    end of their column.
    """
    paper = papers.paper(paper)
    said = published(paper)
    said = said[(said.table == table) & (said.metric == metric)]
    if said.empty:
        known = sorted(set(published(paper).table))
        raise ValueError(f"{paper.key} prints no {metric} in {table!r}; it has {known}")
    ours = reproduced(rows, paper, metric, **how) if len(rows) else rows
    own = own or _own(paper, table)
    stats = ours.groupby(["column", "row"], sort=False).agg(
        reproduced=("value", "mean"),
        sd=("value", "std"),
        n=("value", "size"),
        profile=("profile", "first"),
        dataset=("dataset", "first"),
    )
    cells = said.set_index(["column", "row"])[["value", "std"]]
    cells.columns = ["reported", "reported_sd"]
    order = []
    for c in dict.fromkeys([*said.column, *ours.column]):
        rows_of = dict.fromkeys([*said.row, *ours[ours.column == c].row])
        order += [(c, r) for r in rows_of if (c, r) in cells.index or (c, r) in stats.index]
    both = cells.join(stats, how="outer").reindex(order)
    both["difference"] = both.reproduced - both.reported
    both["ordering"] = [verdicts.ordering(both, c, r, own) for c, r in both.index]
    both["verdict"] = [verdicts.of_cell(v) for v in both.itertuples()]
    return both.reset_index().fillna({"profile": "", "dataset": "", "n": 0}).astype({"n": int})


def _own(paper: Paper, table: str) -> str:
    about = paper.artefacts.get(table)  # numbers of the paper's text belong to none
    return about.own if about and about.own else paper.own


def tables(rows: pd.DataFrame, paper: str | Paper, table: str) -> dict[str, pd.DataFrame]:
    """{metric: `compare`} of its Artefact's metrics that the paper prints; {} if it prints none.

    rows: of the whole paper.
    """
    paper = papers.paper(paper)
    if not paper.tables:
        return {}
    own, said = rows[rows.artefact == table], published(paper)
    printed = set(said[said.table == table].metric)
    found = [m for m in paper.artefacts[table].metrics if m in printed]
    return {m: compare(own, paper, table, metric=m) for m in found}


def data_sets(rows: pd.DataFrame) -> str:
    """The data sets of rows, with what is known of the copy that committed runs used.

    "cifar10 (58,865 of 60,000 samples, ...)" where it is not what its makers published.
    """
    out, heads = [], rows.drop_duplicates("run")  # what is derived may name another data set
    for name, own in heads.groupby("dataset"):
        copies = sorted({committed.copy_of(run) for run in own.run.unique()} - {""})
        out.append(name + (f" ({'; '.join(copies)})" if copies else ""))
    return ", ".join(out)


def wide(compared: pd.DataFrame, digits: int = 2) -> pd.DataFrame:
    """`compare`'s lines as a table to read, a row a method.

    Columns that were run stand first, with reported, reproduced, difference and ordering (at
    profile paper the verdict, too; "last" where compared has that); others with reported alone.
    """

    def cell(v: float, sd: float = float("nan"), sign: str = "") -> str:
        spread = "" if pd.isna(sd) else f" ± {sd:.{digits}f}"
        return "" if pd.isna(v) else f"{v:{sign}.{digits}f}{spread}"

    ran = set(compared[compared.reproduced.notna()].column)
    names = sorted(dict.fromkeys(compared.column), key=lambda c: c not in ran)
    out = {}
    for column in names:
        c = compared[compared.column == column].set_index("row")
        out[column, "reported"] = {r: cell(v.reported, v.reported_sd) for r, v in c.iterrows()}
        if column not in ran:
            continue
        ours = {r: cell(v.reproduced, v.sd) for r, v in c.iterrows()}
        out[column, "reproduced"] = {r: text or "not run" for r, text in ours.items()}
        if "last" in c:
            out[column, "last"] = {r: cell(v["last"]) for r, v in c.iterrows()}
        out[column, "difference"] = {r: cell(v.difference, sign="+") for r, v in c.iterrows()}
        for text in ["ordering"] + ["verdict"] * ("paper" in set(compared.profile)):
            out[column, text] = dict(c[text])
    table = pd.DataFrame(out).reindex(list(dict.fromkeys(compared.row)))
    table = table.fillna("").rename_axis("row")
    return table.loc[:, (table != "").any()]  # a column of ours has nothing reported


def standing(
    rows: pd.DataFrame,
    paper: str | Paper,
    table: str,
    clients: pd.DataFrame,
    own: str = "",
    column: str | None = None,
    **how: str,
) -> pd.DataFrame:
    """Ranks in one column, and the own row against each other one, client by client.

    clients: test accuracy of every client of every run at the round that is reported, with columns
    row, column, seed, client, acc_pct.
    column: by default the first that was run.

    p is of Wilcoxon's signed ranks over clients and seeds: clients of one seed are not independent,
    so it says less than as many seeds would.
    """
    compared = compare(rows, paper, table, own=own, **how).dropna(subset=["reproduced"])
    column = column or compared.column.iloc[0]
    c = compared[compared.column == column].set_index("row")
    own = own or _own(papers.paper(paper), table)
    own_clients = clients[clients.column == column]
    by = own_clients.pivot_table(index=["seed", "client"], columns="row", values="acc_pct")
    others = [r for r in c.index if r != own and r in by and own in by]
    tests = pd.DataFrame(
        {r: paired(*by[[own, r]].dropna().to_numpy().T) for r in others},
        index=["difference", "better", "p"],
        dtype=float,
    ).T
    ranks = {"rank reported": c.reported, "rank reproduced": c.reproduced.where(c.reported.notna())}
    out = pd.DataFrame({name: values.rank(ascending=False) for name, values in ranks.items()})
    out[f"{own} ahead by"] = tests.difference.round(2)
    out["share of clients"] = tests.better.round(2)
    out["p"] = tests.p.round(4)
    return out.sort_values("rank reported")


# -- claims ----------------------------------------------------------------------------------------


def claims(paper: str | Paper, rows: pd.DataFrame | None = None, profile: str = "") -> pd.DataFrame:
    """The paper's claims with the number that decides each, and a verdict.

    rows: of a notebook, of one profile, with its derived numbers. Without them every committed
    result of the paper is judged, and a column names its data.

    Columns says, artefact, measured, verdict, profile.
    """
    if rows is None:
        parts = committed.parts(papers.paper(paper).key).values()
        none = pd.DataFrame(columns=["says", "artefact", "measured", "verdict"])
        out = [claims(paper, part.rows(), part.profile).assign(data=part.data) for part in parts]
        return pd.concat(out or [none], ignore_index=True)
    out = []
    for c in papers.paper(paper).claims:
        own = rows[rows.artefact == c.needs]
        try:
            measured, holds = c.judge(own) if len(own) else ("", None)
        except LookupError as missing:
            measured, holds = f"{missing.args[0]} was not run", None
        if not measured:  # no cell of the artefact decides it, so neither does all([])
            holds = None
        line = dict(says=c.says, artefact=c.needs, measured=measured)
        out.append(line | dict(verdict=verdicts.of_claim(holds), profile=profile))
    return pd.DataFrame(out)


# -- tables to read --------------------------------------------------------------------------------


def save_table(frame: pd.DataFrame, path: Path) -> None:
    """Write a table as path.csv and path.md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [": ".join(c) if isinstance(c, tuple) else c for c in frame.columns]
    frame = frame.set_axis(names, axis=1)
    frame.to_csv(f"{path}.csv")
    Path(f"{path}.md").write_text(markdown(frame) + "\n")


def markdown(frame: pd.DataFrame) -> str:
    """A frame as a Markdown table; a plain 0..n-1 index is left out."""
    body = frame.reset_index() if not isinstance(frame.index, pd.RangeIndex) else frame
    text = [[str(v).replace("|", "\\|") for v in line] for line in (body.columns, *body.to_numpy())]
    lines = [text[0], ["---"] * body.shape[1], *text[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def latex(frame: pd.DataFrame) -> str:
    """A frame as a LaTeX table (booktabs); a plain 0..n-1 index is left out."""
    return frame.to_latex(escape=True, index=not isinstance(frame.index, pd.RangeIndex))
