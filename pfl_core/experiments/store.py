"""The run store: finished runs as folders, read back as Results."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from filelock import FileLock, Timeout
from torch import nn

from pfl_core.engine import probes
from pfl_core.engine.checkpoint import load_whole
from pfl_core.experiments import metrics, older
from pfl_core.experiments.build import vocabulary
from pfl_core.experiments.experiment import SCHEMA, TAGS, Experiment, not_default
from pfl_core.experiments.metrics import ROW_COLUMNS
from pfl_core.experiments.personal import Personal
from pfl_core.experiments.settings import setting
from pfl_core.methods.base import METHODS, make_method
from pfl_core.util import checks, paths, sums
from pfl_core.util.cards import card
from pfl_core.util.say import say


@dataclass(frozen=True, eq=False)
class Result:
    """What a finished (or failed) run measured, and what it ran on.

    Attributes
    ----------
    experiment : Experiment
    id : str
        Its name in the store.
    ok : bool
        Whether it reached its last round.
    history : DataFrame
        One number a row: rounds (done so far), when ("before" or "after" local training; "tuned 3",
        after 3 epochs of the fine-tuning that follows the last round), split,
        average ("client": of all clients alike; "pooled": of all samples alike; "total": of the run
        so far), metric ("acc_pct" in %, "acc_sd", "loss", "train_s", ...) and value.
    rows : DataFrame
        The history with what tells runs apart (method, dataset, seed, tags, ...), as `sweep`
        returns it.
    clients : DataFrame
        The accuracy of every client at every evaluated round.
    arrays : dict of arrays
        What was measured client by client: "rounds" (E,), "before/test/correct" (E, K) counts,
        "tuned 3/test/correct" (1, K) likewise,
        "n/test" (K,) samples, ..., what probes recorded (read it with `probe`), and with
        client_dropout "answered" (V, 2): round and client of each answer.
    meta : dict
        status, device, executor (what ran) and executor_asked, versions, commit, date, wall_s
        (seconds), cpu_s (processor seconds, of all threads together), ...
    folder : Path
        Where it lies.
    sha256 : dict
        {file: digest} of what it wrote. `kept` reads no other run's file: where this one was
        computed anew since, it takes the old file, which is kept aside.
    """

    experiment: Experiment
    meta: dict[str, Any]
    history: pd.DataFrame
    arrays: dict[str, np.ndarray]
    folder: Path | None = None
    sha256: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The run's name in the store."""
        return self.meta["id"]

    @property
    def key(self) -> str:
        """What the run is an answer to: the id of its Experiment, over its data.

        It is its `id`, but for runs of earlier versions, which were named by another rule.
        """
        return self.meta.get("key") or older.key(self.experiment, self.meta)

    @property
    def ok(self) -> bool:
        """Whether the run reached its last round."""
        return self.meta["status"] == "done"

    @property
    def rows(self) -> pd.DataFrame:
        """The history with what tells runs apart, one number a row.

        A run that diverged has one row more, of metric "diverged".
        """
        e, m = self.experiment, self.meta
        facts = {"run": self.id} | {tag: e.tags.get(tag, "") for tag in TAGS}
        facts |= {n: getattr(e, n) for n in ("method", "dataset", "partition", "model", "seed")}
        facts |= {n: m[n] for n in ("device", "executor", "revision", "version")}
        facts |= dict(n_clients=m["clients"], wall_s=round(m["wall_s"], 2))
        facts |= dict(key=self.key, code=m.get("code", ""))
        facts |= dict(setting=self.setting, partition_seed=_partition_seed(e))
        history = self.history
        if not self.ok:
            end = int(history["rounds"].max()) if len(history) else 0
            mark = pd.DataFrame([metrics.lost(metrics.DIVERGED, end)])
            history = pd.concat([history, mark], ignore_index=True) if len(history) else mark
        return history.assign(**facts)[ROW_COLUMNS]

    @property
    def setting(self) -> str:
        """What it is but for its seed, as a digest: runs with equal ones are replicates."""
        return setting(self.experiment.plain(), self.meta)

    @property
    def clients(self) -> pd.DataFrame:
        """The accuracy of every client at every evaluated round.

        Columns: rounds, when, split, client, acc_pct (%), n (samples); what
        `Experiment(metrics=...)` named, NaN where it is undefined; and name, where the Federation
        has names of clients.
        """
        frame, names = metrics.clients_frame(self.arrays), self.client_names
        return frame.assign(name=np.array(names)[frame.client]) if names else frame

    @property
    def client_names(self) -> tuple[str, ...]:
        """What the Federation calls its clients; empty where they have no names."""
        return tuple(self.meta.get("client_names", ()))

    @property
    def class_names(self) -> tuple[str, ...]:
        """What the Federation calls its classes; empty where they have no names."""
        return tuple(self.meta.get("class_names", ()))

    def probe(self, name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """What a probe of `record` measured: the rounds (E,) and {key: (E, ...)}.

        Raises
        ------
        ValueError
            If the run did not record it.
        """
        return probes.read(self.arrays, name)

    def summary(self) -> pd.DataFrame:
        """Test accuracy in %, before and after local training and fine-tuning, a line each.

        Columns: "last round" (mean over clients), "best round" (mean at the round with the best
        validation accuracy; without validation data, with the best test accuracy), "round of best"
        (which that is), "worst tenth" and "sd over clients" (at the last round: mean of the worst
        tenth of clients, standard deviation). Then, of the last round, what
        `Experiment(metrics=...)` named: "auc", and "auc_clients", for how many it is defined.
        """
        return metrics.summary(self.history)

    def predictions(self, when: str | None = None, *, names: bool = False) -> pd.DataFrame:
        """The class scores of all test samples at the end; needs keep_scores=True.

        Columns: client, sample_id (its place in the data), label, predicted (-1 where scores are
        NaN), and of each class score_0, score_1, ..., before softmax. Models are those that clients
        end with, as in `predict`; `when` names others of the last round: "before", "after". With
        `names` classes have the names that the Federation gives them.

        Raises
        ------
        ValueError
            If the run kept no scores, for another moment, and where there are no such names.
        """
        if "test/sample_id" not in self.arrays:
            self._check_ended("class scores")
            raise ValueError(
                f"run {self.id} kept no class scores; run it with Experiment(..., keep_scores=True)"
            )
        if names and not self.class_names:
            raise ValueError("the classes of this run have no names; leave names=True out")
        return metrics.predictions_frame(self.arrays, when, self.class_names if names else ())

    def confusion(self, client: int | str | None = None, when: str | None = None) -> pd.DataFrame:
        """The confusion matrix of a client's test samples at the end; of all clients by default.

        Lines are the classes of samples, columns those answered. The Experiment must have
        metrics=("confusion",); `when` is as for `predictions`.

        Raises
        ------
        ValueError
            If the run has none; for an unknown client, and for another moment.
        """
        if not any(key.endswith("/test/confusion") for key in self.arrays):
            self._check_ended("confusion matrices")
            raise ValueError(
                f"run {self.id} has no confusion matrices; run it with "
                "Experiment(..., metrics=('confusion',))"
            )
        k = None if client is None else self._number(client)
        return metrics.confusion_frame(self.arrays, when, k, self.class_names)

    def kept(self, name: str, device: str = "cpu") -> dict[str, Any]:
        """What the file "models.pt" or "state.pt" that this run wrote holds.

        If the run was computed anew since, this Result's own file is read, which is kept aside.

        Raises
        ------
        ValueError
            If it is nowhere, or damaged.
        """
        assert self.folder is not None  # it lies in the store
        for path in (self.folder / name, *_aside(self.folder, name)):
            if path.is_file() and sums.file_digest(path) == self.sha256.get(name):
                return load_whole(path, device)
        what = f"{name} of run {self.id}"
        if is_whole(self.folder / name):
            raise ValueError(
                f"{what} was written anew since this Result was read, and the old file is not kept "
                f"beside it ({self.folder}.before-...): read it again with run(experiment)"
            )
        state = "damaged: it is not what" if (self.folder / name).exists() else "missing, which"
        raise ValueError(
            f"{name} is {state} run {self.id} wrote; run(experiment, recompute=True) computes "
            "it anew"
        )

    def personal(self, client: int | str) -> Personal:
        """A client's model as served at the end, with what it needs to predict.

        A client is its number, or its name in the Federation. The Experiment must have
        keep_models=True.
        """
        self._check_ended("models")
        if self.folder is None or not self.experiment.keep_models:
            raise ValueError(
                f"run {self.id} kept no models; run it with Experiment(..., keep_models=True)"
            )
        k = self._number(client)
        kept, e = self.kept("models.pt"), self.experiment
        names = "id revision version mean std classes input_shape input_kind".split()
        facts = {name: self.meta[name] for name in names}
        facts |= dict(method=e.method, client=k, model=e.model, dtype=e.dtype, seed=e.seed)
        known = self.meta.get("vocabulary")
        facts["model_args"] = (vocabulary(e) if known is None else known) | e.model_args
        facts |= {"class_names": self.class_names} if self.class_names else {}
        facts["modules"] = self.meta.get("modules", e.plugins)
        if self._own_scores():
            about = dict(n=int(kept["n"][k]), counts=kept["label_counts"][k].tolist())
            facts["scores"] = about | {"experiment": e.plain()}
        facts |= {n: self.meta["score_code"] for n in ("code",) if "score_code" in self.meta}
        weights = {n: v[k] for n, v in kept["models"].items()}
        weights = kept.get("constants", {}) | weights  # an older file has them in its models
        return Personal(json.loads(json.dumps(facts)), weights)

    def _check_ended(self, what: str) -> None:
        # ValueError where a run that failed has no such thing: computed anew it would fail again.
        if not self.ok:
            raise ValueError(f"run {self.id} has no {what}, because it {self.meta['status']}")

    def _number(self, client: int | str) -> int:
        if isinstance(client, str) and self.client_names:
            checks.known("client", client, self.client_names)
            return self.client_names.index(client)
        k, last = checks.whole(client), self.meta["clients"] - 1
        if k is None or not 0 <= k <= last:
            raise ValueError(f"client {client!r} is unknown; this run has clients 0..{last}")
        return k

    def _own_scores(self) -> bool:
        # Whether the class scores are the method's own, and all that they need is kept.
        e = self.experiment
        if "own_scores" in self.meta:
            return self.meta["own_scores"]
        if e.method in METHODS and make_method(e.method, **e.method_args).own_scores:
            raise ValueError(
                f"the class scores of {e.method} need more than the network, and version "
                f"{self.meta['version']} kept only that; run(experiment, recompute=True) keeps all"
            )
        return False

    def model(self, client: int | str) -> nn.Module:
        """What gives a client's class scores, in evaluation mode; needs keep_models=True.

        That is the network as served at the end. Where the scores are the method's own (FedCP, for
        example), it is a module around the network (`Scores`).
        """
        return self.personal(client).net

    def predict(self, client: int | str, x: np.ndarray, *, names: bool = False) -> np.ndarray:
        """Classes (n,) int64 that a client's model gives samples x (n, ...), not normalised.

        With `names` they are the names of classes that the Federation has, (n,) texts.
        """
        return self.personal(client).predict(x, names=names)

    def save(self, client: int | str, path: str | Path) -> None:
        """Write a client's model, with what it needs to predict, to a file for `load_model`."""
        self.personal(client).save(path)

    def __repr__(self) -> str:
        e = self.experiment
        acc = metrics.told({w: f"{v:.2f} %" for w, v in metrics.at_end(self.history).items()})
        # One that diverged was last evaluated in an earlier round.
        at = e.rounds if self.ok else self.history["rounds"].max()
        what = f"{e.method} on {e.dataset}, {e.partition}, {e.clients} clients"
        what += "" if pd.isna(at) else f", round {at}"
        fallen = f", {self._executor}" if " " in self._executor else ""
        return f"Result({self.id}: {what}: {acc}, {self.meta['status']}{fallen})"

    @property
    def _executor(self) -> str:
        # What ran, and what it stands in for where the executor that was asked for could not.
        ran, asked = self.meta["executor"], self.meta.get("executor_asked", "")
        how, _, form = asked.partition(":")
        alike = {asked} if form == "unfold" else {how, f"{how}:unfold"}
        return f"{ran} in place of {asked}" if asked and set(ran.split("+")) - alike else ran

    def _repr_html_(self) -> str:
        e = self.experiment
        facts = {k: self.meta[k] for k in ("status", "device")}
        facts |= {"executor": self._executor, "version": self.meta["version"]}
        facts |= {n: self.meta[n] for n in ("warned",) if n in self.meta}
        cpu = f", {self.meta['cpu_s']:.1f} s of processors" if "cpu_s" in self.meta else ""
        facts |= {"time": f"{self.meta['wall_s']:.1f} s{cpu}", "experiment": e}
        data = "your own data" if e.dataset == "own" else f"{e.dataset}, {e.partition}"
        what = f"{e.method} on {data}, {e.clients} clients, {e.rounds} rounds, seed {e.seed}"
        title = f"{what} (run {self.id}): test accuracy in %"
        return card(title, facts, self.summary().to_html())


def _partition_seed(experiment: Experiment) -> int:
    seed = experiment.partition_seed
    return experiment.seed if seed is None else seed


def _aside(folder: Path, name: str) -> list[Path]:
    # Where a file of a run may be kept that was computed anew, newest first.
    beside = sorted(folder.parent.glob(f"{folder.name}.*"), reverse=True)
    return [path / name for path in beside if re.match(r"\.(before|damaged)", path.suffix)]


def load_result(
    folder: Path, experiment: Experiment | None = None, aside: bool = True
) -> Result | None:
    """The finished run in a folder, None if there is none that can be read.

    Parameters
    ----------
    folder : Path
    experiment : Experiment, optional
        Whose run it must be; its tags become those of the Result.
    aside : bool
        Whether a damaged folder is renamed, with a message. False is for those who do not hold the
        run's lock.

    Raises
    ------
    OSError
        If the disk does not answer: the run may be as good as ever.
    """
    if not folder.is_dir():
        return None
    try:
        return _read(folder, experiment)
    except MemoryError:
        raise
    except Exception as error:  # json, pandas, numpy and zipfile meet damage with nearly any type
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        if aside:
            set_aside(folder, error)
        return None


def _read(folder: Path, experiment: Experiment | None) -> Result | None:
    names = ("experiment.json", "history.csv", "arrays.npz")
    raw = {name: (folder / name).read_bytes() for name in names}
    whole = json.loads(raw["experiment.json"])
    plain, meta = whole["experiment"], whole["meta"]
    _check_whose(plain, meta, folder, experiment)
    written = _digests_of(whole)
    found = digests(plain, meta, folder, names[1:])
    for part, digest in found.items():
        if written is not None and written.get(part) != digest:
            raise ValueError(f"{part} is not as it was written")
    experiment = experiment or Experiment.read(plain)
    history = pd.read_csv(io.BytesIO(raw["history.csv"]), keep_default_na=False)
    history = history.rename(columns=metrics.OLD)
    history["value"] = pd.to_numeric(history["value"])
    with np.load(io.BytesIO(raw["arrays.npz"]), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    if len(arrays["rounds"]) == 0 and meta["status"] == "done":
        raise ValueError("it holds no rounds")
    return Result(experiment, meta, history, arrays, folder, found if written is None else written)


def _digests_of(whole: dict[str, Any]) -> dict[str, str] | None:
    # {file: sha256} of a run; None for runs of the first versions, which wrote none.
    return None if whole["meta"]["schema"] < 2 and "sha256" not in whole else whole["sha256"]


def said_to_be(plain: dict[str, Any]) -> Experiment:
    """The Experiment that a file says a run is of; reading it runs no code that the file names."""
    return _made(json.dumps(plain))


@functools.lru_cache(maxsize=2**14)
def _made(plain: str) -> Experiment:
    # Tables ask for the same ones for each of their cells.
    return Experiment.read(json.loads(plain))


def _check_whose(
    plain: dict[str, Any], meta: dict[str, Any], folder: Path, experiment: Experiment | None
) -> None:
    # Those of older schemas are read, and are the run of none of today's Experiments.
    if meta["schema"] > SCHEMA or experiment is not None and meta["schema"] != SCHEMA:
        raise ValueError(
            f"written with schema {meta['schema']} of the store, this version has {SCHEMA}"
        )
    if meta["id"] != folder.name:
        raise ValueError(f"it is run {meta['id']}")
    if experiment is None:
        return
    # Not all fields: a run of an earlier version lacks those that are new.
    mine = json.loads(json.dumps(not_default(experiment.plain())))
    if not_default(plain) != mine:
        try:
            written = said_to_be(plain).checked()  # in another way, perhaps
        except (ValueError, TypeError) as error:  # of a later version, or of code that is gone
            raise ValueError(f"it is of another Experiment: {error}") from error
        if written.canonical() != experiment.canonical():
            raise ValueError("it is of another Experiment")


def read_about(folder: Path) -> dict[str, Any] | None:
    """What experiment.json of a run's folder holds, without a look at the other files.

    None where it cannot be read, or is not as it was written.
    """
    try:
        whole = json.loads((folder / "experiment.json").read_bytes())
        written = _digests_of(whole)
        digest = _digest(whole["experiment"], whole["meta"])
        same = written is None or written["experiment.json"] == digest
        kinds = {type(whole["experiment"]), type(whole["meta"])}
        return whole if same and kinds == {dict} else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def is_whole(path: Path) -> bool:
    """Whether a file is there, and is what the run in whose folder it lies wrote."""
    about = read_about(path.parent)
    if not about or not path.is_file():
        return False
    written = _digests_of(about)
    return written is None or written.get(path.name) == sums.file_digest(path)


FILES = ("history.csv", "arrays.npz", "models.pt", "state.pt", "code.txt")


def digests(
    plain: dict[str, Any], meta: dict[str, Any], folder: Path, names: Iterable[str] = FILES
) -> dict[str, str]:
    """sha256 (hex) of the parts of a finished run: {file: digest}.

    Under "experiment.json" it is that of `plain` and `meta`, which this file holds; the others are
    those of `names` that are in the folder.
    """
    there = [name for name in names if (folder / name).exists()]
    whole = {"experiment.json": _digest(plain, meta)}
    return whole | {name: sums.file_digest(folder / name) for name in there}


def _digest(plain: dict[str, Any], meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps([plain, meta], sort_keys=True).encode()).hexdigest()


def finished(start: str = "") -> Iterable[Result]:
    """The finished runs of the store whose ids begin with `start`, oldest first.

    One that cannot be read is left out. Each is shown once on trial, so that a run of other hands
    that lacks something is named in a message here, and does not stop whoever asks for all of them.
    """
    files = paths.store_folder().glob(f"{start}*/experiment.json")
    files = [f for f in files if "." not in f.parent.name]
    for folder in sorted((f.parent for f in files), key=lambda f: f.stat().st_mtime):
        try:
            found = _read(folder, None)
            if found is None:
                continue
            _ = repr(found), found.rows
        except Exception as error:  # as in `load_result`
            message = f"{folder.name} is left out: it cannot be read ({error!r:.100})"
            say(message, error=True)
            continue
        yield found


SAID_AFTER = 5.0  # seconds of waiting for another process


@contextlib.contextmanager
def locked(lock: Path, what: str = "") -> Iterator[None]:
    """Within it no other process computes the run whose lock this is; it says if it waits.

    Who may write in the lock's folder may take the lock. `what` is done, in a message, if no run is
    computed.
    """
    what = what or f"run {lock.stem} is computed"
    if lock.is_symlink() or lock.is_dir():
        set_aside(lock, "it is no lock of a run")
    held = FileLock(lock, mode=0o666 & lock.parent.stat().st_mode)
    try:
        held.acquire(timeout=SAID_AFTER)
    except Timeout:
        say(f"{what} by another process, which is waited for ({lock})")
        held.acquire()
    try:
        yield
    finally:
        held.release()


def clear_way(path: Path) -> None:
    """Set aside what stands where a run's folder is to be, and is no folder."""
    if path.is_symlink() or os.path.lexists(path) and not path.is_dir():
        set_aside(path, "it is no folder of a run")


def set_aside(path: Path, error: Exception | str) -> None:
    """Rename what cannot be read to NAME.damaged, with a message; nothing is deleted."""
    names = (f"{path.name}.damaged{i or ''}" for i in itertools.count())
    away = next(path.with_name(n) for n in names if not os.path.lexists(path.with_name(n)))
    os.replace(path, away)
    say(
        f"{path.name} could not be read ({error!r:.100}); set aside as {away.name}, computing again"
    )
