"""The numbers that pFedHN's paper prints: every cell, and what holds between cells."""

import pytest

from tests.papers.papers.published import printed

ROWS = printed("pfedhn")
NUMBERS = ROWS.assign(value=ROWS["value"].astype(float))
OURS = ["pfedhn", "pfedhn_pc"]


def by_clients(data):
    return [f"{data}, N={n}" for n in (10, 50, 100)]


LAYOUT = {  # the rows and columns of each table
    "table1": (
        ["local", "fedavg", "perfedavg", "fedper", "pfedme", "lgfedavg", *OURS],
        [*by_clients("CIFAR-10"), *by_clients("CIFAR-100"), "Omniglot, N=50"],
    ),
    "table2": (
        ["fedavg", "perfedavg", "pfedme", "lgfedavg", "pfedhn"],
        [f"{data}, {size}" for data in ("CIFAR-10", "CIFAR-100") for size in "SML"],
    ),
    "table3": (["fedavg", "perfedavg", "pfedme", "pfedhn"], by_clients("MNIST")),
    "table4": (["pfedhn"], by_clients("CIFAR-10")),
    "fig6": (["hidden layers = 3", "hidden layers = 4"], ["CIFAR-10, N=50"]),
    "appc5": (["trainable embedding", "fixed embedding"], ["CIFAR-10, N=50"]),
}


def cells(table):
    found = NUMBERS.query("table == @table and metric == 'acc_pct'").pivot(
        index="row", columns="column", values="value"
    )
    return found[LAYOUT[table][1]]  # in the paper's order


def gains(table, row="pfedhn"):
    """Points of `row` over the best method that is not the paper's own."""
    return cells(table).loc[row] - cells(table).drop(OURS, errors="ignore").max()


def printed_gain(table):
    ends = [f"{table}, min", f"{table}, max"]
    return NUMBERS.query("table == 'text'").set_index("column").loc[ends, "value"].tolist()


@pytest.mark.parametrize("table", LAYOUT)
def test_every_cell_of_every_table_is_there(table):
    rows, columns = LAYOUT[table]
    found = cells(table)
    assert set(found.index) == set(rows) and found.shape == (len(rows), len(columns))
    assert found.notna().all(axis=None)


@pytest.mark.parametrize(
    "table, totals, spread",
    [
        ("table1", [661.90, 632.06, 607.40, 420.39, 351.80, 321.27, 550.85], 90.14),
        ("table2", [348.15, 338.55, 347.71, 172.71, 174.78, 180.49], 52.75),
        ("table3", [392.87, 394.27, 394.02], 1.98),
        ("table4", [90.94, 87.02, 85.30], 4.21),
    ],
)
def test_values_are_accuracies_with_a_spread_and_columns_keep_their_sums(table, totals, spread):
    rows = ROWS[ROWS["table"] == table]
    assert (
        rows["value"].str.fullmatch(r"\d{1,2}\.\d{1,2}").all()
        and rows["std"].str.fullmatch(r"[0-7]\.\d\d").all()
    )
    assert rows["value"].astype(float).between(9, 100).all()  # percent
    assert cells(table).sum().tolist() == pytest.approx(totals, abs=0.001)
    assert rows["std"].astype(float).sum() == pytest.approx(spread, abs=0.001)


def test_the_leaders_of_tables_1_and_2_are_the_papers_bold_cells():
    assert cells("table1").idxmax().tolist() == [*["pfedhn_pc"] * 5, "pfedhn", "pfedhn_pc"]
    assert set(cells("table2").idxmax()) == {"pfedhn"}


def test_pfedhn_and_pfedme_are_similar_on_mnist():
    assert cells("table3").idxmax().tolist() == ["pfedhn", "pfedme", "pfedhn"]
    assert gains("table3").abs().max() == pytest.approx(0.13)


def test_pfedhn_pc_outperforms_fedper_everywhere():
    assert (cells("table1").loc["pfedhn_pc"] > cells("table1").loc["fedper"]).all()


def test_gains_of_2_to_10_points_are_those_of_the_personal_classifier():
    gain = gains("table1", "pfedhn_pc")
    assert gain.tolist() == pytest.approx([3.36, 3.99, 2.86, 9.17, 7.01, 2.41, 5.43])
    assert printed_gain("table1") == [2, 10] and gain.between(2, 10).all()


def test_pfedhn_alone_gains_less_than_2_points_once_and_loses_on_omniglot():
    assert gains("table1").tolist() == pytest.approx([1.72, 2.29, 2.74, 6.76, 6.32, 3.25, -4.43])


def test_gains_of_4_to_8_points_are_2_84_to_6_55_in_table_2():
    assert printed_gain("table2") == [4, 8]
    assert [gains("table2").min(), gains("table2").max()] == pytest.approx([2.84, 6.55])


def test_spectral_normalization_gains_0_11_points_at_most():
    change = cells("table4").loc["pfedhn"] - cells("table1").loc["pfedhn", LAYOUT["table4"][1]]
    assert change.tolist() == pytest.approx([0.11, -1.36, -2.67])


def test_three_hidden_layers_in_figure_6_are_table_1():
    accuracy = cells("fig6")["CIFAR-10, N=50"]
    assert accuracy["hidden layers = 3"] == cells("table1").loc["pfedhn", "CIFAR-10, N=50"] == 88.38
    assert accuracy["hidden layers = 4"] == 88.42


def test_trainable_and_fixed_embeddings_are_similar():
    accuracy = cells("appc5")["CIFAR-10, N=50"]
    assert accuracy.to_dict() == {"trainable embedding": 84.12, "fixed embedding": 83.92}
    assert ROWS.query("table == 'appc5'")["std"].tolist() == ["0.42", "0.36"]
