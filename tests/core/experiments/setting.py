"""How two results are compared."""

import numpy as np
import pandas as pd


def same(a, b):
    assert a.arrays.keys() == b.arrays.keys()
    for k, v in a.arrays.items():
        np.testing.assert_array_equal(v, b.arrays[k], err_msg=k)
    drop = a.history.metric != "train_s"
    pd.testing.assert_frame_equal(a.history[drop], b.history[drop])
