"""Methods over a transport: server and clients apart give the simulation's numbers; over Flower's own where flwr is installed."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pfl_core import Experiment, runner
from pfl_core.extras.flower import Client, serve, write_app
from pfl_core.runs import run

TINY = dict(partition_args={"alpha": 1.0}, clients=4, model="mlp", model_args={"hidden": 8}, batch=8, max_samples=24)
TINY |= dict(rounds=3, lr=0.05, eval_every=3, eval_after=False)


def apart(e):
    """The Experiment with a server that asks clients made anew for every question, as Flower does; what went over the wire."""
    kept, wire = {}, []

    def ask(kind, round, sent):
        out = {}
        for k, p in sent.items():
            client = Client(e, k, kept.get(k))
            out[k] = client.answer(kind, round, p)
            kept[k] = client.kept
            wire.append((kind, round, k, set(p), set(out[k][0])))
        return dict(reversed(out.items()))  # answers come in any order

    state, seen = serve(e, [Client(e, k).about() for k in range(e.clients)], ask)
    return state, seen, kept, wire


@pytest.mark.parametrize("method", ["fedavg", "fedper", "pfedhn", "pfedla", "fedaghn", "fedbn", "fedrep", "ditto"])
def test_apart_as_together(method, tmp_path):
    e = Experiment(**TINY | {"participation": 0.75, "dtype": "float64"}, method=method)
    state, seen, kept, wire = apart(e)
    whole = run(e, store=tmp_path)
    assert seen["rounds"].tolist() == [0, 3]
    np.testing.assert_array_equal(seen["correct"], whole.arrays["before/test/correct"])
    np.testing.assert_allclose(seen["loss"], whole.arrays["before/test/loss"], rtol=1e-9)
    assert {(r, k) for kind, r, k, *_ in wire if kind == "train"} and len([1 for w in wire if w[0] == "train"]) == 9


def test_what_is_personal_does_not_travel():
    *_, kept, wire = apart(Experiment(**TINY, method="fedper"))
    assert set(kept[0]) == {"fc.weight", "fc.bias"} and len(wire) == 4 * 4
    assert all(not (down | up) & set(kept[0]) for *_, down, up in wire)


def test_what_cannot_be_said_apart_is_refused():
    with pytest.raises(ValueError, match="fedamp makes its personal models from the server's state"):
        apart(Experiment(**TINY, method="fedamp"))


def test_an_app_holds_the_experiment_as_a_value(tmp_path):
    import tomllib

    e = Experiment(**TINY, method="fedper", tags={})
    folder = write_app(tmp_path / "app", e, tmp_path / 'it\'s "here".npz')
    config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert Experiment.from_plain(json.loads(config["experiment"])).plain() == e.plain()
    assert config["output"].endswith('it\'s "here".npz')
    with pytest.raises(ValueError, match="clients 0..3"):
        Client(e, 4)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def answers(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("method", ["fedper", "pfedhn", "fedavg"])
def test_over_flowers_transport(method, tmp_path):
    e = Experiment(**TINY, method=method)
    folder, port, bin = write_app(tmp_path / "app", e, tmp_path / "got.npz"), free_port(), Path(sys.executable).parent
    home = tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(home)}
    path = os.pathsep.join([str(runner.ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | quiet | {"PYTHONPATH": path, "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"}

    def wait_for(what, limit_s=400):
        until = time.monotonic() + limit_s
        while not what():
            assert time.monotonic() < until, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.3)

    log, started = (tmp_path / "log").open("w"), []

    def start(*words):
        started.append(subprocess.Popen(words, env=env, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True))

    try:
        start("flower-superlink", "--insecure", "--port", str(port), "--disable-runtime-dependency-installation")
        for k in range(e.clients):
            address = ("--superlink", f"127.0.0.1:{port}", "--port", str(free_port()))
            start("flower-supernode", "--insecure", *address, "--node-config", f"client={k}")
        wait_for(lambda: answers(port))
        asked = subprocess.run(
            ["flwr", "run", str(folder), "here"], env=env, cwd=tmp_path, capture_output=True, text=True
        )
        assert asked.returncode == 0, asked.stdout + asked.stderr
        wait_for((tmp_path / "got.npz").exists)
        time.sleep(0.5)
    finally:
        for process in started:
            runner._kill(process)
            process.wait()
        log.close()
    whole = run(e, store=tmp_path / "store")
    with np.load(tmp_path / "got.npz", allow_pickle=False) as got:
        np.testing.assert_allclose(got["loss"], whole.arrays["before/test/loss"], rtol=1e-4)
        np.testing.assert_allclose(got["correct"], whole.arrays["before/test/correct"], atol=1)
        assert got["rounds"].tolist() == [0, 3]
