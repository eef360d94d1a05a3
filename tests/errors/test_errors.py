"""Wrong uses and what each prints: what was given, what is allowed, what to do. docs/errors.md shows the same table.

`python -m tests.errors.test_errors` writes that page anew.
"""

import contextlib
import importlib
import io
import re
import tempfile
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest

from pfl_core import models
from pfl_core.data import partition, pools
from pfl_core.engine import scoring
from pfl_core.methods.base import METHODS
from pfl_core.util import paths
from pfl_papers.compare import readable
from tests.errors.table import Case

PARTS = [
    "names",
    "values",
    "partitions",
    "datasets",
    "results",
    "computer",
    "own_parts",
    "command_line",
    "own_data",
    "own_ways",
    "own_code",
    "settings",
    "metrics",
    "studies",
]
CASES = [one for part in PARTS for one in importlib.import_module(f"tests.errors.{part}").CASES]


PAGE = Path(__file__).parents[2] / "docs" / "errors.md"


def said(case: Case, folder: Path) -> str:
    """What a case prints and its exception's message, with `folder`, which is the current one meanwhile, written as DIR."""
    text, error = io.StringIO(), None
    with (
        contextlib.ExitStack() as names,
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(text),
    ):
        registries = (models._MODELS, pools._ENTRIES, partition._SCHEMES, scoring._METRICS)
        for known in (METHODS, *registries):
            names.enter_context(mock.patch.dict(known))
        for name, value in {
            "PFL_RUNS": folder / "runs",
            "PFL_DATA": folder / "data",
            "PFL_OFFLINE": "1",
        }.items():
            patch.setenv(name, str(value))
        patch.setenv("PFL_DEVICE", "cpu")
        patch.chdir(folder)
        try:
            case.does()
        except (Exception, SystemExit) as e:
            error = e
    assert isinstance(error, case.raises or type(None)), repr(error)
    message = "" if isinstance(error, SystemExit) else str(error or "")
    return (text.getvalue() + message).replace(str(folder), "DIR").strip()


@pytest.mark.parametrize("case", CASES, ids=[c.use for c in CASES])
def test_what_a_wrong_use_prints(case, tmp_path):
    message = said(case, tmp_path)
    assert re.search(case.says, message, re.DOTALL), message
    assert "Traceback" not in message


def test_a_notebook_started_from_another_folder_finds_the_same_runs(tmp_path, monkeypatch):
    monkeypatch.delenv("PFL_RUNS")
    here = paths.runs_root()
    monkeypatch.chdir(tmp_path)
    assert paths.runs_root() == here and here.is_absolute()


HEAD = """# Wrong uses and what they print

We refuse wrong uses before training. We check what your own `local` and `upload` return in the first round.
The last column names the exception, or says `goes on` where the run continues after the message. DIR is the current folder.
Each line is a test: `tests/errors/test_errors.py`, which writes this page when run as a program.

"""


def page() -> str:
    """docs/errors.md."""
    lines = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            message = re.sub(
                r"(known are (?:[^,;]+, ){3})[^;]+, [^;]+",
                r"\1...",
                said(case, Path(folder).resolve()),
            )
        message = re.sub(r"\b\d{8}-\d{6}\b", "DAY-TIME", message)
        message = "<br>".join(map(code, message.splitlines()))
        lines.append(
            {
                "use": code(case.use),
                "what it prints": message,
                "": case.raises.__name__ if case.raises else "goes on",
            }
        )
    return HEAD + readable.markdown(pd.DataFrame(lines)) + "\n"


def code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def test_the_page_holds_the_table():
    rows = [re.split(r" (?<!\\)\| ", line) for line in PAGE.read_text().splitlines()[8:]]
    assert [row[0].removeprefix("| ") for row in rows] == [
        code(case.use).replace("|", "\\|") for case in CASES
    ]
    for case, row in zip(CASES, rows, strict=True):
        message = row[1].replace("`<br>`", "\n").strip("` ")
        assert re.search(
            case.says,
            message.replace(", ...", ", ...; register_dataset plugins register_model"),
            re.DOTALL,
        ), row


if __name__ == "__main__":
    PAGE.write_text(page())
