"""FedBABU: its rule, beside plain loops and what it reduces to."""

import numpy as np
import pytest
import torch

from pfl_core import Experiment, run
from pfl_core.engine.simulate import simulate
from pfl_core.methods.base import initial_state
from pfl_core.methods.task import Task
from pfl_core.stacked import select
from tests.core.methods.averaging_shared import both_nets, bound, ran
from tests.core.methods.core_shared import run as ran_deep
from tests.core.methods.features_shared import EVERYONE, FC
from tests.core.methods.loops_shared import (
    EXECUTORS,
    average,
    batches,
    chosen,
    close,
    fit,
    gradient,
    mlp,
)
from tests.core.methods.setting import assert_same, under

TINY = Experiment(
    method="fedbabu", clients=3, model="mlp", rounds=2, max_samples=30, batch=8, lr=0.1
).but(dtype="float64", keep_models=True)
BN = dict(model="lenet", model_args={"bn": True, "kernels": 2})


def trained(method, data, k, r, p, names):
    """Client k's model after its batches of round r, of which `names` are trained."""
    for batch in batches(method, data, k, r):
        g = gradient(lambda q, p=p, batch=batch: fit(method, p | q, *batch), select(p, names))
        p = p | {n: p[n] - method.task.config.lr * g[n] for n in g}
    return p


@pytest.mark.parametrize("executor", EXECUTORS)
def test_fedbabu_is_a_plain_loop_that_ends_in_fine_tuning(executor):
    stages = [{"epochs": 1, "only": "body"}, {"epochs": 2}]  # as PFLlib fine-tunes
    method, data = mlp("fedbabu", participation=0.75, finetune=stages)
    found = simulate(method, data, executor=executor, workers=1)
    head = {n: method.task.initial[n] for n in FC}
    body = {n: v for n, v in method.task.initial.items() if n not in FC}
    for r in range(3):
        sel = chosen(method, r)
        ends = [trained(method, data, k, r, body | head, body) for k in sel]
        body = average([select(p, body) for p in ends], data.n[sel])
    close(found.state.server, body | head)
    for k in range(4):
        close(found.before, body | head, k)
        p = trained(method, data, k, 3, body | head, body)
        close(found.after, p, k)
        for r in (4, 5):
            p = trained(method, data, k, r, p, list(p))
        close(found.tuned, p, k)


@pytest.mark.parametrize(("net", "depth"), [("mlp", 1), ("lenet", 1), ("lenet", 3)])
def test_the_head_never_moves(net, depth):  # T1
    method, state = ran("fedbabu", net, depth=depth, momentum=0.9, weight_decay=0.1, clip=1.0)
    assert method.frozen and len(method.frozen) >= 2 * depth - 1
    for n in method.frozen:
        assert torch.equal(state.server[n], method.task.initial[n]), n
        assert torch.equal(state.clients[n], method.task.start()[n]), n
    moved = [n for n in method.task.parameters if n not in method.frozen]
    assert not any(torch.equal(state.server[n], method.task.initial[n]) for n in moved)


@both_nets
@pytest.mark.parametrize("buffers", ["local", "average", "reset"])
def test_the_body_is_that_of_fedrep_without_its_heads_phase(net, buffers):  # R21
    _, babu = ran("fedbabu", net, participation=0.5, buffers=buffers)
    _, rep = ran("fedrep", net, participation=0.5, buffers=buffers, head_epochs=0)
    assert_same(select(babu.server, rep.server), rep.server)
    assert_same(babu.clients, rep.clients)


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_without_a_head_it_is_fedavg(buffers):  # T6
    a, b = (ran_deep(m, depth=0, buffers=buffers)[1] for m in ("fedbabu", "fedavg"))
    assert_same(a.state, b.state)


def test_everybody_is_served_one_model_under_the_first_head():  # T2
    method, state = ran("fedbabu")
    served = method.serve(method.begin(state, EVERYONE))
    for n in method.task.parameters:
        assert torch.equal(served[n], state.server[n].expand_as(served[n])), n


def test_an_epoch_of_fine_tuning_on_the_body_is_its_local_training():  # T3
    result = run(TINY.but(finetune={"epochs": 1, "only": "body"}, **BN))
    for metric in ("correct", "loss"):
        tuned, after = (result.arrays[f"{w}/test/{metric}"][-1] for w in ("tuned 1", "after"))
        np.testing.assert_array_equal(tuned, after)


def test_fedbabu_sends_bodies_alone():
    method, data = bound("fedbabu", rounds=1)
    _, history, *_ = simulate(method, data, workers=1)
    size = sum(v.numel() for n, v in method.task.initial.items() if n not in FC)
    assert history.download[-1] == history.upload[-1] == 4 * size


def test_new_clients_get_the_head_that_the_body_was_trained_under():
    method, state = ran("fedbabu")
    t = method.task
    later = Task(t.model, t.n[:2], t.label_counts[:2], t.config)
    later.initial = {n: v + 1 for n, v in t.initial.items()}  # as another seed draws it
    later.joins = state
    new = method.bind(later)
    served = new.serve(new.begin(initial_state(new), EVERYONE[:2]))
    for n in t.parameters:
        assert torch.equal(served[n], state.server[n].expand_as(served[n])), n


def test_heads_of_the_clients_own_and_a_network_that_is_all_head_are_refused():
    with pytest.raises(ValueError, match="fedbabu: head_init = 'own'; allowed: 'common'"):
        ran_deep("fedbabu", own_heads=True)
    with pytest.raises(ValueError, match="fedbabu: nothing below its head is trained"):
        under(bound("fedbabu")[0], head_depth=2)
    with pytest.raises(ValueError, match="head_init = 'own'"):
        run(TINY.but(head_init="own"))
