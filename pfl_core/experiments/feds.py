"""Data of a user's own for many runs: one Federation for all of them, or one for each seed."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from pfl_core.data.federation import Federation
from pfl_core.util import checks, identity


class OfSeeds(dict[int, Federation]):
    """{seed: the Federation of its runs}; empty where they have data sets with names."""


Given = Federation | Callable[[int], Federation] | OfSeeds | None  # what `sweep` takes


def of_seeds(fed: Given, seeds: Iterable[int]) -> OfSeeds:
    """What `fed` gives for each seed; a function is called once a seed.

    What one function gives are draws of one setting, whose rows are averaged over seeds.

    Raises
    ------
    TypeError
        For a function that takes no seed, or returns something else than a Federation.
    """
    if isinstance(fed, OfSeeds):
        return fed
    if fed is None:
        return OfSeeds()
    if not callable(fed):  # whether it is a Federation is looked at with each Experiment
        return OfSeeds(dict.fromkeys(seeds, fed))
    checks.takes("fed", fed, "seed")
    made = OfSeeds()
    for seed in dict.fromkeys(seeds):
        made[seed] = fed(seed)
        if not isinstance(made[seed], Federation):
            got = type(made[seed]).__name__
            raise TypeError(f"fed({seed}) returned a {got}; allowed is a Federation")
    dealings = {one.dealing for one in made.values()}
    if len(dealings) > 1 or "" in dealings:
        rule = _rule(fed)
        made = OfSeeds({seed: one.ruled(rule) for seed, one in made.items()})
    return made


def _rule(fed: Callable[[int], Federation]) -> str:
    # Of a function, its code and what it reads; "" where it draws from what changes.
    with contextlib.suppress(ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return identity.digest(fed)
    return ""


@contextlib.contextmanager
def in_folders(feds: OfSeeds, store: Path) -> Iterator[OfSeeds]:
    """The same for other processes, which open the folders that they lie in.

    What lies in none is written to the store, for as long as this lasts.
    """
    with ExitStack() as stack:
        once = {id(one): one for one in feds.values()}
        moved = {i: stack.enter_context(_in_a_folder(one, store)) for i, one in once.items()}
        yield OfSeeds({seed: moved[id(one)] for seed, one in feds.items()})


@contextlib.contextmanager
def _in_a_folder(fed: Federation, store: Path) -> Iterator[Federation]:
    if fed.folder:
        yield fed
        return
    checks.make_folder(store)
    with tempfile.TemporaryDirectory(prefix="own-data.", dir=store) as folder:
        yield fed.moved(Path(folder).absolute() / "data")
