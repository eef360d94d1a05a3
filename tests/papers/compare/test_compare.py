"""Published beside reproduced: labels meet, verdicts follow their rule, orderings and paired tests say what they should."""

import dataclasses
import functools
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest

from pfl_core.analysis import select
from pfl_core.analysis.plots import label
from pfl_core.data import pools as data
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.metrics import ROW_COLUMNS
from pfl_papers import places
from pfl_papers.compare import judged, overview, readable, report
from pfl_papers.compare.readable import Table
from pfl_papers.compare.report import compare, standing
from pfl_papers.evidence import committed
from pfl_papers.evidence import contrasts as evidence
from pfl_papers.evidence.contrasts import READ_AFTER, reproduced
from pfl_papers.notebook import drawing
from pfl_papers.papers import base as papers
from pfl_papers.papers import overrides
from pfl_papers.papers.base import reported
from tools import pages

COLUMN = "Dir(0.1), CIFAR-10"  # of FedAGHN's Table 1


def run(
    row, values, *, seed=0, column=COLUMN, profile="paper", when="after", val=None, method=None
):
    """Rows of one run of FedAGHN's Table 1: test accuracy (and the validation accuracy that chooses) by round."""
    base = dict.fromkeys(ROW_COLUMNS, "") | dict(
        paper="fedaghn", artefact="table1", row=row, column=column, seed=seed
    )
    base |= dict(
        run=f"{row}/{column}/{seed}",
        method=method or row,
        metric="acc_pct",
        profile=profile,
        dataset="cifar10",
    )
    out = []
    for part, series in (("test", values), ("val", val or values)):
        for r, v in enumerate(series):
            out.append(
                base | {"rounds": r, "when": when, "split": part, "average": "client", "value": v}
            )
    return pd.DataFrame(out, columns=ROW_COLUMNS)


class Given(committed.Part):
    """A part whose rows were given; each is another one, though they are named alike."""

    __eq__, __hash__ = object.__eq__, object.__hash__

    def rows(self):
        return self.held


def part_of(rows, profile="paper"):
    part = Given("fedaghn", profile, "paper", places.results_folder())
    part.held = rows
    return part


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "none")
    return tmp_path / "runs"


def join(*frames):
    return pd.concat(frames, ignore_index=True)


def cell(compared, row, column=COLUMN):
    return compared[(compared.row == row) & (compared.column == column)].iloc[0]


SAID = reported("fedaghn").query("table == 'table1' and column == @COLUMN").set_index("row").value


def test_every_published_cell_is_there_and_only_what_was_run_has_a_number():
    got = compare(run("fedaghn", [80.0]), "fedaghn", "table1")
    said = reported("fedaghn").query("table == 'table1'")
    assert len(got) == len(said) == 128 and list(dict.fromkeys(got.column)) == list(
        dict.fromkeys(said.column)
    )
    assert cell(got, "fedaghn").reproduced == 80 and got.reproduced.notna().sum() == 1
    assert set(got[got.reproduced.isna()].verdict) == {"not run"}
    assert cell(got, "ditto").reported == SAID["ditto"]


def test_a_row_of_ours_changes_no_interval_of_the_papers():
    printed = join(*(seeds(r, (SAID[r], SAID[r] + 1)) for r in ("ditto", "fedrep", "local")))
    both = join(printed, seeds("ours", (SAID["local"], SAID["local"] - 30)))
    alone, beside = (compare(rows, "fedaghn", "table1") for rows in (printed, both))
    for row in ("ditto", "fedrep", "local"):
        pd.testing.assert_series_equal(cell(alone, row), cell(beside, row))


def test_a_global_model_changes_no_interval_of_personal_ones():
    own = join(*(seeds(r, (SAID[r], SAID[r] + 1, SAID[r] + 0.2)) for r in ("ditto", "fedrep")))
    both = join(own, seeds("fedavg", (50.0, 40.0, 60.0), when="before"))
    alone, beside = (compare(rows, "fedaghn", "table1") for rows in (own, both))
    for row in ("ditto", "fedrep"):
        pd.testing.assert_series_equal(cell(alone, row), cell(beside, row))
    assert cell(beside, "fedavg").high - cell(beside, "fedavg").low > 20  # its own spread


def test_mean_and_sd_over_seeds_at_the_round_that_validation_chooses():
    rows = join(*(run("fedaghn", [10, 70 + 2 * s, 90], val=[1, 9, 5], seed=s) for s in range(3)))
    got = cell(compare(rows, "fedaghn", "table1"), "fedaghn")
    assert (got.reproduced, got.sd, got.n) == (72, 2, 3)
    assert got.difference == pytest.approx(72 - SAID["fedaghn"])
    last = cell(compare(rows, "fedaghn", "table1", select="last"), "fedaghn")
    assert last.reproduced == 90


def test_global_rows_are_read_before_local_training_and_give_their_view_after_it():
    rows = join(
        run("fedavg", [40.0], when="before"),
        run("fedavg", [70.0], when="after"),
        run("fedaghn", [80.0]),
    )
    got = reproduced(rows, papers.paper("fedaghn")).set_index("row").value
    assert dict(got) == {"fedavg": 40, "fedavg_ft": 70, "fedaghn": 80}


def test_a_row_of_ours_stands_at_the_end_of_its_column():
    got = compare(
        join(run("fedaghn", [80.0]), run("fedaghn (descent)", [81.0], method="fedaghn")),
        "fedaghn",
        "table1",
    )
    own = got[got.column == COLUMN]
    assert own.row.iloc[-1] == "fedaghn (descent)" and own.verdict.iloc[-1] == "no published number"
    assert len(got) == 129


# ---------------------------------------------------------------- like with like


@functools.cache
def planned(row):
    found = papers.paper("fedaghn").planned(papers.Scope("paper"), "table1")
    tags = dict(row=row, column=COLUMN)
    return next(e for s in found for e in s.experiments() if tags.items() <= e.tags.items())


def paper_run(row="fedaghn", **changes):
    """The Experiment of profile paper, with changes."""
    return planned(row).but(**changes)


@pytest.mark.parametrize(
    ("changes", "other"),
    [
        ({}, []),
        (dict(rounds=20, max_samples=800, lr=0.1, seed=7), []),  # what medium cuts, and more
        (dict(dataset="cifar100"), ["data"]),
        (dict(model="cnn"), ["network"]),
        (dict(partition_args={"alpha": 0.5}), ["partition"]),
        (dict(clients=10, dataset="digits"), ["data", "clients"]),
    ],
)
def test_only_like_cells_stand_beside_published_ones(changes, other, monkeypatch):
    monkeypatch.setattr(committed, "experiment", lambda run: paper_run(**changes))
    rows = join(run("fedaghn", [70.0]), run("ditto", [75.0]))
    assert report.unlike(papers.paper("fedaghn"), "table1", "fedaghn", COLUMN, "id") == other
    got = compare(rows, "fedaghn", "table1")
    ran = got[got.reproduced.notna()]
    assert ran.difference.notna().all() == ran.reported.notna().all() == (not other)
    assert set(ran.column) == {COLUMN} if not other else COLUMN not in set(ran.column)
    assert len(got[got.reported.notna()]) == 128  # what is published stays


def test_the_picture_says_what_copies_of_data_lack():
    assert committed.lacks("cifar10") == pytest.approx(1135 / 60_000)
    assert committed.lacks("fashion_mnist") == committed.lacks("digits") == 0
    assert "samples missing here: AG News 88 %, CIFAR-10 2 %" in " ".join(
        overview.said(overview.ran())
    )


def test_a_column_that_only_we_have_says_what_no_run_of_the_paper_has(monkeypatch):
    sweep, *_ = papers.paper("pfedhn").planned(papers.Scope("quick"), "fig6")
    ours = next(iter(sweep.experiments()))
    monkeypatch.setattr(committed, "experiment", lambda run: ours)
    rows = run(ours.tags["row"], [70.0], column="CIFAR-10, N=10")
    said = report.scale("pfedhn", rows, "fig6")
    assert said.startswith("6 % of the paper's rounds; other data, network, clients than the")
    assert said.endswith("at most 50 images a client")


def test_columns_of_ours_say_what_was_used(monkeypatch):
    changed = paper_run(dataset="digits", clients=10)
    monkeypatch.setattr(committed, "experiment", lambda run: changed)
    rows = run("fedaghn", [70.0])
    assert set(compare(rows, "fedaghn", "table1").dropna(subset=["reproduced"]).column) == {
        f"{COLUMN}: on digits"
    }
    assert report.scale("fedaghn", rows, "table1") == "other data, clients than the paper's"
    monkeypatch.setattr(committed, "experiment", lambda run: paper_run(clients=10))
    (text,) = report.reading(rows := join(rows, run("ditto", [75.0])), "fedaghn", "table1")
    assert text.endswith("Run with other clients: not held against the paper's numbers.")
    monkeypatch.setattr(committed, "experiment", lambda run: paper_run(rounds=20, max_samples=800))
    said = report.scale("fedaghn", rows, "table1")
    assert said == "10 % of the paper's rounds; at most 800 images a client"


def test_captions_do_not_give_a_paper_rounds_that_it_does_not_state(monkeypatch):
    (sweep,) = papers.paper("pfedla").planned(papers.Scope("quick"), "fig1")
    ours = next(iter(sweep.experiments()))
    monkeypatch.setattr(committed, "experiment", lambda run: ours)
    rows = run(ours.tags["row"], [70.0], column=ours.tags["column"])
    said = report.scale("pfedla", rows, "fig1")
    assert said.startswith(
        "20 % of our rounds at profile paper (the article gives none); other data"
    )
    assert "the paper's rounds" not in said


def seeds(row, values, **kw):
    return join(*(run(row, [v], seed=s, **kw) for s, v in enumerate(values)))


def test_verdicts_of_cells_come_from_seeds():
    near, far = SAID["fedaghn"], SAID["ditto"] + 20
    rows = join(
        seeds("fedaghn", (near, near + 0.1, near - 0.1)),
        seeds("ditto", (far, far + 0.1, far - 0.1)),
        seeds("fedrep", (50.0, 50.2, 49.9)),
    )
    got = compare(rows, "fedaghn", "table1")
    assert cell(got, "fedaghn").verdict == "inside" and cell(got, "ditto").verdict == "outside"
    assert cell(got, "ditto").reason == "full budget" and cell(got, "ditto").decided
    low, high = cell(got, "ditto").difference_low, cell(got, "ditto").difference_high
    assert low < cell(got, "ditto").difference < high
    one = cell(compare(run("fedaghn", [near]), "fedaghn", "table1"), "fedaghn")
    assert (one.verdict, one.reason) == ("open", "one seed") and np.isnan(one.low)
    for profile in ("smoke", "quick"):
        small = compare(seeds("fedaghn", (1, 2), profile=profile), "fedaghn", "table1")
        assert cell(small, "fedaghn").verdict == "not judged"


@pytest.mark.parametrize(("most", "share"), [(800, 1.0), (0, 0.12)])
def test_a_gap_says_that_samples_are_missing_and_is_not_decided(most, share, monkeypatch):
    monkeypatch.setattr(committed, "experiment", lambda run: paper_run(max_samples=most))
    monkeypatch.setattr(committed, "share_of", lambda run: share)
    below, above = SAID["fedaghn"] - 20, SAID["ditto"] + 20
    rows = join(
        seeds("fedaghn", (below, below + 0.1, below - 0.1)),
        seeds("ditto", (above, above + 0.1, above - 0.1)),
    )
    got = compare(rows, "fedaghn", "table1")
    for row in ("fedaghn", "ditto"):
        found = cell(got, row)
        assert (found.verdict, found.reason, found.decided) == ("outside", "fewer samples", False)


def test_a_run_that_serves_two_columns_has_its_own_last_round_in_each():
    other = "Dir(0.5), CIFAR-10"
    here = run("fedaghn", [70.0, 60.0], val=[2.0, 1.0])
    there = run("fedaghn", [90.0, 80.0], val=[2.0, 1.0], column=other)
    got = compare(join(here, there.assign(run=here.run.iloc[0])), "fedaghn", "table1")
    assert cell(got, "fedaghn").reproduced == 70 and cell(got, "fedaghn", other).reproduced == 90
    assert cell(got, "fedaghn")["last"] == 60 and cell(got, "fedaghn", other)["last"] == 80


def test_where_a_paper_prints_training_accuracy_ours_is_judged_beside_it():
    cells = judged.of_paper("flayer", "accuracy")
    text = cells[cells.metric == "train_acc_pct"].dropna(subset=["reproduced"])
    assert set(text.column) == {"AG News, fastText"} and set(text.verdict) <= set(report.WORDS)
    ahead = judged.of_paper("flayer", "lead").set_index("metric").loc["train_acc_pct"]
    assert len(ahead) == len(text) - 1 and set(ahead.verdict) <= set(report.WORDS)
    runs = committed.parts("flayer")["flayer.medium-paper"].rows().groupby("dataset").run.first()
    share = runs.map(committed.share_of)
    assert share["ag_news"] < 0.2 and 0.95 < share["cifar10"] < 1.0


def test_advantages_are_differences_of_rows_of_a_column():
    # Seed 1 draws easy clients: all rows gain 6 points, and no single accuracy says much.
    gap = SAID["fedaghn"] - SAID["ditto"]
    rows = join(
        seeds("fedaghn", (70.5, 76.0, 69.7)),
        seeds("ditto", (69.2, 76.2, 69.4)),
        seeds("local", (50.0, 56.0, 50.2)),
        seeds("a row of ours", (1.0, 2.0, 3.0)),
    )
    single = compare(rows, "fedaghn", "table1")
    got = report.advantages(rows, "fedaghn", "table1").set_index("row")
    assert got.verdict.to_dict() == {"ditto": "too small to tell", "local": "ahead"}
    assert got.extent.to_dict() == {"ditto": "", "local": "larger"}
    assert got.reported.ditto == pytest.approx(gap)
    assert got.reproduced.local == pytest.approx(20)
    assert (got.n == 3).all() and (got.low < got.reproduced).all()
    alone = cell(single, "ditto")
    assert alone.high - alone.low > 3 * (got.high.ditto - got.low.ditto)
    text = Table(got.reset_index(), "A caption.").markdown()
    assert "too small to tell" in text and "Bold" not in text and "**" not in text


def test_there_are_no_advantages_where_nothing_is_the_papers(monkeypatch):
    rows = join(seeds("fedaghn", (70.0, 70.4)), seeds("ditto", (75.0, 75.2)))
    assert len(report.advantages(rows, "fedaghn", "table1")) == 1
    assert report.advantages(rows[rows.row == "ditto"], "fedaghn", "table1").empty
    assert report.advantages(rows.assign(profile="smoke"), "fedaghn", "table1").empty
    monkeypatch.setattr(committed, "experiment", lambda run: paper_run(dataset="digits"))
    assert report.advantages(rows, "fedaghn", "table1").empty


def test_a_lead_over_a_row_that_has_not_learned_is_open(monkeypatch):
    monkeypatch.setattr(evidence, "majority", lambda run, mean: 60.0)
    rows = join(seeds("fedaghn", (60.0, 60.4)), seeds("ditto", (75.0, 75.1)))
    (line,) = report.advantages(rows, "fedaghn", "table1").to_dict("records")
    assert (line["verdict"], line["reason"]) == ("open", "not learned")


# ---------------------------------------------------------------- to read


def test_a_table_to_read_has_names_intervals_and_the_best_in_bold():
    rows = join(
        seeds("fedaghn", (70.0, 70.4)), seeds("ditto", (75.0, 75.2)), seeds("local", (74.9, 75.1))
    )
    table = Table(compare(rows, "fedaghn", "table1"), "A caption.", 1)
    assert list(table.text().columns) == [
        (COLUMN, k) for k in ("reported", "ours", "ours, last round", "difference", "verdict")
    ]
    assert set(table.text().index) == {label(r) for r in SAID.index}
    text = table.markdown()
    assert text.startswith("A caption.\n") and "95 % intervals over seeds" in text
    bold = {line.split(" | ")[0] for line in text.splitlines() if "**" in line}
    assert bold == {"| Ditto", "| Local"}  # FedAGHN is beyond the best one's interval
    assert COLUMN not in table.not_run() and len(table.not_run().columns) == 7
    page = table._repr_html_()
    assert "<details>" in page and "<b>75.1 [" in page and "A caption." in page


def test_a_table_without_runs_shows_what_is_published():
    table = Table(compare(run("fedaghn", [1.0]).iloc[:0], "fedaghn", "table1"))
    assert table.ran == [] and len(table.not_run().columns) == 8 and "ours" not in table.markdown()


def test_texts_of_others_are_shown_as_text():
    table = Table(compare(run("<b>x</b>", [1.0]), "fedaghn", "table1"), "<script>")
    assert "<script>" not in table._repr_html_() and "<b>x" not in table._repr_html_()


def test_claims_stand_in_one_form_and_those_not_run_are_folded():
    line = dict(source="Table 1", limit="", kind="headline", reason="", scale="", status="")
    claims = pd.DataFrame(
        [
            line | dict(says="a < b", verdict="holds", why="+1.0", scale="10 % of the rounds"),
            line | dict(says="c", verdict="open", reason="too wide", why="+0.1", limit="ours"),
            line | dict(says="d", verdict="not run", why=""),
        ]
    )
    shown = readable.Claims(claims)
    assert shown.text()["the paper says"].tolist() == ["a < b (Table 1)", "c (Table 1; ours)"]
    assert shown.text().verdict.tolist() == ["holds", "open: too wide"]
    page = shown._repr_html_()
    assert "a &lt; b" in page and "+1.0 (10 % of the rounds)" in page
    assert page.index("<details>") < page.index("d (Table 1)") and "not run: 1" in page
    assert "No claims" in readable.Claims(claims[:0])._repr_html_()
    assert repr(shown).splitlines()[2] == "d (Table 1): not run"


def test_verdicts_are_counted_in_words():
    words = pd.Series(["outside", "inside", "open", "inside", "not run", "ahead"])
    assert report.counted(words) == "2 inside, 1 outside, 1 open, 1 ahead"


def test_a_reading_names_the_leader_and_what_is_level_with_it():
    rows = join(
        seeds("fedaghn", (70.0, 70.4, 70.1)),
        seeds("ditto", (75.0, 75.3, 75.2)),
        seeds("local", (75.1, 75.0, 75.2)),
    )
    (text,) = report.reading(rows, "fedaghn", "table1")
    assert text.startswith(f"**{COLUMN}.** Ditto has the highest mean (75.2 %). The next is Local")
    assert "Local ties with it." in text and "Kendall's tau" in text
    assert "In the paper FedAGHN is best" in text and "here Ditto is" in text
    assert report.reading(rows.assign(profile="smoke"), "fedaghn", "table1") == []
    (one,) = report.reading(rows[rows.seed == 0], "fedaghn", "table1")
    assert "one seed does not say" in one
    # Beside a row of ours alone, a printed one has nothing to lead.
    beside = join(seeds("fedaghn", (70.0, 70.4)), seeds("fedaghn (ours)", (75.0, 75.3)))
    (alone,) = report.reading(beside, "fedaghn", "table1")
    assert "In the paper" not in alone and "what our runs predict" in alone


@pytest.mark.slow
def test_every_cell_takes_the_fullest_profile_and_none_below_medium(home, monkeypatch):
    monkeypatch.setattr(committed, "experiment", lambda run: paper_run())
    near = SAID["fedaghn"]
    by_profile = {"quick": 10.0, "medium": near - 3, "paper": near}
    parts = {
        p: part_of(seeds("fedaghn", (v, v + 0.2), profile=p), p) for p, v in by_profile.items()
    }
    parts["medium"].held = join(
        seeds("fedaghn", (near - 3, near - 3.2), profile="medium"),
        *(seeds(r, (SAID[r], SAID[r] + 1), profile="medium") for r in ("ditto", "fedrep", "local")),
    )
    monkeypatch.setattr(committed, "parts", lambda name: parts if name == "fedaghn" else {})
    cells = report.every("fedaghn").cells
    assert len(cells) == 216 and cells.comparable.all()
    ran = cells.dropna(subset=["reproduced"]).set_index("row")
    assert set(ran.index) == {"fedaghn", "ditto", "fedrep", "local"}
    assert ran.profile.to_dict()["fedaghn"] == "paper" and ran.profile.ditto == "medium"
    monkeypatch.setattr(pages, "PICTURE", home.parent / "picture.png")
    png, csv = pages.picture()
    drawn = pd.read_csv(csv)
    assert png.stat().st_size > 5000 and len(drawn) == 3
    said = pages.picture_section().replace("\n", " ")
    assert "1 printed lead above 2 points over personal methods" in said


@pytest.mark.parametrize("lost", [(), ("local",), ("fedaghn",), ("ditto", "local")])
def test_every_number_is_judged_as_its_table_is_where_runs_diverged(monkeypatch, lost):
    monkeypatch.setattr(committed, "experiment", lambda run: paper_run())
    rows = join(*(seeds(row, (70.0, 71.0)) for row in ("fedaghn", "ditto", "local")))
    gone = rows[rows.row.isin(lost) & (rows.seed == 1)].drop_duplicates("run")
    ended = gone.assign(average="derived", metric="diverged", when="", split="")
    rows = join(rows[~rows.run.isin(gone.run)], ended)
    part = part_of(rows)
    monkeypatch.setattr(committed, "parts", lambda name: {"paper": part})
    every, table = report.every("fedaghn"), compare(rows, "fedaghn", "table1")
    cells = every.cells[every.cells.table == "table1"].set_index(["row", "column"])
    for row in ("fedaghn", "ditto", "local"):
        shown = cell(table, row)
        assert cells.verdict[row, COLUMN] == shown.verdict
        assert shown.verdict.startswith("diverges") == (row in lost)
    leads = report.advantages(rows, "fedaghn", "table1")
    of = set() if "fedaghn" in lost else {"ditto", "local"} - {*lost}
    assert set(leads.row) == of
    there = every.leads[every.leads.table == "table1"]
    assert list(there.row) == list(leads.row) and list(there.verdict) == list(leads.verdict)


@pytest.mark.parametrize(("full", "shown"), [((90.0,), "medium"), ((90.0, 91.0), "paper")])
def test_a_seed_of_profile_paper_waits_for_the_next_one(monkeypatch, full, shown):
    monkeypatch.setattr(committed, "experiment", lambda run: paper_run())
    both, others = (90.0, 91.0), [r for r in SAID.index if r not in (*READ_AFTER, "fedaghn")]

    def rows(profile, values):
        # Local may have more seeds than the others.
        had = {r: [v - 20 for v in (both if r == "local" else values)] for r in others}
        each = [seeds(r, v, profile=profile) for r, v in had.items()]
        return join(seeds("fedaghn", values, profile=profile), *each)

    of = {"medium": rows("medium", both), "paper": rows("paper", full)}
    monkeypatch.setattr(
        committed, "parts", lambda name="", **kw: {p: part_of(r, p) for p, r in of.items()}
    )
    judged._claims.cache_clear()  # of what results/ holds, which is not what is asked here
    ran = report.every("fedaghn").cells.dropna(subset=["reproduced"])
    assert {"fedaghn", "local"} <= set(ran.row) and set(ran.profile) == {shown}
    claimed = judged.claims("fedaghn").query("reason != 'rows missing'")
    assert set(claimed[claimed.verdict != "not run"].profile) == {shown}
    judged._claims.cache_clear()


def test_contradictions_are_pairs_of_which_two_papers_print_opposite_orders():
    got = report.contradictions()
    assert {"ahead", "behind", "FLAYER"} <= set(got) and len(got)
    for line in got.to_dict("records"):
        shares = [Fraction(v.replace(" of ", "/")) for k, v in line.items() if " of " in str(v)]
        assert max(shares) >= 0.75 and min(shares) <= 0.25


def test_tables_of_two_header_lines_are_saved_in_one(tmp_path):
    got = Table(compare(run("fedaghn", [70.0]), "fedaghn", "table1")).text()
    report.save_table(got, tmp_path / "t")
    head = (tmp_path / "t.csv").read_text().splitlines()[0]
    assert head.startswith('method,"Dir(0.1), CIFAR-10: reported"')
    assert r"Dir(0.1), CIFAR-10" in report.latex(got)
    back = pd.read_csv(tmp_path / "t.csv", keep_default_na=False)
    assert len(back) == len(got) and (tmp_path / "t.md").read_text().count("\n") == len(got) + 2


def clients_of(row, acc, seed=0):
    return pd.DataFrame(
        dict(row=row, column=COLUMN, seed=seed, client=range(len(acc)), acc_pct=acc)
    )


def test_standing_ranks_and_tests_client_by_client():
    rows = join(run("fedaghn", [80.0]), run("ditto", [79.0]), run("local", [85.0]))
    rng = np.random.default_rng(0)
    base = rng.uniform(60, 90, 20)
    clients = join(
        clients_of("fedaghn", base),
        clients_of("ditto", base - rng.uniform(1, 3, 20)),
        clients_of("local", base + 5),
    )
    got = standing(rows, "fedaghn", "table1", clients)
    assert got["rank"].tolist() == [1, 2, 3] and got.index.tolist() == ["Local", "FedAGHN", "Ditto"]
    assert got["rank reported"].tolist() == [3, 1, 2]
    ditto, local = got.loc["Ditto"], got.loc["Local"]
    assert (
        ditto["FedAGHN ahead by"] > 1
        and ditto["p, clients as if independent"] < 0.01
        and ditto["share of clients ahead"] == 1
    )
    assert local["FedAGHN ahead by"] == -5 and np.isnan(
        got.loc["FedAGHN", "p, clients as if independent"]
    )
    rows, clients = join(rows, run("fedamp", [70.0])), join(clients, clients_of("fedamp", base[:1]))
    one = standing(rows, "fedaghn", "table1", clients).loc["FedAMP"]  # of one client alone
    assert one["rank"] == 4 and np.isnan(one["FedAGHN ahead by"])


# ---------------------------------------------------------------- errors


def test_unknown_tables_papers_and_metrics_are_named():
    with pytest.raises(
        ValueError, match=r"fedaghn prints no acc_pct in 'table9'; it has \['apptable1'"
    ):
        compare(run("fedaghn", [1.0]), "fedaghn", "table9")
    with pytest.raises(
        ValueError, match="no published numbers for 'fedper'; there are those of pfedhn"
    ):
        reported("fedper")
    with pytest.raises(
        ValueError, match="paper 'fedagn' is unknown; did you mean 'fedaghn'. known are fedper"
    ):
        papers.paper("fedagn")


@pytest.mark.parametrize("name", papers.PAPERS)
def test_every_paper_holds_what_it_must(name):
    paper = papers.paper(name)
    assert paper.key == name and paper.own
    assert (
        set(paper.report) == {"select", "when", "average"}
        and paper.report["select"] in select.SELECT
    )
    assert set(paper.tables) <= set(paper.artefacts) and set(paper.when.values()) <= {
        "before",
        "after",
    }
    assert {c.needs for c in paper.claims} <= set(paper.artefacts)
    for artefact, about in paper.artefacts.items():
        assert about.data and set(about.data) <= set(data.list_datasets())
        assert set(about.show) <= {"compare", "standing", "curves", "spread"}
        if {"compare", "standing"} & set(about.show):
            said = reported(paper)
            assert about.metrics and set(about.metrics) <= set(said[said.table == artefact].metric)


@pytest.mark.parametrize("key", ["pfedhn", "pfedla", "flayer", "fedaghn"])
def test_what_medium_cuts_leaves_its_cells_comparable(key):
    """Whatever medium changes, data, network, partition and clients are those of the paper's cell."""
    about = papers.paper(key)
    planned = [s for s in about.planned(papers.Scope("medium")) if s.artefact in about.tables]
    cells = {(s.artefact, *c): e for s in planned for c, e in cells_of(s).items()}
    assert cells
    for (artefact, row, column), ours in cells.items():
        theirs = report.counterpart(key, artefact, row, column)
        assert theirs is not None and all(v(ours) == v(theirs) for v in report._ALIKE.values()), row


@pytest.mark.parametrize("key", ["pfedhn", "pfedla", "flayer", "fedaghn"])
def test_a_published_cell_is_held_against_a_run_of_its_own_row(key):
    """Also where one run serves several columns: its method and data are the cell's."""
    about = papers.paper(key)
    runs = {}
    for sweep in about.planned(papers.Scope("paper")):
        for (row, _), e in cells_of(sweep).items():
            runs.setdefault((sweep.artefact, row), set()).add(e.tags["column"])
    said = reported(key)
    for v in said[said.metric == "acc_pct"].itertuples():
        if own := runs.get((v.table, v.row)):
            held = report.counterpart(key, v.table, v.row, v.column)
            assert held.tags["row"] == v.row, v
            wanted = own & {v.column} or {c for c in own if c.startswith(v.column.split(",")[0])}
            assert held.tags["column"] in wanted, v


def cells_of(sweep):
    each = dataclasses.replace(sweep, seeds=sweep.seeds[:1]).experiments()
    return {(e.tags["row"], e.tags["column"]): e for e in each}


def test_other_test_data_are_another_partition():
    e = Experiment(partition="pfedla_noniid1", partition_args={"split": "63/7/30"})
    same = e.but(partition_args={}), e.but(partition_args={"split": "70/30"})
    other = e.but(partition_args={"split": "60/40"}), e.but(partition_args={"k": 3})
    alike = report._ALIKE["partition"]
    assert all(alike(x) == alike(e) for x in same) and all(alike(x) != alike(e) for x in other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pfedhn", "pfedla", "flayer", "fedaghn"])
def test_what_a_reader_overrode_stands_beside_no_published_number_and_under_no_verdict(name):
    (part,) = [p for p in committed.parts(name).values() if p.profile == "medium"]
    rows, paper = part.rows(), papers.paper(name)
    rows = rows[rows.metric == "acc_pct"]
    said = overrides.labelled("medium", {"rounds": 400})
    changed = rows.assign(profile=said)
    for table in paper.tables:
        of = rows[rows.artefact == table]
        if of.empty:
            continue
        own = changed[changed.artefact == table]
        got = report.compare(own, paper, table)
        assert got.reported.isna().all() and set(got.verdict) == {"no published number"}
        assert set(got.profile) == {said} and got.reproduced.notna().all()
        assert report.advantages(own, paper, table).empty
        assert drawing.with_published(own, paper, table).published.isna().all()
        assert drawing.beside_published(got) is None
        for column in report.reading(own, paper, table):
            assert "In the paper" not in column
            assert "not held against the paper's numbers" in column
    assert set(report.claims(paper, changed).verdict) <= {"not judged", "not run"}
