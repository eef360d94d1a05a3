"""figures/report.html: the five papers on one page, which needs no server and no other file."""

from __future__ import annotations

import base64
import importlib
import io
import platform
import re
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from PIL import Image

from pfl_core.analysis import plots
from pfl_core.analysis.plots import LABELS, label
from pfl_core.analysis.select import records
from pfl_core.util import checks
from pfl_core.util.version import __version__
from pfl_papers import places
from pfl_papers.bench import comparison as compare
from pfl_papers.compare import overview, readable, report
from pfl_papers.evidence import committed
from pfl_papers.evidence.committed import Part
from pfl_papers.papers.base import PAPERS, paper, title


def build(root: Path | None = None) -> Path:
    """Write root/figures/report.html from what lies below root, and return its path.

    Parameters
    ----------
    root : path, optional
        By default the repository.

    Raises
    ------
    OSError
        Where the package is installed without the repository, and no root is given.
    """
    from jinja2 import Environment, PackageLoader

    root = root or places.checkout("report")
    env = Environment(loader=PackageLoader("pfl_papers.notebook"), autoescape=True)
    env.globals |= dict(tone=readable.tone, legend=readable.LEGEND)
    parts = [(p, p.rows()) for p in committed.parts(folder=root / "results").values()]
    facts = {fact for _, rows in parts for fact in zip(rows.device, rows.version, strict=True)}
    page = f"pfl_core {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    shown = dict(
        **_first_screen(),
        papers=[_paper(name, parts, root / "figures" / name) for name in PAPERS],
        comparisons=[_comparison(*part) for part in parts if part[0].paper == "methods"],
        speed=_speed(root / "benchmarks" / "README.md"),
        environment={
            "rows computed on": ", ".join(sorted({device for device, _ in facts})),
            "rows computed with": ", ".join(sorted({f"pfl_core {v}" for _, v in facts})),
            "page made with": page,
        },
    )
    out = root / "figures" / "report.html"
    out.parent.mkdir(exist_ok=True)
    out.write_text(env.get_template("report.html").render(shown), encoding="utf-8")
    return out


def _first_screen() -> dict[str, Any]:
    """The picture of printed and reproduced leads, its caption, and the counts."""
    cells = overview.ran()
    counts = overview.counts()
    picture = None
    if len(cells):
        png = plots.compact(overview.drawn(cells))
        picture = _embedded(png) | dict(said=overview.said(cells))
    totals = counts.drop(columns="paper").sum()
    return dict(
        picture=picture,
        counts=[dict(zip(counts, line, strict=True)) for line in counts.to_numpy().tolist()],
        addresses=[overview.address(name) for name in PAPERS],
        published=f"{totals['accuracies published']:,}",
        comparable=f"{totals.comparable:,}",
        ran=f"{totals.run:,}",
        claimed=readable.listed({w: totals[f"claims: {w}"] for w in overview.CLAIMS}),
    )


def _paper(name: str, parts: list[tuple[Part, pd.DataFrame]], folder: Path) -> dict[str, Any]:
    about = (importlib.import_module(f"pfl_papers.papers.{name}").__doc__ or "").partition("\n")[0]
    runs = [_part(*part, folder) for part in parts if part[0].paper == name]
    return dict(key=name, label=LABELS[name], about=about, runs=runs)


def _part(part: Part, rows: pd.DataFrame, folder: Path) -> dict[str, Any]:
    tables = []
    for artefact, about in paper(part.paper).artefacts.items():
        held = report.held_of(part, artefact)
        found = {metric: of.cells for metric, of in held.items()}
        if "acc_pct" in held:
            own = label(paper(part.paper).own)
            found[f"points by which {own} leads"] = held["acc_pct"].leads
        for what, cells in found.items():
            if cells.reproduced.notna().any():
                name = title(artefact) + (f", {plots.named(what)}" if what != "acc_pct" else "")
                tables.append(dict(title=name) | _table(cells, about.digits))
    figures = sorted((folder / part.label).glob("*.png"), key=_order)
    return dict(
        key=f"{part.paper}-{part.label}",
        profile=part.profile,
        data=part.data,
        data_sets=report.data_sets(rows),
        claims=_claims(part),
        tables=tables,
        figures=[_figure(p) for p in figures],
    )


def _claims(part: Part) -> list[dict[str, str]]:
    judged = records(report.claims_of(part))
    return [c | dict(verdict=readable.worded(c["verdict"], c["reason"])) for c in judged]


def _order(path: Path) -> list[tuple[str, int]]:
    name = path.stem.replace("app", "~")  # an appendix comes last
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _table(cells: pd.DataFrame, digits: int) -> dict[str, Any]:
    # cells: as `report.compare` gives them.
    ran = cells[cells.reproduced.notna()]
    columns = list(dict.fromkeys(ran.column))
    by = {(c["row"], c["column"]): _cell(c, digits) for c in records(ran)}
    none = dict(ours="", reported="", verdict="")
    rows = {plots.named(r): [by.get((r, c), none) for c in columns] for r in dict.fromkeys(ran.row)}
    return dict(columns=[plots.named(c) for c in columns], rows=rows)


def _cell(cell: dict[str, Any], digits: int) -> dict[str, str]:
    ours = readable.with_interval(cell["reproduced"], cell["low"], cell["high"], digits)
    said = ""
    if cell["difference"] == cell["difference"]:
        ends = cell["difference"], cell["difference_low"], cell["difference_high"]
        gap = readable.with_interval(*ends, digits, sign="+")
        said = f"paper {cell['reported']:.{digits}f} ({gap})"
    return dict(
        ours=ours,
        reported=said,
        verdict=readable.worded(cell["verdict"], cell["reason"], cell["extent"]),
    )


def _figure(path: Path) -> dict[str, Any]:
    return _embedded(path.read_bytes()) | dict(title=title(path.stem))


def _embedded(png: bytes) -> dict[str, Any]:
    """A picture as an address that needs no other file, with at most 256 colours."""
    with Image.open(io.BytesIO(png)) as image:
        width, height = image.size
        small = io.BytesIO()
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
            small, "PNG", optimize=True
        )
    shortest = min(png, small.getvalue(), key=len)
    uri = "data:image/png;base64," + base64.b64encode(shortest).decode()
    return dict(uri=uri, width=width, height=height)


def _comparison(part: Part, rows: pd.DataFrame) -> dict[str, Any]:
    from markupsafe import Markup

    shown = [readable.named(frame).rename_axis(None) for frame in compare.tables(rows).values()]
    found = [Markup(frame.to_html(border=0)) for frame in shown]
    return dict(title=f"Profile {part.profile}, data {part.data}", tables=found)


def _speed(readme: Path) -> str:
    from markupsafe import Markup

    with checks.extra("notebooks", "the report"):
        from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    if not readme.exists():
        return ""
    text = re.sub("<!--.*?-->", "", readme.read_text(encoding="utf-8"), flags=re.DOTALL)
    # Pictures and links of files that are not sent with the page.
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^]]*)\]\((?!https?:|javascript:)[^)]*\)", r"\1", text)
    text = re.sub(r"\b\d(\.\d+)?e\+\d\d\b", lambda found: readable.large(float(found[0])), text)
    text = re.sub(r"\b\d(\.\d+)?e-\d\d\b", lambda found: readable.small(float(found[0])), text)
    # Other HTML that stands in the file is shown as text, and no link runs anything.
    page = MarkdownWithMath(renderer=IPythonRenderer(escape=True, allow_harmful_protocols=False))
    return Markup(page.render(text))
