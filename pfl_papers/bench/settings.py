"""The benchmark's seven settings, which differ in why personalization could help.

Each is an Experiment, and its form over embedded digits for a quick try. The Experiment's seed
draws the clients anew, too. What a random search draws of a method there is said by `ranges`.

Samples are drawn without replacement over clients, and a client's train, val and test samples have
one distribution. All settings have 300 test samples a client: the largest, `classes`, takes 160 of
the 317 images of EMNIST's rarest class (in our copy), all others a smaller part of their pools.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.tune import declared
from pfl_core.util import checks
from pfl_core.util.fields import Search, among, log_uniform
from pfl_papers.papers import presets

EPOCHS = 10  # of fine-tuning, each of which is evaluated
# What every setting has. Every client takes part in every round; BatchNorm is in `photos` alone.
COMMON: dict[str, Any] = dict(
    clients=20,
    model="mlp",
    rounds=40,
    batch=10,
    epochs=1,
    participation=1.0,
    lr=0.07,  # the middle of RATES, on a log scale, as all rates here
    finetune={"epochs": EPOCHS, "lr": 0.03},
    eval_every=10,
)
DIGITS: dict[str, Any] = dict(clients=8, rounds=8, eval_every=4)
RATES = log_uniform(0.01, 0.5)
TUNING_RATES = log_uniform(0.005, 0.2)  # of fine-tuning
TURNS = ["none", "turn90", "turn180", "turn270"]
SHIFTS = [0, 3, 5, 8]
PHOTOS: dict[str, Any] = dict(model="lenet", model_args={"kernels": 8, "bn": True}, rounds=30)
THREE = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]  # of digits
TEN = [list(range(first, first + 10)) for first in (0, 10, 36)]  # 0-9, A-J, a-j of EMNIST's labels


@dataclass(frozen=True)
class Setting:
    """One setting of the benchmark.

    Attributes
    ----------
    key : str
    why : str
        Why personalization could help.
    fields : dict
        Of its Experiment, beside `COMMON`.
    small : dict
        What its form over digits has in their place, beside `DIGITS`.
    groups : int
        Client i is of group i modulo this number; 1: there are none.
    rates : Search
        Learning rates of local training that a random search draws.
    searched : dict
        What else it draws for every method: {field: Search}.
    depths : tuple of int
        Depths of the head that are tried for methods that tune it.
    """

    key: str
    why: str
    fields: dict[str, Any]
    small: dict[str, Any]
    groups: int = 1
    rates: Search = RATES
    searched: dict[str, Search] = field(default_factory=dict)
    depths: tuple[int, ...] = ()

    def executor(self, device: str) -> str:
        """How clients are trained there: stacked where networks are small, on a CPU as well.

        A run then takes one core, and 0.7 of the seconds that threads take of all of them.
        """
        small = device == "cpu" and self.base(0).model == "mlp"
        return "batched" if small else "auto"

    @property
    def rounds(self) -> int:
        """Number of rounds of its Experiment."""
        return self.base(0).rounds

    def base(self, seed: int, digits: bool = False) -> Experiment:
        """FedAvg in this setting, or in its form over digits; `seed` draws the clients, too."""
        values = COMMON | self.fields | (DIGITS | self.small if digits else {})
        return Experiment(**values, seed=seed)

    def group(self, number: int, experiment: Experiment) -> Experiment:
        """The same run on the clients of one group alone: with the same samples.

        Raises
        ------
        ValueError
            For a group that the setting does not have.
        """
        clients = range(experiment.clients)[number :: self.groups]
        if not 0 <= number < self.groups or self.groups == 1:
            raise ValueError(f"setting {self.key!r} has {self.groups} groups, not one {number!r}")
        kept = {"of": experiment.clients, "first": number, "every": self.groups}
        return experiment.but(clients=len(clients), partition_args=kept)


def ranges(setting: Setting | str, row: str) -> dict[str, Any]:
    """What a random search draws of a row: `tune(draws=16, choices=ranges("mild", "ditto"))`.

    Rates are equal numbers for all rows; of one that trains with momentum m 1 - m times them, since
    momentum makes steps 1 / (1 - m) times as long. Of a method's own parameters it draws those
    whose fields declare a range.

    Parameters
    ----------
    setting : Setting or str
        A setting, or its key.
    row : str
        Of `presets.COMPARED`, or a method.

    Returns
    -------
    dict
        {field of an Experiment: what it is drawn from}.

    Raises
    ------
    ValueError
        For an unknown setting or method.
    """
    if not isinstance(setting, Setting):
        checks.known("setting", setting, SETTINGS)
        setting = SETTINGS[setting]
    base = setting.base(0)
    fields = presets.COMPARED[row](base) if row in presets.COMPARED else {"method": row}
    share, own = 1 - float(fields.get("momentum", 0.0)), declared(base.but(**fields))
    rates = {"lr": _scaled(setting.rates, share)} if "lr" in own else {}
    out = own | rates | setting.searched
    if setting.depths and row in presets.GRIDS and presets.GRIDS[row].own == "head_depth":
        out["head_depth"] = among(*setting.depths)
    return out | {"finetune": _finetuned(fields, _scaled(TUNING_RATES, share))}


def _scaled(rates: Search, share: float) -> Search:
    low, high = (float(f"{share * end:.3g}") for end in (rates.low, rates.high))
    return dataclasses.replace(rates, low=low, high=high)


def _finetuned(fields: dict[str, Any], rates: Search) -> Any:
    # Of a row that has stages of its own: these, at several rates.
    if not (stages := fields.get("finetune")) or len(stages) == 1:
        return {"epochs": EPOCHS, "lr": rates}
    tried = np.geomspace(rates.low, rates.high, 7)
    return among(*[[s | {"lr": float(f"{rate:.2g}")} for s in stages] for rate in tried])


def _of(dataset: str, partition: str, each: str, **args: Any) -> dict[str, Any]:
    return dict(dataset=dataset, partition=partition, partition_args=args | {"each": each})


# `domains` with one group deals all clients samples of one distribution, all classes.
_DIRICHLET: dict[str, Any] = {"partition": "dirichlet_clients", "alpha": 1.0, "most": 0.7}
_ALIKE: dict[str, Any] = {"partition": "domains", "groups": 1}
_EQUAL = "class_equal"
_LARGE, _FEW, _SMALL = "60/40/300", "40/40/300", "40/20/60"
SETTINGS: dict[str, Setting] = {
    s.key: s
    for s in (
        Setting(
            "mild",
            "little data a client; the other clients' data help",
            _of("fashion_mnist", each=_FEW, **_DIRICHLET),
            _of("digits", each=_SMALL, **_DIRICHLET),
        ),
        Setting(
            "classes",
            "each client has ten classes of its own, and features are common",
            _of("emnist", _EQUAL, _LARGE, k=10),
            _of("digits", _EQUAL, _SMALL, k=4),
        ),
        Setting(
            "rotate",
            "feature shift: four groups of clients turn their images differently",
            _of("mnist", each=_LARGE, transform=TURNS, **_ALIKE),
            _of("digits", each=_SMALL, transform=TURNS, **_ALIKE),
            groups=len(TURNS),
        ),
        Setting(
            "permute",
            "concept shift: four groups of clients call one digit differently; no one model fits",
            _of("mnist", each=_LARGE, relabel=SHIFTS, **_ALIKE),
            _of("digits", each=_SMALL, relabel=SHIFTS, **_ALIKE),
            groups=len(SHIFTS),
        ),
        Setting(
            "case",
            "natural groups: digits, capitals and small letters are one task of ten labels",
            _of("emnist", "domains", _FEW, groups=TEN) | {"clients": 21},
            _of("digits", "domains", _SMALL, groups=THREE) | {"clients": 9},
            groups=len(TEN),
        ),
        Setting(
            "text",
            "topic skew",
            _of("ag_news", each=_FEW, words=1000, **_DIRICHLET) | {"lr": 0.2},
            _of("digits_texts", each=_SMALL, words=40, **_DIRICHLET),
            rates=log_uniform(0.05, 1),
        ),
        Setting(
            "photos",
            "convolutions and BatchNorm",
            _of("cifar10", _EQUAL, "60/30/300", k=3) | PHOTOS,
            _of("digits", _EQUAL, "39/21/60", k=3)
            | {"rounds": 4, "model_args": {"kernels": 4, "bn": True}},
            searched={"buffers": among("local", "average")},
            depths=(1, 2, 3),
        ),
    )
}
