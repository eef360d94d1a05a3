"""What an Experiment starts from (`init_from`), and whose data that was trained on (`source`)."""

from __future__ import annotations

from typing import Any

from pfl_core.data import pools
from pfl_core.data.federation import Federation
from pfl_core.experiments.build import fitted
from pfl_core.experiments.experiment import Experiment, chain
from pfl_core.experiments.store import Result


def over_own(experiment: Experiment) -> list[Experiment]:
    """Those over own data among all that an Experiment starts from."""
    return [e for e in chain(experiment)[1:] if e.dataset == "own"]


def settled(
    experiment: Experiment, fed: Federation | None, source: Result | Federation | None
) -> Experiment:
    """The Experiment as `run` takes it: with as many clients as `fed` has, its start as `source`'s.

    Parameters
    ----------
    experiment : Experiment
    fed : Federation, optional
        The data of an Experiment over own data.
    source : Result or Federation, optional
        The finished run of `init_from`, or the data that it is trained on where they are own data.

    Raises
    ------
    ValueError, TypeError
        Where they contradict each other, or one of them is missing.
    """
    experiment = fitted(experiment, fed)
    if source is not None and not isinstance(source, Result | Federation):
        got = type(source).__name__
        raise TypeError(f"source is a {got}; allowed is a Result of init_from, or a Federation")
    if experiment.earlier is None and source is not None:
        raise ValueError(
            "source is given, and this Experiment starts from nothing; name what it starts from: "
            "Experiment(init_from=...)"
        )
    if isinstance(source, Result):
        return experiment.but(init_from=_as_ran(experiment.earlier, source))
    _check_trained_on(over_own(experiment), source)
    return experiment if source is None else experiment.but(init_from=_fit(experiment, source))


def _check_trained_on(own: list[Experiment], source: Federation | None) -> None:
    # own: the starts over own data, of which a Federation can be that of a single one.
    if source is None and own:
        raise ValueError(
            "init_from leads to an Experiment over own data, and nothing says which data; give its "
            "finished run (source=result, of keep_models=True), or what it is trained on "
            "(source=federation, which may be the same as fed)"
        )
    if source is not None and len(own) != 1:
        several = "leads to several Experiments over own data; run init_from itself, with its own "
        several += "source, and give its Result: source=result"
        none = "has a data set with a name; leave source out, or give the Result of init_from"
        raise ValueError(f"source is a Federation, and init_from {several if own else none}")


def _fit(experiment: Experiment, source: Federation) -> Experiment:
    # What it starts from, with the Federation's number of clients where it is trained on that.
    start = experiment.earlier
    assert start is not None  # one of the chain is over own data
    if start.dataset == "own":
        return fitted(start, source)
    return start.but(init_from=_fit(start, source))


def _as_ran(given: Any, source: Result) -> Experiment:
    ran = source.experiment
    if not source.ok:
        raise ValueError(f"source, run {source.id}, {source.meta['status']}: it has no models")
    if not ran.keep_models:
        raise ValueError(
            f"source, run {source.id}, kept no models; run it with Experiment(keep_models=True)"
        )
    wanted, has = _like(given, ran).plain(), ran.plain()
    if differ := [name for name in has if wanted[name] != has[name]]:
        raise ValueError(
            f"source is run {source.id}, whose Experiment is not init_from: they differ in "
            f"{', '.join(differ)}; write init_from=result.experiment"
        )
    return ran.but(keep_models=given.keep_models)


def _like(given: Experiment, ran: Experiment) -> Experiment:
    # `given` with what only its data say; whether it keeps models makes it no other one.
    start = given.init_from
    if given.earlier and ran.earlier:
        start = _like(given.earlier, ran.earlier)
    clients = ran.clients if given.clients is None else given.clients
    return given.but(init_from=start, clients=clients, keep_models=ran.keep_models)


def id_of_start(experiment: Experiment, source: Result | Federation | None) -> str | None:
    """What stands for `init_from` in the id of an Experiment that is `settled`.

    None if the Experiment itself can say it: then no own data are behind it.
    """
    start = experiment.earlier
    if start is None or source is None:
        return None
    bare = start.but(keep_models=False)
    if isinstance(source, Result):
        pool, named = source.meta["pool"], not over_own(experiment)
        if named and pool == pools.checksum(start.dataset):
            return None
        return bare.id_for(pool, source.meta.get("init_from"))
    if start.dataset == "own":
        return bare.id_for(source.checksum)
    return bare.id_for(pools.checksum(start.dataset), id_of_start(start, source))
