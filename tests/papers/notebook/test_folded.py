"""Under a paper's heading stand its own data, or a card that says "not run yet" and a fold."""

import base64
import re
import shlex
from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest

from pfl_papers.__main__ import parser
from pfl_papers.compare.fullest import best
from pfl_papers.notebook import folded
from pfl_papers.notebook.study import Study
from pfl_papers.papers import base as papers
from pfl_papers.papers.base import PAPERS, Scope
from tools.notebooks import NOTEBOOKS

FOLD = re.compile(r"<details>.*?</details>", re.DOTALL)
ARTEFACTS = [(name, a) for name in PAPERS for a in papers.paper(name).artefacts]


def outside(output) -> str:
    """What an output shows before anything is opened."""
    return FOLD.sub("", output.get("data", {}).get("text/html", ""))


def without_evidence(name):
    paper = papers.paper(name)
    return [a for a in paper.artefacts if best(paper, Scope("quick"), a) is None]


@pytest.mark.parametrize("name", PAPERS)
def test_what_was_not_run_has_its_card_and_nothing_of_digits_outside_of_the_fold(name):
    nb = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    left = without_evidence(name)
    outputs = [(c.source, o) for c in nb.cells if c.cell_type == "code" for o in c.outputs]
    plain = [str(o.get("data", {}).get("text/plain", "")) for _, o in outputs]
    cards = [repr(folded.not_run(papers.paper(name), a)) for a in papers.paper(name).artefacts]
    shown = [text for text in plain if text in cards]
    of_left = {repr(folded.not_run(papers.paper(name), a)) for a in left}
    assert len(set(shown)) == len(shown), "each once"
    assert set(shown) == of_left
    for source, output in outputs:
        assert not re.search(r", profile quick, |: on digits", outside(output)), source
        setting = "show_partitions" in source
        if any(f'"{a}"' in source for a in left) and not setting:
            assert "image/png" not in output.get("data", {}), source


@pytest.mark.parametrize(("name", "artefact"), ARTEFACTS)
def test_a_cards_commands_are_understood(name, artefact):
    paper = papers.paper(name)
    text, page = repr(made := folded.not_run(paper, artefact)), made._repr_html_()
    assert text.startswith(f"{papers.title(artefact)}: not run yet on the paper's own data (")
    lines = re.findall(r"python -m pfl_papers (.*?)(?:,|$)", text, re.MULTILINE)
    assert [line for line in lines if line not in page] == [] and len(lines) == 2
    option = text.rpartition(", on a GPU with ")[2]
    lines.append(f"{lines[-1]} {option}")
    assert option in page
    for line in lines:
        args = parser().top.parse_args(shlex.split(line))
        full = Scope(args.profile)
        assert args.artefacts == [artefact] and not paper.missing(full, artefact)


THINGS = {
    "a figure": SimpleNamespace(data=b"\x89PNG of digits"),
    "a table": pd.DataFrame({"ours": [81.25]}),
    "sentences": "**CIFAR-10.** Local < FedPer by 81.25.",
}
WHAT = dict(zip(THINGS, ("the picture", "the numbers", "in words"), strict=True))


@pytest.mark.parametrize("what", THINGS)
def test_all_of_a_thing_is_inside_of_the_fold(what):
    made = folded.fold("fig2", THINGS[what])
    page, head = made._repr_html_(), f"Figure 2, on digits (does it run): {WHAT[what]}"
    assert page.startswith(f"<details><summary>{head}</summary>")
    assert FOLD.sub("", page) == "" and repr(made).startswith(head)
    inside = base64.b64encode(THINGS[what].data).decode() if what == "a figure" else "81.25"
    assert inside in page


def test_what_was_asked_for_is_not_folded_and_a_card_stands_once(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    thing, study = THINGS["a table"], Study("fedper", profile="smoke", device="cpu")
    assert study._placed("fig2", "smoke", thing) is thing and capsys.readouterr().out == ""
    study.best = True
    assert study._placed("fig2", "medium", thing) is thing
    assert study._placed("partition", "quick", thing) is thing
    assert capsys.readouterr().out == ""
    for name in ("fig2", "fig2-published", "fig2.gaps", "fig10"):
        assert isinstance(study._placed(name, "quick", thing), folded.Shown)
    said = capsys.readouterr().out
    assert said.count("not run yet") == 2 and "Figure 2: " in said and "Figure 10: " in said
