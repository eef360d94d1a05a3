"""What the explorers of notebooks/explore.ipynb show, as pure functions: chosen values in, a `Shown` out; nothing is trained.

Each has a function `..._choices(values) -> Choices` beside it: what its controls offer, given what is chosen so far.
`widgets` puts the two together; a script calls the first one alone, by the line of code that every view shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
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

KNOBS = {
    "alpha": (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 100.0),
    "k": range(1, 21),
    "groups": (1, 2, 5, 10),
}
TRAINED = dict(
    partition="dirichlet",
    partition_args={"alpha": 0.1},
    model="lenet",
    batch=10,
    lr=0.05,
    max_samples=200,
)


class Shown(NamedTuple):
    """A view: its figure (None where there is nothing to draw), a sentence, a table, and a line of Python that gives it again."""

    figure: Figure | None
    said: str
    table: pd.DataFrame | None
    code: str


class Choice(NamedTuple):
    """What a control offers: options in order, what is chosen of them, and whether as "one", "several", or on a "slide"."""

    options: tuple
    value: Any
    kind: str


class Choices(dict):
    """{name: Choice}, filled from the first control to the last: a value wanted is taken where it is among the options."""

    def __init__(self, wanted: Mapping[str, Any]):
        super().__init__()
        self.wanted = wanted

    def offer(self, name: str, options: Iterable, default: Any = None, kind: str = "one") -> Any:
        """Add a control and return what is chosen: the value wanted, else `default`, else the first option (None without any)."""
        options, want = tuple(options), self.wanted.get(name)
        if kind == "several":
            value = tuple(o for o in options if o in (want or ())) or tuple(
                options if default is None else default
            )
        else:
            value = next((v for v in (want, default, *options) if v in options), None)
        self[name] = Choice(options, value, kind)
        return value

    @property
    def values(self) -> dict[str, Any]:
        """{name: what is chosen}."""
        return {name: choice.value for name, choice in self.items()}


def _call(view: str, **values: Any) -> str:
    return f"from pfl_core.explore import views; views.{view}({', '.join(f'{k}={v!r}' for k, v in values.items())}).figure"


# -- who holds what ------------------------------------------------------------------------------------------------------


def partition_choices(wanted: Mapping[str, Any]) -> Choices:
    """dataset, scheme, clients, seed and, where the scheme has them, alpha, k (classes a client) and groups."""
    c = Choices(wanted)
    name = c.offer("dataset", data.list_datasets(), "digits")
    scheme = c.offer("scheme", partitions.list_partitions(), "dirichlet")
    for knob in KNOBS.keys() & (known := partitions.arguments(scheme)).keys():
        legal = KNOBS[knob] if knob != "k" or name not in ("digits", "cifar10") else range(1, 11)
        c.offer(knob, legal, 2 if known[knob].default is None else known[knob].default, "slide")
    c.offer("clients", range(2, 101), 20, "slide")
    c.offer("seed", range(20), 0, "slide")
    return c


def partition(dataset: str, scheme: str, clients: int, seed: int = 0, **args: Any) -> Shown:
    """Who holds which training samples, and the total variation between clients; args are the scheme's.

    Raises ValueError for what the scheme cannot do, DatasetMissing for data that are not here.
    """
    fields = dict(
        dataset=dataset, partition=scheme, partition_args=args, clients=clients, seed=seed
    )
    counts = committed.label_counts(Experiment(**fields))
    distance = analysis.total_variation(counts, counts)
    fig, (left, right) = plots.panels(2, sharey=False)
    plots.label_distribution(counts, left).set_title("Training samples (area)")
    every = max(1, clients // 10)
    plots.heat(
        distance, right, "Client", "Client", vmin=0, vmax=1, xticklabels=every, yticklabels=every
    )
    right.set_title("Total variation of labels")
    others = distance[~np.eye(clients, dtype=bool)].reshape(clients, clients - 1)
    lines = {"training samples": counts.sum(1), "classes": (counts > 0).sum(1)}
    lines |= {
        "distance to the nearest client": others.min(1),
        "mean distance to the others": others.mean(1),
    }
    lines["distance to all data together"] = analysis.total_variation(
        counts, counts.sum(0, keepdims=True)
    )[:, 0]
    table = pd.DataFrame(lines).agg(["min", "mean", "max"]).T.round(2)
    said = (
        f"{clients} clients of {dataset}: {counts.sum()} training samples in {counts.shape[1]} classes. Distances are total "
        "variations, 0 for equal shares of labels and 1 for no class in common."
    )
    arguments = ", ".join(f"{k}={v!r}" for k, v in fields.items())
    imports = (
        "from pfl_core import Experiment; from pfl_core.experiments.committed import label_counts"
    )
    code = f"{imports}; label_counts(Experiment({arguments}))"
    return Shown(fig, said, table, code)


# -- finished results ----------------------------------------------------------------------------------------------------


def _cell(c: Choices, array: str = "") -> pd.DataFrame:
    # The first controls of every view over results; returns the rows of the column chosen, of runs that have kept `array`.
    frames = {source: sources.rows(source) for source in sources.names()}
    if array:
        kept = {
            s: [run for run in f.run.unique() if array in committed.arrays_named(run)]
            for s, f in frames.items()
        }
        frames = {s: f[f.run.isin(kept[s])] for s, f in frames.items() if kept[s]}
    source = c.offer("source", frames)
    frame = frames.get(source, pd.DataFrame(columns=metrics.ROW_COLUMNS))
    return frame[frame.column == c.offer("column", frame.column.unique())]


def _missing(what: str, code: str) -> Shown:
    return Shown(
        None,
        f"Nothing to show yet: no finished run here has kept {what}. This line computes some.",
        None,
        code,
    )


_TWO = "from pfl_core import Experiment, grid, sweep; sweep(grid(Experiment(rounds=20), {m: {'method': m} for m in ('fedavg', 'fedper')}))"


def runs_choices(wanted: Mapping[str, Any]) -> Choices:
    """source, column, rows (several), metric, when, seeds (several), smoothing (evaluations)."""
    c = Choices(wanted)
    frame = _cell(c)
    c.offer("rows", frame.row.unique(), frame.row.unique()[:6], "several")
    c.offer("metric", [m for m in sources.METRICS if m in set(frame.metric)])
    c.offer("when", frame.when.unique())
    c.offer("seeds", sorted(frame.seed.unique().tolist()), kind="several")
    c.offer("smoothing", range(1, 11), 1, "slide")
    return c


def runs(source, column, rows=(), metric="acc_pct", when="before", seeds=(), smoothing=1) -> Shown:
    """Curves over rounds, each point the mean of the last `smoothing` evaluations, and how clients spread in the last round.

    source, column: as `sources` and its rows name them; rows, seeds: which of them, () for all. ValueError for what is not there.
    """
    if source is None:
        return _missing("anything", _TWO)
    values = dict(
        source=source,
        column=column,
        rows=rows,
        metric=metric,
        when=when,
        seeds=seeds,
        smoothing=smoothing,
    )
    frame = _rows_of(source, column).query("when == @when and split == 'test'")
    frame = frame[frame.row.isin(rows or frame.row) & frame.seed.isin(seeds or frame.seed)]
    series = frame[frame.metric == metric]
    if series.empty:
        raise ValueError(
            f"no {metric} {when!r} of {rows or 'any row'}, seeds {seeds or 'any'}, in {column!r} of {source!r}"
        )
    fig, (left, right) = plots.panels(2, sharey=False)
    plots.curves(analysis.smooth(series, smoothing), left, y=sources.METRICS[metric])
    last = frame[frame["round"] == frame.groupby("run")["round"].transform("max")]
    heads = last.drop_duplicates(["run", "row"])
    each = [
        committed.accuracies(v.run, when, v.round).assign(row=v.row) for v in heads.itertuples()
    ]
    wide = last.pivot_table(index="row", columns="metric", values="value").reindex(
        heads.row.unique()
    )
    plots.ranges(wide, right, pd.concat(each)).set_title("Clients in the last round")
    ends, tops = (
        pick(frame, s, when, metric=metric).groupby("row", sort=False)
        for s in ("last", "best_test")
    )
    table = pd.DataFrame(
        {"seeds": ends.seed.nunique(), "last": ends.value.mean(), "best": tops.value.mean()}
    )
    table["round of best"] = tops["round"].mean()
    said = f"{sources.METRICS[metric]}, {'models as served' if when == 'before' else 'after local training'}, {column}; bands: seeds."
    return Shown(fig, said, table.round(2).rename_axis(None), _call("runs", **values))


def clients_choices(wanted: Mapping[str, Any]) -> Choices:
    """source, column, first and second (rows), when, select, seed: over runs that have kept every client's accuracy."""
    c = Choices(wanted)
    frame = _cell(c, "n/test")
    names = frame.row.unique()
    first = c.offer("first", names, "fedavg")
    second = c.offer("second", [n for n in names if n != first])
    c.offer("when", frame.when.unique())
    c.offer(
        "select",
        [
            s
            for s in ("last", "best_val", "best_test")
            if s != "best_val" or "val" in set(frame.split)
        ],
    )
    c.offer(
        "seed",
        sorted(
            set.intersection(*(set(frame[frame.row == n].seed.tolist()) for n in (first, second)))
        ),
    )
    return c


def clients(source, column, first, second, when="before", select="last", seed=0) -> Shown:
    """Two methods on the same clients: accuracy against accuracy, who is ahead by how much, and the paired statistics.

    select: the round, as for `select.pick`. ValueError for what is not there, KeyError for runs without arrays.
    """
    if second is None:
        return _missing("the accuracy of every client under two methods", _TWO)
    frame = _rows_of(source, column).query("seed == @seed and row in (@first, @second)")
    found = {v.row: v for v in pick(frame, select, when).itertuples()}
    if absent := [name for name in (first, second) if name not in found]:
        raise ValueError(
            f"no run of {', '.join(absent)} with seed {seed} in {column!r} of {source!r}"
        )
    parts = [
        committed.accuracies(found[name].run, when, found[name].round) for name in (first, second)
    ]
    both, names = parts[0].merge(parts[1], on="client"), [plots.label(first), plots.label(second)]
    a, b = both.acc_pct_x.to_numpy(), both.acc_pct_y.to_numpy()
    fig, (left, right) = plots.panels(2, sharey=False)
    plots.points(
        both, left, "acc_pct_x", "acc_pct_y", None, *(f"{name}: accuracy (%)" for name in names)
    )
    left.axline((a.mean(), a.mean()), slope=1, color="0.7", lw=0.8, zorder=0)
    plots.leads(a, b, right, (first, second))
    test = analysis.paired(b, a)
    said = (
        f"{names[1]} is ahead of {names[0]} by {test['difference']:.2f} points on average and on {100 * test['better']:.0f} % of "
        f"{test['n']} clients; Wilcoxon p = {test['p']:.3g}, over the clients of one seed."
    )
    table = pd.DataFrame([analysis.fairness(v) for v in (a, b)], names).round(2)
    table.insert(0, "round", [found[first].round, found[second].round])
    values = dict(
        source=source,
        column=column,
        first=first,
        second=second,
        when=when,
        select=select,
        seed=seed,
    )
    return Shown(fig, said, table, _call("clients", **values))


def _rows_of(source: str, column: str) -> pd.DataFrame:
    return sources.rows(source).query("column == @column")


# -- what probes recorded ------------------------------------------------------------------------------------------------


def probe_choices(probe: str, wanted: Mapping[str, Any]) -> Choices:
    """source, column, row, seed, layer (of weights), round: over runs that recorded this probe."""
    c = Choices(wanted)
    frame = _cell(c, f"probe/{probe}")
    frame = frame[frame.row == c.offer("row", frame.row.unique())]
    seed = c.offer("seed", sorted(frame.seed.unique().tolist()))
    found = frame.run[frame.seed == seed].unique()[:1]
    rounds, values = probes.read(committed.arrays_of(found[0]), probe) if len(found) else ((), {})
    if probe == "weights":
        c.offer("layer", dict.fromkeys(["all", *values]) if values else ())
    c.offer("round", map(int, rounds), int(rounds[-1]) if len(rounds) else None, "slide")
    return c


def _recorded(
    probe: str, source: str, column: str, row: str, seed: int, round: int | None
) -> tuple:
    # The run's group of each client and what they are alike by, the probe's rounds, the one nearest to `round`, and its values
    found = _rows_of(source, column).query("row == @row and seed == @seed")
    if found.empty:
        raise ValueError(f"no run of {row!r} with seed {seed} in {column!r} of {source!r}")
    rounds, values = probes.read(committed.arrays_of(found.run.iloc[0]), probe)
    at = int(np.abs(rounds - (rounds[-1] if round is None else round)).argmin())
    return *kin(found.iloc[0]), rounds, at, values


def kin(run: Any) -> tuple[np.ndarray, str]:
    """Which clients are alike, group (K,), and by what: the partition's own groups, else the class that a client has most of.

    run: a row of results. Where neither is known (no Experiment, or no data), all are of one group.
    """
    e, n = sources.experiment(run.run), int(run.n_clients)
    try:
        if run.partition == "groups":
            number = (e.partition_args if e else {}).get(
                "groups", partitions.arguments("groups")["groups"].default
            )
            return np.arange(n) * number // n, "group of the partition"
        if run.partition == "coarse":
            return np.arange(n) * len(
                np.unique(data.load(run.dataset).extra["coarse"])
            ) // n, "coarse class"
        if e:
            return committed.label_counts(e).argmax(1), "most frequent class"
    except data.DatasetMissing:
        pass
    return np.zeros(n, int), "nothing known of them"


def collaboration(source, column, row, seed, layer="all", round=None) -> Shown:
    """Who learns from whom: the weights (K, K) of a layer, or the mean of all, at a recorded round; those on a client itself, on
    alike and on other clients over all rounds. ValueError for what is not there."""
    if row is None:
        return _missing("collaboration weights", "./run_all.sh --paper fedaghn pfedla")
    alike, by, rounds, at, weights = _recorded("weights", source, column, row, seed, round)
    if layer not in ("all", *weights):
        raise ValueError(f"layer {layer!r} has no weights; there are {', '.join(weights)}, and all")
    shown = weights[layer] if layer in weights else np.mean(list(weights.values()), 0)
    off = shown[at][~np.eye(len(alike), dtype=bool)]
    fig, (left, right) = plots.panels(2, sharey=False)
    ticks = dict.fromkeys(("xticklabels", "yticklabels"), max(1, len(alike) // 10))
    plots.heat(
        shown[at], left, vmin=0, vmax=float(off.max()) or None, cbar_kws={"extend": "max"}, **ticks
    )
    left.set_title(f"Layer {layer}, round {rounds[at]}")
    course = pd.DataFrame([analysis.shares(w, alike) for w in shown]).assign(round=rounds)
    course = course.melt("round", var_name="row").dropna()
    plots.curves(course, right, y="Mean weight").axvline(rounds[at], color="0.6", lw=0.8, ls=":")
    said = (
        f"{plots.label(row)}, seed {seed}: weights of the aggregation after round {rounds[at]}; the colours end at the largest "
        f"weight on another client. Similar clients are alike by {by}."
    )
    values = dict(
        source=source, column=column, row=row, seed=seed, layer=layer, round=int(rounds[at])
    )
    table = pd.DataFrame(
        {name: analysis.shares(w[at], alike) for name, w in weights.items()}
    ).T.round(4)
    return Shown(fig, said, table, _call("collaboration", **values))


def embedding(source, column, row, seed, round=None) -> Shown:
    """What the server knows clients by: t-SNE of their embeddings at a recorded round, and how alike clients cluster over all.

    ValueError for what is not there."""
    if row is None:
        return _missing("embeddings of clients", "./run_all.sh --paper pfedhn")
    group, by, rounds, at, values = _recorded("embeddings", source, column, row, seed, round)
    v, kinds, table = values["v"], len(np.unique(group)), None
    fig, (left, right) = plots.panels(2, sharey=False)
    points = pd.DataFrame(
        _tsne(v[at].tobytes(), v.shape[1:], v.dtype.str), columns=["x", "y"]
    ).assign(group=group)
    plots.embedding(points, left).set_title(f"Round {rounds[at]}, by {by}")
    said = f"{plots.label(row)}, seed {seed}: t-SNE of {len(group)} embeddings of {v.shape[2]} numbers, coloured by {by}."
    if 1 < kinds < len(group):
        near = max(1, min(4, len(group) // kinds - 1))
        table = pd.DataFrame([analysis.clustering(x, group, near, 200) for x in v], index=rounds)
        long = (
            table[["silhouette", "purity", "chance"]]
            .assign(round=rounds)
            .melt("round", var_name="row")
        )
        plots.curves(long, right, y="How alike clients cluster").axvline(
            rounds[at], color="0.6", lw=0.8, ls=":"
        )
        table = table.rename_axis("round").round(3)
        said += f" Purity: share of a client's {near} nearest that are alike; silhouettes and purity in all dimensions."
    code = _call(
        "embedding", source=source, column=column, row=row, seed=seed, round=int(rounds[at])
    )
    return Shown(fig, said, table, code)


@functools.lru_cache(maxsize=64)  # half a second for a hundred clients
def _tsne(raw: bytes, shape: tuple[int, int], dtype: str) -> np.ndarray:
    return analysis.tsne(np.frombuffer(raw, dtype).reshape(shape), min(5.0, (shape[0] - 1) / 3))


# -- training ------------------------------------------------------------------------------------------------------------


def training_choices(wanted: Mapping[str, Any]) -> Choices:
    """method, dataset, clients, rounds, seed of the panel that trains."""
    c = Choices(wanted)
    c.offer("method", presets.COMPARED, "fedper")
    c.offer("dataset", data.list_datasets(), "digits")
    c.offer("clients", (2, 5, 10, 20, 50, 100), 10, "slide")
    c.offer("rounds", (2, 5, 10, 20, 50, 100, 200, 500, 1000), 20, "slide")
    c.offer("seed", range(10), 0, "slide")
    return c


def experiment(method: str, dataset: str, clients: int, rounds: int, seed: int = 0) -> Experiment:
    """What the panel trains: a method as in the comparison of all (`presets.COMPARED`), Dir(.1), a LeNet, at most 200 samples a client."""
    base = Experiment(dataset=dataset, clients=clients, rounds=rounds, seed=seed, **TRAINED)
    return base.but(**presets.COMPARED[method](base))


def training(e: Experiment, curve: pd.DataFrame | None, said: str = "") -> Shown:
    """A run as far as it is: curve has round, when, value (mean over clients of test accuracy, %)."""
    fig = None
    if curve is not None:
        fig, (ax,) = plots.panels(1)
        names = {"before": "as served", "after": "after local training"}
        plots.curves(curve.assign(row=curve.when.map(names)), ax).set_title(
            f"{plots.label(e.method)} on {e.dataset}"
        )
    return Shown(fig, said, None, f"from pfl_core import Experiment, run; run({e!r})")


VIEWS: dict[str, tuple[Callable[..., Shown], Callable[[Mapping[str, Any]], Choices]]] = {
    "partition": (partition, partition_choices),
    "runs": (runs, runs_choices),
    "clients": (clients, clients_choices),
    "collaboration": (collaboration, functools.partial(probe_choices, "weights")),
    "embedding": (embedding, functools.partial(probe_choices, "embeddings")),
}
