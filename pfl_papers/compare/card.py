"""A paper's card: which of its headline claims hold here, at what budget, and what is open.

It is the first thing in the paper's notebook, and its `line` stands in README. All of it comes from
`judged`: no number is written here.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from pfl_core.analysis import plots, verdicts
from pfl_core.analysis.select import tuples
from pfl_core.experiments.experiment import Experiment
from pfl_papers.compare import fullest, judged, report
from pfl_papers.compare.readable import coloured, listed, markdown, of_texts
from pfl_papers.evidence import committed
from pfl_papers.papers import base as papers
from pfl_papers.papers.base import KINDS, Scope

HEADLINE = KINDS[0]
WORDS = (*verdicts.CLAIMS, verdicts.DEPENDS)
NOT_RUN = "not run"
LEGEND = (
    "Holds: every difference that the claim rests on lies above 0, or another stated bound, and "
    "has come to rest. Contradicted: one lies below it, also after Holm's correction. Tie: none "
    "lies below, and those not above are small. Open: an interval is too wide, or a difference "
    "still moves. Depends on a reading: the paper leaves a choice open that changes the verdict. "
    "Brackets: 95 % intervals over seeds."
)


class Line(NamedTuple):
    """A headline claim that was run: its words, its place, its verdict, what decides it."""

    says: str
    where: str
    verdict: str
    number: str


@dataclass(frozen=True)
class Card:
    """What holds of a paper, for a notebook (HTML), a page (Markdown) and README (`line`).

    Attributes
    ----------
    name : str
        The paper's key.
    headline : tuple of Line
        Claims that its method beats others, as far as they were run.
    budgets : {title of a table or figure: str}
        What was run of those that decide them.
    leads : str
        What became of its printed leads; "" without any.
    claimed : {kind: {verdict: tuple of claims}}
        All claims, also those that are "not run".
    left : tuple of str
        Tables and figures without a run in the paper's setting.
    """

    name: str
    headline: tuple[Line, ...]
    budgets: dict[str, str]
    leads: str
    claimed: dict[str, dict[str, tuple[str, ...]]]
    left: tuple[str, ...]

    def counted(self, kind: str = HEADLINE) -> dict[str, int]:
        """How many claims of a kind have which verdict, "not run" among them."""
        return {word: len(of) for word, of in self.claimed.get(kind, {}).items()}

    def markdown(self) -> str:
        """The card as Markdown."""
        first, *rest = [f"**{lead}** {text}" for lead, text in self._said(_marked, "`{}`".format)]
        table = [markdown(_framed(self.headline, _marked))] if self.headline else []
        return "\n\n".join([first, *table, *rest])

    def line(self) -> dict[str, str]:
        """What README says of the paper: the counts, its first claim's number, and the budget."""
        number = budget = "-"
        for first in self.headline[:1]:
            open_ = first.verdict == "open"  # its number and the reason, not what would decide it
            number = "; ".join(first.number.split("; ")[:2]) if open_ else first.number
            budget = next(iter(self.budgets.values())).partition(";")[0]  # of that claim
        counts = _listed(self.counted(), _marked)
        return {
            "headline claims": counts,
            "number that decides the first": number,
            "budget of the first": budget,
        }

    def _said(
        self, mark: Callable[[str, str], str], code: Callable[[str], str]
    ) -> list[tuple[str, str]]:
        """Leads in bold with their text; a table stands behind the first."""
        told = f"Headline claims: {_listed(self.counted(), mark)}. {self.leads}".strip()
        out = [(f"What holds of {plots.label(papers.paper(self.name).own)} here.", told)]
        if self.budgets:
            budgets = [f"{title}: {said}." for title, said in self.budgets.items()]
            out.append(("Budget.", " ".join(budgets)))
        if unread := self.claimed.get(HEADLINE, {}).get(NOT_RUN, ()):
            out.append((f"Headline, not run ({len(unread)}).", f"{'; '.join(unread)}."))
        for kind in KINDS[1:]:
            if of := self.claimed.get(kind):
                out.append((f"{kind.capitalize()}.", _in_few_words(of, mark)))
        if self.left:
            out.append(
                ("Not run in the paper's setting.", f"{titles(self.left)}. {self._how(code)}")
            )
        return out

    def _how(self, code: Callable[[str], str]) -> str:
        about = papers.paper(self.name).artefacts
        cut = [a for a in self.left if about[a].medium]
        others = f" ({code('--profile paper')} has the others)"
        profile = "medium" if cut else "paper"
        line = code(command(self.name, cut or self.left, profile))
        plan = code(command(self.name, tuple(about), profile, "plan"))
        return f"Train them: {line}{others * (0 < len(cut) < len(self.left))}. Hours: {plan}."

    def _repr_html_(self) -> str:
        said = self._said(lambda text, verdict="": f"<b>{coloured(text, verdict)}</b>", _tagged)
        first, *rest = [f"<p><b>{html.escape(lead)}</b> {text}</p>" for lead, text in said]
        parts = [first]
        if self.headline:
            safe = [
                c._replace(says=html.escape(c.says), where=html.escape(c.where))
                for c in self.headline
            ]
            table = _framed(safe, lambda text: f"<b>{coloured(text)}</b>")
            parts.append(of_texts(table))
        parts += [*rest, f"<p><small>{LEGEND}</small></p>"]
        box = "border-left: 4px solid #888; padding: 0 1em; max-width: 60em"
        return f'<div style="{box}">\n' + "\n".join(parts) + "\n</div>"

    def __repr__(self) -> str:
        return self.markdown()


def card(name: str) -> Card:
    """Return the card of a paper, made of what is committed; nothing is trained.

    Parameters
    ----------
    name : str

    Raises
    ------
    ValueError
        For an unknown paper.
    """
    paper = papers.paper(name)
    said = judged.claims(paper.key)
    ran = said[(said.kind == HEADLINE) & said.verdict.isin(WORDS)]
    headline = [Line(v.says, v.source, v.verdict, v.brief or v.why) for v in tuples(ran)]
    once = ran.drop_duplicates("artefact")
    claimed = {
        str(kind): {
            word: tuple(of[of.verdict == word].says)
            for word in (*WORDS, NOT_RUN)
            if (of.verdict == word).any()
        }
        for kind, of in said.groupby("kind")
    }
    there = {a for part in fullest.parts(paper.key) for a in part.rows().artefact.unique()}
    left = [a for a in paper.artefacts if a not in there]
    return Card(
        name=paper.key,
        headline=tuple(headline),
        budgets={papers.title(v.artefact): _budget(paper, v) for v in tuples(once)},
        leads=_leads(judged.leads(paper.key)),
        claimed=claimed,
        left=tuple(left),
    )


def command(name: str, artefacts: Collection[str], profile: str, word: str = "compute") -> str:
    """The command that trains artefacts of a paper at a profile, or another one ("plan")."""
    some = f" --artefacts {' '.join(artefacts)}"
    every = len(artefacts) == len(papers.paper(name).artefacts)
    return f"python -m pfl_papers {word} {name} --profile {profile}" + some * (not every)


def titles(artefacts: Iterable[str]) -> str:
    """Artefacts as a reader says them: "Tables 2, 5a and Figure 3"."""
    named: dict[str, list[str]] = {}
    for artefact in artefacts:
        kind, _, number = papers.title(artefact).rpartition(" ")
        named.setdefault(kind, []).append(number)
    parts = [f"{kind}{'s' * (len(of) > 1)} {', '.join(of)}" for kind, of in named.items()]
    return "; ".join(parts)


def _budget(paper: papers.Paper, claim: Any) -> str:
    """What was run of the table or figure that a claim rests on: data, seeds, rounds, samples."""
    rows = pd.concat([p.rows() for p in fullest.parts(paper.key) if p.profile == claim.profile])
    rows = rows[(rows.artefact == claim.artefact) & (rows["average"] != "derived")]
    rows = rows.assign(column=rows.column.map(paper.printed))
    planned = paper.planned(Scope("paper"), claim.artefact)
    every = {c for s in planned if s.artefact == claim.artefact for c in s.columns}
    if paper.tables:  # FedPer prints no number
        said = papers.reported(paper)
        every = set(said[said.table == claim.artefact].column) or every
    data = plots.in_words(", ".join(sorted(rows.dataset.unique())))
    some = len(every.intersection(rows.column))
    counted = rows[rows.column.isin(every)] if some else rows  # columns of ours decide nothing
    seeds = report.seeds_in_words(counted.groupby(["column", "row"]).seed.nunique())
    cut = [said for said in claim.scale.split("; ") if said and "rounds" not in said]
    whole = "; ".join(map(plots.in_words, [_run(paper, claim.artefact, rows), *cut]))
    return f"{data} ({some} of {len(every)} columns), {seeds}, {whole}"


def _run(paper: papers.Paper, artefact: str, rows: pd.DataFrame) -> str:
    """Networks and rounds of the paper's own row: "CNN, 25 of 200 rounds"."""
    own = rows[rows.row == paper.own] if (rows.row == paper.own).any() else rows
    rounds, nets = {}, {}
    for v in tuples(own.drop_duplicates(["row", "column"])):
        ran = committed.experiment(v.run)
        theirs = report.counterpart(paper.key, artefact, v.row, v.column)
        if ran and theirs:
            rounds[f"all {ran.rounds:,}" if ran.rounds == theirs.rounds else _of(ran, theirs)] = 0
            nets[plots.MODEL_LABELS.get(ran.model, ran.model)] = 0
    whose = "; the paper gives no rounds, so their number is ours" * (artefact in paper.unstated)
    return f"{' and '.join(nets)}, {' and '.join(rounds)} rounds{whose}"


def _of(ran: Experiment, theirs: Experiment) -> str:
    return f"{ran.rounds:,} of {theirs.rounds:,}"


def _leads(leads: pd.DataFrame) -> str:
    parts = []
    for (kind, size), counts in judged.counted(leads).items():
        if kind == judged.PERSONAL and size != judged.BEHIND and counts:
            parts.append(f"of {sum(counts.values())}{judged.SIZES[size]} {listed(counts)}")
    printed = leads[(leads.kind == judged.PERSONAL) & (leads.reported > 0)]
    if parts and (near := judged.nearing(printed)):
        parts.append(f"of these still nearing 0 {listed(near)}")
    return f"Printed leads over personal methods: {'; '.join(parts)}." if parts else ""


def _in_few_words(of: Mapping[str, tuple[str, ...]], mark: Callable[[str, str], str]) -> str:
    # Claims by verdict; what stands in brackets is left out.
    parts = []
    for verdict, claims in of.items():
        short = [re.sub(r" \([^()]*\)", "", says) for says in claims]
        told = "" if verdict == NOT_RUN else f": {'; '.join(short)}"
        parts.append(f"{_listed({verdict: len(claims)}, mark)}{told}.")
    return " ".join(parts)


def _framed(lines: Iterable[Line], mark: Callable[[str], str]) -> pd.DataFrame:
    cells = [
        {
            "the paper says": f"{c.says} ({c.where})",
            "here": mark(c.verdict),
            "what decides it": c.number,
        }
        for c in lines
    ]
    return pd.DataFrame(cells)


def _listed(counts: Mapping[str, int], mark: Callable[[str, str], str]) -> str:
    """Counts with each verdict marked."""
    parts = {word: listed({word: n}).partition(" ") for word, n in counts.items()}
    return ", ".join(f"{n} {mark(said, word)}" for word, (n, _, said) in parts.items()) or "none"


def _marked(text: str, verdict: str = "") -> str:
    return f"**{text}**"


def _tagged(text: str) -> str:
    return f"<code>{text}</code>"
