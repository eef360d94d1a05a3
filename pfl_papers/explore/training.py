"""What the panel that trains sets, and what it shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pfl_core import models
from pfl_core.analysis import plots
from pfl_core.data import pools
from pfl_core.experiments.experiment import Experiment
from pfl_papers.explore import sources, words
from pfl_papers.explore.choices import Choices, Shown
from pfl_papers.papers import presets

MAX_SAMPLES = 200  # of a client, so that a round takes about a second
ALPHAS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 100.0)
RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
BATCHES = (5, 10, 16, 32, 64, 128)
ROUNDS = (2, 5, 10, 20, 50, 100, 200, 500, 1000)
_TEXT = ("ag_news",)  # data sets of tokens
_OTHERS = ("linear", "lenet4")  # networks that need options, or images of one size


def choices(wanted: Mapping[str, Any]) -> Choices:
    """Controls of the panel that trains: method, data, clients, network, rates, rounds, seed.

    The learning rate is at first the one that the comparison of all methods has for the method.
    """
    out = Choices(wanted)
    method = out.offer("method", presets.COMPARED, "fedper", words=plots.label)
    names = words.here_first(pools.list_datasets())
    dataset = out.offer("dataset", names, "digits", words=words.data)
    out.offer("alpha", ALPHAS, 0.1, "slide")
    out.offer("clients", (2, 5, 10, 20, 50, 100), 10, "slide")
    text = ("fasttext",) if dataset in _TEXT else ()
    networks = [n for n in models.list_models() if n not in (*_OTHERS, "fasttext")]
    out.offer("model", text or networks, "lenet", words=words.network)
    out.offer("batch", BATCHES, 10, "slide")
    out.offer("lr", RATES, _preset(method, Experiment(lr=0.05))["lr"], "slide")
    out.offer("rounds", ROUNDS, 20, "slide")
    out.offer("seed", range(10), 0, "slide")
    return out


def _preset(method: str, base: Experiment) -> dict[str, Any]:
    return {"lr": base.lr} | presets.COMPARED[method](base)


def experiment(
    method: str,
    dataset: str,
    clients: int,
    rounds: int,
    seed: int = 0,
    *,
    alpha: float = 0.1,
    model: str = "lenet",
    batch: int = 10,
    lr: float = 0.05,
) -> Experiment:
    """What the panel trains: a method on Dir(alpha), with at most 200 samples of each client.

    What else belongs to the method is set as in the comparison of all methods; `presets.COMPARED`
    has their names.

    Raises
    ------
    ValueError
        If the fields do not go together.
    """
    base = Experiment(
        dataset=dataset,
        partition="dirichlet",
        partition_args={"alpha": alpha},
        clients=clients,
        model=model,
        rounds=rounds,
        batch=batch,
        lr=lr,
        seed=seed,
        max_samples=MAX_SAMPLES,
    )
    return base.but(**_preset(method, base) | {"lr": lr})


def shown(experiment: Experiment, curve: pd.DataFrame | None, said: str = "") -> Shown:
    """A run as far as it has come.

    Parameters
    ----------
    experiment : Experiment
        What is run.
    curve : DataFrame or None
        The clients' mean test accuracy, in columns rounds, when and value (%), as
        `Background.curve` has it; None where nothing is measured yet.
    said : str
        The sentence to show.
    """
    fig = None
    if curve is not None:
        fig, (ax,) = plots.panels(1)
        plots.curves(curve.assign(row=curve.when.map(sources.moment)), ax)
        data = plots.in_words(experiment.dataset)
        ax.set_title(f"{plots.label(experiment.method)} on {data}, {experiment.rounds} rounds")
        _whole(ax, experiment.rounds)
    return Shown(fig, said, None, f"from pfl_core import Experiment, run; run({experiment!r})")


def _whole(ax: Axes, rounds: int) -> None:
    """Let the x axis go from 0 to the number of rounds that is asked for, in whole numbers."""
    step = MaxNLocator(nbins=5, integer=True).tick_values(0, max(rounds, 1))
    inner = [int(at) for at in step if at < rounds - (step[1] - step[0]) / 2]
    ax.set_xlim(0, max(rounds, 1))
    ax.set_xticks(sorted({*inner, rounds}))
