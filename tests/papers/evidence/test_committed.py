"""results/: what is kept and published comes back whole, damage is refused, and reading needs no data."""

import errno
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pfl_core.data import partition, pools
from pfl_core.data.pools import DatasetMissing, Pool, load
from pfl_core.experiments import build
from pfl_core.experiments.experiment import Experiment
from pfl_core.experiments.metrics import ROW_COLUMNS
from pfl_core.experiments.run import run
from pfl_core.experiments.sweep import sweep
from pfl_core.experiments.tune import tune
from pfl_core.util import paths, sums
from pfl_papers import places
from pfl_papers.compare.parameters import is_there
from pfl_papers.evidence import committed, copies, form, tables

TINY = dict(
    dataset="digits",
    model="mlp",
    model_args={"hidden": 4},
    clients=3,
    rounds=2,
    max_samples=20,
    lr=0.05,
)
KEYS = ["run", "artefact", "row", "column", "rounds", "when", "split", "average", "metric"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A project of its own, with nothing in it; the folder of results/ and figures/."""
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "home" / "results")
    return tmp_path / "home"


def experiment(
    artefact="fig2", row="fedavg", column="k=4", paper="fedper", profile="quick", **fields
):
    tags = dict(paper=paper, artefact=artefact, row=row, column=column, profile=profile)
    return Experiment(**TINY | fields, tags=tags)


def keep(paper="fedper", profile="quick", data="digits", **fields):
    """Rows of one run, kept as a notebook does, beside figures of the same notebook."""
    rows = sweep([experiment(paper=paper, profile=profile, **fields)])
    committed.save(rows, paper, profile, data)
    figures = paths.runs_root() / "figures" / paper / f"{profile}-{data}"
    figures.mkdir(parents=True, exist_ok=True)
    for file in ("fig2.png", "fig2.csv", "fig2.pdf"):
        (figures / file).write_text(f"{paper} {profile} {data} {file}")
    return rows


def read(name, **where):
    return committed.parts(**where)[name].rows()


def sorted_rows(rows):
    return rows.assign(value=rows.value.astype(float).round(4)).sort_values(
        KEYS, ignore_index=True
    )[ROW_COLUMNS]


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ---------------------------------------------------------------- there and back


def test_rows_come_back_as_they_were(home):
    cells = [
        experiment(),
        experiment("fig3", eval_after=True),
        experiment("fig3", "fedper", method="fedper", record=("cka",)),
    ]
    swept = sweep([*cells, experiment("table1", "again", column="x, y")])
    first = swept[swept.row == "fedper"].iloc[0].to_dict()
    derived = [
        first
        | dict(average="derived", metric="gap, points", value=1 / 3, when="", split="", rounds=2)
    ]
    derived.append(derived[0] | dict(row="other", dataset="cifar10", value=float("nan")))
    changed = swept[
        (swept.artefact == "table1") & (swept.metric == "acc_pct") & (swept["average"] == "client")
    ]
    changed = changed.assign(column="of one size", value=changed.value + 1)
    rows = pd.concat(
        [swept, pd.DataFrame(derived, columns=ROW_COLUMNS), changed], ignore_index=True
    )
    folder = committed.save(rows[ROW_COLUMNS[::-1]].assign(scratch=1), "fedper", "quick", "digits")
    back = read("fedper.quick-digits", folder=folder)
    pd.testing.assert_frame_equal(sorted_rows(back), sorted_rows(rows), check_exact=True)
    assert list(back) == ROW_COLUMNS and list(dict.fromkeys(back.artefact)) == list(
        dict.fromkeys(rows.artefact)
    )
    own = back[(back.artefact == "fig2") & (back["average"] != "derived")]
    fresh = swept[swept.artefact == "fig2"]
    keys = ["rounds", "when", "split", "average", "metric"]
    assert own[keys].to_numpy().tolist() == fresh[keys].to_numpy().tolist()  # line by line, too
    kept = tables.results(folder)
    assert len(kept.cells) == 4 and len(kept.derived) == 2 + len(changed) and len(kept.runs) == 2
    once = files(folder)
    committed.save(back, "fedper", "quick", "digits")
    assert files(folder) == once
    committed.save(rows[:0], "fedper", "quick", "digits")
    assert committed.parts(own=True) == {} and len(files(folder)) == 5


def test_what_is_known_of_a_run_stands_beside_it(home):
    rows = keep(model_args={"hidden": 5})
    committed.publish("fedper")
    known, r = tables.results(), run(experiment(model_args={"hidden": 5}))
    line = known.runs.loc[rows.run[0]]
    plain = json.loads(json.dumps(r.experiment.plain()))
    assert known.plain[rows.run[0]] == plain
    assert line.lr == "0.05" and line["model_args.hidden"] == "5" and line.clients == "3"
    assert {n: str(line[n]) for n in ("commit", "processor", "torch", "date", "executor")} == {
        n: str(r.meta[n]) for n in ("commit", "processor", "torch", "date", "executor")
    }
    pool = load("digits")
    (found,) = known.pools.to_dict("records")
    assert (
        found["checksum"] == pool.checksum == line.pool
        and found["samples"] == pool.n
        and found["shape"] == "28x28"
    )
    assert committed.experiment(r.id).id == r.id and committed.experiment("0" * 16) is None


def test_arrays_are_those_of_the_run(home):
    e = experiment(method="fedaghn", record=("weights",), eval_after=True)
    committed.save(sweep([e]), "fedaghn", "quick", "digits")
    committed.publish("fedaghn")
    r, back = run(e), tables.results().arrays(e.id)
    kept = [n for n in r.arrays if n.startswith("probe/") or n in ("rounds", "n/train", "n/test")]
    assert set(back) == {*kept, "before/test/correct", "after/test/correct"}
    assert all(np.array_equal(back[n], r.arrays[n]) for n in back)
    assert committed.arrays_named(e.id) == set(r.arrays)  # the store goes first
    (paths.store_folder() / e.id).rename(paths.store_folder() / "elsewhere")
    assert committed.arrays_named(e.id) == set(back)
    each, own = (
        committed.accuracies(e.id, "after", 2),
        r.clients.query("when == 'after' and split == 'test'"),
    )
    assert (
        each.acc_pct.tolist() == own[own["rounds"] == 2].acc_pct.tolist()
        and each.n.tolist() == r.arrays["n/test"].tolist()
    )
    with pytest.raises(KeyError):
        committed.arrays_of("0" * 16)


def test_rows_of_runs_that_nobody_has_are_refused(home):
    rows = keep()
    with pytest.raises(
        ValueError, match=r"run 00000000+ is neither in .*store nor in results/; compute it again"
    ):
        committed.save(rows.assign(run="0" * 16), "fedper", "quick", "digits")
    assert read("fedper.quick-digits", own=True).run.tolist() == rows.run.tolist()


# ---------------------------------------------------------------- publishing


def test_publish_takes_rows_and_figures_but_never_smoke(home):
    for profile, data in (("smoke", "digits"), ("quick", "digits"), ("paper", "cifar10+cifar100")):
        keep(profile=profile, data=data)
    keep("pfedhn")
    done = committed.publish("fedper")
    assert list(committed.parts()) == ["fedper.paper-cifar10+cifar100", "fedper.quick-digits"]
    figures = {
        f"figures/fedper/{f}/fig2.{k}"
        for f in ("paper-cifar10+cifar100", "quick-digits")
        for k in ("png", "csv")
    }
    small = {
        f"results/{n}" for n in ("runs.csv.gz", "cells.csv", "pools.csv", "derived.csv", sums.NAME)
    }
    large = {f"results/fedper.{n}.csv.gz" for n in ("history", "clients")}
    assert (
        set(files(home)) - {LOCK}
        == figures | small | large
        == {str(p.relative_to(home)) for p in done}
    )
    assert (
        home / "figures/fedper/quick-digits/fig2.png"
    ).read_text() == "fedper quick digits fig2.png"


def test_publishing_again_replaces_that_part_and_nothing_else(home):
    keep("pfedhn", lr=0.1), keep(profile="paper", seed=1)
    old = keep(seed=2)
    committed.publish("pfedhn"), committed.publish("fedper")
    before = files(home)
    committed.publish("fedper")
    assert files(home) == before  # equal content, equal bytes
    new = keep(seed=3)
    (paths.runs_root() / "figures/fedper/quick-digits/fig2.png").write_text("new")
    committed.publish("fedper")
    assert (home / "figures/fedper/quick-digits/fig2.png").read_text() == "new"
    assert read("fedper.quick-digits").run.unique().tolist() == new.run.unique().tolist()
    assert old.run[0] not in tables.results().runs.index and len(tables.results().runs) == 3
    changed = {name for name, raw in files(home).items() if raw != before[name]}
    untouched = {n for n in before if "pfedhn" in n or "fedper/paper" in n}
    assert untouched and not changed & untouched and files(home).keys() == before.keys()


LOCK = "runs/results.lock"  # one publishes at a time
AT_ONCE = """
import sys, time
from pathlib import Path
from pfl_papers.evidence import committed, tables
from pfl_papers import places

home, paper, other = Path(sys.argv[1]), *sys.argv[2:]
places.results_folder = lambda: home / "results"
merged = tables.with_parts

def slowly(*contents):  # after both have read, were it not for the lock
    while not (home / other).exists():
        time.sleep(0.01)
    time.sleep(1)
    return merged(*contents)

tables.with_parts = slowly
(home / paper).touch()
committed.publish(paper)
"""


def test_finished_runs_wait_unshown_for_the_others_of_their_table(home, monkeypatch, tmp_path):
    own = experiment(row="fedper", method="fedper", profile="medium", record=("cka",))
    cells = [experiment(profile="medium"), own]
    for i, e in enumerate(cells):
        rows = sweep([e])
        derived = rows[:1].assign(average="derived", metric="gap")
        waits = committed.wait(pd.concat([rows, derived]), "fedper", "medium", "digits")
        assert waits == [e.id] and committed.wait(rows, "fedper", "medium", "digits") == []
        assert committed.parts() == {} and committed.named_runs() >= {c.id for c in cells[: i + 1]}
    with monkeypatch.context() as elsewhere:  # a computer that has computed nothing
        elsewhere.setenv("PFL_RUNS", str(tmp_path / "elsewhere"))
        assert [committed.find(e) for e in cells] == [e.id for e in cells]
        again = sweep(cells, compute=False, found=committed.found)
        assert "probe/cka" in committed.arrays_of(cells[1].id)
        committed.save(again, "fedper", "medium", "digits")
        committed.publish("fedper")
    pd.testing.assert_frame_equal(
        sorted_rows(read("fedper.medium-digits")), sorted_rows(sweep(cells)), check_exact=True
    )
    shown = tables.results(home / "results").cells
    assert set(shown.profile) == {"medium"} and len(shown) == 2
    assert committed.wait(sweep(cells), "fedper", "medium", "digits") == []


def test_runs_that_are_never_published_never_wait(home):
    with pytest.raises(ValueError, match="smoke are never published"):
        committed.wait(sweep([experiment()]), "fedper", "smoke", "digits")
    assert not (home / "results").exists()


def test_two_that_publish_at_once_lose_nothing(home):
    keep("fedper"), keep("flayer", method="fedper")
    folder = places.results_folder().parent
    folder.mkdir(exist_ok=True)
    both = ("fedper", "flayer"), ("flayer", "fedper")
    words = [[sys.executable, "-c", AT_ONCE, str(folder), *pair] for pair in both]
    for process in [subprocess.Popen(w) for w in words]:
        assert process.wait() == 0
    assert set(tables.results().cells.paper) == {"fedper", "flayer"}
    assert tables.results().runs.shape[0] == 2


def test_published_runs_that_were_not_kept_go_only_if_it_is_said(home):
    rows = pd.concat([keep(seed=seed) for seed in (0, 1)])
    fig5 = keep(artefact="fig5", seed=2)
    committed.save(pd.concat([rows, fig5]), "fedper", "quick", "digits")
    committed.publish("fedper")
    before = files(home)
    for part, lost in ((rows, "1 cells, the first 'fig5, "), (fig5, "1 cells, the first 'fig2, ")):
        committed.save(part, "fedper", "quick", "digits")
        with pytest.raises(ValueError, match=rf"fewer runs than results/ of {lost}.*--replace"):
            committed.publish("fedper")
    committed.save(pd.concat([rows[rows.seed == 1], fig5]), "fedper", "quick", "digits")
    with pytest.raises(ValueError, match="1 cells, the first 'fig2, "):  # a seed less
        committed.publish("fedper")
    assert files(home) == before
    committed.publish("fedper", replace=True)
    assert set(read("fedper.quick-digits").seed) == {1, 2}


def test_published_numbers_of_runs_that_were_not_computed_go_only_if_it_is_said(home):
    rows = keep()
    blank = {"average": "derived", "split": "", "when": "", "value": 3.0}
    numbers = [rows[:1].assign(**blank, metric=metric) for metric in ("gain", "rho")]
    committed.save(pd.concat([rows, *numbers]), "fedper", "quick", "digits")
    committed.publish("fedper")
    before = files(home)
    for kept, lost in (([rows, numbers[0]], "rho"), ([rows, numbers[1]], "gain"), ([rows], "gain")):
        committed.save(pd.concat(kept), "fedper", "quick", "digits")
        with pytest.raises(ValueError, match=f"the first 'fig2, .*{lost}'.*--replace"):
            committed.publish("fedper")
    assert files(home) == before
    committed.publish("fedper", replace=True)
    assert not set(read("fedper.quick-digits").metric) & {"gain", "rho"}


def test_published_claims_are_not_replaced_by_those_of_fewer_artefacts(home):
    keep()
    claims = paths.runs_root() / "figures" / "fedper" / "quick-digits" / "claims.csv"
    for judged in (["holds", "open"], ["tie", "tie"]):  # another verdict is news
        pd.DataFrame({"says": ["a", "b"], "verdict": judged}).to_csv(claims)
        committed.publish("fedper")
    before = files(home)
    pd.DataFrame({"says": ["a", "b"], "verdict": ["tie", "not run"]}).to_csv(claims)
    with pytest.raises(ValueError, match="judges 1 claims, the published one 2.*--replace"):
        committed.publish("fedper")
    assert files(home) == before
    committed.publish("fedper", replace=True)
    assert files(home) != before


def test_a_number_that_one_run_lacks_leaves_those_of_others_as_they_are(home):
    keep(seed=0)
    folder = paths.runs_root() / "results" / "fedper.quick-digits"
    content = tables.results(folder).content()
    older = content.runs.assign(run="0" * 16, parameters="")  # a run of before it was recorded
    content.runs = pd.concat([content.runs.astype({"parameters": object}), older])
    content.cells = pd.concat([content.cells, content.cells.assign(run="0" * 16)])
    tables.write(folder, content)
    before = files(folder)
    tables.write(folder, tables.results(folder).content())
    assert files(folder) == before
    written = pd.read_csv(folder / "runs.csv.gz", dtype=str, keep_default_na=False)
    assert written.parameters.tolist() == [str(int(content.runs.parameters.iloc[0])), ""]


def test_a_run_of_two_papers_is_there_once(home):
    rows = keep("flayer"), keep("fedper"), keep("fedper", profile="paper")
    for paper in ("flayer", "fedper"):
        committed.publish(paper)
    assert len(tables.results().runs) == 1 and not list((home / "results").glob("flayer.*"))
    for name, of in zip(
        ("flayer.quick-digits", "fedper.quick-digits", "fedper.paper-digits"), rows, strict=True
    ):
        pd.testing.assert_frame_equal(sorted_rows(read(name)), sorted_rows(of), check_exact=True)


def test_nothing_to_publish_is_an_error(home):
    keep(profile="smoke")
    for paper in ("fedper", "flayer"):
        with pytest.raises(
            ValueError,
            match=f"nothing of '{paper}' to publish in .*runs; run its notebook at profile",
        ):
            committed.publish(paper)
    assert set(files(home)) <= {LOCK}


def test_rows_name_the_runs_to_keep(home):
    first, second, other = (
        keep().run[0],
        keep(profile="smoke", seed=1).run[0],
        keep("pfedhn", seed=2).run[0],
    )
    committed.publish("fedper")
    assert committed.named_runs(["flayer"]) == set() and committed.named_runs(["fedper"]) == {
        first,
        second,
    }
    for file in (paths.runs_root() / "results" / "fedper.quick-digits").iterdir():
        file.unlink()  # still named by results/
    assert committed.named_runs() == {first, second, other}


# ---------------------------------------------------------------- digests, damage, full disks


def everything(folder):
    kept = tables.results(folder)
    kept.content()
    return [kept.rows(*part) for part in kept.parts]


def test_a_file_that_another_process_is_writing_is_not_looked_at(home):
    keep()
    (folder,) = tables.kept_folders()
    found = tables.results(folder)
    (folder / "README.md").write_text("what the columns mean")
    assert tables.results(folder) is found
    with sums.replacing(folder / "new.csv") as file:
        assert tables.results(folder) is found
    Path(file.name).symlink_to("gone")  # listed, and renamed before it is looked at
    (folder / "new.csv").unlink()
    assert tables.results(folder) is found


def test_files_that_are_read_are_of_one_time(home):
    """Another process publishes between two of them."""
    keep(), keep("pfedhn", seed=1)
    committed.publish("fedper")
    before = tables.Results(home / "results")  # of its own, as in another process
    assert len(before.cells) == 1
    committed.publish("pfedhn")
    with pytest.raises(ValueError, match="results was written anew while it was read; read it"):
        before.content()
    assert len(tables.results(home / "results").content().cells) == 2


@pytest.mark.parametrize("name", [*form.TABLES, "npz"])
def test_a_published_file_that_was_changed_is_refused(home, name):
    keep("fedaghn", method="fedaghn", record=("weights",))
    committed.publish("fedaghn")
    folder = home / "results"
    path = folder / (name if (folder / name).exists() else f"fedaghn.{name}")
    raw = path.read_bytes()
    other = raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:]
    for harm in (other, raw + raw[-20:], raw[: len(raw) // 2], b""):
        path.write_bytes(harm)
        with pytest.raises(
            ValueError,
            match=rf"{path.name} is not as it was published .*git restore .*its notebook",
        ):
            everything(folder)
    path.unlink()
    with pytest.raises(ValueError, match=rf"{path.name} is missing .*git restore"):
        everything(folder)
    path.write_bytes(raw)
    assert len(everything(folder)) == 1
    with pytest.raises(ValueError, match="other.csv was not published"):
        (folder / "other.csv").write_bytes(raw)
        sums.read(folder / "other.csv")


def test_damage_counts_for_prune_too(home):
    keep()
    cells = paths.runs_root() / "results" / "fedper.quick-digits" / "cells.csv"
    cells.write_text(cells.read_text().replace("fig2", "fig3"))
    with pytest.raises(ValueError, match="cells.csv is not as it was published"):
        committed.named_runs()


@pytest.mark.parametrize(
    "raw", [b"", b"\x00\xff", b"a,b\n1,2,3\n", b"run,value\n1,x\n", b"run,paper\n"]
)
@pytest.mark.parametrize(
    "name", ["runs.csv.gz", "cells.csv", "derived.csv", "fedper.history.csv.gz", "fedper.npz"]
)
def test_damaged_files_are_named(home, name, raw):
    keep()
    committed.publish("fedper")
    (home / "results" / sums.NAME).unlink()  # nobody says what it should be
    (home / "results" / name).write_bytes(raw)
    with pytest.raises(
        ValueError, match=rf"{name} is damaged .*restore it from git, or delete its folder"
    ):
        everything(home / "results")


def test_digests_are_those_of_sha256sum_and_follow_what_is_there(home):
    keep("fedaghn", method="fedaghn", record=("weights",)), keep("pfedhn", seed=1)
    committed.publish("fedaghn"), committed.publish("pfedhn")
    check = ["sha256sum", "--check", "--strict", "--quiet", sums.NAME]
    subprocess.run(check, cwd=home / "results", check=True)
    keep("fedaghn", method="fedavg")  # without a probe: its .npz is gone
    committed.publish("fedaghn")
    subprocess.run(check, cwd=home / "results", check=True)
    assert set(sums.known(home / "results")) == {p.name for p in (home / "results").iterdir()} - {
        sums.NAME
    }
    assert not (home / "results" / "fedaghn.npz").exists()


def test_what_is_committed_is_whole_and_small():
    folder = paths.CHECKOUT / "results"
    there = {p.name: p.stat().st_size for p in folder.iterdir() if p.is_file()}
    for home in {p.parent for p in folder.rglob("*") if p.is_file()}:  # the benchmark's, too
        files = {p.name for p in home.iterdir() if p.is_file()}
        assert set(sums.known(home)) == files - {sums.NAME, "README.md"}, home
    of_papers = [size for name, size in there.items() if not name.startswith("methods.")]
    assert len(there) < 25 and sum(of_papers) <= 8e6
    whole = tables.results(folder).content()
    assert everything(folder) and whole.runs.run.is_unique and not whole.cells.duplicated().any()
    assert not whole.history.duplicated(["run", "rounds", "when", "split"]).any()
    assert not whole.clients.duplicated(["run", "rounds", "when", "split"]).any()
    named = set(whole.cells.run) | set(whole.derived.run)
    assert named == set(whole.runs.run) == set(whole.history.run) == set(whole.clients.run)
    assert set(whole.runs.pool) == set(whole.pools.checksum)
    failed = set(whole.runs.run[whole.runs.status != "done"])  # that diverged: a derived row each
    assert failed <= set(whole.derived.run) and not failed & set(whole.cells.run)


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


def test_a_full_disk_leaves_what_was_there(home, request):
    keep(), committed.publish("fedper")
    new = sweep([experiment(seed=1)])
    old, kept = files(home), files(paths.runs_root() / "results")
    request.getfixturevalue("full")
    with pytest.raises(
        OSError, match="cannot write .*csv.* what was there is as it was: make room"
    ):
        committed.save(new, "fedper", "quick", "digits")
    with pytest.raises(OSError, match="No space left"):
        committed.publish("fedper")
    assert (files(home), files(paths.runs_root() / "results")) == (old, kept)


# ---------------------------------------------------------------- without data


@pytest.fixture
def made_up(monkeypatch):
    """A data set of the test's own; what it gives is called for the present one, and may be changed."""
    digits, given = load("digits"), {}

    def pool(seed=0):
        order = np.random.default_rng(seed).permutation(digits.n)[:400]
        return Pool("made_up", digits.x[order], digits.y[order], digits.is_test[order], 10)

    def absent():
        raise DatasetMissing("made_up is in none of its places")

    given |= {"pool": pool, "now": pool}
    given["gone"] = lambda: given.update(now=absent) or pools._load.cache_clear()
    given["another"] = lambda: given.update(now=lambda: pool(1)) or pools._load.cache_clear()
    monkeypatch.setitem(
        pools._ENTRIES, "made_up", pools._Entry("made up", lambda root: given["now"]())
    )
    pools._load.cache_clear()
    yield given
    pools._load.cache_clear()


def published(**fields):
    rows = keep(dataset="made_up", **fields)
    committed.publish("fedper")
    for folder in paths.store_folder().glob("*/"):
        folder.rename(folder.with_suffix(".before-20260101-000000"))
    return rows


def test_published_rows_need_no_data_and_computing_does(home, made_up, capsys):
    e, other = experiment(dataset="made_up"), experiment(dataset="made_up", seed=1)
    rows, before, counts = published(), e.id, build.federation(e).counts()
    made_up["gone"]()
    assert e.id == before and committed.find(e) == before and committed.find(other) is None
    assert (
        is_there(e, train=False)
        and not is_there(e, train=True)
        and not is_there(other, train=False)
    )
    again = sweep([e.but(tags={"artefact": "fig9"})], found=committed.found)
    assert set(again.artefact) == {"fig9"}
    pd.testing.assert_frame_equal(
        sorted_rows(again.assign(artefact="fig2")), sorted_rows(rows), check_exact=True
    )
    pd.testing.assert_frame_equal(
        sorted_rows(read("fedper.quick-digits")), sorted_rows(rows), check_exact=True
    )
    assert len(committed.accuracies(e.id, "before", 2)) == 3
    assert (committed.label_counts(e) == counts).all()
    there = experiment(seed=7)
    for compute in (
        lambda: run(e),
        lambda: sweep([there, other], found=committed.found),
        lambda: sweep([e]),
    ):
        with pytest.raises(DatasetMissing, match="none of its places"):
            compute()
    made_by_now = {
        p.name for p in paths.store_folder().iterdir() if "before" not in p.name and p.is_dir()
    }
    assert made_by_now == set()  # nothing was trained before that was said
    with pytest.raises(DatasetMissing):
        tune(e, {"lr": [0.3]})
    committed.save(
        again, "fedper", "quick", "digits"
    )  # what was read may be kept and published again
    committed.publish("fedper", replace=True)
    assert tables.results().pools.samples.tolist() == [400] and set(
        read("fedper.quick-digits").artefact
    ) == {"fig9"}


def test_a_finished_run_of_the_store_needs_no_data(home, made_up):
    rows, e = published(), experiment(dataset="made_up")
    made_up["gone"]()
    aside = next(paths.store_folder().glob("*.before-*"))
    aside.rename(aside.with_suffix(""))
    assert run(e).id == e.id == rows.run[0]


def test_runs_over_another_copy_are_found(home, made_up):
    rows, e = published(), experiment(dataset="made_up")
    made_up["another"]()
    assert e.id != rows.run[0] == committed.find(e) and is_there(e, train=False)
    again = sweep([e], found=committed.found)
    pd.testing.assert_frame_equal(sorted_rows(again), sorted_rows(rows), check_exact=True)
    fresh = sweep([e])  # over the copy that is here, which goes before from then on
    assert set(fresh.run) == {e.id} == set(sweep([e], found=committed.found).run)
    committed.save(pd.concat([rows, fresh.assign(row="here")]), "fedper", "quick", "digits")
    committed.publish("fedper")
    assert sorted(copies.checksums("made_up")) == sorted(
        [made_up["pool"](0).checksum, made_up["pool"](1).checksum]
    )


def test_without_data_and_without_results_the_data_are_missing(home, made_up):
    made_up["gone"]()
    for ask in (
        lambda e: e.id,
        lambda e: sweep([e], found=committed.found),
        committed.find,
        committed.label_counts,
    ):
        with pytest.raises(DatasetMissing, match="none of its places"):
            ask(experiment(dataset="made_up"))


def test_it_is_said_how_a_copy_differs_from_the_official_set(home, monkeypatch):
    digits = load("digits")
    part = Pool("mnist", digits.x[:600], digits.y[:600], digits.is_test[:600], 10)
    monkeypatch.setitem(pools._ENTRIES, "mnist", pools._Entry("", lambda root: part))
    pools._load.cache_clear()
    rows = pd.concat([keep(), keep(dataset="mnist")])
    committed.save(rows, "fedper", "quick", "digits")
    committed.publish("fedper")
    said = [committed.copy_of(r) for r in rows.run.unique()]
    assert said == ["", f"600 of 70,000 samples, {part.is_test.sum()} of them for test"]
    assert committed.copy_of("0" * 16) == ""
    pools._load.cache_clear()


MIXED = (
    "dirichlet_columns",
    "pfedhn_classes",
)  # whose validation samples are drawn from all classes at once
DEALT = {
    "digits": [
        "dirichlet",
        "fedper_classes",
        "groups",
        "pfedla_noniid1",
        "pfedla_ring",
        "pfedla_target",
        "shards",
        *MIXED,
    ],
    "digits100": ["coarse", "dirichlet", "fedper_classes", "pfedla_noniid2", *MIXED],
    "raters_digits100": ["workers"],
}


@pytest.mark.parametrize(
    ("dataset", "scheme"), [(d, s) for d, schemes in DEALT.items() for s in schemes]
)
def test_clients_have_the_same_classes_where_only_their_numbers_are_known(home, dataset, scheme):
    keep(
        dataset=dataset,
        partition="workers" if dataset.startswith("raters") else "iid",
        clients=2,
        rounds=0,
    )
    committed.publish("fedper")
    e, whole = Experiment(dataset=dataset, partition=scheme, clients=10, seed=3), []
    for pool in (load(dataset), copies.labels_of(dataset)):
        split = build.split(e, pool)
        parts = (split.train, split.val, split.test)
        whole.append([partition.label_counts(pool.y, part, pool.classes) for part in parts])
    exact, dealt = whole
    if scheme in MIXED:
        assert np.abs(exact[0] - dealt[0]).sum() / exact[0].sum() / 2 < 0.05
        assert (exact[2] == dealt[2]).all()
    elif scheme == "workers":  # of whose ratings a part is drawn for test
        assert (sum(exact) == sum(dealt)).all()
    else:
        assert all((a == b).all() for a, b in zip(exact, dealt, strict=True))


def test_coarse_classes_of_clients_need_no_data():
    # CIFAR-100 is in no place of these tests; pools.csv has its labels.
    assert copies.coarse_classes("cifar100", 100).tolist() == [i // 5 for i in range(100)]
    assert copies.coarse_classes("digits100", 20).tolist() == [i // 2 for i in range(20)]
    with pytest.raises(DatasetMissing):
        copies.coarse_classes("flickr_aes", 20)
