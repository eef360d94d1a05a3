"""The files of both packages, and what they import."""

import ast
from pathlib import Path

import pfl_core
import pfl_papers

CORE, PAPERS = (Path(package.__file__).parent for package in (pfl_core, pfl_papers))


HOUSE = CORE.parent


ROOMS = [  # from the bottom up: a room takes from those above its line in this list, and from itself
    "pfl_core.util",
    "pfl_core.stacked",
    "pfl_core.optim pfl_core.reach",
    "pfl_core.models pfl_core.data",
    "pfl_core.anatomy",
    "pfl_core.methods",
    "pfl_core.engine",
    "pfl_core.experiments",
    "pfl_core.analysis pfl_core.extras",
    "pfl_core.__init__ pfl_core.__main__",
    "pfl_papers.places",
    "pfl_papers.evidence",
    "pfl_papers.papers",
    "pfl_papers.compare",
    "pfl_papers.bench",
    "pfl_papers.notebook",
    "pfl_papers.explore",
    "pfl_papers.__init__ pfl_papers.__main__",
]


RANK = {name: rank for rank, line in enumerate(ROOMS) for name in line.split()}


# All files, however deep; a room's face has no code, but a package inside a room may.
FILES = sorted(
    p
    for package in (CORE, PAPERS)
    for p in package.rglob("*.py")
    if p.name != "__init__.py" or len(p.relative_to(package).parts) != 2
)


def module(path: Path) -> str:
    """The room of a file: the name by which `RANK` knows it."""
    return ".".join(path.relative_to(HOUSE).with_suffix("").parts[:2])


def imported(path: Path) -> set[str]:
    """Dotted names imported or reached anywhere in a file, relative ones written out: `from . import data` is
    pfl_core.data.pools, and so is `pfl_core.data.pools` after a plain `import pfl_core`."""
    package = [*path.relative_to(HOUSE).parent.parts]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("pfl_core", "pfl_papers")
        ):
            names.add(f"{node.value.id}.{node.attr}")
    return {name for name in names if name.partition(".")[0] in ("pfl_core", "pfl_papers")}


def ours(path: Path) -> set[str]:
    """The rooms that a file imports from; a package itself counts as its __init__."""
    found = {tuple(name.split(".")[:2]) for name in imported(path)}
    heads = {".".join(p) if ".".join(p) in RANK else f"{p[0]}.__init__" for p in found}
    return heads - {module(path)}


def at_import(path: Path) -> set[str]:
    """Top-level packages imported when the file is imported: not inside a function."""
    body = list(ast.parse(path.read_text(encoding="utf-8")).body)
    names = set()
    for node in body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body += ast.iter_child_nodes(node)
    return names


def modules(path: Path) -> set[str]:
    """The files of ours that a file imports, "pfl_core.analysis.plots.style"."""
    known = {dotted(p) for p in FILES}
    parts = [name.split(".") for name in imported(path)]
    heads = (".".join(p[:n]) for p in parts for n in range(1, len(p) + 1))
    return {found for found in heads if found in known and found != dotted(path)}


def dotted(path: Path) -> str:
    parts = path.relative_to(HOUSE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def named(path: Path) -> str:
    return path.relative_to(HOUSE).as_posix()
