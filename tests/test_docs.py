"""The documentation: its links, its equations, its API, and what a finished site may not do.

The site itself is built by `./run_all.sh test`, where a warning fails it (tools/gates.py).
"""

import ast
import dataclasses
import inspect
import re
import subprocess
from pathlib import Path

import latex2mathml.converter
import pytest
from numpydoc.docscrape import NumpyDocString

import pfl_core
from pfl_core.methods.base import METHODS
from pfl_papers.papers.base import PAPERS
from tests.made import main
from tools import equations, site

ROOT = site.ROOT
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
WRITTEN += [
    ROOT / "benchmarks" / "README.md",
    ROOT / "results" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def links(text):
    """Where the links and pictures of a page lead, without those in code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def places(text):
    """The anchors that GitHub gives a page's headings."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    heads = re.findall(r"^#+ +(.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def lost(page, text):
    """The links of a page, as it is read on GitHub, that lead nowhere."""
    out = []
    for link in links(text):
        file, _, place = link.partition("#")
        target = page.parent / file if file else page
        if link.startswith(("http:", "https:")):
            continue
        if not target.exists() or (place and place not in places(target.read_text())):
            out.append(link)
    return out


@pytest.mark.parametrize("page", WRITTEN, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere_on_github(page):
    assert lost(page, page.read_text()) == []


def test_no_text_holds_two_versions_of_itself():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    kinds = (".md", ".py", ".toml", ".ipynb", ".sh", ".css", ".html", ".yml")
    files = [ROOT / name for name in listed.split("\n") if name.endswith(kinds)] or WRITTEN
    marks = re.compile(r"^(<{7}|>{7}|\|{7}) ", re.MULTILINE)  # of a merge that nobody ended
    assert [f for f in files if f.is_file() and marks.search(f.read_text("utf-8"))] == []


def test_a_lost_link_is_found():
    text = "# One two\n[a](#one-two) [b](#one) [c](README.md) [d](no.md#x) `[e](code.md)`\n"
    (page := ROOT / "README.md").read_text()
    assert lost(page, text) == ["#one-two", "#one", "no.md#x"]


# ---------------------------------------------------------------- the README


def test_the_readme_is_short_and_has_the_two_commands():
    text = (ROOT / "README.md").read_text()
    by_hand = re.sub(r"<!-- (\w+): .*?<!-- end of \1 -->", "", text, flags=re.DOTALL)
    assert len(by_hand.split()) <= 450 and len(text.split()) <= 850
    assert "\n./run_all.sh  " in text and "\n./run_all.sh test  " in text


@pytest.mark.slow
def test_the_readmes_python_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    first, method = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert len([x for x in first.splitlines() if x]) == 12
    known: dict = {}
    exec(first.replace("rounds=20", "rounds=1, max_samples=40"), known)
    assert len(known["fedper"].predict(3, pfl_core.load("digits").x[:5])) == 5
    exec(method, known)
    result = pfl_core.run(known["setting"].but(method="my_fedper", rounds=1, max_samples=40))
    assert result.ok
    METHODS.pop("my_fedper")


def test_the_example_of_a_folder_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "own.md").read_text()
    (code,) = re.findall(r"```python\n([^`]*Federation\.open[^`]*)```", text)
    (line,) = re.findall(r"pfl (run [^#]*--fed[^#]*) #", text)
    known = {}
    exec(code, known)
    assert known["rows"].method.nunique() == 2
    assert main(line.split()) == 0
    assert known["rows"].run[0] in capsys.readouterr().out


# ---------------------------------------------------------------- equations


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("w <- sum_k n_k w_k", r"w \leftarrow \sum _{k} n _{k} w _{k}"),
        ("thetabar_i^l", r"\bar{\theta} _{i}^{l}"),
        ("w^{t+1} = w~ * E^_y", r"w ^{t +1} = \tilde{w} \odot \hat{E} _{y}"),
        ("||w - u_i||^2", r"\lVert w - u _{i}\rVert ^{2}"),
        ("<theta_j, Delta> / (d phi)^T", r"\langle \theta _{j}, \Delta \rangle / (d \phi )^{\top}"),
        ("sum_{j != i} x_ij", r"\sum _{j \ne i} x _{ij}"),
        ("w <- local steps from v", r"w \leftarrow \text{ local steps from } v"),
        ("exp(a) softmax(b)", r"\operatorname{exp}(a ) \operatorname{softmax}(b )"),
    ],
)
def test_equations_in_plain_text_become_latex(text, latex):
    assert equations.latex(text) == latex


def test_notes_stand_beside_their_equations():
    block = ["    w   <- 1        `upload`;", f"{'':30}goes on", "        or 2"]
    assert equations.rows(block) == [
        (r"w \leftarrow 1", "`upload`; goes on"),
        (r"\quad \text{ or } 2", ""),
    ]


def test_symbols_in_prose_are_equations_and_names_of_code_are_not():
    says = "theta_k's head, lambda / alpha, `n_k`, mu=0.2, hn_sign, head_by, arXiv:2501.16379, a*b"
    assert equations.prose(says) == (
        r"$\theta _{k}$'s head, $\lambda$ / $\alpha$, `n_k`, mu=0.2, hn_sign, head_by, "
        r"[arXiv:2501.16379](https://arxiv.org/abs/2501.16379), a\*b"
    )


@pytest.mark.parametrize("file", site.method_files())
def test_a_methods_page_has_all_that_its_docstring_has(file):
    page = site.method_page(file, site.method_files()[file])
    math = re.findall(r"\$\\displaystyle (.*?)\$ \|", page)
    assert math and all("<math" in latex2mathml.converter.convert(x) for x in math)
    doc = ast.get_docstring(ast.parse((ROOT / f"pfl_core/methods/{file}.py").read_text()))
    assert doc.count("\n1. ") == page.count("\n1. ") and page.count("**Differs from") >= 1
    words = set(re.findall(r"[A-Za-z]{6,}", doc))
    missing = {w for w in words if w.lower() not in page.lower()}
    assert not {w for w in missing if not w.startswith(("theta", "Theta"))}, missing


# ---------------------------------------------------------------- the API


def test_every_public_name_has_a_page():
    pages = site.api_pages()
    for name in pfl_core.__all__:
        thing = getattr(pfl_core, name)
        assert name in ("methods", "__version__") or f":: {name}" in pages[f"{name}.rst"], thing
    for room in site.ROOMS:
        for name in __import__(room, fromlist=["x"]).__all__:
            full = f"{room}.{name}"
            assert f".. automodule:: {full}" in pages[f"{full}.rst"] and full in pages["index.md"]
    assert "total_variation" in pages["pfl_core.analysis.stats.rst"]
    faces = [p for of in ("pfl_core", "pfl_papers") for p in (ROOT / of).glob("*/__init__.py")]
    assert {".".join(p.parent.parts[-2:]) for p in faces} == set(site.ROOMS)


def test_docstrings_are_read_as_they_are_meant():
    lines = ["A row * a | b.", "", "    x = 1", "", "Raises", "------"]
    site.readable(None, "class", "x", None, None, lines)
    assert lines == [*[r"A row \* a \| b.", ""], *["::", "", "    x = 1", "", "Raises", "------"]]


def takes(thing):
    """The names of a function's arguments, or of a class's fields and what it is made of."""
    if isinstance(thing, ast.FunctionDef):
        every = thing.args
        named = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
        return [a.arg for a in named if a]
    fields = [x.target.id for x in thing.body if isinstance(x, ast.AnnAssign)]
    made = [x for x in thing.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
    return fields + [name for init in made for name in takes(init)]


# Below the first line: what a function raises in running lines, and a list of columns or of arguments.
LISTED = re.compile(
    r"\n\n[a-z_]\w*(, [a-z_]\w*)*: .*(\n(    |[a-z_]\w*(, [a-z_]\w*)*: ).*)*(\n\n|$)"
)
RAISES = re.compile(r"\n.*\b(?<!Raise )[A-Z]\w*(Error|Missing) (for|if|where|unless)\b", re.DOTALL)


def other_dialect(source):
    """The functions and classes whose docstring says of arguments or errors outside of a section."""
    out = []
    for thing in ast.walk(ast.parse(source)):
        if isinstance(thing, ast.FunctionDef | ast.ClassDef) and (doc := ast.get_docstring(thing)):
            names = "|".join(takes(thing) or ["self"])
            said = rf"(^|[.;,] )`?(\w+, )*({names})`?( \([^)]*\))?: (?=\S)"
            prose = re.split(r"\n.+\n-{3,}\n", doc)[0]
            if re.search(said, doc, flags=re.M) or RAISES.search(prose) or LISTED.search(prose):
                out.append(thing.name)
    return out


def test_docstrings_are_in_one_dialect():
    files = [f for of in ("pfl_core", "pfl_papers") for f in sorted((ROOT / of).rglob("*.py"))]
    found = {f.relative_to(ROOT).as_posix(): other_dialect(f.read_text("utf-8")) for f in files}
    others = {file: names for file, names in found.items() if names}
    assert others == {}, (
        "write a section: Parameters, ----------, name : type, and below what it is"
    )


def test_the_other_dialect_is_found():
    source = """
def a(x, y):
    '''One.

    x, y: two numbers.
    '''
def b(x):
    '''One; x: a number.'''
class C:
    '''One.

    x (n,): numbers.
    '''
    def __init__(self, x): ...
def d(y):
    '''One.

    Of two; ValueError for more.
    '''
def e():
    '''A frame.

    seconds: of a run.
    bytes: of a round, of all
        clients.
    '''
def right(x):
    '''A dict {x: number}; ValueError for others.

    Parameters
    ----------
    x : int
        Of two: this.

    Raises
    ------
    ValueError
        ValueError for others.
    '''
"""
    assert other_dialect(source) == ["a", "b", "C", "d", "e"]


@pytest.mark.parametrize(
    "name", [n for n in METHODS if METHODS[n].__module__.startswith("pfl_core.")]
)
def test_the_site_finds_the_sections_of_a_methods_class(name):
    lines = inspect.getdoc(METHODS[name]).split("\n")
    site.readable(None, "class", name, None, None, lines)
    read = NumpyDocString("\n".join(lines))
    example = [line for line in read["Examples"] if line.startswith(">>> ")]
    assert len(example) >= 3, "flush left, as code"
    fields = [f.name for f in dataclasses.fields(METHODS[name])]
    assert [p.name for p in read["Other Parameters"]] == fields


# ---------------------------------------------------------------- a finished site


def test_what_a_site_asks_of_others_is_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="https://arxiv.org/abs/1">paper</a><script src="https://x.org/a.js"></script>'
        '<img src="b.png"><link href="//y.org/f.css" rel="stylesheet">'
    )
    (tmp_path / "a.css").write_text('@import "https://z.org/a.css"; a { background: url(b.png) }')
    assert sorted(site.requests_elsewhere(tmp_path)) == [
        "a.css: https://z.org/a.css",
        "a.html: //y.org/f.css",
        "a.html: https://x.org/a.js",
    ]


def test_broken_links_of_a_site_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<p id="p"></p><a href="b.html#q"></a><a href="#p"></a>')
    (tmp_path / "b.html").write_text('<a href="a.html#p"></a><img src="c.png"><a href="#"></a>')
    assert sorted(site.broken_links(tmp_path)) == ["a.html: b.html#q", "b.html: c.png"]


def test_links_to_a_methods_file_lead_to_its_page(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "GENERATED", tmp_path)
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "fedper.md").touch()
    text = "[a](../pfl_core/methods/fedper.py) [b](../pfl_core/methods/base.py)"
    shown = site.adapted("docs/own", text)
    assert shown == "[a](../docs/generated/methods/fedper.md) [b](../pfl_core/methods/base.py)"
    assert Path("docs/tour").name in site.adapted("README", "")


def test_lists_of_pictures_are_galleries_of_thumbnails_on_the_site():
    line = "- medium: [Table 1](../f/table1.md) · [Figure 3](../f/fig3.png) · [Figure 5](../f/fig5.png)\n"
    page = site.adapted("docs/results", line)
    assert "**medium.** [Table 1](../f/table1.md)" in page
    assert re.findall(r"^- !\[(.*?)\]\((.*?)\)\{width=150px\} (.*)$", page, flags=re.M) == [
        ("Figure 3", "../f/fig3.png", "Figure 3"),
        ("Figure 5", "../f/fig5.png", "Figure 5"),
    ]
    other = "- [a](b.md) and [c](d.png)\n- text\n"
    assert site.adapted("docs/results", other) == other


@pytest.mark.parametrize("word", site.TONES)
def test_verdicts_are_coloured_on_the_site(word):
    line = f"| a claim<br>*Sec. 1* | {word}: a reason | why |\n| row | 1.0<br>paper 2<br>{word} |\n"
    page = site.adapted("docs/results", line)
    tone = site.tone(word)
    assert page.count(f"{{.pill .{tone}}}") == 2 and f"| [{word}: a reason]{{" in page
    assert site.adapted("docs/data", line) == line


@pytest.mark.parametrize("page", WRITTEN, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_page_has_a_bare_link_to_a_picture_but_in_a_list_of_them(page):
    text = site.LISTED.sub("", page.read_text())
    assert re.findall(r"(?<!!)\[[^\]]*\]\([^)]*\.png\)", text) == []


def test_the_tours_shell_fits_its_box():
    text = (ROOT / "docs" / "tour.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.S)
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 80


@pytest.mark.parametrize("key", PAPERS)
def test_every_paper_is_to_be_cited(key):
    number = re.search(r"arXiv:(\d{4}\.\d{5})", (ROOT / f"pfl_core/methods/{key}.py").read_text())[
        1
    ]
    for name in ("CITATION.bib", "CITATION.cff"):
        assert (ROOT / name).read_text().count(number) == 1


def test_one_version_and_its_date():
    cited = (ROOT / "CITATION.cff").read_text()
    version, date = (
        re.search(rf"^{name}: (\S+)$", cited, flags=re.M)[1]
        for name in ("version", "date-released")
    )
    released = re.findall(r"^## \[(\d\S*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert version == pfl_core.__version__ and released[0] == (version, date)
