"""Figures of weights, layers, points and reported numbers: what they show and refuse."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_rgb

from pfl_core.analysis import plots, verdicts
from pfl_core.analysis.noise import Column
from pfl_core.analysis.plots import dots


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


@pytest.fixture
def ax():
    return plt.subplots()[1]


def legend(ax):
    return [t.get_text() for t in ax.get_legend().get_texts()]


def ticks(axis):
    return [t.get_text() for t in axis.get_ticklabels()]


# ---------------------------------------------------------------- heat maps


def panels_of(fig):
    """The heat maps of a figure, and its one colour bar."""
    *maps, bar = fig.axes
    return maps, bar


def test_heats_share_one_scale_and_one_bar():
    one, two = np.array([[0.2, 0.8], [0.5, 0.5]]), np.array([[-1.0, 2.0], [0.0, np.nan]])
    fig = plots.heats({"conv1": one, "fc": two, "out": one}, columns=2, said="Cosine")
    maps, bar = panels_of(fig)
    assert [m.get_title() for m in maps] == ["conv1", "fc", "out"] and bar.get_ylabel() == "Cosine"
    assert {m.collections[0].get_clim() for m in maps} == {(-1, 2)} and {
        m.get_aspect() for m in maps
    } == {1}
    for m, matrix in zip(maps, (one, two, one), strict=True):
        got = np.ma.filled(m.collections[0].get_array(), np.nan).reshape(2, 2)
        np.testing.assert_array_equal(got, matrix)
    assert [m.get_ylabel() for m in maps] == ["Receiving client", "", "Receiving client"]
    assert [m.get_xlabel() for m in maps] == ["", "Source client", "Source client"], (
        "below it there is none"
    )


@pytest.mark.parametrize(
    ("kw", "clim", "extend"),
    [
        ({}, (0, 10), "neither"),
        (dict(vmax=20), (0, 20), "neither"),
        (dict(vmax=5), (0, 5), "max"),
        (dict(vmin=2), (2, 10), "min"),
        (dict(vmin=1, vmax=3), (1, 3), "both"),
    ],
)
def test_heats_end_where_they_are_told(kw, clim, extend):
    maps, _ = panels_of(plots.heats({"a": np.arange(11.0)[None]}, **kw))
    mesh = maps[0].collections[0]
    assert mesh.get_clim() == clim and mesh.colorbar.extend == extend


@pytest.mark.parametrize(("n", "shown"), [(3, 3), (10, 10), (20, 4), (100, 5), (35, 7)])
def test_heats_name_up_to_ten_clients(n, shown):
    (ax,), _ = panels_of(plots.heats({"a": np.zeros((n, n))}, x="giver", y="taker"))
    step = {3: 1, 10: 1, 20: 5, 100: 20, 35: 5}[n]
    assert (
        ticks(ax.yaxis) == ticks(ax.xaxis) == [str(i) for i in range(0, n, step)]
        and len(ticks(ax.xaxis)) == shown
    )
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("giver", "taker")


def test_a_flat_map_has_a_scale_of_its_own():
    mixed, flat, equal = np.eye(3), np.full((3, 3), 0.2), np.full((3, 3), 0.1)
    flat[0, 0] = 0.23
    (one, two, three), _ = panels_of(plots.heats({"x": mixed, "y": flat, "z": equal}))
    assert [m.get_title() for m in (one, two, three)] == ["x", "y\ngrey: 0.20–0.23", "z\nall 0.1"]
    clims = [m.collections[0].get_clim() for m in (one, two, three)]
    assert clims == [(0, 1), (0.2, 0.23), (0, 1)]
    # What is as bright as another map's is as large.
    assert [m.collections[0].get_cmap().name for m in (one, two, three)] == [
        "viridis",
        "Greys",
        "viridis",
    ]
    (_, none), _ = panels_of(plots.heats({"x": mixed, "y": mixed * np.nan}))
    assert none.get_title() == "y\nno numbers"


def test_maps_of_different_things_have_a_bar_each():
    said = {"a": "Test accuracy (%)", "b": "Place in the range"}
    *maps, first, second = plots.heats({"a": 90 * np.eye(2), "b": np.eye(2)}, said=said).axes
    assert [first.get_ylabel(), second.get_ylabel()] == list(said.values())
    assert [m.collections[0].get_clim() for m in maps] == [(0, 90), (0, 1)]
    one, *_ = plots.heats({"a": np.full((2, 2), np.nan), "b": np.eye(2)}, said=said).axes
    assert one.collections[0].get_clim() == (0, 1)  # nothing was measured, and nothing warns


@pytest.mark.parametrize(("shape", "outlined"), [((3, 3), 3), ((20, 20), 0), ((2, 3), 0)])
def test_the_diagonal_of_a_map_with_numbers_is_outlined(shape, outlined):
    (ax,), _ = panels_of(plots.heats({"a": np.arange(np.prod(shape)).reshape(shape)}))
    cells = [path for marks in ax.collections[1:] for path in marks.get_paths()]
    assert [tuple(c.get_extents().p0) for c in cells] == [(k, k) for k in range(outlined)]


def test_rows_have_words_at_their_right_end():
    said = {"a": "Accuracy (%)", "b": "Place in the row's range"}
    fig = plots.heats(
        {"a": np.eye(2), "b": np.eye(2)}, said=said, ends={"b": ["80 to 90", "7 to 9"]}
    )
    one, two, *_ = fig.axes
    assert [t.get_text() for t in two.texts[-2:]] == ["80 to 90", "7 to 9"]
    assert [t.get_text() for t in one.texts] == ["1", "0", "0", "1"]


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e3, 1e7])
def test_a_flat_map_says_its_ends_whatever_their_size(size):
    flat = np.array([[0.5, 0.5], [0.5, 0.53]])
    *_, ax, _ = plots.heats({"x": size * np.eye(2), "y": size * flat}).axes
    low, high = map(float, ax.get_title().split("grey: ")[1].split("–"))
    assert low < high and np.allclose((low, high), (0.5 * size, 0.53 * size), rtol=0.02)


def test_a_number_that_rounds_to_0_has_no_sign():
    (ax,), _ = panels_of(plots.heats({"a": np.array([[-0.001, -0.5], [0.001, 1.0]])}))
    assert [t.get_text() for t in ax.texts] == ["0", "-.50", "0", "1"]


@pytest.mark.parametrize(
    ("ends", "said"),
    [({"b": ["1", "2"]}, "map 'b'"), ({"a": ["1"]}, "1 labels for the 2 rows of 'a'")],
)
def test_words_at_the_end_of_no_row_are_refused(ends, said):
    with pytest.raises(ValueError, match=said):
        plots.heats({"a": np.eye(2)}, ends=ends)


def test_heats_take_labels():
    maps, _ = panels_of(
        plots.heats({"square": np.eye(3), "wide": np.zeros((3, 4))}, labels=[*"xyz"])
    )
    assert [ticks(m.yaxis) for m in maps] == [[*"xyz"]] * 2
    assert [ticks(m.xaxis) for m in maps] == [[*"xyz"], [*"0123"]]
    with pytest.raises(
        ValueError, match="2 labels for the 3 rows of 'square'; give one for each row"
    ):
        plots.heats({"square": np.eye(3)}, labels=[*"xy"])


def test_heats_of_nothing():
    with pytest.raises(ValueError, match="0 panels: there is nothing to draw"):
        plots.heats({})


# ---------------------------------------------------------------- layers


def cka(stages=("initial",)):
    """value: 1 - layer/10 - method/100 - stage/2 +- 1/1000 over two seeds; layers in no alphabetic order."""
    cells = [
        dict(
            row=m, layer=name, stage=s, seed=k, value=1 - i / 10 - j / 100 - q / 2 + (k - 0.5) / 500
        )
        for j, m in enumerate(("flayer", "fedavg"))
        for i, name in enumerate(("stem", "conv", "logits", "a"))
        for q, s in enumerate(stages)
        for k in range(2)
    ]
    return pd.DataFrame(cells)


def lines(ax):
    return [line for line in ax.lines if len(line.get_xdata())]


def test_layers_go_in_the_model_s_order(ax):
    assert plots.layers(cka().drop(columns="stage"), ax, y="Linear CKA") is ax
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("", "Linear CKA") and legend(ax) == [
        "FLAYER",
        "FedAvg",
    ]
    assert (
        ticks(ax.xaxis) == ["stem", "conv", "logits", "a"]
        and ax.xaxis.get_ticklabels()[0].get_rotation() == 0
    )
    got = lines(ax)
    np.testing.assert_allclose(
        [line.get_ydata() for line in got], [[1, 0.9, 0.8, 0.7], [0.99, 0.89, 0.79, 0.69]]
    )
    assert [to_rgb(line.get_color()) for line in got] == [
        to_rgb(plots.PALETTE[m]) for m in ("flayer", "fedavg")
    ]
    assert [line.get_marker() for line in got] == ["o", "s"]
    assert [line.get_linestyle() for line in got] == ["-", "--"]
    (low, high) = ax.collections[0].get_segments()[1][:, 1]
    seeds = np.array([[0.899, 0.901], [0.889, 0.891]])
    found = Column(pd.DataFrame(seeds, ["a", "b"])).level("a")
    np.testing.assert_allclose(
        (low, high), (found.low, found.high), err_msg="the interval of a cell"
    )


def test_layers_may_be_numbers(ax):
    plots.layers(pd.DataFrame(dict(row="x", layer=[3, 1, 2], value=[5.0, 6, 7])), ax)
    assert ticks(ax.xaxis) == ["3", "1", "2"] and lines(ax)[0].get_xydata().tolist() == [
        [0, 5],
        [1, 6],
        [2, 7],
    ]


def test_one_or_two_layers_are_dots(ax):
    plots.layers(cka()[lambda f: f.layer.isin(["stem", "a"])], ax)
    assert {line.get_linestyle() for line in lines(ax)} == {"None"}
    assert len(ax.collections) == 2, "with intervals"


def test_layers_print_their_means(ax):
    plots.layers(
        cka(("initial", "best"))[lambda f: f.row == "flayer"], ax, hue="stage", numbers=True
    )
    assert sorted(t.get_text() for t in ax.texts) == sorted(
        f"{1 - i / 10 - q / 2:.2f}" for i in range(4) for q in range(2)
    )
    many = pd.DataFrame(dict(row="x", layer=range(7), value=0.5))
    other = plt.figure().subplots()
    plots.layers(many, other, numbers=True)
    assert not other.texts and other.get_xlabel() == "Mean: x 0.50"


def test_layers_with_stages_as_hue(ax):
    plots.layers(cka(("initial", "best")), ax, hue="stage")
    assert legend(ax) == ["initial", "best"] and len(lines(ax)) == 2


# ---------------------------------------------------------------- points


def test_points(ax):
    frame = pd.DataFrame(dict(x=[0.0, 1, 2, 3], y=[1.0, 3, 5, np.nan]))
    assert plots.points(frame, ax) is ax
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_legend()) == ("x", "y", None) and not ax.lines
    assert ax.collections[0].get_offsets().tolist() == [[0, 1], [1, 3], [2, 5]]
    plots.points(frame, ax, xlabel="TV", ylabel="Accuracy", line=True)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("TV", "Accuracy")
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[0, 1], [2, 5]], atol=1e-12)


def test_points_by_hue(ax):
    frame = pd.DataFrame(
        dict(
            tv=[0, 1, 2, 0, 1, 2, 0, 1],
            acc=[0, 3, 3, 9, 7, 5, 4, 4],
            row=["fedper"] * 3 + ["fedprox"] * 3 + ["one"] * 2,
        )
    )
    plots.points(frame, ax, "tv", "acc", hue="row", line=True)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("tv", "acc") and legend(ax) == [
        "FedPer",
        "FedProx",
        "one",
    ]
    assert [c.get_offsets().tolist() for c in ax.collections][1:] == [
        [[0, 9], [1, 7], [2, 5]],
        [[0, 4], [1, 4]],
    ]
    colour = plots.colours(["fedper", "fedprox", "one"])
    assert [to_rgb(c.get_facecolor()[0]) for c in ax.collections] == [
        to_rgb(c) for c in colour.values()
    ]
    np.testing.assert_allclose(
        [line.get_ydata() for line in ax.lines],
        [[0.5, 3.5], [9, 5]],
        err_msg="two points always lie on a line",
    )
    assert [line.get_linestyle() for line in ax.lines] == ["-", "--"]


# ---------------------------------------------------------------- embeddings


@pytest.mark.parametrize(("groups", "named"), [(3, True), (20, True), (21, False)])
def test_embedding(ax, groups, named):
    frame = pd.DataFrame(
        dict(x=range(2 * groups), y=range(0, 4 * groups, 2), group=[*range(groups)] * 2)
    )
    assert plots.embedding(frame, ax) is ax
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("t-SNE 1", "t-SNE 2") and ax.get_aspect() == 1
    assert len(ax.get_xticks()) == len(ax.get_yticks()) == 0
    assert (ax.get_legend() is not None) == named and len(ax.collections) == groups
    if named:
        assert legend(ax) == [str(g) for g in range(groups)]
    at = ax.collections[1].get_offsets().tolist()
    assert at == [[1, 2], [1 + groups, 2 + 2 * groups]]
    looks = {(to_rgb(c.get_facecolor()[0]), str(c.get_paths()[0])) for c in ax.collections}
    assert len(looks) == groups, "no two groups look alike"
    assert len({shape for _, shape in looks}) == min(4, groups)


def test_far_outliers_of_an_embedding_are_at_the_edge_and_counted(ax):
    rng = np.random.default_rng(0)
    at = rng.normal(size=(40, 2))
    at[:2] = [-984, 0], [3, 1154]
    frame = pd.DataFrame(dict(x=at[:, 0], y=at[:, 1], group=[*range(10)] * 4, said="p = 0.01"))
    plots.embedding(frame, ax)
    assert max(map(abs, (*ax.get_xlim(), *ax.get_ylim()))) < 5, "the others fill the panel"
    below = ax.get_xlabel().split("\n")
    assert below == ["t-SNE 1", "2 outliers in a ring at the edge", "p = 0.01"]
    rings = ax.collections[-1].get_offsets()
    assert len(rings) == 2
    assert all(ax.get_xlim()[0] <= x <= ax.get_xlim()[1] for x, _ in rings)
    assert all(ax.get_ylim()[0] <= y <= ax.get_ylim()[1] for _, y in rings)


def test_embedding_takes_names(ax):
    plots.embedding(pd.DataFrame(dict(x=[0, 1], y=[0, 1], group=["trees", "fish"])), ax)
    assert legend(ax) == ["trees", "fish"]


# ---------------------------------------------------------------- reported


def test_reported(ax):
    frame = pd.DataFrame(
        dict(
            row=["fedper", "x", "fedper", "local"],
            reported=[80, 60, 80, np.nan],
            reproduced=[70.0, 62, 72, 50],
        )
    )
    assert plots.reported(frame, ax) is ax
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Test accuracy (%)", "")
    assert ticks(ax.yaxis) == ["FedPer", "x", "Local"] and ax.yaxis_inverted()
    assert legend(ax) == ["Published", "Here"]
    np.testing.assert_array_equal(
        [line.get_xdata() for line in ax.lines[:3]], [[80, 71], [60, 62], [np.nan, 50]]
    )
    assert [line.get_ydata().tolist() for line in ax.lines[:3]] == [[0, 0], [1, 1], [2, 2]]
    here, paper = ax.collections[0:6:2], ax.collections[1:6:2]
    assert [c.get_offsets().tolist() for c in here] == [[[71, 0]], [[62, 1]], [[50, 2]]]
    assert [c.get_offsets().tolist()[0] for c in paper[:2]] == [
        [80, 0],
        [60, 1],
    ] and np.ma.is_masked(paper[2].get_offsets())
    want = plots.colours(["fedper", "x", "local"])
    assert [to_rgb(c.get_facecolor()[0]) for c in here] == [to_rgb(c) for c in want.values()]
    assert {to_rgb(c.get_edgecolor()[0]) for c in paper} == {to_rgb("0.35")} and not len(
        paper[0].get_facecolor()
    )


def test_ranges_from_worst_to_best_client(ax):
    frame = pd.DataFrame(
        {"acc_min": [10.0, 30], "acc_max": [90.0, 80], "acc_pct": [50.0, 60]},
        index=["fedavg", "fedper"],
    )
    clients = pd.DataFrame({"row": "fedper", "acc_pct": [30.0, 50, 80]})
    plots.ranges(frame, ax, clients)
    assert [ln.get_xdata().tolist() for ln in ax.lines] == [[10.0, 90.0], [30.0, 80.0]]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["FedAvg", "FedPer"]
    ticks = [c.get_offsets()[:, 0].tolist() for c in ax.collections if len(c.get_offsets()) == 3]
    assert ticks == [[30.0, 50.0, 80.0]]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["Mean"]


def test_leads_are_sorted_and_in_the_colour_of_who_is_ahead(ax):
    plots.leads(np.array([10.0, 20, 30]), np.array([15.0, 10, 30]), ax, ("fedavg", "fedper"))
    assert [p.get_height() for p in ax.patches] == [-10, 0, 5]
    colours = {n: to_rgb(c) for n, c in plots.colours(["fedavg", "fedper"]).items()}
    assert ax.patches[0].get_facecolor()[:3] == pytest.approx(colours["fedavg"])
    assert ax.patches[2].get_facecolor()[:3] == pytest.approx(colours["fedper"])


def forest_frame(**changes):
    cells = dict(
        group=["Table 1", "Table 1", "Table 3", ""],
        row=["local", "ditto", "local", "fedavg"],
        reported=[9.0, 2.0, 5.0, 40.0],
        reproduced=[1.0, -3.0, 0.5, 30.0],
        low=[0.5, -4.0, float("nan"), 28.0],
        high=[1.5, -2.0, float("nan"), 32.0],
        verdict=["ahead", "behind", "open", "depends on reading"],
        full=[True, False, True, True],
    )
    return pd.DataFrame(cells | changes)


def marks(ax):
    """{(x, y): what is drawn there} of a forest."""
    found = [c for c in ax.collections if isinstance(c, PathCollection) and len(c.get_offsets())]
    return {tuple(c.get_offsets()[0]): c for c in found}


def test_a_forest_has_a_line_a_lead_with_what_is_printed(ax):
    plots.forest(forest_frame(), ax)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["Local", "Ditto", "Local", "FedAvg"]
    assert [t.get_text() for t in ax.texts] == ["Table 1", "Table 3"]  # none for ""
    at = ax.get_yticks()
    assert sorted(at) == list(at) and len(set(at)) == 4 and ax.yaxis_inverted()
    drawn = marks(ax)
    for y, lead in zip(at, forest_frame().itertuples(), strict=True):
        assert {(lead.reported, y), (lead.reproduced, y)} <= set(drawn)
    bars = [
        segment[:, 0].tolist()
        for c in ax.collections
        if isinstance(c, LineCollection)
        for segment in c.get_segments()
        if len(segment)
    ]
    assert [[0.5, 1.5], [-4, -2], [28, 32]] == bars
    assert ax.get_xscale() == "linear"


def test_a_forest_says_verdict_and_budget_in_colour_and_in_shape(ax):
    plots.forest(forest_frame(), ax)
    drawn, at = marks(ax), ax.get_yticks()
    ahead, behind, still, depends = (
        drawn[x, y] for x, y in zip(forest_frame().reproduced, at, strict=True)
    )
    for mark, word in zip((ahead, behind, still, depends), forest_frame().verdict, strict=True):
        edge = mark.get_edgecolor()[0][:3]
        assert edge == pytest.approx(to_rgb(dots.WORDS[word].colour)), word
        hollow = (mark.get_facecolor()[0][:3] == 1).all()
        assert hollow == (word in ("open", "depends on reading"))
    assert ahead.get_facecolor()[0][:3] == pytest.approx(ahead.get_edgecolor()[0][:3])
    pale, full = behind.get_facecolor()[0][:3], behind.get_edgecolor()[0][:3]
    assert (pale > full).all() and pale.max() < 1
    entries = ax.get_legend_handles_labels()[1]
    words = list(forest_frame().verdict)
    assert entries == ["printed", *words, "pale: fewer rounds or samples"]


def test_a_forest_names_only_what_it_draws_in_the_order_of_words(ax):
    words = pd.Categorical(["no lead"] * 4, ["ahead", "no lead"])
    plots.forest(forest_frame(verdict=words, full=True), ax)
    assert ax.get_legend_handles_labels()[1] == ["printed", "ahead", "no lead"]


def test_every_word_of_a_lead_has_a_mark_of_its_own():
    assert list(dots.WORDS) == [*verdicts.LEADS, verdicts.DEPENDS]
    assert len({look.mark for look in dots.WORDS.values()}) == len(dots.WORDS)
    assert len({look.colour for look in dots.WORDS.values()}) == len(dots.WORDS)


def test_one_legend_stands_above_all_panels():
    fig, axes = plots.panels(2)
    for ax, word in zip(axes, ("ahead", "no lead"), strict=True):
        plots.forest(forest_frame(verdict=word, full=True), ax)
    plots.legend_above(fig)
    (legend,) = fig.legends
    assert [t.get_text() for t in legend.get_texts()] == ["printed", "ahead", "no lead"]
