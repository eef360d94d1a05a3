"""pFedHN and pFedHN-PC (Shamsian et al., ICML 2021): Tables 1 to 4, Figures 2 to 7, Appendix C.5. Figure 1 is a diagram."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from pfl_core.analysis.select import pick
from pfl_core.analysis.stats import (
    clustering,
    diagonal_rank,
    row_scaled,
    slope,
    total_variation,
    tsne,
)
from pfl_core.data import pools as data
from pfl_core.experiments import committed
from pfl_core.experiments.experiment import Experiment
from pfl_core.papers.base import (
    FULL,
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

# Sec. 5, App. B [P], released trainer [O]: batches of 64, drawn anew for each of K = 50 local steps; 5000 communication steps, of one
# client each for pFedHN, of 5 clients a round for baselines [I]. Baselines' rates are tuned on validation data [P]; here they are one of
# the paper's grid [C]. What is hers of pFedHN's clients and server are the trainer's defaults [O].
# quick and smoke [C]: 300 communication steps of K = 10, small batches and networks, few samples a client. Rates of the paper's grid by
# validation data with seed 7, which no artefact shows.
# medium: Table 1 and Figure 3 are the paper's own runs over CIFAR-10 with 10 clients; the rest has 1000 of the 5000 steps.
_SCALE: dict[str, dict[str, Any]] = {
    "paper": dict(batch=64, steps=50, lr=0.01, rounds=1000, eval_every=20),
    "medium": dict(batch=64, steps=50, lr=0.01, rounds=200, eval_every=4),
    "quick": dict(batch=16, steps=10, lr=0.05, rounds=60, eval_every=6, max_samples=50),
    "smoke": dict(batch=4, steps=1, lr=0.05, rounds=2, eval_every=2, max_samples=8),
}
_REAL = dict(max_samples=300)  # of quick, where data are not embedded
_NET = {  # kernels of LeNet, hidden units of MNIST's network, width of the hypernetwork [P; C]
    "paper": (16, 100, 100),
    "medium": (16, 100, 100),
    "quick": (4, 32, 50),
    "smoke": (2, 8, 8),
}
_CLIENTS = {  # where the paper has one number: paper (and medium), quick, smoke
    "table2": (75, 12, 6),
    "fig2": (90, 20, 20),
    "fig7": (90, 20, 20),
    "fig3": (10, 10, 10),
    "fig4": (100, 50, 20),
    "appc5": (50, 20, 20),
}
_VARIED = {  # Figures 5 and 6: local steps K, dimensions of the embedding, hidden layers [P]; the defaults among them below [C]
    "paper": ((1, 25, 50, 100, 200), (5, 15, 25, 35), (1, 2, 3, 4, 5)),
    "medium": ((1, 25, 50, 100), (5, 15, 25, 35), (1, 2, 3, 4, 5)),
    "quick": ((1, 10, 20), (3, 15), (1, 3)),
    "smoke": ((1, 2), (3, 15), (1, 3)),
}
NOVEL = 10  # held-out clients (Sec. 5.3)
SIZES = ("S", "M", "L")  # 8, 16 and 32 kernels (App. B)
ALL = "all sizes"  # the column of Table 2's one pFedHN
TRAINING = "training, "  # before a column of Figures 2 and 7 over the training clients
LABELS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "mnist": "MNIST", "omniglot": "Omniglot"}
CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()


def clients_of(artefact: str, profile: str) -> int:
    """How many clients an artefact has whose number the paper fixes (50, and 10 below its scale, in Figures 5 and 6)."""
    return _CLIENTS.get(artefact, (50, 10, 10))[{"quick": 1, "smoke": 2}.get(profile, 0)]


def columns(artefact: str, profile: str) -> dict[str, tuple[str, int]]:
    """The columns of an artefact: {label: (data set, clients)}; below profile paper a table has its first one only."""
    counts = (10, 50, 100) if artefact in PAPER.tables else (clients_of(artefact, profile),)
    places = [
        (d, n)
        for d in PAPER.artefacts[artefact].data
        for n in ((50,) if d == "omniglot" else counts)
    ]
    return {
        f"{LABELS[d]}, N={n}": (d, n) for d, n in (places if profile == "paper" else places[:1])
    }


def _scale(artefact: str, profile: str) -> str:
    # What medium has of Table 1 are the paper's own runs, id for id.
    return "paper" if profile == "medium" and artefact in ("table1", "fig3") else profile


def setting(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, Any]:
    """Fields of the Experiment that an artefact's runs vary; those of baselines, pFedHN's own are with its rows."""
    profile = _scale(artefact, profile)
    kernels, hidden, _ = _NET[profile]
    clients = clients or clients_of(artefact, profile)
    fields = dict(
        dataset=dataset, clients=clients, partition="pfedhn_classes", plan="fresh", eval_after=False
    )
    fields |= dict(
        model="lenet", model_args={"kernels": kernels}, participation=min(1.0, 5 / clients)
    )
    fields |= _SCALE[profile] | (
        _REAL if profile == "quick" and not dataset.startswith("digits") else {}
    )
    if artefact == "table3":
        fields |= dict(
            model="mlp",
            model_args={"hidden": hidden},
            dataset="mnist" if profile == "paper" else dataset,
        )
    elif artefact == "table2":
        fields |= dict(model_args={"kernels": 2 * kernels}) | (
            {"rounds": 40} if profile == "quick" else {}
        )
    elif artefact == "appc5" and profile == "paper":
        fields |= dict(partition="dirichlet_columns", partition_args={"alpha": 0.1, "novel": 0})
    elif artefact in (
        "fig2",
        "fig7",
        "appc5",
    ):  # below the paper's scale App. C.5 has Figure 2's training clients
        args = dict(alpha=0.1, novel_alpha=1.0, novel=NOVEL, of=clients + NOVEL)
        fields |= dict(partition="dirichlet_columns", partition_args=args, keep_models=True)
    elif artefact == "fig4":
        fields |= dict(partition="coarse") | ({"rounds": 120} if profile == "quick" else {})
    elif dataset == "omniglot":
        fields |= dict(partition="alphabets", model="lenet4", model_args={})
    return fields


def own(base: Experiment, profile: str, method: str = "pfedhn", **args: Any) -> dict[str, Any]:
    """Changes that make `base`, a baseline's, one of pFedHN's: one client a communication step, as many client visits. The classifiers
    of pFedHN-PC are drawn one by one, as the authors' clients build theirs."""
    paper = profile in FULL
    how = dict(
        participation=1 / base.clients,
        rounds=5 * base.rounds,
        eval_every=30 if paper else 5 * base.eval_every,
    )
    how |= dict(
        lr=0.005 if paper else 0.01, momentum=0.9, weight_decay=5e-5, clip=50.0, eval_after=False
    )
    how |= {"head_init": "own"} if method == "pfedhn_pc" else {}
    return use(method, **({} if paper else {"hidden": _NET[profile][2]}) | args) | how


def literal(base: Experiment | None, profile: str) -> dict[str, dict]:
    """Our row for Algorithm 1 as printed, whose step climbs; 30 communication steps, for after about 60 weights overflow."""
    few = dict(rounds=min(30, base.rounds), eval_every=6) if base else {}
    return {"pfedhn (literal sign)": own(base, profile, hn_sign="literal") | few} if base else {}


def all_data(base: Experiment | None, profile: str) -> dict[str, dict]:
    """Our rows of Table 1 where all data are dealt out, as the paper's formula does; its released partition leaves a third to nobody.
    None where clients' data are cut anyway."""
    some = (
        rows("table1", profile, base.dataset, base.clients) if base and not base.max_samples else {}
    )
    return {
        f"{r} (all data)": some[r] | dict(partition_args={"leftover": False})
        for r in ("local", "pfedhn")
        if some
    }


def _but_default(of: int = 0, **args: int) -> dict[str, int]:
    # What is the default anyway is left out, so that it is one run with the other artefacts'.
    default = dict(n_hidden=3, dim=1 + of // 4)
    return {k: v for k, v in args.items() if v != default[k]}


def baselines(base: Experiment, profile: str) -> dict[str, dict]:
    """Rows of Table 2's baselines for the clients of `base`."""
    fedavg = use("fedavg") | dict(keep_models=True)
    pfedme = use(
        "pfedme", inner_steps=3, personal_lr=0.01 if profile in FULL else 0.03
    )  # 20 x 3 steps [P]
    more = dict(
        rounds=max(1, base.rounds // 5), eval_every=max(1, base.eval_every // 5)
    )  # 1000 of 5000 steps [P]
    return {
        "fedavg": fedavg,
        "perfedavg": use("perfedavg"),
        "pfedme": pfedme | dict(steps=max(1, base.steps * 2 // 5), lr=0.05),
        "lgfedavg": use("lgfedavg") | more | dict(init_from=base.but(**fedavg)),
    }


def rows(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, dict]:
    """Rows of an artefact as changes to its `setting`."""
    profile = _scale(artefact, profile)
    base = Experiment(**setting(artefact, profile, dataset, clients))
    probe = {"fig3": "mix_and_match", "fig4": "embeddings"}.get(artefact)
    record = {"record": (probe,)} if probe else {}
    hn = own(base, profile, **{"n_hidden": 1} if artefact == "table3" else {}) | record
    others = baselines(base, profile)
    if artefact == "table1":
        alone = dict(
            rounds=40 if profile == "paper" else 5 * base.rounds // base.clients, participation=1.0
        )
        start = {"local": use("local") | alone | dict(eval_every=2), "fedavg": others.pop("fedavg")}
        start |= {"perfedavg": others.pop("perfedavg"), "fedper": use("fedper")}
        figure3 = clients == 10 and dataset in ("cifar10", "digits")  # whose run this is, too
        mixed = dict(record=("mix_and_match",)) if figure3 else {}
        return start | others | {"pfedhn": hn, "pfedhn_pc": own(base, profile, "pfedhn_pc") | mixed}
    if artefact == "table3":
        return {r: others[r] for r in ("fedavg", "perfedavg", "pfedme")} | {"pfedhn": hn}
    if artefact == "table4":
        return {"pfedhn": own(base, profile, spectral_norm=True), "pfedhn (no spectral norm)": hn}
    if artefact == "table2":  # its baselines have groups of clients of their own: `sizes`
        each = dict(rounds=5000 if profile == "paper" else base.rounds * base.clients)
        return {"pfedhn": own(base, profile, widths=[0.25, 0.5, 1.0]) | each}
    if artefact in ("fig2", "fig7"):
        return {"pfedhn": hn} | {m: others[m] for m in ("perfedavg", "pfedme", "fedavg")}
    if artefact == "fig3":
        return {"pfedhn_pc": own(base, profile, "pfedhn_pc") | record}
    if artefact in ("fig5", "fig6"):
        steps, dims, depths = _VARIED[profile]
        if artefact == "fig5":
            return {f"K = {k}": hn | {"steps": k} for k in steps}
        wide = {
            f"embedding dimension = {d}": own(base, profile, **_but_default(dim=d, of=base.clients))
            for d in dims
        }
        deep = {
            f"hidden layers = {n}": own(base, profile, **_but_default(n_hidden=n)) for n in depths
        }
        return wide | deep
    if artefact == "appc5":
        wide = {"dim": 10} if profile == "paper" else {}
        # The paper's descriptor is normalised over clients, ours over classes.
        kinds = {"": "fixed_columns", " (over classes)": "fixed"}
        fixed = {
            f"fixed embedding{label}": own(base, profile, embed=kind)
            for label, kind in kinds.items()
        }
        return {"trainable embedding": own(base, profile, **wide)} | fixed
    return {"pfedhn": hn}


def tuned(base: Experiment, trained: dict[str, dict], profile: str, new: bool) -> dict[str, dict]:
    """Rows of Figures 2 and 7: what each trained federation of `base` makes of the held-out clients (new), or of its own clients.

    pFedHN fits embeddings under a frozen hypernetwork, a newcomer's from the mean, its own clients' from the trained ones; of the others
    the global model is tuned by every client alone. Both kinds of clients have as many visits, in a run of their own.
    """
    visits = {"quick": 20, "smoke": 2}.get(profile, 200)  # the paper does not say; [C]
    how = dict(participation=1.0, rounds=visits, eval_every=max(1, visits // 10), keep_models=False)
    how |= dict(clients=NOVEL, partition_args=dict(first=base.clients)) if new else {}
    out = {}
    for row, changes in trained.items():
        source = dict(init_from=base.but(**changes))
        if changes["method"] == "pfedhn":
            start = {} if new else {"novel": "trained"}
            fit = use("pfedhn", **changes["method_args"] | {"weight_decay": 0.0} | start)
            out[row] = changes | fit | how | source | dict(adopt=True)
        else:
            out[f"{row}_ft" if row == "fedavg" else row] = use("local") | how | source
    return out


# -- all runs ------------------------------------------------------------------------------------------------------------


def sweeps(scope: Scope) -> list[Sweep]:
    """All runs of the paper, artefact by artefact; below profile paper some tables and figures have fewer columns and rows."""
    special = {"table1": _table1, "table2": _table2, "fig2": _novel, "fig7": _novel}
    return [
        s for artefact in PAPER.artefacts for s in special.get(artefact, _grid)(scope, artefact)
    ]


def _grid(scope: Scope, artefact: str) -> list[Sweep]:
    # Each column has its own number of client visits, and so a base of its own.
    found = []
    for label, (dataset, clients) in columns(artefact, scope.profile).items():
        base = scope.base(PAPER, artefact, dataset, clients=clients)
        some = rows(artefact, scope.profile, base.dataset, clients) if base else {}
        found += scope.sweep(PAPER, base, some, {label: {}})
    return found


def _table1(scope: Scope, artefact: str) -> list[Sweep]:
    base = scope.base(PAPER, artefact, "cifar10", clients=10)
    ours = literal(base, scope.profile) | all_data(base, scope.profile)
    return _grid(scope, artefact) + scope.sweep(
        PAPER, base, ours, {"CIFAR-10, N=10": {}}, quick=1, part="ours"
    )


def _table2(scope: Scope, artefact: str) -> list[Sweep]:
    # A run of each baseline for each size's clients, one of pFedHN for all.
    whole = scope.profile == "paper"
    found = []
    for dataset in PAPER.artefacts[artefact].data[: None if whole else 1]:
        base = scope.base(PAPER, artefact, dataset)
        for g, size in enumerate(SIZES) if base else ():
            n, kernels = base.clients, base.model_args["kernels"] * 2**g // 4
            group = dict(
                clients=n // 3, participation=min(1.0, 5 * 3 / n), model_args={"kernels": kernels}
            )
            group = base.but(**group, partition_args=dict(of=n, first=g, every=3))
            some = {
                m: v for m, v in baselines(group, scope.profile).items() if whole or m == "pfedme"
            }
            found += scope.sweep(PAPER, group, some, {f"{LABELS[dataset]}, {size}": {}})
        hn = rows(artefact, scope.profile, base.dataset) if base else {}
        found += scope.sweep(PAPER, base, hn, {f"{LABELS[dataset]}, {ALL}": {}})
    return found


def _novel(scope: Scope, artefact: str) -> list[Sweep]:
    whole = scope.profile == "paper"
    found = []
    for alpha in (0.1, 0.25, 0.5, 1.0) if whole else (1.0,):
        base = scope.base(PAPER, artefact, "cifar10", partition_args={"novel_alpha": alpha})
        every = rows(artefact, scope.profile, base.dataset) if base else {}
        some = {m: v for m, v in every.items() if whole or m in ("pfedhn", "fedavg")}
        for new, before in ((False, TRAINING), (True, "")):
            cells = tuned(base, some, scope.profile, new) if base else {}
            found += scope.sweep(
                PAPER,
                base,
                cells,
                {f"{before}alpha = {alpha:g}": {}},
                part="" if new else "training",
            )
    return found


# -- numbers of finished runs --------------------------------------------------------------------------------------------


def by_size(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    """Table 2: pFedHN's rows over all clients as rows of each size: test accuracy of its clients; the round is chosen by all of them."""
    kept = rows[
        rows.column.str.endswith(ALL) & (rows["mean"] == "client") & (rows.metric == "acc_pct")
    ]
    out = []
    for run, own_rows in kept[kept.when == "before"].groupby("run", sort=False):
        a = committed.arrays_of(run)
        acc = accuracy(a["before/test/correct"], a["n/test"])
        for g, size in enumerate(SIZES):
            mean = dict(zip(a["rounds"].tolist(), acc[:, g :: len(SIZES)].mean(1), strict=True))
            values = own_rows.value.mask(own_rows.split == "test", own_rows["round"].map(mean))
            sized = own_rows.assign(
                column=own_rows.column.str.removesuffix(ALL) + size, value=values
            )
            out += sized.to_dict("records")
    return out


def newcomers(rows: pd.DataFrame) -> pd.DataFrame:
    """Figures 2 and 7: a line for each novel client: row, column, seed, client, acc_pct, n, train, distance, gap.

    train: mean accuracy of the same seed's training clients, who were tuned as long; gap: points above it; distance: total variation to
    the nearest training client.
    """
    each = []
    for _, own_rows in rows.groupby(["column", "row"], sort=False):
        for v in pick(own_rows, **PAPER.report).itertuples():
            head = pd.DataFrame(dict(row=[v.row], column=v.column, seed=v.seed))
            each.append(head.merge(committed.accuracies(v.run, v.when, v.round), how="cross"))
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
    base = Experiment(**setting(some.artefact, some.profile, some.dataset), seed=int(seed))
    base = base.but(partition_args={"novel_alpha": float(column.split(" = ")[1])})
    new = base.but(clients=NOVEL, partition_args={"first": base.clients})
    far = total_variation(*(committed.label_counts(e) for e in (new, base))).min(1)
    return pd.DataFrame({"column": column, "seed": seed, "client": range(NOVEL), "distance": far})


def numbers_of_newcomers(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    """Figures 2 and 7: mean gap and distance of each run's newcomers, and how accuracy changes with distance in each row."""
    lines, numbers = newcomers(rows), []
    if lines.empty:
        return []
    runs = (
        rows[~rows.column.str.startswith(TRAINING)]
        .drop_duplicates("run")
        .set_index(["row", "column", "seed"])
        .run
    )
    for (row, column, seed), group in lines.groupby(["row", "column", "seed"], sort=False):
        where = dict(run=runs[row, column, seed], row=row, column=column)
        means = {"gap_points": group.gap.mean(), "distance": group.distance.mean()}
        numbers += [where | dict(metric=m, value=v) for m, v in means.items()]
    for row, group in lines.groupby("row", sort=False):
        fit = slope(group.distance, group.acc_pct)  # points from no overlap of labels to none
        where = dict(run=runs[row].iloc[0], row=row, column=group.column.iloc[0])
        numbers += [where | dict(metric=f"slope_{k}", value=v) for k, v in fit.items()]
    return numbers


def gaps(lines: pd.DataFrame) -> pd.DataFrame:
    """Figure 2's points: means over clients and seeds of the lines of `newcomers`, one for each method and alpha."""
    if lines.empty:
        return lines
    return lines.groupby(["row", "column"], sort=False)[["distance", "gap"]].mean().reset_index()


def pairs(base: Experiment) -> list[str]:
    """What the clients of `base` tell apart, as "cat / dog"."""
    counts = committed.label_counts(base)
    names = CLASSES if base.dataset == "cifar10" else [str(c) for c in range(counts.shape[1])]
    return [" / ".join(names[c] for c in np.flatnonzero(row)) for row in counts]


def _reported(
    rows: pd.DataFrame, probed: list[Probed]
) -> Iterator[tuple[Probed, dict[str, np.ndarray]]]:
    # What a probe recorded, with its values at the round that is reported.
    rounds = pick(rows, **PAPER.report).set_index("run")["round"] if len(rows) else {}
    return ((p, p.at(rounds[p.run])) for p in probed)


def crossed(rows: pd.DataFrame, probed: list[Probed]) -> dict[str, np.ndarray]:
    """Figure 3: {seed: accuracies (K, K)} at the round that is reported, row: classifier, column: extractor."""
    return {f"seed {p.seed}": values["acc"] for p, values in _reported(rows, probed)}


def numbers_of_crossing(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    """Figure 3: accuracy with the own extractor and with others', and for how many classifiers the own one is the best."""
    numbers = []
    for p, values in _reported(rows, recorded("mix_and_match")):
        acc = values["acc"]
        said = dict(
            own_pct=acc.diagonal().mean(), crossed_pct=acc[~np.eye(len(acc), dtype=bool)].mean()
        )
        said |= dict(own_best_pct=100 * (diagonal_rank(acc) == 1).mean())
        numbers += [
            dict(run=p.run, row=p.row, column=p.column, metric=m, value=float(v))
            for m, v in said.items()
        ]
    return numbers


def scaled(swapped: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Figure 3's panels for one seed: accuracies as they are, and scaled to each row's range as the paper draws them."""
    acc = swapped.get(f"seed {seed}")
    return (
        {}
        if acc is None
        else {"Accuracy": acc, "Scaled to each row's range": 100 * row_scaled(acc)}
    )


def _groups(rows: pd.DataFrame, clients: int) -> np.ndarray:
    # (K,) the coarse class of each client's classes: clients are dealt to them in equal shares, one class after the other.
    kinds = len(np.unique(data.load(rows.dataset.iloc[0]).extra["coarse"]))
    return np.arange(clients) // (clients // kinds)


def embedded(rows: pd.DataFrame, probed: list[Probed]) -> pd.DataFrame:
    """Figure 4: t-SNE of the embeddings at the round that is reported: x, y, group (coarse class), column."""
    parts = []
    for p, values in _reported(rows, probed):
        x, y = tsne(values["v"]).T
        parts.append(
            pd.DataFrame(dict(x=x, y=y, group=_groups(rows, len(x)), column=f"seed {p.seed}"))
        )
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def numbers_of_clusters(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    """Figure 4: how often a nearest neighbour is of the same coarse class, against permuted labels (see `stats.clustering`)."""
    numbers = []
    for p, values in _reported(rows, recorded("embeddings")):
        group = _groups(rows, len(values["v"]))
        near = clustering(values["v"], group, neighbours=int((group == 0).sum()) - 1)
        numbers += [
            dict(run=p.run, row=p.row, column=p.column, metric=m, value=v) for m, v in near.items()
        ]
    return numbers


def capacity(rows: pd.DataFrame) -> pd.DataFrame:
    """Figure 6: the reported accuracy (value) of each run, what was varied in panel `column`, how much of it as `layer`."""
    if rows.empty:
        return rows
    got = pick(rows, **PAPER.report)
    what, number = zip(*(r.split(" = ") for r in got.row), strict=True)
    panel = {
        "embedding dimension": "(a) Dimension of the embedding",
        "hidden layers": "(b) Hidden layers",
    }
    got = got.assign(column=[panel[w] for w in what], layer=[int(n) for n in number], row="pfedhn")
    return got.sort_values(["column", "layer"])


# -- claims --------------------------------------------------------------------------------------------------------------


def _cells(rows: pd.DataFrame, column: str) -> dict[str, float]:
    """{row: reported number} of one column."""
    names = dict.fromkeys(rows[(rows.column == column) & (rows["mean"] == "client")].row)
    return {r: value(rows, r, column, **PAPER.report) for r in names}


def _ahead(rows: pd.DataFrame, ours: tuple[str, ...]) -> tuple[str, bool]:
    gains = {}
    for c in dict.fromkeys(rows.column):
        acc = _cells(rows, c)
        # Rows of ours have (...).
        others = [v for r, v in acc.items() if r not in ("pfedhn", "pfedhn_pc") and "(" not in r]
        if others and set(ours) & set(acc):
            gains[c] = max(acc[r] for r in ours if r in acc) - max(others)
    if not gains:
        raise LookupError(" / ".join(ours))
    return ", ".join(f"{c}: {g:+.1f} points" for c, g in gains.items()), all(
        g >= 2 for g in gains.values()
    )


def _newcomers_lose(rows: pd.DataFrame) -> tuple[str, bool]:
    said, good = [], True
    own_rows = rows[rows.metric == "gap_points"]
    for c in dict.fromkeys(own_rows.column):
        gaps = {
            r: derived(rows, "gap_points", r, c).mean()
            for r in dict.fromkeys(own_rows[own_rows.column == c].row)
        }
        hn = gaps.pop("pfedhn", None)
        if hn is None or not gaps:
            raise LookupError("pfedhn beside a baseline")
        best = max(gaps, key=gaps.get)
        said.append(f"{c}: {hn:+.1f} points, {best} {gaps[best]:+.1f}")
        good &= hn > gaps[best]
    return "; ".join(said), good


def _crossing(rows: pd.DataFrame) -> tuple[str, bool]:
    own_pct, other = (derived(rows, m).mean() for m in ("own_pct", "crossed_pct"))
    return (
        f"{own_pct:.1f} % with the own extractor, {other:.1f} % with another client's",
        own_pct - other > 5,
    )


def _clustered(rows: pd.DataFrame) -> tuple[str, bool]:
    purity, chance, p = (derived(rows, m).mean() for m in ("purity", "chance", "p"))
    said = f"{100 * purity:.0f} % of nearest neighbours share the class, chance {100 * chance:.0f} %, p = {p:.3f}"
    return said, p < 0.01


def _steps(rows: pd.DataFrame) -> tuple[str, bool]:
    c = rows.column.iloc[0]
    acc = {int(r.split()[-1]): v for r, v in _cells(rows, c).items()}
    if 1 not in acc or len(acc) < 2:
        raise LookupError("K = 1 beside a larger K")
    worst = min(v for k, v in acc.items() if k > 1)
    return ", ".join(f"K = {k}: {v:.1f}" for k, v in sorted(acc.items())), worst - acc[1] > 5


def _descriptor(rows: pd.DataFrame) -> tuple[str, bool]:
    c = rows.column.iloc[0]
    a, b = (value(rows, f"{kind} embedding", c, **PAPER.report) for kind in ("trainable", "fixed"))
    return f"{a:.1f} trainable, {b:.1f} fixed", abs(a - b) <= 2


CLAIMS = (
    Claim(
        "pFedHN, with or without personal classifiers, is 2 to 10 points above every other approach (Sec. 5.1, Table 1)",
        "table1",
        partial(_ahead, ours=("pfedhn", "pfedhn_pc")),
    ),
    Claim(
        "One pFedHN serves three network sizes better than a federation for each, by 4 to 8 points (Sec. 5.2; Table 2: 2.8 to 6.6)",
        "table2",
        partial(_ahead, ours=("pfedhn",)),
    ),
    Claim(
        "On novel clients pFedHN loses least, at every distance from the training clients (Sec. 5.3, Fig. 2)",
        "fig2",
        _newcomers_lose,
    ),
    Claim(
        "pFedHN-PC's extractors are personal: with another client's classifier they lose accuracy (Fig. 3; here: 5 points)",
        "fig3",
        _crossing,
    ),
    Claim(
        "Embeddings of clients with one coarse class cluster (Sec. 5.5, Fig. 4)", "fig4", _clustered
    ),
    Claim(
        "Many local steps are far better than one, and how many matters little (App. C.2.1, Fig. 5: all K > 1 by more than 5 points)",
        "fig5",
        _steps,
    ),
    Claim(
        "A fixed descriptor is as good as a trained embedding (App. C.5: within 2 points)",
        "appc5",
        _descriptor,
    ),
)

_CIFAR10 = ("cifar10",)
PAPER = Paper(
    key="pfedhn",
    artefacts={
        "table1": Artefact(("cifar10", "cifar100", "omniglot"), quick=2, medium=3),
        "table2": Artefact(("cifar10", "cifar100"), quick=1, numbers=by_size),
        "fig2": Artefact(_CIFAR10, show=(), quick=1, numbers=numbers_of_newcomers),
        "fig3": Artefact(_CIFAR10, show=(), quick=2, medium=3, numbers=numbers_of_crossing),
        "fig4": Artefact(("cifar100",), show=(), quick=1, numbers=numbers_of_clusters),
        "table3": Artefact(("mnist",), quick=1),
        "fig5": Artefact(_CIFAR10, ("curves",), quick=1, medium=2),
        "fig6": Artefact(_CIFAR10, quick=1, own="hidden layers = 3"),
        "table4": Artefact(_CIFAR10, quick=1, medium=2),
        "fig7": Artefact(_CIFAR10, show=(), quick=1, numbers=numbers_of_newcomers),
        "appc5": Artefact(_CIFAR10, quick=1, own="trainable embedding"),
    },
    claims=CLAIMS,
    sweeps=sweeps,
    own="pfedhn",
    report=dict(select="best_val", when="before", mean="client"),
    tables=("table1", "table3", "table4"),
    setting=setting,
    rows=rows,
)
