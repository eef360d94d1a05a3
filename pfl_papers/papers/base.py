"""What a paper is here: artefacts, claims and the sweeps that they need, as data, training nothing.

A paper's file holds `PAPER`, its settings with their sources, and the functions that make numbers
of finished runs. Sources of values: [P] the paper, [O] the authors' code, [C] our choice, ? a
substitute for what the paper's text does not hold.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pfl_core.analysis.verdicts import Contrast
from pfl_core.experiments.experiment import Experiment, grid
from pfl_core.methods.base import METHODS
from pfl_core.util import checks
from pfl_papers.evidence import committed
from pfl_papers.evidence.asks import Ask
from pfl_papers.evidence.contrasts import Evidence
from pfl_papers.papers.overrides import Overrides, labelled, overridden
from pfl_papers.papers.shown import Column

PAPERS = ("fedper", "pfedhn", "pfedla", "flayer", "fedaghn")
PROFILES = ("smoke", "quick", "medium", "paper")
# Profiles over the papers' own data, networks and clients; medium has fewer rounds.
FULL = ("medium", "paper")
# What a claim is about: that the paper's method beats others; how or when methods work; what is
# true of any run by definition, or fitted to the table that it is judged by.
KINDS = ("headline", "mechanism", "by construction")
TUNING = "tuning"  # the artefact of runs that choose the parameters of others
EMBEDDED = ("digits", "digits100", "raters_digits100")
# What serves where a paper's data are not asked for: embedded first, then what may be there.
STAND_INS = {
    "cifar10": ("digits",),
    "cifar100": ("digits100",),
    "mnist": ("digits",),
    "fashion_mnist": ("digits",),
    "emnist-digits": ("digits",),
    "omniglot": (),
    "tiny_imagenet": ("digits100",),
    "ag_news": (),
    "flickr_aes": ("raters_cifar10", "raters_digits100"),
}


class Probed(NamedTuple):
    """What a probe recorded in one run: rounds (E,), values {key: (E, ...)}."""

    run: str
    row: str
    column: str
    seed: int
    rounds: np.ndarray
    values: dict[str, np.ndarray]

    def at(self, round: float | None = None) -> dict[str, np.ndarray]:
        """{key: array} at the recorded round nearest to `round` (the later of two), or the last."""
        found = self if round is None else self.only(round)
        return {key: recorded[-1] for key, recorded in found.values.items()}

    def only(self, round: float) -> Probed:
        """What was recorded at the round nearest to `round` (the later of two)."""
        i = len(self.rounds) - 1 - int(np.abs(self.rounds[::-1] - round).argmin())
        return self._cut(slice(i, i + 1))

    def until(self, round: float) -> Probed:
        """What was recorded at a round and before it."""
        return self._cut(slice(int((self.rounds <= round).sum())))

    def _cut(self, there: slice) -> Probed:
        values = {key: recorded[there] for key, recorded in self.values.items()}
        return self._replace(rounds=self.rounds[there], values=values)


# Name of a probe -> what it recorded in the runs at hand.
Recorded = Callable[[str], list[Probed]]
# run, metric, value, and what else differs from that run's rows (row, column, round).
Number = dict[str, Any]


@dataclass(frozen=True)
class Artefact:
    """A table or figure with data: what it needs, and what `Study.show` makes of its runs.

    Attributes
    ----------
    data : tuple of str
        The paper's data sets in it.
    show : tuple of str
        Of "compare", "standing" (tables), "curves", "spread" (figures).
    medium, quick, paper : int
        Seeds at these profiles. medium 0: not run there; the others 0: as many as usual.
    metrics : tuple of str
        Published numbers to compare.
    digits : int
        With which they are shown.
    numbers : callable
        (its rows, what probes recorded) -> what is derived from them.
    together : bool
        Whether a number is made of several runs; then numbers wait for all runs.
    said : str
        A sentence for the figure's caption.
    tuned : bool
        Whether runs of the artefact "tuning" choose its parameters.
    makes : (tuple of str, tuple of str)
        Rows and columns of its `numbers` that its runs do not have.
    """

    data: tuple[str, ...]
    show: tuple[str, ...] = ("compare",)
    medium: int = 0
    quick: int = 0
    paper: int = 0
    metrics: tuple[str, ...] = ("acc_pct",)
    digits: int = 2
    numbers: Callable[[pd.DataFrame, Recorded], list[Number]] | None = None
    together: bool = False
    said: str = ""
    tuned: bool = False
    makes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


@dataclass(frozen=True)
class Claim:
    """What a paper says, and the differences on which it rests: a line of `papers.claims`.

    Attributes
    ----------
    says : str
        In the paper's words or near to them.
    where : str
        Section, table or figure of the paper.
    needs : str
        The artefact whose runs decide it.
    judge : callable
        Evidence of these runs -> contrasts, each of which has to be above its threshold.
        LookupError for what was not run. It sees accuracies, derived numbers and the metrics that
        `ask` names.
    limit : str
        A threshold that is ours and not the paper's, in words.
    most : bool
        Whether it speaks of most cases: of more than half of the contrasts' groups.
    status : str
        What a person found out about its contradiction; "" leaves it to `report.claims`.
    key : str
        Its name in the paper.
    kind : str
        One of `KINDS`.
    ask : Ask or None
        What its judge asks, None of a function of the paper's own.
    """

    says: str
    where: str
    needs: str
    judge: Callable[[Evidence], list[Contrast]]
    limit: str = ""
    most: bool = False
    status: str = ""
    key: str = ""
    kind: str = "mechanism"
    ask: Ask | None = None


@dataclass(frozen=True)
class Sweep:
    """Runs of an artefact: the grid rows x columns x seeds of changes to `base`.

    Attributes
    ----------
    artefact : str
        Its key.
    base : Experiment
        What all runs have in common.
    rows, columns : {label: changes}
        As in `grid`.
    seeds : tuple of int
        Values of the field `seed`.
    part : str
        Tells the sweeps of one artefact apart.
    vary : str
        The one field that its rows vary, as "head_depth" or "method_args.lr"; "" if they differ
        otherwise.
    overrides : mapping
        What a reader changes in all of its runs, as for `overridden`.
    """

    artefact: str
    base: Experiment
    rows: dict[str, dict[str, Any]]
    columns: dict[str, dict[str, Any]]
    seeds: tuple[int, ...]
    part: str = ""
    vary: str = ""
    overrides: Overrides = field(default_factory=dict)

    def experiments(self) -> list[Experiment]:
        """Its runs, rows outermost."""
        cells = grid(self.base, self.rows, self.columns, list(self.seeds))
        return [overridden(cell, self.overrides) for cell in cells]

    def typed(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Those of some rows that are of its runs, with the value of `vary` as a column, `varied`.

        It is that of a run's Experiment; of a run that nobody knows, that of the plan.
        """
        own = rows[rows.row.isin(self.rows) & rows.column.isin(self.columns)]
        of_row = {row: field_of(self.base.but(**c), self.vary) for row, c in self.rows.items()}
        known = {run: committed.experiment(run) for run in own.run.unique()}
        values = [
            field_of(e, self.vary) if (e := known[run]) else of_row[row]
            for run, row in zip(own.run, own.row, strict=True)
        ]
        return own.assign(varied=values)


@dataclass(frozen=True)
class Paper:
    """A paper as data.

    Attributes
    ----------
    key : str
        Its name in `PAPERS`.
    artefacts : {key: Artefact}
        Its tables and figures, in the notebook's order.
    claims : tuple of Claim
        What it says of them.
    sweeps : callable
        Scope -> all runs that its artefacts need there. It trains nothing, and may read finished
        runs of the artefact "tuning" with `scope.finished`.
    own : str
        The row of the paper's own method.
    report : {str: str}
        Which number of a run the paper reports, as keywords of `select.pick`.
    when : {row: str}
        Rows that are read at another time.
    seeds : {profile: int}
        How many, where the paper says so.
    runs : int
        Over how many runs its published numbers are, 0 if it does not say.
    draws : int
        Over how many draws of clients they are, 1 if it does not say.
    clients : str
        For whom verdicts are where our clients are the authors' own draw.
    unstated : tuple of str
        Artefacts of which it does not say the number of rounds: profile `paper` has ours.
    rates : {column: float}
        Learning rates of columns of ours that differ in them alone.
    tables : tuple of str
        Artefacts that `presets` has.
    setting : callable
        (artefact, profile, data set, clients) -> fields of an Experiment.
    rows : callable
        The same -> {row: changes}.
    printed : callable
        The label of a column at any profile -> its label at profile paper.
    """

    key: str
    artefacts: dict[str, Artefact]
    claims: tuple[Claim, ...]
    sweeps: Callable[[Scope], list[Sweep]]
    own: str
    report: dict[str, str]
    when: dict[str, str] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    runs: int = 0
    draws: int = 1
    clients: str = ""
    unstated: tuple[str, ...] = ()
    rates: dict[str, float] = field(default_factory=dict)
    tables: tuple[str, ...] = ()
    setting: Callable[..., dict[str, Any]] = dict
    rows: Callable[..., dict[str, dict[str, Any]]] = dict
    printed: Callable[[str], str] = str

    def planned(self, scope: Scope, artefact: str = "", part: str | None = None) -> list[Sweep]:
        """The sweeps of an artefact (of all that are asked for), those of "tuning" first.

        Of tuning those that serve the artefact, which is their part; without a part they serve all.
        """
        if artefact in (scope.artefacts or self.artefacts):  # no others need to be made
            scope = replace(scope, artefacts=(artefact,))
        found = self.sweeps(scope)
        tuning = [s for s in found if s.artefact == TUNING]
        if artefact == TUNING:
            return tuning
        wanted = [artefact] if artefact else scope.artefacts or tuple(self.artefacts)
        tuned = [a for a in wanted if self.artefacts[a].tuned]
        first = [s for s in tuning if tuned and s.part in ("", *tuned)]
        rest = [s for s in found if s.artefact in wanted and part in (None, s.part)]
        return first + [replace(s, overrides=scope.overrides) for s in rest]

    def missing(self, scope: Scope, artefact: str) -> str:
        """Why an artefact is not run in this scope, "" if it is."""
        checks.known("artefact:", artefact, self.artefacts)
        if scope.artefacts and artefact not in scope.artefacts:
            return f"not run, not among artefacts={list(scope.artefacts)}"
        needed = self.artefacts[artefact].data
        if not any(scope.data(d) for d in needed):
            given = list(scope.datasets) or "the embedded ones"
            return f"not run, needs {' or '.join(needed)} (datasets={given})"
        if scope.profile == "medium" and not self.artefacts[artefact].medium:
            has = ", ".join(a for a, v in self.artefacts.items() if v.medium)
            has = has or "nothing of this paper"
            return f"not run at profile medium, which has {has}; use profile='paper'"
        return ""


@dataclass(frozen=True)
class Scope:
    """What is asked of a paper: a profile, and what to restrict it to (empty: the profile's own).

    Attributes
    ----------
    profile : str
        One of `PROFILES`.
    datasets, methods, artefacts : tuple of str
        The only ones.
    seeds : tuple of int
        The only ones.
    finished : callable
        Experiments -> their rows if all of them are finished, else None; by default none are.
    overrides : mapping
        What is changed in all runs but those that tune: the results are not the paper's.
    """

    profile: str = "quick"
    datasets: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    artefacts: tuple[str, ...] = ()
    finished: Callable[[list[Experiment]], pd.DataFrame | None] = field(
        default=lambda cells: None, compare=False
    )
    overrides: Overrides = field(default_factory=dict, hash=False)

    @property
    def said(self) -> str:
        """The profile as rows and captions say it: with what is overridden."""
        return labelled(self.profile, self.overrides)

    @property
    def label(self) -> str:
        """The data in names of files: "cifar10+mnist"; "paper", each artefact's own; "digits"."""
        return "+".join(self.datasets) or ("paper" if self.full else "digits")

    @property
    def full(self) -> bool:
        """Whether networks, data and clients are the paper's."""
        return self.profile in FULL

    def data(self, name: str) -> str | None:
        """The data set that serves for the paper's `name`: itself, a stand-in, or None."""
        if not self.datasets and self.full:
            return name
        wanted = self.datasets or EMBEDDED
        return next((d for d in (name, *STAND_INS.get(name, ())) if d in wanted), None)

    def pick(self, paper: Any, *, quick: Any, smoke: Any = None, medium: Any = None) -> Any:
        """The value for the profile; smoke takes quick's where it has none, medium the paper's.

        Parameters
        ----------
        paper : object
            The value at that profile.
        quick : object
            On the embedded data only; on others its value is the paper's.
        smoke, medium : object
            The values at these profiles.
        """
        if self.profile == "quick" and self.label != "digits":
            return paper
        given = {"paper": paper, "medium": medium, "quick": quick, "smoke": smoke}[self.profile]
        return {"medium": paper, "smoke": quick}.get(self.profile) if given is None else given

    def base(self, paper: Paper, artefact: str, dataset: str, **changes: Any) -> Experiment | None:
        """The Experiment that an artefact's runs vary; None if it is not run.

        Parameters
        ----------
        paper : Paper
            Whose artefact it is.
        artefact : str
            Its key.
        dataset : str
            As the paper has it; what serves for it here is taken.
        **changes
            To the artefact's setting.
        """
        served = self.data(dataset)
        if served is None or paper.missing(self, artefact):
            return None
        fields = paper.setting(artefact, self.profile, served, changes.get("clients", 0))
        tags = {"paper": paper.key, "artefact": artefact, "profile": self.said}
        return overridden(Experiment(**fields).but(**changes, tags=tags), self.overrides, True)

    def at(self, paper: Paper, artefact: str, column: Column) -> Experiment | None:
        """The Experiment that the runs of an artefact's column vary; None if it is not run."""
        changes = column.changes
        if not callable(changes):
            return self.base(paper, artefact, column.dataset, **changes)
        base = self.base(paper, artefact, column.dataset)
        return overridden(base.but(**changes(base)), self.overrides, True) if base else None

    def sweep(
        self,
        paper: Paper,
        base: Experiment | None,
        rows: dict[str, dict[str, Any]],
        columns: dict[str, dict[str, Any]],
        *,
        quick: int = 0,
        seeds: tuple[int, ...] = (),
        part: str = "",
        vary: str = "",
    ) -> list[Sweep]:
        """One Sweep of changes to `base`, of the methods and seeds asked for; none if base is None.

        Parameters
        ----------
        paper : Paper
            Whose artefact it is.
        base : Experiment or None
            What all runs have in common.
        rows, columns : {label: changes}
            To `base`.
        quick : int
            Seeds at profile quick, in place of the artefact's own number.
        seeds : tuple of int
            These seeds, whatever was asked for.
        part, vary : str
            Of the Sweep.
        """
        if base is None:
            return []
        if self.methods:
            named = {label: {label, c.get("method", base.method)} for label, c in rows.items()}
            rows = {label: c for label, c in rows.items() if named[label] & set(self.methods)}
        if not rows:
            return []
        artefact = base.tags["artefact"]
        seeds = seeds or self.seeds_of(paper, artefact, quick)
        return [Sweep(artefact, base, rows, columns, seeds, part, vary)]

    def seeds_of(self, paper: Paper, artefact: str, quick: int = 0) -> tuple[int, ...]:
        """The seeds asked for, else as many as the artefact, the paper or the profile says."""
        if self.seeds:
            return self.seeds
        usual = {"smoke": 1, "quick": 1 if self.label == "digits" else 2, "medium": 2, "paper": 3}
        own = getattr(paper.artefacts.get(artefact), self.profile, 0)
        if self.profile == "quick":
            own = quick or own
        return tuple(range(own or paper.seeds.get(self.profile, usual[self.profile])))


def field_of(experiment: Experiment, field: str) -> Any:
    """The value of an Experiment's field, "lr", or of an argument in it, "method_args.lr".

    What is not said is the method's default.
    """
    name, _, key = field.partition(".")
    held = getattr(experiment, name)
    if not key or key in held:
        return held[key] if key else held
    return {f.name: f.default for f in fields(METHODS[experiment.method])}[key]


def reported(paper: str | Paper) -> pd.DataFrame:
    """Every number that a paper prints: table, row, column, metric, value, sd, note.

    Raises
    ------
    ValueError
        For a paper without tables.
    """
    name = paper if isinstance(paper, str) else paper.key
    file = resources.files("pfl_papers.papers") / "published" / f"{name}.csv"
    if not file.is_file():
        raise ValueError(
            f"no published numbers for {name!r}; there are those of pfedhn, pfedla, flayer, fedaghn"
        )
    with file.open(encoding="utf-8") as f:
        found = pd.read_csv(f, keep_default_na=False, na_values={"std": [""]})
    return found.rename(columns={"std": "sd"})


def printed_rows(paper: Paper, artefact: str) -> list[str]:
    """The rows of accuracies that a paper prints in a table; of a figure those of all its tables.

    FedPer has none.
    """
    if not paper.tables:
        return []
    found = reported(paper)
    found = found[found.metric == "acc_pct"]
    own = found[found.table == artefact]
    return list(dict.fromkeys((own if len(own) else found).row))


class Reading(NamedTuple):
    """Another reading of what a paper leaves open, for which rows of ours were run.

    Attributes
    ----------
    says : str
        The reading.
    runs : {str: str}
        {row of ours: the row in whose place it stands}.
    source : str
        Where the reading is from.
    seen : bool
        Whether it was declared after a verdict was known. Such a reading only weakens verdicts.
    """

    says: str
    runs: dict[str, str]
    source: str
    seen: bool


@functools.cache
def _readings() -> pd.DataFrame:
    file = resources.files("pfl_papers.papers") / "published" / "readings.csv"
    with file.open(encoding="utf-8") as f:
        return pd.read_csv(f, keep_default_na=False)


def readings(paper: str | Paper) -> list[Reading]:
    """The readings of a paper under which its verdicts have to be the same."""
    found = _readings()
    found = found[found.paper == (paper if isinstance(paper, str) else paper.key)]
    return [
        Reading(str(says), dict(zip(of.run, of.row, strict=True)), of.source.iloc[0], seen == "yes")
        for (says, seen), of in found.groupby(["says", "seen"], sort=False)
    ]


def paper(name: str | Paper) -> Paper:
    """One paper by its name (a Paper is itself); ValueError for an unknown name."""
    if isinstance(name, Paper):
        return name
    checks.known("paper", name, PAPERS)
    return importlib.import_module(f"pfl_papers.papers.{name}").PAPER


def title(artefact: str) -> str:
    """An artefact's key as a reader says it.

    "fig2" is Figure 2, "apptable1" Appendix Table 1, "appc5" Appendix C.5, "table5a" Table 5a.
    Figures that are no paper's have names of their own.
    """
    parts = re.fullmatch(r"(app)?(fig|table|c)(\d+\w?)", artefact)
    if not parts:
        return OURS.get(artefact, artefact.capitalize())
    kind = {"fig": "Figure ", "table": "Table ", "c": "C."}[parts[2]]
    return ("Appendix " if parts[1] else "") + kind + parts[3]


OURS = {"course": "Mean weight over rounds"}
