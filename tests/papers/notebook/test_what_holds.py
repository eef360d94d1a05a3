"""The same runs counted in other ways: ranks, reversals, verdicts, gains, and what rows lack."""

import dataclasses
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from pfl_core.experiments.metrics import ROW_COLUMNS
from pfl_papers import places
from pfl_papers.compare import recount, report
from pfl_papers.compare.recount import REPORTED, Runs
from pfl_papers.notebook import rank_figures
from pfl_papers.notebook.what_holds import WhatHolds
from pfl_papers.papers import base as papers
from pfl_papers.papers.base import Claim
from tests import made

COLUMN = "Dir(0.1), CIFAR-10"


def run(row, test, seed=0, *, column=COLUMN, when="before", val=(), pooled=0.0, **more):
    """Rows of one run: test accuracy after each round, pooled so many points above the clients' mean."""
    base = dict.fromkeys(ROW_COLUMNS, "") | dict(row=row, column=column, seed=seed, when=when)
    base |= dict(paper="fedaghn", artefact="table1", method="fedavg", model="cnn", partition="iid")
    base |= dict(metric="acc_pct", profile="quick", dataset="digits", run=f"{row}/{column}/{seed}")
    lines = []
    for split, series in (("test", test), ("val", val)):
        for average, above in (("client", 0.0), ("pooled", pooled)):
            here = base | dict(split=split, average=average) | more
            lines += [here | dict(rounds=r, value=float(v) + above) for r, v in enumerate(series)]
    return pd.DataFrame(lines)


def runs(*frames, claims=(), artefact="table1", **how):
    """As if a paper had reported the last round before training, averaged over clients."""
    report = dict(select="last", when="before", average="client") | how
    paper = replace(papers.paper("fedaghn"), report=report, when={}, claims=tuple(claims))
    return Runs(paper, artefact, pd.concat(frames, ignore_index=True))


def late_and_early(*seeds):
    """FedPer ends first, FedRep was best on the way, Local is behind: so for every seed."""
    out = []
    for s in seeds:
        shift = 0.1 * s
        out += [run("fedper", [20, 60 + shift, *[80 + shift] * 7], s)]
        out += [run("fedrep", [20, 90 - shift, *[70 + shift] * 7], s)]
        out += [run("local", [20, 50 + shift, *[50 - shift] * 7], s)]
    return runs(*out)


def column_of(some, fewest=3):
    (found,) = recount.comparable(recount.recounted(some), fewest).values()
    return found


# -- ranks -----------------------------------------------------------------------------------------


def test_a_rank_that_changes_is_found():
    column = column_of(late_and_early(0, 1))
    order = recount.ranks(column)
    assert order.last.to_dict() == {"fedper": 1, "fedrep": 2, "local": 3}
    assert order.best_test.to_dict() == {"fedper": 2, "fedrep": 1, "local": 3}
    assert list(order.index) == ["fedper", "fedrep", "local"]
    assert set(column.rule[column.same]) == {REPORTED, "last", "before", "client"}
    found = recount.leaders(column)
    assert found["fedrep"] == ["best_test"] and "best_test" not in found["fedper"]


def test_clients_or_samples_is_a_rule_too():
    column = column_of(
        runs(
            run("fedper", [10, 70], pooled=0),
            run("fedrep", [10, 69], pooled=5),
            run("local", [10, 9]),
        )
    )
    order = recount.ranks(column)
    assert order.pooled.idxmin() == "fedrep" and order.client.idxmin() == "fedper"


def test_before_and_after_training_read_other_rows():
    after = [
        run(r, [10, v], when="after") for r, v in (("fedper", 60), ("fedrep", 90), ("local", 5))
    ]
    before = [run(r, [10, v]) for r, v in (("fedper", 70), ("fedrep", 60), ("local", 5))]
    order = recount.ranks(column_of(runs(*before, *after)))
    assert order.before.idxmin() == "fedper" and order.after.idxmin() == "fedrep"


def test_a_rule_that_one_run_lacks_is_not_there():
    val = dict(val=[1, 2, 3])
    some = runs(
        run("fedper", [1, 2, 3], **val), run("fedrep", [1, 2, 2], **val), run("local", [1, 2, 1])
    )
    assert recount.without("best_val", some) == {COLUMN: "no validation data"}
    assert recount.without("after", some) == {COLUMN: "no evaluation after local training"}
    assert recount.without("last10", some) == {COLUMN: "at most 10 evaluations"}
    assert set(recount.recounted(some).rule) == {
        *(REPORTED, "last", "best_test", "before", "client", "pooled")
    }
    every = runs(*(run(r, [1, 2, 3], **val) for r in ("fedper", "fedrep", "local")))
    assert "best_val" in set(recount.recounted(every).rule)


def test_a_mean_that_one_row_lacks_is_no_rule_of_its_column():
    every = runs(
        *(run(r, [1, v], pooled=v) for r, v in (("fedper", 3), ("fedrep", 2), ("local", 1)))
    )
    rows = every.rows[(every.rows.row != "local") | (every.rows["average"] != "pooled")]
    some = dataclasses.replace(every, rows=rows)
    assert recount.without("pooled", every) == {}
    assert recount.without("pooled", some) == {COLUMN: "no pooled mean"}
    column = column_of(some)
    assert "pooled" not in set(column.rule) and recount.reversals(column).empty


def test_a_column_whose_runs_stand_in_another_one_is_left_out():
    numbers = recount.recounted(late_and_early(0, 1))
    again = numbers[numbers.seed == 0].assign(artefact="table2")
    both = pd.concat([numbers, again, numbers.assign(artefact="table3")])
    assert list(recount.comparable(both)) == [("fedaghn", "table1", COLUMN)]


def test_ranks_are_over_the_seeds_that_all_methods_have():
    more = late_and_early(0, 1)
    more = replace(more, rows=pd.concat([more.rows, run("local", [99] * 9, 2)]))
    column = column_of(more)
    assert set(column.seed) == {0, 1} and recount.ranks(column).last["local"] == 3


def test_orders_agree_or_not_by_kendalls_tau():
    tau, count = recount.taus([column_of(late_and_early(0, 1))])
    assert tau.loc["last", "best_test"] == pytest.approx(1 / 3)  # one pair of three is turned
    assert tau.loc["pooled", "best_test"] == pytest.approx(1 / 3)
    assert count.loc["last", "best_test"] == 1
    # That is one way to count here, and says nothing.
    assert count.loc["last", "before"] == 0 and np.isnan(tau.loc["last", "before"])


def test_only_reversals_beyond_noise_are_sure():
    found = recount.reversals(column_of(late_and_early(0, 1)))
    (line,) = found.itertuples()
    assert (line.rule, line.ahead, line.behind, line.sure) == (
        "best_test",
        "fedper",
        "fedrep",
        True,
    )
    assert line.reported.estimate == pytest.approx(10) and line.recounted.high < 0
    (single,) = recount.reversals(column_of(late_and_early(0))).itertuples()
    assert not single.sure
    rows = [run("fedper", [10, 60, 61 + 9 * s], s) for s in (0, 1)]
    rows += [run("fedrep", [10, 80 - 20 * s, 64 - 9 * s], s) for s in (0, 1)]
    noisy = recount.reversals(column_of(runs(*rows, *(run("local", [1, 1, 1], s) for s in (0, 1)))))
    assert len(noisy) and not noisy.sure.any()


# -- gains -----------------------------------------------------------------------------------------


def test_the_best_test_round_gains_what_it_is_above_the_others():
    some = late_and_early(0, 1)
    (line,) = recount.gains(column_of(some)).itertuples()
    each = [np.mean([0, 20 - 0.2 * s, 0.2 * s]) for s in (0, 1)]
    assert (line.against, line.of, line.methods, line.seeds) == ("last", "fedrep", 3, 2)
    assert line.gain.estimate == pytest.approx(np.mean(each)) and line.largest == pytest.approx(
        19.9
    )
    assert line.gain.low < line.gain.estimate < line.gain.high
    (single,) = recount.gains(column_of(late_and_early(0))).itertuples()
    assert np.isnan(single.gain.low)


def test_the_last_ten_of_a_short_run_are_most_of_it():
    assert recount.tails(runs(run("fedper", range(21)))) == [pytest.approx(9 / 20)]
    assert recount.tails(runs(run("fedper", range(10)))) == []


# -- claims ----------------------------------------------------------------------------------------


def first(evidence):
    return [evidence.ahead("fedper", "fedrep", COLUMN)]


CLAIM = Claim("FedPer is ahead of FedRep", "Table 1", "table1", first)


def test_a_verdict_that_flips_is_found():
    some = late_and_early(0, 1)
    some = replace(some, rows=some.rows.assign(profile="medium"))
    some = replace(some, paper=replace(some.paper, claims=(CLAIM,)))
    (line,) = recount.claims(some).to_dict("records")
    assert line[REPORTED] == line["last"] == line["pooled"] == "holds"
    assert line["best_test"] == "contradicted"
    # What its runs lack has no verdict.
    assert not {"best_val", "after", "last10", "averaged"} & set(line)


def test_a_claim_whose_numbers_no_rule_changes_is_left_out():
    some, known = late_and_early(0, 1), []

    def weights(evidence):  # as of a claim on weights
        return known or (known.extend(first(evidence)) or known)

    claims = (replace(CLAIM, judge=weights), CLAIM)
    some = replace(some, rows=some.rows.assign(profile="medium"))
    found = recount.claims(replace(some, paper=replace(some.paper, claims=claims)))
    assert len(found) == 1 and found["best_test"].tolist() == ["contradicted"]


def test_one_seed_claims_nothing():
    some = late_and_early(0)
    assert recount.claims(replace(some, paper=replace(some.paper, claims=(CLAIM,)))).empty


# -- beside the printed numbers --------------------------------------------------------------------


def test_as_the_paper_counts_leads_are_as_far_from_print_as_every_lead_says():
    read = {r.paper.key: r for r in recount.best_runs("medium", artefacts=["table3"])}
    some = read["fedaghn"]
    assert some.profile == "medium"
    found = recount.distances(some)
    said = report.every("fedaghn").leads
    said = said[(said.table == "table3") & said.difference.notna()]
    for column, of in said.groupby("column"):
        here = found[found.column == column].set_index("rule")
        assert here.points[REPORTED] == pytest.approx(of.difference.abs().mean())
        assert (here.leads == len(of)).all() and (here.noise > 0).all()
        assert here.points["before"] > here.points["after"] == here.points[REPORTED]
    assert set(found.column) == set(said.column) == {"CIFAR-10", "CIFAR-100"}


def test_runs_on_other_data_have_no_distance_from_print():
    assert recount.distances(late_and_early(0, 1)).empty
    assert recount.distances(runs(run("fedper", [1, 2]), artefact="fig4")).empty


# -- settings --------------------------------------------------------------------------------------


def test_averaged_statistics_take_the_place_of_local_ones():
    named = "fedper (BatchNorm averaged)"
    rows = [
        run(r, [10, v + s], s)
        for r, v in (("fedper", 60), ("fedrep", 70), ("local", 50))
        for s in (0, 1)
    ]
    some = runs(*rows, *(run(named, [10, 80 + s], s) for s in (0, 1)))
    some = replace(some, rows=some.rows.assign(profile="medium"))
    order = recount.ranks(column_of(some))
    assert order.averaged.to_dict() == {"fedrep": 2, "fedper": 1, "local": 3}
    assert order.last["fedper"] == 2
    (line,) = recount.other_settings(some).itertuples()
    assert line.row == "fedper" and line.gain.estimate == pytest.approx(20)
    # And in verdicts: rows that were not run so stay.
    ahead = replace(some, paper=replace(some.paper, claims=(CLAIM,)))
    (judged,) = recount.claims(ahead).to_dict("records")
    assert judged[REPORTED] == "contradicted" and judged["averaged"] == "open: still moves"


def test_settings_that_papers_leave_open_stand_beside_the_row_that_they_change():
    made_up = {"perfedavg": 70, "perfedavg (one step)": 50, "pfedme": 70, "pfedme (w scored)": 45}
    rows = [run(row, [10, v + 3 * s], s) for row, v in made_up.items() for s in (0, 1)]
    got = recount.other_settings(runs(*rows, run("fedavg (at 0.1)", [10, 20]))).set_index("row")
    assert {row: g.estimate for row, g in got.gain.items()} == {"perfedavg": -20, "pfedme": -25}
    assert got.what["perfedavg"] == "adapted for one step, not an epoch"
    assert got.what["pfedme"] == "w tested, not the personal model"


def test_averaged_statistics_of_one_seed_are_ranked_on_that_seed_alone():
    # FedRep is behind on seed 0, where averaged FedPer was run, and ahead over both seeds.
    made_up = {("fedrep", 0): 70, ("fedrep", 1): 90, ("local", 0): 10, ("local", 1): 20}
    rows = [run(r, [10, v], s) for (r, s), v in made_up.items()]
    rows += [run("fedper", [10, 50], s) for s in (0, 1)]
    order = recount.ranks(column_of(runs(*rows, run("fedper (BatchNorm averaged)", [10, 75]))))
    assert order.averaged.to_dict() == {"fedrep": 2, "fedper": 1, "local": 3}


@pytest.mark.parametrize("validated", [True, False])
def test_each_method_at_its_best_rate(validated):
    made_up = {("fedper", 0.02): 70, ("fedper", 0.1): 60, ("fedrep", 0.02): 65, ("fedrep", 0.1): 80}
    rows = []
    for (row, rate), value in made_up.items():
        val = [0, 100 - value] if validated else ()  # validation says the opposite
        rows.append(run(row, [0, value], column=f"lr {rate:g}", val=val))
    rates = {"lr 0.02": 0.02, "lr 0.1": 0.1}
    some = runs(*rows)
    some = replace(some, paper=replace(some.paper, rates=rates))
    got = recount.tuned(some)
    assert got["lr 0.02"].to_dict() == {"fedper": 70, "fedrep": 65}
    want = {"fedper": 60, "fedrep": 65} if validated else {"fedper": 70, "fedrep": 80}
    assert got.own.to_dict() == want and set(got.chosen) == {"val" if validated else "test"}
    assert recount.comparable(recount.recounted(some), 2) == {}
    for rate in (0.02, 0.1):  # FedAvg after local training, which has no rate of its own to choose
        for when in ("before", "after"):
            val = [0, 50] if validated else ()
            rows.append(run("fedavg", [0, 50], column=f"lr {rate:g}", when=when, val=val))
    more = recount.tuned(replace(some, rows=runs(*rows).rows))
    assert more.own.loc[["fedper", "fedrep"]].to_dict() == want


def test_runs_that_choose_rates_are_read_as_columns_of_rates(monkeypatch):
    rates = {"fedavg": (0.1, 0.05), "pfedhn": (0.05,), "relu_norm": (0.05,)}
    rows = pd.concat(
        run(f"{row}, rate {rate:g}", [0, 100 * rate], val=[0, 50])
        for row, each in rates.items()
        for rate in each
    )
    rows = rows.assign(column="MNIST, N=50")
    full = papers.Scope("paper")
    monkeypatch.setattr(recount.fullest, "best", lambda paper, scope, artefact: (full, rows))
    of_paper = [Runs(papers.paper("pfedhn"), a, rows) for a in ("table1", "table3", "fig5")]
    (got,) = recount.tunings(of_paper)
    assert got.name == "pFedHN, Table 3" and set(got.rows.row) == {"fedavg", "pfedhn"}
    assert set(got.rows.column) == {"lr 0.05"}, "0.1 was not tried for all"
    assert recount.tuned(got)["lr 0.05"].to_dict() == {"fedavg": 5, "pfedhn": 5}
    monkeypatch.setattr(recount.fullest, "best", lambda paper, scope, artefact: None)
    assert recount.tunings(of_paper) == []


def test_nothing_is_said_of_settings_that_were_not_run():
    some = late_and_early(0, 1)
    assert recount.tuned(some).empty and recount.other_settings(some).empty
    assert "averaged" not in set(recount.recounted(some).rule)


# -- the best evidence, and the page ----------------------------------------------------------------


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Made-up rows as if they were all that is committed."""
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "results")
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    return tmp_path / "results"


def flayer(profile, dataset, high):
    about = dict(paper="flayer", artefact="table2", profile=profile, dataset=dataset)
    rows = [
        run(r, [10, v, v - 1], s, column="CIFAR-10, CNN", **about)
        for r, v in (("fedavg", 50), ("fedala", high), ("flayer", 70))
        for s in (0, 1)
    ]
    return pd.concat(rows).assign(run=lambda f: profile + f.run)


def test_runs_of_medium_are_shown_as_soon_as_there_are_some(results):
    made.publish(results, flayer("quick", "digits", 60), "flayer")
    (found,) = recount.best_runs()
    assert (found.profile, found.name) == ("quick", "FLAYER, Table 2")
    assert recount.best_runs("medium") == []
    made.publish(results, flayer("medium", "cifar10", 90), "flayer", "medium", "paper")
    (found,) = recount.best_runs()
    assert found.profile == "medium" and set(found.rows.dataset) == {"cifar10"}
    assert len(recount.best_runs("medium", artefacts=["table2"])) == 1
    assert recount.best_runs(artefacts=["table1"]) == []
    (few,) = recount.best_runs(seeds=[1], methods=["fedavg", "fedala"])
    assert set(few.rows.seed) == {1} and set(few.rows.row) == {"fedavg", "fedala"}


@pytest.fixture
def page(results, monkeypatch):
    """(profile) -> a page, and what it displays as text."""
    said = []
    monkeypatch.setattr("IPython.display.display", lambda shown: said.append(shown.data))
    return lambda profile="quick": (WhatHolds(profile), said)


def test_seeds_are_counted_by_row(results, page):
    rows = flayer("quick", "digits", 60)
    more = rows[(rows.row == "fedavg") & (rows.seed == 1)]
    more = more.assign(seed=2, run=more.run + " more")
    made.publish(results, pd.concat([rows, more]), "flayer")
    whole, _ = page()
    assert whole.evidence().loc["FLAYER", "seeds"] == "2 to 3 seeds", "not 3, which one row has"


def test_a_rule_is_nearer_to_print_by_more_than_the_noise_or_not(results, page, monkeypatch):
    made.publish(results, flayer("quick", "digits", 60), "flayer")
    far = [("A", REPORTED, 5.0), ("A", "after", 1.0), ("B", REPORTED, 2.0), ("B", "after", 1.0)]
    found = pd.DataFrame(far, columns=["column", "rule", "points"]).assign(leads=3, noise=1.5)
    monkeypatch.setattr(recount, "distances", lambda runs: found)
    whole, said = page()
    assert len(whole.nearest()) == 2
    assert any(
        "in 2 of 2 columns, in 1 of them by more than the noise" in t for t in map(str, said)
    )


def test_the_page_says_what_its_rows_stand_for(results, page):
    made.publish(results, flayer("quick", "digits", 60), "flayer")
    whole, said = page()
    assert whole.evidence().loc["FLAYER", "seeds"] == "2 seeds"
    assert "runs on digits only" in said[-1]
    for show in (
        whole.ranks,
        whole.leaders,
        whole.agreement,
        whole.claims,
        whole.nearest,
        whole.settings,
    ):
        show()
    assert not whole.reversals().size and said[-1].endswith("sides of 0: 0.")
    assert list(whole.gains()["above last round"]) == ["+1.0 [+1.0, +1.0]"]
    assert any("*best val.* in FLAYER, Table 2 (no validation data)" in str(text) for text in said)
    kept = {path.name for path in (places.figures_folder() / "what_holds/quick").glob("*.png")}
    assert kept == {"ranks-digits.png", "agreement.png", "gains.png"}
    assert whole.finish().startswith("6 runs read, none trained")


def test_the_papers_data_and_digits_are_counted_apart(results, page):
    made.publish(results, flayer("quick", "digits", 60), "flayer")
    made.publish(results, flayer("medium", "cifar10", 60), "flayer", "medium", "paper")
    whole, said = page()
    both = {key: c for key, c in whole.columns.items()}
    assert {c.profile.iloc[0] for c in both.values()} == {"medium"}  # the fuller one is shown
    whole.columns |= {
        ("flayer", "table1", "digits"): next(iter(both.values())).assign(profile="quick")
    }
    whole.leaders()
    whole.reversals()
    heads = [text for text in map(str, said) if text.startswith("**")]
    assert [h.split(".**")[0] for h in heads] == ["**The papers' data", "**Digits"] * 2
    assert all("of 1 columns" in h for h in heads[:2])


def test_a_page_without_rows_claims_nothing(page):
    empty, said = page("paper")
    for show in "evidence ranks leaders agreement reversals claims nearest gains settings".split():
        shown = getattr(empty, show)()
        assert shown is None or not len(shown)
    assert "nothing claimed" in said[0] and not any("reversals" in str(text) for text in said)
    with pytest.raises(ValueError, match="profile: 'big'"):
        WhatHolds("big")


def test_a_change_of_rank_has_a_colour_and_its_number(page):
    column = column_of(late_and_early(0, 1))
    ax = Figure().subplots()
    rank_figures.ranks(recount.ranks(column), set(column.rule[column.same]), ax, 3)
    names = [text.get_text() for text in ax.get_xticklabels()]
    assert names[:4] == ["last round*", "last ten", "best val.", "best test"]
    colours = ax.images[0].get_array()
    assert colours[:, 3].tolist() == [-1, 1, 0] and colours[:, 0].tolist() == [0, 0, 0]
    assert len(ax.patches) == 9  # three methods lack three rules
    assert [t.get_text() for t in ax.texts].count("1") == 5


def test_a_method_that_a_rule_lacks_gives_the_others_no_colour():
    order = pd.DataFrame({recount.REPORTED: [1.0, 2, 3], "pooled": [1.0, None, 2]}, [*"abc"])
    ax = Figure().subplots()
    rank_figures.ranks(order, set(), ax, 3)
    at = [text.get_text() for text in ax.get_xticklabels()].index("pooled")
    colours = np.ma.filled(ax.images[0].get_array()[:, at], np.nan)
    np.testing.assert_array_equal(colours, [0, np.nan, 0])
    assert [t.get_text() for t in ax.texts] == ["1", "2"]
