"""Write the tables of benchmarks/README.md from results/*.json: `python -m benchmarks.tables`."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.cases import CASES
from benchmarks.common import RESULTS
from benchmarks.many import TARGETS
from pfl_core.analysis.plots import MODEL_LABELS, display, label
from tools.marked import between

README = Path(__file__).with_name("README.md")
NONE = "Not measured yet."
UNITS = {"s": "s", "us": "us", "gb": "GB", "pct": "%"}
_UNIT = re.compile(f"_({'|'.join(UNITS)})$")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(r) + " |" for r in [head, ["---"] * len(head), *rows])


def computers(cases: dict) -> str:
    """Where and with what the numbers of a file were measured."""
    said = "{device}; torch {torch}, Python {python}, pfl_core {pfl_core}; {date}"
    lines = dict.fromkeys(said.format(**case["about"]) for case in cases.values())
    return "\n".join(f"Measured on {line}." for line in lines)


def rounds(cases: dict) -> str:
    """A round beside the plain loop; seconds of training + evaluation, accuracy of both."""
    head = [
        "round",
        "executor",
        "ours (s)",
        "plain loop (s)",
        "ratio (range)",
        "target",
        "of the matrix rate",
        "floor (s)",
        "times the floor",
        "accuracy (%)",
    ]
    rows = []
    for key, case in cases.items():
        spent = [
            f"{case[f'{who}_train_s']:.2f} + {case[f'{who}_eval_s']:.2f}"
            for who in ("ours", "plain")
        ]
        ratio = f"{case['ratio']:.2f}x ({case['ratio_min']:.2f} to {case['ratio_max']:.2f})"
        share = case.get("share_of_matrix_rate")  # counted after the times were kept
        reached = [f"{case['target']:g}x", "-" if share is None else f"{100 * share:.0f} %"]
        reached += [f"{case[n]:.2f}" if n in case else "-" for n in ("floor_s", "times_floor")]
        rows.append(
            [
                CASES[key].says,
                case["executor"],
                *spent,
                ratio,
                *reached,
                f"{case['ours_acc_pct']:.1f} / {case['plain_acc_pct']:.1f}",
            ]
        )
    return table(head, rows)


def server(cases: dict) -> str:
    """The server's step beside a loop."""
    rows = [
        [
            k,
            f"{case['loop_s']:.4g}",
            f"{case['ours_s']:.4g}",
            f"{case['ratio']:.0f}x ({case['ratio_min']:.0f} to {case['ratio_max']:.0f})",
        ]
        for k, case in sorted(cases.items(), key=lambda kc: int(kc[0]))
    ]
    return table(["clients", "loop (s)", "ours (s)", "ratio (range)"], rows)


def scaling(cases: dict) -> str:
    """Cost as one thing grows; the picture is beside it."""
    head = [
        "series",
        "method",
        "value",
        "training (s)",
        "evaluation (s)",
        "client-steps",
        "us a client-step",
        "memory (MB)",
    ]
    rows = []
    # However they were measured, values stand in their order.
    for case in sorted(cases.values(), key=lambda case: (case["series"], case["method"])):
        model, *width = str(case["value"]).split()  # "resnet18 x0.25"
        row = [case["series"], label(case["method"]), " ".join([network(model), *width])]
        row += [f"{case['train_s']:.3g}", f"{case['eval_s']:.3g}"]
        row += [f"{case[name]:.0f}" for name in ("client_steps", "us_per_client_step", "memory_mb")]
        rows.append(row)
    return table(head, rows)


def many(cases: dict) -> str:
    """Very many small clients: seconds of a round, memory, and a checkpoint's cost."""
    head = {
        "data_s": "data (s)",
        "round_s": "a round (s)",
        "some_s": "with 200 clients evaluated (s)",
        "evaluated_s": "with all evaluated (s)",
        "ratio": "all / none evaluated",
        "round_mb": "memory (MB)",
        "some_anonymous_mb": "of it in no file (MB)",
        "evaluated_mb": "with all evaluated (MB)",
        "checkpoint_mb": "checkpoint (MB)",
        "save_s": "written (s)",
        "resume_s": "read (s)",
        "resumed": "killed and resumed",
    }
    rows = []
    for case in cases.values():
        where = f", images in a file of {case['file_mb']:,.0f} MB" if "file_mb" in case else ""
        rows.append([label(case["method"]) + where, f"{case['clients']:,}"])
        for name in head:
            value = case.get(name, "" if name == "resumed" else "-")
            form = "{:.0f}" if name.endswith("mb") else "{:.3g}"
            rows[-1].append(value if isinstance(value, str) else form.format(value))
    target = ["target", "20,000", *(f"{TARGETS[n]:g}" if n in TARGETS else "" for n in head)]
    return table(["method", "clients", *head.values()], [*rows, target])


def profile(cases: dict) -> str:
    """Where the time of a round goes, by kind of work (%)."""
    rows = [
        [
            key,
            f"{case['seconds']:.2f}",
            "; ".join(f"{s['kind']} {s['share']:.0f} %" for s in case["kinds"] if s["share"] >= 1),
        ]
        for key, case in cases.items()
    ]
    return table(["round", "s", "share of operations' own time"], rows)


def peers(cases: dict) -> str:
    """Each simulator at its best number of processes or threads."""
    best: dict[str, dict] = {}
    for key, case in cases.items():
        who = key.partition("/")[0]
        if who not in best or case["train_s"] < best[who]["train_s"]:
            best[who] = case
    rows = []
    for who, case in sorted(best.items(), key=lambda wc: wc[1]["train_s"]):
        versions = ", ".join(f"{package} {v}" for package, v in case["versions"].items())
        kind = "".join(f", {form}" for form in who.split("-")[1:])
        spent = f"{case['train_s']:.2f} ({case['fastest_s']:.2f} to {case['slowest_s']:.2f})"
        again = {True: "yes", False: "no"}.get(case.get("repeats"), "-")
        row = ["pfl_core" if who == "ours" else versions + kind, str(case["processes"])]
        rounds = str(len(case["rounds_s"]))
        row += [str(case["samples"] or "all"), spent, rounds, f"{case['acc_pct']:.1f}", again]
        rows.append(row)
    head = ["simulator", "workers", "images a client, at most", "s a round, median (range)"]
    return table([*head, "rounds", "accuracy after them (%)", "bit for bit again"], rows)


def pfllib(cases: dict) -> str:
    """The pieces of a round of PFLlib's quick start, theirs, ours and the floor."""
    [case] = cases.values()
    head = ["piece", "ours (s)", "PFLlib (s)", "ours / PFLlib", "floor (s)", "times the floor"]
    rows = []
    for piece, keys in {
        "training": ["train"],
        "evaluation": ["eval"],
        "a round": ["train", "eval"],
    }.items():
        ours, theirs, floor = (
            sum(case[f"{who}_{k}_s"] for k in keys) for who in ("ours", "theirs", "floor")
        )
        share = f"{ours / theirs:.2f}"
        if piece == "a round":
            share = f"{case['share']:.2f} ({case['share_min']:.2f} to {case['share_max']:.2f})"
            share += f", target {case['target']:g}"
        seconds = [f"{ours:.2f}", f"{theirs:.2f}"]
        rows.append([piece, *seconds, share, f"{floor:.2f}", f"{ours / floor:.1f}"])
    reached = f"{case['ours_acc_pct']:.1f} and {case['theirs_acc_pct']:.1f} %"
    repeats = len(case["rows"])
    return (
        f"20 clients, {case['images']:,} training images; medians of {repeats} rounds in turn. "
        f"Test accuracy after them, ours and theirs: {reached}.\n\n" + table(head, rows)
    )


def precision(cases: dict) -> str:
    """Accuracy and seconds at each precision: mean and range over the seeds."""
    rows = []
    for key, case in cases.items():
        for kind in dict.fromkeys(r["precision"] for r in case["rows"]):
            acc, full = (
                [r["acc_pct"] for r in case["rows"] if r["precision"] == p] for p in (kind, "full")
            )
            apart = [a - b for a, b in zip(acc, full, strict=True)]
            seconds = statistics.median(
                r["train_s"] for r in case["rows"] if r["precision"] == kind
            )
            e = case["experiment"]
            said = (
                f"`{key}`: {label(e.get('method', 'fedavg'))}, {network(e['model'])}, "
                f"{e['max_samples']} images a client, {e['rounds']} rounds"
            )
            change = (
                "-"
                if kind == "full"
                else f"{statistics.mean(apart):+.2f} ({min(apart):+.2f} to {max(apart):+.2f})"
            )
            rows.append([said, kind, f"{seconds:.2f}", f"{statistics.mean(acc):.2f}", change])
    head = [
        "experiment",
        "precision",
        "s a round, training",
        "test accuracy (%), mean of the seeds",
        "against full, points (range)",
    ]
    return table(head, rows)


def plan(cases: dict) -> str:
    """The papers' cost at profile paper."""
    rows = []
    for key, case in cases.items():
        counts = [f"{case[n]:.3g}" for n in ("client_steps", "terabytes", "petaflop")]
        hours = [
            f"{case[n]:.3g}" if n in case else "-"
            for n in (f"hours_{g}_devices" for g in (1, 8, 64))
        ]
        floor = [f"{case[n]:.3g}" for n in ("floor_hours",) if n in case]
        if floor and "hours_1_devices" in case:
            floor.append(f"{case['hours_1_devices'] / case['floor_hours']:.1f}")
        floor += ["-"] * (2 - len(floor))
        rows.append([label(key), str(case["runs"]), *counts, *hours, *floor, case["rate"]])
    head = (
        "paper|runs|client-steps|TB moved|PFLOP|h on 1|on 8|on 64|floor (h)|times the floor|device"
    )
    return table(head.split("|"), rows)


def waits(cases: dict) -> str:
    """Waits and uploads, a line a method; those alike share one."""
    columns = [c for c in next(iter(cases.values())) if c != "about"]
    alike: dict[tuple, list[str]] = {}
    for name, case in cases.items():
        alike.setdefault(tuple(str(case[c]) for c in columns), []).append(label(name))
    return table(["method", *columns], [[", ".join(m), *row] for row, m in alike.items()])


def gpu(cases: dict) -> str:
    """What the stages of the first hour on a GPU found."""
    said = []
    for name, case in cases.items():
        rows = [shown(row) for row in case["rows"]]
        columns = list(dict.fromkeys(c for row in rows for c in row))
        lines = [[_named(c, str(row.get(c, ""))) for c in columns] for row in rows]
        heads = [_UNIT.sub(lambda unit: f" ({UNITS[unit[1]]})", c) for c in columns]
        said += [f"**{name}**, executor {case.get('executor', 'none')}", table(heads, lines)]
    return "\n\n".join(said)


def shown(row: dict) -> dict:
    """A row of a stage, its numbers short."""
    rest = {k: v for k, v in row.items() if k not in ("of", "drops", "tries")}
    short = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in rest.items()}
    return row["of"] | {k: " ".join(v) if isinstance(v, list) else v for k, v in short.items()}


def _named(column: str, value: str) -> str:
    # Names for keys; what a command takes or says is code.
    if value and column in ("case", "error"):
        return f"`{value}`"
    return ", ".join(network(v) if column == "network" else label(v) for v in value.split(", "))


def network(key: str) -> str:
    """A network's display name."""
    return display(key, MODEL_LABELS)


KINDS: dict[str, tuple[str, Callable[[dict], str]]] = {
    "rounds": (
        "A round, training and evaluation of train and test data, beside the plain loop",
        rounds,
    ),
    "server": ("The server's layer-wise aggregation beside a loop", server),
    "scaling": ("Growth", scaling),
    "many": ("Very many small clients, a hundredth of them a round", many),
    "peers": ("FedAvg in public simulators (quick start case, training only)", peers),
    "pfllib": (
        "A round of PFLlib's quick start, evaluation of test and training data included",
        pfllib,
    ),
    "profile": ("Where the time goes", profile),
    "precision": ("Accuracy at lower precision", precision),
    "waits": ("What a GPU would wait for in a round of each method", waits),
    "gpu": ("The first hour on a GPU", gpu),
    "plan": ("What the papers cost at profile paper", plan),
}


def sections() -> Iterator[str]:
    """One section a kind of benchmark, all its files in it."""
    for kind, (title, draw) in KINDS.items():
        yield f"### {title}"
        files = sorted(RESULTS.glob(f"{kind}*.json"))
        if not files:
            yield NONE
        for path in files:
            cases = json.loads(path.read_text())["cases"]
            yield f"`results/{path.name}`. {computers(cases)}"
            yield draw(cases)
            if path.with_suffix(".png").exists():
                yield f"![{path.stem}](results/{path.stem}.png)"


def main() -> None:
    """Replace what stands between the marks of README.md."""
    new = "\n\n".join(sections())
    README.write_text(between(README.read_text(), "tables", new, "python -m benchmarks.tables"))
    print(README)


if __name__ == "__main__":
    main()
