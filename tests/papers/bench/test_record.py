"""What is kept of a setting: two that change or read it at once lose nothing."""

import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pandas as pd

from pfl_papers import places
from pfl_papers.bench import record
from pfl_papers.bench.record import Record

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
    assert set(record.here("mild").clients.seed) == {1, 2}


WRITES = """
import itertools, sys
from pathlib import Path

import numpy as np

from pfl_papers.bench import record

for new in itertools.cycle([record.prior(seed, np.ones(3), np.full(3, 2)) for seed in (1, 2)]):
    record.keep("mild", lambda known: new)
    Path(sys.argv[2]).touch()
    if Path(sys.argv[1]).exists():
        break
"""


def test_readers_wait_for_who_writes(home, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "none")  # nobody writes there
    stop, begun = tmp_path / "stop", tmp_path / "begun"
    writer = subprocess.Popen([sys.executable, "-c", WRITES, str(stop), str(begun)])
    try:
        while not begun.exists():
            assert writer.poll() is None
            time.sleep(0.01)
        for _ in range(100):  # each raises where files and digests are of different moments
            record.named_runs()
            assert set(record.here("mild").clients.seed) in ({1}, {2})
    finally:
        stop.touch()
        assert writer.wait() == 0


def test_files_that_are_read_are_of_one_time(tmp_path, monkeypatch):
    """Another process writes between two of them, as `publish` does under another lock."""
    old, new = (record.prior(seed, np.ones(3), np.full(3, 2)) for seed in (1, 2))
    for known in (old, new):
        known.runs = pd.DataFrame([{"row": "ditto", "seed": int(known.clients.seed[0])}])
        known.runs = known.runs.reindex(columns=record.RUNS)
    record.write(tmp_path, old)
    read = record._read

    def once(path, name):
        if name == "clients":  # the last of the four
            monkeypatch.setattr(record, "_read", read)
            record.write(tmp_path, new)
        return read(path, name)

    monkeypatch.setattr(record, "_read", once)
    found = record.of_folder(tmp_path)
    assert set(found.clients.seed) == set(found.runs.seed) == {2}


def test_other_seeds_of_a_row_stay():
    line = {"row": "ditto", "status": "done", "draw": 3, "when": "before"}

    def of(*seeds, run="a"):
        found = replace(
            Record.empty(), runs=pd.DataFrame([line | {"seed": s, "run": run} for s in seeds])
        )
        return replace(found, tuning=pd.DataFrame([{"row": "ditto", "seed": 100, "change": run}]))

    first = Record.empty().updated(of(10, 11))
    both = first.updated(of(11, 12, run="b"))
    assert dict(zip(both.runs.seed, both.runs.run, strict=True)) == {10: "a", 11: "b", 12: "b"}
    assert both.tuning.change.tolist() == ["b"], "a search is replaced as a whole"
    other = both.updated(
        replace(Record.empty(), runs=pd.DataFrame([line | {"row": "cfl", "seed": 10}]))
    )
    assert len(other.runs) == 4 and other.lines() == ["ditto", "cfl"]


def test_what_is_kept_is_changed_from_what_is_there(home):
    new = record.prior(3, np.ones(2), np.full(2, 2))
    record.keep("mild", lambda known: Record.joined([known, new]))
    assert set(record.keep("mild", lambda known: known).clients.seed) == {3}
    assert record.settings(record.kept("")) == ["mild"], "a lock is no setting"
