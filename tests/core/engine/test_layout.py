"""Code that is not ours finds tensors in the usual order of memory, wherever it is called."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pfl_core import Experiment, Federation, Method, models, register_model
from pfl_core.experiments.run import run

DRAWN = torch.Generator().manual_seed(0)
IMAGES = {
    "gray": torch.randint(0, 256, (48, 16, 16), generator=DRAWN, dtype=torch.uint8),
    "colour": torch.randint(0, 256, (48, 16, 16, 3), generator=DRAWN, dtype=torch.uint8),
    "floats": torch.randn(48, 3, 16, 16, generator=DRAWN),
}


class Tutorial(nn.Module):
    """A network with `view` behind its input and behind its convolution."""

    def __init__(self, channels, classes):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(channels, 6, 5), nn.Linear(6 * 36, classes)

    def forward(self, x):
        x = x + 0 * x.view(len(x), -1).sum(1).view(-1, 1, 1, 1)
        return self.fc(F.max_pool2d(F.relu(self.conv(x)), 2).view(len(x), -1))


class Flat(Method):
    """Flattens parameters by `view`, in a loss and after it."""

    name = "flat_for_test"

    def loss(self, p, anchor, batch):
        flat = torch.cat([(p[n] - anchor[n]).view(-1) for n in self.task.parameters])
        return super().loss(p, anchor, batch) + 0.01 * flat.norm() ** 2

    def upload(self, state, sel, start, end, n):
        assert all(v[0].view(-1).numel() for v in end.values())
        return super().upload(state, sel, start, end, n)


@pytest.fixture(autouse=True)
def tutorial(monkeypatch):
    monkeypatch.setattr(models, "_MODELS", dict(models._MODELS))
    register_model("tutorial_for_test", lambda shape, classes: Tutorial(shape[0], classes))


@pytest.mark.parametrize("executor", ["threads", "batched"])
@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize(
    "how",
    [
        dict(model="tutorial_for_test", method="fedavg"),
        dict(model="tutorial_for_test", method="fedrep", eval_after=True),
        dict(model="tutorial_for_test", method="ditto", metrics=("f1",)),
        dict(model="lenet", method="flat_for_test"),
    ],
    ids=["evaluated together", "by phases", "two models", "a loss"],
)
def test_views_work_as_in_plain_torch(how, kind, executor, tmp_path):
    x, y = IMAGES[kind].numpy(), torch.arange(48).numpy() % 3
    lists = [range(k, 48, 3) for k in range(3)]
    fed = Federation(x, y, train=[r[:12] for r in lists], test=[r[12:] for r in lists])
    e = Experiment(dataset="own", rounds=1, batch=6, keep_models=True, **how)
    result = run(e, fed=fed, executor=executor, store=tmp_path, device="cpu")
    assert result.ok and len(result.predict(0, fed.x[:5])) == 5
