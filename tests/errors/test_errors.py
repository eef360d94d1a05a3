"""Wrong uses and what each prints: what was given, what is allowed, what to do. docs/errors.md shows the same table.

`python -m tests.errors.test_errors` writes that page anew.
"""

import contextlib
import io
import itertools
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pfl_core import (
    Experiment,
    Federation,
    Method,
    fetch,
    grid,
    load,
    load_model,
    models,
    plot,
    register_dataset,
    register_model,
    register_partition,
    run,
    sweep,
    tune,
)
from pfl_core.analysis.select import pick, summary
from pfl_core.data import partition, pools
from pfl_core.data.pools import DatasetDamaged, DatasetMissing, Pool
from pfl_core.engine.context import Context
from pfl_core.engine.simulate import Interrupted
from pfl_core.experiments.store import digests
from pfl_core.methods.base import METHODS, make_method
from pfl_core.util import gpu, paths, sums
from pfl_papers.compare import plan, report
from pfl_papers.compare.parameters import check_injected
from pfl_papers.evidence import committed
from pfl_papers.notebook.study import Study
from pfl_papers.papers import base
from pfl_papers.papers.base import paper
from pfl_papers.papers.presets import presets
from tests.made import main
from tools import notebooks, runner
from tools.clean import KERNELSPEC

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
TINY = dict(
    dataset="digits", partition="iid", clients=2, model="mlp", rounds=1, max_samples=8, batch=8
)
DIVERGING = "--clients 2 --model mlp --rounds 3 --max_samples 8 --lr 1e30 --partition iid"
X, Y = np.zeros((8, 4, 4), np.uint8), np.arange(8) % 2


class Case(NamedTuple):
    """A wrong use: `does` it in an empty folder (the current one); None as `raises`: it goes on, and only prints."""

    use: str
    does: Callable[[], object]
    says: str  # a regular expression
    raises: type[BaseException] | None = ValueError


def own(**lists) -> Federation:
    return Federation(X, Y, **{"train": [[0, 1], [2, 3]]} | lists)


def tiny(**changes) -> Experiment:
    return Experiment(**TINY | changes)


# -- uses that need more than a line -------------------------------------------------------------------------------------


def damaged_cache() -> None:
    Path("cifar10.npz").write_bytes(b"PK\3\4 half a file")
    load("cifar10", root=".")


def cache_of_another_shape() -> None:
    np.savez(
        "cifar10.npz",
        x=np.zeros((4, 8, 8, 3), np.uint8),
        y=np.zeros(4, np.int64),
        is_test=np.arange(4) > 2,
    )
    load("cifar10", root=".")


def damaged(name: str) -> None:
    folder = run(tiny()).folder
    (folder / name).write_bytes((folder / name).read_bytes()[:30])
    run(tiny())


def older_schema() -> None:
    path = run(tiny()).folder / "experiment.json"
    kept = json.loads(path.read_text())
    kept["meta"]["schema"] = 0
    path.write_text(json.dumps(kept))
    run(tiny())


def damaged_checkpoint() -> None:
    with contextlib.suppress(Interrupted):
        run(tiny(rounds=3), on_round=lambda r, h: r == 1)
    (path,) = Path("runs/store").glob("*.part/checkpoint.pt")
    path.write_bytes(path.read_bytes()[:100])
    run(tiny(rounds=3))


def file_for_a_folder(name: str) -> None:
    Path(name).write_text("")


def store_is_a_file() -> None:
    file_for_a_folder("runs")
    run(tiny())


def finish_into_a_file() -> None:
    file_for_a_folder("runs")
    Study("fedper", profile="smoke").finish()


def fetch_into_a_file() -> None:
    file_for_a_folder("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PFL_OFFLINE", "0")  # the folder is made before the network is touched
        fetch("mnist", root="data")


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
    Path("cells.csv").write_text("paper,run\nfedper,2\n")
    sums.write(Path(), {"cells.csv": b"as it was"})
    committed.parts(folder=Path())


def without_gpu(use: Callable[[], object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(gpu, "misfit", lambda: "")
        use()


def old_driver(use: Callable[[], object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch, "__version__", "2.15.0+cu130")
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(gpu, "misfit", lambda: gpu._unfit("550.54.15"))
        use()


def out_of_memory() -> None:
    def full(*args, **kw):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Context, "train", full)
        run(tiny())


def diverges() -> None:
    print(run(tiny(lr=1e30, rounds=3)).meta["status"])


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


def saved_partition_of_other_data() -> None:
    own().save("split.npz")
    Federation.load("split.npz", X + 1, Y)


def pickled_pfllib() -> None:
    for part in ("train", "test"):
        Path("set", part).mkdir(parents=True)
        np.savez(Path("set", part, "0.npz"), data=np.array({"x": X, "y": Y}))
    Federation.from_pfllib("set")


def parameter(name: str, value: object) -> None:
    new = nbformat.v4
    lines = 'profile: str = "quick"\nseeds: list[int] = []\ntrain: bool = False'
    cells = [new.new_code_cell(lines, metadata={"tags": ["parameters"]})]
    nbformat.write(
        new.new_notebook(cells=cells, metadata={"kernelspec": KERNELSPEC}), "fedper.ipynb"
    )
    notebooks.check_parameters(Path("fedper.ipynb"), {name: value})


def command(*words: str) -> None:
    assert main(words) == 1
    raise ValueError  # as the shell sees it: code 1


def last_words(*words: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        main(words)


def run_all(*words: str) -> None:
    runner.parse(words)


def two_begin_so() -> None:
    first = {}
    for e in (tiny(seed=seed) for seed in itertools.count()):
        if first.setdefault(e.id[0], e) is not e:
            break
    run(e), run(first[e.id[0]])
    command("show", e.id[0])


def show_trashed() -> None:
    folder = run(tiny()).folder
    Path("runs/trash/2026-01-31").mkdir(parents=True)
    folder.rename(Path("runs/trash/2026-01-31", folder.name))
    command("show", folder.name[:6])


def empties_by_method() -> None:
    lies = Path("runs/trash/2026-01-31/00112233445566ff")
    lies.mkdir(parents=True)
    try:
        command("prune", "--empty-trash", "--method", "fedper", "--yes")
    finally:
        assert lies.is_dir()


def prunes(*words: str) -> None:
    run(tiny())
    main(["prune", *words])


def own_run(fed: object, **changes) -> None:
    run(Experiment(**dict(dataset="own", model="mlp", rounds=1) | changes), fed=fed)


def tunes_without_val() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Context, "train", lambda *args, **kw: pytest.fail("it trained"))
        tune(Experiment(dataset="own", model="mlp", rounds=1), {"lr": [0.1, 0.2]}, fed=own())


def mine(**hooks) -> None:
    """Runs a method of these hooks."""
    type("Mine", (Method,), hooks | {"name": "mine", "__module__": __name__})
    run(tiny(method="mine"))


def forgets_the_mean(self, state, sel, start, end, weight):
    state.server |= end
    return state


def logs() -> None:
    class Net(nn.Module):
        def __init__(self, shape: tuple, classes: int):
            super().__init__()
            self.fc = nn.Linear(784, classes)

        def forward(self, x):
            return self.fc(x.flatten(1)).log()

    register_model("logs", Net)
    run(tiny(model="logs"))


def partition_of_lists() -> None:
    def halves(pool, clients, rng):
        return np.array_split(rng.permutation(len(pool.y)), clients)

    register_partition("halves", halves)
    run(tiny(partition="halves"))


CASES = [
    # names
    Case(
        'Experiment(method="fedperr")',
        lambda: tiny(method="fedperr"),
        "method 'fedperr' .*'fedper'.* plugins",
    ),
    Case(
        'Experiment(dataset="cifar")',
        lambda: tiny(dataset="cifar"),
        "data set 'cifar' .*'cifar10'.* register_dataset",
    ),
    Case(
        'Experiment(partition="dirichelet")',
        lambda: tiny(partition="dirichelet"),
        "did you mean 'dirichlet'",
    ),
    Case(
        'Experiment(model="resnet-18")',
        lambda: tiny(model="resnet-18"),
        "did you mean 'resnet18'.* register_model",
    ),
    Case(
        'Experiment(metod="fedper")',
        lambda: tiny(metod="fedper"),
        "field .* 'metod' .* did you mean 'method'",
    ),
    Case(
        "experiment.but(round=3)",
        lambda: tiny().but(round=3),
        "'round' is unknown; did you mean 'rounds'",
    ),
    Case(
        'Experiment(method="fedprox", method_args={"nu": 1.0})',
        lambda: tiny(method="fedprox", method_args={"nu": 1.0}),
        "hyper-parameter of method 'fedprox': 'nu' is unknown; known are mu",
    ),
    Case(
        'Experiment(partition="dirichlet", partition_args={"alhpa": 0.1})',
        lambda: tiny(partition="dirichlet", partition_args={"alhpa": 0.1}),
        "did you mean 'alpha'",
    ),
    Case(
        'Experiment(model="cnn", model_args={"widht": 0.5})',
        lambda: tiny(model="cnn", model_args={"widht": 0.5}),
        "option of model 'cnn': 'widht' .*'width'",
    ),
    Case(
        'Experiment(record=("wieghts",))',
        lambda: tiny(record=("wieghts",)),
        "did you mean 'weights'",
    ),
    Case(
        'Experiment(tags={"colour": "red"})',
        lambda: tiny(tags={"colour": "red"}),
        "known are paper, artefact",
    ),
    Case(
        'Experiment(plugins=("my_method",))',
        lambda: tiny(plugins=("my_method",)),
        "no such module.*PYTHONPATH",
    ),
    Case(
        'Experiment(plugins=("my_method.py",))',
        lambda: tiny(plugins=("./my_method.py",)),
        "such as 'my_method': without .py",
    ),
    Case('Study("fedpr")', lambda: Study("fedpr"), "did you mean 'fedper'"),
    Case(
        'Study("fedper", profile="fast")',
        lambda: Study("fedper", profile="fast"),
        "known are smoke, quick, medium",
    ),
    Case(
        'Study("fedper", artefacts=["fig33"])',
        lambda: Study("fedper", artefacts=["fig33"]),
        "did you mean 'fig3'",
    ),
    Case(
        'Study("pfedhn", artefacts=["table2"], datasets=["mnist"])',
        lambda: Study("pfedhn", artefacts=["table2"], datasets=["mnist"]),
        "no such run of table2 at profile quick; it has .*table3 with digits or mnist",
    ),
    Case(
        "papermill notebooks/fedper.ipynb out.ipynb -p lr 0.1",
        lambda: check_injected({"In": ["", "seeds = []", "# Parameters\nlr = 0.1\n"]}),
        "parameter 'lr' is unknown; known are",
    ),
    Case('presets("fedaghn", "table9")', lambda: presets("fedaghn", "table9"), "known are table1"),
    Case('base.reported("fedper")', lambda: base.reported("fedper"), "there are those of pfedhn"),
    Case('pick(rows, select="best")', lambda: pick(None, select="best"), "did you mean 'best_val'"),
    Case(
        'run(experiment, executor="thread")',
        lambda: run(tiny(), executor="thread"),
        "did you mean 'threads'",
    ),
    Case(
        'run(experiment, device="gpu")',
        lambda: run(tiny(), device="gpu"),
        "known are auto, cpu, cuda",
    ),
    Case('paper("fedrep")', lambda: paper("fedrep"), "did you mean 'fedper'"),
    # values
    Case("Experiment(rounds=-1)", lambda: tiny(rounds=-1), "allowed is an integer >= 0"),
    Case('Experiment(rounds="20")', lambda: tiny(rounds="20"), "got str, allowed is int"),
    Case("Experiment(clients=0)", lambda: tiny(clients=0), "allowed is an integer >= 1"),
    Case("Experiment(participation=20)", lambda: tiny(participation=20), r"a number in \(0, 1\]"),
    Case('Experiment(lr=float("nan"))', lambda: tiny(lr=float("nan")), "a finite number"),
    Case("Experiment(lr=1e39)", lambda: tiny(lr=1e39), r"lr=1e\+39\): float32 makes infinity of"),
    Case(
        'Experiment(method="fedprox", method_args={"mu": 1e-50})',
        lambda: tiny(method="fedprox", method_args={"mu": 1e-50}),
        "mu.*float32 makes 0 of 1e-50",
    ),
    Case("Experiment(seed=10**30)", lambda: tiny(seed=10**30), "100 bits, allowed are 64"),
    Case(
        'Experiment(tags={"row": "two\\nlines"})',
        lambda: tiny(tags={"row": "two\nlines"}),
        "a text of one line",
    ),
    Case(
        "run(Experiment(batch=10**6))",
        lambda: run(tiny(batch=10**6)),
        "no client trains on more than 8 samples",
    ),
    Case(
        'run(experiment, store="~nosuchuser/runs")',
        lambda: run(tiny(), store="~nosuchuser/runs"),
        "the folder of no user",
    ),
    Case(
        "sweep([experiment, another that raises an error])",
        lambda: sweep([tiny(), tiny(batch=10**6)]),
        "failed: ValueError: .*batch=1000000",
        None,
    ),
    Case('Experiment(shuffle="true")', lambda: tiny(shuffle="true"), "got str, allowed is bool"),
    Case(
        'Experiment(method="fedprox", method_args={"mu": "0.1"})',
        lambda: tiny(method="fedprox", method_args={"mu": "0.1"}),
        r"fedprox\(mu='0.1'\): got str, allowed is float",
    ),
    Case(
        'Experiment(model="cnn", model_args={"width": "1"})',
        lambda: tiny(model="cnn", model_args={"width": "1"}),
        r"cnn\(width='1'\): got str, allowed is float",
    ),
    Case(
        "Experiment(model_args={...: numpy array})",
        lambda: tiny(model_args={"hidden": X}),
        "JSON cannot keep",
    ),
    Case("Experiment(adopt=True)", lambda: tiny(adopt=True), "needs init_from"),
    Case(
        "make_method with a boolean rate",
        lambda: make_method("fedprox", mu=True),
        "got bool, allowed is float",
    ),
    Case('run("fedper")', lambda: run("fedper"), "takes an Experiment, got str", TypeError),
    Case(
        "sweep(experiment) in place of sweep([experiment])",
        lambda: sweep(tiny()),
        r"list of Experiments.*sweep\(\[",
        TypeError,
    ),
    Case(
        'grid(experiment, ["fedavg", "fedper"])',
        lambda: grid(tiny(), ["fedavg", "fedper"]),
        "rows=.*dict",
        TypeError,
    ),
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
    # data that are missing or damaged
    Case(
        'load("cifar10") where it is not',
        lambda: load("cifar10", root="."),
        "fetch cifar10",
        DatasetMissing,
    ),
    Case(
        "fetch with PFL_OFFLINE=1",
        lambda: fetch("mnist", root="."),
        "because PFL_OFFLINE",
        DatasetMissing,
    ),
    Case(
        'load("flickr_aes")', lambda: load("flickr_aes", root="."), "by hand only", DatasetMissing
    ),
    Case("a damaged cifar10.npz", damaged_cache, "Delete or replace it", DatasetDamaged),
    Case(
        "a cifar10.npz of 8x8 images",
        cache_of_another_shape,
        r"expected \(n, 32, 32, 3\)",
        DatasetDamaged,
    ),
    Case(
        "damaged history.csv of a run",
        lambda: damaged("history.csv"),
        "set aside.*computing again",
        None,
    ),
    Case(
        "damaged arrays.npz of a run",
        lambda: damaged("arrays.npz"),
        "set aside.*computing again",
        None,
    ),
    Case(
        "a run of an older schema",
        older_schema,
        "schema 0 of the store.*set aside.*computing again",
        None,
    ),
    Case(
        "a damaged checkpoint",
        damaged_checkpoint,
        "checkpoint.pt.*set aside.*computing again",
        None,
    ),
    Case("a saved partition over other data", saved_partition_of_other_data, "made for other data"),
    Case("a folder of PFLlib with pickles", pickled_pfllib, "trusted=True"),
    Case(
        'Federation.from_pfllib("no/folder")',
        lambda: Federation.from_pfllib("no/folder"),
        r"expected train/0\.npz",
    ),
    # results
    Case("result.model(0) without keep_models", lambda: run(tiny()).model(0), "keep_models=True"),
    Case(
        "result.model(7) of 2 clients",
        lambda: run(tiny(keep_models=True)).model(7),
        r"clients 0\.\.1",
    ),
    Case(
        'result.probe("weights"), not recorded',
        lambda: run(tiny()).probe("weights"),
        r"record=\('weights',\)",
    ),
    Case(
        'tune(experiment, {"lr": 0.1})',
        lambda: tune(tiny(), {"lr": 0.1}),
        "'lr' has 0.1, not a list of values",
    ),
    Case(
        "tune(experiment, [0.1, 0.2])",
        lambda: tune(tiny(), [0.1, 0.2]),
        "whose combinations are tried, or a list of changes",
    ),
    Case("tune(experiment, {})", lambda: tune(tiny(), {}), "an empty dict; allowed is"),
    Case(
        'tune(..., when="befor")',
        lambda: tune(tiny(), {"lr": [0.1]}, when="befor"),
        "did you mean 'before'",
    ),
    Case(
        'tune(experiment.but(eval_after=False), ..., when="after")',
        lambda: tune(tiny(eval_after=False), {"lr": [0.1]}, when="after"),
        "set eval_after=True",
    ),
    Case(
        'tune(experiment, ..., split="test")',
        lambda: tune(tiny(), [{"lr": 0.1}], split="test"),
        "only 'val'",
    ),
    Case(
        "tune(...) without validation data",
        lambda: tune(tiny(), [{"lr": 0.1}]),
        "leaves no validation data",
    ),
    Case("a rate that is too high", diverges, "not finite in round .; lower lr", None),
    # parameters of notebooks
    Case(
        'papermill: train="true"', lambda: parameter("train", "true"), "must be a bool, not 'true'"
    ),
    Case("papermill: seeds=3", lambda: parameter("seeds", 3), "must be a list, not 3"),
    Case(
        "papermill: epochs=3",
        lambda: parameter("epochs", 3),
        "has no parameter epochs; it has profile",
    ),
    Case(
        'Study(train="true")',
        lambda: Study("fedper", train="true"),
        r"True or False \(not a string\)",
    ),
    Case('Study(datasets="cifar10")', lambda: Study("fedper", datasets="cifar10"), "give a list"),
    Case("Study(seeds=[0.5])", lambda: Study("fedper", seeds=[0.5]), "a list of integers >= 0"),
    Case('publish("fedper") before a run', lambda: committed.publish("fedper"), "run its notebook"),
    # this computer
    Case("$PFL_RUNS is a file", store_is_a_file, "set PFL_RUNS to a folder", OSError),
    Case(
        "$PFL_RUNS is a file, at the end of a notebook",
        finish_into_a_file,
        "set PFL_RUNS to a folder",
        OSError,
    ),
    Case("$PFL_DATA is a file", fetch_into_a_file, "data.*set PFL_DATA to a folder", OSError),
    Case(
        'run(experiment, device="cuda"), no GPU',
        lambda: without_gpu(lambda: run(tiny(), device="cuda")),
        "torch sees no GPU",
    ),
    Case(
        'run(experiment, device="cuda"), a driver older than the torch wheel',
        lambda: old_driver(lambda: run(tiny(), device="cuda")),
        "needs driver 580 or newer, and driver 550.54.15 is here; update",
    ),
    Case("out of memory", out_of_memory, "batch.*participation.*resumes", torch.OutOfMemoryError),
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
    # the command line
    Case(
        "python -m pfl_core fetch cifar",
        lambda: command("fetch", "cifar"),
        "^pfl_core fetch: .* did you mean 'cifar10'",
    ),
    Case(
        "python -m pfl_papers publish fedper",
        lambda: command("publish", "fedper"),
        "^pfl_papers publish: nothing of",
    ),
    Case(
        "./run_all.sh --profil quick",
        lambda: run_all("--profil", "quick"),
        "unknown option --profil; did you mean --profile.; known:",
        SystemExit,
    ),
    Case(
        "./run_all.sh --jobs two",
        lambda: run_all("--jobs", "two"),
        "'two' is not a number from 1 to 999",
        SystemExit,
    ),
    # which run
    Case(
        "python -m pfl_core show, of a digit with which two runs begin",
        two_begin_so,
        "2 finished runs begin with '.': .*; give more digits",
    ),
    Case(
        "python -m pfl_core show DIR/runs/store/99c7bb9d43df388e",
        lambda: command("show", str(run(tiny()).folder)),
        "is no id of a run: .* of a run's folder give the last name",
    ),
    Case(
        "python -m pfl_core show, of a run in the trash",
        show_trashed,
        "move DIR/runs/trash/.* back to DIR/runs/store to have it again",
    ),
    Case(
        "python -m pfl_core list runs, where none are",
        lambda: main(["list", "runs"]),
        "no finished runs in DIR/runs/store",
        None,
    ),
    Case(
        "python -m pfl_core prune --empty-trash --method fedper --yes",
        empties_by_method,
        "--empty-trash takes no RUN, filter",
    ),
    Case(
        "python -m pfl_core prune --method fedperr",
        lambda: prunes("--method", "fedperr"),
        "nothing to move; in DIR/runs/store lie runs of fedavg",
        None,
    ),
    Case(
        "python -m pfl_papers publish fedper fedprr",
        lambda: command("publish", "fedper", "fedprr"),
        "paper 'fedprr' is unknown; did you mean 'fedper'",
    ),
    Case(
        "python -m pfl_papers plan fedper --methods flayer",
        lambda: command("plan", "fedper", "--profile", "smoke", "--methods", "flayer"),
        "what is asked of fedper has no run of flayer; it has runs of fedavg, fedper",
    ),
    Case(
        "./run_all.sh fedper",
        lambda: run_all("fedper"),
        "'fedper' is a notebook; write --paper fedper",
        SystemExit,
    ),
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
        "one class a sample only, not several classes",
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
    # code of one's own
    Case(
        "upload without a return",
        lambda: mine(upload=lambda self, state, sel, start, end, weight: None),
        "mine.upload returned NoneType, allowed is a State; does every path",
    ),
    Case(
        "is_shared without a return",
        lambda: mine(is_shared=lambda self, name: None),
        "mine.is_shared returned None for every name; does every path",
    ),
    Case(
        "local that returns a part of start",
        lambda: mine(local=lambda self, c, start: {"fc.bias": start["fc.bias"]}),
        "mine.local returned no 'fc1.weight'; .*return start",
    ),
    Case(
        "upload that forgets the mean",
        lambda: mine(upload=forgets_the_mean),
        r"mine.upload returned a tensor \(2, 100, 784\) .* average over the clients",
    ),
    Case(
        'loss with reduction="none"',
        lambda: mine(
            loss=lambda self, p, anchor, batch: F.cross_entropy(
                self.logits(p, batch.x), batch.y, reduction="none"
            )
        ),
        r"mine: its loss returned a tensor \(8,\), allowed is a scalar",
    ),
    Case(
        "logits that returns features",
        lambda: mine(logits=lambda self, p, x: self.task.features(p, x)),
        r"mine.logits returned a tensor \(2, 100\) .* allowed are class scores \(2, 10\)",
    ),
    Case(
        "noise: float = 0.1, in a method",
        lambda: mine(noise=0.1, __annotations__={"noise": "float"}),
        r"mine\(noise=...\): .* because Method.noise is there; choose another name",
    ),
    Case(
        'register_model("mine", nn.Linear(784, 10))',
        lambda: register_model("mine", nn.Linear(784, 10)),
        r"got a network, Linear; give a function that makes one: fn\(input_shape, classes\)",
        TypeError,
    ),
    Case(
        'register_model("mine", lambda classes: ...)',
        lambda: register_model("mine", lambda classes: nn.Linear(784, classes)),
        r"a function that is called as fn\(input_shape, classes\)",
        TypeError,
    ),
    Case("a model whose scores are NaN", logs, "not finite before it is trained"),
    Case(
        "a partition that returns lists",
        partition_of_lists,
        r"partition 'halves': returned list, allowed is a Split\(train, val, test\)",
    ),
    Case(
        'register_dataset("mine", pool)',
        lambda: register_dataset("mine", load("digits")),
        r"got Pool; allowed is a function that is called as fn\(\)",
        TypeError,
    ),
    # settings
    Case(
        'Experiment(method="fedprox").but(mu=0.1)',
        lambda: tiny(method="fedprox").but(mu=0.1),
        "'mu' is no field of an Experiment; give it as method_args={'mu': 0.1}",
    ),
    Case(
        "python -m pfl_core run --method fedprox --mu 0.1",
        lambda: main("run --method fedprox --mu 0.1".split()),
        "run has no option --mu; give it as --method_args mu=",
        None,
    ),
    Case(
        'grid(experiment, {"FedPer": "fedper"})',
        lambda: grid(tiny(), {"FedPer": "fedper"}),
        "allowed is a dict of labels and changed fields, such as",
        TypeError,
    ),
    Case(
        "grid(experiment, rows, seeds=3)",
        lambda: grid(tiny(), {"a": {}}, seeds=3),
        r"allowed is a list of integers, such as range\(3\)",
        TypeError,
    ),
    Case(
        "sweep([grid(...), grid(...)])",
        lambda: sweep([grid(tiny(), {"a": {}}), grid(tiny(), {"b": {}})]),
        r"item 0 is a list; .* join lists as \[\*a, \*b\]",
        TypeError,
    ),
    Case(
        "sweep(experiments, jobs=-1)",
        lambda: sweep([tiny()], jobs=-1),
        r"sweep\(jobs=-1\): allowed is an integer >= 1",
    ),
    Case(
        "run(experiment, workers=0)",
        lambda: run(tiny(), workers=0),
        r"run\(workers=0\): allowed is an integer >= 1",
    ),
    Case(
        'run(experiment, executor="graphs:unfold"), on a CPU',
        lambda: run(tiny(), executor="graphs:unfold", device="cpu"),
        "executor 'graphs' needs a GPU; use device='cuda'",
    ),
    Case(
        'run(experiment, device="cuda:1")',
        lambda: run(tiny(), device="cuda:1"),
        "did you mean 'cuda'.*CUDA_VISIBLE_DEVICES",
    ),
    Case(
        'tune([a, b], {"lr": [0.1]})',
        lambda: tune([tiny(), tiny(seed=1)], {"lr": [0.1]}),
        "tune takes an Experiment, got list",
        TypeError,
    ),
    Case(
        "plot(sweep(...))",
        lambda: plot(sweep([tiny()])),
        r"plot takes Results, got DataFrame",
        TypeError,
    ),
    Case(
        "load_model(result.folder)",
        lambda: load_model(run(tiny()).folder),
        r"is no file; one is written by result.save\(client, path\)",
    ),
]


# -- what they print -----------------------------------------------------------------------------------------------------


def said(case: Case, folder: Path) -> str:
    """What a case prints and its exception's message, with `folder`, which is the current one meanwhile, written as DIR."""
    text, error = io.StringIO(), None
    with (
        contextlib.ExitStack() as names,
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(text),
    ):
        for known in (METHODS, models._MODELS, pools._ENTRIES, partition._SCHEMES):
            names.enter_context(mock.patch.dict(known))
        for name, value in {
            "PFL_RUNS": folder / "runs",
            "PFL_DATA": folder / "data",
            "PFL_OFFLINE": "1",
        }.items():
            patch.setenv(name, str(value))
        patch.setenv("PFL_DEVICE", "cpu")
        patch.chdir(folder)
        try:
            case.does()
        except (Exception, SystemExit) as e:
            error = e
    assert isinstance(error, case.raises or type(None)), repr(error)
    message = "" if isinstance(error, SystemExit) else str(error or "")
    return (text.getvalue() + message).replace(str(folder), "DIR").strip()


@pytest.mark.parametrize("case", CASES, ids=[c.use for c in CASES])
def test_what_a_wrong_use_prints(case, tmp_path):
    message = said(case, tmp_path)
    assert re.search(case.says, message, re.DOTALL), message
    assert "Traceback" not in message


def test_a_notebook_started_from_another_folder_finds_the_same_runs(tmp_path, monkeypatch):
    monkeypatch.delenv("PFL_RUNS")
    here = paths.runs_root()
    monkeypatch.chdir(tmp_path)
    assert paths.runs_root() == here and here.is_absolute()


# -- the page ------------------------------------------------------------------------------------------------------------

HEAD = """# Wrong uses and what they print

Each line is tested (`tests/errors/test_errors.py`, which writes this page when run as a program). DIR is the current folder. What is refused is
refused before anything is trained (what `local` and `upload` of a method of your own return: in the first round); the last column says how: an
exception, or `goes on` where the message is all.

"""


def page() -> str:
    """docs/errors.md."""
    lines = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            message = re.sub(
                r"(known are (?:[^,;]+, ){3})[^;]+, [^;]+",
                r"\1...",
                said(case, Path(folder).resolve()),
            )
        message = re.sub(r"\b\d{8}-\d{6}\b", "DAY-TIME", message)
        message = "<br>".join(map(code, message.splitlines()))
        lines.append(
            {
                "use": code(case.use),
                "what it prints": message,
                "": case.raises.__name__ if case.raises else "goes on",
            }
        )
    return HEAD + report.markdown(pd.DataFrame(lines)) + "\n"


def code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def test_the_page_holds_the_table():
    rows = [re.split(r" (?<!\\)\| ", line) for line in PAGE.read_text().splitlines()[8:]]
    assert [row[0].removeprefix("| ") for row in rows] == [
        code(case.use).replace("|", "\\|") for case in CASES
    ]
    for case, row in zip(CASES, rows, strict=True):
        message = row[1].replace("`<br>`", "\n").strip("` ")
        assert re.search(
            case.says,
            message.replace(", ...", ", ...; register_dataset plugins register_model"),
            re.DOTALL,
        ), row


if __name__ == "__main__":
    PAGE.write_text(page())
