"""A user's own data."""

import numpy as np
import pytest
import torch

from pfl_core import Experiment, Federation, run, sweep, tune
from pfl_core.engine.context import Context
from tests.errors.table import Case, X, Y, own, tiny


def own_run(fed: object, **changes) -> None:
    run(Experiment(**dict(dataset="own", model="mlp", rounds=1) | changes), fed=fed)


def tunes_without_val() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Context, "train", lambda *args, **kw: pytest.fail("it trained"))
        tune(Experiment(dataset="own", model="mlp", rounds=1), {"lr": [0.1, 0.2]}, fed=own())


CASES = [
    # data of one's own
    Case(
        "Federation: images of 4x4 and 5x5",
        lambda: Federation([np.zeros((4 + k % 2, 4 + k % 2)) for k in range(8)], Y, [[0]]),
        r"samples of shape \(4, 4\), \(5, 5\); cut or pad them",
    ),
    Case(
        "Federation: labels that start at 1",
        lambda: Federation(X, Y + 1, [[0]]),
        "labels reach 1..2 and not 0: of labels that start at 1 take y - 1",
    ),
    Case(
        "Federation: the test data as validation data",
        lambda: own(val=[[4], [5]], test=[[4], [5]]),
        "test must be disjoint from val of all clients",
    ),
    Case(
        "Federation: a TensorDataset",
        lambda: Federation(torch.utils.data.TensorDataset(torch.tensor(X)), Y, [[0]]),
        "x is a TensorDataset; give its tensors: x, y = dataset.tensors",
    ),
    Case(
        "Federation: several classes a sample",
        lambda: Federation(X, np.array([[1, 1, 0]] * 8), [[0]]),
        "several classes, .* a sample are not served; pfl_core trains classifiers",
    ),
    Case(
        "Federation: a masked array",
        lambda: Federation(np.ma.array(X, mask=X == 0), Y, [[0]]),
        "x is a masked array.*leave these samples out",
    ),
    Case(
        "Federation: a sample twice in a list",
        lambda: own(train=[[0, 1, 0], [2]]),
        "train of client 0 lists 1 samples more than once.*list each once",
    ),
    Case("federation.x[0] = 0", lambda: own().x.__setitem__(0, 0), "read-only"),
    Case(
        "federation.classes = 3",
        lambda: setattr(own(), "classes", 3),
        "a Federation does not change.*make another one",
        AttributeError,
    ),
    Case(
        'Federation.open("no/folder")',
        lambda: Federation.open("no/folder"),
        r"has no x.npy, y.npy, index.npz; expected is a folder that federation.save",
    ),
    Case(
        "run(experiment, fed=(x, y))",
        lambda: own_run((X, Y)),
        "fed is a tuple; allowed is a Federation",
        TypeError,
    ),
    Case(
        "sweep(experiments, fed=function), which returns no Federation",
        lambda: sweep([Experiment(dataset="own")], fed=lambda seed: (X, Y)),
        r"fed\(0\) returned a tuple; allowed is a Federation",
        TypeError,
    ),
    Case(
        "tune(experiment, ..., fed=fed), a Federation without validation data",
        tunes_without_val,
        "this Federation has no validation data; give it some: val=",
    ),
    Case(
        "float images (n, 32, 32, 3)",
        lambda: own_run(
            Federation(np.zeros((8, 32, 32, 3), np.float32), Y, [[0, 1], [2, 3]]), model="resnet18"
        ),
        r"channels first, as x.transpose\(0, 3, 1, 2\)",
    ),
    Case(
        "result.predict(0, image), of one image",
        lambda: run(tiny(keep_models=True)).predict(0, np.zeros((28, 28), np.uint8)),
        r"this model takes image \(1, 28, 28\).*of a single sample x give x\[None\]",
    ),
]
