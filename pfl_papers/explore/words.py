"""Names of data sets, partitions and networks as people say them."""

from __future__ import annotations

from collections.abc import Iterable

from pfl_core.analysis import plots
from pfl_core.data import pools
from pfl_papers.evidence import committed

_SCHEMES = {
    "alphabets": "one alphabet each",
    "coarse": "one coarse class each",
    "dirichlet": "Dirichlet, class by class",
    "dirichlet_columns": "Dirichlet, client by client",
    "fedper_classes": "k classes each (FedPer)",
    "groups": "groups with dominant classes (FedAGHN)",
    "iid": "IID",
    "pfedhn_classes": "k classes each (pFedHN)",
    "pfedla_noniid1": "non-IID 1 (pFedLA)",
    "pfedla_noniid2": "non-IID 2 (pFedLA)",
    "pfedla_ring": "clients on a ring (pFedLA)",
    "pfedla_target": "alike, less alike, others (pFedLA)",
    "shards": "k shards each (pathological)",
    "workers": "one rater each (FedPer)",
}
_NETWORKS = {
    "lenet": "LeNet",
    "lenet4": "LeNet, four convolutions",
    "mlp": "MLP",
    "cnn": "CNN",
    "cnn_bn": "CNN with BatchNorm",
    "resnet18": "ResNet-18",
    "resnet34": "ResNet-34",
    "mobilenet": "MobileNet",
    "fasttext": "fastText",
    "linear": "linear base",
}


def scheme(name: str) -> str:
    """A partition in words; one that a user registered keeps its name."""
    return _SCHEMES.get(name, name)


def network(name: str) -> str:
    """A network in words; one that a user registered keeps its name."""
    return _NETWORKS.get(name, name)


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
