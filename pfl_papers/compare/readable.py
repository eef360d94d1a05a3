"""Tables for people: published beside reproduced, with intervals and verdicts in words."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping

import pandas as pd

from pfl_core.analysis import plots, verdicts
from pfl_core.analysis.select import tuples
from pfl_core.util.cards import markdown

_INTERVALS = (
    "In brackets: 95 % intervals over seeds; none for one seed. Noise is pooled over the personal "
    "methods of a column and shrunk towards that of all columns."
)
_BEST = "Bold: the best value in a column and all that tie with it."
_VERDICTS = (
    "Accuracies: inside, the printed number lies in the 95 % interval where our runs predict it; "
    "outside, it does not, with what our budget lacks. Leads of the paper's own "
    "method: ahead, its interval lies above 0; behind, below 0; no lead, it ends within "
    f"{verdicts.SMALL:g} points of 0 and the printed lead is excluded; too small to tell, it ends "
    "within them and the printed lead is possible; open, wider. We assume that a paper compares "
    "its methods on the same draws of clients."
)
LEGEND = f"{_INTERVALS} {_BEST} {_VERDICTS}"
TONES = {"inside": "good", "ahead": "good", "holds": "good"}
TONES |= {"too small to tell": "fair", "tie": "fair", verdicts.DEPENDS: "fair"}
TONES |= {
    "outside": "bad",
    "behind": "bad",
    "no lead": "bad",
    "contradicted": "bad",
    "open": "open",
}
# Legible on white and on a dark page: a notebook does not know on which it is shown.
COLOURS = {"good": "#138a3b", "fair": "#967207", "bad": "#e13731", "open": "#7a7a7a"}


def tone(verdict: str) -> str:
    """ "good", "fair", "bad", "open" or "": how a verdict is coloured."""
    return TONES.get(re.split("[:,]", verdict)[0], "")


def number(value: float, digits: int, sign: str = "") -> str:
    """A number as text, "" for NaN."""
    return "" if pd.isna(value) else f"{value:{sign}.{digits}f}"


def large(value: float) -> str:
    """A large number as people say it: "95,600", "91.3 million", "3.77 billion"."""
    for size, word in ((1e9, " billion"), (1e6, " million")):
        if abs(value) >= size:
            return f"{value / size:.3g}{word}"
    return f"{value:,.0f}"


def small(value: float) -> str:
    """A number far below 1 as people write it: "1.32 × 10⁻¹⁴", "10⁻¹⁰"."""
    digits, _, power = f"{value:.3g}".partition("e-")
    if not power:
        return digits
    raised = "10⁻" + str(int(power)).translate(_RAISED)
    return raised if digits == "1" else f"{digits} × {raised}"


_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def with_interval(value: float, low: float, high: float, digits: int, sign: str = "") -> str:
    """ "83.2 [82.1, 84.3]"; without brackets where there is no interval, "" for NaN."""
    text = number(value, digits, sign)
    if not text or pd.isna(low):
        return text
    return f"{text} [{number(low, digits, sign)}, {number(high, digits, sign)}]"


class Table:
    """What `report.compare` found, as Markdown, as HTML in a notebook, and as frames of text.

    Attributes
    ----------
    compared : DataFrame
        Its lines, and a column `last` where the last round is shown beside.
    caption : str
        A sentence above.
    digits : int
        Decimals.
    legend : bool
        Whether a notebook shows the legend below it.
    """

    def __init__(
        self, compared: pd.DataFrame, caption: str = "", digits: int = 2, legend: bool = True
    ):
        self.compared, self.caption, self.digits = compared, caption, digits
        self.legend = legend
        ran = compared[compared.reproduced.notna()]
        self.ran = list(dict.fromkeys(ran.column))

    def text(self, bold: Callable[[str], str] = lambda text: text) -> pd.DataFrame:
        """Columns that were run: a row a method; reported, ours, difference and verdict."""
        out = {}
        for column in self.ran:
            cells = self.compared[self.compared.column == column].set_index("row")
            out[column, "reported"] = {r: self._reported(c) for r, c in cells.iterrows()}
            for row, c in cells.iterrows():
                ours = with_interval(c.reproduced, c.low, c.high, self.digits)
                out.setdefault((column, "ours"), {})[row] = bold(ours) if c.best else ours
            if "last" in cells:
                last = {r: number(c["last"], self.digits) for r, c in cells.iterrows()}
                out[column, "ours, last round"] = last
            out[column, "difference"] = {r: self._difference(c) for r, c in cells.iterrows()}
            out[column, "verdict"] = {r: worded(*c[_WORDED]) for r, c in cells.iterrows()}
        return self._framed(out)

    def not_run(self) -> pd.DataFrame:
        """Published columns without a number of ours: a row a method."""
        left = self.compared[~self.compared.column.isin(self.ran)]
        names = dict.fromkeys(left.column)
        cells = {c: left[left.column == c].set_index("row") for c in names}
        return self._framed(
            {c: {r: self._reported(v) for r, v in of.iterrows()} for c, of in cells.items()}
        )

    def _framed(self, columns: dict) -> pd.DataFrame:
        rows = list(dict.fromkeys(self.compared.row))
        frame = pd.DataFrame(columns).reindex(rows).fillna("")
        frame = frame.loc[(frame != "").any(axis=1), (frame != "").any()]
        return frame.rename(index=plots.named, columns=plots.named).rename_axis("method")

    def _reported(self, cell: pd.Series) -> str:
        spread = "" if pd.isna(cell.reported_sd) else f" ± {cell.reported_sd:.{self.digits}f}"
        return number(cell.reported, self.digits) + spread

    def _difference(self, cell: pd.Series) -> str:
        ends = cell.difference_low, cell.difference_high
        return with_interval(cell.difference, *ends, self.digits, sign="+")

    def _legend(self) -> str:
        return LEGEND if self.compared.best.any() else f"{_INTERVALS} {_VERDICTS}"

    def markdown(self) -> str:
        """The caption, the table, its legend, and below it what was not run."""
        ran, rest = self.text(lambda text: f"**{text}**"), self.not_run()
        parts = [f"{self.caption}\n"] * bool(self.caption)
        if self.ran:
            parts += [markdown(flat(ran)), f"\n{self._legend()}\n"]
        if len(rest):
            parts += ["Published, not run here:\n", markdown(rest)]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(self.caption)}</p>"] * bool(self.caption)
        if self.ran:
            ran = _escaped(self.text(lambda text: f"{_BOLD}{text}")).map(coloured)
            parts.append(ran.to_html(escape=False, border=0, justify="left"))
            parts += [f"<p><small>{self._legend()}</small></p>"] * self.legend
        if len(rest := self.not_run()):
            summary = f"Published, not run here: {', '.join(rest.columns)}"
            table = rest.to_html(border=0)
            parts.append(f"<details><summary>{html.escape(summary)}</summary>{table}</details>")
        return "\n".join(parts)

    def __repr__(self) -> str:
        return "\n".join([self.caption] * bool(self.caption) + [self.text().to_string()])


class Claims:
    """A paper's claims in a notebook: what it says, our verdict, why, and what that says of it.

    Attributes
    ----------
    frame : DataFrame
        As `report.claims` gives it. Claims that were not run are folded.
    """

    def __init__(self, frame: pd.DataFrame):
        self.frame = frame
        self.ran = frame[frame.verdict != "not run"]
        self.left = frame[frame.verdict == "not run"]

    def text(self, place: str = " ({})") -> pd.DataFrame:
        """A row a claim that was run; `place` is how its place in the paper is written."""
        lines = [
            {
                "the paper says": c.says
                + place.format("; ".join(filter(None, (c.source, c.limit)))),
                "kind": c.kind,
                "verdict": worded(c.verdict, c.reason),
                "why": f"{c.why} ({c.scale})" if c.scale else c.why,
                "what that says": c.status,
            }
            for c in tuples(self.ran)
        ]
        return pd.DataFrame(lines)

    def not_run(self) -> list[str]:
        """The claims that were not run, with their places."""
        return [f"{c.says} ({c.source})" for c in tuples(self.left)]

    def _repr_html_(self) -> str:
        parts = []
        if len(self.ran):
            said = self.text().map(html.escape)
            said["verdict"] = said.verdict.map(coloured)
            parts.append(of_texts(said))
        if left := self.not_run():
            lines = "".join(f"<li>{html.escape(line)}</li>" for line in left)
            summary = f"<summary>Claims that were not run: {len(left)}</summary>"
            parts.append(f"<details>{summary}<ul>{lines}</ul></details>")
        return "\n".join(parts) or "<p>No claims.</p>"

    def __repr__(self) -> str:
        return "\n".join(f"{c.says} ({c.source}): {c.verdict}" for c in tuples(self.frame))


class Texts(pd.DataFrame):
    """A frame of sentences: a notebook shows heads and cells at the left."""

    @property
    def _constructor(self) -> type[Texts]:
        return Texts

    def _repr_html_(self) -> str:
        ranged = isinstance(self.index, pd.RangeIndex)
        return of_texts((self if ranged else self.reset_index()).map(lambda v: html.escape(str(v))))


def of_texts(frame: pd.DataFrame) -> str:
    """A frame of sentences as an HTML table, heads and cells at the left."""
    page = frame.to_html(escape=False, index=False, border=0)
    return re.sub("<(t[hd])>", r'<\1 style="text-align: left">', page)


def worded(verdict: str, reason: str = "", extent: str = "") -> str:
    """A verdict with its reason or extent; "" for what is no verdict on a cell."""
    if verdict in ("no published number", "not run", "not judged"):
        return ""
    return f"{verdict}: {reason}" if reason else f"{verdict}, {extent}" if extent else verdict


def listed(counts: Mapping[str, int]) -> str:
    """Verdicts, counted: "3 hold, 1 tie, 2 depend on a reading"; "none" without any."""
    one = {verdicts.DEPENDS: "depends on a reading"}
    many = {"holds": "hold", "tie": "ties", verdicts.DEPENDS: "depend on a reading"}
    said = [f"{n} {(many if n > 1 else one).get(word, word)}" for word, n in counts.items() if n]
    return ", ".join(said) or "none"


_WORDED = ["verdict", "reason", "extent"]
_BOLD = "\ue000"  # of no alphabet; stands before what is to be bold


def _escaped(frame: pd.DataFrame) -> pd.DataFrame:
    columns = frame.columns.map(lambda names: tuple(html.escape(name) for name in names))
    return frame.map(html.escape).rename(index=html.escape).set_axis(columns, axis=1)


def coloured(text: str, verdict: str = "") -> str:
    """A verdict as HTML in its colour; what begins with the mark of bold text is bold.

    Parameters
    ----------
    text : str
    verdict : str
        Whose colour a text has that is not a verdict itself.
    """
    if text.startswith(_BOLD):
        return f"<b>{text.removeprefix(_BOLD)}</b>"
    colour = COLOURS.get(tone(verdict or text))
    return f'<span style="color: {colour}">{text}</span>' if colour else text


def renamed(frame: pd.DataFrame) -> pd.DataFrame:
    """A frame with a display name in place of every registered key."""
    ranged = isinstance(frame.index, pd.RangeIndex)
    out = frame.rename(columns=plots.named, index=None if ranged else plots.named)
    for place in range(out.shape[1]):
        if out.iloc[:, place].dtype.kind == "O":
            out.isetitem(place, [plots.named(v) for v in out.iloc[:, place]])
    return out


def named(frame: pd.DataFrame) -> pd.DataFrame:
    """A frame as a notebook shows it: display names, blanks for NaN, no names of its sides."""
    out = renamed(frame)
    out.index.names = [None if n in _SIDES else n for n in out.index.names]
    out.columns.names = [None] * out.columns.nlevels
    for place in range(out.shape[1]):
        column = out.iloc[:, place]
        if column.isna().any():
            text = column.dtype.kind == "O"
            out.isetitem(place, ["" if pd.isna(v) else v if text else f"{v:g}" for v in column])
    return out


_SIDES = ("row", "column", "metric")  # of a table; they say nothing to a reader


def flat(frame: pd.DataFrame) -> pd.DataFrame:
    """A frame whose column names are text: "CIFAR-10: ours"."""
    names = [": ".join(c) if isinstance(c, tuple) else c for c in frame.columns]
    return frame.set_axis(names, axis=1)
