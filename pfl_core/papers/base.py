"""What each paper's notebook needs, one file a paper: settings with their sources, rows of its tables, reporting rule, claims.

A module holds ARTEFACTS (keys of tables and figures with data); OWN, the paper's own row; REPORT, which number of a run the paper
reports (keywords of `select.pick`), WHEN, the rows that are read at another time than REPORT says; MEDIUM, how many seeds each
artefact has that profile `medium` computes (the paper's own setting with fewer rounds); CLAIMS; and two functions:
    setting(artefact, profile, dataset, clients=0) -> fields of the Experiment that the artefact's runs vary
    rows(artefact, profile, dataset, clients=0) -> {row: changes to it}
Sources of values: [P] the paper, [O] the authors' code, [C] our choice, ? a substitute for what the paper's text does not hold.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pandas as pd

from pfl_core.analysis.select import pick
from pfl_core.util import checks

FULL = ("medium", "paper")  # profiles over the papers' own data, networks and clients; medium has fewer rounds
PAPERS = ("fedper", "pfedhn", "pfedla", "flayer", "fedaghn")


def paper(name: str) -> ModuleType:
    """The module of one paper; ValueError for an unknown name."""
    checks.known("paper", name, PAPERS)
    return importlib.import_module(f"pfl_core.papers.{name}")


def title(artefact: str) -> str:
    """An artefact's key as a reader says it: "fig2" is Figure 2, "apptable1" Appendix Table 1, "appc5" Appendix C.5, "table5a" Table 5a."""
    parts = re.fullmatch(r"(app)?(fig|table|c)(\d+\w?)", artefact)
    if not parts:
        return artefact.capitalize()
    kind = {"fig": "Figure ", "table": "Table ", "c": "C."}[parts[2]]
    return ("Appendix " if parts[1] else "") + kind + parts[3]


def use(method: str, **args: Any) -> dict[str, Any]:
    """Changes to an Experiment that make it run a method with these hyper-parameters."""
    return dict(method=method, method_args=args)


class Claim(NamedTuple):
    """What a paper says; `needs` the artefact it is judged on; `judge(its rows) -> (what we measured, whether it holds)`."""

    says: str
    needs: str
    judge: Callable[[pd.DataFrame], tuple[str, bool]]


def value(rows: pd.DataFrame, row: str, column: str, metric: str = "acc_pct", **how: Any) -> float:
    """Mean over seeds of one cell, picked by `how` (of `select.pick`); LookupError, a claim's "not run", if it is not there."""
    cell = rows[(rows.row == row) & (rows.column == column)]
    got = pick(cell, metric=metric, **how) if len(cell) else cell
    if not len(got):
        raise LookupError(f"{row} / {column}")
    return float(got.value.mean())


def derived(rows: pd.DataFrame, metric: str, row: str | None = None, column: str | None = None) -> pd.Series:
    """Values of a derived metric (`Study.derive`) of one row and column, None for all; LookupError if there are none."""
    got = rows[(rows["mean"] == "derived") & (rows.metric == metric)]
    for name, label in (("row", row), ("column", column)):
        got = got if label is None else got[got[name] == label]
    if not len(got):
        raise LookupError(f"{metric} of {row or 'all rows'}")
    return got.value
