"""Partitions that cannot be dealt, and shapes that do not fit."""

from pfl_core import Federation, run
from pfl_core.data.pools import Pool
from tests.errors.table import Case, X, Y, own, tiny

CASES = [
    # partitions that cannot be
    Case(
        "2,000 clients on digits",
        lambda: run(tiny(clients=2000)),
        "clients=2000.*(lower it|largest legal value is clients=)",
    ),
    Case(
        'partition_args={"alpha": 0}',
        lambda: run(tiny(partition="dirichlet", partition_args={"alpha": 0})),
        r"alpha=0.0: allowed is a number > 0",
    ),
    Case(
        'partition_args={"k": 11} of 10 classes',
        lambda: run(tiny(partition="fedper_classes", partition_args={"k": 11})),
        "k .*=11: allowed is an integer in \\[1, 10\\]",
    ),
    Case(
        'partition_args={"alpha": 0.001}, 300 clients',
        lambda: run(tiny(partition="dirichlet", partition_args={"alpha": 0.001}, clients=300)),
        "alpha=0.001.*raise alpha",
    ),
    Case(
        'partition_args={"of": 3, "first": 2}, 2 clients',
        lambda: tiny(partition_args={"of": 3, "first": 2}),
        r"first \+ every \* \(clients - 1\) < of",
    ),
    Case(
        'partition="class_equal", partition_args={"k": 3}',
        lambda: run(tiny(partition="class_equal", partition_args={"k": 3})),
        "must hold multiples of k=3",
    ),
    Case(
        'partition_args={"transform": ["turn80"]}',
        lambda: tiny(partition_args={"transform": ["turn80"]}),
        "transform 'turn80' is unknown; did you mean 'turn180'",
    ),
    Case(
        'partition_args={"relabel": [[1, 0]]} of 10 classes',
        lambda: run(tiny(partition_args={"relabel": [[1, 0]]})),
        "a list of 2 labels for 10 classes; give one for each",
    ),
    Case('partition="workers" on digits', lambda: run(tiny(partition="workers")), "worker"),
    # shapes
    Case(
        "Federation: 8 images, 7 labels",
        lambda: Federation(X, Y[:7], [[0]]),
        "x has 8 samples and y has 7",
    ),
    Case(
        "Federation: labels 0.5",
        lambda: Federation(X, Y + 0.5, [[0]]),
        "labels .*float64.*integers",
    ),
    Case("Federation: a mask for indices", lambda: own(train=[Y == 0, [1]]), "np.flatnonzero"),
    Case("Federation: index 8 of 8", lambda: own(train=[[0], [8]]), r"allowed: 0\.\.7"),
    Case(
        "Federation: a client without data",
        lambda: own(train=[[0], []]),
        r"without training samples: \[1\]",
    ),
    Case(
        "Federation: test data that are trained on",
        lambda: own(test=[[0], [4]]),
        "must be disjoint from train",
    ),
    Case(
        "Federation: test lists for 3 of 2 clients",
        lambda: own(test=[[4]] * 3),
        "one list a client",
    ),
    Case(
        "Pool of float64", lambda: Pool("mine", X / 255, Y, Y > 0, 2), "allowed: uint8 or float32"
    ),
    Case(
        "own data, no Federation",
        lambda: run(tiny(dataset="own", partition="own")),
        r"fed=Federation\(",
    ),
    Case("a Federation, but dataset is digits", lambda: run(tiny(), fed=own()), "go together"),
    Case(
        "lenet4 with kernel 5 on 28x28",
        lambda: run(tiny(model="lenet4", model_args={"kernel": 5})),
        "76x76",
    ),
    Case(
        "fasttext on images",
        lambda: run(tiny(model="fasttext")),
        "fasttext takes texts.*use an image model",
    ),
    Case(
        "Experiment(head_depth=9)", lambda: run(tiny(head_depth=9)), r"head depth 9 is not in 0\.\."
    ),
]
