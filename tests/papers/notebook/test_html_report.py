"""figures/report.html: from rows and figures alone, one file, nothing from elsewhere."""

import gzip
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from pfl_core.experiments.metrics import ROW_COLUMNS
from pfl_core.util import sums
from pfl_papers import places
from pfl_papers.compare import judged, overview, readable, report
from pfl_papers.notebook import html_report
from pfl_papers.papers import base
from pfl_papers.papers.base import PAPERS
from tests import made


class Page(HTMLParser):
    """Tags with their attributes, those still open, and the text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.open, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data.strip())


def run_rows(row: str, column: str, acc: float, profile: str, seed: int) -> pd.DataFrame:
    base = dict.fromkeys(ROW_COLUMNS, "") | dict(
        paper="fedaghn", artefact="table1", row=row, column=column, method=row
    )
    base |= {"rounds": 1, "average": "client", "metric": "acc_pct", "value": acc}
    base |= dict(
        run=f"{profile} {row} {seed}",
        dataset="digits",
        seed=seed,
        profile=profile,
        device="cpu",
        version="0.1.0",
    )
    return pd.DataFrame(
        [base | {"when": w, "split": s} for w in ("before", "after") for s in ("val", "test")]
    )


@pytest.fixture
def root(tmp_path):
    """A project with two rows of FedAGHN's Table 1 at two profiles, a figure, and benchmarks."""
    column = (
        base.reported("fedaghn").query("table == 'table1' and metric == 'acc_pct'").column.iloc[0]
    )
    said = (
        base.reported("fedaghn")
        .query("table == 'table1' and column == @column")
        .set_index("row")
        .value
    )
    for profile in ("quick", "paper"):
        acc = {"fedaghn": said.fedaghn, "fedavg": said.fedavg - 9, "fedamp": said.fedaghn + 15}
        seeds = {0: -0.1, 1: 0.0, 2: 0.1}  # what each does to all rows
        rows = pd.concat(
            run_rows(m, column, v + by, profile, seed)
            for m, v in acc.items()
            for seed, by in seeds.items()
        )
        made.publish(tmp_path / "results", rows, "fedaghn", profile)
        folder = tmp_path / "figures" / "fedaghn" / f"{profile}-digits"
        cells = report.compare(rows, "fedaghn", "table1")
        report.save_table(cells, folder / "table1.cells")
    Image.fromarray(np.zeros((20, 30), np.uint8)).save(folder / "fig4.png")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "README.md").write_text(
        "| case | ours |\n| --- | --- |\n| a round | 1.5 s |\n"
    )
    return tmp_path


@pytest.mark.slow
def test_a_table_has_its_verdicts_in_colour(root):
    text = html_report.build(root).read_text()
    page = Page(text)
    assert page.open == []
    cells = re.findall(
        r'<td class="(\w*)">([\d.]+) \[[^<]*<small>paper ([\d.]+) \(([-+][\d.]+)[^<]*</small>'
        r"<small>([^<]*)",
        text,
    )
    judged = [cell for cell in cells if cell[-1]]
    got = {(tone, verdict) for tone, *_, verdict in judged}
    assert got == {("good", "inside"), ("good", "ahead, larger"), ("bad", "outside: full budget")}
    assert all(abs(float(a) - float(b) - float(d)) < 0.02 for _, a, b, d, _ in cells)
    # Four accuracies (FedAvg-FT is FedAvg, read after local training) and two leads; at profile
    # quick the same accuracies have no verdict.
    assert len(judged) == 4 + 2
    assert [tone for tone, *_, verdict in cells if not verdict] == [""] * 4
    assert "Table 1, points by which FedAGHN leads" in text
    assert re.search('class="pill (good|bad|open)">', text) and readable.LEGEND[:40] in text
    assert "Table 1: ours" in text and "<td>1.5 s</td>" in text
    assert text.count("Not run yet") == len(
        PAPERS
    )  # four papers, and the comparison of all methods


def test_the_first_screen_is_the_picture_and_the_counts(root, monkeypatch):
    cells = pd.DataFrame(
        dict(
            paper="fedaghn",
            table="table1",
            column="a",
            row=["local", "ditto", "fedavg"],
            kind=[judged.PERSONAL, judged.PERSONAL, judged.ONE_MODEL],
            printed=["above 2", "at most 2", "above 2"],
            reported=[3.0, 1.0, 40.0],
            reproduced=[3.5, 0.5, 30.0],
            low=[2.5, -1.0, 28.0],
            high=[4.5, 2.0, 32.0],
            verdict=["ahead", "too small to tell", "ahead"],
            budget=["fewer rounds", "full budget", "fewer rounds"],
            profile=["medium", "paper", "medium"],
            dataset="digits",
            n=[2, 3, 2],
        )
    )
    monkeypatch.setattr(overview, "ran", lambda: cells)
    first = html_report.build(root).read_text().split("<main>")[0]
    page = Page(first.replace("<!doctype html>", ""))
    (picture,) = [attrs for tag, attrs in page.tags if tag == "img"]
    assert picture["src"].startswith("data:image/png;base64,") and "No printed" not in first
    assert "profile medium and paper, 2 seeds or more" in picture["alt"]
    assert "<strong>596</strong> published accuracies, <strong>590</strong> of them" in first
    counted = re.findall(r">(\w+)</a></th>\n<td>(?:\d+ of (\d+)|figures only)</td>", first)
    assert counted == [
        ("FedPer", ""),
        ("pFedHN", "99"),
        ("pFedLA", "153"),
        ("FLAYER", "122"),
        ("FedAGHN", "216"),
    ]


def test_without_runs_in_the_papers_setting_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "results")
    first = html_report.build(tmp_path).read_text().split("<main>")[0]
    assert "No printed lead has been run" in first and "<img" not in first


@pytest.mark.parametrize(
    ("value", "said"),
    [(9.56e4, "95,600"), (12.0, "12"), (9.13e7, "91.3 million"), (3.77e9, "3.77 billion")],
)
def test_large_numbers_are_said(value, said):
    assert readable.large(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [(1.322e-14, "1.32 × 10⁻¹⁴"), (1e-10, "10⁻¹⁰"), (2e-5, "2 × 10⁻⁵"), (0.5, "0.5")],
)
def test_small_numbers_are_said(value, said):
    assert readable.small(value) == said


def test_a_figure_is_in_the_page(root):
    images = [
        attrs for tag, attrs in Page(html_report.build(root).read_text()).tags if tag == "img"
    ]
    assert [(i["width"], i["height"], i["alt"]) for i in images if "Fig" in i["alt"]] == [
        ("30", "20", "Figure 4 of FedAGHN, profile paper, data digits")
    ]
    assert images[-1]["src"].startswith("data:image/png;base64,iVBOR")


@pytest.mark.slow
def test_the_committed_results_make_one_page_that_needs_nothing_else(reported):
    text = (reported / "figures" / "report.html").read_text()
    page = Page(text)
    links = [v for _, attrs in page.tags for k, v in attrs.items() if k in ("src", "href")]
    papers = [
        f"https://arxiv.org/abs/{n}"
        for n in ("1912.00818", "2103.04628", "2205.03993", "2412.07062", "2501.16379")
    ]
    outside = [v for v in links if not v.startswith(("data:image/png", "#"))]
    assert page.open == [] and outside == papers
    assert len(text) < 6e6 and not re.search(r"\de[+-]\d", "".join(page.text))
    assert not re.search(r"url\(|@import|<script|<link", text)
    targets = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    assert {v[1:] for v in links if v.startswith("#")} <= targets and {
        *PAPERS,
        "methods",
        "speed",
        "fedaghn-quick-digits-t1",
        "fedper-quick-digits-claims",
    } <= targets
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    pngs = [p for name in PAPERS for p in (reported / "figures").glob(f"{name}/*/*.png")]
    shown = {
        f"{name}.{p.name}" for name in PAPERS for p in (reported / "figures").glob(f"{name}/*")
    }
    shown_pngs = [p for p in pngs if f"{p.parts[-3]}.{p.parts[-2]}" in shown]
    pictures = len([v for v in links if v.startswith("data:")])
    assert pictures == len(shown_pngs) + ("No published accuracy" not in text)
    assert (
        "None" not in page.text and "nan" not in page.text and not any("{{" in t for t in page.text)
    )


def test_html_in_what_is_shown_stays_text(root):
    readme = root / "benchmarks" / "README.md"
    readme.write_text(
        "| case | ours |\n| --- | --- |\n| <script>alert(1)</script> | 1.5 s |\n\n<img src=x onerror=alert(2)>\n\n"
        "<!-- a note -->\n<iframe src='https://example.org'></iframe>\n\n[here](javascript:alert(3)) $a<b$\n"
    )
    runs = root / "results" / "runs.csv.gz"
    text = gzip.decompress(runs.read_bytes()).replace(b",cpu,", b",<script>alert(4)</script>,")
    runs.write_bytes(gzip.compress(text))
    sums.put(root / "results", {runs.name: runs.read_bytes()})
    page = Page(html_report.build(root).read_text())
    assert not {"script", "iframe"} & {tag for tag, _ in page.tags}
    assert not [
        a
        for _, attrs in page.tags
        for a in attrs.items()
        if a[0].startswith("on") or "javascript" in (a[1] or "")
    ]
    shown = "".join(page.text)
    assert (
        all(f"alert({i})" in shown for i in (1, 2, 4))
        and "1.5 s" in shown
        and "a note" not in shown
    )


def test_figures_stand_in_their_order():
    names = ["fig10.png", "fig2.png", "fig6b.png", "fig6a.png", "partition.png", "appfig1.png"]
    ordered = sorted(map(Path, names), key=html_report._order)
    assert [p.stem for p in ordered if p.stem.startswith("fig")] == [
        "fig2",
        "fig6a",
        "fig6b",
        "fig10",
    ]
