"""Command line: fetch and list data sets, compare methods, publish results; `python -m pfl_core --help` lists the words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pfl_core import compare, data, methods, models, pages, partition, report, runs  # noqa: F401  (methods registers them)
from pfl_core.methods.base import list_methods

LISTS = {
    "datasets": data.list_datasets,
    "methods": list_methods,
    "models": models.list_models,
    "partitions": partition.list_partitions,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it worked, 1 with one line on stderr if it did not, 2 for wrong words."""
    parser = argparse.ArgumentParser(prog="python -m pfl_core", description=__doc__)
    words = parser.add_subparsers(dest="word", required=True)
    fetch = words.add_parser("fetch", help="download a data set, verify it, keep it as an array cache")
    fetch.add_argument("name", nargs="+", metavar="NAME")
    publish = words.add_parser("publish", help="copy rows and figures of a paper from runs/ to results/ and figures/")
    publish.add_argument("paper", nargs="+", metavar="PAPER")
    table = words.add_parser("methods-table", help="run every method of the five papers on one data set, side by side")
    table.add_argument("dataset", metavar="DATASET")
    table.add_argument("--methods", nargs="+", default=[], metavar="NAME")
    table.add_argument("--seeds", nargs="+", type=int, default=[0, 1], metavar="N")
    words.add_parser("pages", help="write methods/README.md and the results section of README.md")
    words.add_parser("prune", help="delete finished runs of the store that no row in runs/results/ or results/ names")
    for name in LISTS:
        words.add_parser(name, help=f"list the {name} there are")
    args = parser.parse_args(argv)
    try:
        if args.word == "fetch":
            for name in args.name:
                pool = data.fetch(name)
                print(f"{name}: {pool.n} samples, {pool.classes} classes, checksum {pool.checksum[:12]}")
        elif args.word == "publish":
            for paper in args.paper:
                print(f"{paper}: {len(report.publish(paper))} files")
        elif args.word == "methods-table":
            print(compare.run(args.dataset, methods=args.methods, seeds=args.seeds).to_string())
        elif args.word == "pages":
            print(*pages.write(), sep="\n")
        elif args.word == "prune":
            print(f"{len(runs.prune(report.named_runs()))} runs deleted")
        else:
            for name, line in LISTS[args.word]().items():
                print(f"{name:20} {line}")
    except (OSError, ValueError) as error:
        print(f"pfl_core {args.word}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
