"""The picture of printed leads: what is in it, where each stands, and what is said of it."""

import itertools

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from pfl_core.analysis import plots, verdicts
from pfl_papers.compare import judged, overview
from pfl_papers.compare.judged import ONE_MODEL, PERSONAL, SIZES
from pfl_papers.evidence import committed
from pfl_papers.papers import base as papers

WORDS = [*verdicts.LEADS, verdicts.DEPENDS]


def lead(row="local", printed=3.0, verdict="ahead", **other):
    line = dict(paper="fedaghn", table="table1", column="a", row=row, kind=PERSONAL, n=2)
    line |= dict(reported=printed, reproduced=1.0, low=0.5, high=1.5, verdict=verdict, extent="")
    line |= dict(budget="fewer rounds", profile="medium", dataset="digits", dated="retrospective")
    return line | other


def leads(monkeypatch, *lines):
    monkeypatch.setattr(judged, "leads", lambda: pd.DataFrame(list(lines)))
    return overview.ran()


def test_what_was_run_is_sorted_by_what_is_printed_within_a_column(monkeypatch):
    cells = leads(
        monkeypatch,
        lead(printed=1.0, column="b"),
        lead(printed=-1.0),
        lead(printed=9.0, column="b"),
        lead(printed=2.0),
        lead(printed=50.0, n=1),
    )
    assert list(cells.column) == ["b", "b", "a", "a"], "columns in the order of the paper"
    assert list(cells.reported) == [9, 1, 2, -1]
    assert list(cells.printed) == ["above 2", "at most 2", "at most 2", "behind"]
    assert list(cells) == overview.PICTURED
    assert overview.PICTURED == [
        *("paper", "table", "column", "row", "kind", "printed", "reported", "reproduced"),
        *("low", "high", "n", "verdict", "extent", "budget", "profile", "dataset", "dated"),
    ]


PANELS = {  # kind and printed lead of a panel's leads
    "above 2": lead(),
    "at most 2": lead(printed=2.0),
    "over one model": lead(row="fedavg", printed=40.0, kind=ONE_MODEL),
}


@pytest.mark.parametrize(
    "which", [c for n in (1, 2, 3) for c in itertools.combinations(PANELS, n)], ids=" and ".join
)
def test_the_picture_has_a_panel_for_each_kind_of_lead_that_is_there(which, monkeypatch):
    fig = overview.drawn(leads(monkeypatch, *(PANELS[name] for name in which)))
    assert len(fig.axes) == len(which) and all(ax.get_xscale() == "linear" for ax in fig.axes)
    names = {t.get_text() for ax in fig.axes for t in ax.get_yticklabels()}
    one = {"FedAGHN, Table 1: a, FedAvg"} if "over one model" in which else set()
    assert names == one | ({"Local"} if set(which) - {"over one model"} else set())


def every_word(n=6):
    """Leads of all words, sizes and kinds, with names as long as they come."""
    column = "AG News, fastText, Dir(0.1)"
    return [
        lead("heurfedamp", printed, word, column=f"{column} {i}", kind=kind, budget=budget)
        for i, kind in enumerate((PERSONAL, ONE_MODEL))
        for printed in (14.0, 1.0, -1.0)
        for word in WORDS
        for budget in ("full budget", "fewer samples")
    ][: 12 * n]


def test_headings_stay_on_the_canvas_and_over_no_other(monkeypatch):
    fig = overview.drawn(leads(monkeypatch, *every_word()))
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    found = [part for line in fig.subfigs for part in line.subfigs]
    boxes = [part._suptitle.get_window_extent(canvas.get_renderer()) for part in found]
    for box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= fig.bbox.width
    for a, b in itertools.combinations(boxes, 2):
        assert not a.overlaps(b)
    assert [t.get_text() for t in fig.legends[0].get_texts()][1:-1] == WORDS


def test_the_picture_is_the_same_in_any_style(monkeypatch):
    cells = leads(monkeypatch, *PANELS.values())
    plain = plots.compact(overview.drawn(cells))
    with plt.rc_context({"font.size": 20}):
        assert plots.compact(overview.drawn(cells)) == plain


def summary(personal, one=None, chance=0.5, **nearing):
    of = {PERSONAL: personal, ONE_MODEL: one or {}}
    every = {(kind, size): of[kind].get(size, {}) for kind in of for size in SIZES}
    chances = {PERSONAL: chance, ONE_MODEL: 0.0}
    return dict(
        leads=every, nearing=nearing, chance=chances, accuracies={"inside": 2, "outside": 1}
    )


def orders(*taus, ceiling=0.9):
    every = [dict(kind=PERSONAL, tau=tau, ceiling=ceiling) for tau in taus]
    every += [dict(kind=ONE_MODEL, tau=1.0, ceiling=1.0)]
    return pd.DataFrame(every)


@pytest.mark.parametrize(
    ("counts", "taus", "said"),
    [
        (
            summary({"above 2": {"ahead": 1}}),
            [0.5],
            [
                "1 printed lead above 2 points over personal methods: 1 ahead.",
                "Order of personal methods, printed against ours, 1 column: Kendall's tau 0.50; "
                "were the printed order true, noise would leave 0.90.",
            ],
        ),
        (
            summary({"at most 2": {"no lead": 1, verdicts.DEPENDS: 1}, "behind": {"open": 1}}),
            [],
            [
                "2 printed leads of at most 2 points over personal methods: 1 no lead, 1 depends "
                "on a reading.",
                "1 printed deficit: 1 open.",
            ],
        ),
        (
            summary(
                {"above 2": {"ahead": 2, verdicts.DEPENDS: 3}},
                {"above 2": {"ahead": 2}},
                ahead=2,
                behind=1,
            ),
            [-0.5, 0.0, 1.0],
            [
                "5 printed leads above 2 points over personal methods: 2 ahead, 3 depend on a "
                "reading.",
                "2 printed leads above 2 points over one model for all: 2 ahead.",
                "Of these, still nearing 0: 2 ahead, 1 behind.",
                "Order of personal methods, printed against ours, 3 columns: Kendall's tau -0.50 "
                "to 1.00, median 0.00; were the printed order true, noise would leave 0.90 to "
                "0.90, median 0.90.",
            ],
        ),
    ],
)
def test_the_headline_counts_in_english(counts, taus, said, monkeypatch):
    monkeypatch.setattr(judged, "summary", lambda: counts)
    monkeypatch.setattr(judged, "orders", lambda: orders(*taus))
    *found, numbers = overview.headline()
    assert [*found, *overview.order()] == said
    assert numbers == "3 published accuracies beside what our runs predict: 2 inside, 1 outside."


def test_what_chance_gives_is_said_of_the_kinds_that_are_there():
    one = {"above 2": {"ahead": 2}}
    for other, told in ((None, ""), (one, " and 0.0 of the 2 over one model for all")):
        counts = summary({"above 2": {"ahead": 2, verdicts.DEPENDS: 3}}, other)
        assert (
            f"Were all methods equal, chance would put 0.5 of the 5 over personal methods{told} "
            "ahead, and as many behind."
        ) in overview._by_chance(counts)
    assert overview._by_chance(summary({})) == []


def test_headings_have_the_counts_of_the_headline(monkeypatch):
    cells = leads(monkeypatch, lead(printed=1.0), lead(printed=-1.0, verdict="open"))
    fig = overview.drawn(cells)
    (said,) = [part._suptitle.get_text() for line in fig.subfigs for part in line.subfigs]
    assert said == (
        "1 printed lead of at most 2 points over personal methods: 1 ahead\n"
        "1 printed deficit: 1 open"
    )


def test_a_verdict_says_that_it_is_for_the_authors_clients():
    fixed = {}
    for name in papers.PAPERS:
        for part in committed.parts(name).values():
            heads = part.rows().drop_duplicates(["artefact", "column"])
            for run, artefact, column in heads[["run", "artefact", "column"]].to_numpy():
                drawn = "numpy_seed" in committed.experiment(run).partition_args
                fixed[name, artefact, column, part.profile] = drawn
    seen = set()
    for c in pd.concat([judged.accuracies(), judged.leads()]).itertuples():
        said = papers.paper(c.paper).clients
        own = fixed[c.paper, c.table, c.setting, c.profile]
        assert (bool(said) and f"; {said}" in c.why) == (bool(said) and own)
        seen.add((c.paper, own))
    assert {("fedaghn", True), ("flayer", True), ("flayer", False), ("pfedhn", False)} <= seen
