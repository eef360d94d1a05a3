"""Which number of a run is reported, and how tables and claims say it."""

import pandas as pd
import pytest

from pfl_core.experiments.metrics import ROW_COLUMNS
from pfl_core.papers import fedper, report
from pfl_core.papers.report import claims, latex, markdown, pick, save_table, summary


def series(values, row="fedper", column="a", run=None, rounds=None, split="test", **more):
    """Rows of one run: `values` at `rounds` (0, 1, ...)."""
    base = dict.fromkeys(ROW_COLUMNS, "") | dict(
        paper="fedper", artefact="fig2", when="before", mean="client", seed=0
    )
    base |= dict(
        metric="acc_pct",
        split=split,
        row=row,
        column=column,
        run=run or f"{row}/{column}/0",
        n_clients=4,
    )
    return pd.DataFrame(
        [
            base | dict(value=v, round=r) | more
            for r, v in zip(rounds or range(len(values)), values, strict=True)
        ],
        columns=ROW_COLUMNS,
    )


def join(*frames):
    return pd.concat(frames, ignore_index=True)


def cell(value, row, column, seed=0, **more):
    """A finished run's last number."""
    return series([value], row, column, run=f"{row}/{column}/{seed}", seed=seed, **more)


# ---------------------------------------------------------------- which number

TEST, VAL = [10.0, 60.0, 70.0, 50.0, 40.0], [5.0, 30.0, 20.0, 30.0, 10.0]


@pytest.mark.parametrize(
    ("select", "value", "round"),
    [("last", 40, 4), ("last10", 46, 4), ("best_val", 60, 1), ("best_test", 70, 2)],
)
def test_four_rules(select, value, round):
    rows = join(series(TEST), series(VAL, split="val"))
    for frame in (rows, rows.sample(frac=1, random_state=1), rows[::-1].set_axis([0] * len(rows))):
        got = pick(frame, select)
        assert (
            list(got.value) == [value]
            and list(got["round"]) == [round]
            and set(got.split) == {"test"}
        )
        assert set(got.columns) == set(ROW_COLUMNS)


def test_last10_is_the_mean_of_ten_evaluations():
    assert pick(series(range(25)), "last10").value.tolist() == [19.5]
    assert pick(series(range(25), rounds=range(0, 100, 4)), "last10")["round"].tolist() == [96]


def test_ties_take_the_first_best():
    assert pick(series([1, 9, 3, 9]), "best_test")["round"].tolist() == [1]


@pytest.mark.parametrize("select", report.SELECT)
def test_every_run_gets_its_own_number(select):
    a = series([0, 80, 90], "fedavg", rounds=[0, 10, 20])
    b = series([1, 5, 2], "fedper", rounds=[0, 3, 6])
    twins = join(a, b, *(f.assign(split="val") for f in (a, b)))
    both = pick(twins, select).set_index("row").value
    assert both.to_dict() == {r: pick(f, select).value.item() for r, f in twins.groupby("row")}
    lengths = (
        pick(join(series([3], rounds=[50]), series([7] * 30, "fedavg")), "last10")
        .set_index("row")
        .value
    )
    assert lengths.to_dict() == {"fedper": 3, "fedavg": 7}
    early = pick(
        join(series([0, 4], rounds=[0, 10]), series([2, 4], "fedavg", rounds=[0, 5])), "last10"
    )
    assert early.set_index("row").value.to_dict() == {"fedper": 2, "fedavg": 3}


def test_one_run_under_two_artefacts_counts_in_both():
    rows = join(series([1, 2]), series([1, 2], artefact="fig3"))
    for select in ("last", "last10", "best_test"):
        assert sorted(pick(rows, select).artefact) == ["fig2", "fig3"]


def test_pick_reads_only_what_it_is_asked_for():
    noise = [
        dict(when="after"),
        dict(mean="pooled"),
        dict(metric="acc_sd"),
        dict(split="train"),
        dict(split="val"),
    ]
    rows = join(series([1, 2]), *(series([90 + i, 91 + i], **n) for i, n in enumerate(noise)))
    assert pick(rows).value.tolist() == [2]
    assert pick(rows, when="after").value.tolist() == [91]
    assert pick(rows, mean="pooled").value.tolist() == [92]
    assert pick(rows, metric="acc_sd").value.tolist() == [93]
    assert pick(rows, metric="loss").empty


def test_best_val_needs_validation_data_of_every_run():
    with pytest.raises(
        ValueError, match="needs validation data, and these rows have none: fedper; use 'last'"
    ):
        pick(series(TEST), "best_val")
    with pytest.raises(ValueError, match="have none: fedavg;"):
        pick(join(series(TEST), series(VAL, split="val"), series(TEST, "fedavg")), "best_val")


def test_an_unknown_rule_is_named():
    with pytest.raises(
        ValueError,
        match="select 'best' is unknown; did you mean 'best_val'. known are last, last10, best_val, best_test",
    ):
        pick(series(TEST), "best")


# ---------------------------------------------------------------- tables


def test_summary_keeps_order_and_counts_seeds():
    seeds = [cell(v, "fedper", "k=4", seed=i) for i, v in enumerate((50.0, 51.0, 55.0))]
    table = summary(
        pick(join(*seeds, cell(7.126, "fedavg", "k=4"), cell(99.994, "fedper", "k=10")))
    )
    assert list(table.index) == ["fedper", "fedavg"] and list(table.columns) == ["k=4", "k=10"]
    assert table.loc["fedper"].tolist() == ["52.00 ± 2.65", "99.99"]
    assert table.loc["fedavg"].tolist() == ["7.13", "not run"]


def test_summary_by_other_columns():
    rows = join(cell(1, "x", "a", method="fedavg"), cell(2, "x", "a", method="fedper", seed=1))
    assert summary(pick(rows), "method", "row").to_dict() == {
        "x": {"fedavg": "1.00", "fedper": "2.00"}
    }


def test_markdown_escapes_bars_and_leaves_a_plain_index_out():
    frame = pd.DataFrame({"a|b": ["1|2", 3.5], "c": ["", "50 %"]})
    assert markdown(frame).split("\n") == [
        "| a\\|b | c |",
        "| --- | --- |",
        "| 1\\|2 |  |",
        "| 3.5 | 50 % |",
    ]
    named = pd.DataFrame({"k=4": ["1.0"]}, index=pd.Index(["fedper"], name="row"))
    assert markdown(named).split("\n") == ["| row | k=4 |", "| --- | --- |", "| fedper | 1.0 |"]


def test_latex_escapes_what_tex_reads():
    frame = pd.DataFrame({"K_P & 50%": [r"\x", "{~^}"], "#$": ["1 ± 2", 7]})
    assert latex(frame).split("\n") == [
        r"\begin{tabular}{ll}",
        r"\toprule",
        r"K\_P \& 50\% & \#\$ \\",
        r"\midrule",
        r"\textbackslash x & 1 ± 2 \\",
        r"\{\textasciitilde \textasciicircum \} & 7 \\",
        r"\bottomrule",
        r"\end{tabular}",
        "",
    ]
    named = pd.DataFrame({"k": [1]}, index=pd.Index(["fed_per"], name="row"))
    assert r"fed\_per & 1 \\" in latex(named) and "{lr}" in latex(named)


def test_save_table_writes_two_forms(tmp_path):
    frame = pd.DataFrame({"k": [1.5]}, index=pd.Index(["fedper"], name="row"))
    save_table(frame, tmp_path / "new" / "table1")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["table1.csv", "table1.md"]
    assert pd.read_csv(tmp_path / "new" / "table1.csv", index_col="row").equals(frame)
    assert (tmp_path / "new" / "table1.md").read_text() == markdown(frame) + "\n"


# ---------------------------------------------------------------- claims


def judged(rows):
    return claims("fedper", rows, "quick").set_index("artefact")


def fig2(**gaps):
    """FedAvg at 50 and FedPer above it by `gaps`, keys as NET_k."""
    cells = []
    for key, gap in gaps.items():
        net, k = key.split("_")
        cells += [
            cell(50.0, "fedavg", f"{net}, k={k}"),
            cell(50.0 + gap, "fedper", f"{net}, k={k}"),
        ]
    return join(*cells)


def of_fig2(rows):
    got = claims("fedper", rows, "smoke")
    assert set(got.profile) == {"smoke"}
    return dict(
        zip(
            ("wins", "shrinks"),
            got[got.artefact == "fig2"][["measured", "verdict"]].to_numpy().tolist(),
            strict=True,
        )
    )


def test_claims_hold_where_the_numbers_say_so():
    got = of_fig2(fig2(A_4=20, A_10=3, B_4=5))
    assert got == {
        "wins": ["A, k=4: +20.0 points, B, k=4: +5.0 points", "holds"],
        "shrinks": ["A: +20.0 at k=4, +3.0 at k=10", "holds"],
    }


def test_claims_do_not_hold_where_one_column_fails():
    got = of_fig2(fig2(A_4=20, A_10=25, B_4=-3, B_10=-9))
    assert got["wins"] == ["A, k=4: +20.0 points, B, k=4: -3.0 points", "does not hold"]
    assert got["shrinks"] == [
        "A: +20.0 at k=4, +25.0 at k=10, B: -3.0 at k=4, -9.0 at k=10",
        "does not hold",
    ]
    assert of_fig2(fig2(A_4=0.9))["wins"][1] == "does not hold"


def test_claims_average_seeds_and_read_the_last_round():
    rows = join(
        *(cell(v, "fedavg", "A, k=4", s) for s, v in enumerate((40, 60))),
        series([99, 52], "fedper", "A, k=4"),
    )
    assert of_fig2(rows)["wins"] == ["A, k=4: +2.0 points", "holds"]


def test_claims_without_their_cells_are_not_run():
    every = claims("fedper", series([]), "quick")
    assert (
        set(every.verdict) == {"not run"}
        and set(every.measured) == {""}
        and len(every) == len(fedper.PAPER.claims)
    )
    assert every.columns.tolist() == ["says", "artefact", "measured", "verdict", "profile"]
    assert of_fig2(fig2(A_4=9))["shrinks"] == ["", "not run"], "no k=10"
    got = of_fig2(fig2(A_10=9))
    assert got == {"wins": ["", "not run"], "shrinks": ["fedper / A, k=4 was not run", "not run"]}
    assert of_fig2(cell(9, "fedper", "A, k=4"))["wins"] == [
        "fedavg / A, k=4 was not run",
        "not run",
    ]


OTHERS = {  # artefact: (row, column, value) that hold; the same that do not; what is said of the former
    "fig3": (
        [("fedper", "A", 4.0), ("fedavg", "A", 9.0)],
        [("fedper", "A", 9.0), ("fedavg", "A", 4.0)],
        "sd over clients 4.0 (FedPer), 9.0 (FedAvg)",
    ),
    "fig4": (
        [
            ("K_P = 1", "A", 70.0),
            ("K_P = 2", "A", 74.9),
            ("K_P = 1", "B", 20.0),
            ("K_P = 2", "B", 18.0),
        ],
        [
            ("K_P = 1", "A", 70.0),
            ("K_P = 2", "A", 74.9),
            ("K_P = 1", "B", 20.0),
            ("K_P = 2", "B", 26.0),
        ],
        "A: 70.0 to 74.9, B: 18.0 to 20.0",
    ),
    "fig5": (
        [("original", "A", 60.0), ("linear base", "A", 50.0)],
        [("original", "A", 50.0), ("linear base", "A", 50.0)],
        "A: 60.0 original, 50.0 linear",
    ),
    "fig15": (
        [("fedper", "A", 60.0), ("fedper + fine-tuning", "A", 62.5)],
        [("fedper", "A", 60.0), ("fedper + fine-tuning", "A", 56.0)],
        "A: 60.0 without, 62.5 with",
    ),
}


@pytest.mark.parametrize("artefact", OTHERS)
def test_the_other_claims(artefact):
    good, bad, said = OTHERS[artefact]
    metric = "acc_sd" if artefact == "fig3" else "acc_pct"
    for cells, verdict in ((good, "holds"), (bad, "does not hold")):
        got = judged(join(*(cell(v, r, c, artefact=artefact, metric=metric) for r, c, v in cells)))
        assert got.verdict[artefact] == verdict and set(got.verdict.drop(artefact)) == {"not run"}
        if verdict == "holds":
            assert got.measured[artefact] == said
