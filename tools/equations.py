"""Equations as a docstring has them, in plain text, made LaTeX; and what stands beside them.

    w_ij^l = a_ij^l / (1 + p_i^l)     `attention`     ->     w_{ij}^{l} = a_{ij}^{l} / (1 + ...

A letter or the name of a Greek one is a symbol; `bar`, `hat`, `tilde`, `~`, `+` and `'` after it
are its marks; after `_` and `^` come letters and digits, or what is in {} or (). Other words are
words.
"""

from __future__ import annotations

import re

GREEK = """alpha beta gamma delta epsilon eps zeta eta theta lambda mu nu xi rho sigma tau phi psi
omega Delta Theta""".split()
SHOWN = {"eps": r"\epsilon", "sum": r"\sum", "grad": r"\nabla", "<-": r"\leftarrow", "!=": r"\ne"}
SHOWN |= {"<=": r"\le", ">=": r"\ge", "~": r"\approx", "*": r"\odot", "  ": r"\quad ", "%": r"\%"}
NAMED = "argmin clip cos exp floor ln max mean median min relu ReLU softmax CE HN MMD SGD CoV UP"
FAR = 24  # columns
MARKS = {"bar": r"\bar", "hat": r"\hat", "^": r"\hat", "tilde": r"\tilde", "~": r"\tilde"}
MARK = r"bar|hat|tilde|~|\^(?=[_: ])|\+(?=_)|'+"

_name = rf"(?:{'|'.join(sorted(GREEK, key=len, reverse=True))}|[A-Za-z])"
SYMBOL = re.compile(rf"({_name})({MARK})?(?![A-Za-z])(\d(?!\w))?")
SCRIPT = re.compile(r"([_^])(\{[^}]*\}|\([^)]*\)|\w+)")
TOKEN = re.compile(r"<-|!=|<=|>=|\|\||  +|[A-Za-z]{2,}(?:'s)?|\d+(?:\.\d+)?|.")
INLINE = re.compile(
    rf"(?<![\w.\"'-])(?:(?:{_name}(?:{MARK})?|sum|mean)(?:[_^](?:\{{[^}}]*\}}|\([a-z]\)|\w\w?(?!\w)))+"
    rf"|(?:{'|'.join(GREEK)})(?:bar|hat|tilde|~)?)(?!\w|-?=|-\w|'(?!s))"
)


def latex(text: str) -> str:
    """LaTeX of an equation in plain text."""
    out, at, opened = [], 0, set()
    while at < len(text):
        if found := SCRIPT.match(text, at):
            sign, inner = found.groups()
            inner = inner[1:-1] if inner[0] == "{" else inner
            out.append(sign + "{" + (r"\top" if inner == "T" else latex_inner(inner)) + "}")
        elif found := _symbol(text, at):
            out.append(_marked(*found.groups()))
        else:
            found = TOKEN.match(text, at)
            out.append(_token(found[0], text, found, opened))
        at = found.end()
    words = re.sub(r" \} *\\text\{ ", " ", "".join(out))  # running words are one text
    return re.sub(r" {2,}", " ", words).strip()


def latex_inner(text: str) -> str:
    """A subscript or superscript: letters side by side, `i in c` as of a set."""
    if re.fullmatch(r"[a-z0-9]+|[A-Z][a-z]?", text) and text not in GREEK:
        return text
    return latex(re.sub(r" in ", r" ∈ ", text)).replace("∈", r"\in ")


def _symbol(text: str, at: int) -> re.Match[str] | None:
    found = SYMBOL.match(text, at)
    # "a" and "s" of running words are letters, too: in equations they are symbols.
    return found if found and not (at and text[at - 1].isalpha()) else None


def _marked(name: str, mark: str | None, digit: str | None) -> str:
    shown = SHOWN.get(name) or (f"\\{name}" if name in GREEK else name)
    if mark in MARKS:
        shown = f"{MARKS[mark]}{{{shown}}}"
    elif mark == "+":
        shown = f"{{{shown}}}^{{+}}"
    elif mark:
        shown += mark
    return shown + (f"_{{{digit}}}" if digit else "") + " "


def _token(token: str, text: str, found: re.Match[str], opened: set[str]) -> str:
    if token in ("||", "|"):
        side = "r" if token in opened else "l"
        opened ^= {token}
        return rf"\{side}{'Vert' if token == '||' else 'vert'} "
    if token == "<" and text[found.end() : found.end() + 1] not in ("", " "):
        return r"\langle "
    if token == ">" and text[found.start() - 1 : found.start()] not in ("", " "):
        return r"\rangle "
    if token.startswith("  "):
        return SHOWN["  "]
    if token in SHOWN:
        return SHOWN[token] + " "
    if token in NAMED.split():
        return rf"\operatorname{{{token}}}"
    return rf"\text{{ {token} }}" if token[0].isalpha() else token


def rows(block: list[str]) -> list[tuple[str, str]]:
    """(LaTeX, note) for each equation of an indented block; notes stand three spaces apart.

    A line that begins far to the right goes on with the note above; one that is indented a little
    goes on with the equation above, in a row of its own.
    """
    out: list[tuple[str, str]] = []
    for line in block:
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if out and indent > FAR:
            out[-1] = (out[-1][0], f"{out[-1][1]} {text}".strip())
            continue
        equation, *note = re.split(r" {3,}(?!<-|=|~)(?=\S)", text, maxsplit=1)
        equation = re.sub(r"(?<!,) +", " ", equation)
        shown = (r"\quad " if indent > 4 else "") + latex(equation)
        out.append((shown, re.sub(r" {2,}", " ", "".join(note))))
    return out


def prose(text: str) -> str:
    """Markdown of a paragraph: its symbols as equations, code as code, the rest as it is."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else _prose(p) for p in parts)


def _prose(text: str) -> str:
    out, at = [], 0
    for found in INLINE.finditer(text):
        out += [_escaped(text[at : found.start()]), f"${latex(found[0])}$"]
        at = found.end()
    text = "".join([*out, _escaped(text[at:])])
    return re.sub(r"\barXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def _escaped(text: str) -> str:
    return re.sub(r"([*<\[\]|$])", r"\\\1", text)
