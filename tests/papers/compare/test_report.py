"""Which number of a run is reported, and how tables and claims say it."""

import dataclasses
from types import SimpleNamespace

import pandas as pd
import pytest

from pfl_core.analysis import select
from pfl_core.analysis.select import pick, summary
from pfl_core.experiments.metrics import ROW_COLUMNS
from pfl_papers.compare import report
from pfl_papers.compare.readable import markdown
from pfl_papers.compare.report import claims, latex, save_table
from pfl_papers.evidence import committed
from pfl_papers.papers import base, fedper
from pfl_papers.papers.base import PAPERS, Claim


def series(values, row="fedper", column="a", run=None, rounds=None, split="test", **more):
    """Rows of one run: `values` at `rounds` (0, 1, ...)."""
    base = dict.fromkeys(ROW_COLUMNS, "") | dict(
        paper="fedper", artefact="fig2", when="before", average="client", seed=0
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
            base | dict(value=v, rounds=r) | more
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
    [("last", 40, 4), ("last10", 55, 4), ("best_val", 60, 1), ("best_test", 70, 2)],
)
def test_four_rules(select, value, round):
    rows = join(series(TEST), series(VAL, split="val"))
    for frame in (rows, rows.sample(frac=1, random_state=1), rows[::-1].set_axis([0] * len(rows))):
        got = pick(frame, select)
        assert (
            list(got.value) == [value]
            and list(got["rounds"]) == [round]
            and set(got.split) == {"test"}
        )
        assert set(got.columns) == set(ROW_COLUMNS)


def test_accuracy_chooses_the_round_of_every_metric():
    spread = [series([5, 2, 3, 9, 1], split=s, metric="acc_sd") for s in ("test", "val")]
    rows = join(series(TEST), series(VAL, split="val"), *spread)
    got = {s: pick(rows, s, metric="acc_sd").value.tolist() for s in select.SELECT}
    assert got == {"last": [1], "last10": [3.75], "best_val": [2], "best_test": [3]}


def test_last10_is_the_mean_of_ten_evaluations():
    assert pick(series(range(25)), "last10").value.tolist() == [19.5]
    assert pick(series(range(25), rounds=range(0, 100, 4)), "last10")["rounds"].tolist() == [96]


def test_ties_take_the_first_best():
    assert pick(series([1, 9, 3, 9]), "best_test")["rounds"].tolist() == [1]


@pytest.mark.parametrize("select", select.SELECT)
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
    assert early.set_index("row").value.to_dict() == {"fedper": 4, "fedavg": 4}


def test_one_run_under_two_artefacts_counts_in_both():
    rows = join(series([1, 2]), series([1, 2], artefact="fig3"))
    for which in ("last", "last10", "best_test"):
        assert sorted(pick(rows, which).artefact) == ["fig2", "fig3"]


def test_pick_reads_only_what_it_is_asked_for():
    noise = [
        dict(when="after"),
        dict(average="pooled"),
        dict(metric="acc_sd"),
        dict(split="train"),
        dict(split="val"),
    ]
    rows = join(series([1, 2]), *(series([90 + i, 91 + i], **n) for i, n in enumerate(noise)))
    assert pick(rows).value.tolist() == [2]
    assert pick(rows, when="after").value.tolist() == [91]
    assert pick(rows, average="pooled").value.tolist() == [92]
    assert pick(rows, metric="acc_sd").value.tolist() == [93]
    assert pick(rows, metric="loss").empty


def test_best_val_needs_validation_data_of_every_run():
    with pytest.raises(
        ValueError,
        match="needs accuracies on validation data, and these rows have none: fedper; use 'last'",
    ):
        pick(series(TEST), "best_val")
    with pytest.raises(ValueError, match="have none: fedavg;"):
        pick(join(series(TEST), series(VAL, split="val"), series(TEST, "fedavg")), "best_val")
    with pytest.raises(ValueError, match="select='best_test' needs accuracies on test data"):
        pick(series(TEST, metric="acc_sd"), "best_test", metric="acc_sd")


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
    assert table.loc["fedavg"].tolist() == ["7.13 (1 of 3 seeds)", "not run"]


def test_summary_by_other_columns():
    rows = join(cell(1, "x", "a", method="fedavg"), cell(2, "x", "a", method="fedper", seed=1))
    assert summary(pick(rows), "method", "row").to_dict() == {
        "x": {"fedavg": "1.00 (1 of 2 seeds)", "fedper": "2.00 (1 of 2 seeds)"}
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
    named = frame.rename(index={"fedper": "FedPer"})  # for readers; the CSV keeps keys
    assert (tmp_path / "new" / "table1.md").read_text() == markdown(named) + "\n"


# ---------------------------------------------------------------- claims


def _better(evidence):
    return [evidence.ahead("fedper", "fedavg", c) for c in evidence.columns]


BETTER = Claim("FedPer is better", "Fig. 2", "fig2", _better)


def paper(*made, **changes):
    return dataclasses.replace(fedper.PAPER, claims=made or (BETTER,), **changes)


def fig2(*gaps, column="A"):
    """FedAvg ends at 50, 51, ... by seed, FedPer above it by `gaps`; both are there early."""

    def course(row, end, seed):
        return series([10.0] + [end] * 4, row, column, f"{row}/{column}/{seed}", seed=seed)

    pairs = [
        (course("fedavg", 50.0 + s, s), course("fedper", 50.0 + s + gap, s))
        for s, gap in enumerate(gaps)
    ]
    return join(*(frame for pair in pairs for frame in pair))


def judged(rows, profile="paper", *made):
    return claims(paper(*made), rows.assign(profile=profile)).iloc[0]


@pytest.mark.parametrize(
    ("gaps", "verdict", "reason", "status"),
    [
        ((20.0, 20.4, 19.7), "holds", "", "as the paper says"),
        ((-20.0, -20.4, -19.7), "contradicted", "", "a finding about the paper"),
        ((20.0,), "open", "one seed", ""),
        ((20.0, -15.0), "open", "too wide", ""),
        ((0.1, -0.2, 0.1), "tie", "", ""),
    ],
)
def test_a_claim_is_judged_and_says_what_that_means(gaps, verdict, reason, status):
    got = judged(fig2(*gaps))
    assert (got.verdict, got.reason, got.status) == (verdict, reason, status)
    assert got.why.startswith("FedPer - FedAvg, A: ") and got.source == "Fig. 2"
    assert got.profile == "paper" and got.artefact == "fig2"


def test_what_a_contradiction_says_depends_on_how_much_was_run():
    against = fig2(-20.0, -20.4, -19.7)
    assert judged(against, "medium").status == "at a cut budget"
    ours = dataclasses.replace(BETTER, limit="by 0 points: ours")
    assert judged(against, "medium", ours).status == "a definition of ours"
    known = dataclasses.replace(BETTER, status="a finding about the paper: seen in two forms")
    assert judged(against, "medium", known).status == known.status
    assert judged(fig2(20.0, 20.4, 19.7), "medium", known).status == "as the paper says"


@pytest.mark.parametrize("profile", ["smoke", "quick"])
def test_profiles_of_other_data_have_no_verdicts(profile):
    got = judged(fig2(20.0, 20.4), profile)
    assert (got.verdict, got.status, got.scale) == ("not judged", "", "")


def test_claims_without_their_cells_are_not_run():
    every = claims("fedper", series([]))
    assert set(every.verdict) == {"not run"} and set(every.why) == {""}
    assert len(every) == len(fedper.PAPER.claims)
    got = judged(join(*(cell(9.0, "fedper", "A", s) for s in range(2))))
    assert (got.verdict, got.why) == ("not run", "FedAvg / A was not run")


def test_most_cases_may_hold_where_one_fails():
    rows = join(*(fig2(g, g + 0.1, column=c) for c, g in (("A", 20.0), ("B", 9.0), ("C", -9.0))))
    rows["run"] = rows.run + rows.column
    assert judged(rows).verdict == "contradicted"

    def grouped(evidence):
        return [evidence.ahead("fedper", "fedavg", c, group=c) for c in evidence.columns]

    most = dataclasses.replace(BETTER, judge=grouped, most=True)
    got = judged(rows, "paper", most)
    assert got.verdict == "holds" and "C: contradicted" in got.why


def test_every_claim_says_where_the_paper_makes_it():
    for name in PAPERS:
        found = base.paper(name).claims
        assert len({(c.says, c.where) for c in found}) == len(found) > 5
        for c in found:
            assert c.says.strip() and not c.says.endswith(".") and "(Sec." not in c.says
            assert c.where and len(c.where) < 60 and len(c.limit) < 100


def test_seeds_are_said_from_the_fewest_to_the_most():
    said = [report.seeds_in_words(counts) for counts in ([1], [2, 2], [5, 2, 3])]
    assert said == ["1 seed", "2 seeds", "2 to 5 seeds"]


def test_clients_of_the_authors_are_said_of_all_runs_or_in_part(monkeypatch):
    paper = dataclasses.replace(base.paper("fedaghn"), clients="for them")
    runs = {"drawn": {"numpy_seed": 1}, "anew": {}}
    made = {run: SimpleNamespace(partition_args=args) for run, args in runs.items()}
    monkeypatch.setattr(committed, "experiment", made.get)
    said = [report.for_whom(paper, some) for some in (["drawn"], ["anew"], [*runs], ["gone"])]
    assert said == ["; for them", "", "; in part for them", ""]
    assert report.for_whom(dataclasses.replace(paper, clients=""), ["drawn"]) == ""


def test_a_run_with_validation_data_and_a_label_of_its_own_is_beside_the_papers():
    found = report.counterpart("fedper", "fig2", "fedper", "MobileNet of half width, k=4")
    assert found and found.partition_args == {"k": 4} and found.model_args["width"] == 1.0
    ours = found.but(partition_args={"k": 4, "val": 0.1})
    (a, b) = map(report._dealt, (ours, found))
    assert (a.validation, b.validation) == (0.1, 0.0) and a._replace(validation=0.0) == b
