"""The examples in the docstrings of what a newcomer meets first, and of each method, are right."""

import doctest
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pfl_core
from pfl_core.methods.base import METHODS

NAMES = (
    "Experiment run plot sweep tune grid Federation Method load "
    "list_methods list_datasets list_models list_partitions list_metrics register_metric"
).split()
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


OURS = sorted(name for name, c in METHODS.items() if c.__module__.startswith("pfl_core."))


def examples(thing):
    """The examples of a public thing, which may use all public names, and numpy as np."""
    known = {n: getattr(pfl_core, n) for n in pfl_core.__all__} | {"np": np}
    finder = doctest.DocTestFinder(recurse=False)
    found = finder.find(thing, thing.__name__, globs=known)
    return [test for test in found if test.examples]


def failures(tests):
    """What doctest says of examples that give something else."""
    said = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=OPTIONS)
    for test in tests:
        runner.run(test, out=said.append)
    return "".join(said)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield
    METHODS.pop("own_biases", None)  # Method's example, which other tests do not know


@pytest.mark.parametrize("name", NAMES)
def test_its_example_gives_what_it_says(name):
    tests = examples(getattr(pfl_core, name))
    assert tests, f"{name} has no example; write a short one, on digits"
    assert not failures(tests)


@pytest.mark.parametrize("name", OURS)
def test_the_example_of_a_method_gives_what_it_says(name):
    (test,) = examples(METHODS[name])
    assert any(f'method="{name}"' in line.source for line in test.examples), "it uses the method"
    assert 3 <= len(test.examples) <= 6 and not failures([test])


def test_the_example_of_a_partition_of_ones_own(monkeypatch):
    from pfl_core.data import partition

    monkeypatch.setattr(partition, "_SCHEMES", dict(partition._SCHEMES))
    assert not failures(examples(pfl_core.register_partition)) and "one_class" in partition._SCHEMES


def test_the_example_of_arrays_dealt_to_clients():
    finder = doctest.DocTestFinder(recurse=False)
    known = {n: getattr(pfl_core, n) for n in pfl_core.__all__}
    ways = ("dealt", "grouped", "from_table", "save")
    found = [finder.find(getattr(pfl_core.Federation, n), n, globs=known.copy()) for n in ways]
    assert all(tests and not failures(tests) for tests in found)


def files_of_benchmarks():
    """Small files in the forms of LEAF and FL-bench, and what NIID-Bench's partition_data returns."""
    for part, n in (("train", 3), ("test", 1)):
        data = {u: {"x": [[0.5] * 784] * n, "y": list(range(n))} for u in ("f0", "f1")}
        about = {"users": list(data), "num_samples": [n, n], "user_data": data}
        (folder := Path("leaf", part)).mkdir(parents=True)
        (folder / f"all_data_0_niid_0_keep_0_{part}_9.json").write_text(json.dumps(about))
    mine = [np.arange(16) + 20 * k for k in range(2)]
    lists = [{"train": i, "val": np.array([], int), "test": i[:4] + 16} for i in mine]
    partition = {"separation": {"train": [0, 1], "total": 2}, "data_indices": lists}
    Path("partition.pkl").write_bytes(pickle.dumps(partition))
    pool = pfl_core.load("digits")
    known = {"X_train": pool.x[:30], "y_train": pool.y[:30]}
    known |= {"X_test": pool.x[30:40], "y_test": pool.y[30:40]}
    return known | {"net_dataidx_map": {1: list(range(15, 30)), 0: list(range(15))}}


def test_the_examples_of_own_data_give_what_they_say():
    page = Path(__file__).parents[1] / "docs" / "own_data.md"
    text = page.read_text().replace("```", "")  # what closes a block is no output
    test = doctest.DocTestParser().get_doctest(text, files_of_benchmarks(), page.name, None, 0)
    assert len(test.examples) > 30 and not failures([test])


def test_the_examples_of_metrics_give_what_they_say():
    page = Path(__file__).parents[1] / "docs" / "evaluation.md"
    text = page.read_text().replace("```", "")
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, None, 0)
    assert len(test.examples) > 12 and not failures([test])


def test_the_examples_of_a_method_in_the_second_hour_give_what_they_say():
    page = Path(__file__).parents[1] / "docs" / "own.md"
    text = page.read_text().partition("## A method in the second hour")[2].replace("```", "")
    test = doctest.DocTestParser().get_doctest(text, {"__name__": "own"}, page.name, None, 0)
    try:
        assert len(test.examples) > 15 and not failures([test])
    finally:
        for name in ("rarely", "warm", "gate"):
            METHODS.pop(name, None)


def test_the_script_of_own_methods_runs(tmp_path):
    text = (Path(__file__).parents[1] / "docs" / "own.md").read_text()
    for name in ("my_methods", "study"):
        (code,) = re.findall(rf"```python\n# {name}\.py\n(.*?)```", text, flags=re.S)
        (tmp_path / f"{name}.py").write_text(code)
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    env = os.environ | {"PFL_RUNS": str(tmp_path / "runs"), "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "study.py"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.strip() == "4 runs", done.stderr


def test_a_wrong_example_is_found():
    parser = doctest.DocTestParser()
    wrong = parser.get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert "Expected:\n    3\nGot:\n    2" in failures([wrong])
