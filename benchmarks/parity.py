"""Our methods beside other people's code, on their clients: `python -m benchmarks.parity`.

`--parity FOLDER` names a folder with the test accuracies of public implementations (curves.json,
with repository, commit and arguments) and with who holds which image of CIFAR-10, by hash
(split.npz, pfedhn_split.npz). Every method is run in their settings, and results/parity.json keeps
both courses. Without a folder nothing is run: docs/parity.md and docs/parity.png are written anew
from what is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from benchmarks import common
from benchmarks.tables import table
from pfl_core.analysis.plots import label, panels
from pfl_core.data import pools
from pfl_core.data.federation import SPLITS, Federation
from pfl_core.data.pools import Pool
from pfl_core.engine import finetune
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.run import pick_device, run
from pfl_core.experiments.store import Result
from pfl_papers.papers.presets import presets
from tools.marked import between

PAGE = Path(__file__).parents[1] / "docs" / "parity.md"
NOISE = 2.0  # points of accuracy, declared; our own two seeds differ by up to 3.2
CURVES = ("test_acc", "before", "after", "after_fine_tuning")  # what curves.json has of a method
DATA = ("dataset", "clients", "partition", "partition_args", "partition_seed")
CAPTION = "Test accuracy over rounds: other people's code dashed, ours solid"


class Case(NamedTuple):
    """How a method of curves.json is run here.

    Attributes
    ----------
    group
        Panels of one group have one scale.
    fields
        Of the Experiment; data and seed come on top.
    average
        Over the clients, as the other code takes it: "pooled" or "client".
    split
        The file that says who holds which image.
    scale
        Mean and standard deviation of the pixels, where `fields` do not say how they are scaled.
    args
        Their arguments in words, where the file's are not to be quoted.
    when
        When their code scores a curve that does not say it.
    first
        The first round at which their code is evaluated.
    """

    group: str
    fields: dict[str, Any]
    average: str = "pooled"
    split: str = "split.npz"
    scale: dict[str, Sequence[float]] = {}
    args: str = ""
    when: str = "before"
    first: int = 0

    def moment(self, curve: str) -> str:
        """What `when` says in our rows of a curve of curves.json."""
        if curve == "after_fine_tuning":
            return finetune.moments(self.fields["finetune"])[-1]
        return self.when if curve == "test_acc" else curve


def of_paper(paper: str, artefact: str, row: str, clients: int = 0) -> dict[str, Any]:
    """Fields of a row of a paper's table, without its data."""
    fields = presets(paper, artefact, "cifar10", clients)[row]
    return {name: v for name, v in fields.items() if name not in DATA}


# PFLlib: batches of 10, the last incomplete one left out, one epoch, pixels in [-1, 1], head of one
# layer, scored before local training.
_PFLLIB: dict[str, Any] = dict(
    model="cnn",
    batch=10,
    plan="drop",
    normalize="half",
    lr=0.02,
    rounds=20,
    eval_every=5,
    eval_after=False,
)
_FEDAGHN = dict(rounds=10, eval_after=True, method_args={"q0": 3.0, "p0": 0.03, "h": 0.005})
_PFEDFDA: dict[str, Any] = dict(
    method="pfedfda",
    model="cifarnet",
    plugins=["benchmarks.cifarnet"],
    batch=50,
    plan="drop",
    normalize="half",
    lr=0.01,
    momentum=0.5,
    weight_decay=5e-4,
    epochs=5,
    rounds=10,
    eval_every=2,
    eval_after=False,
    method_args={"features": "epochs"},
)
_PFEDHN_SCALE = dict(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
CASES = {
    "local": Case("PFLlib", _PFLLIB | dict(method="local")),
    "fedavg": Case("PFLlib", _PFLLIB | dict(method="fedavg")),
    "fedper": Case("PFLlib", _PFLLIB | dict(method="fedper")),
    "fedrep": Case("PFLlib", _PFLLIB | dict(method="fedrep", method_args={"head_epochs": 1})),
    "fedala": Case(
        "PFLlib", _PFLLIB | dict(method="fedala", method_args={"eta": 1.0, "share": 0.8})
    ),
    "lgfedavg": Case("PFLlib", _PFLLIB | dict(method="lgfedavg")),
    "apfl": Case(
        "PFLlib",
        _PFLLIB
        | dict(method="apfl", method_args=dict(alpha=1.0, adapt="step", decay=0.02, mix="end")),
    ),
    # Their fine-tuning starts from each client's body as the last round trained it.
    "fedbabu": Case(
        "PFLlib",
        _PFLLIB | dict(method="fedbabu", finetune=[{"epochs": 1, "only": "body"}, {"epochs": 10}]),
    ),
    "fedrod": Case("PFLlib", _PFLLIB | dict(method="fedrod")),
    "fedproto": Case(
        "PFLlib",
        _PFLLIB | dict(method="fedproto", method_args={"proto": "running", "weights": "clients"}),
    ),
    "fedas": Case("PFLlib", _PFLLIB | dict(method="fedas")),
    # A fork of PFLlib, which keeps incomplete batches.
    "fedfew": Case(
        "authors",
        _PFLLIB
        | dict(method="fedfew", method_args={"start": "same"}, plan="wrap", eval_after=True),
        when="after",
    ),
    "pfedfda": Case(
        "authors",
        _PFEDFDA,
        args="--sampling_prob 1.0 --local_epochs 5 --lr 0.01 --batch_size 50 --method pFedFDA",
        first=2,
    ),
    "fedaghn": Case(
        "authors", of_paper("fedaghn", "table1", "fedaghn") | _FEDAGHN, average="client"
    ),
    "flayer (released form)": Case(
        "authors",
        of_paper("flayer", "table2", "flayer (official)") | dict(rounds=10, eval_after=False),
    ),
    "pfedhn": Case(
        "pFedHN",
        of_paper("pfedhn", "table1", "pfedhn", 10) | dict(rounds=400, eval_every=100),
        split="pfedhn_split.npz",
        scale=_PFEDHN_SCALE,
        args="10 nodes x 2 classes, 401 steps of 50, evaluated at 0, 100, 200, 300, 400; seed 42",
    ),
}


# -- their clients ---------------------------------------------------------------------------------


def hashes(images: np.ndarray) -> np.ndarray:
    """(n,) uint64: the first 8 bytes, big endian, of the sha256 of each image (n, h, w, c)."""
    found = (hashlib.sha256(image.tobytes()).digest()[:8] for image in images)
    return np.fromiter((int.from_bytes(first, "big") for first in found), np.uint64, len(images))


def clients_of(
    pool: Pool, path: Path, **scale: Sequence[float]
) -> tuple[Federation, dict[str, list[int]]]:
    """The clients of a split file, over the images of `pool` that it names.

    Also {"train": [images that the file names, how many of them the pool lacks], ...}.
    """
    place = {int(h): i for i, h in enumerate(hashes(pool.x))}
    lists: dict[str, list[list[int]]] = {}
    images: dict[str, list[int]] = {}
    with np.load(path, allow_pickle=False) as names:
        k = sum(key.startswith("train") for key in names.files)
        for s in (s for s in SPLITS if f"{s}0" in names.files):
            named = [names[f"{s}{i}"].tolist() for i in range(k)]
            lists[s] = [[place[h] for h in hs if h in place] for hs in named]
            total = sum(map(len, named))
            images[s] = [total, total - sum(map(len, lists[s]))]
    used = sorted({i for parts in lists.values() for part in parts for i in part})
    at = {i: n for n, i in enumerate(used)}
    index = {s: [np.array([at[i] for i in part], int) for part in v] for s, v in lists.items()}
    return Federation(pool.x[used], pool.y[used], **index, classes=pool.classes, **scale), images


# -- runs ------------------------------------------------------------------------------------------


def planned(case: Case, seed: int) -> Experiment:
    """The Experiment of a case."""
    return Experiment(dataset="own", seed=seed, **case.fields)


def read(folder: Path, methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What curves.json says of some methods, by default of all.

    ValueError where a method is not in it, where no settings for it are known here, or where a
    curve has another length than the settings give.
    """
    known = json.loads((folder / "curves.json").read_text())["curves"]
    methods = methods or list(known)
    for place, names in (("curves.json", known), ("CASES of benchmarks/parity.py", CASES)):
        if absent := [m for m in methods if m not in names]:
            raise ValueError(f"{', '.join(absent)}: not in {place}, which has {', '.join(names)}")
    for method in methods:
        at = rounds_of(CASES[method])
        for name in known[method].keys() & {"test_acc", "before", "after"}:
            if (n := len(known[method][name])) != len(at):
                raise ValueError(
                    f"{method}: {name} of curves.json has {n} values; the settings here are "
                    f"evaluated {len(at)} times, at rounds {at}"
                )
    return {method: known[method] for method in methods}


def rounds_of(case: Case) -> list[int]:
    """The rounds at which a case is evaluated, if the last is one of them."""
    e = planned(case, 0)
    return list(range(case.first, e.rounds + 1, e.eval_every))


def course(result: Result, when: str, case: Case) -> list[float]:
    """Test accuracy (%) at each round at which their code is evaluated, too."""
    h = result.history
    rows = h[(h.when == when) & (h.split == "test") & (h["rounds"] >= case.first)]
    rows = rows[(rows["average"] == case.average) & (rows.metric == "acc_pct")]
    return [round(v, 4) for v in rows.sort_values("rounds").value]


def compared(entry: dict[str, Any], case: Case, results: list[Result]) -> dict[str, Any]:
    """Both courses of one method, what they belong to, and our runs."""
    moments = {case.moment(name): np.atleast_1d(entry[name]) for name in CURVES if name in entry}
    row = {"code": entry["code"], "args": case.args or entry["args"], "average": case.average}
    row["rounds"] = rounds_of(case)
    row["theirs"] = {when: [round(100 * float(v), 4) for v in c] for when, c in moments.items()}
    row["ours"] = {
        when: {str(r.experiment.seed): course(r, when, case) for r in results} for when in moments
    }
    return row | {"fields": case.fields, "runs": [r.id for r in results]}


def where(results: list[Result]) -> dict[str, str]:
    """Computer, versions, commit and date of some runs."""
    names = dict(torch="torch", python="python", pfl_core="version", commit="commit", date="date")
    facts = {name: [r.meta[key] for r in results] for name, key in names.items()}
    facts["date"] = [date[:10] for date in facts["date"]]
    on = [r.meta["processor" if r.meta["device"] == "cpu" else "device"] for r in results]
    return {name: ", ".join(dict.fromkeys(v)) for name, v in ({"device": on} | facts).items()}


# -- the page --------------------------------------------------------------------------------------


class Line(NamedTuple):
    """The last accuracies (%) of a method at one time, theirs and ours of each seed."""

    method: str
    case: dict[str, Any]
    theirs: float
    ours: list[float]

    @property
    def beyond(self) -> float:
        """Points by which theirs lies outside of the range of ours."""
        return max(0.0, min(self.ours) - self.theirs, self.theirs - max(self.ours))


def kept() -> dict[str, dict[str, Any]]:
    """The methods of results/parity.json, in the order of CASES."""
    path = common.RESULTS / "parity.json"
    cases = json.loads(path.read_text())["cases"] if path.exists() else {}
    return {key: cases[key] for key in CASES if key in cases}


def lines(cases: dict[str, dict[str, Any]]) -> Iterator[Line]:
    """A line a method; two where it is compared at two times."""
    for key, case in cases.items():
        for when, theirs in case["theirs"].items():
            said = f", {spoken(when)}" if len(case["theirs"]) > 1 or when != "before" else ""
            last = [c[-1] for c in case["ours"][when].values()]
            yield Line(label(key) + said, case, theirs[-1], last)


def spoken(when: str) -> str:
    """A moment of evaluation in words."""
    return "fine-tuned" if when.startswith(finetune.TUNED) else f"{when} local training"


def section(cases: dict[str, dict[str, Any]]) -> str:
    """The generated part of docs/parity.md: the table, and what follows from it."""
    head = ["method", "their code", "their arguments", "rounds", "theirs (%)", "ours (%): mean"]
    head += ["seed by seed", "difference"]
    rows = []
    for line in lines(cases):
        repository, commit, *rest = line.case["code"].split(" ", 2)
        commit, comma, _ = commit.partition(",")
        link = f"[{repository} {commit}](https://github.com/{repository}/tree/{commit}){comma}"
        row = [line.method, " ".join([link, *rest]), f"`{line.case['args']}`"]
        mean = statistics.mean(line.ours)
        row += [str(line.case["rounds"][-1]), f"{line.theirs:.1f}", f"{mean:.1f}"]
        row += [", ".join(f"{v:.1f}" for v in line.ours), f"{mean - line.theirs:+.1f}"]
        rows.append(row)
    parts = [table(head, rows), verdict(cases), *unfinished(cases), found(cases), measured(cases)]
    return "\n\n".join([*parts, f"![{CAPTION}](parity.png)"])


def verdict(cases: dict[str, dict[str, Any]]) -> str:
    """Which differences are larger than noise and the spread of our own seeds together."""
    far = [f"{x.method} ({x.beyond:.1f} points)" for x in lines(cases) if x.beyond > NOISE]
    rule = f"more than {NOISE:g} points outside of the range of our seeds"
    return f"**Theirs lies {rule} for: {', '.join(far) or 'no method'}.**"


def unfinished(cases: dict[str, dict[str, Any]]) -> list[str]:
    """What was not run, and what was run with one seed only."""
    absent = [label(key) for key in CASES if key not in cases]
    single = [label(key) for key, case in cases.items() if len(case["runs"]) < 2]
    said = {"Not run yet": absent, "One seed only": single}
    return [f"{words}: {', '.join(names)}." for words, names in said.items() if names]


def found(cases: dict[str, dict[str, Any]]) -> str:
    """How many images of the splits our copy of CIFAR-10 has."""
    said = []
    files: dict[str, dict[str, list[int]]] = {}
    for case in cases.values():
        files[case["split"]] = case["images"]
    for file, images in files.items():
        parts = [f"{lost} of {total} {s} images" for s, (total, lost) in images.items() if lost]
        said += [f"`{file}`: {', '.join(parts)}"] if parts else []
    if not said:
        return "Our copy of CIFAR-10 has all images of the splits."
    return f"Not found in our copy of CIFAR-10, and left out: {'; '.join(said)}."


def measured(cases: dict[str, dict[str, Any]]) -> str:
    """Where and with what our numbers were computed."""
    said = "{device}; torch {torch}, Python {python}, pfl_core {pfl_core} at {commit}; {date}"
    out: dict[str, list[str]] = {}
    for key, case in cases.items():
        out.setdefault(said.format(**case["about"]), []).append(label(key))
    every = len(out) == 1
    return "\n".join(
        f"Ours{'' if every else ' of ' + ', '.join(keys)} ran on {x}." for x, keys in out.items()
    )


def page(text: str, cases: dict[str, dict[str, Any]]) -> str:
    """`text` with a new generated part; ValueError if its marks are not there once each."""
    return between(text, "parity", section(cases), "python -m benchmarks.parity")


# -- the picture -----------------------------------------------------------------------------------


def styles() -> dict[tuple[str, str], dict[str, Any]]:
    """How a line is drawn, by whose it is and when it was scored; a single number is a mark."""
    blue, orange, green, red, *_ = sns.color_palette("colorblind")
    ours, theirs = dict(linestyle="-", linewidth=1.5), dict(linestyle="--", linewidth=1.5)
    mark = dict(linestyle="", markersize=5)
    return {
        ("theirs", "before local training"): theirs | {"color": red},
        ("ours", "before local training"): ours | {"color": blue},
        ("theirs", "after local training"): theirs | {"color": orange},
        ("ours", "after local training"): ours | {"color": green},
        ("theirs", "fine-tuned"): mark | {"color": orange, "marker": "x"},
        ("ours", "fine-tuned"): mark | {"color": green, "marker": "o", "fillstyle": "none"},
    }


def draw(cases: dict[str, dict[str, Any]]) -> Figure:
    """A panel a method: theirs dashed, ours solid (the mean of our seeds in their range)."""
    fig, axes = panels(len(cases), 3, (3.0, 2.4), sharey=False)
    for ax, (key, case) in zip(axes, cases.items(), strict=True):
        _panel(ax, case)
        ax.set_title(f"{label(key)}\n{case['code'].split()[0]}", fontsize=8)
    for group in dict.fromkeys(CASES[key].group for key in cases):
        alike = [ax for ax, key in zip(axes, cases, strict=True) if CASES[key].group == group]
        limits = [limit for ax in alike for limit in ax.get_ylim()]
        for ax in alike:
            ax.set_ylim(min(limits), max(limits))
    drawn = {spoken(when) for case in cases.values() for when in case["theirs"]}
    handles = [
        Line2D([], [], **style, label=f"{whose}, {when}")
        for (whose, when), style in styles().items()
        if when in drawn
    ]
    fig.legend(handles=handles, loc="outside lower center", ncol=2, frameon=False, fontsize=8)
    return fig


def _panel(ax: Axes, case: dict[str, Any]) -> None:
    for when, theirs in case["theirs"].items():
        values = np.array(list(case["ours"][when].values()))
        at, said = case["rounds"][-len(theirs) :], spoken(when)
        ours, other = styles()["ours", said], styles()["theirs", said]
        ax.fill_between(at, values.min(0), values.max(0), color=ours["color"], alpha=0.25, lw=0)
        ax.plot(at, values.mean(0), **ours)
        ax.plot(at, theirs, **other)
    ax.tick_params(labelsize=7)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    ax.set_xlabel("Communication round", fontsize=8)
    ax.set_ylabel("Test accuracy (%)", fontsize=8)
    sns.despine(ax=ax)


def write() -> None:
    """Write the page and its picture from the kept numbers."""
    cases = kept()
    PAGE.write_text(page(PAGE.read_text(), cases))
    if cases:
        draw(cases).savefig(PAGE.with_suffix(".png"), dpi=144, metadata={"Software": None})
    print(PAGE)


# -- the command -----------------------------------------------------------------------------------


def measure(folder: Path, methods: Sequence[str], seeds: Sequence[int], rounds: int) -> None:
    """Run methods on their clients, and keep the numbers of each as soon as it is done.

    rounds: other than 0, a trial of so many rounds, which keeps nothing.
    """
    pool, device, federations = pools.load("cifar10"), pick_device("auto"), {}
    for key, entry in read(folder, methods).items():
        case = CASES[key]
        if case.split not in federations:
            federations[case.split] = clients_of(pool, folder / case.split, **case.scale)
        fed, images = federations[case.split]
        short = dict(rounds=rounds, eval_every=1) if rounds else {}
        results = [run(planned(case, s).but(**short), fed=fed, device=device) for s in seeds]
        if failed := [r.id for r in results if not r.ok]:
            raise RuntimeError(f"{key}: training diverged in {', '.join(failed)}")
        row = compared(entry, case, results) | dict(split=case.split, images=images)
        print(key, row["theirs"], row["ours"], flush=True)
        if not rounds:
            common.save("parity", {key: row}, device, where(results))


def main(words: Sequence[str] | None = None) -> None:
    """Run what was asked for, and write docs/parity.md and docs/parity.png."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="of curves.json; none: all")
    parser.add_argument("--parity", type=Path, metavar="FOLDER", help="curves.json and the splits")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=0, help="a trial, of which nothing is kept")
    args = parser.parse_args(words)
    if args.parity:
        measure(args.parity, args.methods, args.seeds, args.rounds)
    if not args.rounds:
        write()


if __name__ == "__main__":
    main()
