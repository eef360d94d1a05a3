"""Settings that contradict each other."""

from pfl_core import grid, load_model, plot, run, sweep, tune
from tests.errors.table import Case, tiny
from tests.made import main

CASES = [
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
    # optimizers and rates
    Case(
        'run(Experiment(method="pfedme", optimizer="adam"))',
        lambda: run(tiny(method="pfedme", optimizer="adam")),
        "pfedme trains by a step of its own, .*allowed with it is optimizer='sgd'",
    ),
    Case(
        'run(Experiment(method="feddbe", method_args={"kappa": 1}, optimizer="adam"))',
        lambda: run(tiny(method="feddbe", method_args={"kappa": 1}, optimizer="adam")),
        "kappa = 1.0 with .*optimizer = adam; allowed: both 0 and sgd, or kappa = 0",
    ),
    Case(
        'Experiment(optimizer="adam", momentum=0.9)',
        lambda: tiny(optimizer="adam", momentum=0.9),
        "momentum is sgd's; of the others say optimizer_args=",
    ),
    Case(
        'Experiment(optimizer="adam", optimizer_args={"betas": 0.9})',
        lambda: tiny(optimizer="adam", optimizer_args={"betas": 0.9}),
        "argument of optimizer 'adam': 'betas' is unknown; did you mean",
    ),
    Case(
        'Experiment(lr_schedule="exponential", gamma=0.9)',
        lambda: tiny(lr_schedule="exponential", gamma=0.9),
        "'gamma' is no field of an Experiment; give it as lr_schedule_args={'gamma': 0.9}",
    ),
    Case(
        'Experiment(lr_schedule="step", lr_schedule_args={"gamma": 2})',
        lambda: tiny(lr_schedule="step", lr_schedule_args={"gamma": 2}),
        r"lr_schedule step\(gamma=2.0\): allowed is a number in \(0, 1\]",
    ),
    Case(
        'run(Experiment(method="local", server="momentum"))',
        lambda: run(tiny(method="local", server="momentum")),
        "the server of local holds no single model that it could move; allowed with it is",
    ),
]
