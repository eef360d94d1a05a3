"""Numbers and ids stay as they are: two float64 rounds of every method, and the ids of all committed runs.

A method whose numbers change on purpose raises its `revision`; then `python tests/test_golden.py` writes tests/golden.json anew.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from pfl_core import Experiment
from pfl_core.experiments.run import run
from pfl_core.methods.base import METHODS, make_method
from pfl_core.papers import plan, report
from pfl_core.papers.base import PAPERS
from pfl_core.util import paths

FILE = Path(__file__).with_name("golden.json")
GOLDEN = json.loads(FILE.read_text()) if FILE.exists() else {}
# Checksums of the real data that committed runs were computed on: ids need no more of them.
POOLS = {
    "cifar10": "99fc06735b2573d7f2b2bf0395a56f30f0d2c4d48dcd43762c67e7486ecccd3b",
    "cifar100": "a6825e85446e8503800500ab23c3aeb486a9a9c33c716e929d328a9c226d4de3",
    "mnist": "90353a5eacc9a5a5b03634fe5d429986d1282bf551b941f69d30c9316827f912",
    "fashion_mnist": "1b3fb617570394358e17d36f73030419151713dd9accaf5362737b27a3c83678",
    "emnist-digits": "50b8ca697a9bb6425371296ff83f1f0cba855c5df381d8985f2a6bfc70ceebce",
    "omniglot": "9ac0506954f0916bf80d9d318b0c94fd16137c6007ffae50526847d25f11f70e",
    "ag_news": "75460760820a998066dab1bfe1ae1a1e02183dd6939c63a3e41416fce3228599",
}
OURS = sorted(m for m, cls in METHODS.items() if cls.__module__.startswith("pfl_core."))
COMMITTED = [f for p in PAPERS for f in sorted(paths.results_folder().glob(f"{p}.*.csv"))]


def experiment(method):
    return Experiment(
        dataset="digits",
        partition="dirichlet",
        partition_args={"alpha": 0.5, "split": "70/10/20"},
        clients=5,
        model="cnn_bn",
        method=method,
        rounds=2,
        participation=0.6,
        batch=8,
        lr=0.05,
        max_samples=24,
        holdout=0.2,
        head_init="own" if method in ("fedper", "pfedhn_pc") else "common",
        eval_after=True,
        dtype="float64",
    )


def numbers(method):
    """Id, revision, losses of every evaluation summed over clients, correct test samples, and bytes moved."""
    r = run(experiment(method), workers=1)
    out = {
        key: r.arrays[key].sum(1).tolist()
        for key in r.arrays
        if key.endswith(("/loss", "test/correct"))
    }
    moved = r.history[r.history.metric.isin(["download_bytes", "upload_bytes"])]
    out |= {m: g.value.tolist() for m, g in moved.groupby("metric")}
    return {"id": r.id, "revision": r.meta["revision"], **out}


@pytest.mark.parametrize("method", OURS)
def test_numbers_of_two_rounds(store, method):
    found, kept = numbers(method), GOLDEN[method]
    assert (found.pop("id"), found.pop("revision")) == (kept["id"], kept["revision"])
    for key, values in found.items():
        np.testing.assert_allclose(values, kept[key], rtol=1e-10, atol=1e-10, err_msg=key)


def test_every_method_is_held():
    assert set(GOLDEN) == set(OURS) and all(
        make_method(m).revision == GOLDEN[m]["revision"] for m in OURS
    )


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: p.stem)
def test_committed_ids_are_those_of_the_papers_runs(path):
    paper, rest = path.stem.split(".", 1)
    profile, label = rest.split("-", 1)
    datasets = [] if label in ("digits", "paper") else label.split("+")
    rows = report.read_rows(path).drop_duplicates("run")
    asked = [
        e
        for e in plan.planned(paper, profile=profile, datasets=datasets)
        if e.dataset in set(rows.dataset)
    ]
    known = {e.id_for(POOLS[e.dataset]) if e.dataset in POOLS else e.id for e in asked}
    assert set(rows.run) <= known, (
        f"{len(set(rows.run) - known)} of {len(rows)} committed runs are nobody's"
    )


if __name__ == "__main__":
    import os
    import tempfile

    os.environ["PFL_RUNS"] = tempfile.mkdtemp()
    FILE.write_text(json.dumps({m: numbers(m) for m in OURS}, indent=1) + "\n")
