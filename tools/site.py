"""The documentation site: what `./run_all.sh docs` adds to Sphinx, which reads docs/conf.py.

Pages that nobody writes (a method's, the API's) are made below docs/generated/, which git ignores.
A finished site is read once more: its inner links must lead somewhere, and no page may ask another
computer for anything.
"""

from __future__ import annotations

import ast
import dataclasses
import html
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urldefrag, urlsplit

from sphinx.util import logging

import pfl_core
from pfl_core import methods
from pfl_core.methods.base import METHODS
from pfl_core.util import fields
from pfl_core.util.paths import CHECKOUT as ROOT
from pfl_papers.compare.readable import TONES, tone
from tools import equations

GENERATED = ROOT / "docs" / "generated"
MANY = 12  # fields
THUMB = "150px"  # wide
ROOMS = [f"pfl_core.{n}" for n in "data methods engine experiments analysis extras util".split()]
ROOMS += [f"pfl_papers.{n}" for n in "evidence papers compare bench notebook explore".split()]
# {page: the pages below it}, which GitHub's readers find by links.
TREE = {
    "README": """docs/tour docs/notebooks docs/methods docs/README docs/generated/api/index
        CONTRIBUTING""",
    "docs/tour": "docs/own docs/own_data docs/new_clients docs/pretrained docs/explore",
    "docs/notebooks": "notebooks/start notebooks/*",
    "docs/methods": "docs/generated/methods/*",
    "docs/README": """docs/evaluation docs/results docs/bench docs/comparison docs/parity docs/data
        docs/runs docs/errors docs/reliability docs/soak docs/cluster docs/house benchmarks/README
        results/README""",
    "CONTRIBUTING": "CHANGELOG",
}


# What a page is on the site.


def adapted(docname: str, text: str) -> str:
    """The source of a page as the site has it.

    Links to a method's file lead to its page, lists of pictures are galleries, verdicts are
    coloured, and pages know those below them.
    """
    up = "../" * docname.count("/")
    file = r"\]\((?:\.\./)*pfl_core/methods/(\w+)\.py\)"
    pages = {path.stem for path in (GENERATED / "methods").glob("*.md")}
    if not docname.startswith("docs/generated/"):
        there = f"]({up}docs/generated/methods/%s.md)"
        text = re.sub(file, lambda m: there % m[1] if m[1] in pages else m[0], text)
    text = LISTED.sub(_gallery, text)
    if docname == "docs/results":
        text = VERDICT.sub(_coloured, text)
    if below := TREE.get(docname, "").split():
        listed = "\n".join(f"/{page}" for page in below)
        text += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{listed}\n```\n"
    if docname.startswith("figures/"):  # a table: results.md leads there, no tree does
        text = f"---\norphan: true\n---\n\n# {Path(docname).name}\n\n{text}"
    return text


LISTED = re.compile(r"^- (?:([^\n\[:]+): )?((?:\[[^\]]+\]\([^)]+\)(?: · )?)+)$", re.M)
LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
WORDS = rf"(?:{'|'.join(TONES)})(?:: [^|<]+?)?"
VERDICT = re.compile(rf"(\* \| (?:[a-z ]+ \| )?|<br>)({WORDS})(?= \||<br>)")


def _gallery(listed: re.Match) -> str:
    """A line of links: pictures as thumbnails that open, and the other links below them."""
    says, links = listed[1] or "", LINK.findall(listed[2])
    pictures = [(name, to) for name, to in links if to.endswith(".png")]
    others = " · ".join(f"[{name}]({to})" for name, to in links if (name, to) not in pictures)
    lines = [f"**{says}.** {others}" if says else others, ""]
    if pictures:
        lines += ["{.gallery}"]
        lines += [f"- ![{name}]({to}){{width={THUMB}}} {name}" for name, to in pictures]
    return "\n".join([*lines, ""])


def _coloured(verdict: re.Match) -> str:
    """A verdict, behind a claim with its place or below a number, in the report's colours."""
    return f"{verdict[1]}[{verdict[2]}]{{.pill .{tone(verdict[2])}}}"


def readable(app, what, name, obj, options, lines: list[str]) -> None:
    """Make of a plain docstring what Sphinx reads.

    Stars and bars are signs, and deeper blocks code. Of a method's file its page is named.
    """
    file = name.removeprefix("pfl_core.methods.")
    if what == "module" and (GENERATED / "methods" / f"{file}.md").is_file():
        lines[:] = [lines[0], "", f"Its equations: :doc:`/docs/generated/methods/{file}`.", ""]
        return
    lines[:] = ["Other Parameters" if x == "Hyper-parameters" else x for x in lines]
    titles = [i for i, line in enumerate(lines) if line.startswith("---")]
    end = titles[0] - 1 if titles else len(lines)
    blocks = re.split(r"\n{2,}", "\n".join(lines[:end]).rstrip())
    out = [line for block in blocks for line in (*_block(block.split("\n")), "")]
    example = (">>>", "...")
    rest = [x if x.lstrip().startswith(example) else _signs(x) for x in lines[end:]]
    lines[:] = out + rest


def signature(app, what, name, obj, options, given: str | None, returns: str | None):
    """A class with many fields, such as Experiment, lists them below and not in its head."""
    many = dataclasses.is_dataclass(obj) and len(dataclasses.fields(obj)) > MANY
    return ("(**fields)", returns) if many and "Parameters\n" in (obj.__doc__ or "") else None


def skipped(app, what, name, obj, skip: bool, options) -> bool | None:
    """A named tuple's fields stand in its head; Python says no more of them than their number."""
    return True if (inspect.getdoc(obj) or "").startswith("Alias for field number") else None


def _block(block: list[str]) -> list[str]:
    if all(line.startswith("    ") for line in block):
        return ["::", "", *block]
    lines = [_signs(line) for line in block]
    numbered = [i for i, line in enumerate(lines) if line.startswith("1. ")]
    return [*lines[: numbered[0]], "", *lines[numbered[0] :]] if numbered else lines


def _signs(line: str) -> str:
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(p if p.startswith("`") else re.sub(r"([*|])", r"\\\1", p) for p in parts)


# Pages of methods.


def method_files() -> dict[str, list[type]]:
    """{file: its methods' classes}, for each file with a method."""
    out: dict[str, list[type]] = {}
    for found in pkgutil.iter_modules(methods.__path__):
        inside = [c for c in METHODS.values() if c.__module__ == f"pfl_core.methods.{found.name}"]
        if inside:
            out[found.name] = inside
    return out


def method_page(file: str, classes: list[type]) -> str:
    """Markdown of a method's page: what its docstring says, its hyper-parameters, its code."""
    doc = ast.get_docstring(ast.parse((ROOT / f"pfl_core/methods/{file}.py").read_text()))
    title, _, idea = doc.partition("\n")[0].partition(": ")
    rest = doc.partition("\n")[2].strip("\n")
    out = [f"# {title}", "", equations.prose(idea[0].upper() + idea[1:]), ""]
    out += [part for block in re.split(r"\n\n+", rest) for part in _part(block.splitlines())]
    for cls in classes:
        out += ["", f'## `method="{cls.name}"`', "", *_hyperparameters(cls)]
        source = f"../../../pfl_core/methods/{file}.py"
        out += ["", f"```{{literalinclude}} {source}", f":pyobject: {cls.__name__}", "```"]
    return "\n".join([*out, "", f"The whole file: [{file}.py]({source}).", ""])


def _part(block: list[str]) -> list[str]:
    # A paragraph, a heading with its numbered facts, or equations with their notes.
    first = [i for i, line in enumerate(block) if line.startswith("1. ")]
    deep = [i for i, line in enumerate(block) if line.startswith("    ")]
    if first:
        head = equations.prose(" ".join(block[: first[0]]))
        facts = [_fact(line) for line in block[first[0] :]]
        # What follows a list without a blank line may be the next one's head.
        then = [i for i, x in enumerate(facts) if x[0] not in "0123456789 "]
        more = _part(block[first[0] + then[0] :]) if then else []
        return [BEFORE.sub(r"**\1**", head), "", *facts[: then[0] if then else None], "", *more]
    if block[0].startswith("  "):
        return _equations(block)
    if deep:
        return [*_part(block[: deep[0]]), *_equations(block[deep[0] :])]
    return [*map(equations.prose, block), ""]


BEFORE = re.compile(r"^(Differs from [\w' ]*\w)")


def _fact(line: str) -> str:
    return (" " * 3 if line.startswith(" ") else "") + equations.prose(line.strip())


def _equations(block: list[str]) -> list[str]:
    lines = ["", "{.equations}", "| | |", "| --- | --- |"]
    for latex, note in equations.rows(block):
        lines.append(rf"| $\displaystyle {latex}$ | {equations.prose(note)} |")
    return [*lines, ""]


def _hyperparameters(cls: type) -> list[str]:
    own = [f for f in dataclasses.fields(cls) if f.metadata.get("doc")]
    if not own:
        return ["It has no hyper-parameters of its own."]
    lines = ["| hyper-parameter | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    for f in own:
        default = f.default_factory() if f.default is dataclasses.MISSING else f.default
        doc = equations.prose(f.metadata["doc"])
        lines.append(f"| `{f.name}` | `{default!r}` | {_cell(fields.allowed(f))} | {doc} |")
    return lines


def _cell(text: str) -> str:
    return re.sub(r"([*<\[\]|$])", r"\\\1", text)


# Pages of the API.


def public(module: ModuleType) -> list[str]:
    """The public names that a module makes itself, without those that pfl_core has."""
    names = [n for n in vars(module) if not n.startswith("_")]
    own = [n for n in names if getattr(vars(module)[n], "__module__", "") == module.__name__]
    return [n for n in own if getattr(pfl_core, n, None) is not getattr(module, n)]


def named() -> list[str]:
    """What rooms name for others, as dotted names of modules."""
    rooms = [importlib.import_module(room) for room in ROOMS]
    return [f"{room.__name__}.{name}" for room in rooms for name in room.__all__]


def api_pages() -> dict[str, str]:
    """{page: its text}: a page for each name of pfl_core, and for each module that a room names."""
    out: dict[str, str] = {}
    top = [n for n in pfl_core.__all__ if callable(getattr(pfl_core, n))]
    for name in top:
        kind = "class" if inspect.isclass(getattr(pfl_core, name)) else "function"
        members = "\n   :members:\n   :inherited-members:" if kind == "class" else ""
        text = f".. currentmodule:: pfl_core\n\n.. auto{kind}:: {name}{members}"
        out[f"{name}.rst"] = _rst(name, text)
    for name in ["pfl_core.models", "pfl_core.stacked", *named()]:
        members = ", ".join(public(importlib.import_module(name)))
        members = f"\n   :members: {members}" if members else ""
        out[f"{name}.rst"] = _rst(name, f".. automodule:: {name}{members}")
    out["index.md"] = _api_index(top)
    return out


def _rst(title: str, text: str) -> str:
    return f"{title}\n{'=' * len(title)}\n\n{text}\n"


def _api_index(top: list[str]) -> str:
    lines = ["# API", "", "`from pfl_core import ...` has the names that a newcomer meets:", ""]
    lines += _listing({n: _first(getattr(pfl_core, n)) for n in top})
    lines += ["", "Below it are the rooms of the library, then those of what reproduces papers."]
    lines += [" A room says what others may take from it; these are its modules.", ""]
    base = ["pfl_core.models", "pfl_core.stacked"]
    lines += _listing({n: _first(importlib.import_module(n)) for n in base})
    for room in ROOMS:
        module = importlib.import_module(room)
        names = [f"{module.__name__}.{n}" for n in module.__all__]
        lines += ["", f"## {room}", "", _first(module), ""]
        lines += _listing({n: _first(importlib.import_module(n)) for n in names})
    listed = "\n".join([*top, *base, *named()])
    return "\n".join([*lines, "", f"```{{toctree}}\n:hidden:\n\n{listed}\n```\n"])


def _first(thing: object) -> str:
    return equations.prose(inspect.getdoc(thing).splitlines()[0])


def _listing(about: dict[str, str]) -> list[str]:
    lines = [f"| [`{name}`]({name}.rst) | {says} |" for name, says in about.items()]
    return ["{.listing}", "| | |", "| --- | --- |", *lines]


def write(app: object = None) -> None:
    """Write the generated pages; what has not changed is not touched, so that Sphinx skips it."""
    pages = {f"methods/{f}.md": method_page(f, classes) for f, classes in method_files().items()}
    pages |= {f"api/{name}": text for name, text in api_pages().items()}
    for old in GENERATED.rglob("*.*"):
        if old.relative_to(GENERATED).as_posix() not in pages:
            old.unlink()
    for name, text in pages.items():
        path = GENERATED / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


# What is checked of a built site.

TAG = re.compile(r"<(\w+)\b([^>]*)>")
ATTRIBUTE = re.compile(r"""\b(href|src|srcset|data|poster)=["']([^"']*)["']""")
CSS = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])((?:https?:)?//[^"')]+)""")
ELSEWHERE = re.compile(r"(?:https?:)?//")


def requests_elsewhere(site: Path) -> list[str]:
    """What pages and style sheets of a site would load from other computers; links to go there not.

    Returns "page: address" for each.
    """
    out = []
    for page in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = page.read_text()
        found = CSS.findall(text)
        for tag, inside in TAG.findall(text):
            if tag not in ("a", "math", "svg"):
                found += [to for _, to in ATTRIBUTE.findall(inside) if ELSEWHERE.match(to)]
        out += [f"{page.relative_to(site)}: {address}" for address in found]
    return out


def broken_links(site: Path) -> list[str]:
    """Inner links of a site that lead to no file, or to no place of a page: "page: link" each."""
    found = [p for p in site.rglob("*.html") if "_static" not in p.parts]
    pages = {page: page.read_text() for page in found}
    places = {p: set(re.findall(r"""\bid=["']([^"']+)""", text)) for p, text in pages.items()}
    out = []
    for page, text in pages.items():
        for link in sorted({to for _, inside in TAG.findall(text) for _, to in _links(inside)}):
            target, place = urldefrag(html.unescape(link))
            path = (page.parent / unquote(urlsplit(target).path)).resolve() if target else page
            if not path.is_file() or (place and path in places and place not in places[path]):
                out.append(f"{page.relative_to(site)}: {link}")
    return out


def _links(inside: str) -> list[tuple[str, str]]:
    outside = ("http:", "https:", "mailto:", "data:", "//")
    found = [(k, to) for k, to in ATTRIBUTE.findall(inside) if k in ("href", "src")]
    return [(k, to) for k, to in found if to not in ("", "#") and not to.startswith(outside)]


def finish(app, error: Exception | None) -> None:
    """Look at a built site; it fails if a link leads nowhere or a page asks elsewhere."""
    if error:
        return
    site = Path(app.outdir)
    to = "README.html"
    (site / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={to}">\n')
    wrong = [f"asks elsewhere: {x}" for x in requests_elsewhere(site)]
    wrong += [f"leads nowhere: {x}" for x in broken_links(site)]
    if wrong:
        app.statuscode = 1
        for line in wrong:
            logging.getLogger(__name__).warning(line)


def setup(app) -> dict:
    """Called by Sphinx."""
    app.connect("config-inited", lambda app, config: write())
    app.connect("source-read", lambda app, name, source: _adapt(name, source))
    app.connect("autodoc-process-docstring", readable, priority=400)  # before numpydoc's
    app.connect("autodoc-skip-member", skipped)
    app.connect("autodoc-process-signature", signature, priority=400)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _adapt(name: str, source: list[str]) -> None:
    source[0] = adapted(name, source[0])
