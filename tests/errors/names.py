"""Names that nobody knows."""

from pfl_core import run
from pfl_core.analysis.select import pick
from pfl_papers.compare.parameters import check_injected
from pfl_papers.notebook.study import Study
from pfl_papers.papers import base
from pfl_papers.papers.base import paper
from pfl_papers.papers.presets import presets
from tests.errors.table import Case, tiny

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
        'Experiment(method="fedproto", record=("weights",))',  # it has a hyper-parameter of the name
        lambda: tiny(method="fedproto", record=("weights",)),
        "record: fedproto has no weights; leave 'weights' out",
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
]
