"""Makes notebooks fit to commit: python -m tools.clean [--run] NOTEBOOK..."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools import gates, notebooks

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}


def clean(notebook: Path, source: Path | None = None) -> None:
    """Write `notebook` (from `source`, or from itself) without what differs between equal runs.

    That is papermill's and JupyterLab's metadata, times, versions, widget state and the pieces of
    a stream. Tags, ids, execution counts and outputs stay.
    """
    import nbformat

    nb = nbformat.read(source or notebook, as_version=4)
    nb.metadata = nbformat.from_dict(
        {"kernelspec": KERNELSPEC, "language_info": {"name": "python"}}
    )
    for cell in nb.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        outputs = []
        for output in cell.get("outputs", ()):
            if "application/vnd.jupyter.widget-view+json" in output.get("data", ()):
                continue
            before = outputs[-1] if outputs else {}
            if (
                output.output_type == "stream" == before.get("output_type")
                and output.name == before.name
            ):
                before.text += output.text
            else:
                outputs.append(output)
        if cell.cell_type == "code":
            cell.outputs = outputs
    part = notebook.with_name(f".{notebook.name}.part")
    nbformat.write(nb, part)
    os.replace(part, notebook)


def run_and_clean(notebook: Path) -> bool:
    """Execute a notebook as gate 1 does, and clean what came out; False if it failed.

    A notebook that failed stays as it was; what came out is copied to the folder for temporary
    files.
    """
    with tempfile.TemporaryDirectory(prefix="pfl-") as scratch:
        runs = Path(os.environ.get("PFL_RUNS") or scratch)
        folder = notebook.resolve().parent
        (row,) = notebooks.run([notebook.stem], {}, gates.environment(runs), notebooks=folder)
        done = notebooks.executed(runs, notebook.stem)
        if row.status == "ok":
            clean(notebook, done)
            return True
        failed = done.parent.glob(f"{done.stem}.*ipynb")
        kept = [shutil.copy(path, tempfile.gettempdir()) for path in failed]
        print(f"{notebook} is left as it was: {row.where.partition(';')[0]}", *kept)
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Clean the notebooks named; 1 if one that was to be run failed."""
    about = "Makes notebooks fit to commit."
    parser = argparse.ArgumentParser(prog="python -m tools.clean", description=about)
    first = "execute them first, as gate 1 sees them; with $PFL_RUNS over its runs"
    parser.add_argument("--run", action="store_true", help=first)
    parser.add_argument("notebook", nargs="+", type=Path)
    args = parser.parse_args(argv)
    if not args.run:
        for notebook in args.notebook:
            clean(notebook)
        return 0
    good = [run_and_clean(notebook) for notebook in args.notebook]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
