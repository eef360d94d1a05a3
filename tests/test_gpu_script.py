"""The script of a GPU's first hour: whole on the pretend accelerator, and what it does where stages fail, break or hang."""

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks import common, gpu, stages
from benchmarks.stages import GRAPHED, Task, Unusable


def here(stage, folder, device, smallest, limit):
    """A stage in this process: what a fresh one would import is here already."""
    return gpu.work(stage, folder, device, smallest)


def rows(folder, stage):
    return gpu.found(folder, stage)["rows"]


# -- every stage ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_stage_runs_whole_on_the_pretend_accelerator(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    assert gpu.main(["--device", "pretend", "--smallest", "--folder", str(tmp_path)], here) == 0
    printed = capsys.readouterr().out
    for i, stage in enumerate(gpu.STAGES):
        kept = gpu.found(tmp_path, i)
        assert kept["ended"] and kept["executor"] == "graphs:fastest" and kept["rows"], stage.name
        assert not [row for row in kept["rows"] if "error" in row]
        assert f"**{stage.name}**, executor graphs:fastest" in printed
    assert (tmp_path / "tables.md").read_text().strip() in printed
    assert all("graph_us" in row for row in rows(tmp_path, 1) + rows(tmp_path, 4))
    assert not (tmp_path / "results").exists(), "what is pretended is no result"

    again = gpu.main(["--device", "pretend", "--smallest", "--folder", str(tmp_path)], None)
    assert again == 0, "what has ended is not begun again"


@pytest.mark.slow
def test_a_run_is_stopped_and_resumed_on_a_cpu(tmp_path):
    asked = stages.Asked("cpu", "batched:fastest", frozenset(), True, tmp_path)
    assert stages.resumed(asked) == {"off": 0}


@pytest.mark.slow
def test_a_stage_has_a_process_of_its_own_and_a_limit(tmp_path):
    assert gpu.apart(0, tmp_path, "cpu", True, 300) == 0
    kept = gpu.found(tmp_path, 0)
    assert kept["ended"] and kept["executor"] == "batched:fastest"
    path = gpu.path(tmp_path, 0)
    path.unlink()
    assert gpu.apart(0, tmp_path, "cpu", True, 0.01) is None and not path.exists()


# -- what fails ----------------------------------------------------------------------------------------------------------


def planned(monkeypatch, *tasks, limit=60):
    """Stages in place of the real ones, each of some tasks (name, function, drops)."""
    made = [
        gpu.Stage(
            f"s{i}", limit, lambda asked, some=some: (Task({"n": n}, f, d) for n, f, d in some)
        )
        for i, some in enumerate(tasks)
    ]
    monkeypatch.setattr(gpu, "STAGES", tuple(made))


def fails(why="no", error=RuntimeError):
    def find():
        raise error(why)

    return find


def asked_for(seen):
    """A stage that notes what it was asked for: the best executor, all stacked ones, and whether steps are captured."""

    def noted(asked):
        seen.append((asked.executor, asked.stacked, asked.captures))
        return {}

    return gpu.Stage("asked", 60, lambda asked: iter([Task({}, lambda: noted(asked))]))


def test_a_failure_is_kept_and_moves_the_executor_down_the_ladder(tmp_path, monkeypatch, capsys):
    fall = [("graphs:fastest",), GRAPHED, ("batched:fastest",), ("batched",)]
    planned(monkeypatch, [("good", dict, GRAPHED)], *([("bad", fails(), d)] for d in fall))
    seen = []
    watched = [s for stage in gpu.STAGES for s in (stage, asked_for(seen))]
    monkeypatch.setattr(
        gpu, "STAGES", tuple(s._replace(name=f"{i}{s.name}") for i, s in enumerate(watched))
    )
    assert gpu.main(["--device", "pretend", "--folder", str(tmp_path)], here) == 1
    assert [executor for executor, *_ in seen] == [
        "graphs:fastest",
        "graphs",
        "batched:fastest",
        "batched",
        "threads",
    ]
    assert [captures for *_, captures in seen] == [True, True, False, False, False]
    assert "RuntimeError: no" in capsys.readouterr().out


def test_without_graphs_the_ladder_begins_below_them(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(gpu, "STAGES", (asked_for(seen),))
    gpu.main(["--device", "cpu", "--folder", str(tmp_path)], here)
    stacked = ["batched:fastest", "batched", "batched:unfold"]
    assert seen == [("batched:fastest", stacked, False)]


def test_what_is_done_is_not_done_again_unless_it_is_asked_for(tmp_path, monkeypatch):
    done = []
    planned(monkeypatch, [("a", lambda: done.append("a") or {}, ())], [("b", fails(), ())])
    how = ["--device", "cpu", "--folder", str(tmp_path)]
    gpu.main(how, here), gpu.main(how, here)
    assert done == ["a"]
    gpu.main([*how, "--stages", "0"], here)
    assert done == ["a", "a"] and rows(tmp_path, 1)[0]["error"] == "RuntimeError: no"


def test_what_makes_no_sense_any_more_ends_all(tmp_path, monkeypatch):
    seen = []
    planned(monkeypatch, [("door", fails("update the driver", Unusable), ()), ("b", dict, ())])
    monkeypatch.setattr(gpu, "STAGES", (*gpu.STAGES, asked_for(seen)))
    assert gpu.main(["--device", "cpu", "--folder", str(tmp_path)], here) == 1
    assert not seen and len(rows(tmp_path, 0)) == 1
    assert rows(tmp_path, 0)[0]["error"] == "Unusable: update the driver"


def test_a_row_that_ends_its_process_is_tried_twice_and_the_rest_goes_on(tmp_path, monkeypatch):
    tried = []

    def dies():
        tried.append(1)
        raise KeyboardInterrupt  # as a process that is killed, it leaves no word

    def start(*given):
        try:
            return here(*given)
        except KeyboardInterrupt:
            return -9

    planned(monkeypatch, [("a", dict, ()), ("dies", dies, ("graphs",)), ("b", dict, ())])
    assert gpu.main(["--device", "cpu", "--folder", str(tmp_path)], start) == 1
    assert len(tried) == 2
    kept = {row["of"]["n"]: row.get("error") for row in rows(tmp_path, 0)}
    assert kept == {"a": None, "dies": gpu.UNENDED, "b": None}
    assert gpu.dropped(tmp_path) == {"graphs"}


def test_a_device_that_answers_no_more_gets_a_new_process(tmp_path, monkeypatch):
    started = []

    def start(*given):
        started.append(1)
        return here(*given)

    monkeypatch.setattr(gpu, "answers", lambda device: False)
    planned(monkeypatch, [("a", fails("illegal memory access"), ()), ("b", dict, ())])
    gpu.main(["--device", "cpu", "--folder", str(tmp_path)], start)
    assert len(started) == 2 and gpu.found(tmp_path, 0)["ended"]


def test_a_stage_whose_time_is_up_leaves_the_next_one_its_own(tmp_path, monkeypatch, capsys):
    planned(monkeypatch, [("hangs", dict, ())], [("b", dict, ())])

    def start(stage, *given):
        return None if stage == 0 else here(stage, *given)

    gpu.main(["--device", "cpu", "--folder", str(tmp_path)], start)
    assert "s0: its time is up" in capsys.readouterr().out
    assert not rows(tmp_path, 0) and gpu.found(tmp_path, 1)["ended"]


def test_a_process_that_finds_nothing_is_not_started_for_ever(tmp_path, monkeypatch):
    started = []
    planned(monkeypatch, [("a", dict, ())])
    gpu.main(["--device", "cpu", "--folder", str(tmp_path)], lambda *_: started.append(1) or 7)
    assert len(started) == 1


def test_a_gpu_that_torch_cannot_use_is_said_first(tmp_path, monkeypatch):
    monkeypatch.setattr(stages.gpu, "tried", fails("no kernel image"))
    monkeypatch.setattr(stages.gpu, "refused", lambda: "driver 550 is here; update it")
    first, *_ = stages.preflight(stages.Asked("cuda", "", frozenset(), True, tmp_path))
    assert gpu.tried(first)["error"] == "Unusable: driver 550 is here; update it"
    assert gpu.tried(first)["stop"]


def test_what_a_stage_started_ends_with_it(tmp_path, monkeypatch):
    started = tmp_path / "started"
    code = f"import subprocess; p = subprocess.Popen(['sleep', '600']); open({str(started)!r}, 'w').write(str(p.pid))"
    monkeypatch.setattr(gpu, "command", lambda *_: [sys.executable, "-c", code])
    assert gpu.apart(0, tmp_path, "cpu", True, 300) == 0
    pid = int(started.read_text())
    while _lives(pid):  # it was sent SIGKILL
        time.sleep(0.05)


def _lives(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_rows_of_a_stage_are_plain_json(tmp_path):
    gpu.keep(tmp_path, 0, {"ended": True, "rows": [{"of": {"n": 1}, "took_s": 0.5, "drops": []}]})
    assert json.loads(gpu.path(tmp_path, 0).read_text())["rows"][0]["took_s"] == 0.5
    assert "| n | took (s) |" in gpu.report(tmp_path, "cpu")
