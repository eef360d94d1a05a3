"""What the explorers of notebooks/explore.ipynb show: a function for each, called a view.

A view takes what was chosen and returns a `Shown`; it trains nothing. Beside it stands a function
`..._choices(wanted)`, which says what the controls of the view offer, given what is chosen so far.
`widgets` puts the two together; a script calls the view alone. The line of code in each `Shown` is
that call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pfl_core.analysis import plots
from pfl_core.analysis import stats as analysis
from pfl_core.analysis.select import pick
from pfl_core.data import partition as partitions
from pfl_core.data import pools as data
from pfl_core.engine import probes
from pfl_core.experiments import committed, metrics
from pfl_core.experiments.experiment import Experiment
from pfl_core.explore import sources
from pfl_core.papers import presets

# Values that sliders offer for arguments of a partition.
KNOBS = {
    "alpha": (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 100.0),
    "k": range(1, 21),
    "groups": (1, 2, 5, 10),
}
# Fields of every Experiment of the panel that trains.
TRAINED = dict(
    partition="dirichlet",
    partition_args={"alpha": 0.1},
    model="lenet",
    batch=10,
    lr=0.05,
    max_samples=200,
)


class Shown(NamedTuple):
    """What a view returns."""

    figure: Figure | None  # None where there is nothing to draw
    said: str  # a sentence or two on what is to be seen
    table: pd.DataFrame | None
    code: str  # a line of Python that gives the figure, or its numbers, again


class Choice(NamedTuple):
    """What a control offers."""

    options: tuple  # in their order
    value: Any  # the option that is chosen; a tuple of options for the kind "several"
    kind: str  # "one", "several" or "slide": a list, a list for several options, a slider


class Choices(dict):
    """The controls of a view, {name: Choice}, filled from the first to the last.

    Parameters
    ----------
    wanted : mapping
        {name: value} to choose. Where a value is not among the options, the default is chosen.
    """

    def __init__(self, wanted: Mapping[str, Any]):
        super().__init__()
        self.wanted = wanted

    def offer(self, name: str, options: Iterable, default: Any = None, kind: str = "one") -> Any:
        """Add a control and return what is chosen.

        Parameters
        ----------
        name : str
            The view's parameter that the control sets.
        options : iterable
            What can be chosen.
        default : object, optional
            What is chosen where the wanted value is no option. Without a default that is the first
            option, and all of them for the kind "several".
        kind : {"one", "several", "slide"}
            As for `Choice`.

        Returns
        -------
        object
            An option, or None if there are none; for "several" a tuple of options.
        """
        options, want = tuple(options), self.wanted.get(name)
        if kind == "several":
            value = tuple(option for option in options if option in (want or ()))
            value = value or tuple(options if default is None else default)
        else:
            value = next((v for v in (want, default, *options) if v in options), None)
        self[name] = Choice(options, value, kind)
        return value

    @property
    def values(self) -> dict[str, Any]:
        """{name: what is chosen}."""
        return {name: choice.value for name, choice in self.items()}


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _call(view: str, source: str, column: str, **values: Any) -> str:
    """The line of code that calls a view over results with these values."""
    arguments = _arguments(dict(source=source, column=column) | values)
    return f"from pfl_core.explore import views; views.{view}({arguments}).figure"


# -- who holds what --------------------------------------------------------------------------------


def partition_choices(wanted: Mapping[str, Any]) -> Choices:
    """Controls of `partition`: dataset, scheme, the scheme's own arguments, clients, seed.

    Of a scheme's arguments, alpha, k (classes of a client) and groups have controls.
    """
    choices = Choices(wanted)
    name = choices.offer("dataset", data.list_datasets(), "digits")
    scheme = choices.offer("scheme", partitions.list_partitions(), "dirichlet")
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
    fields = dict(
        dataset=dataset, partition=scheme, partition_args=args, clients=clients, seed=seed
    )
    counts = committed.label_counts(Experiment(**fields))
    distance = analysis.total_variation(counts, counts)
    fig, (left, right) = plots.panels(2, sharey=False)
    plots.label_distribution(counts, left).set_title("Training samples (area)")
    ticks = _sparse_ticks(clients)
    plots.heat(distance, right, "Client", "Client", vmin=0, vmax=1, **ticks)
    right.set_title("Total variation of labels")
    said = (
        f"{clients} clients of {dataset}: {counts.sum()} training samples in {counts.shape[1]} "
        "classes. Distances are total variations, 0 for equal shares of labels and 1 for no class "
        "in common."
    )
    code = (
        "from pfl_core import Experiment; "
        "from pfl_core.experiments.committed import label_counts; "
        f"label_counts(Experiment({_arguments(fields)}))"
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
    return pd.DataFrame(lines).agg(["min", "mean", "max"]).T.round(2)


def _sparse_ticks(clients: int) -> dict[str, int]:
    """Options of a heat map of clients by which about ten of them are numbered on each axis."""
    return dict.fromkeys(("xticklabels", "yticklabels"), max(1, clients // 10))


# -- finished results ------------------------------------------------------------------------------


def _offer_column(choices: Choices, array: str = "") -> pd.DataFrame:
    """Offer "source" and "column", the first controls of every view over results.

    Returns the rows of the column that is chosen, of runs that have kept `array` if one is named.
    """
    frames = {source: sources.rows(source) for source in sources.names()}
    if array:
        kept = {source: _keeping(frame, array) for source, frame in frames.items()}
        frames = {source: frame for source, frame in kept.items() if len(frame)}
    source = choices.offer("source", frames)
    frame = frames.get(source, pd.DataFrame(columns=metrics.ROW_COLUMNS))
    return frame[frame.column == choices.offer("column", frame.column.unique())]


def _keeping(frame: pd.DataFrame, array: str) -> pd.DataFrame:
    """The rows of runs that have kept this array."""
    runs = [run for run in frame.run.unique() if array in committed.arrays_named(run)]
    return frame[frame.run.isin(runs)]


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
    """Controls of `runs`: source, column, rows, metric, when, seeds, smoothing."""
    choices = Choices(wanted)
    frame = _offer_column(choices)
    rows = frame.row.unique()
    choices.offer("rows", rows, rows[:6], "several")
    choices.offer("metric", [m for m in sources.METRICS if m in set(frame.metric)])
    choices.offer("when", frame.when.unique())
    choices.offer("seeds", sorted(frame.seed.unique().tolist()), kind="several")
    choices.offer("smoothing", range(1, 11), 1, "slide")
    return choices


def runs(
    source: str | None,
    column: str,
    rows: Sequence[str] = (),
    metric: str = "acc_pct",
    when: str = "before",
    seeds: Sequence[int] = (),
    smoothing: int = 1,
) -> Shown:
    """Curves over rounds, and how accuracies of clients spread in the last round.

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
    when : {"before", "after"}
        Whether models were evaluated before or after the round's local training.
    smoothing : int
        Each point is the mean of so many evaluations.

    Raises
    ------
    ValueError
        If the results have no such rows.
    """
    if source is None:
        return _missing("anything", _TWO_RUNS)
    chosen = dict(rows=rows, metric=metric, when=when, seeds=seeds, smoothing=smoothing)
    code = _call("runs", source, column, **chosen)
    frame = _rows_of(source, column).query("when == @when and split == 'test'")
    frame = frame[frame.row.isin(rows or frame.row) & frame.seed.isin(seeds or frame.seed)]
    series = frame[frame.metric == metric]
    if series.empty:
        raise ValueError(
            f"no {metric} {when!r} of {rows or 'any row'}, seeds {seeds or 'any'}, "
            f"in {column!r} of {source!r}"
        )
    fig, (left, right) = plots.panels(2, sharey=False)
    plots.curves(analysis.smooth(series, smoothing), left, y=sources.METRICS[metric])
    _draw_last_round(frame, when, right)
    moment = "models as served" if when == "before" else "after local training"
    said = f"{sources.METRICS[metric]}, {moment}, {column}; bands: seeds."
    return Shown(fig, said, _last_and_best(frame, when, metric), code)


def _draw_last_round(frame: pd.DataFrame, when: str, ax: Axes) -> None:
    """How accuracies of clients spread in the last round of each run."""
    last = frame[frame["rounds"] == frame.groupby("run")["rounds"].transform("max")]
    heads = last.drop_duplicates(["run", "row"])
    each = [
        committed.accuracies(head.run, when, head.rounds).assign(row=head.row)
        for head in heads.itertuples()
    ]
    wide = last.pivot_table(index="row", columns="metric", values="value")
    wide = wide.reindex(heads.row.unique())
    plots.ranges(wide, ax, pd.concat(each)).set_title("Clients in the last round")


def _last_and_best(frame: pd.DataFrame, when: str, metric: str) -> pd.DataFrame:
    """A line for each row: how many seeds, and their means of the last and the best value."""
    last = pick(frame, "last", when, metric=metric).groupby("row", sort=False)
    best = pick(frame, "best_test", when, metric=metric).groupby("row", sort=False)
    columns = {
        "seeds": last.seed.nunique(),
        "last": last.value.mean(),
        "best": best.value.mean(),
        "round of best": best["rounds"].mean(),
    }
    return pd.DataFrame(columns).round(2).rename_axis(None)


def clients_choices(wanted: Mapping[str, Any]) -> Choices:
    """Controls of `clients`: source, column, first, second, when, select, seed.

    Only runs that have kept the accuracy of every client are offered.
    """
    choices = Choices(wanted)
    frame = _offer_column(choices, "n/test")
    names = frame.row.unique()
    first = choices.offer("first", names, "fedavg")
    second = choices.offer("second", [name for name in names if name != first])
    choices.offer("when", frame.when.unique())
    validated = ["best_val"] if "val" in set(frame.split) else []
    choices.offer("select", ["last", *validated, "best_test"])
    seeds = [set(frame[frame.row == name].seed.tolist()) for name in (first, second)]
    choices.offer("seed", sorted(set.intersection(*seeds)))
    return choices


def clients(
    source: str | None,
    column: str,
    first: str,
    second: str | None,
    when: str = "before",
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
    if second is None:
        return _missing("the accuracy of every client under two methods", _TWO_RUNS)
    frame = _rows_of(source, column).query("seed == @seed and row in (@first, @second)")
    found = {run.row: run for run in pick(frame, select, when).itertuples()}
    if absent := [row for row in (first, second) if row not in found]:
        raise ValueError(
            f"no run of {', '.join(absent)} with seed {seed} in {column!r} of {source!r}"
        )
    pair = [found[first], found[second]]
    x, y = (committed.accuracies(run.run, when, run.rounds) for run in pair)
    both = x.merge(y, on="client")
    a, b = both.acc_pct_x.to_numpy(), both.acc_pct_y.to_numpy()
    names = [plots.label(first), plots.label(second)]
    fig, (left, right) = plots.panels(2, sharey=False)
    axes = [f"{name}: accuracy (%)" for name in names]
    plots.points(both, left, "acc_pct_x", "acc_pct_y", None, *axes)
    left.axline((a.mean(), a.mean()), slope=1, color="0.7", lw=0.8, zorder=0)
    plots.leads(a, b, right, (first, second))
    table = pd.DataFrame([analysis.fairness(acc) for acc in (a, b)], names).round(2)
    table.insert(0, "rounds", [run.rounds for run in pair])
    code = _call(
        "clients", source, column, first=first, second=second, when=when, select=select, seed=seed
    )
    return Shown(fig, _lead(names, analysis.paired(b, a)), table, code)


def _lead(names: Sequence[str], test: Mapping[str, float]) -> str:
    """The sentence on what `analysis.paired` found."""
    return (
        f"{names[1]} is ahead of {names[0]} by {test['difference']:.2f} points on average and on "
        f"{100 * test['better']:.0f} % of {test['n']} clients; Wilcoxon p = {test['p']:.3g}, over "
        "the clients of one seed."
    )


# -- what probes recorded --------------------------------------------------------------------------


def probe_choices(probe: str, wanted: Mapping[str, Any]) -> Choices:
    """Controls of a view over a probe: source, column, row, seed, layer (of weights), round.

    Only runs that recorded this probe are offered.
    """
    choices = Choices(wanted)
    frame = _offer_column(choices, f"probe/{probe}")
    frame = frame[frame.row == choices.offer("row", frame.row.unique())]
    seed = choices.offer("seed", sorted(frame.seed.unique().tolist()))
    rounds, values = (), {}
    if found := frame.run[frame.seed == seed].unique().tolist():
        rounds, values = probes.read(committed.arrays_of(found[0]), probe)
    if probe == "weights":
        choices.offer("layer", dict.fromkeys(["all", *values]) if values else ())
    choices.offer("round", map(int, rounds), int(rounds[-1]) if len(rounds) else None, "slide")
    return choices


class _Recorded(NamedTuple):
    """What a probe recorded of one run."""

    group: np.ndarray  # (K,) which clients are alike
    by: str  # and by what: see `kin`
    rounds: np.ndarray  # (E,) the recorded rounds
    at: int  # the index of the round that is shown
    values: dict[str, np.ndarray]  # {key: (E, ...)}


def _recorded(
    probe: str, source: str, column: str, row: str, seed: int, round: int | None
) -> _Recorded:
    """A run's records of a probe; the recorded round nearest to `round` is shown, None: the last.

    ValueError if there is no such run, or it did not record the probe.
    """
    found = _rows_of(source, column).query("row == @row and seed == @seed")
    if found.empty:
        raise ValueError(f"no run of {row!r} with seed {seed} in {column!r} of {source!r}")
    rounds, values = probes.read(committed.arrays_of(found.run.iloc[0]), probe)
    at = int(np.abs(rounds - (rounds[-1] if round is None else round)).argmin())
    group, by = kin(found.iloc[0])
    return _Recorded(group, by, rounds, at, values)


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
            groups = len(np.unique(data.load(run.dataset).extra["coarse"]))
            return np.arange(clients) * groups // clients, "coarse class"
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
    if row is None:
        return _missing("collaboration weights", "./run_all.sh --paper fedaghn pfedla")
    group, by, rounds, at, weights = _recorded("weights", source, column, row, seed, round)
    if layer not in ("all", *weights):
        raise ValueError(f"layer {layer!r} has no weights; there are {', '.join(weights)}, and all")
    chosen = weights[layer] if layer in weights else np.mean(list(weights.values()), 0)
    fig, (left, right) = plots.panels(2, sharey=False)
    _draw_weights(chosen[at], left).set_title(f"Layer {layer}, round {rounds[at]}")
    course = pd.DataFrame([analysis.shares(matrix, group) for matrix in chosen])
    course = course.assign(rounds=rounds).melt("rounds", var_name="row").dropna()
    _mark(plots.curves(course, right, y="Mean weight"), rounds[at])
    said = (
        f"{plots.label(row)}, seed {seed}: weights of the aggregation after round {rounds[at]}; "
        "the colours end at the largest weight on another client. Similar clients are alike by "
        f"{by}."
    )
    by_layer = {name: analysis.shares(matrices[at], group) for name, matrices in weights.items()}
    shown = int(rounds[at])
    code = _call("collaboration", source, column, row=row, seed=seed, layer=layer, round=shown)
    return Shown(fig, said, pd.DataFrame(by_layer).T.round(4), code)


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
    if row is None:
        return _missing("embeddings of clients", "./run_all.sh --paper pfedhn")
    group, by, rounds, at, values = _recorded("embeddings", source, column, row, seed, round)
    vectors = values["v"]  # (E, K, d)
    fig, (left, right) = plots.panels(2, sharey=False)
    plane = _tsne(vectors[at].tobytes(), vectors.shape[1:], vectors.dtype.str)
    points = pd.DataFrame(plane, columns=["x", "y"]).assign(group=group)
    plots.embedding(points, left).set_title(f"Round {rounds[at]}, by {by}")
    said = (
        f"{plots.label(row)}, seed {seed}: t-SNE of {len(group)} embeddings of {vectors.shape[2]} "
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


# -- training --------------------------------------------------------------------------------------


def training_choices(wanted: Mapping[str, Any]) -> Choices:
    """Controls of the panel that trains: method, dataset, clients, rounds, seed."""
    choices = Choices(wanted)
    choices.offer("method", presets.COMPARED, "fedper")
    choices.offer("dataset", data.list_datasets(), "digits")
    choices.offer("clients", (2, 5, 10, 20, 50, 100), 10, "slide")
    choices.offer("rounds", (2, 5, 10, 20, 50, 100, 200, 500, 1000), 20, "slide")
    choices.offer("seed", range(10), 0, "slide")
    return choices


def experiment(method: str, dataset: str, clients: int, rounds: int, seed: int = 0) -> Experiment:
    """What the panel trains: a LeNet on Dir(0.1), with at most 200 samples of each client.

    The method is set as in the comparison of all methods; `presets.COMPARED` has their names.
    """
    base = Experiment(dataset=dataset, clients=clients, rounds=rounds, seed=seed, **TRAINED)
    return base.but(**presets.COMPARED[method](base))


def training(experiment: Experiment, curve: pd.DataFrame | None, said: str = "") -> Shown:
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
        names = {"before": "as served", "after": "after local training"}
        plots.curves(curve.assign(row=curve.when.map(names)), ax)
        ax.set_title(f"{plots.label(experiment.method)} on {experiment.dataset}")
    return Shown(fig, said, None, f"from pfl_core import Experiment, run; run({experiment!r})")


# Each view over partitions and results by its name, with what its controls offer.
VIEWS: dict[str, tuple[Callable[..., Shown], Callable[[Mapping[str, Any]], Choices]]] = {
    "partition": (partition, partition_choices),
    "runs": (runs, runs_choices),
    "clients": (clients, clients_choices),
    "collaboration": (collaboration, functools.partial(probe_choices, "weights")),
    "embedding": (embedding, functools.partial(probe_choices, "embeddings")),
}
