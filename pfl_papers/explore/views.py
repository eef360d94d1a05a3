"""What the explorers of notebooks/explore.ipynb show: a function for each, called a view.

A view takes what was chosen and returns a `Shown`; it trains nothing. Beside it stands a function
`..._choices(wanted)`, which says what the controls of the view offer, given what is chosen so far.
`widgets` puts the two together; a script calls the view alone. The line of code in each `Shown` is
that call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from pfl_core.analysis import plots
from pfl_core.analysis import stats as analysis
from pfl_core.analysis.select import pick, records
from pfl_core.data import partition as partitions
from pfl_core.data import pools as data
from pfl_core.engine import probes
from pfl_core.experiments import metrics
from pfl_core.experiments.experiment import Experiment
from pfl_core.util import checks
from pfl_papers.evidence import committed, copies
from pfl_papers.explore import sources, words
from pfl_papers.explore.choices import Choices, Shown, arguments
from pfl_papers.papers import base as papers

# Values that sliders offer for arguments of a partition.
KNOBS = {
    "alpha": (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 100.0),
    "k": range(1, 21),
    "groups": (1, 2, 5, 10),
}
SELECTED = {
    "last": "the last",
    "best_val": "best on validation data",
    "best_test": "best on test data (optimistic)",
}
# Rows of a table that are chosen at first, where it has them: references, the papers' own methods.
FIRST = ("local", "fedavg", "fedavg_ft", "fedper", "pfedhn", "pfedla", "flayer", "fedaghn")


def _call(view: str, source: str, column: str, **values: Any) -> str:
    """The line of code that calls a view over results with these values."""
    inner = arguments(dict(source=source, column=column) | values)
    return f"from pfl_papers.explore import views; views.{view}({inner}).figure"


# -- who holds what --------------------------------------------------------------------------------


def partition_choices(wanted: Mapping[str, Any]) -> Choices:
    """Controls of `partition`: dataset, scheme, the scheme's own arguments, clients, seed.

    Of a scheme's arguments, alpha, k (classes of a client) and groups have controls.
    """
    choices = Choices(wanted)
    names = words.here_first(data.list_datasets())
    name = choices.offer("dataset", names, "digits", words=words.labels)
    schemes = partitions.list_partitions()
    scheme = choices.offer("scheme", schemes, "dirichlet", words=words.scheme)
    known = partitions.arguments(scheme)
    for knob in [knob for knob in KNOBS if knob in known]:
        ten_classes = knob == "k" and name in ("digits", "cifar10")
        legal = range(1, 11) if ten_classes else KNOBS[knob]
        default = 2 if known[knob].default is None else known[knob].default
        choices.offer(knob, legal, default, "slide")
    choices.offer("clients", range(2, 101), 20, "slide")
    choices.offer("seed", range(20), 0, "slide")
    return choices


def partition(dataset: str, scheme: str, clients: int, seed: int = 0, **args: Any) -> Shown:
    """Who holds which training samples, and how far clients are apart (total variation of labels).

    Parameters
    ----------
    dataset, scheme : str
        Names of a data set and of a partition.
    clients : int
        How many clients share the data.
    seed : int
        Decides who gets which samples.
    **args
        Arguments of the partition, such as alpha.

    Raises
    ------
    ValueError
        If the partition cannot do that.
    DatasetMissing
        If the data are not on this computer.
    """
    fields: dict[str, Any] = dict(
        dataset=dataset, partition=scheme, partition_args=args, clients=clients, seed=seed
    )
    counts = committed.label_counts(Experiment(**fields))
    distance = analysis.total_variation(counts, counts)
    fig, (left, right) = plots.panels(2, sharey=False)
    plots.label_distribution(counts, left).set_title("Training samples (area)")
    ticks = _sparse_ticks(clients)
    plots.heat(distance, right, "Other client", "Client", vmin=0, vmax=1, **ticks)
    right.set_title("Total variation of labels")
    said = (
        f"{clients} clients of {plots.in_words(dataset)}: {counts.sum():,} training samples "
        f"in {counts.shape[1]} classes. Distances are total variations, 0 for equal shares of "
        "labels and 1 for no class in common."
    )
    code = (
        "from pfl_core import Experiment; "
        "from pfl_papers.evidence.committed import label_counts; "
        f"label_counts(Experiment({arguments(fields)}))"
    )
    return Shown(fig, said, _spread(counts, distance), code)


def _spread(counts: np.ndarray, distance: np.ndarray) -> pd.DataFrame:
    """Least, mean and most over clients, of label counts (K, C) and distances (K, K)."""
    clients = len(counts)
    others = distance[~np.eye(clients, dtype=bool)].reshape(clients, clients - 1)
    to_all = analysis.total_variation(counts, counts.sum(0, keepdims=True))
    lines = {
        "training samples": counts.sum(1),
        "classes": (counts > 0).sum(1),
        "distance to the nearest client": others.min(1),
        "mean distance to the others": others.mean(1),
        "distance to all data together": to_all[:, 0],
    }
    found = pd.DataFrame(lines).agg(["min", "mean", "max"]).T.round(2)
    return found.set_axis(["least", "average", "most"], axis=1)


def _sparse_ticks(clients: int) -> dict[str, Any]:
    """Options of a heat map of clients by which about ten of them are numbered on each axis."""
    return dict.fromkeys(("xticklabels", "yticklabels"), max(1, clients // 10))


# -- finished results ------------------------------------------------------------------------------


def _offer_column(choices: Choices, array: str = "") -> pd.DataFrame:
    """Offer "source" and "column", the first controls of every view over results.

    Returns the rows of the column that is chosen, of runs that have kept `array` if one is named.
    """
    there = sources.names(array)
    source = choices.offer("source", there, sources.best(there), words=sources.title)
    if source is None:
        choices.offer("column", ())
        return pd.DataFrame(columns=metrics.ROW_COLUMNS)
    frame = sources.keeping(sources.rows(source), array) if array else sources.rows(source)
    # The table with most methods is the default, of runs of this computer the newest setting. Runs
    # that choose parameters, and variants of a method, count for nothing.
    method = frame.row.where(frame.row.isin(plots.LABELS) & ~frame.artefact.isin(sources.TUNED))
    many = method.groupby(frame.column, sort=False).nunique()
    first = None if source == sources.OWN else many.idxmax()
    said = sources.column_names(frame)
    return frame[frame.column == choices.offer("column", said, first, words=said.get)]


def _preferred(frame: pd.DataFrame, first: Sequence[str] = FIRST) -> list[str]:
    """The rows of a column: the paper's own method, then those in `first`, then the others.

    Of runs of this computer the row of a method is any that begins with its key.
    """
    names = frame.row.unique().tolist()
    paper = frame.paper.iloc[0] if len(frame) else ""
    own = papers.paper(paper).own if paper in papers.PAPERS else ""
    found = [row for key in (own, *first) for row in names if row.split(",")[0] == key]
    return list(dict.fromkeys([*found, *names]))


def _first_rows(frame: pd.DataFrame) -> list[str]:
    """The rows that are chosen at first: as many as `FIRST` has, its own before others."""
    exact = [row for row in _preferred(frame) if row in plots.LABELS]
    return (exact or _preferred(frame))[: len(FIRST)]


def _offer_when(choices: Choices, frame: pd.DataFrame) -> str:
    """Offer "when": each moment of evaluation, and each row's own where there are several."""
    there = frame.when.unique().tolist()
    return choices.offer("when", ["own"] * (len(there) > 1) + there, words=sources.moment)


def _missing(what: str, code: str) -> Shown:
    """What a view returns where no results are there; `code` would compute some."""
    said = f"Nothing to show yet: no finished run here has kept {what}. This line computes some."
    return Shown(None, said, None, code)


_TWO_RUNS = (
    "from pfl_core import Experiment, grid, sweep; "
    "sweep(grid(Experiment(rounds=20), {m: {'method': m} for m in ('fedavg', 'fedper')}))"
)


def _rows_of(source: str, column: str) -> pd.DataFrame:
    return sources.rows(source).query("column == @column")


def runs_choices(wanted: Mapping[str, Any]) -> Choices:
    """Controls of `runs`: source, column, rows, metric, against, when, seeds, smoothing."""
    choices = Choices(wanted)
    frame = _offer_column(choices)
    lines = sources.listed(frame)
    first = _first_rows(frame)
    rows = choices.offer(
        "rows", lines, [row for row in lines if row in first], "several", lines.get
    )
    there = [metric for metric in sources.METRICS if metric in set(frame.metric)]
    choices.offer("metric", there, words=sources.METRICS.get)
    chosen = frame[frame.row.isin(rows)]
    choices.offer("against", sources.AXES, _readable_axis(chosen), words=sources.AXES.get)
    _offer_when(choices, frame)
    choices.offer("seeds", sorted(frame.seed.unique().tolist()), kind="several")
    choices.offer("smoothing", range(1, 11), 1, "slide")
    return choices


def _readable_axis(frame: pd.DataFrame) -> str:
    """What curves are drawn against at first.

    Rounds; client visits where some runs have far more rounds than others, as pFedHN has, whose
    rounds are visits of one client.
    """
    rounds = frame.groupby("run")["rounds"].max()
    return "client_visits" if len(rounds) and rounds.max() > 2 * rounds.min() else "rounds"


def runs(
    source: str | None,
    column: str,
    rows: Sequence[str] = (),
    metric: str = "acc_pct",
    against: str = "rounds",
    when: str = "own",
    seeds: Sequence[int] = (),
    smoothing: int = 1,
) -> Shown:
    """Curves, and how accuracies of clients spread in the last round.

    Parameters
    ----------
    source : str or None
        One of `sources.names()`; None where there are no results: the `Shown` says how to get some.
    column : str
        A column of the source's table: a setting.
    rows, seeds : sequence
        Which rows of it, most often methods, and which seeds; empty for all.
    metric : str
        What is drawn: a key of `sources.METRICS`.
    against : str
        What it is drawn against: a key of `sources.AXES`.
    when : {"own", "before", "after"}
        Whether models were evaluated before or after the round's local training, or each method's
        as its paper does.
    smoothing : int
        Each point is the mean of so many evaluations.

    Raises
    ------
    ValueError
        If the results have no such rows, or there is no such axis.
    """
    if source is None:
        return _missing("anything", _TWO_RUNS)
    checks.known("axis", against, sources.AXES)
    chosen = dict(rows=rows, metric=metric, against=against, when=when, seeds=seeds)
    code = _call("runs", source, column, **chosen, smoothing=smoothing)
    whole = _rows_of(source, column)
    frame = sources.timed(whole.query("split == 'test'"), when)
    frame = frame[frame.row.isin(rows or frame.row) & frame.seed.isin(seeds or frame.seed)]
    frame = frame.assign(row=frame.row.map(sources.short(whole)))
    series = frame[frame.metric == metric]
    if series.empty:
        raise ValueError(
            f"no {metric} {when!r} of {rows or 'any row'}, seeds {seeds or 'any'}, "
            f"in {column!r} of {source!r}"
        )
    spent = sources.amounts(source, column)
    fig, (left, right) = plots.panels(2, sharey=False)
    series = _against(analysis.smooth(series, smoothing), spent, against)
    plots.curves(series, left, y=sources.METRICS[metric]).set_xlabel(sources.AXES[against])
    _draw_last_round(frame, right)
    said = (
        f"{sources.METRICS[metric]} of {sources.column_names(whole)[column]}, evaluated "
        f"{sources.moment(when)}. A line is the mean over seeds, a band or bar its 95 % interval."
    )
    if against == "megabytes":
        said += " A method that sends nothing, such as local training, has no curve."
    return Shown(fig, said, _last_and_best(frame, metric, spent), code)


def _against(series: pd.DataFrame, spent: pd.DataFrame, axis: str) -> pd.DataFrame:
    """Rows with a row's mean of an amount (`sources.amounts`) over seeds in place of its round.

    Rows that spend nothing of it, as Local sends nothing, have no curve.
    """
    if axis == "rounds":
        return series
    both = series.merge(spent, on=["run", "rounds"])
    moved = both[both.groupby("row")[axis].transform("max") > 0]
    moved = both if moved.empty else moved
    return moved.assign(rounds=moved.groupby(["row", "rounds"])[axis].transform("mean"))


def _draw_last_round(frame: pd.DataFrame, ax: Axes) -> None:
    """How accuracies of clients spread in the last round of each run."""
    last = frame[frame["rounds"] == frame.groupby("run")["rounds"].transform("max")]
    heads = last.drop_duplicates(["run", "row"])
    each = [
        committed.accuracies(v["run"], v["when"], v["rounds"]).assign(row=v["row"])
        for v in records(heads)
    ]
    wide = last.pivot_table(index="row", columns="metric", values="value")
    wide = wide.reindex(heads.row.unique())
    plots.ranges(wide, ax, pd.concat(each)).set_title("Clients in the last round")


def _last_and_best(frame: pd.DataFrame, metric: str, spent: pd.DataFrame) -> pd.DataFrame:
    """A line for each row: seeds, their means at the last round and the most accurate, the cost."""
    last = _picked(frame, "last", metric).merge(spent, on=["run", "rounds"], how="left")
    last = last.groupby("row", sort=False)
    best = _picked(frame, "best_test", metric).groupby("row", sort=False)
    columns = {
        "seeds": last.seed.nunique(),
        "last": last.value.mean(),
        "best": best.value.mean(),
        "round of best": best["rounds"].mean(),
        "rounds": last["rounds"].mean(),
        "client visits": last.client_visits.mean(),
        "MB": last.megabytes.mean(),
    }
    table = pd.DataFrame(columns).round(2).reindex(frame.row.unique())
    whole = [c for c in table if (table[c] % 1 == 0).all()]  # NaN stays a number
    table = table.astype(dict.fromkeys(whole, int))
    return table.rename(index=plots.in_plain_words).rename_axis(None)


def _picked(frame: pd.DataFrame, select: str, metric: str = "acc_pct") -> pd.DataFrame:
    """As `pick`, of rows that were evaluated at the moments which they have."""
    parts = [pick(part, select, str(t), metric=metric) for t, part in frame.groupby("when")]
    return pd.concat(parts, ignore_index=True)


def clients_choices(wanted: Mapping[str, Any]) -> Choices:
    """Controls of `clients`: source, column, first, second, when, select, seed.

    Only runs that have kept the accuracy of every client are offered, and of one seed.
    """
    choices = Choices(wanted)
    frame = _offer_column(choices, "n/test")
    tested, references = set(frame[frame.split == "test"].row), FIRST[:2]
    lines = {row: line for row, line in sources.listed(frame).items() if row in tested}
    seeds_of = {row: set(frame[frame.row == row].seed.tolist()) for row in lines}
    baselines = [row for row in lines if row.split(",")[0] in references]
    first = choices.offer("first", lines, next(iter(baselines), None), words=lines.get)
    shared = {row: seeds & seeds_of[first] for row, seeds in seeds_of.items() if row != first}
    others = {row: lines[row] for row, seeds in shared.items() if seeds}
    own = next((row for row in _preferred(frame, FIRST[::-1]) if row in others), None)
    second = choices.offer("second", others, own, words=lines.get)
    _offer_when(choices, frame)
    validated = ["best_val"] if "val" in set(frame.split) else []
    choices.offer("select", ["last", *validated, "best_test"], words=SELECTED.get)
    choices.offer("seed", sorted(shared.get(second, ())))
    return choices


def clients(
    source: str | None,
    column: str,
    first: str,
    second: str | None,
    when: str = "own",
    select: str = "last",
    seed: int = 0,
) -> Shown:
    """Two methods on the same clients: accuracy against accuracy, and who is ahead by how much.

    Parameters
    ----------
    source, column, when
        As for `runs`.
    first, second, seed : the two runs; second None: the `Shown` says how to get some
    select : {"last", "best_val", "best_test"}
        Which round, as for `pick`.

    Raises
    ------
    ValueError
        If one of the two runs is not there.
    KeyError
        If a run has not kept its arrays.
    """
    if second is None or source is None or column is None:
        return _missing("the accuracy of every client under two methods", _TWO_RUNS)
    whole = _rows_of(source, column)
    frame = sources.timed(whole.query("seed == @seed and row in (@first, @second)"), when)
    found: dict[str, Any] = {}
    if len(frame):
        found = {run["row"]: run for _, run in _picked(frame, select).iterrows()}
    if absent := [row for row in (first, second) if row not in found]:
        raise ValueError(
            f"no run of {', '.join(absent)} with seed {seed} in {column!r} of {source!r}"
        )
    pair = [found[first], found[second]]
    x, y = (committed.accuracies(run["run"], run["when"], run["rounds"]) for run in pair)
    both = x.merge(y, on="client")
    a, b = both.acc_pct_x.to_numpy(), both.acc_pct_y.to_numpy()
    short = sources.short(whole)
    names = [plots.in_plain_words(short[row]) for row in (first, second)]
    fig, (left, right) = plots.panels(2, sharey=False)
    axes = [f"{name}: accuracy (%)" for name in names]
    plots.points(both, left, "acc_pct_x", "acc_pct_y", None, axes[0], axes[1])
    _square(left, np.concatenate([a, b]))
    plots.leads(a, b, right, (short[first], short[second]))
    table = pd.DataFrame([analysis.fairness(acc) for acc in (a, b)], names).round(2)
    table.insert(0, "rounds", [run["rounds"] for run in pair])
    table = table.rename(columns=plots.MEASURE_LABELS)
    code = _call(
        "clients", source, column, first=first, second=second, when=when, select=select, seed=seed
    )
    return Shown(fig, _lead(names, analysis.paired(b, a)), table, code)


def _lead(names: Sequence[str], test: Mapping[str, float]) -> str:
    """The sentence on what `analysis.paired` found."""
    return (
        f"{names[1]} {'trails' if test['difference'] < 0 else 'beats'} {names[0]} by "
        f"{abs(test['difference']):.2f} points on average. It is better on "
        f"{100 * test['better']:.0f} % of {test['n']} clients. Clients as if independent, which "
        f"they are not: Wilcoxon p = {test['p']:.3g} for this seed."
    )


def _square(ax: Axes, values: np.ndarray) -> None:
    """Give both axes the same range and scale, and draw the line on which they are equal."""
    low, high = values.min(), values.max()
    room = max(0.05 * (high - low), 1)
    ends = max(low - room, 0), min(high + room, 100)
    ax.set(xlim=ends, ylim=ends, aspect="equal")
    ax.set_xticks(ticks := [t for t in ax.get_yticks() if ends[0] <= t <= ends[1]])
    ax.set_yticks(ticks)
    ax.plot(ends, ends, color="0.7", lw=0.8, zorder=0)


# -- what probes recorded --------------------------------------------------------------------------


def probe_choices(probe: str, wanted: Mapping[str, Any]) -> Choices:
    """Controls of a view over a probe: source, column, row, seed, layer (of weights), round.

    Only runs that recorded this probe are offered.
    """
    choices = Choices(wanted)
    frame = _offer_column(choices, f"probe/{probe}")
    lines, preferred = sources.listed(frame), _preferred(frame)
    row = choices.offer("row", lines, next(iter(preferred), None), words=lines.get)
    frame = frame[frame.row == row]
    seed = choices.offer("seed", sorted(frame.seed.unique().tolist()))
    rounds, values = np.empty(0, dtype=int), {}
    if found := frame.run[frame.seed == seed].unique().tolist():
        rounds, values = probes.read(committed.arrays_of(found[0]), probe)
    if probe == "weights":
        layers = dict.fromkeys(["all", *values]) if values else ()
        choices.offer("layer", layers, words=lambda name: "all layers" if name == "all" else name)
    choices.offer("round", map(int, rounds), int(rounds[-1]) if len(rounds) else None, "slide")
    return choices


class _Recorded(NamedTuple):
    """What a probe recorded of one run."""

    name: str  # of its row
    group: np.ndarray  # (K,) which clients are alike
    by: str  # and by what: see `kin`
    rounds: np.ndarray  # (E,) the recorded rounds
    at: int  # the index of the round that is shown
    values: dict[str, np.ndarray]  # {key: (E, ...)}


def _recorded(
    probe: str, source: str, column: str, row: str, seed: int, round: int | None
) -> _Recorded:
    """A run's records of a probe; the recorded round nearest to `round` is shown, None: the last.

    Raises
    ------
    ValueError
        If there is no such run, or it did not record the probe.
    """
    whole = _rows_of(source, column)
    found = whole.query("row == @row and seed == @seed")
    if found.empty:
        raise ValueError(f"no run of {row!r} with seed {seed} in {column!r} of {source!r}")
    rounds, values = probes.read(committed.arrays_of(found.run.iloc[0]), probe)
    at = int(np.abs(rounds - (rounds[-1] if round is None else round)).argmin())
    group, by = kin(found.iloc[0])
    name = plots.in_plain_words(sources.short(whole)[row])
    return _Recorded(name, group, by, rounds, at, values)


def kin(run: Any) -> tuple[np.ndarray, str]:
    """Which clients are alike: the partition's own groups, or the class a client has most of.

    Parameters
    ----------
    run
        A row of results; its run, n_clients, partition and dataset are read.

    Returns
    -------
    group : (K,) int
        Clients with the same number are alike. Where nothing is known, because there is no
        Experiment or no data, all are in one group.
    by : str
        What they are alike by, in words.
    """
    experiment, clients = committed.experiment(run.run), int(run.n_clients)
    try:
        if run.partition == "groups":
            default = partitions.arguments("groups")["groups"].default
            args = experiment.partition_args if experiment else {}
            groups = args.get("groups", default)
            return np.arange(clients) * groups // clients, "group of the partition"
        if run.partition == "coarse":
            return copies.coarse_classes(run.dataset, clients), "coarse class"
        if experiment:
            return committed.label_counts(experiment).argmax(1), "most frequent class"
    except data.DatasetMissing:
        pass
    return np.zeros(clients, int), "nothing known of them"


def collaboration(
    source: str | None,
    column: str,
    row: str | None,
    seed: int,
    layer: str = "all",
    round: int | None = None,
) -> Shown:
    """Who learns from whom: the weights of the aggregation, at one round and over all rounds.

    Left, the weights of a round (row: the client that receives); right, over all recorded rounds,
    the mean weight of a client on itself, on clients that are like it, and on the others.

    Parameters
    ----------
    source, column
        As for `runs`.
    row, seed
        The run; row None: the `Shown` says how to get some.
    layer : str
        A layer of the model, or "all" for the mean of all layers.
    round : int, optional
        The recorded round nearest to this one is shown; by default the last one.

    Raises
    ------
    ValueError
        If there is no such run or layer, or the run did not record weights.
    """
    if row is None or source is None or column is None:
        return _missing("collaboration weights", "./run_all.sh --paper fedaghn pfedla")
    name, group, by, rounds, at, weights = _recorded("weights", source, column, row, seed, round)
    if layer not in ("all", *weights):
        raise ValueError(f"layer {layer!r} has no weights; there are {', '.join(weights)}, and all")
    chosen = weights[layer] if layer in weights else np.mean(list(weights.values()), 0)
    fig, (left, right) = plots.panels(2, sharey=False)
    where = "All layers" if layer == "all" else f"Layer {layer}"
    _draw_weights(chosen[at], left).set_title(f"{where}, round {rounds[at]}")
    course = pd.DataFrame([analysis.shares(matrix, group) for matrix in chosen])
    course = course.rename(columns=plots.MEASURE_LABELS)
    course = course.assign(rounds=rounds).melt("rounds", var_name="row").dropna()
    _mark(plots.curves(course, right, y="Mean weight"), rounds[at])
    said = (
        f"{name}, seed {seed}: weights of the aggregation after round {rounds[at]}; "
        f"the colours end at the largest weight on another client. Clients are similar by {by}."
    )
    by_layer = {key: analysis.shares(each[at], group) for key, each in weights.items()}
    shown = int(rounds[at])
    code = _call("collaboration", source, column, row=row, seed=seed, layer=layer, round=shown)
    table = pd.DataFrame(by_layer).T.round(4).rename(columns=plots.MEASURE_LABELS)
    return Shown(fig, said, table, code)


def _draw_weights(weights: np.ndarray, ax: Axes) -> Axes:
    """A heat map of weights (K, K); its colours end at the largest one on another client."""
    largest = float(weights[~np.eye(len(weights), dtype=bool)].max()) or None
    ticks = _sparse_ticks(len(weights))
    plots.heat(weights, ax, vmin=0, vmax=largest, cbar_kws={"extend": "max"}, **ticks)
    return ax


def _mark(ax: Axes, round: int) -> None:
    """A dotted line at the round that is shown beside this panel."""
    ax.axvline(round, color="0.6", lw=0.8, ls=":")


def embedding(
    source: str | None, column: str, row: str | None, seed: int, round: int | None = None
) -> Shown:
    """What the server knows clients by: t-SNE of their embeddings, and how well they cluster.

    Left, the embeddings at one round in the plane; right, over all recorded rounds, how well
    clients that are alike lie together.

    Parameters
    ----------
    source, column, row, seed, round
        As for `collaboration`.

    Raises
    ------
    ValueError
        If there is no such run, or it did not record embeddings.
    """
    if row is None or source is None or column is None:
        return _missing("embeddings of clients", "./run_all.sh --paper pfedhn")
    name, group, by, rounds, at, values = _recorded("embeddings", source, column, row, seed, round)
    vectors = values["v"]  # (E, K, d)
    fig, (left, right) = plots.panels(2, sharey=False)
    plane = _tsne(vectors[at].tobytes(), vectors.shape[1:], vectors.dtype.str)
    points = pd.DataFrame(plane, columns=["x", "y"]).assign(group=group)
    plots.embedding(points, left).set_title(f"Round {rounds[at]}, by {by}")
    said = (
        f"{name}, seed {seed}: t-SNE of {len(group)} embeddings of {vectors.shape[2]} "
        f"numbers, coloured by {by}."
    )
    kinds, table = len(np.unique(group)), None
    if 1 < kinds < len(group):
        near = max(1, min(4, len(group) // kinds - 1))
        found = [analysis.clustering(each, group, near, 200) for each in vectors]
        table = pd.DataFrame(found, index=rounds)
        course = table[["silhouette", "purity", "chance"]].assign(rounds=rounds)
        course = course.melt("rounds", var_name="row")
        _mark(plots.curves(course, right, y="How alike clients cluster"), rounds[at])
        table = table.rename_axis("rounds").round(3)
        said += (
            f" Purity: share of a client's {near} nearest that are alike; silhouettes and purity "
            "in all dimensions."
        )
    shown = int(rounds[at])
    code = _call("embedding", source, column, row=row, seed=seed, round=shown)
    return Shown(fig, said, table, code)


@functools.lru_cache(maxsize=64)  # half a second for a hundred clients
def _tsne(raw: bytes, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """t-SNE of an array, given as its bytes: the cache needs a key that can be hashed."""
    return analysis.tsne(np.frombuffer(raw, dtype).reshape(shape), min(5.0, (shape[0] - 1) / 3))


# Each view over partitions and results by its name, with what its controls offer.
VIEWS: dict[str, tuple[Callable[..., Shown], Callable[[Mapping[str, Any]], Choices]]] = {
    "partition": (partition, partition_choices),
    "runs": (runs, runs_choices),
    "clients": (clients, clients_choices),
    "collaboration": (collaboration, functools.partial(probe_choices, "weights")),
    "embedding": (embedding, functools.partial(probe_choices, "embeddings")),
}
