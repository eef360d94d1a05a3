"""The command line `pfl`: the same Experiment and the same store as at the prompt; how objects look."""

import dataclasses
import json
import os
import pydoc
import subprocess
import sys
import zipfile
from datetime import UTC, datetime

import numpy as np
import pytest

import pfl_core
from pfl_core import (
    Experiment,
    list_datasets,
    list_methods,
    list_models,
    list_partitions,
    run,
    sweep,
)
from pfl_core.__main__ import described, fields, show, value
from pfl_core.engine import simulate
from pfl_core.experiments import prune, store
from pfl_core.experiments import run as runs
from pfl_core.experiments.listing import by_id, listed, side_by_side
from pfl_core.methods.base import make_method
from tests.commands import TINY, WORDS, said
from tests.made import main
from tools import notebooks

# -- run, show, list -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "meant"),
    [
        ("method", "fedper", "fedper"),
        ("dtype", "1", "1"),  # plain text stays text
        ("rounds", "20", 20),
        ("lr", ".1", 0.1),
        ("lr", "1e-3", 0.001),
        ("lr", "fast", "fast"),  # refused by Experiment
        ("shuffle", "false", False),
        ("shuffle", "False", False),
        ("partition_seed", "null", None),
        ("model_args", '{"width": 0.5}', {"width": 0.5}),
        ("model_args", "width=0.5,stem=cifar", {"width": 0.5, "stem": "cifar"}),
        ("record", "weights,cka", ("weights", "cka")),
    ],
)
def test_a_field_from_a_word(name, text, meant):
    assert value(name, text) == meant


def test_a_run_is_the_same_as_at_the_prompt(home, capsys):
    out = said(capsys, f"run --method fedper {WORDS}")
    e = Experiment(**TINY)
    assert [p.name for p in (home / "store").iterdir() if p.is_dir()] == [e.id]
    assert f"Result({e.id}: fedper on digits" in out and repr(e) in out
    found = run(e, on_round=lambda r, h: pytest.fail("trained again"))
    assert said(capsys, f"show {e.id[:5]}") == out[out.index("Result(") :]
    assert f"{found.summary().loc['before', 'last round']:.2f}" in out
    (line,) = said(capsys, "list runs").splitlines()
    assert (
        line.startswith(f"{e.id} ")
        and f"{found.history.value.iloc[0]:.2f}" not in line.partition(": ")[0]
    )
    ends = found.summary()["last round"]
    both = f": {ends['before']:.2f} % before, {ends['after']:.2f} % after local training"
    assert line.endswith(f" fedper on digits, seed 0, lr 0.01{both}") and f"{both}, done)" in out
    again = said(capsys, f"run --method fedavg --init_from {e.id[:6]} {WORDS}")
    assert (
        "init_from=Experiment(" in again and len(list(store.finished())) == 3
    )  # the source is run with its models kept


def test_the_summary_is_that_of_the_history(home):
    r = run(Experiment(**TINY | {"rounds": 3}))
    rows = r.history[
        (r.history["average"] == "client")
        & (r.history.when == "before")
        & (r.history.metric == "acc_pct")
    ]
    test = rows[rows.split == "test"].set_index("rounds").value
    got = r.summary().loc["before"]
    best = got["round of best"]
    assert got["last round"] == round(test[3], 2) and got["best round"] == round(test[best], 2)
    assert best == rows[rows.split == "val"].set_index("rounds").value.idxmax()


def test_every_field_is_an_option(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["run", "--help"])
    out = capsys.readouterr().out
    for name, f in fields().items():
        assert out.count(f"--{name} ") in (1, 2) and (
            "_" not in name or f"--{name.replace('_', '-')}" not in out
        )  # usage
        assert (
            f.metadata["doc"]
            and described(f).startswith(f.metadata["doc"])
            and "(default: " in described(f)
        )
    assert described(fields()["buffers"]).endswith(
        "; one of local, average, reset (default: local)"
    )
    assert (
        described(fields()["steps"]).count("count in epochs") == 1
        and "--recompute" in out
        and "revision" in out
    )
    assert described(fields()["shuffle"]).endswith("(default: true)")


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (
            "run --metod fedper",
            2,
            "pfl_core run: option of run: '--metod' is unknown; did you mean '--method'",
        ),
        ("run --method fedperr", 1, "did you mean 'fedper'"),
        ("run --rounds many", 1, "rounds='many'): got str, allowed is int"),
        ("run --device gpu", 1, "device 'gpu' is unknown"),
        ("run --init_from 123456", 1, "0 finished runs begin with '123456'"),
        ("run --alpha 0.1", 2, "run has no option --alpha; give it as --partition_args alpha=..."),
        ("list run", 1, "list 'run' is unknown; did you mean 'runs'"),
        ("show 12AB", 1, "'12AB' is no id of a run"),
        ("show 12ab", 1, "`python -m pfl_core list runs` shows all"),
        ("show 12ab 34cd", 1, "`python -m pfl_core list runs` shows all"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(words, code, line, home, capsys):
    message = said(capsys, words, code)
    assert line in message and message.startswith("pfl_core ") and message.count("\n") == 1


def test_all_lists_at_once_and_a_reader_that_leaves():
    command = f"{sys.executable} -m pfl_core list | head -3"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith("\nmethods:\napfl ") and done.stderr == ""


def test_a_run_is_found_by_the_beginning_of_its_id_without_a_look_at_others(home, monkeypatch):
    ids = [run(Experiment(**TINY | {"seed": seed})).id for seed in range(3)]
    looked, read = [], store._read
    monkeypatch.setattr(store, "_read", lambda folder, e: looked.append(folder) or read(folder, e))
    for start in {i[:n] for i in ids for n in (1, 2, 16)}:
        matching, looked[:] = sorted(i for i in ids if i.startswith(start)), []
        if len(matching) == 1:
            assert by_id(start).id == matching[0]
        else:
            with pytest.raises(ValueError, match="give more digits"):
                by_id(start)
        assert sorted(folder.name for folder in looked) == matching


# -- show several --------------------------------------------------------------------------------------------------------


def test_runs_are_shown_side_by_side(home, capsys):
    ids = [run(Experiment(**TINY | {"method": m})).id for m in ("fedper", "fedavg")]
    out = said(capsys, f"show {ids[0]} {ids[1][:8]}")
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert (
        out.splitlines()[0].split() == ids
        and lines["method"] == ["fedper", "fedavg"]
        and lines["lr"] == ["0.01"] * 2
    )
    assert (
        "rounds" not in lines
        and len(lines["date"]) == 4
        and {"commit", "processor", "before", "after"} <= set(lines)
    )


# -- at the prompt -------------------------------------------------------------------------------------------------------


def test_lists_have_a_line_each(capsys):
    for kind in (list_methods(), list_datasets(), list_models(), list_partitions()):
        assert isinstance(kind, dict) and repr(kind).splitlines()[0].split()[0] == next(iter(kind))
        assert len(repr(kind).splitlines()) == len(kind) and kind._repr_html_().count(
            "<tr>"
        ) == len(kind)


def test_objects_are_short_in_text_and_whole_in_html(home):
    e = Experiment(**TINY | {"tags": {"row": "<b>"}})
    r = run(e)
    assert max(len(repr(v)) for v in (e, r, make_method("fedprox"))) < 300
    page = e._repr_html_()
    assert "<th>partition_args</th>" in page and "&lt;b&gt;" in page and "momentum" not in page
    page = r._repr_html_()
    assert (
        r.id in page
        and f"{r.summary().loc['after', 'last round']:.2f}" in page
        and "..." not in page
    )
    assert (
        "<th>mu</th>" in make_method("fedprox", mu=0.5)._repr_html_()
        and "0.5" in make_method("fedprox", mu=0.5)._repr_html_()
    )


def test_help_begins_with_what_to_do():
    text = pydoc.render_doc(pfl_core, renderer=pydoc.plaintext)
    assert (
        text.index("list_methods()") < text.index("PACKAGE CONTENTS") and "docs/errors.md" in text
    )
    public = [
        getattr(pfl_core, name) for name in pfl_core.__all__ if callable(getattr(pfl_core, name))
    ]
    assert all(thing.__doc__ and len(thing.__doc__) > 20 for thing in public)


# -- many runs -----------------------------------------------------------------------------------------------------------


def test_the_list_says_what_differs(home, capsys):
    e = Experiment(**TINY)
    others = [
        e.but(seed=1),
        e.but(partition_args={"alpha": 5.0}),
        e.but(lr=0.5, epochs=2, model_args={"hidden": 7}),
    ]
    lines = {r.id: "" for r in map(run, [e, *others])}
    for line in said(capsys, "list runs").splitlines():
        lines[line.split()[0]] = line
    mean = lines.pop("setting")
    first, seed, alpha, rate = lines.values()
    assert " seed 0, lr 0.01: " in first and " seed 1, lr 0.01: " in seed
    assert " seed 0, lr 0.01, partition_args.alpha=5.0: " in alpha
    assert " seed 0, lr 0.5, epochs=2, model_args.hidden=7: " in rate
    seen = [run(x).history.query("metric == 'acc_pct' and split == 'test'") for x in (e, others[0])]
    seen = [h[h["average"] == "client"].groupby("when").value.last() for h in seen]
    told = [
        f"{np.mean(of):.2f} % (sd {np.std(of, ddof=1):.2f}) {when}"
        for when in ("before", "after")
        for of in [[h[when] for h in seen]]
    ]
    assert " fedper on digits, seeds 0, 1, lr 0.01: mean of 2: " in mean
    assert mean.endswith(f": {', '.join(told)} local training")
    today = f"{datetime.now():%Y-%m-%d} "
    assert all(today in line for line in lines.values())
    table = side_by_side([run(e), run(others[1])])
    assert (
        table.loc["partition_args.alpha"].iloc[0].tolist() == [0.5, 5.0]
        and "rounds" not in table.index
    )


def test_a_tie_is_shown_whole(home):
    e = Experiment(**TINY)
    pair = [
        run(x) for x in (e.but(partition_args={"alpha": 0.5}), e.but(partition_args={"alpha": 5.0}))
    ]
    a, b = listed(pair).values()
    assert "partition_args.alpha=0.5: " in a and "partition_args.alpha=5.0: " in b
    *_, c = listed([*pair, run(e.but(partition_args={"alpha": 5.0}, epochs=2))]).values()
    assert "alpha" not in c and "epochs=2" in c, "most runs have it"
    with_mu = [run(e.but(method="fedavg")), run(e.but(method="fedprox", method_args={"mu": 0.5}))]
    a, b = listed(with_mu).values()
    assert "mu" not in a and "method_args.mu=0.5: " in b


def test_a_mean_is_of_seeds_of_one_setting_alone(home):
    e = Experiment(**TINY)
    found = [
        run(x) for x in (e, e.but(seed=1), e.but(lr=0.5), e.but(lr=0.5, seed=3), e.but(epochs=2))
    ]
    lost = dataclasses.replace(
        found[3], meta=found[3].meta | {"status": "failed: not finite", "id": "0" * 16}
    )
    told = listed([*found[:3], lost, found[4]])
    means = {name: line for name, line in told.items() if name.startswith("setting ")}
    assert set(means) == {f"setting {r.setting[:8]}" for r in (found[0], found[2])}
    assert means[f"setting {found[2].setting[:8]}"].endswith("seeds 0, 3, lr 0.5: 1 diverged")


@pytest.mark.parametrize("stop", [0, 1])
def test_what_is_not_finished_says_how_far_it_is(home, capsys, stop):
    e = Experiment(**TINY).but(rounds=5, lr=0.3)
    with pytest.raises(simulate.Interrupted):
        run(e, on_round=lambda r, h: r == stop)
    far = f"round {stop + 1} of 5 is kept"
    (line,) = said(capsys, "list runs").splitlines()
    assert (
        line.startswith(f"{e.id} ")
        and f"fedper on digits, seed 0, lr 0.3: unfinished, {far}" in line
    )
    assert f"not finished ({far}): run it again" in said(capsys, f"show {e.id[:6]}", 1)
    (home / "store" / f"{e.id}.part" / "checkpoint.pt").write_bytes(b"damaged")
    assert "unfinished, round 0 of 5 is kept" in said(capsys, "list runs")
    (home / "store" / f"{e.id}.part" / "experiment.json").write_text("{")
    assert "unfinished" not in said(capsys, "list runs")
    result = run(e)
    assert "experiment.json" in {f.name for f in result.folder.iterdir()} and result.ok
    capsys.readouterr()  # what it says of the damaged checkpoint
    (line,) = said(capsys, "list runs").splitlines()
    assert "unfinished" not in line


def test_show_begins_with_what_matters(home, capsys):
    r = run(Experiment(**TINY))
    out = said(capsys, f"show {r.id}").splitlines()
    words = [line.split()[0] for line in out if line.strip()]
    assert words.index("after") < words.index("status") < words.index("wall_s")
    assert words.index("folder") < words.index("course") and len(set(words)) == len(words)


def test_dates_commits_and_processors_are_shown_where_they_are_known(home):
    r = run(Experiment(**TINY))
    told = dataclasses.replace(
        r, meta=r.meta | {"date": "2026-03-04T05:06:07+00:00", "commit": "abc", "processor": "CPU"}
    )
    line = listed([told])[r.id]
    assert line.startswith(
        f"{datetime(2026, 3, 4, 5, 6, tzinfo=UTC).astimezone():%Y-%m-%d %H:%M}  fedper on digits"
    )
    table = side_by_side([told])[r.id]
    assert "abc" in table.loc["commit"].to_numpy() and "CPU" in table.loc["processor"].to_numpy()


def test_one_broken_folder_does_not_stop_the_list(home, capsys):
    good = [run(Experiment(**TINY, seed=s)) for s in range(4)]
    bare, large, half, _ = (r.folder for r in good)
    whole = json.loads((bare / "experiment.json").read_text())
    del whole["meta"]["status"], whole["sha256"]
    (bare / "experiment.json").write_text(json.dumps(whole))
    whole = json.loads((large / "experiment.json").read_text())
    del whole["sha256"]
    (large / "experiment.json").write_text(json.dumps(whole))
    header = (
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000,), }".ljust(117) + b"\n"
    )
    with zipfile.ZipFile(large / "arrays.npz", "w") as z:
        z.writestr("rounds.npy", b"\x93NUMPY\x01\x00v\x00" + header)
    (half / "history.csv").write_text("a,b\n")
    out = said(capsys, "list runs")
    assert [line.split()[0] for line in out.splitlines()] == [good[3].id]
    assert said(capsys, f"show {good[3].id}")


def test_a_run_that_diverged_ends_with_its_message_and_another_status(home, capsys):
    assert main(["run", *WORDS.split(), "--lr", "1e30"]) == 1
    got = capsys.readouterr()
    (failed,) = store.finished()
    assert (
        got.err.endswith(f"pfl_core run: run {failed.id} {failed.meta['status']}\n")
        and "failed: " in got.err
    )
    assert "Empty DataFrame" not in got.out
    assert failed.meta["status"] in said(capsys, "list runs")
    steering = dataclasses.replace(failed, meta=failed.meta | {"status": "failed: \x1b[2Jgone\r"})
    show(steering)
    assert "\x1b" not in (out := capsys.readouterr().out) and "\\x1b[2Jgone" in out


@pytest.mark.slow
def test_runs_of_plugins_can_be_shown(home, tmp_path, monkeypatch, capsys):
    source = "from pfl_core import Method\n\n\nclass Own(Method):\n    name = 'own_of_cli'\n"
    (tmp_path / "own_methods.py").write_text(source)
    env = os.environ | {"PFL_RUNS": str(home), "PYTHONPATH": f"{notebooks.ROOT}"}

    command = [sys.executable, "-m", "pfl_core", "run", "--plugins", "own_methods"]
    command += ["--method", "own_of_cli", *WORDS.split()]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run_id = next(p.name for p in (home / "store").iterdir() if p.is_dir())
    assert "own_of_cli" in said(capsys, f"show {run_id}")  # read without its code
    assert main(["list", "runs", "--plugins", "own_method"]) == 0  # no such module
    told = capsys.readouterr()
    assert run_id in told.out and "own_method is not imported" in told.err
    monkeypatch.syspath_prepend(tmp_path)
    assert run_id in said(capsys, "list runs --plugins own_methods")
    assert "own_of_cli" in said(capsys, f"show {run_id} --plugins own_methods")
    del sys.modules["own_methods"]


def test_lists_import_nothing_that_draws_or_tests(tmp_path):
    code = (
        "import sys; from pfl_core.__main__ import main; main(['list', 'methods']); "
        "print(sorted(m for m in ('scipy.stats', 'sklearn', 'seaborn', 'matplotlib', 'nbformat') if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=notebooks.ROOT, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_ctrl_c_is_a_line(monkeypatch, capsys, home):
    def stopped(*args, **how):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run", stopped)
    assert "the same command goes on" in said(capsys, f"run {WORDS}", 130)


def test_ctrl_c_says_what_is_kept_and_how_to_go_on(monkeypatch, capsys, home):
    train = simulate._Run._train

    def interrupted(self, r):
        if r == 1:
            raise KeyboardInterrupt
        return train(self, r)

    monkeypatch.setattr(simulate._Run, "_train", interrupted)
    line = "fedavg, seed 0: 1 of 2 rounds are kept; run it again to go on from there"
    assert said(capsys, f"run {WORDS}", 130) == f"pfl_core run: interrupted; {line}\n"
    with pytest.raises(KeyboardInterrupt) as stopped:
        sweep([Experiment(**TINY), Experiment(**TINY, seed=1)])
    kept = "0 of 2 runs are finished; fedper, seed 0: 1 of 2 rounds are kept"
    assert stopped.value.__notes__ == [f"{kept}; run it again to go on from there"]


def test_recompute_is_passed_on(monkeypatch, home, capsys):
    asked = []
    monkeypatch.setattr(
        runs,
        "run",
        lambda e, **how: asked.append(how["recompute"]) or run(e, recompute=how["recompute"]),
    )
    said(capsys, f"run {WORDS}"), said(capsys, f"run {WORDS} --recompute")
    assert asked == [False, True]
    aside = [f for f in prune.find() if f.status == "aside"]
    assert len(aside) == 1 and ".before-" in aside[0].path.name  # what prune lists of it
