"""Long runs, one after another, beside other work: python -m tools.evidence start|stop|status.

They run at the lowest priority, from a worktree at a fixed commit, into a store that belongs to no
checkout. Any stop is safe: the next start goes on from finished runs and checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tools" / "evidence.toml"
GRACE = 60  # seconds in which a run that is stopped writes what it holds
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Linux shares out time by session first (sched(7), autogroup), and a command has one of its own.
LOWEST = 'echo 19 2>/dev/null > /proc/self/autogroup; exec nice -n 19 "$@"'


def tree(folder: Path, commit: str | None) -> Path:
    """The worktree in `folder`, made at `commit` (HEAD) the first time; it moves only if asked to.

    All runs of a table should come from one state of the code.
    """
    at = folder / "tree"
    if not at.is_dir():
        _git("worktree", "prune")
        _git("worktree", "add", "--quiet", "--detach", str(at), commit or "HEAD")
    elif commit:  # as this checkout names it: HEAD is not the worktree's own
        _git("checkout", "--quiet", "--detach", _git("rev-parse", commit + "^{commit}"), cwd=at)
    return at


def _git(*words: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        ["git", *words], cwd=cwd or ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


def listed(path: Path) -> list[str]:
    """The commands of a list, all of which can be split into words."""
    try:
        commands = tomllib.loads(path.read_text(encoding="utf-8"))["runs"]
        for words in commands:
            shlex.split(words)
    except (OSError, KeyError, AttributeError, ValueError) as error:
        raise SystemExit(f'{path}: {error!r}; allowed is runs = ["compute ...", ...]') from None
    return commands


def begin(at: Path, runs: Path, words: str, jobs: int, log: int) -> subprocess.Popen:
    """Start one command of the package in the worktree `at`, with its store below `runs`."""
    command = [sys.executable, "-P", "-m", "pfl_papers", *shlex.split(words), "--jobs", str(jobs)]
    environment = os.environ | {
        "PYTHONPATH": str(at),  # before an installed pfl_core, in worker processes, too
        "PFL_RUNS": str(runs),
        "TQDM_DISABLE": "1",
    }
    if data := os.environ.get("PFL_DATA"):
        environment["PFL_DATA"] = os.path.abspath(os.path.expanduser(data))  # it runs in `at`
    return subprocess.Popen(
        ["sh", "-c", LOWEST, "sh", *command],
        cwd=at,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # its workers end with it, and nothing else does
    )


def end(running: subprocess.Popen) -> None:
    """Ask a command to stop, wait, and end what is left of it, whatever else asks meanwhile."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(GRACE)
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()


def work(folder: Path, commands: Sequence[str], commit: str | None, jobs: int) -> int:
    """Run the commands in order until they are done or this process is told to stop."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in STOPS:
        # nohup lets SIGHUP be ignored. A shell lets background jobs ignore SIGINT, and a command
        # that inherits this cannot be asked to stop.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        # A look at the queue holds the lock for a moment.
        with _alone(folder, 1), (folder / "log").open("ab", 0) as log:
            (folder / "pid").write_text(str(os.getpid()))
            at = tree(folder, commit)
            failed = [words for words in commands if _one(at, folder, words, jobs, log.fileno())]
    except Timeout:
        raise SystemExit(f"a queue runs in {folder} already; stop it first") from None
    except KeyboardInterrupt:
        _say(folder, "stopped; start goes on from what is finished")
        return 130
    finally:
        with contextlib.suppress(FileNotFoundError):
            if (folder / "pid").read_text() == str(os.getpid()):
                (folder / "pid").unlink()
    _say(folder, f"all done, {len(failed)} of {len(commands)} with an error")
    return int(bool(failed))


def _one(at: Path, folder: Path, words: str, jobs: int, log: int) -> int:
    _say(folder, f"begins: {words}")
    running = begin(at, folder / "runs", words, jobs, log)
    try:
        code = running.wait()
    except BaseException:
        end(running)
        raise
    _say(folder, f"ended with status {code}: {words}")
    return code


def _say(folder: Path, line: str) -> None:
    with (folder / "log").open("a", encoding="utf-8") as log:
        log.write(f"== {line}\n")


def pid(folder: Path) -> int | None:
    """The process that works through the queue in `folder`, None if none does.

    A queue that runs holds the lock. Where it is free, the number that a killed one left may be
    another process's by now.
    """
    if not folder.is_dir():
        return None
    with contextlib.suppress(Timeout), _alone(folder):
        return None
    try:
        return int((folder / "pid").read_text())
    except (OSError, ValueError):  # it begins or ends just now
        return None


def _alone(folder: Path, timeout: float = 0) -> FileLock:
    return FileLock(folder / "queue.lock", timeout=timeout)


def stop(folder: Path) -> str:
    """Stop the queue in `folder`, and wait until it has."""
    if (found := pid(folder)) is None:
        return f"nothing runs in {folder}"
    with contextlib.suppress(ProcessLookupError):
        os.kill(found, signal.SIGTERM)
    try:
        with _alone(folder, GRACE + 30):
            return f"stopped; finished runs and checkpoints are in {folder / 'runs'}"
    except Timeout:
        raise SystemExit(f"process {found} has not stopped in {GRACE + 30} s") from None


def status(folder: Path) -> str:
    """Whether the queue runs, at which commit, how many runs are there, and the last lines said."""
    running = f"process {found}" if (found := pid(folder)) else "not running"
    at = folder / "tree"
    commit = _git("log", "-1", "--format=%h %s", cwd=at) if at.is_dir() else "no worktree yet"
    store = folder / "runs" / "store"
    whole = sum(1 for path in store.glob("*/experiment.json") if "." not in path.parent.name)
    begun = sum(1 for _ in store.glob("*.part"))
    log, lines = folder / "log", []
    if log.exists():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
    counted = f"{whole} runs finished, {begun} begun, in {store}"
    return "\n".join([f"{running}; {commit}", counted, *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Start, stop or look at the queue."""
    parser = argparse.ArgumentParser(prog="python -m tools.evidence", description=__doc__)
    parser.add_argument("word", choices=("start", "stop", "status"))
    where = "worktree, store (runs/) and log lie there; no folder of a checkout"
    parser.add_argument("folder", type=Path, help=where)
    parser.add_argument("--commit", help="move the worktree there (first time: HEAD)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--list", type=Path, default=LIST, help="a file like tools/evidence.toml")
    args = parser.parse_args(argv)
    folder = args.folder.expanduser().resolve()
    if args.word == "start":
        return work(folder, listed(args.list), args.commit, args.jobs)
    print(stop(folder) if args.word == "stop" else status(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
