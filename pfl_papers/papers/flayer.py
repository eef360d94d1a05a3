"""FLAYER (Chen et al., IJCAI 2025): its settings, its runs, and what decides its claims.

Tables 1 to 5, Figures 2 and 3; Figure 1 is a diagram. [P], [O], [C] and ? say where a value is
from; see `papers.base`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pfl_core.analysis.plots import label
from pfl_core.analysis.select import grouped, pick, records, tuples
from pfl_core.analysis.stats import spent
from pfl_core.analysis.verdicts import SMALL, Contrast
from pfl_core.experiments.experiment import Experiment
from pfl_core.util.percent import accuracy
from pfl_papers.evidence.asks import Measure, Terms
from pfl_papers.evidence.contrasts import PAST, Evidence
from pfl_papers.papers import claims
from pfl_papers.papers.base import Artefact, Number, Paper, Probed, Recorded, Scope, Sweep
from pfl_papers.papers.shown import (
    At,
    Changes,
    Shown,
    at,
    drawn_anew,
    fields_at,
    rows_at,
    use,
    without_probes,
)


class Problem(NamedTuple):
    """A column of a table: the paper's data set, its network, and changes to `setting`."""

    dataset: str
    model: str
    changes: dict[str, Any] = {}


# -- what the paper shows --------------------------------------------------------------------------

COLUMNS = {  # as printed
    "CIFAR-10, CNN": Problem("cifar10", "cnn"),
    "CIFAR-100, CNN": Problem("cifar100", "cnn"),
    "Tiny, CNN": Problem("tiny_imagenet", "cnn"),
    "CIFAR-10, ResNet-18": Problem("cifar10", "resnet18"),
    "CIFAR-100, ResNet-18": Problem("cifar100", "resnet18"),
    "Tiny, ResNet-18": Problem("tiny_imagenet", "resnet18"),
    "AG News, fastText": Problem("ag_news", "fasttext"),
}
# Our column of Table 2: clients are drawn anew for each seed, the paper's are one draw.
ANEW = "CIFAR-10, CNN, a partition a seed"
# Below profile paper the column of one data set stands for all: CIFAR-10's CNN, or the next whose
# data are at hand (`image`).
IMAGE, DEEP = "CIFAR-10, CNN", "CIFAR-100, ResNet-18"
BASELINES = ("fedavg", "apple", "ditto", "fedamp", "fedper", "fedrep", "fedala")
NEWER = ("gpfl", "fedcp")  # further ones of Tables 5a and 5b
SLOW = ("apple", "ditto")  # not run in the column of ours
PROBED = ("fedavg", "apple", "fedrep", "fedala", "flayer")  # Figure 2
# Their head is the classifier, as in their papers and code [O]; its depth s is FLAYER's.
HEADED = ("fedper", "fedrep", "fedala")
# Rows of ours. APPLE serves mixtures of its clients' models; its cores are what clients train.
OFFICIAL, AVERAGED = "flayer (official)", "fedavg (BatchNorm averaged)"
CORES = "apple (cores)"
_NO_PART = dict(mixing=False, rates=False, masking=False)
PARTS = {  # Figure 3's rows: one part of FLAYER each
    "aggregation only": _NO_PART | {"mixing": True},
    "learning rates only": _NO_PART | {"rates": True},
    "masking only": _NO_PART | {"masking": True},
}
IMAGES = ("cifar10", "cifar100", "tiny_imagenet")
DEPTHS = ("s=3", "s=2", "s=1")
FASTER, ZEROS = "fedavg, lr 0.1", "flayer, zeros averaged"


def _alphas(*alphas: float) -> dict[str, dict[str, Any]]:
    return {f"Dir({alpha:g})": {"partition_args": {"alpha": alpha}} for alpha in alphas}


def _clients(*counts: int) -> dict[str, dict[str, Any]]:
    return {f"N={n}": {"clients": n} for n in counts}


_MAIN = (*BASELINES, "flayer", OFFICIAL)
_WIDER = (*BASELINES, *NEWER, "flayer", OFFICIAL)
_AROUND = {m: f"flayer around {m}" for m in BASELINES if m not in ("fedavg", "apple")}
_PARTS = (*(f"{part} (official)" for part in PARTS), "fedavg", FASTER, ZEROS)
_PARTED = At(("flayer", OFFICIAL, *PARTS, *_PARTS), quick=("flayer", OFFICIAL, *_PARTS))
_LARGE, _BOTH = At([DEEP], quick=[IMAGE]), ["CIFAR-100, CNN", DEEP]
_FEW = [IMAGE, "CIFAR-10, ResNet-18", "AG News, fastText"]
_SOME = [IMAGE, ANEW, "CIFAR-100, CNN", "AG News, fastText"]
# Below profile paper 1 stands for .01, at which ten classes cannot be dealt to 20 clients.
_SKEW = At(_alphas(0.1, 0.01), medium=_alphas(0.1, 1), quick=_alphas(0.1, 1))
_SIZE = At(_clients(20, 50, 100), medium=_clients(20, 50), quick=_clients(20, 50))
SHOWN = {
    "table1": Shown(_LARGE, ("fedavg", "apple", "fedper", "fedala")),
    "table2": Shown(At([*COLUMNS, ANEW], medium=_SOME, quick=_FEW), (*_MAIN, AVERAGED)),
    "table3": Shown(At([*COLUMNS][:6], quick=[IMAGE]), _MAIN),
    "table4": Shown(At(_BOTH, quick=[IMAGE]), DEPTHS),
    "table5a": Shown(_LARGE, _WIDER),
    "table5b": Shown(_LARGE, _WIDER),
    "table5c": Shown(_LARGE, {"fedavg": "flayer"} | _AROUND),
    "fig2": Shown(At([IMAGE, "CIFAR-10, ResNet-18"], medium=[IMAGE], quick=[IMAGE]), PROBED),
    "fig3": Shown(At(_BOTH, medium=["CIFAR-100, CNN"], quick=[IMAGE]), _PARTED),
}
# Tables 5a and 5b: columns of changes to their first one, {label: changes}. All but the first have
# only FedALA and FLAYER below profile paper.
VARIED = {"table5a": _SKEW, "table5b": _SIZE}

# -- settings --------------------------------------------------------------------------------------

# Evaluation Setup [P]: 20 clients, Dir(.1), batch 10, one epoch. [O]: incomplete last batches are
# left out, pixels are in [-1, 1].
# ? 200 rounds: the largest published count is 195.
# medium [C]: the paper's numbers with fewer rounds, and a tenth of train as validation.
# quick and smoke [C]: narrow networks, few rounds, and rates at which every row learns in them.
COMMON: dict[str, Any] = dict(
    clients=20,
    epochs=1,
    batch=At(10, smoke=4),
    plan="drop",
    normalize="half",
    partition="dirichlet",
    partition_args={"alpha": 0.1},
    rounds=At(200, medium=25, quick=20, smoke=1),
    eval_every=At(medium=2, quick=2, smoke=...),
    max_samples=At(smoke=8),
    head_by="module",
)
# [P]: rates, and the depth s of the head, which counts modules: for ResNet-18 the last BatchNorm
# and the classifier, which are the four tensors of the released `-p 4`.
NETS: dict[str, dict[str, Any]] = {
    "cnn": dict(
        model="cnn",
        lr=At(0.005, quick=0.02),
        head_depth=1,
        model_args={"width": At(quick=0.25, smoke=0.0625)},
    ),
    "resnet18": dict(
        model="resnet18",
        lr=At(0.1, quick=0.05),
        head_depth=2,
        model_args={"width": At(quick=0.125, smoke=0.0625)},
        rounds=At(quick=10, smoke=...),
    ),
    "fasttext": dict(model="fasttext", lr=At(0.1, quick=0.5), head_depth=1),
}
# ? clients are those that PFLlib deals, to which the authors' repository refers, with its own seed:
# FedALA's paper, which has them, prints what this one has for FedAvg on CIFAR-10, 59.16. AG News,
# which has 1000 rounds [O], is dealt anew for each seed.
_SPLIT = {"split": At(medium="67.5/7.5/25")}


def _dealt(samples: int, **more: Any) -> dict[str, Any]:
    # Clients as PFLlib deals them, from so many samples of a class.
    draw = {"numpy_seed": At(1, quick=...), "class_size": At(samples, quick=...)}
    return dict(partition_args=draw | _SPLIT | more, max_samples=At(quick=150, smoke=8))


DATA: dict[str, dict[str, Any]] = {
    "cifar10": _dealt(6000),
    "cifar100": _dealt(600),
    "tiny_imagenet": _dealt(500, source="train"),
    "ag_news": dict(
        partition_args=_SPLIT,
        rounds=At(1000, medium=200, quick=20, smoke=1),
        eval_every=At(medium=10, quick=2, smoke=...),
        max_samples=At(quick=100, smoke=8),
    ),
}
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
# 20 x .005: the CNN's middle layers learn at least this fast in the released code [O].
FAST = 0.1
# Columns of Table 2's control, of ours: a learning rate each.
CONTROL = {f"lr {lr:g}": lr for lr in (0.005, 0.02, 0.05, FAST, 0.2)}


def setting(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, Any]:
    """Fields of the Experiment that an artefact's runs vary; `clients` replaces their number.

    The network is that of the artefact's first column.
    """
    first = COLUMNS[SHOWN[artefact].labels(profile)[0]].model
    model = "fasttext" if dataset == "ag_news" else first
    known = DATA.get(dataset, {"partition_args": _SPLIT})
    fields = fields_at(profile, COMMON, NETS[model], known, {"dataset": dataset})
    return fields | ({"clients": clients} if clients else {})


def network(model: str, profile: str) -> dict[str, Any]:
    """What a network changes in an Experiment: its rate, the depth s of its head, and its width.

    ResNet-18 also has fewer rounds at quick.
    """
    return fields_at(profile, NETS[model])


# -- rows ------------------------------------------------------------------------------------------


def _gpfl(base: Experiment) -> dict[str, Any]:
    # For ResNet-18 as in GPFL's own script [O].
    return use("gpfl", **(dict(lam=1e-4, mu=0.0) if base.model == "resnet18" else {}))


def _released(**part: bool) -> Changes:
    """The row "flayer (official)", to the letter of the released code [O], or one part of it.

    Its head is counted in tensors (`-p`), batches come in order, and the CNN's middle layers learn
    20 times as fast as at .005, whatever the base rate is. Its reader takes AG News' training texts
    for the test texts.
    """

    def row(base: Experiment) -> dict[str, Any]:
        fast = FAST / base.lr if base.model == "cnn" else 1.0
        tested = {"acc_on": "train"} if base.model == "fasttext" else {}
        return use("flayer", mode="official", middle=fast, **tested, **part) | dict(
            head_by="tensor",
            head_depth=4 if base.model == "resnet18" else 2,
            shuffle=False,
            rounds=min(base.rounds, RELEASED.get((base.dataset, base.model), base.rounds)),
        )

    return row


_METHODS = {method: use(method) for method in (*BASELINES, "fedcp", "flayer")}
_METHODS |= {method: use(method) | {"head_depth": 1} for method in HEADED}
ROWS: dict[str, Changes] = {
    **_METHODS,
    "gpfl": _gpfl,
    OFFICIAL: _released(),
    AVERAGED: use("fedavg") | {"buffers": "average"},
    FASTER: use("fedavg") | {"lr": FAST},
    ZEROS: use("flayer", agg="literal"),
    **{row: use("flayer") | {"head_depth": s} for s, row in zip((3, 2, 1), DEPTHS, strict=True)},
    # As printed, rates or masks alone are served as one global model; the released code trains each
    # client's head first.
    **{row: use("flayer", **part) for row, part in PARTS.items()},
    **{f"{row} (official)": _released(**part) for row, part in PARTS.items()},
    **{row: _METHODS[inner] | use("flayer", inner=inner) for inner, row in _AROUND.items()},
}


def rows(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, dict]:
    """Rows of an artefact as changes to its `setting`."""
    return made(artefact, profile, Experiment(**setting(artefact, profile, dataset)))


def made(artefact: str, profile: str, base: Experiment) -> dict[str, dict]:
    """Rows of an artefact as changes to `base`, its Experiment with the network of a column."""
    names = at(profile, SHOWN[artefact].rows)
    names = names if isinstance(names, dict) else {name: name for name in names}
    missing = FASTER if base.model == "resnet18" else AVERAGED  # the CNN has no BatchNorm
    named = {label: name for label, name in names.items() if name != missing}
    found = rows_at(profile, base, ROWS, named)
    if base.model == "fasttext":
        return {row: changes | {"record": ("train",)} for row, changes in found.items()}
    # Figure 2's runs are those of the tables, but at medium, whose tables were run without probes.
    # Where clients or their data are others, `sweeps` leaves the probe out.
    shown = base.dataset == "cifar10" if profile == "paper" else base.model == "cnn"
    if shown and (profile != "medium" or artefact == "fig2"):
        usual = f"s={base.head_depth}"  # the tables' run of FLAYER
        for label, name in named.items():
            if name in (*PROBED, usual):
                found[label]["record"] = ("cka", "cka_cores") if name == "apple" else ("cka",)
    return found


def _only(rows: dict[str, dict], names: Iterable[str]) -> dict[str, dict]:
    return {name: rows[name] for name in names if name in rows}


# -- runs ------------------------------------------------------------------------------------------


def image(scope: Scope) -> str:
    """The image column that stands for all below profile paper, and in the control.

    It is CIFAR-10's, or the next whose data are at hand.
    """
    for name, column in COLUMNS.items():
        if column.model == "cnn" and scope.data(column.dataset):
            return name
    return IMAGE


def columns(scope: Scope, artefact: str) -> dict[str, Problem]:
    """An artefact's columns by label: at profile paper all that the paper prints."""
    every, names = COLUMNS | {ANEW: COLUMNS[IMAGE]}, SHOWN[artefact].labels(scope.profile)
    if not scope.full:
        names = [image(scope) if name == IMAGE else name for name in names]
    found = {name: every[name] for name in names}
    if artefact not in VARIED:
        return found
    instead = VARIED[artefact].value(scope.profile)
    out = {name: found[names[0]]._replace(changes=changes) for name, changes in instead.items()}
    if "N=50" in out and not scope.full and scope.label == "digits":
        few = {"partition_args": {"fallback_least": 4}}  # too few digits for the usual least number
        out["N=50"] = out["N=50"]._replace(changes=out["N=50"].changes | few)
    return out


def sweeps(scope: Scope) -> list[Sweep]:
    """All runs, a Sweep for each column of an artefact; the part "control" of Table 2 is ours."""
    found = [sweep for artefact in PAPER.artefacts for sweep in _column_sweeps(scope, artefact)]
    return found + _control(scope)


def _column_sweeps(scope: Scope, artefact: str) -> list[Sweep]:
    # Below profile paper ResNet-18 has FedAvg's two rows only, and clients other than the main
    # table's have only FedALA and FLAYER.
    out = []
    for i, (name, column) in enumerate(columns(scope, artefact).items()):
        deep = column.model == "resnet18"
        base = scope.base(PAPER, artefact, column.dataset, **network(column.model, scope.profile))
        if base is None:
            continue
        every = made(artefact, scope.profile, base)
        other_clients = bool(column.changes) and i > 0
        if other_clients:
            every = without_probes(every)
        if scope.profile != "paper" and deep:
            every = _only(every, ("fedavg", AVERAGED))
        elif scope.profile != "paper" and other_clients:
            every = _only(every, ("fedala", "flayer"))
        if name == ANEW:
            every = {row: every[row] for row in every if row not in SLOW}
            base = drawn_anew(base)
        cells = {name: column.changes}
        out += scope.sweep(PAPER, base, every, cells, quick=1 if deep else 0)
    return out


def _control(scope: Scope) -> list[Sweep]:
    """FedAvg, FedALA and FLAYER with the CNN, at the main table's rate and at larger ones."""
    column = COLUMNS[image(scope)]
    base = scope.base(PAPER, "table2", column.dataset)
    if base is None:
        return []
    every = made("table2", scope.profile, base)
    every = _only(every, ("fedavg", "fedala", "flayer"))
    seeds = scope.seeds_of(PAPER, "control")  # as many as the profile has, not as Table 2
    own = network(column.model, scope.profile)["lr"]
    wanted = (own, 0.05, FAST, 0.2) if scope.profile == "paper" else (own, FAST)
    out = []
    for name, lr in CONTROL.items():
        arms = every if lr == own else without_probes(every)  # at its own rate: the table's runs
        if lr in wanted:
            out += scope.sweep(PAPER, base, arms, {name: {"lr": lr}}, seeds=seeds, part="control")
    return out


# -- numbers of finished runs ----------------------------------------------------------------------

KEYS = ["run", "row", "column"]


def costs(rows: pd.DataFrame) -> list[Number]:
    """What each run took up to its best round.

    iterations (rounds), client_visits, megabytes (down and up), total_s and s_per_iteration
    (seconds of training).
    """
    best = pick(rows, **PAPER.report).drop_duplicates(KEYS)
    numbers = []
    for run in tuples(best.merge(spent(rows, KEYS), on=[*KEYS, "rounds"])):
        taken = dict(
            iterations=run.rounds,
            client_visits=run.client_visits,
            megabytes=run.megabytes,
            total_s=run.train_s,
            s_per_iteration=run.train_s / max(run.rounds, 1),
        )
        where = dict(run=run.run, row=run.row, column=run.column, rounds=run.rounds)
        numbers += [where | dict(metric=metric, value=number) for metric, number in taken.items()]
    return numbers


def improvements(around: pd.DataFrame, alone: pd.DataFrame) -> list[Number]:
    """Points by which FLAYER around a method is better than the method alone.

    Parameters
    ----------
    around : DataFrame
        Rows of Table 5c.
    alone : DataFrame
        Rows of the methods themselves; a run is held against that of the same row, seed, data set
        and network.
    """
    same = ["row", "seed", "dataset", "model"]
    plain = pick(alone, **PAPER.report).drop_duplicates(same)
    both = pick(around, **PAPER.report).merge(plain, on=same, suffixes=("", "_alone"))
    gains = both.assign(metric="improvement_points", value=both.value - both.value_alone)
    return records(gains[[*KEYS, "metric", "value"]])


def trained(recorded: Iterable[Probed]) -> list[Number]:
    """Accuracy on training data (%), pooled, in the round where it is highest.

    It is what the paper prints for AG News: the released reader gives training texts as test
    texts, too. `recorded` is what the probe "train" recorded.
    """
    numbers = []
    for probed in recorded:
        acc = accuracy(probed.values["hits"].sum(1), probed.values["n"].sum(1))
        best = int(acc.argmax())
        where: Number = dict(run=probed.run, row=probed.row, column=probed.column)
        where["rounds"] = int(probed.rounds[best])
        numbers.append(where | dict(metric="train_acc_pct", value=float(acc[best])))
    return numbers


def similarity(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    """Mean linear CKA over pairs of clients, as the metric "cka STAGE LAYER" (Fig. 2).

    The stage "initial" is after the first local training, "best" after that of the recorded round
    nearest to the best one. What APPLE's clients train has a row of its own.
    """
    best = pick(rows, **PAPER.report).drop_duplicates(["run", "column"])
    best = best.set_index(["run", "column"])["rounds"]
    cores = [probed._replace(row=CORES) for probed in recorded("cka_cores")]
    numbers = []
    for probed in [*recorded("cka"), *cores]:
        where = dict(run=probed.run, row=probed.row, column=probed.column)
        stages = {"initial": 0, "best": int(best.loc[probed.run, probed.column])}
        for stage, when in stages.items():
            there = probed.only(when)
            for layer, alike in there.at().items():
                mean = float(alike[~np.eye(len(alike), dtype=bool)].mean())
                number = dict(rounds=there.rounds[0], metric=f"cka {stage} {layer}", value=mean)
                numbers.append(where | number)
    return numbers


def layers(rows: pd.DataFrame) -> pd.DataFrame:
    """The numbers of `similarity` among rows.

    Returns
    -------
    DataFrame
        Columns run, row, column, panel (the column and the row), seed, stage, layer, value.
    """
    found = rows[(rows["average"] == "derived") & rows.metric.str.startswith("cka ")]
    found = found[~found.metric.str.endswith(PAST)]
    words = found.metric.str.split(" ", n=2)
    stage = words.str[1].map({"initial": "first round", "best": "best round"})
    panel = found.column + ", " + found.row.map(label)
    found = found.assign(stage=stage, layer=words.str[2], panel=panel)
    return found[[*KEYS, "panel", "seed", "stage", "layer", "value"]]


# -- claims ----------------------------------------------------------------------------------------

# Seconds decide no claim: those of another computer compare with nothing.

# A smaller difference of similarities counts as a tie.
ALIKE: dict[str, Any] = dict(small=0.02, digits=3)


def falls_little(evidence: Evidence) -> list[Contrast]:
    """From 50 to 100 clients FLAYER loses less than 2 points, and less than APPLE."""
    for column in ("N=50", "N=100"):
        if column not in evidence.columns:
            raise LookupError(column)
    change = {(PAPER.own, "N=100"): 1.0, (PAPER.own, "N=50"): -1.0}
    against = change | {("apple", "N=100"): -1.0, ("apple", "N=50"): 1.0}
    return [
        evidence.contrast("FLAYER, N=100 - N=50", change, -2.0),
        evidence.contrast("APPLE's loss - FLAYER's, N=50 to N=100", against),
    ]


class _Similarity(NamedTuple):
    """How alike the layers of clients' models are in one row and column."""

    evidence: Evidence
    row: str
    column: str
    layers: list[str]

    @property
    def name(self) -> str:
        """How a reader calls it."""
        return f"{label(self.row)}, {self.column}"

    def mean(self, layers: Sequence[str], stage: str = "best") -> pd.Series:
        """Mean over layers, by seed."""
        each = [
            self.evidence.derived(f"cka {stage} {layer}", self.row, self.column) for layer in layers
        ]
        return functools.reduce(pd.Series.add, each) / len(each)


def _similarities(evidence: Evidence) -> list[_Similarity]:
    found = layers(evidence.rows)
    if not len(found):
        raise LookupError("CKA of any row")
    there, out = set(zip(found.row, found.column, strict=True)), []
    for (column, row), part in grouped(found, ["column", "row"]):
        if row == "apple" and (CORES, column) in there:
            continue  # mixtures of the same cores are alike from the first round, by what they are
        out.append(_Similarity(evidence, row, column, list(dict.fromkeys(part.layer))))
    return out


def base_more_alike(evidence: Evidence) -> list[Contrast]:
    """Layers before the last one are more alike in the best round than initially, on average."""
    contrasts = []
    for found in _similarities(evidence):
        base = found.layers[:-1]
        more = found.mean(base) - found.mean(base, "initial")
        says = f"base layers, best - initial: {found.name}"
        contrasts.append(evidence.above(says, more, **ALIKE))
    return contrasts


def head_least_alike(evidence: Evidence) -> list[Contrast]:
    """Every layer is more alike than the last one, in the best round."""
    contrasts = []
    for found in _similarities(evidence):
        *base, last = found.layers
        for layer in base:
            more = found.mean([layer]) - found.mean([last])
            contrasts.append(evidence.above(f"{layer} - {last}: {found.name}", more, **ALIKE))
    return contrasts


def cnn_more_alike(evidence: Evidence) -> list[Contrast]:
    """Layers of the CNN are more alike than those of ResNet-18, on average, in the best round."""
    found = {(s.row, s.column): s for s in _similarities(evidence)}
    deeper = {  # a column of the CNN: that of the same data with ResNet-18
        column: name
        for name, deep in COLUMNS.items()
        for column, simple in COLUMNS.items()
        if (simple.dataset, simple.model, deep.model) == (deep.dataset, "cnn", "resnet18")
    }
    contrasts = []
    for (row, column), simple in found.items():
        deep = found.get((row, deeper.get(column, "")))
        if deep:
            more = simple.mean(simple.layers) - deep.mean(deep.layers)
            contrasts.append(evidence.above(f"CNN - ResNet-18: {label(row)}", more, **ALIKE))
    if not contrasts:
        raise LookupError("CKA of both networks")
    return contrasts


def moderate(evidence: Evidence) -> list[Contrast]:
    """FLAYER's layers are neither the most alike nor the least, in the base and in the head."""
    every, contrasts = _similarities(evidence), []
    for column in dict.fromkeys(found.column for found in every):
        rows = {found.row: found for found in every if found.column == column}
        own = rows.pop(PAPER.own, None)
        if own is None or len(rows) < 2:
            raise LookupError(f"CKA of FLAYER and others in {column}")
        for part, layers_of in (("base", own.layers[:-1]), ("head", own.layers[-1:])):
            others = pd.concat([found.mean(layers_of) for found in rows.values()], axis=1)
            below = others.max(axis=1) - own.mean(layers_of)
            above = own.mean(layers_of) - others.min(axis=1)
            says = f"{part}, {column}"
            contrasts += [
                evidence.above(f"the most alike method - FLAYER: {says}", below, **ALIKE),
                evidence.above(f"FLAYER - the least alike method: {says}", above, **ALIKE),
            ]
    return contrasts


TERMS = Terms(
    {
        "train_acc_pct": Measure("{difference}, {column}, training texts", pooled=True),
        "iterations": Measure(
            "best round of {difference}, {column}",
            unit="rounds",
            small=2,
            digits=1,
            least=True,
            last=True,
        ),
        "improvement_points": Measure(
            "FLAYER around {row}, {column}", unit="points", small=SMALL, digits=1
        ),
    },
    our_rows=("*(*", "*_ft"),
    our_columns=(ANEW, *CONTROL),
    instead={"AG News, fastText": "train_acc_pct"},  # as it is printed
)
CLAIMS = claims.read(
    "flayer",
    TERMS,
    falls_little=falls_little,
    base_more_alike=base_more_alike,
    head_least_alike=head_least_alike,
    cnn_more_alike=cnn_more_alike,
    moderate=moderate,
)

# -- the paper -------------------------------------------------------------------------------------

_ARTEFACTS = {
    "table1": Artefact(
        IMAGES,
        quick=2,
        metrics=("acc_pct", "iterations", "total_s", "s_per_iteration"),
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
        IMAGES,
        quick=2,
        metrics=("iterations", "total_s"),
        numbers=lambda rows, recorded: costs(rows),
    ),
    "table4": Artefact(IMAGES),
    "table5a": Artefact(IMAGES),
    "table5b": Artefact(IMAGES),
    "table5c": Artefact(IMAGES),
    "fig2": Artefact(IMAGES, show=(), medium=2, quick=2, numbers=similarity),
    "fig3": Artefact(IMAGES, show=("curves",), medium=2),
}
PAPER = Paper(
    key="flayer",
    artefacts=_ARTEFACTS,
    claims=CLAIMS,
    sweeps=sweeps,
    own="flayer",
    # Correct answers over tests of all clients, at the best round [O].
    report=dict(select="best_test", when="before", average="pooled"),
    seeds={"paper": 5},  # "five times for each task" [P]
    runs=5,
    # They refer to PFLlib for data, whose script draws with a fixed seed [inferred].
    clients="for clients inferred to be the authors'",
    unstated=tuple(_ARTEFACTS),
    rates=CONTROL,
    tables=("table1", "table2", "table3", "table5a", "table5b"),
    setting=setting,
    rows=rows,
)
