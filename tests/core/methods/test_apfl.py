"""APFL: its rule, beside plain loops and what it reduces to."""

import pytest
import torch

from pfl_core.engine.simulate import simulate
from pfl_core.methods.base import Step
from pfl_core.stacked import select, unprefixed
from tests.core.methods.averaging_shared import ran
from tests.core.methods.features_shared import EVERYONE, randn
from tests.core.methods.loops_shared import EXECUTORS, average, batches, close, fit, gradient, mlp
from tests.core.methods.setting import assert_same, joined, setup

NEVER = dict(adapt="never")
PFLLIB = dict(mix="end", adapt="step", alpha=1.0, decay=0.02)


def blend(w, v, a):
    return {n: a * v[n] + (1 - a) * w[n] for n in w}


def visit(method, data, k, r, w, v, a):
    """One client's round: w, v, alpha after it, by the formulas of the paper (or of PFLlib)."""
    lr = method.task.config.lr
    for t, batch in enumerate(batches(method, data, k, r)):
        f = lambda p, batch=batch: fit(method, p, *batch)  # noqa: E731
        g = gradient(f, w)
        if method.mix == "weights":
            rise = gradient(lambda q, w=w, v=v, f=f: f(blend(w, v, q["a"])), {"a": a})["a"]
            h = gradient(lambda q, w=w, a=a, f=f: f(blend(w, q, a)), v)  # alpha is in it
        else:
            h = gradient(f, v)
        w, v = ({n: p[n] - lr * d[n] for n in p} for p, d in ((w, g), (v, h)))
        if method.mix == "end":
            rise = sum(((v[n] - w[n]) * (a * h[n] + (1 - a) * g[n])).sum() for n in w)
        if method.adapt == "step" or method.adapt == "round" and t == 0:
            a = (a - lr * (rise + method.decay * a)).clamp(0, 1)
    return w, (v if method.mix == "weights" else blend(w, v, a)), a


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "args",
    [{}, dict(alpha=0.3, adapt="step", decay=0.02), dict(alpha=0.7, **NEVER), PFLLIB],
    ids=["round", "step", "never", "PFLlib"],
)
def test_apfl_is_a_plain_loop(executor, args):
    method, data = mlp("apfl", lr=0.3, **args)
    state, _, before, *_ = simulate(method, data, executor=executor, workers=1)
    w = method.task.initial
    v, a = [w] * 4, [torch.tensor(method.alpha, dtype=torch.float64)] * 4
    for r in range(3):
        if r == 2:
            late = [blend(w, v[k], a[k]) if method.mix == "weights" else v[k] for k in range(4)]
        done = [visit(method, data, k, r, w, v[k], a[k]) for k in range(4)]
        w, v, a = average([d[0] for d in done], data.n), [d[1] for d in done], [d[2] for d in done]
    close(state.server, w)
    for k in range(4):
        close(state.clients, {f"v.{n}": x for n, x in v[k].items()} | {"alpha": a[k]}, k)
        fresh = blend(w, v[k], a[k]) if method.mix == "weights" else v[k]
        close(before, fresh, k)
        assert not torch.equal(late[k]["fc.weight"], fresh["fc.weight"])
    assert (method.adapt == "never") == (float(max(a)) == float(min(a)) == method.alpha)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "args", [dict(alpha=0.0), {}, dict(adapt="step"), dict(alpha=1.0, **NEVER), PFLLIB]
)
def test_apfls_common_model_is_fedavgs(executor, args):  # T1
    for net in ("mlp", "lenet"):
        sent = []
        for name, given in (("apfl", args), ("fedavg", {})):
            method, data = (mlp if net == "mlp" else setup)(
                name, participation=0.5, **(given if net == "mlp" else dict(args=given))
            )
            state = simulate(method, data, executor=executor, workers=1)[0]
            sent.append(select(state.server, method.task.parameters))
        assert_same(*sent)  # bit for bit, with BatchNorm, too


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("args", [{}, PFLLIB], ids=["paper", "PFLlib"])
def test_both_gradients_of_a_step_advance_the_one_set_of_statistics(executor, args):
    found = {}
    for name, given in (("apfl", args), ("fedavg", {})):
        method, data = setup(name, args=given, buffers="average", rounds=1)
        server = simulate(method, data, executor=executor, workers=1)[0].server
        found[name] = select(server, method.task.buffers)
    for n, v in found["fedavg"].items():
        same = torch.equal(found["apfl"][n], 2 * v if n.endswith("tracked") else v)
        assert same == n.endswith("tracked"), n


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("fedavg", dict(alpha=0.0, **NEVER)),  # T2
        ("local", dict(alpha=1.0, **NEVER)),  # T3
        ("local", dict(alpha=1.0, mix="end", **NEVER)),  # T7
    ],
)
def test_apfl_at_its_ends(name, args):
    (apfl, data), (other, _) = mlp("apfl", participation=0.5, **args), mlp(name, participation=0.5)
    a, b = (simulate(m, data, workers=1) for m in (apfl, other))
    for x, y in ((a[2], b[2]), (a[3], b[3])):
        assert_same(x, select(y, x), exact=False)


@pytest.mark.parametrize("adapt", ["round", "step"])
@pytest.mark.parametrize("mix", ["weights", "end"])
def test_apfls_weight_stays_a_share_and_comes_back_from_its_ends(adapt, mix):  # T5
    method, _ = mlp("apfl", adapt=adapt, mix=mix)
    w = {n: randn(*v.shape) for n, v in method.task.initial.items()}
    found = set()
    for alpha in (0.0, 0.5, 1.0):
        for seed in range(6):
            p = {n: v.clone() for n, v in w.items()}
            p |= {f"v.{n}": v + randn(*v.shape, seed=9) for n, v in w.items()}
            p["alpha"] = torch.tensor(alpha).double()
            slope = {n: 3 * randn(*v.shape, seed=seed) for n, v in w.items()}
            q, _ = method.step(p, p, lambda p, slope=slope: slope, Step(0, 10.0, {}))
            assert 0 <= q["alpha"] <= 1
            found.add((alpha, float(q["alpha"])))
    assert {(0.0, 1.0), (1.0, 0.0)} <= found


def test_apfl_sends_one_model_each_way():
    method, data = setup("apfl", participation=0.5, rounds=1)
    size = sum(method.task.initial[n].numel() for n in method.task.parameters)
    _, history, *_ = simulate(method, data, workers=1)
    assert history.upload[-1] == history.download[-1] == 2 * size


def test_a_new_client_begins_with_the_global_model_and_alpha():
    method, state = ran("apfl", alpha=0.25, adapt="step")
    assert not (state.clients["alpha"] == 0.25).any()
    method, new = joined(method, state, 2)
    assert (new.clients["alpha"] == 0.25).all()
    served = method.serve(method.begin(new, EVERYONE[:2]))
    for n, v in unprefixed("v.", new.clients).items():
        assert torch.equal(v[1], state.server[n]) and torch.equal(served[n][1], v[1])


@pytest.mark.parametrize("changes", [dict(momentum=0.5), dict(weight_decay=1e-3), dict(clip=1.0)])
def test_apfl_wants_plain_steps(changes):
    with pytest.raises(ValueError, match="apfl: momentum = .*allowed: all 0"):
        setup("apfl", **changes)


@pytest.mark.parametrize(
    "args", [dict(alpha=1.5), dict(adapt="always"), dict(decay=-1.0), dict(mix="logits")]
)
def test_illegal_values_are_named(args):
    with pytest.raises(ValueError, match=f"apfl.*{next(iter(args))}.*allowed"):
        mlp("apfl", **args)
