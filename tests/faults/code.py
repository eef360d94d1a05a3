"""Faults of code that is registered."""

import importlib
import shutil
import sys
from collections.abc import Iterator

import pytest
import torch

from pfl_core import Experiment, run
from pfl_core.engine.simulate import Interrupted
from tests.faults.table import (
    METHOD,
    TINY,
    E,
    Fault,
    World,
    clean,
    with_plugin,
    workers_with_older_code,
)


def plugin_is_gone(w: World) -> Iterator[None]:
    e = with_plugin(w, "leaving")
    w.expected = run(e, store=w.folder / "whole")
    with pytest.raises(Interrupted):
        run(e, on_round=lambda r, h: r == 1)
    away = shutil.move("leaving.py", "away")
    sys.modules.pop("leaving"), importlib.invalidate_caches()
    yield
    with pytest.raises(ValueError) as error:
        Experiment(**TINY, method="mine_leaving", plugins=("leaving",))
    print(error.value)
    shutil.move(away, "leaving.py"), importlib.invalidate_caches()
    return w.run(Experiment(**TINY, method="mine_leaving", plugins=("leaving",)))


def plugin_ends_python(w: World) -> Iterator[None]:
    w.plugin("script", "import sys\nsys.exit(0)\n")
    yield
    Experiment(**TINY, plugins=("script",))


def plugin_registers_twice(w: World) -> Iterator[None]:
    w.plugin(
        "one_name",
        METHOD.format(n="twice", factor=1)
        + METHOD.format(n="twice", factor=2).replace("Mine", "Other"),
    )
    yield
    Experiment(**TINY, method="mine_twice", plugins=("one_name",))


def plugin_sets_seeds(w: World) -> Iterator[None]:
    seeds = "[torch.manual_seed(3), np.random.seed(3), random.seed(3), torch.rand(9)]"
    w.plugin("seeding", f"import numpy as np, random, torch\n{seeds}\n")
    with_plugin(w, "seeding_too", METHOD.replace("return", f"{seeds}\n        return"), "1.0")
    w.expected = clean(E)
    yield
    importlib.import_module("seeding")
    found = w.run(E)
    with pytest.raises(ValueError) as refused:  # what a hook moves, another thread draws from
        w.run(Experiment(**TINY, method="mine_seeding_too", plugins=("seeding_too",)))
    print(refused.value)
    return found


def plugin_changes_the_default_format(w: World) -> Iterator[None]:
    w.plugin("doubled", "import torch\ntorch.set_default_dtype(torch.float64)\n")
    yield
    try:
        Experiment(**TINY, plugins=("doubled",))
        run(E)
    finally:
        torch.set_default_dtype(torch.float32)


def older_revision(w: World) -> Iterator[None]:
    text = METHOD.replace("{factor}", "0.5").replace('"\n', '"\n    revision = {factor}\n', 1)
    e = with_plugin(w, "revised", text, "1")
    with pytest.raises(Interrupted):
        run(e, on_round=lambda r, h: r == 1)
    with_plugin(w, "revised", text, "2")
    importlib.reload(sys.modules["revised"])
    w.expected = run(e, store=w.folder / "whole")
    yield
    return w.run(e)


FAULTS = [
    # code that is registered
    Fault(
        "a plugin edited and loaded again, while processes of an earlier sweep have the older code",
        workers_with_older_code,
        "not one of those that were asked for.*restart Python",
        "ends; nothing is lost",
    ),
    Fault(
        "a plugin deleted before its run goes on, and put back",
        plugin_is_gone,
        "no such module",
        "goes on, equal",
    ),
    Fault(
        "a plugin that ends Python",
        plugin_ends_python,
        "ends Python.*__main__",
        "refused, nothing changed",
    ),
    Fault(
        "a plugin that registers two methods under one name",
        plugin_registers_twice,
        "method name 'mine_twice' is taken by one_name.Mine",
        "refused, nothing changed",
    ),
    Fault(
        "plugins that set the seeds of torch, numpy and Python",
        plugin_sets_seeds,
        "moved torch's global generator",
        "computed, equal",
    ),
    Fault(
        "a plugin that makes float64 torch's default",
        plugin_changes_the_default_format,
        "default number format is torch.float64",
        "refused, nothing changed",
    ),
    Fault("a checkpoint of a plugin's older revision", older_revision, "", "computed, equal"),
]
