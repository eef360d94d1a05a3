"""Faults of many clients."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pfl_core import Experiment, Federation, run
from tests.faults.table import METHOD, Fault, World, images, with_plugin

OWN = Experiment(dataset="own", model="mlp", model_args={"hidden": 8}, rounds=2, batch=8, lr=0.1)


MANY = OWN.but(participation=0.002, rounds=1, eval_every=1)


def one_without_test_samples(w: World) -> Iterator[None]:
    test = list(images(20_000).index["test"])
    test[777] = []
    fed = images(20_000, test=test)
    yield
    e = MANY.but(rounds=0)
    found, whole = run(e, fed=fed), run(e, fed=images(20_000))
    others = np.arange(20_000) != 777
    w.expected = {n: v[:, others] for n, v in whole.arrays.items() if "test/" in n and v.ndim == 2}
    assert len(found.clients.dropna().query("split == 'test'").client.unique()) == 19_999
    return {n: v[:, others] for n, v in found.arrays.items() if n in w.expected}


def one_with_nan(w: World) -> Iterator[None]:
    fed = images(20_000)
    x = fed.x.astype(np.float32)
    x[777 * 20, 3, 3] = np.nan
    yield
    Federation(x, fed.y, fed.index["train"], test=fed.index["test"])


def partition_of_many_is_cut_off(w: World) -> Iterator[None]:
    fed = images(2000)
    fed.save("clients.npz")
    Path("clients.npz").write_bytes(Path("clients.npz").read_bytes()[:-9000])
    yield
    Federation.load("clients.npz", fed.x, fed.y)


def evaluated_without_test_samples(w: World) -> Iterator[None]:
    fed = images(40)
    test = [fed.index["test"][0], *([] for _ in range(39))]
    yield
    run(OWN.but(clients=40, eval_clients=2), fed=images(40, test=test))


def one_of_many_diverges(w: World) -> Iterator[None]:
    text = METHOD + textwrap.indent(
        "def personal(self, state, c):\n"
        "    models = {{n: v.clone() for n, v in super().personal(state, c).items()}}\n"
        "    models['fc.bias'][c.sel == 2345] = float('nan')\n    return models\n",
        "    ",
    )
    e = with_plugin(w, "bad_one", text)
    e = MANY.but(clients=2500, method=e.method, plugins=e.plugins)
    yield
    found = run(e, fed=images(2500))
    print(found.meta["status"])
    w.expected = False
    return found.ok


FAULTS = [
    # many clients
    Fault(
        "one of 20,000 clients has no test sample", one_without_test_samples, "", "computed, equal"
    ),
    Fault(
        "one of 20,000 clients has NaN in a sample",
        one_with_nan,
        "not finite .* in 1 of 400000 samples, the first is sample 15540",
        "refused, nothing changed",
    ),
    Fault(
        "a saved partition of 2,000 clients, cut off",
        partition_of_many_is_cut_off,
        "clients.npz is damaged",
        "refused, nothing changed",
    ),
    Fault(
        "none of the clients that are drawn for evaluation has a test sample",
        evaluated_without_test_samples,
        "only 1 of 40 clients have test samples, and none of those is drawn",
        "refused, nothing changed",
    ),
    Fault(
        "one of 2,500 clients diverges, in the second part of an evaluation",
        one_of_many_diverges,
        "of client 2345 is not finite in round 0",
        "kept as failed",
    ),
]
