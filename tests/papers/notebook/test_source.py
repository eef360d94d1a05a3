"""The library's own lines, as a notebook shows them."""

import inspect

import pytest

from pfl_core.methods.fedaghn import FedAGHN
from pfl_core.methods.fedper import FedPer
from pfl_papers.notebook.source import source


@pytest.mark.parametrize("function", [FedAGHN.attention, FedPer.is_shared, FedPer])
def test_lines_are_the_files_own_but_for_the_docstring(function):
    shown = source(function).data.splitlines()
    assert shown[0] == f"`{function.__module__.replace('.', '/')}.py`"
    assert (shown[2], shown[-1]) == ("```python", "```")
    own = [line.strip() for line in inspect.getsource(function).splitlines()]
    assert [line for line in (s.strip() for s in shown[3:-1]) if line not in own] == []
    said = (function.__doc__ or "nowhere").splitlines()[0]
    assert said not in "\n".join(shown) and shown[-2].strip() == own[-1]


def test_several_functions_stand_one_below_the_other():
    text = source(FedPer.is_shared, FedPer.local).data
    assert text.index("def is_shared") < text.index("\n\ndef local")


@pytest.mark.parametrize("given", [(), (FedPer.local, FedAGHN.attention)])
def test_one_file_at_a_time(given):
    with pytest.raises(ValueError, match="give such of one file"):
        source(*given)
