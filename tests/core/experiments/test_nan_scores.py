"""A sample whose class scores are NaN has no answer: right for no class, whatever its label."""

import numpy as np
import pytest
import torch
from torch import nn

from pfl_core import Experiment, Federation, models, register_model
from pfl_core.experiments.run import run

N, LOST = 240, range(60, 90)  # of class 0, in test data


class Unit(nn.Module):
    """Features of length 1, which 0 has not."""

    def __init__(self, inputs, classes):
        super().__init__()
        self.a, self.b = nn.Linear(inputs, 16), nn.Linear(16, classes)
        self.a.weight.data.abs_()

    def forward(self, x):
        z = torch.relu(self.a(x))
        return self.b(z / z.norm(dim=1, keepdim=True))


@pytest.fixture
def fed(monkeypatch):
    monkeypatch.setattr(models, "_MODELS", dict(models._MODELS))
    register_model("unit_for_test", lambda shape, classes: Unit(shape[0], classes))
    draw = np.random.default_rng(0)
    y = draw.integers(0, 3, N)
    x = (abs(draw.normal(size=(N, 10))) + 0.3 * y[:, None] + 1).astype(np.float32)
    x[LOST], y[LOST] = -9, 0
    lists = [np.arange(k, N, 3) for k in range(3)]
    names = dict(class_names=["a", "b", "c"])
    return Federation(x, y, train=[i[i >= 100] for i in lists], test=[i[i < 100] for i in lists], **names)  # fmt: skip


@pytest.mark.parametrize("executor", ["threads", "batched"])
@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_nan_is_no_answer(fed, method, executor, tmp_path):
    how = dict(rounds=1, lr=0.05, batch=8, keep_scores=True, keep_models=True)
    e = Experiment(dataset="own", model="unit_for_test", method=method, **how)
    e = e.but(metrics=("f1", "auc", "confusion"))
    with pytest.warns(UserWarning, match="test samples of round 0 .* NaN .* wrong answer") as told:
        result = run(e, fed=fed, executor=executor, store=tmp_path, device="cpu")
    assert result.ok and len(told) == 1
    found = result.predictions()
    lost = found.sample_id.isin(LOST)
    assert lost.sum() == 30 and (found.predicted[lost] == -1).all()
    assert (found.predicted[~lost] == found.filter(like="score_")[~lost].to_numpy().argmax(1)).all()
    assert set(result.predictions(names=True).predicted[lost]) == {""}
    own = (found.label == found.predicted).groupby(found.client).mean()
    of = result.clients.query("split == 'test' and when == 'before' and rounds == 1")
    np.testing.assert_allclose(of.set_index("client").acc_pct, 100 * own, atol=1e-3)
    assert result.confusion().to_numpy().sum() == 100 - 30
    assert not result.history.query("metric in ('f1', 'auc')").value.notna().any()
    with pytest.raises(ValueError, match="class scores of 1 of 3 samples are NaN.*epsilon"):
        result.predict(0, fed.x[58:61])
