"""The benchmark's rows: methods, their runs in a setting, and when they are read."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pfl_core.analysis import plots
from pfl_core.data.client_data import ClientData
from pfl_core.engine.finetune import TUNED, moments
from pfl_core.engine.participation import participants
from pfl_core.experiments.build import build_method
from pfl_core.experiments.experiment import ARGS, Experiment, import_plugin, seeded
from pfl_core.experiments.tune import drawn
from pfl_core.methods.base import METHODS
from pfl_core.util import checks
from pfl_papers.bench import comparison
from pfl_papers.bench.record import method_of
from pfl_papers.bench.settings import Setting, ranges
from pfl_papers.compare import costs, plan
from pfl_papers.papers import presets

REFERENCE, LOCAL, FT1 = "fedavg", "local", "fedavg_ft"
VIEWS = {FT1: REFERENCE}  # rows that are another one's runs, read at another time
EPOCHS = (1, 3, 10)  # of fine-tuning after which models are read
EQUAL = "equal gradients"  # a second line of costly rows
ORACLE = "oracle clusters"  # a line of the reference: FedAvg within the true groups
MOST = 2.0  # times FedAvg's gradients, above which a row has one


@dataclass(frozen=True)
class Row:
    """A row: a method, or LP-FT and FT1, which are FedAvg read in other ways.

    Attributes
    ----------
    name : str
        As tables know it.
    plugin : str
        The module of a method of one's own.
    """

    name: str
    plugin: str = ""

    @property
    def own(self) -> str:
        """When its paper reads its models: "before", "after", "tuned 5"."""
        return "before" if self.plugin else comparison.when(self.name)

    def cell(self, base: Experiment) -> Experiment:
        """Its run in a setting with what its paper takes: draw 0 of its search."""
        name = VIEWS.get(self.name, self.name)
        fields = {"method": name, "plugins": (self.plugin,)}
        e = base.but(**(fields if self.plugin else presets.COMPARED[name](base)))
        if len(e.finetune) < 2 and e.finetune != base.finetune:  # FedBABU's five epochs are read
            e = e.but(finetune=base.finetune)
        return e if not self.plugin or costs.serves_network(e) else e.but(finetune=None)

    def tried(self, base: Experiment) -> Experiment:
        """The same for tuning, which reads the last round alone: no other one is evaluated."""
        cell = self.cell(base)
        return cell.but(eval_every=cell.rounds)

    def whens(self, experiment: Experiment) -> tuple[str, ...]:
        """Moments among which tuning chooses: its own one, and after epochs of fine-tuning."""
        if self.name in VIEWS or not experiment.finetune:
            return (self.own,)
        there = moments(experiment.finetune)
        return (self.own, *(m for m in there if m != self.own and is_read(self.name, self.own, m)))

    def draws(self, setting: Setting, base: Experiment, draws: int) -> list[dict[str, Any]]:
        """The changes to `cell` that its search tries; the first is none."""
        cell, name = self.cell(base), VIEWS.get(self.name, self.name)
        drawn_from = ranges(setting, name)
        if not cell.finetune:
            drawn_from.pop("finetune", None)
        changes = drawn(cell, draws, drawn_from)
        return [c | self._start(base, c) for c in changes]

    def _start(self, base: Experiment, change: dict[str, Any]) -> dict[str, Any]:
        # What a run starts from is trained as the run is.
        own = (*ARGS, "finetune", "head_depth", "epochs")
        shared = {n: v for n, v in change.items() if n not in own}
        start = self.cell(base.but(**shared)).earlier if shared else None
        return {"init_from": start} if start else {}


def refused(experiment: Experiment, data: ClientData) -> str:
    """Why a method refuses a draw, such as for a rate that it cannot have; "" if it does not."""
    try:
        build_method(experiment, data)
    except ValueError as error:
        return str(error)
    return ""


def chosen(methods: Iterable[str] = (), plugins: Iterable[str] = ()) -> list[Row]:
    """The rows, all or those named, with the reference, and those of one's own modules.

    Raises
    ------
    ValueError
        For an unknown row, for a module that is not there or has no method, and for a method of the
        name of one of the benchmark's rows.
    """
    every = [Row(name) for name in presets.COMPARED]
    every.insert(1 + [r.name for r in every].index(REFERENCE), Row(FT1))
    own = [row for plugin in plugins for row in _own(plugin)]
    taken = {row.name for row in every}
    for row in own:
        if row.name in taken or method_of(row.name) != row.name:
            raise ValueError(
                f"bench(plugins={row.plugin!r}): a method named {row.name!r} would stand in a row "
                "of the benchmark's own, or in one of its lines; choose another `name`"
            )
    known = {row.name: row for row in [*every, *own]}
    wanted = list(methods) or list(known)
    for name in wanted:
        checks.known("row of the benchmark", name, known)
    wanted += [REFERENCE, *(row.name for row in own)]
    return [row for name, row in known.items() if name in wanted]


def _own(plugin: str) -> list[Row]:
    import_plugin(plugin)
    inside = re.compile(rf"{re.escape(plugin)}(\.|$)")
    found = [name for name, method in METHODS.items() if inside.match(method.__module__)]
    if not found:
        raise ValueError(
            f"bench(plugins={plugin!r}): this module has no method; give one that has a class of "
            "Method with a name"
        )
    return [Row(name, plugin) for name in found]


def said(row: str) -> str:
    """The name of a row, or of its line, in tables."""
    name, _, line = row.partition(", ")
    return {FT1: "FT1"}.get(name, plots.label(name)) + (f", {line}" if line else "")


def tuned_epochs(row: str, when: str) -> int:
    """Epochs of fine-tuning up to a moment, without those of the head alone (LP-FT); else 0."""
    kind, _, epochs = when.partition(" ")
    head = sum(stage["epochs"] for stage in presets.FINETUNED.get(row, [{}])[:-1])
    return int(epochs) - head if kind == "tuned" else 0


def is_read(row: str, own: str, when: str) -> bool:
    """Whether tuning may choose a moment for a row whose paper reads it at `own`."""
    if when == own or row in VIEWS:
        return when == own
    return when.startswith(TUNED) and tuned_epochs(row, when) in (0, *EPOCHS)


# -- what it costs ---------------------------------------------------------------------------------


def batches(experiment: Experiment) -> float:
    """Gradients over one batch that a client takes in a whole run, without fine-tuning.

    Mean over clients, with what the run starts from.
    """
    source = experiment.earlier
    e = experiment.but(init_from=None) if source else experiment
    visits = participants(e.participation, e.clients) * e.rounds / e.clients
    own = costs.gradients(e) * visits
    return own + (batches(source) if source else 0)


def extra(experiment: Experiment, when: str) -> float:
    """Gradients over one batch that fine-tuning takes of a client up to a moment."""
    kind, _, epochs = when.partition(" ")
    return int(epochs) * costs.epoch(experiment) if kind == "tuned" else 0.0


def at_equal_gradients(experiment: Experiment, allowed: float) -> Experiment | None:
    """The run in so few rounds that a client takes as many gradients as `allowed`.

    None for one that takes at most twice as many.
    """
    taken = batches(experiment)
    if taken <= MOST * allowed or experiment.earlier:
        return None
    rounds = max(1, round(experiment.rounds * allowed / taken))
    return experiment.but(rounds=rounds, eval_every=min(experiment.eval_every, rounds))


def with_starts(experiments: Iterable[Experiment]) -> list[Experiment]:
    """Runs with those that they start from before them, each once."""
    return list({link.id: link for e in experiments for link in plan.with_sources(e)}.values())


def over(seeds: Iterable[int], experiments: Iterable[Experiment]) -> list[Experiment]:
    """These runs on each of some seeds, seed by seed."""
    return [seeded(e, s) for s, e in itertools.product(seeds, list(experiments))]
