"""Numbers and ids stay as they are: two float64 rounds of every method, and the ids of all committed runs.

A method whose numbers change on purpose raises its `revision`; then `python -m tests.test_golden` writes tests/golden.json anew.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from pfl_core import Experiment
from pfl_core.experiments.run import run
from pfl_core.methods.base import METHODS, make_method
from pfl_papers.compare import plan
from pfl_papers.evidence import committed
from pfl_papers.papers.base import PAPERS

FILE = Path(__file__).with_name("golden.json")
GOLDEN = json.loads(FILE.read_text()) if FILE.exists() else {}
OURS = sorted(m for m, cls in METHODS.items() if cls.__module__.startswith("pfl_core."))
COMMITTED = [part for p in PAPERS for part in committed.parts(p).values()]


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


def numbers(method, store):
    """Id, revision, losses of every evaluation summed over clients, correct test samples, and bytes moved."""
    r = run(experiment(method), store=store, workers=1)
    out = {
        key: r.arrays[key].sum(1).tolist()
        for key in r.arrays
        if key.endswith(("/loss", "test/correct"))
    }
    moved = r.history[r.history.metric.isin(["download_bytes", "upload_bytes"])]
    out |= {m: g.value.tolist() for m, g in moved.groupby("metric")}
    return {"id": r.id, "revision": r.meta["revision"], **out}


@pytest.mark.slow
@pytest.mark.parametrize("method", OURS)
def test_numbers_of_two_rounds(tmp_path, method):
    found, kept = numbers(method, tmp_path), GOLDEN[method]
    assert (found.pop("id"), found.pop("revision")) == (kept["id"], kept["revision"])
    for key, values in found.items():
        np.testing.assert_allclose(values, kept[key], rtol=1e-10, atol=1e-10, err_msg=key)


def test_every_method_is_held():
    assert set(GOLDEN) == set(OURS) and all(
        make_method(m).revision == GOLDEN[m]["revision"] for m in OURS
    )


@pytest.mark.parametrize("part", COMMITTED, ids=lambda part: part.name)
def test_committed_ids_are_those_of_the_papers_runs(part):
    datasets = [] if part.data in ("digits", "paper") else part.data.split("+")
    rows = part.rows().drop_duplicates("run")
    asked = plan.planned(part.paper, profile=part.profile, datasets=datasets)
    known = {i for e in asked if e.dataset in set(rows.dataset) for i in e.ids}
    nobodys = set(rows.key) - known
    assert not nobodys, f"{len(nobodys)} of {len(rows)} committed runs are nobody's"


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        found = {m: numbers(m, folder) for m in OURS}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
