"""The library's own lines of a rule, beside its equation."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from pfl_papers.notebook.showing import ipython


def source(*functions: Callable) -> Any:
    """Return the source of functions and classes as Markdown for a notebook, without docstrings.

    Parameters
    ----------
    *functions : callable
        Of one file, such as `FedAGHN.attention`.

    Raises
    ------
    ValueError
        Without functions, or for such of several files.
    """
    files = dict.fromkeys(f.__module__ for f in functions)
    if len(files) != 1:
        raise ValueError(f"source(): given functions of {[*files]}: give such of one file")
    parts = "\n\n".join(_lines(f) for f in functions)
    file = next(iter(files)).replace(".", "/")
    return ipython().Markdown(f"`{file}.py`\n\n```python\n{parts}\n```")


def _lines(function: Callable) -> str:
    text = textwrap.dedent(inspect.getsource(function)).rstrip()
    lines, node = text.splitlines(), ast.parse(text).body[0]
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
        del lines[node.body[0].lineno - 1 : node.body[0].end_lineno]
    return "\n".join(lines)
