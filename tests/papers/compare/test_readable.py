"""What a reader sees of tables: display names in place of keys, and no NaN."""

import html
import json
import re

import pandas as pd
import pytest

from pfl_core.analysis import plots
from pfl_papers import places
from pfl_papers.compare import readable
from pfl_papers.papers.base import PAPERS
from tools.notebooks import NOTEBOOKS

# Keys that are no English words.
KEYS = {
    key
    for labels in (
        plots.LABELS,
        plots.DATA_LABELS,
        plots.PARTITION_LABELS,
        plots.MODEL_LABELS,
        plots.MEASURE_LABELS,
        plots.FIELD_LABELS,
    )
    for key, says in labels.items()
    if key != says and (labels is plots.LABELS or re.search(r"[_\d]", key))
} - {"local", "apple", "ditto"}


def keys_in(text):
    """The registered keys that stand in a text as words."""
    words = set(re.findall(r"(?<![\w./-])[\w-]+(?![\w/-])", text))
    return sorted(words & KEYS) + [w for w in ("local", "apple", "ditto") if text.strip() == w]


def cells(page):
    """The cells, captions and summaries of HTML, without code."""
    page = re.sub(r"<(code|style|pre)\b.*?</\1>", "", page, flags=re.S)
    inside = re.findall(r"<(td|th|p|summary|li|caption)\b[^>]*>(.*?)</\1>", page, flags=re.S)
    texts = (re.sub(r"<[^>]*>", " ", text) for _, text in inside)
    return [html.unescape(text) for text in texts if "base64" not in text]


def test_a_table_has_display_names_and_no_nan():
    frame = pd.DataFrame(
        {"client_visits": [1.5, float("nan")], "row": ["fedavg_ft", "cifar10"], "lr": [1, 2]},
        index=pd.Index(["flayer (official)", "local"], name="row"),
    )
    got = readable.named(frame)
    assert [*got] == ["Client visits", "row", "learning rate"]
    assert [*got.index] == ["FLAYER (official)", "Local"] and got.index.name is None
    assert got.iloc[:, 0].tolist() == ["1.5", ""] and got.iloc[:, 2].tolist() == [1, 2]
    assert got.row.tolist() == ["FedAvg-FT", "CIFAR-10"]
    assert [*frame] == ["client_visits", "row", "lr"]  # the frame itself keeps its keys


@pytest.mark.parametrize("key", sorted(KEYS))
def test_every_key_has_its_name_in_a_table(key):
    table = readable.named(pd.DataFrame({key: [key]}, index=[key]))
    assert keys_in(" ".join([table.columns[0], table.iloc[0, 0], table.index[0]])) == []


@pytest.mark.parametrize("name", [*PAPERS, "what_holds"])
def test_no_table_of_a_notebook_shows_a_key(name):
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    outputs = [o for cell in notebook["cells"] for o in cell.get("outputs", [])]
    pages = ["".join(o.get("data", {}).get("text/html", "")) for o in outputs]
    found = {text: keys for page in pages for text in cells(page) if (keys := keys_in(text))}
    assert found == {}


def test_no_table_of_a_page_shows_a_key():
    root = places.checkout("tables")
    tables = [root / "README.md", root / "docs" / "results.md", root / "docs" / "comparison.md"]
    tables += [root / "benchmarks" / "README.md", *sorted((root / "figures").rglob("*.md"))]
    found = {}
    for path in tables:
        for line in path.read_text(encoding="utf-8").splitlines():
            text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", line) if line.startswith("|") else ""
            if keys := keys_in(text.replace("|", " ")):
                found[f"{path.relative_to(root)}: {text[:60]}"] = keys
    assert found == {}


def test_no_table_of_the_report_shows_a_key(reported):
    page = (reported / "figures" / "report.html").read_text(encoding="utf-8")
    assert {t: keys for t in cells(page) if (keys := keys_in(t))} == {}


def contrast(one, other):
    """WCAG 2's ratio of two colours."""
    light = []
    for colour in (one, other):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        light.append(0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] + 0.05)
    return max(light) / min(light)


@pytest.mark.parametrize("ground", ["#ffffff", "#111111"])
def test_verdicts_can_be_read_on_a_light_and_on_a_dark_page(ground):
    assert {tone for tone, c in readable.COLOURS.items() if contrast(c, ground) < 4.2} == set()


@pytest.mark.parametrize("name", [*PAPERS, "what_holds"])
def test_every_picture_of_a_notebook_has_an_alternative_text(name):
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    outputs = [o for cell in notebook["cells"] for o in cell.get("outputs", [])]
    pictures = [
        o["metadata"].get("image/png", o["metadata"])
        for o in outputs
        if "image/png" in o.get("data", {})
    ]
    assert [o for o in pictures if len(o.get("alt", "")) < 30] == []
    folded = re.findall(
        "<img[^>]*?>", " ".join("".join(o.get("data", {}).get("text/html", "")) for o in outputs)
    )
    assert [img[:60] for img in folded if not re.search('alt="[^"]{30,}"', img)] == []
