"""What figures show: labels, lines, colours that belong to methods, and files that repeat."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import seaborn as sns
from matplotlib.colors import to_rgb

from pfl_core.analysis import plots
from pfl_core.methods.base import METHODS

SAFE = [to_rgb(c) for c in sns.color_palette("colorblind", 10)]
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
    own = ["fedper", "pfedhn", "pfedla", "flayer", "fedaghn", "local", "fedavg"]
    assert len({to_rgb(plots.PALETTE[m]) for m in own}) == len(own) and {
        plots.DASHES[m] for m in own
    } == {""}


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
    names = ["fedavg", "fedper", *"abcdefgh"]
    assert {to_rgb(c) for c in plots.colours(names).values()} == set(SAFE)
    many = plots.colours([*"abcdefghijklmno"])
    assert {to_rgb(c) for c in list(many.values())[:10]} == set(SAFE) and many["k"] == many["a"]
    assert plots.dashes([*"abcdefghijklmno"])["k"] != plots.dashes([*"abcdefghijklmno"])["a"]
    assert set(plots.colours(list(plots.LABELS) + ["x"])) == {*plots.LABELS, "x"}, (
        "no colour is free"
    )


def test_label():
    assert (plots.label("fedper"), plots.label("K_P = 2"), plots.label("lgfedavg")) == (
        "FedPer",
        "K_P = 2",
        "LG-FedAvg",
    )


# ---------------------------------------------------------------- panels


@pytest.mark.parametrize(
    ("n", "columns", "grid"), [(1, 3, (1, 1)), (3, 3, (1, 3)), (4, 3, (2, 3)), (2, 1, (2, 1))]
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
    assert {line.get_linestyle() for line in lines} == {"-"}
    low, high = (f(ax.collections[0].get_paths()[0].vertices[:, 1]) for f in (min, max))
    assert (low, high) == (0, 10), "the band is the range over seeds"


def test_curves_of_baselines_and_of_other_rows(ax):
    plots.curves(
        rows(("fedprox", "K_P = 1", "fedper", "K_P = 2"), seeds=(0,)).rename(
            columns={"row": "who"}
        ),
        ax,
        "who",
        "Loss",
    )
    assert legend(ax) == ["FedProx", "K_P = 1", "FedPer", "K_P = 2"] and ax.get_ylabel() == "Loss"
    lines = {n: h for h, n in zip(*ax.get_legend_handles_labels(), strict=True)}
    assert len(set(drawn(ax).values())) == 4
    assert [lines[n].get_linestyle() for n in ("FedPer", "FedProx", "K_P = 1", "K_P = 2")] == [
        "-",
        "--",
        "-",
        "--",
    ]


def test_a_colour_does_not_depend_on_who_else_is_drawn(ax):
    plots.curves(rows(("fedper",)), ax)
    alone = drawn(ax)["FedPer"]
    ax.clear()
    plots.curves(rows(("local", "fedavg", "fedper")), ax)
    assert drawn(ax)["FedPer"] == alone == to_rgb(plots.PALETTE["fedper"])


def test_spread(ax):
    assert plots.spread(rows(metrics=SPREAD), ax) is ax
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Communication round", "Test accuracy (%)")
    assert legend(ax) == ["FedAvg", "FedPer"]
    assert drawn(ax) == {plots.label(m): to_rgb(plots.PALETTE[m]) for m in ("fedavg", "fedper")}
    middle, worst, best = (line.get_ydata().tolist() for line in ax.lines[:3])
    assert (middle, worst, best) == ([1, 5, 9], [-9, -5, -1], [13, 17, 21])
    assert [line.get_linestyle() for line in ax.lines[:3]] == ["-", ":", ":"] and len(ax.lines) == 6
    bands = [b.get_paths()[0].vertices[:, 1] for b in ax.collections]
    assert [(b.min(), b.max()) for b in bands] == [(-4, 14), (6, 24)]


def test_label_distribution(ax):
    counts = np.array([[0, 20, 5], [10, 0, 0]])
    assert plots.label_distribution(counts, ax, ["cat", "dog", "owl"]) is ax
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_legend()) == ("Client", "Class", None)
    dots = ax.collections[0]
    assert dots.get_offsets().tolist() == [
        [0, 1],
        [0, 2],
        [1, 0],
    ] and dots.get_sizes().tolist() == [120, 30, 60]
    assert to_rgb(dots.get_facecolor()[0]) == SAFE[0]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["cat", "dog", "owl"]
    assert ax.get_xlim() == (-0.7, 1.7) and ax.get_ylim() == (-0.7, 2.7)
    assert plots.label_distribution(np.zeros((2, 2), int), ax) is ax, "nobody holds anything"


def test_heat(ax):
    matrix = np.array([[0.0, 0.5, 1.0], [1.0, 0.2, 0.0]])
    assert plots.heat(matrix, ax, "x", vmin=0, vmax=2, annot=True, cbar=False) is ax
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("x", "Receiving client")
    mesh = ax.collections[0]
    np.testing.assert_array_equal(np.asarray(mesh.get_array()).reshape(2, 3), matrix)
    assert mesh.get_clim() == (0, 2) and [t.get_text() for t in ax.texts][:3] == ["0", "0.5", "1"]
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
