"""What FLAYER's paper prints: every cell is there, and the tables agree with each other and with the text.

Accuracy on AG News is `train_acc_pct`: the released reader gives training texts in place of test ones.
"""

import pandas as pd
import pytest

from tests.papers.papers.published import printed

PUBLISHED = printed("flayer")

IMAGES = [
    f"{data}, {net}" for net in ("CNN", "ResNet-18") for data in ("CIFAR-10", "CIFAR-100", "Tiny")
]
RIVALS = ["apple", "ditto", "fedamp", "fedper", "fedrep", "fedala"]
METHODS = ["fedavg", *RIVALS, "flayer"]
TEN = [
    "fedavg",
    "apple",
    "ditto",
    "fedamp",
    "gpfl",
    "fedper",
    "fedrep",
    "fedcp",
    "fedala",
    "flayer",
]
R18 = "CIFAR-100, ResNet-18"
COSTS = ["iterations", "total_s"]
TEXT, TRAINED = "AG News, fastText", "train_acc_pct"
TABLES = {  # rows, columns, metrics, whether accuracies come with a deviation; 5c prints a dash for the rows that are not here
    "table1": (
        ["fedavg", "apple", "fedper", "fedala"],
        [R18],
        [*COSTS, "s_per_iteration", "acc_pct"],
        False,
    ),
    "table2": (METHODS, [*IMAGES, TEXT], ["acc_pct"], True),
    "table3": (METHODS, IMAGES, COSTS, False),
    "table4": (["s=3", "s=2", "s=1"], ["CIFAR-100, CNN", R18], ["acc_pct"], False),
    "table5a": (TEN, ["Dir(0.1)", "Dir(0.01)"], ["acc_pct"], True),
    "table5b": (TEN, ["N=20", "N=50", "N=100"], ["acc_pct"], True),
    "table5c": (
        ["fedavg", "ditto", "fedamp", "fedper", "fedrep", "fedala"],
        [R18],
        ["acc_pct", "improvement_points"],
        True,
    ),
}


def table(name, metric="acc_pct"):
    """One metric of a table: rows x columns; accuracies with those on training texts."""
    metrics = ["acc_pct", TRAINED] if metric == "acc_pct" else [metric]
    part = PUBLISHED[(PUBLISHED["table"] == name) & PUBLISHED["metric"].isin(metrics)]
    return part.pivot(index="row", columns="column", values="number")


def said(row, column):
    """A number of the running text."""
    return PUBLISHED.query("table == 'text' and row == @row and column == @column")["number"].item()


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_is_there(name):
    rows, columns, metrics, deviation = TABLES[name]
    part = PUBLISHED[PUBLISHED["table"] == name]
    cells = set(zip(part["row"], part["column"], part["metric"], strict=True))
    assert cells == {
        (r, c, TRAINED if c == TEXT else m) for r in rows for c in columns for m in metrics
    }
    assert list(part["row"].drop_duplicates()) == rows  # in the order of the paper
    assert ((part["std"] != "") == (deviation & part["metric"].isin(["acc_pct", TRAINED]))).all()


def test_training_accuracy_is_noted_as_such():
    texts = PUBLISHED[PUBLISHED["metric"] == TRAINED]
    assert (
        set(texts["column"]) == {TEXT}
        and texts["note"].str.startswith("accuracy on training texts").all()
    )
    assert TEXT not in set(
        PUBLISHED.query("metric == 'acc_pct'")["column"]
    )  # compared with no test accuracy


def test_numbers_are_printed_as_such_and_lie_in_sensible_ranges():
    tables = PUBLISHED[PUBLISHED["table"] != "text"]
    whole = tables["metric"].isin([*COSTS, "s_per_iteration"])
    assert tables["value"][whole].str.fullmatch(r"\d+").all()
    assert tables["value"][~whole].str.fullmatch(r"\d+\.\d\d").all()
    assert tables["std"][tables["std"] != ""].str.fullmatch(r"0\.\d\d").all()
    low, high = (
        dict(acc_pct=18, iterations=16, total_s=300),
        dict(acc_pct=99, iterations=200, total_s=32000),
    )
    for metric, least in low.items():
        assert tables.loc[tables["metric"] == metric, "number"].between(least, high[metric]).all()


def test_every_deviation_is_below_one_point():
    assert pd.to_numeric(PUBLISHED["std"]).between(0.04, 0.89).sum() == 112  # Tables 2 and 5


def test_total_time_is_a_whole_number_of_seconds_an_iteration():
    assert (table("table3", "total_s") % table("table3", "iterations") == 0).all(axis=None)
    assert (
        table("table1", "total_s")
        == table("table1", "iterations") * table("table1", "s_per_iteration")
    ).all(axis=None)


def test_table_1_repeats_tables_2_and_3():
    rows = TABLES["table1"][0]
    assert table("table1").loc[rows, R18].equals(table("table2").loc[rows, R18])
    for metric in COSTS:
        assert table("table1", metric).loc[rows, R18].equals(table("table3", metric).loc[rows, R18])


def test_tables_4_and_5_repeat_table_2_where_the_setting_is_the_same():
    values = PUBLISHED.set_index(["table", "row", "column", "metric"])[["value", "std"]]

    def cell(name, row, column):
        return tuple(values.loc[(name, row, column, "acc_pct")])

    for method in TEN:
        assert cell("table5a", method, "Dir(0.1)") == cell("table5b", method, "N=20")
    for method in METHODS:
        assert cell("table5a", method, "Dir(0.1)") == cell("table2", method, R18)
    assert cell("table5c", "fedavg", R18) == cell(
        "table2", "flayer", R18
    )  # FLAYER is FLAYER applied to FedAvg
    assert (
        cell("table4", "s=1", "CIFAR-100, CNN")[0] == cell("table2", "flayer", "CIFAR-100, CNN")[0]
    )
    assert cell("table4", "s=2", R18)[0] == cell("table2", "flayer", R18)[0]


def test_improvement_over_six_methods_is_that_of_the_abstract():
    gain = table("table2").loc["flayer"] - table("table2").loc[RIVALS]
    assert gain.size == 42
    assert gain.stack().mean() == pytest.approx(5.43, abs=0.005)
    assert (
        gain.stack().max()
        == pytest.approx(14.29, abs=1e-9)
        == said("flayer", "over six pFL methods, max")
    )
    assert said("flayer", "over six pFL methods, mean") == round(gain.stack().mean(), 1)


@pytest.mark.parametrize(
    ("method", "points"),
    [("fedper", 18.12), ("fedrep", 19.77), ("fedala", 22.75), ("flayer", 24.18)],
)
def test_improvement_over_fedavg_is_a_mean_of_the_image_tasks_alone(method, points):
    gain = table("table2").loc[method] - table("table2").loc["fedavg"]
    assert gain[IMAGES].mean() == pytest.approx(points, abs=0.005)
    assert (
        0 <= gain[IMAGES].mean() - said(method, "over FedAvg, mean") < 0.1
    )  # the text cuts digits off
    assert gain.mean() < said(method, "over FedAvg, mean") - 0.4  # AG News would lower it


def test_cost_reductions_are_those_of_the_text_but_for_the_largest():
    total = table("table3", "total_s")
    against = {
        method: 100 * (1 - total.loc["flayer"] / total.loc[method])
        for method in ("fedavg", "fedala")
    }
    assert (
        round(against["fedavg"].mean(), 1)
        == 58.9
        == said("flayer", "total time against FedAvg, mean")
    )
    assert (
        round(against["fedala"].mean(), 1)
        == 52.7
        == said("flayer", "total time against FedALA, mean")
    )
    assert against["fedavg"].max() == pytest.approx(80.0, abs=1e-9)
    assert said("flayer", "total time against FedAvg, max") == 80.1


def test_table_5c_improvements_are_differences_but_for_the_misprint_of_fedavg():
    gain = table("table5c")[R18] - table("table5a")["Dir(0.1)"]
    printed = table("table5c", "improvement_points")[R18]
    right = printed.index.drop("fedavg")
    assert (gain[right] - printed[right]).abs().max() < 1e-9
    assert (printed["fedavg"], round(gain["fedavg"], 2)) == (24.77, 23.6)
    ends = [said("flayer", f"applied to a pFL method, {end}") for end in ("min", "max")]
    assert ends == [printed[right].min(), printed[right].max()]


def test_flayer_leads_every_accuracy_column():
    for name in ("table2", "table5a", "table5b"):
        assert set(table(name).idxmax()) == {"flayer"}
    assert table("table1")[R18].idxmax() == "fedala"
    assert table("table5c")[R18].idxmax() == "fedala"


def test_flayer_is_cheapest_but_for_cifar10_with_the_cnn():
    assert table("table3", "total_s").idxmin().to_dict() == dict.fromkeys(IMAGES, "flayer") | {
        "CIFAR-10, CNN": "fedamp"
    }
    fewest = table("table3", "iterations").idxmin().to_dict()
    assert fewest == dict.fromkeys(IMAGES, "flayer") | {"CIFAR-10, CNN": "fedamp", R18: "apple"}


def test_best_number_of_head_layers_is_one_for_the_cnn_and_two_for_resnet():
    assert table("table4").idxmax().to_dict() == {"CIFAR-100, CNN": "s=1", R18: "s=2"}


def test_every_method_loses_accuracy_from_50_to_100_clients():
    loss = table("table5b")["N=50"] - table("table5b")["N=100"]
    assert (loss > 0).all()
    assert loss["flayer"] < said("flayer", "N=50 to N=100") == 2
    assert round(loss["apple"], 1) == said("apple", "N=50 to N=100") == 9.6
    assert list(loss.nsmallest(3).index) == ["fedala", "fedavg", "flayer"]


def test_accuracy_is_said_to_rise_before_flayer_converges():
    rise = said("flayer", "CIFAR-100, ResNet-18, accuracy rises")
    assert rise == 50 < table("table3", "iterations").loc["flayer", R18]
