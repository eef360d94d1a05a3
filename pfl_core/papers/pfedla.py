"""pFedLA and HeurpFedLA (Ma et al., CVPR 2022): Tables 1 to 3, Figures 1, 5, 6, 7. Figures 2 to 4 are diagrams."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd

from pfl_core import models
from pfl_core.analysis.select import pick
from pfl_core.analysis.stats import agreement, overlap
from pfl_core.experiments import committed
from pfl_core.experiments.experiment import Experiment
from pfl_core.methods.pfedla import table3_megabytes
from pfl_core.papers.base import (
    FULL,
    TUNING,
    Artefact,
    Claim,
    Number,
    Paper,
    Probed,
    Recorded,
    Scope,
    Sweep,
    derived,
    use,
    value,
)
from pfl_core.util.percent import accuracy

DATA = {
    "EMNIST": "emnist-digits",
    "FMNIST": "fashion_mnist",
    "CIFAR-10": "cifar10",
    "CIFAR-100": "cifar100",
}
COLUMNS = {f"{name}, N={n}": (name, n) for name in DATA for n in (10, 100)}
AT_MEDIUM = ("CIFAR-10", "FMNIST")  # with ten clients
# Layers that Table 3 retains, in turn: its differences are their sizes [I].
RETAINED = {"EMNIST": ("fc", "fc1"), "CIFAR-10": ("fc1", "conv2", "fc")}
KINDS = {
    0: "target itself",
    1: "same 4 labels",
    2: "3 labels shared",
}  # clients of Figure 5; the others: random labels
BASELINES = ("local", "fedavg", "perfedavg", "pfedme", "pfedhn", "fedbn", "fedrep", "fedfomo")
WHOSE = (
    "target, on itself",
    "target, on each other",
    "all, on themselves",
)  # Figure 7; the target is client 0
ALL_LAYERS = "mean of all layers"
PERIODS = {
    "prior": (0.0, 0.1),
    "middle": (0.45, 0.55),
    "last": (0.9, 1.0),
}  # shares of the rounds [C]

# Sec. 4.1, 4.2 [P]: SGD, batch 32, lr .01 (CIFAR) or .005, 600 rounds of 10 epochs with 10 clients, 2500 of 20 with a tenth of 100.
# LeNet-16, with BatchNorm for CIFAR only, from Table 3's megabytes [I]; 600 images a client [I]; BatchNorm statistics stay local [C].
# Fig. 1: 100 rounds [C]. medium: 60 rounds, and a tenth of train as validation. quick and smoke [C]: half as many channels, larger
# rates, fewer rounds, epochs and images.
SPLIT = "63/7/30"
_SCALE: dict[str, dict[str, Any]] = {
    "paper": dict(batch=32, eval_every=10),
    "medium": dict(batch=32, eval_every=5, partition_args={"split": SPLIT}),
    "quick": dict(
        rounds=20, epochs=5, batch=12, lr=0.1, eval_every=4, partition_args={"split": "20/80"}
    ),
    "real": dict(
        rounds=16, epochs=3, batch=32, lr=0.1, eval_every=4, max_samples=160
    ),  # quick on data not embedded
    "smoke": dict(rounds=2, epochs=1, batch=8, lr=0.05, eval_every=1, max_samples=8),
}
_KERNELS = {"quick": 8, "smoke": 2}
_CLIENTS = {"fig1": 6, "fig5": 8, "fig6": 8}
_PARTITION = {
    "table2": "pfedla_noniid2",
    "fig1": "pfedla_ring",
    "fig5": "pfedla_target",
    "fig6": "pfedla_ring",
}
# Rate of the hypernetworks [C]. Third-party code's 5e-3 belongs to its outputs (hn_out="relu_norm", heads from U(0, 1)); with softmax and
# heads that begin at zero it leaves all weights at 1/N. medium and paper: the one of `RATES` with the best validation accuracy, see
# `chosen_rate`; RATE stands for it until those runs are there. Those of medium (CIFAR-10, N = 10, 60 rounds, seed 7) have validation
# accuracies of 42.0 % at 0.05, 67.3 at 0.5, 68.6 at 5 and 71.4 at 50, the one that is chosen. At 5 and 50 clients keep all but
# BatchNorm's layers for themselves (weights of 1.00 within five rounds), as Local does; at 0.5 the deep weights still move at the end.
# quick [C]: 1, the power of ten with which weights leave 1/N but do not reach 1 within 20 rounds on digits; accuracy had no part in it.
RATE = 50.0
RATES, TUNING_SEED = (0.05, 0.5, 5.0, 50.0), 7  # of `tuning`; a seed that no artefact shows
_RATE = {"paper": RATE, "medium": RATE, "quick": 1.0, "smoke": 1.0}


def setting(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, Any]:
    """Fields of the Experiment that an artefact's runs vary."""
    cifar, n = dataset.startswith("cifar"), clients or _CLIENTS.get(artefact, 10)
    fields = dict(
        dataset=dataset,
        clients=n,
        partition=_PARTITION.get(artefact, "pfedla_noniid1"),
        model="lenet",
    )
    fields |= dict(
        model_args={"bn": cifar} | ({} if profile in FULL else {"kernels": _KERNELS[profile]})
    )
    fields |= _SCALE["real" if profile == "quick" and not dataset.startswith("digits") else profile]
    if profile in FULL:
        few = (
            dict(rounds=600, epochs=10)
            if n <= 10
            else dict(rounds=2500, epochs=20, participation=0.1)
        )
        fields |= (
            dict(lr=0.01 if cifar else 0.005)
            | few
            | (dict(rounds=100) if artefact == "fig1" else {})
        )
    if profile == "medium":
        fields |= dict(rounds=60)
    if profile == "quick" and artefact in ("fig1", "fig5"):
        fields |= dict(eval_every=1)
    return fields


def own(profile: str, method: str = "pfedla", **args: Any) -> dict[str, Any]:
    """The row of pFedLA or HeurpFedLA at a profile, its weights recorded, with other hyper-parameters as given."""
    return use(method, **{"lr": _RATE[profile]} | args) | dict(record=("weights",))


def rows(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, dict]:
    """Rows of an artefact as changes to its `setting`."""
    n, cifar, paper = clients or 10, dataset.startswith("cifar"), profile in FULL
    if artefact == "table3":
        heur = {
            f"k={k}": own(profile, "heurpfedla", retain_k=k) for k in range(2, 8 if cifar else 6)
        }
        return {"k=0": own(profile), "k=1": own(profile, "heurpfedla")} | heur
    # FedAGHN's graphs without strengths: softmax(5 cos) of the last updates over all clients, kept as they are [C]
    if artefact == "fig1":
        how = dict(ablation="no_p", q0=5.0, h=0.0)
        names = {"layer-wise": "module", "model-wise": "model"}
        return {
            r: use("fedaghn", **how, by=by) | dict(record=("weights",)) for r, by in names.items()
        }
    if artefact in ("fig5", "fig6", "fig7"):
        return {"pfedla": own(profile)}
    # The paper gives no hyper-parameters of baselines ?: their files' defaults (Per-FedAvg alpha = beta = lr; pFedMe 15, 5, .01, 1;
    # FedRep 1 + E epochs; FedFomo all others). quick [C]: what suits its rate, pFedMe with fewer inner steps.
    fields = setting(artefact, profile, dataset, clients)
    visits = max(1, round(fields.get("participation", 1) * n))
    hn = dict(
        lr=0.005, momentum=0.9, weight_decay=5e-5, clip=50.0, plan="fresh", participation=1 / n
    )
    hn |= dict(eval_after=profile == "medium")
    hn |= {f: fields[f] * visits for f in ("rounds", "eval_every")}  # as many visits as the others
    out = {m: use(m) for m in ("local", "fedavg")}
    out["perfedavg"] = use("perfedavg", **({} if paper else dict(alpha=0.01, passes=2)))
    out["pfedme"] = use("pfedme", **({} if paper else dict(inner_steps=2, personal_lr=0.05)))
    out |= {"pfedhn": use("pfedhn") | hn} | ({"fedbn": use("fedbn")} if cifar else {})
    out |= {"fedrep": use("fedrep"), "fedfomo": use("fedfomo", neighbours=n) | dict(holdout=0.2)}
    return out | {"pfedla": own(profile), "heurpfedla": own(profile, "heurpfedla")}


def extras(profile: str, dataset: str) -> dict[str, dict]:
    """Rows of ours for Table 1: the other sign, the other code's outputs and rate, with the paper's networks that rate alone, too, and
    averaged BatchNorm statistics where there are any."""
    out = {"pfedla (literal sign)": own(profile, hn_sign="literal")}
    out["pfedla (relu_norm, rate 0.005)"] = own(profile, lr=0.005, hn_out="relu_norm")
    out |= {"pfedla (rate 0.005)": own(profile, lr=0.005)} if profile in FULL else {}
    if dataset.startswith("cifar"):
        averaged = {"fedavg": use("fedavg"), "pfedla": own(profile)}
        out |= {
            f"{m} (BatchNorm averaged)": row | dict(buffers="average")
            for m, row in averaged.items()
        }
    return out


# -- sweeps --------------------------------------------------------------------------------------------------------------


def columns(scope: Scope, artefact: str) -> dict[str, tuple[str, int]]:
    """The columns (panels) {label: (data set's name in the paper, clients)} that an artefact has at a profile and data."""
    of = PAPER.artefacts[artefact].data
    found = (
        COLUMNS if artefact in ("table1", "table2") else {c: (c, 0) for c in DATA if DATA[c] in of}
    )
    if scope.profile == "medium":
        found = {c: v for c, v in found.items() if v[0] in AT_MEDIUM and v[1] <= 10}
    if scope.full and not scope.datasets:
        return found
    if scope.label == "digits":
        return dict([next(iter(found.items()))])
    found = {c: v for c, v in found.items() if scope.data(DATA[v[0]]) == DATA[v[0]]}
    if scope.full:
        return found
    few = {"table1": ("CIFAR-10",), "table2": ("FMNIST",)}.get(
        artefact, tuple(DATA)
    )  # what quick has time for
    return {c: v for c, v in found.items() if v[0] in few and v[1] < 100} or dict(
        list(found.items())[:1]
    )


def sweeps(scope: Scope) -> list[Sweep]:
    """All runs of the paper, a Sweep for each column; the part "ours" of Table 1 is the rows of `extras`."""
    tried = tuning(scope)
    rate = chosen_rate(scope, tried)
    few = scope.pick(1, quick=2)  # seeds of Figure 7 and of our rows at quick
    found = [
        _columns_swept(scope, a, rate, quick=few if a == "fig7" else 0) for a in PAPER.artefacts
    ]
    ours = _columns_swept(scope, "table1", rate, quick=few, part="ours")
    return [*tried, *itertools.chain(*found), *ours]


def _columns_swept(
    scope: Scope, artefact: str, rate: float, quick: int, part: str = ""
) -> list[Sweep]:
    out = []
    for label, (name, n) in columns(scope, artefact).items():
        base = scope.base(PAPER, artefact, DATA[name], **({"clients": n} if n else {}))
        if base is None:
            continue
        some = (
            extras(scope.profile, base.dataset)
            if part
            else rows(artefact, scope.profile, base.dataset, n)
        )
        if artefact == "table3" and scope.label not in ("digits", "paper"):
            some = dict(list(some.items())[: 1 + len(RETAINED[name])])  # the k that are published
        some = {
            r: _at(rate, v) if v.get("method_args", {}).get("lr") == RATE else v
            for r, v in some.items()
        }
        out += scope.sweep(PAPER, base, some, {label: {}}, quick=quick, part=part)
    return out


def _at(rate: float, row: dict[str, Any]) -> dict[str, Any]:
    return row | {"method_args": row["method_args"] | {"lr": rate}}


def tuning(scope: Scope) -> list[Sweep]:
    """pFedLA at the rates of `RATES`, four classes a client, CIFAR-10, ten clients, and that of third-party code with the outputs that it
    belongs to; at profiles with the paper's networks, elsewhere none."""
    if not scope.full or scope.data("cifar10") != "cifar10":
        return []
    tags = dict(paper="pfedla", artefact=TUNING, profile=scope.profile)
    base = Experiment(**setting("table1", scope.profile, "cifar10", 10)).but(
        partition_args={"split": SPLIT}, tags=tags
    )
    tried = {f"rate {r:g}": own(scope.profile, lr=r) for r in RATES}
    tried["relu_norm, rate 0.005"] = own(scope.profile, lr=0.005, hn_out="relu_norm")
    return scope.sweep(PAPER, base, tried, {"CIFAR-10, N=10": {}}, seeds=(TUNING_SEED,))


def chosen_rate(scope: Scope, tried: list[Sweep]) -> float:
    """The rate of `RATES` with the best validation accuracy in the runs of `tuning`; RATE where there are none, or not all are finished."""
    cells = [e for s in tried for e in s.experiments()]
    rows = scope.finished(cells) if cells else None
    if rows is None:
        return RATE
    acc = _validated(rows)
    return max(
        (r for r in RATES if f"rate {r:g}" in acc), key=lambda r: acc[f"rate {r:g}"], default=RATE
    )


def _validated(rows: pd.DataFrame) -> pd.Series:
    # Validation accuracy (%) of what is served at the last round, by row.
    seen = rows[
        (rows.split == "val")
        & (rows.when == PAPER.report["when"])
        & (rows["mean"] == PAPER.report["mean"])
    ]
    return (
        seen[seen.metric == "acc_pct"].sort_values("round").groupby("row", sort=False).value.last()
    )


# -- numbers from finished runs ------------------------------------------------------------------------------------------


def rate_course(found: list[Probed]) -> pd.DataFrame:
    """Mean weight of the clients on themselves at every recorded round of `tuning`: run, row, panel (a layer, or all), round, value."""
    out = [pd.DataFrame(columns=["run", "row", "panel", "round", "value"])]
    for p in found:
        each = {layer: w.diagonal(0, 1, 2).mean(1) for layer, w in p.values.items()}
        for panel, line in ({ALL_LAYERS: np.mean(list(each.values()), 0)} | each).items():
            out.append(
                pd.DataFrame(dict(run=p.run, row=p.row, panel=panel, round=p.rounds, value=line))
            )
    return pd.concat(out[len(out) > 1 :], ignore_index=True)


def rate_table(rows: pd.DataFrame, course: pd.DataFrame) -> pd.DataFrame:
    """Each row of `tuning`: validation accuracy (%) of what is served at the last round, which alone chooses among the rates of our own
    outputs; beside it the mean weight of the clients on themselves in the middle and at the end (1/N at the start)."""
    out = pd.DataFrame(
        {"validation accuracy": _validated(rows).reindex(list(dict.fromkeys(rows.row)))}
    )
    own = (
        course[course.panel == ALL_LAYERS]
        .pivot(index="row", columns="round", values="value")
        .reindex(out.index)
    )
    if out.empty:
        return out
    half = own.columns[np.abs(own.columns - own.columns.max() / 2).argmin()]
    out = out.assign(
        **{"weight on itself, middle": own[half], "at the end": own[own.columns.max()]}
    )
    ours = out[out.index.str.startswith("rate ")]["validation accuracy"]
    return out.assign(chosen=["best" * (r == ours.idxmax()) for r in out.index])


def client(rows: pd.DataFrame, k: int = 0) -> pd.DataFrame:
    """Test accuracy (%) as served of client k alone and of all clients' mean: run, row, column, seed, round, panel, value (Fig. 1a)."""
    out = [pd.DataFrame(columns=["run", "row", "column", "seed", "round", "panel", "value"])]
    for v in rows.drop_duplicates(["run", "row", "column"]).itertuples():
        a = committed.arrays_of(v.run)
        acc = accuracy(a["before/test/correct"], a["n/test"])
        for panel, line in ((f"Client {k + 1}", acc[:, k]), ("Mean of all clients", acc.mean(1))):
            key = dict(
                run=v.run, row=v.row, column=v.column, seed=v.seed, panel=f"{v.column}: {panel}"
            )
            out.append(pd.DataFrame(key | dict(round=a["rounds"], value=line)))
    return pd.concat(out[len(out) > 1 :], ignore_index=True)


def late(frame: pd.DataFrame) -> list[Number]:
    """Mean over the last quarter of the rounds of `client`'s lines, metrics "client 1" and "mean of all clients"."""
    tail = frame[frame["round"] > 0.75 * frame["round"].max()]
    means = tail.groupby(["run", "row", "column", "panel"], sort=False).value.mean().reset_index()
    return (
        means.assign(metric=means.panel.str.split(": ").str[-1].str.lower())
        .drop(columns="panel")
        .to_dict("records")
    )


def layer_weights(found: list[Probed], k: int = 0) -> tuple[dict[str, np.ndarray], list[str]]:
    """Client k's weights at the last round, {row: (layers, clients)}, of one column and its first seed, and the layers' names; one weight
    for all layers is repeated (Fig. 1b)."""
    last = {p.row: p.at() for p in _first_seed(found)}
    names = list(max(last.values(), key=len, default={}))
    return {
        r: np.stack([w.get(n, w.get("model"))[k] for n in names]) for r, w in last.items()
    }, names


def _first_seed(found: list[Probed]) -> list[Probed]:
    return [p for p in found if p.seed == min(q.seed for q in found)]


def evolution(found: list[Probed]) -> pd.DataFrame:
    """Client 0's weights by kind of source (`row`), period of training (`layer`: the x axis) and panel: all layers, or the last
    (Fig. 5)."""
    out = []
    for p in found:
        share = np.where(
            p.rounds > 0, p.rounds / p.rounds.max(), np.nan
        )  # all weights are equal at round 0
        layers = np.stack(list(p.values.values()))[:, :, 0]  # (layers, rounds, sources)
        for period, (low, high) in PERIODS.items():
            inside = (low <= share) & (share <= high)
            when = (
                inside
                if inside.any()
                else np.arange(len(share)) == np.nanargmin(np.abs(share - (low + high) / 2))
            )
            for panel, some in {ALL_LAYERS: layers, "classifier": layers[-1:]}.items():
                mean = some[:, when].mean((0, 1))
                kinds = {kind: mean[j] for j, kind in KINDS.items()} | {
                    "random labels": mean[len(KINDS) :].mean()
                }
                key = dict(run=p.run, column=p.column, layer=period, panel=f"{p.column}, {panel}")
                out += [key | dict(row=kind, value=float(v)) for kind, v in kinds.items()]
    return pd.DataFrame(out, columns=["run", "column", "layer", "panel", "row", "value"])


def periods(frame: pd.DataFrame) -> list[Number]:
    """`evolution` over all layers as metrics "weight, prior" and so on."""
    whole = frame[frame.panel.str.endswith(ALL_LAYERS)]
    return (
        whole.assign(metric="weight, " + whole.layer)
        .drop(columns=["layer", "panel"])
        .to_dict("records")
    )


def ring_maps(found: list[Probed]) -> dict[str, np.ndarray]:
    """Figure 6's matrices {title: (8, 8)} of the first seed's last round: one layer, and the mean of all."""
    maps = {}
    for p in _first_seed(found):
        weights = _with_mean(p.at())
        shown = (
            "fc1" if p.column.startswith("CIFAR") else "fc"
        )  # the layer of the largest weights in Figure 7 [I]
        maps |= {
            f"{p.column}, {layer}": w
            for layer, w in weights.items()
            if layer in (shown, ALL_LAYERS)
        }
    return maps


def ring_numbers(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    """Figure 6 by layer: "rho", Spearman's, of weights and common labels of two clients, and "largest", the share of clients (%) whose own
    weight is the largest."""
    out = []
    for p in recorded("weights"):
        run = rows[rows.run == p.run].iloc[0]
        alike = Experiment(**setting("fig6", run.profile, run.dataset), seed=p.seed)
        held = overlap(committed.label_counts(alike))
        for layer, w in _with_mean(p.at()).items():
            own = 100 * float((w.argmax(1) == np.arange(len(w))).mean())
            for metric, v in {"rho": agreement(w, held)["rho"], "largest": own}.items():
                out.append(dict(run=p.run, row=layer, column=p.column, metric=metric, value=v))
    return out


def _with_mean(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return weights | {ALL_LAYERS: np.mean(list(weights.values()), 0)}


def by_layer(found: list[Probed]) -> pd.DataFrame:
    """pFedLA's weights at the last round by layer: the target's (client 0) on itself and on each other, all clients' on themselves
    (Fig. 7)."""
    out = []
    for p in found:
        for layer, w in p.at().items():
            key = dict(run=p.run, column=p.column, layer=layer)
            for part, values in zip(WHOSE, (w[:1, 0], w[0, 1:], w.diagonal()), strict=True):
                out += [key | dict(row=part, value=float(v)) for v in values]
    return pd.DataFrame(out, columns=["run", "column", "layer", "row", "value"])


def self_weights(frame: pd.DataFrame) -> list[Number]:
    """`by_layer`'s means as rows by layer, metrics as its rows are called."""
    means = frame.groupby(["run", "column", "layer", "row"], sort=False).value.mean().reset_index()
    return means.rename(columns={"row": "metric", "layer": "row"}).to_dict("records")


def megabytes(rows: pd.DataFrame) -> list[Number]:
    """Table 3's megabytes, of the paper's networks whatever was run, metric "mbytes"."""
    out: list[Number] = []
    for name, kept in RETAINED.items() if len(rows) else ():
        cifar = name.startswith("CIFAR")
        net = models.build("lenet", (3, 32, 32) if cifar else (1, 28, 28), 10, bn=cifar, kernels=16)
        size = {n: sum(p.numel() for p in m.parameters()) for n, m in net.named_children()}
        for k in range(len(kept) + 1):
            moved = table3_megabytes(
                2 * sum(size.values()) - sum(size[layer] for layer in kept[:k])
            )
            key = dict(
                run=rows.run.iloc[0], row=f"k={k}", column=name, dataset=DATA[name], metric="mbytes"
            )
            out.append(key | dict(value=moved))
    return out


def retained(rows: pd.DataFrame, found: list[Probed]) -> list[Number]:
    """What each run of Table 3 kept and moved: clients (%) that keep a layer at the end, megabytes (1e6 bytes) of all clients and rounds,
    both directions."""
    out = []
    for p in found:
        kept = {
            f"keep {layer} (%)": 100 * float((w.diagonal() == 1).mean())
            for layer, w in p.at().items()
        }
        total = rows[(rows.run == p.run) & (rows["mean"] == "total") & (rows.column == p.column)]
        total = (
            total[total["round"] == total["round"].max()]
            .drop_duplicates("metric")
            .set_index("metric")
            .value
        )
        kept["megabytes moved"] = (total.download_bytes + total.upload_bytes) / 1e6
        out += [
            dict(run=p.run, row=p.row, column=p.column, metric=m, value=v) for m, v in kept.items()
        ]
    return out


# -- claims --------------------------------------------------------------------------------------------------------------


def _superior(rows: pd.DataFrame) -> tuple[str, bool]:
    out, ahead = [], []
    for c in dict.fromkeys(rows.column):
        at = rows[rows.column == c]
        names = [r for r in dict.fromkeys(at.row) if r in BASELINES]
        acc = {
            r: value(at, r, c, **PAPER.report | {"when": PAPER.when.get(r, PAPER.report["when"])})
            for r in names
        }
        if not acc:
            raise LookupError(f"baselines / {c}")
        mine, top = value(at, PAPER.own, c, **PAPER.report), max(acc, key=acc.__getitem__)
        rank = 1 + sum(v > mine for v in acc.values())
        out.append(
            f"{c}: pfedla {mine:.1f}, rank {rank} of {1 + len(acc)}; best baseline {top} {acc[top]:.1f}"
        )
        ahead.append(rank == 1)
    return "; ".join(out), sum(ahead) > len(ahead) / 2


def _k(rows: pd.DataFrame) -> tuple[str, bool]:
    out, good = [], True
    for c in dict.fromkeys(pick(rows, **PAPER.report).column):
        acc = {
            r: value(rows, r, c, **PAPER.report) for r in dict.fromkeys(rows[rows.column == c].row)
        }
        if not {"k=0", "k=1"} <= acc.keys():
            raise LookupError(f"k=0, k=1 / {c}")
        out.append(f"{c}: " + ", ".join(f"{r} {v:.1f}" for r, v in acc.items()))
        good &= min(acc.values()) >= acc["k=0"] - 2.2
    return "; ".join(out), good


def _toy(rows: pd.DataFrame) -> tuple[str, bool]:
    out, good = [], True
    for c in dict.fromkeys(rows.column):
        wise, whose = ("layer-wise", "model-wise"), ("client 1", "mean of all clients")
        get = {m: [derived(rows, m, r, c).mean() for r in wise] for m in whose}
        out += [f"{c}, {m}: layer-wise {a:.1f}, model-wise {b:.1f}" for m, (a, b) in get.items()]
        good &= bool(get["client 1"][0] > get["client 1"][1])
    return "; ".join(out), good


def _period(rows: pd.DataFrame) -> tuple[str, bool]:
    out, good = [], True
    for c in dict.fromkeys(rows.column):
        kinds = (*KINDS.values(), "random labels")
        w = {p: {k: derived(rows, f"weight, {p}", k, c).mean() for k in kinds} for p in PERIODS}
        last, own = w["last"], [w[p][KINDS[0]] for p in PERIODS]
        out.append(f"{c}, last: " + ", ".join(f"{k} {v:.3f}" for k, v in last.items()))
        out[-1] += "; itself, prior to last " + ", ".join(f"{v:.3f}" for v in own)
        good &= last[KINDS[1]] > last[KINDS[2]] > last["random labels"] and own[0] < own[-1]
    return "; ".join(out), bool(good)


def _ring(rows: pd.DataFrame) -> tuple[str, bool]:
    out, good, layer = [], True, ALL_LAYERS
    for c in dict.fromkeys(rows.column):
        rho, own = (derived(rows, m, layer, c).mean() for m in ("rho", "largest"))
        out.append(f"{c}: rho {rho:.2f}, own weight largest for {own:.0f} % of clients ({layer})")
        good &= rho > 0 and own == 100
    return "; ".join(out), bool(good)


def _largest(rows: pd.DataFrame) -> tuple[str, bool]:
    out, good = [], True
    for c in [c for c in dict.fromkeys(rows.column) if c in RETAINED]:
        at = rows[(rows.column == c) & (rows["mean"] == "derived")]
        tops = []
        for m in WHOSE[::2]:
            w = {r: derived(at, m, r).mean() for r in dict.fromkeys(at.row)}
            tops.append(sorted(w, key=w.__getitem__, reverse=True)[:2])
            out.append(f"{c}, {m}: " + ", ".join(f"{r} {w[r]:.3f}" for r in tops[-1]))
        good &= tops[0][0] == RETAINED[c][0]
    return "; ".join(out), good


CLAIMS = (
    Claim(
        "pFedLA beats the baselines in most cases, four classes a client (Sec. 4.2, Table 1)",
        "table1",
        _superior,
    ),
    Claim(
        "pFedLA beats the baselines in most cases, all classes a client (Sec. 4.2, Table 2)",
        "table2",
        _superior,
    ),
    Claim(
        "Retaining k layers costs little accuracy (Sec. 4.5; at most 2.2 points, as in Table 1)",
        "table3",
        _k,
    ),
    Claim("Weights for layers beat weights for whole models on client 1 (Fig. 1a)", "fig1", _toy),
    Claim(
        "Others weigh less with time, and more the more labels they share (Sec. 4.3, Fig. 5)",
        "fig5",
        _period,
    ),
    Claim(
        "Self weights are largest; others weigh more the more labels they share (Sec. 4.3, Fig. 6)",
        "fig6",
        _ring,
    ),
    Claim(
        "The target's largest weight is the classifier's on EMNIST, fc1's on CIFAR-10 (Sec. 4.4)",
        "fig7",
        _largest,
    ),
)

# -- the paper -----------------------------------------------------------------------------------------------------------

_ALL, _TWO = tuple(DATA.values()), (DATA["EMNIST"], DATA["CIFAR-10"])
_RANKS = ("compare", "standing")
ARTEFACTS = {
    "table1": Artefact(_ALL, _RANKS, medium=2, quick=2, tuned=True),
    "table2": Artefact(_ALL, _RANKS, quick=1, tuned=True),
    "table3": Artefact(
        _TWO,
        quick=1,
        own="k=1",
        numbers=lambda rows, recorded: megabytes(rows) + retained(rows, recorded("weights")),
        tuned=True,
    ),
    "fig1": Artefact(
        (DATA["CIFAR-10"],), (), quick=1, numbers=lambda rows, recorded: late(client(rows))
    ),
    "fig5": Artefact(
        _TWO,
        (),
        medium=2,
        quick=1,
        numbers=lambda rows, recorded: periods(evolution(recorded("weights"))),
        tuned=True,
    ),
    "fig6": Artefact(_ALL, (), medium=2, quick=1, numbers=ring_numbers, tuned=True),
    "fig7": Artefact(
        _TWO,
        (),
        medium=2,
        numbers=lambda rows, recorded: self_weights(by_layer(recorded("weights"))),
        tuned=True,
    ),
}
PAPER = Paper(
    key="pfedla",
    artefacts=ARTEFACTS,
    claims=CLAIMS,
    sweeps=sweeps,
    own="pfedla",
    report=dict(select="last", when="before", mean="client"),
    when={"local": "after"},
    tables=("table1", "table2", "table3"),
    setting=setting,
    rows=rows,
)
