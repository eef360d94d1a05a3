"""What goes wrong on real machines: a message, the damaged part set aside, finished work intact, never a wrong number."""

import itertools
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from jupyter_client import KernelManager

from pfl_core import Experiment, Federation, load, methods, sweep, table, tune
from pfl_core.data import pools as data
from pfl_core.engine import hooks, simulate
from pfl_core.engine.simulate import Interrupted
from pfl_core.experiments import workers
from pfl_core.experiments.run import run
from pfl_core.experiments.store import load_result
from pfl_core.methods.base import METHODS
from tests.core.experiments.setting import same

TINY = dict(
    partition_args={"alpha": 1.0},
    clients=4,
    model="mlp",
    model_args={"hidden": 8},
    batch=16,
    max_samples=40,
)
TINY |= dict(rounds=4, lr=0.1)


# -- divergence ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def spoiled():
    """FedAvg whose hook `hook` spoils what it returns from round `at` on; forgotten after the test."""

    class Spoiled(methods.base.Method):
        name = "spoiled"
        hook, at = "upload", 2

        def local(self, c, start):
            end = super().local(c, start)
            if self.hook == "local" and c.round >= self.at:
                end["fc.bias"][list(c.sel).index(2)] = float("nan")
            return end

        def upload(self, state, sel, start, end, weight):
            state = super().upload(state, sel, start, end, weight)
            if self.hook == "upload" and state.round >= self.at:
                state.server["fc.weight"][0, 0] = float("inf")
            return state

        def personal(self, state, c):
            models = {n: v.clone() for n, v in super().personal(state, c).items()}
            if self.hook == "personal" and c.round >= self.at:
                models["fc.weight"][3] = float("nan")
            return models

    yield Spoiled
    del METHODS["spoiled"]


@pytest.mark.parametrize(
    ("hook", "where"),
    [
        ("local", r"layer fc \(fc.bias\) of client 2 is not finite in round 2"),
        ("upload", r"layer fc \(fc.weight\) of the server is not finite in round 2"),
        ("personal", r"layer fc \(fc.weight\) of client 3 is not finite in round 2"),
    ],
)
def test_divergence_is_named_within_its_round(store, spoiled, hook, where):
    spoiled.hook = hook
    seen = []
    e = Experiment(**TINY, method="spoiled", eval_after=False)
    failed = run(e, on_round=lambda r, h: seen.append(r))
    assert not failed.ok and re.match(f"failed: spoiled: {where}", failed.meta["status"])
    kept = failed.history.query("metric == 'acc_pct' and average == 'client' and split == 'test'")
    last = (
        2 if hook == "upload" else 1
    )  # the evaluation that round 2 begins with is of models that are still sound
    assert kept["rounds"].tolist() == list(range(last + 1)) and kept.value.notna().all()
    assert seen == list(range(last + 1))


def test_the_last_rounds_divergence_is_no_number(store, spoiled):
    spoiled.at = TINY["rounds"] - 1  # nobody trains on what this upload leaves
    failed = run(Experiment(**TINY, method="spoiled", eval_after=False))
    assert (
        not failed.ok
        and "of the server" in failed.meta["status"]
        and failed.arrays["rounds"].tolist() == [0, 1, 2, 3]
    )


def test_a_resumed_run_that_diverges_keeps_its_history(store, spoiled, capsys):
    bad, good = Experiment(**TINY, method="spoiled"), Experiment(**TINY)
    with pytest.raises(Interrupted):
        run(bad, on_round=lambda r, h: r == 1)
    rows = sweep([bad, good])
    assert load_result(store / bad.id).arrays["rounds"].tolist() == [0, 1, 2]
    assert set(rows.run[rows.metric != "diverged"]) == {good.id}
    assert rows.value[rows.metric == "diverged"].tolist() == [2], "the last round with numbers"
    assert "(spoiled, seed 0) failed: spoiled: layer fc" in capsys.readouterr().out


def test_large_but_finite_is_no_divergence():
    huge = {"a.w": torch.full((2, 3), 3e38), "n": torch.tensor([1, 2])}
    simulate._check_finite(huge, SimpleNamespace(name="m"), 0, simulate.History(), torch.arange(2))
    huge["b"] = {"c": torch.tensor(float("nan"))}  # a number of the server's, not one a client
    with pytest.raises(simulate.Diverged, match=r"m: layer b \(b.c\) of the server"):
        simulate._check_finite(huge, SimpleNamespace(name="m"), 0, simulate.History())


# -- disks ---------------------------------------------------------------------------------------------------------------


@contextmanager
def room_for(size):
    """A disk on which no file grows beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


WIDE = Experiment(**TINY | {"model_args": {"hidden": 64}})  # a checkpoint of 200 kB


def test_full_disk_at_a_checkpoint(store, tmp_path):
    done, whole = run(Experiment(**TINY)), run(WIDE, store=tmp_path / "other")
    with pytest.raises(Interrupted):
        run(WIDE, on_round=lambda r, h: r == 1)
    with (
        room_for(50_000),
        pytest.raises(
            OSError, match=r"cannot write .*checkpoint.part .*too large.*set PFL_RUNS.*kept"
        ),
    ):
        run(WIDE)
    work = store / f"{WIDE.id}.part"
    assert (
        not (work / "checkpoint.part").exists()
        and simulate.restore(work / "checkpoint.pt", "cpu")[0].round == 2
    )
    same(load_result(store / done.id), done)
    same(run(WIDE), whole)


def test_full_disk_at_the_result(store, tmp_path, monkeypatch):
    whole = run(WIDE, store=tmp_path / "other")
    monkeypatch.setattr(simulate, "CHECKPOINT_EVERY", 60.0)
    with room_for(2_000), pytest.raises(OSError, match="cannot write .*set PFL_RUNS"):
        run(WIDE)
    assert not (store / WIDE.id).exists()
    same(run(WIDE), whole)


def test_full_disk_at_the_dataset_cache(tmp_path, monkeypatch, capsys):
    files = tmp_path / "ag_news"
    files.mkdir()
    for name in ("train.csv", "test.csv"):
        (files / name).write_text("".join(f"{i % 4 + 1},title {i},words {i}\n" for i in range(40)))
    with room_for(4_000):
        pool = data.load("ag_news", root=tmp_path)
    assert pool.n == 80 and "could not be kept" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ag_news"]


def test_a_file_where_a_folder_should_be(store, tmp_path):
    path = tmp_path / "store"
    path.write_text("")
    with pytest.raises(OSError, match=f"{path}.*set PFL_RUNS"):
        run(WIDE)
    assert path.read_text() == ""


def test_a_disk_that_does_not_answer_is_no_damage(store, monkeypatch):
    first = run(Experiment(**TINY))
    with monkeypatch.context() as patch:
        patch.setattr(
            "pathlib.Path.read_bytes",
            lambda self: (_ for _ in ()).throw(OSError(24, "Too many open files")),
        )
        with pytest.raises(OSError, match="open files"):
            run(Experiment(**TINY))
    same(run(Experiment(**TINY)), first)


# -- damage --------------------------------------------------------------------------------------------------------------


def flips(raw, count=25):
    """Copies of `raw` with one bit turned, at places spread over all of it, and some that end early."""
    draw = random.Random(0)
    for at in [draw.randrange(len(raw)) for _ in range(count)]:
        yield raw[:at] + bytes([raw[at] ^ 1 << draw.randrange(8)]) + raw[at + 1 :]
    yield from (raw[:at] for at in (0, 1, len(raw) // 2, len(raw) - 1))


def test_no_bit_of_a_checkpoint_can_turn_unseen(store):
    e = Experiment(**TINY, method="fedper")
    with pytest.raises(Interrupted):
        run(e, on_round=lambda r, h: r == 1)
    path = store / f"{e.id}.part" / "checkpoint.pt"
    state, history, *rest = simulate.restore(path, "cpu")
    refused = 0
    for raw in flips(path.read_bytes()):
        path.write_bytes(raw)
        try:
            again, h, *others = simulate.restore(path, "cpu")
        except (ValueError, KeyError):
            refused += 1
            continue
        assert (
            rest == others and again.round == 2 and h.rounds == history.rounds
        )  # a bit that says nothing
        assert all(torch.equal(v, hooks.tensors(again)[n]) for n, v in hooks.tensors(state).items())
    assert refused > 20


def test_a_checkpoint_of_another_form_is_set_aside(store, tmp_path, capsys):
    e = Experiment(**TINY)
    with pytest.raises(Interrupted):
        run(e, on_round=lambda r, h: r == 1)
    path = store / f"{e.id}.part" / "checkpoint.pt"
    torch.save({"round": 2, "server": {}}, path)
    same(run(e), run(e, store=tmp_path / "other"))
    assert "checkpoint.pt could not be read" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["experiment.json", "history.csv", "arrays.npz"])
def test_no_bit_of_a_result_can_turn_unseen(store, name, capsys):
    first = run(Experiment(**TINY))
    path = store / first.id / name
    whole, refused = path.read_bytes(), 0
    for raw in flips(whole):
        path.write_bytes(raw)
        again = load_result(path.parent, aside=False)
        if again is None:
            refused += 1
            continue
        assert (
            name != "history.csv" and again.meta == first.meta and again.experiment.id == first.id
        )
        same(again, first)
    assert refused > 15
    path.write_bytes(whole[:-40])
    same(run(Experiment(**TINY)), first)
    kept = store / f"{first.id}.damaged" / name
    assert kept.read_bytes() == whole[:-40] and "set aside" in capsys.readouterr().out


def test_no_bit_of_a_dataset_cache_can_turn_unseen(tmp_path):
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (30, 28, 28), dtype=np.uint8), np.arange(30) % 10
    path, refused = tmp_path / "mnist.npz", 0
    np.savez(path, x=x, y=y, is_test=np.arange(30) > 20)
    pool = data._read("mnist", tmp_path)
    for raw in flips(path.read_bytes()):
        path.write_bytes(raw)
        try:
            assert data._read("mnist", tmp_path).checksum == pool.checksum
        except data.DatasetDamaged as error:
            refused += str(path) in str(error) and "Delete or replace it" in str(error)
    assert refused > 20


def test_damaged_models_of_a_source_are_computed_again(store, tmp_path, capsys):
    e = Experiment(**TINY, init_from=Experiment(**TINY | {"lr": 0.3}, keep_models=True))
    first = run(e)
    path = store / e.init_from.id / "models.pt"
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    run(e.init_from).folder.exists()
    with pytest.raises(ValueError, match="models.pt is damaged"):
        run(e.init_from).model(0)
    (store / first.id).rename(tmp_path / "away")
    same(run(e), first)
    assert f"{e.init_from.id} could not be read" in capsys.readouterr().out


def test_a_source_that_failed_fails_what_starts_from_it(store, spoiled):
    bad = Experiment(**TINY, method="spoiled")
    rows = sweep([Experiment(**TINY, init_from=bad), Experiment(**TINY)])
    assert set(rows.run[rows.metric != "diverged"]) == {Experiment(**TINY).id}
    assert "init_from" in run(Experiment(**TINY, init_from=bad)).meta["status"]


def test_a_store_of_an_older_schema(store, capsys):
    first = run(Experiment(**TINY))
    old = store / "0123456789abcdef"
    shutil.copytree(store / first.id, old)  # an older version's run, under the id that it had there
    for folder in (old, store / first.id):
        z = json.loads((folder / "experiment.json").read_text())
        z["meta"]["schema"] = 0
        z.pop("sha256")
        (folder / "experiment.json").write_text(json.dumps(z))
    same(run(Experiment(**TINY)), first)
    assert "schema 0" in capsys.readouterr().out and (store / f"{first.id}.damaged").is_dir()
    assert sorted(p.name for p in old.iterdir()) == ["arrays.npz", "experiment.json", "history.csv"]


# -- time, processes, memory ---------------------------------------------------------------------------------------------


def test_clock_jumps(store, tmp_path, monkeypatch):
    e = Experiment(**TINY)
    whole = run(e, store=tmp_path / "other")
    with pytest.raises(Interrupted):
        run(e, on_round=lambda r, h: r == 1)
    for path in store.rglob("*"):
        os.utime(path, (2e9 + 1e8, 2e9 + 1e8))  # the clock was years ahead when this was written
    jumps = itertools.cycle([4e9, 0.0, 1e9])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    again = run(e)
    same(again, whole)
    assert (
        0 <= again.meta["wall_s"] < 600
        and (again.history.query("metric == 'train_s'").value.diff().dropna() >= 0).all()
    )


def test_out_of_memory_on_the_device(store, tmp_path, monkeypatch, capsys):
    cells = [Experiment(**TINY), WIDE, Experiment(**TINY, seed=1)]
    whole, context = run(WIDE, store=tmp_path / "other"), simulate.Context

    class Full(context):
        def __init__(self, engine, state, sel, round, *how):
            if engine.task.initial["fc1.weight"].shape[0] == 64 and round == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            super().__init__(engine, state, sel, round, *how)

    with monkeypatch.context() as patch:
        patch.setattr(simulate, "Context", Full)
        assert ended(sweep(cells)) == [cells[0].id, cells[2].id]
    assert "OutOfMemoryError: " in capsys.readouterr().out
    assert simulate.restore(store / f"{WIDE.id}.part" / "checkpoint.pt", "cpu")[0].round == 2
    sweep(cells)
    same(load_result(store / WIDE.id), whole)


RAISES = """
    import os
    from pfl_core import Method, methods
    from pfl_core.util.fields import choice

    class Odd(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one}\\n{two}")

    class Raises(Method):
        name = "raises"
        what: str = choice("nothing", "value", "memory", "odd", "system", "where", doc="what it raises")

        def local(self, c, start):
            if self.what == "value":
                raise ValueError("a bad value")
            if self.what == "memory":
                raise MemoryError("no memory")
            if self.what == "odd":
                raise Odd("a", "b")
            if self.what == "where":
                names = ("PFL_DATA", "PFL_RUNS", "PFL_OFFLINE")
                raise ValueError(str([os.getcwd(), *map(os.environ.get, names)]))
            if self.what == "system":
                raise OSError(28, "No space left on device")
            return super().local(c, start)
"""
SAID = {
    "value": "ValueError: a bad value",
    "memory": "MemoryError: no memory",
    "odd": ": a b",
    "system": "OSError: .*No space left",
}


@pytest.fixture
def raising(tmp_path, monkeypatch):
    """A base Experiment whose method raises what its hyper-parameter says."""
    (tmp_path / "raises_at_will.py").write_text(textwrap.dedent(RAISES))
    monkeypatch.syspath_prepend(tmp_path)
    yield Experiment(**TINY | {"rounds": 1}, plugins=("raises_at_will",), method="raises")
    del METHODS["raises"], sys.modules["raises_at_will"]


def ended(rows):
    return rows.run[~rows.metric.isin(["diverged", "failed"])].unique().tolist()


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_raises_does_not_end_its_sweep(jobs, raising, store, capsys):
    bad = [raising.but(method_args={"what": what}) for what in SAID]
    cells = [bad[0], raising, *bad[1:], raising.but(seed=1)]
    rows = sweep(cells, jobs=jobs)
    assert ended(rows) == [raising.id, cells[-1].id]
    assert f"fails ({len(bad)} of {len(cells)})" in repr(table(rows))
    out = capsys.readouterr().out
    for what, said in SAID.items():
        assert re.search(rf"'what': '{what}'.* failed: .*{said}", out), what
    assert out.count("failed") == len(SAID)
    assert ended(sweep(cells[:2], jobs=jobs)) == [raising.id]  # told once more
    assert "failed: ValueError: a bad value" in capsys.readouterr().out
    with pytest.raises(ValueError, match="a bad value"):  # all raise
        sweep(bad, jobs=jobs)


def test_a_run_that_raises_does_not_end_a_sweep_from_a_source(raising, store, capsys):
    start = Experiment(**TINY | {"rounds": 1}, keep_models=True)
    bad = raising.but(method_args={"what": "odd"}, init_from=start)
    rows = sweep([bad, bad.but(method="fedavg")], source=run(start))
    assert set(rows.method[rows.metric == "failed"]) == {raising.method}
    assert len(ended(rows)) == 1 and ": a b" in capsys.readouterr().out


def test_the_error_of_a_run_keeps_no_models(raising, store):
    found = workers.tried(raising.but(method_args={"what": "value"}))
    frames = [
        f
        for f, _ in traceback.walk_tb(found.error.__traceback__)
        if "start" in f.f_code.co_varnames
    ]
    assert frames and not any("start" in f.f_locals for f in frames)


@pytest.mark.slow
def test_kept_workers_have_the_folder_and_the_variables_of_the_call(raising, tmp_path, monkeypatch):
    told = [raising.but(method_args={"what": "where"}, seed=s) for s in (0, 1)]
    for name, offline in (("one", "1"), ("two", None)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        monkeypatch.setenv("PFL_RUNS", "runs")
        monkeypatch.setenv("PFL_DATA", str(tmp_path / name / "data"))
        monkeypatch.delenv("PFL_OFFLINE", raising=False)
        if offline:
            monkeypatch.setenv("PFL_OFFLINE", offline)
        with pytest.raises(ValueError) as seen:
            sweep(told, jobs=2)
        assert str(seen.value) == str([os.getcwd(), os.environ["PFL_DATA"], "runs", offline])
        for how in ({}, {"store": "mine"}):
            rows = sweep([raising, raising.but(seed=1)], jobs=2, **how)
            at = tmp_path / name / (how.get("store") or "runs/store")
            assert all((at / run_ / "experiment.json").is_file() for run_ in rows.run.unique())
    here = workers._pool.cache_info()
    assert here.currsize == 1  # it was never made anew


@pytest.mark.parametrize("how", [{}, {"store": "mine"}])
def test_a_result_finds_its_files_after_the_folder_changed(how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PFL_RUNS", "runs")
    found = run(Experiment(**TINY | {"rounds": 1}, keep_models=True), **how)
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    assert found.folder.is_absolute() and found.personal(0)


def test_the_home_of_nobody_is_named(tmp_path, monkeypatch):
    said = "'~no.such.user/x': ~no.such.user is the folder of no user .* write the path in full"
    e, cells = Experiment(**TINY), [Experiment(**TINY)]
    for use in (
        lambda s: run(e, store=s),
        lambda s: sweep(cells, store=s),
        lambda s: load("mnist", root=s),
        Federation.open,
        lambda s: e.but(init_from=s),
        Federation.from_pfllib,
    ):
        with pytest.raises(ValueError, match=said):
            use("~no.such.user/x")
    for name in ("PFL_RUNS", "PFL_DATA"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "~no.such.user/x")
            with pytest.raises(ValueError, match=f"{name}={said}"):
                run(e.but(dataset="mnist"))


def test_a_choice_that_raises_is_none(raising, store):
    base = raising.but(partition="iid", partition_args={"split": "70/10/20"})
    best, rows = tune(base, [{"method_args": {"what": w}} for w in ("value", "nothing")])
    assert best.method_args["what"] == "nothing" and rows.run.nunique() == 1


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), OSError(28, "No space left")])
def test_workers_without_shared_memory_are_told_to_be_none(error, store, monkeypatch):
    def refuses(*args, **how):
        raise error

    workers._pool.cache_clear()
    for name in ("ProcessPoolExecutor", "_begin"):
        with monkeypatch.context() as patch:
            if name == "_begin":  # the pool is there, its processes cannot be started
                patch.setattr(workers.ProcessPoolExecutor, "submit", refuses)
            else:
                patch.setattr(workers, name, refuses)
            with pytest.raises(RuntimeError, match=f"{error.strerror}.*/dev/shm.*use jobs=1"):
                sweep([Experiment(**TINY, seed=s) for s in (0, 1)], jobs=2)
    assert not list(store.glob("*.part"))


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["2>&-", ">&-", ">&- 2>&-", "2>/dev/full", ">/dev/full 2>&1"])
def test_a_terminal_that_is_gone_ends_no_run(closed, store, tmp_path):
    """Neither alone nor in processes."""
    good = [Experiment(**TINY | {"rounds": 2}, seed=s) for s in range(4)]
    (tmp_path / "many.py").write_text(
        "from pfl_core import Experiment, sweep\n"
        "from pfl_core.util import progress\n"
        "if __name__ == '__main__':\n"
        "    progress.LIVE |= dict(mininterval=0, delay=0)\n"
        "    progress.LOG_EVERY_S = 0.0\n"
        f"    tiny = {TINY | {'rounds': 2}!r}\n"
        "    for jobs in (1, 2):\n"
        "        cells = [Experiment(**tiny, seed=2 * jobs - n) for n in (1, 2)]\n"
        "        cells.append(cells[0].but(lr=1e30))\n"
        "        sweep(cells, jobs=jobs)\n"
        f"        open({str(tmp_path / 'end')!r}, 'a').write(str(jobs))\n"
    )
    env = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST")}
    command = f"{sys.executable} {tmp_path / 'many.py'} {closed}"
    subprocess.run(["sh", "-c", command], env=env, timeout=600, check=False)
    assert (tmp_path / "end").read_text() == "12"
    assert all(load_result(store / e.id).ok for e in good)


@pytest.mark.slow
def test_a_worker_that_is_killed(store, tmp_path, monkeypatch):
    (tmp_path / "dies_in_workers.py").write_text(
        "import multiprocessing, os, signal\n"
        "if multiprocessing.parent_process():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    cells = [Experiment(**TINY, seed=s, plugins=("dies_in_workers",)) for s in range(2)]
    with pytest.raises(RuntimeError, match="one of 2 worker processes ended.*run it again"):
        sweep(cells, jobs=2)
    assert sweep(cells).run.nunique() == 2  # the next sweep finds no lock and no half run


@pytest.mark.slow
def test_a_notebook_interrupted_and_run_again(store, tmp_path):
    cell = """
    import os, signal
    from pfl_core import Experiment, sweep
    from pfl_core.engine import simulate
    simulate.CHECKPOINT_EVERY = 0.0
    seen = []
    def on_round(r, h):
        seen.append(r)
        if len(seen) == AT:
            os.kill(os.getpid(), signal.SIGINT)
    rows = sweep([Experiment(**TINY, seed=s) for s in range(3)], on_round=on_round)
    rows[rows.metric != "train_s"].drop(columns="wall_s").to_csv(TO, index=False)
    """
    with tempfile.TemporaryDirectory(
        prefix="pfl-"
    ) as runtime:  # the path of a socket must be short
        manager = KernelManager(transport="ipc", connection_file=f"{runtime}/kernel.json")
        manager.start_kernel(env=os.environ | {"PFL_HEADLESS": "1"})
        client = manager.blocking_client()
        client.start_channels()

        def play(at):
            client.wait_for_ready(timeout=600)
            head = f"AT, TO, TINY = {at}, {str(tmp_path / 'rows.csv')!r}, {TINY!r}\n"
            how = dict(user_expressions={"n": "len(seen)"}, timeout=600, output_hook=lambda m: None)
            return client.execute_interactive(head + textwrap.dedent(cell), **how)["content"]

        try:
            assert play(8)["ename"] == "KeyboardInterrupt"  # in the second run, round 2
            assert len([p for p in store.iterdir() if p.suffix == ""]) == 1
            manager.restart_kernel(now=True)
            again = play(0)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
    assert (
        again["user_expressions"]["n"]["data"]["text/plain"] == "8"
    )  # of 15 rounds: those that were missing
    whole = sweep([Experiment(**TINY, seed=s) for s in range(3)], store=tmp_path / "other")
    whole = whole[whole.metric != "train_s"].drop(columns="wall_s").reset_index(drop=True)
    kept = pd.read_csv(tmp_path / "rows.csv", dtype={"run": str}, keep_default_na=False)
    pd.testing.assert_series_equal(kept.value, whole.value)
    assert kept.run.tolist() == whole.run.tolist()
