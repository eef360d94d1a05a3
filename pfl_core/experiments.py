"""Experiment (frozen, hashed) -> Result, through a run store in which nothing computed is lost."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from filelock import FileLock, Timeout
from torch import nn

import pfl_core
from pfl_core import data, models
from pfl_core import partition as partitions
from pfl_core.engine import EXECUTORS
from pfl_core.federation import PLANS, Federation
from pfl_core.methods.base import METHODS, Method, State, Task, head_models, make_method
from pfl_core.progress import Progress
from pfl_core.simulate import Diverged, History, final_models, simulate

SCHEMA = 1  # of the run store; a run of another schema is computed again
TAGS = ("paper", "artefact", "row", "column", "profile")
_RANGES = {  # field: (test, what is allowed)
    "clients": (lambda v: v >= 1, "an integer >= 1"),
    "rounds": (lambda v: v >= 0, "an integer >= 0"),
    "participation": (lambda v: 0 < v <= 1, "a share in (0, 1]"),
    "epochs": (lambda v: v >= 0, "an integer >= 0"),
    "steps": (lambda v: v >= 0, "an integer >= 0 (0: count in epochs)"),
    "batch": (lambda v: v >= 1, "an integer >= 1"),
    "plan": (PLANS.__contains__, "one of " + ", ".join(PLANS)),
    "lr": (lambda v: v >= 0, "a number >= 0"),
    "momentum": (lambda v: 0 <= v < 1, "a number in [0, 1)"),
    "weight_decay": (lambda v: v >= 0, "a number >= 0"),
    "clip": (lambda v: v >= 0, "a number >= 0 (0: no clipping)"),
    "buffers": (("local", "average", "reset").__contains__, "one of local, average, reset"),
    "head_depth": (lambda v: v >= 0, "an integer >= 0"),
    "head_by": (("block", "child", "module", "tensor").__contains__, "one of block, child, module, tensor"),
    "head_init": (("common", "own").__contains__, "common or own"),
    "holdout": (lambda v: 0 <= v < 1, "a share in [0, 1)"),
    "normalize": (("dataset", "half").__contains__, "dataset (its mean and std) or half ((x - .5) / .5)"),
    "max_samples": (lambda v: v >= 0, "an integer >= 0 (0: all)"),
    "eval_every": (lambda v: v >= 1, "an integer >= 1"),
    "dtype": (("float32", "float64").__contains__, "float32 or float64"),
}


@dataclass(frozen=True, eq=False)
class Experiment:
    """Everything that decides a run's numbers, as plain values; checked at construction.

    Training: `epochs` (or `steps`) of SGD on batches of `batch` a round, drawn by `plan` (see Federation.plan). `buffers`: BatchNorm
    statistics stay "local", are "average"d, or "reset". `max_samples` caps each client's train, val and test lists. `head_depth` layers counted from the end by `head_by` are the head. `seed` decides
    initial model, participants and batches; `partition_seed` (default: seed) who holds what. `tags` label rows and are not hashed.
    Raises ValueError naming the field, the value, and what is allowed.
    """

    dataset: str = "digits"
    partition: str = "dirichlet"
    partition_args: dict = field(default_factory=dict)
    clients: int = 10
    model: str = "cnn"
    model_args: dict = field(default_factory=dict)
    method: str = "fedavg"
    method_args: dict = field(default_factory=dict)
    rounds: int = 10
    participation: float = 1.0
    epochs: int = 1
    steps: int = 0
    batch: int = 32
    plan: str = "wrap"
    shuffle: bool = True
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    buffers: str = "local"
    head_depth: int = 1
    head_by: str = "block"
    head_init: str = "common"
    holdout: float = 0.0
    normalize: str = "dataset"
    max_samples: int = 0
    eval_every: int = 1
    eval_after: bool = True
    seed: int = 0
    partition_seed: int | None = None
    dtype: str = "float32"
    keep_models: bool = False
    init_from: Experiment | None = None
    plugins: tuple[str, ...] = ()
    tags: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            _check_type(f.name, getattr(self, f.name), f.type)
        for name, (legal, allowed) in _RANGES.items():
            if not legal(getattr(self, name)):
                raise ValueError(f"Experiment({name}={getattr(self, name)!r}): allowed is {allowed}")
        object.__setattr__(self, "plugins", tuple(self.plugins))
        if unknown := set(self.tags) - set(TAGS):
            raise ValueError(
                f"Experiment(tags={self.tags!r}): unknown {sorted(unknown)}; allowed are {', '.join(TAGS)}"
            )
        try:
            plain = json.loads(json.dumps(self.plain()))
        except (TypeError, ValueError) as e:
            raise ValueError(
                f"Experiment holds a value that JSON cannot keep ({e}); use numbers, strings, lists, dicts"
            ) from None
        if plain != json.loads(json.dumps(plain)):
            raise ValueError("Experiment holds NaN; every value must equal itself after a round trip through JSON")
        for plugin in self.plugins:
            importlib.import_module(plugin)
        if self.dataset != "own":
            data.check_name(self.dataset)
            partitions.check(self.partition, self.partition_args)
        models.check_name(self.model)
        make_method(self.method, **self.method_args)

    def but(self, **changes: Any) -> Experiment:
        """A copy with fields changed; dict-valued fields (model_args, tags, ...) are merged into the old ones."""
        merged = {
            k: getattr(self, k) | v if isinstance(v, dict) else v
            for k, v in changes.items()
            if k in self.__dataclass_fields__
        }
        return dataclasses.replace(self, **(changes | merged))

    def plain(self) -> dict[str, Any]:
        """The hashed fields as JSON-able values."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "tags"}
        return out | {"plugins": list(self.plugins), "init_from": self.init_from.plain() if self.init_from else None}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Experiment:
        """The Experiment whose `plain()` this is."""
        source = plain.get("init_from")
        return cls(
            **plain | {"plugins": tuple(plain.get("plugins", ())), "init_from": source and cls.from_plain(source)}
        )

    @functools.cached_property
    def id(self) -> str:
        """16 hex digits over the hashed fields, the pool's checksum, the store's schema and the method's revision. Needs the data."""
        return self.id_for(data.load(self.dataset).checksum)

    def id_for(self, checksum: str) -> str:
        """The id over data with another checksum (a user's own Federation)."""
        source = self.init_from.id_for(checksum) if self.init_from else None
        key = self.plain() | {
            "init_from": source,
            "pool": checksum,
            "schema": SCHEMA,
            "revision": METHODS[self.method].revision,
        }
        return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != _default(f)
        ]
        return f"Experiment({', '.join(changed)})"


def _default(f: dataclasses.Field) -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


def _check_type(name: str, value: Any, declared: str) -> None:
    kinds = {"str": str, "int": int, "bool": bool, "float": (int, float), "dict": dict, "int | None": (int, type(None))}
    kinds |= {"Experiment | None": (Experiment, type(None)), "tuple[str, ...]": (tuple, list)}
    if not isinstance(value, kinds[declared]) or (isinstance(value, bool) and declared not in ("bool",)):
        raise ValueError(f"Experiment({name}={value!r}): got {type(value).__name__}, allowed is {declared}")
    if isinstance(value, float) and not np.isfinite(value):
        raise ValueError(f"Experiment({name}={value!r}): allowed is a finite number")


# -- building ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def _split(dataset: str, partition: str, args: str, clients: int, seed: int) -> partitions.Split:
    return partitions.partition(partition, data.load(dataset), clients, seed, **json.loads(args))


def federation(e: Experiment, device: str = "cpu") -> Federation:
    """The clients of an Experiment on a device."""
    pool = data.load(e.dataset)
    seed = e.seed if e.partition_seed is None else e.partition_seed
    s = _split(e.dataset, e.partition, json.dumps(e.partition_args, sort_keys=True), e.clients, seed)
    mean, std = (pool.mean, pool.std) if e.normalize == "dataset" else ([0.5] * 3, [0.5] * 3)
    if mean is not None:
        channels = 1 if pool.x.ndim == 3 else pool.x.shape[-1]
        mean, std = list(mean)[:channels], list(std)[:channels]
    kw = dict(
        classes=pool.classes,
        mean=mean,
        std=std,
        device=device,
        dtype=getattr(torch, e.dtype),
        holdout=e.holdout,
        seed=e.seed,
    )
    cap = e.max_samples or None
    lists = (
        [i[:cap] for i in part] for part in (s.train, s.val, s.test)
    )  # in random order, so a start is a random part
    return Federation(pool.x, pool.y, *lists, name=e.dataset, **kw)


def build_method(e: Experiment, fed: Federation) -> Method:
    """The Experiment's method, bound to its model and clients."""
    make = functools.partial(models.build, e.model, fed.input_shape, fed.classes, **_vocabulary(e) | e.model_args)
    dtype = getattr(torch, e.dtype)
    model = make(seed=e.seed).to(fed.device, dtype)
    heads = None
    if e.head_init == "own":
        names = models.head(model, e.head_depth, e.head_by)
        drawn = head_models(lambda k: make(seed=_own_seed(e.seed, k)), names, fed.K)
        heads = {n: v.to(fed.device, dtype if v.is_floating_point() else v.dtype) for n, v in drawn.items()}
    task = Task(
        model,
        fed.n,
        fed.label_counts,
        head_depth=e.head_depth,
        head_by=e.head_by,
        buffers=e.buffers,
        rounds=e.rounds,
        lr=e.lr,
        epochs=e.epochs,
        holdout=e.holdout,
        seed=e.seed,
        heads=heads,
    )
    return make_method(e.method, **e.method_args).bind(task)


def _own_seed(seed: int, k: int) -> int:
    return (seed + 1) * 100_003 + k


def _vocabulary(e: Experiment) -> dict[str, int]:
    if e.dataset == "own" or "vocab" not in (pool := data.load(e.dataset)).extra:
        return {}
    return {"vocab": len(pool.extra["vocab"])}


# -- the store -----------------------------------------------------------------------------------------------------------


def runs_root() -> Path:
    """Where runs are kept: $PFL_RUNS, else runs/ beside the checked-out package, else runs/ below the current folder."""
    if os.environ.get("PFL_RUNS"):
        return Path(os.environ["PFL_RUNS"])
    checkout = Path(pfl_core.__file__).resolve().parent.parent
    return (checkout if (checkout / "pyproject.toml").exists() else Path.cwd()) / "runs"


def results_folder() -> Path:
    """Where committed rows are: results/ beside the checked-out package."""
    return Path(pfl_core.__file__).resolve().parent.parent / "results"


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
        """The history in the one long form of the project, one number a row."""
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
        rounds, frames = self.arrays["rounds"], []
        for key in self.arrays:
            if key.endswith("/correct"):
                when, split, _ = key.split("/")
                n = self.arrays[f"n/{split}"]
                with np.errstate(invalid="ignore"):
                    acc = 100 * self.arrays[key] / n
                r, k = np.meshgrid(rounds, np.arange(len(n)), indexing="ij")
                part = dict(
                    round=r.ravel(),
                    when=when,
                    split=split,
                    client=k.ravel(),
                    acc_pct=acc.ravel(),
                    n=np.tile(n, len(rounds)),
                )
                frames.append(pd.DataFrame(part))
        return pd.concat(frames, ignore_index=True)

    def model(self, client: int) -> nn.Module:
        """Client `client`'s personal model as served at the end, in evaluation mode; needs keep_models=True."""
        if self.folder is None or not (self.folder / "models.pt").exists():
            raise ValueError(f"run {self.id} kept no models; run it with Experiment(..., keep_models=True)")
        if not 0 <= client < self.meta["clients"]:
            raise ValueError(f"client {client} is unknown; this run has clients 0..{self.meta['clients'] - 1}")
        e = self.experiment
        z = torch.load(self.folder / "models.pt", weights_only=True)
        net = models.build(
            e.model, tuple(self.meta["input_shape"]), self.meta["classes"], **_vocabulary(e) | e.model_args
        )
        net.to(getattr(torch, e.dtype)).load_state_dict({n: v[client] for n, v in z["models"].items()})
        return net.eval()

    def save(self, client: int, path: str | Path) -> None:
        """Write client `client`'s personal model as a state_dict (torch.save); needs keep_models=True."""
        torch.save(self.model(client).state_dict(), path)

    def __repr__(self) -> str:
        e, acc = self.experiment, self.history.query("metric == 'acc_pct' and mean == 'client' and split == 'test'")
        last = f"{acc.value.iloc[-1]:.2f} % ({acc.when.iloc[-1]})" if len(acc) else "no test data"
        return f"Result({self.id}: {e.method} on {e.dataset}, {e.partition}, {e.clients} clients, round {e.rounds}: {last}, {self.meta['status']})"


ROW_COLUMNS = (
    "run paper artefact row column method dataset partition model seed profile round when split mean metric value "
    "n_clients device executor revision version wall_s"
).split()


def run(
    e: Experiment,
    *,
    device: str = "auto",
    executor: str = "auto",
    workers: int | None = None,
    store: Path | None = None,
    fed: Federation | None = None,
    on_round: Callable[[int, History], bool | None] | None = None,
) -> Result:
    """The stored result of an Experiment, or its computation, resumed from the last checkpoint if there is one.

    device "auto" | "cpu" | "cuda"; executor and workers as for Engine; `fed` replaces the Experiment's own data and clients (dataset="own").
    Raises DatasetMissing or ValueError before training; Diverged runs are stored as failed and returned. Waits while another process
    computes the same run.
    """
    device = pick_device(device)
    if executor not in EXECUTORS:
        raise ValueError(f"executor {executor!r} is unknown; use one of {', '.join(EXECUTORS)}")
    if (e.dataset == "own") != (fed is not None):
        raise ValueError(
            'dataset="own" and a Federation go together: run(Experiment(dataset="own", ...), fed=Federation(...))'
        )
    run_id = e.id_for(fed.hash) if fed is not None else e.id
    store = store or runs_root() / "store"
    _make_folder(store)
    folder = store / run_id
    found = load_result(folder, e)
    if found:
        return found
    with FileLock(store / f"{run_id}.lock"):
        return load_result(folder, e) or _compute(e, run_id, folder, device, executor, workers, fed, on_round, store)


def _compute(e, run_id, folder, device, executor, workers, fed, on_round, store) -> Result:
    fed = fed or federation(e, device)
    method = build_method(e, fed)
    state = _initial_state(e, method, store, device, executor, workers)
    work = folder.with_suffix(".part")
    _make_folder(work)
    checkpoint = work / "checkpoint.pt"
    _drop_damaged(checkpoint)
    used = _recorded_executor(work, executor, device)
    history, status, wall = History(), "done", time.monotonic()
    keep = {"history": history}

    def watch(r: int, h: History) -> bool | None:
        keep["history"] = h
        return on_round(r, h) if on_round else None

    try:
        with Progress(e.rounds, f"{e.method} {e.dataset} seed {e.seed}") as bar:
            step = lambda r, h: (bar.update(r - bar.done), watch(r, h))[1]  # noqa: E731
            out = simulate(
                method, fed, e, executor=used, workers=workers, state=state, checkpoint=checkpoint, on_round=step
            )
        final, history, before, after = out
    except Diverged as error:
        history, status, before = keep["history"], f"failed: {error}", {}
        final = None
    meta = dict(
        id=run_id,
        status=status,
        schema=SCHEMA,
        revision=method.revision,
        version=pfl_core.__version__,
        clients=fed.K,
        classes=fed.classes,
        input_shape=list(fed.input_shape),
        parameters=sum(v.numel() for n, v in method.task.initial.items() if n in method.task.parameters),
        device=_device_name(device),
        executor=used,
        torch=torch.__version__,
        python=platform.python_version(),
        partition_hash=fed.hash,
        leaks_test=method.leaks_test,
        wall_s=history.wall[-1] if history.wall else time.monotonic() - wall,
    )
    arrays = {"rounds": np.array(history.rounds, dtype=np.int64)}
    arrays |= {k: torch.stack(v[: len(history.rounds)]).numpy() for k, v in history.evals.items() if history.rounds}
    arrays |= {f"n/{s}": np.array([len(i) for i in fed.index[s]]) for s in ("train", "val", "test")}
    if e.keep_models and final is not None:
        _save_models(work / "models.pt", final, before, method)
    _history_frame(history, fed, arrays, method).to_csv(work / "history.csv", index=False)
    np.savez_compressed(work / "arrays.npz", **arrays)
    (work / "experiment.json").write_text(json.dumps({"experiment": e.plain(), "meta": meta}, indent=1))
    checkpoint.unlink(missing_ok=True)
    (work / "executor").unlink(missing_ok=True)
    os.replace(work, folder)
    return load_result(folder, e)


def _initial_state(
    e: Experiment, method: Method, store: Path, device: str, executor: str, workers: int | None
) -> State | None:
    # Another experiment's end: its global model (or the mean of its personal ones) becomes the common initial model.
    if e.init_from is None:
        return None
    source = run(e.init_from.but(keep_models=True), device=device, executor=executor, workers=workers, store=store)
    z = torch.load(source.folder / "models.pt", map_location=device, weights_only=True)
    initial = method.task.initial
    for n in initial:
        v = z["server"].get(n, z["models"][n].mean(0) if z["models"][n].is_floating_point() else z["models"][n][0])
        if v.shape != initial[n].shape:
            raise ValueError(
                f"init_from has {n} of shape {tuple(v.shape)}, this model needs {tuple(initial[n].shape)}; use the same model"
            )
        initial[n] = v.clone()
    return None


def _save_models(path: Path, final: State, before: dict, method: Method) -> None:
    kept = {
        "models": final_models(before, method.task.names),
        "server": final.server,
        "clients": final.clients,
        "extra": final.extra,
    }
    torch.save(kept, path)


def _history_frame(h: History, fed: Federation, arrays: dict[str, np.ndarray], method: Method) -> pd.DataFrame:
    size = torch.finfo(fed.dtype).bits // 8
    out = []
    for key in [k for k in arrays if k.endswith("/correct")]:
        when, split, _ = key.split("/")
        n = arrays[f"n/{split}"]
        has = n > 0
        if not has.any():
            continue
        acc = 100 * arrays[key][:, has] / n[has]
        loss = arrays[key.replace("correct", "loss")]
        spread = {
            "acc_pct": acc.mean(1),
            "acc_sd": acc.std(1),
            "acc_min": acc.min(1),
            "acc_max": acc.max(1),
            "acc_p10": np.percentile(acc, 10, axis=1),
        }
        spread["acc_worst10"] = np.sort(acc, 1)[:, : max(1, acc.shape[1] // 10)].mean(1)
        series = [("client", m, v) for m, v in spread.items()]
        series += [("pooled", "acc_pct", 100 * arrays[key].sum(1) / n.sum()), ("pooled", "loss", loss.sum(1) / n.sum())]
        for mean, metric, values in series:
            frame = pd.DataFrame({"round": arrays["rounds"], "value": values})
            out.append(frame.assign(when=when, split=split, mean=mean, metric=metric))
    totals = {"download_bytes": h.download, "upload_bytes": h.upload, "client_visits": h.steps, "train_s": h.wall}
    for metric, values in totals.items():
        scale = size if metric.endswith("bytes") else 1
        frame = pd.DataFrame(
            {"round": arrays["rounds"], "value": np.array(values[: len(arrays["rounds"])], dtype=float) * scale}
        )
        out.append(frame.assign(when="", split="", mean="total", metric=metric))
    return pd.concat(out, ignore_index=True)[["round", "when", "split", "mean", "metric", "value"]]


def load_result(folder: Path, e: Experiment | None = None) -> Result | None:
    """The finished run in `folder`, None if there is none; a damaged one is set aside with a message. `e` brings its tags."""
    if not folder.is_dir():
        return None
    try:
        z = json.loads((folder / "experiment.json").read_text())
        history = pd.read_csv(folder / "history.csv", keep_default_na=False)
        history["value"] = pd.to_numeric(history["value"])
        with np.load(folder / "arrays.npz", allow_pickle=False) as a:
            arrays = {k: a[k] for k in a.files}
        if z["meta"]["schema"] != SCHEMA or len(arrays["rounds"]) == 0 and z["meta"]["status"] == "done":
            raise ValueError("schema or rounds do not fit")
        return Result(e or Experiment.from_plain(z["experiment"]), z["meta"], history, arrays, folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        _set_aside(folder, error)
        return None


def _set_aside(path: Path, error: Exception | str) -> None:
    for i in itertools.count():
        away = path.with_name(f"{path.name}.damaged{i or ''}")
        if not away.exists():
            break
    os.replace(path, away)
    print(
        f"{path.name} could not be read ({type(error).__name__ if isinstance(error, Exception) else error}); set aside as {away.name}, computing again"
    )


def _drop_damaged(checkpoint: Path) -> None:
    if not checkpoint.exists():
        return
    try:
        torch.load(checkpoint, map_location="cpu", weights_only=True)["round"]
    except Exception as error:  # any unreadable file: torch raises many types for it
        _set_aside(checkpoint, error)


def _recorded_executor(work: Path, executor: str, device: str) -> str:
    # A resumed run keeps the executor it began with, so that its numbers are of one kind.
    note = work / "executor"
    if note.exists() and (work / "checkpoint.pt").exists():
        return note.read_text()
    chosen = executor if executor != "auto" else ("threads" if device == "cpu" else "batched")
    note.write_text(chosen)
    return chosen


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"cannot make the folder {path} ({error.strerror}); set PFL_RUNS to a folder that can be written"
        ) from None


def pick_device(device: str) -> str:
    """ "cpu" or "cuda": "auto" takes $PFL_DEVICE, else a GPU where there is one; ValueError for a GPU that is not there."""
    if device == "auto":
        device = os.environ.get("PFL_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is unknown; use auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but torch sees no GPU here; use device='cpu' or 'auto'")
    return device


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


# -- many runs -----------------------------------------------------------------------------------------------------------


def grid(
    base: Experiment, rows: dict[str, dict], columns: dict[str, dict] | None = None, seeds: Iterable[int] = (0,)
) -> list[Experiment]:
    """One Experiment for each row x column x seed: labels -> changed fields (as for `but`); the labels become tags."""
    cells = itertools.product(columns.items() if columns else [("", {})], rows.items(), seeds)
    return [base.but(**c).but(**r).but(seed=s, tags={"row": rl, "column": cl}) for (cl, c), (rl, r), s in cells]


def sweep(
    experiments: Iterable[Experiment], *, recompute: bool = True, jobs: int = 1, store: Path | None = None, **how: Any
) -> pd.DataFrame:
    """Rows of all experiments, computing what neither the store nor (unless recompute) the committed results/ holds.

    jobs > 1 computes in that many processes. Failed runs leave a message and no rows of theirs. `how` goes to `run`.
    """
    experiments = list(experiments)
    if not experiments:
        return pd.DataFrame(columns=ROW_COLUMNS)
    store = store or runs_root() / "store"
    committed = {} if recompute else _committed()
    missing = {}
    for e in experiments:
        if e.id not in committed or (store / e.id).is_dir():
            missing.setdefault(e.id, e)
    with Progress(len(missing), "runs") as bar:
        done = {}
        for result in _run_all(list(missing.values()), jobs, store, how):
            done[result.id] = result
            bar.update()
            if not result.ok:
                print(
                    f"run {result.id} ({result.experiment.method}, seed {result.experiment.seed}) {result.meta['status']}"
                )
    frames = []
    for e in experiments:
        if e.id in done:
            r = done[e.id]
            frames.append(dataclasses.replace(r, experiment=e).rows if r.ok else pd.DataFrame(columns=ROW_COLUMNS))
        else:
            tags = {t: e.tags.get(t, "") for t in TAGS}
            frames.append(committed[e.id].assign(**tags)[ROW_COLUMNS])
    return pd.concat([f for f in frames if len(f)] or frames[:1], ignore_index=True)


def _run_all(experiments: list[Experiment], jobs: int, store: Path, how: dict) -> Iterable[Result]:
    task = functools.partial(run, store=store, **how)
    if jobs <= 1:
        yield from map(task, experiments)
        return
    with ProcessPoolExecutor(jobs, mp_context=torch.multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(
            functools.partial(_in_worker, store=store, **how), [(e.plain(), e.tags) for e in experiments]
        )


def _in_worker(packed: tuple[dict, dict], **how: Any) -> Result:
    plain, tags = packed
    return run(Experiment.from_plain(plain).but(tags=tags), **{"workers": 1} | how)


@functools.lru_cache(maxsize=1)
def _committed_at(stamp: tuple) -> dict[str, pd.DataFrame]:
    frames = [pd.read_csv(path, dtype={"run": str}, keep_default_na=False, low_memory=False) for path, _ in stamp]
    if not frames:
        return {}
    rows = pd.concat(frames, ignore_index=True)
    rows["value"] = pd.to_numeric(rows["value"])
    # A run that several artefacts share is stored once for each; its numbers are the same.
    return {
        i: g[(g.artefact == g.artefact.iloc[0]) & (g.row == g.row.iloc[0]) & (g.column == g.column.iloc[0])]
        for i, g in rows.groupby("run")
    }


def _committed() -> dict[str, pd.DataFrame]:
    return _committed_at(tuple((str(p), p.stat().st_mtime_ns) for p in sorted(results_folder().glob("*.csv"))))


def prune(keep: Iterable[str], store: Path | None = None) -> list[str]:
    """Delete finished runs of the store whose id is not in `keep`; returns the deleted ids. Runs in progress are left alone."""
    keep, store, gone = set(keep), store or runs_root() / "store", []
    for folder in sorted(store.glob("*")):
        if folder.is_dir() and "." not in folder.name and folder.name not in keep:
            try:
                with FileLock(store / f"{folder.name}.lock", timeout=0):
                    shutil.rmtree(folder)
                    gone.append(folder.name)
            except Timeout:
                continue
    return gone
