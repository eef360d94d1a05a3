"""FLAYER (Chen et al., IJCAI 2025): Tables 1 to 5, Figures 2 and 3. Figure 1 is a diagram."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from pfl_core.analysis.select import pick
from pfl_core.papers.base import (
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

# Columns as printed: the paper's data set and network.
COLUMNS = {
    "CIFAR-10, CNN": ("cifar10", "cnn"),
    "CIFAR-100, CNN": ("cifar100", "cnn"),
    "Tiny, CNN": ("tiny_imagenet", "cnn"),
    "CIFAR-10, ResNet-18": ("cifar10", "resnet18"),
    "CIFAR-100, ResNet-18": ("cifar100", "resnet18"),
    "Tiny, ResNet-18": ("tiny_imagenet", "resnet18"),
    "AG News, fastText": ("ag_news", "fasttext"),
}
PRINTED = {
    "table2": list(COLUMNS),
    "table3": list(COLUMNS)[:6],
    "table4": ["CIFAR-100, CNN", "CIFAR-100, ResNet-18"],
    "fig2": ["CIFAR-10, CNN", "CIFAR-10, ResNet-18"],
    "fig3": ["CIFAR-100, CNN", "CIFAR-100, ResNet-18"],
}  # Tables 1 and 5: CIFAR-100, ResNet-18
AT_MEDIUM = {
    "table2": ["CIFAR-10, CNN", "CIFAR-100, CNN", "AG News, fastText"],
    "fig3": ["CIFAR-100, CNN"],
}
BASELINES = ("fedavg", "apple", "ditto", "fedamp", "fedper", "fedrep", "fedala")
PROBED = ("fedavg", "apple", "fedrep", "fedala", "flayer")  # Figure 2
HEADED = (
    "fedper",
    "fedrep",
    "fedala",
)  # their head is the classifier, as in their papers and code [O]; s is FLAYER's
OFFICIAL, AVERAGED = "flayer (official)", "fedavg (BatchNorm averaged)"  # rows of ours
CORES = "apple (cores)"  # a row of ours in Figure 2: what APPLE's clients train, where its served models are mixtures
PARTS = {  # Figure 3's arms: one part of FLAYER each
    f"{label} only": dict(mixing=False, rates=False, masking=False) | {part: True}
    for part, label in (
        ("mixing", "aggregation"),
        ("rates", "learning rates"),
        ("masking", "masking"),
    )
}

# Evaluation Setup [P]: 20 clients, Dir(.1), batch 10, one epoch; eta .005 (CNN), .1 (ResNet-18, fastText); s = 1, 2, 1, counted in modules:
# for ResNet-18 the last BatchNorm and the classifier, as the released `-p 4` tensors. Incomplete last batches left out, pixels in
# [-1, 1], 1000 rounds of fastText [O]. Else 200 rounds: the largest published count is 195 ?
# medium [C]: the paper's numbers with fewer rounds, and a tenth of train as validation.
# quick and smoke [C]: narrow networks, few rounds, and rates at which every row learns in them.
_COMMON = dict(
    clients=20,
    epochs=1,
    batch=10,
    plan="drop",
    normalize="half",
    partition="dirichlet",
    head_by="module",
)
_PROFILES: dict[str, dict[str, Any]] = {
    "paper": dict(rounds=200),
    "medium": dict(rounds=25, eval_every=2),
    "quick": dict(rounds=20, eval_every=2),
    "smoke": dict(rounds=1, batch=4, max_samples=8),
}
_TEXT = {
    "paper": dict(rounds=1000),
    "medium": dict(rounds=200, eval_every=10),
    "quick": dict(rounds=20, max_samples=100),
    "smoke": {},
}
_REAL = dict(max_samples=150)  # quick on images that are not embedded
_LR = {"paper": {"cnn": 0.005, "resnet18": 0.1, "fasttext": 0.1}}
_LR["medium"] = _LR["paper"]
_LR["quick"] = _LR["smoke"] = {"cnn": 0.02, "resnet18": 0.05, "fasttext": 0.5}
_WIDTH = {"quick": {"cnn": 0.25, "resnet18": 0.125}, "smoke": {"cnn": 0.0625, "resnet18": 0.0625}}
_WIDTH["medium"] = _WIDTH["paper"] = {}
# Rounds of the released script [O]: those of "flayer (official)" where the profile has as many.
RELEASED = {
    ("cifar10", "cnn"): 100,
    ("cifar100", "cnn"): 40,
    ("tiny_imagenet", "cnn"): 25,
    ("cifar10", "resnet18"): 100,
    ("cifar100", "resnet18"): 75,
    ("tiny_imagenet", "resnet18"): 25,
    ("ag_news", "fasttext"): 1000,
}
FAST = 0.1  # 20 x .005: what the released code gives the CNN's middle layers at least


# -- settings, rows, columns ---------------------------------------------------------------------------------------------


def net(model: str, profile: str) -> dict[str, Any]:
    """What a network changes in an Experiment: its rate, the depth s of its head, at quick its width and ResNet-18's rounds."""
    deep = model == "resnet18"
    out: dict[str, Any] = dict(model=model, lr=_LR[profile][model], head_depth=2 if deep else 1)
    if model in _WIDTH[profile]:
        out["model_args"] = {"width": _WIDTH[profile][model]}
    return out | ({"rounds": 10} if deep and profile == "quick" else {})


def setting(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, Any]:
    """Fields of the Experiment that an artefact's runs vary, with the network of its first column."""
    text, deep = (
        dataset == "ag_news",
        profile == "paper" and (artefact == "table1" or artefact.startswith("table5")),
    )
    fields = _COMMON | {"dataset": dataset} | _PROFILES[profile]
    fields |= net("fasttext" if text else "resnet18" if deep else "cnn", profile) | (
        _TEXT[profile] if text else {}
    )
    if profile == "quick" and not text and not dataset.startswith("digits"):
        fields |= _REAL
    fields["partition_args"] = {"alpha": 0.1} | (
        {"source": "train"} if dataset == "tiny_imagenet" else {}
    )
    if profile == "medium":
        fields["partition_args"] |= {"split": "67.5/7.5/25"}
    return fields | ({"clients": clients} if clients else {})


def rows(
    artefact: str, profile: str, dataset: str, clients: int = 0, model: str = ""
) -> dict[str, dict]:
    """Rows of an artefact as changes to its `setting`, for another `model` than its own where one is given."""
    own = setting(artefact, profile, dataset)
    model = model or own["model"]
    # Figure 2's runs are those of the tables. Where clients or their data are others, `sweeps` leaves the probe out.
    probed = profile != "medium" and (
        dataset == "cifar10" if profile == "paper" else model == "cnn"
    )
    main = {m: use(m) | ({"head_depth": 1} if m in HEADED else {}) for m in (*BASELINES, "flayer")}
    for m in PROBED if probed else ():
        main[m] |= {"record": ("cka", "cka_cores") if m == "apple" else ("cka",)}
    flayer, deep = main["flayer"], model == "resnet18"
    if artefact == "table4":
        s = net(model, profile)["head_depth"]
        return {
            f"s={d}": (flayer if d == s else use("flayer")) | {"head_depth": d} for d in (3, 2, 1)
        }
    if artefact == "table5c":
        around = {
            m: main[m] | use("flayer", inner=m) | {"record": ()}
            for m in BASELINES
            if m not in ("fedavg", "apple")
        }
        return {"fedavg": flayer} | around
    official = released(model, profile, dataset)
    if artefact == "fig3":
        # As printed, rates or masks alone are served as one global model; the released code trains each client's head first.
        arms = {
            label: use("flayer", **part)
            for label, part in PARTS.items()
            if profile in ("medium", "paper")
        }
        arms |= {
            f"{n} (official)": official | {"method_args": official["method_args"] | p}
            for n, p in PARTS.items()
        }
        faster = {} if deep else {f"fedavg, lr {FAST:g}": use("fedavg") | {"lr": FAST}}
        out = {"flayer": flayer, OFFICIAL: official} | arms | {"fedavg": main["fedavg"]} | faster
        return out | {"flayer, zeros averaged": use("flayer", agg="literal")}
    if artefact in ("table1", "fig2"):
        return some(main, PROBED if artefact == "fig2" else ("fedavg", "apple", "fedper", "fedala"))
    if artefact.startswith(
        "table5"
    ):  # GPFL's own script for ResNet-18 [O]; else the methods' defaults
        own = {
            "gpfl": use("gpfl", lam=1e-4, mu=0.0) if deep else use("gpfl"),
            "fedcp": use("fedcp"),
        }
        main = some(main, BASELINES) | own | {"flayer": flayer}
    more = (
        {AVERAGED: use("fedavg") | {"buffers": "average"}} if deep and artefact == "table2" else {}
    )
    out = main | {OFFICIAL: official} | more
    return {n: c | {"record": ("train",)} for n, c in out.items()} if model == "fasttext" else out


def released(model: str, profile: str, dataset: str) -> dict[str, Any]:
    """The row "flayer (official)", to the letter of the released code [O]: its `-p` tensors are the head, batches come in order, the CNN's
    middle layers learn 20 times as fast as at .005, at any base rate. Its reader takes AG News' training texts for the test ones."""
    own = setting("table2", profile, dataset) | net(model, profile)
    fast = FAST / own["lr"] if model == "cnn" else 1.0
    text = {"acc_on": "train"} if model == "fasttext" else {}
    rounds = min(own["rounds"], RELEASED.get((dataset, model), own["rounds"]))
    how = dict(
        head_by="tensor", head_depth=4 if model == "resnet18" else 2, shuffle=False, rounds=rounds
    )
    return use("flayer", mode="official", middle=fast, **text) | how


def some(rows: dict[str, dict], names: Iterable[str]) -> dict[str, dict]:
    """Those rows of `rows` that are named, in the order of names."""
    return {n: rows[n] for n in names if n in rows}


def image(scope: Scope) -> str:
    """The image column that stands for all at profiles below paper: CIFAR-10's, or the next whose data are there."""
    return next(
        (c for c, (data, model) in COLUMNS.items() if model == "cnn" and scope.data(data)),
        "CIFAR-10, CNN",
    )


def columns(scope: Scope, artefact: str) -> dict[str, tuple[str, str, dict]]:
    """{label: (the paper's data set, network, changes)} of the columns that an artefact runs: all of them at profile paper."""
    full = scope.profile == "paper"
    labels = PRINTED.get(artefact, ["CIFAR-100, ResNet-18"]) if full else [image(scope)]
    if scope.profile == "medium" and artefact in AT_MEDIUM:
        labels = AT_MEDIUM[artefact]
    elif artefact == "table2" and not full:
        labels += ["CIFAR-10, ResNet-18"] + ["AG News, fastText"] * bool(scope.data("ag_news"))
    nets = {c: COLUMNS[c] for c in labels}
    if artefact == "table5a":  # ten classes cannot be dealt to 20 clients at .01
        return {
            f"Dir({a:g})": (*nets[labels[0]], {"partition_args": {"alpha": a}})
            for a in (0.1, 0.01 if full else 1)
        }
    if artefact == "table5b":
        small = {} if full or scope.label != "digits" else {"partition_args": {"fallback_least": 4}}
        sizes = (20, 50, 100) if full else (20, 50)
        return {
            f"N={n}": (*nets[labels[0]], {"clients": n} | (small if n > 20 else {})) for n in sizes
        }
    return {c: (*n, {}) for c, n in nets.items()}


def sweeps(scope: Scope) -> list[Sweep]:
    """All runs, a Sweep for each column of an artefact; the part "control" of Table 2 is ours."""
    return [s for artefact in PAPER.artefacts for s in _artefact(scope, artefact)] + _control(scope)


def _artefact(scope: Scope, artefact: str) -> list[Sweep]:
    # Below profile paper ResNet-18 has FedAvg's two rows, and other clients than the main table's only FedALA and FLAYER.
    out = []
    for i, (label, (data, model, changes)) in enumerate(columns(scope, artefact).items()):
        every = rows(artefact, scope.profile, scope.data(data) or "", model=model)
        others = artefact in ("table5a", "table5b") and i > 0
        if others:
            every = {n: c | {"record": ()} for n, c in every.items()}
        if scope.profile != "paper":
            few = ("fedala", "flayer") if others else tuple(every)
            every = some(every, ("fedavg", AVERAGED) if model == "resnet18" else few)
        base = scope.base(PAPER, artefact, data, **net(model, scope.profile))
        out += scope.sweep(
            PAPER, base, every, {label: changes}, quick=1 if model == "resnet18" else 0
        )
    return out


def _control(scope: Scope) -> list[Sweep]:
    # Baselines and FLAYER at the main table's rate and at larger ones, all with the CNN; none at medium.
    if scope.profile == "medium":
        return []
    data, model = COLUMNS["CIFAR-100, CNN" if scope.profile == "paper" else image(scope)]
    base, own = scope.base(PAPER, "table2", data), net(model, scope.profile)["lr"]
    every = some(
        rows("table2", scope.profile, scope.data(data) or ""), ("fedavg", "fedala", "flayer")
    )
    plain = {n: c | {"record": ()} for n, c in every.items()}
    seeds = scope.seeds_of(PAPER, "control")  # as many as the profile has, not as Table 2
    out = []
    for lr in (own, 0.05, FAST, 0.2) if scope.profile == "paper" else (own, FAST):
        arms = every if lr == own else plain  # the runs at its own rate are those of the table
        out += scope.sweep(
            PAPER, base, arms, {f"lr {lr:g}": {"lr": lr}}, seeds=seeds, part="control"
        )
    return out


# -- numbers from finished runs ------------------------------------------------------------------------------------------

KEYS = ["run", "row", "column"]


def costs(rows: pd.DataFrame) -> list[Number]:
    """What each run took up to its best round: iterations, visits of clients, megabytes (down and up), seconds."""
    spent = rows[rows["mean"] == "total"].drop_duplicates([*KEYS, "round", "metric"])
    spent = spent.pivot(index=[*KEYS, "round"], columns="metric", values="value")
    out = []
    for b in pick(rows, **PAPER.report).drop_duplicates(KEYS).itertuples():
        t = spent.loc[b.run, b.row, b.column, b.round]
        moved = (t.download_bytes + t.upload_bytes) / 1e6
        each = dict(
            iterations=b.round, client_visits=t.client_visits, megabytes=moved, total_s=t.train_s
        )
        each["s_per_iteration"] = t.train_s / max(b.round, 1)
        out += [
            dict(run=b.run, row=b.row, column=b.column, round=b.round, metric=k, value=v)
            for k, v in each.items()
        ]
    return out


def improvements(around: pd.DataFrame, alone: pd.DataFrame) -> list[Number]:
    """Points by which FLAYER around a method is better than the method `alone` (same row, seed and data)."""
    plain = pick(alone, **PAPER.report).drop_duplicates(["row", "seed", "dataset", "model"])
    both = pick(around, **PAPER.report).merge(
        plain, on=["row", "seed", "dataset", "model"], suffixes=("", "_alone")
    )
    gains = both.assign(metric="improvement_points", value=both.value - both.value_alone)
    return gains[[*KEYS, "metric", "value"]].to_dict("records")


def trained(probes: Iterable[Probed]) -> list[Number]:
    """Accuracy on training data (%), pooled, in the round where it is highest, of what the probe "train" recorded.

    It is what the paper prints for AG News: the released reader gives training texts as test texts, too.
    """
    out = []
    for p in probes:
        acc = 100 * p.values["hits"].sum(1) / p.values["n"].sum(1)
        best = int(acc.argmax())
        where = dict(run=p.run, row=p.row, column=p.column, round=int(p.rounds[best]))
        out.append(where | dict(metric="train_acc_pct", value=float(acc[best])))
    return out


def similarity(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    """Mean linear CKA over pairs of clients, "cka STAGE LAYER" (Fig. 2); what APPLE's clients train has a row of its own.

    Stages: "initial", after the first local training, and "best", after that of the recorded round nearest to the best one.
    """
    best = (
        pick(rows, **PAPER.report)
        .drop_duplicates(["run", "column"])
        .set_index(["run", "column"])["round"]
    )
    out = []
    for p in [*recorded("cka"), *(c._replace(row=CORES) for c in recorded("cka_cores"))]:
        for stage, at in (("initial", 0), ("best", int(best.loc[p.run, p.column]))):
            for layer, m in p.at(at).items():
                pairs = m[~np.eye(len(m), dtype=bool)]
                what = dict(metric=f"cka {stage} {layer}", value=float(pairs.mean()))
                out.append(dict(run=p.run, row=p.row, column=p.column) | what)
    return out


def layers(rows: pd.DataFrame) -> pd.DataFrame:
    """The numbers of `similarity` among rows: run, row, column, seed, stage, layer, value."""
    found = rows[(rows["mean"] == "derived") & rows.metric.str.startswith("cka ")]
    names = found.metric.str.split(" ", n=2)
    return found.assign(stage=names.str[1], layer=names.str[2])[
        [*KEYS, "seed", "stage", "layer", "value"]
    ]


# -- claims --------------------------------------------------------------------------------------------------------------


def accuracies(rows: pd.DataFrame, column: str) -> dict[str, float]:
    """{row: accuracy as the paper reports it (%), mean over seeds} of a column, of texts that on training data; LookupError if FLAYER is
    not in it."""
    own = rows[rows.column == column]
    text = COLUMNS[column][1] == "fasttext"
    got = own[own.metric == "train_acc_pct"] if text else pick(own, **PAPER.report)
    got = got.groupby("row", sort=False).value.mean().to_dict()
    if PAPER.own not in got:
        raise LookupError(f"{PAPER.own} / {column}")
    return got


def _highest(rows: pd.DataFrame) -> tuple[str, bool]:
    out, good = [], True
    for c in [c for c in COLUMNS if len(rows[(rows.column == c) & (rows.row == PAPER.own)])]:
        got = accuracies(rows, c)
        best = max((m for m in BASELINES if m in got), key=got.__getitem__, default="")
        if not best:
            raise LookupError(f"baselines / {c}")
        out.append(f"{c}: flayer {got[PAPER.own]:.1f}, {best} {got[best]:.1f}")
        good &= got[PAPER.own] > got[best]
    return "; ".join(out), good


def _sooner(rows: pd.DataFrame) -> tuple[str, bool]:
    out, good = [], True
    for c in [c for c in COLUMNS if len(rows[rows.column == c])]:
        n = {m: derived(rows, "iterations", m, c).mean() for m in (PAPER.own, "fedavg", "fedala")}
        out.append(f"{c}: " + ", ".join(f"{m} {v:.0f}" for m, v in n.items()) + " rounds")
        good &= n[PAPER.own] < min(n["fedavg"], n["fedala"])
    return "; ".join(out), good


def _head(rows: pd.DataFrame) -> tuple[str, bool]:
    out, good = [], True
    for c in rows.column.unique():
        acc = {s: value(rows, f"s={s}", c, **PAPER.report) for s in (1, 2, 3)}
        out.append(f"{c}: " + ", ".join(f"{v:.1f} (s={s})" for s, v in acc.items()))
        good &= max(acc, key=acc.__getitem__) == net(COLUMNS[c][1], "paper")["head_depth"]
    return "; ".join(out), good


def _around(rows: pd.DataFrame) -> tuple[str, bool]:
    names = [m for m in rows.row.unique() if m in BASELINES]
    gains = {m: derived(rows, "improvement_points", m).mean() for m in names}
    return ", ".join(f"{m} {g:+.1f}" for m, g in gains.items()), all(g > 0 for g in gains.values())


def _cka(rows: pd.DataFrame) -> list[tuple[str, str, dict[str, float], dict[str, float]]]:
    # row, column, {layer: similarity} after the first training and at best
    got = layers(rows)
    if not len(got):
        raise LookupError("cka of all rows")
    out, seen = [], set(zip(got.row, got.column, strict=True))
    for (c, r), part in got.groupby(["column", "row"], sort=False):
        if (
            r == "apple" and (CORES, c) in seen
        ):  # a mixture of all cores: alike from the first round by what it is
            continue
        means = part.groupby(["stage", "layer"], sort=False).value.mean()
        out.append((r, c, *(means[s].to_dict() if s in means else {} for s in ("initial", "best"))))
    return out


def _deeper(rows: pd.DataFrame) -> tuple[str, bool]:
    ends = {(r, c): list(best.values()) for r, c, _, best in _cka(rows)}
    text = ", ".join(f"{r} {v[0]:.2f} to {v[-1]:.2f}" for (r, _), v in ends.items())
    return f"first to last layer: {text}", all(v[-1] == min(v) for v in ends.values())


def _alike(rows: pd.DataFrame) -> tuple[str, bool]:
    first = {(r, c): [next(iter(s.values())) for s in stages] for r, c, *stages in _cka(rows)}
    text = ", ".join(f"{r} {a:.3f} to {b:.3f}" for (r, _), (a, b) in first.items())
    return f"first layer, initial to best: {text}", all(b > a for a, b in first.values())


def _parts(rows: pd.DataFrame) -> tuple[str, bool]:
    out, good = [], True
    for c in rows.column.unique():
        # The released form: without its epoch for the head, rates or masks alone are served as one global model.
        agg, lr, mask = (value(rows, f"{label} (official)", c, **PAPER.report) for label in PARTS)
        out.append(f"{c}: aggregation {agg:.1f}, learning rates {lr:.1f}, masking {mask:.1f}")
        good &= lr == max(agg, lr, mask) and agg == min(agg, lr, mask)
    return "; ".join(out), good


CLAIMS = (
    Claim(
        "FLAYER is more accurate than FedAvg and all six personalised methods (Table 2)",
        "table2",
        _highest,
    ),
    Claim(
        "FLAYER is at its best after fewer rounds than FedAvg and FedALA (Table 3)",
        "table3",
        _sooner,
    ),
    Claim("One personal layer is best for the CNN, two for ResNet-18 (Table 4)", "table4", _head),
    Claim(
        "FLAYER improves every method it is put around (Table 5, applicability)", "table5c", _around
    ),
    Claim("Clients' models are least alike in the head (Fig. 2)", "fig2", _deeper),
    Claim(
        "Training makes the base layers of clients more alike, under every method (Fig. 2)",
        "fig2",
        _alike,
    ),
    Claim(
        "Of the three parts alone, in their released form, the learning rates give the highest accuracy, aggregation the least (Fig. 3)",
        "fig3",
        _parts,
    ),
)

IMAGES = ("cifar10", "cifar100", "tiny_imagenet")  # below profile paper one of them stands for all

PAPER = Paper(
    key="flayer",
    artefacts={
        "table1": Artefact(
            IMAGES,
            quick=2,
            own="fedala",
            metrics=("acc_pct", "iterations"),
            numbers=lambda rows, recorded: costs(rows),
        ),
        "table2": Artefact(
            (*IMAGES, "ag_news"),
            show=("compare", "standing"),
            medium=2,
            quick=2,
            metrics=("acc_pct", "train_acc_pct"),
            numbers=lambda rows, recorded: trained(recorded("train")),  # AG News alone
        ),
        "table3": Artefact(
            IMAGES, quick=2, metrics=("iterations",), numbers=lambda rows, recorded: costs(rows)
        ),
        "table4": Artefact(IMAGES, own="s=1"),
        "table5a": Artefact(IMAGES),
        "table5b": Artefact(IMAGES),
        "table5c": Artefact(IMAGES, own="fedavg"),
        "fig2": Artefact(IMAGES, show=(), quick=2, numbers=similarity),
        "fig3": Artefact(IMAGES, show=("curves",), medium=2),
    },
    claims=CLAIMS,
    sweeps=sweeps,
    own="flayer",
    report=dict(
        select="best_test", when="before", mean="pooled"
    ),  # correct / tested over all clients, best round [O]
    seeds={"paper": 5},  # "five times for each task" [P]
    tables=("table1", "table2", "table3", "table5a", "table5b"),
    setting=setting,
    rows=rows,
)
