"""Finished runs to read: one found by the beginning of its id, all as lines, some side by side."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd

from pfl_core.data import augment
from pfl_core.data.partition import list_partitions
from pfl_core.data.pools import list_datasets
from pfl_core.engine import finetune
from pfl_core.experiments import begun, keys, metrics, settings
from pfl_core.experiments.begun import Begun
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.store import Result, finished
from pfl_core.experiments.weights import Weights
from pfl_core.methods.base import list_methods
from pfl_core.models import list_models
from pfl_core.util import checks, paths
from pfl_core.util.fields import check_value

HEAD = ("method", "dataset", "seed", "lr")  # said of every run, whether they differ or not
RECORDED = ("status", "commit", "processor", "device", "version")  # of a run's meta


def by_id(start: str) -> Result:
    """The finished run whose id begins so; ValueError if there is none, or more than one."""
    if not re.fullmatch("[0-9a-f]{1,16}", start):
        raise ValueError(
            f"{start!r} is no id of a run: that is 16 digits, each of 0123456789abcdef, of which "
            "the first few do; of a run's folder give the last name"
        )
    found = list(finished(start))
    if len(found) == 1:
        return found[0]
    store, what = paths.store_folder(), f"{len(found)} finished runs begin with {start!r}"
    if found:
        raise ValueError(f"{what}: {', '.join(r.id for r in found)}; give more digits")
    for path in store.glob(f"{start}*.part"):
        far = f" ({run} is kept)" if (run := begun.read(path)) else ""
        raise ValueError(f"{what}; {path.stem} is not finished{far}: run it again, and it goes on")
    for path in paths.trash_folder().glob(f"*/{start}*"):
        raise ValueError(f"{what}; move {path} back to {store} to have it again")
    raise ValueError(f"{what} in {store}; `python -m pfl_core list runs` shows all")


def runs(status: str | None = "done", **fields: Any) -> list[Result]:
    """The finished runs of the store that are as asked for, oldest first.

    Parameters
    ----------
    status : str or None
        "done", or "failed" (diverged); None: both.
    **fields
        Values of fields of an Experiment; several, as a list or range, are alternatives. Of a dict
        its entries are looked at: `partition_args={"alpha": 0.1}`. Fields that are lists
        themselves, as `finetune`, are taken as a whole. What a run has by default it has, too.

    Raises
    ------
    ValueError
        For an unknown field or status, for a value that no Experiment can have, and for `tags`,
        which the store does not keep.

    Examples
    --------
    >>> from pfl_core import Experiment, run, runs
    >>> _ = run(Experiment(clients=3, model="mlp", rounds=1, partition="iid", lr=0.07))
    >>> [r.experiment.method for r in runs(lr=0.07, method=["fedavg", "fedper"])]
    ['fedavg']
    """
    checks.known("status", status, ("done", "failed", None))
    known = {f.name: f for f in dataclasses.fields(Experiment)}
    every = list(finished())
    if "tags" in fields:
        raise ValueError(
            "runs(tags=...): the store keeps no tags, they label the rows of a sweep; choose among "
            "these, or give other fields"
        )
    for name in fields:
        checks.known("field of an Experiment", name, known)
    wanted = {name: _wanted(known[name], given, every) for name, given in fields.items()}
    return [
        r
        for r in every
        if status in (None, r.meta["status"].partition(":")[0])
        and all(_is(r.experiment, name, values) for name, values in wanted.items())
    ]


def _source(given: Any) -> Any:
    # What tells one thing to start from from another.
    if isinstance(given, Experiment):
        return given.canonical()
    return (
        Weights.of(given).sha256 if isinstance(given, str | Path) else getattr(given, "sha256", 0)
    )


# What is compared of fields that may be written in several ways.
FORMS: dict[str, Callable[[Any], Any]] = {
    f.name: tuple for f in dataclasses.fields(Experiment) if str(f.type).startswith("tuple")
}
DEFAULTS = (*keys.ARGS, "partition_seed", "eval_after")  # fields whose default another one decides
FORMS |= {"init_from": _source, "finetune": finetune.plain, "augment": augment.plain}
NAMED: dict[str, Callable[[], Collection[str]]] = {
    "method": list_methods,
    "dataset": list_datasets,
    "model": list_models,
    "partition": list_partitions,
}


def _wanted(field: dataclasses.Field, given: Any, every: Sequence[Result]) -> list[Any]:
    # The values that a filter lets through; ValueError for one that no run can have.
    listed = isinstance(given, Iterable) and not isinstance(given, str | dict)
    several = list(given) if listed and field.name not in FORMS else [given]
    several = [checks.cast(one, field.type) for one in several]
    for one in several:
        check_value("runs", field, one)
        if field.name in NAMED:
            here = {getattr(r.experiment, field.name) for r in every}
            checks.known(field.name, one, sorted({*NAMED[field.name](), *here}))
    return [FORMS[field.name](one) for one in several] if field.name in FORMS else several


def _is(experiment: Experiment, name: str, wanted: list[Any]) -> bool:
    value = getattr(experiment, name)
    if isinstance(value, dict):
        found = any(all(value.get(k) == v for k, v in one.items()) for one in wanted)
    else:
        found = (FORMS[name](value) if name in FORMS else value) in wanted
    return found or any(_by_default(experiment, name, value, one) for one in wanted)


def _by_default(experiment: Experiment, name: str, value: Any, wanted: Any) -> bool:
    # Whether the value that is wanted, written out, makes it no other Experiment.
    if name not in DEFAULTS:
        return False
    plain = experiment.plain()
    spelled = plain | {name: value | wanted if isinstance(value, dict) else wanted}
    try:
        now, then = (keys.canonical(SimpleNamespace(**p)) for p in (plain, spelled))
    except (ValueError, LookupError, AttributeError):  # its code is not here
        return False
    return now[name] == then[name]


def date(result: Result) -> str:
    """When a run was finished, to the minute, in this computer's time."""
    try:
        at = datetime.fromisoformat(result.meta["date"])
    except (KeyError, TypeError, ValueError):
        assert result.folder is not None  # it lies in the store
        at = datetime.fromtimestamp((result.folder / "experiment.json").stat().st_mtime)
    return f"{at.astimezone():%Y-%m-%d %H:%M}"


def listed(found: Iterable[Result], unfinished: Iterable[Begun] = ()) -> dict[str, str]:
    """{id: a line} of runs: date, `HEAD`, what else is unusual about each, accuracy, status.

    Where no value of a field is that of most runs, each line says its own. Runs of one setting have
    a line of their mean over seeds, and those that are not finished one of their progress.
    """
    found, unfinished = list(found), list(unfinished)
    unusual = differing([r.experiment for r in [*found, *unfinished]], ties=True)
    out, alike = {}, {}
    for r, more in zip(found, unusual, strict=False):
        about = beside_fields(r.meta)
        own = r.experiment.dataset == "own"
        more |= {n: about[n] for n in ("code", "data") if n == "code" or own}
        status = "" if r.ok else f", {r.meta['status']}"
        acc = metrics.told({w: f"{v:.2f} %" for w, v in metrics.at_end(r.history).items()})
        out[r.id] = f"{date(r)}  {_told(r.experiment, more)}: {acc}{status}"
        alike.setdefault(r.setting, []).append((r, more))
    for setting, of in alike.items():
        if len({r.experiment.seed for r, _ in of}) > 1:
            out[f"setting {setting[:8]}"] = _over_seeds(*zip(*of, strict=True))
    for b, more in zip(unfinished, unusual[len(found) :], strict=True):
        what = _told(b.experiment, more)
        out[b.id] = f"{b.date:%Y-%m-%d %H:%M}  {what}: unfinished, {b} is kept"
    return out


def _told(e: Experiment, more: dict[str, Any], seeds: Collection[int] = ()) -> str:
    # `HEAD` and what else is said of an Experiment; of several seeds, all of them.
    several = f"seeds {', '.join(map(str, sorted(set(seeds))))}"
    said = [f"{e.method} on {e.dataset}", several if seeds else f"seed {e.seed}", f"lr {e.lr:g}"]
    silent = (*HEAD, *settings.SEEDS) if seeds else HEAD
    return ", ".join(
        said + [f"{n}={v}" for n, v in more.items() if n not in silent and v not in ("", None)]
    )


def _over_seeds(found: Sequence[Result], unusual: Sequence[dict[str, Any]]) -> str:
    # The line of runs that differ in their seeds alone.
    whole = pd.DataFrame([acc for r in found if r.ok and (acc := metrics.at_end(r.history))])
    seeds = [r.experiment.seed for r in found]
    lost = sum(not r.ok for r in found)
    told = f"{'':16}  {_told(found[0].experiment, unusual[0], seeds)}: "
    if len(whole) > 1:
        means = {str(w): f"{v.mean():.2f} % (sd {v.std():.2f})" for w, v in whole.items()}
        told += f"mean of {len(whole)}: {metrics.told(means)}"
    return told + ", " * (len(whole) > 1 and lost > 0) + f"{lost} diverged" * (lost > 0)


def beside_fields(meta: dict[str, Any]) -> dict[str, Any]:
    """What decides a run's numbers beside its Experiment: revision, and digests of data and code.

    "" where it is not known; the code is that which is not ours.
    """
    digests = {"data": meta.get("pool", ""), "code": meta.get("code", "")}
    cut = {name: str(digest or "")[:8] for name, digest in digests.items()}
    return {"revision": meta.get("revision", "")} | cut


def differing(cells: Sequence[Experiment], ties: bool = False) -> list[dict[str, Any]]:
    """Of each Experiment the fields in which it differs from what most of them have.

    Fields of dicts as partition_args.alpha; None: not given. With `ties`, where several values are
    as frequent as each other, all have it.
    """
    flat = [fields_of(e) for e in cells]
    usual = {}
    for name in dict.fromkeys(name for f in flat for name in f):
        values = Counter(repr(f.get(name)) for f in flat).most_common(2)
        tie = ties and len({count for _, count in values}) < len(values)
        usual[name] = None if tie else values[0][0]
    return [{n: f.get(n) for n, most in usual.items() if repr(f.get(n)) != most} for f in flat]


def fields_of(experiment: Experiment) -> dict[str, Any]:
    """{field: value} of an Experiment, those of dicts as partition_args.alpha."""
    out = {}
    for field in dataclasses.fields(Experiment):
        name, value = field.name, getattr(experiment, field.name)
        if name == "tags":  # decide nothing
            continue
        if isinstance(value, Experiment):
            value = f"{value.method} after {value.rounds} rounds"
        if isinstance(value, dict):
            out |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            out[name] = value
    return out


def _varied(flat: Sequence[dict[str, Any]]) -> list[str]:
    # The fields that are not the same in all.
    every = dict.fromkeys(name for f in flat for name in f)
    return [name for name in every if len({repr(f.get(name)) for f in flat}) > 1]


def names(found: Sequence[Result], but: Collection[str] = ()) -> list[str]:
    """A name of each run by what is not the same in all: "fedper, lr 0.1".

    Those that differ in their seed alone have the same name, and no others: where fields do not
    tell runs apart, the name has their data, code, revision or setting. Fields in `but` are said
    elsewhere.
    """
    out = [r.experiment.method for r in found]
    flat = [fields_of(r.experiment) for r in found]
    for name in _varied(flat):
        if name not in ("method", *settings.SEEDS, *settings.SILENT, *but):
            out = [_with(said, name, f.get(name)) for said, f in zip(out, flat, strict=True)]
    beside = [beside_fields(r.meta) | {"setting": r.setting[:8]} for r in found]
    for name in () if but else ("data", "code", "revision", "setting"):
        of_name: dict[str, set[Any]] = {}
        for said, b in zip(out, beside, strict=True):
            of_name.setdefault(said, set()).add(b[name])
        out = [
            _with(said, name, b[name]) if len(of_name[said]) > 1 else said
            for said, b in zip(out, beside, strict=True)
        ]
    return out


def _with(said: str, name: str, value: Any) -> str:
    return f"{said}, {name.rpartition('.')[2]} {value}" if value not in (None, "") else said


def side_by_side(found: Sequence[Result]) -> pd.DataFrame:
    """A column a run: `HEAD`, the fields that are not the same in all, when and on what each ran.

    Its accuracies, as `Result.summary` has them, stand after the fields.
    """
    flat = [fields_of(result.experiment) | beside_fields(result.meta) for result in found]
    varied, columns = _varied(flat), {}
    for result, f in zip(found, flat, strict=True):
        first = {(n, ""): f.get(n, "") for n in dict.fromkeys([*HEAD, *varied])}
        ran = {"date": date(result)} | {n: result.meta.get(n, "") for n in RECORDED}
        lines = first | dict(result.summary().stack()) | {(n, ""): v for n, v in ran.items()}
        columns[result.id] = pd.Series(lines, dtype=object)
    return pd.concat(columns, axis=1).fillna("")
