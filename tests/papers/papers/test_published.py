"""The numbers that papers print: one a line, none twice, none lost, none mistyped."""

import pandas as pd
import pytest

from tests.papers.papers.published import printed

COLUMNS = ["paper", "table", "row", "column", "metric", "value", "std", "note"]
COUNTS = {
    "fedaghn": dict(table1=128, table2=48, table3=16, table4=36, apptable1=24, apptable2=9, text=1),
    "flayer": dict(
        table1=16, table2=56, table3=96, table4=6, table5a=20, table5b=30, table5c=12, text=14
    ),
    "pfedhn": dict(table1=56, table2=30, table3=12, table4=3, fig6=2, appc5=2, text=4),
    "pfedla": dict(table1=76, table2=76, table3=8),
}
SUMS = [  # of a table's values, and of what stands behind its plus-minus
    ("fedaghn", "table1", 6790.76, 44.34),
    ("fedaghn", "table2", 3842.17, 18.12),
    ("fedaghn", "table3", 727.84, 5.47),
    ("fedaghn", "table4", 1.8373, 0),
    ("fedaghn", "apptable1", 1456.85, 5.91),
    ("fedaghn", "apptable2", 0.7844, 0),
    ("flayer", "table1", 20803.28, 0),
    ("flayer", "table2", 3599.09, 18.47),
    ("flayer", "table3", 256941, 0),
    ("flayer", "table4", 349.14, 0),
    ("flayer", "table5a", 1226.45, 6.59),
    ("flayer", "table5b", 1481.5, 10.67),
    ("flayer", "table5c", 435.83, 1.88),
    ("pfedla", "table1", 5511.78, 55.17),
    ("pfedla", "table2", 4913.17, 48.80),
]


@pytest.mark.parametrize("paper", COUNTS)
def test_a_file_has_one_number_a_line_and_none_twice(paper):
    found = printed(paper)
    assert list(found)[:-1] == COLUMNS and set(found["paper"]) == {paper}
    assert not found.duplicated(["table", "row", "column", "metric"]).any()
    assert found["table"].value_counts().to_dict() == COUNTS[paper]


@pytest.mark.parametrize(("paper", "table", "values", "deviations"), SUMS)
def test_numbers_keep_their_sums(paper, table, values, deviations):
    found = printed(paper).query("table == @table")
    assert found["number"].sum() == pytest.approx(values, abs=1e-6)
    assert pd.to_numeric(found["std"]).sum() == pytest.approx(deviations, abs=1e-6)
