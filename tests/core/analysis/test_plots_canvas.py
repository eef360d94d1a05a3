"""Every kind of figure, drawn from small rows: nothing outside the canvas, nothing over another thing."""

import io
import itertools
import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from pfl_core.analysis import plots
from pfl_papers.papers import base as papers

ROOT = Path(__file__).resolve().parents[3]
ROWS = ["local", "fedavg", "fedavg_ft", "heurpfedla", "fedaghn", "fedavg, lr 0.1", "K_P = 2"]
COLUMNS = ["MobileNet of width 1/4, synthetic raters\non raters_digits100", "CIFAR-10, N=100", "c"]
CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()


def long(names=ROWS, columns=COLUMNS[:1], seeds=2, xs=(0, 10, 20)):
    """Accuracies up to 100 % with seeds far apart, so that their intervals would leave 0 to 100."""
    cells = itertools.product(enumerate(names), columns, range(seeds), xs)
    lines = [
        dict(row=n, column=c, seed=s, rounds=r, value=min(100.0, 40 * s + 5 * i + 2 * r))
        for (i, n), c, s, r in cells
    ]
    return pd.DataFrame(lines).assign(level=30.0, published=55.0)


def study_like(plot, frame, **kw):
    """As `Study.draw` and `Study.figure` put panels together."""
    columns = list(dict.fromkeys(frame.column))
    fig, axes = plots.panels(len(columns), sharey=True)
    for ax, column in zip(axes, columns, strict=True):
        plot(frame[frame.column == column], ax, **kw)
        plots.entitle(ax, column)
    plots.outer_labels(axes, sharey=True)
    plots.share_legend(fig)
    return plots.note(fig, "Figure 2, profile quick, data raters_digits100, 2 seeds. " * 2)


def one(plot, *args, size=plots.PANEL, **kw):
    fig, (ax,) = plots.panels(1, size=size)
    plots.entitle(plot(*args[:1], ax, *args[1:], **kw), COLUMNS[0])
    return plots.note(fig, "Figure 1, profile quick, data digits, 1 seed.")


def spread_rows():
    metrics = {"acc_pct": 0, "acc_sd": 30, "acc_min": -60, "acc_max": 60}
    parts = [
        long(ROWS[:2], COLUMNS, 1).assign(metric=m, value=lambda f, d=d: (f.value + d).clip(0, 100))
        for m, d in metrics.items()
    ]
    return pd.concat(parts)


def by_layer(count):
    frame = long(["first round", "best round"], COLUMNS, xs=range(count))
    return frame.assign(layer=[f"layer{r}" for r in frame["rounds"]], value=frame.value / 100)


def compared():
    ours = np.linspace(1, 99, len(ROWS))
    frame = pd.DataFrame(dict(row=ROWS, reported=50.0, reproduced=ours))
    return frame.assign(low=ours - 20, high=ours + 20)


def embedded():
    at = np.random.default_rng(0).normal(size=(40, 2))
    at[0] = 1000, -900
    frame = pd.DataFrame(dict(x=at[:, 0], y=at[:, 1], group=[*range(20)] * 2, column="seed 0"))
    said = "of 4 neighbours 30% are of the group (chance 8%), permutation p = 0.001, perplexity 5"
    return frame.assign(said=said)


def heats(n, said="Weight", **kw):
    m = np.random.default_rng(0).random((n, n)) / n
    maps = {"HeurFedAMP, Final": m, "CFL, First": np.full((n, n), 0.05), "FedAGHN, Final": 5 * m}
    said = said if isinstance(said, str) else dict.fromkeys(maps, "Test accuracy (%)")
    fig = plots.heats(maps, said=said, **kw)
    for ax in fig.axes[:3]:
        plots.entitle(ax, ax.get_title())
    return plots.note(fig, "Figure 4, profile quick, data digits, 1 seed.")


def partition():
    counts = np.random.default_rng(0).integers(0, 900, (20, 10))
    fig, axes = plots.panels(3)
    for ax, title in zip(axes, ("Dir(0.1)", "alpha = 0.5", "k = 4"), strict=True):
        plots.entitle(plots.label_distribution(counts, ax, CLASSES, 900), title)
    plots.outer_labels(axes, sharey=True)
    plots.share_legend(fig)
    return plots.note(fig, "Partition, profile quick, data digits, 1 seed.")


def forest():
    names = [f"FedAGHN, Table {i}: Dir(0.1), CIFAR-100" for i in (1, 3)]
    frame = pd.DataFrame(dict(group=np.repeat(names, 3), row=[*ROWS[:3]] * 2))
    frame = frame.assign(reported=14.0, reproduced=[-6.0, 0, 2, 2, 3, 20], full=[True, False] * 3)
    frame = frame.assign(low=frame.reproduced - 3, high=frame.reproduced + 3)
    frame = frame.assign(verdict=["behind", "no lead", "open", "open", "ahead", "ahead"])
    fig, axes = plots.panels(2, sharey=False)
    for ax in axes:
        plots.forest(frame, ax)
    plots.legend_above(fig)
    return fig


POINTS = dict(x="rounds", y="value", hue="row", line=True)
FIGURES = {
    "curves": lambda: study_like(plots.curves, long(columns=COLUMNS)),
    "curves of two rows": lambda: study_like(plots.curves, long(ROWS[:2], COLUMNS)),
    "curves, one panel": lambda: one(plots.curves, long()),
    "spread": lambda: study_like(plots.spread, spread_rows()),
    "layers": lambda: study_like(
        plots.layers, by_layer(4), hue="row", numbers=True, y="Mean CKA over pairs of clients"
    ),
    "many layers": lambda: study_like(
        plots.layers, by_layer(12), hue="row", numbers=True, y="Mean CKA over pairs of clients"
    ),
    "two points": lambda: study_like(
        plots.layers,
        long(ROWS[:2], COLUMNS, xs=(3, 15)).rename(columns={"rounds": "layer"}),
        y="Test accuracy (%)",
    ),
    "points": lambda: one(plots.points, long(), ylabel="Test accuracy (%)", **POINTS),
    "points at one place": lambda: one(
        plots.points, long(ROWS[:2], xs=(0.45956,)), ylabel="Test accuracy (%)", **POINTS
    ),
    "embedding": lambda: one(plots.embedding, embedded(), size=(3.4, 3.4)),  # as pfedhn.ipynb
    "reported": lambda: one(plots.reported, compared()),
    "ranges": lambda: one(
        plots.ranges,
        pd.DataFrame(dict(acc_min=0.0, acc_max=100.0, acc_pct=50.0, acc_worst10=9.0), index=ROWS),
    ),
    "leads": lambda: one(
        lambda a, ax: plots.leads(a, np.ones(9), ax, ("fedavg", "fedper")), np.arange(9.0)
    ),
    "partition": partition,
    "heats": lambda: heats(20),
    "heats with numbers": lambda: heats(10),
    "heats with scales and labels": lambda: heats(
        10,
        said={},
        columns=2,
        labels=[f"{a} / {b}" for a, b in itertools.pairwise([*CLASSES, "x"])],
        ends={"CFL, First": ["99.8 to 100.0"] * 10},
    ),
    "forest": forest,
}


@pytest.fixture(scope="module", params=FIGURES)
def drawn(request):
    with plt.rc_context(plots.STYLE):
        fig = FIGURES[request.param]()
        FigureCanvasAgg(fig).draw()
        yield fig


def box(artist, fig):
    return artist.get_window_extent(fig.canvas.get_renderer())


def texts(fig):
    """Titles, names of axes, tick labels, legends' texts and captions that are seen."""
    found = [
        *([fig._supxlabel] if fig._supxlabel else []),
        *(t for legend in fig.legends for t in legend.get_texts()),
    ]
    for ax in fig.axes:
        found += [ax.title, ax.xaxis.label, ax.yaxis.label]
        for axis, (low, high) in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
            low, high = sorted((low, high))
            inside = [t for t in axis.get_major_ticks() if low <= t.get_loc() <= high]
            found += [text for t in inside for text in (t.label1, t.label2)]
        if legend := ax.get_legend():
            found += legend.get_texts()
    return [t for t in found if t.get_visible() and t.get_text().strip()]


def shrunk(bounds):
    """Without half a pixel at each side: neighbours may touch."""
    return bounds.padded(-0.5)


def test_no_text_is_outside_the_canvas(drawn):
    for text in texts(drawn):
        x0, y0, x1, y1 = box(text, drawn).extents
        assert x0 >= -1 and y0 >= -1, text.get_text()
        assert x1 <= drawn.bbox.width + 1 and y1 <= drawn.bbox.height + 1, text.get_text()


def test_no_text_is_over_another_one(drawn):
    for a, b in itertools.combinations(texts(drawn), 2):
        assert not shrunk(box(a, drawn)).overlaps(shrunk(box(b, drawn))), (
            a.get_text(),
            b.get_text(),
        )


def test_no_legend_is_over_data(drawn):
    legends = [*drawn.legends, *(ax.get_legend() for ax in drawn.axes if ax.get_legend())]
    for legend, ax in itertools.product(legends, drawn.axes):
        assert not shrunk(box(legend, drawn)).overlaps(shrunk(box(ax, drawn))), ax.get_title()


def test_names_are_for_readers(drawn):
    keys = {key for key in (*plots.LABELS, *plots.DATA_LABELS) if key not in ("local", "apple")}
    for text in texts(drawn):
        assert not keys & set(re.findall(r"[\w-]+", text.get_text())), text.get_text()
        assert "K_P" not in text.get_text().replace("$K_P$", "")


def test_accuracies_stay_between_0_and_100(drawn):
    for ax in drawn.axes:
        sides = ((ax.get_xlabel(), ax.get_xlim()), (ax.get_ylabel(), ax.get_ylim()))
        for name, limits in sides:
            if "accuracy (%)" in name:
                assert 0 <= min(limits) < max(limits) <= 100
        if ax.get_ylabel() == "Test accuracy (%)" and not ax.images:
            for collection in ax.collections:
                for path in collection.get_paths() if not len(collection.get_offsets()) else ():
                    y = path.vertices[:, 1]
                    assert y.size == 0 or (0 <= y.min() and y.max() <= 100), "an interval"


# ---------------------------------------------------------------- the committed pictures


def test_no_picture_is_left_of_what_is_drawn_no_more():
    """Each committed picture is of an artefact, or is named in its paper's notebook."""
    for name in papers.PAPERS:
        cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))[
            "cells"
        ]
        code = "".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        named = set(re.findall(r'"([\w.-]+)"', code))
        if "show_partitions" in code:
            named.add("partition")
        named |= {f"{table}-published" for table in papers.paper(name).artefacts}
        pictures = [p for p in (ROOT / "figures" / name).rglob("*.png")]
        assert not [p for p in pictures if p.stem not in named], name


def test_pictures_are_small_and_look_as_they_were_drawn():
    with plt.rc_context(plots.STYLE):
        fig = FIGURES["curves"]()
        raw = io.BytesIO()
        fig.savefig(raw, dpi=144, format="png", bbox_inches="tight", pad_inches=0.04)
        whole, small = Image.open(raw), plots.compact(fig)
    shown = Image.open(io.BytesIO(small))
    assert shown.size == whole.size and len(small) < 0.5 * len(raw.getvalue())
    a, b = (np.asarray(picture.convert("RGB"), dtype=int) for picture in (whole, shown))
    assert (np.abs(a - b).max(-1) > 8).mean() <= 1e-3
