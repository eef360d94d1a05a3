"""The run store: finished runs as folders, read back as Results."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from pfl_core.engine import probes
from pfl_core.engine.checkpoint import load_whole
from pfl_core.experiments import metrics
from pfl_core.experiments.build import vocabulary
from pfl_core.experiments.experiment import SCHEMA, TAGS, Experiment
from pfl_core.experiments.metrics import ROW_COLUMNS
from pfl_core.experiments.personal import Personal
from pfl_core.util import paths
from pfl_core.util.cards import card


@dataclass(frozen=True, eq=False)
class Result:
    """A finished (or failed) run: `history` rows, `clients` per-client rows, `arrays`, and what it ran on in `meta`."""

    experiment: Experiment
    meta: dict[str, Any]
    history: pd.DataFrame
    arrays: dict[str, np.ndarray]
    folder: Path | None = None

    @property
    def id(self) -> str:
        """The run's id."""
        return self.meta["id"]

    @property
    def ok(self) -> bool:
        """Whether the run reached its last round."""
        return self.meta["status"] == "done"

    @property
    def rows(self) -> pd.DataFrame:
        """The history in the one long form of the project, one number a row. The column mean is rows["mean"]: rows.mean is pandas' own."""
        e, m = self.experiment, self.meta
        head = {"run": self.id} | {t: e.tags.get(t, "") for t in TAGS[:4]}
        head |= dict(
            method=e.method,
            dataset=e.dataset,
            partition=e.partition,
            model=e.model,
            seed=e.seed,
            profile=e.tags.get("profile", ""),
        )
        tail = dict(
            n_clients=m["clients"],
            device=m["device"],
            executor=m["executor"],
            revision=m["revision"],
            version=m["version"],
        )
        return self.history.assign(**head, **tail, wall_s=round(m["wall_s"], 2))[ROW_COLUMNS]

    @property
    def clients(self) -> pd.DataFrame:
        """Accuracy of every client at every evaluated round: round, when, split, client, acc_pct, n."""
        return metrics.clients_frame(self.arrays)

    def probe(self, name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """What a probe of `record` measured: the rounds (E,) and {key: (E, ...)}; ValueError if the run did not record it."""
        return probes.read(self.arrays, name)

    def summary(self) -> pd.DataFrame:
        """Test accuracy in %, a line a `when`: client mean at the last round and at the best validation round (else best test), worst
        tenth and sd over clients at the last; traffic in MB and seconds are totals of the run."""
        return metrics.summary(self.history)

    def kept(self, name: str, device: str = "cpu") -> dict[str, Any]:
        """What a file of this run's folder holds, "models.pt" or "state.pt"; ValueError if it is another run's, or damaged."""
        path = self.folder / name
        whole = json.loads((self.folder / "experiment.json").read_text())
        if whole["sha256"].get(name) != file_digest(path):
            raise ValueError(f"{name} is damaged: it is not what run {self.id} wrote")
        return load_whole(path, device)

    def personal(self, client: int) -> Personal:
        """Client `client`'s personal model as served at the end, with what it needs to predict; needs keep_models=True."""
        if self.folder is None or not (self.folder / "models.pt").exists():
            raise ValueError(
                f"run {self.id} kept no models; run it with Experiment(..., keep_models=True)"
            )
        if not 0 <= client < self.meta["clients"]:
            raise ValueError(
                f"client {client} is unknown; this run has clients 0..{self.meta['clients'] - 1}"
            )
        e = self.experiment
        weights = {n: v[client] for n, v in self.kept("models.pt")["models"].items()}
        facts = {
            n: self.meta[n]
            for n in (
                "id",
                "revision",
                "version",
                "mean",
                "std",
                "classes",
                "input_shape",
                "input_kind",
            )
        }
        facts |= dict(
            method=e.method,
            client=client,
            model=e.model,
            model_args=vocabulary(e) | e.model_args,
            dtype=e.dtype,
        )
        return Personal(facts, weights)

    def model(self, client: int) -> nn.Module:
        """Client `client`'s personal model as served at the end, in evaluation mode; needs keep_models=True."""
        return self.personal(client).net

    def predict(self, client: int, x: np.ndarray) -> np.ndarray:
        """Classes (n,) int64 that client `client`'s personal model gives samples x (n, ...), as they are before normalisation."""
        return self.personal(client).predict(x)

    def save(self, client: int, path: str | Path) -> None:
        """Write client `client`'s personal model with normalisation, classes and the network's name; `load_model` reads it."""
        self.personal(client).save(path)

    def __repr__(self) -> str:
        e, acc = (
            self.experiment,
            self.history.query("metric == 'acc_pct' and mean == 'client' and split == 'test'"),
        )
        last = f"{acc.value.iloc[-1]:.2f} % ({acc.when.iloc[-1]})" if len(acc) else "no test data"
        what = f"{e.method} on {e.dataset}, {e.partition}, {e.clients} clients"
        return f"Result({self.id}: {what}, round {e.rounds}: {last}, {self.meta['status']})"

    def _repr_html_(self) -> str:
        e, facts = (
            self.experiment,
            {k: self.meta[k] for k in ("status", "device", "executor", "version")},
        )
        facts |= {"time": f"{self.meta['wall_s']:.1f} s", "experiment": e}
        title = f"{e.method} on {e.dataset}, {e.partition}, {e.clients} clients, {e.rounds} rounds (run {self.id}): test accuracy in %"
        return card(title, facts, self.summary().to_html())


def load_result(folder: Path, e: Experiment | None = None, aside: bool = True) -> Result | None:
    """The finished run in `folder`, None if there is none; a damaged one is set aside with a message. `e` brings its tags.

    aside=False leaves a damaged one where it is: for those who do not hold the run's lock.
    """
    if not folder.is_dir():
        return None
    try:
        raw = {
            name: (folder / name).read_bytes()
            for name in ("experiment.json", "history.csv", "arrays.npz")
        }
        z = json.loads(raw["experiment.json"])
        _check_whose(z, folder, e)
        for part, digest in digests(
            z["experiment"], z["meta"], folder, ("history.csv", "arrays.npz")
        ).items():
            if z["sha256"].get(part) != digest:
                raise ValueError(f"{part} is not as it was written")
        if e is None and (
            foreign := [m for m in _plugins(z["experiment"]) if m not in sys.modules]
        ):
            print(
                f"{folder.name}: its method or model is in a module of its own; import {foreign[0]} first, if it is yours"
            )
            return None  # reading a folder runs no code that it names
        history = pd.read_csv(io.BytesIO(raw["history.csv"]), keep_default_na=False)
        history["value"] = pd.to_numeric(history["value"])
        with np.load(io.BytesIO(raw["arrays.npz"]), allow_pickle=False) as a:
            arrays = {k: a[k] for k in a.files}
        if len(arrays["rounds"]) == 0 and z["meta"]["status"] == "done":
            raise ValueError("it holds no rounds")
        return Result(
            e or Experiment.from_plain(z["experiment"]), z["meta"], history, arrays, folder
        )
    except MemoryError:
        raise
    except Exception as error:  # json, pandas, numpy and zipfile meet damage with nearly any type
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise  # a disk that does not answer, too many open files: the run may be as good as ever
        if aside:
            set_aside(folder, error)
        return None


def _plugins(plain: dict[str, Any] | None) -> list[str]:
    return [*plain["plugins"], *_plugins(plain["init_from"])] if plain else []


def _check_whose(z: dict[str, Any], folder: Path, e: Experiment | None) -> None:
    if z["meta"]["schema"] != SCHEMA:
        raise ValueError(
            f"written with schema {z['meta']['schema']} of the store, this version has {SCHEMA}"
        )
    if z["meta"]["id"] != folder.name:
        raise ValueError(f"it is run {z['meta']['id']}")
    if e is not None and z["experiment"] != json.loads(json.dumps(e.plain())):
        raise ValueError("it is of another Experiment")


def read_meta(folder: Path) -> dict[str, Any] | None:
    """What the finished run in `folder` ran on, None where that cannot be read; no more of it is looked at."""
    try:
        return json.loads((folder / "experiment.json").read_text())["meta"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


FILES = ("history.csv", "arrays.npz", "models.pt", "state.pt")


def digests(
    plain: dict[str, Any], meta: dict[str, Any], folder: Path, names: Iterable[str] = FILES
) -> dict[str, str]:
    """sha256 (hex) of what a finished run consists of: its experiment and meta, and those of its files that are there."""
    whole = hashlib.sha256(json.dumps([plain, meta], sort_keys=True).encode()).hexdigest()
    return {"experiment.json": whole} | {
        n: file_digest(folder / n) for n in names if (folder / n).exists()
    }


def file_digest(path: Path) -> str:
    """sha256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def finished() -> Iterable[Result]:
    """The finished runs of the store, oldest first; each folder alone: what cannot be read is left out, with a message."""
    folders = (paths.store_folder()).glob("*")
    for folder in sorted(
        (f for f in folders if f.is_dir() and "." not in f.name), key=lambda f: f.stat().st_mtime
    ):
        try:
            if found := load_result(folder, aside=False):
                (
                    repr(found),
                    found.rows,
                )  # what all of those who ask need: a run of other hands may lack it
                yield found
        except (MemoryError, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            print(f"{folder.name} is left out: it cannot be read ({error!r:.100})", file=sys.stderr)


def set_aside(path: Path, error: Exception | str) -> None:
    """Rename what cannot be read to NAME.damaged, with a message; nothing is deleted."""
    for i in itertools.count():
        away = path.with_name(f"{path.name}.damaged{i or ''}")
        if not away.exists():
            break
    os.replace(path, away)
    print(
        f"{path.name} could not be read ({error!r:.100}); set aside as {away.name}, computing again"
    )
