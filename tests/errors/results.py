"""Results, tables and notebooks' parameters."""

from collections.abc import Callable
from pathlib import Path

import nbformat

from pfl_core import Result, run, tune
from pfl_papers.evidence import committed
from pfl_papers.notebook.study import Study
from tests.errors.table import Case, tiny
from tools import notebooks
from tools.clean import KERNELSPEC


def diverges() -> None:
    print(run(tiny(lr=1e30, rounds=3)).meta["status"])


def parameter(name: str, value: object) -> None:
    new = nbformat.v4
    lines = 'profile: str = "quick"\nseeds: list[int] = []\ntrain: bool = False'
    cells = [new.new_code_cell(lines, metadata={"tags": ["parameters"]})]
    nbformat.write(
        new.new_notebook(cells=cells, metadata={"kernelspec": KERNELSPEC}), "fedper.ipynb"
    )
    notebooks.check_parameters(Path("fedper.ipynb"), {name: value})


def diverged(ask: Callable[[Result], object]) -> None:
    kept = dict(keep_models=True, keep_scores=True, metrics=("confusion",))
    ask(run(tiny(lr=1e30, rounds=3, **kept)))


CASES = [
    # results
    Case("result.model(0) without keep_models", lambda: run(tiny()).model(0), "keep_models=True"),
    Case(
        "result.model(7) of 2 clients",
        lambda: run(tiny(keep_models=True)).model(7),
        r"clients 0\.\.1",
    ),
    Case(
        'result.save(0, ".")',
        lambda: run(tiny(keep_models=True)).save(0, "."),
        "is a folder; give the name of a file in a folder that is there",
        OSError,
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
    Case(
        'tune(experiment, {"seed": [0, 1, 2]})',
        lambda: tune(tiny(), {"seed": [0, 1, 2]}),
        "among seeds the luckiest would win; give seeds=",
    ),
    Case(
        'tune(experiment, {"partition_args": [{"alpha": 0.1}, {"alpha": 1.0}]})',
        lambda: tune(tiny(), {"partition_args": [{"alpha": 0.1}, {"alpha": 1.0}]}),
        "would be judged on different samples",
    ),
    Case(
        'tune(experiment, {"lr": 0.1}, draws=16)',
        lambda: tune(tiny(), {"lr": 0.1}, draws=16),
        "there is nothing to draw; allowed is",
    ),
    Case(
        "tune(experiment, ..., seeds=3)",
        lambda: tune(tiny(), {"lr": [0.1]}, seeds=3),
        "allowed is a list of different integers",
    ),
    Case(
        "result.model(0) of a run that diverged",
        lambda: diverged(lambda result: result.model(0)),
        "has no models, because it failed: .*not finite in round .; lower lr",
    ),
    Case(
        "result.predictions() of a run that diverged",
        lambda: diverged(lambda result: result.predictions()),
        "has no class scores, because it failed: .*lower lr",
    ),
    Case(
        "result.confusion() of a run that diverged",
        lambda: diverged(lambda result: result.confusion()),
        "has no confusion matrices, because it failed: .*lower lr",
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
    Case(
        'Study("fedaghn", overrides={"round": 400})',
        lambda: Study("fedaghn", overrides={"round": 400}),
        "overrides: 'round' is unknown; did you mean 'rounds'",
    ),
    Case(
        'Study("fedaghn", overrides={"method_args": {"nu": 1.0}}, artefacts=["fig5"])',
        lambda: Study("fedaghn", overrides={"method_args": {"nu": 1.0}}, artefacts=["fig5"]),
        "no method of these runs has it; they have",
    ),
    Case('publish("fedper") before a run', lambda: committed.publish("fedper"), "run its notebook"),
]
