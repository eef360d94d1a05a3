"""Damaged and hostile files and answers, and machines that fail: what is said, and what is left. docs/reliability.md has the same table.

`python -m tests.faults.test_damage` writes the table anew.
"""

import contextlib
import errno
import functools
import gzip
import importlib
import io
import json
import os
import re
import resource
import shutil
import sys
import tempfile
import textwrap
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from filelock import FileLock

from pfl_core import Experiment, Federation, load_model, models, run, sweep
from pfl_core.data import partition, pools
from pfl_core.engine import simulate
from pfl_core.engine.simulate import Interrupted
from pfl_core.experiments import store, workers
from pfl_core.experiments.store import Result, load_result
from pfl_core.extras import flower
from pfl_core.methods.base import METHODS
from pfl_core.util import sums
from pfl_papers import places
from pfl_papers.compare import report
from pfl_papers.evidence import committed
from pfl_papers.explore import sources
from tests.made import main
from tools.marked import between

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
TINY = dict(partition_args={"alpha": 1.0}, clients=4, model="mlp", model_args={"hidden": 8})
TINY |= dict(rounds=4, batch=16, lr=0.1, max_samples=40)
E = Experiment(**TINY)
KEEPS, LONGER, BYSTANDER = E.but(keep_models=True), E.but(rounds=6), E.but(seed=9)
OWN = Experiment(dataset="own", model="mlp", model_args={"hidden": 8}, rounds=2, batch=8, lr=0.1)


class Fault(NamedTuple):
    """What goes wrong: `happens` does the harm, yields, and goes on as a user does who knows nothing of it."""

    what: str
    happens: Callable[["World"], Iterator[None]]
    says: str  # a regular expression; "" where nothing is said
    left: str  # a word of LEFT, which checks it


# -- a computer on which it happens --------------------------------------------------------------------------------------

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
        sums.write(path.parent, {name: path.read_bytes()})


class Trap:
    """Unpickled, it makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("opened",)


def shown() -> pd.DataFrame:
    (part,) = committed.parts().values()
    return part.rows()


def twice(text: str, line: int = 1) -> str:
    """A table in which a line stands twice."""
    return text + text.splitlines(keepends=True)[line]


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


def partition_file(w: World, **changes) -> Callable[[], Federation]:
    """A saved partition with other arrays in it; None: without one. What reads it."""
    fed = images()
    fed.save(w.folder / "clients.npz")
    with np.load(w.folder / "clients.npz") as z:
        arrays = {n: z[n] for n in z.files} | changes
    np.savez("clients.npz", **{n: v for n, v in arrays.items() if v is not None})
    return lambda: Federation.load("clients.npz", fed.x, fed.y)


def pfllib(*clients: tuple[np.ndarray, np.ndarray]) -> None:
    """A folder as PFLlib writes it, of samples and labels of each client."""
    for part in ("train", "test"):
        Path("set", part).mkdir(parents=True)
        for k, (x, y) in enumerate(clients):
            np.savez(Path("set", part, f"{k}.npz"), x=x, y=y)


def saved_model(change: Callable[[dict], Any]) -> None:
    """A model's file with another content."""
    clean(KEEPS).save(0, "model.pt")
    z = torch.load("model.pt", weights_only=True)
    change(z)
    torch.save(z, "model.pt")


def predictions() -> np.ndarray:
    return load_model("model.pt").predict(pools.load("digits").x[:50])


def served(spoil: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """The server of a federation over Flower after a round in which client 1 answers what `spoil` makes of its answer."""
    e = E.but(rounds=1, eval_after=False)
    about = [flower.Client(e, k).about() for k in range(4)]

    def ask(kind, round, sent):
        out = {k: flower.Client(e, k).answer(kind, round, p) for k, p in sent.items()}
        if kind == "train":
            out[1] = spoil(*out[1])
        return out

    state, seen = flower.serve(e, about, ask)
    assert np.isfinite(seen["loss"]).all() and (seen["n"] > 0).all()
    return state.server


@functools.cache
def without_client_1() -> dict[str, torch.Tensor]:
    with contextlib.redirect_stdout(io.StringIO()):
        return served(lambda up, sums: "gone")


def answers(spoil: Callable[..., Any]) -> Callable[[World], Iterator[None]]:
    """A fault: client 1 answers with this upload and these sums."""

    def happens(w: World) -> Iterator[None]:
        w.expected = without_client_1()
        yield
        return served(spoil)

    return happens


# -- runs, their ids and their files -------------------------------------------------------------------------------------


def of_an_earlier_version(w: World) -> Iterator[None]:
    def older(z):
        del z["experiment"]["eval_clients"], z["experiment"]["precision"]

    signed(w.has(E), older)
    yield
    assert {r.id for r in store.finished()} == {BYSTANDER.id, E.id}
    return w.run(E)


def of_a_later_version(w: World) -> Iterator[None]:
    signed(w.has(E), lambda z: z["experiment"].update(compression="none"))
    yield
    return w.run(E)


def no_fields_beside_a_state(w: World) -> Iterator[None]:
    for name, text in (("1" * 16, "[" * 100_000), ("2" * 16, '{"meta": []}'), ("3" * 16, "{}")):
        folder = w.has(E.but(seed=int(name[0])), keep_state=True)
        (folder / "experiment.json").write_text(text)
    yield
    return w.run(LONGER)


def digests_of_other_places(w: World) -> Iterator[None]:
    (w.folder / "mine").write_text("mine")
    signed(w.has(E), lambda z: z["sha256"].update({"../../mine": "0" * 64, "/etc/passwd": 3}))
    yield
    return w.run(E)


def exchanged_histories(w: World) -> Iterator[None]:
    a, b = w.has(E), w.has(KEEPS.but(lr=0.2))
    one, other = (p.read_bytes() for p in (a / "history.csv", b / "history.csv"))
    (a / "history.csv").write_bytes(other), (b / "history.csv").write_bytes(one)
    yield
    return [w.run(E), w.run(KEEPS.but(lr=0.2))]


def arrays_of_another_run(w: World) -> Iterator[None]:
    w.published()
    w.expected = committed.accuracies(E.id, "before", 4)
    shutil.copy(clean(E.but(lr=0.3)).folder / "arrays.npz", w.store / E.id)
    yield
    return committed.accuracies(E.id, "before", 4)


def objects_among_arrays(w: World) -> Iterator[None]:
    folder = w.has(E)
    np.savez(folder / "arrays.npz", rounds=np.array([Trap()], dtype=object))
    signed(folder)
    yield
    return w.run(E)


def code_among_models(w: World) -> Iterator[None]:
    folder = w.has(KEEPS)
    torch.save({"models": Trap()}, folder / "models.pt")
    signed(folder)
    yield
    return w.run(KEEPS).model(0)


def models_are_gone(w: World) -> Iterator[None]:
    (w.has(KEEPS) / "models.pt").unlink()
    yield
    return w.run(KEEPS).model(0)


def models_of_a_source_are_gone(w: World) -> Iterator[None]:
    (w.has(KEEPS) / "models.pt").unlink()
    yield
    return w.run(E.but(seed=2, init_from=E))


def link_to_another_run(w: World) -> Iterator[None]:
    other = w.has(E.but(lr=0.3))
    (w.store / E.id).symlink_to(other)
    yield
    found = w.run(E)
    assert equal(w.run(E.but(lr=0.3)), clean(E.but(lr=0.3)))
    return found


def names_a_module(w: World) -> Iterator[None]:
    w.plugin("from_outside", "import os\nos.mkdir('opened')\n")
    folder = w.has(E)
    signed(folder, lambda z: z["experiment"].update(plugins=["from_outside"]))
    yield
    assert committed.experiment(E.id).plugins == ("from_outside",)
    assert sources.names() == [sources.OWN]
    w.expected = {BYSTANDER.id, E.id}
    return set(sources.rows(sources.OWN).run)


def damaged_run_in_a_list(w: World) -> Iterator[None]:
    (w.has(E) / "history.csv").write_text("rounds\n")
    yield
    w.expected = {BYSTANDER.id}
    assert main(["list", "runs"]) == 0 and set(sources.rows(sources.OWN).run) == w.expected
    return {r.id for r in store.finished()}


def no_date(w: World) -> Iterator[None]:
    signed(w.has(E), lambda z: z["meta"].update(date="yesterday"))
    yield
    assert main(["list", "runs"]) == 0
    return w.run(E)


def another_state(w: World) -> Iterator[None]:
    path = w.has(E, keep_state=True) / "state.pt"
    z = torch.load(path, weights_only=True)
    z["server"]["fc.bias"] += 1
    torch.save(z, path)
    yield
    return w.run(LONGER)


# -- disks and processes -------------------------------------------------------------------------------------------------


def read_only_at_the_end(w: World) -> Iterator[None]:
    replace = os.replace

    def refuse(source, target):
        if Path(target).name == E.id:
            raise OSError(errno.EROFS, "Read-only file system")
        replace(source, target)

    yield
    with w.patch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="Read-only") as error:
            w.run(E)
    print(error.value)
    w.seen.clear()
    return w.run(E)


def folder_is_gone(w: World) -> Iterator[None]:
    def remove(r, history):
        if r == 2:
            shutil.rmtree(w.store / f"{E.id}.part")

    yield
    run(E, on_round=remove)


def killed_before_the_result(w: World) -> Iterator[None]:
    save = np.savez_compressed

    def killed(*args, **arrays):
        save(*args, **arrays)
        raise KeyboardInterrupt

    yield
    with w.patch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(np, "savez_compressed", killed)
        w.run(KEEPS)
    assert (w.store / f"{KEEPS.id}.part" / "models.pt").exists()
    w.seen.clear()
    return w.run(KEEPS)


def half_files_of_another_process(w: World) -> Iterator[None]:
    results = w.published()
    for name in (".runs.csv.gz.4711.part", ".SHA256SUMS.4711.part"):
        (results / name).write_text("run,")
    yield
    return shown()


# -- checkpoints ---------------------------------------------------------------------------------------------------------


def checkpoint(change: Callable[[dict], Any]) -> Callable[[World], Iterator[None]]:
    """A fault: half of the run is there, with another content of its checkpoint."""

    def happens(w: World) -> Iterator[None]:
        w.checkpoint(change)
        yield
        return w.run(E)

    return happens


def put(whole: dict, *path: str, value: Any) -> None:
    """whole[path[0]][path[1]]... = value, or what the function `value` makes of what is there."""
    for name in path[:-1]:
        whole = whole[name]
    whole[path[-1]] = value(whole[path[-1]]) if callable(value) else value


def rounds_to_come(whole: dict) -> None:
    """The last entry of all that was measured once more, as one of round 7."""
    kept = whole["history"]
    for name in ("download", "upload", "visits", "wall"):
        kept[name] += kept[name][-1:]
    kept["rounds"] += [7]
    kept["evals"] = {n: torch.cat([v, v[-1:]]) for n, v in kept["evals"].items()}


def checkpoint_is_a_folder(w: World) -> Iterator[None]:
    path = w.half()
    path.unlink()
    path.mkdir()
    (path / "mine").write_text("mine")
    yield
    return w.run(E)


def checkpoint_of_fewer_clients(w: World) -> Iterator[None]:
    e = E.but(method="fedper")
    w.checkpoint(lambda z: put(z, "clients", "fc.bias", value=lambda v: v[1:]), e)
    yield
    return w.run(e)


# -- locks ---------------------------------------------------------------------------------------------------------------


def lock_is_a_folder(w: World) -> Iterator[None]:
    (w.store / f"{E.id}.lock").mkdir(parents=True)
    (w.store / f"{E.id}.lock" / "mine").write_text("mine")
    yield
    return w.run(E)


def lock_is_a_link(w: World) -> Iterator[None]:
    (w.folder / "mine").write_text("mine")
    (w.store / f"{E.id}.lock").symlink_to(w.folder / "mine")
    yield
    return w.run(E)


def lock_with_something_in_it(w: World) -> Iterator[None]:
    (w.store / f"{E.id}.lock").write_text("mine")
    yield
    found = w.run(E)
    assert (w.store / f"{E.id}.lock").read_text() == "mine"
    return found


def lock_of_a_stopped_process(w: World) -> Iterator[None]:
    held, ended = threading.Event(), threading.Event()

    def hold():
        with FileLock(w.store / f"{E.id}.lock"):
            held.set()
            ended.wait(600)

    def said(text):  # the other one goes on as soon as it is known to be waited for
        print(text)
        ended.set()

    w.patch.setattr(store, "SAID_AFTER", 0.1)
    w.patch.setattr(store, "print", said, raising=False)
    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    yield
    return w.run(E)


def lock_of_a_shorter_run_is_a_folder(w: World) -> Iterator[None]:
    (w.store / f"{E.but(rounds=2).id}.lock").mkdir()
    yield
    return run(E, on_round=lambda r, h: r == 2 and "finish")


# -- the trash -----------------------------------------------------------------------------------------------------------


def pruned(w: World, *words: str) -> tuple[set[str], set[str]]:
    """What is in the store after `prune`, and what in the trash."""
    assert main(["prune", *words, "--yes"]) == 0
    left = {p.name for p in w.store.iterdir() if p.suffix != ".lock"}
    return left, {p.name for p in w.folder.glob("trash/*/*")}


def one_cannot_be_moved(w: World) -> Iterator[None]:
    w.has(E), w.has(LONGER)
    rename = os.rename

    def busy(source, target):
        if Path(source).name == E.id:
            raise OSError(errno.EBUSY, "Device or resource busy")
        rename(source, target)

    w.patch.setattr(os, "rename", busy)
    yield
    w.expected = {E.id}, {LONGER.id, BYSTANDER.id}
    return pruned(w)


def trash_is_a_file(w: World) -> Iterator[None]:
    w.has(E), (w.folder / "trash").write_text("mine")
    yield
    if main(["prune", "--yes"]):
        raise OSError


def day_is_a_link(w: World) -> Iterator[None]:
    w.has(E), (w.folder / "trash").mkdir()
    (w.folder / "elsewhere").mkdir()
    (w.folder / "trash" / f"{pd.Timestamp.now():%Y-%m-%d}").symlink_to(w.folder / "elsewhere")
    yield
    w.expected = {BYSTANDER.id}, {E.id}
    found = pruned(w, E.id)
    assert not list((w.folder / "elsewhere").iterdir())
    return found


def several_of_one_second(w: World) -> Iterator[None]:
    yield
    for _ in range(3):
        w.has(E)
        pruned(w, E.id)
    assert len(list(w.folder.glob(f"trash/*/{E.id}"))) == 3
    w.expected = {BYSTANDER.id}, {E.id}
    return pruned(w, "--method", "none")


def letters_that_steer_a_terminal(w: World) -> Iterator[None]:
    signed(w.has(E), lambda z: z["experiment"].update(method="\x1b[2J\x1b]0;mine\x07"))
    yield
    assert main(["prune"]) == 0


# -- committed results ---------------------------------------------------------------------------------------------------


def edited(name: str, change: Callable[[str], str]) -> Callable[[World], Iterator[None]]:
    """A fault: a file of results/ is changed, and its digest with it."""

    def happens(w: World) -> Iterator[None]:
        w.edited(name, change)
        yield
        return shown()

    return happens


def digest_of_a_file_elsewhere(w: World) -> Iterator[None]:
    w.published()
    (places.kept_folder() / "mine").write_text("mine")
    with (places.kept_folder() / "fedper.quick-digits" / sums.NAME).open("a") as file:
        file.write(f"{'0' * 64}  ../mine\n")
    yield
    committed.save(shown(), "fedper", "quick", "digits")


def digest_of_a_file_of_ones_own(w: World) -> Iterator[None]:
    w.published()
    results = places.kept_folder() / "fedper.quick-digits"
    (results / "notes.txt").write_text("mine")
    sums.write(results, {"notes.txt": b"mine"})
    yield
    committed.save(shown(), "fedper", "quick", "digits")
    assert (results / "notes.txt").read_text() == "mine"
    (part,) = committed.parts(folder=results).values()
    return part.rows()


def digests_are_empty(w: World) -> Iterator[None]:
    results = w.published()
    (results / "cells.csv").write_text("paper,profile,data,artefact,row,column,run\n")
    (results / sums.NAME).write_text("")
    yield
    return committed.parts()


def digests_are_no_text(w: World) -> Iterator[None]:
    (w.published() / sums.NAME).write_bytes(b"\xff\xfe\x00")
    yield
    return shown()


def published_run_names_a_module(w: World) -> Iterator[None]:
    w.plugin("from_outside", "import os\nos.mkdir('opened')\n")
    w.edited("runs.csv.gz", lambda t: t.replace(",[],done,", ',"[""from_outside""]",done,'))
    shutil.rmtree(w.store / E.id)
    yield
    assert committed.experiment(E.id).plugins == ("from_outside",)
    return shown()


def round_is_missing(w: World) -> Iterator[None]:
    w.edited("fedper.clients.csv.gz", lambda t: re.sub(r".*,test,before,2,.*\n", "", t))
    shutil.rmtree(w.store / E.id)
    yield
    committed.accuracies(E.id, "before", 4)


# -- own data ------------------------------------------------------------------------------------------------------------


def saved_partition(**changes) -> Callable[[World], Iterator[None]]:
    """A fault: a saved partition has other arrays."""

    def happens(w: World) -> Iterator[None]:
        read = partition_file(w, **changes)
        yield
        return read()

    return happens


def header_of_a_bomb(w: World) -> Iterator[None]:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": "<i8", "fortran_order": False, "shape": (10**12,)}
    )
    read = partition_file(w, train_0=None)
    with zipfile.ZipFile("clients.npz", "a") as z:
        z.writestr("train_0.npy", head.getvalue() + bytes(64))
    yield
    return read()


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """A disk on which no file grows beyond 100 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def partition_on_a_full_disk(w: World) -> Iterator[None]:
    images().save("clients.npz")
    yield
    with full_disk():
        images(3).save("clients.npz")


def model_on_a_full_disk(w: World) -> Iterator[None]:
    clean(KEEPS).save(0, "model.pt")
    yield
    with full_disk():
        clean(KEEPS).save(1, "model.pt")


def labels_of_other_samples(w: World) -> Iterator[None]:
    x, y = np.zeros((9, 4), np.float32), np.arange(9) % 3
    pfllib((x[:5], y[:4]), (x[5:], y[4:]))  # together as many samples as labels
    yield
    Federation.from_pfllib("set")


def pixels_beside_floats(w: World) -> Iterator[None]:
    x, y = np.zeros((4, 1, 8, 8)), np.arange(4) % 3
    pfllib((x, y), (x.astype(np.uint8), y))
    yield
    Federation.from_pfllib("set")


def half_a_client(w: World) -> Iterator[None]:
    x, y = np.zeros((4, 1, 8, 8)), np.arange(4) % 3
    pfllib((x, y), (x, y))
    Path("set/test/1.npz").write_bytes(Path("set/test/1.npz").read_bytes()[:300])
    yield
    Federation.from_pfllib("set")


def model_file(change: Callable[[dict], Any]) -> Callable[[World], Iterator[None]]:
    """A fault: a model's file has another content."""

    def happens(w: World) -> Iterator[None]:
        saved_model(change)
        yield
        return predictions()

    return happens


# -- code that is registered ---------------------------------------------------------------------------------------------

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


# -- many clients --------------------------------------------------------------------------------------------------------

MANY = OWN.but(participation=0.002, rounds=1, eval_every=1)


def one_without_test_samples(w: World) -> Iterator[None]:
    test = list(images(20_000).index["test"])
    test[777] = []
    fed = images(20_000, test=test)
    yield
    e = MANY.but(rounds=0)
    found, whole = run(e, fed=fed), run(e, fed=images(20_000))
    others = np.arange(20_000) != 777
    w.expected = {n: v[:, others] for n, v in whole.arrays.items() if "test/" in n and v.ndim == 2}
    assert len(found.clients.dropna().query("split == 'test'").client.unique()) == 19_999
    return {n: v[:, others] for n, v in found.arrays.items() if n in w.expected}


def one_with_nan(w: World) -> Iterator[None]:
    fed = images(20_000)
    x = fed.x.astype(np.float32)
    x[777 * 20, 3, 3] = np.nan
    yield
    Federation(x, fed.y, fed.index["train"], test=fed.index["test"])


def partition_of_many_is_cut_off(w: World) -> Iterator[None]:
    fed = images(2000)
    fed.save("clients.npz")
    Path("clients.npz").write_bytes(Path("clients.npz").read_bytes()[:-9000])
    yield
    Federation.load("clients.npz", fed.x, fed.y)


def evaluated_without_test_samples(w: World) -> Iterator[None]:
    fed = images(40)
    test = [fed.index["test"][0], *([] for _ in range(39))]
    yield
    run(OWN.but(clients=40, eval_clients=2), fed=images(40, test=test))


def one_of_many_diverges(w: World) -> Iterator[None]:
    text = METHOD + textwrap.indent(
        "def personal(self, state, c):\n"
        "    models = {{n: v.clone() for n, v in super().personal(state, c).items()}}\n"
        "    models['fc.bias'][c.sel == 2345] = float('nan')\n    return models\n",
        "    ",
    )
    e = with_plugin(w, "bad_one", text)
    e = MANY.but(clients=2500, method=e.method, plugins=e.plugins)
    yield
    found = run(e, fed=images(2500))
    print(found.meta["status"])
    w.expected = False
    return found.ok


# -- clients of a federation over Flower ---------------------------------------------------------------------------------


def strangers_answer(w: World) -> Iterator[None]:
    nodes = object.__new__(flower._Nodes)
    nodes.node_of, nodes.client_of = {0: 10, 1: 11}, {10: 0, 11: 1}
    said = {10: "first", 99: "stranger", 11: "mine"}
    replies = [
        SimpleNamespace(
            metadata=SimpleNamespace(src_node_id=node), has_error=lambda: True, error=text
        )
        for node, text in [*said.items(), (10, "second")]
    ]
    nodes.grid, nodes.answer_s = SimpleNamespace(send_and_receive=lambda *a, **kw: replies), 60
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that flwr imports
        importlib.import_module("flwr.app")
    yield
    w.expected = {0: "first", 1: "mine"}
    return nodes.ask("train", 0, {})


def answers_for_others(w: World) -> Iterator[None]:
    e = E.but(rounds=1, eval_after=False)
    about = [flower.Client(e, k).about() for k in range(4)]

    def ask(kind, round, sent):
        out = {k: flower.Client(e, k).answer(kind, round, p) for k, p in sent.items()}
        return out | {9: next(iter(out.values())), "1": "mine"}

    yield
    w.expected = served(lambda up, sums: (up, sums))
    return flower.serve(e, about, ask)[0].server


def with_gradient(w: World) -> Iterator[None]:
    yield
    w.expected = served(lambda up, sums: (up, sums))
    return served(lambda up, sums: ({n: v.clone().requires_grad_() for n, v in up.items()}, sums))


def kept_state_is_damaged(w: World) -> Iterator[None]:
    e = E.but(rounds=1, eval_after=False, method="fedper")
    about = [flower.Client(e, k).about() for k in range(4)]

    def ask(kind, round, sent):
        out = {}
        for k, p in sent.items():
            kept = {"fc.weight": torch.zeros(3, 8)} if (k, kind) == (1, "train") else None
            try:
                out[k] = flower.Client(e, k, kept).answer(kind, round, p)
            except Exception as error:
                out[k] = f"{error}"  # as Flower says it
        return out

    def gone(kind, round, sent):
        out = {k: flower.Client(e, k).answer(kind, round, p) for k, p in sent.items()}
        return out | ({1: "gone"} if kind == "train" else {})

    with contextlib.redirect_stdout(io.StringIO()):
        w.expected = flower.serve(e, about, gone)[0].server
    yield
    return flower.serve(e, about, ask)[0].server


# -- runs that ended early, and sweeps -----------------------------------------------------------------------------------


def early(w: World) -> Result:
    return run(LONGER, on_round=lambda r, h: r == E.rounds and "finish")


def early_into_a_file(w: World) -> Iterator[None]:
    (w.store / E.id).write_text("mine")
    yield
    return early(w)


def early_over_a_damaged_run(w: World) -> Iterator[None]:
    (w.has(E) / "history.csv").write_text("rounds\n")
    yield
    return early(w)


def early_and_its_state_is_damaged(w: World) -> Iterator[None]:
    folder = early(w).folder
    (folder / "state.pt").write_bytes((folder / "state.pt").read_bytes()[:-200])
    yield
    return w.run(LONGER)


def killed_while_it_ends_early(w: World) -> Iterator[None]:
    save = np.savez_compressed

    def killed(*args, **arrays):
        save(*args, **arrays)
        raise KeyboardInterrupt

    with w.patch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(np, "savez_compressed", killed)
        early(w)
    yield
    return w.run(LONGER)


def sweep_over_damage(w: World) -> Iterator[None]:
    cells = [E, E.but(lr=0.3), E.but(seed=1)]
    (w.has(cells[0]) / "arrays.npz").write_bytes(b"PK")
    (w.store / cells[1].id).write_text("mine")
    shutil.copytree(w.has(cells[2]), w.store / f"{cells[2].id}.part")
    yield
    assert sweep(cells).run.nunique() == 3
    return [load_result(w.store / e.id, e) for e in cells]


FAULTS = [
    # runs, their ids and their files
    Fault(
        "a run of an earlier version, which lacks fields", of_an_earlier_version, "", "as before"
    ),
    Fault(
        "a run of a later version, which has a field more",
        of_a_later_version,
        "field of an Experiment: .*compression.* is unknown.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "runs whose experiment.json is nested 100,000 deep, or holds no fields, beside a state.pt",
        no_fields_beside_a_state,
        "",
        "computed, equal",
    ),
    Fault(
        "an experiment.json with digests of files outside the folder",
        digests_of_other_places,
        "",
        "as before",
    ),
    Fault(
        "history.csv of two runs exchanged",
        exchanged_histories,
        "history.csv is not as it was written.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "arrays.npz of another run, read for a figure; results/ have the run, too",
        arrays_of_another_run,
        "",
        "as before",
    ),
    Fault(
        "arrays.npz with pickled objects, and a digest that fits",
        objects_among_arrays,
        "set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "models.pt with pickled code, and a digest that fits",
        code_among_models,
        "models.pt is damaged: it holds code, which is not run",
        "refused, nothing changed",
    ),
    Fault(
        "models.pt deleted, and asked for",
        models_are_gone,
        "models.pt is missing.*recompute=True",
        "refused, nothing changed",
    ),
    Fault(
        "models.pt deleted, and another run starts from it",
        models_of_a_source_are_gone,
        "models.pt is missing.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "state.pt with other weights, of a run that a longer one could go on from",
        another_state,
        "state.pt is not as its run wrote it",
        "computed, equal",
    ),
    Fault(
        "a link to another run in a run's place",
        link_to_another_run,
        "it is run .*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a run in the store that names a module; the explorer lists it",
        names_a_module,
        "",
        "as before",
    ),
    Fault(
        "a damaged run among those of `list runs` and of the explorer",
        damaged_run_in_a_list,
        "left out: it cannot be read",
        "left out, the others are shown",
    ),
    Fault("a run whose date is none, listed", no_date, "", "as before"),
    # checkpoints
    Fault(
        "a checkpoint of an executor that does not exist",
        checkpoint(lambda z: put(z, "stamp", "executor", value="tpu:unfold")),
        "executor 'tpu:unfold' is unknown.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a checkpoint of a form of convolutions that does not exist",
        checkpoint(lambda z: put(z, "history", "faster", value={"fc.weight": "winograd"})),
        "form of convolutions 'winograd' is unknown.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a checkpoint with NaN among the weights",
        checkpoint(lambda z: put(z, "server", "fc.bias", value=lambda v: v * float("nan"))),
        "fc.bias in server is not finite.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a checkpoint with weights in float64",
        checkpoint(lambda z: put(z, "server", "fc.bias", value=lambda v: v.double())),
        "it lacks fc.bias .*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a checkpoint without all of its traffic",
        checkpoint(lambda z: put(z, "moved", value=[0.0])),
        "its traffic or its time is missing.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a checkpoint with evaluations of rounds to come",
        checkpoint(rounds_to_come),
        "evaluations do not belong to its rounds.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a checkpoint with evaluations of fewer clients",
        checkpoint(
            lambda z: put(
                z, "history", "evals", value=lambda v: {n: a[:, 1:] for n, a in v.items()}
            )
        ),
        "not those of 4 clients.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a checkpoint with what fewer clients keep",
        checkpoint_of_fewer_clients,
        "it lacks fc.bias of shape .*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a folder in a checkpoint's place",
        checkpoint_is_a_folder,
        "checkpoint.pt could not be read.*set aside",
        "set aside, computed again, equal",
    ),
    # disks and processes
    Fault(
        "a store that is read-only when the result is to be renamed",
        read_only_at_the_end,
        "Read-only file system.*set PFL_RUNS",
        "goes on, equal",
    ),
    Fault(
        "a run's folder deleted while it is computed",
        folder_is_gone,
        "cannot write .*checkpoint.part .*No such file",
        "ends; run again, equal",
    ),
    Fault("killed between models and result", killed_before_the_result, "", "goes on, equal"),
    Fault(
        "half files of another process in results/", half_files_of_another_process, "", "as before"
    ),
    # locks
    Fault("a folder in a lock's place", lock_is_a_folder, "no lock.*set aside", "computed, equal"),
    Fault(
        "a link in a lock's place", lock_is_a_link, "no lock of a run.*set aside", "computed, equal"
    ),
    Fault("a lock with a text in it", lock_with_something_in_it, "", "computed, equal"),
    Fault(
        "a lock that a stopped process holds",
        lock_of_a_stopped_process,
        "computed by another process, which is waited for",
        "computed, equal",
    ),
    Fault(
        "a folder in the place of the lock of a run that another one ends early as",
        lock_of_a_shorter_run_is_a_folder,
        "no lock of a run.*set aside",
        "computed, equal",
    ),
    # the trash
    Fault(
        "prune: one of several folders cannot be moved",
        one_cannot_be_moved,
        "stays: it cannot be moved .Device or resource busy",
        "moved, but for that",
    ),
    Fault(
        "prune: a file in the trash's place", trash_is_a_file, "trash", "refused, nothing changed"
    ),
    Fault(
        "prune: a link to elsewhere in the place of the day's trash",
        day_is_a_link,
        r"1 moved to \S*\.1;",
        "moved, but for that",
    ),
    Fault(
        "prune: the same run three times within a second",
        several_of_one_second,
        r"1 moved to \S*\.2;",
        "moved, but for that",
    ),
    Fault(
        "prune: a name that steers the terminal",
        letters_that_steer_a_terminal,
        r"\\x1b\[2J",
        "as before",
    ),
    # committed results
    Fault(
        "SHA256SUMS that lists a file of another folder, where rows are kept",
        digest_of_a_file_elsewhere,
        "lists '../mine'.*names of files beside it",
        "refused, nothing changed",
    ),
    Fault(
        "SHA256SUMS that lists a file of one's own, where rows are kept",
        digest_of_a_file_of_ones_own,
        "",
        "as before",
    ),
    Fault(
        "an empty SHA256SUMS, after a power cut",
        digests_are_empty,
        "cells.csv was not published",
        "refused, nothing changed",
    ),
    Fault(
        "a SHA256SUMS that is no text",
        digests_are_no_text,
        "SHA256SUMS is damaged",
        "refused, nothing changed",
    ),
    Fault(
        "results/: a run twice in runs.csv.gz",
        edited("runs.csv.gz", twice),
        "runs.csv.gz is damaged .it has .* twice",
        "refused, nothing changed",
    ),
    Fault(
        "results/: a line twice in cells.csv",
        edited("cells.csv", twice),
        "cells.csv is damaged .it has .* twice",
        "refused, nothing changed",
    ),
    Fault(
        "results/: a run that nobody has, in cells.csv",
        edited("cells.csv", lambda t: t.replace(E.id, "0" * 16)),
        "runs.csv.gz is damaged .it has no run 0000",
        "refused, nothing changed",
    ),
    Fault(
        "results/: a run without a history",
        edited("fedper.history.csv.gz", lambda t: t.splitlines(keepends=True)[0]),
        "it has no history of run",
        "refused, nothing changed",
    ),
    Fault(
        "results/: an accuracy of 1e400 %",
        edited(
            "fedper.history.csv.gz", lambda t: re.sub(r"(,before,test,)[^,]+", r"\g<1>1e400", t)
        ),
        "client.acc_pct is inf; an accuracy is 0 to 100",
        "refused, nothing changed",
    ),
    Fault(
        "results/: a run's Experiment cut off",
        edited("runs.csv.gz", lambda t: t.replace(",[],done,", ",[,done,")),
        "runs.csv.gz is damaged",
        "refused, nothing changed",
    ),
    Fault(
        "results/: line ends of Windows, and a byte order mark",
        edited("cells.csv", lambda t: "\ufeff" + t.replace("\n", "\r\n")),
        "",
        "as before",
    ),
    Fault(
        "results/: a round missing client by client, read for a figure",
        round_is_missing,
        "clients.csv.gz is damaged .* other rounds than its history",
        "refused, nothing changed",
    ),
    Fault("results/: a run that names a module", published_run_names_a_module, "", "as before"),
    # own data
    Fault(
        "a saved partition without one of its lists",
        saved_partition(train_1=None),
        "clients.npz is damaged.*train_1",
        "refused, nothing changed",
    ),
    Fault(
        "a saved partition of indices that are floats",
        saved_partition(train_1=np.array([0.5])),
        "train of client 1 holds float64",
        "refused, nothing changed",
    ),
    Fault(
        "a saved partition of indices beyond int64",
        saved_partition(train_1=np.array([2**64 - 1], np.uint64)),
        "train indices of client 1 reach",
        "refused, nothing changed",
    ),
    Fault(
        "a saved partition whose header says 10^12 numbers",
        header_of_a_bomb,
        "clients.npz is damaged",
        "refused, nothing changed",
    ),
    Fault(
        "a saved partition over an older one, on a full disk",
        partition_on_a_full_disk,
        "cannot write .*clients.npz.*what was there is as it was",
        "refused, nothing changed",
    ),
    Fault(
        "PFLlib's files: labels of one client with another one",
        labels_of_other_samples,
        "train/0.npz has samples .5, 4. and labels .4,.",
        "refused, nothing changed",
    ),
    Fault(
        "PFLlib's files: bytes for one client, floats for the others",
        pixels_beside_floats,
        "train/1.npz holds samples uint8 .*first file float32",
        "refused, nothing changed",
    ),
    Fault(
        "PFLlib's files: half of one",
        half_a_client,
        "test/1.npz cannot be read",
        "refused, nothing changed",
    ),
    # saved models
    Fault(
        "a saved model of a network that is not registered",
        model_file(lambda z: put(z, "facts", "model", value="ours")),
        "model.pt cannot be read: its model 'ours' is not registered here.*register it first",
        "refused, nothing changed",
    ),
    Fault(
        "a saved model with weights of other shapes",
        model_file(lambda z: put(z, "state_dict", "fc.bias", value=lambda v: v[1:])),
        "model.pt cannot be read: .*size mismatch for fc.bias",
        "refused, nothing changed",
    ),
    Fault(
        "a saved model with NaN among its weights",
        model_file(lambda z: put(z, "state_dict", "fc.bias", value=lambda v: v * float("nan"))),
        "fc.bias of this model is not finite",
        "refused, nothing changed",
    ),
    Fault(
        "a saved model that does not say how samples are normalised",
        model_file(lambda z: z["facts"].pop("mean")),
        "its facts lack mean",
        "refused, nothing changed",
    ),
    Fault(
        "a saved model that asks for 10^12 hidden units",
        model_file(lambda z: put(z, "facts", "model_args", value={"hidden": 10**12})),
        "model.pt cannot be read: ",
        "refused, nothing changed",
    ),
    Fault(
        "a saved model with pickled code",
        model_file(lambda z: put(z, "facts", "model", value=Trap())),
        "model.pt is damaged: it holds code, which is not run",
        "refused, nothing changed",
    ),
    Fault(
        "a model saved over another one, on a full disk",
        model_on_a_full_disk,
        "cannot write .*model.pt.*what was there is as it was",
        "refused, nothing changed",
    ),
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
    # many clients
    Fault(
        "one of 20,000 clients has no test sample", one_without_test_samples, "", "computed, equal"
    ),
    Fault(
        "one of 20,000 clients has NaN in a sample",
        one_with_nan,
        "not finite .* in 1 of 400000 samples, the first is sample 15540",
        "refused, nothing changed",
    ),
    Fault(
        "a saved partition of 2,000 clients, cut off",
        partition_of_many_is_cut_off,
        "clients.npz is damaged",
        "refused, nothing changed",
    ),
    Fault(
        "none of the clients that are drawn for evaluation has a test sample",
        evaluated_without_test_samples,
        "only 1 of 40 clients have test samples, and none of those is drawn",
        "refused, nothing changed",
    ),
    Fault(
        "one of 2,500 clients diverges, in the second part of an evaluation",
        one_of_many_diverges,
        "of client 2345 is not finite in round 0",
        "kept as failed",
    ),
    # clients of a federation over Flower
    Fault(
        "a client's upload in float16",
        answers(lambda up, s: (up | {"fc.bias": up["fc.bias"].half()}, s)),
        "client 1 is left out: its fc.bias is torch.float16",
        "left out, the round goes on",
    ),
    Fault(
        "a client's upload of complex numbers",
        answers(lambda up, s: (up | {"fc.bias": up["fc.bias"] + 1j}, s)),
        "client 1 is left out: its fc.bias is torch.complex64",
        "left out, the round goes on",
    ),
    Fault(
        "a client's upload as a sparse tensor",
        answers(lambda up, s: (up | {"fc.bias": up["fc.bias"].to_sparse()}, s)),
        "client 1 is left out: its fc.bias is .*needed is a plain tensor",
        "left out, the round goes on",
    ),
    Fault(
        "a client's upload without values (a meta tensor)",
        answers(lambda up, s: (up | {"fc.bias": up["fc.bias"].to("meta")}, s)),
        "client 1 is left out: its fc.bias is .*needed is a plain tensor",
        "left out, the round goes on",
    ),
    Fault(
        "a client's upload of 10^12 numbers",
        answers(lambda up, s: (up | {"fc.bias": up["fc.bias"][:1].expand(10**12)}, s)),
        "client 1 is left out: its fc.bias is .*shape .1000000000000,.",
        "left out, the round goes on",
    ),
    Fault(
        "a client's upload as a list, without sums",
        answers(lambda up, s: [*up.values()]),
        "client 1 is left out: its answer is .*needed are two dicts",
        "left out, the round goes on",
    ),
    Fault(
        "a client's loss of 10^400",
        answers(lambda up, s: (up, s | {"loss": 10**400})),
        "client 1 is left out: it returned .*loss=1000",
        "left out, the round goes on",
    ),
    Fault(
        "what a client kept is of another shape",
        kept_state_is_damaged,
        "client 1 is left out: .*fc.weight of shape",
        "left out, the round goes on",
    ),
    Fault("a client's upload that asks for gradients", with_gradient, "", "as before"),
    Fault("answers of clients that were not asked", answers_for_others, "", "as before"),
    Fault(
        "nodes that were not asked answer, and one answers twice", strangers_answer, "", "as before"
    ),
    # runs that ended early, and sweeps
    Fault(
        "a run ends early, and a file lies in the place of its result",
        early_into_a_file,
        "no folder of a run.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a run ends early, and a damaged run lies in the place of its result",
        early_over_a_damaged_run,
        "could not be read.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "the state of a run that ended early is cut off, and a longer one could go on from it",
        early_and_its_state_is_damaged,
        "state.pt is not as its run wrote it",
        "computed, equal",
    ),
    Fault("killed while a run ends early", killed_while_it_ends_early, "", "goes on, equal"),
    Fault(
        "a sweep over a damaged run, a file in the place of one, and half a run beside its result",
        sweep_over_damage,
        "could not be read.*no folder of a run",
        "set aside, computed again, equal",
    ),
]


# -- what is left --------------------------------------------------------------------------------------------------------


class Played(NamedTuple):
    """A fault that has happened: what was said, returned and raised, and all files before and after."""

    world: World
    said: str
    value: Any
    error: BaseException | None
    before: dict[str, bytes]
    after: dict[str, bytes]


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


def as_it_should(p: Played) -> bool:
    """Whether what came of it is what comes of it without the fault."""
    found = p.value if isinstance(p.value, list) else [p.value]
    wanted = [clean(r.experiment) if isinstance(r, Result) else r for r in found]
    if p.world.expected is not None:
        wanted = [p.world.expected]
    return p.error is None and all(map(equal, found, wanted))


def unchanged(p: Played) -> bool:
    return p.before == p.after


def again(p: Played) -> bool:
    with contextlib.redirect_stdout(io.StringIO()):
        return equal(run(E), clean(E))


LEFT: dict[str, Callable[[Played], bool]] = {
    "as before": lambda p: as_it_should(p) and unchanged(p) and not p.world.seen,
    "computed, equal": lambda p: as_it_should(p) and p.world.seen[:1] in ([], [0]),
    "set aside, computed again, equal": lambda p: (
        as_it_should(p)
        and p.world.seen[:1] in ([], [0])
        and any(".damaged" in name and name not in p.before for name in p.after)
    ),
    "goes on, equal": lambda p: as_it_should(p) and p.world.seen[0] > 0,
    "refused, nothing changed": lambda p: p.error is not None and unchanged(p),
    "ends; run again, equal": lambda p: p.error is not None and again(p),
    "ends; nothing is lost": lambda p: p.error is not None,
    "left out, the round goes on": as_it_should,
    "left out, the others are shown": lambda p: as_it_should(p) and unchanged(p),
    "moved, but for that": as_it_should,
    "kept as failed": lambda p: p.value is False and len(p.after) > len(p.before),
}


def files(folder: Path) -> dict[str, bytes]:
    """All files of a folder but locks, which hold nothing; of links where they lead."""
    return {
        str(p.relative_to(folder)): os.readlink(p).encode() if p.is_symlink() else p.read_bytes()
        for p in folder.rglob("*")
        if (p.is_symlink() or p.is_file()) and p.suffix != ".lock"
    }


@contextlib.contextmanager
def empty_computer(folder: Path) -> Iterator[World]:
    registries = METHODS, models._MODELS, partition._SCHEMES, pools._ENTRIES
    known = [dict(names) for names in registries]
    loaded = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        env = {"PFL_RUNS": folder, "PFL_DATA": folder / "data", "PFL_OFFLINE": 1}
        for name, value in (env | {"PYTHONDONTWRITEBYTECODE": 1}).items():
            patch.setenv(name, str(value))
        patch.setenv("PFL_DEVICE", "cpu")
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setattr(simulate, "CHECKPOINT_EVERY", 0.0)
        patch.setattr(places, "results_folder", lambda: folder / "home" / "results")
        patch.syspath_prepend(folder)
        patch.chdir(folder)
        yield World(folder, patch)
    for names, before in zip(registries, known, strict=True):
        names.clear()
        names.update(before)
    for name in set(sys.modules) - loaded:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
            del sys.modules[name]


@contextlib.contextmanager
def played(fault: Fault, folder: Path) -> Iterator[Played]:
    """Let a fault happen on a computer with one finished run."""
    text, value, error = io.StringIO(), None, None
    with empty_computer(folder) as w:
        w.has(BYSTANDER)
        steps = fault.happens(w)
        with contextlib.redirect_stdout(io.StringIO()):
            next(steps)
        before = files(folder)
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            try:
                next(steps)
            except StopIteration as end:
                value = end.value
            except Exception as e:
                error = e
        said = f"{text.getvalue()}{error or ''}".replace(str(folder), "DIR").strip()
        yield Played(w, said, value, error, before, files(folder))


def slow(fault: Fault) -> tuple:
    return (pytest.mark.slow,) if fault.happens is workers_with_older_code else ()


@pytest.mark.parametrize("fault", [pytest.param(f, id=f.what, marks=slow(f)) for f in FAULTS])
def test_what_is_said_and_what_is_left(fault, tmp_path):
    with played(fault, tmp_path) as p:
        if p.error and not isinstance(p.error, ValueError | OSError | RuntimeError):
            raise p.error
        assert re.search(fault.says, p.said, re.DOTALL), p.said
        assert "Traceback" not in p.said and "\x1b" not in p.said
        assert LEFT[fault.left](p), (p.said, p.value, p.error, p.world.seen)
        there = set(p.after.values())
        lost = {n for n, raw in p.before.items() if raw and raw not in there}
        assert {n for n in lost if ".part/" not in n} == set()
        for name in [n for n in p.before if n.startswith(f"store/{BYSTANDER.id}/")]:
            assert p.before[name] == p.after.get(name) or fault.left == "moved, but for that"
        assert not (tmp_path / "opened").exists()


# -- the page ------------------------------------------------------------------------------------------------------------

COMMAND = "python -m tests.faults.test_damage"


def code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def table() -> str:
    """What goes wrong, what is said, and what is left: a line each."""
    lines = []
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder, played(fault, Path(folder).resolve()) as p:
            match = re.search(fault.says, p.said, re.DOTALL)
            first, last = p.said.rfind("\n", 0, match.start()) + 1, p.said.find("\n", match.end())
            said = p.said[first : last if last > 0 else None] if fault.says else ""
        said = re.sub(
            r"\b(?=\d*[a-f])[0-9a-f]{16}\b",
            "RUN",
            re.sub(r"\d{4}-\d\d-\d\d( \d\d:\d\d)?", "DAY", said),
        )
        said = "<br>".join(code(line.strip()) for line in said.splitlines()) or "-"
        lines.append({"fault": fault.what, "what it says": said, "what is left": fault.left})
    return report.markdown(pd.DataFrame(lines))


def test_the_page_holds_the_table():
    text = PAGE.read_text().split(f"<!-- faults: generated by `{COMMAND}` -->")[1]
    rows = [
        re.split(r" (?<!\\)\| ", line) for line in text.split("<!--")[0].strip().splitlines()[2:]
    ]
    told = [(row[0].removeprefix("| "), row[-1].removesuffix(" |")) for row in rows]
    assert told == [(f.what, f.left) for f in FAULTS]
    for fault, row in zip(FAULTS, rows, strict=True):
        assert re.search(fault.says, row[1].replace("`<br>`", "\n"), re.DOTALL), row


if __name__ == "__main__":
    PAGE.write_text(between(PAGE.read_text(), "faults", table(), COMMAND))
