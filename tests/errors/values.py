"""Values of an Experiment that are not allowed."""

from pfl_core import grid, run, sweep
from pfl_core.methods.base import make_method
from tests.errors.table import Case, X, tiny

CASES = [
    # values
    Case("Experiment(rounds=-1)", lambda: tiny(rounds=-1), "allowed is an integer >= 0"),
    Case('Experiment(rounds="20")', lambda: tiny(rounds="20"), "got str, allowed is int"),
    Case("Experiment(clients=0)", lambda: tiny(clients=0), "allowed is an integer >= 1"),
    Case("Experiment(participation=20)", lambda: tiny(participation=20), r"a number in \(0, 1\]"),
    Case("Experiment(client_dropout=1)", lambda: tiny(client_dropout=1), r"a number in \[0, 1\)"),
    Case("Experiment(stragglers=20)", lambda: tiny(stragglers=20), r"a number in \[0, 1\]"),
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
    Case(
        "Experiment(finetune=5)",
        lambda: tiny(finetune=5),
        r"finetune=5\): allowed is .*'epochs': 10.*list of such stages".replace("'", '"'),
    ),
    Case(
        'Experiment(finetune={"lr": 0.1})',
        lambda: tiny(finetune={"lr": 0.1}),
        "says no epochs; allowed is",
    ),
    Case(
        'Experiment(finetune={"epoch": 5})',
        lambda: tiny(finetune={"epoch": 5}),
        "did you mean 'epochs'.*known are epochs, lr, only",
    ),
    Case(
        'Experiment(finetune={"epochs": 5, "only": "tail"})',
        lambda: tiny(finetune={"epochs": 5, "only": "tail"}),
        r"finetune\(only='tail'\): allowed is one of all, head, body",
    ),
    Case(
        'Experiment(finetune={"epochs": 10**9})',
        lambda: tiny(finetune={"epochs": 10**9}),
        r"finetune\(epochs=1000000000\): allowed is .*10000",
    ),
    Case(
        'run(Experiment(head_depth=0, finetune={"epochs": 5, "only": "head"}))',
        lambda: run(tiny(head_depth=0, finetune={"epochs": 5, "only": "head"})),
        "needs a head that can be trained",
    ),
    Case(
        'Experiment(init_from=tuned), tuned with finetune={"epochs": 5}',
        lambda: tiny(init_from=tiny(finetune={"epochs": 5})),
        "nobody learns from fine-tuning",
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
]
