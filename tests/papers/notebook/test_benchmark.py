"""The notebook bench: the page's tables, from the same records."""

import pytest

from pfl_papers.bench import page, shown
from pfl_papers.bench.found import Found
from pfl_papers.notebook.benchmark import Benchmark
from tests.papers.bench.test_page import made


@pytest.fixture
def displayed(monkeypatch):
    """Two settings are run; what cells display."""
    shown_ = []
    records = {name: made(i) for i, name in enumerate(("mild", "text"))}
    monkeypatch.setattr(Found, "read", classmethod(lambda cls, *_, **__: Found(records)))
    monkeypatch.setattr("IPython.display.display", shown_.append)
    return shown_


def test_the_notebook_shows_what_the_page_says(displayed):
    nb = Benchmark()
    nb.findings()
    said = [m.data for m in displayed]
    assert (
        said[0] == f"**{page.first_sentence(nb.found)}**" and "**Not run yet:** classes" in said[2]
    )
    assert nb.matrix().equals(shown.matrix(nb.found)) and nb.gates().equals(shown.gates(nb.found))
    displayed.clear()
    nb.settings()
    assert displayed[1].equals(shown.setting(nb.found, "mild")) and len(displayed) == 4
    assert nb.finish().startswith("140 reported runs read, none trained")


def test_some_rows_alone_stand_beside_the_reference(displayed):
    nb = Benchmark(methods=["ditto"])
    assert list(nb.matrix().index) == ["Ditto"]
    for given in (dict(settings=["nowhere"]), dict(methods=["fedpr"]), dict(methods="ditto")):
        with pytest.raises(ValueError, match="unknown|give a list"):
            Benchmark(**given)


def test_without_rows_nothing_is_shown_but_what_to_do(displayed, monkeypatch):
    monkeypatch.setattr(Found, "read", classmethod(lambda cls, *_, **__: Found({})))
    nb = Benchmark()
    nb.findings()
    assert "python -m pfl_papers bench" in displayed[0].data and nb.matrix() is None
    nb.settings(), nb.sceptic()
    assert len(displayed) == 1
