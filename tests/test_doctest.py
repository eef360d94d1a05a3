"""The examples in the docstrings of what a newcomer meets first, and of each method, are right."""

import doctest

import numpy as np
import pytest

import pfl_core
from pfl_core.methods.base import METHODS

NAMES = (
    "Experiment run plot sweep tune grid Federation Method load "
    "list_methods list_datasets list_models list_partitions"
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
    found = finder.find(pfl_core.Federation.dealt, "dealt", globs=known)
    found += finder.find(pfl_core.Federation.save, "save", globs=known)
    assert found and not failures(found)


def test_a_wrong_example_is_found():
    parser = doctest.DocTestParser()
    wrong = parser.get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert "Expected:\n    3\nGot:\n    2" in failures([wrong])
