"""Runs in TensorBoard: what it reads, of resumed runs, of runs that differ, and of own data."""

import sys

import numpy as np
import pytest

from pfl_core import Experiment, Federation, register_metric, run
from pfl_core.engine.simulate import Interrupted
from tests.commands import TINY, WORDS, said


def test_tensorboard_reads_what_the_history_holds(home, tmp_path, capsys):
    said(capsys, f"run --method fedper {WORDS} --tensorboard {tmp_path / 'logs'}")
    check_logged(scalars(next((tmp_path / "logs").iterdir())))


def test_tensorboard_shows_what_rows_hold_of_every_metric(home, tmp_path):
    from pfl_core.extras.logging import tensorboard

    register_metric("partly", lambda y, scores: np.nan if y[0] % 2 else scores.mean())
    e = Experiment(**TINY).but(metrics=("auc", "f1", "partly", "confusion"))
    h = run(e, on_round=tensorboard(e, tmp_path / "logs")).history
    logged = scalars(next((tmp_path / "logs").iterdir()))
    shown = ("acc_pct", "acc_balanced", "auc", "f1", "partly")
    rows = h[(h["average"] == "client") & h.metric.isin(shown)]
    for (when, split, metric), own in rows.groupby(["when", "split", "metric"]):
        got = logged[f"{when}/{split}/{metric}"]
        assert [s for s, _ in got] == own["rounds"].tolist()
        assert np.allclose([v for _, v in got], own.value, rtol=1e-5), metric
    assert len(set(rows.metric)) == 5


def scalars(folder):
    """{name: [(step, value)]} of what TensorBoard shows of a folder."""
    from tensorboard.backend.event_processing import event_accumulator as events

    seen = events.EventAccumulator(str(folder)).Reload()
    return {
        name: [(s.step, s.value) for s in seen.Scalars(name)] for name in seen.Tags()["scalars"]
    }


@pytest.mark.parametrize("stop", [0, 1])
def test_tensorboard_of_a_resumed_run_has_each_step_once(home, tmp_path, stop):
    from pfl_core.extras.logging import tensorboard

    e = Experiment(**TINY)
    log = tensorboard(e, tmp_path / "logs")
    with pytest.raises(Interrupted):
        run(e, on_round=lambda r, h: (log(r, h), r == stop)[1])
    run(e, on_round=tensorboard(e, tmp_path / "logs"))
    (folder,) = (tmp_path / "logs").iterdir()
    check_logged(scalars(folder))


@pytest.mark.parametrize(
    "changes", [{"lr": 0.5}, {"partition_args": {"alpha": 1.0}}, {"model_args": {"hidden": 9}}]
)
def test_tensorboard_has_a_folder_for_each_run(home, tmp_path, changes):
    from pfl_core.extras.logging import tensorboard

    e = Experiment(**TINY)
    for each in (e, e.but(**changes)):
        run(each, on_round=tensorboard(each, tmp_path / "logs"))
    assert len(list((tmp_path / "logs").iterdir())) == 2


def test_tensorboard_of_own_data_names_them(home, tmp_path):
    from pfl_core.extras.logging import tensorboard

    e = Experiment(dataset="own", model="mlp", rounds=1)
    with pytest.raises(ValueError, match="a Federation go together"):
        tensorboard(e, tmp_path)
    for seed in (0, 1):
        x = np.random.default_rng(seed).random((40, 8), dtype=np.float32)
        fed = Federation(x, np.arange(40) % 2, np.arange(40).reshape(4, 10))
        run(e, fed=fed, on_round=tensorboard(e, tmp_path / "logs", fed))
    assert len(list((tmp_path / "logs").iterdir())) == 2


def check_logged(logged):
    h = run(Experiment(**TINY)).history
    for mean, metric in (("client", "acc_pct"), ("pooled", "loss")):
        own = h[
            (h.when == "after")
            & (h.split == "test")
            & (h["average"] == mean)
            & (h.metric == metric)
        ]
        got = logged[f"after/test/{metric}"]
        assert [s for s, _ in got] == own["rounds"].tolist()
        assert np.allclose([v for _, v in got], own.value, rtol=1e-5)
    assert len(logged["upload"]) == 3


def test_a_logger_that_is_not_installed_is_named(monkeypatch, tmp_path, capsys, home):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    message = said(capsys, f"run {WORDS} --tensorboard {tmp_path}", 1)
    assert message.startswith("pfl_core run: logging needs the package tensorboard: pip install")
