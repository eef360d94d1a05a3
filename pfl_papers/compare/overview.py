"""All five papers at a glance: what they print, and how much of it came out here."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from pfl_core.analysis import plots, verdicts
from pfl_core.analysis.select import grouped, tuples
from pfl_core.methods.base import METHODS
from pfl_papers.compare import judged
from pfl_papers.compare.judged import ABOVE, BEHIND, ONE_MODEL, PERSONAL, SIZES
from pfl_papers.compare.readable import listed
from pfl_papers.evidence import committed
from pfl_papers.papers.base import PAPERS, paper, title

CLAIMS = (*verdicts.CLAIMS, verdicts.DEPENDS, "not run")


def address(name: str) -> str:
    """Where a paper is to be read: arXiv's page of it, as its method's file cites it."""
    doc = inspect.getdoc(inspect.getmodule(METHODS[paper(name).own])) or ""
    number = re.search(r"arXiv:(\d{4}\.\d{5})", doc)
    if number is None:
        raise ValueError(f"the file of {paper(name).own} cites no arXiv number")
    return f"https://arxiv.org/abs/{number[1]}"


def ran() -> pd.DataFrame:
    """All printed leads of a paper's own method that two seeds or more were run of.

    Columns: paper, table, column, row (the other method), kind, printed (one of `judged.SIZES`),
    and those of `judged.leads` that say what came out. Rows of a column are sorted by what is
    printed.
    """
    cells = judged.leads()
    cells = cells[cells.n > 1]  # one seed has no interval
    each = [of.sort_values("reported", ascending=False) for _, of in grouped(cells, COLUMN)]
    cells = pd.concat(each or [cells], ignore_index=True)
    cells = cells.assign(printed=cells.reported.map(judged.size_of))
    return cells.reindex(columns=PICTURED)  # without any, some are not there


COLUMN = ["paper", "table", "column"]
PICTURED = [*COLUMN, "row", "kind", "printed", "reported", "reproduced", "low", "high", "n"]
PICTURED += ["verdict", "extent", "budget", "profile", "dataset", "dated"]
WIDTH = 7.2  # inches of the picture


@matplotlib.rc_context(plots.STYLE)
def drawn(cells: pd.DataFrame) -> Figure:
    """The picture of `ran`: leads over personal methods by size, and those over one model apart."""
    words = [w for w in (*verdicts.LEADS, verdicts.DEPENDS) if w in set(cells.verdict)]
    columns = [f"{plots.LABELS[c.paper]}, {title(c.table)}: {c.column}" for c in tuples(cells)]
    cells = cells.assign(
        verdict=pd.Categorical(cells.verdict, words),
        full=cells.budget == "full budget",
        group=columns,
    )
    personal, large = cells.kind == PERSONAL, cells.printed == ABOVE
    alone = cells[~personal]  # a line a column as a rule: its name stands beside the method's
    alone = alone.assign(row=alone.group + ", " + alone.row.map(plots.label), group="")
    lines = [[cells[personal & large], cells[personal & ~large]], [alone]]
    lines = [found for line in lines if (found := [of for of in line if len(of)])]
    heights = [max(map(_height, line)) for line in lines]
    fig = plots.Picture(figsize=(WIDTH, sum(heights) + 0.4), layout="constrained")
    parts = fig.subfigures(len(lines), 1, height_ratios=heights, squeeze=False)
    for line, part in zip(lines, parts.ravel(), strict=True):
        for of, panel in zip(line, part.subfigures(1, len(line), squeeze=False)[0], strict=True):
            said = _heading(of, letters=int(17 * WIDTH / len(line)))
            panel.suptitle(said, x=0.01, ha="left", fontsize=8)
            ax = plots.forest(of, panel.subplots())
            ax.tick_params(labelsize=plots.STYLE["font.size"])  # of ticks that are made later, too
    plots.legend_above(fig)
    return fig


def _height(part: pd.DataFrame) -> float:
    # Of a panel of the picture, in inches: its lines, heading and axis.
    return 0.14 * (len(part) + 1.25 * part.group[part.group != ""].nunique()) + 0.9


def _heading(part: pd.DataFrame, letters: int) -> str:
    # Of a panel: what became of its leads, in lines that fit.
    found = {size: judged.tally(part.verdict[part.printed == size]) for size in SIZES}
    whole = [re.sub(r"(\d) ", "\\1\xa0", line) for line in _printed(found, part.kind.iloc[0])]
    return "\n".join(textwrap.fill(line, letters).replace("\xa0", " ") for line in whole)


def _printed(found: Mapping[str, Mapping[str, int]], kind: str) -> list[str]:
    # A line a size: "29 printed leads above 2 points over personal methods: 8 ahead, 21 behind".
    out, over = [], f" over {OVER[kind]}"
    for size, of in found.items():
        if n := sum(of.values()):
            what = f"{'deficit' if size == BEHIND else 'lead'}{'s' * (n != 1)}"
            out.append(f"{n} printed {what}{SIZES[size]}{over}: {listed(of)}")
            if kind == PERSONAL:  # the first kind; of the second one each line says so
                over = ""
    return out


OVER = {PERSONAL: "personal methods", ONE_MODEL: "one model for all"}


def headline() -> list[str]:
    """What becomes of printed leads and accuracies: how many of each word."""
    counts, said = judged.summary(), []
    for kind in OVER:
        sizes = {size: counts["leads"][kind, size] for size in SIZES}
        said += [f"{part}." for part in _printed(sizes, kind)]
    if counts["nearing"]:
        said.append(f"Of these, still nearing 0: {listed(counts['nearing'])}.")
    if of := counts["accuracies"]:
        n = sum(of.values())
        said.append(f"{n} published accuracies beside what our runs predict: {listed(of)}.")
    return said


def _by_chance(counts: Mapping) -> list[str]:
    some = []
    for kind, chance in counts["chance"].items():
        if n := sum(sum(counts["leads"][kind, size].values()) for size in SIZES):
            some.append(f"{chance:.1f} of the {n} over {OVER[kind]}")
    told = (
        f"Were all methods equal, chance would put {' and '.join(some)} ahead, and as many behind."
    )
    return [told] * bool(some)


def said(cells: pd.DataFrame) -> list[str]:
    """What comes out and what does not, with all counts.

    Parameters
    ----------
    cells : DataFrame
        As `ran` gives them.
    """
    counts = judged.summary()
    return [
        *_claims(counts),
        *headline(),
        *_by_chance(counts),
        *order(),
        _budget(cells),
        _age(counts["prospective"]),
    ]


def _budget(cells: pd.DataFrame) -> str:
    profiles = dict.fromkeys(cells.profile)
    seeds = f"{cells.n.min():.0f} seeds or more" if len(cells) else ""
    text = f"The papers' own data, networks and clients; profile {' and '.join(profiles)}, {seeds}"
    text += "; medium has fewer rounds, and in part fewer samples" * ("medium" in profiles)
    if lacking := _lacking(cells.dataset.unique()):
        text += f"; samples missing here: {lacking}"
    return f"{text}."


def _age(young: Mapping[str, int]) -> str:
    when = "All" if not any(young.values()) else "Most"
    text = f"{when} of these runs are older than the rules that judge them (retrospective)"
    return text + f"; prospective: {listed(young)}" * any(young.values()) + "."


def _claims(counts: Mapping) -> list[str]:
    return [
        f"{f'{kind} claims'.strip().capitalize()}: {listed(of)}."
        for kind, of in counts["claims"].items()
    ]


def order() -> list[str]:
    """How methods are ordered, printed against ours; [] where no column says it."""
    found = judged.orders()
    own = found[found.kind == PERSONAL]
    if own.empty:
        return []
    columns = f"{len(own)} column{'s' * (len(own) > 1)}"
    return [
        f"Order of personal methods, printed against ours, {columns}: "
        f"Kendall's tau {_range(own.tau)}; were the printed order true, noise would leave "
        f"{_range(own.ceiling)}."
    ]


def _range(values: pd.Series) -> str:
    # "0.43", or "-1.00 to 0.67, median 0.07".
    if len(values) == 1:
        return f"{values.iloc[0]:.2f}"
    return f"{values.min():.2f} to {values.max():.2f}, median {values.median():.2f}"


def _lacking(names: Iterable[str]) -> str:
    # "CIFAR-10 2 %": what the copies that committed runs used lack of the published sets.
    shares = {name: committed.lacks(name) for name in sorted(names)}
    return ", ".join(f"{plots.in_words(n)} {100 * v:.0f} %" for n, v in shares.items() if v)


def counts() -> pd.DataFrame:
    """A line a paper: its published accuracies and leads, its claims, and what became of them.

    Comparable are those that profile paper computes in the paper's setting. Only runs with the
    paper's own data, networks and clients count (profiles medium and paper); a number that several
    tables print counts once.
    """
    lines, claimed = [], judged.claims()
    parts = {"": judged.accuracies(), "leads: ": judged.leads()}
    for name in PAPERS:
        cells = judged.of_paper(name, "accuracy")
        line = {"paper": plots.LABELS[name], "accuracies published": len(cells)}
        line |= {"comparable": int(cells.comparable.sum()), "run": 0}
        for head, every in parts.items():
            words = every[every.paper == name].verdict
            known = verdicts.LEADS if head else verdicts.ACCURACIES
            line |= {f"{head}{w}": int((words == w).sum()) for w in (*known, verdicts.DEPENDS)}
            line["run"] = line["run"] if head else len(words)
        of_claims = claimed[claimed.paper == name].verdict
        line |= {f"claims: {word}": int((of_claims == word).sum()) for word in CLAIMS}
        lines.append(line)
    return pd.DataFrame(lines)
