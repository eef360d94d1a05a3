"""A study in a file: what it says, shares of it, what is found without computing, and its errors."""

import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from pfl_core import Experiment, Federation, grid, run, sweep, table, tune
from pfl_core.__main__ import main
from pfl_core.engine.simulate import Interrupted
from pfl_core.experiments import tune as tuning
from pfl_core.experiments import workers
from pfl_core.experiments.study import Study, shard

BASE = dict(dataset="digits", clients=3, rounds=1, model="mlp", max_samples=40, eval_every=1)
HEAD = """
seeds = [0, 1]
[base]
dataset = "digits"
clients = 3
rounds = 1
model = "mlp"
max_samples = 40
"""
ROWS = """
[rows.FedPer]
method = "fedper"
[rows.Local]
method = "local"
"""
COLUMNS = """
[columns."0.1"]
partition_args = { alpha = 0.1, split = "60/20/20" }
[columns."1"]
partition_args = { alpha = 1.0, split = "60/20/20" }
"""
TUNE = """
[tune]
choices = { lr = [0.01, 0.1] }
seeds = [100, 101]
keep = 1
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    """(text) -> the study of a file with this text."""
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))

    def made(text):
        (tmp_path / "study.toml").write_text(text)
        return Study.read(tmp_path / "study.toml")

    return made


@pytest.fixture
def nothing_computed(monkeypatch):
    """A call after which every run that would be computed is an error."""

    def forbid():
        monkeypatch.setattr(workers, "run", None)

    return forbid


def numbers(rows):
    return rows[rows.metric == "acc_pct"].value.to_numpy()


def test_a_study_is_the_grid_that_it_says(study):
    said = study(HEAD + ROWS + COLUMNS)
    rows = {"FedPer": {"method": "fedper"}, "Local": {"method": "local"}}
    of = {a: {"partition_args": {"alpha": float(a), "split": "60/20/20"}} for a in ("0.1", "1")}
    whole = grid(Experiment(**BASE), rows, of, (0, 1))
    mine = said._reported(said.cells())
    assert [(e.plain(), e.tags) for e in mine] == [(e.plain(), e.tags) for e in whole]
    found = said.run(device="cpu", jobs=1)
    np.testing.assert_array_equal(numbers(found), numbers(sweep(whole, device="cpu", jobs=1)))


@pytest.mark.parametrize("tuned", [False, True])
def test_shards_are_all_and_nothing_twice(study, tuned, nothing_computed):
    said = study(HEAD + ROWS + COLUMNS + TUNE * tuned)
    parts = [said.run((i, 3), device="cpu", jobs=1) for i in (1, 2, 3)]
    ids = pd.concat(parts).run.unique()
    assert len(ids) == 8 and sum(p.run.nunique() for p in parts) == 8
    nothing_computed()
    assert set(said.run(device="cpu", jobs=1).run) == set(ids)
    assert {r.id for r in said.results()} == set(ids)


def test_a_tuned_cell_is_what_tune_chooses(study):
    said = study(HEAD + ROWS + COLUMNS + TUNE)
    found = said.run(device="cpu", jobs=1)
    for cell in said.cells():
        best, _ = tune(cell, {"lr": [0.01, 0.1]}, seeds=[100, 101], keep=1, device="cpu", jobs=1)
        own = [r for r in said.results() if r.experiment.tags == cell.tags]
        assert {r.experiment.lr for r in own} == {best.lr}
        assert [r.experiment.seed for r in own] == [0, 1], "the reported seeds alone"
    assert set(found.seed) == {0, 1}


def test_without_seeds_a_cell_is_tuned_on_the_first_that_is_not_reported(study, monkeypatch):
    said = study(
        "seeds = [0, 100]"
        + HEAD[len("\nseeds = [0, 1]") :]
        + ROWS
        + COLUMNS
        + TUNE.replace("100, 101", "101")
    )
    said = replace(said, tune={"choices": said.tune["choices"]})
    ran = []
    monkeypatch.setattr(
        tuning, "sweep", lambda cells, **how: ran.extend(cells) or sweep(cells, **how)
    )
    found = said.run(device="cpu", jobs=1)
    assert {e.seed for e in ran} == {101} and set(found.seed) == {0, 100}


def test_what_is_finished_is_told_without_computing(study, nothing_computed):
    said = study(HEAD + ROWS + COLUMNS + TUNE)
    first = said.cells()[0]
    said.run((1, 4), device="cpu", jobs=1)
    nothing_computed()
    status = said.status()
    assert status.loc[first.tags["row"], first.tags["column"]] == "2 of 2"
    assert status.to_numpy().tolist().count(["2 of 2", "0 of 2"]) == 1
    assert len(said.results()) == 2 and table(*said.results()).cells.seeds.tolist() == [2]


def test_the_status_says_how_far_runs_are_that_have_begun(study):
    said = study(HEAD + ROWS + COLUMNS)
    first = said._reported(said.cells())[1]
    with pytest.raises(Interrupted):
        run(first, device="cpu", on_round=lambda r, h: r == 0)
    status = said.status()
    assert status.loc[first.tags["row"], first.tags["column"]] == "0 of 2; seed 1: round 1 of 1"
    assert status.to_numpy().ravel().tolist().count("0 of 2") == 3


def test_the_product_of_lists_makes_rows(study):
    said = study(HEAD + '[product]\nmethod = ["fedavg", "local"]\nlr = [0.01, 0.1]\n')
    assert list(said.rows) == [
        "fedavg, lr 0.01",
        "fedavg, lr 0.1",
        "local, lr 0.01",
        "local, lr 0.1",
    ]
    both = study(HEAD + ROWS + "[product]\nlr = [0.01, 0.1]\n")
    assert list(both.rows) == [f"{m}, lr {v}" for m in ("FedPer", "Local") for v in (0.01, 0.1)]
    assert [c.lr for c in both.cells()] == [0.01, 0.1] * 2


def test_own_data_and_methods_of_ones_own(study, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(120, 5)).astype(np.float32), rng.integers(0, 3, 120)
    Federation.dealt(x, y, "iid", clients=3).save(tmp_path / "mine")
    (tmp_path / "gentle_study.py").write_text(
        "from pfl_core import Method\n\n\nclass Gentle(Method):\n    name = 'gentle_study'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = 'plugins = ["gentle_study"]\ndata = "mine"\n[base]\ndataset = "own"\nrounds = 1\n'
    text += (
        'model = "mlp"\n[rows.Gentle]\nmethod = "gentle_study"\n[rows.FedAvg]\nmethod = "fedavg"\n'
    )
    said = study(text)
    found = said.run(device="cpu", jobs=1)
    by = {m: numbers(of) for m, of in found.groupby("method")}
    np.testing.assert_array_equal(by["gentle_study"], by["fedavg"])
    assert len(said.results()) == 2
    sys.modules.pop("gentle_study")


def test_the_words_of_the_command_line(study, tmp_path, capsys, monkeypatch):
    study(HEAD + ROWS + '[table]\nagainst = "Local"\n')
    monkeypatch.chdir(tmp_path)
    assert main(["table", "study.toml"]) == 1
    assert "pfl sweep study.toml" in capsys.readouterr().err
    assert main(["sweep", "study.toml", "--shard", "1/2", "--device", "cpu", "--jobs", "1"]) == 0
    assert "2 of 4 runs are finished, 0 of them diverged" in capsys.readouterr().out
    assert main(["sweep", "study.toml", "--device", "cpu", "--jobs", "1"]) == 0
    assert "- Local" in capsys.readouterr().out
    assert main(["sweep", "study.toml", "--status"]) == 0
    assert "2 of 2" in capsys.readouterr().out
    assert main(["table", "study.toml", "--latex", "--csv", "t.csv"]) == 0
    assert r"\toprule" in capsys.readouterr().out and len(pd.read_csv("t.csv")) == 2
    ids = [r.id for r in Study.read("study.toml").results()]
    assert main(["table", *ids, "--rows", "method", "--digits", "1"]) == 0
    assert "fedper" in capsys.readouterr().out


def test_a_run_that_diverges_ends_with_status_1(study, tmp_path, capsys):
    study(HEAD + ROWS + "[product]\nlr = [0.1, 1e30]\n")
    assert main(["sweep", str(tmp_path / "study.toml"), "--device", "cpu", "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert "8 of 8 runs are finished, 4 of them diverged" in out and "diverges (2 of 2)" in out


def test_a_cell_whose_choices_all_diverge_does_not_end_the_others(study, tmp_path, capsys):
    text = HEAD + ROWS + '[columns.x]\npartition_args = { split = "60/20/20" }\n'
    text += '[columns.y]\nlr = 1e30\npartition_args = { split = "60/20/20" }\n'
    said = study(text + "[tune]\nchoices = { momentum = [0.0, 0.5] }\nseeds = [100]\n")
    words = ["sweep", str(said.path), "--device", "cpu", "--jobs", "1"]
    assert main(words) == 1
    told = capsys.readouterr()
    assert "FedPer, y: tune: none of 2 choices ended" in told.out
    assert "4 of 8 runs are finished" in told.out and "4 runs ended with an error" in told.err
    assert said.status().loc["FedPer"].tolist() == ["2 of 2", "0 of 2"]
    assert main(["table", str(said.path)]) == 0
    told = capsys.readouterr()
    assert "4 of 8 runs are finished" in told.err and "x" in told.out


def test_a_run_that_raises_ends_with_status_1_in_its_own_shard(
    study, tmp_path, capsys, monkeypatch
):
    (tmp_path / "raises_study.py").write_text(
        "from pfl_core import Method\n\n\nclass R(Method):\n    name = 'raises_study'\n\n"
        "    def local(self, *args):\n        raise KeyError('x')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    said = study('plugins = ["raises_study"]' + HEAD + ROWS + '[rows.R]\nmethod = "raises_study"\n')
    words = ["sweep", str(said.path), "--device", "cpu", "--jobs", "1"]
    ends = {shard: main([*words, "--shard", shard]) for shard in ("1/3", "2/3", "3/3", "1/1")}
    assert ends == {"1/3": 0, "2/3": 1, "3/3": 1, "1/1": 1}  # of six runs the last two are its own
    assert "4 of 6 runs are finished" in capsys.readouterr().out
    sys.modules.pop("raises_study")


TUNED = {
    "no choices": ("seeds = [100]", r"allowed is {\"lr\""),
    "an unknown field": ("choices = { lrr = [1] }", "lrr"),
    "no list": ("choices = { batch = 8 }", "not a list of values"),
    "keep": ("choices = { batch = [8] }\nkeep = 'a'", "keep='a'"),
    "draws": ("draws = 0", "draws=0"),
    "when": ("choices = { batch = [8] }\nwhen = 'late'", "late"),
    "last": ("choices = { batch = [8] }\nlast = 'yes'", "last='yes'"),
    "one method's": ("choices = { method_args = [{ mu = 1 }] }", "mu"),
    "metric": ("choices = { batch = [8] }\nmetric = 3", "metric=3"),
    "a metric that is not measured": ("choices = { batch = [8] }\nmetric = 'auc'", "'auc' is unknown"),
    "when, a number": ("choices = { batch = [8] }\nwhen = 3", "when=3"),
    "when, never": ("choices = { batch = [8] }\nwhen = []", r"when=\[\]"),
    "when, lists": ("choices = { batch = [8] }\nwhen = [['before']]", "when "),
    "draw_seed": ("draws = 3\ndraw_seed = 'a'", "draw_seed='a'"),
    "draw_seed, a float": ("draws = 3\ndraw_seed = 0.0", "draw_seed=0.0"),
    "choices, a number": ("choices = 3", "choices=3"),
    "choices, a date": ("choices = { lr = [2026-01-01] }", "lr="),
    "choices of the word self": ("choices = { self = [1] }", "self"),
    "a seed that is none": ("choices = { batch = [8] }\nseeds = [99999999999999999999999]", "bits"),
}  # fmt: skip


@pytest.mark.parametrize("case", TUNED)
def test_what_any_cells_tuning_is_refused_for_is_said_when_a_study_is_read(study, case):
    """The last cell's, too: the first one is not trained for hours before it."""
    tune_, says = TUNED[case]
    split = 'partition_args = { split = "60/20/20" }\n'
    rows = f'[rows.P]\nmethod = "fedprox"\n{split}[rows.A]\n{split}'
    tune_ += "\nseeds = [100]" * ("seeds" not in tune_)
    with pytest.raises(ValueError, match=rf"study\.toml: .*{says}"):
        study(HEAD + rows + f"[tune]\n{tune_}\n")


def test_a_cell_without_validation_data_comes_before_all_training(study, nothing_computed):
    rows = '[rows.P]\npartition_args = { split = "60/20/20" }\n[rows.A]\n'
    said = study(HEAD + rows + "[tune]\nchoices = { batch = [8] }\n")
    nothing_computed()
    with pytest.raises(ValueError, match="leaves no validation data"):
        said.run(device="cpu", jobs=1)


TABLES = {
    "against = 'Locl'": "row 'Locl' is unknown",
    "against = 3": "against=3",
    "select = 'best'": "select 'best' is unknown",
    "select = ['last']": "select=",
    "average = 'mean'": "average 'mean'",
    "average = true": "average=True",
    "digits = -1": "digits=-1",
    "digits = 'two'": "digits='two'",
    "digits = true": "digits=True",
    "metric = 'acuracy'": "metric of table 'acuracy' is unknown",
    "metric = 3": "metric=3",
    "metric = 'auc'": r"'auc' is unknown; .*write metrics = \['auc'\] in base",
    "metric = 'acc_sd'\naverage = 'pooled'": "'acc_sd' is unknown; .*of average = 'pooled'",
    "metric = 'loss'": "'loss' is unknown; .*of average = 'client'",
    "when = 'sometimes'": "when of table 'sometimes' is unknown",
    "when = []": "when=",
    "when = 'tuned 1'": "when of table 'tuned 1' is unknown",
    "when = 'after'": "when of table 'after' is unknown",
}


@pytest.mark.parametrize("table", TABLES)
def test_what_no_table_could_be_is_said_before_training(study, table, tmp_path, capsys):
    (tmp_path / "study.toml").write_text(f"{HEAD}eval_after = false\n{ROWS}[table]\n{table}\n")
    with pytest.raises(ValueError, match=rf"study\.toml: .*{TABLES[table]}"):
        Study.read(tmp_path / "study.toml")
    assert main(["sweep", str(tmp_path / "study.toml"), "--device", "cpu"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("base", "table"),
    [
        ("", "when = 'after'\nmetric = 'acc_worst10'"),
        ("", "average = 'pooled'\nmetric = 'loss'\ndigits = 0"),
        ("", "metric = 'acc_balanced'\nselect = 'last10'"),
        ("metrics = ['auc']\nfinetune = { epochs = 2 }", "when = 'tuned 2'\nmetric = 'auc'"),
    ],
)
def test_what_a_table_of_these_runs_shows_is_allowed(study, base, table, tmp_path, capsys):
    said = study(f"{HEAD}{base}\n{ROWS}[table]\n{table}\n")
    assert main(["sweep", str(said.path), "--device", "cpu", "--jobs", "1"]) == 0
    assert "FedPer" in capsys.readouterr().out


RAISES = [  # mu * lr >= 2 is an error of FedProx when it is run
    "choices = { method_args = [{ mu = 0.1 }, { mu = 50.0 }] }",
    "choices = { method_args = [{ mu = 50.0 }, { mu = 0.1 }] }\nseeds = [100, 101]\nkeep = 1",
    "draws = 2\nchoices = { method_args = { mu = [50.0] } }\nmetric = 'acc_pct'",
]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("tune_", RAISES)
def test_a_cell_of_which_a_choice_raised_is_shown_as_it_was_computed(
    study, tune_, own, tmp_path, capsys, nothing_computed
):
    head = HEAD.replace("[base]", "[base]\nlr = 0.1")
    head += "" if own else 'partition_args = { split = "60/20/20" }\n'
    if own:
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(150, 5)).astype(np.float32), rng.integers(0, 3, 150)
        Federation.dealt(x, y, "iid", clients=3, split="60/20/20").save(tmp_path / "mine")
        head = 'data = "mine"' + head.replace('"digits"', '"own"')
    text = head + '[rows.FedProx]\nmethod = "fedprox"\n[tune]\n'
    said = study(text + tune_)
    computed = said.run(device="cpu", jobs=1)
    assert computed.seed.nunique() == 2
    nothing_computed()
    assert {r.id for r in said.results()} == set(computed.run)
    assert all(r.experiment.tags["row"] == "FedProx" for r in said.results())
    assert said.status().to_numpy().tolist() == [["2 of 2"]]
    capsys.readouterr()
    assert main(["table", str(said.path)]) == 0
    assert "FedProx" in capsys.readouterr().out
    other = study(text + tune_.replace("50.0", "60.0"))
    assert not other.results(), "it is another tuning, which is not finished"


def test_messages_stand_in_no_table(study, tmp_path, capsys):
    said = study(
        HEAD + 'partition_args = { split = "60/20/20" }\n[rows.A]\nmethod = "fedavg"\n'
        "[tune]\nchoices = { lr = [1e30, 0.1] }\n"
    )
    assert main(["sweep", str(said.path), "--device", "cpu", "--jobs", "1"]) == 0
    capsys.readouterr()
    for words, first in (
        (["table", "--latex"], "% Test accuracy"),
        (["table"], "Test accuracy"),
        (["sweep", "--status"], " "),
    ):
        assert main([words[0], str(said.path), *words[1:]]) == 0
        told = capsys.readouterr()
        assert told.out.startswith(first) and "tune: 1 of 2 choices did not end" in told.err
        assert "tune:" not in told.out and "1e+30" not in told.out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seeds = [0", "no TOML file"),
        (HEAD, "has no rows"),
        (HEAD + ROWS + "[reads]\n", "'reads'"),
        ("seeds = 3\n" + ROWS, "seeds is 3; allowed is a list"),
        (HEAD + ROWS.replace("fedper", "fedpr"), "fedpr"),
        (HEAD.replace("clients", "client") + ROWS, "client"),
        (HEAD + ROWS + "[product]\nlr = 0.1\n", "lr = 0.1; allowed is a list"),
        (HEAD + ROWS + "[product]\nlr = []\n", "allowed is a list"),
        (HEAD + "[rows]\nFedPer = 3\n", "row FedPer is 3"),
        (HEAD + ROWS + "[tune]\nchoice = 3\n", "'choice'"),
        (HEAD + ROWS + "[table]\nagaints = 'Local'\n", "againts"),
        (HEAD + ROWS + TUNE.replace("100", "1"), r"seeds \[1\], which are reported, too"),
        (
            'plugins = ["no_such_module"]\n' + HEAD[1:].replace("seeds = [0, 1]", "") + ROWS,
            "no such",
        ),
    ],
)
def test_what_a_file_cannot_say_is_an_error_before_anything_is_trained(study, text, says):
    with pytest.raises(ValueError, match=says):
        study(text)


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/0", "a/b", "-1/2"])
def test_a_shard_is_i_of_n(text):
    with pytest.raises(ValueError, match="allowed is i/n"):
        shard(text)


def test_without_computing_a_sweep_finds_what_is_there(tmp_path, monkeypatch):
    from pfl_core.experiments.sweep import Unfinished

    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    cells = [Experiment(**BASE), Experiment(**BASE, seed=1)]
    with pytest.raises(Unfinished, match="2 runs are not finished"):
        sweep(cells, compute=False)
    run(cells[0], device="cpu")
    with pytest.raises(Unfinished, match="1 runs"):
        sweep(cells, compute=False)
    assert sweep(cells[:1], compute=False).run.nunique() == 1


def test_metrics_are_run_tuned_and_shown_by_words_alone(study, capsys):
    more = 'metrics = ["auc", "f1"]\n'
    made = study(HEAD + more + ROWS + COLUMNS + TUNE + 'metric = "auc"\n')
    path = str(made.path)
    assert main(["sweep", path]) == 0
    for e, seed, found in made.found():
        best, _ = tune(
            e, {"lr": [0.01, 0.1]}, seeds=(100, 101), keep=1, metric="auc", compute=False
        )
        assert found.experiment.lr == best.lr and found.experiment.seed == seed
    capsys.readouterr()
    assert main(["table", path, "--metric", "auc"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Test AUC over ") and f" of {BASE['clients']} clients, client mean" in out
    assert main(["show", found.id]) == 0
    assert "f1_clients" in capsys.readouterr().out
    assert main(["list", "metrics"]) == 0 and "Macro F1" in capsys.readouterr().out
    words = (
        "run --partition iid --clients 2 --model mlp --rounds 1 --metrics auc,f1 --keep_scores true"
    )
    assert main(words.split()) == 0 and "balanced_acc" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="metric 'acu' is unknown"):
        study(HEAD + 'metrics = ["acu"]\n' + ROWS)
