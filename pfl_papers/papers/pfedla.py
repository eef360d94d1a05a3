"""pFedLA and HeurpFedLA (Ma et al., CVPR 2022): Tables 1 to 3, Figures 1, 5, 6, 7.

Figures 2 to 4 are diagrams.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd

from pfl_core import models
from pfl_core.analysis.select import records, tuples
from pfl_core.analysis.stats import correlation, overlap
from pfl_core.analysis.verdicts import SMALL, Contrast
from pfl_core.engine.participation import participants
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.metrics import validated
from pfl_core.methods.pfedla import table3_megabytes
from pfl_core.util.percent import accuracy
from pfl_papers.evidence import committed
from pfl_papers.evidence.asks import Measure, Terms, matches
from pfl_papers.evidence.contrasts import Evidence, majority
from pfl_papers.papers import claims
from pfl_papers.papers.base import TUNING, Artefact, Number, Paper, Probed, Recorded, Scope, Sweep
from pfl_papers.papers.overrides import profile_of
from pfl_papers.papers.shown import At, Changes, Column, Shown, at, fields_at, rows_at, use

# -- what the paper shows --------------------------------------------------------------------------

DATA = {
    "EMNIST": "emnist-digits",
    "FMNIST": "fashion_mnist",
    "CIFAR-10": "cifar10",
    "CIFAR-100": "cifar100",
}
# Layers that Table 3 retains, in turn: its differences are their sizes [I].
RETAINED = {"EMNIST": ("fc", "fc1"), "CIFAR-10": ("fc1", "conv2", "fc")}
# Clients of Figure 5; the others have random labels.
KINDS = {0: "target itself", 1: "same 4 labels", 2: "3 labels shared"}
RANDOM = "random labels"
HEUR = "heurpfedla"
# Weights in Figure 7; the target is client 0.
WHOSE = ("target, on itself", "target, on each other", "all, on themselves")
ALL_LAYERS = "mean of all layers"
PERIODS = {"prior": (0.0, 0.1), "middle": (0.45, 0.55), "last": (0.9, 1.0)}  # of the rounds [C]


def _n(clients: int, *names: str) -> list[str]:
    return [f"{name}, N={clients}" for name in names]


COLUMNS = {
    f"{name}, N={n}": Column(d, {"clients": n}) for name, d in DATA.items() for n in (10, 100)
}
_EVERY = [*COLUMNS]
COLUMNS |= {name: Column(dataset) for name, dataset in DATA.items()}  # with the artefact's clients
_BOTH = ["EMNIST", "CIFAR-10"]
BASELINES = ("local", "fedavg", "perfedavg", "pfedme", "pfedhn", "fedbn", "fedrep", "fedfomo")
OWN_STATISTICS = ("local", "fedbn")  # methods that by definition share no BatchNorm statistics
METHODS = (*BASELINES, "pfedla", HEUR)
# quick: what it has time for where data are real; on digits the first column of all (`columns`).
SHOWN = {
    "table1": Shown(
        At(_EVERY, medium=_n(10, "CIFAR-10", "FMNIST", "EMNIST"), quick=_n(10, "CIFAR-10")), METHODS
    ),
    "table2": Shown(At(_EVERY, medium=_n(10, "EMNIST"), quick=_n(10, "FMNIST")), METHODS),
    "table3": Shown(_BOTH, [f"k={k}" for k in range(8)]),  # at medium those of `RETAINED`
    "fig1": Shown(["CIFAR-10"], ("layer-wise", "model-wise")),
    "fig5": Shown(At(_BOTH, medium=["CIFAR-10"]), ("pfedla",)),
    "fig6": Shown(At([*DATA], medium=["CIFAR-10", "FMNIST"]), ("pfedla",)),
    "fig7": Shown(_BOTH, ("pfedla",)),
}
# Ours, at full profiles: the figures of weights beside the chosen rate at one where no layer soon
# belongs to its client alone.
SLOW, SLOW_COLUMN = 0.5, "{}, rate 0.5"
SLOWLY = {"fig5": ("CIFAR-10",), "fig6": ("CIFAR-10", "FMNIST"), "fig7": ("EMNIST", "CIFAR-10")}
# In Table 2, whose clients all have every class, both methods at that rate, too; and in Table 1 on
# EMNIST, to see whether one rate serves both.
SLOW_ROWS = {f"{method} (rate {SLOW})": method for method in ("pfedla", HEUR)}
PLAIN = "pfedhn (plain SGD)"  # as Sec. 4.2 says of all experiments; the row pfedhn is as its code
SLOWER = {
    "table1": Shown(["EMNIST, N=10"], At([*SLOW_ROWS], quick=[])),
    "table2": Shown(SHOWN["table2"].columns, At([*SLOW_ROWS, PLAIN], quick=[])),
}
# Rows of ours for Table 1, other readings of what the paper leaves open: the other sign; the
# third-party code's outputs with its rate; with the paper's networks that rate alone, Per-FedAvg as
# its Algorithm 1 adapts (one step), also at FL-bench's beta, pFedMe with w scored, as its authors'
# code does, pFedHN with the optimiser of all others, and one client with as many images as ten have
# together, of all classes, which a global model is not expected to beat; and averaged BatchNorm
# statistics, with the paper's networks and ten clients of every method that can.
AVERAGED = {f"{m} (BatchNorm averaged)": m for m in METHODS if m not in OWN_STATISTICS}
_OPEN = ["pfedla (literal sign)", "pfedla (relu_norm, rate 0.005)"]
_ALONE = [f"{method} (BatchNorm averaged)" for method in ("fedavg", "pfedla")]
_MORE = ["pfedla (rate 0.005)", "perfedavg (one step)", "perfedavg (one step, beta 0.001)"]
_MORE += ["pfedme (w scored)", PLAIN, "centralized"]
OURS = Shown(SHOWN["table1"].columns, At([*_OPEN, *_MORE, *AVERAGED], quick=[*_OPEN, *_ALONE]))
# Rows of networks with BatchNorm, which have seven layers in place of five: those for CIFAR.
NORMALIZED = {"fedbn", "k=6", "k=7", *AVERAGED}
OF_TEN = {"centralized", PLAIN, *AVERAGED, *SLOW_ROWS} - set(_ALONE)  # rows with ten clients only

# -- settings --------------------------------------------------------------------------------------

# Sec. 4.1, 4.2 [P]: SGD, batch 32, lr .01 (CIFAR) or .005, 600 rounds of 10 epochs with 10 clients,
# 2500 of 20 with a tenth of 100.
# LeNet-16, with BatchNorm for CIFAR only, from Table 3's megabytes [I]; 600 images a client [I];
# BatchNorm statistics stay local [C].
# Fig. 1: 100 rounds [C].
# medium: 60 rounds, and a tenth of train as validation.
# quick and smoke [C]: half as many channels, larger rates, fewer rounds, epochs and images; "real"
# is quick on data that are not embedded.
SPLIT = "63/7/30"
COMMON: dict[str, Any] = dict(
    clients=10,
    partition="pfedla_noniid1",
    partition_args={"split": At(medium=SPLIT)},
    model="lenet",
    model_args={"bn": False, "kernels": At(quick=8, smoke=2)},
    rounds=At(600, medium=60, quick=20, smoke=2),
    epochs=At(10, quick=5, smoke=1),
    batch=At(32, quick=12, smoke=8),
    lr=At(0.005, quick=0.1, smoke=0.05),
    eval_every=At(10, medium=5, quick=4, smoke=1),
    max_samples=At(smoke=8),
)
_EMBEDDED = dict(partition_args={"split": At(quick="20/80", smoke=...)})
_CIFAR = dict(model_args={"bn": True}, lr=At(0.01, quick=...))
# quick on data that are not embedded
_REAL = dict(
    rounds=At(600, medium=60, quick=16, smoke=2),
    epochs=At(10, quick=3, smoke=1),
    batch=At(32, smoke=8),
    max_samples=At(quick=160, smoke=8),
)
MANY = dict(  # 100 clients
    epochs=At(20, quick=...),
    rounds=At(2500, medium=60, quick=...),
    participation=At(0.1, quick=...),
)
# What an artefact has otherwise than Table 1.
OTHERWISE: dict[str, dict[str, Any]] = {
    "table2": dict(partition="pfedla_noniid2"),
    "fig1": dict(
        clients=6,
        partition="pfedla_ring",
        rounds=At(100, medium=60, quick=...),
        eval_every=At(quick=1),
    ),
    "fig5": dict(clients=8, partition="pfedla_target", eval_every=At(quick=1)),
    "fig6": dict(clients=8, partition="pfedla_ring"),
}
# Rate of the hypernetworks [C]. Third-party code's 5e-3 belongs to its outputs (hn_out="relu_norm",
# heads from U(0, 1)); with softmax and heads that begin at zero it leaves all weights at 1/N.
# medium and paper: the one of `RATES` with the best validation accuracy, see `chosen_rate`; RATE
# stands for it until those runs are there. Those of medium (CIFAR-10 alone, N = 10, 60 rounds, seed
# 7) choose 50, the end of the grid. There, and at 5, clients soon keep all but BatchNorm's layers
# for themselves, as Local does; at 0.5 the deep weights still move at the end.
# quick [C]: 1, the power of ten with which weights leave 1/N but do not reach 1 within 20 rounds on
# digits; accuracy had no part in it.
RATE = 50.0
# Of `tuning`, on a seed that no artefact shows.
RATES, TUNING_SEED = (0.05, 0.5, 5.0, 50.0), 7
TRIED = {f"rate {rate:g}": rate for rate in RATES}  # rows of `tuning`
_RATE = At(RATE, quick=1.0)


def setting(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, Any]:
    """Fields of the Experiment that an artefact's runs vary; `clients` 0: as many as it has."""
    parts = [COMMON, _EMBEDDED if dataset.startswith("digits") else _REAL]
    parts += [_CIFAR] * dataset.startswith("cifar") + [MANY] * (clients > 10)
    own: dict[str, Any] = {"dataset": dataset} | ({"clients": clients} if clients else {})
    return fields_at(profile, *parts, OTHERWISE.get(artefact, {}), own)


# -- rows ------------------------------------------------------------------------------------------


def own(method: str = "pfedla", **args: Any) -> dict[str, Any]:
    """The row of pFedLA or HeurpFedLA; its weights are recorded.

    Parameters
    ----------
    method : str
        Which of the two.
    **args
        Other hyper-parameters than the profile's.
    """
    return use(method, **{"lr": _RATE} | args) | dict(record=("weights",))


def _plain(base: Experiment) -> dict[str, Any]:
    # It has one client a round, and as many visits in all as the others.
    visits = participants(base.participation, base.clients)
    return use("pfedhn") | dict(
        participation=1 / base.clients,
        eval_after=At(False, medium=True),
        rounds=base.rounds * visits,
        eval_every=base.eval_every * visits,
    )


def _pfedhn(base: Experiment) -> dict[str, Any]:
    local = dict(lr=0.005, momentum=0.9, weight_decay=5e-5, clip=50.0, plan="fresh")
    return _plain(base) | local


def _centralized(base: Experiment) -> dict[str, Any]:
    held = dict(k=100 if base.dataset == "cifar100" else 10, images=600 * base.clients)
    return use("fedavg") | dict(clients=1, partition_args=held)


def _averaged(row: Changes) -> Changes:
    return lambda base: (row(base) if callable(row) else row) | dict(buffers="average")


def _similar(by: str) -> Changes:
    # FedAGHN's graphs without strengths: softmax(5 cos) of the last updates over all clients, kept
    # as they are [C].
    return use("fedaghn", ablation="no_p", q0=5.0, h=0.0, by=by) | dict(record=("weights",))


# The paper gives no hyper-parameters of baselines ?: their files' defaults (Per-FedAvg alpha = beta
# = lr; pFedMe 15, 5, .01, 1; FedRep 1 + E epochs; FedFomo all others). quick [C]: what suits its
# rate, pFedMe with fewer inner steps.
ROWS: dict[str, Changes] = {
    "local": use("local"),
    "fedavg": use("fedavg"),
    "perfedavg": use("perfedavg", alpha=At(quick=0.01), passes=At(quick=2)),
    "pfedme": use("pfedme", inner_steps=At(quick=2), personal_lr=At(quick=0.05)),
    "pfedhn": _pfedhn,
    "fedbn": use("fedbn"),
    "fedrep": use("fedrep"),
    "fedfomo": lambda base: use("fedfomo", neighbours=base.clients) | dict(holdout=0.2),
    "pfedla": own(),
    HEUR: own(HEUR),
    "k=0": own(),
    "k=1": own(HEUR),
    **{f"k={k}": own(HEUR, retain_k=k) for k in range(2, 8)},
    "layer-wise": _similar("module"),
    "model-wise": _similar("model"),
    "pfedla (literal sign)": own(hn_sign="literal"),
    "pfedla (relu_norm, rate 0.005)": own(lr=0.005, hn_out="relu_norm"),
    "pfedla (rate 0.005)": own(lr=0.005),
    **{row: own(method, lr=SLOW) for row, method in SLOW_ROWS.items()},
    "perfedavg (one step)": use("perfedavg", adapt_steps=1),
    "perfedavg (one step, beta 0.001)": use("perfedavg", beta=0.001, adapt_steps=1),
    "pfedme (w scored)": use("pfedme", score="local"),
    PLAIN: _plain,
    "centralized": _centralized,
}
ROWS |= {label: _averaged(ROWS[method]) for label, method in AVERAGED.items()}


def made(profile: str, base: Experiment, shown: Shown) -> dict[str, dict]:
    """The rows that are shown, as changes to `base`, a column's Experiment, if it can have them."""
    normalized, ten = base.model_args["bn"], base.clients <= 10
    names = [row for row in at(profile, shown.rows) if normalized or row not in NORMALIZED]
    return rows_at(profile, base, ROWS, [row for row in names if ten or row not in OF_TEN])


def rows(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, dict]:
    """Rows of an artefact as changes to its `setting`."""
    base = Experiment(**setting(artefact, profile, dataset, clients))
    return made(profile, base, SHOWN[artefact])


# -- runs ------------------------------------------------------------------------------------------


def columns(scope: Scope, artefact: str) -> list[str]:
    """Labels of the columns, or panels, that an artefact has at a profile and data."""
    shown = SHOWN[artefact].labels(scope.profile)
    found = shown if scope.full else SHOWN[artefact].labels("paper")
    if scope.full and not scope.datasets:
        return found
    if scope.label == "digits":
        return found[:1]
    found = [c for c in found if scope.data(COLUMNS[c].dataset) == COLUMNS[c].dataset]
    return found if scope.full else [c for c in found if c in shown] or found[:1]


def sweeps(scope: Scope) -> list[Sweep]:
    """All runs of the paper, a Sweep for each column.

    The part "ours" of Tables 1 and 2 has the rows of `OURS` and `SLOWER`.
    """
    tried = tuning(scope)
    rate = chosen_rate(scope, tried)
    few = scope.pick(1, quick=2)  # seeds of Figure 7 and of our rows at quick
    found = [
        _columns_swept(scope, artefact, shown, rate, quick=few if artefact == "fig7" else 0)
        for artefact, shown in SHOWN.items()
    ]
    ours = _columns_swept(scope, "table1", OURS, rate, quick=few, part="ours")
    for artefact, shown in SLOWER.items():
        ours += _columns_swept(scope, artefact, shown, rate, quick=few, part="ours")
    slow = [_slowly(scope, artefact, column) for artefact, of in SLOWLY.items() for column in of]
    return [*tried, *itertools.chain(*found), *ours, *itertools.chain(*slow)]


def _slowly(scope: Scope, artefact: str, column: str) -> list[Sweep]:
    of = COLUMNS[column]
    there = scope.full and scope.data(of.dataset) == of.dataset
    base, named = scope.at(PAPER, artefact, of) if there else None, SLOW_COLUMN.format(column)
    return scope.sweep(PAPER, base, {"pfedla": own(lr=SLOW)}, {named: {}}, part="rate 0.5")


def _columns_swept(
    scope: Scope, artefact: str, shown: Shown, rate: float, quick: int, part: str = ""
) -> list[Sweep]:
    out = []
    for column in columns(scope, artefact):
        base = scope.at(PAPER, artefact, COLUMNS[column])
        if base is None or column not in shown.labels("paper"):
            continue
        some = made(scope.profile, base, shown)
        every_k = scope.profile != "medium" and scope.label in ("digits", "paper")
        if artefact == "table3" and not every_k:
            some = {row: some[row] for row in _printed_k(column)}
        some = {row: _at(rate, changes) for row, changes in some.items()}
        out += scope.sweep(PAPER, base, some, {column: {}}, quick=quick, part=part)
    return out


def _printed_k(name: str) -> list[str]:
    # Rows of Table 3 that the paper prints for a data set.
    return [f"k={k}" for k in range(len(RETAINED[name]) + 1)]


def _at(rate: float, row: dict[str, Any]) -> dict[str, Any]:
    # A row with the chosen rate, if RATE stands for it there.
    args = row.get("method_args", {})
    return row | {"method_args": args | {"lr": rate}} if args.get("lr") == RATE else row


def tuning(scope: Scope) -> list[Sweep]:
    """Runs that choose the hypernetworks' rate: pFedLA at those of `RATES`, at full profiles alone.

    Four classes a client, CIFAR-10, ten clients; with them the rate of third-party code with the
    outputs that it belongs to.
    """
    if not scope.full or scope.data("cifar10") != "cifar10":
        return []
    tags = dict(paper="pfedla", artefact=TUNING, profile=scope.profile)
    base = Experiment(**setting("table1", scope.profile, "cifar10", 10)).but(
        partition_args={"split": SPLIT}, tags=tags
    )
    tried = {row: own(lr=rate) for row, rate in TRIED.items()}
    tried["relu_norm, rate 0.005"] = own(lr=0.005, hn_out="relu_norm")
    return scope.sweep(PAPER, base, tried, {"CIFAR-10, N=10": {}}, seeds=(TUNING_SEED,))


def chosen_rate(scope: Scope, tried: list[Sweep]) -> float:
    """The rate of `RATES` with the best validation accuracy in the runs of `tuning`.

    RATE where there are none, or not all are finished.
    """
    cells = [experiment for sweep in tried for experiment in sweep.experiments()]
    rows = scope.finished(cells) if cells else None
    if rows is None:
        return RATE
    acc = _validated(rows)
    acc = acc[acc.index.isin(TRIED)]
    return TRIED[str(acc.idxmax())] if len(acc) else RATE


def _validated(rows: pd.DataFrame) -> pd.Series:
    # Validation accuracy (%) of what is served at the last round, by row.
    return validated(rows, ["row"], PAPER.report["when"], last=True)


# -- numbers from finished runs --------------------------------------------------------------------


def rate_course(found: list[Probed]) -> pd.DataFrame:
    """Mean weight of the clients on themselves at every recorded round of `tuning`.

    Columns: run, row, panel (a layer, or all), seed, rounds, value.
    """
    out = [pd.DataFrame(columns=["run", "row", "panel", "seed", "rounds", "value"])]
    for p in found:
        each = {layer: weights.diagonal(0, 1, 2).mean(1) for layer, weights in p.values.items()}
        lines = {ALL_LAYERS: np.mean(list(each.values()), 0)} | each
        for panel, line in lines.items():
            key = dict(run=p.run, row=p.row, panel=panel, seed=p.seed)
            out.append(pd.DataFrame(key | dict(rounds=p.rounds, value=line)))
    return pd.concat(out[len(out) > 1 :], ignore_index=True)


def rate_table(rows: pd.DataFrame, course: pd.DataFrame) -> pd.DataFrame:
    """Each row of `tuning`: validation accuracy (%) of what is served at the last round.

    It alone chooses among the rates of our own outputs. Beside it stands the mean weight of the
    clients on themselves in the middle and at the end; it is 1/N at the start.
    """
    names = list(dict.fromkeys(rows.row))
    out = pd.DataFrame({"validation accuracy": _validated(rows).reindex(names)})
    if out.empty:
        return out
    whole = course[course.panel == ALL_LAYERS]
    weights = whole.pivot(index="row", columns="rounds", values="value").reindex(out.index)
    rounds = weights.columns.to_numpy()
    end = rounds.max()
    half = rounds[np.abs(rounds - end / 2).argmin()]
    out = out.assign(**{"weight on itself, middle": weights[half], "at the end": weights[end]})
    ours = out[out.index.isin(TRIED)]["validation accuracy"]
    return out.assign(chosen=["best" * (row == ours.idxmax()) for row in out.index])


def client(rows: pd.DataFrame, k: int = 0) -> pd.DataFrame:
    """Test accuracy (%) as served of client k alone, and the mean of all clients (Fig. 1a).

    Columns: run, row, column, seed, rounds, panel, value, and level: what the clients' most common
    labels alone give, NaN for the one client.
    """
    names = ["run", "row", "column", "seed", "rounds", "panel", "value", "level"]
    out, ends = [pd.DataFrame(columns=names)], rows.groupby("run")["rounds"].max()
    for run in tuples(rows.drop_duplicates(["run", "row", "column"])):
        arrays = committed.arrays_of(run.run)
        there = arrays["rounds"] <= ends[run.run]
        acc = accuracy(arrays["before/test/correct"][there], arrays["n/test"])
        lines = {f"Client {k + 1}": acc[:, k], "Mean of all clients": acc.mean(1)}
        levels = dict(zip(lines, (np.nan, majority(run.run)), strict=True))
        for panel, line in lines.items():
            key = dict(run=run.run, row=run.row, column=run.column, seed=run.seed)
            key |= dict(panel=f"{run.column}: {panel}", level=levels[panel])
            out.append(pd.DataFrame(key | dict(rounds=arrays["rounds"][there], value=line)))
    return pd.concat(out[len(out) > 1 :], ignore_index=True)


def late(frame: pd.DataFrame) -> list[Number]:
    """`client`'s lines as means over the last quarter of the rounds.

    Metrics "client 1" and "mean of all clients".
    """
    tail = frame[frame["rounds"] > 0.75 * frame["rounds"].max()]
    means = tail.groupby(["run", "row", "column", "panel"], sort=False).value.mean().reset_index()
    metrics = means.panel.str.split(": ").str[-1].str.lower()
    return means.assign(metric=metrics).drop(columns="panel").to_dict("records")


def layer_weights(found: list[Probed], k: int = 0) -> tuple[dict[str, np.ndarray], list[str]]:
    """Client k's weights at the last round, of one column and its first seed (Fig. 1b).

    Returns {row: (layers, clients)} and the layers' names; one weight for all layers is repeated.
    """
    last = {p.row: p.at() for p in _first_seed(found)}
    names = list(max(last.values(), key=len, default={}))
    maps = {
        row: np.stack([weights[name if name in weights else "model"][k] for name in names])
        for row, weights in last.items()
    }
    return maps, names


def _first_seed(found: list[Probed]) -> list[Probed]:
    return [p for p in found if p.seed == min(q.seed for q in found)]


def toy_weights(found: list[Probed], k: int = 0) -> list[Number]:
    """Client k's weight on itself in each layer at the last round, layer-wise (Fig. 1b).

    Metrics "weight of fc1" and so on.
    """
    out = []
    for p in found:
        key = dict(run=p.run, row=p.row, column=p.column)
        each = {layer: w[k, k] for layer, w in p.at().items() if layer != "model"}
        out += [key | dict(metric=f"weight of {n}", value=float(v)) for n, v in each.items()]
    return out


def evolution(found: list[Probed]) -> pd.DataFrame:
    """Client 0's weights by kind of source and period of training (Fig. 5).

    Columns: run, column, seed, layer (the period, on the x axis), panel (all layers or the last),
    row (the kind), value.
    """
    out = []
    for p in found:
        layers = np.stack(list(p.values.values()))[:, :, 0]  # (layers, rounds, sources)
        for period, ends in PERIODS.items():
            when = _inside(p.rounds, *ends)
            for panel, some in {ALL_LAYERS: layers, "classifier": layers[-1:]}.items():
                mean = some[:, when].mean((0, 1))
                kinds = {kind: mean[j] for j, kind in KINDS.items()}
                kinds[RANDOM] = mean[len(KINDS) :].mean()
                key = dict(run=p.run, column=p.column, seed=p.seed, layer=period)
                key |= dict(panel=f"{p.column}, {panel}")
                out += [key | dict(row=kind, value=float(v)) for kind, v in kinds.items()]
    names = ["run", "column", "seed", "layer", "panel", "row", "value"]
    return pd.DataFrame(out, columns=names)


def _inside(rounds: np.ndarray, low: float, high: float) -> np.ndarray:
    # Which rounds lie between two shares of the last one, else the nearest; all weights are equal
    # at round 0, which is in no period.
    share = np.where(rounds > 0, rounds / rounds.max(), np.nan)
    inside = (low <= share) & (share <= high)
    nearest = np.nanargmin(np.abs(share - (low + high) / 2))
    return inside if inside.any() else np.arange(len(share)) == nearest


def periods(frame: pd.DataFrame) -> list[Number]:
    """`evolution` over all layers as metrics "weight, prior" and so on."""
    whole = frame[frame.panel.str.endswith(ALL_LAYERS)]
    named = whole.assign(metric="weight, " + whole.layer)
    return records(named.drop(columns=["layer", "panel"]))


def ring_maps(found: list[Probed]) -> dict[str, np.ndarray]:
    """Figure 6's matrices {title: (8, 8)} of the first seed's last round.

    One layer, that of the largest weights in Figure 7 [I], and the mean of all.
    """
    maps = {}
    for p in _first_seed(found):
        shown = ("fc1" if p.column.startswith("CIFAR") else "fc", ALL_LAYERS)
        weights = _with_mean(p.at())
        maps |= {f"{p.column}, {layer}": w for layer, w in weights.items() if layer in shown}
    return maps


def ring_numbers(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    """Figure 6 by layer.

    Returns
    -------
    list of Number
        rho (Spearman's, of the weights and the common labels of two clients), largest (the share of
        clients, in %, whose own weight is the largest), and lead (by how much a client's own weight
        is ahead of its largest other one, the smallest).
    """
    out = []
    for p in recorded("weights"):
        run = rows[rows.run == p.run].iloc[0]
        usual = setting("fig6", profile_of(run.profile), run.dataset)
        ran = committed.experiment(p.run) or Experiment(**usual, seed=p.seed)
        held = overlap(committed.label_counts(ran))
        for layer, w in _with_mean(p.at()).items():
            lead = w.diagonal() - np.where(np.eye(len(w), dtype=bool), -np.inf, w).max(1)
            largest = 100 * float((w.argmax(1) == np.arange(len(w))).mean())
            values = dict(rho=correlation(w, held)["rho"], largest=largest, lead=float(lead.min()))
            key = dict(run=p.run, row=layer, column=p.column)
            out += [key | dict(metric=metric, value=v) for metric, v in values.items()]
    return out


def _with_mean(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return weights | {ALL_LAYERS: np.mean(list(weights.values()), 0)}


def by_layer(found: list[Probed]) -> pd.DataFrame:
    """pFedLA's weights at the last round by layer (Fig. 7).

    The target's (client 0) on itself and on each other, and all clients' on themselves.
    """
    out = []
    for p in found:
        for layer, w in p.at().items():
            key = dict(run=p.run, column=p.column, seed=p.seed, layer=layer)
            for part, values in zip(WHOSE, (w[:1, 0], w[0, 1:], w.diagonal()), strict=True):
                out += [key | dict(row=part, value=float(v)) for v in values]
    return pd.DataFrame(out, columns=["run", "column", "seed", "layer", "row", "value"])


def self_weights(frame: pd.DataFrame) -> list[Number]:
    """`by_layer`'s means as rows by layer, metrics as its rows are called."""
    means = frame.groupby(["run", "column", "layer", "row"], sort=False).value.mean().reset_index()
    return records(means.rename(columns={"row": "metric", "layer": "row"}))


def megabytes(rows: pd.DataFrame) -> list[Number]:
    """Table 3's megabytes, of the paper's networks whatever was run; metric "mbytes"."""
    out: list[Number] = []
    for name, kept in RETAINED.items() if len(rows) else ():
        cifar = name.startswith("CIFAR")
        net = models.build("lenet", (3, 32, 32) if cifar else (1, 28, 28), 10, bn=cifar, kernels=16)
        size = {n: sum(p.numel() for p in m.parameters()) for n, m in net.named_children()}
        key = dict(run=rows.run.iloc[0], column=name, dataset=DATA[name], metric="mbytes")
        for k, row in enumerate(_printed_k(name)):
            moved = 2 * sum(size.values()) - sum(size[layer] for layer in kept[:k])
            out.append(key | dict(row=row, value=table3_megabytes(moved)))
    return out


def retained(rows: pd.DataFrame, found: list[Probed]) -> list[Number]:
    """What each run of Table 3 kept and moved.

    The share of clients (%) that keep a layer at the end; megabytes (1e6 bytes) of all clients and
    rounds, in both directions.
    """
    out = []
    for p in found:
        last = p.at().items()
        kept = {f"keep {n} (%)": 100 * float((w.diagonal() == 1).mean()) for n, w in last}
        total = rows[(rows.run == p.run) & (rows["average"] == "total") & (rows.column == p.column)]
        total = total[total["rounds"] == total["rounds"].max()].drop_duplicates("metric")
        moved = total.set_index("metric").value[["download_bytes", "upload_bytes"]].sum() / 1e6
        key = dict(run=p.run, row=p.row, column=p.column)
        out += [key | dict(metric=m, value=v) for m, v in (kept | {MOVED: moved}).items()]
    return out


# -- claims ----------------------------------------------------------------------------------------

MOVED = "megabytes moved"
# Between weights, which add up to 1, a smaller difference is a tie.
WEIGHTS: dict[str, Any] = dict(small=0.01, digits=3)
_POINTS: dict[str, Any] = dict(unit="points", small=SMALL, digits=1)
TERMS = Terms(
    {
        "client 1": Measure("{difference}, client 1, {column}", **_POINTS),
        **{
            f"weight of {layer}": Measure("{difference}, client 1, {column}", layer, **WEIGHTS)
            for layer in ("conv2", "fc1", "fc2")
        },
        "weight, last": Measure("{difference}, last period, {column}", **WEIGHTS),
        "rho": Measure(name="rho of weights and common labels"),
        "lead": Measure(name="own - largest other weight, the smallest of all clients", **WEIGHTS),
        MOVED: Measure(unit="MB", digits=1),
        WHOSE[0]: Measure(**WEIGHTS),
    },
    our_rows=("*(*", "*_ft", "centralized"),
    our_columns=(SLOW_COLUMN.format("*"),),
)


def others_decrease(evidence: Evidence) -> list[Contrast]:
    """All others together have what the target's weight on itself leaves to them."""
    out = []
    for column in evidence.columns:
        if matches(column, TERMS.our_columns):
            continue
        itself, random = (
            [evidence.derived(f"weight, {period}", kind, column) for period in PERIODS]
            for kind in (KINDS[0], RANDOM)
        )
        gaps = {"all others' weight": itself[-1] - itself[0], RANDOM: random[0] - random[-1]}
        out += [
            evidence.above(f"{whose}, first - last period, {column}", gap, **WEIGHTS)
            for whose, gap in gaps.items()
        ]
    return out


# -- the paper -------------------------------------------------------------------------------------


def _table3_numbers(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    return megabytes(rows) + retained(rows, recorded("weights"))


def _fig1_numbers(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    return late(client(rows)) + toy_weights(recorded("weights"))


def _fig5_numbers(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    return periods(evolution(recorded("weights")))


def _fig7_numbers(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    return self_weights(by_layer(recorded("weights")))


_ALL, _BOTH = tuple(DATA.values()), (DATA["EMNIST"], DATA["CIFAR-10"])
_RANKS = ("compare", "standing")
ARTEFACTS = {
    "table1": Artefact(_ALL, _RANKS, medium=5, quick=2, tuned=True),
    "table2": Artefact(_ALL, _RANKS, medium=3, quick=1, tuned=True),
    "table3": Artefact(
        _BOTH, medium=2, quick=1, numbers=_table3_numbers, together=True, tuned=True
    ),
    "fig1": Artefact((DATA["CIFAR-10"],), (), quick=1, numbers=_fig1_numbers),
    "fig5": Artefact(
        _BOTH,
        (),
        medium=7,
        quick=1,
        numbers=_fig5_numbers,
        tuned=True,
        makes=((*KINDS.values(), RANDOM), ()),
    ),
    "fig6": Artefact(
        _ALL, (), medium=4, quick=1, numbers=ring_numbers, tuned=True, makes=((ALL_LAYERS,), ())
    ),
    "fig7": Artefact(
        _BOTH, (), medium=2, numbers=_fig7_numbers, tuned=True, makes=(("fc", "fc1"), ())
    ),
}
PAPER = Paper(
    key="pfedla",
    artefacts=ARTEFACTS,
    claims=claims.read("pfedla", TERMS, others_decrease=others_decrease),
    sweeps=sweeps,
    own="pfedla",
    report=dict(select="last", when="before", average="client"),
    unstated=("fig1",),
    tables=("table1", "table2", "table3"),
    setting=setting,
    rows=rows,
)
