"""The server's optimizer: FedAvgM and FedAdam beside a plain loop, around every method that averages parameters of the network."""

import re

import pytest
import torch

from pfl_core import Experiment, optim, run
from pfl_core.engine.simulate import Interrupted, sample, simulate
from pfl_core.methods.base import Method, State, initial_state
from tests.core.methods.loops_shared import average, batches, close, descend, fit, mlp
from tests.core.methods.setting import OURS, assert_same, setup

EXECUTORS = ("threads", "batched")
ARGS = {
    "momentum": {"lr": 0.7, "momentum": 0.6},
    "adam": {"lr": 0.02, "beta1": 0.8, "beta2": 0.95, "tau": 0.01},
}


def averages(name):
    """Whether the server has parameters of the network."""
    method, _ = setup(name)
    return not initial_state(method).server.keys().isdisjoint(method.task.parameters)


WITH = [name for name in OURS if averages(name)]


def by_hand(name, args, w, changes):
    """The server's model {name: (*shape)} after a list of rounds' changes, by the papers' lines."""
    m = {n: torch.zeros_like(v) for n, v in w.items()}
    v = {n: torch.full_like(x, args.get("tau", 0.0) ** 2) for n, x in w.items()}
    for d in changes:
        for n in w:
            if name == "momentum":
                m[n] = args["momentum"] * m[n] + d[n]
                w = w | {n: w[n] + args["lr"] * m[n]}
                continue
            m[n] = args["beta1"] * m[n] + (1 - args["beta1"]) * d[n]
            v[n] = args["beta2"] * v[n] + (1 - args["beta2"]) * d[n] ** 2
            w = w | {n: w[n] + args["lr"] * m[n] / (v[n].sqrt() + args["tau"])}
        yield w


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ARGS)
@pytest.mark.parametrize("of", ["fedavg", "fedper"])
def test_a_plain_loop(executor, name, of):
    method, data = mlp(of, server=name, server_args=ARGS[name], participation=0.75, rounds=3)
    state, *_ = simulate(method, data, executor=executor, workers=1)
    task, w = method.task, {n: v.clone() for n, v in method.task.initial.items()}
    shared = [n for n in w if method.is_shared(n)]
    own = [{n: w[n] for n in w if n not in shared} for _ in range(data.K)]
    changes, start = [], {n: w[n] for n in shared}
    for r in range(3):
        chosen, ends = sample(task.config, data.K, r).tolist(), []
        now = start if not r else [*by_hand(name, ARGS[name], start, changes)][-1]
        for k in chosen:
            seen = batches(method, data, k, r)
            loss = lambda q, x, y: fit(method, q, x, y)  # noqa: E731
            ends.append(descend(now | own[k], [*w], seen, loss, task.config.lr))
            own[k] = {n: ends[-1][n] for n in own[k]}
        mean = average(ends, data.n[chosen])
        changes.append({n: mean[n] - now[n] for n in shared})
    close(state.server, [*by_hand(name, ARGS[name], start, changes)][-1])
    for k in range(data.K):
        close(state.clients, own[k], k)


@pytest.mark.parametrize("name", WITH)
def test_momentum_of_none_is_the_methods_own_step(name):
    none = dict(server="momentum", server_args={"lr": 1.0, "momentum": 0.0})
    (a, *_), (b, *_) = (simulate(*setup(name, **kw), workers=1) for kw in (none, {}))
    assert_same(a, b, exact=False)


@pytest.mark.parametrize("name", WITH)
@pytest.mark.parametrize("server", ARGS)
def test_it_moves_parameters_alone_and_executors_agree(name, server):
    changes = dict(server=server, server_args=ARGS[server], buffers="average", rounds=1)
    states = [simulate(*setup(name, **changes), executor=x, workers=1)[0] for x in EXECUTORS]
    assert_same(*states, exact=False)
    method, data = setup(name, **changes | dict(server="plain", server_args={}))
    plain, *_ = simulate(method, data, workers=1)
    before = initial_state(method).server
    for n, v in plain.server.items():
        if n not in method.task.parameters:
            torch.testing.assert_close(states[0].server[n], v, rtol=1e-9, atol=1e-10)
            continue
        change = {n: v - before[n]}
        (wanted,) = by_hand(server, ARGS[server], {n: before[n]}, [change])
        close(states[0].server, wanted)


def test_a_state_that_is_made_anew_keeps_the_optimizers():
    class MadeAnew(Method):
        """FedAvg whose upload makes another State."""

        name = "made_anew_for_test"

        def upload(self, state, sel, start, end, weight):
            state = super().upload(state, sel, start, end, weight)
            return State(dict(state.server), state.clients, state.extra)

    how = dict(server="adam", server_args=ARGS["adam"])
    names = ("fedavg", MadeAnew.name)
    (a, *_), (b, *_) = (simulate(*setup(name, **how), workers=1) for name in names)
    assert_same(a, b, exact=False)  # images in another order round otherwise


def test_a_round_that_nobody_answers_moves_nothing():
    how = dict(server="momentum", server_args=ARGS["momentum"], client_dropout=0.999, rounds=2)
    method, data = setup("fedavg", **how)
    state, *_ = simulate(method, data, workers=1)
    for n, v in method.task.initial.items():
        assert n not in state.server or torch.equal(state.server[n], v), n


@pytest.mark.parametrize("name", sorted(set(OURS) - set(WITH)))
def test_who_averages_none_refuses(name, monkeypatch):
    monkeypatch.setattr("pfl_core.engine.engine.Engine.run", None)  # nothing is trained
    method, data = setup(name, server="adam")
    says = rf"server='adam'\): the server of {name} holds no single model .*server='plain'"
    with pytest.raises(ValueError, match=says):
        simulate(method, data, workers=1)


def test_who_averages_none():
    assert "local" not in WITH and "pfedhn" not in WITH
    assert {"fedavg", "fedper", "ditto", "fedrep", "flayer", "apfl"} <= {*WITH}


BASE = Experiment(
    model="mlp", clients=3, rounds=4, max_samples=30, batch=8, lr=0.05, dtype="float64"
)


@pytest.mark.parametrize("name", ARGS)
def test_a_stopped_run_and_a_longer_one_go_on_as_one(tmp_path, name):
    e = BASE.but(server=name, server_args=ARGS[name], participation=0.7)
    whole = run(e, store=tmp_path / "whole", device="cpu")
    with pytest.raises(Interrupted):
        run(e, store=tmp_path / "two", device="cpu", on_round=lambda r, h: r == 1)
    two = run(e, store=tmp_path / "two", device="cpu")
    run(e.but(rounds=2), store=tmp_path / "grown", device="cpu", keep_state=True)
    began = []
    grown = run(e, store=tmp_path / "grown", device="cpu", on_round=lambda r, h: began.append(r))
    assert began[0] == 2
    for other in (two, grown):
        for key, series in whole.arrays.items():
            if not key.endswith("train_s"):
                assert (other.arrays[key] == series).all(), key
    assert run(BASE, store=tmp_path, device="cpu").id != whole.id


@pytest.mark.parametrize("damage", ["lost", "nan"])
def test_a_checkpoint_without_the_optimizers_state_is_set_aside(tmp_path, damage, capsys):
    e = BASE.but(server="adam")
    whole = run(e, store=tmp_path / "whole", device="cpu")
    with pytest.raises(Interrupted):
        run(e, store=tmp_path, device="cpu", on_round=lambda r, h: r == 1)
    (path,) = tmp_path.glob("*.part/checkpoint.pt")
    kept = torch.load(path, weights_only=True)
    moments = kept["moments"]
    assert {n[:2] for n in moments} == {"m.", "v."} and all(v.any() for v in moments.values())
    kept["moments"] = {} if damage == "lost" else {n: v * torch.nan for n, v in moments.items()}
    torch.save(kept, path)
    again = run(e, store=tmp_path, device="cpu")
    said = {"lost": "it lacks m.fc.* in moments", "nan": "in moments is not finite"}[damage]
    assert re.search(f"{said}.*set aside", capsys.readouterr().out)
    assert (again.arrays["before/test/loss"] == whole.arrays["before/test/loss"]).all()


def test_ids_and_what_is_wrong():
    ids = {BASE.id, *(BASE.but(server=n).id for n in ARGS), *(BASE.but(server=n, server_args=a).id for n, a in ARGS.items())}  # fmt: skip
    assert len(ids) == 5 and BASE.but(server="plain").id == BASE.id
    for name in ARGS:
        spelled = {n: getattr(optim.SERVERS[name](), n) for n in optim.arguments("server", name)}
        assert BASE.but(server=name, server_args=spelled).id == BASE.but(server=name).id
    for given, says in [
        (dict(server="yogi"), "allowed is one of plain, momentum, adam"),
        (dict(server_args={"lr": 1.0}), "argument of server 'plain': 'lr' is unknown"),
        (dict(server="adam", server_args={"eps": 1.0}), "argument of server 'adam': 'eps' is"),
        (dict(server="adam", server_args={"tau": 0}), r"server adam\(tau=0.0\): allowed is a number > 0"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=says):
            BASE.but(**given)
