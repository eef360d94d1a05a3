"""The benchmark's page: every number is computed from the records, which are made up here."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from pfl_papers import places
from pfl_papers.bench import page, planned, record, sceptic, shown, tiers
from pfl_papers.bench.found import Found
from pfl_papers.bench.record import CLIENTS, HISTORY, RUNS, Record
from pfl_papers.bench.rows import EQUAL, FT1, ORACLE, REFERENCE, chosen
from pfl_papers.bench.settings import SETTINGS
from pfl_papers.papers import presets

K, N = 20, 100
SEEDS, TUNING = range(10, 20), (100, 101, 102)
LEADS = {"local": -6.0, "fedavg": 0.0, FT1: -4.0, "ditto": 3.5, "fedper": 0.0, "cfl": -3.0}
WHENS = ("before", "after", "tuned 1", "tuned 3", "tuned 10")


def made(seed, leads=LEADS, costly=("ditto",)):
    """A setting's record in which rows truly lead FedAvg + FT by `leads`; fine-tuning gains three points."""
    rng = np.random.default_rng(seed)
    parts = []
    for row, lead in leads.items():
        own = "after" if row == FT1 else "before"
        when = own if row == FT1 else "tuned 3"
        lines = [(row, 1.0), *[(f"{row}, {EQUAL}", 0.9)] * (row in costly)]
        parts += [
            reported(rng, name, s, own, when, lead, share) for name, share in lines for s in SEEDS
        ]
        parts.append(replace(Record.empty(), tuning=tuned(rng, row, when, lead)))
    parts += [record.prior(s, np.full(K, 30), np.full(K, N)) for s in (*TUNING, *SEEDS)]
    return Record.joined(parts)


def reported(rng, row, seed, own, when, lead, share):
    common = np.random.default_rng(seed).normal(0, 2)
    means = dict(
        zip(WHENS, share * (70 + lead + common + np.array([-3, -2, -1, 0, -0.5])), strict=True)
    )
    clients, history = [], []
    for moment, mean in means.items():
        correct = np.clip(np.round(rng.normal(mean, 0.5, K)), 0, N)
        val = mean + rng.normal(0, 0.3)
        line = dict(row=row, seed=seed, when=moment, val=val, balanced=mean - 1)
        clients.append(line | {"correct": " ".join(f"{c:.0f}" for c in correct)})
        for r in (20, 40) if not moment.startswith("tuned") else ():
            test = correct.mean() if r == 40 else mean - 5
            history.append(
                dict(row=row, seed=seed, when=moment, rounds=r, val=val - 40 + r, test=test)
            )
    run = dict(row=row, seed=seed, status="done", draw=1, when=when, own=own, run=f"{row}{seed}")
    run |= dict(rounds=40, gradients=160.0 * (3 if row == "ditto" else 1), extra=12.0)
    run |= dict(down=2e6, up=2e6, cpu_s=3.6)
    frames = dict(runs=[run], history=history, clients=clients)
    columns = dict(runs=RUNS, history=HISTORY, clients=CLIENTS)
    return replace(
        Record.empty(), **{n: pd.DataFrame(v, columns=columns[n]) for n, v in frames.items()}
    )


def tuned(rng, row, when, lead):
    lines = []
    for draw, seed in [(d, 100) for d in range(4)] + [(d, s) for d in (0, 1) for s in TUNING[1:]]:
        change = {} if draw == 0 else {"lr": 0.01 * 3**draw, "finetune": {"epochs": 10, "lr": 0.1}}
        line = dict(
            row=row, draw=draw, seed=seed, change=json.dumps(change), run=f"{row}{draw}{seed}"
        )
        line |= dict(
            status="failed: loss" if draw == 3 else "done", chosen=when if draw == 1 else ""
        )
        if draw != 3:
            for m, gain in zip(WHENS, (-3, -2, -1, 0, -0.5), strict=True):
                line[f"val.{m}"] = 70 + lead + gain - 2 * (draw != 1) + rng.normal(0, 0.1)
                line[f"test.{m}"] = line[f"val.{m}"] - 1
        lines.append(line | {"cpu_s": 3.6})
    return pd.DataFrame(lines)


@pytest.fixture(scope="module")
def found():
    return Found({name: made(i) for i, name in enumerate(("mild", "rotate", "text"))})


def test_every_row_is_in_one_family():
    listed = [row for names in shown.FAMILIES.values() for row in names.split()]
    assert sorted(listed) == sorted(row.name for row in chosen()) and set(listed) > set(
        presets.COMPARED
    )


def test_the_first_sentence_counts_what_the_tables_say(found):
    said = page.first_sentence(found)
    wins = {
        row: sum(found.tiers(s).tier[row] == tiers.BETTER for s in found.records)
        for row in found.methods
    }
    assert wins == {"ditto": 3, "fedper": 0, "local": 0, "cfl": 0} and FT1 not in wins
    assert said == (
        "3 of 4 methods never beat tuned FedAvg + FT by more than a point. Better in three: Ditto. "
        "3 of 7 settings are run."
    )
    assert found.twins(REFERENCE) == ["fedper"] and found.twins(REFERENCE, 1) == []
    apart = LEADS | {"fedper": 5.0}
    once = Found({"mild": made(0), "rotate": made(1), "text": made(2, apart)})
    assert once.twins(REFERENCE) == [] and once.twins(REFERENCE, 1) == ["fedper"]
    told = "**Equal to FedAvg + FT** in all settings run: no method; in all but one: FedPer."
    assert any(told in " ".join(line.split()) for line in page.findings(once))


def test_the_readme_says_the_same_in_short(found):
    counts = sceptic.counts(found).better
    served, ours = counts["as served"], counts["as declared"]
    rest = (
        "Were only methods fine-tuned whose papers do so, they would win "
        f"{served} of 12 comparisons, not {ours}. "
    )
    never = "of 4 equally tuned methods never beat fine-tuned FedAvg by more than a point"
    assert page.in_short(found) == (
        f"3 {never}; Ditto does in *mild*, *rotate* and *text*. "
        f"{rest * bool(served > ours)}3 of 7 settings are run ([the benchmark](docs/bench.md))."
    )
    most = {n: 5.0 + i for i, n in enumerate(["cfl", "fedper", "ditto", "apfl", "fedrep"])}
    start = {"local": -6.0, "fedavg": 0.0}
    one = page.in_short(Found({"mild": made(0, start | most)}))
    assert one.startswith(f"1 {never.replace('4', '6')}; FedRep does in *mild*; APFL does in")
    assert "; Ditto does in *mild*; 2 more in some setting. 1 of 7" in one
    del most["fedrep"]
    four = page.in_short(Found({"mild": made(0, start | most)}))
    assert "; FedPer does in *mild*; CFL does in *mild*. 1 of 7" in four and "more in" not in four
    rows = {"local": -6.0, "fedavg": 0.0}
    no, some = made(0, rows), made(0, rows | {"cfl": 5.0})
    assert "1 of 1 equally tuned" in (none := page.in_short(Found({"mild": no})))
    assert (
        "by more than a point. 1 of 7 settings is run, 1 fails the check declared before (" in none
    )
    both = page.in_short(Found({"mild": some, "rotate": some, "text": no}))
    assert "by more than a point; CFL does in *mild* and *rotate*. " in both
    assert "3 of 7 settings are run" in both
    assert page.in_short(Found({})).startswith("No setting of")


def test_findings_say_what_true_groups_give_and_why_where_a_cause_was_looked_for():
    rows = {"local": -6.0, "fedavg": 0.0, f"fedavg, {ORACLE}": 7.0, "cfl": 4.0, "flayer": 3.0}
    known = made(0, rows)
    means = known.accuracies().mean(axis=1)
    said = " ".join(page.findings(Found({"rotate": known, "text": made(0, LEADS)})))
    told = f"reaches {means[f'fedavg, {ORACLE}']:.1f} % in rotate (CFL: {means['cfl']:.1f})."
    assert told in " ".join(said.split()) and "Why FLAYER" not in said
    wins = page.findings(Found({"text": made(0, {"local": -6.0, "fedavg": 0.0, "flayer": 3.0})}))
    loses = page.findings(Found({"text": made(0, {"local": -6.0, "fedavg": 0.0, "flayer": 0.0})}))
    why = "- **Why FLAYER wins in text.**"
    assert [any(line.startswith(why) for line in some) for some in (wins, loses)] == [True, False]
    assert "true groups" not in " ".join(wins)


def test_cells_are_recomputed_by_hand(found):
    known = found.records["rotate"]
    for row, seed in (("ditto", 12), ("local", 17), (f"ditto, {EQUAL}", 10)):
        (run,) = known.runs[(known.runs.row == row) & (known.runs.seed == seed)].to_dict("records")
        of = known.clients[(known.clients.row == row) & (known.clients.seed == seed)]
        (text,) = of.correct[of.when == run["when"]]
        mean = np.mean([100 * int(c) / N for c in text.split()])
        assert known.accuracies().loc[row, seed] == pytest.approx(mean)
    table = shown.setting(found, "rotate")
    ref, mine = (found.tables["rotate"].loc[r] for r in (REFERENCE, "ditto"))
    assert table.loc["Ditto", "accuracy"] == f"{mine.mean():.1f}"
    assert table.loc["Ditto", "beside FedAvg + FT"].startswith(f"{(mine - ref).mean():+.1f} [")
    below = [known.per_client()["local", s] < known.per_client()[REFERENCE, s] - 5 for s in SEEDS]
    assert table.loc["Local", "below FedAvg + FT, %"] == f"{100 * np.mean(below):.1f}"
    assert table.loc["label prior", "accuracy"] == "30.0"
    assert list(table.index)[-2:] == [f"Ditto, {EQUAL}", "label prior"]
    assert found.hours("rotate") == pytest.approx((70 + 6 * 8) * 3.6 / 3600)


def test_the_page_says_all_that_is_run_and_what_is_not(found, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path)
    text = page.page(found)
    assert text.index(page.first_sentence(found)) < text.index("## How it is done")
    for name in found.records:
        assert f"## {name}: " in text
    left = text.split("## Not run yet")[1]
    for name in SETTINGS:
        assert (f"`python -m pfl_papers bench --settings {name}`" in left) == (
            name not in found.records
        )
    assert "hours first" in left and "nan" not in text.lower()
    (tmp_path / "bench").mkdir()
    pd.DataFrame([{"setting": "case", "hours": 1.35, "where": "2 cores"}]).to_csv(
        tmp_path / "bench" / record.PLAN, index=False
    )
    assert "on 2 cores." in page.page(found) and "| 1.4 |" in page.page(found).replace(
        "1.35", "1.4"
    )
    assert planned.published() == ({"case": 1.35}, "2 cores")


def test_without_rows_nothing_is_claimed():
    text = page.page(Found({}))
    assert "Nothing is claimed" in text and text.count("--settings ") == len(SETTINGS)
    assert "better than" not in text.split("## How")[0]


def test_what_tuning_chose_and_where_at_an_edge(found):
    table = shown.choices(found, "mild")
    assert table.loc["Ditto"].to_dict() == {
        "draw": "1",
        "chosen": "lr 0.03, FT lr 0.1",
        "read": "3 epochs",
        "validation": table.loc["Ditto", "validation"],
        "at an edge": "lr (least)",
        "diverged": "1",
        "refused": "",
    }


def test_readings_of_a_sceptic_by_hand(found):
    known = found.records["mild"]
    one = sceptic.one_epoch(known)
    assert one.loc["ditto"].equals(known.accuracies("tuned 1").loc["ditto"])
    assert one.loc[FT1].equals(known.accuracies("after").loc[FT1])
    assert sceptic.served(known).loc["ditto"].equals(known.accuracies("before").loc["ditto"])
    few = sceptic.few_seeds(known)
    assert list(few) == list(range(10, 15))
    equal = sceptic.equal_gradients(known)
    assert equal.loc["ditto"].equals(known.accuracies().loc[f"ditto, {EQUAL}"])
    assert equal.loc["fedper"].equals(known.accuracies().loc["fedper"])
    draw0 = known.tuning[
        (known.tuning.draw == 0) & (known.tuning.row == "cfl") & (known.tuning.seed == 100)
    ]
    best = max({*WHENS} - {"after"}, key=lambda w: draw0[f"val.{w}"].iloc[0])
    assert sceptic.untuned(known).loc["cfl", 100] == draw0[f"test.{best}"].iloc[0]
    for split, metric in (("val", "val"), ("test", "test")):
        got = sceptic.best_round(known, split).loc["fedper", 13]
        h = known.history[(known.history.row == "fedper") & (known.history.seed == 13)]
        pairs = [(v[metric], v["test"]) for v in h[h.when == "before"].to_dict("records")]
        end = known.accuracies().loc["fedper", 13]
        pairs.append((known.metric("val").loc["fedper", 13] if split == "val" else end, end))
        assert got == max(pairs)[1]
    counts = sceptic.counts(found)
    assert (counts.sum(axis=1) == 3 * 4).all() and counts.loc["as declared", "better"] == 3


def test_doubts_are_counted_from_the_words(found):
    said = " ".join(" ".join(page.doubts(found)).split())
    words, order = sceptic.words(found), sceptic.mean_ranks(found)
    counts, tau = sceptic.counts(found), stats.kendalltau(order["as declared"], order["no tuning"])
    assert said.startswith("- **The baseline.** 3 of 12 comparisons with FedAvg + FT are *better*.")
    for name in ("one epoch", "as served"):
        assert f"{counts.loc[name, tiers.BETTER]} " in said
    for name, lead in (("best test round", "test round, "), ("five seeds", "five seeds ")):
        assert f"{lead}{sum(words[name] != words['as declared'])}" in said
    assert f"tau {tau.statistic:.2f}." in said
    two = Found({"mild": made(0, {"local": -6.0, "fedavg": 0.0})})
    assert "tau" not in " ".join(page.doubts(two)) and "0 of 1 comparisons" in page.doubts(two)[0]


def test_edges_of_the_learning_rate_by_hand():
    found, highest, searches = Found.read(), 0, 0
    for known in found.records.values():
        for _, mine in known.tuning.groupby("row"):
            (chosen,) = set(mine.change[mine.chosen != ""])
            drawn = {c.get("lr") for c in map(json.loads, mine.change)} - {None}
            highest += len(drawn) > 2 and json.loads(chosen).get("lr") == max(drawn)
            searches += 1
    assert f"**Edges.** {highest} of {searches} searches" in " ".join(page.doubts(found))
    assert 0 < highest < searches


def test_ones_own_row_is_ranked_beside_the_published_ones(found, tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "results")
    assert "no reported runs of FedAvg" in page.ranked("mild")
    record.write(record.committed("mild"), found.records["mild"])
    record.write(record.kept("mild"), made(0, {"my_own": 1.0}))
    table = page.ranked("mild")
    assert all(name in table for name in ("my_own", "FedAvg + FT", "Ditto", "label prior"))


def test_rows_with_some_of_the_seeds(found, tmp_path, monkeypatch):
    # Neither own rows nor published ones "diverge" where the other has more seeds.
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "results")
    whole = found.records["mild"]
    record.write(record.committed("mild"), whole)

    def run(known, *seeds):
        names = ("runs", "history", "clients")
        few = {n: getattr(known, n)[getattr(known, n).seed.isin(seeds)] for n in names}
        return replace(known, **few)

    own = made(0, {"my_own": 1.0, "fedavg": 0.0})
    record.write(record.kept("mild"), run(own, 10, 11))  # the reference is always run with it
    both = Found.read(["mild"], own=True)
    judged = both.tiers("mild")
    assert (judged.tier != "diverged").all() and judged.difference["my_own"].seeds == 2
    assert judged.difference["ditto"].seeds == 10
    gap = both.tables["mild"].loc["ditto"] - both.tables["mild"].loc["fedavg"]
    assert judged.difference["ditto"].estimate == pytest.approx(gap.mean())
    table = shown.setting(both, "mild")
    assert table.loc["my_own", "accuracy"].endswith("(2 of 10 seeds)")
    assert "my_own" not in shown.overall(both).index
    names = ("runs", "history", "clients")
    later = replace(own, **{n: (t := getattr(own, n)).assign(seed=t.seed + 20) for n in names})
    record.write(record.kept("mild"), later)  # new seeds: on those the reference is new, too
    assert list(Found.read(["mild"], own=True).tables["mild"]) == list(range(30, 40))
    missing = replace(whole, runs=whole.runs[whole.runs.row != "cfl"])
    two = Found(found.records | {"mild": missing})
    assert "of 11 comparisons" in page.doubts(two)[0]
    assert ("mild", "cfl") not in sceptic.words(two).index


def test_a_diverged_run_is_said(found):
    known = found.records["mild"]
    gone = (known.clients.row == "fedper") & (known.clients.seed == 11)
    runs = known.runs.assign(
        status=[
            "failed" if r == "fedper" and s == 11 else v
            for r, s, v in zip(known.runs.row, known.runs.seed, known.runs.status, strict=True)
        ]
    )
    lost = Found({"mild": replace(known, clients=known.clients[~gone], runs=runs)})
    table = shown.setting(lost, "mild")
    assert (
        "(1 of 10 diverged)" in table.loc["FedPer", "accuracy"]
        and table.loc["FedPer", "word"] == "diverged"
    )
    assert lost.order("mild")[-1] == "fedper" and "diverged" in page.page(lost)


def test_publish_keeps_rows_and_refuses_to_lose_runs(tmp_path, monkeypatch, found):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "results")
    monkeypatch.setattr(places, "checkout", lambda what: tmp_path)
    (tmp_path / "results").mkdir()
    with pytest.raises(ValueError, match="nothing of the benchmark to publish"):
        record.publish()
    known = found.records["mild"]
    record.write(record.kept("mild"), known)
    record.write(record.kept("mild-digits"), known)
    files = record.publish()
    assert {f.parent for f in files} == {record.committed("mild")}
    assert sum(f.stat().st_size for f in files) < 1000 * len(known.runs)
    assert (
        Found.read()
        .tables["mild"]
        .equals(record.of_folder(record.kept("mild")).accuracies().loc[list(LEADS)])
    )
    assert known.runs.run.iloc[0] in record.named_runs()
    record.write(record.kept("mild"), replace(known.of(["cfl"])))
    record.publish()  # the others stay
    assert set(record.read("mild", own=False).lines()) == set(known.lines())
    fewer = known.of(["cfl"])
    record.write(record.kept("mild"), replace(fewer, runs=fewer.runs[fewer.runs.seed < 15]))
    with pytest.raises(ValueError, match="fewer runs of cfl"):
        record.publish()
    record.publish(replace=True)
    assert (record.read("mild", own=False).runs.row == "cfl").sum() == 5


def test_a_search_is_published_before_its_row_is_reported(tmp_path, monkeypatch, found):
    # A long setting may be run in several goes, on several computers.
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "results")
    monkeypatch.setattr(places, "checkout", lambda what: tmp_path)
    (tmp_path / "results").mkdir()
    known = found.records["mild"]
    record.write(record.kept("mild"), replace(record.Record.empty(), tuning=known.tuning))
    record.publish()
    assert not Found.read().records and "no reported runs" in page.ranked("mild")
    tuned = known.tuning.row.nunique()
    assert f"| mild | {tuned} rows tuned, 0 reported |" in page.page()
    some = known.of([REFERENCE, "cfl"])
    record.write(record.kept("mild"), some)
    record.publish()
    assert not Found.read().records  # the others are waiting
    assert len(record.read("mild", own=False).tuning) == len(known.tuning)
    assert f"| mild | {tuned} rows tuned, 2 reported |" in page.page()
    record.write(record.kept("mild"), known)
    record.publish()
    assert not known.waiting() and list(Found.read().records) == ["mild"]


def test_the_page_is_current():
    path = places.results_folder().parent / "docs" / "bench.md"
    assert path.read_text() == page.page(), "run: python -m tools.pages"
