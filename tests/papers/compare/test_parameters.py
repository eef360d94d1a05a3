"""A notebook's parameters: what selects nothing is refused, what would be trained is said, and a name that is none of them is an error."""

import ast

import nbformat
import papermill
import pytest

from pfl_core.data import pools
from pfl_core.experiments import compute
from pfl_papers import places
from pfl_papers.compare import parameters, plan
from pfl_papers.notebook.study import Study
from pfl_papers.notebook.what_holds import WhatHolds
from pfl_papers.papers import base
from pfl_papers.papers.base import PAPERS, Scope
from tests.made import main
from tools.notebooks import NAMES, NOTEBOOKS

NOTHING = dict(artefacts=["table2"], datasets=["mnist"])  # pFedHN has MNIST in its Table 3 alone


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A project with nothing run and nothing committed, in which nothing can be trained."""
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "home" / "results")
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(compute, "simulate", None)
    return tmp_path


def accepted(paper, **how):
    try:
        return parameters.asked(paper, **how)
    except ValueError as error:
        assert f"of {paper.key}" in str(error) or f": {paper.key} has" in str(error)
        return None


# ---------------------------------------------------------------- what selects nothing


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["smoke", "medium"])
@pytest.mark.parametrize("name", PAPERS)
def test_data_that_select_no_run_are_refused_and_no_others(name, profile):
    paper = base.paper(name)
    has = {}  # {data set: artefacts}
    for data in pools.list_datasets():
        has[data] = {s.artefact for s in paper.planned(Scope(profile, (data,)))} - {base.TUNING}
        assert bool(accepted(paper, profile=profile, datasets=[data])) == bool(has[data])
    told = parameters.data_of(paper, profile)
    assert {(a, d) for d, some in has.items() for a in some} == {
        (a, d) for a, some in told.items() for d in some
    }
    for artefact in paper.artefacts:
        for data in ("mnist", "digits"):
            drawn = artefact == "appfig1" and not paper.missing(Scope(profile, (data,)), artefact)
            got = accepted(paper, profile=profile, artefacts=[artefact], datasets=[data])
            assert bool(got) == (artefact in has[data] or drawn), (artefact, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPERS)
def test_methods_that_select_no_run_are_refused_and_no_others(name):
    paper, every = base.paper(name), base.paper(name).planned(Scope("smoke"))
    has = {}  # {artefact: methods}
    for s in every:
        names = {n for row, c in s.rows.items() for n in (row, c.get("method", s.base.method))}
        has.setdefault(s.artefact, set()).update(names)
    some = set().union(*has.values())
    for method in parameters.METHODS:
        asked = accepted(paper, profile="smoke", methods=[method])
        assert bool(asked) == (method in some), method
        assert bool(asked) == bool(accepted(paper, profile="smoke", methods=[paper.own, method]))
        for artefact in has:
            got = accepted(paper, profile="smoke", methods=[method], artefacts=[artefact])
            assert bool(got) == (method in has[artefact]), (method, artefact)


def test_an_artefact_that_is_named_is_not_left_out():
    fedper = base.paper("fedper")
    assert accepted(fedper, datasets=["digits"])  # without the figures over CIFAR-100
    assert not accepted(fedper, datasets=["digits"], artefacts=["fig2", "fig5"])
    assert not accepted(fedper, methods=["fedavg"], artefacts=["fig2", "fig15"])
    assert not accepted(fedper, profile="medium", artefacts=["fig9"])


CALLS = {
    "Study": lambda **how: Study("pfedhn", device="cpu", **how),
    "best": lambda **how: Study("pfedhn", device="cpu", **how | {"profile": "best"}),
    "finished": lambda **how: Study("pfedhn", device="cpu", finished=True, **how),
    "plan": lambda **how: plan.plan("pfedhn", "cpu", **how),
    "compute": lambda **how: plan.compute("pfedhn", device="cpu", **how),
}


@pytest.mark.parametrize("call", CALLS)
def test_nothing_begins_and_the_error_says_what_there_is(call, home):
    with pytest.raises(ValueError) as error:
        CALLS[call](profile="smoke", **NOTHING)
    for said in (
        "artefacts=['table2'], datasets=['mnist']: pfedhn has no such run of table2 at profile ",
        "table2, fig2, fig3, fig5, fig6, table4, fig7, appc5 with cifar10 or digits",
        "table3 with digits or mnist. Name what goes together, or leave a parameter out",
    ):
        assert said in str(error.value)
    with pytest.raises(ValueError, match="what is asked of pfedhn has no run of flayer; it has"):
        CALLS[call](profile="smoke", methods=["flayer"])
    assert not (home / "runs").exists()


def test_a_row_that_is_read_from_runs_of_another_says_whose():
    with pytest.raises(ValueError, match="fedavg_ft is read from runs of fedavg: name that"):
        parameters.asked(base.paper("fedper"), methods=["fedavg_ft"])


@pytest.mark.parametrize("word", ["plan", "compute", "keep"])
def test_a_command_ends_with_status_1(word, home, capsys):
    words = f"{word} pfedhn --profile smoke --artefacts table2 --datasets mnist"
    assert main(words.split()) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"pfl_papers {word}: artefacts=['table2']") and not said.out
    assert not (home / "runs").exists()


def test_a_data_set_that_adds_nothing_is_said(capsys):
    parameters.asked(base.paper("fedper"), profile="smoke", datasets=["digits", "ag_news"])
    said = "datasets: ag_news: no run of fedper at profile smoke has it\n"
    assert capsys.readouterr().out == said


def test_a_page_of_what_holds_without_any_run_is_refused():
    assert not WhatHolds().runs
    with pytest.raises(ValueError, match=r"artefacts=\['table2'\].*: no such runs are kept at"):
        WhatHolds(artefacts=["table2"], datasets=["mnist"])


# ---------------------------------------------------------------- what is trained unasked


def test_what_best_would_train_is_said_with_its_time_before_it_begins(home, capsys, monkeypatch):
    how = dict(profile="best", device="cpu", artefacts=["table1"])
    Study("pfedhn", **how, methods=["fedavg"], seeds=[7])
    said = capsys.readouterr().out
    assert said.startswith("no committed runs of table1 are such as asked for; 1 are trained at ")
    assert "profile quick, in less than a minute" in said or "about" in said
    Study("pfedhn", **how | {"profile": "quick"}, methods=["fedavg"])
    assert capsys.readouterr().out.startswith("no committed runs of table1 are such as asked for")
    assert not (home / "runs").exists()
    Study("pfedhn", **how, finished=True)
    Study("pfedhn", **how | {"profile": "quick"}, train=True)
    monkeypatch.setattr(parameters, "is_there", lambda experiment, train: True)
    Study("pfedhn", **how)
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------- overrides

REFUSED = {
    "no dict": ("{'rounds': 400}", ["give a dict, such as {'rounds': 400}", "papermill -y"]),
    "unknown": ({"round": 400}, ["'round' is unknown; did you mean 'rounds'? known are partition"]),
    "type": ({"rounds": "400"}, ["overrides(rounds='400'): got str, allowed is int"]),
    "bool": ({"rounds": True}, ["overrides(rounds=True): got bool, allowed is int"]),
    "range": ({"rounds": -1}, ["Experiment(rounds=-1): allowed is an integer >= 0"]),
    "choice": ({"buffers": "mean"}, ["Experiment(buffers='mean'): allowed is one of local"]),
    "method": ({"method": "fedavg"}, ["choose with methods=[...]"]),
    "seed": ({"seed": 3}, ["choose with seeds=[...]"]),
    "data": ({"dataset": "mnist"}, ["choose with datasets=[...]"]),
    "tags": ({"tags": {"row": "x"}}, ["'tags' is unknown; "]),
    "no arguments": ({"method_args": {}}, ["give a dict of arguments and their values"]),
    "argument": (
        {"partition_args": {"alhpa": 1.0}},
        ["{'alhpa': ...}}: no partition of these runs has it; they have ", "dirichlet: alpha, "],
    ),
    "its type": ({"partition_args": {"alpha": "x"}}, ["a run cannot have them: "]),
    "another": ({"partition": "shard"}, ["partition 'shard' is unknown; did you mean 'shards'?"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_overrides_that_no_run_can_have_are_refused_with_what_is_allowed(case, home):
    given, said = REFUSED[case]
    with pytest.raises(ValueError) as error:
        Study("fedaghn", profile="smoke", device="cpu", overrides=given)
    for part in said:
        assert part in str(error.value)
    assert not (home / "runs").exists()


def test_overrides_that_change_nothing_are_refused():
    how = dict(profile="smoke", artefacts=["table1"], overrides={"dtype": "float32"})
    with pytest.raises(ValueError, match="runs have such values already"):
        parameters.asked(base.paper("pfedla"), **how)


@pytest.mark.parametrize("name", PAPERS)
def test_an_override_reaches_every_run_what_it_starts_from_and_the_rounds_of_rows(name, capsys):
    paper, given = base.paper(name), {"momentum": 0.75, "rounds": 8}
    usual = Scope("smoke")
    scope = parameters.asked(paper, profile="smoke", overrides=given)
    assert "momentum=0.75, rounds=8: " in capsys.readouterr().out
    pairs = [
        (a, b)
        for s, t in zip(paper.planned(usual), paper.planned(scope), strict=True)
        for a, b in zip(s.experiments(), t.experiments(), strict=True)
    ]
    assert pairs
    for before, after in pairs:
        if before.tags["artefact"] == base.TUNING:
            assert before.plain() == after.plain() and before.tags == after.tags
            continue
        chain = [after, *([after.earlier] if after.earlier else [])]
        assert all(e.momentum == 0.75 for e in chain)
        said = "smoke, not the paper's setting (momentum=0.75, rounds=8)"
        assert after.tags == before.tags | {"profile": said}
    every = {b.rounds for _, b in pairs}
    assert any(r % 8 == 0 for r in every)
    if name == "pfedhn":  # five times as many communication steps
        cell = ("table1", "pfedhn")
        assert {b.rounds for _, b in pairs if (b.tags["artefact"], b.tags["row"]) == cell} == {40}


def test_an_argument_changes_where_a_method_has_it():
    given = {"method_args": {"mu": 0.25}}
    scope = parameters.asked(base.paper("fedaghn"), profile="smoke", overrides=given)
    runs = [e for s in base.paper("fedaghn").planned(scope) for e in s.experiments()]
    assert {e.method_args.get("mu") for e in runs if e.method == "fedprox"} == {0.25}
    assert not any("mu" in e.method_args for e in runs if e.method != "fedprox")


# ---------------------------------------------------------------- names


CELL = 'profile: str = "quick"\nseeds: list[int] = []\ntrain: bool = False'


def notebook(*cells):
    """The globals of a notebook in which these cells ran."""
    out = {"In": ["", *cells]}
    for cell in cells:
        exec(cell, out)
    return out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("lr = 0.1", "parameter 'lr' is unknown; known are profile, seeds, train"),
        ("seeds = [1]\nsedes = [2]", "parameter 'sedes' is unknown; did you mean 'seeds'"),
        ("Train = True", "did you mean 'train'"),
    ],
)
def test_a_name_that_is_no_parameter_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        parameters.check_injected(notebook(CELL, f"# Parameters\n{given}\n"))


def test_names_of_the_notebook_and_of_later_cells_are_taken():
    parameters.check_injected(notebook(CELL))
    parameters.check_injected(notebook(CELL, "lr = 0.1"))  # a reader's own cell
    parameters.check_injected(notebook(CELL, "# Parameters\nseeds = [1]\ntrain = True\n", "x = 1"))
    parameters.check_injected({})  # not in IPython


def test_the_old_name_of_train_is_understood(capsys):
    some = notebook(CELL, "# Parameters\nrecompute = True\n")
    parameters.check_injected(some)
    assert some["train"] is True and "recompute" not in some
    assert "recompute is called train now" in capsys.readouterr().out
    some["train"] = False  # by hand, and the cell runs again
    parameters.check_injected(some)
    assert some["train"] is False


@pytest.mark.parametrize("name", NAMES)
def test_every_notebook_checks_the_names_first(name):
    nb = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    (given,) = (i for i, cell in enumerate(code) if "parameters" in cell.metadata.get("tags", ()))
    second = code[given + 1]
    steps = [
        n for n in ast.parse(second.source).body if not isinstance(n, ast.Import | ast.ImportFrom)
    ]
    assert ast.unparse(steps[0]) == "parameters.check_injected(globals())"


@pytest.mark.slow
def test_papermill_itself_is_refused_and_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parent))
    monkeypatch.setenv("PFL_HEADLESS", "1")
    how = dict(kernel_name="python3", progress_bar=False, start_timeout=600, cwd=str(NOTEBOOKS))
    source, out = str(NOTEBOOKS / "fedper.ipynb"), str(tmp_path / "out.ipynb")
    given = dict(profile="smoke", artefacts=["fig2"], device="cpu")
    with pytest.raises(papermill.PapermillExecutionError, match="parameter 'lr' is unknown; known"):
        papermill.execute_notebook(source, out, given | {"lr": 0.1}, **how)
    cells = nbformat.read(source, as_version=4).cells
    ends = next(i for i, c in enumerate(cells) if "Study(" in c.source)
    short = nbformat.read(source, as_version=4)
    short.cells = [*cells[: ends + 1], nbformat.v4.new_code_cell("print('trains', study.train)")]
    nbformat.write(short, tmp_path / "short.ipynb")
    done = papermill.execute_notebook(
        str(tmp_path / "short.ipynb"), out, given | {"recompute": True}, **how
    )
    said = "".join(o.get("text", "") for c in done.cells for o in c.get("outputs", []))
    assert "recompute is called train now" in said and "trains True" in said
