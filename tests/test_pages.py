"""Generated pages are current, and the command line says what it does."""

import io
import re
from types import SimpleNamespace

import pandas as pd
import pytest

from pfl_core import Experiment, sweep
from pfl_core.analysis.plots import LABELS
from pfl_core.methods.base import METHODS
from pfl_papers import places
from pfl_papers.compare import overview
from pfl_papers.evidence import committed
from pfl_papers.papers import presets
from pfl_papers.papers.base import FULL, PAPERS, paper, title
from tests import made
from tools import pages


def test_every_method_of_the_papers_is_compared():
    ours = {n for n, c in METHODS.items() if c.__module__.startswith("pfl_core.")}
    rows = {row: change(Experiment())["method"] for row, change in presets.COMPARED.items()}
    assert ours == {row for row, method in rows.items() if row == method}
    assert {row: method for row, method in rows.items() if row != method} == {"lpft": "fedavg"}


@pytest.mark.slow
def test_the_methods_page_is_current():
    assert (pages.ROOT / "docs" / "methods.md").read_text() == pages.methods_page(), (
        "run: python -m tools.pages"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "name", "section"),
    [
        ("README.md", "picture", pages.picture_section),
        ("README.md", "papers", pages.papers_section),
        ("docs/comparison.md", "table", pages.comparison_section),
        ("results/README.md", "columns", pages.columns_section),
    ],
)
def test_pages_hold_what_the_rows_say(page, name, section):
    text = (pages.ROOT / page).read_text()
    assert pages.between(text, name, section()) == text, "run: python -m tools.pages"


@pytest.mark.slow
def test_the_picture_is_of_the_leads_that_were_run():
    known = pd.read_csv(pages.PICTURE.with_suffix(".csv"), keep_default_na=False)
    cells = overview.ran()
    assert list(known) == list(cells), "run: python -m tools.pages"
    again = pd.read_csv(io.StringIO(cells.round(4).to_csv(index=False)), keep_default_na=False)
    pd.testing.assert_frame_equal(known, again)


def test_readme_says_how_many_methods_there_are():
    ours = [c for c in METHODS.values() if c.__module__.startswith("pfl_core.")]
    assert f"[{len(ours)} methods](docs/methods.md)" in (pages.ROOT / "README.md").read_text()


def test_the_methods_page_says_how_long_methods_are():
    longest = max(
        int(pages.method_facts(name)["class"]) for name in ("fedavg", "pfedfda", "pfedhn")
    )
    assert f"take 2 to {longest} lines" in (pages.ROOT / "docs" / "methods.md").read_text()


@pytest.mark.slow
def test_the_results_page_is_current_and_its_links_lead_somewhere():
    page = pages.ROOT / "docs" / "results.md"
    assert page.read_text() == pages.results_page(), "run: python -m tools.pages"
    links = re.findall(r"\]\(\.\./(.*?)\)", page.read_text())
    assert len(links) > 20 and [link for link in links if not (pages.ROOT / link).is_file()] == []


@pytest.mark.parametrize("name", PAPERS)
def test_every_artefact_is_linked_or_said_to_be_not_run(name):
    text = (pages.ROOT / "docs" / "results.md").read_text()  # which is current
    part = text.split(f"\n## {LABELS[name]}\n")[1].split("\n## ")[0]
    if "None is run in the paper's setting" in part:
        return
    left = re.findall(r"^Not run in the paper's setting: (.*)\.$", part, flags=re.M)
    for artefact in paper(name).artefacts:
        files = [
            f
            for p in committed.parts(name).values()
            if p.profile in FULL
            for f in pages.shown(name, p.label).get(artefact, [])
        ]
        assert all(f"]({f.as_posix().replace(pages.ROOT.as_posix(), '..')})" in part for f in files)
        assert files or title(artefact) in left[0].split(", ")


def test_every_claim_stands_once_with_its_verdict_or_among_those_not_run():
    text = (pages.ROOT / "docs" / "results.md").read_text()
    for name in PAPERS:
        part = text.split(f"\n## {LABELS[name]}\n")[1].split("\n## ")[0].split("On digits")[0]
        says = [claim.says for claim in paper(name).claims]
        lines = [line.replace("\\|", "|") for line in part.splitlines()]
        for said in set(says):
            starts = f"| {said}<br>", f"- {said} ("
            assert sum(line.startswith(starts) for line in lines) == says.count(said), said


def test_the_comparison_is_ranked_and_by_names():
    text = (pages.ROOT / "docs" / "comparison.md").read_text()
    tables = [t.splitlines() for t in re.findall(r"(?:^\|.*\n)+", text, flags=re.M)]
    columns = [[cell.strip() for cell in line.split("|")] for line in tables[0][2:]]
    assert [int(c[1]) for c in columns] == list(range(1, len(columns) + 1))
    means = [float(c[3].strip("*").split()[0].rstrip(",")) for c in columns]
    assert means == sorted(means, reverse=True)
    raw = {key for key, says in LABELS.items() if key != says}
    for table in tables:
        head = [cell.strip() for cell in table[0].split("|")]
        assert not {line.split("|")[head.index("method")].strip() for line in table} & raw
    assert text.index("**The setting leaves") < text.index(tables[0][0])  # findings first


@pytest.mark.parametrize(
    ("gap", "word"),
    [
        (None, "first"),
        ((-1.0, float("nan"), float("nan")), "one seed"),
        ((-2.0, -3.0, -1.0), "behind"),
        ((-1.0, -3.0, 1.0), "tie"),
        ((-10.0, -34.0, 14.0), "too wide"),
        ((-2.0, -6.0, 2.0), "too wide"),
    ],
)
def test_a_wide_interval_is_no_tie(gap, word):
    found = gap and SimpleNamespace(**dict(zip(("estimate", "low", "high"), gap, strict=True)))
    assert pages._beside_the_first(found) == word


def test_facts_of_fedper():
    facts = pages.method_facts("fedper")
    assert (
        5 < int(facts["class"]) < int(facts["file"]) < 25
        and facts["paper"] == "Arivazhagan et al., 2019"
    )
    assert facts["up"] == facts["down"]
    assert pages.method_facts("local")["up"] == "-"


def test_code_lines_leave_docs_out():
    assert (
        pages.code_lines(
            '"""doc\nof two"""\n\n# a\ndef f():\n    """d"""\n    return (1,\n            2)\n'
        )
        == 3
    )


def test_between_needs_its_markers():
    with pytest.raises(ValueError, match="once each"):
        pages.between("no markers", "results", "x")


@pytest.mark.parametrize("word", ["datasets", "methods", "models", "partitions"])
def test_lists(word, capsys):
    assert made.main(["list", word]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 9 and all(len(line.split(maxsplit=1)) == 2 for line in lines)


def test_fetch_embedded_and_refused(capsys):
    assert made.main(["fetch", "digits"]) == 0 and "1797 samples" in capsys.readouterr().out
    assert (
        made.main(["fetch", "cifar100"]) == 1
        and "python -m pfl_core fetch cifar100" in capsys.readouterr().err
    )
    with pytest.raises(SystemExit, match="2"):
        made.main(["fetsch"])


def test_publish(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "home" / "results")
    assert (
        made.main(["publish", "fedper"]) == 1 and "nothing of 'fedper'" in capsys.readouterr().err
    )
    committed.save(
        sweep([Experiment(rounds=0, max_samples=20, clients=2)]), "fedper", "quick", "digits"
    )
    assert made.main(["publish", "fedper"]) == 0 and "fedper: 7 files" in capsys.readouterr().out
    assert list(committed.parts()) == ["fedper.quick-digits"]
