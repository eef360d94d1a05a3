"""Methods, models and data of a user's own, half right."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from pfl_core import (
    Experiment,
    Federation,
    Method,
    load_model,
    models,
    register_dataset,
    register_model,
    register_partition,
    run,
    sweep,
)
from pfl_core.analysis.select import pick, summary
from pfl_core.data.pools import Pool
from pfl_core.experiments.store import digests
from pfl_core.util import sums
from pfl_papers.compare import plan
from pfl_papers.evidence import committed
from tests.errors.table import Case, X, Y, own, tiny
from tests.made import main

DIVERGING = "--clients 2 --model mlp --rounds 3 --max_samples 8 --lr 1e30 --partition iid"


def float_images() -> None:
    run(
        Experiment(dataset="own", model="cnn"),
        fed=Federation(np.zeros((8, 8, 8), np.float32), Y, [[0, 1], [2, 3]]),
    )


def too_few_outputs() -> None:
    register_model("few", lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(784, 2)))
    run(tiny(model="few"))


def no_last_layer(end: nn.Module) -> None:
    def net(shape: tuple, classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, classes), end)

    register_model("no_last_layer", net)
    run(tiny(model="no_last_layer", method="fedcp"))


def tokens_beyond() -> None:
    fed = Federation(np.arange(32).reshape(8, 4) * 7, Y, [[0, 1], [2, 3]])
    run(Experiment(dataset="own", model="fasttext", model_args={"vocab": 100}), fed=fed)


def tokens_as_pixels() -> None:
    fed = Federation(np.arange(32, dtype=np.uint8).reshape(8, 4), Y, [[0, 1], [2, 3]])
    run(Experiment(dataset="own", model="fasttext"), fed=fed)


def other_models(client: int = 0) -> None:
    a, b = (run(tiny(keep_models=True, seed=s)) for s in (0, 1))
    (a.folder / "models.pt").write_bytes((b.folder / "models.pt").read_bytes())
    a.model(client)


def other_run() -> None:
    a, b = run(tiny()), tiny(seed=1)
    a.folder.rename(a.folder.with_name(b.id))
    run(b)


def with_dropout() -> None:
    def net(shape: tuple, classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(784, classes))

    register_model("dropout", net)
    run(tiny(model="dropout"), executor="batched")


def changed_value() -> None:
    tiny(partition_args={"split": "70/10/20"}).partition_args["split"] = "60/20/20"


def model_without_its_code() -> None:
    register_model(
        "forgotten", lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    )
    run(tiny(model="forgotten", model_args={}, keep_models=True)).save(0, "model.pt")
    del models._MODELS["forgotten"]
    load_model("model.pt")


def two_alphas() -> None:
    drawn = tiny(partition="dirichlet")
    rows = sweep([drawn.but(partition_args={"alpha": alpha}) for alpha in (0.1, 1.0)])
    summary(pick(rows), rows="method", columns="dataset")


def untrained_models_only() -> None:
    pick(sweep([tiny(rounds=0)]), "last10")


def models_computed_anew() -> None:
    first = run(tiny(keep_models=True))
    run(tiny(keep_models=True), recompute=True)
    for old in first.folder.parent.glob("*.before-*"):
        old.rename("elsewhere")
    path, weights = first.folder / "experiment.json", first.folder / "models.pt"
    about = json.loads(path.read_text())
    torch.save(torch.load(weights, weights_only=True) | {"version": "another"}, weights)
    about["sha256"] = digests(about["experiment"], about["meta"], first.folder)
    path.write_text(json.dumps(about))
    first.model(0)


def another_network_to_start_from() -> None:
    run(tiny(init_from=tiny(model_args={"hidden": 9})))


def changed_results() -> None:
    sums.put(Path(), {"cells.csv": b"as it was"})
    Path("cells.csv").write_text("paper,run\nfedper,2\n")
    committed.parts(folder=Path())


def reads_test() -> None:
    class Peeking(Method):
        name = "peeking"

        def local(self, c, start):
            return c.train(self.loss, start, split="test")

    run(tiny(method="peeking"))


def taken_method_name() -> None:
    type("Other", (Method,), {"name": "fedper", "__module__": "my_methods"})


def taken(register: Callable, name: str) -> None:
    register(name, lambda *args: None)


def last_words(*words: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        main(words)


CASES = [
    # own parts
    Case("a method that trains on test data", reads_test, "only one with leaks_test = True may"),
    Case(
        "a second method named fedper",
        taken_method_name,
        "is taken by pfl_core.methods.fedper.FedPer",
    ),
    Case('register_model("cnn", ...)', lambda: taken(register_model, "cnn"), "another name"),
    Case(
        'register_dataset("mnist", ...)', lambda: taken(register_dataset, "mnist"), "another name"
    ),
    Case(
        "Federation: int16 images",
        lambda: Federation(X.astype(np.int16), Y, [[0]]),
        "x is int16 .*; allowed are uint8",
    ),
    Case(
        "Federation: RGBA images",
        lambda: Federation(np.zeros((8, 5, 5, 4), np.uint8), Y, [[0]]),
        "leave an alpha channel",
    ),
    Case(
        "Federation: NaN in the samples",
        lambda: Federation(np.full((8, 2), np.nan), Y, [[0]]),
        "not finite .* in 8 of 8",
    ),
    Case(
        "Federation: one-hot labels",
        lambda: Federation(X, np.eye(8), [[0]]),
        r"one-hot rows take y.argmax\(1\)",
    ),
    Case(
        "Federation: a label of 10^9",
        lambda: Federation(X, np.where(Y, 10**9, 0), [[0]]),
        "with np.unique",
    ),
    Case(
        "Federation: labels -1 and 1",
        lambda: Federation(X, 2 * Y - 1, [[0]]),
        r"labels reach -1..1; allowed: 0..1; number them from 0 with np.unique\(y, return_inv",
    ),
    Case(
        "Federation: a dict of clients",
        lambda: own(train={0: [0], 1: [1]}),
        "train is a dict; give a list",
    ),
    Case("Federation: train=[0, 1]", lambda: own(train=[0, 1]), "give one index array a client"),
    Case(
        "Federation(holdout=0.2)",
        lambda: own(holdout=0.2),
        r"say it in Experiment\(holdout=...\)",
        TypeError,
    ),
    Case("Federation(std=0)", lambda: own(std=0), "allowed are finite numbers > 0"),
    Case(
        "Pool of RGBA images",
        lambda: Pool("mine", np.zeros((8, 5, 5, 4), np.uint8), Y, Y > 0, 2),
        "1 or 3 channels, last",
    ),
    Case(
        "Pool with NaN",
        lambda: Pool("mine", np.full((8, 2, 2), np.nan, np.float32), Y, Y > 0, 2),
        "x is not finite",
    ),
    Case(
        "Pool of 10^9 classes",
        lambda: Pool("mine", X, Y, Y > 0, 10**9),
        "1000000000 classes of 8 samples",
    ),
    Case(
        'Experiment(model_args={"hidden": 0})',
        lambda: tiny(model_args={"hidden": 0}),
        "allowed is an integer >= 1",
    ),
    Case(
        'Experiment(model="cnn", model_args={"width": -1})',
        lambda: tiny(model="cnn", model_args={"width": -1}),
        "number > 0",
    ),
    Case(
        "float images (n, 8, 8)", float_images, r"give float images of one channel as x\[:, None\]"
    ),
    Case("a model with too few outputs", too_few_outputs, r"it must give scores \(2, 10\)"),
    Case(
        "fasttext, and tokens as uint8",
        tokens_as_pixels,
        "tokens must be integers, got torch.float32.*give tokens as int64",
    ),
    Case("tokens beyond the vocabulary", tokens_beyond, "take an embedding of 218 rows or more"),
    Case(
        "fedcp over a model that ends in no Linear layer",
        lambda: no_last_layer(nn.LogSoftmax(1)),
        "let its forward end in",
    ),
    Case(
        "own data: clients=99 of 2",
        lambda: run(tiny(dataset="own", partition="own", clients=99), fed=own()),
        "give clients=2",
    ),
    Case(
        'Federation(device="cuda")',
        lambda: own(device="cuda"),
        r"say it in run\(device=...\)",
        TypeError,
    ),
    Case(
        "own data and a partition", lambda: tiny(dataset="own"), "a Federation says who holds what"
    ),
    Case(
        "experiment.partition_args changed",
        changed_value,
        "make another one with experiment.but",
        TypeError,
    ),
    Case("Experiment(eval_clients=3) of 2", lambda: tiny(eval_clients=3), "0 means all"),
    Case(
        'Experiment(eval_clients=1, record=("cka",))',
        lambda: tiny(eval_clients=1, record=("cka",)),
        "probes need all clients",
    ),
    Case(
        "run(experiment, on_round=3)",
        lambda: run(tiny(), on_round=3),
        "allowed is a function",
        TypeError,
    ),
    Case("dropout under executor='batched'", with_dropout, "use executor='auto' or 'threads'"),
    Case(
        "init_from of another network",
        another_network_to_start_from,
        "has fc1.weight of shape .*use the same model",
    ),
    Case("another run's folder in its place", other_run, "it is run .*set aside", None),
    Case("another run's models", other_models, "models.pt is damaged: it is not what run"),
    Case("models of a Result whose run was computed anew", models_computed_anew, "written anew"),
    Case("a saved model without its code", model_without_its_code, "'forgotten' is not registered"),
    Case(
        'summary(pick(rows), rows="method", columns="dataset") over two alphas',
        two_alphas,
        "partition_args.alpha .0.1, 1",
    ),
    Case('pick(rows, "last10") of untrained models', untrained_models_only, "use 'last'"),
    Case(
        "python -m pfl_core prune --status broken",
        lambda: main(["prune", "--status", "broken"]),
        "known are done, failed",
        None,
    ),
    Case(
        "python -m pfl_core show 12ab", lambda: main(["show", "12ab"]), "list runs` shows all", None
    ),
    Case(
        "python -m pfl_papers compare 12ab 34cd",
        lambda: main(["compare", "12ab", "34cd"]),
        "`python -m pfl_core show 12ab 34cd` shows runs, several side by side",
        None,
    ),
    Case(
        "a committed file that was changed",
        changed_results,
        "is not as it was published .*restore it",
    ),
    Case(
        "plan.compute(..., jobs=0)",
        lambda: plan.compute("pfedhn", jobs=0),
        "allowed is an integer >= 1",
    ),
    Case(
        "run(experiment) that diverges, on the command line",
        lambda: last_words("run", *DIVERGING.split()),
        "run .* failed: ",
        None,
    ),
    Case(
        'register_partition("iid", ...)', lambda: taken(register_partition, "iid"), "another name"
    ),
]
