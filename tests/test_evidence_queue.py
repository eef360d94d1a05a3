"""The queue of long runs: it goes on after failures and stops, runs one commit, and is never two. Its commands are those of a
package of a few lines in a repository of its own, so that they take no time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest

from tools import evidence

# What `python -m pfl_papers WORD` is in these tests: it notes its call, then writes, fails, or runs until it is interrupted.
PACKAGE = """
import json, os, pathlib, sys, time
runs = pathlib.Path(os.environ["PFL_RUNS"])
runs.mkdir(exist_ok=True)
word = sys.argv[1]
group = pathlib.Path("/proc/self/autogroup")
group = group.read_text().split()[-1] if group.exists() else "19"
said = dict(word=word, group=group, words=sys.argv[2:], version=VERSION, at=os.getcwd(), nice=os.nice(0), data=os.environ.get("PFL_DATA"))
with (runs / "calls").open("a") as calls:
    calls.write(json.dumps(said) + "\\n")
if word == "fail":
    sys.exit("no such thing")
if word == "run" and not (runs / "done").exists():
    try:
        while True:
            time.sleep(0.02)
    except KeyboardInterrupt:
        (runs / "checkpoint").write_text(str(os.getpid()))
        sys.exit(130)
"""


class Queue:
    """A repository with the package, and a folder that the queue works in."""

    def __init__(self, folder):
        self.repository, self.folder = folder / "repository", folder / "queue"
        self.repository.mkdir()
        self.git("init", "-q")
        self.commit("1")

    def git(self, *words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *who, *words], cwd=self.repository, check=True, capture_output=True)

    def commit(self, version):
        package = self.repository / "pfl_papers"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(PACKAGE.replace("VERSION", version))
        self.git("add", "-A"), self.git("commit", "-qm", f"version {version}")

    def start(self, *commands, more=(), before="", **how):
        """The queue in a process of its own, over these commands."""
        listed = self.folder.with_suffix(".toml")
        listed.write_text(f"runs = {json.dumps(commands)}\n")
        words = ["start", str(self.folder), "--list", str(listed), "--jobs", "3", *more]
        code = f"{before}\nfrom pathlib import Path; from tools import evidence; import sys\n"
        code += (
            f"evidence.ROOT = Path({str(self.repository)!r})\nsys.exit(evidence.main({words!r}))"
        )
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        command = [sys.executable, "-W", "error", "-c", code]
        return subprocess.Popen(command, cwd=evidence.ROOT, **pipes | how)

    def done(self, *commands, **how):
        """Its status and what it printed, after all commands."""
        queue = self.start(*commands, **how)
        said = queue.communicate()[0]
        return queue.returncode, said

    def calls(self):
        path = self.folder / "runs" / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def log(self):
        return (self.folder / "log").read_text()


@pytest.fixture
def queue(tmp_path, monkeypatch):
    made = Queue(tmp_path)
    monkeypatch.setattr(evidence, "ROOT", Path(evidence.__file__).parents[1])
    yield made
    evidence.stop(made.folder)


def until(what):
    end = time.monotonic() + 600
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_commands_run_in_their_order_and_one_that_fails_lets_the_next_begin(queue, monkeypatch):
    monkeypatch.setenv("PFL_DATA", "somewhere")
    assert queue.done("first --a 1", "fail", "last 'two words'") == (1, "")
    assert [call["word"] for call in queue.calls()] == ["first", "fail", "last"]
    assert [call["words"] for call in queue.calls()] == [
        ["--a", "1", "--jobs", "3"],
        ["--jobs", "3"],
        ["two words", "--jobs", "3"],
    ]
    for call in queue.calls():
        assert call["at"] == str(queue.folder / "tree") and call["nice"] == 19
        assert call["group"] == "19"
        assert call["data"] == str(evidence.ROOT / "somewhere"), "it runs in another folder"
    log = queue.log()
    assert "no such thing" in log and "== ended with status 1: fail" in log
    assert log.rstrip().endswith("== all done, 1 of 3 with an error")
    assert not (queue.folder / "pid").exists()
    assert queue.done("first")[0] == 0


def test_a_stop_lets_a_run_keep_what_it_holds_and_start_goes_on(queue):
    running = queue.start("run", "next")
    until(queue.calls)
    assert evidence.pid(queue.folder) == running.pid
    assert f"process {running.pid}; " in evidence.status(queue.folder)
    assert evidence.stop(queue.folder).startswith("stopped; finished runs and checkpoints are in ")
    assert running.wait() == 130 and running.communicate()[0] == ""
    assert (queue.folder / "runs" / "checkpoint").exists(), "it was asked, not killed"
    assert [call["word"] for call in queue.calls()] == ["run"], "what follows is not begun"
    assert evidence.pid(queue.folder) is None
    assert evidence.stop(queue.folder) == f"nothing runs in {queue.folder}"
    assert "not running; " in evidence.status(queue.folder)
    assert "stopped; start goes on" in evidence.status(queue.folder)

    (queue.folder / "runs" / "done").touch()
    assert queue.done("run", "next")[0] == 0
    assert [call["word"] for call in queue.calls()] == ["run", "run", "next"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_closed_terminal_are_stops_also_where_a_shell_ignores_them(number, queue):
    ignored = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    ignored += "signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # which nohup lets tests ignore
    running = queue.start("run", before=ignored)
    until(queue.calls)
    running.send_signal(number)
    assert running.wait() == 130 and (queue.folder / "runs" / "checkpoint").exists()
    running.communicate()


def test_under_nohup_a_closed_terminal_is_none(queue):
    running = queue.start(
        "run", before="import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    )
    until(queue.calls)
    running.send_signal(signal.SIGHUP)
    (queue.folder / "runs" / "done").touch()
    running.send_signal(signal.SIGHUP)
    assert evidence.pid(queue.folder) == running.pid
    evidence.stop(queue.folder)
    assert running.wait() == 130
    running.communicate()


def test_two_stops_leave_nothing_behind(queue):
    running = queue.start("run")
    until(queue.calls)
    for _ in range(3):
        running.send_signal(signal.SIGTERM)
    assert running.wait() == 130
    running.communicate()
    left = int((queue.folder / "runs" / "checkpoint").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(left, 0)


def test_a_second_queue_in_a_folder_is_refused_and_the_first_goes_on(queue):
    running = queue.start("run")
    until(queue.calls)
    code, said = queue.done("other")
    assert code == 1 and said.strip() == f"a queue runs in {queue.folder} already; stop it first"
    assert evidence.pid(queue.folder) == running.pid and running.poll() is None
    assert [call["word"] for call in queue.calls()] == ["run"]
    evidence.stop(queue.folder)
    running.communicate()


@pytest.mark.parametrize("text", ["{}", "", "no number", "1"])
def test_a_pid_file_that_a_killed_queue_left_names_nobody(text, queue):
    queue.folder.mkdir()
    with subprocess.Popen(["sleep", "600"]) as innocent:
        (queue.folder / "pid").write_text(text.format(innocent.pid))
        assert evidence.pid(queue.folder) is None
        assert evidence.stop(queue.folder) == f"nothing runs in {queue.folder}"
        assert innocent.poll() is None
        assert queue.done("first")[0] == 0
        innocent.kill()


def test_the_worktree_stays_at_its_commit_until_it_is_moved(queue):
    queue.done("first")
    queue.commit("2")
    queue.done("second")
    assert [call["version"] for call in queue.calls()] == [1, 1]
    assert "version 1" in evidence.status(queue.folder)
    queue.done("third", more=("--commit", "HEAD"))
    assert queue.calls()[-1]["version"] == 2 and "version 2" in evidence.status(queue.folder)
    queue.done("fourth", more=("--commit", "HEAD~1"))
    assert queue.calls()[-1]["version"] == 1
    assert len({call["at"] for call in queue.calls()}) == 1


def test_status_of_a_folder_that_is_not_there_makes_none(tmp_path):
    said = evidence.status(tmp_path / "none").splitlines()
    assert said[0] == "not running; no worktree yet" and said[1].startswith(
        "0 runs finished, 0 begun"
    )
    assert evidence.stop(tmp_path / "none") == f"nothing runs in {tmp_path / 'none'}"
    assert not (tmp_path / "none").exists()


def test_a_queue_that_does_not_stop_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "GRACE", -29.9)
    with subprocess.Popen(["sleep", "600"]) as other, filelock.FileLock(tmp_path / "queue.lock"):
        (tmp_path / "pid").write_text(str(other.pid))
        with pytest.raises(SystemExit, match="has not stopped in"):
            evidence.stop(tmp_path)
        other.kill()


@pytest.mark.parametrize(
    "text", ["runs = [", "run = []", "runs = [3]", """runs = ["compute 'fedper"]""", None]
)
def test_a_list_that_cannot_be_read_is_refused_before_anything_runs(text, tmp_path):
    path = tmp_path / "list.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match=r'allowed is runs = \["compute ...", ...\]'):
        evidence.main(["start", str(tmp_path / "queue"), "--list", str(path)])
    assert not (tmp_path / "queue").exists()


def test_every_command_of_the_committed_list_is_one_of_the_packages():
    from pfl_papers.__main__ import parser

    for words in evidence.listed(evidence.LIST):
        parser().top.parse_args([*evidence.shlex.split(words), "--jobs", "1"])
