"""Methods over a transport: server and clients apart give the simulation's numbers.

The last test is over Flower's own transport, where flwr is installed.
"""

import functools
import json
import os
import re
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pfl_core import Experiment
from pfl_core.experiments.run import run
from pfl_core.extras import flower
from pfl_core.extras.flower import Client, serve, write_app
from pfl_core.methods.base import Method
from tools import notebooks

pytestmark = pytest.mark.slow

TINY = dict(
    partition_args={"alpha": 1.0},
    clients=4,
    model="mlp",
    model_args={"hidden": 8},
    batch=8,
    max_samples=24,
)
TINY |= dict(rounds=3, lr=0.05, eval_every=3, eval_after=False)


def apart(experiment):
    """Serve clients that are made anew for every question, as Flower does.

    Returns what `serve` does, what the clients kept, and what went over the wire.
    """
    kept, wire = {}, []

    def ask(kind, round, sent):
        out = {}
        for k, p in sent.items():
            client = Client(experiment, k, kept.get(k))
            out[k] = client.answer(kind, round, p)
            kept[k] = client.kept
            wire.append((kind, round, k, set(p), set(out[k][0])))
        return dict(reversed(out.items()))  # answers come in any order

    about = [Client(experiment, k).about() for k in range(experiment.clients)]
    state, seen = serve(experiment, about, ask)
    return state, seen, kept, wire


TOGETHER = ["fedavg", "fedper", "pfedhn", "pfedla", "fedaghn", "fedbn", "fedrep", "ditto"]
TOGETHER += ["apfl", "fedrod", "fedproto", "fedpac"]


@pytest.mark.parametrize("method", TOGETHER)
def test_apart_as_together(method, tmp_path):
    experiment = Experiment(**TINY | {"participation": 0.75, "dtype": "float64"}, method=method)
    state, seen, kept, wire = apart(experiment)
    whole = run(experiment, store=tmp_path)
    assert seen["rounds"].tolist() == [0, 3]
    np.testing.assert_array_equal(seen["correct"], whole.arrays["before/test/correct"])
    np.testing.assert_allclose(seen["loss"], whole.arrays["before/test/loss"], rtol=1e-9)
    assert len([kind for kind, *_ in wire if kind == "train"]) == 9


@pytest.mark.parametrize("method", TOGETHER)
@pytest.mark.parametrize("client_dropout", [0.4, 0.9])
def test_apart_as_together_where_clients_drop_out_or_are_slow(method, client_dropout, tmp_path):
    unsteady = dict(client_dropout=client_dropout, stragglers=0.5, epochs=2, dtype="float64")
    experiment = Experiment(**TINY | unsteady, method=method)
    _, seen, _, wire = apart(experiment)
    whole = run(experiment, store=tmp_path)
    np.testing.assert_array_equal(seen["correct"], whole.arrays["before/test/correct"])
    np.testing.assert_allclose(seen["loss"], whole.arrays["before/test/loss"], rtol=1e-9)
    trained = [[round, k] for kind, round, k, *_ in wire if kind == "train"]
    assert trained == whole.arrays["answered"].tolist()
    assert (len({round for round, _ in trained}) < 3) == (client_dropout == 0.9), (
        "or nobody answers"
    )


OPTIMIZED = [
    dict(optimizer="adamw", lr=0.01, weight_decay=0.1, lr_schedule="cosine"),
    dict(server="momentum", lr_schedule="step", lr_schedule_args={"every": 1, "gamma": 0.5}),
    dict(server="adam", client_dropout=0.5),
]


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
@pytest.mark.parametrize("how", OPTIMIZED, ids=str)
def test_apart_as_together_by_other_optimizers(method, how, tmp_path):
    experiment = Experiment(**TINY | how | dict(dtype="float64"), method=method)
    _, seen, *_ = apart(experiment)
    whole = run(experiment, store=tmp_path)
    np.testing.assert_array_equal(seen["correct"], whole.arrays["before/test/correct"])
    np.testing.assert_allclose(seen["loss"], whole.arrays["before/test/loss"], rtol=1e-9)


def test_other_optimizers_are_refused_apart_as_together():
    with pytest.raises(ValueError, match="pfedme trains by a step of its own"):
        apart(Experiment(**TINY, method="pfedme", optimizer="adam"))
    with pytest.raises(ValueError, match="the server of fedproto holds no single model"):
        apart(Experiment(**TINY, method="fedproto", server="adam"))


def test_what_is_personal_does_not_travel():
    *_, kept, wire = apart(Experiment(**TINY, method="fedper"))
    assert set(kept[0]) == {"fc.weight", "fc.bias"} and len(wire) == 4 * 4
    assert all(not (down | up) & set(kept[0]) for *_, down, up in wire)


def test_what_only_came_down_does_not_travel_back():
    *_, wire = apart(Experiment(**TINY, method="fedproto"))
    assert all(down == {"proto", "seen"} for *_, down, _ in wire)
    assert all(up == {"mean", "count"} for kind, *_, up in wire if kind == "train")


COUNT = 0


@pytest.mark.parametrize("hook", ["upload", "local"])
def test_what_hooks_change_outside_of_the_state_is_refused_apart_as_together(
    hook, tmp_path, monkeypatch
):
    def counts(self, *args):
        global COUNT
        COUNT += 1
        return getattr(Method, hook)(self, *args)

    monkeypatch.setitem(globals(), "COUNT", 0)
    words = dict(name="counts_for_test", __doc__="One.", __module__=__name__)
    type("Counts", (Method,), words | {hook: counts})
    e = Experiment(method="counts_for_test", **TINY)
    for how in (apart, functools.partial(run, store=tmp_path)):
        with pytest.raises(ValueError, match=r"round 0 changed .*COUNT, outside of the State"):
            how(e)


def test_what_cannot_be_said_apart_is_refused():
    with pytest.raises(
        ValueError, match="fedamp makes its personal models from the server's state"
    ):
        apart(Experiment(**TINY, method="fedamp"))


def test_an_app_holds_the_experiment_as_a_value(tmp_path):
    import tomllib

    experiment = Experiment(**TINY, method="fedper", tags={})
    folder = write_app(tmp_path / "app", experiment, tmp_path / 'it\'s "here".npz')
    config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert Experiment.from_plain(json.loads(config["experiment"])).plain() == experiment.plain()
    assert config["output"].endswith('it\'s "here".npz')
    with pytest.raises(ValueError, match="clients 0..3"):
        Client(experiment, 4)


# -- answers that cannot be ------------------------------------------------------------------------


BAD = {  # client 1's answer: (what it does to (upload, sums), what is said)
    "nan": (
        lambda up, s: (up | {"fc.bias": up["fc.bias"] * float("nan")}, s),
        "its fc.bias is not finite",
    ),
    "inf": (
        lambda up, s: (up | {"fc.bias": up["fc.bias"] + float("inf")}, s),
        "its fc.bias is not finite",
    ),
    "shape": (
        lambda up, s: (up | {"fc.bias": up["fc.bias"][:3]}, s),
        r"its fc.bias is .* of shape \(3,\); needed .*\(10,\)",
    ),
    "type": (
        lambda up, s: (up | {"fc.bias": up["fc.bias"].double()}, s),
        "its fc.bias is torch.float64 .*torch.float32",
    ),
    "more": (
        lambda up, s: (up | {"extra": up["fc.bias"]}, s),
        "its upload has .*'extra'.*, the others' ",
    ),
    "less": (
        lambda up, s: ({"fc.bias": up["fc.bias"]}, s),
        r"its upload has \['fc.bias'\], the others' ",
    ),
    "nothing": (lambda up, s: ({}, s), r"its upload has \[\]"),
    "correct": (
        lambda up, s: (up, s | {"correct": 1e9}),
        r"correct=1000000000.0, .*correct at most that",
    ),
    "n": (lambda up, s: (up, s | {"n": -50}), "n=-50; allowed are finite"),
    "more n": (lambda up, s: (up, s | {"n": s["n"] + 1}), "n must be its .* test samples"),
    "loss": (lambda up, s: (up, s | {"loss": float("nan")}), "loss=nan, .*finite"),
    "text": (lambda up, s: (up, s | {"loss": "low"}), "loss='low'"),
    "bool": (lambda up, s: (up, s | {"correct": True}), "correct=True"),
    "missing": (lambda up, s: (up, {}), "correct=None"),
    "error": (lambda up, s: "its node was lost", "its node was lost"),
}


def told(experiment, spoil, bad=(1,), **how):
    """`serve` with some `bad` clients, which answer what `spoil` makes of their answers.

    Where it makes None of one, they do not answer.
    """
    kept, about = {}, [Client(experiment, k).about() for k in range(experiment.clients)]

    def ask(kind, round, sent):
        out = {}
        for k, p in sent.items():
            client = Client(experiment, k, kept.get(k))
            answer = client.answer(kind, round, p)
            kept[k] = client.kept
            out[k] = spoil(*answer) if k in bad and kind == "train" else answer
        return {k: a for k, a in out.items() if a is not None}

    return serve(experiment, about, ask, **how)


@functools.cache
def without_client_1(experiment):
    """The server's model after rounds in which client 1 answers nothing."""
    state, _ = told(experiment, lambda up, s: None)
    return state.server


@pytest.mark.parametrize("case", BAD)
def test_a_bad_answer_is_left_out_and_the_round_goes_on(case, capsys):
    experiment = Experiment(**TINY | {"rounds": 2, "eval_every": 1}, method="fedavg")
    spoil, said = BAD[case]
    state, seen = told(experiment, spoil)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for r in (0, 1):
        assert re.search(rf"^round {r}: client 1 is left out: .*{said}", lines[r])
    for n, v in state.server.items():
        assert torch.isfinite(v).all() and torch.equal(v, without_client_1(experiment)[n])
    # It is still asked to evaluate.
    assert (seen["n"] == sizes(experiment)).all() and (seen["correct"] <= seen["n"]).all()


def sizes(experiment):
    return [Client(experiment, k).about()["test"] for k in range(experiment.clients)]


def test_too_few_good_answers_are_an_error(capsys):
    experiment = Experiment(**TINY, method="fedper")
    spoil = lambda up, s: ({n: v * float("nan") for n, v in up.items()}, s)  # noqa: E731
    with pytest.raises(
        RuntimeError,
        match=r"round 0: 1 of 4 clients .* share of 0.5 \(client 1: .* not finite .*client 3: ",
    ):
        told(experiment, spoil, bad=(1, 2, 3))
    told(experiment, spoil, bad=(1, 2, 3), enough=0.25)
    with pytest.raises(RuntimeError, match="0 of 4 clients answered well"):
        told(experiment, spoil, bad=range(4), enough=0)


def test_an_evaluation_that_cannot_be_counts_nothing(capsys):
    experiment = Experiment(
        **TINY | {"participation": 0.5, "rounds": 1, "eval_every": 1}, method="fedavg"
    )
    about = [Client(experiment, k).about() for k in range(4)]

    def ask(kind, round, sent):
        out = {k: Client(experiment, k).answer(kind, round, p) for k, p in sent.items()}
        return {
            k: (up, s | {"correct": 1e9}) if kind == "evaluate" and k == max(out) else (up, s)
            for k, (up, s) in out.items()
        }

    _, seen = serve(experiment, about, ask)
    missing = np.isnan(seen["n"])  # marked, and not an accuracy of 0
    assert missing.any(1).all() and not missing.all()
    assert all((np.isnan(seen[name]) == missing).all() for name in ("correct", "loss"))
    assert (seen["correct"] <= seen["n"])[~missing].all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": -50},
        {"n": 10**9},
        {"test": -1},
        {"counts": [1, 2]},
        {"shape": [3, 9, 9]},
        {"n": True},
        {"counts": "x"},
        {"n": 10**30, "counts": [10**30, *[0] * 9]},
        {"test": 10**30},
        {"shape": [10**12]},
        {"shape": [10**6, 10**6, 10**30]},
        {"counts": [1] * (10**6 + 1), "n": 10**6 + 1},
    ],
)
def test_what_a_client_says_of_itself_is_checked(wrong):
    experiment = Experiment(**TINY, method="fedavg")
    about = [Client(experiment, k).about() for k in range(4)]
    about[2] |= wrong
    with pytest.raises(ValueError, match="^client 2 says of itself .*mend its data"):
        serve(experiment, about, lambda *asked: pytest.fail("asked"))


APART = {
    "cannot have own data": dict(dataset="own", clients=None),
    "leave init_from out": dict(init_from=Experiment(**TINY)),
    "leave finetune out": dict(finetune={"epochs": 1}),
    "run it as a simulation": dict(method="fedala"),
}


@pytest.mark.parametrize("words", APART)
def test_what_nodes_cannot_run_is_refused_at_once(words, tmp_path):
    fields = TINY | APART[words]
    if fields.get("dataset") == "own":
        fields.pop("partition_args")
    with pytest.raises(ValueError, match=words):
        write_app(tmp_path / "app", Experiment(**fields))
    assert not (tmp_path / "app").exists()


class SilentGrid:
    """Flower's way to three nodes, of which those named never answer."""

    def __init__(self, silent):
        self.silent, self.waited = silent, []

    def get_node_ids(self):
        return [0, 1, 2]

    def send_and_receive(self, messages, *, timeout=None):
        self.waited.append(timeout)
        assert timeout is not None, "a silent client would stop all"
        for m in messages:
            node = m.metadata.dst_node_id
            if node not in self.silent:
                about = {"about": dict(client=node, n=1, test=1, counts=[1], shape=[1])}
                yield SimpleNamespace(
                    metadata=SimpleNamespace(src_node_id=node), has_error=bool, content=about
                )


@pytest.fixture
def in_a_task(monkeypatch):
    """This process is a task of Flower's: from 1.41 on nobody else may make a Message."""
    pytest.importorskip("flwr")
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.mark.usefixtures("in_a_task")
def test_a_silent_client_is_waited_for_so_long_and_no_longer():
    with pytest.raises(RuntimeError, match=r"client nodes \[1\] have not said within 7 s"):
        flower._Nodes(SilentGrid({1}), 3, 0.0, 7)
    grid = SilentGrid(set())
    nodes = flower._Nodes(grid, 3, 0.0, 7)
    grid.silent = {0, 1, 2}
    assert nodes.ask("train", 0, {k: {"w": torch.zeros(1)} for k in range(3)}) == {}
    assert grid.waited == [7, 7]


def test_quotes_in_a_methods_name_stay_text(tmp_path, monkeypatch):
    import tomllib

    name = 'x"\n[tool.flwr.app.config]\noutput = "\x7f\U0001f600'
    from pfl_core.methods.base import METHODS

    monkeypatch.setitem(METHODS, name, METHODS["fedavg"])
    experiment = Experiment(**TINY, method=name)
    folder = write_app(tmp_path / "app", experiment, tmp_path / "\U0001f600.npz")
    app = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    assert app["project"]["description"] == f"{name} of pfl_core"
    assert app["tool"]["flwr"]["app"]["config"]["output"].endswith("\U0001f600.npz")
    assert json.loads(app["tool"]["flwr"]["app"]["config"]["experiment"])["method"] == name


# -- Flower's own transport ------------------------------------------------------------------------


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def answers(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def test_over_flowers_transport(tmp_path):
    # With state that nodes keep; other methods are told apart above. Few clients and rounds: Flower starts a process for every answer.
    few = dict(clients=2, rounds=1)
    experiment = Experiment(**TINY | few, method="fedper")
    folder = write_app(tmp_path / "app", experiment, tmp_path / "got.npz")
    port, bin = free_port(), Path(sys.executable).parent
    home = tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "here"\n\n'
        f'[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    quiet = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str(home),
    }
    path = os.pathsep.join([str(notebooks.ROOT), os.environ.get("PYTHONPATH", "")])
    env = (
        os.environ | quiet | {"PYTHONPATH": path, "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"}
    )

    def wait_for(what, limit_s=900):
        until = time.monotonic() + limit_s
        while not what():
            ended = any(process.poll() for process in started)
            assert not ended and time.monotonic() < until, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.3)

    log, started = (tmp_path / "log").open("w"), []

    def start(*words):
        started.append(
            subprocess.Popen(
                words, env=env, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
            )
        )

    try:
        start(
            "flower-superlink",
            "--insecure",
            "--port",
            str(port),
            "--disable-runtime-dependency-installation",
        )
        for k in range(experiment.clients):
            address = ("--superlink", f"127.0.0.1:{port}", "--port", str(free_port()))
            start("flower-supernode", "--insecure", *address, "--node-config", f"client={k}")
        wait_for(lambda: answers(port))
        asked = subprocess.run(
            ["flwr", "run", str(folder), "here"],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert asked.returncode == 0, asked.stdout + asked.stderr
        wait_for(lambda: zipfile.is_zipfile(tmp_path / "got.npz"))  # whole: its end says so
    finally:
        for process in started:
            notebooks.kill(process)
            process.wait()
        log.close()
    whole = run(experiment, store=tmp_path / "store")
    with np.load(tmp_path / "got.npz", allow_pickle=False) as got:
        np.testing.assert_allclose(got["loss"], whole.arrays["before/test/loss"], rtol=1e-4)
        np.testing.assert_allclose(got["correct"], whole.arrays["before/test/correct"], atol=1)
        assert got["rounds"].tolist() == [0, 1]
