"""Which number of a run is reported, how tables and claims say it, and what is published."""

import errno
import io
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pfl_core.experiments import store
from pfl_core.experiments.run import ROW_COLUMNS
from pfl_core.papers import fedper, report
from pfl_core.papers.report import claims, latex, markdown, pick, publish, save_rows, save_table, summary
from pfl_core.util import paths, sums


def series(values, row="fedper", column="a", run=None, rounds=None, split="test", **more):
    """Rows of one run: `values` at `rounds` (0, 1, ...)."""
    base = dict.fromkeys(ROW_COLUMNS, "") | dict(paper="fedper", artefact="fig2", when="before", mean="client", seed=0)
    base |= dict(metric="acc_pct", split=split, row=row, column=column, run=run or f"{row}/{column}/0", n_clients=4)
    return pd.DataFrame(
        [base | dict(value=v, round=r) | more for r, v in zip(rounds or range(len(values)), values, strict=True)],
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
    ("select", "value", "round"), [("last", 40, 4), ("last10", 46, 4), ("best_val", 60, 1), ("best_test", 70, 2)]
)
def test_four_rules(select, value, round):
    rows = join(series(TEST), series(VAL, split="val"))
    for frame in (rows, rows.sample(frac=1, random_state=1), rows[::-1].set_axis([0] * len(rows))):
        got = pick(frame, select)
        assert list(got.value) == [value] and list(got["round"]) == [round] and set(got.split) == {"test"}
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
    lengths = pick(join(series([3], rounds=[50]), series([7] * 30, "fedavg")), "last10").set_index("row").value
    assert lengths.to_dict() == {"fedper": 3, "fedavg": 7}
    early = pick(join(series([0, 4], rounds=[0, 10]), series([2, 4], "fedavg", rounds=[0, 5])), "last10")
    assert early.set_index("row").value.to_dict() == {"fedper": 2, "fedavg": 3}


def test_one_run_under_two_artefacts_counts_in_both():
    rows = join(series([1, 2]), series([1, 2], artefact="fig3"))
    for select in ("last", "last10", "best_test"):
        assert sorted(pick(rows, select).artefact) == ["fig2", "fig3"]


def test_pick_reads_only_what_it_is_asked_for():
    noise = [dict(when="after"), dict(mean="pooled"), dict(metric="acc_sd"), dict(split="train"), dict(split="val")]
    rows = join(series([1, 2]), *(series([90 + i, 91 + i], **n) for i, n in enumerate(noise)))
    assert pick(rows).value.tolist() == [2]
    assert pick(rows, when="after").value.tolist() == [91]
    assert pick(rows, mean="pooled").value.tolist() == [92]
    assert pick(rows, metric="acc_sd").value.tolist() == [93]
    assert pick(rows, metric="loss").empty


def test_best_val_needs_validation_data_of_every_run():
    with pytest.raises(ValueError, match="needs validation data, and these rows have none: fedper; use 'last'"):
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
    table = summary(pick(join(*seeds, cell(7.126, "fedavg", "k=4"), cell(99.994, "fedper", "k=10"))))
    assert list(table.index) == ["fedper", "fedavg"] and list(table.columns) == ["k=4", "k=10"]
    assert table.loc["fedper"].tolist() == ["52.00 ± 2.65", "99.99"]
    assert table.loc["fedavg"].tolist() == ["7.13", "not run"]


def test_summary_by_other_columns():
    rows = join(cell(1, "x", "a", method="fedavg"), cell(2, "x", "a", method="fedper", seed=1))
    assert summary(pick(rows), "method", "row").to_dict() == {"x": {"fedavg": "1.00", "fedper": "2.00"}}


def test_markdown_escapes_bars_and_leaves_a_plain_index_out():
    frame = pd.DataFrame({"a|b": ["1|2", 3.5], "c": ["", "50 %"]})
    assert markdown(frame).split("\n") == ["| a\\|b | c |", "| --- | --- |", "| 1\\|2 |  |", "| 3.5 | 50 % |"]
    named = pd.DataFrame({"k=4": ["1.0"]}, index=pd.Index(["fedper"], name="row"))
    assert markdown(named).split("\n") == ["| row | k=4 |", "| --- | --- |", "| fedper | 1.0 |"]


def test_latex_escapes_what_tex_reads():
    frame = pd.DataFrame({"K_P & 50%": [r"\x", "{~^}"], "#$": ["1 ± 2", 7]})
    assert latex(frame).split("\n") == [
        r"\begin{tabular}{ll}",
        r"\toprule",
        r"K\_P \& 50\% & \#\$ \\",
        r"\midrule",
        r"\textbackslash{}x & 1 $\pm$ 2 \\",
        r"\{\textasciitilde{}\^{}\} & 7 \\",
        r"\bottomrule",
        r"\end{tabular}",
        "",
    ]
    named = pd.DataFrame({"k": [1]}, index=pd.Index(["fed_per"], name="row"))
    assert r"fed\_per & 1 \\" in latex(named) and "{ll}" in latex(named)


def test_save_table_writes_three_forms(tmp_path):
    frame = pd.DataFrame({"k": [1.5]}, index=pd.Index(["fedper"], name="row"))
    save_table(frame, tmp_path / "new" / "table1")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["table1.csv", "table1.md", "table1.tex"]
    assert pd.read_csv(tmp_path / "new" / "table1.csv", index_col="row").equals(frame)
    assert (tmp_path / "new" / "table1.md").read_text() == markdown(frame) + "\n"
    assert (tmp_path / "new" / "table1.tex").read_text() == latex(frame)


def test_rows_survive_their_file(tmp_path):
    rows = join(series([1 / 3, 2.0], run="0123456789012345"), series([1e9], run="12e4567890123456", metric="loss"))
    path = tmp_path / "rows.csv"
    save_rows(rows[ROW_COLUMNS[::-1]].assign(scratch=1), path)
    assert path.read_text().splitlines()[0] == ",".join(ROW_COLUMNS)
    back = report.read_rows(path)
    assert back.value.tolist() == [0.3333, 2.0, 1e9] and back.run.tolist() == rows.run.tolist()
    assert back.when.tolist() == ["before"] * 3 and back.dataset.tolist() == [""] * 3
    once = path.read_bytes()
    save_rows(back, path)
    assert path.read_bytes() == once
    save_rows(rows[:0], path)
    assert path.read_text().splitlines() == [",".join(ROW_COLUMNS)]


# ---------------------------------------------------------------- claims


def judged(rows):
    return claims("fedper", rows, "quick").set_index("artefact")


def fig2(**gaps):
    """FedAvg at 50 and FedPer above it by `gaps`, keys as NET_k."""
    cells = []
    for key, gap in gaps.items():
        net, k = key.split("_")
        cells += [cell(50.0, "fedavg", f"{net}, k={k}"), cell(50.0 + gap, "fedper", f"{net}, k={k}")]
    return join(*cells)


def of_fig2(rows):
    got = claims("fedper", rows, "smoke")
    assert set(got.profile) == {"smoke"}
    return dict(
        zip(("wins", "shrinks"), got[got.artefact == "fig2"][["measured", "verdict"]].to_numpy().tolist(), strict=True)
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
    assert got["shrinks"] == ["A: +20.0 at k=4, +25.0 at k=10, B: -3.0 at k=4, -9.0 at k=10", "does not hold"]
    assert of_fig2(fig2(A_4=0.9))["wins"][1] == "does not hold"


def test_claims_average_seeds_and_read_the_last_round():
    rows = join(*(cell(v, "fedavg", "A, k=4", s) for s, v in enumerate((40, 60))), series([99, 52], "fedper", "A, k=4"))
    assert of_fig2(rows)["wins"] == ["A, k=4: +2.0 points", "holds"]


def test_claims_without_their_cells_are_not_run():
    every = claims("fedper", series([]), "quick")
    assert set(every.verdict) == {"not run"} and set(every.measured) == {""} and len(every) == len(fedper.CLAIMS)
    assert every.columns.tolist() == ["says", "artefact", "measured", "verdict", "profile"]
    assert of_fig2(fig2(A_4=9))["shrinks"] == ["", "not run"], "no k=10"
    got = of_fig2(fig2(A_10=9))
    assert got == {"wins": ["", "not run"], "shrinks": ["fedper / A, k=4 was not run", "not run"]}
    assert of_fig2(cell(9, "fedper", "A, k=4"))["wins"] == ["fedavg / A, k=4 was not run", "not run"]


OTHERS = {  # artefact: (row, column, value) that hold; the same that do not; what is said of the former
    "fig3": (
        [("fedper", "A", 4.0), ("fedavg", "A", 9.0)],
        [("fedper", "A", 9.0), ("fedavg", "A", 4.0)],
        "sd over clients 4.0 (FedPer), 9.0 (FedAvg)",
    ),
    "fig4": (
        [("K_P = 1", "A", 70.0), ("K_P = 2", "A", 74.9), ("K_P = 1", "B", 20.0), ("K_P = 2", "B", 18.0)],
        [("K_P = 1", "A", 70.0), ("K_P = 2", "A", 74.9), ("K_P = 1", "B", 20.0), ("K_P = 2", "B", 26.0)],
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


# ---------------------------------------------------------------- publishing


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A project whose runs hold rows and figures of two papers, one of them at smoke."""
    monkeypatch.setattr(paths, "runs_root", lambda: tmp_path / "runs")
    monkeypatch.setattr(paths, "results_folder", lambda: tmp_path / "home" / "results")
    (tmp_path / "home").mkdir()
    (tmp_path / "runs" / "results").mkdir(parents=True)
    for name in ("fedper.smoke-digits", "fedper.quick-digits", "fedper.paper-cifar10+cifar100", "pfedhn.quick-digits"):
        paper, folder = name.split(".")
        save_rows(series([1.0], run=f"run of {name}"), tmp_path / "runs" / "results" / f"{name}.csv")
        figures = tmp_path / "runs" / "figures" / paper / folder
        figures.mkdir(parents=True)
        for file in ("fig2.png", "fig2.csv"):
            (figures / file).write_text(f"{name} {file}")
    return tmp_path / "home"


def files(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_publish_copies_rows_and_figures_but_never_smoke(home):
    done = publish("fedper")
    folders = ("paper-cifar10+cifar100", "quick-digits")
    want = {f"results/fedper.{f}.csv" for f in folders} | {"results/SHA256SUMS"}
    want |= {f"figures/fedper/{f}/fig2.{kind}" for f in folders for kind in ("png", "csv")}
    assert files(home) == want == {str(p.relative_to(home)) for p in done}
    assert (home / "figures/fedper/quick-digits/fig2.png").read_text() == "fedper.quick-digits fig2.png"
    assert report.read_rows(home / "results/fedper.quick-digits.csv").run.tolist() == ["run of fedper.quick-digits"]


def test_publishing_again_replaces_the_files(home):
    publish("fedper")
    new = home.parent / "runs" / "figures" / "fedper" / "quick-digits" / "fig2.png"
    new.write_text("new")
    publish("fedper")
    assert (home / "figures/fedper/quick-digits/fig2.png").read_text() == "new"


def test_nothing_to_publish_is_an_error(home):
    for name in ("fedper.quick-digits", "fedper.paper-cifar10+cifar100"):
        (home.parent / "runs" / "results" / f"{name}.csv").unlink()
    for paper in ("fedper", "flayer"):
        with pytest.raises(ValueError, match=f"nothing of '{paper}' to publish in .*runs; run its notebook at profile"):
            publish(paper)
    assert files(home) == set()


def test_rows_name_the_runs_to_keep(home):
    publish("fedper")
    assert report.named_runs(["flayer"]) == set() and len(report.named_runs(["fedper"])) == 4  # as rows say, not files
    (home.parent / "runs" / "results" / "fedper.quick-digits.csv").unlink()  # still named by results/
    names = ("fedper.smoke-digits", "fedper.quick-digits", "fedper.paper-cifar10+cifar100", "pfedhn.quick-digits")
    assert report.named_runs() == {f"run of {n}" for n in names}


# ---------------------------------------------------------------- digests, full disks


def test_a_published_file_that_was_changed_is_refused(home):
    publish("fedper")
    csv = home / "results" / "fedper.quick-digits.csv"
    text = csv.read_text()
    lines = text.splitlines(keepends=True)
    for changed in (text.replace("1.0", "7.0", 1), text + lines[-1], "".join(lines[:-1])):
        assert changed != text
        csv.write_text(changed)
        with pytest.raises(
            ValueError, match=r"fedper.quick-digits.csv is not as it was published .*git restore .*publish it"
        ):
            report.read_rows(csv)
        with pytest.raises(ValueError, match="not as it was published"):
            report.named_runs()
    publish("fedper")
    assert csv.read_text() == text and len(report.read_rows(csv)) == len(lines) - 1
    shutil.copy(csv, home / "results" / "fedper.quick-mnist.csv")
    with pytest.raises(ValueError, match="fedper.quick-mnist.csv was not published"):
        report.read_rows(home / "results" / "fedper.quick-mnist.csv")


def test_digests_are_those_of_sha256sum_and_follow_what_is_there(home):
    publish("fedper"), publish("pfedhn")
    check = ["sha256sum", "--check", "--strict", "--quiet", sums.NAME]
    subprocess.run(check, cwd=home / "results", check=True)
    (home / "results" / "pfedhn.quick-digits.csv").unlink()
    publish("fedper")
    subprocess.run(check, cwd=home / "results", check=True)
    assert set(sums.known(home / "results")) == {p.name for p in (home / "results").glob("*.csv")}


def test_what_is_committed_is_as_it_was_published():
    folder = paths.results_folder()
    there = {p.name for p in folder.iterdir()} - {sums.NAME}
    assert set(sums.known(folder)) == there
    assert all(sums.read(folder / name) for name in there)


@pytest.fixture
def full(monkeypatch):
    """A disk that takes 100 bytes of a file, and no more."""

    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    def open_(path, mode="r", **how):
        real = original(path, mode, **how)
        if "w" in mode:
            real.write(b"x" * 100)
            real.close()
            return Full()
        return real

    original = Path.open
    monkeypatch.setattr(Path, "open", open_)


def test_a_full_disk_leaves_the_old_files(tmp_path, request):
    run_id = "0" * 16
    rows, csv, npz = series([1.0, 2.0]), tmp_path / "rows.csv", tmp_path / "rows.npz"
    (tmp_path / "store" / run_id).mkdir(parents=True)
    np.savez(tmp_path / "store" / run_id / "arrays.npz", rounds=np.arange(3))
    save_rows(rows, csv), store.save_arrays([run_id], npz, tmp_path / "store")
    old = {p: p.read_bytes() for p in (csv, npz)}
    request.getfixturevalue("full")
    for write in (lambda: save_rows(rows[:1], csv), lambda: store.save_arrays([], npz, tmp_path / "store")):
        with pytest.raises(OSError, match="cannot write .*rows.* what was there is as it was: make room"):
            write()
    assert {p: p.read_bytes() for p in tmp_path.glob("*.*")} == old


def test_publishing_on_a_full_disk_changes_nothing(home, request):
    publish("fedper")
    old = {name: (home / name).read_bytes() for name in files(home)}
    save_rows(series([2.0]), home.parent / "runs" / "results" / "fedper.quick-digits.csv")
    request.getfixturevalue("full")
    with pytest.raises(OSError, match="No space left"):
        publish("fedper")
    assert {name: (home / name).read_bytes() for name in files(home)} == old


@pytest.mark.parametrize("raw", [b"", b"\x00\xff", b"a,b\n1,2,3\n", b"run,value\n1,x\n", b"run,paper\n"])
def test_damaged_rows_are_named(tmp_path, raw):
    path = tmp_path / "fedper.quick-digits.csv"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="fedper.quick-digits.csv is damaged .*restore it from git, or delete it"):
        report.read_rows(path)
