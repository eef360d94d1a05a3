"""Nothing is deleted unasked: what prune lists, what it leaves, what it moves to the trash, and what empties that."""

import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pandas as pd
import pytest
from filelock import FileLock

from pfl_core.experiments import prune
from pfl_core.experiments.metrics import ROW_COLUMNS
from pfl_core.util import paths
from pfl_papers import places
from tests import made
from tests.made import main

A, B, C, D = (d * 16 for d in "abcd")


def put(folder, run_id=None, status="done", method="fedavg", dataset="digits", days=0.0, size=1000):
    """A run's folder as far as prune looks at it."""
    folder.mkdir(parents=True)
    date = (datetime.now(UTC) - timedelta(days=days)).isoformat()
    meta = {"id": run_id or folder.name, "status": status, "date": date}
    whole = {"experiment": {"method": method, "dataset": dataset}, "meta": meta}
    (folder / "experiment.json").write_text(json.dumps(whole))
    (folder / "models.pt").write_bytes(b"x" * size)
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A store of four runs, the last of which a row in runs/results/ names, and what else people keep there."""
    runs = tmp_path / "runs"
    monkeypatch.setenv("PFL_RUNS", str(runs))
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "none")
    put(runs / "store" / A, days=40)
    put(runs / "store" / B, status="failed: diverged", method="fedper", size=2_000_000)
    put(runs / "store" / C, dataset="cifar10", days=3)
    put(runs / "store" / D)
    row = dict.fromkeys(ROW_COLUMNS, "") | {"run": D, "rounds": 0, "value": 1.0}
    made.publish(runs / "results" / "flayer.quick-digits", pd.DataFrame([row]), "flayer")
    return runs


def strangers(home, elsewhere):
    """What looks a little like a run, and is none."""
    there = home / "store"
    put(elsewhere / "1" / ("1" * 16))
    for name in ("my_notes", "backup2024", "0123456789ABCDEF", "2" * 15, "3" * 17):
        put(there / name, run_id="3" * 16)
    put(there / ("4" * 16), run_id="5" * 16)  # another run's, copied
    for name, text in (
        ("6" * 16, "{}"),
        ("7" * 16, "[1]"),
        ("8" * 16, "half a fi"),
        ("9" * 16, '{"meta": {}}'),
    ):
        (there / name).mkdir()
        (there / name / "experiment.json").write_text(text)
    (there / ("e" * 16)).mkdir()  # nothing in it
    (there / ("f" * 16)).write_text("a file")
    (there / ("1" * 16)).symlink_to(elsewhere / "1" / ("1" * 16))
    (there / ("0" * 16)).mkdir()
    (there / ("0" * 16) / "experiment.json").symlink_to(there / A / "experiment.json")
    (there / ("1" * 16 + ".part")).symlink_to(elsewhere)
    (there / "notes.part").mkdir()


def tree(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def ids(found):
    return [f.id[0] for f in found]


def test_only_runs_are_found(home, tmp_path):
    strangers(home, tmp_path / "elsewhere")
    before = tree(tmp_path)
    found = prune.find()
    assert ids(found) == ["a", "c", "b", "d"]  # oldest first
    assert [f.status for f in found if f.id == B] == ["failed"] and [
        f.named for f in found if f.id == D
    ] == [True]
    assert tree(tmp_path) == before  # looking leaves no locks
    assert main(["prune", "--all", "--yes"]) == 0
    left = tree(tmp_path)
    assert {
        p for p in before if not p.startswith(tuple(f"runs/store/{i}" for i in (A, B, C, D)))
    } <= left
    assert not {f"runs/store/{i}" for i in (A, B, C, D)} & left


@pytest.mark.parametrize(
    ("filters", "want"),
    [
        ({}, "acbd"),
        ({"age": 2}, "ac"),
        ({"age": 50}, ""),
        ({"status": ["failed"]}, "b"),
        ({"method": ["fedper", "fedrep"]}, "b"),
        ({"dataset": ["cifar10"]}, "c"),
        ({"paper": ["flayer"]}, "d"),
        ({"paper": ["fedper"]}, ""),
        ({"ids": ["aaaa", B]}, "ab"),
        ({"ids": ["aaaa"], "method": ["fedper"]}, ""),
    ],
)
def test_filters(home, filters, want):
    assert sorted(ids(prune.find(**filters))) == sorted(want)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("12ab", "no run of .*store that may be moved begins with '12ab'"),
        ("a", "four digits at least"),
        ("--age -3", "age=-3.0: allowed is a number of days >= 0"),
        ("--paper fedpr", "paper 'fedpr' is unknown; did you mean 'fedper'"),
        (
            "--status broken",
            "status 'broken' is unknown; known are done, failed, unfinished, aside",
        ),
    ],
)
def test_wrong_words(home, words, line, capsys):
    assert main(["prune", *words.split()]) == 1
    assert pd.Series([capsys.readouterr().err]).str.contains(line).all()


def test_without_yes_and_without_a_terminal_it_only_lists(home, capsys):
    before = tree(home)
    assert main(["prune"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == [A, C] and lines[2].split()[:4] == [
        B,
        "failed",
        "fedper",
        "digits",
    ]
    assert "2.0 MB" in lines[2] and f"{datetime.now() - timedelta(days=40):%Y-%m-%d}" in lines[0]
    assert lines[3].startswith("1 more are named by rows") and lines[4].startswith(
        "nothing was done; add --yes to move"
    )
    assert "3 (2.0 MB)" in lines[4] and tree(home) == before


@pytest.mark.parametrize("answer", ["", "n", "yes please", "y", "YES"])
def test_on_a_terminal_it_asks(home, answer, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    asked = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or answer)
    assert main(["prune", "--method", "fedavg", "--dataset", "digits"]) == 0
    assert (
        len(asked) == 1 and asked[0].startswith("move these 1 (") and asked[0].endswith("? [y/N] ")
    )
    assert (home / "store" / A).is_dir() == (answer not in ("y", "YES"))


def test_what_is_moved_lies_in_the_trash_whole_and_can_come_back(home, capsys):
    size = prune.find(ids=[B])[0].size
    before = {p.name: p.read_bytes() for p in (home / "store" / B).iterdir()}
    assert main(["prune", B[:6], "--yes"]) == 0
    (day,) = (home / "trash").iterdir()
    assert (
        day.name == f"{datetime.now():%Y-%m-%d}" and f"1 moved to {day}" in capsys.readouterr().out
    )
    assert {p.name: p.read_bytes() for p in (day / B).iterdir()} == before
    assert prune.trashed() == [(day / B, size)] and not list(
        (home / "store").glob(f"{B}*")
    )  # nor a lock
    shutil.copytree(day / B, home / "store" / B)
    assert (
        main(["prune", B, "--yes"]) == 0 and len(prune.trashed()) == 2
    )  # a second one of the same day
    assert {p.name for p in (home / "store").iterdir()} == {A, C, D}


def test_only_the_trash_is_emptied_and_only_of_runs(home, tmp_path, capsys):
    assert (
        main(["prune", "--empty-trash", "--yes"]) == 0
        and "the trash is empty" in capsys.readouterr().out
    )
    assert main(["prune", A, B, "--yes"]) == 0
    (day,) = (home / "trash").iterdir()
    (day / "my notes").mkdir()
    (home / "trash" / "mine").mkdir()
    outside = put(tmp_path / "outside" / C)
    (day / C).symlink_to(outside)
    (day / A / "link").symlink_to(outside)
    (home / "trash" / "2026-01-01").symlink_to(outside.parent)
    capsys.readouterr()
    assert main(["prune", "--empty-trash"]) == 0
    assert (
        "add --yes to delete these 2 for ever (2.0 MB)" in capsys.readouterr().out
        and (day / A).is_dir()
    )
    assert main(["prune", "--empty-trash", "--yes"]) == 0
    assert tree(home / "trash") == {
        day.name,
        f"{day.name}/my notes",
        f"{day.name}/{C}",
        "mine",
        "2026-01-01",
    }
    assert (outside / "models.pt").exists() and (home / "store" / C).is_dir()


def test_a_trash_that_is_a_link_is_refused(home, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (home / "trash").symlink_to(tmp_path / "other")
    for words in (["prune", "--yes"], ["prune", "--empty-trash", "--yes"]):
        assert (
            main(words) == 1
            and "trash is a link, and links are not followed" in capsys.readouterr().err
        )
    assert (home / "store" / A).is_dir() and not list((tmp_path / "other").iterdir())


def test_runs_that_are_computed_just_now_stay(home):
    unfinished = put(home / "store" / f"{A}.part", run_id=A)
    damaged = put(home / "store" / f"{C}.damaged1", run_id=C)
    assert {f.path for f in prune.find() if f.status in ("unfinished", "aside")} == {
        damaged
    }  # the other may go on
    found = prune.find(status=["unfinished", "aside", "done"])
    assert {f.path for f in found} >= {unfinished, damaged, home / "store" / A}
    with FileLock(home / "store" / f"{A}.lock"):
        assert A not in {f.id for f in prune.find(status=["unfinished", "done"])}
        away, moved = prune.move(found)  # begun after it was listed
        assert (
            {f.id for f in moved} == {C, D}
            and unfinished.is_dir()
            and (home / "store" / A).is_dir()
        )
    assert damaged.name in {p.name for p in away.iterdir()}


def test_rows_that_are_damaged_stop_it(home, capsys):
    (home / "results" / "flayer.quick-digits" / "cells.csv").write_text("run\n")
    assert main(["prune", "--yes"]) == 1
    assert "cells.csv is not as it was published" in capsys.readouterr().err
    assert (home / "store" / D).is_dir()


def test_another_disk_is_said_and_nothing_moved(home, monkeypatch, capsys):
    def rename(a, b):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "rename", rename)
    assert main(["prune", A, "--yes"]) == 1
    assert "lie on different disks, so nothing was moved; set PFL_RUNS" in capsys.readouterr().err
    assert (home / "store" / A).is_dir()


def test_a_store_that_is_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "none"))
    assert prune.find(store=tmp_path / "none") == [] and not (tmp_path / "none").exists()
    assert paths.runs_root() == tmp_path / "none"
