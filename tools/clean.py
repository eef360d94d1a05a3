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
    """Writes `notebook` (from `source`) without what differs between two equal runs: papermill's and JupyterLab's
    metadata, times, versions, widget state, the pieces of a stream. Tags, ids, counts and outputs stay."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Clean the notebooks named; 1 if one that was to be run failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.clean", description="Makes notebooks fit to commit."
    )
    parser.add_argument(
        "--run",
        action="store_true",
        help="execute them first, as gate 1 sees them; with $PFL_RUNS over its runs",
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
            env = gates.environment(Path(runs))
            (row,) = notebooks.run([notebook.stem], {}, env, notebooks=notebook.resolve().parent)
            done = notebooks.executed(Path(runs), notebook.stem)
            if row.status == "ok":
                clean(notebook, done)
            else:
                kept = [
                    shutil.copy(p, tempfile.gettempdir())
                    for p in done.parent.glob(f"{done.stem}.*ipynb")
                ]
                print(f"{notebook} is left as it was: {row.where.partition(';')[0]}", *kept)
                code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
