"""Names of data sets, partitions and networks as people say them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pfl_core.analysis import plots
from pfl_core.data import pools
from pfl_core.experiments.experiment import Experiment
from pfl_papers.evidence import committed


def scheme(name: str) -> str:
    """A partition in words; one that a user registered keeps its name."""
    return plots.PARTITION_LABELS.get(name, name)


def network(name: str) -> str:
    """A network in words; one that a user registered keeps its name."""
    return plots.MODEL_LABELS.get(name, name)


def field(name: str, value: Any) -> str:
    """A field of an Experiment, or an argument ("method_args.lam"), with its value: "λ 0.5"."""
    shown = plots.in_words(value) if isinstance(value, str) else value
    return f"{plots.display(name.rpartition('.')[2], plots.FIELD_LABELS)} {shown}"


def setting(found: Experiment, fields: Iterable[str]) -> str:
    """The setting of an Experiment: data, partition, clients, network, and what is unusual.

    Parameters
    ----------
    found : Experiment
    fields : iterable of str
        Those that belong to a setting. The four named above are always said.
    """
    plain, defaults = found.plain(), Experiment().plain()
    always = ("dataset", "partition", "clients", "model")
    said = [
        plots.in_words(found.dataset),
        scheme(found.partition) + _arguments(found.partition_args),
        f"{found.clients} clients",
        network(found.model) + _arguments(found.model_args),
    ]
    others = [n for n in fields if n not in always and plain[n] != defaults[n]]
    return "; ".join([*said, *(field(name, plain[name]) for name in others)])


def _arguments(values: Mapping[str, Any]) -> str:
    return f" ({', '.join(field(*item) for item in values.items())})" if values else ""


def data(name: str) -> str:
    """A data set in words, marked if its files are not on this computer."""
    return plots.in_words(name) + ("" if pools.is_here(name) else " (not on this computer)")


def labels(name: str) -> str:
    """As `data`, where labels do: results/ counts those of the data that committed runs used."""
    known = committed.results().pools
    counted = set(known.name[known.labels != ""])
    return plots.in_words(name) if name in counted else data(name)


def here_first(names: Iterable[str]) -> list[str]:
    """Names of data sets, those first whose files are on this computer."""
    return sorted(names, key=lambda name: not pools.is_here(name))
