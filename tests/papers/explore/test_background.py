"""A run in a process of its own: stopped with its checkpoint, continued, failed, killed."""

import time

import pytest

from pfl_core.experiments.experiment import Experiment
from pfl_papers.explore.background import Background

pytestmark = pytest.mark.slow

LONG = Experiment(
    clients=2,
    model="lenet",
    model_args={"kernels": 2},
    rounds=100_000,
    batch=10,
    max_samples=10,
    eval_after=False,
)


def until(seen, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_stopped_and_run_again(tmp_path):
    job = Background(LONG, store=tmp_path)
    until(lambda: job.poll() and job.curve is not None and job.curve["rounds"].max() > 1)
    job.stop()
    assert job.wait() == "stopped"
    assert (tmp_path / f"{LONG.id}.part" / "checkpoint.pt").exists()
    assert not (tmp_path / LONG.id).exists()
    again = Background(LONG, store=tmp_path)
    until(lambda: again.poll() and again.curve is not None)
    again.stop()
    assert again.wait() == "stopped" and len(again.curve) > len(job.curve)
    assert again.curve[: len(job.curve)].equals(job.curve)  # it went on


def test_done_failed_and_killed(tmp_path):
    done = Background(LONG.but(rounds=1), store=tmp_path)
    # Five groups cannot share seven clients.
    failed = Background(Experiment(partition="groups", clients=7), store=tmp_path)
    killed = Background(LONG, store=tmp_path)
    assert done.wait() == "done" and done.curve["rounds"].tolist() == [0, 1]
    assert failed.wait().startswith("failed: partition 'groups': groups=5 must divide")
    assert failed.curve is None
    until(lambda: killed.poll())
    killed._process.kill()
    assert killed.wait() == "failed: its process ended with code -9"
