"""A computer on which faults happen, and what faults of several subjects share."""

import contextlib
import gzip
import importlib
import json
import os
import resource
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

from pfl_core import Experiment, Federation, run, sweep
from pfl_core.engine.simulate import Interrupted
from pfl_core.experiments import store, workers
from pfl_core.experiments.store import Result
from pfl_core.util import sums
from pfl_papers import places
from pfl_papers.evidence import committed

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


TINY = dict(partition_args={"alpha": 1.0}, clients=4, model="mlp", model_args={"hidden": 8})
TINY |= dict(rounds=4, batch=16, lr=0.1, max_samples=40)


E = Experiment(**TINY)


KEEPS, LONGER, BYSTANDER = E.but(keep_models=True), E.but(rounds=6), E.but(seed=9)


class Fault(NamedTuple):
    """What goes wrong: `happens` does the harm, yields, and goes on as a user does who knows nothing of it."""

    what: str
    happens: Callable[["World"], Iterator[None]]
    says: str  # a regular expression; "" where nothing is said
    left: str  # a word of LEFT, which checks it


_clean = tempfile.TemporaryDirectory()


def clean(e: Experiment, *, until: int | None = None, **how) -> Result | Path:
    """The run as it is without any fault; with `until`, its folder as an interruption after that round leaves it."""
    place = Path(_clean.name, f"{until}-{'-'.join(how)}")
    if until is None:
        return run(e, store=place, **how)
    if not (folder := place / f"{e.id}.part").exists():
        with pytest.raises(Interrupted):
            run(e, store=place, on_round=lambda r, h: r == until)
    return folder


class World:
    """An empty computer; what `happens` needs there."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch):
        self.folder, self.store, self.patch = folder, folder / "store", patch
        self.seen: list[int] = []  # rounds of the runs under way
        self.expected: Any = None  # what comes of it, if that is no clean run

    def run(self, e: Experiment, **how) -> Result:
        return run(e, on_round=lambda r, h: self.seen.append(r), **how)

    def has(self, e: Experiment, **how) -> Path:
        """The finished run is in the store; its folder."""
        found = clean(e, **how).folder
        return Path(shutil.copytree(found, self.store / found.name))

    def half(self, e: Experiment = E) -> Path:
        """Half of the run is in the store; its checkpoint."""
        found = clean(e, until=1)
        return Path(shutil.copytree(found, self.store / found.name)) / "checkpoint.pt"

    def checkpoint(self, change: Callable[[dict], Any], e: Experiment = E) -> None:
        """Half of the run is in the store, with another content of its checkpoint."""
        path = self.half(e)
        whole = torch.load(path, weights_only=True)
        change(whole)
        torch.save(whole, path)

    def plugin(self, name: str, text: str) -> None:
        """A file of code that Python finds."""
        (self.folder / f"{name}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()

    def published(self) -> Path:
        """results/ with the rows of E; it holds `expected`."""
        self.has(E)
        tags = dict(paper="fedper", artefact="fig2", row="fedavg", column="x", profile="quick")
        rows = sweep([E.but(tags=tags)])
        kept = committed.save(rows, "fedper", "quick", "digits")
        results = Path(shutil.copytree(kept, places.results_folder()))
        self.expected = shown()
        return results

    def edited(self, name: str, change: Callable[[str], str]) -> None:
        """results/ in which a file was changed, and SHA256SUMS with it."""
        path = self.published() / name
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if name.endswith(".gz") else raw).decode()
        new = change(text).encode()
        assert new != text.encode()
        path.write_bytes(gzip.compress(new) if name.endswith(".gz") else new)
        sums.put(path.parent, {name: path.read_bytes()})


class Trap:
    """Unpickled, it makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("opened",)


def shown() -> pd.DataFrame:
    (part,) = committed.parts().values()
    return part.rows()


def signed(folder: Path, change: Callable[[dict], Any] = lambda z: None) -> None:
    """Change a run's experiment.json, and give the folder the digests of what lies in it."""
    path = folder / "experiment.json"
    z = json.loads(path.read_text())
    change(z)
    digests = store.digests(z["experiment"], z["meta"], folder)
    path.write_text(json.dumps(z | {"sha256": z["sha256"] | digests}))


def images(clients: int = 2, **changes) -> Federation:
    """Clients of 20 images of 8 x 8 pixels: 16 to train on, 4 to test."""
    draw, ids = np.random.default_rng(0), np.arange(20 * clients).reshape(clients, 20)
    x = draw.integers(0, 256, (20 * clients, 8, 8), dtype=np.uint8)
    lists = dict(train=[*ids[:, :16]], test=[*ids[:, 16:]]) | changes
    return Federation(x, draw.integers(0, 10, 20 * clients), **lists)


def put(whole: dict, *path: str, value: Any) -> None:
    """whole[path[0]][path[1]]... = value, or what the function `value` makes of what is there."""
    for name in path[:-1]:
        whole = whole[name]
    whole[path[-1]] = value(whole[path[-1]]) if callable(value) else value


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """A disk on which no file grows beyond 100 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


METHOD = """
from pfl_core import Method
import numpy as np, random, torch
class Mine(Method):
    name = "mine_{n}"
    def loss(self, p, anchor, batch):
        return {factor} * super().loss(p, anchor, batch)
"""


def with_plugin(w: World, name: str, text: str = METHOD, factor: str = "0.5") -> Experiment:
    """An Experiment of a method that a plugin registers."""
    w.plugin(name, text.format(n=name, factor=factor))
    return Experiment(**TINY, method=f"mine_{name}", plugins=(name,))


def workers_with_older_code(w: World) -> Iterator[None]:
    e = with_plugin(w, "aging")
    try:
        sweep([e, e.but(seed=1)], jobs=2)  # the processes stay
        w.plugin("aging", METHOD.format(n="aging", factor="2.0"))
        importlib.reload(sys.modules["aging"])
        yield
        sweep([e, e.but(seed=1)], jobs=2)
    finally:
        workers._pool(2).shutdown()
        workers._pool.cache_clear()


def equal(a: Any, b: Any) -> bool:
    """Whether two results, tables, or dicts of numbers are the same bit for bit."""
    if isinstance(a, Result):
        a, b = ((r.history[r.history.metric != "train_s"], r.arrays) for r in (a, b))
    if isinstance(a, pd.DataFrame):
        return a.equals(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(v, b[n]) for n, v in a.items())
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, np.ndarray | torch.Tensor):
        return np.array_equal(a, b, equal_nan=True)
    return a == b
