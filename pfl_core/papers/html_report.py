"""figures/report.html: the five papers on one page that needs no server and no other file, from committed rows and figures."""

from __future__ import annotations

import base64
import importlib
import platform
import re
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from PIL import Image

from pfl_core.analysis.plots import LABELS, label
from pfl_core.experiments import committed
from pfl_core.papers import comparison as compare
from pfl_core.papers import report
from pfl_core.papers.base import PAPERS, paper, title
from pfl_core.util import paths
from pfl_core.util.version import __version__

TONES = {"reproduced": "good", "holds": "good", "ordering kept": "fair", "kept": "fair"}
TONES |= dict.fromkeys(["not reproduced", "does not hold", "changed"], "bad")


def build(root: Path = paths.CHECKOUT) -> Path:
    """Write root/figures/report.html from root's results/, figures/ and benchmarks/; returns its path."""
    from jinja2 import Environment, PackageLoader

    env = Environment(loader=PackageLoader("pfl_core.papers"), autoescape=True)
    env.globals["tone"] = lambda verdict: TONES.get(verdict, "")
    rows = {name: part.rows() for name, part in committed.parts(folder=root / "results").items()}
    every = pd.concat(
        [r[["device", "version"]] for r in rows.values()]
        or [pd.DataFrame(columns=["device", "version"])]
    )
    shown = dict(
        papers=[_paper(name, rows, root / "figures" / name) for name in PAPERS],
        comparisons=[_comparison(at, r) for at, r in rows.items() if at.startswith("methods.")],
        speed=_speed(root / "benchmarks" / "README.md"),
        environment={
            "rows computed on": ", ".join(sorted(set(every.device))),
            "rows computed with": ", ".join(f"pfl_core {v}" for v in sorted(set(every.version))),
            "page made with": f"pfl_core {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        },
    )
    out = root / "figures" / "report.html"
    out.parent.mkdir(exist_ok=True)
    out.write_text(env.get_template("report.html").render(shown), encoding="utf-8")
    return out


def _paper(name: str, rows: dict[str, pd.DataFrame], folder: Path) -> dict[str, Any]:
    runs = []
    for at in (at.removeprefix(f"{name}.") for at in rows if at.startswith(f"{name}.")):
        (profile, data), own = at.split("-", 1), rows[f"{name}.{at}"]
        claims = report.claims(name, own, profile).to_dict("records")
        found = {a: report.tables(own, name, a) for a in paper(name).artefacts}
        tables = [
            _table(name, a, m, cells) for a, each in found.items() for m, cells in each.items()
        ]
        figures = [_figure(p) for p in sorted((folder / at).glob("*.png"), key=_order)]
        shown = dict(
            data_sets=report.data_sets(own),
            tables=[t for t in tables if t["rows"]],
            figures=figures,
        )
        runs.append(dict(profile=profile, data=data, claims=claims) | shown)
    about = (importlib.import_module(f"pfl_core.papers.{name}").__doc__ or "").partition("\n")[0]
    return dict(key=name, label=LABELS[name], about=about, runs=runs)


def _order(path: Path) -> list[tuple[str, int]]:
    name = path.stem.replace("app", "~")  # an appendix comes last
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _table(name: str, artefact: str, metric: str, cells: pd.DataFrame) -> dict[str, Any]:
    # cells: as `report.compare` gives them.
    ran = cells[cells.reproduced.notna()]
    columns = list(dict.fromkeys(ran.column))
    by = {
        (c["row"], c["column"]): _cell(c, paper(name).artefacts[artefact].digits)
        for c in ran.to_dict("records")
    }
    none = dict(reproduced="", reported="", verdict="")
    shown = {label(r): [by.get((r, c), none) for c in columns] for r in dict.fromkeys(ran.row)}
    return dict(
        title=title(artefact) + (f" ({metric})" if metric != "acc_pct" else ""),
        columns=columns,
        rows=shown,
    )


def _cell(c: dict[str, Any], digits: int) -> dict[str, str]:
    spread = f" ± {c['sd']:.{digits}f}" if c["sd"] == c["sd"] else ""
    known = c["reported"] == c["reported"]
    return dict(
        reproduced=f"{c['reproduced']:.{digits}f}{spread}",
        reported=f"paper {c['reported']:.{digits}f} ({c['difference']:+.{digits}f})"
        if known
        else "",
        verdict=c["verdict"] if c["profile"] == "paper" else c["ordering"],
    )


def _figure(path: Path) -> dict[str, Any]:
    with Image.open(path) as image:
        width, height = image.size
    uri = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    return dict(title=title(path.stem), uri=uri, width=width, height=height)


def _comparison(at: str, rows: pd.DataFrame) -> dict[str, Any]:
    from markupsafe import Markup

    profile, data = at.removeprefix("methods.").split("-", 1)
    table = compare.table(rows).rename(index=label).rename_axis(None)
    return dict(title=f"Profile {profile}, data {data}", table=Markup(table.to_html(border=0)))


def _speed(readme: Path) -> str:
    from markupsafe import Markup
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    if not readme.exists():
        return ""
    text = re.sub("<!--.*?-->", "", readme.read_text(encoding="utf-8"), flags=re.DOTALL)
    # Other HTML that stands in the file is shown as text, and no link runs anything.
    page = MarkdownWithMath(renderer=IPythonRenderer(escape=True, allow_harmful_protocols=False))
    return Markup(page.render(text))
