"""What run_all.sh does (every notebook with papermill, the gates, JupyterLab), and the cleaner of notebooks.

    python -m tools.runner [test | lab | report] [options]     the words of run_all.sh, which runs this file by its path
    python -m tools.runner clean [--run] NOTEBOOK...  makes notebooks fit to commit; --run: executes them before

Only the standard library is imported before something runs, so that the words are checked before any install.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple, NoReturn
from uuid import uuid4

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
PAPERS = ("fedper", "pfedhn", "pfedla", "flayer", "fedaghn", "explore")
DATASETS = tuple(
    "digits digits100 raters_digits100 mnist fashion_mnist emnist emnist-balanced emnist-bymerge emnist-digits "
    "emnist-letters emnist-letters10 emnist-mnist cifar10 raters_cifar10 cifar100 omniglot tiny_imagenet ag_news "
    "flickr_aes".split()
)
LIMIT_S = {"smoke": 600, "quick": 3600, "medium": 7 * 86400, "paper": 30 * 86400}  # wall clock of one notebook
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}


# The words


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"run_all.sh: {message} (see ./run_all.sh --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            listed = ", ".join(map(str, action.choices)) or "none"
            raise argparse.ArgumentError(
                action, f"{value!r} is unknown{nearest(value, action.choices)}; known: {listed}"
            )


def nearest(given: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?" where a known word is near, else nothing."""
    near = difflib.get_close_matches(given.lower(), list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def _folder(text: str) -> Path:
    path = Path(text).expanduser().resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return path


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,2}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 999")
    return int(text)


def parse(argv: Sequence[str], notebooks: Path = NOTEBOOKS) -> argparse.Namespace:
    """The command line of run_all.sh; a wrong one ends the program with one line and code 2."""
    here = [paper for paper in PAPERS if (notebooks / f"{paper}.ipynb").is_file()]
    parser = Parser(
        prog="./run_all.sh",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Sets the environment up (the active venv or conda environment, else .venv), then runs\n"
        "every notebook, or only the word given.",
        epilog="What is written lies below runs/ (or $PFL_RUNS): notebooks/, figures/, store/. Finished runs\nare "
        "found there again, unfinished ones go on.\nExit code: 0; 1 if a notebook or check failed; 2 for wrong words.",
    )
    words = {"test": "ruff, pytest, and the notebooks against what is committed", "lab": "JupyterLab on the loopback"}
    words["report"] = "figures/report.html, all results on one page"
    listed = "; ".join(f"{word}: {doc}" for word, doc in words.items())
    parser.add_argument("word", nargs="?", choices=words, metavar="test | lab | report", help=listed)
    parser.add_argument("--profile", choices=LIMIT_S, default="quick", help="size of the runs (default: quick)")
    parser.add_argument("--paper", nargs="+", choices=here, metavar="NAME", help=f"of {', '.join(here)} (all)")
    parser.add_argument("--data", type=_folder, metavar="DIR", help="where data sets lie (default: $PFL_DATA)")
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, metavar="NAME", help=f"of {', '.join(DATASETS)}")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train (default: auto)"
    )
    on = "where runs go: processes here, or a Ray cluster ($RAY_ADDRESS; default: local)"
    parser.add_argument("--on", choices=("local", "ray"), default="local", help=on)
    parser.add_argument("--jobs", type=_count, default=1, metavar="N", help="notebooks side by side (default: 1)")
    for flag in (word.partition("=")[0] for word in argv if word.startswith("-")):
        if flag not in parser._option_string_actions:
            names = parser._option_string_actions
            parser.error(f"unknown option {flag}{nearest(flag, names)}; known: {', '.join(names)}")
    args = parser.parse_args(argv)
    given = {name for name, value in vars(args).items() if name != "word" and value != parser.get_default(name)}
    if surplus := given - {None: given, "lab": {"data"}}.get(args.word, set()):
        parser.error(f"{args.word} takes no --{', --'.join(sorted(surplus))}")
    args.paper = args.paper or here
    return args


# One notebook


def check_parameters(notebook: Path, parameters: Mapping[str, Any]) -> None:
    """ValueError for a parameter that the notebook does not have, or whose value papermill would change on the way.

    papermill itself only warns of unknown names, and writes tuples and numpy numbers as strings.
    """
    from papermill import inspect_notebook

    known = inspect_notebook(notebook)
    if unknown := sorted(parameters.keys() - known.keys()):
        raise ValueError(f"{notebook.name} has no parameter {', '.join(unknown)}; it has {', '.join(known)}")
    for name, value in parameters.items():
        default = ast.literal_eval(known[name]["default"])
        if type(value) is not type(default):
            raise ValueError(f"{notebook.name}: {name} must be a {type(default).__name__}, not {value!r}")
        if json.loads(json.dumps(value, allow_nan=False, default=repr)) != value:
            raise ValueError(f"{notebook.name}: {name} must hold plain JSON values, not {value!r}")


def _kernel_manager():
    """The class of kernels over unix sockets, which cannot collide on ports when side by side; else over TCP."""
    from jupyter_client.manager import AsyncKernelManager
    from jupyter_core.paths import jupyter_runtime_dir

    class UnixSocketKernelManager(AsyncKernelManager):
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
        return AsyncKernelManager
    return UnixSocketKernelManager


def execute(notebook: Path, output: Path, parameters: Mapping[str, Any]) -> int:
    """Runs one notebook in a kernel of this interpreter, saving `output` cell by cell; 1 and a line if it fails."""
    from papermill import execute_notebook
    from papermill.exceptions import PapermillExecutionError

    try:
        check_parameters(notebook, parameters)
        execute_notebook(
            str(notebook),
            str(output),
            dict(parameters),
            kernel_name="python3",
            kernel_manager_class=_kernel_manager(),
            progress_bar=False,
            stdout_file=sys.stdout,
            stderr_file=sys.stderr,
            start_timeout=120,
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
    name: str
    status: str
    wall: str
    where: str


_running: set[subprocess.Popen] = set()


def _kill(process: subprocess.Popen) -> None:
    """Ends a process and its kernel, which lives in a process group of its own."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        tree = [parent, *parent.children(recursive=True)]
        for member in tree:
            with suppress(psutil.NoSuchProcess):
                member.kill()


def run_notebook(
    notebook: Path, output: Path, parameters: Mapping[str, Any], env: Mapping[str, str], limit_s: float
) -> Row:
    """Runs one notebook in a process of its own; what it prints is passed on with its name in front.

    output: where the executed notebook is put when it is finished; a failed one is kept beside it as NAME.failed.ipynb.
    """
    failed = output.with_suffix(".failed.ipynb")
    part = output.with_name(f".{output.stem}.{os.getpid()}.part.ipynb")
    output.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", __file__, "execute", str(notebook), str(part), json.dumps(dict(parameters))]
    began, since = time.monotonic(), time.time() - 2  # some file systems keep times to two seconds
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    why = ""
    with subprocess.Popen(
        command, env=dict(env), text=True, errors="replace", start_new_session=True, **pipes
    ) as process:
        _running.add(process)
        timer = Timer(limit_s, _kill, [process])
        timer.start()
        for line in process.stdout:
            if line.strip():
                why = line.strip()
                print(f"{notebook.stem} | {line}", end="", flush=True)
        code = process.wait()
        timer.cancel()
        _running.discard(process)
    spent = time.monotonic() - began
    if code < 0:
        why = f"stopped at its limit of {limit_s:g} s" if spent >= limit_s else f"killed by signal {-code}"
    if part.exists():
        os.replace(part, failed if code else output)
    if code == 0:
        failed.unlink(missing_ok=True)
        figures = Path(env["PFL_RUNS"], "figures", notebook.stem)
        fresh = {p.parent for p in figures.rglob("*") if p.is_file() and p.stat().st_mtime >= since}
        where = ", ".join(_shown(path) for path in sorted(fresh)) or "no figures"
    else:
        where = f"{why}; partly run: {_shown(failed)}" if failed.exists() else why
    return Row(notebook.stem, "failed" if code else "ok", _clock(spent), where)


def _shown(path: Path) -> str:
    """A path relative to the current folder where it lies below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _clock(seconds: float) -> str:
    return f"{int(seconds + 0.5) // 60}:{int(seconds + 0.5) % 60:02}"


def _table(head: Sequence[str], rows: Sequence[Row]) -> None:
    lines = [Row(*head), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    print()
    for name, status, wall, where in lines:
        print(f"{name:<{widths[0]}}  {status:<{widths[1]}}  {wall:>{widths[2]}}  {where}".rstrip())
    sys.stdout.flush()


# All notebooks


def environment(runs: Path, data: Path | None = None, **more: str) -> dict[str, str]:
    """The environment variables of a headless kernel."""
    ours = {"PFL_HEADLESS": "1", "PFL_RUNS": str(runs), "JUPYTER_PREFER_ENV_PATH": "1"}
    ours["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # a debugger's warning at each start of a kernel
    ours |= {"PFL_DATA": str(data)} if data else {}
    return {name: value for name, value in os.environ.items() if name != "MPLBACKEND"} | ours | more


def run(
    papers: Sequence[str],
    parameters: Mapping[str, Any],
    env: Mapping[str, str],
    jobs: int = 1,
    notebooks: Path = NOTEBOOKS,
    limit_s: float | None = None,
) -> list[Row]:
    """Runs the notebooks of `papers`, `jobs` at a time; executed ones go to $PFL_RUNS/notebooks. One row each."""
    profile = parameters.get("profile", "quick")
    data = "+".join(parameters.get("datasets", ())) or ("paper" if profile in ("medium", "paper") else "digits")
    short = "/tmp" if os.path.isdir("/tmp") else None  # the path of a unix socket has at most 100 characters or so
    with tempfile.TemporaryDirectory(prefix="pfl-", dir=short, ignore_cleanup_errors=True) as runtime:

        def one(paper: str) -> Row:
            output = Path(env["PFL_RUNS"], "notebooks", f"{paper}.{profile}-{data}.ipynb")
            surroundings = {**env, "JUPYTER_RUNTIME_DIR": runtime}
            return run_notebook(
                notebooks / f"{paper}.ipynb", output, parameters, surroundings, limit_s or LIMIT_S[profile]
            )

        pool = ThreadPoolExecutor(jobs)
        try:
            return list(pool.map(one, papers))
        finally:  # after an interruption: nothing goes on behind the user's back
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                _kill(process)
            pool.shutdown()


def _stop(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def main_run(args: argparse.Namespace) -> int:
    if not args.paper:
        print(f"run_all.sh: no notebook in {NOTEBOOKS}", file=sys.stderr)
        return 1
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("run_all.sh: argument --device: torch sees no GPU here; use cpu or auto", file=sys.stderr)
            return 2
    parameters = {"profile": args.profile, "recompute": True, "datasets": args.datasets or [], "device": args.device}
    runs = Path(os.environ.get("PFL_RUNS") or ROOT / "runs").resolve()
    rows = run(args.paper, parameters, environment(runs, args.data, PFL_ON=args.on), args.jobs)
    _table(("notebook", "status", "wall", "figures"), rows)
    return int(any(row.status != "ok" for row in rows))


def main_lab(args: argparse.Namespace) -> NoReturn:
    command = [sys.executable, "-P", "-m", "jupyterlab", "--ip=127.0.0.1", f"--ServerApp.root_dir={ROOT}"]
    command += ["--LabApp.default_url=/lab/tree/notebooks"] + ["--allow-root"] * (os.geteuid() == 0)
    env = os.environ | {"JUPYTER_PREFER_ENV_PATH": "1"} | ({"PFL_DATA": str(args.data)} if args.data else {})
    os.chdir(ROOT)
    os.execve(sys.executable, command, env)


def main_report() -> int:
    return subprocess.run([sys.executable, "-P", "-m", "pfl_core", "report"], cwd=ROOT).returncode


# The gates


def gate_environment(runs: Path) -> dict[str, str]:
    """A kernel that sees a new run store and no data but what the project embeds, and no network."""
    return environment(runs, runs / "no-data", PFL_OFFLINE="1")


def main_test() -> int:
    """ruff, pytest and both nbval gates, each in a process of its own; all of them run, whatever fails."""
    rows: list[Row] = []
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="test-", dir=ROOT / "runs"))
    here = [str(NOTEBOOKS / f"{paper}.ipynb") for paper in PAPERS if (NOTEBOOKS / f"{paper}.ipynb").is_file()]

    def stage(name: str, *command: str, env: Mapping[str, str] = os.environ) -> None:
        print(f"\n== {name}", flush=True)
        began = time.monotonic()
        code = subprocess.run([sys.executable, "-P", "-m", *command], cwd=ROOT, env=dict(env)).returncode
        rows.append(Row(name, "failed" if code else "ok", _clock(time.monotonic() - began), ""))

    def nbval(name: str, notebooks: Sequence[str], runs: Path) -> None:
        settings = ("-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", "--nbval", "--nbval-current-env")
        if notebooks:
            stage(name, "pytest", *settings, *notebooks, env=gate_environment(runs))
        else:
            rows.append(Row(name, "failed", "0:00", "no notebook to compare"))

    stage("ruff check", "ruff", "check", ".")
    stage("ruff format", "ruff", "format", "--check", ".")
    stage("pytest", "pytest", "-n", "auto", "--maxprocesses", "8")
    nbval("gate 1: committed notebooks", here, folder / "committed")

    print("\n== gate 2: notebooks at smoke", flush=True)
    first = folder / "first"
    smoke = {"profile": "smoke", "recompute": True}
    executed = run([Path(path).stem for path in here], smoke, gate_environment(first))
    rows += [row._replace(name=f"gate 2: {row.name}", where=row.where * (row.status != "ok")) for row in executed]
    if (first / "notebooks").is_dir():
        shutil.copy(NOTEBOOKS / "conftest.py", first / "notebooks")
    again = [str(p) for p in sorted(first.glob("notebooks/[a-z]*.ipynb")) if not p.name.endswith(".failed.ipynb")]
    nbval("gate 2: trained again", again, folder / "again")

    _table(("check", "status", "wall", ""), rows)
    good = all(row.status == "ok" for row in rows)
    if good:
        shutil.rmtree(folder)
    else:
        print(f"what the gates wrote is kept in {_shown(folder)}")
    return int(not good)


# The cleaner


def clean(notebook: Path, source: Path | None = None) -> None:
    """Writes `notebook` (from `source`) without what differs between two equal runs: papermill's and JupyterLab's
    metadata, times, versions, widget state, the pieces of a stream. Tags, ids, counts and outputs stay."""
    import nbformat

    nb = nbformat.read(source or notebook, as_version=4)
    nb.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    for cell in nb.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        outputs = []
        for output in cell.get("outputs", ()):
            if "application/vnd.jupyter.widget-view+json" in output.get("data", ()):
                continue
            before = outputs[-1] if outputs else {}
            if output.output_type == "stream" == before.get("output_type") and output.name == before.name:
                before.text += output.text
            else:
                outputs.append(output)
        if cell.cell_type == "code":
            cell.outputs = outputs
    part = notebook.with_name(f".{notebook.name}.part")
    nbformat.write(nb, part)
    os.replace(part, notebook)


def main_clean(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="runner.py clean", description="Makes notebooks fit to commit.")
    parser.add_argument(
        "--run", action="store_true", help="execute them first, as gate 1 sees them; with $PFL_RUNS over its runs"
    )
    parser.add_argument("notebook", nargs="+", type=Path)
    args = parser.parse_args(argv)
    code = 0
    for notebook in args.notebook:
        if not args.run:
            clean(notebook)
            continue
        with tempfile.TemporaryDirectory(prefix="pfl-") as scratch:
            runs = os.environ.get("PFL_RUNS") or scratch
            env = gate_environment(Path(runs))
            (row,) = run([notebook.stem], {}, env, notebooks=notebook.resolve().parent)
            name = f"{notebook.stem}.quick-digits"
            if row.status == "ok":
                clean(notebook, Path(runs, "notebooks", f"{name}.ipynb"))
            else:
                kept = [shutil.copy(p, tempfile.gettempdir()) for p in Path(runs, "notebooks").glob(f"{name}.*ipynb")]
                print(f"{notebook} is left as it was: {row.where.partition(';')[0]}", *kept)
                code = 1
    return code


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["execute"]:
        return execute(Path(argv[1]), Path(argv[2]), json.loads(argv[3]))
    if argv[:1] == ["clean"]:
        return main_clean(argv[1:])
    if argv[:1] == ["--check"]:
        args = parse(argv[1:])
        print("[test]" if args.word == "test" else "[ray]" if args.on == "ray" else "")
        return 0
    signal.signal(signal.SIGTERM, _stop)
    args = parse(argv)
    return {None: main_run, "test": lambda _: main_test(), "lab": main_lab, "report": lambda _: main_report()}[
        args.word
    ](args)


if __name__ == "__main__":
    sys.exit(main())
