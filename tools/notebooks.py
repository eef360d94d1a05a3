"""Runs notebooks with papermill, each in a process of its own.

One that fails is a row of the table at the end, and the others go on. For one notebook in this
process, with parameters as JSON: python -P tools/notebooks.py NOTEBOOK OUTPUT PARAMETERS

Only the standard library is imported before something runs, because run_all.sh checks its words
before it installs anything.
"""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple
from uuid import uuid4

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
# In the order in which they run.
PAPERS = ("fedper", "pfedhn", "pfedla", "flayer", "fedaghn")
NAMES = ("start", *PAPERS, "what_holds", "bench", "explore")
# Of what the others keep: they run when those have ended.
READERS = ("what_holds", "bench", "explore")
# {profile: wall clock of one notebook}. On two idle cores the longest takes 3 minutes at smoke and
# 13 at quick; beside others and eight busy processes, up to ten times as long.
LIMIT_S = {"smoke": 3600, "quick": 4 * 3600, "medium": 7 * 86400, "paper": 30 * 86400}


def present(folder: Path = NOTEBOOKS) -> list[str]:
    """Which of the project's notebooks `folder` has; others that lie there do not count."""
    return [name for name in NAMES if (folder / f"{name}.ipynb").is_file()]


# One notebook


def check_parameters(notebook: Path, parameters: Mapping[str, Any]) -> None:
    """Raise ValueError for parameters that the notebook lacks or that papermill would change.

    papermill itself only warns of unknown names, and writes tuples and numpy numbers as strings.
    """
    from papermill import inspect_notebook

    known = inspect_notebook(notebook)
    if unknown := sorted(parameters.keys() - known.keys()):
        raise ValueError(
            f"{notebook.name} has no parameter {', '.join(unknown)}; it has {', '.join(known)}"
        )
    for name, value in parameters.items():
        default = ast.literal_eval(known[name]["default"])
        if type(value) is not type(default):
            raise ValueError(
                f"{notebook.name}: {name} must be a {type(default).__name__}, not {value!r}"
            )
        if json.loads(json.dumps(value, allow_nan=False, default=repr)) != value:
            raise ValueError(f"{notebook.name}: {name} must hold plain JSON values, not {value!r}")


def over_sockets(manager: type) -> type:
    """A class of jupyter_client's kernel managers, over unix sockets where they are possible.

    Side by side, kernels over TCP can collide on ports.
    """
    from jupyter_core.paths import jupyter_runtime_dir

    class UnixSocketKernelManager(manager):
        def __init__(self, **settings):
            file = Path(jupyter_runtime_dir(), f"k-{uuid4().hex}.json")
            super().__init__(transport="ipc", connection_file=str(file), **settings)

    probe = Path(jupyter_runtime_dir(), f"k-{uuid4().hex}-ipc-1")
    probe.parent.mkdir(parents=True, exist_ok=True)
    try:
        with socket.socket(socket.AF_UNIX) as trial:
            trial.bind(str(probe))
        probe.unlink()
    except OSError:  # a long path, or a file system without sockets
        return manager
    return UnixSocketKernelManager


def execute(notebook: Path, output: Path, parameters: Mapping[str, Any]) -> int:
    """Run one notebook in a kernel of this interpreter, saving `output` cell by cell.

    Returns 0, or 1 after a printed line that says what failed.
    """
    from jupyter_client.manager import AsyncKernelManager
    from papermill import execute_notebook
    from papermill.exceptions import PapermillExecutionError

    if "recompute" in parameters:  # its name in version 0.2
        print("the parameter recompute is called train now; please write it so")
        parameters = {"train" if n == "recompute" else n: v for n, v in parameters.items()}
    try:
        check_parameters(notebook, parameters)
        execute_notebook(
            str(notebook),
            str(output),
            dict(parameters),
            kernel_name="python3",
            kernel_manager_class=over_sockets(AsyncKernelManager),
            progress_bar=False,
            stdout_file=sys.stdout,
            stderr_file=sys.stderr,
            start_timeout=600,
            cwd=str(notebook.parent),
        )
    except PapermillExecutionError as error:
        print(f"cell {error.cell_index + 1}: {error.ename}: {_first_line(error.evalue)}")
        return 1
    except Exception as error:  # the process ends here: the line goes into the table of run_all.sh
        print(f"{type(error).__name__}: {_first_line(str(error))}")
        return 1
    return 0


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


class Row(NamedTuple):
    """A line of the table at the end; `where` says what was written, or why it failed."""

    name: str
    status: str
    wall: str
    where: str


_running: set[subprocess.Popen] = set()


def kill(process: subprocess.Popen) -> None:
    """End a process and its kernel, which lives in a process group of its own."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        tree = [parent, *parent.children(recursive=True)]
        for member in tree:
            with suppress(psutil.NoSuchProcess):
                member.kill()


def run_notebook(
    notebook: Path,
    output: Path,
    parameters: Mapping[str, Any],
    env: Mapping[str, str],
    limit_s: float,
) -> Row:
    """Run one notebook in a process of its own; what it prints is passed on, its name in front.

    `output` is where the executed notebook is put; a failed one is kept beside it as
    NAME.failed.ipynb.
    """
    failed = output.with_suffix(".failed.ipynb")
    part = output.with_name(f".{output.stem}.{os.getpid()}.part.ipynb")
    output.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", __file__, str(notebook), str(part)]
    began, since = time.monotonic(), time.time() - 2  # some file systems keep times to two seconds
    code, last = _follow([*command, json.dumps(dict(parameters))], notebook.stem, env, limit_s)
    spent = time.monotonic() - began
    if part.exists():
        os.replace(part, failed if code else output)
    if code == 0:
        failed.unlink(missing_ok=True)
        figures = Path(env["PFL_RUNS"], "figures", notebook.stem)
        fresh = {p.parent for p in figures.rglob("*") if p.is_file() and p.stat().st_mtime >= since}
        written = ", ".join(shown(path) for path in sorted(fresh)) or "no figures"
        return Row(notebook.stem, "ok", clock(spent), written)
    if code < 0:
        stopped = spent >= limit_s
        last = f"stopped at its limit of {limit_s:g} s" if stopped else f"killed by signal {-code}"
    why = f"{last}; partly run: {shown(failed)}" if failed.exists() else last
    return Row(notebook.stem, "failed", clock(spent), why)


def _follow(
    command: Sequence[str], name: str, env: Mapping[str, str], limit_s: float
) -> tuple[int, str]:
    # The exit code and the last line of a command that is killed after limit_s seconds.
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    how = dict(text=True, errors="replace", start_new_session=True, **pipes)
    last = ""
    with subprocess.Popen(command, env=dict(env), **how) as process:
        _running.add(process)
        timer = Timer(limit_s, kill, [process])
        timer.start()
        for line in process.stdout:
            if line.strip():
                last = line.strip()
                print(f"{name} | {line}", end="", flush=True)
        code = process.wait()
        timer.cancel()
        _running.discard(process)
    return code, last


def shown(path: Path) -> str:
    """A path relative to the current folder where it lies below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def clock(seconds: float) -> str:
    """Seconds as m:ss."""
    return f"{int(seconds + 0.5) // 60}:{int(seconds + 0.5) % 60:02}"


def table(head: Sequence[str], rows: Sequence[Row]) -> None:
    """Print the rows below `head`, in columns."""
    lines = [Row(*head), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    print()
    for name, status, wall, where in lines:
        print(f"{name:<{widths[0]}}  {status:<{widths[1]}}  {wall:>{widths[2]}}  {where}".rstrip())
    sys.stdout.flush()


# Many notebooks


def environment(runs: Path, data: Path | None = None, **more: str) -> dict[str, str]:
    """The environment variables of a headless kernel."""
    ours = {"PFL_HEADLESS": "1", "PFL_RUNS": str(runs), "JUPYTER_PREFER_ENV_PATH": "1"}
    ours["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # a debugger's warning at each start of a kernel
    ours |= {"PFL_DATA": str(data)} if data else {}
    return {name: value for name, value in os.environ.items() if name != "MPLBACKEND"} | ours | more


def executed(runs: Path, name: str, profile: str = "quick", datasets: Sequence[str] = ()) -> Path:
    """Where an executed notebook is put below $PFL_RUNS; datasets: those that were asked for."""
    return runs / "notebooks" / ("-".join([f"{name}.{profile}", *datasets]) + ".ipynb")


def run(
    names: Sequence[str],
    parameters: Mapping[str, Any],
    env: Mapping[str, str],
    jobs: int = 1,
    notebooks: Path = NOTEBOOKS,
    limit_s: float | None = None,
) -> list[Row]:
    """Run the notebooks `names` of a folder, `jobs` at a time, `READERS` last; a row for each.

    Executed notebooks go where `executed` says. `limit_s` is what each may take in seconds, by
    default its profile's limit.
    """
    profile, datasets = parameters.get("profile", "quick"), parameters.get("datasets", ())
    # The path of a unix socket has at most 100 characters or so.
    short = dict(dir="/tmp" if os.path.isdir("/tmp") else None, ignore_cleanup_errors=True)
    with tempfile.TemporaryDirectory(prefix="pfl-", **short) as runtime:

        def one(name: str) -> Row:
            surroundings = {**env, "JUPYTER_RUNTIME_DIR": runtime}
            output = executed(Path(env["PFL_RUNS"]), name, profile, datasets)
            source = notebooks / f"{name}.ipynb"
            return run_notebook(
                source, output, parameters, surroundings, limit_s or LIMIT_S[profile]
            )

        pool, last = ThreadPoolExecutor(jobs), [name for name in names if name in READERS]
        try:
            rows = list(pool.map(one, [name for name in names if name not in last]))
            return rows + list(pool.map(one, last))
        finally:  # after an interruption: nothing goes on behind the user's back
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                kill(process)
            pool.shutdown()


if __name__ == "__main__":
    sys.exit(execute(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])))
