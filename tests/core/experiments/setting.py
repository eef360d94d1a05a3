"""A federation that trains in moments, and how two results are compared."""

import numpy as np
import pandas as pd

TINY = dict(
    dataset="digits",
    partition="dirichlet",
    partition_args={"alpha": 1.0},
    clients=4,
    model="mlp",
    model_args={"hidden": 8},
)
TINY |= dict(rounds=4, batch=16, lr=0.1, max_samples=40)


def same(a, b):
    assert a.arrays.keys() == b.arrays.keys()
    for k, v in a.arrays.items():
        np.testing.assert_array_equal(v, b.arrays[k], err_msg=k)
    drop = a.history.metric != "train_s"
    pd.testing.assert_frame_equal(a.history[drop], b.history[drop])
