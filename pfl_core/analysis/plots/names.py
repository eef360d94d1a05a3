"""Display names: what figures, tables, lists and sliders call what the code calls by a key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

LABELS = {  # display names of methods, in the order of tables
    "local": "Local",
    "fedavg": "FedAvg",
    "fedavg_ft": "FedAvg-FT",
    "lpft": "LP-FT",
    "fedprox": "FedProx",
    "fedprox_ft": "FedProx-FT",
    "perfedavg": "Per-FedAvg",
    "pfedme": "pFedMe",
    "lgfedavg": "LG-FedAvg",
    "fedbn": "FedBN",
    "fedper": "FedPer",
    "fedrep": "FedRep",
    "fedbabu": "FedBABU",
    "fedas": "FedAS",
    "fedfomo": "FedFomo",
    "ditto": "Ditto",
    "apfl": "APFL",
    "fedrod": "FedRoD",
    "fedproto": "FedProto",
    "fedcp": "FedCP",
    "fedpac": "FedPAC",
    "cfl": "CFL",
    "fedamp": "FedAMP",
    "heurfedamp": "HeurFedAMP",
    "fedala": "FedALA",
    "apple": "APPLE",
    "gpfl": "GPFL",
    "feddbe": "FedDBE",
    "fedfew": "FedFew",
    "pfedfda": "pFedFDA",
    "pfedhn": "pFedHN",
    "pfedhn_pc": "pFedHN-PC",
    "pfedla": "pFedLA",
    "heurpfedla": "HeurpFedLA",
    "flayer": "FLAYER",
    "fedaghn": "FedAGHN",
}
DATA_LABELS = {  # display names of data sets
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "emnist": "EMNIST",
    "emnist-bymerge": "EMNIST by merge",
    "emnist-digits": "EMNIST digits",
    "emnist-balanced": "EMNIST balanced",
    "emnist-letters": "EMNIST letters",
    "emnist-letters10": "EMNIST letters, ten classes",
    "emnist-mnist": "EMNIST as MNIST",
    "omniglot": "Omniglot",
    "tiny_imagenet": "Tiny ImageNet",
    "ag_news": "AG News",
    "flickr_aes": "FLICKR-AES",
    "raters_cifar10": "CIFAR-10 with synthetic raters",
    "raters_digits100": "pairs of digits with synthetic raters",
    "digits100": "pairs of digits",
    "digits_texts": "digits as texts",
}
PARTITION_LABELS = {  # display names of partitions
    "alphabets": "one alphabet each",
    "class_equal": "k equal classes each",
    "coarse": "one coarse class each",
    "dirichlet": "Dirichlet, class by class",
    "dirichlet_clients": "Dirichlet, given numbers of samples",
    "dirichlet_columns": "Dirichlet, client by client",
    "domains": "one domain each",
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
MODEL_LABELS = {  # display names of networks
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
MEASURE_LABELS = {  # what is measured: metrics of runs, statistics over clients, costs
    "acc_pct": "Test accuracy (%)",
    "train_acc_pct": "Training accuracy (%)",
    "acc_worst10": "Accuracy of the worst tenth (%)",
    "acc_balanced": "Accuracy, all classes alike (%)",
    "auc": "Test AUC",
    "f1": "Test macro F1",
    "balanced_acc": "Test balanced accuracy",
    "acc_min": "Worst client (%)",
    "acc_max": "Best client (%)",
    "acc_p10": "10th percentile of clients (%)",
    "acc_sd": "sd over clients (points)",
    "average": "mean over clients",
    "sd": "sd over clients",
    "worst10": "worst tenth of clients",
    "p10": "10th percentile",
    "p90": "90th percentile",
    "best10": "best tenth of clients",
    "rounds": "Communication round",
    "client_visits": "Client visits",
    "download_bytes": "Bytes from server to clients",
    "upload_bytes": "Bytes from clients to server",
    "train_s": "Seconds of training",
    "megabytes": "Megabytes sent and received",
    "mbytes": "Megabytes",
    "improvement_points": "Improvement (points)",
    "total_s": "Seconds in all",
    "s_per_iteration": "Seconds a round",
    "self": "itself",
    "similar": "similar clients",
    "other": "other clients",
}
FIELD_LABELS = {  # fields of an Experiment and arguments that are not their own words
    "lr": "learning rate",
    "batch": "batch size",
    "max_samples": "samples of a client at most",
    "eval_every": "rounds between evaluations",
    "init_from": "start",
    "head_depth": "layers of the head",
    "partition_seed": "seed of the partition",
    "relu_norm": "ReLU and norm",
    "alpha": "α",
    "beta": "β",
    "lam": "λ",
    "mu": "μ",
    "rho": "ρ",
}
_SYMBOLS = {r"\bK_P\b": "$K_P$", r"\balpha\b": "α"}


def key(name: str) -> str:
    """Return the key that a name begins with: "fedavg" of "fedavg, lr 0.1"."""
    return re.split(r"\W", str(name), maxsplit=1)[0]


def label(name: Any) -> str:
    """Return the display name of a method's key, also where words follow it ("fedavg, lr 0.1").

    Names of anything else are returned as they are.
    """
    method = key(name)
    return LABELS[method] + name[len(method) :] if method in LABELS else name


def in_words(text: Any) -> str:
    """Return a text as figures show it: methods and data sets by name, symbols as they are set.

    "fedavg, alpha = 0.1" becomes "FedAvg, α = 0.1", "cifar10" "CIFAR-10".
    """
    text = label(str(text))
    for name in sorted(DATA_LABELS, key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", DATA_LABELS[name], text)
    for name, symbol in _SYMBOLS.items():
        text = re.sub(name, symbol, text)
    return text


def in_plain_words(text: Any) -> str:
    """Return a text as lists, tables and sentences show it: `in_words` with fields in words, too.

    "fedavg, lr 0.1" becomes "FedAvg, learning rate 0.1".
    """
    return tailed(in_words(text).replace("$", ""))


def named(text: Any) -> Any:
    """Return what a reader sees in a table in place of any key that has a display name.

    "flayer (official)" becomes "FLAYER (official)", "client_visits" "Client visits". What is no
    text stays as it is.
    """
    if not isinstance(text, str):
        return text
    alone = MEASURE_LABELS | MODEL_LABELS | PARTITION_LABELS
    return alone.get(text) or in_plain_words(text)


def tailed(name: str) -> str:
    """Return a name with display names for the fields in it.

    "fedavg, lr 0.1" becomes "fedavg, learning rate 0.1", which still has its method's look.
    """
    for field, says in FIELD_LABELS.items():
        name = re.sub(rf"(?<![\w-]){field}\b", says, name)
    return name


def display(name: str, labels: Mapping[str, str]) -> str:
    """Return a key's display name; a key without one has spaces for its underscores."""
    return labels.get(name, name.replace("_", " "))
