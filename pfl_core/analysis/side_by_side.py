"""Finished runs in one figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from pfl_core.analysis import plots
from pfl_core.analysis.select import MOMENTS
from pfl_core.engine.finetune import TUNED
from pfl_core.engine.scoring import COUNTED, list_metrics
from pfl_core.experiments import listing
from pfl_core.experiments.metrics import OWN, UNTESTED
from pfl_core.experiments.store import Result
from pfl_core.util import checks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ACC = "acc_pct"
_MOMENTS = MOMENTS | {TUNED: "after fine-tuning"}


def plot(*results: Result, when: str = "before", metric: str = ACC) -> Figure:
    """Draw the test accuracy of finished runs, the mean over clients, against the round, or
    against the epoch of their fine-tuning; or another metric.

    Runs that differ in their seed alone are one line with an interval: the mean of those that
    ended, where some diverged, which the title counts. The legend says in what the lines differ.

    Parameters
    ----------
    results : Result
        What `run` returned, one or more.
    when : {"before", "after", "tuned"}
        Models as they are served, or after the round's local training; or those of fine-tuning
        after the last round, from the served ones (epoch 0) to the last epoch.
    metric : str
        A metric of the rows, mean over clients: "acc_pct", "acc_worst10", "auc", ...; or a name
        that a method's own `numbers` gives, of runs with record=("numbers",).

    Returns
    -------
    matplotlib.figure.Figure
        Shown by a notebook; `plot(a, b).savefig("curves.png")` keeps it.

    Raises
    ------
    TypeError, ValueError
        For what is no Result; without one; for a metric that no run has; and where none has test
        accuracies at that moment.

    Examples
    --------
    >>> base = Experiment(clients=3, model="mlp", rounds=2, partition="iid")
    >>> a, b = run(base), run(base.but(method="fedper"))
    >>> plot(a, b).axes[0].get_ylabel()
    'Test accuracy (%)'
    """
    import matplotlib  # late: it takes a second

    rows = _rows(results, when, metric)
    with matplotlib.rc_context({"font.size": 8, "axes.titlesize": 9}):
        fig, (ax,) = plots.panels(1, size=(4.8, 2.8))
        plots.curves(rows, ax, y=plots.display(metric, plots.MEASURE_LABELS))
        if when == TUNED:
            ax.set_xlabel("Epoch of fine-tuning")
        plots.entitle(ax, _title([*{result.key: result for result in results}.values()], when))
    return fig


def _rows(results: tuple[Result, ...], when: str, metric: str) -> pd.DataFrame:
    # The numbers that are drawn; the column row says which line a number belongs to.
    checks.known("when", when, _MOMENTS)
    if not results:
        raise ValueError("plot() has nothing to draw; give it Results: plot(run(...), run(...))")
    for given in results:
        if not isinstance(given, Result):
            got = type(given).__name__
            raise TypeError(f"plot takes Results, got {got}; of a list write plot(*results)")
    of_each = {result.key: result for result in results}  # given twice, it is no second seed
    names = listing.names([*of_each.values()])
    ended = {name for name, result in zip(names, of_each.values(), strict=True) if result.ok}
    frames = [
        result.rows.assign(row=name)
        for name, result in zip(names, of_each.values(), strict=True)
        if result.ok or name not in ended  # a mean is over the same seeds in all rounds
    ]
    rows = pd.concat(frames, ignore_index=True)
    own = rows[(rows["average"] == OWN) & (rows.metric == metric)]
    untested = "test" not in set(rows.split)
    rows = rows[(rows["average"] == "client") & (rows.split == "test")]
    if len(own) and when == "before" and metric not in set(rows.metric):
        return own
    if untested and all(result.ok for result in results):
        raise ValueError(f"plot: {UNTESTED}")
    if len(rows):
        add = f"run with Experiment(metrics=({metric!r},))" * (metric in list_metrics())
        checks.known("metric", metric, sorted({*rows.metric.str.removesuffix(COUNTED)}), add)
    rows = rows[rows.metric == metric]
    shown = rows[rows.when.str.startswith(when)]
    if shown.empty:
        field = "finetune={'epochs': 5}" if when == TUNED else "eval_after=True"
        what = (
            "test accuracies" if metric == "acc_pct" else f"{metric} of any client's test samples"
        )
        raise ValueError(
            f"plot(when={when!r}): no {what} {_MOMENTS[when]}; run with {field}, and with test "
            "samples" + " for which it is defined" * (metric != "acc_pct")
        )
    if when == TUNED:
        return _by_epoch(rows, shown)
    last = shown.groupby(["row", "run"])["rounds"].max().groupby("row").min()
    cut = shown["rounds"] <= shown["row"].map(last)
    return shown[cut | shown["row"].isin(ended)]  # where none ended, the rounds that all have


def _by_epoch(rows: pd.DataFrame, tuned: pd.DataFrame) -> pd.DataFrame:
    # Fine-tuning with its epochs in place of rounds; epoch 0 is what was served after the last one.
    last = rows.run.map(tuned.groupby("run")["rounds"].max())
    served = rows[(rows.when == "before") & (rows["rounds"] == last)].assign(rounds=0)
    epochs = tuned.when.str.removeprefix(TUNED).astype(int)
    return pd.concat([served, tuned.assign(rounds=epochs)], ignore_index=True)


def _title(results: list[Result], when: str) -> str:
    # What all have in common, how many seeds there are, and how many runs diverged.
    experiments = [result.experiment for result in results]
    lost = sum(not result.ok for result in results)
    names = {"own": "own data"}
    data = {f"{names.get(e.dataset, e.dataset)}, {e.clients} clients" for e in experiments}
    seeds = sorted({e.seed for e in experiments})
    parts = list(data) if len(data) == 1 else []
    parts += [f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"]
    parts += [_MOMENTS[when]] if when != "before" else []
    parts += [f"{lost} of {len(results)} diverged"] if lost else []
    return ", ".join(parts)
