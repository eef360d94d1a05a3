"""Names under which our methods keep things of their own: a network with such a name is refused.

A State is a dict of names, the network's and the method's beside each other: "v.fc.weight" is
Ditto's own model, and would be a weight of the network's module `v`. What a method may call things
is read from its code: the texts in it, and what it takes names apart by.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable

from pfl_core.util import identity

APART = re.compile(r'(?:unprefixed|startswith)\(\s*f?"([a-z]+)\.')
KEY = re.compile(r'"(?:[a-z]+\.)?([A-Za-z_]\w*)"[]:]')
TORCH = {"weight", "bias"}  # of a network that is one layer; no method calls a thing of its own so


def taken(method: type, names: Iterable[str]) -> str:
    """The first of a network's tensors that has a name of a method's own; "" if none has."""
    words, modules = _known(method)
    for name in names:
        first, inside, _ = name.partition(".")
        if first in (modules if inside else words):
            return name
    return ""


@functools.cache
def _known(method: type) -> tuple[set[str], set[str]]:
    # Keys of dicts, and modules whose tensors' names would be taken apart.
    ours = [c for c in method.__mro__ if identity.is_ours(c) and c.__dict__.get("name")]
    source = "\n".join(inspect.getsource(inspect.getmodule(c) or c) for c in ours)
    return {*KEY.findall(source)} - TORCH, {*APART.findall(source)}
