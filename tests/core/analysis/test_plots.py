"""What figures show: labels, lines, colours that belong to methods, and files that repeat."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb

from pfl_core.analysis import plots
from pfl_core.analysis.noise import Column
from pfl_core.methods.base import METHODS

SAFE = [to_rgb(c) for c in plots.COLOURS.values()]
SPREAD = {"acc_pct": 0.0, "acc_sd": 5.0, "acc_min": -10.0, "acc_max": 12.0}


@pytest.fixture
def ax():
    fig, ax = plt.subplots()
    yield ax
    plt.close("all")


def rows(names=("fedavg", "fedper"), seeds=(0, 1), rounds=(0, 4, 8), metrics=("acc_pct",)):
    """Accuracies 10 i + round + 2 seed of the i-th name, and what SPREAD adds for other metrics."""
    cells = itertools.product(enumerate(names), seeds, rounds, metrics)

    def value(i, seed, round, metric):
        return SPREAD[metric] + (metric != "acc_sd") * (10.0 * i + round + 2 * seed)

    return pd.DataFrame(
        [
            dict(row=n, seed=s, rounds=r, metric=m, value=value(i, s, r, m))
            for (i, n), s, r, m in cells
        ]
    )


def legend(ax):
    return [t.get_text() for t in ax.get_legend().get_texts()]


def drawn(ax):
    """{label: colour} of the legend's lines or patches."""
    handles, names = ax.get_legend_handles_labels()
    found = [h.get_color() if hasattr(h, "get_color") else h.get_facecolor() for h in handles]
    return dict(zip(names, map(to_rgb, found), strict=True))


# ---------------------------------------------------------------- colours


def test_every_method_has_a_name_a_colour_and_a_line_of_its_own():
    assert (
        not set(METHODS)
        - set(plots.LABELS)
        - {n for n, c in METHODS.items() if not c.__module__.startswith("pfl_core.")}
    )
    assert set(plots.PALETTE) == set(plots.DASHES) == set(plots.LABELS)
    assert {to_rgb(c) for c in plots.PALETTE.values()} <= set(SAFE)
    assert len(set(plots.LABELS.values())) == len(plots.LABELS)
    assert len({(to_rgb(plots.PALETTE[m]), plots.DASHES[m]) for m in plots.LABELS}) == len(
        plots.LABELS
    )
    own = ["fedper", "pfedhn", "pfedla", "flayer", "fedaghn"]
    assert len({to_rgb(plots.PALETTE[m]) for m in own}) == len(own) and {
        plots.DASHES[m] for m in own
    } == {""}
    dashed = plots.DASHES["fedavg"]
    assert [m for m in plots.LABELS if plots.DASHES[m] == dashed] == ["fedavg"]


def lab(rgb):
    """CIE L*a*b* (D65) of colours in linear light (3,)."""
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ rgb / [0.9505, 1, 1.089]
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


# What protanopes see, in linear light: Machado, Oliveira, Fernandes 2009, severity 1.
PROTANOPIA = np.array(
    [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ]
)


def linear(colour):
    c = np.array(to_rgb(colour))
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def apart(one, other):
    """Whether two colours are told apart by protanopes, and by their lightness alone."""
    a, b = linear(one), linear(other)
    seen = lab(np.clip(PROTANOPIA @ a, 0, 1)) - lab(np.clip(PROTANOPIA @ b, 0, 1))
    return np.linalg.norm(seen) >= 20 and abs(lab(a)[0] - lab(b)[0]) >= 10


def test_any_two_methods_differ_for_protanopes_and_in_grey():
    assert not apart("#12936a", "#a08c60"), "green and tan are alike: the measure sees it"
    for one, other in itertools.combinations(plots.LOOKS.values(), 2):
        assert apart(one.colour, other.colour) or (one.dash, one.mark) != (other.dash, other.mark)
    for one, other in itertools.combinations(plots.COLOURS.values(), 2):
        assert apart(one, other)
    contrast = [1.05 / (linear(c) @ [0.2126, 0.7152, 0.0722] + 0.05) for c in SAFE]
    assert min(contrast) > 2.3, "against white"


def test_a_variant_keeps_its_methods_look_where_it_is_free():
    alone = plots.looks(["fedavg, lr 0.1", "fedper"])
    assert alone["fedavg, lr 0.1"] == plots.LOOKS["fedavg"]
    both = plots.looks(["fedavg, lr 0.1", "fedavg"])
    assert both["fedavg"] == plots.LOOKS["fedavg"]
    assert both["fedavg, lr 0.1"].colour == plots.PALETTE["fedavg"]
    assert both["fedavg, lr 0.1"].dash != plots.DASHES["fedavg"]
    many = plots.looks([f"name {i}" for i in range(30)])
    assert len(set(many.values())) == 30


def test_colours_stay_with_the_method():
    for names in (
        ["fedper"],
        ["local", "fedper"],
        ["fedper", "x", "local"],
        ["x", "y", "z", "fedper"],
    ):
        assert plots.colours(names)["fedper"] == plots.PALETTE["fedper"]
        assert plots.dashes(names)["fedper"] == plots.DASHES["fedper"]
        assert list(plots.colours(names)) == list(plots.dashes(names)) == names


def test_other_names_take_colours_that_no_method_here_has():
    names = ["fedavg", "fedper", *"abcd"]
    assert {to_rgb(c) for c in plots.colours(names).values()} == set(SAFE)
    many = plots.colours([*"abcdefghijklmno"])
    assert {to_rgb(c) for c in list(many.values())[:6]} == set(SAFE) and many["g"] == many["a"]
    assert plots.dashes([*"abcdefghijklmno"])["g"] != plots.dashes([*"abcdefghijklmno"])["a"]
    assert set(plots.colours(list(plots.LABELS) + ["x"])) == {*plots.LABELS, "x"}, (
        "no colour is free"
    )


def test_label():
    assert (plots.label("fedper"), plots.label("K_P = 2"), plots.label("lgfedavg")) == (
        "FedPer",
        "K_P = 2",
        "LG-FedAvg",
    )


def test_words_of_figures_have_no_keys():
    assert plots.in_words("heurpfedla, alpha = 1") == "HeurpFedLA, α = 1"
    assert plots.in_words("on raters_digits100") == "on pairs of digits with synthetic raters"
    assert plots.in_words("cifar100, cifar10") == "CIFAR-100, CIFAR-10"
    assert plots.in_words("K_P = 2") == "$K_P$ = 2" and plots.in_words("my_cifar10") == "my_cifar10"


# ---------------------------------------------------------------- panels


@pytest.mark.parametrize(
    ("n", "columns", "grid"),
    [(1, 3, (1, 1)), (3, 3, (1, 3)), (4, 3, (2, 2)), (5, 4, (2, 3)), (2, 1, (2, 1))],
)
def test_panels(n, columns, grid):
    fig, axes = plots.panels(n, columns)
    shape = axes[0].get_gridspec()
    assert len(axes) == len(fig.axes) == n and (shape.nrows, shape.ncols) == grid
    np.testing.assert_allclose(
        fig.get_size_inches(), [plots.PANEL[0] * grid[1], plots.PANEL[1] * grid[0]]
    )
    axes[0].set_ylim(3, 7)
    assert all(a.get_ylim() == (3, 7) for a in axes), "the y axis is shared"
    plt.close(fig)
    fig, axes = plots.panels(2, sharey=False, size=(1, 1))
    axes[0].set_ylim(3, 7)
    assert axes[1].get_ylim() != (3, 7)
    plt.close(fig)


def test_no_panel_is_an_error():
    with pytest.raises(ValueError, match="0 panels: there is nothing to draw"):
        plots.panels(0)


# ---------------------------------------------------------------- figures


def test_curves(ax):
    assert plots.curves(rows(), ax) is ax
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Communication round", "Test accuracy (%)")
    assert legend(ax) == ["FedAvg", "FedPer"] and ax.get_legend().get_title().get_text() == ""
    assert drawn(ax) == {plots.label(m): to_rgb(plots.PALETTE[m]) for m in ("fedavg", "fedper")}
    lines = [line for line in ax.lines if len(line.get_xdata())]
    assert [line.get_xydata().tolist() for line in lines] == [
        [[0, 1], [4, 5], [8, 9]],
        [[0, 11], [4, 15], [8, 19]],
    ]
    assert [line.get_linestyle() for line in lines] == ["--", "-"]
    low, high = (f(ax.collections[0].get_paths()[0].vertices[:, 1]) for f in (min, max))
    found = Column(pd.DataFrame([[8.0, 10], [18, 20]], ["a", "b"])).level("a")
    assert low == 0 > 1 - (found.high - 9), "never below 0 %"
    assert high == pytest.approx(found.high), "the interval of a cell"


def test_five_curves_have_bars_at_their_ends(ax):
    plots.curves(rows([*"abcde"]), ax)
    bars = [c for c in ax.collections if isinstance(c, LineCollection)]
    assert len(bars) == 5 == len(ax.collections)
    assert {bar.get_segments()[0][0][0] for bar in bars} == {8}
    plots.curves(rows(seeds=(0,)), ax)
    assert len(ax.collections) == 5, "one seed has no interval"


def test_curves_have_the_level_of_the_most_common_label_and_published_numbers(ax):
    frame = rows(seeds=(0,)).assign(level=25.0, published=np.nan)
    frame.loc[frame.row == "fedper", "published"] = 15.5
    plots.curves(frame, ax)
    assert legend(ax) == ["FedAvg", "FedPer", "Most common label", "Published"]
    lines = {line.get_label(): line for line in ax.lines}
    assert set(lines["Most common label"].get_ydata()) == {25}
    assert lines["Published"].get_xydata().tolist() == [[8, 15.5]]
    assert lines["Published"].get_markerfacecolor() == "white"


def test_curves_of_baselines_and_of_other_rows(ax):
    plots.curves(
        rows(("fedprox", "K_P = 1", "fedper", "K_P = 2"), seeds=(0,)).rename(
            columns={"row": "who"}
        ),
        ax,
        "who",
        "Loss",
    )
    assert (
        legend(ax) == ["FedProx", "$K_P$ = 1", "FedPer", "$K_P$ = 2"] and ax.get_ylabel() == "Loss"
    )
    lines = {n: h for h, n in zip(*ax.get_legend_handles_labels(), strict=True)}
    assert len(set(drawn(ax).values())) == 4
    styles = [lines[n].get_linestyle() for n in ("FedPer", "FedProx", "$K_P$ = 1", "$K_P$ = 2")]
    assert styles == ["-", "--", "-", "--"], "-- is any that has gaps"


def test_a_colour_does_not_depend_on_who_else_is_drawn(ax):
    plots.curves(rows(("fedper",)), ax)
    alone = drawn(ax)["FedPer"]
    ax.clear()
    plots.curves(rows(("local", "fedavg", "fedper")), ax)
    assert drawn(ax)["FedPer"] == alone == to_rgb(plots.PALETTE["fedper"])


def test_spread(ax):
    assert plots.spread(rows(metrics=SPREAD), ax) is ax
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Communication round", "Test accuracy (%)")
    assert legend(ax) == ["FedAvg", "FedPer", "Worst and best client"]
    assert drawn(ax) | {} == {
        plots.label(m): to_rgb(plots.PALETTE[m]) for m in ("fedavg", "fedper")
    } | {"Worst and best client": (0.4, 0.4, 0.4)}
    middle, worst, best = (line.get_ydata().tolist() for line in ax.lines[:3])
    assert (middle, worst, best) == ([1, 5, 9], [0, 0, 0], [13, 17, 21]), "none is below 0 %"
    assert [line.get_linestyle() for line in ax.lines[:3]] == ["--", ":", ":"]
    assert len(ax.lines) == 7
    bands = [b.get_paths()[0].vertices[:, 1] for b in ax.collections]
    assert [(b.min(), b.max()) for b in bands] == [(0, 14), (6, 24)]


def test_label_distribution(ax):
    counts = np.array([[0, 20, 5], [10, 0, 0]])
    assert plots.label_distribution(counts, ax, ["cat", "dog", "owl"]) is ax
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Client", "Class")
    assert legend(ax) == ["20", "5", "1"] and ax.get_legend().get_title().get_text() == "Samples"
    dots = ax.collections[0]
    assert dots.get_offsets().tolist() == [
        [0, 1],
        [0, 2],
        [1, 0],
    ] and dots.get_sizes().tolist() == [121, 121 / 4, 121 / 2], "areas are as counts"
    assert to_rgb(dots.get_facecolor()[0]) == to_rgb(plots.COLOURS["blue"])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["cat", "dog", "owl"]
    assert ax.get_xlim() == (-0.7, 1.7) and ax.get_ylim() == (-0.7, 2.7)
    assert plots.label_distribution(np.zeros((2, 2), int), ax) is ax, "nobody holds anything"
    ax.clear()
    plots.label_distribution(counts, ax, most=80)
    assert ax.collections[0].get_sizes().tolist() == [121 / 4, 121 / 16, 121 / 8]
    assert legend(ax) == ["80", "20", "4"], "panels that are compared have one scale"


def test_heat(ax):
    matrix = np.array([[0.0, 0.5, 1.0], [1.0, 0.2, 0.0]])
    assert plots.heat(matrix, ax, "x", vmin=0, vmax=2, annot=True, cbar=False) is ax
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("x", "Receiving client")
    mesh = ax.collections[0]
    np.testing.assert_array_equal(np.asarray(mesh.get_array()).reshape(2, 3), matrix)
    assert mesh.get_clim() == (0, 2) and [t.get_text() for t in ax.texts][:3] == ["0", "0.5", "1"]
    other = plt.figure().subplots()
    plots.heat(np.array([[0.0, 0.5], [np.nan, 1]]), other)
    assert [t.get_text() for t in other.texts if t.get_text()] == ["0", ".50", "1"]
    plots.heat(np.eye(11), wide := plt.figure().subplots())
    assert not wide.texts, "numbers up to 10 x 10"
    assert ax.yaxis_inverted(), "rows go downwards"


def test_note(ax):
    assert plots.note(ax.figure, "profile quick") is ax.figure
    assert ax.figure.get_supxlabel() == "profile quick"


# ---------------------------------------------------------------- files


def test_save_writes_a_picture_and_its_numbers_twice_alike(tmp_path):
    frame, kinds = rows().assign(value=lambda f: f.value / 3), ("png", "csv", "pdf")
    for folder in ("one", "two"):
        fig, (ax,) = plots.panels(1)
        plots.curves(frame, ax)
        assert (
            plots.save(fig, frame, tmp_path / folder / "deep" / "fig2")
            == tmp_path / folder / "deep" / "fig2.png"
        )
        plt.close(fig)
    one, two = (
        [(tmp_path / f / "deep" / f"fig2.{k}").read_bytes() for k in kinds] for f in ("one", "two")
    )
    assert one == two and one[0].startswith(b"\x89PNG") and b"Software" not in one[0]
    assert sorted(p.name for p in (tmp_path / "one" / "deep").iterdir()) == [
        "fig2.csv",
        "fig2.pdf",
        "fig2.png",
    ]
    back = pd.read_csv(tmp_path / "one" / "deep" / "fig2.csv")
    pd.testing.assert_frame_equal(back, frame.round(4), check_dtype=False)
    assert one[1].splitlines()[:3] == [
        b"row,seed,rounds,metric,value",
        b"fedavg,0,0,acc_pct,0.0",
        b"fedavg,0,4,acc_pct,1.3333",
    ]


def test_what_was_not_run_keeps_its_place():
    maps = {"a": None, "b": np.eye(3), "c": np.full((3, 3), 0.5), "d": None}
    fig = plots.heats(maps, columns=2, vmin=0.0)
    panels = fig.axes[:4]
    assert [ax.get_title().partition("\n")[0] for ax in panels] == list("abcd")
    assert ["not run" in [t.get_text() for t in ax.texts] for ax in panels] == [1, 0, 0, 1]
    assert [bool(ax.collections) for ax in panels] == [0, 1, 1, 0]


def test_the_first_panel_that_was_run_has_the_common_axis():
    fig, axes = plots.panels(3, 3)
    plots.not_run(axes[0], "a")
    for ax in axes[1:]:
        ax.plot([0, 1], [0, 1])
        plots.finish(ax, "x", "y")
    plots.outer_labels(axes[1:], sharey=True)
    fig.canvas.draw()
    assert [ax.get_ylabel() for ax in axes] == ["", "y", ""]
    shown = [any(t.get_visible() and t.get_text() for t in ax.get_yticklabels()) for ax in axes]
    assert shown == [False, True, False]


@pytest.mark.parametrize("many", [5, 8, 12])
def test_every_bar_beside_the_last_number_is_inside_of_the_axes(many):
    rng = np.random.default_rng(0)
    rows = [
        dict(row=f"m{i}", seed=s, rounds=r, value=60 + 3 * i + r + 4 * rng.normal())
        for i in range(many)
        for s in (0, 1)
        for r in (0, 1, 2)
    ]
    fig, (ax,) = plots.panels(1)
    plots.curves(pd.DataFrame(rows), ax)
    fig.canvas.draw()
    bars = [c for c in ax.collections if isinstance(c, LineCollection)]
    assert len(bars) == many
    inside = ax.get_window_extent()
    for bar in bars:
        (ends,) = bar.get_transform().transform(bar.get_segments()[0])[None]
        assert inside.x0 < ends[0, 0] < inside.x1
        assert inside.y0 - 1 <= min(ends[:, 1]) and max(ends[:, 1]) <= inside.y1 + 1
