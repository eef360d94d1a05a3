"""Progress: where it shows what, how often, and that a nested one moves the outer one."""

import html
import io
import json
import multiprocessing
import os
import subprocess
import sys
from functools import partial

import pytest

from pfl_core.util import progress
from pfl_core.util.progress import Progress, mode
from pfl_core.util.say import say


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def steps(self, bar: Progress, first: int, last: int, seconds: float, note: str = "") -> None:
        for done in range(first, last + 1):
            self.now += seconds
            bar.at(done, note)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("tqdm.std.time", clock)
    return clock


@pytest.fixture
def shown(monkeypatch):
    """shown("log") -> what stderr gets from now on, in that form."""

    def use(how: str, stream: io.StringIO | None = None) -> io.StringIO:
        stream = stream or io.StringIO()
        monkeypatch.setattr(progress, "mode", lambda *a: how)
        monkeypatch.setattr("sys.stderr", stream)
        return stream

    return use


def test_mode_follows_the_environment(monkeypatch):
    lab = {"JPY_SESSION_NAME": "notebooks/fedper.ipynb"}
    monkeypatch.setitem(progress.sys.modules, "ipykernel", object())
    assert mode(lab, io.StringIO()) == "widget"
    assert mode(lab | {"PFL_HEADLESS": "1"}, io.StringIO()) == "log"
    assert mode(lab | {"PFL_HEADLESS": "1", "PYTEST_VERSION": "9"}, Terminal()) == "silent"
    assert mode({}, Terminal()) == "line"
    assert mode({}, io.StringIO()) == "log"
    monkeypatch.delitem(progress.sys.modules, "ipykernel")
    assert mode(lab, Terminal()) == "line"


def test_worker_processes_leave_the_screen_to_their_parent(monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    assert (
        mode({}, Terminal())
        == mode({"JPY_SESSION_NAME": "fedper.ipynb"}, io.StringIO())
        == "silent"
    )
    assert mode({}, io.StringIO()) == mode({"PFL_HEADLESS": "1"}, Terminal()) == "log"


def test_silent_here_by_default(capsys):
    with Progress(3, "rounds") as bar:
        bar.at(3)
    assert bar.bar.disable and capsys.readouterr() == ("", "")


def test_log_has_a_line_every_ten_seconds(clock, shown):
    out = shown("log")
    with Progress(100, "rounds", done=0) as bar:
        clock.steps(bar, 1, 55, 1.0, "acc 50")
    lines = out.getvalue().splitlines()
    assert lines[0] == "rounds 10/100, acc 50, 00:10, 01:30 left"
    assert lines[-2:] == [
        "rounds 50/100, acc 50, 00:50, 00:50 left",
        "rounds 55/100, acc 50, 00:55, 00:00 left",
    ]
    assert len(lines) == 6 and "\r" not in out.getvalue()


def test_quick_work_prints_nothing(clock, shown):
    for how, stream in (("log", io.StringIO()), ("line", Terminal())):
        out = shown(how, stream)
        with Progress(5, "rounds", done=0) as bar:
            clock.steps(bar, 1, 4, 0.1)
        assert out.getvalue() == ""


SHOWN = """
from pfl_core.util import progress
progress.LOG_EVERY_S = 0.0
with progress.Progress(2, "rounds", done=0) as bar:
    bar.at(2)
"""


def test_the_environment_may_switch_it_off():
    env = {k: v for k, v in os.environ.items() if k != "PYTEST_VERSION"} | {"PFL_HEADLESS": "1"}
    call = partial(subprocess.run, [sys.executable, "-c", SHOWN], capture_output=True, text=True)
    assert call(env=env).stderr == "rounds 2/2, 00:00, 00:00 left\n"
    assert call(env=env | {"TQDM_DISABLE": "1"}).stderr == ""


def test_terminal_redraws_one_line(clock, shown):
    out = shown("line", Terminal())
    with Progress(4, "rounds", done=0) as bar:
        clock.steps(bar, 1, 4, 0.5, "61.2 %")
    text = out.getvalue()
    assert text.count("\n") == 1 and text.endswith("\n") and text.count("\r") == 5
    assert (
        "rounds 1/4  25%|" in text and "00:00<00:01, 61.2 %" in text and "rounds 4/4 100%|" in text
    )


def test_an_error_says_where_it_stopped(clock, shown):
    out = shown("log")
    with pytest.raises(RuntimeError), Progress(9, "rounds", done=0) as bar:
        clock.steps(bar, 1, 1, 10.0)
        clock.steps(bar, 2, 2, 5.0)
        raise RuntimeError
    assert out.getvalue().splitlines() == [
        "rounds 1/9, 00:10, 01:20 left",
        "rounds 2/9, 00:15, 00:52 left",
    ]


def test_a_nested_one_moves_the_outer_one(clock, shown):
    out = shown("log")
    with Progress(2, "runs", done=0) as outer:
        for run in (1, 2):
            with Progress(4, "fedper") as inner:
                inner.at(0)
                clock.steps(inner, 1, 4, 10.0, "61.2 %")
            outer.at(run)
        assert inner.bar is None and outer.bar.n == 2
    lines = out.getvalue().splitlines()
    assert lines[0] == "runs 0/2, fedper 1/4, 61.2 %, 00:10, 01:10 left"
    assert lines[4] == "runs 1/2, fedper 1/4, 61.2 %, 00:50, 00:30 left" and len(lines) == 8


def test_a_resumed_run_is_timed_from_where_it_resumed(clock, shown):
    out = shown("log")
    with Progress(100, "rounds") as bar:
        bar.at(80)
        clock.steps(bar, 81, 90, 1.0)
    assert out.getvalue().splitlines()[0] == "rounds 90/100, 00:10, 00:10 left"


def test_widget_shows_count_note_and_time(clock, shown, monkeypatch):
    displayed = []
    monkeypatch.setattr("tqdm.notebook.display", displayed.append)
    shown("widget")
    with Progress(4, "rounds", done=0) as bar:
        clock.steps(bar, 1, 2, 1.0, "61.2 %")
        (box,) = displayed
        words = [
            html.unescape(child.value).replace("\u2007", " ")
            for child in (box.children[0], box.children[2])
        ]
        assert box.children[1].value == 2 and words == ["rounds 2/4  50%", " 00:02<00:02, 61.2 %"]
    assert box.children[1].bar_style == "success"  # ended early, but in good order
    with pytest.raises(RuntimeError), Progress(4, "rounds", done=0) as bar:
        clock.steps(bar, 1, 2, 1.0)
        raise RuntimeError
    assert displayed[1].children[1].bar_style == "danger"


def test_workers_of_a_sweep_write_lines_of_their_own(tmp_path):
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        written = pool.map(_work, [str(tmp_path / name) for name in "ab"])
    assert [json.loads(w) for w in written] == [["runs 2/2, 00:00, 00:00 left"]] * 2


def _work(path: str) -> str:
    progress.LOG_EVERY_S, progress.environ = 0.0, {"PFL_HEADLESS": "1"}
    with open(path, "w+") as sys.stderr:
        with Progress(2, "runs", done=0) as bar:
            bar.at(2)
        sys.stderr.seek(0)
        return json.dumps(sys.stderr.read().splitlines())


class Gone(io.StringIO):
    """A stream that somebody closes, or whose reader goes away, after some writes."""

    def __init__(self, error, after):
        super().__init__()
        self.error, self.left = error, after

    def write(self, text):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("error", [OSError(32, "Broken pipe"), ValueError("closed file")])
@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("how", ["log", "line"])
def test_a_terminal_that_is_gone_ends_nothing(how, after, error, monkeypatch):
    monkeypatch.setattr(progress, "mode", lambda *args: how)
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.0)
    monkeypatch.setattr(progress, "LIVE", progress.LIVE | dict(mininterval=0, delay=0))
    monkeypatch.setattr(sys, "stderr", Gone(error, after))
    with progress.Progress(5, "rounds", 0) as bar, progress.Progress(2, "steps", 0) as inner:
        for step in range(5):
            inner.at(min(step, 2))
            bar.at(step + 1)
    assert bar.done == 5 and not progress._open


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_message_that_nobody_reads_is_none(stream, monkeypatch):
    closed = io.StringIO()
    closed.close()
    for gone in (None, closed, Gone(OSError(32, "Broken pipe"), 0)):
        monkeypatch.setattr(sys, stream, gone)
        say("some words", error=stream == "stderr")
    assert progress.mode({}, None) == progress.mode({}, closed) == "silent"
    ascii_only = io.TextIOWrapper(raw := io.BytesIO(), "ascii", write_through=True)
    monkeypatch.setattr(sys, stream, ascii_only)
    say("\u03b1 = 0.1", error=stream == "stderr")
    assert raw.getvalue() == b"\\u03b1 = 0.1\n"
