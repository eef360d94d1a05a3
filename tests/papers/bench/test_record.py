"""What is kept of a setting: two that change it at once lose nothing."""

import subprocess
import sys

import numpy as np

from pfl_papers.bench import record

AT_ONCE = """
import sys, time
from pathlib import Path

import numpy as np

from pfl_papers.bench import record
from pfl_papers.bench.record import Record

home, (mine, other) = Path(sys.argv[1]), sys.argv[2:]
read = record.of_folder

def slowly(folder):  # after both have read, were it not for the lock
    found = read(folder)
    while not (home / other).exists():
        time.sleep(0.01)
    time.sleep(1)
    return found

(home / mine).touch()
record.of_folder = slowly
new = record.prior(int(mine), np.ones(3), np.full(3, 2))
record.keep("mild", lambda known: Record.joined([known, new]))
"""


def test_two_that_keep_rows_at_once_lose_nothing(home, tmp_path):
    words = [[sys.executable, "-c", AT_ONCE, str(tmp_path), *pair] for pair in ("12", "21")]
    for process in [subprocess.Popen(w) for w in words]:
        assert process.wait() == 0
    assert set(record.read("mild").clients.seed) == {1, 2}


def test_what_is_kept_is_changed_from_what_is_there(home):
    new = record.prior(3, np.ones(2), np.full(2, 2))
    record.keep("mild", lambda known: record.Record.joined([known, new]))
    assert set(record.keep("mild", lambda known: known).clients.seed) == {3}
    assert record.settings(record.kept("")) == ["mild"], "a lock is no setting"
