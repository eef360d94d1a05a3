"""Very many small clients: evaluation in parts, what is said before training, kill and resume."""

import numpy as np
import pytest
import torch

from pfl_core.engine import simulate as rounds
from pfl_core.engine import small
from pfl_core.engine.engine import Engine, automatic
from pfl_core.engine.simulate import simulate
from pfl_core.experiments.build import build_method, client_data
from pfl_core.experiments.experiment import Experiment

SMALL = Experiment(
    clients=120,
    partition="dirichlet",
    partition_args={"alpha": 1.0, "least": 3, "fallback_least": 2, "split": "60/40"},
    model="mlp",
    participation=0.1,
    batch=4,
    rounds=2,
    dtype="float64",
)


def bound(**changes):
    data = client_data(e := SMALL.but(**changes))
    return build_method(e, data), data


@pytest.mark.parametrize("model", ["mlp", "lenet", "cnn_bn"])
def test_stacked_evaluation_equals_client_by_client(model, monkeypatch):
    method, data = bound(model=model, method="local", clients=40)
    p = method.init().clients
    torch.manual_seed(0)
    p = {n: v + 0.1 * torch.rand_like(v) if v.is_floating_point() else v for n, v in p.items()}
    data.index["test"][3] = data.index["test"][3][:0]
    engine = Engine(method, data, workers=2)
    try:
        alone = engine.evaluate(p, "test")
        monkeypatch.setattr(small, "MANY", 30)
        monkeypatch.setattr(small, "AT_ONCE", 64)
        together = engine.evaluate(p, "test")
    finally:
        engine.close()
    assert len(set(alone["n"].tolist())) > 5 and alone["n"].min() == 0
    np.testing.assert_array_equal(alone["correct"], together["correct"])
    np.testing.assert_allclose(alone["loss"], together["loss"], rtol=1e-10)
