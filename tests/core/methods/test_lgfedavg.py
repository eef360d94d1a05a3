"""LG-FedAvg: its rule, beside plain loops and what it reduces to."""

import numpy as np

from pfl_core import Experiment, models, run
from pfl_core.engine.simulate import simulate
from tests.core.methods.averaging_shared import (
    NETS,
    SIGNS,
    SIZES,
    START,
    both_nets,
    descend,
    mean,
    near,
    pair,
    ran,
    read,
)
from tests.core.methods.setting import assert_same


@both_nets
def test_lgfedavg_between_fedavg_and_local(net):
    depth = len(models.layers(models.build(net, (1, 16, 16), 3, **NETS[net]), "block"))
    assert_same(ran("lgfedavg", net, depth=depth)[1], ran("fedavg", net)[1])
    assert_same(ran("lgfedavg", net, depth=0)[1], ran("local", net)[1])


def test_lgfedavg_by_hand():
    bases, a = [START[0]] * 2, START[1]
    for _ in range(2):
        ends = [descend(np.array([bases[k], a]), SIGNS[k], SIZES[k]) for k in (0, 1)]
        a, bases = mean(ends)[1], [p[0] for p in ends]
    method, data = pair("lgfedavg")
    _, _, before, *_ = simulate(method, data, workers=1)
    for k in (0, 1):
        near(read(before, k), [bases[k], a])


def test_lgfedavg_starts_from_a_pretrained_model():
    how = dict(clients=3, model="mlp", model_args={"hidden": 8}, max_samples=20, batch=10)
    trained = Experiment(method="fedavg", rounds=2, lr=0.1, **how)
    lg = run(Experiment(method="lgfedavg", rounds=1, init_from=trained, **how), workers=1)
    last, first = (
        run(trained, workers=1).arrays["before/test/correct"][-1],
        lg.arrays["before/test/correct"][0],
    )
    scratch = run(Experiment(method="lgfedavg", rounds=1, **how), workers=1).arrays[
        "before/test/correct"
    ][0]
    assert np.array_equal(first, last) and not np.array_equal(first, scratch)
