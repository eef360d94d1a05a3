"""FedAGHN (Song et al., 2025): its settings, its runs, and what decides its claims.

Tables 1 to 4, Figures 4 and 5, Appendix Tables 1 and 2, Appendix Figures 1 and 2. [P], [O], [C] and
? say where a value is from; see `papers.base`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from pfl_core.analysis.plots import label
from pfl_core.analysis.select import pick, tuples
from pfl_core.analysis.stats import shares, stages
from pfl_core.analysis.verdicts import Contrast
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.metrics import validated
from pfl_papers.evidence.asks import Measure, Terms
from pfl_papers.evidence.contrasts import Evidence
from pfl_papers.papers import claims
from pfl_papers.papers.base import TUNING, Artefact, Number, Paper, Probed, Recorded, Scope, Sweep
from pfl_papers.papers.pfedla import RATE
from pfl_papers.papers.shown import (
    At,
    Changes,
    Column,
    Names,
    Shown,
    at,
    drawn_anew,
    fields_at,
    rows_at,
    use,
    without_probes,
)

# -- what the paper shows --------------------------------------------------------------------------

OWN = "fedaghn"
DESCENT = "fedaghn (descent)"  # our row: the corrected sign of App. Eq. 1
GROUPS = 5  # of clients in the case study; a group's clients follow each other
STAGES = ("First", "Prior", "Middle", "Final")
PLACES = ("first", "second", "last but one", "last")  # Figure 5's convolution and linear layers
ABLATED = {  # App. Table 1's rows, and the method's `ablation`
    "w/o p and q": "no_pq",
    "frozen": "frozen",
    "w/o p": "no_p",
    "w/o q": "no_q",
    "per client": "shared",
}
RESNET: dict[str, Any] = dict(model="resnet18", rounds=80)
COLUMNS = {  # CIFAR-100* is ResNet-18 on CIFAR-100
    "CIFAR-10": Column("cifar10"),
    "CIFAR-100": Column("cifar100"),
    "CIFAR-100*": Column("cifar100", RESNET),
    "TINY": Column("tiny_imagenet"),
}
DATA = [*COLUMNS]


def _shards(changes: dict[str, Any]) -> Changes:
    # 5, 20 or 40 classes a client [P]: the default of "shards".
    def dealt(base: Experiment) -> dict[str, Any]:
        of_shards = ("split", "numpy_seed", "class_size")
        args = {k: v for k, v in base.partition_args.items() if k in of_shards}
        return dict(partition="shards", partition_args=args) | changes

    return dealt


COLUMNS |= {
    f"Pathological, {name}": Column(COLUMNS[name].dataset, _shards(RESNET if "*" in name else {}))
    for name in DATA
}
COLUMNS |= {f"Dir(0.1), {name}": COLUMNS[name] for name in DATA}
# Our column of Table 1: clients are drawn anew for each seed, the paper's are one draw.
ANEW = "Dir(0.1), CIFAR-10, a partition a seed"
COLUMNS[ANEW] = COLUMNS["CIFAR-10"]
# Table 2's, and the panels of App. Figure 1, as changes to `setting`.
PARTITIONS = {f"Dir({a:g})": {"partition_args": {"alpha": a}} for a in (0.1, 0.2, 0.5)}
_TWO = At((), medium=("fedavg", OWN), quick=("fedavg", OWN))
COLUMNS |= {
    name: Column("cifar10", changes, () if name == "Dir(0.1)" else _TWO)
    for name, changes in PARTITIONS.items()
}

METHODS = (
    "local",
    "fedavg",
    "fedprox",
    "ditto",
    "fedrep",
    "pfedhn",
    "fedcp",
    "fedpac",
    "cfl",
    "fedamp",
    "heurfedamp",
    "pfedla",
    "fedala",
    OWN,
)
GRAPHS = ("cfl", "heurfedamp", OWN)  # methods whose weights are drawn


def _each(before: str, names: list[str]) -> list[str]:
    return [before + name for name in names]


# Below profile medium there is one data set, the first of these that is at hand, whichever the
# paper shows. medium has CIFAR-10, the case study as printed also CIFAR-100, with the CNN.
_HAND, _CIFAR = ["CIFAR-10", "CIFAR-100", "TINY"], ["CIFAR-10", "CIFAR-100"]
_DIRICHLET = _each("Dir(0.1), ", DATA)
# The paper names the data of Figure 5; those of the case study's others but Table 3 are [C].
_DRAWN = At(["CIFAR-100"], quick=_HAND)
SHOWN = {
    "table1": Shown(
        At(
            [*_each("Pathological, ", DATA), *_DIRICHLET, ANEW],
            medium=["Dir(0.1), CIFAR-10"],
            quick=_each("Dir(0.1), ", _HAND),
        ),
        METHODS,
    ),
    "table2": Shown(At([*PARTITIONS], quick=["Dir(0.1)", "Dir(0.5)"]), METHODS),
    "table3": Shown(
        At(DATA, medium=_CIFAR, quick=_HAND),
        At(("local", *GRAPHS, DESCENT), medium=("local", *GRAPHS)),
    ),
    "fig4": Shown(At(_CIFAR, quick=_HAND), GRAPHS),
    "fig5": Shown(_DRAWN, (OWN,)),
    "table4": Shown(_DRAWN, (OWN, DESCENT)),
    "apptable1": Shown(
        At(DATA, medium=["CIFAR-10"], quick=_HAND),
        At((*ABLATED, OWN), medium=("w/o p and q", "frozen", OWN)),
    ),
    "appfig1": Shown((), ()),  # draws partitions, and runs nothing
    "apptable2": Shown(_DRAWN, GRAPHS),
    "appfig2": Shown(_DRAWN, GRAPHS),
}
CASE = ("table3", "table4", "fig4", "fig5", "apptable2", "appfig2")  # of the case study
# Our rows. At the default rate pFedLA's weights hardly leave 1/N, so that it is FedAvg-FT; RATE is
# what validation chose in pFedLA's own table. CFL's thresholds are lost from the paper's text;
# those of that row are of the code whose settings it follows (App. C.3: pFedGraph, cfl.py).
_THRESHOLDS = "cfl (pFedGraph's thresholds)"
OURS = {
    "table1": At((f"pfedla (rate {RATE:g})", _THRESHOLDS), quick=()),
    "table3": At((_THRESHOLDS,), quick=()),
}

# -- settings --------------------------------------------------------------------------------------

# p0 and q0 are tuned for each data set and partition [P]; the grid is lost [C].
GRID = {"p0": (0.01, 0.03, 0.1), "q0": (0.5, 1.0, 3.0)}
TUNING_SEED = 7  # no artefact shows it
# With p0 = .03, the method's default: the example of the code, CIFAR-10 with Dir(.1) [O].
EXAMPLE = {"q0": 0.5}

# Sec. 4, App. C.3 [P]: 20 clients, all of which take part; 5 local epochs, batch 64, lr .01; 200
# rounds for the CNN with BatchNorm, 80 (CIFAR-100*) and 40 (TINY) for ResNet-18.
# [O]: incomplete batches are left out, pixels are in [-1, 1], clients are one draw for all seeds,
# that of numpy's generator with the script's seed, and hold one sample at least.
# medium [C]: 20 rounds, and at most 800 training images a client.
# quick and smoke [C]: a narrow LeNet with BatchNorm, few samples and rounds, a rate that suits
# them, and 20 (10) samples a client at least, so that a test part is not a single image.
COMMON: dict[str, Any] = dict(
    clients=At(20, smoke=10),
    epochs=At(5, quick=3, smoke=1),
    batch=At(64, quick=16, smoke=8),
    lr=At(0.01, quick=0.1),
    rounds=At(200, medium=20, quick=20, smoke=2),
    eval_every=At(quick=2, smoke=1),
    max_samples=At(medium=800, quick=32, smoke=8),
    model=At("cnn_bn", quick="lenet"),
    model_args={"bn": At(quick=True), "kernels": At(quick=6, smoke=2)},
    plan="drop",
    normalize="half",
)
# How clients are dealt: in the tables, and in the case study, which is evaluated in every round.
DIRICHLET: dict[str, Any] = dict(
    partition="dirichlet",
    partition_args={"alpha": 0.1, "least": At(1, quick=20, smoke=10), "split": "70/10/20"},
)
GROUPED: dict[str, Any] = dict(partition="groups", eval_every=At(quick=1))


def _drawn(seed: int, samples: int = 0) -> dict[str, Any]:
    """Clients that hold what the released script deals them, from so many samples of a class.

    At quick and smoke its seed is ours.
    """
    of_class = {"class_size": At(samples, quick=...)} if samples else {}
    args = {"numpy_seed": At(seed, quick=...)} | of_class
    return dict(partition_args=args, partition_seed=At(quick=seed))


_REAL = dict(  # quick on data that are not embedded
    epochs=At(quick=2, smoke=...),
    batch=At(quick=32, smoke=...),
    max_samples=At(quick=96, smoke=...),
)
_SMALL = dict(model_args={"kernels": At(quick=4, smoke=2)})
_TINY = dict(model=At("resnet18", quick=...), rounds=At(40, medium=20, quick=...))
SETS: dict[str, dict[str, Any]] = {
    "cifar10": _REAL | _drawn(66666, 6000),
    "cifar100": _REAL | _drawn(666, 600),
    "tiny_imagenet": _REAL | _TINY | _drawn(666, 550),
    "digits": _SMALL | _drawn(666),
    "digits100": _SMALL | _drawn(666),
}


def setting(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, Any]:
    """Fields of the Experiment that an artefact's runs vary; `clients` replaces their number.

    Columns are changes to it: see `COLUMNS`.
    """
    dealt, of_set = (
        GROUPED if artefact in CASE else DIRICHLET,
        SETS.get(dataset, _REAL | _drawn(666)),
    )
    fields = fields_at(profile, COMMON, dealt, of_set, {"dataset": dataset})
    return fields | ({"clients": clients} if clients else {})


# -- rows ------------------------------------------------------------------------------------------

# Values of baselines are lost from the paper's text: ? defaults of the methods' files, mostly those
# of pFedGraph, which it follows. HeurFedAMP: the nearly equal weights of similar and other clients
# in App. Table 2 need cosines of models, and sigma near 1 [inferred].
_HEURFEDAMP = use("heurfedamp", similarity="params", sigma=1.0)


def _pfedhn(base: Experiment) -> dict[str, Any]:
    # It has one client a communication round, as in its paper, and in all as many visits of clients
    # as the others. Its local optimiser is that of its paper; at quick six steps at so small a rate
    # move nothing.
    return use("pfedhn") | dict(
        participation=1 / base.clients,
        rounds=base.rounds * base.clients,
        eval_every=base.eval_every * base.clients,
        eval_after=True,
        lr=At(0.005, quick=...),
        momentum=At(0.9, quick=...),
        weight_decay=At(5e-5, quick=...),
        clip=At(50.0, quick=...),
        plan=At("fresh", quick=...),
    )


def _fedcp(base: Experiment) -> dict[str, Any]:
    return use("fedcp", lam=1.0 if base.model == "resnet18" else 5.0)  # ? its own script: CNN 5


def _cfl(**thresholds: float) -> Changes:
    # CFL has a parameter of its own in the case study [P], whose value is lost; App. Table 2 shows
    # groups of four clients: ? the smallest cluster.
    return lambda base: (
        use("cfl", min_size=max(2, base.clients // GROUPS), **thresholds) | _RECORDED
    )


ROWS: dict[str, Changes] = {method: use(method) for method in METHODS}
ROWS |= {"heurfedamp": _HEURFEDAMP, "pfedhn": _pfedhn, "fedcp": _fedcp}
ROWS[OWN] = use("fedaghn", **EXAMPLE)
ROWS |= {row: use("fedaghn", **EXAMPLE, ablation=part) for row, part in ABLATED.items()}
ROWS[f"pfedla (rate {RATE:g})"] = use("pfedla", lr=RATE)
_PFEDGRAPH = dict(eps1=2.0, eps2=2.5, warmup=0.0)
ROWS[_THRESHOLDS] = use("cfl", **_PFEDGRAPH)
# The case study; q0 = 3 is fitted to Table 4 [inferred].
_RECORDED = dict(record=("weights",))
STUDIED: dict[str, Changes] = {
    "local": use("local"),
    "cfl": _cfl(),
    _THRESHOLDS: _cfl(**_PFEDGRAPH),
    "heurfedamp": _HEURFEDAMP | _RECORDED,
    OWN: use("fedaghn", q0=3.0) | _RECORDED,
    DESCENT: use("fedaghn", q0=3.0, hn_sign="descent") | _RECORDED,
}


def rows(artefact: str, profile: str, dataset: str, clients: int = 0) -> dict[str, dict]:
    """Rows of an artefact as changes to its `setting`, with the p0 and q0 of the code's example."""
    base = Experiment(**setting(artefact, profile, dataset, clients))
    return _rows(artefact, profile, base, SHOWN[artefact].rows)


def _rows(artefact: str, profile: str, base: Experiment, names: Names) -> dict[str, dict]:
    every = STUDIED if artefact in CASE else ROWS
    return rows_at(profile, base, every, names)


# -- runs ------------------------------------------------------------------------------------------


def columns(scope: Scope, artefact: str) -> list[str]:
    """Labels of an artefact's columns that are run; none for App. Figure 1, which runs nothing."""
    found = SHOWN[artefact].labels(scope.profile)
    if scope.profile == "paper":
        return found
    if scope.full:  # no stand-ins
        return [c for c in found if scope.data(COLUMNS[c].dataset) == COLUMNS[c].dataset]
    served = [c for c in found if scope.data(COLUMNS[c].dataset)]
    return [c for c in served if COLUMNS[c].dataset == COLUMNS[served[0]].dataset]


def sweeps(scope: Scope) -> list[Sweep]:
    """All runs of the artefacts, a Sweep for each column.

    At medium and paper the runs that choose p0 and q0 of a column stand before it.
    """
    return [
        sweep
        for artefact in PAPER.artefacts
        for name in columns(scope, artefact)
        for sweep in _column_sweeps(scope, artefact, name)
    ]


def _column_sweeps(scope: Scope, artefact: str, name: str) -> list[Sweep]:
    column, shown = COLUMNS[name], SHOWN[artefact].rows
    base = scope.at(PAPER, artefact, column)
    if base is None:
        return []
    if name == ANEW:
        base = drawn_anew(base)
    if artefact in OURS:
        shown = (*at(scope.profile, shown), *at(scope.profile, OURS[artefact]))
    tuned = scope.full and PAPER.artefacts[artefact].tuned
    tried = _tried(scope, name, base) if tuned else []
    every = _rows(artefact, scope.profile, base, at(scope.profile, column.rows) or shown)
    if base.model == "resnet18":  # no figure shows what its probes would record
        every = without_probes(every)
    if chosen := _chosen(scope, tried):
        every = {
            row: c | {"method_args": c["method_args"] | chosen} if c["method"] == OWN else c
            for row, c in every.items()
        }
    return [*tried, *scope.sweep(PAPER, base, every, {name: {}})]


def _tried(scope: Scope, name: str, base: Experiment) -> list[Sweep]:
    """FedAGHN with all pairs of `GRID`, over a quarter of the rounds, with one seed."""
    short = base.but(rounds=max(1, base.rounds // 4), tags={"artefact": TUNING})
    pairs = {
        f"p0 = {p0:g}, q0 = {q0:g}": use(OWN, **_strengths(p0, q0))
        for p0 in GRID["p0"]
        for q0 in GRID["q0"]
    }
    served = base.tags["artefact"]
    return scope.sweep(PAPER, short, pairs, {name: {}}, seeds=(TUNING_SEED,), part=served)


def _strengths(p0: float, q0: float) -> dict[str, float]:
    # The method's default, p0 = .03, is left out, to share runs with those that do not name it.
    return {"q0": q0} if p0 == 0.03 else {"q0": q0, "p0": p0}


def _chosen(scope: Scope, tried: list[Sweep]) -> dict[str, float]:
    """p0 and q0 of a column: those of the best validation accuracy among the runs `tried`.

    {} until these are finished, and where none are tried: those of the code's example stay.
    """
    experiments = [experiment for sweep in tried for experiment in sweep.experiments()]
    finished = scope.finished(experiments) if experiments else None
    if finished is None or finished.empty:
        return {}
    return tried[0].rows[tuned(finished).chosen.iloc[0]]["method_args"]


# -- numbers and pictures of finished runs ---------------------------------------------------------


def tuned(rows: pd.DataFrame) -> pd.DataFrame:
    """Validation accuracy (%) at the best round for each p0 and q0 that was tried.

    A line for each column of a table, and its pair in the last column, "chosen".
    """
    tried = rows[rows.artefact == TUNING]
    found = validated(tried, ["column", "row"], PAPER.report["when"])
    if found.empty:
        given = ["p0 = 0.03, q0 = 0.5, as given in the code's example"]
        return pd.DataFrame({"chosen": given}, index=["not tuned"])
    best = found.unstack("row")[list(dict.fromkeys(found.index.get_level_values("row")))]
    return best.assign(chosen=best.idxmax(axis=1))


def reported_rounds(rows: pd.DataFrame) -> dict[str, int]:
    """The round of each run that the paper reports, and reads weights at: {run: round}."""
    if not len(rows):
        return {}
    return dict(pick(rows, **PAPER.report).drop_duplicates("run").set_index("run")["rounds"])


def staged(rows: pd.DataFrame, weights: list[Probed]) -> pd.DataFrame:
    """Mean weights of each run by part of the model, kind of client and stage.

    Parameters
    ----------
    rows : DataFrame
        Rows of the runs, which say the round that is reported.
    weights : list of Probed
        What the probe "weights" recorded in them.

    Returns
    -------
    DataFrame
        As of `analysis.stats.stages`, with run, row, column and seed.
    """
    best = reported_rounds(rows)
    if not weights:
        return pd.DataFrame(columns=["part", "kind", "stage", "weight", "run", "row"])
    parts = []
    for probed in weights:
        found = stages(probed.values, probed.rounds, _groups(probed), best[probed.run])
        whose = dict(run=probed.run, row=probed.row, column=probed.column, seed=probed.seed)
        parts.append(found.assign(**whose))
    return pd.concat(parts, ignore_index=True)


def _groups(probed: Probed) -> np.ndarray:
    """The group of each client of the case study, (K,)."""
    clients = next(iter(probed.values.values())).shape[-1]
    return np.arange(clients) * GROUPS // clients


def stage_weights(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    """Table 4's weights: rows "part, kind", columns are stages.

    Those of the whole model under the other sign, which is our row, stand beside them.
    """
    numbers = []
    for line in tuples(staged(rows, recorded("weights"))):
        if line.row == OWN or line.part == "whole":
            sign = " (descent)" if line.row == DESCENT else ""
            numbers.append(_weight_number(line, f"{line.part}, {line.kind}{sign}", line.stage))
    return numbers


def final_weights(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    """Appendix Table 2's weights at the reported round, by method and kind of client."""
    every = staged(rows, recorded("weights"))
    final = every[(every.stage == "Final") & (every.part == "whole")]
    return [_weight_number(line, line.row, line.kind.capitalize()) for line in tuples(final)]


def course_of_methods(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    """Appendix Figure 2 in numbers: weights in the whole model, rows "method, kind", by stage."""
    every = staged(rows, recorded("weights"))
    whole = every[every.part == "whole"]
    return [_weight_number(v, f"{v.row}, {v.kind}", v.stage) for v in tuples(whole)]


def layer_weights(rows: pd.DataFrame, recorded: Recorded) -> list[Number]:
    """Figure 5 in numbers: by how much a similar client weighs more than another one.

    Its rows are `PLACES`: the figure's layers, at the reported round.
    """
    best, numbers = reported_rounds(rows), []
    for probed in recorded("weights"):
        there = _after_updates(probed).only(best[probed.run])
        where = dict(run=probed.run, metric="similar minus other", rounds=there.rounds[0])
        for place, matrix in zip(PLACES, _outer_layers(there.at()).values(), strict=True):
            weights = shares(matrix, _groups(probed))
            number = dict(row=place, value=weights["similar"] - weights["other"])
            numbers.append(where | number)
    return numbers


def _weight_number(line: Any, row: str, column: str) -> Number:
    where = dict(run=line.run, row=row, column=column, rounds=line.rounds)
    return where | dict(metric="weight", value=line.weight)


def course(weights: list[Probed]) -> pd.DataFrame:
    """Mean weights at every recorded round: kind of client, row, seed, rounds, value.

    A row is a part of the model; under the other sign there is the whole model only.
    """
    lines = []
    for probed in weights:
        for part, layers in _parts(probed).items():
            for when, matrix in zip(probed.rounds, np.mean(layers, 0), strict=True):
                for kind, weight in shares(matrix, _groups(probed)).items():
                    line = dict(kind=f"On {WHOM[kind]}", row=part, seed=probed.seed)
                    lines.append(line | dict(rounds=int(when), value=weight))
    return pd.DataFrame(lines, columns=["kind", "row", "seed", "rounds", "value"])


WHOM = {"self": "oneself", "similar": "a similar client", "other": "another client"}


def _parts(probed: Probed) -> dict[str, list[np.ndarray]]:
    """Layers of the parts of a model; a middle one is in both halves, as in `stats.stages`."""
    layers = list(probed.values.values())
    if probed.row == DESCENT:
        return {"whole, descent": layers}
    half_up, half_down = (len(layers) + 1) // 2, len(layers) // 2
    return {"whole": layers, "shallow": layers[:half_up], "deep": layers[half_down:]}


def graphs(
    rows: pd.DataFrame, weights: list[Probed], *, layered: bool = False, staged: bool = False
) -> dict[str, np.ndarray]:
    """Collaboration graphs of the first seed, at the reported round.

    Parameters
    ----------
    rows : DataFrame
        Rows of the runs, which say the round that is reported.
    weights : list of Probed
        What the probe "weights" recorded in them.
    layered : bool
        The first and the last two convolution and linear layers, each on its own; else the mean
        over all layers.
    staged : bool
        At all four stages of training.

    Returns
    -------
    {title: (K, K) float}
    """
    best, out = reported_rounds(rows), {}
    first = [probed for probed in weights if probed.seed == rows.seed.min()]
    several = len({probed.column for probed in weights}) > 1
    for probed in first:
        name = label(probed.row) + (f", {probed.column}" if several else "")
        final = best[probed.run]
        aims = dict(zip(STAGES, (1, final / 4, final / 2, final), strict=True))
        for stage, aim in aims.items() if staged else [("Final", final)]:
            found = _after_updates(probed).at(aim)
            if layered:
                out |= _outer_layers(found)
            else:
                title = f"{name}, {stage}" if staged else name
                out[title] = np.mean(list(found.values()), 0)
    return out


def _after_updates(probed: Probed) -> Probed:
    """What was recorded after round 0, when nothing is aggregated yet."""
    later = probed.rounds > 0
    values = {layer: recorded[later] for layer, recorded in probed.values.items()}
    return probed._replace(rounds=probed.rounds[later], values=values)


def _outer_layers(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [layer for layer in found if "bn" not in layer]
    return {layer: found[layer] for layer in dict.fromkeys([*names[:2], *names[-2:]])}


# -- claims ----------------------------------------------------------------------------------------

EQUAL = 0.001  # weights that differ by less are equal
WEIGHTS: dict[str, Any] = dict(small=EQUAL, digits=4)


def _final(evidence: Evidence, row: str) -> list[pd.Series]:
    """Weights of oneself, of a similar and of another client at the reported round, by seed.

    Over several data sets it is their mean.
    """
    return [evidence.derived("weight", row, kind) for kind in ("Self", "Similar", "Other")]


def own_group_alone(evidence: Evidence) -> list[Contrast]:
    """In CFL a client and its group weigh the same, and clients outside nothing."""
    own, similar, other = _final(evidence, "cfl")
    says = "CFL, similar - self, either way"
    same = [evidence.above(says, d, -EQUAL, **WEIGHTS) for d in (similar - own, own - similar)]
    return [*same, evidence.above("CFL, nothing - other", -other, -EQUAL, **WEIGHTS)]


def slightly_more(evidence: Evidence) -> list[Contrast]:
    """In HeurFedAMP similar clients weigh more than others, by less than in FedAGHN."""
    _, similar, other = _final(evidence, "heurfedamp")
    _, own_similar, own_other = _final(evidence, OWN)
    wider = (own_similar - own_other) - (similar - other)
    return [
        evidence.above("HeurFedAMP, similar - other", similar - other, small=0, digits=4),
        evidence.above("similar - other, FedAGHN - HeurFedAMP", wider, **WEIGHTS),
    ]


def about_twice(evidence: Evidence) -> list[Contrast]:
    """In deep layers similar clients weigh about twice as much as others at the end."""
    similar, other = (
        evidence.derived("weight", f"deep, {kind}", "Final") for kind in ("similar", "other")
    )
    ratio, says = similar / other, "deep, similar / other, at the end"
    how: dict[str, Any] = dict(unit="times", small=0, digits=2)
    least, most = TWICE
    return [
        evidence.above(says, ratio, least, **how),
        evidence.above(f"{most:g} - {says}", most - ratio, **how),
    ]


TWICE = (1.5, 2.5)  # what counts as about twice

TERMS = Terms(
    {
        "weight": Measure(**WEIGHTS),
        "similar minus other": Measure("similar - other, {difference}", across=True, **WEIGHTS),
    },
    our_columns=(ANEW,),
)
CLAIMS = claims.read(
    "fedaghn",
    TERMS,
    own_group_alone=own_group_alone,
    slightly_more=slightly_more,
    about_twice=about_twice,
)

# -- the paper -------------------------------------------------------------------------------------

# Below profile paper the case study's tables and figures are of the first data set that is at hand,
# whichever the paper shows.
_DATA = ("cifar10", "cifar100", "tiny_imagenet")
_DRAWING = Artefact(_DATA, show=(), medium=3, quick=1)
_WEIGHTS = Artefact(_DATA, medium=3, quick=1, metrics=("weight",), digits=4)

PAPER = Paper(
    key="fedaghn",
    clients="for the authors' clients",  # their script draws with a fixed seed [O]
    artefacts={  # in the notebook's order
        "table1": Artefact(_DATA, show=("compare", "standing"), medium=3, quick=2, tuned=True),
        "table2": Artefact(("cifar10",), quick=1, tuned=True),
        "table3": Artefact(_DATA, medium=3, quick=1),
        "fig4": replace(_DRAWING, numbers=final_weights, makes=((), ("Self", "Similar", "Other"))),
        "fig5": replace(_DRAWING, numbers=layer_weights, makes=(PLACES, ())),
        "table4": replace(_WEIGHTS, numbers=stage_weights),
        "apptable1": Artefact(_DATA, medium=2, quick=1, tuned=True),
        "appfig1": Artefact(("cifar10",), show=()),
        "apptable2": replace(_WEIGHTS, numbers=final_weights),
        "appfig2": replace(
            _DRAWING, numbers=course_of_methods, makes=(("heurfedamp, self",), STAGES)
        ),
    },
    claims=CLAIMS,
    sweeps=sweeps,
    own=OWN,
    report=dict(select="best_val", when="after", average="client"),
    when={"fedavg": "before", "fedprox": "before"},
    runs=3,  # "repeated for three times" [P]
    tables=("table1", "table2", "table3", "apptable1"),  # those whose rows `presets` gives
    setting=setting,
    rows=rows,
)
