"""Files of a folder that change together: a kill at any moment leaves all old ones or all new."""

import subprocess
import sys

import pytest

from pfl_core.util import sums

OLD = {"a.csv": b"a0", "b.csv": b"b0", "gone.csv": b"c0"}
NEW = {"a.csv": b"a1", "b.csv": b"b1", "more.csv": b"d1"}

# Killed at each change of the folder in turn: a file opened, renamed or deleted, a folder made or
# removed. Prints how many changes there are.
KILLED = f"""
import os, shutil, signal, sys
from pathlib import Path

from pfl_core.util import sums

CHANGES = {{"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"}}
folder, left = Path(sys.argv[1]), None

def ends(event, args):
    global left
    if left is not None and event in CHANGES and sys.argv[1] in str(args[0]):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(ends)
for k in range(1, 200):
    here = folder / str(k)
    here.mkdir()
    sums.put(here, {OLD})
    if (child := os.fork()) == 0:
        left = k
        sums.put(here, {NEW}, ["gone.csv"])
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:  # it came to its end
        print(k)
        break
"""


def content(folder):
    return {name: sums.read(folder / name) for name in sums.known(folder)}


def test_a_kill_at_any_moment_leaves_all_or_nothing(tmp_path):
    words = [sys.executable, "-c", KILLED, str(tmp_path)]
    ended = int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    found = []
    for k in range(1, ended + 1):
        folder = tmp_path / str(k)
        found.append(content(folder))
        files = {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".begun"}
        assert files.pop(sums.NAME) and files == found[-1], k
        sums.put(folder, NEW, ["gone.csv"])  # and it is written as if nothing had been
        assert content(folder) == NEW
        assert {p.name for p in folder.iterdir()} == {*NEW, sums.NAME}, k
    change = [f == NEW for f in found].index(True)
    assert 4 < change < ended - 4  # kills before it, and after it
    assert found == [OLD] * change + [NEW] * (ended - change)


def test_no_room_for_one_leaves_all(tmp_path):
    sums.put(tmp_path, OLD)
    with pytest.raises(OSError, match=r"cannot write .*no/where.*what was there is as it was"):
        sums.put(tmp_path, {"a.csv": b"a1", "no/where": b""})
    assert content(tmp_path) == OLD
    assert {p.name for p in tmp_path.iterdir()} == {*OLD, sums.NAME}


def test_a_link_moves_nothing_from_elsewhere(tmp_path):
    """A folder of somebody else's may hold anything."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder in (mine, theirs):
        folder.mkdir()
    (mine / "diary.txt").write_text("mine")
    sums.put(theirs, OLD)
    (theirs / ".next").symlink_to(mine)
    assert content(theirs) == OLD and [p.name for p in mine.iterdir()] == ["diary.txt"]
    with pytest.raises(OSError, match="cannot write"):
        sums.put(theirs, NEW)
    assert content(theirs) == OLD and (mine / "diary.txt").read_text() == "mine"
