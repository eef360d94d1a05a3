"""What a committed notebook must be: short, run from top to bottom, comparable by nbval, and clean."""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from papermill import inspect_notebook

from pfl_papers.compare.fullest import BEST
from pfl_papers.papers import base as papers
from tools.clean import KERNELSPEC
from tools.notebooks import NAMES, NOTEBOOKS

PARAMETERS = {
    **{"profile": "quick", "datasets": [], "methods": [], "seeds": [], "artefacts": []},
    **{"train": False, "device": "auto"},
}
OF_PAPERS = {"profile": BEST, "overrides": {}}
OTHERWISE = dict.fromkeys(papers.PAPERS, OF_PAPERS) | {"what_holds": {"profile": "medium"}}
LINES, KILOBYTES, CELLS, CELLS_PER_ARTEFACT = 12, 1000, 10, 2
FORBIDDEN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Try, ast.While)
NOT_REPEATABLE = set(
    "sweep run tune fetch finish versions interact interactive explore perf_counter time".split()
)
ABSOLUTE = re.compile(
    r"(?<![\w./:>-])/(?:home|root|Users|tmp|work|private|var|opt|mnt|usr)/\w|\b[A-Z]:\\\w"
)
HEADING = re.compile(r"^#{2,4} ((?:Appendix )?(?:Figure |Table |C\.)\d+[a-c]?)\b", re.MULTILINE)
WALL_TIME = re.compile(r"\b\d+(?:\.\d+)? ?(?:s|ms|min|seconds|minutes)\b")


RESULT = re.compile(r"\d\s?%|\d (percentage )?points?\b|\b\d\d\.\d\d\b")
THEIRS = re.compile(r"paper|published|released", re.I)


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


def texts(cell) -> str:
    """What nbval compares of a cell's outputs: streams, plain text and HTML."""
    found = []
    for output in cell.outputs:
        found += [
            output.get("text", ""),
            *(v for k, v in output.get("data", {}).items() if k.startswith("text/")),
        ]
    return re.sub(r"data:image/png;base64,[\w+/=]+", "", "\n".join(found))


def typed_results(prose: str) -> list[str]:
    """Accuracies and differences in sentences that do not say that they are the paper's."""
    lines = [line for line in prose.splitlines() if not line.startswith("Claim")]
    plain = re.sub(r"\$[^$]*\$|`[^`]*`", "", "\n".join(lines))
    sentences = re.split(r"(?<=[.:;!?])\s+|\n", plain)
    return [s for s in sentences if RESULT.search(s) and not THEIRS.search(s)]


def calls(tree: ast.AST) -> set[str]:
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {
        f.id if isinstance(f, ast.Name) else f.attr
        for f in functions
        if isinstance(f, ast.Name | ast.Attribute)
    }


def cell_problems(cell, number: int, forbidden: tuple = FORBIDDEN) -> list[str]:
    """What is wrong with the number-th code cell of a notebook."""
    found = []
    lines = len(cell.source.splitlines())
    ignored = "nbval-ignore-output" in tags(cell)
    if lines > LINES:
        found.append(f"{lines} lines, at most {LINES}")
    try:
        tree = ast.parse(cell.source)
    except SyntaxError as error:
        return [*found, f"is not plain Python ({error.msg}); no magics"]
    if any(isinstance(node, forbidden) for node in ast.walk(tree)):
        found.append("defines a function or class, or holds try or while: move it to pfl_core")
    if cell.execution_count != number:
        found.append(
            f"execution_count is {cell.execution_count}, not {number}: run the notebook from top to bottom"
        )
    if (loose := calls(tree) & NOT_REPEATABLE) and not ignored:
        found.append(f"calls {', '.join(sorted(loose))}: tag it nbval-ignore-output")
    if not ignored and (hit := WALL_TIME.search(texts(cell))):
        found.append(f"a compared output holds a time ({hit[0]!r}): tag it nbval-ignore-output")
    for output in cell.outputs:
        if output.output_type == "error" or output.get("name") == "stderr":
            found.append("holds an error or a warning")
        if (
            bad := {"application/vnd.jupyter.widget-view+json", "image/svg+xml"}
            & output.get("data", {}).keys()
        ):
            found.append(f"holds {', '.join(bad)}: committed figures are PNG")
    if hit := ABSOLUTE.search(cell.source + "\n" + texts(cell)):
        found.append(f"holds an absolute path ({hit[0]!r}...)")
    return found


def problems(path: Path) -> list[str]:
    """What is wrong with the notebook at `path`, a line each; an empty list for a good one."""
    nb = nbformat.v4.reads(path.read_text(encoding="utf-8"))  # nbformat.read would mend ids
    if (nb.nbformat, nb.nbformat_minor) < (4, 5):
        return [f"{path.name}: nbformat {nb.nbformat}.{nb.nbformat_minor}, not 4.5"]
    if len({cell.id for cell in nb.cells}) < len(nb.cells):
        return [f"{path.name}: two cells have the same id"]
    found = []
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    prose = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    artefacts = len(HEADING.findall(prose))
    if len(code) > CELLS + CELLS_PER_ARTEFACT * artefacts:
        found.append(
            f"{len(code)} code cells, at most {CELLS} and {CELLS_PER_ARTEFACT} for each of {artefacts} artefacts"
        )
    if path.stat().st_size > KILOBYTES * 1024:
        found.append(f"{path.stat().st_size // 1024} KB, at most {KILOBYTES}")
    if nb.metadata.get("kernelspec") != KERNELSPEC:
        found.append(f"kernelspec is not {KERNELSPEC}")
    if foreign := nb.metadata.keys() - {"kernelspec", "language_info"}:
        found.append(f"metadata {', '.join(sorted(foreign))}: run `python -m tools.clean`")
    if any(cell.metadata.keys() - {"tags"} for cell in nb.cells):
        found.append("cells have metadata besides tags: run `python -m tools.clean`")
    if typed := typed_results(prose):
        found.append(f"results typed into the text, {typed}: let study.reading(TABLE) say them")
    if hit := ABSOLUTE.search(prose):
        found.append(f"the text holds an absolute path ({hit[0]!r}...)")
    if any("injected-parameters" in tags(cell) for cell in code):
        found.append(
            "was run with parameters of its own (injected-parameters): run it with its defaults"
        )
    first = int(bool(code) and "card" in tags(code[0]))  # before all a paper's card
    if [number for number, cell in enumerate(code) if "parameters" in tags(cell)] != [first]:
        found.append("the first code cell, and no other, must be tagged parameters")
    else:
        found += parameter_problems(path, code[first].source)
    if (path.stem in papers.PAPERS) > first:
        found.append("a paper's notebook begins with its card, tagged card")
    if not code or "nbval-ignore-output" not in tags(code[-1]):
        found.append(
            "the last code cell (versions and wall time) must be tagged nbval-ignore-output"
        )
    # The tour writes a method.
    forbidden = (ast.Try, ast.While) if path.stem == "start" else FORBIDDEN
    for number, cell in enumerate(code, 1):
        wrong = cell_problems(cell, number, forbidden)
        found += [f"code cell {number} {problem}" for problem in wrong]
    return [f"{path.name}: {problem}" for problem in found]


def parameter_problems(path: Path, source: str) -> list[str]:
    """The parameters cell holds literals that papermill sees, at least `PARAMETERS`, with these defaults."""
    wanted = PARAMETERS | OTHERWISE.get(path.stem, {})
    try:
        values = {}
        for node in ast.parse(source).body:
            (target,) = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            values[target.id] = ast.literal_eval(node.value)
    except (SyntaxError, AttributeError, ValueError):
        return ["the parameters cell must hold lines NAME = literal and nothing else"]
    found = [
        f"parameter {k} must be there, as {v!r}"
        for k, v in wanted.items()
        if (k, v) not in values.items()
    ]
    if unseen := values.keys() - inspect_notebook(path).keys():
        found.append(
            f"papermill does not see the parameters {', '.join(sorted(unseen))}: use a plain annotation or none"
        )
    return found


@pytest.mark.parametrize("name", papers.PAPERS)
def test_every_table_and_figure_has_its_heading(name):
    nb = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    prose = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    assert sorted(HEADING.findall(prose)) == sorted(
        papers.title(a) for a in papers.paper(name).artefacts
    )


def test_the_five_papers_have_18_tables_and_33_figures():
    every = {
        (name, papers.title(a).rstrip("abc"))
        for name in papers.PAPERS
        for a in papers.paper(name).artefacts
    }  # 5a to 5c: one
    every = [title for _, title in every]
    assert sum("Table" in t for t in every) == 18 and sum("Figure" in t for t in every) == 33


@pytest.mark.parametrize("name", papers.PAPERS)
def test_the_librarys_own_lines_stand_between_equation_and_slider(name):
    cells = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4).cells
    slider = next(i for i, cell in enumerate(cells) if "mathematics.show(" in cell.source)
    (shown,) = [i for i, cell in enumerate(cells) if "\nsource(" in cell.source]
    assert shown < slider and "$$" in "".join(cell.source for cell in cells[:shown])
    assert "```python" in cells[shown].outputs[0]["data"]["text/markdown"]


def test_committed_notebooks():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} <= set(NAMES)
    assert [
        problem for path in sorted(NOTEBOOKS.glob("*.ipynb")) for problem in problems(path)
    ] == []


# ---------------------------------------------------------------- the guards themselves

PARAMETERS_CELL = """profile: str = "quick"  # smoke, quick, paper
datasets: list[str] = []
methods: list[str] = []
seeds: list[int] = []
artefacts: list[str] = []
train: bool = False
device: str = "auto\""""


def good() -> nbformat.NotebookNode:
    """A notebook that passes: parameters, a sweep, a compared table, versions."""
    new = nbformat.v4
    sources = {
        PARAMETERS_CELL: ["parameters"],
        "rows = sweep(grid)": ["nbval-ignore-output"],
        "rows": [],
    }
    sources["versions()"] = ["nbval-ignore-output"]
    cells = [new.new_markdown_cell("# A paper"), new.new_markdown_cell("## Table 1: a claim")]
    for number, (source, tagged) in enumerate(sources.items(), 1):
        cells.append(
            new.new_code_cell(
                source, execution_count=number, metadata={"tags": tagged} if tagged else {}
            )
        )
    cells[-2].outputs = [
        new.new_output("execute_result", {"text/plain": "96.1"}, execution_count=3)
    ]
    return new.new_notebook(
        cells=cells, metadata={"kernelspec": KERNELSPEC, "language_info": {"name": "python"}}
    )


def stream(text: str, name: str = "stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


def shown(mime: str):
    return nbformat.v4.new_output("display_data", {mime: {} if mime.endswith("json") else "x"})


def add_cell(nb, source: str = "1", times: int = 1) -> None:
    nb.cells[5:5] = [nbformat.v4.new_code_cell(source) for _ in range(times)]
    for number, cell in enumerate([cell for cell in nb.cells if cell.cell_type == "code"], 1):
        cell.execution_count = number


BAD = {
    "13 code cells": lambda nb: add_cell(nb, times=9),
    "13 lines": lambda nb: add_cell(nb, "x = 1\n" * 13),
    "defines a function": lambda nb: add_cell(nb, "def f(): return 1"),
    "no magics": lambda nb: add_cell(nb, "%matplotlib inline"),
    "execution_count is None": lambda nb: nb.cells[4].update(execution_count=None),
    "calls sweep": lambda nb: nb.cells[3].metadata.clear(),
    "last code cell": lambda nb: nb.cells[-1].metadata.clear(),
    "holds a time": lambda nb: nb.cells[4].outputs.append(stream("done in 3.2 s")),
    "an error or a warning": lambda nb: nb.cells[4].outputs.append(
        stream("UserWarning: x", "stderr")
    ),
    "widget-view": lambda nb: nb.cells[4].outputs.append(
        shown("application/vnd.jupyter.widget-view+json")
    ),
    "image/svg": lambda nb: nb.cells[4].outputs.append(shown("image/svg+xml")),
    "cell 3 holds an absolute path": lambda nb: nb.cells[4].outputs.append(
        stream("see /home/me/figures")
    ),
    "results typed into the text": lambda nb: nb.cells[0].update(source="FedPer has 88.1 %."),
    "text holds an absolute path": lambda nb: nb.cells[0].update(source="data: C:\\data"),
    "KB, at most": lambda nb: nb.cells[4].outputs.append(stream("x" * 1_100_000)),
    "kernelspec": lambda nb: nb.metadata.kernelspec.update(name="my-venv"),
    "metadata widgets": lambda nb: nb.metadata.update(widgets={}),
    "besides tags": lambda nb: nb.cells[4].metadata.update(papermill={"duration": 1.0}),
    "same id": lambda nb: nb.cells[0].update(id=nb.cells[1].id),
    "nbformat 4.4": lambda nb: nb.update(nbformat_minor=4),
    "injected-parameters": lambda nb: nb.cells[4].metadata.update(tags=["injected-parameters"]),
    "tagged parameters": lambda nb: nb.cells[2].metadata.clear(),
    "parameter train must be there": lambda nb: nb.cells[2].update(
        source=nb.cells[2].source.replace("False", "True")
    ),
    "NAME = literal": lambda nb: nb.cells[2].update(source=PARAMETERS_CELL + "\nseed = len(seeds)"),
    "papermill does not see": lambda nb: nb.cells[2].update(
        source=PARAMETERS_CELL + "\nlr: float | None = None"
    ),
}


def write(nb, folder: Path) -> Path:
    path = folder / "paper.ipynb"
    path.write_text(
        nbformat.v4.writes(nb), encoding="utf-8"
    )  # unchecked: a bad one must reach the guards
    return path


def test_a_good_notebook_passes(tmp_path):
    assert problems(write(good(), tmp_path)) == []


@pytest.mark.parametrize("word", BAD)
def test_a_bad_notebook_is_named(word, tmp_path):
    nb = good()
    BAD[word](nb)
    found = problems(write(nb, tmp_path))
    assert any(re.search(word, problem) for problem in found), found


def test_an_artefact_allows_two_more_cells(tmp_path):
    nb = good()
    add_cell(nb, times=8)
    assert problems(write(nb, tmp_path)) == []
