"""Sweeps on Ray: with a stand-in of its few functions, and, where ray is installed, for real."""

import itertools
import multiprocessing
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pandas as pd
import pytest

import pfl_papers.__main__
from pfl_core import Experiment, Federation, load, sweep
from pfl_core.engine import simulate
from pfl_core.experiments import sweep as sweeps
from pfl_core.experiments import workers
from pfl_core.extras.ray import _task, start
from pfl_papers.bench import record, settings
from tools import notebooks, runner

pytestmark = pytest.mark.slow

TINY = dict(
    partition_args={"alpha": 1.0},
    clients=3,
    model="mlp",
    model_args={"hidden": 4},
    max_samples=20,
    rounds=4,
)
CELLS = [Experiment(**TINY, seed=s) for s in range(3)]


class NodeLost(BaseException):
    """What a task meets whose node goes away: nothing of it is left."""


class RayTaskError(Exception):
    def __init__(self, cause):
        self.cause = cause


class StandIn(SimpleNamespace):
    """Ray's init, nodes, remote, wait, get and cancel in this process.

    What was asked for last is ready first.
    """

    def __init__(self, cpus=2, gpus=0):
        super().__init__(
            started=0,
            options=None,
            cancelled=[],
            exceptions=SimpleNamespace(RayTaskError=RayTaskError),
        )
        self.there = [
            {"Alive": True, "Resources": {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}}
        ]
        self.there.append({"Alive": False, "Resources": {"CPU": 64, "GPU": 8}})
        self.address, self.asked = "127.0.0.1", []
        self._private = SimpleNamespace(ray_constants=SimpleNamespace(ENABLE_RAY_CLUSTER=True))

    def is_initialized(self):
        return self.started

    def init(self, **how):
        self.asked.append(how | {"cluster": self._private.ray_constants.ENABLE_RAY_CLUSTER})
        self.started += 1

    def shutdown(self):
        self.started = 0

    def nodes(self):
        return [{"NodeManagerAddress": self.address} | n for n in self.there]

    def remote(self, **options):
        self.options = options
        return lambda fn: SimpleNamespace(remote=lambda *args: (fn, args))

    def wait(self, refs, num_returns):
        return [refs[-1]], refs[:-1]

    def get(self, ref):
        fn, args = ref
        *plain, how = args
        for attempt in itertools.count():
            try:
                got = fn(*pickle.loads(pickle.dumps(plain)), how)
                return pickle.loads(pickle.dumps(got))
            except NodeLost:
                if attempt == self.options["max_retries"]:
                    raise
            except Exception as error:
                raise RayTaskError(error) from error

    def cancel(self, ref, force):
        self.cancelled.append(ref)


@pytest.fixture
def ray(monkeypatch, tmp_path):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(simulate, "CHECKPOINT_EVERY", 0.0)
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    return stand_in


def numbers(rows):
    return rows[rows.metric != "train_s"].drop(columns="wall_s").reset_index(drop=True)


def test_rows_are_those_of_a_local_sweep(ray, tmp_path):
    there = sweep(CELLS, on="ray", cpus=2)
    assert ray.started == 1 and ray.options == dict(num_cpus=2, num_gpus=0, max_retries=10)
    pd.testing.assert_frame_equal(numbers(there), numbers(sweep(CELLS, store=tmp_path / "other")))
    ray.options = None
    pd.testing.assert_frame_equal(numbers(sweep(CELLS, on="ray")), numbers(there))
    assert ray.options is None  # all were there


@pytest.mark.parametrize("given", ["in memory", "from a folder"])
def test_own_data_reach_the_nodes(ray, tmp_path, given):
    pool = load("digits")
    fed = Federation.dealt(pool.x, pool.y, "iid", clients=3)
    if given == "from a folder":
        fed.save(tmp_path / "mine")
        fed = Federation.open(tmp_path / "mine")
    cells = [Experiment(dataset="own", model="mlp", rounds=1, seed=s) for s in (0, 1)]
    there = sweep(cells, on="ray", fed=fed, store=tmp_path / "there")
    here = sweep(cells, fed=fed, store=tmp_path / "here")
    assert ray.started == 1
    pd.testing.assert_frame_equal(numbers(there), numbers(here))
    assert not list((tmp_path / "there").glob("own-data*"))


def test_a_lost_node_costs_the_rounds_since_the_checkpoint(ray, tmp_path):
    seen = []

    def on_round(r, h):
        seen.append(r)
        if seen == [0, 1, 2]:
            raise NodeLost

    there = sweep(CELLS, on="ray", on_round=on_round)
    assert seen[:6] == [0, 1, 2, 2, 3, 4] and len(seen) == 3 * 5 + 1
    pd.testing.assert_frame_equal(numbers(there), numbers(sweep(CELLS, store=tmp_path / "other")))


def test_a_run_that_raises_is_told_and_the_others_are_computed(ray, capsys):
    def on_round(r, h):
        seen.append(r)
        if seen == [0, 1]:
            raise LookupError("no such thing")

    seen = []
    there = sweep(CELLS, on="ray", on_round=on_round)
    assert there.run.nunique() == 2 and (there.metric == "failed").sum() == 1 and not ray.cancelled
    assert "failed: LookupError: no such thing" in capsys.readouterr().out
    with pytest.raises(ValueError, match="executor"):
        sweep([e.but(lr=0.5) for e in CELLS], on="ray", executor="fast")


def test_what_no_node_has_is_refused(ray):
    with pytest.raises(
        ValueError, match="asks for cpus=3, gpus=0, and no node has that: 2 CPUs and 0 GPUs"
    ):
        sweep(CELLS, on="ray", cpus=3)
    with pytest.raises(ValueError, match="gpus=0.25"):
        sweep(CELLS, on="ray", gpus=0.25)


@pytest.mark.parametrize(("device", "share"), [("auto", 0.25), ("cpu", 0)])
def test_a_quarter_of_a_gpu_where_there_are_any(ray, monkeypatch, device, share):
    ray.there[0]["Resources"]["GPU"] = 2
    sweep(CELLS[:1], on="ray", device=device)
    assert ray.options["num_gpus"] == share


def test_without_ray(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'pip install "pfl-core\[ray\]"'):
        sweep(CELLS, on="ray", store=tmp_path)
    with pytest.raises(ValueError, match="on 'dask' is unknown; .*known are local, ray"):
        sweep(CELLS, on="dask", store=tmp_path)


def test_a_task_leaves_the_environment_of_its_process_as_it_was(monkeypatch):
    monkeypatch.setenv("PFL_OFFLINE", "0")
    monkeypatch.delenv("PFL_HEADLESS", raising=False)
    before, asked = dict(os.environ), {"PFL_OFFLINE": "1", "PFL_HEADLESS": "1"}
    seen = _task(lambda plain, tags: dict(os.environ), CELLS[0].plain(), {}, asked, {})
    assert seen == before | asked and dict(os.environ) == before


def test_ray_of_its_own_is_for_this_computer_only(ray, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    start(ray)
    own = dict(address="local", include_dashboard=False, log_to_driver=False, cluster=False)
    assert ray.asked == [own] and ray._private.ray_constants.ENABLE_RAY_CLUSTER
    ray.address = "192.0.2.7"
    with pytest.raises(
        RuntimeError, match="Ray would listen on 192.0.2.7, .*start it yourself .*RAY_ADDRESS"
    ):
        start(ray)
    assert not ray.started
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.7:6379")
    start(ray)
    assert ray.started and ray.asked[-1] == dict(log_to_driver=False, cluster=True)


# How long Ray waits for its own servers, which a loaded computer starts late.
PATIENT = {
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_gcs_server_request_timeout_seconds": "600",
    "RAY_gcs_rpc_server_connect_timeout_s": "600",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "600",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_health_check_timeout_ms": "600000",
}
# That of a node for its registration is a number in its code.
WAIT_FOR_NODE = """
import time
from ray._private import services

def registered(address, node, once=services.get_node):
    for _ in range(1200):
        try:
            return once(address, node)
        except RuntimeError:  # not yet
            time.sleep(0.5)
    return once(address, node)

services.get_node = registered
"""

LISTENING = """
import psutil, ray
from pfl_core.extras.ray import start

start(ray)
assert ray.get(ray.remote(lambda: 7).remote()) == 7
processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
print(*{c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == "LISTEN"})
ray.shutdown()
"""


def test_every_server_of_that_ray_listens_on_the_loopback(tmp_path):
    path = os.pathsep.join([str(runner.ROOT), os.environ.get("PYTHONPATH", "")])
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | PATIENT
    env |= {"PYTHONPATH": path, "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WAIT_FOR_NODE + LISTENING],
        env=env,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    listening = set(done.stdout.split())
    assert listening and listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_run_all_takes_on_ray(ray, monkeypatch, tmp_path, capsys):
    given = []
    monkeypatch.setattr(
        notebooks, "run", lambda papers, parameters, env, jobs: given.append(env) or []
    )
    runner.main_run(runner.parse(["--on", "ray"]))
    monkeypatch.setenv("PFL_ON", given[0]["PFL_ON"])
    sweep(CELLS[:1])
    assert ray.started == 1
    runner.main(["--check", "--on", "ray"])
    assert capsys.readouterr().out.splitlines()[-1] == "ray"


def test_all_runs_of_the_benchmark_go_where_they_are_sent(ray, monkeypatch, tmp_path):
    for name in ("rounds", "eval_every"):
        monkeypatch.setitem(settings.DIGITS, name, 1)
    words = "--digits --settings rotate --methods fedper --draws 1 --seeds 10 --tuning-seeds 100"
    command = ["bench", *words.split(), "--on"]
    assert pfl_papers.__main__.main([*command, "local"]) == 0
    here = record.read("rotate-digits")
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "on ray"))
    monkeypatch.delattr(sweeps, "_run_all")
    assert pfl_papers.__main__.main([*command, "ray"]) == 0
    there = record.read("rotate-digits")
    assert ray.started == 1 and len(there.lines()) == 3  # with FedAvg and its true groups
    for table in ("history", "clients"):
        pd.testing.assert_frame_equal(getattr(there, table), getattr(here, table))


def test_worker_processes_share_out_the_gpus(monkeypatch):
    monkeypatch.setattr(workers, "end_with_parent", lambda: None)
    begun, taken = multiprocessing.get_context("spawn").Value("i"), []
    for _ in range(3):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        workers._begin(begun, ["2", "GPU-x"])
        taken.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
    assert taken == ["2", "GPU-x", "2"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    workers._begin(begun, [])
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


SLOW = """
import time
from pathlib import Path

import ray
from pfl_core.engine import simulate

simulate.CHECKPOINT_EVERY = 0.0
if ray.is_initialized() and not hasattr(simulate, "fast"):
    simulate.fast = simulate.sample

    def lost():
        said = Path(f"{NOTE}.lost")
        return said.read_text() if said.exists() else ""

    def slow(cfg, k, round):
        with open(NOTE, "a") as f:
            f.write(f"{cfg.seed} {round} {ray.get_runtime_context().get_node_id()}\\n")
        while round > 3 and lost() in ("", ray.get_runtime_context().get_node_id()):
            time.sleep(0.05)  # so that a slow computer loses the node in the middle of a run
        return simulate.fast(cfg, k, round)

    simulate.sample = slow
"""

CLUSTER = """
import sys, threading, time
from pathlib import Path
import pandas as pd
import ray
from ray.cluster_utils import Cluster
from pfl_core import Experiment, Federation, load, sweep

note, rows = sys.argv[1:]
little = dict(num_cpus=1, object_store_memory=80 * 2**20, wait=False)
cluster = Cluster(initialize_head=True, head_node_args=little)
second = cluster.add_node(**little)
cluster.wait_for_nodes(timeout=600)
ray.init(address=cluster.address, log_to_driver=False)

def lose():
    while True:
        time.sleep(0.05)
        lines = [line.split() for line in open(note)]
        if [r for _, r, node in lines if node == second.node_id and int(r) >= 3]:
            cluster.remove_node(second, allow_graceful=False)
            return Path(f"{note}.lost").write_text(second.node_id)

threading.Thread(target=lose, daemon=True).start()
cells = [Experiment(**TINY, rounds=8, seed=s, plugins=("slow",)) for s in range(4)]
sweep(cells, on="ray").to_csv(rows, index=False)
print("lost", second.node_id)
ray.shutdown()
cluster.shutdown()
"""


def test_a_cluster_of_two_nodes_one_of_which_is_lost(tmp_path):
    note, rows = tmp_path / "note", tmp_path / "rows.csv"
    note.touch()
    (tmp_path / "slow.py").write_text(f"NOTE = {str(note)!r}\n{SLOW}")
    tiny = {k: v for k, v in TINY.items() if k != "rounds"}
    path = os.pathsep.join([str(tmp_path), str(runner.ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | PATIENT | {"PFL_RUNS": str(tmp_path), "PYTHONPATH": path}
    command = [
        sys.executable,
        "-c",
        f"TINY = {tiny!r}\n" + WAIT_FOR_NODE + CLUSTER,
        str(note),
        str(rows),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    (said,) = [line.split() for line in done.stdout.splitlines() if line.startswith("lost ")]
    lost, trained = said[1], [line.split() for line in note.read_text().splitlines()]
    assert len({node for _, _, node in trained}) == 2
    twice = [s for s, r, _ in trained if len([1 for t, q, _ in trained if (t, q) == (s, r)]) > 1]
    moved = {s for s, _, node in trained if node == lost} & {
        s for s, _, node in trained if node != lost
    }
    # Of the run that moved, the round that was under way and at most one more are trained twice.
    assert len(moved) == 1 and len(twice) <= 4
    whole = sweep(
        [Experiment(**tiny, rounds=8, seed=s) for s in range(4)], store=tmp_path / "other"
    )
    again = pd.read_csv(rows, keep_default_na=False)
    assert numbers(again).value.tolist() == numbers(whole).value.tolist()
