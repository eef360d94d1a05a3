"""Progress: where it shows what, how often, and that a nested bar moves the outer one."""

import io

import pytest

from pfl_core.util import progress
from pfl_core.util.progress import Progress, duration, mode


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock():
    return Clock()


def steps(bar: Progress, clock: Clock, n: int, seconds: float, **update) -> None:
    for _ in range(n):
        clock.now += seconds
        bar.update(**update)


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


def test_silent_here_by_default(capsys):
    with Progress(3, "rounds") as bar:
        bar.update(3)
    assert bar.how == "silent" and capsys.readouterr().out == ""


def test_log_has_a_line_every_ten_seconds(clock):
    out = io.StringIO()
    with Progress(100, "rounds", clock=clock, stream=out, how="log") as bar:
        steps(bar, clock, 50, 1.0, note="acc 50")
    lines = out.getvalue().splitlines()
    assert lines[0] == "rounds 10/100, acc 50, 0:10, about 1:30 left"
    assert lines[-1] == "rounds 50/100, acc 50, done after 0:50"
    assert len(lines) == 6 and "\r" not in out.getvalue()


def test_quick_work_prints_nothing(clock):
    out = io.StringIO()
    with Progress(5, "rounds", clock=clock, stream=out, how="log") as bar:
        steps(bar, clock, 5, 1.0)
    assert out.getvalue() == ""


def test_terminal_redraws_one_line(clock):
    out = Terminal()
    with Progress(4, "rounds", clock=clock, stream=out, how="line") as bar:
        steps(bar, clock, 4, 0.5)
    text = out.getvalue()
    assert text.count("\n") == 1 and text.endswith("\n") and text.count("\r") == 5
    assert "rounds 4/4, done after 0:02" in text


def test_an_error_says_where_it_stopped(clock):
    out = io.StringIO()
    with pytest.raises(RuntimeError), Progress(9, "rounds", clock=clock, stream=out, how="log") as bar:
        steps(bar, clock, 2, 10.0)
        raise RuntimeError
    assert out.getvalue().splitlines()[-1] == "rounds 2/9, stopped after 0:20"


def test_a_nested_bar_moves_the_outer_one(clock):
    out, inner_out = io.StringIO(), io.StringIO()
    with Progress(2, "runs", clock=clock, stream=out, how="log") as outer:
        for _ in range(2):
            with Progress(4, "fedper", clock=clock, stream=inner_out, how="log") as inner:
                steps(inner, clock, 4, 10.0)
            outer.update()
    lines = out.getvalue().splitlines()
    assert lines[0] == "runs 0/2, fedper 1/4, 0:10, about 1:10 left"
    assert lines[-1] == "runs 2/2, done after 1:20"
    assert inner_out.getvalue() == ""


def test_a_resumed_run_is_timed_from_where_it_resumed(clock):
    out = io.StringIO()
    with Progress(100, "rounds", done=80, clock=clock, stream=out, how="log") as bar:
        steps(bar, clock, 10, 1.0)
    assert out.getvalue().splitlines()[0] == "rounds 90/100, 0:10, about 0:10 left"


def test_widget_shows_count_and_text(clock, monkeypatch):
    displayed = []
    monkeypatch.setattr("IPython.display.display", displayed.append)
    with Progress(4, "rounds", clock=clock, how="widget") as bar:
        steps(bar, clock, 2, 1.0)
    (box,) = displayed
    assert box.children[0].value == 2 and box.children[1].value == "rounds 2/4, done after 0:02"


def test_duration_and_unknown_kind():
    assert [duration(s) for s in (0, 59.6, 3600, 7384)] == ["0:00", "1:00", "1:00:00", "2:03:04"]
    with pytest.raises(ValueError, match="'loud'; known: widget, line, log, silent"):
        Progress(1, how="loud")
