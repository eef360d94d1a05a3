"""The words of run_all.sh, which runs this file by its path: every notebook, or test, lab, ...

Only the standard library is imported before something runs, so that the words are checked before
anything is installed.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

# Called by its path and with -P, Python looks for `tools` nowhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import gates, notebooks  # noqa: E402
from tools.notebooks import LIMIT_S, NOTEBOOKS, ROOT  # noqa: E402

# The library's data sets; it cannot be asked before it is installed, so a test holds them equal.
DATASETS = """
digits digits100 digits_texts raters_digits100 mnist fashion_mnist emnist emnist-balanced
emnist-bymerge emnist-digits emnist-letters emnist-letters10 emnist-mnist cifar10 raters_cifar10
cifar100 omniglot tiny_imagenet ag_news flickr_aes
""".split()
WORDS = {
    "test": "ruff, pyright, pytest, the site, and the notebooks against what is committed",
    "lab": "JupyterLab on the loopback",
    "report": "figures/report.html, all results on one page",
    "docs": "runs/docs/html/index.html, the documentation as a site",
}


class Parser(argparse.ArgumentParser):
    """argparse's, whose errors are one line, with the nearest word that is known."""

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


def _parser(here: Sequence[str]) -> Parser:
    parser = Parser(
        prog="./run_all.sh",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Sets the environment up (the active one, else .venv), then runs every\n"
        "notebook, or only the word given.",
        epilog="What is written lies below runs/ (or $PFL_RUNS): notebooks/, figures/, store/.\n"
        "Finished runs are found there again, unfinished ones go on; start.ipynb trains anew.\n"
        "Exit code: 0; 1 if a notebook or check failed; 2 for wrong words.",
    )
    add = parser.add_argument
    listed = "; ".join(f"{word}: {doc}" for word, doc in WORDS.items())
    add("word", nargs="?", choices=WORDS, metavar=" | ".join(WORDS), help=listed)
    add("--profile", choices=LIMIT_S, default="quick", help="size of the runs (default: quick)")
    names = ", ".join(here)
    add("--paper", nargs="+", choices=here, metavar="NAME", help=f"of {names} (default: all)")
    add("--data", type=_folder, metavar="DIR", help="where data sets lie (default: $PFL_DATA)")
    names = ", ".join(DATASETS)
    add("--datasets", nargs="+", choices=DATASETS, metavar="NAME", help=f"of {names}")
    devices = ("auto", "cpu", "cuda")
    add("--device", choices=devices, default="auto", help="where to train (default: auto)")
    on = "where runs go: processes here, or a Ray cluster ($RAY_ADDRESS; default: local)"
    add("--on", choices=("local", "ray"), default="local", help=on)
    jobs = "notebooks side by side (default: 1)"
    add("--jobs", type=_count, default=1, metavar="N", help=jobs)
    return parser


def parse(argv: Sequence[str], folder: Path = NOTEBOOKS) -> argparse.Namespace:
    """The command line of run_all.sh; a wrong one ends the program with one line and code 2."""
    here = notebooks.present(folder)
    parser = _parser(here)
    known = parser._option_string_actions
    for flag in (word.partition("=")[0] for word in argv if word.startswith("-")):
        if flag not in known:
            parser.error(f"unknown option {flag}{nearest(flag, known)}; known: {', '.join(known)}")
    if argv and argv[0] in here:
        parser.error(f"{argv[0]!r} is a notebook; write --paper {argv[0]}")
    args = parser.parse_args(argv)
    if args.word is not None:
        allowed = {"word", "data"} if args.word == "lab" else {"word"}
        given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
        if surplus := given - allowed:
            parser.error(f"{args.word} takes no --{', --'.join(sorted(surplus))}")
    args.paper = args.paper or here
    return args


def _stop(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _device(device: str) -> bool:
    # Whether it can be had; says so where torch cannot use the GPU that is here.
    from pfl_core.util import driver

    chosen = os.environ.get("PFL_DEVICE") or device if device == "auto" else device
    if chosen == "cpu" or (chosen == "auto" and not driver.version()):
        return True  # torch need not be imported
    from pfl_core.util import gpu

    if chosen == "cuda" and (why := gpu.refused()):
        print(f"run_all.sh: argument --device: {why}; use cpu or auto", file=sys.stderr)
        return False
    if why := gpu.misfit():
        print(f"run_all.sh: training on the CPU: {why}", file=sys.stderr)
    return True


def main_run(args: argparse.Namespace) -> int:
    """Run the notebooks asked for; 1 if one failed, 2 without the GPU that was asked for."""
    if not args.paper:
        print(f"run_all.sh: no notebook in {NOTEBOOKS}", file=sys.stderr)
        return 1
    if not _device(args.device):
        return 2
    parameters = {
        "profile": args.profile,
        "train": True,
        "datasets": args.datasets or [],
        "device": args.device,
    }
    runs = Path(os.environ.get("PFL_RUNS") or ROOT / "runs").resolve()
    rows = notebooks.run(
        args.paper, parameters, notebooks.environment(runs, args.data, PFL_ON=args.on), args.jobs
    )
    notebooks.table(("notebook", "status", "wall", "figures"), rows)
    return int(any(row.status != "ok" for row in rows))


def main_lab(args: argparse.Namespace) -> NoReturn:
    """Become JupyterLab, which listens on the loopback only."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "jupyterlab",
        "--ip=127.0.0.1",
        f"--ServerApp.root_dir={ROOT}",
    ]
    command += ["--LabApp.default_url=/lab/tree/notebooks"] + ["--allow-root"] * (os.geteuid() == 0)
    env = (
        os.environ
        | {"JUPYTER_PREFER_ENV_PATH": "1"}
        | ({"PFL_DATA": str(args.data)} if args.data else {})
    )
    os.chdir(ROOT)
    os.execve(sys.executable, command, env)


def main_report() -> int:
    """Write figures/report.html."""
    return subprocess.run([sys.executable, "-P", "-m", "pfl_papers", "report"], cwd=ROOT).returncode


def main_docs() -> int:
    """Build the documentation below runs/docs/html."""
    site = ROOT / "runs" / "docs" / "html"
    command = [sys.executable, "-P", "-m", *gates.docs(site)]
    code = subprocess.run(command, cwd=ROOT).returncode
    if not code:
        print(f"open {notebooks.shown(site / 'index.html')} in a browser")
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the words say; --check WORDS prints the extra that they need beside `notebooks`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["--check"]:
        args = parse(argv[1:])
        extra = args.word if args.word in ("test", "docs") else "ray" if args.on == "ray" else ""
        print(extra)
        return 0
    signal.signal(signal.SIGTERM, _stop)
    args = parse(argv)
    if args.word is None:
        return main_run(args)
    words = {"test": gates.run, "lab": lambda: main_lab(args)}
    words |= {"report": main_report, "docs": main_docs}
    return words[args.word]()


if __name__ == "__main__":
    sys.exit(main())
