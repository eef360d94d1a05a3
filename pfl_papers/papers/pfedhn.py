"""pFedHN and pFedHN-PC (Shamsian et al., ICML 2021): settings, runs, and what decides their claims.

Tables 1 to 4, Figures 2 to 7 and Appendix C.5; Figure 1 is a diagram. [P], [O], [C] and ? say where
a value is from; see `papers.base`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from pfl_core.analysis import plots
from pfl_core.analysis.select import grouped, pick, tuples
from pfl_core.analysis.stats import (
    clustering,
    diagonal_rank,
    row_scaled,
    slope,
    total_variation,
    tsne,
)
from pfl_core.data.sources import CLASS_NAMES
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.metrics import validated
from pfl_core.util.percent import accuracy
from pfl_papers.evidence import committed, copies
from pfl_papers.evidence.asks import Measure, Terms
from pfl_papers.papers import claims
from pfl_papers.papers.base import TUNING, Artefact, Number, Paper, Probed, Recorded, Scope, Sweep
from pfl_papers.papers.overrides import profile_of
from pfl_papers.papers.shown import At, Changes, Column, Shown, fields_at, rows_at, use

# -- what the paper shows --------------------------------------------------------------------------

DATA = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "MNIST": "mnist", "Omniglot": "omniglot"}
SIZES = ("S", "M", "L")  # 8, 16 and 32 kernels (App. B)
ALL = "all sizes"  # the column of Table 2's one pFedHN
NOVEL_ALPHAS = {f"alpha = {alpha:g}": alpha for alpha in (0.1, 0.25, 0.5, 1.0)}
TRAINING = "training, "  # before a column of Figures 2 and 7 over the training clients


def _group(place: int) -> Changes:
    # A federation of the clients of one size, every third one.
    return lambda base: dict(
        clients=base.clients // 3,
        participation=min(1.0, 5 * 3 / base.clients),
        model_args={"kernels": base.model_args["kernels"] * 2**place // 4},
        partition_args=dict(of=base.clients, first=place, every=3),
    )


HOLDING = {f"{name}, N={n}": (d, n) for name, d in DATA.items() for n in (10, 20, 50, 100)}
COLUMNS = {label: Column(dataset, {"clients": n}) for label, (dataset, n) in HOLDING.items()}
for _name in ("CIFAR-10", "CIFAR-100"):
    COLUMNS |= {f"{_name}, {size}": Column(DATA[_name], _group(i)) for i, size in enumerate(SIZES)}
    COLUMNS[f"{_name}, {ALL}"] = Column(DATA[_name], rows={"pfedhn": "pfedhn (three widths)"})
for _name, _alpha in NOVEL_ALPHAS.items():
    COLUMNS[_name] = Column("cifar10", {"partition_args": {"novel_alpha": _alpha}})


def _each(before: str, *values: Any) -> list[str]:
    return [f"{before}{value}" for value in values]


def _first(columns: list[str]) -> At:
    # Below profile paper tables have their first column only.
    return At(columns, medium=columns[:1], quick=columns[:1])


_TEN, _HUNDRED = (_each(f"{name}, N=", 10, 50, 100) for name in ("CIFAR-10", "CIFAR-100"))
_FIFTY = At(["CIFAR-10, N=50"], quick=["CIFAR-10, N=10"])
_SIZED = _each("CIFAR-10, ", *SIZES, ALL)
# Figures 5 and 6; below the paper's scale the defaults there are among them [C].
_K, _DIM, _DEPTH = "K = ", "embedding dimension = ", "hidden layers = "
_STEPS = At(
    _each(_K, 1, 25, 50, 100, 200),
    medium=_each(_K, 1, 25, 50, 100),
    quick=_each(_K, 1, 10, 20),
    smoke=_each(_K, 1, 2),
)
_DIMS = At(_each(_DIM, 5, 15, 25, 35), quick=_each(_DIM, 3, 15))
_DEPTHS = At(_each(_DEPTH, 1, 2, 3, 4, 5), quick=_each(_DEPTH, 1, 3))
PANELS = {"method_args.dim": _DIMS, "method_args.n_hidden": _DEPTHS}  # Figure 6's: what each varies
_NOVEL = Shown(
    At([*NOVEL_ALPHAS], quick=["alpha = 1"]),
    At(("pfedhn", "perfedavg", "pfedme", "fedavg"), quick=("pfedhn", "fedavg")),
)
SHOWN = {
    "table1": Shown(
        _first([*_TEN, *_HUNDRED, "Omniglot, N=50"]),
        ("local", "fedavg", "perfedavg", "fedper", "pfedme", "lgfedavg", "pfedhn", "pfedhn_pc"),
    ),
    "table2": Shown(
        At([*_SIZED, *_each("CIFAR-100, ", *SIZES, ALL)], medium=_SIZED, quick=_SIZED),
        At(("fedavg", "perfedavg", "pfedme", "lgfedavg"), quick=("pfedme",)),
    ),
    "fig2": _NOVEL,  # rows tune the federations of these: `tuned`
    "fig3": Shown(_TEN[:1], ("pfedhn_pc",)),
    "fig4": Shown(
        At(["CIFAR-100, N=100"], quick=["CIFAR-100, N=50"], smoke=["CIFAR-100, N=20"]),
        {"pfedhn": "pfedhn (embeddings)"},
    ),
    "table3": Shown(
        _first(_each("MNIST, N=", 10, 50, 100)),
        {m: m for m in ("fedavg", "perfedavg", "pfedme")} | {"pfedhn": f"{_DEPTH}1"},
    ),
    "fig5": Shown(_FIFTY, _STEPS),
    "fig6": Shown(_FIFTY, At(_DIMS.paper + _DEPTHS.paper, quick=_DIMS.quick + _DEPTHS.quick)),
    "table4": Shown(
        _first(_TEN), {"pfedhn": "pfedhn (spectral norm)", "pfedhn (no spectral norm)": "pfedhn"}
    ),
    "fig7": _NOVEL,
    "appc5": Shown(
        At(["CIFAR-10, N=50"], quick=["CIFAR-10, N=20"]),
        ("trainable embedding", "fixed embedding", "fixed embedding (over classes)"),
    ),
}
# Parts of Table 1 that are ours: other readings, and a fourth seed where three leave the two best
# rows too close to tell apart; LG-FedAvg starts from FedAvg.
_READINGS = ["pfedhn (literal sign)", "local (all data)", "pfedhn (all data)"]
_AS_AUTHORS = ["perfedavg (one step)", "lgfedavg (two layers)"]
OURS = Shown(_TEN[:1], At([*_READINGS, *_AS_AUTHORS], quick=_READINGS[:1]))
FOURTH = ("fedavg", "lgfedavg", "pfedhn_pc")

# -- settings --------------------------------------------------------------------------------------

# Sec. 5, App. B [P], released trainer [O]: batches of 64, drawn anew for each of K = 50 local
# steps; 5000 communication steps, of one client each for pFedHN, of 5 clients a round for the
# baselines [C]. Rates are tuned on validation data [P]; here Table 3's are, all others are one of
# the paper's grid [C]. What pFedHN's clients and server have of their own are the trainer's
# defaults [O].
# medium: 1000 of the 5000 steps, the beginning of the paper's own runs; Local has all of its 2000.
# quick and smoke [C]: 300 communication steps of K = 10, small batches and networks, few samples a
# client. Rates of the paper's grid by validation data with seed 7, which no artefact shows.
COMMON: dict[str, Any] = dict(
    partition="pfedhn_classes",
    batch=At(64, quick=16, smoke=4),
    plan="fresh",
    steps=At(50, quick=10, smoke=1),
    lr=At(0.01, quick=0.05),
    rounds=At(1000, medium=200, quick=60, smoke=2),
    eval_every=At(10, quick=6, smoke=2),
    eval_after=False,
    max_samples=At(quick=50, smoke=8),
)
_REAL = dict(max_samples=At(quick=300, smoke=8))  # where data are not embedded
# LeNet's kernels, and what an artefact or data have in its place [P; C]: twice the width, so many
# hidden units of MNIST's network.
NETS: dict[str, dict[str, Any]] = {
    "lenet": dict(model="lenet", model_args={"kernels": At(16, quick=4, smoke=2)}),
    "table2": dict(model="lenet", model_args={"kernels": At(32, quick=8, smoke=4)}),
    "table3": dict(model="mlp", model_args={"hidden": At(100, quick=32, smoke=8)}),
    "omniglot": dict(model="lenet4", partition="alphabets"),
}
# Clients where no column says how many, or none is picked.
CLIENTS: dict[str, At] = dict.fromkeys(("table1", "table3", "table4"), At(50, quick=10))
CLIENTS |= dict.fromkeys(("fig2", "fig7"), At(90, quick=20)) | {"table2": At(75, quick=12, smoke=6)}
NOVEL = 10  # held-out clients (Sec. 5.3)
_HELD_OUT = dict(
    partition="dirichlet_columns",
    partition_args=dict(alpha=0.1, novel_alpha=1.0, novel=NOVEL),
    keep_models=True,
)
# What an artefact has otherwise than Table 1, beside its network.
OTHERWISE: dict[str, dict[str, Any]] = {
    "table2": dict(rounds=At(quick=40, smoke=...)),
    "table3": dict(dataset=At("mnist", medium=..., quick=...)),
    "fig2": _HELD_OUT,
    "fig4": dict(partition="coarse", rounds=At(quick=120, smoke=...)),
    "fig7": _HELD_OUT,
    # Below the paper's scale App. C.5 has the training clients of Figure 2.
    "appc5": dict(
        partition="dirichlet_columns",
        partition_args=dict(
            alpha=0.1,
            novel_alpha=At(..., medium=1.0, quick=1.0),
            novel=At(0, medium=NOVEL, quick=NOVEL),
        ),
        keep_models=At(..., medium=True, quick=True),
    ),
}
# Table 3: the grids of App. B [P], searched with 50 clients [P] and a seed that no artefact shows.
RATES, PERSONAL, TUNING_SEED = (0.1, 0.05, 0.01, 0.005), (0.05, 0.01, 0.005, 0.001), 7
# Visits that tune a model to a client in Figures 2 and 7, which the paper does not say [C].
VISITS = At(200, medium=10, quick=20, smoke=2)


def setting(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, Any]:
    """Fields of the Experiment that an artefact's runs vary.

    They are those of the baselines; what pFedHN has of its own is with its rows (`own`).
    """
    if not clients and artefact in CLIENTS:
        clients = CLIENTS[artefact].value(profile)
    elif not clients:
        _, clients = HOLDING[SHOWN[artefact].labels(profile)[0]]
    net = NETS.get("omniglot" if dataset == "omniglot" else artefact, NETS["lenet"])
    own = dict(dataset=dataset, clients=clients, participation=min(1.0, 5 / clients))
    real = {} if dataset.startswith("digits") else _REAL
    fields = fields_at(profile, own, COMMON, real, net, OTHERWISE.get(artefact, {}))
    if fields.get("partition_args", {}).get("novel"):
        fields["partition_args"]["of"] = clients + NOVEL
    return fields


# -- rows ------------------------------------------------------------------------------------------


def own(base: Experiment, method: str = "pfedhn", **args: Any) -> dict[str, Any]:
    """Changes that make `base`, a baseline's Experiment, one of pFedHN's, at any profile.

    It has one client a communication step, and as many visits of clients. The classifiers of
    pFedHN-PC are drawn one by one, as the authors' clients build theirs. The method's default width
    is the paper's.

    Parameters
    ----------
    base : Experiment
        Of a column.
    method : str
        Which of the two.
    **args
        Hyper-parameters of the method.
    """
    fields = dict(
        participation=1 / base.clients,
        rounds=5 * base.rounds,
        eval_every=At(30, quick=5 * base.eval_every),
        lr=At(0.005, quick=0.01),
        momentum=0.9,
        weight_decay=5e-5,
        clip=50.0,
        eval_after=False,
    )
    if method == "pfedhn_pc":
        fields |= {"head_init": "own"}
    return use(method, hidden=At(quick=50, smoke=8), **args) | fields


def _hn(**args: Any) -> Changes:
    return lambda base: own(base, **args)


def _local(base: Experiment) -> dict[str, Any]:
    # 2000 steps on each client [P].
    alone = At(40, quick=5 * base.rounds // base.clients)
    return use("local") | dict(rounds=alone, participation=1.0, eval_every=2)


def _pfedme(base: Experiment) -> dict[str, Any]:
    # 20 outer steps of 3 inner ones [P].
    args = dict(inner_steps=3, personal_lr=At(0.01, quick=0.03))
    return use("pfedme", **args) | dict(steps=max(1, base.steps * 2 // 5), lr=0.05)


_FEDAVG = use("fedavg") | dict(keep_models=True)


def _lgfedavg(base: Experiment) -> dict[str, Any]:
    # 1000 communication steps more than the 5000 of FedAvg [P].
    more = dict(rounds=max(1, base.rounds // 5), eval_every=max(1, base.eval_every // 5))
    return use("lgfedavg") | more | dict(init_from=base.but(**_FEDAVG))


def _pfedhn_pc(base: Experiment) -> dict[str, Any]:
    # One run of Table 1's is Figure 3's, too.
    shown = base.clients == 10 and base.dataset in ("cifar10", "digits")
    return own(base, "pfedhn_pc") | (dict(record=("mix_and_match",)) if shown else {})


def _three_widths(base: Experiment) -> dict[str, Any]:
    rounds = At(5 * base.rounds, quick=base.rounds * base.clients)
    return own(base, widths=[0.25, 0.5, 1.0]) | dict(rounds=rounds)


def _literal(base: Experiment) -> dict[str, Any]:
    # Algorithm 1 as printed, whose step climbs. 30 communication steps, for after about 60 the
    # weights overflow.
    return own(base, hn_sign="literal") | dict(rounds=min(30, base.rounds), eval_every=6)


def _steps(n: int) -> Changes:
    return lambda base: own(base) | {"steps": n}


def _dim(n: int) -> Changes:
    # A default is left out, so that the run is one with those of other artefacts.
    return lambda base: own(base) if n == 1 + base.clients // 4 else own(base, dim=n)


# All data are dealt out, as the paper's formula has it; the released partition leaves a third to
# nobody.
_ALL_DATA: dict[str, Any] = dict(partition_args={"leftover": False})
ROWS: dict[str, Changes] = {
    "local": _local,
    "fedavg": _FEDAVG,
    "perfedavg": use("perfedavg"),  # adapts for an epoch
    "fedper": use("fedper"),
    "pfedme": _pfedme,
    "lgfedavg": _lgfedavg,
    "pfedhn": _hn(),
    "pfedhn_pc": _pfedhn_pc,
    "pfedhn (three widths)": _three_widths,
    "pfedhn (spectral norm)": _hn(spectral_norm=True),
    "pfedhn (embeddings)": lambda base: own(base) | dict(record=("embeddings",)),
    # The paper's fixed descriptor is normalised over clients, our other one over classes.
    "trainable embedding": _hn(dim=At(10, medium=..., quick=...)),
    "fixed embedding": _hn(embed="fixed_columns"),
    "fixed embedding (over classes)": _hn(embed="fixed"),
    # Ours; Per-FedAvg's own Algorithm 1 adapts a model by one step, and LG-FedAvg's code shares the
    # two upper layers on CIFAR-10.
    "pfedhn (literal sign)": _literal,
    "local (all data)": lambda base: _local(base) | _ALL_DATA,
    "pfedhn (all data)": lambda base: own(base) | _ALL_DATA,
    "perfedavg (one step)": use("perfedavg", adapt_steps=1),
    "lgfedavg (two layers)": lambda base: _lgfedavg(base) | dict(head_depth=2),
}
ROWS |= {f"{_K}{n}": _steps(n) for n in (1, 2, 10, 20, 25, 50, 100, 200)}
ROWS |= {f"{_DIM}{n}": _dim(n) for n in (3, 5, 15, 25, 35)}
ROWS |= {f"{_DEPTH}{n}": _hn(n_hidden=n) for n in (1, 2, 4, 5)} | {f"{_DEPTH}3": _hn()}


def rows(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, dict]:
    """Rows of an artefact as changes to its `setting`."""
    base = Experiment(**setting(artefact, profile, dataset, clients))
    return rows_at(profile, base, ROWS, SHOWN[artefact].rows)


def tuned(base: Experiment, trained: dict[str, dict], profile: str, new: bool) -> dict[str, dict]:
    """Rows of Figures 2 and 7: what clients make of each federation that was trained on `base`.

    pFedHN fits embeddings under a frozen hypernetwork, a newcomer's from the mean, its own clients'
    from the trained ones; of the others the global model is tuned by every client alone. Both kinds
    of clients have as many visits, in a run of their own.

    Parameters
    ----------
    trained : {row: changes}
        The federations, as changes to `base`.
    new : bool
        Whether the clients are the held-out ones, else the federation's own.
    """
    visits = VISITS.value(profile)
    fields = dict(participation=1.0, rounds=visits, eval_every=max(1, visits // 10))
    fields |= dict(keep_models=False)
    if new:
        fields |= dict(clients=NOVEL, partition_args=dict(first=base.clients))
    out = {}
    for row, changes in trained.items():
        source = dict(init_from=base.but(**changes))
        if changes["method"] == "pfedhn":
            start = {} if new else {"novel": "trained"}
            fit = use("pfedhn", **changes["method_args"] | {"weight_decay": 0.0} | start)
            out[row] = changes | fit | fields | source | dict(adopt=True)
        else:
            out[f"{row}_ft" if row == "fedavg" else row] = use("local") | fields | source
    return out


# -- runs ------------------------------------------------------------------------------------------


def sweeps(scope: Scope) -> list[Sweep]:
    """All runs of the paper, a Sweep for each column that an artefact shows."""
    special = {"table1": _table1, "table3": _table3, "fig6": _capacity}
    special |= {"fig2": _novel, "fig7": _novel}
    return [
        sweep
        for artefact in PAPER.artefacts
        for sweep in special.get(artefact, _columns)(scope, artefact)
    ]


def _columns(scope: Scope, artefact: str, shown: Shown | None = None, **how: Any) -> list[Sweep]:
    shown, found = shown or SHOWN[artefact], []
    for label in shown.labels(scope.profile):
        column = COLUMNS[label]
        if base := scope.at(PAPER, artefact, column):
            some = rows_at(scope.profile, base, ROWS, column.rows or shown.rows)
            found += scope.sweep(PAPER, base, some, {label: {}}, **how)
    return found


def _table1(scope: Scope, artefact: str) -> list[Sweep]:
    found = _columns(scope, artefact)
    found += _columns(scope, artefact, OURS, quick=1, part="ours")
    if scope.seeds or scope.profile != "paper":
        return found
    fourth = Shown(_TEN[:1], FOURTH)
    return found + _columns(scope, artefact, fourth, seeds=(3,), part="fourth seed")


def _capacity(scope: Scope, artefact: str) -> list[Sweep]:
    return [
        replace(sweep, rows=kept, vary=field)
        for sweep in _columns(scope, artefact)
        for field, names in PANELS.items()
        if (kept := {row: c for row, c in sweep.rows.items() if row in names.value(scope.profile)})
    ]


def _novel(scope: Scope, artefact: str) -> list[Sweep]:
    found = []
    for label in SHOWN[artefact].labels(scope.profile):
        base = scope.at(PAPER, artefact, COLUMNS[label])
        if base is None:
            continue
        some = rows_at(scope.profile, base, ROWS, SHOWN[artefact].rows)
        for new, before, part in ((False, TRAINING, "training"), (True, "", "")):
            cells = tuned(base, some, scope.profile, new)
            found += scope.sweep(PAPER, base, cells, {f"{before}{label}": {}}, part=part)
    return found


def _table3(scope: Scope, artefact: str) -> list[Sweep]:
    tried = tuning(scope)
    cells = [e for sweep in tried for e in sweep.experiments()]
    finished = scope.finished(cells) if cells else None
    chosen = {} if finished is None else rates(finished).chosen.to_dict()
    return tried + [
        replace(s, rows={r: _at(chosen[r], r, c) if chosen else c for r, c in s.rows.items()})
        for s in _columns(scope, artefact)
    ]


def tuning(scope: Scope) -> list[Sweep]:
    """All sweeps of `of_tuning`."""
    return [*of_tuning(scope).values()]


def of_tuning(scope: Scope) -> dict[str, Sweep]:
    """Runs that choose the rates of Table 3's rows, at profile paper alone: four values of each.

    Of pFedMe the clients' own rate varies, of pFedHN the hypernetwork's.
    """
    if scope.profile != "paper" or scope.data("mnist") != "mnist":
        return {}
    tags = {"paper": "pfedhn", "artefact": TUNING, "profile": scope.profile}
    base = Experiment(**setting("table3", scope.profile, "mnist", 50)).but(tags=tags)
    out: dict[str, Sweep] = {}
    column: dict[str, dict[str, Any]] = {"MNIST, N=50": {}}
    for row, changes in rows("table3", scope.profile, "mnist", 50).items():
        each = PERSONAL if row == "pfedme" else RATES
        tried = {f"{row}, rate {rate:g}": _at(rate, row, changes) for rate in each}
        how: dict[str, Any] = dict(seeds=(TUNING_SEED,), part="table3", vary=_rate_of(row))
        for sweep in scope.sweep(PAPER, base, tried, column, **how):
            out[row] = sweep
    return out


def _rate_of(row: str) -> str:
    return {"pfedme": "method_args.personal_lr", "pfedhn": "method_args.lr"}.get(row, "lr")


def _at(rate: float, row: str, changes: dict[str, Any]) -> dict[str, Any]:
    # A row of Table 3 with another value of the rate that is tuned.
    _, _, argument = _rate_of(row).partition(".")
    if not argument:
        return changes | {"lr": rate}
    return changes | {"method_args": changes["method_args"] | {argument: rate}}


# -- numbers of finished runs ----------------------------------------------------------------------


def by_size(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    """Table 2: the rows of the one pFedHN over all clients, as rows of each size.

    Test accuracy is that of the size's clients; the round is chosen by all of them.
    """
    kept = rows[rows.column.str.endswith(ALL) & rows["average"].isin(["client", "pooled"])]
    kept = kept[(kept.metric == "acc_pct") & (kept.when == "before")]
    out = []
    for run, of_run in grouped(kept, "run"):
        arrays = committed.arrays_of(run)
        right, n = arrays["before/test/correct"], arrays["n/test"]
        for place, size in enumerate(SIZES):
            own = slice(place, None, len(SIZES))
            of_clients = accuracy(right[:, own], n[own]).mean(1)
            means = {"client": of_clients, "pooled": accuracy(right[:, own].sum(1), n[own].sum())}
            at = {a: dict(zip(arrays["rounds"], v, strict=True)) for a, v in means.items()}
            tested = of_run[of_run.split == "test"]
            value = [at[v.average][v.rounds] for v in tuples(tested)]
            found = tested.assign(value=value)
            column = of_run.column.iloc[0].removesuffix(ALL) + size
            found = pd.concat([found, of_run[of_run.split != "test"]]).assign(column=column)
            out += found.to_dict("records")
    return out


def rates(rows: pd.DataFrame) -> pd.DataFrame:
    """Validation accuracy (%) at the best round, at each rate that was tried for Table 3.

    A line for each of its rows, a column for each rate, NaN where it was not tried, and the best
    one in the last column, "chosen". Where nothing was tried one line says so.
    """
    tried = [
        sweep.typed(rows[rows.artefact == TUNING]).assign(row=row)
        for row, sweep in of_tuning(Scope("paper")).items()
    ]
    found = validated(pd.concat(tried), ["row", "varied"], PAPER.report["when"])
    if found.empty:
        return pd.DataFrame({"chosen": ["the rates of the profile"]}, index=["not tuned"])
    best = found.unstack("varied").rename_axis(columns="rate")
    best = best.sort_index(axis=1, ascending=False)
    return best.assign(chosen=best.idxmax(axis=1))


def newcomers(rows: pd.DataFrame) -> pd.DataFrame:
    """Figures 2 and 7: a line for each novel client.

    Columns: row, column, seed, client, acc_pct, n (test samples), train (mean accuracy of the same
    seed's training clients, who were tuned as long), gap (points above `train`), and distance
    (total variation to the nearest training client).
    """
    each = []
    for _, of_cell in rows.groupby(["column", "row"], sort=False):
        for v in tuples(pick(of_cell, **PAPER.report)):
            head = pd.DataFrame(dict(row=[v.row], column=v.column, seed=v.seed))
            each.append(head.merge(committed.accuracies(v.run, v.when, v.rounds), how="cross"))
    if not each:
        return pd.DataFrame()
    clients = pd.concat(each, ignore_index=True)
    trained = clients.column.str.startswith(TRAINING)
    level = clients[trained].assign(column=clients.column.str.removeprefix(TRAINING))
    level = level.groupby(["row", "column", "seed"]).acc_pct.mean().rename("train").reset_index()
    new = clients[~trained].merge(level, on=["row", "column", "seed"])
    places = new[["column", "seed"]].drop_duplicates().itertuples(index=False)
    far = pd.concat([_distances(rows, column, seed) for column, seed in places])
    new = new.merge(far, on=["column", "seed", "client"])
    return new.assign(gap=new.acc_pct - new.train)


def _distances(rows: pd.DataFrame, column: str, seed: int) -> pd.DataFrame:
    some = rows.iloc[0]
    usual = setting(some.artefact, profile_of(some.profile), some.dataset)
    trained = rows.run[(rows.column == f"{TRAINING}{column}") & (rows.seed == seed)].iloc[0]
    base = committed.experiment(trained) or Experiment(**usual, seed=int(seed))
    base = base.but(partition_args={"novel_alpha": NOVEL_ALPHAS[column]})
    new = base.but(clients=NOVEL, partition_args={"first": base.clients})
    far = total_variation(*(committed.label_counts(e) for e in (new, base))).min(1)
    return pd.DataFrame({"column": column, "seed": seed, "client": range(NOVEL), "distance": far})


def numbers_of_newcomers(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    """Figures 2 and 7: how newcomers stand, and how accuracy changes with distance.

    "gap_points" and "distance" are means over the newcomers of a run. "slope" is that of accuracy
    over distance, of all newcomers of a row and a seed: points from no overlap of labels to none.
    """
    lines, numbers = newcomers(rows), []
    if lines.empty:
        return []
    keys = ["row", "column", "seed"]
    fresh = rows[~rows.column.str.startswith(TRAINING)].drop_duplicates("run")
    runs: dict[Any, str] = fresh.set_index(keys).run.to_dict()
    for (row, column, seed), group in grouped(lines, keys):
        where = dict(run=runs[row, column, seed], row=row, column=column)
        means = {"gap_points": group.gap.mean(), "distance": group.distance.mean()}
        numbers += [where | dict(metric=m, value=v) for m, v in means.items()]
    for (row, seed), group in grouped(lines, ["row", "seed"]):
        column = group.column.iloc[0]
        where = dict(run=runs[row, column, seed], row=row, column=column)
        fit = slope(group.distance, group.acc_pct)["slope"]
        numbers.append(where | dict(metric="slope", value=fit))
    return numbers


def gaps(lines: pd.DataFrame) -> pd.DataFrame:
    """Figure 2's points, one for each method and alpha: means over clients and seeds.

    low and high are the ends of the gap's 95 % interval, NaN for one seed.

    Parameters
    ----------
    lines : DataFrame
        Of `newcomers`.
    """
    if lines.empty:
        return lines
    keys = ["row", "column"]
    means = lines.groupby(keys, sort=False)[["distance", "gap"]].mean().reset_index()
    ends = plots.intervals(lines.assign(value=lines.gap), "row", "column")
    return means.merge(ends[[*keys, "low", "high"]], on=keys)


def pairs(base: Experiment) -> list[str]:
    """What the clients of `base` tell apart, as "cat / dog"."""
    counts = committed.label_counts(base)
    names = CLASS_NAMES.get(base.dataset) or [str(c) for c in range(counts.shape[1])]
    return [" / ".join(names[c] for c in np.flatnonzero(row)) for row in counts]


def _at_reported_round(rows: pd.DataFrame, probed: list[Probed]) -> Iterator[Probed]:
    # What a probe recorded at the round that is reported.
    best = pick(rows, **PAPER.report).set_index("run")["rounds"] if len(rows) else {}
    return (p.only(best[p.run]) for p in probed)


def _numbers(probed: Probed, values: dict[str, float]) -> list[Number]:
    where = dict(run=probed.run, row=probed.row, column=probed.column, rounds=probed.rounds[-1])
    return [where | dict(metric=m, value=float(v)) for m, v in values.items()]


def crossed(rows: pd.DataFrame, probed: list[Probed]) -> dict[str, np.ndarray]:
    """Figure 3: {seed: accuracies (K, K)} at the round that is reported.

    A row has a client's classifier, a column a client's extractor.
    """
    return {f"seed {p.seed}": p.at()["acc"] for p in _at_reported_round(rows, probed)}


def numbers_of_crossing(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    """Figure 3: accuracy with the own extractor ("own_pct") and with others' ("crossed_pct").

    "own_best_pct" is the share of classifiers for which the own one is the best.
    """
    numbers = []
    for probed in _at_reported_round(rows, recorded("mix_and_match")):
        acc = probed.at()["acc"]
        said = {
            "own_pct": acc.diagonal().mean(),
            "crossed_pct": acc[~np.eye(len(acc), dtype=bool)].mean(),
            "own_best_pct": 100 * (diagonal_rank(acc) == 1).mean(),
        }
        numbers += _numbers(probed, said)
    return numbers


def scaled(swapped: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Figure 3's panels for one seed: accuracies as they are, and scaled as the paper draws them.

    The paper scales each row to its own range, 0 to 1; a row of equal accuracies has none, and is
    NaN. {} for a seed that was not run.

    Parameters
    ----------
    swapped : {str: (K, K) float}
        Accuracies by seed, of `crossed`.
    seed : int
        Which of them.
    """
    acc = swapped.get(f"seed {seed}")
    if acc is None:
        return {}
    ranged = np.where(np.ptp(acc, axis=1, keepdims=True) > 0, row_scaled(acc), np.nan)
    return dict(zip(SCALES, (acc, ranged), strict=True))


def row_ends(panels: dict[str, np.ndarray]) -> dict[str, list[str]]:
    """From where to where each row of Figure 3 goes, at its scaled panel: "78 to 86" in %."""
    acc, ranged = SCALES
    return {ranged: [f"{row.min():.0f} to {row.max():.0f}" for row in panels[acc]]}


# Figure 3's panels, and what their colours are.
SCALES = {
    "Accuracy": "Test accuracy (%)",
    "Scaled to each row's range": "Place in the row's range (0 worst, 1 best)",
}


def embedded(rows: pd.DataFrame, probed: list[Probed]) -> pd.DataFrame:
    """Figure 4: t-SNE of the embeddings at the round that is reported.

    Columns: x, y, group (the coarse class), column (the seed), and said: how well points cluster in
    all dimensions, in words.
    """
    parts = []
    for p in _at_reported_round(rows, probed):
        v = p.at()["v"]
        x, y = tsne(v, PERPLEXITY).T
        group = copies.coarse_classes(rows.dataset.iloc[0], len(x))
        found = _clustering(v, group)
        near = int((group == 0).sum()) - 1
        said = (
            f"of {near} neighbours {found['purity']:.0%} are of the group (chance "
            f"{found['chance']:.0%}), permutation p = {found['p']:.3f}, perplexity {PERPLEXITY:g}"
        )
        part = dict(x=x, y=y, group=group, column=f"seed {p.seed}", said=said)
        parts.append(pd.DataFrame(part))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def numbers_of_clusters(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    """Figure 4: how often a nearest neighbour is of the same coarse class, and what chance gives.

    The metrics are those of `stats.clustering`.
    """
    numbers = []
    for probed in _at_reported_round(rows, recorded("embeddings")):
        v = probed.at()["v"]
        numbers += _numbers(
            probed, _clustering(v, copies.coarse_classes(rows.dataset.iloc[0], len(v)))
        )
    return numbers


PERPLEXITY = 5.0  # of Figure 4's t-SNE [C]


def _clustering(points: np.ndarray, group: np.ndarray) -> dict[str, float]:
    # Every client has as many neighbours as there are fellows of its group.
    return clustering(points, group, neighbours=int((group == 0).sum()) - 1)


def capacity(rows: pd.DataFrame) -> pd.DataFrame:
    """Figure 6: the reported accuracy of each run, as `value`.

    `column` is the panel, what was varied; `layer` is how much of it there is.
    """
    if rows.empty:
        return rows
    got = pick(rows, **PAPER.report)
    panels = {
        "method_args.dim": "(a) Dimension of the embedding",
        "method_args.n_hidden": "(b) Hidden layers",
    }
    parts = []
    for sweep in _capacity(Scope(profile_of(rows.profile.iloc[0])), "fig6"):
        own, default = sweep.typed(got), 1 + sweep.base.clients // 4
        number = [n or default for n in own.varied]  # 0 is the default of a dimension
        parts.append(own.assign(column=panels[sweep.vary], layer=number, row="pfedhn"))
    return pd.concat(parts).sort_values(["column", "layer"])


# -- claims ----------------------------------------------------------------------------------------

_POINTS: dict[str, Any] = dict(unit="points", small=2.0, digits=1)
TERMS = Terms(
    {
        "gap_points": Measure(pooled=True),
        "own_pct": Measure(name="Own extractor", across=True, **_POINTS),
        "crossed_pct": Measure(name="another client's", across=True, **_POINTS),
        "purity": Measure(
            name="Neighbours of the same coarse class (%)", scale=100, across=True, **_POINTS
        ),
        "chance": Measure(across=True, **_POINTS),
        "slope": Measure("{row}, accuracy at distance 0 - at distance 1", across=True, **_POINTS),
    },
    our_columns=(f"*, {ALL}",),  # of Table 2's one run, which has all sizes
)

# -- the paper -------------------------------------------------------------------------------------

_CIFAR10 = ("cifar10",)
_NEWCOMERS = Artefact(
    _CIFAR10, show=(), quick=1, medium=2, numbers=numbers_of_newcomers, together=True
)
PAPER = Paper(
    key="pfedhn",
    artefacts={
        "table1": Artefact(("cifar10", "cifar100", "omniglot"), quick=2, medium=3),
        "table2": Artefact(("cifar10", "cifar100"), quick=1, medium=2, numbers=by_size),
        "fig2": _NEWCOMERS,
        "fig3": Artefact(
            _CIFAR10, show=(), quick=2, medium=3, paper=4, numbers=numbers_of_crossing
        ),
        "fig4": Artefact(("cifar100",), show=(), quick=1, paper=2, numbers=numbers_of_clusters),
        "table3": Artefact(("mnist",), quick=1, tuned=True),
        "fig5": Artefact(_CIFAR10, ("curves",), quick=1, medium=3),
        "fig6": Artefact(_CIFAR10, quick=1, medium=3),
        "table4": Artefact(_CIFAR10, quick=1, medium=3),
        "fig7": _NEWCOMERS,
        "appc5": Artefact(_CIFAR10, quick=1),
    },
    claims=claims.read("pfedhn", TERMS),
    sweeps=sweeps,
    own="pfedhn",
    report=dict(select="best_val", when="before", average="client"),
    runs=3,
    draws=3,  # each seed draws clients anew [O]
    tables=("table1", "table3", "table4"),
    setting=setting,
    rows=rows,
)
