"""A study in a file, tables of finished runs, and what is found in the store."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from pfl_core import export, run, runs, table
from pfl_core.experiments.study import Study
from tests.errors.command_line import command
from tests.errors.table import Case, tiny

HEAD = '[base]\ndataset = "digits"\nclients = 2\nrounds = 1\nmodel = "mlp"\nmax_samples = 8\nbatch = 8\n'
ROWS = '[rows.FedAvg]\nmethod = "fedavg"\n[rows.Slow]\nlr = 0.01\n'


def said(more: str = "", first: str = "", base: str = "") -> Callable[[], object]:
    """Reads a study with these lines beside ordinary ones."""
    return lambda: read(f"{first}\n{HEAD}{base}\n{ROWS}{more}\n")


def read(text: str) -> Study:
    Path("study.toml").write_text(text)
    return Study.read(Path("study.toml"))


def sweeps(more: str) -> Callable[[], object]:
    def use() -> None:
        Path("study.toml").write_text(f"{HEAD}{ROWS}{more}\n")
        command("sweep", "study.toml", "--device", "cpu", "--jobs", "1")

    return use


def read_beside(plugin: str) -> Study:
    """Reads a study that names a module of the current folder."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        return said(first=f'plugins = ["{plugin}"]')()
    finally:
        sys.path.pop(0)


def rows() -> pd.DataFrame:
    return run(tiny()).rows


CASES = [
    # a study in a file
    Case(
        "study.toml: seeds = [0, 0]", said(first="seeds = [0, 0]"), "a list of different integers"
    ),
    Case('study.toml: seeds = [0, "1"]', said(first='seeds = [0, "1"]'), "different integers >= 0"),
    Case("study.toml: seed = 5 in [base]", said(base="seed = 5"), "base has seed; write seeds ="),
    Case(
        "study.toml: seed = [0, 1] in [product]",
        said("[product]\nseed = [0, 1]"),
        "product has seed; write seeds =",
    ),
    Case(
        "study.toml: a row and its column both say lr",
        said("[columns.fast]\nlr = 0.5"),
        "row 'Slow' and column 'fast' both say lr; say it in one of them",
    ),
    Case(
        "study.toml: a row says lr, and lr is tuned",
        said("[tune]\nchoices = { lr = [0.01, 0.1] }"),
        "row 'Slow' and tune.choices both say lr",
    ),
    Case(
        "study.toml: batch = [8, 8] in [product]",
        said("[product]\nbatch = [8, 8]"),
        "two rows are called 'FedAvg, batch 8'; say each value once",
    ),
    Case(
        "study.toml: tune.seeds = [0], which is reported, too",
        said("[tune]\ndraws = 4\nseeds = [0]"),
        r"tune has the seeds \[0\], which are reported, too",
    ),
    Case(
        "study.toml: a key twice",
        said(base='model = "cnn"'),
        r"is no TOML file: Cannot overwrite a value \(at line",
    ),
    Case(
        "study.toml: lists in lists, 5,000 deep",
        lambda: read(f"seeds = {'[' * 5000}{']' * 5000}"),
        "is no TOML file: ",
    ),
    Case(
        'study.toml: data = "mine" over digits',
        said(first='data = "mine"'),
        'dataset = "own" and data = "FOLDER", .* go together',
    ),
    Case(
        'study.toml: plugins = ["mine"], a module that raises an error',
        lambda: (Path("mine_raises.py").write_text("1 / 0"), read_beside("mine_raises")),
        "this module raises ZeroDivisionError when it is imported .division by zero.; `python -c",
    ),
    Case(
        "pfl sweep study.toml, whose last row cannot be tuned",
        sweeps("[tune]\nchoices = { batch = [8] }\nseeds = [100]"),
        "leaves no validation data; tune with a partition that does",
    ),
    Case(
        "pfl sweep study.toml, whose table names no row",
        sweeps('[table]\nagainst = "FedAgv"'),
        "row 'FedAgv' is unknown; did you mean 'FedAvg'",
    ),
    Case(
        "pfl table study.toml, before anything ran",
        lambda: (said()(), command("table", "study.toml")),
        "no run of study.toml is finished; `pfl sweep study.toml` runs it",
    ),
    # tables, exports and filters
    Case("table([result])", lambda: table([run(tiny())]), "of a list write", TypeError),
    Case(
        'table(rows[["row", "value"]])',
        lambda: table(rows()[["row", "value"]]),
        "a frame lacks the columns run, ",
    ),
    Case("table(rows, digits=-1)", lambda: table(rows(), digits=-1), "an integer from 0 to 15"),
    Case('table(rows, average="mean")', lambda: table(rows(), average="mean"), "client, pooled"),
    Case(
        'export("no/such/rows.csv", rows)',
        lambda: export("no/such/rows.csv", rows()),
        "lies in no folder: no/such is none",
        OSError,
    ),
    Case("export(folder, rows)", lambda: export(".", rows()), "is a folder; give", OSError),
    Case('runs(lr="0.1")', lambda: runs(lr="0.1"), "got str, allowed is float"),
    Case('runs(method="fedpr")', lambda: runs(method="fedpr"), "did you mean 'fedper'"),
    Case('runs(record="weights")', lambda: runs(record="weights"), "got str, allowed is tuple"),
    Case("runs(seed=0.5)", lambda: runs(seed=np.float64(0.5)), "got float, allowed is int"),
]
