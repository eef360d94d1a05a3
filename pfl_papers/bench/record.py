"""What the benchmark keeps of its runs, and commits: four small tables a setting.

A setting's folder is runs/bench/SETTING, and once published results/bench/SETTING. A form over
digits is a setting of its own, "mild-digits", which is never published. All numbers of
docs/bench.md are computed from these tables.

- tuning.csv.gz: a line a draw of a row's search and tuning seed, with the validation and the test
  accuracy in % (mean over clients, at the last round) at each moment; `chosen` is the moment that
  was chosen, in the lines of the draw that was.
- runs.csv.gz: a line a reported run, with what it cost.
- history.csv.gz: its accuracies in % at evaluated rounds, before or after local training.
- clients.csv.gz: how many test samples of each client it classifies right after its last round, and
  other means over clients; lines of row "" have the clients' numbers of test samples, and what the
  label prior has right.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pfl_core.analysis.select import tuples
from pfl_core.engine.finetune import TUNED
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.store import Result, locked
from pfl_core.util import checks, paths, sums
from pfl_core.util.percent import DECIMALS, accuracy
from pfl_papers import places

SPLITS = ("val", "test")
PRIOR = "prior"  # the moment of the line of the label prior, of row ""
BALANCED = "acc_balanced"  # the metric
PLAN = "plan.csv"  # beside the folders of settings: hours of each, as they were told
DIGITS = "-digits"  # at the end of a setting's name in its form over digits
TUNING = ["row", "draw", "seed", "change", "status", "chosen", "run", "cpu_s"]
RUNS = ["row", "seed", "status", "draw", "when", "own", "run", "rounds", "gradients", "extra"]
RUNS += ["down", "up", "cpu_s", "wall_s", "processor", "version", "commit", "date"]
HISTORY = ["row", "seed", "when", "rounds", "val", "test"]
CLIENTS = ["row", "seed", "when", "val", "balanced", "correct"]
COLUMNS = {"tuning": TUNING, "runs": RUNS, "history": HISTORY, "clients": CLIENTS}
When = str | Mapping[str, str]  # a moment, or one for each row
NUMBERS = {*"draw seed rounds gradients extra down up cpu_s wall_s val test balanced".split()}


@dataclass
class Record:
    """What is known of a setting; see the top of this file."""

    tuning: pd.DataFrame
    runs: pd.DataFrame
    history: pd.DataFrame
    clients: pd.DataFrame

    @classmethod
    def empty(cls) -> Record:
        """One that knows nothing."""
        return cls(**{name: pd.DataFrame(columns=columns) for name, columns in COLUMNS.items()})

    @classmethod
    def joined(cls, records: Iterable[Record]) -> Record:
        """Records of different rows or seeds as one."""
        every = [cls.empty(), *records]
        out = {}
        for name, columns in COLUMNS.items():
            frames = [f for f in (getattr(r, name) for r in every) if len(f)]
            table = pd.concat(frames, ignore_index=True) if frames else every[0].tuning[[]]
            out[name] = table.drop_duplicates() if frames else pd.DataFrame(columns=columns)
        return cls(**out)

    def updated(self, other: Record) -> Record:
        """This one, in which runs of `other` take the place of ours of their rows and seeds.

        A row's tuning is replaced as a whole.
        """
        left = {n: _without(getattr(self, n), getattr(other, n), n != "tuning") for n in COLUMNS}
        return Record.joined([Record(**left), other])

    def __or__(self, other: Record) -> Record:
        """Both. A row that `other` has reported, or alone has, takes the place of ours."""
        done, ours = _methods(other.runs), _methods(self.runs)
        theirs = other.of((done | _methods(other.tuning)) - (ours - done))
        taken = _methods(theirs.runs) | _methods(theirs.tuning)
        mine = self.of((ours | _methods(self.tuning)) - taken)
        return Record.joined([mine, theirs])

    def of(self, methods: Collection[str]) -> Record:
        """Of some methods alone, with all of their lines."""
        kept = {*methods, ""}
        frames = {n: getattr(self, n) for n in COLUMNS}
        return Record(**{n: f[f.row.map(method_of).isin(kept)] for n, f in frames.items()})

    def search(self, row: str, runs: Mapping[tuple[int, int], str]) -> pd.DataFrame:
        """A row's lines of tuning, if they are a whole search of just these runs; else none.

        Parameters
        ----------
        row : str
        runs : dict
            {(draw, seed): run, or "" for a draw that is refused}, the first seed's first.
        """
        mine, seeds = self.tuning[self.tuning.row == row], list(dict.fromkeys(s for _, s in runs))
        found = {(v.draw, v.seed): v.run for v in tuples(mine)}
        tried = [key for key in runs if key[1] == seeds[0]]
        best = [(draw, s) for draw in set(mine.draw[mine.chosen != ""]) for s in seeds]
        whole = all(key in found for key in [*tried, *best])
        return mine if whole and all(runs.get(k) == run for k, run in found.items()) else mine[:0]

    def has(self, row: str, when: str, runs: Mapping[int, str]) -> bool:
        """Whether a row is reported at a moment with these runs, {seed: run}; they may diverge."""
        mine = self.runs[(self.runs.row == row) & (self.runs.when == when)]
        mine = mine[mine.status.isin(["done", "failed"])]
        found = dict(zip(mine.seed, mine.run, strict=True))
        return all(found.get(seed) == run for seed, run in runs.items())

    def waiting(self) -> list[str]:
        """Rows whose tuning is there, and whose reported runs are not."""
        chosen, done = self.tuning.row[self.tuning.chosen != ""], set(self.runs.row)
        return [row for row in dict.fromkeys(chosen) if row not in done]

    def lines(self) -> list[str]:
        """Rows that have reported runs, in their order."""
        return list(dict.fromkeys(self.runs.row))

    def accuracies(self, when: When = "") -> pd.DataFrame:
        """Test accuracy in %, mean over clients: a line a row and a column a seed.

        Parameters
        ----------
        when : str or dict
            A moment, "own" for each row's own one, {row: moment}; by default those that tuning
            chose. -inf where a run diverged; NaN where there is none, or none with the moment.
        """
        means = {key: float(acc.mean()) for key, acc in self.per_client(when).items()}
        return self.table(means)

    def table(self, numbers: Mapping[tuple[str, int], float]) -> pd.DataFrame:
        """A number a run, {(row, seed): it}, as a line a row and a column a seed.

        -inf where the run diverged.
        """
        failed = self.runs[self.runs.status == "failed"]
        lost = dict.fromkeys(zip(failed.row, failed.seed, strict=True), -np.inf)
        every, seeds = lost | dict(numbers), sorted(map(int, set(self.runs.seed)))
        lines = {row: [every.get((row, s), np.nan) for s in seeds] for row in self.lines()}
        return pd.DataFrame(lines, index=seeds, dtype=float).T

    def per_client(self, when: When = "") -> dict[tuple[str, int], np.ndarray]:
        """{(row, seed): test accuracies in % of clients}; `when` as for `accuracies`."""
        n = self.samples
        return {
            (v.row, v.seed): accuracy(_numbers(v.correct), n[v.seed])
            for v in tuples(self._at(when))
        }

    def metric(self, name: str, when: When = "") -> pd.DataFrame:
        """Another mean over clients, "val" or "balanced", as `accuracies` gives it."""
        found = self._at(when)
        return self.table({(v.row, v.seed): getattr(v, name) for v in tuples(found)})

    def _at(self, when: When) -> pd.DataFrame:
        # Lines of clients at each run's moment.
        asked = self.runs[["row", "seed"]].copy()
        if isinstance(when, str):
            asked["when"] = self.runs[when or "when"] if when in ("", "own") else when
        else:
            asked["when"] = [when.get(row, "") for row in asked.row]
        return asked.merge(self.clients, on=["row", "seed", "when"])

    @property
    def samples(self) -> dict[int, np.ndarray]:
        """{seed: numbers of test samples of clients}."""
        return self.facts("")

    def facts(self, when: str) -> dict[int, np.ndarray]:
        """{seed: numbers of clients}: "": test samples, "prior": what the label prior has right."""
        lines = self.clients[(self.clients.row == "") & (self.clients.when == when)]
        return {int(s): _numbers(c) for s, c in zip(lines.seed, lines.correct, strict=True)}


def method_of(row: str) -> str:
    """The method of a row's line: "ditto" of "ditto, equal gradients"."""
    return row.partition(", ")[0]


def _methods(table: pd.DataFrame) -> set[str]:
    return {method_of(row) for row in table.row} - {""}


def _without(table: pd.DataFrame, other: pd.DataFrame, each_seed: bool) -> pd.DataFrame:
    # Without the rows of `other`, or their seeds alone; row "" stays.
    by = ["row", "seed"] if each_seed else ["row"]
    there = pd.MultiIndex.from_frame(other.loc[other.row != "", by])
    return table[~pd.MultiIndex.from_frame(table[by]).isin(there)]


def _numbers(text: str) -> np.ndarray:
    return np.array(text.split(), dtype=float)


# -- what runs measured ----------------------------------------------------------------------------


def tuned(
    row: str, draw: int, change: dict[str, Any], seed: int, run: Result | str, chosen: str
) -> dict[str, Any]:
    """A line of tuning.csv.gz.

    Parameters
    ----------
    row : str
    draw : int
    change : dict
        What the draw changes.
    seed : int
    run : Result or str
        Its run, or why there is none.
    chosen : str
        The moment that tuning chose if this draw was chosen, else "".
    """
    said = json.dumps(change, sort_keys=True, default=lambda e: e.id)
    line = dict(row=row, draw=draw, seed=seed, change=said, status=run, chosen=chosen, run="")
    if isinstance(run, str):
        return line
    line |= dict(status=run.meta["status"], run=run.id, cpu_s=run.meta.get("cpu_s", np.nan))
    if not run.ok:
        return line
    acc, last = _means(run.history), run.experiment.rounds
    moments = dict.fromkeys(key.partition("/")[0] for key in run.arrays if key.endswith("/correct"))
    pairs = itertools.product(SPLITS, moments)
    found = {f"{split}.{when}": acc.get((when, last, split), np.nan) for split, when in pairs}
    return line | found


def reported(
    row: str, experiment: Experiment, runs: Sequence[Result | None], about: dict[str, Any]
) -> Record:
    """What a reported run adds.

    Parameters
    ----------
    row : str
    experiment : Experiment
    runs : sequence of Result
        Its run, and those that it starts from; None for one that ended with an error.
    about : dict
        Columns of its line of runs.csv.gz that its row has.
    """
    run, seed = runs[0], experiment.seed
    line = {"row": row, "seed": seed, "rounds": experiment.rounds, "status": "error"} | about
    if run:
        line |= {"run": run.id} | {n: run.meta[n] for n in RUNS if n in run.meta}
        line |= _spent([r for r in runs if r])
    out = Record.empty()
    out.runs = pd.DataFrame([line], columns=RUNS)
    if run and run.ok:
        found = _means(run.history).unstack("split").reset_index()
        served = found[~found.when.str.startswith(TUNED)]
        out.history = served.assign(row=row, seed=seed)[HISTORY]
        out.clients = _clients(row, run)
    return out


def grouped(row: str, seed: int, runs: Sequence[Result | None], about: dict[str, Any]) -> Record:
    """What runs over the clients of each group add, as those of one run over all clients.

    Client i is of group i modulo their number. The other arguments are those of `reported`.
    """
    done = [r for r in runs if r and r.ok]
    whole = len(done) == len(runs)
    line = {"row": row, "seed": seed, "status": "done" if whole else "failed"} | about
    out = Record.empty()
    if whole:
        line |= {n: done[0].meta[n] for n in RUNS if n in done[0].meta} | _spent(done)
        key, clients = f"{about['when']}/test/correct", sum(r.meta["clients"] for r in done)
        correct = np.zeros(clients)
        for group, r in enumerate(done):
            correct[group :: len(done)] = r.arrays[key][-1]
        line |= {"run": " ".join(r.id for r in done), "rounds": done[0].experiment.rounds}
        found = dict(row=row, seed=seed, when=about["when"], correct=_text(correct))
        out.clients = pd.DataFrame([found], columns=CLIENTS)
    out.runs = pd.DataFrame([line], columns=RUNS)
    return out


def prior(seed: int, right: np.ndarray, n: np.ndarray) -> Record:
    """What the label prior adds: how many of each client's `n` test samples it has right."""
    out, counts = Record.empty(), {"": n, PRIOR: right}
    lines = [dict(row="", seed=seed, when=w, correct=_text(v)) for w, v in counts.items()]
    out.clients = pd.DataFrame(lines, columns=CLIENTS)
    return out


def _means(history: pd.DataFrame, metric: str = "acc_pct") -> pd.Series:
    # Means over clients, by when, rounds and split.
    picked = history[(history.metric == metric) & (history["average"] == "client")]
    return picked.set_index(["when", "rounds", "split"]).value


def _spent(runs: Sequence[Result]) -> dict[str, float]:
    # Bytes of all clients, and seconds.
    out = {n: sum(float(r.meta.get(n, np.nan)) for r in runs) for n in ("cpu_s", "wall_s")}
    for name, metric in {"down": "download_bytes", "up": "upload_bytes"}.items():
        found = (r.history[r.history.metric == metric] for r in runs)
        out[name] = sum(float(h.value.iloc[-1]) for h in found if len(h))
    return out


def _clients(row: str, run: Result) -> pd.DataFrame:
    seed, lines = run.experiment.seed, []
    n, last = run.arrays["n/test"], run.experiment.rounds
    acc, balanced = _means(run.history), _means(run.history, BALANCED)
    for key, correct in run.arrays.items():
        when, _, what = key.partition("/")
        if what == "test/correct":
            line = dict(row=row, seed=seed, when=when, correct=_text(correct[-1]))
            line["val"] = acc.get((when, last, "val"), np.nan)
            lines.append(line | {"balanced": balanced.get((when, last, "test"), np.nan)})
    lines.append(dict(row="", seed=seed, when="", correct=_text(n)))
    return pd.DataFrame(lines, columns=CLIENTS)


def _text(counts: np.ndarray) -> str:
    return " ".join(map(str, counts.astype(np.int64)))


# -- files -----------------------------------------------------------------------------------------


def kept(setting: str) -> Path:
    """The folder of what is computed here of a setting, until it is published."""
    return paths.runs_root() / "bench" / setting


def committed(setting: str) -> Path:
    """The folder of what is published of a setting."""
    return places.results_folder() / "bench" / setting


@contextlib.contextmanager
def _alone(setting: str) -> Iterator[Path]:
    # The folder of what is kept of a setting, which no other process reads or writes meanwhile.
    checks.make_folder(kept(""))
    with locked(kept(f"{setting}.lock"), f"the record of {setting} is written"):
        yield kept(setting)


def keep(setting: str, change: Callable[[Record], Record]) -> Record:
    """Change what is kept here of a setting, and return it.

    Two processes, as of a job array, change it one after the other: neither loses the other's rows.
    """
    with _alone(setting) as folder:
        write(folder, known := change(of_folder(folder)))
    return known


def read(setting: str, own: bool = True) -> Record:
    """What is published of a setting, and, unless `own` is False, what is kept here.

    A row that is kept here takes the place of the published one, unless it has some of its seeds
    only.

    Raises
    ------
    ValueError
        For a file that is damaged, or not as it was published.
    """
    found = of_folder(committed(setting))
    if not own:
        return found
    ours = here(setting)
    some = {method_of(row) for row in fewer(found, ours)}
    return found | ours.of((_methods(ours.runs) | _methods(ours.tuning)) - some)


def here(setting: str) -> Record:
    """What is kept here of a setting.

    Raises
    ------
    ValueError
        For a file that is damaged.
    """
    if not kept(setting).is_dir():
        return Record.empty()
    with _alone(setting) as folder:
        return of_folder(folder)


def fewer(old: Record, new: Record) -> list[str]:
    """Rows of `new` that have some seeds of `old` only."""
    was, now = (_done(r) for r in (old, new))
    return [row for row in new.lines() if now.get(row, set()) < was.get(row, set())]


def _done(known: Record) -> dict[str, set[int]]:
    done = known.runs[known.runs.status == "done"]
    return {str(row): set(seeds) for row, seeds in done.groupby("row").seed}


def of_folder(folder: Path) -> Record:
    """The record in a folder, its files of one time; one that knows nothing where there is none."""
    listed = sums.known(folder)
    try:
        found = Record(**{name: _read(folder / f"{name}.csv.gz", name) for name in COLUMNS})
    except ValueError:
        if sums.known(folder) == listed:
            raise
    else:
        if sums.known(folder) == listed:
            return found
    return of_folder(folder)  # another process wrote meanwhile


def _read(path: Path, name: str) -> pd.DataFrame:
    if not path.exists() and path.name not in sums.known(path.parent):
        return pd.DataFrame(columns=COLUMNS[name])
    try:
        raw = gzip.decompress(sums.read(path))
        frame = pd.read_csv(io.BytesIO(raw), dtype=str, keep_default_na=False)
        lacking = [c for c in COLUMNS[name] if c not in frame]
        if lacking:
            raise ValueError(f"it has no column {', '.join(lacking)}")
        for column in map(str, frame.columns):
            if column in NUMBERS or column.startswith(SPLITS):
                frame[column] = pd.to_numeric(frame[column])
        return frame
    except (ValueError, EOFError, OSError, zlib.error) as error:
        raise ValueError(
            f"{path} is damaged ({error}); restore it from git, or, below runs/, delete its folder "
            "and start the benchmark again: finished runs are not computed again"
        ) from error


def write(folder: Path, record: Record) -> list[Path]:
    """Make a folder hold a record; equal records give equal bytes."""
    checks.make_folder(folder)
    raw = {}
    for name in COLUMNS:
        table = getattr(record, name).round(DECIMALS)
        whole = [c for c in ("draw", "seed", "rounds") if c in table]
        table = table.assign(**{c: pd.to_numeric(table[c]).astype("Int64") for c in whole})
        text = table.to_csv(index=False).encode()
        raw[f"{name}.csv.gz"] = gzip.compress(text, mtime=0)
    return sums.put(folder, raw)


def settings(folder: Path) -> list[str]:
    """Names of the settings that have a folder in runs/bench or results/bench."""
    return sorted(p.name for p in folder.glob("*") if p.is_dir())


def publish(replace: bool = False) -> list[Path]:
    """Put what is kept of settings into results/bench/, but for their forms over digits.

    Rows that are published and not kept here stay. Of rows that are not reported yet, their search
    is published, so that it is not made again.

    Raises
    ------
    ValueError
        If nothing is kept, or if a published row has more runs than ours (unless `replace`);
        nothing is written then.
    OSError
        If the package is installed without its repository.
    """
    places.checkout("publish")
    checks.make_folder(folder := places.results_folder().parent / "runs")
    with locked(folder / "results.lock", "results are written"):
        return _publish(replace)


def _publish(replace: bool) -> list[Path]:
    some = [s for s in settings(paths.runs_root() / "bench") if not s.endswith(DIGITS)]
    records = {s: (of_folder(committed(s)), here(s)) for s in some}
    plan = kept("") / PLAN
    run = {s: pair for s, pair in records.items() if len(pair[1].runs) or len(pair[1].tuning)}
    if not run and not plan.is_file():
        raise ValueError(
            f"nothing of the benchmark to publish in {paths.runs_root()}; run "
            "`python -m pfl_papers bench` first (its form over digits is not published)"
        )
    for setting, (old, ours) in records.items():
        lacking = fewer(old, ours)
        if lacking and not replace:
            raise ValueError(
                f"{setting} in {paths.runs_root()} has fewer runs of {', '.join(lacking)} than "
                "results/; run the rest, or let them go with `publish bench --replace`"
            )
    done = [f for s, (old, ours) in run.items() for f in write(committed(s), old | ours)]
    if plan.is_file():
        checks.make_folder(committed(""))
        with sums.replacing(target := committed("") / PLAN) as file:
            file.write(plan.read_bytes())
        done.append(target)
    return done


def named_runs() -> set[str]:
    """Names of all runs that a published or kept record shows."""
    found = [of_folder(committed(s)) for s in settings(committed(""))]
    found += [here(s) for s in settings(kept(""))]
    return {
        run for r in found for t in (r.runs, r.tuning) for named in t.run for run in named.split()
    }
