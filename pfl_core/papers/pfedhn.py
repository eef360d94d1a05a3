"""pFedHN and pFedHN-PC (Shamsian et al., ICML 2021): Tables 1 to 4, Figures 2 to 7, Appendix C.5. Figure 1 is a diagram."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from pfl_core.analysis.select import pick
from pfl_core.analysis.stats import clustering, diagonal_rank, row_scaled, slope, total_variation, tsne
from pfl_core.data import pools as data
from pfl_core.experiments import experiment as experiments
from pfl_core.experiments import store
from pfl_core.experiments.experiment import Experiment
from pfl_core.papers.base import FULL, Claim, derived, use, value

ARTEFACTS = ["table1", "table2", "fig2", "fig3", "fig4", "table3", "fig5", "fig6", "table4", "fig7", "appc5"]
TABLES = ("table1", "table3", "table4")  # those whose rows `presets` gives
OWN = "pfedhn"
REPORT: dict[str, str] = dict(select="best_val", when="before", mean="client")
WHEN: dict[str, str] = {}
MEDIUM: dict[str, int] = {"table1": 3, "fig3": 3, "fig5": 2, "table4": 2}  # artefact: seeds

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


def clients_of(artefact: str, profile: str) -> int:
    """How many clients an artefact has whose number the paper fixes (50, and 10 below its scale, in Figures 5 and 6)."""
    return _CLIENTS.get(artefact, (50, 10, 10))[{"quick": 1, "smoke": 2}.get(profile, 0)]


def columns(profile: str) -> dict[str, tuple[str, int]]:
    """Table 1's columns at a profile: {label: (data set, clients)}; medium has the first one, those below it 10 clients and 8 alphabets
    of Omniglot."""
    every = {f"CIFAR-{c}, N={n}": (f"cifar{c}", n) for c in (10, 100) for n in (10, 50, 100)}
    alphabets = 50 if profile == "paper" else 8
    every[f"Omniglot, N={alphabets}"] = ("omniglot", alphabets)
    if profile == "medium":
        return {"CIFAR-10, N=10": every["CIFAR-10, N=10"]}
    return {label: v for label, v in every.items() if profile == "paper" or v[1] <= 10}


def _scale(artefact: str, profile: str) -> str:
    # What medium has of Table 1 are the paper's own runs, id for id.
    return "paper" if profile == "medium" and artefact in ("table1", "fig3") else profile


def setting(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, Any]:
    """Fields of the Experiment that an artefact's runs vary; those of baselines, pFedHN's own are with its rows."""
    profile = _scale(artefact, profile)
    kernels, hidden, _ = _NET[profile]
    clients = clients or clients_of(artefact, profile)
    fields = dict(dataset=dataset, clients=clients, partition="pfedhn_classes", plan="fresh", eval_after=False)
    fields |= dict(model="lenet", model_args={"kernels": kernels}, participation=min(1.0, 5 / clients))
    fields |= _SCALE[profile] | (_REAL if profile == "quick" and not dataset.startswith("digits") else {})
    if artefact == "table3":
        fields |= dict(model="mlp", model_args={"hidden": hidden}, dataset="mnist" if profile == "paper" else dataset)
    elif artefact == "table2":
        fields |= dict(model_args={"kernels": 2 * kernels}) | ({"rounds": 40} if profile == "quick" else {})
    elif artefact == "appc5" and profile == "paper":
        fields |= dict(partition="dirichlet_columns", partition_args={"alpha": 0.1, "novel": 0})
    elif artefact in ("fig2", "fig7", "appc5"):  # below the paper's scale App. C.5 has Figure 2's training clients
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
    how = dict(participation=1 / base.clients, rounds=5 * base.rounds, eval_every=30 if paper else 5 * base.eval_every)
    how |= dict(lr=0.005 if paper else 0.01, momentum=0.9, weight_decay=5e-5, clip=50.0, eval_after=False)
    how |= {"head_init": "own"} if method == "pfedhn_pc" else {}
    return use(method, **({} if paper else {"hidden": _NET[profile][2]}) | args) | how


def literal(base: Experiment | None, profile: str) -> dict[str, dict]:
    """Our row for Algorithm 1 as printed, whose step climbs; 30 communication steps, for after about 60 weights overflow."""
    few = dict(rounds=min(30, base.rounds), eval_every=6) if base else {}
    return {"pfedhn (literal sign)": own(base, profile, hn_sign="literal") | few} if base else {}


def all_data(base: Experiment | None, profile: str) -> dict[str, dict]:
    """Our rows of Table 1 where all data are dealt out, as the paper's formula does; its released partition leaves a third to nobody.
    None where clients' data are cut anyway."""
    some = rows("table1", profile, base.dataset, base.clients) if base and not base.max_samples else {}
    return {f"{r} (all data)": some[r] | dict(partition_args={"leftover": False}) for r in ("local", "pfedhn") if some}


def _but_default(of: int = 0, **args: int) -> dict[str, int]:
    # What is the default anyway is left out, so that it is one run with the other artefacts'.
    default = dict(n_hidden=3, dim=1 + of // 4)
    return {k: v for k, v in args.items() if v != default[k]}


def baselines(base: Experiment, profile: str) -> dict[str, dict]:
    """Rows of Table 2's baselines for the clients of `base`."""
    fedavg = use("fedavg") | dict(keep_models=True)
    pfedme = use("pfedme", inner_steps=3, personal_lr=0.01 if profile in FULL else 0.03)  # 20 x 3 steps [P]
    more = dict(rounds=max(1, base.rounds // 5), eval_every=max(1, base.eval_every // 5))  # 1000 of 5000 steps [P]
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
        alone = dict(rounds=40 if profile == "paper" else 5 * base.rounds // base.clients, participation=1.0)
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
        wide = {f"embedding dimension = {d}": own(base, profile, **_but_default(dim=d, of=base.clients)) for d in dims}
        deep = {f"hidden layers = {n}": own(base, profile, **_but_default(n_hidden=n)) for n in depths}
        return wide | deep
    if artefact == "appc5":
        wide = {"dim": 10} if profile == "paper" else {}
        kinds = {
            "": "fixed_columns",
            " (over classes)": "fixed",
        }  # the paper's descriptor is normalised over clients; and ours
        fixed = {f"fixed embedding{label}": own(base, profile, embed=kind) for label, kind in kinds.items()}
        return {"trainable embedding": own(base, profile, **wide)} | fixed
    return {"pfedhn": hn}


# -- what the notebook does with them: `study` is its Study ------------------------------------------------------------------


def table(study: Any, artefact: str, columns: dict[str, tuple[str, int]], seeds: int | None = None) -> pd.DataFrame:
    """Rows of a table over columns {label: (data set, clients)}, each with its own number of client visits."""
    parts = []
    for label, (dataset, n) in columns.items():
        base = study.base(artefact, dataset, clients=n)
        parts.append(study.sweep(base, study.rows_for(artefact, dataset, n) if base else {}, {label: {}}, seeds))
    return pd.concat(parts, ignore_index=True)


def sizes(study: Any, dataset: str, label: str, methods: list[str], seeds: int | None = None) -> pd.DataFrame:
    """Table 2 over one data set: a run of each baseline for each size's clients, one of pFedHN for all, its clients told apart by size."""
    whole = study.base("table2", dataset)
    if whole is None:
        return study.sweep(None, {})
    n, profile = whole.clients, study.profile
    parts = []
    for g, size in enumerate(SIZES):
        kernels = whole.model_args["kernels"] * 2**g // 4
        args = dict(of=n, first=g, every=3)
        mine = dict(
            clients=n // 3, participation=min(1.0, 5 * 3 / n), partition_args=args, model_args={"kernels": kernels}
        )
        base = whole.but(**mine)
        some = {m: v for m, v in baselines(base, profile).items() if m in methods}
        parts.append(study.sweep(base, some, {f"{label}, {size}": {}}, seeds))
    hn = study.sweep(whole, study.rows_for("table2", dataset), {f"{label}, all sizes": {}}, seeds)
    parts += [by_size(hn, label)]
    study.collected.append(parts[-1])
    return pd.concat(parts, ignore_index=True)


def by_size(rows: pd.DataFrame, label: str) -> pd.DataFrame:
    """pFedHN's rows over all clients as rows of each size: test accuracy of its clients; the round is chosen by all of them."""
    kept = rows[(rows["mean"] == "client") & (rows.metric == "acc_pct") & (rows.when == "before")]
    out = []
    for run, own_rows in kept.groupby("run", sort=False):
        a = store.arrays_of(run)
        acc = 100 * a["before/test/correct"] / a["n/test"]
        for g, size in enumerate(SIZES):
            mean = dict(zip(a["rounds"].tolist(), acc[:, g :: len(SIZES)].mean(1), strict=True))
            test = own_rows.split == "test"
            values = own_rows.value.mask(test, own_rows["round"].map(mean))
            out.append(own_rows.assign(column=f"{label}, {size}", value=values))
    return pd.concat(out, ignore_index=True) if out else rows


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


def novel(
    study: Any, artefact: str, alphas: tuple[float, ...], methods: list[str], seeds: int | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Figures 2 and 7: rows over the novel clients, and a line for each of them: row, column, seed, client, acc_pct, distance, gap.

    distance: total variation to the nearest training client; gap: points above the mean of the same seed's training clients, who were
    tuned as long.
    """
    parts, lines = [study.sweep(None, {})], []
    for alpha in alphas:
        base = study.base(artefact, "cifar10", partition_args={"novel_alpha": alpha})
        if base is None:
            continue
        label = f"alpha = {alpha:g}"
        some = {m: v for m, v in study.rows_for(artefact, "cifar10").items() if m in methods}
        train = study.sweep(base, tuned(base, some, study.profile, False), {f"training, {label}": {}}, seeds)
        parts.append(study.sweep(base, tuned(base, some, study.profile, True), {label: {}}, seeds))
        if parts[-1].empty:
            continue
        level = study.clients(train).groupby(["row", "seed"]).acc_pct.mean().rename("train").reset_index()
        far = [_distances(base.but(seed=int(s))).assign(seed=s) for s in parts[-1].seed.unique()]
        got = study.clients(parts[-1]).merge(level, on=["row", "seed"]).merge(pd.concat(far), on=["seed", "client"])
        lines.append(got.assign(gap=got.acc_pct - got.train))
    swept, lines = pd.concat(parts, ignore_index=True), pd.concat(lines or [pd.DataFrame()], ignore_index=True)
    runs = swept.drop_duplicates("run").set_index(["row", "column", "seed"]).run
    numbers = []
    for (row, column, seed), group in lines.groupby(["row", "column", "seed"], sort=False) if len(lines) else ():
        where = dict(run=runs[row, column, seed], row=row, column=column)
        numbers += [where | dict(metric="gap_points", value=group.gap.mean())]
        numbers += [where | dict(metric="distance", value=group.distance.mean())]
    for row, group in lines.groupby("row", sort=False) if len(lines) else ():
        fit = slope(group.distance, group.acc_pct)  # points from no overlap of labels to none
        where = dict(run=runs[row].iloc[0], row=row, column=group.column.iloc[0])
        numbers += [where | dict(metric=f"slope_{k}", value=v) for k, v in fit.items()]
    study.derive(swept, numbers)
    return swept, lines


def _distances(base: Experiment) -> pd.DataFrame:
    new = base.but(clients=NOVEL, partition_args={"first": base.clients})
    far = total_variation(*(experiments.federation(e).counts() for e in (new, base))).min(1)
    return pd.DataFrame({"client": range(NOVEL), "distance": far})


def gaps(lines: pd.DataFrame) -> pd.DataFrame:
    """Figure 2's points: means over clients and seeds of `novel`'s lines, one for each method and alpha."""
    return (
        lines.groupby(["row", "column"], sort=False)[["distance", "gap"]].mean().reset_index() if len(lines) else lines
    )


def pairs(base: Experiment) -> list[str]:
    """What the clients of `base` tell apart, as "cat / dog"."""
    counts = experiments.federation(base).counts()
    names = CIFAR10 if base.dataset == "cifar10" else [str(c) for c in range(counts.shape[1])]
    return [" / ".join(names[c] for c in np.flatnonzero(row)) for row in counts]


CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck".split()


def crossed(study: Any, rows: pd.DataFrame) -> dict[str, np.ndarray]:
    """Figure 3: {seed: accuracies (K, K)} at the round that is reported, row: classifier, column: extractor; derives what they say."""
    out, numbers, at = {}, [], pick(rows, "best_val").set_index("run")["round"] if len(rows) else {}
    for p in study.probed(rows, "mix_and_match"):
        acc = out[f"seed {p.seed}"] = p.at(at[p.run])["acc"]
        said = dict(own_pct=acc.diagonal().mean(), crossed_pct=acc[~np.eye(len(acc), dtype=bool)].mean())
        said |= dict(own_best_pct=100 * (diagonal_rank(acc) == 1).mean())
        numbers += [dict(run=p.run, row=p.row, column=p.column, metric=m, value=float(v)) for m, v in said.items()]
    study.derive(rows, numbers)
    return out


def scaled(swapped: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Figure 3's panels for one seed: accuracies as they are, and scaled to each row's range as the paper draws them."""
    acc = swapped.get(f"seed {seed}")
    return {} if acc is None else {"Accuracy": acc, "Scaled to each row's range": 100 * row_scaled(acc)}


def capacity(rows: pd.DataFrame) -> pd.DataFrame:
    """Figure 6: the reported accuracy (value) of each run, what was varied in panel `column`, how much of it as `layer`."""
    if rows.empty:
        return rows
    got = pick(rows, **REPORT)
    what, number = zip(*(r.split(" = ") for r in got.row), strict=True)
    panel = {"embedding dimension": "(a) Dimension of the embedding", "hidden layers": "(b) Hidden layers"}
    got = got.assign(column=[panel[w] for w in what], layer=[int(n) for n in number], row="pfedhn")
    return got.sort_values(["column", "layer"])


def embedded(study: Any, rows: pd.DataFrame, base: Experiment | None) -> pd.DataFrame:
    """Figure 4: t-SNE of the embeddings at the round that is reported, x, y, group (coarse class), column; derives how they cluster."""
    parts, numbers, at = [], [], pick(rows, "best_val").set_index("run")["round"] if len(rows) else {}
    for p in study.probed(rows, "embeddings"):
        v = p.at(at[p.run])["v"]
        kinds = len(np.unique(data.load(base.dataset).extra["coarse"]))
        group = np.arange(len(v)) // (len(v) // kinds)
        near = clustering(v, group, neighbours=len(v) // kinds - 1)
        numbers += [dict(run=p.run, row=p.row, column=p.column, metric=m, value=x) for m, x in near.items()]
        x, y = tsne(v).T
        parts.append(pd.DataFrame(dict(x=x, y=y, group=group, column=f"seed {p.seed}")))
    study.derive(rows, numbers)
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


# -- claims --------------------------------------------------------------------------------------------------------------


def _cells(rows: pd.DataFrame, column: str) -> dict[str, float]:
    """{row: reported number} of one column."""
    names = dict.fromkeys(rows[(rows.column == column) & (rows["mean"] == "client")].row)
    return {r: value(rows, r, column, **REPORT) for r in names}


def _ahead(rows: pd.DataFrame, ours: tuple[str, ...], least: float) -> tuple[str, bool]:
    gains = {}
    for c in dict.fromkeys(rows.column):
        acc = _cells(rows, c)
        others = [
            v for r, v in acc.items() if r not in ("pfedhn", "pfedhn_pc") and "(" not in r
        ]  # rows of ours have (...)
        if others and set(ours) & set(acc):
            gains[c] = max(acc[r] for r in ours if r in acc) - max(others)
    if not gains:
        raise LookupError(" / ".join(ours))
    return ", ".join(f"{c}: {g:+.1f} points" for c, g in gains.items()), all(g >= least for g in gains.values())


def _table1(rows: pd.DataFrame) -> tuple[str, bool]:
    return _ahead(rows, ("pfedhn", "pfedhn_pc"), 2.0)


def _table2(rows: pd.DataFrame) -> tuple[str, bool]:
    return _ahead(rows, ("pfedhn",), 2.0)


def _novel(rows: pd.DataFrame) -> tuple[str, bool]:
    said, good = [], True
    own_rows = rows[rows.metric == "gap_points"]
    for c in dict.fromkeys(own_rows.column):
        gaps = {r: derived(rows, "gap_points", r, c).mean() for r in dict.fromkeys(own_rows[own_rows.column == c].row)}
        hn = gaps.pop("pfedhn", None)
        if hn is None or not gaps:
            raise LookupError("pfedhn beside a baseline")
        best = max(gaps, key=gaps.get)
        said.append(f"{c}: {hn:+.1f} points, {best} {gaps[best]:+.1f}")
        good &= hn > gaps[best]
    return "; ".join(said), good


def _crossing(rows: pd.DataFrame) -> tuple[str, bool]:
    own_pct, other = (derived(rows, m).mean() for m in ("own_pct", "crossed_pct"))
    return f"{own_pct:.1f} % with the own extractor, {other:.1f} % with another client's", own_pct - other > 5


def _clustered(rows: pd.DataFrame) -> tuple[str, bool]:
    purity, chance, p = (derived(rows, m).mean() for m in ("purity", "chance", "p"))
    return (
        f"{100 * purity:.0f} % of nearest neighbours share the class, chance {100 * chance:.0f} %, p = {p:.3f}",
        p < 0.01,
    )


def _steps(rows: pd.DataFrame) -> tuple[str, bool]:
    c = rows.column.iloc[0]
    acc = {int(r.split()[-1]): v for r, v in _cells(rows, c).items()}
    if 1 not in acc or len(acc) < 2:
        raise LookupError("K = 1 beside a larger K")
    worst = min(v for k, v in acc.items() if k > 1)
    return ", ".join(f"K = {k}: {v:.1f}" for k, v in sorted(acc.items())), worst - acc[1] > 5


def _descriptor(rows: pd.DataFrame) -> tuple[str, bool]:
    c = rows.column.iloc[0]
    a, b = (value(rows, f"{kind} embedding", c, **REPORT) for kind in ("trainable", "fixed"))
    return f"{a:.1f} trainable, {b:.1f} fixed", abs(a - b) <= 2


CLAIMS = [
    Claim(
        "pFedHN, with or without personal classifiers, is 2 to 10 points above every other approach (Sec. 5.1, Table 1)",
        "table1",
        _table1,
    ),
    Claim(
        "One pFedHN serves three network sizes better than a federation for each, by 4 to 8 points (Sec. 5.2; Table 2: 2.8 to 6.6)",
        "table2",
        _table2,
    ),
    Claim(
        "On novel clients pFedHN loses least, at every distance from the training clients (Sec. 5.3, Fig. 2)",
        "fig2",
        _novel,
    ),
    Claim(
        "pFedHN-PC's extractors are personal: with another client's classifier they lose accuracy (Fig. 3; here: 5 points)",
        "fig3",
        _crossing,
    ),
    Claim("Embeddings of clients with one coarse class cluster (Sec. 5.5, Fig. 4)", "fig4", _clustered),
    Claim(
        "Many local steps are far better than one, and how many matters little (App. C.2.1, Fig. 5: all K > 1 by more than 5 points)",
        "fig5",
        _steps,
    ),
    Claim("A fixed descriptor is as good as a trained embedding (App. C.5: within 2 points)", "appc5", _descriptor),
]
