"""What FedAGHN's paper prints: every cell is there, and the tables agree with each other and with the text."""

import pandas as pd
import pytest

from tests.papers.papers.published import printed

PUBLISHED = printed("fedaghn")

DATA = ["CIFAR-10", "CIFAR-100", "CIFAR-100*", "TINY"]
METHODS = (
    "local fedavg fedavg_ft fedprox fedprox_ft ditto fedrep pfedhn fedcp fedpac cfl fedamp heurfedamp pfedla fedala fedaghn"
).split()
SPLITS = [f"{setting}, {data}" for setting in ("Pathological", "Dir(0.1)") for data in DATA]
DEPTHS, CLIENTS, STAGES = (
    ["whole", "shallow", "deep"],
    ["self", "similar", "other"],
    ["First", "Prior", "Middle", "Final"],
)
ABLATIONS = ["w/o p and q", "frozen", "w/o p", "w/o q", "per client", "fedaghn"]
TABLES = {  # rows, columns, metric
    "table1": (METHODS, SPLITS, "acc_pct"),
    "table2": (METHODS, ["Dir(0.1)", "Dir(0.2)", "Dir(0.5)"], "acc_pct"),
    "table3": (["local", "cfl", "heurfedamp", "fedaghn"], DATA, "acc_pct"),
    "table4": ([f"{depth}, {client}" for depth in DEPTHS for client in CLIENTS], STAGES, "weight"),
    "apptable1": (ABLATIONS, DATA, "acc_pct"),
    "apptable2": (["cfl", "heurfedamp", "fedaghn"], ["Self", "Similar", "Other"], "weight"),
}


def table(name, values="number"):
    """A table: rows x columns."""
    return PUBLISHED[PUBLISHED["table"] == name].pivot(index="row", columns="column", values=values)


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_is_there(name):
    rows, columns, metric = TABLES[name]
    part = PUBLISHED[PUBLISHED["table"] == name]
    cells = set(zip(part["row"], part["column"], part["metric"], strict=True))
    assert cells == {(r, c, metric) for r in rows for c in columns}
    assert list(part["row"].drop_duplicates()) == rows  # in the order of the paper
    assert ((part["std"] != "") == (metric == "acc_pct")).all()


def test_numbers_are_printed_as_such_and_lie_in_sensible_ranges():
    tables = PUBLISHED[PUBLISHED["table"] != "text"]
    accuracy = tables["metric"] == "acc_pct"
    assert tables["value"][accuracy].str.fullmatch(r"\d+\.\d\d").all()
    assert tables["std"][accuracy].str.fullmatch(r"[01]\.\d\d").all()
    assert tables["value"][~accuracy].str.fullmatch(r"0\.\d{4}").all()
    assert tables["number"][accuracy].between(9.6, 88.4).all()
    assert tables["number"][~accuracy].between(0, 0.25).all()
    assert pd.to_numeric(tables["std"][accuracy]).between(0.01, 1.52).all()


def test_ablation_rows_carry_the_label_of_the_paper():
    notes = PUBLISHED.loc[PUBLISHED["table"] == "apptable1", "note"]
    assert notes.str.startswith("printed as FedAGHN").all()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_weights_of_a_client_sum_to_one_over_20_clients_in_5_groups(depth, stage):
    own, similar, other = table("table4").loc[[f"{depth}, {client}" for client in CLIENTS], stage]
    assert 0.9993 <= round(own + 3 * similar + 16 * other, 6) <= 1.0007


@pytest.mark.parametrize("client", CLIENTS)
def test_whole_is_the_mean_of_shallow_and_deep(client):
    whole, shallow, deep = (table("table4").loc[f"{depth}, {client}"] for depth in DEPTHS)
    assert (whole - (shallow + deep) / 2).abs().max() <= 0.0001 + 1e-9  # four digits each


def test_first_weight_of_a_client_itself_is_p_over_one_plus_p_everywhere():
    first = table("table4", "value")["First"]
    assert {first[f"{depth}, self"] for depth in DEPTHS} == {"0.0291"} == {f"{0.03 / 1.03:.4f}"}


def test_weight_of_a_client_itself_never_rises():
    own = table("table4").loc[[f"{depth}, self" for depth in DEPTHS], STAGES]
    assert (own.diff(axis=1).iloc[:, 1:] <= 0).all(axis=None)
    assert own.loc["deep, self", "Middle"] == own.loc["deep, self", "Final"]


def test_similar_clients_weigh_more_than_others_and_most_so_in_deep_layers():
    weights = table("table4")
    gap = {
        depth: weights.loc[f"{depth}, similar", STAGES] - weights.loc[f"{depth}, other", STAGES]
        for depth in DEPTHS
    }
    assert (gap["shallow"] > 0).all() and (gap["deep"] > gap["shallow"]).all()
    assert gap["shallow"].is_monotonic_decreasing
    said = PUBLISHED.query("table == 'text' and column == 'shallow, Final, similar - other'")[
        "number"
    ].item()
    assert round(gap["shallow"]["Final"], 3) == said == 0.008
    ratio = weights.loc["deep, similar", "Final"] / weights.loc["deep, other", "Final"]
    assert ratio == pytest.approx(2, abs=0.1)  # "approximately twice"


def test_table_2_begins_with_a_column_of_table_1():
    for values in ("value", "std"):
        assert table("table2", values)["Dir(0.1)"].equals(
            table("table1", values)["Dir(0.1), CIFAR-10"].rename("Dir(0.1)")
        )


def test_full_method_of_the_ablation_is_the_last_row_of_table_1():
    for values in ("value", "std"):
        full = table("apptable1", values).loc["fedaghn", DATA]
        assert list(full) == list(
            table("table1", values).loc["fedaghn", [f"Dir(0.1), {data}" for data in DATA]]
        )


def test_appendix_table_2_repeats_the_final_weights_of_table_4():
    final = table("table4", "value").loc[[f"whole, {client}" for client in CLIENTS], "Final"]
    assert list(table("apptable2", "value").loc["fedaghn", ["Self", "Similar", "Other"]]) == list(
        final
    )


def test_weights_of_the_other_methods_sum_to_one_too():
    total = table("apptable2") @ pd.Series({"Self": 1, "Similar": 3, "Other": 16})
    assert total["cfl"] == 1
    assert total.between(0.9993, 1.0007).all()


def test_fedaghn_leads_every_column_but_pathological_cifar10():
    best = table("table1").idxmax().to_dict()
    assert best == dict.fromkeys(SPLITS, "fedaghn") | {"Pathological, CIFAR-10": "fedpac"}
    assert list(table("table1")["Pathological, CIFAR-10"].nlargest(2).index) == [
        "fedpac",
        "fedaghn",
    ]
    for name in ("table2", "table3", "apptable1"):
        assert set(table(name).idxmax()) == {"fedaghn"}


def test_second_places_are_those_the_text_names():
    second = {column: table("table1")[column].nlargest(2).index[1] for column in SPLITS}
    assert second["Dir(0.1), TINY"] == "cfl"
    assert second["Pathological, TINY"] == "heurfedamp"


@pytest.mark.parametrize("name", ["table1", "table2"])
def test_one_global_model_is_worse_than_local_training(name):
    assert (table(name).loc[["fedavg", "fedprox"]] < table(name).loc["local"]).all(axis=None)


def test_heurfedamp_beats_fedamp_but_for_resnet_on_cifar100():
    behind = table("table1").loc["heurfedamp"] < table("table1").loc["fedamp"]
    assert set(behind.index[behind]) == {"Pathological, CIFAR-100*", "Dir(0.1), CIFAR-100*"}


def test_fedala_beats_pfedla_in_one_column_only():
    ahead = table("table1").loc["fedala"] > table("table1").loc["pfedla"]
    assert list(ahead.index[ahead]) == ["Pathological, CIFAR-10"]


def test_leaving_p_out_costs_more_than_leaving_q_out():
    assert (table("apptable1").loc["w/o p"] < table("apptable1").loc["w/o q"]).all()


def test_leaving_both_out_costs_most_on_average_but_not_in_every_column():
    ablation = table("apptable1")
    assert ablation.mean(axis=1).idxmin() == "w/o p and q"
    assert ablation.idxmin()[DATA].to_list() == [
        "per client",
        "w/o p and q",
        "per client",
        "w/o p and q",
    ]
