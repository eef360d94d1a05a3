"""A killed sweep loses nothing; the long form is `python -m benchmarks.kill`, its report docs/reliability.md."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_a_sweep_of_two_processes_killed_five_times(tmp_path):
    report = tmp_path / "report.md"
    report.write_text((ROOT / "docs" / "reliability.md").read_text())
    command = [
        sys.executable,
        "-m",
        "benchmarks.kill",
        "--kills",
        "5",
        "--runs",
        "4",
        "--report",
        str(report),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *kills, result = done.stdout.splitlines()
    assert len(kills) == 5 and sum("checkpoint" in line for line in kills) >= 1
    assert re.fullmatch(
        r"5 kills; \d+ runs of 6 methods, each there exactly once and equal bit for bit .*", result
    )
    assert result in report.read_text()


def test_the_committed_report_is_of_fifty_kills():
    text = (ROOT / "docs" / "reliability.md").read_text()
    assert (
        re.search(
            r"\*\*(\d+) kills; \d+ runs .* each there exactly once and equal bit for bit", text
        )[1]
        == "50"
    )
    assert "| half of a checkpoint written |" in text and text.count("by the clock") > 5
